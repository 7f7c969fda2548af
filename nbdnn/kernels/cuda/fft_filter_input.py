"""Fourier transforms of both operands of a filter gradient, in tiles of 32 x 32: V of x and D of dy, in one launch.

    x  --tiles of 32 x 32, m apart, zero beside the image--> V[plane, tile, c]
    dy --tiles of m x m, zero beyond them-----------------> D[plane, tile, k]

Real numbers have half a spectrum: 16 columns of 32 frequencies, each of which is three planes, for the three real
products that make one of complex numbers (Gauss), V * conj D = (m1 + m2) + i (m3 + m1 - m2):

    plane       m1          m2          m3
    V           re          im          im - re
    D           re          im          re + im

Columns 0 and 16 of the spectrum are those of real numbers, and share one: at ky from 1 to 15 is column 0, at 32 - ky
column 16 at ky. At 0 and 16 both are real numbers: m1 is the product of column 0, m2 that of column 16, and m3 nothing.

A block takes a tile of 8 channels: 16 threads each transform rows p and p + 16 as one row of complex numbers, then 16
columns. Rows come to shared memory as they lie in the image; channels are neighbours in V and D. Spectra are twice as
large as those of the tiles: what packing two rows leaves out is a factor of 2. Traffic: 1.5 elements of V an element of
a tile. Source: own; overlap-save.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

THREADS, CHANNELS = 128, 8  # of a block
EXTENT = 32  # of a tile on an axis
COLUMNS = EXTENT // 2
PLANES = 3 * COLUMNS * EXTENT

# Words of shared memory between rows and between channels, for tiles and for spectra: lanes meet different banks.
_ROW, _CHANNEL = 33, 33 * EXTENT + 4
_SPECTRUM_ROW, _SPECTRUM_CHANNEL = 34, 34 * EXTENT + 4


class Variant(NamedTuple):
    """Whether channels are neighbours in x and in dy; else columns are."""

    x_channels_last: bool
    dy_channels_last: bool


class Fields(NamedTuple):
    """Tiles of both images, which lie step_ apart, and each image by its strides, in elements.

    tiles: of all images, and as many more as fill the last stage of the products. x_blocks: of x, before those of dy.
    groups: of channels. start, pitch: where V or D begins in the workspace, and the channels from one tile to the next.
    before: x begins that far inside of its first tile.
    """

    images: int
    tiles: int
    tile_rows: int
    tile_columns: int
    step_h: int
    step_w: int
    x_blocks: int
    x_groups: int
    x_start: int
    x_pitch: int
    x_channels: int
    x_n: int
    x_c: int
    x_h: int
    x_w: int
    x_height: int
    x_width: int
    before_h: int
    before_w: int
    y_groups: int
    y_start: int
    y_pitch: int
    y_channels: int
    y_n: int
    y_c: int
    y_h: int
    y_w: int
    y_height: int
    y_width: int


def input_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_fourier, ptx_tile

    variant = Variant(*specialised_on)
    integer, real, word = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32
    shared_words = CHANNELS * _SPECTRUM_CHANNEL
    load_x, load_dy = _loaded(variant.x_channels_last), _loaded(variant.dy_channels_last)
    get, put_two, get_two = ptx_tile.LOAD_SHARED[1], ptx_tile.STORE_SHARED[2], ptx_tile.LOAD_SHARED[2]
    floats, bits, split_columns = ptx_tile.float_of, ptx_tile.words_of, _split_columns()
    arrive, here = ptx_tile.copy_async_wait(0), ptx_tile.computed_here

    @ptx.inline
    def transform_rows(shared, thread, re, im):
        """Of 16 lanes each a pair; the other 16 have the channel four on."""
        row, channel = integer(thread & 15), integer((thread >> 5) + (thread >> 4 & 1) * 4)
        at = word(shared + (channel * _CHANNEL + row * _ROW) * 4)
        for j in range(EXTENT):
            re[j] = floats(get(word(at + j * 4)))
            im[j] = floats(get(word(at + (16 * _ROW + j) * 4)))
        ptx.cuda.syncthreads()
        ptx_fourier.fourier(re, im)
        at = word(shared + (channel * _SPECTRUM_CHANNEL + row * _SPECTRUM_ROW) * 4)
        other = word(at + 16 * _SPECTRUM_ROW * 4)
        put_two(at, bits((re[0] + re[0], re[16] + re[16])))
        put_two(other, bits((im[0] + im[0], im[16] + im[16])))
        for j in range(1, COLUMNS):
            put_two(word(at + j * 8), bits((re[j] + re[EXTENT - j], im[j] - im[EXTENT - j])))
            put_two(word(other + j * 8), bits((im[j] + im[EXTENT - j], re[EXTENT - j] - re[j])))
        ptx.cuda.syncthreads()

    @ptx.inline
    def transform_column(shared, channel, column, re, im):
        at = word(shared + (channel * _SPECTRUM_CHANNEL + column * 2) * 4)
        for j in range(EXTENT):
            first, second = get_two(word(at + j * (_SPECTRUM_ROW * 4)))
            re[j] = floats(first)
            im[j] = floats(second)
        ptx_fourier.fourier(re, im)
        if column == 0:
            split_columns(re, im)

    def transform_images(x, dy, workspace, f):
        shared = ptx_tile.shared_address(ptx.cuda.shared.array(shared_words, real, 16))
        thread, block = integer(ptx.thread_x()), integer(ptx.block_x())
        is_x = block < f.x_blocks
        number = block if is_x else integer(block - f.x_blocks)
        tile, group = ptx.divided(number, f.x_groups if is_x else f.y_groups)
        rest, tile_column = ptx.divided(tile, f.tile_columns)
        n, tile_row = ptx.divided(rest, f.tile_rows)
        n = n if n < f.images else integer(-1)
        row, column, first = integer(tile_row * f.step_h), integer(tile_column * f.step_w), integer(group * CHANNELS)
        if is_x:
            place = n, first, integer(row - f.before_h), integer(column - f.before_w)
            strides, extents = (f.x_n, f.x_c, f.x_h, f.x_w), (f.x_channels, f.x_height, f.x_width, EXTENT, EXTENT)
            load_x(x, shared, thread, place, strides, extents)
        else:
            strides, extents = (f.y_n, f.y_c, f.y_h, f.y_w), (f.y_channels, f.y_height, f.y_width, f.step_h, f.step_w)
            load_dy(dy, shared, thread, (n, first, row, column), strides, extents)
        ptx_tile.copy_async_commit()
        arrive()
        ptx.cuda.syncthreads()
        re, im = ptx.cuda.local.array(EXTENT, real), ptx.cuda.local.array(EXTENT, real)
        transform_rows(shared, thread, re, im)
        channel, column = integer(thread & 7), integer(thread >> 3)
        transform_column(shared, channel, column, re, im)
        start, pitch, channels, sign = f.y_start, f.y_pitch, f.y_channels, real(1.0)
        if is_x:
            start, pitch, channels, sign = f.x_start, f.x_pitch, f.x_channels, real(-1.0)
        if first + channel < channels:
            plane = integer(f.tiles * pitch)
            at = integer(start + column * (3 * EXTENT) * plane + tile * pitch + first + channel)
            for j in range(EXTENT):
                workspace[at] = re[j]
                workspace[integer(at + plane)] = im[j]
                workspace[integer(at + 2 * plane)] = ptx.fma(sign, re[j], im[j])
                at = here(integer(at + 3 * plane))  # not long before: addresses need the registers

    data = ptx.pointer("f32")
    return transform_images, (data, data, data, ptx.record(Fields, 32))


@cache
def _loaded(channels_last: bool):
    """Device function (image, shared address, thread, (n, channel, row, column), strides, extents): starts the copies.

    n: -1 for a tile of zeros. extents: channels, rows and columns of the image; rows and columns of a tile. Channels
    beyond the last are not loaded, or zeros.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, copy = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.COPY_ASYNC[4]
    whole, nothing, most = integer(4), integer(0), integer(CHANNELS)

    @ptx.inline
    def reached(at, extent, taken):
        """The first position of a tile that is in the image, and how many are."""
        first = max(integer(0), integer(-at))
        return first, integer(max(first, min(taken, integer(extent - at))) - first)

    @ptx.inline
    def planar(image, shared, thread, place, strides, extents):
        """A lane: a column of one of 4 neighbouring rows; eight steps of four rows a channel."""
        n, first, row, column = place
        channels, height, width, rows, columns = extents
        lane, warp = integer(thread & 31), integer(thread >> 5)
        (first_row, some_rows), (first_column, some_columns) = (
            reached(row, height, rows),
            reached(column, width, columns),
        )
        is_there = n >= 0 and ptx.inside(integer(lane - first_column), some_columns)
        some_rows = some_rows if is_there else integer(0)
        at = integer(n * strides[0] + first * strides[1] + (row + warp) * strides[2] + (column + lane) * strides[3])
        to, step = word(shared + (warp * _ROW + lane) * 4), integer(4 * strides[2])
        for _ in range(min(most, integer(channels - first))):
            for j in range(EXTENT // 4):
                size = whole if ptx.inside(integer(warp + 4 * j - first_row), some_rows) else nothing
                copy(word(to + j * (16 * _ROW)), ptx.address(image, integer(at + j * step)), size)
            at, to = integer(at + strides[1]), word(to + _CHANNEL * 4)

    @ptx.inline
    def interleaved(image, shared, thread, place, strides, extents):
        """A lane: a channel of one of 16 neighbouring columns; and of those 16 on."""
        n, first, row, column = place
        channels, height, width, rows, columns = extents
        lane, c = integer(thread >> 3), integer(thread & 7)
        (first_row, some_rows), (first_column, some_columns) = (
            reached(row, height, rows),
            reached(column, width, columns),
        )
        some_rows = some_rows if n >= 0 and first + c < channels else integer(0)
        near = whole if ptx.inside(integer(lane - first_column), some_columns) else nothing
        far = whole if ptx.inside(integer(lane + 16 - first_column), some_columns) else nothing
        at = integer(n * strides[0] + (first + c) * strides[1] + row * strides[2] + (column + lane) * strides[3])
        to, half = word(shared + (c * _CHANNEL + lane) * 4), integer(16 * strides[3])
        for h in range(EXTENT):
            is_there = ptx.inside(integer(h - first_row), some_rows)
            copy(to, ptx.address(image, at), near if is_there else nothing)
            copy(word(to + 64), ptx.address(image, integer(at + half)), far if is_there else nothing)
            at, to = integer(at + strides[2]), word(to + 4 * _ROW)

    return interleaved if channels_last else planar


@cache
def _split_columns():
    """Device function (re, im) of two real columns' transform as one: that of the first at ky, of the second at
    32 - ky; at 0 and 16 it stays as it is."""
    from nbdnn.kernels.cuda import ptx

    half = ptx.REAL["f32"](0.5)

    @ptx.inline
    def split(re, im):
        for j in range(1, COLUMNS):
            a_re, a_im, b_re, b_im = re[j], im[j], re[EXTENT - j], im[EXTENT - j]
            re[j] = (a_re + b_re) * half
            im[j] = (a_im - b_im) * half
            re[EXTENT - j] = (a_im + b_im) * half
            im[EXTENT - j] = (b_re - a_re) * half

    return split
