"""Steps that several threads take together, in one parallel region: each has its part of every step.

    for step:  do my part;  wait until all parts of the step are done

A region and its barrier cost 4 us, this wait 0.1: a step of a recurrent network may take 2. No thread is sure to come:
a layer of threads may run the tasks of a region one after the other. So whoever has waited too long does the parts that
nobody has begun, and who comes late finds them done: the wait is only ever for a part that a running thread has begun.
A part stays with its thread otherwise, and what it reads in each step stays in that core's cache.

Memory of a crew, zeros before it begins: the parts done, and for each part the steps begun, lines apart.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from nbdnn.kernels.cpu.atomics import atomic_add, look, replace
from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.libc import sched_yield

_PAIR_BYTES = 128  # of lines, which some processors fetch together
_PATIENCE = 4096  # looks, of some 10 ns: the other threads of a region come within 20 us
_LOOKS = 64  # between two times that an impatient thread leaves its core to others


def crew_bytes(parts: int) -> int:
    return (1 + parts) * _PAIR_BYTES


@njit(**DEVICE)
def _begin(crew, part, step):
    """Whether the step is the part's next one, and the caller's now: another thread may have begun it."""
    return replace(crew + _PAIR_BYTES * (1 + part), step, step + 1)


@cache
def take_step(part_of_step):
    """Compiled-in function (crew, parts, mine, step, patience, ...) -> patience: one step of the caller's.

    part_of_step: compiled-in function (step, part, ...) of one argument more, an address. crew: address of its memory.
    patience: what the step before returned, in the first step `first_patience()`.
    """

    @njit(**DEVICE)
    def take(crew, parts, mine, step, patience, context):
        if _begin(crew, mine, step):
            part_of_step(step, mine, context)
            atomic_add(crew, 1)
        looks = 0
        while look(crew) < (step + 1) * parts:
            looks += 1
            if looks > patience:
                for part in range(parts):
                    if _begin(crew, part, step):
                        part_of_step(step, part, context)
                        atomic_add(crew, 1)
                        patience = 0
            if looks % _LOOKS == 0 and looks > _PATIENCE:  # who is awaited may need this core
                sched_yield(0, 0)
        return patience

    return take


@njit(**DEVICE)
def first_patience():
    return _PATIENCE
