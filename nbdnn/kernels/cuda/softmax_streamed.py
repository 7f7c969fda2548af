"""Softmax and its gradient of long rows whose elements are neighbours: a block a row, which it reads twice.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

A row is summed from its beginning to its end, and scaled from its end to its beginning: what was read last is still in
the first-level cache, the rest in the second-level one. Threads hold a few vectors and not a row, so that a
multiprocessor has all its threads, of rows some of which are summed while others are stored.

Traffic: from memory every array once, as long as the rows that are under way fit into the second-level cache. A thread
shifts its powers by its largest element so far, scaled anew where that grows; its sum meets the others as in
`softmax_rows`. Source: own; the running sums are the online normaliser's, arXiv:1805.02867.
"""

from __future__ import annotations

import math
from itertools import product as pairs
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import softmax_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.softmax_rows import joined
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_WARP = 32
_THREADS, _VECTORS = (256, 512, 1024), (1, 2)
_RESIDENT = 1536  # threads of a multiprocessor, of 40 registers each
_MOST_ELEMS = 2**31 - 2**16  # int32, with a step beyond the last
_LAUNCH_US = 2.5
_SECOND_READ = 0.1  # of a copy's time, where it is from cache


class Config(NamedTuple):
    """threads: of a block. vectors: of each array, that a thread asks for at once."""

    threads: int
    vectors: int

    def __str__(self) -> str:
        return f"t{self.threads}v{self.vectors}"


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    algorithm: str
    lanes: int
    config: Config


class _Fields(NamedTuple):
    """Elements of a row, and those before its last step."""

    length: int
    last: int


def _placed(v: Variant):
    """Device function (pointer, position, f) -> the place of a thread's vectors in its row."""
    from nbdnn.kernels.cuda import ptx, ptx_tuples

    integer, wide, step, place = ptx.INTEGER[32], ptx.INTEGER[64], v.lanes * v.config.threads, ptx_tuples.Place

    @ptx.inline
    def placed(array, position, f):
        row = wide(ptx.block_x()) * wide(f.length)
        return place(array, row + wide(position), integer(step), position, integer(step), f.length)

    return placed


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    threads, vectors = v.config
    integer, real, step = ptx.INTEGER[32], ptx.REAL["f32"], v.lanes * threads * vectors
    is_log, shifts, nothing = v.algorithm == "log", v.algorithm != "fast", -math.inf
    placed, of_row = _placed(v), joined(threads, 1)
    held = ptx_tuples.Held(v.dtype, v.lanes, vectors)
    load = ptx_tuples.load(held, "-inf")
    maximum = ptx_tuples.gather(held, ptx_tuples.itself, ptx_tuples.larger, 1)
    total_power = ptx_tuples.gather(held, ptx_tuples.power, ptx_tuples.total, 1)
    finish = ptx_tuples.scatter(held, ptx_tuples.log_power if is_log else ptx_tuples.power_share, 1, 2)
    largest, summed = (ptx_tuples.across(formula, 1, _WARP) for formula in (ptx_tuples.larger, ptx_tuples.total))
    larger, power, product, total = (
        ptx_tuples.each(formula, 2)
        for formula in (ptx_tuples.larger, ptx_tuples.power, ptx_tuples.product, ptx_tuples.total)
    )
    finite, last = (ptx_tuples.each(formula, 1) for formula in (
        ptx_tuples.finite, ptx_tuples.log if is_log else ptx_tuples.reciprocal
    ))  # fmt: skip
    zeros = ptx_vector.zeros(1)

    def softmax_streamed(x, y, f):
        first = integer(ptx.thread_x() * v.lanes)

        # 1. Powers' sums, of a thread and of a warp.
        most, sums, position = (real(nothing if shifts else 0.0),), zeros(), first
        while position < f.length:
            parts = load(placed(x, position, f))
            before = most
            if shifts:
                most = larger(most, maximum(parts, zeros()))
            shift = finite(most)
            sums = total(product(sums, power(before, shift)), total_power(parts, shift))
            position = integer(position + step)
        of_warp = largest(most)
        sums = summed(product(sums, power(most, finite(of_warp))))

        # 2. Of the row; what is stored.
        every, whole = of_row(integer(0), of_warp[0], sums[0])
        scale, position = last((whole,)), integer(first + f.last)
        while position >= 0:
            finish(placed(y, position, f), load(placed(x, position, f)), (every,), scale)
            position = integer(position - step)

    data = ptx.pointer(v.dtype)
    return softmax_streamed, (data, data, ptx.record(_Fields, 32))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    threads, vectors = v.config
    integer, zero, step = ptx.INTEGER[32], ptx.REAL["f32"](0.0), v.lanes * threads * vectors
    is_log = v.algorithm == "log"
    placed, of_row = _placed(v), joined(threads, 1)
    held = ptx_tuples.Held(v.dtype, v.lanes, vectors)
    load, summed = ptx_tuples.load(held, "zero"), ptx_tuples.across(ptx_tuples.total, 1, _WARP)
    dot = ptx_tuples.gather(held, ptx_tuples.itself if is_log else ptx_tuples.product, ptx_tuples.total, 2)
    finish = ptx_tuples.scatter(held, ptx_tuples.log_gradient if is_log else ptx_tuples.gradient, 2, 1)
    total, zeros = ptx_tuples.each(ptx_tuples.total, 2), ptx_vector.zeros(1)

    def softmax_streamed_gradient(dy, y, dx, f):
        first = integer(ptx.thread_x() * v.lanes)
        sums, position = zeros(), first
        while position < f.length:
            gradients, outputs = load(placed(dy, position, f)), load(placed(y, position, f))
            sums = total(sums, dot(gradients, outputs, zeros()))
            position = integer(position + step)
        _, whole = of_row(integer(0), zero, summed(sums)[0])
        position = integer(first + f.last)
        while position >= 0:
            gradients, outputs = load(placed(dy, position, f)), load(placed(y, position, f))
            finish(placed(dx, position, f), gradients, outputs, (whole,))
            position = integer(position - step)

    data = ptx.pointer(v.dtype)
    return softmax_streamed_gradient, (data, data, data, ptx.record(_Fields, 32))


class Streamed(LaunchedCandidate[Config]):
    """Rows of neighbours, of any length."""

    algorithm = "streamed"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SoftmaxProblem, device: Gpu) -> Support:
        if reason := plan.refused_rows(problem):
            return Support(False, reason)
        length = problem.rows[1]
        return YES if length <= _MOST_ELEMS else Support(False, f"{length} elements a row, at most {_MOST_ELEMS}")

    def configs(self, problem: SoftmaxProblem, device: Gpu) -> tuple[Config, ...]:
        every = [Config(*each) for each in pairs(_THREADS, _VECTORS)]
        guesses = ((self.estimate(problem, config, device), config) for config in every)
        return plan.worth_measuring(guesses, kind=lambda config: config)

    def estimate(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> float:
        rows, length, _ = problem.rows
        copy_us = problem.min_bytes / copy_bytes_per_s(device) * 1e6
        # A row takes whole steps of a block; what is under way is read from cache the second time.
        step = config.threads * config.vectors * plan.vector_lanes(problem, length)
        filled = length / (math.ceil(length / step) * step)
        under_way = min(rows, device.sms * _RESIDENT // config.threads) * length
        kept = under_way * ITEMSIZE[problem.dtype] * (len(problem.operands) - 1) <= device.l2_bytes
        return _LAUNCH_US + copy_us * (1 + (_SECOND_READ if kept else 2 / 3)) / filled

    def launches(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> list[Launch]:
        rows, length, _ = problem.rows
        forward, lanes = self.op == "softmax_fwd", plan.vector_lanes(problem, length)
        step = config.threads * config.vectors * lanes
        variant = Variant(problem.dtype, problem.algorithm, lanes, config)
        kernel = _forward_kernel if forward else _backward_kernel
        return [
            Launch(
                source=Source(kernel, variant, config.threads, _RESIDENT // config.threads),
                grid=(rows, 1, 1),
                pointers=(0, 1) if forward else (0, 1, 2),
                scalars="",
                integers=_Fields(length, (length - 1) // step * step),
            )
        ]


FWD, BWD = Streamed("softmax_fwd"), Streamed("softmax_bwd")
