"""1x1 layers of few channels on a GPU: their kernel in plain Python, what it needs compiled, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from budget import assert_lean
from emulated import result
from emulated_ptx import install
from gpus import H200
from windows_cells import ARCHITECTURES

from nbdnn.kernels.cuda import conv_pointwise
from nbdnn.problem import parse

FWD, BWD_DATA = conv_pointwise.FWD, conv_pointwise.BWD_DATA
_EXACT = [
    (FWD, "conv_fwd:f16:n2c16h5w9:k24r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    (FWD, "conv_fwd:bf16:n1c64h7w7:k104r1s1:p0x0:u1x1:d1x1:g1:conv:nhwc"),
    (FWD, "conv_fwd:f16:n1c136d2h4w5:k40t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:cross:ndhwc"),
    (FWD, "conv_fwd:f16:n3c32h1w11:k8r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:e:bias+relu+res+beta"),
    (FWD, "conv_fwd:bf16:n1c72h6w6:k56r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:e:bias"),
    (BWD_DATA, "conv_bwd_data:f16:n2c16h5w9:k24r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    (BWD_DATA, "conv_bwd_data:bf16:n1c32h7w7:k136r1s1:p0x0:u1x1:d1x1:g1:conv:nhwc:e:beta"),
    (BWD_DATA, "conv_bwd_data:f16:n1c104h6w6:k40r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:kcrs"),
]


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize(("candidate", "text"), _EXACT, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_every_output_is_exact(candidate, text: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, device = parse(text), replace(H200, sms=1)
    configs = [config for config in candidate.configs(problem, device) if config.tiles == tiles]
    assert configs or tiles == 2
    for config in configs:
        got, expected = result(candidate, problem, config, device, install(monkeypatch))
        assert got == expected


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "text",
    [
        "conv_fwd:f16:n32c16h112w112:k96r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc",
        "conv_fwd:bf16:n32c64h14w14:k384r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:e:bias+swish",
        "conv_fwd:f16:n32c144h56w56:k24r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:e:bias+relu+res+beta",
        "conv_fwd:f16:n32c384h14w14:k64r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc",
        "conv_bwd_data:f16:n32c192h28w28:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc",
        "conv_bwd_data:bf16:n32c16h112w112:k96r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc",
    ],
)
def test_layers_stay_within_the_budget(text: str, arch: str) -> None:
    problem = parse(text)
    candidate = FWD if problem.op == "conv_fwd" else BWD_DATA
    for config in candidate.configs(problem, H200):
        (launch,) = candidate.launches(problem, config, H200)
        kernel = assert_lean(launch, problem, arch, f"{text} {config}")
        assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_fwd:f32:n1c16h8w8:k16r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "dtype f32"),
        ("conv_fwd:f16:n1c16h8w8:k16r1s3:p0x1:u1x1:d1x1:g1:cross:nhwc", r"filter \(1, 3\)"),
        ("conv_fwd:f16:n1c16h8w8:k16r1s1:p0x0:u2x2:d1x1:g1:cross:nhwc", r"stride \(2, 2\)"),
        ("conv_fwd:f16:n1c16h8w8:k16r1s1:p0x0:u1x1:d1x1:g2:cross:nhwc", "2 groups"),
        ("conv_fwd:f16:n1c16h8w8:k16r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", "layouts nchw and nchw"),
        (
            "conv_fwd:f16:n1c16h8w8:k20r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc",
            "20 output channels a group are not a multiple of 8",
        ),
        ("conv_fwd:f16:n1c16h8w8:k16r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:a8", "alignment of 8 bytes is below 16"),
        ("conv_fwd:f16:n0c16h8w8:k16r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "a batch of 0 images"),
        ("conv_fwd:f16:n1c72h8w8:k104r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "72 inputs and 104 outputs"),
        ("conv_fwd:f16:n1c448h8w8:k64r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "takes 57344 bytes"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    support = FWD.supports(parse(text), H200)
    assert not support.ok
    assert re.search(reason, support.reason), support.reason
