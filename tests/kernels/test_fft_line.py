"""Lines of vectors against NumPy's transform."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.fft_line import frequencies, line_task, twiddle_table

_LINE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
# Every radix, straight-line code up to its longest line, and lines in two steps.
_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 15, 16, 20, 32, 64, 80, 96, 256)


@pytest.mark.parametrize("n", _SIZES)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_a_line_is_transformed_and_comes_back(dtype: str, n: int, device: Cpu) -> None:
    vl, real = device.lanes(dtype), {"f32": np.float32, "f64": np.float64}[dtype]
    line = np.random.default_rng(n).standard_normal((n, 2, vl)).astype(real)
    expected = np.fft.fft(line[:, 0].astype(np.float64) + 1j * line[:, 1], axis=0)[frequencies(n)]
    spectrum = line.copy()
    run(dtype, vl, n, spectrum, inverse=False)
    bound = 4 * np.finfo(real).eps * np.sqrt(n) * np.log2(2 * n)
    assert abs(spectrum[:, 0] + 1j * spectrum[:, 1] - expected).max() <= bound
    run(dtype, vl, n, spectrum, inverse=True)
    assert abs(spectrum / n - line).max() <= bound


def run(dtype: str, vl: int, n: int, line: np.ndarray, *, inverse: bool) -> None:
    real, imaginary = line[:, 0].ctypes.data, line[:, 1].ctypes.data
    if inverse:
        real, imaginary = imaginary, real
    task = _LINE(line_task(dtype, vl, n, inverse).address)
    task(real, imaginary, line.strides[0], twiddle_table(dtype, n).ctypes.data)
