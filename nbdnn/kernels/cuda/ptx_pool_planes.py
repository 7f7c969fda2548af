"""What a window in shared memory gives to its maximum, as straight code. Addresses are shared ones.

What lies outside of a plane is loaded all the same, and not used: a plane has room before and behind it.
"""

from __future__ import annotations

from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_axes import LOWEST, Axis
from nbdnn.kernels.cuda.ptx import F32, I32, asm
from nbdnn.kernels.cuda.ptx_tile import shared_at
from nbdnn.kernels.cuda.ptx_vector import moved, parts_of, stepped, widened
from nbdnn.problem import ITEMSIZE

_NONE = I32(-1)


def _loaded(builder, address, offset: int, dtype: str):
    """The element there, as a float32."""
    part, _ = parts_of(dtype, 1)
    word = builder.load(shared_at(builder, address, offset, part), align=ITEMSIZE[dtype])
    return widened(builder, dtype, [word])[0]


def _inside(builder, position, extent):
    return builder.icmp_unsigned("<", position, extent)


@cache
def give(dtype: str, axes: tuple[Axis, Axis]):
    """Intrinsic (shared addresses of a plane of x, of its sums and of the window's dy; row and column of its first tap;
    rows and columns of the plane): adds dy to the sum, a float32, where the window has its maximum: the first of
    equals, the last NaN."""
    (rows, columns), itemsize = axes, ITEMSIZE[dtype]

    @intrinsic
    def give_window(typingctx, plane, sums, dy, row, column, extent_h, extent_w):
        def codegen(context, builder, sig, args):
            plane, sums, dy, row, column, extent_h, extent_w = args
            first = builder.add(builder.mul(row, extent_w), column)
            address = stepped(builder, plane, first, I32(itemsize))
            most, taps = None, []  # (element, its place in the plane, whether it is inside)
            for r in range(rows.taps):
                here = stepped(builder, address, extent_w, I32(r * itemsize))
                line = stepped(builder, first, extent_w, I32(r))
                for s in range(columns.taps):
                    value, there = _loaded(builder, here, s * itemsize, dtype), None
                    if rows.pad or columns.pad:
                        at = moved(builder, row, r), moved(builder, column, s)
                        there = builder.and_(_inside(builder, at[0], extent_h), _inside(builder, at[1], extent_w))
                        value = builder.select(there, value, builder.bitcast(I32(LOWEST["f32"]), F32))
                    most = (
                        value if most is None else asm(builder, F32, "max.NaN.f32 $0, $1, $2;", "=f,f,f", [most, value])
                    )
                    taps.append((value, moved(builder, line, s), there))
            place = _NONE
            for value, at, there in reversed(taps):
                equal = builder.fcmp_ordered("==", value, most)
                place = builder.select(equal if there is None else builder.and_(equal, there), at, place)
            before = builder.block
            with builder.if_then(builder.fcmp_unordered("uno", most, most), likely=False):
                last = _NONE
                for value, at, _ in taps:
                    last = builder.select(builder.fcmp_unordered("uno", value, value), at, last)
                after = builder.block
            merged = builder.phi(I32)
            merged.add_incoming(place, before)
            merged.add_incoming(last, after)
            with builder.if_then(builder.icmp_signed("!=", merged, _NONE)):
                sum_ = shared_at(builder, stepped(builder, sums, merged, I32(4)), 0, F32)
                builder.store(builder.fadd(builder.load(sum_, align=4), _loaded(builder, dy, 0, dtype)), sum_, align=4)
            return context.get_dummy_value()

        return signature(types.none, *[types.uint32] * 3, *[types.int32] * 4), codegen

    return give_window
