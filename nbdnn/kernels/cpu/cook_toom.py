"""Minimal filtering matrices: F(m, r) computes m outputs of an r-tap filter with m + r - 1 multiplications.

    y = A^T [(G w) * (B^T x)]        x: m + r - 1 inputs, w: r taps, y: m outputs, * elementwise

Three taps of stride 2 are two of the even inputs, F(m, 2), and one of the odd ones: 2m + 1 multiplications, of which
the last m share one row of G.

from the evaluation of polynomials at m + r - 2 points and at infinity. The points decide the rounding error: for
F(4, 3) the usual 0, +-1, +-2 give 4.6 times the error of 0, +-5/8, +-3/2 (largest error over 100,000 outputs of 64
channels in float32), which are dyadic, so that B^T and A^T are exact. Source: Winograd, Arithmetic Complexity of
Computations (1980); choice of points after Barabasz et al., arXiv:1803.10986.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import prod
from typing import NamedTuple

Matrix = tuple[tuple[float, ...], ...]

_POINTS = {
    3: (Fraction(0), Fraction(1)),
    5: (Fraction(1, 4), Fraction(-1, 2), Fraction(1), Fraction(-3, 2)),
    4: (Fraction(0), Fraction(1), Fraction(-1)),
    6: (Fraction(0), Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2)),
}


class Filtering(NamedTuple):
    """B^T, G without the rows that only repeat its last one, and A^T."""

    input: Matrix
    filter: Matrix
    output: Matrix


@cache
def filtering(m: int, r: int) -> Filtering:
    """The matrices of F(m, r), for m + r - 1 from 3 to 6."""
    points = _POINTS[m + r - 1]
    others = [[q for q in points if q != p] for p in points]
    scales = [prod(p - q for q in rest) for p, rest in zip(points, others, strict=True)]
    rows = [[*_monic(rest), Fraction(0)] for rest in others] + [_monic(points)]
    taps = [[p**k / scale for k in range(r)] for p, scale in zip(points, scales, strict=True)]
    taps.append([Fraction(0)] * (r - 1) + [Fraction(1)])
    outputs = [[*(p**i for p in points), Fraction(int(i == m - 1))] for i in range(m)]
    return Filtering(_floats(rows), _floats(taps), _floats(outputs))


@cache
def filtering_of_stride_2(m: int) -> Filtering:
    """The matrices of m outputs of 3 taps of stride 2, for m of 2 or 4."""
    even, odd = filtering(m, 2), range(m)
    inputs = [[value for pair in zip(row, (0.0,) * m, strict=False) for value in pair] + [row[m]] for row in even.input]
    inputs += [[float(place == 2 * i + 1) for place in range(2 * m + 1)] for i in odd]
    taps = [[first, 0.0, last] for first, last in even.filter] + [[0.0, 1.0, 0.0]]
    outputs = [[*even.output[i], *(float(i == j) for j in odd)] for i in odd]
    return Filtering(*(tuple(map(tuple, matrix)) for matrix in (inputs, taps, outputs)))


def _monic(roots: list[Fraction] | tuple[Fraction, ...]) -> list[Fraction]:
    """Coefficients, lowest first, of the product of (x - root)."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [high - root * low for high, low in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients


def _floats(rows: list[list[Fraction]]) -> Matrix:
    return tuple(tuple(float(value) for value in row) for row in rows)
