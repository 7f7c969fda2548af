"""Candidates of two axes on problems over three that come to two."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cells import values
from gpus import H200

from nbdnn import reference_conv
from nbdnn.array import at
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda.conv_flat import Flat, Tall, Wide, flat, tall, wide
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS

IMAGES = "n2c8d3h6w7:k8t1r3s2:ba0.0x1.2x0.1:u1x2x1:d3x1x2:g2:conv:ndhwc"
WINDOWS = "n2c8h7w12:k5r2s3:ba1.0x0.0:u1x3:d2x1:g1:cross:nhwc"
PAIRS = "n2c8h6w12:k8r2s2:p0x0:u2x2:d1x1:g1:cross:nhwc"
ROWS = "n2c8d7h3w4:k6t3r1s1:ba2.1x0.0x0.0:u2x1x1:d1x2x1:g1:cross"


def test_each_depth_is_an_image_or_a_row() -> None:
    for op in CONV_OPS:
        assert str(flat(parse(f"{op}:f16:{IMAGES}"))) == (f"{op}:f16:n6c8h6w7:k8r3s2:ba1.2x0.1:u2x1:d1x2:g2:conv:nhwc")
        for layout, other in (("ncdhw", "nchw"), ("ndhwc", "nhwc")):
            posed = str(flat(parse(f"{op}:f32:{ROWS}:{layout}")))
            assert posed == f"{op}:f32:n2c8h7w12:k6r3s1:ba2.1x0.0:u2x1:d1x2:g1:cross:{other}"


def test_columns_of_windows_side_by_side_are_channels() -> None:
    for op in CONV_OPS:
        posed = str(wide(parse(f"{op}:f16:{WINDOWS}")))
        assert posed == f"{op}:f16:n2c24h7w4:k5r2s1:ba1.0x0.0:u1x1:d2x1:g1:cross:nhwc"


def test_two_rows_side_by_side_are_an_image() -> None:
    problem = parse(f"conv_bwd_data:f16:{PAIRS}")
    candidate = registry.candidate("conv_bwd_data/numba/wgmma_gemm")
    assert isinstance(candidate, Tall) and candidate.supports(problem, H200).ok
    posed = str(candidate.pose(problem))
    assert posed == "conv_bwd_data:f16:n6c16h2w6:k8r2s1:p0x0:u1x1:d1x1:g1:cross:nhwc"


@pytest.mark.parametrize(
    "change",
    [
        {"filter": (3, 1), "stride": (3, 1)},
        {"stride": (1, 1)},
        {"pad": ((1, 0), (0, 0))},
        {"spatial": (7, 12)},
        {"y_layout": "nchw"},
    ],
)
def test_rows_that_do_not_lie_in_pairs_stay(change: dict) -> None:
    problem = replace(parse(f"conv_bwd_data:f16:{PAIRS}"), **{"filter": (2, 1), "stride": (2, 1)} | change)
    assert tall(problem) is problem


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "nchw", "w_layout": "", "y_layout": ""},
        {"w_layout": "kcrs"},
        {"y_layout": "nchw"},
        {"mode": "conv"},
        {"groups": 4, "k": 4},
        {"stride": (1, 2)},
        {"dilation": (2, 2)},
        {"pad": ((1, 0), (0, 3))},
        {"spatial": (7, 13)},
    ],
)
def test_windows_that_do_not_lie_side_by_side_stay(change: dict) -> None:
    problem = replace(parse(f"conv_fwd:f16:{WINDOWS}"), **change)
    assert wide(problem) is problem


@pytest.mark.parametrize(
    "shape",
    [
        "n2c8d3h6w7:k8t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1:cross:ncdhw",
        "n2c8d3h6w7:k8t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc:yncdhw",
        "n2c8d3h6w7:k8t1r3s3:p0x1x1:u2x1x1:d1x1x1:g1:cross:ndhwc",
        "n2c8d3h6w7:k8t1r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc",
        "n2c8d3h6w7:k8t2r3s3:p0x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc",
        "n2c8d3h6w7:k8t3r1s1:p1x0x1:u1x1x1:d1x1x1:g1:cross:ncdhw",
        "n2c8d3h6w7:k8t3r1s1:p1x0x0:u1x2x1:d1x1x1:g1:cross:ncdhw",
        "n2c8h6w7:k8r1s1:p0x0:u1x1:d1x1:g1:cross:nchw",
    ],
)
def test_what_does_not_come_to_two_axes_stays(shape: str) -> None:
    problem = parse(f"conv_fwd:f32:{shape}")
    assert flat(problem) is problem


@pytest.mark.parametrize("op", CONV_OPS)
@pytest.mark.parametrize("shape", [IMAGES, WINDOWS, PAIRS, f"{ROWS}:ncdhw", f"{ROWS}:ndhwc", f"{ROWS}:ncdhw:ktrsc"])
def test_the_same_memory_has_the_same_result(op: str, shape: str) -> None:
    """Both problems on one set of operands: what the reference of either writes is the same, element by element."""
    problem = parse(f"{op}:f32:{shape}:e:beta")
    posed = tall(wide(flat(problem))) if op == "conv_bwd_data" else wide(flat(problem))
    assert (
        posed != problem
        and posed.ndim == 2
        and [o.size_elems for o in posed.operands] == [o.size_elems for o in problem.operands]
    )
    given = values(problem, "integers")
    names = [operand.name for operand in problem.operands]
    given[names[2]] = np.random.default_rng(1).integers(-9, 9, problem.operands[2].shape).astype("f4")
    seen = {}
    for operand, of_two in zip(problem.operands, posed.operands, strict=True):
        memory = np.zeros(operand.size_elems, "f4")
        at(memory.ctypes.data, operand.shape, operand.strides, "f32")[...] = given[operand.name]
        seen[of_two.name] = at(memory.ctypes.data, of_two.shape, of_two.strides, "f32").copy()
    found = reference_conv.compute(posed, seen, (2.0, 3.0))
    expected = reference_conv.compute(problem, given, (2.0, 3.0))
    memory, out, of_two = np.zeros(found.size, "f8"), problem.operands[2], posed.operands[2]
    at(memory.ctypes.data, of_two.shape, of_two.strides, "f64")[...] = found
    assert np.array_equal(at(memory.ctypes.data, out.shape, out.strides, "f64"), expected) and expected.any()


@pytest.mark.parametrize("op", CONV_OPS)
def test_matrix_products_take_columns_as_channels(op: str) -> None:
    problem = parse(f"{op}:f16:n2c3h32w32:k64r4s8:p0x0:u4x8:d1x1:g1:cross:nhwc")
    candidate = registry.candidate(f"{op}/numba/mma_gemm")
    assert isinstance(candidate, Wide) and candidate.supports(problem, H200).ok
    assert not candidate.base.supports(problem, H200).ok
    for config in candidate.configs(problem, H200)[:1]:
        assert candidate.launches(problem, config, H200) == candidate.base.launches(wide(problem), config, H200)


@pytest.mark.parametrize("op", CONV_OPS)
def test_kernels_of_two_axes_take_them(op: str) -> None:
    dense, depthwise = "n2c64d3h9w16:k64t1r3s3:p0x1x1:u1x1x1:d1x1x1:g{}:cross:ndhwc".format, "depthwise_mma"
    wanted = {"mma_gemm": "bf16", "wgmma_gemm": "f16", depthwise: "f16"}
    if op != "conv_bwd_filter":
        wanted |= {"wgmma_patch": "bf16", "wgmma_patch_tf32": "f32", "depthwise_boxes": "f32"}
    for name, dtype in wanted.items():
        candidate = registry.candidate(f"{op}/numba/{name}")
        problem = parse(f"{op}:{dtype}:{dense(64 if name.startswith('depthwise') else 1)}")
        assert isinstance(candidate, Flat) and candidate.base.version in candidate.version
        support = candidate.supports(problem, H200)
        assert support.ok, f"{candidate}: {support.reason}"
        for config, side in product(candidate.configs(problem, H200)[:1], (problem, flat(problem))):
            assert candidate.launches(side, config, H200) == candidate.base.launches(flat(problem), config, H200)
            assert candidate.workspace_bytes(side, config, H200) == candidate.workspace_bytes(problem, config, H200)
    refused = candidate.supports(replace(problem, filter=(2, 3, 3)), H200)
    assert not refused.ok and "3" in refused.reason
