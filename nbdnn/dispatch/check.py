"""The numerical check that a candidate passes before it is timed: sampled outputs against float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from nbdnn import reference, tolerance
from nbdnn.array import widened
from nbdnn.cached import cached_property
from nbdnn.candidate import Candidate, Runner
from nbdnn.device import Device
from nbdnn.dispatch.benchmark import one_copy
from nbdnn.expected import Sample
from nbdnn.problem import Problem

_OUTPUTS = 10_000


class Verdict(NamedTuple):
    """The largest error in units of what the candidate owes (None where it is not finite), and what is wrong, or ''."""

    error: float | None
    reason: str


class Check:
    """Generated operands of one problem, and what some of its outputs must be.

    Outputs are NaN beforehand, so that an element that is never written is wrong; where the problem reads them, they
    are random.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem, self._device = problem, device
        self._operands = one_copy(problem, device)
        self._arrays = dict(zip((o.name for o in problem.operands), self._operands.arrays(), strict=True))
        self._outputs = [operand for operand in problem.operands if operand.role == "out"]
        self._before = {out.name: self._arrays[out.name].copy() for out in self._outputs if out.is_read}

    @cached_property
    def _samples(self) -> Mapping[str, Sample]:
        arrays = self._arrays | self._before
        values = {o.name: widened(arrays[o.name], o.dtype) for o in self._problem.operands if o.is_read}
        return reference.samples(self._problem, values, self._problem.scalars, _OUTPUTS)

    def run(self, runner: Runner, candidate: Candidate, workspace_bytes: int) -> Verdict:
        """Run once and compare."""
        samples, roundings = self._samples, candidate.roundings(self._problem, self._device)
        for name, before in self._before.items():
            self._arrays[name][...] = before
        self._operands.run(runner, self._problem.scalars, workspace_bytes)
        error, faults = 0.0, []
        for out in self._outputs:
            sample = samples[out.name]
            got = widened(self._arrays[out.name][sample.index], out.dtype)
            share, wrong = tolerance.judged(self._problem, candidate, got, sample, roundings=roundings)
            error = max(error, share)
            if wrong:
                faults.append(f"{out.name}: {wrong}" if len(self._outputs) > 1 else wrong)
        return Verdict(error if np.isfinite(error) else None, "; ".join(faults))
