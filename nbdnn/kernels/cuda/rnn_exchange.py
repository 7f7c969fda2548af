"""What the threads of a recurrent network's step do together: neighbours the sums of each and the gates of a unit, a
block or a cluster the barrier that ends a step.

Four sums go to four threads in two exchanges: of two sums a thread keeps one and gives the other away, so that each
exchange halves what is left to add. Source: own.
"""

from __future__ import annotations

from functools import cache


@cache
def sums_of_threads(lanes: int, count: int):
    """Device function (sums, lane) -> the sum over `lanes` neighbouring threads of sums[i], in thread i of each four;
    of one sum in all. count: of them, 1, 3 or 4; the fourth of three is 0."""
    from nbdnn.kernels.cuda import ptx, ptx_rnn

    small, zero = ptx.INTEGER[32], ptx.REAL["f32"](0.0)
    select = ptx_rnn.select
    first_bit, bits, four = 2 if count > 1 else 0, lanes.bit_length() - 1, count == 4

    @ptx.inline
    def added(sums, lane):
        if count > 1:
            s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3] if four else zero
            odd, high = (lane & 1) != 0, (lane & 2) != 0
            low = select(odd, s1, s0) + ptx.shuffle_xor(select(odd, s0, s1), small(1))
            up = select(odd, s3, s2) + ptx.shuffle_xor(select(odd, s2, s3), small(1))
            total = select(high, up, low) + ptx.shuffle_xor(select(high, low, up), small(2))
        else:
            total = sums[0]
        for bit in range(first_bit, bits):
            total = total + ptx.shuffle_xor(total, small(1 << bit))
        return total

    return added


@cache
def sums_of_warp(gates: int):
    """Device function (sums, lane) -> the sum over a warp's threads of sums[8 values of so many gates], in thread
    4 * value + gate; of one gate in all four. The sums are changed."""
    from nbdnn.kernels.cuda import ptx, ptx_rnn

    small, select, of_four = ptx.INTEGER[32], ptx_rnn.select, sums_of_threads(4, gates)

    @ptx.inline
    def halved(sums, count, lane, bit):
        """Of twice as many each thread keeps half, and gives its neighbour's half away."""
        is_high = (lane & bit) != 0
        for i in range(count):
            low, high = sums[i], sums[i + count]
            given = ptx.shuffle_xor(select(is_high, low, high), small(bit))
            sums[i] = select(is_high, high, low) + given

    @ptx.inline
    def added(sums, lane):
        halved(sums, 4 * gates, lane, 16)
        halved(sums, 2 * gates, lane, 8)
        halved(sums, gates, lane, 4)
        return of_four(sums, lane)

    return added


@cache
def barrier(cluster: int):
    """Device functions: a thread arrives; it leaves when all of the cluster, or of a block alone, have arrived."""
    from nbdnn.kernels.cuda import ptx, ptx_cluster

    @ptx.inline
    def arrive():
        if cluster > 1:
            ptx_cluster.arrive()

    @ptx.inline
    def leave():
        if cluster > 1:
            ptx_cluster.wait()
        else:
            ptx.cuda.syncthreads()

    return arrive, leave


@cache
def cleared(threads: int, cluster: int, shared_bytes: int):
    """Device function (shared, thread): zeros in the shared memory of every block of the cluster, which all have."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, u32, store = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.STORE_SHARED[1]
    words, (arrive, leave) = shared_bytes // 4, barrier(cluster)

    @ptx.inline
    def clear(shared, thread):
        at = thread
        while at < words:
            store(u32(shared + u32(at * 4)), u32(0))
            at = integer(at + threads)
        arrive()
        leave()

    return clear


@cache
def gates_of_threads(mode: str):
    """Device function (sum of R h, sum of W x, state, bias of n's b, lane) -> (h, new state, what the lane keeps).

    The former two are of gate lane % 4; a lane keeps that gate's value, of a GRU lane 3 that of n's b.
    """
    from nbdnn.kernels.cuda import ptx, ptx_rnn
    from nbdnn.kernels.cuda.rnn_gates import activation, only_gate

    small, activate, alone = ptx.INTEGER[32], activation("f32"), only_gate(mode, "f32")

    @ptx.inline
    def of_lane(value, gate, other):
        return ptx.shuffle_xor(value, small(gate ^ other))

    @ptx.inline
    def lstm(b, a, state, bias, lane):
        gate = lane & 3
        own = activate(a + b, gate == 2)
        i, f, g, o = of_lane(own, gate, 0), of_lane(own, gate, 1), of_lane(own, gate, 2), of_lane(own, gate, 3)
        c = ptx.fma(f, state, i * g)
        return o * activate(c, True), c, own

    @ptx.inline
    def gru(b, a, state, bias, lane):
        gate = lane & 3
        own = ptx_rnn.select(gate == 2, b + bias, activate(a + b, False))
        r, u, q, of_n = of_lane(own, gate, 0), of_lane(own, gate, 1), of_lane(own, gate, 2), of_lane(a, gate, 2)
        n = activate(ptx.fma(r, q, of_n), True)
        h = ptx.fma(u, state - n, n)
        return h, h, ptx_rnn.select(gate == 2, n, ptx_rnn.select(gate == 3, q, own))

    @ptx.inline
    def plain(b, a, state, bias, lane):
        h = alone(a + b)
        return h, h, h

    return {"lstm": lstm, "gru": gru}.get(mode, plain)
