"""The vector functions of softmax against NumPy's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from nbdnn.device import cpu_device
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.exponential import logarithm, power
from nbdnn.kernels.cpu.formula import Lanes, row_formula
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.vector import filled, record

_FIELDS = record("x", "y")


def _power(x: Lanes) -> tuple[Lanes]:
    return (power(x),)


def _small_power(x: Lanes) -> tuple[Lanes]:
    return (power(x, is_small=True),)


def _logarithm(x: Lanes) -> tuple[Lanes]:
    return (logarithm(x),)


def _applied(formula, dtype: str, x: np.ndarray) -> np.ndarray:
    run, n = row_formula(formula, 1, 1, dtype, cpu_device().lanes(dtype)), len(x)

    def apply_formula(args, ctx, index, worker):
        run(n, ctx)

    y = np.empty_like(x)
    table = filled(_FIELDS, x=x.ctypes.data, y=y.ctypes.data)
    Program([Phase(compile_task(apply_formula, (formula.__name__, dtype, n)), 1, table)], [x, y])((), ())
    return y


def _ulps(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.max(np.abs(found - exact) / np.spacing(np.abs(exact).astype(found.dtype)).astype(np.float64)))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("formula", [_power, _small_power])
def test_powers_of_normal_numbers(formula, dtype):
    x = np.linspace(-87.3, 0.0 if formula is _small_power else 88.7, 100_003).astype({"f32": "f4", "f64": "f8"}[dtype])
    assert _ulps(_applied(formula, dtype, x), np.exp(x.astype(np.float64))) <= 2.0


@pytest.mark.parametrize("formula", [_power, _small_power])
def test_powers_beyond(formula):
    x = np.array([-np.inf, -1e30, -104.0, -87.34, 0.0, np.nan], np.float32)
    np.testing.assert_array_equal(_applied(formula, "f32", x), np.array([0, 0, 0, 0, 1, np.nan], np.float32))


def test_large_powers_are_infinite():
    x = np.array([88.73, 100.0, 1e30, np.inf], np.float32)
    assert np.isposinf(_applied(_power, "f32", x)).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_logarithms(dtype):
    near, far = np.linspace(0.5, 2.0, 50_001), np.geomspace(1.2e-38, 3e38, 50_001)
    x = np.concatenate([near[near != 1.0], far]).astype({"f32": "f4", "f64": "f8"}[dtype])
    assert _ulps(_applied(_logarithm, dtype, x), np.log(x.astype(np.float64))) <= 2.0


def test_logarithms_beyond():
    x = np.array([1.0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_applied(_logarithm, "f32", x), np.array([0.0, np.inf, np.nan], np.float32))
