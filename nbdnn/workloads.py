"""Named lists of problems: the convolutions of well-known networks.

>>> layers = workload("resnet50", batch=1)
>>> layers[0].name, str(layers[0].problem), sum(layer.count for layer in layers)
('conv1', 'conv_fwd:f32:n1c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1:cross:nchw', 53)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbdnn.errors import InvalidProblem
from nbdnn.problem import Problem
from nbdnn.problem_conv import ConvProblem


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
        Also the gradients: of every layer by its filter, and of every layer but the first by its input.
    """
    return merged(network(name, batch, dtype, layout, train=train))


def network(name: str, batch: int = 1, dtype: str = "f32", layout: str = "nchw", *, train: bool = False) -> list[Layer]:
    """Every convolution of a network in the order of execution, each with count 1; arguments as for `workload`."""
    if name not in _NETWORKS:
        raise InvalidProblem(f"workload {name!r} is not one of {', '.join(WORKLOADS)}")
    net = _Net(batch, dtype, layout)
    forward = [Layer(problem, layer, 1) for layer, problem in _NETWORKS[name](net)]
    if not train:
        return forward
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
    assert isinstance(layer.problem, ConvProblem)
    by_input = "conv_fwd" if layer.problem.op == "conv_bwd_data" else "conv_bwd_data"
    ops = ["conv_bwd_filter"] + ([] if is_first else [by_input])
    return [Layer(layer.problem.with_op(op), f"{layer.name}.{op.removeprefix('conv_')}", 1) for op in ops]


@dataclass(frozen=True)
class _Net:
    """What all layers of a network share."""

    batch: int
    dtype: str
    layout: str

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
        layout = {"nchw": "ncdhw", "nhwc": "ndhwc"}.get(self.layout, self.layout) if ndim == 3 else self.layout
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
            layout=layout,
        )


_Named = Iterator[tuple[str, ConvProblem]]


def _resnet50(net: _Net) -> _Named:
    """Version 1.5: a bottleneck's stride is in its 3x3."""
    yield "conv1", net.conv(3, (224, 224), 64, 7, stride=2)
    c, side = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            at = f"layer{stage}.{block}"
            yield f"{at}.conv1", net.conv(c, (side, side), width, 1)
            yield f"{at}.conv2", net.conv(width, (side, side), width, 3, stride=stride)
            yield f"{at}.conv3", net.conv(width, (side // stride,) * 2, 4 * width, 1)
            if block == 0:
                yield f"{at}.downsample", net.conv(c, (side, side), 4 * width, 1, stride=stride)
            c, side = 4 * width, side // stride


def _mobilenet_v2(net: _Net) -> _Named:
    yield "features.0", net.conv(3, (224, 224), 32, 3, stride=2)
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
                yield f"{at}.expand", net.conv(c, (side, side), width, 1)
            yield f"{at}.depthwise", net.conv(width, (side, side), width, 3, stride=stride, groups=width)
            side //= stride
            yield f"{at}.project", net.conv(width, (side, side), k, 1)
            c, index = k, index + 1
    yield f"features.{index}", net.conv(c, (side, side), 1280, 1)


def _vgg16(net: _Net) -> _Named:
    c, side, index = 3, 224, 0
    for k, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            yield f"features.{index}", net.conv(c, (side, side), k, 3)
            c, index = k, index + 2
        side, index = side // 2, index + 1


def _unet3d(net: _Net) -> _Named:
    """The 3-D U-Net of the MLPerf training benchmark: one 128^3 volume, three classes."""
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


_NETWORKS = {"resnet50": _resnet50, "mobilenet_v2": _mobilenet_v2, "vgg16": _vgg16, "unet3d": _unet3d}
WORKLOADS = tuple(_NETWORKS)
