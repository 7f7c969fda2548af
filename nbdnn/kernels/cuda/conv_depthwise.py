"""Depthwise convolution: one filter a channel, forward and bwd_data, planar and channels-last, 2-D and 3-D.

    y[n, k, p, q] = sum over r, s of  x[n, k // m, p*u + r*d - pad, q*u + s*d - pad] * w[k, r, s],   k < c*m

bwd_data is the same gather from dy, with the positions that a stride skips left out: both are tables of what each tap
of a tile meets, known when the kernel is compiled. A thread has a tile of outputs in registers, of one channel or,
channels-last, of a vector of channels:

    rows in turn    small filters: all weights are in registers; each row of the input is loaded once, multiplied with
                    the weights of every output row it reaches, and an output row is stored after its last
    taps in turn    other filters: one row of outputs; a filter row at a time, in pieces of 8 taps

A vector is up to 16 bytes a load. Neighbouring threads are neighbours in memory. Planar, a tile's row is stored by
vectors of its own width, where the image's allows it, since a sector of 32 bytes that is written in parts takes as
long for each of them. Channels-last, the weights of a thread whose rows are in turn are neighbours as well; else a
block's come through shared memory, turned so that a vector of channels is one load. Traffic: x, w and y once from
memory; the halo of a tile again from cache, a 4x4 tile of 3x3 taps 2.25 times. Accumulates in float32, one rounding a
product and sum. Source: own.
"""

from __future__ import annotations

from math import ceil, lcm, prod

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda import depthwise_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.depthwise_plan import THREADS, Axis
from nbdnn.kernels.cuda.depthwise_tile import Reciprocals, Tile, Tiles, Variant
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.geometry import filter_strides, index_bits
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate, gather_pointers
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_MOST_STRIDE_W = 8  # of bwd_data, where a tile is a multiple of it
_MOST_WEIGHT_BYTES = 96 << 10  # of shared memory in a block
_MOST_VECTORS = {True: 16, False: 8}  # of channels in a block: few where a block has many weights to turn
_WHOLE_PIXEL = 36  # vectors, all of which a block with a stride takes: bf16 96x112x112 25.2 us forward, not 27.1
# Threads of a block of a 16-bit bwd_data with a stride, none idle: about so many, at most, and of how many in all. bf16
# 144x56x56 11.2 us, not 11.4; 96x112x112 26.6, not 27.0. A forward and float32 are as fast or slower; so is one image.
_BUSY_THREADS, _MOST_BUSY_THREADS, _LEAST_WORKING_THREADS = 192, 288, 1 << 16
_ROWS_IN_TURN = ((4, 4), (8, 4), (4, 2), (8, 2), (2, 4), (2, 2))
_PLANAR_IN_TURN = ((4, 1), (8, 1))  # of rows that no vector divides
_TAPS_IN_TURN = ((1, 7), (1, 8), (1, 4))


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import depthwise_tile, depthwise_weights, ptx, ptx_tile, ptx_vector, ptx_vector_rows
    from nbdnn.kernels.cuda.geometry import input_reached

    v = Variant(*specialised_on)
    integer, u32 = ptx.INTEGER[v.bits], ptx.types.uint32
    (tile_h, tile_w), step_h, step_w, lanes, taps = v.tile, v.step_h, v.step_w, v.lanes, v.taps
    zeros, reached, flat = ptx_vector.zeros(tile_h * tile_w * v.width), input_reached(v.forward, v.bits), v.flat
    planar_in, planar_out = not v.in_last, not v.out_last
    source_type, target_type = ptx_vector_rows.Source, ptx_vector_rows.Target
    bias_at = depthwise_tile.bias_of(v)

    # 1. Where a thread is: (n and tile of the image, or -1; channel; where its weights are).
    if v.out_last:
        turn = depthwise_weights.turned_weights(v)

        @ptx.inline
        def place(w, f, r):
            block, slab = ptx.split(integer(ptx.block_x()), f.slabs, r.slabs, r.slabs_shift)
            in_block, vector = ptx.split(integer(ptx.thread_x()), f.vectors, r.vectors, r.vectors_shift)
            shared, first = ptx_tile.dynamic_shared(), integer(slab * f.vectors * lanes)
            turn(w, first, shared, f)
            tile, channel = integer(block * f.block_tiles + in_block), integer(first + vector * lanes)
            inside = in_block < f.block_tiles and tile < f.tiles and channel < f.out_c
            return tile if inside else integer(-1), channel, u32(shared + u32(4 * vector * lanes))

        @ptx.inline
        def turned_at(start, channel, summed, t, plane, f):
            return u32(start + u32(4 * f.pitch * taps * plane))

        @ptx.inline
        def filters_at(start, channel, summed, t, plane, f):
            return integer(channel * taps)

        weights_at = filters_at if v.direct else turned_at
    else:

        @ptx.inline
        def place(w, f, r):
            thread = integer(integer(ptx.block_x()) * THREADS + ptx.thread_x())
            image, tile = ptx.split(thread, f.image_tiles, r.image_tiles, r.image_tiles_shift)
            n, channel = ptx.split(image, f.out_c, r.out_c, r.out_c_shift)
            return integer(n * f.image_tiles + tile) if thread < f.tiles else integer(-1), channel, f.w_first

        @ptx.inline
        def weights_at(start, channel, summed, t, plane, f):
            return integer(start + (channel * f.group_in + summed) * f.taps + f.w_step * t * taps)

    @ptx.inline
    def first_of_group(channel, f, r):
        group, _ = ptx.split(channel, f.group_out, r.group_out, r.group_out_shift)
        return integer(group * f.group_in)

    @ptx.inline
    def itself(channel, f, r):
        return channel

    first_read = itself if flat and not v.forward else first_of_group

    # 2. What it sums of one plane of taps: (depth, -1 where there is none; the image and where its weights are).
    @ptx.inline
    def plane_at(first, channel, d, plane, start, f):
        summed, t = ptx.divided(plane, f.taps_d)
        at_d = d if flat else reached(d, t, f.stride_d, f.pad_d, f.dilation_d, f.extent_d)
        at = integer(first + summed * f.in_c + at_d * f.in_d)
        return at_d, at, weights_at(start, channel, summed, t, plane, f)

    @ptx.inline
    def source_of(image, at, row, column, f):
        step = integer(1) if planar_in else f.in_w
        first_row, first_column = integer(row * step_h), integer(column * step_w)
        return source_type(image, at, first_row, f.in_h, f.extent_h, first_column, step, f.extent_w)

    # 3. All planes, and the tile stored.
    end = depthwise_tile.end_of(v)
    if v.unrolled and flat:
        tile_of = depthwise_tile.rows_in_turn(v, end)

        @ptx.inline
        def gather(image, w, first, channel, d, start, row, column, target, f):
            _, at, where = plane_at(first, channel, d, integer(0), start, f)
            tile_of(zeros(), w, where, f, source_of(image, at, row, column, f), target)
    else:
        plane_of = depthwise_tile.rows_in_turn(v) if v.unrolled else depthwise_tile.taps_in_turn(v)
        store = ptx_vector_rows.store_rows(end, tile_h)

        @ptx.inline
        def gather(image, w, first, channel, d, start, row, column, target, f):
            sums, plane = zeros(), integer(0)
            while plane < f.planes:
                at_d, at, where = plane_at(first, channel, d, plane, start, f)
                if at_d >= 0:
                    sums = plane_of(sums, w, where, f, source_of(image, at, row, column, f), target)
                plane = integer(plane + 1)
            store(sums, target)

    def depthwise(image, w, out, bias, residual, alpha, beta, f, r):
        tile, channel, start = place(w, f, r)
        if tile < 0:
            return
        rest, column = ptx.split(tile, f.tiles_w, r.tiles_w, r.tiles_w_shift)
        rest, row = ptx.split(rest, f.tiles_h, r.tiles_h, r.tiles_h_shift)
        n, d = ptx.split(rest, f.out_d, r.out_d, r.out_d_shift)
        first = integer(n * f.in_n + first_read(channel, f, r) * f.in_c)
        at = integer(n * f.y_n + channel * f.y_c + d * f.y_d)
        step = integer(1) if planar_out else f.y_w
        out_row, out_column, shift = integer(row * tile_h), integer(column * tile_w), bias_at(bias, channel)
        target = target_type(out, residual, at, out_row, f.y_h, f.out_h, out_column, step, f.out_w, shift, alpha, beta)
        gather(image, w, first, channel, d, start, row, column, target, f)

    data, real = ptx.pointer(v.dtype), ptx.REAL["f32"]
    integers = tuple(ptx.record(fields, v.bits) for fields in (Tiles, Reciprocals))
    return depthwise, (data, data, data, data, data, real, real, *integers)


def _lanes(problem: ConvProblem) -> int:
    if problem.y_channels_last:
        return plan.vector_lanes(problem, 4)
    # A bwd_data's tile is a multiple of the lanes times the stride, and all of it is to be one vector.
    stride = 1 if problem.op == "conv_fwd" else problem.stride[-1]
    return plan.vector_lanes(problem, max(1, plan.VECTOR_BYTES // ITEMSIZE[problem.dtype] // stride))


def _variants(problem: ConvProblem) -> list[Variant]:
    """Every tile whose sums, weights and row fit into registers; else the smallest with its taps in turn."""
    depth, rows, columns = plan.axes(problem)
    forward, lanes, last = problem.op == "conv_fwd", _lanes(problem), problem.y_channels_last
    flat = depth == Axis(1, 1, 0, 1) and (forward or problem.k == problem.c)
    in_last, unit_h, unit_w = problem.channels_last, 1, lanes if not last else 1
    if not forward:
        unit_h, unit_w = rows.stride, unit_w * columns.stride

    def variant(unrolled: bool, tile_h: int, tile_w: int) -> Variant:
        tile = Tile(ceil(tile_h / unit_h) * unit_h if unrolled else 1, ceil(tile_w / unit_w) * unit_w)
        stored = lanes if last else plan.stored_lanes(problem, tile.columns)
        # Of 32 bits until its integers are known.
        taken = (forward, problem.dtype, in_last, last, lanes, stored, tile, rows, columns, unrolled, flat)
        v = Variant(*taken, False, problem.epilogue, 32)
        return v._replace(reversed_=v.direct and problem.mode == "conv")

    tiles = _ROWS_IN_TURN if last else _ROWS_IN_TURN + _PLANAR_IN_TURN
    fitting = [v for tile in tiles if (v := variant(True, *tile)).fits]
    if not fitting:
        fitting = [v for tile in _TAPS_IN_TURN if (v := variant(False, *tile)).fits]
    return list(dict.fromkeys(fitting)) or [variant(False, 1, 1)]


def _tiles(problem: ConvProblem, v: Variant) -> Tiles:
    forward = problem.op == "conv_fwd"
    source, target = (problem.operands[0], problem.operands[2]) if forward else problem.operands[1:3]
    multiplier = problem.k // problem.c
    depth = plan.axes(problem)[0]
    out_d, out_h, out_w = spatial3(target.shape[2:])
    tiles_h, tiles_w = ceil(out_h / v.tile.rows), ceil(out_w / v.tile.columns)
    planes = depth.taps * (1 if forward else multiplier)
    start, _, _, _, _, w_s = filter_strides(problem)
    image_tiles = out_d * tiles_h * tiles_w
    busy = _is_busy(problem, v, image_tiles)
    vectors = _vectors(target.shape[1], v, planes, busy) if v.out_last else 1
    return Tiles(
        tiles=problem.n * image_tiles * (1 if v.out_last else target.shape[1]),
        image_tiles=image_tiles,
        tiles_h=tiles_h,
        tiles_w=tiles_w,
        slabs=ceil(target.shape[1] / (vectors * v.lanes)),
        vectors=vectors,
        block_tiles=_threads(vectors, busy) // vectors,
        pitch=_pitch(vectors, v.lanes),
        planes=planes,
        group_out=multiplier if forward else 1,
        group_in=1 if forward else multiplier,
        out_c=target.shape[1],
        out_d=out_d,
        out_h=out_h,
        out_w=out_w,
        **plan.strides("y", target.shape, problem.y_channels_last),
        **plan.strides("in", source.shape, problem.channels_last),
        **dict(zip(("extent_d", "extent_h", "extent_w"), spatial3(source.shape[2:]), strict=True)),
        taps=prod(problem.filter),
        taps_d=depth.taps,
        stride_d=depth.stride,
        pad_d=depth.pad,
        dilation_d=depth.dilation,
        w_first=start,
        w_step=1 if w_s > 0 else -1,
    )


def _pitch(vectors: int, lanes: int) -> int:
    """Floats between a block's weights of neighbouring taps: a vector more than there are, against bank conflicts."""
    return (vectors + 1) * lanes


def _vectors(channels: int, v: Variant, planes: int, busy: bool) -> int:
    """Vectors of channels of a block."""
    whole, most = ceil(channels / v.lanes), _MOST_VECTORS[v.unrolled]
    if v.direct and v.columns.stride > 1 and whole <= _WHOLE_PIXEL and (v.forward or (busy and _fills_warps(whole))):
        return whole
    while most > 1 and 4 * planes * v.taps * _pitch(most, v.lanes) > plan.WEIGHTS_BYTES:
        most //= 2
    return plan.vectors_a_block(whole, most)


def _is_busy(problem: ConvProblem, v: Variant, image_tiles: int) -> bool:
    """Whether blocks shall have no idle threads."""
    strided = v.direct and not v.forward and v.columns.stride > 1
    working = problem.n * image_tiles * ceil(problem.c / v.lanes)
    return strided and v.dtype != "f32" and working >= _LEAST_WORKING_THREADS


def _fills_warps(vectors: int) -> bool:
    """Whether few pixels of so many vectors are whole warps."""
    return lcm(vectors, plan.WARP) <= _MOST_BUSY_THREADS


def _threads(vectors: int, busy: bool) -> int:
    """Threads of a block."""
    if not busy or not _fills_warps(vectors):
        return THREADS
    filled = lcm(vectors, plan.WARP)
    return filled * max(1, _BUSY_THREADS // filled)


class Depthwise(LaunchedCandidate[Tile]):
    """One filter a channel; forward and bwd_data."""

    algorithm = "depthwise"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        refused = plan.refusal(problem)
        if refused:
            return Support(False, refused)
        if self.op == "conv_bwd_data" and problem.stride[-1] > _MOST_STRIDE_W:
            return Support(False, f"the column stride {problem.stride[-1]} is more than {_MOST_STRIDE_W}")
        multiplier = 1 if self.op == "conv_fwd" else problem.k // problem.c
        size_bytes = 4 * prod(problem.filter) * multiplier * _pitch(1, _lanes(problem))
        if problem.y_channels_last and size_bytes > _MOST_WEIGHT_BYTES:
            return Support(False, f"a vector's weights take {size_bytes} bytes, more than {_MOST_WEIGHT_BYTES}")
        return YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
        return plan.worth_measuring([(self._guess_us(problem, v, device), v.tile) for v in _variants(problem)])

    def estimate(self, problem: ConvProblem, config: Tile, device: Gpu) -> float:
        return self._guess_us(problem, self._variant(problem, config), device)

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v = self._variant(problem, config)
        integers = _tiles(problem, v)
        v = v._replace(bits=index_bits(problem, integers))
        threads = _threads(integers.vectors, _is_busy(problem, v, integers.image_tiles))
        a_block = integers.block_tiles if v.out_last else THREADS
        return [
            Launch(
                source=Source(_kernel, v, threads, max(1, v.min_blocks * THREADS // threads)),
                grid=(
                    integers.slabs * ceil(integers.tiles / a_block) if v.out_last else ceil(integers.tiles / a_block),
                    1,
                    1,
                ),
                pointers=gather_pointers(problem),
                scalars="f32",
                integers=(*integers, *reciprocals(Reciprocals, integers._asdict())),
                integer_bits=v.bits,
                dynamic_shared_bytes=4 * integers.planes * v.taps * integers.pitch
                if v.out_last and not v.direct
                else 0,
            )
        ]

    def _variant(self, problem: ConvProblem, config: Tile) -> Variant:
        return next(v for v in _variants(problem) if v.tile == config)

    def _guess_us(self, problem: ConvProblem, v: Variant, device: Gpu) -> float:
        integers = _tiles(problem, v)
        threads = integers.tiles * (ceil(integers.out_c / v.lanes) if v.out_last else 1)
        us = plan.kernel_us(problem, device, threads, integers.planes * v.instructions)
        if v.out_last:
            return us
        output = problem.operands[2]
        columns = min(v.tile.columns, output.shape[-1])
        return us + plan.rewriting_us(output.size_elems, ITEMSIZE[v.dtype], columns, v.stored)


FWD, BWD_DATA = Depthwise("conv_fwd"), Depthwise("conv_bwd_data")
