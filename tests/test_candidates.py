"""The matrix: every candidate on every edge case it supports, against the reference.

Each cell prepares the runner once and makes three checks with it: sums of small integers are exact; random data stay
within the error model; nothing is read that was not given, nothing written but the output, and a second run over the
same dirty workspace gives the same bits. Whatever the registry lists is here by itself.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from math import prod
from typing import NamedTuple

import numpy as np
import pytest
from cells import assert_says_something, check, is_for
from edge_cases import edges

from nbdnn import reference_conv
from nbdnn.candidate import YES, Candidate, NoConfig, Runner, Support
from nbdnn.device import Cpu, cpu_device
from nbdnn.dispatch import registry
from nbdnn.edges_conv_shapes import CORE_2D
from nbdnn.kernels.cpu import conv_fft, conv_im2col, fft_plan
from nbdnn.problem import OPS, Problem
from nbdnn.problem_conv import CONV_OPS, ConvProblem, conv

_RNN_SHAPES = ("t4b3i7h5l2", "t3b6i16h32l1", "t2b7i33h130l1", "t70b16i6h8l1")
# Every config runs on these; they differ in what a config may get wrong: remainders, whole tiles, several tiles.
_CONFIG_SHAPES = (
    CORE_2D[0].shape,
    CORE_2D[1].shape,
    CORE_2D[4].shape,
    "n2c70h30w35:k70r3s3:p1x1:u1x1:d1x1:g1",
    *_RNN_SHAPES,
)


class Cell(NamedTuple):
    candidate: Candidate
    problem: Problem

    def __str__(self) -> str:
        return f"{self.candidate.id}-{self.problem}"


def _listed(op: str) -> list[Candidate]:
    """The CPU candidates of `op`, the forward's lowerings to a gradient among them."""
    every = [candidate for hint in ("", "bprop weights", "bprop inputs") for candidate in registry.candidates(op, hint)]
    return [candidate for candidate in dict.fromkeys(every) if candidate.provider == "cpu" and candidate.op == op]


def _cells() -> list[Cell]:
    device = cpu_device()
    return [
        Cell(candidate, problem)
        for op in OPS
        for problem in edges(op, "cpu")
        for candidate in _listed(op)
        if candidate.supports(problem, device).ok
    ]


CELLS = _cells()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell, device: Cpu) -> None:
    default = cell.candidate.configs(cell.problem, device)[0]
    check(cell.candidate, cell.problem, default, device)


def _config_cells() -> list[Cell]:
    device = cpu_device()
    shapes = [f"{dtype}:{shape}" for dtype in ("f32", "bf16") for shape in _CONFIG_SHAPES]
    chosen = [cell for cell in CELLS if any(shape in str(cell.problem) for shape in shapes)]
    return [cell for cell in chosen if len(cell.candidate.configs(cell.problem, device)) > 1]


@pytest.mark.parametrize("cell", _config_cells(), ids=str)
def test_every_config(cell: Cell, device: Cpu) -> None:
    for config in cell.candidate.configs(cell.problem, device)[1:]:
        check(cell.candidate, cell.problem, config, device)


@pytest.mark.parametrize("narrow", [("avx2", 32), ("neon", 16)], ids=lambda narrow: narrow[0])
@pytest.mark.parametrize("op", CONV_OPS)
def test_kernels_for_narrower_vectors(op: str, narrow: tuple[str, int], device: Cpu) -> None:
    """A machine of wide vectors runs the code for narrower ones as well, with the tiles and tails it has there."""
    isa, vector_bytes = narrow
    narrower = replace(device, isa=isa, vector_bytes=min(vector_bytes, device.vector_bytes))
    shapes = [f"{shape}:cross:nchw" for shape in _CONFIG_SHAPES[:3]]
    for candidate in registry.candidates(op):
        for shape in (*shapes, "n1c12h6w9:k12r3s3:p1x1:u1x1:d1x1:g6:cross:nhwc"):
            problem = conv(f"{op}:f32:{shape}")
            if candidate.supports(problem, narrower).ok:
                check(candidate, problem, candidate.configs(problem, narrower)[0], narrower)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_problems_taken_in_parts(op: str, layout: str, device: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of a lowered image and images whose spectra are held at a time: only large problems have several."""
    problem = conv(f"{op}:f32:n5c3h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}")
    monkeypatch.setattr(conv_im2col, "_STRIP_BYTES", 12_000)
    monkeypatch.setattr(conv_fft, "plan", fft_plan.plan.__wrapped__)
    monkeypatch.setattr(fft_plan, "_IMAGES_BYTES", 1)
    for algorithm in ("im2col", "fft", "fft_tiling"):
        candidate = registry.candidate(f"{op}/cpu/{algorithm}")
        check(candidate, problem, candidate.configs(problem, device)[0], device)


def test_every_candidate_has_three_problems(device: Cpu) -> None:
    counts = Counter(cell.candidate.id for cell in CELLS)
    listed = [candidate.id for op in OPS for candidate in _listed(op) if is_for(candidate, device)]
    assert {name: counts[name] for name in listed if counts[name] < 3} == {}


def test_a_reference_of_zeros_is_refused() -> None:
    problem = conv("conv_fwd:f32:n1c2h8w8:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
    zeros = reference_conv.whole(problem, {"x": np.zeros(problem.x_shape), "w": np.ones(problem.w_shape)})
    with pytest.raises(AssertionError, match="mostly zero"):
        assert_says_something(problem, zeros)


class Broken(Candidate):
    """The reference as a candidate, with one of the faults that kernels have."""

    op, provider, algorithm = "conv_fwd", "test", "broken"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        return YES

    def workspace_bytes(self, problem: ConvProblem, config: Hashable, device: Cpu) -> int:
        return 64

    def estimate(self, problem: ConvProblem, config: Hashable, device: Cpu) -> float:
        return 1.0

    def prepare(self, problem: ConvProblem, config: Hashable, device: Cpu) -> Runner:
        runs = count()

        def run(pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int) -> None:
            x, w, y = (_memory(p, o.shape) for p, o in zip(pointers, problem.operands, strict=True))
            scratch = _memory(workspace, (17,))
            result = reference_conv.compute(problem, {"x": x, "w": w}, scalars).astype(np.float32)
            match self.fault:
                case "reads the output":
                    result += 0 * y
                case "reads the workspace before writing it":
                    result += 0 * scratch[0]
                case "writes past the output":
                    _memory(pointers[2], (y.size + 1,))[-1] = 1
                case "writes before the output":
                    _memory(pointers[2] - 4, (1,))[0] = 1
                case "writes past the workspace":
                    scratch[16] = 1
                case "writes into an operand":
                    w[0, 0, 0, 0] += 1
                case "rounds to half precision":
                    result = result.astype(np.float16).astype(np.float32)
                case "changes from run to run":
                    result *= 1 + 1e-7 * next(runs)
                case "leaves the last output":
                    result[-1, -1, -1, -1] = y[-1, -1, -1, -1]
                case "forgets one product":
                    result[0, 0, 1, 1] -= x[0, 0, 1, 1] * w[0, 0, 1, 1] * scalars[0]
                case "ignores alpha":
                    result /= scalars[0]
            y[...] = result

        return run


def _memory(address: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * prod(shape)).from_address(address)).reshape(shape)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("", None),
        ("reads the output", "nan instead of"),
        ("reads the workspace before writing it", "nan instead of"),
        ("writes past the output", "outside of y"),
        ("writes before the output", "outside of y"),
        ("writes past the workspace", "outside of the workspace"),
        ("writes into an operand", "wrote into w"),
        ("rounds to half precision", "times the permitted error"),
        ("changes from run to run", "other bits"),
        ("leaves the last output", "nan instead of"),
        ("forgets one product", "times the permitted error"),
        ("ignores alpha", "times the permitted error"),
    ],
)
def test_the_checks_catch(fault: str, caught: str | None, device: Cpu) -> None:
    problem = conv(f"conv_fwd:f32:{CORE_2D[0].shape}:cross:nchw")
    with pytest.raises(AssertionError, match=caught) if caught else nullcontext():
        check(Broken(fault), problem, NoConfig(), device)
