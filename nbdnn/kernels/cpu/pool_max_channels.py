"""The gradient of a maximum where neighbours are channels, in blocks of rows.

    tap[p] = the first r at which x[p*u + r - pad] is the maximum of window p; where there are NaNs the last of them
    dx[i] = sum of dy[p] over the windows p that cover i and whose tap[p] is i + pad - p*u

An axis at a time (`pool_taps.py`): the maxima along each row of x that the windows of a block reach, then across rows
and depths; what of dy goes to each depth, to each row, and along it. What comes from memory is asked for ahead.

Traffic: x, dy and dx once from memory; of x, rows that windows of two blocks share once more. y is not read.
Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil

import numpy as np
from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import streams
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.pool_rows import fill, real_of
from nbdnn.kernels.cpu.pool_taps import AHEAD_BYTES, covering, find_few, gather_few, reached
from nbdnn.kernels.cpu.rows import ask_for
from nbdnn.kernels.cpu.scratch import Scratch, whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

# Of what a worker keeps of a block, in the last-level cache: in 384 KiB, most rows were searched for two blocks or
# more, and 8x192x28x28, 3x3, took 1.5 ms instead of 0.9 (two threads of a Zen 3, AVX2).
BLOCK_BYTES = 3 << 20
_TASKS_PER_THREAD, _LEAST_ROWS = 4, 8  # rows of a block that is not made smaller for the sake of more tasks

# What a worker keeps, in lines of out_w x channels elements: maxima and taps of windows on w, of rows_d x rows_h rows
# of x; on h, of rows_d x windows_h; on d, of windows_d x windows_h; what of dy goes to a depth and to a row. Maxima
# that nobody reads share one line.
_KEPT = ("best_w_at", "best_h_at", "best_d_at", "taps_w_at", "taps_h_at", "taps_d_at", "to_plane_at", "to_row_at")
# offsets: by axis, where each tap lies, in bytes. covering: of each column the windows that cover it, [first, last).
# is_deep: windows have an axis of depths.
_FIELDS = record(
    *("channels", "offsets_d", "offsets_h", "offsets_w", "covering", "is_deep"),
    *("blocks_d", "blocks_h", "block_d", "block_h", "rows_d", "rows_h", "windows_d", "windows_h", "line_bytes"),
    *("scratch", "scratch_bytes", *_KEPT),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


@cache
def _find_inside(source: str, compute: str, vl: int):
    """Compiled-in function (found, taps, n, start, offsets, begin, end): `find_taps` of the taps that are inside of the
    image; where none is, no tap."""
    find, clear, numbers = find_few(source, compute, vl), fill(compute), pointer("i64" if compute == "f64" else "i32")
    _, lowest = real_of(compute)

    @njit(**DEVICE)
    def find_inside(found, taps, n, start, offsets, begin, end):
        if begin < end:
            find(found, taps, n, start, offsets, begin, end)
            return
        clear(found, n, lowest)
        for i in range(n):
            numbers(taps)[i] = -1

    return find_inside


@cache
def _find_block(dtype: str, vl: int):
    """Compiled-in function (f, x, dy, base, first_d, last_d, first_p, last_p): taps of these windows, by axis."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, size = ITEMSIZE[dtype], ITEMSIZE[compute]
    find_in_row, find = _find_inside(dtype, compute, vl), _find_inside(compute, compute, vl)

    @njit(**DEVICE)
    def along_row(f, best, taps, row):
        for q in range(f.out_w):
            start = q * f.step_w - f.pad_w
            source, to = row + start * f.channels * itemsize, q * f.channels * size
            ask_for(source + AHEAD_BYTES, f.step_w * f.channels * itemsize)
            begin, end = max(0, -start), min(f.taps_w, f.in_w - start)
            find_in_row(best + to, taps + to, f.channels, source, f.offsets_w, begin, end)

    @njit(**DEVICE)
    def across_rows(f, base, dy, depth, from_h, first_p, last_p):
        n, lines = f.out_w * f.channels, base + f.best_w_at + depth * f.rows_h * f.line_bytes
        for p in range(first_p, last_p):
            start, line = p * f.step_h - f.pad_h, depth * f.windows_h + p - first_p
            begin, end = max(0, -start), min(f.taps_h, f.in_h - start)
            best = base + f.best_h_at + line * f.is_deep * f.line_bytes
            ask_for(dy + p * n * itemsize, n * itemsize)
            find(best, base + f.taps_h_at + line * f.line_bytes, n, lines + (start - from_h) * f.line_bytes,
                 f.offsets_h, begin, end)  # fmt: skip

    @njit(**DEVICE)
    def across_planes(f, base, d, first_d, from_d, n_p):
        start, n = d * f.step_d - f.pad_d, f.out_w * f.channels
        begin, end = max(0, -start), min(f.taps_d, f.in_d - start)
        for p in range(n_p):
            lines = base + f.best_h_at + ((start - from_d) * f.windows_h + p) * f.line_bytes
            taps = base + f.taps_d_at + ((d - first_d) * f.windows_h + p) * f.line_bytes
            find(base + f.best_d_at, taps, n, lines, f.offsets_d, begin, end)

    @njit(**DEVICE)
    def find_block(f, x, dy, base, first_d, last_d, first_p, last_p):
        from_d, to_d = reached(first_d, last_d, f.step_d, f.pad_d, f.taps_d, f.in_d)
        from_h, to_h = reached(first_p, last_p, f.step_h, f.pad_h, f.taps_h, f.in_h)
        for depth in range(from_d, to_d):
            for h in range(from_h, to_h):
                line = ((depth - from_d) * f.rows_h + h - from_h) * f.line_bytes
                row = x + (depth * f.in_h + h) * f.in_w * f.channels * itemsize
                along_row(f, base + f.best_w_at + line, base + f.taps_w_at + line, row)
            across_rows(f, base, dy, depth - from_d, from_h, first_p, last_p)
        if f.is_deep:
            for d in range(first_d, last_d):
                across_planes(f, base, d, first_d, from_d, last_p - first_p)

    return find_block


@cache
def _give_block(dtype: str, vl: int, past_caches: bool):
    """Compiled-in functions: what of dy goes to a depth of dx, and to a row of it."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, itemsize, size = pointer("i64"), ITEMSIZE[dtype], ITEMSIZE[compute]
    gather_given, gather, give = (
        gather_few(*types, vl) for types in ((dtype, compute, compute), (compute,) * 3, (compute, compute, dtype))
    )
    stream = gather_few(compute, compute, dtype, vl, past_caches)

    @njit(**DEVICE)
    def give_plane(f, dy, base, depth, first_d, first_p, last_p):
        from_d, to_d = covering(depth, depth + 1, f.step_d, f.pad_d, f.taps_d, f.out_d)
        n, apart = f.out_w * f.channels, f.windows_h * f.line_bytes
        for p in range(first_p, last_p):
            taps = base + f.taps_d_at + (from_d - first_d) * apart + (p - first_p) * f.line_bytes
            shares = dy + (from_d * f.out_h + p) * n * itemsize
            to, tap = base + f.to_plane_at + (p - first_p) * f.line_bytes, depth + f.pad_d - from_d * f.step_d
            gather_given(to, n, taps, apart, shares, f.out_h * n * itemsize, tap, to_d - from_d, -f.step_d)

    @njit(**DEVICE)
    def give_row(f, dy, dx, base, line_d, h, row, first_p):
        """dy: where windows have no axis of depths, that of this depth. line_d, row: which of the kept ones depth and
        row are; taps of rows that no window reaches are not read."""
        from_p, to_p = covering(h, h + 1, f.step_h, f.pad_h, f.taps_h, f.out_h)
        n, to, tap, count = f.out_w * f.channels, base + f.to_row_at, h + f.pad_h - from_p * f.step_h, to_p - from_p
        taps = base + f.taps_h_at + (line_d * f.windows_h + from_p - first_p) * f.line_bytes
        if f.is_deep:
            shares = base + f.to_plane_at + (from_p - first_p) * f.line_bytes
            gather(to, n, taps, f.line_bytes, shares, f.line_bytes, tap, count, -f.step_h)
        else:
            shares = dy + from_p * n * itemsize
            gather_given(to, n, taps, f.line_bytes, shares, n * itemsize, tap, count, -f.step_h)
        taps, apart = base + f.taps_w_at + (line_d * f.rows_h + row) * f.line_bytes, f.channels * size
        pixel_bytes = f.channels * itemsize
        is_aligned = past_caches and (dx | pixel_bytes) % (vl * itemsize) == 0
        for w in range(f.in_w):
            first, last = i64(f.covering + 16 * w)[0], i64(f.covering + 16 * w)[1]
            there, q, tap = dx + w * pixel_bytes, first * apart, w + f.pad_w - first * f.step_w
            if is_aligned:
                stream(there, f.channels, taps + q, apart, to + q, apart, tap, last - first, -f.step_w)
            else:
                ask_for(there + AHEAD_BYTES, pixel_bytes)
                give(there, f.channels, taps + q, apart, to + q, apart, tap, last - first, -f.step_w)

    return give_plane, give_row


@cache
def _task(dtype: str, vl: int, past_caches: bool):
    """A block of rows of dx: index = (image * blocks_d + block of depths) * blocks_h + block of rows."""
    i64, at, itemsize = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype]
    find_block, (give_plane, give_row) = _find_block(dtype, vl), _give_block(dtype, vl, past_caches)

    def max_of_channels(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        base = f.scratch + worker * f.scratch_bytes
        low_h, rest = index % f.blocks_h * f.block_h, index // f.blocks_h
        low_d, image = rest % f.blocks_d * f.block_d, rest // f.blocks_d
        row_bytes, out_bytes = f.in_w * f.channels * itemsize, f.out_w * f.channels * itemsize
        x, dx = pointers[0] + image * f.in_d * f.in_h * row_bytes, pointers[3] + image * f.in_d * f.in_h * row_bytes
        dy = pointers[2] + image * f.out_d * f.out_h * out_bytes
        end_d, end_h = min(low_d + f.block_d, f.in_d), min(low_h + f.block_h, f.in_h)
        first_d, last_d = covering(low_d, end_d, f.step_d, f.pad_d, f.taps_d, f.out_d)
        first_p, last_p = covering(low_h, end_h, f.step_h, f.pad_h, f.taps_h, f.out_h)
        if first_d < last_d and first_p < last_p:
            find_block(f, x, dy, base, first_d, last_d, first_p, last_p)
        from_d, _ = reached(first_d, last_d, f.step_d, f.pad_d, f.taps_d, f.in_d)
        from_h, _ = reached(first_p, last_p, f.step_h, f.pad_h, f.taps_h, f.in_h)
        for depth in range(low_d, end_d):
            if f.is_deep:
                give_plane(f, dy, base, depth, first_d, first_p, last_p)
            for h in range(low_h, end_h):
                there = dx + (depth * f.in_h + h) * row_bytes
                give_row(f, dy + depth * f.out_h * out_bytes, there, base, depth - from_d, h, h - from_h, first_p)

    return compile_task(max_of_channels, (dtype, vl, past_caches))


@dataclass(frozen=True)
class _Block:
    """A block of so many depths and rows of dx, and what a worker keeps of it, in bytes."""

    axes: Axes
    extent: tuple[int, int]
    line_bytes: int

    @property
    def windows(self) -> tuple[int, int]:
        """That cover it, at most, by depth and row."""
        axes = zip(self.extent, self.axes.taps, self.axes.step, self.axes.out, strict=False)
        d, h = (min(out, (extent + taps - 2) // step + 1) for extent, taps, step, out in axes)
        return d, h

    @property
    def rows(self) -> tuple[int, int]:
        """Of x that these reach, and those of the block."""
        axes = zip(self.windows, self.extent, self.axes.taps, self.axes.step, self.axes.extent, strict=False)
        d, h = (min(most, max(extent, (n - 1) * step + taps)) for n, extent, taps, step, most in axes)
        return d, h

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each of `_KEPT`."""
        (rows_d, rows_h), (windows_d, windows_h) = self.rows, self.windows
        along, across = rows_d * rows_h, rows_d * windows_h
        deep = self.axes.is_deep
        lines = along, across if deep else 1, deep, along, across, windows_d * windows_h * deep, windows_h * deep, 1
        return tuple(n * self.line_bytes for n in lines)


def _covering(extent: int, out: int, taps: int, step: int, pad: int) -> np.ndarray:
    """Of each position on an axis the windows that cover it, [first, last)."""
    behind = np.arange(extent, dtype=np.int64) + pad
    return np.stack([np.maximum(0, (behind - taps) // step + 1), np.minimum(out, behind // step + 1)], 1)


def max_of_channels(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of channels-last data."""
    size, wanted = ITEMSIZE[problem.compute], device.threads * _TASKS_PER_THREAD
    line_bytes = whole_lines(axes.out[2] * problem.c * size)

    depths, rows = axes.extent[:2]
    while (block := _Block(axes, (depths, rows), line_bytes)).extent != (1, 1):
        blocks = problem.n * ceil(axes.extent[0] / depths) * ceil(axes.extent[1] / rows)
        few = depths * rows > _LEAST_ROWS and blocks < wanted
        if not few and sum(block.parts) <= BLOCK_BYTES:
            break
        depths, rows = (ceil(depths / 2), rows) if depths > 1 else (1, ceil(rows / 2))

    blocks_d, blocks_h = ceil(axes.extent[0] / depths), ceil(axes.extent[1] / rows)
    *starts, scratch_bytes = accumulate(block.parts, initial=0)
    scratch = Scratch(device, scratch_bytes)
    strides = block.windows[1] * line_bytes, line_bytes, problem.c * ITEMSIZE[problem.dtype]
    offsets = [np.arange(taps, dtype=np.int64) * stride for taps, stride in zip(axes.taps, strides, strict=True)]
    columns = _covering(*(side[2] for side in (axes.extent, axes.out, axes.taps, axes.step, axes.pad)))
    ctx = filled(
        _FIELDS,
        **axes.fields(),
        **dict(zip(_KEPT, starts, strict=True)),
        **{f"offsets_{axis}": table.ctypes.data for axis, table in zip("dhw", offsets, strict=True)},
        channels=problem.c,
        covering=columns.ctypes.data,
        is_deep=axes.is_deep,
        blocks_d=blocks_d,
        blocks_h=blocks_h,
        block_d=depths,
        block_h=rows,
        rows_d=block.rows[0],
        rows_h=block.rows[1],
        windows_d=block.windows[0],
        windows_h=block.windows[1],
        line_bytes=line_bytes,
        scratch=scratch.start,
        scratch_bytes=scratch.size_bytes,
    )
    task = _task(problem.dtype, device.lanes(problem.compute), streams(problem, device))
    return Program([Phase(task, problem.n * blocks_d * blocks_h, ctx)], [scratch.memory, columns, *offsets])
