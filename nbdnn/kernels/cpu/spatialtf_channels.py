"""Sampling all channels of a pixel at one position, and the gradient: one lane a channel, pixels read whole.

Source: own.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.spatialtf_plan import for_blocks, load_lanes, store_lanes
from nbdnn.kernels.cpu.vector import FLOAT, I64, NUMBA_FLOAT, constant, splat, vector_at
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

_MERGE = ("contract",)


def channel_lanes(channels: int, vl: int) -> int:
    """Lanes of a vector of so many channels, 4 at least: a wide one of few reaches into the next cache line, if only
    with lanes that are off (3 channels of 224x224: 112 us instead of 177, a Zen 5 thread with AVX-512)."""
    return min(vl, max(4, 1 << max(channels - 1, 0).bit_length()))


def _weighted(builder, weight, vector):
    """(the weight in every lane, whether it is any: in every lane too, which is a mask at once)."""
    lanes = splat(builder, weight, vector)
    return lanes, builder.fcmp_ordered(">", lanes, constant(vector, 0.0))


@cache
def blend(dtype: str, vl: int):
    """Intrinsic (to, source, right, down, channels, four weights): the pixels at source, right of it, below, and both.

    right, down: bytes. A pixel of weight 0 is not used.
    """
    compute = DEFAULT_COMPUTE[dtype]
    real, vector, size_bytes = NUMBA_FLOAT[compute], ir.VectorType(FLOAT[compute], vl), ITEMSIZE[dtype]

    def codegen(context, builder, sig, args):
        to, source, right, down, channels, *weights = args
        below = builder.add(source, down)
        pixels = source, builder.add(source, right), below, builder.add(below, right)
        spread = [_weighted(builder, weight, vector) for weight in weights]

        def emit(i, mask):
            offset, total = builder.mul(i, I64(size_bytes)), constant(vector, 0.0)
            for pixel, (weight, any_) in zip(pixels, spread, strict=True):
                value = load_lanes(builder, builder.add(pixel, offset), dtype, compute, vl, mask)
                value = builder.select(any_, value, constant(vector, 0.0))
                total = builder.fadd(total, builder.fmul(weight, value, flags=_MERGE), flags=_MERGE)
            store_lanes(builder, total, builder.add(to, offset), compute, dtype, vl, mask)

        for_blocks(builder, channels, vl, emit)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, source, right, down, channels, w_0, w_1, w_2, w_3):
        return signature(types.none, *[types.int64] * 5, *[real] * 4), codegen

    return run


@cache
def spread_pixels(dtype: str, vl: int):
    """Intrinsic (total, source, dy, right, down, channels, sums, lane_bytes, four weights): the gradient of `blend`.

    Adds dy times its weight to the four pixels at `total`, in the compute type, and stores the sums over channels of dy
    times each of the four pixels of `source` at sums, sums + lane_bytes, ... right, down: bytes of the source.
    """
    compute = DEFAULT_COMPUTE[dtype]
    real, vector = NUMBA_FLOAT[compute], ir.VectorType(FLOAT[compute], vl)
    size_bytes, real_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]

    def codegen(context, builder, sig, args):
        total, source, dy, right, down, channels, sums, lane_bytes, *weights = args
        wider = I64(real_bytes // size_bytes)

        def four(start, step_right, step_down):
            below = builder.add(start, step_down)
            return start, builder.add(start, step_right), below, builder.add(below, step_right)

        pixels = four(source, right, down)
        targets = four(total, builder.mul(right, wider), builder.mul(down, wider))
        shares = [_weighted(builder, weight, vector) for weight in weights]
        slots = [cgutils.alloca_once_value(builder, constant(vector, 0.0)) for _ in range(4)]
        for slot in slots:
            builder.store(constant(vector, 0.0), slot)

        def emit(i, mask):
            offset, wide_offset = builder.mul(i, I64(size_bytes)), builder.mul(i, I64(real_bytes))
            top = load_lanes(builder, builder.add(dy, offset), dtype, compute, vl, mask)
            for pixel, target, slot, (weight, any_) in zip(pixels, targets, slots, shares, strict=True):
                value = load_lanes(builder, builder.add(pixel, offset), dtype, compute, vl, mask)
                product = builder.fmul(top, value, flags=_MERGE)
                builder.store(builder.fadd(builder.load(slot), product, flags=_MERGE), slot)
                place = builder.add(target, wide_offset)
                share = builder.fmul(weight, builder.select(any_, top, constant(vector, 0.0)), flags=_MERGE)
                before = load_lanes(builder, place, compute, compute, vl, mask)
                store_lanes(builder, builder.fadd(before, share, flags=_MERGE), place, compute, compute, vl, mask)

        for_blocks(builder, channels, vl, emit)
        name = f"llvm.vector.reduce.fadd.v{vl}{compute}"
        function_type = ir.FunctionType(vector.element, [vector.element, vector])
        add_up = cgutils.get_or_insert_function(builder.module, function_type, name)
        for k, slot in enumerate(slots):
            found = builder.call(add_up, [vector.element(0.0), builder.load(slot)], fastmath=("reassoc",))
            to = builder.add(sums, builder.mul(lane_bytes, I64(k)))
            builder.store(found, vector_at(builder, to, vector.element))
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, total, source, dy, right, down, channels, sums, lane_bytes, w_0, w_1, w_2, w_3):
        return signature(types.none, *[types.int64] * 8, *[real] * 4), codegen

    return run
