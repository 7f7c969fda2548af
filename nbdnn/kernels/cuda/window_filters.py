"""The filters of a block in shared memory, in the order in which its warps read them, and the table of a window."""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.window_plan import QUAD, Shape
from nbdnn.kernels.cuda.window_records import Forward
from nbdnn.kernels.cuda.window_store import dealt_filter
from nbdnn.kernels.cuda.window_tile import held_words, load_channels, quad_offset


@cache
def fill_filters(variant: Forward, threads: int):
    """Device function (w, first unit, f, thread): the block's filters, zero where there are none, to shared memory."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    shape, filters, math = variant.shape, variant.filters, variant.shape.math
    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    count = shape.quad_bytes // 4
    load, (put, take) = load_channels(shape.dtype, math, 1, shape.channels), held_words(count)
    store, store_word = ptx_tile.STORE_SHARED[count], ptx_tile.STORE_SHARED[1]
    per_unit = integer(filters)
    quads_of_tap, channels, quad_bytes = integer(shape.quads_of_tap), shape.channels, shape.quad_bytes
    step = 4 if math == "fma" else 1 << 2
    n_tiles = filters // 8

    @ptx.inline
    def in_order(at):
        return at

    @ptx.inline
    def keep_rows(words, unit, quad, at, f):
        """[unit][quad][channel][filter]"""
        for c in range(channels):
            row = (unit * f.quads + quad) * channels + c
            store_word(word(integer(ptx_tile.dynamic_shared()) + f.filters + (row * filters + at) * 4), words[c])

    @ptx.inline
    def keep_fragments(words, unit, quad, at, f):
        """[unit][step][n8 tile][column][quad of the step]: a lane finds its own after those of the lanes before it."""
        row = (unit * (f.quads + 3 >> 2) + (quad >> 2)) * n_tiles * 8 + at
        place = f.filters + (row * step + (quad & 3)) * quad_bytes
        store(word(integer(ptx_tile.dynamic_shared()) + place), take(words, 0))

    chosen, keep = (in_order, keep_rows) if math == "fma" else (dealt_filter(variant.run), keep_fragments)
    whole_step = 1 if math == "fma" else 4

    @ptx.inline
    def filled(w, first_unit, f, thread):
        words = ptx.cuda.local.array(count, word)
        padded = integer((f.quads + whole_step - 1) // whole_step * whole_step)
        i = thread
        while i < f.block_units * filters * padded:
            slot, quad = ptx.divided(i, padded)
            unit, at = ptx.divided(slot, per_unit)
            group, chunk = ptx.divided(integer(first_unit + unit), f.chunks)
            o = integer(chunk * filters + chosen(at))
            tap, part = ptx.divided(quad, quads_of_tap)
            r, s = ptx.divided(tap, f.taps_w)
            channel = integer(part * QUAD)
            for k in range(count):
                words[k] = word(0)
            if quad < f.quads and first_unit + unit < f.units and o < f.group_out:
                from_ = integer(f.w_start + group * f.w_group + o * f.w_out + channel * f.w_in + r * f.w_r + s * f.w_s)
                put(words, 0, load(w, from_, f.w_in, integer(f.group_in - channel)))
            keep(words, unit, quad, at, f)
            i = integer(i + threads)

    return filled


@cache
def fill_table(shape: Shape, threads: int):
    """Device function (f, thread): the offset of each quad of a window, at the start of shared memory.

    What completes the last four quads has the first one's.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, offset = ptx.INTEGER[32], ptx.cuda.types.uint32, quad_offset(shape)
    store = ptx_tile.STORE_SHARED[1]

    @ptx.inline
    def filled(f, thread):
        quad = thread
        while quad < (f.quads + 3 >> 2 << 2):
            value = offset(quad, f) if quad < f.quads else integer(0)
            store(word(integer(ptx_tile.dynamic_shared()) + quad * 4), word(value))
            quad = integer(quad + threads)

    return filled
