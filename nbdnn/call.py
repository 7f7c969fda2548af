"""A call of any op: what the first of its kind does, and what is left to do at the next ones.

`compute` reads the arrays and looks in the memo. On a miss, the family's `prepare` checks everything, settles layouts
and dtype and builds a `Call`; from then on a call is: read, look up, allocate, run. Where the arrays are recognised, it
is: recognise, run. Every step of that counts: behind a launch on a GPU the processor's caches are cold, and a line of
Python takes the host two to three times as long as in a loop of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nbdnn import driver
from nbdnn.array import Library, View, alignment, at, dense_copy, library_of, read, share_memory, stream_handle
from nbdnn.candidate import Runner
from nbdnn.dispatch import dispatcher, events
from nbdnn.dispatch.policy import Request
from nbdnn.dispatch.selection import check_named
from nbdnn.dispatch.timing import Given
from nbdnn.errors import CudaError, InvalidProblem, InvalidType, RefusedOperands
from nbdnn.problem import DEFAULT_ALIGN, Problem


class Unchosen(dispatcher.Plan):
    """What stands for a plan where there is nothing to choose: a runner that needs no workspace."""

    __slots__ = ()

    def __init__(self, runner: Runner) -> None:
        self.ready = 0, runner


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
    found = None
    for recognise, is_ready, stream_of, context, call in dispatcher.alike(arguments, arrays):
        pointers = recognise(arrays)
        if pointers is None:
            continue
        is_here = stream is None and is_ready()
        if is_here or context.is_valid:
            seen, addresses = call.latest
            if pointers != seen:
                if alignment(pointers) < DEFAULT_ALIGN:
                    break
                addresses = call.placed(pointers)
            if is_here:
                return call.run(context, arrays, pointers, addresses, scalars, stream_of())
            found = context, call, pointers
            break
    return _entered(family, arguments, arrays, scalars, stream, found)


def _entered(
    family: Family,
    arguments: tuple,
    arrays: Sequence[Any],
    scalars: tuple[float, ...],
    stream: Any,
    found: tuple[dispatcher.Context, Call, list[int]] | None,
) -> Any:
    """`compute` of what is not known, or has to enter its GPU's context or another stream first."""
    try:
        library = library_of(arrays[0])
        gpu = library.gpu(arrays[0])
    except InvalidType:
        name_unreadable(family.names(arguments), arrays)
        raise
    changed = gpu >= 0 and driver.enter(gpu)
    try:
        context, call, pointers = found or _looked_up(gpu, library, family, arguments, arrays, scalars)
        addresses = call.placed(pointers)
        if gpu < 0:
            if stream is not None:
                stream_handle(stream)  # which has no effect, but has to be one
            return call.run(context, arrays, pointers, addresses, scalars, 0)
        if stream is None:
            return call.run(context, arrays, pointers, addresses, scalars, library.stream(gpu))
        handle = stream_handle(stream)
        with library.on_stream(gpu, handle):
            return call.run(context, arrays, pointers, addresses, scalars, handle)
    finally:
        if changed:
            driver.leave()


def _looked_up(
    gpu: int,
    library: Library,
    family: Family,
    arguments: tuple,
    arrays: Sequence[Any],
    scalars: tuple[float, ...],
) -> tuple[dispatcher.Context, Call, list[int]]:
    """What runs calls with these arguments on arrays such as these, made of the first of them; and their addresses."""
    context = dispatcher.context(gpu)
    try:
        pointers, facts = library.read_all(arrays)
    except InvalidType:
        name_unreadable(family.names(arguments), arrays)
        raise
    key = (arguments, *facts)
    try:
        call = context.memo.get(key)
    except TypeError:
        call = None
    if call is None:
        call = _untraced(family.prepare, arguments, arrays, scalars)
        if dispatcher.context(gpu) is not context:  # another thread has set flags, and some of the call go by them
            return _looked_up(gpu, library, family, arguments, arrays, scalars)
        context.remember(key, call)
    if library.recognises and not any(pointer % DEFAULT_ALIGN for pointer in pointers):  # others are read every time
        context.recognise(arguments, arrays, library, call)
    return context, call, pointers


def _untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """A call unseen by torch.compile, which would take Numba's compiler for a part of its graph."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.disable(function)(*arguments) if dynamo else function(*arguments)


class Made(NamedTuple):
    """A result that the call allocates: the caller gave no array for it, or one that is not dense, to which it is
    copied in the end (is_copied). place: of that array. keeps: what was in it is read."""

    place: int
    library: Library
    allocate: Callable[[], Any]
    is_copied: bool
    keeps: bool


class Sole(NamedTuple):
    """The only result of a call that allocates it, and has nothing to copy and nothing to hand over. place: of its
    address among those that the runner takes."""

    place: int
    pointer: Callable[[Any], int]
    allocate: Callable[[], Any]


class Copied(NamedTuple):
    """An input that cannot be used as it is: its place among the arrays, its name, and what it becomes."""

    place: int
    name: str
    channels_last: bool
    dtype: str


@dataclass(slots=True)
class Call:
    """Calls with equal arguments on arrays of equal shapes, strides and dtypes.

    addressed: takes of all addresses those that the runner takes, in its order. results: takes of all arrays what is
    returned. hands_over: whether `made` leaves something to do when all is computed. sole: what is left of these three
    where it is not None, in two thirds of a microsecond less. inputs: (place, name, offsets from
    the address to the first byte and past the last) of every input that is not empty; given: the same of such outputs
    that the caller gives. views: of each array, as the first call had it. without_plan: of (problem, device), what runs
    a problem without elements. latest: addresses of the last call's arrays, and of them those that the runner takes.
    """

    problem: Problem
    request: Request
    addressed: Callable[[list[int]], tuple[int, ...]]
    results: Callable[[Any], Any]
    made: tuple[Made, ...]
    hands_over: bool
    sole: Sole | None
    copies: tuple[Copied, ...]
    inputs: tuple[tuple[int, str, int, int], ...]
    given: tuple[tuple[int, str, int, int], ...]
    views: tuple[View | None, ...]
    without_plan: Callable[[Any, Any], Runner] | None = None
    plan: dispatcher.Plan | None = None
    latest: tuple[list[int] | None, tuple[int, ...]] = (None, ())

    def run(
        self,
        context: dispatcher.Context,
        arrays: Sequence[Any],
        pointers: list[int],
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        stream: int,
    ) -> Any:
        """The results. addresses: as `placed` has them."""
        outputs, copied, sole = arrays, None, self.sole
        if sole is not None:
            place, pointer_of, allocate = sole
            outputs = allocate()
            address = pointer_of(outputs)
            if not address:
                _check_memory(outputs)
            addresses = (*addresses[:place], address, *addresses[place + 1 :])
        elif self.made or self.copies:
            pointers = pointers.copy()  # of `latest`, which has what the caller gave
            outputs, copied = self._allocate(arrays, pointers), self._copy(arrays, pointers)
            addresses = self.addressed(pointers)
        plan = self.plan
        if plan is None:
            plan = self.plan = _untraced(self._plan, context, addresses, scalars, stream)
        workspace_bytes, runner = plan.ready
        if workspace_bytes:
            plan.run(addresses, scalars, stream)
        else:
            try:
                runner(addresses, scalars, 0, stream)
            except RefusedOperands as error:
                plan.replace(error)
                plan.run(addresses, scalars, stream)
        del copied  # alive until here: the runner had its address
        if sole is not None:
            return outputs
        if self.hands_over:
            self._hand_over(arrays, outputs)
        return self.results(outputs)

    def placed(self, pointers: list[int]) -> tuple[int, ...]:
        """The addresses as the runner takes them, of arrays that have memory, none of them written where another is."""
        seen, addresses = self.latest
        if pointers == seen:
            return addresses
        for place, name, *_ in (*self.inputs, *self.given):
            if not pointers[place]:
                raise InvalidType(f"{name}: an array that has elements and no memory (freed, or never allocated)")
        for number, (place, result, low, high) in enumerate(self.given):
            low, high = low + pointers[place], high + pointers[place]
            for i, name, first, end in (*self.inputs, *self.given[:number]):
                if pointers[i] + first < high and low < pointers[i] + end and self._overlap(i, place, pointers):
                    raise InvalidProblem(f"{result} overlaps {name} in memory")
        addresses = self.addressed(pointers)
        self.latest = pointers, addresses
        return addresses

    def _overlap(self, one: int, other: int, pointers: list[int]) -> bool:
        """Whether the arrays at two places, which lie in one range of memory, have a byte in common."""
        first, second = self.views[one], self.views[other]
        assert first is not None and second is not None
        return share_memory(first._replace(pointer=pointers[one]), second._replace(pointer=pointers[other]))

    def _allocate(self, arrays: Sequence[Any], pointers: list[int]) -> list[Any]:
        """The arrays, with the results that are made here among them."""
        outputs = list(arrays)
        for place, library, allocate, is_copied, keeps in self.made:
            outputs[place] = array = allocate()
            pointers[place] = pointer = library.pointer(array)
            if not pointer:
                _check_memory(array)
            if is_copied and keeps:
                library.copy(array, arrays[place])
        return outputs

    def _hand_over(self, arrays: Sequence[Any], outputs: Any) -> None:
        """What was made becomes the caller's, or is copied to where the caller wants it."""
        for place, library, _, is_copied, _ in self.made:
            if is_copied:
                library.copy(arrays[place], outputs[place])
                outputs[place] = arrays[place]
            else:
                outputs[place] = library.given(outputs[place])

    def _plan(
        self, context: dispatcher.Context, addresses: tuple[int, ...], scalars: tuple[float, ...], stream: int
    ) -> dispatcher.Plan:
        if context.device.kind == "cuda" and driver.is_capturing(stream):
            raise CudaError(
                f"no plan for {self.problem} yet, and its first call cannot be captured: run it once before the capture"
            )
        if self.without_plan is not None:
            check_named(self.problem, context.device, self.request.filters)
            return Unchosen(self.without_plan(self.problem, context.device))
        return context.plan(self.problem, self.request, Given(addresses, scalars))

    def _copy(self, arrays: Sequence[Any], pointers: list[int]) -> list[Any]:
        """Replace the addresses of what must be copied; returns the copies."""
        copied = []
        for place, name, channels_last, dtype in self.copies:
            events.emit("copied", self.problem, "", f"{name} is not dense, aligned and {dtype}")
            copied.append(dense_copy(arrays[place], channels_last, dtype))
            pointers[place] = library_of(arrays[place]).pointer(copied[-1])
        return copied


def _check_memory(array: Any) -> None:
    """Refuse what a library made and gave no address; without elements it needs none."""
    if 0 not in array.shape:
        raise InvalidType(f"{type(array)} has no memory for a result (as under FakeTensorMode)")


class NothingToDo:
    """Runs a problem whose outputs have no elements."""

    def __init__(self, problem: Problem, device: Any) -> None: ...

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None: ...  # fmt: skip


class Zeros:
    """Runs sums over nothing: a gradient without a batch or channels; or of what has no elements at all."""

    def __init__(self, problem: Problem, device: Any) -> None:
        self._outputs = [(place, o) for place, o in enumerate(problem.operands) if o.role == "out" and o.size_elems]
        self._device = device

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        for place, out in self._outputs:
            if self._device.kind == "cpu":
                at(pointers[place], out.shape, out.strides, out.dtype)[...] = 0
            else:
                driver.upload(pointers[place], np.zeros(out.size_bytes, np.uint8), stream)


def name_unreadable(names: tuple[str, ...], arrays: Sequence[Any]) -> None:
    """Raise what `read` raises, with the name of the operand."""
    for place, (array, name) in enumerate(zip(arrays, names, strict=True)):
        try:
            if array is not None or place == 0:
                library_of(array).gpu(array)
                read(array)
        except InvalidType as error:
            raise InvalidType(f"{name}: {error}") from None
