"""What the op objects of Theano share; `nbdnn.ops` has them all."""

from __future__ import annotations

from typing import TypeVar

from nbdnn.dispatch.policy import OpLayer


class Layered:
    """For the ``*_once`` policies an op is its own layer, with the ops that compute its gradients; ``time_once`` begins
    with what the database has of such layers."""

    def __init__(self) -> None:
        self._layer = OpLayer()

    def _own(self, op: OpT) -> OpT:
        """`op` as one of this layer: what a gradient makes at every call would else choose anew at every call."""
        op._layer = self._layer
        return op


OpT = TypeVar("OpT", bound=Layered)
