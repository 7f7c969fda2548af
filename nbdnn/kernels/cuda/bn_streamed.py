"""Batch normalisation of any size: sums of parts of channels, what becomes of them, and everything scaled.

    sums     a block a part of a column: its sums to the workspace       (the gradient of inference scales dy meanwhile,
             and where a block has all of a column, that is all; of short ones: bn_short.py)
    finish   a warp a channel, there before the sums are: adds the parts, writes statistics and four coefficients
    scale    a block a part, the last ones first: what was read last is still in the second-level cache

Inference is the last of these alone, with coefficients from its parameters. Traffic: x (and dy) twice, less what the
second-level cache keeps, y once. Sums in float32 (float64), as `bn_sums` says, always in the same order. This is the
candidate that supports everything. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda.bn_plan import Variant, Walk
from nbdnn.kernels.cuda.bn_short import is_short, short_kernel
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_THREADS, _FINISH_THREADS = 256, 128
_AT_ONCE = 4  # vectors of a thread that are on their way
_PARTS_AT_ONCE = 8  # sums of parts that a lane of the second kernel asks for
_MIN_BLOCKS, _MIN_BLOCKS_WIDE = 3, 2  # of a multiprocessor: 85 registers a thread; 128 of 2 x 8 lanes and float64
_CHUNK_BYTES = (32 << 10, 16 << 10, 64 << 10)  # of x, a block
_LAUNCH_US, _NEXT_US = 3.0, 1.5  # of the first kernel; of each beside it, and of what lies between them
_SHARE_OF_COPY = 0.9
# Inference: of a launch, of a block, of a thread's vectors; and how much longer too few blocks take.
_INFER_US, _INFER_BLOCK_US, _INFER_SLOT_US, _INFER_FEW = 1.6, 1.5e-3, 0.14, 1.5
_INFER_CHANNEL_US = 1.1e-5  # of a channel of a block, where neighbours are channels: its coefficients
_INFER_NARROW = {2: 1.55, 4: 1.3, 8: 1.1}  # by bytes of a vector, how much longer those take that are less than 16
_BLOCK_US = 5.5e-3  # of a block that sums, however little it has to do
_SLOT_US = 0.13  # of a thread's vectors, one after the other
_FINISHED_US = 2.5e-4  # of a channel, by a kernel of its own
# Where neighbours are channels (H200): what the sums of a block cost in training, of 8 channels a thread and of fewer;
# and 32 parts of a channel, one after the other.
_SUMS_US, _PARTS_US = (6e-3, 2e-3), 0.05


class Streamed(NamedTuple):
    """Columns of a block, and how much of x it takes."""

    columns: int
    chunk_kib: int

    def __str__(self) -> str:
        return f"{self.columns}x{self.chunk_kib}"


class _Parts(NamedTuple):
    """What the second kernel adds: of part p `full` elements of a channel, of the last `rest`."""

    channels: int
    parts: int
    m: int
    full: int
    rest: int
    channel_elems: int


def _block_kernel(*specialised_on):
    """Sums or, where is_last, scaling: what a block does with its rows. A thread has four on their way, and asks for
    the next as soon as it has used one. is_alone: the block has all rows of its columns, and finishes their channels.
    """
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx, ptx_local

    *of_variant, is_last, is_alone = specialised_on
    v = Variant(*of_variant)
    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    lanes, sums, columns, op = v.lanes, v.sums, v.columns, v.op
    channels, at_once, rows_at_once = columns * sums, _AT_ONCE, v.threads // columns
    add, as_pairs, joined = bn_sums.steps(v)
    of_block, finish, known = bn_sums.of_block(v), bn_channel.finish(v), bn_channel.known(v)
    load, widen = ptx_local.load(v.dtype, lanes), ptx.WIDEN[v.param_dtype]
    begin_of, coefficients_of = bn_block.begin_of(v), bn_block.coefficients_of(v)
    four_arrays, four_arrays_of_sums = (bn_block.four_arrays(size, v.compute) for size in (lanes, sums))
    part, parts, load_one, widen_one = bn_block.on_their_way(v)
    (others, load_up_to_four), scale_one = bn_block.fours(v), bn_block.scale_one(v)
    size = at_once * parts

    @ptx.inline
    def coefficients_found(workspace, column, f):
        center, second, scale, offset = four_arrays_of_sums()
        for i in range(sums):
            at = integer(integer(2 * f.parts * f.channels) + column * sums + i)
            center[i], second[i] = workspace[at], workspace[integer(at + f.channels)]
            scale[i], offset[i] = workspace[integer(at + 2 * f.channels)], workspace[integer(at + 3 * f.channels)]
        return center, second, scale, offset

    @ptx.inline
    def take(totals, coefficients, values, gradients, loaded, where, out, at):
        """Add a vector, or scale it, or both."""
        widen_one(values, gradients, loaded, where)
        if not is_last:
            a, b, origin = totals
            add(a, b, origin, values, gradients, 0)
        if is_last or op == "bn_infer_bwd":
            scale_one(coefficients, values, gradients, 0, out, at)

    @ptx.inline
    def take_all(totals, coefficients, loaded, x, dy, out, at, two, three, four, end, place, left, f):
        """A thread's vectors, of which the first four are on their way: how many."""
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        count = real(0.0)
        while left > 3 * rows_at_once:
            after = integer(left - at_once * rows_at_once)
            next_two, next_three, next_four, next_end, place = others(end, place, f)
            take(totals, coefficients, values, gradients, loaded, 0, out, at)
            if after > 0:
                load_one(loaded, 0, x, dy, end)
            take(totals, coefficients, values, gradients, loaded, 1, out, two)
            if after > rows_at_once:
                load_one(loaded, 1, x, dy, next_two)
            take(totals, coefficients, values, gradients, loaded, 2, out, three)
            if after > 2 * rows_at_once:
                load_one(loaded, 2, x, dy, next_three)
            take(totals, coefficients, values, gradients, loaded, 3, out, four)
            if after > 3 * rows_at_once:
                load_one(loaded, 3, x, dy, next_four)
            at, two, three, four, end = end, next_two, next_three, next_four, next_end
            left, count = after, count + real(at_once)
        if left > 0:
            take(totals, coefficients, values, gradients, loaded, 0, out, at)
            count = count + real(1.0)
        if left > rows_at_once:
            take(totals, coefficients, values, gradients, loaded, 1, out, two)
            count = count + real(1.0)
        if left > 2 * rows_at_once:
            take(totals, coefficients, values, gradients, loaded, 2, out, three)
            count = count + real(1.0)
        return count

    def sum_parts(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, workspace,
        epsilon, factor, f
    ):  # fmt: skip
        thread = small(ptx.thread_x())
        part_of_column, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        column, row, last, at, place = begin_of(part_of_column, slab, f)
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        left = integer(last - row)
        two, three, four, end, place = others(at, place, f)
        load_up_to_four(loaded, 0, x, dy, at, two, three, four, left)
        a, b, origin, pivot = four_arrays()
        for i in range(lanes):
            a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
        load(pivot, 0, x, integer(column * f.column_elems))
        if op == "bn_train":
            if left > 0:
                widen_one(origin, origin, loaded, 0)
        else:
            for i in range(sums):
                origin[i] = widen(mean[integer(column * sums + i)])
        if lanes > sums:
            for i in range(lanes):
                pivot[i] = pivot[0]
                if op != "bn_train":
                    origin[i] = origin[0]
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
        coefficients = (a, b, origin, pivot)  # none
        if op == "bn_infer_bwd":
            coefficients = coefficients_of(params, slab, column, epsilon, factor, f)
        count = take_all((a, b, origin), coefficients, loaded, x, dy, out, at, two, three, four, end, place, left, f)
        as_pairs(count, a, b, origin, pivot)
        count = joined(count, a, b)
        _, of_first, of_second = of_block(thread, count, a, b)
        channel = integer(slab * channels + thread)
        if thread < channels and channel < f.channels:
            if is_alone:
                of_known, m = known(params, channel), real(f.m)
                finish(of_known, params, channel, real(0.0), m, of_first, of_second, epsilon, factor, True)
            else:
                pair = integer(2 * (part_of_column * f.channels + channel))
                workspace[pair], workspace[integer(pair + 1)] = of_first, of_second

    def scale_parts(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, workspace,
        epsilon, factor, f
    ):  # fmt: skip
        block = integer(integer(f.parts * f.slabs) - integer(1) - integer(ptx.block_x()))
        part_of_column, slab = ptx.divided(block, f.slabs)
        column, row, last, at, place = begin_of(part_of_column, slab, f)
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        left = integer(last - row)
        two, three, four, end, place = others(at, place, f)
        load_up_to_four(loaded, 0, x, dy, at, two, three, four, left)
        if op == "bn_infer":
            params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
            coefficients = coefficients_of(params, slab, column, epsilon, factor, f)
        else:
            coefficients = coefficients_found(workspace, column, f)
        take_all(coefficients, coefficients, loaded, x, dy, out, at, two, three, four, end, place, left, f)

    data, param, reals = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype), ptx.pointer(v.compute)
    types = (data, data, data, *[param] * 10, reals, real, real, ptx.record(Walk, v.bits))
    return scale_parts if is_last else sum_parts, types


def _finish_kernel(*specialised_on):
    """A warp a channel."""
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx

    v = Variant(*specialised_on)
    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    merge, op = bn_sums.merged(v.op, v.compute), v.op
    finish, known = bn_channel.finish(v), bn_channel.known(v)
    warps, widen_data, at_once = _FINISH_THREADS // 32, ptx.WIDEN[v.dtype], _PARTS_AT_ONCE
    four_arrays = bn_block.four_arrays(at_once, v.compute)

    def finish_channels(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, workspace,
        epsilon, factor, f
    ):  # fmt: skip
        thread = small(ptx.thread_x())
        channel, lane = integer(integer(ptx.block_x()) * warps + (thread >> 5)), small(thread & 31)
        count, a, b = real(0.0), real(0.0), real(0.0)
        ns, of_first, of_second, _ = four_arrays()
        part = integer(lane)
        while channel < f.channels and part < f.parts:
            # All of them are asked for before one is added.
            for i in range(at_once):
                ns[i], of_first[i], of_second[i] = real(0.0), real(0.0), real(0.0)
                one = integer(part + 32 * i)
                if one < f.parts:
                    pair = integer(2 * (one * f.channels + channel))
                    ns[i] = real(f.full) if one < f.parts - 1 else real(f.rest)
                    of_first[i], of_second[i] = workspace[pair], workspace[integer(pair + 1)]
            for i in range(at_once):
                count, a, b = merge(count, a, b, ns[i], of_first[i], of_second[i])
            part = integer(part + 32 * at_once)
        for exchange in range(5):
            n, a_other = ptx.shuffle_xor(count, 16 >> exchange), ptx.shuffle_xor(a, 16 >> exchange)
            b_other = ptx.shuffle_xor(b, 16 >> exchange)
            count, a, b = merge(count, a, b, n, a_other, b_other)
        if lane == 0 and channel < f.channels:
            params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
            pivot = real(0.0)
            if op == "bn_train":
                pivot = widen_data(x[integer(channel * f.channel_elems)])
            found = finish(known(params, channel), params, channel, pivot, real(f.m), a, b, epsilon, factor, True)
            if op != "bn_infer_bwd":
                at = integer(2 * f.parts * f.channels + channel)
                for i in range(4):
                    workspace[integer(at + i * f.channels)] = found[i]

    data, param, reals = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype), ptx.pointer(v.compute)
    return finish_channels, (data, data, data, *[param] * 10, reals, real, real, ptx.record(_Parts, v.bits))


class StreamedTwice(LaunchedCandidate[Streamed]):
    """Any batch normalisation."""

    algorithm = "streamed"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        return YES

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Streamed, ...]:
        columns = plan.widths(problem)[0]
        every = [Streamed(columns, chunk_bytes >> 10) for chunk_bytes in _CHUNK_BYTES]
        if self.op == "bn_infer_bwd":  # as many blocks as are there at once
            v = plan.variant(problem, columns, _THREADS)
            parts = max(1, _min_blocks(v) * device.sms // _walk(problem, every[0]).slabs)
            row_bytes = v.columns * v.lanes * ITEMSIZE[v.dtype]
            every.append(Streamed(columns, ceil(ceil(plan.rows_of(problem, v) / parts) * row_bytes / 1024)))
        return tuple(sorted(dict.fromkeys(every), key=lambda config: self.estimate(problem, config, device)))

    def workspace_bytes(self, problem: BnProblem, config: Streamed, device: Gpu) -> int:
        integers = _walk(problem, config)
        if self.op == "bn_infer" or _is_alone(problem, integers):
            return 0
        return (2 * integers.parts + 4) * integers.channels * ITEMSIZE[problem.compute]

    def estimate(self, problem: BnProblem, config: Streamed, device: Gpu) -> float:
        integers, inputs = _walk(problem, config), sum(o.size_bytes for o in problem.operands if o.role == "in")
        blocks, rate = integers.parts * integers.slabs, copy_bytes_per_s(device) * _SHARE_OF_COPY
        if self.op == "bn_infer":
            longer = min(max(1.0, device.sms / blocks), _INFER_FEW) * _INFER_NARROW.get(problem.vector_bytes, 1.0)
            moved_us = problem.min_bytes / rate * longer * 1e6
            found_us = 0.0 if problem.planes[2] > 1 else integers.parts * integers.channels * _INFER_CHANNEL_US
            begun_us, in_turn_us = blocks * _INFER_BLOCK_US, integers.slots * _INFER_SLOT_US
            return _INFER_US + max(moved_us, found_us, begun_us, in_turn_us)
        again = max(0, inputs - device.l2_bytes // 2) if self.op in ("bn_train", "bn_bwd") else 0
        others = 2 if self.op == "bn_infer_bwd" else 3
        others = 0 if _is_alone(problem, integers) else others
        few = max(1.0, 4 * device.sms / blocks)
        sums_us, v = 0.0, plan.variant(problem, config.columns, _THREADS)
        if self.op in ("bn_train", "bn_bwd") and not v.planar:
            sums_us = blocks * _SUMS_US[v.lanes < 8] + integers.parts / 32 * _PARTS_US
        moved_us = (problem.min_bytes + again) / rate * min(few, 8.0) * 1e6
        if others:
            sums_us += problem.planes[1] * _FINISHED_US
        return _LAUNCH_US + others * _NEXT_US + sums_us + max(moved_us, blocks * _BLOCK_US, integers.slots * _SLOT_US)

    def launches(self, problem: BnProblem, config: Streamed, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config.columns, _THREADS), _walk(problem, config)
        blocks, arguments = integers.parts * integers.slabs, (*plan.pointers(problem), WORKSPACE)
        is_alone = _is_alone(problem, integers)
        min_blocks = _min_blocks(v)

        def over_rows(is_last: bool) -> Launch:
            short = is_alone and is_short(v, integers)
            kernel, variant = (short_kernel, tuple(v)) if short else (_block_kernel, (*v, is_last, is_alone))
            source = Source(kernel, variant, _THREADS, min_blocks)
            return Launch(source, (blocks, 1, 1), arguments, v.compute, integers, v.bits)

        of_vector = v.lanes if v.planar else 1
        rest = integers.rows - (integers.parts - 1) * integers.chunk
        parts = _Parts(
            integers.channels,
            integers.parts,
            problem.m,
            integers.chunk * of_vector,
            rest * of_vector,
            integers.channel_elems,
        )
        finish_blocks = ceil(integers.channels / (_FINISH_THREADS // 32))
        finish = Launch(
            Source(_finish_kernel, v._replace(lanes=1, columns=1), _FINISH_THREADS),
            (finish_blocks, 1, 1),
            arguments,
            v.compute,
            parts,
            v.bits,
        )
        if self.op == "bn_infer":
            return [over_rows(True)]
        if is_alone:
            return [over_rows(False)]
        return [over_rows(False), finish] if self.op == "bn_infer_bwd" else [over_rows(False), finish, over_rows(True)]


def _min_blocks(v: Variant) -> int:
    """Blocks that shall fit on a multiprocessor."""
    is_wide = v.lanes == 8 or v.compute == "f64"
    return _MIN_BLOCKS_WIDE if is_wide and not v.is_forward else _MIN_BLOCKS


def _is_alone(problem: BnProblem, integers: Walk) -> bool:
    """Whether every block has all of its channels, whose elements wait for no sum."""
    return problem.op == "bn_infer_bwd" and integers.parts == 1


def _walk(problem: BnProblem, config: Streamed) -> Walk:
    v = plan.variant(problem, config.columns, _THREADS)
    row_bytes = v.columns * v.lanes * ITEMSIZE[v.dtype]
    return plan.walk(problem, v, max(1, min(config.chunk_kib * 1024 // row_bytes, plan.rows_of(problem, v))))


TRAIN, INFER = StreamedTwice("bn_train"), StreamedTwice("bn_infer")
BWD, INFER_BWD = StreamedTwice("bn_bwd"), StreamedTwice("bn_infer_bwd")
