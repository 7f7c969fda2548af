"""What is particular to calls of softmax: their checks, layout and problem. `call.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from nbdnn import call, call_setup
from nbdnn.array import common_dtype
from nbdnn.call import Call
from nbdnn.errors import InvalidType, check_one_of
from nbdnn.problem import LAYOUTS
from nbdnn.problem_softmax import ALGORITHMS, SoftmaxProblem

_NAMES = {"softmax_fwd": ("x", "out"), "softmax_bwd": ("dy", "y", "out")}
_RANKS = 2, 5


def _names(arguments: tuple) -> tuple[str, ...]:
    return _NAMES[arguments[0]]


def _prepare(arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...]) -> Call:
    op, algorithm, mode, *options = arguments
    check_one_of("algo", algorithm, ALGORITHMS)
    names = _names(arguments)
    inputs = range(len(names) - 1)
    views = call_setup.views_of(names, arrays, required=len(inputs))
    given = [each for each in views[:-1] if each is not None]
    shape, rank = given[0].shape, len(given[0].shape)
    if not _RANKS[0] <= rank <= _RANKS[1]:
        raise InvalidType(f"{names[0]} has {rank} axes, expected {_RANKS[0]} to {_RANKS[1]}")
    for name, each in zip(names, views, strict=True):
        call_setup.check_shape(name, each, shape)
    dtype = common_dtype([each.dtype for each in given])
    last = next((each.layout for each in given if each.layout is not None), False)
    copies = call_setup.copies_of(names, views, dict.fromkeys(inputs, (last, dtype)))
    out = views[-1]
    staged = [len(inputs)] if out is not None and not out.is_dense(last) else []
    n, c, *spatial = shape + (1,) * (4 - rank)
    problem = SoftmaxProblem(
        op=op,
        dtype=dtype,
        n=n,
        c=c,
        spatial=tuple(spatial),
        algorithm=algorithm,
        mode=mode,
        layout=LAYOUTS[len(spatial)][last],
        align=call_setup.common_alignment(views, copies, staged),
    )
    return call_setup.assemble(
        problem,
        call_setup.request(problem, call_setup.Options(*options)),
        arrays,
        names,
        views,
        order=tuple(range(len(names))),
        lasts={len(inputs): last},
        copies=copies,
        shapes={len(inputs): shape},
        without_plan=call.NothingToDo if 0 in shape else None,
    )


# The result of a call: (arguments, arrays, scalars, stream). arguments: op, algo, mode and the fields of
# `call_setup.Options`. arrays: the inputs and out.
compute = partial(call.compute, call.Family(_names, _prepare))
