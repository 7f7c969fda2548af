"""Where a convolution's operands lie: layouts, odd strides, what overlaps what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv_example import W, X, Y, assert_is_y, kinds
from layouts import channels_last, is_channels_last

from nbdnn import InvalidProblem, dnn_conv, dnn_gradinput, dnn_gradweight, events
from nbdnn.problem import parse

pytestmark = pytest.mark.usefixtures("no_plans")


def test_results_follow_the_layout_of_what_they_are_like() -> None:
    xl, wl, yl = map(channels_last, (X, W, Y))
    assert is_channels_last(dnn_conv(xl, W, 1)) and not is_channels_last(dnn_conv(X, wl, 1))
    assert is_channels_last(dnn_gradinput(W, yl, X.shape, 1)) and not is_channels_last(dnn_gradinput(wl, Y, X.shape, 1))
    assert is_channels_last(dnn_gradweight(xl, yl, W.shape, 1))
    assert not is_channels_last(dnn_gradweight(xl, Y, W.shape, 1))
    expected = dnn_gradweight(X, Y, W.shape, 1)
    for x in (X, xl):
        for y in (Y, yl):
            np.testing.assert_allclose(dnn_gradweight(x, y, W.shape, 1), expected, rtol=1e-5, atol=1e-4)


def test_an_extent_of_one_has_the_layout_of_the_other_operand() -> None:
    gray, points = X[:, :1].copy(), np.ones((6, 4, 1, 1), "f")
    for x, w, expected in (
        (gray, channels_last(W[:, :2])[:, :1].copy(), "nchw"),  # both fit both
        (gray, W[:, :1], "nchw"),
        (channels_last(X), points, "nhwc"),
        (X, points, "nchw"),
    ):
        with events() as log:
            dnn_conv(x, w)
        problem = parse(log[-1].problem)
        assert problem.layout == expected and problem.w_channels_last == problem.channels_last


def test_out_keeps_its_own_layout() -> None:
    out = channels_last(np.empty_like(Y))
    with events() as log:
        dnn_conv(X, W, 1, out=out)
    assert log[0].problem.endswith("nchw:ynhwc") and kinds(log) == ["selected"]
    assert_is_y(out)


@pytest.mark.parametrize(
    "odd",
    [
        lambda a: a[:, ::-1][:, ::-1].repeat(2, axis=3)[..., ::2],
        lambda a: np.flip(np.flip(a, 2).copy(), 2),
        lambda a: np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view("V4").view(a.dtype).reshape(a.shape),
        lambda a: a.transpose(3, 2, 1, 0).copy().transpose(3, 2, 1, 0),
    ],
    ids=["strided", "negative", "misaligned", "transposed"],
)
def test_odd_strides_are_made_dense(odd: Any) -> None:
    x, w = odd(X), odd(W)
    for _ in range(2):
        with events() as log:
            y = dnn_conv(x, w, 1)
        assert kinds(log).count("copied") == 2
        assert_is_y(y)
    assert log[0].detail.startswith("img is not dense")


def test_an_odd_channels_last_image_stays_channels_last() -> None:
    assert is_channels_last(dnn_conv(channels_last(np.tile(X, (1, 2, 1, 1)))[:, :4], W, 1))


@pytest.mark.parametrize("beta", [0, 2])
def test_odd_out_is_written(beta: int) -> None:
    around = np.ones((2, 6, 6, 10), "f")
    out = around[..., ::2]
    assert dnn_conv(X, W, 1, beta=beta, out=out) is out
    np.testing.assert_allclose(out, Y + beta, rtol=1e-5, atol=1e-5)
    assert (around[..., 1::2] == 1).all()


def test_alignment_is_part_of_the_problem() -> None:
    x = np.empty(X.size + 1, "f")[1:].reshape(X.shape)
    x[...] = X
    with events() as log:
        assert_is_y(dnn_conv(x, W, 1))
    assert log[0].problem.endswith(":a4")


def test_out_may_not_overlap_an_operand() -> None:
    memory = np.zeros(4096, "f")
    x, w = memory[:240].reshape(2, 4, 6, 5), memory[1000:1216].reshape(6, 4, 3, 3)
    dnn_conv(x, w, 1, out=memory[240:600].reshape(2, 6, 6, 5))  # touches, does not overlap
    for start, name in ((239, "img"), (641, "kerns"), (1215, "kerns")):
        with pytest.raises(InvalidProblem, match=f"out overlaps {name} in memory"):
            dnn_conv(x, w, 1, out=memory[start : start + 360].reshape(2, 6, 6, 5))
    residual = memory[2000:2360].reshape(2, 6, 6, 5)
    with pytest.raises(InvalidProblem, match="out overlaps residual"):
        dnn_conv(x, w, 1, residual=residual, out=residual)
    with pytest.raises(InvalidProblem, match="out overlaps img"):
        dnn_conv(x[:, :, ::-1], w, 1, out=memory[239:599].reshape(2, 6, 6, 5))
    for strides in ((0, 120, 20, 4), (720, 120, 16, 4), (720, 60, 20, 4), (716, 120, 20, 4), (720, -116, 20, 4)):
        with pytest.raises(InvalidProblem, match="out overlaps itself"):
            dnn_conv(x, w, 1, out=np.lib.stride_tricks.as_strided(memory[3000:], (2, 6, 6, 5), strides))
    dnn_conv(x[:0], w, 1, out=memory[10:10].reshape(0, 6, 6, 5))


@pytest.mark.parametrize(
    "place", [np.s_[::3, 1:7, ::2, ::-2], np.s_[1:3, 6:0:-1, 6::-1, 3:8], np.s_[:2, ::2, 1:7, 4:9]]
)
def test_out_may_be_any_part_of_an_array(place: Any) -> None:
    memory = np.zeros((4, 12, 11, 9), "f")
    out = memory[place][:, :, :6]
    assert_is_y(dnn_conv(X, W, 1, out=out))
    turned = np.zeros((9, 4, 11, 12), "f").transpose(1, 3, 2, 0)[place][:, :, :6]
    assert_is_y(dnn_conv(X, W, 1, out=turned))


def test_out_may_lie_between_the_elements_of_an_operand() -> None:
    features = np.zeros((2, 12, 6, 5), "f")
    features[:, :4] = X
    assert_is_y(dnn_conv(features[:, :4], W, 1, out=features[:, 4:10]))
    np.testing.assert_array_equal(features[:, :4], X)
    assert_is_y(features[:, 4:10])
    with pytest.raises(InvalidProblem, match="out overlaps img in memory"):
        dnn_conv(features[:, :4], W, 1, out=features[:, 3:9])
