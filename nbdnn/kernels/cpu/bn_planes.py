"""Batch normalisation on the CPU where neighbours are of one channel: NCHW.

    a channel:  its planes, one of each image, in chunks: sums of every chunk, merged; then all of it scaled

Where there are channels for all threads a task is a channel, whose planes are still in cache when they are read again:
x (and dy) come from memory once. Few channels are shared: partial sums, then what becomes of them, then all planes in
the order of memory, which is how inference goes too: planes of one channel lie far apart, and each begins where no
prefetcher expects it (32 images of 64 channels of 56x56 on two cores: 0.5 ms instead of 1.1).
Within a chunk sums are of the compute type, of differences from the chunk's first element, or where that is far from
all others from the mean; chunks are merged in float64.
Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np
from numba import float64, int64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.bn_channel import FEW_ELEMS, Variant, is_far, merge, variant
from nbdnn.kernels.cpu.bn_finish import finish, finish_row
from nbdnn.kernels.cpu.bn_vector import scale_row, sum_row
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import cache_bytes, kernel_us, streams
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.rows import ask_for
from nbdnn.kernels.cpu.vector import NUMBA_FLOAT, WIDEN, filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_CHUNK_ELEMS = 4096
_TASKS_PER_THREAD = 4
# Short planes lie apart where no prefetcher expects them: from memory those of a channel some further on are asked for.
# 32x2048x7x7 backward took 1.8 ms of 3.1 (a Zen 5 thread); what is in a cache takes a sixth longer by it.
_SHORT_PLANE_BYTES, _CHANNELS_AHEAD = 1024, 4
_FINISHED_CHANNELS = 256  # of a task
_NS_PER_ELEM = {"bn_train": 0.25, "bn_infer": 0.15, "bn_bwd": 0.35, "bn_infer_bwd": 0.3}
_NS_PER_CHUNK = 25.0

# A channel's chunks are counted through its planes; `parts` share them. sums: (a, b) in float64 by channel and part.
# `runs` share all planes in the order of memory. coefficients: four rows of the channels.
_FIELDS = record(
    *("channels", "length", "chunk", "of_plane", "chunks", "parts", "planes", "runs", "m", "ahead"),
    *("sums", "coefficients"),
)


@cache
def _chunk_sums(v: Variant):
    """Compiled-in function (x, dy, n, center): the sums of n neighbours as a pair."""
    data, widen, real, sums = pointer(v.dtype), WIDEN[v.dtype], NUMBA_FLOAT[v.compute], sum_row(v)

    @njit(**DEVICE)
    def moments(x, dy, n, center):
        pivot = widen(data(x)[0])
        for attempt in range(2):
            total, squares = sums(x, x, n, pivot)
            if attempt or not is_far(n, total, squares):
                break
            pivot += real(float64(total) / n)
        mean = float64(total) / n
        return float64(pivot) + mean, float64(squares) - mean * float64(total)

    @njit(**DEVICE)
    def gradient_sums(x, dy, n, center):
        total, moment = sums(x, dy, n, center)
        return float64(total), float64(moment)

    return moments if v.op == "bn_train" else gradient_sums


@cache
def _channel_loops(v: Variant, streams: bool):
    """Compiled-in functions: (sums of the chunks [first, last) of a channel; a channel scaled; planes [first, last)
    scaled, each with the coefficients of its channel). streams: what is written goes past the caches, which would read
    each of its lines in vain first."""
    at, data = struct(_FIELDS), pointer(v.compute)
    sums_of_chunk, merged = _chunk_sums(v), merge(v.op)
    scale_chunk, stream_chunk = (scale_row(v, False, past) for past in (False, True))
    vector_bytes = v.vl * ITEMSIZE[v.dtype]
    itemsize, is_forward = ITEMSIZE[v.dtype], v.is_forward
    x_place, out_place = 0, dict(v.places)["y" if is_forward else "dx"]
    dy_place = 0 if is_forward else 1

    @njit(**DEVICE)
    def chunk_of(f, channel, q):
        """(offset in bytes, elements)"""
        image, k = (q, 0) if f.of_plane == 1 else (q // f.of_plane, q % f.of_plane)  # no division where there is none
        first = k * f.chunk
        start = (image * f.channels + channel) * f.length + first
        return start * itemsize, min(f.chunk, f.length - first)

    @njit(**DEVICE)
    def sums(pointers, ctx, channel, first, last, center):
        f, count, a, b = at(ctx), 0.0, 0.0, 0.0
        for q in range(first, last):
            start, n = chunk_of(f, channel, q)
            if f.ahead:
                ask_for(pointers[x_place] + start + f.ahead, n * itemsize)
                if not is_forward:
                    ask_for(pointers[dy_place] + start + f.ahead, n * itemsize)
                ask_for(pointers[out_place] + start + f.ahead, n * itemsize)
            a_more, b_more = sums_of_chunk(pointers[x_place] + start, pointers[dy_place] + start, n, center)
            a, b = merged(count, a, b, float64(n), a_more, b_more)
            count += n
        return a, b

    @njit(**DEVICE)
    def scale_one(pointers, start, n, coefficients):
        center, second, factor, offset = coefficients
        x, dy, target = pointers[x_place] + start, pointers[dy_place] + start, pointers[out_place] + start
        if streams and target % vector_bytes == 0:
            stream_chunk(target, x, dy, n, center, second, factor, offset, 0)
        else:
            scale_chunk(target, x, dy, n, center, second, factor, offset, 0)

    @njit(**DEVICE)
    def scale_channel(pointers, ctx, channel, coefficients):
        f = at(ctx)
        for q in range(f.chunks):
            start, n = chunk_of(f, channel, q)
            scale_one(pointers, start, n, coefficients)

    @njit(**DEVICE)
    def scale_planes(pointers, ctx, first, last):
        f = at(ctx)
        rows, c = data(f.coefficients), f.channels
        for plane in range(first, last):
            channel = plane % c
            coefficients = (rows[channel], rows[c + channel], rows[2 * c + channel], rows[3 * c + channel])
            for k in range(f.of_plane):
                begin = k * f.chunk
                start = (plane * f.length + begin) * itemsize
                scale_one(pointers, start, min(f.chunk, f.length - begin), coefficients)

    return sums, scale_channel, scale_planes


@cache
def _tasks(v: Variant, streams: bool):
    """(a whole channel; a part's sums; some channels finished; some planes scaled). A gradient's sums are of
    differences from the mean, which is there beforehand."""
    i64, f64, args_at, at = pointer("i64"), pointer("f64"), struct(ARGS), struct(_FIELDS)
    sums, scale_channel, scale_planes = _channel_loops(v, streams)
    finished, finished_row, merged = finish(v), finish_row(v), merge(v.op)
    is_train, has_sums = v.op == "bn_train", v.op != "bn_infer"
    real, data, size = NUMBA_FLOAT[v.compute], pointer(v.compute), ITEMSIZE[v.compute]
    given_mean, widen, at_mean = pointer(v.param_dtype), WIDEN[v.param_dtype], dict(v.places).get("mean", 0)

    @njit(**DEVICE)
    def mean_of(pointers, channel):
        return real(0.0) if is_train else widen(given_mean(pointers[at_mean])[channel])

    def whole_channel(args, ctx, index, worker):
        pointers, given, f = i64(args), args_at(args), at(ctx)
        a, b = sums(pointers, ctx, index, int64(0), f.chunks, mean_of(pointers, index))
        coefficients = finished(pointers, index, f.m, a, b, given.alpha, given.beta)
        scale_channel(pointers, ctx, index, coefficients)

    def sums_of_part(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        channel, part = index // f.parts, index % f.parts
        first, last = part * f.chunks // f.parts, (part + 1) * f.chunks // f.parts
        a, b = sums(pointers, ctx, channel, first, last, mean_of(pointers, channel))
        pair = f64(f.sums + 16 * index)
        pair[0], pair[1] = a, b

    @njit(**DEVICE)
    def sums_of_channel(f, channel):
        count, a, b = 0.0, 0.0, 0.0
        for part in range(f.parts):
            pair = f64(f.sums + 16 * (channel * f.parts + part))
            first, last = part * f.chunks // f.parts, (part + 1) * f.chunks // f.parts
            # Every chunk of a plane but its last is full.
            n = float64(last // f.of_plane * f.length + last % f.of_plane * f.chunk)
            n -= float64(first // f.of_plane * f.length + first % f.of_plane * f.chunk)
            a, b = merged(count, a, b, n, pair[0], pair[1])
            count += n
        return a, b

    def finish_channels(args, ctx, index, worker):
        pointers, given, f = i64(args), args_at(args), at(ctx)
        first, c = index * _FINISHED_CHANNELS, f.channels
        n = min(c - first, _FINISHED_CHANNELS)
        if has_sums:
            rows = data(f.coefficients)
            for channel in range(first, first + n):
                a, b = sums_of_channel(f, channel)
                found = finished(pointers, channel, f.m, a, b, given.alpha, given.beta)
                rows[channel], rows[c + channel], rows[2 * c + channel], rows[3 * c + channel] = found
        else:
            to = f.coefficients + first * size
            finished_row(pointers, first, n, f.m, 0, 0, given.alpha, given.beta, to, c * size)

    def scale_some(args, ctx, index, worker):
        f = at(ctx)
        first, last = index * f.planes // f.runs, (index + 1) * f.planes // f.runs
        scale_planes(i64(args), ctx, first, last)

    tasks = whole_channel, sums_of_part, finish_channels, scale_some
    return tuple(compile_task(task, (v, streams)) for task in tasks)


class Planes(Candidate[NoConfig, Cpu]):
    """Channel by channel; supports everything, and is slow where planes are of one element."""

    provider, algorithm = "cpu", "planes"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Cpu) -> Support:
        return YES

    def estimate(self, problem: BnProblem, config: NoConfig, device: Cpu) -> float:
        outer, channels, inner = problem.planes
        chunks = outer * channels * ceil(inner / _CHUNK_ELEMS)
        side_ns = outer * channels * inner * _NS_PER_ELEM[self.op] + chunks * _NS_PER_CHUNK
        return kernel_us(device, 0.0, side_ns, max(channels, device.threads))

    def prepare(self, problem: BnProblem, config: NoConfig, device: Cpu) -> Program:
        v = variant(problem, device.lanes(problem.compute))
        outer, channels, inner = problem.planes
        chunk = min(inner, _CHUNK_ELEMS)
        plane_bytes = inner * ITEMSIZE[problem.dtype]
        is_large = 2 * problem.min_bytes > cache_bytes(device)  # the cache has other things, too
        ahead = _CHANNELS_AHEAD * plane_bytes if is_large and plane_bytes <= _SHORT_PLANE_BYTES else 0
        chunks = outer * ceil(inner / chunk)
        wanted = device.threads * _TASKS_PER_THREAD
        parts = min(chunks, ceil(wanted / channels)) if channels < wanted else 1
        runs = min(outer * channels, wanted)
        sums, coefficients = (
            np.empty((channels, parts, 2)),
            np.empty(4 * channels * ITEMSIZE[problem.compute], np.uint8),
        )
        ctx = filled(
            _FIELDS,
            channels=channels,
            length=inner,
            chunk=chunk,
            of_plane=ceil(inner / chunk),
            chunks=chunks,
            parts=parts,
            planes=outer * channels,
            runs=runs,
            m=problem.m,
            ahead=ahead,
            sums=sums.ctypes.data,
            coefficients=coefficients.ctypes.data,
        )
        whole_channel, sums_of_part, finish_channels, scale_some = _tasks(v, streams(problem, device))
        few = problem.operands[0].size_elems <= FEW_ELEMS
        if parts == 1 and problem.op != "bn_infer":
            phases = [Phase(whole_channel, channels, ctx, few=few)]
        else:
            finishing = Phase(finish_channels, ceil(channels / _FINISHED_CHANNELS), ctx, few=few)
            phases = [
                Phase(sums_of_part, channels * parts, ctx, few=few),
                finishing,
                Phase(scale_some, runs, ctx, few=few),
            ]
        return Program(phases[1:] if problem.op == "bn_infer" else phases, [sums, coefficients])


TRAIN, INFER, BWD, INFER_BWD = (Planes(op) for op in ("bn_train", "bn_infer", "bn_bwd", "bn_infer_bwd"))
