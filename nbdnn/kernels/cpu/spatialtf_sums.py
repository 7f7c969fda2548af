"""Sums over the outputs of an image that make dtheta, and over the parts that several tasks have found. Source: own."""

from __future__ import annotations

from functools import cache

from numba import float64, njit

from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.spatialtf_tasks import FIELDS
from nbdnn.kernels.cpu.vector import NARROW, NUMBA_FLOAT, pointer, struct

# Numbers of an image's theta, row by row; they are added up in float64.
SUMS = 6


@cache
def add_theta(compute: str):
    """Compiled-in function (sums, by_s, by_t, first, n, f): adds what outputs first, first + 1, ... give of dtheta.

    by_s, by_t: lines of the derivatives by the two coordinates of the grid.
    """
    reals, doubles, real = pointer(compute), pointer("f64"), NUMBA_FLOAT[compute]

    @njit(**DEVICE, fastmath=FASTMATH | {"reassoc"})
    def of_row(line, start, n, u, u_step):
        """(sum, sum of products with u) over a part of a row, whose first u is given."""
        values = reals(line)
        total, moment = real(0.0), real(0.0)
        for j in range(n):
            total += values[start + j]
            moment += values[start + j] * (u + real(j) * u_step)
        return float64(total), float64(moment)

    @njit(**DEVICE)
    def add(sums, by_s, by_t, first, n, f):
        u_step = 2.0 / (f.out_w - 1) if f.out_w > 1 else 0.0
        start = 0
        while start < n:
            row, column = (first + start) // f.out_w, (first + start) % f.out_w
            part = min(n - start, f.out_w - column)
            u = column * u_step - 1.0 if f.out_w > 1 else 0.0
            v = 2.0 * row / (f.out_h - 1) - 1.0 if f.out_h > 1 else 0.0
            for axis in range(2):
                total, moment = of_row(by_t if axis else by_s, start, part, real(u), real(u_step))
                found = doubles(sums + 24 * axis)
                found[0] += moment
                found[1] += total * v
                found[2] += total
            start += part

    return add


@cache
def add_parts_task(affine: bool, compute: str, param_dtype: str):
    """An image's dtheta or dgrid, of the parts of all blocks of its channels in the workspace."""
    i64, arguments, at = pointer("i64"), struct(ARGS), struct(FIELDS)
    doubles, reals, target, narrow, real = (
        pointer("f64"), pointer(compute), pointer(param_dtype), NARROW[param_dtype], NUMBA_FLOAT[compute],
    )  # fmt: skip

    def add_theta_parts(args, ctx, index, worker):
        f = at(ctx)
        parts = doubles(arguments(args).workspace + f.parts_offset + index * f.blocks * SUMS * 8)
        for k in range(SUMS):
            total = 0.0
            for block in range(f.blocks):
                total += parts[block * SUMS + k]
            target(i64(args)[4])[index * SUMS + k] = narrow(real(total))

    def add_grid_parts(args, ctx, index, worker):
        f = at(ctx)
        parts, size = reals(arguments(args).workspace + f.parts_offset), f.outputs * 2
        for i in range(index * size, (index + 1) * size):
            total = parts[i]
            for block in range(1, f.blocks):
                total += parts[block * f.images * size + i]
            target(i64(args)[4])[i] = narrow(total)

    return compile_task(add_theta_parts if affine else add_grid_parts, (affine, compute, param_dtype))
