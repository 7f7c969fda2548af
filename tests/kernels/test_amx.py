"""What surrounds the matrix units of x86: the parts of a number, shapes of tiles, and the choice of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numba import njit

from nbdnn.dispatch import registry
from nbdnn.kernels.cpu import amx
from nbdnn.kernels.cpu.cost import fmas_of_step
from nbdnn.problem import parse

_LARGEST = np.finfo(np.float32).max
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
@pytest.mark.parametrize(("dtype", "kind"), [("f32", np.float32), ("f16", np.float16)])
def test_parts_add_up_to_the_number(dtype, kind, count):
    rng = np.random.default_rng(count)
    values = (rng.standard_normal(count) * np.exp2(rng.integers(-12, 5, count))).astype(kind)
    parts = _parts(values, dtype)
    assert (parts.sum(0) == values.astype(np.float64)).all()
    assert (np.abs(parts[1:]) <= np.abs(parts[:-1]) * 2.0**-7).all()


@pytest.mark.parametrize("value", [_LARGEST, -_LARGEST, 3.3e38, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 0.0, 2.0**-100])
def test_parts_of_the_largest_and_the_odd_ones(value):
    assert _parts(np.full(1, value, np.float32), "f32").sum(0)[0] == np.float32(value)


def test_nan_and_infinities_have_no_other_parts():
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(_parts(nan, "f32")[0]).all()
    first, second, _ = _parts(np.array([np.inf, -np.inf], np.float32), "f32")
    assert (first == [np.inf, -np.inf]).all()
    assert np.isnan(second).all()


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
    assert "dtype is f64" in candidate.supports(replace(problem, dtype="f64", compute="f64"), having).reason


def test_guesses_prefer_tiles_for_bfloat16_and_know_slow_pairs(device):
    wide = replace(device, vector_bytes=64, isa="avx512", multiplies_bf16=True, multiplies_tiles=False)
    having = replace(wide, multiplies_tiles=True)
    assert fmas_of_step(wide, True) == fmas_of_step(having, False) == 1.0 < fmas_of_step(having, True)

    def us(dtype: str, algorithm: str) -> float:
        candidate, problem = registry.candidate(f"conv_fwd/cpu/{algorithm}"), parse(f"conv_fwd:{dtype}:{_LAYER}")
        return min(candidate.estimate(problem, config, having) for config in candidate.configs(problem, having))

    assert us("bf16", "amx") < us("bf16", "winograd_4x4") < us("bf16", "channel_gemm") < us("bf16", "channel_dot")
    assert us("f32", "amx") > us("f32", "winograd_4x4")
