"""The gradient of a maximum, given by its windows (`pool_scatter.py`), where neighbours are of one plane.

A task is a run of planes: all that its windows have chosen, a byte each in the workspace (`pool_max_lines.py`); then
one window after the other adds its dy there. Lines of dx are cleared just before the first sum that is in them.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

import numpy as np
from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.pool_lines import NONE, Row
from nbdnn.kernels.cpu.pool_max_lines import GUARD, Windows, find_windows, kept, kept_pitch, row_of, windows_of
from nbdnn.kernels.cpu.pool_rows import fill, real_of
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD = 8

# offsets: by tap, where it lies behind a window's first, in bytes.
_FIELDS = record(
    *("planes", "planes_a_task", "pitch", "chosen_bytes", "found_at", "found_bytes", "offsets"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


@cache
def _scatter(dtype: str):
    """Compiled-in function (f, dy, dx, chosen): a plane of dx, of what its windows have chosen."""
    data, taps_of, offsets_of = pointer(dtype), pointer("u8"), pointer("i64")
    clear, itemsize, (real, _) = fill(dtype), ITEMSIZE[dtype], real_of(dtype)

    @njit(**DEVICE)
    def scatter(f, dy, dx, chosen):
        offsets, cleared, windows, apart = offsets_of(f.offsets), 0, f.out_w, f.step_w * itemsize
        for line in range(f.out_d * f.out_h):
            depth, row = line // f.out_h * f.step_d - f.pad_d, line % f.out_h * f.step_h - f.pad_h
            reached = ((min(f.in_d, depth + f.taps_d) - 1) * f.in_h + min(f.in_h, row + f.taps_h)) * f.in_w
            if reached > cleared:
                clear(dx + cleared * itemsize, reached - cleared, real(0.0))
                cleared = reached
            taps, shares = taps_of(chosen + line * f.pitch), data(dy + line * f.out_w * itemsize)
            first = dx + ((depth * f.in_h + row) * f.in_w - f.pad_w) * itemsize
            for q in range(windows):
                if taps[q] != NONE:
                    data(first + offsets[taps[q]])[0] += shares[q]
                first += apart
        clear(dx + cleared * itemsize, f.in_d * f.in_h * f.in_w - cleared, real(0.0))

    return scatter


@cache
def _task(row: Row, windows: Windows):
    """A run of planes."""
    i64, at, args_at, itemsize = pointer("i64"), struct(_FIELDS), struct(ARGS), ITEMSIZE[row.dtype]
    find, scatter = find_windows(row, windows, True), _scatter(row.dtype)

    def scatter_planes(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        lines, plane_bytes = f.out_d * f.out_h, f.in_d * f.in_h * f.in_w * itemsize
        for plane in range(index * f.planes_a_task, min(f.planes, (index + 1) * f.planes_a_task)):
            memory = args_at(args).workspace + worker * f.chosen_bytes
            chosen, found = memory + GUARD, memory + f.found_at
            find(f, pointers, chosen - plane * lines * f.pitch, found, plane * lines, (plane + 1) * lines)
            dy, dx = pointers[2] + plane * lines * f.out_w * itemsize, pointers[3] + plane * plane_bytes
            scatter(f, dy, dx, chosen)

    return compile_task(scatter_planes, (row, windows))


def _offsets(axes: Axes, size_bytes: int) -> np.ndarray:
    _, rows, columns = axes.extent
    d, h, w = np.indices(axes.taps)
    table = np.zeros(NONE, np.int64)
    table[: prod(axes.taps)] = (((d * rows + h) * columns + w) * size_bytes).ravel()
    return table


def chosen_bytes(problem: PoolProblem, axes: Axes, device: Cpu) -> int:
    """The workspace."""
    return device.threads * kept(problem, axes, device).chosen_bytes


def scatter_lines(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of planes whose windows are short."""
    planes, offsets = problem.n * problem.c, _offsets(axes, ITEMSIZE[problem.dtype])
    planes_a_task = ceil(planes / (device.threads * _TASKS_PER_THREAD))
    ctx = filled(
        _FIELDS,
        **axes.fields(),
        planes=planes,
        planes_a_task=planes_a_task,
        pitch=kept_pitch(axes),
        **kept(problem, axes, device)._asdict(),
        offsets=offsets.ctypes.data,
    )
    task = _task(row_of(problem, axes, device), windows_of(axes))
    return Program([Phase(task, ceil(planes / planes_a_task), ctx)], [offsets])
