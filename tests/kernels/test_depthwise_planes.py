"""Depthwise convolution of planes: by vectors of every width, and of pixels that are not finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cells import check

import nbdnn
from nbdnn.candidate import NoConfig
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.problem import parse

_ODD_AND_EVEN = "n1c3h9w75:k3r5s5:p2x2:u2x2:d1x1:g3"
_SHAPES = (
    _ODD_AND_EVEN,
    "n1c2h14w40:k2r11s11:p5x5:u1x1:d1x1:g2",
    "n1c2h9w2:k2r7s7:p3x3:u1x1:d1x1:g2",
    "n1c2h11w23:k2r5s5:p2x2:u4x4:d1x1:g2",
    "n2c3h7w9:k3r1s1:p0x0:u2x2:d1x1:g3",
)


@pytest.mark.parametrize("vector_bytes", [16, 32])
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
def test_vectors_of_every_width(op: str, vector_bytes: int, device: Cpu) -> None:
    """Taps that are shifts of the same vectors, or are too far apart for that; even and odd columns."""
    narrower = replace(device, vector_bytes=min(vector_bytes, device.vector_bytes))
    for dtype, shape in (*(("f32", shape) for shape in _SHAPES), ("bf16", _ODD_AND_EVEN)):
        problem = parse(f"{op}:{dtype}:{shape}:cross:nchw")
        check(registry.candidate(f"{op}/cpu/depthwise"), problem, NoConfig(), narrower)


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
