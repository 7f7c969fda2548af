"""Convolutions behind copies that fold taps into channels: thread by thread on the CPU, and how they are posed."""

from __future__ import annotations

import pytest
from emulated import result
from emulated_ptx import install
from gpus import H200
from libraries import library

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


library("numba_cuda")
