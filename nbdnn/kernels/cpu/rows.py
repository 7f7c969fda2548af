"""Rows of elements, moved, converted and spread by whole and masked vectors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.vector import (
    I32,
    I64,
    NUMBA_FLOAT,
    WIDEN,
    by_ends,
    by_vectors,
    convert,
    element,
    every,
    lanes_between,
    load,
    masked,
    pointer,
    prefetch,
    row_types,
    store,
)
from nbdnn.problem import ITEMSIZE


@cache
def zero_fill(dtype: str):
    """Compiled-in function (address, count): that many zeros."""
    elements, zero = pointer(dtype), NUMBA_FLOAT[dtype](0)

    @njit(**DEVICE)
    def fill(address, count):
        for i in range(count):
            elements(address)[i] = zero

    return fill


@cache
def convert_row(source: str, target: str, vl: int):
    """Intrinsic (to, start, n): n elements of `source` dtype at address `start`, converted to `target` dtype at `to`.

    Whole vectors of vl elements, of which the last end with the row, or one masked vector: short rows, which is what
    convolutions have, cost no scalar loop. Rounds to nearest even; NaN stays NaN.
    """
    read, write, read_bytes, write_bytes = row_types(source, target, vl)

    def codegen(context, builder, sig, args):
        to, start, n = args

        def move(i, mask):
            value = load(builder, element(builder, start, i, read, read_bytes), read, read_bytes, mask)
            value = convert(builder, value, source, target, vl)
            store(builder, value, element(builder, to, i, write, write_bytes), write_bytes, mask)

        by_ends(builder, n, vl, move)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, start, n):
        return signature(types.none, types.int64, types.int64, types.int64), codegen

    return run


@cache
def convert_rows(source: str, target: str, vl: int, step: int):
    """Intrinsic (to, to_pitch, start, start_pitch, rows, width, first, end): a block of rows, padded with zeros.

    Row j gets `width` elements at to + j*to_pitch bytes: element q is the one at start + j*start_pitch bytes plus
    q*step elements where first <= q < end, and 0 elsewhere; nothing outside [first, end) is read. step is a power of
    2. Whole vectors lie inside; the others are moved column by column, for masks to be made once a block. The last of a
    row end with it, so that only rows of less than a vector are stored under a mask: that takes ten times as long where
    there is no AVX-512.
    """
    read, write, read_bytes, write_bytes = row_types(source, target, vl)

    def codegen(context, builder, sig, args):
        to, to_pitch, start, start_pitch, rows, width, first, end = args
        zero, lanes = I64(0), I64(vl)

        def move(row, q, load_masks, store_mask):
            from_row = builder.add(start, builder.mul(row, start_pitch))
            parts = []
            for part, mask in enumerate(load_masks):
                at = builder.add(builder.mul(q, I64(step)), I64(part * vl))
                parts.append(load(builder, element(builder, from_row, at, read, read_bytes), read, read_bytes, mask))
            value = convert(builder, every(builder, parts), source, target, vl)
            to_row = builder.add(to, builder.mul(row, to_pitch))
            store(builder, value, element(builder, to_row, q, write, write_bytes), write_bytes, store_mask)

        def column(q, store_mask):
            low = builder.mul(builder.sub(first, q), I64(step))
            high = builder.add(builder.mul(builder.sub(builder.sub(end, q), I64(1)), I64(step)), I64(1))
            load_masks = [lanes_between(builder, vl, part * vl, low, high) for part in range(step)]
            with cgutils.for_range(builder, rows) as loop:
                move(loop.index, q, load_masks, store_mask)

        last = builder.sub(width, lanes)
        with builder.if_else(builder.icmp_signed(">=", last, zero)) as (of_vectors, of_less):
            with of_vectors:
                inside = builder.and_(builder.add(first, I64(vl - 1)), I64(-vl))
                outside = builder.and_(builder.sub(end, I64(int(step > 1))), I64(-vl))
                with (
                    cgutils.for_range(builder, rows) as row,
                    cgutils.for_range_slice(builder, inside, outside, lanes, I64) as (q, _),
                ):
                    move(row.index, q, [None] * step, None)
                with cgutils.for_range_slice(builder, zero, width, lanes, I64) as (q, _):
                    is_inside = builder.icmp_signed(">=", q, inside), builder.icmp_signed("<", q, outside)
                    with builder.if_then(builder.not_(builder.and_(*is_inside))):
                        column(builder.select(builder.icmp_signed("<", q, last), q, last), None)
            with of_less:
                column(zero, lanes_between(builder, vl, 0, None, width))
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, to_pitch, start, start_pitch, rows, width, first, end):
        return signature(types.none, *[types.int64] * 8), codegen

    return run


@cache
def every_step(source: str, target: str, vl: int):
    """Compiled-in function (to, start, start_pitch, step, rows, width, first, end): `convert_rows` of any step.

    The rows lie side by side at `to`.
    """
    data, converted, widen, fill = pointer(source), pointer(target), WIDEN[source], zero_fill(target)
    whole, halves, quarters = (convert_rows(source, target, vl, step) for step in (1, 2, 4))
    write_bytes = ITEMSIZE[target]

    @njit(**DEVICE)
    def move(to, start, start_pitch, step, rows, width, first, end):
        to_pitch = width * write_bytes
        if step == 1:
            whole(to, to_pitch, start, start_pitch, rows, width, first, end)
        elif step == 2:
            halves(to, to_pitch, start, start_pitch, rows, width, first, end)
        elif step == 4:
            quarters(to, to_pitch, start, start_pitch, rows, width, first, end)
        else:
            for j in range(rows):
                line, row = to + j * to_pitch, data(start + j * start_pitch)
                fill(line, first)
                fill(line + end * write_bytes, width - end)
                for q in range(first, end):
                    converted(line)[q] = widen(row[q * step])

    return move


def order(lanes: Iterable[int]) -> ir.Constant:
    """Of lanes, as a shuffle takes it."""
    lanes = list(lanes)
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


@cache
def spread_row(source: str, target: str, vl: int, step: int):
    """Intrinsic (to, start, n): n elements as `convert_row` moves them, `step` elements apart; no other is touched."""
    read, write, read_bytes, write_bytes = row_types(source, target, vl)
    places = [[part * vl + lane for lane in range(vl)] for part in range(step)]

    def codegen(context, builder, sig, args):
        to, start, n = args
        masked_store = masked(builder, write)
        undefined = ir.Constant(write, ir.Undefined)
        wanted = [
            ir.Constant(ir.VectorType(ir.IntType(1), vl), [int(at % step == 0) for at in part]) for part in places
        ]

        def move(i, mask):
            value = load(builder, element(builder, start, i, read, read_bytes), read, read_bytes, mask)
            value = convert(builder, value, source, target, vl)
            base, left = builder.mul(i, I64(step)), builder.mul(builder.sub(n, i), I64(step))
            for part, (lanes, of_step) in enumerate(zip(places, wanted, strict=True)):
                spread = builder.shuffle_vector(value, undefined, order(at // step for at in lanes))
                inside = of_step
                if mask is not None:
                    inside = builder.and_(of_step, lanes_between(builder, vl, part * vl, None, left))
                slot = element(builder, to, builder.add(base, I64(part * vl)), write, write_bytes)
                masked_store(spread, slot, write_bytes, inside)

        by_vectors(builder, n, vl, move)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, start, n):
        return signature(types.none, *[types.int64] * 3), codegen

    return run


@njit(**DEVICE)
def ask_for(start, size_bytes):
    """Ask for the cache lines of so many bytes."""
    for offset in range(0, size_bytes, 64):
        prefetch(start + offset)
