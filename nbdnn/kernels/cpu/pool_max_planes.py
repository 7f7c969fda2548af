"""The gradient of a maximum where neighbours are of one plane, in blocks of rows.

    tap[p] = the first r at which x[p*u + r - pad] is the maximum of window p; where there are NaNs the last of them
    dx[i] = sum of dy[p] over the windows p that cover i and whose tap[p] is i + pad - p*u

An axis at a time, along rows first (`pool_taps.py`). The padded block is taken apart into u_d * u_h * u_w phases, the
elements with the same remainders by the stride. With r = a*u + f, window p's tap r is element p + a of phase f: a
constant distance for all windows of the block, so that one run of vectors goes over all of them, from line to line. So
does one over each phase of dx, whose element i gets dy of window i - a where its tap is a*u + f. Lines have room for
what lies beyond: there x is -inf, and dy 0.

    phase (f_d, f_h, f_w): lines_d x lines_h lines of `pitch` elements

    x          of f_w, of one (f_d, f_h) at a time    maxima and taps of windows on   w: of each (f_d, f_h)
    dx         the same                                                               h: of each f_d     d: one phase

Traffic: x, dy and dx once from memory; of x, rows that windows of two blocks share once more. y is not read.
Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil, prod

import numpy as np
from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import streams
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.pool_phases import kept_row, phases_of_row, row_of_phases
from nbdnn.kernels.cpu.pool_rows import fill, real_of
from nbdnn.kernels.cpu.pool_taps import AHEAD_BYTES, find_few, gather_few
from nbdnn.kernels.cpu.rows import ask_for
from nbdnn.kernels.cpu.scratch import Scratch, whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

BLOCK_BYTES = 1 << 20  # of what a worker keeps of a block; smaller ones search rows that windows share more often

# What a worker keeps: phases of x; maxima and taps of windows on w, h and d; dy of windows, what of it goes to planes
# and to rows; phases of dx, and a line of it. Nobody reads the maxima on d: they go where those on w were.
_KEPT = (
    *("x_at", "best_w_at", "best_h_at", "taps_w_at", "taps_h_at", "taps_d_at", "shares_at", "to_planes_at"),
    *("to_rows_at", "sums_at", "line_at"),
)
# offsets: by axis, where each tap lies, in bytes. is_deep: windows have an axis of depths.
_FIELDS = record(
    *("offsets_d", "offsets_h", "offsets_w", "is_deep", "blocks_d", "blocks_h", "block_d", "block_h"),
    *("lines_d", "lines_h", "pitch", "phase_bytes", "scratch", "scratch_bytes", *_KEPT),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


@njit(**DEVICE)
def _windows(low, end, step, pad, taps, out):
    """Windows on an axis, [first, last): all that cover positions [low, end), and none of them begins behind low."""
    first = max(0, min((low + pad - taps) // step + 1, (low + pad) // step))
    return first, max(first, min(out, (end - 1 + pad) // step + 1))


@cache
def _take_phase(dtype: str, vl: int):
    """Compiled-in function (f, x, to, d, h, n_d, n_h): n_d x n_h lines of x, from row (d, h) of the padded image on and
    the stride apart."""
    compute = DEFAULT_COMPUTE[dtype]
    take_apart, clear, (_, lowest) = phases_of_row(dtype, vl), fill(dtype), real_of(dtype)
    itemsize, size = ITEMSIZE[dtype], ITEMSIZE[compute]

    @njit(**DEVICE)
    def take_phase(f, x, to, d, h, n_d, n_h):
        for line_d in range(n_d):
            for line_h in range(n_h):
                depth, row = d + line_d * f.step_d - f.pad_d, h + line_h * f.step_h - f.pad_h
                line = to + (line_d * f.lines_h + line_h) * f.pitch * size
                if 0 <= depth < f.in_d and 0 <= row < f.in_h:
                    source = x + (depth * f.in_h + row) * f.in_w * itemsize
                    take_apart(line, source, f.phase_bytes, f.step_w, f.pad_w, f.in_w)
                else:
                    for column in range(f.step_w):
                        clear(line + column * f.phase_bytes, f.pitch, lowest)

    return take_phase


@cache
def _take_shares(dtype: str, vl: int):
    """Compiled-in function (f, dy, to, d, p, n_d, n_p): dy of n_d x n_p windows from (d, p) on, and 0 of others."""
    compute = DEFAULT_COMPUTE[dtype]
    widen_row, clear, (real, _) = kept_row(dtype, compute, vl), fill(dtype), real_of(dtype)
    itemsize, size = ITEMSIZE[dtype], ITEMSIZE[compute]

    @njit(**DEVICE)
    def take_shares(f, dy, to, d, p, n_d, n_p):
        for line_d in range(f.lines_d):
            for line_h in range(f.lines_h):
                line = to + (line_d * f.lines_h + line_h) * f.pitch * size
                if line_d < n_d and line_h < n_p:
                    source = dy + ((d + line_d) * f.out_h + p + line_h) * f.out_w * itemsize
                    ask_for(source + AHEAD_BYTES, f.out_w * itemsize)
                    widen_row(line, source, f.out_w)
                else:
                    clear(line, f.out_w, real(0.0))

    return take_shares


@cache
def _raise_taps(compute: str):
    """Compiled-in function (taps, n, first): none of them before the first that is inside of the image: where all of a
    window is -inf, so is the padding in front of it."""
    numbers = pointer("i64" if compute == "f64" else "i32")

    @njit(**DEVICE)
    def raise_taps(taps, n, first):
        found = numbers(taps)
        for i in range(n):
            found[i] = max(found[i], first)

    return raise_taps


@cache
def _find_block(dtype: str, vl: int):
    """Compiled-in function (f, x, base, d, p, n_d, n_p): taps of n_d x n_p windows from (d, p) on, by axis."""
    compute = DEFAULT_COMPUTE[dtype]
    size, take_phase, find, raise_taps = (
        ITEMSIZE[compute], _take_phase(dtype, vl), find_few(compute, compute, vl), _raise_taps(compute),
    )  # fmt: skip

    @njit(**DEVICE)
    def whole_vectors(n):
        return (n + vl - 1) // vl * vl

    @njit(**DEVICE)
    def along_rows(f, x, base, d, p, n_d, n_p, phase_d, phase_h):
        n_d, n_h = n_d + (f.taps_d - 1 - phase_d) // f.step_d, n_p + (f.taps_h - 1 - phase_h) // f.step_h
        take_phase(f, x, base + f.x_at, d * f.step_d + phase_d, p * f.step_h + phase_h, n_d, n_h)
        behind = (phase_d * f.step_h + phase_h) * f.phase_bytes
        best, taps = base + f.best_w_at + behind, base + f.taps_w_at + behind
        n = whole_vectors(((n_d - 1) * f.lines_h + n_h) * f.pitch)
        find(best, taps, n, base + f.x_at, f.offsets_w, 0, f.taps_w)
        if f.pad_w > 0:
            for line in range((n_d - 1) * f.lines_h + n_h):
                for q in range(min(f.out_w, (f.pad_w - 1) // f.step_w + 1)):
                    raise_taps(taps + (line * f.pitch + q) * size, 1, f.pad_w - q * f.step_w)

    @njit(**DEVICE)
    def across_rows(f, base, p, n_d, n_p, phase_d):
        n_d += (f.taps_d - 1 - phase_d) // f.step_d
        behind = phase_d * f.phase_bytes
        taps, lines = base + f.taps_h_at + behind, base + f.best_w_at + behind * f.step_h
        n = whole_vectors(((n_d - 1) * f.lines_h + n_p) * f.pitch)
        find(base + f.best_h_at + behind, taps, n, lines, f.offsets_h, 0, f.taps_h)
        for line_h in range(min(n_p, (f.pad_h - 1) // f.step_h + 1 - p)):
            for line_d in range(n_d):
                line = taps + (line_d * f.lines_h + line_h) * f.pitch * size
                raise_taps(line, f.out_w, f.pad_h - (p + line_h) * f.step_h)

    @njit(**DEVICE)
    def across_planes(f, base, d, n_d, n_p):
        n = whole_vectors(((n_d - 1) * f.lines_h + n_p) * f.pitch)
        taps = base + f.taps_d_at
        find(base + f.best_w_at, taps, n, base + f.best_h_at, f.offsets_d, 0, f.taps_d)
        for line_d in range(min(n_d, (f.pad_d - 1) // f.step_d + 1 - d)):
            line = taps + line_d * f.lines_h * f.pitch * size
            raise_taps(line, f.lines_h * f.pitch, f.pad_d - (d + line_d) * f.step_d)

    @njit(**DEVICE)
    def find_block(f, x, base, d, p, n_d, n_p):
        for phase_d in range(min(f.step_d, f.taps_d)):
            for phase_h in range(min(f.step_h, f.taps_h)):
                along_rows(f, x, base, d, p, n_d, n_p, phase_d, phase_h)
            across_rows(f, base, p, n_d, n_p, phase_d)
        if f.is_deep:
            across_planes(f, base, d, n_d, n_p)

    return find_block


@cache
def _give_block(dtype: str, vl: int, past_caches: bool):
    """Compiled-in function (f, x, dx, base, low_d, low_h, rows_d, rows_h, behind_d, behind_h): rows of dx from (low_d,
    low_h) on, which lie so far behind the begin of the first window."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, size, gather = ITEMSIZE[dtype], ITEMSIZE[compute], gather_few(compute, compute, compute, vl)
    put_together = row_of_phases(dtype, vl, past_caches)

    @njit(**DEVICE)
    def put_rows(f, x, dx, base, low_d, low_h, rows_d, rows_h, behind_d, behind_h, phase_d, phase_h):
        """While they are written, the next block of x is read: later, nothing would wait for it but this thread."""
        row_bytes, next_block = f.in_w * itemsize, f.block_d * f.block_h * f.in_w * itemsize
        first_d, first_h = (phase_d - behind_d) % f.step_d, (phase_h - behind_h) % f.step_h
        line_d, first_line = (behind_d + first_d) // f.step_d, (behind_h + first_h) // f.step_h
        for d in range(first_d, rows_d, f.step_d):
            sums = base + f.sums_at + (line_d * f.lines_h + first_line) * f.pitch * size
            row = ((low_d + d) * f.in_h + low_h + first_h) * row_bytes
            for _ in range(first_h, rows_h, f.step_h):
                ask_for(x + row + next_block, row_bytes)
                put_together(dx + row, sums, f.phase_bytes, f.step_w, f.pad_w, f.in_w, base + f.line_at)
                sums += f.pitch * size
                row += f.step_h * row_bytes
            line_d += 1

    @njit(**DEVICE)
    def give_block(f, x, dx, base, low_d, low_h, rows_d, rows_h, behind_d, behind_h):
        lines = (behind_d + rows_d - 1) // f.step_d * f.lines_h + (behind_h + rows_h - 1) // f.step_h + 1
        n = (lines * f.pitch + vl - 1) // vl * vl
        pitch_bytes, plane_bytes = f.pitch * size, f.lines_h * f.pitch * size
        for phase_d in range(f.step_d):
            shares = base + f.shares_at
            if f.is_deep:
                count, to = (f.taps_d - 1 - phase_d) // f.step_d + 1, base + f.to_planes_at
                gather(to, n, base + f.taps_d_at, -plane_bytes, shares, -plane_bytes, phase_d, count, f.step_d)
                shares = to
            for phase_h in range(f.step_h):
                count, to = (f.taps_h - 1 - phase_h) // f.step_h + 1, base + f.to_rows_at
                taps = base + f.taps_h_at + phase_d * f.phase_bytes
                gather(to, n, taps, -pitch_bytes, shares, -pitch_bytes, phase_h, count, f.step_h)
                taps = base + f.taps_w_at + (phase_d * f.step_h + phase_h) * f.phase_bytes
                for phase in range(f.step_w):
                    count, sums = (f.taps_w - 1 - phase) // f.step_w + 1, base + f.sums_at + phase * f.phase_bytes
                    gather(sums, n, taps, -size, to, -size, phase, count, f.step_w)
                put_rows(f, x, dx, base, low_d, low_h, rows_d, rows_h, behind_d, behind_h, phase_d, phase_h)

    return give_block


@cache
def _task(dtype: str, vl: int, past_caches: bool):
    """A block of rows of dx: index = (plane * blocks_d + block of depths) * blocks_h + block of rows."""
    i64, at, itemsize = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype]
    take_shares, find_block, give_block = (
        _take_shares(dtype, vl), _find_block(dtype, vl), _give_block(dtype, vl, past_caches),
    )  # fmt: skip

    def max_of_planes(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        base = f.scratch + worker * f.scratch_bytes
        low_h, rest = index % f.blocks_h * f.block_h, index // f.blocks_h
        low_d, plane = rest % f.blocks_d * f.block_d, rest // f.blocks_d
        end_d, end_h = min(low_d + f.block_d, f.in_d), min(low_h + f.block_h, f.in_h)
        image = plane * f.in_d * f.in_h * f.in_w * itemsize
        dy = pointers[2] + plane * f.out_d * f.out_h * f.out_w * itemsize
        d, last_d = _windows(low_d, end_d, f.step_d, f.pad_d, f.taps_d, f.out_d)
        p, last_p = _windows(low_h, end_h, f.step_h, f.pad_h, f.taps_h, f.out_h)
        take_shares(f, dy, base + f.shares_at, d, p, last_d - d, last_p - p)
        if d < last_d and p < last_p:
            find_block(f, pointers[0] + image, base, d, p, last_d - d, last_p - p)
        behind_d, behind_h = low_d + f.pad_d - d * f.step_d, low_h + f.pad_h - p * f.step_h
        rows_d, rows_h = end_d - low_d, end_h - low_h
        x, dx = pointers[0] + image, pointers[3] + image
        give_block(f, x, dx, base, low_d, low_h, rows_d, rows_h, behind_d, behind_h)

    return compile_task(max_of_planes, (dtype, vl, past_caches))


@dataclass(frozen=True)
class _Block:
    """A block of so many depths and rows of dx, and what a worker keeps of it, in elements or bytes."""

    axes: Axes
    extent: tuple[int, int]
    vl: int
    size: int

    @property
    def blocks(self) -> tuple[int, int]:
        (in_d, in_h), (depths, rows) = self.axes.extent[:2], self.extent
        return ceil(in_d / depths), ceil(in_h / rows)

    @property
    def reach(self) -> tuple[int, ...]:
        """How many elements of a phase a window has beyond its first one."""
        return tuple((taps - 1) // step for taps, step in zip(self.axes.taps, self.axes.step, strict=True))

    @property
    def lines(self) -> tuple[int, int]:
        """Of a phase, by depth and row: as many as its windows, its elements of dx and the reach of either need."""
        axes = zip(self.extent, self.axes.taps, self.axes.step, self.reach, strict=False)
        d, h = (max(extent + taps - 2, extent - 1 + step) // step + 1 + reach for extent, taps, step, reach in axes)
        return d, h

    @property
    def pitch(self) -> int:
        in_w, out_w, pad, step = self.axes.extent[2], self.axes.out[2], self.axes.pad[2], self.axes.step[2]
        return max((in_w + pad - 1) // step + 1, out_w + self.reach[2])

    @property
    def phase_bytes(self) -> int:
        """With a vector behind it that may be read and written."""
        return whole_lines((prod(self.lines) * self.pitch + self.vl) * self.size)

    @property
    def guard_bytes(self) -> int:
        """In front of the dy of windows: what elements find there that no window covers."""
        reach_d, reach_h, reach_w = self.reach
        return whole_lines(((reach_d * self.lines[1] + reach_h) * self.pitch + reach_w) * self.size)

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each of `_KEPT`."""
        (step_d, step_h, step_w), phase = self.axes.step, self.phase_bytes
        windows, line = self.guard_bytes + phase, whole_lines((self.axes.extent[2] + self.vl) * self.size)
        found = step_d * step_h * phase, step_d * phase
        dy = windows, windows * self.axes.is_deep, windows
        return (step_w * phase, *found, *found, phase * self.axes.is_deep, *dy, step_w * phase, line)

    @property
    def offsets(self) -> list[np.ndarray]:
        """By axis, where each tap lies, in bytes."""
        strides = (self.lines[1] * self.pitch * self.size, self.pitch * self.size, self.size)
        return [
            np.array([r % step * self.phase_bytes + r // step * stride for r in range(taps)], np.int64)
            for taps, step, stride in zip(self.axes.taps, self.axes.step, strides, strict=True)
        ]


def max_of_planes(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of planes."""
    vl, size = device.lanes(problem.compute), ITEMSIZE[problem.compute]
    depths, rows = axes.extent[:2]
    while sum((block := _Block(axes, (depths, rows), vl, size)).parts) > BLOCK_BYTES and depths * rows > 1:
        depths, rows = (ceil(depths / 2), rows) if depths > 1 else (1, ceil(rows / 2))

    *starts, scratch_bytes = accumulate(block.parts, initial=0)
    kept = dict(zip(_KEPT, starts, strict=True))
    offsets = block.offsets
    # Outside of the image x stays -inf and dy 0.
    scratch = Scratch(device, scratch_bytes)
    workers = scratch.of_workers(f"f{size}")
    workers[...] = -np.inf
    workers[:, kept["shares_at"] // size : kept["sums_at"] // size] = 0
    for name in ("shares_at", "to_planes_at", "to_rows_at"):
        kept[name] += block.guard_bytes
    ctx = filled(
        _FIELDS,
        **axes.fields(),
        **kept,
        **{f"offsets_{axis}": table.ctypes.data for axis, table in zip("dhw", offsets, strict=True)},
        is_deep=axes.is_deep,
        blocks_d=block.blocks[0],
        blocks_h=block.blocks[1],
        block_d=depths,
        block_h=rows,
        lines_d=block.lines[0],
        lines_h=block.lines[1],
        pitch=block.pitch,
        phase_bytes=block.phase_bytes,
        scratch=scratch.start,
        scratch_bytes=scratch.size_bytes,
    )
    phase = Phase(_task(problem.dtype, vl, streams(problem, device)), problem.n * problem.c * prod(block.blocks), ctx)
    return Program([phase], [scratch.memory, *offsets])
