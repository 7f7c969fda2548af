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
def copy_filters(count: int, taps: int, threads: int):
    """Device function (w, channel, channels, first, step, shared): filters of so many channels, a tap after the other.

    Channels beyond the last get zeros.
    """
    from nbdnn.kernels.cuda import ptx, ptx_planes

    integer, word, nothing = ptx.INTEGER[32], ptx.WORD, ptx.ELEMENT["f16"](0)

    @ptx.inline
    def copy(w, channel, channels, first, step, shared):
        i = integer(ptx.thread_x())
        while i < count * taps:
            filter_, tap = ptx.divided(i, integer(taps))
            at = integer((channel + filter_) * taps + first + step * tap)
            weight = ptx.load_constant(w, at) if channel + filter_ < channels else nothing
            ptx_planes.store_half(word(shared + word(2 * i)), weight)
            i = integer(i + threads)

    return copy
