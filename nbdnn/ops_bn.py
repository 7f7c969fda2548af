"""Theano's op objects of batch normalisation; `nbdnn.ops` has them all."""

from __future__ import annotations

from typing import Any

from nbdnn import call_setup
from nbdnn.array import library_of, view
from nbdnn.batchnorm import (
    dnn_batch_normalization_grad,
    dnn_batch_normalization_test,
    dnn_batch_normalization_test_grad,
    dnn_batch_normalization_train,
)
from nbdnn.batchnorm_call import mode_named
from nbdnn.ops_layer import Layered


class _BatchNorm(Layered):
    def __init__(self, mode: str) -> None:
        mode_named(mode)
        self.mode = mode
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.mode!r})"


class GpuDnnBatchNorm(_BatchNorm):
    """Training: ``GpuDnnBatchNorm(mode)(x, scale, bias)`` -> y, mean, invstd, and the new running averages.

    The averages come back where ``running_averages`` says so, and with the ``inplace`` arguments what was given is
    overwritten and returned.
    """

    def __init__(
        self,
        mode: str = "per-activation",
        running_averages: bool = False,
        inplace_running_mean: bool = False,
        inplace_running_var: bool = False,
        inplace_output: bool = False,
    ) -> None:
        super().__init__(mode)
        self.running_averages, self.inplace_output = running_averages, inplace_output
        self.inplace_running_mean, self.inplace_running_var = inplace_running_mean, inplace_running_var

    def __call__(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        epsilon: float = 1e-4,
        running_average_factor: float = 0.1,
        running_mean: Any = None,
        running_var: Any = None,
    ) -> tuple:
        """`nbdnn.dnn_batch_normalization_train`."""
        averages = (running_mean, running_var) if self.running_averages else (None, None)
        places = ("x", x), ("running_mean", averages[0]), ("running_var", averages[1])
        overwritten = (self.inplace_output, self.inplace_running_mean, self.inplace_running_var)
        for (name, array), inplace in zip(places, overwritten, strict=True):
            if inplace and array is not None:
                _demand_writable(name, array)
        results = dnn_batch_normalization_train(
            x, scale, bias, self.mode, epsilon, running_average_factor, *averages, layer=self._layer
        )
        y, mean, invstd, *new = results
        new = [
            _into(old, each) if inplace else each
            for old, each, inplace in zip(averages, new, overwritten[1:], strict=False)
        ]
        return (_into(x, y) if self.inplace_output else y, mean, invstd, *new)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (x, scale, bias, epsilon, ...), by that with respect to y alone."""
        x, scale, bias, *others = inputs
        epsilon = others[0] if others else 1e-4
        _, mean, invstd = dnn_batch_normalization_train(x, scale, bias, self.mode, epsilon, layer=self._layer)
        gradients = self._own(GpuDnnBatchNormGrad(self.mode))(x, output_grads[0], scale, mean, invstd, epsilon)
        return [*gradients, *(None for _ in others)]


class GpuDnnBatchNormInference(_BatchNorm):
    """Inference: ``GpuDnnBatchNormInference(mode)(x, scale, bias, mean, var)`` -> y; with ``inplace`` x is overwritten
    and returned."""

    def __init__(self, mode: str = "per-activation", inplace: bool = False) -> None:
        super().__init__(mode)
        self.inplace = inplace

    def __call__(
        self, x: Any, scale: Any, bias: Any, estimated_mean: Any, estimated_variance: Any, epsilon: float = 1e-4
    ) -> Any:
        """`nbdnn.dnn_batch_normalization_test`."""
        if self.inplace:
            _demand_writable("x", x)
        given = (x, scale, bias, estimated_mean, estimated_variance)
        y = dnn_batch_normalization_test(*given, self.mode, epsilon, layer=self._layer)
        return _into(x, y) if self.inplace else y

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (x, scale, bias, mean, variance, epsilon)."""
        x, scale, _, mean, variance, *others = inputs
        epsilon = others[0] if others else 1e-4
        given = (x, output_grads[0], scale, mean, variance)
        gradients = dnn_batch_normalization_test_grad(*given, self.mode, epsilon, layer=self._layer)
        return [*gradients, *(None for _ in others)]


class GpuDnnBatchNormGrad(_BatchNorm):
    """The gradient of training: ``GpuDnnBatchNormGrad(mode)(x, dy, scale, mean, invstd)`` -> dx, dscale, dbias."""

    def __init__(self, mode: str = "per-activation") -> None:
        super().__init__(mode)

    def __call__(self, x: Any, dy: Any, scale: Any, x_mean: Any, x_invstd: Any, epsilon: float = 1e-4) -> tuple:
        """`nbdnn.dnn_batch_normalization_grad`."""
        return dnn_batch_normalization_grad(x, dy, scale, x_mean, x_invstd, self.mode, epsilon, layer=self._layer)


def _demand_writable(name: str, array: Any) -> None:
    """Before anything is overwritten."""
    seen = view(array, name)
    call_setup.check_out(name, seen, seen.shape, seen.dtype)


def _into(target: Any, value: Any) -> Any:
    """`target`, overwritten with `value`."""
    library_of(target).copy(target, value)
    return target
