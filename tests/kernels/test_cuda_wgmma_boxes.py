"""1x1 layers by boxes to wgmma: thread by thread on the CPU, what is compiled, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import launched, result
from emulated_ptx import install
from gpus import H200
from guarded import values

from nbdnn import reference_conv
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_wgmma_boxes, conv_wgmma_boxes_filter
from nbdnn.kernels.cuda.wgmma_boxes_filter_plan import Tile as FilterTile
from nbdnn.kernels.cuda.wgmma_boxes_plan import Tile
from nbdnn.problem import parse
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


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_block_goes_round_its_stages(stages: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, text_of("conv_fwd", "f16", "n2c200h8w8:k72", layout), Tile(1, 32, stages, 1), device=_ONE_SM)


@pytest.mark.parametrize("end", [":e:bias", ":e:tanh", ":e:bias+relu+res+beta"])
@pytest.mark.parametrize(("dtype", "layout"), [("f16", "nchw"), ("bf16", "nhwc"), ("f32", "nhwc")])
def test_the_epilogue_is_fused_whole(dtype: str, layout: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(text_of("conv_fwd", dtype, "n1c16h4w18:k40", layout, end))
    got, expected = result(candidate_of(problem), problem, Tile(1, 32, 2, 1), _ONE_SM, install(monkeypatch))
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
