"""1x1 convolutions in IEEE float32, planar or channels-last: pixels and filter by TMA boxes, products on the FMA units.

    y[p, k] = sum over c of  x[p, c] * w[k, c]         conv_fwd; bwd_data: dx[p, c] = sum over k of dy[p, k] * w[k, c]

asks for boxes    32 channels of a tile's pixels, and of its filters: a ring of both    first of the last warp
multiplies        a lane's elements of the wide factor by its own of the narrow one     the other eight
stores            a warp its outputs, finished, from registers                          the same

What is contiguous in the output is wide: of planes a warp's pixels, else its output channels, of which lanes have
neighbours. Blocks stay, and take tile after tile: while one is stored, the boxes of the next ones are on their way.
Boxes end where the tensors do: what lies beyond is zero.

A forward's filter may be turned first (`turn_filter.py`): its output channels are neighbours then, as a bwd_data's are.
Traffic: x once for each tile of output channels, of which there is one up to 256 or so; the filter from cache for each
tile; y once. Accumulates in float32, one rounding a product and sum. Source: own.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_ring, pointwise_plan, pointwise_tile
from nbdnn.kernels.cuda import pointwise_boxes_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, gather_pointers
from nbdnn.kernels.cuda.planned import Planned
from nbdnn.kernels.cuda.pointwise_boxes_plan import Integers, Tile, Variant
from nbdnn.kernels.cuda.pointwise_tile import LINE, QUAD, THREADS, WARP, WARPS, WORKERS
from nbdnn.kernels.cuda.turn_filter import turn_filter, turned_elems
from nbdnn.problem_conv import ConvProblem


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_pointwise, ptx_tile, ptx_tma

    v = Variant(*specialised_on)
    integer, word, real = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"]
    tile, planar, products, stages = v.tile, v.planar, v.products, v.tile.stages
    lanes, (of_warp_wide, of_warp_narrow), (wide_elems, narrow_elems) = tile.lanes, tile.of_warp, tile.elements
    (wide_words, narrow_words), narrow_warps = [factor.words for factor in products], WARPS // tile.across_wide
    stage_bytes, narrow_at = v.stage_bytes, v.narrow_at
    image_at, filter_at = (0, narrow_at) if planar else (narrow_at, 0)
    of_pixels, of_outputs = (wide_elems, narrow_elems) if planar else (narrow_elems, wide_elems)
    place_of = pointwise_plan.place_of(of_pixels, of_outputs)
    filter_by_rows = v.filter_by_rows
    copy_image, copy_filter = ptx_tma.COPY_BOX[3 if planar else 2], ptx_tma.COPY_BOX[2]
    map_of, zeros = ptx_tma.map_of, ptx_matrix.zeros(products.sums)
    multiply = ptx_pointwise.lane_products(products)
    stored = ptx_pointwise.stored(products, v.epilogue, not planar)
    wide_place, narrow_place = map(pointwise_tile.lane_place, products)
    ring = boxes_ring.Ring(stages, stage_bytes, sum(v.box_bytes), stages * stage_bytes, WARPS)
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)

    @ptx.inline
    def ask(image, w, shared, number, f):
        stage, turn = integer(0), integer(1)
        while number < f.tiles:
            n, pixel, output = place_of(number, f)
            first = integer(0)
            while first < f.summed:
                to, full = claim(shared, stage, turn)
                copy_image(word(to + image_at), image, full, (pixel, first, n) if planar else (first, pixel), ())
                copy_filter(word(to + filter_at), w, full, (output, first) if filter_by_rows else (first, output), ())
                first = integer(first + LINE)
                stage, turn = following(stage, turn)
            number = integer(number + f.step)

    @ptx.inline
    def work(thread, shared, number, pointers, scalars, f):
        warp, lane = integer(thread >> 5), integer(thread & (WARP - 1))
        own, other = integer(lane % lanes), integer(lane // lanes)
        wide, narrow = integer(warp // narrow_warps * of_warp_wide), integer(warp % narrow_warps * of_warp_narrow)
        # The lane's first element of each factor, among the tile's.
        of_lane_wide, of_lane_narrow = integer(wide + own * wide_words), integer(narrow + other * narrow_words)
        stage, turn = integer(0), integer(0)
        while number < f.tiles:
            sums, first = zeros(), integer(0)
            while first < f.summed:
                start = integer(arrived(shared, stage, turn))
                quad, left = integer(0), integer(f.summed - first)
                while quad < LINE // QUAD and quad * QUAD < left:
                    a = wide_place(start, wide, own, quad)
                    sums = multiply(sums, a, narrow_place(integer(start + narrow_at), narrow, other, quad))
                    quad = integer(quad + 1)
                give_back(shared, stage, lane)
                first = integer(first + LINE)
                stage, turn = following(stage, turn)
            n, pixel, output = place_of(number, f)
            if planar:
                pixel, output = integer(pixel + of_lane_wide), integer(output + of_lane_narrow)
                at, step = integer((n * f.outputs + output) * f.pixels + pixel), f.pixels
                left_of = (integer(f.pixels - pixel), integer(f.outputs - output))
            else:
                pixel, output = integer(pixel + of_lane_narrow), integer(output + of_lane_wide)
                at, step = integer(pixel * f.outputs + output), f.outputs
                left_of = (integer(f.outputs - output), integer(f.pixels - pixel))
            stored(sums, pointers, scalars, (at, output), left_of, step)
            number = integer(number + f.step)

    def pointwise_boxes(maps, out, bias, residual, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        if thread == WORKERS:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < WORKERS:
            work(thread, shared, integer(ptx.block_x()), (out, bias, residual), (alpha, beta), f)
        elif thread == WORKERS:
            ask(map_of(maps, integer(0)), map_of(maps, integer(1)), shared, integer(ptx.block_x()), f)

    data = ptx.pointer("f32")
    return pointwise_boxes, (ptx_tma.TensorMaps(2), data, data, data, real, real, ptx.record(Integers, 32))


class PointwiseBoxes(Planned[Tile]):
    """One tap, of whole vectors of input channels."""

    algorithm = "pointwise_boxes"
    plan = plan
    algo = "small"

    def __init__(self, op: str) -> None:
        self.op = op

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        return 4 * turned_elems(problem) if config.turned else 0

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config), plan.integers(problem, config, device)
        convolution = Launch(
            source=Source(_kernel, v, THREADS, config.blocks),
            grid=(integers.step, 1, 1),
            pointers=gather_pointers(problem)[2:],
            scalars="f32",
            integers=integers,
            dynamic_shared_bytes=v.shared_bytes,
            maps=plan.maps(problem, config),
        )
        return [turn_filter(problem, 0), convolution] if config.turned else [convolution]


FWD, BWD_DATA = PointwiseBoxes("conv_fwd"), PointwiseBoxes("conv_bwd_data")
