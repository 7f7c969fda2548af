"""Vectors of neighbouring elements in local arrays.

A vector of 2 to 16 bytes is moved by one instruction; its elements are of the compute type in a local array, which
becomes registers where the loops over it have known ends. Shared addresses are 32 bits.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, I64, asm, unpacked
from nbdnn.kernels.cuda.ptx_vector import narrowed, parts_of, widened
from nbdnn.problem import ITEMSIZE

_I16, _F64 = ir.IntType(16), ir.DoubleType()
_IN_MEMORY = {"f16": _I16, "bf16": _I16, "f32": F32, "f64": _F64}
_SHARED = 3  # the address space
_WHOLE = 16  # bytes of the longest vector


def _elements(context, builder, kind, array, place, lanes):
    """Pointers to `lanes` elements of a local array from `place` on."""
    data = context.make_array(kind)(context, builder, array).data
    return [builder.gep(data, [builder.add(place, place.type(i))]) for i in range(lanes)]


def _load(context, builder, dtype, lanes, where, targets, constant):
    values = _values(builder, dtype, _loaded(builder, dtype, lanes, where, constant))
    for value, target in zip(values, targets, strict=True):
        builder.store(value, target)


def _loaded(builder, dtype, lanes, where, constant):
    """The parts of a vector in memory."""
    part, count = _parts(dtype, lanes)
    vector = ir.VectorType(part, count)
    at = builder.bitcast(where, vector.as_pointer(where.type.addrspace))
    loaded = builder.load(at, align=lanes * ITEMSIZE[dtype])
    if constant:
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
    return [builder.extract_element(loaded, I32(i)) for i in range(count)]


def _values(builder, dtype, parts):
    """The elements of a vector's parts, in the compute type."""
    return parts if dtype == "f64" else widened(builder, dtype, parts)


def _parts(dtype, lanes):
    """(type of a part, number of parts) of a vector as it is moved: pairs of 16-bit elements are words."""
    return (_F64, lanes) if dtype == "f64" else parts_of(dtype, lanes)


@cache
def spread(count: int):
    """Intrinsic (local array, tuple of float32): the elements to the array."""

    @intrinsic
    def put(typingctx, array, values):
        def codegen(context, builder, sig, args):
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            for i, value in enumerate(unpacked(builder, args[1], count)):
                builder.store(value, builder.gep(data, [I32(i)]))
            return context.get_dummy_value()

        return signature(types.none, array, types.UniTuple(types.float32, count)), codegen

    return put


@cache
def load(dtype: str, lanes: int):
    """Intrinsic (array, place, base, index): array[place + i] = base[index + i], of memory that no thread writes."""

    @intrinsic
    def load_lanes(typingctx, array, place, base, index):
        def codegen(context, builder, sig, args):
            targets = _elements(context, builder, sig.args[0], args[0], args[1], lanes)
            _load(context, builder, dtype, lanes, builder.gep(args[2], [args[3]]), targets, True)
            return context.get_dummy_value()

        return signature(types.none, array, place, base, index), codegen

    return load_lanes


# A vector that is on its way stays in registers as it lies in memory, until it is used.


def part(dtype: str, lanes: int):
    """(type, number) of the parts of a vector: words that may hold two elements, one half, or float64."""
    if dtype == "f64":
        return types.float64, lanes
    kind, count = parts_of(dtype, lanes)
    return types.uint16 if kind == _I16 else types.uint32, count


@cache
def load_parts(dtype: str, lanes: int):
    """Intrinsic (parts, place, base, index): parts[place + i] of the vector at base[index], which no thread writes."""

    @intrinsic
    def load(typingctx, parts, place, base, index):
        def codegen(context, builder, sig, args):
            loaded = _loaded(builder, dtype, lanes, builder.gep(args[2], [args[3]]), True)
            targets = _elements(context, builder, sig.args[0], args[0], args[1], len(loaded))
            for value, target in zip(loaded, targets, strict=True):
                builder.store(value, target)
            return context.get_dummy_value()

        return signature(types.none, parts, place, base, index), codegen

    return load


@cache
def widen_parts(dtype: str, lanes: int):
    """Intrinsic (array, parts, place): array[i] = element i of the vector whose parts begin at parts[place]."""

    @intrinsic
    def widen(typingctx, array, parts, place):
        def codegen(context, builder, sig, args):
            _, count = part(dtype, lanes)
            sources = _elements(context, builder, sig.args[1], args[1], args[2], count)
            values = _values(builder, dtype, [builder.load(source) for source in sources])
            targets = _elements(context, builder, sig.args[0], args[0], args[2].type(0), lanes)
            for value, target in zip(values, targets, strict=True):
                builder.store(value, target)
            return context.get_dummy_value()

        return signature(types.none, array, parts, place), codegen

    return widen


@cache
def load_shared(dtype: str, lanes: int):
    """Intrinsic (array, place, shared address): array[place + i] = what is there."""

    @intrinsic
    def load_lanes(typingctx, array, place, address):
        def codegen(context, builder, sig, args):
            targets = _elements(context, builder, sig.args[0], args[0], args[1], lanes)
            where = builder.inttoptr(args[2], _IN_MEMORY[dtype].as_pointer(_SHARED))
            _load(context, builder, dtype, lanes, where, targets, False)
            return context.get_dummy_value()

        return signature(types.none, array, place, types.uint32), codegen

    return load_lanes


@cache
def store(dtype: str, lanes: int, streams: bool = False):
    """Intrinsic (base, index, array, place): base[index + i] = array[place + i], rounded to nearest even.

    streams: vectors of 16 bytes leave the second-level cache before others.
    """

    @intrinsic
    def store_lanes(typingctx, base, index, array, place):
        def codegen(context, builder, sig, args):
            sources = _elements(context, builder, sig.args[2], args[2], args[3], lanes)
            values = [builder.load(source) for source in sources]
            parts = values if dtype == "f64" else narrowed(builder, dtype, values)
            vector = ir.VectorType(*_parts(dtype, lanes))
            filled = ir.Constant(vector, ir.Undefined)
            for i, value in enumerate(parts):
                filled = builder.insert_element(filled, value, I32(i))
            where = builder.gep(args[0], [args[1]])
            if streams and lanes * ITEMSIZE[dtype] == _WHOLE:
                letter, width = ("d", 64) if dtype == "f64" else ("r", 32)
                registers = ", ".join(f"${1 + i}" for i in range(vector.count))
                text = f"st.global.cs.v{vector.count}.b{width} [$0], {{{registers}}};"
                constraints = ",".join(["l", *[letter] * vector.count, "~{memory}"])
                asm(builder, ir.VoidType(), text, constraints, [builder.ptrtoint(where, I64), *parts], EFFECT)
            else:
                where = builder.bitcast(where, vector.as_pointer())
                builder.store(filled, where, align=lanes * ITEMSIZE[dtype])
            return context.get_dummy_value()

        return signature(types.none, base, index, array, place), codegen

    return store_lanes


@cache
def copy_to_shared(dtype: str, lanes: int, once: bool = False):
    """Intrinsic (shared address, base, index): a vector, asynchronously unless it is of 2 bytes. once: nobody reads it
    again, so that vectors of 16 bytes leave the second-level cache before others."""
    size_bytes = lanes * ITEMSIZE[dtype]
    operation = f"cp.async.{'cg' if size_bytes == 16 else 'ca'}.shared.global [$0], [$1], {size_bytes};"
    if once and size_bytes == _WHOLE:
        policy = ".reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        operation = f"{{ {policy} cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, policy; }}"
    if size_bytes == 2:
        operation = "{ .reg .b16 moved; ld.global.nc.b16 moved, [$1]; st.shared.b16 [$0], moved; }"

    @intrinsic
    def copy(typingctx, shared, base, index):
        def codegen(context, builder, sig, args):
            source = builder.ptrtoint(builder.gep(args[1], [args[2]]), I64)
            asm(builder, ir.VoidType(), operation, "r,l,~{memory}", [args[0], source], EFFECT)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, base, index), codegen

    return copy


AT_ONCE = 4  # vectors of 2 bytes that `copy_halves` has on their way


@intrinsic
def copy_halves(typingctx, shared, step_bytes, base, first, second, third, fourth, count):
    """The first `count` of four vectors of 2 bytes, at these indices, to shared memory a step apart.

    Nothing copies 2 bytes asynchronously, and a load that is stored at once is waited for: four are on their way.
    """
    first_loads = "ld.global.nc.b16 a, [$2]; @p ld.global.nc.b16 b, [$3];"
    loads = f"{first_loads} @q ld.global.nc.b16 c, [$4]; @r ld.global.nc.b16 d, [$5];"
    places = "add.u32 s, $0, $1; add.u32 t, s, $1; add.u32 u, t, $1;"
    stores = "st.shared.b16 [$0], a; @p st.shared.b16 [s], b; @q st.shared.b16 [t], c; @r st.shared.b16 [u], d;"
    wanted = "setp.gt.s32 p, $6, 1; setp.gt.s32 q, $6, 2; setp.gt.s32 r, $6, 3;"
    registers = ".reg .b16 a, b, c, d; .reg .b32 s, t, u; .reg .pred p, q, r;"
    operation = f"{{ {registers} {wanted} {loads} {places} {stores} }}"

    def codegen(context, builder, sig, args):
        slot, step, start, *places, number = args
        sources = [builder.ptrtoint(builder.gep(start, [place]), I64) for place in places]
        asm(builder, ir.VoidType(), operation, "r,r,l,l,l,l,r,~{memory}", [slot, step, *sources, number], EFFECT)
        return context.get_dummy_value()

    types_ = types.uint32, types.uint32, base, first, second, third, fourth, types.int32
    return signature(types.none, *types_), codegen
