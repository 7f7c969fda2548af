"""The gradients of an affine map by pixels: a thread adds up all that outputs near its pixel give and get.

    dx[n, c, pixel] = sum over outputs near it of weight * dy[n, c, output]
    dtheta's sums: ds = sum over outputs near a pixel of d weight / ds * sum over c of dy[c] * x[c, pixel], as for dt

Outputs near a pixel are found by turning the map round (spatialtf_pixels). A pixel's x is loaded once, and with its
neighbours'. Bound by instructions: 64 images of 3x224x224 in float32 take 125 us on an H200, of which the memory needs
27; 170 with dtheta's places worked out for each output, and a tree of barriers for the sums of a block; 192 with a
thread for an output and a pixel. Source: own.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.spatialtf_direct import THREADS
from nbdnn.kernels.cuda.spatialtf_pixels import box
from nbdnn.kernels.cuda.spatialtf_position import Fields, Kind, affine, pixel_place
from nbdnn.kernels.cuda.spatialtf_theta import SUMS, axis_line, store_sums


def _of_pixel(kind: Kind, at_once: int):
    """Device function (x, places, dy, dx, image, row, column, vector, end, six, f): all that a pixel's channels get is
    stored, what they give to dtheta's six sums is added to these."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    integer, real, lanes, threads = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], kind.lanes, kind.threads
    load, store = ptx_local.load(kind.dtype, lanes), ptx_local.store(kind.dtype, lanes)
    map_of, find = affine(kind.param_dtype, kind.compute, kind.bits), box(kind.compute, kind.bits)
    size, used, against = ptx_spatialtf.size, ptx_spatialtf.used, ptx_spatialtf.against
    is_near, held = ptx_spatialtf.near, at_once * lanes
    line = axis_line(kind.compute, kind.bits)

    @ptx.inline
    def add_up(m, x, dy, dx, near, p, q, start, to, arrays, six, f, count):
        low_i, end_i, low_j, end_j = near
        top, pixel, sums = arrays
        for k in range(count):
            load(pixel, integer(k * lanes), x, integer(to + k * threads * f.x_v))
        for k in range(count * lanes):
            sums[k] = real(0.0)
        # Of rows and columns as they follow each other here: sums, by place, of what s and t of an output give.
        s_all, s_by_j, s_by_i = real(0.0), real(0.0), real(0.0)
        t_all, t_by_j, t_by_i = real(0.0), real(0.0), real(0.0)
        i, row, of_i = low_i, real(low_i), real(0.0)
        while i < end_i:
            s_row, t_row = ptx.fma(row, m[2], m[0]), ptx.fma(row, m[5], m[3])
            j, column, of_j = low_j, real(low_j), real(0.0)
            at = integer(start + i * f.y_h + low_j * f.y_w)
            while j < end_j:
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
                    s_all, s_by_j, s_by_i = s_all + s, ptx.fma(s, of_j, s_by_j), ptx.fma(s, of_i, s_by_i)
                    t_all, t_by_j, t_by_i = t_all + t, ptx.fma(t, of_j, t_by_j), ptx.fma(t, of_i, t_by_i)
                j, column, of_j, at = integer(j + 1), column + real(1.0), of_j + real(1.0), integer(at + f.y_w)
            i, row, of_i = integer(i + 1), row + real(1.0), of_i + real(1.0)
        (u_first, u_step), (v_first, v_step) = line(f.out_w), line(f.out_h)
        u, v = ptx.fma(real(low_j), u_step, u_first), ptx.fma(real(low_i), v_step, v_first)
        six[0], six[1] = six[0] + ptx.fma(u, s_all, u_step * s_by_j), six[1] + ptx.fma(v, s_all, v_step * s_by_i)
        six[3], six[4] = six[3] + ptx.fma(u, t_all, u_step * t_by_j), six[4] + ptx.fma(v, t_all, v_step * t_by_i)
        six[2], six[5] = six[2] + s_all, six[5] + t_all
        for k in range(count):
            store(dx, integer(to + k * threads * f.x_v), sums, integer(k * lanes))

    @ptx.inline
    def gather(x, places, dy, dx, image, row, column, vector, end, six, f):
        m = map_of(places, image, f)
        near, p, q = find(m, row, column, f), real(row), real(column)
        arrays = (
            ptx.cuda.local.array(held, real),
            ptx.cuda.local.array(held, real),
            ptx.cuda.local.array(held, real),
        )
        of_dy, of_dx = integer(image * f.y_n), integer(image * f.x_n + row * f.x_h + column * f.x_w)
        if at_once > 1:
            while vector + (at_once - 1) * threads < end:
                start, to = integer(of_dy + vector * f.y_v), integer(of_dx + vector * f.x_v)
                add_up(m, x, dy, dx, near, p, q, start, to, arrays, six, f, at_once)
                vector = integer(vector + at_once * threads)
        while vector < end:
            start, to = integer(of_dy + vector * f.y_v), integer(of_dx + vector * f.x_v)
            add_up(m, x, dy, dx, near, p, q, start, to, arrays, six, f, 1)
            vector = integer(vector + threads)
        half_w, half_h = real(0.5) * real(integer(f.in_w - 1)), real(0.5) * real(integer(f.in_h - 1))
        for k in range(3):
            six[k], six[k + 3] = six[k] * half_w, six[k + 3] * half_h

    return gather


def gather_kernel(specialised_on, at_once):
    """All of an affine map's gradients, but the last sums of dtheta."""
    from nbdnn.kernels.cuda import ptx

    kind = Kind(*specialised_on)
    integer, real = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute]
    place, of_pixel = pixel_place(kind, THREADS), _of_pixel(kind, at_once)
    store = store_sums(kind.compute, kind.bits, THREADS)

    def gather(x, places, dy, dx, parts, f):
        image, row, column, vector, end = place(f)
        six = ptx.cuda.local.array(SUMS, real)
        for k in range(SUMS):
            six[k] = real(0.0)
        if row < f.in_h and column < f.in_w:
            of_pixel(x, places, dy, dx, image, row, column, vector, end, six, f)
        groups, _ = ptx.divided(integer(f.vectors + f.group - 1), f.group)
        store(parts, integer(integer(ptx.block_x() * groups + ptx.block_y()) * SUMS), six)

    data, parameters, compute = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype), ptx.pointer(kind.compute)
    return gather, (data, parameters, data, data, compute, ptx.record(Fields, kind.bits))
