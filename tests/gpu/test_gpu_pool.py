"""Which element of a window is its maximum, on a GPU: where axes disagree, by every config of nbdnn's candidates."""

from __future__ import annotations

import numpy as np
import pytest
from cells import assert_right
from gpus import DEVICE
from guarded import BUFFERS, Operands, values

from nbdnn import driver, reference
from nbdnn.dispatch import registry
from nbdnn.problem import parse

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "f32:n2c19d6h9w21:t3r3s3:p1x1x1:u1x1x1:max:{}",
        "f16:n1c9d7h11w8:t3r5s3:p1x2x0:u2x1x1:max:{}",
        "bf16:n2c20h19w23:r5s5:p2x2:u1x1:max:{}",
        "f32:n1c3h21w530:r3s7:p1x3:u1x2:max:{}",
        "f32:n3c20h19w41:r3s3:p1x1:u2x2:max:{}",
        "bf16:n2c34h20w23:r5s4:p0x1:u2x3:max:{}",
        "f16:n2c16d9h10w21:t3r3s3:p1x0x1:u2x2x2:max:{}",
        "f32:n1c6d6h9w11:t3r3s3:p0x1x1:u1x2x2:max:{}",
    ],
)
def test_the_first_of_equals_and_the_last_nan(text: str, channels_last: bool) -> None:
    layout = (("nchw", "nhwc"), ("ncdhw", "ndhwc"))["t3" in text][channels_last]
    problem = parse(f"pool_bwd:{text.format(layout)}")
    given, draw = values(problem, "normal"), np.random.default_rng(7)
    x = draw.integers(-1, 2, problem.x_shape).astype("f")
    x[x == 0] *= draw.choice([-1.0, 1.0], np.count_nonzero(x == 0)).astype("f")
    for share in (0.0, 0.1):
        x[draw.random(x.shape) < share] = np.nan
        x[draw.random(x.shape) < share] = -np.inf
        x[0, 0] = -np.inf  # which padding must not equal
        x[0, 0, ..., -1] = np.inf
        given |= {"x": x.astype(given["x"].dtype)}
        given |= {"y": reference.derived(problem, given)["y"].astype(given["y"].dtype)}
        expected = reference.samples(problem, given, (), None)
        seen = set()
        with driver.Current(DEVICE.index):
            for candidate in registry.candidates("pool_bwd", kind="cuda"):
                if candidate.provider != "numba" or not candidate.supports(problem, DEVICE).ok:
                    continue
                for config in candidate.configs(problem, DEVICE):
                    operands = Operands(problem, given, "cuda")
                    workspace = BUFFERS["cuda"](candidate.workspace_bytes(problem, config, DEVICE), 256)
                    workspace.send()
                    candidate.prepare(problem, config, DEVICE)(operands.pointers, (), workspace.address, 0)
                    operands.fetch()
                    what = f"{candidate.id} {config}"
                    assert_right(
                        candidate, problem, operands.outs, expected, what, candidate.roundings(problem, DEVICE)
                    )
                seen.add(candidate.algorithm)
        assert "direct" in seen and (seen & {"rolling", "marching", "staged"} or not channels_last), seen
