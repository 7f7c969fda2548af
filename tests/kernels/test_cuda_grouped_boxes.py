"""Few channels a group by boxes: thread by thread on the CPU, what is compiled, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulated import launched, result
from emulated_ptx import install
from gpus import H200
from guarded import values

from nbdnn import reference_conv
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_grouped_boxes, conv_grouped_boxes_filter
from nbdnn.kernels.cuda import grouped_plan as plan
from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.kernels.cuda.grouped_variant import Boxes
from nbdnn.kernels.cuda.peaks import blocks_at_once
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

CANDIDATES = {
    each.op: each
    for each in (conv_grouped_boxes.FWD, conv_grouped_boxes.BWD_DATA, conv_grouped_boxes_filter.BWD_FILTER)
}
_ONE_SM = replace(H200, sms=1)  # a block of each slab, which takes all tiles
_SMALL = Boxes(rows=2, down=2, along=1, images=1, stages=2, blocks=1)
_SHAPES = (
    ("n2c64h5w18:k64r3s3:p1x1:u1x1:d1x1:g8:cross", "groups of 8, rows and columns that tiles do not divide"),
    ("n1c72h4w6:k72r3s3:p1x1:u1x1:d1x1:g9:conv", "two slabs, of which one has a group, the filter reversed"),
    ("n1c24h4w6:k24r3s3:p1x1:u1x1:d1x1:g6:cross", "groups of 4"),
    ("n1c32h4w6:k32r3s3:p1x1:u1x1:d1x1:g2:cross", "groups of 16"),
    ("n1c64h4w6:k64r3s3:p0x0:u1x1:d1x1:g2:cross", "groups of 32, border valid"),
    ("n1c16h3w3:k16r2s2:p1x1:u1x1:d1x1:g4:conv", "an even number of taps a row, of groups of 4"),
    ("n1c16h3w20:k16r1s1:p0x0:u1x1:d1x1:g2:cross", "1x1"),
    ("n1c16h6w7:k16r3s3:ba1.0x0.2:u1x1:d1x2:g2:conv", "asymmetric, dilated"),
    ("n3c32h7w7:k32r3s3:p1x1:u1x1:d1x1:g2:cross", "an odd number of small images"),
    ("n1c72h4w9:k72r3s3:p1x1:u1x1:d1x1:g3:conv", "groups of 24, two of a line"),
    ("n1c80h3w7:k80r3s3:p1x1:u1x1:d1x1:g2:cross", "groups of 40"),
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


@pytest.mark.parametrize("text", [
    "conv_fwd:f16:n2c32h9w21:k32r3s3:p1x1:u2x2:d1x1:g4:cross:nhwc",
    "conv_fwd:bf16:n1c64h7w9:k64r3s3:p1x1:u2x1:d1x1:g16:conv:nhwc",
    "conv_fwd:bf16:n1c64h8w40:k64r3s3:p1x1:u1x2:d2x1:g2:cross:nhwc",
    "conv_bwd_data:bf16:n2c32h9w41:k32r3s3:p1x1:u2x2:d1x1:g4:cross:nhwc",
    "conv_bwd_data:f16:n1c24h8w37:k24r3s3:p1x1:u2x2:d1x1:g6:conv:nhwc:e:beta",
    "conv_bwd_data:bf16:n1c64h7w30:k64r3s3:p0x1:u2x1:d1x2:g4:cross:nhwc",
    "conv_bwd_data:bf16:n1c64h9w40:k64r3s2:ba1.0x0.2:u1x2:d1x1:g2:conv:nhwc",
    "conv_bwd_data:bf16:n1c16h7w35:k16r1s1:p0x0:u2x2:d1x1:g2:cross:nhwc:e:beta",
    "conv_bwd_data:bf16:n1c16h9w35:k16r5s4:p3x2:u2x2:d1x1:g2:cross:nhwc",
    "conv_bwd_filter:f16:n2c32h9w21:k32r3s3:p1x1:u2x2:d1x1:g4:cross:nhwc",
    "conv_bwd_filter:bf16:n1c64h9w20:k64r3s3:p0x2:u2x1:d1x2:g2:conv:nhwc",
])  # fmt: skip
def test_strides(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, text, device=_ONE_SM)


@pytest.mark.parametrize("text", [
    "conv_fwd:bf16:n2c96h5w18:k96r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc:e:bias+relu+res+beta",
    "conv_fwd:f16:n1c112h4w6:k112r3s3:p1x1:u2x2:d1x1:g2:conv:nhwc",
    "conv_bwd_data:bf16:n1c128h4w34:k128r3s3:p1x1:u2x2:d1x1:g2:cross:nhwc",
    "conv_bwd_data:bf16:n3c72h4w7:k72r3s3:p1x1:u1x1:d1x1:g3:cross:nhwc:e:beta",
    "conv_bwd_filter:bf16:n2c144h5w9:k144r3s3:p1x1:u1x1:d1x1:g3:cross:nhwc:e:beta",
    "conv_bwd_filter:bf16:n1c112h5w9:k112r1s3:p0x1:u1x1:d1x1:g2:cross:nhwc",
])  # fmt: skip
def test_groups_that_leave_warps_or_channels_of_a_line_unused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, text, device=_ONE_SM)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_block_goes_round_its_stages(stages: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "conv_fwd:bf16:n3c64h5w18:k64r3s3:p1x1:u1x1:d1x1:g8:cross:nhwc"
    check(monkeypatch, text, Boxes(2, 1, 1, 1, stages, 1), early, _ONE_SM)


@pytest.mark.parametrize("width", [4, 8, 16, 32])
@pytest.mark.parametrize("boxes", [(5, 1, 2, 1), (2, 2, 1, 2), (3, 1, 2, 2), (1, 2, 4, 1)])
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_filter"])
def test_strips_of_any_extent(op: str, boxes: tuple, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{op}:bf16:n3c{2 * width}h6w7:k{2 * width}r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc"
    check(monkeypatch, text, Boxes(*boxes, 2, 1), device=_ONE_SM)


@pytest.mark.parametrize("end", ["e:bias", "e:bias+relu+res+beta"])
@pytest.mark.parametrize("groups", [16, 8, 4, 2])
def test_the_epilogue_is_fused_whole(groups: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, f"conv_fwd:f16:n1c64h5w19:k64r3s3:p1x1:u1x1:d1x1:g{groups}:cross:nhwc:{end}")


@pytest.mark.parametrize("op", ["conv_bwd_data", "conv_bwd_filter"])
def test_a_gradient_adds_to_what_was_there(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _SMALL._replace(images=2)
    check(monkeypatch, f"{op}:bf16:n3c24h5w7:k24r3s3:p1x1:u1x1:d1x1:g3:cross:nhwc:e:beta", config)


@pytest.mark.parametrize("sms", [2, 4, 6])
def test_parts_of_a_filter_are_added(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "conv_bwd_filter:f16:n4c72h8w20:k72r3s3:p1x1:u1x1:d1x1:g9:cross:nhwc"
    check(monkeypatch, text, Boxes(4, 1, 1, 1, 2, 1), device=replace(H200, sms=sms))


def test_an_infinity_beside_what_a_tile_hangs_over_is_met_by_its_own_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last column, and in the last row, beyond which there is no dy."""
    problem = parse("conv_bwd_filter:bf16:n1c8h5w6:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc")
    block, given = install(monkeypatch), values(problem, "integers")
    given["x"], given["dy"] = given["x"].copy(), np.ones_like(given["dy"])
    given["x"][0, 1, 2, 5] = given["x"][0, 6, 4, 2] = np.inf
    (out,) = (o for o in launched(CANDIDATES[problem.op], problem, _SMALL, given, H200, block) if o.written)
    expected = reference_conv.compute(problem, given, (1.0, 0.0))
    found = out.values().reshape(8, 3, 3, 4).transpose(0, 3, 1, 2)
    assert np.array_equal(np.isfinite(found), np.isfinite(expected)) and not np.isfinite(found).all()


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
def test_an_infinity_stays_in_its_group(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups that share what a warp reads."""
    problem = parse(f"{op}:bf16:n1c8h5w6:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc")
    block, candidate = install(monkeypatch), CANDIDATES[op]
    given = values(problem, "integers")
    image = "x" if op == "conv_fwd" else "dy"
    given[image] = given[image].copy()
    given[image][0, 5, 2, 3] = np.inf
    (out,) = (o for o in launched(candidate, problem, _SMALL, given, H200, block) if o.written)
    found = out.values().reshape(5, 6, 8)
    assert np.isfinite(found[..., :4]).all() and not np.isfinite(found[..., 4:]).all()


# Of networks, and what has an edge of its own.
_SIZES = (
    "bf16:n32c128h56w56:k128r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc",
    "bf16:n32c256h28w28:k256r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc",
    "f16:n32c512h14w14:k512r3s3:p1x1:u1x1:d1x1:g32:conv:nhwc",
    "bf16:n32c1024h7w7:k1024r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc",
    "bf16:n8c224h28w28:k224r3s3:p1x1:u1x1:d1x1:g14:cross:nhwc",
    "bf16:n32c64h112w112:k64r5s5:p2x2:u1x1:d1x1:g8:cross:nhwc",
    "bf16:n32c96h56w56:k96r3s3:p1x1:u1x1:d1x1:g4:cross:nhwc",
    "bf16:n32c192h28w28:k192r3s3:p1x1:u1x1:d1x1:g4:cross:nhwc",
    "bf16:n1c8h1w1:k8r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc",
    "bf16:n2c16h300w1000:k16r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc",
)
_OF_STRIDE_2 = (
    "conv_fwd:bf16:n32c512h28w28:k512r3s3:p1x1:u2x2:d1x1:g32:cross:nhwc:e:bias+relu+res+beta",
    "conv_bwd_data:bf16:n32c256h56w56:k256r3s3:p1x1:u2x2:d1x1:g32:cross:nhwc",
    "conv_bwd_data:bf16:n32c1024h14w14:k1024r3s3:p1x1:u2x2:d1x1:g32:cross:nhwc:e:beta",
)


def _every(most: int = 100) -> list[tuple[ConvProblem, Boxes]]:
    problems = [parse(f"{op}:{text}") for op in CANDIDATES for text in _SIZES] + list(map(parse, _OF_STRIDE_2))
    return [(problem, each) for problem in problems for each in CANDIDATES[problem.op].configs(problem, H200)[:most]]


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("most", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_configs_stay_within_their_means(most: int) -> None:
    """No spills, no stack (so that the map is not copied there), and registers for all blocks."""
    for problem, config in _every(most):
        launch, *_ = CANDIDATES[problem.op].launches(problem, config, H200)
        kernel = compile_kernel(launch.source, "sm_90a")
        what = f"{problem} {config}: {kernel._replace(cubin=b'')}"
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
        assert kernel.registers * launch.source.threads * config.blocks <= 65536, what


def test_configs_are_what_tma_and_blocks_take() -> None:
    for problem, config in _every():
        v, (launch, *_) = plan.variant(problem, config), CANDIDATES[problem.op].launches(problem, config, H200)
        assert max(v.box) <= 256 and v.row_bytes % 1024 == 0, f"{problem} {config}"
        assert blocks_at_once(launch.dynamic_shared_bytes, H200) >= config.blocks, f"{problem} {config}"
        assert plan.step(problem, config, H200) * launch.integers.slabs == launch.grid[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bf16:n1c16h8w8:k32r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "8 to 16 channels in each of 2 groups"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "16 to 16 channels in each of 1 groups"),
        ("bf16:n1c12h8w8:k12r3s3:p1x1:u1x1:d1x1:g3:cross:nhwc", "12 channels are not a multiple of 8"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc:a8", "8 bytes is below 16"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g2:cross:nchw", "layouts nchw and nchw"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g2:cross:nhwc", "f32 is not f16"),
        ("bf16:n1c32h8w8:k32r7s7:p3x3:u1x1:d1x1:g2:cross:nhwc", "196 registers"),
        ("bf16:n1c16h900w900:k16r3s3:p1x1:u1x1:d1x300:g2:cross:nhwc", "no tile finds room"),
        ("bf16:n3c1024h1000w1000:k1024r3s3:p1x1:u1x1:d1x1:g128:cross:nhwc", "3072000000 elements"),
    ],
)
@pytest.mark.parametrize("op", CANDIDATES)
def test_refusals_carry_the_number(op: str, text: str, reason: str) -> None:
    support = CANDIDATES[op].supports(parse(f"{op}:{text}"), H200)
    assert not support.ok
    assert reason in support.reason


@pytest.mark.parametrize("steps", ["u3x1:d1x1", "u2x2:d1x2"])
def test_other_steps_of_a_gradient_are_refused(steps: str) -> None:
    problem = parse(f"conv_bwd_data:bf16:n1c16h8w8:k16r3s3:p1x1:{steps}:g2:cross:nhwc")
    reason = CANDIDATES["conv_bwd_data"].supports(problem, H200).reason
    assert f"stride {problem.stride} and dilation {problem.dilation}" in reason


def test_other_generations_are_refused() -> None:
    for capability in ((8, 9), (10, 0)):
        device = replace(H200, capability=capability)
        assert str(capability) in CANDIDATES["conv_fwd"].supports(parse(f"conv_fwd:{_SIZES[0]}"), device).reason
