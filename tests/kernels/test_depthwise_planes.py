"""Depthwise convolution of planes where pixels are not finite."""

from __future__ import annotations

import numpy as np
import pytest

import nbdnn


@pytest.mark.parametrize("algorithm", ["depthwise", "direct"])
@pytest.mark.parametrize("stride", [1, 2])
def test_what_is_infinite_reaches_the_taps_that_meet_it_only(algorithm: str, stride: int) -> None:
    rng, taps = np.random.default_rng(0), 3
    x = rng.standard_normal((1, 2, 9, 10)).astype(np.float32)
    out = [(extent - taps) // stride + 1 for extent in x.shape[2:]]
    dy = rng.standard_normal((1, 2, *out)).astype(np.float32)
    last = (out[1] - 1) * stride + 1  # the middle tap of the last output meets it, and the last tap of none
    x[..., last] = np.inf
    dw = nbdnn.dnn_gradweight(
        x, dy, (2, 1, taps, taps), conv_mode="cross", subsample=(stride, stride), num_groups=2,
        algo=f"conv_bwd_filter/cpu/{algorithm}",
    )  # fmt: skip
    meets = np.array([any(i * stride + tap == last for i in range(out[1])) for tap in range(taps)])
    assert not meets.all()
    assert np.isfinite(dw[..., ~meets]).all()
    assert not np.isfinite(dw[..., meets]).any()
