"""Pooling and its gradient on the CPU: windows are joined down the rows first, then along them.

    y[p, q] = join over s of line[q*u + s],  line[j] = join over r of x[p*u + r - pad, j - pad];   join: max or sum
    dx[i, j] = sum over q of line[q],        line[q] = sum over p of dy[p, q] / count[p, q],  windows that cover it

A task is a run of output rows; a row is the pixels of one channel, or channels-last the channels of all its pixels, so
that either layout is joined by whole vectors. Windows that take all of a plane are in `pool_whole.py`, the gradient of
a maximum in `pool_max_channels.py`, `pool_max_planes.py` and, of windows that tile a plane, `pool_tiles.py`.

Traffic: x and y (dy and dx) once from memory; rows of overlapping windows again from cache. Sums in float32 (float64).
Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

import numpy as np

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes, axes_of
from nbdnn.kernels.cpu.pool_max_channels import max_of_channels
from nbdnn.kernels.cpu.pool_max_planes import max_of_planes
from nbdnn.kernels.cpu.pool_rows import (
    FIELDS,
    across,
    add_scaled_row,
    fill,
    join_row,
    known_step,
    real_of,
    spread,
)
from nbdnn.kernels.cpu.pool_tiles import max_of_tiles, tiles
from nbdnn.kernels.cpu.pool_whole import takes_all, whole_planes
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.scratch import Scratch, whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD = 8
_NS_PER_ELEM, _NS_PER_TAP = 0.25, 0.15  # one thread: priors for the guess


@cache
def _forward_task(dtype: str, is_max: bool, known: int, vl: int):
    """A run of rows of y: rows are counted over planes, depths and heights."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, data, (real, lowest) = pointer("i64"), struct(FIELDS), pointer(compute), real_of(dtype)
    itemsize, real_bytes, neutral = ITEMSIZE[dtype], ITEMSIZE[compute], lowest if is_max else real(0.0)
    join, along, clear, narrow_row = (
        join_row(dtype, is_max), across(dtype, is_max, known), fill(dtype), convert_row(compute, dtype, vl),
    )  # fmt: skip

    def pool_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        line = f.scratch + worker * f.scratch_bytes
        found = line + f.line_bytes
        inside, width, out_width = line + f.pad_w * f.inner * real_bytes, f.in_w * f.inner, f.out_w * f.inner
        clear(line, (f.in_w + 2 * f.pad_w) * f.inner, neutral)
        for row in range(index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)):
            p, rest = row % f.out_h, row // f.out_h
            d, plane = rest % f.out_d, rest // f.out_d
            first_d, first_h = d * f.step_d - f.pad_d, p * f.step_h - f.pad_h
            low_d, end_d = max(first_d, 0), min(first_d + f.taps_d, f.in_d)
            low_h, end_h = max(first_h, 0), min(first_h + f.taps_h, f.in_h)
            if low_d >= end_d or low_h >= end_h:
                clear(inside, width, neutral)
            for depth in range(low_d, end_d):
                for h in range(low_h, end_h):
                    source = pointers[0] + ((plane * f.in_d + depth) * f.in_h + h) * width * itemsize
                    join(inside, source, width, depth == low_d and h == low_h)
            along(found, line, f.out_w, f.taps_w, f.step_w, f.inner)
            if f.averages:
                lines = (end_d - low_d) * (end_h - low_h) if f.excludes_pad else f.taps_d * f.taps_h
                for q in range(f.out_w):
                    first = q * f.step_w - f.pad_w
                    inside_w = min(first + f.taps_w, f.in_w) - max(first, 0) if f.excludes_pad else f.taps_w
                    scale = real(1.0) / real(max(lines * inside_w, 1))
                    for j in range(q * f.inner, (q + 1) * f.inner):
                        data(found)[j] *= scale
            narrow_row(pointers[1] + row * out_width * itemsize, found, out_width)

    return compile_task(pool_rows, (dtype, is_max, known, vl))


@cache
def _sum_gradient_task(dtype: str, known: int, vl: int):
    """A run of rows of dx."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, data, (real, _) = pointer("i64"), struct(FIELDS), pointer(compute), real_of(dtype)
    itemsize, real_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    add, along, clear, narrow_row = (
        add_scaled_row(dtype), spread(dtype, known), fill(dtype), convert_row(compute, dtype, vl),
    )  # fmt: skip

    def spread_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        line = f.scratch + worker * f.scratch_bytes
        found = line + f.line_bytes
        inside, width, out_width = line + f.pad_w * f.inner * real_bytes, f.in_w * f.inner, f.out_w * f.inner
        for row in range(index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)):
            h, rest = row % f.in_h + f.pad_h, row // f.in_h
            depth, plane = rest % f.in_d + f.pad_d, rest // f.in_d
            clear(found, out_width, real(0.0))
            for d in range(max(0, (depth - f.taps_d) // f.step_d + 1), min(f.out_d, depth // f.step_d + 1)):
                first_d = d * f.step_d - f.pad_d
                inside_d = min(first_d + f.taps_d, f.in_d) - max(first_d, 0) if f.excludes_pad else f.taps_d
                for p in range(max(0, (h - f.taps_h) // f.step_h + 1), min(f.out_h, h // f.step_h + 1)):
                    first_h = p * f.step_h - f.pad_h
                    inside_h = min(first_h + f.taps_h, f.in_h) - max(first_h, 0) if f.excludes_pad else f.taps_h
                    lines = inside_d * inside_h * (1 if f.excludes_pad else f.taps_w) if f.averages else 1
                    source = pointers[0] + ((plane * f.out_d + d) * f.out_h + p) * out_width * itemsize
                    add(found, source, out_width, real(1.0) / real(lines))
            if f.excludes_pad:
                for q in range(f.out_w):
                    first = q * f.step_w - f.pad_w
                    scale = real(1.0) / real(max(min(first + f.taps_w, f.in_w) - max(first, 0), 1))
                    for j in range(q * f.inner, (q + 1) * f.inner):
                        data(found)[j] *= scale
            clear(line, (f.in_w + 2 * f.pad_w) * f.inner, real(0.0))
            along(line, found, f.out_w, f.taps_w, f.step_w, f.inner)
            narrow_row(pointers[1] + row * width * itemsize, inside, width)

    return compile_task(spread_rows, (dtype, known, vl))


class Rows(Candidate[NoConfig, Cpu]):
    """Windows row by row; supports every pooling."""

    provider, algorithm = "cpu", "rows"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: PoolProblem, device: Cpu) -> Support:
        return YES

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> float:
        elements = sum(operand.size_elems for operand in problem.operands)
        elem_ns, taps, tap_ns = _NS_PER_ELEM, prod(problem.window), _NS_PER_TAP
        axes = axes_of(problem)
        if self.op == "pool_bwd" and problem.is_max:
            elem_ns, taps, tap_ns = self._maxima_ns(problem, axes, device)
        elif problem.channels_last:
            # Rows of x are joined down, then along; of a gradient rows of dy.
            wider = axes.step[2] if self.op == "pool_fwd" else 1
            taps = prod(axes.taps[:2]) * wider + axes.taps[2]
            elem_ns, tap_ns = 0.1, fitted(device, 0.045, 0.55 if problem.is_max else 0.2)
        return kernel_us(device, 0.0, elements * elem_ns + prod(problem.y_shape) * taps * tap_ns, device.threads)

    def _maxima_ns(self, problem: PoolProblem, axes: Axes, device: Cpu) -> tuple[float, int, float]:
        """Nanoseconds an element of all operands, taps an axis at a time, and nanoseconds a tap."""
        if not problem.channels_last and tiles(axes):
            return 0.2, 0, 0.0
        if not problem.channels_last:
            elem_ns, tap_ns = fitted(device, (0.3, 0.3), (0.4, 0.4))
        elif axes.taps[0] > 1:
            elem_ns, tap_ns = fitted(device, (0.4, 0.3), (0.6, 0.4))
        else:
            elem_ns, tap_ns = fitted(device, (0.15, 0.08), (0.37, 0.12))
        return elem_ns, sum(axes.taps), tap_ns

    def prepare(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> Program:
        vl, axes = device.lanes(problem.compute), axes_of(problem)
        is_max_gradient = problem.is_max and self.op == "pool_bwd"
        if takes_all(axes) and not (problem.channels_last and (is_max_gradient or self.op == "pool_fwd")):
            return whole_planes(problem, axes, device)
        if is_max_gradient and not problem.channels_last and tiles(axes):
            return max_of_tiles(problem, axes, device)
        if is_max_gradient:
            return (max_of_channels if problem.channels_last else max_of_planes)(problem, axes, device)
        known = known_step(axes.step[-1])
        if self.op == "pool_fwd":
            task = _forward_task(problem.dtype, problem.is_max, known, vl)
        else:
            task = _sum_gradient_task(problem.dtype, known, vl)
        tasks, ctx, scratch = _placed(problem, axes, device)
        return Program([Phase(task, tasks, ctx)], [scratch])


def _placed(problem: PoolProblem, axes: Axes, device: Cpu) -> tuple[int, np.ndarray, np.ndarray]:
    """(tasks, their record, the workers' scratch) of a problem that needs no search."""
    inner, real_bytes = problem.c if problem.channels_last else 1, ITEMSIZE[problem.compute]
    line_bytes = whole_lines((axes.extent[2] + 2 * axes.pad[2]) * inner * real_bytes)
    scratch_bytes = line_bytes + whole_lines(axes.out[2] * inner * real_bytes)
    target = axes.out if problem.op == "pool_fwd" else axes.extent
    rows = problem.n * problem.c // inner * target[0] * target[1]
    rows_a_task = ceil(rows / (device.threads * _TASKS_PER_THREAD))
    scratch = Scratch(device, scratch_bytes)
    ctx = filled(
        FIELDS,
        **axes.fields(),
        rows=rows,
        rows_a_task=rows_a_task,
        inner=inner,
        averages=problem.mode.startswith("average"),
        excludes_pad=problem.mode == "average_exc_pad",
        scratch=scratch.start,
        scratch_bytes=scratch.size_bytes,
        line_bytes=line_bytes,
    )
    return ceil(rows / rows_a_task), ctx, scratch.memory


FWD, BWD = Rows("pool_fwd"), Rows("pool_bwd")
