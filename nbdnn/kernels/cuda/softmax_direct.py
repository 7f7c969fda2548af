"""Softmax and its gradient as they are written, on rows of any length and stride and on any dtype.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

A thread, a warp or a block a row; its threads take every so many-th element, once for the maximum, once for the sum and
once for the result. Traffic: x three times (dy and y twice), from cache where rows are short. Sums in the compute type
in a fixed order; exp and log are libdevice's, good to 2 ulp. This is the candidate that supports everything, and ends
the lists. Source: own.
"""

from __future__ import annotations

import math
from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_softmax import SoftmaxProblem

_THREADS, _WARP = 256, 32
_FEW_ROWS = 4096  # too few to give each one thread only
_SHORT = 1024  # elements that a warp takes
_LAUNCH_US, _OVER_COPY = 2.0, 1.34
_STEP_CLOCKS = 170  # of a thread's element, in all passes
_PASSES = {"softmax_fwd": 2.0, "softmax_bwd": 5 / 3}  # over all arrays, where nothing is found in cache


class Variant(NamedTuple):
    """What a kernel is compiled for; threads: of a row."""

    dtype: str
    algorithm: str
    threads: int


class _Fields(NamedTuple):
    """Element i of row (o, j) is number (o * length + i) * inner + j of the array; there are `rows` rows."""

    rows: int
    length: int
    inner: int


@cache
def combined_rows(v: Variant):
    """Device functions: (fields) -> (lane, length, first element) of a thread's row, (value) -> its row's maximum, and
    its row's sum; each in the compute type."""
    from nbdnn.kernels.cuda import ptx

    integer, real, threads = ptx.INTEGER[64], ptx.REAL[DEFAULT_COMPUTE[v.dtype]], v.threads
    at_once, warps, exchanges = _THREADS // threads, threads // _WARP, min(threads, _WARP).bit_length() - 1
    zero, nothing = real(0.0), real(-math.inf)

    @ptx.inline
    def row_of(f):
        thread = integer(ptx.thread_x())
        row, lane = integer(ptx.block_x()) * at_once + thread // threads, thread % threads
        length = f.length if row < f.rows else integer(0)
        outer, j = ptx.divided(row, f.inner)
        return lane, length, outer * f.length * f.inner + j

    @ptx.inline
    def larger(a, b):
        return b if b > a else a

    @ptx.inline
    def added(a, b):
        return a + b

    def combined(formula, neutral):
        @ptx.inline
        def of_row(value):
            for exchange in range(exchanges):
                value = formula(value, ptx.shuffle_xor(value, 1 << exchange))
            if warps > 1:
                parts = ptx.cuda.shared.array(warps, real)
                thread = ptx.thread_x()
                if thread & (_WARP - 1) == 0:
                    parts[thread >> 5] = value
                ptx.cuda.syncthreads()
                value = neutral
                for warp in range(warps):
                    value = formula(value, parts[warp])
            return value

        return of_row

    return row_of, combined(larger, nothing), combined(added, zero)


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = Variant(*specialised_on)
    compute, threads = DEFAULT_COMPUTE[v.dtype], v.threads
    real, integer, widen, narrow = ptx.REAL[compute], ptx.INTEGER[64], ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype]
    is_log, shifts, nothing = v.algorithm == "log", v.algorithm != "fast", -math.inf
    row_of, maximum, total = combined_rows(v)

    @ptx.inline
    def shift_of(x, start, lane, length, inner):
        most, i = real(nothing), lane
        while i < length:
            value = widen(ptx.load_constant(x, start + i * inner))
            most = value if value > most else most
            i = i + threads
        return maximum(most)

    def softmax_direct(x, y, f):
        lane, length, start = row_of(f)
        shift, powers, i = real(0.0), real(0.0), integer(lane)
        if shifts:
            shift = shift_of(x, start, lane, length, f.inner)
        while i < length:
            powers = powers + math.exp(widen(ptx.load_constant(x, start + i * f.inner)) - shift)
            i = i + threads
        powers = total(powers)
        scale = math.log(powers) if is_log else real(1.0) / powers
        i = integer(lane)
        while i < length:
            at = start + i * f.inner
            value = widen(ptx.load_constant(x, at)) - shift
            y[at] = narrow(value - scale if is_log else math.exp(value) * scale)
            i = i + threads

    data = ptx.pointer(v.dtype)
    return softmax_direct, (data, data, ptx.record(_Fields, 64))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = Variant(*specialised_on)
    compute, threads = DEFAULT_COMPUTE[v.dtype], v.threads
    real, integer, widen, narrow = ptx.REAL[compute], ptx.INTEGER[64], ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype]
    is_log = v.algorithm == "log"
    row_of, _, total = combined_rows(v)

    def softmax_direct_gradient(dy, y, dx, f):
        lane, length, start = row_of(f)
        sums, i = real(0.0), integer(lane)
        while i < length:
            at = start + i * f.inner
            term = widen(ptx.load_constant(dy, at))
            sums = sums + (term if is_log else term * widen(ptx.load_constant(y, at)))
            i = i + threads
        sums = total(sums)
        i = integer(lane)
        while i < length:
            at = start + i * f.inner
            gradient, output = widen(ptx.load_constant(dy, at)), widen(ptx.load_constant(y, at))
            dx[at] = narrow(gradient - math.exp(output) * sums if is_log else (gradient - sums) * output)
            i = i + threads

    data = ptx.pointer(v.dtype)
    return softmax_direct_gradient, (data, data, data, ptx.record(_Fields, 64))


def _threads(rows: int, length: int, inner: int) -> int:
    """Of a row: neighbours in memory to neighbouring threads, unless that leaves too few of them."""
    if inner > 1 and rows >= _FEW_ROWS:
        return 1
    return _WARP if length <= _SHORT else _THREADS


class Direct(LaunchedCandidate[NoConfig]):
    """Three passes over every row; supports every softmax."""

    algorithm = "direct"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SoftmaxProblem, device: Gpu) -> Support:
        return YES

    def estimate(self, problem: SoftmaxProblem, config: NoConfig, device: Gpu) -> float:
        copied_us = problem.min_bytes / copy_bytes_per_s(device) * 1e6
        outer, length, inner = problem.rows
        one_by_one = ceil(length / _threads(outer * inner, length, inner)) * _STEP_CLOCKS
        return _LAUNCH_US + copied_us * _PASSES[self.op] * _OVER_COPY + one_by_one / device.clock_hz * 1e6

    def launches(self, problem: SoftmaxProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        outer, length, inner = problem.rows
        rows, forward = outer * inner, self.op == "softmax_fwd"
        threads = _threads(rows, length, inner)
        variant = Variant(problem.dtype, problem.algorithm, threads)
        return [
            Launch(
                source=Source(_forward_kernel if forward else _backward_kernel, variant, _THREADS),
                grid=(ceil(rows / (_THREADS // threads)), 1, 1),
                pointers=(0, 1) if forward else (0, 1, 2),
                scalars="",
                integers=_Fields(rows, length, inner),
                integer_bits=64,
            )
        ]


FWD, BWD = Direct("softmax_fwd"), Direct("softmax_bwd")
