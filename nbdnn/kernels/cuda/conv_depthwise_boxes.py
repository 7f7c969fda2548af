"""Depthwise convolution of small filters, channels-last, stride 1, forward and bwd_data: pixels come by TMA boxes.

    y[n, p, q, c] = sum over r, s of  x[n, p + r - pad, q + s - pad, c] * w[c, r, s]

    asks for boxes    the pixels of a tile with their halo, zeros beside the image: a ring of them    first of the last
    works             a strip of the tile: 4 channels of some columns, down its rows                  warp; the others

Blocks stay, each with a slab of channels, whose weights its threads keep in registers, and walk over tiles: while one
is multiplied, the boxes of the next are on their way. A strip loads each row of its pixels once, multiplies it into the
sums of the rows of outputs that it belongs to, and stores a row that is complete. Alpha is multiplied into the weights.

bwd_data is the same on dy with the filter reversed. Traffic: x and y once from memory, the halo of a tile again from
cache. Accumulates in float32, one rounding a product and sum. Source: own.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_plan as plan
from nbdnn.kernels.cuda import boxes_ring
from nbdnn.kernels.cuda.boxes_plan import WARP, Boxes, Variant, Walk
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.depthwise_plan import unit_stride_gather
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.launch import Launch, gather_pointers
from nbdnn.kernels.cuda.planned import Planned
from nbdnn.kernels.cuda.tensor_map import TensorMap
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_tma, ptx_vector, ptx_vector_rows

    v = Variant(*specialised_on)
    integer, word, real, boxes, lanes = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"], v.boxes, v.lanes
    warps, workers, vectors, slab_channels = v.warps, WARP * v.warps, v.vectors, boxes.channels
    rows, columns, strips_h, strips_w = boxes.rows, boxes.columns, boxes.strips_h, boxes.strips_w
    tile_rows, tile_columns, strips = boxes.tile_rows, boxes.tile_columns, boxes.strips_h * boxes.strips_w
    stages, stage_bytes, box_bytes, taps, down_first = boxes.stages, v.stage_bytes, v.box_bytes, v.taps, v.down_first
    pixel_bytes, row_bytes, vector_bytes = v.pixel_bytes, v.pixel_bytes * v.box_columns, lanes * ITEMSIZE[v.dtype]
    copy_box, map_of, target = ptx_tma.COPY_BOX[4], ptx_tma.map_of, ptx_vector_rows.Target
    load_weights = ptx_vector.load_filters(v.dtype, lanes, taps, v.reversed_)
    scaled = ptx_vector.scaled(lanes * taps)
    load_bias, zeros, has_bias = ptx_vector.load_run(v.dtype, lanes), ptx_vector.zeros(lanes), "bias" in v.epilogue
    offsets, steps = plan.rows_of(v)
    multiply = ptx_vector_rows.multiply_shared_rows(
        ptx_vector_rows.Rows(v.dtype, lanes, offsets, steps),
        ptx_vector_rows.End(v.dtype, lanes, tuple(range(columns)), v.epilogue),
        row_bytes,
        pixel_bytes,
    )
    ring = boxes_ring.Ring(stages, stage_bytes, box_bytes, stages * stage_bytes, warps)
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)
    place = boxes_ring.place_of(1, tile_rows, tile_columns)

    @ptx.inline
    def ask(source, shared, number, channel, f):
        stage, turn = integer(0), integer(1)
        while number < f.tiles:
            n, row, column = place(number, f)
            to, full = claim(shared, stage, turn)
            corner = (channel, integer(column - f.pad_w), integer(row - f.pad_h), n)
            copy_box(to, source, full, corner, ())
            number = integer(number + f.step)
            stage, turn = following(stage, turn)

    @ptx.inline
    def strip_of(thread):
        """Vector, first row, first column; and whether it is a strip: threads beyond the last see the first."""
        group, vector = ptx.divided(thread, integer(vectors))
        alive = group < strips
        group = group if alive else integer(0)
        if down_first:
            along, down = ptx.divided(group, integer(strips_h))
        else:
            down, along = ptx.divided(group, integer(strips_w))
        return vector, integer(down * rows), integer(along * columns), alive

    @ptx.inline
    def work(thread, shared, number, first, w, given, f):
        out, bias, residual, alpha, beta = given
        vector, down, along, alive = strip_of(thread)
        channel = integer(first + vector * lanes)
        alive = alive and channel < f.channels
        channel = channel if alive else integer(0)
        weights = scaled(load_weights(w, integer(channel * taps)), alpha)
        shift = load_bias(bias, channel, integer(1)) if has_bias else zeros()
        pixels = word(down * row_bytes + along * pixel_bytes + vector * vector_bytes)
        end_row, row_step = f.out_rows if alive else integer(0), integer(f.out_columns * f.channels)
        stage, turn = integer(0), integer(0)
        while number < f.tiles:
            n, row, column = place(number, f)
            row, column = integer(row + down), integer(column + along)
            box = arrived(shared, stage, turn)
            at, of_columns = integer(n * f.out_rows * row_step + channel), (column, f.channels, f.out_columns)
            goal = target(out, residual, at, row, row_step, end_row, *of_columns, shift, real(1.0), beta)
            multiply(weights, word(box + pixels), goal)
            give_back(shared, stage, thread & (WARP - 1))
            number = integer(number + f.step)
            stage, turn = following(stage, turn)

    def depthwise_boxes(maps, w, out, bias, residual, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        number, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        first = integer(slab * slab_channels)
        if thread == workers:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < workers:
            work(thread, shared, number, first, w, (out, bias, residual, alpha, beta), f)
        elif thread == workers:
            ask(map_of(maps, integer(0)), shared, number, first, f)

    data = ptx.pointer(v.dtype)
    return depthwise_boxes, (ptx_tma.TensorMaps(1), data, data, data, data, real, real, ptx.record(Walk, 32))


def _walk(problem: ConvProblem, boxes: Boxes, device: Gpu) -> Walk:
    _, (out_rows, out_columns), (pad_h, pad_w), _ = unit_stride_gather(problem)
    tiles_h, tiles_w, slabs = plan.tiles(problem, boxes)
    of_rows, of_columns = (tiles_h, *reciprocal(tiles_h)), (tiles_w, *reciprocal(tiles_w))
    counts = problem.n * tiles_h * tiles_w, plan.step(problem, boxes, device), slabs
    return Walk(*counts, *of_rows, *of_columns, problem.c, pad_h, pad_w, out_rows, out_columns)


def _image_map(problem: ConvProblem, v: Variant) -> TensorMap:
    """Of what is gathered: a copy takes a box."""
    rows, columns = unit_stride_gather(problem)[0]
    extents, size_bytes = (problem.c, columns, rows, problem.n), ITEMSIZE[problem.dtype]
    pixel_bytes = size_bytes * problem.c
    strides_bytes = pixel_bytes, pixel_bytes * columns, pixel_bytes * columns * rows
    return TensorMap(gather_pointers(problem)[0], problem.dtype, extents, strides_bytes, v.box, plain=True)


class DepthwiseBoxes(Planned[Boxes]):
    """One filter a channel, its pixels by TMA; forward and bwd_data."""

    algorithm = "depthwise_boxes"
    plan = plan

    def __init__(self, op: str) -> None:
        self.op = op

    def launches(self, problem: ConvProblem, config: Boxes, device: Gpu) -> list[Launch]:
        v, walk = plan.variant(problem, config), _walk(problem, config, device)
        return [
            Launch(
                source=Source(_kernel, v, v.threads, config.blocks),
                grid=(walk.step * walk.slabs, 1, 1),
                pointers=gather_pointers(problem)[1:],
                scalars="f32",
                integers=walk,
                dynamic_shared_bytes=v.shared_bytes,
                maps=(_image_map(problem, v),),
            )
        ]


FWD, BWD_DATA = DepthwiseBoxes("conv_fwd"), DepthwiseBoxes("conv_bwd_data")
