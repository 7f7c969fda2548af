"""Numbers with the error that they may have: what a reference of many steps is computed with.

``slack`` is in units of eps of the compute type. A sum of products is off by the model of `nbdnn.tolerance`; the errors
that its factors bring with them are of either sign and add up as squares do. Everything else is off by a few eps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbdnn.expected import COEFFICIENT

LARGEST_EPS = 2.0**-23  # of the compute types
_FEW = 8.0  # eps of an exponential or a tangent by polynomial, and the quotient after it


@dataclass(frozen=True)
class Inexact:
    """Float64 values and, of the same shape, how far off an implementation's may be."""

    value: np.ndarray
    slack: np.ndarray

    def __add__(self, other: Inexact) -> Inexact:
        value = self.value + other.value
        return Inexact(value, self.slack + other.slack + abs(value))

    def __sub__(self, other: Inexact) -> Inexact:
        return self + Inexact(-other.value, other.slack)

    def __mul__(self, other: Inexact) -> Inexact:
        value = self.value * other.value
        return Inexact(value, abs(self.value) * other.slack + abs(other.value) * self.slack + abs(value))

    def __getitem__(self, index: Any) -> Inexact:
        return Inexact(self.value[index], self.slack[index])

    def times(self, matrix: np.ndarray | Inexact) -> Inexact:
        """The rows, multiplied with a matrix (k, n)."""
        factor = matrix if isinstance(matrix, Inexact) else exact(matrix)
        squares = factor.value * factor.value
        squared = COEFFICIENT**2 * len(squares) * (self.value**2 @ squares) + self.slack**2 @ squares
        if isinstance(matrix, Inexact):
            squared += self.value**2 @ (matrix.slack * matrix.slack)
        return Inexact(self.value @ factor.value, np.sqrt(squared))

    def stored(self, roundings: float) -> Inexact:
        """After a stay in memory, as a number of a type whose roundings are that many eps."""
        return Inexact(self.value, self.slack + roundings * abs(self.value)) if roundings else self

    def reshape(self, *shape: int) -> Inexact:
        return Inexact(self.value.reshape(*shape), self.slack.reshape(*shape))

    @property
    def T(self) -> Inexact:
        return Inexact(self.value.T, self.slack.T)


def exact(value: np.ndarray | float) -> Inexact:
    """What is given: off by nothing."""
    value = np.asarray(value, np.float64)
    return Inexact(value, np.zeros_like(value))


def sigmoid(x: Inexact) -> Inexact:
    value = 1 / (1 + np.exp(-x.value))
    return Inexact(value, value * (1 - value) * x.slack + _FEW * value)


def tanh(x: Inexact) -> Inexact:
    value = np.tanh(x.value)
    return Inexact(value, (1 - value * value) * x.slack + _FEW * abs(value))


def relu(x: Inexact) -> Inexact:
    """Exactly 0 where x is negative beyond doubt."""
    return Inexact(np.maximum(x.value, 0), np.where(x.value < -LARGEST_EPS * x.slack, 0, x.slack))


def stacked(parts: list[Inexact], axis: int = 0) -> Inexact:
    return Inexact(np.stack([p.value for p in parts], axis), np.stack([p.slack for p in parts], axis))


def joined(parts: list[Inexact], axis: int = -1) -> Inexact:
    return Inexact(np.concatenate([p.value for p in parts], axis), np.concatenate([p.slack for p in parts], axis))
