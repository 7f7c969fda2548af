"""The way back of a Winograd filter gradient: dw = A^T M A, where M is the sum of its parts in their order.

A block makes the gradients of 32 input channels of 4 output channels, or of one where there are few of them, at one tap
along the depth:

    parts --a warp: m + 2 of the xi, a lane: 4 input channels--> shared [xi][4][32] --a thread: a pair of channels--> dw

Where there is one output channel, the lanes of the other three take every fourth part. Traffic: every part once, dw
written in whole lines in either layout. Source: own; the parts are those of `winograd_product.py`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cpu.cook_toom import filtering
from nbdnn.kernels.cuda.fma_tile import Tile
from nbdnn.kernels.cuda.winograd_product import parts_of_tile

CHANNELS = 32  # of a block


class Variant(NamedTuple):
    """Rows and columns of dy in a tile, the tile of M, output channels of a block (1 or 4), and dw.

    channels_last: whether dw's input channels are neighbours, else its taps.
    """

    m: int
    tile: Tile
    rows: int
    channels_last: bool
    epilogue: tuple[str, ...]


class Fields(NamedTuple):
    """The first as in `winograd_product.Fields`; blocks: of a row of dw; w_: its strides as its taps meet x."""

    share: int
    tiles: int
    tap_tiles: int
    tiles_n: int
    begin_1: int
    begin_2: int
    begin_3: int
    first_1: int
    first_2: int
    first_3: int
    stages_0: int
    stages_1: int
    stages_2: int
    stages_3: int
    c_start: int
    k: int
    c: int
    blocks: int
    w_start: int
    w_k: int
    w_c: int
    w_t: int
    w_r: int
    w_s: int


def output_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Variant(*specialised_on)
    integer, real, extent, rows = ptx.INTEGER[32], ptx.REAL["f32"], variant.m + 2, variant.rows
    sum_words, pairs = 4 * CHANNELS * extent * extent, CHANNELS * rows
    sums_of, transform = _sums(variant), _transform(variant)
    store = _store_channels(variant) if variant.channels_last else _store_taps(variant)

    def transform_output(products, dw, alpha, beta, f):
        thread, taps = integer(ptx.thread_x()), ptx.cuda.local.array(9, real)
        first_k, first_c = ptx.divided(integer(ptx.block_x()), f.blocks)
        first_k, first_c = integer(first_k * rows), integer(first_c * CHANNELS)
        sums = ptx_tile.shared_address(ptx.cuda.shared.array(sum_words, real, 16))
        sums_of(products, sums, thread, first_k, first_c, f)
        ptx.cuda.syncthreads()
        if thread < pairs:
            transform(sums, taps, thread)
        store(sums, taps, dw, thread, (alpha, beta), (first_k, first_c), f)

    data = ptx.pointer("f32")
    return transform_output, (data, data, real, real, ptx.record(Fields, 32))


@cache
def _sums(variant: Variant):
    """Device function (products, shared address, thread, first k, first c, fields) that adds up the parts.

    The parts of all xi of a warp are under way at once.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, real, word, extent = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32, variant.m + 2
    tile_m, tile_n, elements, planes = variant.tile.m, variant.tile.n, variant.tile.m * variant.tile.n, extent * extent
    load, floats, bits, parts_of = ptx.LOAD_CONSTANT[4], ptx_tile.float_of, ptx_tile.words_of, parts_of_tile()
    put, rows, slices, words = ptx_tile.STORE_SHARED[4], variant.rows, 4 // variant.rows, 4 * extent

    @ptx.inline
    def summed(products, sums, thread, k, c, f):
        starts, counts = ptx.cuda.shared.array(planes, integer), ptx.cuda.shared.array(planes, integer)
        row, in_row = ptx.divided(k, integer(tile_m))
        column, in_column = ptx.divided(c, integer(tile_n))
        if thread < planes:
            in_plane = integer(integer(ptx.block_y()) * f.tap_tiles + row * f.tiles_n + column)
            part, count = parts_of(integer(thread * f.tiles + in_plane), f)
            starts[thread] = integer(f.c_start + part * elements + in_row * tile_n + in_column)
            counts[thread] = count
        ptx.cuda.syncthreads()
        warp, lane = integer(thread >> 5), integer(thread & 31)
        of_row, slice_ = (integer(lane >> 3), integer(0)) if rows == 4 else (integer(0), integer(lane >> 3))
        at, count = ptx.cuda.local.array(extent, integer), ptx.cuda.local.array(extent, integer)
        total, most, part = ptx.cuda.local.array(words, real), integer(0), slice_
        for i in range(extent):
            at[i] = integer(starts[integer(warp * extent + i)] + of_row * tile_n + (lane & 7) * 4)
            count[i] = counts[integer(warp * extent + i)]
            most = max(most, count[i])
        for i in range(words):
            total[i] = real(0.0)
        while part < most:
            for i in range(extent):
                # Beyond its last part that one is read once more, and not counted: no branch, all loads at once.
                within = max(integer(0), min(part, integer(count[i] - 1)))
                first, second, third, fourth = load(products, integer(at[i] + within * elements))
                if part < count[i]:
                    total[4 * i] = total[4 * i] + floats(first)
                    total[4 * i + 1] = total[4 * i + 1] + floats(second)
                    total[4 * i + 2] = total[4 * i + 2] + floats(third)
                    total[4 * i + 3] = total[4 * i + 3] + floats(fourth)
            part = integer(part + slices)
        for i in range(extent):
            four = bits((total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]))
            put(word(sums + ((warp * extent + i) * 32 + lane) * 16), four)

    return summed


@cache
def _transform(variant: Variant):
    """Device function (address of the sums, taps, thread): the taps of a pair of channels, whose xi lie by kinds."""
    from nbdnn.kernels.cuda import ptx, ptx_products, ptx_tile

    integer, real, word, last = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32, variant.m + 1
    planes, slices = (last + 1) * (last + 1), 4 // variant.rows
    load, floats, transform = (
        ptx_tile.LOAD_SHARED[1],
        ptx_tile.float_of,
        ptx_products.sandwich(filtering(3, variant.m).output),
    )

    @ptx.inline
    def summed(at, xi):
        total = floats(load(word(at + xi * (16 * CHANNELS))))
        for slice_ in range(1, slices):
            total = total + floats(load(word(at + (xi * 4 + slice_) * (4 * CHANNELS))))
        return total

    @ptx.inline
    def transformed(sums, taps, thread):
        source, at = ptx.cuda.local.array(planes, real), integer(sums + thread * 4)
        for i in range(last):
            for j in range(last):
                source[i * (last + 1) + j] = summed(at, i * last + j)
            source[i * (last + 1) + last] = summed(at, last * last + i)
        for j in range(last + 1):
            source[last * (last + 1) + j] = summed(at, last * (last + 1) + j)
        transform(source, taps)

    return transformed


@cache
def _store_channels(variant: Variant):
    """Device function (sums, taps, dw, thread, scalars, (first k, first c), fields) where channels are neighbours."""
    from nbdnn.kernels.cuda import epilogue, ptx

    integer, pairs, store = ptx.INTEGER[32], CHANNELS * variant.rows, epilogue.store("f32", variant.epilogue)

    @ptx.inline
    def stored(sums, taps, dw, thread, scalars, first, f):
        k, c = integer(first[0] + (thread >> 5)), integer(first[1] + (thread & 31))
        if thread < pairs and k < f.k and c < f.c:
            at = integer(f.w_start + k * f.w_k + c * f.w_c + integer(ptx.block_y()) * f.w_t)
            for r in range(3):
                for s in range(3):
                    to = integer(at + r * f.w_r + s * f.w_s)
                    store(taps[r * 3 + s], scalars[0], scalars[1], dw, to, dw, k, dw)

    return stored


@cache
def _store_taps(variant: Variant):
    """The same where taps are neighbours, 9 of each pair: through shared memory, in the order of dw."""
    from nbdnn.kernels.cuda import epilogue, ptx, ptx_tile

    integer, word, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, 32 * (variant.m + 2)
    pairs, tap_words = CHANNELS * variant.rows, 9 * CHANNELS * variant.rows
    put, get, bits, floats = ptx_tile.STORE_SHARED[1], ptx_tile.LOAD_SHARED[1], ptx_tile.word_of, ptx_tile.float_of
    store = epilogue.store("f32", variant.epilogue)

    @ptx.inline
    def stored(sums, taps, dw, thread, scalars, first, f):
        ptx.cuda.syncthreads()  # the sums are read
        if thread < pairs:
            for tap in range(9):
                put(word(sums + (thread * 9 + tap) * 4), bits(taps[tap]))
        ptx.cuda.syncthreads()
        element, start = thread, integer(f.w_start + integer(ptx.block_y()) * f.w_t)
        while element < tap_words:
            pair, tap = ptx.divided(element, integer(9))
            r, s = ptx.divided(tap, integer(3))
            k, c = integer(first[0] + (pair >> 5)), integer(first[1] + (pair & 31))
            if k < f.k and c < f.c:
                to = integer(start + k * f.w_k + c * f.w_c + r * f.w_r + s * f.w_s)
                value = floats(get(word(sums + element * 4)))
                store(value, scalars[0], scalars[1], dw, to, dw, k, dw)
            element = integer(element + threads)

    return stored
