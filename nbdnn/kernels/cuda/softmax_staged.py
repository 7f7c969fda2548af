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
from nbdnn.kernels.cuda.staged import COPY_BYTES, staged
from nbdnn.problem import DEFAULT_ALIGN, ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_THREADS, _WARP = 128, 32
_MOST_ELEMS = 32  # of a thread
_MOST_SHARED_BYTES = 24 << 10  # of a block: some of them copy while others sum
_SHARED_OF_SM = 200 << 10
# Of a thread, beside its elements; a forward on a H200 reads them again rather than keep all (f16, 21 classes: 12.6 us
# with 40 registers, 13.4 with 56).
_REGISTERS, _REREADING_REGISTERS = 40, 18
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
    """size: bytes of a block's rows of one array."""

    rows: int
    length: int
    size: int


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
    is_log, shifts, wide = v.algorithm == "log", v.algorithm != "fast", ptx.INTEGER[64]
    (come, go), (grid, placed), pointed = (
        staged(v.dtype, _THREADS, False),
        _placed(v),
        ptx_tile.pointer_to_shared(v.dtype),
    )
    held, wait = ptx_tuples.Held(v.dtype, 1, v.elems, True), ptx_tile.copy_async_wait(0)
    load, widen, store = ptx_tuples.load(held, "-inf"), ptx_tuples.widen(held), ptx_tuples.store(held)
    total, greatest = ptx_tuples.fold(ptx_tuples.total, 1), ptx_tuples.fold(ptx_tuples.larger, 1)
    largest, summed = (ptx_tuples.across(formula, 1, v.threads) for formula in (ptx_tuples.larger, ptx_tuples.total))
    power, product = (ptx_tuples.each(formula, 2) for formula in (ptx_tuples.power, ptx_tuples.product))
    log_power = ptx_tuples.each(ptx_tuples.log_power, 3)
    reciprocal, log, zeros = (
        ptx_tuples.each(ptx_tuples.reciprocal, 1),
        ptx_tuples.each(ptx_tuples.log, 1),
        ptx_vector.zeros(1),
    )

    def softmax_staged(x, y, f):
        shared, whole = ptx_tile.dynamic_shared(), wide(wide(f.rows) * f.length)
        come(shared, x, whole, f.size)
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
        go(shared, y, whole, f.size)

    data = ptx.pointer(v.dtype)
    return softmax_staged, (data, data, ptx.record(_Fields, 32))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_tuples

    v = Variant(*specialised_on)
    is_log, word, wide = v.algorithm == "log", ptx.WORD, ptx.INTEGER[64]
    (come, go), (grid, placed), pointed = (
        staged(v.dtype, _THREADS, False),
        _placed(v),
        ptx_tile.pointer_to_shared(v.dtype),
    )
    held, wait = ptx_tuples.Held(v.dtype, 1, v.elems, True), ptx_tile.copy_async_wait(0)
    load, widen, store = ptx_tuples.load(held, "zero"), ptx_tuples.widen(held), ptx_tuples.store(held)
    total, product = ptx_tuples.fold(ptx_tuples.total, 1), ptx_tuples.each(ptx_tuples.product, 2)
    summed = ptx_tuples.across(ptx_tuples.total, 1, v.threads)
    gradient = ptx_tuples.each(ptx_tuples.log_gradient if is_log else ptx_tuples.gradient, 3)

    def softmax_staged_gradient(dy, y, dx, f):
        shared, whole = ptx_tile.dynamic_shared(), wide(wide(f.rows) * f.length)
        of_y = word(shared + word(f.size))
        come(shared, dy, whole, f.size)
        come(of_y, y, whole, f.size)
        ptx_tile.copy_async_commit()
        wait()
        ptx.cuda.syncthreads()
        g, elements = grid(f), pointed(shared)
        gradients, outputs = widen(load(placed(elements, g, f))), widen(load(placed(pointed(of_y), g, f)))
        sums = summed(total(gradients) if is_log else total(product(gradients, outputs)))
        store(placed(elements, g, f), gradient(gradients, outputs, sums))
        ptx.cuda.syncthreads()
        go(shared, dx, whole, f.size)

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
        if problem.align < DEFAULT_ALIGN:
            return Support(
                False, f"arrays begin at multiples of {problem.align} bytes, {COPY_BYTES} are copied at once"
            )
        if plan.vector_lanes(problem, length) * ITEMSIZE[problem.dtype] == COPY_BYTES:
            return Support(False, f"{length} elements a row: whole vectors, which need no shared memory")
        if not self.configs(problem, device):
            return Support(False, f"{length} elements a row: no block holds rows of whole {COPY_BYTES} bytes together")
        return YES

    def configs(self, problem: SoftmaxProblem, device: Gpu) -> tuple[Config, ...]:
        every = (Config(1 << bit) for bit in range(_WARP.bit_length()))
        fitting = [config for config in every if self._fits(problem, config)]
        guesses = ((self.estimate(problem, config, device), config) for config in fitting)
        return plan.worth_measuring(guesses, kind=lambda config: config) if fitting else ()

    def _fits(self, problem: SoftmaxProblem, config: Config) -> bool:
        length, size = problem.rows[1], _staged_bytes(problem, config)
        if config.threads > 1 and config.threads >= 2 * length:
            return False  # half of them would have nothing
        fits = size * _inputs(problem) <= _MOST_SHARED_BYTES and ceil(length / config.threads) <= _MOST_ELEMS
        return fits and size % COPY_BYTES == 0

    def _resident(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> int:
        """Blocks that a multiprocessor holds at once."""
        elems = ceil(problem.rows[1] / config.threads)
        rereads = self.op == "softmax_fwd" and device.capability[0] == 9
        registers = (_REREADING_REGISTERS if rereads else _REGISTERS) + elems * _inputs(problem)
        by_memory = _SHARED_OF_SM // (_staged_bytes(problem, config) * _inputs(problem) + 1024)
        return max(1, min(plan.resident_blocks(_THREADS, registers), by_memory))

    def estimate(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> float:
        (launch,) = self.launches(problem, config, device)
        elems = ceil(problem.rows[1] / config.threads)
        idle = elems * config.threads / problem.rows[1]  # lanes of the last elements have none
        shape = plan.Shape(_staged_bytes(problem, config), plan.LINE_BYTES, 1, elems, 1.0)
        return plan.kernel_us(problem, device, launch, shape) * (1 + _STAGED_COST * idle)

    def launches(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> list[Launch]:
        rows, length, _ = problem.rows
        forward = self.op == "softmax_fwd"
        variant = Variant(problem.dtype, problem.algorithm, ceil(length / config.threads), config.threads)
        size = _staged_bytes(problem, config)
        kernel = _forward_kernel if forward else _backward_kernel
        return [
            Launch(
                source=Source(kernel, variant, _THREADS, self._resident(problem, config, device)),
                grid=(ceil(rows / (_THREADS // config.threads)), 1, 1),
                pointers=(0, 1) if forward else (0, 1, 2),
                scalars="",
                integers=_Fields(rows, length, size),
                dynamic_shared_bytes=size * _inputs(problem),
            )
        ]


def _inputs(problem: SoftmaxProblem) -> int:
    return len(problem.operands) - 1


def _staged_bytes(problem: SoftmaxProblem, config: Config) -> int:
    """Of a block's rows of one array."""
    return _THREADS // config.threads * problem.rows[1] * ITEMSIZE[problem.dtype]


FWD, BWD = Staged("softmax_fwd"), Staged("softmax_bwd")
