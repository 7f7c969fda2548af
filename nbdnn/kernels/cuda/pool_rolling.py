"""The gradient of maxima of overlapping windows, an axis at a time in one launch: a block rolls from plane to plane.

    tap[p] = the first r at which x[p*u + r - pad] is the maximum of window p; where there are NaNs the last of them
    dx[i] = sum of dy[p] over the windows p that cover i and whose tap[p] is i + pad - p*u

    thread    a column (w, and a channel) of rows of a tile, with what windows across its edges reach
    plane     1. x as keys (`ptx_pool_rolling`), which neighbouring columns read in shared memory: maxima along w
              2. of these, in registers, maxima across the rows, and across the last planes: dy goes to a plane
              3. of a plane that no later window reaches: dy goes to a row, and through shared memory to a column

A window of 3x3x3 is met by 3 comparisons an axis, not by 27, and as many additions; which tap each axis has chosen
waits in fields of a few bits until its plane is given back. Planar, neighbouring threads have neighbouring columns;
channels-last, neighbouring channels. An image of two axes is a plane; or a block rolls down its rows, and the rows of a
thread are as many images, which share nothing.

Traffic: x and dy once from memory, and again from cache where tiles and segments of planes overlap, dx once; y is not
read. Sums in float32, an axis after the other, in a fixed order, rounded once. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_axes import Axis
from nbdnn.kernels.cuda.pool_rolling_plan import (
    COLUMNS_APART,
    MOST_REGISTERS,
    MOST_THREADS,
    NO_TAP,
    PADDING,
    WARP,
    Box,
    Fields,
    Reciprocals,
    Tile,
    Variant,
    fields,
    tiles,
    variant,
)
from nbdnn.problem_pool import PoolProblem

_INT32_END = 2**31 - 2**20
# Windows that an element is in: with fewer, tiles of `window` are mostly faster. On an H200 in f32, 5x5 with stride 2,
# 6.25 windows, took 30 us by them and 49 here; 3x3x3 with strides of 1, 2 and 2, 6.75, took 75 and 48; 3x3 with stride
# 1, 9 windows, 38 and 30.
_LEAST_WINDOWS = 6.5
_CONFIGS = 8
_LAUNCH_US = 1.4
_FIXED, _MOST_WARPS_PER_CLOCK, _WAITING_WARPS = 60, 2.85, 3.5  # instructions of a plane, and how they are issued
_ALONE = 1.35  # times the instructions: of a block of one plane, which asks for none ahead


class Column(NamedTuple):
    """Where a thread is: its tile of the block and its column and channel there; the image, or -1 for none, and the
    channel; the tile of dx; the columns of this, [first_w, end_w), and its own; the window that is its own, if it
    has_window. windows: of the tile, the first in the column of_window."""

    unit: int
    column: int
    lane: int
    image: int
    channel: int
    tile_d: int
    tile_h: int
    first_w: int
    end_w: int
    start_w: int
    w: int
    first_q: int
    q: int
    windows: int
    of_window: int
    has_window: bool


@cache
def _covering(axis: Axis):
    """Device function (first, end, out): first and end of the windows that cover positions of an axis."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def covering(first, end, out):
        low = integer(first + axis.pad - axis.taps + axis.stride)
        low, _ = ptx.divided(low if low > 0 else integer(0), integer(axis.stride))
        high, _ = ptx.divided(integer(end - 1 + axis.pad), integer(axis.stride))
        high = integer(high + 1)
        high = high if high < out else out
        return low, high if high > low else low

    return covering


@cache
def _column(v: Variant):
    """Device function (f, r) -> Column."""
    from nbdnn.kernels.cuda import ptx

    integer, split, column_of, is_aligned = ptx.INTEGER[32], ptx.split, Column, v.is_aligned
    channels, columns, units, (_, stride, pad), covering = (
        v.channels,
        v.columns,
        v.units,
        v.axes[2],
        _covering(v.axes[2]),
    )

    @ptx.inline
    def place(f, r):
        rest, lane = ptx.divided(integer(ptx.thread_x()), integer(channels))
        unit, column = ptx.divided(rest, integer(columns))
        rest, slab = split(integer(ptx.block_x() * units + unit), f.slabs, r.slabs, r.slabs_shift)
        rest, tile_w = split(rest, f.tiles_w, r.tiles_w, r.tiles_w_shift)
        rest, tile_h = split(rest, f.tiles_h, r.tiles_h, r.tiles_h_shift)
        image, tile_d = split(rest, f.tiles_d, r.tiles_d, r.tiles_d_shift)
        channel = integer(slab * channels + lane)
        image = image if unit < units and image < f.images and channel < f.channels else integer(-1)
        first_w = integer(tile_w * f.columns)
        end_w = integer(first_w + f.columns)
        end_w = end_w if end_w < f.in_w else f.in_w
        first_q, end_q = covering(first_w, end_w, f.out_w)
        start_w = integer(first_q * stride - pad)
        start_w = start_w if start_w > 0 else integer(0)
        start_w = start_w if start_w < first_w else first_w
        windows, of_window = integer(end_q - first_q), integer(first_q - start_w) if is_aligned else integer(0)
        number = integer(column - of_window)
        has_window = image >= 0 and ptx.inside(number, windows) == 1
        return column_of(
            unit, column, lane, image, channel, tile_d, tile_h, first_w, end_w, start_w,
            integer(start_w + column), first_q, integer(first_q + number), windows, of_window, has_window,
        )  # fmt: skip

    return place


@cache
def _cells(v: Variant):
    """Device function (shared address, Column) -> addresses of the thread's cell, of its window's first tap, and of
    where the sums of the first window are. Threads beyond the tiles have cells of their own, and look anywhere."""
    from nbdnn.kernels.cuda import ptx

    integer, word, units, channels, step_bytes = ptx.INTEGER[32], ptx.WORD, v.units, v.channels, v.shared.step_bytes
    line_columns, margin, (_, stride, pad) = v.line_columns, v.margin, v.axes[2]
    beyond = units * line_columns * channels

    @ptx.inline
    def cells(memory, at):
        is_here = at.unit < units
        in_line = integer(((at.unit if is_here else 0) * line_columns + margin) * channels + at.lane)
        cell = integer(in_line + at.column * channels) if is_here else integer(beyond + integer(ptx.thread_x()) % WARP)
        first_tap = integer((at.q * stride - pad - at.start_w) * step_bytes) if at.has_window else integer(0)
        line = word(memory + word(4 * in_line))
        return word(memory + word(4 * cell)), word(line + word(first_tap)), word(line + word(at.of_window * step_bytes))

    return cells


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool_rolling, ptx_pool_taps, ptx_tile, ptx_vector

    v = Variant(*specialised_on)
    dtype, line, shared, integer, word, box = v.dtype, v.line, v.shared, ptx.INTEGER[32], ptx.WORD, Box
    depth, across, along = v.axes
    (taps_d, stride_d, pad_d), (_, stride_h, _), (_, stride_w, pad_w) = depth, across, along
    before, of_plane, words_h = taps_d - stride_d, stride_d * line.positions, line.words_of(across.taps)
    sums_at = of_plane * shared.row_bytes
    words_at = sums_at + stride_d * line.outputs * shared.row_bytes
    shared_bytes, threads, columns, apart = v.shared_bytes, v.threads, v.columns, of_plane * COLUMNS_APART
    place, cells, covering_d = _column(v), _cells(v), _covering(depth)
    earliest, behind = -((taps_d - 1 - pad_d) // stride_d), ceil(before / stride_d)

    load_x, load_dy = (ptx_pool_rolling.load(dtype, *each) for each in ((stride_d, line.positions), (1, line.windows)))
    store_dx, clear = ptx_pool_rolling.store(dtype, stride_d, line.outputs), ptx_tile.STORE_SHARED[1]
    x_inside, dy_inside, dx_inside = (
        ptx_pool_rolling.rows_inside(rows) for rows in (line.positions, line.windows, line.outputs)
    )
    keys_of = ptx_pool_rolling.keys(dtype, stride_d, line.positions, COLUMNS_APART)
    put_keys, put_words = (ptx_pool_rolling.put(n, shared.row_bytes) for n in (of_plane, stride_d * shared.words))
    put_sums = ptx_pool_rolling.put(stride_d * line.outputs, shared.row_bytes, True)
    find_along, give_along = (
        each(along, stride_d, line, shared) for each in (ptx_pool_taps.find_along, ptx_pool_taps.give_along)
    )
    find_across, give_across = (
        each(across, stride_d, line) for each in (ptx_pool_taps.find_across, ptx_pool_taps.give_across)
    )
    give_depths = ptx_pool_taps.give_depths(dtype, depth, line.windows)
    queue_w, queue_h = (ptx_pool_taps.queue(depth, words) for words in (shared.words, words_h))
    held, repeated = max(1, before * line.windows), ptx_pool_rolling.repeated
    no_keys, no_sums = repeated(held, PADDING), ptx_vector.zeros(held)
    no_words_w, no_words_h = (repeated(max(1, before * words), 0) for words in (shared.words, words_h))

    def roll(x, dy, dx, f, r):
        # 1. Padding everywhere, and no taps.
        memory = word(ptx_tile.dynamic_shared())
        at = integer(integer(ptx.thread_x()) * 4)
        while at < shared_bytes:
            clear(word(memory + word(at)), word(PADDING if at < sums_at else NO_TAP))
            at = integer(at + threads * 4)
        # 2. Rows of a column, and of the windows there.
        c = place(f, r)
        here, look, line_sums = cells(memory, c)
        first_h = integer(c.tile_h * line.outputs)
        row, window_h = integer(first_h + line.first_position), integer(first_h // stride_h + line.first_window)
        x_rows = x_inside(row, f.in_h if c.image >= 0 and c.w < f.in_w else integer(0))
        dx_rows = dx_inside(first_h, f.in_h if c.image >= 0 and c.first_w <= c.w and c.w < c.end_w else integer(0))
        dy_rows = dy_inside(window_h, f.out_h if c.has_window else integer(0))
        of_image = integer(c.image * f.x_image + c.channel + c.w * f.x_w)
        x_at, dx_at = integer(of_image + row * f.x_h), integer(of_image + first_h * f.x_h)
        dy_at = integer(c.image * f.y_image + c.channel + c.q * f.y_w + window_h * f.y_h)
        last_q, tap_w = ptx.divided(integer(c.w + pad_w), integer(stride_w))
        last_q, nowhere = integer(last_q - c.first_q), integer(columns - c.of_window)
        # 3. The planes of a segment of dx, from the first that its first window's maximum needs.
        first_d = integer(c.tile_d * f.planes)
        end_d = integer(first_d + f.planes)
        end_d = end_d if end_d < f.in_d else f.in_d
        first_o, end_o = covering_d(first_d, end_d, f.out_d)
        o, windows_d = integer(first_o - behind), integer(end_o - first_o)
        o = o if o > earliest else integer(earliest)
        come = integer(o * stride_d - pad_d + before)  # the first plane that comes with a window
        of_x = box(x, integer(x_at + come * f.x_d), come, f.in_d, f.x_d, f.x_h, x_rows)
        of_dy = box(dy, integer(dy_at + o * f.y_d), integer(o - first_o), windows_d, f.y_d, f.y_h, dy_rows)
        elements, gradients = load_x(of_x), load_dy(of_dy)
        keys_held, sums_held, held_w, held_h = no_keys(), no_sums(), no_words_w(), no_words_h()
        rank, end = c.column, integer(o + f.steps)
        ptx.cuda.syncthreads()
        while o < end:
            keys = keys_of(of_x, elements, rank)
            put_keys(here, keys)
            ptx.cuda.syncthreads()
            keys_w, new_w = find_along(look, c.has_window, keys)
            keys_h, new_h = find_across(keys_w)
            # What comes with the next window is asked for when there are registers for it.
            next_o, come = integer(o + 1), integer(come + stride_d)
            of_x = box(x, integer(x_at + come * f.x_d), come, f.in_d, f.x_d, f.x_h, x_rows)
            elements = load_x(of_x)
            sums, keys_held, sums_held = give_depths(keys_held, sums_held, keys_h, gradients)
            at_o, number = integer(dy_at + next_o * f.y_d), integer(next_o - first_o)
            gradients = load_dy(box(dy, at_o, number, windows_d, f.y_d, f.y_h, dy_rows))
            taps_h, held_h = queue_h(held_h, new_h)
            taps_w, held_w = queue_w(held_w, new_w)
            of_rows = give_across(sums, taps_h)
            put_sums(word(here + word(sums_at)), of_rows)
            put_words(word(here + word(words_at)), taps_w)
            ptx.cuda.syncthreads()
            given = give_along(word(line_sums + word(sums_at)), last_q, tap_w, c.windows, nowhere, of_rows, taps_w)
            plane = integer(o * stride_d - pad_d)
            number, planes = integer(plane - first_d), integer(end_d - first_d)
            store_dx(box(dx, integer(dx_at + plane * f.x_d), number, planes, f.x_d, f.x_h, dx_rows), given)
            o, rank = next_o, integer(rank + apart)

    data = ptx.pointer(dtype)
    return roll, (data, data, data, ptx.record(Fields, 32), ptx.record(Reciprocals, 32))


def _rate(threads: int) -> float:
    """Instructions of so many threads that a multiprocessor issues in a clock, as seen on an H200."""
    warps = threads / WARP
    return WARP * _MOST_WARPS_PER_CLOCK * warps / (warps + _WAITING_WARPS)


class Rolling(LaunchedCandidate[Tile]):
    """Maxima of windows that overlap, an axis at a time, in one launch."""

    op, algorithm = "pool_bwd", "rolling"

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        if not problem.is_max or problem.dtype == "f64":
            return Support(False, f"{problem.mode} of {problem.dtype}, this kernel takes maxima up to float32")
        if any(r < u for r, u in zip(problem.window, problem.stride, strict=True)):
            return Support(False, f"windows {problem.window}, {problem.stride} apart, have elements between them")
        windows = prod(problem.window) / prod(problem.stride)
        if windows < _LEAST_WINDOWS:
            return Support(
                False, f"an element is in {windows:.4g} windows, this kernel takes {_LEAST_WINDOWS} and more"
            )
        largest = max(problem.operands, key=lambda operand: operand.size_elems)
        if largest.size_elems >= _INT32_END:
            return Support(False, f"{largest.name} has {largest.size_elems} elements, more than {_INT32_END}")
        if not tiles(problem):
            return Support(
                False,
                f"no tile of windows {problem.window}, {problem.stride} apart, fits {MOST_THREADS} threads of "
                f"{MOST_REGISTERS} registers",
            )
        return YES

    def configs(self, problem: PoolProblem, device: Gpu) -> tuple[Tile, ...]:
        return tuple(sorted(tiles(problem), key=lambda tile: self.estimate(problem, tile, device))[:_CONFIGS])

    def estimate(self, problem: PoolProblem, config: Tile, device: Gpu) -> float:
        """Of the multiprocessor with the most blocks: few warps wait more often."""
        v, f = variant(problem, config), fields(problem, config)
        depth, across, along = v.axes
        of_step = depth.stride * v.line.positions * (9 + 2 * along.taps) + _FIXED
        of_step += v.line.windows * (depth.stride * 3 * across.taps + 3 * depth.taps + 2)
        of_step += depth.stride * v.line.outputs * (2 + 2 * across.taps + 5 * along.taps)
        of_block = v.threads * f.steps * of_step * (_ALONE if f.steps == 1 else 1.0)
        blocks = ceil(f.images * f.slabs * f.tiles_d * f.tiles_h * f.tiles_w / (v.units * device.sms))
        whole, rest = divmod(blocks, v.resident)
        clocks = sum(n * of_block / _rate(n * v.threads) for n in [v.resident] * whole + [rest] * (rest > 0))
        issue_s, move_s = clocks / device.clock_hz, 1.15 * problem.min_bytes / copy_bytes_per_s(device)
        return _LAUNCH_US + (max(issue_s, move_s) + 0.15 * min(issue_s, move_s)) * 1e6

    def launches(self, problem: PoolProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, f = variant(problem, config), fields(problem, config)
        units = f.images * f.slabs * f.tiles_d * f.tiles_h * f.tiles_w
        return [
            Launch(
                source=Source(_kernel, v, v.threads, v.resident),
                grid=(ceil(units / v.units), 1, 1),
                pointers=(0, 2, 3),
                scalars="",
                integers=(*f, *reciprocals(Reciprocals, f._asdict())),
                dynamic_shared_bytes=v.shared_bytes,
            )
        ]


BWD = Rolling()
