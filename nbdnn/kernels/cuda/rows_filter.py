"""Filter gradient of few channels: windows of raw image rows in shared memory, and dy of their pixels beside them.

    dw[k, c, r, s] = sum over n, p, q of  x[n, c, p*u + r*d - pad, q*u + s - pad] * dy[n, k, p, q]

`rows_plan.py` has the tiling. Each warp keeps the sums of a set of words of the window (32 rows of a product) times the
filters of the block, over all tiles of the block; warps that are left share the pixels:

    1. wait for slab and dy, start the copies of the next ones       2. sum over groups of 8 pixels
    3. warps of different pixels add up, in order                    4. the block's sums to the workspace
    5. a second kernel adds those of all blocks, in order

Matrix units: k = the pixels of two groups. Rows of 16-bit words are their first halves, then their second halves: a
lane loads words of two pixels, and pairs the halves. FMA units: lane 16z + 4a + b has words a, a + 4, ... of every
second pixel, from z on, and the filters 4b..4b+3 and 16 beyond. A row of the sums beyond the window's words, or of a
half before it, is summed like the others, and read by nobody.
Traffic: x once for each tile and set that sees it, dy once a set, the sums of each block twice. Accumulates in float32.
Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.rows_plan import ENTRY_BYTES, GROUP, Gradient, Lines, Rows
from nbdnn.kernels.cuda.rows_tile import copy_lines, fill_groups, group_place, tile_place, word_offset

# Of the second kernel: elements of a block, slices of the blocks' sums that are added side by side, loads under way.
SUM_THREADS, SUM_ELEMENTS = 1024, 32
_SLICES, _AT_ONCE = SUM_THREADS // SUM_ELEMENTS, 4


@cache
def _copy_dy(variant: Gradient, turn: int):
    """Device function (dy, n, first output row and column, first filter, shared address, f, thread): starts copies.

    What lies outside of dy is zero, and so are the groups that complete the last turn.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, copy = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.COPY_ASYNC[16]
    elems, dy_bytes, threads = 16 // variant.lines.itemsize, variant.dy_bytes, variant.threads
    chunks = integer(variant.filters // elems)

    @ptx.inline
    def copied(dy, n, p_first, q_first, first, to, f, thread):
        i, row_pixels = thread, integer(f.tile_groups * GROUP)
        padded = integer((f.groups + turn - 1) // turn * turn)
        while i < integer(padded * GROUP * chunks):
            pixel, chunk = ptx.divided(i, chunks)
            row, column = ptx.divided(pixel, row_pixels)
            p, q, k = integer(p_first + row), integer(q_first + column), integer(first + chunk * elems)
            live = row < f.tile_rows and p < f.rows and q < f.columns and k < f.out_c
            at = integer(n * f.out_n + p * f.out_h + q * f.out_w + k) if live else integer(0)
            copy(word(to + pixel * dy_bytes + chunk * 16), ptx.address(dy, at), integer(16 if live else 0))
            i = integer(i + threads)

    return copied


class _Lanes(NamedTuple):
    """How the lanes of a warp share a set: device functions, and where their sums go.

    sums: of a lane. groups: that it adds at once. offsets: (first word of the set, lane, f) -> of the lane's words.
    add_groups: (sums, entry of the first group, slab, offsets, dy of it, outputs left in each, lane, f) -> sums. turns:
    lanes whose sums are of the same rows and filters. turn_of: (lane). start: (lane) -> bytes to the lane's first sum.
    places: of all of them from there.
    """

    sums: int
    groups: int
    offsets: object
    add_groups: object
    turns: int
    turn_of: object
    start: object
    places: tuple[int, ...]


def mma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    variant = Gradient(*specialised_on)
    lines, filters = variant.lines, variant.filters
    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    tf32, n_tiles = lines.math == "tf32", filters // 8
    offset, load = word_offset(lines), ptx_tile.LOAD_SHARED[1]
    step_bytes, dy_bytes, selector = lines.step_bytes, variant.dy_bytes, ptx_rows.halves_selector
    vector = min(n_tiles * lines.itemsize, 16)  # bytes of dy that a lane loads at once
    if tf32:
        whole, masked = (ptx_rows.tf32_gradients(step_bytes, dy_bytes, filters, end) for end in (False, True))
    else:
        whole, masked = (
            ptx_rows.narrow_gradients(lines.dtype, step_bytes, dy_bytes, filters, end) for end in (False, True)
        )

    @ptx.inline
    def offset_of(at, f):
        return word(offset(at, f)) if at < f.entries else word(0)

    @ptx.inline
    def two_offsets(first, lane, f):
        g = integer(first + (lane >> 2))
        return offset_of(g, f), offset_of(integer(g + 8), f)

    @ptx.inline
    def four_offsets(first, lane, f):
        g = integer(first + (lane >> 2))
        return (
            offset_of(g, f),
            offset_of(integer(g + 8), f),
            offset_of(integer(g + 16), f),
            offset_of(integer(g + 24), f),
        )

    @ptx.inline
    def add_groups(acc, entry, slab, offsets, dy, left, lane, f):
        t = integer(lane & 3)
        start = word(slab + t * step_bytes)
        at = word(start & -4)
        pixels = word(at + load(word(entry))), word(at + load(word(entry + ENTRY_BYTES)))
        where = word(dy + t * dy_bytes + (lane >> 2) * vector)
        if left[0] >= GROUP and left[1] >= GROUP:
            acc = whole(acc, pixels, offsets, where, t, left, selector(start))
        elif left[0] > 0 or left[1] > 0:
            acc = masked(acc, pixels, offsets, where, t, left, selector(start))
        return acc

    @ptx.inline
    def one_turn(lane):
        return integer(0)

    row_bytes, at_once = filters * 4, vector // lines.itemsize

    @ptx.inline
    def start(lane):
        return integer((lane >> 2) * (variant_rows * row_bytes) + (lane & 3) * (2 * at_once * 4))

    variant_rows = variant.row_elems
    places = tuple(
        _row_of(lines, part, e // 2) * row_bytes
        + (tile // at_once * 8 * at_once + e % 2 * at_once + tile % at_once) * 4
        for part in range(2)
        for tile in range(n_tiles)
        for e in range(4)
    )
    offsets = four_offsets if tf32 else two_offsets
    return _kernel(variant, _Lanes(8 * n_tiles, 2, offsets, add_groups, 1, one_turn, start, places))


def _row_of(lines: Lines, part: int, half: int) -> int:
    """The row of the sums, from a lane's first: of 16-bit words both halves follow each other."""
    return half * 16 + part if lines.itemsize == 2 else part * 16 + half * 8


def fma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    variant = Gradient(*specialised_on)
    lines, filters = variant.lines, variant.filters
    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    offset, load = word_offset(lines), ptx_tile.LOAD_SHARED[1]
    step_bytes, dy_bytes = lines.step_bytes, variant.dy_bytes
    whole, masked = (ptx_rows.fma_gradients(step_bytes, dy_bytes, end) for end in (False, True))

    @ptx.inline
    def offset_of(at, f):
        return word(offset(at, f)) if at < f.entries else word(0)

    @ptx.inline
    def offsets(first, lane, f):
        a = integer(first + (lane >> 2 & 3))
        return (
            offset_of(a, f),
            offset_of(integer(a + 4), f),
            offset_of(integer(a + 8), f),
            offset_of(integer(a + 12), f),
            offset_of(integer(a + 16), f),
            offset_of(integer(a + 20), f),
            offset_of(integer(a + 24), f),
            offset_of(integer(a + 28), f),
        )

    @ptx.inline
    def add_groups(acc, entry, slab, places, dy, left, lane, f):
        z = integer(lane >> 4)
        pixel = word(slab + z * step_bytes + load(word(entry)))
        where = word(dy + z * dy_bytes + (lane & 3) * 16)
        if left[0] >= GROUP:
            acc = whole(acc, pixel, places, where, z, left[0])
        elif left[0] > 0:
            acc = masked(acc, pixel, places, where, z, left[0])
        return acc

    @ptx.inline
    def turn_of(lane):
        return integer(lane >> 4)

    @ptx.inline
    def start(lane):
        return integer((lane >> 2 & 3) * (filters * 4) + (lane & 3) * 16)

    places = tuple(j * 4 * filters * 4 + o // 4 * 64 + o % 4 * 4 for j in range(8) for o in range(8))
    return _kernel(variant, _Lanes(64, 1, offsets, add_groups, 2, turn_of, start, places))


def _kernel(variant: Gradient, lanes: _Lanes):
    """The kernel whose warps sum by these functions."""
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    lines, filters, threads, groups = variant.lines, variant.filters, variant.threads, lanes.groups
    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    placed, copy, copy_dy = tile_place(lines), copy_lines(lines, threads), _copy_dy(variant, groups)
    fill_places, row_and_column = fill_groups(lines, threads, groups), group_place()
    load, load_four = ptx_tile.LOAD_SHARED[1], ptx_tile.LOAD_SHARED[4]
    store_zero, store_four = ptx_tile.STORE_SHARED[1], ptx.STORE[4]
    wait, zeros, add_at = ptx_tile.copy_async_wait(0), ptx_rows.zeros(lanes.sums), ptx_rows.add_at(lanes.places)
    offsets_of, add_groups, turn_of, start_of = lanes.offsets, lanes.add_groups, lanes.turn_of, lanes.start
    turns, set_words, set_sums, group_bytes = lanes.turns, variant.set_words, variant.set_sums, GROUP * variant.dy_bytes

    @ptx.inline
    def left_of(entry, p, q, f):
        """Outputs that a group has."""
        row, column = row_and_column(load(word(entry + 4)))
        return integer(f.columns - q - column) if p + row < f.rows else integer(0)

    @ptx.inline
    def add_tile(acc, slab, dy, offsets, split, p, q, shared, lane, f):
        group = integer(split * groups)
        while group < f.groups:
            entry = integer(shared + f.groups_at + group * ENTRY_BYTES)
            left = (left_of(entry, p, q, f), left_of(integer(entry + ENTRY_BYTES), p, q, f) if groups > 1 else 0)
            acc = add_groups(acc, entry, slab, offsets, integer(dy + group * group_bytes), left, lane, f)
            group = integer(group + f.parts * groups)
        return acc

    def gradients(x, dy, parts, f):
        thread = integer(ptx.thread_x())
        lane, first = integer(thread & 31), integer(ptx.block_y() * filters)
        split, set_ = ptx.divided(integer(thread >> 5), f.sets)
        shared = integer(ptx_tile.dynamic_shared())
        first_word = integer((ptx.block_z() * f.sets + set_) * set_words)
        offsets = offsets_of(first_word, lane, f)
        slab, tile = integer(shared + f.slabs_at), integer(ptx.block_x())

        n, p, q, begin, shift = placed(tile, f)
        copy(x, n, p, begin, slab, f, thread)
        copy_dy(dy, n, p, q, first, integer(slab + f.dy_at), f, thread)
        ptx_tile.copy_async_commit()
        fill_places(f, thread)
        acc = zeros()
        while tile < f.tiles:
            # 1. The tile has arrived, and every warp is done with the one before.
            wait()
            ptx.cuda.syncthreads()
            n, p, q, begin, shift = placed(tile, f)
            other = integer(2 * (shared + f.slabs_at) + f.slab_bytes - slab)
            tile = integer(tile + f.blocks)
            if tile < f.tiles:
                next_n, next_p, next_q, next_begin, _ = placed(tile, f)
                copy(x, next_n, next_p, next_begin, other, f, thread)
                copy_dy(dy, next_n, next_p, next_q, first, integer(other + f.dy_at), f, thread)
            ptx_tile.copy_async_commit()

            # 2. Each warp sums groups of pixels.
            if first_word < f.entries:
                dy_at = integer(slab + f.dy_at)
                acc = add_tile(acc, integer(slab + shift), dy_at, offsets, split, p, q, shared, lane, f)
            slab = other

        # 3. The splits, one after the other.
        ptx.cuda.syncthreads()
        sums, i = integer(f.sets * set_sums), thread
        while i < sums:
            store_zero(word(shared + i * 4), word(0))
            i = integer(i + threads)
        turn = integer(0)
        while turn < integer(f.parts * turns):
            ptx.cuda.syncthreads()
            if split * turns + turn_of(lane) == turn:
                add_at(word(shared + set_ * (set_sums * 4) + start_of(lane)), acc)
            turn = integer(turn + 1)
        ptx.cuda.syncthreads()

        # 4. The block's sums.
        chunks, _ = ptx.divided(integer(f.out_c + filters - 1), integer(filters))
        place = integer((ptx.block_x() * chunks + ptx.block_y()) * f.all_sets + ptx.block_z() * f.sets)
        i = integer(thread * 4)
        while i < sums:
            store_four(parts, integer(place * set_sums + i), load_four(word(shared + i * 4)))
            i = integer(i + threads * 4)

    data, sums_type = ptx.pointer(lines.dtype), ptx.pointer("f32")
    return gradients, (data, data, sums_type, ptx.record(Rows, 32))


class Sums(NamedTuple):
    """The integers of the kernel that adds the sums of all blocks: `elements` of each of `blocks`.

    sets: of a chunk of filters. row_elems: rows of a word. The window as in `Rows` and `Lines`.
    """

    blocks: int
    elements: int
    filters: int
    rows: int
    per_word: int
    segment_words: int
    odd: int
    run: int
    inner: int
    planes: int
    taps_h: int
    out_c: int
    w_start: int
    w_out: int
    w_in: int
    w_r: int
    w_s: int


def sum_kernel(dtype: str, tokens: tuple[str, ...]):
    """dw from the sums of all blocks: 32 elements a block, 32 slices of their sums side by side, then in order."""
    from nbdnn.kernels.cuda import epilogue, ptx

    integer, real, store = ptx.INTEGER[32], ptx.REAL["f32"], epilogue.store(dtype, tokens)

    @ptx.inline
    def slice_sum(parts, element, block, f):
        """Of every 32nd block, four at a time: beyond the last, that one again, which does not count."""
        totals = ptx.cuda.local.array(_AT_ONCE, real)
        for i in range(_AT_ONCE):
            totals[i] = real(0.0)
        while block < f.blocks:
            for i in range(_AT_ONCE):
                at = integer(min(block + i * _SLICES, f.blocks - 1))
                value = ptx.load_constant(parts, integer(at * f.elements + element))
                totals[i] = totals[i] + (value if block + i * _SLICES < f.blocks else real(0.0))
            block = integer(block + _AT_ONCE * _SLICES)
        return (totals[0] + totals[1]) + (totals[2] + totals[3])

    def sum_blocks(parts, dw, alpha, beta, f):
        thread = integer(ptx.thread_x())
        slice_, lane = integer(thread >> 5), integer(thread & 31)
        element = integer(ptx.block_x() * SUM_ELEMENTS + lane)
        part_sums = ptx.cuda.shared.array(SUM_THREADS, real)
        part_sums[thread] = slice_sum(parts, element, slice_, f)
        ptx.cuda.syncthreads()
        if slice_ == 0:
            total = part_sums[lane]
            for other in range(1, _SLICES):
                total = total + part_sums[other * SUM_ELEMENTS + lane]
            rest, o = ptx.divided(element, f.filters)
            chunk, row = ptx.divided(rest, f.rows)
            word, half = ptx.divided(row, f.per_word)
            segment, inner = ptx.divided(word, f.segment_words)
            at = integer(inner * f.per_word + half - f.odd)
            plane, r = ptx.divided(segment, f.taps_h)
            k = integer(chunk * f.filters + o)
            if plane < f.planes and at >= 0 and at < f.run and k < f.out_c:
                s, c = ptx.divided(at, f.inner)
                to = integer(f.w_start + k * f.w_out + integer(plane + c) * f.w_in + r * f.w_r + s * f.w_s)
                store(total, alpha, beta, dw, to, dw, k, dw)

    data, scalar = ptx.pointer(dtype), ptx.REAL["f32"]
    return sum_blocks, (ptx.pointer("f32"), data, scalar, scalar, ptx.record(Sums, 32))
