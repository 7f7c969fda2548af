"""Problems: one text form, validation that names the numbers, and what follows from the fields."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from edge_cases import edges

from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import OPS, Operand, Problem, dense_strides, parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem
from nbdnn.workloads import WORKLOADS, network, workload

EXAMPLE = "conv_fwd:f32:n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
WITH_EVERYTHING = (
    "conv_fwd:f16:cf16:n2c4d5h6w7:k6t2r3s1:ba1.0x0.2x1.1:u1x2x1:d2x1x1:g2:conv:ndhwc"
    ":kctrs:yncdhw:a4:e:bias+relu+res+beta"
)


@pytest.mark.parametrize("text", [EXAMPLE, WITH_EVERYTHING, EXAMPLE.replace("fwd", "bwd_data") + ":e:beta"])
def test_text_is_canonical(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(f"  {text}\n") == parse(text)


@pytest.mark.parametrize("op", OPS)
def test_text_of_every_edge_case_names_it(op: str) -> None:
    problems = edges(op)
    assert [parse(str(problem)) for problem in problems] == problems
    assert len({str(problem) for problem in problems}) == len(problems)


def test_defaults_are_left_out_of_the_text_and_equal_to_being_given() -> None:
    problem = parse(EXAMPLE)
    assert replace(problem, compute="f32", w_layout="kcrs", y_layout="nchw", align=16) == problem
    assert parse(EXAMPLE.replace(":nchw", ":nhwc")).w_layout == "krsc"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnn_fwd:f32:t5b3i4h8l1000000:lstm:uni:linear", "layers is 1000000, it must be at most 10000"),
        ("rnn_fwd:f32:t5b3i4h2147483647l1:lstm:uni:linear", "w would have 18446744108069289964 elements: "),
        (EXAMPLE.replace("c64", "c2147483648"), "input channels is 2147483648, it must be at most 2147483647"),
        (EXAMPLE.replace("h56", f"h{10**20}"), f"spatial extent is {10**20}, it must be at most {2**47}"),
        (EXAMPLE.replace("k64", f"k{10**20}"), f"output channels is {10**20}, it must be at most 2147483647"),
        ("", "unknown op .* expected one of conv_fwd"),
        ("sort_fwd:f32:n1c1h1w1", "unknown op 'sort_fwd'"),
        ("conv_fwd:f32:n1c1h4w4:k1r3s3", "ends too soon"),
        (EXAMPLE.replace("n32", "m32"), "'m32c64h56w56'.*dims such as"),
        (EXAMPLE.replace("r3s3", "r3"), "'k64r3'.*a filter such as"),
        (EXAMPLE.replace("p1x1", "p1xx1"), "'p1xx1'.*such as p1x1"),
        (EXAMPLE.replace("p1x1", "ba1x1"), "before.after pairs"),
        (EXAMPLE.replace("cross", "full"), "mode 'full' is not one of conv, cross"),
        (EXAMPLE.replace("nchw", "chwn"), "layout 'chwn'"),
        (EXAMPLE + ":e:selu", "'selu' is not one of bias, relu"),
        (EXAMPLE + ":e:relu+bias", "in that order"),
        (EXAMPLE + ":e:relu+tanh", "at most one"),
        (EXAMPLE + ":a3", "'a3'.*expected one of a2, a4, a8, a16"),
        (EXAMPLE + ":a2", "alignment is 2, it must be at least the 4 bytes of f32"),
        (EXAMPLE + ":a4:krsc", "'krsc'.*not understood there"),
        (EXAMPLE.replace("fwd", "bwd_filter") + ":e:bias", "gradients take beta"),
        (EXAMPLE.replace("g1", "g3"), "input channels: 64 is not a multiple of groups 3"),
        (EXAMPLE.replace("g1", "g0"), "groups is 0"),
        (EXAMPLE.replace("u1x1", "u1x0"), "stride is 0"),
        (EXAMPLE.replace("d1x1", "d0x1"), "dilation is 0"),
        (EXAMPLE.replace("h56", "h0"), "spatial extent is 0"),
        (EXAMPLE.replace("p1x1", "p1x1x1"), "pad has 3 axes, the image has 2"),
        (EXAMPLE.replace("r3", "r60"), "output extent of spatial axis 0 would be -1: the filter spans 60.*image 58"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        parse(text)


def test_types_and_ranks_raise_invalid_type() -> None:
    with pytest.raises(InvalidType, match="'int8'"):
        parse(EXAMPLE.replace("f32", "int8"))
    problem = parse(EXAMPLE)
    with pytest.raises(InvalidType, match="2 or 3 spatial axes, not 1"):
        replace(problem, spatial=(4,))
    with pytest.raises(InvalidProblem, match="compute type 'f16' is not one of f32"):
        replace(problem, compute="f16")


def test_output_extents() -> None:
    def extent(size: int, r: int, pad: tuple[int, int], u: int, d: int) -> int:
        shape = f"conv_fwd:f32:n1c1h{size}w1:k1r{r}s1:ba{pad[0]}.{pad[1]}x0.0:u{u}x1:d{d}x1:g1:cross:nchw"
        return parse(shape).out_spatial[0]

    assert extent(7, 3, (0, 0), 1, 1) == 5
    assert extent(7, 3, (2, 2), 1, 1) == 9
    assert extent(8, 3, (0, 0), 2, 1) == 3
    assert extent(9, 3, (0, 1), 2, 3) == 2
    assert extent(5, 5, (0, 0), 3, 1) == 1


def test_operands_are_what_a_runner_takes() -> None:
    problem = parse(WITH_EVERYTHING)
    x, w, y, bias, residual = problem.operands
    assert x == Operand("x", (2, 4, 5, 6, 7), (840, 1, 168, 28, 4), "f16")
    assert w == Operand("w", (6, 2, 2, 3, 1), (12, 6, 3, 1, 1), "f16")
    assert y == Operand("y", (2, 6, 4, 3, 9), (648, 108, 27, 9, 1), "f16", "out", keeps=True)
    assert (bias.shape, residual.strides) == ((6,), y.strides)
    assert [o.name for o in parse(EXAMPLE).with_op("conv_bwd_data").operands] == ["w", "dy", "dx"]
    assert [o.name for o in parse(EXAMPLE).with_op("conv_bwd_filter").operands] == ["x", "dy", "dw"]


def test_layouts_of_the_gradients_follow_their_operand() -> None:
    text = EXAMPLE.replace("fwd", "bwd_data").replace(":nchw", ":nhwc:ynchw")
    _, dy, dx = parse(text).operands
    assert dy.strides == dense_strides(dy.shape, channels_last=True)
    assert dx.strides == dense_strides(dx.shape, channels_last=False)


def test_work_and_traffic() -> None:
    problem = parse("conv_fwd:f16:n2c4h5w5:k6r3s3:p1x1:u1x1:d1x1:g2:cross:nchw:e:beta")
    assert problem.flops == 2 * (2 * 6 * 25) * (2 * 9)
    assert problem.min_bytes == 2 * (2 * 4 * 25 + 6 * 2 * 9 + 2 * (2 * 6 * 25))
    lengths = [problem.with_op(op).reduction_length for op in CONV_OPS]
    assert lengths == [2 * 9, 3 * 9, 2 * 25]


def test_layer_forgets_batch_and_extents_only() -> None:
    problem = parse(EXAMPLE)
    assert problem.layer == "conv_fwd:f32:c64:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
    assert replace(problem, n=1, spatial=(7, 9)).layer == problem.layer
    assert replace(problem, mode="conv").layer != problem.layer


def test_frozen_and_hashable() -> None:
    problem = parse(EXAMPLE)
    with pytest.raises(FrozenInstanceError):
        problem.n = 3  # type: ignore[misc]
    assert len({problem, parse(EXAMPLE)}) == 1


def problems_of(name: str, *options: Any, **more: Any) -> Counter[Problem]:
    """How often a network poses each problem."""
    return Counter({layer.problem: layer.count for layer in workload(name, *options, **more)})


@pytest.mark.parametrize(
    ("name", "convolutions", "different", "multiplications"),
    [
        ("resnet50", 53, 23, 4.087e9),
        ("mobilenet_v2", 52, 30, 0.2995e9),
        ("vgg16", 13, 9, 15.347e9),
        ("unet3d", 28, 23, 477.3e9),
    ],
)
def test_workloads_are_the_published_networks(
    name: str, convolutions: int, different: int, multiplications: float
) -> None:
    forward = {p: count for p, count in problems_of(name).items() if isinstance(p, ConvProblem)}
    assert (sum(forward.values()), len(forward)) == (convolutions, different)
    assert sum(count * p.flops / 2 for p, count in forward.items()) == pytest.approx(multiplications, rel=1e-3)
    training = sum(count for p, count in problems_of(name, train=True).items() if isinstance(p, ConvProblem))
    assert training == 3 * convolutions - 1


@pytest.mark.parametrize(
    ("name", "inference", "training"),
    [
        (
            "resnet50",
            {"bn_infer": 53, "pool_fwd": 2, "softmax_fwd": 1},
            {"bn_train": 53, "bn_bwd": 53, "pool_fwd": 2, "pool_bwd": 2, "softmax_fwd": 1, "softmax_bwd": 1},
        ),
        (
            "mobilenet_v2",
            {"bn_infer": 52, "pool_fwd": 1, "softmax_fwd": 1},
            {"bn_train": 52, "bn_bwd": 52, "pool_fwd": 1, "pool_bwd": 1, "dropout_fwd": 1, "dropout_bwd": 1}
            | {"softmax_fwd": 1, "softmax_bwd": 1},
        ),
        (
            "vgg16",
            {"pool_fwd": 5, "softmax_fwd": 1},
            {"pool_fwd": 5, "pool_bwd": 5, "dropout_fwd": 2, "dropout_bwd": 2, "softmax_fwd": 1, "softmax_bwd": 1},
        ),
        ("unet3d", {"softmax_fwd": 1}, {"softmax_fwd": 1, "softmax_bwd": 1}),
    ],
)
def test_workloads_have_the_other_layers(name: str, inference: dict[str, int], training: dict[str, int]) -> None:
    for train, expected in ((False, inference), (True, training)):
        counts: Counter[str] = Counter()
        for problem, count in problems_of(name, train=train).items():
            if not isinstance(problem, ConvProblem):
                counts[problem.op] += count
        assert counts == expected


def test_layers_fit_one_another() -> None:
    """Of the first layers and the last: shapes, and what training changes."""
    texts = {layer.name: str(layer.problem) for layer in network("resnet50", 2)}
    assert texts["bn1"] == "bn_infer:f32:n2c64h112w112:spatial:nchw"
    assert texts["maxpool"] == "pool_fwd:f32:n2c64h112w112:r3s3:p1x1:u2x2:max:nchw"
    assert texts["layer2.0.downsample.bn"] == "bn_infer:f32:n2c512h28w28:spatial:nchw"
    assert texts["avgpool"] == "pool_fwd:f32:n2c2048h7w7:r7s7:p0x0:u1x1:average_inc_pad:nchw"
    assert texts["softmax"] == "softmax_fwd:f32:n2c1000h1w1:accurate:channel:nchw"
    trained = {layer.name: str(layer.problem) for layer in network("resnet50", 2, "bf16", train=True)}
    assert trained["bn1"] == "bn_train:bf16:n2c64h112w112:spatial:nchw:pf32:run"
    assert trained["bn1.bwd"] == "bn_bwd:bf16:n2c64h112w112:spatial:nchw:pf32"
    assert trained["softmax.bwd"] == "softmax_bwd:bf16:n2c1000h1w1:log:channel:nchw"
    assert str(network("unet3d", layout="nhwc")[-1].problem) == (
        "softmax_fwd:f32:n1c3d128h128w128:accurate:channel:ndhwc"
    )


def test_workload_takes_batch_dtype_and_layout() -> None:
    for name in WORKLOADS:
        problems: list[Any] = [layer.problem for layer in workload(name, 4, "bf16", "nhwc")]
        assert {(p.n, p.dtype, p.layout[-1]) for p in problems} == {(4, "bf16", "c")}
        assert all(p.w_channels_last for p in problems if isinstance(p, ConvProblem))
    with pytest.raises(InvalidProblem, match="'alexnet' is not one of resnet50"):
        workload("alexnet")


@pytest.mark.parametrize("given", [5, None, b"softmax_fwd:f32:n8c100h1w1:accurate:channel:nchw"])
def test_what_is_no_text_is_no_problem(given: object) -> None:
    with pytest.raises(InvalidProblem, match="is not the text of a problem"):
        parse(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", ["t1b1i1h1l4294967296", "t99999999999999999999b1i1h1l1", "t1b1i1h4294967296l1"])
def test_recurrent_networks_beyond_all_kernels_are_refused_at_once(dims: str) -> None:
    with pytest.raises(InvalidProblem, match="it must be at most"):
        parse(f"rnn_fwd:f32:{dims}:lstm:uni:linear")
