"""Rows taken apart into `step` phases and put together again, for the taps of windows that lie `step` apart.

    phase[f][j] = row[j*step + f]           neighbours in a phase are the same tap of neighbouring windows

With loads and stores of vectors that a mask may cut short.
"""

from __future__ import annotations

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
    WIDEN,
    by_ends,
    by_vectors,
    constant,
    convert,
    element,
    lanes_between,
    load,
    pointer,
    row_types,
    store,
    store_past_caches,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE


def joined_vectors(builder, is_max: bool, found, value):
    """Their sum; or the larger ones, NaN where one of them is."""
    if not is_max:
        return builder.fadd(found, value)
    bits = ir.VectorType(I64 if value.type.element == ir.DoubleType() else I32, value.type.count)
    larger = builder.select(builder.fcmp_ordered(">", value, found), value, found)
    is_nan = builder.fcmp_unordered("uno", value, found)
    return builder.bitcast(builder.select(is_nan, constant(bits, -1), builder.bitcast(larger, bits)), value.type)


def _store_kept(builder, value, slot, size_bytes: int, mask) -> None:
    """Lanes that are off keep what they had: a store under a mask takes 20 cycles with AVX2, and what it wrote is not
    forwarded to a load. For memory that nobody else writes."""
    if mask is not None:
        value = builder.select(mask, value, builder.load(slot, align=size_bytes))
    builder.store(value, slot, align=size_bytes)


@cache
def kept_row(source: str, compute: str, vl: int):
    """Intrinsic (to, start, n): n elements of `source` dtype to a line of the compute type; what lies behind is read
    and written again."""
    read, write, read_bytes, write_bytes = row_types(source, compute, vl)

    def codegen(context, builder, sig, args):
        to, start, n = args

        def step(i, mask):
            value = load(builder, element(builder, start, i, read, read_bytes), read, read_bytes, mask)
            value = convert(builder, value, source, compute, vl)
            _store_kept(builder, value, element(builder, to, i, write, write_bytes), write_bytes, mask)

        by_vectors(builder, n, vl, step)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, start, n):
        return signature(types.none, *[types.int64] * 3), codegen

    return run


@cache
def given_row(compute: str, target: str, vl: int, past_caches: bool):
    """Intrinsic (to, start, n): n elements of a line of the compute type in `target` dtype, not in place; past the
    caches by whole vectors, which are then aligned and all there are."""
    read, write, read_bytes, write_bytes = row_types(compute, target, vl)

    def codegen(context, builder, sig, args):
        to, start, n = args

        def step(i, mask):
            value = load(builder, element(builder, start, i, read, read_bytes), read, read_bytes, mask)
            value, slot = convert(builder, value, compute, target, vl), element(builder, to, i, write, write_bytes)
            if past_caches:
                store_past_caches(builder, value, slot)
            else:
                store(builder, value, slot, write_bytes, mask)

        (by_vectors if past_caches else by_ends)(builder, n, vl, step)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, start, n):
        return signature(types.none, *[types.int64] * 3), codegen

    return run


@cache
def interleave_row(compute: str, target: str, vl: int, past_caches: bool):
    """Intrinsic (to, a, b, n): n elements of `target` dtype, by turns of the lines a and b of the compute type.

    Whole vectors are read of both: what was stored just before is not forwarded to a masked load. Past the caches as
    `given_row`.
    """
    read, write, read_bytes, write_bytes = row_types(compute, target, vl)
    orders = ([lane // 2 + lane % 2 * vl + half for lane in range(vl)] for half in (0, vl // 2))
    halves = [ir.Constant(ir.VectorType(I32, vl), order) for order in orders]

    def codegen(context, builder, sig, args):
        to, *lines, n = args

        def part(i, half, vectors, mask):
            there = builder.add(i, I64(half * vl))
            value = convert(builder, builder.shuffle_vector(*vectors, halves[half]), compute, target, vl)
            slot = element(builder, to, there, write, write_bytes)
            if past_caches:
                store_past_caches(builder, value, slot)
            else:
                store(builder, value, slot, write_bytes, mask)

        def read_at(i):
            at = builder.ashr(i, I64(1))
            return [builder.load(element(builder, line, at, read, read_bytes), align=read_bytes) for line in lines]

        whole = builder.and_(n, I64(-2 * vl))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(2 * vl), I64) as (i, _):
            vectors = read_at(i)
            part(i, 0, vectors, None)
            part(i, 1, vectors, None)
        left = builder.sub(n, whole)
        with builder.if_then(builder.icmp_signed(">", left, I64(0))):
            vectors = read_at(whole)
            with builder.if_else(builder.icmp_signed(">=", left, I64(vl))) as (full, short):
                with full:
                    part(whole, 0, vectors, None)
                with short:
                    part(whole, 0, vectors, lanes_between(builder, vl, 0, None, left))
            with builder.if_then(builder.icmp_signed(">", left, I64(vl))):
                part(whole, 1, vectors, lanes_between(builder, vl, 0, None, builder.sub(left, I64(vl))))
        return context.get_dummy_value()

    @intrinsic
    def interleave(typingctx, to, a, b, n):
        return signature(types.none, *[types.int64] * 4), codegen

    return interleave


@cache
def deinterleave_row(source: str, compute: str, vl: int):
    """Intrinsic (a, b, start, n): n elements of `source` dtype, by turns to the lines a and b of the compute type, of
    which what lies behind is read and written again."""
    read, write, read_bytes, write_bytes = row_types(source, compute, vl)
    parities = [ir.Constant(ir.VectorType(I32, vl), list(range(parity, 2 * vl, 2))) for parity in (0, 1)]

    def codegen(context, builder, sig, args):
        *lines, start, n = args

        def step(i, mask):
            parts = []
            for half in (0, 1):
                at = builder.add(i, I64(half * vl))
                inside = None if mask is None else lanes_between(builder, vl, 0, None, builder.sub(n, at))
                part = load(builder, element(builder, start, at, read, read_bytes), read, read_bytes, inside)
                parts.append(convert(builder, part, source, compute, vl))
            left, at = builder.sub(n, i), builder.ashr(i, I64(1))
            for parity, (line, order) in enumerate(zip(lines, parities, strict=True)):
                there = builder.ashr(builder.add(left, I64(1 - parity)), I64(1))
                inside = None if mask is None else lanes_between(builder, vl, 0, None, there)
                value = builder.shuffle_vector(*parts, order)
                _store_kept(builder, value, element(builder, line, at, write, write_bytes), write_bytes, inside)

        by_vectors(builder, n, 2 * vl, step)
        return context.get_dummy_value()

    @intrinsic
    def deinterleave(typingctx, a, b, start, n):
        return signature(types.none, *[types.int64] * 4), codegen

    return deinterleave


@cache
def phases_of_row(dtype: str, vl: int):
    """Compiled-in function (phases, start, pitch, step, first, n): a row of x to its phases, of whose elements, in
    turn, it begins at number `first`."""
    compute = DEFAULT_COMPUTE[dtype]
    data, wide, widen, real_bytes = pointer(dtype), pointer(compute), WIDEN[dtype], ITEMSIZE[compute]
    deinterleave, widen_row = deinterleave_row(dtype, compute, vl), kept_row(dtype, compute, vl)

    @njit(**DEVICE)
    def take_apart(phases, start, pitch, step, first, n):
        if step == 1:
            widen_row(phases + first * real_bytes, start, n)
        elif step == 2:
            a = phases + first % 2 * pitch + first // 2 * real_bytes
            b = phases + (first + 1) % 2 * pitch + (first + 1) // 2 * real_bytes
            deinterleave(a, b, start, n)
        else:
            for i in range(n):
                wide(phases + (first + i) % step * pitch)[(first + i) // step] = widen(data(start)[i])

    return take_apart


@cache
def row_of_phases(dtype: str, vl: int, past_caches: bool):
    """Compiled-in function (to, phases, pitch, step, first, n, line): a row of dx of its phases, which begin at number
    `first` of their elements taken in turn. Past the caches where vectors of a row are whole and aligned."""
    compute = DEFAULT_COMPUTE[dtype]
    wide, real_bytes, itemsize = pointer(compute), ITEMSIZE[compute], ITEMSIZE[dtype]
    (give, stream), (interleave, stream_both) = (
        [make(compute, dtype, vl, past) for past in (False, past_caches)] for make in (given_row, interleave_row)
    )

    @njit(**DEVICE)
    def put_together(to, phases, pitch, step, first, n, line):
        streams = past_caches and (to | n * itemsize) % (vl * itemsize) == 0
        if step == 1:
            if streams:
                stream(to, phases + first * real_bytes, n)
            else:
                give(to, phases + first * real_bytes, n)
        elif step == 2:
            a = phases + first % 2 * pitch + first // 2 * real_bytes
            b = phases + (first + 1) % 2 * pitch + (first + 1) // 2 * real_bytes
            if streams:
                stream_both(to, a, b, n)
            else:
                interleave(to, a, b, n)
        else:
            for i in range(n):
                wide(line)[i] = wide(phases + (first + i) % step * pitch)[(first + i) // step]
            give(to, line, n)

    return put_together
