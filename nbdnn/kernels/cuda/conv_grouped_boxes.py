"""Convolution of few channels a group in 16 bits, channels-last, forward and bwd_data: pixels by TMA boxes.

    y[n, p, q, k] = sum over r, s and c of k's group of  x[n, p*u + r*d - pad, q*u + s*d - pad, c] * w[k, c, r, s]

    asks for boxes    64 channels of the pixels of a tile with their halo, zeros beside the image     first of the last
    works             a unit of channels down a strip: 16 outputs a row, by matrix units              warp; the others

Blocks stay, each with a slab of channels, whose filters its threads keep in registers, and walk over tiles: while one
is multiplied, the box of the next is on its way. A row of 16 pixels is loaded once for each tap of a row (`ldmatrix`;
lines of a pixel are swizzled, so that 16 bytes of eight pixels meet every bank once) and counts for all rows of outputs
that see it. Groups of four share eight channels: each has a tile of filters, half of which is empty, and meets zeros in
the place of the other's channels, which may be infinite. Finished outputs pass through shared memory, and leave as
whole lines.

bwd_data is the same on dy with the filter reversed and turned. Of stride 2 even and odd columns meet different taps of
the same pixels, and have sums of their own; so do rows. Traffic: x and y once from memory, the halo of a tile
again from cache. Accumulates in float32, by rows, then taps of a row. Source: own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_ring
from nbdnn.kernels.cuda import grouped_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.grouped_plan import Integers
from nbdnn.kernels.cuda.grouped_variant import (
    ACROSS,
    CHUNKS,
    LINE_BYTES,
    WARP,
    WARPS,
    Boxes,
    Variant,
)
from nbdnn.kernels.cuda.launch import Launch, gather_pointers
from nbdnn.kernels.cuda.planned import Planned
from nbdnn.problem_conv import ConvProblem

_WORKERS = WARP * WARPS


class Target(NamedTuple):
    """Where a lane's outputs of a strip lie: out[at] and out[at_second] in its first row; which rows exist, 0 to
    rows - 1 and rows_second - 1; bias: of its filters, tile by tile."""

    out: Any
    residual: Any
    at: int
    at_second: int
    row_step: int
    rows: int
    rows_second: int
    bias: tuple[float, ...]
    alpha: float
    beta: float


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_grouped, ptx_matrix, ptx_tile, ptx_tma

    v = Variant(*specialised_on)
    integer, word, real, boxes = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"], v.boxes
    down_axis, across_axis, rows, along = v.down, v.across, boxes.rows, boxes.along
    images, stages, dilation_w = boxes.images, boxes.stages, across_axis.dilation
    stride_h, stride_w, phases_h, phases_w = down_axis.stride, across_axis.stride, down_axis.phases, across_axis.phases
    tile_rows, tile_columns, strips, pixels = v.tile_rows, v.tile_columns, boxes.down * along, v.pixels
    row_bytes, stage_bytes, image_bytes = v.row_bytes, v.stage_bytes, v.row_bytes * v.box_rows
    output_bytes, outputs_at = pixels * LINE_BYTES, stages * stage_bytes
    down_bytes, along_bytes = rows // phases_h * stride_h * row_bytes, ACROSS // images * stride_w * LINE_BYTES
    strip_columns, half_columns = ACROSS // images * phases_w, 8 * phases_w
    width, of_unit, units, splits, shares = v.width, v.unit, v.units, v.splits, v.shares
    unit_chunks, tiles, slab_chunks, of_slab = of_unit // 8, v.tiles, v.slab // 8, v.slab
    is_masked, is_narrow, is_two = width < 8, v.unit == 8, v.tiles == 2
    copy_box, map_of, meet = ptx_tma.COPY_BOX[4], ptx_tma.map_of, ptx_tma.MEET[_WORKERS]
    load_words = ptx_grouped.filter_words(v.dtype, v.places, v.tiles)
    walked, staged = ptx_grouped.walked(v.walk), ptx_grouped.staged(v.end)
    of_phase = v.sums // phases_w
    part_one = ptx_matrix.part(v.sums, 0, of_phase)
    part_two = ptx_matrix.part(v.sums, v.sums - of_phase, of_phase)
    load_shared, store = ptx_tile.LOAD_SHARED[4], ptx.STORE[4]
    widen, has_bias = ptx.WIDEN[v.dtype], "bias" in v.epilogue
    ring = boxes_ring.Ring(stages, stage_bytes, stage_bytes, outputs_at + 2 * output_bytes, WARPS, is_idle=True)
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)
    place = boxes_ring.place_of(images, tile_rows, tile_columns)

    @ptx.inline
    def ask(source, shared, number, channel, f):
        stage, turn = integer(0), integer(1)
        while number < f.tiles:
            n, row, column = place(number, f)
            to, full = claim(shared, stage, turn)
            first_row, _ = ptx.divided(row, integer(phases_h))
            first_column, _ = ptx.divided(column, integer(phases_w))
            corner = (channel, integer(first_column * stride_w - f.pad_w), integer(first_row * stride_h - f.pad_h), n)
            copy_box(to, source, full, corner, ())
            number = integer(number + f.step)
            stage, turn = following(stage, turn)

    @ptx.inline
    def filters(w, first, split, lane, f):
        """The lane's words of its unit's filters; first: the unit's first channel."""
        group, _ = ptx.divided(first, integer(width))
        g, t = integer(lane >> 2), integer(lane & 3)
        alive = integer(1) if first < f.channels else integer(0)
        one = integer(f.w_start + group * f.w_group)
        steps = (f.w_r, f.w_s, f.w_in)
        if is_masked:
            of_first = integer(one + g * f.w_out + (t & 1) * 2 * f.w_in)
            second = integer(of_first + f.w_group)
            wanted = alive if g < width else integer(0)
            later = wanted if first + width < f.channels else integer(0)
            exist = (wanted if t < 2 else integer(0), integer(0) if t < 2 else later)
            return load_words(w, (of_first, second), exist, steps)
        one = integer(one + (split * (8 * tiles) + g) * f.w_out + 2 * t * f.w_in)
        if is_two:
            return load_words(w, (one, integer(one + 8 * f.w_out)), (alive, alive), steps)
        return load_words(w, (one,), (alive,), steps)

    @ptx.inline
    def two_of_bias(bias, channel, f):
        if has_bias:
            at = channel if channel + 1 < f.channels else integer(0)
            return widen(ptx.load_constant(bias, at)), widen(ptx.load_constant(bias, integer(at + 1)))
        return real(0.0), real(0.0)

    @ptx.inline
    def store_tile(outputs, thread, first, n, row, column, out, f):
        """Whole lines, eight threads each."""
        chunk, pixel = integer(thread & (CHUNKS - 1)), integer(thread >> 3)
        channel = integer(first + chunk * 8)
        while pixel < pixels:
            down, across = ptx.divided(pixel, integer(tile_columns))
            beside = integer(0)
            if images > 1:
                beside, down = ptx.divided(down, integer(tile_rows))
            p, q, i = integer(row + down), integer(column + across), integer(n + beside)
            if p < f.out_rows and q < f.out_columns and i < f.images and chunk < slab_chunks and channel < f.channels:
                words = load_shared(word(outputs + pixel * LINE_BYTES + ((chunk ^ (pixel & (CHUNKS - 1))) << 4)))
                store(out, integer(((i * f.out_rows + p) * f.out_columns + q) * f.channels + channel), words)
            pixel = integer(pixel + _WORKERS // CHUNKS)

    @ptx.inline
    def finish(sums, phase, lane_of, where, given, f):
        """A strip's sums of one phase of columns, to the outputs in shared memory."""
        (g, t, filter, of_line, exists, shift), (outputs, n, p, column, row, across) = lane_of, where
        out, _, residual, alpha, beta = given
        beside = integer(g * phases_w + phase)
        q, row_step = integer(column + beside), integer(f.out_columns * f.channels)
        left = integer(f.out_rows - p) if filter < f.channels and exists > 0 else integer(0)
        of_first = left if q < f.out_columns else integer(0)
        at = integer(((n * f.out_rows + p) * f.out_columns + q) * f.channels + filter)
        if images > 1:
            of_second = of_first if n + 1 < f.images else integer(0)
            at_second = integer(at + f.out_rows * row_step)
        else:
            of_second = left if q + half_columns < f.out_columns else integer(0)
            at_second = integer(at + half_columns * f.channels)
        line = integer(row * tile_columns + across * strip_columns + beside)
        start = word(outputs + line * LINE_BYTES + ((of_line ^ (beside & (CHUNKS - 1))) << 4) + t * 4)
        goal = Target(out, residual, at, at_second, row_step, of_first, of_second, shift, alpha, beta)
        if is_masked:
            staged((start, word(start + 8)), exists, sums, goal)
        elif is_two:
            staged((start, word(start ^ 16)), exists, sums, goal)
        else:
            staged((start,), exists, sums, goal)

    @ptx.inline
    def work(thread, shared, number, slab_first, w, given, f):
        out, bias = given[0], given[1]
        warp, lane = integer(thread >> 5), integer(thread & (WARP - 1))
        share, own = ptx.divided(warp, integer(units))
        unit, split = ptx.divided(own, integer(splits))
        first = integer(slab_first + unit * of_unit)
        weights = filters(w, first, split, lane, f)
        g, t, second = integer(lane >> 2), integer(lane & 3), integer(lane >> 4)
        # The lane's row of a: its pixel, in the first image or the second, and its piece of the line.
        pixel, of_image = integer(lane & 15), integer(0)
        if images > 1:
            pixel, of_image = integer(lane & 7), integer((lane >> 3 & 1) * image_bytes)
        pixel, chunk = integer(pixel * stride_w), integer(unit * unit_chunks)
        if is_narrow:
            pixel = integer(pixel + second * dilation_w)
        else:
            chunk = integer(chunk + second)
        mask = word(0xFFFFFFFF) if t < 2 else word(0)
        # Its filters, of two pixels, the second in the second image or eight further on.
        filter = integer(first + split * (8 * tiles) + 2 * t)
        of_line = integer(unit * unit_chunks + split * tiles)
        exists = integer(1) if not is_masked or t < 2 else integer(0)
        one = two_of_bias(bias, filter, f)
        if is_two:
            apart = integer(4 if is_masked else 8)
            two = two_of_bias(bias, integer(filter + apart), f)
            shift = (one[0], one[1], two[0], two[1])
        else:
            shift = one
        stage, turn, flip = integer(0), integer(0), integer(0)
        while number < f.tiles:
            n, row, column = place(number, f)
            outputs = word(shared + outputs_at + flip * output_bytes)
            start = arrived(shared, stage, turn)
            strip = share if share < shares else integer(strips)  # there may be more warps than units
            while strip < strips:
                down, across = ptx.divided(strip, integer(along))
                box = word(start + of_image + down * down_bytes + across * along_bytes)
                sums = walked(box, pixel, chunk, mask, weights)
                p = integer(row + down * rows)
                lane_of = (g, t, filter, of_line, exists, shift)
                where = (outputs, n, p, integer(column + across * strip_columns), integer(down * rows), across)
                finish(part_one(sums), integer(0), lane_of, where, given, f)
                if phases_w > 1:
                    finish(part_two(sums), integer(1), lane_of, where, given, f)
                strip = integer(strip + shares)
            give_back(shared, stage, lane)
            meet()
            store_tile(outputs, thread, slab_first, n, row, column, out, f)
            number, flip = integer(number + f.step), integer(flip ^ 1)
            stage, turn = following(stage, turn)

    def grouped_boxes(maps, w, out, bias, residual, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        number, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        first = integer(slab * of_slab)
        if thread == _WORKERS:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < _WORKERS:
            work(thread, shared, number, first, w, (out, bias, residual, alpha, beta), f)
        elif thread == _WORKERS:
            ask(map_of(maps, integer(0)), shared, number, first, f)

    data = ptx.pointer(v.dtype)
    return grouped_boxes, (ptx_tma.TensorMaps(1), data, data, data, data, real, real, ptx.record(Integers, 32))


class GroupedBoxes(Planned[Boxes]):
    """As many channels in as out a group, 4 to 64, by TMA."""

    algorithm = "grouped_boxes"
    plan = plan

    def __init__(self, op: str) -> None:
        self.op = op

    def launches(self, problem: ConvProblem, config: Boxes, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config), plan.integers(problem, config, device)
        return [
            Launch(
                source=Source(_kernel, v, v.threads, config.blocks),
                grid=(integers.step * integers.slabs, 1, 1),
                pointers=gather_pointers(problem)[1:],
                scalars="f32",
                integers=integers,
                dynamic_shared_bytes=v.shared_bytes,
                maps=(plan.image_map(problem, v.box),),
            )
        ]


FWD, BWD_DATA = GroupedBoxes("conv_fwd"), GroupedBoxes("conv_bwd_data")
