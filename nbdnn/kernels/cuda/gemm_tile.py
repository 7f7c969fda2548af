"""Tiles of a matrix product on the tensor cores of a warp (mma.sync): shared memory, fragments, products.

    sums[m, n] += sum over k of a stage of  a[m, k] * b[k, n]

A block computes m x n sums and takes k_bytes of k a stage, which lie in shared memory in one of two ways:

    straight    a row an m (or n), k_bytes of k in it           ldmatrix
    turned      a row a k, all m (or n) in it                   ldmatrix.trans; TF32: single words

as the operand lies in global memory, so that 16-byte chunks are copied as they are. A chunk's place in its row is its
number xor a function of the row: what a warp reads at once (8 rows of one chunk; TF32 turned: 4 rows of two) and what
it writes at once (neighbouring chunks of a row) meets every bank once. Sums are float32 in registers: the lane l has
of 16 x 8 sums those of rows l/4 and l/4 + 8, columns 2*(l%4) and the next. Source: PTX, 'fragments' of mma; own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

CHUNK_BYTES = 16
_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}
_STEP_BYTES = 32  # of k that one instruction multiplies: 16 elements of 16 bits, 8 of TF32


class Tile(NamedTuple):
    """What a block computes, and on how many warps.

    Every extent of a warp is 32 or 64. k_bytes is 64 or 128. min_blocks share a multiprocessor's registers.
    """

    m: int
    n: int
    k_bytes: int
    warps_m: int
    warps_n: int
    stages: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        return self.m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.n // self.warps_n

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.warp_m * self.warp_n // 32

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * self.k_bytes

    @property
    def column_bytes(self) -> int:
        """From a column of sums to the next in shared memory, where they lie column by column."""
        return 4 * (self.m + 4)

    @property
    def rows_at(self) -> int:
        """Where in shared memory the table of the rows' places in the output begins: behind stages and sums."""
        return max(self.stages * self.stage_bytes, self.n * self.column_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.rows_at + 4 * self.m

    def k_elems(self, dtype: str) -> int:
        return self.k_bytes // _ELEMENT_BYTES[dtype]


class Side(NamedTuple):
    """One operand of a tile: its extent (m or n), a warp's part of it, whether it is a or b, straight or turned."""

    dtype: str
    extent: int
    warp_extent: int
    k_bytes: int
    of_a: bool
    turned: bool

    @property
    def row_bytes(self) -> int:
        return self.extent * _ELEMENT_BYTES[self.dtype] if self.turned else self.k_bytes

    @property
    def in_words(self) -> bool:
        """ldmatrix cannot turn elements of four bytes: they are loaded one by one."""
        return self.turned and self.dtype == "tf32"


def side_a(dtype: str, tile: Tile, turned: bool) -> Side:
    return Side(dtype, tile.m, tile.warp_m, tile.k_bytes, True, turned)


def side_b(dtype: str, tile: Tile, turned: bool) -> Side:
    return Side(dtype, tile.n, tile.warp_n, tile.k_bytes, False, turned)


@cache
def chunk_place(side: Side):
    """Device function (row, chunk) -> the byte at which those 16 bytes begin."""
    from nbdnn.kernels.cuda import ptx

    integer, row_bytes = ptx.INTEGER[32], side.row_bytes

    @ptx.inline
    def eight_rows(row, chunk):
        return integer(row * row_bytes + ((chunk ^ (row & 7)) << 4))

    @ptx.inline
    def two_rows_in_128_bytes(row, chunk):
        return integer(row * row_bytes + ((chunk ^ ((row >> 1) & 3)) << 4))

    @ptx.inline
    def four_rows_of_two(row, chunk):
        return integer(row * row_bytes + ((chunk ^ ((row & 3) << 1)) << 4))

    if side.in_words:
        return four_rows_of_two
    return two_rows_in_128_bytes if row_bytes == 64 else eight_rows


@cache
def lane_place(side: Side):
    """Device function (lane, first) -> from where in the operand's part of a stage a lane loads its fragments.

    first: of the m or n that the warp takes.
    """
    from nbdnn.kernels.cuda import ptx

    integer, place = ptx.INTEGER[32], chunk_place(side)
    # Lanes 8 to 15 give the rows of the second matrix, 16 to 23 of the third: those of a go on in m first, of b in k.
    second, third = (3, 4) if side.of_a else (4, 3)

    @ptx.inline
    def straight(lane, first):
        row = integer(first + (lane & 7) + (((lane >> second) & 1) << 3))
        return place(row, integer((lane >> third) & 1))

    @ptx.inline
    def turned(lane, first):
        row = integer((lane & 7) + (((lane >> third) & 1) << 3))
        return place(row, integer((first >> 3) + ((lane >> second) & 1)))

    @ptx.inline
    def turned_words(lane, first):
        column = integer(first + (lane >> 2))
        return integer(place(integer(lane & 3), integer(column >> 2)) + ((column & 3) << 2))

    if side.in_words:
        return turned_words
    return turned if side.turned else straight


@cache
def fragments(side: Side):
    """Device function (lane's address in a stage, step) -> all words of the warp's operand for that step of k."""
    from nbdnn.kernels.cuda import ptx, ptx_matrix

    word = ptx.WORD
    row_bytes, step_k = side.row_bytes, _STEP_BYTES // _ELEMENT_BYTES[side.dtype]
    blocks = range(side.warp_extent // 16)
    if side.in_words:
        load = ptx_matrix.load_words_at(_word_places(side))
    elif side.turned:
        load = ptx_matrix.load_matrices_at(tuple((i << 5, 0) for i in blocks), True)
    else:
        load = ptx_matrix.load_matrices_at(tuple((0, 16 * i * row_bytes) for i in blocks), False)

    @ptx.inline
    def straight(at, step):
        return load(word(at ^ (step << 5)))

    @ptx.inline
    def turned(at, step):
        return load(word(at + step * (step_k * row_bytes)))

    return turned if side.turned else straight


def _word_places(side: Side) -> tuple[tuple[int, int], ...]:
    """Single words in the order of the fragments: 8 m or n are two chunks; k + 4 lies four rows on."""
    later = 4 * side.row_bytes

    def place(eight: int, k: int) -> tuple[int, int]:
        return (2 * eight & 7) << 4, ((2 * eight & ~7) << 4) + k

    eights = range(side.warp_extent // 8)
    if side.of_a:
        pairs = [(eights[i], eights[i + 1]) for i in eights[::2]]
        return tuple(place(eight, k) for pair in pairs for k in (0, later) for eight in pair)
    return tuple(place(eight, k) for eight in eights for k in (0, later))


@cache
def stage_products(a: Side, b: Side, rounded_before: bool = False):
    """Device function (sums, lane's address of a, of b) -> the sums with the products of a stage added.

    rounded_before: what lies in shared memory as TF32 is TF32 already.
    """
    from nbdnn.kernels.cuda import ptx, ptx_matrix

    load_a, load_b, steps = fragments(a), fragments(b), a.k_bytes // _STEP_BYTES
    multiply = ptx_matrix.multiply_tile(a.dtype, a.warp_extent // 16, b.warp_extent // 8, rounded_before)

    @ptx.inline
    def products(sums, a_at, b_at):
        words_a, words_b = load_a(a_at, 0), load_b(b_at, 0)
        for step in range(1, steps):
            next_a, next_b = load_a(a_at, step), load_b(b_at, step)
            sums = multiply(sums, words_a, words_b)
            words_a, words_b = next_a, next_b
        return multiply(sums, words_a, words_b)

    return products
