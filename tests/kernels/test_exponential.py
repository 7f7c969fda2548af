"""The vector functions of softmax against NumPy's in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from nbdnn.device import cpu_device
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.exponential import SIGMOID, TANH, logarithm, power, sigmoid, tanh
from nbdnn.kernels.cpu.formula import Lanes, row_formula
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.vector import filled, record

_FIELDS = record("x", "y")
_NUMPY = {"f32": np.float32, "f64": np.float64}


def _power(x: Lanes) -> tuple[Lanes]:
    return (power(x),)


def _small_power(x: Lanes) -> tuple[Lanes]:
    return (power(x, is_small=True),)


def _logarithm(x: Lanes) -> tuple[Lanes]:
    return (logarithm(x),)


def _sigmoid(x: Lanes) -> tuple[Lanes]:
    return (sigmoid(x),)


def _tanh(x: Lanes) -> tuple[Lanes]:
    return (tanh(x),)


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
    x = np.linspace(-87.33654, 0.0 if formula is _small_power else 88.72283, 100_003).astype(
        {"f32": "f4", "f64": "f8"}[dtype]
    )
    assert _ulps(_applied(formula, dtype, x), np.exp(x.astype(np.float64))) <= 2.0


@pytest.mark.parametrize("formula", [_power, _small_power])
def test_powers_of_all_float64(formula):
    x = np.linspace(-708.396418, 0.0 if formula is _small_power else 709.782712, 100_003)
    assert _ulps(_applied(formula, "f64", x), np.exp(x.astype(np.longdouble))) <= 2.0


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("formula", [_power, _small_power])
def test_powers_beyond(formula, dtype):
    type_ = _NUMPY[dtype]
    least = {"f32": -87.34, "f64": -708.4}[dtype]
    x = np.array([-np.inf, -1e30, -1e4, least, 0.0, np.nan, -np.nan], type_)
    np.testing.assert_array_equal(_applied(formula, dtype, x), np.array([0, 0, 0, 0, 1, np.nan, np.nan], type_))


@pytest.mark.parametrize("formula", [_power, _small_power, _sigmoid, _tanh])
def test_every_nan_stays_one(formula):
    """The low bits of what rounds the exponent are the NaN's."""
    of_32 = np.array([0x7FC00000 + bits for bits in (0, 1, 2, 0x81, 0x1FF, 0x3FFFFF)], np.uint32).view(np.float32)
    of_64 = np.array([0x7FF8 << 48 | bits for bits in (0, 1, 2, 0x401, 0xFFF)], np.uint64).view(np.float64)
    for dtype, x in (("f32", of_32), ("f64", of_64)):
        assert np.isnan(_applied(formula, dtype, x)).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_large_powers_are_infinite(dtype):
    x = np.array([88.73, 1e30, np.inf], np.float32) if dtype == "f32" else np.array([709.79, 1e300, np.inf])
    assert np.isposinf(_applied(_power, dtype, x)).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(
    ("formula", "exact", "most"), [(_tanh, np.tanh, 2.0), (_sigmoid, lambda x: 1 / (1 + np.exp(-x)), 4.0)]
)
def test_gates(formula, exact, most, dtype):
    x = np.concatenate([np.linspace(-30, 30, 100_003), np.geomspace(1e-6, 1, 1001)]).astype(f"f{int(dtype[1:]) // 8}")
    assert _ulps(_applied(formula, dtype, x), exact(x.astype(np.longdouble))) <= most


@pytest.mark.parametrize("of_one, formula", [(SIGMOID, _sigmoid), (TANH, _tanh)])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_one_number_and_vectors_are_alike(of_one, formula, dtype):
    one, type_ = of_one[dtype], _NUMPY[dtype]

    @njit
    def by_loop(x, y):
        for i in range(len(x)):
            y[i] = one(x[i])

    x = np.concatenate([np.linspace(-90, 90, 5_001), [-np.inf, np.inf, np.nan]]).astype(type_)
    y = np.empty_like(x)
    by_loop(x, y)
    np.testing.assert_array_equal(y, _applied(formula, dtype, x))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_logarithms(dtype):
    near, far = np.linspace(0.5, 2.0, 50_001), np.geomspace(1.2e-38, 3e38, 50_001)
    x = np.concatenate([near[near != 1.0], far]).astype(_NUMPY[dtype])
    assert _ulps(_applied(_logarithm, dtype, x), np.log(x.astype(np.float64))) <= 2.0


def test_logarithms_beyond():
    x = np.array([1.0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_applied(_logarithm, "f32", x), np.array([0.0, np.inf, np.nan], np.float32))
