"""What a block multiplies for `rnn_product.py`: a tile of C of 64 x 64 from stages of 16 values of k.

    FMA units      a thread has 8 x 4 of C; A and B lie k by k in shared memory: 3 loads of 16 bytes for 32
                   multiply-adds, of which a warp's meet each bank at most twice
    matrix units   a warp has 32 x 32 of C, by mma.sync of TF32: fragments and places in shared memory are those of
                   `gemm_tile.py`, straight where an operand lies along k and turned where it does not

16-bit data are exact in TF32, float32 is rounded to nearest on its way to shared memory. A stage lies in one of two
buffers. Accumulates in the compute type. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from nbdnn.problem import ITEMSIZE

TILE, STAGE_K, THREADS = 64, 16, 128
ALIGN_BYTES = 128  # of shared memory: places in it are told apart by an exclusive or
_BUFFERS = 2
_PITCH = TILE + 4  # elements of a row of shared memory of the FMA units: one k
_ROWS, _COLUMNS = 8, 4  # of C, of a thread of the FMA units
_WARP = 32  # rows and columns of C of a warp of the matrix units
_OPERAND_BYTES = TILE * STAGE_K * 4  # of a stage, in TF32
RUN = {False: _COLUMNS, True: 2}  # neighbours in a row of C that a thread has, by whether matrix units multiply


class Operand(NamedTuple):
    """A or B: its dtype in memory, whether neighbours there are neighbours in k, and how many are copied at once."""

    dtype: str
    along_k: bool
    lanes: int

    @property
    def copies(self) -> int:
        """Of a thread."""
        return TILE * STAGE_K // (THREADS * self.lanes)

    @property
    def of_k(self) -> int:
        """Values of k in a copy."""
        return self.lanes if self.along_k else 1

    @property
    def rows(self) -> int:
        """Rows in a copy."""
        return 1 if self.along_k else self.lanes


class Unit(NamedTuple):
    """Device functions on shared memory of so many elements of the compute type.

    no_sums: () -> sums. put_a, put_b: (shared, buffer, row, k, values, i) copies values[i] and on to their place.
    first: (thread) -> (m, n) of the tile where its part of C, or its warp's, begins. multiply: (shared, buffer, thread,
    m, n, sums) -> sums, with the products of a stage. store: (sums, thread, row, column, given), where that part begins
    in C, hands every run of neighbours to the function (given, row, column, values) that the unit was made with.
    """

    shared_elems: int
    no_sums: Callable[..., Any]
    put_a: Callable[..., Any]
    put_b: Callable[..., Any]
    first: Callable[..., Any]
    multiply: Callable[..., Any]
    store: Callable[..., Any]


@cache
def place(operand: Operand):
    """Device function (thread, i) -> (row of the tile, k) where a thread's copy i begins."""
    from nbdnn.kernels.cuda import ptx

    small, lanes = ptx.INTEGER[32], operand.lanes
    of_k, of_row = STAGE_K // lanes, TILE // lanes  # copies of all k of a row, of all rows of a k

    @ptx.inline
    def neighbours_in_k(thread, i):
        return small(thread // of_k + i * (THREADS // of_k)), small((thread & (of_k - 1)) * lanes)

    @ptx.inline
    def neighbours_in_tile(thread, i):
        return small((thread & (of_row - 1)) * lanes), small(thread // of_row + i * (THREADS // of_row))

    return neighbours_in_k if operand.along_k else neighbours_in_tile


def fma_unit(compute: str, store_run) -> Unit:
    """Of operands that are copied element by element."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_tile

    small, real, u32, item = ptx.INTEGER[32], ptx.REAL[compute], ptx.WORD, ITEMSIZE[compute]
    lanes, count, buffer_elems, zero = 16 // item, _ROWS * _COLUMNS, 2 * STAGE_K * _PITCH, real(0.0)
    load_shared = ptx_local.load_shared(compute, lanes)

    @ptx.inline
    def no_sums():
        sums = ptx.cuda.local.array(count, real)
        for i in range(count):
            sums[i] = zero
        return sums

    @ptx.inline
    def put_a(shared, buffer, row, k, values, i):
        shared[small(buffer * buffer_elems + k * _PITCH + row)] = values[i]

    @ptx.inline
    def put_b(shared, buffer, row, k, values, i):
        shared[small(buffer * buffer_elems + (STAGE_K + k) * _PITCH + row)] = values[i]

    @ptx.inline
    def first(thread):
        return small(thread // (TILE // _COLUMNS) * _ROWS), small((thread & (TILE // _COLUMNS - 1)) * _COLUMNS)

    @ptx.inline
    def multiply(shared, buffer, thread, m, n, sums):
        a, b = ptx.cuda.local.array(_ROWS, real), ptx.cuda.local.array(_COLUMNS, real)
        base = u32(ptx_tile.shared_address(shared) + u32(buffer * (buffer_elems * item)))
        for k in range(STAGE_K):
            for i in range(0, _ROWS, lanes):
                load_shared(a, i, u32(base + u32((k * _PITCH + m + i) * item)))
            for i in range(0, _COLUMNS, lanes):
                load_shared(b, i, u32(base + u32(((STAGE_K + k) * _PITCH + n + i) * item)))
            for i in range(_ROWS):
                for j in range(_COLUMNS):
                    sums[i * _COLUMNS + j] = ptx.fma(a[i], b[j], sums[i * _COLUMNS + j])
        return sums

    @ptx.inline
    def store(sums, thread, first_row, first_column, given):
        values = ptx.cuda.local.array(_COLUMNS, real)
        for i in range(_ROWS):
            for j in range(_COLUMNS):
                values[j] = sums[i * _COLUMNS + j]
            store_run(given, first_row + i, first_column, values)

    return Unit(_BUFFERS * buffer_elems, no_sums, put_a, put_b, first, multiply, store)


def matrix_unit(a: Operand, b: Operand, store_run) -> Unit:
    """Lane 4g + t has of 16 x 8 elements of C those of rows g and g + 8, columns 2t and 2t + 1."""
    from nbdnn.kernels.cuda import gemm_tile, ptx, ptx_local, ptx_matrix, ptx_tile

    small, word, real = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"]
    side_a = gemm_tile.Side("tf32", TILE, _WARP, 4 * STAGE_K, True, not a.along_k)
    side_b = gemm_tile.Side("tf32", TILE, _WARP, 4 * STAGE_K, False, not b.along_k)
    lane_a, lane_b = gemm_tile.lane_place(side_a), gemm_tile.lane_place(side_b)
    products = gemm_tile.stage_products(side_a, side_b, True)
    count, buffer_bytes = _WARP * _WARP // 32, 2 * _OPERAND_BYTES
    no_sums, spread = ptx_matrix.zeros(count), ptx_local.spread(count)
    tiles_m, tiles_n, run = _WARP // 16, _WARP // 8, RUN[True]

    def put(operand, side, offset):
        """Device function that copies an operand's elements to their places, rounded where they have to be."""
        chunk_at, lanes, turned = gemm_tile.chunk_place(side), operand.lanes, side.turned
        bits = ptx_tile.to_tf32 if operand.dtype == "f32" else ptx_tile.word_of
        store_one, store_four = ptx_tile.STORE_SHARED[1], ptx_tile.STORE_SHARED[4]

        @ptx.inline
        def put_values(shared, buffer, row, k, values, i):
            line, column = (k, row) if turned else (row, k)
            at = small(offset + buffer * buffer_bytes + chunk_at(line, small(column >> 2)) + ((column & 3) << 2))
            at = word(ptx_tile.shared_address(shared) + word(at))
            if lanes == 1:
                store_one(at, bits(values[i]))
            else:
                store_four(at, (bits(values[i]), bits(values[i + 1]), bits(values[i + 2]), bits(values[i + 3])))

        return put_values

    @ptx.inline
    def first(thread):
        warp = small(thread >> 5)
        return small((warp & 1) * _WARP), small((warp >> 1) * _WARP)

    @ptx.inline
    def multiply(shared, buffer, thread, m, n, sums):
        lane, base = small(thread & 31), word(ptx_tile.shared_address(shared) + word(buffer * buffer_bytes))
        return products(sums, word(base + lane_a(lane, m)), word(base + _OPERAND_BYTES + lane_b(lane, n)))

    @ptx.inline
    def store(sums, thread, first_row, first_column, given):
        row, column = first_row + ((thread & 31) >> 2), first_column + ((thread & 3) << 1)
        every, values = ptx.cuda.local.array(count, real), ptx.cuda.local.array(run, real)
        spread(every, sums)
        for i in range(tiles_m):
            for half in range(2):
                for j in range(tiles_n):
                    for e in range(run):
                        values[e] = every[4 * (i * tiles_n + j) + 2 * half + e]
                    store_run(given, row + 16 * i + 8 * half, column + 8 * j, values)

    puts = put(a, side_a, 0), put(b, side_b, _OPERAND_BYTES)
    return Unit(_BUFFERS * buffer_bytes // 4, no_sums, *puts, first, multiply, store)
