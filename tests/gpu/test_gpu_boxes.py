"""Kernels over boxes on a GPU that is said to have few multiprocessors: their blocks stay, and go round."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from cells import check
from gpus import DEVICE

from nbdnn.dispatch import registry
from nbdnn.problem import parse

pytestmark = pytest.mark.gpu

# Of each algorithm its passes, types and layouts; and shapes, with what they have.
_OF_DEPTHWISE = ("depthwise_boxes", "conv_fwd conv_bwd_data", "bf16 f16 f32", "nhwc")
_OF_GROUPS = ("grouped_boxes", "conv_fwd conv_bwd_data conv_bwd_filter", "bf16 f16", "nhwc")
_OF_POINTWISE = ("pointwise_boxes", "conv_fwd conv_bwd_data conv_bwd_filter", "f32", "nchw nhwc")
_OF_CHUNKS = ("wgmma_boxes", "conv_fwd conv_bwd_data conv_bwd_filter", "bf16 f16", "nchw nhwc")
_OF_TF32 = ("wgmma_boxes_tf32", "conv_fwd conv_bwd_data", "f32", "nhwc")
_OF_TF32_FILTERS = ("wgmma_boxes_tf32", "conv_bwd_filter", "f32", "nchw")
_CASES = (
    (_OF_DEPTHWISE, "n5c40h33w50:k40r3s3:p1x1:u1x1:d1x1:g40:cross", "slabs and tiles that are not full"),
    (_OF_DEPTHWISE, "n4c144h28w56:k144r3s3:p0x2:u1x1:d1x1:g144:conv", "whole tiles, pads that differ"),
    (_OF_DEPTHWISE, "n3c72h31w45:k72r5s5:p2x2:u1x1:d1x1:g72:cross", "5x5"),
    (_OF_DEPTHWISE, "n2c24h66w300:k24r3s2:ba0.2x1.0:u1x1:d1x1:g24:cross", "asymmetric, wide"),
    (_OF_GROUPS, "n5c72h33w50:k72r3s3:p1x1:u1x1:d1x1:g9:cross", "two slabs"),
    (_OF_GROUPS, "n9c96h15w15:k96r3s3:p1x1:u1x1:d1x1:g3:conv", "an odd number of small images"),
    (_OF_POINTWISE, "n3c72h20w24:k40r1s1:p0x0:u1x1:d1x1:g1:cross", "two lines of channels and a part of one"),
    (_OF_POINTWISE, "n5c16h52w52:k96r1s1:p0x0:u1x1:d1x1:g1:cross", "a stage a tile, many tiles"),
    (_OF_POINTWISE, "n2c520h16w18:k36r1s1:p0x0:u1x1:d1x1:g1:cross", "more stages a tile than a ring has"),
    (_OF_CHUNKS, "n5c72h52w52:k104r1s1:p0x0:u1x1:d1x1:g1:cross", "a line and a chunk, many tiles"),
    (_OF_CHUNKS, "n9c520h16w18:k136r1s1:p0x0:u1x1:d1x1:g1:cross", "more stages a tile than a ring has"),
    (_OF_TF32, "n5c72h52w52:k104r1s1:p0x0:u1x1:d1x1:g1:cross", "lines and a part of one, many tiles"),
    (_OF_TF32, "n9c520h16w18:k136r1s1:p0x0:u1x1:d1x1:g1:cross", "more stages a tile than a ring has"),
    (_OF_TF32_FILTERS, "n9c520h16w18:k136r1s1:p0x0:u1x1:d1x1:g1:cross", "more chunks than a ring has stages"),
)


# What follows a result, of the layers of matrix units.
_ENDS = {"conv_fwd": ":e:bias+relu+res+beta", "conv_bwd_data": ":e:beta", "conv_bwd_filter": ":e:beta"}


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (algorithm, f"{op}:{dtype}:{shape}:{layout}{end}")
        for (algorithm, ops, dtypes, layouts), shape, _ in _CASES
        for op, dtype, layout in product(ops.split(), dtypes.split(), layouts.split())
        for end in (("", _ENDS[op]) if algorithm.startswith("wgmma") else ("",))
    ],
)
def test_blocks_take_many_tiles(algorithm: str, text: str) -> None:
    """Or, of a filter gradient, many pixels: stages are filled several times."""
    problem, few = parse(text), replace(DEVICE, sms=3)
    candidate = registry.candidate(f"{problem.op}/numba/{algorithm}")
    configs = candidate.configs(problem, few)
    assert configs
    for config in configs:
        check(candidate, problem, config, few)
