"""What kernels share that take boxes of tiles from a ring: one warp asks for them by TMA, the others use them.

A stage of the ring has two barriers: one that its box is there, and one that all workers are done with it.
"""

from __future__ import annotations

from functools import cache

BARRIER_BYTES = 8


@cache
def set_barriers(stages: int, full_at: int, free_at: int, workers: int):
    """Device function (shared address): both barriers of every stage, by one thread, before any other meets them."""
    from nbdnn.kernels.cuda import ptx, ptx_tma

    integer, word = ptx.INTEGER[32], ptx.WORD

    @ptx.inline
    def barriers_set(shared):
        for stage in range(stages):
            ptx_tma.initialise(word(shared + full_at + stage * BARRIER_BYTES), integer(1))
            ptx_tma.initialise(word(shared + free_at + stage * BARRIER_BYTES), integer(workers))
        ptx_tma.publish_barriers()

    return barriers_set


@cache
def give_back():
    """Device function (barrier, lane), by all lanes of a warp that has read its box: one that is free may be filled."""
    from nbdnn.kernels.cuda import ptx, ptx_tma

    @ptx.inline
    def given_back(barrier, lane):
        ptx_tma.reads_before_copies()
        ptx.cuda.syncwarp()
        if lane == 0:
            ptx_tma.arrive(barrier)

    return given_back


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
