"""What the first call of each kind settles: views, copies, outputs and the caller's options, for every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nbdnn import config
from nbdnn.array import DTYPE_NAMES, Library, View, alignment, common_dtype, library_of, view
from nbdnn.call import Call, Copied, Made, Sole
from nbdnn.candidate import Runner
from nbdnn.dispatch import registry
from nbdnn.dispatch.policy import Request, policy_of_flag
from nbdnn.dispatch.selection import Filters
from nbdnn.errors import InvalidProblem, InvalidType, as_float, is_one_of
from nbdnn.problem import ITEMSIZE, Problem

_MOST_BYTES = 2**63 - 1  # of which there are addresses


class Options(NamedTuple):
    """What every function takes besides its own arguments; policy: where there is no algo=."""

    policy: str | None
    workspace_limit: int | None
    deterministic: bool | None
    allow_tf32: bool | None
    layer: str | int | None


def request(problem: Problem, options: Options) -> Request:
    """How the caller wants the problem computed; the flags speak where an option is None."""
    name, policy = "policy", options.policy
    if policy is None:
        name, policy = "flag dnn.policy", policy_of_flag(problem.op)
    is_id = isinstance(policy, str) and "/" in policy and bool(registry.candidate(policy, name))
    if not is_id and not is_one_of(policy, config.POLICIES):
        example = registry.candidates(problem.op)[-1].id
        valid = ", ".join(config.POLICIES)
        raise InvalidProblem(f"{name} {policy!r} is unknown; valid: {valid}, or a candidate id such as {example}")
    filters = filters_of(options)._replace(candidate=policy if is_id else "")
    return Request("guess_on_shape_change" if is_id else policy, filters, layer_of(options.layer))


def filters_of(options: Options) -> Filters:
    """What the options permit, all of which are checked; the flags speak where one is None."""
    limit = options.workspace_limit
    return Filters(
        deterministic=_permission("deterministic", options.deterministic),
        allow_tf32=_permission("allow_tf32", options.allow_tf32),
        workspace_limit=_flag("workspace_limit") if limit is None else integer("workspace_limit", limit, 0),
    )


def layer_of(given: Any) -> str | None:
    """The layer's name; that of a number is its digits."""
    if not isinstance(given, str | int | None):
        raise InvalidProblem(f"layer is {given!r}, expected a name")
    return str(given) if isinstance(given, int) else given


def _permission(name: str, given: Any) -> bool:
    return _flag(name) if given is None else truth(name, given, "True, False or None")


def _flag(name: str) -> Any:
    return config.current()["dnn." + name]


def truth(name: str, value: Any, expected: str = "True or False") -> bool:
    """`value` as a bool, where it is one or an int that equals one."""
    if not isinstance(value, int | np.bool_) or value not in (True, False):
        raise InvalidProblem(f"{name} is {value!r}, expected {expected}")
    return bool(value)


def number(name: str, value: Any) -> float:
    """`value` as a float, of whatever is a number; one of an array may be another at the next call."""
    try:
        return as_float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidType(f"{name} is {value!r}, expected a number") from None


def integer(name: str, value: Any, smallest: int) -> int:
    """`value`, where it is an int and not less than `smallest`."""
    return integer_in(name, value, value, smallest, "an int")


def integer_in(name: str, value: Any, each: Any, smallest: int, expected: str = "an int or a tuple of ints") -> int:
    """`each`, one of the numbers of `value`, where it is an int and not less than `smallest`."""
    if not is_whole(each):
        raise InvalidProblem(f"{name} is {value!r}, expected {expected}")
    if each < smallest:
        raise InvalidProblem(f"{name} is {value!r}: {each} is less than {smallest}")
    return int(each)


def is_whole(number: Any) -> bool:
    """Whether it is an int, or a float that equals one: a call with equal arguments is the same call, whichever came
    first. An array of one integer is an index too, but no part of a key: it may change."""
    return isinstance(number, Integral) or (isinstance(number, Real) and float(number).is_integer())


def views_of(
    names: Sequence[str],
    arrays: Sequence[Any],
    required: int,
    dtypes: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
) -> list[View | None]:
    """A view of each array that there is, as the first `required` must be; InvalidProblem where they are not all on the
    first one's device. dtypes: by place, those of arrays that hold no numbers."""
    views = [
        view(array, name, dtypes.get(i, tuple(ITEMSIZE))) if i < required or array is not None else None
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


def outputs_given(out: Any, names: tuple[str, ...]) -> tuple:
    """The caller's outputs, None where there are none; several are a tuple."""
    if out is None:
        return (None,) * len(names)
    if len(names) == 1:
        return (out,)
    if not isinstance(out, tuple):
        raise InvalidType(f"out is a {type(out).__name__}, expected a tuple of {', '.join(names)}")
    if len(out) != len(names):
        raise InvalidProblem(f"out has {len(out)} arrays, expected {len(names)}: {', '.join(names)}")
    return out


def check_shape(name: str, given: View | None, wanted: tuple[int, ...]) -> None:
    if given is not None and given.shape != wanted:
        raise InvalidProblem(f"{name} has shape {given.shape}, expected {wanted}")


def check_out(name: str, out: View | None, shape: tuple[int, ...], dtype: str) -> None:
    """What a caller's output must be, beyond its device and layout."""
    if out is None:
        return
    check_shape(name, out, shape)
    if out.dtype != dtype:
        raise InvalidType(f"{name} is {DTYPE_NAMES[out.dtype]}, the result {DTYPE_NAMES[dtype]}")
    if not out.writable:
        raise InvalidProblem(f"{name} cannot be written (it is read-only, or of JAX)")
    if out.overlaps_itself:
        raise InvalidProblem(f"{name} overlaps itself: strides of {out.strides} bytes on shape {out.shape}")


def data_and_param_dtypes(given: Sequence[tuple[str, bool]]) -> tuple[str, str]:
    """Dtypes of data and of parameters, of (dtype, whether it is data) of each input.

    Parameters of 16-bit data are of the same dtype or float32; else everything is of the common one.
    """
    data = common_dtype([dtype for dtype, is_data in given if is_data])
    params = [dtype for dtype, is_data in given if not is_data]
    if ITEMSIZE[data] == 2 and set(params) <= {data, "f32"}:
        return data, common_dtype(params)
    dtype = common_dtype([data, *params])
    return dtype, dtype


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
    seen = [each for i, each in enumerate(views) if each is not None and i not in elsewhere]
    return alignment([each.pointer for each in seen if 0 not in each.shape])


def assemble(
    problem: Problem,
    request: Request,
    arrays: Sequence[Any],
    names: Sequence[str],
    views: Sequence[View | None],
    order: tuple[int, ...],
    lasts: dict[int, bool],
    copies: tuple[Copied, ...],
    shapes: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    without_plan: Callable[[Any, Any], Runner] | None = None,
) -> Call:
    """The call of `problem`, checked but for the outputs that the caller gives.

    order: the place among the arrays of each of ``problem.operands``. lasts: whether each output is channels-last, by
    place. shapes: of outputs whose operands have more or fewer axes than the caller's arrays.
    """
    first = views[0]
    assert first is not None
    made = []
    results = tuple(place for operand, place in zip(problem.operands, order, strict=True) if operand.role == "out")
    for operand, place in zip(problem.operands, order, strict=True):
        if operand.role == "out":
            out, last, shape = views[place], lasts[place], shapes.get(place, operand.shape)
            check_out(names[place], out, shape, operand.dtype)
            if out is not None and out.is_dense(last):
                continue
            if operand.size_bytes > _MOST_BYTES:
                raise InvalidProblem(f"{names[place]} would have shape {shape}: {operand.size_bytes} bytes")
            library = library_of(arrays[0] if out is None else arrays[place])
            allocate = library.allocator(shape, last, operand.dtype, first.gpu)
            made.append(Made(place, library, allocate, out is not None, operand.keeps))
    hands_over = any(each.is_copied or type(each.library).given is not Library.given for each in made)
    sole = None
    if len(made) == len(results) == 1 and not (hands_over or copies):
        sole = Sole(order.index(results[0]), made[0].library.pointer, made[0].allocate)
    bounds = {i: each.bounds for i, each in enumerate(views) if each is not None}
    return Call(
        problem,
        request,
        itemgetter(*order),  # of two or more: a problem has an input and an output
        itemgetter(*results),
        tuple(made),
        hands_over,
        sole,
        copies,
        tuple((i, names[i], *span) for i, span in bounds.items() if i not in results and any(span)),
        tuple((i, names[i], *span) for i, span in bounds.items() if i in results and any(span)),
        tuple(views),
        without_plan,
    )
