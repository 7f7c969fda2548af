"""Pooling an axis at a time, for windows of many taps.

    t[i, q] = join over s of x[i, q*u + s - pad]        y[p, q] = join over r of t[p*u + r - pad, q]      max, sum, mean
    dx[i, j] = sum over q of s[i, q],                   s[i, q] = sum over p of dy[p, q]: of windows that cover j, and i

So a window of 13 x 13 is met by 26 loads, not by 169. Of a maximum the gradient needs which tap each of both was, a
byte each: row i has the maximum of window (p, q) where it is p's of the maxima along rows, and in that row element j
where it is q's. A kernel an axis, a thread an output, neighbours in memory to neighbouring threads; between two of them
the workspace. The first of equal elements, and the last NaN, of each axis are those of the whole window.

Traffic: x (dy) and what is between axes from memory, or the second-level cache; each tap of an axis is a load from
cache. Sums in float32 (float64), in a fixed order; an average is one of averages. Source: own.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import NULL, Launch, LaunchedCandidate, in_workspace
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_plan import index_bits
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_THREADS = 256
# Of a window: for smaller ones there is always a tile of `window`; along an axis.
_LEAST_TAPS, _MOST_TAPS = 14, 254
_MOST_UNROLLED, _LONG = 32, 8
_NONE = 255  # no tap
# Fitted to problems of an H200: the first launch and each other one; taps of all threads, and of one; what is moved.
_LAUNCH_US, _NEXT_US, _TAPS_PER_CLOCK_AND_SM, _TAP_CLOCKS, _OVER_COPY = 1.1, 1.1, 7.0, 69, 0.85
_ALIGN_BYTES = 256


class Line(NamedTuple):
    """One axis of the image and of its windows, with `inner` neighbours at each position. elements: that threads are
    needed for."""

    elements: int
    inner: int
    extent: int
    out: int
    taps: int
    stride: int
    pad: int


class Variant(NamedTuple):
    """What a kernel is compiled for. source, target: dtypes. taps: along the axis, met without a loop: where all are
    there, of an axis that is_long, else also of others; 0: any number. keeps: of a maximum which tap it was, and its
    value."""

    mode: str
    source: str
    target: str
    bits: int
    taps: int
    is_long: bool
    keeps_tap: bool = False
    keeps_value: bool = True


@cache
def _clamped(bits: int):
    """Device function (position, extent): the nearest position that there is."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[bits]

    @ptx.inline
    def clamped(position, extent):
        position = position if position > 0 else integer(0)
        return position if position < extent else integer(extent - 1)

    return clamped


def _join_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = Variant(*specialised_on)
    integer, real, widen, narrow = (
        ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.source]], ptx.WIDEN[v.source], ptx.NARROW[v.target],
    )  # fmt: skip
    is_max, keeps_tap, keeps_value = v.mode == "max", v.keeps_tap, v.keeps_value
    whole, nearest = (v.taps, 0) if v.is_long else (0, v.taps)
    averages, excludes_pad, none = v.mode.startswith("average"), v.mode == "average_exc_pad", integer(_NONE)
    lowest = real(float("-inf"))

    clamped = _clamped(v.bits)

    @ptx.inline
    def joined(found, tap, value, number, is_first):
        if not is_max:
            return found + value, tap
        better = value > found or value != value or is_first
        return value if better else found, number if better else tap

    def join_axis(x, y, taps, f):
        element = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        rest, i = ptx.divided(element, f.inner)
        outer, p = ptx.divided(rest, f.out)
        start = integer(p * f.stride - f.pad)
        low = start if start > 0 else integer(0)
        end = integer(start + f.taps)
        end = end if end < f.extent else f.extent
        line = integer(outer * f.extent * f.inner + i)
        found, tap, j = lowest if is_max else real(0.0), none, low
        if whole and end - low == whole:
            at = integer(line + low * f.inner)
            for number in range(whole):
                value = widen(x[integer(at + number * f.inner)])
                found, tap = joined(found, tap, value, integer(number), number == 0)
        elif nearest and low < end:
            for number in range(nearest):
                # The first or last element again where a tap is beside the image: no other maximum, nothing to add.
                j = clamped(integer(start + number), f.extent)
                value = widen(x[integer(line + j * f.inner)])
                if not is_max:
                    value = value if j == start + number else real(0.0)
                found, tap = joined(found, tap, value, integer(j - start), number == 0)
        elif not nearest:
            while j < end:
                value = widen(x[integer(line + j * f.inner)])
                found, tap = joined(found, tap, value, integer(j - start), tap == none)
                j = integer(j + 1)
        if averages and low < end:
            found = found * (real(1.0) / real(integer(end - low) if excludes_pad else f.taps))
        if keeps_value:
            y[element] = narrow(found)
        if keeps_tap:
            taps[element] = tap

    types = ptx.pointer(v.source), ptx.pointer(v.target), ptx.pointer("u8"), ptx.record(Line, v.bits)
    return join_axis, types


def _give_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    v = Variant(*specialised_on)
    integer, real, widen, narrow = (
        ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.source]], ptx.WIDEN[v.source], ptx.NARROW[v.target],
    )  # fmt: skip
    is_max, averages, excludes_pad = v.mode == "max", v.mode.startswith("average"), v.mode == "average_exc_pad"
    clamped = _clamped(v.bits)
    whole, nearest = (v.taps, 0) if v.is_long else (0, v.taps)

    @ptx.inline
    def share_of(dy, taps, at, p, number, f):
        """What window p gives to the element that is its tap of that number."""
        share = widen(dy[at])
        if is_max:
            share = share if integer(taps[at]) == number else real(0.0)
        elif excludes_pad:
            start = integer(p * f.stride - f.pad)
            end = integer(start + f.taps)
            end = end if end < f.extent else f.extent
            share = share * (real(1.0) / real(integer(end - (start if start > 0 else integer(0)))))
        return share

    def give_axis(dy, dx, taps, f):
        element = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        rest, i = ptx.divided(element, f.inner)
        outer, j = ptx.divided(rest, f.extent)
        behind = integer(j + f.pad)
        last, _ = ptx.divided(behind, f.stride)
        before = integer(behind - f.taps + f.stride) if behind >= f.taps else integer(0)
        p, _ = ptx.divided(before, f.stride)
        end = integer(last + 1)
        end = end if end < f.out else f.out
        line, total = integer(outer * f.out * f.inner + i), real(0.0)
        if whole and end - p == whole:
            at = integer(line + last * f.inner)
            for number in range(whole):
                window = integer(last - number)
                total = total + share_of(dy, taps, integer(at - number * f.inner), window, integer(number), f)
        elif nearest:
            for number in range(nearest):
                p = integer(behind - number)
                window = clamped(p, f.out)
                share = share_of(dy, taps, integer(line + window * f.inner), window, integer(number), f)
                total = total + (share if window == p else real(0.0))
        else:
            while p < end:
                at = integer(line + p * f.inner)
                total = total + share_of(dy, taps, at, p, integer(behind - p * f.stride), f)
                p = integer(p + 1)
        if averages and not excludes_pad:
            total = total * (real(1.0) / real(f.taps))
        dx[element] = narrow(total)

    types = ptx.pointer(v.source), ptx.pointer(v.target), ptx.pointer("u8"), ptx.record(Line, v.bits)
    return give_axis, types


class Separable(LaunchedCandidate[NoConfig]):
    """An axis at a time; windows of many taps."""

    algorithm = "separable"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        taps = prod(problem.window)
        if taps < _LEAST_TAPS:
            return Support(False, f"a window has {taps} taps, this kernel takes {_LEAST_TAPS} and more")
        if max(problem.window) > _MOST_TAPS:
            return Support(False, f"windows {problem.window}, this kernel takes up to {_MOST_TAPS} along an axis")
        return YES

    def workspace_bytes(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> int:
        return _Places(problem).size_bytes

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> float:
        lines = _lines(problem)
        taps = sum(line.elements * line.taps for line in lines)
        between_bytes = 2 * sum(line.elements for line in lines[:-1]) * ITEMSIZE[problem.compute]
        times = 2 if self.op == "pool_bwd" and problem.is_max else 1
        moved_us = _OVER_COPY * (problem.min_bytes + times * between_bytes) / copy_bytes_per_s(device) * 1e6
        clocks = taps / (_TAPS_PER_CLOCK_AND_SM * device.sms) + sum(line.taps for line in lines) * _TAP_CLOCKS
        return _LAUNCH_US + (times * len(lines) - 1) * _NEXT_US + moved_us + times * clocks / device.clock_hz * 1e6

    def launches(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        lines, places, last = _lines(problem), _Places(problem), len(problem.operands) - 1
        bits = index_bits(problem, tuple(max(*line) for line in lines))
        mode, dtype, real = problem.mode.removesuffix("_deterministic"), problem.dtype, problem.compute

        def launch(kernel, line: Line, elements: int, pointers: tuple[int, ...], variant: Variant) -> Launch:
            return Launch(
                source=Source(kernel, variant, _THREADS),
                grid=(ceil(elements / _THREADS), 1, 1),
                pointers=pointers,
                scalars="",
                integers=line._replace(elements=elements),
                integer_bits=bits,
            )

        found = []
        is_forward, keeps_tap = self.op == "pool_fwd", self.op == "pool_bwd" and problem.is_max
        if is_forward or keeps_tap:
            for number, line in enumerate(lines):
                is_last = number == len(lines) - 1
                to = last if is_forward else NULL
                pointers = (0 if number == 0 else places.values[number - 1], to if is_last else places.values[number])
                variant = Variant(
                    mode, dtype if number == 0 else real, dtype if is_last else real, bits, _unrolled(line),
                    _is_long(line, mode), keeps_tap, not is_last or is_forward,
                )  # fmt: skip
                tap = places.taps[number] if keeps_tap else NULL
                found.append(launch(_join_kernel, line, line.elements, (*pointers, tap), variant))
        if is_forward:
            return found
        for number, line in reversed(list(enumerate(lines))):
            is_first = number == len(lines) - 1
            of_dy = last - 1 if is_first else places.values[number]
            pointers = of_dy, last if number == 0 else places.values[number - 1]
            unrolled = _unrolled(line) if line.stride == 1 else 0
            variant = Variant(
                mode, dtype if is_first else real, dtype if number == 0 else real, bits, unrolled, _is_long(line, mode)
            )  # fmt: skip
            elements = line.elements // line.out * line.extent
            tap = places.taps[number] if keeps_tap else NULL
            found.append(launch(_give_kernel, line, elements, (*pointers, tap), variant))
        return found


def _unrolled(line: Line) -> int:
    """Taps that are met without a loop."""
    return line.taps if line.taps <= _MOST_UNROLLED else 0


def _is_long(line: Line, mode: str) -> bool:
    """Whether few windows reach beyond the image: for those a warp goes another way as well. Maxima go one way always,
    which costs them little: 3x3x3 over 32x32x64x64 (f16) backward 217 us, not 294."""
    return mode != "max" and line.extent >= _LONG * line.taps


def _lines(problem: PoolProblem) -> list[Line]:
    """The axes along which windows have more than an element, or are apart, the last one first: of each its windows."""
    extents, outs = list(spatial3(problem.spatial)), spatial3(problem.out_spatial)
    taps, strides, pads = spatial3(problem.window), spatial3(problem.stride), spatial3(problem.pad, 0)
    before, behind = (problem.n, problem.c) if problem.channels_last else (problem.n * problem.c, 1)
    found = []
    for axis in (2, 1, 0):
        inner = behind * prod(outs[axis + 1 :])
        outer = before * prod(extents[:axis])
        line = Line(outer * outs[axis] * inner, inner, extents[axis], outs[axis], taps[axis], strides[axis], pads[axis])
        if (taps[axis], strides[axis], pads[axis]) != (1, 1, 0):
            found.append(line)
    return found


class _Places:
    """Where in the workspace lies what is between two axes, by axis but the last, and the taps that each has chosen."""

    def __init__(self, problem: PoolProblem) -> None:
        lines = _lines(problem)
        sizes = [line.elements * ITEMSIZE[problem.compute] for line in lines[:-1]]
        values = len(sizes)
        if problem.op == "pool_bwd" and problem.is_max:
            sizes += [line.elements for line in lines]
        offsets = list(accumulate((-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes), initial=0))
        self.size_bytes = offsets[-1]
        self.values = [in_workspace(offset) for offset in offsets[:values]]
        self.taps = [in_workspace(offset) for offset, _ in pairwise(offsets[values:])]


FWD, BWD = Separable("pool_fwd"), Separable("pool_bwd")
