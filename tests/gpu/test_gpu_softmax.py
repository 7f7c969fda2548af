"""Softmax of rows far below zero and of rows most of which is -inf: parts of them have no maximum, or a smaller one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cells import check
from gpus import DEVICE
from libraries import library

from nbdnn import driver
from nbdnn.candidate import NoConfig
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import softmax_parts
from nbdnn.problem import parse

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", ["accurate", "log"])
@pytest.mark.parametrize(
    "shape",
    [
        (4, 1100, 1, 1),
        (4, 3000, 1, 1),
        (2, 33000, 1, 1),
        (4, 1101, 1, 1),
        (3, 33003, 1, 1),
        (2, 70001, 1, 1),
        (3, 500, 5, 7),
        (2, 1000, 28, 8),
        (70, 5, 1, 1),
    ],
)
def test_rows_far_below_zero(shape: tuple[int, ...], algorithm: str) -> None:
    """By every config of every candidate: warps that have nothing of a row, or nothing but -inf, shift nothing."""
    torch = library("torch")
    n, c, h, w = shape
    problem = parse(f"softmax_fwd:f32:n{n}c{c}h{h}w{w}:{algorithm}:channel:nchw")
    x = torch.randn(shape, device="cuda") - 1e4
    x[-1, : 3 * c // 4] = -torch.inf
    expected = (torch.log_softmax if algorithm == "log" else torch.softmax)(x.double(), 1)
    seen = set()
    with driver.Current(DEVICE.index):
        for candidate in (each for each in registry.candidates("softmax_fwd", kind="cuda") if each.provider == "numba"):
            for config in candidate.configs(problem, DEVICE) if candidate.supports(problem, DEVICE).ok else ():
                y = torch.full_like(x, torch.nan)
                workspace = torch.full((candidate.workspace_bytes(problem, config, DEVICE) // 4,), torch.nan).cuda()
                torch.cuda.synchronize()
                run = candidate.prepare(problem, config, DEVICE)
                run((x.data_ptr(), y.data_ptr()), problem.scalars, workspace.data_ptr())
                torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6, msg=f"{candidate.id} {config}")
                seen.add(candidate.id)
    assert len(seen) >= 2


@pytest.mark.parametrize("algorithm", ["accurate", "log"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_parts_of_several_tiles(dtype: str, algorithm: str) -> None:
    """As of rows of millions: by kernels for a GPU of one multiprocessor."""
    for candidate in (softmax_parts.FWD, softmax_parts.BWD):
        problem = parse(f"{candidate.op}:{dtype}:n2c70001h1w1:{algorithm}:channel:nchw")
        check(candidate, problem, NoConfig(), replace(DEVICE, sms=1))
