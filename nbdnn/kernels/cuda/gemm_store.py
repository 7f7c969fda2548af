"""From a tile's sums in registers to the output: through shared memory, so that a row is stored as it lies there.

    out[row, column] = epilogue(sums[row, column])                               one part
    parts[part, row, column] = sums[row, column]                                 several parts of a reduction, and then
    out = epilogue(parts[0] + parts[1] + ...)                                    in that order: deterministic

A thread finishes four neighbours: 16 bytes of float32, 8 of 16 bits, and the warp whole lines. Sums lie in shared
memory row by row, a 16-byte chunk at its number xor twice the row's last two bits: the four rows of two chunks that
half a warp writes, and the eight chunks that a quarter reads, meet every bank once. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.gemm_tile import Tile
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch
from nbdnn.problem import ConvProblem

QUAD = 4  # neighbours that a thread finishes
_THREADS = 256
_SLICES = 8  # of a sum of many parts, each summed by other threads


@cache
def quad(dtype: str, constant: bool):
    """Device function (pointer, at) -> four neighbours in float32; at is a multiple of 4."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    table, floats = ptx.LOAD_CONSTANT if constant else ptx.LOAD, ptx_tile.float_of
    if dtype == "f32":
        load = table[4]

        @ptx.inline
        def quad_of_f32(pointer, at):
            words = load(pointer, at)
            return floats(words[0]), floats(words[1]), floats(words[2]), floats(words[3])

        return quad_of_f32

    load, unpack = table[2], ptx_tile.UNPACK[dtype]

    @ptx.inline
    def quad_of_pairs(pointer, at):
        words = load(pointer, at)
        low, high = unpack(words[0]), unpack(words[1])
        return low[0], low[1], high[0], high[1]

    return quad_of_pairs


@cache
def store_quad(dtype: str):
    """Device function (pointer, at, four float32) that rounds and stores them."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    if dtype == "f32":
        store, bits = ptx.STORE[4], ptx_tile.word_of

        @ptx.inline
        def store_f32(pointer, at, v):
            store(pointer, at, (bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])))

        return store_f32

    store, pack = ptx.STORE[2], ptx_tile.PACK[dtype]

    @ptx.inline
    def store_pairs(pointer, at, v):
        store(pointer, at, (pack(v[0], v[1]), pack(v[2], v[3])))

    return store_pairs


@cache
def finish_quad(dtype: str, tokens: tuple[str, ...]):
    """Device function (four sums, alpha, beta, out, at, four of the bias, residual): the epilogue, stored to out[at].

    What the tokens do not name is not read.
    """
    from nbdnn.kernels.cuda import epilogue, ptx

    finished, load, load_constant, store = (
        epilogue.finish("f32", tokens),
        quad(dtype, False),
        quad(dtype, True),
        store_quad(dtype),
    )
    zero = ptx.REAL["f32"](0.0)
    reads_out, has_residual = "beta" in tokens, "res" in tokens

    @ptx.inline
    def finish(v, alpha, beta, out, at, shift, residual):
        before = load(out, at) if reads_out else (zero, zero, zero, zero)
        added = load_constant(residual, at) if has_residual else (zero, zero, zero, zero)
        first = finished(v[0], alpha, beta, before[0], shift[0], added[0])
        second = finished(v[1], alpha, beta, before[1], shift[1], added[1])
        third = finished(v[2], alpha, beta, before[2], shift[2], added[2])
        fourth = finished(v[3], alpha, beta, before[3], shift[3], added[3])
        store(out, at, (first, second, third, fourth))

    return finish


@cache
def bias_quad(dtype: str, tokens: tuple[str, ...]):
    """Device function (bias, channel) -> the bias of four channels, zeros where there is none."""
    from nbdnn.kernels.cuda import ptx

    load, zero, has_bias = quad(dtype, True), ptx.REAL["f32"](0.0), "bias" in tokens

    @ptx.inline
    def shift(bias, channel):
        return load(bias, channel) if has_bias else (zero, zero, zero, zero)

    return shift


@cache
def sums_to_shared(tile: Tile):
    """Device function (sums, address, lane, warp's first row, first column): a warp's sums to their places."""
    from nbdnn.kernels.cuda import ptx, ptx_matrix

    row_bytes = 4 * tile.n
    places = tuple(
        ((2 * j & 7) << 4, ((2 * j & ~7) << 4) + (16 * i + half) * row_bytes)
        for i in range(tile.warp_m // 16)
        for j in range(tile.warp_n // 8)
        for half in (0, 8)
    )
    store, word = ptx_matrix.store_pairs_at(places), ptx.WORD

    @ptx.inline
    def to_shared(sums, address, lane, row, column):
        own_row, own_column = row + (lane >> 2), column + ((lane & 3) << 1)
        chunk = (own_column >> 2) ^ ((own_row & 3) << 1)
        store(word(address + own_row * row_bytes + (chunk << 4) + ((own_column & 2) << 2)), sums)

    return to_shared


@cache
def tile_store(dtype: str, tokens: tuple[str, ...], tile: Tile):
    """Device function that stores a tile from shared memory, to which its sums and the rows' places were written.

    (shared, thread, column, alive, channel, f, operands, scalars): `column` is where the thread's four columns lie in
    a row of the output, `channel` their first, alive whether they exist; operands are out, bias, residual and parts,
    scalars alpha and beta; f.parts and f.outputs, how many parts and what elements each has.
    A row whose place is negative does not exist.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, long, word = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD
    finish, shift_of, store_part = finish_quad(dtype, tokens), bias_quad(dtype, tokens), store_quad("f32")
    load_quad, load_word, float_of = ptx_tile.LOAD_SHARED[4], ptx_tile.LOAD_SHARED[1], ptx_tile.float_of
    row_bytes, rows_at, extent_m = 4 * tile.n, tile.rows_at, tile.m
    step, quads_a_row = tile.threads * QUAD // tile.n, tile.n // QUAD

    @ptx.inline
    def store(shared, thread, column, alive, channel, f, operands, scalars):
        out, bias, residual, parts = operands
        part = long(long(ptx.block_y()) * f.outputs)
        row, chunk = ptx.divided(thread, integer(quads_a_row))
        shift = shift_of(bias, channel if alive else integer(0))
        while row < extent_m:
            place = integer(load_word(word(shared + rows_at + 4 * row)))
            if alive and place >= 0:
                words = load_quad(word(shared + row * row_bytes + ((chunk ^ ((row & 3) << 1)) << 4)))
                values = (float_of(words[0]), float_of(words[1]), float_of(words[2]), float_of(words[3]))
                at = integer(place + column)
                if f.parts > 1:
                    store_part(parts, long(part + at), values)
                else:
                    finish(values, scalars[0], scalars[1], out, at, shift, residual)
            row = integer(row + step)

    return store


class _PartsVariant(NamedTuple):
    """What the kernel that adds parts is compiled for."""

    dtype: str
    epilogue: tuple[str, ...]
    slices: int


class _Parts(NamedTuple):
    """How many elements each part has, how many of them are channels, and how many parts there are."""

    outputs: int
    channels: int
    parts: int


def _parts_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = _PartsVariant(*specialised_on)
    dtype, tokens, slices = variant
    integer, long, word, real = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD, ptx.REAL["f32"]
    finish, shift_of, load = finish_quad(dtype, tokens), bias_quad(dtype, tokens), quad("f32", True)
    load_shared, store_shared = ptx_tile.LOAD_SHARED[4], ptx_tile.STORE_SHARED[4]
    float_of, bits = ptx_tile.float_of, ptx_tile.word_of
    quads, zero = _THREADS // slices, real(0.0)

    def add_parts(parts, out, bias, residual, alpha, beta, f):
        thread = integer(ptx.thread_x())
        part, own = ptx.divided(thread, integer(quads))
        at = integer((integer(ptx.block_x()) * quads + own) * QUAD)
        total = (zero, zero, zero, zero)
        while at < f.outputs and part < f.parts:
            v = load(parts, long(long(part) * f.outputs + at))
            total = (total[0] + v[0], total[1] + v[1], total[2] + v[2], total[3] + v[3])
            part = integer(part + slices)
        if slices > 1:
            shared = ptx_tile.dynamic_shared()
            store_shared(word(shared + 16 * thread), (bits(total[0]), bits(total[1]), bits(total[2]), bits(total[3])))
            ptx.cuda.syncthreads()
            if thread >= quads:
                return
            for i in range(1, slices):
                w = load_shared(word(shared + 16 * (thread + i * quads)))
                total = (
                    total[0] + float_of(w[0]),
                    total[1] + float_of(w[1]),
                    total[2] + float_of(w[2]),
                    total[3] + float_of(w[3]),
                )
        if at < f.outputs:
            _, channel = ptx.divided(at, f.channels)
            finish(total, alpha, beta, out, at, shift_of(bias, channel), residual)

    data = ptx.pointer(dtype)
    return add_parts, (ptx.pointer("f32"), data, data, data, real, real, ptx.record(_Parts, 32))


def parts_bytes(problem: ConvProblem, parts: int) -> int:
    """Workspace of a reduction in so many parts."""
    return 4 * parts * problem.operands[2].size_elems if parts > 1 else 0


def parts_launch(problem: ConvProblem, parts: int) -> Launch:
    """The kernel that adds the parts in the workspace and finishes them."""
    out = problem.operands[2]
    slices = _SLICES if parts >= _SLICES else 1
    return Launch(
        source=Source(_parts_kernel, _PartsVariant(problem.dtype, problem.epilogue, slices), _THREADS),
        grid=(ceil(out.size_elems * slices / (_THREADS * QUAD)), 1, 1),
        pointers=(WORKSPACE, 2, *epilogue_pointers(problem)),
        scalars="f32",
        integers=_Parts(out.size_elems, out.shape[1], parts),
        dynamic_shared_bytes=_THREADS * 16 if slices > 1 else 0,
    )


def epilogue_pointers(problem: ConvProblem) -> tuple[int, int]:
    """Places of bias and residual among the operands, or of a null pointer."""
    names = [operand.name for operand in problem.operands]
    bias, residual = (names.index(name) if name in names else NULL for name in ("bias", "residual"))
    return bias, residual
