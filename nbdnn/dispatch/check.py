"""The numerical check that a candidate passes before it is timed: sampled outputs against float64."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from nbdnn import reference, tolerance
from nbdnn.array import narrowed, widened
from nbdnn.candidate import Candidate, Runner
from nbdnn.device import Device
from nbdnn.dispatch.benchmark import one_copy
from nbdnn.problem import Problem

_OUTPUTS = 10_000


class Verdict(NamedTuple):
    """The largest error in units of what the candidate owes (None where it is not finite), and what is wrong, or ''."""

    error: float | None
    reason: str


class Check:
    """Generated operands of one problem, and what some of its outputs must be.

    The outputs are NaN beforehand, so that one that is never written is wrong; where the problem reads them, they are
    random.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem = problem
        self._operands = one_copy(problem, device)
        self._scalars = (1.0, 0.5 if "beta" in problem.epilogue else 0.0)
        arrays = self._operands.arrays()
        self._arrays = {operand.name: array for operand, array in zip(problem.operands, arrays, strict=True)}
        (self._out,) = (operand.name for operand in problem.operands if operand.role == "out")
        if "beta" not in problem.epilogue:
            output = self._arrays[self._out]
            output[...] = narrowed(np.full(output.shape, np.nan, np.float32), problem.dtype)
        self._before = self._arrays[self._out].copy()

    @cached_property
    def _sample(self) -> reference.Sample:
        values = {name: widened(array, self._problem.dtype) for name, array in self._arrays.items()}
        values[self._out] = widened(self._before, self._problem.dtype)
        return reference.sample(self._problem, values, self._scalars, _OUTPUTS)

    def run(self, runner: Runner, candidate: Candidate, workspace_bytes: int) -> Verdict:
        """Run once and compare."""
        output, sample = self._arrays[self._out], self._sample
        output[...] = self._before
        self._operands.run(runner, self._scalars, workspace_bytes)
        values = widened(output, self._problem.dtype)
        with np.errstate(all="ignore"):
            deviation = abs(values[sample.index] - sample.value)
            allowed = tolerance.allowed(self._problem, candidate, sample)
            error = float(np.max(deviation / np.maximum(allowed, np.finfo(np.float64).tiny)))
            reason = tolerance.fault(self._problem, candidate, values, sample)
        return Verdict(error if np.isfinite(error) else None, reason)
