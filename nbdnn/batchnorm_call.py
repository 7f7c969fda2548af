"""What is particular to calls of batch normalisation: their checks, layouts and problem. `call.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import numpy as np

from nbdnn import call, call_setup
from nbdnn.array import View
from nbdnn.call import Call
from nbdnn.errors import InvalidProblem, InvalidType, check_one_of
from nbdnn.problem import LAYOUTS
from nbdnn.problem_bn import MODES, BnProblem

_DATA = ("inputs", "dy", "out", "dinputs")
# Of each op, in the order of the arrays of a call: what the caller gives, and what comes back.
_INPUTS = {
    "bn_train": ("inputs", "gamma", "beta", "running_mean", "running_var"),
    "bn_infer": ("inputs", "gamma", "beta", "mean", "var"),
    "bn_bwd": ("inputs", "dy", "gamma", "mean", "invstd"),
    "bn_infer_bwd": ("inputs", "dy", "gamma", "mean", "var"),
}
_OUTPUTS = {
    "bn_train": ("out", "mean", "invstd", "new_running_mean", "new_running_var"),
    "bn_infer": ("out",),
    "bn_bwd": ("dinputs", "dgamma", "dbeta"),
    "bn_infer_bwd": ("dinputs", "dgamma", "dbeta", "dmean", "dvar"),
}
# What the problem calls otherwise.
_OPERAND = {"inputs": "x", "out": "y", "dinputs": "dx"}
_REQUIRED = {"bn_train": 3, "bn_infer": 5, "bn_bwd": 5, "bn_infer_bwd": 5}
_MODE = {"peractivation": "per-activation"} | {mode: mode for mode in MODES}
_LEAST_EPSILON = 1e-5
_LEAST_FLOAT32 = float(np.float32(_LEAST_EPSILON))  # which is somewhat less, and what others have it as
_RANKS = 2, 6
_MOST_SPATIAL = 3


def compute(arguments: tuple, arrays: Sequence[Any], out: Any, scalars: tuple[Any, Any], stream: Any = None) -> Any:
    """The results of a call. arguments: op, mode and `call_setup.Options`. arrays: its inputs, None where absent. out:
    what the caller gave; a tuple where there are several results. scalars: epsilon, factor of the running averages."""
    op = arguments[0]
    epsilon, factor = scalars
    if type(epsilon) is not float or type(factor) is not float:
        epsilon, factor = call_setup.number("epsilon", epsilon), call_setup.number("running_average_factor", factor)
    if not _LEAST_FLOAT32 <= epsilon < inf:
        raise InvalidProblem(f"epsilon is {epsilon}, it must be at least {_LEAST_EPSILON}, and finite")
    if not 0 <= factor <= 1:
        raise InvalidProblem(f"running_average_factor is {factor}, expected a number from 0 to 1")
    names = _OUTPUTS[op]
    if op == "bn_train" and all(array is None for array in arrays[_REQUIRED[op] :]):
        names = names[:3]
    return call.compute(_FAMILY, arguments, (*arrays, *call_setup.outputs_given(out, names)), (epsilon, factor), stream)


def mode_named(name: Any) -> str:
    """A mode by one of its names."""
    check_one_of("mode", name, _MODE)
    return _MODE[name]


def _names(arguments: tuple) -> tuple[str, ...]:
    op = arguments[0]
    return (*_INPUTS[op], *("out" if name == "out" else f"out ({name})" for name in _OUTPUTS[op]))


def _prepare(arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...]) -> Call:
    op, mode, *options = arguments
    mode = mode_named(mode)
    names, plain = _names(arguments)[: len(arrays)], (*_INPUTS[op], *_OUTPUTS[op])[: len(arrays)]
    inputs, outputs = range(len(_INPUTS[op])), range(len(_INPUTS[op]), len(arrays))
    views = call_setup.views_of(names, arrays, required=_REQUIRED[op])
    running = _is_running(op, arrays)
    is_data = [name in _DATA for name in plain]
    shape = views[0].shape  # type: ignore[union-attr]
    _check_shapes(names, views, is_data, shape, mode)
    given = [(view.dtype, is_data[i]) for i in inputs if (view := views[i]) is not None]
    dtype, param_dtype = call_setup.data_and_param_dtypes(given)
    layouts = [view.layout for i in inputs if is_data[i] and (view := views[i]) is not None]
    last = next((layout for layout in layouts if layout is not None), False)
    copies = call_setup.copies_of(names, views, {i: (last, dtype if is_data[i] else param_dtype) for i in inputs})
    staged = [i for i in outputs if (out := views[i]) is not None and not out.is_dense(last)]
    n, c, *spatial = _merged(shape)
    problem = BnProblem(
        op=op,
        dtype=dtype,
        n=n,
        c=c,
        spatial=tuple(spatial),
        mode=mode,
        layout=LAYOUTS[len(spatial)][last],
        param_dtype=param_dtype,
        running=running,
        align=call_setup.common_alignment(views, copies, staged),
    )
    places = {_OPERAND.get(name, name): place for place, name in enumerate(plain)}
    return call_setup.assemble(
        problem,
        call_setup.request(problem, call_setup.Options(*options)),
        arrays,
        names,
        views,
        order=tuple(places[operand.name] for operand in problem.operands),
        lasts=dict.fromkeys(outputs, last),
        copies=copies,
        shapes={i: shape if is_data[i] else _param_shape(shape, mode) for i in outputs},
        without_plan=call.Zeros if 0 in shape else None,
    )


_FAMILY = call.Family(_names, _prepare)


def _is_running(op: str, arrays: Sequence[Any]) -> bool:
    if op != "bn_train":
        return False
    mean, var = arrays[_REQUIRED[op] : len(_INPUTS[op])]
    if (mean is None) != (var is None):
        there, absent = ("running_var", "running_mean") if mean is None else ("running_mean", "running_var")
        raise InvalidProblem(f"{there} is given without {absent}: give both or neither")
    return mean is not None


def _param_shape(shape: tuple[int, ...], mode: str) -> tuple[int, ...]:
    """Of parameters and statistics: 1 on the axes that are reduced."""
    return (1, *shape[1:]) if mode == "per-activation" else (1, shape[1], *(1 for _ in shape[2:]))


def _check_shapes(
    names: Sequence[str], views: Sequence[View | None], is_data: Sequence[bool], shape: tuple[int, ...], mode: str
) -> None:  # fmt: skip
    rank = len(shape)
    if not _RANKS[0] <= rank <= _RANKS[1]:
        raise InvalidType(f"inputs has {rank} axes, expected {_RANKS[0]} to {_RANKS[1]}")
    for name, each, of_data in zip(names, views, is_data, strict=True):
        if of_data:
            call_setup.check_shape(name, each, shape)
        elif each is not None and each.shape != (wanted := _param_shape(shape, mode)):
            raise InvalidProblem(f"{name} has shape {each.shape}, expected {wanted} in mode {mode!r}")


def _merged(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with 4 or 5 axes: axes of 1 appended, or the first spatial ones as one."""
    n, c, *spatial = shape + (1,) * (4 - len(shape))
    extra = max(0, len(spatial) - _MOST_SPATIAL)
    return (n, c, prod(spatial[: extra + 1]), *spatial[extra + 1 :])
