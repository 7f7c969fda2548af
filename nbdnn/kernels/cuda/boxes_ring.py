"""What kernels share that take boxes of tiles from a ring: one warp asks for them by TMA, the others use them.

A stage of the ring has two barriers: one that its box is there, and one that all workers are done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

BARRIER_BYTES = 8


class Ring(NamedTuple):
    """stages: of stage_bytes each, from the beginning of shared memory, of which copies bring copied_bytes.
    barriers_at: behind them. readers: warps that give a stage back. is_idle: whether none of their loads
    can still be on its way then: they have stored what they made of the box, or never load, since matrix units do."""

    stages: int
    stage_bytes: int
    copied_bytes: int
    barriers_at: int
    readers: int
    is_idle: bool = False


class Words(NamedTuple):
    """Device functions of a ring.

    set_barriers: (shared address), by one thread, before any other meets them. claim: (shared, stage, turn) -> where
    the stage begins, and the barrier that its copies have to name; waits until it may be filled. arrived: (shared,
    stage, turn) -> where it begins; waits until it is filled. give_back: (shared, stage, lane), by all lanes of a warp
    that has read it. following: (stage, turn) -> the next one, and its turn. Turns begin with 1 to claim, 0 to read.
    """

    set_barriers: Callable
    claim: Callable
    arrived: Callable
    give_back: Callable
    following: Callable


@cache
def words(ring: Ring) -> Words:
    from nbdnn.kernels.cuda import ptx, ptx_tma

    integer, word = ptx.INTEGER[32], ptx.WORD
    stages, stage_bytes, copied_bytes, full_at, readers, is_idle = ring
    free_at = full_at + stages * BARRIER_BYTES

    @ptx.inline
    def set_barriers(shared):
        for stage in range(stages):
            ptx_tma.initialise(word(shared + full_at + stage * BARRIER_BYTES), integer(1))
            ptx_tma.initialise(word(shared + free_at + stage * BARRIER_BYTES), integer(readers))
        ptx_tma.publish_barriers()

    @ptx.inline
    def claim(shared, stage, turn):
        full = word(shared + full_at + stage * BARRIER_BYTES)
        ptx_tma.wait(word(shared + free_at + stage * BARRIER_BYTES), turn)
        ptx_tma.expect_bytes(full, integer(copied_bytes))
        return word(shared + stage * stage_bytes), full

    @ptx.inline
    def arrived(shared, stage, turn):
        ptx_tma.wait(word(shared + full_at + stage * BARRIER_BYTES), turn)
        return word(shared + stage * stage_bytes)

    @ptx.inline
    def give_back(shared, stage, lane):
        if not is_idle:
            ptx_tma.reads_before_copies()
        ptx.cuda.syncwarp()
        if lane == 0:
            ptx_tma.arrive(word(shared + free_at + stage * BARRIER_BYTES))

    @ptx.inline
    def following(stage, turn):
        stage = integer(stage + 1)
        if stage == stages:
            stage, turn = integer(0), integer(turn ^ 1)
        return stage, turn

    return Words(set_barriers, claim, arrived, give_back, following)


@cache
def place_of(images: int, rows: int, columns: int):
    """Device function (number, f) -> first image, row and column of the outputs of a tile of that extent."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def place(number, f):
        rest, column = ptx.split(number, f.tiles_w, f.tiles_w_by, f.tiles_w_shift)
        n, row = ptx.split(rest, f.tiles_h, f.tiles_h_by, f.tiles_h_shift)
        return integer(n * images), integer(row * rows), integer(column * columns)

    return place
