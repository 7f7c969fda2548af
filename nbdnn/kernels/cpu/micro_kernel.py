"""The register-tiled matrix product and the small fixed transforms, emitted as LLVM vector code.

The accumulators must stay in registers: mr x nv vectors, one broadcast and nv fused multiply-adds a row and step.
Source: own, after Goto and van de Geijn (doi:10.1145/1356052.1356053) and the indirect convolution of Dukhan
(arXiv:1907.02129).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.vector import (
    FLOAT,
    I32,
    I64,
    at_least,
    constant,
    convert,
    lanes_between,
    masked,
    row_types,
    splat,
    store_past_caches,
    vector_at,
)

_UNROLL = 4  # steps of k
PAIRS = "pairs"


class _BFloat16(ir.Type):
    """What llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def fused_product(builder, dtype: str, vl: int):
    """(a, b, total) -> a * b + total"""
    vector = ir.VectorType(FLOAT[dtype], vl)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{vl}{dtype}"
    )
    return lambda a, b, total: builder.call(function, [a, b, total])


def pair_product(builder):
    """(a, b, total) -> total + a.low * b.low + a.high * b.high, of 16 words of two bfloat16, which come as vectors of
    float32; subnormal numbers count as 0."""
    vector, pairs = ir.VectorType(FLOAT["f32"], 16), ir.VectorType(_BFloat16(), 32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector, pairs, pairs]), "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    return lambda a, b, total: builder.call(function, [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


@dataclass(frozen=True)
class Config:
    """A tile in registers: mr rows (pixels, or taps) by nv vectors of output channels, mr*nv + nv + 1 registers."""

    mr: int
    nv: int

    def __str__(self) -> str:
        return f"{self.mr}x{self.nv}"


@cache
def micro_kernel(
    dtype: str, mr: int, nv: int, vl: int, a_step: int | None, b_step: int | None, accumulate: bool, a_dtype: str
):
    """Intrinsic: one register tile of a matrix product whose two operands are found through offset tables.

        tile[m, j] (+)= sum_k A[m, k] * B[k, j]      m < mr, j < nv * vl
        A[m, k] = *(a_rows[m] + a_offsets[k])        B[k, :] = *(b + b_offsets[k])

    Arguments, all int64: a_rows (address of mr addresses), a_offsets (address of int32 byte offsets), b, b_offsets,
    k_len, tile (address of mr rows of nv*vl accumulators), pitch (bytes from row to row of the tile). A step of
    `a_step` or `b_step` bytes replaces its table where it is not None. A is of type `a_dtype`, B of `dtype`, in which
    the sums are accumulated in the order of k. Where `a_dtype` is PAIRS, A and B are words of two bfloat16, of which
    both products are added.
    """
    pairs = a_dtype == PAIRS
    read, vector, _, item_bytes = row_types(dtype if pairs else a_dtype, dtype, vl)

    def offset(builder, step, table, k):
        if step is not None:
            return builder.mul(k, I64(step))
        slot = builder.gep(builder.inttoptr(table, I32.as_pointer()), [k])
        return builder.sext(builder.load(slot), I64)

    def vector_slot(builder, address, j):
        return builder.inttoptr(builder.add(address, I64(j * vl * item_bytes)), vector.as_pointer())

    def tile_slots(builder, tile, pitch):
        rows = [builder.add(tile, builder.mul(pitch, I64(m))) for m in range(mr)]
        return [vector_slot(builder, row, j) for row in rows for j in range(nv)]

    def codegen(context, builder, sig, args):
        a_rows, a_table, b, b_table, k_len, tile, pitch = args
        add_product = pair_product(builder) if pairs else fused_product(builder, dtype, vl)
        rows = builder.inttoptr(a_rows, I64.as_pointer())
        a = [builder.load(builder.gep(rows, [I64(m)])) for m in range(mr)]
        if accumulate:
            start = [builder.load(slot, align=item_bytes) for slot in tile_slots(builder, tile, pitch)]
        else:
            start = [ir.Constant(vector, [0.0] * vl)] * (mr * nv)
        entry = builder.block
        head = builder.append_basic_block("k_head")
        body = builder.append_basic_block("k_body")
        done = builder.append_basic_block("k_done")
        builder.branch(head)

        builder.position_at_end(head)
        k = builder.phi(I64)
        k.add_incoming(I64(0), entry)
        acc = [builder.phi(vector) for _ in start]
        for phi, initial in zip(acc, start, strict=True):
            phi.add_incoming(initial, entry)
        builder.cbranch(builder.icmp_signed("<", k, k_len), body, done)

        builder.position_at_end(body)
        b_k = builder.add(b, offset(builder, b_step, b_table, k))
        a_k = offset(builder, a_step, a_table, k)
        columns = [builder.load(vector_slot(builder, b_k, j), align=item_bytes) for j in range(nv)]
        for m in range(mr):
            value = builder.load(builder.inttoptr(builder.add(a[m], a_k), read.element.as_pointer()))
            value = splat(builder, value, read)
            value = value if pairs else convert(builder, value, a_dtype, dtype, vl)
            for j in range(nv):
                phi = acc[m * nv + j]
                phi.add_incoming(add_product(value, columns[j], phi), body)
        k.add_incoming(builder.add(k, I64(1)), body)
        builder.branch(head)

        builder.position_at_end(done)
        for phi, slot in zip(acc, tile_slots(builder, tile, pitch), strict=True):
            builder.store(phi, slot, align=item_bytes)
        return context.get_dummy_value()

    @intrinsic
    def micro(typingctx, a_rows, a_offsets, b, b_offsets, k_len, tile, pitch):
        return signature(types.none, *[types.int64] * 7), codegen

    return micro


@cache
def tile_product(
    dtype: str, mr: int, nv: int, vl: int, a_step: int | None, b_step: int | None, accumulate: bool, a_dtype: str = ""
):
    """Compiled-in function (vectors, ...): the `micro_kernel` of mr rows by 1 to nv vectors."""
    micro = micro_kernel(dtype, mr, nv, vl, a_step, b_step, accumulate, a_dtype or dtype)
    fewer = tile_product(dtype, mr, nv - 1, vl, a_step, b_step, accumulate, a_dtype) if nv > 1 else micro

    @njit(**DEVICE)
    def one(vectors, a_rows, a_offsets, b, b_offsets, k_len, tile, pitch):
        micro(a_rows, a_offsets, b, b_offsets, k_len, tile, pitch)

    @njit(**DEVICE)
    def product(vectors, a_rows, a_offsets, b, b_offsets, k_len, tile, pitch):
        if vectors == nv:
            micro(a_rows, a_offsets, b, b_offsets, k_len, tile, pitch)
        else:
            fewer(vectors, a_rows, a_offsets, b, b_offsets, k_len, tile, pitch)

    return product if nv > 1 else one


@cache
def pixel_tile(dtype: str, mr: int, nv: int, vl: int, finishes: bool = False):
    """Intrinsic: one register tile of a matrix product whose rows are pixels, equally far apart.

        y[m, j] = sum_k x[m, k] * w[k, j]      m < mr, j < nv * vl

    Arguments, all int64: x (address of the first pixel), x_step (bytes to the next), k_len, w (address of the packed
    panel), y, y_step, lanes (columns that are stored), streams (whether y lies on whole vectors and is written past the
    caches). Accumulates in `dtype`, in the order of k. finishes: two more, of sums that begin with start[j] (its
    address, of whole vectors) and are at least a float64.
    """
    scalar, item_bytes = FLOAT[dtype], 4 if dtype == "f32" else 8
    vector = ir.VectorType(scalar, vl)
    vector_bytes = vl * item_bytes

    def codegen(context, builder, sig, args):
        x, x_step, k_len, w, y, y_step, lanes, streams, *of_sums = args
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{vl}{dtype}"
        )
        # Three pixels share an address register: the second and third are one and two steps beyond it.
        beyond = [I64(0), x_step, builder.mul(x_step, I64(2))]
        triples = [builder.mul(x_step, I64(m)) for m in range(0, mr, 3)]

        def steps(first, end, unroll, pixel, panel, acc):
            """From k = first up to end, `unroll` at a time; returns what it leaves."""
            carried = [first, pixel, panel, *acc]
            entry = builder.block
            head, body, done = (builder.append_basic_block(f"k_{name}") for name in ("head", "body", "done"))
            builder.branch(head)
            builder.position_at_end(head)
            phis = [builder.phi(value.type) for value in carried]
            builder.cbranch(builder.icmp_signed("<", phis[0], end), body, done)
            builder.position_at_end(body)
            _, pixel, panel, *acc = phis
            bases = [opaque(builder, builder.add(pixel, triple)) for triple in triples]
            for i in range(unroll):
                slots = [builder.add(panel, I64((i * nv + j) * vector_bytes)) for j in range(nv)]
                columns = [builder.load(vector_at(builder, slot, vector), align=item_bytes) for slot in slots]
                for m in range(mr):
                    at = builder.add(builder.add(bases[m // 3], beyond[m % 3]), I64(i * item_bytes))
                    value = splat(builder, builder.load(builder.inttoptr(at, scalar.as_pointer())), vector)
                    for j, column in enumerate(columns):
                        acc[m * nv + j] = builder.call(fma, [value, column, acc[m * nv + j]])
            moved = zip(phis, (unroll, unroll * item_bytes, unroll * nv * vector_bytes), strict=False)
            after = [*(builder.add(phi, I64(step)) for phi, step in moved), *acc]
            for phi, before, value in zip(phis, carried, after, strict=True):
                phi.add_incoming(before, entry)
                phi.add_incoming(value, body)
            builder.branch(head)
            builder.position_at_end(done)
            return phis

        firsts = [ir.Constant(vector, None)] * nv
        if finishes:
            slots = [builder.add(of_sums[0], I64(j * vector_bytes)) for j in range(nv)]
            firsts = [builder.load(vector_at(builder, slot, vector), align=item_bytes) for slot in slots]
        whole = builder.sub(k_len, builder.srem(k_len, I64(_UNROLL)))
        k, pixel, panel, *acc = steps(I64(0), whole, _UNROLL, x, w, firsts * mr)
        _, _, _, *acc = steps(k, k_len, 1, pixel, panel, acc)
        if finishes:
            acc = at_least(builder, acc, of_sums[1])

        rows = [builder.add(y, builder.mul(y_step, I64(m))) for m in range(mr)]
        slots = [vector_at(builder, builder.add(row, I64(j * vector_bytes)), vector) for row in rows for j in range(nv)]
        with builder.if_else(builder.icmp_signed("!=", streams, I64(0))) as (past_caches, otherwise):
            with past_caches:
                for total, to in zip(acc, slots, strict=True):
                    store_past_caches(builder, total, to)
            with otherwise, builder.if_else(builder.icmp_signed("==", lanes, I64(nv * vl))) as (every, some):
                with every:
                    for total, to in zip(acc, slots, strict=True):
                        builder.store(total, to, align=item_bytes)
                with some:
                    masks = [lanes_between(builder, vl, j * vl, None, lanes) for j in range(nv)]
                    masked_store = masked(builder, vector)
                    for i, (total, to) in enumerate(zip(acc, slots, strict=True)):
                        masked_store(total, to, item_bytes, masks[i % nv])
        return context.get_dummy_value()

    @intrinsic
    def tile(typingctx, x, x_step, k_len, w, y, y_step, lanes, streams):
        return signature(types.none, *[types.int64] * 8), codegen

    @intrinsic
    def finished_tile(typingctx, x, x_step, k_len, w, y, y_step, lanes, streams, start, least):
        return signature(types.none, *[types.int64] * 9, types.float64), codegen

    return finished_tile if finishes else tile


def opaque(builder, value):
    """The same int64, of which the compiler no longer knows where it comes from.

    Addresses that are multiples of one step apart it would compute one from another, in a chain of additions.
    """
    return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], False)


@cache
def sandwich(dtype: str, vl: int, matrix: tuple[tuple[float, ...], ...]):
    """Intrinsic: L X L^T on vl small matrices at once, one in each vector lane.

    matrix is L (p x q, its zeros and ones cost nothing). Arguments, all int64: source, and the addresses of two int64
    tables of q byte offsets: X[i, j] is the vector at source + rows[i] + columns[j]; target, row_bytes, column_bytes:
    Y[i, j] goes to target + i*row_bytes + j*column_bytes.
    """
    vector, item_bytes = ir.VectorType(FLOAT[dtype], vl), 4 if dtype == "f32" else 8
    p, q = len(matrix), len(matrix[0])

    def combine(builder, fma, weights, values):
        total = None
        for weight, value in zip(weights, values, strict=True):
            if weight == 0:
                continue
            if total is None:
                total = value if weight == 1 else builder.fmul(constant(vector, weight), value)
            elif weight in (1, -1):
                total = (builder.fadd if weight == 1 else builder.fsub)(total, value)
            else:
                total = builder.call(fma, [constant(vector, weight), value, total])
        return total

    def codegen(context, builder, sig, args):
        source, rows, columns, target, row_bytes, column_bytes = args
        fma_type = ir.FunctionType(vector, [vector] * 3)
        fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{vl}{dtype}")

        def offsets(table):
            base = builder.inttoptr(table, I64.as_pointer())
            return [builder.load(builder.gep(base, [I64(i)])) for i in range(q)]

        def slot(address):
            return builder.inttoptr(address, vector.as_pointer())

        row_offsets, column_offsets = offsets(rows), offsets(columns)
        half = [[None] * q for _ in range(p)]
        for j in range(q):
            at = builder.add(source, column_offsets[j])
            column = [builder.load(slot(builder.add(at, row)), align=item_bytes) for row in row_offsets]
            for i in range(p):
                half[i][j] = combine(builder, fma, matrix[i], column)
        for i in range(p):
            at = builder.add(target, builder.mul(row_bytes, I64(i)))
            for j, weights in enumerate(matrix):
                to = slot(builder.add(at, builder.mul(column_bytes, I64(j))))
                builder.store(combine(builder, fma, weights, half[i]), to, align=item_bytes)
        return context.get_dummy_value()

    @intrinsic
    def transform(typingctx, source, rows, columns, target, row_bytes, column_bytes):
        return signature(types.none, *[types.int64] * 6), codegen

    return transform
