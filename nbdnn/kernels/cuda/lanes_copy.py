"""Device functions that copy pixels and filters of 32 channels to shared memory, asynchronously.

Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.lanes_plan import CHUNK_BYTES, LANES, PIXEL_BYTES, TAP_BYTES, Held

_CHUNKS = PIXEL_BYTES // CHUNK_BYTES


class Part(NamedTuple):
    """What of an image is copied: channels from `channel` on, rows `low` to `high` counted from `row`, and columns from
    `column` on. at: of the image's first element; columns: of the image; channels: of a pixel."""

    image: object
    at: int
    channel: int
    channels: int
    row: int
    low: int
    high: int
    column: int
    columns: int


@cache
def copy_pixels(held: Held, threads: int):
    """Device function (part, shared): rows that are in the image, zeros beside it; under way when it returns."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, copy_async = ptx.INTEGER[32], ptx.WORD, ptx_tile.COPY_ASYNC[CHUNK_BYTES]
    row_chunks = held.columns * _CHUNKS

    @ptx.inline
    def copy(p, shared):
        i, count = integer(ptx.thread_x() + p.low * row_chunks), integer(p.high * row_chunks)
        while i < count:
            pixel, chunk = ptx.divided(i, integer(_CHUNKS))
            row, column = ptx.divided(pixel, integer(held.columns))
            column, channel = integer(column + p.column), integer(p.channel + 4 * chunk)
            inside = channel < p.channels and ptx.inside(column, p.columns) != 0
            at = integer(p.at + ((p.row + row) * p.columns + column) * p.channels + channel)
            source = ptx.address(p.image, at if inside else integer(0))
            copy_async(word(shared + word(CHUNK_BYTES * i)), source, integer(CHUNK_BYTES if inside else 0))
            i = integer(i + threads)

    return copy


@cache
def copy_filters(taps: int, threads: int):
    """Device function (w, channel, channels, shared): filters of 32 channels, tap by tap; under way when it returns."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, copy_async = ptx.INTEGER[32], ptx.WORD, ptx_tile.COPY_ASYNC[4]

    @ptx.inline
    def copy(w, channel, channels, shared):
        i = integer(ptx.thread_x())
        while i < LANES * taps:
            lane, tap = ptx.divided(i, integer(taps))
            inside = channel + lane < channels
            source = ptx.address(w, integer(channel * taps + i) if inside else integer(0))
            copy_async(word(shared + word(TAP_BYTES * tap + 4 * lane)), source, integer(4 if inside else 0))
            i = integer(i + threads)

    return copy
