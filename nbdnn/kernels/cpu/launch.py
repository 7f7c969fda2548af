"""Run a program of tasks on all threads.

A program is a list of phases; a phase is (task, number of indices, ctx): its tasks run in any order on any worker, and
a phase begins when the one before has ended. Each worker draws from a range of indices of its own, then from those of
the others: what a worker wrote in one phase it finds in its caches in the next, and uneven tasks and a busy core cost
little. One compiled driver serves every kernel, and a call costs one Numba call whatever the number of phases. The
threads are the team's (`workers.py`); a call that finds it taken, as several threads of a program may, goes by Numba's,
and in a forked child by itself.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import int64, prange, types
from numba.core.ccallback import CFunc

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_entry
from nbdnn.kernels.cpu.vector import call_task, num_threads, pointer, stack, struct
from nbdnn.kernels.cpu.workers import (
    EACH,
    FEW,
    LINE_BYTES,
    MOST_WORKERS,
    PHASE_BYTES,
    claim,
    come_soon,
    give_back,
    is_alone,
    prepare,
    run_region,
    share,
    team,
)
from nbdnn.locks import reentrant_lock

MAX_POINTERS = 10
# What every task finds at `args`: the runner's arguments. The first pointers are also an int64 array of MAX_POINTERS.
ARGS = np.dtype(
    [(f"p{i}", np.int64) for i in range(MAX_POINTERS)]
    + [("alpha", np.float64), ("beta", np.float64), ("workspace", np.int64)],
    align=True,
)
assert ARGS.itemsize <= 128
_NO_SCALARS = 1.0, 0.0

_int64 = pointer("i64")
_args = struct(ARGS)
_ALONE = 1
_args_memory, _lines = stack(128), stack(LINE_BYTES * MOST_WORKERS)

# What a region is guessed to take one thread, of which 4 us are the call: below the first the caller runs it, below the
# second as well while the others sleep, who come some 10 us later, awake ones within 1. Of 176 random problems these
# limits lost least: 4 % to the better choice of each while workers are awake, 6 % while they sleep (Emerald Rapids).
_ALONE_US, _FEW_US = 5.0, 12.0
# Fewer elements a thread packs for itself sooner than all have packed their part and met (4 to 10 us), and sooner than
# it reads what a far core has packed.
FEW_ELEMS = 40960


class Phase(NamedTuple):
    """A compiled task, how many indices it runs over, and the int64 array it finds at `ctx`.

    alone: the calling thread runs them all. each: every worker runs all of them for itself, before its first part of a
    later phase. few: the calling thread runs them all while others sleep, being done before these would have woken up.
    """

    task: CFunc
    tasks: int
    ctx: np.ndarray
    alone: bool = False
    each: bool = False
    few: bool = False

    @property
    def how(self) -> int:
        return EACH if self.each else _ALONE if self.alone else FEW if self.few else 0


def _drive(program, n_phases, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, alpha, beta, workspace, team):
    args = _args_memory()
    given = _args(args)
    given.p0, given.p1, given.p2, given.p3, given.p4 = p0, p1, p2, p3, p4
    given.p5, given.p6, given.p7, given.p8, given.p9 = p5, p6, p7, p8, p9
    given.alpha, given.beta, given.workspace = alpha, beta, workspace
    workers = min(num_threads(), MOST_WORKERS)
    ranges = _lines()
    for worker in range(workers):
        _int64(ranges + LINE_BYTES * worker)[1] = 0
    claimed, asked = False, False
    for phase in range(n_phases):
        row = _int64(program + PHASE_BYTES * phase)
        function, count, ctx, how = row[0], row[1], row[2], row[3]
        if how == EACH:
            continue
        alone = how == _ALONE or count < 2 or workers < 2
        if not alone and not asked:
            claimed, asked = claim(team), True
        if alone or (not claimed and is_alone(team)) or (how == FEW and not (claimed and come_soon(team))):
            prepare(program, phase, args, ranges, int64(0))
            for index in range(count):
                call_task(function, args, ctx, index, 0)
            continue
        for worker in range(workers):
            _int64(ranges + LINE_BYTES * worker)[0] = worker * count // workers
        if claimed:
            run_region(team, program, phase, args, ranges, workers)
        else:
            for worker in prange(workers):
                share(program, phase, args, ranges, workers, int64(worker))
    if claimed:
        give_back(team)


_DRIVE_SIGNATURE = types.void(
    *[types.int64] * (2 + MAX_POINTERS), types.float64, types.float64, types.int64, types.int64
)


class Program:
    """A runner of the CPU provider: phases with everything they keep alive."""

    def __init__(self, phases: Sequence[Phase], keep: Sequence[np.ndarray] = ()) -> None:
        phases = [phase for phase in phases if phase.tasks > 0]
        rows = [(phase.task.address, phase.tasks, phase.ctx.ctypes.data, phase.how) for phase in phases]
        self._table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        self._keep = (list(phases), list(keep))
        self._start = (self._table.ctypes.data, len(phases))
        self._drive, self._lock = driver()

    def settle(self, device: Cpu, guess_us: Callable[[Cpu], float]) -> None:
        """Wake nobody for regions that are guessed to be done before others have woken up."""
        how = self._table[:, 3]
        regions = ((how == 0) | (how == FEW)) & (self._table[:, 1] > 1)
        region_us = guess_us(replace(device, threads=1)) / max(1, regions.sum())
        if region_us < _ALONE_US:
            how[:] = _ALONE
        elif region_us < _FEW_US:
            how[regions] = FEW

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int = 0, stream: int = 0
    ) -> None:
        padded = pointers + (0,) * (MAX_POINTERS - len(pointers))
        alpha, beta = scalars or _NO_SCALARS
        if self._lock is None:
            self._drive(*self._start, *padded, alpha, beta, workspace, team())
        else:
            with self._lock:
                self._drive(*self._start, *padded, alpha, beta, workspace, team())


_compiling, _calling = reentrant_lock(), reentrant_lock()


def driver():
    """(compiled driver, lock or None), one for all threads, also for those that call first at the same time."""
    with _compiling:
        return _driver()


@cache
def _driver():
    layer = threading_layer()
    compiled = compile_entry(_drive, "driver", _DRIVE_SIGNATURE, parallel=True, nogil=True, error_model="numpy")
    return compiled, _calling if layer == "workqueue" else None  # which aborts on concurrent calls


@cache
def threading_layer() -> str:
    """Name of the layer in use: the program's own where one runs already, else tbb, omp or workqueue, in that order."""
    from numba.np.ufunc import parallel

    if not parallel._is_initialized:
        _preload_tbb()
        parallel._launch_threads()
    import numba

    return numba.threading_layer()


def _preload_tbb() -> None:
    """Load libtbb from the tbb distribution: Numba looks for it by name only, which fails in a virtual environment."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return
    wanted = "tbb12.dll" if sys.platform == "win32" else "libtbb.so.12"
    for file in files:
        path = Path(str(file.locate()))
        if file.name == wanted and path.exists():
            ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_GLOBAL)
            return
