"""Pooling on the CPU where neighbours are channels: each window in registers, a strip of channels at a time.

    y[p] = join over r of x[p*u + r - pad]          join: max or sum, of the taps that are inside of the image

Better than `pool.py`, which joins rows of windows in memory, where windows share little or pixels are long.

A task is a run of output rows, of which it may have a block of the channels. The taps of a window pass by a strip's
maxima or sums, which are then written: nothing goes through memory between. Meanwhile what comes next is asked for. Of
a whole image it may be a line of channels, with its sums in the first-level cache.

Traffic: x and y once from memory; x again from cache for every window that shares it. Sums in float32 (float64).
Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import ceil, prod

from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.cost import cache_bytes, kernel_us
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes, axes_of
from nbdnn.kernels.cpu.pool_phases import joined_vectors
from nbdnn.kernels.cpu.pool_whole import takes_all
from nbdnn.kernels.cpu.vector import (
    I64,
    NUMBA_FLOAT,
    ask,
    by_vectors,
    constant,
    convert,
    element,
    filled,
    lanes_between,
    load,
    pointer,
    record,
    row_types,
    splat,
    store,
    struct,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD, _LINE_TASKS_PER_THREAD = 8, 4
# Vectors: the longest that channels are left for, so that taps wait for no join of the one before.
_STRIPS = {True: (16, 8, 4, 2, 1), False: (8, 4, 2, 1)}  # with AVX-512's 32 registers, and with 16
# How far ahead pixels are asked for. From memory: 8x64x112x112, 3x3 with stride 2, took 0.79 ms of 1.15; what is in a
# cache loses a third by it. Where pixels are far apart, their next strips would put each other out of the first-level
# cache: sums of 8x2048x7x7 took 30 us of 35 (a Zen 5 thread).
_AHEAD_BYTES, _AHEAD_PIXELS, _FAR_APART_BYTES, _NEAR_BYTES = 2048, 4, 4096, 512
_LEAST_CHANNELS = 512  # of a block
# Where one window is all of an image whose pixels are two strips or more: lines of channels, so that the image is read
# from its beginning to its end. Sums and maxima of 8x128x28x28 took 0.83 and 0.79 of the time of strips, of 8x256x14x14
# 0.77 and 0.66, of 4x512x28x28 0.57 and 0.53 (a Zen 3 thread); sums of 64 channels 1.19, of short ones in bfloat16,
# whose sums are twice as long as its pixels, 1.1.
_LEAST_STRIPS = 2
_MOST_LINE_BYTES = 16384
# Long lines four at once, by whether they are maxima: from memory sums of 64x2048x7x7 took 0.4 to 0.7 of the time of
# strips, of bfloat16 0.25 to 0.5, in cache 0.7 to 0.9 (two Zen 3 threads); maxima of 512 channels 1.07 of one at once.
_LINES_AT_ONCE, _LONG_LINE_BYTES = 4, {True: 4096, False: 1024}
# One thread: priors for the guess, of a vector of channels by whether it is a maximum.
_NS_PER_PIXEL, _NS_PER_VECTOR = 0.8, {True: 0.42, False: 0.25}
_OF_PLANES = Support(False, "layout nchw: the channels of a pixel do not lie side by side")

# blocks: of the channels of a row.
_FIELDS = record(
    *("rows", "rows_a_task", "channels", "blocks", "block_channels", "ahead", "averages", "excludes_pad"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


@contextmanager
def _each_pixel(builder, begin, counts: tuple, steps: tuple) -> Iterator:
    """The address of each pixel of a window: so many planes, rows and columns, so many bytes apart."""
    (n_d, n_h, n_w), (plane_bytes, row_bytes, pixel_bytes) = counts, steps
    with cgutils.for_range(builder, n_d) as d, cgutils.for_range(builder, n_h) as h:
        line = builder.add(begin, builder.mul(d.index, plane_bytes))
        line = builder.add(line, builder.mul(h.index, row_bytes))
        with cgutils.for_range(builder, n_w) as w:
            yield builder.add(line, builder.mul(w.index, pixel_bytes))


def _join(compute: str, codegen: Callable):
    @intrinsic
    def join(typingctx, to, n, start, n_d, n_h, n_w, plane_bytes, row_bytes, pixel_bytes, ahead_bytes, scale):
        return signature(types.none, *[types.int64] * 10, NUMBA_FLOAT[compute]), codegen

    return join


@cache
def _join_window(source: str, compute: str, vl: int, is_max: bool):
    """Intrinsic (to, n, start, n_d, n_h, n_w, plane_bytes, row_bytes, pixel_bytes, ahead_bytes, scale): n channels of
    n_d x n_h x n_w pixels joined; sums times scale. What lies so many bytes ahead is asked for."""
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)
    neutral = constant(wide, float("-inf") if is_max else 0.0)

    def codegen(context, builder, sig, args):
        to, n, start, n_d, n_h, n_w, plane_bytes, row_bytes, pixel_bytes, ahead_bytes, scale = args

        def strip(first, vectors, mask):
            strip_bytes = vectors * vl * read_bytes
            found = [cgutils.alloca_once(builder, wide) for _ in range(vectors)]
            for slot in found:
                builder.store(neutral, slot)
            begin = builder.add(start, builder.mul(first, I64(read_bytes)))
            with _each_pixel(builder, begin, (n_d, n_h, n_w), (plane_bytes, row_bytes, pixel_bytes)) as pixel:
                for line_at in range(0, strip_bytes, 64):
                    ask(builder, builder.add(pixel, builder.add(ahead_bytes, I64(line_at))))
                for k, slot in enumerate(found):
                    there = element(builder, pixel, I64(k * vl), read, read_bytes)
                    value = convert(builder, load(builder, there, read, read_bytes, mask), source, compute, vl)
                    builder.store(joined_vectors(builder, is_max, builder.load(slot), value), slot)
            for k, slot in enumerate(found):
                value = builder.load(slot)
                if not is_max:
                    value = builder.fmul(value, splat(builder, scale, wide))
                there = element(builder, to, builder.add(first, I64(k * vl)), read, read_bytes)
                store(builder, convert(builder, value, compute, source, vl), there, read_bytes, mask)

        done = I64(0)
        for vectors in _STRIPS[vl * wide_bytes >= 64]:
            strips = builder.sdiv(builder.sub(n, done), I64(vectors * vl))
            end = builder.add(done, builder.mul(strips, I64(vectors * vl)))
            with cgutils.for_range_slice(builder, done, end, I64(vectors * vl), I64) as (first, _):
                strip(first, vectors, None)
            done = end
        with builder.if_then(builder.icmp_signed("<", done, n)):  # the last ones, with others before them
            last = builder.sub(n, I64(vl))
            with builder.if_else(builder.icmp_signed(">=", last, I64(0))) as (enough, few):
                with enough:
                    strip(last, 1, None)
                with few:
                    strip(I64(0), 1, lanes_between(builder, vl, 0, None, n))
        return context.get_dummy_value()

    return _join(compute, codegen)


@cache
def _join_lines(source: str, compute: str, vl: int, is_max: bool, at_once: int):
    """Intrinsic as `_join_window`'s, of a whole image: so many pixels after the others, with the maxima or sums of all
    n channels, `_MOST_LINE_BYTES` at most, in memory meanwhile."""
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)
    neutral = constant(wide, float("-inf") if is_max else 0.0)

    def codegen(context, builder, sig, args):
        to, n, start, n_d, n_h, n_w, _, _, pixel_bytes, _, scale = args
        found = builder.ptrtoint(cgutils.alloca_once(builder, wide, _MOST_LINE_BYTES // (vl * wide_bytes)), I64)

        def slot(i):
            return element(builder, found, i, wide, wide_bytes)

        def finish(i, mask) -> None:
            value = builder.load(slot(i))
            if not is_max:
                value = builder.fmul(value, splat(builder, scale, wide))
            there = element(builder, to, i, read, read_bytes)
            store(builder, convert(builder, value, compute, source, vl), there, read_bytes, mask)

        def join(pixel, count: int) -> None:
            def vector(i, mask) -> None:
                values = []
                for number in range(count):
                    line = builder.add(pixel, builder.mul(pixel_bytes, I64(number)))
                    value = load(builder, element(builder, line, i, read, read_bytes), read, read_bytes, mask)
                    values.append(convert(builder, value, source, compute, vl))
                while len(values) > 1:
                    values = [joined_vectors(builder, is_max, *values[k : k + 2]) for k in range(0, len(values), 2)]
                builder.store(joined_vectors(builder, is_max, builder.load(slot(i)), values[0]), slot(i))

            by_vectors(builder, n, vl, vector)

        by_vectors(builder, n, vl, lambda i, mask: builder.store(neutral, slot(i)))
        pixels = builder.mul(builder.mul(n_d, n_h), n_w)
        some = builder.sub(pixels, builder.urem(pixels, I64(at_once)))
        for first, end, count in ((I64(0), some, at_once), (some, pixels, 1))[:at_once]:  # of one at once none are left
            with cgutils.for_range_slice(builder, first, end, I64(count), I64) as (number, _):
                join(builder.add(start, builder.mul(number, pixel_bytes)), count)
        by_vectors(builder, n, vl, finish)
        return context.get_dummy_value()

    return _join(compute, codegen)


@cache
def _task(dtype: str, is_max: bool, vl: int, lines: int):
    """A run of rows of y, of a block of channels: index = run * blocks + block. lines: of channels, at once; or 0."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, real, itemsize = pointer("i64"), struct(_FIELDS), NUMBA_FLOAT[compute], ITEMSIZE[dtype]
    how = dtype, compute, vl, is_max
    join = _join_lines(*how, lines) if lines else _join_window(*how)

    def join_windows(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        run, channel = index // f.blocks, index % f.blocks * f.block_channels
        n, pixel_bytes = min(f.block_channels, f.channels - channel), f.channels * itemsize
        row_bytes = f.in_w * pixel_bytes
        for row in range(run * f.rows_a_task, min(f.rows, (run + 1) * f.rows_a_task)):
            p, rest = row % f.out_h, row // f.out_h
            d, image = rest % f.out_d, rest // f.out_d
            first_d, first_h = d * f.step_d - f.pad_d, p * f.step_h - f.pad_h
            low_d, low_h = max(first_d, 0), max(first_h, 0)
            n_d, n_h = min(first_d + f.taps_d, f.in_d) - low_d, min(first_h + f.taps_h, f.in_h) - low_h
            start = pointers[0] + ((image * f.in_d + low_d) * f.in_h + low_h) * row_bytes + channel * itemsize
            to = pointers[1] + row * f.out_w * pixel_bytes + channel * itemsize
            for q in range(f.out_w):
                first_w = q * f.step_w - f.pad_w
                low_w = max(first_w, 0)
                n_w = min(first_w + f.taps_w, f.in_w) - low_w
                count = n_d * n_h * n_w if f.excludes_pad else f.taps_d * f.taps_h * f.taps_w
                scale = real(1.0) / real(max(count, 1) if f.averages else 1)
                pixel = start + low_w * pixel_bytes
                join(to + q * pixel_bytes, n, pixel, n_d, n_h, n_w, f.in_h * row_bytes, row_bytes, pixel_bytes, f.ahead,
                     scale)  # fmt: skip

    return compile_task(join_windows, (dtype, is_max, vl, lines))


def lines_at_once(problem: PoolProblem, axes: Axes, device: Cpu) -> int:
    """By how many lines of channels at once an image is joined; 0: not by lines."""
    pixel_bytes, wide_bytes = (problem.c * ITEMSIZE[dtype] for dtype in (problem.dtype, problem.compute))
    if not takes_all(axes) or wide_bytes > _MOST_LINE_BYTES:
        return 0
    if pixel_bytes >= _LONG_LINE_BYTES[problem.is_max]:
        return _LINES_AT_ONCE
    vector_bytes = device.lanes(problem.compute) * ITEMSIZE[problem.compute]
    strip_bytes = _STRIPS[vector_bytes >= 64][0] * vector_bytes
    return int(pixel_bytes == wide_bytes >= _LEAST_STRIPS * strip_bytes)


class Windows(Candidate[NoConfig, Cpu]):
    """Each window by itself, in registers; channels-last."""

    op, provider, algorithm = "pool_fwd", "cpu", "windows"

    def supports(self, problem: PoolProblem, device: Cpu) -> Support:
        return YES if problem.channels_last else _OF_PLANES

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> float:
        vectors = ceil(problem.c / device.lanes(problem.compute))
        pixels = problem.n * prod(problem.out_spatial) * prod(problem.window)
        pixel_ns = _NS_PER_PIXEL + vectors * _NS_PER_VECTOR[problem.is_max]
        return kernel_us(device, 0.0, pixels * pixel_ns, device.threads)

    def prepare(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> Program:
        axes = axes_of(problem)
        lines = lines_at_once(problem, axes, device)
        tasks = _LINE_TASKS_PER_THREAD if lines else _TASKS_PER_THREAD
        rows, wanted = problem.n * axes.out[0] * axes.out[1], device.threads * tasks
        blocks = min(ceil(problem.c / _LEAST_CHANNELS), ceil(wanted / rows))
        block_channels = ceil(problem.c / blocks / _LEAST_CHANNELS) * _LEAST_CHANNELS
        blocks, rows_a_task = ceil(problem.c / block_channels), ceil(rows / wanted)
        pixel_bytes = problem.c * ITEMSIZE[problem.dtype]
        if 2 * problem.min_bytes > cache_bytes(device):  # the cache has other things, too
            ahead = pixel_bytes * (_AHEAD_PIXELS + _AHEAD_BYTES // pixel_bytes)
        else:
            ahead = pixel_bytes * _AHEAD_PIXELS if pixel_bytes >= _FAR_APART_BYTES else min(pixel_bytes, _NEAR_BYTES)
        ctx = filled(
            _FIELDS,
            **axes.fields(),
            rows=rows,
            rows_a_task=rows_a_task,
            channels=problem.c,
            blocks=blocks,
            block_channels=block_channels,
            ahead=ahead,
            averages=problem.mode.startswith("average"),
            excludes_pad=problem.mode == "average_exc_pad",
        )
        task = _task(problem.dtype, problem.is_max, device.lanes(problem.compute), lines)
        return Program([Phase(task, ceil(rows / rows_a_task) * blocks, ctx)])


FWD = Windows()
