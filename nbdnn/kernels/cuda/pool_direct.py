"""Direct pooling: every window as it is written, on any window, stride, pad, layout and dtype.

    y[p] = max or sum over r of x[p*u + r - pad]
    dx[i] = sum of dy[p] (a share of it) over the windows p that cover i;  of a maximum: whose first maximum is at i

A thread an output, neighbours in memory to neighbouring threads. The gradient of a maximum searches every window that
covers an element once more. Traffic: each tap of each window is a load, from cache where windows overlap. Sums in
float32 (float64), in a fixed order. This is the candidate that supports everything, and ends every list. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import output_place
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_plan import Pool, index_bits, pool
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_pool import PoolProblem

_THREADS = 256
_LAUNCH_US = 3.0
# Seen on an H200: 3 to 3.7 taps of a sum or of a forward's maximum, 1 to 2.5 where a gradient searches for a maximum.
_TAPS_PER_CLOCK_AND_SM, _SEARCHED_PER_CLOCK_AND_SM = 3.5, 1.2


class _Variant(NamedTuple):
    """What a kernel is compiled for."""

    op: str
    dtype: str
    mode: str
    channels_last: bool
    bits: int


def _functions(v: _Variant):
    """Device functions (d, h, w, f) of a window: its part inside of the image, from and to on each axis, and what its
    sum is multiplied by."""
    from nbdnn.kernels.cuda import ptx

    integer, real = ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.dtype]]
    excludes_pad, is_sum = v.mode == "average_exc_pad", v.mode == "sum"

    @ptx.inline
    def inside(position, stride, pad, taps, extent):
        start = integer(position * stride - pad)
        end = integer(start + taps)
        return start if start > 0 else integer(0), end if end < extent else extent

    @ptx.inline
    def window(d, h, w, f):
        low_d, end_d = inside(d, f.stride_d, f.pad_d, f.taps_d, f.in_d)
        low_h, end_h = inside(h, f.stride_h, f.pad_h, f.taps_h, f.in_h)
        low_w, end_w = inside(w, f.stride_w, f.pad_w, f.taps_w, f.in_w)
        return low_d, end_d, low_h, end_h, low_w, end_w

    @ptx.inline
    def scale_of(d, h, w, f):
        if is_sum:
            return real(1.0)
        count = integer(f.taps_d * f.taps_h * f.taps_w)
        if excludes_pad:
            low_d, end_d, low_h, end_h, low_w, end_w = window(d, h, w, f)
            count = integer((end_d - low_d) * (end_h - low_h) * (end_w - low_w))
        return real(1.0) / real(count)

    return window, scale_of


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = _Variant(*specialised_on)
    integer, real, widen, narrow = (
        ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.dtype]], ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype],
    )  # fmt: skip
    place, (window, scale_of), is_max = output_place(v.channels_last), _functions(v), v.mode.startswith("max")
    lowest = real(float("-inf"))

    @ptx.inline
    def join(found, value):
        if is_max:
            return value if value > found or value != value else found
        return found + value

    def pool_window(x, y, f):
        element = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        n, c, d, h, w = place(element, f.channels, f.out_d, f.out_h, f.out_w)
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
    return pool_window, (data, data, ptx.record(Pool, v.bits))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = _Variant(*specialised_on)
    integer, real, widen, narrow = (
        ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.dtype]], ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype],
    )  # fmt: skip
    place, (window, scale_of), is_max = output_place(v.channels_last), _functions(v), v.mode.startswith("max")
    lowest = real(float("-inf"))

    @ptx.inline
    def covering(position, stride, pad, taps, extent):
        """First and end of the windows that cover a position of the image."""
        end, _ = ptx.divided(integer(position + pad), stride)
        first, _ = ptx.divided(integer(position + pad - taps + stride), stride)
        first = first if position + pad >= taps else integer(0)
        end = integer(end + 1)
        return first, end if end < extent else extent

    @ptx.inline
    def first_maximum(x, start, d, h, w, f):
        """Where in the image the maximum of a window is: as an offset from `start`."""
        low_d, end_d, low_h, end_h, low_w, end_w = window(d, h, w, f)
        found, place_found = lowest, integer(-1)
        i_d = low_d
        while i_d < end_d:
            i_h = low_h
            while i_h < end_h:
                at = integer(i_d * f.x_d + i_h * f.x_h + low_w * f.x_w)
                i_w = low_w
                while i_w < end_w:
                    value = widen(ptx.load_constant(x, integer(start + at)))
                    better = value > found or value != value or place_found < 0
                    found = value if better else found
                    place_found = at if better else place_found
                    at = integer(at + f.x_w)
                    i_w = integer(i_w + 1)
                i_h = integer(i_h + 1)
            i_d = integer(i_d + 1)
        return place_found

    def pool_gradient(x, dy, dx, f):
        element = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        n, c, i_d, i_h, i_w = place(element, f.channels, f.in_d, f.in_h, f.in_w)
        first_d, end_d = covering(i_d, f.stride_d, f.pad_d, f.taps_d, f.out_d)
        first_h, end_h = covering(i_h, f.stride_h, f.pad_h, f.taps_h, f.out_h)
        first_w, end_w = covering(i_w, f.stride_w, f.pad_w, f.taps_w, f.out_w)
        start = integer(n * f.x_n + c * f.x_c)
        here = integer(i_d * f.x_d + i_h * f.x_h + i_w * f.x_w)
        total = real(0.0)
        d = first_d
        while d < end_d:
            h = first_h
            while h < end_h:
                w = first_w
                while w < end_w:
                    at = integer(n * f.y_n + c * f.y_c + d * f.y_d + h * f.y_h + w * f.y_w)
                    if is_max:
                        if first_maximum(x, start, d, h, w, f) == here:
                            total = total + widen(ptx.load_constant(dy, at))
                    else:
                        total = total + widen(ptx.load_constant(dy, at)) * scale_of(d, h, w, f)
                    w = integer(w + 1)
                h = integer(h + 1)
            d = integer(d + 1)
        dx[element] = narrow(total)

    data = ptx.pointer(v.dtype)
    return pool_gradient, (data, data, data, ptx.record(Pool, v.bits))


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
        return _LAUNCH_US + moved_us + taps / (per_clock * device.sms * device.clock_hz / 1e6)

    def launches(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        *_, target = problem.operands
        integers = pool(problem, target.size_elems)
        bits = index_bits(problem, integers)
        last = len(problem.operands) - 1
        v = _Variant(self.op, problem.dtype, problem.mode.removesuffix("_deterministic"), problem.channels_last, bits)
        forward = self.op == "pool_fwd"
        return [
            Launch(
                source=Source(_forward_kernel if forward else _backward_kernel, v, _THREADS),
                grid=(ceil(integers.elements / _THREADS), 1, 1),
                # A sum's gradient does not look at x.
                pointers=(0, last) if forward else (0, last - 1, last),
                scalars="",
                integers=integers,
                integer_bits=bits,
            )
        ]


FWD, BWD = Direct("pool_fwd"), Direct("pool_bwd")
