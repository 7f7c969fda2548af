"""Nodes of an ONNX graph whose shapes are known, as problems.

A problem is what the node says: a convolution with a bias has it in its epilogue, a transposed one is the gradient by
the images that it is, a recurrent node is a network of one layer. What has no problem is an InvalidProblem, or another
ValueError where attributes do not go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from nbdnn.errors import InvalidProblem
from nbdnn.problem import DEFAULT_COMPUTE, Problem, joined
from nbdnn.problem_bn import BnProblem
from nbdnn.problem_conv import ConvProblem
from nbdnn.problem_dropout import DropoutProblem
from nbdnn.problem_pool import PoolProblem
from nbdnn.problem_rnn import RnnProblem
from nbdnn.problem_softmax import SoftmaxProblem
from nbdnn.workloads import layout_of

_DTYPES = {"FLOAT": "f32", "DOUBLE": "f64", "FLOAT16": "f16", "BFLOAT16": "bf16"}
# Modes of recurrent nodes by the op and by the activations of one direction, in lower case; the first are the default.
RNN_MODES: dict[str, dict[tuple[str, ...], str]] = {
    "LSTM": {("sigmoid", "tanh", "tanh"): "lstm"},
    "GRU": {("sigmoid", "tanh"): "gru"},
    "RNN": {("tanh",): "rnn_tanh", ("relu",): "rnn_relu"},
}


class Value(NamedTuple):
    """What is known of a tensor: its type, as TensorProto names it, and its shape unless that is open."""

    type: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Node:
    """A node, what is known of its values, and the form that its problem shall have. `attributes` are those given."""

    proto: Any
    attributes: Mapping[str, Any]
    values: Mapping[str, Value]
    opset: int
    wanted_dtype: str | None
    layout: str
    train: bool

    @property
    def dtype(self) -> str:
        """Of the operands of the problem; of numbers that nbdnn does not compute with there is none."""
        of_x = self.values[self.proto.input[0]].type
        if of_x not in _DTYPES:
            raise InvalidProblem(f"x is of type {of_x}")
        return self.wanted_dtype or _DTYPES[of_x]

    def takes(self, index: int) -> bool:
        """Whether it has this input, which is optional."""
        return len(self.proto.input) > index and bool(self.proto.input[index])

    def gives(self, index: int) -> bool:
        """Whether it has this output, which is optional."""
        return len(self.proto.output) > index and bool(self.proto.output[index])

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """Of an input."""
        if not self.takes(index):
            raise InvalidProblem(f"without input {index}")
        return self._shape(self.proto.input[index])

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return self._shape(self.proto.output[0])

    def _shape(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if value is None or value.shape is None:
            raise InvalidProblem("of unknown extents")
        return value.shape

    def axes(self, name: str, least: int, count: int) -> tuple[int, ...]:
        """An attribute with a number a spatial axis, or two; the least that they may be is the default."""
        given = tuple(self.attributes.get(name, [least] * count))
        if len(given) != count or any(value < least for value in given):
            raise InvalidProblem(f"{name} {joined(given)}, expected {count} numbers of at least {least}")
        return given


def _pads(node: Node, excess: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(before, after) each axis. excess: what SAME adds at both ends together."""
    kind, ndim = node.attributes.get("auto_pad", "NOTSET"), len(excess)
    if kind == "NOTSET":
        flat = node.axes("pads", 0, 2 * ndim)
        return tuple(zip(flat[:ndim], flat[ndim:], strict=True))
    if kind == "VALID":
        return ((0, 0),) * ndim
    less = [total // 2 for total in excess]
    halves = [(half, total - half) for half, total in zip(less, excess, strict=True)]
    return tuple(halves if kind == "SAME_UPPER" else [(after, before) for before, after in halves])


def _same_excess(node: Node, spatial: Sequence[int], window: Sequence[int]) -> list[int]:
    """What is added to an axis so that a stride of u makes it 1/u of its extent, rounded up."""
    strides, dilations = (node.axes(name, 1, len(spatial)) for name in ("strides", "dilations"))
    axes = zip(spatial, window, strides, dilations, strict=True)
    return [max((-(-extent // u) - 1) * u + (taps - 1) * d + 1 - extent, 0) for extent, taps, u, d in axes]


def _check(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    if ours != theirs:
        raise InvalidProblem(f"of extents {joined(theirs)}, nbdnn's would be {joined(ours)}")


def _convolution(
    node: Node,
    op: str,
    image: Sequence[int],
    k: int,
    taps: Sequence[int],
    pads: tuple[tuple[int, int], ...],
    epilogue: tuple[str, ...] = (),
) -> ConvProblem:
    """image: (n, c, *spatial). The node says the rest."""
    n, c, *spatial = image
    ndim = len(spatial)
    return ConvProblem(
        op=op,
        dtype=node.dtype,
        n=n,
        c=c,
        spatial=tuple(spatial),
        k=k,
        filter=tuple(taps),
        pad=pads,
        stride=node.axes("strides", 1, ndim),
        dilation=node.axes("dilations", 1, ndim),
        groups=node.attributes.get("group", 1),
        layout=layout_of(node.layout, ndim),
        epilogue=epilogue,
    )


def _conv(node: Node) -> Problem:
    x, (k, of_group, *taps), groups = node.shape(0), node.shape(1), node.attributes.get("group", 1)
    if x[1] != groups * of_group:
        raise InvalidProblem(f"of {x[1]} channels, its filter has {of_group} in each of {groups} groups")
    pads = _pads(node, _same_excess(node, x[2:], taps))
    problem = _convolution(node, "conv_fwd", x, k, taps, pads, ("bias",) if node.takes(2) else ())
    _check(problem.y_shape, node.result)
    return problem


def _conv_transpose(node: Node) -> Problem:
    """Its x is the dy of a convolution and its y the dx; a bias is added by others."""
    x, (k, _, *taps), image = node.shape(0), node.shape(1), node.result
    if "output_shape" in node.attributes:
        raise InvalidProblem("with an output_shape instead of pads")
    strides, dilations = (node.axes(name, 1, len(taps)) for name in ("strides", "dilations"))
    axes = zip(x[2:], image[2:], taps, strides, dilations, node.axes("output_padding", 0, len(taps)), strict=True)
    pads = _pads(node, [(i - 1) * u + (f - 1) * d + 1 + more - extent for i, extent, f, u, d, more in axes])
    problem = _convolution(node, "conv_bwd_data", image, k, taps, pads)
    _check(problem.y_shape, x)
    return problem


def _pool(node: Node) -> Problem:
    """Pads before and after an axis may differ where no window reaches further than with the former at both ends."""
    (n, c, *spatial), y = node.shape(), node.result
    window = tuple(node.attributes.get("kernel_shape", ()))
    if node.gives(1):
        raise InvalidProblem("with indices")
    if any(step > 1 for step in node.axes("dilations", 1, len(window))):
        raise InvalidProblem(f"with dilations {joined(node.attributes['dilations'])}")
    pads = tuple(before for before, _ in _pads(node, _same_excess(node, spatial, window)))
    mode = "max"
    if node.proto.op_type == "AveragePool":
        mode = "average_inc_pad" if node.attributes.get("count_include_pad") or not any(pads) else "average_exc_pad"
    strides, layout = node.axes("strides", 1, len(window)), layout_of(node.layout, len(spatial))
    problem = PoolProblem("pool_fwd", node.dtype, n, c, tuple(spatial), window, pads, strides, mode, layout)
    _check(problem.y_shape, y)
    return problem


def _global_pool(node: Node) -> Problem:
    n, c, *spatial = node.shape()
    zeros, ones = (0,) * len(spatial), (1,) * len(spatial)
    mode = "max" if node.proto.op_type == "GlobalMaxPool" else "average_inc_pad"
    image = n, c, tuple(spatial)
    layout = layout_of(node.layout, len(spatial))
    return PoolProblem("pool_fwd", node.dtype, *image, tuple(spatial), zeros, ones, mode, layout)


def _batch_norm(node: Node) -> Problem:
    """As of workloads: parameters of 16-bit data are float32; training updates the running averages."""
    n, c, *spatial = _with_spatial(node.shape())
    op, dtype, layout = "bn_train" if node.train else "bn_infer", node.dtype, layout_of(node.layout, len(spatial))
    mode = "spatial" if node.attributes.get("spatial", 1) else "per-activation"
    return BnProblem(op, dtype, n, c, tuple(spatial), mode, layout, DEFAULT_COMPUTE[dtype], running=node.train)


def _with_spatial(shape: tuple[int, ...]) -> tuple[int, ...]:
    """With axes of 1 up to four, as nbdnn's functions see arrays of two and three axes."""
    return shape + (1,) * (4 - len(shape))


def _softmax(node: Node) -> Problem:
    """Over the channels, or over rows: of the last axis, and before version 13 of all axes from one on."""
    shape = node.shape()
    axis = node.attributes.get("axis", -1 if node.opset >= 13 else 1) % len(shape)
    if node.opset < 13:
        shape = prod(shape[:axis]), prod(shape[axis:])
    elif axis == len(shape) - 1:
        shape = prod(shape[:axis]), shape[axis]
    elif axis != 1:
        raise InvalidProblem(f"over axis {axis} of {len(shape)}")
    n, c, *spatial = _with_spatial(shape)
    algorithm = "log" if node.proto.op_type == "LogSoftmax" else "accurate"
    layout = layout_of(node.layout, len(spatial))
    return SoftmaxProblem("softmax_fwd", node.dtype, n, c, tuple(spatial), algorithm, "channel", layout)


def _dropout(node: Node) -> Problem:
    return DropoutProblem("dropout_fwd", node.dtype, prod(node.shape()))


def _recurrent(node: Node) -> Problem:
    """One layer in cuDNN's form: steps first, no peepholes, and in a GRU the reset after the product."""
    given, op_type = node.attributes, node.proto.op_type
    (steps, batch, width), (_, _, hidden) = node.shape(0), node.shape(2)
    both = given.get("direction", "forward") == "bidirectional"
    modes = {of_one * (1 + both): mode for of_one, mode in RNN_MODES[op_type].items()}
    activations = tuple(name.lower() for name in given.get("activations", next(iter(modes))))
    for is_so, what in (
        (given.get("direction") == "reverse", "in reverse"),
        (activations not in modes, f"with activations {', '.join(activations)}"),
        (given.get("layout", 0), "with the batch first"),
        ("clip" in given, "with clip"),
        (given.get("input_forget", 0), "with input_forget"),
        (op_type == "GRU" and not given.get("linear_before_reset", 0), "with linear_before_reset=0"),
        (node.takes(4), "with sequence_lens"),
        (node.takes(7), "with peepholes"),
    ):
        if is_so:
            raise InvalidProblem(what)
    mode = modes[activations]
    return RnnProblem("rnn_fwd", node.dtype, steps, batch, width, hidden, 1, mode, both, training=node.train)


# What makes the problem of a node, by its op.
READERS = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalMaxPool": _global_pool,
    "GlobalAveragePool": _global_pool,
    "BatchNormalization": _batch_norm,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Dropout": _dropout,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
