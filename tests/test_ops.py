"""The op objects of Theano: constructor arguments, output and beta, gradients, and an object as its own layer."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nbdnn import config, dnn_conv, events, ops
from nbdnn.errors import InvalidProblem, InvalidType

RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


CASES = {
    "2d": (draw(2, 4, 6, 5), draw(6, 2, 3, 2), ops.GpuDnnConvDesc((1, 0), (2, 1), (1, 2), "conv", num_groups=2)),
    "3d": (draw(2, 4, 4, 5, 3), draw(2, 4, 2, 3, 1), ops.GpuDnnConvDesc("half", conv_mode="cross")),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_adjoint(case: str) -> None:
    """<op(a), g> = <a, grad(g)> in each operand of each op, scaled by alpha."""
    x, w, desc = CASES[case]
    desc = desc(w.shape)
    y = ops.GpuDnnConv(num_groups=desc.num_groups)(x, w, None, desc)
    for op, first, second, shape in (
        (ops.GpuDnnConv(num_groups=desc.num_groups), x, w, y.shape),
        (ops.GpuDnnConvGradW(num_groups=desc.num_groups), x, draw(*y.shape), w.shape),
        (ops.GpuDnnConvGradI(num_groups=desc.num_groups), w, draw(*y.shape), x.shape),
    ):
        output, g = draw(*shape), draw(*shape)
        d_first, d_second, d_output, *rest = op.grad((first, second, output, desc, 2.0, 3.0), (g,))
        assert rest == [None, None, None]
        np.testing.assert_allclose(d_output, 3 * g)
        for index, (operand, gradient) in enumerate(((first, d_first), (second, d_second))):
            assert gradient.shape == operand.shape
            probe = draw(*operand.shape)
            moved = (probe, second) if index == 0 else (first, probe)
            np.testing.assert_allclose(np.sum(2 * op(*moved, shape, desc) * g), np.sum(probe * gradient), rtol=1e-9)


def test_output_is_scaled_and_overwritten_only_in_place() -> None:
    x, w, _ = CASES["2d"]
    w, desc = draw(3, 4, 3, 3), ops.GpuDnnConvDesc(1, conv_mode="cross")
    y, output = dnn_conv(x, w, 1, conv_mode="cross"), draw(2, 3, 6, 5)
    kept = output.copy()
    np.testing.assert_allclose(ops.GpuDnnConv()(x, w, output, desc, 2.0, 3.0), 2 * y + 3 * kept)
    np.testing.assert_array_equal(output, kept)
    assert ops.GpuDnnConv(inplace=True)(x, w, output, desc, 2.0, 3.0) is output
    np.testing.assert_allclose(output, 2 * y + 3 * kept)
    np.testing.assert_allclose(ops.GpuDnnConv("none")(x, w, output, desc), y)


def test_jax_output_is_read_and_a_jax_array_comes_back(jax: ModuleType) -> None:
    x, w = (jax.numpy.asarray(draw(*shape), jax.numpy.float32) for shape in ((1, 2, 5, 5), (3, 2, 3, 3)))
    y = ops.GpuDnnConv()(x, w, None, ops.GpuDnnConvDesc())
    twice = ops.GpuDnnConv()(x, w, y, ops.GpuDnnConvDesc(), 1.0, 1.0)
    assert isinstance(twice, jax.Array)
    np.testing.assert_allclose(twice, 2 * y, rtol=1e-6)


def test_twins_take_volumes_only() -> None:
    x, w, desc = CASES["3d"]
    y = ops.GpuDnnConv3d()(x, w, None, desc)
    np.testing.assert_allclose(y, ops.GpuDnnConv()(x, w, None, desc))
    assert ops.GpuDnnConv3dGradW()(x, y, w.shape, desc).shape == w.shape
    assert ops.GpuDnnConv3dGradI()(w, y, x.shape, desc).shape == x.shape
    with pytest.raises(InvalidType, match="GpuDnnConv3d takes arrays of 5 axes, not 4"):
        ops.GpuDnnConv3d()(CASES["2d"][0], CASES["2d"][1], None, desc)


def test_get_out_shape_is_static() -> None:
    assert ops.GpuDnnConv.get_out_shape((2, 3, 9, 8), (5, 3, 3, 3), "half", (2, 1)) == (2, 5, 5, 8)


def test_disagreements_are_named() -> None:
    x, w, desc = CASES["2d"]
    with pytest.raises(InvalidProblem, match="num_groups is 1 in the op, 2 in its descriptor"):
        ops.GpuDnnConv()(x, w, None, desc)
    with pytest.raises(InvalidProblem, match="a gradient needs an array, or the shape of one"):
        ops.GpuDnnConvGradI(num_groups=2)(w, x, None, desc)
    with pytest.raises(InvalidProblem, match=r"output is \[8, 4, 3, 3\], expected an array or a tuple, its shape"):
        ops.GpuDnnConvGradW(num_groups=2)(x, x, [8, 4, 3, 3], desc)


def test_an_object_is_its_own_layer() -> None:
    x, w, desc = draw(1, 2, 5, 5), draw(3, 2, 3, 3), ops.GpuDnnConvDesc()
    first, second = ops.GpuDnnConv("guess_once"), ops.GpuDnnConv("guess_once")
    with config.change(dnn__workspace_limit=1 << 30), events() as log:
        for op in (first, second, first):
            op(x, w, None, desc)
    assert [event.kind for event in log] == ["selected", "selected"]
    assert repr(first) == "GpuDnnConv(algo='guess_once', inplace=False, num_groups=1)"


def test_what_is_no_descriptor_and_no_inputs() -> None:
    x, w = np.ones((1, 2, 5, 5), np.float32), np.ones((3, 2, 3, 3), np.float32)
    op = ops.GpuDnnConv()
    with pytest.raises(InvalidType, match="desc is None, expected a GpuDnnConvDesc"):
        op(x, w, None, None)
    with pytest.raises(InvalidProblem, match="inputs are a tuple of 2, expected a tuple of four to six"):
        op.grad((x, w), (x,))
    with pytest.raises(InvalidProblem, match="output_grads are a ndarray, expected a tuple of one"):
        op.grad((x, w, None, ops.GpuDnnConvDesc()), x)


X, W, TOP, SCALE = draw(2, 3, 6, 6), draw(4, 3, 3, 3), draw(2, 4, 4, 4), np.ones((1, 3, 1, 1))
THETA, GRID, MASK = draw(2, 2, 3), draw(2, 5, 5, 2), np.arange(27, dtype=np.uint8)
DESC = ops.GpuDnnConvDesc()


@pytest.mark.parametrize(
    ("make", "inputs", "top"),
    [
        (ops.GpuDnnConv, (X, W, None, DESC), TOP),
        (ops.GpuDnnConvGradI, (W, TOP, X.shape, DESC), X),
        (ops.GpuDnnConvGradW, (X, TOP, W.shape, DESC), W),
        (ops.GpuDnnPool, (X, (3, 3), (1, 1), (0, 0)), draw(2, 3, 4, 4)),
        (partial(ops.GpuDnnSoftmax, "accurate", "channel"), (X,), X),
        (partial(ops.GpuDnnBatchNorm, "spatial"), (X, SCALE, SCALE), X),
        (partial(ops.GpuDnnBatchNormInference, "spatial"), (X, *[SCALE] * 4), X),
        (ops.GpuDnnDropoutOp, (X, 0.5, MASK), X),
        (ops.GpuDnnTransformerGrid, (THETA, (2, 3, 5, 5)), GRID),
        (ops.GpuDnnTransformerSampler, (X, GRID), draw(2, 3, 5, 5)),
    ],
)
def test_a_gradient_is_of_its_ops_layer(make: Any, inputs: tuple, top: np.ndarray) -> None:
    """The ops that a gradient makes at every call would else choose, and measure, at every call."""
    op = make()
    with config.change(dnn__policy="guess_once", dnn__conv__algo_fwd="guess_once", dnn__conv__algo_bwd="guess_once"):
        op.grad(inputs, (top,))
        with events() as of_the_same:
            op.grad(inputs, (top,))
        with events() as of_another:
            make().grad(inputs, (top,))
    assert "selected" not in [event.kind for event in of_the_same]
    assert "selected" in [event.kind for event in of_another]


def test_a_state_of_dropout_is_of_whole_numbers() -> None:
    with pytest.raises(InvalidType, match="state: dtype float64 is not int64"):
        ops.GpuDnnDropoutOp()(X, 0.5, np.array([3.5, 0.0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.GpuDnnConv("smal"), "algo 'smal' is unknown; valid: none, small, large"),
        (lambda: ops.GpuDnnConv("conv_fwd/cpu/smal"), "no candidate 'conv_fwd/cpu/smal'"),
        (lambda: ops.GpuDnnConv3d("fft"), "algo 'fft' exists in 2-D only; valid: none, small, fft_tiling"),
        (lambda: ops.GpuDnnConvGradW(algo="winograd"), "algo 'winograd' is unknown; valid: none, small, deterministic"),
        (lambda: ops.GpuDnnConvGradI(algo="large"), "algo 'large' is unknown; valid: none, small, deterministic"),
        (lambda: ops.GpuDnnConvDesc(conv_mode="crosscorr"), "conv_mode 'crosscorr' is not one of conv, cross"),
        (lambda: ops.GpuDnnConvDesc(precision="half"), "precision 'half' is not one of None, as_input_f32"),
        (lambda: ops.GpuDnnPool("median"), "mode 'median' is not one of max, max_deterministic"),
        (lambda: ops.GpuDnnPoolDesc(mode="median"), "mode 'median' is not one of max, max_deterministic"),
        (lambda: ops.GpuDnnSoftmax("slow", "channel"), "algo 'slow' is not one of fast, accurate, log"),
        (lambda: ops.GpuDnnSoftmaxGrad("fast", "row"), "mode 'row' is not one of instance, channel"),
        (lambda: ops.GpuDnnBatchNorm("space"), "mode 'space' is not one of peractivation, spatial, per-activation"),
        (lambda: ops.GpuDnnRNNOp("elman"), "rnn_mode 'elman' is not one of rnn_relu, rnn_tanh"),
        (lambda: ops.GpuDnnRNNOp("gru", "both"), "direction_mode 'both' is not one of unidirectional"),
    ],
)
def test_names_that_there_are_not_are_refused_where_they_are_given(make: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        make()
