"""The Winograd convolutions of GPUs: whole blocks as plain Python, and what their machine code needs."""

from __future__ import annotations

import pytest
from emulated import result
from emulated_ptx import install
from gpus import H200

from nbdnn.kernels.cuda import conv_winograd, winograd_transforms
from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.problem import parse

CANDIDATES = (
    conv_winograd.FWD_2X2,
    conv_winograd.FWD_4X4,
    conv_winograd.BWD_DATA_2X2,
    conv_winograd.BWD_DATA_4X4,
)
SHAPES = (
    "n2c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc",  # odd everywhere: tiles beyond both edges
    "n2c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:conv:nchw",
    "n1c16h8w12:k8r3s3:p0x0:u1x1:d1x1:g1:cross:nhwc",  # whole vectors
    "n1c8h6w7:k12r3s3:ba3.2x0.3:u1x1:d1x1:g1:conv:nhwc:kcrs:ynchw",  # the image begins inside of the first tile
    "n3c4h1w1:k5r3s3:p1x1:u1x1:d1x1:g1:cross:nchw",
    "n2c5d3h9w5:k7t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc",
    "n2c6d4h5w5:k4t3r3s3:ba2.0x3.2x0.3:u1x1x1:d1x1x1:g1:conv:ncdhw",  # slices of 9 tiles, and of 4
    "n1c9d5h4w6:k8t2r3s3:p0x1x1:u1x1x1:d1x1x1:g1:conv:ncdhw:ktrsc:yndhwc",
    "n2c8d2h3w3:k4t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc",
    "n1c4d2h3w4:k4t3r3s3:ba4.3x1.1x1.1:u1x1x1:d1x1x1:g1:cross:ncdhw",  # more padding than taps
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.id)
def test_every_output_is_its_sum(candidate, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(f"{candidate.op}:f32:{shape}")
    got, expected = result(candidate, problem, candidate.configs(problem, H200)[0], H200, install(monkeypatch))
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-9)


def test_the_epilogue_follows_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse("conv_fwd:f32:n1c4h5w6:k6r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:e:bias+relu+res+beta")
    config, *_ = CANDIDATES[0].configs(problem, H200)
    got, expected = result(CANDIDATES[0], problem, config, H200, install(monkeypatch))
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "dtype is bf16"),
        ("f32:n1c16h8w8:k16r5s5:p2x2:u1x1:d1x1:g1:cross:nhwc", "the filter is 5x5"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", r"stride (2, 2)"),
        ("f32:n1c16d8h8w8:k16t3r3s3:p1x1x1:u2x1x1:d1x1x1:g1:cross:ndhwc", r"stride (2, 1, 1)"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d2x2:g1:cross:nhwc", r"dilation (2, 2)"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g4:cross:nhwc", "in 4 groups"),
        ("f32:n64c512h512w512:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "an index reaches"),
    ],
)
def test_refusals_have_numbers(body: str, reason: str) -> None:
    for candidate in CANDIDATES:
        support = candidate.supports(parse(f"{candidate.op}:{body}"), H200)
        assert not support.ok and reason in support.reason


pytestmark = pytest.mark.usefixtures("numba_cuda")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.id)
def test_a_tile_stays_in_registers(candidate, layout: str, arch: str) -> None:
    problem = parse(f"{candidate.op}:f32:n32c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}")
    for launch in candidate.launches(problem, candidate.configs(problem, H200)[0], H200):
        if launch.source.threads == winograd_transforms.THREADS and launch.source.min_blocks == 1:
            kernel = compile_kernel(launch.source, arch)
            assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
            assert kernel.registers <= 128
