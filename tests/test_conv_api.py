"""The six functions as a user meets them: arguments, errors, alpha, beta and what is fused.

Layouts and memory: test_conv_layouts.py. Types and array libraries: test_conv_types.py.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conv_example import RNG, W, X, Y, assert_is_y
from layouts import channels_last

import nbdnn
from nbdnn import (
    InvalidProblem,
    InvalidType,
    UnsupportedProblem,
    config,
    dnn_conv,
    dnn_conv3d,
    dnn_gradinput,
    dnn_gradinput3d,
    dnn_gradweight,
    dnn_gradweight3d,
    driver,
    events,
    get_conv_out_shape,
    reference_conv,
)
from nbdnn.array import view
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

pytestmark = pytest.mark.usefixtures("no_plans")

CASES = (
    "conv_fwd:f64:n2c4h6w5:k6r3s2:p0x0:u1x1:d1x1:g1:conv:nchw",
    "conv_fwd:f64:n2c4h7w9:k6r3s2:p1x2:u2x1:d1x2:g2:cross:nhwc",
    "conv_fwd:f64:n2c4h7w9:k4r3s3:ba1.0x0.2:u1x2:d2x1:g4:conv:nchw",
    "conv_fwd:f64:n2c4d5h4w6:k6t2r3s2:p1x0x1:u1x2x1:d2x1x1:g2:cross:ncdhw",
    "conv_fwd:f64:n1c2d4h4w4:k3t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:conv:ndhwc",
)


@pytest.mark.parametrize("text", CASES)
def test_all_three_directions_are_what_the_reference_says(text: str) -> None:
    problem = parse(text)
    x, w, y = (RNG.standard_normal(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    if problem.channels_last:
        x, w, y = map(channels_last, (x, w, y))
    common: dict[str, Any] = {"conv_mode": problem.mode, "num_groups": problem.groups}
    geometry = problem.pad, problem.stride, problem.dilation
    three_d = problem.ndim == 3
    fwd, by_data, by_filter = (problem.with_op(op) for op in ("conv_fwd", "conv_bwd_data", "conv_bwd_filter"))
    for problem, function, arguments, operands in (
        (fwd, dnn_conv3d if three_d else dnn_conv, (x, w), {"x": x, "w": w}),
        (by_data, dnn_gradinput3d if three_d else dnn_gradinput, (w, y, x.shape), {"w": w, "dy": y}),
        (by_filter, dnn_gradweight3d if three_d else dnn_gradweight, (x, y, w.shape), {"x": x, "dy": y}),
    ):
        with events() as log:
            result = function(*arguments, *geometry, **common)
        assert {event.problem for event in log} == {str(problem)}
        np.testing.assert_allclose(result, reference_conv.compute(problem, operands), rtol=1e-10, atol=1e-10)
        assert view(result, "result").is_dense(problem.channels_last)


@pytest.mark.parametrize(
    ("border_mode", "expected"),
    [
        ("valid", ((0, 0), (0, 0))),
        ("full", ((4, 4), (3, 3))),
        ("half", ((2, 2), (2, 2))),
        (1, ((1, 1), (1, 1))),
        (np.int64(1), ((1, 1), (1, 1))),
        ((1, 2), ((1, 1), (2, 2))),
        (((1, 0), (0, 2)), ((1, 0), (0, 2))),
        ((1, (0, 2)), ((1, 1), (0, 2))),
    ],
)
def test_border_modes(border_mode: Any, expected: tuple) -> None:
    w = RNG.standard_normal((2, 4, 3, 4)).astype("f")
    with events() as log:
        y = dnn_conv(X, w, border_mode, 1, (2, 1))
    problem = parse(log[0].problem)
    assert problem.pad == expected
    assert y.shape == get_conv_out_shape(X.shape, w.shape, border_mode, 1, (2, 1))


def test_out_shape() -> None:
    assert get_conv_out_shape((8, 3, 224, 224), (64, 3, 7, 7), 3, 2, 1) == (8, 64, 112, 112)
    assert get_conv_out_shape((1, 2, 5, 6, 7), (4, 2, 2, 2, 2), "half", (1, 2, 3)) == (1, 4, 6, 4, 3)
    with pytest.raises(InvalidProblem, match="output extent of spatial axis 0 would be 0"):
        get_conv_out_shape((1, 1, 2, 5), (1, 1, 3, 3))
    with pytest.raises(InvalidType, match="4 axes and kshape 3"):
        get_conv_out_shape((1, 1, 2, 5), (1, 1, 3))
    with pytest.raises(InvalidProblem, match=r"ishape is \(None, 1, 2, 5\), expected a tuple of ints"):
        get_conv_out_shape((None, 1, 2, 5), (1, 1, 1, 1))  # type: ignore[arg-type]


ERRORS: tuple[tuple[type, str, dict[str, Any]], ...] = (
    (InvalidType, "img has 5 axes, expected 4; use dnn_conv3d", {"img": np.ones((1, 1, 3, 3, 3))}),
    (InvalidType, "kerns has 3 axes, expected 4", {"kerns": np.ones((1, 4, 3))}),
    (InvalidType, "img: dtype int64 is not one of float16, bfloat16, float32, float64", {"img": X.astype(int)}),
    (InvalidType, r"img: dtype >f4 is of the other byte order: use .astype\('float32'\)", {"img": X.astype(">f4")}),
    (InvalidType, "kerns: list is not an array", {"kerns": W.tolist()}),
    (InvalidType, "out: tuple is not an array", {"out": (Y,)}),
    (InvalidType, "img: NoneType is not an array", {"img": None}),
    (InvalidType, "MaskedArray is not an array", {"img": np.ma.masked_array(X)}),
    (InvalidProblem, r"border_mode is \[1, 1\], expected an int or a tuple", {"border_mode": [1, 1]}),
    (InvalidProblem, "border_mode is 'same', expected 'valid', 'full', 'half'", {"border_mode": "same"}),
    (InvalidProblem, "border_mode is -1: -1 is less than 0", {"border_mode": -1}),
    (InvalidProblem, r"border_mode is \(1, 1, 1\): 3 axes, but the image has 2", {"border_mode": (1, 1, 1)}),
    (InvalidProblem, r"\(1, 1, 1\) is not a pair", {"border_mode": ((1, 1, 1), 1)}),
    (InvalidProblem, r"border_mode is 0.5, expected an int", {"border_mode": 0.5}),
    (InvalidProblem, r"border_mode is array\(1\), expected an int or a tuple", {"border_mode": np.array(1)}),
    (InvalidProblem, r"subsample is \(1, array\(1\)\), expected an int", {"subsample": (1, np.array(1))}),
    (InvalidProblem, r"subsample is \(1, 1, 1\): 3 axes", {"subsample": (1, 1, 1)}),
    (InvalidProblem, r"subsample is \[1, 1\], expected", {"subsample": [1, 1]}),
    (InvalidProblem, "subsample is 0: 0 is less than 1", {"subsample": 0}),
    (InvalidProblem, f"subsample is {10**20}, it must be at most 2147483647", {"subsample": 10**20}),
    (InvalidProblem, f"border_mode is {2**64}, it must be at most 2147483647", {"border_mode": 2**64}),
    (InvalidProblem, f"dilation is {2**31}, it must be at most", {"dilation": 2**31, "kerns": W[..., :1, :1]}),
    (InvalidProblem, r"out would have shape \(2, 6, 2000000004, 2000000003\)", {"border_mode": 10**9}),
    (InvalidProblem, r"dilation is \(2,\): 1 axes", {"dilation": (2,)}),
    (InvalidProblem, "conv_mode 'flip' is not one of conv, cross", {"conv_mode": "flip"}),
    (InvalidProblem, "direction_hint 'backward' is not one of None", {"direction_hint": "backward"}),
    (InvalidProblem, "img has 4 channels, kerns takes 8 .2 x 4.; axes are .N, C, ...", {"num_groups": 2}),
    (InvalidProblem, "img has 4 channels, kerns takes 3 .1 x 3.; axes are .N, C, ...", {"kerns": W[:, :3]}),
    (InvalidProblem, "output channels: 5 is not a multiple of groups 2", {"kerns": W[:5, :2], "num_groups": 2}),
    (InvalidProblem, "num_groups is 0: 0 is less than 1", {"num_groups": 0}),
    (InvalidProblem, "num_groups is 1.5, expected an int$", {"num_groups": 1.5}),
    (InvalidProblem, "output extent of spatial axis 1 would be 0", {"kerns": np.ones((1, 4, 1, 6), "f")}),
    (InvalidProblem, "spatial extent is 0", {"img": np.ones((2, 4, 0, 5), "f"), "border_mode": 2}),
    (InvalidProblem, "filter extent is 0", {"kerns": np.ones((2, 4, 0, 1), "f")}),
    (InvalidProblem, "algo 'winograd_fused' is unknown; valid: none, small, large", {"algo": "winograd_fused"}),
    (InvalidProblem, "algo 'deterministic' is unknown", {"algo": "deterministic"}),
    (InvalidProblem, "precision 'half' is not one of None, ", {"precision": "half"}),
    (InvalidProblem, "precision 'float16' does not go with float32 data; possible: float32", {"precision": "float16"}),
    (InvalidProblem, "precision 'float64' does not go with float32", {"precision": "float64"}),
    (InvalidProblem, "activation 'gelu' is not one of None, ", {"activation": "gelu"}),
    (InvalidProblem, r"bias has shape \(4,\), expected \(6,\)", {"bias": np.ones(4, "f")}),
    (InvalidProblem, r"residual has shape \(2, 6, 6, 5\), expected \(2, 6, 4, 3\)", {"residual": Y}),
    (InvalidProblem, "alpha is 'one', expected a number", {"alpha": "one"}),
    (InvalidProblem, "beta is None, expected a number", {"beta": None}),
    (InvalidProblem, "beta is 1.0, which needs the array it multiplies: out=", {"beta": 1}),
    (InvalidProblem, r"out has shape \(2, 6, 6, 5\), expected \(2, 6, 4, 3\)", {"out": Y.copy()}),
    (InvalidType, "out is float64, the result float32", {"out": np.ones((2, 6, 4, 3))}),
    (InvalidProblem, "out cannot be written", {"out": np.broadcast_to(np.float32(0), (2, 6, 4, 3))}),
    (InvalidProblem, "workspace_limit is -1", {"workspace_limit": -1}),
    (InvalidProblem, "workspace_limit is '1M', expected an int$", {"workspace_limit": "1M"}),
    (InvalidProblem, "deterministic is 'yes', expected True, False or None", {"deterministic": "yes"}),
    (InvalidProblem, "layer is 1.5, expected a name", {"layer": 1.5}),
    (TypeError, "workmem= is gone: say which algorithm with algo=", {"workmem": "small"}),
)


@pytest.mark.parametrize(("error", "message", "change"), ERRORS, ids=[message for _, message, _ in ERRORS])
def test_errors_name_what_is_wrong(error: type, message: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=message) as raised:
        dnn_conv(**{"img": X, "kerns": W, **change})
    assert error is TypeError or isinstance(raised.value, ValueError)
    assert isinstance(raised.value, TypeError) == (error in (InvalidType, TypeError))


def test_errors_of_the_gradients() -> None:
    with pytest.raises(InvalidProblem, match=r"topgrad has shape \(2, 6, 6, 5\), expected \(2, 6, 4, 3\)"):
        dnn_gradweight(X, Y, W.shape)
    with pytest.raises(InvalidProblem, match=r"topgrad has shape \(2, 6, 6, 5\), expected \(2, 6, 7, 5\)"):
        dnn_gradinput(W, Y, (2, 4, 7, 5), 1)
    with pytest.raises(InvalidProblem, match=r"img_shp is \(2, 4, 6, 5.5\)"):
        dnn_gradinput(W, Y, (2, 4, 6, 5.5), 1)
    for nothing in (None, 6):
        with pytest.raises(InvalidProblem, match=f"img_shp is {nothing}, expected a tuple of ints"):
            dnn_gradinput(W, Y, nothing, 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidProblem, match=f"kerns_shp is {nothing}, expected a tuple of ints"):
            dnn_gradweight(X, Y, nothing, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="kerns_shp has 3 axes, expected 4"):
        dnn_gradweight(X, Y, (6, 4, 3), 1)
    with pytest.raises(InvalidProblem, match=r"img_shp is an array of shape \(2, 4, 6, 5\), .*: pass its \.shape$"):
        dnn_gradinput(W, Y, X, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="16-bit compute on float16: its gradients need float32"):
        dnn_gradweight(X.astype("e"), Y.astype("e"), W.shape, 1, precision="as_input")
    with pytest.raises(InvalidType, match="16-bit compute on float64: its gradients need float64"):
        dnn_gradweight(X.astype("d"), Y.astype("d"), W.shape, 1, precision="float16")
    with pytest.raises(InvalidProblem, match=r"precision 'float64' does not go with float16 data; possible: float32$"):
        dnn_gradweight(X.astype("e"), Y.astype("e"), W.shape, 1, precision="float64")
    for argument in ("bias", "activation", "residual"):
        with pytest.raises(TypeError, match=argument):
            dnn_gradinput(W, Y, X.shape, 1, **{argument: None})
    with pytest.raises(InvalidType, match="img has 4 axes, expected 5; use dnn_conv"):
        dnn_conv3d(X, W)
    with pytest.raises(InvalidProblem, match="algo 'large' exists in 2-D only"):
        dnn_conv3d(np.ones((1, 1, 3, 3, 3)), np.ones((1, 1, 2, 2, 2)), algo="large")
    with (
        nbdnn.config.change(dnn__conv__algo_fwd="large"),
        pytest.raises(InvalidProblem, match=r"flag dnn\.conv\.algo_fwd 'large' exists in 2-D only"),
    ):
        dnn_conv3d(np.ones((1, 1, 3, 3, 3)), np.ones((1, 1, 2, 2, 2)))


def test_fused_epilogue() -> None:
    bias, residual = RNG.standard_normal(6).astype("f"), RNG.standard_normal(Y.shape).astype("f")
    out = RNG.standard_normal(Y.shape).astype("f")
    expected = np.maximum(0, 2 * Y + 3 * out + bias[:, None, None] + residual)
    result = dnn_conv(X, W, 1, bias=bias, residual=residual, activation="relu", alpha=2, beta=3, out=out)
    assert result is out
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gradient", ["input", "weight"])
def test_gradients_take_alpha_and_beta(gradient: str) -> None:
    plain, arguments = {
        "input": (dnn_gradinput, (W, Y, X.shape, 1)),
        "weight": (dnn_gradweight, (X, Y, list(W.shape), 1)),
    }[gradient]
    expected = plain(*arguments)
    out = np.ones_like(expected)
    plain(*arguments, alpha=0.5, beta=-2, out=out)
    np.testing.assert_allclose(out, 0.5 * expected - 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 4, 6, 5), (2, 0, 6, 5), (0, 0, 6, 5)])
@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16])
def test_empty_sums_leave_the_epilogue(shape: tuple[int, ...], dtype: Any) -> None:
    x, w = np.ones(shape, dtype), np.ones((3, shape[1], 3, 3), dtype)
    y = dnn_conv(x, w, 1)
    assert y.shape == (shape[0], 3, 6, 5) and y.dtype == x.dtype and not y.any()
    bias, out = np.array([-1, 0, 2], dtype), np.full(y.shape, 3, dtype)
    dnn_conv(x, w, 1, bias=bias, activation="relu", beta=0.5, out=out)
    assert (out == np.maximum(0, 1.5 + bias.astype("f"))[:, None, None]).all()
    assert not dnn_gradinput(w, y, x.shape, 1).any()
    dw = dnn_gradweight(x, y, w.shape, 1, beta=2, out=np.ones_like(w))
    assert dw.shape == w.shape and (dw == 2).all()
    assert not dnn_gradweight(x, y, w.shape, 1).any()


@pytest.mark.filterwarnings("error")
def test_an_epilogue_of_infinities_warns_of_nothing() -> None:
    x, w, bias = np.ones((1, 0, 4, 4), "f"), np.ones((2, 0, 1, 1), "f"), np.array([-np.inf, np.inf], "f")
    y = dnn_conv(x, w, bias=bias, activation="swish")
    assert np.isnan(y[:, 0]).all() and (y[:, 1] == np.inf).all()


def test_no_output_channels() -> None:
    y = dnn_conv(X, W[:0], 1)
    with pytest.raises(UnsupportedProblem, match="computes pool_fwd, not conv_fwd"):
        dnn_conv(X[:0], W, 1, algo="pool_fwd/cpu/rows")
    with pytest.raises(UnsupportedProblem, match="runs on cuda devices"):
        dnn_conv(X[:0], W, 1, algo="conv_fwd/cudnn/graph")
    assert y.shape == (2, 0, 6, 5)
    assert not dnn_gradinput(W[:0], y, X.shape, 1).any()
    assert dnn_gradweight(X, y, (0, 4, 3, 3), 1).shape == (0, 4, 3, 3)


def test_stream_on_the_cpu() -> None:
    assert_is_y(dnn_conv(X, W, 1, stream=0))


def test_cudnn_is_there_or_it_is_said_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nbdnn.version(raises=False) == -1 or nbdnn.version() >= 91600
    with config.change(dnn__enabled=False):
        assert nbdnn.dnn_available() is False and "dnn.enabled is False" in nbdnn.dnn_available.msg
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    assert nbdnn.dnn_available() is False and "no GPU" in nbdnn.dnn_available.msg
    with config.change(dnn__enabled=True), pytest.raises(RuntimeError, match=r"enabled is True, but there is no GPU"):
        nbdnn.dnn_available()


def test_every_problem_of_a_call_parses() -> None:
    with events() as log:
        dnn_conv(X, W, 1, bias=np.ones(6, "f"), activation="tanh")
    problem = parse(log[0].problem)
    assert isinstance(problem, ConvProblem) and problem.epilogue == ("bias", "tanh")


@pytest.mark.parametrize("algo", ["guess_on_shape_change", "time_on_shape_change"])
def test_no_workspace_still_has_an_implementation(algo: str) -> None:
    x, w = (RNG.standard_normal(shape, np.float32) for shape in ((2, 4, 7, 8), (6, 4, 3, 3)))
    with nbdnn.config.change(dnn__workspace_limit=0):
        y = dnn_conv(x, w, 1, algo=algo)
        dx = dnn_gradinput(w, y, x.shape, 1, algo=algo)
        dw = dnn_gradweight(x, y, w.shape, 1, algo=algo)
    np.testing.assert_allclose(np.vdot(y, y), np.vdot(dx, x), rtol=1e-4)
    np.testing.assert_allclose(np.vdot(y, y), np.vdot(dw, w), rtol=1e-4)


def test_the_first_call_of_a_process_passes_its_stream_on() -> None:
    """It goes through a function that loads the dispatcher; here something else stands for that."""
    code = (
        "import sys, types, nbdnn\n"
        "seen = []\n"
        "sys.modules['nbdnn.conv_call'] = types.SimpleNamespace(compute=lambda *call: seen.append(call))\n"
        "for _ in range(2): nbdnn.dnn_conv('x', 'w', alpha=3, out='y', stream=7)\n"
        "assert seen[0] == seen[1] and seen[0][1:] == (('x', 'w', None, None, 'y'), (3.0, 0.0), 7), seen"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
def test_the_guess_for_filters_as_large_as_the_image(op: str) -> None:
    """Rows of one output cost what rows of many do: `direct` took 12 times as long as the GEMMs, and was guessed."""
    for dims in ("n32c8h8w8:k4r8s8", "n8c256h4w4:k10r4s4"):
        rows = nbdnn.explain(f"{op}:f32:{dims}:p0x0:u1x1:d1x1:g1:cross:nchw").rows
        (chosen,) = (row.candidate for row in rows if row.chosen)
        assert chosen.endswith("gemm"), f"{dims}: {chosen}"


def test_what_is_empty_may_lie_anywhere() -> None:
    images = np.ndarray((2, *X.shape[1:]), X.dtype, np.empty(2 * X[0].nbytes + 1, np.uint8), 1)
    assert dnn_conv(images[:0], W).shape == (0, *dnn_conv(X, W).shape[1:])
    assert (dnn_gradweight(images[:0], dnn_conv(X, W)[:0], W.shape) == 0).all()


def test_errors_survive_other_processes() -> None:
    with pytest.raises(InvalidType) as caught:
        dnn_conv(X.astype(np.int32), W)
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
