"""The pipeline of a tile on wgmma: one warp asks TMA for stages, four warps for every 64 rows multiply what has come.

    asks      wait until a place is free, copy a stage there          the first of the last 32 threads
    works     wait until a stage is whole, multiply, free its place   tile.threads, 64 rows to each warpgroup

Each place has two barriers: *whole* counts the bytes of its copies, *free* the warps that are done with it. A stage is
128-byte lines of a, then of b: straight, a line an m (or n) with 64 k; turned, a line a k with 64 m (or n), box after
box. Source: own; the scheme is CUTLASS's warp-specialised one.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.gemm_tile import Tile

WARP = 32
LINE_BYTES, LINE_ELEMS = 128, 64
BOX_BYTES = LINE_ELEMS * LINE_BYTES  # of a turned operand: 64 k of 64 m (or n)
_GROUP = 128  # threads of a warpgroup
_STEPS = LINE_ELEMS // 16
_BARRIER_BYTES = 8


def shared_bytes(tile: Tile) -> int:
    """Stages, the rows' places and the barriers behind them."""
    return tile.shared_bytes + 2 * tile.stages * _BARRIER_BYTES


def tile_product(tile: Tile, dtype: str, a_turned: bool, b_turned: bool, copy_stage, planar: bool = False):
    """Device function (shared, thread, count, state, given) that leaves the sums of `count` stages in shared memory.

    copy_stage: device function (address of a stage, its barrier, state, given) -> the next state, which starts the
    copies of the stage that a state stands for. planar: whether the sums are left column by column. Returns whether the
    thread has worked, and sees the sums. Before it all threads have met once, after `set_barriers`.
    """
    from nbdnn.kernels.cuda import gemm_store, ptx, ptx_matrix, ptx_tma, ptx_wgmma

    integer, word = ptx.INTEGER[32], ptx.WORD
    stage_bytes, a_bytes, workers = tile.stage_bytes, tile.m * LINE_BYTES, tile.threads
    barriers_at, free_bytes = tile.shared_bytes, tile.stages * _BARRIER_BYTES
    expect, arrive, wait_for = ptx_tma.expect_bytes, ptx_tma.arrive, ptx_tma.wait
    describe_a, describe_b = ptx_wgmma.descriptor(), ptx_wgmma.descriptor(BOX_BYTES if b_turned else 16)
    multiply = ptx_wgmma.multiply(dtype, tile.n, _STEPS, a_turned, b_turned)
    no_sums, meet = ptx_matrix.zeros(tile.sums), ptx_tma.MEET[workers]
    to_shared = gemm_store.sums_to_shared(tile, planar)

    @ptx.inline
    def ask(shared, count, state, given):
        first = word(shared + barriers_at)
        at, barrier, end, turn, i = shared, first, word(first + free_bytes), integer(1), integer(0)
        while i < count:
            wait_for(word(barrier + free_bytes), turn)
            expect(barrier, integer(stage_bytes))
            state = copy_stage(at, barrier, state, given)
            at, barrier, i = word(at + stage_bytes), word(barrier + _BARRIER_BYTES), integer(i + 1)
            if barrier == end:
                at, barrier, turn = shared, first, integer(turn ^ 1)

    @ptx.inline
    def work(shared, thread, count):
        first, lane = word(shared + barriers_at), integer(thread & (WARP - 1))
        group, _ = ptx.divided(thread, integer(_GROUP))
        from_a = integer(group * BOX_BYTES)
        sums = no_sums()
        at, barrier, end, turn, i = shared, first, word(first + free_bytes), integer(0), integer(0)
        while i < count:
            wait_for(barrier, turn)
            a, b = describe_a(word(at + from_a)), describe_b(word(at + a_bytes))
            ptx_wgmma.fence()
            sums = multiply(sums, a, b)
            ptx_wgmma.commit()
            ptx_wgmma.wait()
            if lane == 0:
                arrive(word(barrier + free_bytes))
            at, barrier, i = word(at + stage_bytes), word(barrier + _BARRIER_BYTES), integer(i + 1)
            if barrier == end:
                at, barrier, turn = shared, first, integer(turn ^ 1)
        meet()
        to_shared(sums, shared, lane, integer((thread >> 5) * 16), integer(0))
        meet()

    @ptx.inline
    def product(shared, thread, count, state, given):
        if thread < workers:
            work(shared, thread, count)
        elif thread == workers:
            ask(shared, count, state, given)
        return thread < workers

    return product


def set_barriers(tile: Tile):
    """Device function (shared, thread): the barriers of a tile, to be called before all threads of the block meet."""
    from nbdnn.kernels.cuda import ptx, ptx_tma

    integer, word = ptx.INTEGER[32], ptx.WORD
    barriers_at, stages, workers = tile.shared_bytes, tile.stages, tile.threads

    @ptx.inline
    def initialise(shared, thread):
        if thread == workers:
            for stage in range(stages):
                whole = integer(shared + barriers_at + stage * _BARRIER_BYTES)
                ptx_tma.initialise(word(whole), integer(1))
                ptx_tma.initialise(word(whole + stages * _BARRIER_BYTES), integer(workers // WARP))
            ptx_tma.publish_barriers()

    return initialise
