"""The grid of the spatial transformer on the CPU, and its gradient.

    grid[n, i, j] = theta[n] @ (u_j, v_i, 1)           dtheta[n] = sum over i, j of dgrid[n, i, j]^T (u_j, v_i, 1)

A task is some rows of a grid; of the gradient an image, whose sums are taken row by row, in float64 from row to row.
Traffic: the grid once. Source: own.
"""

from __future__ import annotations

from functools import cache

from numba import float64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, kernel_us
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.vector import NARROW, NUMBA_FLOAT, WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_FIELDS = record("out_h", "out_w")


@cache
def _forward_task(dtype: str):
    """A row of the grid."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, elements = pointer("i64"), struct(_FIELDS), pointer(dtype)
    real, widen, narrow, itemsize = NUMBA_FLOAT[compute], WIDEN[dtype], NARROW[dtype], ITEMSIZE[dtype]

    @njit(**DEVICE, fastmath=FASTMATH)
    def write_row(grid, s, s_column, t, t_column, u, u_step, columns):
        pairs = elements(grid)
        for j in range(columns):
            along = u + real(j) * u_step
            pairs[2 * j] = narrow(s + s_column * along)
            pairs[2 * j + 1] = narrow(t + t_column * along)

    def write_grid(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        image, row = index // f.out_h, index % f.out_h
        a = elements(pointers[0] + image * 6 * itemsize)
        v = real(2.0 * row / (f.out_h - 1) - 1.0) if f.out_h > 1 else real(0.0)
        u, u_step = (real(-1.0), real(2.0 / (f.out_w - 1))) if f.out_w > 1 else (real(0.0), real(0.0))
        s, t = widen(a[1]) * v + widen(a[2]), widen(a[4]) * v + widen(a[5])
        write_row(pointers[1] + index * f.out_w * 2 * itemsize, s, widen(a[0]), t, widen(a[3]), u, u_step, f.out_w)

    return compile_task(write_grid, dtype)


@cache
def _backward_task(dtype: str):
    """The sums of an image."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, elements = pointer("i64"), struct(_FIELDS), pointer(dtype)
    real, widen, narrow, itemsize = NUMBA_FLOAT[compute], WIDEN[dtype], NARROW[dtype], ITEMSIZE[dtype]

    @njit(**DEVICE, fastmath=FASTMATH | {"reassoc"})
    def of_row(dgrid, axis, columns, u, u_step):
        """(sum, sum of products with u) over a row."""
        values = elements(dgrid)
        total, moment = real(0.0), real(0.0)
        for j in range(columns):
            value = widen(values[2 * j + axis])
            total += value
            moment += value * (u + real(j) * u_step)
        return float64(total), float64(moment)

    def add_grid(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        u, u_step = (real(-1.0), real(2.0 / (f.out_w - 1))) if f.out_w > 1 else (real(0.0), real(0.0))
        for axis in range(2):
            first, second, third = 0.0, 0.0, 0.0
            for row in range(f.out_h):
                v = 2.0 * row / (f.out_h - 1) - 1.0 if f.out_h > 1 else 0.0
                start = pointers[0] + (index * f.out_h + row) * f.out_w * 2 * itemsize
                total, moment = of_row(start, axis, f.out_w, u, u_step)
                first, second, third = first + moment, second + total * v, third + total
            found = elements(pointers[1] + (index * 6 + axis * 3) * itemsize)
            found[0], found[1], found[2] = narrow(real(first)), narrow(real(second)), narrow(real(third))

    return compile_task(add_grid, dtype)


class Rows(Candidate[NoConfig, Cpu]):
    """Row by row; supports every grid."""

    provider, algorithm = "cpu", "rows"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SpatialtfProblem, device: Cpu) -> Support:
        return YES

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        return kernel_us(device, 0.0, problem.n * problem.positions * 2 * COPY_NS, max(self._tasks(problem), 1))

    def _tasks(self, problem: SpatialtfProblem) -> int:
        return problem.n * (problem.out_spatial[0] if self.op == "spatialtf_grid_fwd" else 1)

    def prepare(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> Program:
        task = (_forward_task if self.op == "spatialtf_grid_fwd" else _backward_task)(problem.dtype)
        rows, columns = problem.out_spatial
        return Program([Phase(task, self._tasks(problem), filled(_FIELDS, out_h=rows, out_w=columns))])


FWD, BWD = Rows("spatialtf_grid_fwd"), Rows("spatialtf_grid_bwd")
