"""ONNX models as targets: which problem each node is, what is refused and skipped, and that the problem is the node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from nbdnn import reference_conv, reference_pool, reference_softmax, workload_onnx
from nbdnn.cli import main
from nbdnn.errors import InvalidProblem
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem
from nbdnn.problem_pool import PoolProblem
from nbdnn.problem_softmax import SoftmaxProblem
from nbdnn.workloads import Layer, network, workload

Extent = int | str | None
IMAGE = (2, 8, 14, 15)


def elsewhere(name: str, *shape: int, of: int = TensorProto.FLOAT) -> TensorProto:
    """Weights in a file that is not there."""
    weights = TensorProto(name=name, data_type=of, dims=shape, data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="nowhere.bin")
    return weights


def saved(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[Extent] | None] | None = None,
    weights: Sequence[TensorProto] = (),
    *,
    of: int = TensorProto.FLOAT,
    opset: int = 17,
    **more: Any,
) -> Path:
    """A model in a file; its output is the first one of the last node."""
    given = [helper.make_tensor_value_info(name, of, shape) for name, shape in (inputs or {"x": IMAGE}).items()]
    result = helper.make_tensor_value_info(nodes[-1].output[0], of, None)
    graph = helper.make_graph(nodes, "graph", given, [result], weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("elsewhere", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, **more), path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def node(op: str, takes: str = "x", gives: str = "y", **attributes: Any) -> onnx.NodeProto:
    """Names of values, separated by blanks; '-' is none."""
    names = ([("" if name == "-" else name) for name in text.split()] for text in (takes, gives))
    return helper.make_node(op, *names, **attributes)


def texts(layers: list[Layer]) -> list[str]:
    return [str(layer.problem) for layer in layers]


CONV = "conv_fwd:f32:n2c8h14w15:"
TRANSPOSED = "conv_bwd_data:f32:n2c6"
POOL = "pool_fwd:f32:n2c8h14w15:"
W = (6, 8, 3, 3)
T = (8, 6, 3, 3)
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], str]] = [
    ("Conv", {}, W, f"{CONV}k6r3s3:p0x0:u1x1:d1x1:g1:cross:nchw"),
    ("Conv", {"pads": [1, 2, 3, 0]}, W, f"{CONV}k6r3s3:ba1.3x2.0:u1x1:d1x1:g1:cross:nchw"),
    ("Conv", {"strides": [2, 3], "dilations": [2, 1]}, W, f"{CONV}k6r3s3:p0x0:u2x3:d2x1:g1:cross:nchw"),
    ("Conv", {"group": 2}, (6, 4, 3, 3), f"{CONV}k6r3s3:p0x0:u1x1:d1x1:g2:cross:nchw"),
    ("Conv", {"group": 8}, (16, 1, 3, 5), f"{CONV}k16r3s5:p0x0:u1x1:d1x1:g8:cross:nchw"),
    ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, W, f"{CONV}k6r3s3:ba0.1x1.1:u2x2:d1x1:g1:cross:nchw"),
    ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, W, f"{CONV}k6r3s3:ba1.0x1.1:u2x2:d1x1:g1:cross:nchw"),
    ("Conv", {"auto_pad": "SAME_UPPER"}, (6, 8, 4, 1), f"{CONV}k6r4s1:ba1.2x0.0:u1x1:d1x1:g1:cross:nchw"),
    ("Conv", {"auto_pad": "SAME_LOWER", "dilations": [2, 3]}, W, f"{CONV}k6r3s3:p2x3:u1x1:d2x3:g1:cross:nchw"),
    ("Conv", {"auto_pad": "VALID"}, W, f"{CONV}k6r3s3:p0x0:u1x1:d1x1:g1:cross:nchw"),
    ("ConvTranspose", {}, T, f"{TRANSPOSED}h16w17:k8r3s3:p0x0:u1x1:d1x1:g1:cross:nchw"),
    (
        "ConvTranspose",
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 0]},
        T,
        f"{TRANSPOSED}h28w29:k8r3s3:p1x1:u2x2:d1x1:g1:cross:nchw",
    ),
    ("ConvTranspose", {"pads": [0, 1, 2, 0]}, T, f"{TRANSPOSED}h14w16:k8r3s3:ba0.2x1.0:u1x1:d1x1:g1:cross:nchw"),
    (
        "ConvTranspose",
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        T,
        f"{TRANSPOSED}h28w30:k8r3s3:ba0.1x0.1:u2x2:d1x1:g1:cross:nchw",
    ),
    ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2]}, (), f"{POOL}r3s2:p0x0:u2x2:max:nchw"),
    ("MaxPool", {"kernel_shape": [3, 3], "pads": [1] * 4}, (), f"{POOL}r3s3:p1x1:u1x1:max:nchw"),
    # What lies behind 14 rows is reached by no window: of 1 before and 0 after, 1 and 1 have as many.
    (
        "MaxPool",
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 1]},
        (),
        f"{POOL}r3s3:p1x1:u2x2:max:nchw",
    ),
    ("MaxPool", {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}, (), f"{POOL}r3s3:p1x1:u1x1:max:nchw"),
    ("MaxPool", {"kernel_shape": [2, 3], "strides": [2, 3], "ceil_mode": 1}, (), f"{POOL}r2s3:p0x0:u2x3:max:nchw"),
    ("AveragePool", {"kernel_shape": [3, 3]}, (), f"{POOL}r3s3:p0x0:u1x1:average_inc_pad:nchw"),
    ("AveragePool", {"kernel_shape": [3, 3], "pads": [1] * 4}, (), f"{POOL}r3s3:p1x1:u1x1:average_exc_pad:nchw"),
    (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1},
        (),
        f"{POOL}r3s3:p1x1:u1x1:average_inc_pad:nchw",
    ),
    ("GlobalAveragePool", {}, (), f"{POOL}r14s15:p0x0:u1x1:average_inc_pad:nchw"),
    ("GlobalMaxPool", {}, (), f"{POOL}r14s15:p0x0:u1x1:max:nchw"),
    ("Softmax", {"axis": 1}, (), "softmax_fwd:f32:n2c8h14w15:accurate:channel:nchw"),
    ("LogSoftmax", {"axis": -3}, (), "softmax_fwd:f32:n2c8h14w15:log:channel:nchw"),
    ("Softmax", {}, (), "softmax_fwd:f32:n224c15h1w1:accurate:channel:nchw"),
]


@pytest.mark.parametrize(("op", "attributes", "weights", "text"), CASES)
def test_a_node_is_this_problem_and_computes_the_same(
    path: Path, op: str, attributes: dict[str, Any], weights: tuple[int, ...], text: str
) -> None:
    made = node(op, "x w" if weights else "x", **attributes)
    saved(path, [made], weights=[elsewhere("w", *weights)] if weights else [])
    layers, skipped = workload_onnx.read(path)
    assert (texts(layers), skipped) == ([text], Counter())

    rng, problem = np.random.default_rng(0), parse(text)
    given = {"x": rng.standard_normal(IMAGE).astype("f4")}
    if weights:
        given["w"] = rng.standard_normal(weights).astype("f4")
    if op == "Conv" and "auto_pad" in attributes:  # which onnx's reference takes wrongly before 1.23
        assert isinstance(problem, ConvProblem)
        pads = [pad for side in zip(*problem.pad, strict=True) for pad in side]
        made = node(op, "x w", **{name: value for name, value in attributes.items() if name != "auto_pad"}, pads=pads)
    whole = saved(path, [made], {name: each.shape for name, each in given.items()})
    (expected,) = ReferenceEvaluator(onnx.load(whole)).run(None, given)
    if isinstance(problem, ConvProblem):
        ours = reference_conv.compute(problem, given | {"dy": given["x"]})
    elif isinstance(problem, PoolProblem):
        ours = reference_pool.compute(problem, given)
    else:
        assert isinstance(problem, SoftmaxProblem)
        ours = reference_softmax.compute(problem, {"x": given["x"].reshape(problem.shape)}).reshape(IMAGE)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_transposed_convolutions_have_groups(path: Path) -> None:
    """By itself: onnx's reference has none."""
    saved(path, [node("ConvTranspose", "x w", group=2)], weights=[elsewhere("w", 8, 3, 3, 3)])
    layers, _ = workload_onnx.read(path)
    assert texts(layers) == [f"{TRANSPOSED}h16w17:k8r3s3:p0x0:u1x1:d1x1:g2:cross:nchw"]


@pytest.mark.parametrize(
    ("made", "shape", "reason"),
    [
        (node("Conv", "x w"), (2, 8, 14), "2 or 3 spatial axes, not 1"),
        (node("Conv", "x w", pads=[-1, 0, 0, 0]), IMAGE, "pads -1x0x0x0, expected 4 numbers"),
        (node("Conv", "x"), IMAGE, "without input 1"),
        (node("Conv", "x w", group=2), IMAGE, "of 8 channels, its filter has 8 in each of 2 groups"),
        (node("Conv", "x w", pads=[1, 1]), IMAGE, "pads 1x1, expected 4 numbers of at least 0"),
        (node("ConvTranspose", "x w", output_shape=[16, 17]), IMAGE, "with an output_shape instead of pads"),
        (node("MaxPool", kernel_shape=[2, 2], ceil_mode=1, strides=[2, 2]), IMAGE, "of extents 2x8x7x8, .* 2x8x7x7"),
        (node("MaxPool", kernel_shape=[3, 3], auto_pad="SAME_UPPER", strides=[2, 2]), IMAGE, "extents 2x8x7x8"),
        (node("MaxPool", kernel_shape=[2, 2], dilations=[2, 1]), IMAGE, "with dilations 2x1"),
        (node("MaxPool", gives="y i", kernel_shape=[2, 2]), IMAGE, "with indices"),
        (node("MaxPool", kernel_shape=[2]), (2, 8, 14), "2 or 3 spatial axes, not 1"),
        (node("GlobalMaxPool"), (2, 8, 14), "2 or 3 spatial axes, not 1"),
        (node("Softmax", axis=2), IMAGE, "over axis 2 of 4"),
    ],
)
def test_what_nbdnn_cannot_express_is_skipped(
    path: Path, made: onnx.NodeProto, shape: tuple[int, ...], reason: str
) -> None:
    kept = node("Softmax", gives="z")
    weights = elsewhere("w", *(T if made.op_type == "ConvTranspose" else (6, 8, *(3 for _ in shape[2:]))))
    layers, skipped = workload_onnx.read(saved(path, [made, kept], {"x": shape}, [weights]))
    assert [layer.name for layer in layers] == ["z"]
    assert skipped.total() == 1
    assert re.fullmatch(rf"1 {made.op_type} \(.*{reason}.*\)", workload_onnx.listed(skipped))


def test_three_spatial_axes_and_both_layouts(path: Path) -> None:
    nodes = [
        node("Conv", "x w b", "a", pads=[1] * 6, name="c"),
        node("MaxPool", "a", kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
    ]
    weights = [elsewhere("w", 8, 3, 3, 3, 3), elsewhere("b", 8)]
    saved(path, nodes, {"x": (1, 3, 8, 10, 12)}, weights)
    for layout in ("ncdhw", "ndhwc"):
        layers, _ = workload_onnx.read(path, layout=layout.replace("d", ""))
        assert {layer.name: str(layer.problem) for layer in layers} == {
            "c": f"conv_fwd:f32:n1c3d8h10w12:k8t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:{layout}:e:bias",
            "y": f"pool_fwd:f32:n1c8d8h10w12:t2r2s2:p0x0x0:u2x2x2:max:{layout}",
        }


def test_batch_normalisation_and_dropout(path: Path) -> None:
    params = [elsewhere(name, 8) for name in "gbmv"]
    nodes = [node("Conv", "x w", "a"), node("BatchNormalization", "a g b m v", "c"), node("Dropout", "c", "d")]
    saved(path, nodes, weights=[elsewhere("w", 8, 8, 1, 1), *params])
    layers, skipped = workload_onnx.read(path)
    assert not skipped
    conv = "n2c8h14w15:k8r1s1:p0x0:u1x1:d1x1:g1:cross:nchw"
    assert texts(layers) == [f"conv_fwd:f32:{conv}", "bn_infer:f32:n2c8h14w15:spatial:nchw"]
    layers, _ = workload_onnx.read(path, dtype="bf16", train=True)
    assert [(layer.name, str(layer.problem)) for layer in layers] == [
        ("a", f"conv_fwd:bf16:{conv}"),
        ("c", "bn_train:bf16:n2c8h14w15:spatial:nchw:pf32:run"),
        ("d", "dropout_fwd:bf16:m3360"),
        ("d.bwd", "dropout_bwd:bf16:m3360"),
        ("c.bwd", "bn_bwd:bf16:n2c8h14w15:spatial:nchw:pf32"),
        ("a.bwd_filter", f"conv_bwd_filter:bf16:{conv}"),
    ]


def test_features_have_spatial_axes_of_one(path: Path) -> None:
    nodes = [node("BatchNormalization", "x g b m v", "a"), node("Softmax", "a")]
    saved(path, nodes, {"x": (4, 8)}, [elsewhere(name, 8) for name in "gbmv"])
    assert texts(workload_onnx.read(path)[0]) == [
        "bn_infer:f32:n4c8h1w1:spatial:nchw",
        "softmax_fwd:f32:n4c8h1w1:accurate:channel:nchw",
    ]


@pytest.mark.parametrize(("attributes", "dims"), [({}, "n2c1680"), ({"axis": 2}, "n16c210"), ({"axis": -1}, "n224c15")])
def test_softmax_of_old_models_is_over_all_axes_from_one_on(path: Path, attributes: dict, dims: str) -> None:
    saved(path, [node("Softmax", **attributes)], opset=12)
    assert texts(workload_onnx.read(path)[0]) == [f"softmax_fwd:f32:{dims}h1w1:accurate:channel:nchw"]


@pytest.mark.parametrize(
    ("made", "gates", "expected"),
    [
        (node("LSTM", "x w r", hidden_size=16), 4, "lstm:uni:linear"),
        (node("LSTM", "x w r b - h", direction="bidirectional", hidden_size=16), 4, "lstm:bi:linear"),
        (node("GRU", "x w r", linear_before_reset=1, hidden_size=16), 3, "gru:uni:linear"),
        (node("RNN", "x w r", hidden_size=16), 1, "rnn_tanh:uni:linear"),
        (node("RNN", "x w r", activations=["Relu"], hidden_size=16), 1, "rnn_relu:uni:linear"),
        (node("GRU", "x w r", hidden_size=16), 3, "with linear_before_reset=0"),
        (node("LSTM", "x w r", hidden_size=16, layout=1), 4, "with the batch first"),
        (node("LSTM", "x w r", hidden_size=16, clip=1.0), 4, "with clip"),
        (node("LSTM", "x w r - s", hidden_size=16), 4, "with sequence_lens"),
        (node("LSTM", "x w r - - - - p", hidden_size=16), 4, "with peepholes"),
        (node("RNN", "x w r", direction="reverse", hidden_size=16), 1, "in reverse"),
        (node("RNN", "x w r", activations=["Elu"], hidden_size=16), 1, "with activations elu"),
    ],
)
def test_recurrent_nodes_are_networks_of_one_layer(path: Path, made: onnx.NodeProto, gates: int, expected: str) -> None:
    directions = 1 + (expected == "lstm:bi:linear")
    weights = [
        elsewhere("w", directions, gates * 16, 12),
        elsewhere("r", directions, gates * 16, 16),
        elsewhere("b", directions, 2 * gates * 16),
        elsewhere("p", directions, 3 * 16),
        elsewhere("s", 4, of=TensorProto.INT32),
    ]
    batch: Extent = 4 if "batch first" in expected else "batch"
    inputs: dict[str, Sequence[Extent] | None] = {"x": (5, batch, 12), "h": (directions, batch, 16)}
    saved(path, [made, node("Softmax", "x", "z")], inputs, weights)
    layers, skipped = workload_onnx.read(path, batch=4)
    if expected.endswith("linear"):
        assert texts(layers)[0] == f"rnn_fwd:f32:t5b4i12h16l1:{expected}"
        assert texts(workload_onnx.read(path, 4, train=True)[0])[::3] == [
            f"rnn_fwd:f32:t5b4i12h16l1:{expected}:train",
            f"rnn_bwd:f32:t5b4i12h16l1:{expected}",
        ]
    else:
        assert skipped == {f"{made.op_type} ({expected})": 1}


def _resnet50(path: Path, batch: Extent, last: str) -> Path:
    """The nodes of the layers of nbdnn.workloads, with what lies between them."""
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []
    at = block = "x"
    for layer in network("resnet50"):
        problem, name, takes = layer.problem, layer.name, at
        if isinstance(problem, ConvProblem):
            if name.endswith("downsample"):
                takes, before = block, at
            weights.append(elsewhere(f"{name}.w", *problem.w_shape))
            pads = [pad for side in zip(*problem.pad, strict=True) for pad in side]
            nodes.append(node("Conv", f"{takes} {name}.w", name, name=name, strides=problem.stride, pads=pads))
        elif name == "maxpool":
            attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
            nodes.append(node("MaxPool", takes, name, name=name, **attributes))
        elif name == "avgpool":
            nodes.append(node("GlobalAveragePool", takes, name, name=name))
        elif name == "softmax":
            weights.append(elsewhere("fc.w", 1000, 2048))
            nodes += [node("Flatten", takes, "flat"), node("Gemm", "flat fc.w", "fc", transB=1)]
            nodes.append(node(last, "fc", name, name=name))
        else:
            params = [f"{name}.{each}" for each in ("g", "b", "m", "v")]
            weights += [elsewhere(each, problem.c) for each in params]  # type: ignore[attr-defined]
            nodes.append(node("BatchNormalization", f"{takes} {' '.join(params)}", name, name=name))
            if name.endswith("downsample.bn"):
                nodes.append(node("Add", f"{before} {name}", f"{name}.sum"))
                name = f"{name}.sum"
        at = name
        if "conv1" in name:
            block = takes
    return saved(path, nodes, {"x": (batch, 3, 224, 224)}, weights)


@pytest.mark.parametrize("batch", ["N", 1, None])
@pytest.mark.parametrize("train", [False, True])
def test_resnet50_is_the_workload(path: Path, batch: Extent, train: bool) -> None:
    """Problems, names and counts, in that order."""
    _resnet50(path, batch, "LogSoftmax" if train else "Softmax")
    for images in (None, 32):
        layers, skipped = workload_onnx.read(path, images, train=train)
        assert layers == workload("resnet50", images or 1, train=train)
        assert skipped == {"Add": 4, "Flatten": 1, "Gemm": 1}
    layers, _ = workload_onnx.read(path, 2, "f16", "nhwc", train=train)
    assert layers == workload("resnet50", 2, "f16", "nhwc", train=train)


def test_weights_may_come_through_other_nodes(path: Path) -> None:
    scale = helper.make_tensor("s", TensorProto.FLOAT, [], [0.1])
    nodes = [
        node("DequantizeLinear", "q s", "w"),
        node("Identity", "w", "v"),
        node("Conv", "x v", "a"),
        node("Conv", "a v", "b"),
    ]
    layers, skipped = workload_onnx.read(
        saved(path, nodes, weights=[scale, elsewhere("q", 8, 8, 3, 3, of=TensorProto.INT8)])
    )
    assert texts(layers) == [f"conv_fwd:f32:n2c8h{h}w{h + 1}:k8r3s3:p0x0:u1x1:d1x1:g1:cross:nchw" for h in (14, 12)]
    assert skipped == {"DequantizeLinear": 1, "Identity": 1}


def test_the_type_is_the_models_unless_asked_for(path: Path) -> None:
    saved(path, [node("MaxPool", kernel_shape=[2, 2])], of=TensorProto.FLOAT16)
    assert texts(workload_onnx.read(path)[0])[0].startswith("pool_fwd:f16:")
    assert texts(workload_onnx.read(path, dtype="f64")[0])[0].startswith("pool_fwd:f64:")
    saved(path, [node("MaxPool", kernel_shape=[2, 2])], of=TensorProto.INT8)
    with pytest.raises(InvalidProblem, match=r"has no node .*: 1 MaxPool \(x is of type INT8\)"):
        workload_onnx.read(path, dtype="f32")


def test_batch_replaces_what_the_inputs_have_alike(path: Path) -> None:
    nodes = [
        node("Conv", "x w", "a"),
        node("Relu", "a", "b"),
        node("Concat", "b other", "c", axis=1),
        node("Softmax", "c"),
    ]
    inputs: dict[str, Sequence[Extent] | None] = {"x": (2, 8, 6, 6), "w": (8, 8, 1, 1), "other": (2, 4, 6, 6)}
    model = onnx.load(saved(path, nodes, inputs))
    inferred = onnx.shape_inference.infer_shapes(model)
    assert inferred.graph.value_info
    onnx.save(inferred, path)
    for batch in (None, 2, 16):
        layers, _ = workload_onnx.read(path, batch)
        assert [re.findall(r"n\d+c\d+h6w6", text) for text in texts(layers)] == [[f"n{batch or 2}c8h6w6"], []]
        assert texts(layers)[1].startswith(f"softmax_fwd:f32:n{(batch or 2) * 72}c6h1w1")


def test_functions_of_a_model_are_looked_into(path: Path) -> None:
    opsets = [helper.make_opsetid("", 17)]
    body = [node("MaxPool", "i", "m", kernel_shape=[2, 2]), node("Relu", "m", "o")]
    block = helper.make_function("elsewhere", "Block", ["i"], ["o"], body, opsets)
    nodes = [node("Block", "x", "a", domain="elsewhere"), node("Block", "a", "y", domain="elsewhere")]
    layers, skipped = workload_onnx.read(saved(path, nodes, functions=[block]))
    assert texts(layers) == [f"pool_fwd:f32:n2c8h{h}w{h + 1}:r2s2:p0x0:u1x1:max:nchw" for h in (14, 13)]
    assert skipped == {"Relu": 2}


def test_what_follows_an_unknown_op_is_skipped(path: Path) -> None:
    nodes = [
        node("MaxPool", gives="a", kernel_shape=[2, 2]),
        node("Conv", "a", "b", domain="elsewhere"),
        node("MaxPool", "b", kernel_shape=[2, 2]),
        node("Dropout", "y", "z"),
    ]
    layers, skipped = workload_onnx.read(saved(path, nodes))
    assert [layer.name for layer in layers] == ["a"]
    assert skipped == {"elsewhere.Conv": 1, "MaxPool (of unknown extents)": 1}


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"nbdnn: error: [^\n]*\n", err), err
    return err


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": ("N", 3, "height", 8)}, r"model.onnx: input 'x' leaves the extent of axis 2 \('height'\) open"),
        ({"x": ("N", 3, 8, None)}, "input 'x' leaves the extent of axis 3 open"),
        ({"x": (1, 3, 8, 8), "ids": ("N", "length")}, r"input 'ids' leaves the extent of axis 1 \('length'\) open"),
        ({"x": None}, "input 'x' has no shape"),
    ],
)
def test_open_extents_are_an_error(
    path: Path, inputs: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(path, [node("Softmax")], inputs)
    assert re.search(message, error_of(capsys, str(path), "--batch", "4"))


@pytest.mark.parametrize("content", [b"", b"conv_fwd:f32:n1\n", bytes(range(256))])
def test_a_file_that_is_no_model(path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(content)
    assert error_of(capsys, str(path)).endswith(f"{path} is not an ONNX model\n")


def test_models_without_anything_to_measure(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, str(path)).endswith(f"there is no file {path}\n")
    saved(path, [node("Relu", "x", "a"), node("Relu", "a", "b"), node("Add", "a b")])
    assert error_of(capsys, str(path)).endswith("has no node that nbdnn has a function for: 2 Relu, 1 Add\n")
    saved(path, [node("Custom", domain="unknown")])
    assert f"error: {path}: [TypeInferenceError]" in error_of(capsys, str(path))


def test_without_the_package_a_model_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(path, [node("Softmax")])
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert error_of(capsys, str(path)).endswith("takes the package onnx to read: pip install 'nbdnn[onnx]'\n")


def test_autotune_measures_a_model(path: Path, tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x w b", "a", name="first", pads=[1] * 4),
        node("Relu", "a", "r"),
        node("Conv", "r v", "c", name="second", pads=[1] * 4),
        node("Conv", "c v", "d", name="third", pads=[1] * 4),
        node("MaxPool", "d", "p", kernel_shape=[2, 2]),
    ]
    weights = [elsewhere("w", 8, 3, 3, 3), elsewhere("b", 8), elsewhere("v", 8, 8, 3, 3)]
    saved(path, nodes, {"x": ("N", 3, 10, 12)}, weights)
    command = [sys.executable, "-m", "nbdnn", "autotune", str(path), "--only", "conv", "--budget", "50", "--batch", "2"]
    db = str(tmp_path / "models.db")
    done = subprocess.run([*command, "--db", db, "--json"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, f"nbdnn: {path}: 1 node skipped: 1 Relu\n")
    rows = json.loads(done.stdout)
    assert [(row["layer"], row["problem"], row["count"]) for row in rows] == [
        ("first", "conv_fwd:f32:n2c3h10w12:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw:e:bias", 1),
        ("second", "conv_fwd:f32:n2c8h10w12:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw", 2),
    ]
    assert all(row["measured"] and row["time_us"] > 0 for row in rows)
