"""Vectors of neighbouring elements as they lie in memory, fetched long before they are wanted; and hints to caches.

What is fetched lies in a local array of words, half as many registers for 16-bit data as their values take, and nothing
waits for it until it is widened. A word holds 4 bytes; a vector of 2 bytes takes one, too.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, I32, I64, PURE, asm, unpacked
from nbdnn.kernels.cuda.ptx_vector import narrowed, parts_of, widened
from nbdnn.problem import ITEMSIZE

_I16, _F64 = ir.IntType(16), ir.DoubleType()
_LETTER = {16: "h", 32: "r", 64: "l"}
_HINTED_BYTES = 16


def count_of(dtype: str, lanes: int) -> int:
    """Words of a vector."""
    return max(1, lanes * ITEMSIZE[dtype] // 4)


def _elements(context, builder, kind, array, place, count):
    """Pointers to `count` elements of a local array from `place` on."""
    data = context.make_array(kind)(context, builder, array).data
    return [builder.gep(data, [builder.add(place, place.type(i))]) for i in range(count)]


@cache
def fetch(dtype: str, lanes: int, evict: str = ""):
    """Intrinsic (words, place, base, index): words[place + i] = those of the vector at base[index], of memory that no
    thread writes. It stays where it is written.

    evict: 'last' or 'first' of the second-level cache, for vectors of 16 bytes.
    """
    count, size_bytes = count_of(dtype, lanes), lanes * ITEMSIZE[dtype]
    hinted = bool(evict) and size_bytes == _HINTED_BYTES
    registers = ", ".join(f"${i}" for i in range(count))
    vector, registers = (f".v{count}", f"{{{registers}}}") if count > 1 else ("", registers)
    hint, policy = (".L2::cache_hint", f", ${count + 1}") if hinted else ("", "")
    text = f"ld.global.nc{hint}{vector}.b32 {registers}, [${count}]{policy};"
    if size_bytes == 2:
        text = "{ .reg .b16 half; ld.global.nc.b16 half, [$1]; cvt.u32.u16 $0, half; }"
    constraints = ",".join([*["=r"] * count, "l", *["l"] * hinted])

    @intrinsic
    def fetch_words(typingctx, words, place, base, index):
        def codegen(context, builder, sig, args):
            targets = _elements(context, builder, sig.args[0], args[0], args[1], count)
            operands = [builder.ptrtoint(builder.gep(args[2], [args[3]]), I64)]
            if hinted:
                operands.append(_policy(builder, evict))
            result = I32 if count == 1 else ir.LiteralStructType([I32] * count)
            loaded = asm(builder, result, text, constraints, operands, EFFECT)
            for word, target in zip([loaded] if count == 1 else unpacked(builder, loaded, count), targets, strict=True):
                builder.store(word, target)
            return context.get_dummy_value()

        return signature(types.none, words, place, base, index), codegen

    return fetch_words


@cache
def widen(dtype: str, lanes: int):
    """Intrinsic (array, words, place): array[i] = the elements, of the compute type, of the vector at words[place]."""
    count = count_of(dtype, lanes)

    @intrinsic
    def widen_words(typingctx, array, words, place):
        def codegen(context, builder, sig, args):
            sources = _elements(context, builder, sig.args[1], args[1], args[2], count)
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            parts = [builder.load(source) for source in sources]
            if dtype == "f64":
                values = [_double(builder, *parts[i : i + 2]) for i in range(0, count, 2)]
            elif parts_of(dtype, lanes)[0] == _I16:
                values = widened(builder, dtype, [builder.trunc(parts[0], _I16)])
            else:
                values = widened(builder, dtype, parts)
            for i, value in enumerate(values):
                builder.store(value, builder.gep(data, [I32(i)]))
            return context.get_dummy_value()

        return signature(types.none, array, words, place), codegen

    return widen_words


@cache
def store(dtype: str, lanes: int, evict: str = ""):
    """Intrinsic (base, index, array, place): base[index + i] = array[place + i], rounded to nearest even.

    evict: 'streaming' where no cache shall keep it longer than it must; 'first' of the second-level cache, for vectors
    of 16 bytes.
    """
    hinted = evict == "first" and lanes * ITEMSIZE[dtype] == _HINTED_BYTES
    part, count = (I64, lanes) if dtype == "f64" else parts_of(dtype, lanes)
    registers = ", ".join(f"${1 + i}" for i in range(count))
    vector, registers = (f".v{count}", f"{{{registers}}}") if count > 1 else ("", registers)
    hint = ".L2::cache_hint" if hinted else ".cs" if evict == "streaming" else ""
    text = f"st.global{hint}{vector}.b{part.width} [$0], {registers}{f', ${count + 1}' if hinted else ''};"
    constraints = ",".join(["l", *[_LETTER[part.width]] * count, *["l"] * hinted, "~{memory}"])

    @intrinsic
    def store_lanes(typingctx, base, index, array, place):
        def codegen(context, builder, sig, args):
            sources = _elements(context, builder, sig.args[2], args[2], args[3], lanes)
            values = [builder.load(source) for source in sources]
            whole = dtype == "f64"
            parts = [builder.bitcast(value, I64) for value in values] if whole else narrowed(builder, dtype, values)
            operands = [builder.ptrtoint(builder.gep(args[0], [args[1]]), I64), *parts]
            if hinted:
                operands.append(_policy(builder, evict))
            asm(builder, ir.VoidType(), text, constraints, operands, EFFECT)
            return context.get_dummy_value()

        return signature(types.none, base, index, array, place), codegen

    return store_lanes


def _policy(builder, evict):
    return asm(builder, I64, f"createpolicy.fractional.L2::evict_{evict}.b64 $0, 1.0;", "=l", [], PURE)


def _double(builder, low, high):
    wide = builder.or_(builder.zext(low, I64), builder.shl(builder.zext(high, I64), I64(32)))
    return builder.bitcast(wide, _F64)
