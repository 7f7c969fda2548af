"""Batch normalisation of neighbouring channels by blocks that stay: training and its gradient, x read once and a part.

    block   of a multiprocessor; rows in turns with the others, so that all read the same part of memory, in pieces 128
            channels wide. All of them pass through shared memory, where the last stay, as many as it has room for
    grid    every block's sums to the workspace; a barrier; each block adds up those of its channels, in one order
    block   everything scaled, the last of what is read again first, which is asked for before the barrier

What shared memory does not hold is read again, the last of it from the second-level cache, which is left to it: copies
that stay and results pass by first (`once`, `streams`: 32x256x56x56 on an H200, float32 81.1 to 78.2 us, bfloat16 43.0
to 38.0; either alone gains 1). A piece of 256 or 512 bytes is read at full speed; narrower ones, all of which shared
memory holds (`bn_teams.py`), take longer. One block a multiprocessor, since all wait for the slowest: with two, whose
barriers and sums were twice as many, 10 us became 23 where there is little to do. Rows one after the other in each
block, instead of turns, took 1 to 6 % longer, and copies of 200 KiB on their way at once, instead of 64, up to 5.
The launch is cooperative. Sums in float32 (float64), as `bn_sums` says. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_meeting, bn_slots
from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda.bn_plan import Variant, Walk
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_THREADS, _SLAB_CHANNELS, _MOST_COLUMNS = 512, 128, 32
_PARTS_AT_ONCE = 9  # of a thread: 66 parts of 128 channels, or 132 of 64, are all asked for at once
_UNIT = 4  # rows of a thread that are copied, and added up, together
_AHEAD_BYTES = 64 << 10  # of a block that are on their way, or two units: of more the first come later
_LAUNCH_US, _SHARE_OF_COPY = 6.0, 1.0
_HALF_US = 0.2  # of vectors of 2 bytes, for each that a thread has
_SHARE_OF_WIDTH = {256: 0.95, 128: 0.9, 64: 0.8, 32: 0.6, 16: 0.4, 8: 0.25, 4: 0.15, 2: 0.1}


class Resident(NamedTuple):
    """Columns of a block, and how many of its vectors a thread holds."""

    columns: int
    slots: int

    def __str__(self) -> str:
        return f"{self.columns}/{self.slots}"


class _Turns(NamedTuple):
    """Rows of a block in turns of all, and those of all that are left."""

    whole: int
    rest: int


def _kernel(slots: int, *specialised_on):
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx, ptx_local, ptx_tile

    v = Variant(*specialised_on)
    integer, small, u32, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, ptx.REAL[v.compute]
    lanes, columns, op = v.lanes, v.columns, v.op
    channels, rows_at_once, units = columns * lanes, v.threads // columns, slots // _UNIT
    slot_bytes, vector_bytes = bn_slots.slot_bytes(v), lanes * ITEMSIZE[v.dtype]
    unit_bytes, ahead = _UNIT * slot_bytes, min(units, max(2, _AHEAD_BYTES // bn_slots.held_bytes(v, _UNIT)))
    load, load_shared = ptx_local.load(v.dtype, lanes), ptx_local.load_shared(v.dtype, lanes)
    commit, wait = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(ahead - 1)
    copy_again, copy_once = bn_slots.four_copied(v), bn_slots.four_copied(v, True)
    load_slot, (_, add_slot, end_sums) = bn_slots.loaded(v), bn_slots.summed(v)
    of_block, meet = bn_sums.of_block(v), bn_meeting.meeting_of_all()

    @ptx.inline
    def rows_of_part(part, f, t):
        return t.whole + max(integer(0), min(integer(rows_at_once), integer(t.rest - part * rows_at_once)))

    tell, of_all = bn_meeting.told(v), bn_meeting.added_up(v, _PARTS_AT_ONCE, rows_of_part)
    part, parts, load_one, widen_one = bn_block.on_their_way(v)
    scale_one = bn_block.scale_one(v, True)
    (asked, found, taken), widen = bn_channel.coefficients(v), ptx.WIDEN[v.param_dtype]
    size, coefficients_size = 2 * _UNIT * parts, 4 * channels
    of_dy, end_of_slots = slots * slot_bytes, units * unit_bytes
    # Four vectors are used while four are on their way; of 8 lanes, for which registers are few, all eight at a time.
    takes_turns = lanes < 8
    four_arrays = bn_block.four_arrays(lanes, v.compute)

    # Vectors one by one: a loop over them would leave them in memory on some architectures.

    @ptx.inline
    def load_four(loaded, where, x, dy, at, step):
        load_one(loaded, where, x, dy, at)
        load_one(loaded, where + 1, x, dy, integer(at + step))
        load_one(loaded, where + 2, x, dy, integer(at + 2 * step))
        load_one(loaded, where + 3, x, dy, integer(at + 3 * step))

    @ptx.inline
    def load_eight(loaded, x, dy, at, step):
        load_four(loaded, 0, x, dy, at, step)
        load_four(loaded, 4, x, dy, integer(at + 4 * step), step)

    @ptx.inline
    def scale_loaded(four, values, gradients, loaded, where, out, at):
        widen_one(values, gradients, loaded, where)
        scale_one(four, values, gradients, 0, out, at)

    @ptx.inline
    def scale_four(four, values, gradients, loaded, where, out, at, step):
        scale_loaded(four, values, gradients, loaded, where, out, at)
        scale_loaded(four, values, gradients, loaded, where + 1, out, integer(at + step))
        scale_loaded(four, values, gradients, loaded, where + 2, out, integer(at + 2 * step))
        scale_loaded(four, values, gradients, loaded, where + 3, out, integer(at + 3 * step))

    @ptx.inline
    def scale_rows(four, values, gradients, loaded, x, dy, out, at, step, rows):
        """Fours of rows of a thread, of which the first two are loaded if there are as many."""
        while rows >= 8:
            after = integer(at + 8 * step)
            scale_four(four, values, gradients, loaded, 0, out, at, step)
            if takes_turns and rows >= 16:
                load_four(loaded, 0, x, dy, after, step)
            scale_four(four, values, gradients, loaded, 4, out, integer(at + 4 * step), step)
            if takes_turns and rows >= 16:
                load_four(loaded, 4, x, dy, integer(after + 4 * step), step)
            if not takes_turns and rows >= 16:
                load_eight(loaded, x, dy, after, step)
            at, rows = after, small(rows - 8)
        if rows > 0:
            load_four(loaded, 0, x, dy, at, step)
            scale_four(four, values, gradients, loaded, 0, out, at, step)

    @ptx.inline
    def copy_four(to, x, dy, at, step, left, is_read_again):
        """Starts the copies of a unit, if anything is left. Nobody reads again what stays."""
        if left > 0:
            if is_read_again:
                copy_again(to, u32(of_dy), x, dy, at, step, left)
            else:
                copy_once(to, u32(of_dy), x, dy, at, step, left)
        commit()

    @ptx.inline
    def next_unit(slot, mine):
        after = u32(slot + u32(unit_bytes))
        return mine if after == u32(mine + u32(end_of_slots)) else after

    def normalise(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, pairs, epsilon, factor,
        f, t
    ):  # fmt: skip
        # Where a thread's rows are: the last of them, by fours, stay in its slots.
        thread = small(ptx.thread_x())
        slab, rank = ptx.divided(small(ptx.block_x()), small(f.parts))
        in_slab = small(thread & (columns - 1))
        column = integer(slab * columns + in_slab)
        row, last, turn = integer(rank * rows_at_once + thread // columns), f.rows, integer(rows_at_once * f.parts)
        if column >= f.columns:
            column, last = integer(0), integer(0)
        turns, _ = ptx.divided(integer(last - row + turn - 1), turn)
        rows = small(turns if row < last else 0)
        again = small(max(0, small((rows + 3) // 4 * 4 - slots)))
        begin, step = integer(column * f.column_elems + row * f.row_elems), integer(f.step_elems * f.parts)
        mine = u32(ptx_tile.dynamic_shared() + u32(thread * vector_bytes))

        # 1. A thread's sums, of rows that come to its slots, and the block's.
        to, ask, left = mine, begin, rows
        for unit in range(ahead):
            copy_four(to, x, dy, ask, step, left, 4 * unit < again)
            to, ask, left = next_unit(to, mine), integer(ask + 4 * step), small(left - 4)
        channel = integer(slab * channels + thread)
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
        of_channel = asked(thread, params, channel, x, f)
        a, b, origin, pivot = four_arrays()
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        for i in range(lanes):
            a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
        load(pivot, 0, x, integer(column * f.column_elems))
        if op == "bn_train":
            wait()
            if rows > 0:
                load_shared(origin, 0, mine)
        else:
            for i in range(lanes):
                origin[i] = widen(mean[integer(column * lanes + i)])
        slot, done = mine, small(0)
        while done < rows:
            wait()
            add_slot(a, b, origin, values, gradients, slot, u32(of_dy))
            if done + 1 < rows:
                add_slot(a, b, origin, values, gradients, u32(slot + u32(slot_bytes)), u32(of_dy))
            if done + 2 < rows:
                add_slot(a, b, origin, values, gradients, u32(slot + u32(2 * slot_bytes)), u32(of_dy))
            if done + 3 < rows:
                add_slot(a, b, origin, values, gradients, u32(slot + u32(3 * slot_bytes)), u32(of_dy))
            done = small(done + 4)
            copy_four(to, x, dy, ask, step, left, small(rows - left) < again)
            to, ask, left = next_unit(to, mine), integer(ask + 4 * step), small(left - 4)
            slot = next_unit(slot, mine)
        # The last that are read again are asked for while all wait for each other.
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        end, back = integer(begin + (again - 1) * step), integer(-step)
        if again >= 8:
            load_eight(loaded, x, dy, end, back)
        count = end_sums(real(rows), a, b, origin, pivot)
        _, of_first, of_second = of_block(thread, count, a, b)

        # 2. The channels' sums, and what becomes of them.
        centers = ptx.cuda.shared.array(channels, real)
        tell(centers, pairs, thread, rank, channel, of_first, of_second, f)
        meet(small(f.slabs * f.parts))
        of_first, of_second = of_all(centers, pairs, thread, slab, f, t)
        coefficients = ptx.cuda.shared.array(coefficients_size, real)
        found(coefficients, thread, params, of_channel, channel, of_first, of_second, epsilon, factor, rank, f)
        taken(coefficients, in_slab, origin, pivot, a, b)

        # 3. Scaled and stored: those, and then what is in the slots, of which the first is the next to be used.
        four = (origin, pivot, a, b)
        scale_rows(four, values, gradients, loaded, x, dy, out, end, back, again)
        slot, at, held = slot if again > 0 else mine, integer(begin + again * step), small(rows - again)
        while held > 0:
            load_slot(values, gradients, slot, u32(of_dy))
            scale_one(four, values, gradients, 0, out, at)
            slot, at, held = u32(slot + u32(slot_bytes)), integer(at + step), small(held - 1)
            if slot == u32(mine + u32(end_of_slots)):
                slot = mine

    data, param, reals = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype), ptx.pointer(v.compute)
    fields = ptx.record(Walk, v.bits), ptx.record(_Turns, v.bits)
    return normalise, (data, data, data, *[param] * 10, reals, real, real, *fields)


class InResidence(LaunchedCandidate[Resident]):
    """Training and its gradient, where channels are neighbours and all columns have blocks at once."""

    algorithm = "resident"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        if problem.planes[2] > 1:
            return Support(False, f"planes of {problem.planes[2]} elements: its neighbours are channels")
        if not problem.m:
            return Support(False, "0 elements a channel")
        if _every(problem, device):
            return YES
        slabs = plan.walk(problem, _variant(problem, _columns(problem)), 1).slabs
        return Support(False, f"{slabs} columns of blocks, {device.sms} are on the GPU at once")

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Resident, ...]:
        every = _every(problem, device)
        return tuple(sorted(every, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: BnProblem, config: Resident, device: Gpu) -> float:
        v = _variant(problem, config.columns)
        walk = _walk(problem, v, device)
        inputs = sum(operand.size_bytes for operand in problem.operands if operand.role == "in")
        kept = walk.slabs * walk.parts * bn_slots.held_bytes(v, config.slots) + device.l2_bytes // 3
        rate = copy_bytes_per_s(device) * _SHARE_OF_COPY
        rate *= _SHARE_OF_WIDTH.get(config.columns * problem.vector_bytes, 1.0)
        used = walk.rows * walk.slabs / (walk.chunk * device.sms)
        by_halves_us = walk.slots * _HALF_US if problem.vector_bytes == 2 else 0.0
        return _LAUNCH_US + by_halves_us + (problem.min_bytes + max(0, inputs - kept)) / (rate * used) * 1e6

    def workspace_bytes(self, problem: BnProblem, config: Resident, device: Gpu) -> int:
        walk = _walk(problem, _variant(problem, config.columns), device)
        return 2 * walk.parts * walk.channels * ITEMSIZE[problem.compute]

    def launches(self, problem: BnProblem, config: Resident, device: Gpu) -> list[Launch]:
        v = _variant(problem, config.columns)
        walk = _walk(problem, v, device)
        at_once = v.threads // v.columns
        turns, rest = divmod(walk.rows, at_once * walk.parts)
        return [
            Launch(
                source=Source(_kernel, (config.slots, *v), _THREADS),
                grid=(walk.slabs * walk.parts, 1, 1),
                pointers=(*plan.pointers(problem), WORKSPACE),
                scalars=v.compute,
                integers=(*walk, *_Turns(turns * at_once, rest)),
                integer_bits=v.bits,
                dynamic_shared_bytes=bn_slots.held_bytes(v, config.slots),
                cooperative=True,
            )
        ]


def _columns(problem: BnProblem) -> int:
    """Of a block: as many as there are, in powers of 2, up to a slab's."""
    lanes = problem.vector_bytes // ITEMSIZE[problem.dtype]
    there = problem.planes[1] // lanes
    return min(_MOST_COLUMNS, _SLAB_CHANNELS // lanes, 1 << (there - 1).bit_length())


def _every(problem: BnProblem, device: Gpu) -> list[Resident]:
    """As many vectors as shared memory holds and leave eights of the others; and as many as it holds."""
    columns = _columns(problem)
    v = _variant(problem, columns)
    if plan.walk(problem, v, 1).slabs > device.sms:
        return []
    needed = ceil(_walk(problem, v, device).slots / _UNIT) * _UNIT
    sums_bytes = (3 * (v.threads // 32) + 2 * bn_meeting.shares(v) + 5) * columns * v.sums * ITEMSIZE[v.compute]
    fit = (shared_bytes(device) - sums_bytes) // bn_slots.held_bytes(v, 1) // _UNIT * _UNIT
    most = min(needed, fit)
    if most < _UNIT:
        return []
    whole = most - (most - needed) % (2 * _UNIT)
    return [Resident(columns, slots) for slots in dict.fromkeys((whole if whole > 0 else most, most))]


def _variant(problem: BnProblem, columns: int) -> Variant:
    return plan.variant(problem, columns, _THREADS)


def _walk(problem: BnProblem, v: Variant, device: Gpu) -> Walk:
    """Of blocks that are all there at once, and take turns: as many rows as their threads, and then those behind those
    of all others. None has less than half as many as another, for the sums (`bn_meeting.added_up`)."""
    at_once, rows = v.threads // v.columns, plan.rows_of(problem, v)
    parts = min(device.sms // plan.walk(problem, v, 1).slabs, max(1, rows // at_once))
    return plan.walk(problem, v, at_once * ceil(rows / (at_once * parts)))._replace(parts=parts)


TRAIN, BWD = InResidence("bn_train"), InResidence("bn_bwd")
