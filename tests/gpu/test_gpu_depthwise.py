"""Depthwise gradients with a stride on a GPU, in the blocks without idle threads that only large images get."""

from __future__ import annotations

import pytest
from cells import check
from gpus import DEVICE

from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import conv_depthwise
from nbdnn.problem import parse

pytestmark = pytest.mark.gpu

_SHAPES = (
    ("n3c144h33w50:k144r3s3:p1x1:u2x2:d1x1:g144:cross", 288, "a whole pixel of 36 vectors"),
    ("n2c96h21w31:k96r3s3:p0x2:u2x2:d1x1:g96:conv", 192, "a whole pixel of 24, pads that differ"),
    ("n2c200h19w22:k200r3s2:p1x0:u1x2:d1x1:g200:cross", 160, "slabs of 10 vectors"),
    ("n1c36h9w7:k36r3s3:p1x1:u2x2:d1x1:g36:cross", 288, "fewer tiles than a block"),
)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape, threads", [shape[:2] for shape in _SHAPES])
def test_blocks_without_idle_threads(shape: str, threads: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_depthwise, "_LEAST_WORKING_THREADS", 1)
    candidate, problem = (
        registry.candidate("conv_bwd_data/numba/depthwise"),
        parse(f"conv_bwd_data:{dtype}:{shape}:nhwc"),
    )
    configs = candidate.configs(problem, DEVICE)
    assert configs
    for config in configs:
        (launch,) = candidate.launches(problem, config, DEVICE)
        assert launch.source.threads == threads
        check(candidate, problem, config, DEVICE)
