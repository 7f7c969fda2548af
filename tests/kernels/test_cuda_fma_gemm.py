"""The matrix products of the FMA units: whole blocks as plain Python, and what their machine code needs.

Without a GPU the former says that every index is right, that every product is summed once, and that nothing is read
before it has arrived or overwritten while it may be read.
"""

from __future__ import annotations

import re

import pytest
from emulated import result
from emulated_ptx import Words, install
from gpus import H200

from nbdnn.kernels.cuda import conv_fma_gemm, conv_fma_gemm_filter
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.fma_plan import Config
from nbdnn.kernels.cuda.fma_tile import Tile
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

CANDIDATES = {c.op: c for c in (conv_fma_gemm.FWD, conv_fma_gemm.BWD_DATA, conv_fma_gemm_filter.BWD_FILTER)}


def run(monkeypatch: pytest.MonkeyPatch, problem: ConvProblem, config: Config, early: bool = False) -> None:
    """All blocks of all launches of a candidate: the output must be exact."""
    got, expected = result(CANDIDATES[problem.op], problem, config, H200, install(monkeypatch, early))
    assert got == expected


EVERY_DIRECTION = (
    ("n2c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "odd everywhere"),
    ("n2c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:conv:nchw", "the same, flipped and planar"),
    ("n1c16h8w12:k32r3s3:p1x1:u1x1:d1x1:g1:conv:nhwc", "whole vectors: 16 bytes at a time"),
    ("n1c16h8w12:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nchw", "the same, planar"),
    ("n2c12h7w9:k9r3s2:ba1.2x0.3:u2x1:d1x2:g1:conv:nhwc", "asymmetric in every parameter"),
    ("n2c12h7w9:k9r3s2:ba1.2x0.3:u2x1:d1x2:g1:cross:nchw", "the same, planar"),
    ("n1c5h10w12:k6r3s3:p1x1:u3x4:d3x2:g1:cross:nhwc", "strides and dilations with common factors"),
    ("n1c5h8w12:k6r2s2:p0x0:u3x3:d1x1:g1:cross:nchw", "stride beyond the filter: inputs nobody reads"),
    ("n1c6h1w1:k5r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", "one pixel and a stride"),
    ("n2c8h4w6:k12r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", "1x1: planar pixels 16 bytes at a time"),
    ("n2c12h5w5:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "groups"),
    ("n1c8d3h4w5:k10t2r3s1:ba1.0x0.2x1.1:u1x2x1:d2x1x1:g2:conv:ncdhw", "3-D, grouped"),
    ("n1c8d3h4w5:k12t3r3s3:p1x1x1:u2x2x2:d1x1x1:g1:cross:ndhwc", "3-D, strided"),
    ("n1c8h6w7:k12r3s3:p1x1:u1x1:d1x1:g1:cross:nchw:krsc", "a filter of the other layout"),
    ("n1c8h6w7:k12r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:kcrs:ynchw", "an output and a filter of the other layout"),
    ("n1c16h8w12:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:a4", "not aligned: 4 bytes at a time"),
)
ONE_DIRECTION = (
    ("conv_fwd:f32:n1c9h7w9:k70r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:e:bias+relu+res+beta", "an epilogue, one at a time"),
    ("conv_fwd:f32:n1c8h8w9:k72r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:e:bias+relu+res+beta", "an epilogue, four channels"),
    ("conv_fwd:f32:n1c8h8w9:k72r3s3:p1x1:u1x1:d1x1:g1:cross:nchw:e:bias+relu+res+beta", "an epilogue, four pixels"),
    ("conv_bwd_data:f32:n1c9h7w9:k5r3s3:p1x1:u2x2:d1x1:g1:cross:nchw:e:beta", "beta in residue classes"),
    ("conv_bwd_filter:f32:n1c9h7w9:k5r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc:e:beta", "beta of a filter"),
    ("conv_bwd_filter:f32:n0c9h7w9:k5r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", "no image: a gradient of zeros"),
)
TEXTS = [f"{op}:f32:{shape}" for op in CONV_OPS for shape, _ in EVERY_DIRECTION] + [text for text, _ in ONE_DIRECTION]


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_output_is_its_sum(text: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, parse(text), Config(Tile(64, 64), 1), early)


@pytest.mark.parametrize("tile", [Tile(128, 128), Tile(128, 64), Tile(64, 128)], ids=str)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_every_tile_and_its_remainders(op: str, layout: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(f"{op}:f32:n1c12h11w13:k132r1s2:p0x1:u1x1:d1x1:g1:cross:{layout}")
    run(monkeypatch, problem, Config(tile, 2), early=layout == "nchw")


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("n2c16h4w6:k24r1s1:p0x0:u1x1:d1x1:g2:cross:nchw", Config(Tile(64, 64), 1)),
        ("n2c12h4w6:k20r1s1:p0x0:u1x1:d1x1:g1:cross:nchw:ynhwc", Config(Tile(64, 64), 1)),
        ("n2c12h4w6:k20r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:ynchw", Config(Tile(64, 64), 2)),
        ("n1c8h4w6:k70r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", Config(Tile(128, 64), 1)),
        ("n1c70h4w6:k8r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", Config(Tile(64, 128), 1)),
    ],
)
def test_pixels_of_a_filter_gradient_come_by_four(text: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped, of either factor alone, and in tiles of several warps."""
    run(monkeypatch, parse(f"conv_bwd_filter:f32:{text}"), config)


@pytest.mark.parametrize("parts", [2, 5, 40])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_parts_are_added(op: str, layout: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also parts that have nothing to sum, and so many that slices of them are added first."""
    end = {"conv_fwd": "e:bias+relu+beta"}.get(op, "e:beta")
    problem = parse(f"{op}:f32:n2c9h7w6:k8r3s3:p1x1:u2x1:d1x1:g1:conv:{layout}:{end}")
    run(monkeypatch, problem, Config(Tile(64, 64), parts))


@pytest.mark.parametrize("op", CONV_OPS)
def test_a_copy_that_is_not_waited_for_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "copy_async_wait", lambda words, groups: lambda: None)
    problem = parse(f"{op}:f32:n1c16h8w12:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
    with pytest.raises(AssertionError):
        run(monkeypatch, problem, Config(Tile(64, 64), 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f64:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "dtype is f64"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "dtype is bf16"),
        ("f32:n1c3h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "3 input channels a group"),
        ("f32:n1c16h8w8:k48r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc", "1 input channels a group"),
        ("f32:n3c1024h1000w1000:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "an index reaches 3072000000"),
    ],
)
@pytest.mark.parametrize("op", CONV_OPS)
def test_refusals_have_numbers(op: str, text: str, reason: str) -> None:
    support = CANDIDATES[op].supports(parse(f"{op}:{text}"), H200)
    assert not support.ok and reason in support.reason


def test_a_product_with_few_tiles_is_split() -> None:
    """The first choice has enough blocks for the device's multiprocessors."""
    for op in CONV_OPS:
        problem = parse(f"{op}:f32:n32c256h14w14:k256r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
        first = CANDIDATES[op].configs(problem, H200)[0]
        product, *_ = CANDIDATES[op].launches(problem, first, H200)
        blocks = product.grid[0] * product.grid[1] * product.grid[2]
        assert first.parts > 1
        assert blocks >= H200.sms


pytestmark = pytest.mark.usefixtures("numba_cuda")

_COMPILED = [
    f"{op}:f32:{shape}:{layout}"
    for op in CONV_OPS
    for shape, layout in (
        ("n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross", "nhwc"),
        ("n32c512h7w7:k512r3s3:p1x1:u1x1:d1x1:g1:cross", "nchw"),
        ("n32c256h28w28:k512r1s1:p0x0:u2x2:d1x1:g1:cross", "nhwc"),
        ("n32c256h14w14:k1024r1s1:p0x0:u1x1:d1x1:g1:cross", "nchw"),
        ("n32c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g1:cross", "nchw"),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("text", _COMPILED)
def test_a_multiprocessor_holds_its_threads(text: str, arch: str) -> None:
    problem = parse(text)
    candidate = CANDIDATES[problem.op]
    for config in candidate.configs(problem, H200):
        for launch in candidate.launches(problem, config, H200):
            kernel = compile_kernel(launch.source, arch)
            assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
            if launch.source.min_blocks > 1:
                assert kernel.registers <= 65536 // (launch.source.min_blocks * launch.source.threads)
                assert launch.source.min_blocks * kernel.shared_bytes <= 160 << 10  # of sm_80; sm_120 has 100 KiB


@pytest.mark.parametrize("text", _COMPILED)
def test_a_stage_is_multiply_adds_and_wide_loads(text: str) -> None:
    """Eight times 64 of the former and 4 of the latter, and no 64-bit division in what surrounds them."""
    problem = parse(text)
    candidate = CANDIDATES[problem.op]
    launch = next(
        launch
        for launch in candidate.launches(problem, candidate.configs(problem, H200)[0], H200)
        if launch.source.min_blocks > 1
    )
    ptx = ptx_text(launch.source, "sm_90a")
    assert len(re.findall(r"ld\.shared\.v4\.f32|ld\.shared\.v2\.b64", ptx)) >= 32
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= 512
    assert not re.findall(r"(?:div|rem)\.[su]64|\.f64", ptx)
