"""Pooling of planes by windows that slide down the rows, and the gradient of sums.

    y[p, q] = join over r of line[p*u + r - pad, q],   line[i, q] = join over s of x[i, q*u + s - pad];  max or sum
    dx[i, j] = sum over p of line[p, j],               line[p, j] = sum over q of dy[p, q] / count[p, q], windows that
                                                                    cover i, and j

A vector is that many windows of a row (`pool_lines_join.py`), or elements of dx with one remainder by the stride
(`pool_lines_spread.py`). It goes down the rows, and what a line comes to stays in registers as long as it is wanted, so
that each line is met once.

Traffic: x and y (dy and dx) once from memory. Sums in float32 (float64). Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes, axes_of
from nbdnn.kernels.cpu.pool_lines import CAREFUL, SAFE, Row
from nbdnn.kernels.cpu.pool_lines_join import join_lines
from nbdnn.kernels.cpu.pool_lines_spread import reaching, spread_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD = 16
_LEAST_LANES = 4
_MOST_TAPS, _MOST_STEPS = (16, 16), (16, 8)  # rows and columns: all are met without a loop
_BLOCK_BYTES = 8192  # of x or dx: lines that one column goes down before the next; more where windows share many
_NS_PER_ELEM, _NS_PER_TAP = 0.08, 0.02  # one thread: priors for the guess

# along, across: the weights of a gradient's windows.
_FIELDS = record(
    *("planes", "lines_a_task", "along", "across", "in_d", "in_h", "in_w", "out_d", "out_h", "out_w"),
    *("taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w", "pad_d", "pad_h", "pad_w"),
)


@cache
def _task(row: Row, taps_h: int, step_h: int, mode: str, is_narrow: bool):
    """A run of lines of y, counted over planes, depths and rows."""
    i64, at, itemsize = pointer("i64"), struct(_FIELDS), ITEMSIZE[row.dtype]
    join = join_lines(row, taps_h, step_h, mode, is_narrow)
    before, behind = -(-row.pad // row.step) * row.step * itemsize, (row.step * row.vl + row.taps) * itemsize

    @njit(**DEVICE)
    def lines_of(f, pointers, plane, d, p, count):
        line_bytes, out_bytes = f.in_w * itemsize, f.out_w * itemsize
        plane_bytes = f.in_h * line_bytes
        first_d, first_h = d * f.step_d - f.pad_d, p * f.step_h - f.pad_h
        low_d = max(first_d, 0)
        planes = max(0, min(first_d + f.taps_d, f.in_d) - low_d)
        x, how = pointers[0] + (plane * f.in_d + low_d) * plane_bytes, SAFE
        end = max(0, planes - 1) * plane_bytes + min(f.in_h, first_h + (count - 1) * f.step_h + f.taps_h) * line_bytes
        is_first = x + max(first_h, 0) * line_bytes - before < pointers[0]
        if is_first or x + end + behind > pointers[0] + f.planes * f.in_d * plane_bytes:
            how = CAREFUL
        y = pointers[1] + ((plane * f.out_d + d) * f.out_h + p) * out_bytes
        taps = f.taps_d * f.taps_h * f.taps_w
        join(how, count, x, line_bytes, plane_bytes, y, out_bytes, f.in_w, f.out_w, f.in_h, first_h, planes, taps)

    def slide(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        line, end = index * f.lines_a_task, min(f.planes * f.out_d * f.out_h, (index + 1) * f.lines_a_task)
        few = max(4 * taps_h // step_h, _BLOCK_BYTES // (step_h * f.in_w * itemsize), 1)
        while line < end:
            p, rest = line % f.out_h, line // f.out_h
            count = min(few, f.out_h - p, end - line)
            lines_of(f, pointers, rest // f.out_d, rest % f.out_d, p, count)
            line += count

    return compile_task(slide, (row, taps_h, step_h, mode, is_narrow))


@cache
def _gradient_task(row: Row, taps_h: int, step_h: int, pad_h: int, scaling: str, end: str):
    """A run of lines of dx, step_h at once, counted over planes, depths and rows."""
    i64, at = pointer("i64"), struct(_FIELDS)
    itemsize, wide_bytes = ITEMSIZE[row.dtype], ITEMSIZE[DEFAULT_COMPUTE[row.dtype]]
    spread = spread_lines(row, taps_h, step_h, pad_h, scaling, end)
    every_line = [away for some in reaching(taps_h, step_h, pad_h) for away in some]
    first_line, last_line = min(every_line), max(every_line)
    slack = 2 * (row.vl + row.taps) * itemsize

    @njit(**DEVICE)
    def lines_of(f, pointers, plane, depth, k, count):
        line_bytes, out_bytes = f.in_w * itemsize, f.out_w * itemsize
        dx = pointers[1] + (plane * f.in_d + depth) * f.in_h * line_bytes
        depth += f.pad_d
        from_d, to_d = max(0, (depth - f.taps_d) // f.step_d + 1), min(f.out_d, depth // f.step_d + 1)
        planes = max(0, to_d - from_d)
        dy = pointers[0] + (plane * f.out_d + from_d) * f.out_h * out_bytes
        first, last = max(0, k + first_line), min(f.out_h, k + count + last_line)
        how, dy_end = SAFE, dy + (max(0, planes - 1) * f.out_h + last) * out_bytes
        beyond = pointers[0] + f.planes * f.out_d * f.out_h * out_bytes
        if dy + first * out_bytes - slack < pointers[0] or dy_end + slack > beyond:
            how = CAREFUL
        across = f.across + from_d * f.out_h * wide_bytes
        taps = f.taps_d * f.taps_h * f.taps_w
        spread(how, count, dx, line_bytes, dy, out_bytes, f.out_h * out_bytes, f.in_w, f.out_w, f.in_h, f.out_h, k,
               planes, taps, f.along, across)  # fmt: skip

    def slide_back(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        runs = -(-f.in_h // f.step_h)
        line, end = index * f.lines_a_task, min(f.planes * f.in_d * runs, (index + 1) * f.lines_a_task)
        few = max(4 * taps_h // step_h, _BLOCK_BYTES // (step_h * f.in_w * itemsize), 1)
        while line < end:
            k, rest = line % runs, line // runs
            count = min(few, runs - k, end - line)
            lines_of(f, pointers, rest // f.in_d, rest % f.in_d, k, count)
            line += count

    return compile_task(slide_back, (row, taps_h, step_h, pad_h, scaling, end))


def _weights(axes: Axes, row: Row) -> tuple[int, int, list[np.ndarray]]:
    """Of averages over what is inside of the image: addresses of the first window's along a line, which has room for
    vectors on both sides, and of the first line's across lines; and whose memory it is."""

    def inside(axis: int) -> np.ndarray:
        first = np.arange(axes.out[axis]) * axes.step[axis] - axes.pad[axis]
        return np.minimum(first + axes.taps[axis], axes.extent[axis]) - np.maximum(first, 0)

    real, margin = np.dtype(DEFAULT_COMPUTE[row.dtype].replace("f", "float")), row.vl + row.taps
    along = np.zeros(2 * margin + max(axes.extent[2], axes.out[2]), real)
    along[margin : margin + axes.out[2]] = 1 / np.maximum(inside(2), 1)
    across = (1 / np.maximum(np.multiply.outer(inside(0), inside(1)), 1)).astype(real)
    return along[margin:].ctypes.data, across.ctypes.data, [along, across]


class Sliding(Candidate[NoConfig, Cpu]):
    """Windows of planes, of up to 16 rows and columns."""

    provider, algorithm = "cpu", "sliding"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: PoolProblem, device: Cpu) -> Support:
        if problem.channels_last:
            return Support(False, "the image is channels-last, this kernel takes planes")
        axes = axes_of(problem)
        for what, (_, rows, columns), most in (("as large", axes.taps, _MOST_TAPS), ("apart", axes.step, _MOST_STEPS)):
            if rows > most[0] or columns > most[1]:
                return Support(False, f"windows are {rows} x {columns} {what}, this kernel takes {most[0]} x {most[1]}")
        if self.op == "pool_bwd" and problem.is_max:
            return Support(False, f"mode is {problem.mode}, this kernel takes the gradient of sums and averages")
        return YES

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> float:
        axes = axes_of(problem)
        taps = axes.taps[0] * axes.taps[2] + axes.taps[1]
        elements = sum(operand.size_elems for operand in problem.operands)
        side_ns = elements * _NS_PER_ELEM + prod(problem.y_shape) * taps * _NS_PER_TAP
        return kernel_us(device, 0.0, side_ns, device.threads)

    def prepare(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> Program:
        axes, is_forward = axes_of(problem), self.op == "pool_fwd"
        depths, rows, columns = axes.out if is_forward else axes.extent
        if not is_forward:
            rows, columns = ceil(rows / axes.step[1]), ceil(columns / axes.step[2])
        vl = device.lanes(problem.compute)
        while vl > _LEAST_LANES and columns <= vl // 2:
            vl //= 2
        row = Row(problem.dtype, vl, axes.taps[2], axes.step[2], axes.pad[2], axes.is_deep)
        along, across, weights = 0, 0, list[np.ndarray]()
        if is_forward:
            task = _task(row, axes.taps[1], axes.step[1], problem.mode, columns < vl)
        else:
            scaling, end = "mean" if problem.mode.startswith("average") else "none", "whole"
            if problem.mode == "average_exc_pad" and any(axes.pad):
                scaling, (along, across, weights) = "weights", _weights(axes, row)
            if axes.extent[2] // axes.step[2] < vl:
                end = "narrow"
            elif axes.extent[2] % axes.step[2]:
                end = "odd"
            task = _gradient_task(row, axes.taps[1], axes.step[1], axes.pad[1], scaling, end)
        lines = problem.n * problem.c * depths * rows
        ctx = filled(
            _FIELDS,
            **axes.fields(),
            planes=problem.n * problem.c,
            lines_a_task=ceil(lines / (device.threads * _TASKS_PER_THREAD)),
            along=along,
            across=across,
        )
        return Program([Phase(task, ceil(lines / ctx["lines_a_task"][0]), ctx)], weights)


FWD, BWD = Sliding("pool_fwd"), Sliding("pool_bwd")
