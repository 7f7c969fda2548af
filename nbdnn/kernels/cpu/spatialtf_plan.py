"""Where outputs of a spatial transformer lie in the image: pixels and weights, worked out once for all channels.

    (s, t) position in pixels;  b = min(max(floor(s), 0), width - 2), as for t: the pixels b, b + 1 and, a row on, again
    weights hat(s - b), hat(s - b - 1), hat(d) = max(0, 1 - |d|)

A pixel outside of the image has no part in b and b + 1, and a pixel inside that is too far away has weight 0: there are
no borders. NaN has weight 0 everywhere. A block of vectors, one lane an output: the pixel's number, its four weights by
rows, and (s - b, t - b), of which `slopes` makes derivatives. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.vector import (
    FLOAT,
    I32,
    I64,
    NUMBA_FLOAT,
    constant,
    convert,
    lanes_between,
    masked,
    row_types,
    splat,
    vector_at,
)
from nbdnn.problem import ITEMSIZE

# Vectors of a block: the pixel's number, four weights, two distances.
PLAN_VECTORS = 7
_WEIGHTS, _DISTANCES = 1, 5
# Pixels of a plane that a number of the compute type's width counts.
MOST_PIXELS = 2**31 - 1


def whole_of(vector: ir.VectorType) -> ir.VectorType:
    """Integers of the width of a vector's elements."""
    return ir.VectorType(I32 if vector.element == FLOAT["f32"] else I64, vector.count)


def for_blocks(builder: Any, n: Any, vl: int, emit: Callable[[Any, Any], None]) -> None:
    """emit(i, mask) for i = 0, vl, ... below n: with None for whole blocks, then the lanes that are left."""
    entry = builder.block
    head, body, tail, rest, done = (builder.append_basic_block(f"blocks_{name}") for name in "hbtrd")
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(I64)
    i.add_incoming(I64(0), entry)
    after = builder.add(i, I64(vl))
    builder.cbranch(builder.icmp_signed("<=", after, n), body, tail)

    builder.position_at_end(body)
    emit(i, None)
    i.add_incoming(after, builder.block)
    builder.branch(head)

    builder.position_at_end(tail)
    builder.cbranch(builder.icmp_signed("<", i, n), rest, done)
    builder.position_at_end(rest)
    emit(i, lanes_between(builder, vl, 0, None, builder.sub(n, i)))
    builder.branch(done)
    builder.position_at_end(done)


def load_lanes(builder: Any, address: Any, dtype: str, compute: str, vl: int, mask: Any) -> Any:
    """Neighbours as a vector of the compute type, zero where the mask is off."""
    read, _, size_bytes, _ = row_types(dtype, compute, vl)
    slot = vector_at(builder, address, read)
    raw = builder.load(slot, align=size_bytes) if mask is None else masked(builder, read)(slot, size_bytes, mask)
    return convert(builder, raw, dtype, compute, vl)


def store_lanes(builder: Any, value: Any, address: Any, compute: str, dtype: str, vl: int, mask: Any) -> None:
    """A vector of the compute type to neighbours of another, where the mask is on."""
    _, write, _, size_bytes = row_types(compute, dtype, vl)
    slot, rounded = vector_at(builder, address, write), convert(builder, value, compute, dtype, vl)
    if mask is None:
        builder.store(rounded, slot, align=size_bytes)
    else:
        masked(builder, write)(rounded, slot, size_bytes, mask)


def at_block(builder: Any, plan: Any, i: Any, vector: ir.VectorType, vectors: int) -> Any:
    """Address of the block of `vectors` vectors that output i begins."""
    return builder.add(plan, builder.mul(builder.udiv(i, I64(vector.count)), I64(vectors * _bytes(vector))))


def at_vector(builder: Any, block: Any, place: int, vector: ir.VectorType) -> Any:
    """The vector at a place of a block."""
    return vector_at(builder, builder.add(block, I64(place * _bytes(vector))), vector)


def _bytes(vector: ir.VectorType) -> int:
    return vector.count * (4 if vector.element == FLOAT["f32"] else 8)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """Of two vectors; b where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def hat(builder: Any, distance: Any) -> Any:
    """max(0, 1 - |distance|), 0 of NaN."""
    vector = distance.type
    zero, one = constant(vector, 0.0), constant(vector, 1.0)
    size = builder.select(builder.fcmp_ordered("<", distance, zero), builder.fsub(zero, distance), distance)
    return _larger(builder, builder.fsub(one, size), zero)


def slope(builder: Any, distance: Any) -> Any:
    """The derivative of hat: -1 in [0, 1), 1 in [-1, 0), else 0."""
    vector = distance.type
    zero, one, less = (constant(vector, value) for value in (0.0, 1.0, -1.0))

    def between(low: Any, end: Any) -> Any:
        return builder.and_(builder.fcmp_ordered(">=", distance, low), builder.fcmp_ordered("<", distance, end))

    return builder.select(between(zero, one), less, builder.select(between(less, zero), one, zero))


def floor(builder: Any, value: Any) -> Any:
    """The largest whole number in each lane that is not above it."""
    vector = value.type
    name = f"llvm.floor.v{vector.count}{'f32' if vector.element == FLOAT['f32'] else 'f64'}"
    function_type = ir.FunctionType(vector, [vector])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [value])


def _nearest(builder: Any, at: Any, extent: Any) -> Any:
    """b of positions along an axis of an extent (an int64)."""
    vector, below = at.type, floor(builder, at)
    last = splat(builder, builder.sitofp(builder.sub(extent, I64(2)), vector.element), vector)
    smaller = builder.select(builder.fcmp_ordered("<", below, last), below, last)
    return _larger(builder, smaller, constant(vector, 0.0))


def _write_block(builder: Any, block: Any, s: Any, t: Any, height: Any, width: Any) -> None:
    vector = s.type
    numbers = whole_of(vector)
    left, top = _nearest(builder, s, width), _nearest(builder, t, height)
    row, column = (builder.fptosi(each, numbers) for each in (top, left))
    pitch = splat(builder, builder.trunc(width, numbers.element) if numbers.element == I32 else width, numbers)
    builder.store(builder.add(builder.mul(row, pitch), column), at_vector(builder, block, 0, numbers), align=8)
    one, distances = constant(vector, 1.0), (builder.fsub(s, left), builder.fsub(t, top))
    (left_weight, right_weight), (top_weight, bottom_weight) = (
        (hat(builder, distance), hat(builder, builder.fsub(distance, one))) for distance in distances
    )
    pairs = [(down, right) for down in (top_weight, bottom_weight) for right in (left_weight, right_weight)]
    for place, (down, right) in enumerate(pairs, _WEIGHTS):
        builder.store(builder.fmul(down, right), at_vector(builder, block, place, vector), align=8)
    for place, distance in enumerate(distances, _DISTANCES):
        builder.store(distance, at_vector(builder, block, place, vector), align=8)


@cache
def plan_affine(compute: str, vl: int):
    """Intrinsic (plan, n, column, columns, s, s_column, s_row, t, t_column, t_row, height, width): n outputs in a row.

    The first is in that column of so many; the output c columns and r rows from the beginning of its row lies at
    s + c * s_column + r * s_row, and so for t.
    """
    real = NUMBA_FLOAT[compute]
    vector = ir.VectorType(FLOAT[compute], vl)

    def codegen(context, builder, sig, args):
        plan, n, first, columns, s, s_column, s_row, t, t_column, t_row, height, width = args
        lanes = ir.Constant(vector, [float(lane) for lane in range(vl)])
        wide = builder.sitofp(columns, FLOAT[compute])
        share = splat(builder, builder.fdiv(FLOAT[compute](1.0), wide), vector)

        def along(start, by_column, by_row, column, row):
            moved = builder.fadd(splat(builder, start, vector), builder.fmul(row, splat(builder, by_row, vector)))
            return builder.fadd(moved, builder.fmul(column, splat(builder, by_column, vector)))

        def emit(i, mask):
            j = builder.fadd(splat(builder, builder.sitofp(builder.add(first, i), FLOAT[compute]), vector), lanes)
            # Half a column further on, rounding the quotient is of no consequence.
            row = floor(builder, builder.fmul(builder.fadd(j, constant(vector, 0.5)), share))
            column = builder.fsub(j, builder.fmul(row, splat(builder, wide, vector)))
            block = at_block(builder, plan, i, vector, PLAN_VECTORS)
            place = along(s, s_column, s_row, column, row), along(t, t_column, t_row, column, row)
            _write_block(builder, block, *place, height, width)

        for_blocks(builder, n, vl, emit)
        return context.get_dummy_value()

    @intrinsic
    def write(typingctx, plan, n, column, columns, s, s_column, s_row, t, t_column, t_row, height, width):
        return signature(types.none, *[types.int64] * 4, *[real] * 6, *[types.int64] * 2), codegen

    return write


@cache
def plan_grid(dtype: str, compute: str, vl: int):
    """Intrinsic (plan, n, grid, height, width): n outputs whose positions, from -1 to 1, lie side by side in pairs."""
    vector = ir.VectorType(FLOAT[compute], vl)
    pairs_bytes = 2 * vl * ITEMSIZE[dtype]

    def codegen(context, builder, sig, args):
        plan, n, grid, height, width = args

        def in_pixels(at, extent):
            half = builder.fmul(builder.sitofp(builder.sub(extent, I64(1)), FLOAT[compute]), FLOAT[compute](0.5))
            return builder.fmul(builder.fadd(at, constant(vector, 1.0)), splat(builder, half, vector))

        def emit(i, mask):
            start = builder.add(grid, builder.mul(i, I64(2 * ITEMSIZE[dtype])))
            left = builder.mul(builder.sub(n, i), I64(2))
            parts = []
            for part in (0, 1):
                wanted = None if mask is None else lanes_between(builder, vl, part * vl, None, left)
                address = builder.add(start, I64(part * pairs_bytes // 2))
                parts.append(load_lanes(builder, address, dtype, compute, vl, wanted))
            s, t = (
                builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, vl), list(range(axis, 2 * vl, 2))))
                for axis in (0, 1)
            )
            block = at_block(builder, plan, i, vector, PLAN_VECTORS)
            _write_block(builder, block, in_pixels(s, width), in_pixels(t, height), height, width)

        for_blocks(builder, n, vl, emit)
        return context.get_dummy_value()

    @intrinsic
    def write(typingctx, plan, n, grid, height, width):
        return signature(types.none, *[types.int64] * 5), codegen

    return write


def weights_of(builder: Any, block: Any, vector: ir.VectorType) -> list[Any]:
    """The four weights in a block: of the left and the right pixel, and of those a row on."""
    return [builder.load(at_vector(builder, block, _WEIGHTS + i, vector), align=8) for i in range(4)]


@cache
def slopes(compute: str, vl: int):
    """Intrinsic (plan, sums, n, by_s, by_t, height, width): derivatives by the grid of n outputs, two lines.

    sums has, in blocks of four vectors, the sums over channels of dy times each of the four pixels.
    """
    vector = ir.VectorType(FLOAT[compute], vl)
    size_bytes = ITEMSIZE[compute]

    def codegen(context, builder, sig, args):
        plan, sums, n, by_s, by_t, height, width = args

        def half(extent):
            value = builder.fmul(builder.sitofp(builder.sub(extent, I64(1)), FLOAT[compute]), FLOAT[compute](0.5))
            return splat(builder, value, vector)

        def emit(i, mask):
            block, of_sums = (at_block(builder, plan, i, vector, PLAN_VECTORS), at_block(builder, sums, i, vector, 4))
            right, down = (
                builder.load(at_vector(builder, block, _DISTANCES + axis, vector), align=8) for axis in (0, 1)
            )
            a = [builder.load(at_vector(builder, of_sums, k, vector), align=8) for k in range(4)]
            one = constant(vector, 1.0)
            right_1, down_1 = builder.fsub(right, one), builder.fsub(down, one)
            for line, extent, along_s, along_t in ((by_s, width, slope, hat), (by_t, height, hat, slope)):
                columns, rows = (
                    (along(builder, first), along(builder, second))
                    for along, first, second in ((along_s, right, right_1), (along_t, down, down_1))
                )
                total = constant(vector, 0.0)
                for k in range(4):
                    weight = builder.fmul(rows[k // 2], columns[k % 2])
                    any_ = builder.fcmp_ordered("!=", weight, constant(vector, 0.0))
                    of_pixel = builder.select(any_, a[k], constant(vector, 0.0))
                    total = builder.fadd(total, builder.fmul(weight, of_pixel))
                value = builder.fmul(total, half(extent))
                address = builder.add(line, builder.mul(i, I64(size_bytes)))
                store_lanes(builder, value, address, compute, compute, vl, mask)

        for_blocks(builder, n, vl, emit)
        return context.get_dummy_value()

    @intrinsic
    def derive(typingctx, plan, sums, n, by_s, by_t, height, width):
        return signature(types.none, *[types.int64] * 7), codegen

    return derive
