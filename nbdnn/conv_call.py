"""What is particular to calls of convolutions: their checks, layouts and problem. `call.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nbdnn import call, call_setup, conv_arguments, driver, reference_conv
from nbdnn.array import View, at, common_dtype, narrowed, widened
from nbdnn.call import Call
from nbdnn.call_setup import check_shape
from nbdnn.conv_arguments import Arguments
from nbdnn.device import Device
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import LAYOUTS
from nbdnn.problem_conv import FILTER_LAYOUTS, ConvProblem, epilogue_tokens

# The arrays of a call in their order here, and their names in the functions.
_FIRST, _SECOND, _BIAS, _RESIDUAL, _OUT = range(5)
_FUNCTIONS = {"conv_fwd": "dnn_conv", "conv_bwd_data": "dnn_gradinput", "conv_bwd_filter": "dnn_gradweight"}
_FACTORS = {
    "conv_fwd": ("img", "kerns"),
    "conv_bwd_data": ("kerns", "topgrad"),
    "conv_bwd_filter": ("img", "topgrad"),
}


class _EpilogueOfZeros:
    """Runs a problem without batch or channels: the sum is empty, its epilogue is not."""

    def __init__(self, problem: ConvProblem, device: Device) -> None:
        self._problem, self._device = problem, device

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
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
        with np.errstate(over="ignore", invalid="ignore"):
            output[...] = narrowed(reference_conv.activate(problem.activation, total), problem.dtype)


def _names(arguments: tuple) -> tuple[str, ...]:
    return (*_FACTORS[arguments[0]], "bias", "residual", "out")


def _prepare(arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...]) -> Call:
    """Check the arguments against the arrays, and settle dtype, layouts and copies."""
    given = Arguments(*arguments)
    conv_arguments.check(given)
    names = _names(arguments)
    views = call_setup.views_of(names, arrays, required=_BIAS)
    for name, each in zip(names, views, strict=True):
        if each is not None and name != "bias":
            _check_rank(given, name, len(each.shape))
    first, second, bias, residual, out = views
    assert first is not None and second is not None
    if given.has_beta and out is None:
        raise InvalidProblem(f"beta is {scalars[1]}, which needs the array it multiplies: out=")

    dtype = common_dtype([each.dtype for each in views[:_OUT] if each is not None])
    lasts = _layouts(given.op, first, second, out)
    wanted = {_FIRST: lasts[0], _SECOND: lasts[1], _BIAS: False, _RESIDUAL: lasts[2]}
    copies = call_setup.copies_of(names, views, {place: (last, dtype) for place, last in wanted.items()})
    staged = [_OUT] if out is not None and not out.is_dense(lasts[2]) else []
    epilogue = epilogue_tokens(
        bias=bias is not None, activation=given.activation, residual=residual is not None, beta=given.has_beta
    )
    align = call_setup.common_alignment(views, copies, staged)
    problem = _problem(given, first, second, dtype, lasts, align, epilogue)
    check_shape("bias", bias, (problem.k,))
    check_shape("residual", residual, problem.y_shape)
    order = (_FIRST, _SECOND, _OUT, *(i for i in (_BIAS, _RESIDUAL) if arrays[i] is not None))
    request, empty = conv_arguments.request(given, problem), 0 in (problem.n, problem.c, problem.k)
    without_plan = _EpilogueOfZeros if empty else None
    return call_setup.assemble(
        problem, request, arrays, names, views, order, {_OUT: lasts[2]}, copies, without_plan=without_plan
    )


def _check_rank(given: Arguments, name: str, rank: int) -> None:
    wanted = given.ndim + 2
    if rank != wanted:
        other = _FUNCTIONS[given.op] + ("3d" if rank == 5 else "")
        hint = f"; use {other}" if rank in (4, 5) and name in _FACTORS[given.op] else ""
        raise InvalidType(f"{name} has {rank} axes, expected {wanted}{hint}")


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
    groups = call_setup.integer("num_groups", given.num_groups, 1)
    if x_shape[1] != w_shape[1] * groups:
        raise InvalidProblem(
            f"img has {x_shape[1]} channels, kerns takes {w_shape[1] * groups} ({groups} x {w_shape[1]}); "
            "axes are (N, C, ...)"
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
        check_shape("topgrad", second, problem.y_shape)
    return problem


def _given_shape(given: Arguments, name: str) -> tuple[int, ...]:
    shape = conv_arguments.shape(name, given.shape)
    _check_rank(given, name, len(shape))
    return shape


# The result of a call: (arguments, arrays, (alpha, beta), stream). arguments: the fields of `Arguments` as a plain
# tuple, which is part of the memo's key. arrays: both factors, bias, residual and out, the last three None if absent.
compute = partial(call.compute, call.Family(_names, _prepare))
