"""exp and log for vectors, on values of the compute type.

float32: exp is a degree-6 polynomial on [-ln2/2, ln2/2] with the exponent set by bits (relative error below 2 ulp), log
one of degree 9 on [sqrt(1/2), sqrt(2)] (1 ulp). float64: the C library's.
Source: own, coefficients from the Cephes library (S. Moshier).
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import float32, int32, njit

from nbdnn.kernels.cpu.formula import EXP_TERMS, Lanes, polynomial
from nbdnn.kernels.cpu.vector import I32, constant, f32_from_bits

# Of float32: where powers leave the normal numbers; 1.5 * 2**23: of its sum with a small number the low bits are that.
_LEAST, _MOST, _ROUNDER = -87.33, 88.72, 12582912.0
_LOG_TERMS = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


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


def power(x: Lanes, is_small: bool = False) -> Lanes:
    """exp(x): infinite where it overflows, 0 below the smallest normal number, NaN of NaN. is_small: x is known to be
    at most _MOST, which saves an eighth of the instructions."""
    if x.dtype == "f64":
        return x.called("llvm.exp")
    builder, integers = x.builder, ir.VectorType(I32, x.value.type.count)
    given = x
    if not is_small:
        x = x.where(">", _MOST, x.lift(_MOST), x)
    x = x.where("<", _LEAST, x.lift(_LEAST), x)
    shifted = x * 1.44269504 + _ROUNDER
    n = shifted - _ROUNDER
    r = x - n * 0.693359375 + n * 2.12194440e-4
    p = polynomial(r, EXP_TERMS) * (r * r) + (r + 1.0)
    exponent = builder.shl(builder.bitcast(shifted.value, integers), constant(integers, 23))
    found = x.like(builder.bitcast(builder.add(builder.bitcast(p.value, integers), exponent), x.value.type))
    found = given.where("<", _LEAST, x.lift(0.0), found)
    return found if is_small else given.where(">", _MOST, x.lift(float("inf")), found)


def logarithm(x: Lanes) -> Lanes:
    """log(x) of positive normal numbers; infinite of infinity, NaN of NaN."""
    if x.dtype == "f64":
        return x.called("llvm.log")
    builder, integers = x.builder, ir.VectorType(I32, x.value.type.count)
    bits = builder.bitcast(x.value, integers)
    # As multiples of 2 between sqrt(1/2) and sqrt(2): what is added makes the exponent one more from sqrt(2) on.
    moved = builder.add(bits, constant(integers, 0x3F800000 - 0x3F3504F3))
    exponent = builder.sub(builder.ashr(moved, constant(integers, 23)), constant(integers, 127))
    mantissa = builder.add(builder.and_(moved, constant(integers, 0x7FFFFF)), constant(integers, 0x3F3504F3))
    r, e = x.like(builder.bitcast(mantissa, x.value.type)) - 1.0, x.like(builder.sitofp(exponent, x.value.type))
    z = r * r
    tail = polynomial(r, _LOG_TERMS) * r * z + e * -2.12194440e-4
    found = (r + (tail - z * 0.5)) + e * 0.693359375
    is_finite = builder.fcmp_ordered("<", x.value, constant(x.value.type, float("inf")))
    return x.like(builder.select(is_finite, found.value, x.value))
