"""Convolutions behind copies that fold taps into channels: thread by thread on the CPU, and how they are posed."""

from __future__ import annotations

import pytest
from emulated import SCALARS, assert_near, result
from emulated_ptx import install
from gpus import H200
from guarded import values

from nbdnn.kernels.cuda import conv_folded
from nbdnn.kernels.cuda.conv_folded import FoldedGemm
from nbdnn.kernels.cuda.gemm_plan import Config
from nbdnn.kernels.cuda.gemm_tile import Tile
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

CANDIDATES = (*conv_folded.FWD, *conv_folded.BWD_DATA, *conv_folded.BWD_FILTER)
_ONE_WARP = Config(Tile(32, 32, 64, 1, 1, 3, 1), 1)
_SHAPES = (
    ("n2c3h8w24:k16r4s8:p0x0:u4x8:d1x1:g1:cross:nchw", "patches: a product of matrices, the filter as it is"),
    ("n2c3h8w24:k10r4s8:p0x0:u4x8:d1x1:g1:cross:nhwc", "channels-last ones, a remainder of filters"),
    ("n1c3h8w16:k8r4s4:p0x0:u4x4:d1x1:g1:conv:nhwc", "patches whose taps are read backwards"),
    ("n1c3h11w13:k8r4s4:p0x0:u4x4:d1x1:g1:cross:nchw", "rows and columns behind the last patch"),
    ("n1c3h15w22:k10r7s7:p3x3:u2x2:d1x1:g1:cross:nchw", "7x7, stride 2: more taps than strides, and one too few"),
    ("n1c3h15w22:k10r7s7:p3x3:u2x2:d1x1:g1:conv:nhwc", "the same channels-last, backwards"),
    ("n1c3h13w24:k8r7s7:p4x4:u2x4:d1x1:g1:cross:nhwc", "rows in words at unequal strides"),
    ("n2c20h6w7:k11r3s5:p0x0:u1x1:d1x1:g1:cross:nchw", "channels that no chunk divides, on either side"),
    ("n2c13h6w7:k2r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "two filters"),
    ("n1c9h7w8:k7r3s2:ba1.2x0.3:u2x1:d1x2:g1:conv:nchw", "asymmetric in every parameter"),
    ("n1c3h9w10:k9r2s2:p0x1:u3x3:d1x1:g1:cross:nchw:krsc:ynhwc", "stride beyond the filter, mixed layouts"),
    ("n1c3h9w10:k9r2s2:p0x1:u3x3:d1x1:g1:conv:nhwc:kcrs:ynchw", "the others"),
    ("n1c2d5h8w9:k7t3r3s3:p1x1x1:u2x2x2:d1x1x1:g1:cross:ncdhw", "3-D, stride 2"),
    ("n1c2d5h8w9:k7t3r5s3:p1x1x1:u2x2x1:d1x1x1:g1:conv:ndhwc", "3-D, channels-last, one axis without a stride"),
    ("n2c5d4h4w5:k6t1r2s3:p0x1x1:u2x1x1:d1x1x1:g1:cross:ncdhw", "every other depth by itself: a tap that is not there"),
    ("n1c9d3h4w5:k8t1r3s1:ba0.0x0.2x0.0:u1x1x1:d1x2x1:g1:cross:ncdhw", "3-D, channels alone"),
)


def candidate_of(problem: ConvProblem) -> FoldedGemm:
    """On mma.sync."""
    (found,) = (c for c in CANDIDATES if c.op == problem.op and "_mma" in c.id and c.supports(problem, H200).ok)
    return found


def check(monkeypatch: pytest.MonkeyPatch, problem: ConvProblem) -> None:
    """Sums of small integers, bit for bit, from operands and a workspace full of NaN."""
    got, expected = result(candidate_of(problem), problem, _ONE_WARP, H200, install(monkeypatch))
    assert got == expected


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("shape", [shape for shape, _ in _SHAPES])
@pytest.mark.parametrize("op", CONV_OPS)
def test_every_product_counts_once(op: str, shape: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, parse(f"{op}:{dtype}:{shape}"))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_beta_is_added_by_the_copy(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, *_ in (_SHAPES[3], _SHAPES[7], _SHAPES[12]):
        check(monkeypatch, parse(f"{op}:{dtype}:{shape}:e:beta"))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("filters", [8, 10])
def test_an_epilogue_is_fused_or_follows(filters: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the base where the output is the caller's, else behind the copy."""
    text = f"conv_fwd:f16:n1c3h8w8:k{filters}r4s4:p0x0:u4x4:d1x1:g1:cross:{layout}:e:bias+relu+res+beta"
    problem, block = parse(text), install(monkeypatch)
    candidate, given = candidate_of(problem), values(problem, "normal")
    assert candidate.roundings(problem, H200) == (1 if filters == 8 else 3)
    assert_near(candidate, problem, _ONE_WARP, given, H200, block, SCALARS)


def _ways(text: str) -> list[tuple[int, int]]:
    """Elements that the copies of a problem move at once."""
    problem = parse(text)
    copies = [
        launch.source.specialised_on
        for launch in candidate_of(problem).launches(problem, _ONE_WARP, H200)
        if launch.source.label.startswith("fold_kernel")
    ]
    return [(variant.first.run, variant.second.run) for variant in copies]


def test_neighbours_are_moved_together() -> None:
    """As many as rows, borders, patches and addresses are multiples of."""
    end = ":d1x1:g1:cross:"
    assert _ways(f"conv_fwd:f16:n2c3h32w48:k16r16s16:p0x0:u16x16{end}nchw") == [(8, 0)]
    assert _ways(f"conv_fwd:f32:n2c3h32w48:k16r16s16:p0x0:u16x16{end}nhwc") == [(4, 0)]
    assert _ways(f"conv_bwd_data:f16:n2c3h32w48:k16r16s16:p0x0:u16x16{end}nchw") == [(8, 0)]
    assert _ways(f"conv_bwd_data:f16:n2c3h32w48:k16r16s16:p0x0:u16x16{end}nchw:e:beta") == [(1, 0)]
    assert _ways(f"conv_fwd:f16:n2c3h32w52:k16r4s4:p0x0:u4x4{end}nchw") == [(4, 0)]
    assert _ways(f"conv_fwd:f16:n2c3h32w54:k16r4s4:p0x0:u4x4{end}nchw:krsc") == [(2, 1)]
    assert _ways(f"conv_bwd_filter:f32:n2c3h22w22:k10r4s4:p1x1:u4x4{end}nchw") == [(1, 1), (4, 0)]


@pytest.mark.parametrize(
    ("text", "posed", "copies"),
    [
        (
            "conv_fwd:f16:n32c3h224w224:k768r16s16:p0x0:u16x16:d1x1:g1:cross:nchw",
            "conv_fwd:f16:n32c768h14w14:k768r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:ynchw",
            [0],
        ),
        (
            "conv_bwd_data:f16:n32c3h224w224:k768r16s16:p0x0:u16x16:d1x1:g1:conv:nchw",
            "conv_bwd_data:f16:n32c768h14w14:k768r1s1:p0x0:u1x1:d1x1:g1:cross:nchw:krsc:ynhwc",
            [0, 2],
        ),
        (
            "conv_fwd:f16:n2c2d32h224w224:k64t7r7s7:p3x3x3:u2x2x2:d1x1x1:g1:cross:ncdhw",
            "conv_fwd:f16:n2c32d32h115w112:k64t7r4s1:p3x0x0:u2x1x1:d1x1x1:g1:cross:ndhwc:yncdhw",
            [0, 1],
        ),
        (
            "conv_bwd_data:f32:n128c20h12w12:k50r5s5:p0x0:u1x1:d1x1:g1:conv:nchw",
            "conv_bwd_data:f32:n128c20h12w12:k52r5s5:p0x0:u1x1:d1x1:g1:cross:nhwc:ynchw",
            [0, 1],
        ),
        (
            "conv_bwd_filter:f16:n2c16d8h8w8:k2t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:cross:ndhwc",
            "conv_bwd_filter:f16:n2c16d8h8w8:k8t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:cross:ndhwc",
            [1, 2],
        ),
    ],
)
def test_what_is_posed(text: str, posed: str, copies: list[int]) -> None:
    problem = parse(text)
    found = candidate_of(problem).folded(problem)
    assert (str(found.posed), sorted(found.copies)) == (posed, copies)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("mma_gemm", "f16:n2c24h9w9:k16r3s3:p1x1:u2x2:d1x1:g1", "24 and 16 channels are whole"),
        ("mma_gemm", "f16:n2c8h9w9:k16r1s1:p0x0:u1x1:d1x1:g1", "taps that are folded are no cheaper"),
        ("mma_gemm", "f16:n2c9h9w9:k9r3s3:p1x1:u1x1:d1x1:g3", "3 groups, one is folded"),
        ("mma_gemm_tf32", "f16:n2c9h9w9:k9r3s3:p1x1:u1x1:d1x1:g1", "when folded: dtype f16 is not f32"),
        ("mma_gemm", "f16:n9c3h9000w9000:k16r4s4:p0x0:u4x4:d1x1:g1", "2187000000 elements are more than int32 counts"),
        ("wgmma_gemm", "f16:n2c3h9w9:k16r3s3:p1x1:u2x2:d1x1:g1", "channels when folded, 64 are worth a stage"),
        ("fma_gemm", "f32:n2c5h9w9:k7r3s3:p1x1:u1x1:d1x1:g1", "5 and 7 channels are whole"),
    ],
)
def test_refusals_say_the_number(name: str, shape: str, reason: str) -> None:
    (candidate,) = (each for each in conv_folded.FWD if each.algorithm == f"folded_{name}")
    support = candidate.supports(parse(f"conv_fwd:{shape}:cross:nhwc"), H200)
    assert not support.ok and reason in support.reason
