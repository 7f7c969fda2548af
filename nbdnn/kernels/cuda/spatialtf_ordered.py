"""The gradient of what a grid samples, in one order: a thread has a channel of an image and goes through its outputs.

    dx[n, c, pixel] = sum over outputs that are near it of weight * dy[n, c, output]

What it adds up is in the compute type: a 16-bit gradient in the workspace, rounded once by the same thread. Outputs
follow each other, so this is for who wants the same bits every time. Source: own.
"""

from __future__ import annotations

from math import ceil

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.kernels.cuda.spatialtf_position import Fields, Kind, nearest, position
from nbdnn.problem_spatialtf import SpatialtfProblem

_WARP = 32


def ordered(problem: SpatialtfProblem, kind: Kind, integers: Fields, total: int) -> Launch:
    """total: where sums are, dx or the workspace."""
    by_channel = integers._replace(vectors=problem.c, x_v=integers.x_v // kind.lanes, y_v=integers.y_v // kind.lanes)
    source = Source(_kernel, kind._replace(lanes=1, threads=1), _WARP)
    return Launch(source, (ceil(problem.n * problem.c / _WARP), 1, 1), (1, 2, total, 3), "", by_channel, kind.bits)


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    kind = Kind(*specialised_on)
    integer, real, widen, narrow = (
        ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], ptx.WIDEN[kind.dtype], ptx.NARROW[kind.dtype],
    )  # fmt: skip
    locate, find, hat = position(kind), nearest(kind.compute, kind.bits), ptx_spatialtf.hat

    @ptx.inline
    def add(total, at, weight, top):
        if weight > real(0.0):
            total[at] = ptx.fma(weight, top, total[at])

    def add_outputs(grid, dy, total, dx, f):
        channel = integer(integer(ptx.block_x()) * _WARP + ptx.thread_x())
        if channel >= f.images * f.vectors:
            return
        image, c = ptx.divided(channel, f.vectors)
        of_x, of_y = integer(image * f.x_n + c * f.x_v), integer(image * f.y_n + c * f.y_v)
        pixel = integer(0)
        while pixel < f.pixels:
            total[integer(of_x + pixel * f.x_w)] = real(0.0)
            pixel = integer(pixel + 1)
        output = integer(0)
        while output < f.outputs:
            i, j = ptx.divided(output, f.out_w)
            s, t = locate(grid, image, i, j, f)
            (column, right), (row, down) = find(s, f.in_w), find(t, f.in_h)
            top = widen(ptx.load_constant(dy, integer(of_y + output * f.y_w)))
            at = integer(of_x + row * f.x_h + column * f.x_w)
            first, second, left, next_ = hat(down), hat(down - real(1.0)), hat(right), hat(right - real(1.0))
            add(total, at, first * left, top)
            add(total, integer(at + f.right), first * next_, top)
            add(total, integer(at + f.down), second * left, top)
            add(total, integer(at + f.down + f.right), second * next_, top)
            output = integer(output + 1)
        pixel = integer(0)
        while pixel < f.pixels:
            here = integer(of_x + pixel * f.x_w)
            dx[here] = narrow(total[here])
            pixel = integer(pixel + 1)

    data, compute = ptx.pointer(kind.dtype), ptx.pointer(kind.compute)
    types = ptx.pointer(kind.param_dtype), data, compute, data, ptx.record(Fields, kind.bits)
    return add_outputs, types
