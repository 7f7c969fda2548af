"""exp, log, tanh and the logistic function, emitted as LLVM code on vectors or on one number of the compute type.

    exp(x) = 2**n * exp(r),  n = round(x / ln 2),  r = x - n ln 2 in two parts,  exp(r) = 1 + r + r**2 P(r)
    log(x) = e ln 2 + log(1 + r),  1 + r in [sqrt(1/2), sqrt(2)),  log(1 + r) = 2 atanh(s),  s = r / (2 + r)
    tanh(|x|) = 1 - 2 / (exp(2|x|) + 1),  near 0 x + x**3 P(x**2) / Q(x**2)

2**n is added to the exponent's bits. P of exp is of degree 5 in float32, Taylor's of degree 11 in float64; the series
of log has 4 or 10 terms. Errors are below 2 ulp, of the logistic function below 4. On one number they are for loops
that LLVM makes vectors of.
Source: own, coefficients of exp in float32 and of tanh from the Cephes library (S. Moshier); log as in FreeBSD's msun.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import factorial
from typing import NamedTuple

from llvmlite import ir
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.formula import Lanes, polynomial
from nbdnn.kernels.cpu.vector import I32, I64, NUMBA_FLOAT, constant


class _Constants(NamedTuple):
    """Of one type. least, most: where powers leave the normal numbers. digits: of the fraction. rounder: 1.5 times 2 to
    the digits, of whose sum with a small number the low bits are that. ln_2: with zeros behind it, and the rest."""

    least: float
    most: float
    digits: int
    rounder: float
    ln_2: tuple[float, float]
    exp: tuple[float, ...]
    log: tuple[float, ...]
    tanh: tuple[tuple[float, ...], tuple[float, ...]]
    bits_of_1: int
    bits_of_root: int  # of the square root of 1/2


def _log_terms(count: int) -> tuple[float, ...]:
    """Of 2 atanh(s) / s - 2 by the square of s, the highest first."""
    return tuple(2.0 / (2 * k + 1) for k in range(count, 0, -1))


_OF = {
    "f32": _Constants(
        least=-87.33654,
        most=88.72283,
        digits=23,
        rounder=1.5 * 2.0**23,
        ln_2=(0.693359375, -2.12194440e-4),
        exp=(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
        log=_log_terms(4),
        tanh=((-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1), (1.0,)),
        bits_of_1=0x3F800000,
        bits_of_root=0x3F3504F3,
    ),
    "f64": _Constants(
        least=-708.396418532264,
        most=709.782712893384,
        digits=52,
        rounder=1.5 * 2.0**52,
        ln_2=(6.93145751953125e-1, 1.42860682030941723212e-6),
        exp=tuple(1.0 / factorial(k) for k in range(13, 1, -1)),
        log=_log_terms(10),
        tanh=(
            (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3),
            (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3),
        ),
        bits_of_1=0x3FF0000000000000,
        bits_of_root=0x3FE6A09E667F3BCD,
    ),
}
_LOG2_E = 1.4426950408889634
_NEAR = 0.625  # where tanh's polynomials end


def _integers(x: Lanes) -> ir.Type:
    element = I32 if x.dtype == "f32" else I64
    return ir.VectorType(element, x.value.type.count) if isinstance(x.value.type, ir.VectorType) else element


def _normal_power(x: Lanes) -> Lanes:
    """exp(x) where x and it are normal numbers."""
    c, builder, integers = _OF[x.dtype], x.builder, _integers(x)
    shifted = x * _LOG2_E + c.rounder
    n = shifted - c.rounder
    r = x - n * c.ln_2[0] - n * c.ln_2[1]
    p = polynomial(r, c.exp) * (r * r) + (r + 1.0)
    exponent = builder.shl(builder.bitcast(shifted.value, integers), constant(integers, c.digits))
    bits = builder.add(builder.bitcast(p.value, integers), exponent)
    return x.like(builder.bitcast(bits, x.value.type))


def power(x: Lanes, is_small: bool = False) -> Lanes:
    """exp(x): infinite where it overflows, 0 below the smallest normal number, NaN of NaN. is_small: x is known not to
    overflow, which saves an eighth of the instructions."""
    c, builder, given = _OF[x.dtype], x.builder, x
    if not is_small:
        x = x.where(">", c.most, x.lift(c.most), x)
    found = _normal_power(x.where("<", c.least, x.lift(c.least), x))
    nothing = given.where("<", 0.0, x.lift(0.0), given)  # NaN of NaN, of which any bits may have come
    is_normal = builder.fcmp_ordered(">=", given.value, x.lift(c.least).value)
    found = x.like(builder.select(is_normal, found.value, nothing.value))
    return found if is_small else given.where(">", c.most, x.lift(float("inf")), found)


def logarithm(x: Lanes) -> Lanes:
    """log(x) of positive normal numbers; infinite of infinity, NaN of NaN."""
    c, builder, integers = _OF[x.dtype], x.builder, _integers(x)
    bits = builder.bitcast(x.value, integers)
    # As multiples of 2 between sqrt(1/2) and sqrt(2): what is added makes the exponent one more from sqrt(2) on.
    moved = builder.add(bits, constant(integers, c.bits_of_1 - c.bits_of_root))
    bias, of_fraction = c.bits_of_1 >> c.digits, (1 << c.digits) - 1
    exponent = builder.sub(builder.ashr(moved, constant(integers, c.digits)), constant(integers, bias))
    mantissa = builder.add(builder.and_(moved, constant(integers, of_fraction)), constant(integers, c.bits_of_root))
    r, e = x.like(builder.bitcast(mantissa, x.value.type)) - 1.0, x.like(builder.sitofp(exponent, x.value.type))
    s, half = r / (r + 2.0), r * r * 0.5
    z = s * s
    tail = s * (half + polynomial(z, c.log) * z) + e * c.ln_2[1]
    found = (r - (half - tail)) + e * c.ln_2[0]
    is_finite = builder.fcmp_ordered("<", x.value, x.lift(float("inf")).value)
    return x.like(builder.select(is_finite, found.value, x.value))


def sigmoid(x: Lanes) -> Lanes:
    """1 / (1 + exp(-x))."""
    return 1.0 / (power(0.0 - x) + 1.0)


def tanh(x: Lanes) -> Lanes:
    over, under = _OF[x.dtype].tanh
    size, z = x.called("llvm.fabs"), x * x
    far = 1.0 - 2.0 / (power(size * 2.0) + 1.0)
    share = polynomial(z, over) * z * x
    near = (share if len(under) == 1 else share / polynomial(z, under)) + x
    return size.where("<", _NEAR, near, x.where("<", 0.0, 0.0 - far, far))


@cache
def _of_one(formula: Callable[[Lanes], Lanes], dtype: str):
    """Intrinsic: the formula of one number."""
    real = NUMBA_FLOAT[dtype]

    @intrinsic
    def run(typingctx, x):
        def codegen(context, builder, sig, args):
            return formula(Lanes(builder, args[0], dtype)).value

        return signature(real, real), codegen

    return run


SIGMOID, TANH = ({dtype: _of_one(formula, dtype) for dtype in _OF} for formula in (sigmoid, tanh))
