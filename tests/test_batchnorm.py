"""Batch normalisation as a user calls it: results, layouts, dtypes, out=, special values, gradients and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layouts import channels_last

import nbdnn
from nbdnn import (
    InvalidProblem,
    InvalidType,
    UnsupportedProblem,
    dnn_batch_normalization_grad,
    dnn_batch_normalization_test,
    dnn_batch_normalization_test_grad,
    dnn_batch_normalization_train,
    ops,
)

RNG = np.random.default_rng(0)
MODES = ("spatial", "per-activation")
SHAPES = ((6, 5), (4, 3, 7), (3, 4, 5, 6), (2, 3, 2, 3, 4), (2, 3, 2, 1, 3, 4))


def draw(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def reduced(shape: tuple[int, ...], mode: str) -> tuple[int, ...]:
    """Axes that statistics are over."""
    return (0,) if mode == "per-activation" else (0, *range(2, len(shape)))


def params(shape: tuple[int, ...], mode: str, *count: str, dtype: Any = np.float64) -> list[np.ndarray]:
    """An array for each name, positive where it says so."""
    kept = tuple(1 if axis in reduced(shape, mode) else extent for axis, extent in enumerate(shape))
    drawn = [draw(*kept, dtype=dtype) for _ in count]
    return [abs(value) + 0.5 if name in ("var", "invstd") else value for name, value in zip(count, drawn, strict=True)]


def normalised(x: np.ndarray, gamma: Any, beta: Any, mode: str, epsilon: float) -> np.ndarray:
    axes = reduced(x.shape, mode)
    mean, var = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon) * gamma + beta


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training(shape: tuple[int, ...], mode: str) -> None:
    x, axes = draw(*shape) * 3 + 2, reduced(shape, mode)
    gamma, beta, old_mean, old_var = params(shape, mode, "gamma", "beta", "mean", "var")
    y, mean, invstd, new_mean, new_var = dnn_batch_normalization_train(
        x, gamma, beta, mode, 1e-3, 0.3, old_mean, old_var
    )
    m = x.size // gamma.size
    var = x.var(axis=axes, keepdims=True)
    np.testing.assert_allclose(y, normalised(x, gamma, beta, mode, 1e-3), atol=1e-12)
    np.testing.assert_allclose(mean, x.mean(axis=axes, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(invstd, 1 / np.sqrt(var + 1e-3))
    np.testing.assert_allclose(new_mean, 0.7 * old_mean + 0.3 * mean, atol=1e-12)
    np.testing.assert_allclose(new_var, 0.7 * old_var + 0.3 * var * m / (m - 1))
    assert y.shape == x.shape and mean.shape == gamma.shape
    assert len(dnn_batch_normalization_train(x, gamma, beta, mode)) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inference(shape: tuple[int, ...], mode: str) -> None:
    x = draw(*shape)
    gamma, beta, mean, var = params(shape, mode, "gamma", "beta", "mean", "var")
    y = dnn_batch_normalization_test(x, gamma, beta, mean, var, mode, 1e-3)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-3) * gamma + beta)


def slope(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    """The derivative by each element, by differences."""
    found = np.empty_like(at)
    for index in np.ndindex(at.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = at.copy()
            moved[index] += step
            ends.append(function(moved))
        found[index] = (ends[0] - ends[1]) / 2e-5
    return found


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_training_are_its_slopes(mode: str, last: bool) -> None:
    shape = (3, 2, 2, 3)
    x, dy = draw(*shape), draw(*shape)
    gamma, beta = params(shape, mode, "gamma", "beta")
    if last:
        x, dy = channels_last(x), channels_last(dy)
    _, mean, invstd = dnn_batch_normalization_train(x, gamma, beta, mode, 1e-2)
    dx, dgamma, dbeta = dnn_batch_normalization_grad(x, dy, gamma, mean, invstd, mode, 1e-2)

    def loss(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> float:
        return float((normalised(x, gamma, beta, mode, 1e-2) * dy).sum())

    np.testing.assert_allclose(dx, slope(lambda each: loss(each, gamma, beta), x), atol=1e-8)
    np.testing.assert_allclose(dgamma, slope(lambda each: loss(x, each, beta), gamma), atol=1e-8)
    np.testing.assert_allclose(dbeta, slope(lambda each: loss(x, gamma, each), beta), atol=1e-8)
    assert dx.strides == x.strides


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_inference_are_its_slopes(mode: str) -> None:
    shape = (3, 2, 2, 3)
    x, dy = draw(*shape), draw(*shape)
    given = params(shape, mode, "gamma", "beta", "mean", "var")
    gradients = dnn_batch_normalization_test_grad(x, dy, given[0], given[2], given[3], mode, 1e-2)

    def loss(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, var: np.ndarray) -> float:
        return float((((x - mean) / np.sqrt(var + 1e-2) * gamma + beta) * dy).sum())

    for place, gradient in enumerate(gradients):

        def of_one(each: np.ndarray, place: int = place) -> float:
            operands = [x, *given]
            operands[place] = each
            return loss(*operands)

        np.testing.assert_allclose(gradient, slope(of_one, [x, *given][place]), atol=1e-8)


@pytest.mark.parametrize("param_dtype", ["data", np.float32])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtypes_of_results(dtype: Any, param_dtype: Any) -> None:
    param_dtype = dtype if param_dtype == "data" else param_dtype
    x, (gamma, beta) = (
        draw(4, 3, 5, 5, dtype=dtype),
        params((4, 3, 5, 5), "spatial", "gamma", "beta", dtype=param_dtype),
    )
    y, mean, invstd = dnn_batch_normalization_train(x, gamma, beta, "spatial")
    assert (y.dtype, mean.dtype, invstd.dtype) == (dtype, param_dtype, param_dtype)
    dx, dgamma, dbeta = dnn_batch_normalization_grad(x, x, gamma, mean, invstd, "spatial")
    assert (dx.dtype, dgamma.dtype, dbeta.dtype) == (dtype, param_dtype, param_dtype)
    wide = normalised(*(each.astype(np.float64) for each in (x, gamma, beta)), "spatial", 1e-4)  # type: ignore[call-arg]
    np.testing.assert_allclose(y.astype(np.float64), wide, atol={2: 0.03, 4: 1e-5}[np.dtype(dtype).itemsize])


def test_mixed_dtypes_become_the_common_one() -> None:
    x, (gamma, beta) = draw(4, 3, dtype=np.float32), params((4, 3), "spatial", "gamma", "beta")
    y, mean, _ = dnn_batch_normalization_train(x, gamma, beta)
    assert y.dtype == mean.dtype == np.float64


@pytest.mark.parametrize("last", [False, True])
def test_a_mean_far_from_zero_costs_nothing(last: bool) -> None:
    x = (1e4 + 1e-2 * draw(16, 4, 33, 31)).astype(np.float32)
    x = channels_last(x) if last else x
    gamma, beta = np.ones((1, 4, 1, 1), np.float32), np.zeros((1, 4, 1, 1), np.float32)
    y, _, invstd = dnn_batch_normalization_train(x, gamma, beta, "spatial", 1e-5)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(y, normalised(exact, 1, 0, "spatial", 1e-5), atol=1e-4)
    np.testing.assert_allclose(invstd.ravel(), 1 / np.sqrt(exact.var(axis=(0, 2, 3)) + 1e-5), rtol=1e-5)


@pytest.mark.parametrize("shape", [(8, 2, 40, 40), (2, 3, 200, 200), (64, 32, 7, 7)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_one_large_value_costs_the_others_nothing(last: bool, shape: tuple[int, ...]) -> None:
    channels = shape[1]
    gamma, beta = np.ones((1, channels, 1, 1), np.float32), np.zeros((1, channels, 1, 1), np.float32)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(shape, np.float32)
        x[0, :, 0, 0] = 1e4  # what sums might begin with
        x[-1, 0, rng.integers(shape[2]), rng.integers(shape[3])] = -1e4
        x = channels_last(x) if last else x
        _, mean, invstd = dnn_batch_normalization_train(x, gamma, beta, "spatial")
        exact = x.astype(np.float64)
        std = np.sqrt(exact.var(axis=(0, 2, 3)) + 1e-4)
        np.testing.assert_allclose(invstd.ravel(), 1 / std, rtol=2e-5, err_msg=f"seed {seed}")
        np.testing.assert_allclose(mean.ravel() / std, exact.mean(axis=(0, 2, 3)) / std, atol=2e-5)


def test_special_values() -> None:
    one = np.ones((1, 2), np.float32)
    y, mean, invstd = dnn_batch_normalization_train(np.full((1, 2), 7.0, np.float32), one, one)
    assert (y == 1).all() and (mean == 7).all()
    np.testing.assert_allclose(invstd, 100)
    x = draw(5, 2, dtype=np.float32)
    x[1, 0] = np.nan
    y, mean, invstd = dnn_batch_normalization_train(x, one, one)
    assert np.isnan(y[:, 0]).all() and np.isnan(mean[0, 0]) and np.isnan(invstd[0, 0])
    assert np.isfinite(y[:, 1]).all()


def test_layouts_and_strides() -> None:
    x, mode = draw(3, 4, 6, 6), "per-activation"
    gamma, beta = params(x.shape, mode, "gamma", "beta")
    expected = normalised(x, gamma, beta, mode, 1e-4)
    last = dnn_batch_normalization_train(channels_last(x), gamma, beta, mode)
    assert last[0].strides == channels_last(x).strides and last[1].strides == channels_last(x[:1]).strides
    np.testing.assert_allclose(last[0], expected, atol=1e-12)
    strided = np.zeros((3, 4, 6, 12))
    strided[..., ::2] = x
    with nbdnn.events() as log:
        y, _, _ = dnn_batch_normalization_train(strided[..., ::2], gamma, beta, mode)
    assert [event.detail for event in log if event.kind == "copied"] == ["inputs is not dense, aligned and f64"]
    np.testing.assert_allclose(y, expected, atol=1e-12)


def test_out_is_a_tuple_in_return_order() -> None:
    x, (gamma, beta) = draw(4, 3, 5, 5), params((4, 3, 5, 5), "spatial", "gamma", "beta")
    plain = dnn_batch_normalization_train(x, gamma, beta, "spatial")
    out = np.empty_like(x), np.empty_like(gamma), None
    given = dnn_batch_normalization_train(x, gamma, beta, "spatial", out=out)
    assert given[0] is out[0] and given[1] is out[1]
    strided = np.empty((4, 3, 5, 10))[..., ::2]
    assert dnn_batch_normalization_train(x, gamma, beta, "spatial", out=(strided, None, None))[0] is strided
    for each, expected in zip((*given, strided), (*plain, plain[0]), strict=True):
        np.testing.assert_array_equal(each, expected)
    y = np.empty_like(x)
    assert dnn_batch_normalization_test(x, gamma, beta, gamma, abs(beta), "spatial", out=y) is y


def test_empty_batches() -> None:
    x, (gamma, beta, var) = np.empty((0, 3, 4, 4)), params((1, 3, 4, 4), "spatial", "gamma", "beta", "var")
    assert dnn_batch_normalization_test(x, gamma, beta, gamma, var, "spatial").shape == x.shape
    for function, count in ((dnn_batch_normalization_grad, 3), (dnn_batch_normalization_test_grad, 5)):
        dx, *rest = function(x, x, gamma, beta, var, "spatial", 1e-4)
        assert dx.shape == x.shape and len(rest) == count - 1
        assert all((each == 0).all() and each.shape == gamma.shape for each in rest)
    with pytest.raises(InvalidProblem, match="a batch of 0 has no mean"):
        dnn_batch_normalization_train(x, gamma, beta, "spatial")


def test_torch_arrays_give_torch_arrays(torch: ModuleType) -> None:
    x, (gamma, beta) = draw(4, 3, 5, 5), params((4, 3, 5, 5), "spatial", "gamma", "beta")
    tensors = [torch.from_numpy(each) for each in (x, gamma, beta)]
    y, mean, invstd = dnn_batch_normalization_train(*tensors, "spatial")
    assert all(isinstance(each, torch.Tensor) for each in (y, mean, invstd))
    np.testing.assert_allclose(y.numpy(), normalised(x, gamma, beta, "spatial", 1e-4), atol=1e-12)


def test_a_number_is_one_of_any_library() -> None:
    x, (gamma, beta) = draw(4, 3, 5, 5), params((4, 3, 5, 5), "spatial", "gamma", "beta")
    expected = dnn_batch_normalization_train(x, gamma, beta, "spatial", 0.25)[0]
    for epsilon in (np.float32(0.25), np.array(0.25)):
        np.testing.assert_array_equal(dnn_batch_normalization_train(x, gamma, beta, "spatial", epsilon)[0], expected)


def test_few_channels_are_shared_by_threads() -> None:
    x, (gamma, beta) = draw(3, 1, 90, 100, dtype=np.float32), params((1, 1, 1, 1), "spatial", "gamma", "beta")
    y, *_ = dnn_batch_normalization_train(x, gamma.astype(np.float32), beta.astype(np.float32), "spatial")
    np.testing.assert_allclose(y, normalised(x.astype(np.float64), gamma, beta, "spatial", 1e-4), atol=1e-5)


def test_the_least_epsilon_may_be_a_float32() -> None:
    """Which is somewhat less than 1e-5: what other libraries keep their default in."""
    x, g = RNG.standard_normal((4, 3, 5, 5)).astype("f"), np.ones((1, 3, 1, 1), np.float32)
    found, *_ = dnn_batch_normalization_train(x, g, g, "spatial", np.float32(1e-5))
    expected, *_ = dnn_batch_normalization_train(x, g, g, "spatial", 1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


X, G = np.zeros((4, 3, 5, 5), np.float32), np.ones((1, 3, 1, 1), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: dnn_batch_normalization_train(X, G, G, "spatial", 9e-6), InvalidProblem, "epsilon is 9e-06"),
        (lambda: dnn_batch_normalization_test(X, G, G, G, G, "spatial", math.inf), InvalidProblem, "epsilon is inf"),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", 1e-4, math.nan),
            InvalidProblem,
            "running_average_factor is nan, expected a number from 0 to 1",
        ),
        (lambda: dnn_batch_normalization_train(X, G, G, "spatial", 1e-4, 1.5), InvalidProblem, "factor is 1.5, exp"),
        (lambda: dnn_batch_normalization_train(X, G, G, "spatial", None), InvalidType, "epsilon is None, expected a"),
        (lambda: dnn_batch_normalization_test(X, G, G, G, G, "spatial", 1j), InvalidType, "epsilon is 1j, expected a"),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", 1e-4, "a"),
            InvalidType,
            "running_average_factor is 'a', expected a number",
        ),
        (lambda: dnn_batch_normalization_train(X, G, G, "space"), InvalidProblem, "mode 'space' is not one of"),
        (lambda: dnn_batch_normalization_train(X, G, G, ["spatial"]), InvalidProblem, r"mode \['spatial'\] is not one"),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", running_mean=G),
            InvalidProblem,
            "running_mean is given without running_var",
        ),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", running_var=G),
            InvalidProblem,
            "running_var is given without running_mean",
        ),
        (
            lambda: dnn_batch_normalization_train(X, G, G[:, :2], "spatial"),
            InvalidProblem,
            r"beta has shape \(1, 2, 1, 1\), expected \(1, 3, 1, 1\) in mode 'spatial'",
        ),
        (
            lambda: dnn_batch_normalization_train(X, G, G),
            InvalidProblem,
            r"gamma has shape \(1, 3, 1, 1\), expected \(1, 3, 5, 5\) in mode 'per-activation'",
        ),
        (
            lambda: dnn_batch_normalization_train(X[:1, :, :1, :1], G, G, "spatial", running_mean=G, running_var=G),
            InvalidProblem,
            "m is 1",
        ),
        (lambda: dnn_batch_normalization_train(X[:, 0, 0, 0], G, G), InvalidType, "inputs has 1 axes"),
        (lambda: dnn_batch_normalization_train(X.astype(int), G, G, "spatial"), InvalidType, "inputs: dtype int64"),
        (
            lambda: dnn_batch_normalization_grad(X, X[:2], G, G, G, "spatial", 1e-4),
            InvalidProblem,
            r"dy has shape \(2, 3, 5, 5\), expected \(4, 3, 5, 5\)",
        ),
        (lambda: dnn_batch_normalization_test(X, G, G, G, None, "spatial"), InvalidType, "var: NoneType"),
        (lambda: dnn_batch_normalization_train(X, G, G, "spatial", out=X), InvalidType, "expected a tuple of out"),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", out=(None, None)),
            InvalidProblem,
            "out has 2 arrays, expected 3",
        ),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", out=(X, None, None)),
            InvalidProblem,
            "out overlaps inputs",
        ),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", out=(None, (both := np.empty_like(G)), both)),
            InvalidProblem,
            r"out \(invstd\) overlaps out \(mean\)",
        ),
        (
            lambda: dnn_batch_normalization_train(X, G, G, "spatial", policy="bn_train/cpu/rows"),
            UnsupportedProblem,
            "planes of 25 elements",
        ),
        (lambda: dnn_batch_normalization_train(X[:, :, :0], G, G, "spatial"), InvalidProblem, "spatial extent is 0"),
    ],
    ids=range(24),
)
def test_errors_name_what_is_wrong(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("mode", MODES)
def test_ops_of_theano(mode: str) -> None:
    x, dy = draw(4, 3, 2, 2), draw(4, 3, 2, 2)
    gamma, beta, mean, var = params(x.shape, mode, "gamma", "beta", "mean", "var")
    train = ops.GpuDnnBatchNorm(mode, running_averages=True, inplace_running_mean=True)
    expected = dnn_batch_normalization_train(x, gamma, beta, mode, 1e-3, 0.2, mean, var)
    given = train(x, gamma, beta, 1e-3, 0.2, mean, var)
    for each, right in zip(given, expected, strict=True):
        np.testing.assert_array_equal(each, right)
    assert given[3] is mean and given[4] is not var
    gradients = train.grad((x, gamma, beta, 1e-3), (dy,))
    for each, right in zip(
        gradients, dnn_batch_normalization_grad(x, dy, gamma, *expected[1:3], mode, 1e-3), strict=False
    ):
        np.testing.assert_array_equal(each, right)
    assert gradients[3:] == [None]
    infer = ops.GpuDnnBatchNormInference(mode)
    of_inference = infer.grad((x, gamma, beta, mean, var, 1e-3), (dy,))
    for each, right in zip(
        of_inference, dnn_batch_normalization_test_grad(x, dy, gamma, mean, var, mode, 1e-3), strict=False
    ):
        np.testing.assert_array_equal(each, right)
    y = infer(x, gamma, beta, mean, var)
    assert ops.GpuDnnBatchNormInference(mode, inplace=True)(x, gamma, beta, mean, var) is x
    np.testing.assert_array_equal(x, y)
    assert repr(infer) == f"GpuDnnBatchNormInference(mode={mode!r})"


def test_ops_overwrite_everything_or_nothing() -> None:
    x, scale = RNG.standard_normal((2, 3, 4, 4)).astype("f"), np.ones((1, 3, 1, 1), np.float32)
    mean, var = np.zeros_like(scale), np.ones_like(scale)
    op = ops.GpuDnnBatchNorm("spatial", True, True, True, True)
    x.flags.writeable = False
    with pytest.raises(InvalidProblem, match="x cannot be written"):
        op(x, scale, scale, 1e-4, 0.1, mean, var)
    assert not mean.any() and (var == 1).all()
    with pytest.raises(InvalidProblem, match="x cannot be written"):
        ops.GpuDnnBatchNormInference("spatial", inplace=True)(x, scale, scale, mean, var)
