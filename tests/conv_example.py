"""A small convolution, on which the tests try what a user may do with one: X and W, and the Y of a border of 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbdnn import reference_conv
from nbdnn.problem import parse

RNG = np.random.default_rng(0)
PROBLEM = parse("conv_fwd:f32:n2c4h6w5:k6r3s3:p1x1:u1x1:d1x1:g1:conv:nchw")
X, W = RNG.standard_normal((2, 4, 6, 5)).astype("f"), RNG.standard_normal((6, 4, 3, 3)).astype("f")
Y = reference_conv.compute(PROBLEM, {"x": X, "w": W}).astype("f")


def assert_is_y(result: Any) -> None:
    np.testing.assert_allclose(result, Y, rtol=1e-5, atol=1e-4)


def kinds(log: list) -> list[str]:
    return [event.kind for event in log]
