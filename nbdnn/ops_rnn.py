"""The recurrent object of Theano; `nbdnn.ops` has them all."""

from __future__ import annotations

from typing import Any

from nbdnn.errors import InvalidProblem, check_one_of
from nbdnn.ops_layer import Layered
from nbdnn.problem_rnn import GATES
from nbdnn.rnn import DIRECTION_MODES, RNNBlock


class GpuDnnRNNOp(Layered):
    """``GpuDnnRNNOp(rnn_mode, direction_mode)(desc, w, x, hx, cx)`` -> tape, y, hy, and of an LSTM cy.

    desc: the `nbdnn.RNNBlock` with sizes and input mode; what it says of mode and direction has to be the same. The
    tape takes the place of Theano's reserve, and is what `RNNBlock.grad` reads. An op is its own layer for the
    ``*_once`` policies.
    """

    def __init__(self, rnn_mode: str, direction_mode: str = "unidirectional") -> None:
        check_one_of("rnn_mode", rnn_mode, tuple(GATES))
        check_one_of("direction_mode", direction_mode, DIRECTION_MODES)
        self.rnn_mode, self.direction_mode = rnn_mode, direction_mode
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rnn_mode!r}, {self.direction_mode!r})"

    def __call__(self, desc: RNNBlock, w: Any, x: Any, hx: Any = None, cx: Any = None) -> tuple:
        """`nbdnn.RNNBlock.apply` in training, the tape first."""
        if (desc.rnn_mode, desc.direction_mode) != (self.rnn_mode, self.direction_mode):
            raise InvalidProblem(f"{desc!r} is no descriptor of {self!r}")
        *results, tape = desc.apply(w, x, hx, cx, training=True, layer=self._layer)
        return (tape, *results)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (desc, w, x, hx, cx), by those of (tape, y, hy, cy), of which the first is not read
        and the last may be None. The forward runs again."""
        desc = inputs[0]
        tape, y, *_ = self(*inputs)
        _, dy, *rest = output_grads
        gradients = desc.grad(tape, y * 0 if dy is None else dy, *rest, retain_tape=False, layer=self._layer)
        return [None, *gradients][: len(inputs)]
