"""1x1 convolutions on the matrix units of Hopper (wgmma), planar or channels-last: pixels and filter by TMA boxes.

    y[p, k] = sum over c of  x[p, c] * w[k, c]         conv_fwd; bwd_data: dx[p, c] = sum over k of dy[p, k] * w[k, c]

asks for boxes    128 bytes of channels of a tile's pixels, and of its filters: a ring of both    first of the last warp
multiplies        a warpgroup 64 rows by all columns of the tile                                  the others
stores            a warp its 16 rows, finished, from registers                                    the same

What is contiguous in the output are columns: of planes pixels, whose channels are rows; else channels, whose pixels are
rows. A factor of 16 bits may lie with either of its axes as neighbours, so that planes are read as they are. Blocks
stay, and take tile after tile: while one is stored, the boxes of the next ones are on their way, and other blocks of
the multiprocessor multiply. Boxes end where the tensors do: what lies beyond is zero.

`wgmma_boxes_tf32` multiplies float32, rounded to TF32 as it is copied, whose factors have to lie as they are summed:
channels-last alone, and a bwd_data turns the filter first. Traffic: x once for each tile of output channels, mostly
from cache; the filter from cache for each tile; y once. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from nbdnn.candidate import ConfigT, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_ring, pointwise_plan
from nbdnn.kernels.cuda import wgmma_boxes_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.epilogue import Finish
from nbdnn.kernels.cuda.launch import Launch, output_pointers
from nbdnn.kernels.cuda.planned import Planned
from nbdnn.kernels.cuda.turn_channels import turn_inputs, turned_bytes
from nbdnn.kernels.cuda.wgmma_boxes_plan import GROUP, ROWS, Integers, Tile, Variant
from nbdnn.kernels.cuda.wgmma_maps import filters_last, line_elems
from nbdnn.kernels.cuda.wgmma_pipeline import BOX_BYTES, LINE_BYTES, WARP
from nbdnn.problem_conv import ConvProblem

STEPS = LINE_BYTES // 32  # instructions for a line


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_fragments, ptx_matrix, ptx_tile, ptx_tma, ptx_wgmma

    v = Variant(*specialised_on)
    tile, planar, (rows_turned, columns_turned), columns_at = v.tile, v.planar, v.turned, v.columns_at
    integer, word, map_of = ptx.INTEGER[32], ptx.WORD, ptx_tma.map_of
    line, kind = line_elems(v.dtype), "tf32" if v.dtype == "f32" else v.dtype
    workers, rows, columns, (rows_boxes, columns_boxes) = tile.workers, tile.rows, tile.columns, v.boxes
    of_pixels, of_outputs = (columns, rows) if planar else (rows, columns)
    place_of = pointwise_plan.place_of(of_pixels, of_outputs)
    filter_turned, filter_boxes = (rows_turned, rows_boxes) if planar else (columns_turned, columns_boxes)
    image_at, filter_at = (columns_at, 0) if planar else (0, columns_at)
    copy_image, copy_filter = ptx_tma.COPY_BOX[3 if planar else 2], ptx_tma.COPY_BOX[2]
    zeros, multiply = (
        ptx_matrix.zeros(tile.sums),
        ptx_wgmma.multiply(kind, columns, STEPS, rows_turned, columns_turned),
    )
    of_rows, of_columns = ptx_wgmma.descriptor(), ptx_wgmma.descriptor(BOX_BYTES if columns_turned else 16)
    finish = Finish(columns, v.dtype, v.epilogue, not planar)
    asked, stored = ptx_fragments.asked(finish), ptx_fragments.stored(finish)
    ring = boxes_ring.Ring(
        tile.stages, v.stage_bytes, v.stage_bytes, tile.stages * v.stage_bytes, workers // WARP, True
    )
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)

    @ptx.inline
    def copy_line(image, w, to, full, place, first):
        n, pixel, output = place
        if planar:
            for box in range(columns_boxes):
                at = word(to + image_at + box * BOX_BYTES)
                copy_image(at, image, full, (integer(pixel + box * ROWS), first, n), ())
        else:
            copy_image(word(to + image_at), image, full, (first, pixel), ())
        if filter_turned:
            for box in range(filter_boxes):
                at = word(to + filter_at + box * BOX_BYTES)
                copy_filter(at, w, full, (integer(output + box * ROWS), first), ())
        else:
            copy_filter(word(to + filter_at), w, full, (first, output), ())

    @ptx.inline
    def ask(image, w, shared, number, f):
        stage, turn = integer(0), integer(1)
        while number < f.tiles:
            place, first = place_of(number, f), integer(0)
            while first < f.summed:
                to, full = claim(shared, stage, turn)
                copy_line(image, w, to, full, place, first)
                first = integer(first + line)
                stage, turn = following(stage, turn)
            number = integer(number + f.step)

    @ptx.inline
    def of_warp(row, place, f):
        """Where the warp's rows, from this one of the tile on, lie in the output, as `stored` takes it."""
        n, pixel, output = place
        if planar:
            output = integer(output + row)
            at, left, step = integer((n * f.outputs + output) * f.pixels + pixel), integer(f.pixels - pixel), f.pixels
            return (at, output), (integer(f.outputs - output), left), step
        pixel = integer(pixel + row)
        at, left, step = integer(pixel * f.outputs + output), integer(f.outputs - output), f.outputs
        return (at, output), (integer(f.pixels - pixel), left), step

    @ptx.inline
    def work(thread, shared, number, pointers, scalars, f):
        group, lane = integer(thread // GROUP), integer(thread & (WARP - 1))
        own, row = integer(group * BOX_BYTES), integer(thread // WARP * 16)
        stage, turn = integer(0), integer(0)
        while number < f.tiles:
            at, left, step = of_warp(row, place_of(number, f), f)
            words = asked(pointers, lane, at, left, step)
            sums, first, before = zeros(), integer(0), integer(-1)
            while first < f.summed:
                start = arrived(shared, stage, turn)
                ptx_wgmma.fence()
                sums = multiply(sums, of_rows(word(start + own)), of_columns(word(start + columns_at)))
                ptx_wgmma.commit()
                ptx_wgmma.wait_for_all_but_last()
                if before >= 0:
                    give_back(shared, before, lane)
                before, first = stage, integer(first + line)
                stage, turn = following(stage, turn)
            ptx_wgmma.wait()
            give_back(shared, before, lane)
            stored(sums, words, pointers, scalars, lane, at, left, step)
            number = integer(number + f.step)

    def wgmma_boxes(maps, out, bias, residual, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        if thread == workers:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < workers:
            work(thread, shared, integer(ptx.block_x()), (out, bias, residual), (alpha, beta), f)
        elif thread == workers:
            ask(map_of(maps, integer(0)), map_of(maps, integer(1)), shared, integer(ptx.block_x()), f)

    data, real = ptx.pointer(v.dtype), ptx.REAL["f32"]
    return wgmma_boxes, (ptx_tma.TensorMaps(2), data, data, data, real, real, ptx.record(Integers, 32))


class OfBoxes(Planned[ConfigT]):
    """What the passes share: one tap, of whole chunks of 16 bytes, in 16 bits or TF32."""

    algorithm, algo = "wgmma_boxes", None

    def __init__(self, op: str, *, tf32: bool = False) -> None:
        self.op = op
        self._dtypes = ("f32",) if tf32 else ("f16", "bf16")
        if tf32:
            self.algorithm, self.math = "wgmma_boxes_tf32", "tf32"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if problem.dtype not in self._dtypes:
            return Support(False, f"dtype {problem.dtype} is not {' or '.join(self._dtypes)}")
        return super().supports(problem, device)


class WgmmaBoxes(OfBoxes[Tile]):
    """Forward and bwd_data."""

    plan = plan

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        return turned_bytes(problem, filters_last=True) if filters_last(problem) else 0

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config), plan.integers(problem, config, device)
        product = Launch(
            source=Source(_kernel, v, config.workers + WARP, config.blocks),
            grid=(integers.step, 1, 1),
            pointers=output_pointers(problem),
            scalars="f32",
            integers=integers,
            dynamic_shared_bytes=v.shared_bytes,
            maps=plan.maps(problem, config),
        )
        return [*(turn_inputs(problem, 0, filters_last=True) if filters_last(problem) else []), product]


FWD, BWD_DATA = ((WgmmaBoxes(op), WgmmaBoxes(op, tf32=True)) for op in ("conv_fwd", "conv_bwd_data"))
