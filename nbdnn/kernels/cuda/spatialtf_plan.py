"""Which outputs lie near which pixel, as a block finds it once and keeps it in shared memory.

    bin       the outputs whose four pixels begin at one: those near a pixel are in the bins of it, of the one before
              it, and of these two a row up, which follow each other two by two
    thread    1. counts its outputs in their bins    block  2. where each bin begins    thread  3. puts them there
              4. in each bin in the order of outputs: what is added up in this order is the same every time

An output that is near no pixel of the block's rows is in no bin. Five barriers; a bin's outputs are compared with each
other, which is many comparisons only where a map sends many outputs to one place. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.spatialtf_position import Kind
from nbdnn.kernels.cuda.spatialtf_slopes import near_output

WORD_BYTES = 4
_WARP = 32


class Plan(NamedTuple):
    """rows: of pixels that a block has at most. bins: of these rows and of the one before. run: bins, and their end,
    that a thread adds up. Bytes from the beginning of shared memory, where bins are: distances and order, by bins, and
    slots, of which each output has one for each of its pixels."""

    rows: int
    bins: int
    run: int
    at_distances: int
    at_order: int
    at_slots: int


@cache
def planned(kind: Kind, threads: int, turns: int):
    """Device function (places, image, first row, shared address, f, plan), of all threads of a block, each of which has
    so many outputs in turn. Synchronise the block before the plan is read."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf, ptx_tile

    integer, real, word = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD
    load, store, store_pair = ptx_tile.LOAD_SHARED[1], ptx_tile.STORE_SHARED[1], ptx_tile.STORE_SHARED[2]
    find, add, word_of = near_output(kind), ptx_spatialtf.SHARED["add"], ptx_tile.word_of
    warps, steps = threads // _WARP, _WARP.bit_length() - 1

    @ptx.inline
    def place(start, index):
        return word(start + word(integer(index * WORD_BYTES)))

    @ptx.inline
    def count(places, image, first_row, shared, cells, before, downs, rights, f, plan):
        for turn in range(turns):  # without branches: what memory has of all turns is on its way at once
            output = integer(ptx.thread_x() + turn * threads)
            known = min(output, integer(f.outputs - 1))
            _, _, row, column, downs[turn], rights[turn] = find(places, image, known, f)
            before[turn] = integer(row - first_row + 1)
            cells[turn] = integer(before[turn] * f.in_w + column)
        for turn in range(turns):
            line, right, down = before[turn], rights[turn], downs[turn]
            is_there = ptx.thread_x() + turn * threads < f.outputs and line >= 0 and line <= plan.rows
            if is_there and right >= real(-1.0) and right < real(2.0) and down >= real(-1.0) and down < real(2.0):
                before[turn] = integer(add(place(shared, cells[turn]), word(1)))
            else:
                cells[turn] = integer(-1)

    @ptx.inline
    def add_up(shared, plan):
        """Of each bin's count, and of the 0 behind them, the sum of those before."""
        of_warps = ptx.cuda.shared.array(warps, integer)
        thread = integer(ptx.thread_x())
        warp, lane = ptx.divided(thread, integer(_WARP))
        first, total, before = integer(thread * plan.run), integer(0), integer(0)
        end = min(integer(first + plan.run), integer(plan.bins + 1))
        at = first
        while at < end:
            total = integer(total + integer(load(place(shared, at))))
            at = integer(at + 1)
        for step in range(steps):
            other = ptx.shuffle_xor(total, 1 << step)
            before = integer(before + other) if lane & 1 << step else before
            total = integer(total + other)
        if lane == 0:
            of_warps[warp] = total
        ptx.cuda.syncthreads()
        for other in range(warps - 1):
            before = integer(before + of_warps[other]) if other < warp else before
        at = first
        while at < end:
            counted = integer(load(place(shared, at)))
            store(place(shared, at), word(before))
            before, at = integer(before + counted), integer(at + 1)

    @ptx.inline
    def make(places, image, first_row, shared, f, plan):
        thread = integer(ptx.thread_x())
        cells, before = ptx.cuda.local.array(turns, integer), ptx.cuda.local.array(turns, integer)
        downs, rights = ptx.cuda.local.array(turns, real), ptx.cuda.local.array(turns, real)
        at = thread
        while at <= plan.bins:
            store(place(shared, at), word(0))
            at = integer(at + threads)
        ptx.cuda.syncthreads()
        count(places, image, first_row, shared, cells, before, downs, rights, f, plan)
        ptx.cuda.syncthreads()
        add_up(shared, plan)
        ptx.cuda.syncthreads()
        unordered = word(shared + word(plan.at_slots))
        for turn in range(turns):
            if cells[turn] >= 0:
                at = integer(integer(load(place(shared, cells[turn]))) + before[turn])
                store(place(unordered, at), word(integer(thread + turn * threads)))
        ptx.cuda.syncthreads()
        for turn in range(turns):
            if cells[turn] >= 0:
                output = integer(thread + turn * threads)
                first = integer(load(place(shared, cells[turn])))
                end = integer(load(place(shared, integer(cells[turn] + 1))))
                at, here = first, first
                while at < end:
                    here = integer(here + 1) if integer(load(place(unordered, at))) < output else here
                    at = integer(at + 1)
                store(place(word(shared + word(plan.at_order)), here), word(output))
                distances = word_of(downs[turn]), word_of(rights[turn])
                store_pair(word(shared + word(integer(plan.at_distances + here * 2 * WORD_BYTES))), distances)

    return make
