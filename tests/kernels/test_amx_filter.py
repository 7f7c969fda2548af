"""How filter gradients on matrix units count through their pixels, and caches of all sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cells import check, is_for

from nbdnn import reference_conv
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cpu import amx_filter_plan
from nbdnn.kernels.cpu.amx import LINE
from nbdnn.kernels.cpu.amx_filter_plan import Plan, plan_of
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

_CANDIDATE = registry.candidate("conv_bwd_filter/cpu/amx")
_SHAPES = (
    "n3c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:cross:nchw",
    "n3c40h9w11:k34r3s3:p1x1:u1x1:d1x1:g1:conv:nhwc",
    "n5c19h7w13:k18r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc",
    "n7c33h5w7:k17r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc",
    "n2c3h23w25:k20r7s7:p3x3:u2x2:d1x1:g1:cross:nchw",
    "n2c6h8w9:k4r3s2:ba1.2x0.3:u2x1:d1x2:g2:cross:nchw",
    "n2c4d5h6w7:k6t2r3s1:ba1.0x0.2x1.1:u1x2x1:d2x1x1:g2:cross:ncdhw",
    "n1c5h6w72:k9r1s4:p0x0:u1x4:d1x1:g1:cross:nhwc",
    "n2c3h4w4:k5r3s3:p5x4:u1x1:d1x1:g1:cross:nchw",
    "n2c17h19w20:k18r3s3:p8x8:u1x1:d8x8:g1:cross:nhwc",
    "n2c5h21w15:k6r3s2:p0x3:u2x1:d7x5:g1:conv:nchw",
    # Odd slices that fill the tiles of a strip: a zero behind each was written over the next filter's first pixel.
    "n96c33h1w1:k2r1s1:p0x0:u1x1:d1x1:g1:cross:nchw",
    "n64c64h7w7:k34r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc",
    "n128c3h5w1:k5r3s1:p2x0:u1x1:d1x1:g1:cross:nhwc",
)
# Bytes of second-level cache, in which strips are of one row, of some, and of some or all images.
_CACHES = (1 << 10, 24 << 10, 96 << 10, 2 << 20)


def _problem(shape: str) -> ConvProblem:
    return parse(f"conv_bwd_filter:bf16:{shape}")


def _device(device: Cpu, l2_bytes: int) -> Cpu:
    return replace(device, l2_bytes=l2_bytes, threads=2, multiplies_tiles=True)


def _counted_through(problem: ConvProblem, plan: Plan, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dw as the docstring of `amx_filter_plan.py` says, strip by strip, in float64."""
    spatial = len(problem.spatial)
    x, dy = (a if spatial == 3 else a[:, :, None] for a in (x, dy))
    d, h, w = plan.gather
    dw = np.zeros((len(plan.reaches), problem.k, problem.c // problem.groups))
    for strip in range(plan.strips):
        first_slice, first_row = strip // plan.strips_h * plan.strip_slices, strip % plan.strips_h * plan.strip_rows
        rows_of = np.zeros((problem.k, plan.steps * LINE))
        planes = np.zeros((len(plan.planes), problem.c, 2 * plan.pairs + 1))
        rows = min(plan.strip_rows, h.count - first_row)
        for number in range(min(plan.strip_slices, problem.n * d.count - first_slice)):
            n, z = divmod(first_slice + number, d.count)
            for row in range(rows):
                at = number * plan.block_pixels + row * plan.pitch
                rows_of[:, at : at + w.count] = dy[n, :, z, first_row + row]
            for place, plane in zip(planes, plan.planes, strict=True):
                depth = z * d.in_step + plane.depth
                for line in range(rows + plan.rows.more):
                    row = (first_row + line) * h.in_step + h.low + plane.row
                    for column in range(w.count + plan.columns.more):
                        pixel = column * w.in_step + w.low + plane.column
                        if 0 <= depth < d.in_extent and 0 <= row < h.in_extent and 0 <= pixel < w.in_extent:
                            place[:, number * plan.block_pixels + line * plan.pitch + column] = x[
                                n, :, depth, row, pixel
                            ]
        c_group, k_group = problem.c // problem.groups, problem.k // problem.groups
        for tap, (plane, reach) in enumerate(plan.reaches):
            met = planes[plane][:, reach : reach + plan.steps * LINE]
            for g in range(problem.groups):
                filters, channels = slice(g * k_group, (g + 1) * k_group), slice(g * c_group, (g + 1) * c_group)
                dw[tap, filters] += rows_of[filters] @ met[channels].T
    return dw.transpose(1, 2, 0).reshape(problem.k, problem.c // problem.groups, *problem.filter)


@pytest.mark.parametrize("l2_bytes", _CACHES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_pixels_counted_through_meet_their_taps(device, shape, l2_bytes):
    problem, rng = _problem(shape), np.random.default_rng(0)
    small = _device(device, l2_bytes)
    (config,) = _CANDIDATE.configs(problem, small)
    x, dy = (rng.integers(-4, 5, operand.shape).astype(np.float64) for operand in problem.operands[:2])
    expected = reference_conv.conv_bwd_filter(problem, x, dy)
    assert (_counted_through(problem, plan_of(problem, config, small), x, dy) == expected).all()


def test_caches_cut_strips_of_each_kind(device):
    plans = []
    for shape in _SHAPES:
        for l2_bytes in _CACHES:
            small = _device(device, l2_bytes)
            (config,) = _CANDIDATE.configs(_problem(shape), small)
            plans.append(plan_of(_problem(shape), config, small))
    assert any(plan.strips_h == plan.gather.h.count for plan in plans)
    assert any(1 < plan.strips_h < plan.gather.h.count for plan in plans)
    assert any(plan.strip_slices > 1 and plan.split_strips > 1 for plan in plans)
    assert any(plan.gather.h.count % plan.strip_rows for plan in plans)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("l2_bytes", _CACHES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_strips_of_all_sizes(device, monkeypatch, shape, l2_bytes, splits):
    problem = _problem(shape)
    small = replace(_device(device, l2_bytes), threads=device.threads)
    (config,) = _CANDIDATE.configs(problem, small)
    if splits == 1:
        monkeypatch.setattr(amx_filter_plan, "_MOST_SUMS_BYTES", 1)
    plan_of.cache_clear()
    plan = plan_of(problem, config, small)
    assert (plan.splits == 1) == (splits == 1 or plan.strips == 1)
    if is_for(_CANDIDATE, device):
        check(_CANDIDATE, problem, config, small)
    plan_of.cache_clear()


def test_refusals_name_what_is_missing(device):
    problem = _problem(_SHAPES[0])
    assert "dtype is f16" in _CANDIDATE.supports(replace(problem, dtype="f16"), device).reason
    without = replace(device, multiplies_tiles=False)
    assert "no matrix units (AMX)" in _CANDIDATE.supports(problem, without).reason
    assert _CANDIDATE.supports(problem, _device(device, 1 << 20)).ok
