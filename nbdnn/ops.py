"""The op objects of Theano, for programs that were written with them: small callables over the functions of nbdnn.

An op is made once and called often; for the ``*_once`` policies it is its own layer. ``op.grad(inputs, output_grads)``
gives the gradient with respect to each input, None where there is none. What Theano computed symbolically happens at
once, so `output` is the array that is scaled by beta and, with ``inplace=True``, overwritten; where it is not read, its
shape will do, and for the forward None.
"""

from __future__ import annotations

from typing import Any

from nbdnn import conv
from nbdnn.array import dense_copy, library_of, view
from nbdnn.conv import Axes, BorderMode, get_conv_out_shape
from nbdnn.conv_arguments import check_algo, check_described
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.ops_bn import GpuDnnBatchNorm, GpuDnnBatchNormGrad, GpuDnnBatchNormInference
from nbdnn.ops_dropout import GpuDnnDropoutOp
from nbdnn.ops_layer import Layered
from nbdnn.ops_pool import GpuDnnPool, GpuDnnPoolDesc, GpuDnnPoolGrad
from nbdnn.ops_rnn import GpuDnnRNNOp
from nbdnn.ops_softmax import GpuDnnSoftmax, GpuDnnSoftmaxGrad
from nbdnn.ops_spatialtf import (
    GpuDnnTransformerGradI,
    GpuDnnTransformerGradT,
    GpuDnnTransformerGrid,
    GpuDnnTransformerSampler,
)

__all__ = [
    "GpuDnnBatchNorm",
    "GpuDnnBatchNormGrad",
    "GpuDnnBatchNormInference",
    "GpuDnnConv",
    "GpuDnnConv3d",
    "GpuDnnConv3dGradI",
    "GpuDnnConv3dGradW",
    "GpuDnnConvDesc",
    "GpuDnnConvGradI",
    "GpuDnnConvGradW",
    "GpuDnnDropoutOp",
    "GpuDnnPool",
    "GpuDnnPoolDesc",
    "GpuDnnPoolGrad",
    "GpuDnnRNNOp",
    "GpuDnnSoftmax",
    "GpuDnnSoftmaxGrad",
    "GpuDnnTransformerGradI",
    "GpuDnnTransformerGradT",
    "GpuDnnTransformerGrid",
    "GpuDnnTransformerSampler",
]


class GpuDnnConvDesc:
    """What a convolution does besides its operands. Called with the filters' shape, as in Theano, it is itself."""

    def __init__(
        self,
        border_mode: BorderMode = "valid",
        subsample: Axes = 1,
        dilation: Axes = 1,
        conv_mode: str = "conv",
        precision: str | None = None,
        num_groups: int = 1,
    ) -> None:
        check_described(conv_mode, precision)
        self.border_mode, self.subsample, self.dilation = border_mode, subsample, dilation
        self.conv_mode, self.precision, self.num_groups = conv_mode, precision, num_groups

    def __call__(self, kern_shape: tuple[int, ...] | None = None) -> GpuDnnConvDesc:
        return self


class _Conv(Layered):
    """What the three ops share. ndim: number of spatial axes, None where the operands decide."""

    op: str
    ndim: int | None = None

    def __init__(self, algo: str | None, inplace: bool, num_groups: int) -> None:
        if algo is not None:
            check_algo(self.op, self.ndim or 2, algo)  # in 2-D there are all of them
        self.algo, self.inplace, self.num_groups = algo, inplace, num_groups
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(algo={self.algo!r}, inplace={self.inplace}, num_groups={self.num_groups})"

    def _run(self, name: str, operands: tuple, desc: GpuDnnConvDesc, output: Any, alpha: float, beta: float) -> Any:
        """The function of nbdnn called `name`, for the rank of its first operand."""
        if not isinstance(desc, GpuDnnConvDesc):
            raise InvalidType(f"desc is {desc!r}, expected a GpuDnnConvDesc")
        ndim = len(view(operands[0], "operand").shape) - 2
        if self.ndim not in (None, ndim):
            raise InvalidType(f"{type(self).__name__} takes arrays of 5 axes, not {ndim + 2}")
        if desc.num_groups != self.num_groups:
            raise InvalidProblem(f"num_groups is {self.num_groups} in the op, {desc.num_groups} in its descriptor")
        out = None if isinstance(output, tuple) else output
        if out is not None and not self.inplace:
            out = _copied(out) if beta else None
        result = getattr(conv, name + ("3d" if ndim == 3 else ""))(
            *operands,
            border_mode=desc.border_mode,
            subsample=desc.subsample,
            dilation=desc.dilation,
            conv_mode=desc.conv_mode,
            precision=desc.precision,
            num_groups=self.num_groups,
            algo=self.algo,
            layer=self._layer,
            alpha=alpha,
            beta=beta,
            out=out,
        )
        return result if out is None or out is output else library_of(output).given(result)


class GpuDnnConv(_Conv):
    """The forward: ``GpuDnnConv(algo)(img, kern, output, desc)``."""

    op = "conv_fwd"

    def __init__(self, algo: str | None = None, inplace: bool = False, num_groups: int = 1) -> None:
        super().__init__(algo, inplace, num_groups)

    def __call__(
        self, img: Any, kern: Any, output: Any, desc: GpuDnnConvDesc, alpha: float = 1.0, beta: float = 0.0
    ) -> Any:
        """alpha * conv(img, kern) + beta * output."""
        return self._run("dnn_conv", (img, kern), desc, output, alpha, beta)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (img, kern, output, desc, alpha, beta)."""
        (img, kern, output, desc, alpha, beta), top = _given(inputs, output_grads)
        d_img = self._own(GpuDnnConvGradI(num_groups=self.num_groups))(kern, top, _shape(img), desc, alpha)
        d_kern = self._own(GpuDnnConvGradW(num_groups=self.num_groups))(img, top, _shape(kern), desc, alpha)
        return [d_img, d_kern, _scaled(top, output, beta), None, None, None]

    @staticmethod
    def get_out_shape(
        ishape: tuple[int, ...],
        kshape: tuple[int, ...],
        border_mode: BorderMode = "valid",
        subsample: Axes = 1,
        dilation: Axes = 1,
    ) -> tuple[int, ...]:
        """Shape of the result: `nbdnn.get_conv_out_shape`."""
        return get_conv_out_shape(ishape, kshape, border_mode, subsample, dilation)


class GpuDnnConvGradW(_Conv):
    """The gradient of the filters: ``GpuDnnConvGradW()(img, topgrad, output, desc)``."""

    op = "conv_bwd_filter"

    def __init__(self, inplace: bool = False, algo: str | None = None, num_groups: int = 1) -> None:
        super().__init__(algo, inplace, num_groups)

    def __call__(
        self, img: Any, topgrad: Any, output: Any, desc: GpuDnnConvDesc, alpha: float = 1.0, beta: float = 0.0
    ) -> Any:
        """alpha * gradweight(img, topgrad) + beta * output."""
        return self._run("dnn_gradweight", (img, topgrad, _shape(output)), desc, output, alpha, beta)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (img, topgrad, output, desc, alpha, beta)."""
        (img, top, output, desc, alpha, beta), kern = _given(inputs, output_grads)
        d_img = self._own(GpuDnnConvGradI(num_groups=self.num_groups))(kern, top, _shape(img), desc, alpha)
        d_top = self._own(GpuDnnConv(num_groups=self.num_groups))(img, kern, _shape(top), desc, alpha)
        return [d_img, d_top, _scaled(kern, output, beta), None, None, None]


class GpuDnnConvGradI(_Conv):
    """The gradient of the images: ``GpuDnnConvGradI()(kern, topgrad, output, desc)``."""

    op = "conv_bwd_data"

    def __init__(self, inplace: bool = False, algo: str | None = None, num_groups: int = 1) -> None:
        super().__init__(algo, inplace, num_groups)

    def __call__(
        self, kern: Any, topgrad: Any, output: Any, desc: GpuDnnConvDesc, alpha: float = 1.0, beta: float = 0.0
    ) -> Any:
        """alpha * gradinput(kern, topgrad) + beta * output."""
        return self._run("dnn_gradinput", (kern, topgrad, _shape(output)), desc, output, alpha, beta)

    def grad(self, inputs: tuple, output_grads: tuple) -> list[Any]:
        """Gradients with respect to (kern, topgrad, output, desc, alpha, beta)."""
        (kern, top, output, desc, alpha, beta), img = _given(inputs, output_grads)
        d_kern = self._own(GpuDnnConvGradW(num_groups=self.num_groups))(img, top, _shape(kern), desc, alpha)
        d_top = self._own(GpuDnnConv(num_groups=self.num_groups))(img, kern, _shape(top), desc, alpha)
        return [d_kern, d_top, _scaled(img, output, beta), None, None, None]


class GpuDnnConv3d(GpuDnnConv):
    """`GpuDnnConv` for 5-D arrays only."""

    ndim = 3


class GpuDnnConv3dGradW(GpuDnnConvGradW):
    """`GpuDnnConvGradW` for 5-D arrays only."""

    ndim = 3


class GpuDnnConv3dGradI(GpuDnnConvGradI):
    """`GpuDnnConvGradI` for 5-D arrays only."""

    ndim = 3


def _given(inputs: tuple, output_grads: tuple) -> tuple[tuple, Any]:
    """The six inputs of an op, of which alpha and beta may be left out, and the gradient of its only output."""
    if not isinstance(inputs, tuple | list) or not 4 <= len(inputs) <= 6:
        raise InvalidProblem(
            f"inputs are {_length(inputs)}, expected a tuple of four to six, of which the fourth is desc"
        )
    if not isinstance(output_grads, tuple | list) or len(output_grads) != 1:
        raise InvalidProblem(f"output_grads are {_length(output_grads)}, expected a tuple of one")
    return (*inputs, *(1.0, 0.0)[len(inputs) - 4 :]), output_grads[0]


def _length(given: Any) -> str:
    return f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, tuple | list) else "")


def _shape(array_or_shape: Any) -> tuple[int, ...]:
    if array_or_shape is None:
        raise InvalidProblem("output is None: a gradient needs an array, or the shape of one")
    if isinstance(array_or_shape, tuple):
        return array_or_shape
    if not hasattr(array_or_shape, "shape"):
        raise InvalidProblem(f"output is {array_or_shape!r}, expected an array or a tuple, its shape")
    return tuple(array_or_shape.shape)


def _scaled(grad: Any, output: Any, beta: float) -> Any:
    """Gradient with respect to `output`; None where it was no array."""
    return None if output is None or isinstance(output, tuple) else grad * beta


def _copied(array: Any) -> Any:
    seen = view(array, "output")
    return dense_copy(array, bool(seen.layout), seen.dtype)
