"""Softmax and its gradient where the elements of a row are neighbours: rows side by side in registers, read once.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

    short row    a few lanes of a warp,                            lane 0  1  2  3 | 0  1  2  3 | ...
    longer row   a warp, a block of up to 1024 threads, or a cluster of up to 8 blocks that hold the row together

A thread loads all its vectors of 16 bytes before it uses one; of rows that begin anywhere they are shorter, or whole
with elements beside them (`softmax_held.py`). Warps sum by exchanges; each passes its maximum and the sum of its
powers, shifted by that maximum, to all others of its row through shared memory, behind one barrier: the powers are then
scaled by exp(own maximum - m) / sum. A maximum of nothing is -inf, which nothing is shifted by.

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
from nbdnn.kernels.cuda.softmax_held import Config, Variant, block_threads, grid_of, held_by
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_WARP, _MOST_THREADS = 32, 1024
_CLUSTERS = (1, 2, 4, 8)  # blocks; all GPUs that have clusters have these
_CLUSTER_CAPABILITY, _CLUSTER_THREADS = (9, 0), 256  # threads of a block of a cluster, at least
_MOST_VECTORS = 16  # of a thread
# Of a thread with an element beside its vectors, more than without: of logarithms of 16 bits; else, where the estimate
# without has some to spare.
_EDGE_REGISTERS, _EDGE_REGISTERS_SPARED = 12, -7


class _Fields(NamedTuple):
    rows: int
    length: int


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


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    threads, blocks, _ = v.config
    is_log, shifts, spread = v.algorithm == "log", v.algorithm != "fast", threads * blocks > _WARP
    grid, held = grid_of(v.config), held_by(v)
    joined = _joined(threads, blocks) if spread else None
    load, widen, store = held.load("-inf"), held.widen(), held.store()
    maximum = held.gather(ptx_tuples.itself, ptx_tuples.larger, 1)
    total_power = held.gather(ptx_tuples.power, ptx_tuples.total, 1)
    store_log, warp = held.scatter(ptx_tuples.log_power, 1), min(threads, _WARP)
    total = ptx_tuples.fold(ptx_tuples.total, 1)
    largest, summed = (ptx_tuples.across(formula, 1, warp) for formula in (ptx_tuples.larger, ptx_tuples.total))
    power, product = (ptx_tuples.each(formula, 2) for formula in (ptx_tuples.power, ptx_tuples.product))
    finite, reciprocal = ptx_tuples.each(ptx_tuples.finite, 1), ptx_tuples.each(ptx_tuples.reciprocal, 1)
    log, zeros = ptx_tuples.each(ptx_tuples.log, 1), ptx_vector.zeros(1)

    def softmax_rows(x, y, f):
        if blocks > 1:
            ptx_cluster.arrive()
        g = grid()
        parts = load(x, g, f)

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
            store_log(y, g, f, parts, row_shift, log(sums))
        else:
            scale = reciprocal(sums)
            if spread:
                scale = product(scale, power(most, row_shift))
            store(y, g, f, product(powers, scale))

    data = ptx.pointer(v.dtype)
    return softmax_rows, (data, data, ptx.record(_Fields, 32))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    threads, blocks, _ = v.config
    is_log, spread = v.algorithm == "log", threads * blocks > _WARP
    grid, held = grid_of(v.config), held_by(v)
    joined = _joined(threads, blocks) if spread else None
    load, summed = held.load("zero"), ptx_tuples.across(ptx_tuples.total, 1, min(threads, _WARP))
    dot = held.gather(ptx_tuples.itself if is_log else ptx_tuples.product, ptx_tuples.total, 2)
    finish = held.scatter(ptx_tuples.log_gradient if is_log else ptx_tuples.gradient, 2)
    zeros, zero, word, hide = ptx_vector.zeros(1), ptx.REAL["f32"](0.0), ptx.WORD, held.hidden()

    def softmax_rows_gradient(dy, y, dx, f):
        if blocks > 1:
            ptx_cluster.arrive()
        g = grid()
        gradients, outputs = load(dy, g, f), load(y, g, f)
        sums = summed(dot(gradients, outputs, zeros()))
        if spread:
            _, whole = joined(g.rank, zero, sums[0])
            sums = (whole,)
        nothing = word(f.rows >> 31)
        gradients, outputs = hide(gradients, nothing), hide(outputs, nothing)
        finish(dx, g, f, gradients, outputs, sums)

    data = ptx.pointer(v.dtype)
    return softmax_rows_gradient, (data, data, data, ptx.record(_Fields, 32))


def _lanes(problem: SoftmaxProblem, config: Config) -> int:
    """Elements of a vector."""
    return plan.most_lanes(problem) if config.edges else plan.vector_lanes(problem, problem.rows[1])


def _vectors(problem: SoftmaxProblem, config: Config) -> int:
    """Of a row, that a thread holds: of one with edges as many as lie between them at most."""
    length, lanes = problem.rows[1], _lanes(problem, config)
    return ceil(length // lanes / config.threads / config.blocks)


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
        guesses = [(self.estimate(problem, config, device), config) for config in self.every(problem, device)]
        return plan.worth_measuring(guesses, kind=lambda config: config)

    def every(self, problem: SoftmaxProblem, device: Gpu) -> list[Config]:
        """The configs whose threads have registers for their rows."""
        clusters = _CLUSTERS if device.capability >= _CLUSTER_CAPABILITY else (1,)
        edges = (False, True) if plan.has_edges(problem) else (False,)
        found = []
        for threads in (1 << bit for bit in range(_MOST_THREADS.bit_length())):
            for blocks in clusters if threads >= _CLUSTER_THREADS else (1,):
                every = [Config(threads, blocks, each) for each in edges]
                found += [config for config in every if self._fits(problem, config)]
        return found

    def _fits(self, problem: SoftmaxProblem, config: Config) -> bool:
        lanes, threads = _lanes(problem, config), config.threads * config.blocks
        if config.threads > 1 and threads >= 2 * problem.rows[1] / lanes:
            return False  # half of them would have nothing
        if config.edges and threads < 2 * (lanes - 1):
            return False  # one for each element outside the vectors
        vectors = _vectors(problem, config)
        few = vectors <= _MOST_VECTORS and plan.holds(problem, vectors * lanes)
        return few and self._resident(problem, config) > 0

    def _resident(self, problem: SoftmaxProblem, config: Config) -> int:
        """Blocks that a multiprocessor holds at once."""
        registers = plan.registers(problem, _vectors(problem, config) * _lanes(problem, config), 1)
        if config.edges:
            logs = problem.op == "softmax_fwd" and problem.algorithm == "log" and problem.dtype != "f32"
            registers += _EDGE_REGISTERS if logs else _EDGE_REGISTERS_SPARED
        return plan.resident_blocks(block_threads(config), registers)

    def estimate(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> float:
        (launch,) = self.launches(problem, config, device)
        vectors, lanes, itemsize = _vectors(problem, config), _lanes(problem, config), ITEMSIZE[problem.dtype]
        held_bytes = problem.rows[1] * itemsize * launch.source.threads / (config.threads * config.blocks)
        # Lanes that hold one vector each read one line together, be they of one row or of several.
        line_bytes = config.threads * lanes * itemsize if vectors > 1 else plan.LINE_BYTES
        warps = config.threads / _WARP
        shape = plan.Shape(held_bytes, line_bytes, vectors, vectors * lanes, warps, lanes * itemsize)
        return plan.kernel_us(problem, device, launch, shape)

    def launches(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> list[Launch]:
        rows, length, _ = problem.rows
        lanes, threads = _lanes(problem, config), block_threads(config)
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
