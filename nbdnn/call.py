"""A call of any op: what the first of its kind does, and what is left to do at the next ones.

`compute` reads the arrays and looks in the memo. On a miss, the family's `prepare` checks everything, settles layouts
and dtype and builds a `Call`; from then on a call is: read, look up, allocate, run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nbdnn import driver
from nbdnn.array import Library, dense_copy, library_of, read, stream_handle
from nbdnn.dispatch import dispatcher, events
from nbdnn.dispatch.policy import Request
from nbdnn.dispatch.timing import Given
from nbdnn.errors import CudaError, InvalidProblem, InvalidType
from nbdnn.problem import Problem

_ABSENT = (0, None)


class Runs(Protocol):
    """A plan, or what stands for one where there is nothing to choose."""

    def run(self, pointers: tuple[int, ...], scalars: tuple[float, ...], stream: int = 0) -> None: ...


class Family(NamedTuple):
    """What ops of one kind do at the first call of its kind.

    names: (arguments) of the arrays that `compute` is given, for errors. prepare: (arguments, arrays, scalars).
    """

    names: Callable[[tuple], tuple[str, ...]]
    prepare: Callable[[tuple, Sequence[Any], tuple[float, ...]], Call]


def compute(
    family: Family, arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...] = (), stream: Any = None
) -> Any:
    """The result of a call; several are a tuple.

    arguments: hashable; with what `read` says of the arrays they are the memo's key. arrays: inputs, then the outputs
    that the caller gave; None where absent. stream: what the caller gave, for arrays on a GPU.
    """
    first = arrays[0]
    try:
        library = library_of(first)
        read_one, kind = library.read, type(first)
        pointers: list[int] = []
        key: list[Hashable] = [arguments]
        for array in arrays:
            if array is None:
                pointer, facts = _ABSENT
            else:
                pointer, facts = read_one(array) if type(array) is kind else read(array)
            pointers.append(pointer)
            key.append(facts)
    except InvalidType:
        _name_unreadable(family.names(arguments), arrays)
        raise
    gpu = library.gpu(first)
    if gpu < 0:
        context = dispatcher.context()
        call = _call(context, tuple(key), family, arguments, arrays, scalars)
        return call.run(context, arrays, pointers, scalars, 0)
    changed = driver.enter(gpu)
    try:
        context = dispatcher.context(gpu)
        call = _call(context, tuple(key), family, arguments, arrays, scalars)
        if stream is None:
            return call.run(context, arrays, pointers, scalars, library.stream(gpu))
        handle = stream_handle(stream)
        with library.on_stream(gpu, handle):
            return call.run(context, arrays, pointers, scalars, handle)
    finally:
        if changed:
            driver.leave()


def _call(
    context: dispatcher.Context,
    key: tuple,
    family: Family,
    arguments: tuple,
    arrays: Sequence[Any],
    scalars: tuple[float, ...],
) -> Call:
    """What runs calls with this key: made of the first of them."""
    try:
        call = context.memo.get(key)
    except TypeError:  # unhashable, as a list is: the checks say what should have been there
        call = None
    if call is None:
        call = family.prepare(arguments, arrays, scalars)
        context.remember(key, call)
    return call


class Output(NamedTuple):
    """A result of a call. place: of the array that the caller may have given for it. allocate: makes it; or where the
    given one is not dense (staged), what is computed before it is copied there. keeps: what was in it is read."""

    place: int
    library: Library
    allocate: Callable[[], Any]
    staged: bool
    keeps: bool


class Copied(NamedTuple):
    """An input that cannot be used as it is: its place among the arrays, its name, and what it becomes."""

    place: int
    name: str
    channels_last: bool
    dtype: str


@dataclass(slots=True)
class Call:
    """Calls with equal arguments on arrays of equal shapes, strides and dtypes.

    order: the arrays whose addresses the runner takes, as it takes them. inputs: (place, name, offsets from the address
    to the first byte and past the last) of every input that is not empty; given: (place, the same two) of the outputs
    that the caller gives. without_plan: what runs a problem without elements.
    """

    problem: Problem
    request: Request
    order: tuple[int, ...]
    outputs: tuple[Output, ...]
    copies: tuple[Copied, ...]
    inputs: tuple[tuple[int, str, int, int], ...]
    given: tuple[tuple[int, int, int], ...]
    without_plan: Callable[[Any, Any], Runs] | None = None
    plan: Runs | None = None

    def run(
        self,
        context: dispatcher.Context,
        arrays: Sequence[Any],
        pointers: list[int],
        scalars: tuple[float, ...],
        stream: int,
    ) -> Any:
        for place, low, high in self.given:
            self._refuse_overlap(pointers, place, low, high)
        results = [self._result(output, arrays, pointers) for output in self.outputs]
        copied = self._copy(arrays, pointers) if self.copies else None
        addresses = tuple([pointers[i] for i in self.order])
        if self.plan is None:
            self.plan = self._plan(context, addresses, scalars, stream)
        self.plan.run(addresses, scalars, stream)
        del copied  # alive until here: the runner had its address
        for i, (place, library, _, staged, _) in enumerate(self.outputs):
            if (given := arrays[place]) is None:
                results[i] = library.given(results[i])
            elif staged:
                library.copy(given, results[i])
                results[i] = given
        return results[0] if len(results) == 1 else tuple(results)

    def _result(self, output: Output, arrays: Sequence[Any], pointers: list[int]) -> Any:
        given = arrays[output.place]
        if given is not None and not output.staged:
            return given
        result = output.allocate()
        pointers[output.place] = output.library.pointer(result)
        if output.staged and output.keeps:
            output.library.copy(result, given)
        return result

    def _plan(
        self, context: dispatcher.Context, addresses: tuple[int, ...], scalars: tuple[float, ...], stream: int
    ) -> Runs:
        if context.device.kind == "cuda" and driver.is_capturing(stream):
            raise CudaError(
                f"no plan for {self.problem} yet, and its first call cannot be captured: run it once before the capture"
            )
        if self.without_plan is not None:
            return self.without_plan(self.problem, context.device)
        return context.plan(self.problem, self.request, Given(addresses, scalars))

    def _copy(self, arrays: Sequence[Any], pointers: list[int]) -> list[Any]:
        """Replace the addresses of what must be copied; returns the copies."""
        copied = []
        for place, name, channels_last, dtype in self.copies:
            events.emit("copied", self.problem, "", f"{name} is not dense, aligned and {dtype}")
            copied.append(dense_copy(arrays[place], channels_last, dtype))
            pointers[place] = library_of(arrays[place]).pointer(copied[-1])
        return copied

    def _refuse_overlap(self, pointers: list[int], place: int, low: int, high: int) -> None:
        start = pointers[place]
        low, high = low + start, high + start
        for i, name, first, end in self.inputs:
            pointer = pointers[i]
            if pointer + first < high and low < pointer + end:
                raise InvalidProblem(f"out overlaps {name} in memory")


class NothingToDo:
    """The plan of a problem whose outputs have no elements."""

    def __init__(self, problem: Problem, device: Any) -> None: ...

    def run(self, pointers: tuple[int, ...], scalars: tuple[float, ...], stream: int = 0) -> None: ...


def _name_unreadable(names: tuple[str, ...], arrays: Sequence[Any]) -> None:
    """Raise what `read` raises, with the name of the operand."""
    for array, name in zip(arrays, names, strict=True):
        try:
            if array is not None:
                read(array)
        except InvalidType as error:
            raise InvalidType(f"{name}: {error}") from None
