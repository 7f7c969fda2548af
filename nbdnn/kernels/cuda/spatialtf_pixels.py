"""Which outputs of an affine map lie near a pixel, as compiled-in functions: the map turned round.

    (s, t) = (s0, t0) + j * (s_j, t_j) + i * (s_i, t_i);  |s - q| < 1 and |t - p| < 1 is a parallelogram of (j, i), its
    middle is M^-1 (q - s0, p - t0) and its half extents are (|t_i| + |s_i|, |t_j| + |s_j|) / |det M|

What lies in the box round it is then looked at row by row, from where both s and t come near to where one of them has
left; box and rows are a little larger than rounding may move them. Where M can hardly be turned round, the box is all
of the outputs, for those pixels that any of them may be near to. Source: own.
"""

from __future__ import annotations

from functools import cache

_WORST = 2.0**-12  # det M by its terms: of less, too few digits are left
_ROUNDING = 2.0**-20  # of a quotient of such numbers
_MARGIN = 2.0**-7


@cache
def box(compute: str, bits: int):
    """Device function (map, p, q, f) -> (first row, end of rows, first column, end of columns) of outputs."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    real, integer = ptx.REAL[compute], ptx.INTEGER[bits]
    size, smaller, larger = ptx_spatialtf.size, ptx_spatialtf.smaller, ptx_spatialtf.larger

    @ptx.inline
    def between(middle, radius, extent):
        """Whole numbers from 0 to extent that are no further from the middle: first and end."""
        low, last = larger(middle - radius, real(0.0)), smaller(middle + radius, real(integer(extent - 1)))
        first = integer(smaller(low, real(extent)))
        first = integer(first + 1) if real(first) < low else first
        return first, integer(integer(last) + 1) if last >= low else integer(0)

    @ptx.inline
    def reached(start, by_column, by_row, place, f):
        """Whether any output's position along an axis may be near a pixel's."""
        columns = by_column * real(integer(f.out_w - 1))
        rows = by_row * real(integer(f.out_h - 1))
        least = start + smaller(columns, real(0.0)) + smaller(rows, real(0.0))
        most = start + larger(columns, real(0.0)) + larger(rows, real(0.0))
        margin = real(1.0 + _MARGIN) + real(_ROUNDING) * (size(start) + size(columns) + size(rows))
        return place > least - margin and place < most + margin

    @ptx.inline
    def find(m, p, q, f):
        row, column = real(p), real(q)
        first, second = m[1] * m[5], m[2] * m[4]
        det, terms = first - second, size(first) + size(second)
        if size(det) > real(_WORST) * terms:
            share = real(1.0) / size(det)
            turned = share if det > real(0.0) else -share
            right, down = column - m[0], row - m[3]
            j_1, j_2, i_1, i_2 = m[5] * right, m[2] * down, m[1] * down, m[4] * right
            lost = real(_ROUNDING) * terms * share
            j_radius, i_radius = (size(m[5]) + size(m[2])) * share, (size(m[4]) + size(m[1])) * share
            j_margin = real(_MARGIN) * (real(1.0) + j_radius) + lost * (size(j_1) + size(j_2)) * share
            i_margin = real(_MARGIN) * (real(1.0) + i_radius) + lost * (size(i_1) + size(i_2)) * share
            low_j, end_j = between((j_1 - j_2) * turned, j_radius + j_margin, f.out_w)
            low_i, end_i = between((i_1 - i_2) * turned, i_radius + i_margin, f.out_h)
            return low_i, end_i, low_j, end_j
        near = reached(m[0], m[1], m[2], column, f) and reached(m[3], m[4], m[5], row, f)
        return integer(0), f.out_h if near else integer(0), integer(0), f.out_w if near else integer(0)

    return find


@cache
def turned_round(compute: str, bits: int):
    """Device function (map, f) -> (whether it can be, columns, rows) of outputs: (of the first pixel, a column of
    pixels further on, a row, how far away an output is at most that is near a pixel)."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    real, size, reciprocal = ptx.REAL[compute], ptx_spatialtf.size, ptx_spatialtf.reciprocal

    @ptx.inline
    def line(by_column, by_row, m, lost, f):
        of_column, of_row = by_column * m[0], by_row * m[3]
        far = size(by_column) * real(f.in_w) + size(by_row) * real(f.in_h) + size(of_column) + size(of_row)
        radius = size(by_column) + size(by_row)
        margin = real(_MARGIN) * (real(1.0) + radius) + lost * far
        return -(of_column + of_row), by_column, by_row, radius + margin

    @ptx.inline
    def turn(m, f):
        first, second = m[1] * m[5], m[2] * m[4]
        det, terms = first - second, size(first) + size(second)
        can = size(det) > real(_WORST) * terms
        share = reciprocal(det)
        lost = real(_ROUNDING) * terms * size(share)
        columns = line(m[5] * share, -(m[2] * share), m, lost, f)
        return can, columns, line(-(m[4] * share), m[1] * share, m, lost, f)

    return turn


@cache
def strides(compute: str):
    """Device function (map) -> (-1 / s_j, columns from a pixel to where s leaves it, the same of t)."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    real, size, reciprocal = ptx.REAL[compute], ptx_spatialtf.size, ptx_spatialtf.reciprocal

    @ptx.inline
    def stride(by_column):
        """By a step of 0 no column follows from the place: NaN, or infinite, which does not count."""
        columns = -reciprocal(by_column)
        return columns, size(columns) + real(_MARGIN) * (real(1.0) + size(columns))

    @ptx.inline
    def both(m):
        s, t = stride(m[1]), stride(m[4])
        return s[0], s[1], t[0], t[1]

    return both


@cache
def in_row(compute: str):
    """Device function (strides, right, down, first, last) -> (column, last column) of the outputs of a row that may be
    near a pixel. right, down: how far column 0 is from it. first, last: of those that count, whole numbers."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    real, most, least, up = ptx.REAL[compute], ptx_spatialtf.most, ptx_spatialtf.least, ptx_spatialtf.up

    @ptx.inline
    def between(of, right, down, first, last):
        low = most(ptx.fma(right, of[0], -of[1]), ptx.fma(down, of[2], -of[3]))
        high = least(ptx.fma(right, of[0], of[1]), ptx.fma(down, of[2], of[3]))
        return up(least(most(low, first), last + real(1.0))), least(high, last)

    return between
