"""Every kernel that a GPU candidate launches, compiled for every architecture, within a budget of resources.

What no compiler refuses and a GPU pays for: registers spilled to memory, arrays that did not become registers, float64
arithmetic from a careless literal, 64-bit divisions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
from edge_cases import edges
from gpus import H200

from nbdnn.device import Gpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda.compile import Source, compile_kernel, ptx_text
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import shared_bytes
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

pytestmark = pytest.mark.usefixtures("numba_cuda")

ARCHITECTURES = ("sm_90a", "sm_80", "sm_100a", "sm_120")
CANDIDATES = [
    candidate
    for op in CONV_OPS
    for candidate in registry.candidates(op, kind="cuda")
    if isinstance(candidate, LaunchedCandidate)
]
# Beyond 2^31 elements, where kernels index with 64 bits, with everything at once that takes registers.
_LARGE_SHAPES = (
    "f32:n3c1024h1000w1000:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw",
    "f64:n3c1024h1000w1000:k1024r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc",
    "f16:n3c1024h1000w1000:k1024r3s3:p1x1:u1x1:d1x1:g1024:cross:nhwc",
)
_LARGE_ENDS = {"conv_fwd": "e:bias+tanh+res+beta"}


@cache
def _problems(op: str) -> list[ConvProblem]:
    end = _LARGE_ENDS.get(op, "e:beta")
    return edges(op) + [parse(f"{op}:{shape}:{end}") for shape in _LARGE_SHAPES]


@cache
def _launches(candidate: LaunchedCandidate) -> dict[Source, tuple[ConvProblem, Launch]]:
    """Every different kernel that a candidate launches, with a problem where it does."""
    found: dict[Source, tuple[ConvProblem, Launch]] = {}
    for problem in _problems(candidate.op):
        for launch in _launches_of(candidate, problem, H200):
            found.setdefault(launch.source, (problem, launch))
    return found


def _launches_of(candidate: LaunchedCandidate, problem: ConvProblem, device: Gpu) -> list[Launch]:
    configs = candidate.configs(problem, device) if candidate.supports(problem, device).ok else ()
    return [launch for config in configs for launch in candidate.launches(problem, config, device)]


def _device(arch: str) -> Gpu:
    number = arch.strip("sma_")
    return replace(H200, capability=(int(number[:-1]), int(number[-1])))


def _every(candidate: LaunchedCandidate) -> Iterator[tuple[Source, str]]:
    """Every kernel for every architecture that runs it."""
    for source, (problem, _) in _launches(candidate).items():
        yield from ((source, arch) for arch in ARCHITECTURES if candidate.supports(problem, _device(arch)).ok)


def _sample(candidate: LaunchedCandidate) -> Iterator[tuple[Source, str]]:
    """Of each kind of kernel one, for one architecture; both in turn."""
    kinds: dict[str, dict[str, list[Source]]] = {}
    for source, arch in _every(candidate):
        kinds.setdefault(source.label, {}).setdefault(arch, []).append(source)
    for turn, kind in enumerate(kinds.values(), start=CANDIDATES.index(candidate)):
        arch = list(kind)[turn % len(kind)]
        yield kind[arch][turn * len(kind[arch]) // 5 % len(kind[arch])], arch


@pytest.mark.parametrize("chosen", [_sample, pytest.param(_every, marks=pytest.mark.slow)])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_kernels_stay_within_their_means(candidate: LaunchedCandidate, chosen: Callable) -> None:
    """No spills, no stack, no arithmetic wider than it must be."""
    compiled = 0
    for source, arch in chosen(candidate):
        problem, launch = _launches(candidate)[source]
        kernel, ptx, what = compile_kernel(source, arch), ptx_text(source, arch), f"{arch}, {problem}: {source}"
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
        assert kernel.registers * source.threads * source.min_blocks <= 65536, what
        assert kernel.shared_bytes + launch.dynamic_shared_bytes <= shared_bytes(H200), what
        assert (".f64" in ptx) == (problem.dtype == "f64"), what
        assert launch.integer_bits == 64 or not re.search(r"(?:div|rem)\.[su]64", ptx), what
        compiled += 1
    assert compiled


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
@pytest.mark.parametrize("op", CONV_OPS)
def test_blocks_find_shared_memory(op: str, arch: str) -> None:
    """What is launched depends on the device, so that each plans for itself."""
    device = _device(arch)
    launches = [
        (problem, launch)
        for candidate in CANDIDATES
        if candidate.op == op
        for problem in dict.fromkeys(problem for problem, _ in _launches(candidate).values())
        for launch in _launches_of(candidate, problem, device)
    ]
    assert launches
    for problem, launch in launches:
        assert launch.dynamic_shared_bytes <= shared_bytes(device), f"{arch}, {problem}: {launch.source}"


def test_large_problems_have_kernels_of_their_own() -> None:
    for op in CONV_OPS:
        every = [launch for each in CANDIDATES if each.op == op for _, launch in _launches(each).values()]
        assert {launch.integer_bits for launch in every} == {32, 64}
