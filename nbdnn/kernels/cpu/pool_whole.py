"""Pooling on the CPU where one window is all of a plane: whole planes are joined, filled or searched.

    y = join over i of x[i]            join: max or sum
    dx[i] = dy / count, or of a maximum: dy where x[i] is the first maximum, or the last NaN, and 0 elsewhere

A task is a run of planes; of the gradient of a sum, channels-last, a run of pixels. Maxima and sums of channels are in
`pool_channels.py`, the gradient of a maximum of channels in `pool_max_channels.py`.

Traffic: x and y (dy and dx) once. Sums in float32 (float64), in vectors of partial sums of a block, then of blocks.
Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.pool_phases import joined_vectors
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.scratch import Scratch
from nbdnn.kernels.cpu.vector import (
    I32,
    I64,
    NARROW,
    NUMBA_FLOAT,
    WIDEN,
    by_vectors,
    constant,
    convert,
    element,
    filled,
    halved,
    load,
    pointer,
    record,
    row_types,
    splat,
    store,
    struct,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD = 8
_PLANE_VECTORS = 4  # of sums, a power of 2: enough to wait for no addition
_BLOCK = 1 << 13  # elements of a plane that are added up by themselves: float32 loses what is small beside a sum

# planes: of one channel, or pixels; elements: of a plane. scratch: a line of channels for a worker.
_FIELDS = record("planes", "planes_a_task", "elements", "averages", "channels", "scratch", "scratch_bytes")


def takes_all(axes: Axes) -> bool:
    return axes.extent == axes.taps and not any(axes.pad)


@cache
def _join_plane(source: str, compute: str, vl: int, is_max: bool):
    """Intrinsic (start, n): what n elements come to."""
    read, wide, read_bytes, _ = row_types(source, compute, vl)
    neutral = constant(wide, float("-inf") if is_max else 0.0)

    def codegen(context, builder, sig, args):
        start, n = args
        sums = [cgutils.alloca_once_value(builder, neutral) for _ in range(_PLANE_VECTORS)]

        def take(i, to, mask):
            value = load(builder, element(builder, start, i, read, read_bytes), read, read_bytes, mask)
            value = convert(builder, value, source, compute, vl)
            if mask is not None:
                value = builder.select(mask, value, neutral)
            builder.store(joined_vectors(builder, is_max, builder.load(to), value), to)

        groups = builder.and_(n, I64(-vl * _PLANE_VECTORS))
        with cgutils.for_range_slice(builder, I64(0), groups, I64(vl * _PLANE_VECTORS), I64) as (i, _):
            for k, to in enumerate(sums):
                take(builder.add(i, I64(k * vl)), to, None)
        by_vectors(builder, builder.sub(n, groups), vl, lambda i, mask: take(builder.add(groups, i), sums[0], mask))
        total = builder.load(sums[0])
        for other in sums[1:]:
            total = joined_vectors(builder, is_max, total, builder.load(other))
        return halved(builder, [total], vl, lambda a, b: [joined_vectors(builder, is_max, a[0], b[0])])[0]

    @intrinsic
    def join(typingctx, start, n):
        return signature(NUMBA_FLOAT[compute], types.int64, types.int64), codegen

    return join


@cache
def _first_maximum(source: str, compute: str, vl: int):
    """Intrinsic (start, n): the number of the first maximum of n elements; of the last NaN where there is one."""
    read, wide, read_bytes, _ = row_types(source, compute, vl)
    numbers = ir.VectorType(I64 if compute == "f64" else I32, vl)

    def codegen(context, builder, sig, args):
        start, n = args
        lanes = ir.Constant(numbers, list(range(vl)))
        best = cgutils.alloca_once_value(builder, constant(wide, float("-inf")))
        place = cgutils.alloca_once_value(builder, lanes)

        def look(i, mask):
            value = load(builder, element(builder, start, i, read, read_bytes), read, read_bytes, mask)
            value = convert(builder, value, source, compute, vl)
            most = builder.load(best)
            better = builder.or_(builder.fcmp_ordered(">", value, most), builder.fcmp_unordered("uno", value, value))
            if mask is not None:
                better = builder.and_(better, mask)
            number = i if compute == "f64" else builder.trunc(i, I32)
            here = builder.add(lanes, splat(builder, number, numbers))
            builder.store(builder.select(better, value, most), best)
            builder.store(builder.select(better, here, builder.load(place)), place)

        def earlier(a, b):
            """A NaN before a number and the last of two, else the larger, else the first."""
            (value, at), (other, there) = a, b
            before = builder.icmp_signed("<", there, at)
            larger = builder.or_(
                builder.fcmp_ordered(">", other, value), builder.and_(builder.fcmp_ordered("==", other, value), before)
            )
            kept = builder.and_(builder.fcmp_unordered("uno", value, value), before)
            is_last = builder.and_(builder.fcmp_unordered("uno", other, other), builder.not_(kept))
            better = builder.or_(larger, is_last)
            return [builder.select(better, other, value), builder.select(better, there, at)]

        by_vectors(builder, n, vl, look)
        _, found = halved(builder, [builder.load(best), builder.load(place)], vl, earlier)
        return found if compute == "f64" else builder.zext(found, I64)

    @intrinsic
    def find(typingctx, start, n):
        return signature(types.int64, types.int64, types.int64), codegen

    return find


@cache
def _fill_plane(compute: str, target: str, vl: int):
    """Intrinsic (to, n, value): that many elements of `target` dtype."""
    _, write, _, write_bytes = row_types(compute, target, vl)
    wide = row_types(compute, compute, vl)[0]

    def codegen(context, builder, sig, args):
        to, n, value = args
        given = convert(builder, splat(builder, value, wide), compute, target, vl)
        by_vectors(
            builder,
            n,
            vl,
            lambda i, mask: store(builder, given, element(builder, to, i, write, write_bytes), write_bytes, mask),
        )
        return context.get_dummy_value()

    @intrinsic
    def fill(typingctx, to, n, value):
        return signature(types.none, types.int64, types.int64, NUMBA_FLOAT[compute]), codegen

    return fill


@cache
def _planes_task(op: str, dtype: str, is_max: bool, vl: int):
    """A run of planes."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, data = pointer("i64"), struct(_FIELDS), pointer(dtype)
    itemsize, real = ITEMSIZE[dtype], NUMBA_FLOAT[compute]
    widen, narrow = WIDEN[dtype], NARROW[dtype]
    join, find, fill = (
        _join_plane(dtype, compute, vl, is_max), _first_maximum(dtype, compute, vl), _fill_plane(compute, dtype, vl),
    )  # fmt: skip

    def forward(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        scale = real(1.0) / real(f.elements if f.averages else 1)
        for plane in range(index * f.planes_a_task, min(f.planes, (index + 1) * f.planes_a_task)):
            start = pointers[0] + plane * f.elements * itemsize
            if is_max:
                found = join(start, f.elements)
            else:
                found = real(0.0)
                for first in range(0, f.elements, _BLOCK):
                    found += join(start + first * itemsize, min(_BLOCK, f.elements - first))
            data(pointers[1])[plane] = narrow(found * scale)

    def sums_backward(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        scale = real(1.0) / real(f.elements if f.averages else 1)
        for plane in range(index * f.planes_a_task, min(f.planes, (index + 1) * f.planes_a_task)):
            share = widen(data(pointers[0])[plane]) * scale
            fill(pointers[1] + plane * f.elements * itemsize, f.elements, share)

    def max_backward(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        for plane in range(index * f.planes_a_task, min(f.planes, (index + 1) * f.planes_a_task)):
            behind = plane * f.elements * itemsize
            fill(pointers[3] + behind, f.elements, real(0.0))
            data(pointers[3] + behind)[find(pointers[0] + behind, f.elements)] = data(pointers[2])[plane]

    task = forward if op == "pool_fwd" else max_backward if is_max else sums_backward
    return compile_task(task, (op, dtype, is_max, vl))


@cache
def _pixels_task(dtype: str, vl: int):
    """A run of pixels of dx, counted over images: each is the line of its image."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, wide = pointer("i64"), struct(_FIELDS), pointer(compute)
    itemsize, real = ITEMSIZE[dtype], NUMBA_FLOAT[compute]
    widen_row, narrow_row, copy_row = (
        convert_row(*types, vl) for types in ((dtype, compute), (compute, dtype), (dtype, dtype))
    )

    def sums_backward(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        line = f.scratch + worker * f.scratch_bytes
        scale, n, made = real(1.0) / real(f.elements if f.averages else 1), f.channels, -1
        for pixel in range(index * f.planes_a_task, min(f.planes, (index + 1) * f.planes_a_task)):
            image = pixel // f.elements
            if image != made:
                widen_row(line, pointers[0] + image * n * itemsize, n)
                for j in range(n):
                    wide(line)[j] *= scale
                narrow_row(line, line, n)
                made = image
            copy_row(pointers[1] + pixel * n * itemsize, line, n)

    return compile_task(sums_backward, (dtype, vl))


def whole_planes(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a pooling of planes that `takes_all`, or of the gradient of a sum of channels."""
    vl, is_last, elements = device.lanes(problem.compute), problem.channels_last, prod(axes.extent)
    planes = problem.n * (elements if is_last else problem.c)
    planes_a_task = ceil(planes / (device.threads * _TASKS_PER_THREAD))
    scratch = Scratch(device, problem.c * ITEMSIZE[problem.compute] if is_last else 0)
    ctx = filled(
        _FIELDS,
        planes=planes,
        planes_a_task=planes_a_task,
        elements=elements,
        averages=problem.mode.startswith("average"),
        channels=problem.c,
        scratch=scratch.start,
        scratch_bytes=scratch.size_bytes,
    )
    dtype = problem.dtype
    task = _pixels_task(dtype, vl) if is_last else _planes_task(problem.op, dtype, problem.is_max, vl)
    return Program([Phase(task, ceil(planes / planes_a_task), ctx)], [scratch.memory])
