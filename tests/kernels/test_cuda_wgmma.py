"""Implicit GEMMs on wgmma: their kernels thread by thread on the CPU, and what is compiled for each tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from budget import in_turn
from emulated import result
from emulated_ptx import install
from gpus import H200

from nbdnn.kernels.cuda import conv_wgmma, conv_wgmma_filter
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.conv_wgmma import WgmmaCandidate, tile
from nbdnn.kernels.cuda.gemm_plan import Config
from nbdnn.problem import Problem, parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

CANDIDATES: dict[tuple[str, bool], WgmmaCandidate] = {
    (each.op, each.math == "tf32"): each
    for each in (*conv_wgmma.FWD, *conv_wgmma.BWD_DATA, conv_wgmma_filter.BWD_FILTER)
}
_KINDS = [(op, "f32" if of_tf32 else "bf16") for op, of_tf32 in CANDIDATES]
_SMALL, _WIDE, _HIGH = tile(64, 64, 4, 3), tile(64, 128, 3, 3), tile(128, 64, 2, 4)
# Of forward and filter gradient; those of stride 1 also of the image's gradient.
_SHAPES = (
    ("n2c16h5w6:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "a tile of pixels of two images, remainders of everything"),
    ("n3c72h6w5:k72r2s3:ba1.0x0.2:u1x1:d2x1:g1:conv:nhwc", "several tiles and stages of channels, asymmetric"),
    ("n2c72h7w4:k16r3s3:p1x1:u2x3:d1x1:g1:conv:nhwc", "strides"),
    ("n2c16d3h4w5:k16t2r3s1:ba1.0x0.2x1.1:u1x1x1:d2x1x1:g1:cross:ndhwc", "3-D, asymmetric"),
    ("n1c16d3h5w4:k8t2r1s2:p1x0x1:u2x1x2:d1x1x1:g1:conv:ndhwc", "3-D, strides"),
    ("n2c16h5w7:k24r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", "planar, turned first; one tap"),
    ("n1c16h4w6:k16r3s3:p1x1:u1x1:d1x1:g1:conv:nhwc:ynchw", "planar output"),
)
_ENDS = ("e:bias", "e:bias+relu+res+beta")


def of_problem(problem: Problem) -> WgmmaCandidate:
    return CANDIDATES[problem.op, problem.dtype == "f32"]


def check(monkeypatch: pytest.MonkeyPatch, text: str, config: Config, early: bool = False) -> None:
    """Sums of small integers, bit for bit, from operands and a workspace full of NaN."""
    problem = parse(text)
    got, expected = result(of_problem(problem), problem, config, H200, install(monkeypatch, early))
    assert got == expected


@pytest.mark.parametrize(("parts", "early"), [(1, False), (3, True)])
@pytest.mark.parametrize(
    ("op", "dtype", "shape"),
    [(*kind, shape) for kind in _KINDS for shape, _ in _SHAPES if kind[0] != "conv_bwd_data" or ":u1x1" in shape],
)
def test_every_product_counts_once(
    op: str, dtype: str, shape: str, parts: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, f"{op}:{dtype}:{shape}", Config(_SMALL, parts), early)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("wanted", [_WIDE, _HIGH], ids=["wide", "high"])
@pytest.mark.parametrize(("op", "dtype"), _KINDS)
def test_a_tile_has_several_boxes_and_warpgroups(
    op: str, dtype: str, wanted: conv_wgmma.Tile, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{op}:{dtype.replace('bf16', 'f16')}:n2c136h9w8:k136r1s2:p0x1:u1x1:d1x1:g1:cross:nhwc"
    check(monkeypatch, text, Config(wanted, 1), early)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("end", _ENDS)
def test_the_epilogue_is_fused_whole(end: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("nhwc", "nchw"):
        text = f"conv_fwd:f16:n2c16h3w3:k24r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}:{end}"
        check(monkeypatch, text, Config(_SMALL, parts))


def _tiles() -> Iterator[tuple[ConvProblem, conv_wgmma.Tile]]:
    for op, dtype in (*_KINDS, *((op, "f16") for op in CONV_OPS)):
        problem = parse(f"{op}:{dtype}:n32c256h28w28:k256r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
        yield from ((problem, tile) for tile in of_problem(problem).tiles(problem))


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize(("problem", "tile"), in_turn(_tiles(), 3), ids=str)
def test_every_tile_stays_within_its_means(problem: ConvProblem, tile: conv_wgmma.Tile) -> None:
    """No spills and no stack, so that maps are not copied there; registers and shared memory for its blocks."""
    (launch, *_) = (each for each in of_problem(problem).launches(problem, Config(tile, 1), H200) if each.maps)
    kernel, ptx = compile_kernel(launch.source, "sm_90a"), ptx_text(launch.source, "sm_90a")
    what = f"{tile}: {kernel._replace(cubin=b'')}"
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
    assert kernel.registers * launch.source.threads * tile.min_blocks <= 65536, what
    assert (launch.dynamic_shared_bytes + 1024) * tile.min_blocks <= 228 << 10, what
    assert ptx.count("wgmma.mma_async") == 4 and "cp.async.bulk.tensor.4d" in ptx


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_fwd:bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "2 groups"),
        ("conv_bwd_data:bf16:n1c16h8w8:k16r3s3:p1x1:u2x1:d1x1:g1:cross:nhwc", "stride (2, 1)"),
        ("conv_fwd:bf16:n1c16h300w8:k16r3s3:p0x0:u1x1:d140x1:g1:cross:nhwc", "begin -280 from a border"),
        ("conv_fwd:bf16:n1c16h600w8:k16r3s3:p128x0:u1x1:d128x1:g1:cross:nhwc", "the last tap lies 256 from the first"),
        ("conv_fwd:bf16:n1c16d40h4w4:k16t3r1s1:p17x0x0:u1x1x1:d1x1x1:g1:cross:ndhwc", "begin -17 from a border"),
        ("conv_fwd:bf16:n1c16h40w40:k16r1s1:p0x0:u9x1:d1x1:g1:cross:nhwc", "stride (9, 1) is above 8"),
        ("conv_fwd:f32:n1c16h8w8:k18r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "18 output channels"),
        ("conv_fwd:f64:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "f64 is not f16 or bf16"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    problem = parse(text)
    support = of_problem(problem).supports(problem, H200)
    assert not support.ok and reason in support.reason


def test_other_generations_have_no_wgmma() -> None:
    problem = parse("conv_fwd:bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
    for capability in ((8, 0), (10, 0), (12, 0)):
        support = of_problem(problem).supports(problem, replace(H200, capability=capability))
        assert not support.ok and str(capability) in support.reason
