"""Batch normalisation in waves of channels: training and its gradient, the second read from the second-level cache.

    wave     slabs, neighbours: channels of NCHW, up to 128 bytes of every row of NHWC; two waves and what is written
             meanwhile stay in the cache
    grid     as many blocks as a GPU has room for; each takes its rows of its slab in every wave
    block    1. sums its rows of a wave, from memory, and leaves them to the slab's other blocks
             2. scales its rows of the wave before, from the cache, as soon as its coefficients are there
             3. some blocks (warps, where the parts are few) add up the parts of a channel each, in one order, once all
             have come, and write what becomes of it: a wave's time passes before 2. asks for it

Nobody has to be waited for long, unless at the end. What a thread scales first is asked for before it waits. The
counters in the workspace are set to 0 by a kernel before, and the launch is cooperative, so that nobody waits for a
block that is not there. Traffic: x (and dy) once from memory and once from the cache, y once.
Sums in float32 (float64), as `bn_sums` says, always in the same order. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_meeting, bn_rounds
from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda.bn_plan import Variant, Walk
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate, in_workspace
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_THREADS = 256
_PARTS_AT_ONCE = 2  # of a channel, that a thread loads at once
_OF_WARP = 64  # parts that a warp adds up; more are added up by a block
# (share of the cache of what is read in a wave, waves at least, HINTS): two waves of the last stay only if what is
# written hardly takes room.
_SIZES = ((0.22, 1, ("s", "h", "")), (0.11, 4, ("s",)), (0.42, 1, ("h",)))
_CACHE_KEEPS = 0.5  # of its bytes, beside what is written
_ROUNDED_UP = 1.04  # a block's rows, so that its threads have equally many
_LAUNCH_US, _WAVE_US, _SHARE_OF_COPY = 6.0, 0.5, 0.78
_HINT_US = {"s": 0.0, "h": 0.2, "": 0.4}  # where nothing is measured, the first
# Of the copy rate, by the bytes of a row that lie side by side.
_SHARE_OF_WIDTH = {64: 0.95, 32: 0.7, 16: 0.5, 8: 0.3, 4: 0.2, 2: 0.1}
_MOST_CONFIGS = 5


# What the cache is told of the first read, of the second and of what is written: nothing; that nobody reads what is
# written; and that what is read is wanted again, and then no more.
HINTS = {"": ("", "", ""), "s": ("", "", "streaming"), "h": ("last", "first", "first")}


class Waves(NamedTuple):
    """Columns of a slab, slabs of a wave, blocks of a multiprocessor, and one of HINTS."""

    columns: int
    slabs: int
    resident: int
    hints: str = ""

    def __str__(self) -> str:
        return f"{self.columns}x{self.slabs}/{self.resident}{self.hints}"


class _OfWave(NamedTuple):
    """wave: slabs. full, rest: elements of a channel in each part, and in the last."""

    wave: int
    full: int
    rest: int


def _wave_kernel(*specialised_on):
    from nbdnn.kernels.cuda import bn_channel, bn_sums, ptx, ptx_grid, ptx_words

    *of_variant, (of_new, of_again, of_written), by_block = specialised_on
    v = Variant(*of_variant)
    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    lanes, sums, columns, op = v.lanes, v.sums, v.columns, v.op
    channels, apart, held_words = columns * sums, v.threads // columns, bn_rounds.words_of(v)
    widen = ptx.WIDEN[v.param_dtype]
    fetch_new, fetch_again = bn_rounds.fetched(v, of_new), bn_rounds.fetched(v, of_again)
    fetch_one, widen_one = ptx_words.fetch(v.dtype, lanes), ptx_words.widen(v.dtype, lanes)
    (begin_sums, add_round), next_round = bn_rounds.added(v), bn_rounds.next_round(v)
    scale_round = bn_rounds.scaled(v, of_written)
    _, as_pairs, joined = bn_sums.steps(v)
    of_block, (_, taken), of_channel = bn_sums.of_block(v), bn_channel.coefficients(v), _channel_kernel(v, by_block)
    load_pair, coefficients_size = ptx_grid.load_pair(v.compute), 4 * channels

    def normalise(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, counters, pairs,
        epsilon, factor, f, t
    ):  # fmt: skip
        # Where a thread is in every slab.
        thread = small(ptx.thread_x())
        part, of_wave = ptx.divided(small(ptx.block_x()), small(t.wave))
        in_slab, first_row = small(thread & (columns - 1)), integer(part * f.chunk + thread // columns)
        end_row = integer(min(f.rows, integer((part + 1) * f.chunk)))
        image, first_place = ptx.divided(first_row, f.of_image)
        begin = integer(image * f.image_elems + first_place * f.row_elems)
        coefficients_at, flags = integer(2 * f.parts * f.channels), integer(f.slabs)
        a, b, origin, pivot = (
            ptx.cuda.local.array(lanes, real),
            ptx.cuda.local.array(lanes, real),
            ptx.cuda.local.array(lanes, real),
            ptx.cuda.local.array(lanes, real),
        )
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        words, pivot_words = ptx.cuda.local.array(held_words, ptx.WORD), ptx.cuda.local.array(4, ptx.WORD)
        coefficients = ptx.cuda.shared.array(coefficients_size, real)
        before = integer(of_wave - t.wave)

        while before < f.slabs:
            # 1. A thread's sums.
            slab, count = integer(before + t.wave), real(0.0)
            column = integer(slab * columns + in_slab)
            last = end_row if column < f.columns else integer(0)
            row, at, place = first_row, integer(column * f.column_elems + begin), first_place
            fetch_new(words, x, dy, at, place, row, last, f)
            if slab < f.slabs:
                held = column if column < f.columns else integer(0)
                for i in range(lanes):
                    a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
                if op == "bn_train":
                    fetch_one(pivot_words, 0, x, integer(held * f.column_elems))
                    if first_row < last:
                        begin_sums(words, origin)
                else:
                    for i in range(sums):
                        origin[i] = widen(mean[integer(held * sums + i)])
                    for i in range(sums, lanes):
                        origin[i] = origin[0]
                while row < last:
                    count = count + add_round(a, b, origin, words, values, gradients, row, last)
                    at, place = next_round(at, place, f)
                    row = integer(row + 4 * apart)
                    fetch_new(words, x, dy, at, place, row, last, f)
            column = integer(before * columns + in_slab)
            last = end_row if before >= 0 and column < f.columns else integer(0)
            at, place = integer(column * f.column_elems + begin), first_place
            fetch_again(words, x, dy, at, place, first_row, last, f)
            if slab < f.slabs:
                if op == "bn_train":
                    widen_one(pivot, pivot_words, 0)
                    for i in range(sums, lanes):
                        pivot[i] = pivot[0]
                as_pairs(count, a, b, origin, pivot)
                count = joined(count, a, b)
                _, of_first, of_second = of_block(thread, count, a, b)
                channel = integer(slab * channels + thread)
                if thread < channels and channel < f.channels:
                    pair = integer(2 * (part * f.channels + channel))
                    pairs[pair], pairs[integer(pair + 1)] = of_first, of_second
                ptx.cuda.syncthreads()
                if thread == 0:
                    ptx_grid.arrive(counters, slab)

            # 2. The wave before: once its channels are finished, it is scaled and stored.
            if before >= 0:
                ptx.cuda.syncthreads()
                channel = integer(before * channels + thread)
                if thread < channels and channel < f.channels:
                    expected = small(min(channels, f.channels - before * channels))
                    while ptx_grid.arrived(counters, integer(flags + before)) < expected:
                        pass
                    found = integer(coefficients_at + 4 * channel)
                    center, lost = load_pair(pairs, found)
                    scale, offset = load_pair(pairs, integer(found + 2))
                    coefficients[thread], coefficients[integer(thread + channels)] = center, lost
                    coefficients[integer(thread + 2 * channels)] = scale
                    coefficients[integer(thread + 3 * channels)] = offset
                ptx.cuda.syncthreads()
                taken(coefficients, in_slab, origin, pivot, a, b)
                row = first_row
                while row < last:
                    at, place = scale_round(origin, pivot, a, b, words, values, gradients, out, at, place, row, last, f)
                    row = integer(row + 4 * apart)
                    fetch_again(words, x, dy, at, place, row, last, f)

            # 3. The channels that fall to this block.
            before = slab
            if slab < f.slabs:
                params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
                of_channel(
                    params, x, slab, integer(part), thread, counters, pairs, coefficients_at, epsilon, factor, f, t
                )

    data, param, reals = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype), ptx.pointer(v.compute)
    fields = ptx.record(Walk, v.bits), ptx.record(_OfWave, v.bits)
    return normalise, (data, data, data, *[param] * 10, ptx.pointer("f32"), reals, real, real, *fields)


def _channel_kernel(v: Variant, by_block: bool):
    """Device function by which a slab's blocks add up its channels' parts, and write what becomes of them: a warp a
    channel, or where there are many parts a block."""
    from nbdnn.kernels.cuda import bn_channel, bn_sums, ptx, ptx_grid

    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    group = v.threads if by_block else 32
    channels, groups, at_once, forward = v.columns * v.sums, v.threads // group, _PARTS_AT_ONCE, v.is_forward
    merge, of_warp = bn_sums.merged(v.op, v.compute), bn_sums.of_warp(v.op, v.compute)
    of_block = bn_sums.of_block(v._replace(columns=1, lanes=1))
    finish, load_pair, widen_data = bn_channel.finish(v), ptx_grid.load_pair(v.compute), ptx.WIDEN[v.dtype]

    @ptx.inline
    def finish_channels(params, x, slab, part, thread, counters, pairs, coefficients_at, epsilon, factor, f, t):
        a, b = ptx.cuda.local.array(at_once, real), ptx.cuda.local.array(at_once, real)
        total, moment = ptx.cuda.local.array(1, real), ptx.cuda.local.array(1, real)
        member, in_slab = small(thread & (group - 1)), integer(part + thread // group * f.parts)
        channel = integer(slab * channels + in_slab)
        while in_slab < channels and channel < f.channels:
            pivot = real(0.0)
            if forward:
                pivot = widen_data(x[integer(channel * f.channel_elems)])
            while ptx_grid.arrived(counters, slab) < f.parts:
                pass
            count, total[0], moment[0] = real(0.0), real(0.0), real(0.0)
            p = integer(member)
            while p < f.parts:
                for k in range(at_once):
                    here = integer(p + k * group)
                    here = here if here < f.parts else p
                    a[k], b[k] = load_pair(pairs, integer(2 * (here * f.channels + channel)))
                for k in range(at_once):
                    here = integer(p + k * group)
                    if here < f.parts:
                        n = real(t.full) if here < f.parts - 1 else real(t.rest)
                        count, total[0], moment[0] = merge(count, total[0], moment[0], n, a[k], b[k])
                p = integer(p + at_once * group)
            if by_block:
                ptx.cuda.syncthreads()  # all have read what this block added up before
                _, first, second = of_block(thread, count, total, moment)
            else:
                _, first, second = of_warp(count, total[0], moment[0])
            if member == 0:
                four = finish(params, channel, pivot, real(f.m), first, second, epsilon, factor, True)
                for i in range(4):
                    pairs[integer(coefficients_at + 4 * channel + i)] = four[i]
                ptx_grid.arrive(counters, integer(f.slabs + slab))
            in_slab = integer(in_slab + groups * f.parts)
            channel = integer(slab * channels + in_slab)

    return finish_channels


class InWaves(LaunchedCandidate[Waves]):
    """Training and its gradient."""

    algorithm = "waves"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        if device.capability < (8, 0):
            return Support(False, f"compute capability {device.capability}: the cache takes no hints before 8.0")
        return YES if problem.m else Support(False, "0 elements a channel")

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Waves, ...]:
        every = _every(problem, device)
        return tuple(sorted(every, key=lambda config: self.estimate(problem, config, device))[:_MOST_CONFIGS])

    def estimate(self, problem: BnProblem, config: Waves, device: Gpu) -> float:
        v, walk = _variant(problem, config), _walk(problem, config, device)
        waves = ceil(walk.slabs / config.slabs)
        inputs = (1 if v.is_forward else 2) * problem.operands[0].size_bytes
        # Of what is read for the second time, the part that the cache has no more.
        wave_bytes = inputs / max(waves, 1)
        lost = min(1.0, max(0.0, min(waves, 2) * wave_bytes / (_CACHE_KEEPS * device.l2_bytes) - 1))
        idle = device.sms * config.resident / max(1, config.slabs * walk.parts) * walk.parts * walk.chunk / walk.rows
        rate = copy_bytes_per_s(device) * _SHARE_OF_COPY
        if not v.planar:
            rate *= _SHARE_OF_WIDTH.get(config.columns * problem.vector_bytes, 1.0)
        steps_us = waves * _WAVE_US + _HINT_US[config.hints]
        return _LAUNCH_US + steps_us + idle * (problem.min_bytes + lost * inputs) / rate * 1e6

    def workspace_bytes(self, problem: BnProblem, config: Waves, device: Gpu) -> int:
        walk = _walk(problem, config, device)
        return (
            bn_meeting.counters_bytes(2 * walk.slabs) + (2 * walk.parts + 4) * walk.channels * ITEMSIZE[problem.compute]
        )

    def launches(self, problem: BnProblem, config: Waves, device: Gpu) -> list[Launch]:
        v, walk = _variant(problem, config), _walk(problem, config, device)
        of_vector = v.lanes if v.planar else 1
        rest = walk.rows - (walk.parts - 1) * walk.chunk
        main = Launch(
            source=Source(_wave_kernel, (*v, HINTS[config.hints], walk.parts > _OF_WARP), v.threads, config.resident),
            grid=(config.slabs * walk.parts if walk.slabs else 0, 1, 1),
            pointers=(*plan.pointers(problem), WORKSPACE, in_workspace(bn_meeting.counters_bytes(2 * walk.slabs))),
            scalars=v.compute,
            integers=(*walk, *_OfWave(config.slabs, walk.chunk * of_vector, rest * of_vector)),
            integer_bits=v.bits,
            cooperative=True,
        )
        return [bn_meeting.clear(2 * walk.slabs), main]


def _every(problem: BnProblem, device: Gpu) -> list[Waves]:
    """Waves of some sizes, of the widest slabs that make them."""
    most = _most_resident(problem)
    found: dict[Waves, None] = {}
    for share, waves, hints in _SIZES:
        columns = _widest(problem, share * device.l2_bytes)
        wave = _slabs(problem, columns, share * device.l2_bytes, waves, device.sms * most)
        found |= {Waves(columns, wave, most, hint): None for hint in hints}
    return list(found)


def _most_resident(problem: BnProblem) -> int:
    """Of a multiprocessor's 65536 registers: 85 a thread, or 128 of them."""
    v = plan.variant(problem, 1, _THREADS)
    return 2 if v.compute == "f64" or (v.sums == 8 and not v.is_forward) else 3


def _variant(problem: BnProblem, config: Waves) -> Variant:
    return plan.variant(problem, config.columns, _THREADS)


def _walk(problem: BnProblem, config: Waves, device: Gpu) -> Walk:
    """Of parts that all blocks there are together take in a wave; in whole steps of a block, where these are few."""
    v = _variant(problem, config)
    rows, at_once = plan.rows_of(problem, v), v.threads // v.columns
    parts = max(1, device.sms * config.resident // config.slabs)
    chunk = max(1, ceil(rows / parts))
    whole = ceil(chunk / at_once) * at_once
    return plan.walk(problem, v, whole if whole <= _ROUNDED_UP * chunk else chunk)


def _slab_bytes(problem: BnProblem, columns: int) -> int:
    """Of all that is read of a slab."""
    v = plan.variant(problem, columns, _THREADS)
    inputs = 1 if v.is_forward else 2
    return inputs * plan.rows_of(problem, v) * v.columns * problem.vector_bytes


def _widest(problem: BnProblem, wave_bytes: float) -> int:
    """Columns of the widest slab that a wave of so many bytes has; the narrowest there is, where it has none."""
    widths = plan.widths(problem)
    return next((columns for columns in widths if _slab_bytes(problem, columns) <= wave_bytes), widths[-1])


def _slabs(problem: BnProblem, columns: int, wave_bytes: float, waves: int, blocks: int) -> int:
    """Of a wave of so many bytes at most, or of one slab, and no more than there are blocks: waves, at least so many
    where there are slabs for them, that are equally large."""
    slabs = plan.walk(problem, plan.variant(problem, columns, _THREADS), 1).slabs
    most = max(1, min(int(wave_bytes // max(1, _slab_bytes(problem, columns))), blocks))
    return max(1, ceil(slabs / max(waves, ceil(slabs / most))))


TRAIN, BWD = InWaves("bn_train"), InWaves("bn_bwd")
