"""nbdnn's recurrent networks beside PyTorch's on the CPU: one process, the same threads, calls interleaved, medians.

    python bench/compare_torch_rnn.py [--quick] [--section NAME]... [--markdown FILE]

A ratio is PyTorch's time over nbdnn's: above 1, nbdnn is faster. One layer in one direction, float32, input as wide as
the hidden units. Inference is a forward, training a forward with its gradients by parameters, input and first states of
the gradient of y: PyTorch's `torch.nn` modules under autograd, nbdnn's `RNNBlock.apply` and `grad`. Problems are tuned
before they are timed, as in `compare_torch.py`, whose rows and tables these are.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from compare_torch import COLUMNS, Call, Row, cells, interleaved, markdown

import nbdnn
from nbdnn.cli_output import print_table
from nbdnn.cli_tuning import progress_bar
from nbdnn.device import cpu_device
from nbdnn.dispatch import dispatcher
from nbdnn.dispatch.tuner import tune
from nbdnn.problem_rnn import RnnProblem

MODES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
# steps, batch, hidden
SHAPES = (
    (50, 1, 64),
    (50, 1, 512),
    (100, 1, 256),
    (256, 1, 128),
    (256, 8, 64),
    (100, 8, 128),
    (50, 8, 512),
    (256, 32, 64),
    (100, 32, 128),
    (50, 32, 256),
    (128, 16, 256),
    (50, 32, 512),
)
SECTIONS = [f"{mode} {kind}" for mode in MODES for kind in ("inference", "training")]


class Networks:
    """PyTorch's module and nbdnn's block with the same parameters, and operands."""

    def __init__(self, mode: str, steps: int, batch: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.module = MODES[mode](hidden, hidden)
        self.block = nbdnn.RNNBlock("float32", hidden, 1, mode)
        w_x, w_h, b_x, b_h = (parameter.detach().reshape(-1) for parameter in self.module.parameters())
        self.w = torch.cat([w_x, w_h, b_x, b_h])
        self.x, self.dy = torch.randn(steps, batch, hidden), torch.randn(steps, batch, hidden)
        first = torch.zeros(1, batch, hidden)
        self.states = [first, first.clone()] if mode == "lstm" else [first]

    def inference(self) -> list[Call]:
        states = tuple(self.states) if len(self.states) > 1 else self.states[0]
        return [lambda: self.block.apply(self.w, self.x, *self.states), lambda: self.module(self.x, states)]

    def training(self) -> list[Call]:
        wanted = [tensor.clone().requires_grad_() for tensor in (self.x, *self.states)]
        inputs = [*self.module.parameters(), *wanted]

        def ours() -> object:
            *_, tape = self.block.apply(self.w, self.x, *self.states, training=True)
            return self.block.grad(tape, self.dy)

        def theirs() -> object:
            x, *states = wanted
            y, _ = self.module(x, tuple(states) if len(states) > 1 else states[0])
            return torch.autograd.grad(y, inputs, self.dy)

        return [ours, theirs]

    def check(self, calls: list[Call], *, training: bool) -> None:
        """That both compute the same: y, or the gradients by parameters and input."""
        mine, theirs = (call() for call in calls)
        pairs = [(mine[0], theirs[0])]  # type: ignore[index]
        if training:
            pairs = [(mine[0], torch.cat([part.reshape(-1) for part in theirs[:4]])), (mine[1], theirs[4])]  # type: ignore[index]
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(b.abs().max())))


def problems(mode: str, shape: tuple[int, int, int], *, training: bool) -> list[RnnProblem]:
    steps, batch, hidden = shape
    forward = RnnProblem("rnn_fwd", "f32", steps, batch, hidden, hidden, 1, mode, training=training)
    return [forward, replace(forward, op="rnn_bwd", training=False)] if training else [forward]


def measure(section: str, shape: tuple[int, int, int], rounds: int, budget_s: float) -> Row:
    mode, _, kind = section.partition(" ")
    training = kind == "training"
    posed = problems(mode, shape, training=training)
    chosen = [str(tune(problem, cpu_device(), dispatcher.database(), budget_s=budget_s).best) for problem in posed]
    networks = Networks(mode, *shape)
    with torch.set_grad_enabled(training):
        calls = networks.training() if training else networks.inference()
        networks.check(calls, training=training)
        (mine, other), busy = interleaved(calls, rounds)
    return Row(section, "T{} B{} H{}".format(*shape), str(posed[-1]), 1, mine, other, ", ".join(chosen), busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", metavar="TEXT", help=f"only those of {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="every third shape, fewer rounds")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning a problem (default 20)")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(cpu_device().threads)
    by_section: dict[str, list[Row]] = {}
    for section in SECTIONS:
        if not args.section or any(text in section for text in args.section):
            with progress_bar() as bar:
                shapes = bar.track(SHAPES[::3] if args.quick else SHAPES, description=section)
                rounds = 3 if args.quick else 7
                by_section[section] = [measure(section, shape, rounds, args.budget) for shape in shapes]
            print_table(section, COLUMNS, cells(by_section[section]), right=COLUMNS[2:5], footer=True)
    if args.markdown:
        environment = {
            "device": cpu_device().fingerprint,
            "nbdnn": nbdnn.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "threads": f"{cpu_device().threads} of {os.cpu_count()}",
        }
        args.markdown.write_text(markdown(by_section, environment))


if __name__ == "__main__":
    main()
