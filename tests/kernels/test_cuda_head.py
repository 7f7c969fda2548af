"""The last layer on a GPU: its kernels in plain Python, what they need when compiled, and what they refuse."""

from __future__ import annotations

import re

import pytest
from gpus import H200
from windows_cells import ARCHITECTURES, assert_exact, assert_within_budget

from nbdnn.kernels.cuda import conv_head, conv_stem
from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.kernels.cuda.head_plan import Config
from nbdnn.kernels.cuda.peaks import blocks_at_once
from nbdnn.problem import parse

FWD, BWD_DATA = conv_head.FWD, conv_head.BWD_DATA
_LAST = "n2c20h6w12:k3r3s3:p1x1:u1x1:d1x1:g1:cross"
_FIRST = "n1c4h6w8:k24r3s3:p1x1:u1x1:d1x1:g1:conv"
_DILATED = "n1c6h12w70:k7r3s3:p3x3:u1x1:d1x2:g1:cross"
EXACT = [
    *((FWD, f"conv_fwd:{dtype}:{shape}:{layout}")
      for shape in (_LAST, _DILATED, "n1c40h5w6:k2r1s1:p1x1:u1x1:d1x1:g1:cross")
      for dtype, layout in (("f32", "nchw"), ("f32", "nhwc:a4"), ("bf16", "nhwc"), ("f16", "nchw:ynhwc"))),
    (FWD, f"conv_fwd:f32:{_LAST}:nchw:e:bias+relu+res+beta"),
    (FWD, "conv_fwd:f16:n1c8h9w8:k13r2s3:ba1.0x0.1:u1x1:d2x1:g1:conv:nchw"),
    (BWD_DATA, f"conv_bwd_data:f32:{_FIRST}:nhwc:e:beta"),
    (BWD_DATA, f"conv_bwd_data:f16:{_FIRST}:nchw"),
]  # fmt: skip


@pytest.mark.parametrize(("candidate", "text"), EXACT, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_every_output_is_exact(candidate, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_exact(monkeypatch, candidate, text)


@pytest.mark.parametrize("columns", [16, 32])  # an odd and an even number of groups
@pytest.mark.parametrize("chunk_bytes", [32, 64])
@pytest.mark.parametrize(("dtype", "layout"), [("f32", "nhwc"), ("bf16", "nhwc"), ("f16", "nchw")])
def test_a_block_takes_several_tiles_and_chunks(
    dtype: str, layout: str, chunk_bytes: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"conv_fwd:{dtype}:n2c40h7w36:k3r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}"
    assert_exact(monkeypatch, FWD, text, Config(4, columns, 3, 1, chunk_bytes))


_HEADS = (
    "n8c64h256w256:k3r3s3:p1x1:u1x1:d1x1:g1:cross",
    "n8c32h256w256:k1r5s5:p2x2:u1x1:d1x1:g1:cross",
    "n4c64h256w256:k3r7s7:p3x3:u1x1:d1x1:g1:cross",
)


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_heads_stay_within_the_budget(arch: str) -> None:
    for text in [f"conv_fwd:{dtype}:{layer}:{layout}" for dtype in ("f16", "f32") for layer in _HEADS
                 for layout in ("nhwc", "nchw")]:  # fmt: skip
        problem = parse(text)
        for config in FWD.configs(problem, H200):
            (launch,) = FWD.launches(problem, config, H200)
            kernel, source = compile_kernel(launch.source, arch), launch.source
            assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), f"{source}"
            assert kernel.registers * source.threads * source.min_blocks <= 65536
            assert blocks_at_once(launch.dynamic_shared_bytes, H200) >= config.blocks
    for candidate in (conv_stem.BWD_DATA, conv_stem.BWD_FILTER):
        assert_within_budget(candidate, f"{candidate.op}:f16:{_HEADS[0]}:nhwc", arch)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_fwd:f32:n1c8h8w8:k17r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "8 channels and 17 filters in 1 groups"),
        ("conv_fwd:f32:n1c12h8w8:k4r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "12 channels and 4 filters in 2 groups"),
        ("conv_fwd:f32:n1c12h8w8:k4r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", r"stride \(2, 2\)"),
        ("conv_fwd:f32:n1c12h8w8:k10r3s5:p1x1:u1x1:d1x1:g1:cross:nhwc", "50 sums of a pixel"),
        ("conv_fwd:f16:n1c13h8w8:k4r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "multiples of 2 bytes"),
        ("conv_fwd:f32:n1c40h900w9:k4r90s3:p1x1:u1x1:d9x1:g1:cross:nhwc", r"1 blocks of \d+ bytes"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    support = FWD.supports(parse(text), H200)
    assert not support.ok
    assert re.search(reason, support.reason), support.reason
