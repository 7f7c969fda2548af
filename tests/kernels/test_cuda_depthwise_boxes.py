"""Depthwise kernels whose pixels come by boxes: thread by thread on the CPU, what is compiled, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from emulated import result
from emulated_ptx import install
from gpus import H200

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_plan as plan
from nbdnn.kernels.cuda import conv_depthwise_boxes
from nbdnn.kernels.cuda.boxes_plan import Boxes
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.peaks import blocks_at_once
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

CANDIDATES = {each.op: each for each in (conv_depthwise_boxes.FWD, conv_depthwise_boxes.BWD_DATA)}
_ONE_SM = replace(H200, sms=1)  # a block of each slab, which takes all tiles
_SMALL = Boxes(rows=2, columns=2, strips_h=2, strips_w=3, channels=16, stages=2, blocks=1)
_SHAPES = (
    ("n2c16h9w13:k16r3s3:p1x1:u1x1:d1x1:g16:cross", "rows and columns that tiles do not divide"),
    ("n1c24h4w6:k24r3s3:p1x1:u1x1:d1x1:g24:conv", "whole tiles, a slab that is not full, the filter reversed"),
    ("n3c8h1w1:k8r3s3:p1x1:u1x1:d1x1:g8:cross", "one pixel, fewer channels than a slab"),
    ("n1c40h5w6:k40r3s3:p0x0:u1x1:d1x1:g40:cross", "border valid, three slabs"),
    ("n1c16h5w6:k16r3s3:p2x2:u1x1:d1x1:g16:cross", "border full"),
    ("n1c8h4w4:k8r3s3:p5x4:u1x1:d1x1:g8:cross", "outputs wholly in the padding, negative pads of bwd_data"),
    ("n1c8h7w8:k8r2s3:ba1.0x0.2:u1x1:d1x1:g8:conv", "asymmetric"),
    ("n1c16h6w7:k16r5s5:p2x2:u1x1:d1x1:g16:cross", "5x5, two channels a thread"),
    ("n1c8h7w9:k8r1s5:p0x2:u1x1:d1x1:g8:cross", "a row filter"),
)


def check(monkeypatch: pytest.MonkeyPatch, text: str, config: Boxes = _SMALL, early: bool = False, device: Gpu = H200):
    """Sums of small integers, bit for bit, from an output full of NaN."""
    problem = parse(text)
    got, expected = result(CANDIDATES[problem.op], problem, config, device, install(monkeypatch, early))
    assert got == expected


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("shape", [shape for shape, _ in _SHAPES])
@pytest.mark.parametrize("op", CANDIDATES)
def test_every_product_counts_once(op: str, shape: str, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, f"{op}:bf16:{shape}:nhwc", early=early, device=_ONE_SM)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("op", CANDIDATES)
def test_other_types(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, f"{op}:{dtype}:n2c24h7w9:k24r3s3:p1x1:u1x1:d1x1:g24:cross:nhwc", device=replace(H200, sms=4))


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_block_goes_round_its_stages(stages: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tiles of two slabs, one block to each slab."""
    text = "conv_fwd:bf16:n2c32h8w12:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc"
    check(monkeypatch, text, _SMALL._replace(stages=stages), early, _ONE_SM)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("channels", [8, 24, 32])
def test_strips_of_any_extent(rows: int, columns: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Boxes(rows, columns, 3, 2, channels, 2, 1)
    check(monkeypatch, "conv_fwd:bf16:n1c40h7w11:k40r3s3:p1x1:u1x1:d1x1:g40:cross:nhwc", config)


@pytest.mark.parametrize("end", ["e:bias", "e:bias+relu+res+beta"])
def test_the_epilogue_is_fused_whole(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, f"conv_fwd:f16:n1c24h5w7:k24r3s3:p1x1:u1x1:d1x1:g24:cross:nhwc:{end}")


def test_a_gradient_adds_to_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "conv_bwd_data:bf16:n1c24h5w7:k24r3s3:p1x1:u1x1:d1x1:g24:cross:nhwc:e:beta")


# Of networks, and what has an edge of its own.
_SIZES = (
    "bf16:n32c32h112w112:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc",
    "bf16:n32c144h56w56:k144r3s3:p1x1:u1x1:d1x1:g144:cross:nhwc",
    "f16:n32c192h28w28:k192r3s3:p1x1:u1x1:d1x1:g192:conv:nhwc",
    "bf16:n32c384h14w14:k384r3s3:p1x1:u1x1:d1x1:g384:cross:nhwc",
    "bf16:n32c960h7w7:k960r3s3:p1x1:u1x1:d1x1:g960:cross:nhwc",
    "bf16:n32c120h28w28:k120r5s5:p2x2:u1x1:d1x1:g120:cross:nhwc",
    "f32:n32c32h112w112:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc",
    "bf16:n1c8h1w1:k8r3s3:p1x1:u1x1:d1x1:g8:cross:nhwc",
    "bf16:n2c16h300w1000:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc",
)


def _every(op: str, most: int = 100) -> list[tuple[ConvProblem, Boxes]]:
    problems = [parse(f"{op}:{text}") for text in _SIZES]
    return [(problem, config) for problem in problems for config in CANDIDATES[op].configs(problem, H200)[:most]]


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("most", [1, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", CANDIDATES)
def test_configs_stay_within_their_means(op: str, most: int) -> None:
    """No spills, no stack (so that the map is not copied there), and registers for all blocks."""
    for problem, config in _every(op, most):
        (launch,) = CANDIDATES[op].launches(problem, config, H200)
        kernel = compile_kernel(launch.source, "sm_90a")
        what = f"{problem} {config}: {kernel._replace(cubin=b'')}"
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
        assert kernel.registers * launch.source.threads * config.blocks <= 65536, what
        assert blocks_at_once(launch.dynamic_shared_bytes, H200) >= config.blocks, what


@pytest.mark.parametrize("op", CANDIDATES)
def test_configs_are_what_tma_and_blocks_take(op: str) -> None:
    for problem, config in _every(op):
        v, (launch,) = plan.variant(problem, config), CANDIDATES[op].launches(problem, config, H200)
        assert v.threads <= 512 and max(v.box) <= 256 and v.pixel_bytes % 16 == 0, f"{problem} {config}"
        assert launch.grid[0] % launch.integers.slabs == 0, "every block has a slab"  # type: ignore[attr-defined]
        assert plan.step(problem, config, H200) * launch.integers.slabs == launch.grid[0]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("numba_cuda")
def test_a_pixel_is_loaded_once_a_row() -> None:
    """Nothing is computed between a load and its products, and no output is multiplied by alpha."""
    problem = parse(f"conv_fwd:{_SIZES[0]}")
    config = Boxes(7, 2, 4, 14, 32, 3, 1)
    (launch,) = CANDIDATES["conv_fwd"].launches(problem, config, H200)
    ptx = ptx_text(launch.source, "sm_90a")
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == 7 * 2 * 4 * 9
    assert len(re.findall(r"mul\.(?:rn\.)?f32", ptx)) == 4 * 9
    assert len(re.findall(r"ld\.shared\.v2\.", ptx)) == (7 + 2) * (2 + 2)
    assert ptx.count("cp.async.bulk.tensor.4d") == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u2x1:d1x1:g16:cross:nhwc", "stride 2"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x2:g16:cross:nhwc", "dilation 2"),
        ("bf16:n1c16h8w8:k16r3s7:p1x3:u1x1:d1x1:g16:cross:nhwc", "7 is above 5"),
        ("bf16:n1c16h8w8:k32r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc", "channels 16, 32 and groups 16"),
        ("bf16:n1c12h8w8:k12r3s3:p1x1:u1x1:d1x1:g12:cross:nhwc", "12 channels are not a multiple of 8"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc:a8", "8 bytes is below 16"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nchw", "layouts nchw and nchw"),
        ("f64:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc", "f64 is not f16"),
        ("bf16:n3c1024h1000w1000:k1024r3s3:p1x1:u1x1:d1x1:g1024:cross:nhwc", "3072000000 elements"),
    ],
)
@pytest.mark.parametrize("op", CANDIDATES)
def test_refusals_carry_the_number(op: str, text: str, reason: str) -> None:
    support = CANDIDATES[op].supports(parse(f"{op}:{text}"), H200)
    assert not support.ok
    assert reason in support.reason


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_generations_are_refused(capability: tuple[int, int]) -> None:
    support = CANDIDATES["conv_fwd"].supports(parse(f"conv_fwd:{_SIZES[0]}"), replace(H200, capability=capability))
    assert not support.ok and str(capability) in support.reason
