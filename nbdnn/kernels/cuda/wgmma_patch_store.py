"""From the sums of `wgmma_patch.py` to the output: each warpgroup its 64 filters of all slots, some slots at a time.

    out[slot's place, filter] = epilogue(sums[filter, slot])

Sums go through shared memory, slot by slot, where a thread finds four filters of a slot: a half of the warp finishes
the 64 filters of one. There is room for two chunks, so that the warpgroup meets once for each: what is written lies
where everybody has read before the last meeting. Planar outputs are stored one by one, by slots. Of an output, or a
residual, that is read, a thread asks for some runs before it finishes the first (`ahead`): one after the other cost
18 us of 35 for 32x64x56x56 with 3x3 (an H200, f16). Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.quads import QUAD
from nbdnn.kernels.cuda.wgmma_patch import GROUP, ROWS, PatchTile
from nbdnn.kernels.cuda.wgmma_pipeline import WARP
from nbdnn.problem import ITEMSIZE

_FIRST_BARRIER = 2
_MOST_WORDS = 16  # that a thread asks for beside its sums


class Chunks(NamedTuple):
    """How the sums of a warpgroup's filters become the output. slots: of a tile; chunk: of them that go through shared
    memory at once, slot_bytes apart."""

    dtype: str
    tokens: tuple[str, ...]
    planar: bool
    slots: int
    chunk: int
    slot_bytes: int

    @property
    def read(self) -> tuple[str, ...]:
        """The tokens of an epilogue that read something of the output's extents."""
        return tuple(token for token in ("beta", "res") if token in self.tokens)

    @property
    def ahead(self) -> int:
        """Runs of neighbours that are asked for before the first is waited for."""
        of_run = len(self.read) * (1 if self.planar else QUAD * ITEMSIZE[self.dtype] // 4)
        return max(1, _MOST_WORDS // of_run) if of_run else 0


@cache
def store_sums(dtype: str, tokens: tuple[str, ...], tile: PatchTile, planar: bool):
    """Device function (sums, shared, thread, warpgroup, its number in the team, f, given): a tile's, to the output.

    given: (first filter of the block, (out, bias, residual), (alpha, beta)).
    """
    from nbdnn.kernels.cuda import ptx, ptx_patch

    integer, word, slot_bytes = ptx.INTEGER[32], ptx.WORD, tile.slot_bytes
    staged_at, staged_bytes = tile.stages * tile.stage_bytes, tile.staged_bytes
    places_at, places_bytes = tile.places_at, 4 * tile.slots
    store_chunks = ptx_patch.store_chunks(Chunks(dtype, tokens, planar, tile.slots, tile.chunk, slot_bytes))

    @ptx.inline
    def store(sums, shared, thread, warpgroup, member, f, given):
        first_filter, operands, scalars = given
        thread, lane = integer(thread & (GROUP - 1)), integer(thread & (WARP - 1))
        warp, _ = ptx.divided(thread, integer(WARP))
        staged = word(shared + staged_at + warpgroup * staged_bytes)
        own = word(staged + ((lane & 3) << 1) * slot_bytes + 4 * (16 * warp + (lane >> 2)))
        places, barrier = word(shared + places_at + warpgroup * places_bytes), integer(warpgroup + _FIRST_BARRIER)
        filter, of_filter = integer(first_filter + member * ROWS), f.out_channel if planar else integer(1)
        numbers = (thread, filter, f.channels_out, of_filter)
        store_chunks(sums, (staged, own, places), barrier, numbers, operands, scalars)

    return store
