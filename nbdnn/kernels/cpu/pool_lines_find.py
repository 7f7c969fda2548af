"""Which tap of a window of a plane is its maximum: lines of vectors (`pool_lines.py`), each so many windows of a line.

y says what to look for: the first line, or plane, whose maximum it is, and there the first tap that it is.
"""

from __future__ import annotations

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
    NONE,
    SAFE,
    WHOLE,
    Reader,
    Row,
    ask_ahead,
    counted,
    moved,
    switched,
)
from nbdnn.kernels.cpu.vector import (
    I8,
    I32,
    I64,
    constant,
    convert,
    element,
    lanes_between,
    load,
    row_types,
    splat,
    vector_at,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE


def found_bytes(row: Row, shared_planes: int, out_w: int) -> int:
    """Of what a line of windows leaves for those a depth further on."""
    return shared_planes * -(-out_w // row.vl) * row.vl * (ITEMSIZE[DEFAULT_COMPUTE[row.dtype]] + 4)


@cache
def find_lines(row: Row, known: tuple[int, int], shared: tuple[int, int]):
    """Intrinsic (how, count, x, x_apart, y, y_apart, chosen, chosen_apart, in_w, out_w, first_plane, planes,
    first_line, lines, plane_bytes, line_bytes, plane_taps, found, found_apart, is_found, ahead_bytes): what `count`
    lines of windows have chosen.

    x: the first window's first tap, inside of the image or not; of its planes and lines, those that are inside. how:
    WHOLE where these are the `known`, which is all of a window, of which the next has `shared` planes or lines, too;
    CAREFUL where nothing may be read beside the lines. found: `found_bytes` of memory for each line of windows, where
    WHOLE ones leave what they have found in the planes that they share, for those a depth further on; is_found: that it
    is there, and these planes need not be inside. ahead_bytes: how far behind x WHOLE ones ask for what is next.
    """
    dtype, vl, taps, step, pad, is_deep = row
    compute = DEFAULT_COMPUTE[dtype]
    read, wide, itemsize, wide_bytes = row_types(dtype, compute, vl)
    numbers, bits = ir.VectorType(I32, vl), ir.IntType(vl)

    def codegen(context, builder, sig, args):
        how, *args = args
        switched(builder, how, [lambda kind=kind: find(builder, kind, *args) for kind in (CAREFUL, SAFE, WHOLE)])
        return context.get_dummy_value()

    def find(builder, kind, count, x, x_apart, y, y_apart, chosen, chosen_apart, in_w, out_w, first_plane, planes,
             first_line, lines, plane_bytes, line_bytes, plane_taps, found, found_apart, is_found,
             ahead_bytes):  # fmt: skip
        reader = Reader(builder, row, kind, in_w, out_w)

        def counted_inside(forward: bool, meet) -> None:
            """meet(d, h) of a window's planes and lines that are inside."""
            behind = lambda d, h: meet(builder.add(first_plane, d), builder.add(first_line, h))  # noqa: E731
            counted(builder, (planes if is_deep else 1, lines), forward, behind)

        def met(line, q, masks) -> list:
            """The maximum of a line's taps that are inside, NaN where none is; and the first tap that it is."""
            values = reader.values(line, q)
            best = constant(values[0].type, float("nan"))
            for value, mask in zip(values, masks, strict=True):
                larger = builder.select(builder.fcmp_ordered(">", best, value), best, value)
                best = larger if mask is None else builder.select(mask, larger, best)
            tap = constant(numbers, taps - 1)
            for r in reversed(range(taps - 1)):
                hit = builder.fcmp_ordered("==", values[r], best)
                hit = hit if masks[r] is None else builder.and_(hit, masks[r])
                tap = builder.select(hit, constant(numbers, r), tap)
            return [best, tap]

        def column(q, masks, is_behind: bool) -> None:
            """Those from q on. is_behind: some may not exist; masks by lanes as they are, and in the order of x."""
            exist, left = None, builder.sub(out_w, q)
            if is_behind:
                exist = [lanes_between(builder, vl, 0, None, left, order) for order in (None, reader.order)]
            if kind != WHOLE or not shared[0]:
                lines_of_windows(q, masks, exist, 0)
                return
            with builder.if_else(builder.icmp_signed("!=", is_found, I64(0))) as (then, otherwise):
                with then:
                    lines_of_windows(q, masks, exist, shared[0])
                with otherwise:
                    lines_of_windows(q, masks, exist, 0)

        def lines_of_windows(q, masks, exist, found_planes: int) -> None:
            """found_planes: those that are found already."""
            kept = {}
            for d, h in product(range(found_planes, known[0]), range(shared[1])) if kind == WHOLE else ():
                line = moved(builder, x, (I64(d), plane_bytes), (I64(h), line_bytes))
                kept[d, h] = [cgutils.alloca_once_value(builder, value) for value in met(line, q, masks)]
            with cgutils.for_range(builder, count) as loop:
                windows(q, loop.index, masks, exist, kept, found_planes)

        def windows(q, p, masks, exist, kept, found_planes: int) -> None:
            """kept: of lines that the windows before have met, too, what was met there."""
            y_line = moved(builder, y, (p, y_apart))
            ask_ahead(builder, y_line, q, row, AHEAD_BYTES)
            slot = element(builder, y_line, q, read, itemsize)
            wanted = load(builder, slot, read, itemsize, exist[0] if kind == CAREFUL else None)
            wanted = reader.arranged(convert(builder, wanted, dtype, compute, vl))
            window = moved(builder, x, (p, x_apart))
            line_at = lambda d, h: moved(builder, window, (d, plane_bytes), (h, line_bytes))  # noqa: E731

            def number_of(d, h):
                """Of a line's first tap."""
                first = moved(builder, builder.mul(d, plane_taps), (h, I64(taps)))
                return splat(builder, builder.trunc(first, I32), numbers)

            if kind == WHOLE:
                place = moved(builder, found, (p, found_apart), (q, I64(shared[0] * (wide_bytes + 4))))
                tap = search_whole(wanted, line_at, q, masks, kept, found_planes, place)
            else:
                tap = search(wanted, line_at, number_of, q, masks)
            are_nan = builder.fcmp_unordered("uno", wanted, wanted)
            if exist is not None:
                are_nan = builder.and_(are_nan, exist[1])
            with builder.if_then(builder.icmp_signed("!=", builder.bitcast(are_nan, bits), bits(0)), likely=False):
                search_nans(are_nan, line_at, number_of, q, masks, tap)
            narrow = builder.trunc(reader.arranged(builder.load(tap)), ir.VectorType(I8, vl))
            line = builder.add(moved(builder, chosen, (p, chosen_apart)), q)
            builder.store(narrow, vector_at(builder, line, narrow.type), align=1)

        def search(wanted, line_at, number_of, q, masks):
            """The first tap of the first line whose maximum is wanted."""
            tap = cgutils.alloca_once_value(builder, constant(numbers, NONE))

            def meet(d, h) -> None:
                best, of_line = met(line_at(d, h), q, masks)
                hit = builder.fcmp_ordered("==", best, wanted)
                here = builder.add(of_line, number_of(d, h))
                builder.store(builder.select(hit, here, builder.load(tap)), tap)

            counted_inside(False, meet)
            return tap

        def search_whole(wanted, line_at, q, masks, kept, found_planes: int, place):
            """The same of lines that are known, and met once; or of planes, where windows share some."""
            every = {at: [builder.load(value) for value in values] for at, values in kept.items()}
            for d, h in product(range(found_planes, known[0]), range(known[1])):
                if h >= shared[1]:
                    line = line_at(I64(d), I64(h))
                    ask_ahead(builder, line, builder.mul(q, I64(step)), row, ahead_bytes, step)
                    every[d, h] = met(line, q, masks)
            for (d, h), slots in kept.items():
                for slot, value in zip(slots, every[d, h + known[1] - shared[1]], strict=True):
                    builder.store(value, slot)
            if shared[0]:
                every = of_planes(every, found_planes, place)
            tap = constant(numbers, NONE)
            for (d, h), (best, of_line) in sorted(every.items(), key=lambda item: item[0], reverse=True):
                hit = builder.fcmp_ordered("==", best, wanted)
                here = builder.add(of_line, constant(numbers, (d * known[1] + h) * taps))
                tap = builder.select(hit, here, tap)
            return cgutils.alloca_once_value(builder, tap)

        def of_planes(every, found_planes: int, place) -> dict:
            """The same of whole planes: of those found before from memory, where the shared ones go for the next."""

            def slots(plane: int):
                for offset, of in ((0, wide), (vl * wide_bytes, numbers)):
                    at = plane * vl * (wide_bytes + 4) + offset
                    yield vector_at(builder, builder.add(place, I64(at)), of)

            found_there = {}
            for d in range(known[0]):
                if d < found_planes:
                    found_there[d, 0] = [builder.load(slot, align=4) for slot in slots(d)]
                    continue
                best, tap = every[d, 0]
                for h in range(1, known[1]):
                    other, of_line = every[d, h]
                    is_larger = builder.fcmp_ordered(">", other, best)
                    best = builder.select(is_larger, other, best)
                    tap = builder.select(is_larger, builder.add(of_line, constant(numbers, h * taps)), tap)
                found_there[d, 0] = [best, tap]
            for plane in range(shared[0]):
                for value, slot in zip(found_there[plane + known[0] - shared[0], 0], slots(plane), strict=True):
                    builder.store(value, slot, align=4)
            return found_there

        def search_nans(are_nan, line_at, number_of, q, masks, found) -> None:
            def meet(d, h) -> None:
                first = number_of(d, h)
                for r, value in enumerate(reader.values(line_at(d, h), q)):
                    hit = builder.and_(builder.fcmp_unordered("uno", value, value), are_nan)
                    hit = hit if masks[r] is None else builder.and_(hit, masks[r])
                    tap = builder.add(first, constant(numbers, r))
                    builder.store(builder.select(hit, tap, builder.load(found)), found)

            counted_inside(True, meet)

        def inside(q) -> None:
            if not pad:
                column(q, [None] * taps, False)
                return
            with builder.if_else(builder.icmp_signed("<", q, I64(-(-pad // step)))) as (first, inner):
                with first:
                    column(q, reader.masks(q, False), False)
                with inner:
                    column(q, [None] * taps, False)

        # Windows before this have all their taps inside of a line. What is found of such as do not exist is of no
        # account, as long as nothing but what a line can be asked for is read.
        end = reader.end_inside()
        is_last_inside = builder.icmp_signed(">=", end, out_w)
        with cgutils.for_range_slice(builder, I64(0), out_w, I64(vl), I64) as (q, _):
            if kind == CAREFUL:  # a stride's vectors go beyond the last tap
                column(q, reader.masks(q), True)
            else:
                are_inside = builder.or_(is_last_inside, builder.icmp_signed("<=", builder.add(q, I64(vl)), end))
                with builder.if_else(are_inside) as (then, otherwise):
                    with then:
                        inside(q)
                    with otherwise:
                        column(q, reader.masks(q), True)

    @intrinsic
    def run(typingctx, how, count, x, x_apart, y, y_apart, chosen, chosen_apart, in_w, out_w, first_plane, planes,
            first_line, lines, plane_bytes, line_bytes, plane_taps, found, found_apart, is_found,
            ahead_bytes):  # fmt: skip
        return signature(types.none, *[types.int64] * 21), codegen

    return run
