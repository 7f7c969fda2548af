"""Pixels of an image in their order, a few at a time: the rows that a thread of an implicit GEMM copies.

A division costs twenty instructions, a step from a pixel to the one `step` later a few additions: its digits in the
mixed radix (n, d, h, w) are added, and each carries at most one.
"""

from __future__ import annotations

from functools import cache


@cache
def located():
    """Device function (pixel, depth, height, width) -> (n, d, h, w)."""
    from nbdnn.kernels.cuda import ptx

    @ptx.inline
    def place(pixel, depth, height, width):
        rest, w = ptx.divided(pixel, width)
        rest, h = ptx.divided(rest, height)
        n, d = ptx.divided(rest, depth)
        return n, d, h, w

    return place


@cache
def moved():
    """Device function (pixel, step, extents) -> the pixel that many later; pixel and step are (n, d, h, w)."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def move(pixel, step, depth, height, width):
        n, d, h, w = pixel
        w = integer(w + step[3])
        h = integer(h + step[2])
        d = integer(d + step[1])
        n = integer(n + step[0])
        if w >= width:
            w = integer(w - width)
            h = integer(h + 1)
        if h >= height:
            h = integer(h - height)
            d = integer(d + 1)
        if d >= depth:
            d = integer(d - depth)
            n = integer(n + 1)
        return n, d, h, w

    return move
