"""How threads share the steps of a recurrent network, and what that costs: the configs of `rnn_packed.py`."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import RnnProblem
from nbdnn.rnn_parameters import GATES

_MEETING_US = 0.3  # of the threads after a step
_FEW_STEP_FMAS = 60_000  # a step of fewer is done before others could help
_GATE_NS = 1.0  # all gates of a hidden unit, one thread
_BYTES_PER_NS = {"near": 100.0, "far": 35.0}  # of weights, one thread: from its own second-level cache, or beyond


class Split(NamedTuple):
    """Each direction is cut into `groups` of images and, at every step, into `parts`: chunks of hidden units."""

    groups: int
    parts: int

    def __str__(self) -> str:
        return f"batch{self.groups}" if self.groups > 1 else f"units{self.parts}" if self.parts > 1 else "none"


Splits = tuple[Split, ...]


def splits(problem: RnnProblem, device: Cpu) -> Splits:
    """Every way that gives more threads something to do, the one that the cost model likes first."""
    wanted = device.threads
    found = [Split(1, 1)]
    if problem.directions < wanted:
        if (groups := min(wanted, problem.batch)) > 1:
            found.append(Split(groups, 1))
        if (parts := min(wanted, ceil(problem.hidden / device.lanes(problem.compute)))) > 1:
            found.append(Split(1, parts))
    fmas = problem.flops / 4 / device.lanes(problem.compute)
    return tuple(sorted(found, key=lambda split: step_us(problem, split, fmas, device)))


def step_us(problem: RnnProblem, split: Split, vector_fmas: float, device: Cpu) -> float:
    """Microseconds of the recurrent products, `vector_fmas` in all, one step after the other."""
    gates = len(GATES[problem.mode])
    threads = min(device.threads, problem.directions * split.groups * split.parts)
    busy = kernel_us(device, vector_fmas, gate_ns(problem), device.threads) * device.threads / threads
    weights = gates * problem.hidden**2 * ITEMSIZE[problem.compute] / split.parts
    near = weights * ceil(problem.directions / device.threads) < device.l2_bytes * 0.75
    chains = problem.steps * problem.layers * ceil(problem.directions / device.threads)
    reading = chains * weights / _BYTES_PER_NS["near" if near else "far"] / 1e3
    return max(busy, reading) + chains * _MEETING_US * (split.parts > 1)


def gate_ns(problem: RnnProblem) -> float:
    """Nanoseconds of the gates, on one thread."""
    units = problem.steps * problem.batch * problem.layers * problem.directions * problem.hidden
    return units * _GATE_NS * len(GATES[problem.mode]) / 4
