"""Named lists of problems: the layers of well-known networks that nbdnn has functions for.

>>> layers = workload("resnet50", batch=1)
>>> layers[0].name, str(layers[0].problem), sum(layer.count for layer in layers)
('conv1', 'conv_fwd:f32:n1c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1:cross:nchw', 109)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbdnn.errors import InvalidProblem
from nbdnn.problem import DEFAULT_COMPUTE, Problem
from nbdnn.problem_bn import BnProblem
from nbdnn.problem_conv import ConvProblem
from nbdnn.problem_dropout import DropoutProblem
from nbdnn.problem_pool import PoolProblem
from nbdnn.problem_rnn import RnnProblem
from nbdnn.problem_softmax import SoftmaxProblem


@dataclass(frozen=True)
class Layer:
    """A problem of a network: the first layer that poses it, and how often the network does."""

    problem: Problem
    name: str
    count: int


def workload(
    name: str, batch: int = 1, dtype: str = "f32", layout: str = "nchw", *, train: bool = False
) -> list[Layer]:
    """The different problems of a network, in the order in which it first meets them.

    Parameters
    ----------
    name
        One of `WORKLOADS`.
    layout
        'nchw' or 'nhwc'; a 3-D network takes these for 'ncdhw' and 'ndhwc'.
    train
        Batch normalisation as in training, dropout, logarithms of the softmax; and the gradients: of every convolution
        by its filter, and of every layer but the first by its input.
    """
    return merged(network(name, batch, dtype, layout, train=train))


def network(name: str, batch: int = 1, dtype: str = "f32", layout: str = "nchw", *, train: bool = False) -> list[Layer]:
    """Every layer of a network in the order of execution, each with count 1; arguments as for `workload`."""
    if name not in _NETWORKS:
        raise InvalidProblem(f"workload {name!r} is not one of {', '.join(WORKLOADS)}")
    net = _Net(batch, dtype, layout, train)
    forward = [Layer(problem, layer, 1) for layer, problem in _NETWORKS[name](net)]
    return with_gradients(forward) if train else forward


def with_gradients(forward: list[Layer]) -> list[Layer]:
    """The layers of a network, then the gradients of each, from the last to the first."""
    return forward + [gradient for layer in reversed(forward) for gradient in _gradients(layer, layer is forward[0])]


def merged(layers: list[Layer]) -> list[Layer]:
    """Equal problems as one layer, counts added."""
    first: dict[Problem, Layer] = {}
    for layer in layers:
        seen = first.get(layer.problem)
        first[layer.problem] = replace(seen, count=seen.count + layer.count) if seen else layer
    return list(first.values())


def _gradients(layer: Layer, is_first: bool) -> list[Layer]:
    """By filter, then by input. A transposed convolution is a bwd_data whose input gradient is a convolution."""
    problem = layer.problem
    if isinstance(problem, ConvProblem):
        by_input = "conv_fwd" if problem.op == "conv_bwd_data" else "conv_bwd_data"
        ops = ["conv_bwd_filter"] + ([] if is_first else [by_input])
        return [Layer(problem.with_op(op), f"{layer.name}.{op.removeprefix('conv_')}", 1) for op in ops]
    if isinstance(problem, BnProblem):
        return [Layer(replace(problem, op="bn_bwd", running=False), f"{layer.name}.bwd", 1)]
    if isinstance(problem, RnnProblem):
        return [Layer(replace(problem, op="rnn_bwd", training=False), f"{layer.name}.bwd", 1)]
    assert isinstance(problem, PoolProblem | SoftmaxProblem | DropoutProblem)
    return [Layer(replace(problem, op=problem.op.replace("fwd", "bwd")), f"{layer.name}.bwd", 1)]


def layout_of(layout: str, ndim: int) -> str:
    """'nchw' or 'nhwc', for images of three spatial axes 'ncdhw' or 'ndhwc'."""
    return {"nchw": "ncdhw", "nhwc": "ndhwc"}.get(layout, layout) if ndim == 3 else layout


@dataclass(frozen=True)
class _Net:
    """What all layers of a network share."""

    batch: int
    dtype: str
    layout: str
    train: bool

    def conv(
        self,
        c: int,
        spatial: tuple[int, ...],
        k: int,
        extent: int,
        stride: int = 1,
        groups: int = 1,
        op: str = "conv_fwd",
    ) -> ConvProblem:
        """A cubic filter, padded so that stride 1 keeps the extents."""
        ndim, pad = len(spatial), extent // 2 if extent % 2 else 0
        return ConvProblem(
            op=op,
            dtype=self.dtype,
            n=self.batch,
            c=c,
            spatial=spatial,
            k=k,
            filter=(extent,) * ndim,
            pad=((pad, pad),) * ndim,
            stride=(stride,) * ndim,
            dilation=(1,) * ndim,
            groups=groups,
            layout=layout_of(self.layout, ndim),
        )

    def norm(self, c: int, spatial: tuple[int, ...]) -> BnProblem:
        """Parameters of 16-bit data are float32; training updates the running averages."""
        op, params = "bn_train" if self.train else "bn_infer", DEFAULT_COMPUTE[self.dtype]
        layout = layout_of(self.layout, len(spatial))
        return BnProblem(op, self.dtype, self.batch, c, spatial, "spatial", layout, params, running=self.train)

    def pool(self, c: int, side: int, extent: int, stride: int, mode: str = "max", pad: int = 0) -> PoolProblem:
        """Square windows of square images."""
        window, pads, strides = (extent, extent), (pad, pad), (stride, stride)
        image = self.batch, c, (side, side)
        return PoolProblem("pool_fwd", self.dtype, *image, window, pads, strides, mode, self.layout)

    def average(self, c: int, side: int) -> PoolProblem:
        """Over all of each channel."""
        return self.pool(c, side, side, 1, "average_inc_pad")

    def softmax(self, c: int, spatial: tuple[int, ...] = (1, 1)) -> SoftmaxProblem:
        """Over the classes; a loss takes its logarithm."""
        algorithm, layout = "log" if self.train else "accurate", layout_of(self.layout, len(spatial))
        return SoftmaxProblem("softmax_fwd", self.dtype, self.batch, c, spatial, algorithm, "channel", layout)

    def dropout(self, c: int) -> Iterator[DropoutProblem]:
        """Of c features an image: in training only."""
        if self.train:
            yield DropoutProblem("dropout_fwd", self.dtype, self.batch * c)


_Named = Iterator[tuple[str, Problem]]


def _normed(net: _Net, name: str, norm: str, problem: ConvProblem) -> _Named:
    """A convolution and the batch normalisation behind it, by their names."""
    yield name, problem
    yield norm, net.norm(problem.k, problem.out_spatial)


def _resnet50(net: _Net) -> _Named:
    """Version 1.5: a bottleneck's stride is in its 3x3."""
    yield from _normed(net, "conv1", "bn1", net.conv(3, (224, 224), 64, 7, stride=2))
    yield "maxpool", net.pool(64, 112, 3, 2, pad=1)
    c, side = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            at, first, after = f"layer{stage}.{block}", (side, side), (side // stride, side // stride)
            yield from _normed(net, f"{at}.conv1", f"{at}.bn1", net.conv(c, first, width, 1))
            yield from _normed(net, f"{at}.conv2", f"{at}.bn2", net.conv(width, first, width, 3, stride=stride))
            yield from _normed(net, f"{at}.conv3", f"{at}.bn3", net.conv(width, after, 4 * width, 1))
            if block == 0:
                down = net.conv(c, first, 4 * width, 1, stride=stride)
                yield from _normed(net, f"{at}.downsample", f"{at}.downsample.bn", down)
            c, side = 4 * width, side // stride
    yield "avgpool", net.average(c, side)
    yield "softmax", net.softmax(1000)


def _mobilenet_v2(net: _Net) -> _Named:
    yield from _normed(net, "features.0", "features.0.bn", net.conv(3, (224, 224), 32, 3, stride=2))
    c, side, index = 32, 112, 1
    for expand, k, blocks, first_stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            at, width = f"features.{index}", c * expand
            if expand > 1:
                yield from _normed(net, f"{at}.expand", f"{at}.bn1", net.conv(c, (side, side), width, 1))
            depthwise = net.conv(width, (side, side), width, 3, stride=stride, groups=width)
            yield from _normed(net, f"{at}.depthwise", f"{at}.bn2", depthwise)
            side //= stride
            yield from _normed(net, f"{at}.project", f"{at}.bn3", net.conv(width, (side, side), k, 1))
            c, index = k, index + 1
    yield from _normed(net, f"features.{index}", f"features.{index}.bn", net.conv(c, (side, side), 1280, 1))
    yield "avgpool", net.average(1280, side)
    yield from (("dropout", problem) for problem in net.dropout(1280))
    yield "softmax", net.softmax(1000)


def _vgg16(net: _Net) -> _Named:
    """As published, without batch normalisation."""
    c, side, index = 3, 224, 0
    for k, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            yield f"features.{index}", net.conv(c, (side, side), k, 3)
            c, index = k, index + 2
        yield f"features.{index}", net.pool(c, side, 2, 2)
        side, index = side // 2, index + 1
    yield from ((f"classifier.{at}", problem) for at in (2, 5) for problem in net.dropout(4096))
    yield "softmax", net.softmax(1000)


def _unet3d(net: _Net) -> _Named:
    """The 3-D U-Net of the MLPerf training benchmark: one 128^3 volume, three classes. It strides where others pool,
    and normalises each image by itself."""
    widths, side = (32, 64, 128, 256, 320, 320), 128
    c = 1
    for level, k in enumerate(widths):
        stride = 1 if level == 0 else 2
        yield f"down{level}.conv1", net.conv(c, (side,) * 3, k, 3, stride=stride)
        side //= stride
        yield f"down{level}.conv2", net.conv(k, (side,) * 3, k, 3)
        c = k
    for level, k in reversed(list(enumerate(widths[:-1]))):
        side *= 2
        yield f"up{level}.transpose", net.conv(k, (side,) * 3, c, 2, stride=2, op="conv_bwd_data")
        yield f"up{level}.conv1", net.conv(2 * k, (side,) * 3, k, 3)
        yield f"up{level}.conv2", net.conv(k, (side,) * 3, k, 3)
        c = k
    yield "output", net.conv(c, (side,) * 3, 3, 1)
    yield "softmax", net.softmax(3, (side,) * 3)


_NETWORKS = {"resnet50": _resnet50, "mobilenet_v2": _mobilenet_v2, "vgg16": _vgg16, "unet3d": _unet3d}
WORKLOADS = tuple(_NETWORKS)
