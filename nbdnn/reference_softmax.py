"""Softmax and its gradient in plain float64 NumPy.

    accurate  y[i] = exp(x[i] - m) / sum_j exp(x[j] - m), m = max_j x[j]    fast: m = 0
    log       y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    backward  dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]                   log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

How far off an implementation may be: a difference x - m is off by half an eps of its own size, which exp makes a
relative error; exp, log and the quotient by polynomial are off by a few eps; sums by the model of `nbdnn.tolerance`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nbdnn.expected import COEFFICIENT, BoundedSample, Sample, ends_and_some
from nbdnn.problem_softmax import SoftmaxProblem

Arrays = Mapping[str, np.ndarray]
_POLYNOMIAL_EPS = 8.0  # of exp, log and a quotient together
_TINY = 2.0**-126 / 2.0**-23  # what exp may lose below the smallest normal number, in eps of float32


def compute(problem: SoftmaxProblem, operands: Arrays, scalars: tuple[float, ...] = ()) -> np.ndarray:
    """The output in float64."""
    (out,) = samples(problem, operands, scalars, None).values()
    result = np.empty(problem.shape)
    result[out.index] = out.value
    return result


def samples(
    problem: SoftmaxProblem, operands: Arrays, scalars: tuple[float, ...], count: int | None
) -> dict[str, Sample]:
    """Whole rows of the output, by its name: at least `count` elements, or all."""
    *inputs, out = problem.operands
    axis = 1 if problem.mode == "channel" else 0
    lengthwise = [1] if problem.mode == "channel" else list(range(1, len(problem.shape)))
    others = [a for a in range(len(problem.shape)) if a not in lengthwise]
    extents = [problem.shape[a] for a in others]
    rows, length = int(np.prod(extents)), int(np.prod([problem.shape[a] for a in lengthwise]))
    wanted = rows if count is None else max(8, -(-count // max(length, 1)))
    chosen = np.unravel_index(ends_and_some(rows, wanted, np.random.default_rng(0)), extents)
    along = np.unravel_index(np.arange(length), [problem.shape[a] for a in lengthwise])
    index: list[np.ndarray] = [np.empty(0)] * len(problem.shape)
    for a, where in zip(others, chosen, strict=True):
        index[a] = np.broadcast_to(where[:, None], (len(where), length))
    for a, where in zip(lengthwise, along, strict=True):
        index[a] = np.broadcast_to(where[None, :], (len(chosen[axis - 1]), length))
    at = tuple(index)
    given = [operands[operand.name][at].astype(np.float64) for operand in inputs]
    with np.errstate(all="ignore"):
        value, slack = (_forward if problem.op == "softmax_fwd" else _backward)(problem, *given)
    flat = tuple(axis.ravel() for axis in at)
    return {out.name: BoundedSample(flat, value.ravel(), slack.ravel(), problem.dtype)}


def _forward(problem: SoftmaxProblem, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shift = 0.0 if problem.algorithm == "fast" else x.max(axis=1, keepdims=True)
    shifted = x - shift
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    of_sum = _POLYNOMIAL_EPS + np.sqrt(x.shape[1])
    if problem.algorithm == "log":
        value = shifted - np.log(total)
        return value, abs(shifted) + abs(value) + of_sum
    value = powers / total
    # The terms that matter to the sum are the large ones, whose differences are small: they are off by less.
    mean_shift = (powers * abs(shifted)).sum(axis=1, keepdims=True) / total
    return value, value * (abs(shifted) + mean_shift + of_sum) + _TINY


def _backward(problem: SoftmaxProblem, dy: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    terms = dy if problem.algorithm == "log" else dy * y
    total = terms.sum(axis=1, keepdims=True)
    of_sum = COEFFICIENT * np.sqrt(dy.shape[1]) * np.sqrt((terms * terms).sum(axis=1, keepdims=True))
    if problem.algorithm == "log":
        power = np.exp(y)
        value = dy - power * total
        return value, abs(dy) + abs(value) + power * ((_POLYNOMIAL_EPS + abs(y)) * abs(total) + of_sum)
    value = (dy - total) * y
    return value, 2 * abs(y) * (abs(dy) + abs(total) + of_sum)
