"""Batch normalisation on the CPU: what becomes of the sums of one channel, and lines of elements.

Sums of a channel are a pair: mean and sum of squared differences from it (training); sum of dy and of dy * (x - mean)
(gradients). Parts of either are merged in float64, so that a mean far from zero costs nothing (Chan, Golub, LeVeque
1979). What a channel's elements then need are four coefficients:

    forward   y = ((x - center) - second) * scale + offset       second: what the mean has beyond the compute type
    backward  dx = dy * scale + (x - center) * second + offset
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from numba import float32, float64, njit

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.vector import NARROW, WIDEN, pointer
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_bn import BnProblem

REAL = {"f32": float32, "f64": float64}
# Of the sum of squared differences from a pivot, what its distance from the mean may be. Beyond, the variance has lost
# more than 6 of 24 binary digits, and the mean is the next pivot: a first element is rarely so far from all others.
_MOST_OF_PIVOT = 1 - 1 / 64


class Variant(NamedTuple):
    """What kernels are compiled for. places: of the operands among the pointers."""

    op: str
    dtype: str
    param_dtype: str
    running: bool
    vl: int
    places: tuple[tuple[str, int], ...]

    @property
    def compute(self) -> str:
        return DEFAULT_COMPUTE[self.dtype]

    @property
    def is_forward(self) -> bool:
        return self.op in ("bn_train", "bn_infer")


def variant(problem: BnProblem, vl: int) -> Variant:
    places = tuple(problem.places.items())
    return Variant(problem.op, problem.dtype, problem.param_dtype, problem.running, vl, places)


@njit(**DEVICE)
def is_far(n, total, squares):
    """Whether n differences from a pivot, of which the sum and the sum of squares are given, say that it is too far."""
    return total * total > _MOST_OF_PIVOT * n * squares


@cache
def merge(op: str):
    """Compiled-in function (count, a, b, of more: count, a, b) -> (a, b) of both."""

    @njit(**DEVICE)
    def moments(n, mean, squares, n_more, mean_more, squares_more):
        share = n_more / max(n + n_more, 1.0)
        apart = mean_more - mean
        return mean + apart * share, squares + squares_more + apart * apart * n * share

    @njit(**DEVICE)
    def sums(n, a, b, n_more, a_more, b_more):
        return a + a_more, b + b_more

    return moments if op == "bn_train" else sums


@cache
def finish(v: Variant):
    """Compiled-in function (pointers, channel, m, a, b, epsilon, factor, write) -> (center, second, scale, offset).

    Unless `write` is 0 the channel's statistics or parameter gradients are stored.
    """
    elements, widen, narrow = pointer(v.param_dtype), WIDEN[v.param_dtype], NARROW[v.param_dtype]
    narrowed, real, size = REAL[DEFAULT_COMPUTE[v.param_dtype]], REAL[v.compute], ITEMSIZE[v.param_dtype]
    places, running = dict(v.places), v.running
    at_gamma, at_beta, at_mean, at_invstd, at_var = (
        places.get(n, 0) for n in ("gamma", "beta", "mean", "invstd", "var")
    )
    at_dgamma, at_dbeta, at_dmean, at_dvar = (places.get(n, 0) for n in ("dgamma", "dbeta", "dmean", "dvar"))
    at_old_mean, at_old_var = (places.get(n, 0) for n in ("running_mean", "running_var"))
    at_new_mean, at_new_var = (places.get(n, 0) for n in ("new_running_mean", "new_running_var"))

    @njit(**DEVICE)
    def get(pointers, place, channel):
        return float64(widen(elements(pointers[place] + channel * size)[0]))

    @njit(**DEVICE)
    def put(pointers, place, channel, value):
        elements(pointers[place] + channel * size)[0] = narrow(narrowed(value))

    @njit(**DEVICE)
    def of_train(pointers, channel, m, mean, squares, epsilon, factor, write):
        var = max(squares, 0.0) / m if squares == squares else squares
        invstd = 1.0 / math.sqrt(var + epsilon)
        if write:
            put(pointers, at_mean, channel, mean)
            put(pointers, at_invstd, channel, invstd)
            if running:
                old_mean, old_var = get(pointers, at_old_mean, channel), get(pointers, at_old_var, channel)
                put(pointers, at_new_mean, channel, old_mean * (1.0 - factor) + mean * factor)
                put(pointers, at_new_var, channel, old_var * (1.0 - factor) + var * factor * m / (m - 1.0))
        center = real(mean)
        scale = get(pointers, at_gamma, channel) * invstd
        return center, real(mean - center), real(scale), real(get(pointers, at_beta, channel))

    @njit(**DEVICE)
    def of_infer(pointers, channel, m, a, b, epsilon, factor, write):
        scale = get(pointers, at_gamma, channel) / math.sqrt(get(pointers, at_var, channel) + epsilon)
        return real(get(pointers, at_mean, channel)), real(0.0), real(scale), real(get(pointers, at_beta, channel))

    @njit(**DEVICE)
    def of_bwd(pointers, channel, m, total, moment, epsilon, factor, write):
        invstd, mean = get(pointers, at_invstd, channel), get(pointers, at_mean, channel)
        if write:
            put(pointers, at_dgamma, channel, moment * invstd)
            put(pointers, at_dbeta, channel, total)
        scale = get(pointers, at_gamma, channel) * invstd
        return real(mean), real(-scale * invstd * invstd * moment / m), real(scale), real(-scale * total / m)

    @njit(**DEVICE)
    def of_infer_bwd(pointers, channel, m, total, moment, epsilon, factor, write):
        s = math.sqrt(get(pointers, at_var, channel) + epsilon)
        scale = get(pointers, at_gamma, channel) / s
        if write:
            put(pointers, at_dgamma, channel, moment / s)
            put(pointers, at_dbeta, channel, total)
            put(pointers, at_dmean, channel, -total * scale)
            put(pointers, at_dvar, channel, -moment * scale / (2.0 * s * s))
        return real(get(pointers, at_mean, channel)), real(0.0), real(scale), real(0.0)

    return {"bn_train": of_train, "bn_infer": of_infer, "bn_bwd": of_bwd, "bn_infer_bwd": of_infer_bwd}[v.op]
