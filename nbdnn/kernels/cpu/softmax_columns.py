"""Softmax and its gradient on the CPU lane by lane: neighbours in a vector are elements of different rows.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

    columns      rows whose elements lie apart: a task is a run of neighbours, some vectors of them at a time; the lines
                 of the next are asked for meanwhile
    short_rows   rows of neighbours, too short for vectors of their own: as many rows as some vectors have lanes are
                 turned about the diagonal into a worker's scratch, and back

Traffic: every array once from memory, from where a strip's elements go to a worker's scratch (`softmax_vector.py`).
Sums in the compute type, in the order of the elements, of long columns by parts; exp is good to 2 ulp. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.scratch import Scratch
from nbdnn.kernels.cpu.softmax_vector import backward_columns, collect, deal, forward_columns
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

# Vectors of a strip: the most of which the elements fit. Wider ones where a gradient's leave the first-level cache
# before they are read again: 0.22 ms of 2x150x64x64 instead of 0.28, but 0.39 instead of 0.33 for the logarithm of
# 4x21x128x128 (a Zen 5 thread).
_APART, _WIDEST, _TURNED = (8, 4, 2, 1), 16, (4, 2, 1)
_FIRST_LEVEL_BYTES, _SECOND_LEVEL_SHARE = 32 << 10, 0.25
_LONGEST_SHORT_ROW = 32
_FEW = 4096  # elements of a column that are added one after the other
_TASKS_PER_THREAD = 8
_NS_PER_ELEM = {"columns": 0.25, "short_rows": 0.4}  # one thread: priors for the guess

_FIELDS = record("length", "inner", "width", "blocks", "rows", "scratch", "scratch_bytes")


@cache
def _columns_task(dtype: str, algorithm: str, forward: bool, vl: int, vectors: int, few: bool):
    """`width` neighbouring columns of an image."""
    i64, at, itemsize = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype]
    passes = (forward_columns if forward else backward_columns)(dtype, algorithm, vl, vectors, few)

    def softmax_columns(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        outer, block = index // f.blocks, index % f.blocks
        width = min(f.width, f.inner - block * f.width)
        start = (outer * f.length * f.inner + block * f.width) * itemsize
        kept = f.scratch + worker * f.scratch_bytes
        passes(width, pointers[1] + start, pointers[0] + start, f.inner * itemsize, kept, f.length)

    def gradient_columns(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        outer, block = index // f.blocks, index % f.blocks
        width = min(f.width, f.inner - block * f.width)
        start = (outer * f.length * f.inner + block * f.width) * itemsize
        passes(width, pointers[2] + start, pointers[0] + start, pointers[1] + start, f.inner * itemsize, f.length)

    key = dtype, algorithm, forward, vl, vectors, few
    return compile_task(softmax_columns if forward else gradient_columns, key)


@cache
def _turned(dtype: str, vl: int, vectors: int, known: int):
    """Compiled-in functions (lines, start, rows, length): rows turned into lines of `vectors` vectors; and back.

    known: their length where as many rows as there are lanes are turned as whole vectors, else 0.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, vector_bytes = ITEMSIZE[dtype], vl * ITEMSIZE[compute]
    turn, turn_back = transpose(dtype, compute, vl), transpose(compute, dtype, vl)
    dealt, collected = deal(dtype, vl, known or 1), collect(dtype, vl, known or 1)
    pitch = vectors * vector_bytes

    @njit(**DEVICE)
    def to_lines(lines, start, rows, length):
        if known and rows == vectors * vl:
            for k in range(vectors):
                dealt(lines + k * vector_bytes, pitch, start + k * vl * known * itemsize)
        else:
            turn(lines, pitch, start, length * itemsize, rows, length)

    @njit(**DEVICE)
    def from_lines(lines, start, rows, length):
        if known and rows == vectors * vl:
            for k in range(vectors):
                collected(start + k * vl * known * itemsize, lines + k * vector_bytes, pitch)
        else:
            turn_back(start, length * itemsize, lines, pitch, length, rows)

    return to_lines, from_lines


@cache
def _short_rows_task(dtype: str, algorithm: str, forward: bool, vl: int, vectors: int, known: int):
    """A run of short rows, turned; those that a worker's scratch has beyond the last one are of no account."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, itemsize, pitch = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype], vectors * vl * ITEMSIZE[compute]
    passes = (forward_columns if forward else backward_columns)(compute, algorithm, vl, vectors, True)
    to_lines, from_lines = _turned(dtype, vl, vectors, known)
    at_once = vectors * vl

    def softmax_short_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        kept = f.scratch + worker * f.scratch_bytes
        lines, row_bytes = kept + f.length * pitch, f.length * itemsize
        for row in range(index * f.width, min(f.rows, (index + 1) * f.width), at_once):
            rows = min(at_once, f.rows - row)
            to_lines(lines, pointers[0] + row * row_bytes, rows, f.length)
            passes(at_once, lines, lines, pitch, kept, f.length)
            from_lines(lines, pointers[1] + row * row_bytes, rows, f.length)

    def gradient_short_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        dy, row_bytes = f.scratch + worker * f.scratch_bytes, f.length * itemsize
        y = dy + f.length * pitch
        for row in range(index * f.width, min(f.rows, (index + 1) * f.width), at_once):
            rows = min(at_once, f.rows - row)
            to_lines(dy, pointers[0] + row * row_bytes, rows, f.length)
            to_lines(y, pointers[1] + row * row_bytes, rows, f.length)
            passes(at_once, dy, dy, y, pitch, f.length)
            from_lines(dy, pointers[2] + row * row_bytes, rows, f.length)

    key = dtype, algorithm, forward, vl, vectors, known
    return compile_task(softmax_short_rows if forward else gradient_short_rows, key)


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
        forward, vl = self.op == "softmax_fwd", device.lanes(problem.compute)
        vector_bytes = 2 * length * vl * ITEMSIZE[problem.compute]
        vectors = _most(_TURNED, vector_bytes, _FIRST_LEVEL_BYTES)
        width = ceil(ceil(rows / (device.threads * _TASKS_PER_THREAD)) / (vectors * vl)) * vectors * vl
        scratch = Scratch(device, vectors * vector_bytes)
        ctx = _record(scratch, length=length, inner=1, width=width, blocks=1, rows=rows)
        known = length if 1 < length <= vl else 0
        task = _short_rows_task(problem.dtype, problem.algorithm, forward, vl, vectors, known)
        return Program([Phase(task, ceil(rows / width), ctx)], [scratch.memory])


class Columns(_LaneByLane):
    """Neighbours are elements of different rows; supports every softmax."""

    algorithm = "columns"

    def supports(self, problem: SoftmaxProblem, device: Cpu) -> Support:
        return YES

    def prepare(self, problem: SoftmaxProblem, config: NoConfig, device: Cpu) -> Program:
        outer, length, inner = problem.rows
        forward, vl = self.op == "softmax_fwd", device.lanes(problem.compute)
        vector_bytes = length * vl * ITEMSIZE[problem.compute]
        vectors = _most(_APART, vector_bytes, int(device.l2_bytes * _SECOND_LEVEL_SHARE))
        if not forward:
            vectors = _WIDEST if 2 * vector_bytes * _APART[0] > _FIRST_LEVEL_BYTES else _APART[0]
        scratch = Scratch(device, vectors * vector_bytes if forward else 0)
        wanted = ceil(device.threads * _TASKS_PER_THREAD / max(outer, 1))
        width = ceil(ceil(inner / wanted) / (vectors * vl)) * vectors * vl
        blocks = ceil(inner / width)
        ctx = _record(scratch, length=length, inner=inner, width=width, blocks=blocks, rows=0)
        task = _columns_task(problem.dtype, problem.algorithm, forward, vl, vectors, length <= _FEW)
        return Program([Phase(task, outer * blocks, ctx)], [scratch.memory])


def _most(numbers: tuple[int, ...], vector_bytes: int, room_bytes: int) -> int:
    """The first of the numbers of vectors that have room, else the last."""
    return next((n for n in numbers if n * vector_bytes <= room_bytes), numbers[-1])


def _record(scratch: Scratch, **values: int) -> np.ndarray:
    return filled(_FIELDS, scratch=scratch.start, scratch_bytes=scratch.size_bytes, **values)


FWD_SHORT_ROWS, FWD = ShortRows("softmax_fwd"), Columns("softmax_fwd")
BWD_SHORT_ROWS, BWD = ShortRows("softmax_bwd"), Columns("softmax_bwd")
