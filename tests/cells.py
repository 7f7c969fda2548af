"""One cell of the matrix: a candidate with a config on a problem, checked against the reference on its device."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import numpy as np
from guarded import BUFFERS, NUMPY_DTYPE, Operands, values

from nbdnn import reference, tolerance
from nbdnn.candidate import Candidate
from nbdnn.device import Cpu, Device
from nbdnn.dispatch import tapes
from nbdnn.expected import BoundedSample, Sample
from nbdnn.problem import Problem
from nbdnn.problem_conv import ConvProblem
from nbdnn.problem_rnn import RnnProblem

_WORKSPACE_ALIGN = {"cpu": 64, "cuda": 256}


def is_for(candidate: Candidate, device: Cpu) -> bool:
    """Whether a machine has the instructions that a candidate is made of."""
    if candidate.algorithm.endswith("amx"):
        return device.multiplies_tiles
    return device.multiplies_bf16 or not candidate.algorithm.endswith("_dot")


def check(candidate: Candidate, problem: Problem, config: Hashable, device: Device) -> None:
    """The three checks of one cell."""
    runner = candidate.prepare(problem, config, device)
    workspace = BUFFERS[device.kind](candidate.workspace_bytes(problem, config, device), _WORKSPACE_ALIGN[device.kind])
    workspace.send()
    roundings = candidate.roundings(problem, device)
    # What is rounded to 16 bits on the way is no sum of small integers any more.
    once = roundings == 1 or problem.dtype in ("f32", "f64")
    for kind, scalars in _KINDS.get(type(problem), (("normal", problem.scalars),)):
        operands = Operands(problem, values(problem, kind), device.kind)
        own = problem.tape if isinstance(problem, RnnProblem) and problem.op == "rnn_bwd" else None
        if own:
            tapes.write(problem, device, operands.pointers, 0)  # type: ignore[arg-type]
            operands.keep("y", "tape")
        runner(operands.pointers, scalars, workspace.address, 0)
        operands.fetch()
        if own and own.consumed:
            operands.keep("tape")
        workspace.fetch()
        operands.assert_only_outs_were_written()
        assert workspace.is_guarded(), "wrote outside of the workspace"
        first = {name: out.copy() for name, out in operands.outs.items()}
        expected = expectation(problem, kind, scalars)
        assert_right(candidate, problem, first, expected, f"{kind}, config {config}", roundings)
        linear = isinstance(problem, ConvProblem) and problem.activation in (None, "relu")
        if kind == "integers" and linear and once:
            for name, out in first.items():
                assert_exact(candidate, problem, out, expected[name], f"config {config}")

        operands.reset()
        if own and own.consumed:
            tapes.write(problem, device, operands.pointers, 0)  # type: ignore[arg-type]
        runner(operands.pointers, scalars, workspace.address, 0)
        operands.fetch()
        assert_right(candidate, problem, operands.outs, expected, f"{kind}, config {config}, second run", roundings)
        if candidate.deterministic:
            for name, out in operands.outs.items():
                assert out.tobytes() == first[name].tobytes(), f"a second run gave other bits of {name}"


# (contents of the operands, scalars of the runner) that a cell is checked with, where it is more than random numbers.
_KINDS = {ConvProblem: (("integers", (1.0, -1.0)), ("normal", (0.75, 0.5)))}


def assert_right(
    candidate: Candidate,
    problem: Problem,
    got: dict[str, np.ndarray],
    expected: dict[str, Sample],
    what: str,
    roundings: int,
) -> None:
    for name, output in got.items():
        fault = tolerance.fault(problem, candidate, output, expected[name], roundings=roundings)
        assert not fault, f"{what}, {name}: {fault}"


@lru_cache(maxsize=4)
def expectation(problem: Problem, kind: str, scalars: tuple[float, ...]) -> dict[str, Sample]:
    expected = reference.samples(problem, values(problem, kind), scalars, None)
    for sample in expected.values():
        assert_says_something(problem, sample)
    return expected


def assert_says_something(problem: Problem, expected: Sample) -> None:
    """A check against zeros checks nothing: of what any product reaches, at least 0.3 must be other than zero."""
    if isinstance(expected, BoundedSample):
        reached = (expected.value != 0) | (expected.slack > 0)
    else:
        reached = expected.sum_abs > 0
    alive = np.count_nonzero(expected.value[reached])
    assert alive >= 0.3 * np.count_nonzero(reached) > 0 or len(reached) < 10, f"{problem}: the reference is mostly zero"


def assert_exact(candidate: Candidate, problem: ConvProblem, got: np.ndarray, expected: Sample, what: str) -> None:
    """Bit for bit; FFT and all Winograds but F(2x2), whose matrices are small binary fractions, after rounding.

    cuDNN does not owe it where the caller permits narrower sums: compute in f16, TF32.
    """
    if candidate.provider == "cudnn" and (problem.compute == "f16" or candidate.math == "tf32"):
        return
    flat = got[expected.index].astype(np.float64)

    def rounded(value: np.ndarray) -> np.ndarray:
        return value.astype(NUMPY_DTYPE[problem.dtype]).astype(np.float64)

    if tolerance.transforms(candidate) and not candidate.algorithm.endswith("winograd_2x2"):
        # What lies halfway between two 16-bit numbers may be rounded to either.
        either = [np.rint(rounded(expected.value * nudge)) for nudge in (1 - 2**-18, 1 + 2**-18)]
        exact = np.logical_or.reduce([np.rint(flat) == neighbour for neighbour in either])
    else:
        exact = flat == rounded(expected.value)
    assert exact.all(), f"{what}: a sum of small integers is not exact"
