"""The first layer on a GPU: its kernels in plain Python, what they need when compiled, and what they refuse."""

from __future__ import annotations

import re

import pytest
from gpus import H200
from windows_cells import ARCHITECTURES, assert_exact, assert_within_budget

from nbdnn.kernels.cuda import conv_stem
from nbdnn.kernels.cuda.window_launch import Config
from nbdnn.problem import parse

FWD, BWD_DATA, BWD_FILTER = conv_stem.FWD, conv_stem.BWD_DATA, conv_stem.BWD_FILTER
FWD_TF32, BWD_DATA_TF32, BWD_FILTER_TF32 = conv_stem.FWD_TF32, conv_stem.BWD_DATA_TF32, conv_stem.BWD_FILTER_TF32
_SMALL = "n2c3h9w13:k5r3s3:p1x1:u2x2:d1x1:g1:cross"
_LAST = "n2c9h6w7:k3r2s3:ba1.0x0.1:u1x1:d2x1:g1:cross"  # windows of dy
EXACT = [
    (FWD, f"conv_fwd:bf16:{_SMALL}:nhwc"),
    (FWD, f"conv_fwd:f16:{_SMALL}:nchw"),
    (FWD, f"conv_fwd:f32:{_SMALL}:nhwc:e:bias+relu+res+beta"),
    (FWD, "conv_fwd:f32:n1c2h5w6:k20r2s3:ba0.2x1.0:u1x3:d2x1:g1:conv:nchw"),
    (FWD, "conv_fwd:bf16:n1c4h7w9:k72r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:e:bias+relu+res+beta"),
    (FWD, "conv_fwd:bf16:n1c1h3w4:k1r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:a4"),
    (FWD_TF32, f"conv_fwd:f32:{_SMALL}:nhwc"),
    (FWD_TF32, "conv_fwd:f32:n1c3h7w6:k32r3s2:p1x1:u1x1:d2x2:g1:conv:nhwc:ynchw"),
    (BWD_FILTER, f"conv_bwd_filter:bf16:{_SMALL}:nchw"),
    (BWD_FILTER, "conv_bwd_filter:f16:n1c3h8w9:k8r5s5:p2x2:u1x1:d1x1:g1:conv:nhwc:e:beta"),
    (BWD_FILTER, f"conv_bwd_filter:f32:{_SMALL}:nhwc"),
    (BWD_FILTER, "conv_bwd_filter:f32:n1c4h8w9:k9r1s3:p0x1:u1x1:d1x1:g1:cross:nchw"),
    (BWD_FILTER_TF32, f"conv_bwd_filter:f32:{_SMALL}:nhwc"),
    (BWD_DATA, f"conv_bwd_data:bf16:{_LAST}:nhwc:e:beta"),
    (BWD_DATA, f"conv_bwd_data:f32:{_LAST}:nchw"),
    (BWD_DATA_TF32, f"conv_bwd_data:f32:{_LAST}:nhwc"),
    (BWD_FILTER, f"conv_bwd_filter:f16:{_LAST}:nhwc:e:beta"),
    (BWD_FILTER, f"conv_bwd_filter:f32:{_LAST}:nchw:ynhwc"),
    (BWD_FILTER, "conv_bwd_filter:bf16:n1c8h4w6:k3r1s1:p1x1:u1x1:d1x1:g1:conv:nchw"),
    (BWD_FILTER_TF32, f"conv_bwd_filter:f32:{_LAST}:nhwc"),
]


@pytest.mark.parametrize(("candidate", "text"), EXACT, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_every_output_is_exact(candidate, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_exact(monkeypatch, candidate, text)


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_filter"])
def test_a_block_takes_several_tiles(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = FWD if op == "conv_fwd" else BWD_FILTER
    assert_exact(monkeypatch, candidate, f"{op}:bf16:n1c3h40w42:k8r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", Config(128, 1, 1))


_FIRST_LAYERS = (
    "n32c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1:cross",
    "n64c3h224w224:k32r3s3:p1x1:u2x2:d1x1:g1:cross",
    "n128c3h224w224:k64r11s11:p2x2:u4x4:d1x1:g1:cross",
)
BUDGETED = [
    *((candidate, f"conv_fwd:{dtype}:{_FIRST_LAYERS[0]}:{layout}{end}")
      for candidate, dtype in ((FWD, "bf16"), (FWD, "f32"), (FWD_TF32, "f32"))
      for layout in ("nhwc", "nchw")
      for end in ("", ":e:bias+tanh+res+beta")),
    *((candidate, f"conv_bwd_filter:{dtype}:{layer}:{layout}")
      for candidate, dtype in ((BWD_FILTER, "bf16"), (BWD_FILTER, "f32"), (BWD_FILTER_TF32, "f32"))
      for layer in _FIRST_LAYERS[:2]
      for layout in ("nhwc", "nchw")),
]  # fmt: skip


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_first_layers_stay_within_the_budget(arch: str) -> None:
    for candidate, text in BUDGETED:
        assert_within_budget(candidate, text, arch)


@pytest.mark.parametrize("layer", _FIRST_LAYERS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_every_first_layer_has_configs(layer: str, dtype: str) -> None:
    for candidate in (FWD, BWD_FILTER):
        problem = parse(f"{candidate.op}:{dtype}:{layer}:nhwc")
        assert candidate.supports(problem, H200).ok
        names = [str(config) for config in candidate.configs(problem, H200)]
        assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_fwd:f32:n1c5h8w8:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "5 channels and 8 filters in 1 groups"),
        ("conv_fwd:f32:n1c4h8w8:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "4 channels and 8 filters in 2 groups"),
        ("conv_fwd:f64:n1c3h8w8:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "f64"),
        ("conv_fwd:f32:n1c3d8h8w8:k8t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc", "3 spatial axes"),
        ("conv_fwd:f32:n1c3h900w900:k8r120s120:p0x0:u1x1:d1x1:g1:cross:nhwc", r"\d+ bytes of shared memory"),
        ("conv_fwd:f32:n900c3h1000w1000:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "64 bits"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    support = FWD.supports(parse(text), H200)
    assert not support.ok
    assert re.search(reason, support.reason), support.reason


def test_gradients_of_a_last_layer_have_stride_1() -> None:
    problem = parse("conv_bwd_filter:f32:n1c9h8w8:k3r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc")
    assert "stride (2, 2)" in BWD_FILTER.supports(problem, H200).reason


def test_tf32_is_for_f32_alone() -> None:
    problem = parse(f"conv_fwd:bf16:{_SMALL}:nhwc")
    assert "bf16" in FWD_TF32.supports(problem, H200).reason
    assert (FWD_TF32.math, FWD.math) == ("tf32", "fma")
