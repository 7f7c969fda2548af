"""The dropout object of Theano."""

from __future__ import annotations

from typing import Any

from nbdnn.array import dense_copy, view
from nbdnn.dropout import dnn_dropout, dnn_dropout_grad
from nbdnn.ops_layer import Layered


class GpuDnnDropoutOp(Layered):
    """``GpuDnnDropoutOp(inplace)(x, dropout, state)`` -> y, mask, state; with ``inplace`` the given state advances."""

    def __init__(self, inplace: bool = False) -> None:
        self.inplace = inplace
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(inplace={self.inplace})"

    def __call__(self, x: Any, dropout: float = 0.0, state: Any = None) -> tuple[Any, Any, Any]:
        if state is not None and not self.inplace:
            view(state, "state", ("i64",))
            state = dense_copy(state, False, "i64")
        return dnn_dropout(x, dropout, state=state, layer=self._layer)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (x, dropout, mask), where mask is what the call returned."""
        _, dropout, mask = inputs
        return [dnn_dropout_grad(output_grads[0], mask, dropout, layer=self._layer), None, None]
