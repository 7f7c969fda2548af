"""A block's tile of a matrix product on the FMA units: C[m, n] = sum over k of A[k, m] * B[k, n], in float32.

Eight values of k are a stage. Stages lie in a ring of shared memory, A as [8][M + 4] and B as [8][N + 4] words, filled
by asynchronous copies while earlier ones are multiplied; what is beyond an operand's edge is copied as zeros.

    warp:    32 x 64 of C in two 16 x 32 halves each way     lane:  4 x 4 of each of these 4 quarters, 64 registers
    a k:     4 shared loads of 16 bytes a lane for 64 multiply-adds

Neighbouring lanes take different rows of one column, and lanes two apart the same row, so that the loads of 16 lanes
need 128 bytes at most, once. The 4 words between rows of shared memory let 32 lanes that hold 8 k of 4 rows write to 32
banks. An operand whose k are neighbours in memory, 16 bytes at a time, lies as [M][8] instead, in lines of 4 rows whose
pieces of 16 bytes take turns (`ptx_products.Factor`): a lane loads 4 k of a row at once, and as many bytes as before.
Source: own, after the SIMT products of CUTLASS.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

STAGE_K = 8
STAGES = 4
_WARP_M, _WARP_N = 32, 64
_WORDS_BETWEEN = 4
_LINE_BYTES = 128  # of 4 rows by k; stages and operands begin at multiples of it
# Of a thread; fewer threads share the copies of a small tile, and each needs more addresses.
_REGISTERS_LARGE, _REGISTERS_SMALL = 128, 168


class Tile(NamedTuple):
    """Extents of a block's tile: multiples of 32 and 64."""

    m: int
    n: int

    @property
    def threads(self) -> int:
        return self.m // _WARP_M * (self.n // _WARP_N) * 32

    @property
    def min_blocks(self) -> int:
        """Blocks of a multiprocessor at once, which bounds the registers."""
        return 65536 // ((_REGISTERS_LARGE if self.threads > 128 else _REGISTERS_SMALL) * self.threads)

    @property
    def stage_bytes(self) -> int:
        return 4 * STAGE_K * (self.m + self.n + 2 * _WORDS_BETWEEN)

    @property
    def b_bytes(self) -> int:
        """Where B begins in a stage."""
        return 4 * STAGE_K * (self.m + _WORDS_BETWEEN)


class Copies(NamedTuple):
    """How a block's threads share the copies of one operand of a stage, [8][extent], of `words` words each.

    along_k: neighbouring threads copy neighbouring k, else neighbouring elements of a row.
    """

    extent: int
    along_k: bool
    words: int

    @property
    def by_k(self) -> bool:
        """Whether k are neighbours in shared memory, too."""
        return self.along_k and self.words > 1

    @property
    def lanes(self) -> int:
        """Neighbouring threads that copy neighbours."""
        return (STAGE_K if self.along_k else self.extent) // self.words

    def count(self, threads: int) -> int:
        """Copies of a thread."""
        return self.extent * STAGE_K // (self.words * threads)

    def step(self, threads: int) -> int:
        """From a copy of a thread to its next: rows of the extent if along_k, else k."""
        return threads // self.lanes

    def lines(self, threads: int) -> int:
        """In how many different places of the extent a thread copies."""
        return self.count(threads) if self.along_k else 1


def pitch_bytes(extent: int) -> int:
    """Bytes from a row of shared memory to the next."""
    return 4 * (extent + _WORDS_BETWEEN)


@cache
def copy_place(copies: Copies, threads: int):
    """Device function (thread, i) -> (place in the extent, k) of a thread's copy i."""
    from nbdnn.kernels.cuda import ptx

    integer, lanes, step, words = ptx.INTEGER[32], copies.lanes, copies.step(threads), copies.words

    @ptx.inline
    def along_k(thread, i):
        row, lane = ptx.divided(thread, integer(lanes))
        return integer(row + i * step), integer(lane * words)

    @ptx.inline
    def along_extent(thread, i):
        k, lane = ptx.divided(thread, integer(lanes))
        return integer(lane * words), integer(k + i * step)

    return along_k if copies.along_k else along_extent


@cache
def shared_place(copies: Copies):
    """Device function (place in the extent, k) -> byte of a stage's operand where a copy goes."""
    from nbdnn.kernels.cuda import ptx

    integer, pitch = ptx.INTEGER[32], pitch_bytes(copies.extent)

    @ptx.inline
    def by_extent(at, k):
        return integer(k * pitch + at * 4)

    @ptx.inline
    def by_k(at, k):
        line, piece = at >> 2, (at & 3) * 2 + (k >> 2)
        return integer(line * _LINE_BYTES + ((piece ^ (line & 7)) << 4))

    return by_k if copies.by_k else by_extent


@cache
def lane_place(tile: Tile):
    """Device function thread -> (m, n) of the first of its quarters' 4 x 4, in quarters that lie half a tile apart."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]
    warps_m = tile.m // _WARP_M

    @ptx.inline
    def placed(thread):
        warp, lane = thread >> 5, thread & 31
        warp_n, warp_m = ptx.divided(integer(warp), integer(warps_m))
        m = integer(warp_m * 16 + (lane >> 4) * 8 + (lane & 1) * 4)
        return m, integer(warp_n * 32 + (lane >> 1 & 7) * 4)

    return placed


def _factor(extent: int, by_k: bool):
    """Of a tile's side, whose lanes have elements that lie half of it apart: by k whole turns of 8 lines of 4."""
    from nbdnn.kernels.cuda import ptx_products

    assert not by_k or extent % 64 == 0, extent
    half = extent // 2 * 4
    return ptx_products.Factor(0, half * STAGE_K, True) if by_k else ptx_products.Factor(pitch_bytes(extent), half)


@cache
def _first(by_k: bool):
    """Device function (the first of four elements) -> byte of an operand where a lane's products begin."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def of_row(at):
        return integer(at * 4)

    @ptx.inline
    def of_line(at):
        line = at >> 2
        return integer(line * _LINE_BYTES + ((line & 7) << 4))

    return of_line if by_k else of_row


@cache
def pipeline(tile: Tile, copy_stage, a_by_k: bool = False, b_by_k: bool = False, see=None):
    """Device function (shared address, thread, stages, context) -> the lane's quarters of C. by_k: how operands lie.

    copy_stage(context, address, whether it is the first) starts the copies of the next stage. see(context, address) is
    told of each stage before it is multiplied. The quarters are the rows 0-3 by the columns 0-3, the same rows by the
    columns half a tile on, then the rows half a tile on by both; each 16 floats, by rows.
    """
    from nbdnn.kernels.cuda import ptx, ptx_products, ptx_tile

    integer, word, zero = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"](0.0)
    commit, wait = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(STAGES - 2)
    stage_bytes, b_bytes, placed = tile.stage_bytes, tile.b_bytes, lane_place(tile)
    rows, columns = _factor(tile.m, a_by_k), _factor(tile.n, b_by_k)
    multiply, a_first, b_first = ptx_products.outer_products(STAGE_K, rows, columns), _first(a_by_k), _first(b_by_k)
    zeros, sees = (zero,) * 16, see is not None

    @ptx.inline
    def run(shared, thread, stages, context):
        quarters = (zeros, zeros, zeros, zeros)
        m, n = placed(thread)
        a_at, b_at, end = word(a_first(m)), word(b_bytes + b_first(n)), word(shared + STAGES * stage_bytes)
        # Filled is the buffer before the one that is read, or will be when the first stage has arrived.
        reading, done = word(shared + stage_bytes), integer(1 - STAGES)
        while done < stages:
            if done >= 0:
                # A thread that is past this barrier has read the stage before, whose buffer is filled next.
                wait()
                ptx.cuda.syncthreads()
            if done + (STAGES - 1) < stages:
                filling = word((end if reading == shared else reading) - stage_bytes)
                copy_stage(context, filling, done == 1 - STAGES)
            commit()
            if done >= 0:
                if sees:
                    see(context, reading)
                quarters = multiply(quarters, word(reading + a_at), word(reading + b_at))
            reading = word(reading + stage_bytes)
            reading = shared if reading == end else reading
            done = integer(done + 1)
        return quarters

    return run
