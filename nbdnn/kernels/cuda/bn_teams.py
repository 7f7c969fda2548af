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

from bisect import bisect_left
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_meeting, bn_slots
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
_SYSTEM_BYTES = 1 << 10  # of the shared memory of every block
# Fitted to 276 problems on an H200. Of a slab: its barrier and sums, and those of each block of the team; and what a
# thread does with each of its vectors, however few others have as many, of 2 bytes and of more.
_LAUNCH_US, _SLAB_US, _PART_US, _SHARE_OF_COPY = 5.2, 1.3, 0.06, 0.92
_HALF_US, _SLOT_US = 0.2, 0.04
_USED = 0.3  # a power of the share of blocks that have rows in the last turn: others have the memory to themselves
# Of the copy rate, by the bytes of a row that lie side by side.
_SHARE_OF_WIDTH = {128: 0.78, 64: 0.74, 32: 0.55, 16: 0.4, 8: 0.25, 4: 0.15, 2: 0.1}
_PARTS_AT_ONCE = 5  # of a thread, whose registers more would not fit
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


def _team_kernel(*specialised_on):
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx, ptx_local, ptx_tile

    v = Variant(*specialised_on)
    integer, small, u32, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, ptx.REAL[v.compute]
    lanes, columns, threads = v.lanes, v.columns, v.threads
    channels, rows_at_once, moved = columns * v.sums, threads // columns, plan.next_row(v.bits)
    copy, copy_all = bn_slots.copied(v), bn_slots.copied_all(v)
    load_slot, (begin_sums, add, end_sums) = bn_slots.loaded(v), bn_slots.summed(v)
    of_block, (wait_for, meet), tell = bn_sums.of_block(v), bn_meeting.barrier(), bn_meeting.told(v)
    scale, (asked, found, taken) = bn_channel.scale(v), bn_channel.coefficients(v)
    load, store, wait = ptx_local.load(v.dtype, lanes), ptx_local.store(v.dtype, lanes), ptx_tile.copy_async_wait(0)
    slot_bytes, vector_bytes = bn_slots.slot_bytes(v), lanes * ITEMSIZE[v.dtype]
    coefficients_size, four_arrays = 4 * channels, bn_block.four_arrays(lanes, v.compute)

    @ptx.inline
    def elements_of_part(part, f, t):
        return t.full if part < f.parts - 1 else t.rest

    of_team = bn_meeting.added_up(v, _PARTS_AT_ONCE, elements_of_part)

    def normalise(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, counters, pairs,
        epsilon, factor, f, t
    ):  # fmt: skip
        # Where a thread is in every slab, and its copies of the first: vector k in slot k, of dy behind those of x.
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
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
        copy_all(mine, of_dy, x, dy, integer(column * f.column_elems + begin), begin_place, row, end, f)
        a, b, origin, pivot = four_arrays()
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        coefficients, centers = ptx.cuda.shared.array(coefficients_size, real), ptx.cuda.shared.array(channels, real)

        while slab < f.slabs:
            # 1. A thread's sums.
            channel = integer(slab * channels + thread)
            of_channel = asked(thread, params, channel, x, f)
            held = column if end > 0 else integer(0)
            for i in range(lanes):
                a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
            load(pivot, 0, x, integer(held * f.column_elems))
            ptx_tile.copy_async_commit()
            wait()
            slot, r, count = mine, row, real(0.0)
            begin_sums(origin, mean, held, slot, r, end)
            while r < end:
                add(a, b, origin, values, gradients, slot, of_dy)
                slot, r, count = u32(slot + u32(slot_bytes)), integer(r + rows_at_once), count + real(1.0)
            count = end_sums(count, a, b, origin, pivot)

            # 2., 3. The channels' sums, and what becomes of them.
            _, of_first, of_second = of_block(thread, count, a, b)
            if f.parts > 1:
                tell(centers, pairs, thread, rank, channel, of_first, of_second, f)
                meet(counters, team, expected)
                expected = small(expected + f.parts)
                of_first, of_second = of_team(centers, pairs, thread, slab, f, t)
            found(coefficients, thread, params, of_channel, channel, of_first, of_second, epsilon, factor, rank, f)

            # 4. Scaled and stored, and the next slab's copies.
            taken(coefficients, in_slab, origin, pivot, a, b)
            slab = integer(slab + t.teams)
            at, place, slot, r = integer(column * f.column_elems + begin), begin_place, mine, row
            column = integer(slab * columns + in_slab)
            apart, next_end = integer(t.teams * columns * f.column_elems), last if column < f.columns else integer(0)
            while r < end:
                load_slot(values, gradients, slot, of_dy)
                scale(origin, pivot, a, b, values, gradients, 0)
                store(out, at, values, 0)
                if next_end > 0:
                    copy(slot, of_dy, x, dy, integer(at + apart))
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
        rate = copy_bytes_per_s(device) * _SHARE_OF_COPY * used**_USED
        if not v.planar:
            rate *= _SHARE_OF_WIDTH.get(config.columns * problem.vector_bytes, 1.0)
        waited_us = turns * (_SLAB_US + config.team * _PART_US)
        slot_us = _HALF_US if problem.vector_bytes == 2 else _SLOT_US
        return _LAUNCH_US + waited_us + max(problem.min_bytes / rate * 1e6, turns * walk.slots * slot_us)

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
            dynamic_shared_bytes=bn_slots.held_bytes(v, walk.slots),
            cooperative=walk.parts > 1,
        )
        if walk.parts == 1:
            return [main]
        return [bn_meeting.clear(teams), main]


@lru_cache(maxsize=256)
def _every(problem: BnProblem, device: Gpu) -> tuple[Teams, ...]:
    """For each width and number of blocks on a multiprocessor the smallest team, and the one that is done first."""
    found: dict[Teams, None] = {}
    for columns in plan.widths(problem):
        for resident in _RESIDENT_BLOCKS:
            teams = [Teams(columns, team, resident) for team in range(1, device.sms * resident + 1)]
            # A block of a larger team holds less.
            smallest = bisect_left(teams, True, key=lambda config: _fits(problem, config, device))
            v = _variant(problem, teams[0])
            rows, slabs = plan.rows_of(problem, v), _walk(problem, v, teams[0]).slabs
            if fitting := [config for config in teams[smallest:] if _is_even(rows, config.team)]:
                in_turn = [_rows_in_turn(rows, slabs, config.team, len(teams)) for config in fitting]
                found |= {fitting[0]: None, fitting[in_turn.index(min(in_turn))]: None}
    return tuple(found)


def _is_even(rows: int, team: int) -> bool:
    """Whether the last part has half as many rows as the others, and more: for the sums (`bn_meeting.added_up`)."""
    chunk = ceil(rows / team)
    return 2 * (rows - (ceil(rows / chunk) - 1) * chunk) >= chunk


def _rows_in_turn(rows: int, slabs: int, team: int, blocks: int) -> int:
    """Rows of all slabs that a block takes, one after the other."""
    chunk = ceil(rows / team)
    return ceil(slabs / max(1, min(blocks // ceil(rows / chunk), slabs))) * chunk


def _fits(problem: BnProblem, config: Teams, device: Gpu) -> bool:
    """Whether shared memory holds what a block keeps, and each of its channels has a thread that finishes it."""
    v = _variant(problem, config)
    walk = _walk(problem, v, config)
    size = ITEMSIZE[v.compute]
    channels = v.columns * v.sums
    if channels > v.threads:
        return False
    sums = (3 * (v.threads // 32) + 5 + 2 * bn_meeting.shares(v)) * channels * size
    there = (shared_bytes(device) + _SYSTEM_BYTES) // config.resident - _SYSTEM_BYTES
    return bn_slots.held_bytes(v, walk.slots) + bn_slots.padded(sums) <= there


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


def _counters_bytes(device: Gpu) -> int:
    """Of every team there may be."""
    return bn_meeting.counters_bytes(device.sms * max(_RESIDENT_BLOCKS))


TRAIN, BWD = InTeams("bn_train"), InTeams("bn_bwd")
