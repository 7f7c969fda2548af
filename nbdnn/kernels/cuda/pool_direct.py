"""Direct pooling: every window as it is written, on any window, stride, pad, layout and dtype.

    y[p] = max or sum over r of x[p*u + r - pad]
    dx[i] = sum of dy[p] (a share of it) over the windows p that cover i;  of a maximum: whose first maximum is at i

A thread an output, neighbours in memory to neighbouring threads. The gradient of a maximum searches every window that
covers an element once more. Traffic: each tap of each window is a load, from cache where windows overlap. Sums in
float32 (float64), in a fixed order. This is the candidate that supports everything, and ends every list. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda import pool_element
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.geometry import output_place
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_element import Variant
from nbdnn.kernels.cuda.pool_plan import Pool, index_bits, pool
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_pool import PoolProblem

_THREADS = 256
# Fitted to 237 problems on an H200: taps of all threads, of one thread; of a sum or of a forward's maximum, and where a
# gradient searches for a maximum; and results of all threads.
_LAUNCH_US = 2.4
_TAPS_PER_CLOCK_AND_SM, _SEARCHED_PER_CLOCK_AND_SM, _RESULTS_PER_CLOCK_AND_SM = 8.7, 4.8, 0.67
_TAP_CLOCKS, _SEARCHED_TAP_CLOCKS = 150, 140


class Extents(NamedTuple):
    """What `ptx.split` takes to divide by those of the tensor whose elements threads have."""

    channels: int
    channels_shift: int
    depth: int
    depth_shift: int
    height: int
    height_shift: int
    width: int
    width_shift: int


@cache
def _place(channels_last: bool):
    """`output_place`, which takes `Extents` at last and multiplies instead."""
    from nbdnn.kernels.cuda import ptx

    @ptx.inline
    def divided(dividend, extent):
        return ptx.split(dividend, extent[0], extent[1], extent[2])

    place = output_place(channels_last, divided)

    @ptx.inline
    def placed(element, channels, depth, height, width, e):
        return place(
            element,
            (channels, e.channels, e.channels_shift),
            (depth, e.depth, e.depth_shift),
            (height, e.height, e.height_shift),
            (width, e.width, e.width_shift),
        )

    return placed


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = Variant(*specialised_on)
    integer, real, widen, narrow = (
        ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.dtype]], ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype],
    )  # fmt: skip
    place, (window, scale_of), is_max = (
        _place(v.channels_last),
        pool_element.window_and_scale(v),
        v.mode.startswith("max"),
    )
    lowest = real(float("-inf"))

    @ptx.inline
    def join(found, value):
        if is_max:
            return value if value > found or value != value else found
        return found + value

    def pool_window(x, y, f, e):
        element = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        n, c, d, h, w = place(element, f.channels, f.out_d, f.out_h, f.out_w, e)
        low_d, end_d, low_h, end_h, low_w, end_w = window(d, h, w, f)
        start = integer(n * f.x_n + c * f.x_c)
        found = lowest if is_max else real(0.0)
        i_d = low_d
        while i_d < end_d:
            i_h = low_h
            while i_h < end_h:
                at = integer(start + i_d * f.x_d + i_h * f.x_h + low_w * f.x_w)
                i_w = low_w
                while i_w < end_w:
                    value = widen(ptx.load_constant(x, at))
                    found = join(found, value)
                    at = integer(at + f.x_w)
                    i_w = integer(i_w + 1)
                i_h = integer(i_h + 1)
            i_d = integer(i_d + 1)
        if not is_max and low_d < end_d and low_h < end_h and low_w < end_w:
            found = found * scale_of(d, h, w, f)
        y[element] = narrow(found)

    data = ptx.pointer(v.dtype)
    return pool_window, (data, data, ptx.record(Pool, v.bits), ptx.record(Extents, v.bits))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = Variant(*specialised_on)
    integer, narrow = ptx.INTEGER[v.bits], ptx.NARROW[v.dtype]
    place, gradient = _place(v.channels_last), pool_element.gradient(v)

    def pool_gradient(x, dy, dx, f, e):
        element = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        n, c, d, h, w = place(element, f.channels, f.in_d, f.in_h, f.in_w, e)
        dx[element] = narrow(gradient(x, dy, n, c, d, h, w, f))

    data = ptx.pointer(v.dtype)
    return pool_gradient, (data, data, data, ptx.record(Pool, v.bits), ptx.record(Extents, v.bits))


class Direct(LaunchedCandidate[NoConfig]):
    """Every window as it is written; supports every pooling."""

    algorithm = "direct"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        return YES

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> float:
        searches = self.op == "pool_bwd" and problem.is_max
        taps = problem.flops * (prod(problem.window) if searches else 1)
        per_clock = _SEARCHED_PER_CLOCK_AND_SM if searches else _TAPS_PER_CLOCK_AND_SM
        moved_us = problem.min_bytes / copy_bytes_per_s(device) * 1e6
        met = prod(ceil(extent / stride) for extent, stride in zip(problem.window, problem.stride, strict=True))
        one_by_one = (prod(problem.window) if self.op == "pool_fwd" else met) * _TAP_CLOCKS
        if searches:
            one_by_one = met * prod(problem.window) * _SEARCHED_TAP_CLOCKS
        results = problem.operands[-1].size_elems / _RESULTS_PER_CLOCK_AND_SM
        clocks = one_by_one + (taps / per_clock + results) / device.sms
        return _LAUNCH_US + moved_us + clocks / device.clock_hz * 1e6

    def launches(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        *_, target = problem.operands
        integers = pool(problem, target.size_elems)
        bits = index_bits(problem, integers)
        last = len(problem.operands) - 1
        v = Variant(self.op, problem.dtype, problem.mode.removesuffix("_deterministic"), problem.channels_last, bits)
        forward = self.op == "pool_fwd"
        extents = zip(("depth", "height", "width"), spatial3(target.shape[2:]), strict=True)
        divisors = reciprocals(Extents, {"channels": problem.c, **dict(extents)})
        return [
            Launch(
                source=Source(_forward_kernel if forward else _backward_kernel, v, _THREADS),
                grid=(ceil(integers.elements / _THREADS), 1, 1),
                # A sum's gradient does not look at x.
                pointers=(0, last) if forward else (0, last - 1, last),
                scalars="",
                integers=(*integers, *divisors),
                integer_bits=bits,
            )
        ]


FWD, BWD = Direct("pool_fwd"), Direct("pool_bwd")
