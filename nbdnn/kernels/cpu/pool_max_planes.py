"""The gradient of a maximum where neighbours are of one plane, in blocks of rows.

    tap[p] = the first r at which x[p*u + r - pad] is the maximum of window p; where there are NaNs the last of them
    dx[i] = sum of dy[p] over the windows p that cover i and whose tap[p] is i + pad - p*u

The padded block is taken apart into u_d * u_h * u_w phases, the elements with the same remainders by the stride. With r
= a*u + f, window p's tap r is element p + a of phase f: a constant distance for all windows of the block, so that one
run of vectors goes over all of them, from line to line. So does one over each phase of dx, whose element i gets dy of
window i - a where its tap is a*u + f. Lines have room for what lies beyond: there x is -inf, and dy 0.

    phase (f_d, f_h, f_w) of x: lines_d x lines_h lines of `pitch` elements; taps and dy of windows: such a phase each

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
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes, whole_lines
from nbdnn.kernels.cpu.pool_phases import phases_of_row, row_of_phases
from nbdnn.kernels.cpu.pool_rows import fill, real_of
from nbdnn.kernels.cpu.pool_taps import AHEAD_BYTES, BLOCK_BYTES, ENTRY_BYTES, ask_for, find_few, gather_few
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

# columns: where each tap of a row lies, in bytes; firsts: each window's first tap of a row that is inside. A worker's
# scratch: entries, phases of x, taps and dy of windows, phases of dx, and a line of it.
_FIELDS = record(
    *("columns", "firsts", "blocks_d", "blocks_h", "block_d", "block_h", "lines_d", "lines_h", "pitch", "phase_bytes"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w", "scratch", "scratch_bytes", "x_at", "taps_at", "shares_at", "sums_at", "line_at"),
)


@njit(**DEVICE)
def _windows(low, end, step, pad, taps, out):
    """Windows on an axis, [first, last): all that cover positions [low, end), and none of them begins behind low."""
    first = max(0, min((low + pad - taps) // step + 1, (low + pad) // step))
    return first, max(first, min(out, (end - 1 + pad) // step + 1))


@cache
def _take_block(dtype: str, vl: int):
    """Compiled-in function (f, x, base, d, p, n_d, n_p): lines of x that n_d x n_p windows from (d, p) on reach."""
    compute = DEFAULT_COMPUTE[dtype]
    take_apart, clear, (_, lowest) = phases_of_row(dtype, vl), fill(dtype), real_of(dtype)
    itemsize, size = ITEMSIZE[dtype], ITEMSIZE[compute]

    @njit(**DEVICE)
    def take_block(f, x, base, d, p, n_d, n_p):
        for position_d in range((n_d - 1) * f.step_d + f.taps_d):
            depth = d * f.step_d + position_d - f.pad_d
            for position_h in range((n_p - 1) * f.step_h + f.taps_h):
                h = p * f.step_h + position_h - f.pad_h
                phase = position_d % f.step_d * f.step_h + position_h % f.step_h
                line = position_d // f.step_d * f.lines_h + position_h // f.step_h
                to = base + phase * f.step_w * f.phase_bytes + line * f.pitch * size
                if 0 <= depth < f.in_d and 0 <= h < f.in_h:
                    source = x + (depth * f.in_h + h) * f.in_w * itemsize
                    ask_for(source + AHEAD_BYTES, f.in_w * itemsize)
                    take_apart(to, source, f.phase_bytes, f.step_w, f.pad_w, f.in_w)
                else:
                    for column in range(f.step_w):
                        clear(to + column * f.phase_bytes, f.pitch, lowest)

    return take_block


@cache
def _find_block(dtype: str, vl: int):
    """Compiled-in function (f, dy, base, d, p, n_d, n_p): taps of n_d x n_p windows from (d, p) on, and their dy."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, numbers = pointer("i64"), pointer("i64" if compute == "f64" else "i32")
    find, widen_row, clear, (real, _) = (
        find_few(compute, compute, vl, True), convert_row(dtype, compute, vl), fill(dtype), real_of(dtype),
    )  # fmt: skip
    itemsize, size = ITEMSIZE[dtype], ITEMSIZE[compute]

    @njit(**DEVICE)
    def begin_block(f, dy, base, d, p, n_d, n_p):
        firsts = numbers(f.firsts)
        for line_d in range(f.lines_d):
            for line_h in range(f.lines_h):
                at = (line_d * f.lines_h + line_h) * f.pitch * size
                if line_d >= n_d or line_h >= n_p:
                    clear(base + f.shares_at + at, f.out_w, real(0.0))
                    continue
                source = dy + ((d + line_d) * f.out_h + p + line_h) * f.out_w * itemsize
                ask_for(source + AHEAD_BYTES, f.out_w * itemsize)
                widen_row(base + f.shares_at + at, source, f.out_w)
                tap_d = max(0, f.pad_d - (d + line_d) * f.step_d)
                tap_h = max(0, f.pad_h - (p + line_h) * f.step_h)
                found, first = numbers(base + f.taps_at + at), (tap_d * f.taps_h + tap_h) * f.taps_w
                for q in range(f.out_w):
                    found[q] = first + firsts[q]

    @njit(**DEVICE)
    def find_block(f, dy, base, d, p, n_d, n_p):
        begin_block(f, dy, base, d, p, n_d, n_p)
        if n_d * n_p == 0:
            return
        rows = 0
        for tap_d in range(f.taps_d):
            for tap_h in range(f.taps_h):
                phase = tap_d % f.step_d * f.step_h + tap_h % f.step_h
                line = tap_d // f.step_d * f.lines_h + tap_h // f.step_h
                entry = i64(base + rows * ENTRY_BYTES)
                entry[0] = base + f.x_at + phase * f.step_w * f.phase_bytes + line * f.pitch * size
                entry[2] = (tap_d * f.taps_h + tap_h) * f.taps_w
                rows += 1
        n = ((n_d - 1) * f.lines_h + n_p - 1) * f.pitch + f.out_w
        find(base + f.taps_at, n, base, rows, f.columns, 0, f.taps_w, 0, 0)

    return find_block


@cache
def _give_phase(dtype: str, vl: int):
    """Compiled-in function (f, base, phase_d, phase_h, lines): phases of dx with these remainders of rows."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, size, gather = pointer("i64"), ITEMSIZE[compute], gather_few(compute, compute, compute, vl)

    @njit(**DEVICE)
    def give_phase(f, base, phase_d, phase_h, lines):
        rows = 0
        for tap_d in range(phase_d, f.taps_d, f.step_d):
            for tap_h in range(phase_h, f.taps_h, f.step_h):
                behind = (tap_d // f.step_d * f.lines_h + tap_h // f.step_h) * f.pitch * size
                entry = i64(base + rows * ENTRY_BYTES)
                entry[0], entry[1] = base + f.taps_at - behind, base + f.shares_at - behind
                entry[2] = (tap_d * f.taps_h + tap_h) * f.taps_w
                rows += 1
        n = (lines * f.pitch + vl - 1) // vl * vl
        for phase in range(f.step_w):
            count = (f.taps_w - 1 - phase) // f.step_w + 1
            line = base + f.sums_at + ((phase_d * f.step_h + phase_h) * f.step_w + phase) * f.phase_bytes
            gather(line, n, base, rows, 0, -1, phase, count, f.step_w)

    return give_phase


@cache
def _give_one(dtype: str):
    """Compiled-in function (f, x, dx, dy): a plane of dx that one window covers, element by element."""
    data, widen, itemsize, (_, lowest) = pointer(dtype), WIDEN[dtype], ITEMSIZE[dtype], real_of(dtype)

    @njit(**DEVICE)
    def give_one(f, x, dx, dy):
        given, most, found = data(dx), lowest, -1
        for i in range(f.in_d * f.in_h * f.in_w):
            given[i] = 0
        for depth in range(min(f.in_d, f.taps_d - f.pad_d)):
            for h in range(min(f.in_h, f.taps_h - f.pad_h)):
                row = (depth * f.in_h + h) * f.in_w
                line = data(x + row * itemsize)
                for w in range(min(f.in_w, f.taps_w - f.pad_w)):
                    value = widen(line[w])
                    if value > most or value != value or found < 0:
                        most, found = value, row + w
        if found >= 0:
            given[found] = data(dy)[0]

    return give_one


@cache
def _task(dtype: str, vl: int):
    """A block of rows of dx: index = (plane * blocks_d + block of depths) * blocks_h + block of rows."""
    i64, at, itemsize, size = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype], ITEMSIZE[DEFAULT_COMPUTE[dtype]]
    take_block, find_block, give_phase = _take_block(dtype, vl), _find_block(dtype, vl), _give_phase(dtype, vl)
    put_together, give_one = row_of_phases(dtype, vl), _give_one(dtype)

    def max_of_planes(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        base = f.scratch + worker * f.scratch_bytes
        low_h, rest = index % f.blocks_h * f.block_h, index // f.blocks_h
        low_d, plane = rest % f.blocks_d * f.block_d, rest // f.blocks_d
        end_d, end_h = min(low_d + f.block_d, f.in_d), min(low_h + f.block_h, f.in_h)
        image = plane * f.in_d * f.in_h * f.in_w * itemsize
        x, dx = pointers[0] + image, pointers[3] + image
        dy = pointers[2] + plane * f.out_d * f.out_h * f.out_w * itemsize
        if f.out_d * f.out_h * f.out_w == 1 and f.blocks_d * f.blocks_h == 1:
            give_one(f, x, dx, dy)
            return
        d, last_d = _windows(low_d, end_d, f.step_d, f.pad_d, f.taps_d, f.out_d)
        p, last_p = _windows(low_h, end_h, f.step_h, f.pad_h, f.taps_h, f.out_h)
        take_block(f, x, base + f.x_at, d, p, last_d - d, last_p - p)
        find_block(f, dy, base, d, p, last_d - d, last_p - p)
        # Positions of the block's first row in the padded image, counted from where its windows begin.
        row_d, row_h = low_d + f.pad_d - d * f.step_d, low_h + f.pad_h - p * f.step_h
        lines_h = (row_h + end_h - low_h - 1) // f.step_h + 1
        lines = (row_d + end_d - low_d - 1) // f.step_d * f.lines_h + lines_h
        for phase_d in range(f.step_d):
            for phase_h in range(f.step_h):
                give_phase(f, base, phase_d, phase_h, lines)
        for depth in range(low_d, end_d):
            for h in range(low_h, end_h):
                position_d, position_h = row_d + depth - low_d, row_h + h - low_h
                phase = position_d % f.step_d * f.step_h + position_h % f.step_h
                line = position_d // f.step_d * f.lines_h + position_h // f.step_h
                sums = base + f.sums_at + phase * f.step_w * f.phase_bytes + line * f.pitch * size
                to = dx + (depth * f.in_h + h) * f.in_w * itemsize
                ask_for(to + AHEAD_BYTES, f.in_w * itemsize)
                put_together(to, sums, f.phase_bytes, f.step_w, f.pad_w, f.in_w, base + f.line_at)

    return compile_task(max_of_planes, (dtype, vl))


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
        """In front of the taps and dy of windows: what elements find there that no window covers."""
        reach_d, reach_h, reach_w = self.reach
        return whole_lines(((reach_d * self.lines[1] + reach_h) * self.pitch + reach_w) * self.size)

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of a worker's entries, phases of x, taps, dy, phases of dx and line of dx."""
        entries = whole_lines(ENTRY_BYTES * self.axes.taps[0] * self.axes.taps[1])
        windows, phases = self.guard_bytes + self.phase_bytes, prod(self.axes.step) * self.phase_bytes
        line = whole_lines((self.axes.extent[2] + self.vl) * self.size)
        return entries, phases, windows, windows, phases, line


def max_of_planes(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of planes."""
    vl, size = device.lanes(problem.compute), ITEMSIZE[problem.compute]
    depths, rows = axes.extent[:2]
    while sum((block := _Block(axes, (depths, rows), vl, size)).parts) > BLOCK_BYTES and depths * rows > 1:
        depths, rows = (ceil(depths / 2), rows) if depths > 1 else (1, ceil(rows / 2))

    *ends, scratch_bytes = accumulate(block.parts)
    x_at, taps_at, shares_at, sums_at, line_at = ends
    columns = [s % axes.step[2] * block.phase_bytes + s // axes.step[2] * size for s in range(axes.taps[2])]
    columns_at = np.array(columns, np.int64)
    firsts = np.array([max(0, axes.pad[2] - q * axes.step[2]) for q in range(axes.out[2])], f"i{size}")
    # Outside of the image x stays -inf and dy 0.
    scratch = np.full((device.threads * scratch_bytes + 64) // size, -np.inf, f"f{size}")
    start = -scratch.ctypes.data % 64
    workers = scratch[start // size :][: device.threads * scratch_bytes // size].reshape(device.threads, -1)
    workers[:, shares_at // size : sums_at // size] = 0
    ctx = filled(
        _FIELDS,
        **axes.fields(),
        columns=columns_at.ctypes.data,
        firsts=firsts.ctypes.data,
        blocks_d=block.blocks[0],
        blocks_h=block.blocks[1],
        block_d=depths,
        block_h=rows,
        lines_d=block.lines[0],
        lines_h=block.lines[1],
        pitch=block.pitch,
        phase_bytes=block.phase_bytes,
        scratch=scratch.ctypes.data + start,
        scratch_bytes=scratch_bytes,
        x_at=x_at,
        taps_at=taps_at + block.guard_bytes,
        shares_at=shares_at + block.guard_bytes,
        sums_at=sums_at,
        line_at=line_at,
    )
    phase = Phase(_task(problem.dtype, vl), problem.n * problem.c * prod(block.blocks), ctx)
    return Program([phase], [scratch, columns_at, firsts])
