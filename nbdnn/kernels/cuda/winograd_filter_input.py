"""Transforms of both operands of a Winograd filter gradient: V = B^T x B and D = G dy G^T of every tile, in one launch.

    x --tiles of m + 2, m apart--> V[xi, tile, c]        dy --tiles of m--> D[xi, tile, k]

Channels are neighbours in V and D whatever the layout of the images. Where they are in the image, a thread transforms
a tile of one or two of them in registers; of planar images a block takes 8 tiles of 32 channels and exchanges them in
shared memory, so that 8 lanes read along rows, and 32 write a line. Which tiles the xi have, `winograd_product.py` says
under 'kinds'; threads beyond the last tile fill each kind's last stage with zeros. Traffic: (m + 2)^2 / m^2 elements of
V an element of x. Source: own; the matrices are those of `cook_toom.py`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cpu.cook_toom import Matrix, filtering

THREADS = 256
TILES, CHANNELS = 8, 32  # of a block of a planar image
_PITCH = CHANNELS + 4  # words from a tile to the next in shared memory: 8 tiles by 4 channels fall into 32 banks


class Side(NamedTuple):
    """How an image is read: whether channels are neighbours, and how many a thread then takes, 1 or 2."""

    channels_last: bool
    words: int


class Variant(NamedTuple):
    """Rows and columns of dy in a tile, and the two images."""

    m: int
    x: Side
    dy: Side


class Fields(NamedTuple):
    """Tiles of both images, and each image by its strides, in elements.

    slices: of all images, `depth` of each, more than x and dy have: the others are zero. tiles: and as many more as may
    fill the last stages. kept_: rows and columns of tiles in the xi of the last row and column. Of each kind: filled_
    tiles, and at_ which its xi begin. start, pitch: where V or D begins in the workspace, and the channels from one
    tile to the next. before: the image begins that far inside of its slices and of the first tile.
    """

    slices: int
    depth: int
    tiles: int
    tile_rows: int
    tile_columns: int
    kept_rows: int
    kept_columns: int
    filled_0: int
    filled_1: int
    filled_2: int
    filled_3: int
    at_1: int
    at_2: int
    at_3: int
    x_start: int
    x_pitch: int
    x_channels: int
    x_n: int
    x_c: int
    x_d: int
    x_h: int
    x_w: int
    x_depth: int
    x_height: int
    x_width: int
    before_d: int
    before_h: int
    before_w: int
    y_start: int
    y_pitch: int
    y_channels: int
    y_n: int
    y_c: int
    y_d: int
    y_h: int
    y_w: int
    y_depth: int
    y_height: int
    y_width: int


def input_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Variant(*specialised_on)
    m, matrices, zero, real = variant.m, filtering(3, variant.m), ptx.INTEGER[32](0), ptx.REAL["f32"]
    transform_x = _side(m + 2, m, matrices.input, variant.x)
    transform_dy = _side(m, m, matrices.filter, variant.dy)
    planar = not (variant.x.channels_last and variant.dy.channels_last)
    words = (m + 2) * (m + 2) * TILES * _PITCH if planar else 1

    def transform_images(x, dy, workspace, f):
        exchanged = ptx_tile.shared_address(ptx.cuda.shared.array(words, real, 16))
        if ptx.block_y() == 0:
            strides = f.x_n, f.x_c, f.x_h, f.x_w, f.x_d
            extents = f.x_height, f.x_width, f.before_h, f.before_w, f.x_depth, f.before_d
            transform_x(x, workspace, exchanged, f, (f.x_start, f.x_pitch, f.x_channels), strides, extents)
        else:
            strides = f.y_n, f.y_c, f.y_h, f.y_w, f.y_d
            extents = f.y_height, f.y_width, zero, zero, f.y_depth, zero
            transform_dy(dy, workspace, exchanged, f, (f.y_start, f.y_pitch, f.y_channels), strides, extents)

    data = ptx.pointer("f32")
    return transform_images, (data, data, data, ptx.record(Fields, 32))


@cache
def _side(extent: int, m: int, matrix: Matrix, side: Side):
    """Device function (image, workspace, shared address, fields, (start, pitch, channels) of V, strides, extents)."""
    if not side.channels_last:
        return _planar(extent, m, matrix)
    return _pairs(extent, m, matrix) if side.words == 2 else _single(extent, m, matrix)


@cache
def _single(extent: int, m: int, matrix: Matrix):
    from nbdnn.kernels.cuda import ptx, ptx_products

    integer, real, area, planes = ptx.INTEGER[32], ptx.REAL["f32"], extent * extent, (m + 2) * (m + 2)
    load, transform, store = _load_tile(extent, m), ptx_products.sandwich(matrix), _store_planes(m, 1)

    @ptx.inline
    def transformed(image, workspace, exchanged, f, to, strides, extents):
        start, pitch, channels = to
        tile, c = ptx.divided(integer(ptx.block_x() * THREADS + ptx.thread_x()), channels)
        if tile < f.tiles:
            source, target = ptx.cuda.local.array(area, real), ptx.cuda.local.array(planes, real)
            load(image, source, tile, c, f, strides, extents)
            transform(source, target)
            store(workspace, integer(start + c), pitch, tile, f, target, target)

    return transformed


@cache
def _pairs(extent: int, m: int, matrix: Matrix):
    from nbdnn.kernels.cuda import ptx, ptx_products, ptx_tile

    integer, real, area, planes = ptx.INTEGER[32], ptx.REAL["f32"], extent * extent, (m + 2) * (m + 2)
    place, transform, load, store = (
        _tile_place(m),
        ptx_products.sandwich(matrix),
        ptx.LOAD_CONSTANT[2],
        _store_planes(m, 2),
    )
    floats = ptx_tile.float_of

    @ptx.inline
    def transformed(image, workspace, exchanged, f, to, strides, extents):
        start, pitch, channels = to
        tile, pair = ptx.divided(integer(ptx.block_x() * THREADS + ptx.thread_x()), integer(channels >> 1))
        if tile < f.tiles:
            at, h, w, is_there = place(tile, f, strides, extents)
            at = integer(at + pair * 2)
            a, b = ptx.cuda.local.array(area, real), ptx.cuda.local.array(area, real)
            to_a, to_b = ptx.cuda.local.array(planes, real), ptx.cuda.local.array(planes, real)
            for i in range(extent):
                inside = is_there and h + i >= 0 and h + i < extents[0]
                for j in range(extent):
                    first, second = real(0.0), real(0.0)
                    if inside and w + j >= 0 and w + j < extents[1]:
                        one, other = load(image, integer(at + i * strides[2] + j * strides[3]))
                        first, second = floats(one), floats(other)
                    a[i * extent + j] = first
                    b[i * extent + j] = second
            transform(a, to_a)
            transform(b, to_b)
            store(workspace, integer(start + pair * 2), pitch, tile, f, to_a, to_b)

    return transformed


@cache
def _planar(extent: int, m: int, matrix: Matrix):
    from nbdnn.kernels.cuda import ptx, ptx_products, ptx_tile

    integer, real, area, planes = ptx.INTEGER[32], ptx.REAL["f32"], extent * extent, (m + 2) * (m + 2)
    load, transform, store = _load_tile(extent, m), ptx_products.sandwich(matrix), _store_planes(m, 1)

    word, put, get = ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[1], ptx_tile.LOAD_SHARED[1]
    bits, floats, plane_bytes = ptx_tile.word_of, ptx_tile.float_of, 4 * TILES * _PITCH

    @ptx.inline
    def transformed(image, workspace, exchanged, f, to, strides, extents):
        start, pitch, channels = to
        thread = integer(ptx.thread_x())
        blocks, _ = ptx.divided(integer(channels + (CHANNELS - 1)), integer(CHANNELS))
        first_tile, first_c = ptx.divided(integer(ptx.block_x()), blocks)
        first_tile, first_c = integer(first_tile * TILES), integer(first_c * CHANNELS)
        if first_tile < f.tiles:
            source, target = ptx.cuda.local.array(area, real), ptx.cuda.local.array(planes, real)
            c, tile = ptx.divided(thread, integer(TILES))
            # What is read of channels beyond the last is not stored.
            load(
                image, source, integer(first_tile + tile), min(integer(first_c + c), channels - 1), f, strides, extents
            )
            transform(source, target)
            at = word(exchanged + (tile * _PITCH + c) * 4)
            for plane in range(planes):
                put(word(at + plane * plane_bytes), bits(target[plane]))
            ptx.cuda.syncthreads()
            tile, c = ptx.divided(thread, integer(CHANNELS))
            at = word(exchanged + (tile * _PITCH + c) * 4)
            for plane in range(planes):
                target[plane] = floats(get(word(at + plane * plane_bytes)))
            if first_c + c < channels:
                store(workspace, integer(start + first_c + c), pitch, integer(first_tile + tile), f, target, target)

    return transformed


@cache
def _tile_place(m: int):
    """Device function (tile, fields, strides, extents) -> (its first element, row, column, whether it exists)."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def placed(tile, f, strides, extents):
        rest, column = ptx.divided(tile, f.tile_columns)
        slice_, row = ptx.divided(rest, f.tile_rows)
        n, d = ptx.divided(slice_, f.depth)
        d, h, w = integer(d - extents[5]), integer(row * m - extents[2]), integer(column * m - extents[3])
        is_there = slice_ < f.slices and d >= 0 and d < extents[4]
        return integer(n * strides[0] + d * strides[4] + h * strides[2] + w * strides[3]), h, w, is_there

    return placed


@cache
def _load_tile(extent: int, m: int):
    """Device function (image, local array, tile, channel, fields, strides, extents), zeros beyond the edges."""
    from nbdnn.kernels.cuda import ptx

    integer, real, place = ptx.INTEGER[32], ptx.REAL["f32"], _tile_place(m)

    @ptx.inline
    def loaded(image, source, tile, c, f, strides, extents):
        at, h, w, is_there = place(tile, f, strides, extents)
        at = integer(at + c * strides[1])
        for i in range(extent):
            inside = is_there and h + i >= 0 and h + i < extents[0]
            for j in range(extent):
                value = real(0.0)
                if inside and w + j >= 0 and w + j < extents[1]:
                    value = ptx.load_constant(image, integer(at + i * strides[2] + j * strides[3]))
                source[i * extent + j] = value

    return loaded


@cache
def _store_planes(m: int, words: int):
    """Device function (workspace, start, pitch, tile, fields, planes, planes of the next channel)."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, last, place, put = ptx.INTEGER[32], m + 1, _places(), ptx.STORE[words]
    word, bits = ptx_tile.word_of, ptx_tile.words_of

    @ptx.inline
    def put_one(workspace, at, first, second):
        put(workspace, at, word(first))

    @ptx.inline
    def put_two(workspace, at, first, second):
        put(workspace, at, bits((first, second)))

    store = put_two if words == 2 else put_one

    @ptx.inline
    def stored(workspace, start, pitch, tile, f, a, b):
        of_neither, of_column, of_row, of_both = place(tile, f)
        if of_neither >= 0:
            at, step = integer(start + of_neither * pitch), integer(f.filled_0 * pitch)
            for i in range(last):
                for j in range(last):
                    xi = i * (last + 1) + j
                    store(workspace, integer(at + (i * last + j) * step), a[xi], b[xi])
        if of_column >= 0:
            at, step = integer(start + (f.at_1 + of_column) * pitch), integer(f.filled_1 * pitch)
            for i in range(last):
                xi = i * (last + 1) + last
                store(workspace, integer(at + i * step), a[xi], b[xi])
        if of_row >= 0:
            at, step = integer(start + (f.at_2 + of_row) * pitch), integer(f.filled_2 * pitch)
            for j in range(last):
                xi = last * (last + 1) + j
                store(workspace, integer(at + j * step), a[xi], b[xi])
        if of_both >= 0:
            xi = last * (last + 1) + last
            store(workspace, integer(start + (f.at_3 + of_both) * pitch), a[xi], b[xi])

    return stored


@cache
def _places():
    """Device function (tile, fields) -> which it is among the tiles of each kind, negative where it is left out."""
    from nbdnn.kernels.cuda import ptx

    integer, none = ptx.INTEGER[32], ptx.INTEGER[32](-1)

    @ptx.inline
    def places(tile, f):
        rest, column = ptx.divided(tile, f.tile_columns)
        n, row = ptx.divided(rest, f.tile_rows)
        in_columns, in_rows = column < f.kept_columns, row < f.kept_rows
        of_column = integer(rest * f.kept_columns + column)
        of_row = integer((n * f.kept_rows + row) * f.tile_columns + column)
        of_both = integer((n * f.kept_rows + row) * f.kept_columns + column)
        if n >= f.slices:
            # Behind the last tile of each kind, as far as its last stages reach.
            beyond = integer(tile - f.slices * f.tile_rows * f.tile_columns)
            of_column = integer(f.slices * f.tile_rows * f.kept_columns + beyond)
            of_row = integer(f.slices * f.kept_rows * f.tile_columns + beyond)
            of_both = integer(f.slices * f.kept_rows * f.kept_columns + beyond)
            in_columns, in_rows = of_column < f.filled_1, of_row < f.filled_2
        of_neither = tile if tile < f.filled_0 else none
        in_both = of_both < f.filled_3 if n >= f.slices else in_columns and in_rows
        return (
            of_neither,
            of_column if in_columns else none,
            of_row if in_rows else none,
            of_both if in_both else none,
        )

    return places
