"""One cell of the matrix: a candidate with a config on a problem, checked against the reference on its device."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import numpy as np
from guarded import BUFFERS, NUMPY_DTYPE, Operands, values

from nbdnn import reference, tolerance
from nbdnn.candidate import Candidate
from nbdnn.device import Device
from nbdnn.problem import ConvProblem

_WORKSPACE_ALIGN = {"cpu": 64, "cuda": 256}


def check(candidate: Candidate, problem: ConvProblem, config: Hashable, device: Device) -> None:
    """The three checks of one cell."""
    runner = candidate.prepare(problem, config, device)
    workspace = BUFFERS[device.kind](candidate.workspace_bytes(problem, config, device), _WORKSPACE_ALIGN[device.kind])
    workspace.send()
    for kind, scalars in (("integers", (1.0, -1.0)), ("normal", (0.75, 0.5))):
        operands = Operands(problem, values(problem, kind), device.kind)
        runner(operands.pointers, scalars, workspace.address, 0)
        operands.fetch()
        workspace.fetch()
        operands.assert_only_out_was_written()
        assert workspace.is_guarded(), "wrote outside of the workspace"
        first = operands.out.copy()
        expected = expectation(problem, kind, scalars)
        fault = tolerance.fault(problem, candidate, first, expected)
        assert not fault, f"{kind}, config {config}: {fault}"
        if kind == "integers" and problem.activation in (None, "relu"):
            assert_exact(candidate, problem, first, expected, f"config {config}")

        operands.reset()
        runner(operands.pointers, scalars, workspace.address, 0)
        operands.fetch()
        fault = tolerance.fault(problem, candidate, operands.out, expected)
        assert not fault, f"{kind}, config {config}, second run: {fault}"
        if candidate.deterministic:
            assert operands.out.tobytes() == first.tobytes(), "a second run gave other bits"


@lru_cache(maxsize=4)
def expectation(problem: ConvProblem, kind: str, scalars: tuple[float, float]) -> reference.Sample:
    expected = reference.whole(problem, values(problem, kind), scalars)
    assert_says_something(problem, expected)
    return expected


def assert_says_something(problem: ConvProblem, expected: reference.Sample) -> None:
    """A check against zeros checks nothing: of what any product reaches, at least 0.3 must be other than zero."""
    reached = expected.sum_abs > 0
    alive = np.count_nonzero(expected.value[reached])
    assert alive >= 0.3 * np.count_nonzero(reached) > 0 or len(reached) < 10, f"{problem}: the reference is mostly zero"


def assert_exact(
    candidate: Candidate, problem: ConvProblem, got: np.ndarray, expected: reference.Sample, what: str
) -> None:
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
