"""Products over all steps of a recurrent network in float32, as `rnn_product.py` has them, by tiles of `fma_tile.py`.

    sums         A = x, rows by inputs                   B = W, gates' units by inputs
    inputs       A = da, rows by gates' units            B = W turned
    parameters   A = da or db, turned                    B = x or h', turned

An operand whose k are neighbours in memory is copied along k, others along their rows, 16 bytes at once where they
begin at such; what lies beyond the last k comes as zeros. The sums of A's rows, which biases' gradients are, are added
up from shared memory by the tiles of the first column. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.fma_tile import STAGE_K as DEPTH
from nbdnn.kernels.cuda.fma_tile import STAGES, Copies, Tile, copy_place, lane_place, pipeline, shared_place
from nbdnn.kernels.cuda.rnn_product import Fields

# Tiles and how much longer a product of theirs takes than of the largest, for want of elements that are used twice.
TILES = ((Tile(128, 128), 1.0), (Tile(128, 64), 1.05), (Tile(64, 64), 1.2))
_QUARTER, _ELEMENTS = 4, 16  # rows, or columns, of a lane's quarter of C, and what is in it


class Variant(NamedTuple):
    """What a kernel is compiled for. form, skip, states: as of `rnn_product.Kind`. words: that are stored at once."""

    form: str
    skip: bool
    states: bool
    tile: Tile
    a: Copies
    b: Copies
    words: int


def tile_of(m: int, n: int, blocks_of_tile: int, device: Gpu) -> Tile:
    """Of products of m by n, of which there are so many beside each other."""

    def cost(tile: Tile) -> float:
        blocks = ceil(m / tile.m) * max(1, ceil(n / tile.n)) * blocks_of_tile
        return ceil(blocks / device.sms) * tile.m * tile.n

    return min(TILES, key=lambda each: cost(each[0]) * each[1])[0]


def variant(form: str, skip: bool, states: bool, tile: Tile, a_words: int, b_words: int, words: int) -> Variant:
    """Neighbours in k are copied one by one: four at once took a fifth longer (3200 x 2048 x 512, a H200)."""
    a_along_k, b_along_k = form != "parameters", form == "sums"
    a = Copies(tile.m, a_along_k, 1 if a_along_k else a_words)
    return Variant(form, skip, states, tile, a, Copies(tile.n, b_along_k, 1 if b_along_k else b_words), words)


def product_kernel(*specialised_on):
    """Pointers: A, B, hx where B is h', C."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_tile

    v = Variant(*specialised_on)
    integer, real, word, zero = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD, ptx.REAL["f32"](0.0)
    tile, words, threads, stage_words = v.tile, v.words, v.tile.threads, STAGES * v.tile.stage_bytes // 4
    tile_m, tile_n, half_m, half_n = tile.m, tile.n, tile.m // 2, tile.n // 2
    of_sums, of_parameters, skip = v.form == "sums", v.form == "parameters", v.skip
    a_lines, a_words, b_lines, b_words = v.a.lines(threads), v.a.words, v.b.lines(threads), v.b.words
    place_a, place_b = copy_place(v.a, threads), copy_place(v.b, threads)
    a_along_k, b_along_k = v.a.along_k, v.b.along_k
    run = pipeline(tile, _copy_stage(v), see=_add_rows(v) if of_parameters else None)
    lane, store_words = lane_place(tile), ptx_local.store("f32", words)

    @ptx.inline
    def finished(total, a, b, direction, row, column, f):
        """An element of the inputs' sums: with its biases, or what stands for a product where there is no W."""
        if skip:
            _, hidden_unit = ptx.divided(column, f.hidden)
            total = total + ptx.load_constant(a, integer(f.a_first + row * f.a_m + hidden_unit))
        bias = integer(f.bias + direction * f.bias_direction + column)
        total = total + ptx.load_constant(b, bias)
        if column < f.both:
            total = total + ptx.load_constant(b, integer(bias + f.n))
        return total

    @ptx.inline
    def store_quarter(out, a, b, direction, base, quarter, first_row, first_column, f):
        values, sums = ptx.cuda.local.array(_QUARTER, real), ptx.cuda.local.array(_ELEMENTS, real)
        for i in range(_ELEMENTS):
            sums[i] = quarter[i]
        for i in range(_QUARTER):
            row = integer(first_row + i)
            if row < f.m:
                at = integer(base + row * f.out_m + first_column)
                for j in range(_QUARTER):
                    column = integer(first_column + j)
                    values[j] = sums[i * _QUARTER + j]
                    if of_sums and column < f.n:
                        values[j] = finished(values[j], a, b, direction, row, column, f)
                    if words == 1 and column < f.n:
                        out[integer(at + j)] = values[j]
                if words > 1 and first_column < f.n:
                    store_words(out, at, values, integer(0))

    def multiply(a, b, state, out, f):
        # 1. Which tile, and where what a thread copies begins: the last rows stand for those beyond them.
        thread, direction, part = integer(ptx.thread_x()), integer(ptx.block_y()), integer(ptx.block_z())
        first_m, column_of_tiles = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        first_m, first_n = integer(first_m * tile_m), integer(column_of_tiles * tile_n)
        of_a, of_b = ptx.cuda.local.array(a_lines, integer), ptx.cuda.local.array(b_lines, integer)
        for i in range(a_lines):
            row, _ = place_a(thread, i)
            row = integer(min(integer(first_m + row), integer(f.m - (1 if a_along_k else a_words))))
            of_a[i] = integer(f.a_first + direction * f.a_direction + row * f.a_m)
            if of_parameters and row >= f.jump_at:
                of_a[i] = integer(of_a[i] + f.a_jump)
        for i in range(b_lines):
            row, _ = place_b(thread, i)
            row = integer(min(integer(first_n + row), integer(f.n - (1 if b_along_k else b_words))))
            of_b[i] = integer(f.b_first + direction * f.b_direction + max(row, integer(0)) * f.b_n)
        column, _ = place_b(thread, 0)
        column = integer(max(integer(min(integer(first_n + column), integer(f.n - b_words))), integer(0)))
        of_state = integer(f.state_first + direction * f.state_direction + column)

        # 2. The product. walk: the next stage's k, its number in its segment, where segments of A and B begin.
        walk, total = ptx.cuda.local.array(4, integer), ptx.cuda.local.array(1, real)
        begin = integer(part * f.stages * DEPTH)
        walk[0], walk[1], walk[2], walk[3], total[0] = begin, integer(0), integer(0), integer(0), zero
        shared = word(ptx_tile.shared_address(ptx.cuda.shared.array(stage_words, real, 128)))
        context = (a, b, state, thread, direction, of_a, of_b, of_state, walk, begin, total, column_of_tiles, f)
        first, second, third, fourth = run(shared, thread, integer(f.segments * f.stages), context)

        # 3. C; and the sums of A's rows behind it.
        base = integer(f.out_first + direction * f.out_direction + part * f.out_part)
        m, n = lane(thread)
        m, n = integer(first_m + m), integer(first_n + n)
        store_quarter(out, a, b, direction, base, first, m, n, f)
        store_quarter(out, a, b, direction, base, second, m, integer(n + half_n), f)
        store_quarter(out, a, b, direction, base, third, integer(m + half_m), n, f)
        store_quarter(out, a, b, direction, base, fourth, integer(m + half_m), integer(n + half_n), f)
        if of_parameters and column_of_tiles == 0 and thread < tile_m and first_m + thread < f.m:
            out[integer(base + f.m * f.n + first_m + thread)] = total[0]

    wide = ptx.pointer("f32")
    return multiply, (wide, wide, wide, wide, ptx.record(Fields, 32))


@cache
def _copy_stage(v: Variant):
    """Device function (context, shared address, is_first) that starts the copies of the next values of k."""
    from nbdnn.kernels.cuda import ptx, ptx_rnn

    integer, word, threads, states = ptx.INTEGER[32], ptx.WORD, v.tile.threads, v.states
    a_copy, a_place, a_to, a_count = _copy_words(v.a, threads)
    b_copy, b_place, b_to, b_count = _copy_words(v.b, threads)
    a_along_k, b_along_k, a_bytes, b_bytes = v.a.along_k, v.b.along_k, 4 * v.a.words, 4 * v.b.words
    b_at, select, nothing = v.tile.b_bytes, ptx_rnn.select, integer(0)

    @ptx.inline
    def copy_stage(context, filling, is_first):
        a, b, state, thread, direction, of_a, of_b, of_state, walk, begin, _, _, f = context
        first_k, a_segment, b_segment = walk[0], walk[2], walk[3]
        for i in range(a_count):
            row, k = a_place(thread, i)
            at = integer(first_k + k)
            line = of_a[i] if a_along_k else of_a[0]
            source = ptx.address(a, integer(line + a_segment + (at if at < f.k else nothing) * f.a_k))
            a_copy(word(filling + word(a_to(row, k))), source, select(at < f.k, integer(a_bytes), nothing))
        for i in range(b_count):
            column, k = b_place(thread, i)
            at = integer(first_k + k)
            line, size = of_b[i] if b_along_k else of_b[0], select(at < f.k, integer(b_bytes), nothing)
            to = word(filling + word(b_at + b_to(column, k)))
            if states:
                here = integer(at + (f.batch if direction else -f.batch))
                inside = here >= 0 and here < f.k
                source = ptx.address(b, integer(line + (here if inside else nothing) * f.b_k))
                if not inside:
                    # The state that the first step began with, if there is one.
                    image = integer(here - f.k) if direction else integer(here + f.batch)
                    if ptx_rnn.given(state) and at < f.k:
                        source = ptx.address(state, integer(of_state + image * f.hidden))
                    else:
                        size = nothing
                b_copy(to, source, size)
            else:
                source = ptx.address(b, integer(line + b_segment + (at if at < f.k else nothing) * f.b_k))
                b_copy(to, source, size)
        walk[0], walk[1] = integer(first_k + DEPTH), integer(walk[1] + 1)
        if walk[1] == f.stages:
            walk[0], walk[1] = begin, integer(0)
            walk[2], walk[3] = integer(walk[2] + f.a_segment), integer(walk[3] + f.b_segment)

    return copy_stage


def _copy_words(copies: Copies, threads: int):
    """The copy of an operand's words, where each lies, where it goes, and how many there are of a thread."""
    from nbdnn.kernels.cuda import ptx_tile

    copy = ptx_tile.COPY_ASYNC[4 * copies.words]
    return copy, copy_place(copies, threads), shared_place(copies), copies.count(threads)


@cache
def _add_rows(v: Variant):
    """Device function (context, shared address) that adds a stage of A's rows to their sums, a thread a row."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    assert v.tile.m <= v.tile.threads
    integer, word, tile_m, to = ptx.INTEGER[32], ptx.WORD, v.tile.m, shared_place(v.a)
    load, float_of = ptx_tile.LOAD_SHARED[1], ptx_tile.float_of

    @ptx.inline
    def add(context, reading):
        _, _, _, thread, _, _, _, _, _, _, total, column_of_tiles, _ = context
        if column_of_tiles == 0 and thread < tile_m:
            for k in range(DEPTH):
                total[0] = total[0] + float_of(load(word(reading + word(to(thread, integer(k))))))

    return add
