"""What of dy each element of a plane gets, by what its windows have chosen: lines of vectors (`pool_lines.py`), the
`step` of them that begin at a multiple of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.pool_lines import (
    AHEAD_BYTES,
    CAREFUL,
    DEEP_AHEAD_BYTES,
    SAFE,
    STREAM,
    WHOLE,
    Row,
    ask_ahead,
    counted,
    merged,
    moved,
    switched,
)
from nbdnn.kernels.cpu.vector import (
    I8,
    I64,
    by_ends,
    constant,
    convert,
    element,
    lanes_between,
    load,
    row_types,
    splat,
    store,
    store_past_caches,
    vector_at,
)
from nbdnn.problem import DEFAULT_COMPUTE


@cache
def give_lines(row: Row, known: Sequence[tuple[int, int]], past_caches: bool):
    """Intrinsic (how, count, dx, dx_apart, dy, dy_line, dy_plane, chosen, chosen_line, chosen_plane, in_w, planes,
    lines, number, plane_taps, line_taps): `count` lines of dx, of the `lines` lines of windows in `planes` planes that
    cover it.

    Lines of windows are those of the first line; those of the next begin one later. number: of the first one's first
    tap in this line of dx; plane_taps and line_taps less a plane and a line of windows. how: WHOLE + the place of
    (planes, lines) in `known`; as many more for the same past the caches; CAREFUL where nothing may be read beside the
    lines of dy.
    """
    dtype, vl, taps, step, pad, is_deep = row
    compute = DEFAULT_COMPUTE[dtype]
    read, wide, itemsize, wide_bytes = row_types(dtype, compute, vl)
    numbers, has_masks = ir.VectorType(I8, vl), vl * wide_bytes >= 64
    # By phase of dx: (tap, how many windows away) of each that may reach it.
    reaching = [
        [(r, (phase + pad) // step - r // step) for r in range((phase + pad) % step, taps, step)]
        for phase in range(step)
    ]

    def codegen(context, builder, sig, args):
        how, *args = args
        ways = [(CAREFUL, None), (SAFE, None)]
        ways += [(kind, some) for kind in ((WHOLE, STREAM) if past_caches else (WHOLE,)) for some in known]
        switched(builder, how, [lambda way=way: give(builder, *way, *args) for way in ways])
        return context.get_dummy_value()

    def give(builder, kind, some, count, dx, dx_apart, dy, dy_line, dy_plane, chosen, chosen_line, chosen_plane, in_w,
             planes, lines, number, plane_taps, line_taps):  # fmt: skip
        out_w = builder.sdiv(dy_line, I64(itemsize))

        def taps_of(d, p) -> list:
            """By number along the row, which tap of a line of windows this line of dx is."""
            first = builder.sub(builder.sub(number, builder.mul(d, plane_taps)), builder.mul(p, line_taps))
            base = splat(builder, builder.trunc(first, I8), numbers)
            return [builder.add(base, constant(numbers, r)) for r in range(taps)]

        # The same for all of the lines: computed once where it is known how many windows there are.
        all_taps = {place: taps_of(*map(I64, place)) for place in product(*map(range, some))} if some else {}

        def existing(hit, at):
            """Of windows that exist: what lies behind a line's guard may be any number."""
            return builder.and_(hit, lanes_between(builder, vl, 0, builder.neg(at), builder.sub(out_w, at)))

        def column(k, is_end) -> None:
            with cgutils.for_range(builder, count) as loop:
                elements(k, loop.index, is_end)

        def elements(k, i, is_end) -> None:
            sums = [cgutils.alloca_once_value(builder, constant(wide, 0.0)) for _ in range(step)]

            def take(d, p):
                at_line = builder.add(p, i)
                line = moved(builder, chosen, (d, chosen_plane), (at_line, chosen_line))
                shares = moved(builder, dy, (d, dy_plane), (at_line, dy_line))
                numbered = all_taps[d.constant, p.constant] if some else taps_of(d, p)
                found: dict[int, ir.Value] = {}
                for phase, windows in enumerate(reaching):
                    for r, away in windows:
                        at = builder.add(k, I64(away))
                        if away not in found:
                            found[away] = builder.load(vector_at(builder, builder.add(line, at), numbers), align=1)
                        hit = builder.icmp_signed("==", found[away], numbered[r])
                        slot = element(builder, shares, at, read, itemsize)
                        share = load(builder, slot, read, itemsize, existing(hit, at) if kind == CAREFUL else None)
                        total, value = builder.load(sums[phase]), convert(builder, share, dtype, compute, vl)
                        if has_masks:
                            more = builder.select(hit, builder.fadd(total, value), total)
                        else:  # a sum is never -0.0, so that 0.0 changes none
                            more = builder.fadd(total, builder.select(hit, value, constant(wide, 0.0)))
                        builder.store(more, sums[phase])

            to, first = moved(builder, dx, (i, dx_apart)), builder.mul(k, I64(step))
            ask_ahead(builder, moved(builder, dy, (i, dy_line)), k, row, AHEAD_BYTES)
            if kind != STREAM:
                ask_ahead(builder, to, first, row, DEEP_AHEAD_BYTES if is_deep else AHEAD_BYTES, step, writes=True)
            counted(builder, some or (planes if is_deep else 1, lines), True, take)
            parts = [builder.load(total) for total in sums]
            for part in range(step):
                places = [divmod(lane, step)[::-1] for lane in range(part * vl, part * vl + vl)]
                at = builder.add(first, I64(part * vl))
                value = convert(builder, merged(builder, parts, places), compute, dtype, vl)
                write(value, element(builder, to, at, read, itemsize), builder.sub(in_w, at), is_end)

        def write(value, slot, left, is_end) -> None:
            """A vector of dx. left: elements up to the line's end, which may be too few where is_end says so."""

            def whole() -> None:
                if kind == STREAM:
                    store_past_caches(builder, value, slot)
                else:
                    store(builder, value, slot, itemsize, None)

            if is_end is None:
                whole()
                return
            with builder.if_else(builder.icmp_signed(">=", left, I64(vl))) as (then, otherwise):
                with then:
                    whole()
                with otherwise, builder.if_then(builder.icmp_signed(">", left, I64(0))):
                    store(builder, value, slot, itemsize, lanes_between(builder, vl, 0, None, left))

        if step == 1 and kind != STREAM:
            by_ends(builder, in_w, vl, column)
            return
        whole = builder.and_(builder.sdiv(in_w, I64(step)), I64(-vl))
        columns = builder.sdiv(builder.add(in_w, I64(step - 1)), I64(step))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(vl), I64) as (k, _):
            column(k, None)
        with builder.if_then(builder.icmp_signed("<", whole, columns)):
            column(whole, True)

    @intrinsic
    def run(typingctx, how, count, dx, dx_apart, dy, dy_line, dy_plane, chosen, chosen_line, chosen_plane, in_w, planes,
            lines, number, plane_taps, line_taps):  # fmt: skip
        return signature(types.none, *[types.int64] * 16), codegen

    return run
