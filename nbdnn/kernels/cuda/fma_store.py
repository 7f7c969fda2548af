"""A block's tile of float32 sums from its lanes' registers to a tensor, by way of shared memory, and what finishes it.

    registers --half a tile at a time--> shared memory [lines][along + 4] --whole lines of memory--> out

Lanes hold squares of 4 x 4, memory wants neighbours: through shared memory every store of a warp is one piece. There
`along` is what is contiguous in the output: the channels n, or the pixels m. The loop that finishes the sums is not
unrolled, so that an exp or tanh stands in the code once. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.fma_tile import Tile, lane_place, pitch_bytes


class Store(NamedTuple):
    """along_n: whether n is contiguous, else m; `words` elements are stored at once. parts: sums, not yet finished."""

    along_n: bool
    words: int
    parts: bool
    epilogue: tuple[str, ...]


@cache
def tile_store(tile: Tile, store: Store):
    """Device function (shared, rows, thread, quarters, (out, bias, residual), (alpha, beta), place).

    rows: shared address of an int32 a row, its first element in out, or -1 where there is no such row. place: columns
    inside of the matrix, from a column to the next in memory, channel of the first column. The shared memory must hold
    half a tile; the block's threads may still be reading it.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, tile.threads
    words, along_n = store.words, store.along_n
    along, lines = (tile.n, tile.m // 2) if along_n else (tile.m, tile.n // 2)
    pitch, pieces = pitch_bytes(along), along // words
    placed, write_lines = lane_place(tile), _write_lines(along, not along_n)
    load_row, load, finish = ptx_tile.LOAD_SHARED[1], ptx_tile.LOAD_SHARED[words], _finish(store)

    @ptx.inline
    def write_half(shared, rows, thread, first_line, pointers, scalars, place):
        (out, bias, residual), (columns, step, channel) = pointers, place
        element = integer(thread)
        while element < lines * pieces:
            line, piece = ptx.divided(element, integer(pieces))
            at = integer(piece * words)
            row, column = (integer(first_line + line), at) if along_n else (at, integer(first_line + line))
            start = integer(load_row(word(rows + row * 4)))
            if start >= 0 and column < columns:
                sums = load(word(shared + line * pitch + at * 4))
                to = integer(start + column * step)
                finish(sums, out, to, bias, integer(channel + column), residual, scalars)
            element = integer(element + threads)

    @ptx.inline
    def run(shared, rows, thread, quarters, pointers, scalars, place):
        c00, c01, c10, c11 = quarters
        m, n = placed(ptx_tile.computed_here(thread))
        line, at = (m, n) if along_n else (n, m)
        to = word(shared + line * pitch + at * 4)
        half = integer(0)
        while half < 2:
            ptx.cuda.syncthreads()
            if half == 0:
                write_lines(to, c00, c01 if along_n else c10)
            else:
                write_lines(to, c10 if along_n else c01, c11)
            ptx.cuda.syncthreads()
            write_half(shared, rows, thread, integer(half * lines), pointers, scalars, place)
            half = integer(half + 1)

    return run


@cache
def _write_lines(along: int, turned: bool):
    """Device function (shared address, two quarters half an extent apart): four lines, rows or columns of each."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    word, store, bits = ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[4], ptx_tile.words_of
    pitch, half = pitch_bytes(along), 2 * along

    @ptx.inline
    def rows(to, quarter):
        store(word(to), bits(quarter[0:4]))
        store(word(to + pitch), bits(quarter[4:8]))
        store(word(to + 2 * pitch), bits(quarter[8:12]))
        store(word(to + 3 * pitch), bits(quarter[12:16]))

    @ptx.inline
    def columns(to, q):
        store(word(to), bits((q[0], q[4], q[8], q[12])))
        store(word(to + pitch), bits((q[1], q[5], q[9], q[13])))
        store(word(to + 2 * pitch), bits((q[2], q[6], q[10], q[14])))
        store(word(to + 3 * pitch), bits((q[3], q[7], q[11], q[15])))

    quarter_lines = columns if turned else rows

    @ptx.inline
    def written(to, first, second):
        quarter_lines(to, first)
        quarter_lines(word(to + half), second)

    return written


@cache
def _finish(store: Store):
    """Device function (words, out, at, bias, channel, residual, (alpha, beta)) that stores them to out[at]."""
    from nbdnn.kernels.cuda import epilogue, ptx, ptx_tile

    tokens, real, bits = store.epilogue, ptx_tile.float_of, ptx_tile.words_of
    put, get, get_constant = ptx.STORE[store.words], ptx.LOAD[4], ptx.LOAD_CONSTANT[4]
    finished, finish_one = epilogue.finish("f32", tokens), epilogue.store("f32", tokens)
    reads_out, has_bias, has_residual = "beta" in tokens, "bias" in tokens, "res" in tokens
    along_n = store.along_n

    @ptx.inline
    def part(sums, out, at, bias, channel, residual, scalars):
        put(out, at, sums)

    @ptx.inline
    def one(sums, out, at, bias, channel, residual, scalars):
        alpha, beta = scalars
        finish_one(real(sums), alpha, beta, out, at, bias, channel, residual)

    @ptx.inline
    def shift_of(bias, channel):
        if along_n:
            return get_constant(bias, channel)
        shift = ptx_tile.word_of(ptx.load_constant(bias, channel))
        return shift, shift, shift, shift

    @ptx.inline
    def four(sums, out, at, bias, channel, residual, scalars):
        alpha, beta = scalars
        before = get(out, at) if reads_out else sums
        shift = shift_of(bias, channel) if has_bias else sums
        added = get_constant(residual, at) if has_residual else sums
        y0 = finished(real(sums[0]), alpha, beta, real(before[0]), real(shift[0]), real(added[0]))
        y1 = finished(real(sums[1]), alpha, beta, real(before[1]), real(shift[1]), real(added[1]))
        y2 = finished(real(sums[2]), alpha, beta, real(before[2]), real(shift[2]), real(added[2]))
        y3 = finished(real(sums[3]), alpha, beta, real(before[3]), real(shift[3]), real(added[3]))
        put(out, at, bits((y0, y1, y2, y3)))

    if store.parts:
        return part
    return four if store.words == 4 else one
