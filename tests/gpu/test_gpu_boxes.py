"""Depthwise kernels over boxes on a GPU that is said to have few multiprocessors: their blocks stay, and go round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cells import check
from gpus import DEVICE

from nbdnn.dispatch import registry
from nbdnn.problem import parse

pytestmark = pytest.mark.gpu

_SHAPES = (
    ("n5c40h33w50:k40r3s3:p1x1:u1x1:d1x1:g40:cross", "slabs and tiles that are not full"),
    ("n4c144h28w56:k144r3s3:p0x2:u1x1:d1x1:g144:conv", "whole tiles, pads that differ"),
    ("n3c72h31w45:k72r5s5:p2x2:u1x1:d1x1:g72:cross", "5x5"),
    ("n2c24h66w300:k24r3s2:ba0.2x1.0:u1x1:d1x1:g24:cross", "asymmetric, wide"),
)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [shape for shape, _ in _SHAPES])
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data"])
def test_blocks_take_many_tiles(op: str, shape: str, dtype: str) -> None:
    """Every stage is filled several times."""
    candidate, few = registry.candidate(f"{op}/numba/depthwise_boxes"), replace(DEVICE, sms=3)
    problem = parse(f"{op}:{dtype}:{shape}:nhwc")
    configs = candidate.configs(problem, few)
    assert configs
    for config in configs:
        check(candidate, problem, config, few)
