"""Device functions of kernels that keep a tile of the image in shared memory, as `window_plan.py` lays it out.

A quad of four channels is two words (16-bit data) or four (float32); for TF32 they are rounded on the way in.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.window_plan import QUAD, Shape
from nbdnn.problem import ITEMSIZE


@cache
def phase_of(shifted: bool):
    """Device function (column, f) -> (column // u, column % u), u the column stride."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def split(column, f):
        return integer(column >> f.stride_w_log2), integer(column & integer(f.stride_w - 1))

    @ptx.inline
    def divided(column, f):
        return ptx.divided(column, f.stride_w)

    return split if shifted else divided


@cache
def quad_offset(shape: Shape):
    """Device function (quad, f) -> bytes from the first pixel of a window to that quad of it."""
    from nbdnn.kernels.cuda import ptx

    integer, phase_and_place = ptx.INTEGER[32], phase_of(shape.shifted)
    quads_of_tap, quad_bytes, pixel_bytes = integer(shape.quads_of_tap), shape.quad_bytes, shape.pixel_bytes

    @ptx.inline
    def offset(quad, f):
        tap, part = ptx.divided(quad, quads_of_tap)
        r, s = ptx.divided(tap, f.taps_w)
        whole, phase = phase_and_place(integer(s * f.dilation_w), f)
        pixel = integer(phase * f.phase + whole)
        return integer(r * f.dilation_h * f.row_bytes + pixel * pixel_bytes + part * quad_bytes)

    return offset


@cache
def load_channels(dtype: str, math: str, together: int, most: int):
    """Device function (pointer, at, step, wanted) -> the words of a quad, or of `together` > 4 channels.

    together 1: the four channels are `step` elements apart, and only the first `wanted`, of at most `most`, are read:
    the others are zero.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    word, integer = ptx.cuda.types.uint32, ptx.INTEGER[32]
    bits = {"fma": ptx_tile.word_of, "tf32": ptx_tile.to_tf32, "mma": word}[math]

    @ptx.inline
    def element(pointer, at, step, wanted, channel):
        if channel < most and channel < wanted:
            return bits(ptx.load_constant(pointer, integer(at + channel * step)))
        return word(0)

    @ptx.inline
    def four_narrow(pointer, at, step, wanted):
        low = word(element(pointer, at, step, wanted, 0) | element(pointer, at, step, wanted, 1) << word(16))
        high = word(element(pointer, at, step, wanted, 2) | element(pointer, at, step, wanted, 3) << word(16))
        return low, high

    @ptx.inline
    def four_wide(pointer, at, step, wanted):
        return (
            element(pointer, at, step, wanted, 0),
            element(pointer, at, step, wanted, 1),
            element(pointer, at, step, wanted, 2),
            element(pointer, at, step, wanted, 3),
        )

    if together == 1:
        return four_narrow if math == "mma" else four_wide
    load = ptx.LOAD_CONSTANT[together * ITEMSIZE[dtype] // 4]

    @ptx.inline
    def whole(pointer, at, step, wanted):
        return load(pointer, at)

    @ptx.inline
    def whole_rounded(pointer, at, step, wanted):
        a, b, c, d = load(pointer, at)
        value = ptx_tile.float_of
        return bits(value(a)), bits(value(b)), bits(value(c)), bits(value(d))

    return whole_rounded if math == "tf32" else whole


@cache
def held_words(count: int):
    """Device functions (words, at, value) and (words, at) -> value: words of a local array; several as a tuple."""
    from nbdnn.kernels.cuda import ptx

    @ptx.inline
    def put_1(words, at, value):
        words[at] = value

    @ptx.inline
    def take_1(words, at):
        return words[at]

    @ptx.inline
    def put_2(words, at, values):
        words[at], words[at + 1] = values

    @ptx.inline
    def put_4(words, at, values):
        words[at], words[at + 1], words[at + 2], words[at + 3] = values

    @ptx.inline
    def take_2(words, at):
        return words[at], words[at + 1]

    @ptx.inline
    def take_4(words, at):
        return words[at], words[at + 1], words[at + 2], words[at + 3]

    return {1: (put_1, take_1), 2: (put_2, take_2), 4: (put_4, take_4)}[count]


@cache
def fill(shape: Shape, threads: int, batch: int):
    """Device function (image, n, first group, first row, first column, f, thread): all slabs of a tile.

    What lies outside of the image is zero. A thread has `batch` loads under way together.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    channels = max(shape.together, QUAD)
    count = channels * ITEMSIZE[shape.dtype] // 4
    load, (put, take) = (
        load_channels(shape.dtype, shape.math, shape.together, shape.channels),
        held_words(count),
    )
    store = ptx_tile.STORE_SHARED[count]
    loads_of_pixel, phase_and_place = integer(shape.loads_of_pixel), phase_of(shape.shifted)
    pixel_bytes, held = shape.pixel_bytes, batch * count

    @ptx.inline
    def of_one_slab(item, f):
        pixel, part = ptx.divided(item, loads_of_pixel)
        return part, pixel

    @ptx.inline
    def of_slabs(item, f):
        pixel, part = ptx.divided(item, integer(f.block_slabs * loads_of_pixel))
        return part, pixel

    @ptx.inline
    def planar(item, f):
        return ptx.divided(item, f.in_pixels)

    interleaved = of_one_slab if shape.one_slab else of_slabs
    placed = interleaved if shape.parts_first else planar

    @ptx.inline
    def filled(image, n, first_group, top, left, f, thread):
        words, targets = ptx.cuda.local.array(held, word), ptx.cuda.local.array(batch, integer)
        base = integer(ptx_tile.dynamic_shared())
        i = thread
        while i < f.items:
            for b in range(batch):
                part, pixel = placed(integer(i + b * threads), f)
                row, column = ptx.divided(pixel, f.in_columns)
                slab, part = ptx.divided(part, loads_of_pixel)
                group, channel = integer(first_group + slab), integer(part * channels)
                h, w = integer(top + row), integer(left + column)
                whole, phase = phase_and_place(column, f)
                targets[b] = integer(
                    base
                    + f.slabs
                    + slab * f.slab_bytes
                    + row * f.row_bytes
                    + (phase * f.phase + whole) * pixel_bytes
                    + part * count * 4
                )
                for k in range(count):
                    words[b * count + k] = word(0)
                inside = h >= 0 and h < f.extent_h and w >= 0 and w < f.extent_w and group < f.groups
                if inside and i + b * threads < f.items:
                    at = integer(
                        n * f.image_n + (group * f.group_in + channel) * f.image_c + h * f.image_h + w * f.image_w
                    )
                    put(words, b * count, load(image, at, f.image_c, integer(f.group_in - channel)))
            for b in range(batch):
                if i + b * threads < f.items:
                    store(word(targets[b]), take(words, b * count))
            i = integer(i + batch * threads)

    return filled


@cache
def tile_place():
    """Device function (tile, f) -> (n, first output row, first output column, first image row, first image column)."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def placed(tile, f):
        rest, across = ptx.divided(tile, f.tiles_w)
        n, down = ptx.divided(rest, f.tiles_h)
        p, q = integer(down * f.tile_rows), integer(across << f.columns_log2)
        return n, p, q, integer(p * f.stride_h - f.pad_h), integer(q * f.stride_w - f.pad_w)

    return placed
