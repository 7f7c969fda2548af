"""Lowering for kernels with columns in the lanes: some channels of a strip of rows, widened and zero-padded, in planes.

For one image, group and output depth, and a strip of output rows,

    low[c, t, row, column] = in[c, depth*step + offset(t), first_row + low_h + row, low_w + column]

with zeros beyond the borders, and behind the last row of each plane. A row follows the one before at once, so that the
outputs of a strip are one run, with those that nobody wants between rows. The input may have any layout.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.cost import COPY_NS
from nbdnn.kernels.cpu.geometry import Gather
from nbdnn.kernels.cpu.rows import ask_for, convert_row, zero_fill
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import pointer
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

# What lowering reads of a record. step_channels: how far ahead the next ones are that pass by.
LOW_FIELDS = (
    *("in_c", "in_d", "in_h", "in_w", "extent_d", "extent_h", "extent_w", "in_step_d", "taps_d", "depth_offsets"),
    *("low_h", "low_w", "low_rows", "low_pitch", "plane_elems", "strip_rows", "step_channels"),
)
# Nanoseconds a line that is copied or stored, and an element of channels that lie side by side.
LINE_NS = 8.0
_TURN_NS, _TURNED_TOGETHER = 0.18, 8


def element_ns(channels: int, planar: bool) -> float:
    """What copying an element costs, where so many channels of a group may be turned together."""
    return COPY_NS if planar else _TURN_NS * max(1.0, _TURNED_TOGETHER / channels)


@cache
def lower_planes(dtype: str, vl: int):
    """Compiled-in function (image, low, f, depth, first row, rows, channels): the formula of the module for `channels`
    channels of which `image` is the address of the first. f has LOW_FIELDS."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, fill = pointer("i64"), zero_fill(compute)
    widen_row, turn = convert_row(dtype, compute, vl), transpose(dtype, compute, vl)
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]

    @njit(**DEVICE)
    def lower(image, low, f, depth, first_row, rows, channels):
        line_bytes, plane_bytes = f.low_pitch * acc_bytes, f.plane_elems * acc_bytes
        channel_bytes = f.taps_d * plane_bytes
        used_rows = rows + f.low_rows - f.strip_rows
        start, end = min(max(0, -f.low_w), f.low_pitch), min(f.low_pitch, max(0, f.extent_w - f.low_w))
        run = channels if f.in_w != 1 else 1  # at a time: one where columns lie side by side
        for c in range(0, channels, run):
            for t in range(f.taps_d):
                d = depth * f.in_step_d + i64(f.depth_offsets)[t]
                plane = low + c * channel_bytes + t * plane_bytes
                for cc in range(run):
                    behind = plane + cc * channel_bytes + used_rows * line_bytes
                    fill(behind, f.plane_elems - f.low_rows * f.low_pitch)
                for row in range(used_rows):
                    h, to = first_row + f.low_h + row, plane + row * line_bytes
                    inside = 0 <= d < f.extent_d and 0 <= h < f.extent_h and start < end
                    for cc in range(run):
                        fill(to + cc * channel_bytes, start if inside else f.low_pitch)
                        if inside:
                            fill(to + cc * channel_bytes + end * acc_bytes, f.low_pitch - end)
                    if not inside:
                        continue
                    at = image + (c * f.in_c + d * f.in_d + h * f.in_h + (f.low_w + start) * f.in_w) * itemsize
                    if f.in_w == 1:
                        ask_for(at + f.step_channels * f.in_c * itemsize, (end - start) * itemsize)
                        widen_row(to + start * acc_bytes, at, end - start)
                    else:
                        turn(to + start * acc_bytes, channel_bytes, at, f.in_w * itemsize, end - start, run)

    return lower


def low_values(
    axes: Gather, strides: tuple[int, ...], strip_rows: int, pitch: int, plane_elems: int, step_channels: int
) -> tuple[dict[str, int], np.ndarray]:
    """The value of each of LOW_FIELDS, and the table that it points to. strides: of channels, depths, rows, columns."""
    depth_offsets = np.array([offset for _, offset in axes.d.taps], np.int64)
    values = {
        **{f"in_{name}": stride for name, stride in zip("cdhw", strides, strict=True)},
        **{f"extent_{name}": axis.in_extent for name, axis in zip("dhw", axes, strict=True)},
        "in_step_d": axes.d.in_step,
        "taps_d": len(axes.d.taps),
        "depth_offsets": depth_offsets.ctypes.data,
        "low_h": axes.h.low,
        "low_w": axes.w.low,
        "low_rows": strip_rows + axes.h.span,
        "low_pitch": pitch,
        "plane_elems": plane_elems,
        "strip_rows": strip_rows,
        "step_channels": step_channels,
    }
    return values, depth_offsets
