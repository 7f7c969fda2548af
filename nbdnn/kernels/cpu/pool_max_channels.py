"""The gradient of a maximum where neighbours are channels, in blocks of rows.

    tap[p] = the first r at which x[p*u + r - pad] is the maximum of window p; where there are NaNs the last of them
    dx[i] = sum of dy[p] over the windows p that cover i and whose tap[p] is i + pad - p*u

A vector of channels keeps its maximum and its tap in registers while the taps of its window pass by, and its sum of dx
while the windows that cover it do. What comes from memory is asked for ahead.

Traffic: x, dy and dx once from memory; of x, rows that windows of two blocks share once more. y is not read.
Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np
from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes, whole_lines
from nbdnn.kernels.cpu.pool_taps import (
    AHEAD_BYTES,
    BLOCK_BYTES,
    ENTRY_BYTES,
    ask_for,
    covering,
    find_few,
    gather_few,
    reached,
)
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD, _LEAST_ROWS = 4, 8  # rows of a block that is not made smaller for the sake of more tasks

# channels: how many. columns: where each tap of a row lies, in bytes. A worker's scratch: entries, taps of windows.
_FIELDS = record(
    *("channels", "columns", "blocks_d", "blocks_h", "block_d", "block_h", "scratch", "scratch_bytes", "taps_offset"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


@cache
def _find_line(dtype: str, vl: int):
    """Compiled-in function (f, to, entries, n_rows, dy): taps of a line of windows, whose dy will be wanted soon."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, itemsize, size = pointer("i64"), ITEMSIZE[dtype], ITEMSIZE[compute]
    find = find_few(dtype, compute, vl, False)

    @njit(**DEVICE)
    def find_line(f, to, entries, n_rows, dy):
        for q in range(f.out_w):
            start = q * f.step_w - f.pad_w
            ask_for(dy + q * f.channels * itemsize, f.channels * itemsize)
            for row in range(max(0, n_rows - f.step_h), n_rows):
                source = i64(entries + row * ENTRY_BYTES)[0] + start * f.channels * itemsize
                ask_for(source + AHEAD_BYTES, f.step_w * f.channels * itemsize)
            begin, end = max(0, -start), min(f.taps_w, f.in_w - start)
            there, first = to + q * f.channels * size, i64(entries)[2] + begin
            find(there, f.channels, entries, n_rows, f.columns, begin, end, start * f.channels, first)

    return find_line


@cache
def _give_row(dtype: str, vl: int):
    """Compiled-in function (f, to, entries, n_rows): a row of dx."""
    itemsize, gather = ITEMSIZE[dtype], gather_few(dtype, DEFAULT_COMPUTE[dtype], dtype, vl)

    @njit(**DEVICE)
    def give_row(f, to, entries, n_rows):
        for w in range(f.in_w):
            first, last = covering(w, w + 1, f.step_w, f.pad_w, f.taps_w, f.out_w)
            tap, start = w + f.pad_w - (last - 1) * f.step_w, (last - 1) * f.channels
            there = to + w * f.channels * itemsize
            ask_for(there + AHEAD_BYTES, f.channels * itemsize)
            gather(there, f.channels, entries, n_rows, start, -f.channels, tap, last - first, f.step_w)

    return give_row


@cache
def _task(dtype: str, vl: int):
    """A block of rows of dx: index = (image * blocks_d + block of depths) * blocks_h + block of rows."""
    i64, at, itemsize, size = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype], ITEMSIZE[DEFAULT_COMPUTE[dtype]]
    find_line, give_row = _find_line(dtype, vl), _give_row(dtype, vl)

    def max_of_channels(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        entries = f.scratch + worker * f.scratch_bytes
        low_h, rest = index % f.blocks_h * f.block_h, index // f.blocks_h
        low_d, image = rest % f.blocks_d * f.block_d, rest // f.blocks_d
        end_d, end_h = min(low_d + f.block_d, f.in_d), min(low_h + f.block_h, f.in_h)
        row_bytes, out_bytes = f.in_w * f.channels * itemsize, f.out_w * f.channels * itemsize
        x, dx = pointers[0] + image * f.in_d * f.in_h * row_bytes, pointers[3] + image * f.in_d * f.in_h * row_bytes
        dy = pointers[2] + image * f.out_d * f.out_h * out_bytes
        first_d, last_d = covering(low_d, end_d, f.step_d, f.pad_d, f.taps_d, f.out_d)
        first_p, last_p = covering(low_h, end_h, f.step_h, f.pad_h, f.taps_h, f.out_h)
        taps, line_bytes = entries + f.taps_offset, f.out_w * f.channels * size

        # 1. The taps of the maxima of all windows that cover a row of the block.
        for d in range(first_d, last_d):
            from_d, to_d = reached(d, d + 1, f.step_d, f.pad_d, f.taps_d, f.in_d)
            for p in range(first_p, last_p):
                from_h, to_h = reached(p, p + 1, f.step_h, f.pad_h, f.taps_h, f.in_h)
                n_rows = 0
                for depth in range(from_d, to_d):
                    for h in range(from_h, to_h):
                        entry = i64(entries + n_rows * ENTRY_BYTES)
                        tap_d, tap_h = depth + f.pad_d - d * f.step_d, h + f.pad_h - p * f.step_h
                        entry[0], entry[2] = x + (depth * f.in_h + h) * row_bytes, (tap_d * f.taps_h + tap_h) * f.taps_w
                        n_rows += 1
                line = (d - first_d) * (last_p - first_p) + p - first_p
                find_line(f, taps + line * line_bytes, entries, n_rows, dy + (d * f.out_h + p) * out_bytes)

        # 2. What each element gets.
        for depth in range(low_d, end_d):
            from_d, to_d = covering(depth, depth + 1, f.step_d, f.pad_d, f.taps_d, f.out_d)
            for h in range(low_h, end_h):
                from_p, to_p = covering(h, h + 1, f.step_h, f.pad_h, f.taps_h, f.out_h)
                n_rows = 0
                for d in range(from_d, to_d):
                    for p in range(from_p, to_p):
                        entry = i64(entries + n_rows * ENTRY_BYTES)
                        line = (d - first_d) * (last_p - first_p) + p - first_p
                        tap_d, tap_h = depth + f.pad_d - d * f.step_d, h + f.pad_h - p * f.step_h
                        entry[0], entry[1] = taps + line * line_bytes, dy + (d * f.out_h + p) * out_bytes
                        entry[2] = (tap_d * f.taps_h + tap_h) * f.taps_w
                        n_rows += 1
                give_row(f, dx + (depth * f.in_h + h) * row_bytes, entries, n_rows)

    return compile_task(max_of_channels, (dtype, vl))


def max_of_channels(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of channels-last data."""
    vl, size, itemsize = device.lanes(problem.compute), ITEMSIZE[problem.compute], ITEMSIZE[problem.dtype]
    line_bytes, wanted = axes.out[2] * problem.c * size, device.threads * _TASKS_PER_THREAD

    def scratch_of(block: tuple[int, int]) -> tuple[int, int]:
        """(bytes of entries, of taps): of the windows that may cover a block."""
        windows = 1
        for axis, extent in enumerate(block):
            windows *= min(axes.out[axis], (extent + axes.taps[axis] - 2) // axes.step[axis] + 1)
        return whole_lines(ENTRY_BYTES * axes.taps[0] * axes.taps[1]), whole_lines(windows * line_bytes)

    depths, rows = axes.extent[:2]
    while depths * rows > 1:
        blocks = problem.n * ceil(axes.extent[0] / depths) * ceil(axes.extent[1] / rows)
        few = depths * rows > _LEAST_ROWS and blocks < wanted
        if not few and sum(scratch_of((depths, rows))) <= BLOCK_BYTES:
            break
        depths, rows = (ceil(depths / 2), rows) if depths > 1 else (1, ceil(rows / 2))

    blocks_d, blocks_h = ceil(axes.extent[0] / depths), ceil(axes.extent[1] / rows)
    taps_offset, taps_bytes = scratch_of((depths, rows))
    scratch = np.empty(device.threads * (taps_offset + taps_bytes) + 64, np.uint8)
    columns = np.arange(axes.taps[2], dtype=np.int64) * problem.c * itemsize
    ctx = filled(
        _FIELDS,
        **axes.fields(),
        channels=problem.c,
        columns=columns.ctypes.data,
        blocks_d=blocks_d,
        blocks_h=blocks_h,
        block_d=depths,
        block_h=rows,
        scratch=scratch.ctypes.data + -scratch.ctypes.data % 64,
        scratch_bytes=taps_offset + taps_bytes,
        taps_offset=taps_offset,
    )
    phase = Phase(_task(problem.dtype, vl), problem.n * blocks_d * blocks_h, ctx)
    return Program([phase], [scratch, columns])
