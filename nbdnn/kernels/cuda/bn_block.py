"""What a thread does for a block of rows of batch normalisation: where its rows are, loads, coefficients, scaling.

As compiled-in functions, mostly of the kernels in `bn_streamed.py`, `bn_short.py` and `bn_resident.py`. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda import bn_channel
from nbdnn.kernels.cuda.bn_plan import Variant


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
def load_one(v: Variant, reads_x: bool):
    """Device function (values, gradients, where, x, dy, at): a vector of x, if it is read, and of dy to arrays."""
    from nbdnn.kernels.cuda import ptx, ptx_local

    load, reads_dy = ptx_local.load(v.dtype, v.lanes), not v.is_forward

    @ptx.inline
    def load_one(values, gradients, where, x, dy, at):
        if reads_x:
            load(values, where, x, at)
        if reads_dy:
            load(gradients, where, dy, at)

    return load_one


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
    """Device function (params, column, epsilon, factor): four local arrays."""
    from nbdnn.kernels.cuda import ptx

    integer, real, sums, finish = ptx.INTEGER[v.bits], ptx.REAL[v.compute], v.sums, bn_channel.finish(v)
    four_arrays_of_sums = four_arrays(sums, v.compute)

    @ptx.inline
    def coefficients_of(params, column, epsilon, factor):
        """Of inference, from its parameters: local arrays of v.sums."""
        center, second, scale, offset = four_arrays_of_sums()
        for i in range(sums):
            channel = integer(column * sums + i)
            center[i], second[i], scale[i], offset[i] = finish(
                params, channel, real(0.0), real(1.0), real(0.0), real(0.0), epsilon, factor, False
            )
        return center, second, scale, offset

    return coefficients_of
