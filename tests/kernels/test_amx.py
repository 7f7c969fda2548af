"""What surrounds the matrix units of x86: the parts of a number, shapes of tiles, and the choice of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numba import njit

from nbdnn.dispatch import registry
from nbdnn.kernels.cpu import amx, peaks
from nbdnn.kernels.cpu.amx_plan import layout_of
from nbdnn.kernels.cpu.cost import fmas_of_step
from nbdnn.problem import parse

_LAYER = "n8c256h14w14:k256r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc"


def _parts(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 [part, element], each from its bfloat16."""
    count, parts = values.size, amx.PARTS[dtype]
    split, to = amx.split_row(dtype, parts), np.full((parts, count + 1), 0xABCD, np.uint16)

    @njit
    def run(to, step, start, n):
        split(to, step, start, n)

    run(to.ctypes.data, to.strides[0], values.ctypes.data, count)
    assert (to[:, count] == 0xABCD).all()
    return (to[:, :count].astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("count", [1, 16, 37])
def test_parts_add_up_to_the_number(count):
    rng = np.random.default_rng(count)
    values = (rng.standard_normal(count) * np.exp2(rng.integers(-12, 5, count))).astype(np.float16)
    upper, rest = _parts(values, "f16")
    assert (upper + rest == values.astype(np.float64)).all()
    assert (np.abs(rest) < np.abs(upper) * 2.0**-7).all()


def test_every_float16_has_parts_or_is_none():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    upper, rest = _parts(values, "f16")
    finite = np.isfinite(values)
    assert ((upper + rest)[finite] == values[finite].astype(np.float64)).all()
    assert (upper[np.isinf(values)] == values[np.isinf(values)]).all()
    assert np.isnan(rest[~finite]).all()
    assert np.isnan(upper[np.isnan(values)]).all()


def test_shapes_are_the_ones_the_unit_reads():
    shapes = amx.tile_shapes(20)
    assert shapes[0] == 1
    assert shapes[16:32].view(np.uint16).tolist() == [64] * 4 + [40] * 2 + [64] * 2
    assert shapes[48:56].tolist() == [16] * 6 + [10] * 2


def test_refusals_name_what_is_missing(device):
    problem = parse(f"conv_fwd:bf16:{_LAYER}")
    candidate = registry.candidate("conv_fwd/cpu/amx")
    without, having = (replace(device, multiplies_tiles=has) for has in (False, True))
    assert "no matrix units (AMX)" in candidate.supports(problem, without).reason
    assert candidate.supports(problem, having).ok
    assert "dtype is f32" in candidate.supports(replace(problem, dtype="f32"), having).reason


def test_guesses_prefer_tiles_for_bfloat16_and_know_slow_pairs(device):
    wide = replace(device, vector_bytes=64, isa="avx512", multiplies_bf16=True, multiplies_tiles=False)
    having = replace(wide, multiplies_tiles=True)
    assert fmas_of_step(wide, True) == fmas_of_step(having, False) == 1.0 < fmas_of_step(having, True)

    def us(dtype: str, algorithm: str) -> float:
        candidate, problem = registry.candidate(f"conv_fwd/cpu/{algorithm}"), parse(f"conv_fwd:{dtype}:{_LAYER}")
        return min(candidate.estimate(problem, config, having) for config in candidate.configs(problem, having))

    assert us("bf16", "amx") < us("bf16", "winograd_4x4") < us("bf16", "channel_gemm") < us("bf16", "channel_dot")
    assert us("f16", "amx") > us("f16", "winograd_4x4")


def test_a_floor_counts_on_tiles_where_there_are_any(device):
    if device.multiplies_tiles:
        # 13 times as many, of one thread of a core; threads of one core slow each other's tiles three to four times.
        assert peaks.tile_flops_per_s(device) > peaks.measured(device, "f32").flops_per_s


@pytest.mark.parametrize("shape", ["n3c64h5w7:k32r1s1:p0x0:u1x1:d1x1", "n3c64d2h5w7:k32t1r1s1:p0x0x0:u1x1x1:d1x1x1"])
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
def test_interleaved_pixels_of_all_images_are_one_and_read_in_place(device, op, shape):
    problem = parse(f"{op}:bf16:{shape}:g1:cross:{'ndhwc' if 'd2' in shape else 'nhwc'}")
    (config,) = registry.candidate(f"{op}/cpu/amx").configs(problem, device)
    layout = layout_of(problem, config, device)
    (plan,) = layout.plans
    assert layout.geo.n == 1
    assert plan.in_place
    assert not layout_of(replace(problem, dtype="f16"), config, device).plans[0].in_place
