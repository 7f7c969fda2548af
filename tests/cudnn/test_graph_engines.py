"""The graphs of the benchmark that asks whether cuDNN's engines for batch normalisation and pooling win anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from planned import DEVICE

from nbdnn.cudnn.graph import proposals
from nbdnn.cudnn.handle import property_descriptor
from nbdnn.problem import parse

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import graph_engines


@pytest.mark.parametrize(
    ("text", "some"),
    [
        ("bn_train:bf16:n32c256h56w56:spatial:nhwc:pf32", True),
        ("bn_bwd:f32:n4c64d16h56w56:spatial:ncdhw", True),
        ("pool_fwd:bf16:n4c64d16h112w112:t2r2s2:p0x0x0:u2x2x2:max:ndhwc", True),
        ("pool_bwd:f32:n32c256h28w28:r3s3:p1x1:u1x1:average_inc_pad:nhwc", True),
        ("pool_bwd:f32:n32c64h112w112:r3s3:p1x1:u2x2:max:nhwc", False),
    ],
)
def test_cudnn_proposes_engines(text: str, some: bool) -> None:
    assert text in graph_engines.rows()
    found = proposals(graph_engines.graph(parse(text)), property_descriptor(DEVICE))
    assert bool(found) == some
