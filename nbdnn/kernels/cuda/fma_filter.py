"""The kernel of bwd_filter: a tile of the gradient, output channels by (taps x input channels), summed over the pixels.

    1. which tile, of which group and part of the pixels this block computes
    2. what its columns are: a row each of (element, depth, height, width) by which a column moves from a pixel
    3. the product: a stage is 8 pixels of dy; as many as the block has threads are located at a time
    4. the tile to the gradient, finished, or as it is where it is a part of a split sum

A column is an element of a row of dw, in the order of its memory, so every tile but the last is full and stored in
whole rows, however few channels there are. An element of x lies where its pixel and its column say, added.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.fma_store import Store, tile_store
from nbdnn.kernels.cuda.fma_tile import STAGE_K, STAGES, Copies, Tile, copy_place, pipeline, shared_place


class Variant(NamedTuple):
    """What a kernel is compiled for. channels_last: whether the input channels of dw are neighbours, else its taps."""

    tile: Tile
    gradient: Copies
    image: Copies
    store: Store
    channels_last: bool


class Fields(NamedTuple):
    """The integers of a filter gradient, in elements; of three axes d, h, w each.

    row_elems: of dw, an output channel. A tap moves from a pixel by tap_first_ + tap * tap_step_, which go through the
    taps in the order of dw.
    """

    positions: int
    out_d: int
    out_h: int
    out_w: int
    group_k: int
    group_c: int
    row_elems: int
    tiles_n: int
    splits: int
    part_elems: int
    taps_d: int
    taps_h: int
    taps_w: int
    tap_first_d: int
    tap_first_h: int
    tap_first_w: int
    tap_step_d: int
    tap_step_h: int
    tap_step_w: int
    x_n: int
    x_c: int
    x_d: int
    x_h: int
    x_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    y_n: int
    y_c: int
    y_d: int
    y_h: int
    y_w: int
    stride_d: int
    stride_h: int
    stride_w: int
    pad_d: int
    pad_h: int
    pad_w: int


def filter_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Variant(*specialised_on)
    tile, integer, real, word = variant.tile, ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32
    tile_m, tile_n, stage_words = tile.m, tile.n, STAGES * tile.stage_bytes // 4
    pixel_words, column_words, threads = 5 * tile.threads, 4 * tile.n, tile.threads
    place_columns, put = _place_columns(tile, variant.channels_last), ptx_tile.STORE_SHARED[1]
    run = pipeline(tile, _copy_stage(variant), variant.gradient.by_k, variant.image.by_k)
    store = tile_store(tile, variant.store)

    def filter_tile(x, dy, dw, alpha, beta, f):
        # 1. Which tile.
        thread, group, part = integer(ptx.thread_x()), integer(ptx.block_y()), integer(ptx.block_z())
        first_m, first_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        first_m, first_n = integer(first_m * tile_m), integer(first_n * tile_n)

        # 2. What its columns are, and where its rows go.
        shared = ptx_tile.shared_address(ptx.cuda.shared.array(stage_words, real, 128))
        pixels = ptx_tile.shared_address(ptx.cuda.shared.array(pixel_words, real, 16))
        columns = ptx_tile.shared_address(ptx.cuda.shared.array(column_words, real, 16))
        rows = ptx_tile.shared_address(ptx.cuda.shared.array(tile_m, real, 16))
        place_columns(columns, thread, first_n, f)
        row = integer(thread)
        while row < tile_m:
            k = integer(first_m + row)
            to = integer(part * f.part_elems + (group * f.group_k + k) * f.row_elems + first_n)
            put(word(rows + row * 4), word(to if k < f.group_k else integer(-1)))
            row = integer(row + threads)

        # 3. The product of this part's stages.
        stages, _ = ptx.divided(integer(f.positions + (STAGE_K - 1)), integer(STAGE_K))
        share, _ = ptx.divided(integer(stages + f.splits - 1), f.splits)
        first = min(integer(part * share), stages)
        walk = ptx.cuda.local.array(1, integer)
        walk[0] = integer(0)
        starts = (integer(group * f.group_c * f.x_c), integer((group * f.group_k + first_m) * f.y_c))
        context = (
            x,
            dy,
            thread,
            pixels,
            columns,
            walk,
            integer(first * STAGE_K),
            starts,
            integer(f.group_k - first_m),
            f,
        )
        quarters = run(shared, thread, min(share, integer(stages - first)), context)

        # 4. To the gradient.
        place = (integer(f.row_elems - first_n), integer(1), integer(0))
        store(shared, rows, thread, quarters, (dw, dw, dw), (alpha, beta), place)

    data = ptx.pointer("f32")
    return filter_tile, (data, data, data, real, real, ptx.record(Fields, 32))


@cache
def _place_columns(tile: Tile, channels_last: bool):
    """Device function that fills the table of a tile's columns; one that does not exist leaves the depth everywhere."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, tile_n, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, tile.n, tile.threads
    put_four = ptx_tile.STORE_SHARED[4]

    @ptx.inline
    def placed(columns, thread, first, f):
        column = integer(thread)
        while column < tile_n:
            rest, c = integer(first + column), integer(0)
            if channels_last:
                rest, c = ptx.divided(rest, f.group_c)
            rest, s = ptx.divided(rest, f.taps_w)
            rest, r = ptx.divided(rest, f.taps_h)
            rest, t = ptx.divided(rest, f.taps_d)
            if not channels_last:
                c = rest
            d, h = integer(f.tap_first_d + t * f.tap_step_d), integer(f.tap_first_h + r * f.tap_step_h)
            w = integer(f.tap_first_w + s * f.tap_step_w)
            at = integer(c * f.x_c + d * f.x_d + h * f.x_h + w * f.x_w)
            if first + column >= f.row_elems:
                d = integer(f.extent_d + f.pad_d)
            put_four(word(columns + column * 16), (word(at), word(d), word(h), word(w)))
            column = integer(column + threads)

    return placed


@cache
def _place_pixel(tile: Tile):
    """Device function that locates a pixel: a row of five, where it reaches in x, on which axes' positions, and in dy.

    A pixel that does not exist gets -4 in dy, a multiple of 16 bytes like every source, and a depth in x from
    which no tap comes back.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, tile.threads
    put, put_four = ptx_tile.STORE_SHARED[1], ptx_tile.STORE_SHARED[4]

    @ptx.inline
    def placed(pixels, thread, pixel, starts, f):
        rest, w = ptx.divided(pixel, f.out_w)
        rest, h = ptx.divided(rest, f.out_h)
        n, d = ptx.divided(rest, f.out_d)
        y_at = integer(starts[1] + n * f.y_n + d * f.y_d + h * f.y_h + w * f.y_w)
        d, h = integer(d * f.stride_d - f.pad_d), integer(h * f.stride_h - f.pad_h)
        w = integer(w * f.stride_w - f.pad_w)
        at = integer(starts[0] + n * f.x_n + d * f.x_d + h * f.x_h + w * f.x_w)
        if pixel >= f.positions:
            d, y_at = f.extent_d, integer(-4)
        put_four(word(pixels + thread * 16), (word(at), word(d), word(h), word(w)))
        put(word(pixels + (threads * 16 + thread * 4)), word(y_at))

    return placed


@cache
def _copy_stage(variant: Variant):
    """Device function (context, shared address, is_first) that starts the copies of the next 8 pixels."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, variant.tile.threads
    a, b, b_bytes, place_pixel = variant.gradient, variant.image, variant.tile.b_bytes, _place_pixel(variant.tile)
    a_copy, a_place, a_count = ptx_tile.COPY_ASYNC[4 * a.words], copy_place(a, threads), a.count(threads)
    b_copy, b_place, b_count = ptx_tile.COPY_ASYNC[4 * b.words], copy_place(b, threads), b.count(threads)
    a_to, b_to, a_size, b_size = shared_place(a), shared_place(b), 4 * a.words, 4 * b.words
    load, load_four = ptx_tile.LOAD_SHARED[1], ptx_tile.LOAD_SHARED[4]
    a_along_k, nothing = a.along_k, integer(0)

    @ptx.inline
    def copy_gradient(context, to, first):
        _, dy, thread, pixels, _, _, _, _, rows, f = context
        for i in range(a_count):
            row, k = a_place(thread, i)
            at = integer(load(word(pixels + (threads * 16) + (first + k) * 4)))
            size = integer(a_size) if at >= 0 and row < rows else nothing
            a_copy(
                word(to + a_to(row, k)),
                ptx.address(dy, integer(at + (row * f.y_c if a_along_k else row))),
                size,
            )

    @ptx.inline
    def copy_image(context, to, first):
        x, _, thread, pixels, columns, _, _, _, _, f = context
        for i in range(b_count):
            column, k = b_place(thread, i)
            start, d, h, w = load_four(word(pixels + (first + k) * 16))
            move, by_d, by_h, by_w = load_four(word(columns + column * 16))
            d, h, w = (
                integer(integer(d) + integer(by_d)),
                integer(integer(h) + integer(by_h)),
                integer(integer(w) + integer(by_w)),
            )
            inside = d >= 0 and d < f.extent_d and h >= 0 and h < f.extent_h and w >= 0 and w < f.extent_w
            source = integer(integer(start) + integer(move))
            b_copy(word(to + b_to(column, k)), ptx.address(x, source), integer(b_size) if inside else nothing)

    @ptx.inline
    def copied(context, to, is_first):
        _, _, thread, pixels, _, walk, first_pixel, starts, _, f = context
        _, first = ptx.divided(walk[0], integer(threads))
        if first == 0:
            # A block's threads are past a barrier since they last read the table, which holds 8 stages or more.
            place_pixel(pixels, thread, integer(first_pixel + walk[0] + thread), starts, f)
            ptx.cuda.syncthreads()
        copy_gradient(context, to, first)
        copy_image(context, word(to + b_bytes), first)
        walk[0] = integer(walk[0] + STAGE_K)

    return copied
