"""Softmax and its gradient where the elements of a row are neighbours: rows side by side in registers, read once.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

    short row    a few lanes of a warp,                            lane 0  1  2  3 | 0  1  2  3 | ...
    longer row   a warp, a block of up to 1024 threads, or a cluster of up to 8 blocks that hold the row together

A thread loads all its vectors of 16 bytes before it uses one. Warps sum by exchanges; each passes its maximum and the
sum of its powers, shifted by that maximum, to all others of its row through shared memory, behind one barrier: the
powers are then scaled by exp(own maximum - m) / sum. A maximum of nothing is -inf, which nothing is shifted by.

Traffic: every array once. Sums in float32 in a fixed order; exp is the hardware's, off by 2^-22 and by what a
difference of float32 is. Source: own; the merged sums are those of the online normaliser, arXiv:1805.02867.
"""

from __future__ import annotations

import math
from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import softmax_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_WARP, _MOST_THREADS = 32, 1024
_SHORT_ROW_THREADS = 128  # of a block whose rows have a warp or less each
_CLUSTERS = (1, 2, 4, 8)  # blocks; all GPUs that have clusters have these
_CLUSTER_CAPABILITY, _CLUSTER_THREADS = (9, 0), 256  # threads of a block of a cluster, at least
_MOST_VECTORS = 16  # of a thread


class Config(NamedTuple):
    """threads: of a block, that hold a row together; blocks: of a cluster that do."""

    threads: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"t{self.threads}b{self.blocks}"


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    algorithm: str
    lanes: int
    vectors: int
    config: Config


class _Fields(NamedTuple):
    rows: int
    length: int


def block_threads(config: Config) -> int:
    return config.threads if config.threads > _WARP else _SHORT_ROW_THREADS


@cache
def _joined(threads: int, blocks: int):
    """Device function (maximum, total of exp(x - maximum)) of each warp -> the same of the row, for all of them."""
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_tile, ptx_tuples

    integer, real, u32 = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD
    warps = threads // _WARP
    parts = warps * blocks
    both, rounds = 2 * parts, ceil(parts / _WARP)
    largest, summed = (ptx_tuples.across(formula, 1, _WARP) for formula in (ptx_tuples.larger, ptx_tuples.total))
    power, to_block, nothing = ptx_tuples.each(ptx_tuples.power, 2), ptx_cluster.store_to_block, -math.inf

    @ptx.inline
    def passed_on(values, part, lane, maximum, total):
        if blocks == 1:
            if lane == 0:
                values[part] = maximum
                values[parts + part] = total
            ptx.cuda.syncthreads()
        else:
            ptx_cluster.wait()
            if lane < blocks:
                here = ptx_tile.shared_address(values)
                to_block(u32(here + u32(4 * part)), lane, maximum)
                to_block(u32(here + u32(4 * (parts + part))), lane, total)
            ptx_cluster.arrive()
            ptx_cluster.wait()

    @ptx.inline
    def joined(rank, maximum, total):
        values = ptx.cuda.shared.array(both, real)
        thread = integer(ptx.thread_x())
        lane = integer(thread & (_WARP - 1))
        passed_on(values, integer(rank * warps + (thread >> 5)), lane, maximum, total)
        every = real(nothing)
        for round_ in range(rounds):
            part = integer(lane + round_ * _WARP)
            if part < parts:
                every = values[part] if values[part] > every else every
        every = largest((every,))[0]
        sums = real(0.0)
        for round_ in range(rounds):
            part = integer(lane + round_ * _WARP)
            if part < parts:
                sums = ptx.fma(power((values[part],), (every,))[0], values[parts + part], sums)
        return every, summed((sums,))[0]

    return joined


class _Grid(NamedTuple):
    """Where a thread's vectors lie."""

    rank: int
    row: int
    column: int


@cache
def _placed(v: Variant):
    """Device functions: () -> _Grid, and (pointer, grid, fields) -> the place of its vectors."""
    from nbdnn.kernels.cuda import ptx, ptx_tuples

    integer, (threads, blocks) = ptx.INTEGER[32], v.config
    at_once = block_threads(v.config) // threads  # rows of a block
    lanes, step = v.lanes, v.lanes * threads * blocks
    place, side_bits, block_bits = ptx_tuples.Place, threads.bit_length() - 1, blocks.bit_length() - 1

    @ptx.inline
    def grid():
        thread, block = integer(ptx.thread_x()), integer(ptx.block_x())
        first, lane = integer(thread >> side_bits), integer(thread & (threads - 1))
        rank = integer(block & (blocks - 1))
        row = integer((block >> block_bits) * at_once + first)
        return _Grid(rank, row, integer(integer(rank * threads + lane) * lanes))

    @ptx.inline
    def placed(array, g, f):
        end = f.length if g.row < f.rows else integer(0)
        return place(array, g.row * f.length + g.column, step, g.column, integer(step), end)

    return grid, placed


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    threads, blocks = v.config
    is_log, shifts, spread = v.algorithm == "log", v.algorithm != "fast", threads * blocks > _WARP
    grid, placed = _placed(v)
    joined = _joined(threads, blocks) if spread else None
    held, warp = ptx_tuples.Held(v.dtype, v.lanes, v.vectors), min(threads, _WARP)
    load, widen, store = ptx_tuples.load(held, "-inf"), ptx_tuples.widen(held), ptx_tuples.store(held)
    maximum = ptx_tuples.gather(held, ptx_tuples.itself, ptx_tuples.larger, 1)
    total_power = ptx_tuples.gather(held, ptx_tuples.power, ptx_tuples.total, 1)
    store_log = ptx_tuples.scatter(held, ptx_tuples.log_power, 1, 2)
    total = ptx_tuples.fold(ptx_tuples.total, 1)
    largest, summed = (ptx_tuples.across(formula, 1, warp) for formula in (ptx_tuples.larger, ptx_tuples.total))
    power, product = (ptx_tuples.each(formula, 2) for formula in (ptx_tuples.power, ptx_tuples.product))
    finite, reciprocal = ptx_tuples.each(ptx_tuples.finite, 1), ptx_tuples.each(ptx_tuples.reciprocal, 1)
    log, zeros = ptx_tuples.each(ptx_tuples.log, 1), ptx_vector.zeros(1)

    def softmax_rows(x, y, f):
        if blocks > 1:
            ptx_cluster.arrive()
        g = grid()
        parts = load(placed(x, g, f))

        # 1. Powers and their sum, of a warp or less.
        most = zeros()
        if shifts:
            most = largest(maximum(parts, most))
        shift = finite(most) if spread else most
        if is_log:
            sums = summed(total_power(parts, shift))
        else:
            powers = power(widen(parts), shift)
            sums = summed(total(powers))

        # 2. Of the whole row.
        row_shift = shift
        if spread:
            every, whole = joined(g.rank, most[0], sums[0])
            row_shift, sums = (every,), (whole,)

        # 3. What is stored.
        if is_log:
            store_log(placed(y, g, f), parts, row_shift, log(sums))
        else:
            scale = reciprocal(sums)
            if spread:
                scale = product(scale, power(most, row_shift))
            store(placed(y, g, f), product(powers, scale))

    data = ptx.pointer(v.dtype)
    return softmax_rows, (data, data, ptx.record(_Fields, 32))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    threads, blocks = v.config
    is_log, spread = v.algorithm == "log", threads * blocks > _WARP
    grid, placed = _placed(v)
    joined = _joined(threads, blocks) if spread else None
    held, warp = ptx_tuples.Held(v.dtype, v.lanes, v.vectors), min(threads, _WARP)
    load, summed = ptx_tuples.load(held, "zero"), ptx_tuples.across(ptx_tuples.total, 1, warp)
    dot = ptx_tuples.gather(held, ptx_tuples.itself if is_log else ptx_tuples.product, ptx_tuples.total, 2)
    finish = ptx_tuples.scatter(held, ptx_tuples.log_gradient if is_log else ptx_tuples.gradient, 2, 1)
    zeros = ptx_vector.zeros(1)
    zero, word, hide = ptx.REAL["f32"](0.0), ptx.WORD, ptx_tuples.hidden(held)

    def softmax_rows_gradient(dy, y, dx, f):
        if blocks > 1:
            ptx_cluster.arrive()
        g = grid()
        gradients, outputs = load(placed(dy, g, f)), load(placed(y, g, f))
        sums = summed(dot(gradients, outputs, zeros()))
        if spread:
            _, whole = joined(g.rank, zero, sums[0])
            sums = (whole,)
        nothing = word(f.rows >> 31)
        gradients, outputs = hide(gradients, nothing), hide(outputs, nothing)
        finish(placed(dx, g, f), gradients, outputs, sums)

    data = ptx.pointer(v.dtype)
    return softmax_rows_gradient, (data, data, data, ptx.record(_Fields, 32))


def _vectors(problem: SoftmaxProblem, config: Config) -> int:
    """Of a row, that a thread holds."""
    length = problem.rows[1]
    return ceil(length / plan.vector_lanes(problem, length) / config.threads / config.blocks)


class Rows(LaunchedCandidate[Config]):
    """Rows of neighbours, as long as registers of a block or a cluster hold."""

    algorithm = "rows"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SoftmaxProblem, device: Gpu) -> Support:
        if reason := plan.refused_rows(problem):
            return Support(False, reason)
        if not self.every(problem, device):
            return Support(False, f"{problem.rows[1]} elements a row: more than the registers of a cluster hold")
        return YES

    def configs(self, problem: SoftmaxProblem, device: Gpu) -> tuple[Config, ...]:
        every = self.every(problem, device)
        guesses = ((self.estimate(problem, config, device), config) for config in every)
        return plan.worth_measuring(guesses, kind=lambda config: config)

    def every(self, problem: SoftmaxProblem, device: Gpu) -> list[Config]:
        """The configs whose threads have registers for their rows."""
        found = []
        clusters = _CLUSTERS if device.capability >= _CLUSTER_CAPABILITY else (1,)
        for threads in (1 << bit for bit in range(_MOST_THREADS.bit_length())):
            for blocks in clusters if threads >= _CLUSTER_THREADS else (1,):
                found += self._of_threads(problem, threads, blocks)
        return found

    def _of_threads(self, problem: SoftmaxProblem, threads: int, blocks: int) -> list[Config]:
        config, lanes = Config(threads, blocks), plan.vector_lanes(problem, problem.rows[1])
        vectors = _vectors(problem, config)
        if threads > 1 and threads * blocks >= 2 * problem.rows[1] / lanes:
            return []  # half of them would have nothing
        few = vectors <= _MOST_VECTORS and plan.holds(problem, vectors * lanes)
        return [config] if few and self._resident(problem, config) else []

    def _resident(self, problem: SoftmaxProblem, config: Config) -> int:
        """Blocks that a multiprocessor holds at once."""
        elems = _vectors(problem, config) * plan.vector_lanes(problem, problem.rows[1])
        registers = plan.registers(problem, elems, 1)
        return plan.resident_blocks(block_threads(config), registers)

    def estimate(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> float:
        (launch,) = self.launches(problem, config, device)
        vectors, lane_bytes = (
            _vectors(problem, config),
            plan.vector_lanes(problem, problem.rows[1]) * ITEMSIZE[problem.dtype],
        )
        held_bytes = (
            problem.rows[1] * ITEMSIZE[problem.dtype] * launch.source.threads / (config.threads * config.blocks)
        )
        # Lanes that hold one vector each read one line together, be they of one row or of several.
        line_bytes = config.threads * lane_bytes if vectors > 1 else plan.LINE_BYTES
        return plan.kernel_us(problem, device, launch, plan.Shape(held_bytes, line_bytes, vectors))

    def launches(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> list[Launch]:
        rows, length, _ = problem.rows
        lanes, threads = plan.vector_lanes(problem, length), block_threads(config)
        variant = Variant(problem.dtype, problem.algorithm, lanes, _vectors(problem, config), config)
        forward = self.op == "softmax_fwd"
        kernel = _forward_kernel if forward else _backward_kernel
        return [
            Launch(
                source=Source(kernel, variant, threads, self._resident(problem, config)),
                grid=(ceil(rows / (threads // config.threads)) * config.blocks, 1, 1),
                pointers=(0, 1) if forward else (0, 1, 2),
                scalars="",
                integers=_Fields(rows, length),
                cluster=config.blocks,
            )
        ]


FWD, BWD = Rows("softmax_fwd"), Rows("softmax_bwd")
