"""What is particular to calls of pooling: their checks, layout and problem. `call.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nbdnn import call, call_setup
from nbdnn.array import common_dtype
from nbdnn.call import Call
from nbdnn.errors import InvalidProblem, InvalidType, check_one_of
from nbdnn.problem import LARGEST_STEP, LAYOUTS, check_numbers
from nbdnn.problem_pool import MODES, PoolProblem

_NAMES = {"pool_fwd": ("img", "out"), "pool_bwd": ("img", "out", "out_grad", "dx")}
_AVERAGE = {"average": "average_inc_pad"}


def mode_named(name: Any) -> str:
    """A mode by one of its names."""
    check_one_of("mode", name, (*MODES, *_AVERAGE))
    return _AVERAGE.get(name, name)


def _names(arguments: tuple) -> tuple[str, ...]:
    return _NAMES[arguments[0]]


def _prepare(arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...]) -> Call:
    op, ws, stride, mode, pad, *options = arguments
    names = _names(arguments)
    result = len(names) - 1
    views = call_setup.views_of(names, arrays, required=result)
    given = [each for each in views[:-1] if each is not None]
    shape = given[0].shape
    ndim = len(shape) - 2
    if ndim not in LAYOUTS:
        raise InvalidType(f"img has {len(shape)} axes, expected 4 or 5")
    window, dtype = _axes("ws", ws, ndim), common_dtype([each.dtype for each in given])
    check_numbers("ws", window, 1, LARGEST_STEP)
    last = next((each.layout for each in given if each.layout is not None), False)
    mode = mode_named(mode)
    axes = _axes("pad", 0 if pad is None else pad, ndim), _axes("stride", 1 if stride is None else stride, ndim)
    problem = PoolProblem(op, dtype, shape[0], shape[1], shape[2:], window, *axes, mode, LAYOUTS[ndim][last])
    for place in range(1, len(names)):
        if names[place] != "dx":
            call_setup.check_shape(names[place], views[place], problem.y_shape)
    order = _order(op, mode)
    used = [each if place in order else None for place, each in enumerate(views)]
    copies = call_setup.copies_of(names, used, {place: (last, dtype) for place in order if place != result})
    out = views[result]
    staged = [result] if out is not None and not out.is_dense(last) else []
    problem = replace(problem, align=call_setup.common_alignment(used, copies, staged))
    return call_setup.assemble(
        problem,
        call_setup.request(problem, call_setup.Options(*options)),
        arrays,
        names,
        views,
        order=order,
        lasts={result: last},
        copies=copies,
        without_plan=call.NothingToDo if 0 in shape else None,
    )


def _order(op: str, mode: str) -> tuple[int, ...]:
    """The places among the caller's arrays of the problem's operands: a sum's gradient reads out_grad only."""
    if op == "pool_fwd":
        return 0, 1
    return (0, 1, 2, 3) if mode.startswith("max") else (2, 3)


def _axes(name: str, value: Any, ndim: int) -> tuple[int, ...]:
    """A number for each spatial axis."""
    numbers = value if isinstance(value, tuple) else (value,) * ndim
    if not all(map(call_setup.is_whole, numbers)):
        raise InvalidProblem(f"{name} is {value!r}, expected an int or a tuple of ints")
    if len(numbers) != ndim:
        raise InvalidProblem(f"{name} has length {len(numbers)}, img has {ndim} spatial axes")
    return tuple(map(int, numbers))


# The result of a call: (arguments, arrays, scalars, stream). arguments: op, ws, stride, mode, pad and the fields of
# `call_setup.Options`. arrays: the inputs and the caller's output.
compute = partial(call.compute, call.Family(_names, _prepare))
