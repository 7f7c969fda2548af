"""From a tile's sums in registers to the output: through shared memory, so that what lies together is stored together.

    out[row, column] = epilogue(sums[row, column])                               one part
    parts[part, row, column] = sums[row, column]                                 several parts of a reduction, to be
                                                                                 added and finished by `add_parts.py`,
                                                                                 so that these have no epilogue
Where the output is channels-last, a thread finishes four channels of a pixel; where it is planar, four pixels of a
channel, or one where planes are no multiple of four: 16 bytes of float32, 8 of 16 bits, and the warp whole lines.

Channels-last sums lie in shared memory row by row, a 16-byte chunk at its number xor twice the row's last two bits: the
four rows of two chunks that half a warp writes, and the eight chunks that a quarter reads, meet every bank once. Planar
ones lie column by column, and a column is four words longer than its rows: so do the eight rows of four columns that a
warp writes. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.asked import asked
from nbdnn.kernels.cuda.gemm_tile import Tile
from nbdnn.kernels.cuda.quads import QUAD, bias_quad, store_quad


@cache
def sums_to_shared(tile: Tile, planar: bool):
    """Device function (sums, address, lane, warp's first row, first column): a warp's sums to their places."""
    from nbdnn.kernels.cuda import ptx, ptx_matrix

    row_bytes, column_bytes, word = 4 * tile.n, tile.column_bytes, ptx.WORD
    squares = [
        (16 * i + half, 8 * j) for i in range(tile.warp_m // 16) for j in range(tile.warp_n // 8) for half in (0, 8)
    ]
    by_rows = tuple(((j >> 2 & 7) << 4, ((j >> 2 & ~7) << 4) + i * row_bytes) for i, j in squares)
    by_columns = tuple((0, (j + second) * column_bytes + 4 * i) for i, j in squares for second in (0, 1))
    store_pairs, store_singles = ptx_matrix.store_floats_at(by_rows, 2), ptx_matrix.store_floats_at(by_columns, 1)

    @ptx.inline
    def rows_to_shared(sums, address, lane, row, column):
        own_row, own_column = row + (lane >> 2), column + ((lane & 3) << 1)
        chunk = (own_column >> 2) ^ ((own_row & 3) << 1)
        store_pairs(word(address + own_row * row_bytes + (chunk << 4) + ((own_column & 2) << 2)), sums)

    @ptx.inline
    def columns_to_shared(sums, address, lane, row, column):
        own_row, own_column = row + (lane >> 2), column + ((lane & 3) << 1)
        store_singles(word(address + own_column * column_bytes + (own_row << 2)), sums)

    return columns_to_shared if planar else rows_to_shared


@cache
def tile_store(dtype: str, tokens: tuple[str, ...], tile: Tile):
    """Device function that stores a tile from shared memory, to which its sums and the rows' places were written.

    (shared, thread, column, alive, channel, f, operands, scalars): `column` is where the thread's four columns lie in
    a row of the output, `channel` their first, alive whether they exist; operands are out, bias, residual and parts,
    scalars alpha and beta; f.part_elems is from one part to the next, 0 where the sums are whole.
    A row whose place is negative does not exist.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, long, word = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD
    shift_of, store_part = bias_quad(dtype, tokens, True), store_quad("f32")
    load_quad, load_word, floats_of = ptx_tile.LOAD_SHARED[4], ptx_tile.LOAD_SHARED[1], ptx_tile.floats_of
    row_bytes, rows_at, extent_m = 4 * tile.n, tile.rows_at, tile.m
    step, quads_a_row = tile.threads * QUAD // tile.n, tile.n // QUAD
    at_once, words, ask, finish, go_on = asked(dtype, tokens, QUAD, extent_m // step)

    @ptx.inline
    def store(shared, thread, column, alive, channel, f, operands, scalars):
        out, bias, residual, parts = operands
        part = long(long(ptx.block_y()) * f.part_elems)
        row, chunk = ptx.divided(thread, integer(quads_a_row))
        shift = shift_of(bias, channel if alive else integer(0))
        held, places = ptx.cuda.local.array(words, word), ptx.cuda.local.array(at_once, integer)
        while row < extent_m:
            for i in range(at_once):
                place, of_row = integer(-1), integer(row + i * step)
                if alive and of_row < extent_m:
                    place = integer(load_word(word(shared + rows_at + 4 * of_row)))
                ask(held, i, place >= 0, (out, bias, residual), integer(place + column), channel)
                places[i] = place
            for _ in range(at_once):
                place = places[0]
                if place >= 0:
                    values = floats_of(load_quad(word(shared + row * row_bytes + ((chunk ^ ((row & 3) << 1)) << 4))))
                    at = integer(place + column)
                    if f.part_elems > 0:
                        store_part(parts, long(part + at), values)
                    else:
                        finish(held, values, scalars, out, at, shift)
                for i in range(at_once - 1):
                    places[i] = places[i + 1]
                go_on(held)
                row = integer(row + step)

    return store


@cache
def planar_store(dtype: str, tokens: tuple[str, ...], tile: Tile, run: int):
    """The same for planar outputs, of which a thread stores `run` neighbouring pixels, 1 or 4, at once.

    (shared, thread, channel, columns, plane, f, operands, scalars): the tile's columns are the channels from `channel`
    on, of which `columns` exist, and lie `plane` elements apart.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, long, word = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD
    load_word, load_sums, to_floats = ptx_tile.LOAD_SHARED[1], ptx_tile.LOAD_SHARED[run], ptx_tile.floats_of
    shift_of, store_part = bias_quad(dtype, tokens, False), store_quad("f32")
    column_bytes, rows_at, runs, elements = tile.column_bytes, tile.rows_at, tile.m // run, tile.n * tile.m // run
    threads = tile.threads
    at_once, words, ask, finish, go_on = asked(dtype, tokens, run, elements // threads, holds_bias=True)

    @ptx.inline
    def store_one(parts, at, value):
        parts[at] = value

    if run == 1:
        store_part, to_floats = store_one, ptx_tile.float_of

    @ptx.inline
    def store_each(shared, thread, channel, columns, plane, f, operands, scalars):
        """Where nothing is read."""
        out, bias, _, parts = operands
        part, element = long(long(ptx.block_y()) * f.part_elems), thread
        held = ptx.cuda.local.array(words, word)
        while element < elements:
            column, piece = ptx.divided(element, integer(runs))
            row = integer(piece * run)
            place = integer(load_word(word(shared + rows_at + 4 * row)))
            if place >= 0 and column < columns:
                own_channel = integer(channel + column)
                values = to_floats(load_sums(word(shared + column * column_bytes + 4 * row)))
                at = integer(place + own_channel * plane)
                if f.part_elems > 0:
                    store_part(parts, long(part + at), values)
                else:
                    finish(held, values, scalars, out, at, shift_of(bias, own_channel))
            element = integer(element + threads)

    @ptx.inline
    def store(shared, thread, channel, columns, plane, f, operands, scalars):
        out, bias, residual, parts = operands
        part, element = long(long(ptx.block_y()) * f.part_elems), thread
        held, places = ptx.cuda.local.array(words, word), ptx.cuda.local.array(at_once, integer)
        while element < elements:
            for i in range(at_once):
                later = integer(element + i * threads)
                column, piece = ptx.divided(later, integer(runs))
                at, own_channel = integer(-1), integer(channel + column)
                if later < elements and column < columns:
                    place = integer(load_word(word(shared + rows_at + 4 * run * piece)))
                    at = integer(place + own_channel * plane) if place >= 0 else place
                ask(held, i, at >= 0, (out, bias, residual), at, own_channel)
                places[i] = at
            for _ in range(at_once):
                column, piece = ptx.divided(element, integer(runs))
                row, at = integer(piece * run), places[0]
                if at >= 0:
                    values = to_floats(load_sums(word(shared + column * column_bytes + 4 * row)))
                    if f.part_elems > 0:
                        store_part(parts, long(part + at), values)
                    else:
                        finish(held, values, scalars, out, at, shift_of(bias, integer(channel + column)))
                for i in range(at_once - 1):
                    places[i] = places[i + 1]
                go_on(held)
                element = integer(element + threads)

    return store_each if {"beta", "res"}.isdisjoint(tokens) else store
