"""1x1 layers in float32 by boxes: thread by thread on the CPU, what is compiled, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from emulated import launched, result
from emulated_ptx import install
from gpus import H200
from guarded import values

from nbdnn import reference_conv
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_pointwise_boxes, conv_pointwise_boxes_filter, pointwise_tile
from nbdnn.kernels.cuda import pointwise_boxes_filter_plan as filter_plan
from nbdnn.kernels.cuda import pointwise_boxes_plan as plan
from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.kernels.cuda.peaks import blocks_at_once
from nbdnn.kernels.cuda.pointwise_boxes_filter_plan import Tile as FilterTile
from nbdnn.kernels.cuda.pointwise_boxes_plan import Tile
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

CANDIDATES: dict[str, Any] = {
    each.op: each
    for each in (conv_pointwise_boxes.FWD, conv_pointwise_boxes.BWD_DATA, conv_pointwise_boxes_filter.BWD_FILTER)
}
_ONE_SM = replace(H200, sms=1)  # a block takes all tiles, or all pixels of one
_TILES = (
    (Tile(8, 5, 4, 1, False, 2, 1), "n2c12h5w8:k36", "lanes of one element, fewer channels than a line"),
    (Tile(8, 4, 6, 4, False, 2, 1), "n3c72h5w8:k40", "vectors; two lines and a part of one; tiles that hang over"),
    (Tile(16, 3, 4, 2, False, 3, 1), "n2c40h6w10:k20", "16 lanes by 2, more output channels than there are"),
    (Tile(32, 4, 8, 2, False, 2, 1), "n1c16h4w4:k100", "all lanes different"),
    (Tile(8, 2, 6, 8, False, 2, 2), "n2c36h6w6:k24", "pairs, warps side by side"),
)
_FILTER_TILES = (
    (FilterTile("dy", 8, 5, 4, 1, 32, 2, 1), "n2c12h5w8:k36", "lanes of one channel, all warps share the pixels"),
    (FilterTile("x", 8, 2, 6, 2, 64, 2, 1), "n3c12h5w8:k36", "pairs; two shares; more than one line of pixels"),
    (FilterTile("x", 16, 3, 4, 4, 32, 3, 1), "n2c40h6w10:k20", "16 lanes by 2; four shares"),
    (FilterTile("dy", 32, 4, 8, 2, 32, 2, 1), "n1c16h4w4:k100", "all lanes different"),
    (
        FilterTile("x", 8, 4, 3, 1, 64, 2, 2),
        "n2c36h6w14:k20",
        "twelve narrow channels: lines end within a swizzle",
    ),
)


def check(monkeypatch: pytest.MonkeyPatch, text: str, config: Any, early: bool = False, device: Gpu = H200) -> None:
    """Sums of small integers, bit for bit, from an output full of NaN."""
    problem = parse(text)
    got, expected = result(CANDIDATES[problem.op], problem, config, device, install(monkeypatch, early))
    assert got == expected


def text_of(op: str, shape: str, layout: str, end: str = "") -> str:
    return f"{op}:f32:{shape}r1s1:p0x0:u1x1:d1x1:g1:cross:{layout}{end}"


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("tile", range(len(_TILES)))
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
def test_every_product_counts_once(
    op: str, tile: int, layout: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shape, _ = _TILES[tile]
    check(monkeypatch, text_of(op, shape, layout), config, early, replace(H200, sms=1 + tile % 2))


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("tile", range(len(_FILTER_TILES)))
def test_every_product_of_a_filter_counts_once(
    tile: int, layout: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shape, _ = _FILTER_TILES[tile]
    check(monkeypatch, text_of("conv_bwd_filter", shape, layout), config, early, replace(H200, sms=1 + tile))


@pytest.mark.parametrize(("shape", "layout"), [("n2c12h5w8:k36", "nhwc"), ("n3c20h5w8:k38", "nchw")])
def test_a_filter_is_turned_first(shape: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its rows are not whole vectors, of planes."""
    config = Tile(8, 4, 6, 4, True, 2, 1)
    check(monkeypatch, text_of("conv_fwd", shape, layout, ":e:bias"), config, device=_ONE_SM)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_block_goes_round_its_stages(stages: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, text_of("conv_fwd", "n2c72h8w8:k20", layout), Tile(8, 2, 2, 4, False, stages, 1), device=_ONE_SM)
    tile = FilterTile("x", 8, 9, 5, 1, 32, stages, 1)
    check(monkeypatch, text_of("conv_bwd_filter", "n2c72h8w9:k20", layout), tile, device=_ONE_SM)


@pytest.mark.parametrize("end", [":e:bias", ":e:tanh", ":e:bias+relu+res+beta"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_epilogue_is_fused_whole(turned: bool, layout: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Tile(8, 4, 6, 4, turned, 2, 1)
    problem = parse(text_of("conv_fwd", "n2c12h5w8:k28", layout, end))
    got, expected = result(CANDIDATES[problem.op], problem, config, _ONE_SM, install(monkeypatch))
    assert np.allclose(got, expected, rtol=1e-6, atol=1e-6) if "tanh" in end else got == expected


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_gradients_add_to_what_was_there(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, text_of("conv_bwd_data", "n2c28h5w8:k12", layout, ":e:beta"), Tile(8, 4, 6, 4, False, 2, 1))
    check(monkeypatch, text_of("conv_bwd_filter", "n2c28h5w8:k12", layout, ":e:beta"), _FILTER_TILES[0][0])


@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize("op", CANDIDATES)
def test_three_axes(op: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _FILTER_TILES[1][0] if op == "conv_bwd_filter" else _TILES[1][0]
    check(monkeypatch, f"{op}:f32:n2c20d3h4w5:k12t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:conv:{layout}", config)


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_an_infinity_stays_in_its_pixel(op: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside channels that only the box has, and pixels that only the tile has."""
    problem = parse(text_of(op, "n1c12h3w4:k20", layout))
    given = values(problem, "integers")
    image = "x" if op == "conv_fwd" else "dy"
    given[image], given["w"] = given[image].copy(), np.ones_like(given["w"])
    given[image][0, 5, 2, 3] = np.inf
    block = install(monkeypatch)
    (out,) = (o for o in launched(CANDIDATES[op], problem, _TILES[0][0], given, H200, block) if o.written)
    expected = reference_conv.compute(problem, given, (1.0, 0.0))
    found = out.values().reshape(expected.shape if layout == "nchw" else (1, 3, 4, -1))
    found = found if layout == "nchw" else found.transpose(0, 3, 1, 2)
    assert np.array_equal(np.isfinite(found), np.isfinite(expected)) and not np.isfinite(found).all()


_SIZES = (
    "n32c16h112w112:k96",
    "n32c96h56w56:k24",
    "n32c144h28w28:k32",
    "n32c64h56w56:k256",
    "n32c960h7w12:k160",
    "n1c1280h1w4:k1000",
    "n2c4h2w2:k4",
)


def _every(most: int = 100) -> list[tuple[ConvProblem, Any]]:
    ends = {"conv_fwd": ":e:bias+relu+res+beta", "conv_bwd_data": ":e:beta", "conv_bwd_filter": ""}
    problems = [parse(text_of(op, s, layout, ends[op])) for op in ends for s in _SIZES for layout in ("nchw", "nhwc")]
    return [(problem, each) for problem in problems for each in CANDIDATES[problem.op].configs(problem, H200)[:most]]


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("most", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_configs_stay_within_their_means(most: int) -> None:
    """No spills, no stack (so that the maps are not copied there), and registers for all blocks."""
    for problem, config in _every(most):
        launch = next(each for each in CANDIDATES[problem.op].launches(problem, config, H200) if each.maps)
        kernel = compile_kernel(launch.source, "sm_90a")
        what = f"{problem} {config}: {kernel._replace(cubin=b'')}"
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
        assert kernel.registers * launch.source.threads * config.blocks <= 65536, what


def test_configs_are_what_tma_and_blocks_take() -> None:
    for problem, config in _every():
        launch = next(each for each in CANDIDATES[problem.op].launches(problem, config, H200) if each.maps)
        assert blocks_at_once(launch.dynamic_shared_bytes, H200) >= config.blocks, f"{problem} {config}"
        for tensor in launch.maps:
            assert max(tensor.box) <= pointwise_tile.MOST_BOX and tensor.box[0] * 4 % 16 == 0, f"{problem} {config}"
            assert all(stride % 16 == 0 for stride in tensor.strides_bytes), f"{problem} {config}"
            assert tensor.plain or tensor.box[0] == pointwise_tile.LINE, f"{problem} {config}"


def test_what_is_supported_has_a_config() -> None:
    """Also where the tiles that are guessed to be the best find no room."""
    draw, supported = Random(5), 0
    for _ in range(150):
        c, k = (draw.choice([4 * draw.randint(1, 40), 4 * draw.randint(1, 600), draw.randint(1, 2000)]) for _ in "ck")
        extents = f"n{draw.choice([1, 2, 32])}c{c}h{draw.randint(1, 120)}w{draw.randint(1, 120)}"
        problem = parse(text_of(draw.choice(list(CANDIDATES)), f"{extents}:k{k}", draw.choice(["nchw", "nhwc"])))
        candidate = CANDIDATES[problem.op]
        if candidate.supports(problem, H200).ok:
            supported += 1
            assert candidate.configs(problem, H200), str(problem)
    assert supported > 50


def test_guesses_take_no_tile_that_is_mostly_empty() -> None:
    for text, most in (("n32c16h112w112:k96", 1.0), ("n32c96h56w56:k24", 1.0), ("n8c72h14w14:k20", 1.5)):
        problem = parse(text_of("conv_bwd_filter", text, "nhwc"))
        best = filter_plan.configs(problem, H200)[0]
        wide, narrow = best.channels
        tiles = filter_plan.tiles(problem, best)
        assert wide * tiles[0] * narrow * tiles[1] <= most * problem.c * problem.k, best


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32:n1c16h8w8:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "filter (3, 3)"),
        ("f32:n1c16h8w8:k32r1s1:p1x1:u1x1:d1x1:g1:cross:nhwc", "pad ((1, 1), (1, 1))"),
        ("f32:n1c16h8w8:k32r1s1:p0x0:u2x1:d1x1:g1:cross:nhwc", "stride (2, 1)"),
        ("f32:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g2:cross:nhwc", "2 groups"),
        ("f16:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "f16 is not f32"),
        ("f32:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:a8", "8 bytes is below 16"),
        ("f32:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nchw:ynhwc", "layouts nchw and nhwc differ"),
        ("f32:n1c16h7w7:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", "planes of 49 pixels"),
        ("f32:n1c18h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "18 input"),
        ("f32:n0c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "0 images"),
        ("f32:n600c64h256w256:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "2516582400 elements"),
    ],
)
@pytest.mark.parametrize("op", CANDIDATES)
def test_what_they_refuse(op: str, text: str, reason: str) -> None:
    support = CANDIDATES[op].supports(parse(f"{op}:{text}"), H200)
    assert not support.ok and reason in support.reason


def test_other_generations_are_refused() -> None:
    problem = parse(text_of("conv_fwd", "n1c16h8w8:k32", "nhwc"))
    support = CANDIDATES["conv_fwd"].supports(problem, replace(H200, capability=(10, 0)))
    assert not support.ok and "(10, 0)" in support.reason


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
def test_planes_need_whole_vectors_of_input_channels(op: str) -> None:
    assert "18 input channels" in plan.refusal(parse(text_of(op, "n1c18h8w8:k32", "nchw")), H200)
    assert filter_plan.refusal(parse(text_of("conv_bwd_filter", "n1c18h8w8:k31", "nchw")), H200) == ""


def test_a_filter_whose_padded_rows_int32_does_not_count_is_not_turned() -> None:
    problem = parse(text_of("conv_fwd", "n1c429000000h2w2:k5", "nchw"))
    found = plan.configs(problem, H200)
    assert found and not any(config.turned for config in found)


def test_a_gradient_of_rows_needs_whole_vectors() -> None:
    text = text_of("conv_bwd_data", "n1c16h8w8:k30", "nhwc")
    assert "30 output channels" in plan.refusal(parse(text), H200)
    assert plan.refusal(parse(text.replace("nhwc", "nchw")), H200) == ""
