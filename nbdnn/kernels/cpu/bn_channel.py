"""Batch normalisation on the CPU: what kernels are compiled for, and how sums of one channel are merged.

Sums of a channel are a pair: mean and sum of squared differences from it (training); sum of dy and of dy * (x - mean)
(gradients). Parts of either are merged in float64, so that a mean far from zero costs nothing (Chan, Golub, LeVeque
1979). What becomes of them is in ``bn_finish.py``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.formula import Lanes
from nbdnn.kernels.cpu.vector import FLOAT, by_vectors, element, load, splat, store
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_bn import BnProblem

# Of the sum of squared differences from a pivot, what its distance from the mean may be. Beyond, the variance has lost
# more than 6 of 24 binary digits, and the mean is the next pivot: a first element is rarely so far from all others.
_MOST_OF_PIVOT = 1 - 1 / 64
# A phase of no more is done before other threads have woken up: 131,072 took inference 32 us alone and 47 to 68 on two
# threads, training 58 and 82 to 89 (rows of 1024 channels, Zen 3).
FEW_ELEMS = 1 << 17


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


def _moments(mean, squares, mean_more, squares_more, share, weight):
    """Of two parts of n and n_more elements: share is n_more / (n + n_more), weight that times n."""
    apart = mean_more - mean
    return mean + apart * share, squares + squares_more + apart * apart * weight


def _sums(a, b, a_more, b_more, share, weight):
    return a + a_more, b + b_more


def _merging(op: str):
    """What joins two pairs of sums, numbers or vectors of them."""
    return _moments if op == "bn_train" else _sums


@cache
def merge(op: str):
    """Compiled-in function (count, a, b, of more: count, a, b) -> (a, b) of both."""
    joined = njit(**DEVICE)(_merging(op))

    @njit(**DEVICE)
    def merged(n, a, b, n_more, a_more, b_more):
        share = n_more / max(n + n_more, 1.0)
        return joined(a, b, a_more, b_more, share, n * share)

    return merged


@cache
def merge_row(v: Variant):
    """Intrinsic (n, share, weight, a, b, a_more, b_more): the sums of n channels, in float64, merged with more of each
    into the first two rows."""
    vector = ir.VectorType(FLOAT["f64"], v.vl)

    def codegen(context, builder, sig, args):
        n, share, weight, *rows = args
        share, weight = (Lanes(builder, splat(builder, each, vector), "f64") for each in (share, weight))

        def step(i, mask):
            slots = [element(builder, row, i, vector, 8) for row in rows]
            given = [Lanes(builder, load(builder, slot, vector, 8, mask), "f64") for slot in slots]
            for slot, merged in zip(slots[:2], _merging(v.op)(*given, share, weight), strict=True):
                store(builder, merged.value, slot, 8, mask)

        by_vectors(builder, n, v.vl, step)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, n, share, weight, a, b, a_more, b_more):
        return signature(types.none, types.int64, *[types.float64] * 2, *[types.int64] * 4), codegen

    return run
