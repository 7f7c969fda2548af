"""Sums of channels in a block: each thread's, those of a warp by exchanges, those of the warps in order.

Sums are a pair: for training the mean, relative to the channel's first element, and the sum of squared differences from
the mean, with their count (Chan, Golub, LeVeque 1979); for gradients sum dy and sum dy * (x - mean). A thread subtracts
its own first element, so neither a mean far from zero nor a single large element costs the others their digits.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.bn_plan import Variant


@cache
def merged(op: str, compute: str):
    """Device function (count, a, b, of more: count, a, b) -> (count, a, b) of both."""
    from nbdnn.kernels.cuda import ptx

    real = ptx.REAL[compute]

    @ptx.inline
    def moments(n, mean, squares, n_more, mean_more, squares_more):
        count = n + n_more
        share = n_more / count if count > real(0.0) else real(0.0)
        apart = mean_more - mean
        return count, ptx.fma(apart, share, mean), squares + squares_more + apart * apart * n * share

    @ptx.inline
    def sums(n, a, b, n_more, a_more, b_more):
        return n + n_more, a + a_more, b + b_more

    return moments if op == "bn_train" else sums


@cache
def steps(v: Variant):
    """Device functions (add a vector to a thread's sums; the thread's sums as pairs) on local arrays of v.lanes.

    origin: of training what a thread subtracts from x, of a gradient the mean.
    """
    from nbdnn.kernels.cuda import ptx

    real, lanes, merge = ptx.REAL[v.compute], v.lanes, merged(v.op, v.compute)

    @ptx.inline
    def add_squares(a, b, origin, x, dy, place):
        for i in range(lanes):
            d = x[place + i] - origin[i]
            a[i] = a[i] + d
            b[i] = ptx.fma(d, d, b[i])

    @ptx.inline
    def add_products(a, b, origin, x, dy, place):
        for i in range(lanes):
            a[i] = a[i] + dy[place + i]
            b[i] = ptx.fma(dy[place + i], x[place + i] - origin[i], b[i])

    @ptx.inline
    def as_moments(n, a, b, origin, pivot):
        """Relative to `pivot`, which is an element of the channel."""
        for i in range(lanes):
            mean = a[i] / n if n > real(0.0) else real(0.0)
            b[i] = b[i] - mean * a[i]
            a[i] = (origin[i] - pivot[i]) + mean if n > real(0.0) else real(0.0)

    @ptx.inline
    def as_they_are(n, a, b, origin, pivot):
        pass

    @ptx.inline
    def one_channel(n, a, b):
        """All lanes as one; returns how many elements that are."""
        count = n
        for i in range(1, lanes):
            count, a[0], b[0] = merge(count, a[0], b[0], n, a[i], b[i])
        return count

    @ptx.inline
    def lane_by_lane(n, a, b):
        return n

    is_train = v.op == "bn_train"
    return (
        add_squares if is_train else add_products,
        as_moments if is_train else as_they_are,
        one_channel if v.planar else lane_by_lane,
    )


@cache
def of_block(v: Variant):
    """Device function (thread, count, a, b) -> (count, a, b) of one channel of the block's, in the first threads.

    Thread i < columns * sums has channel i: lane i % sums of column i // sums.
    """
    from nbdnn.kernels.cuda import ptx

    integer, real, merge = ptx.INTEGER[32], ptx.REAL[v.compute], merged(v.op, v.compute)
    columns, sums, warps = v.columns, v.sums, v.threads // 32
    channels = columns * sums
    exchanges = (32 // columns).bit_length() - 1
    size = warps * channels

    @ptx.inline
    def block_sums(thread, count, a, b):
        for exchange in range(exchanges):
            n = count
            other = ptx.shuffle_xor(count, 16 >> exchange)
            for i in range(sums):
                a_other, b_other = ptx.shuffle_xor(a[i], 16 >> exchange), ptx.shuffle_xor(b[i], 16 >> exchange)
                count, a[i], b[i] = merge(n, a[i], b[i], other, a_other, b_other)
        counts = ptx.cuda.shared.array(size, real)
        firsts = ptx.cuda.shared.array(size, real)
        seconds = ptx.cuda.shared.array(size, real)
        warp, lane = thread >> 5, thread & 31
        if lane < columns:
            for i in range(sums):
                at = integer(warp * channels + lane * sums + i)
                counts[at], firsts[at], seconds[at] = count, a[i], b[i]
        ptx.cuda.syncthreads()
        total, first, second = real(0.0), real(0.0), real(0.0)
        if thread < channels:
            for w in range(warps):
                at = integer(w * channels + thread)
                total, first, second = merge(total, first, second, counts[at], firsts[at], seconds[at])
        return total, first, second

    return block_sums


@cache
def of_cluster(v: Variant):
    """Device function (thread, rank, count, a, b) -> (a, b) of the cluster's blocks, in their order: of what a thread
    has of its block's. The same in all of them. A block that ends takes its shared memory with it: wait for the cluster
    before."""
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_tile

    integer, u32, real = ptx.INTEGER[32], ptx.types.uint32, ptx.REAL[v.compute]
    merge, read = merged(v.op, v.compute), ptx_cluster.LOAD_OF_BLOCK[v.compute]
    channels, blocks = v.columns * v.sums, v.cluster
    size, size_bytes = 3 * channels, 4 if v.compute == "f32" else 8

    @ptx.inline
    def cluster_sums(thread, count, a, b):
        shared = ptx.cuda.shared.array(size, real)
        if thread < channels:
            shared[thread], shared[integer(thread + channels)], shared[integer(thread + 2 * channels)] = count, a, b
        ptx_cluster.arrive()
        ptx_cluster.wait()
        total, first, second = real(0.0), real(0.0), real(0.0)
        if thread < channels:
            at = u32(ptx_tile.shared_address(shared) + u32(thread * size_bytes))
            for rank in range(blocks):
                n = read(at, integer(rank))
                a_more = read(u32(at + u32(channels * size_bytes)), integer(rank))
                b_more = read(u32(at + u32(2 * channels * size_bytes)), integer(rank))
                total, first, second = merge(total, first, second, n, a_more, b_more)
        ptx_cluster.arrive()
        return first, second

    @ptx.inline
    def block_alone(thread, count, a, b):
        return a, b

    return cluster_sums if blocks > 1 else block_alone
