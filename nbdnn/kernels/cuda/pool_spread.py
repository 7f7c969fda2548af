"""Gradients of sums of windows side by side, planar: neighbouring threads write neighbouring vectors.

    dx[i] = dy[i // window], times the scale of an average; zeros behind the last window of an axis

A thread writes 16 bytes of dx wherever they lie, also across rows and planes: its elements are those of a few windows,
which follow each other in dy. Tiles (`pool_window`) write a row by vectors that divide it, 8 bytes where rows are of 14
float32. Traffic: dx once, dy once from memory and for each of its rows again from cache. Exact: nothing is added.
Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_THREADS = 256
_VECTOR_BYTES = 16
_INT32_END = 2**31 - 2**16
_LAUNCH_US = 1.4
# Times a copy, a prior for the guess; of rows of whole vectors, which `pool_window` writes faster; of shorter vectors.
_OVER_COPY, _OVER_COPY_OF_ROWS, _OVER_COPY_OF_PARTS = 1.15, 1.3, 2.0


class Variant(NamedTuple):
    """What a kernel is compiled for. lanes: of a vector of dx. deep: three axes."""

    dtype: str
    lanes: int
    window: tuple[int, ...]
    is_sum: bool
    deep: bool

    @property
    def cells(self) -> int:
        """Windows whose elements a vector has."""
        return max(1, self.lanes // self.window[2])


class Spread(NamedTuple):
    """elements: of dx. in_d, in_h: its extents. out_d, out_h, out_w: those of dy."""

    elements: int
    in_d: int
    in_h: int
    out_d: int
    out_h: int
    out_w: int


class Reciprocals(NamedTuple):
    """What `ptx.split` takes of the divisors: multipliers and shifts."""

    in_d: int
    in_d_shift: int
    in_h: int
    in_h_shift: int
    out_w: int
    out_w_shift: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool_vector

    v = Variant._make(specialised_on)
    integer, real, lanes, (window_d, window_h, window_w) = ptx.INTEGER[32], ptx.REAL["f32"], v.lanes, v.window
    run = ptx_pool_vector.load_cells(v.dtype, v.cells, lanes // v.cells)
    store = ptx_pool_vector.store(v.dtype, lanes)
    share = real(1.0 if v.is_sum else 1.0 / prod(v.window))

    if v.deep:

        @ptx.inline
        def above(plane, f, r):
            """(plane of dy, whether a window reaches it)."""
            image, d = ptx.split(plane, f.in_d, r.in_d, r.in_d_shift)
            return integer(image * f.out_d + d // window_d), d < f.out_d * window_d
    else:

        @ptx.inline
        def above(plane, f, r):
            return plane, True

    @ptx.inline
    def row_of(row, f, r):
        """(where the row of dy begins that a row of dx takes, whether there is one)."""
        plane, h = ptx.split(row, f.in_h, r.in_h, r.in_h_shift)
        plane, inside = above(plane, f, r)
        return integer((plane * f.out_h + h // window_h) * f.out_w), inside and h < f.out_h * window_h

    def spread(dy, dx, f, r):
        element = integer((integer(ptx.block_x()) * _THREADS + ptx.thread_x()) * lanes)
        if element >= f.elements:
            return
        row, first = ptx.split(integer(element // window_w), f.out_w, r.out_w, r.out_w_shift)
        here, inside = row_of(row, f, r)
        below, inside_below = row_of(integer(row + 1), f, r)
        left = integer(f.out_w - first)  # of this row
        values = run(dy, integer(here + first), inside, left, integer(below - left), inside_below, share)
        store(dx, element, True, values)

    data = ptx.pointer(v.dtype)
    return spread, (data, data, *(ptx.record(fields, 32) for fields in (Spread, Reciprocals)))


def _lanes(problem: PoolProblem) -> int:
    """Elements of a vector: a power of two that is a part or a multiple of a window's, and no longer than a row."""
    *_, width = problem.window
    lanes, most = 1, min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype]
    while 2 * lanes <= most and prod(problem.x_shape) % (2 * lanes) == 0:
        lanes *= 2
    while lanes > 1 and ((lanes % width and width % lanes) or lanes > problem.spatial[-1]):
        lanes //= 2
    return lanes


class SpreadCandidate(LaunchedCandidate[NoConfig]):
    """Gradients of sums of windows side by side."""

    op = "pool_bwd"
    algorithm = "spread"

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        if problem.is_max or problem.channels_last or problem.dtype == "f64":
            return Support(
                False, f"{problem.mode} of {problem.dtype} in {problem.layout}: no sum in planes, up to float32"
            )
        if problem.window != problem.stride or any(problem.pad):
            return Support(
                False, f"windows {problem.window}, {problem.stride} apart, pad {problem.pad}: not side by side"
            )
        if problem.spatial[-1] % problem.window[-1]:
            return Support(False, f"rows of {problem.spatial[-1]} are not whole windows of {problem.window[-1]}")
        elements = prod(problem.x_shape)
        return YES if elements < _INT32_END else Support(False, f"x has {elements} elements, more than {_INT32_END}")

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> float:
        itemsize = ITEMSIZE[problem.dtype]
        rows_are_whole = problem.spatial[-1] * itemsize % _VECTOR_BYTES == 0
        over_copy = _OVER_COPY_OF_ROWS if rows_are_whole else _OVER_COPY
        if _lanes(problem) * itemsize < _VECTOR_BYTES:
            over_copy = _OVER_COPY_OF_PARTS
        return _LAUNCH_US + over_copy * problem.min_bytes / copy_bytes_per_s(device) * 1e6

    def launches(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        (in_d, in_h, _), (out_d, out_h, out_w) = spatial3(problem.spatial), spatial3(problem.out_spatial)
        elements, lanes, deep = prod(problem.x_shape), _lanes(problem), len(problem.spatial) == 3
        v = Variant(problem.dtype, lanes, spatial3(problem.window), problem.mode == "sum", deep)
        f = Spread(elements, in_d, in_h, out_d, out_h, out_w)
        return [
            Launch(
                source=Source(_kernel, v, _THREADS),
                grid=(ceil(elements / (lanes * _THREADS)), 1, 1),
                pointers=(0, 1),
                scalars="",
                integers=(*f, *reciprocals(Reciprocals, f._asdict())),
            )
        ]


BWD = SpreadCandidate()
