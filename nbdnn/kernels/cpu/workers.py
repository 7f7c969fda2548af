"""Threads that run a region with its caller, and stay awake for a while, since the next region may soon come.

    caller    1. claims the team; who finds it taken goes by Numba's threads, in a forked child alone
              2. opens a region, and wakes two workers that sleep; each wakes two more
              3. runs its share, closes the region, and waits for the workers that had joined

The threads of TBB sleep as soon as they have nothing to do, and waking one takes 10 us and more, between calls that
take 50; those of OpenMP kill forked children. A worker here looks for the next region some 100 us long, and leaves its
core to others now and then; then it sleeps. A region costs the caller 1 us while workers are awake: softmax of
64x1000 takes 29 us instead of 40, batch normalisation of 64x56x56 27 instead of 43 (Emerald Rapids, two threads).
Nobody waits for a worker that sleeps: who comes late finds nothing left, or the region closed. Where another library's
threads stay awake on the same cores, the team stands back, and Numba's threads run what it would have.

Memory of a team, a pair of cache lines each: whether it is taken, and other words of the first line; the state of its
region; the region's job; and for each worker whether it sleeps, its number, the team's address, and a semaphore. Lines
of a call, one for each worker: the next index of its range, and for which phase it is prepared.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal

import numpy as np
from numba import int64, njit, types
from numba.core import config as numba_config

from nbdnn.kernels.cpu.atomics import atomic_add, look, replace, swap
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.libc import IS_LINUX, clock_gettime, sched_yield, sem_post, sem_wait
from nbdnn.kernels.cpu.vector import call_task, pointer, stack
from nbdnn.locks import reentrant_lock

_WORD_BYTES = 8
LINE_BYTES = 128  # of lines, which some processors fetch together
_TAKEN, _STATE, _JOB, _WORKERS = (LINE_BYTES * line for line in range(4))
# Of the first line: how many workers there are, when a call of few tasks last found them asleep, until when the team
# stands back and for how long in all, and whether a fork made the process.
_COUNT, _ASKED, _STANDS_BACK, _FOR, _IN_CHILD = 1, 2, 3, 4, 5
_SEMAPHORE = 64  # of a worker's line
MOST_WORKERS = 512
PHASE_BYTES, EACH, FEW = 32, 2, 3  # a row of a program: the task's address, its indices, its context, and how it runs
# The state of a region: its number << 32 | workers << 16 | whether it is open | workers that have joined. An open one
# of no workers is the end.
_NUMBER, _OF_WORKERS, _OPEN = 32, 16, 1 << 15
_JOINED, _MOST = _OPEN - 1, (1 << 16) - 1
# Looks between two times that a worker leaves its core to others, and how often it does before it sleeps.
_LOOKS, _ROUNDS = 16, 128

# A worker that gets its core back as late as this one shares it with a thread that stays awake as well, such as one of
# OpenMP or of TBB; one that had slept would be preferred to it. So the team stands back for a while, and sleeps: the
# other threads may be done for long, so that it is a short while first, and twice as long each time it was too short.
_LONG_NS, _LEAST_ELSEWHERE_NS, _MOST_ELSEWHERE_NS = 250_000, 8_000_000, 256_000_000
# Calls of few tasks that follow each other as fast keep workers awake, which one alone is not worth.
_SOON_NS = 100_000
_MONOTONIC = 1  # of clock_gettime

_OF_ADDRESS = types.int64(types.int64)
_int64, _time = pointer("i64"), stack(16)


@njit(**DEVICE)
def prepare(program, phase, args, ranges, worker):
    """What every worker does for itself in the phases before this one, as far as this one has not."""
    line = _int64(ranges + LINE_BYTES * worker)
    for before in range(line[1], phase):
        row = _int64(program + PHASE_BYTES * before)
        if row[3] == EACH:
            for index in range(row[1]):
                call_task(row[0], args, row[2], index, worker)
    line[1] = phase


@njit(**DEVICE)
def share(program, phase, args, ranges, workers, worker):
    """A worker's part of a phase: the indices of its own range, then those of the others; of few tasks those alone that
    nobody has begun, since fetching from another core what a task of 1 us needs takes as long."""
    row = _int64(program + PHASE_BYTES * phase)
    function, count, ctx, is_few = row[0], row[1], row[2], row[3] == FEW
    for turn in range(workers):
        owner = (worker + turn) % workers
        next_index, begin, end = ranges + LINE_BYTES * owner, owner * count // workers, (owner + 1) * count // workers
        found = _int64(next_index)[0]
        if found == begin if is_few and turn > 0 else found < end:
            index = atomic_add(next_index, 1)
            if index < end:
                prepare(program, phase, args, ranges, worker)
            while index < end:
                call_task(function, args, ctx, index, worker)
                index = atomic_add(next_index, 1)


@njit(**DEVICE)
def _wake(line):
    """The worker of this line, if it sleeps. Nobody is missed: who opens a region swaps its state, then looks who
    sleeps; who goes to sleep swaps its word, then looks at the state. One of the two sees the other's."""
    if look(line) == 1 and swap(line, 0) == 1:
        sem_post(line + _SEMAPHORE, 0)


@njit(**DEVICE)
def _wake_below(team, number, workers):
    """The two workers that this one has to wake."""
    for below in range(2 * number + 1, min(2 * number + 3, workers)):
        _wake(team + _WORKERS + LINE_BYTES * below)


@njit(**DEVICE)
def _now_ns():
    time = _time()
    clock_gettime(_MONOTONIC, time)
    return _int64(time)[0] * 1_000_000_000 + _int64(time)[1]


@njit(**DEVICE)
def claim(team):
    """Whether the team is the caller's now, until it gives it back."""
    line = _int64(team + _TAKEN)
    if line[0] != 0 or (line[_STANDS_BACK] != 0 and _now_ns() < line[_STANDS_BACK]):
        return False
    return replace(team + _TAKEN, 0, 1)


@njit(**DEVICE)
def is_alone(team):
    """Whether a fork made this process, where Numba's threads may hang it, or end it."""
    return _int64(team + _TAKEN)[_IN_CHILD] != 0


@njit(**DEVICE)
def come_soon(team):
    """Whether the first worker is awake, and so most likely the others are; or shall be, since it is not long ago that
    somebody asked in vain."""
    if _int64(team + _WORKERS + LINE_BYTES)[0] == 0:
        return True
    line, now_ns = _int64(team + _TAKEN), _now_ns()
    asked_ns, line[_ASKED] = line[_ASKED], now_ns
    return now_ns - asked_ns < _SOON_NS


@njit(**DEVICE)
def give_back(team):
    swap(team + _TAKEN, 0)


@njit(**DEVICE)
def run_region(team, program, phase, args, ranges, workers):
    """A phase by the caller, which has claimed the team, and by whoever else comes in time."""
    job = _int64(team + _JOB)
    job[0], job[1], job[2], job[3], job[4] = program, phase, args, ranges, workers
    number = (_int64(team + _STATE)[0] >> _NUMBER) + 1
    swap(team + _STATE, number << _NUMBER | workers << _OF_WORKERS | _OPEN)
    _wake_below(team, int64(0), workers)
    share(program, phase, args, ranges, workers, int64(0))
    atomic_add(team + _STATE, -_OPEN)
    looks = 0
    while look(team + _STATE) & _JOINED:
        looks += 1
        if looks % _LOOKS == 0 and looks > _LOOKS * _ROUNDS:
            sched_yield(0, 0)


@njit(**DEVICE)
def _workers_of(state):
    return state >> _OF_WORKERS & _MOST


@njit(**DEVICE)
def _concerns(state, number, seen):
    """Whether a region is open, new to a worker, and of so many that it is among them, or of none, which ends all."""
    workers = _workers_of(state)
    return state & _OPEN != 0 and state >> _NUMBER != seen and (workers == 0 or number < workers)


@njit(**DEVICE)
def _stand_back(team, now_ns):
    """Until others have most likely come to rest."""
    line = _int64(team + _TAKEN)
    since_ns = now_ns - line[_STANDS_BACK]
    if since_ns > 0:  # or another worker has said so already
        is_again = since_ns < line[_FOR]
        line[_FOR] = min(2 * line[_FOR], _MOST_ELSEWHERE_NS) if is_again else _LEAST_ELSEWHERE_NS
        line[_STANDS_BACK] = now_ns + line[_FOR]


@njit(**DEVICE)
def _next_region(team, line, number, seen):
    """The state of the next region that concerns a worker, as soon as it is open."""
    while True:
        for _ in range(_ROUNDS):
            for _ in range(_LOOKS):
                state = look(team + _STATE)
                if _concerns(state, number, seen):
                    return state
            left_ns = _now_ns()
            sched_yield(0, 0)
            back_ns = _now_ns()
            if back_ns - left_ns > _LONG_NS:
                _stand_back(team, back_ns)
                break
        swap(line, 1)
        state = look(team + _STATE)
        if _concerns(state, number, seen) and swap(line, 0) == 1:
            return state
        while sem_wait(line + _SEMAPHORE, 0) != 0:
            pass


@njit(**DEVICE)
def _join(team, state):
    """Whether the region of this state was still open."""
    number = state >> _NUMBER
    while state >> _NUMBER == number and state & _OPEN:
        if replace(team + _STATE, state, state + 1):
            return True
        state = look(team + _STATE)
    return False


def _work(line):
    """A worker's life."""
    number, team = _int64(line)[1], _int64(line)[2]
    state = 0
    while True:
        state = _next_region(team, line, number, state >> _NUMBER)
        if _workers_of(state) == 0:
            return 0
        _wake_below(team, number, _workers_of(state))
        if _join(team, state):
            job = _int64(team + _JOB)
            share(job[0], job[1], job[2], job[3], job[4], number)
            atomic_add(team + _STATE, -1)


def _end(team):
    """Claim the team for ever, and send its workers home."""
    while not replace(team + _TAKEN, 0, 1):
        sched_yield(0, 0)
    number = (_int64(team + _STATE)[0] >> _NUMBER) + 1
    swap(team + _STATE, number << _NUMBER | _OPEN)
    for worker in range(1, _int64(team + _TAKEN)[_COUNT]):
        _wake(team + _WORKERS + LINE_BYTES * worker)
    return number


class _Team:
    """Memory of a team and, on Linux, its threads. Elsewhere it is taken for ever, and Numba's threads run all."""

    def __init__(self) -> None:
        workers = min(numba_config.NUMBA_NUM_THREADS, MOST_WORKERS)  # type: ignore[attr-defined]
        memory = np.zeros((_WORKERS + (workers + 1) * LINE_BYTES) // _WORD_BYTES, np.int64)
        self.address = -(-memory.ctypes.data // LINE_BYTES) * LINE_BYTES
        self._words = memory[(self.address - memory.ctypes.data) // _WORD_BYTES :]
        self._threads = (ctypes.c_ulong * workers)()  # ids, 0 where there is no such thread
        self._words[_COUNT], self._words[_IN_CHILD] = workers, _is_child
        self.is_complete, self._begins = not IS_LINUX, False
        if not IS_LINUX:
            self._words[0] = 1

    def begin(self) -> None:
        """The threads that are missing. Ctrl-C may end this at any point, and the next call goes on; a handler of
        signals may call meanwhile, and has those that have begun."""
        if self._begins:
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            self._begins = True
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which are for Python's threads
            for number in range(1, len(self._threads)):
                if not self._threads[number]:
                    self._begin(number)
            self.is_complete = True
        finally:
            self._begins = False
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _begin(self, number: int) -> None:
        offset = _WORKERS + number * LINE_BYTES
        self._words[offset // _WORD_BYTES + 1 : offset // _WORD_BYTES + 3] = number, self.address
        library, line = ctypes.CDLL(None), ctypes.c_void_p(self.address + offset)
        thread = ctypes.byref(self._threads, number * ctypes.sizeof(ctypes.c_ulong))
        library.sem_init(ctypes.c_void_p(self.address + offset + _SEMAPHORE), 0, 0)
        life = ctypes.c_void_p(compile_task(_work, "work", signature=_OF_ADDRESS).address)
        if library.pthread_create(thread, None, life, line) != 0:  # there is one less
            self._threads[number] = 0

    def end(self) -> None:
        """No thread runs machine code of ours any longer; who comes later finds the team taken."""
        if any(self._threads):
            compile_task(_end, "end", signature=_OF_ADDRESS).ctypes(self.address)
        for number, thread in enumerate(self._threads):
            if thread:
                self._threads[number] = 0
                ctypes.CDLL(None).pthread_join(ctypes.c_ulong(thread), None)


_team: _Team | None = None
_is_child = False
_lock = reentrant_lock()


def team() -> int:
    """Address of this process's team."""
    global _team
    if _team is None or not _team.is_complete:
        with _lock:
            made = _team or _Team()
            _team = _team or made  # a handler of signals may have made one meanwhile
            if not _team.is_complete:
                _team.begin()
    return _team.address


@atexit.register
def _end_team() -> None:
    """Before the interpreter lets go of the machine code that workers run."""
    if _team is not None:
        _team.end()


def _after_fork_in_child() -> None:
    """The workers are the parent's."""
    global _team, _is_child
    _team, _is_child = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
