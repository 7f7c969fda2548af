"""LLVM intrinsics that Numba lacks: raw loads and stores, half precision, atomics, and the register-tiled micro-kernel.

Kernels get addresses as int64 and never see an array object: no reference counting, no wraparound indexing, and one
compiled kernel for every shape. The micro-kernel is emitted as LLVM vector code because the accumulators must stay in
registers: mr x nv vectors, one broadcast and nv fused multiply-adds a row and step. Source: own, after Goto and van
de Geijn (doi:10.1145/1356052.1356053) and the indirect convolution of Dukhan (arXiv:1907.02129).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT = {"f32": ir.FloatType(), "f64": ir.DoubleType()}
NUMBA_FLOAT = {"f32": types.float32, "f64": types.float64}
_POINTEE = {
    "f32": types.float32,
    "f64": types.float64,
    "f16": types.uint16,
    "bf16": types.uint16,
    "i32": types.int32,
    "i64": types.int64,
}


@cache
def pointer(dtype: str):
    """Intrinsic: address (int64) -> typed pointer that Numba can index; 16-bit floats appear as uint16."""
    type_ = types.CPointer(_POINTEE[dtype])

    @intrinsic
    def as_pointer(typingctx, address):
        def codegen(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(type_))

        return signature(type_, types.int64), codegen

    return as_pointer


def record(*fields: str) -> np.dtype:
    """A struct of int64 fields, in which a kernel gets its parameters."""
    return np.dtype([(name, np.int64) for name in fields], align=True)


def filled(dtype: np.dtype, **values: int) -> np.ndarray:
    """One record with every field set; a field left out or unknown is an error."""
    if missing := set(dtype.names or ()) ^ set(values):
        raise TypeError(f"fields set and fields of the record differ: {sorted(missing)}")
    made = np.zeros(1, dtype)
    made[0] = tuple(values[name] for name in dtype.names or ())
    return made


def struct(dtype: np.dtype):
    """Intrinsic: address (int64) -> the record there, its fields read by name."""
    type_ = from_dtype(dtype)

    @intrinsic
    def at_address(typingctx, address):
        def codegen(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(type_))

        return signature(type_, types.int64), codegen

    return at_address


@intrinsic
def call_task(typingctx, function, args, ctx, index, worker):
    """Call the task at address `function`: void(args, ctx, index, worker)."""

    def codegen(context, builder, sig, values):
        type_ = ir.FunctionType(ir.VoidType(), [I64] * 4)
        builder.call(builder.inttoptr(values[0], type_.as_pointer()), values[1:])
        return context.get_dummy_value()

    return signature(types.none, *[types.int64] * 5), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """Add to the int64 at `address`; returns what was there before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic")

    return signature(types.int64, types.int64, types.int64), codegen


@intrinsic
def num_threads(typingctx):
    """Threads a parallel region runs on now. Numba's own function embeds an address and so cannot be cached on disk."""

    def codegen(context, builder, sig, args):
        type_ = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, type_, "get_num_threads"), [])

    return signature(types.int64), codegen


@cache
def stack(size_bytes: int):
    """Intrinsic: address of `size_bytes` bytes on this function's stack, aligned to 64."""

    @intrinsic
    def stack_bytes(typingctx):
        def codegen(context, builder, sig, args):
            with builder.goto_entry_block():
                slot = builder.alloca(I8, size=ir.Constant(I64, size_bytes))
                slot.align = 64
            return builder.ptrtoint(slot, I64)

        return signature(types.int64), codegen

    return stack_bytes


@intrinsic
def f16_to_f32(typingctx, bits):
    """Widen an IEEE half (uint16)."""

    def codegen(context, builder, sig, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return signature(types.float32, types.uint16), codegen


@intrinsic
def f32_to_f16(typingctx, value):
    """Round to an IEEE half (uint16), to nearest even."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), I16)

    return signature(types.uint16, types.float32), codegen


@intrinsic
def bf16_to_f32(typingctx, bits):
    """Widen a bfloat16 (uint16): a shift."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), ir.FloatType())

    return signature(types.float32, types.uint16), codegen


@intrinsic
def f32_to_bf16(typingctx, value):
    """Round to bfloat16 (uint16), to nearest even; a NaN stays a (quiet) NaN."""

    def codegen(context, builder, sig, args):
        return _to_bf16(builder, args[0], I32, I16)

    return signature(types.uint16, types.float32), codegen


@intrinsic
def f32_from_bits(typingctx, bits):
    """The float32 whose bit pattern is this int32."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.FloatType())

    return signature(types.float32, types.int32), codegen


@intrinsic
def _identity_f32(typingctx, value):
    return signature(types.float32, types.float32), lambda context, builder, sig, args: args[0]


@intrinsic
def _identity_f64(typingctx, value):
    return signature(types.float64, types.float64), lambda context, builder, sig, args: args[0]


WIDEN = {"f16": f16_to_f32, "bf16": bf16_to_f32, "f32": _identity_f32, "f64": _identity_f64}
NARROW = {"f16": f32_to_f16, "bf16": f32_to_bf16, "f32": _identity_f32, "f64": _identity_f64}


@cache
def convert_row(source: str, target: str, vl: int):
    """Intrinsic (to, start, n): n elements of `source` dtype at address `start`, converted to `target` dtype at `to`.

    Whole vectors of vl elements, then one masked vector: short rows, which is what convolutions have, cost no scalar
    loop. Rounds to nearest even; NaN stays NaN.
    """
    read, write, read_bytes, write_bytes = _row_types(source, target, vl)

    def codegen(context, builder, sig, args):
        to, start, n = args
        masked_load, masked_store = _masked(builder, read), _masked(builder, write)
        entry = builder.block
        head, body, tail, masked, done = (builder.append_basic_block(f"row_{name}") for name in "hbtmd")

        def slots(i):
            return (
                _vector_at(builder, builder.add(start, builder.mul(i, I64(read_bytes))), read),
                _vector_at(builder, builder.add(to, builder.mul(i, I64(write_bytes))), write),
            )

        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(I64)
        i.add_incoming(I64(0), entry)
        after = builder.add(i, I64(vl))
        builder.cbranch(builder.icmp_signed("<=", after, n), body, tail)

        builder.position_at_end(body)
        from_slot, to_slot = slots(i)
        value = builder.load(from_slot, align=read_bytes)
        builder.store(_convert(builder, value, source, target, vl), to_slot, align=write_bytes)
        i.add_incoming(after, body)
        builder.branch(head)

        builder.position_at_end(tail)
        builder.cbranch(builder.icmp_signed("<", i, n), masked, done)
        builder.position_at_end(masked)
        mask = _lanes_between(builder, vl, 0, None, builder.sub(n, i))
        from_slot, to_slot = slots(i)
        value = masked_load(from_slot, read_bytes, mask)
        masked_store(_convert(builder, value, source, target, vl), to_slot, write_bytes, mask)
        builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    @intrinsic
    def convert(typingctx, to, start, n):
        return signature(types.none, types.int64, types.int64, types.int64), codegen

    return convert


@cache
def convert_rows(source: str, target: str, vl: int, step: int):
    """Intrinsic (to, to_pitch, start, start_pitch, rows, width, first, end): a block of short rows, padded with zeros.

    Row j gets `width` elements at to + j*to_pitch bytes: element q is the one at start + j*start_pitch bytes plus
    q*step elements where first <= q < end, and 0 elsewhere; nothing outside [first, end) is read. step is a power of
    2. Masks are computed once a block, so a row of one vector costs one load and one store.
    """
    read, write, read_bytes, write_bytes = _row_types(source, target, vl)

    def codegen(context, builder, sig, args):
        to, to_pitch, start, start_pitch, rows, width, first, end = args
        masked_load, masked_store = _masked(builder, read), _masked(builder, write)
        zero = ir.Constant(I64, 0)
        with cgutils.for_range_slice(builder, zero, width, I64(vl), I64) as (q, _):
            store_mask = _lanes_between(builder, vl, 0, None, builder.sub(width, q))
            low = builder.mul(builder.sub(first, q), I64(step))
            high = builder.add(builder.mul(builder.sub(builder.sub(end, q), I64(1)), I64(step)), I64(1))
            load_masks = [_lanes_between(builder, vl, part * vl, low, high) for part in range(step)]
            from_column = builder.add(start, builder.mul(q, I64(step * read_bytes)))
            to_column = builder.add(to, builder.mul(q, I64(write_bytes)))
            with cgutils.for_range(builder, rows) as loop:
                from_row = builder.add(from_column, builder.mul(loop.index, start_pitch))
                to_row = builder.add(to_column, builder.mul(loop.index, to_pitch))
                parts = []
                for part, mask in enumerate(load_masks):
                    slot = _vector_at(builder, builder.add(from_row, I64(part * vl * read_bytes)), read)
                    parts.append(masked_load(slot, read_bytes, mask))
                even = ir.Constant(ir.VectorType(I32, vl), list(range(0, 2 * vl, 2)))
                while len(parts) > 1:
                    pairs = zip(parts[::2], parts[1::2], strict=True)
                    parts = [builder.shuffle_vector(one, two, even) for one, two in pairs]
                value = _convert(builder, parts[0], source, target, vl)
                masked_store(value, _vector_at(builder, to_row, write), write_bytes, store_mask)
        return context.get_dummy_value()

    @intrinsic
    def convert(typingctx, to, to_pitch, start, start_pitch, rows, width, first, end):
        return signature(types.none, *[types.int64] * 8), codegen

    return convert


def _row_types(source, target, vl):
    """Vector types to read and write, 16-bit floats as i16, and bytes an element."""
    elements = {"f16": I16, "bf16": I16} | FLOAT
    sizes = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
    return (
        ir.VectorType(elements[source], vl),
        ir.VectorType(elements[target], vl),
        sizes[source],
        sizes[target],
    )


def _vector_at(builder, address, type_):
    return builder.inttoptr(address, type_.as_pointer())


def _masked(builder, type_):
    """(slot, align, mask) -> value, zero where the mask is off; or (value, slot, align, mask), which stores."""
    mask_type = ir.VectorType(ir.IntType(1), type_.count)
    suffix = f"v{type_.count}{'i16' if type_.element == I16 else 'f32' if type_.element == FLOAT['f32'] else 'f64'}"
    load_type = ir.FunctionType(type_, [type_.as_pointer(), I32, mask_type, type_])
    store_type = ir.FunctionType(ir.VoidType(), [type_, type_.as_pointer(), I32, mask_type])

    def access(*operands):
        *value, slot, align, mask = operands
        name, kind = ("store", store_type) if value else ("load", load_type)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}.{suffix}.p0")
        others = [] if value else [ir.Constant(type_, None)]
        return builder.call(function, [*value, slot, I32(align), mask, *others])

    return access


def _lanes_between(builder, vl, lane0, low, high):
    """Mask of the lanes whose number, counted from lane0, is at least low (if given) and less than high."""
    type_ = ir.VectorType(I64, vl)
    lanes = ir.Constant(type_, list(range(lane0, lane0 + vl)))
    mask = builder.icmp_signed("<", lanes, _splat(builder, high, type_))
    if low is None:
        return mask
    return builder.and_(mask, builder.icmp_signed(">=", lanes, _splat(builder, low, type_)))


def _splat(builder, value, vector):
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def _convert(builder, value, source, target, vl):
    """Widen or narrow a vector of vl elements; 16-bit floats are vectors of i16."""
    if source == target:
        return value
    f32, i32 = ir.VectorType(FLOAT["f32"], vl), ir.VectorType(I32, vl)
    i16, half = ir.VectorType(I16, vl), ir.VectorType(ir.HalfType(), vl)
    if source == "f16":
        return builder.fpext(builder.bitcast(value, half), f32)
    if source == "bf16":
        return builder.bitcast(builder.shl(builder.zext(value, i32), _constant(i32, 16)), f32)
    if target == "f16":
        return builder.bitcast(builder.fptrunc(value, half), i16)
    return _to_bf16(builder, value, i32, i16)


def _constant(type_, value):
    return ir.Constant(type_, [value] * type_.count if isinstance(type_, ir.VectorType) else value)


def _to_bf16(builder, value, i32, i16):
    """float32 (scalar or vector) rounded to nearest even, as the upper halves of its bits; NaN becomes a quiet NaN."""
    bits = builder.bitcast(value, i32)
    lsb = builder.and_(builder.lshr(bits, _constant(i32, 16)), _constant(i32, 1))
    rounded = builder.add(bits, builder.add(lsb, _constant(i32, 0x7FFF)))
    quiet = builder.or_(bits, _constant(i32, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), _constant(i32, 16)), i16)


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
            value = _splat(builder, value, vector)
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
def sandwich(dtype: str, vl: int, matrix: tuple[tuple[float, ...], ...], interleave: bool):
    """Intrinsic: L X L^T on vl small matrices at once, one in each vector lane.

    matrix is L (p x q, its zeros and ones cost nothing). Arguments, all int64: source, and the addresses of two int64
    tables of q byte offsets: X[i, j] is the vector at source + rows[i] + columns[j]; target, row_bytes, column_bytes:
    Y[i, j] goes to target + i*row_bytes + j*column_bytes. With `interleave` the p vectors of a row are stored as one
    run in which the p values of a lane are neighbours.
    """
    vector, item_bytes = ir.VectorType(FLOAT[dtype], vl), 4 if dtype == "f32" else 8
    p, q = len(matrix), len(matrix[0])

    def combine(builder, fma, weights, values):
        total = None
        for weight, value in zip(weights, values, strict=True):
            if weight == 0:
                continue
            if total is None:
                total = value if weight == 1 else builder.fmul(_constant(vector, weight), value)
            elif weight in (1, -1):
                total = (builder.fadd if weight == 1 else builder.fsub)(total, value)
            else:
                total = builder.call(fma, [_constant(vector, weight), value, total])
        return total

    def interleaved(builder, values):
        if len(values) == 1:
            return values
        evens, odds = interleaved(builder, values[::2]), interleaved(builder, values[1::2])
        merged = []
        for even, odd in zip(evens, odds, strict=True):
            for half in (0, vl // 2):
                lanes = [half + i // 2 + (i % 2) * vl for i in range(vl)]
                merged.append(builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(I32, vl), lanes)))
        return merged

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
            values = [combine(builder, fma, weights, half[i]) for weights in matrix]
            for j, value in enumerate(interleaved(builder, values) if interleave else values):
                step = I64(j * vl * item_bytes) if interleave else builder.mul(column_bytes, I64(j))
                builder.store(value, slot(builder.add(at, step)), align=item_bytes)
        return context.get_dummy_value()

    @intrinsic
    def transform(typingctx, source, rows, columns, target, row_bytes, column_bytes):
        return signature(types.none, *[types.int64] * 6), codegen

    return transform
