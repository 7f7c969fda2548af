"""A call of any op: what the first of its kind does, and what is left to do at the next ones.

`compute` reads the arrays and looks in the memo. On a miss, the family's `prepare` checks everything, settles layouts
and dtype and builds a `Call`; from then on a call is: read, look up, allocate, run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nbdnn import driver
from nbdnn.array import DTYPE_NAMES, Library, View, alignment, dense_copy, library_of, read, stream_handle, view
from nbdnn.dispatch import dispatcher, events
from nbdnn.dispatch.policy import Request
from nbdnn.dispatch.timing import Given
from nbdnn.errors import CudaError, InvalidProblem, InvalidType
from nbdnn.problem import Operand, Problem

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


def views_of(names: Sequence[str], arrays: Sequence[Any], required: int) -> list[View | None]:
    """A view of each array that there is, as the first `required` must be; InvalidProblem where they are not all on the
    first one's device."""
    views = [
        view(array, name) if i < required or array is not None else None
        for i, (array, name) in enumerate(zip(arrays, names, strict=True))
    ]
    first = views[0]
    assert first is not None
    for name, each in zip(names, views, strict=True):
        if each is not None and each.gpu != first.gpu:
            raise InvalidProblem(f"{name} is on {_place(each.gpu)}, {names[0]} on {_place(first.gpu)}")
    return views


def _place(gpu: int) -> str:
    return "the CPU" if gpu < 0 else f"GPU {gpu}"


def check_shape(name: str, given: View | None, wanted: tuple[int, ...]) -> None:
    if given is not None and given.shape != wanted:
        raise InvalidProblem(f"{name} has shape {given.shape}, expected {wanted}")


def check_out(name: str, out: View | None, result: Operand) -> None:
    """What a caller's output must be, beyond its device and layout."""
    if out is None:
        return
    check_shape(name, out, result.shape)
    if out.dtype != result.dtype:
        raise InvalidType(f"{name} is {DTYPE_NAMES[out.dtype]}, the result {DTYPE_NAMES[result.dtype]}")
    if not out.writable:
        raise InvalidProblem(f"{name} cannot be written (it is read-only, or of JAX)")
    if out.overlaps_itself:
        raise InvalidProblem(f"{name} overlaps itself: strides of {out.strides} bytes on shape {out.shape}")


def copies_of(
    names: Sequence[str], views: Sequence[View | None], wanted: dict[int, tuple[bool, str]]
) -> tuple[Copied, ...]:
    """Those of the inputs that are not dense in the layout (channels-last?) and dtype `wanted`, by place."""
    return tuple(
        Copied(place, names[place], last, dtype)
        for place, (last, dtype) in wanted.items()
        if (each := views[place]) is not None and not (each.dtype == dtype and each.is_dense(last))
    )


def common_alignment(views: Sequence[View | None], copies: Sequence[Copied], staged: Sequence[int]) -> int:
    """What the addresses that a runner will see are all multiples of; outputs at the places `staged` are allocated."""
    elsewhere = {copied.place for copied in copies} | set(staged)
    return alignment([each.pointer for i, each in enumerate(views) if each is not None and i not in elsewhere])


def assemble(
    problem: Problem,
    request: Request,
    arrays: Sequence[Any],
    names: Sequence[str],
    views: Sequence[View | None],
    order: tuple[int, ...],
    lasts: dict[int, bool],
    copies: tuple[Copied, ...],
    without_plan: Callable[[Any, Any], Runs] | None = None,
) -> Call:
    """The call of `problem`, checked but for the outputs that the caller gives.

    order: the place among the arrays of each of ``problem.operands``. lasts: whether each output is channels-last, by
    place.
    """
    first = views[0]
    assert first is not None
    outputs = []
    for operand, place in zip(problem.operands, order, strict=True):
        if operand.role == "out":
            out, last = views[place], lasts[place]
            check_out(names[place], out, operand)
            staged = out is not None and not out.is_dense(last)
            library = library_of(arrays[place] if staged else arrays[0])
            allocate = library.allocator(operand.shape, last, operand.dtype, first.gpu)
            outputs.append(Output(place, library, allocate, staged, operand.keeps))
    results = {output.place for output in outputs}
    bounds = {i: each.bounds for i, each in enumerate(views) if each is not None}
    return Call(
        problem,
        request,
        order,
        tuple(outputs),
        copies,
        tuple((i, names[i], *span) for i, span in bounds.items() if i not in results and any(span)),
        tuple((i, *span) for i, span in bounds.items() if i in results),
        without_plan,
    )


def _name_unreadable(names: tuple[str, ...], arrays: Sequence[Any]) -> None:
    """Raise what `read` raises, with the name of the operand."""
    for array, name in zip(arrays, names, strict=True):
        try:
            if array is not None:
                read(array)
        except InvalidType as error:
            raise InvalidType(f"{name}: {error}") from None
