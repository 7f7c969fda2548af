"""Filters packed for the micro-kernel, and the order in which its reduction runs.

A gather reduces over k = (channel, t, r, s), or (t, r, s, channel) where channels lie side by side. Its filter is
either read where it lies, through a table of offsets in the order of k, or packed into panels of `width` output
channels, [group][panel][k][width], zero beyond the last one, widened to the compute type. Packing reads the filter
once; it pays where a panel is used often. Of a small filter every worker packs a copy of its own.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import float32, float64

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.geometry import Gather, Geometry
from nbdnn.kernels.cpu.launch import ARGS, FEW_ELEMS, Phase
from nbdnn.kernels.cpu.rows import convert_row, transpose
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

_PACK = record(
    *("w_pointer", "panels", "k_len", "c_out", "w_g", "w_o", "starts", "offsets", "k_run"),
    *("workspace_offset", "copy_bytes", "panel_bytes"),
)


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


def run_length(offsets: np.ndarray) -> int:
    """Largest number of steps of k, dividing their count, in which w is read element after element."""
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    return max(1, int(np.gcd.reduce(np.append(breaks, offsets.size))))


def common_step(starts: np.ndarray) -> int:
    """The distance of one from the next; 0 where it changes."""
    steps = np.diff(starts)
    return int(steps[0]) if steps.size and (steps == steps[0]).all() else int(not steps.size)


@cache
def _pack_task(dtype: str, width: int, vl: int):
    """One panel: index = group * panels + panel."""
    compute = DEFAULT_COMPUTE[dtype]
    data, packed, i64, args_at, params_at = (
        pointer(dtype),
        pointer(compute),
        pointer("i64"),
        struct(ARGS),
        struct(_PACK),
    )
    widen, widen_row, turn = WIDEN[dtype], convert_row(dtype, compute, vl), transpose(dtype, compute, vl)
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    zero = float32(0.0) if compute == "f32" else float64(0.0)

    def pack_panel(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        g, panel = index // f.panels, index % f.panels
        first = panel * width
        rows = min(width, f.c_out - first)
        starts = i64(f.starts + first * 8)
        w_address = i64(args)[f.w_pointer] + (g * f.w_g + starts[0]) * itemsize
        out_address = a.workspace + f.workspace_offset + worker * f.copy_bytes + index * f.panel_bytes
        w, out, offsets = data(w_address), packed(out_address), i64(f.offsets)
        if rows < width:
            for i in range(f.k_len * width):
                out[i] = zero
        k_run = f.k_run
        for k in range(0, f.k_len, k_run):
            to, start = out_address + k * width * acc_bytes, w_address + offsets[k] * itemsize
            if f.w_o == 1:
                for kk in range(k_run):
                    from_row = w_address + offsets[k + kk] * itemsize
                    widen_row(to + kk * width * acc_bytes, from_row, rows)
            elif k_run > 1 and f.w_o:
                turn(to, width * acc_bytes, start, f.w_o * itemsize, rows, k_run)
            else:
                for kk in range(k, k + k_run):
                    for o in range(rows):
                        out[kk * width + o] = widen(w[starts[o] - starts[0] + offsets[kk]])

    return compile_task(pack_panel, (dtype, width, vl))


def _one_bytes(geo: Geometry, gather: Gather, dtype: str, width: int) -> int:
    """Bytes of one packed filter, a multiple of 64."""
    panels = -(-geo.c_out // width)
    k_len = filter_offsets(geo, gather).size
    return -(-geo.groups * panels * k_len * width * ITEMSIZE[DEFAULT_COMPUTE[dtype]] // 64) * 64


def copy_bytes(geo: Geometry, gather: Gather, dtype: str, width: int) -> int:
    """Bytes from one worker's packed filter to the next one's; 0 where all share one."""
    few = geo.groups * geo.c_out * filter_offsets(geo, gather).size < FEW_ELEMS
    return _one_bytes(geo, gather, dtype, width) if few else 0


def packed_bytes(geo: Geometry, gather: Gather, dtype: str, width: int, device: Cpu) -> int:
    """Workspace of a packed filter, or of all its copies; a multiple of 64."""
    return max(_one_bytes(geo, gather, dtype, width), device.threads * copy_bytes(geo, gather, dtype, width))


def pack_phase(
    geo: Geometry,
    gather: Gather,
    dtype: str,
    width: int,
    workspace_offset: int,
    device: Cpu,
    channels_last: bool = False,
) -> tuple[Phase, list[np.ndarray]]:
    """The phase that packs the filter of `gather` at `workspace_offset`, and the arrays that it needs alive."""
    offsets = filter_offsets(geo, gather, channels_last).reshape(-1)
    starts = geo.filter_starts
    panels = -(-geo.c_out // width)
    ctx = filled(
        _PACK,
        w_pointer=geo.w_pointer,
        panels=panels,
        k_len=offsets.size,
        c_out=geo.c_out,
        w_g=geo.w_strides[0],
        w_o=common_step(starts),
        starts=starts.ctypes.data,
        offsets=offsets.ctypes.data,
        k_run=run_length(offsets),
        workspace_offset=workspace_offset,
        copy_bytes=(own_bytes := copy_bytes(geo, gather, dtype, width)),
        panel_bytes=offsets.size * width * ITEMSIZE[DEFAULT_COMPUTE[dtype]],
    )
    task = _pack_task(dtype, width, device.lanes(DEFAULT_COMPUTE[dtype]))
    return Phase(task, geo.groups * panels, ctx, each=own_bytes > 0), [offsets, starts]
