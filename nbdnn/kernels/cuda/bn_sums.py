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
    from nbdnn.kernels.cuda import ptx, ptx_bn

    share_of = ptx_bn.share(compute)

    @ptx.inline
    def moments(n, mean, squares, n_more, mean_more, squares_more):
        share = share_of(n, n_more)
        apart = mean_more - mean
        return n + n_more, ptx.fma(apart, share, mean), squares + squares_more + apart * apart * n * share

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

    real, lanes, is_train = ptx.REAL[v.compute], v.lanes, v.op == "bn_train"
    steps_of_lanes = lanes.bit_length() - 1

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
        of_one = real(1.0) / n if n > real(0.0) else real(0.0)
        for i in range(lanes):
            mean = a[i] * of_one
            b[i] = b[i] - mean * a[i]
            a[i] = (origin[i] - pivot[i]) + mean if n > real(0.0) else real(0.0)

    @ptx.inline
    def as_they_are(n, a, b, origin, pivot):
        pass

    @ptx.inline
    def one_channel(n, a, b):
        """All lanes, of n elements each, as one; returns how many elements that are."""
        count = n
        for step in range(steps_of_lanes):
            half = lanes >> (step + 1)
            for i in range(half):
                if is_train:
                    apart = a[i + half] - a[i]
                    a[i] = ptx.fma(apart, real(0.5), a[i])
                    b[i] = ptx.fma(apart * apart, real(0.5) * count, b[i] + b[i + half])
                else:
                    a[i], b[i] = a[i] + a[i + half], b[i] + b[i + half]
            count = count + count
        return count

    @ptx.inline
    def lane_by_lane(n, a, b):
        return n

    return (
        add_squares if is_train else add_products,
        as_moments if is_train else as_they_are,
        one_channel if v.planar else lane_by_lane,
    )


@cache
def of_block(v: Variant):
    """Device function (thread, count, a, b) -> (count, a, b) of one channel of the block's, in the first threads.

    Thread i < columns * sums has channel i: lane i % sums of column i // sums. Several threads share the merging of a
    channel's warps, for which all others wait.
    """
    from nbdnn.kernels.cuda import ptx

    integer, real, merge = ptx.INTEGER[32], ptx.REAL[v.compute], merged(v.op, v.compute)
    columns, sums, warps = v.columns, v.sums, v.threads // 32
    channels = columns * sums
    exchanges = (32 // columns).bit_length() - 1
    size, sharing = warps * channels, shares(v)
    steps_of_share, turns = sharing.bit_length() - 1, warps // sharing

    @ptx.inline
    def by_one(thread, counts, firsts, seconds):
        total, first, second = real(0.0), real(0.0), real(0.0)
        if thread < channels:
            for w in range(warps):
                at = integer(w * channels + thread)
                total, first, second = merge(total, first, second, counts[at], firsts[at], seconds[at])
        return total, first, second

    @ptx.inline
    def by_several(thread, counts, firsts, seconds):
        total, first, second = real(0.0), real(0.0), real(0.0)
        channel, share = integer(thread >> steps_of_share), integer(thread & (sharing - 1))
        if channel < channels:
            for turn in range(turns):
                at = integer((turn * sharing + share) * channels + channel)
                total, first, second = merge(total, first, second, counts[at], firsts[at], seconds[at])
        for step in range(steps_of_share):
            n, a_other = ptx.shuffle_xor(total, 1 << step), ptx.shuffle_xor(first, 1 << step)
            b_other = ptx.shuffle_xor(second, 1 << step)
            total, first, second = merge(total, first, second, n, a_other, b_other)
        if channels > 1:
            # To the first threads, over what one of them has read.
            if channel < channels and share == 0:
                counts[channel], firsts[channel], seconds[channel] = total, first, second
            ptx.cuda.syncthreads()
            if thread < channels:
                total, first, second = counts[thread], firsts[thread], seconds[thread]
        return total, first, second

    of_warps = by_several if sharing > 1 else by_one

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
        return of_warps(thread, counts, firsts, seconds)

    return block_sums


def shares(v: Variant) -> int:
    """Threads that share the sums of a channel's warps: a power of 2. One adds as fast as several, merging takes it
    longer."""
    return max(1, min(v.threads // 32, 32, v.threads // (v.columns * v.sums))) if v.op == "bn_train" else 1


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
    steps_of_blocks = blocks.bit_length() - 1

    @ptx.inline
    def read_all(at, rank):
        n, a = read(at, rank), read(u32(at + u32(channels * size_bytes)), rank)
        return n, a, read(u32(at + u32(2 * channels * size_bytes)), rank)

    @ptx.inline
    def cluster_sums(thread, count, a, b):
        shared = ptx.cuda.shared.array(size, real)
        if thread < channels:
            shared[thread], shared[integer(thread + channels)], shared[integer(thread + 2 * channels)] = count, a, b
        ptx_cluster.arrive()
        ptx_cluster.wait()
        total, first, second = real(0.0), real(0.0), real(0.0)
        at = ptx_tile.shared_address(shared)
        if channels == 1:
            # A lane a block: all are read at once.
            if thread < 32:
                total, first, second = read_all(at, integer(thread & (blocks - 1)))
                for step in range(steps_of_blocks):
                    n, a_more = ptx.shuffle_xor(total, 1 << step), ptx.shuffle_xor(first, 1 << step)
                    b_more = ptx.shuffle_xor(second, 1 << step)
                    total, first, second = merge(total, first, second, n, a_more, b_more)
        elif thread < channels:
            for rank in range(blocks):
                n, a_more, b_more = read_all(u32(at + u32(thread * size_bytes)), integer(rank))
                total, first, second = merge(total, first, second, n, a_more, b_more)
        ptx_cluster.arrive()
        return first, second

    @ptx.inline
    def block_alone(thread, count, a, b):
        return a, b

    return cluster_sums if blocks > 1 else block_alone
