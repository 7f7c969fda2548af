"""The kernel of forward and bwd_data: a tile of output pixels by output channels, read where the taps reach.

1. which tile, of which group, residue class and part of the sum this block computes
2. where its pixels lie, in a table in shared memory: a row each of (element, depth, height, width) in the input
3. the product: a stage is 8 channels of one tap; a tap moves every pixel by the same distance
4. the tile to the output, finished, or as it is where it is a part of a split sum
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.fma_store import Store, tile_store
from nbdnn.kernels.cuda.fma_tile import STAGE_K, STAGES, Copies, Tile, copy_place, pipeline, pitch_bytes


class Variant(NamedTuple):
    """What a kernel is compiled for. classes: whether the output positions fall into residue classes."""

    tile: Tile
    image: Copies
    filter: Copies
    store: Store
    classes: bool


class Fields(NamedTuple):
    """The integers of a gather, in elements; of three axes d, h, w each.

    count_ outputs are at out_ strides, a class has every step_-th of them. Output i of a class begins at the input
    position i * in_step_ + offset_ (with classes: offset_ is the pad), from where each tap is reach_ further. A class
    has every tap_step_-th tap. w_ strides: group, output and input channel within a group, taps.
    """

    images: int
    group_out: int
    group_in: int
    tiles_n: int
    splits: int
    part_elems: int
    count_d: int
    count_h: int
    count_w: int
    out_start: int
    out_g: int
    out_n: int
    out_c: int
    out_d: int
    out_h: int
    out_w: int
    step_d: int
    step_h: int
    step_w: int
    in_g: int
    in_n: int
    in_c: int
    in_d: int
    in_h: int
    in_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    in_step_d: int
    in_step_h: int
    in_step_w: int
    offset_d: int
    offset_h: int
    offset_w: int
    reach_d: int
    reach_h: int
    reach_w: int
    w_start: int
    w_g: int
    w_o: int
    w_i: int
    w_t: int
    w_r: int
    w_s: int
    taps_d: int
    taps_h: int
    taps_w: int
    dilation_d: int
    dilation_h: int
    dilation_w: int
    tap_step_d: int
    tap_step_h: int
    tap_step_w: int


# Where a block is in its sum: the next stage's channel, its tap on each axis, where that lies in the filter. They are
# counted on: a division in the loop would take registers that there are not.
_CHANNEL, _TAP_D, _TAP_H, _TAP_W, _FILTER_AT = range(5)


def gather_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Variant(*specialised_on)
    tile, integer, real = variant.tile, ptx.INTEGER[32], ptx.REAL["f32"]
    tile_m, tile_n, stage_words, table_words = tile.m, tile.n, STAGES * tile.stage_bytes // 4, 4 * tile.m
    lines, axis, place_rows = variant.image.lines(tile.threads), _axis(variant.classes), _place_rows(tile)
    put_four, word = ptx_tile.STORE_SHARED[4], ptx.cuda.types.uint32
    run, store = pipeline(tile, _copy_stage(variant)), tile_store(tile, variant.store)

    def gather_tile(image, w, out, bias, residual, alpha, beta, f):
        # 1. Which tile.
        thread, group = integer(ptx.thread_x()), integer(ptx.block_y())
        first_m, first_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        first_m, first_n = integer(first_m * tile_m), integer(first_n * tile_n)
        rest, part = ptx.divided(integer(ptx.block_z()), f.splits)
        rest, phase_w = ptx.divided(rest, min(f.step_w, f.count_w))
        phase_d, phase_h = ptx.divided(rest, min(f.step_h, f.count_h))
        axis_d = axis(phase_d, f.count_d, f.step_d, f.taps_d, f.offset_d, f.dilation_d, f.tap_step_d)
        axis_h = axis(phase_h, f.count_h, f.step_h, f.taps_h, f.offset_h, f.dilation_h, f.tap_step_h)
        axis_w = axis(phase_w, f.count_w, f.step_w, f.taps_w, f.offset_w, f.dilation_w, f.tap_step_w)
        if first_m >= f.images * axis_d[0] * axis_h[0] * axis_w[0]:
            return

        # 2. Where its pixels lie.
        shared = ptx_tile.shared_address(ptx.cuda.shared.array(stage_words, real, 16))
        table = ptx_tile.shared_address(ptx.cuda.shared.array(table_words, real, 16))
        rows = ptx_tile.shared_address(ptx.cuda.shared.array(tile_m, real, 16))
        taps = ptx_tile.shared_address(ptx.cuda.shared.array(4, real, 16))
        out_at = integer(f.out_start + part * f.part_elems + group * f.out_g + first_n * f.out_c)
        starts = (integer(group * f.in_g), out_at)
        place_rows(table, rows, thread, first_m, starts, (axis_d, axis_h, axis_w), (phase_d, phase_h, phase_w), f)
        taps_d, taps_h, taps_w = axis_d[2], axis_h[2], axis_w[2]
        w_first = integer(f.w_start + group * f.w_g + first_n * f.w_o)
        w_first = integer(w_first + axis_d[1] * f.w_t + axis_h[1] * f.w_r + axis_w[1] * f.w_s)
        if thread == 0:
            put_four(taps, (word(w_first), word(taps_h), word(taps_w), word(0)))
        ptx.cuda.syncthreads()

        # 3. The product of this part's stages. A class may have no tap, which must not divide.
        blocks, _ = ptx.divided(integer(f.group_in + (STAGE_K - 1)), integer(STAGE_K))
        stages = integer(taps_d * taps_h * taps_w * blocks)
        share, _ = ptx.divided(integer(stages + f.splits - 1), f.splits)
        first = min(integer(part * share), stages)
        walk, at = ptx.cuda.local.array(5, integer), ptx.cuda.local.array(lines, integer)
        tap, c = ptx.divided(first, blocks)
        walk[_CHANNEL] = integer(c * STAGE_K)
        tap, walk[_TAP_W] = ptx.divided(tap, max(taps_w, integer(1)))
        walk[_TAP_D], walk[_TAP_H] = ptx.divided(tap, max(taps_h, integer(1)))
        columns = integer(f.group_out - first_n)
        context = (image, w, thread, table, taps, at, walk, columns, f)
        quarters = run(shared, thread, min(share, integer(stages - first)), context)

        # 4. To the output.
        place = (columns, f.out_c, integer(group * f.group_out + first_n))
        store(shared, rows, thread, quarters, (out, bias, residual), (alpha, beta), place)

    data = ptx.pointer("f32")
    return gather_tile, (data, data, data, data, data, real, real, ptx.record(Fields, 32))


@cache
def _axis(classes: bool):
    """Device function -> (outputs, first tap, taps, input position of output 0 at the first tap) of a residue class."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def whole(phase, count, step, taps, offset, dilation, tap_step):
        return count, integer(0), taps, offset

    @ptx.inline
    def of_class(phase, count, step, taps, pad, dilation, tap_step):
        outputs, _ = ptx.divided(integer(count - phase + step - 1), step)
        _, wanted = ptx.divided(integer(phase + pad), step)
        first, residue, end = integer(0), integer(0), min(taps, tap_step)
        while first < end and residue != wanted:
            first = integer(first + 1)
            _, residue = ptx.divided(integer(first * dilation), step)
        met, _ = ptx.divided(integer(taps - first + tap_step - 1), tap_step)
        distance = integer(phase + pad - first * dilation)
        behind, _ = ptx.divided(integer(abs(distance)), step)
        start = behind if distance >= 0 else integer(-behind)
        return outputs, first, met if first < end else integer(0), start

    return of_class if classes else whole


@cache
def _place_rows(tile: Tile):
    """Device function that fills the table of a block's pixels, and where each of them lies in the output.

    A pixel that does not exist gets -1 there, and a depth in the input that no tap moves into it.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, tile_m, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, tile.m, tile.threads
    put, put_four = ptx_tile.STORE_SHARED[1], ptx_tile.STORE_SHARED[4]

    @ptx.inline
    def placed(table, rows, thread, first, starts, axes, phases, f):
        (count_d, _, _, start_d), (count_h, _, _, start_h), (count_w, _, _, start_w) = axes
        row = integer(thread)
        while row < tile_m:
            rest, w = ptx.divided(integer(first + row), count_w)
            rest, h = ptx.divided(rest, count_h)
            n, d = ptx.divided(rest, count_d)
            at_d, at_h = integer(d * f.in_step_d + start_d), integer(h * f.in_step_h + start_h)
            at_w = integer(w * f.in_step_w + start_w)
            at = integer(starts[0] + n * f.in_n + at_d * f.in_d + at_h * f.in_h + at_w * f.in_w)
            to_d, to_h = integer(d * f.step_d + phases[0]), integer(h * f.step_h + phases[1])
            to_w = integer(w * f.step_w + phases[2])
            to = integer(starts[1] + n * f.out_n + to_d * f.out_d + to_h * f.out_h + to_w * f.out_w)
            if n >= f.images:
                at_d, to = f.extent_d if f.reach_d > 0 else integer(-1), integer(-1)
            put_four(word(table + row * 16), (word(at), word(at_d), word(at_h), word(at_w)))
            put(word(rows + row * 4), word(to))
            row = integer(row + threads)

    return placed


@cache
def _reach(variant: Variant):
    """Device function (context): what the thread's pixels read at a tap, and where its first element of the filter is.

    A pixel that reads nothing there gets -4: copies of 16 bytes need a multiple of that even to copy none.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, tile, classes = ptx.INTEGER[32], ptx.cuda.types.uint32, variant.tile, variant.classes
    lines, load = variant.image.lines(tile.threads), ptx_tile.LOAD_SHARED[4]
    place, place_filter = (copy_place(copies, tile.threads) for copies in (variant.image, variant.filter))
    filter_along_k = variant.filter.along_k

    @ptx.inline
    def reached(context):
        _, _, thread, table, taps, at, walk, _, f = context
        t, r, s = walk[_TAP_D], walk[_TAP_H], walk[_TAP_W]
        to_d, to_h, to_w = integer(t * f.reach_d), integer(r * f.reach_h), integer(s * f.reach_w)
        shift = integer(to_d * f.in_d + to_h * f.in_h + to_w * f.in_w)
        for i in range(lines):
            row, _ = place(thread, i)
            start, d, h, w = load(word(table + row * 16))
            d, h, w = integer(integer(d) + to_d), integer(integer(h) + to_h), integer(integer(w) + to_w)
            inside = d >= 0 and d < f.extent_d and h >= 0 and h < f.extent_h and w >= 0 and w < f.extent_w
            at[i] = integer(integer(start) + shift) if inside else integer(-4)
        if classes:
            t, r, s = integer(t * f.tap_step_d), integer(r * f.tap_step_h), integer(s * f.tap_step_w)
        column, k = place_filter(thread, 0)
        own = column * f.w_o + k if filter_along_k else column + k * f.w_i
        w_first, _, _, _ = load(taps)
        walk[_FILTER_AT] = integer(integer(w_first) + t * f.w_t + r * f.w_r + s * f.w_s + own)

    return reached


@cache
def _copy_stage(variant: Variant):
    """Device function (context, shared address, is_first) that starts the copies of the next stage, and moves on."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, variant.tile.threads
    a, b, reach, b_bytes = variant.image, variant.filter, _reach(variant), variant.tile.b_bytes
    a_copy, a_place, a_count = ptx_tile.COPY_ASYNC[4 * a.words], copy_place(a, threads), a.count(threads)
    b_copy, b_place, b_count = ptx_tile.COPY_ASYNC[4 * b.words], copy_place(b, threads), b.count(threads)
    a_pitch, b_pitch, b_step = pitch_bytes(a.extent), pitch_bytes(b.extent), b.step(threads)
    a_next, a_along_k, b_along_k = int(a.lines(threads) > 1), a.along_k, b.along_k
    computed_here = ptx_tile.computed_here
    a_size, b_size, load = integer(4 * a.words), integer(4 * b.words), ptx_tile.LOAD_SHARED[4]

    @ptx.inline
    def copy_image(context, to):
        image, _, thread, _, _, at, walk, _, f = context
        for i in range(a_count):
            row, k = a_place(thread, i)
            c = integer(walk[_CHANNEL] + k)
            source = integer(at[i * a_next] + (c if a_along_k else c * f.in_c))
            size = a_size if c < f.group_in and at[i * a_next] >= 0 else integer(0)
            a_copy(word(to + k * a_pitch + row * 4), ptx.address(image, source), size)

    @ptx.inline
    def copy_filter(context, to):
        _, w, thread, _, _, _, walk, columns, f = context
        for i in range(b_count):
            column, k = b_place(thread, i)
            c = integer(walk[_CHANNEL] + k)
            further = walk[_CHANNEL] + i * b_step * f.w_o if b_along_k else (walk[_CHANNEL] + i * b_step) * f.w_i
            size = b_size if c < f.group_in and column < columns else integer(0)
            to_i = word(to + k * b_pitch + column * 4)
            b_copy(to_i, ptx.address(w, integer(walk[_FILTER_AT] + further)), size)

    @ptx.inline
    def copied(context, to, is_first):
        image, w, thread, table, taps, at, walk, columns, f = context
        context = (image, w, computed_here(thread), table, taps, at, walk, columns, f)
        if is_first or walk[_CHANNEL] == 0:
            reach(context)
        copy_image(context, to)
        copy_filter(context, word(to + b_bytes))
        walk[_CHANNEL] = integer(walk[_CHANNEL] + STAGE_K)
        if walk[_CHANNEL] >= f.group_in:
            _, taps_h, taps_w, _ = load(taps)
            walk[_CHANNEL] = integer(0)
            walk[_TAP_W] = integer(walk[_TAP_W] + 1)
            if walk[_TAP_W] == integer(taps_w):
                walk[_TAP_W] = integer(0)
                walk[_TAP_H] = integer(walk[_TAP_H] + 1)
                if walk[_TAP_H] == integer(taps_h):
                    walk[_TAP_H] = integer(0)
                    walk[_TAP_D] = integer(walk[_TAP_D] + 1)

    return copied
