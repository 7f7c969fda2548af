"""The gradient of maxima of overlapping windows, of planes that a block holds whole in shared memory.

    block     1. copies its planes of x and of dy, which follow each other, to shared memory, 16 bytes at a time
    thread    2. a window: adds its dy to the sum of the element that is its maximum
    block     3. rounds the sums to dx, 16 bytes at a time

Windows that share no element are taken at once, those of every other row and column where 3x3 are 2 apart, and the
block waits in between: each sum is added up in a fixed order. Rows of 35 elements are no vectors: side by side in
registers, as `pool_window` has them, each is loaded and stored by itself, and what windows share is loaded again. y is
not read. Traffic: x, dy and dx once. Sums in float32, rounded once. Source: own.
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
_MOST_CELL = 9  # elements of a window that the one before does not have
_MOST_SHARED_BYTES = 96 << 10  # of a block: two are on a multiprocessor, and one copies while the other counts
_SHARED_OF_SM = 220 << 10
_THREADS_OF_SM = 2048
_INT32_END = 2**31 - 2**20
_PLANES, _THREADS = (1, 2, 3, 4, 6, 8, 12, 16), (128, 256, 512)  # of a block
_BLOCKS_OF_SM = 32
_ENOUGH_THREADS = 1536  # of a multiprocessor: with fewer it often waits
_FEW_TAPS, _THREADS_OF_MANY = 9, 1024  # of a window; a thread has more registers where it holds more
_CONFIGS = 6
_LAUNCH_US = 1.4
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
    memory for them, and sums_staged for the sums. margin: bytes of nothing before and behind x. slots_h, slots_w: rows
    and columns of windows that are taken at once."""

    x_elements: int
    y_elements: int
    x_size: int
    y_size: int
    x_staged: int
    y_staged: int
    sums_staged: int
    margin: int
    planes: int
    in_h: int
    in_w: int
    out_h: int
    out_w: int
    slots_h: int
    slots_w: int


class _Reciprocals(NamedTuple):
    """What `ptx.split` takes of the divisors: multipliers and shifts."""

    slots_h: int
    slots_h_shift: int
    slots_w: int
    slots_w_shift: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool_planes, ptx_tile

    v = Variant(*specialised_on)
    integer, word, split, itemsize, threads = ptx.INTEGER[32], ptx.WORD, ptx.split, ITEMSIZE[v.dtype], v.threads
    (stride_h, pad_h), (stride_w, pad_w) = (axis[1:] for axis in v.axes)
    apart_h, apart_w = _apart(v.axes)
    come, go = staged(v.dtype, threads, True, True)
    commit, wait, clear = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(0), ptx_tile.STORE_SHARED[4]
    give = ptx_pool_planes.give(v.dtype, v.axes)

    def give_planes_back(x, dy, dx, f, r):
        nothing = word(0)
        staged_x = word(ptx_tile.dynamic_shared() + word(f.margin))
        sums = word(staged_x + word(f.x_staged + f.margin))
        staged_dy = word(sums + word(f.sums_staged))
        of_x = come(staged_x, x, f.x_elements, f.x_size)
        of_dy = come(staged_dy, dy, f.y_elements, f.y_size)
        commit()
        at = integer(integer(ptx.thread_x()) * COPY_BYTES)
        while at < f.sums_staged:
            clear(word(sums + word(at)), (nothing, nothing, nothing, nothing))
            at = integer(at + threads * COPY_BYTES)
        of_sums = word(sums + word((of_x - staged_x) * (4 // itemsize)))
        wait()
        ptx.cuda.syncthreads()
        first_row = integer(0)
        while first_row < apart_h:
            first_column = integer(0)
            while first_column < apart_w:
                i = integer(ptx.thread_x())
                while i < f.planes * f.slots_h * f.slots_w:
                    rest, column = split(i, f.slots_w, r.slots_w, r.slots_w_shift)
                    plane, row = split(rest, f.slots_h, r.slots_h, r.slots_h_shift)
                    row, column = integer(row * apart_h + first_row), integer(column * apart_w + first_column)
                    if row < f.out_h and column < f.out_w:
                        before = integer(plane * f.in_h * f.in_w)
                        give(
                            word(of_x + word(before * itemsize)), word(of_sums + word(before * 4)),
                            word(of_dy + word(((plane * f.out_h + row) * f.out_w + column) * itemsize)),
                            integer(row * stride_h - pad_h), integer(column * stride_w - pad_w), f.in_h, f.in_w,
                        )  # fmt: skip
                    i = integer(i + threads)
                ptx.cuda.syncthreads()
                first_column = integer(first_column + 1)
            first_row = integer(first_row + 1)
        go(sums, dx, f.x_elements, f.x_size)

    data = ptx.pointer(v.dtype)
    return give_planes_back, (data, data, data, ptx.record(_Planes, 32), ptx.record(_Reciprocals, 32))


def _axes(problem: PoolProblem) -> tuple[Axis, Axis]:
    rows, columns = (Axis(*each) for each in zip(problem.window, problem.stride, problem.pad, strict=True))
    return rows, columns


def _apart(axes: tuple[Axis, Axis]) -> tuple[int, int]:
    """By axis the windows from one to the next that shares nothing with it."""
    rows, columns = (ceil(axis.taps / axis.stride) for axis in axes)
    return rows, columns


def _fields(problem: PoolProblem, planes: int) -> _Planes:
    itemsize, (h, w), (p, q) = ITEMSIZE[problem.dtype], problem.spatial, problem.out_spatial
    of_all = problem.n * problem.c
    # What a window reaches beyond its plane.
    margin = ceil((problem.window[0] * w + problem.window[1]) * itemsize / COPY_BYTES) * COPY_BYTES
    x_size, y_size = planes * h * w * itemsize, planes * p * q * itemsize
    x_staged, y_staged = staged_bytes(x_size), staged_bytes(y_size)
    apart_h, apart_w = _apart(_axes(problem))
    return _Planes(
        x_elements=of_all * h * w,
        y_elements=of_all * p * q,
        x_size=x_size,
        y_size=y_size,
        x_staged=x_staged,
        y_staged=y_staged,
        sums_staged=x_staged * (4 // itemsize),
        margin=margin,
        planes=planes,
        in_h=h,
        in_w=w,
        out_h=p,
        out_w=q,
        slots_h=ceil(p / apart_h),
        slots_w=ceil(q / apart_w),
    )


def _shared_bytes(problem: PoolProblem, planes: int) -> int:
    f = _fields(problem, planes)
    return 2 * f.margin + f.x_staged + f.sums_staged + f.y_staged


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
        if problem.align < DEFAULT_ALIGN:
            return Support(
                False, f"arrays begin at multiples of {problem.align} bytes, {COPY_BYTES} are copied at once"
            )
        largest = max(problem.operands, key=lambda operand: operand.size_elems)
        if largest.size_elems >= _INT32_END:
            return Support(False, f"{largest.name} has {largest.size_elems} elements, more than {_INT32_END}")
        if not self.configs(problem, device):
            return Support(False, f"planes of {problem.spatial} need more than {_MOST_SHARED_BYTES} bytes to be held")
        return YES

    def configs(self, problem: PoolProblem, device: Gpu) -> tuple[Block, ...]:
        fitting = [planes for planes in _PLANES if _shared_bytes(problem, planes) <= _MOST_SHARED_BYTES]
        every = [Block(planes, threads) for planes in fitting for threads in _THREADS]
        return tuple(sorted(every, key=lambda block: self.estimate(problem, block, device))[:_CONFIGS])

    def estimate(self, problem: PoolProblem, config: Block, device: Gpu) -> float:
        """Of blocks in step: the last round is half empty, and so is the last time that threads take a window each."""
        planes, f = problem.n * problem.c, _fields(problem, config.planes)
        rounds_of_windows = prod(_apart(_axes(problem))) * ceil(f.planes * f.slots_h * f.slots_w / config.threads)
        of_elements = 4 * f.planes * prod(problem.spatial)
        instructions = rounds_of_windows * config.threads * (7 * prod(problem.window) + 30) + of_elements
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
        v, few = Variant(problem.dtype, _axes(problem), threads), prod(problem.window) <= _FEW_TAPS
        return [
            Launch(
                source=Source(_kernel, v, threads, (_ENOUGH_THREADS if few else _THREADS_OF_MANY) // threads),
                grid=(ceil(problem.n * problem.c / config.planes), 1, 1),
                pointers=(0, 2, 3),
                scalars="",
                integers=(*f, *reciprocals(_Reciprocals, f._asdict())),
                dynamic_shared_bytes=_shared_bytes(problem, config.planes),
            )
        ]


BWD = Staged()
