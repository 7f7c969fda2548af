"""Filters packed for the micro-kernel, and the order in which its reduction runs.

A gather reduces over k = (channel, t, r, s), or (t, r, s, channel) where channels lie side by side. Its filter is
either read where it lies, through a table of offsets in the order of k, or packed into panels of `width` output
channels, [group][panel][k][width], zero beyond the last one, widened to the compute type. Packing reads the filter
once; it pays where a panel is used often. Of a small filter every worker packs a copy of its own. Where taps lie side
by side and the order of k has them apart, blocks of them are turned in registers, and a line goes to each k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import float32, float64

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.geometry import Gather, Geometry
from nbdnn.kernels.cpu.launch import ARGS, FEW_ELEMS, Phase
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.turns import transpose, turn_lines
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

NOT_TURNED = 0, np.zeros(0, np.int64)
_LEAST_TURNED = 0.2  # of a block's columns that are wanted: fewer are read one by one as fast
_PACK = record(
    *("w_pointer", "panels", "k_len", "c_out", "w_g", "w_o", "w_i", "starts", "offsets", "k_run"),
    *("turns", "columns", "places", "copy_bytes", "panel_bytes"),
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


def turned(
    geo: Geometry, parts: Sequence[np.ndarray], packing: Packing, line_bytes: int, in_line: int = 1
) -> tuple[int, np.ndarray]:
    """(turns, places): how often a block of a filter is turned whose taps lie side by side, one input channel further
    each time, and where in a panel the line of each of its columns goes, in bytes, or -1.

    parts: of each gather `filter_offsets`, channels last. in_line: so many channels have a line together. All channels
    are in one block where they follow each other. No turns: the filter is packed another way.
    """
    _, w_o, w_i, _, _, w_s = geo.w_strides
    block, taps = min(w_o, w_i), sum(part[..., 0].size for part in parts)
    if w_s != 1 or block == 1 or common_step(geo.filter_starts) != w_o or taps < _LEAST_TURNED * block:
        return NOT_TURNED
    channels = geo.c_in if w_i == block else 1  # of one block
    places = np.full(block * channels, -1, np.int64)
    for part, start in zip(parts, packing.part_offsets, strict=True):
        lines = start + np.arange(part.size).reshape(part.shape) // in_line * line_bytes
        places[part[..., :channels]] = lines[..., :channels]
    return geo.c_in // channels, places


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
    turn_each, line_bytes = turn_lines(dtype, compute, vl), width * ITEMSIZE[compute]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    zero = float32(0.0) if compute == "f32" else float64(0.0)

    def pack_panel(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        g, panel = index // f.panels, index % f.panels
        first = panel * width
        rows = min(width, f.c_out - first)
        starts = i64(f.starts + first * 8)
        w_address = i64(args)[f.w_pointer] + (g * f.w_g + starts[0]) * itemsize
        out_address = a.workspace + worker * f.copy_bytes + index * f.panel_bytes
        w, out, offsets = data(w_address), packed(out_address), i64(f.offsets)
        if rows < width:
            for i in range(f.k_len * width):
                out[i] = zero
        for i in range(f.turns):
            start = w_address + i * f.w_i * itemsize
            turn_each(out_address + i * line_bytes, f.places, start, f.w_o * itemsize, rows, f.columns)
        if f.turns:
            return
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


@dataclass(frozen=True)
class Packing:
    """The panels of a filter, each with its parts for all gathers, one after the other.

    part_offsets: bytes of each gather's part in a panel. panel_bytes: from one panel to the next one. copy_bytes: from
    one worker's packed filter to the next one's; 0 where all share one. total_bytes: workspace, a multiple of 64.
    """

    width: int
    panels: int
    part_offsets: tuple[int, ...]
    panel_bytes: int
    copy_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, geo: Geometry, dtype: str, width: int, device: Cpu) -> Packing:
        """geo.c_in counts what a step of the reduction multiplies: channels, or pairs of them."""
        acc_bytes, panels = ITEMSIZE[DEFAULT_COMPUTE[dtype]], -(-geo.c_out // width)
        sizes = [filter_offsets(geo, gather).size * width * acc_bytes for gather in geo.gathers]
        one_bytes = -(-geo.groups * panels * sum(sizes) // 64) * 64
        few = geo.groups * geo.c_out * sum(sizes) < FEW_ELEMS * width * acc_bytes
        return cls(
            width,
            panels,
            tuple(sum(sizes[:i]) for i in range(len(sizes))),
            sum(sizes),
            one_bytes if few else 0,
            one_bytes * device.threads if few else one_bytes,
        )


def pack_phase(
    geo: Geometry, dtype: str, packing: Packing, device: Cpu, channels_last: bool = False
) -> tuple[Phase, list[np.ndarray]]:
    """The phase that packs the filter at the beginning of the workspace, and the arrays that it needs alive."""
    compute, width = DEFAULT_COMPUTE[dtype], packing.width
    parts = [filter_offsets(geo, gather, channels_last) for gather in geo.gathers]
    offsets, starts = np.concatenate([part.reshape(-1) for part in parts]), geo.filter_starts
    vl, line_bytes = device.lanes(compute), width * ITEMSIZE[compute]
    is_turned = channels_last and width % vl == 0
    turns, places = turned(geo, parts, packing, line_bytes) if is_turned else NOT_TURNED
    ctx = filled(
        _PACK,
        w_pointer=geo.w_pointer,
        panels=packing.panels,
        k_len=offsets.size,
        c_out=geo.c_out,
        w_g=geo.w_strides[0],
        w_o=common_step(starts),
        w_i=geo.w_strides[2],
        starts=starts.ctypes.data,
        offsets=offsets.ctypes.data,
        k_run=run_length(offsets),
        turns=turns,
        columns=places.size,
        places=places.ctypes.data,
        copy_bytes=packing.copy_bytes,
        panel_bytes=packing.panel_bytes,
    )
    task = Phase(_pack_task(dtype, width, vl), geo.groups * packing.panels, ctx, each=packing.copy_bytes > 0)
    return task, [offsets, starts, places]
