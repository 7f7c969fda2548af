"""dy of a tile's pixels in shared memory, beside the slabs that `window_tile.py` fills."""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.window_plan import QUAD
from nbdnn.kernels.cuda.window_records import Gradient
from nbdnn.kernels.cuda.window_tile import held_words, load_channels
from nbdnn.problem import ITEMSIZE


@cache
def pixels_of_tile():
    """Device function (f) -> the pixels of a tile. Not a constant: loops over them would be written out."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def count(f):
        return integer(f.tile_rows << f.columns_log2)

    return count


@cache
def fill_gradients(variant: Gradient, threads: int, batch: int):
    """Device function (dy, n, first output row and column, first unit, f, thread): dy of a tile, [pixel][filter].

    What lies outside of dy is zero. A thread has `batch` loads under way together.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, shape = ptx.INTEGER[32], ptx.cuda.types.uint32, variant.shape
    itemsize, filters, tile_pixels = ITEMSIZE[shape.dtype], variant.filters, pixels_of_tile()
    at_once = max(variant.together, QUAD)
    count = at_once * itemsize // 4
    load = load_channels(shape.dtype, shape.math, variant.together, QUAD)
    (put, take), store = held_words(count), ptx_tile.STORE_SHARED[count]
    parts_of_unit = integer(filters // at_once)
    held = batch * count

    @ptx.inline
    def interleaved(item, parts, pixels):
        pixel, part = ptx.divided(item, parts)
        return part, pixel

    @ptx.inline
    def planar(item, parts, pixels):
        return ptx.divided(item, pixels)

    placed = interleaved if variant.parts_first else planar

    @ptx.inline
    def filled(dy, n, p_first, q_first, first_unit, f, thread):
        words, targets = ptx.cuda.local.array(held, word), ptx.cuda.local.array(batch, integer)
        base = integer(integer(ptx_tile.dynamic_shared()) + f.filters)
        mask = integer((integer(1) << f.columns_log2) - 1)
        pixels, parts = tile_pixels(f), integer(f.block_units * parts_of_unit)
        items = integer(pixels * parts)
        i = thread
        while i < items:
            for b in range(batch):
                part, pixel = placed(integer(i + b * threads), parts, pixels)
                unit, inner = ptx.divided(part, parts_of_unit)
                group, chunk = ptx.divided(integer(first_unit + unit), f.chunks)
                o = integer(chunk * filters + inner * at_once)
                p, q = integer(p_first + (pixel >> f.columns_log2)), integer(q_first + (pixel & mask))
                targets[b] = integer(base + pixel * f.dy_bytes + part * at_once * itemsize)
                for k in range(count):
                    words[b * count + k] = word(0)
                inside = p < f.rows and q < f.columns and first_unit + unit < f.units and o < f.group_out
                if inside and i + b * threads < items:
                    at = integer(n * f.out_n + (group * f.group_out + o) * f.out_c + p * f.out_h + q * f.out_w)
                    put(words, b * count, load(dy, at, f.out_c, integer(f.group_out - o)))
            for b in range(batch):
                if i + b * threads < items:
                    store(word(targets[b]), take(words, b * count))
            i = integer(i + batch * threads)

    return filled
