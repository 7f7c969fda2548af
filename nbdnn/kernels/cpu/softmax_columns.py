"""Softmax and its gradient on the CPU lane by lane: neighbours in a vector are elements of different rows.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

    columns      rows whose elements lie apart: a task takes so many neighbours that they stay in the second-level
                 cache from the first pass over them to the last; lines are asked for some elements ahead
    short_rows   rows of neighbours, too short for vectors of their own: a task's rows are turned about the diagonal
                 into a worker's scratch, and back

Traffic: every array once from memory. Sums in the compute type, in the order of the elements; exp is good to 2 ulp.
Source: own.
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
from nbdnn.kernels.cpu.rows import transpose
from nbdnn.kernels.cpu.vector import NARROW, WIDEN, filled, pointer, prefetch, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_LINE_BYTES, _ELEMENTS_AHEAD = 64, 8
_SECOND_LEVEL_SHARE, _LEAST_WIDTH, _MOST_WIDTH = 0.6, 16, 1024  # columns of a task: what stays in that cache
_SCRATCH_BYTES, _LONGEST_SHORT_ROW = 64 << 10, 128  # of a task's short rows, turned
_NS_PER_ELEM = {"columns": 0.5, "short_rows": 0.8}  # one thread: priors for the guess

_FIELDS = record("length", "inner", "width", "blocks", "rows", "scratch", "scratch_bytes")


@cache
def _forward_passes(dtype: str, algorithm: str):
    """Compiled-in function (y, x, step, powers, powers_step, shift, total, length, width), all of them addresses.

    Element i of the first column lies at x + i * step bytes. For a time its power is in y, or at powers + i *
    powers_step where y is of 16 bits. shift and total have room for a number a column. Nothing overlaps: loops over
    what does are no vectors.
    """
    compute = DEFAULT_COMPUTE[dtype]
    data, elements, exp = pointer(compute), pointer(dtype), EXP[compute]
    real, widen, narrow = float32 if compute == "f32" else float64, WIDEN[dtype], NARROW[dtype]
    ask_for, shifts, is_log, is_wide = _ask_for(dtype), algorithm != "fast", algorithm == "log", dtype == compute

    @njit(**DEVICE)
    def larger(found, line, width):
        most, x = data(found), elements(line)
        for j in range(width):
            value = widen(x[j])
            most[j] = value if value > most[j] else most[j]

    @njit(**DEVICE, fastmath=FASTMATH)
    def add_powers(sums, out, line, shift, width):
        total, powers, x, less = data(sums), data(out), elements(line), data(shift)
        for j in range(width):
            power = exp(widen(x[j]) - less[j])
            total[j] += power
            if not is_log:
                powers[j] = power

    @njit(**DEVICE, fastmath=FASTMATH)
    def finish(out, line, powers, shift, sums, width):
        x, y, power, less, total = elements(line), elements(out), data(powers), data(shift), data(sums)
        for j in range(width):
            if is_log:
                y[j] = narrow((widen(x[j]) - less[j]) - total[j])
            elif is_wide:
                y[j] *= total[j]
            else:
                y[j] = narrow(power[j] * total[j])

    @njit(**DEVICE)
    def passes(y, x, step, powers, powers_step, shift, total, length, width):
        less, sums = data(shift), data(total)
        for j in range(width):
            less[j], sums[j] = real(-np.inf) if shifts else real(0.0), real(0.0)
        if shifts:
            for i in range(length):
                ask_for(x + (i + _ELEMENTS_AHEAD) * step, width)
                larger(shift, x + i * step, width)
        for i in range(length):
            ask_for(y + (i + _ELEMENTS_AHEAD) * step, width)
            add_powers(total, y + i * step if is_wide else powers + i * powers_step, x + i * step, shift, width)
        for j in range(width):
            sums[j] = real(math.log(sums[j])) if is_log else real(1.0) / sums[j]
        for i in range(length):
            finish(y + i * step, x + i * step, powers + i * powers_step, shift, total, width)

    return passes


@cache
def _backward_passes(dtype: str, algorithm: str):
    """Compiled-in function (dx, dy, y, step, total, length, width), all of them addresses. Nothing overlaps."""
    compute = DEFAULT_COMPUTE[dtype]
    data, elements, exp = pointer(compute), pointer(dtype), EXP[compute]
    real, widen, narrow = float32 if compute == "f32" else float64, WIDEN[dtype], NARROW[dtype]
    ask_for, is_log = _ask_for(dtype), algorithm == "log"

    @njit(**DEVICE, fastmath=FASTMATH)
    def add_terms(sums, first, second, width):
        total, a, b = data(sums), elements(first), elements(second)
        for j in range(width):
            total[j] += widen(a[j]) if is_log else widen(a[j]) * widen(b[j])

    @njit(**DEVICE, fastmath=FASTMATH)
    def combine(out, first, second, sums, width):
        a, b, c, total = elements(first), elements(second), elements(out), data(sums)
        for j in range(width):
            dy, y = widen(a[j]), widen(b[j])
            c[j] = narrow(dy - exp(y) * total[j] if is_log else (dy - total[j]) * y)

    @njit(**DEVICE)
    def passes(dx, dy, y, step, total, length, width):
        sums = data(total)
        for j in range(width):
            sums[j] = real(0.0)
        for i in range(length):
            ask_for(dy + (i + _ELEMENTS_AHEAD) * step, width)
            ask_for(y + (i + _ELEMENTS_AHEAD) * step, width)
            add_terms(total, dy + i * step, y + i * step, width)
        for i in range(length):
            ask_for(dx + (i + _ELEMENTS_AHEAD) * step, width)
            combine(dx + i * step, dy + i * step, y + i * step, total, width)

    return passes


@cache
def _ask_for(dtype: str):
    """Compiled-in function (line, width). Lines that lie apart are no stream that a processor would see coming."""
    itemsize = ITEMSIZE[dtype]

    @njit(**DEVICE)
    def ask_for(line, width):
        for offset in range(0, width * itemsize, _LINE_BYTES):
            prefetch(line + offset)

    return ask_for


@cache
def _columns_task(dtype: str, algorithm: str, forward: bool):
    """`width` neighbouring columns of an image: shift and total of each in front of the powers of 16-bit data."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, itemsize, real_bytes = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype], ITEMSIZE[compute]
    passes = (_forward_passes if forward else _backward_passes)(dtype, algorithm)

    def softmax_columns(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        outer, block = index // f.blocks, index % f.blocks
        width = min(f.width, f.inner - block * f.width)
        start = (outer * f.length * f.inner + block * f.width) * itemsize
        step, pitch = f.inner * itemsize, f.width * real_bytes
        shift = f.scratch + worker * f.scratch_bytes
        x, y, powers = pointers[0] + start, pointers[1] + start, shift + 2 * pitch
        passes(y, x, step, powers, pitch, shift, shift + pitch, f.length, width)

    def gradient_columns(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        outer, block = index // f.blocks, index % f.blocks
        width = min(f.width, f.inner - block * f.width)
        start = (outer * f.length * f.inner + block * f.width) * itemsize
        total = f.scratch + worker * f.scratch_bytes
        dy, y, dx = pointers[0] + start, pointers[1] + start, pointers[2] + start
        passes(dx, dy, y, f.inner * itemsize, total, f.length, width)

    return compile_task(softmax_columns if forward else gradient_columns, (dtype, algorithm, forward))


@cache
def _short_rows_task(dtype: str, algorithm: str, forward: bool, vl: int):
    """`width` short rows, turned: shift and total of each in front of their elements."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, itemsize, real_bytes = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype], ITEMSIZE[compute]
    passes = (_forward_passes if forward else _backward_passes)(compute, algorithm)
    turn, turn_back = transpose(dtype, compute, vl), transpose(compute, dtype, vl)

    def softmax_short_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        width, row_bytes, pitch = min(f.width, f.rows - index * f.width), f.length * itemsize, f.width * real_bytes
        start = index * f.width * row_bytes
        shift = f.scratch + worker * f.scratch_bytes
        x, y = shift + 2 * pitch, shift + (2 + f.length) * pitch
        turn(x, pitch, pointers[0] + start, row_bytes, width, f.length)
        passes(y, x, pitch, y, pitch, shift, shift + pitch, f.length, width)
        turn_back(pointers[1] + start, row_bytes, y, pitch, f.length, width)

    def gradient_short_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        width, row_bytes, pitch = min(f.width, f.rows - index * f.width), f.length * itemsize, f.width * real_bytes
        start = index * f.width * row_bytes
        total = f.scratch + worker * f.scratch_bytes
        dy, turned_bytes = total + 2 * pitch, f.length * pitch
        y, dx = dy + turned_bytes, dy + 2 * turned_bytes
        turn(dy, pitch, pointers[0] + start, row_bytes, width, f.length)
        turn(y, pitch, pointers[1] + start, row_bytes, width, f.length)
        passes(dx, dy, y, pitch, total, f.length, width)
        turn_back(pointers[2] + start, row_bytes, dx, pitch, f.length, width)

    return compile_task(softmax_short_rows if forward else gradient_short_rows, (dtype, algorithm, forward, vl))


class _LaneByLane(Candidate[NoConfig, Cpu]):
    provider = "cpu"

    def __init__(self, op: str) -> None:
        self.op = op

    def estimate(self, problem: SoftmaxProblem, config: NoConfig, device: Cpu) -> float:
        lanes = problem.rows[2] if self.algorithm == "columns" else problem.rows[0]
        lanes_used = min(1.0, lanes / device.lanes(problem.compute))
        elements = problem.operands[0].size_elems
        return kernel_us(device, 0.0, elements * _NS_PER_ELEM[self.algorithm] / lanes_used, device.threads)


class ShortRows(_LaneByLane):
    """Rows of neighbours, shorter than what makes vectors of their own worth while."""

    algorithm = "short_rows"

    def supports(self, problem: SoftmaxProblem, device: Cpu) -> Support:
        _, length, inner = problem.rows
        if inner > 1:
            return Support(False, f"elements of a row lie {inner} apart, not side by side")
        if length > _LONGEST_SHORT_ROW:
            return Support(False, f"{length} elements a row, more than {_LONGEST_SHORT_ROW} are not short")
        return YES

    def prepare(self, problem: SoftmaxProblem, config: NoConfig, device: Cpu) -> Program:
        rows, length, _ = problem.rows
        forward, compute = self.op == "softmax_fwd", problem.compute
        vl, column_bytes = device.lanes(compute), length * len(problem.operands) * ITEMSIZE[compute]
        width = max(_SCRATCH_BYTES // max(column_bytes, 1) // vl, 1) * vl
        scratch = _Scratch(device.threads, column_bytes * width + 2 * width * ITEMSIZE[compute])
        ctx = scratch.record(length=length, inner=1, width=width, blocks=1, rows=rows)
        task = _short_rows_task(problem.dtype, problem.algorithm, forward, vl)
        return Program([Phase(task, ceil(rows / width), ctx)], [scratch.memory])


class Columns(_LaneByLane):
    """Neighbours are elements of different rows; supports every softmax."""

    algorithm = "columns"

    def supports(self, problem: SoftmaxProblem, device: Cpu) -> Support:
        return YES

    def prepare(self, problem: SoftmaxProblem, config: NoConfig, device: Cpu) -> Program:
        outer, length, inner = problem.rows
        forward, compute = self.op == "softmax_fwd", problem.compute
        vl, row_bytes = device.lanes(compute), length * ITEMSIZE[problem.dtype] * len(problem.operands)
        fitting = int(_SECOND_LEVEL_SHARE * device.l2_bytes) // max(row_bytes, 1)
        width = min(max(fitting // vl * vl, _LEAST_WIDTH), _MOST_WIDTH, inner)
        keeps_powers = forward and problem.dtype != compute and problem.algorithm != "log"
        scratch = _Scratch(device.threads, (length * keeps_powers + 2) * width * ITEMSIZE[compute])
        blocks = ceil(inner / width)
        ctx = scratch.record(length=length, inner=inner, width=width, blocks=blocks, rows=0)
        task = _columns_task(problem.dtype, problem.algorithm, forward)
        return Program([Phase(task, outer * blocks, ctx)], [scratch.memory])


class _Scratch:
    """So many bytes for each thread, on cache lines of its own."""

    def __init__(self, threads: int, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
        self.memory = np.empty(threads * self.size_bytes + _LINE_BYTES, np.uint8)

    def record(self, **values: int) -> np.ndarray:
        """The fields of a task."""
        start = self.memory.ctypes.data + -self.memory.ctypes.data % _LINE_BYTES
        return filled(_FIELDS, scratch=start, scratch_bytes=self.size_bytes, **values)


FWD_SHORT_ROWS, FWD = ShortRows("softmax_fwd"), Columns("softmax_fwd")
BWD_SHORT_ROWS, BWD = ShortRows("softmax_bwd"), Columns("softmax_bwd")
