"""Matrices turned about their diagonal, and rows dealt out and put back, in vector registers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.rows import order
from nbdnn.kernels.cpu.vector import (
    FLOAT,
    I16,
    I32,
    I64,
    constant,
    convert,
    lanes_between,
    load,
    row_types,
    splat,
    store,
    vector_at,
)


def turned_block(builder, lines):
    """As many vectors as they have lanes, turned: log2 of that many rounds of interleaving line i with i + half."""
    vl = len(lines)
    low = [lane // 2 + (lane % 2) * vl for lane in range(vl)]
    orders = order(low), order(lane + vl // 2 for lane in low)
    for _ in range(vl.bit_length() - 1):
        pairs = zip(lines[: vl // 2], lines[vl // 2 :], strict=True)
        lines = [builder.shuffle_vector(a, b, each) for a, b in pairs for each in orders]
    return lines


def _picked(builder, parts, wanted: Sequence[int]):
    """A vector of elements by their numbers, counted through the parts: one part after the other gives its own."""
    vl, found = len(wanted), parts[0]
    for number, part in enumerate(parts[1:], 1):
        # Of the first part what it has; then every lane keeps what is in it.
        kept = [i % vl if number == 1 else lane for lane, i in enumerate(wanted)]
        own = [vl + i % vl if i // vl == number else keep for keep, i in zip(kept, wanted, strict=True)]
        found = builder.shuffle_vector(found, part, order(own))
    return found


def dealt(builder, parts) -> list:
    """vl rows in a row, which are as many vectors as a row has elements, turned: a vector for each element."""
    length, vl = len(parts), parts[0].type.count
    if length == 1:
        return parts
    if length % 2:
        return [_picked(builder, parts, range(j, j + length * vl, length)) for j in range(length)]
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    even, odd = (
        dealt(builder, [builder.shuffle_vector(a, b, order(range(first, 2 * vl, 2))) for a, b in pairs])
        for first in (0, 1)
    )
    return [each for pair in zip(even, odd, strict=True) for each in pair]


def collected(builder, parts) -> list:
    """What `dealt` has dealt out, put back as rows."""
    length, vl = len(parts), parts[0].type.count
    if length == 1:
        return parts
    if length % 2:
        places = [range(k * vl, (k + 1) * vl) for k in range(length)]
        return [_picked(builder, parts, [i % length * vl + i // length for i in place]) for place in places]
    pairs = list(zip(collected(builder, parts[::2]), collected(builder, parts[1::2]), strict=True))
    between = [lane // 2 + lane % 2 * vl for lane in range(2 * vl)]
    orders = order(between[:vl]), order(between[vl:])
    return [builder.shuffle_vector(a, b, order) for a, b in pairs for order in orders]


@cache
def interleave(dtype: str, length: int, vl: int):
    """Intrinsic (to, start, pitch, vectors): `length` rows of so many vectors, `pitch` bytes apart, of which the first
    elements come side by side, then the second ones."""
    vector, _, item_bytes, _ = row_types(dtype, dtype, vl)

    def codegen(context, builder, sig, args):
        to, start, pitch, vectors = args
        with cgutils.for_range(builder, vectors) as loop:
            column = builder.add(start, builder.mul(loop.index, I64(vl * item_bytes)))
            rows = [builder.add(column, builder.mul(pitch, I64(m))) for m in range(length)]
            parts = [builder.load(vector_at(builder, row, vector), align=item_bytes) for row in rows]
            line = builder.add(to, builder.mul(loop.index, I64(length * vl * item_bytes)))
            for m, part in enumerate(collected(builder, parts)):
                slot = vector_at(builder, builder.add(line, I64(m * vl * item_bytes)), vector)
                builder.store(part, slot, align=item_bytes)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, start, pitch, vectors):
        return signature(types.none, *[types.int64] * 4), codegen

    return run


@cache
def transpose(source: str, target: str, vl: int, converts_last: bool = False):
    """Intrinsic (to, to_pitch, start, start_pitch, rows, columns): a matrix turned about its diagonal.

    Element (i, j) of `rows` x `columns` at start + i*start_pitch bytes (columns side by side) goes to
    to + j*to_pitch bytes, place i. Blocks of vl x vl are turned in registers; nothing outside the matrix is touched.
    converts_last: turned as what was read. Intel's cores shuffle 32 bits by one instruction, 16 by three.
    """
    read, write, read_bytes, write_bytes = row_types(source, target, vl)

    def turned(builder, lines):
        def converted(lines):
            return [convert(builder, line, source, target, vl) for line in lines]

        return converted(turned_block(builder, lines)) if converts_last else turned_block(builder, converted(lines))

    def codegen(context, builder, sig, args):
        to, to_pitch, start, start_pitch, rows, columns = args
        least = I64(vl)

        def at(base, line, pitch, item, item_bytes):
            return builder.add(builder.add(base, builder.mul(line, pitch)), builder.mul(item, I64(item_bytes)))

        def line_of(i, j, k):
            return vector_at(builder, at(start, builder.add(i, I64(k)), start_pitch, j, read_bytes), read)

        def column_of(i, j, k):
            return vector_at(builder, at(to, builder.add(j, I64(k)), to_pitch, i, write_bytes), write)

        def each_block(block):
            with (
                cgutils.for_range_slice(builder, I64(0), columns, least, I64) as (j, _),
                cgutils.for_range_slice(builder, I64(0), rows, least, I64) as (i, _),
            ):
                block(i, j)

        def whole(i, j):
            """The last ones end with the matrix: a store under a mask takes 20 cycles with AVX2."""
            i, j = (
                builder.select(builder.icmp_signed("<", first, last), first, last)
                for first, last in ((i, builder.sub(rows, least)), (j, builder.sub(columns, least)))
            )
            lines = [builder.load(line_of(i, j, k), align=read_bytes) for k in range(vl)]
            for k, line in enumerate(turned(builder, lines)):
                builder.store(line, column_of(i, j, k), align=write_bytes)

        def part(i, j):
            rows_left, columns_left = builder.sub(rows, i), builder.sub(columns, j)
            load_mask, store_mask = (lanes_between(builder, vl, 0, None, left) for left in (columns_left, rows_left))
            lines = []
            for k in range(vl):
                # A line beyond the matrix is loaded with no lane on, so its address does not matter.
                present = splat(builder, builder.icmp_signed("<", I64(k), rows_left), load_mask.type)
                mask = builder.and_(load_mask, present)
                lines.append(load(builder, line_of(i, j, k), read, read_bytes, mask))
            for k, line in enumerate(turned(builder, lines)):
                with builder.if_then(builder.icmp_signed("<", I64(k), columns_left)):
                    store(builder, line, column_of(i, j, k), write_bytes, store_mask)

        is_large = builder.and_(*(builder.icmp_signed(">=", extent, least) for extent in (rows, columns)))
        with builder.if_else(is_large) as (large, small):
            with large:
                each_block(whole)
            with small:
                each_block(part)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, to_pitch, start, start_pitch, rows, columns):
        return signature(types.none, *[types.int64] * 6), codegen

    return run


@cache
def turn_pairs(vl: int):
    """Intrinsic (to, to_pitch, start, start_pitch, rows, columns): `transpose` of 16-bit elements, two rows at a time.

    Words of the elements of two rows are turned; behind an odd last row is one of zeros.
    """
    half, word = ir.VectorType(I16, vl), ir.VectorType(I32, vl)

    def codegen(context, builder, sig, args):
        to, to_pitch, start, start_pitch, rows, columns = args
        pairs = builder.lshr(builder.add(rows, I64(1)), I64(1))
        with (
            cgutils.for_range_slice(builder, I64(0), columns, I64(vl), I64) as (j, _),
            cgutils.for_range_slice(builder, I64(0), pairs, I64(vl), I64) as (i, _),
        ):
            columns_left, pairs_left = builder.sub(columns, j), builder.sub(pairs, i)
            rows_left = builder.sub(rows, builder.shl(i, I64(1)))
            first_row = builder.add(start, builder.mul(builder.shl(i, I64(1)), start_pitch))
            column = builder.add(first_row, builder.shl(j, I64(1)))
            mask = lanes_between(builder, vl, 0, None, columns_left)

            def row(k: int, column=column, rows_left=rows_left, mask=mask):
                # A row beyond the matrix is loaded with no lane on, so its address does not matter.
                present = builder.and_(mask, splat(builder, builder.icmp_signed("<", I64(k), rows_left), mask.type))
                slot = vector_at(builder, builder.add(column, builder.mul(start_pitch, I64(k))), half)
                return builder.zext(load(builder, slot, half, 2, present), word)

            lines = [builder.or_(row(2 * k), builder.shl(row(2 * k + 1), constant(word, 16))) for k in range(vl)]
            line_start = builder.add(to, builder.add(builder.mul(j, to_pitch), builder.shl(i, I64(2))))
            store_mask, floats = lanes_between(builder, vl, 0, None, pairs_left), ir.VectorType(FLOAT["f32"], vl)
            for k, line in enumerate(turned_block(builder, lines)):
                with builder.if_then(builder.icmp_signed("<", I64(k), columns_left)):
                    slot = vector_at(builder, builder.add(line_start, builder.mul(to_pitch, I64(k))), floats)
                    store(builder, builder.bitcast(line, floats), slot, 4, store_mask)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, to_pitch, start, start_pitch, rows, columns):
        return signature(types.none, *[types.int64] * 6), codegen

    return run


@cache
def turn_lines(source: str, target: str, vl: int, merges: bool = False):
    """Intrinsic (to, places, start, start_pitch, rows, columns): `transpose` whose lines go to places of a table.

    Column j goes to to + places[j] bytes (int64), as whole vectors, zeros behind the last row; nowhere where that is
    negative. merges: of float32 that were bfloat16, which become the upper halves of words of which the lower ones are
    the upper halves of what is there.
    """
    read, write, read_bytes, write_bytes = row_types(source, target, vl)
    words = ir.VectorType(I32, vl)

    def merged(builder, slot, line):
        kept = builder.lshr(builder.bitcast(builder.load(slot, align=write_bytes), words), constant(words, 16))
        return builder.bitcast(builder.or_(kept, builder.bitcast(line, words)), write)

    def codegen(context, builder, sig, args):
        to, places, start, start_pitch, rows, columns = args
        table = builder.inttoptr(places, I64.as_pointer())
        with (
            cgutils.for_range_slice(builder, I64(0), columns, I64(vl), I64) as (j, _),
            cgutils.for_range_slice(builder, I64(0), rows, I64(vl), I64) as (i, _),
        ):
            rows_left, columns_left = builder.sub(rows, i), builder.sub(columns, j)
            row = builder.add(builder.mul(i, start_pitch), builder.mul(j, I64(read_bytes)))
            base, mask = builder.add(start, row), lanes_between(builder, vl, 0, None, columns_left)
            lines = []
            for k in range(vl):
                # A line beyond the matrix is loaded with no lane on, so its address does not matter.
                present = builder.and_(mask, splat(builder, builder.icmp_signed("<", I64(k), rows_left), mask.type))
                slot = vector_at(builder, builder.add(base, builder.mul(start_pitch, I64(k))), read)
                value = load(builder, slot, read, read_bytes, present)
                lines.append(convert(builder, value, source, target, vl))
            line_start = builder.add(to, builder.mul(i, I64(write_bytes)))
            for k, line in enumerate(turned_block(builder, lines)):
                with builder.if_then(builder.icmp_signed("<", I64(k), columns_left)):
                    place = builder.load(builder.gep(table, [builder.add(j, I64(k))]))
                    with builder.if_then(builder.icmp_signed(">=", place, I64(0))):
                        slot = vector_at(builder, builder.add(line_start, place), write)
                        value = merged(builder, slot, line) if merges else line
                        builder.store(value, slot, align=write_bytes)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, places, start, start_pitch, rows, columns):
        return signature(types.none, *[types.int64] * 6), codegen

    return run
