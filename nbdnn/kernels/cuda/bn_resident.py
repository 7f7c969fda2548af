"""Batch normalisation of neighbouring channels by blocks that stay: training and its gradient, x read once and a part.

    block   of a multiprocessor; pieces of rows, 128 channels wide. The first rows are copied to shared memory, as many
            as it has room for, while the others are added up
    grid    every block's sums to the workspace; a barrier; each block adds up those of its channels, in one order
    block   everything scaled, the last rows first, which are asked for before the barrier

What shared memory does not hold is read again, the last of it from the second-level cache, which is left to it: copies
and results pass by first (`once`, `streams`: 32x256x56x56 on an H200, float32 81.1 to 78.2 us, bfloat16 43.0 to 38.0;
either alone gains 1). A piece of 256 or 512 bytes is read at full speed; narrower ones, all of which shared memory
holds (`bn_teams.py`), take longer. One block a multiprocessor, since all wait for the slowest: with two, whose barriers
and sums were twice as many, 10 us became 23 where there is little to do. The barrier is a counter in the workspace,
which a kernel before sets to 0; the launch is cooperative. Sums in float32 (float64), as `bn_sums` says. Source: own.
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
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate, in_workspace
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_THREADS, _SLAB_CHANNELS, _MOST_COLUMNS = 512, 128, 32
_AT_ONCE = 8  # vectors of a thread that are on their way
_SYSTEM_BYTES = 1 << 10  # of the shared memory of every block
_LAUNCH_US, _SHARE_OF_COPY = 7.0, 1.0
_SHARE_OF_WIDTH = {256: 0.95, 128: 0.9, 64: 0.8, 32: 0.6, 16: 0.4, 8: 0.25, 4: 0.15, 2: 0.1}


class Resident(NamedTuple):
    """Columns of a block, and how many of its vectors a thread holds."""

    columns: int
    slots: int

    def __str__(self) -> str:
        return f"{self.columns}/{self.slots}"


class _Parts(NamedTuple):
    """held: vectors that a thread holds. full, rest: elements of a channel in each part, and in the last."""

    held: int
    full: int
    rest: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx, ptx_local, ptx_tile

    v = Variant(*specialised_on)
    integer, small, u32, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, ptx.REAL[v.compute]
    lanes, columns, op = v.lanes, v.columns, v.op
    channels, rows_at_once = columns * lanes, v.threads // columns
    load, wait, copy_all = ptx_local.load(v.dtype, lanes), ptx_tile.copy_async_wait(0), bn_slots.copied_all(v, True)
    load_slot, (_, add_slot, end_sums) = bn_slots.loaded(v), bn_slots.summed(v)
    add, _, _ = bn_sums.steps(v)
    of_block, of_team, (_, meet) = bn_sums.of_block(v), bn_meeting.added_up(v), bn_meeting.barrier()
    part, parts, load_one, widen_one = bn_block.on_their_way(v)
    scale_one = bn_block.scale_one(v, True)
    (asked, found, taken), widen = bn_channel.coefficients(v), ptx.WIDEN[v.param_dtype]
    slot_bytes, vector_bytes = bn_slots.slot_bytes(v), lanes * ITEMSIZE[v.dtype]
    size, coefficients_size = _AT_ONCE * parts, 4 * channels
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
    def add_loaded(sums, values, gradients, loaded, where, out, at):
        a, b, origin = sums
        widen_one(values, gradients, loaded, where)
        add(a, b, origin, values, gradients, 0)

    @ptx.inline
    def scale_loaded(coefficients, values, gradients, loaded, where, out, at):
        widen_one(values, gradients, loaded, where)
        scale_one(coefficients, values, gradients, 0, out, at)

    def rows_of(take):
        """Device function of so many rows of a thread, from `at` on, of which the first eight are loaded if there are
        as many. take: a vector, that is one of the two above."""

        @ptx.inline
        def take_four(what, values, gradients, loaded, where, out, at, step):
            take(what, values, gradients, loaded, where, out, at)
            take(what, values, gradients, loaded, where + 1, out, integer(at + step))
            take(what, values, gradients, loaded, where + 2, out, integer(at + 2 * step))
            take(what, values, gradients, loaded, where + 3, out, integer(at + 3 * step))

        @ptx.inline
        def take_rows(what, values, gradients, loaded, x, dy, out, at, step, rows):
            while rows >= 8:
                after = integer(at + 8 * step)
                take_four(what, values, gradients, loaded, 0, out, at, step)
                if takes_turns and rows >= 16:
                    load_four(loaded, 0, x, dy, after, step)
                take_four(what, values, gradients, loaded, 4, out, integer(at + 4 * step), step)
                if takes_turns and rows >= 16:
                    load_four(loaded, 4, x, dy, integer(after + 4 * step), step)
                if not takes_turns and rows >= 16:
                    load_eight(loaded, x, dy, after, step)
                at, rows = after, small(rows - 8)
            if rows >= 4:
                load_four(loaded, 0, x, dy, at, step)
                take_four(what, values, gradients, loaded, 0, out, at, step)
                at, rows = integer(at + 4 * step), small(rows - 4)
            second, third = integer(at + step), integer(at + 2 * step)
            if rows > 0:
                load_one(loaded, 0, x, dy, at)
            if rows > 1:
                load_one(loaded, 1, x, dy, second)
            if rows > 2:
                load_one(loaded, 2, x, dy, third)
            if rows > 0:
                take(what, values, gradients, loaded, 0, out, at)
            if rows > 1:
                take(what, values, gradients, loaded, 1, out, second)
            if rows > 2:
                take(what, values, gradients, loaded, 2, out, third)

        return take_rows

    add_rows, scale_rows = rows_of(add_loaded), rows_of(scale_loaded)

    def normalise(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, counters, pairs,
        epsilon, factor, f, t
    ):  # fmt: skip
        # Where a thread's rows are; the copies of the first of them.
        thread = small(ptx.thread_x())
        slab, rank = ptx.divided(small(ptx.block_x()), small(f.parts))
        in_slab = small(thread & (columns - 1))
        column = integer(slab * columns + in_slab)
        row, last = integer(rank * f.chunk + thread // columns), integer(min(f.rows, integer((rank + 1) * f.chunk)))
        if column >= f.columns:
            column, last = integer(0), integer(0)
        rows = small(integer(last - row + rows_at_once - 1) // rows_at_once if row < last else 0)
        held = small(min(rows, small(t.held)))
        begin = integer(column * f.column_elems + row * f.row_elems)
        mine = u32(ptx_tile.dynamic_shared() + u32(thread * vector_bytes))
        of_dy = u32(small(t.held) * slot_bytes)
        copy_all(mine, of_dy, x, dy, begin, row, row, integer(row + held * rows_at_once), f)
        ptx_tile.copy_async_commit()
        channel = integer(slab * channels + thread)
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
        of_channel = asked(thread, params, channel, x, f)

        # 1. A thread's sums, and the block's.
        a, b, origin, pivot = four_arrays()
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        for i in range(lanes):
            a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
        load(pivot, 0, x, integer(column * f.column_elems))
        if op == "bn_train":
            if rows > 0:
                load(origin, 0, x, begin)
        else:
            for i in range(lanes):
                origin[i] = widen(mean[integer(column * lanes + i)])
        others, again = integer(begin + held * f.step_elems), small(rows - held)
        if again >= 8:
            load_eight(loaded, x, dy, others, f.step_elems)
        add_rows((a, b, origin), values, gradients, loaded, x, dy, out, others, f.step_elems, again)
        wait()
        slot, left = mine, held
        while left > 0:
            add_slot(a, b, origin, values, gradients, slot, of_dy)
            slot, left = u32(slot + u32(slot_bytes)), small(left - 1)
        # The last ones, which come first, are on their way while all wait for each other.
        end, back = integer(begin + (rows - 1) * f.step_elems), integer(-f.step_elems)
        if again >= 8:
            load_eight(loaded, x, dy, end, back)
        count = end_sums(real(rows), a, b, origin, pivot)
        _, of_first, of_second = of_block(thread, count, a, b)

        # 2. The channels' sums, and what becomes of them.
        if thread < channels and channel < f.channels:
            pair = integer(2 * (rank * f.channels + channel))
            pairs[pair], pairs[integer(pair + 1)] = of_first, of_second
        meet(counters, slab, small(f.parts))
        of_first, of_second = of_team(thread, slab, pairs, f, t)
        coefficients = ptx.cuda.shared.array(coefficients_size, real)
        found(coefficients, thread, params, of_channel, channel, of_first, of_second, epsilon, factor, rank, f)
        taken(coefficients, in_slab, origin, pivot, a, b)

        # 3. Scaled and stored.
        four = (origin, pivot, a, b)
        scale_rows(four, values, gradients, loaded, x, dy, out, end, back, again)
        slot, at = mine, begin
        while held > 0:
            load_slot(values, gradients, slot, of_dy)
            scale_one(four, values, gradients, 0, out, at)
            slot, at, held = u32(slot + u32(slot_bytes)), integer(at + f.step_elems), small(held - 1)

    data, param, reals = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype), ptx.pointer(v.compute)
    fields = ptx.record(Walk, v.bits), ptx.record(_Parts, v.bits)
    return normalise, (data, data, data, *[param] * 10, ptx.pointer("f32"), reals, real, real, *fields)


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
        return _LAUNCH_US + (problem.min_bytes + max(0, inputs - kept)) / (rate * used) * 1e6

    def workspace_bytes(self, problem: BnProblem, config: Resident, device: Gpu) -> int:
        walk = _walk(problem, _variant(problem, config.columns), device)
        sums_bytes = 2 * walk.parts * walk.channels * ITEMSIZE[problem.compute]
        return bn_meeting.counters_bytes(walk.slabs) + sums_bytes

    def launches(self, problem: BnProblem, config: Resident, device: Gpu) -> list[Launch]:
        v = _variant(problem, config.columns)
        walk = _walk(problem, v, device)
        rest = walk.rows - (walk.parts - 1) * walk.chunk
        main = Launch(
            source=Source(_kernel, v, _THREADS),
            grid=(walk.slabs * walk.parts, 1, 1),
            pointers=(*plan.pointers(problem), WORKSPACE, in_workspace(bn_meeting.counters_bytes(walk.slabs))),
            scalars=v.compute,
            integers=(*walk, *_Parts(config.slots, walk.chunk, rest)),
            integer_bits=v.bits,
            dynamic_shared_bytes=bn_slots.held_bytes(v, config.slots),
            cooperative=True,
        )
        return [bn_meeting.clear(walk.slabs), main]


def _columns(problem: BnProblem) -> int:
    """Of a block: as many as there are, in powers of 2, up to a slab's."""
    lanes = problem.vector_bytes // ITEMSIZE[problem.dtype]
    there = problem.planes[1] // lanes
    return min(_MOST_COLUMNS, _SLAB_CHANNELS // lanes, 1 << (there - 1).bit_length())


def _every(problem: BnProblem, device: Gpu) -> list[Resident]:
    """All that shared memory holds, less what leaves eights of the others; and half of it."""
    columns = _columns(problem)
    v = _variant(problem, columns)
    if plan.walk(problem, v, 1).slabs > device.sms:
        return []
    needed = _walk(problem, v, device).slots
    sums_bytes = (3 * (v.threads // 32) + 3 * bn_meeting.shares(v) + 4) * columns * v.sums * ITEMSIZE[v.compute]
    most = min(needed, (shared_bytes(device) - sums_bytes) // bn_slots.held_bytes(v, 1))
    whole = most - (most - needed) % _AT_ONCE
    return [Resident(columns, slots) for slots in dict.fromkeys((whole if whole > 0 else most, most // 2))]


def _variant(problem: BnProblem, columns: int) -> Variant:
    return plan.variant(problem, columns, _THREADS)


def _walk(problem: BnProblem, v: Variant, device: Gpu) -> Walk:
    """Of blocks that are all there at once, with whole turns of their threads."""
    at_once = v.threads // v.columns
    parts = device.sms // plan.walk(problem, v, 1).slabs
    return plan.walk(problem, v, at_once * ceil(plan.rows_of(problem, v) / (at_once * parts)))


TRAIN, BWD = InResidence("bn_train"), InResidence("bn_bwd")
