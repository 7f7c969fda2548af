"""Depthwise convolution of larger filters on tensor cores, 16 bits, stride 1: forward and bwd_data.

    y[n, c, p, q] = sum over r, s of  x[n, c, p + r - pad, q + s - pad] * w[c, r, s]

A filter row r is a product of a plane's rows with a band of that row's taps: for 8 columns of outputs

    y[p, q + j] += sum over i of  x[p + r - pad, q - pad + i] * b_r[i, j],   b_r[i, j] = w[r, i - j], 0 beyond its ends

    block      a tile of outputs of some channels of an image. Their planes of x come into shared memory; channels-last
               they are turned on the way, and y on the way back
    warp       a plane at a time: the bands in registers, made from the filter; 16 rows of x by ldmatrix, to which a row
               r further on is another address; 16 x 8 outputs a product (mma.m16n8k16)

bwd_data is the same on dy with the filter reversed. Traffic: x and y once from memory, the halo of a tile again from
cache. Of a product's multiplications, taps / 16 are of taps; factors are exact, and sums float32. Where x has an
infinity or NaN, its product with the zeros of a band reaches outputs up to 15 columns away. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import planes_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.depthwise_plan import unit_stride_gather, worth_measuring
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate, gather_pointers
from nbdnn.kernels.cuda.planes_plan import Copied, Planes, Tile
from nbdnn.problem_conv import ConvProblem

_TILES = (
    *(Tile(16, 8, channels) for channels in (64, 32)),
    *(Tile(16, 16, channels) for channels in (32, 16)),
    *(Tile(rows, 32, channels) for rows in (16, 32) for channels in (32, 16)),
    Tile(32, 16, 16),
    Tile(16, 8, 8),
)


class _Variant(NamedTuple):
    """What a kernel is compiled for.

    steps: instructions for a filter row and 8 columns. run, shift: of planar x. out_run: neighbours of planar y that
    are stored at once. reversed_: a filter's last tap comes first. copy_bytes: of filters, at once.
    """

    dtype: str
    in_last: bool
    out_last: bool
    tile: Tile
    taps_h: int
    taps_w: int
    steps: int
    run: int
    shift: int
    out_run: int
    reversed_: bool
    copy_bytes: int
    epilogue: tuple[str, ...]

    @property
    def planes(self) -> Planes:
        rows, chunks = self.tile.rows + self.taps_h - 1, self.tile.wide + 2 * self.steps - 1
        return Planes(rows, chunks, self.tile.channels // plan.VECTOR)

    @property
    def threads(self) -> int:
        """A warp takes four planes, or two where they are large."""
        return 32 * self.tile.channels // (4 if self.tile.high * self.tile.wide <= 2 else 2)

    @property
    def shared_bytes(self) -> int:
        """Planes, and behind them the filters."""
        return self.planes.shared_bytes + 2 * self.tile.channels * self.taps_h * self.taps_w

    @property
    def min_blocks(self) -> int:
        products = self.tile.high * self.tile.wide
        sums = 4 * products * (2 if {"res", "beta"} & set(self.epilogue) else 1)  # and what is added to them
        kept = sums + self.taps_h * (2 * self.steps + self.tile.high) + 4 * self.planes.chunks
        return plan.min_blocks(self.threads, kept + 40, self.shared_bytes)

    @property
    def instructions(self) -> float:
        """Of a block's warps, about: planes filled and emptied, and for each the bands and their products."""
        loads, products = ceil(self.planes.chunks / 2), self.tile.wide * self.steps
        of_plane = 40 + self.taps_h * (5 * self.steps + self.tile.high * (1 + loads + products))
        turned = plan.turning(self.planes, self.planes.rows) + plan.turning(self.planes, self.tile.rows) / 2
        return turned + self.tile.channels * of_plane


class Blocks(NamedTuple):
    """The integers of a kernel: tiles_h x tiles_w tiles of an image's outputs, `slabs` slabs of its channels."""

    slabs: int
    tiles_h: int
    tiles_w: int
    channels: int
    pad_h: int
    pad_w: int
    in_n: int
    in_c: int
    in_h: int
    in_w: int
    in_rows: int
    in_columns: int
    out_n: int
    out_c: int
    out_h: int
    out_w: int
    out_rows: int
    out_columns: int


def _end(v: _Variant):
    """How a lane's sums are stored: neighbours of two rows a tile, eight rows and eight columns apart."""
    from nbdnn.kernels.cuda.ptx_vector_rows import End

    lanes = 1 if v.out_last else v.out_run
    columns = tuple(8 * j + i for j in range(v.tile.wide) for i in range(0, 2, lanes))
    return End(v.dtype, lanes, columns, v.epilogue)


def _put(v: _Variant):
    """Device function (sums, goal, plane, lane): to the output or, channels-last, finished to the plane's own place."""
    from nbdnn.kernels.cuda import ptx, ptx_planes, ptx_vector_rows

    word, rows, row_bytes = ptx.WORD, 2 * v.tile.high, v.planes.row_bytes
    finish, store_pairs = ptx_vector_rows.finish_rows, ptx_planes.store_pairs(rows, v.tile.wide, row_bytes)

    if not v.out_last:
        store = ptx_vector_rows.store_rows(_end(v), rows, 8)

        @ptx.inline
        def put_planar(sums, goal, plane, lane):
            store(sums, goal)

        return put_planar

    finished = finish(_end(v), rows, 8)

    @ptx.inline
    def put_last(sums, goal, plane, lane):
        ptx.cuda.syncwarp()  # all have read the rows that this overwrites
        store_pairs(word(plane + word((lane >> 2) * row_bytes + 4 * (lane & 3))), finished(sums, goal))

    return put_last


def _empty(v: _Variant):
    """Device function (out, at, channel, row, column, shared, f): channels-last, the planes' outputs to memory."""
    from nbdnn.kernels.cuda import ptx, ptx_planes

    integer, word, store, threads = ptx.INTEGER[32], ptx.WORD, ptx.STORE[4], v.threads
    vectors, pairs, row_bytes, plane_bytes = v.planes.vectors, 4 * v.tile.wide, v.planes.row_bytes, v.planes.plane_bytes
    turn, tile_rows = ptx_planes.turn_out(vectors * plane_bytes), v.tile.rows

    @ptx.inline
    def nothing(out, at, channel, row, column, shared, f):
        return

    @ptx.inline
    def empty(out, at, channel, row, column, shared, f):
        ptx.cuda.syncthreads()
        rows = integer(min(integer(f.out_rows - row), integer(tile_rows)))
        i = integer(ptx.thread_x())
        while i < rows * (pairs * vectors):
            rest, vector = ptx.divided(i, integer(vectors))
            r, pair = ptx.divided(rest, integer(pairs))
            first, q = integer(channel + plan.VECTOR * vector), integer(column + 2 * pair)
            if first < f.channels and q < f.out_columns:
                pixel, following = turn(word(shared + word(vector * plane_bytes + r * row_bytes + 4 * pair)))
                to = integer(at + (row + r) * f.out_h + q * f.out_w + first)
                store(out, to, pixel)
                if q + 1 < f.out_columns:
                    store(out, integer(to + f.out_w), following)
            i = integer(i + threads)

    return empty if v.out_last else nothing


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import depthwise_planes, ptx, ptx_planes, ptx_tile, ptx_vector, ptx_vector_rows

    v = _Variant(*specialised_on)
    integer, word, planes, (tile_rows, tile_columns, tile_channels) = ptx.INTEGER[32], ptx.WORD, v.planes, v.tile
    high, wide, taps, shift, threads = v.tile.high, v.tile.wide, v.taps_h * v.taps_w, v.shift, v.threads
    plane_bytes, filters_at, last = planes.plane_bytes, planes.shared_bytes, v.out_last
    part, side, target = depthwise_planes.Part, plan.Side, ptx_vector_rows.Target
    copy_filters = depthwise_planes.copy_filters(tile_channels, taps, v.copy_bytes, threads)
    copy_in = depthwise_planes.copy_in(Copied(planes, v.in_last, v.run, threads))
    clear, channel_of = depthwise_planes.clear_zeros(planes, threads), depthwise_planes.channel_of(planes.vectors)
    rows_inside = depthwise_planes.rows_inside(planes.rows)
    rows_at = ptx_planes.rows_at(tuple(range(0, tile_rows, 16)), v.taps_h, planes.row_bytes, planes.zeros_at)
    bands = ptx_planes.bands(v.taps_h, v.taps_w, v.steps, v.reversed_)
    zeros, arrived = ptx_vector.zeros(4 * high * wide), ptx_tile.copy_async_wait(0)
    correlate = ptx_planes.correlate(v.dtype, v.taps_h, high, wide, v.steps)
    put, empty, repeated = _put(v), _empty(v), ptx_vector.repeated(_end(v).lanes)
    widen, has_bias, none = ptx.WIDEN[v.dtype], "bias" in v.epilogue, ptx.REAL["f32"](0.0)

    def depthwise_mma(image, w, out, bias, residual, alpha, beta, f):
        # 1. Which tile of which channels.
        rest, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        rest, column = ptx.divided(rest, f.tiles_w)
        n, row = ptx.divided(rest, f.tiles_h)
        first, row, column = integer(slab * tile_channels), integer(row * tile_rows), integer(column * tile_columns)

        # 2. Its planes and filters.
        shared, of_image = ptx_tile.dynamic_shared(), side(f.in_n, f.in_c, f.in_h, f.in_w, f.in_rows, f.in_columns)
        in_row, in_column = integer(row - f.pad_h), integer(column - f.pad_w - shift)
        low, high_ = rows_inside(in_row, f.in_rows)
        copy_filters(w, first, f.channels, word(shared + word(filters_at)))
        clear(shared)
        source = part(image, integer(n * f.in_n), first, f.channels, in_row, low, high_, in_column, of_image)
        copy_in(source, shared)
        arrived()
        ptx.cuda.syncthreads()

        # 3. A warp's planes.
        lane, plane = integer(ptx.thread_x() & 31), integer(ptx.thread_x() >> 5)
        rows, chunk = rows_at(integer(lane & 15), integer(tile_rows), low, high_), word(16 * (lane >> 4))
        to_row, to_column = integer(row + (lane >> 2)), integer(column + 2 * (lane & 3))
        diagonal = integer(2 * (lane & 3) - (lane >> 2) - shift)
        while plane < tile_channels:
            in_block, at = channel_of(plane), word(shared + word(plane * plane_bytes))
            channel = integer(first + in_block)
            if channel < f.channels:
                filters = bands(word(shared + word(filters_at + 2 * taps * in_block)), diagonal)
                sums = correlate(zeros(), word(at + chunk), rows, filters)
                offset = repeated(widen(ptx.load_constant(bias, channel)) if has_bias else none)
                out_at, step = integer(n * f.out_n + channel * f.out_c), f.out_w if last else integer(1)
                of_rows, of_columns = (to_row, f.out_h, f.out_rows), (to_column, step, f.out_columns)
                put(sums, target(out, residual, out_at, *of_rows, *of_columns, offset, alpha, beta), at, lane)
            plane = integer(plane + threads // 32)

        # 4. Channels-last: what is left in the planes.
        empty(out, integer(n * f.out_n), first, row, column, shared, f)

    data, real = ptx.pointer(v.dtype), ptx.REAL["f32"]
    return depthwise_mma, (data, data, data, data, data, real, real, ptx.record(Blocks, 32))


def _variant(problem: ConvProblem, tile: Tile) -> _Variant:
    taps_h, taps_w = problem.filter
    (_, in_columns), (_, out_columns), (_, pad), reversed_ = unit_stride_gather(problem)
    run, shift = (1, 0) if problem.channels_last else plan.run_of(problem, in_columns, pad, taps_w)
    return _Variant(
        dtype=problem.dtype,
        in_last=problem.channels_last,
        out_last=problem.y_channels_last,
        tile=tile,
        taps_h=taps_h,
        taps_w=taps_w,
        steps=plan.steps(taps_w, shift),
        run=run,
        shift=shift,
        out_run=1 if out_columns % 2 else 2,
        reversed_=reversed_,
        copy_bytes=min(plan.CHUNK_BYTES, problem.align),
        epilogue=problem.epilogue,
    )


def _blocks(problem: ConvProblem, tile: Tile) -> Blocks:
    in_extents, out_extents, (pad_h, pad_w), _ = unit_stride_gather(problem)
    return Blocks(
        slabs=ceil(problem.c / tile.channels),
        tiles_h=ceil(out_extents[0] / tile.rows),
        tiles_w=ceil(out_extents[1] / tile.columns),
        channels=problem.c,
        pad_h=pad_h,
        pad_w=pad_w,
        **plan.side("in", (problem.n, problem.c, *in_extents), problem.channels_last),
        **plan.side("out", (problem.n, problem.c, *out_extents), problem.y_channels_last),
    )


class DepthwiseMma(LaunchedCandidate[Tile]):
    """One filter a channel on tensor cores; forward and bwd_data."""

    algorithm = "depthwise_mma"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        refused = plan.refusal(problem)
        return Support(False, refused) if refused else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
        fitting = [tile for tile in _TILES if _variant(problem, tile).shared_bytes <= plan.SHARED_BYTES]
        covering = plan.covering(unit_stride_gather(problem)[1], fitting)
        return worth_measuring([(self.estimate(problem, tile, device), tile) for tile in covering])

    def estimate(self, problem: ConvProblem, config: Tile, device: Gpu) -> float:
        v = _variant(problem, config)
        return plan.kernel_us(problem, device, self._grid(problem, config), v.min_blocks, v.instructions)

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v = _variant(problem, config)
        return [
            Launch(
                source=Source(_kernel, v, v.threads, v.min_blocks),
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


FWD, BWD_DATA = DepthwiseMma("conv_fwd"), DepthwiseMma("conv_bwd_data")
