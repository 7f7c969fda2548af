"""Batch normalisation on the CPU where neighbours are of different channels: NHWC, and every per-activation mode.

    a line:  a row of channels; of few channels several rows, which lie one after the other, up to 256 elements
    sums     a task a part of the lines x a block of columns, a sum a lane
    finish   a task some channels, or where a line has several rows all: merges the parts, and the lanes of one channel
    scale    as the first

Traffic: x (and dy) twice, what comes out once; of a batch that fits the last-level cache once. Within a part sums are
of the compute type, of differences from the part's first line, or from the means of its columns where one begins far
from all that follows; parts are merged in float64. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np
from numba import float64, int64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.bn_channel import FEW_ELEMS, Variant, is_far, merge_row, variant
from nbdnn.kernels.cpu.bn_finish import finish_row, means
from nbdnn.kernels.cpu.bn_vector import add_lines, scale_row
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import kernel_us, streams
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.rows import ask_for, convert_row
from nbdnn.kernels.cpu.scratch import Scratch
from nbdnn.kernels.cpu.vector import NUMBA_FLOAT, filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_LEAST_WIDTH, _BLOCK = 256, 2048  # columns of a line, and of a task
_LINES_AT_ONCE = 4
_LONG_LINE_BYTES = 4096
_AHEAD_BYTES = 2048  # of what comes from memory: training 8x256x56x56 took 1.13 ms of 1.44 (a Zen 5 thread)
# To a part's sums, one after the other: they lose few digits so. Where what merges parts has no more digits, fewer.
_MOST_ADDITIONS = {"f32": 512, "f64": 64}
# Channels of a task, and parts of them: a second task costs a parallel region (1.5 us).
_MOST_FINISHED, _LEAST_FINISHED, _FINISHED_PARTS = 1024, 16, 1 << 14
_TASKS_PER_THREAD, _PART_BYTES = 4, 1 << 20  # more tasks than threads where each has so much of x: parts are merged
_NS_PER_ELEM = {"bn_train": 0.3, "bn_infer": 0.15, "bn_bwd": 0.4, "bn_infer_bwd": 0.35}

# A line has `width` columns, the last perhaps `tail` only; `parts` share the lines. sums: of each part two rows of
# float64. coefficients: four rows of the compute type.
_FIELDS = record(
    *("channels", "width", "lines", "tail", "blocks", "parts", "finished", "m"),
    *("sums", "coefficients", "scratch", "scratch_bytes"),
)


@cache
def _part(parameters: np.dtype):
    """Compiled-in function (ctx, index): (part, first line, last line, first column, columns) of a task."""
    at = struct(parameters)

    @njit(**DEVICE)
    def part_of(ctx, index):
        f = at(ctx)
        part, block = index // f.blocks, index % f.blocks
        column = block * _BLOCK
        first, last = part * f.lines // f.parts, (part + 1) * f.lines // f.parts
        return part, first, last, column, min(_BLOCK, f.width - column)

    return part_of


@cache
def _sums_task(v: Variant, together: int, streams: bool):
    """together: lines whose elements are added up before they go to the sums. streams: from memory, asked for ahead."""
    i64, f64, at = pointer("i64"), pointer("f64"), struct(_FIELDS)
    data, real, size = pointer(v.compute), NUMBA_FLOAT[v.compute], ITEMSIZE[v.compute]
    row_bytes = _BLOCK * size
    add_one, add_some = add_lines(v, 1, row_bytes), add_lines(v, together, row_bytes)
    means_of, part_of, widen_row = means(v), _part(_FIELDS), convert_row(v.dtype, v.compute, v.vl)
    itemsize, is_train = ITEMSIZE[v.dtype], v.op == "bn_train"
    dy_place = 0 if is_train else 1

    @njit(**DEVICE)
    def clear_sums(sums, n):
        total, second = data(sums + row_bytes), data(sums + 2 * row_bytes)
        for j in range(n):
            total[j], second[j] = real(0.0), real(0.0)

    @njit(**DEVICE)
    def start_sums(sums, pointers, f, line, column, n):
        """Pivots of a training are the part's first line, of a gradient the means; the sums are 0."""
        pivot = data(sums)
        if is_train:
            there = n if line < f.lines - 1 else min(n, f.tail - column)
            widen_row(sums, pointers[0] + (line * f.width + column) * itemsize, max(there, 0))
            for j in range(max(there, 0), n):
                pivot[j] = real(0.0)
        else:
            done = 0
            while done < n:
                channel = (column + done) % f.channels
                some = min(n - done, f.channels - channel)
                means_of(pointers, channel, some, sums + done * size)
                done += some
        clear_sums(sums, n)

    @njit(**DEVICE)
    def add_part(sums, pointers, f, first, last, column, n):
        step, line = f.width * itemsize, first
        full = min(last, f.lines - 1)
        while together > 1 and line + together <= full:
            start = (line * f.width + column) * itemsize
            add_some(sums, pointers[0] + start, pointers[dy_place] + start, step, n)
            line += together
        while line < last:
            there = n if line < f.lines - 1 else min(n, f.tail - column)
            if there > 0:
                start = (line * f.width + column) * itemsize
                if streams:
                    ask_for(pointers[0] + start + _AHEAD_BYTES, there * itemsize)
                    if not is_train:
                        ask_for(pointers[dy_place] + start + _AHEAD_BYTES, there * itemsize)
                add_one(sums, pointers[0] + start, pointers[dy_place] + start, 0, there)
            line += 1

    @njit(**DEVICE)
    def mended(sums, first, end, count):
        """Whether pivots of these columns were too far from what they were subtracted from: they are the means then."""
        pivot, total, second = data(sums), data(sums + row_bytes), data(sums + 2 * row_bytes)
        far = False
        for j in range(first, end):
            far |= is_far(real(count), total[j], second[j])
        if far:
            for j in range(first, end):
                pivot[j] += real(total[j] / count)
        return far

    @njit(**DEVICE)
    def keep(sums, first, end, count, a, b):
        """The sums of these columns, which have so many elements, in float64."""
        pivot, total, second = data(sums), data(sums + row_bytes), data(sums + 2 * row_bytes)
        for j in range(first, end):
            if is_train:
                mean = float64(total[j]) / count
                f64(a)[j], f64(b)[j] = float64(pivot[j]) + mean, float64(second[j]) - mean * float64(total[j])
            else:
                f64(a)[j], f64(b)[j] = float64(total[j]), float64(second[j])

    def sums_of_part(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        part, first, last, column, n = part_of(ctx, index)
        sums, count = f.scratch + worker * f.scratch_bytes, last - first
        # Columns from `whole` on have no element in the last line.
        whole, fewer = n if last < f.lines else min(n, max(f.tail - column, 0)), max(count - 1, 1)
        start_sums(sums, pointers, f, first, column, n)
        add_part(sums, pointers, f, first, last, column, n)
        if is_train and mended(sums, int64(0), whole, count) | mended(sums, whole, n, fewer):
            clear_sums(sums, n)
            add_part(sums, pointers, f, first, last, column, n)
        a = f.sums + 16 * part * f.width + 8 * column
        keep(sums, int64(0), whole, count, a, a + 8 * f.width)
        keep(sums, whole, n, fewer, a, a + 8 * f.width)

    return compile_task(sums_of_part, (v, together, streams))


@cache
def _finish_task(v: Variant):
    i64, args_at, at, size = pointer("i64"), struct(ARGS), struct(_FIELDS), ITEMSIZE[v.compute]
    merged, finished, copied = merge_row(v), finish_row(v), convert_row(v.compute, v.compute, v.vl)
    has_sums = v.op != "bn_infer"

    @njit(**DEVICE)
    def add(n, count, more, a, b, a_more, b_more):
        share = more / max(count + more, 1)
        merged(n, share, count * share, a, b, a_more, b_more)

    @njit(**DEVICE)
    def merge_parts(f, column, n, a, b):
        """The sums of n columns, those of all parts merged into the first part's."""
        pitch, whole, count = 8 * f.width, max(min(n, f.tail - column), 0), f.lines // f.parts
        for part in range(1, f.parts):
            first, last = part * f.lines // f.parts, (part + 1) * f.lines // f.parts
            start, more, past = f.sums + 2 * pitch * part + 8 * column, last - first, 8 * whole
            add(whole, count, more, a, b, start, start + pitch)
            more -= last == f.lines
            add(n - whole, count, more, a + past, b + past, start + past, start + pitch + past)
            count = last

    @njit(**DEVICE)
    def merge_rows(f, a, b):
        """The sums of all columns, those of a line's rows merged into the first row's."""
        count = f.lines
        for column in range(f.channels, f.width, f.channels):
            more = f.lines - (column >= f.tail)
            add(f.channels, count, more, a, b, a + 8 * column, b + 8 * column)
            count += more

    def finish_channels(args, ctx, index, worker):
        pointers, given, f = i64(args), args_at(args), at(ctx)
        channel = index * f.finished
        n, pitch = min(f.finished, f.channels - channel), f.width * size
        a = f.sums + 8 * channel
        b = a + 8 * f.width
        if has_sums:
            is_row = f.width == f.channels
            merge_parts(f, channel, n if is_row else f.width, a, b)
            if not is_row:
                merge_rows(f, a, b)
        rows = f.coefficients + channel * size
        finished(pointers, channel, n, f.m, a, b, given.alpha, given.beta, rows, pitch)
        for column in range(channel + f.channels, f.width, f.channels):
            for row in range(4):
                copied(f.coefficients + row * pitch + column * size, rows + row * pitch, n)

    return compile_task(finish_channels, v)


@cache
def _scale_task(v: Variant, streams: bool):
    """streams: what is written goes past the caches, which would read each of its lines in vain first; what is read is
    asked for ahead."""
    i64, at, size = pointer("i64"), struct(_FIELDS), ITEMSIZE[v.compute]
    scale_line, stream_line = (scale_row(v, True, past) for past in (False, True))
    # Coefficients of several lines are read once. A gradient gains nothing: 8x512x7x7 took 17 us of 21 in training, 31
    # of 27 backward (a Zen 5 thread). Of vectors of 32 bytes two are best: 85 us of 110 (Zen 3).
    at_once = (_LINES_AT_ONCE if v.vl * size == 64 else 2) if v.is_forward else 1
    scale_lines = scale_row(v, True, lines=at_once)
    part_of, itemsize = _part(_FIELDS), ITEMSIZE[v.dtype]
    vector_bytes = v.vl * itemsize
    is_forward = v.is_forward
    dy_place, out_place = 0 if is_forward else 1, dict(v.places)["y" if is_forward else "dx"]

    def scale_part(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        _, first, last, column, n = part_of(ctx, index)
        pitch, center = f.width * size, f.coefficients + column * size
        second, scale, offset = center + pitch, center + 2 * pitch, center + 3 * pitch
        step, line = f.width * itemsize, first
        while not streams and line + at_once <= min(last, f.lines - 1):
            start = (line * f.width + column) * itemsize
            x, dy, out = pointers[0] + start, pointers[dy_place] + start, pointers[out_place] + start
            scale_lines(out, x, dy, n, center, second, scale, offset, step)
            line += at_once
        while line < last:
            there = n if line < f.lines - 1 else min(n, f.tail - column)
            if there > 0:
                start = line * step + column * itemsize
                x, dy, out = pointers[0] + start, pointers[dy_place] + start, pointers[out_place] + start
                if streams:
                    ask_for(x + _AHEAD_BYTES, there * itemsize)
                    if not is_forward:
                        ask_for(dy + _AHEAD_BYTES, there * itemsize)
                if streams and out % vector_bytes == 0:
                    stream_line(out, x, dy, there, center, second, scale, offset, 0)
                else:
                    scale_line(out, x, dy, there, center, second, scale, offset, 0)
            line += 1

    return compile_task(scale_part, (v, streams))


class Rows(Candidate[NoConfig, Cpu]):
    """Neighbours are of different channels."""

    provider, algorithm = "cpu", "rows"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Cpu) -> Support:
        inner = problem.planes[2]
        return YES if inner == 1 else Support(False, f"planes of {inner} elements: neighbours are of one channel")

    def estimate(self, problem: BnProblem, config: NoConfig, device: Cpu) -> float:
        elements, phases = problem.operands[0].size_elems, 1 if self.op == "bn_infer" else 3
        return kernel_us(device, 0.0, elements * _NS_PER_ELEM[self.op], 8 * device.threads, phases)

    def prepare(self, problem: BnProblem, config: NoConfig, device: Cpu) -> Program:
        v = variant(problem, device.lanes(problem.compute))
        rows, channels, _ = problem.planes
        size = ITEMSIZE[problem.compute]
        width = channels * ceil(_LEAST_WIDTH / channels)
        lines, blocks = ceil(rows * channels / width), ceil(width / _BLOCK)
        # Four lines of which each is read from memory in short pieces leave the processor's prefetcher behind.
        far = streams(problem, device)
        is_short = width * ITEMSIZE[problem.dtype] < _LONG_LINE_BYTES
        together = 1 if far and is_short else _LINES_AT_ONCE
        shared = min(device.threads * _TASKS_PER_THREAD, problem.operands[0].size_bytes // _PART_BYTES)
        most = _MOST_ADDITIONS[problem.compute] * together
        wanted = max(ceil(max(device.threads, shared) / blocks), ceil(lines / most))
        parts = min(lines, wanted)
        finished = (
            min(_MOST_FINISHED, max(_LEAST_FINISHED, _FINISHED_PARTS // parts)) if width == channels else channels
        )
        sums, coefficients = np.empty((parts, 2, width)), np.empty(4 * width * size + 64, np.uint8)
        scratch = Scratch(device, 3 * _BLOCK * size)
        ctx = filled(
            _FIELDS,
            channels=channels,
            width=width,
            lines=lines,
            tail=rows * channels - (lines - 1) * width,
            blocks=blocks,
            parts=parts,
            finished=finished,
            m=problem.m,
            sums=sums.ctypes.data,
            coefficients=_on_line(coefficients),
            scratch=scratch.start,
            scratch_bytes=scratch.size_bytes,
        )
        few = problem.operands[0].size_elems <= FEW_ELEMS
        finishing = Phase(_finish_task(v), ceil(channels / finished), ctx, few=few)
        phases = [finishing, Phase(_scale_task(v, far), parts * blocks, ctx, few=few)]
        if problem.op != "bn_infer":
            phases = [Phase(_sums_task(v, together, far), parts * blocks, ctx, few=few), *phases]
        return Program(phases, [sums, coefficients, scratch.memory])


def _on_line(memory: np.ndarray) -> int:
    """The first address in it that begins a cache line."""
    return memory.ctypes.data + -memory.ctypes.data % 64


TRAIN, INFER, BWD, INFER_BWD = (Rows(op) for op in ("bn_train", "bn_infer", "bn_bwd", "bn_infer_bwd"))
