"""RNNBlock on a GPU: what NumPy gives, with every tape and candidate, in graphs, and that it learns."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from gpus import DEVICE
from guarded import GpuBuffer, Operands, values
from libraries import library

import nbdnn
from nbdnn import RNNBlock
from nbdnn.cudnn import rnn
from nbdnn.dispatch import dispatcher, registry, tapes
from nbdnn.dispatch.check import Check
from nbdnn.dispatch.policy import Request
from nbdnn.dispatch.selection import survey
from nbdnn.dispatch.tuner import tune
from nbdnn.problem import parse
from nbdnn.rnn_parameters import GATES

pytestmark = pytest.mark.gpu

STEPS, BATCH, WIDTH = 5, 3, 8
KINDS = [*product(GATES, ("linear",), ("unidirectional", "bidirectional")), ("gru", "skip", "unidirectional")]


def drawn(block: RNNBlock) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    directions = 2 if block.direction_mode == "bidirectional" else 1
    state = block.num_layers * directions, BATCH, block.hidden_size
    shapes = {"x": (STEPS, BATCH, WIDTH), "dy": (STEPS, BATCH, directions * block.hidden_size)}
    shapes |= dict.fromkeys(("hx", "dhy", "cx", "dcy") if block.rnn_mode == "lstm" else ("hx", "dhy"), state)
    values = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    w = rng.standard_normal(block.get_param_size([BATCH, WIDTH])) * max(WIDTH, block.hidden_size) ** -0.5
    return values | {"w": w.astype("f")}


def run(block: RNNBlock, given: dict[str, Any], policy: str | None = None, gradient: str | None = None) -> list[Any]:
    """Results and gradients, as NumPy arrays."""
    states, top = ([given.get(name) for name in names] for names in (("hx", "cx"), ("dhy", "dcy")))
    *results, tape = block.apply(given["w"], given["x"], *states, training=True, policy=policy)
    found = [*results, *block.grad(tape, given["dy"], *top, policy=gradient)]
    return [each if isinstance(each, np.ndarray) else each.cpu().numpy() for each in found]


def on_gpu(given: dict[str, np.ndarray]) -> dict[str, Any]:
    torch = library("torch")
    return {name: torch.from_numpy(value).cuda() for name, value in given.items()}


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def working(text: str) -> list[str]:
    """The ids of the candidates that may run a problem."""
    options, _ = survey(parse(text), DEVICE, Request().filters)
    return list(dict.fromkeys(option.candidate.id for option in options))


@pytest.mark.parametrize(("mode", "input_mode", "direction"), KINDS)
def test_results_and_gradients_are_numpys(mode: str, input_mode: str, direction: str) -> None:
    """By every candidate of the forward, whoever then takes its tape, and with the states left out."""
    block = RNNBlock("float32", 8, 2, mode, input_mode, direction)
    given = drawn(block)
    plain = {name: value for name, value in given.items() if name not in ("hx", "cx", "dhy", "dcy")}
    inference = str(block.problem((STEPS, BATCH, WIDTH)))
    for operands in (given, plain):
        expected, tensors = run(block, operands), on_gpu(operands)
        for policy in (None, *working(inference)):
            assert_close(run(block, tensors, policy), expected)
        states = [tensors.get(name) for name in ("hx", "cx")]
        results = block.apply(tensors["w"], tensors["x"], *states)
        assert_close([each.cpu().numpy() for each in results], expected[: len(results)])


@pytest.mark.parametrize(("mode", "input_mode", "direction"), KINDS)
def test_states_that_are_absent_are_zeros_whatever_memory_held(mode: str, input_mode: str, direction: str) -> None:
    """Tape and workspace hold NaN, unlike those of the arrays of a library."""
    forward = RNNBlock("float32", 8, 2, mode, input_mode, direction).problem((STEPS, BATCH, WIDTH), training=True)
    for tape in rnn.FWD.tapes(forward, DEVICE):
        for op, candidate in (("rnn_fwd", rnn.FWD), ("rnn_bwd", rnn.BWD)):
            problem = replace(forward, tape=tape, op=op, training=op == "rnn_fwd")
            (config,) = candidate.configs(problem, DEVICE)
            runner, given, found = candidate.prepare(problem, config, DEVICE), values(problem, "normal"), []
            given |= {operand.name: given[operand.name] * 0 for operand in problem.operands if operand.optional}
            workspace = GpuBuffer(candidate.workspace_bytes(problem, config, DEVICE), 256)
            for absent in (False, True):
                operands = Operands(problem, given, "cuda")
                pointers = tuple(
                    0 if absent and operand.optional else pointer
                    for operand, pointer in zip(problem.operands, operands.pointers, strict=True)
                )
                if op == "rnn_bwd":
                    tapes.write(problem, DEVICE, pointers, 0)
                workspace.send()
                runner(pointers, (), workspace.address, 0)
                operands.fetch()
                found.append({name: out.copy() for name, out in operands.outs.items() if name != "tape"})
            for name, out in found[0].items():
                assert np.isfinite(out).all() and np.array_equal(found[1][name], out), f"{tape} {name}"


@pytest.mark.parametrize("mode", GATES)
def test_a_tape_is_read_by_every_candidate_that_understands_it(mode: str) -> None:
    block = RNNBlock("float32", 8, 1, mode)
    given = drawn(block)
    expected, tensors = run(block, given), on_gpu(given)
    forward = str(block.problem((STEPS, BATCH, WIDTH), training=True))
    pairs = list(product(working(forward), working(forward.replace("rnn_fwd", "rnn_bwd").removesuffix(":train"))))
    for pair in (*pairs, ("rnn_fwd/cudnn/rnn", "rnn_bwd/cudnn/rnn")):
        assert_close(run(block, tensors, *pair), expected)
    with pytest.raises(nbdnn.UnsupportedProblem, match="the operands are cudnn/rnn's own"):
        other = next((id for _, id in pairs), registry.candidates("rnn_bwd", kind="cuda")[-1].id)
        run(block, tensors, "rnn_fwd/cudnn/rnn", other)


def test_a_tape_of_cudnns_own_may_be_read_twice_and_by_unaligned_operands() -> None:
    torch = library("torch")
    block = RNNBlock("float32", 8, 2, "lstm")
    given = on_gpu(drawn(block))
    *_, tape = block.apply(given["w"], given["x"], given["hx"], given["cx"], training=True, policy="rnn_fwd/cudnn/rnn")
    assert tape.own is not None and str(tape.own) in tape.problem
    moved = torch.empty(given["dy"].numel() + 1, device="cuda")[1:].view(given["dy"].shape).copy_(given["dy"])
    assert moved.data_ptr() % 16
    first, *others = (block.grad(tape, dy, given["dhy"], given["dcy"]) for dy in (given["dy"], given["dy"], moved))
    last = block.grad(tape, given["dy"], given["dhy"], given["dcy"], retain_tape=False)
    for other in (*others, last):
        for a, b in zip(other, first, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(nbdnn.InvalidProblem, match="consumed by an earlier gradient"):
        block.grad(tape, given["dy"])


@pytest.mark.parametrize("mode", ["lstm", "rnn_tanh"])
def test_calls_can_be_captured(mode: str) -> None:
    """Inference by every candidate, and a forward in training with its gradient."""
    torch = library("torch")
    block = RNNBlock("float32", 8, 2, mode)
    given = drawn(block)
    tensors = on_gpu(given)
    w, x, dy = tensors["w"], tensors["x"], tensors["dy"]

    def train() -> tuple:
        *results, tape = block.apply(w, x, training=True)
        return (results[0], *block.grad(tape, dy, retain_tape=False))

    ways = [lambda id=id: block.apply(w, x, policy=id) for id in working(str(block.problem((STEPS, BATCH, WIDTH))))]
    for way in (*ways, train):
        way()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = way()
        x.neg_()
        expected = [each.clone() for each in way()]
        graph.replay()
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_measuring_settles_the_tape_and_fails_nobody() -> None:
    block = RNNBlock("float32", 8, 1, "gru")
    given = drawn(block)
    with nbdnn.config.change(tune__budget_s=60), nbdnn.events() as log:
        assert_close(run(block, on_gpu(given), "time_on_shape_change", "time_on_shape_change"), run(block, given))
    assert not [event for event in log if event.kind == "failed"]
    measured = [parse(event.problem) for event in log if event.kind == "measured"]
    assert {problem.op for problem in measured} == {"rnn_fwd", "rnn_bwd"}
    assert "cudnn/rnn" in {problem.only for problem in measured}


def test_a_gradient_that_consumes_its_tape_is_checked_and_measured() -> None:
    """Each time with a tape that was written anew."""
    forward = RNNBlock("float32", 8, 1, "gru").problem((STEPS, BATCH, WIDTH), training=True)
    (tape, *_) = rnn.FWD.tapes(forward, DEVICE)
    gradient = replace(forward, op="rnn_bwd", training=False, tape=tape._replace(consumed=True))
    check = Check(gradient, DEVICE)
    (config,) = rnn.BWD.configs(gradient, DEVICE)
    runner = rnn.BWD.prepare(gradient, config, DEVICE)
    for _ in range(3):
        assert check.run(runner, rnn.BWD, rnn.BWD.workspace_bytes(gradient, config, DEVICE)).reason == ""
    assert [row.median_us for row in tune(gradient, DEVICE, dispatcher.database(), budget_s=5).rows.values()]


def test_a_lstm_learns_to_copy() -> None:
    """The task of `tests/test_rnn.py`: a guess costs log(4) = 1.39."""
    torch = library("torch")
    symbols, steps, batch, rate = 4, 6, 64, 0.3
    block = RNNBlock("float32", 16, 1, "lstm")
    rng = np.random.default_rng(0)
    w = torch.from_numpy(rng.uniform(-0.25, 0.25, block.get_param_size([batch, symbols + 1])).astype("f")).cuda()
    readout = torch.from_numpy(rng.uniform(-0.25, 0.25, (16, symbols)).astype("f")).cuda()
    losses = []
    for _ in range(1000):
        shown = torch.from_numpy(rng.integers(symbols, size=batch)).cuda()
        x = torch.zeros(steps, batch, symbols + 1, device="cuda")
        x[0, torch.arange(batch), shown] = 1
        x[1:, :, symbols] = 1
        y, _, _, tape = block.apply(w, x, training=True)
        shares = torch.softmax(y[-1] @ readout, 1)
        losses.append(-shares[torch.arange(batch), shown].log().mean())
        of_scores = (shares - torch.nn.functional.one_hot(shown, symbols)) / batch
        dy = torch.zeros_like(y)
        dy[-1] = of_scores @ readout.T
        readout -= rate * (y[-1].T @ of_scores)
        w -= rate * block.grad(tape, dy, retain_tape=False)[0]
    assert 1.2 < float(sum(losses[:5]) / 5) < 1.6
    assert float(sum(losses[-20:]) / 20) < 0.05
