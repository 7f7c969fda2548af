"""Theano's op objects of softmax; `nbdnn.ops` has them by name."""

from __future__ import annotations

from typing import Any

from nbdnn.errors import check_one_of
from nbdnn.ops_layer import Layered
from nbdnn.problem_softmax import ALGORITHMS, MODES
from nbdnn.softmax import dnn_softmax, dnn_softmax_grad


class _Softmax(Layered):
    def __init__(self, algo: str, mode: str) -> None:
        check_one_of("algo", algo, ALGORITHMS)
        check_one_of("mode", mode, MODES)
        self.algo, self.mode = algo, mode
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(algo={self.algo!r}, mode={self.mode!r})"


class GpuDnnSoftmax(_Softmax):
    """``GpuDnnSoftmax('accurate', 'channel')(x)``: see `nbdnn.dnn_softmax`."""

    def __call__(self, x: Any) -> Any:
        return dnn_softmax(x, self.algo, self.mode, layer=self._layer)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradient with respect to x."""
        (x,), (dy,) = inputs, output_grads
        return [dnn_softmax_grad(dy, self(x), self.algo, self.mode, layer=self._layer)]


class GpuDnnSoftmaxGrad(_Softmax):
    """``GpuDnnSoftmaxGrad('accurate', 'channel')(dy, y)``: see `nbdnn.dnn_softmax_grad`."""

    def __call__(self, dy: Any, y: Any) -> Any:
        return dnn_softmax_grad(dy, y, self.algo, self.mode, layer=self._layer)
