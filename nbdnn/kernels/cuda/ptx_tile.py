"""What tiled kernels need beyond `ptx.py`: packed pairs, shared memory by address, asynchronous copies and matrices.

Operands of matrix instructions are uint32 words, in tuples; shared addresses are 32 bits. A kernel fills shared memory
by `COPY_ASYNC`, commits, waits, synchronises the block, loads matrices and multiplies them.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import (
    EFFECT,
    F16,
    F32,
    I32,
    WARP,
    asm,
    conversion,
    load_words,
    packed,
    pointer,
    store_words,
    unpacked,
    words_type,
)

# ---- packed pairs of 16-bit floats, and single words -----------------------------------------------------------------


def _pack(dtype):
    text = f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"

    @intrinsic
    def pack(typingctx, low, high):
        """Two float32 to one word with `low` in its low half."""

        def codegen(context, builder, sig, args):
            return asm(builder, I32, text, "=r,f,f", list(args))

        return signature(types.uint32, types.float32, types.float32), codegen

    return pack


PACK = {"f16": _pack("f16"), "bf16": _pack("bf16")}


@intrinsic
def _unpack_f16(typingctx, word):
    def codegen(context, builder, sig, args):
        halves = builder.bitcast(args[0], ir.VectorType(F16, 2))
        return packed(builder, [builder.fpext(builder.extract_element(halves, I32(i)), F32) for i in (0, 1)])

    return signature(types.UniTuple(types.float32, 2), types.uint32), codegen


@intrinsic
def _unpack_bf16(typingctx, word):
    def codegen(context, builder, sig, args):
        low, high = builder.shl(args[0], I32(16)), builder.and_(args[0], I32(0xFFFF0000))
        return packed(builder, [builder.bitcast(half, F32) for half in (low, high)])

    return signature(types.UniTuple(types.float32, 2), types.uint32), codegen


# One word to (low, high) in float32.
UNPACK = {"f16": _unpack_f16, "bf16": _unpack_bf16}

# float32 to the word that a TF32 matrix instruction takes, rounded to nearest.
to_tf32 = conversion("cvt.rna.tf32.f32 $0, $1;", "=r,f", types.uint32, types.float32)


@intrinsic
def float_of(typingctx, word):
    """The float32 whose bits a word is."""
    return signature(types.float32, types.uint32), lambda context, builder, sig, args: builder.bitcast(args[0], F32)


@intrinsic
def word_of(typingctx, value):
    """The bits of a float32."""
    return signature(types.uint32, types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], I32)


@intrinsic
def words_of(typingctx, values):
    """The bits of a tuple of float32."""
    words = types.UniTuple(types.uint32, values.count)

    def codegen(context, builder, sig, args):
        return packed(builder, [builder.bitcast(value, I32) for value in unpacked(builder, args[0], values.count)])

    return signature(words, values), codegen


@intrinsic
def floats_of(typingctx, words):
    """The float32 whose bits a tuple of words are."""

    def codegen(context, builder, sig, args):
        return packed(builder, [builder.bitcast(word, F32) for word in unpacked(builder, args[0], words.count)])

    return signature(types.UniTuple(types.float32, words.count), words), codegen


def _paired(select):
    text = f"prmt.b32 $0, $1, $2, {select:#x};"

    @intrinsic
    def paired(typingctx, first, second):
        """One half of two words as one word: that of `first` in its low half."""

        def codegen(context, builder, sig, args):
            return asm(builder, I32, text, "=r,r,r", list(args))

        return signature(types.uint32, types.uint32, types.uint32), codegen

    return paired


# By the half that is taken: 0 the low one, 1 the high one.
PAIR_HALVES = {0: _paired(0x5410), 1: _paired(0x7632)}


# ---- shared memory: 32-bit addresses ---------------------------------------------------------------------------------


def shared_at(builder, address, add, kind=I32):
    """A pointer so many bytes from a shared address: a part of the instruction, as a sum of integers is not."""
    start = builder.inttoptr(address, ir.IntType(8).as_pointer(3))
    return builder.bitcast(builder.gep(start, [I32(add)]), kind.as_pointer(3))


@intrinsic
def shared_address(typingctx, array):
    """The address of a shared array's first byte."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(builder.addrspacecast(data, data.type.pointee.as_pointer(3)), I32)

    return signature(types.uint32, array), codegen


@intrinsic
def dynamic_shared(typingctx):
    """The address of the shared memory that the launch asks for, a multiple of 1024."""

    def codegen(context, builder, sig, args):
        symbol = builder.module.globals.get("dynamic_shared")
        if symbol is None:
            symbol = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", 3)
            symbol.linkage, symbol.align = "external", 1024
        return builder.ptrtoint(symbol, I32)

    return signature(types.uint32), codegen


@cache
def pointer_to_shared(dtype: str):
    """Intrinsic (shared address) -> a pointer to elements there."""

    @intrinsic
    def pointed(typingctx, where):
        kind = pointer(dtype)

        def codegen(context, builder, sig, args):
            element = context.get_value_type(kind).pointee
            return builder.addrspacecast(builder.inttoptr(args[0], element.as_pointer(3)), element.as_pointer())

        return signature(kind, types.uint32), codegen

    return pointed


def _load_shared(count):
    @intrinsic
    def load(typingctx, where):
        """Words at a shared address that is a multiple of their size."""

        def codegen(context, builder, sig, args):
            return load_words(builder, builder.inttoptr(args[0], I32.as_pointer(3)), count)

        return signature(words_type(count), types.uint32), codegen

    return load


def _store_shared(count):
    @intrinsic
    def store(typingctx, where, words):
        """Words to a shared address that is a multiple of their size."""

        def codegen(context, builder, sig, args):
            store_words(builder, builder.inttoptr(args[0], I32.as_pointer(3)), args[1], count)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, words_type(count)), codegen

    return store


# By the number of 32-bit words: 1, 2, 4.
LOAD_SHARED = {count: _load_shared(count) for count in (1, 2, 4)}
STORE_SHARED = {count: _store_shared(count) for count in (1, 2, 4)}


@intrinsic
def computed_here(typingctx, value):
    """The same int32, of which LLVM knows nothing: what follows from it is computed where it stands, not kept."""

    def codegen(context, builder, sig, args):
        return asm(builder, I32, "mov.b32 $0, $1;", "=r,r", list(args), EFFECT)

    return signature(types.int32, types.int32), codegen


# ---- asynchronous copies from global to shared memory ----------------------------------------------------------------


def effect(text: str):
    """An intrinsic without operands that is one piece of PTX."""

    @intrinsic
    def run(typingctx):
        def codegen(context, builder, sig, args):
            asm(builder, ir.VoidType(), text, "~{memory}", [], EFFECT)
            return context.get_dummy_value()

        return signature(types.none), codegen

    return run


def _copy_async(size_bytes):
    # Only 16 bytes may go past the first-level cache, which they would only pass through.
    text = f"cp.async.{'cg' if size_bytes == 16 else 'ca'}.shared.global [$0], [$1], {size_bytes}, $2;"

    @intrinsic
    def copy(typingctx, shared, source, source_bytes):
        """Bytes from a global to a shared address; what is beyond the first `source_bytes` becomes zero."""

        def codegen(context, builder, sig, args):
            asm(builder, ir.VoidType(), text, "r,l,r,~{memory}", list(args), EFFECT)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, types.uint64, types.int32), codegen

    return copy


# By the number of bytes.
COPY_ASYNC = {size_bytes: _copy_async(size_bytes) for size_bytes in (4, 8, 16)}
copy_async_commit = effect("cp.async.commit_group;")


@cache
def copy_async_wait(groups: int):
    """Intrinsic that waits until at most that many of this thread's committed groups are under way."""
    return effect(f"cp.async.wait_group {groups};")


# ---- matrices of a warp ----------------------------------------------------------------------------------------------

# What one instruction multiplies.
_SHAPES = {"f16": "m16n8k16", "bf16": "m16n8k16", "tf32": "m16n8k8"}


def _load_matrices(trans):
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4];"

    @intrinsic
    def load(typingctx, where):
        """Four 8x8 matrices of 16-bit elements; lane i gives the shared address of row i % 8 of matrix i // 8."""

        def codegen(context, builder, sig, args):
            four = ir.LiteralStructType([I32] * 4)
            loaded = asm(builder, four, text, "=r,=r,=r,=r,r,~{memory}", list(args), EFFECT)
            return packed(builder, unpacked(builder, loaded, 4))

        return signature(types.UniTuple(types.uint32, 4), types.uint32), codegen

    return load


load_matrices, load_matrices_transposed = _load_matrices(""), _load_matrices(".trans")


def product(builder, dtype, operands):
    """a @ b + c from its 4 + 2 + 4 registers: a list of 4."""
    text = (
        f"mma.sync.aligned.{_SHAPES[dtype]}.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    four = ir.LiteralStructType([F32] * 4)
    sums = asm(builder, four, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", operands, WARP)
    return unpacked(builder, sums, 4)


def _multiply(dtype):
    four_floats = types.UniTuple(types.float32, 4)

    @intrinsic
    def multiply(typingctx, a, b, c):
        """a @ b + c of one warp, in float32; which lane holds what, PTX says under 'fragments' of mma."""

        def codegen(context, builder, sig, args):
            operands = [
                part for arg, count in zip(args, (4, 2, 4), strict=True) for part in unpacked(builder, arg, count)
            ]
            return packed(builder, product(builder, dtype, operands))

        words = (types.UniTuple(types.uint32, 4), types.UniTuple(types.uint32, 2))
        return signature(four_floats, *words, four_floats), codegen

    return multiply


MULTIPLY = {dtype: _multiply(dtype) for dtype in _SHAPES}
