"""What the windows of a plane come to: lines of vectors (`pool_lines.py`), each so many windows of a line.

Along a line first, then across lines: what a line's taps come to stays in registers for the next windows that share it.
"""

from __future__ import annotations

from functools import cache, reduce

from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.pool_lines import (
    AHEAD_BYTES,
    CAREFUL,
    DEEP_AHEAD_BYTES,
    SAFE,
    Reader,
    Row,
    ask_ahead,
    counted,
    least,
    moved,
    switched,
)
from nbdnn.kernels.cpu.vector import I64, constant, convert, element, lanes_between, row_types, splat, store
from nbdnn.problem import DEFAULT_COMPUTE


@cache
def join_lines(row: Row, taps_h: int, step_h: int, mode: str, is_narrow: bool):
    """Intrinsic (how, count, x, x_line, x_plane, y, y_line, in_w, out_w, in_h, first, planes, taps): `count` lines of
    y, of windows whose lines begin at the first-th of the image, which may not exist, and step_h later each.

    x: line 0 of the first of `planes` planes of a window that are inside of the image. how: CAREFUL where nothing may
    be read beside the lines of x. taps: of a window, inside or not. is_narrow: a line has fewer windows than a vector.
    """
    dtype, vl, taps_w, step, pad, is_deep = row
    compute = DEFAULT_COMPUTE[dtype]
    read, wide, itemsize, _ = row_types(dtype, compute, vl)
    is_max, one = mode.startswith("max"), constant(wide, 1.0)
    neutral = constant(wide, float("-inf") if is_max else 0.0)
    shared = max(0, taps_h - step_h)  # lines of a window that the next has, too
    x_ahead_bytes = DEEP_AHEAD_BYTES if is_deep else AHEAD_BYTES

    def codegen(context, builder, sig, args):
        how, *args = args
        switched(builder, how, [lambda kind=kind: join(builder, kind, *args) for kind in (CAREFUL, SAFE)])
        return context.get_dummy_value()

    def joined(builder, values):
        """Their sum; or the largest, NaN where one of them is."""
        if not is_max:
            return reduce(builder.fadd, values)
        best = reduce(lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b), values)
        pairs = zip(values[::2], values[1::2] + values[-1:] * (len(values) % 2), strict=True)
        are_nan = reduce(builder.or_, [builder.fcmp_unordered("uno", a, b) for a, b in pairs])
        return builder.select(are_nan, constant(wide, float("nan")), best)

    def reciprocal(builder, number):
        """Of a number, or of 1 where that is less."""
        real = builder.sitofp(builder.select(builder.icmp_signed(">", number, I64(1)), number, I64(1)), wide.element)
        return splat(builder, builder.fdiv(constant(wide.element, 1.0), real), wide)

    def join(builder, kind, count, x, x_line, x_plane, y, y_line, in_w, out_w, in_h, first, planes, taps):
        reader = Reader(builder, row, kind, in_w, out_w)

        def met(h, q, masks):
            """What line h of all of a window's planes comes to; where there is none, what changes nothing."""
            found = cgutils.alloca_once_value(builder, neutral)

            def take(d) -> None:
                line = moved(builder, x, (d, x_plane), (h, x_line))
                ask_ahead(builder, line, builder.mul(q, I64(step)), row, x_ahead_bytes, step)
                values = reader.values(line, q)
                inside = [
                    value if mask is None else builder.select(mask, value, neutral)
                    for value, mask in zip(values, masks, strict=True)
                ]
                before = [builder.load(found)] if is_deep else []
                builder.store(joined(builder, before + inside), found)

            exists = builder.and_(builder.icmp_signed(">=", h, I64(0)), builder.icmp_signed("<", h, in_h))
            with builder.if_then(exists):
                counted(builder, (planes if is_deep else 1,), True, take)
            return builder.load(found)

        def scaled(total, begin, along):
            """along: reciprocals of how many of a line's taps are inside, by window; begin: the windows' first line."""
            if mode == "average_inc_pad":
                return builder.fmul(total, reciprocal(builder, taps))
            if mode == "average_exc_pad":
                end = least(builder, builder.add(begin, I64(taps_h)), in_h)
                low = builder.select(builder.icmp_signed(">", begin, I64(0)), begin, I64(0))
                across = builder.mul(planes, builder.sub(end, low))
                return builder.fmul(total, builder.fmul(reciprocal(builder, across), along))
            return total

        def column(q, masks, exist) -> None:
            numbers = [one if mask is None else builder.select(mask, one, constant(wide, 0.0)) for mask in masks]
            inside = reduce(builder.fadd, numbers)
            along = builder.fdiv(one, builder.select(builder.fcmp_ordered(">", inside, one), inside, one))
            found = [met(builder.add(first, I64(h)), q, masks) for h in range(shared)]
            kept = [cgutils.alloca_once_value(builder, value) for value in found]
            with cgutils.for_range(builder, count) as loop:
                begin = moved(builder, first, (loop.index, I64(step_h)))
                every = [builder.load(slot) for slot in kept]
                every += [met(builder.add(begin, I64(h)), q, masks) for h in range(shared, taps_h)]
                for slot, value in zip(kept, every[taps_h - shared :], strict=True):
                    builder.store(value, slot)
                total = scaled(joined(builder, every), begin, along)
                to = moved(builder, y, (loop.index, y_line))
                ask_ahead(builder, to, q, row, AHEAD_BYTES, writes=True)
                slot = element(builder, to, q, read, itemsize)
                store(builder, convert(builder, reader.arranged(total), compute, dtype, vl), slot, itemsize, exist)

        def columns(q) -> None:
            exist = lanes_between(builder, vl, 0, None, out_w) if is_narrow else None
            if kind == CAREFUL:  # a stride's vectors go beyond the last tap
                column(q, reader.masks(q), exist)
                return
            begins = builder.icmp_signed(">=", q, I64(-(-pad // step)))
            ends = builder.icmp_signed("<=", builder.add(q, I64(vl)), reader.end_inside())
            with builder.if_else(builder.and_(begins, ends)) as (inside, otherwise):
                with inside:
                    column(q, [None] * taps_w, exist)
                with otherwise:
                    column(q, reader.masks(q), exist)

        if is_narrow:
            columns(I64(0))
            return
        last = builder.sub(out_w, I64(vl))  # the vector that ends with the line
        with cgutils.for_range_slice(builder, I64(0), out_w, I64(vl), I64) as (q, _):
            columns(least(builder, q, last))

    @intrinsic
    def run(typingctx, how, count, x, x_line, x_plane, y, y_line, in_w, out_w, in_h, first, planes, taps):
        return signature(types.none, *[types.int64] * 13), codegen

    return run
