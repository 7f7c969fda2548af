"""Vector code of batch normalisation: elements scaled, those of 16 bits widened and narrowed in registers."""

from __future__ import annotations

from functools import cache

from numba import types
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.bn_channel import REAL, Variant
from nbdnn.kernels.cpu.vector import (
    I64,
    by_ends,
    by_vectors,
    convert,
    element,
    load,
    row_types,
    splat,
    store,
    store_past_caches,
)

_CONTRACT = ("contract",)


def _scaled(builder, op: str, x, dy, coefficients):
    """What becomes of vectors of elements, as `bn_channel` says."""
    center, second, scale, offset = coefficients

    def times_plus(a, b, c):
        return builder.fadd(builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)

    if op == "bn_infer_bwd":
        return builder.fmul(dy, scale)
    centered = builder.fsub(x, center)
    if op == "bn_bwd":
        return times_plus(dy, scale, times_plus(centered, second, offset))
    return times_plus(builder.fsub(centered, second) if op == "bn_train" else centered, scale, offset)


@cache
def scale_row(v: Variant, by_column: bool, past_caches: bool = False, lines: int = 1):
    """Intrinsic (to, x, dy, n, center, second, scale, offset, apart): n neighbours scaled, not in place; so many lines
    of them, so many bytes apart, are by the same.

    The four are numbers or, by_column, addresses of as many. past_caches: of what is written, whole vectors, which
    are then aligned, go to memory without being read first.
    """
    read, wide, itemsize, size = row_types(v.dtype, v.compute, v.vl)
    reads_x, reads_dy = v.op != "bn_infer_bwd", not v.is_forward

    def codegen(context, builder, sig, args):
        to, x, dy, n, *coefficients, apart = args

        def step(i, mask):
            def values(start, line):
                slot = element(builder, builder.add(start, builder.mul(apart, I64(line))), i, read, itemsize)
                return convert(builder, load(builder, slot, read, itemsize, mask), v.dtype, v.compute, v.vl)

            def of_channel(given):
                if by_column:
                    return load(builder, element(builder, given, i, wide, size), wide, size, mask)
                return splat(builder, given, wide)

            given = [of_channel(each) for each in coefficients]
            for line in range(lines):
                each_x, each_dy = values(x, line) if reads_x else None, values(dy, line) if reads_dy else None
                found = _scaled(builder, v.op, each_x, each_dy, given)
                result = convert(builder, found, v.compute, v.dtype, v.vl)
                slot = element(builder, builder.add(to, builder.mul(apart, I64(line))), i, read, itemsize)
                if past_caches and mask is None:
                    store_past_caches(builder, result, slot)
                else:
                    store(builder, result, slot, itemsize, mask)

        (by_vectors if past_caches else by_ends)(builder, n, v.vl, step)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, x, dy, n, center, second, scale, offset, apart):
        coefficient = types.int64 if by_column else REAL[v.compute]
        return signature(types.none, *[types.int64] * 4, *[coefficient] * 4, types.int64), codegen

    return run
