"""Kernels of problems that are about to be tuned, compiled ahead by other processes.

A kernel takes a compiler seconds of one processor, and a problem has dozens of them: one after the other they take
longer than the measurements, and most of a problem's budget. What a process compiles lies on disk afterwards, where
the one that measures finds it. A GPU's kernels only: those of a CPU are timed on the processors that would compile.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import TYPE_CHECKING

from nbdnn.device import Device, Gpu, processors
from nbdnn.dispatch import registry
from nbdnn.dispatch.measurement import is_current
from nbdnn.dispatch.selection import Filters, refusal

if TYPE_CHECKING:
    from nbdnn.dispatch.database import Database
    from nbdnn.kernels.cuda.compile import Source
    from nbdnn.problem import Problem

_MOST_PROCESSES = 32  # each takes some 300 MB
_LOOK_S = 0.1
_SET_DEATH_SIGNAL = 1  # of prctl(2)


class Ahead:
    """Compiles what tuning the problems on a device will need and is not on disk; a context, which ends with it.

    filters, again: as of `tune`. processes: at most so many, by default as many as there are processors. With one, and
    where fewer than two kernels are missing, nothing happens: who measures compiles.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        device: Device,
        database: Database,
        filters: Filters = Filters(),  # noqa: B008
        again: bool = False,
        processes: int | None = None,
    ) -> None:
        self._missing: dict[Problem, list[Source]] = {}
        self._compiled: dict[Source, Future[None]] = {}
        self._pool: ProcessPoolExecutor | None = None
        processes = processors() if processes is None else processes
        if not isinstance(device, Gpu) or processes < 2:
            return
        for problem in problems:
            self._missing[problem] = list(_missing(problem, device, database, filters, again))
        wanted = list(dict.fromkeys(source for sources in self._missing.values() for source in sources))
        if len(wanted) > 1:
            # No fork: this process has threads, and perhaps a context of CUDA.
            self._pool = ProcessPoolExecutor(
                min(processes, _MOST_PROCESSES, len(wanted)), get_context("spawn"), _obey, (os.getpid(),)
            )
            self._compiled = {source: self._pool.submit(_compile, source, device.arch) for source in wanted}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def await_kernels(self, problem: Problem, check: Callable[[], None]) -> None:
        """Until the problem's kernels are there. What failed is for the one that measures to meet. check: called again
        and again, may raise."""
        pending = {self._compiled[source] for source in self._missing.get(problem, ()) if source in self._compiled}
        while pending:
            check()
            _, pending = wait(pending, timeout=_LOOK_S)


def _missing(problem: Problem, gpu: Gpu, database: Database, filters: Filters, again: bool) -> Iterator[Source]:
    """What options without a valid row launch, as far as it is not on disk."""
    from nbdnn.kernels.cuda.compile import is_kept
    from nbdnn.kernels.cuda.launch import LaunchedCandidate, filled

    if not all(operand.size_elems for operand in problem.operands):
        return  # which nobody runs
    rows = database.rows(gpu.fingerprint, str(problem))
    known = set() if again else {(row.candidate, row.config) for row in rows if is_current(row)}
    for candidate in registry.candidates(problem.op, kind="cuda"):
        if not isinstance(candidate, LaunchedCandidate) or refusal(candidate, problem, gpu, filters):
            continue
        for config in candidate.configs(problem, gpu):
            if (candidate.id, str(config)) not in known:
                sources = (launch.source for launch in filled(candidate.launches(problem, config, gpu)))
                yield from (source for source in sources if not is_kept(source, gpu.arch))


def _obey(parent: int) -> None:
    """Ctrl-C is for the process that measures, and none outlives it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


def _compile(source: Source, arch: str) -> None:
    from nbdnn.kernels.cuda.compile import compile_kernel

    compile_kernel(source, arch)
