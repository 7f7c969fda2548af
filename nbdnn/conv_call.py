"""A call of a convolution: what the first of its kind does, and what is left to do at the next ones.

`compute` reads the arrays and looks in the memo. On a miss, `_prepare` checks everything, settles layouts and dtype
and builds a `_Call`; from then on a call is: read, look up, allocate, run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nbdnn import conv_arguments, driver, reference
from nbdnn.array import (
    DTYPE_NAMES,
    Library,
    View,
    alignment,
    at,
    common_dtype,
    dense_copy,
    library_of,
    narrowed,
    read,
    stream_handle,
    view,
    widened,
)
from nbdnn.conv_arguments import Arguments
from nbdnn.device import Device
from nbdnn.dispatch import dispatcher, events
from nbdnn.dispatch.policy import Request
from nbdnn.dispatch.timing import Given
from nbdnn.errors import CudaError, InvalidProblem, InvalidType
from nbdnn.problem import FILTER_LAYOUTS, LAYOUTS, ConvProblem, epilogue_tokens

# The arrays of a call in their order here, and their names in the functions.
_FIRST, _SECOND, _BIAS, _RESIDUAL, _OUT = range(5)
_FUNCTIONS = {"conv_fwd": "dnn_conv", "conv_bwd_data": "dnn_gradinput", "conv_bwd_filter": "dnn_gradweight"}
_FACTORS = {
    "conv_fwd": ("img", "kerns"),
    "conv_bwd_data": ("kerns", "topgrad"),
    "conv_bwd_filter": ("img", "topgrad"),
}
_ABSENT = (0, None)


def compute(arguments: tuple, arrays: Sequence[Any], alpha: float, beta: float, stream: Any = None) -> Any:
    """The result of a call.

    arguments: the fields of `Arguments`, a plain tuple because it is the memo's key. arrays: both factors, bias,
    residual and out, the last three None where absent. stream: what the caller gave, for arrays on a GPU.
    """
    first = arrays[_FIRST]
    try:
        library = library_of(first)
        read_one, kind = library.read, type(first)
        pointers, key = [], [arguments, beta == 0]
        for array in arrays:
            if array is None:
                pointer, facts = _ABSENT
            else:
                pointer, facts = read_one(array) if type(array) is kind else read(array)
            pointers.append(pointer)
            key.append(facts)
    except InvalidType:
        _name_unreadable(arguments[0], arrays)
        raise
    scalars = float(alpha), float(beta)
    gpu = library.gpu(first)
    if gpu < 0:
        context = dispatcher.context()
        call = _call(context, tuple(key), arguments, arrays, scalars[1])
        return call.run(context, arrays, pointers, scalars, 0)
    changed = driver.enter(gpu)
    try:
        context = dispatcher.context(gpu)
        call = _call(context, tuple(key), arguments, arrays, scalars[1])
        if stream is None:
            return call.run(context, arrays, pointers, scalars, library.stream(gpu))
        handle = stream_handle(stream)
        with library.on_stream(gpu, handle):
            return call.run(context, arrays, pointers, scalars, handle)
    finally:
        if changed:
            driver.leave()


def _call(context: dispatcher.Context, key: tuple, arguments: tuple, arrays: Sequence[Any], beta: float) -> _Call:
    """What runs calls with this key: made of the first of them."""
    try:
        call = context.memo.get(key)
    except TypeError:  # unhashable, as a list is: the checks say what should have been there
        call = None
    if call is None:
        call = _prepare(Arguments(*arguments), arrays, beta)
        context.remember(key, call)
    return call


class _Runs(Protocol):
    def run(self, pointers: tuple[int, ...], scalars: tuple[float, ...], stream: int = 0) -> None: ...


@dataclass(slots=True)
class _Call:
    """Calls with equal arguments on arrays of equal shapes, strides and dtypes.

    library, allocate: make the result; or where out= is not dense (staged), what is computed before it is copied there.
    order: the arrays whose addresses the runner takes, as it takes them. copies: (array, its name, channels-last?) of
    each that cannot be used as it is. span: offsets from the address of out to its first byte and past its last.
    inputs: (array, the same two of it) of every input that is not empty.
    """

    problem: ConvProblem
    request: Request
    library: Library
    allocate: Callable[[], Any]
    staged: bool
    order: tuple[int, ...]
    copies: list[tuple[int, str, bool]]
    span: tuple[int, int]
    inputs: list[tuple[int, int, int]]
    plan: _Runs | None = None

    def run(
        self,
        context: dispatcher.Context,
        arrays: Sequence[Any],
        pointers: list[int],
        scalars: tuple[float, float],
        stream: int,
    ) -> Any:
        out = arrays[_OUT]
        result = out
        if out is not None:
            self._refuse_overlap(pointers)
        if out is None or self.staged:
            result = self.allocate()
            pointers[_OUT] = self.library.pointer(result)
            if self.staged and scalars[1]:
                self.library.copy(result, out)
        copied = self._copy(arrays, pointers) if self.copies else None
        addresses = tuple([pointers[i] for i in self.order])
        if self.plan is None:
            self.plan = self._plan(context, addresses, scalars, stream)
        self.plan.run(addresses, scalars, stream)
        del copied  # alive until here: the runner had its address
        if out is None:
            return self.library.given(result)
        if self.staged:
            self.library.copy(out, result)
        return out

    def _plan(
        self, context: dispatcher.Context, addresses: tuple[int, ...], scalars: tuple[float, float], stream: int
    ) -> _Runs:
        if context.device.kind == "cuda" and driver.is_capturing(stream):
            raise CudaError(
                f"no plan for {self.problem} yet, and its first call cannot be captured: run it once before the capture"
            )
        if 0 in (self.problem.n, self.problem.c, self.problem.k):
            return _EpilogueOfZeros(self.problem, context.device)
        return context.plan(self.problem, self.request, Given(addresses, scalars))

    def _copy(self, arrays: Sequence[Any], pointers: list[int]) -> list[Any]:
        """Replace the addresses of what must be copied; returns the copies."""
        copied = []
        for i, name, channels_last in self.copies:
            events.emit("copied", self.problem, "", f"{name} is not dense, aligned and {self.problem.dtype}")
            copied.append(dense_copy(arrays[i], channels_last, self.problem.dtype))
            pointers[i] = library_of(arrays[i]).pointer(copied[-1])
        return copied

    def _refuse_overlap(self, pointers: list[int]) -> None:
        start, (low, high) = pointers[_OUT], self.span
        low, high = low + start, high + start
        for i, first, end in self.inputs:
            pointer = pointers[i]
            if pointer + first < high and low < pointer + end:
                raise InvalidProblem(f"out overlaps {_names(self.problem.op)[i]} in memory")


class _EpilogueOfZeros:
    """The plan of a problem without batch or channels: the sum is empty, its epilogue is not."""

    def __init__(self, problem: ConvProblem, device: Device) -> None:
        self._problem, self._device = problem, device

    def run(self, pointers: tuple[int, ...], scalars: tuple[float, ...], stream: int = 0) -> None:
        if self._device.kind == "cpu":
            self._fill(pointers, scalars)
            return
        hosts = [np.empty(operand.size_bytes, np.uint8) for operand in self._problem.operands]
        for host, pointer in zip(hosts, pointers, strict=True):
            driver.download(host, pointer, stream)
        self._fill(tuple(host.ctypes.data for host in hosts), scalars)
        for host, pointer, operand in zip(hosts, pointers, self._problem.operands, strict=True):
            if operand.role == "out":
                driver.upload(pointer, host, stream)

    def _fill(self, pointers: tuple[int, ...], scalars: tuple[float, ...]) -> None:
        problem = self._problem
        raw = {o.name: at(p, o.shape, o.strides, o.dtype) for p, o in zip(pointers, problem.operands, strict=True)}
        output = next(raw[operand.name] for operand in problem.operands if operand.role == "out")
        total = np.zeros(output.shape)
        if "beta" in problem.epilogue:
            total += scalars[1] * widened(output, problem.dtype).astype(np.float64)
        if "bias" in problem.epilogue:
            total += widened(raw["bias"], problem.dtype).reshape(-1, *(1 for _ in problem.spatial))
        if "res" in problem.epilogue:
            total += widened(raw["residual"], problem.dtype)
        with np.errstate(over="ignore"):
            output[...] = narrowed(reference.activate(problem.activation, total), problem.dtype)


def _name_unreadable(op: str, arrays: Sequence[Any]) -> None:
    """Raise what `read` raises, with the name of the operand."""
    for array, name in zip(arrays, _names(op), strict=True):
        try:
            if array is not None:
                read(array)
        except InvalidType as error:
            raise InvalidType(f"{name}: {error}") from None


def _names(op: str) -> tuple[str, ...]:
    return (*_FACTORS[op], "bias", "residual", "out")


def _prepare(given: Arguments, arrays: Sequence[Any], beta: float) -> _Call:
    """Check the arguments against the arrays, and settle dtype, layouts and copies."""
    conv_arguments.check(given)
    names = _names(given.op)
    views = [
        view(array, name) if i < _BIAS or array is not None else None
        for i, (array, name) in enumerate(zip(arrays, names, strict=True))
    ]
    for name, each in zip(names, views, strict=True):
        if each is not None and name != "bias":
            _check_rank(given, name, len(each.shape))
    first, second, bias, residual, out = views
    assert first is not None and second is not None
    for name, each in zip(names, views, strict=True):
        if each is not None and each.gpu != first.gpu:
            raise InvalidProblem(f"{name} is on {_place(each.gpu)}, {names[_FIRST]} on {_place(first.gpu)}")
    if beta and out is None:
        raise InvalidProblem(f"beta is {beta}, which needs the array it multiplies: out=")

    dtype = common_dtype([each.dtype for each in views[:_OUT] if each is not None])
    lasts = _layouts(given.op, first, second, out)
    staged = out is not None and not out.is_dense(lasts[2])
    wanted = {_FIRST: lasts[0], _SECOND: lasts[1], _BIAS: False, _RESIDUAL: lasts[2]}
    copies = [
        (i, names[i], last)
        for i, last in wanted.items()
        if (each := views[i]) is not None and not (each.dtype == dtype and each.is_dense(last))
    ]
    elsewhere = {i for i, _, _ in copies} | ({_OUT} if staged else set())
    used = [each.pointer for i, each in enumerate(views) if each is not None and i not in elsewhere]
    epilogue = epilogue_tokens(
        bias=bias is not None, activation=given.activation, residual=residual is not None, beta=beta != 0
    )
    problem = _problem(given, first, second, dtype, lasts, alignment(used), epilogue)
    result = problem.operands[2]
    _check_shape("bias", bias, (problem.k,))
    _check_shape("residual", residual, problem.y_shape)
    _check_out(out, result.shape, dtype)

    library = library_of(arrays[_OUT] if staged else arrays[_FIRST])
    return _Call(
        problem,
        conv_arguments.request(given, problem),
        library,
        library.allocator(result.shape, lasts[2], dtype, first.gpu),
        staged,
        (_FIRST, _SECOND, _OUT, *(i for i in (_BIAS, _RESIDUAL) if arrays[i] is not None)),
        copies,
        (0, 0) if out is None else out.bounds,
        [(i, *each.bounds) for i, each in enumerate(views) if i != _OUT and each is not None and any(each.bounds)],
    )


def _place(gpu: int) -> str:
    return "the CPU" if gpu < 0 else f"GPU {gpu}"


def _check_rank(given: Arguments, name: str, rank: int) -> None:
    wanted = given.ndim + 2
    if rank != wanted:
        other = _FUNCTIONS[given.op] + ("3d" if rank == 5 else "")
        hint = f"; use {other}" if rank in (4, 5) and name in _FACTORS[given.op] else ""
        raise InvalidType(f"{name} has {rank} axes, expected {wanted}{hint}")


def _check_shape(name: str, given: View | None, wanted: tuple[int, ...]) -> None:
    if given is not None and given.shape != wanted:
        raise InvalidProblem(f"{name} has shape {given.shape}, expected {wanted}")


def _check_out(out: View | None, shape: tuple[int, ...], dtype: str) -> None:
    if out is None:
        return
    _check_shape("out", out, shape)
    if out.dtype != dtype:
        raise InvalidType(f"out is {DTYPE_NAMES[out.dtype]}, the result {DTYPE_NAMES[dtype]}")
    if not out.writable:
        raise InvalidProblem("out cannot be written (it is read-only, or of JAX)")
    if out.overlaps_itself:
        raise InvalidProblem(f"out overlaps itself: strides of {out.strides} bytes on shape {out.shape}")


def _layouts(op: str, first: View, second: View, out: View | None) -> tuple[bool, bool, bool]:
    """Whether first, second and the result are channels-last.

    Strides that fit both layouts count as the other operand's, else as NCHW. The result follows img (dnn_conv) or
    topgrad (dnn_gradinput); a filter gradient is channels-last where both its operands are; out= has its own.
    """
    either = first.layout, second.layout
    default = next((last for last in either if last is not None), False)
    first_last, second_last = (default if last is None else last for last in either)
    result = {
        "conv_fwd": first_last,
        "conv_bwd_data": second_last,
        "conv_bwd_filter": first_last and second_last,
    }[op]
    if out is not None and not out.is_dense(result) and out.is_dense(not result):
        result = not result
    return first_last, second_last, result


def _problem(
    given: Arguments,
    first: View,
    second: View,
    dtype: str,
    lasts: tuple[bool, bool, bool],
    align: int,
    epilogue: tuple[str, ...],
) -> ConvProblem:
    """The problem that the arguments and shapes describe."""
    ndim, op = given.ndim, given.op
    x_shape = first.shape if op != "conv_bwd_data" else _given_shape(given, "img_shp")
    w_shape = {"conv_fwd": second.shape, "conv_bwd_data": first.shape}.get(op) or _given_shape(given, "kerns_shp")
    groups = conv_arguments.integer("num_groups", given.num_groups, 1)
    if x_shape[1] != w_shape[1] * groups:
        raise InvalidProblem(
            f"img has {x_shape[1]} channels, kerns {w_shape[1]} in each of {groups} groups: {w_shape[1] * groups}"
        )
    dilation = conv_arguments.axes("dilation", given.dilation, ndim)
    first_last, second_last, result_last = lasts
    layout = second_last if op == "conv_bwd_data" else first_last
    w_layout = {"conv_fwd": second_last, "conv_bwd_data": first_last, "conv_bwd_filter": result_last}[op]
    y_layout = second_last if op == "conv_bwd_filter" else result_last
    problem = ConvProblem(
        op=op,
        dtype=dtype,
        n=x_shape[0],
        c=x_shape[1],
        spatial=x_shape[2:],
        k=w_shape[0],
        filter=w_shape[2:],
        pad=conv_arguments.padding(given.border_mode, w_shape[2:], dilation),
        stride=conv_arguments.axes("subsample", given.subsample, ndim),
        dilation=dilation,
        groups=groups,
        mode=given.conv_mode,
        layout=LAYOUTS[ndim][layout],
        compute=conv_arguments.compute_type(op, dtype, given.precision),
        w_layout=FILTER_LAYOUTS[ndim][w_layout],
        y_layout=LAYOUTS[ndim][y_layout],
        align=align,
        epilogue=epilogue,
    )
    if op != "conv_fwd":
        _check_shape("topgrad", second, problem.y_shape)
    return problem


def _given_shape(given: Arguments, name: str) -> tuple[int, ...]:
    shape = conv_arguments.shape(name, given.shape)
    _check_rank(given, name, len(shape))
    return shape
