"""The pooling objects of Theano, for `nbdnn.ops`."""

from __future__ import annotations

from typing import Any

from nbdnn.ops_layer import Layered
from nbdnn.pool import Axes, dnn_pool, dnn_pool_grad
from nbdnn.pool_call import mode_named


class GpuDnnPoolDesc:
    """What a pooling does: windows of extents `ws`, `stride` apart, `pad` around the image."""

    def __init__(self, ws: Axes = (1, 1), stride: Axes = (1, 1), mode: str = "max", pad: Axes = (0, 0)) -> None:
        mode_named(mode)
        self.ws, self.stride, self.mode, self.pad = ws, stride, mode, pad

    def __call__(self) -> GpuDnnPoolDesc:
        return self


class _Pool(Layered):
    def __init__(self, mode: str = "max") -> None:
        mode_named(mode)
        self.mode = mode
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.mode!r})"


class GpuDnnPool(_Pool):
    """The forward: ``GpuDnnPool(mode)(img, ws, stride, pad)``."""

    def __call__(self, img: Any, ws: Axes, stride: Axes | None = None, pad: Axes | None = None) -> Any:
        """pool(img)."""
        return dnn_pool(img, ws, stride, self.mode, pad, layer=self._layer)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (img, ws, stride, pad)."""
        (img, *where), (top,) = inputs, output_grads
        return [self._own(GpuDnnPoolGrad(self.mode))(img, self(img, *where), top, *where), None, None, None]


class GpuDnnPoolGrad(_Pool):
    """The gradient: ``GpuDnnPoolGrad(mode)(inp, out, out_grad, ws, stride, pad)``."""

    def __call__(
        self, inp: Any, out: Any, out_grad: Any, ws: Axes, stride: Axes | None = None, pad: Axes | None = None
    ) -> Any:
        """The gradient with respect to `inp`."""
        return dnn_pool_grad(inp, out, out_grad, ws, stride, self.mode, pad, layer=self._layer)
