"""The spatial transformer's objects of Theano, for `nbdnn.ops`."""

from __future__ import annotations

from typing import Any

from nbdnn.ops_layer import Layered
from nbdnn.spatialtf import (
    dnn_spatialtf_grid,
    dnn_spatialtf_grid_grad,
    dnn_spatialtf_sampler,
    dnn_spatialtf_sampler_grad,
)


class _Transformer(Layered):
    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class GpuDnnTransformerGrid(_Transformer):
    """The grid: ``GpuDnnTransformerGrid()(theta, out_dims)``, out_dims being (N, C, H, W) of the output."""

    def __call__(self, theta: Any, out_dims: tuple[int, int, int, int]) -> Any:
        """grid(theta)."""
        return dnn_spatialtf_grid(theta, out_dims, layer=self._layer)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (theta, out_dims)."""
        return [self._own(GpuDnnTransformerGradT())(output_grads[0]), None]


class GpuDnnTransformerSampler(_Transformer):
    """The sampler: ``GpuDnnTransformerSampler()(img, grid)``."""

    def __call__(self, img: Any, grid: Any) -> Any:
        """sampler(img, grid)."""
        return dnn_spatialtf_sampler(img, grid, layer=self._layer)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (img, grid)."""
        (img, grid), (dy,) = inputs, output_grads
        return list(self._own(GpuDnnTransformerGradI())(img, grid, dy))


class GpuDnnTransformerGradI(_Transformer):
    """The sampler's gradients: ``GpuDnnTransformerGradI()(img, grid, dy)`` -> dimg, dgrid."""

    def __call__(self, img: Any, grid: Any, dy: Any) -> tuple[Any, Any]:
        """The gradients with respect to `img` and `grid`."""
        return dnn_spatialtf_sampler_grad(img, grid, dy, layer=self._layer)


class GpuDnnTransformerGradT(_Transformer):
    """The grid's gradient: ``GpuDnnTransformerGradT()(dgrid)``."""

    def __call__(self, dgrid: Any) -> Any:
        """The gradient with respect to theta."""
        return dnn_spatialtf_grid_grad(dgrid, layer=self._layer)
