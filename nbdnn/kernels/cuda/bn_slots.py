"""A thread's vectors of x (and dy) in shared memory, where nobody else reads them: copied there, and added up.

Vector k of a thread lies in slot k: all threads' vectors side by side, a slot after the other, those of dy behind those
of x. `bn_held.py` and `bn_teams.py` keep all of a channel so, and the slots of `bn_resident.py` are a ring.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.bn_plan import Variant, next_row
from nbdnn.problem import ITEMSIZE


def slot_bytes(v: Variant) -> int:
    return v.threads * v.lanes * ITEMSIZE[v.dtype]


def held_bytes(v: Variant, slots: int) -> int:
    """Of a block: what its threads copy."""
    return (1 if v.is_forward else 2) * slots * slot_bytes(v)


def padded(static_bytes: int) -> int:
    """What a kernel's own shared memory takes before that of the slots, which begins at a multiple of 1 KiB."""
    return -(-static_bytes // 1024) * 1024


@cache
def copied(v: Variant, once: bool = False):
    """Device function (slot, of_dy, x, dy, at) that starts the copies of a vector. of_dy: bytes from x to dy. once: as
    of `ptx_local.copy_to_shared`."""
    from nbdnn.kernels.cuda import ptx, ptx_local

    u32, forward, copy = ptx.types.uint32, v.is_forward, ptx_local.copy_to_shared(v.dtype, v.lanes, once)

    @ptx.inline
    def copy_one(slot, of_dy, x, dy, at):
        copy(slot, x, at)
        if not forward:
            copy(u32(slot + of_dy), dy, at)

    return copy_one


@cache
def copied_all(v: Variant):
    """Device function (slot, of_dy, x, dy, at, place, row, end, Walk) -> (slot, at, place, row) of the next.

    Starts the copies of all rows of a thread before the end: of 2 bytes a multiple of four, or to its last one. at,
    place: of the first, as `bn_plan.next_row` moves them. Vectors of 2 bytes have come when it returns.
    """
    from nbdnn.kernels.cuda import ptx, ptx_local

    integer, small, u32, forward = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, v.is_forward
    copy, moved, rows_at_once, step = copied(v), next_row(v.bits), v.threads // v.columns, slot_bytes(v)
    copy_halves, at_once = ptx_local.copy_halves, ptx_local.AT_ONCE

    @ptx.inline
    def by_vectors(slot, of_dy, x, dy, at, place, row, end, f):
        while row < end:
            copy(slot, of_dy, x, dy, at)
            at, place = moved(at, place, f)
            slot, row = u32(slot + u32(step)), integer(row + rows_at_once)
        return slot, at, place, row

    @ptx.inline
    def by_halves(slot, of_dy, x, dy, at, place, row, end, f):
        while row < end:
            second, place = moved(at, place, f)
            third, place = moved(second, place, f)
            fourth, place = moved(third, place, f)
            left, count = integer(end - row), small(1)
            for k in range(1, at_once):
                count = small(count + (1 if left > k * rows_at_once else 0))
            copy_halves(slot, u32(step), x, at, second, third, fourth, count)
            if not forward:
                copy_halves(u32(slot + of_dy), u32(step), dy, at, second, third, fourth, count)
            at, place = moved(fourth, place, f)
            slot, row = u32(slot + u32(at_once * step)), integer(row + at_once * rows_at_once)
        return slot, at, place, row

    return by_halves if v.lanes * ITEMSIZE[v.dtype] == 2 else by_vectors


@cache
def four_copied(v: Variant, once: bool = False):
    """Device function (slot, of_dy, x, dy, at, step, left) that starts the copies of four rows of a thread, a step
    apart, to slots that follow each other; of the first `left`, where those are fewer."""
    from nbdnn.kernels.cuda import ptx, ptx_local

    integer, small, u32, forward = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, v.is_forward
    copy, of_slot, copy_halves = copied(v, once), slot_bytes(v), ptx_local.copy_halves

    @ptx.inline
    def by_vectors(slot, of_dy, x, dy, at, step, left):
        if left > 0:
            copy(slot, of_dy, x, dy, at)
        if left > 1:
            copy(u32(slot + u32(of_slot)), of_dy, x, dy, integer(at + step))
        if left > 2:
            copy(u32(slot + u32(2 * of_slot)), of_dy, x, dy, integer(at + 2 * step))
        if left > 3:
            copy(u32(slot + u32(3 * of_slot)), of_dy, x, dy, integer(at + 3 * step))

    @ptx.inline
    def by_halves(slot, of_dy, x, dy, at, step, left):
        if left > 0:
            second, third, fourth, count = (
                integer(at + step),
                integer(at + 2 * step),
                integer(at + 3 * step),
                small(left),
            )
            copy_halves(slot, u32(of_slot), x, at, second, third, fourth, count)
            if not forward:
                copy_halves(u32(slot + of_dy), u32(of_slot), dy, at, second, third, fourth, count)

    return by_halves if v.lanes * ITEMSIZE[v.dtype] == 2 else by_vectors


@cache
def loaded(v: Variant):
    """Device function (values, gradients, slot, of_dy): a vector to local arrays."""
    from nbdnn.kernels.cuda import ptx, ptx_local

    u32, forward, load_shared = ptx.types.uint32, v.is_forward, ptx_local.load_shared(v.dtype, v.lanes)

    @ptx.inline
    def load_one(values, gradients, slot, of_dy):
        load_shared(values, 0, slot)
        if not forward:
            load_shared(gradients, 0, u32(slot + of_dy))

    return load_one


@cache
def summed(v: Variant):
    """Device functions of a thread's sums, as `bn_sums` says, on local arrays of v.lanes:

    begin (origin, mean, column, slot, row, end): what is subtracted; of training its first vector, if row < end.
    add (a, b, origin, values, gradients, slot, of_dy): a vector. end (count, a, b, origin, pivot) -> count: as pairs.
    """
    from nbdnn.kernels.cuda import bn_sums, ptx, ptx_local

    integer, widen, lanes, sums, forward = ptx.INTEGER[v.bits], ptx.WIDEN[v.param_dtype], v.lanes, v.sums, v.is_forward
    add_vector, as_pairs, joined = bn_sums.steps(v)
    load_shared, load_one = ptx_local.load_shared(v.dtype, lanes), loaded(v)

    @ptx.inline
    def begin(origin, mean, column, slot, row, end):
        if forward:
            if row < end:
                load_shared(origin, 0, slot)
        else:
            for i in range(sums):
                origin[i] = widen(mean[integer(column * sums + i)])
            for i in range(sums, lanes):
                origin[i] = origin[0]

    @ptx.inline
    def add(a, b, origin, values, gradients, slot, of_dy):
        load_one(values, gradients, slot, of_dy)
        add_vector(a, b, origin, values, gradients, 0)

    @ptx.inline
    def end(count, a, b, origin, pivot):
        if lanes > sums:
            for i in range(lanes):
                pivot[i] = pivot[0]
        as_pairs(count, a, b, origin, pivot)
        return joined(count, a, b)

    return begin, add, end
