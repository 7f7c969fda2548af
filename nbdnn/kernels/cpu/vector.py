"""LLVM intrinsics that Numba lacks: raw loads and stores, half precision, structs; and vector building blocks.

Kernels get addresses as int64 and never see an array object: no reference counting, no wraparound indexing, and one
compiled kernel for every shape. The functions that take a `builder` emit vector code for the intrinsics of rows.py,
micro_kernel.py and depthwise_vector.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT = {"f32": ir.FloatType(), "f64": ir.DoubleType()}
NUMBA_FLOAT: dict[str, Any] = {"f32": types.float32, "f64": types.float64}
_POINTEE = {
    "f32": types.float32,
    "f64": types.float64,
    "f16": types.uint16,
    "bf16": types.uint16,
    "u8": types.uint8,
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


def ask(builder, address, writes: bool = False) -> None:
    """Ask for the cache line at an address, which need not be valid; to write to it."""
    byte = I8.as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    builder.call(function, [builder.inttoptr(address, byte), I32(int(writes)), I32(3), I32(1)])


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address, which need not be valid."""

    def codegen(context, builder, sig, args):
        ask(builder, args[0])
        return context.get_dummy_value()

    return signature(types.none, types.int64), codegen


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
def _identity_f32(typingctx, value):
    return signature(types.float32, types.float32), lambda context, builder, sig, args: args[0]


@intrinsic
def _identity_f64(typingctx, value):
    return signature(types.float64, types.float64), lambda context, builder, sig, args: args[0]


WIDEN = {"f16": f16_to_f32, "bf16": bf16_to_f32, "f32": _identity_f32, "f64": _identity_f64}
NARROW = {"f16": f32_to_f16, "bf16": f32_to_bf16, "f32": _identity_f32, "f64": _identity_f64}


def row_types(source, target, vl):
    """Vector types to read and write, 16-bit floats as i16, and bytes an element."""
    elements = {"f16": I16, "bf16": I16} | FLOAT
    sizes = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
    return (
        ir.VectorType(elements[source], vl),
        ir.VectorType(elements[target], vl),
        sizes[source],
        sizes[target],
    )


def vector_at(builder, address, type_):
    return builder.inttoptr(address, type_.as_pointer())


def store_past_caches(builder, value, slot):
    """Store a vector to memory without reading the line first; the address must be aligned to the vector's size.

    Such stores may be seen late by other cores: every task is followed by an atomic addition (`launch.py`), which waits
    for them.
    """
    size_bytes = value.type.count * (8 if value.type.element == FLOAT["f64"] else 2 if value.type.element == I16 else 4)
    stored = builder.store(value, slot, align=size_bytes)
    stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))


def masked(builder, type_):
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


def lanes_between(builder, vl, lane0, low, high, order=None):
    """Mask of the lanes whose number, counted from lane0 or as `order` has them, is at least low and less than high, of
    which one may be None."""
    type_ = ir.VectorType(I32, vl)
    lanes = ir.Constant(type_, order or list(range(lane0, lane0 + vl)))
    bounds = [("<", high), (">=", low)]
    masks = [
        builder.icmp_signed(order, lanes, splat(builder, builder.trunc(bound, I32), type_))
        for order, bound in bounds
        if bound is not None
    ]
    return masks[0] if len(masks) == 1 else builder.and_(*masks)


def element(builder, start, i, type_, size_bytes: int):
    return vector_at(builder, builder.add(start, builder.mul(i, I64(size_bytes))), type_)


def by_vectors(builder, n, vl: int, step) -> None:
    """step(i, mask) for every vl elements, the last of them under a mask; no other is: what a masked store wrote is not
    forwarded to the load of the next tap."""
    whole = builder.and_(n, I64(-vl))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(vl), I64) as (i, _):
        step(i, None)
    with builder.if_then(builder.icmp_signed("<", whole, n)):
        step(whole, lanes_between(builder, vl, 0, None, builder.sub(n, whole)))


def load(builder, slot, type_, size_bytes: int, mask):
    if mask is None:
        return builder.load(slot, align=size_bytes)
    return masked(builder, type_)(slot, size_bytes, mask)


def store(builder, value, slot, size_bytes: int, mask) -> None:
    if mask is None:
        builder.store(value, slot, align=size_bytes)
    else:
        masked(builder, value.type)(value, slot, size_bytes, mask)


def by_ends(builder, n, vl: int, step) -> None:
    """step(i, mask) for every vl elements, the last of which end with the n; only fewer than vl are masked."""
    with builder.if_else(builder.icmp_signed(">=", n, I64(vl))) as (whole, otherwise):
        with whole:
            end = builder.and_(n, I64(-vl))
            with cgutils.for_range_slice(builder, I64(0), end, I64(vl), I64) as (i, _):
                step(i, None)
            with builder.if_then(builder.icmp_signed("<", end, n)):
                step(builder.sub(n, I64(vl)), None)
        with otherwise:
            step(I64(0), lanes_between(builder, vl, 0, None, n))


def every(builder, parts):
    """Every len(parts)-th element of the vectors in a row; their number is a power of 2."""
    vl = parts[0].type.count
    even = ir.Constant(ir.VectorType(I32, vl), list(range(0, 2 * vl, 2)))
    while len(parts) > 1:
        parts = [builder.shuffle_vector(a, b, even) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def halved(builder, parts, vl: int, join):
    """What the lanes of vectors come to; join: of two such sequences. The halves are vectors of half as many lanes: of
    eight integers of 64 bits LLVM 20 took the comparison for the lanes that were selected by it."""
    half = vl // 2
    while half:
        low, high = (ir.Constant(ir.VectorType(I32, half), list(range(first, first + half))) for first in (0, half))
        parts = join(*([builder.shuffle_vector(part, part, lanes) for part in parts] for lanes in (low, high)))
        half //= 2
    return [builder.extract_element(part, I32(0)) for part in parts]


def splat(builder, value, vector):
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def spread(builder, value, vector):
    """A float64 in every lane, as the vector's type has it."""
    return splat(builder, value if vector.element == FLOAT["f64"] else builder.fptrunc(value, vector.element), vector)


def at_least(builder, values, least):
    """Of vectors the elements, or the float64 where they are less; a NaN stays one."""
    bound = spread(builder, least, values[0].type)
    return [builder.select(builder.fcmp_ordered("<", value, bound), bound, value) for value in values]


def convert(builder, value, source, target, vl):
    """Widen or narrow a vector of vl elements; 16-bit floats are vectors of i16."""
    if source == target:
        return value
    f32, i32 = ir.VectorType(FLOAT["f32"], vl), ir.VectorType(I32, vl)
    i16, half = ir.VectorType(I16, vl), ir.VectorType(ir.HalfType(), vl)
    if source == "f16":
        return builder.fpext(builder.bitcast(value, half), f32)
    if source == "bf16":
        return builder.bitcast(builder.shl(builder.zext(value, i32), constant(i32, 16)), f32)
    if target == "f16":
        return builder.bitcast(builder.fptrunc(value, half), i16)
    return _to_bf16(builder, value, i32, i16)


def constant(type_, value):
    return ir.Constant(type_, [value] * type_.count if isinstance(type_, ir.VectorType) else value)


def _to_bf16(builder, value, i32, i16):
    """float32 (scalar or vector) rounded to nearest even, as the upper halves of its bits; NaN becomes a quiet NaN."""
    bits = builder.bitcast(value, i32)
    lsb = builder.and_(builder.lshr(bits, constant(i32, 16)), constant(i32, 1))
    rounded = builder.add(bits, builder.add(lsb, constant(i32, 0x7FFF)))
    quiet = builder.or_(bits, constant(i32, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(is_nan, quiet, rounded), constant(i32, 16)), i16)
