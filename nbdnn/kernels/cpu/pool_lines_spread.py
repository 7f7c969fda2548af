"""What each element of a plane gets of the windows that cover it: lines of vectors (`pool_lines.py`), the `step` of
them that begin at a multiple of it.

Along a line first, then across lines: what a line of windows gives along itself stays in registers for the next lines
of dx that it covers.
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
    Row,
    ask_ahead,
    counted,
    least,
    merged,
    moved,
    switched,
)
from nbdnn.kernels.cpu.vector import I64, constant, convert, element, lanes_between, load, row_types, splat, store
from nbdnn.problem import DEFAULT_COMPUTE


def reaching(taps: int, step: int, pad: int) -> list[list[int]]:
    """By phase of dx, how many windows away each is that may reach it."""
    return [
        [(phase + pad) // step - r // step for r in range((phase + pad) % step, taps, step)] for phase in range(step)
    ]


@cache
def spread_lines(row: Row, taps_h: int, step_h: int, pad_h: int, scaling: str, end: str):
    """Intrinsic (how, count, dx, dx_line, dy, dy_line, dy_plane, in_w, out_w, in_h, out_h, first, planes, taps, along,
    across): lines of dx, those of `count` multiples of step_h from the first-th on that are less than in_h.

    dx: line 0 of its plane; dy: of the first of `planes` planes of windows that cover it. how: CAREFUL where nothing
    may be read beside the lines of dy. scaling: 'none'; 'mean', by `taps`; 'weights', `along` a line by a number for
    each window, `across` planes and lines of windows by a number for each line. end: of a line of dx, 'narrow' where it
    is less than `step` vectors, 'whole' where it is whole steps, else 'odd'.
    """
    dtype, vl, taps_w, step, pad, is_deep = row
    compute = DEFAULT_COMPUTE[dtype]
    read, wide, itemsize, wide_bytes = row_types(dtype, compute, vl)
    zero = constant(wide, 0.0)
    columns_of, lines_of = reaching(taps_w, step, pad), reaching(taps_h, step_h, pad_h)
    is_weighted = scaling == "weights"
    every_away = [away for some in columns_of for away in some]
    first_away, last_away = min(every_away, default=0), max(every_away, default=0)
    every_line = [away for some in lines_of for away in some]
    first_line, last_line = min(every_line, default=0), max(every_line, default=0)
    dx_ahead_bytes = DEEP_AHEAD_BYTES if is_deep else AHEAD_BYTES

    def codegen(context, builder, sig, args):
        how, *args = args
        switched(builder, how, [lambda kind=kind: spread(builder, kind, *args) for kind in (CAREFUL, SAFE)])
        return context.get_dummy_value()

    def spread(builder, kind, count, dx, dx_line, dy, dy_line, dy_plane, in_w, out_w, in_h, out_h, first, planes, taps,
               along, across):  # fmt: skip
        scale = None
        if scaling == "mean":
            scale = builder.fdiv(constant(wide, 1.0), splat(builder, builder.sitofp(taps, wide.element), wide))

        def share_of(line, at, mask):
            slot = element(builder, line, at, read, itemsize)
            value = load(builder, slot, read, itemsize, mask if kind == CAREFUL else None)
            value = convert(builder, value, dtype, compute, vl)
            return value if mask is None or kind == CAREFUL else builder.select(mask, value, zero)

        def given(p, k, masks, weights) -> list:
            """By phase, what line p of windows gives along itself; nothing where there is no such line."""
            slots = [cgutils.alloca_once_value(builder, zero) for _ in range(step)]

            def take(d) -> None:
                line = moved(builder, dy, (d, dy_plane), (p, dy_line))
                ask_ahead(builder, line, k, row, AHEAD_BYTES)
                weight = None
                if is_weighted:
                    at = moved(builder, across, (builder.add(builder.mul(d, out_h), p), I64(wide_bytes)))
                    weight = splat(builder, builder.load(element(builder, at, I64(0), wide.element, 0)), wide)
                shares = {}
                for away, mask in masks.items():
                    value = share_of(line, builder.add(k, I64(away)), mask)
                    shares[away] = builder.fmul(value, weights[away]) if is_weighted else value
                for slot, aways in zip(slots, columns_of, strict=True):
                    if not aways:
                        continue
                    total = reduce(builder.fadd, [shares[away] for away in aways])
                    total = builder.fmul(total, weight) if is_weighted else total
                    builder.store(builder.fadd(builder.load(slot), total), slot)

            exists = builder.and_(builder.icmp_signed(">=", p, I64(0)), builder.icmp_signed("<", p, out_h))
            with builder.if_then(exists):
                counted(builder, (planes if is_deep else 1,), True, take)
            return [builder.load(slot) for slot in slots]

        def column(k, masks, is_end: bool) -> None:
            weights = {}
            if is_weighted:
                for away in masks:
                    slot = element(builder, along, builder.add(k, I64(away)), wide, wide_bytes)
                    weights[away] = builder.load(slot, align=wide_bytes)
            kept = {}  # by how many lines of windows away
            for away in range(first_line, last_line):
                values = given(builder.add(first, I64(away)), k, masks, weights)
                kept[away] = [cgutils.alloca_once_value(builder, value) for value in values]
            with cgutils.for_range(builder, count) as loop:
                at = builder.add(first, loop.index)
                every = {away: [builder.load(slot) for slot in slots] for away, slots in kept.items()}
                every[last_line] = given(builder.add(at, I64(last_line)), k, masks, weights)
                for away, slots in kept.items():
                    for slot, value in zip(slots, every[away + 1], strict=True):
                        builder.store(value, slot)
                for phase, aways in enumerate(lines_of):
                    h = builder.add(builder.mul(at, I64(step_h)), I64(phase))
                    with builder.if_then(builder.icmp_signed("<", h, in_h)):
                        write(h, k, [every[away] for away in aways], is_end)

        def write(h, k, given_by_line: list, is_end: bool) -> None:
            parts = [reduce(builder.fadd, values) for values in zip(*given_by_line, strict=True)] or [zero] * step
            if scale is not None:
                parts = [builder.fmul(part, scale) for part in parts]
            to, begin = moved(builder, dx, (h, dx_line)), builder.mul(k, I64(step))
            ask_ahead(builder, to, begin, row, dx_ahead_bytes, step, writes=True)
            for part in range(step):
                places = [divmod(lane, step)[::-1] for lane in range(part * vl, part * vl + vl)]
                at = builder.add(begin, I64(part * vl))
                value = convert(builder, merged(builder, parts, places), compute, dtype, vl)
                mask = lanes_between(builder, vl, 0, None, builder.sub(in_w, at)) if is_end else None
                store(builder, value, element(builder, to, at, read, itemsize), itemsize, mask)

        def columns(k, is_end: bool) -> None:
            low, high = builder.neg(k), builder.sub(out_w, k)
            bounded = {
                away: lanes_between(builder, vl, 0, builder.sub(low, I64(away)), builder.sub(high, I64(away)))
                for away in dict.fromkeys(every_away)
            }
            if kind == CAREFUL or is_end:
                column(k, bounded, is_end)
                return
            begins = builder.icmp_signed(">=", k, I64(-first_away))
            ends = builder.icmp_signed("<=", I64(vl + last_away), high)
            with builder.if_else(builder.and_(begins, ends)) as (inside, otherwise):
                with inside:
                    column(k, dict.fromkeys(every_away), False)
                with otherwise:
                    column(k, bounded, False)

        if end == "narrow":
            columns(I64(0), True)
            return
        steps = builder.sdiv(in_w, I64(step))
        if end == "whole":
            last = builder.sub(steps, I64(vl))  # the vectors that end with the line
            with cgutils.for_range_slice(builder, I64(0), steps, I64(vl), I64) as (k, _):
                columns(least(builder, k, last), False)
            return
        whole = builder.and_(steps, I64(-vl))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(vl), I64) as (k, _):
            columns(k, False)
        columns(whole, True)

    @intrinsic
    def run(typingctx, how, count, dx, dx_line, dy, dy_line, dy_plane, in_w, out_w, in_h, out_h, first, planes, taps,
            along, across):  # fmt: skip
        return signature(types.none, *[types.int64] * 16), codegen

    return run
