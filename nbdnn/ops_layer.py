"""What the op objects of Theano share; `nbdnn.ops` has them all."""

from __future__ import annotations

from itertools import count
from typing import TypeVar

_layers = count()


class Layered:
    """For the ``*_once`` policies an op is its own layer, with the ops that compute its gradients; of a layer that is a
    number nothing is kept beyond the process."""

    def __init__(self) -> None:
        self._layer = next(_layers)

    def _own(self, op: OpT) -> OpT:
        """`op` as one of this layer: what a gradient makes at every call would else choose anew at every call."""
        op._layer = self._layer
        return op


OpT = TypeVar("OpT", bound=Layered)
