"""Sampling a plane at a run of positions, and its gradient: one lane an output, pixels gathered.

Two pixels of a row that lie side by side are one element of twice the width: half as many gathers (0.53 against 0.88 ns
an output of float32, one thread of a Zen 5 core). Pixels and outputs may also lie apart, as those of channels-last
images do. A pixel of weight 0 is read and not used: what is in it does not matter. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.spatialtf_plan import (
    PLAN_VECTORS,
    at_block,
    at_vector,
    for_blocks,
    load_lanes,
    store_lanes,
    weights_of,
    whole_of,
)
from nbdnn.kernels.cpu.vector import FLOAT, I16, I32, I64, constant, convert, row_types, splat
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

_MERGE = ("contract",)


def gathered(builder: Any, addresses: Any, vector: ir.VectorType, align: int, mask: Any = None) -> Any:
    """Elements at a vector of addresses, zero where the mask is off."""
    count, suffix = vector.count, {I16: "i16", I32: "i32", I64: "i64", **{FLOAT[f]: f for f in FLOAT}}[vector.element]
    pointers, bits = ir.VectorType(ir.PointerType(), count), ir.VectorType(ir.IntType(1), count)
    function_type = ir.FunctionType(vector, [pointers, I32, bits, vector])
    name = f"llvm.masked.gather.v{count}{suffix}.v{count}p0"
    gather = cgutils.get_or_insert_function(builder.module, function_type, name)
    wanted = ir.Constant(bits, [1] * count) if mask is None else mask
    zero = ir.Constant(vector, None)
    return builder.call(gather, [builder.inttoptr(addresses, pointers), I32(align), wanted, zero])


def _scatter(builder: Any, value: Any, addresses: Any, align: int, mask: Any) -> None:
    vector = value.type
    count, suffix = vector.count, {I16: "i16", **{FLOAT[f]: f for f in FLOAT}}[vector.element]
    pointers, bits = ir.VectorType(ir.PointerType(), count), ir.VectorType(ir.IntType(1), count)
    function_type = ir.FunctionType(ir.VoidType(), [vector, pointers, I32, bits])
    name = f"llvm.masked.scatter.v{count}{suffix}.v{count}p0"
    scatter = cgutils.get_or_insert_function(builder.module, function_type, name)
    wanted = ir.Constant(bits, [1] * count) if mask is None else mask
    builder.call(scatter, [value, builder.inttoptr(addresses, pointers), I32(align), wanted])


def _apart(builder: Any, start: Any, i: Any, step_bytes: Any, vl: int) -> Any:
    """Addresses of outputs i, i + 1, ... that lie a step apart."""
    addresses = ir.VectorType(I64, vl)
    numbers = builder.add(splat(builder, i, addresses), ir.Constant(addresses, list(range(vl))))
    return builder.add(splat(builder, start, addresses), builder.mul(numbers, splat(builder, step_bytes, addresses)))


def _corners(builder: Any, dtype: str, pairs: bool, source: Any, offsets: Any, right: Any, down: Any) -> list[Any]:
    """The four pixels of each lane in the compute type. offsets: their bytes; right, down: steps in bytes."""
    vl, compute = offsets.type.count, DEFAULT_COMPUTE[dtype]
    read, _, size_bytes, _ = row_types(dtype, compute, vl)
    found = []
    for row in (source, builder.add(source, down)):
        addresses = builder.add(splat(builder, row, offsets.type), offsets)
        if pairs:
            single = ir.VectorType(ir.IntType(8 * size_bytes), vl)
            double = ir.VectorType(ir.IntType(16 * size_bytes), vl)
            both = gathered(builder, addresses, double, size_bytes)
            halves = [both, builder.lshr(both, constant(double, 8 * size_bytes))]
            parts = [builder.bitcast(builder.trunc(half, single), read) for half in halves]
        else:
            ways = addresses, builder.add(addresses, splat(builder, right, offsets.type))
            parts = [gathered(builder, way, read, size_bytes) for way in ways]
        found += [convert(builder, part, dtype, compute, vl) for part in parts]
    return found


def pixel_offsets(builder: Any, block: Any, vector: ir.VectorType, pixel_bytes: Any) -> Any:
    """Bytes from the plane's beginning to each lane's pixel."""
    numbers, addresses = builder.load(at_vector(builder, block, 0, whole_of(vector)), align=8), None
    addresses = ir.VectorType(I64, vector.count)
    wide = builder.zext(numbers, addresses) if numbers.type != addresses else numbers
    return builder.mul(wide, splat(builder, pixel_bytes, addresses))


def if_weighted(builder: Any, weight: Any, value: Any) -> Any:
    """The value where it has any weight, else 0, whatever it is."""
    zero = constant(weight.type, 0.0)
    return builder.select(builder.fcmp_ordered(">", weight, zero), value, zero)


@cache
def sample_run(dtype: str, pairs: bool, apart: bool, vl: int):
    """Intrinsic (to, plan, source, n, pixel_bytes, right, down): n outputs of one channel.

    right, down: bytes to the next pixel of a row and of a column, 0 where there is one only. apart: outputs lie
    pixel_bytes from each other, else side by side. pairs: pixels lie side by side, and there are two in a row.
    """
    compute = DEFAULT_COMPUTE[dtype]
    vector, size_bytes = ir.VectorType(FLOAT[compute], vl), ITEMSIZE[dtype]

    def codegen(context, builder, sig, args):
        to, plan, source, n, pixel_bytes, right, down = args

        def emit(i, mask):
            block = at_block(builder, plan, i, vector, PLAN_VECTORS)
            offsets = pixel_offsets(builder, block, vector, pixel_bytes)
            total = constant(vector, 0.0)
            corners = _corners(builder, dtype, pairs, source, offsets, right, down)
            for weight, pixel in zip(weights_of(builder, block, vector), corners, strict=True):
                term = builder.fmul(weight, if_weighted(builder, weight, pixel), flags=_MERGE)
                total = builder.fadd(total, term, flags=_MERGE)
            if apart:
                rounded = convert(builder, total, compute, dtype, vl)
                _scatter(builder, rounded, _apart(builder, to, i, pixel_bytes, vl), size_bytes, mask)
            else:
                address = builder.add(to, builder.mul(i, I64(size_bytes)))
                store_lanes(builder, total, address, compute, dtype, vl, mask)

        for_blocks(builder, n, vl, emit)
        return context.get_dummy_value()

    @intrinsic
    def sample(typingctx, to, plan, source, n, pixel_bytes, right, down):
        return signature(types.none, *[types.int64] * 7), codegen

    return sample


@cache
def spread_run(dtype: str, pairs: bool, apart: bool, vl: int):
    """Intrinsic (total, sums, plan, source, dy, n, pixel_bytes, right, down): the gradient of `sample_run`.

    Adds dy times its weight to the four pixels of `total`, the gradient's plane, in the compute type, and dy times each
    of the four pixels of `source` to `sums`, blocks of four vectors. Steps are those of the source; of the total they
    are as many elements.
    """
    compute = DEFAULT_COMPUTE[dtype]
    vector, size_bytes, wider = ir.VectorType(FLOAT[compute], vl), ITEMSIZE[dtype], ITEMSIZE[compute] // ITEMSIZE[dtype]

    def codegen(context, builder, sig, args):
        total, sums, plan, source, dy, n, pixel_bytes, right, down = args
        steps = [builder.mul(step, I64(wider)) for step in (right, down)]
        starts = [total, builder.add(total, steps[0]), builder.add(total, steps[1])]
        starts.append(builder.add(starts[1], steps[1]))

        def emit(i, mask):
            block, of_sums = at_block(builder, plan, i, vector, PLAN_VECTORS), at_block(builder, sums, i, vector, 4)
            offsets = pixel_offsets(builder, block, vector, pixel_bytes)
            if apart:
                read, _, _, _ = row_types(dtype, compute, vl)
                raw = gathered(builder, _apart(builder, dy, i, pixel_bytes, vl), read, size_bytes, mask)
                top = convert(builder, raw, dtype, compute, vl)
            else:
                top = load_lanes(builder, builder.add(dy, builder.mul(i, I64(size_bytes))), dtype, compute, vl, mask)
            corners = _corners(builder, dtype, pairs, source, offsets, right, down)
            weights = weights_of(builder, block, vector)
            shares = []
            for k, (weight, pixel) in enumerate(zip(weights, corners, strict=True)):
                slot = at_vector(builder, of_sums, k, vector)
                product = builder.fmul(top, pixel, flags=_MERGE)
                builder.store(builder.fadd(builder.load(slot, align=8), product, flags=_MERGE), slot, align=8)
                shares.append(builder.fmul(weight, if_weighted(builder, weight, top)))
            places = builder.mul(offsets, constant(offsets.type, wider))
            for lane in range(vl):
                place = builder.extract_element(places, I32(lane))
                for start, share in zip(starts, shares, strict=True):
                    slot = builder.inttoptr(builder.add(start, place), vector.element.as_pointer())
                    builder.store(builder.fadd(builder.load(slot), builder.extract_element(share, I32(lane))), slot)

        for_blocks(builder, n, vl, emit)
        return context.get_dummy_value()

    @intrinsic
    def spread(typingctx, total, sums, plan, source, dy, n, pixel_bytes, right, down):
        return signature(types.none, *[types.int64] * 9), codegen

    return spread
