"""Run a program of tasks on Numba's threads.

A program is a list of phases; a phase is (task, number of indices, ctx): its tasks run in any order on any worker, and
a phase begins when the one before has ended. Each worker draws from a range of indices of its own, then from those of
the others: what a worker wrote in one phase it finds in its caches in the next, and uneven tasks and a busy core cost
little. One compiled driver serves every kernel: only the driver is compiled with ``parallel=True``, and a call costs
one Numba call whatever the number of phases.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.core.ccallback import CFunc

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, DiskCache
from nbdnn.kernels.cpu.vector import atomic_add, call_task, num_threads, pointer, stack, struct

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
_PAIR_BYTES, _MOST_WORKERS = 128, 512  # of lines, which some processors fetch together
_ALONE, _EACH = 1, 2
_args_memory, _lines = stack(128), stack(_PAIR_BYTES * _MOST_WORKERS)


# A parallel region takes 10 us at least where workers sleep, as they do between the calls of a program. What is guessed
# to take less, of which 4 us are the call, took 2 to 8 alone, and more than both threads in 1 of 25 problems (Zen 3).
_FEW_US = 6.0
# Fewer elements a thread packs for itself sooner than all have packed their part and met (4 to 10 us), and sooner than
# it reads what a far core has packed.
FEW_ELEMS = 40960


class Phase(NamedTuple):
    """A compiled task, how many indices it runs over, and the int64 array it finds at `ctx`.

    alone: the calling thread runs them all, because they are done before the others would have woken up. each: every
    worker runs all of them for itself, before its part of the next phase.
    """

    task: CFunc
    tasks: int
    ctx: np.ndarray
    alone: bool = False
    each: bool = False

    @property
    def how(self) -> int:
        return _EACH if self.each else _ALONE if self.alone else 0


@njit(**DEVICE)
def _run_own(program, first, last, args, worker):
    """The phases [first, last), all for this worker."""
    for phase in range(first, last):
        row = _int64(program + 32 * phase)
        for index in range(row[1]):
            call_task(row[0], args, row[2], index, worker)


def _drive(program, n_phases, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, alpha, beta, workspace):
    args = _args_memory()
    given = _args(args)
    given.p0, given.p1, given.p2, given.p3, given.p4 = p0, p1, p2, p3, p4
    given.p5, given.p6, given.p7, given.p8, given.p9 = p5, p6, p7, p8, p9
    given.alpha, given.beta, given.workspace = alpha, beta, workspace
    workers = min(num_threads(), _MOST_WORKERS)
    next_indices = _lines()
    own = 0
    for phase in range(n_phases):
        row = _int64(program + 32 * phase)
        function, count, ctx, how = row[0], row[1], row[2], row[3]
        if how == _EACH:
            continue
        first_own, own = own, phase + 1
        if how == _ALONE or count < 2 or workers < 2:
            for worker in range(workers):
                _run_own(program, first_own, phase, args, worker)
            for index in range(count):
                call_task(function, args, ctx, index, 0)
        else:
            for worker in range(workers):
                _int64(next_indices + _PAIR_BYTES * worker)[0] = worker * count // workers
            for worker in prange(workers):
                _run_own(program, first_own, phase, args, worker)
                for turn in range(workers):
                    owner = (worker + turn) % workers
                    next_index, end = next_indices + _PAIR_BYTES * owner, (owner + 1) * count // workers
                    if _int64(next_index)[0] < end:
                        index = atomic_add(next_index, 1)
                        while index < end:
                            call_task(function, args, ctx, index, worker)
                            index = atomic_add(next_index, 1)


_DRIVE_SIGNATURE = types.void(*[types.int64] * (2 + MAX_POINTERS), types.float64, types.float64, types.int64)


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
        """Run all phases on the calling thread, if it is guessed to be done before others have woken up."""
        regions = sum(phase.how == 0 and phase.tasks > 1 for phase in self._keep[0])
        if regions and guess_us(replace(device, threads=1)) < regions * _FEW_US:
            self._table[:, 3] = _ALONE

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int = 0, stream: int = 0
    ) -> None:
        padded = pointers + (0,) * (MAX_POINTERS - len(pointers))
        alpha, beta = scalars or _NO_SCALARS
        if self._lock is None:
            self._drive(*self._start, *padded, alpha, beta, workspace)
        else:
            with self._lock:
                self._drive(*self._start, *padded, alpha, beta, workspace)


@cache
def driver():
    """(compiled driver, lock or None). Workqueue aborts on concurrent calls, so there every call takes the lock."""
    layer = threading_layer()
    dispatcher = njit(parallel=True, nogil=True, error_model="numpy")(_drive)
    dispatcher._cache = DiskCache(_drive, "driver")
    dispatcher.compile(_DRIVE_SIGNATURE.args)
    (compiled,) = dispatcher.overloads.values()
    return compiled.entry_point, threading.Lock() if layer == "workqueue" else None


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
