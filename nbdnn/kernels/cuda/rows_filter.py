"""Filter gradient of few channels in float32: windows of raw image rows in shared memory, and dy of their pixels.

    dw[k, c, r, s] = sum over n, p, q of  x[n, c, p*u + r*d - pad, q*u + s - pad] * dy[n, k, p, q]

`rows_plan.py` has the tiling. Each warp keeps the sums of a set of words of the window (32 rows of a product) times the
filters of the block, over all tiles of the block; warps that are left share the pixels:

    1. wait for slab and dy, start the copies of the next ones       2. sum over groups of 8 pixels
    3. warps of different pixels add up, in order                    4. the block's sums to the workspace
    5. those of all blocks add up, in order, in `rows_sums.py`

Matrix units: k = the pixels of a group. FMA units: lane 16z + 4a + b has words a, a + 4, ... of every second pixel,
from z on, and the filters 4b..4b+3 and 16 beyond. A row of the sums beyond the window's words is summed like the
others, and read by nobody. Data of 16 bits: `rows_phases.py`.
Traffic: x once for each tile and 64 (f32: 32) filters that see it, dy once (twice for more than a dozen sets), the sums
of each block twice. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.rows_plan import ENTRY_BYTES, FRACTION_BITS, GROUP, SET_WORDS, Gradient, Lines, Rows
from nbdnn.kernels.cuda.rows_tile import copy_lines, fill_groups, slab_behind, tile_place, word_offset

_BATCH = 4  # copies of a thread that are prepared side by side


@cache
def _copy_dy(variant: Gradient):
    """Device function (dy, n, first output row and column, first filter, shared address, f, thread): starts copies.

    What lies outside of dy is zero, and so are the groups that complete the last turn.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, copy = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.COPY_ASYNC[16]
    elems, dy_bytes, threads, turn = 16 // variant.lines.itemsize, variant.dy_bytes, variant.threads, variant.groups
    chunks = integer(variant.filters // elems)

    @ptx.inline
    def copied(dy, n, p_first, q_first, first, to, f, thread):
        row_pixels, from_ = integer(f.tile_groups * GROUP), integer(n * f.out_n + first)
        count, i = integer((f.groups + turn - 1) // turn * turn * GROUP * chunks), thread
        while i < count:
            for b in range(_BATCH):
                item = integer(i + b * threads)
                pixel, chunk = ptx.divided(item, chunks)
                row = integer(pixel * f.per_row >> FRACTION_BITS)
                p, q = integer(p_first + row), integer(q_first + pixel - row * row_pixels)
                k = integer(chunk * elems)
                live = row < f.tile_rows and p < f.rows and q < f.columns and first + k < f.out_c
                at = integer(from_ + p * f.out_h + q * f.out_w + k) if live else integer(0)
                if item < count:
                    copy(word(to + pixel * dy_bytes + chunk * 16), ptx.address(dy, at), integer(16 if live else 0))
            i = integer(i + _BATCH * threads)

    return copied


class _Lanes(NamedTuple):
    """How the lanes of a warp share a set, and where their sums go. The last four are device functions.

    sums: of a lane. whole, masked: intrinsics that add groups of a tile without, and with
    outputs missing. turns: lanes whose sums are of the same rows and filters. places: of the sums, from the first.
    offsets_of: (first word of the set, lane, f) -> those of the lane's words. pixel_of: (lane) -> of a group, the
    lane's first. filters_of: (lane) -> bytes to its filters of a pixel of dy. start_of: (lane) -> bytes to its sums.
    """

    sums: int
    whole: Callable
    masked: Callable
    turns: int
    places: tuple[int, ...]
    offsets_of: Callable
    pixel_of: Callable
    filters_of: Callable
    start_of: Callable


@cache
def _offset_of(lines: Lines):
    """Device function (word, f) -> its offset; one beyond the last has the first one's, and sums that nobody reads."""
    from nbdnn.kernels.cuda import ptx

    word, offset = ptx.cuda.types.uint32, word_offset(lines)

    @ptx.inline
    def offset_of(at, f):
        return word(offset(at, f)) if at < f.entries else word(0)

    return offset_of


def tf32_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_rows

    variant = Gradient(*specialised_on)
    lines, filters, integer = variant.lines, variant.filters, ptx.INTEGER[32]
    n_tiles, offset_of = filters // 8, _offset_of(lines)
    vector = min(n_tiles * 4, 16)  # bytes of dy that a lane loads at once
    row_bytes, at_once = filters * 4, vector // 4
    common = variant.groups, lines.step_bytes, variant.dy_bytes, filters
    whole, masked = (ptx_rows.tf32_gradients(*common, end) for end in (False, True))

    @ptx.inline
    def offsets_of(first, lane, f):
        g = integer(first + (lane >> 2))
        return (
            offset_of(g, f),
            offset_of(integer(g + 8), f),
            offset_of(integer(g + 16), f),
            offset_of(integer(g + 24), f),
        )

    @ptx.inline
    def pixel_of(lane):
        return integer(lane & 3)

    @ptx.inline
    def filters_of(lane):
        return integer((lane >> 2) * vector)

    @ptx.inline
    def start_of(lane):
        return integer((lane >> 2) * row_bytes + (lane & 3) * (2 * at_once * 4))

    places = tuple(
        (part * 16 + e // 2 * 8) * row_bytes + (tile // at_once * 8 * at_once + e % 2 * at_once + tile % at_once) * 4
        for part in range(2)
        for tile in range(n_tiles)
        for e in range(4)
    )
    lanes = _Lanes(8 * n_tiles, whole, masked, 1, places, offsets_of, pixel_of, filters_of, start_of)
    return _kernel(variant, lanes)


def fma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_rows

    variant = Gradient(*specialised_on)
    filters, integer, offset_of = variant.filters, ptx.INTEGER[32], _offset_of(variant.lines)
    whole, masked = (ptx_rows.fma_gradients(variant.lines.step_bytes, variant.dy_bytes, end) for end in (False, True))

    @ptx.inline
    def offsets_of(first, lane, f):
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
    def pixel_of(lane):
        return integer(lane >> 4)

    @ptx.inline
    def filters_of(lane):
        return integer((lane & 3) * 16)

    @ptx.inline
    def start_of(lane):
        return integer((lane >> 2 & 3) * (filters * 4) + (lane & 3) * 16)

    places = tuple(j * 4 * filters * 4 + o // 4 * 64 + o % 4 * 4 for j in range(8) for o in range(8))
    return _kernel(variant, _Lanes(64, whole, masked, 2, places, offsets_of, pixel_of, filters_of, start_of))


def _kernel(variant: Gradient, lanes: _Lanes):
    """The kernel whose warps sum by these functions."""
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    lines, filters, threads, stages = variant.lines, variant.filters, variant.threads, variant.stages
    integer, groups = ptx.INTEGER[32], variant.groups
    placed, copy, copy_dy = tile_place(lines), copy_lines(lines, threads), _copy_dy(variant)
    fill_places, next_slab = fill_groups(lines, threads, groups), slab_behind(stages)
    commit, wait = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(stages - 2)
    zeros, add_sums, write_sums = ptx_rows.zeros(lanes.sums), _add_sums(variant, lanes), _write_sums(variant)
    offsets_of, add_tile, set_words = lanes.offsets_of, _add_tile(variant, lanes), SET_WORDS

    def gradients(x, dy, parts, f):
        thread = integer(ptx.thread_x())
        lane, first = integer(thread & 31), integer(ptx.block_y() * filters)
        split, set_ = ptx.divided(integer(thread >> 5), f.sets)
        first_word = integer((ptx.block_z() * f.sets + set_) * set_words)
        offsets = offsets_of(first_word, lane, f)
        slab = integer(integer(ptx_tile.dynamic_shared()) + f.slabs_at)
        filling, tile, ahead = slab, integer(ptx.block_x()), integer(ptx.block_x())
        fill_places(f, thread)
        acc = zeros()
        turn = integer(1 - stages)
        while tile < f.tiles:
            # 1. The tile has arrived, and every warp is done with the one before, whose place is filled next.
            if turn >= 0:
                wait()
                ptx.cuda.syncthreads()
            if ahead < f.tiles:
                n, p, q, begin, _ = placed(ahead, f)
                copy(x, n, p, begin, filling, f, thread)
                copy_dy(dy, n, p, q, first, integer(filling + f.dy_at), f, thread)
            commit()
            ahead, filling = integer(ahead + f.blocks), next_slab(filling, f)

            # 2. Each warp sums groups of pixels.
            if turn >= 0:
                if first_word < f.entries:
                    acc = add_tile(acc, tile, slab, offsets, split, lane, f)
                slab, tile = next_slab(slab, f), integer(tile + f.blocks)
            turn = integer(turn + 1)

        # 3. The splits add up, and the block's sums are written.
        add_sums(acc, split, set_, lane, f, thread)
        write_sums(parts, f, thread)

    data, sums_type = ptx.pointer(lines.dtype), ptx.pointer("f32")
    return gradients, (data, data, sums_type, ptx.record(Rows, 32))


def _add_tile(variant: Gradient, lanes: _Lanes):
    """Device function (sums, tile, slab, offsets, split, lane, f) -> sums with the split's pixels of a tile."""
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    lines, groups, integer, word = variant.lines, variant.groups, ptx.INTEGER[32], ptx.cuda.types.uint32
    placed = tile_place(lines)
    addresses = ptx_rows.addresses(groups, ENTRY_BYTES)
    outputs_left = ptx_rows.outputs_left(groups, ENTRY_BYTES)
    step_bytes, dy_bytes, group_bytes = lines.step_bytes, variant.dy_bytes, GROUP * variant.dy_bytes
    pixel_of, filters_of = lanes.pixel_of, lanes.filters_of

    @ptx.inline
    def added(add, acc, slab, rows, columns, offsets, dy, split, pixel, f):
        entries = integer(integer(ptx_tile.dynamic_shared()) + f.groups_at)
        begin, group = word(slab + pixel * step_bytes), integer(split * groups)
        while group < f.groups:
            entry = word(entries + group * ENTRY_BYTES)
            left = outputs_left(entry, rows, columns)
            where = word(dy + group * group_bytes)
            acc = add(acc, addresses(entry, begin), offsets, where, pixel, left)
            group = integer(group + f.parts * groups)
        return acc

    whole, masked = lanes.whole, lanes.masked

    @ptx.inline
    def tile_added(acc, tile, slab, offsets, split, lane, f):
        _, p, q, _, shift = placed(tile, f)
        pixel, slab_at = pixel_of(lane), integer(slab + shift)
        dy = integer(slab + f.dy_at + pixel * dy_bytes + filters_of(lane))
        rows, columns = integer(f.rows - p), integer(f.columns - q)
        if f.tile_rows <= rows and f.tile_groups * GROUP <= columns and f.groups % groups == 0:
            acc = added(whole, acc, slab_at, rows, columns, offsets, dy, split, pixel, f)
        else:
            acc = added(masked, acc, slab_at, rows, columns, offsets, dy, split, pixel, f)
        return acc

    return tile_added


def _add_sums(variant: Gradient, lanes: _Lanes):
    """Device function (sums, split, set, lane, f, thread): those of all splits in shared memory, in order."""
    from nbdnn.kernels.cuda import ptx, ptx_rows, ptx_tile

    integer, word, store_zero = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[1]
    add_at, start_of, pixel_of = ptx_rows.add_at(lanes.places), lanes.start_of, lanes.pixel_of
    turns, set_sums, threads = lanes.turns, variant.set_sums, variant.threads

    @ptx.inline
    def added(acc, split, set_, lane, f, thread):
        shared, i = integer(ptx_tile.dynamic_shared()), thread
        ptx.cuda.syncthreads()
        while i < f.sets * set_sums:
            store_zero(word(shared + i * 4), word(0))
            i = integer(i + threads)
        turn = integer(0)
        while turn < f.parts * turns:
            ptx.cuda.syncthreads()
            if split * turns + (pixel_of(lane) if turns > 1 else 0) == turn:
                add_at(word(shared + set_ * (set_sums * 4) + start_of(lane)), acc)
            turn = integer(turn + 1)
        ptx.cuda.syncthreads()

    return added


def _write_sums(variant: Gradient):
    """Device function (parts, f, thread): the block's sums from shared memory to its place in the workspace."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, load, store = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.LOAD_SHARED[4], ptx.STORE[4]
    filters, set_sums, threads = variant.filters, variant.set_sums, variant.threads

    @ptx.inline
    def written(parts, f, thread):
        shared, i = integer(ptx_tile.dynamic_shared()), integer(thread * 4)
        chunks, _ = ptx.divided(integer(f.out_c + filters - 1), integer(filters))
        place = integer((ptx.block_x() * chunks + ptx.block_y()) * f.all_sets + ptx.block_z() * f.sets)
        while i < f.sets * set_sums:
            store(parts, integer(place * set_sums + i), load(word(shared + i * 4)))
            i = integer(i + threads * 4)

    return written
