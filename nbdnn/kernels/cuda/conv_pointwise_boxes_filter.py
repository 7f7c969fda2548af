"""Gradient of the filters of 1x1 layers in IEEE float32, planar or channels-last: x and dy by TMA boxes.

    dw[k, c] = sum over pixels p of  dy[p, k] * x[p, c]

asks for boxes    of pixels: channels of the wide tensor, and of the narrow one: a ring    first of the last warp
multiplies        a lane's channels of the wide one by its own of the narrow one           the other eight
adds              the warps' sums, through shared memory, to the workspace                 the same
adds              the blocks' sums, always in the same order (`add_parts.py`)              another launch

A GEMM's tile is as long as wide, and mostly empty where one side has few channels; here warps that have the same
channels share the pixels of a stage, and the tile may be as long and narrow as dw is. Boxes end where the tensors do:
what lies beyond is zero.

Traffic: x and dy once for each tile of the other's channels, of which there is one up to 256 by 64 or so; the sums of
a block once. Accumulates in float32, one rounding a product and sum. Source: own.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_ring, pointwise_tile
from nbdnn.kernels.cuda import pointwise_boxes_filter_plan as plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.planned import Planned
from nbdnn.kernels.cuda.pointwise_boxes_filter_plan import Integers, Tile, Variant
from nbdnn.kernels.cuda.pointwise_tile import LINE, QUAD, THREADS, WARP, WARPS, WORKERS
from nbdnn.problem_conv import ConvProblem


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_pointwise, ptx_tile, ptx_tma

    v = Variant(*specialised_on)
    integer, word, real = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"]
    tile, planar, stages = v.tile, v.planar, v.tile.stages
    lanes, shares, slices, pixels, of_share = tile.lanes, tile.shares, tile.slices, tile.pixels, tile.of_share
    others, of_narrow, sums_bytes, products = WARP // lanes, tile.of_narrow, v.sums_bytes, v.products
    wide_words, narrow_words = (factor.words for factor in products)
    (wide_channels, narrow_channels), (wide_bytes, narrow_bytes) = tile.channels, v.box_bytes
    quads = pixels // (QUAD * slices)
    lines = pixels // LINE if planar else 1  # boxes of a tensor in a stage
    wide_line_bytes, narrow_line_bytes = wide_bytes // lines, narrow_bytes // lines
    of_dy = tile.wide == "dy"
    rows, columns = (wide_channels, narrow_channels) if of_dy else (narrow_channels, wide_channels)
    places = tuple((0, 4 * WARP * i) for i in range(products.sums))
    copy_box, map_of, meet = ptx_tma.COPY_BOX[3 if planar else 2], ptx_tma.map_of, ptx_tma.MEET[WORKERS]
    zeros, multiply = ptx_matrix.zeros(len(places)), ptx_pointwise.lane_products(products)
    store_sums, load_sum, float_of = ptx_matrix.store_floats_at(places, 1), ptx_tile.LOAD_SHARED[1], ptx_tile.float_of
    wide_place, narrow_place = map(pointwise_tile.lane_place, products)
    ring = boxes_ring.Ring(stages, sum(v.box_bytes), v.copied_bytes, v.barriers_at, WARPS)
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)

    @ptx.inline
    def copy_planes(wide, narrow, to, full, number, first_wide, first_narrow, f):
        n, chunk = ptx.split(number, f.of_image, f.of_image_by, f.of_image_shift)
        for line in range(lines):
            pixel = integer(chunk * pixels + line * LINE)
            copy_box(word(to + line * wide_line_bytes), wide, full, (pixel, first_wide, n), ())
            at = word(to + wide_bytes + line * narrow_line_bytes)
            copy_box(at, narrow, full, (pixel, first_narrow, n), ())

    @ptx.inline
    def copy_pixels(wide, narrow, to, full, number, first_wide, first_narrow, f):
        pixel = integer(number * pixels)
        copy_box(to, wide, full, (first_wide, pixel), ())
        copy_box(word(to + wide_bytes), narrow, full, (first_narrow, pixel), ())

    copy_stage = copy_planes if planar else copy_pixels

    @ptx.inline
    def ask(wide, narrow, shared, number, first_wide, first_narrow, f):
        stage, turn = integer(0), integer(1)
        while number < f.chunks:
            to, full = claim(shared, stage, turn)
            copy_stage(wide, narrow, to, full, number, first_wide, first_narrow, f)
            number = integer(number + f.step)
            stage, turn = following(stage, turn)

    @ptx.inline
    def multiplied(shared, number, slice_, share, lane, f):
        """The warp's sums over its pixels of the block's chunks."""
        sums, own, other = zeros(), integer(lane % lanes), integer(lane // lanes)
        stage, turn = integer(0), integer(0)
        while number < f.chunks:
            start = integer(arrived(shared, stage, turn))
            for i in range(quads):
                quad, at, at_narrow = integer(slice_ + i * slices), start, integer(start + wide_bytes)
                if planar:
                    line, quad = integer(quad >> 3), integer(quad & 7)
                    at, at_narrow = integer(at + line * wide_line_bytes), integer(at_narrow + line * narrow_line_bytes)
                a, b = wide_place(at, 0, own, quad), narrow_place(at_narrow, share * of_share, other, quad)
                sums = multiply(sums, a, b)
            give_back(shared, stage, lane)
            number = integer(number + f.step)
            stage, turn = following(stage, turn)
        return sums

    @ptx.inline
    def place_of_sum(wide, narrow):
        """Where the first slice's sum of two channels of the tile lies: sum by sum of a warp, lane by lane."""
        share, narrow = integer(narrow // of_share), integer(narrow % of_share)
        i = integer(wide // (lanes * wide_words) * wide_words + wide % wide_words)
        j = integer(narrow // (others * narrow_words) * narrow_words + narrow % narrow_words)
        lane = integer(narrow // narrow_words % others * lanes + wide // wide_words % lanes)
        return integer(share * sums_bytes + (i * of_narrow + j) * (4 * WARP) + lane * 4)

    @ptx.inline
    def store_tile(shared, thread, parts, first, first_wide, first_narrow, f):
        """The slices' sums, added in order, by rows of dw."""
        at = integer(thread)
        while at < rows * columns:
            row, column = integer(at // columns), integer(at % columns)
            if of_dy:
                found, k, c = place_of_sum(row, column), first_wide, first_narrow
            else:
                found, k, c = place_of_sum(column, row), first_narrow, first_wide
            total = real(0.0)
            for i in range(slices):
                total = real(total + float_of(load_sum(word(shared + found + i * shares * sums_bytes))))
            k, c = integer(k + row), integer(c + column)
            if k < f.filters and c < f.channels:
                parts[integer(first + k * f.channels + c)] = total
            at = integer(at + WORKERS)

    def pointwise_boxes_filter(maps, parts, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        part, number = ptx.divided(integer(ptx.block_x()), f.tiles)
        tile_narrow, tile_wide = ptx.divided(number, f.tiles_wide)
        first_wide, first_narrow = integer(tile_wide * wide_channels), integer(tile_narrow * narrow_channels)
        if thread == WORKERS:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < WORKERS:
            warp, lane = integer(thread >> 5), integer(thread & (WARP - 1))
            slice_, share = ptx.divided(warp, integer(shares))
            sums = multiplied(shared, part, slice_, share, lane, f)
            meet()  # all boxes have been read: their memory is the sums' now
            store_sums(word(shared + warp * sums_bytes + lane * 4), sums)
            meet()
            store_tile(shared, thread, parts, integer(part * f.part_elems), first_wide, first_narrow, f)
        elif thread == WORKERS:
            wide, narrow = map_of(maps, integer(0)), map_of(maps, integer(1))
            ask(wide, narrow, shared, part, first_wide, first_narrow, f)

    return pointwise_boxes_filter, (ptx_tma.TensorMaps(2), ptx.pointer("f32"), ptx.record(Integers, 32))


class PointwiseBoxesFilter(Planned[Tile]):
    """One tap; channels-last of whole vectors of channels."""

    op, algorithm, algo = "conv_bwd_filter", "pointwise_boxes", "small"
    plan = plan

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        return plan.step(problem, config, device) * part_elems(problem) * 4

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config), plan.integers(problem, config, device)
        product = Launch(
            source=Source(_kernel, v, THREADS, config.blocks),
            grid=(integers.step * integers.tiles, 1, 1),
            pointers=(WORKSPACE,),
            scalars="",
            integers=integers,
            dynamic_shared_bytes=v.shared_bytes,
            maps=plan.maps(problem, config),
        )
        return [product, add_parts(problem, integers.step)]


BWD_FILTER = PointwiseBoxesFilter()
