"""How far a correct result may be from the exact one: the one error model of the tuner and of the tests.

An output is the sum of K products x*w. A kernel rounds each partial sum by at most eps/2 of its size. On zero-mean data
the partial sums grow like a random walk, so they stay of the size m = sqrt(sum of squared products), the roundings are
independent, and their sum is about eps/2 * sqrt(K) * m; the coefficient 8 is 16 times that: it covers the largest of
10^7 outputs and any order of summation, and stays below what one lost or doubled product does, about m / sqrt(K), for
every K up to 10^6. On data with a mean the only bound is the classical
K * eps * sum |products|. A candidate that may be chosen by name only keeps that one alone.

Methods that transform the image (FFT, Winograd) sum products of *transformed* values: one large value of a tile leaves
its rounding error in every output of the tile. There the largest m of the image stands in for the output's own; the
image of a filter gradient is the whole result.
"""

from __future__ import annotations

import numpy as np

from nbdnn.candidate import Candidate
from nbdnn.problem import ConvProblem
from nbdnn.reference import Sample

COEFFICIENT = 8.0
# Distance from 1 to the next number, by compute type; TF32 keeps the 10 fraction bits of float16.
EPS = {"f16": 2.0**-10, "f32": 2.0**-23, "f64": 2.0**-52, "tf32": 2.0**-10}
# (distance from 1 to the next number, smallest positive number) of the 16-bit types.
_NARROW = {"f16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 2.0**-133)}
# An exact result rounded to nearest is off by 0.5 ulp; a float32 error that crosses a rounding boundary adds another 1.
_ULPS_OF_A_ROUNDING = 1.5
# exp and tanh by polynomial are good to a few ulp of float32, and no activation is steeper than swish (1.1).
_ACTIVATION_ULPS, _STEEPEST = 8.0, 1.1


def allowed(
    problem: ConvProblem, candidate: Candidate, sample: Sample, *, any_data: bool = False, roundings: int = 1
) -> np.ndarray:
    """The error permitted at each output of `sample`: zero-mean random data, or `any_data`.

    `roundings` counts how often the result passes through a 16-bit type (an unfused epilogue: once more a step).
    """
    eps = EPS["tf32" if candidate.math == "tf32" else problem.compute]
    length = max(1, problem.reduction_length + len(problem.epilogue))
    bound = COEFFICIENT * eps * np.sqrt(length) * _seen_by(problem, candidate, sample, sample.rss)
    classical = length * eps * _seen_by(problem, candidate, sample, sample.sum_abs)
    if any_data:
        bound = classical
    elif candidate.by_name_only:
        bound = np.maximum(bound, classical)
    if problem.activation not in (None, "relu"):
        bound = _STEEPEST * bound + _ACTIVATION_ULPS * eps * abs(sample.value)
    if problem.dtype in _NARROW:
        size = abs(sample.value) if roundings == 1 else sample.peak
        bound = bound + roundings * _ULPS_OF_A_ROUNDING * _ulp(problem.dtype, size)
    return bound


def fault(
    problem: ConvProblem,
    candidate: Candidate,
    output: np.ndarray,
    sample: Sample,
    *,
    any_data: bool = False,
    roundings: int = 1,
) -> str:
    """What is wrong with `output` (an array of the output's logical shape), in a sentence; '' if nothing is."""
    got = output[sample.index].astype(np.float64)
    bound = allowed(problem, candidate, sample, any_data=any_data, roundings=roundings)
    error = abs(got - sample.value)
    wrong = ~(error <= bound)  # NaN is wrong
    if not wrong.any():
        return ""
    excess = np.where(np.isfinite(error), error / np.maximum(bound, np.finfo(np.float64).tiny), np.inf)
    worst = int(np.argmax(np.where(wrong, excess, -1.0)))
    place = ", ".join(str(axis[worst]) for axis in sample.index)
    return (
        f"{np.count_nonzero(wrong)} of {len(got)} outputs are wrong, the worst at ({place}): "
        f"{got[worst]:.9g} instead of {sample.value[worst]:.9g}, {excess[worst]:.3g} times the permitted error"
    )


def transforms(candidate: Candidate) -> bool:
    """Whether the method sums products of transformed values."""
    name = f"{candidate.algorithm} {candidate.algo}"
    return "fft" in name or "winograd" in name


def _seen_by(problem: ConvProblem, candidate: Candidate, sample: Sample, size: np.ndarray) -> np.ndarray:
    """`size` of each output; for transforming methods the largest in the same image."""
    if not transforms(candidate) or not len(size):
        return size
    if problem.op == "conv_bwd_filter":
        return np.full_like(size, size.max())
    largest = np.zeros(problem.n)
    np.maximum.at(largest, sample.index[0], size)
    return largest[sample.index[0]]


def _ulp(dtype: str, size: np.ndarray) -> np.ndarray:
    """Distance between neighbouring numbers of a 16-bit type at `size`."""
    eps, smallest = _NARROW[dtype]
    _, exponent = np.frexp(size)
    return np.maximum(np.ldexp(eps, exponent - 1), smallest)
