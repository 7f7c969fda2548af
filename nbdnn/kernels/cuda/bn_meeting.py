"""How the blocks of a team agree on a channel's sums, through the workspace, in batch normalisation.

    counters   one for every team: how often its blocks have come to a barrier; a kernel before sets them to 0
    pairs      every block's sums of every channel, which each block of the team adds up in one order

Blocks wait for each other, so all of a team have to be on the GPU at once. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.bn_plan import Variant
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.zeros import zeros

_CLEAR_THREADS = 128
_SHARES, _AT_ONCE = 16, 6  # threads, at most, that add up one channel's parts, and parts that they load at once


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


def shares(v: Variant) -> int:
    """Threads that add up a channel's parts."""
    return min(v.threads // (v.columns * v.sums), _SHARES)


@cache
def added_up(v: Variant):
    """Device function (thread, slab, sums, f, t) -> (a, b) of one channel of the slab, in the first threads.

    sums: of every part, a pair for every channel. t.full, t.rest: elements of a channel in each part, and in the last.
    Some threads share a channel; the first of them adds what they found.
    """
    from nbdnn.kernels.cuda import bn_sums, ptx, ptx_grid

    integer, real = ptx.INTEGER[v.bits], ptx.REAL[v.compute]
    channels, at_once, sharing = v.columns * v.sums, _AT_ONCE, shares(v)
    size, merge, load = sharing * channels, bn_sums.merged(v.op, v.compute), ptx_grid.load_pair(v.compute)

    @ptx.inline
    def add_up(thread, slab, sums, f, t):
        counts = ptx.cuda.shared.array(size, real)
        firsts = ptx.cuda.shared.array(size, real)
        seconds = ptx.cuda.shared.array(size, real)
        n, a, b = ptx.cuda.local.array(at_once, real), ptx.cuda.local.array(at_once, real), ptx.cuda.local.array(
            at_once, real
        )  # fmt: skip
        count, first, second = real(0.0), real(0.0), real(0.0)
        channel = integer(slab * channels + thread % channels)
        if thread < size and channel < f.channels:
            part = integer(thread // channels)
            while part < f.parts:
                for k in range(at_once):
                    here = integer(part + k * sharing)
                    n[k] = real(t.full) if here < f.parts - 1 else real(t.rest) if here < f.parts else real(0.0)
                    here = here if here < f.parts else part
                    a[k], b[k] = load(sums, integer(2 * (here * f.channels + channel)))
                for k in range(at_once):
                    if n[k] > real(0.0):
                        count, first, second = merge(count, first, second, n[k], a[k], b[k])
                part = integer(part + at_once * sharing)
        if thread < size:
            counts[thread], firsts[thread], seconds[thread] = count, first, second
        ptx.cuda.syncthreads()
        if thread < channels:
            for share in range(1, sharing):
                at = integer(thread + share * channels)
                count, first, second = merge(count, first, second, counts[at], firsts[at], seconds[at])
        return first, second

    return add_up
