"""Gradient of the filters of few channels a group in 16 bits, channels-last: pixels and dy by TMA boxes.

    dw[k, c, r, s] = sum over n, p and q of  dy[n, p, q, k] * x[n, p*u + r*d - pad, q*u + s*d - pad, c]

    asks for boxes    64 channels of a tile's pixels with their halo, and of its dy: a ring of both   first of the last
    works             a unit of channels, or a part of it, down every strip of 16 outputs a row       warp; the others
    adds              the blocks' sums, always in the same order (`add_parts.py`)                     another launch

Blocks stay, each with a slab of channels, and keep the sums of all taps of theirs in registers. A row of 16 pixels is
loaded once for each tap of a row, turned (`ldmatrix`), and multiplied with dy of all rows of outputs that see it. Where
a tile hangs over the outputs, x is made zero beside zeros of dy: it may be infinite. Of two groups of four that share
eight channels all 64 products are made, of which two quarters are theirs.

Traffic: x and dy once from memory, the halo of a tile again from cache; the sums of a block once. Accumulates in
float32. Source: own.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_ring
from nbdnn.kernels.cuda import grouped_plan as plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.conv_grouped_boxes import GroupedBoxes
from nbdnn.kernels.cuda.grouped_plan import Integers
from nbdnn.kernels.cuda.grouped_variant import (
    ACROSS,
    LINE_BYTES,
    WARP,
    WARPS,
    Boxes,
    OfFilter,
)
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.problem_conv import ConvProblem

_WORKERS = WARP * WARPS


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_grouped, ptx_matrix, ptx_tile, ptx_tma

    v = OfFilter(*specialised_on)
    integer, word, boxes = ptx.INTEGER[32], ptx.WORD, v.boxes
    stride_h, stride_w, rows, along = v.down.stride, v.across.stride, boxes.rows, boxes.along
    images, stages = boxes.images, boxes.stages
    tile_rows, tile_columns, strips = v.tile_rows, v.tile_columns, boxes.down * along
    stage_bytes, dy_at, image_bytes = v.stage_bytes, v.image_bytes, v.row_bytes * v.box_rows
    across = ACROSS // images
    down_bytes, along_bytes = rows * stride_h * v.row_bytes, across * stride_w * LINE_BYTES
    out_down_bytes, out_image_bytes = rows * tile_columns * LINE_BYTES, tile_rows * tile_columns * LINE_BYTES
    width, of_unit, roles, dilation_w, count = v.width, v.unit, v.roles, v.across.dilation, v.sums
    is_narrow, is_two, of_slab, units = v.unit == 8, v.is_quartered, v.slab, v.slab // v.unit
    copy_box, map_of = ptx_tma.COPY_BOX[4], ptx_tma.map_of
    zeros, gathered = ptx_matrix.zeros(count), ptx_grouped.gathered(v.gather, count)
    scattered = ptx_grouped.scattered(v.pairs)
    ring = boxes_ring.Ring(stages, stage_bytes, stage_bytes, stages * stage_bytes, WARPS)
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)
    place = boxes_ring.place_of(images, tile_rows, tile_columns)

    @ptx.inline
    def ask(x, dy, shared, number, channel, f):
        stage, turn = integer(0), integer(1)
        while number < f.tiles:
            n, row, column = place(number, f)
            to, full = claim(shared, stage, turn)
            corner = (channel, integer(column * stride_w - f.pad_w), integer(row * stride_h - f.pad_h), n)
            copy_box(to, x, full, corner, ())
            copy_box(word(to + dy_at), dy, full, (channel, column, row, n), ())
            number = integer(number + f.step)
            stage, turn = following(stage, turn)

    @ptx.inline
    def exists(column, f):
        """Halves of a word of two neighbouring columns, the bits of those that are outputs."""
        low = word(0xFFFF) if column < f.out_columns else word(0)
        high = word(0xFFFF0000) if column + 1 < f.out_columns else word(0)
        return word(low | high)

    @ptx.inline
    def work(thread, shared, number, part, slab_first, parts, f):
        warp, lane = integer(thread >> 5), integer(thread & (WARP - 1))
        unit, role = ptx.divided(warp, integer(roles))
        g, t, second = integer(lane >> 2), integer(lane & 3), integer(lane >> 4)
        # `role` says which eight filters; of a unit of 32 which 16 of them, and which 16 channels.
        channels, filters = integer(0), integer(role * 8)
        if is_two:
            channels, filters = integer((role >> 1) * 16), integer((role & 1) * 16)
        # The lane's line, in the first image or the second, and its piece of it, of x and of dy.
        column, of_image, out_image = integer(lane & 15), integer(0), integer(0)
        if images > 1:
            column = integer(lane & 7)
            of_image = integer((lane >> 3 & 1) * image_bytes)
            out_image = integer((lane >> 3 & 1) * out_image_bytes)
        pixel, chunk = integer(column * stride_w), integer((unit * of_unit + channels) >> 3)
        if is_narrow:
            pixel = integer(pixel + second * dilation_w)
        else:
            chunk = integer(chunk + second)
        piece = integer((unit * of_unit + filters) >> 3)
        if is_two:
            piece = integer(piece + second)
        of_dy = integer(dy_at + out_image + column * LINE_BYTES + ((piece ^ (column & 7)) << 4))
        sums = zeros()
        stage, turn = integer(0), integer(0)
        while number < f.tiles:
            n, row, first_column = place(number, f)
            start = arrived(shared, stage, turn)
            strip = integer(0) if unit < units else integer(strips)  # there may be more warps than units
            while strip < strips:
                down, beside = ptx.divided(strip, integer(along))
                box = word(start + of_image + down * down_bytes + beside * along_bytes)
                dy = word(start + of_dy + down * out_down_bytes + beside * (across * LINE_BYTES))
                q = integer(first_column + beside * across + 2 * t)
                low, left = exists(q, f), integer(f.out_rows - (row + down * rows))
                high = low if images > 1 else exists(integer(q + 8), f)
                if images > 1 and n + 1 >= f.images:
                    high = word(0)
                sums = gathered(sums, box, pixel, chunk, dy, (low, high), left)
                strip = integer(strip + 1)
            give_back(shared, stage, lane)
            number = integer(number + f.step)
            stage, turn = following(stage, turn)
        c, k = integer(slab_first + channels + g), integer(slab_first + filters + 2 * t)
        c, k = integer(c + unit * of_unit), integer(k + unit * of_unit)
        group, of_group = ptx.divided(c, integer(width))
        group_of_filter, o = ptx.divided(k, integer(width))
        is_own = unit < units and group == group_of_filter  # of four channels, of which a warp has two groups
        alive = integer(1) if is_own and c < f.channels else integer(0)
        first = integer(part * f.part_elems + f.w_start + group * f.w_group + o * f.w_out + of_group * f.w_in)
        scattered(parts, first, alive, (f.w_r, f.w_s, f.w_in, f.w_out), sums)

    def grouped_boxes_filter(maps, parts, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        part, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        first = integer(slab * of_slab)
        if thread == _WORKERS:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < _WORKERS:
            work(thread, shared, part, part, first, parts, f)
        elif thread == _WORKERS:
            ask(map_of(maps, integer(0)), map_of(maps, integer(1)), shared, part, first, f)

    return grouped_boxes_filter, (ptx_tma.TensorMaps(2), ptx.pointer("f32"), ptx.record(Integers, 32))


class GroupedBoxesFilter(GroupedBoxes):
    """The same of filters."""

    def __init__(self) -> None:
        super().__init__("conv_bwd_filter")

    def workspace_bytes(self, problem: ConvProblem, config: Boxes, device: Gpu) -> int:
        return plan.step(problem, config, device) * part_elems(problem) * 4

    def launches(self, problem: ConvProblem, config: Boxes, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config), plan.integers(problem, config, device)
        assert isinstance(v, OfFilter)
        product = Launch(
            source=Source(_kernel, v, v.threads, config.blocks),
            grid=(integers.step * integers.slabs, 1, 1),
            pointers=(WORKSPACE,),
            scalars="",
            integers=integers,
            dynamic_shared_bytes=v.shared_bytes,
            maps=(plan.image_map(problem, v.box), plan.out_map(problem, v.out_box)),
        )
        return [product, add_parts(problem, integers.step)]


BWD_FILTER = GroupedBoxesFilter()
