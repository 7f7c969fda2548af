"""The gradient of maxima of overlapping windows, of planes that a block holds whole in shared memory.

    block     1. copies its planes of x and of dy, which follow each other, to shared memory, 16 bytes at a time
    thread    2. a window: the tap that is its maximum, a byte
    thread    3. a cell of stride x stride elements: adds dy of the windows whose tap is there, and writes over x
    block     4. copies dx from there

Rows of 35 elements are no vectors: side by side in registers, as `pool_window` has them, each is loaded and stored by
itself, and what windows share is loaded again. y is not read. Traffic: x, dy and dx once. Sums in float32, in a fixed
order, rounded once. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_axes import Axis
from nbdnn.kernels.cuda.staged import COPY_BYTES, staged, staged_bytes
from nbdnn.problem import DEFAULT_ALIGN, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_MOST_TAPS = 25  # of a window: they are unrolled
_MOST_CELL = 9  # elements of a cell
_MOST_SHARED_BYTES = 96 << 10  # of a block: two are on a multiprocessor, and one copies while the other counts
_SHARED_OF_SM = 220 << 10
_THREADS_OF_SM = 2048
_INT32_END = 2**31 - 2**20
_PLANES, _THREADS = (1, 2, 3, 4, 6, 8, 12, 16), (128, 256, 512)  # of a block
_BLOCKS_OF_SM = 32
_ENOUGH_THREADS = 1536  # of a multiprocessor: with fewer it often waits
_CONFIGS = 6
_LAUNCH_US = 3.0
_INSTRUCTIONS_PER_CLOCK_AND_SM = 110.0  # of a thread's, a prior for the guess


class Block(NamedTuple):
    """Planes and threads of a block."""

    planes: int
    threads: int

    def __str__(self) -> str:
        return f"p{self.planes}t{self.threads}"


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    axes: tuple[Axis, Axis]
    threads: int


class _Planes(NamedTuple):
    """x_elements, y_elements: of all planes. x_size, y_size: bytes of a block's planes; x_staged, y_staged: of shared
    memory for them. margin: bytes of nothing before them."""

    x_elements: int
    y_elements: int
    x_size: int
    y_size: int
    x_staged: int
    y_staged: int
    margin: int
    planes: int
    in_h: int
    in_w: int
    out_h: int
    out_w: int
    cells_h: int
    cells_w: int


class _Reciprocals(NamedTuple):
    """What `ptx.split` takes of the divisors: multipliers and shifts."""

    out_h: int
    out_h_shift: int
    out_w: int
    out_w_shift: int
    cells_h: int
    cells_h_shift: int
    cells_w: int
    cells_w_shift: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool_planes, ptx_tile

    v = Variant(*specialised_on)
    integer, word, split, itemsize, threads = ptx.INTEGER[32], ptx.WORD, ptx.split, ITEMSIZE[v.dtype], v.threads
    (stride_h, pad_h), (stride_w, pad_w) = (axis[1:] for axis in v.axes)
    come, go = staged(v.dtype, threads, True)
    commit, wait = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(0)
    first_maximum, give_back = (
        ptx_pool_planes.first_maximum(v.dtype, v.axes),
        ptx_pool_planes.give_back(v.dtype, v.axes),
    )
    store_tap = ptx_pool_planes.store_tap()

    def give_planes_back(x, dy, dx, f, r):
        staged_x = word(ptx_tile.dynamic_shared() + word(f.margin))
        staged_dy = word(staged_x + word(f.x_staged))
        taps = word(staged_dy + word(f.y_staged))
        of_x = come(staged_x, x, f.x_elements, f.x_size)
        of_dy = come(staged_dy, dy, f.y_elements, f.y_size)
        commit()
        wait()
        ptx.cuda.syncthreads()
        i, windows = integer(ptx.thread_x()), integer(f.out_h * f.out_w)
        while i < f.planes * windows:
            rest, column = split(i, f.out_w, r.out_w, r.out_w_shift)
            plane, row = split(rest, f.out_h, r.out_h, r.out_h_shift)
            here = word(of_x + word(plane * f.in_h * f.in_w * itemsize))
            row, column = integer(row * stride_h - pad_h), integer(column * stride_w - pad_w)
            store_tap(word(taps + word(i)), first_maximum(here, row, column, f.in_h, f.in_w))
            i = integer(i + threads)
        ptx.cuda.syncthreads()
        i = integer(ptx.thread_x())
        while i < f.planes * f.cells_h * f.cells_w:
            rest, column = split(i, f.cells_w, r.cells_w, r.cells_w_shift)
            plane, row = split(rest, f.cells_h, r.cells_h, r.cells_h_shift)
            before = integer(plane * windows)
            give_back(
                word(taps + word(before)), word(of_dy + word(before * itemsize)),
                word(of_x + word(plane * f.in_h * f.in_w * itemsize)),
                row, column, f.out_h, f.out_w, f.in_h, f.in_w,
            )  # fmt: skip
            i = integer(i + threads)
        ptx.cuda.syncthreads()
        go(staged_x, dx, f.x_elements, f.x_size)

    data = ptx.pointer(v.dtype)
    return give_planes_back, (data, data, data, ptx.record(_Planes, 32), ptx.record(_Reciprocals, 32))


def _axes(problem: PoolProblem) -> tuple[Axis, Axis]:
    rows, columns = (Axis(*each) for each in zip(problem.window, problem.stride, problem.pad, strict=True))
    return rows, columns


def _cells(problem: PoolProblem) -> tuple[int, int]:
    """Of a plane, along each axis."""
    (h, w), (rows, columns) = problem.spatial, _axes(problem)
    return (h - 1 + rows.pad) // rows.stride + 1, (w - 1 + columns.pad) // columns.stride + 1


def _fields(problem: PoolProblem, planes: int) -> _Planes:
    itemsize, (h, w), (p, q) = ITEMSIZE[problem.dtype], problem.spatial, problem.out_spatial
    of_all = problem.n * problem.c
    # What a window or a cell reaches beyond its plane.
    taps = problem.window[0] * w + problem.window[1], problem.window[0] * q + problem.window[1]
    margin = ceil(max(taps) * itemsize / COPY_BYTES) * COPY_BYTES
    x_size, y_size = planes * h * w * itemsize, planes * p * q * itemsize
    sizes = x_size, y_size, staged_bytes(x_size), staged_bytes(y_size)
    return _Planes(of_all * h * w, of_all * p * q, *sizes, margin, planes, h, w, p, q, *_cells(problem))


def _shared_bytes(problem: PoolProblem, planes: int) -> int:
    f = _fields(problem, planes)
    return 2 * f.margin + f.x_staged + f.y_staged + planes * f.out_h * f.out_w


class Staged(LaunchedCandidate[Block]):
    """Maxima of overlapping windows of planes that shared memory holds."""

    op, algorithm = "pool_bwd", "staged"

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        if not problem.is_max or problem.channels_last or len(problem.spatial) != 2:
            return Support(False, f"{problem.mode} in {problem.layout}, this kernel takes maxima of planes")
        if problem.dtype == "f64":
            return Support(False, "float64 is left to direct")
        if prod(problem.window) > _MOST_TAPS or prod(problem.stride) > _MOST_CELL:
            most = f"this kernel takes {_MOST_TAPS} elements, {_MOST_CELL} of them new"
            return Support(False, f"windows {problem.window}, {problem.stride} apart, {most}")
        if all(r <= u for r, u in zip(problem.window, problem.stride, strict=True)):
            return Support(False, f"windows {problem.window}, {problem.stride} apart, share nothing")
        if device.capability < (8, 0):
            return Support(False, f"compute capability {device.capability}: no asynchronous copies before 8.0")
        if problem.align < DEFAULT_ALIGN:
            return Support(
                False, f"arrays begin at multiples of {problem.align} bytes, {COPY_BYTES} are copied at once"
            )
        if (elements := prod(problem.x_shape)) >= _INT32_END:
            return Support(False, f"x has {elements} elements, more than {_INT32_END}")
        if not self.configs(problem, device):
            return Support(False, f"planes of {problem.spatial} need more than {_MOST_SHARED_BYTES} bytes to be held")
        return YES

    def configs(self, problem: PoolProblem, device: Gpu) -> tuple[Block, ...]:
        fitting = [planes for planes in _PLANES if _shared_bytes(problem, planes) <= _MOST_SHARED_BYTES]
        every = [Block(planes, threads) for planes in fitting for threads in _THREADS]
        return tuple(sorted(every, key=lambda block: self.estimate(problem, block, device))[:_CONFIGS])

    def estimate(self, problem: PoolProblem, config: Block, device: Gpu) -> float:
        """Of blocks in step: the last round is half empty, and so is the last time that threads take a window each."""
        planes, taps = problem.n * problem.c, prod(problem.window)
        instructions = 0.0
        for each, work in ((prod(problem.out_spatial), 6 * taps + 12), (prod(_cells(problem)), 7 * taps + 40)):
            instructions += ceil(config.planes * each / config.threads) * config.threads * work
        by_memory = _SHARED_OF_SM // (_shared_bytes(problem, config.planes) + 1024)
        resident = min(by_memory, _THREADS_OF_SM // config.threads, _BLOCKS_OF_SM)
        blocks = ceil(planes / config.planes)
        rounds = max(1.0, 0.5 + blocks / (resident * device.sms))
        slots = rounds * resident * device.sms
        hidden = min(1.0, resident * config.threads / _ENOUGH_THREADS)
        issue_s = slots * instructions / (_INSTRUCTIONS_PER_CLOCK_AND_SM * hidden * device.sms * device.clock_hz)
        x, _, dy, dx = problem.operands
        move_s = 1.15 * sum(operand.size_bytes for operand in (x, dy, dx)) / copy_bytes_per_s(device)
        return _LAUNCH_US + (max(issue_s, move_s) + 0.15 * min(issue_s, move_s)) * 1e6

    def launches(self, problem: PoolProblem, config: Block, device: Gpu) -> list[Launch]:
        f, threads = _fields(problem, config.planes), config.threads
        v = Variant(problem.dtype, _axes(problem), threads)
        return [
            Launch(
                source=Source(_kernel, v, threads, _ENOUGH_THREADS // threads),
                grid=(ceil(problem.n * problem.c / config.planes), 1, 1),
                pointers=(0, 2, 3),
                scalars="",
                integers=(*f, *reciprocals(_Reciprocals, f._asdict())),
                dynamic_shared_bytes=_shared_bytes(problem, config.planes),
            )
        ]


BWD = Staged()
