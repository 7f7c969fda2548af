"""1x1 layers by boxes to wgmma: thread by thread on the CPU, what is compiled, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from emulated import launched, result
from emulated_ptx import install
from emulated_tma import WgmmaWords
from gpus import H200
from guarded import values

from nbdnn import reference_conv
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_wgmma_boxes, conv_wgmma_boxes_filter
from nbdnn.kernels.cuda import wgmma_boxes_plan as plan
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.peaks import blocks_at_once
from nbdnn.kernels.cuda.wgmma_boxes_filter_plan import Tile as FilterTile
from nbdnn.kernels.cuda.wgmma_boxes_plan import Tile
from nbdnn.problem import ITEMSIZE, parse
from nbdnn.problem_conv import ConvProblem

CANDIDATES: dict[Any, Any] = {
    (each.op, each.math): each
    for each in (*conv_wgmma_boxes.FWD, *conv_wgmma_boxes.BWD_DATA, *conv_wgmma_boxes_filter.BWD_FILTER)
}
_ONE_SM = replace(H200, sms=1)  # a block takes all tiles


def candidate_of(problem: ConvProblem) -> Any:
    return CANDIDATES[problem.op, "tf32" if problem.dtype == "f32" else "fma"]


def check(monkeypatch: pytest.MonkeyPatch, text: str, config: Any, early: bool = False, device: Gpu = H200) -> None:
    """Sums of small integers, bit for bit, from an output full of NaN."""
    problem = parse(text)
    got, expected = result(candidate_of(problem), problem, config, device, install(monkeypatch, early))
    assert got == expected


def text_of(op: str, dtype: str, shape: str, layout: str, end: str = "") -> str:
    return f"{op}:{dtype}:{shape}r1s1:p0x0:u1x1:d1x1:g1:cross:{layout}{end}"


_CELLS = (
    ("f16", "nhwc", Tile(1, 32, 2, 1), "n1c40h3w6:k24", "one tile that hangs over, fewer channels than a line"),
    ("bf16", "nhwc", Tile(1, 64, 2, 1), "n2c136h5w8:k72", "more lines than stages, more tiles than one"),
    ("f16", "nhwc", Tile(2, 96, 3, 1), "n1c64h9w16:k104", "two warpgroups; half of a box of filters"),
    ("bf16", "nchw", Tile(1, 96, 2, 1), "n2c72h5w8:k70", "half of a box of pixels; filters by the row"),
    ("f16", "nchw", Tile(2, 64, 2, 1), "n2c16h4w18:k130", "two warpgroups, planes of two boxes"),
    ("f32", "nhwc", Tile(1, 32, 3, 1), "n1c36h3w6:k24", "TF32, whose lines are half as long"),
)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("cell", range(len(_CELLS)))
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
def test_every_product_counts_once(op: str, cell: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, layout, config, shape, _ = _CELLS[cell]
    check(monkeypatch, text_of(op, dtype, shape, layout), config, early, replace(H200, sms=1 + cell % 2))


_FILTER_CELLS = (
    ("f16", "nhwc", FilterTile(1, 32, 1, 2, 1), "n1c40h7w9:k24", "one tile; a chunk that hangs over"),
    ("bf16", "nhwc", FilterTile(2, 96, 2, 2, 1), "n3c104h8w16:k136", "half of a box of channels; two parts"),
    ("f16", "nhwc", FilterTile(1, 64, 4, 2, 1), "n2c72h9w16:k64", "four parts, chunks that are not even"),
    ("bf16", "nchw", FilterTile(1, 32, 4, 2, 1), "n5c16h8w9:k70", "planes of two chunks; four parts"),
    ("f16", "nchw", FilterTile(2, 64, 3, 3, 1), "n4c64h4w18:k130", "two warpgroups, three parts"),
    ("f32", "nchw", FilterTile(1, 32, 2, 3, 1), "n3c20h6w8:k35", "TF32, whose lines are half as long"),
)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("cell", range(len(_FILTER_CELLS)))
def test_every_product_of_a_filter_counts_once(cell: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, layout, config, shape, _ = _FILTER_CELLS[cell]
    check(monkeypatch, text_of("conv_bwd_filter", dtype, shape, layout), config, early)


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_filter"])
def test_a_stage_that_is_given_back_too_early_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WgmmaWords, "wait_for_all_but_last", lambda self: None)
    tile = FilterTile(1, 32, 1, 2, 1) if op == "conv_bwd_filter" else Tile(1, 32, 2, 1)
    with pytest.raises(AssertionError, match="may still be reading"):
        check(monkeypatch, text_of(op, "f16", "n2c200h8w16:k72", "nhwc"), tile, device=_ONE_SM)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_block_goes_round_its_stages(stages: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, text_of("conv_fwd", "f16", "n2c200h8w8:k72", layout), Tile(1, 32, stages, 1), device=_ONE_SM)


@pytest.mark.parametrize("tile", [Tile(1, 32, 2, 1), Tile(3, 96, 3, 1)], ids=str)
@pytest.mark.parametrize("end", [":e:bias", ":e:tanh", ":e:bias+relu+res+beta"])
@pytest.mark.parametrize(("dtype", "layout"), [("f16", "nchw"), ("bf16", "nhwc"), ("f32", "nhwc")])
def test_the_epilogue_is_fused_whole(
    dtype: str, layout: str, end: str, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = parse(text_of("conv_fwd", dtype, "n1c16h4w18:k40", layout, end))
    got, expected = result(candidate_of(problem), problem, tile, _ONE_SM, install(monkeypatch))
    assert np.allclose(got, expected, rtol=1e-2, atol=1e-2) if "tanh" in end else got == expected


@pytest.mark.parametrize(("dtype", "layout"), [("f16", "nchw"), ("bf16", "nhwc"), ("f32", "nhwc"), ("f32", "nchw")])
def test_gradients_add_to_what_was_there(dtype: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (dtype, layout) != ("f32", "nchw"):
        check(monkeypatch, text_of("conv_bwd_data", dtype, "n1c40h4w6:k16", layout, ":e:beta"), Tile(1, 64, 2, 1))
    if (dtype, layout) != ("f32", "nhwc"):
        tile, text = (
            FilterTile(1, 32, 2, 2, 1),
            text_of("conv_bwd_filter", dtype, "n2c16h8w9:k24", layout, ":e:beta"),
        )
        check(monkeypatch, text, tile)
        check(monkeypatch, text, tile._replace(parts=1))


@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
def test_three_axes(op: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{op}:f16:n2c24d3h4w6:k16t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:conv:{layout}"
    check(monkeypatch, text, FilterTile(1, 32, 2, 2, 1) if op == "conv_bwd_filter" else Tile(1, 32, 2, 1))


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_an_infinity_stays_in_its_pixel(op: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside channels that only the box has, and pixels that only the tile has."""
    problem = parse(text_of(op, "f16", "n1c16h3w8:k24", layout))
    given = values(problem, "integers")
    image = "x" if op == "conv_fwd" else "dy"
    given[image], given["w"] = given[image].copy(), np.ones_like(given["w"])
    given[image][0, 5, 2, 3] = np.inf
    block = install(monkeypatch)
    launches = launched(candidate_of(problem), problem, Tile(1, 32, 2, 1), given, H200, block)
    (out,) = (operand for operand in launches if operand.written)
    expected = reference_conv.compute(problem, given, (1.0, 0.0))
    found = out.values().reshape(expected.shape if layout == "nchw" else (1, 3, 8, -1))
    found = found if layout == "nchw" else found.transpose(0, 3, 1, 2)
    assert np.array_equal(np.isfinite(found), np.isfinite(expected)) and not np.isfinite(found).all()


_SIZES = (
    ("n32c64h56w56:k256", "bf16"),
    ("n32c1024h14w16:k256", "f16"),
    ("n32c24h28w28:k144", "bf16"),
    ("n1c2048h7w8:k1000", "f16"),
    ("n32c256h28w28:k128", "f32"),
)


def _every(most: int = 100) -> list[tuple[ConvProblem, Any]]:
    ends = {"conv_fwd": ":e:bias+tanh+res+beta", "conv_bwd_data": ":e:beta", "conv_bwd_filter": ":e:beta"}
    found = []
    for op, (shape, dtype), layout in product(ends, _SIZES, ("nchw", "nhwc")):
        problem = parse(text_of(op, dtype, shape, layout, ends[op]))
        if candidate_of(problem).supports(problem, H200).ok:
            found += [(problem, each) for each in candidate_of(problem).configs(problem, H200)[:most]]
    return found


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("most", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_configs_stay_within_their_means(most: int) -> None:
    """No spills, no stack (so that the maps are not copied there), and registers for all blocks."""
    for problem, config in _every(most):
        launch = next(each for each in candidate_of(problem).launches(problem, config, H200) if each.maps)
        kernel, ptx = compile_kernel(launch.source, "sm_90a"), ptx_text(launch.source, "sm_90a")
        what = f"{problem} {config}: {kernel._replace(cubin=b'')}"
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
        assert kernel.registers <= plan.registers(launch.source.threads, config.blocks), what
        assert ptx.count("wgmma.mma_async") == 4, what


def test_configs_are_what_tma_and_blocks_take() -> None:
    for problem, config in _every():
        launch = next(each for each in candidate_of(problem).launches(problem, config, H200) if each.maps)
        assert blocks_at_once(launch.dynamic_shared_bytes, H200) >= config.blocks, f"{problem} {config}"
        for tensor in launch.maps:
            assert max(tensor.box) <= 256 and tensor.box[0] * ITEMSIZE[tensor.dtype] == 128, f"{problem} {config}"
            assert all(stride % 16 == 0 for stride in tensor.strides_bytes), f"{problem} {config}"


def test_what_is_supported_has_configs_with_room_for_its_epilogue() -> None:
    draw, supported = Random(5), 0
    for _ in range(150):
        c, k = (draw.choice([8 * draw.randint(1, 40), 8 * draw.randint(1, 600), draw.randint(1, 2000)]) for _ in "ck")
        extents = f"n{draw.choice([1, 2, 32])}c{c}h{draw.randint(1, 120)}w{draw.randint(1, 120)}"
        op, _ = draw.choice(list(CANDIDATES))
        dtype, layout = draw.choice(["f16", "f32"]), draw.choice(["nchw", "nhwc"])
        end = draw.choice(["", ":e:bias+relu+res+beta"]) if op == "conv_fwd" else ""
        problem = parse(text_of(op, dtype, f"{extents}:k{k}", layout, end))
        candidate = candidate_of(problem)
        if candidate.supports(problem, H200).ok:
            supported += 1
            configs = candidate.configs(problem, H200)
            assert configs, str(problem)
            for config in configs:
                left = plan.registers(config.workers + 32, config.blocks) - config.sums
                assert left >= (64 if end else 32), f"{problem} {config}"
    assert supported > 40


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f16:n1c16h8w8:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "filter (3, 3)"),
        ("f16:n1c16h8w8:k32r1s1:p1x1:u1x1:d1x1:g1:cross:nhwc", "pad ((1, 1), (1, 1))"),
        ("f16:n1c16h8w8:k32r1s1:p0x0:u2x1:d1x1:g1:cross:nhwc", "stride (2, 1)"),
        ("f16:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g2:cross:nhwc", "2 groups"),
        ("f64:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "f64 is not f16 or bf16"),
        ("f16:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:a8", "8 bytes is below 16"),
        ("f16:n1c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nchw:ynhwc", "layouts nchw and nhwc differ"),
        ("bf16:n1c16h6w6:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", "planes of 36 pixels are not multiples of 8"),
        ("f16:n1c20h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "20 input channels are not a multiple of 8"),
        ("f16:n1c16h8w8:k36r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "36 output channels are not a multiple of 8"),
        ("f16:n0c16h8w8:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "0 images"),
        ("f16:n600c64h256w256:k32r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", "2516582400 elements"),
    ],
)
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
def test_what_they_refuse(op: str, text: str, reason: str) -> None:
    problem = parse(f"{op}:{text}")
    support = candidate_of(problem).supports(problem, H200)
    assert not support.ok and reason in support.reason


def test_tf32_wants_what_is_summed_as_neighbours() -> None:
    for op, layout, is_taken in (
        ("conv_fwd", "nhwc", True),
        ("conv_fwd", "nchw", False),
        ("conv_bwd_data", "nchw", False),
        ("conv_bwd_filter", "nchw", True),
        ("conv_bwd_filter", "nhwc", False),
    ):
        problem = parse(text_of(op, "f32", "n1c16h8w8:k32", layout))
        support = candidate_of(problem).supports(problem, H200)
        assert support.ok == is_taken and (is_taken or "TF32" in support.reason)


def test_other_generations_have_no_wgmma() -> None:
    problem = parse(text_of("conv_fwd", "f16", "n1c16h8w8:k32", "nhwc"))
    for capability in ((8, 0), (10, 0), (12, 0)):
        support = candidate_of(problem).supports(problem, replace(H200, capability=capability))
        assert not support.ok and str(capability) in support.reason


def test_guesses_prefer_whole_waves() -> None:
    """132 tiles of 192x64 are one each for the multiprocessors, 98 of 128x128 leave a quarter of them idle."""
    problem = parse(text_of("conv_fwd", "bf16", "n32c1024h14w14:k256", "nhwc"))
    best = plan.configs(problem, H200)[0]
    assert np.prod(plan.tiles(problem, best)) == 132, str(best)
