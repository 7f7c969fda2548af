"""Philox4x32-10 in 32-bit instructions: two multiplications and two exclusive ors of three a round.

The keys of the rounds are of the seed alone: a thread has them in registers for all its blocks. Source: J. Salmon et
al., Parallel random numbers: as easy as 1, 2, 3 (SC11).
"""

from __future__ import annotations

from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, I64, asm, packed, unpacked

ROUNDS = 10
_KEYS = types.UniTuple(types.uint32, 2 * ROUNDS)
_STEPS = 0x9E3779B9, 0xBB67AE85  # from one round's keys to the next one's
_FIRST, _THIRD = 0xD2511F53, 0xCD9E8D57  # what the first and the third word are multiplied by
RUN = 8  # elements of a byte of a mask


def _halves(builder, value):
    return builder.trunc(value, I32), builder.trunc(builder.lshr(value, I64(32)), I32)


@cache
def keys(many: bool):
    """Intrinsic (seed of 64 bits) -> the keys of every round.

    many: a thread has several blocks of words. Then all lanes of a warp take part, with one seed: the keys come by way
    of an exchange, without which ptxas adds their steps again for every block, a tenth of all instructions.
    """
    exchange = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"

    @intrinsic
    def of_rounds(typingctx, seed):
        def codegen(context, builder, sig, args):
            pairs, steps = _halves(builder, args[0]), range(ROUNDS)
            every = [builder.add(key, I32(step * i)) for i in steps for key, step in zip(pairs, _STEPS, strict=True)]
            if many:
                every = [asm(builder, I32, exchange, "=r,r", [key], EFFECT) for key in every]
            return packed(builder, every)

        return signature(_KEYS, types.uint64), codegen

    return of_rounds


def _words(builder, block, of_rounds):
    """The four words of a block."""
    (a, b), c, d = _halves(builder, block), I32(0), I32(0)
    for i in range(ROUNDS):
        high_a, low_a = _product(builder, a, _FIRST)
        high_c, low_c = _product(builder, c, _THIRD)
        a = builder.xor(builder.xor(high_c, b), of_rounds[2 * i])
        c = builder.xor(builder.xor(high_a, d), of_rounds[2 * i + 1])
        b, d = low_c, low_a
    return [a, b, c, d]


def _product(builder, word, factor):
    """(high, low) word. Where LLVM multiplies 64-bit integers, ptxas adds a high part that is 0."""
    low, high = _halves(builder, asm(builder, I64, f"mul.wide.u32 $0, $1, {factor};", "=l,r", [word]))
    return high, low


@intrinsic
def drawn(typingctx, first, second, of_rounds, limit, every):
    """For each of the eight words of two blocks, whether it is larger than the limit, or every one is asked for."""

    def codegen(context, builder, sig, args):
        of_seed, least, all_ = unpacked(builder, args[2], 2 * ROUNDS), args[3], args[4]
        words = [word for block in args[:2] for word in _words(builder, block, of_seed)]
        return packed(builder, [builder.or_(builder.icmp_unsigned(">", word, least), all_) for word in words])

    kept = types.UniTuple(types.boolean, RUN)
    return signature(kept, types.uint64, types.uint64, _KEYS, types.uint32, types.boolean), codegen


@intrinsic
def byte_of(typingctx, kept):
    """Eight conditions as the bits of a byte, the first as the lowest."""

    def codegen(context, builder, sig, args):
        bits = I32(0)
        for i, one in enumerate(unpacked(builder, args[0], RUN)):
            bits = builder.or_(bits, builder.select(one, I32(1 << i), I32(0)))
        return bits

    return signature(types.int32, types.UniTuple(types.boolean, RUN)), codegen


@intrinsic
def conditions_of(typingctx, byte):
    """The bits of a byte as conditions."""

    def codegen(context, builder, sig, args):
        bits = [builder.and_(args[0], I32(1 << i)) for i in range(RUN)]
        return packed(builder, [builder.icmp_unsigned("!=", bit, I32(0)) for bit in bits])

    return signature(types.UniTuple(types.boolean, RUN), types.int32), codegen


@intrinsic
def scaled(typingctx, values, kept, scale):
    """The products of eight float32 and the scale where the condition holds, elsewhere zeros."""

    def codegen(context, builder, sig, args):
        pairs = zip(unpacked(builder, args[0], RUN), unpacked(builder, args[1], RUN), strict=True)
        return packed(builder, [builder.select(one, builder.fmul(value, args[2]), F32(0.0)) for value, one in pairs])

    floats = types.UniTuple(types.float32, RUN)
    return signature(floats, floats, types.UniTuple(types.boolean, RUN), types.float32), codegen
