"""The cost model of the CPU kernels: what a guess on an empty database goes by.

A kernel's time is that of its multiply-adds at the rate of its vector registers, plus that of every element it copies,
packs, transforms or stores on the side, divided among the threads, times how unevenly its tasks divide. The costs an
element were fitted to an AVX-512 core (Zen 5, November 2026); their ratios matter, not their size. The
bench prints how good the guesses are.
"""

from __future__ import annotations

from math import ceil
from typing import TypeVar

from nbdnn.device import Cpu
from nbdnn.problem import Problem

_VECTOR_FMAS_PER_NS = 8.0  # the micro-kernel reaches 262 GFLOP/s a thread
_FMAS_OF_PAIRS = 3.8
_CALL_US = 4.0  # a parallel region and its barrier
_CACHE_SHARE = 0.6  # of the last level
# What of it is a thread's, at most: chips share hundreds of MB among cores of which a program has a few. Past 300 MB of
# cache layers of 26 to 51 MB went 1.1 to 1.3 times as fast on two threads, each reading what the one before wrote, and
# one layer again and again 1.7 times (Emerald Rapids).
_CACHE_OF_THREAD_BYTES = 16 << 20

# Nanoseconds an element, one thread.
COPY_NS = 0.12  # a masked vector copy that stays in cache
TURN_NS = 0.45  # a transpose in registers
GATHER_NS = 1.0  # one scalar at a time
PACK_NS = 0.2  # a filter, turned in registers or copied in rows
TILE_NS = 25.0  # the epilogue's and the loop's share of one register tile

_WIDE_BYTES = 64
PriorsT = TypeVar("PriorsT")


def fitted(device: Cpu, wide: PriorsT, narrow: PriorsT) -> PriorsT:
    """What was fitted to cores with vectors of 64 bytes and masks (Zen 4 and 5), or to one without (Zen 3, AVX2)."""
    return wide if device.vector_bytes >= _WIDE_BYTES else narrow


def kernel_us(
    device: Cpu, vector_fmas: float, side_ns: float, tasks: int, phases: int = 1, efficiency: float = 0.93
) -> float:
    """Microseconds of `vector_fmas` multiply-adds of whole vectors and `side_ns` of other work, in `tasks` tasks."""
    rounds = ceil(tasks / device.threads) * device.threads / max(1, tasks)
    work_ns = (vector_fmas / (_VECTOR_FMAS_PER_NS * efficiency) + side_ns) / device.threads
    return work_ns * min(rounds, device.threads) / 1e3 + phases * _CALL_US


def fmas_of_step(device: Cpu, pairs: bool) -> float:
    """How many multiply-adds of vectors take as long as one step of a reduction, or as one of pairs: one where bfloat16
    has nothing faster (Zen 4 and 5), and 3.8 on cores with matrix units (Emerald Rapids: pairs at half the rate of
    float32)."""
    return _FMAS_OF_PAIRS if pairs and device.multiplies_tiles else 1.0


def cache_bytes(device: Cpu) -> int:
    """Of the last level, what the threads may count on."""
    return min(device.llc_bytes, device.threads * _CACHE_OF_THREAD_BYTES)


def streams(problem: Problem, device: Cpu) -> bool:
    """Whether results go past the caches: whether the operands are so large that these would be written out of them
    before anybody reads them, and each of their lines was read in vain. Of operands that just fit, other programs leave
    too little: 2x32x16x56x56 in inference, 25 MB of 32, took 0.4 to 3.0 ms, past the caches 0.65 (Zen 3)."""
    return problem.min_bytes > _CACHE_SHARE * cache_bytes(device)
