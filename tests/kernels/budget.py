"""What a kernel for GPUs may need at most, wherever it is compiled for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from gpus import H200

from nbdnn.device import Gpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda.compile import Kernel, compile_kernel, ptx_text
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.problem import Problem

ARCHITECTURES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0), "sm_120": (12, 0)}


def device_of(arch: str) -> Gpu:
    return replace(H200, capability=ARCHITECTURES[arch])


def in_turn(cases: Iterable[tuple], of: int) -> list:
    """Parameters of a test: one case of so many in every run, all with -m slow."""
    return [pytest.param(*case, marks=() if i % of == 0 else pytest.mark.slow) for i, case in enumerate(cases)]


def launched(ops: Iterable[str]) -> dict[str, list[LaunchedCandidate]]:
    """The candidates of each op that launch kernels of our own."""
    return {
        op: [each for each in registry.candidates(op, kind="cuda") if isinstance(each, LaunchedCandidate)] for op in ops
    }


def assert_lean(launch: Launch, problem: Problem, arch: str, what: str, *, spilled_bytes: int = 0) -> Kernel:
    """The kernel, which spills no more than it may, and has no arithmetic wider than it must be."""
    source = launch.source
    kernel, ptx = compile_kernel(source, arch), ptx_text(source, arch)
    what = f"{arch}, {what}, {problem}, {source.label}: {kernel._replace(cubin=b'')}"
    assert kernel.spill_bytes is not None and kernel.stack_bytes is not None, what
    assert max(kernel.spill_bytes, kernel.stack_bytes) <= spilled_bytes, what
    assert problem.dtype == "f64" or ".f64" not in ptx, what
    assert launch.integer_bits == 64 or not re.search(r"(?:div|rem)\.[su]64", ptx), what
    return kernel
