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

The references of the other ops say themselves how far off each output may be, in units of eps of the compute type; of
recurrent networks in 16 bits also how far where what lies between their steps is rounded.
"""

from __future__ import annotations

import numpy as np

from nbdnn.candidate import Candidate
from nbdnn.expected import COEFFICIENT, BoundedSample, ConvSample, Sample
from nbdnn.problem import Problem
from nbdnn.problem_conv import ConvProblem

# Distance from 1 to the next number, by compute type; TF32 keeps the 10 fraction bits of float16.
EPS = {"f16": 2.0**-10, "f32": 2.0**-23, "f64": 2.0**-52, "tf32": 2.0**-10}
# (distance from 1 to the next number, smallest positive number) of the 16-bit types.
_NARROW = {"f16": (2.0**-10, 2.0**-24), "bf16": (2.0**-7, 2.0**-133)}
# From here on a number is rounded to infinity.
_INFINITE = {"f16": 65520.0, "bf16": (2.0 - 2.0**-8) * 2.0**127}
# An exact result rounded to nearest is off by 0.5 ulp; a float32 error that crosses a rounding boundary adds another 1.
_ULPS_OF_A_ROUNDING = 1.5
# exp and tanh by polynomial are good to a few ulp of float32, and no activation is steeper than swish (1.1).
_ACTIVATION_ULPS, _STEEPEST = 8.0, 1.1


def allowed(
    problem: Problem, candidate: Candidate, sample: Sample, *, any_data: bool = False, roundings: int = 1
) -> np.ndarray:
    """The error permitted at each output of `sample`: zero-mean random data, or `any_data`.

    `roundings` counts how often the result passes through a 16-bit type (an unfused epilogue: once more a step).
    """
    eps = EPS["tf32" if candidate.math == "tf32" else problem.compute]
    if isinstance(sample, BoundedSample):
        slack = sample.slack if roundings == 1 or sample.narrow_slack is None else sample.narrow_slack
        return eps * slack + _rounding(sample.dtype, abs(sample.value))
    assert isinstance(problem, ConvProblem) and isinstance(sample, ConvSample)
    length = max(1, problem.reduction_length + len(problem.epilogue))
    bound = COEFFICIENT * eps * np.sqrt(length) * _seen_by(problem, candidate, sample, sample.rss)
    classical = length * eps * _seen_by(problem, candidate, sample, sample.sum_abs)
    if any_data:
        bound = classical
    elif candidate.by_name_only:
        bound = np.maximum(bound, classical)
    if problem.activation not in (None, "relu"):
        bound = _STEEPEST * bound + _ACTIVATION_ULPS * eps * abs(sample.value)
    return bound + roundings * _rounding(problem.dtype, abs(sample.value) if roundings == 1 else sample.peak)


def fault(
    problem: Problem,
    candidate: Candidate,
    output: np.ndarray,
    sample: Sample,
    *,
    any_data: bool = False,
    roundings: int = 1,
) -> str:
    """What is wrong with `output` (an array of the output's logical shape), in a sentence; '' if nothing is."""
    got = output[sample.index]
    return judged(problem, candidate, got, sample, any_data=any_data, roundings=roundings)[1]


def judged(
    problem: Problem,
    candidate: Candidate,
    got: np.ndarray,
    sample: Sample,
    *,
    any_data: bool = False,
    roundings: int = 1,
) -> tuple[float, str]:
    """The largest error of the elements of `sample`, as a share of what is permitted, infinite where only one of the
    two is NaN; and what is wrong, as `fault` says it. got: what was found there.

    An infinity is right where the exact result may be one in a 16-bit type.
    """
    dtype = sample.dtype if isinstance(sample, BoundedSample) else problem.dtype
    with np.errstate(all="ignore"):
        bound = allowed(problem, candidate, sample, any_data=any_data, roundings=roundings)
        share = abs(got.astype(np.float64) - sample.value) / np.maximum(bound, np.finfo(np.float64).tiny)
    share[np.isnan(share)] = np.inf
    beyond = np.isinf(got) & (np.copysign(sample.value, got) == sample.value)
    beyond &= abs(sample.value) + bound >= _INFINITE.get(dtype, np.inf)
    share[beyond | (got == sample.value) | (np.isnan(got) & np.isnan(sample.value))] = 0.0
    largest, wrong = float(share.max(initial=0.0)), np.count_nonzero(share > 1)
    if not wrong:
        return largest, ""
    worst = int(np.argmax(share))
    place = ", ".join(str(axis[worst]) for axis in sample.index)
    return largest, (
        f"{wrong} of {len(share)} outputs are wrong, the worst at ({place}): {got[worst]:.9g} instead of "
        f"{sample.value[worst]:.9g}, {largest:.3g} times the permitted error"
    )


def transforms(candidate: Candidate) -> bool:
    """Whether the method sums products of transformed values."""
    name = f"{candidate.algorithm} {candidate.algo}"
    return "fft" in name or "winograd" in name


def _seen_by(problem: ConvProblem, candidate: Candidate, sample: ConvSample, size: np.ndarray) -> np.ndarray:
    """`size` of each output; for transforming methods the largest in the same image."""
    if not transforms(candidate) or not len(size):
        return size
    if problem.op == "conv_bwd_filter":
        return np.full_like(size, size.max())
    largest = np.zeros(problem.n)
    np.maximum.at(largest, sample.index[0], size)
    return largest[sample.index[0]]


def _rounding(dtype: str, size: np.ndarray) -> np.ndarray:
    """What storing a number of that size in a 16-bit type may add to its error; nothing for other types."""
    if dtype not in _NARROW:
        return np.zeros_like(size)
    eps, smallest = _NARROW[dtype]
    _, exponent = np.frexp(size)
    return _ULPS_OF_A_ROUNDING * np.maximum(np.ldexp(eps, exponent - 1), smallest)
