"""Vector code of batch normalisation: neighbours summed and scaled, 16-bit ones widened and narrowed in registers."""

from __future__ import annotations

from functools import cache, reduce

from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.bn_channel import Variant
from nbdnn.kernels.cpu.vector import (
    I64,
    NUMBA_FLOAT,
    by_ends,
    by_vectors,
    constant,
    convert,
    element,
    halved,
    load,
    row_types,
    splat,
    store,
    store_past_caches,
)

_CONTRACT = ("contract",)
_SUMS = 4  # of each kind, side by side: an addition takes as many cycles, of which two begin in each


def _times_plus(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)


def _values(builder, v: Variant, start, i, mask):
    """A vector of neighbours, in the compute type."""
    read, _, itemsize, _ = row_types(v.dtype, v.compute, v.vl)
    slot = element(builder, start, i, read, itemsize)
    return convert(builder, load(builder, slot, read, itemsize, mask), v.dtype, v.compute, v.vl)


@cache
def sum_row(v: Variant):
    """Intrinsic (x, dy, n, center) -> (a, b): the sums of n neighbours, of d and d * d forward, where d is x - center,
    of dy and dy * d for gradients."""
    wide = row_types(v.dtype, v.compute, v.vl)[1]

    def codegen(context, builder, sig, args):
        x, dy, n, center = args
        center = splat(builder, center, wide)
        sums = [[cgutils.alloca_once_value(builder, constant(wide, 0.0)) for _ in range(2)] for _ in range(_SUMS)]

        def step(i, mask, number: int = 0):
            d = builder.fsub(_values(builder, v, x, i, mask), center)
            if mask is not None:
                d = builder.select(mask, d, constant(wide, 0.0))
            first = d if v.is_forward else _values(builder, v, dy, i, mask)
            a, b = sums[number]
            builder.store(builder.fadd(builder.load(a), first), a)
            builder.store(_times_plus(builder, first, d, builder.load(b)), b)

        block = I64(_SUMS * v.vl)
        blocks = builder.sub(n, builder.srem(n, block))
        with cgutils.for_range_slice(builder, I64(0), blocks, block, I64) as (i, _):
            for number in range(_SUMS):
                step(builder.add(i, I64(number * v.vl)), None, number)
        by_vectors(builder, builder.sub(n, blocks), v.vl, lambda i, mask: step(builder.add(blocks, i), mask))
        every = [reduce(builder.fadd, [builder.load(pair[kind]) for pair in sums]) for kind in range(2)]
        found = halved(builder, every, v.vl, lambda *halves: [builder.fadd(a, b) for a, b in zip(*halves, strict=True)])
        return context.make_tuple(builder, sig.return_type, found)

    @intrinsic
    def run(typingctx, x, dy, n, center):
        real = NUMBA_FLOAT[v.compute]
        return signature(types.UniTuple(real, 2), *[types.int64] * 3, real), codegen

    return run


@cache
def add_lines(v: Variant, lines: int, row_bytes: int):
    """Intrinsic (sums, x, dy, apart, n): n columns of so many lines, `apart` bytes apart, each added to its sums.

    sums: a row of what is subtracted from x, one of the sums of d, or of dy, and one of d * d, or dy * d, each of
    row_bytes, which are whole vectors.
    """
    _, wide, _, size = row_types(v.dtype, v.compute, v.vl)

    def codegen(context, builder, sig, args):
        sums, x, dy, apart, n = args

        def values(start, line, i, mask):
            return _values(builder, v, builder.add(start, builder.mul(apart, I64(line))), i, mask)

        def joined(parts):
            """Neighbours first."""
            while len(parts) > 1:
                parts = [builder.fadd(*parts[k : k + 2], flags=_CONTRACT) for k in range(0, len(parts), 2)]
            return parts[0]

        def step(i, mask):
            slots = [element(builder, builder.add(sums, I64(row * row_bytes)), i, wide, size) for row in range(3)]
            pivot, *before = (builder.load(slot, align=size) for slot in slots)
            firsts, products = [], []
            for line in range(lines):
                d = builder.fsub(values(x, line, i, mask), pivot)
                if mask is not None:
                    d = builder.select(mask, d, constant(wide, 0.0))
                firsts.append(d if v.is_forward else values(dy, line, i, mask))
                products.append(builder.fmul(firsts[-1], d, flags=_CONTRACT))
            for slot, was, more in zip(slots[1:], before, (firsts, products), strict=True):
                builder.store(builder.fadd(was, joined(more), flags=_CONTRACT), slot, align=size)

        by_vectors(builder, n, v.vl, step)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, sums, x, dy, apart, n):
        return signature(types.none, *[types.int64] * 5), codegen

    return run


def _scaled(builder, op: str, x, dy, coefficients):
    """What becomes of vectors of elements, as `bn_finish` says."""
    center, second, scale, offset = coefficients

    if op == "bn_infer_bwd":
        return builder.fmul(dy, scale)
    centered = builder.fsub(x, center)
    if op == "bn_bwd":
        return _times_plus(builder, dy, scale, _times_plus(builder, centered, second, offset))
    return _times_plus(builder, builder.fsub(centered, second) if op == "bn_train" else centered, scale, offset)


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
                return _values(builder, v, builder.add(start, builder.mul(apart, I64(line))), i, mask)

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
        coefficient = types.int64 if by_column else NUMBA_FLOAT[v.compute]
        return signature(types.none, *[types.int64] * 4, *[coefficient] * 4, types.int64), codegen

    return run
