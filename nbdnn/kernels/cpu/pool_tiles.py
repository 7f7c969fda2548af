"""The gradient of a maximum where windows of planes lie side by side, 2 positions wide, without padding.

    tap[p] = the first r at which x[p*u + r] is the maximum of window p; where there are NaNs the last of them
    dx[p*u + r] = dy[p] where r is tap[p], else 0, as where no window reaches

A vector is that many windows of a row: of each line that they cover two vectors are read and taken apart, compared, and
put together again of dy and zeros. Nothing is kept but maxima and taps, in registers.

Traffic: x, dy and dx once. y is not read. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import streams
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.rows import ask_for
from nbdnn.kernels.cpu.vector import (
    I32,
    I64,
    constant,
    convert,
    element,
    filled,
    lanes_between,
    load,
    pointer,
    record,
    row_types,
    store,
    store_past_caches,
    struct,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_WIDTH = 2  # positions of a window along a row
_MOST_LINES = 8  # that a window covers
_TASKS_PER_THREAD = 16
# What is asked for ahead: 32x32x56x56 with windows of 2x2x2 took 0.40 ms without, 0.31 with 2 KiB, 0.33 with 4; from
# memory 0.74, 0.39 and 0.44 (Zen 5, two threads).
_AHEAD_BYTES = 2048

_FIELDS = record("rows", "rows_a_task", "in_d", "in_h", "in_w", "out_d", "out_h", "out_w")


def tiles(axes: Axes) -> bool:
    """Whether windows are such."""
    apart = axes.taps == axes.step and not any(axes.pad)
    return apart and axes.taps[2] == _WIDTH and prod(axes.taps[:2]) <= _MOST_LINES


@cache
def _give_row(dtype: str, vl: int, depths: int, rows: int, past_caches: bool):
    """Intrinsic (x, dx, dy, n, row, plane): dx of n windows, whose lines are so many bytes apart by row and plane."""
    compute = DEFAULT_COMPUTE[dtype]
    read, wide, itemsize, _ = row_types(dtype, compute, vl)
    evens, odds = (ir.Constant(ir.VectorType(I32, vl), list(range(parity, 2 * vl, 2))) for parity in (0, 1))
    turns = [
        ir.Constant(ir.VectorType(I32, vl), [lane // 2 + lane % 2 * vl + half for lane in range(vl)])
        for half in (0, vl // 2)
    ]
    lines = [(d, h) for d in range(depths) for h in range(rows)]

    def codegen(context, builder, sig, args):
        x, dx, dy, n, row_bytes, plane_bytes = args
        numbers = ir.VectorType(I32, vl)
        behind = [
            builder.add(builder.mul(I64(d), plane_bytes), builder.mul(I64(h), row_bytes)) for d, h in lines
        ]  # fmt: skip

        def give(i, masks):
            """Of vl windows from number i on. masks: of the first and the second vector of a line, and of dy."""

            def value_at(start, at, mask):
                slot = element(builder, start, at, read, itemsize)
                return convert(builder, load(builder, slot, read, itemsize, mask), dtype, compute, vl)

            first = builder.mul(i, I64(_WIDTH))
            places = first, builder.add(first, I64(vl))
            best = taps = None
            for line, offset in enumerate(behind):
                start = builder.add(x, offset)
                parts = [value_at(start, at, mask) for at, mask in zip(places, masks, strict=False)]
                for s, order in enumerate((evens, odds)):
                    value, number = builder.shuffle_vector(*parts, order), constant(numbers, line * _WIDTH + s)
                    if best is None:
                        best, taps = value, number
                        continue
                    is_nan = builder.fcmp_unordered("uno", value, value)
                    wins = builder.or_(builder.fcmp_ordered(">", value, best), is_nan)
                    best, taps = builder.select(wins, value, best), builder.select(wins, number, taps)
            share, zero = value_at(dy, i, masks[2]), constant(wide, 0.0)
            for line, offset in enumerate(behind):
                there = [
                    builder.select(builder.icmp_signed("==", taps, constant(numbers, line * _WIDTH + s)), share, zero)
                    for s in range(_WIDTH)
                ]
                for at, mask, turn in zip(places, masks, turns, strict=False):
                    value = convert(builder, builder.shuffle_vector(*there, turn), compute, dtype, vl)
                    slot = element(builder, builder.add(dx, offset), at, read, itemsize)
                    if past_caches and mask is None:
                        store_past_caches(builder, value, slot)
                    else:
                        store(builder, value, slot, itemsize, mask)

        whole = builder.and_(n, I64(-vl))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(vl), I64) as (i, _):
            give(i, (None, None, None))
        with builder.if_then(builder.icmp_signed("<", whole, n)):
            left = builder.sub(n, whole)
            both = builder.mul(left, I64(_WIDTH))
            ends = both, builder.sub(both, I64(vl)), left
            give(whole, tuple(lanes_between(builder, vl, 0, None, end) for end in ends))
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, x, dx, dy, n, row_bytes, plane_bytes):
        return signature(types.none, *[types.int64] * 6), codegen

    return run


@cache
def _task(dtype: str, vl: int, depths: int, rows: int, past_caches: bool):
    """A run of rows of windows, counted over planes, depths and heights."""
    i64, at, data, itemsize = pointer("i64"), struct(_FIELDS), pointer(dtype), ITEMSIZE[dtype]
    give, stream = (_give_row(dtype, vl, depths, rows, past) for past in (False, past_caches))

    @njit(**DEVICE)
    def clear(address, n):
        line = data(address)
        for i in range(n):
            line[i] = 0

    @njit(**DEVICE)
    def clear_rest(f, dx, d, p):
        """What no window reaches beside and behind those of row (d, p). dx: where they begin."""
        plane, covered = f.in_h * f.in_w, f.out_w * _WIDTH
        for depth in range(depths):
            for row in range(rows if covered < f.in_w else 0):
                clear(dx + (depth * plane + row * f.in_w + covered) * itemsize, f.in_w - covered)
            if p == f.out_h - 1:
                clear(dx + (depth * plane + rows * f.in_w) * itemsize, (f.in_h - f.out_h * rows) * f.in_w)
        if d == f.out_d - 1 and p == f.out_h - 1:
            behind = depths * plane - p * rows * f.in_w
            clear(dx + behind * itemsize, (f.in_d - f.out_d * depths) * plane)

    def max_of_tiles(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        row_bytes = f.in_w * itemsize
        plane_bytes = f.in_h * row_bytes
        # Of whole vectors that are aligned.
        streams = past_caches and (pointers[3] | row_bytes) % (vl * itemsize) == 0 and f.out_w % vl == 0
        for row in range(index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)):
            p, rest = row % f.out_h, row // f.out_h
            d, image = rest % f.out_d, rest // f.out_d
            first = ((image * f.in_d + d * depths) * f.in_h + p * rows) * row_bytes
            x, dx, dy = pointers[0] + first, pointers[3] + first, pointers[2] + row * f.out_w * itemsize
            for depth in range(depths):
                ask_for(x + depth * plane_bytes + _AHEAD_BYTES, rows * row_bytes)
                if not streams:
                    ask_for(dx + depth * plane_bytes + _AHEAD_BYTES, rows * row_bytes)
            if streams:
                stream(x, dx, dy, f.out_w, row_bytes, plane_bytes)
            else:
                give(x, dx, dy, f.out_w, row_bytes, plane_bytes)
            clear_rest(f, dx, d, p)

    return compile_task(max_of_tiles, (dtype, vl, depths, rows, past_caches))


def max_of_tiles(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of planes that `tiles` is true of."""
    (depths, rows, _), vl = axes.taps, device.lanes(problem.compute)
    of_windows = problem.n * problem.c * axes.out[0] * axes.out[1]
    rows_a_task = ceil(of_windows / (device.threads * _TASKS_PER_THREAD))
    extents = {name: n for name, n in axes.fields().items() if name in (_FIELDS.names or ())}
    ctx = filled(_FIELDS, rows=of_windows, rows_a_task=rows_a_task, **extents)
    task = _task(problem.dtype, vl, depths, rows, streams(problem, device))
    return Program([Phase(task, ceil(of_windows / rows_a_task), ctx)], [])
