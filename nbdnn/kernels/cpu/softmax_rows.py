"""Softmax and its gradient on the CPU where the elements of a row are neighbours.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

A task is a run of rows; each is read for its maximum, for its exponentials and to be scaled. Traffic: every array once
from memory where a row stays in cache; 16-bit rows are widened into a worker's scratch. Sums in the compute type, of
many lanes each; exp is good to 2 ulp. Source: own.
"""

from __future__ import annotations

import math
from functools import cache
from math import ceil

import numpy as np
from numba import float32, float64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.exponential import EXP
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.scratch import Scratch, whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_LANES = 64  # independent maxima of a row: several whole vectors on every machine
_TASKS_PER_THREAD = 8
_REASSOCIATED = FASTMATH | {"reassoc"}
# One thread: priors for the guess. A forward row's maximum is one of many lanes, however short it is.
_NS_PER_ELEM, _NS_PER_ROW = {"softmax_fwd": 0.5, "softmax_bwd": 0.25}, {"softmax_fwd": 40.0, "softmax_bwd": 4.0}

_FIELDS = record("rows", "rows_a_task", "length", "scratch", "scratch_bytes")


@cache
def _vector_loops(compute: str, algorithm: str):
    """Compiled-in functions over one run of elements: (maximum, exponentials and their sum, finished)."""
    data, exp = pointer(compute), EXP[compute]
    real = float32 if compute == "f32" else float64
    lanes_of = stack(_LANES * ITEMSIZE[compute])
    is_log = algorithm == "log"

    @njit(**DEVICE)
    def maximum(source, n):
        x, lanes = data(source), data(lanes_of())
        whole = n // _LANES * _LANES
        for j in range(_LANES):
            lanes[j] = real(-np.inf)
        for i in range(0, whole, _LANES):
            for j in range(_LANES):
                lanes[j] = x[i + j] if x[i + j] > lanes[j] else lanes[j]
        for j in range(n - whole):
            lanes[j] = x[whole + j] if x[whole + j] > lanes[j] else lanes[j]
        for half in (_LANES // 2, _LANES // 4, _LANES // 8):
            for j in range(half):
                lanes[j] = lanes[half + j] if lanes[half + j] > lanes[j] else lanes[j]
        found = lanes[0]
        for j in range(1, _LANES // 8):
            found = lanes[j] if lanes[j] > found else found
        return found

    @njit(**DEVICE, fastmath=_REASSOCIATED)
    def sum_of_powers(target, source, n, shift):
        """Stores the powers, but for the logarithm, which needs their sum only."""
        x, y, total = data(source), data(target), real(0.0)
        if is_log:
            for i in range(n):
                total += exp(x[i] - shift)
        else:
            for i in range(n):
                power = exp(x[i] - shift)
                y[i] = power
                total += power
        return total

    @njit(**DEVICE, fastmath=FASTMATH)
    def finish(target, source, n, shift, total):
        x, y = data(source), data(target)
        if is_log:
            offset = real(math.log(total))  # less than the shift may be: added to that, it would lose its digits
            for i in range(n):
                y[i] = (x[i] - shift) - offset
        else:
            scale = real(1.0) / total
            for i in range(n):
                y[i] *= scale

    return maximum, sum_of_powers, finish


@cache
def _rows_task(dtype: str, algorithm: str, forward: bool, vl: int):
    """A run of rows whose elements are neighbours."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, real = pointer("i64"), struct(_FIELDS), float32 if compute == "f32" else float64
    widen_row, narrow_row = convert_row(dtype, compute, vl), convert_row(compute, dtype, vl)
    itemsize, is_wide, shifts = ITEMSIZE[dtype], dtype == compute, algorithm != "fast"
    maximum, sum_of_powers, finish = _vector_loops(compute, algorithm)
    dot, combine = _gradient_loops(compute, algorithm)

    def softmax_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        scratch = f.scratch + worker * f.scratch_bytes
        for row in range(index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)):
            start = row * f.length * itemsize
            source, target = pointers[0] + start, pointers[1] + start
            if not is_wide:
                widen_row(scratch, source, f.length)
                source, target = scratch, scratch + f.scratch_bytes // 2
            shift = maximum(source, f.length) if shifts else real(0.0)
            total = sum_of_powers(target, source, f.length, shift)
            finish(target, source, f.length, shift, total)
            if not is_wide:
                narrow_row(pointers[1] + start, target, f.length)

    def gradient_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        scratch = f.scratch + worker * f.scratch_bytes
        for row in range(index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)):
            start = row * f.length * itemsize
            dy, y, dx = pointers[0] + start, pointers[1] + start, pointers[2] + start
            if not is_wide:
                second, third = scratch + f.scratch_bytes // 3, scratch + 2 * (f.scratch_bytes // 3)
                widen_row(scratch, dy, f.length)
                widen_row(second, y, f.length)
                dy, y, dx = scratch, second, third
            combine(dx, dy, y, f.length, dot(dy, y, f.length))
            if not is_wide:
                narrow_row(pointers[2] + start, dx, f.length)

    return compile_task(softmax_rows if forward else gradient_rows, (dtype, algorithm, forward, vl))


@cache
def _gradient_loops(compute: str, algorithm: str):
    """Compiled-in functions over one run of elements: (what is summed, the gradient)."""
    data, exp = pointer(compute), EXP[compute]
    real = float32 if compute == "f32" else float64
    is_log = algorithm == "log"

    @njit(**DEVICE, fastmath=_REASSOCIATED)
    def dot(dy, y, n):
        a, b, total = data(dy), data(y), real(0.0)
        for i in range(n):
            total += a[i] if is_log else a[i] * b[i]
        return total

    @njit(**DEVICE, fastmath=FASTMATH)
    def combine(dx, dy, y, n, total):
        a, b, c = data(dy), data(y), data(dx)
        for i in range(n):
            c[i] = a[i] - exp(b[i]) * total if is_log else (a[i] - total) * b[i]

    return dot, combine


class Rows(Candidate[NoConfig, Cpu]):
    """Elements of a row are neighbours."""

    provider, algorithm = "cpu", "rows"

    def __init__(self, op: str) -> None:
        self.op = op

    def estimate(self, problem: SoftmaxProblem, config: NoConfig, device: Cpu) -> float:
        rows, length, _ = problem.rows
        busy_ns = rows * (length * _NS_PER_ELEM[self.op] + _NS_PER_ROW[self.op])
        return kernel_us(device, 0.0, busy_ns, device.threads)

    def supports(self, problem: SoftmaxProblem, device: Cpu) -> Support:
        inner = problem.rows[2]
        return YES if inner == 1 else Support(False, f"elements of a row lie {inner} apart, not side by side")

    def prepare(self, problem: SoftmaxProblem, config: NoConfig, device: Cpu) -> Program:
        rows, length, _ = problem.rows
        forward, compute = self.op == "softmax_fwd", problem.compute
        vl = device.lanes(compute)
        # Every widened row has its own: loops that store to what they read are not vectorised.
        rows_held = 0 if problem.dtype == compute else len(problem.operands)
        scratch = Scratch(device, rows_held * whole_lines(length * ITEMSIZE[compute]))
        rows_a_task = ceil(rows / (device.threads * _TASKS_PER_THREAD))
        ctx = filled(
            _FIELDS,
            rows=rows,
            rows_a_task=rows_a_task,
            length=length,
            scratch=scratch.start,
            scratch_bytes=scratch.size_bytes,
        )
        task = _rows_task(problem.dtype, problem.algorithm, forward, vl)
        return Program([Phase(task, ceil(rows / rows_a_task), ctx)], [scratch.memory])


FWD, BWD = Rows("softmax_fwd"), Rows("softmax_bwd")
