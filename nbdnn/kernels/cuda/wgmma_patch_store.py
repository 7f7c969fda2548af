"""From the sums of `wgmma_patch.py` to the output: each warpgroup its 64 filters of all slots, some slots at a time.

    out[slot's place, filter] = epilogue(sums[filter, slot])

Sums go through shared memory, slot by slot, where a thread finds four filters of a slot: a half of the warp finishes
the 64 filters of one. There is room for two chunks, so that the warpgroup meets once for each: what is written lies
where everybody has read before the last meeting. Planar outputs are stored one by one, by slots. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.quads import QUAD, bias_quad, finish_quad
from nbdnn.kernels.cuda.wgmma_patch import GROUP, ROWS, PatchTile
from nbdnn.kernels.cuda.wgmma_pipeline import WARP

_FIRST_BARRIER = 2


@cache
def store_sums(dtype: str, tokens: tuple[str, ...], tile: PatchTile, planar: bool):
    """Device function (sums, shared, thread, warpgroup, its number in the team, f, given): a tile's, to the output.

    given: (first filter of the block, (out, bias, residual), (alpha, beta)).
    """
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_tma

    integer, word = ptx.INTEGER[32], ptx.WORD
    staged_at, staged_bytes = tile.stages * tile.stage_bytes, tile.staged_bytes
    places_at, places_bytes = tile.places_at, 4 * tile.slots
    finish = (_finish_one if planar else _finish_quads)(dtype, tokens, tile)

    def one_chunk(first: int, then):
        """Device function of what follows from a slot on: that chunk, then the others."""
        size = min(tile.chunk, tile.slots - first)
        half_bytes = first // tile.chunk % 2 * tile.chunk * tile.slot_bytes
        take = ptx_matrix.part(tile.sums, first // 2, size // 2)
        store = ptx_matrix.store_floats_at(_places(size, tile.slot_bytes), 1)
        offset = 4 * first

        @ptx.inline
        def chunk(sums, staged, own, places, barrier, thread, filter, f, operands, scalars):
            store(word(own + half_bytes), take(sums))
            ptx_tma.meet_warpgroup(barrier)
            finish(word(staged + half_bytes), word(places + offset), thread, size, filter, f, operands, scalars)
            then(sums, staged, own, places, barrier, thread, filter, f, operands, scalars)

        return chunk

    @ptx.inline
    def last(sums, staged, own, places, barrier, thread, filter, f, operands, scalars):
        ptx_tma.meet_warpgroup(barrier)

    chunks = last
    for first in reversed(range(0, tile.slots, tile.chunk)):
        chunks = one_chunk(first, chunks)
    slot_bytes = tile.slot_bytes

    @ptx.inline
    def store(sums, shared, thread, warpgroup, member, f, given):
        first_filter, operands, scalars = given
        thread, lane = integer(thread & (GROUP - 1)), integer(thread & (WARP - 1))
        warp, _ = ptx.divided(thread, integer(WARP))
        staged = word(shared + staged_at + warpgroup * staged_bytes)
        own = word(staged + ((lane & 3) << 1) * slot_bytes + 4 * (16 * warp + (lane >> 2)))
        places, barrier = word(shared + places_at + warpgroup * places_bytes), integer(warpgroup + _FIRST_BARRIER)
        filter = integer(first_filter + member * ROWS)
        chunks(sums, staged, own, places, barrier, thread, filter, f, operands, scalars)

    return store


def _places(size: int, slot_bytes: int) -> tuple[tuple[int, int], ...]:
    """Of a thread's sums of so many slots, in their order: of every eight its row's pair, then those of the eighth row
    after it."""
    return tuple(
        (0, (eight + second) * slot_bytes + 4 * half)
        for eight in range(0, size, 8)
        for half in (0, 8)
        for second in (0, 1)
    )


def _finish_quads(dtype: str, tokens: tuple[str, ...], tile: PatchTile):
    """Device function (staged chunk, places, thread, size, filter, f, operands, scalars) for channels-last outputs."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word = ptx.INTEGER[32], ptx.WORD
    finish_quad_, shift_of = finish_quad(dtype, tokens), bias_quad(dtype, tokens, True)
    load_quad, load_word, float_of = ptx_tile.LOAD_SHARED[4], ptx_tile.LOAD_SHARED[1], ptx_tile.float_of
    slot_bytes, quads = tile.slot_bytes, ROWS // QUAD
    step = GROUP // quads

    @ptx.inline
    def finish(staged, places, thread, size, filter, f, operands, scalars):
        out, bias, residual = operands
        slot, quad = ptx.divided(thread, integer(quads))
        channel = integer(filter + quad * QUAD)
        alive = channel < f.channels_out
        shift = shift_of(bias, channel if alive else integer(0))
        while slot < size:
            place = integer(load_word(word(places + 4 * slot)))
            if alive and place >= 0:
                words = load_quad(word(staged + slot * slot_bytes + (quad << 4)))
                values = (float_of(words[0]), float_of(words[1]), float_of(words[2]), float_of(words[3]))
                finish_quad_(values, scalars[0], scalars[1], out, integer(place + channel), shift, residual)
            slot = integer(slot + step)

    return finish


def _finish_one(dtype: str, tokens: tuple[str, ...], tile: PatchTile):
    """The same for planar outputs."""
    from nbdnn.kernels.cuda import epilogue, ptx, ptx_tile

    integer, word = ptx.INTEGER[32], ptx.WORD
    load_word, float_of, finish_one = ptx_tile.LOAD_SHARED[1], ptx_tile.float_of, epilogue.store(dtype, tokens)
    slot_bytes, slots = tile.slot_bytes, tile.chunk
    step = GROUP // slots

    @ptx.inline
    def finish(staged, places, thread, size, filter, f, operands, scalars):
        out, bias, residual = operands
        row, slot = ptx.divided(thread, integer(slots))
        place = integer(load_word(word(places + 4 * slot))) if slot < size else integer(-1)
        if place >= 0:
            while row < ROWS:
                channel = integer(filter + row)
                if channel < f.channels_out:
                    value = float_of(load_word(word(staged + slot * slot_bytes + 4 * row)))
                    at = integer(place + channel * f.out_channel)
                    finish_one(value, scalars[0], scalars[1], out, at, bias, channel, residual)
                row = integer(row + step)

    return finish
