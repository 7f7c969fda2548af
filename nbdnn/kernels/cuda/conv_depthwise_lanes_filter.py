"""Filter gradients of depthwise convolutions in float32, channels-last, stride 1: a channel a lane.

    dw[c, r, s] = sum over n, p, q of  x[n, p + r - pad, q + s - pad, c] * dy[n, p, q, c]

    block      32 channels and a run of tiles of all images, one after the other: the pixels of dy, and those of x with
               the halo, come into shared memory as they lie in memory, zeros beside the image
    warp       two rows of up to 16 columns of dy in registers, a lane a channel, and the sums of all taps: each row of
               x is loaded once, and left out where it is above or below the image
    grid       tiles are split among blocks; a block adds its warps' sums in shared memory, a second kernel the blocks'

Everything is added in a fixed order. Traffic: x and dy once from memory, the halo of a tile again from cache.
Accumulates in float32, one rounding a product and sum. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import lanes_plan as plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.depthwise_plan import worth_measuring
from nbdnn.kernels.cuda.lanes_plan import LANES, Held, Tile
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.problem_conv import ConvProblem

_MOST_TAPS = 49  # whose sums stay in registers
# Registers of a thread beside what it keeps; who keeps less than that few gets no more, for the sake of threads.
_OTHERS, _FEW = 24, 80
_BLOCKS = 4  # of a multiprocessor, two of them at once
_SUM_US = 2.0  # of the second kernel


class _Variant(NamedTuple):
    """What the first kernel is compiled for. reversed_: dw has its last tap first."""

    tile: Tile
    taps_h: int
    taps_w: int
    reversed_: bool

    @property
    def taps(self) -> int:
        return self.taps_h * self.taps_w

    @property
    def x_held(self) -> Held:
        return Held(self.tile.block_rows + self.taps_h - 1, self.tile.block_columns + self.taps_w - 1)

    @property
    def y_held(self) -> Held:
        return Held(self.tile.block_rows, self.tile.block_columns)

    @property
    def shared_bytes(self) -> int:
        """Pixels, or at the end the sums of a block's warps."""
        pixels_bytes = self.x_held.shared_bytes + self.y_held.shared_bytes
        return max(pixels_bytes, self.tile.threads // 32 * self.taps * plan.TAP_BYTES)

    @property
    def min_blocks(self) -> int:
        rows, columns = self.tile[:2]
        kept = self.taps + rows * columns + columns + self.taps_w - 1
        registers = kept + _OTHERS if kept >= _FEW else min(kept + _OTHERS, _FEW)
        return plan.min_blocks(self.tile.threads, registers, self.shared_bytes)

    @property
    def instructions(self) -> int:
        """Of a thread and tile, about."""
        rows, columns = self.tile[:2]
        loads = (rows + self.taps_h - 1) * (columns + self.taps_w - 1) + 2 * rows * columns
        copies = self.shared_bytes // (plan.CHUNK_BYTES * self.tile.threads) * 20
        return rows * columns * self.taps + loads + copies + 100


class Runs(NamedTuple):
    """The integers of the first kernel: `tiles` tiles, tiles_h x tiles_w of an image, in runs of `chunk`."""

    slabs: int
    splits: int
    tiles: int
    tiles_h: int
    tiles_w: int
    chunk: int
    part_elems: int
    channels: int
    pad_h: int
    pad_w: int
    x_rows: int
    x_columns: int
    y_rows: int
    y_columns: int


def _block_sums(v: _Variant):
    """Device function (sums, shared, parts, first, channels): a block's sums by tap of channels there are, to
    parts[first] and on."""
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_vector

    integer, word, real, taps, reversed_ = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"], v.taps, v.reversed_
    threads, warp_bytes, load = v.tile.threads, v.taps * plan.TAP_BYTES, ptx_tile.LOAD_SHARED[1]

    @ptx.inline
    def add(sums, shared, parts, first, channels):
        warp, lane = integer(ptx.thread_x() >> 5), integer(ptx.thread_x() & 31)
        own = word(shared + word(warp * warp_bytes + 4 * lane))
        ptx_vector.store_shared_floats(own, word(plan.TAP_BYTES), sums)
        ptx.cuda.syncthreads()
        i = integer(ptx.thread_x())
        while i < channels * taps:
            channel, tap = ptx.divided(i, integer(taps))
            total, at = real(0.0), word(shared + word(plan.TAP_BYTES * tap + 4 * channel))
            for j in range(threads // 32):
                total = total + ptx_tile.float_of(load(word(at + word(warp_bytes * j))))
            parts[integer(first + (i + taps - 1 - 2 * tap if reversed_ else i))] = total
            i = integer(i + threads)

    return add


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import depthwise_planes, lanes_copy, ptx, ptx_lanes, ptx_tile, ptx_vector

    v = _Variant(*specialised_on)
    integer, word, tile, x_held, y_held = ptx.INTEGER[32], ptx.WORD, v.tile, v.x_held, v.y_held
    rows, columns, threads_w, taps, y_at = tile.rows, tile.columns, tile.threads_w, v.taps, x_held.shared_bytes
    block_rows, block_columns, pixel_bytes = tile.block_rows, tile.block_columns, plan.PIXEL_BYTES
    x_row_bytes, y_row_bytes = x_held.row_bytes, y_held.row_bytes
    copy_x, copy_y = (lanes_copy.copy_pixels(held, tile.threads) for held in (x_held, y_held))
    x_inside, y_inside = (depthwise_planes.rows_inside(held.rows) for held in (x_held, y_held))
    steps = (ptx_lanes.Steps(held.row_bytes, pixel_bytes, plan.TAP_BYTES) for held in (x_held, y_held))
    gradients = ptx_lanes.gradients(rows, columns, v.taps_h, v.taps_w, *steps)
    zeros, arrived, add = ptx_vector.zeros(taps), ptx_tile.copy_async_wait(0), _block_sums(v)
    part = lanes_copy.Part

    def partial_sums(x, dy, parts, f):
        # 1. Which tiles of which channels, and a warp's place in them.
        split, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        first, shared = integer(slab * LANES), ptx_tile.dynamic_shared()
        shared_y, lane_bytes = word(shared + word(y_at)), integer(4 * (ptx.thread_x() & 31))
        down, along = ptx.divided(integer(ptx.thread_x() >> 5), integer(threads_w))
        down, along = integer(down * rows), integer(along * columns)
        of_x = word(shared + word(lane_bytes + down * x_row_bytes + along * pixel_bytes))
        of_dy = word(shared_y + word(lane_bytes + down * y_row_bytes + along * pixel_bytes))

        # 2. Its tiles.
        sums = zeros()
        i, stop = integer(split * f.chunk), integer(min(f.tiles, integer((split + 1) * f.chunk)))
        rest, column = ptx.divided(i, f.tiles_w)
        n, row = ptx.divided(rest, f.tiles_h)
        row, column = integer(row * block_rows), integer(column * block_columns)
        while i < stop:
            x_row, x_column = integer(row - f.pad_h), integer(column - f.pad_w)
            low, high = x_inside(x_row, f.x_rows)
            nothing, count = y_inside(row, f.y_rows)
            x_at = integer(n * f.x_rows * f.x_columns * f.channels)
            y_from = integer(n * f.y_rows * f.y_columns * f.channels)
            copy_x(part(x, x_at, first, f.channels, x_row, low, high, x_column, f.x_columns), shared)
            copy_y(part(dy, y_from, first, f.channels, row, nothing, count, column, f.y_columns), shared_y)
            ptx_tile.copy_async_commit()
            arrived()
            ptx.cuda.syncthreads()
            if down < count and column + along < f.y_columns:
                sums = gradients(sums, of_x, of_dy, integer(count - down), integer(low - down), integer(high - down))
            ptx.cuda.syncthreads()
            i, column = integer(i + 1), integer(column + block_columns)
            if column >= f.y_columns:
                row, column = integer(row + block_rows), integer(0)
            if row >= f.y_rows:
                n, row = integer(n + 1), integer(0)

        # 3. A block's sums.
        channels = integer(min(integer(f.channels - first), integer(LANES)))
        add(sums, shared, parts, integer(split * f.part_elems + first * taps), channels)

    data = ptx.pointer("f32")
    return partial_sums, (data, data, data, ptx.record(Runs, 32))


def _variant(problem: ConvProblem, tile: Tile) -> _Variant:
    taps_h, taps_w = problem.filter
    return _Variant(tile, taps_h, taps_w, problem.mode == "conv")


def _runs(problem: ConvProblem, tile: Tile, device: Gpu) -> Runs:
    rows, columns = problem.out_spatial
    tiles_h, tiles_w = ceil(rows / tile.block_rows), ceil(columns / tile.block_columns)
    tiles, slabs = problem.n * tiles_h * tiles_w, ceil(problem.c / LANES)
    chunk = max(1, tiles * slabs // (_BLOCKS * device.sms))
    return Runs(
        slabs=slabs,
        splits=ceil(tiles / chunk),
        tiles=tiles,
        tiles_h=tiles_h,
        tiles_w=tiles_w,
        chunk=chunk,
        part_elems=part_elems(problem),
        channels=problem.c,
        pad_h=problem.pad[0][0],
        pad_w=problem.pad[1][0],
        x_rows=problem.spatial[0],
        x_columns=problem.spatial[1],
        y_rows=rows,
        y_columns=columns,
    )


class DepthwiseLanesFilter(LaunchedCandidate[Tile]):
    """The gradient of one filter a channel, a channel a lane."""

    op, algorithm = "conv_bwd_filter", "depthwise_lanes"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        refused = plan.refusal(problem)
        taps = problem.filter[0] * problem.filter[1] if not refused else 0
        if taps > _MOST_TAPS:
            refused = f"{taps} taps are more than the {_MOST_TAPS} whose sums fit into registers"
        return Support(False, refused) if refused else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
        every = plan.tiles(problem.out_spatial)
        fitting = [tile for tile in every if _variant(problem, tile).shared_bytes <= plan.SHARED_BYTES]
        return worth_measuring([(self.estimate(problem, tile, device), tile) for tile in dict.fromkeys(fitting)])

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        return 4 * _runs(problem, config, device).splits * part_elems(problem)

    def estimate(self, problem: ConvProblem, config: Tile, device: Gpu) -> float:
        runs = _runs(problem, config, device)
        threads = runs.tiles * runs.slabs * config.threads
        return _SUM_US + plan.kernel_us(problem, device, threads, _variant(problem, config).instructions)

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, runs = _variant(problem, config), _runs(problem, config, device)
        partial = Launch(
            source=Source(_kernel, v, config.threads, v.min_blocks),
            grid=(runs.slabs * runs.splits, 1, 1),
            pointers=(0, 1, WORKSPACE),
            scalars="",
            integers=runs,
            dynamic_shared_bytes=v.shared_bytes,
        )
        return [partial, add_parts(problem, runs.splits)]


BWD_FILTER = DepthwiseLanesFilter()
