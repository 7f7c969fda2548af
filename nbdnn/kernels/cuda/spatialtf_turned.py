"""The gradients of what a grid samples, added up channels-last in whole vectors and put in their places at the end.

    threads  that are neighbours share an output: each adds what this gives to four channels of its pixels by one
             instruction each, in any order, then to the four that follow those of the others; or, where there are no
             more than four channels, one adds to the left and one to the right pixels
    after it a thread takes a pixel's sums to where its channels lie

Of images whose pixels are not whole vectors: planar, or channels-last with three channels, say. The sums lie in the
workspace, in the compute type, a pixel's channels side by side and filled up to a multiple of four.
An addition to four elements costs the second-level cache what one to an element does, and neighbouring pixels are
neighbours in memory: of three channels four additions an output, where planes ask for twelve (or, two pixels at a
time, for seven and a half). Two threads that add to eight channels at once cost no more than one that adds to four: the
cache takes 32 bytes as they come. Traffic: x, dy, dx once, x from cache for every output that is near a pixel, the sums
three times. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_direct import THREADS, Config, configs, launched
from nbdnn.kernels.cuda.spatialtf_position import (
    INT32_END,
    Fields,
    Kind,
    adding_us,
    nearest,
    output_place,
    position,
)
from nbdnn.kernels.cuda.spatialtf_slopes import slopes, store_slopes
from nbdnn.kernels.cuda.zeros import zeros
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

# Channels that are added at once, and that a thread takes to where they lie: 64 bytes of a pixel.
_QUAD, _TURNED = 4, 16
_CAPABILITY = 9, 0  # from which on a quad is added by one instruction
_SHARING, _SIDES = (4, 2, 8, 1), 2  # threads of an output; of one with no more than four channels
_MIN_BLOCKS, _MIN_BLOCKS_WIDE = 3, 2  # with integers of 64 bits
# Fitted to 54 problems on an H200: three launches, and what is moved; sums that lie side by side are added sooner than
# elsewhere; and a quad of a thread, one after the other, of threads that are there at once.
_LAUNCH_US, _OVER_COPY, _SUMS_MOVED, _SIDE_BY_SIDE, _QUAD_US, _RESIDENT = 3.7, 1.1, 2.2, 0.63, 1.2, 2048


class _Sums(NamedTuple):
    """Elements of a pixel's sums; to the next pixel of a row, and of a column: 0 where there is one only."""

    padded: int
    right: int
    down: int


def _of_corners(kind: Kind, by_sides: bool):
    """Device functions of the pixels that a thread adds to, all four or those of the side that its lane says: (lane,
    right, down, f, sums) -> (weights, where they are in x, where in the sums); (a, lane) -> sums of all four, where
    those that another thread has are 0."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    integer, real, hat = ptx.INTEGER[kind.bits], ptx.REAL["f32"], ptx_spatialtf.hat

    @ptx.inline
    def all_four(lane, right, down, f, sums):
        top, bottom, left, next_ = hat(down), hat(down - real(1.0)), hat(right), hat(right - real(1.0))
        weights = top * left, top * next_, bottom * left, bottom * next_
        pixels = integer(0), integer(f.right), integer(f.down), integer(f.down + f.right)
        return weights, pixels, (integer(0), integer(sums.right), integer(sums.down), integer(sums.down + sums.right))

    @ptx.inline
    def of_side(lane, right, down, f, sums):
        across = hat(right - real(lane))
        weights = hat(down) * across, hat(down - real(1.0)) * across
        here, there = integer(lane * f.right), integer(lane * sums.right)
        return weights, (here, integer(here + f.down)), (there, integer(there + sums.down))

    @ptx.inline
    def itself(a, lane):
        return a

    @ptx.inline
    def among_four(a, lane):
        every = ptx.cuda.local.array(4, real)
        for k in range(4):
            every[k] = a[k >> 1] if lane == k & 1 else real(0.0)
        return every

    return (of_side, among_four) if by_sides else (all_four, itself)


def _gradient_kernel(specialised_on, by_sides):
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    kind = Kind(*specialised_on)
    integer, real = ptx.INTEGER[kind.bits], ptx.REAL["f32"]
    place, locate, find = output_place(kind, THREADS), position(kind), nearest("f32", kind.bits)
    load, add = ptx_local.load(kind.dtype, 1), ptx_spatialtf.add_lanes("f32", _QUAD, True)
    derive, store = slopes("f32", kind.bits), store_slopes(kind, THREADS)
    of_corners, of_all = _of_corners(kind, by_sides)
    corners, of_lane = (2, 0) if by_sides else (4, _QUAD)
    step, all_pixels = _QUAD if by_sides else _QUAD * kind.threads, corners * _QUAD

    @ptx.inline
    def visit(x, dy, total, at, to, into, here, there, w, top, pixels, a, left, f):
        """Four channels, of which so many are left. Those beyond are loaded as the first once more, and count as 0:
        what is loaded behind a branch is waited for before the next one, where it has to be widened."""
        for k in range(_QUAD):
            channel = integer(k) if k < left else integer(0)
            load(top, integer(k), dy, integer(to + channel * f.y_v))
            for corner in range(corners):
                load(pixels, integer(corners * k + corner), x, integer(at + here[corner] + channel * f.x_v))
        for k in range(1, _QUAD):
            top[k] = top[k] if k < left else real(0.0)
            for corner in range(corners):
                pixels[corners * k + corner] = pixels[corners * k + corner] if k < left else real(0.0)
        for k in range(_QUAD):
            for corner in range(corners):
                a[corner] = ptx.fma(top[k], pixels[corners * k + corner], a[corner])
        for corner in range(corners):
            if w[corner] > real(0.0):
                add(total, integer(into + there[corner]), top, integer(0), w[corner])

    @ptx.inline
    def of_output(x, grid, dy, total, image, i, j, lane, f, sums):
        s, t = locate(grid, image, i, j, f)
        (column, right), (row, down) = find(s, f.in_w), find(t, f.in_h)
        w, here, there = of_corners(lane, right, down, f, sums)
        first = integer(lane * of_lane)
        at = integer(image * f.x_n + row * f.x_h + column * f.x_w + first * f.x_v)
        to = integer(image * f.y_n + i * f.y_h + j * f.y_w + first * f.y_v)
        into = integer(integer(image * f.pixels + row * f.in_w + column) * sums.padded + first)
        top, pixels = ptx.cuda.local.array(_QUAD, real), ptx.cuda.local.array(all_pixels, real)
        a = ptx.cuda.local.array(corners, real)
        for corner in range(corners):
            a[corner] = real(0.0)
        channels = integer(f.vectors - first)
        while channels > 0:
            visit(x, dy, total, at, to, into, here, there, w, top, pixels, a, channels, f)
            at, to = integer(at + step * f.x_v), integer(to + step * f.y_v)
            into, channels = integer(into + step), integer(channels - step)
        return derive(of_all(a, lane), right, down, f)

    def add_outputs(x, grid, dy, total, dgrid, f, sums):
        image, i, j, lane, _ = place(f)
        s, t = real(0.0), real(0.0)
        if i < f.out_h and j < f.out_w:
            s, t = of_output(x, grid, dy, total, image, i, j, lane, f, sums)
        store(dgrid, image, i, j, s, t, f)

    data, parameters, reals = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype), ptx.pointer("f32")
    records = ptx.record(Fields, kind.bits), ptx.record(_Sums, kind.bits)
    return add_outputs, (data, parameters, data, reals, parameters, *records)


class _Pixels(NamedTuple):
    """images' pixels, pixels of one, channels and how many there are with those that fill up a pixel; elements of dx
    to the next image, pixel and channel."""

    every: int
    pixels: int
    channels: int
    padded: int
    dx_n: int
    dx_w: int
    dx_c: int


def _turn_kernel(dtype: str, bits: int):
    from nbdnn.kernels.cuda import ptx, ptx_local

    integer, real, narrow, load = ptx.INTEGER[bits], ptx.REAL["f32"], ptx.NARROW[dtype], ptx_local.load("f32", _QUAD)

    def turn(total, dx, f):
        every = integer(integer(ptx.block_x()) * THREADS + ptx.thread_x())
        if every >= f.every:
            return
        image, pixel = ptx.divided(every, f.pixels)
        at, to = integer(every * f.padded), integer(image * f.dx_n + pixel * f.dx_w)
        sums, channel = ptx.cuda.local.array(_QUAD, real), integer(ptx.block_y() * _TURNED)
        end = min(integer(channel + _TURNED), f.channels)
        while channel < end:
            load(sums, integer(0), total, integer(at + channel))
            for k in range(_QUAD):
                if channel + k < f.channels:
                    dx[integer(to + integer(channel + k) * f.dx_c)] = narrow(sums[k])
            channel = integer(channel + _QUAD)

    return turn, (ptx.pointer("f32"), ptx.pointer(dtype), ptx.record(_Pixels, bits))


class Turned(LaunchedCandidate[Config]):
    """Gradients of images whose pixels are no vectors, where four elements are added by one instruction."""

    op, algorithm, deterministic = "spatialtf_sampler_bwd", "turned", False

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        if device.capability < _CAPABILITY:
            return Support(False, f"compute capability {device.capability}: no additions of vectors before 9.0")
        if problem.channels_last and problem.c % _QUAD == 0:
            return Support(False, f"{problem.c} channels, neighbours in memory, are whole vectors as they are")
        return YES if problem.compute == "f32" else Support(False, f"adds vectors of float32, not {problem.compute}")

    def configs(self, problem: SpatialtfProblem, device: Gpu) -> tuple[Config, ...]:
        orders = dict.fromkeys(config.rows for config in configs(problem, device))
        quads = ceil(problem.c / _QUAD)
        shared = [threads for threads in _SHARING if threads <= max(quads, _SIDES)]
        return tuple(Config(threads, max(problem.c, 1), rows) for threads in shared for rows in orders)

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        sums_bytes = self.workspace_bytes(problem, config, device)
        moved_bytes = _OVER_COPY * problem.min_bytes + _SUMS_MOVED * sums_bytes
        waves = max(1.0, problem.n * problem.positions * config.threads / (_RESIDENT * device.sms))
        wait_us = ceil(ceil(problem.c / _QUAD) / config.threads) * _QUAD_US * waves
        add_us = _SIDE_BY_SIDE * adding_us(problem, side_by_side=True)
        return _LAUNCH_US + moved_bytes / copy_bytes_per_s(device) * 1e6 + max(add_us, wait_us)

    def workspace_bytes(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> int:
        return _sums_elems(problem) * ITEMSIZE["f32"]

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        kind, integers, grid = launched(problem, config, lanes=1)
        elements, (in_h, in_w), padded = _sums_elems(problem), problem.spatial, _padded(problem)
        bits = 64 if elements >= INT32_END else kind.bits
        sums = _Sums(padded, padded * (in_w > 1), padded * in_w * (in_h > 1))
        min_blocks = _MIN_BLOCKS if bits == 32 else _MIN_BLOCKS_WIDE
        by_sides = config.threads == _SIDES and problem.c <= _QUAD
        source = Source(_gradient_kernel, (tuple(kind._replace(bits=bits)), by_sides), THREADS, min_blocks)
        main = Launch(source, grid, (0, 1, 2, WORKSPACE, 4), "", (*integers, *sums), bits)
        of_dx = integers.x_n, integers.x_w, integers.x_v
        pixels = _Pixels(problem.n * in_h * in_w, in_h * in_w, problem.c, padded, *of_dx)
        turn = Launch(
            Source(_turn_kernel, (problem.dtype, bits), THREADS),
            (ceil(pixels.every / THREADS), ceil(problem.c / _TURNED), 1),
            (WORKSPACE, 3),
            "",
            pixels,
            bits,
        )
        return [zeros(WORKSPACE, elements, "f32", bits, THREADS, _QUAD), main, turn]


def _padded(problem: SpatialtfProblem) -> int:
    """Channels of a pixel in the sums."""
    return -(-problem.c // _QUAD) * _QUAD


def _sums_elems(problem: SpatialtfProblem) -> int:
    in_h, in_w = problem.spatial
    return problem.n * in_h * in_w * _padded(problem)


SAMPLER_BWD = Turned()
