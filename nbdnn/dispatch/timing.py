"""Timing on the CPU: batches of at least 5 ms, on operands that the caches have forgotten.

A sample is the time of a batch of calls, each on the next of several copies of the inputs; together the copies are
bigger than the last-level cache, so that a call finds its data where a network's call would: in memory. All write to
one output, as the calls of a program do that frees its results: an allocator hands out again what was freed last.
Samples of the candidates are interleaved by the tuner, so that a busy second harms all of them alike.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from math import ceil
from statistics import median
from time import perf_counter, process_time, sleep
from typing import NamedTuple

import numpy as np

from nbdnn import reference
from nbdnn.array import at, fill_with_nan, narrowed, widened
from nbdnn.candidate import Runner
from nbdnn.dispatch import workspace
from nbdnn.problem import DEFAULT_ALIGN, ITEMSIZE, Operand, Problem

BATCH_S, WARM_UP_S = 5e-3, 1e-3
# The workers of OpenMP and OpenBLAS spin after a region, on a core that the next one needs, for 10 to 400 ms: nbdnn's
# own 240 us became 450 us there. They are seen by the processor time that passes while this thread sleeps, which the
# system counts for another thread no finer than its tick, 10 ms at most.
_LOOK_S, _PATIENCE_S = 20e-3, 1.0
# A thread that another program displaces is gone for a scheduler's slice, and a parallel call waits for it: 8 ms, not
# 4 us, again and again, with a spread of nothing. A quiet machine displaces a thread less than once in this time.
_SLICE_S = 8e-3
_PAGE_BYTES = 4096
# Copies together are this many times the last-level cache, which keeps some lines past their turn; never more copies
# than calls in a batch of the shortest kernels.
_CACHES, _MAX_COPIES = 1.5, 2048
# Random numbers are drawn once and repeated at this period: prime, so that no stride of a problem meets it.
_PERIOD = 1_000_003


class Given(NamedTuple):
    """A caller's operands: an address for each of ``problem.operands`` (0 for an output that is not read, and for zeros
    where that is optional), and (alpha, beta)."""

    addresses: Sequence[int]
    scalars: tuple[float, ...]


class Operands:
    """Copies of a problem's operands in one block of memory. `pointers` has one tuple of addresses for each copy.

    Inputs are copies of the given ones and lie on cache lines as those do; without, they are random numbers and aligned
    as the problem says. An output is the same in every tuple and not initialised, unless it is read.
    """

    def __init__(self, problem: Problem, copies: int, given: Given | None = None, seed: int = 0) -> None:
        addresses = given.addresses if given else [displacement(problem, operand) for operand in problem.operands]
        starts, end = [], 0
        for operand, address in zip(problem.operands, addresses, strict=True):
            offset = address % 64
            starts.append(end + offset)
            end = -(-(end + offset + operand.size_bytes) // 64) * 64
        self._memory = np.empty(copies * end + _PAGE_BYTES, np.uint8)
        base = -(-self._memory.ctypes.data // _PAGE_BYTES) * _PAGE_BYTES
        self._sets = np.ndarray((copies, end), np.uint8, self._memory, base - self._memory.ctypes.data)
        self._problem = problem
        steps = [end if operand.is_read else 0 for operand in problem.operands]
        self.pointers = [
            tuple(base + start + copy * step for start, step in zip(starts, steps, strict=True))
            for copy in range(copies)
        ]
        rng = np.random.default_rng(seed)
        for i, (operand, array) in enumerate(zip(problem.operands, self.arrays(), strict=True)):
            if operand.is_read:
                if given and not given.addresses[i]:
                    array[...] = 0
                elif given:
                    ctypes.memmove(self.pointers[0][i], given.addresses[i], operand.size_bytes)
                else:
                    array[...] = random_values(operand, rng)
        if not given:
            derive(problem, self.arrays())
        self._sets[1:] = self._sets[0]

    def stopwatch(self, runner: Runner, scalars: tuple[float, ...], workspace_bytes: int) -> Stopwatch:
        return Stopwatch(runner, self, scalars, workspace_bytes)

    def run(self, runner: Runner, scalars: tuple[float, ...], workspace_bytes: int) -> None:
        """Run once on the first copy; outputs that are not read are NaN beforehand."""
        for operand, array in zip(self._problem.operands, self.arrays(), strict=True):
            if not operand.is_read:
                fill_with_nan(array)
        runner(self.pointers[0], scalars, workspace.take(workspace_bytes).address, 0)

    def arrays(self, copy: int = 0) -> list[np.ndarray]:
        """The operands of one copy, bfloat16 as its bits."""
        return [
            at(pointer, operand.shape, operand.strides, operand.dtype)
            for pointer, operand in zip(self.pointers[copy], self._problem.operands, strict=True)
        ]


def displacement(problem: Problem, operand: Operand) -> int:
    """Bytes from a line to a tensor that is no better aligned than the problem and its type say; masks and states begin
    on one."""
    own = ITEMSIZE.get(operand.dtype, DEFAULT_ALIGN)
    return max(problem.align, own) % DEFAULT_ALIGN


def copies(problem: Problem, cache_bytes: int, allowed_bytes: int) -> int:
    """How many copies of the operands together are bigger than a cache; MemoryError if memory allows not one."""
    one_bytes = sum(operand.size_bytes + 64 for operand in problem.operands)
    if one_bytes > allowed_bytes:
        raise MemoryError(f"a copy of the operands takes {one_bytes} bytes, {allowed_bytes} are allowed")
    wanted = ceil(_CACHES * cache_bytes / one_bytes)
    return min(wanted, _MAX_COPIES, allowed_bytes // one_bytes)


def random_values(operand: Operand, rng: np.random.Generator) -> np.ndarray:
    """Zero-mean values of the operand's shape and dtype, in [-1, 1); positive ones in [0.5, 1.5).

    Of masks and states any bits.
    """
    if operand.dtype not in ITEMSIZE:
        return rng.integers(0, 256, operand.shape, np.uint8 if operand.dtype == "u8" else np.int64)
    drawn = rng.random(min(operand.size_elems, _PERIOD), np.float32)
    drawn = drawn + 0.5 if operand.positive else (drawn * 2 - 1) * operand.scale
    return narrowed(np.resize(drawn, operand.shape), operand.dtype)


def derive(problem: Problem, arrays: Sequence[np.ndarray]) -> list[int]:
    """Give random operands that must follow from the others their values; returns their places."""
    operands = problem.operands
    inputs = {o.name: widened(a, o.dtype) for o, a in zip(operands, arrays, strict=True) if o.is_read}
    values = reference.derived(problem, inputs)
    places = [i for i, operand in enumerate(operands) if operand.name in values]
    for i in places:
        arrays[i][...] = narrowed(values[operands[i].name], operands[i].dtype)
    return places


def settle() -> None:
    """Wait until the other threads of this process have come to rest, a second at most."""
    end = perf_counter() + _PATIENCE_S
    while perf_counter() < end:
        used_s = process_time()
        sleep(_LOOK_S)
        if process_time() - used_s < _LOOK_S / 2:
            return


class Samples:
    """Samples of one runner's time, in microseconds a call."""

    def __init__(self) -> None:
        self.samples_us: list[float] = []
        self.disturbed: list[bool] = []
        self.total_s = 0.0

    def sample(self) -> None:
        """Add the time of a batch; before the first one, warm up."""
        raise NotImplementedError

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs got in the way of most samples."""
        return 2 * sum(self.disturbed) > len(self.disturbed)

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


class Stopwatch(Samples):
    """The samples of a runner on the CPU."""

    def __init__(self, runner: Runner, operands: Operands, scalars: tuple[float, ...], workspace_bytes: int) -> None:
        super().__init__()
        self._runner, self._scalars, self._workspace_bytes = runner, scalars, workspace_bytes
        self._rotation = cycle(operands.pointers)
        self._calls_a_look = 0

    def sample(self) -> None:
        if not self._calls_a_look:
            calls, seconds = self._batch(WARM_UP_S, 1)
            self._calls_a_look = 1 if seconds / calls > BATCH_S / 100 else 16
        displaced = _displacements()
        calls, seconds = self._batch(BATCH_S, self._calls_a_look)
        displaced = _displacements() - displaced
        self.disturbed.append(displaced > 1 and displaced >= seconds / _SLICE_S)
        self.samples_us.append(seconds / calls * 1e6)
        self.total_s += seconds

    def _batch(self, at_least_s: float, calls_a_look: int) -> tuple[int, float]:
        """(calls, seconds) of calling until the time is over; the clock is looked at after every few calls."""
        memory = workspace.take(self._workspace_bytes)
        runner, scalars, address = self._runner, self._scalars, memory.address
        calls, seconds, start = 0, 0.0, perf_counter()
        while seconds < at_least_s:
            for pointers in islice(self._rotation, calls_a_look):
                runner(pointers, scalars, address, 0)
            calls += calls_a_look
            seconds = perf_counter() - start
        return calls, seconds


def _displacements() -> int:
    """How often the system has taken a processor from a thread of this process for another program."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
