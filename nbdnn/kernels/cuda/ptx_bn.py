"""What batch normalisation needs beyond `ptx.py`."""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import F32, I32, asm
from nbdnn.kernels.cuda.ptx_vector import parts_of, widened
from nbdnn.problem import ITEMSIZE

_F64 = ir.DoubleType()


@cache
def share(compute: str):
    """Intrinsic (n, more) -> more / (n + more), 0 where both are; of float32 off by 2^-23 of it, but soon there."""
    text = (
        "{ .reg .f32 both; .reg .pred any; add.f32 both, $1, $2; setp.gt.f32 any, both, 0f00000000;"
        " rcp.approx.ftz.f32 both, both; mul.f32 both, both, $2; selp.f32 $0, both, 0f00000000, any; }"
    )

    @intrinsic
    def of_both(typingctx, n, more):
        def codegen(context, builder, sig, args):
            if compute == "f32":
                return asm(builder, F32, text, "=f,f,f", list(args))
            zero, both = ir.Constant(args[0].type, 0.0), builder.fadd(*args)
            return builder.select(builder.fcmp_ordered(">", both, zero), builder.fdiv(args[1], both), zero)

        return signature(n, n, more), codegen

    return of_both


@cache
def rsqrt(compute: str):
    """Intrinsic (a positive value) -> one over its root; of float32 off by 2^-22.9 of it. No branches, as roots and
    quotients have, before which no load is moved."""

    @intrinsic
    def of_value(typingctx, value):
        def codegen(context, builder, sig, args):
            if compute == "f32":
                return asm(builder, F32, "rsqrt.approx.f32 $0, $1;", "=f,f", list(args))
            root = builder.call(builder.module.declare_intrinsic("llvm.sqrt", [args[0].type]), args)
            return builder.fdiv(ir.Constant(args[0].type, 1.0), root)

        return signature(value, value), codegen

    return of_value


# ---- vectors that are on their way: in registers as they lie in memory, until they are used --------------------------


def part(dtype: str, lanes: int):
    """(type, number) of the parts of a vector: words that may hold two elements, one half, or float64."""
    if dtype == "f64":
        return types.float64, lanes
    size_bytes = lanes * ITEMSIZE[dtype]
    return (types.uint16, 1) if size_bytes == 2 else (types.uint32, size_bytes // 4)


def _pointers(context, builder, kind, array, place, count):
    """To so many elements of a local array from `place` on."""
    data = context.make_array(kind)(context, builder, array).data
    return [builder.gep(data, [builder.add(place, place.type(i))]) for i in range(count)]


@cache
def load_parts(dtype: str, lanes: int):
    """Intrinsic (parts, place, base, index): parts[place + i] of the vector at base[index], which no thread writes."""

    @intrinsic
    def load(typingctx, parts, place, base, index):
        def codegen(context, builder, sig, args):
            kind, count = (_F64, lanes) if dtype == "f64" else parts_of(dtype, lanes)
            vector = ir.VectorType(kind, count)
            where = builder.bitcast(builder.gep(args[2], [args[3]]), vector.as_pointer())
            loaded = builder.load(where, align=lanes * ITEMSIZE[dtype])
            loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
            for i, target in enumerate(_pointers(context, builder, sig.args[0], args[0], args[1], count)):
                builder.store(builder.extract_element(loaded, I32(i)), target)
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
            sources = _pointers(context, builder, sig.args[1], args[1], args[2], count)
            loaded = [builder.load(source) for source in sources]
            values = loaded if dtype == "f64" else widened(builder, dtype, loaded)
            targets = _pointers(context, builder, sig.args[0], args[0], args[2].type(0), lanes)
            for value, target in zip(values, targets, strict=True):
                builder.store(value, target)
            return context.get_dummy_value()

        return signature(types.none, array, parts, place), codegen

    return widen
