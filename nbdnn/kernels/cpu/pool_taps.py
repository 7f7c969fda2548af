"""Vector code for the gradient of a maximum, an axis at a time: which tap it is, and what each element gets of dy.

The first maximum of a window, row by row, lies in the first line whose own maximum is the window's, where it is that
line's first: so it is searched along lines, then across them. Whatever windows chose a line, it lies at the same place
of it, so that their gradients are added up before they go there:

    found[i] = max over r of x[i*u + r], tap[i] = the first such r, or of NaNs the last; the next axis searches `found`
    given[i*u + r] += dy[i] where tap[i] is r, on the axes in turn, the last one first

Taps are numbers as wide as the elements, so that a comparison of taps selects elements.
"""

from __future__ import annotations

from collections.abc import Callable
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
    by_vectors,
    convert,
    element,
    load,
    row_types,
    splat,
    store,
    store_past_caches,
    vector_at,
)

# Vectors that do not wait for each other, where taps are many: the gradient of 9x9 maxima took 1.4 times as long.
_VECTORS = 4
AHEAD_BYTES = 4096  # so far behind what is read or written the next lines are asked for


def _numbers(compute: str, vl: int) -> ir.VectorType:
    """Of taps: as wide as the elements, so that a comparison of these selects those."""
    return ir.VectorType(I64 if compute == "f64" else I32, vl)


def _every(builder, numbers, value):
    """A vector of one number."""
    return splat(builder, value if numbers.element == I64 else builder.trunc(value, numbers.element), numbers)


def _repeat(builder, known: int, begin, end, body: Callable) -> None:
    """body(i) for i from begin to end; one after the other without a loop where it is known that there are so many."""
    if known:
        for i in range(known):
            body(builder.add(begin, I64(i)))
        return
    with cgutils.for_range_slice(builder, begin, end, I64(1), I64) as (i, _):
        body(i)


def _by_strips(builder, n, vl: int, vectors: int, step: Callable) -> None:
    """step(i, mask, vectors) for n elements: so many vectors at a time, then one."""
    strip, whole = vectors * vl, I64(0)
    if vectors > 1:
        whole = builder.mul(builder.sdiv(n, I64(strip)), I64(strip))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(strip), I64) as (i, _):
            step(i, None, vectors)
    by_vectors(builder, builder.sub(n, whole), vl, lambda i, mask: step(builder.add(whole, i), mask, 1))


def _beats(builder, value, best):
    return builder.or_(builder.fcmp_ordered(">", value, best), builder.fcmp_unordered("uno", value, value))


@cache
def find_taps(source: str, compute: str, vl: int, known: int = 0):
    """Intrinsic (found, taps, n, start, offsets, begin, end): maxima of n windows of one axis, and their first taps.

    Element i of tap r, begin <= r < end, lies at start + offsets[r] bytes + i elements of `source` dtype. known: end -
    begin where the kernel is for that many only.
    """
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)
    numbers = _numbers(compute, vl)

    def codegen(context, builder, sig, args):
        found, taps, n, start, offsets, begin, end = args

        def step(i, mask, vectors):
            at = builder.add(start, builder.mul(i, I64(read_bytes)))

            def values_of(r):
                begins = builder.add(at, builder.load(element(builder, offsets, r, I64, 8)))
                slots = [
                    vector_at(builder, builder.add(begins, I64(k * vl * read_bytes)), read) for k in range(vectors)
                ]
                values = [load(builder, slot, read, read_bytes, mask) for slot in slots]
                return [convert(builder, value, source, compute, vl) for value in values]

            first = _every(builder, numbers, begin)
            best = [cgutils.alloca_once_value(builder, value) for value in values_of(begin)]
            chosen = [cgutils.alloca_once_value(builder, first) for _ in best]

            def look(r):
                number = _every(builder, numbers, r)
                for value, most, tap in zip(values_of(r), best, chosen, strict=True):
                    better = _beats(builder, value, builder.load(most))
                    builder.store(builder.select(better, value, builder.load(most)), most)
                    builder.store(builder.select(better, number, builder.load(tap)), tap)

            _repeat(builder, max(known - 1, 0), builder.add(begin, I64(1)), end, look)
            for k, (most, tap) in enumerate(zip(best, chosen, strict=True)):
                place = builder.add(i, I64(k * vl))
                value, number = builder.load(most), builder.bitcast(builder.load(tap), wide)
                store(builder, value, element(builder, found, place, wide, wide_bytes), wide_bytes, mask)
                store(builder, number, element(builder, taps, place, wide, wide_bytes), wide_bytes, mask)

        _by_strips(builder, n, vl, 1 if known else _VECTORS, step)
        return context.get_dummy_value()

    @intrinsic
    def find(typingctx, found, taps, n, start, offsets, begin, end):
        return signature(types.none, *[types.int64] * 7), codegen

    return find


@cache
def gather_shares(source: str, compute: str, target: str, vl: int, known: int = 0, past_caches: bool = False):
    """Intrinsic (to, n, taps, taps_apart, shares, shares_apart, first, count, step): what n elements get of dy.

    Window k of `count` has its taps at taps + k*taps_apart bytes and its dy, of `source` dtype, at shares +
    k*shares_apart; an element gets it where the tap is first + k*step. known: count where the kernel is for that many
    only. Past the caches whole vectors are written, which are then aligned.
    """
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)
    _, write, _, write_bytes = row_types(compute, target, vl)
    numbers = _numbers(compute, vl)

    def codegen(context, builder, sig, args):
        to, n, taps, taps_apart, shares, shares_apart, first, count, tap_step = args

        def step(i, mask, vectors):
            zero = ir.Constant(wide, None)
            places = [builder.add(i, I64(v * vl)) for v in range(vectors)]
            totals = [cgutils.alloca_once_value(builder, zero) for _ in places]
            for total in totals:
                builder.store(zero, total)

            def take(k):
                taps_of = builder.add(taps, builder.mul(k, taps_apart))
                shares_of = builder.add(shares, builder.mul(k, shares_apart))
                wanted = _every(builder, numbers, builder.add(first, builder.mul(k, tap_step)))
                for place, total in zip(places, totals, strict=True):
                    tap = load(builder, element(builder, taps_of, place, wide, wide_bytes), wide, wide_bytes, mask)
                    share = load(builder, element(builder, shares_of, place, read, read_bytes), read, read_bytes, mask)
                    hit = builder.icmp_signed("==", builder.bitcast(tap, numbers), wanted)
                    given = builder.select(hit, convert(builder, share, source, compute, vl), zero)
                    builder.store(builder.fadd(builder.load(total), given), total)

            _repeat(builder, known, I64(0), count, take)
            for place, total in zip(places, totals, strict=True):
                result = convert(builder, builder.load(total), compute, target, vl)
                slot = element(builder, to, place, write, write_bytes)
                if past_caches and mask is None:
                    store_past_caches(builder, result, slot)
                else:
                    store(builder, result, slot, write_bytes, mask)

        _by_strips(builder, n, vl, 1 if known else _VECTORS, step)
        return context.get_dummy_value()

    @intrinsic
    def gather(typingctx, to, n, taps, taps_apart, shares, shares_apart, first, count, step):
        return signature(types.none, *[types.int64] * 9), codegen

    return gather


@cache
def find_few(source: str, compute: str, vl: int):
    """Compiled-in function: `find_taps`, for few taps without a loop over them."""
    every, two, three = (find_taps(source, compute, vl, known) for known in (0, 2, 3))

    @njit(**DEVICE)
    def find(found, taps, n, start, offsets, begin, end):
        if end - begin == 2:
            two(found, taps, n, start, offsets, begin, end)
        elif end - begin == 3:
            three(found, taps, n, start, offsets, begin, end)
        else:
            every(found, taps, n, start, offsets, begin, end)

    return find


@cache
def gather_few(source: str, compute: str, target: str, vl: int, past_caches: bool = False):
    """Compiled-in function: `gather_shares`, for few windows without a loop over them."""
    every, one, two, three = (gather_shares(source, compute, target, vl, known, past_caches) for known in range(4))

    @njit(**DEVICE)
    def gather(to, n, taps, taps_apart, shares, shares_apart, first, count, step):
        if count == 1:
            one(to, n, taps, taps_apart, shares, shares_apart, first, count, step)
        elif count == 2:
            two(to, n, taps, taps_apart, shares, shares_apart, first, count, step)
        elif count == 3:
            three(to, n, taps, taps_apart, shares, shares_apart, first, count, step)
        else:
            every(to, n, taps, taps_apart, shares, shares_apart, first, count, step)

    return gather


@njit(**DEVICE)
def reached(first, last, step, pad, taps, extent):
    """Positions on an axis of the image, [low, end), that the windows [first, last) reach."""
    return max(0, first * step - pad), min(extent, (last - 1) * step - pad + taps)


@njit(**DEVICE)
def covering(low, end, step, pad, taps, windows):
    """Windows on an axis, [first, last), that cover one of the positions [low, end)."""
    return max(0, (low + pad - taps) // step + 1), min(windows, (end - 1 + pad) // step + 1)
