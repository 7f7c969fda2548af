"""Maxima of windows and what they give back, of planes in shared memory: straight code for one window, or one cell.

A cell is the step x step elements between the beginnings of neighbouring windows; a few windows cover it. Addresses are
shared ones. What lies outside of a plane is loaded all the same, and not used: a plane has room before and behind it.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import ceil

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_axes import LOWEST, Axis
from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, asm
from nbdnn.kernels.cuda.ptx_pool import Maximum, both, larger
from nbdnn.kernels.cuda.ptx_tile import shared_at
from nbdnn.kernels.cuda.ptx_vector import moved, narrowed, parts_of, stepped, widened
from nbdnn.problem import ITEMSIZE

_I8 = ir.IntType(8)
NONE = 255  # of the taps: nothing in the cell


def _loaded(builder, address, offset: int, dtype: str):
    """The element there, as a float32."""
    part, _ = parts_of(dtype, 1)
    word = builder.load(shared_at(builder, address, offset, part), align=ITEMSIZE[dtype])
    return widened(builder, dtype, [word])[0]


def _inside(builder, position, extent):
    return builder.icmp_unsigned("<", position, extent)


@cache
def first_maximum(dtype: str, axes: tuple[Axis, Axis]):
    """Intrinsic (shared address of a plane, row and column of the window's first tap, rows, columns) -> the tap that is
    the window's maximum: the first of equals, the last NaN."""
    (rows, columns), itemsize = axes, ITEMSIZE[dtype]

    @intrinsic
    def find(typingctx, plane, row, column, extent_h, extent_w):
        def codegen(context, builder, sig, args):
            plane, row, column, extent_h, extent_w = args
            found = None
            first = builder.add(builder.mul(row, extent_w), column)
            address = stepped(builder, plane, first, I32(itemsize))
            for r in range(rows.taps):
                here = stepped(builder, address, extent_w, I32(r * itemsize))
                for s in range(columns.taps):
                    value = _loaded(builder, here, s * itemsize, dtype)
                    if rows.pad or columns.pad:
                        at = moved(builder, row, r), moved(builder, column, s)
                        there = builder.and_(_inside(builder, at[0], extent_h), _inside(builder, at[1], extent_w))
                        lowest = builder.bitcast(I32(LOWEST["f32"]), F32)
                        value = builder.select(there, value, lowest)
                    begins = both(builder, _behind(builder, row, r, rows), _behind(builder, column, s, columns))
                    found = larger(builder, found, Maximum([value], [I32(r * columns.taps + s)]), begins)
            return found.numbers[0]

        return signature(types.int32, types.uint32, *[types.int32] * 4), codegen

    return find


def _behind(builder, first, tap: int, axis: Axis):
    """Whether the taps before `tap` are all before the image: True where there are none, None where it cannot be."""
    if tap == 0:
        return True
    return builder.icmp_signed("<", moved(builder, first, tap - 1), I32(0)) if tap <= axis.pad else None


@cache
def give_back(dtype: str, axes: tuple[Axis, Axis]):
    """Intrinsic (shared addresses of a plane's taps, of dy and of dx; row and column of the cell; rows and columns of
    windows, of dx): dx of a cell, zero where no window has its maximum."""
    (rows, columns), itemsize = axes, ITEMSIZE[dtype]
    reach = [range(ceil(axis.taps / axis.stride)) for axis in axes]
    part, _ = parts_of(dtype, 1)
    store = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.b{part.width} [$0], $2; }}"

    @intrinsic
    def give(typingctx, taps, dy, dx, row, column, windows_h, windows_w, extent_h, extent_w):
        def codegen(context, builder, sig, args):
            taps, dy, dx, row, column, windows_h, windows_w, extent_h, extent_w = args
            first = builder.add(builder.mul(row, windows_w), column)
            chosen, gradients = {}, {}
            for a in reach[0]:
                before = builder.sub(first, builder.mul(windows_w, I32(a)))
                of_taps, of_dy = builder.add(taps, before), stepped(builder, dy, before, I32(itemsize))
                for b in reach[1]:
                    there = builder.and_(
                        _inside(builder, moved(builder, row, -a), windows_h),
                        _inside(builder, moved(builder, column, -b), windows_w),
                    )
                    tap = builder.zext(builder.load(shared_at(builder, of_taps, -b, _I8)), I32)
                    chosen[a, b] = builder.select(there, tap, I32(NONE))
                    gradients[a, b] = _loaded(builder, of_dy, -b * itemsize, dtype)
            top = builder.sub(builder.mul(row, I32(rows.stride)), I32(rows.pad))
            left = builder.sub(builder.mul(column, I32(columns.stride)), I32(columns.pad))
            for i in range(rows.stride):
                h = moved(builder, top, i)
                line = stepped(builder, dx, builder.mul(h, extent_w), I32(itemsize))
                for j in range(columns.stride):
                    total, w = F32(0.0), moved(builder, left, j)
                    for a, b in product(*reach):
                        r, s = i + a * rows.stride, j + b * columns.stride
                        if r < rows.taps and s < columns.taps:
                            hit = builder.icmp_signed("==", chosen[a, b], I32(r * columns.taps + s))
                            total = builder.fadd(total, builder.select(hit, gradients[a, b], F32(0.0)))
                    there = builder.and_(_inside(builder, h, extent_h), _inside(builder, w, extent_w))
                    (value,) = narrowed(builder, dtype, [total])
                    letter = "h" if part.width == 16 else "r"
                    operands = [stepped(builder, line, w, I32(itemsize)), builder.zext(there, I32), value]
                    asm(builder, ir.VoidType(), store, f"r,r,{letter},~{{memory}}", operands, EFFECT)
            return context.get_dummy_value()

        return signature(types.none, *[types.uint32] * 3, *[types.int32] * 6), codegen

    return give


@cache
def store_tap():
    """Intrinsic (shared address, tap): a byte."""

    @intrinsic
    def store(typingctx, address, tap):
        def codegen(context, builder, sig, args):
            builder.store(builder.trunc(args[1], _I8), shared_at(builder, args[0], 0, _I8))
            return context.get_dummy_value()

        return signature(types.none, types.uint32, types.int32), codegen

    return store
