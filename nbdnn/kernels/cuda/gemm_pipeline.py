"""The pipeline of a tile: stages are copied to shared memory while earlier ones are multiplied.

    copy 0, copy 1, ...                     stages - 1 of them
    wait for 0,  copy stages-1,  multiply 0
    wait for 1,  copy stages,    multiply 1     into the place of stage 0, which every warp has left

A group of copies is committed at each turn, also where nothing is left to copy, so that the wait counts the same
throughout. Source: own; the scheme is CUTLASS's multistage one.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.gemm_tile import Side, Tile


def tile_product(tile: Tile, a: Side, b: Side, copy_stage, planar: bool = False):
    """Device function (shared, thread, count, state, given) that leaves the sums of `count` stages in shared memory.

    copy_stage: device function (address of a stage, state, given) -> the next state, which starts this thread's copies
    of the stage that a state stands for. planar: whether the sums are left column by column.
    """
    from nbdnn.kernels.cuda import gemm_store, gemm_tile, ptx, ptx_matrix, ptx_tile

    integer, word = ptx.INTEGER[32], ptx.WORD
    commit, wait, wait_for_all = (
        ptx_tile.copy_async_commit,
        ptx_tile.copy_async_wait(tile.stages - 2),
        ptx_tile.copy_async_wait(0),
    )
    lane_a, lane_b = gemm_tile.lane_place(a), gemm_tile.lane_place(b)
    products, to_shared = gemm_tile.stage_products(a, b), gemm_store.sums_to_shared(tile, planar)
    no_sums = ptx_matrix.zeros(tile.sums)
    stages, stage_bytes, a_bytes = tile.stages, tile.stage_bytes, tile.m * tile.k_bytes
    warps_m, warp_m, warp_n = tile.warps_m, tile.warp_m, tile.warp_n

    @ptx.inline
    def product(shared, thread, count, state, given):
        copied, done = integer(0), integer(0)
        write_at, read_at, end_at = shared, shared, word(shared + stages * stage_bytes)
        for _ in range(stages - 1):
            if copied < count:
                state = copy_stage(write_at, state, given)
            commit()
            copied, write_at = integer(copied + 1), word(write_at + stage_bytes)

        lane = integer(thread & 31)
        n_of, m_of = ptx.divided(integer(thread >> 5), integer(warps_m))
        row, column = integer(m_of * warp_m), integer(n_of * warp_n)
        from_a, from_b = lane_a(lane, row), integer(lane_b(lane, column) + a_bytes)
        sums = no_sums()
        while done < count:
            wait()
            ptx.cuda.syncthreads()
            if copied < count:
                state = copy_stage(write_at, state, given)
            commit()
            sums = products(sums, word(read_at + from_a), word(read_at + from_b))
            copied, done = integer(copied + 1), integer(done + 1)
            write_at, read_at = word(write_at + stage_bytes), word(read_at + stage_bytes)
            write_at = shared if write_at == end_at else write_at
            read_at = shared if read_at == end_at else read_at

        wait_for_all()
        ptx.cuda.syncthreads()
        to_shared(sums, shared, lane, row, column)
        ptx.cuda.syncthreads()

    return product
