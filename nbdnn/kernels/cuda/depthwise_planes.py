"""Device functions that copy a tile of an image to planes in shared memory, one a channel.

Rows and columns beyond the image become zeros, or their row is left out where a lane that wants it will be sent to the
row of zeros. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.planes_plan import VECTOR, Copied, Planes

_AHEAD = 4  # pairs of pixels that a thread asks for at once: 32 registers


class Part(NamedTuple):
    """What of an image comes into the planes: channels from `channel` on, rows `low` to `high` counted from `row`,
    columns from `column` on. at: of the image's first element; side: its strides and extents."""

    image: object
    at: int
    channel: int
    channels: int
    row: int
    low: int
    high: int
    column: int
    side: object


@cache
def channel_of(vectors: int):
    """Device function (plane) -> the channel of a block that it is of."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def channel(plane):
        element, vector = ptx.divided(plane, integer(vectors))
        return integer(VECTOR * vector + element)

    return channel


@cache
def clear_zeros(planes: Planes, threads: int):
    """Device function (shared): each plane's row of zeros."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, store = ptx.INTEGER[32], ptx.WORD, ptx_tile.STORE_SHARED[4]
    chunks, plane_bytes, zeros_at, count = planes.chunks, planes.plane_bytes, planes.zeros_at, planes.channels

    @ptx.inline
    def clear(shared):
        i, nothing = integer(ptx.thread_x()), (word(0), word(0), word(0), word(0))
        while i < count * chunks:
            plane, chunk = ptx.divided(i, integer(chunks))
            store(word(shared + word(plane * plane_bytes + zeros_at + 16 * chunk)), nothing)
            i = integer(i + threads)

    return clear


@cache
def rows_inside(rows: int):
    """Device function (row, extent) -> (low, high): which of so many rows from there on are in the image."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def inside(row, extent):
        low = integer(-row) if row < 0 else integer(0)
        high = integer(min(integer(extent - row), integer(rows)))
        return low, integer(max(high, low))

    return inside


@cache
def copy_in(copied: Copied):
    """Device function (part, shared): complete for this thread when it returns."""
    if copied.last:
        return _turned(copied)
    return _elements(copied) if copied.run == 1 else _runs(copied)


def _turned(copied: Copied):
    """Channels-last: eight channels of two pixels at a time; a few are asked for before the first is waited for."""
    from nbdnn.kernels.cuda import ptx, ptx_planes

    planes, threads = copied.planes, copied.threads
    integer, word, load = ptx.INTEGER[32], ptx.WORD, ptx_planes.load_vector
    vectors, pairs, row_bytes, plane_bytes = planes.vectors, planes.chunks * 4, planes.row_bytes, planes.plane_bytes
    turn = ptx_planes.turn_in(vectors * plane_bytes)

    @ptx.inline
    def read(i, p, shared):
        rest, vector = ptx.divided(i, integer(vectors))
        row, pair = ptx.divided(rest, integer(pairs))
        row, column, channel = integer(row + p.low), integer(p.column + 2 * pair), integer(p.channel + VECTOR * vector)
        here = row < p.high
        wanted = here and channel < p.channels
        at = integer(p.at + (p.row + row) * p.side.h + column * p.side.w + channel)
        first = load(p.image, at, wanted and ptx.inside(column, p.side.columns) != 0)
        at, column = integer(at + p.side.w), integer(column + 1)
        second = load(p.image, at, wanted and ptx.inside(column, p.side.columns) != 0)
        return here, word(shared + word(vector * plane_bytes + row * row_bytes + 4 * pair)), first, second

    @ptx.inline
    def put(pixels):
        here, where, first, second = pixels
        if here:
            turn(where, first, second)

    def reading(times):
        """Device function (i, part, shared) -> so many reads, each beside all that follow it."""
        if times == 1:
            return read
        rest = reading(times - 1)

        @ptx.inline
        def several(i, p, shared):
            return read(i, p, shared), rest(integer(i + threads), p, shared)

        return several

    def putting(times):
        if times == 1:
            return put
        rest = putting(times - 1)

        @ptx.inline
        def several(pixels):
            put(pixels[0])
            rest(pixels[1])

        return several

    times = max(1, min(_AHEAD, planes.rows * pairs * vectors // threads))
    read_all, put_all = reading(times), putting(times)

    @ptx.inline
    def copy(p, shared):
        i, count = integer(ptx.thread_x()), integer((p.high - p.low) * (pairs * vectors))
        while i < count:
            put_all(read_all(i, p, shared))
            i = integer(i + times * threads)

    return copy


def _by_planes(copied: Copied, run: int, move):
    """Planar: a warp takes a plane, its lanes runs of a row. move(image, at, inside, address) copies one."""
    from nbdnn.kernels.cuda import ptx

    planes, warps = copied.planes, copied.threads // 32
    integer, word, channel_of_plane = ptx.INTEGER[32], ptx.WORD, channel_of(copied.planes.vectors)
    runs, row_bytes, plane_bytes, count = (
        planes.chunks * (8 // run),
        planes.row_bytes,
        planes.plane_bytes,
        planes.channels,
    )

    @ptx.inline
    def copy(p, shared):
        thread = integer(ptx.thread_x())
        plane = integer(thread >> 5)
        while plane < count:
            channel, i = integer(p.channel + channel_of_plane(plane)), integer(thread & 31)
            at = integer(p.at + channel * p.side.c)
            while i < integer((p.high - p.low) * runs):
                row, piece = ptx.divided(i, integer(runs))
                row, column = integer(row + p.low), integer(p.column + run * piece)
                inside = channel < p.channels and ptx.inside(column, p.side.columns) != 0
                where = word(shared + word(plane * plane_bytes + row * row_bytes + 2 * run * piece))
                move(p.image, integer(at + (p.row + row) * p.side.h + column), inside, where)
                i = integer(i + 32)
            plane = integer(plane + warps)

    return copy


def _elements(copied: Copied):
    from nbdnn.kernels.cuda import ptx, ptx_planes

    store, nothing = ptx_planes.store_half, ptx.ELEMENT["f16"](0)

    @ptx.inline
    def move(image, at, inside, where):
        store(where, ptx.load_constant(image, at) if inside else nothing)

    return _by_planes(copied, 1, move)


def _runs(copied: Copied):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, size_bytes = ptx.INTEGER[32], 2 * copied.run
    asynchronous, wait = ptx_tile.COPY_ASYNC[size_bytes], ptx_tile.copy_async_wait(0)

    @ptx.inline
    def move(image, at, inside, where):
        asynchronous(where, ptx.address(image, at if inside else integer(0)), integer(size_bytes if inside else 0))

    start = _by_planes(copied, copied.run, move)

    @ptx.inline
    def copy(p, shared):
        start(p, shared)
        ptx_tile.copy_async_commit()
        wait()

    return copy


@cache
def copy_filters(count: int, taps: int, size_bytes: int, threads: int):
    """Device function (w, channel, channels, shared): filters of so many channels as they lie in memory, so many bytes
    a copy, which are under way when it returns. channel: a multiple of 8; behind the last one come zeros."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, copy_async, size = ptx.INTEGER[32], ptx.WORD, ptx_tile.COPY_ASYNC[size_bytes], size_bytes // 2

    @ptx.inline
    def copy(w, channel, channels, shared):
        i, first = integer(size * ptx.thread_x()), integer(channel * taps)
        count_here = integer(min(integer(count * taps), integer((channels - channel) * taps)))
        while i < count_here:
            there = integer(min(integer(size), integer(count_here - i)))
            copy_async(word(shared + word(2 * i)), ptx.address(w, integer(first + i)), integer(2 * there))
            i = integer(i + size * threads)
        ptx_tile.copy_async_commit()

    return copy


# ---- in two steps: asked for while something else is multiplied, and turned when it is there -------------------------


def waiting_bytes(copied: Copied) -> int:
    """Of shared memory where what `ask` asks for waits for `settle`."""
    return 32 * _items(copied) if copied.last else 0


def _items(copied: Copied) -> int:
    """Pairs of pixels of eight channels."""
    planes = copied.planes
    return planes.rows * planes.chunks * 4 * planes.vectors


@cache
def ask(copied: Copied):
    """Device function (part, waiting): channels-last, copies are under way when it returns; planar, nothing."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    planes, threads, items = copied.planes, copied.threads, _items(copied)
    integer, word, copy_async = ptx.INTEGER[32], ptx.WORD, ptx_tile.COPY_ASYNC[16]
    vectors, pairs = planes.vectors, planes.chunks * 4

    @ptx.inline
    def nothing(p, waiting):
        return

    @ptx.inline
    def start(p, waiting):
        i, count = integer(ptx.thread_x()), integer((p.high - p.low) * (pairs * vectors))
        while i < count:
            rest, vector = ptx.divided(i, integer(vectors))
            row, pair = ptx.divided(rest, integer(pairs))
            column, channel = integer(p.column + 2 * pair), integer(p.channel + VECTOR * vector)
            at = integer(p.at + (p.row + p.low + row) * p.side.h + column * p.side.w + channel)
            for pixel in range(2):
                inside = channel < p.channels and ptx.inside(integer(column + pixel), p.side.columns) != 0
                source = ptx.address(p.image, integer(at + pixel * p.side.w) if inside else integer(0))
                copy_async(word(waiting + word(16 * (i + pixel * items))), source, integer(16 if inside else 0))
            i = integer(i + threads)
        ptx_tile.copy_async_commit()

    return start if copied.last else nothing


@cache
def settle(copied: Copied):
    """Device function (part, waiting, shared): what the same thread has asked for to its planes; planar, all copies."""
    from nbdnn.kernels.cuda import ptx, ptx_planes, ptx_tile

    planes, threads, items = copied.planes, copied.threads, _items(copied)
    integer, word, load = ptx.INTEGER[32], ptx.WORD, ptx_tile.LOAD_SHARED[4]
    vectors, pairs, row_bytes, plane_bytes = planes.vectors, planes.chunks * 4, planes.row_bytes, planes.plane_bytes
    turn = ptx_planes.turn_in(vectors * plane_bytes)

    @ptx.inline
    def turn_all(p, waiting, shared):
        i, count = integer(ptx.thread_x()), integer((p.high - p.low) * (pairs * vectors))
        while i < count:
            rest, vector = ptx.divided(i, integer(vectors))
            row, pair = ptx.divided(rest, integer(pairs))
            where = word(shared + word(vector * plane_bytes + (row + p.low) * row_bytes + 4 * pair))
            turn(where, load(word(waiting + word(16 * i))), load(word(waiting + word(16 * (i + items)))))
            i = integer(i + threads)

    if copied.last:
        return turn_all
    copy = copy_in(copied)

    @ptx.inline
    def copy_all(p, waiting, shared):
        copy(p, shared)

    return copy_all
