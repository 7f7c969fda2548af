"""Forward convolution of few channels: windows of raw image rows in shared memory, filters beside them.

    y[n, k, p, q] = sum over c, r, s of  x[n, c, p*u + r*d - pad, q*u + s - pad] * w[k, c, r, s]

`rows_plan.py` has the tiling. A block brings its filters and tables to shared memory once, then takes tile after tile,
whose lines are copied while tiles before it are summed:

    1. wait for the slab, start the copies of one to come        2. each warp takes turns at groups of 8 pixels
    3. sum the windows, eight words or a segment at a time       4. epilogue, straight from registers

Matrix units (f16, bf16, TF32): two groups are the 16 rows of a matrix, eight words of the window its k, so that a lane
loads one word of a pixel for each register of a factor; filters lie as the lanes want them. FMA units (f32): lane
4a + b has pixel a of 7 or 8 groups and the filters 4b..4b+3 and 16 beyond: 64 sums, for which it loads 8 words of the
image, in 8 banks, and 8 of the filters.
Traffic: x once for each tile and 64 filters that see it, y once. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.rows_plan import ENTRY_BYTES, Forward, Rows
from nbdnn.kernels.cuda.rows_tile import (
    copy_lines,
    fill_groups,
    fill_segments,
    fill_words,
    group_place,
    slab_behind,
    tile_place,
    word_place,
)
from nbdnn.kernels.cuda.window_store import dealt_filter, stored_in_turn

THREADS = 256
_WARPS = THREADS // 32
_BATCH = 8  # words of the filters that a thread loads together


@cache
def _filter_element(variant: Forward):
    """Device function (w, o, segment, element, f) -> an element of filter o in its bits; 0 where there is none."""
    from nbdnn.kernels.cuda import ptx

    lines, integer = variant.lines, ptx.INTEGER[32]
    inner, run = integer(lines.inner), lines.run
    nothing = ptx.ELEMENT[lines.dtype](0)

    @ptx.inline
    def element_of(w, o, segment, element, f):
        plane, r = ptx.divided(segment, f.taps_h)
        s, c = ptx.divided(element, inner)
        if o < f.out_c and plane < f.planes and element >= 0 and element < run:
            at = integer(f.w_start + o * f.w_out + integer(plane + c) * f.w_in + r * f.w_r + s * f.w_s)
            return ptx.load_constant(w, at)
        return nothing

    return element_of


@cache
def _fill_filters(variant: Forward):
    """Device function (w, first filter, f, thread): of each unit [step][n8 tile][lane][2 words], or [element][32]."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    lines, filters = variant.lines, variant.filters
    integer, word, store = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[1]
    element_of, placed, of_tiles = _filter_element(variant), word_place(lines), dealt_filter(variant.run)
    run, columns, units = integer(lines.run), integer(filters), variant.units

    @ptx.inline
    def fragment_place(i, f):
        """(filter, segment, element) of a word."""
        lane = i >> 1 & 31
        step, tile = ptx.divided(integer(i >> 6), integer(filters // 8))
        segment, element = placed(integer(step * 8 + (lane & 3) + (i & 1) * 4), f)
        return of_tiles(integer(tile * 8 + (lane >> 2))), segment, element

    @ptx.inline
    def row_place(i, f):
        row, o = ptx.divided(i, columns)
        segment, element = ptx.divided(row, run)
        return o, segment, element

    @ptx.inline
    def narrow(w, o, segment, element, f):
        low = word(element_of(w, o, segment, element, f))
        return word(low | word(element_of(w, o, segment, integer(element + 1), f)) << word(16))

    @ptx.inline
    def rounded(w, o, segment, element, f):
        return ptx_tile.to_tf32(element_of(w, o, segment, element, f))

    @ptx.inline
    def whole(w, o, segment, element, f):
        return ptx_tile.word_of(element_of(w, o, segment, element, f))

    place = row_place if lines.math == "fma" else fragment_place
    bits = {"fma": whole, "tf32": rounded, "mma": narrow}[lines.math]
    per_entry = lines.run * filters if lines.math == "fma" else 8 * filters

    @ptx.inline
    def filled(w, first, f, thread):
        words = ptx.cuda.local.array(_BATCH, word)
        base = integer(integer(ptx_tile.dynamic_shared()) + f.filters_at)
        of_unit = integer(f.fragments * per_entry)
        count, i = integer(units * of_unit), thread
        while i < count:
            for b in range(_BATCH):
                unit, inner = ptx.divided(integer(i + b * THREADS), of_unit)
                o, segment, element = place(inner, f)
                words[b] = bits(w, integer(first + unit * filters + o), segment, element, f)
            for b in range(_BATCH):
                if i + b * THREADS < count:
                    store(word(base + (i + b * THREADS) * 4), words[b])
            i = integer(i + _BATCH * THREADS)

    return filled


def mma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    variant = Forward(*specialised_on)
    lines, filters, groups = variant.lines, variant.filters, variant.groups
    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    n_tiles, together = filters // 8, max(variant.run, 2)  # `together` outputs of a lane are neighbours
    zeros = ptx_rows.zeros(groups * n_tiles * 2)
    dtype = "tf32" if lines.math == "tf32" else lines.dtype
    multiply = ptx_rows.window_products(dtype, groups, n_tiles, lines.split)
    fragment_bytes = filters * 32  # of eight words

    @ptx.inline
    def place_of(lane):
        return integer(lane >> 2), integer(lane & 3)

    @ptx.inline
    def filter_of(inner, t):
        return integer((inner // together * 4 + t) * together + inner % together)

    @ptx.inline
    def summed(pixels, unit, lane, selector, f):
        shared = integer(ptx_tile.dynamic_shared())
        table = integer(shared + (lane & 3) * ENTRY_BYTES)
        filters_at = integer(shared + f.filters_at + unit * f.fragments * fragment_bytes + lane * 8)
        acc = zeros()
        step = integer(0)
        while step < f.fragments:
            acc = multiply(acc, pixels, word(table), word(filters_at), selector)
            table = integer(table + 8 * ENTRY_BYTES)
            filters_at = integer(filters_at + fragment_bytes)
            step = integer(step + 1)
        return acc

    return _kernel(variant, n_tiles * 2, place_of, filter_of, summed, fill_words(lines, THREADS))


def fma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    variant = Forward(*specialised_on)
    lines, groups = variant.lines, variant.groups
    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    zeros, multiply = ptx_rows.zeros(groups * 8), ptx_rows.segment_products(lines.run, groups)
    segment_bytes = lines.run * ptx_rows.FMA_FILTERS * 4
    load, moved = ptx_tile.LOAD_SHARED[1], ptx_rows.moved(groups)

    @ptx.inline
    def place_of(lane):
        return integer(lane >> 2), integer(lane & 3)

    @ptx.inline
    def filter_of(inner, b):
        return integer(inner // 4 * 16 + b * 4 + inner % 4)

    @ptx.inline
    def summed(pixels, unit, lane, selector, f):
        table = integer(ptx_tile.dynamic_shared())
        filters_at = integer(table + f.filters_at + unit * f.entries * segment_bytes + (lane & 3) * 16)
        acc = zeros()
        segment = integer(0)
        while segment < f.entries:
            acc = multiply(acc, moved(pixels, load(word(table))), word(filters_at))
            table = integer(table + ENTRY_BYTES)
            filters_at = integer(filters_at + segment_bytes)
            segment = integer(segment + 1)
        return acc

    return _kernel(variant, 8, place_of, filter_of, summed, fill_segments(THREADS))


def _kernel(variant: Forward, of_pixel: int, place_of, filter_of, summed, fill_table):
    """The kernel whose lanes are at `place_of` (pixel of a group, part of the filters), and sum by `summed`.

    of_pixel: sums of a lane for each pixel, of which the i-th is of filter_of(i, part).
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    lines, stages, units, filters = variant.lines, variant.stages, variant.units, variant.filters
    integer, make_outputs = ptx.INTEGER[32], _make_outputs(variant, of_pixel, place_of, filter_of, summed)
    placed, copy, fill_w = tile_place(lines), copy_lines(lines, THREADS), _fill_filters(variant)
    fill_places, next_slab = fill_groups(lines, THREADS, variant.groups), slab_behind(stages)
    commit, wait = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(stages - 2)

    def rows(image, w, y, bias, residual, alpha, beta, f):
        thread = integer(ptx.thread_x())
        first = integer(ptx.block_y() * (units * filters))
        slab = integer(integer(ptx_tile.dynamic_shared()) + f.slabs_at)
        filling, tile, ahead = slab, integer(ptx.block_x()), integer(ptx.block_x())
        turn = integer(1 - stages)
        while tile < f.tiles:
            # 1. Tables and filters are made while the first slabs are on their way.
            if turn == 0:
                fill_table(f, thread)
                fill_places(f, thread)
                fill_w(w, first, f, thread)
            # 2. The slab has arrived, and every warp is done with the one before, whose place is filled next.
            if turn >= 0:
                wait()
                ptx.cuda.syncthreads()
            if ahead < f.tiles:
                n, p, _, begin, _ = placed(ahead, f)
                copy(image, n, p, begin, filling, f, thread)
            commit()
            ahead, filling = integer(ahead + f.blocks), next_slab(filling, f)

            # 3. Each warp sums and stores some groups, then others.
            if turn >= 0:
                make_outputs(y, tile, slab, first, (bias, residual, alpha, beta), f, thread)
                slab, tile = next_slab(slab, f), integer(tile + f.blocks)
            turn = integer(turn + 1)

    data, scalar = ptx.pointer(lines.dtype), ptx.REAL["f32"]
    return rows, (data, data, data, data, data, scalar, scalar, ptx.record(Rows, 32))


def _make_outputs(variant: Forward, of_pixel: int, place_of, filter_of, summed):
    """Device function (y, tile, slab, first filter, (bias, residual, alpha, beta), f, thread): a tile's outputs."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_rows, ptx_tile

    lines, units, filters, groups, run = variant.lines, variant.units, variant.filters, variant.groups, variant.run
    integer, word, real, step_bytes = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"], lines.step_bytes
    placed, row_and_column = tile_place(lines), group_place()
    load = ptx_tile.LOAD_SHARED[1]
    addresses, spread = ptx_rows.addresses(groups, ENTRY_BYTES), ptx_local.spread(groups * of_pixel)
    count, selector = groups * of_pixel, ptx_rows.halves_selector

    @ptx.inline
    def output_place(j, inner, state):
        """Of some filters, from the `inner`-th that a lane has, of its pixel of the j-th group."""
        entry, pixel, part, to, f = state
        n, p_first, q_first, first = to
        row, column = row_and_column(load(word(entry + j * ENTRY_BYTES + 4)))
        p, q, k = integer(p_first + row), integer(q_first + column + pixel), integer(first + filter_of(inner, part))
        at = integer(n * f.out_n + p * f.out_h + q * f.out_w + k * f.out_k)
        return p < f.rows and q < f.columns and k < f.out_c, at, k

    most = 8 if run > 1 else 4  # words; more would spill
    store_all = stored_in_turn(output_place, lines.dtype, variant.epilogue, groups, of_pixel, run, most_words=most)

    @ptx.inline
    def made(y, tile, slab, first, extra, f, thread):
        n, p, q, _, shift = placed(tile, f)
        lane, entries = integer(thread & 31), integer(integer(ptx_tile.dynamic_shared()) + f.groups_at)
        pixel, filter_part = place_of(lane)
        start = word(slab + shift + pixel * step_bytes)
        turn = integer(thread >> 5)
        while turn < f.parts * units:
            unit, part = ptx.divided(turn, f.parts)
            entry = integer(entries + part * groups * ENTRY_BYTES)
            pixels = addresses(word(entry), word(start & -4))
            sums = ptx.cuda.local.array(count, real)
            spread(sums, summed(pixels, unit, lane, selector(start), f))
            to = (n, p, q, integer(first + unit * filters))
            store_all(sums, y, extra, (entry, pixel, filter_part, to, f))
            turn = integer(turn + _WARPS)

    return made
