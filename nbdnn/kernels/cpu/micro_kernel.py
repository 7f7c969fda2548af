"""The register-tiled matrix product and the small fixed transforms, emitted as LLVM vector code.

The accumulators must stay in registers: mr x nv vectors, one broadcast and nv fused multiply-adds a row and step.
Source: own, after Goto and van de Geijn (doi:10.1145/1356052.1356053) and the indirect convolution of Dukhan
(arXiv:1907.02129).
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.vector import FLOAT, I32, I64, constant, splat


@cache
def micro_kernel(dtype: str, mr: int, nv: int, vl: int, a_step: int | None, b_step: int | None, accumulate: bool):
    """Intrinsic: one register tile of a matrix product whose two operands are found through offset tables.

        tile[m, j] (+)= sum_k A[m, k] * B[k, j]      m < mr, j < nv * vl
        A[m, k] = *(a_rows[m] + a_offsets[k])        B[k, :] = *(b + b_offsets[k])

    Arguments, all int64: a_rows (address of mr addresses), a_offsets (address of int32 byte offsets), b, b_offsets,
    k_len, tile (address of mr rows of nv*vl accumulators), pitch (bytes from row to row of the tile). A step of
    `a_step` or `b_step` bytes replaces its table where it is not None. Accumulates in `dtype`, in the order of k.
    """
    scalar = FLOAT[dtype]
    vector = ir.VectorType(scalar, vl)
    item_bytes = 4 if dtype == "f32" else 8

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
        fma_type = ir.FunctionType(vector, [vector] * 3)
        fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{vl}{dtype}")
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
            value = builder.load(builder.inttoptr(builder.add(a[m], a_k), scalar.as_pointer()))
            value = splat(builder, value, vector)
            for j in range(nv):
                phi = acc[m * nv + j]
                phi.add_incoming(builder.call(fma, [value, columns[j], phi]), body)
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
def tile_product(dtype: str, mr: int, nv: int, vl: int, a_step: int | None, b_step: int | None, accumulate: bool):
    """Compiled-in function (vectors, ...): the `micro_kernel` of mr rows by 1, 2, 3 or nv <= 4 vectors."""
    one, two, three, full = (micro_kernel(dtype, mr, min(v, nv), vl, a_step, b_step, accumulate) for v in (1, 2, 3, nv))

    @njit(**DEVICE)
    def product(vectors, a_rows, a_offsets, b, b_offsets, k_len, tile, pitch):
        if vectors == nv:
            full(a_rows, a_offsets, b, b_offsets, k_len, tile, pitch)
        elif vectors == 1:
            one(a_rows, a_offsets, b, b_offsets, k_len, tile, pitch)
        elif vectors == 2:
            two(a_rows, a_offsets, b, b_offsets, k_len, tile, pitch)
        else:
            three(a_rows, a_offsets, b, b_offsets, k_len, tile, pitch)

    return product


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
