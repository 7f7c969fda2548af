"""Rows turned about the diagonal, of every length, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from nbdnn.array import narrowed, widened
from nbdnn.kernels.cpu.softmax_vector import collect, deal
from nbdnn.kernels.cpu.turns import transpose, turn_pairs

_GUARD = -7.0


@pytest.mark.parametrize("vl", [4, 8, 16])
def test_short_rows_are_dealt_out_and_collected(vl: int) -> None:
    rng = np.random.default_rng(vl)
    for length in range(2, vl + 1):
        dealt, collected = deal("f32", vl, length), collect("f32", vl, length)

        @njit
        def there_and_back(lines, pitch, start, to, dealt=dealt, collected=collected):
            dealt(lines, pitch, start)
            collected(to, lines, pitch)

        rows = rng.random((vl, length), np.float32)
        lines = np.full((length, 2 * vl), _GUARD, np.float32)  # every other vector is somebody else's
        back = np.full(vl * length + 2 * vl, _GUARD, np.float32)
        there_and_back(lines.ctypes.data, lines.strides[0], rows.ctypes.data, back.ctypes.data + 4 * vl)
        np.testing.assert_array_equal(lines[:, :vl], rows.T, err_msg=f"{length} elements")
        np.testing.assert_array_equal(back[vl:-vl], rows.ravel(), err_msg=f"{length} elements")
        for untouched in (lines[:, vl:], back[:vl], back[-vl:]):
            assert (untouched == _GUARD).all(), f"{length} elements"


@pytest.mark.parametrize("converts_last", [False, True])
@pytest.mark.parametrize(("source", "target"), [("f32", "f32"), ("f64", "f64"), ("bf16", "f32"), ("f32", "f16")])
def test_a_matrix_is_transposed_and_nothing_else_is_touched(source: str, target: str, converts_last: bool) -> None:
    vl, rng = 8, np.random.default_rng(0)
    turn = transpose(source, target, vl, converts_last)

    @njit
    def run(to, to_pitch, start, start_pitch, rows, columns):
        turn(to, to_pitch, start, start_pitch, rows, columns)

    for rows in (1, 3, 7, 8, 9, 16, 21):
        for columns in (1, 5, 8, 15, 16, 17):
            values = rng.integers(-99, 99, (rows, columns + 2)).astype(np.float64)  # exact in 16 bits
            matrix = narrowed(values, source)
            to = narrowed(np.full((columns + 1, rows + 3), _GUARD), target)
            run(to.ctypes.data, to.strides[0], matrix.ctypes.data, matrix.strides[0], rows, columns)
            expected = np.full(to.shape, _GUARD)
            expected[:columns, :rows] = values[:, :columns].T
            np.testing.assert_array_equal(widened(to, target), expected, err_msg=f"{rows} x {columns}")


@pytest.mark.parametrize("vl", [8, 16])
def test_pairs_of_rows_are_transposed_and_nothing_else_is_touched(vl: int) -> None:
    rng, turn = np.random.default_rng(vl), turn_pairs(vl)

    @njit
    def run(to, to_pitch, start, start_pitch, rows, columns):
        turn(to, to_pitch, start, start_pitch, rows, columns)

    for rows in (1, 2, 7, 2 * vl, 2 * vl + 1, 4 * vl + 2):
        for columns in (1, vl - 1, vl, vl + 3):
            matrix = rng.integers(0, 1 << 16, (rows, columns + 2), np.uint16)
            to = np.full((columns + 1, rows + 4), 0xABCD, np.uint16)
            run(to.ctypes.data, to.strides[0], matrix.ctypes.data, matrix.strides[0], rows, columns)
            expected = np.full_like(to, 0xABCD)
            expected[:columns, : rows + rows % 2] = 0
            expected[:columns, :rows] = matrix[:, :columns].T
            np.testing.assert_array_equal(to, expected, err_msg=f"{rows} x {columns}")
