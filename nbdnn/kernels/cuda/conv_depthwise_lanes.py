"""Depthwise convolution of larger filters in float32, channels-last, stride 1: a channel a lane, forward and bwd_data.

    y[n, p, q, c] = sum over r, s of  x[n, p + r - pad, q + s - pad, c] * w[c, r, s]

    block      a tile of outputs of 32 channels of an image: their pixels of x, with the halo, come into shared memory
               as they lie in memory, zeros beside the image; the filters tap by tap
    warp       two rows of up to 16 columns, a lane a channel: each row of x is loaded once, multiplied with the taps of
               both rows of outputs, and left out where it is above or below the image

A product costs 1.15 instructions (7x7), where a tile from memory costs two: no address, border or conversion is between
them. bwd_data is the same on dy with the filter reversed. Traffic: x and y once from memory, the halo of a tile again
from cache. Accumulates in float32, one rounding a product and sum. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import lanes_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.depthwise_plan import unit_stride_gather, worth_measuring
from nbdnn.kernels.cuda.lanes_plan import LANES, Held, Tile
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate, gather_pointers
from nbdnn.problem_conv import ConvProblem


class _Variant(NamedTuple):
    """What a kernel is compiled for. reversed_: a filter's last tap comes first."""

    tile: Tile
    taps_h: int
    taps_w: int
    reversed_: bool
    epilogue: tuple[str, ...]

    @property
    def held(self) -> Held:
        return Held(self.tile.block_rows + self.taps_h - 1, self.tile.block_columns + self.taps_w - 1)

    @property
    def shared_bytes(self) -> int:
        """Pixels, and behind them the filters."""
        return self.held.shared_bytes + self.taps_h * self.taps_w * plan.TAP_BYTES

    @property
    def min_blocks(self) -> int:
        rows, columns = self.tile[:2]
        kept = rows * columns + columns + self.taps_w - 1 + rows * self.taps_w
        return plan.min_blocks(self.tile.threads, kept + 24, self.shared_bytes)

    @property
    def instructions(self) -> int:
        """Of a thread, about."""
        rows, columns = self.tile[:2]
        loads = (rows + self.taps_h - 1) * (columns + self.taps_w - 1) + self.taps_h * self.taps_w
        copies = self.held.shared_bytes // (plan.CHUNK_BYTES * self.tile.threads) * 20
        return rows * columns * (self.taps_h * self.taps_w + 5) + loads + copies + 150


class Blocks(NamedTuple):
    """The integers of a kernel: tiles_h x tiles_w tiles of an image's outputs, `slabs` slabs of its channels."""

    slabs: int
    tiles_h: int
    tiles_w: int
    channels: int
    pad_h: int
    pad_w: int
    in_rows: int
    in_columns: int
    out_rows: int
    out_columns: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import depthwise_planes, lanes_copy, ptx, ptx_lanes, ptx_tile, ptx_vector, ptx_vector_rows

    v = _Variant(*specialised_on)
    integer, word, real, tile, held = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"], v.tile, v.held
    rows, columns, threads_w, taps = tile.rows, tile.columns, tile.threads_w, v.taps_h * v.taps_w
    block_rows, block_columns = tile.block_rows, tile.block_columns
    row_bytes, filters_at = held.row_bytes, held.shared_bytes
    copy_pixels, rows_inside = lanes_copy.copy_pixels(held, tile.threads), depthwise_planes.rows_inside(held.rows)
    copy_filters, part, target = lanes_copy.copy_filters(taps, tile.threads), lanes_copy.Part, ptx_vector_rows.Target
    steps = ptx_lanes.Steps(row_bytes, plan.PIXEL_BYTES, plan.TAP_BYTES)
    correlate = ptx_lanes.correlate(rows, columns, v.taps_h, v.taps_w, v.reversed_, steps)
    zeros, arrived, has_bias = ptx_vector.zeros(rows * columns), ptx_tile.copy_async_wait(0), "bias" in v.epilogue
    store = ptx_vector_rows.store_rows(ptx_vector_rows.End("f32", 1, tuple(range(columns)), v.epilogue), rows)

    def depthwise_lanes(image, w, out, bias, residual, alpha, beta, f):
        # 1. Which tile of which channels.
        rest, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        rest, column = ptx.divided(rest, f.tiles_w)
        n, row = ptx.divided(rest, f.tiles_h)
        first, row, column = integer(slab * LANES), integer(row * block_rows), integer(column * block_columns)

        # 2. Its pixels and filters.
        shared = ptx_tile.dynamic_shared()
        in_row, in_column = integer(row - f.pad_h), integer(column - f.pad_w)
        low, high = rows_inside(in_row, f.in_rows)
        at = integer(n * f.in_rows * f.in_columns * f.channels)
        copy_pixels(part(image, at, first, f.channels, in_row, low, high, in_column, f.in_columns), shared)
        copy_filters(w, first, f.channels, word(shared + word(filters_at)))
        ptx_tile.copy_async_commit()
        arrived()
        ptx.cuda.syncthreads()

        # 3. A lane's channel of a warp's tile.
        warp, lane = integer(ptx.thread_x() >> 5), integer(ptx.thread_x() & 31)
        down, along = ptx.divided(warp, integer(threads_w))
        down, along, channel = integer(down * rows), integer(along * columns), integer(first + lane)
        if channel < f.channels and row + down < f.out_rows and column + along < f.out_columns:
            pixels = word(shared + word(4 * lane + down * row_bytes + along * plan.PIXEL_BYTES))
            taps_at = word(shared + word(filters_at + 4 * lane))
            sums = correlate(zeros(), pixels, taps_at, integer(low - down), integer(high - down))
            shift = (ptx.load_constant(bias, channel) if has_bias else real(0.0),)
            of_rows = integer(row + down), integer(f.out_columns * f.channels), f.out_rows
            of_columns = integer(column + along), f.channels, f.out_columns
            at = integer(n * f.out_rows * f.out_columns * f.channels + channel)
            store(sums, target(out, residual, at, *of_rows, *of_columns, shift, alpha, beta))

    data = ptx.pointer("f32")
    return depthwise_lanes, (data, data, data, data, data, real, real, ptx.record(Blocks, 32))


def _variant(problem: ConvProblem, tile: Tile) -> _Variant:
    (taps_h, taps_w), (*_, reversed_) = problem.filter, unit_stride_gather(problem)
    return _Variant(tile, taps_h, taps_w, reversed_, problem.epilogue)


def _blocks(problem: ConvProblem, tile: Tile) -> Blocks:
    in_extents, out_extents, pads, _ = unit_stride_gather(problem)
    tiles_h, tiles_w = ceil(out_extents[0] / tile.block_rows), ceil(out_extents[1] / tile.block_columns)
    return Blocks(ceil(problem.c / LANES), tiles_h, tiles_w, problem.c, *pads, *in_extents, *out_extents)


class DepthwiseLanes(LaunchedCandidate[Tile]):
    """One filter a channel, a channel a lane; forward and bwd_data."""

    algorithm = "depthwise_lanes"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        refused = plan.refusal(problem)
        return Support(False, refused) if refused else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
        every = plan.tiles(unit_stride_gather(problem)[1])
        fitting = [tile for tile in every if _variant(problem, tile).shared_bytes <= plan.SHARED_BYTES]
        return worth_measuring([(self.estimate(problem, tile, device), tile) for tile in dict.fromkeys(fitting)])

    def estimate(self, problem: ConvProblem, config: Tile, device: Gpu) -> float:
        instructions = _variant(problem, config).instructions
        return plan.kernel_us(problem, device, self._grid(problem, config) * config.threads, instructions)

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v = _variant(problem, config)
        return [
            Launch(
                source=Source(_kernel, v, config.threads, v.min_blocks),
                grid=(self._grid(problem, config), 1, 1),
                pointers=gather_pointers(problem),
                scalars="f32",
                integers=_blocks(problem, config),
                dynamic_shared_bytes=v.shared_bytes,
            )
        ]

    def _grid(self, problem: ConvProblem, config: Tile) -> int:
        blocks = _blocks(problem, config)
        return problem.n * blocks.tiles_h * blocks.tiles_w * blocks.slabs


FWD, BWD_DATA = DepthwiseLanes("conv_fwd"), DepthwiseLanes("conv_bwd_data")
