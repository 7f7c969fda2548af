"""Which tap of a window is the maximum of a channel, and what of dy each element gets: pixels of neighbouring channels.

    chosen[p] = the first r at which x[p*u + r - pad] = y[p]; where y[p] is NaN the last r at which x is; else NONE
    dx[i] = sum of dy[p] over the windows p that cover i and whose chosen[p] is i + pad - p*u

As `pool_lines.py`, of which a vector is so many windows; here it is so many channels of one window, or of one pixel of
dx. The last vector of a pixel ends with it, so that none is masked. What is chosen lies as y does, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.pool_lines import NONE, counted, moved, switched
from nbdnn.kernels.cpu.vector import (
    I8,
    I32,
    I64,
    constant,
    convert,
    element,
    row_types,
    splat,
    store,
    store_past_caches,
    vector_at,
)
from nbdnn.problem import DEFAULT_COMPUTE


def _by_vectors(builder, channels, vl: int, body: Callable) -> None:
    """body(i) for every vl channels, of which there are as many at least; the last end with them."""
    last = builder.sub(channels, I64(vl))
    with cgutils.for_range_slice(builder, I64(0), channels, I64(vl), I64) as (i, _):
        body(builder.select(builder.icmp_signed("<", i, last), i, last))


@cache
def find_pixels(dtype: str, vl: int, known: Sequence[tuple[int, int, int]]):
    """Intrinsic (how, count, channels, x, x_apart, y, chosen, planes, lines, taps, plane_bytes, line_bytes, number,
    plane_taps, line_taps): what `count` windows side by side have chosen.

    x: the first of the first window's taps that are inside of the image, `planes` x `lines` x `taps` of them; number:
    which tap it is, and plane_taps and line_taps more a plane and a line. how: 0, or 1 + the place of these three in
    `known`, of whose lines and taps a window has no more.
    """
    compute = DEFAULT_COMPUTE[dtype]
    read, _, itemsize, _ = row_types(dtype, compute, vl)
    numbers, bits = ir.VectorType(I32, vl), ir.IntType(vl)

    def codegen(context, builder, sig, args):
        how, *args = args
        switched(builder, how, [lambda some=some: find(builder, some, *args) for some in (None, *known)])
        return context.get_dummy_value()

    def find(builder, some, count, channels, x, x_apart, y, chosen, planes, lines, taps, plane_bytes, line_bytes,
             number, plane_taps, line_taps):  # fmt: skip
        pixel_bytes, first_number = builder.mul(channels, I64(itemsize)), builder.trunc(number, I32)
        # Taps are counted from the first one that is inside, so that their numbers are known.
        nowhere = splat(builder, builder.sub(I32(NONE), first_number), numbers)
        before = splat(builder, first_number, numbers)

        def value_at(start, i):
            value = builder.load(element(builder, start, i, read, itemsize), align=itemsize)
            return convert(builder, value, dtype, compute, vl)

        def vector(q, i) -> None:
            first = moved(builder, x, (q, x_apart))
            wanted = value_at(moved(builder, y, (q, pixel_bytes)), i)
            found = cgutils.alloca_once(builder, numbers)
            builder.store(nowhere, found)

            def walk(forward: bool, counts: tuple, hits: Callable) -> None:
                def tap_at(d, h, r):
                    value = value_at(moved(builder, first, (d, plane_bytes), (h, line_bytes), (r, pixel_bytes)), i)
                    tap = tap_number(d, h, r, counts is some)
                    builder.store(builder.select(hits(value), tap, builder.load(found)), found)

                counted(builder, counts, forward, tap_at)

            walk(False, some or (planes, lines, taps), lambda value: builder.fcmp_ordered("==", value, wanted))
            are_nan = builder.fcmp_unordered("uno", wanted, wanted)
            with builder.if_then(builder.icmp_signed("!=", builder.bitcast(are_nan, bits), bits(0)), likely=False):
                is_nan = lambda value: builder.and_(builder.fcmp_unordered("uno", value, value), are_nan)  # noqa: E731
                walk(True, (planes, lines, taps), is_nan)
            narrow = builder.trunc(builder.add(builder.load(found), before), ir.VectorType(I8, vl))
            at = builder.add(moved(builder, chosen, (q, channels)), i)
            builder.store(narrow, vector_at(builder, at, narrow.type), align=1)

        def tap_number(d, h, r, are_known: bool):
            if are_known:
                return constant(numbers, (d.constant * some[1] + h.constant) * some[2] + r.constant)
            tap = builder.add(moved(builder, I64(0), (d, plane_taps), (h, line_taps)), r)
            return splat(builder, builder.trunc(tap, I32), numbers)

        with cgutils.for_range(builder, count) as loop:
            _by_vectors(builder, channels, vl, lambda i: vector(loop.index, i))

    @intrinsic
    def run(typingctx, how, count, channels, x, x_apart, y, chosen, planes, lines, taps, plane_bytes, line_bytes,
            number, plane_taps, line_taps):  # fmt: skip
        return signature(types.none, *[types.int64] * 15), codegen

    return run


@cache
def give_pixels(dtype: str, vl: int, known: Sequence[tuple[int, int, int]], by_pixel: bool, past_caches: bool):
    """Intrinsic (how, count, channels, dx, dx_apart, dy, chosen, out_line, out_plane, planes, lines, windows, number,
    plane_taps, line_taps, step): `count` pixels of dx, each of them covered by `planes` x `lines` x `windows` windows.

    dy, chosen: of the first window that covers the first pixel; the next pixel's is the next one. out_line, out_plane:
    pixels from a line of windows to the next, and from a plane. number: of the pixel in the first window; plane_taps,
    line_taps and step less a plane, a line and a window. how: 0, or 1 + the place of these three in `known`. by_pixel:
    a vector of all pixels after the other, and not all of a pixel, which is faster where these are few.
    """
    compute = DEFAULT_COMPUTE[dtype]
    read, wide, itemsize, _ = row_types(dtype, compute, vl)
    numbers = ir.VectorType(I8, vl)

    def codegen(context, builder, sig, args):
        how, *args = args
        switched(builder, how, [lambda some=some: give(builder, some, *args) for some in (None, *known)])
        return context.get_dummy_value()

    def give(builder, some, count, channels, dx, dx_apart, dy, chosen, out_line, out_plane, planes, lines, windows,
             number, plane_taps, line_taps, step):  # fmt: skip
        def window_at(d, p, q):
            """How far away it is in dy, and which of its taps the pixel is."""
            away = builder.mul(moved(builder, q, (d, out_plane), (p, out_line)), channels)
            tap = builder.sub(number, moved(builder, I64(0), (d, plane_taps), (p, line_taps), (q, step)))
            return away, splat(builder, builder.trunc(tap, I8), numbers)

        # The same for all pixels: computed once where it is known how many there are.
        found = {place: window_at(*map(I64, place)) for place in product(*map(range, some))} if some else {}

        def vector(pixel, i) -> None:
            total = cgutils.alloca_once(builder, wide)
            builder.store(constant(wide, 0.0), total)
            first = moved(builder, i, (pixel, channels))

            def take(d, p, q):
                away, tap = found[d.constant, p.constant, q.constant] if some else window_at(d, p, q)
                at = builder.add(first, away)
                chosen_there = builder.load(vector_at(builder, builder.add(chosen, at), numbers), align=1)
                hit = builder.icmp_signed("==", chosen_there, tap)
                share = builder.load(element(builder, dy, at, read, itemsize), align=itemsize)
                before = builder.load(total)
                more = builder.fadd(before, convert(builder, share, dtype, compute, vl))
                builder.store(builder.select(hit, more, before), total)

            counted(builder, some or (planes, lines, windows), True, take)
            result = convert(builder, builder.load(total), compute, dtype, vl)
            slot = element(builder, moved(builder, dx, (pixel, dx_apart)), i, read, itemsize)
            if past_caches:
                store_past_caches(builder, result, slot)
            else:
                store(builder, result, slot, itemsize, None)

        def pixels(i) -> None:
            with cgutils.for_range(builder, count) as loop:
                vector(loop.index, i)

        if by_pixel:
            _by_vectors(builder, channels, vl, pixels)
        else:
            with cgutils.for_range(builder, count) as loop:
                _by_vectors(builder, channels, vl, lambda i: vector(loop.index, i))

    @intrinsic
    def run(typingctx, how, count, channels, dx, dx_apart, dy, chosen, out_line, out_plane, planes, lines, windows,
            number, plane_taps, line_taps, step):  # fmt: skip
        return signature(types.none, *[types.int64] * 16), codegen

    return run
