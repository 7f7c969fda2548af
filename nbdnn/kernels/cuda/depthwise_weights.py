"""Where the threads of a depthwise kernel find their weights: in memory, or turned by their block into shared memory.

Planar, a thread has one filter, whose taps are neighbours. Channels-last it has those of a vector of channels: all of
their taps are neighbours too, where it keeps them; where they are taken in turn, a block turns them so that a tap of
the vector is one load. Source: own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdnn.kernels.cuda.depthwise_plan import THREADS

if TYPE_CHECKING:
    from nbdnn.kernels.cuda.depthwise_tile import Variant


def weights_of(v: Variant, taps: int):
    """Device function (w, where, f) -> the weights of so many taps from there on."""
    from nbdnn.kernels.cuda import ptx, ptx_vector

    u32 = ptx.types.uint32
    shared, run = ptx_vector.load_shared_rows(v.width, taps), ptx_vector.load_run(v.dtype, taps)
    filters = ptx_vector.load_filters(v.dtype, v.lanes, taps, v.reversed_)

    @ptx.inline
    def from_shared(w, where, f):
        return shared(where, u32(4 * f.pitch))

    @ptx.inline
    def from_memory(w, where, f):
        return run(w, where, f.w_step)

    @ptx.inline
    def of_filters(w, where, f):
        return filters(w, where)

    if v.direct:
        return of_filters
    return from_shared if v.out_last else from_memory


def turned_weights(v: Variant):
    """Device function (w, first, shared, f): the weights of a block's channels, from `first` on, to shared memory,
    unless its threads load them themselves."""
    from nbdnn.kernels.cuda import ptx, ptx_vector

    integer, u32, lanes, taps, load = (
        ptx.INTEGER[v.bits],
        ptx.types.uint32,
        v.lanes,
        v.taps,
        ptx_vector.load_wanted(v.dtype),
    )

    @ptx.inline
    def read(w, i, first, plane, f):
        """Of the i-th weight of the block: whether there is one, its place in shared memory, and itself."""
        summed, t = ptx.divided(plane, f.taps_d)
        channel, tap = ptx.divided(i, integer(taps))
        inside = i < f.vectors * lanes * taps and first + channel < f.out_c
        at = integer(((first + channel) * f.group_in + summed) * f.taps + f.w_first + f.w_step * (t * taps + tap))
        return inside, u32(4 * ((plane * taps + tap) * f.pitch + channel)), load(w, at, inside)

    @ptx.inline
    def put(shared, weight):
        if weight[0]:
            ptx_vector.store_shared_floats(u32(shared + weight[1]), u32(0), weight[2])

    @ptx.inline
    def turn(w, first, shared, f):
        plane = integer(0)
        while plane < f.planes:
            i = integer(ptx.thread_x())
            while i < f.vectors * lanes * taps:
                # Four are asked for before the first is waited for.
                a, b = read(w, i, first, plane, f), read(w, integer(i + THREADS), first, plane, f)
                i = integer(i + 2 * THREADS)
                c, d = read(w, i, first, plane, f), read(w, integer(i + THREADS), first, plane, f)
                i = integer(i + 2 * THREADS)
                put(shared, a)
                put(shared, b)
                put(shared, c)
                put(shared, d)
            plane = integer(plane + 1)
        ptx.cuda.syncthreads()

    @ptx.inline
    def nothing(w, first, shared, f):
        return

    return nothing if v.direct else turn
