"""Matrix units of x86 (AMX): tiles of 16 rows of 64 bytes, and products of bfloat16 that are summed in float32.

A tile of sums, 16 x 16 of float32, takes the product of 16 rows of A, of up to 32 numbers k, and of k / 2 rows of B, of
16 words of two numbers k each. float16 is the sum of two parts that are bfloat16, its upper 8 bits and the rest, and a
product of float16 the sum of four products of parts, exactly. An infinity of float16 has no parts: with it come NaN.
Sums below 2^-126 are 0, and so are such numbers of bfloat16.

float32 is three parts, of which six products are as exact as its own; but below 2^-102 parts are lost, near the largest
number they overflow, and six products were slower than the FMA units but for layers of stride 2. Not kept.

A product takes 16 cycles, 6 ns, and the load of a tile half of that, six times as long where its rows lie across cache
lines. Two by two tiles of sums make four products of the four tiles that they load: 8 to 12 ns each, and 25 to 45 while
another thread of the same core makes some (Emerald Rapids). Tiles of one by four loaded less from the second-level
cache, and were slower. Source: own; parts as of Henry, Tang and Heinecke (arXiv:1904.06376).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.vector import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    WIDEN,
    by_vectors,
    constant,
    convert,
    element,
    load,
    row_types,
    store,
    store_past_caches,
)

TILE = 16  # rows of a tile, and words of a row
TILE_BYTES = 1024
LINE = 32  # bfloat16 of a row
# Of two tiles: half of what it took on average on an Emerald Rapids, as all that is counted in `cost.py`.
PRODUCT_NS = 9.0
PARTS = {"bf16": 1, "f16": 2}
# (part of A, part of B), the smallest products first.
_PRODUCTS = {
    1: ((0, 0),),
    2: ((1, 1), (0, 1), (1, 0), (0, 0)),
}
_SUMS, _A, _B = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers


def products(dtype: str) -> int:
    """Of tiles, for one of numbers of that type."""
    return len(_PRODUCTS[PARTS[dtype]])


def uncut(dtype: str) -> str:
    """The dtype of elements that are about to be cut into parts."""
    return "bf16" if PARTS[dtype] == 1 else "f32"


@cache
def widen(dtype: str):
    """Compiled-in function: an element as one of `uncut`."""

    @njit(**DEVICE)
    def kept(bits):
        return bits

    return kept if uncut(dtype) == dtype else WIDEN[dtype]


def refused(dtype: str, device: Cpu) -> str:
    """Why this machine's matrix units do not compute on that type; empty where they do."""
    if dtype not in PARTS:
        return f"dtype is {dtype}, matrix units take {', '.join(PARTS)}"
    return "" if device.multiplies_tiles else f"{device.name} has no matrix units (AMX) for bfloat16"


def tile_shapes(depth: int) -> np.ndarray:
    """What `configure` reads, of tiles of A that have `depth` numbers a row."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1  # palette
    row_bytes, rows = shapes[16:32].view(np.uint16), shapes[48:56]
    row_bytes[list(_SUMS + _B)], rows[list(_SUMS + _A)] = 64, TILE
    row_bytes[list(_A)], rows[list(_B)] = 2 * depth, depth // 2
    return shapes


@intrinsic
def configure(typingctx, shapes):
    """Give the thread's tiles the shapes at that address."""

    def codegen(context, builder, sig, args):
        _call(builder, "ldtilecfg", _at(builder, args[0]))
        return context.get_dummy_value()

    return signature(types.none, types.int64), codegen


@intrinsic
def release(typingctx):
    """Leave no tile in use: the system saves those that are with the thread."""

    def codegen(context, builder, sig, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return signature(types.none), codegen


def _at(builder, address):
    return builder.inttoptr(address, I8.as_pointer())


def _call(builder, name: str, *args) -> None:
    type_ = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, type_, f"llvm.x86.{name}"), args)


@cache
def _block(parts: int, mt: int, nt: int, panel_tiles: int):
    """Intrinsic: mt x nt tiles of sums (at most four).

    Arguments, all int64: a (address of the first row), a_pitch (bytes from row to row), a_part (bytes from part to
    part), offsets (address of int64 bytes to add to a, for each k), k_len, b (address of what each k has of B), b_step
    (bytes from k to k), places (address of int64 bytes to add to b, for each [part][panel_tiles]), adds (whether the
    sums are added to what is there), sums (address), pitch (bytes from row to row of them), sums_step (from tile to
    tile of B).
    """

    def codegen(context, builder, sig, args):
        a, a_pitch, a_part, offsets, k_len, b, b_step, places, adds, sums, pitch, sums_step = args
        table, line = builder.inttoptr(offsets, I64.as_pointer()), I64(64)
        blocks = [builder.mul(a_pitch, I64(TILE * m)) for m in range(mt)]
        places = builder.inttoptr(places, I64.as_pointer())
        tiles_of_b = {
            (part, j): builder.load(builder.gep(places, [I64(part * panel_tiles + j)]))
            for part in range(parts)
            for j in range(nt)
        }

        def loaded(register: int, address, step) -> int:
            _call(builder, "tileloadd64", I8(register), _at(builder, address), step)
            return register

        rows_at = [builder.add(sums, builder.mul(pitch, I64(TILE * m))) for m in range(mt)]
        sums_at = {
            m * nt + j: builder.add(rows_at[m], builder.mul(sums_step, I64(j))) for m in range(mt) for j in range(nt)
        }
        with builder.if_else(builder.icmp_signed("!=", adds, I64(0))) as (to_sums, to_zero):
            with to_sums:
                for register, address in sums_at.items():
                    loaded(register, address, pitch)
            with to_zero:
                for register in sums_at:
                    _call(builder, "tilezero", I8(register))
        with cgutils.for_range(builder, k_len) as loop:
            a_k = builder.add(a, builder.load(builder.gep(table, [loop.index])))
            b_k = builder.add(b, builder.mul(loop.index, b_step))
            held: dict[int, tuple[int, int]] = {}  # register of B -> (part, tile)
            for part_a, part_b in _PRODUCTS[parts]:
                rows = builder.add(a_k, builder.mul(a_part, I64(part_a)))
                for m in range(mt):
                    of_a = loaded(_A[m % 2], builder.add(rows, blocks[m]), a_pitch)
                    for j in range(nt):
                        of_b, wanted = _B[j % 2], (part_b, j)
                        if held.get(of_b) != wanted:
                            loaded(of_b, builder.add(b_k, tiles_of_b[wanted]), line)
                            held[of_b] = wanted
                        _call(builder, "tdpbf16ps", I8(m * nt + j), I8(of_a), I8(of_b))
        for register, address in sums_at.items():
            _call(builder, "tilestored64", I8(register), _at(builder, address), pitch)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, a, a_pitch, a_part, offsets, k_len, b, b_step, places, adds, sums, pitch, sums_step):
        return signature(types.none, *[types.int64] * 12), codegen

    return run


@cache
def block_product(parts: int, mt: int, nt: int):
    """Compiled-in function (tiles, ...): `_block` of mt by 1 or nt tiles, of panels of nt."""
    whole, narrow = (_block(parts, mt, tiles, nt) for tiles in (nt, 1))

    @njit(**DEVICE)
    def product(tiles, a, a_pitch, a_part, offsets, k_len, b, b_step, places, adds, sums, pitch, sums_step):
        if tiles == nt:
            whole(a, a_pitch, a_part, offsets, k_len, b, b_step, places, adds, sums, pitch, sums_step)
        else:
            narrow(a, a_pitch, a_part, offsets, k_len, b, b_step, places, adds, sums, pitch, sums_step)

    return product


@cache
def store_rows(dtype: str, nt: int):
    """Intrinsic (to, to_pitch, sums, pitch, rows, streams): rows of nt tiles of sums as `dtype`.

    streams: past the caches, to whole lines of them.
    """
    vl = TILE
    _, _, _, item_bytes = row_types("f32", dtype, vl)
    vector, pair = ir.VectorType(FLOAT["f32"], vl), ir.VectorType(I16, 2 * vl)

    def converted(builder, values) -> list:
        """bfloat16 as the CPU rounds two vectors at once: to nearest even, subnormal ones to 0."""
        if dtype != "bf16" or nt == 1:
            return [convert(builder, value, "f32", dtype, vl) for value in values]
        type_ = ir.FunctionType(pair, [vector, vector])
        function = cgutils.get_or_insert_function(builder.module, type_, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
        return [builder.call(function, [high, low]) for low, high in zip(values[::2], values[1::2], strict=True)]

    def codegen(context, builder, sig, args):
        to, to_pitch, sums, pitch, rows, streams = args

        def each_row(write) -> None:
            with cgutils.for_range(builder, rows) as loop:
                row, line = (
                    builder.add(at, builder.mul(loop.index, step)) for at, step in ((sums, pitch), (to, to_pitch))
                )
                slots = [element(builder, row, I64(vl * j), vector, 4) for j in range(nt)]
                values = converted(builder, [builder.load(slot, align=4) for slot in slots])
                count = nt * vl // len(values)
                for j, value in enumerate(values):
                    write(builder, value, element(builder, line, I64(count * j), value.type, item_bytes))

        with builder.if_else(builder.icmp_signed("!=", streams, I64(0))) as (past_caches, otherwise):
            with past_caches:
                each_row(store_past_caches)
            with otherwise:
                each_row(lambda builder, value, slot: builder.store(value, slot, align=item_bytes))
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, to_pitch, sums, pitch, rows, streams):
        return signature(types.none, *[types.int64] * 6), codegen

    return run


@cache
def split_row(dtype: str, parts: int):
    """Intrinsic (to, part_step, start, n): n elements of `dtype` as bfloat16, each part `part_step` bytes further."""
    vl = TILE
    read, written, read_bytes, _ = row_types(dtype, "bf16", vl)
    words, floats = ir.VectorType(I32, vl), ir.VectorType(FLOAT["f32"], vl)
    if parts == 1:
        copy = convert_row(dtype, "bf16", 2 * vl)

        @njit(**DEVICE)
        def kept(to, part_step, start, n):
            copy(to, start, n)

        return kept

    def codegen(context, builder, sig, args):
        to, part_step, start, n = args

        def step(i, mask) -> None:
            left = load(builder, element(builder, start, i, read, read_bytes), read, read_bytes, mask)
            left = convert(builder, left, dtype, "f32", vl)
            for part in range(parts):
                kept = builder.and_(builder.bitcast(left, words), constant(words, -0x10000))
                half = builder.trunc(builder.lshr(kept, constant(words, 16)), written)
                place = builder.add(to, builder.mul(part_step, I64(part)))
                store(builder, half, element(builder, place, i, written, 2), 2, mask)
                left = builder.fsub(left, builder.bitcast(kept, floats))

        by_vectors(builder, n, vl, step)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, part_step, start, n):
        return signature(types.none, *[types.int64] * 4), codegen

    return run
