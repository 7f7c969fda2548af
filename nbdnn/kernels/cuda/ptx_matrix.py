"""The matrices of a warp's whole tile: loaded, multiplied and stored by one intrinsic each.

A tile has a dozen or more matrices at places known when the kernel is built. Their words and sums are tuples, which
LLVM keeps in registers however many they are, where it gives up on local arrays of more than a hundred.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_tile import product

# A place is (xor, add): 16-byte chunks that change places with the row are told apart by an exclusive or, the others
# by a sum, which is part of the instruction.
Places = tuple[tuple[int, int], ...]


def _bases(builder, address, places):
    """`address` with each exclusive or that occurs."""
    return {xor: builder.xor(address, I32(xor)) if xor else address for xor, _ in places}


@cache
def load_matrices_at(places: Places, transposed: bool):
    """Intrinsic of an address: the four words of `load_matrices` for each place, in one tuple."""
    trans = ".trans" if transposed else ""
    words = types.UniTuple(types.uint32, 4 * len(places))

    @intrinsic
    def load(typingctx, where):
        def codegen(context, builder, sig, args):
            bases, four, loaded = _bases(builder, args[0], places), ir.LiteralStructType([I32] * 4), []
            for xor, add in places:
                text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4+{add}];"
                matrices = asm(builder, four, text, "=r,=r,=r,=r,r,~{memory}", [bases[xor]], EFFECT)
                loaded += unpacked(builder, matrices, 4)
            return packed(builder, loaded)

        return signature(words, types.uint32), codegen

    return load


def _at(builder, base, add, kind):
    return builder.inttoptr(builder.add(base, I32(add)), kind.as_pointer(3))


@cache
def load_words_at(places: Places):
    """Intrinsic of an address: the word at each place, in one tuple."""
    words = types.UniTuple(types.uint32, len(places))

    @intrinsic
    def load(typingctx, where):
        def codegen(context, builder, sig, args):
            bases = _bases(builder, args[0], places)
            return packed(builder, [builder.load(_at(builder, bases[xor], add, I32)) for xor, add in places])

        return signature(words, types.uint32), codegen

    return load


@cache
def store_floats_at(places: Places, count: int):
    """Intrinsic of an address and a tuple of float32: `count` (1 or 2) that follow each other go to each place."""
    floats = types.UniTuple(types.float32, count * len(places))

    @intrinsic
    def store(typingctx, where, values):
        def codegen(context, builder, sig, args):
            bases, vector = _bases(builder, args[0], places), ir.VectorType(F32, count)
            parts = unpacked(builder, args[1], count * len(places))
            for i, (xor, add) in enumerate(places):
                together = ir.Constant(vector, ir.Undefined)
                for lane in range(count):
                    together = builder.insert_element(together, parts[count * i + lane], I32(lane))
                builder.store(together, _at(builder, bases[xor], add, vector), align=4 * count)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, floats), codegen

    return store


@cache
def multiply_tile(dtype: str, tiles_m: int, tiles_n: int, rounded_before: bool = False):
    """Intrinsic (sums, a, b): each of tiles_m a (16 rows) with each of tiles_n b (8 columns), added to the sums.

    A tuple of each: 4 words an a, 2 words a b, 4 sums a pair, those of the first a first. Values of TF32 that were not
    rounded before are rounded to nearest here: the instruction would cut them off.
    """
    sums = types.UniTuple(types.float32, 4 * tiles_m * tiles_n)
    words_a, words_b = types.UniTuple(types.uint32, 4 * tiles_m), types.UniTuple(types.uint32, 2 * tiles_n)

    def rounded(builder, words):
        if dtype != "tf32" or rounded_before:
            return words
        return [asm(builder, I32, "cvt.rna.tf32.f32 $0, $1;", "=r,f", [builder.bitcast(word, F32)]) for word in words]

    @intrinsic
    def multiply(typingctx, acc, a, b):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], 4 * tiles_m * tiles_n)
            every_a = rounded(builder, unpacked(builder, args[1], 4 * tiles_m))
            every_b = rounded(builder, unpacked(builder, args[2], 2 * tiles_n))
            for pair in range(tiles_m * tiles_n):
                i, j = divmod(pair, tiles_n)
                before = values[4 * pair : 4 * pair + 4]
                operands = [*every_a[4 * i : 4 * i + 4], *every_b[2 * j : 2 * j + 2], *before]
                values[4 * pair : 4 * pair + 4] = product(builder, dtype, operands)
            return packed(builder, values)

        return signature(sums, sums, words_a, words_b), codegen

    return multiply


@cache
def zeros(count: int):
    """Intrinsic: a tuple of float32 zeros."""

    @intrinsic
    def zero(typingctx):
        def codegen(context, builder, sig, args):
            return packed(builder, [ir.Constant(F32, 0.0)] * count)

        return signature(types.UniTuple(types.float32, count)), codegen

    return zero


@cache
def part(count: int, first: int, size: int):
    """Intrinsic: of a tuple of so many float32 the `size` from `first` on."""

    @intrinsic
    def taken(typingctx, values):
        def codegen(context, builder, sig, args):
            return packed(builder, unpacked(builder, args[0], count)[first : first + size])

        return signature(types.UniTuple(types.float32, size), types.UniTuple(types.float32, count)), codegen

    return taken
