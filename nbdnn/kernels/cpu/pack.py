"""Filters packed for the micro-kernel, and the order in which its reduction runs.

A gather reduces over k = (channel, t, r, s), or (t, r, s, channel) where channels lie side by side. Its filter is
either read where it lies, through a table of offsets in the order of k, or packed into panels of `width` output
channels, [group][panel][k][width], zero beyond the last one, widened to the compute type. Packing reads the filter
once; it pays where a panel is used often.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import float32, float64

from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.geometry import Gather, Geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

_BLOCK = 16  # steps of k transposed at once: their lines of the panel stay in first-level cache

_PACK = record(
    "w_pointer", "panels", "k_len", "c_out", "w_g", "w_o", "offsets", "workspace_offset", "panel_bytes"
)  # fmt: skip


def filter_offsets(geo: Geometry, gather: Gather, channels_last: bool = False) -> np.ndarray:
    """Offset in elements of w[o, c, t, r, s] from w[o, 0, 0, 0, 0], in the order of k: (c, t, r, s) or (t, r, s, c)."""
    parts = [np.arange(geo.c_in) * geo.w_strides[2]]
    for axis, stride in zip(gather, geo.w_strides[3:], strict=True):
        parts.append(np.array([tap for tap, _ in axis.taps], np.int64) * stride)
    c, t, r, s = np.ix_(*parts)
    offsets = (c + t + r + s).astype(np.int64)
    return np.ascontiguousarray(np.moveaxis(offsets, 0, -1)) if channels_last else offsets


def reads_in_order(geo: Geometry, gather: Gather) -> bool:
    """Whether k runs through w in steps of one element, so that reading it where it lies is as good as packed."""
    offsets = filter_offsets(geo, gather).reshape(-1)
    return bool((np.diff(offsets) == 1).all())


@cache
def _pack_task(dtype: str, width: int):
    """One panel: index = group * panels + panel."""
    compute = DEFAULT_COMPUTE[dtype]
    data, packed, i64, args_at, params_at = (
        pointer(dtype),
        pointer(compute),
        pointer("i64"),
        struct(ARGS),
        struct(_PACK),
    )
    widen, itemsize = WIDEN[dtype], ITEMSIZE[dtype]
    zero = float32(0.0) if compute == "f32" else float64(0.0)

    def pack_panel(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        g, panel = index // f.panels, index % f.panels
        first = panel * width
        rows = min(width, f.c_out - first)
        w = data(i64(args)[f.w_pointer] + (g * f.w_g + first * f.w_o) * itemsize)
        offsets = i64(f.offsets)
        out = packed(a.workspace + f.workspace_offset + index * f.panel_bytes)
        if rows < width:
            for i in range(f.k_len * width):
                out[i] = zero
        if f.w_o == 1:
            for k in range(f.k_len):
                start = offsets[k]
                for o in range(rows):
                    out[k * width + o] = widen(w[start + o])
        else:
            for k0 in range(0, f.k_len, _BLOCK):
                for o in range(rows):
                    line = o * f.w_o
                    for k in range(k0, min(k0 + _BLOCK, f.k_len)):
                        out[k * width + o] = widen(w[line + offsets[k]])

    return compile_task(pack_panel, (dtype, width))


def packed_bytes(geo: Geometry, gather: Gather, dtype: str, width: int) -> int:
    """Workspace of one packed filter, a multiple of 64."""
    panels = -(-geo.c_out // width)
    k_len = filter_offsets(geo, gather).size
    return -(-geo.groups * panels * k_len * width * ITEMSIZE[DEFAULT_COMPUTE[dtype]] // 64) * 64


def pack_phase(
    geo: Geometry, gather: Gather, dtype: str, width: int, workspace_offset: int, channels_last: bool = False
) -> tuple[Phase, list[np.ndarray]]:
    """The phase that packs the filter of `gather` at `workspace_offset`, and the arrays that it needs alive."""
    offsets = filter_offsets(geo, gather, channels_last).reshape(-1)
    panels = -(-geo.c_out // width)
    ctx = filled(
        _PACK,
        w_pointer=geo.w_pointer,
        panels=panels,
        k_len=offsets.size,
        c_out=geo.c_out,
        w_g=geo.w_strides[0],
        w_o=geo.w_strides[1],
        offsets=offsets.ctypes.data,
        workspace_offset=workspace_offset,
        panel_bytes=offsets.size * width * ITEMSIZE[DEFAULT_COMPUTE[dtype]],
    )
    return Phase(_pack_task(dtype, width), geo.groups * panels, ctx), [offsets]
