"""Device functions that bring lines of the image to shared memory, as `rows_plan.py` lays them out, and its tables."""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.rows_plan import ENTRY_BYTES, GROUP, Lines

_BEYOND = 1 << 15  # the row of a group that no tile has


@cache
def tile_place(form: Lines):
    """Device function (tile, f) -> (n, first output row and column, first element copied, bytes from it to a window).

    The element counts from the line's start, and may lie before it.
    """
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]
    inner, odd, itemsize, elems = form.inner, form.odd, form.itemsize, form.copy_bytes // form.itemsize

    @ptx.inline
    def placed(tile, f):
        rest, across = ptx.divided(tile, f.tiles_w)
        n, down = ptx.divided(rest, f.tiles_h)
        p, q = integer(down * f.tile_rows), integer(across * f.tile_groups * GROUP)
        start = integer((q * f.stride_w - f.pad_w) * inner - odd)
        first = integer(start & -elems)
        return n, p, q, first, integer((start - first) * itemsize)

    return placed


@cache
def copy_lines(form: Lines, threads: int):
    """Device function (image, n, first output row, first element, shared address, f, thread): starts a slab's copies.

    A warp a line: what lies outside of the image is zero.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, warps, planar = ptx.INTEGER[32], ptx.cuda.types.uint32, threads // 32, form.planar
    copy, copy_bytes, elems = ptx_tile.COPY_ASYNC[form.copy_bytes], form.copy_bytes, form.copy_bytes // form.itemsize

    @ptx.inline
    def copied(image, n, p, first, slab, f, thread):
        line, lane = integer(thread >> 5), integer(thread & 31)
        top = integer(p * f.stride_h - f.pad_h)
        while line < f.planes * f.in_rows:
            plane, row = ptx.divided(line, f.in_rows) if planar else (integer(0), line)
            h = integer(top + row)
            from_ = integer(n * f.image_n + plane * f.image_c + h * f.image_h)
            inside = h >= 0 and h < f.extent_h
            i = lane
            while i < f.line_copies:
                at = integer(first + i * elems)
                live = inside and at >= 0 and at < f.line_elems
                source = ptx.address(image, integer(from_ + at) if live else integer(0))
                copy(word(slab + line * f.pitch + i * copy_bytes), source, integer(copy_bytes if live else 0))
                i = integer(i + 32)
            line = integer(line + warps)

    return copied


@cache
def slab_behind(stages: int):
    """Device function (slab, f) -> the slab that is filled after it, of `stages` in a ring."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer = ptx.INTEGER[32]

    @ptx.inline
    def behind(slab, f):
        first, following = integer(integer(ptx_tile.dynamic_shared()) + f.slabs_at), integer(slab + f.slab_bytes)
        return first if following == integer(first + stages * f.slab_bytes) else following

    return behind


@cache
def word_place(form: Lines):
    """Device function (word, f) -> (segment, its first element, which may be before the segment's own)."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]
    words, per_word, odd = integer(form.segment_words), 4 // form.itemsize, form.odd

    @ptx.inline
    def placed(at, f):
        segment, inner = ptx.divided(at, words)
        return segment, integer(inner * per_word - odd)

    return placed


@cache
def segment_offset():
    """Device function (segment, f) -> bytes from the slab to the first line of a segment."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def offset(segment, f):
        plane, r = ptx.divided(segment, f.taps_h)
        return integer((plane * f.in_rows + r * f.dilation_h) * f.pitch)

    return offset


@cache
def word_offset(form: Lines):
    """Device function (word, f) -> bytes from where a window begins to that word."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]
    words, of_segment = integer(form.segment_words), segment_offset()

    @ptx.inline
    def offset(at, f):
        segment, inner = ptx.divided(at, words)
        return integer(of_segment(segment, f) + inner * 4)

    return offset


@cache
def fill_words(form: Lines, threads: int):
    """Device function (f, thread): the table of words, (offset, mask), completed by words that do not count."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, store = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[2]
    offset, placed, run = word_offset(form), word_place(form), form.run
    narrow = form.itemsize == 2

    @ptx.inline
    def mask(at, f):
        if not narrow:
            return word(0xFFFFFFFF)
        _, element = placed(at, f)
        low = word(0xFFFF) if element >= 0 else word(0)
        return word(low | word(0xFFFF0000)) if element + 1 < run else low

    @ptx.inline
    def filled(f, thread):
        i = thread
        while i < f.fragments * 8:
            entry = (word(offset(i, f)), mask(i, f)) if i < f.entries else (word(0), word(0))
            store(word(integer(ptx_tile.dynamic_shared()) + i * ENTRY_BYTES), entry)
            i = integer(i + threads)

    return filled


@cache
def fill_segments(threads: int):
    """Device function (f, thread): the table of segments, (offset, 0)."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, store = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[2]
    offset = segment_offset()

    @ptx.inline
    def filled(f, thread):
        i = thread
        while i < f.entries:
            store(word(integer(ptx_tile.dynamic_shared()) + i * ENTRY_BYTES), (word(offset(i, f)), word(0)))
            i = integer(i + threads)

    return filled


@cache
def fill_groups(form: Lines, threads: int, turn: int):
    """Device function (f, thread): the table of groups, (offset, row << 16 | column), completed to whole turns."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, store = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[2]
    group_bytes = GROUP * form.step_bytes

    @ptx.inline
    def filled(f, thread):
        i = thread
        while i < integer((f.groups + turn - 1) // turn * turn):
            row, column = ptx.divided(i, f.tile_groups)
            offset = integer(row * f.stride_h * f.pitch + column * group_bytes)
            place = integer(row * 65536 + column * GROUP)
            if i >= f.groups:
                offset, place = integer(0), integer(_BEYOND * 65536)
            store(word(integer(ptx_tile.dynamic_shared()) + f.groups_at + i * ENTRY_BYTES), (word(offset), word(place)))
            i = integer(i + threads)

    return filled


@cache
def group_place():
    """Device function (place of a group's table) -> (row, column) of its first pixel in the tile."""
    from nbdnn.kernels.cuda import ptx

    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32

    @ptx.inline
    def placed(place):
        return integer(word(place) >> word(16)), integer(word(place) & word(0xFFFF))

    return placed
