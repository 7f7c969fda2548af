"""Gradient of the filters of 1x1 layers on the matrix units of Hopper (wgmma): x and dy by TMA boxes.

    dw[k, c] = sum over pixels p of  dy[p, k] * x[p, c]

asks for boxes    a chunk of pixels of the tile's filters, and of its channels: a ring    first of the last warp
multiplies        a warpgroup 64 filters by all channels of the tile                      the others
stores            a warp its 16 rows from registers: to dw, or a part of the sums         the same
adds              the parts, always in the same order (`add_parts.py`)                    another launch

Factors of 16 bits are read as they lie: channels-last a line is a pixel, of planes it is a channel. `wgmma_boxes_tf32`
multiplies float32, rounded to TF32 as it is copied, of planes. Boxes end where the tensors do: beyond is zero.

Traffic: dy once for each tile of channels, x for each of filters, mostly from cache; the parts. Accumulates in float32.
Blocks of a cluster that add up their sums in shared memory were no faster where two did, and where four or eight did
half of the clusters waited for room (18 us, 11 by parts, for 1024 to 256 channels of 14x14). Source: own.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_ring
from nbdnn.kernels.cuda import wgmma_boxes_filter_plan as plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.conv_wgmma_boxes import STEPS, OfBoxes
from nbdnn.kernels.cuda.epilogue import Finish
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.wgmma_boxes_filter_plan import Integers, Tile, Variant
from nbdnn.kernels.cuda.wgmma_boxes_plan import GROUP, ROWS
from nbdnn.kernels.cuda.wgmma_maps import line_elems
from nbdnn.kernels.cuda.wgmma_pipeline import BOX_BYTES, WARP
from nbdnn.problem_conv import ConvProblem


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_fragments, ptx_matrix, ptx_tile, ptx_tma, ptx_wgmma

    v = Variant(*specialised_on)
    tile, planar, columns_at, stages, stage_bytes = v.tile, v.planar, v.columns_at, v.tile.stages, v.stage_bytes
    integer, word, real, map_of = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"], ptx_tma.map_of
    line, kind, in_parts = line_elems(v.dtype), "tf32" if v.dtype == "f32" else v.dtype, v.in_parts
    result = "f32" if in_parts else v.dtype
    workers, rows, columns, (dy_boxes, x_boxes) = tile.workers, tile.rows, tile.columns, v.boxes
    copy_box, zeros = ptx_tma.COPY_BOX[3 if planar else 2], ptx_matrix.zeros(tile.sums)
    multiply = ptx_wgmma.multiply(kind, columns, STEPS, not planar, not planar)
    of_rows, of_columns = ptx_wgmma.descriptor(), ptx_wgmma.descriptor(16 if planar else BOX_BYTES)
    finish = Finish(columns, result, v.epilogue, by_column=False)
    asked, stored = ptx_fragments.asked(finish), ptx_fragments.stored(finish)
    ring = boxes_ring.Ring(stages, stage_bytes, stage_bytes, stages * stage_bytes, workers // WARP, is_idle=True)
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)

    @ptx.inline
    def copy_chunk(dy, x, to, full, number, first_k, first_c, f):
        if planar:
            n, chunk = ptx.split(number, f.of_image, f.of_image_by, f.of_image_shift)
            pixel = integer(chunk * line)
            copy_box(to, dy, full, (pixel, first_k, n), ())
            copy_box(word(to + columns_at), x, full, (pixel, first_c, n), ())
        else:
            pixel = integer(number * line)
            for box in range(dy_boxes):
                copy_box(word(to + box * BOX_BYTES), dy, full, (integer(first_k + box * ROWS), pixel), ())
            for box in range(x_boxes):
                at = word(to + columns_at + box * BOX_BYTES)
                copy_box(at, x, full, (integer(first_c + box * ROWS), pixel), ())

    @ptx.inline
    def ask(dy, x, shared, number, first_k, first_c, f):
        stage, turn = integer(0), integer(1)
        while number < f.chunks:
            to, full = claim(shared, stage, turn)
            copy_chunk(dy, x, to, full, number, first_k, first_c, f)
            number = integer(number + f.step)
            stage, turn = following(stage, turn)

    @ptx.inline
    def multiplied(thread, lane, shared, number, f):
        """The sums of the block's chunks."""
        own, sums = integer(thread // GROUP * BOX_BYTES), zeros()
        stage, turn, before = integer(0), integer(0), integer(-1)
        while number < f.chunks:
            start = arrived(shared, stage, turn)
            ptx_wgmma.fence()
            sums = multiply(sums, of_rows(word(start + own)), of_columns(word(start + columns_at)))
            ptx_wgmma.commit()
            ptx_wgmma.wait_for_all_but_last()
            if before >= 0:
                give_back(shared, before, lane)
            before, number = stage, integer(number + f.step)
            stage, turn = following(stage, turn)
        ptx_wgmma.wait()
        return sums

    def wgmma_boxes_filter(maps, out, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        part, number = ptx.divided(integer(ptx.block_x()), f.tiles)
        tile_k, tile_c = ptx.divided(number, f.tiles_c)
        first_k, first_c = integer(tile_k * rows), integer(tile_c * columns)
        if thread == workers:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < workers:
            lane = integer(thread & (WARP - 1))
            k, tensors = integer(first_k + thread // WARP * 16), (out, out, out)
            at = integer(part * f.part_elems + k * f.channels + first_c), integer(0)
            left = integer(f.filters - k), integer(f.channels - first_c)
            words = asked(tensors, lane, at, left, f.channels)
            sums = multiplied(thread, lane, shared, part, f)
            if in_parts:
                alpha = real(1.0)  # a sum is scaled once, when all parts are added
            stored(sums, words, tensors, (alpha, beta), lane, at, left, f.channels)
        elif thread == workers:
            ask(map_of(maps, integer(0)), map_of(maps, integer(1)), shared, part, first_k, first_c, f)

    return wgmma_boxes_filter, (ptx_tma.TensorMaps(2), ptx.pointer(result), real, real, ptx.record(Integers, 32))


class WgmmaBoxesFilter(OfBoxes[Tile]):
    """bwd_filter."""

    plan = plan

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        return 4 * config.parts * part_elems(problem) if config.parts > 1 else 0

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config), plan.integers(problem, config)
        product = Launch(
            source=Source(_kernel, v, config.workers + WARP, config.blocks),
            grid=(integers.tiles * integers.step, 1, 1),
            pointers=(WORKSPACE if v.in_parts else 2,),
            scalars="f32",
            integers=integers,
            dynamic_shared_bytes=v.shared_bytes,
            maps=plan.maps(problem, config),
        )
        return [product, add_parts(problem, config.parts)] if config.parts > 1 else [product]


BWD_FILTER = (WgmmaBoxesFilter("conv_bwd_filter"), WgmmaBoxesFilter("conv_bwd_filter", tf32=True))
