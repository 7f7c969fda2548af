"""From a problem to a plan that runs, and the memos that make a repeated call cheap.

Everything here belongs to one thread: plans hold runners, which are not shared. A context holds what goes with one
state of the flags; its memo maps whatever a public function calls equal calls to what that function made of the first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from nbdnn import config
from nbdnn.array import Library, Recogniser
from nbdnn.candidate import Runner
from nbdnn.device import Device, cpu_device, gpu, thread_count
from nbdnn.dispatch import events, policy, recording, workspace
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.interrupt import never_lost
from nbdnn.dispatch.policy import Choice, Request
from nbdnn.dispatch.timing import Given
from nbdnn.problem import Problem

# A program whose shapes never repeat must not grow for ever.
_MAX_MEMO, _MAX_CONTEXTS = 4096, 32
# Recognisers of calls with equal arguments on first arrays of one shape, which are asked in turn.
_MOST_ALIKE = 4


class Plan:
    """A problem's chosen candidate and config, prepared. `run` computes."""

    __slots__ = ("_context", "choice", "problem", "request", "runner", "workspace_bytes")

    def __init__(self, context: Context, problem: Problem, request: Request, choice: Choice) -> None:
        self._context, self.problem, self.request = context, problem, request
        recording.note(problem)
        self.take(choice)

    def take(self, choice: Choice) -> None:
        """Run `choice` from now on."""
        self.choice, self.workspace_bytes = choice, choice.option.workspace_bytes
        self.runner = self._context.runner(self.problem, choice)
        events.emit("selected", self.problem, choice.option.candidate.id, _described(choice))

    def run(self, pointers: tuple[int, ...], scalars: tuple[float, ...], stream: int = 0) -> None:
        """Compute. Where the workspace cannot be allocated, the next in rank takes over, now and from then on."""
        if not self.workspace_bytes:
            self.runner(pointers, scalars, 0, stream)
            return
        try:
            memory = workspace.take_for(self._context.device, self.workspace_bytes, stream)
        except MemoryError:
            self._take_next()
            self.run(pointers, scalars, stream)
        else:
            self.runner(pointers, scalars, memory.address, stream)

    def _take_next(self) -> None:
        reason = f"no memory for its workspace of {self.workspace_bytes} bytes"
        events.emit("failed", self.problem, self.choice.option.candidate.id, reason)
        limited = self.request.filters._replace(workspace_limit=self.workspace_bytes - 1)
        smaller = self.request._replace(filters=limited)
        self.take(policy.choose(self.problem, self._context.device, self._context.database, smaller))


def _unknown(arrays: Sequence[Any]) -> None:
    """A recogniser of nothing."""


def _described(choice: Choice) -> str:
    option = choice.option
    return ", ".join(filter(None, (choice.source, str(option.config), f"workspace {option.workspace_bytes} bytes")))


class Context:
    """One thread's plans under one state of the flags, for one device.

    memo: of the public functions: key of a call -> what runs it. It is emptied when the database has changed.
    """

    def __init__(self, device: Device, database: Database) -> None:
        self.device, self.database = device, database
        self.generation = database.generation
        self.memo: dict[Any, Any] = {}
        self._recognisers: dict[Any, list[tuple[Recogniser, Any]]] = {}
        self._plans: dict[tuple[Problem, Request], Plan] = {}
        self._runners: dict[tuple, Runner] = {}

    def refresh(self) -> None:
        self.generation = self.database.generation
        self.memo.clear()
        self._recognisers.clear()

    def remember(self, key: Any, call: Any) -> None:
        if len(self.memo) >= _MAX_MEMO:
            self.forget()
        self.memo[key] = call

    def recognised(self, arguments: tuple, arrays: Sequence[Any]) -> tuple[Any, list[int]] | None:
        """What runs a call on arrays as they were seen before, and their addresses: the memo without its key."""
        try:
            alike = self._recognisers.get((arguments, len(arrays), arrays[0].shape), ())
        except (TypeError, RuntimeError):  # unhashable, or without a shape: the checks say what should have been there
            return None
        for recogniser, call in alike:
            if (pointers := recogniser(arrays)) is not None:
                return call, pointers
        return None

    def recognise(self, arguments: tuple, arrays: Sequence[Any], library: Library, call: Any) -> None:
        """Have `recognised` find the call that is in the memo for these arrays. Where they cannot be recognised that
        counts as one of the few kinds of them, so that it is not tried at every call."""
        known = self._recognisers.setdefault((arguments, len(arrays), arrays[0].shape), [])
        if len(known) < _MOST_ALIKE:
            known.append((library.recogniser(arrays) or _unknown, call))

    def forget(self) -> None:
        """Drop every plan and runner."""
        for memo in (self.memo, self._recognisers, self._plans, self._runners):
            memo.clear()

    def plan(self, problem: Problem, request: Request, given: Given | None = None) -> Plan:
        """The plan for a problem. A plan made before stays the same object as long as the choice is the same."""
        choice = policy.choose(problem, self.device, self.database, request, given)
        plan = self._plans.get((problem, request))
        if plan is None:
            plan = self._plans[problem, request] = Plan(self, problem, request, choice)
        elif plan.choice.option != choice.option:
            plan.take(choice)
        return plan

    def runner(self, problem: Problem, choice: Choice) -> Runner:
        key = (problem, choice.option.key)
        if key not in self._runners:
            candidate, config_, _ = choice.option
            with never_lost():
                self._runners[key] = candidate.prepare(problem, config_, self.device)
        return self._runners[key]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: dict[tuple[config.Settings, str, int], Context] = {}


_thread = _Thread()
_databases: dict[tuple[str, str], Database] = {}
_lock = threading.Lock()


def context(index: int = -1) -> Context:
    """The calling thread's context for the flags as they are now: of that GPU, or of the CPU and its threads (-1)."""
    threads = thread_count() if index < 0 else 0
    kept, key = config.kept(), index - threads
    found = kept.get(key)
    if found is None:
        found = kept[key] = _context(config.current(), threads, index)
    if found.generation != found.database.generation:
        found.refresh()
    return found


def _context(settings: config.Settings, threads: int, index: int) -> Context:
    key = (settings, "cpu", threads) if index < 0 else (settings, "cuda", index)
    found = _thread.contexts.get(key)
    if found is None:
        if len(_thread.contexts) >= _MAX_CONTEXTS:
            _thread.contexts.clear()
        found = _thread.contexts[key] = Context(cpu_device() if index < 0 else gpu(index), database())
    return found


def database() -> Database:
    """The process's tuning database for the flags as they are now."""
    key = str(config.database_path()), config.current()["tune.mode"]
    with _lock:
        if key not in _databases:
            _databases[key] = Database(*key)
        return _databases[key]


def empty_cache() -> None:
    """Free the workspace of every thread, and the calling thread's plans.

    The memory comes back with the next call that needs it.
    """
    for each in _thread.contexts.values():
        each.forget()
    _thread.contexts.clear()
    config.kept().clear()
    workspace.empty()
