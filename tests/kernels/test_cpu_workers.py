"""The team of workers: every index of a phase is run once, whoever sleeps, calls, forks or ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nbdnn.device import Cpu
from nbdnn.kernels.cpu import workers
from nbdnn.kernels.cpu.atomics import atomic_add
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.vector import pointer

_MOST_WORKERS, _ASLEEP_S = 64, 0.02
_elements = pointer("i64")


def _count(args, ctx, index, worker):
    """How often an index was run, by workers that had prepared themselves once."""
    atomic_add(ctx + 8 * index, 1 if _elements(_elements(args)[0])[worker] == 1 else 1_000_000)


def _prepare(args, ctx, index, worker):
    _elements(_elements(args)[0])[worker] += 1


class _Counted:
    """A program of some phases of so many tasks, before which each worker prepares itself."""

    def __init__(self, *tasks: int, few: bool = False) -> None:
        self.prepared = np.zeros(_MOST_WORKERS, np.int64)
        self.seen = [np.zeros(count, np.int64) for count in tasks]
        prepare = Phase(compile_task(_prepare, "prepare"), 1, self.prepared, each=True)
        task = compile_task(_count, "count")
        self.program = Program([prepare, *(Phase(task, len(row), row, few=few) for row in self.seen)])

    def run(self) -> None:
        self.prepared[:] = 0
        self.program((self.prepared.ctypes.data,), ())

    def check(self, times: int) -> None:
        assert all((row == times).all() for row in self.seen)


def _wait_until_asleep() -> None:
    workers.team()
    end = time.monotonic() + 60
    first = (workers._WORKERS + workers.LINE_BYTES) // 8
    while any(workers._team._threads) and workers._team._words[first] == 0 and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.001)  # or a call so soon after another would wake them


@pytest.mark.parametrize("tasks", [[2], [3, 1, 2], [1000], [2, 5000, 7, 64]])
@pytest.mark.parametrize("few", [False, True])
def test_every_index_is_run_once(device: Cpu, tasks: list[int], few: bool) -> None:
    counted = _Counted(*tasks, few=few)
    for _ in range(300):
        counted.run()
    for _ in range(5):  # of which some workers sleep
        time.sleep(_ASLEEP_S)
        counted.run()
    counted.check(305)


def test_few_tasks_are_the_callers_while_others_sleep(device: Cpu) -> None:
    counted = _Counted(1000, few=True)
    for _ in range(5):
        _wait_until_asleep()
        counted.run()
        assert counted.prepared.tolist() == [1] + [0] * (_MOST_WORKERS - 1)
    counted.check(5)


def test_several_threads_call_at_once(device: Cpu) -> None:
    """One of them has the team; the others go by Numba's threads."""
    programs = [_Counted(500, 20, 3000) for _ in range(4)]
    threads = [threading.Thread(target=lambda each=each: [each.run() for _ in range(200)]) for each in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in programs:
        each.check(200)


def test_a_team_that_stands_back_has_numbas_threads_run_all(device: Cpu) -> None:
    counted, few = _Counted(500, 20), _Counted(500, few=True)
    counted.run()
    workers._team._words[workers._STANDS_BACK] = 2**62
    region = workers._team._words[workers._STATE // 8]
    for _ in range(100):
        counted.run()
        few.run()
    assert workers._team._words[workers._STATE // 8] == region
    assert few.prepared[0] == 1
    workers._team._words[workers._STANDS_BACK] = 1  # which has long passed
    counted.run()
    counted.check(102)
    few.check(100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_workers_of_its_own(device: Cpu) -> None:
    counted = _Counted(100, 1000)
    counted.run()
    before = workers._team
    child = os.fork()
    if child == 0:
        counted.run()
        own = workers._team is not before
        workers._team._words[workers._STANDS_BACK] = 2**62  # never by Numba's threads, of which OpenMP's would kill it
        counted.run()
        alone = counted.prepared.tolist() == [1] + [0] * (_MOST_WORKERS - 1)
        os._exit(0 if own and alone and all((row == 3).all() for row in counted.seen) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert workers._team is before
    counted.run()
    counted.check(2)


def _in_a_process(code: str, **environment: str) -> None:
    """Of more workers than it has cores."""
    path, code = str(Path(__file__).parent), "from test_cpu_workers import _Counted, workers\n" + code
    environment = {**os.environ, "NUMBA_NUM_THREADS": "16", "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_calls_behind_the_end_goes_by_numbas_threads(device: Cpu) -> None:
    """In a process that ends as soon as it has called."""
    _in_a_process("""
counted = _Counted(3, 500, 40)
for _ in range(200): counted.run()
workers._team._words[workers._STANDS_BACK] = 2**62  # which nobody waits for
workers._team.end(); workers._team.end()
counted.run()
counted.check(201)
workers._team = None
counted.run()
""")


@pytest.mark.skipif(sys.platform != "linux", reason="no team on this system")
def test_a_team_that_is_interrupted_first_begins_anew(device: Cpu) -> None:
    """Before any worker exists."""
    _in_a_process("""
import signal
counted, all_signals = _Counted(3, 500, 40), signal.valid_signals
def interrupted():
    signal.valid_signals = all_signals
    raise KeyboardInterrupt
signal.valid_signals = interrupted
try: counted.run()
except KeyboardInterrupt: pass
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
counted.run()
assert sum(map(bool, workers._team._threads)) == 15
counted.check(1)
""")


@pytest.mark.skipif(sys.platform != "linux", reason="no team on this system")
@pytest.mark.parametrize("meanwhile", ["raise KeyboardInterrupt", "counted.run()"])
def test_a_team_whose_beginning_is_interrupted_is_whole(device: Cpu, meanwhile: str) -> None:
    """By Ctrl-C, or by a handler of signals that calls: each worker is one thread, which somebody knows."""
    _in_a_process(f"""
import os
counted = _Counted(3, 500, 40)
begin = workers._Team._begin
def interrupted(team, number):
    begin(team, number)
    if number in (1, 7) and number not in seen:
        seen.append(number)
        {meanwhile}
seen = []
workers._Team._begin = interrupted
before = len(os.listdir("/proc/self/task"))
for _ in range(3):
    try: counted.run()
    except KeyboardInterrupt: pass
for _ in range(200): counted.run()
assert seen == [1, 7] and sum(map(bool, workers._team._threads)) == 15
assert len(os.listdir("/proc/self/task")) <= before + 15
""")


def test_threads_that_call_first_share_a_lock(device: Cpu) -> None:
    """A layer that aborts when two threads call at once."""
    _in_a_process(
        """
import threading
from nbdnn.kernels.cpu import launch
found, together = [], threading.Barrier(6)
def first():
    together.wait()
    found.append(launch.driver())
threads = [threading.Thread(target=first) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found[0][1] is not None and len({id(one) for one in found}) == 1
""",
        NUMBA_THREADING_LAYER="workqueue",
    )


def test_signals_are_not_for_workers(device: Cpu) -> None:
    """A worker that sleeps would be woken by them, and Python's handlers run by the main thread alone."""
    counted = _Counted(1000)
    counted.run()
    blocked = [
        int(line.split()[1], 16)
        for status in Path("/proc/self/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith("SigBlk")
    ]
    usual = 1 << 14  # SIGTERM's bit
    assert sum(mask & usual != 0 for mask in blocked) >= sum(map(bool, workers._team._threads))
