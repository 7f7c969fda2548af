"""The arguments of the convolutions, checked: Theano's words in, fields of a problem and a request out."""

from __future__ import annotations

from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

from nbdnn import config
from nbdnn.array import DTYPE_NAMES
from nbdnn.call_setup import Options, filters_of, integer_in, layer_of
from nbdnn.dispatch import events, registry
from nbdnn.dispatch.policy import Request
from nbdnn.errors import InvalidProblem, InvalidType, check_one_of, is_one_of
from nbdnn.problem import ITEMSIZE, LARGEST_STEP, LAYOUTS, check_numbers
from nbdnn.problem_conv import ACTIVATIONS, COMPUTE_OF, ConvProblem

HINTS = (None, "forward!", "bprop weights", "bprop inputs")
_COMPUTE_NAMES = {"float16": "f16", "float32": "f32", "float64": "f64"}


class Arguments(NamedTuple):
    """Everything of a call but its arrays and scalars, as the caller gave it.

    shape: img_shp or kerns_shp of a gradient. layer: what separates equal layers for the ``*_once`` policies.
    has_beta: whether beta is not 0, so that out is read.
    """

    op: str
    ndim: int
    shape: Any
    border_mode: Any
    subsample: Any
    dilation: Any
    conv_mode: Any
    direction_hint: str | None
    algo: str | None
    precision: str | None
    num_groups: int
    activation: str | None
    workspace_limit: int | None
    deterministic: bool | None
    allow_tf32: bool | None
    layer: str | int | None
    has_beta: bool


def axes(name: str, value: Any, ndim: int, smallest: int = 1) -> tuple[int, ...]:
    """`value` for every axis: an int for all of them, or a tuple with one for each."""
    given = value if isinstance(value, tuple) else (value,) * ndim
    if len(given) != ndim:
        raise InvalidProblem(f"{name} is {value!r}: {len(given)} axes, but the image has {ndim}")
    numbers = tuple(integer_in(name, value, each, smallest) for each in given)
    check_numbers(name, numbers, smallest, LARGEST_STEP)
    return numbers


def padding(
    border_mode: Any, filter: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """(before, after) of each axis: 'valid' 0, 'full' (k-1)*d, 'half' ((k-1)*d+1)//2, an int, or a tuple of ints or of
    (before, after) pairs."""
    if isinstance(border_mode, str):
        spans = [(k - 1) * d for k, d in zip(filter, dilation, strict=True)]
        match border_mode:
            case "valid":
                return ((0, 0),) * len(filter)
            case "full":
                return tuple((span, span) for span in spans)
            case "half":
                return tuple(((span + 1) // 2,) * 2 for span in spans)
        raise InvalidProblem(f"border_mode is {border_mode!r}, expected 'valid', 'full', 'half', an int or a tuple")
    given = border_mode if isinstance(border_mode, tuple) else (border_mode,) * len(filter)
    if len(given) != len(filter):
        raise InvalidProblem(f"border_mode is {border_mode!r}: {len(given)} axes, but the image has {len(filter)}")
    pairs = [each if isinstance(each, tuple) else (each, each) for each in given]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise InvalidProblem(f"border_mode is {border_mode!r}: {wrong[0]!r} is not a pair (before, after)")
    before_after = [[integer_in("border_mode", border_mode, each, 0) for each in pair] for pair in pairs]
    check_numbers("border_mode", chain(*before_after), 0, LARGEST_STEP)
    return tuple((before, after) for before, after in before_after)


def shape(name: str, value: Any) -> tuple[int, ...]:
    """`value` as a tuple of ints."""
    try:
        extents: list[Any] = list(value)
    except TypeError:  # arrays of no axis are iterable in name only
        extents = [None]
    if extents and getattr(extents[0], "shape", None):
        whole = (len(extents), *extents[0].shape)
        raise InvalidProblem(f"{name} is an array of shape {whole}, expected a tuple of ints: pass its .shape")
    if not all(isinstance(extent, Integral) for extent in extents):
        raise InvalidProblem(f"{name} is {value!r}, expected a tuple of ints")
    return tuple(map(int, extents))


def out_shape(ishape: Any, kshape: Any, border_mode: Any, subsample: Any, dilation: Any) -> tuple[int, ...]:
    """Shape of the result of a convolution: see `nbdnn.get_conv_out_shape`."""
    ishape, kshape = shape("ishape", ishape), shape("kshape", kshape)
    ndim = len(ishape) - 2
    if ndim not in (2, 3) or len(kshape) != len(ishape):
        raise InvalidType(f"ishape has {len(ishape)} axes and kshape {len(kshape)}, expected 4 and 4, or 5 and 5")
    steps = axes("dilation", dilation, ndim)
    problem = ConvProblem(
        "conv_fwd",
        "f32",
        n=ishape[0],
        c=ishape[1],
        spatial=ishape[2:],
        k=kshape[0],
        filter=kshape[2:],
        pad=padding(border_mode, kshape[2:], steps),
        stride=axes("subsample", subsample, ndim),
        dilation=steps,
        layout=LAYOUTS[ndim][0],
    )
    return problem.y_shape


def check(given: Arguments) -> None:
    """What can be said without looking at the arrays."""
    check_one_of("direction_hint", given.direction_hint, HINTS)
    check_one_of("activation", given.activation, (None, *ACTIVATIONS))
    check_described(given.conv_mode, given.precision)


def check_described(conv_mode: Any, precision: Any) -> None:
    """What a descriptor can say wrong of itself."""
    check_one_of("conv_mode", conv_mode, ("conv", "cross"))
    check_one_of("precision", precision, (None, *config.PRECISIONS))


def check_algo(op: str, ndim: int, algo: Any, name: str = "algo") -> None:
    """InvalidProblem of what is no method, policy or candidate; name: of the argument or flag that says it."""
    valid = (*config.METHODS[op, ndim], *config.POLICIES)
    if is_one_of(algo, valid) or _is_id(algo, name):
        return
    what = "exists in 2-D only" if ndim == 3 and is_one_of(algo, config.METHODS[op, 2]) else "is unknown"
    raise InvalidProblem(
        f"{name} {algo!r} {what}; valid: {', '.join(valid)}, or a candidate id such as {op}/cpu/direct"
    )


def compute_type(op: str, dtype: str, precision: str | None) -> str:
    """The compute type for `precision` (None: the flag) on data of `dtype`."""
    precision = precision or config.current()["dnn.conv.precision"]
    if precision in ("as_input", "as_input_f32"):
        compute = "f16" if (dtype, precision) == ("f16", "as_input") else COMPUTE_OF[dtype][0]
    else:
        compute = _COMPUTE_NAMES[precision]
    if compute == "f16" and op != "conv_fwd":
        data, needed = DTYPE_NAMES[dtype], DTYPE_NAMES[COMPUTE_OF[dtype][0]]
        raise InvalidType(f"precision {precision!r} is 16-bit compute on {data}: its gradients need {needed}")
    if compute not in COMPUTE_OF[dtype]:
        possible = [DTYPE_NAMES[each] for each in COMPUTE_OF[dtype] if each != "f16" or op == "conv_fwd"]
        raise InvalidProblem(
            f"precision {precision!r} does not go with {DTYPE_NAMES[dtype]} data; possible: {', '.join(possible)}"
        )
    return compute


def request(given: Arguments, problem: ConvProblem) -> Request:
    """How the caller wants the problem computed; the flags speak where an argument is None."""
    flag = "dnn.conv.algo_" + problem.op.removeprefix("conv_")
    algo = given.algo if given.algo is not None else config.current()[flag]
    check_algo(given.op, given.ndim, algo, "algo" if given.algo is not None else f"flag {flag}")
    options = Options(algo, given.workspace_limit, given.deterministic, given.allow_tf32, given.layer)
    filters = filters_of(options)._replace(
        method=algo if algo in config.METHODS[given.op, given.ndim] else "",
        candidate=algo if _is_id(algo) else "",
        hint=_applicable_hint(given.direction_hint, problem),
    )
    return Request(algo if algo in config.POLICIES else "guess_on_shape_change", filters, layer_of(given.layer))


def _is_id(algo: Any, name: str = "algo") -> bool:
    return isinstance(algo, str) and "/" in algo and bool(registry.candidate(algo, name))


def _applicable_hint(hint: str | None, problem: ConvProblem) -> str:
    """The hint, where the lowering it names computes this problem; else '', and an event says why."""
    if hint in (None, "forward!"):
        return ""
    wanted = [0 if hint == "bprop weights" else k - 1 for k in problem.filter]
    if {*problem.stride, *problem.dilation, problem.groups} != {1}:
        why = "it needs stride, dilation and groups of 1"
    elif problem.pad != tuple((p, p) for p in wanted):
        why = f"it needs border_mode {'valid' if hint == 'bprop weights' else 'full'!r}"
    elif problem.epilogue:
        why = f"a gradient has no epilogue {'+'.join(problem.epilogue)}"
    elif ITEMSIZE[problem.compute] == 2:
        why = "a gradient has no 16-bit compute"
    else:
        return hint
    events.emit("ignored", problem, "", f"direction_hint {hint!r}: {why}")
    return ""
