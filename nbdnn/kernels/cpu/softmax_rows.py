"""Softmax and its gradient on the CPU where the elements of a row are neighbours.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

A task is a run of rows; each is read for its maximum, for its exponentials, kept in a worker's scratch or in y, and to
be scaled (`softmax_lines.py`). Traffic: every array once from memory where a row stays in cache. Sums in the compute
type, of many lanes each; exp is good to 2 ulp. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.scratch import Scratch, whole_lines
from nbdnn.kernels.cpu.softmax_lines import backward_rows, forward_rows
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

# Rows at once, of so few vectors; and vectors of a row by itself. 65,536 rows of 64 took two threads of a Zen 5 0.59 ms
# at once, 0.56 by themselves, of 128 elements 2.1 and 0.97: they come from too many places.
_ROWS, _SHORT = 4, {"softmax_fwd": 4, "softmax_bwd": 2}
_VECTORS = 2
_FIRST_LEVEL_BYTES = 32 << 10  # where x, y and powers have no room, these are kept in y: 8 rows of 262,144 gain 15 %
_TASKS_PER_THREAD = 8
# One thread: priors for the guess. A row's maximum and sum are those of many lanes, however short it is.
_NS_PER_ELEM, _NS_PER_ROW = {"softmax_fwd": 0.2, "softmax_bwd": 0.15}, {"softmax_fwd": 5.0, "softmax_bwd": 2.5}

_FIELDS = record("rows", "rows_a_task", "length", "kept_pitch", "scratch", "scratch_bytes")


@cache
def _forward_task(dtype: str, algorithm: str, vl: int, at_once: int, in_place: bool):
    """A run of rows whose elements are neighbours: `at_once` rows, then one by one."""
    i64, at, itemsize = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype]
    block, single = (
        forward_rows(dtype, algorithm, vl, rows, 1 if rows > 1 else _VECTORS, in_place) for rows in (at_once, 1)
    )

    def softmax_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        x, y, pitch, kept = pointers[0], pointers[1], f.length * itemsize, f.scratch + worker * f.scratch_bytes
        row, end = index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)
        while row + at_once <= end:
            powers = y + row * pitch if in_place else kept
            block(y + row * pitch, x + row * pitch, pitch, powers, f.kept_pitch, f.length)
            row += at_once
        while row < end:
            powers = y + row * pitch if in_place else kept
            single(y + row * pitch, x + row * pitch, pitch, powers, f.kept_pitch, f.length)
            row += 1

    return compile_task(softmax_rows, (dtype, algorithm, vl, at_once, in_place))


@cache
def _backward_task(dtype: str, algorithm: str, vl: int, at_once: int):
    """The same of the gradient."""
    i64, at, itemsize = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype]
    block, single = (backward_rows(dtype, algorithm, vl, rows, 1 if rows > 1 else _VECTORS) for rows in (at_once, 1))

    def gradient_rows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        dy, y, dx, pitch = pointers[0], pointers[1], pointers[2], f.length * itemsize
        row, end = index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)
        while row + at_once <= end:
            block(dx + row * pitch, dy + row * pitch, y + row * pitch, pitch, f.length)
            row += at_once
        while row < end:
            single(dx + row * pitch, dy + row * pitch, y + row * pitch, pitch, f.length)
            row += 1

    return compile_task(gradient_rows, (dtype, algorithm, vl, at_once))


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
        vl, size = device.lanes(compute), ITEMSIZE[compute]
        at_once = min(vl, _ROWS if length <= _SHORT[self.op] * vl else 1)
        in_place = problem.dtype == compute and 3 * length * size > _FIRST_LEVEL_BYTES
        kept_pitch = whole_lines(ceil(length / vl) * vl * size)
        scratch = Scratch(device, 0 if in_place or not forward else at_once * kept_pitch)
        rows_a_task = ceil(rows / (device.threads * _TASKS_PER_THREAD))
        ctx = filled(
            _FIELDS,
            rows=rows,
            rows_a_task=rows_a_task,
            length=length,
            kept_pitch=kept_pitch,
            scratch=scratch.start,
            scratch_bytes=scratch.size_bytes,
        )
        if forward:
            task = _forward_task(problem.dtype, problem.algorithm, vl, at_once, in_place)
        else:
            task = _backward_task(problem.dtype, problem.algorithm, vl, at_once)
        return Program([Phase(task, ceil(rows / rows_a_task), ctx)], [scratch.memory])


FWD, BWD = Rows("softmax_fwd"), Rows("softmax_bwd")
