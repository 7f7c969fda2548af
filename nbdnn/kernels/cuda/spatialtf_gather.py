"""The gradients of an affine map by pixels: a thread adds up all that outputs near its pixel give and get.

    dx[n, c, pixel] = sum over outputs near it of weight * dy[n, c, output]
    dtheta's sums: ds = sum over outputs near a pixel of d weight / ds * sum over c of dy[c] * x[c, pixel], as for dt

Outputs near a pixel are found by turning the map round (spatialtf_pixels). A pixel's x is loaded once, and with its
neighbours'. Bound by instructions: 64 images of 3x224x224 in float32 take 100 us on an H200, of which the memory needs
27; 108 with all of the box of outputs near a pixel looked at, not row by row what may be near; 125 with fewer threads,
170 with dtheta's places worked out for each output, and a tree of barriers for the sums of a block; 192 with a thread
for an output and a pixel. Source: own.
"""

from __future__ import annotations

from math import prod

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.peaks import fma_flops_per_s
from nbdnn.kernels.cuda.spatialtf_direct import THREADS
from nbdnn.kernels.cuda.spatialtf_pixels import box, in_row, strides
from nbdnn.kernels.cuda.spatialtf_position import Fields, Kind, affine, pixel_place
from nbdnn.kernels.cuda.spatialtf_theta import SUMS, axis_line, store_sums
from nbdnn.problem_spatialtf import SpatialtfProblem

# Outputs along an axis that a warp visits for a pixel, by how much the image is enlarged, but for one; the part of a
# multiprocessor's instructions that is issued.
_VISITS, _LEAST_ENLARGED, _ISSUED = 1.3, 0.5, 0.73


def visits(problem: SpatialtfProblem) -> float:
    """Outputs that a warp visits for a pixel, of a map that turns somewhat and sees the image whole: a prior."""
    enlarged = (out / extent for extent, out in zip(problem.spatial, problem.out_spatial, strict=True))
    return prod(1.0 + _VISITS * max(each, _LEAST_ENLARGED) for each in enlarged)


def issued_us(problem: SpatialtfProblem, pixels: int, of_pixel: float, of_visit: float, device: Gpu) -> float:
    """What so many pixels take with the outputs near them, by instructions."""
    instructions = pixels * (of_pixel + of_visit * visits(problem))
    return 2 * instructions / (_ISSUED * fma_flops_per_s(device, problem.compute)) * 1e6


def gather_pixel(kind: Kind, at_once: int, ragged: bool = True):
    """at_once: vectors of channels. ragged: whether there may be some left over.

    Device function (x, places, dy, dx, image, row, column, vector, end, six, f): all that a pixel's channels get is
    stored, what they give to dtheta's six sums is added to these, by pixels (`by_theta`)."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    integer, real, lanes, threads = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], kind.lanes, kind.threads
    load, store = ptx_local.load(kind.dtype, lanes), ptx_local.store(kind.dtype, lanes)
    map_of, find = affine(kind.param_dtype, kind.compute, kind.bits), box(kind.compute, kind.bits)
    size, used, against = ptx_spatialtf.size, ptx_spatialtf.used, ptx_spatialtf.against
    is_near, held = ptx_spatialtf.near, at_once * lanes
    stride, meets = strides(kind.compute), in_row(kind.compute)

    @ptx.inline
    def add_up(m, of_columns, x, dy, dx, near, p, q, start, to, arrays, six, f, count):
        low_i, end_i, low_j, end_j = near
        top, pixel, sums = arrays
        for k in range(count):
            load(pixel, integer(k * lanes), x, integer(to + k * threads * f.x_v))
        for k in range(count * lanes):
            sums[k] = real(0.0)
        # Sums of what s and t of an output give, also by its column and row.
        s_all, s_by_j, s_by_i = real(0.0), real(0.0), real(0.0)
        t_all, t_by_j, t_by_i = real(0.0), real(0.0), real(0.0)
        i, row, first, end = low_i, real(low_i), real(low_j), real(integer(end_j - 1))
        while i < end_i:
            s_row, t_row = ptx.fma(row, m[2], m[0]), ptx.fma(row, m[5], m[3])
            column, last = meets(of_columns, s_row - q, t_row - p, first, end)
            at = integer(start + i * f.y_h + integer(column) * f.y_w)
            while column <= last:
                right, down = ptx.fma(column, m[1], s_row) - q, ptx.fma(column, m[4], t_row) - p
                if is_near(right, down):
                    for k in range(count):
                        load(top, integer(k * lanes), dy, integer(at + k * threads * f.y_v))
                    left, above, a = real(1.0) - size(right), real(1.0) - size(down), real(0.0)
                    weight = left * above
                    if weight > real(0.0):
                        for k in range(count * lanes):
                            sums[k] = ptx.fma(weight, top[k], sums[k])
                    for k in range(count * lanes):
                        a = ptx.fma(top[k], pixel[k], a)
                    s, t = used(against(right, above), a), used(against(down, left), a)
                    s_all, s_by_j, s_by_i = s_all + s, ptx.fma(s, column, s_by_j), ptx.fma(s, row, s_by_i)
                    t_all, t_by_j, t_by_i = t_all + t, ptx.fma(t, column, t_by_j), ptx.fma(t, row, t_by_i)
                column, at = column + real(1.0), integer(at + f.y_w)
            i, row = integer(i + 1), row + real(1.0)
        six[0], six[1], six[2] = six[0] + s_all, six[1] + s_by_j, six[2] + s_by_i
        six[3], six[4], six[5] = six[3] + t_all, six[4] + t_by_j, six[5] + t_by_i
        for k in range(count):
            store(dx, integer(to + k * threads * f.x_v), sums, integer(k * lanes))

    @ptx.inline
    def gather(x, places, dy, dx, image, row, column, vector, end, six, f):
        m = map_of(places, image, f)
        near, p, q, of_columns = find(m, row, column, f), real(row), real(column), stride(m)
        arrays = (
            ptx.cuda.local.array(held, real),
            ptx.cuda.local.array(held, real),
            ptx.cuda.local.array(held, real),
        )
        of_dy, of_dx = integer(image * f.y_n), integer(image * f.x_n + row * f.x_h + column * f.x_w)
        if at_once > 1:
            while vector + (at_once - 1) * threads < end:
                start, to = integer(of_dy + vector * f.y_v), integer(of_dx + vector * f.x_v)
                add_up(m, of_columns, x, dy, dx, near, p, q, start, to, arrays, six, f, at_once)
                vector = integer(vector + at_once * threads)
        if at_once == 1 or ragged:
            while vector < end:
                start, to = integer(of_dy + vector * f.y_v), integer(of_dx + vector * f.x_v)
                add_up(m, of_columns, x, dy, dx, near, p, q, start, to, arrays, six, f, 1)
                vector = integer(vector + threads)

    return gather


def by_theta(kind: Kind):
    """Device function (six, f): what s and t give, by rows, columns and pixels, becomes theta's sums, by places from -1
    to 1."""
    from nbdnn.kernels.cuda import ptx

    integer, real, line = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], axis_line(kind.compute, kind.bits)

    @ptx.inline
    def turn(six, f):
        (u_first, u_step), (v_first, v_step) = line(f.out_w), line(f.out_h)
        for first, extent in ((0, f.in_w), (3, f.in_h)):
            half, every = real(0.5) * real(integer(extent - 1)), six[first]
            by_column, by_row = six[first + 1], six[first + 2]
            six[first] = half * ptx.fma(u_first, every, u_step * by_column)
            six[first + 1] = half * ptx.fma(v_first, every, v_step * by_row)
            six[first + 2] = half * every

    return turn


def gather_kernel(specialised_on, at_once):
    """All of an affine map's gradients, but the last sums of dtheta."""
    from nbdnn.kernels.cuda import ptx

    kind = Kind(*specialised_on)
    integer, real = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute]
    place, of_pixel = pixel_place(kind, THREADS), gather_pixel(kind, at_once)
    of_theta, store = by_theta(kind), store_sums(kind.compute, kind.bits, THREADS)

    def gather(x, places, dy, dx, parts, f):
        image, row, column, vector, end = place(f)
        six = ptx.cuda.local.array(SUMS, real)
        for k in range(SUMS):
            six[k] = real(0.0)
        if row < f.in_h and column < f.in_w:
            of_pixel(x, places, dy, dx, image, row, column, vector, end, six, f)
            of_theta(six, f)
        groups, _ = ptx.divided(integer(f.vectors + f.group - 1), f.group)
        store(parts, integer(integer(ptx.block_x() * groups + ptx.block_y()) * SUMS), six)

    data, parameters, compute = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype), ptx.pointer(kind.compute)
    return gather, (data, parameters, data, data, compute, ptx.record(Fields, kind.bits))
