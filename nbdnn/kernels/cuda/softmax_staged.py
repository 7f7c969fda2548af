"""Softmax and its gradient of short rows that begin anywhere: copied to shared memory 16 bytes at a time.

    block   1. copies its rows, which follow each other, to shared memory    3. from there to the result, as it came
    lanes   2. a few of a warp hold a row in registers, as in `softmax_rows`, and leave the result where it was

21 elements of 16 bits are no vectors: side by side in registers, each would be loaded and stored by itself. A block's
rows together are a multiple of 16 bytes. Traffic: every array once. Sums as in `softmax_rows`. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import softmax_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.problem import DEFAULT_ALIGN, ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_THREADS, _WARP, _COPY_BYTES = 128, 32, 16
_MOST_ELEMS = 32  # of a thread
_MOST_SHARED_BYTES = 24 << 10  # of a block: some of them copy while others sum
_SHARED_OF_SM = 200 << 10
_STAGED_COST = 0.1  # of a copy's time: what goes through shared memory twice


class Config(NamedTuple):
    """threads: that hold a row together."""

    threads: int

    def __str__(self) -> str:
        return f"t{self.threads}"


class Variant(NamedTuple):
    """What a kernel is compiled for. elems: of a row, that a thread holds."""

    dtype: str
    algorithm: str
    elems: int
    threads: int


class _Fields(NamedTuple):
    """staged: bytes of a block's rows of one array."""

    rows: int
    length: int
    staged: int


@cache
def _moved(dtype: str):
    """Device functions (shared, array, f): a block's rows of an array to shared memory, and from there."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, wide, word, itemsize = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD, ITEMSIZE[dtype]
    copy, load, store = ptx_tile.COPY_ASYNC[_COPY_BYTES], ptx_tile.LOAD_SHARED[4], ptx.STORE[4]
    pointed, of_copy = ptx_tile.pointer_to_shared(dtype), _COPY_BYTES // itemsize

    @ptx.inline
    def extent(f):
        """The first element of a block's rows, and how many bytes of them there are."""
        block = wide(ptx.block_x())
        of_block, rows = wide(f.staged // itemsize), wide(f.rows)
        first = wide(block * of_block)
        there = wide(rows * f.length - first) * itemsize
        return first, integer(min(there, wide(f.staged)))

    @ptx.inline
    def come(shared, array, f):
        first, there = extent(f)
        at = integer(integer(ptx.thread_x()) * _COPY_BYTES)
        while at < there:
            source = ptx.address(array, wide(first + at // itemsize))
            copy(word(shared + word(at)), source, integer(min(integer(there - at), integer(_COPY_BYTES))))
            at = integer(at + _THREADS * _COPY_BYTES)

    @ptx.inline
    def go(shared, array, f):
        first, there = extent(f)
        elements = pointed(shared)
        at = integer(integer(ptx.thread_x()) * _COPY_BYTES)
        while at + _COPY_BYTES <= there:
            store(array, wide(first + at // itemsize), load(word(shared + word(at))))
            at = integer(at + _THREADS * _COPY_BYTES)
        if at < there:
            for i in range(of_copy - 1):
                one = integer(at // itemsize + i)
                if one * itemsize < there:
                    array[wide(first + one)] = elements[one]

    return come, go


class _Grid(NamedTuple):
    """The lane of a row, the row among the block's, and how many elements the row has: none beyond the last."""

    lane: int
    row: int
    length: int


@cache
def _placed(v: Variant):
    """Device functions: (f) -> _Grid, and (pointer, grid, f) -> the place of a thread's elements among a block's."""
    from nbdnn.kernels.cuda import ptx, ptx_tuples

    integer, place, threads = ptx.INTEGER[32], ptx_tuples.Place, v.threads
    at_once, side_bits = _THREADS // threads, threads.bit_length() - 1

    @ptx.inline
    def grid(f):
        thread = integer(ptx.thread_x())
        row, lane = integer(thread >> side_bits), integer(thread & (threads - 1))
        whole = integer(integer(ptx.block_x()) * at_once + row)
        return _Grid(lane, row, f.length if whole < f.rows else integer(0))

    @ptx.inline
    def placed(array, g, f):
        return place(array, integer(g.row * f.length + g.lane), integer(threads), g.lane, integer(threads), g.length)

    return grid, placed


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    is_log, shifts, threads = v.algorithm == "log", v.algorithm != "fast", v.threads
    (come, go), (grid, placed), pointed = _moved(v.dtype), _placed(v), ptx_tile.pointer_to_shared(v.dtype)
    held, wait = ptx_tuples.Held(v.dtype, 1, v.elems, True), ptx_tile.copy_async_wait(0)
    load, widen, store = ptx_tuples.load(held, "-inf"), ptx_tuples.widen(held), ptx_tuples.store(held)
    total, greatest = ptx_tuples.fold(ptx_tuples.total, 1), ptx_tuples.fold(ptx_tuples.larger, 1)
    largest, summed = (ptx_tuples.across(formula, 1, threads) for formula in (ptx_tuples.larger, ptx_tuples.total))
    power, product = (ptx_tuples.each(formula, 2) for formula in (ptx_tuples.power, ptx_tuples.product))
    log_power = ptx_tuples.each(ptx_tuples.log_power, 3)
    reciprocal, log, zeros = (
        ptx_tuples.each(ptx_tuples.reciprocal, 1),
        ptx_tuples.each(ptx_tuples.log, 1),
        ptx_vector.zeros(1),
    )

    def softmax_staged(x, y, f):
        shared = ptx_tile.dynamic_shared()
        come(shared, x, f)
        ptx_tile.copy_async_commit()
        wait()
        ptx.cuda.syncthreads()
        g, elements = grid(f), pointed(shared)
        values = widen(load(placed(elements, g, f)))
        shift = zeros()
        if shifts:
            shift = largest(greatest(values))
        powers = power(values, shift)
        sums = summed(total(powers))
        if is_log:
            store(placed(elements, g, f), log_power(values, shift, log(sums)))
        else:
            store(placed(elements, g, f), product(powers, reciprocal(sums)))
        ptx.cuda.syncthreads()
        go(shared, y, f)

    data = ptx.pointer(v.dtype)
    return softmax_staged, (data, data, ptx.record(_Fields, 32))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_tuples

    v = Variant(*specialised_on)
    is_log, word = v.algorithm == "log", ptx.WORD
    (come, go), (grid, placed), pointed = _moved(v.dtype), _placed(v), ptx_tile.pointer_to_shared(v.dtype)
    held, wait = ptx_tuples.Held(v.dtype, 1, v.elems, True), ptx_tile.copy_async_wait(0)
    load, widen, store = ptx_tuples.load(held, "zero"), ptx_tuples.widen(held), ptx_tuples.store(held)
    total, product = ptx_tuples.fold(ptx_tuples.total, 1), ptx_tuples.each(ptx_tuples.product, 2)
    summed = ptx_tuples.across(ptx_tuples.total, 1, v.threads)
    gradient = ptx_tuples.each(ptx_tuples.log_gradient if is_log else ptx_tuples.gradient, 3)

    def softmax_staged_gradient(dy, y, dx, f):
        shared = ptx_tile.dynamic_shared()
        of_y = word(shared + word(f.staged))
        come(shared, dy, f)
        come(of_y, y, f)
        ptx_tile.copy_async_commit()
        wait()
        ptx.cuda.syncthreads()
        g, elements = grid(f), pointed(shared)
        gradients, outputs = widen(load(placed(elements, g, f))), widen(load(placed(pointed(of_y), g, f)))
        sums = summed(total(gradients) if is_log else total(product(gradients, outputs)))
        store(placed(elements, g, f), gradient(gradients, outputs, sums))
        ptx.cuda.syncthreads()
        go(shared, dx, f)

    data = ptx.pointer(v.dtype)
    return softmax_staged_gradient, (data, data, data, ptx.record(_Fields, 32))


class Staged(LaunchedCandidate[Config]):
    """Short rows whose vectors are of less than 16 bytes."""

    algorithm = "staged"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SoftmaxProblem, device: Gpu) -> Support:
        if reason := plan.refused_rows(problem):
            return Support(False, reason)
        length = problem.rows[1]
        if device.capability < (8, 0):
            return Support(False, f"compute capability {device.capability}: no asynchronous copies before 8.0")
        if problem.align < DEFAULT_ALIGN:
            return Support(
                False, f"arrays begin at multiples of {problem.align} bytes, {_COPY_BYTES} are copied at once"
            )
        if plan.vector_lanes(problem, length) * ITEMSIZE[problem.dtype] == _COPY_BYTES:
            return Support(False, f"{length} elements a row: whole vectors, which need no shared memory")
        if not self.configs(problem, device):
            return Support(False, f"{length} elements a row: no block holds rows of whole {_COPY_BYTES} bytes together")
        return YES

    def configs(self, problem: SoftmaxProblem, device: Gpu) -> tuple[Config, ...]:
        every = (Config(1 << bit) for bit in range(_WARP.bit_length()))
        fitting = [config for config in every if self._fits(problem, config)]
        guesses = ((self.estimate(problem, config, device), config) for config in fitting)
        return plan.worth_measuring(guesses, kind=lambda config: config) if fitting else ()

    def _fits(self, problem: SoftmaxProblem, config: Config) -> bool:
        length, staged = problem.rows[1], _staged_bytes(problem, config)
        if config.threads > 1 and config.threads >= 2 * length:
            return False  # half of them would have nothing
        fits = staged * _inputs(problem) <= _MOST_SHARED_BYTES and ceil(length / config.threads) <= _MOST_ELEMS
        return fits and staged % _COPY_BYTES == 0

    def _resident(self, problem: SoftmaxProblem, config: Config) -> int:
        """Blocks that a multiprocessor holds at once."""
        elems = ceil(problem.rows[1] / config.threads)
        registers = 40 + elems * _inputs(problem)
        by_memory = _SHARED_OF_SM // (_staged_bytes(problem, config) * _inputs(problem) + 1024)
        return max(1, min(plan.resident_blocks(_THREADS, registers), by_memory))

    def estimate(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> float:
        (launch,) = self.launches(problem, config, device)
        elems = ceil(problem.rows[1] / config.threads)
        idle = elems * config.threads / problem.rows[1]  # lanes of the last elements have none
        shape = plan.Shape(_staged_bytes(problem, config), plan.LINE_BYTES, 1)
        return plan.kernel_us(problem, device, launch, shape) * (1 + _STAGED_COST * idle)

    def launches(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> list[Launch]:
        rows, length, _ = problem.rows
        forward = self.op == "softmax_fwd"
        variant = Variant(problem.dtype, problem.algorithm, ceil(length / config.threads), config.threads)
        staged = _staged_bytes(problem, config)
        kernel = _forward_kernel if forward else _backward_kernel
        return [
            Launch(
                source=Source(kernel, variant, _THREADS, self._resident(problem, config)),
                grid=(ceil(rows / (_THREADS // config.threads)), 1, 1),
                pointers=(0, 1) if forward else (0, 1, 2),
                scalars="",
                integers=_Fields(rows, length, staged),
                dynamic_shared_bytes=staged * _inputs(problem),
            )
        ]


def _inputs(problem: SoftmaxProblem) -> int:
    return len(problem.operands) - 1


def _staged_bytes(problem: SoftmaxProblem, config: Config) -> int:
    """Of a block's rows of one array."""
    return _THREADS // config.threads * problem.rows[1] * ITEMSIZE[problem.dtype]


FWD, BWD = Staged("softmax_fwd"), Staged("softmax_bwd")
