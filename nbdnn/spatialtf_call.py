"""What is particular to calls of the spatial transformer: shapes, dtypes and the problem. `call.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, isfinite
from operator import index
from typing import Any

from nbdnn import call, call_setup
from nbdnn.array import View
from nbdnn.call import Call
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import LAYOUTS
from nbdnn.problem_spatialtf import SpatialtfProblem

# Of each op, in the order of its operands: what the caller gives, and what comes back.
_INPUTS = {
    "spatialtf_fwd": ("img", "theta"),
    "spatialtf_bwd": ("img", "theta", "dout"),
    "spatialtf_grid_fwd": ("theta",),
    "spatialtf_grid_bwd": ("dgrid",),
    "spatialtf_sampler_fwd": ("img", "grid"),
    "spatialtf_sampler_bwd": ("img", "grid", "dout"),
}
_OUTPUTS = {
    "spatialtf_fwd": ("out",),
    "spatialtf_bwd": ("out (dimg)", "out (dtheta)"),
    "spatialtf_grid_fwd": ("out",),
    "spatialtf_grid_bwd": ("out",),
    "spatialtf_sampler_fwd": ("out",),
    "spatialtf_sampler_bwd": ("out (dimg)", "out (dgrid)"),
}
_SCALES, _PLAIN = ("scale_width", "scale_height"), (float, int)
_DATA, _AXES = ("x", "y", "dx", "dy"), {"img": 4, "dout": 4, "theta": 3, "grid": 4, "dgrid": 4}


def compute(op: str, extents: tuple, given: tuple, out: Any, options: tuple, stream: Any) -> Any:
    """The result of a call. extents: two scales, or the output's dimensions. given: its inputs. out: as the caller gave
    it; a tuple where there are two results."""
    if op == "spatialtf_grid_fwd":
        extents = _out_dims(*extents)
    elif extents and not (type(extents[0]) in _PLAIN and type(extents[1]) in _PLAIN):
        extents = tuple(map(call_setup.number, _SCALES, extents))
    arrays = (*given, *call_setup.outputs_given(out, _OUTPUTS[op]))
    return call.compute(_FAMILY, (op, extents, *options), arrays, (), stream)


def _out_dims(out_dims: Any) -> tuple[int, ...]:
    try:
        extents = tuple(map(index, out_dims))
    except TypeError:
        raise InvalidType(f"out_dims is {out_dims!r}, expected four ints (N, C, H, W)") from None
    if len(extents) != 4:
        raise InvalidProblem(f"out_dims has {len(extents)} numbers, expected four: (N, C, H, W)")
    return extents


def _names(arguments: tuple) -> tuple[str, ...]:
    return *_INPUTS[arguments[0]], *_OUTPUTS[arguments[0]]


def _prepare(arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...]) -> Call:
    op, extents, *options = arguments
    names, inputs = _names(arguments), len(_INPUTS[op])
    views = call_setup.views_of(names, arrays, required=inputs)
    for name, each in zip(_INPUTS[op], views, strict=False):
        if each is not None and len(each.shape) != _AXES[name]:
            raise InvalidType(f"{name} has {len(each.shape)} axes, expected {_AXES[name]}")
    problem = _problem(
        op, extents, {name: each for name, each in zip(_INPUTS[op], views, strict=False) if each is not None}
    )
    for name, each, operand in zip(names, views, problem.operands, strict=True):
        if operand.role == "in":
            call_setup.check_shape(name, each, operand.shape)
    is_data = [operand.name in _DATA for operand in problem.operands]
    lasts = [of_data and problem.channels_last for of_data in is_data]
    wanted = {i: (lasts[i], operand.dtype) for i, operand in enumerate(problem.operands[:inputs])}
    copies = call_setup.copies_of(names, views, wanted)
    staged = [i for i in range(inputs, len(names)) if (out := views[i]) is not None and not out.is_dense(lasts[i])]
    problem = _aligned(problem, views, is_data, copies, staged)
    empty = any(operand.size_elems == 0 for operand in problem.operands)
    return call_setup.assemble(
        problem,
        call_setup.request(problem, call_setup.Options(*options)),
        arrays,
        names,
        views,
        order=tuple(range(len(names))),
        lasts=dict(enumerate(lasts)),
        copies=copies,
        without_plan=call.Zeros if empty else None,
    )


def _problem(op: str, extents: tuple, given: dict[str, View]) -> SpatialtfProblem:
    """The problem, which may promise too much of how its arrays are aligned."""
    data = ("theta", "dgrid") if op.startswith("spatialtf_grid") else ("img", "dout")
    dtype, param_dtype = call_setup.data_and_param_dtypes([(v.dtype, name in data) for name, v in given.items()])
    if op == "spatialtf_grid_fwd":
        n, _, *out_spatial = extents
        return SpatialtfProblem(op, dtype, n, 0, (), (out_spatial[0], out_spatial[1]), "")
    if op == "spatialtf_grid_bwd":
        n, *out_spatial, pair = given["dgrid"].shape
        if pair != 2:
            raise InvalidProblem(f"dgrid has shape {given['dgrid'].shape}, expected 2 as its last extent")
        return SpatialtfProblem(op, dtype, n, 0, (), (out_spatial[0], out_spatial[1]), "")
    n, c, *spatial = given["img"].shape
    rows, columns = given["grid"].shape[1:3] if "grid" in given else _scaled(spatial, extents)
    layouts = [each.layout for name, each in given.items() if name in ("img", "dout")]
    last = next((layout for layout in layouts if layout is not None), False)
    return SpatialtfProblem(op, dtype, n, c, tuple(spatial), (rows, columns), LAYOUTS[2][last], param_dtype)


def _scaled(spatial: Sequence[int], scales: tuple[Any, Any]) -> tuple[int, int]:
    """Rows and columns of the output. scales: of the width, of the height."""
    columns, rows = (_scaled_extent(*each) for each in zip(_SCALES, reversed(spatial), scales, strict=True))
    return rows, columns


def _scaled_extent(name: str, extent: int, scale: Any) -> int:
    factor = call_setup.number(name, scale)
    if not (isfinite(factor) and factor > 0):
        raise InvalidProblem(f"{name} is {factor}, it must be positive and finite")
    if not isfinite(extent * factor):
        raise InvalidProblem(f"{name} is {factor}, which makes {extent} more than any number")
    return ceil(extent * factor)


def _aligned(
    problem: SpatialtfProblem,
    views: Sequence[View | None],
    is_data: Sequence[bool],
    copies: Sequence[call.Copied],
    staged: Sequence[int],
) -> SpatialtfProblem:
    """With the alignment of its images; of a grid, which has none, of all that it has."""
    seen = [each if of_data or not problem.has_image else None for each, of_data in zip(views, is_data, strict=True)]
    return replace(problem, align=call_setup.common_alignment(seen, copies, staged))


_FAMILY = call.Family(_names, _prepare)
