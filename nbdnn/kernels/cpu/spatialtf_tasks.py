"""What the tasks of the spatial transformer share: where arrays lie, and the plan of a run of outputs of one image."""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import float64, njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.scratch import Scratch, whole_lines
from nbdnn.kernels.cpu.spatialtf_plan import PLAN_VECTORS, plan_affine, plan_grid
from nbdnn.kernels.cpu.vector import NUMBA_FLOAT, WIDEN, filled, pointer, record
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

# Bytes lie between neighbours in memory: of x and dx (pixels, rows of them where there is more than one, channels,
# images), and of y and dy. `runs` of at most `run` outputs make an image; `blocks` share the channels of one.
FIELDS = record(
    *("channels", "height", "width", "out_h", "out_w", "pixel_bytes", "right", "down", "x_channel", "x_image"),
    *(
        "y_channel",
        "y_image",
        "images",
        "outputs",
        "run",
        "runs",
        "blocks",
        "block_channels",
        "scratch",
        "scratch_bytes",
    ),
    *("sums_offset", "lines_offset", "total_bytes", "parts_offset", "pixels_offset"),
)
_TASKS_PER_THREAD = 4


@cache
def affine_image(param_dtype: str):
    """Compiled-in function (theta, f): (s, s_column, s_row, t, t_column, t_row).

    Where the first output of an image lies, and how much further the next column and row do. In float64, of which the
    identity keeps every position a whole number.
    """
    numbers, widen = pointer(param_dtype), WIDEN[param_dtype]

    @njit(**DEVICE)
    def axis(along, across, shift, f, extent):
        half = 0.5 * (extent - 1)
        column = along * (2.0 * half / (f.out_w - 1)) if f.out_w > 1 else 0.0
        row = across * (2.0 * half / (f.out_h - 1)) if f.out_h > 1 else 0.0
        first = shift + 1.0 - (along if f.out_w > 1 else 0.0) - (across if f.out_h > 1 else 0.0)
        return first * half, column, row

    @njit(**DEVICE)
    def locate(theta, f):
        a = numbers(theta)
        s, s_column, s_row = axis(float64(widen(a[0])), float64(widen(a[1])), float64(widen(a[2])), f, f.width)
        t, t_column, t_row = axis(float64(widen(a[3])), float64(widen(a[4])), float64(widen(a[5])), f, f.height)
        return s, s_column, s_row, t, t_column, t_row

    return locate


@cache
def plan_run(affine: bool, param_dtype: str, compute: str, vl: int):
    """Compiled-in function (plan, places, image, first, n, f) that plans outputs first, first + 1, ... of an image.

    places: the address of theta, or of the grid.
    """
    real, locate, itemsize = NUMBA_FLOAT[compute], affine_image(param_dtype), ITEMSIZE[param_dtype]
    of_affine, of_grid = plan_affine(compute, vl), plan_grid(param_dtype, compute, vl)

    @njit(**DEVICE)
    def by_theta(plan, places, image, first, n, f):
        s, s_column, s_row, t, t_column, t_row = locate(places + image * 6 * itemsize, f)
        row, column = first // f.out_w, first % f.out_w
        of_affine(
            plan, n, column, f.out_w, real(s + row * s_row), real(s_column), real(s_row), real(t + row * t_row),
            real(t_column), real(t_row), f.height, f.width,
        )  # fmt: skip

    @njit(**DEVICE)
    def by_grid(plan, places, image, first, n, f):
        of_grid(plan, n, places + (image * f.outputs + first) * 2 * itemsize, f.height, f.width)

    return by_theta if affine else by_grid


class Runs:
    """A problem in runs of outputs: the record of its tasks, and each thread's memory: a plan, four sums, two lines of
    a run.

    moved_bytes: of a pixel that is moved, where it is: there is room for a run of them as well. values: of the record,
    where they differ from those of tasks that have all channels.
    """

    def __init__(
        self, problem: SpatialtfProblem, device: Cpu, most_run: int = 512, moved_bytes: int = 0, **values: int
    ) -> None:
        itemsize, real_bytes, vl = ITEMSIZE[problem.dtype], ITEMSIZE[problem.compute], device.lanes(problem.compute)
        (height, width), (out_h, out_w) = problem.spatial, problem.out_spatial
        last = problem.channels_last
        pixel_bytes = moved_bytes or itemsize * (problem.c if last else 1)
        outputs = problem.positions
        wanted = min(outputs, most_run, max(vl, ceil(problem.n * outputs / (device.threads * _TASKS_PER_THREAD))))
        run = -(-wanted // vl) * vl
        self.runs = ceil(outputs / run)
        sums_offset = whole_lines(PLAN_VECTORS * run * real_bytes)
        lines_offset = sums_offset + whole_lines(4 * run * real_bytes)
        pixels_offset = lines_offset + whole_lines(2 * run * real_bytes)
        scratch = Scratch(device, pixels_offset + run * moved_bytes)
        self.memory = scratch.memory
        found = {
            "images": problem.n,
            "channels": problem.c,
            "height": height,
            "width": width,
            "out_h": out_h,
            "out_w": out_w,
            "pixel_bytes": pixel_bytes,
            "right": pixel_bytes * (width > 1),
            "down": pixel_bytes * width * (height > 1),
            "x_channel": itemsize * (1 if last else height * width),
            "x_image": itemsize * problem.c * height * width,
            "y_channel": itemsize * (1 if last else out_h * out_w),
            "y_image": itemsize * problem.c * out_h * out_w,
            "outputs": outputs,
            "run": run,
            "runs": self.runs,
            "blocks": 1,
            "block_channels": problem.c,
            "scratch": scratch.start,
            "scratch_bytes": scratch.size_bytes,
            "sums_offset": sums_offset,
            "lines_offset": lines_offset,
            "pixels_offset": pixels_offset,
            "total_bytes": real_bytes * problem.c * height * width,
            "parts_offset": 0,
        }
        found |= values
        self.record, self.blocks = filled(FIELDS, **found), found["blocks"]
