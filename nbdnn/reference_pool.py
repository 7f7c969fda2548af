"""Pooling and its gradient in plain float64 NumPy.

    max   y[p] = max over r of x[p*u + r - pad], outside of the image -inf; NaN where one of them is NaN
    sum   y[p] = sum over r of x[p*u + r - pad], outside of the image 0
    average_inc_pad: the sum over the size of the window; average_exc_pad: over its part inside of the image, 0 where
    there is none

The gradient of a maximum goes to the element that is it: of equal ones to the first in row-major order, of NaNs to the
last, as in PyTorch; in max_deterministic and in max alike. Sums by the model of `nbdnn.tolerance`, a quotient is off by
a few eps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod

import numpy as np

from nbdnn.expected import COEFFICIENT, BoundedSample, Sample, positions
from nbdnn.problem_pool import PoolProblem

Arrays = Mapping[str, np.ndarray]
_Index = tuple[np.ndarray, ...]
_QUOTIENT_EPS = 4.0  # of a reciprocal a spatial axis, and its product with the sum


def compute(problem: PoolProblem, operands: Arrays, scalars: tuple[float, ...] = ()) -> np.ndarray:
    """The output in float64."""
    ((name, out),) = samples(problem, operands, scalars, None).items()
    result = np.empty(next(o.shape for o in problem.operands if o.name == name))
    result[out.index] = out.value
    return result


def derived(problem: PoolProblem, operands: Arrays) -> dict[str, np.ndarray]:
    """What y must be in a gradient: the maxima of x."""
    if problem.op == "pool_fwd" or not problem.is_max:
        return {}
    x, maxima = operands["x"], np.full(problem.y_shape, -np.inf, operands["x"].dtype)
    pads = [(0, 0), (0, 0), *((pad, pad) for pad in problem.pad)]
    padded = np.pad(x, pads, constant_values=-np.inf)
    for tap in np.ndindex(*problem.window):
        axes = zip(tap, problem.stride, problem.out_spatial, strict=True)
        reached = padded[(slice(None), slice(None), *(slice(r, r + (p - 1) * u + 1, u) for r, u, p in axes))]
        with np.errstate(invalid="ignore"):  # of NaNs that signal
            np.maximum(maxima, reached, out=maxima)
    return {"y": maxima}


def samples(problem: PoolProblem, operands: Arrays, scalars: tuple[float, ...], count: int | None) -> dict[str, Sample]:
    """The output, by its name, at `count` positions or all."""
    *_, out = problem.operands
    index = positions(out.shape, out.size_elems if count is None else count, np.random.default_rng(0))
    with np.errstate(all="ignore"):
        value, slack = (_forward if problem.op == "pool_fwd" else _backward)(problem, operands, index)
    return {out.name: BoundedSample(index, value, slack, problem.dtype)}


def _forward(problem: PoolProblem, operands: Arrays, index: _Index) -> tuple[np.ndarray, np.ndarray]:
    x = operands["x"]
    if problem.is_max:
        return _maxima(problem, x, index)[0], np.zeros(len(index[0]))
    total, squares = np.zeros(len(index[0])), np.zeros(len(index[0]))
    for at, inside in _taps(problem, index):
        term = np.where(inside, x[at].astype(np.float64), 0.0)
        total, squares = total + term, squares + term * term
    scale = _scale(problem, index)
    value = total * scale
    slack = COEFFICIENT * np.sqrt(prod(problem.window) * squares) * scale + _QUOTIENT_EPS * abs(value)
    return value, slack


def _backward(problem: PoolProblem, operands: Arrays, index: _Index) -> tuple[np.ndarray, np.ndarray]:
    """Every window that covers a position gives it its gradient, a share of it, or nothing."""
    total, squares = np.zeros(len(index[0])), np.zeros(len(index[0]))
    windows, choice = 0, _choices(problem, operands["x"], index) if problem.is_max else None
    for at, inside in _windows(problem, index):
        windows += 1
        term = operands["dy"][at].astype(np.float64)
        if choice:
            chosen = choice(at)
            inside = inside & np.all([a == b for a, b in zip(chosen, index[2:], strict=True)], axis=0)
        else:
            term = term * _scale(problem, at)
        term = np.where(inside, term, 0.0)
        total, squares = total + term, squares + term * term
    return total, COEFFICIENT * np.sqrt(windows * squares) + _QUOTIENT_EPS * abs(total)


def _taps(problem: PoolProblem, index: _Index) -> Iterator[tuple[_Index, np.ndarray]]:
    """For each tap in row-major order: what the windows `index` reach, clipped to the image, and if it is there."""
    for tap in np.ndindex(*problem.window):
        axes = zip(index[2:], problem.stride, tap, problem.pad, strict=True)
        reached = [p * step + r - pad for p, step, r, pad in axes]
        yield _clipped(index, reached, problem.spatial)


def _windows(problem: PoolProblem, index: _Index) -> Iterator[tuple[_Index, np.ndarray]]:
    """The windows that may cover the image's positions `index`, clipped, and whether they do."""
    nearest = [(i + pad) // step for i, pad, step in zip(index[2:], problem.pad, problem.stride, strict=True)]
    reaches = [range((taps - 1) // step + 1) for taps, step in zip(problem.window, problem.stride, strict=True)]
    for back in product(*reaches):
        windows = [last - steps for last, steps in zip(nearest, back, strict=True)]
        at, exists = _clipped(index, windows, problem.out_spatial)
        axes = zip(index[2:], windows, problem.pad, problem.stride, problem.window, strict=True)
        covers = np.all([i + pad - p * step < taps for i, p, pad, step, taps in axes], axis=0)
        yield at, exists & covers


def _clipped(index: _Index, at: list[np.ndarray], extents: tuple[int, ...]) -> tuple[_Index, np.ndarray]:
    inside = np.all([(a >= 0) & (a < extent) for a, extent in zip(at, extents, strict=True)], axis=0)
    clipped = (np.clip(a, 0, extent - 1) for a, extent in zip(at, extents, strict=True))
    return (*index[:2], *clipped), inside


def _maxima(problem: PoolProblem, x: np.ndarray, index: _Index) -> tuple[np.ndarray, list[np.ndarray]]:
    """The maxima of the windows `index`, and where they are in the image; -1 of a window that is all padding."""
    best = np.full(len(index[0]), -np.inf)
    chosen = [np.full(len(index[0]), -1) for _ in problem.spatial]
    for at, inside in _taps(problem, index):
        value = x[at].astype(np.float64)
        better = inside & ((value > best) | np.isnan(value) | (chosen[0] < 0))
        best = np.where(better, value, best)
        chosen = [np.where(better, a, before) for a, before in zip(at[2:], chosen, strict=True)]
    return best, chosen


def _choices(problem: PoolProblem, x: np.ndarray, index: _Index) -> Callable[[_Index], list[np.ndarray]]:
    """Where the maxima of windows that may cover the positions are: a function of windows, each of which is searched
    once."""
    asked = np.zeros(problem.y_shape, bool)
    for at, _ in _windows(problem, index):
        asked[at] = True
    every = np.flatnonzero(asked)
    chosen = _maxima(problem, x, tuple(np.unravel_index(every, problem.y_shape)))[1]

    def choice(at: _Index) -> list[np.ndarray]:
        places = np.searchsorted(every, np.ravel_multi_index(at, problem.y_shape))
        return [axis[places] for axis in chosen]

    return choice


def _scale(problem: PoolProblem, index: _Index) -> np.ndarray:
    """What the sum of a window is multiplied by; 0 where it is all padding and only the image counts."""
    if problem.mode == "sum":
        return np.ones(len(index[0]))
    if problem.mode == "average_inc_pad":
        return np.full(len(index[0]), 1.0 / prod(problem.window))
    counts = np.ones(len(index[0]))
    for p, step, taps, pad, extent in zip(
        index[2:], problem.stride, problem.window, problem.pad, problem.spatial, strict=True
    ):
        counts *= np.maximum(np.minimum(p * step - pad + taps, extent) - np.maximum(p * step - pad, 0), 0)
    return np.divide(1.0, counts, where=counts > 0, out=np.zeros(len(counts)))
