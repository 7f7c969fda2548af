"""Every kernel that a GPU candidate launches, compiled for every architecture, within a budget of resources.

What no compiler refuses and a GPU pays for: registers spilled to memory, arrays that did not become registers, float64
arithmetic from a careless literal, 64-bit divisions.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from typing import NamedTuple

import pytest
from edge_cases import edges
from gpus import H200
from libraries import library

from nbdnn.candidate import Candidate
from nbdnn.device import Gpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda.compile import Kernel, Source, compile_kernel, ptx_text
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import shared_bytes
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

library("numba_cuda")

ARCHITECTURES = ("sm_90a", "sm_80", "sm_100a", "sm_120")
# Beyond 2^31 elements, where kernels index with 64 bits, with everything at once that takes registers.
_LARGE_SHAPES = (
    "f32:n3c1024h1000w1000:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw",
    "f64:n3c1024h1000w1000:k1024r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc",
    "f16:n3c1024h1000w1000:k1024r3s3:p1x1:u1x1:d1x1:g1024:cross:nhwc",
)
_MOST_OF_A_KIND = 6
_LARGE_ENDS = {"conv_fwd": "e:bias+tanh+res+beta"}


def _problems(op: str) -> list[ConvProblem]:
    end = _LARGE_ENDS.get(op, "e:beta")
    return edges(op) + [parse(f"{op}:{shape}:{end}") for shape in _LARGE_SHAPES]


@cache
def _launches(op: str) -> dict[Source, tuple[ConvProblem, Launch, Candidate]]:
    """Every different kernel of the candidates of `op`, with a problem and a candidate that launch it."""
    found: dict[Source, tuple[ConvProblem, Launch, Candidate]] = {}
    for candidate in registry.candidates(op, kind="cuda"):
        if isinstance(candidate, LaunchedCandidate):
            for problem in _problems(op):
                for config in candidate.configs(problem, H200) if candidate.supports(problem, H200).ok else ():
                    for launch in candidate.launches(problem, config, H200):
                        found.setdefault(launch.source, (problem, launch, candidate))
    return found


class Made(NamedTuple):
    """What a kernel became: its needs, and which wide arithmetic its PTX has."""

    kernel: Kernel
    has_f64: bool
    has_wide_division: bool


def _made(job: tuple[Source, str]) -> Made:
    source, arch = job
    ptx = ptx_text(source, arch)
    kernel = compile_kernel(source, arch)._replace(cubin=b"")
    return Made(kernel, ".f64" in ptx, bool(re.search(r"(?:div|rem)\.[su]64", ptx)))


def _runs_on(op: str, source: Source, arch: str) -> bool:
    """Whether the candidate that launches a kernel supports its problem on that architecture."""
    problem, _, candidate = _launches(op)[source]
    return candidate.supports(problem, _device(arch)).ok


def _device(arch: str) -> Gpu:
    number = arch.strip("sma_")
    return replace(H200, capability=(int(number[:-1]), int(number[-1])))


def _sample(op: str) -> list[Source]:
    """Of each kind of kernel as many as fit into minutes, evenly from first to last."""
    kinds: dict[str, list[Source]] = {}
    for source in _launches(op):
        kinds.setdefault(source.label, []).append(source)
    return [source for kind in kinds.values() for source in kind[:: -(-len(kind) // _MOST_OF_A_KIND)]]


@pytest.mark.parametrize("op", CONV_OPS)
def test_kernels_stay_within_their_means(op: str) -> None:
    """No spills, no stack, no arithmetic wider than it must be: for one architecture, and in turn for the others."""
    jobs = [
        (source, arch)
        for i, source in enumerate(_sample(op))
        for arch in (ARCHITECTURES[0], ARCHITECTURES[1 + i % (len(ARCHITECTURES) - 1)])
        if _runs_on(op, source, arch)
    ]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for (source, arch), made in zip(jobs, pool.map(_made, jobs, chunksize=4), strict=True):
            problem, launch, _ = _launches(op)[source]
            kernel, what = made.kernel, f"{arch}, {problem}: {source}"
            assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
            assert kernel.registers * source.threads * source.min_blocks <= 65536, what
            assert kernel.shared_bytes + launch.dynamic_shared_bytes <= shared_bytes(H200), what
            assert made.has_f64 == (problem.dtype == "f64"), what
            assert not (made.has_wide_division and launch.integer_bits == 32), what


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
@pytest.mark.parametrize("op", CONV_OPS)
def test_blocks_find_shared_memory(op: str, arch: str) -> None:
    """What is launched depends on the device, so that each plans for itself."""
    device = _device(arch)
    planned = {(problem, candidate) for problem, _, candidate in _launches(op).values()}
    launches = [
        (problem, launch)
        for problem, candidate in planned
        if candidate.supports(problem, device).ok
        for config in candidate.configs(problem, device)
        for launch in candidate.launches(problem, config, device)
    ]
    assert launches
    for problem, launch in launches:
        assert launch.dynamic_shared_bytes <= shared_bytes(device), f"{arch}, {problem}: {launch.source}"


def test_large_problems_have_kernels_of_their_own() -> None:
    for op in CONV_OPS:
        assert {launch.integer_bits for _, launch, _ in _launches(op).values()} == {32, 64}
