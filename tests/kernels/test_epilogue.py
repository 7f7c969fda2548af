"""What follows the products on the CPU: by vectors that end within a row, and in sums that begin with a bias."""

from __future__ import annotations

import numpy as np
import pytest
from cells import check

import nbdnn
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.problem import parse

_EPILOGUES = ("bias", "relu", "bias+relu", "bias+relu+res", "bias+relu+beta", "bias+swish+res+beta", "tanh", "res")
_LAYERS = (
    ("depthwise", "n2c16h9w11:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc"),
    ("depthwise", "n1c32h9w10:k32r3s3:p1x1:u2x2:d1x1:g8:cross:nhwc"),
    ("depthwise", "n1c5h9w21:k5r3s3:p1x1:u1x1:d1x1:g5:cross:nchw"),
    ("pointwise", "n1c7h9w5:k37r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    ("channel_gemm", "n1c5h9w7:k19r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc"),
    ("pixel_gemm", "n1c5h9w7:k19r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"),
    ("winograd_4x4", "n1c5h9w7:k19r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"),
    ("winograd_2x2", "n1c5h9w7:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc"),
)


@pytest.mark.parametrize("epilogue", _EPILOGUES)
@pytest.mark.parametrize(("algorithm", "layer"), _LAYERS)
def test_every_combination(algorithm: str, layer: str, epilogue: str, device: Cpu) -> None:
    for dtype in ("f32", "bf16"):
        candidate, problem = (
            registry.candidate(f"conv_fwd/cpu/{algorithm}"),
            parse(f"conv_fwd:{dtype}:{layer}:e:{epilogue}"),
        )
        if candidate.supports(problem, device).ok:
            check(candidate, problem, candidate.configs(problem, device)[0], device)


@pytest.mark.parametrize("algorithm", ["pointwise", "depthwise"])
def test_a_nan_outlives_relu(algorithm: str) -> None:
    """Where relu is a bound of sums in registers."""
    groups = 16 if algorithm == "depthwise" else 1
    x, bias = np.ones((1, 16, 4, 4), np.float32), np.full(16, -20, np.float32)
    x[0, :, 1, 2] = np.nan
    x, w = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), np.ones((16, 16 // groups, 1, 1), "f4")
    y = nbdnn.dnn_conv(x, w, bias=bias, activation="relu", num_groups=groups, algo=f"conv_fwd/cpu/{algorithm}")
    assert np.isnan(y[0, :, 1, 2]).all() and np.isnan(y).sum() == 16
    assert (y[~np.isnan(y)] == 0).all()
