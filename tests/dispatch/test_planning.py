"""What a choice costs where nothing is known yet: a program of many shapes pays it at each."""

from __future__ import annotations

import re
import sys
from itertools import islice

import pytest
import random_problems
from gpus import H200

from nbdnn.candidate import Candidate
from nbdnn.device import Device, cpu_device
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.problem import Problem, parse

# Of Python, by one candidate; a millisecond is ten to twenty thousand.
_MOST_CALLS = 300_000
_LAYERS = (
    *(
        f"{op}:{dtype}:{layer}:cross:{layout}"
        for op in ("conv_fwd", "conv_bwd_data", "conv_bwd_filter")
        for dtype, layout in (("f16", "nhwc"), ("f32", "nchw"))
        for layer in (
            "n32c256h14w14:k256r3s3:p1x1:u1x1:d1x1:g1",
            "n32c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1",
            "n32c144h56w56:k144r3s3:p1x1:u1x1:d1x1:g144",
            "n32c384h14w14:k384r7s7:p3x3:u1x1:d1x1:g384",
        )
    ),
    *(
        f"{op}:f16:{layer}:max:{layout}"
        for op in ("pool_fwd", "pool_bwd")
        for layout in ("nhwc", "nchw")
        for layer in ("n32c64h112w112:r3s3:p1x1:u2x2", "n32c256h13w13:r5s5:p2x2:u1x1")
    ),
    *(f"{op}:f16:n32c256h14w14:spatial:{layout}" for op in ("bn_train", "bn_bwd") for layout in ("nhwc", "nchw")),
    "softmax_fwd:f32:n1000c1000h1w1:accurate:channel:nchw",
    "dropout_fwd:f32:m1000000",
    "spatialtf_bwd:f32:n32c64h56w56:o56x56:nchw",
    "rnn_bwd:f16:t50b64i512h512l2:lstm:uni:linear",
)


@pytest.mark.parametrize("device", [cpu_device(), H200], ids=["cpu", "cuda"])
@pytest.mark.parametrize("text", _LAYERS)
def test_a_choice_costs_few_calls(text: str, device: Device) -> None:
    problem, calls = parse(text), 0
    fewer = parse(re.sub(r"(:[nmt])(\d+)", lambda found: f"{found[1]}{int(found[2]) - 1}", text, count=1))

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    planned = 0
    for candidate in registry.candidates(problem.op, kind=device.kind):
        if candidate.provider == "cudnn":
            continue
        _plan(candidate, fewer, device)  # which imports what there is to import
        calls = 0
        sys.setprofile(count)
        try:
            planned += _plan(candidate, problem, device)
        finally:
            sys.setprofile(None)
        assert calls < _MOST_CALLS, f"{candidate.id}: {calls} calls"
    assert planned


@pytest.mark.parametrize("device", [cpu_device(), H200], ids=["cpu", "cuda"])
@pytest.mark.parametrize("family", random_problems.FAMILIES)
def test_problems_that_nobody_chose_have_plans(family: str, device: Device) -> None:
    for text in islice(random_problems.texts(0, family), 60):
        problem, planned = parse(text), 0
        for candidate in registry.candidates(problem.op, kind=device.kind):
            if candidate.provider == "cudnn":
                continue
            planned += _plan(candidate, problem, device)
            if isinstance(candidate, LaunchedCandidate) and candidate.supports(problem, device).ok:
                for config in candidate.configs(problem, device):
                    for launch in candidate.launches(problem, config, device):
                        assert all(0 < blocks <= 2**31 - 1 for blocks in launch.grid), f"{text} {candidate} {config}"
        assert planned, text


def _plan(candidate: Candidate, problem: Problem, device: Device) -> int:
    """What a selection asks of a candidate; how many configs it has."""
    if not candidate.supports(problem, device).ok:
        return 0
    configs = candidate.configs(problem, device)
    for config in configs:
        candidate.workspace_bytes(problem, config, device)
        assert candidate.estimate(problem, config, device) > 0
    return len(configs)
