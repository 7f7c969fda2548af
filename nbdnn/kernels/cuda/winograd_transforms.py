"""The transforms of a Winograd convolution with 3x3 filters: V = B^T x B, U = G w G^T, y = A^T M A.

A thread transforms one tile of one channel in registers; neighbouring threads take what is contiguous in the image, its
channels or its tiles of a row, so that every plane of U, V and M is read and written in whole lines. Overlaps of tiles
are read again, from cache. Traffic of F(m, 3): (m + 2)^2 / m^2 elements of V an element of x, as many of M an element
of y. Source: own; the matrices are those of `cook_toom.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cpu.cook_toom import filtering

THREADS = 128


class Variant(NamedTuple):
    """Outputs of a tile on an axis; whether channels are neighbours in V or M, else tiles; epilogue of the output."""

    m: int
    channels_last: bool
    epilogue: tuple[str, ...]


class ImageFields(NamedTuple):
    """Tiles of an image or output by its strides, in elements.

    start, plane: where V or M begins in the workspace, and from one plane to the next. pitch: tiles of a row of a
    planar V or M. slice: tiles from one depth to the next, some of which may be none. before: the image begins that far
    inside of the first tile.
    """

    start: int
    plane: int
    channels: int
    tiles: int
    pitch: int
    slice: int
    tile_rows: int
    tile_columns: int
    stride_n: int
    stride_c: int
    stride_d: int
    stride_h: int
    stride_w: int
    depth: int
    height: int
    width: int
    before_h: int
    before_w: int


class FilterFields(NamedTuple):
    """Strides of the filter in the order in which its taps meet the image; U begins at `to` in the workspace.

    pairs: of an output and an input channel, of all taps along the depth.
    """

    pairs: int
    outputs: int
    channels: int
    start: int
    w_t: int
    w_k: int
    w_c: int
    w_r: int
    w_s: int
    to: int


def input_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_products

    m, channels_last, _ = Variant(*specialised_on)
    integer, real, extent = ptx.INTEGER[32], ptx.REAL["f32"], m + 2
    area, transform, located = extent * extent, ptx_products.sandwich(filtering(m, 3).input), _located(m, channels_last)

    def transform_input(x, v, f):
        element = integer(ptx.block_x() * THREADS + ptx.thread_x())
        n, c, d, h, w = located(element, f)
        if n < 0:
            return
        h, w = integer(h - f.before_h), integer(w - f.before_w)
        at = integer(n * f.stride_n + c * f.stride_c + d * f.stride_d + h * f.stride_h + w * f.stride_w)
        source, target = ptx.cuda.local.array(area, real), ptx.cuda.local.array(area, real)
        for i in range(extent):
            inside = h + i >= 0 and h + i < f.height
            for j in range(extent):
                value = real(0.0)
                if inside and w + j >= 0 and w + j < f.width:
                    value = ptx.load_constant(x, integer(at + i * f.stride_h + j * f.stride_w))
                source[i * extent + j] = value
        transform(source, target)
        for plane in range(area):
            v[integer(f.start + plane * f.plane + element)] = target[plane]

    data = ptx.pointer("f32")
    return transform_input, (data, data, ptx.record(ImageFields, 32))


def output_kernel(*specialised_on):
    from nbdnn.kernels.cuda import epilogue, ptx, ptx_products, ptx_tile, ptx_vector

    m, channels_last, tokens = Variant(*specialised_on)
    integer, real, extent = ptx.INTEGER[32], ptx.REAL["f32"], m + 2
    area, outputs, transform = extent * extent, m * m, ptx_products.sandwich(filtering(m, 3).output)
    located, finished, ask = _located(m, channels_last), epilogue.finish("f32", tokens), ptx_vector.ask("f32", 1)
    reads_out, has_bias, has_residual = "beta" in tokens, "bias" in tokens, "res" in tokens
    load, float_of, nothing = ptx.load_constant, ptx_tile.float_of, real(0.0)

    def transform_output(products, y, bias, residual, alpha, beta, f):
        element = integer(ptx.block_x() * THREADS + ptx.thread_x())
        n, c, d, h, w = located(element, f)
        if n < 0:
            return
        source, target = ptx.cuda.local.array(area, real), ptx.cuda.local.array(outputs, real)
        before = ptx.cuda.local.array(outputs, real)
        for plane in range(area):
            source[plane] = load(products, integer(f.start + plane * f.plane + element))
        transform(source, target)
        at = integer(n * f.stride_n + c * f.stride_c + d * f.stride_d + h * f.stride_h + w * f.stride_w)
        if reads_out:  # all of it, since no load may pass a store
            for i in range(m):
                for j in range(m):
                    to = integer(at + i * f.stride_h + j * f.stride_w)
                    before[i * m + j] = float_of(ask(y, to, h + i < f.height and w + j < f.width)[0])
        shift = load(bias, c) if has_bias else nothing
        for i in range(m):
            for j in range(m):
                if h + i < f.height and w + j < f.width:
                    to, own = integer(at + i * f.stride_h + j * f.stride_w), i * m + j
                    out = before[own] if reads_out else nothing
                    added = load(residual, to) if has_residual else nothing
                    y[to] = finished(target[own], alpha, beta, out, shift, added)

    data = ptx.pointer("f32")
    return transform_output, (data, data, data, data, real, real, ptx.record(ImageFields, 32))


def filter_kernel(m: int):
    from nbdnn.kernels.cuda import ptx, ptx_products

    integer, real, area = ptx.INTEGER[32], ptx.REAL["f32"], (m + 2) * (m + 2)
    transform = ptx_products.sandwich(filtering(m, 3).filter)

    def transform_filter(w, u, f):
        pair = integer(ptx.block_x() * THREADS + ptx.thread_x())
        if pair >= f.pairs:
            return
        rest, c = ptx.divided(pair, f.channels)
        t, k = ptx.divided(rest, f.outputs)
        at = integer(f.start + t * f.w_t + k * f.w_k + c * f.w_c)
        source, target = ptx.cuda.local.array(9, real), ptx.cuda.local.array(area, real)
        for r in range(3):
            for s in range(3):
                source[r * 3 + s] = ptx.load_constant(w, integer(at + r * f.w_r + s * f.w_s))
        transform(source, target)
        for plane in range(area):
            u[integer(f.to + plane * f.pairs + pair)] = target[plane]

    data = ptx.pointer("f32")
    return transform_filter, (data, data, ptx.record(FilterFields, 32))


def _located(m: int, channels_last: bool):
    """Device function (element, fields) -> (image, channel, depth, first row, first column) of a tile, image -1 for
    none."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def located(element, f):
        if channels_last:
            tile, c = ptx.divided(element, f.channels)
        else:
            c, tile = ptx.divided(element, f.pitch)
        rest, place = ptx.divided(tile, f.slice)
        row, column = ptx.divided(place, f.tile_columns)
        n, d = ptx.divided(rest, f.depth)
        exists = tile < f.tiles and c < f.channels and row < f.tile_rows
        return n if exists else integer(-1), c, d, integer(row * m), integer(column * m)

    return located
