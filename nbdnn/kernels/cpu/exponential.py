"""exp and log for vectors, on values of the compute type.

float32: exp is a degree-6 polynomial on [-ln2/2, ln2/2] with the exponent set by bits (relative error below 2 ulp).
float64: the C library's. Source: own, coefficients from the Cephes library (S. Moshier).
"""

from __future__ import annotations

import math

import numpy as np
from numba import float32, int32, njit

from nbdnn.kernels.cpu.vector import f32_from_bits


@njit(inline="always")
def exp_f32(x):
    """exp(x): infinite where it overflows, 0 below the smallest normal number, NaN of NaN."""
    given = x
    x = float32(88.72) if x > float32(88.72) else x
    x = float32(-87.33) if x < float32(-87.33) else x
    n = np.rint(x * float32(1.44269504))
    r = x - n * float32(0.693359375) + n * float32(2.12194440e-4)
    p = float32(1.9875691500e-4)
    p = p * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    p = p * r * r + r + float32(1.0)
    power = p * f32_from_bits(int32((int32(n) + int32(127)) << int32(23)))
    power = float32(0.0) if given < float32(-87.33) else power
    return float32(np.inf) if given > float32(88.72) else power


@njit(inline="always")
def exp_f64(x):
    return math.exp(x)


EXP = {"f32": exp_f32, "f64": exp_f64}
