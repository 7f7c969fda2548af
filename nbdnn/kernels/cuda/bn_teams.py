"""Batch normalisation by teams of blocks that stay: training and its gradient in one read, of any size.

    team     blocks, all on the GPU at once, whose shared memory together holds a slab: a channel of NCHW, up to 128
             bytes of NHWC; a block some of its rows
    thread   1. sums its vectors of x (and dy), which it copied to shared memory     block  2. the sums of its warps
    team     3. every block's sums to the workspace, a barrier, and each block adds them all up, in one order
    thread   4. scales what it copied and stores it, each vector's place taken at once by a copy of the next slab's

A multiprocessor has blocks of several teams: while one adds up, another keeps the memory busy. Left alone they would
all do the same at the same time, so a team begins when the one before has added up its first slab. The barrier is a
counter in the workspace, which a kernel before sets to 0; the launch is cooperative, so that nobody waits for a block
that is not there. Traffic: x (and dy) once, y once. Sums in float32 (float64), as `bn_sums` says. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda.bn_plan import Variant, Walk
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate, in_workspace
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

# Threads of a multiprocessor's 65536 registers: 64 of them each; more for coefficients of 8 channels and two tensors.
_RESIDENT_THREADS, _RESIDENT_THREADS_WIDE, _RESIDENT_THREADS_F64 = 1024, 768, 512
_RESIDENT_BLOCKS = (2, 4, 3)
_CLEAR_THREADS = 128
_SYSTEM_BYTES = 1 << 10  # of the shared memory of every block
_SHARES, _AT_ONCE = 16, 6  # threads, at most, that add up one channel's parts, and parts that they load at once
_LAUNCH_US, _SLAB_US, _SHARE_OF_COPY = 6.0, 1.0, 0.92
_ALONE = 0.3  # of the time, where all blocks of a multiprocessor add up at once; less with every team there
# Of the copy rate, by the bytes of a row that lie side by side.
_SHARE_OF_WIDTH = {64: 0.95, 32: 0.7, 16: 0.5, 8: 0.3, 4: 0.2, 2: 0.1}
_MOST_CONFIGS = 5


class Teams(NamedTuple):
    """Columns of a slab, blocks of a team, blocks of a multiprocessor."""

    columns: int
    team: int
    resident: int

    def __str__(self) -> str:
        return f"{self.columns}x{self.team}/{self.resident}"


class _Turns(NamedTuple):
    """teams: whose slabs are that many apart. sms: a block that is so much further shares a multiprocessor. full, rest:
    elements of a channel in each part, and in the last."""

    teams: int
    sms: int
    full: int
    rest: int


class _Counters(NamedTuple):
    teams: int


def _clear_kernel():
    from nbdnn.kernels.cuda import ptx

    integer, real = ptx.INTEGER[32], ptx.REAL["f32"]

    def clear(counters, f):
        at = integer(ptx.block_x() * _CLEAR_THREADS + ptx.thread_x())
        if at < f.teams:
            counters[at] = real(0.0)

    return clear, (ptx.pointer("f32"), ptx.record(_Counters, 32))


def _added_up(v: Variant):
    """Device function (thread, slab, sums, f, t) -> (a, b) of one channel of the slab, in the first threads.

    sums: of every part, a pair for every channel. Some threads share a channel; the first of them adds what they found.
    """
    from nbdnn.kernels.cuda import bn_sums, ptx, ptx_grid

    integer, real = ptx.INTEGER[v.bits], ptx.REAL[v.compute]
    channels, at_once = v.columns * v.sums, _AT_ONCE
    shares = min(v.threads // channels, _SHARES)
    size, merge, load = shares * channels, bn_sums.merged(v.op, v.compute), ptx_grid.load_pair(v.compute)

    @ptx.inline
    def add_up(thread, slab, sums, f, t):
        counts = ptx.cuda.shared.array(size, real)
        firsts = ptx.cuda.shared.array(size, real)
        seconds = ptx.cuda.shared.array(size, real)
        n, a, b = ptx.cuda.local.array(at_once, real), ptx.cuda.local.array(at_once, real), ptx.cuda.local.array(
            at_once, real
        )  # fmt: skip
        count, first, second = real(0.0), real(0.0), real(0.0)
        channel = integer(slab * channels + thread % channels)
        if thread < size and channel < f.channels:
            part = integer(thread // channels)
            while part < f.parts:
                for k in range(at_once):
                    here = integer(part + k * shares)
                    n[k] = real(t.full) if here < f.parts - 1 else real(t.rest) if here < f.parts else real(0.0)
                    here = here if here < f.parts else part
                    a[k], b[k] = load(sums, integer(2 * (here * f.channels + channel)))
                for k in range(at_once):
                    if n[k] > real(0.0):
                        count, first, second = merge(count, first, second, n[k], a[k], b[k])
                part = integer(part + at_once * shares)
        if thread < size:
            counts[thread], firsts[thread], seconds[thread] = count, first, second
        ptx.cuda.syncthreads()
        if thread < channels:
            for share in range(1, shares):
                at = integer(thread + share * channels)
                count, first, second = merge(count, first, second, counts[at], firsts[at], seconds[at])
        return first, second

    return add_up


def _team_kernel(*specialised_on):
    from nbdnn.kernels.cuda import bn_channel, bn_sums, ptx, ptx_grid, ptx_local, ptx_tile

    v = Variant(*specialised_on)
    integer, small, u32, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, ptx.REAL[v.compute]
    lanes, sums, columns, threads = v.lanes, v.sums, v.columns, v.threads
    channels, rows_at_once, forward = columns * sums, threads // columns, v.is_forward
    add, as_pairs, joined = bn_sums.steps(v)
    of_block, add_up = bn_sums.of_block(v), _added_up(v)
    finish, scale = bn_channel.finish(v), bn_channel.scale(v)
    copy, load_shared = ptx_local.copy_to_shared(v.dtype, lanes), ptx_local.load_shared(v.dtype, lanes)
    load, store, widen = ptx_local.load(v.dtype, lanes), ptx_local.store(v.dtype, lanes), ptx.WIDEN[v.param_dtype]
    wait, widen_data = ptx_tile.copy_async_wait(0), ptx.WIDEN[v.dtype]
    vector_bytes = lanes * ITEMSIZE[v.dtype]
    slot_bytes = threads * vector_bytes
    coefficients_size = 4 * channels

    @ptx.inline
    def moved(at, place, f):
        """The next row of a thread: its index and its place in its image."""
        place = integer(place + f.step_rows)
        at = integer(at + f.step_elems)
        if place >= f.of_image:
            place, at = integer(place - f.of_image), integer(at + f.wrap_elems)
        return at, place

    @ptx.inline
    def copy_one(slot, of_dy, x, dy, at):
        copy(slot, x, at)
        if not forward:
            copy(u32(slot + of_dy), dy, at)

    @ptx.inline
    def start_gradient(origin, mean, column):
        for i in range(sums):
            origin[i] = widen(mean[integer(column * sums + i)])
        for i in range(sums, lanes):
            origin[i] = origin[0]

    @ptx.inline
    def wait_for(counters, team, expected):
        if ptx.thread_x() == 0:
            while ptx_grid.arrived(counters, team) < expected:
                pass
        ptx.cuda.syncthreads()

    @ptx.inline
    def meet(counters, team, expected):
        """All blocks of the team have come here so often."""
        ptx.cuda.syncthreads()
        if ptx.thread_x() == 0:
            ptx_grid.arrive(counters, team)
        wait_for(counters, team, expected)

    def normalise(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, counters, pairs,
        epsilon, factor, f, t
    ):  # fmt: skip
        # Where a thread is in every slab, and its copies of the first: vector k in slot k, of dy behind those of x.
        thread = small(ptx.thread_x())
        team, rank = ptx.divided(small(ptx.block_x()), small(f.parts))
        in_slab = small(thread & (columns - 1))
        row, last = integer(rank * f.chunk + thread // columns), integer(min(f.rows, integer((rank + 1) * f.chunk)))
        image, begin_place = ptx.divided(row, f.of_image)
        begin = integer(image * f.image_elems + begin_place * f.row_elems)
        mine = u32(ptx_tile.dynamic_shared() + u32(thread * vector_bytes))
        of_dy = u32(f.slots * slot_bytes)
        slab, expected = integer(team), small(f.parts)
        if ptx.block_x() >= t.sms and f.parts > 1:
            before, _ = ptx.divided(small(ptx.block_x() - t.sms), small(f.parts))
            wait_for(counters, before, 1)
        column = integer(slab * columns + in_slab)
        end = last if column < f.columns else integer(0)
        at, place, slot, r = integer(column * f.column_elems + begin), begin_place, mine, row
        while r < end:
            copy_one(slot, of_dy, x, dy, at)
            at, place = moved(at, place, f)
            slot, r = u32(slot + u32(slot_bytes)), integer(r + rows_at_once)
        a, b, origin, pivot = (
            ptx.cuda.local.array(lanes, real),
            ptx.cuda.local.array(lanes, real),
            ptx.cuda.local.array(lanes, real),
            ptx.cuda.local.array(lanes, real),
        )
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        coefficients = ptx.cuda.shared.array(coefficients_size, real)

        while slab < f.slabs:
            # 1. A thread's sums.
            held = column if end > 0 else integer(0)
            for i in range(lanes):
                a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
            load(pivot, 0, x, integer(held * f.column_elems))
            ptx_tile.copy_async_commit()
            wait()
            slot, r, count = mine, row, real(0.0)
            if forward:
                if r < end:
                    load_shared(origin, 0, slot)
            else:
                start_gradient(origin, mean, held)
            while r < end:
                load_shared(values, 0, slot)
                if not forward:
                    load_shared(gradients, 0, u32(slot + of_dy))
                add(a, b, origin, values, gradients, 0)
                slot, r, count = u32(slot + u32(slot_bytes)), integer(r + rows_at_once), count + real(1.0)
            if lanes > sums:
                for i in range(lanes):
                    pivot[i] = pivot[0]
            as_pairs(count, a, b, origin, pivot)
            count = joined(count, a, b)

            # 2., 3. The channels' sums, and what becomes of them.
            _, of_first, of_second = of_block(thread, count, a, b)
            channel = integer(slab * channels + thread)
            if f.parts > 1:
                if thread < channels and channel < f.channels:
                    pair = integer(2 * (rank * f.channels + channel))
                    pairs[pair], pairs[integer(pair + 1)] = of_first, of_second
                meet(counters, team, expected)
                expected = small(expected + f.parts)
                of_first, of_second = add_up(thread, slab, pairs, f, t)
            if thread < channels and channel < f.channels:
                params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
                origin_of_channel = real(0.0)
                if forward:
                    origin_of_channel = widen_data(x[integer(channel * f.channel_elems)])
                found = finish(
                    params, channel, origin_of_channel, real(f.m), of_first, of_second, epsilon, factor, rank == 0
                )
                for i in range(4):
                    coefficients[integer(i * channels + thread)] = found[i]
            ptx.cuda.syncthreads()

            # 4. Scaled and stored, and the next slab's copies.
            for i in range(sums):
                at_lane = integer(in_slab * sums + i)
                origin[i], pivot[i] = coefficients[at_lane], coefficients[integer(at_lane + channels)]
                a[i] = coefficients[integer(at_lane + 2 * channels)]
                b[i] = coefficients[integer(at_lane + 3 * channels)]
            slab = integer(slab + t.teams)
            at, place, slot, r = integer(column * f.column_elems + begin), begin_place, mine, row
            column = integer(slab * columns + in_slab)
            apart, next_end = integer(t.teams * columns * f.column_elems), last if column < f.columns else integer(0)
            while r < end:
                load_shared(values, 0, slot)
                if not forward:
                    load_shared(gradients, 0, u32(slot + of_dy))
                scale(origin, pivot, a, b, values, gradients, 0)
                store(out, at, values, 0)
                if next_end > 0:
                    copy_one(slot, of_dy, x, dy, integer(at + apart))
                at, place = moved(at, place, f)
                slot, r = u32(slot + u32(slot_bytes)), integer(r + rows_at_once)
            end = next_end

    data, param, reals = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype), ptx.pointer(v.compute)
    fields = ptx.record(Walk, v.bits), ptx.record(_Turns, v.bits)
    return normalise, (data, data, data, *[param] * 10, ptx.pointer("f32"), reals, real, real, *fields)


class InTeams(LaunchedCandidate[Teams]):
    """Training and its gradient, where the shared memory of the whole GPU holds a slab."""

    algorithm = "teams"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        if device.capability < (8, 0):
            return Support(False, f"compute capability {device.capability}: no asynchronous copies before 8.0")
        if not problem.m or _every(problem, device):
            return YES if problem.m else Support(False, "0 elements a channel")
        return Support(False, f"{problem.m} elements a channel: more than the shared memory of the GPU holds")

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Teams, ...]:
        every = _every(problem, device)
        return tuple(sorted(every, key=lambda config: self.estimate(problem, config, device))[:_MOST_CONFIGS])

    def estimate(self, problem: BnProblem, config: Teams, device: Gpu) -> float:
        v = _variant(problem, config)
        walk, teams = _walk(problem, v, config), _teams(problem, config, device)
        turns = ceil(walk.slabs / teams)
        # What is left idle in the last turn, and by blocks that are there for rows that are not.
        used = walk.slabs * walk.rows / (turns * walk.chunk * device.sms * config.resident)
        rate = copy_bytes_per_s(device) * _SHARE_OF_COPY
        if not v.planar:
            rate *= _SHARE_OF_WIDTH.get(config.columns * problem.vector_bytes, 1.0)
        alone = 1 + _ALONE / min(teams, config.resident)
        return _LAUNCH_US + turns * _SLAB_US + alone * problem.min_bytes / (rate * used) * 1e6

    def workspace_bytes(self, problem: BnProblem, config: Teams, device: Gpu) -> int:
        walk = _walk(problem, _variant(problem, config), config)
        return _counters_bytes(device) + 2 * walk.parts * walk.channels * ITEMSIZE[problem.compute]

    def launches(self, problem: BnProblem, config: Teams, device: Gpu) -> list[Launch]:
        v = _variant(problem, config)
        walk, teams = _walk(problem, v, config), _teams(problem, config, device)
        of_vector = v.lanes if v.planar else 1
        rest = walk.rows - (walk.parts - 1) * walk.chunk
        turns = _Turns(teams, device.sms, walk.chunk * of_vector, rest * of_vector)
        main = Launch(
            source=Source(_team_kernel, v, v.threads, config.resident),
            grid=(teams * walk.parts, 1, 1),
            pointers=(*plan.pointers(problem), WORKSPACE, in_workspace(_counters_bytes(device))),
            scalars=v.compute,
            integers=(*walk, *turns),
            integer_bits=v.bits,
            dynamic_shared_bytes=_held_bytes(problem, v, walk),
            cooperative=walk.parts > 1,
        )
        if walk.parts == 1:
            return [main]
        clear_blocks = ceil(teams / _CLEAR_THREADS)
        clear = Launch(
            Source(_clear_kernel, (), _CLEAR_THREADS), (clear_blocks, 1, 1), (WORKSPACE,), "", _Counters(teams)
        )
        return [clear, main]


def _every(problem: BnProblem, device: Gpu) -> list[Teams]:
    """For each width and number of blocks on a multiprocessor the smallest team, and the one that is done first."""
    found: dict[Teams, None] = {}
    for columns in plan.widths(problem):
        for resident in _RESIDENT_BLOCKS:
            fitting = [
                config
                for team in range(1, device.sms * resident + 1)
                if _fits(problem, config := Teams(columns, team, resident), device)
            ]
            if fitting:
                soonest = min(fitting, key=lambda config: _rows_in_turn(problem, config, device))
                found |= {fitting[0]: None, soonest: None}
    return list(found)


def _rows_in_turn(problem: BnProblem, config: Teams, device: Gpu) -> int:
    """Rows of all slabs that a block takes, one after the other."""
    walk = _walk(problem, _variant(problem, config), config)
    return ceil(walk.slabs / _teams(problem, config, device)) * walk.chunk


def _fits(problem: BnProblem, config: Teams, device: Gpu) -> bool:
    v = _variant(problem, config)
    walk = _walk(problem, v, config)
    size = ITEMSIZE[v.compute]
    channels = v.columns * v.sums
    sums = (3 * (v.threads // 32) + 4 + 3 * min(v.threads // channels, _SHARES)) * channels * size
    there = (shared_bytes(device) + _SYSTEM_BYTES) // config.resident - _SYSTEM_BYTES
    return _held_bytes(problem, v, walk) + sums <= there


def _variant(problem: BnProblem, config: Teams) -> Variant:
    of_one = plan.variant(problem, config.columns, 1)
    if of_one.compute == "f64":
        resident = _RESIDENT_THREADS_F64
    else:
        resident = _RESIDENT_THREADS_WIDE if problem.op == "bn_bwd" and of_one.sums == 8 else _RESIDENT_THREADS
    threads = 1 << (resident // config.resident).bit_length() - 1
    return plan.variant(problem, config.columns, threads)


def _walk(problem: BnProblem, v: Variant, config: Teams) -> Walk:
    return plan.walk(problem, v, ceil(plan.rows_of(problem, v) / config.team))


def _teams(problem: BnProblem, config: Teams, device: Gpu) -> int:
    """That are on the GPU at once; no more than there are slabs."""
    walk = _walk(problem, _variant(problem, config), config)
    return max(1, min(device.sms * config.resident // walk.parts, walk.slabs))


def _held_bytes(problem: BnProblem, v: Variant, walk: Walk) -> int:
    """Of a block: what its threads copy."""
    tensors = 1 if v.is_forward else 2
    return tensors * walk.slots * v.threads * v.lanes * ITEMSIZE[v.dtype]


def _counters_bytes(device: Gpu) -> int:
    """Before the sums: a counter for every team there may be, in lines of 256 bytes."""
    return -(-4 * device.sms * max(_RESIDENT_BLOCKS) // 256) * 256


TRAIN, BWD = InTeams("bn_train"), InTeams("bn_bwd")
