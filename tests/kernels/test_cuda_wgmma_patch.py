"""Convolutions whose taps share a patch: their kernels thread by thread on the CPU, and what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from budget import in_turn
from emulated import result
from emulated_ptx import install
from gpus import H200

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_wgmma_patch
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.wgmma_patch import PatchTile
from nbdnn.kernels.cuda.wgmma_patch_plan import Plan, lines, shared_bytes
from nbdnn.problem import Problem, parse

CANDIDATES = {(each.op, each.math): each for each in (*conv_wgmma_patch.FWD, *conv_wgmma_patch.BWD_DATA)}
OPS = ("conv_fwd", "conv_bwd_data")
_ONE_SM = replace(H200, sms=1)  # one block, which takes all tiles where the filter is held
_SHAPES = (
    ("n2c16h9w13:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "columns and rows that are not whole"),
    ("n1c16h8w11:k16r3s2:ba1.2x0.3:u1x1:d2x1:g1:conv:nhwc", "asymmetric, dilated rows"),
    ("n1c24h7w9:k16r1s3:p0x2:u1x1:d1x2:g1:cross:nhwc", "one row of taps, dilated"),
    ("n1c16h6w5:k16r2s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "one column of taps: no slot is lost between rows"),
    ("n2c16h5w7:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nchw", "planar, turned first"),
)


def candidate_of(problem: Problem) -> conv_wgmma_patch.WgmmaPatch:
    return CANDIDATES[problem.op, "tf32" if problem.dtype == "f32" else "fma"]


def plan(problem, rows: int, width: int, stays: bool = False, held: bool = False, **tile) -> Plan:
    one = Plan(_tile(held=held, **tile), rows, width, stays or held)
    line, _, _ = lines(problem, one)
    return one._replace(tile=one.tile._replace(slots=-(-((rows - 1) * line + width) // 8) * 8))


def _tile(team=1, teams=1, depth=1, stages=2, held=False, chunk=16) -> PatchTile:
    return PatchTile(8, team, teams, depth, stages, held, chunk, 1)


def check(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    rows: int,
    width: int,
    early: bool = False,
    device: Gpu = H200,
    **tile,
) -> None:
    """Sums of small integers, bit for bit, from operands and a workspace full of NaN."""
    problem = parse(text)
    config = plan(problem, rows, width, **tile)
    got, expected = result(candidate_of(problem), problem, config, device, install(monkeypatch, early))
    assert got == expected


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("shape", [shape for shape, _ in _SHAPES])
@pytest.mark.parametrize("op", OPS)
def test_every_product_counts_once(op: str, shape: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, f"{op}:bf16:{shape}", 3, 6, early)


@pytest.mark.parametrize("shape", [shape for shape, _ in _SHAPES])
@pytest.mark.parametrize("op", OPS)
def test_tf32_has_half_as_many_channels_a_line(op: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, f"{op}:f32:{shape}", 3, 6)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize(("teams", "filters"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("op", OPS)
def test_tf32_with_every_kind(op: str, teams: int, filters: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = teams > 1
    channels = ("c28h7w9:k36" if op == "conv_fwd" else "c36h7w9:k28") if held else "c68h7w9:k68"
    text = f"{op}:f32:n1{channels}r2s3:p1x1:u1x1:d1x1:g1:cross:nhwc"
    stages, depth = (6, 1) if held else (3, 2)
    check(monkeypatch, text, 4, 8, early, _ONE_SM, team=filters, teams=teams, depth=depth, stages=stages, held=held)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("teams", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_a_held_filter_serves_all_tiles(op: str, teams: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    channels = "c64h9w13:k72" if op == "conv_fwd" else "c72h9w13:k64"
    text = f"{op}:bf16:n2{channels}r3s2:p1x1:u1x1:d1x1:g1:cross:nhwc"
    check(monkeypatch, text, 3, 7, early, _ONE_SM, teams=teams, stages=6, held=True)


@pytest.mark.parametrize(("channels", "early"), [(16, True), (40, False), (72, True)])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("op", OPS)
def test_blocks_stay_while_the_filter_passes_by(
    op: str, dtype: str, channels: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{op}:{dtype}:n2c{channels}h9w13:k{channels}r3s2:p1x1:u1x1:d1x1:g1:cross:nhwc"
    blocks_in = -(-channels // (32 if dtype == "f32" else 64))
    team, depth = 2 if channels > 64 else 1, min(blocks_in, 2)
    check(monkeypatch, text, 4, 7, early, _ONE_SM, stays=True, team=team, depth=depth, stages=4)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("op", OPS)
def test_a_team_shares_patches(op: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{op}:f16:n1c136h7w9:k136r2s3:p1x1:u1x1:d1x1:g1:cross:nhwc"
    check(monkeypatch, text, 4, 8, early, team=2, depth=2, stages=3, chunk=32)


@pytest.mark.parametrize(("channels", "kinds"), [(64, {(True, 2), (True, 3), (False, 1)}), (72, {(False, 1)})])
@pytest.mark.parametrize("op", OPS)
def test_every_config_is_right(op: str, channels: int, kinds: set, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(f"{op}:bf16:n1c{channels}h9w13:k{channels}r2s2:p1x0:u1x1:d1x1:g1:cross:nhwc")
    configs = candidate_of(problem).configs(problem, H200)
    assert {(config.tile.held, config.tile.teams) for config in configs} == kinds
    assert {config.tile.team for config in configs} == ({1, 2} if channels > 64 else {1})
    for config in configs:
        with monkeypatch.context() as patch:
            got, expected = result(candidate_of(problem), problem, config, _ONE_SM, install(patch))
        assert got == expected, str(config)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("end", ["e:bias", "e:bias+relu+res+beta"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw", "nhwc:ynchw"])
def test_the_epilogue_is_fused_whole(end: str, layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"conv_fwd:{dtype}:n2c16h4w5:k24r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}:{end}"
    check(monkeypatch, text, 2, 5, device=_ONE_SM, teams=2, stages=9, held=True)


@pytest.mark.parametrize(("rows", "chunk"), [(1, 32), (2, 32), (6, 16), (8, 32)])
@pytest.mark.parametrize("end", ["e:beta", "e:relu+res", "e:bias+res+beta"])
@pytest.mark.parametrize("kind", ["f16:nhwc", "f32:nhwc", "bf16:nchw", "f32:nchw"])
def test_what_is_read_comes_chunk_by_chunk(
    kind: str, end: str, rows: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks larger than the tile, as large, smaller by less and by more than are asked for ahead."""
    dtype, layout = kind.split(":")
    text = f"conv_fwd:{dtype}:n1c16h9w6:k24r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}:{end}"
    check(monkeypatch, text, rows, 6, chunk=chunk)


def _tiles() -> Iterator[tuple[Problem, Plan]]:
    for text in (
        "conv_fwd:bf16:n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc",
        "conv_bwd_data:f16:n32c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g1:cross:nchw",
        "conv_bwd_data:f32:n32c64h56w56:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc",
    ):
        problem = parse(text)
        yield from ((problem, config) for config in candidate_of(problem).configs(problem, H200))


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize(("problem", "config"), in_turn(_tiles(), 4), ids=str)
def test_every_tile_stays_within_its_means(problem: Problem, config: Plan) -> None:
    """No spills and no stack, so that maps are not copied there; registers and shared memory for its blocks."""
    (launch, *_) = (each for each in candidate_of(problem).launches(problem, config, H200) if each.maps)
    kernel, ptx = compile_kernel(launch.source, "sm_90a"), ptx_text(launch.source, "sm_90a")
    what = f"{config}: {kernel._replace(cubin=b'')}"
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
    assert kernel.registers * launch.source.threads * config.tile.min_blocks <= 65536, what
    assert launch.dynamic_shared_bytes == shared_bytes(problem, config), what
    assert (launch.dynamic_shared_bytes + 1024) * config.tile.min_blocks <= 228 << 10, what
    assert ptx.count("wgmma.mma_async") == 4, what


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_fwd:bf16:n1c16h8w8:k16r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "1 tap,"),
        ("conv_fwd:bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "2 groups"),
        ("conv_fwd:bf16:n1c16h8w8:k16r3s3:p1x1:u1x2:d1x1:g1:cross:nhwc", "stride (1, 2)"),
        ("conv_fwd:bf16:n1c16d3h8w8:k16t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc", "3 dimensions"),
        ("conv_fwd:bf16:n1c16h8w300:k16r1s3:p0x0:u1x1:d1x140:g1:cross:nhwc", "no tile for outputs of (8, 20)"),
        ("conv_fwd:f64:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "f64 is not f16 or bf16"),
        ("conv_fwd:f32:n1c16h8w8:k18r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "18 output channels"),
        ("conv_fwd:bf16:n1c12h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "12 input channels"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    problem = parse(text)
    support = candidate_of(problem).supports(problem, H200)
    assert not support.ok and reason in support.reason


def test_other_generations_have_no_wgmma() -> None:
    problem = parse("conv_fwd:bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
    for capability in ((8, 0), (10, 0), (12, 0)):
        support = conv_wgmma_patch.FWD[0].supports(problem, replace(H200, capability=capability))
        assert not support.ok and str(capability) in support.reason
