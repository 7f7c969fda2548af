"""What Numba has no words for: instructions of PTX and LLVM as intrinsics, and the types that kernels are made of.

Importing this module imports numba-cuda, so only builders of kernels do, inside functions. Beside `ptx_*.py` and
`compile.py` nothing touches numba-cuda. Data of 16 bits are uint16 in memory and float32 in registers; vectors are
uint32 words, alone or in tuples. A table of intrinsics is looked up in the builder, not in the kernel.

Three habits keep kernels fast, each seen in PTX: Numba makes int64 of an operation on two int32, so an index is cast
back at once, ``I(i * stride + j)``, which LLVM narrows to 32-bit instructions; division and a shift by what is not
known do not narrow, so they are `divided` and `shift_left`; and ``for i in range(n)`` with `n` unknown costs four
instructions a round, which ``while`` does not.
"""

from __future__ import annotations

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, nvvmutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

I32, I64, F16, F32 = ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()

ELEMENT = {
    "f16": types.uint16, "bf16": types.uint16, "f32": types.float32, "f64": types.float64, "u8": types.uint8,
    "i64": types.int64,
}  # fmt: skip
REAL = {"f32": types.float32, "f64": types.float64}
INTEGER = {32: types.int32, 64: types.int64}
WORD, WIDE = types.uint32, types.uint64

# Decorates device functions: inlined into what calls them, before types are inferred. Numba's own words for what it
# does well are reached as `ptx.cuda.syncthreads()`, `ptx.cuda.local.array`, `ptx.cuda.shared.array`.
inline = cuda.jit(device=True, inline="always")


def pointer(dtype: str):
    """The type of a pointer to elements of that dtype."""
    return types.CPointer(ELEMENT[dtype])


def record(fields, bits: int):
    """The type of an argument that is a NamedTuple of integers, all of `bits` bits."""
    return types.NamedUniTuple(INTEGER[bits], len(fields._fields), fields)


# What a piece of inline PTX does beside its result: nothing; nothing, but all lanes must come to it; or more.
PURE, WARP, EFFECT = ("nounwind", "readnone"), ("convergent", "nounwind", "readnone"), ("convergent", "nounwind")


def asm(builder, result, text, constraints, operands, attributes=PURE):
    """A call of inline PTX."""
    function = ir.FunctionType(result, [operand.type for operand in operands])
    assembly = ir.InlineAsm(function, text, constraints, side_effect=attributes is EFFECT)
    return builder.call(assembly, operands, attrs=attributes)


def conversion(text, constraints, result, operand):
    """An intrinsic that is one PTX instruction from a value of one Numba type to one of another."""

    @intrinsic
    def convert(typingctx, value):
        def codegen(context, builder, sig, args):
            return asm(builder, context.get_value_type(result), text, constraints, list(args))

        return signature(result, operand), codegen

    return convert


def unpacked(builder, aggregate, count):
    return [builder.extract_value(aggregate, i) for i in range(count)]


def packed(builder, values):
    return cgutils.pack_array(builder, values, ty=values[0].type)


# ---- where a thread is -----------------------------------------------------------------------------------------------


def _special(register):
    @intrinsic
    def read(typingctx):
        return signature(types.int32), lambda context, builder, sig, args: nvvmutils.call_sreg(builder, register)

    return read


thread_x, block_x, block_y, block_z = (_special(name) for name in ("tid.x", "ctaid.x", "ctaid.y", "ctaid.z"))


# ---- integers and floats ---------------------------------------------------------------------------------------------


@intrinsic
def divided(typingctx, dividend, divisor):
    """(quotient, remainder) of two integers of one type that are not negative."""
    pair = types.UniTuple(dividend, 2)

    def codegen(context, builder, sig, args):
        quotient = builder.udiv(*args)
        return packed(builder, [quotient, builder.sub(args[0], builder.mul(quotient, args[1]))])

    return signature(pair, dividend, dividend), codegen


@intrinsic
def split(typingctx, dividend, divisor, multiplier, shift):
    """`divided` by a divisor whose `reciprocal` the host worked out: of int32 four instructions, not twenty."""
    wide = ir.IntType(64)

    def codegen(context, builder, sig, args):
        if args[0].type == wide:
            quotient = builder.udiv(*args[:2])
            return packed(builder, [quotient, builder.sub(args[0], builder.mul(quotient, args[1]))])
        twice = builder.shl(args[0], I32(1))
        product = builder.mul(builder.zext(twice, wide), builder.zext(args[2], wide))
        quotient = builder.lshr(builder.trunc(builder.lshr(product, wide(32)), I32), args[3])
        return packed(builder, [quotient, builder.sub(args[0], builder.mul(quotient, args[1]))])

    return signature(types.UniTuple(dividend, 2), *[dividend] * 4), codegen


@intrinsic
def inside(typingctx, position, extent):
    """1 where 0 <= position < extent, else 0: one comparison of unsigned integers."""

    def codegen(context, builder, sig, args):
        return builder.zext(builder.icmp_unsigned("<", *args), I32)

    return signature(types.int32, position, position), codegen


@intrinsic
def shift_left(typingctx, value, count):
    """The bits of an integer moved up by a count less than their number."""

    def codegen(context, builder, sig, args):
        return builder.shl(*args)

    return signature(value, value, value), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c in one rounding, of the type of c."""

    def codegen(context, builder, sig, args):
        return builder.fma(*args)

    return signature(c, c, c, c), codegen


# ---- conversions -----------------------------------------------------------------------------------------------------


@intrinsic
def _same(typingctx, value):
    return signature(value, value), lambda context, builder, sig, args: args[0]


@intrinsic
def _widen_f16(typingctx, value):
    def codegen(context, builder, sig, args):
        return builder.fpext(builder.bitcast(args[0], F16), F32)

    return signature(types.float32, types.uint16), codegen


@intrinsic
def _widen_bf16(typingctx, value):
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), F32)

    return signature(types.float32, types.uint16), codegen


# An element in memory to the compute type and back, rounded to nearest even. By dtype: f32 and f64 pass through.
WIDEN = {"f16": _widen_f16, "bf16": _widen_bf16, "f32": _same, "f64": _same}
NARROW = {
    "f16": conversion("cvt.rn.f16.f32 $0, $1;", "=h,f", types.uint16, types.float32),
    "bf16": conversion("cvt.rn.bf16.f32 $0, $1;", "=h,f", types.uint16, types.float32),
    "f32": _same,
    "f64": _same,
}


# ---- global memory ---------------------------------------------------------------------------------------------------


@intrinsic
def load_constant(typingctx, base, index):
    """base[index] of memory that no thread writes while the kernel runs: the non-coherent path, free to be moved."""

    def codegen(context, builder, sig, args):
        return _constant(builder, builder.load(builder.gep(args[0], [args[1]])))

    return signature(base.dtype, base, index), codegen


@intrinsic
def address(typingctx, base, index):
    """The address of base[index], as an integer."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)

    return signature(types.uint64, base, index), codegen


def _constant(builder, load):
    load.set_metadata("invariant.load", builder.module.add_metadata([]))
    return load


def words_type(count):
    return types.uint32 if count == 1 else types.UniTuple(types.uint32, count)


def load_words(builder, where, count, *, constant=False):
    """`count` words from a pointer that is a multiple of their size: one instruction."""
    vector = ir.VectorType(I32, count)
    loaded = builder.load(builder.bitcast(where, vector.as_pointer(where.type.addrspace)), align=4 * count)
    if constant:
        _constant(builder, loaded)
    elements = [builder.extract_element(loaded, I32(i)) for i in range(count)]
    return elements[0] if count == 1 else packed(builder, elements)


def store_words(builder, where, words, count):
    vector = ir.VectorType(I32, count)
    filled = ir.Constant(vector, ir.Undefined)
    for i, word in enumerate([words] if count == 1 else unpacked(builder, words, count)):
        filled = builder.insert_element(filled, word, I32(i))
    builder.store(filled, builder.bitcast(where, vector.as_pointer(where.type.addrspace)), align=4 * count)


def _load(count, constant):
    @intrinsic
    def load(typingctx, base, index):
        """Words at base[index], whose address is a multiple of their size."""

        def codegen(context, builder, sig, args):
            return load_words(builder, builder.gep(args[0], [args[1]]), count, constant=constant)

        return signature(words_type(count), base, index), codegen

    return load


def _store(count):
    @intrinsic
    def store(typingctx, base, index, words):
        """Words to base[index], whose address is a multiple of their size."""

        def codegen(context, builder, sig, args):
            store_words(builder, builder.gep(args[0], [args[1]]), args[2], count)
            return context.get_dummy_value()

        return signature(types.none, base, index, words_type(count)), codegen

    return store


# By the number of 32-bit words: 1, 2, 4.
LOAD = {count: _load(count, False) for count in (1, 2, 4)}
LOAD_CONSTANT = {count: _load(count, True) for count in (1, 2, 4)}
STORE = {count: _store(count) for count in (1, 2, 4)}


# ---- warps -----------------------------------------------------------------------------------------------------------


@intrinsic
def shuffle_xor(typingctx, value, lanes):
    """`value`, of 32 or 64 bits, of the lane whose number differs in the bits of `lanes`. All lanes take part."""
    whole = ir.IntType(value.bitwidth)

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(args[0], whole)
        result = ir.Constant(whole, 0)
        for shift in range(0, value.bitwidth, 32):
            part = builder.trunc(builder.lshr(bits, whole(shift)), I32) if value.bitwidth > 32 else bits
            text = "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;"
            moved = asm(builder, I32, text, "=r,r,r", [part, args[1]], EFFECT)
            placed = builder.shl(builder.zext(moved, whole), whole(shift)) if value.bitwidth > 32 else moved
            result = builder.or_(result, placed)
        return builder.bitcast(result, args[0].type)

    return signature(value, value, types.int32), codegen
