"""From the sums of a warp's matrix instructions to memory, finished, without a way through shared memory.

Lane l of a warp has of 16 rows the sums of rows l / 4 and 8 later, of each eight columns those of 2 * (l % 4) and the
next, which the output has as neighbours. Those of float32 are stored as they are: four lanes make a sector of 32 bytes.
Those of 16 bits are exchanged first: of 32 columns, lane l % 4 gets eight neighbours, 16 bytes of two sectors.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.epilogue import Finish
from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, asm, unpacked
from nbdnn.kernels.cuda.ptx_vector import load_vector, narrowed, store_parts, store_vector

_EIGHT, _QUARTER, _LANES = 8, 4, 4  # columns; sets of eight that lanes exchange; lanes of a row
_READ = 4  # sets of eight whose output or residual is asked for at once


def _exchanged(builder, words, lane):
    """Of the words of four sets of eight columns, one a lane of four: all four of the set that is the lane's own."""
    words = list(words)
    for bit in (1, 2):
        is_odd = builder.icmp_signed("!=", builder.and_(lane, I32(bit)), I32(0))
        for first in (i for i in range(_QUARTER) if not i & bit):
            low, high = words[first], words[first | bit]
            given = builder.select(is_odd, low, high)
            text = f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, 0xffffffff;"
            taken = asm(builder, I32, text, "=r,r", [given], EFFECT)
            words[first] = builder.select(is_odd, taken, low)
            words[first | bit] = builder.select(is_odd, high, taken)
    return words


@cache
def stored(how: Finish):
    """Intrinsic (sums, (output, bias, residual), (alpha, beta), lane, (at, bias at), (rows, columns), step).

    at, bias at: of the sum of the warp's first row and column. rows, columns: how many there are from it on, columns in
    whole pairs, of 16 bits in sets of eight. step: from a row of the output to the next.
    """
    eights, finish, real = how.columns // _EIGHT, epilogue.finish("f32", how.epilogue).py_func, types.float32
    reads_out, has_bias, has_residual = (token in how.epilogue for token in ("beta", "bias", "res"))
    two, zeros = types.UniTuple(types.int32, 2), [F32(0.0)] * 2

    @intrinsic
    def store(typingctx, sums, pointers, scalars, lane, place, left, step):
        def codegen(context, builder, sig, args):
            total, (out, bias, residual) = unpacked(builder, args[0], 4 * eights), unpacked(builder, args[1], 3)
            (alpha, beta), lane = unpacked(builder, args[2], 2), args[3]
            (first, first_bias), (rows, columns) = unpacked(builder, args[4], 2), unpacked(builder, args[5], 2)
            row, number = builder.lshr(lane, I32(2)), builder.and_(lane, I32(_LANES - 1))
            own = builder.shl(number, I32(1))  # column of the lane's pair

            def is_column(eight):
                return builder.icmp_signed("<", builder.add(own, I32(_EIGHT * eight)), columns)

            def read(pointer, at, wanted, count, constant=True):
                return load_vector(builder, builder.gep(pointer, [at]), wanted, how.dtype, count, constant=constant)

            def finished(sums_of_pair, before, shift, added):
                made = []
                for value in zip(sums_of_pair, before, shift, added, strict=True):
                    given = [value[0], alpha, beta, *value[1:]]
                    made.append(context.compile_internal(builder, finish, signature(real, *[real] * 6), given))
                return made

            for half, start in product((0, 1), range(0, eights, _READ)):
                own_row = builder.add(row, I32(8 * half))
                is_row = builder.icmp_signed("<", own_row, rows)
                at_row = builder.add(first, builder.mul(own_row, args[6]))
                if has_bias and not how.by_column and start == 0:
                    of_row = read(bias, builder.add(first_bias, own_row), is_row, 1) * 2
                group = range(start, start + _READ)
                alive = [builder.and_(is_row, is_column(i)) for i in group]
                places = [builder.add(at_row, builder.add(own, I32(_EIGHT * i))) for i in group]
                before = [zeros] * _READ
                if reads_out:
                    before = [read(out, *each, 2, constant=False) for each in zip(places, alive, strict=True)]
                added = [zeros] * _READ
                if has_residual:
                    added = [read(residual, *each, 2) for each in zip(places, alive, strict=True)]
                pairs = []
                for i, each_before, each_added in zip(group, before, added, strict=True):
                    shift = zeros
                    if has_bias and how.by_column:
                        at = builder.add(first_bias, builder.add(own, I32(_EIGHT * i)))
                        shift = read(bias, at, is_column(i), 2)
                    elif has_bias:
                        shift = of_row
                    of_pair = total[4 * i + 2 * half : 4 * i + 2 * half + 2]
                    pairs.append(finished(of_pair, each_before, shift, each_added))
                if how.dtype == "f32":
                    for pair, at, wanted in zip(pairs, places, alive, strict=True):
                        store_vector(builder, builder.gep(out, [at]), wanted, how.dtype, pair)
                    continue
                words = _exchanged(builder, [narrowed(builder, how.dtype, pair)[0] for pair in pairs], lane)
                column = builder.add(builder.shl(number, I32(3)), I32(_EIGHT * start))
                wanted = builder.and_(is_row, builder.icmp_signed("<", column, columns))
                store_parts(builder, builder.gep(out, [builder.add(at_row, column)]), wanted, words)
            return context.get_dummy_value()

        floats, reals = types.UniTuple(types.float32, 4 * eights), types.UniTuple(types.float32, 2)
        return signature(types.none, floats, pointers, reals, types.int32, two, two, types.int32), codegen

    return store
