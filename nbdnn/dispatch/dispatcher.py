"""From a problem to a plan that runs, and the memos that make a repeated call cheap.

Everything here belongs to one thread: plans hold runners, which are not shared. A context holds what goes with one
device and one state of the flags; its memo maps whatever a public function calls equal calls to what that function made
of the first. Such a call is mostly known by its arrays before its device is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from nbdnn import config, driver
from nbdnn.array import Library, Recogniser
from nbdnn.array_numpy import NumPy
from nbdnn.candidate import Runner
from nbdnn.device import Cpu, Device, Gpu, cpu_device, gpu, thread_count
from nbdnn.dispatch import events, policy, recording, workspace
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.policy import Choice, Request
from nbdnn.dispatch.timing import Given
from nbdnn.dispatch.tuner import store_failure
from nbdnn.errors import RefusedOperands
from nbdnn.interrupt import never_lost
from nbdnn.locks import reentrant_lock
from nbdnn.problem import Problem

# A program whose shapes never repeat must not grow for ever.
_MAX_MEMO = 4096
# Known calls of a context with equal arguments on first arrays of one shape, which are asked in turn.
_MOST_ALIKE = 8


class Plan:
    """A problem's chosen candidate and config, prepared. `run` computes."""

    __slots__ = ("_context", "choice", "problem", "ready", "request")

    def __init__(self, context: Context, problem: Problem, request: Request, choice: Choice) -> None:
        self._context, self.problem, self.request = context, problem, request
        recording.note(problem)
        self.take(choice)

    def take(self, choice: Choice) -> None:
        """Run `choice` from now on. ready: the bytes of workspace, and the method that runs: one thing, so that no
        interrupt gives a runner the workspace of another."""
        runner = self._context.runner(self.problem, choice)
        self.ready = choice.option.workspace_bytes, runner.__call__
        self.choice = choice
        events.emit("selected", self.problem, choice.option.candidate.id, _described(choice))

    def run(self, pointers: tuple[int, ...], scalars: tuple[float, ...], stream: int = 0) -> None:
        """Compute. Where the workspace cannot be allocated, or operands are refused that nobody had tried, the next in
        rank takes over, now and from then on."""
        workspace_bytes, runner = self.ready
        try:
            memory = workspace.take_for(self._context.device, workspace_bytes, stream) if workspace_bytes else None
        except MemoryError:
            self._take_smaller(workspace_bytes)
            self.run(pointers, scalars, stream)
            return
        try:
            runner(pointers, scalars, memory.address if memory else 0, stream)
        except RefusedOperands as error:
            self.replace(error)
            self.run(pointers, scalars, stream)

    def replace(self, error: RefusedOperands) -> None:
        """Take the next in rank instead of one that nobody had tried and that met this error; others raise it."""
        if self.choice.source == "measured":
            raise error
        store_failure(self.problem, self._context.device, self._context.database, self.choice.option, str(error))
        self._take_anew(self.request)

    def _take_smaller(self, workspace_bytes: int) -> None:
        reason = f"no memory for its workspace of {workspace_bytes} bytes"
        events.emit("failed", self.problem, self.choice.option.candidate.id, reason)
        limited = self.request.filters._replace(workspace_limit=workspace_bytes - 1)
        self._take_anew(self.request._replace(filters=limited))

    def _take_anew(self, request: Request) -> None:
        self.take(policy.choose(self.problem, self._context.device, self._context.database, request))


def _recogniser(arrays: Sequence[Any], library: Library) -> Recogniser:
    if type(library) is NumPy:
        from nbdnn.kernels.cpu.ndarrays import recogniser

        return recogniser(arrays) or library.recogniser(arrays)
    return library.recogniser(arrays)


def _described(choice: Choice) -> str:
    option = choice.option
    return ", ".join(filter(None, (choice.source, str(option.config), f"workspace {option.workspace_bytes} bytes")))


class Known(NamedTuple):
    """A call that is known by its arrays.

    recognise: their addresses; None of arrays that are not alike. is_ready: whether the thread can run what was
    prepared as it stands: in the GPU's context or with as many threads, and by what the database says now. stream: on
    which to run.
    """

    recognise: Recogniser
    is_ready: Callable[[], bool]
    stream: Callable[[], int]
    context: Context
    call: Any


class _Kept:
    """What one thread keeps under one state of the flags. known: of all devices, by arguments and by the shape of the
    first array."""

    __slots__ = ("contexts", "known", "settings")

    def __init__(self, settings: config.Settings) -> None:
        self.settings = settings
        self.contexts: dict[int, Context] = {}
        self.known: dict[tuple, dict[Any, list[Known]]] = {}

    def forget(self) -> None:
        for each in self.contexts.values():
            each.forget()


class Context:
    """One thread's plans under one state of the flags, for one device.

    memo: of the public functions: key of a call -> what runs it. It is emptied when the database has changed, which
    plans and runners survive.
    """

    def __init__(self, device: Device, database: Database, known: dict[tuple, dict[Any, list[Known]]]) -> None:
        self.device, self.database, self._known = device, database, known
        self.memo: dict[Any, Any] = {}
        self._plans: dict[tuple[Problem, Request], Plan] = {}
        self._runners: dict[tuple, Runner] = {}
        self._follow_database()

    def refresh(self) -> None:
        """Look again: the database has changed."""
        self.memo.clear()
        self._known.clear()
        self._follow_database()

    def _follow_database(self) -> None:
        generation = self.database.generation
        self._is_ready = _readiness(self.device, self.database, generation)
        self.generation = generation

    @property
    def is_valid(self) -> bool:
        """Whether its calls are what the thread would prepare now."""
        device = self.device
        changed = isinstance(device, Cpu) and device.threads != thread_count()
        return not changed and self.generation == self.database.generation

    def remember(self, key: Any, call: Any) -> None:
        if max(len(self.memo), len(self._plans)) >= _MAX_MEMO:
            self.forget()
        self.memo[key] = call

    def recognise(self, arguments: tuple, arrays: Sequence[Any], library: Library, call: Any) -> None:
        """Have `alike` find the call that is in the memo for these arrays."""
        shape = getattr(arrays[0], "shape", None)
        if not isinstance(shape, tuple):  # a method, or nothing: looked up every time
            return
        alike = self._known.setdefault(arguments, {}).setdefault(shape, [])
        ours = [known for known in alike if known.context is self]
        if len(ours) < _MOST_ALIKE and not any(known.recognise(arrays) for known in ours):
            stream = partial(library.stream, self.device.index) if isinstance(self.device, Gpu) else int
            alike.append(Known(_recogniser(arrays, library), self._is_ready, stream, self, call))

    def forget(self) -> None:
        """Drop every plan and runner."""
        for memo in (self.memo, self._known, self._plans, self._runners):
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
                self._runners[key] = candidate.ready(problem, config_, self.device)
        return self._runners[key]


def _readiness(device: Device, database: Database, generation: int) -> Callable[[], bool]:
    """`Known.is_ready` of what was prepared for a device by that state of the database. On the path of a call."""
    if isinstance(device, Cpu):
        return lambda: thread_count() == device.threads and database.generation == generation
    ask, current = driver.current_context()
    wanted = driver.handle(device.index)
    return lambda: not ask() and current.value == wanted and database.generation == generation


_databases: dict[tuple[str, str], Database] = {}
_lock = reentrant_lock()


def alike(arguments: tuple, arrays: Sequence[Any]) -> Sequence[Known]:
    """The known calls of which one may be this, and whose recognisers tell. On the path of every call."""
    try:
        shapes = config.kept(_Kept).known.get(arguments)
        return shapes.get(arrays[0].shape, ()) if shapes else ()
    except (TypeError, AttributeError, RuntimeError):  # unhashable, no array, or without a shape: the checks say which
        return ()


def context(index: int = -1) -> Context:
    """The calling thread's context for the flags as they are now: of that GPU, or of the CPU and its threads (-1)."""
    kept = config.kept(_Kept)
    key = index if index >= 0 else -thread_count()
    found = kept.contexts.get(key)
    if found is None:
        found = kept.contexts[key] = Context(
            cpu_device() if index < 0 else gpu(index), database(kept.settings), kept.known
        )
    if found.generation != found.database.generation:
        found.refresh()
    return found


def database(settings: config.Settings | None = None) -> Database:
    """The process's tuning database for these flags, or for those that the thread sees now."""
    settings = settings or config.current()
    key = str(config.database_path(settings)), settings["tune.mode"]
    with _lock:
        if key not in _databases:
            _databases[key] = Database(*key)
        return _databases[key]


def empty_cache() -> None:
    """Free the workspace of every thread, and the calling thread's plans.

    The memory comes back with the next call that needs it.
    """
    config.forget()
    workspace.empty()
