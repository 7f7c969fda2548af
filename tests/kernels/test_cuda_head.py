"""The last layer on a GPU: its kernels in plain Python, what they need when compiled, and what they refuse."""

from __future__ import annotations

import re

import pytest
from gpus import H200
from libraries import library
from windows_cells import ARCHITECTURES, assert_exact, assert_within_budget

from nbdnn.kernels.cuda import conv_head, conv_stem
from nbdnn.kernels.cuda.window_launch import Config
from nbdnn.problem import parse

FWD, FWD_TF32, BWD_DATA, BWD_DATA_TF32 = conv_head.FWD, conv_head.FWD_TF32, conv_head.BWD_DATA, conv_head.BWD_DATA_TF32
_LAST = "n2c19h6w9:k3r3s3:p1x1:u1x1:d1x1:g1:cross"
_FIRST = "n1c3h6w8:k24r3s3:p1x1:u1x1:d1x1:g1:conv"
EXACT = [
    (FWD, f"conv_fwd:f32:{_LAST}:nchw:e:bias+relu+res+beta"),
    (FWD, f"conv_fwd:bf16:{_LAST}:nhwc"),
    (FWD, "conv_fwd:f16:n1c8h9w8:k13r2s3:ba1.0x0.1:u2x1:d2x1:g1:conv:nchw"),
    (FWD, "conv_fwd:f32:n1c16h5w6:k1r1s1:p1x1:u1x1:d1x1:g1:cross:nhwc"),
    (FWD_TF32, f"conv_fwd:f32:{_LAST}:nhwc"),
    (BWD_DATA, f"conv_bwd_data:f32:{_FIRST}:nhwc:e:beta"),
    (BWD_DATA, f"conv_bwd_data:f16:{_FIRST}:nchw"),
    (BWD_DATA_TF32, f"conv_bwd_data:f32:{_FIRST}:nhwc"),
]


@pytest.mark.parametrize(("candidate", "text"), EXACT, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_every_output_is_exact(candidate, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_exact(monkeypatch, candidate, text)


def test_a_block_takes_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_exact(monkeypatch, FWD, "conv_fwd:bf16:n1c16h20w21:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", Config(128, 1, 1))


_HEADS = ("n8c64h256w256:k3r3s3:p1x1:u1x1:d1x1:g1:cross", "n8c32h256w256:k1r5s5:p2x2:u1x1:d1x1:g1:cross")
BUDGETED = [
    *((FWD, f"conv_fwd:{dtype}:{layer}:{layout}")
      for dtype in ("f16", "f32") for layer in _HEADS for layout in ("nhwc", "nchw")),
    *((FWD_TF32, f"conv_fwd:f32:{layer}:nhwc") for layer in _HEADS),
    *((candidate, f"{candidate.op}:{dtype}:{_HEADS[0]}:nhwc")
      for dtype in ("f16", "f32")
      for candidate in (conv_stem.BWD_DATA, conv_stem.BWD_FILTER)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_heads_stay_within_the_budget(arch: str) -> None:
    library("numba_cuda")
    for candidate, text in BUDGETED:
        assert_within_budget(candidate, text, arch)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_fwd:f32:n1c4h8w8:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "4 channels and 3 filters in 1 groups"),
        ("conv_fwd:f32:n1c8h8w8:k17r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "8 channels and 17 filters in 1 groups"),
        ("conv_fwd:f32:n1c12h8w8:k4r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "12 channels and 4 filters in 2 groups"),
        ("conv_fwd:f32:n1c4096h9w9:k4r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", r"\d+ bytes of shared memory"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    support = FWD.supports(parse(text), H200)
    assert not support.ok
    assert re.search(reason, support.reason), support.reason
