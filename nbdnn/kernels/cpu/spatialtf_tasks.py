"""What the tasks of the spatial transformer share: where arrays lie, and the plan of a run of outputs of one row."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import float64, njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.spatialtf_plan import PLAN_VECTORS, plan_affine, plan_grid
from nbdnn.kernels.cpu.vector import NUMBA_FLOAT, WIDEN, filled, pointer, record
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

# Bytes lie between neighbours in memory: of x and dx (pixels, rows of them where there is more than one, channels,
# images), and of y and dy. A run is at most `run` outputs of a row; `blocks` share the channels of an image.
FIELDS = record(
    *("channels", "height", "width", "out_h", "out_w", "pixel_bytes", "right", "down", "x_channel", "x_image"),
    *("y_channel", "y_image", "rows", "rows_a_task", "run", "blocks", "block_channels", "scratch", "scratch_bytes"),
    *("sums_offset", "lines_offset", "total_bytes", "parts_offset"),
)
_MOST_RUN = 512  # outputs whose plan stays in the first-level cache
_LINE_BYTES = 64


@cache
def affine_row(param_dtype: str):
    """Compiled-in function (theta, row, f): (s, s_step, t, t_step), where output j of a row of outputs lies.

    In float64, of which the identity keeps every position a whole number.
    """
    numbers, widen = pointer(param_dtype), WIDEN[param_dtype]

    @njit(**DEVICE)
    def axis(along, across, shift, v, out_extent, extent):
        half = 0.5 * (extent - 1)
        if out_extent == 1:
            return (across * v + shift + 1.0) * half, 0.0
        return (across * v + shift + 1.0 - along) * half, along * (2.0 * half / (out_extent - 1))

    @njit(**DEVICE)
    def locate(theta, row, f):
        a = numbers(theta)
        v = 2.0 * row / (f.out_h - 1) - 1.0 if f.out_h > 1 else 0.0
        s, s_step = axis(float64(widen(a[0])), float64(widen(a[1])), float64(widen(a[2])), v, f.out_w, f.width)
        t, t_step = axis(float64(widen(a[3])), float64(widen(a[4])), float64(widen(a[5])), v, f.out_w, f.height)
        return s, s_step, t, t_step

    return locate


@cache
def plan_run(affine: bool, param_dtype: str, compute: str, vl: int):
    """Compiled-in function (plan, places, image, row, first, n, f) that plans outputs first, first + 1, ... of a row.

    places: the address of theta, or of the grid.
    """
    real, locate, itemsize = NUMBA_FLOAT[compute], affine_row(param_dtype), ITEMSIZE[param_dtype]
    of_affine, of_grid = plan_affine(compute, vl), plan_grid(param_dtype, compute, vl)

    @njit(**DEVICE)
    def by_theta(plan, places, image, row, first, n, f):
        s, s_step, t, t_step = locate(places + image * 6 * itemsize, row, f)
        of_affine(plan, n, first, real(s), real(s_step), real(t), real(t_step), f.height, f.width)

    @njit(**DEVICE)
    def by_grid(plan, places, image, row, first, n, f):
        output = (image * f.out_h + row) * f.out_w + first
        of_grid(plan, n, places + output * 2 * itemsize, f.height, f.width)

    return by_theta if affine else by_grid


class Scratch:
    """The record of a problem's tasks, and each thread's memory: a plan, four sums and two lines of a run."""

    def __init__(self, problem: SpatialtfProblem, device: Cpu, vl: int, **values: int) -> None:
        itemsize, real_bytes = ITEMSIZE[problem.dtype], ITEMSIZE[problem.compute]
        (height, width), (out_h, out_w) = problem.spatial, problem.out_spatial
        pixel_elems, last = (problem.c if problem.channels_last else 1), problem.channels_last
        run = min(-(-out_w // vl) * vl, _MOST_RUN)
        sums_offset = _lines(PLAN_VECTORS * run * real_bytes)
        lines_offset = sums_offset + _lines(4 * run * real_bytes)
        scratch_bytes = lines_offset + 2 * _lines(run * real_bytes)
        self.memory = np.empty(device.threads * scratch_bytes + _LINE_BYTES, np.uint8)
        self.record = filled(
            FIELDS,
            **{"rows": 0, "rows_a_task": 1, "blocks": 1, "block_channels": problem.c, "parts_offset": 0} | values,
            channels=problem.c,
            height=height,
            width=width,
            out_h=out_h,
            out_w=out_w,
            pixel_bytes=pixel_elems * itemsize,
            right=pixel_elems * itemsize * (width > 1),
            down=pixel_elems * itemsize * width * (height > 1),
            x_channel=itemsize * (1 if last else height * width),
            x_image=itemsize * problem.c * height * width,
            y_channel=itemsize * (1 if last else out_h * out_w),
            y_image=itemsize * problem.c * out_h * out_w,
            run=run,
            scratch=self.memory.ctypes.data + -self.memory.ctypes.data % _LINE_BYTES,
            scratch_bytes=scratch_bytes,
            sums_offset=sums_offset,
            lines_offset=lines_offset,
            total_bytes=real_bytes * problem.c * height * width,
        )


def _lines(size_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
