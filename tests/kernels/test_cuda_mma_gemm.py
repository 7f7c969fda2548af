"""Implicit GEMMs on mma.sync: their kernels lane by lane on the CPU, and what is compiled for each tile."""

from __future__ import annotations

import numpy as np
import pytest
from emulated import memory, result, run
from emulated_ptx import install
from gpus import H200
from guarded import NUMPY_DTYPE

from nbdnn.kernels.cuda import conv_mma_gemm, conv_mma_gemm_filter
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.gemm_plan import Config, MmaCandidate
from nbdnn.kernels.cuda.gemm_tile import Tile
from nbdnn.kernels.cuda.launch import WORKSPACE
from nbdnn.kernels.cuda.turn_channels import input_places, turn_inputs, turned_bytes
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

CANDIDATES = (*conv_mma_gemm.FWD, *conv_mma_gemm.BWD_DATA, *conv_mma_gemm_filter.BWD_FILTER)
# One warp, so that Python is quick; and four, two on each axis, of the widest stages.
_ONE_WARP, _FOUR_WARPS = Tile(32, 32, 64, 1, 1, 3, 1), Tile(64, 64, 128, 2, 2, 3, 1)
_SHAPES = (
    ("n2c16h5w6:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "several tiles of pixels, a remainder of filters"),
    ("n2c72h3w4:k40r3s3:p1x1:u2x2:d1x1:g1:conv:nhwc", "several stages a tap, the last with a remainder; stride 2"),
    ("n1c16h7w9:k32r3s2:ba1.2x0.3:u2x1:d1x2:g2:conv:nhwc", "asymmetric in every parameter, groups"),
    ("n1c8h6w8:k8r2s2:p0x0:u3x3:d1x1:g1:cross:nhwc", "gradients that no tap reaches"),
    ("n1c16h8w11:k8r3s3:p2x2:u2x4:d2x2:g1:conv:nhwc", "stride and dilation with a common factor"),
    ("n2c16h5w5:k24r1s1:p0x0:u2x2:d1x1:g1:cross:nhwc", "one tap"),
    ("n2c32h7w5:k48r1s1:p0x0:u1x1:d1x1:g2:cross:nhwc", "one tap that meets every pixel, groups"),
    ("n2c16d3h4w5:k16t2r3s1:ba1.0x0.2x1.1:u1x2x1:d2x1x1:g2:cross:ndhwc", "3-D, asymmetric in every parameter"),
    ("n2c16h5w6:k24r3s3:p1x1:u1x1:d1x1:g1:conv:nchw", "planar: pixels of 16 bits two at a time, taps one"),
    ("n2c24h4w7:k16r3s2:ba1.2x0.3:u2x1:d1x2:g1:cross:nchw", "planar, four pixels of a plane at a time, residues"),
    ("n1c16h5w7:k32r2s2:p0x0:u1x1:d1x1:g2:cross:nchw:ynhwc", "planar in, channels-last out, groups"),
    ("n2c16h7w5:k24r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:ynchw", "channels-last in, planar out"),
    ("n1c8h6w4:k16r2s3:p1x1:u1x1:d1x1:g1:cross:nhwc:kcrs", "the filter alone is turned"),
    ("n1c16d3h4w3:k8t2r1s2:p1x0x1:u1x1x2:d1x1x1:g1:conv:ncdhw", "planar 3-D"),
)
_ENDS = ("e:bias", "e:res+beta", "e:bias+relu+res+beta")


def candidate_of(problem: ConvProblem) -> MmaCandidate:
    (found,) = (c for c in CANDIDATES if c.op == problem.op and c.supports(problem, H200).ok)
    return found


def check(monkeypatch: pytest.MonkeyPatch, problem: ConvProblem, config: Config, early: bool = False) -> None:
    """Sums of small integers, bit for bit, from operands and a workspace full of NaN."""
    got, expected = result(candidate_of(problem), problem, config, H200, install(monkeypatch, early))
    assert got == expected


@pytest.mark.parametrize(("dtype", "parts"), [("bf16", 1), ("f32", 3)])
@pytest.mark.parametrize("shape", [shape for shape, _ in _SHAPES])
@pytest.mark.parametrize("op", CONV_OPS)
def test_every_product_counts_once(
    op: str, shape: str, dtype: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, parse(f"{op}:{dtype}:{shape}"), Config(_ONE_WARP, parts))


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_several_warps_share_a_tile(op: str, dtype: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, _ = _SHAPES[1]
    check(monkeypatch, parse(f"{op}:{dtype}:{shape}"), Config(_FOUR_WARPS, 1), early)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_a_launch_as_it_is_chosen(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of a problem that fills the widest tile of most candidates less than once."""
    problem = parse(f"{op}:{dtype}:n2c64h6w6:k72r1s2:p0x0:u1x1:d1x1:g1:conv:nhwc")
    config, *_ = candidate_of(problem).configs(problem, H200)
    check(monkeypatch, problem, config)


@pytest.mark.parametrize("parts", [1, 9])
@pytest.mark.parametrize("end", _ENDS)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_the_epilogue_is_fused_whole(dtype: str, end: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, layout in (("h3w3", "nhwc"), ("h3w3", "nchw"), ("h2w4", "nchw")):
        text = f"conv_fwd:{dtype}:n2c16{shape}:k24r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}:{end}"
        check(monkeypatch, parse(text), Config(_ONE_WARP, parts))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("shape", ["n2c16h5w7:k24r3s2", "n2c24h6w4:k16r1s3"])
def test_inputs_are_turned(dtype: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once, one alone, and none."""
    for layouts, launches in (("nchw", 2), ("nchw:krsc", 2), ("nhwc:kcrs", 2), ("nhwc:ynchw", 1)):
        problem = parse(f"conv_fwd:{dtype}:{shape}:p1x1:u1x1:d1x1:g1:cross:{layouts}")
        config = Config(_ONE_WARP, 1)
        assert len(candidate_of(problem).launches(problem, config, H200)) == launches
        check(monkeypatch, problem, config)


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("bf16", "n2c72h9w8:k8", (4, 1)),
        ("bf16", "n1c136h5w20:k16", (2, 1)),
        ("bf16", "n2c24h9w9:k8", (0, 1)),
        ("bf16", "n2c24h3w3:k72", (0, 1)),
        ("f32", "n2c36h11w12:k4", (4, 1)),
        ("f32", "n1c40h6w11:k36", (2, 1)),
        ("f32", "n2c4h9w9:k4", (1, 1)),
    ],
)
def test_every_element_is_turned(
    dtype: str, shape: str, words: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles by loads of 16 and 8 bytes, and by words and elements, with remainders of channels and pixels."""
    problem = parse(f"conv_fwd:{dtype}:{shape}r2s2:p1x1:u1x1:d1x1:g1:cross:nchw")
    counts = [np.arange(o.size_elems, dtype=np.uint16) for o in problem.operands]
    operands = [memory(dtype, c.astype("f4") if dtype == "f32" else c.view(NUMPY_DTYPE[dtype])) for c in counts]
    workspace = memory("f32", np.zeros(turned_bytes(problem) // 4))
    (launch,) = turn_inputs(problem, 0)
    assert launch.source.specialised_on[1:] == words
    run(install(monkeypatch), launch, operands, workspace)
    for place, source, operand in zip(input_places(problem, 0), operands, problem.operands, strict=False):
        turned = workspace.view(dtype, WORKSPACE - place).values()[: source.count]
        turned = turned.reshape(operand.shape[0], -1, operand.shape[1])
        assert np.array_equal(turned.swapaxes(1, 2).ravel(), source.values())


def _tiles(op: str, dtype: str) -> tuple[MmaCandidate, ConvProblem, tuple[Tile, ...]]:
    """All tiles of a candidate, which a problem larger than each of them has."""
    problem = parse(f"{op}:{dtype}:n32c256h28w28:k256r3s3:p1x1:u1x1:d1x1:g1:conv:nhwc")
    candidate = candidate_of(problem)
    return candidate, problem, candidate.tiles(problem)


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_sums_stay_in_registers(op: str, dtype: str) -> None:
    """On the oldest and the smallest architecture; the registry's test compiles small problems for the others."""
    candidate, problem, tiles = _tiles(op, dtype)
    for tile in tiles:
        launch, *_ = candidate.launches(problem, Config(tile, 1), H200)
        kernel = compile_kernel(launch.source, "sm_80")
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), tile
        assert kernel.registers * tile.threads * tile.min_blocks <= 65536, tile
        assert kernel.shared_bytes + launch.dynamic_shared_bytes <= 99 << 10, tile


@pytest.mark.usefixtures("numba_cuda")
def test_the_pipeline_is_what_it_should_be() -> None:
    """The widest tile: one set of copies and products in the loop, all of 16 bytes, none through local memory."""
    candidate, problem, (widest, *_) = _tiles("conv_fwd", "bf16")
    launch, *_ = candidate.launches(problem, Config(widest, 1), H200)
    ptx = ptx_text(launch.source, "sm_90a")
    steps = widest.k_bytes // 32
    products = widest.warp_m * widest.warp_n // (16 * 8)
    assert ptx.count("mma.sync.aligned.m16n8k16") == steps * products
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.shared") == steps * (widest.warp_m + widest.warp_n) // 16
    chunks = (widest.m + widest.n) * widest.k_bytes // 16 // widest.threads
    assert ptx.count("cp.async.cg.shared.global") == widest.stages * chunks
    assert ".local" not in ptx


def test_refusals_name_the_number() -> None:
    def reason(candidate: MmaCandidate, text: str) -> str:
        support = candidate.supports(parse(f"{candidate.op}:{text}"), H200)
        assert not support.ok
        return support.reason

    sixteen, tf32 = conv_mma_gemm.FWD
    rest = "r3s3:p1x1:u1x1:d1x1:g1:cross"
    assert "f32" in reason(sixteen, f"f32:n1c8h8w8:k8{rest}:nhwc")
    assert "12 input channels" in reason(sixteen, f"bf16:n1c12h8w8:k8{rest}:nhwc")
    assert "6 output channels" in reason(tf32, f"f32:n1c8h8w8:k6{rest}:nhwc")
    assert "8 bytes" in reason(sixteen, f"bf16:n1c8h8w8:k8{rest}:nhwc:a8")
    assert "extent 17" in reason(sixteen, "bf16:n1c8h32w32:k8r3s17:p1x8:u1x1:d1x1:g1:cross:nhwc")
    assert "3072000000" in reason(sixteen, f"bf16:n3c1024h1000w1000:k8{rest}:nhwc")


def test_few_tiles_are_cut_into_parts() -> None:
    """A layer of batch 1 has fewer tiles than an H200 multiprocessors; its default fills at least half of them."""
    for op, shape in (
        ("conv_fwd", "n1c256h14w14:k256r3s3:p1x1"),
        ("conv_bwd_data", "n1c256h14w14:k256r3s3:p1x1"),
        ("conv_bwd_filter", "n32c64h56w56:k64r1s1:p0x0"),
    ):
        problem = parse(f"{op}:bf16:{shape}:u1x1:d1x1:g1:cross:nhwc")
        candidate = candidate_of(problem)
        config, *_ = candidate.configs(problem, H200)
        blocks = np.prod(candidate.launches(problem, config, H200)[0].grid)
        assert config.parts > 1
        assert H200.sms / 2 <= blocks <= H200.sms * config.tile.min_blocks
        assert candidate.workspace_bytes(problem, config, H200) == 4 * config.parts * problem.operands[2].size_elems
