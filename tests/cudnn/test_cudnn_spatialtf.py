"""cuDNN's spatial transformer: what is refused before it is called, and the calls that are made. On a GPU the matrix
runs it."""

from __future__ import annotations

from typing import Any

import pytest
from gpus import H200

from nbdnn.cudnn import spatialtf
from nbdnn.cudnn.api import function
from nbdnn.problem import FAMILIES, parse

OPS = FAMILIES["spatialtf"]


def text(op: str, dtype: str, rest: str = "n2c3h4w5:o6x7:nchw") -> str:
    dims, out, *more = rest.split(":")
    if op.startswith("spatialtf_grid"):
        return ":".join((op, dtype, dims.partition("c")[0], out, *more[1:]))
    return ":".join((op, dtype, rest))


@pytest.mark.parametrize("op", OPS)
def test_it_supports_what_the_api_can_express(op: str) -> None:
    candidate = spatialtf.ALL[op]
    for dtype in ("f32", "f64"):
        assert candidate.supports(parse(text(op, dtype)), H200) == (True, "")
    assert candidate.cudnn_version > 90000
    assert candidate.deterministic == (not op.endswith("_bwd"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("dtype", "rest", "reason"),
    [
        ("bf16", "n2c3h4w5:o6x7:nchw", "bf16: its positions have 16 bits"),
        ("f32", "n2c3h4w5:o1x7:nchw", "1 output along the rows"),
        ("f32", "n2c3h4w5:o6x7:nchw:a4", "multiples of 4 bytes only, not of 16"),
        ("f32", "n0c3h4w5:o6x7:nchw", "0 elements, the legacy API takes 1 to 2147483647"),
        ("f32", "n65536c1h4w5:o256x256:nchw", "elements, the legacy API takes 1 to 2147483647"),
    ],
)
def test_refusals_say_the_number(op: str, dtype: str, rest: str, reason: str) -> None:
    support = spatialtf.ALL[op].supports(parse(text(op, dtype, rest)), H200)
    assert not support.ok and reason in support.reason


def test_images_that_are_refused() -> None:
    for rest, reason in (("n2c1025h4w5:o6x7:nchw", "1025 channels"), ("n2c3h4w5:o6x7:nhwc", "layout nhwc")):
        support = spatialtf.ALL["spatialtf_sampler_fwd"].supports(
            parse(text("spatialtf_sampler_fwd", "f32", rest)), H200
        )
        assert not support.ok and reason in support.reason


class _Handle:
    address = 7

    def use(self, stream: int) -> None: ...


# The pointers of each call by operand, ws the workspace; the rest are descriptors and scalars.
CALLS = {
    "spatialtf_grid_fwd": [("GridGeneratorForward", "theta grid")],
    "spatialtf_grid_bwd": [("GridGeneratorBackward", "dgrid dtheta")],
    "spatialtf_sampler_fwd": [("SamplerForward", ". . x grid . . y")],
    "spatialtf_sampler_bwd": [("SamplerBackward", ". . x . . dx . . dy grid . dgrid")],
    "spatialtf_fwd": [("GridGeneratorForward", "theta ws"), ("SamplerForward", ". . x ws . . y")],
    "spatialtf_bwd": [
        ("GridGeneratorForward", "theta ws"),
        ("SamplerBackward", ". . x . . dx . . dy ws . ws+"),
        ("GridGeneratorBackward", "ws+ dtheta"),
    ],
}


@pytest.mark.parametrize("op", OPS)
def test_the_calls_take_what_the_header_says(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, tuple[int, ...]]] = []

    def recorded(name: str) -> Any:
        assert function(name).argtypes

        def call(*arguments: int) -> int:
            assert len(arguments) == len(function(name).argtypes)
            made.append((name.removeprefix("cudnnSpatialTf"), arguments))
            return 0

        return call

    monkeypatch.setattr(spatialtf, "handle", lambda device: _Handle())
    monkeypatch.setattr(spatialtf, "function", recorded)
    problem, candidate = parse(text(op, "f32")), spatialtf.ALL[op]
    named = {operand.name: 1000 * (i + 1) for i, operand in enumerate(problem.operands)}
    config = candidate.configs(problem, H200)[0]  # type: ignore[arg-type]
    workspace_bytes = candidate.workspace_bytes(problem, config, H200)  # type: ignore[arg-type]
    named |= {"ws": 50_000, "ws+": 50_000 + workspace_bytes // 2}
    candidate.prepare(problem, config, H200)(tuple(named[o.name] for o in problem.operands), (), 50_000, 0)  # type: ignore[arg-type]
    assert [name for name, _ in made] == [name for name, _ in CALLS[op]]
    for (_, arguments), (_, places) in zip(made, CALLS[op], strict=True):
        assert arguments[0] == _Handle.address
        for argument, name in zip(arguments[2:], places.split(), strict=True):
            assert argument == named[name] if name != "." else argument not in named.values()
    if op.count("_") == 1:
        grids = 1 if op.endswith("fwd") else 2
        assert workspace_bytes >= grids * 2 * 6 * 7 * 2 * 4
