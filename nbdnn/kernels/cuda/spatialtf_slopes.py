"""The gradient of an output's position in the image, as a compiled-in function of what its four pixels give.

    a[k] = sum over c of dy[c] * x[c, pixel k],  ds = sum over k of d weight[k] / ds * a[k], as for dt

A pixel without a slope gives nothing, whatever its value. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.spatialtf_position import Kind, nearest, position


@cache
def near_output(kind: Kind):
    """Device function (places, image, output, f) -> (i, j, row, column, down, right): the first of an output's pixels,
    and how far from it the output lies."""
    from nbdnn.kernels.cuda import ptx

    locate, nearest_to = position(kind), nearest(kind.compute, kind.bits)

    @ptx.inline
    def find(places, image, output, f):
        i, j = ptx.split(output, f.out_w, f.by_out_w, f.shift_out_w)
        s, t = locate(places, image, i, j, f)
        (column, right), (row, down) = nearest_to(s, f.in_w), nearest_to(t, f.in_h)
        return i, j, row, column, down, right

    return find


@cache
def slopes(compute: str, bits: int):
    """Device function (a, right, down, f) -> (ds, dt), derivatives by the grid of one output. a: the four sums."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    real, integer = ptx.REAL[compute], ptx.INTEGER[bits]
    hat, slope, used = ptx_spatialtf.hat, ptx_spatialtf.slope, ptx_spatialtf.used

    @ptx.inline
    def along(a, left, next_, top, bottom):
        above = used(top * left, a[0]) + used(top * next_, a[1])
        return above + used(bottom * left, a[2]) + used(bottom * next_, a[3])

    @ptx.inline
    def derive(a, right, down, f):
        past, below = right - real(1.0), down - real(1.0)
        s = along(a, slope(right), slope(past), hat(down), hat(below))
        t = along(a, hat(right), hat(past), slope(down), slope(below))
        half_w, half_h = real(0.5) * real(integer(f.in_w - 1)), real(0.5) * real(integer(f.in_h - 1))
        return s * half_w, t * half_h

    return derive


@cache
def store_slopes(kind: Kind, block_threads: int):
    """Device function (dgrid, image, i, j, s, t, f), of all threads of a block: of an output that exists what the
    neighbours that share it found, added up in their order, becomes its dgrid."""
    from nbdnn.kernels.cuda import ptx

    integer, real, narrow = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], ptx.NARROW[kind.param_dtype]
    threads = kind.threads

    @ptx.inline
    def store(dgrid, image, i, j, s, t, f):
        lane = integer(0)
        if threads > 1:
            shared_s, shared_t = ptx.cuda.shared.array(block_threads, real), ptx.cuda.shared.array(block_threads, real)
            thread = integer(ptx.thread_x())
            shared_s[thread], shared_t[thread] = s, t
            ptx.cuda.syncthreads()
            _, lane = ptx.divided(thread, integer(threads))
            if lane == 0:
                for other in range(1, threads):
                    s = s + shared_s[integer(thread + other)]
                    t = t + shared_t[integer(thread + other)]
        if lane == 0 and i < f.out_h and j < f.out_w:
            at = integer((image * f.outputs + i * f.out_w + j) * 2)
            dgrid[at] = narrow(s)
            dgrid[integer(at + 1)] = narrow(t)

    return store
