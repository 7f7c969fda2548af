"""cuDNN's softmax: what is refused before it is called, and how arrays are described. On a GPU the matrix runs it."""

from __future__ import annotations

import pytest
from gpus import H200

from nbdnn.cudnn import softmax
from nbdnn.cudnn.api import function
from nbdnn.cudnn.enums import SoftmaxAlgorithm
from nbdnn.problem import parse
from nbdnn.problem_softmax import ALGORITHMS

BOTH = softmax.FWD, softmax.BWD


@pytest.mark.parametrize("candidate", BOTH, ids=lambda candidate: candidate.id)
def test_it_supports_what_the_api_can_express(candidate: softmax.Softmax) -> None:
    for dtype in ("f16", "bf16", "f32", "f64"):
        for rest in ("accurate:channel:nchw", "log:channel:nhwc", "fast:instance:nchw"):
            problem = parse(f"{candidate.op}:{dtype}:n2c3h4w5:{rest}")
            assert candidate.supports(problem, H200).ok
    assert candidate.cudnn_version > 90000


@pytest.mark.parametrize("candidate", BOTH, ids=lambda candidate: candidate.id)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32:n0c3h4w5:accurate:channel:nchw", "0 elements"),
        ("f32:n70000c1000h8w8:accurate:channel:nchw", "4480000000 elements, the legacy API takes 1 to 2147483647"),
        ("f32:n2c3h4w5:accurate:channel:nchw:a4", "multiples of 4 bytes only, not of 16"),
    ],
)
def test_refusals_say_the_number(candidate: softmax.Softmax, text: str, reason: str) -> None:
    support = candidate.supports(parse(f"{candidate.op}:{text}"), H200)
    assert not support.ok and reason in support.reason


def test_strided_rows_are_guessed_far_behind_those_side_by_side() -> None:
    for candidate in BOTH:
        apart, near = (
            candidate.estimate(parse(f"{candidate.op}:f32:n8c100h20w20:accurate:channel:{layout}"), (), H200)
            for layout in ("nchw", "nhwc")
        )
        assert apart > 3 * near


def test_its_functions_and_algorithms_are_there() -> None:
    assert [each.name.lower() for each in SoftmaxAlgorithm] == list(ALGORITHMS)
    for name in ("cudnnSoftmaxForward", "cudnnSoftmaxBackward"):
        assert function(name).argtypes
