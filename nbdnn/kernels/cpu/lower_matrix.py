"""Lowering for BLAS: the pixels of a strip against everything that a product sums over, as one dense matrix a group.

    low[g, k, p] = in[n, g, c, i*in_step + offset(tap)]        p = (row, column) of the strip, 0 beyond the borders

A planar operand (pixels side by side) becomes [g][k][p] with k = (c, t, r, s), rows of pixels moved by masked vectors;
an interleaved one (channels side by side) becomes [g][p][k] with k = (t, r, s, c), runs of channels copied. The rows of
a strip are output rows, counted through all images and depths. 16-bit data are widened here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from nbdnn.array import at
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import FASTMATH, compile_task
from nbdnn.kernels.cpu.geometry import Gather, column_table
from nbdnn.kernels.cpu.launch import ARGS, Phase
from nbdnn.kernels.cpu.rows import convert_row, every_step, zero_fill
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE, dense_strides

_PARAMS = record(
    *("operand", "offset", "first_row", "rows", "groups", "channels", "run"),
    *("in_n", "in_g", "in_c", "in_d", "in_h", "in_w", "count_d", "count_h", "count_w"),
    *("step_d", "step_h", "step_w", "extent_d", "extent_h", "extent_w"),
    *("taps_d", "taps_h", "taps_w", "table_d", "table_h", "table_w"),
)


@cache
def _planar_task(dtype: str, vl: int):
    """The column taps of one channel, depth tap and row tap: index = (channel * depth taps + t) * row taps + r."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(_PARAMS)
    fill, move_rows = zero_fill(compute), every_step(dtype, compute, vl)
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]

    def lower_planar(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        r, rest = index % f.taps_h, index // f.taps_h
        t, channel = rest % f.taps_d, rest // f.taps_d
        table_d, table_h, table_w = i64(f.table_d), i64(f.table_h), i64(f.table_w)
        image = i64(args)[f.operand] + channel * f.in_c * itemsize
        line_bytes = f.count_w * acc_bytes
        low, row = a.workspace + f.offset + index * f.taps_w * f.rows * line_bytes, 0
        while row < f.rows:
            h, rest = (f.first_row + row) % f.count_h, (f.first_row + row) // f.count_h
            d, n = rest % f.count_d, rest // f.count_d
            lines = min(f.count_h - h, f.rows - row)
            # Lines [first, end) of this image and depth lie inside.
            first = min(lines, max(0, table_h[3 * r + 1] - h))
            end = max(first, min(lines, table_h[3 * r + 2] - h))
            if d < table_d[3 * t + 1] or d >= table_d[3 * t + 2]:
                first = end = 0
            source = n * f.in_n + (d * f.step_d + table_d[3 * t]) * f.in_d
            source += ((h + first) * f.step_h + table_h[3 * r]) * f.in_h
            for s in range(f.taps_w):
                to = low + (s * f.rows + row) * line_bytes
                fill(to, first * f.count_w)
                fill(to + end * line_bytes, (lines - end) * f.count_w)
                move_rows(
                    to + first * line_bytes, image + (source + table_w[3 * s] * f.in_w) * itemsize,
                    f.step_h * f.in_h * itemsize, f.step_w * f.in_w, end - first, f.count_w,
                    table_w[3 * s + 1], table_w[3 * s + 2],
                )  # fmt: skip
            row += lines

    return compile_task(lower_planar, (dtype, vl), fastmath=FASTMATH)


@cache
def _interleaved_task(dtype: str, vl: int):
    """One row of the strip for one group: index = group * rows + row."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(_PARAMS)
    fill, widen_row = zero_fill(compute), convert_row(dtype, compute, vl)
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]

    def lower_interleaved(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        table_d, table_h, table_w = i64(f.table_d), i64(f.table_h), i64(f.table_w)
        g, row = index // f.rows, f.first_row + index % f.rows
        h, rest = row % f.count_h, row // f.count_h
        d, n = rest % f.count_d, rest // f.count_d
        image = i64(args)[f.operand] + (n * f.in_n + g * f.in_g) * itemsize
        pixel_bytes = f.channels * acc_bytes
        taps_bytes = f.taps_w * pixel_bytes
        low = a.workspace + f.offset + index * f.count_w * f.taps_d * f.taps_h * taps_bytes
        for q in range(f.count_w):
            for t in range(f.taps_d):
                for r in range(f.taps_h):
                    to, low = low, low + taps_bytes
                    outside = d < table_d[3 * t + 1] or d >= table_d[3 * t + 2]
                    if outside or h < table_h[3 * r + 1] or h >= table_h[3 * r + 2]:
                        fill(to, f.taps_w * f.channels)
                        continue
                    source = (d * f.step_d + table_d[3 * t]) * f.in_d + (h * f.step_h + table_h[3 * r]) * f.in_h
                    for s in range(0, f.taps_w, f.run):
                        # Pixels [first, end) of the run lie inside; a run of several has them side by side.
                        w = q * f.step_w + table_w[3 * s]
                        first = min(f.run, max(0, -w))
                        end = max(first, min(f.run, f.extent_w - w))
                        fill(to, first * f.channels)
                        start, to = (
                            image + (source + (w + first) * f.in_w) * itemsize,
                            to + first * f.channels * acc_bytes,
                        )
                        widen_row(to, start, (end - first) * f.channels)
                        to += (end - first) * f.channels * acc_bytes
                        fill(to, (f.run - end) * f.channels)
                        to += (f.run - end) * f.channels * acc_bytes

    return compile_task(lower_interleaved, (dtype, vl), fastmath=FASTMATH)


@dataclass(frozen=True)
class Lowering:
    """An operand that is lowered: where it stands among the operands, its (n, g, c, d, h, w) strides, what is read.

    The taps are in the order of k: by their place in the filter where planar, so that the filter can be multiplied as
    it lies; by their place in the image where interleaved, so that neighbours are copied together.
    """

    dtype: str
    operand: int
    n: int
    groups: int
    channels: int
    strides: tuple[int, ...]
    gather: Gather
    planar: bool

    @classmethod
    def of(
        cls, dtype: str, operand: int, n: int, groups: int, channels: int, strides: tuple[int, ...], gather: Gather
    ) -> Lowering:
        planar = strides[5] == 1 and strides[2] != 1
        ordered = gather if planar else gather.in_image_order()
        return cls(dtype, operand, n, groups, channels, strides, ordered, planar)

    @property
    def k_len(self) -> int:
        return self.channels * prod(len(axis.taps) for axis in self.gather)

    @property
    def row_bytes(self) -> int:
        """What a row of pixels takes in the matrices of all groups."""
        return self.groups * self.k_len * self.gather.w.count * ITEMSIZE[DEFAULT_COMPUTE[self.dtype]]

    def phase(self, first_row: int, rows: int, offset: int, device: Cpu) -> tuple[Phase, list[np.ndarray]]:
        """The phase that lowers a strip to `offset` in the workspace, and the arrays that it needs alive."""
        tables = [column_table(axis) for axis in self.gather]
        values = dict(zip(("in_n", "in_g", "in_c", "in_d", "in_h", "in_w"), self.strides, strict=True))
        for name, axis, table in zip("dhw", self.gather, tables, strict=True):
            values |= {
                f"count_{name}": axis.count,
                f"step_{name}": axis.in_step,
                f"extent_{name}": axis.in_extent,
                f"taps_{name}": len(axis.taps),
                f"table_{name}": table.ctypes.data,
            }
        columns = tables[2][:, 0]
        side_by_side = self.strides[5] == self.channels and (np.diff(columns) == 1).all()
        ctx = filled(
            _PARAMS,
            **values,
            operand=self.operand,
            offset=offset,
            first_row=first_row,
            rows=rows,
            groups=self.groups,
            channels=self.channels,
            run=max(1, columns.size) if side_by_side else 1,
        )
        vl = device.lanes(DEFAULT_COMPUTE[self.dtype])
        if self.planar:
            tasks = self.groups * self.channels * len(self.gather.d.taps) * len(self.gather.h.taps)
            return Phase(_planar_task(self.dtype, vl), tasks, ctx), tables
        return Phase(_interleaved_task(self.dtype, vl), self.groups * rows, ctx), tables

    def matrix(self, address: int, rows: int) -> np.ndarray:
        """The lowered strip at `address` as an array (g, k, p)."""
        shape = (self.groups, self.k_len, rows * self.gather.w.count)
        if self.planar:
            return matrix(address, shape, self.dtype)
        return matrix(address, (shape[0], shape[2], shape[1]), self.dtype).swapaxes(1, 2)


def matrix(address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The dense array of `dtype`'s compute type at `address`."""
    return at(address, shape, dense_strides(shape, False), DEFAULT_COMPUTE[dtype])
