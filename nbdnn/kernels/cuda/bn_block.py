"""What a thread does for a block of rows of batch normalisation: where its rows are, loads, coefficients, scaling.

As compiled-in functions, mostly of the kernels in `bn_streamed.py`, `bn_short.py` and `bn_resident.py`. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda import bn_channel
from nbdnn.kernels.cuda.bn_plan import Variant, next_row


@cache
def four_arrays(size: int, compute: str):
    """Device function () -> four local arrays of so many elements."""
    from nbdnn.kernels.cuda import ptx

    real = ptx.REAL[compute]

    @ptx.inline
    def made():
        return (
            ptx.cuda.local.array(size, real),
            ptx.cuda.local.array(size, real),
            ptx.cuda.local.array(size, real),
            ptx.cuda.local.array(size, real),
        )

    return made


@cache
def begin_of(v: Variant):
    """Device function (part, slab, Walk) -> where a thread begins."""
    from nbdnn.kernels.cuda import ptx

    integer, small, columns = ptx.INTEGER[v.bits], ptx.INTEGER[32], v.columns

    @ptx.inline
    def begin_of(part, slab, f):
        """(column, first row, last row of the block, index and place in its image of the first row) of a thread."""
        thread = small(ptx.thread_x())
        column = integer(slab * columns + (thread & (columns - 1)))
        row, last = integer(part * f.chunk + thread // columns), integer(min(f.rows, integer((part + 1) * f.chunk)))
        if column >= f.columns:
            column, last = integer(0), integer(0)
        image, place = ptx.divided(row, f.of_image)
        return column, row, last, integer(column * f.column_elems + image * f.image_elems + place * f.row_elems), place

    return begin_of


@cache
def on_their_way(v: Variant):
    """Vectors that a thread asks for before it uses them, as their parts: (type of a part, parts of a vector) for a
    pair of local arrays `loaded`, of x and of dy, and two device functions.

    load_one (loaded, where, x, dy, at): vector number `where`. widen_one (values, gradients, loaded, where): its
    elements, to local arrays of v.lanes.
    """
    from nbdnn.kernels.cuda import ptx, ptx_local

    kind, count = ptx_local.part(v.dtype, v.lanes)
    load, widen = ptx_local.load_parts(v.dtype, v.lanes), ptx_local.widen_parts(v.dtype, v.lanes)
    reads_dy = not v.is_forward

    @ptx.inline
    def load_one(loaded, where, x, dy, at):
        x_parts, dy_parts = loaded
        load(x_parts, where * count, x, at)
        if reads_dy:
            load(dy_parts, where * count, dy, at)

    @ptx.inline
    def widen_one(values, gradients, loaded, where):
        x_parts, dy_parts = loaded
        widen(values, x_parts, where * count)
        if reads_dy:
            widen(gradients, dy_parts, where * count)

    return kind, count, load_one, widen_one


@cache
def fours(v: Variant):
    """Device functions of four vectors of a thread, one by one: a loop over them would leave them in memory on some
    architectures.

    others (at, place, f): where the second to fourth are, and the next four. load_up_to_four (loaded, where, x, dy, at,
    second, third, fourth, left): those that exist, as numbers `where` and on. left: rows to the end.
    """
    from nbdnn.kernels.cuda import ptx

    moved, rows_at_once, (_, _, load_one, _) = next_row(v.bits), v.threads // v.columns, on_their_way(v)

    @ptx.inline
    def others(at, place, f):
        second, place = moved(at, place, f)
        third, place = moved(second, place, f)
        fourth, place = moved(third, place, f)
        end, place = moved(fourth, place, f)
        return second, third, fourth, end, place

    @ptx.inline
    def load_up_to_four(loaded, where, x, dy, at, second, third, fourth, left):
        if left > 0:
            load_one(loaded, where, x, dy, at)
        if left > rows_at_once:
            load_one(loaded, where + 1, x, dy, second)
        if left > 2 * rows_at_once:
            load_one(loaded, where + 2, x, dy, third)
        if left > 3 * rows_at_once:
            load_one(loaded, where + 3, x, dy, fourth)

    return others, load_up_to_four


@cache
def scale_one(v: Variant, streams: bool = False):
    """Device function (coefficients, values, gradients, where, out, at): a vector, scaled and stored. streams: as of
    `ptx_local.store`."""
    from nbdnn.kernels.cuda import ptx, ptx_local

    scaled, store = bn_channel.scale(v), ptx_local.store(v.dtype, v.lanes, streams)

    @ptx.inline
    def scale_one(coefficients, values, gradients, where, out, at):
        c0, c1, c2, c3 = coefficients
        scaled(c0, c1, c2, c3, values, gradients, where)
        store(out, at, values, where)

    return scale_one


@cache
def coefficients_of(v: Variant):
    """Device function (params, slab, column, epsilon, factor, f): of inference, from its parameters, four local arrays
    of v.sums. All threads of a block are to come here.

    Of a gradient one thread finds those of a channel for its whole block, and shared memory passes them on:
    n4c64d16h56w56 channels-last in f16 takes 26.4 us, not 27.6 (H200). A forward is a percent or two faster where every
    thread finds those of all its channels.
    """
    from nbdnn.kernels.cuda import ptx

    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    sums, columns, channels, finish = v.sums, v.columns, v.columns * v.sums, bn_channel.finish(v)
    known = bn_channel.known(v)
    four_arrays_of_sums, table_size, (_, _, taken) = (
        four_arrays(sums, v.compute),
        4 * channels,
        bn_channel.coefficients(v),
    )

    @ptx.inline
    def of_channel(params, channel, epsilon, factor):
        of_known = known(params, channel)
        return finish(of_known, params, channel, real(0.0), real(1.0), real(0.0), real(0.0), epsilon, factor, False)

    @ptx.inline
    def own(params, slab, column, epsilon, factor, f):
        center, second, scale, offset = four_arrays_of_sums()
        for i in range(sums):
            channel = integer(column * sums + i)
            center[i], second[i], scale[i], offset[i] = of_channel(params, channel, epsilon, factor)
        return center, second, scale, offset

    @ptx.inline
    def shared(params, slab, column, epsilon, factor, f):
        table, thread = ptx.cuda.shared.array(table_size, real), small(ptx.thread_x())
        channel = integer(slab * channels + thread)
        if thread < channels and channel < f.channels:
            four = of_channel(params, channel, epsilon, factor)
            for i in range(4):
                table[integer(i * channels + thread)] = four[i]
        ptx.cuda.syncthreads()
        center, second, scale, offset = four_arrays_of_sums()
        taken(table, integer(thread & (columns - 1)), center, second, scale, offset)
        return center, second, scale, offset

    return shared if v.op == "bn_infer_bwd" and sums > 1 else own
