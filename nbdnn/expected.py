"""Outputs that are known: what a problem's reference says, for all of its outputs or for some of a big one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

# A sum of K terms of either sign may be off by this many eps * sqrt(K) times the root of the sum of their squares: see
# `nbdnn.tolerance`.
COEFFICIENT = 8.0


@dataclass(frozen=True)
class Sample:
    """Some elements of one output: where they are, and what they are.

    ``index`` is one array an axis of the output, so that ``output[sample.index]`` lines up with the other fields.
    """

    index: tuple[np.ndarray, ...]
    value: np.ndarray


@dataclass(frozen=True)
class ConvSample(Sample):
    """Of a convolution, with the size of what was summed.

    ``rss`` and ``sum_abs`` are the root sum of squares and the sum of magnitudes of all terms: every product (times
    alpha), bias, residual and beta * out. ``peak`` is the largest magnitude among convolution, alpha * convolution +
    beta * out, sum and result: of what steps that are not fused round.
    """

    rss: np.ndarray
    sum_abs: np.ndarray
    peak: np.ndarray


@dataclass(frozen=True)
class BoundedSample(Sample):
    """Of any other op. ``slack``: the error that is permitted before the result is rounded to `dtype`, in units of eps
    of the compute type; 0 is exact. narrow_slack: the same for who rounds to 16 bits on the way, None: not known."""

    slack: np.ndarray
    dtype: str
    narrow_slack: np.ndarray | None = None


def ends_and_some(extent: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` different indices below `extent`: a quarter at its beginning, a quarter at its end, the rest random."""
    if count >= extent:
        return np.arange(extent)
    end = max(1, count // 4)
    middle = end + rng.choice(max(extent - 2 * end, 0), max(count - 2 * end, 0), replace=False)
    return np.unique(np.concatenate([np.arange(end), middle, np.arange(extent - end, extent)]))


def positions(extents: tuple[int, ...], count: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """`count` positions in a box: all its corners, then random ones, half of their coordinates near an end."""
    if count >= prod(extents):
        return tuple(axis.ravel() for axis in np.indices(extents))
    corners = np.array(list(np.ndindex(*(2,) * len(extents))))[:count] * (np.array(extents) - 1)
    columns = []
    for axis, extent in enumerate(extents):
        anywhere = rng.integers(extent, size=count)
        near_an_end = rng.choice([0, 1, *(extent - e for e in range(1, 9))], size=count) % extent
        column = np.where(rng.random(count) < 0.5, anywhere, near_an_end)
        column[: len(corners)] = corners[:, axis]
        columns.append(column)
    return tuple(columns)
