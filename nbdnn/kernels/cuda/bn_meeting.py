"""How the blocks of a team agree on a channel's sums, through the workspace, in batch normalisation.

    counters   one for every team: how often its blocks have come to a barrier; a kernel before sets them to 0. A team
               of all blocks meets at a counter of the driver's (`ptx_grid.meet`)
    pairs      every block's sums of every channel, which each block of the team adds up in one order

Blocks wait for each other, so all of a team have to be on the GPU at once. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from nbdnn.kernels.cuda.bn_plan import Variant
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.zeros import zeros

_CLEAR_THREADS = 128
_SHARES = 16  # threads, at most, that add up one channel's parts


def counters_bytes(teams: int) -> int:
    """Before the sums: a counter for every team, in lines of 256 bytes."""
    return -(-4 * teams // 256) * 256


def clear(teams: int) -> Launch:
    """Sets the counters, at the workspace's beginning, to 0: to the bits of 0.0, which are the same."""
    return zeros(WORKSPACE, teams, "f32", 32, _CLEAR_THREADS)


@cache
def barrier():
    """Device functions (counters, team, expected): waits until so many blocks have come; and comes, and waits."""
    from nbdnn.kernels.cuda import ptx, ptx_grid

    @ptx.inline
    def wait_for(counters, team, expected):
        if ptx.thread_x() == 0:
            while ptx_grid.arrived(counters, team) < expected:
                pass
        ptx.cuda.syncthreads()

    @ptx.inline
    def meet(counters, team, expected):
        ptx.cuda.syncthreads()
        if ptx.thread_x() == 0:
            ptx_grid.arrive(counters, team)
        wait_for(counters, team, expected)

    return wait_for, meet


@cache
def meeting_of_all():
    """Device function (blocks): waits for all blocks of a cooperative launch."""
    from nbdnn.kernels.cuda import ptx, ptx_grid

    u32 = ptx.types.uint32

    @ptx.inline
    def meet(blocks):
        ptx.cuda.syncthreads()
        if ptx.thread_x() == 0:
            ptx_grid.meet(u32(1) if ptx.block_x() > 0 else u32(u32(1 << 31) - u32(blocks - 1)))
        ptx.cuda.syncthreads()

    return meet


def _of_thread(v: Variant) -> int:
    """Neighbouring channels of a part that a thread adds up, and loads at once."""
    return 2 if v.sums % 2 == 0 and v.compute == "f32" else 1


def shares(v: Variant) -> int:
    """Threads that add up a channel's parts."""
    return min(v.threads * _of_thread(v) // (v.columns * v.sums), _SHARES)


@cache
def told(v: Variant):
    """Device function (centers, pairs, thread, rank, channel, a, b, f): a block's sums of a channel, for the others in
    `pairs`, a pair for every channel of every part; and in shared memory what `added_up` measures their means from."""
    from nbdnn.kernels.cuda import ptx

    integer, channels, is_train = ptx.INTEGER[v.bits], v.columns * v.sums, v.op == "bn_train"

    @ptx.inline
    def tell(centers, pairs, thread, rank, channel, a, b, f):
        if thread < channels and channel < f.channels:
            pair = integer(2 * (rank * f.channels + channel))
            pairs[pair], pairs[integer(pair + 1)] = a, b
            if is_train:
                centers[thread] = a

    return tell


@cache
def added_up(v: Variant, at_once: int, elements_of_part: Callable):
    """Device function (centers, pairs, thread, slab, f, t) -> (a, b) of one channel of the slab, in the first threads.

    elements_of_part: a device function (part, f, t), of a channel. Some threads share a channel, each of which loads so
    many of its parts at once; the first adds what they found. Of training, where d_i is how far the mean of part i lies
    from that of the block's own,

        mean = own + sum n_i d_i / n        squares = sum (squares_i + n_i d_i^2) - (sum n_i d_i)^2 / n

    which are sums, without a quotient a part. The difference is no less than the sum over twice the number of parts, as
    long as none has less than half of another's elements, since the block's own is one of them: so much of what one
    large element adds is lost, at most. Blocks of a channel may differ by what float32 rounds. A part that all of them
    measured from would be read 132 times at once, for 1.5 us.
    """
    from nbdnn.kernels.cuda import ptx, ptx_grid

    integer, real, is_train = ptx.INTEGER[v.bits], ptx.REAL[v.compute], v.op == "bn_train"
    of_thread, sharing, channels = _of_thread(v), shares(v), v.columns * v.sums
    groups, size, words_at_once = channels // of_thread, sharing * channels, 2 * of_thread * at_once
    load = ptx_grid.load_words(v.compute, 2 * of_thread)

    @ptx.inline
    def add_up(centers, pairs, thread, slab, f, t):
        firsts, seconds = ptx.cuda.shared.array(size, real), ptx.cuda.shared.array(size, real)
        found = ptx.cuda.local.array(words_at_once, real)
        a, b = ptx.cuda.local.array(of_thread, real), ptx.cuda.local.array(of_thread, real)
        for i in range(of_thread):
            a[i], b[i] = real(0.0), real(0.0)
        first_channel = integer(thread % groups * of_thread)
        channel = integer(slab * channels + first_channel)
        if thread < groups * sharing and channel < f.channels:
            part = integer(thread // groups)
            while part < f.parts:
                for k in range(at_once):
                    here = integer(part + k * sharing)
                    words = load(pairs, integer(2 * ((here if here < f.parts else part) * f.channels + channel)))
                    for i in range(2 * of_thread):
                        found[2 * of_thread * k + i] = words[i]
                for k in range(at_once):
                    here = integer(part + k * sharing)
                    if here < f.parts:
                        n = real(elements_of_part(here, f, t))
                        for i in range(of_thread):
                            first, second = found[2 * (of_thread * k + i)], found[2 * (of_thread * k + i) + 1]
                            if is_train:
                                apart = first - centers[integer(first_channel + i)]
                                first = n * apart
                                second = ptx.fma(first, apart, second)
                            a[i], b[i] = a[i] + first, b[i] + second
                part = integer(part + at_once * sharing)
        if thread < groups * sharing:
            for i in range(of_thread):
                firsts[thread * of_thread + i], seconds[thread * of_thread + i] = a[i], b[i]
        ptx.cuda.syncthreads()
        total, other = real(0.0), real(0.0)
        if thread < channels:
            for share in range(sharing):
                at = integer(thread + share * channels)
                total, other = total + firsts[at], other + seconds[at]
            if is_train:
                apart = total / real(f.m)
                total, other = centers[thread] + apart, other - total * apart
        return total, other

    return add_up
