"""Timing on the CPU: batches of at least 5 ms, on operands that the caches have forgotten.

A sample is the time of a batch of calls, each on the next of several copies of the operands; together the copies are
bigger than the last-level cache, so that a call finds its data where a network's call would: in memory. Samples of the
candidates are interleaved by the tuner, so that a busy second harms all of them alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from math import ceil
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

from nbdnn.array import at, narrowed
from nbdnn.candidate import Runner
from nbdnn.device import Device
from nbdnn.dispatch import workspace
from nbdnn.problem import DEFAULT_ALIGN, Operand, Problem

BATCH_S = 5e-3
_PAGE_BYTES = 4096
# Copies together are this many times the last-level cache, which keeps some lines past their turn; never more copies
# than calls in a batch of the shortest kernels.
_CACHES, _MAX_COPIES = 1.5, 2048
# Random numbers are drawn once and repeated at this period: prime, so that no stride of a problem meets it.
_PERIOD = 1_000_003


class Given(NamedTuple):
    """A caller's operands: an address for each of ``problem.operands`` (0 for an output that is not read), and (alpha,
    beta)."""

    addresses: Sequence[int]
    scalars: tuple[float, ...]


class Operands:
    """Copies of a problem's operands in one block of memory. `pointers` has one tuple of addresses for each copy.

    Inputs are copies of the given ones and lie on cache lines as those do; without, they are random numbers and aligned
    as the problem says. Outputs are not initialised, unless they are read.
    """

    def __init__(self, problem: Problem, copies: int, given: Given | None = None, seed: int = 0) -> None:
        addresses = given.addresses if given else [problem.align % DEFAULT_ALIGN] * len(problem.operands)
        starts, end = [], 0
        for operand, address in zip(problem.operands, addresses, strict=True):
            offset = address % 64
            starts.append(end + offset)
            end = -(-(end + offset + operand.size_bytes) // 64) * 64
        self._memory = np.empty(copies * end + _PAGE_BYTES, np.uint8)
        base = -(-self._memory.ctypes.data // _PAGE_BYTES) * _PAGE_BYTES
        self._sets = np.ndarray((copies, end), np.uint8, self._memory, base - self._memory.ctypes.data)
        self._problem = problem
        self.pointers = [tuple(base + copy * end + start for start in starts) for copy in range(copies)]
        rng = np.random.default_rng(seed)
        for i, (operand, array) in enumerate(zip(problem.operands, self.arrays(), strict=True)):
            if operand.role == "in" or "beta" in problem.epilogue:
                if given:
                    ctypes.memmove(self.pointers[0][i], given.addresses[i], operand.size_bytes)
                else:
                    array[...] = random_values(operand, rng)
        self._sets[1:] = self._sets[0]

    def arrays(self, copy: int = 0) -> list[np.ndarray]:
        """The operands of one copy, bfloat16 as its bits."""
        return [
            at(pointer, operand.shape, operand.strides, operand.dtype)
            for pointer, operand in zip(self.pointers[copy], self._problem.operands, strict=True)
        ]


def rotating(problem: Problem, device: Device, allowed_bytes: int, given: Given | None = None) -> Operands:
    """As many copies of the operands as the last-level cache asks for and memory allows; MemoryError if not one."""
    one_bytes = sum(operand.size_bytes + 64 for operand in problem.operands)
    if one_bytes > allowed_bytes:
        raise MemoryError(f"a copy of the operands takes {one_bytes} bytes, {allowed_bytes} are allowed")
    wanted = ceil(_CACHES * device.llc_bytes / one_bytes)
    return Operands(problem, min(wanted, _MAX_COPIES, allowed_bytes // one_bytes), given)


def random_values(operand: Operand, rng: np.random.Generator) -> np.ndarray:
    """Zero-mean values of the operand's shape and dtype, in [-1, 1)."""
    drawn = rng.random(min(operand.size_elems, _PERIOD), np.float32) * 2 - 1
    return narrowed(np.resize(drawn, operand.shape), operand.dtype)


@dataclass
class Stopwatch:
    """Samples the time of one runner, in microseconds a call."""

    runner: Runner
    operands: Operands
    scalars: tuple[float, ...]
    workspace_bytes: int
    samples_us: list[float] = field(default_factory=list)
    total_s: float = 0.0
    _calls: int = 0

    def sample(self) -> None:
        """Add the time of a batch. A batch that turned out short does not count: the next has more calls."""
        if not self._calls:
            self._calls = ceil(BATCH_S / self._seconds(1))  # also the warm-up
        while (seconds := self._seconds(self._calls)) < BATCH_S:
            self._calls = ceil(self._calls * 1.2 * BATCH_S / seconds)
        self.samples_us.append(seconds / self._calls * 1e6)
        self.total_s += seconds

    def _seconds(self, calls: int) -> float:
        memory = workspace.take(self.workspace_bytes)
        runner, scalars, address = self.runner, self.scalars, memory.address
        rotation = list(islice(cycle(self.operands.pointers), calls))
        start = perf_counter()
        for pointers in rotation:
            runner(pointers, scalars, address, 0)
        return perf_counter() - start

    @property
    def median_us(self) -> float:
        return median(self.samples_us)

    @property
    def spread(self) -> float | None:
        """Median absolute deviation from the median, relative to it; None with fewer than three samples."""
        if len(self.samples_us) < 3:
            return None
        middle = self.median_us
        return median(abs(sample - middle) for sample in self.samples_us) / middle
