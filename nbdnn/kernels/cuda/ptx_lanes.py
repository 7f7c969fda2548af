"""Products of a lane with a channel of its own: pixels and taps in shared memory, 32 channels next to each other.

Every place is known when a kernel is compiled, so that a load is one instruction and a product another one.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import F32, I32, packed, unpacked

_BYTE = ir.IntType(8)


class Steps(NamedTuple):
    """Bytes from a row of the image to the next, from a pixel and from a tap to the next."""

    row: int
    pixel: int
    tap: int


def _load(builder, base, add: int):
    """The float32 so many bytes from a pointer to bytes: a part of the instruction, as a sum of integers is not."""
    return builder.load(builder.bitcast(builder.gep(base, [I32(add)]), F32.as_pointer(3)), align=4)


def _held(builder, values):
    """The values in places that branches may change; LLVM makes registers of them."""
    places = [cgutils.alloca_once(builder, F32) for _ in values]
    for place, value in zip(places, values, strict=True):
        builder.store(value, place)
    return places


@cache
def correlate(rows: int, columns: int, taps_h: int, taps_w: int, reversed_: bool, steps: Steps):
    """Intrinsic (sums, image, filter, low, high) -> sums of rows x columns outputs, of rows `low` to `high` alone.

    image, filter: a lane's addresses of the first pixel and of the first tap. reversed_: the last tap comes first.
    """
    sums, last = types.UniTuple(types.float32, rows * columns), taps_h * taps_w - 1

    @intrinsic
    def add(typingctx, acc, image, taps, low, high):
        def codegen(context, builder, sig, args):
            places = _held(builder, unpacked(builder, args[0], rows * columns))

            pixels_at, taps_at = (builder.inttoptr(where, _BYTE.as_pointer(3)) for where in args[1:3])
            factors, size = [], builder.sub(args[4], args[3])
            for row in range(rows + taps_h - 1):
                # A row of taps is loaded where it is first wanted, for the few rows of the image that it meets.
                new = range(row * taps_w, min(row + 1, taps_h) * taps_w)
                factors += [_load(builder, taps_at, steps.tap * (last - i if reversed_ else i)) for i in new]
                with builder.if_then(builder.icmp_unsigned("<", builder.sub(I32(row), args[3]), size)):
                    at = steps.row * row
                    pixels = [_load(builder, pixels_at, at + steps.pixel * i) for i in range(columns + taps_w - 1)]
                    for p in range(max(0, row - taps_h + 1), min(rows, row + 1)):
                        of_row = places[p * columns : (p + 1) * columns]
                        totals = [builder.load(place) for place in of_row]
                        for s, factor in enumerate(factors[(row - p) * taps_w :][:taps_w]):
                            totals = [builder.fma(pixels[q + s], factor, total) for q, total in enumerate(totals)]
                        for place, total in zip(of_row, totals, strict=True):
                            builder.store(total, place)
            return packed(builder, [builder.load(place) for place in places])

        return signature(sums, sums, types.uint32, types.uint32, types.int32, types.int32), codegen

    return add


@cache
def gradients(rows: int, columns: int, taps_h: int, taps_w: int, x_steps: Steps, dy_steps: Steps):
    """Intrinsic (sums, x, dy, count, low, high) -> sums of x times dy by tap over rows x columns pixels of dy.

    x, dy: a lane's addresses of the first pixels. count: of the rows of dy; of x rows `low` to `high` are taken.
    """
    sums = types.UniTuple(types.float32, taps_h * taps_w)

    @intrinsic
    def add(typingctx, acc, x, dy, count, low, high):
        def codegen(context, builder, sig, args):
            places = _held(builder, unpacked(builder, args[0], taps_h * taps_w))
            x_at, dy_at = (builder.inttoptr(where, _BYTE.as_pointer(3)) for where in args[1:3])
            size, factors = builder.sub(args[5], args[4]), []
            for p in range(rows):
                inside = builder.icmp_signed("<", I32(p), args[3])
                loaded = [_load(builder, dy_at, dy_steps.row * p + dy_steps.pixel * q) for q in range(columns)]
                factors.append([builder.select(inside, value, F32(0.0)) for value in loaded])
            for row in range(rows + taps_h - 1):
                with builder.if_then(builder.icmp_unsigned("<", builder.sub(I32(row), args[4]), size)):
                    at = x_steps.row * row
                    pixels = [_load(builder, x_at, at + x_steps.pixel * i) for i in range(columns + taps_w - 1)]
                    for p in range(max(0, row - taps_h + 1), min(rows, row + 1)):
                        of_row = places[(row - p) * taps_w :][:taps_w]
                        totals = [builder.load(place) for place in of_row]
                        for q, factor in enumerate(factors[p]):
                            totals = [builder.fma(pixels[q + s], factor, total) for s, total in enumerate(totals)]
                        for place, total in zip(of_row, totals, strict=True):
                            builder.store(total, place)
            return packed(builder, [builder.load(place) for place in places])

        return signature(sums, sums, types.uint32, types.uint32, *[types.int32] * 3), codegen

    return add
