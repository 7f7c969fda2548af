"""Groups of a few channels on a GPU: their kernels in plain Python, what they need when compiled, what they refuse."""

from __future__ import annotations

import pytest
from gpus import H200
from windows_cells import ARCHITECTURES, assert_exact, assert_within_budget

from nbdnn.kernels.cuda import conv_grouped
from nbdnn.kernels.cuda.window_launch import Config
from nbdnn.problem import parse

FWD, BWD_DATA, BWD_FILTER = conv_grouped.FWD, conv_grouped.BWD_DATA, conv_grouped.BWD_FILTER
FWD_TF32, BWD_DATA_TF32, BWD_FILTER_TF32 = (
    conv_grouped.FWD_TF32,
    conv_grouped.BWD_DATA_TF32,
    conv_grouped.BWD_FILTER_TF32,
)
_EIGHT = "n1c16h5w6:k16r3s3:p1x1:u1x1:d1x1:g2:cross"
_UNEQUAL = "n1c12h6w5:k18r3s2:ba1.2x0.1:u1x1:d2x1:g3:conv"
EXACT = [
    (FWD, f"conv_fwd:bf16:{_EIGHT}:nhwc:e:bias+relu+res+beta"),
    (FWD, f"conv_fwd:f16:{_UNEQUAL}:nchw"),
    (FWD, f"conv_fwd:f32:{_EIGHT}:nhwc"),
    (FWD, "conv_fwd:bf16:n1c64h4w5:k40r1s3:p0x1:u2x2:d1x1:g2:cross:nhwc"),
    (FWD_TF32, f"conv_fwd:f32:{_UNEQUAL}:nhwc"),
    (BWD_DATA, f"conv_bwd_data:bf16:{_EIGHT}:nhwc:e:beta"),
    (BWD_DATA, f"conv_bwd_data:f32:{_UNEQUAL}:nchw"),
    (BWD_DATA_TF32, f"conv_bwd_data:f32:{_EIGHT}:nhwc"),
    (BWD_FILTER, f"conv_bwd_filter:bf16:{_EIGHT}:nhwc:e:beta"),
    (BWD_FILTER, f"conv_bwd_filter:f16:{_UNEQUAL}:nchw"),
    (BWD_FILTER, f"conv_bwd_filter:f32:{_EIGHT}:nhwc"),
    (BWD_FILTER_TF32, f"conv_bwd_filter:f32:{_UNEQUAL}:nhwc"),
]


@pytest.mark.parametrize(("candidate", "text"), EXACT, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_every_output_is_exact(candidate, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_exact(monkeypatch, candidate, text)


@pytest.mark.parametrize(("candidate", "k"), [(FWD, 48), (BWD_FILTER, 32)], ids=lambda value: getattr(value, "op", ""))
def test_a_block_takes_one_of_several_units_of_a_group(candidate, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{candidate.op}:f32:n1c8h4w5:k{k}r1s2:p0x1:u1x1:d1x1:g2:cross:nhwc"
    assert_exact(monkeypatch, candidate, text, Config(128, 2, 1))


_RESNEXT = tuple(f"n32c{c}h{side}w{side}:k{c}r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc" for c, side in ((128, 56), (256, 28)))
_WIDE = tuple(f"n32c{c}h{side}w{side}:k{c}r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc" for c, side in ((512, 14), (1024, 7)))
BUDGETED = [
    *((candidate, f"{candidate.op}:bf16:{layer}") for candidate in (FWD, BWD_FILTER) for layer in _RESNEXT + _WIDE),
    *((candidate, f"{candidate.op}:f32:{layer}") for candidate in (FWD, BWD_FILTER) for layer in _RESNEXT[1:] + _WIDE),
    *((candidate, f"{candidate.op}:f32:{layer}") for candidate in (FWD_TF32, BWD_FILTER_TF32) for layer in _WIDE),
]


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_groups_of_resnext_stay_within_the_budget(arch: str) -> None:
    for candidate, text in BUDGETED:
        assert_within_budget(candidate, text, arch)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_bwd_data:f32:n1c8h8w8:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "8 to 8 channels in each of 1 groups"),
        ("conv_bwd_data:f32:n1c6h8w8:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "3 to 4 channels in each of 2 groups"),
        ("conv_bwd_data:f32:n1c80h8w8:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "40 to 4 channels in each of 2 groups"),
        ("conv_bwd_data:f32:n1c8h8w8:k8r3s3:p1x1:u2x1:d1x1:g2:cross:nhwc", "stride (2, 1)"),
        ("conv_bwd_data:f64:n1c8h8w8:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "f64"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    support = BWD_DATA.supports(parse(text), H200)
    assert not support.ok
    assert reason in support.reason
