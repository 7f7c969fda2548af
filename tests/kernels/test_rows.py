"""Rows moved and converted, of every length and border, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from nbdnn.array import narrowed, widened
from nbdnn.kernels.cpu.rows import convert_row, every_step

_GUARD = -7.0
TYPES = [("f32", "f32"), ("f64", "f64"), ("bf16", "f32"), ("f32", "f16")]


@pytest.mark.parametrize(("source", "target"), TYPES)
@pytest.mark.parametrize("vl", [4, 8])
def test_a_row_is_converted_and_nothing_else_is_touched(source: str, target: str, vl: int) -> None:
    convert, rng = convert_row(source, target, vl), np.random.default_rng(vl)

    @njit
    def run(to, start, n):
        convert(to, start, n)

    for n in range(4 * vl):
        values = rng.integers(-99, 99, n + 2).astype(np.float64)  # exact in 16 bits
        given, to = narrowed(values, source), narrowed(np.full(n + 2, _GUARD), target)
        run(to[1:].ctypes.data, given[1:].ctypes.data, n)
        expected = np.full(n + 2, _GUARD)
        expected[1:-1] = values[1:-1]
        np.testing.assert_array_equal(widened(to, target), expected, err_msg=f"{n} elements")


@pytest.mark.parametrize(("source", "target"), TYPES[:3])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_rows_of_every_step_have_zeros_beyond_their_borders(source: str, target: str, step: int) -> None:
    """What is not read is NaN, and so is what a row reads where it must not."""
    vl, rows, rng = 4, 3, np.random.default_rng(step)
    move = every_step(source, target, vl)

    @njit
    def run(to, start, start_pitch, step, rows, width, first, end):
        move(to, start, start_pitch, step, rows, width, first, end)

    for width in range(1, 4 * vl):
        for first in range(min(width, vl + 2)):
            for end in range(max(first, width - vl - 2), width + 1):
                values = rng.integers(-99, 99, (rows, width * step)).astype(np.float64)
                inside = values[:, : (width - 1) * step + 1 : step].copy()
                inside[:, :first] = inside[:, end:] = 0
                values[:, : first * step] = np.nan
                values[:, max(0, (end - 1) * step + 1) :] = np.nan
                given, to = narrowed(values, source), narrowed(np.full((rows + 2, width), _GUARD), target)
                run(to[1:].ctypes.data, given.ctypes.data, given.strides[0], step, rows, width, first, end)
                where = f"{width} elements, inside from {first} to {end}"
                np.testing.assert_array_equal(widened(to, target)[1:-1], inside, err_msg=where)
                assert (widened(to, target)[[0, -1]] == _GUARD).all(), where
