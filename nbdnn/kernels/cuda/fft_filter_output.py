"""The way back of a filter gradient by Fourier transforms: dw from the products of the spectra.

A block makes the gradients of 16 input channels of one output channel. A thread has a column of the spectrum of one: it
puts the three products of each frequency together, transforms back along the column and keeps what taps there are. Then
a thread has a row of taps of a channel, and sums over the columns what its taps take of each.

Traffic: every product once. Source: own; what the planes are, `fft_filter_input.py` says.
"""

from __future__ import annotations

from functools import cache
from math import cos, pi, sin
from typing import NamedTuple

from nbdnn.kernels.cuda.fft_filter_input import COLUMNS, EXTENT
from nbdnn.kernels.cuda.fma_tile import Tile

CHANNELS = 16  # of a block
THREADS = CHANNELS * COLUMNS
# Both operands' spectra come twice as large as they are, and a transform and its inverse as one are 32 * 32 times.
_SCALE = 1.0 / (2 * 2 * EXTENT * EXTENT)


class Variant(NamedTuple):
    """Taps of dw, the products' tile, and for how many planes a block makes them, of which a column has a multiple."""

    taps_h: int
    taps_w: int
    tile: Tile
    planes: int
    epilogue: tuple[str, ...]


class Fields(NamedTuple):
    """Products begin at start: tiles of them in rows of tiles_n, `tiles` for each plane, with a gap of one tile between
    blocks. blocks: of a row of dw; w_: its strides as its taps meet x."""

    start: int
    tiles: int
    tiles_n: int
    k: int
    c: int
    blocks: int
    w_start: int
    w_k: int
    w_c: int
    w_r: int
    w_s: int


def output_kernel(*specialised_on):
    from nbdnn.kernels.cuda import epilogue, ptx, ptx_fourier, ptx_tile

    v = Variant(*specialised_on)
    integer, real, word = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32
    tile_m, tile_n, elements, planes = v.tile.m, v.tile.n, v.tile.m * v.tile.n, v.planes
    taps_h, taps_w = v.taps_h, v.taps_w
    put, get, floats, bits = ptx_tile.STORE_SHARED[2], ptx_tile.LOAD_SHARED[2], ptx_tile.float_of, ptx_tile.words_of
    fetch, join_columns, combine = _fetched(elements, planes), _join_columns(), ptx_fourier.combined(_across(taps_w))
    store, shared_words = epilogue.store("f32", v.epilogue), 2 * COLUMNS * taps_h * CHANNELS

    def transform_output(products, dw, alpha, beta, f):
        column, lane = ptx.divided(integer(ptx.thread_x()), integer(CHANNELS))
        shared = ptx_tile.shared_address(ptx.cuda.shared.array(shared_words, real, 16))
        k, part = ptx.divided(integer(ptx.block_x()), f.blocks)
        c = integer(part * CHANNELS)
        row, in_row = ptx.divided(k, integer(tile_m))
        tile, in_tile = ptx.divided(c, integer(tile_n))
        before = integer(column * (3 * EXTENT * f.tiles + 3 * EXTENT // planes) + row * f.tiles_n + tile)
        at = integer(f.start + before * elements + in_row * tile_n + in_tile + lane)
        re, im = ptx.cuda.local.array(EXTENT, real), ptx.cuda.local.array(EXTENT, real)
        fetch(products, re, im, at, column, f)
        if column == 0:
            join_columns(re, im)
        ptx_fourier.fourier(im, re)
        for r in range(taps_h):
            put(word(shared + ((column * taps_h + r) * CHANNELS + lane) * 8), bits((re[r], im[r])))
        ptx.cuda.syncthreads()
        c = integer(c + lane)
        if column < taps_h and c < f.c:
            half, taps = ptx.cuda.local.array(EXTENT, real), ptx.cuda.local.array(taps_w, real)
            for i in range(COLUMNS):
                first, second = get(word(shared + ((i * taps_h + column) * CHANNELS + lane) * 8))
                half[2 * i] = floats(first)
                half[2 * i + 1] = floats(second)
            combine(half, taps)
            to = integer(f.w_start + k * f.w_k + c * f.w_c + column * f.w_r)
            for s in range(taps_w):
                store(taps[s], alpha, beta, dw, integer(to + s * f.w_s), dw, k, dw)

    data = ptx.pointer("f32")
    return transform_output, (data, data, real, real, ptx.record(Fields, 32))


@cache
def _fetched(elements: int, planes: int):
    """Device function (products, re, im, first product, column, fields): a column's spectrum."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def product(products, at, plane, f):
        return ptx.load_constant(products, integer(at + plane * elements * f.tiles + plane // planes * elements))

    @ptx.inline
    def fetched(products, re, im, at, column, f):
        for j in range(EXTENT):
            re[j] = product(products, at, 3 * j, f)
            im[j] = product(products, at, 3 * j + 1, f)
        for j in range(EXTENT):
            if j % COLUMNS != 0 or column != 0:
                third, first, second = product(products, at, 3 * j + 2, f), re[j], im[j]
                re[j] = first + second
                im[j] = third + (first - second)

    return fetched


@cache
def _join_columns():
    """Device function (re, im): what `_split_columns` took apart, one column whose transform back is real numbers, and
    i times those of the other."""
    from nbdnn.kernels.cuda import ptx

    @ptx.inline
    def joined(re, im):
        for j in range(1, COLUMNS):
            a_re, a_im, b_re, b_im = re[j], im[j], re[EXTENT - j], im[EXTENT - j]
            re[j] = a_re - b_im
            im[j] = a_im + b_re
            re[EXTENT - j] = a_re + b_im
            im[EXTENT - j] = b_re - a_im

    return joined


def _across(taps: int) -> tuple[tuple[float, ...], ...]:
    """What taps take of the 16 columns: of 0 and 16, then of the real and the imaginary part of each of the others."""
    rows = []
    for s in range(taps):
        angles = [2 * pi * (k * s % EXTENT) / EXTENT for k in range(1, COLUMNS)]
        others = [_SCALE * part for angle in angles for part in (2 * cos(angle), -2 * sin(angle))]
        rows.append((_SCALE, _SCALE * (-1) ** s, *others))
    return tuple(rows)
