"""nbdnn beside PyTorch on the CPU: one process, the same threads, calls interleaved, medians.

    python bench/compare_torch.py [--quick] [--section NAME]... [--json FILE] [--markdown FILE]

A ratio is PyTorch's time over nbdnn's: above 1, nbdnn is faster. PyTorch runs in inference mode; each side counts with
the faster of its contiguous and channels_last forms. nbdnn's problems are tuned before they are timed (what the
database has is not measured again), and both are timed as a program calls them, from the outside, on operands that stay
where they are. A ratio with ~ is uncertain, and no part of a mean: other programs were in the way throughout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, fsum, log
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from time import perf_counter

import numpy as np
import torch

import nbdnn
from nbdnn.cli_output import duration, print_table
from nbdnn.cli_tuning import progress_bar
from nbdnn.device import cpu_device
from nbdnn.dispatch import dispatcher
from nbdnn.dispatch.timing import settle
from nbdnn.dispatch.tuner import tune
from nbdnn.problem import Problem
from nbdnn.problem_conv import ConvProblem, conv
from nbdnn.workloads import Layer, workload

BATCH_S = 10e-3
# Layers that the two networks lack, for every pass: shapes as a problem's text has them.
OTHERS = {
    "last layer, 1 filter": "n2c64h256w256:k1r3s3:p1x1:u1x1:d1x1:g1",
    "last layer, 3 filters": "n2c64h256w256:k3r3s3:p1x1:u1x1:d1x1:g1",
    "last layer, 5x5": "n1c32h256w256:k1r5s5:p2x2:u1x1:d1x1:g1",
    "last layer, 21 classes": "n4c64h128w128:k21r1s1:p0x0:u1x1:d1x1:g1",
    "decoder, 4x4 of stride 2": "n8c3h64w64:k64r4s4:p1x1:u2x2:d1x1:g1",
    "super-resolution, 12 filters": "n1c32h180w320:k12r3s3:p1x1:u1x1:d1x1:g1",
    "first layer, 7x7": "n8c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1",
    "first layer, 3x3": "n8c3h224w224:k64r3s3:p1x1:u1x1:d1x1:g1",
    "LeNet 1": "n128c3h32w32:k6r5s5:p0x0:u1x1:d1x1:g1",
    "LeNet 2": "n128c6h14w14:k16r5s5:p0x0:u1x1:d1x1:g1",
    "patches 4x4": "n8c3h224w224:k96r4s4:p0x0:u4x4:d1x1:g1",
    "patches 16x16": "n4c3h224w224:k768r16s16:p0x0:u16x16:d1x1:g1",
    "way up, 2x2": "n1c64h256w256:k64r2s2:p0x0:u2x2:d1x1:g1",
    "32 groups": "n4c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g32",
    "dilation 2": "n4c256h33w33:k256r3s3:p2x2:u1x1:d2x2:g1",
    "dilation 12": "n1c256h33w33:k256r3s3:p12x12:u1x1:d12x12:g1",
    "dilation 12, 2048 channels": "n1c2048h33w33:k256r3s3:p12x12:u1x1:d12x12:g1",
    "depthwise 5x5": "n4c240h28w28:k240r5s5:p2x2:u1x1:d1x1:g240",
    "depthwise 7x7": "n4c96h56w56:k96r7s7:p3x3:u1x1:d1x1:g96",
    "1x7": "n4c192h17w17:k192r1s7:p0x3:u1x1:d1x1:g1",
    "7x1": "n8c160h17w17:k160r7s1:p3x0:u1x1:d1x1:g1",
    "3x3 of stride 2": "n1c32h208w208:k64r3s3:p1x1:u2x2:d1x1:g1",
    "one axis": "n4c128h1w1000:k128r1s3:p0x1:u1x1:d1x1:g1",
    "one axis, speech": "n1c80h1w3000:k384r1s3:p0x1:u1x1:d1x1:g1",
    "one axis, waveform": "n8c1h1w16000:k64r1s80:p0x38:u1x4:d1x1:g1",
    "one axis, dilation 8": "n8c32h1w16000:k32r1s2:p0x4:u1x1:d1x8:g1",
    "one axis, depthwise": "n4c64h1w1024:k64r1s9:p0x4:u1x1:d1x1:g64",
}
_PATIENCE = 5
Call = Callable[[], object]


@dataclass
class Row:
    """One layer: times in microseconds a call."""

    section: str
    layer: str
    problem: str
    count: int
    nbdnn_us: float
    other_us: float
    candidate: str
    busy: bool = False

    @property
    def ratio(self) -> float:
        return self.other_us / self.nbdnn_us


def interleaved(calls: Sequence[Call], rounds: int) -> tuple[list[float], bool]:
    """(median microseconds of each call, whether other programs got in the way); each in turn runs for a batch.

    A batch in which the system took a processor from this process does not count, but for `_PATIENCE` times the rounds.
    """
    counts = []
    for call in calls:
        call()
        start = perf_counter()
        call()
        counts.append(max(1, round(BATCH_S / (perf_counter() - start))))
    every: list[list[float]] = [[] for _ in calls]
    quiet: list[list[float]] = [[] for _ in calls]
    for _ in range(_PATIENCE * rounds):
        for call, count, all_taken, taken in zip(calls, counts, every, quiet, strict=True):
            settle()
            # Until the caches are this call's own, and memory as fast as it gets: for some ms behind a pause a virtual
            # machine has been seen to take twice as long.
            for _ in range(1 + 3 * count // 2):
                call()
            before, start = getrusage(RUSAGE_SELF).ru_nivcsw, perf_counter()
            for _ in range(count):
                call()
            seconds = perf_counter() - start
            all_taken.append(seconds / count * 1e6)
            if getrusage(RUSAGE_SELF).ru_nivcsw - before <= 1:
                taken.append(all_taken[-1])
        if min(map(len, quiet)) >= rounds:
            break
    busy = min(map(len, quiet)) < min(3, rounds)
    return [median(taken) for taken in (every if busy else quiet)], busy


def arrays_of(problem: ConvProblem) -> list[np.ndarray]:
    """Random inputs of the problem, in operand order, as float32."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(o.shape, np.float32) for o in problem.operands if o.role == "in"]


FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


def ours(problem: ConvProblem, arrays: Sequence[torch.Tensor]) -> Call:
    """The call of nbdnn's public function that poses `problem`, on tensors."""
    a, b = (array.contiguous(memory_format=FORMATS[problem.channels_last]) for array in arrays[:2])
    where, groups = (problem.pad, problem.stride, problem.dilation, problem.mode), problem.groups
    match problem.op:
        case "conv_fwd":
            if not problem.epilogue:
                return lambda: nbdnn.dnn_conv(a, b, *where, num_groups=groups)
            return lambda: nbdnn.dnn_conv(a, b, *where, num_groups=groups, bias=arrays[2], activation="relu")
        case "conv_bwd_data":
            return lambda: nbdnn.dnn_gradinput(a, b, problem.x_shape, *where, num_groups=groups)
    return lambda: nbdnn.dnn_gradweight(a, b, problem.w_shape, *where, num_groups=groups)


def theirs(problem: ConvProblem, arrays: Sequence[torch.Tensor]) -> list[Call]:
    """PyTorch's ways of doing the same: contiguous, and channels_last."""
    pad = [before for before, _ in problem.pad]
    stride, dilation, groups = list(problem.stride), list(problem.dilation), problem.groups
    backward = torch.ops.aten.convolution_backward

    def call(format_: torch.memory_format) -> Call:
        a, b = (array.contiguous(memory_format=format_) for array in arrays[:2])
        if problem.op == "conv_fwd":
            if not problem.epilogue:
                return lambda: torch.nn.functional.conv2d(a, b, None, stride, pad, dilation, groups)
            return lambda: torch.nn.functional.conv2d(a, b, arrays[2], stride, pad, dilation, groups).relu_()
        if problem.op == "conv_bwd_data":
            x = torch.empty(problem.x_shape, dtype=a.dtype).contiguous(memory_format=format_)
            wanted, dy, w = [True, False, False], b, a
        else:
            w = torch.empty(problem.w_shape, dtype=a.dtype).contiguous(memory_format=format_)
            wanted, dy, x = [False, True, False], b, a
        return lambda: backward(dy, x, w, None, stride, pad, dilation, False, [0, 0], groups, wanted)

    return [call(format_) for format_ in FORMATS.values()]


@dataclass
class Comparison:
    """What all sections share."""

    rounds: int
    budget_s: float
    rows: list[Row]

    def against_torch(self, section: str, layers: Sequence[Layer]) -> None:
        for layer in self.each(section, layers):
            forms = [layer.problem, replace(layer.problem, layout="nhwc", w_layout="", y_layout="")]
            candidates = [self.tune(form) for form in forms]
            arrays = [torch.from_numpy(array) for array in arrays_of(layer.problem)]
            with torch.inference_mode():
                calls = [*(ours(form, arrays) for form in forms), *theirs(layer.problem, arrays)]
                self._check(layer.problem, *(call() for call in calls[1:3]))
                times, busy = interleaved(calls, self.rounds)
            mine, best, form = min(zip(times, candidates, forms, strict=False))
            self.add(section, layer, mine, min(times[2:]), f"{best}, {form.layout}", busy)

    def against_float32(self, section: str, dtype: torch.dtype, layers: Sequence[Layer]) -> None:
        """nbdnn's 16-bit forward beside its own float32: a ratio above 1 is what 16 bits win."""
        short = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
        for layer in self.each(section, layers):
            narrow = replace(layer.problem, dtype=short, compute="")
            candidate, _ = self.tune(narrow), self.tune(layer.problem)
            wide = [torch.from_numpy(array) for array in arrays_of(layer.problem)]
            calls = [ours(narrow, [array.to(dtype) for array in wide]), ours(layer.problem, wide)]
            (mine, other), busy = interleaved(calls, self.rounds)
            self.add(section, replace(layer, problem=narrow), mine, other, candidate, busy)

    def guess(self, section: str, layers: Sequence[Layer]) -> None:
        """The guess of an empty database beside the best measured: the ratio is what not tuning costs."""
        for layer in self.each(section, layers):
            result = tune(layer.problem, cpu_device(), dispatcher.database(), budget_s=self.budget_s)
            best, default = result.rows[result.best.key], result.rows[result.guess.key]
            busy = "noisy" in (best.status, default.status)
            self.add(section, layer, best.median_us, default.median_us, f"{result.guess} for {result.best}", busy)

    def each(self, section: str, layers: Sequence[Layer]) -> Iterator[Layer]:
        with progress_bar() as bar:
            yield from bar.track(layers, description=section)

    def tune(self, problem: Problem) -> str:
        return str(tune(problem, cpu_device(), dispatcher.database(), budget_s=self.budget_s).best)

    def _check(self, problem: ConvProblem, mine: torch.Tensor, other: torch.Tensor | tuple) -> None:
        other = other if isinstance(other, torch.Tensor) else next(each for each in other if each is not None)
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3 * problem.reduction_length**0.5)

    def add(self, section: str, layer: Layer, mine: float, other: float, candidate: str, busy: bool) -> None:
        self.rows.append(Row(section, layer.name, str(layer.problem), layer.count, mine, other, candidate, busy))


def convolutions(name: str, batch: int = 1, *, train: bool = False) -> list[Layer]:
    """Those of a network's different problems."""
    return [layer for layer in workload(name, batch, train=train) if isinstance(layer.problem, ConvProblem)]


def sections(quick: bool) -> dict[str, Callable[[Comparison, str], None]]:
    """Every section by name. `quick` keeps every third layer."""

    def some(layers: Sequence[Layer]) -> Sequence[Layer]:
        return layers[::3] if quick else layers

    def forward(name: str, batch: int):
        return lambda comparison, section: comparison.against_torch(section, some(convolutions(name, batch)))

    def fused(name: str):
        layers = [replace(n, problem=replace(n.problem, epilogue=("bias", "relu"))) for n in convolutions(name)]
        return lambda comparison, section: comparison.against_torch(section, some(layers))

    def backward(name: str, wanted: Callable[[ConvProblem], bool]):
        gradients = [n for n in convolutions(name, 8, train=True) if n.problem.op != "conv_fwd" and wanted(n.problem)]
        return lambda comparison, section: comparison.against_torch(section, some(gradients))

    def others(op: str) -> list[Layer]:
        return [Layer(conv(f"{op}:f32:{shape}:cross:nchw"), name, 1) for name, shape in OTHERS.items()]

    def of_others(op: str):
        return lambda comparison, section: comparison.against_torch(section, some(others(op)))

    def sixteen_bit(dtype: torch.dtype):
        return lambda comparison, section: comparison.against_float32(section, dtype, some(convolutions("resnet50", 1)))

    return {
        "resnet50 forward, batch 1": forward("resnet50", 1),
        "resnet50 forward, batch 8": forward("resnet50", 8),
        "mobilenet_v2 forward, batch 1": forward("mobilenet_v2", 1),
        "mobilenet_v2 forward, batch 8": forward("mobilenet_v2", 8),
        "resnet50 with bias and relu, batch 1": fused("resnet50"),
        "mobilenet_v2 with bias and relu, batch 1": fused("mobilenet_v2"),
        "resnet50 backward 3x3, batch 8": backward("resnet50", lambda p: p.filter == (3, 3)),
        "resnet50 backward 1x1, batch 8": backward("resnet50", lambda p: p.filter == (1, 1)),
        "mobilenet_v2 backward depthwise, batch 8": backward("mobilenet_v2", lambda p: p.is_depthwise),
        "others, forward": of_others("conv_fwd"),
        "others, backward to the image": of_others("conv_bwd_data"),
        "others, backward to the filter": of_others("conv_bwd_filter"),
        "resnet50 bfloat16 against float32, batch 1": sixteen_bit(torch.bfloat16),
        "resnet50 float16 against float32, batch 1": sixteen_bit(torch.float16),
        "guess against best, resnet50 and mobilenet_v2": lambda comparison, section: comparison.guess(
            section, some([*convolutions("resnet50"), *convolutions("mobilenet_v2")])
        ),
    }


def geometric_mean(ratios: Sequence[float]) -> float:
    return exp(fsum(map(log, ratios)) / len(ratios))


def totals(rows: Sequence[Row]) -> tuple[float, float]:
    """Microseconds of all layers, each as often as its network has it."""
    return fsum(r.nbdnn_us * r.count for r in rows), fsum(r.other_us * r.count for r in rows)


COLUMNS = ("layer", "problem", "nbdnn", "other", "ratio", "candidate")


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table of one section; the last row has geometric mean and totals, by count, of the rows that are certain."""
    lines = [
        (
            row.layer,
            row.problem,
            duration(row.nbdnn_us),
            duration(row.other_us),
            f"{row.ratio:.2f}{' ~' * row.busy}",
            row.candidate,
        )
        for row in rows
    ]
    if certain := [row for row in rows if not row.busy]:
        mine, other = totals(certain)
        mean = geometric_mean([row.ratio for row in certain])
        name = f"geometric mean of {len(certain)}"
        last = (name, f"all, by count: {other / mine:.2f}", duration(mine), duration(other), f"{mean:.2f}", "")
    else:
        last = ("the machine was busy throughout", "", "", "", "", "")
    return [*lines, last]


def summary(by_section: dict[str, list[Row]]) -> list[tuple[str, ...]]:
    """One line a section: of the rows that are certain, their number, geometric mean, lowest, and those under 0.8."""
    everything = dict(by_section)
    for kind in ("forward", "backward"):
        everything[f"all {kind}s"] = [row for name, rows in by_section.items() if f" {kind}" in name for row in rows]
    lines = []
    for name, rows in everything.items():
        if ratios := [row.ratio for row in rows if not row.busy]:
            under = sum(ratio < 0.8 for ratio in ratios)
            lines.append((name, str(len(ratios)), f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", str(under)))
    return lines


def markdown(by_section: dict[str, list[Row]], environment: dict[str, str]) -> str:
    parts = ["# nbdnn beside PyTorch on the CPU\n", *(f"* {name}: {value}" for name, value in environment.items()), ""]
    parts += ["## Summary\n", "| section | rows | geometric mean | lowest | under 0.8 |", "|---|--:|--:|--:|--:|"]
    parts += [*(f"| {' | '.join(line)} |" for line in summary(by_section)), ""]
    for section, rows in by_section.items():
        parts += [f"## {section}\n", f"| {' | '.join(COLUMNS)} |", "|---|---|--:|--:|--:|---|"]
        parts += [f"| {' | '.join(line)} |" for line in cells(rows)] + [""]
    return "\n".join(parts)


def main(description: str | None, sections: Callable[[bool], dict[str, Callable[[Comparison, str], None]]]) -> None:
    """The command: compare in every section that is asked for. sections: by name, of whether it shall be quick."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", metavar="TEXT", help="only sections with this in their name")
    parser.add_argument("--quick", action="store_true", help="every third layer, fewer rounds")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning a problem (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(cpu_device().threads)
    comparison = Comparison(3 if args.quick else 7, args.budget, [])
    by_section: dict[str, list[Row]] = {}
    for section, compare in sections(args.quick).items():
        if not args.section or any(text in section for text in args.section):
            compare(comparison, section)
            by_section[section] = [row for row in comparison.rows if row.section == section]
            print_table(section, COLUMNS, cells(by_section[section]), right=COLUMNS[2:5], footer=True)
    if not by_section:
        sys.exit(f"no section has {args.section} in its name: {', '.join(sections(True))}")

    environment = {
        "device": cpu_device().fingerprint,
        "nbdnn": nbdnn.__version__,
        "torch": torch.__version__,
        "threads": f"{cpu_device().threads} of {os.cpu_count()}",
    }
    if args.json:
        rows = [{**asdict(row), "ratio": row.ratio} for row in comparison.rows]
        args.json.write_text(json.dumps({**environment, "rows": rows}, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(by_section, environment))


if __name__ == "__main__":
    main(__doc__, sections)
