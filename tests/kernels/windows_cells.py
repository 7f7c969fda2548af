"""What the tests of stem and grouped do with a problem: its kernels in plain Python, and their needs when compiled."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from emulated import result
from emulated_ptx import install
from gpus import H200

from nbdnn.kernels.cuda.compile import Source, compile_kernel
from nbdnn.kernels.cuda.window_candidate import ByWindows
from nbdnn.kernels.cuda.window_launch import Windowed
from nbdnn.problem import parse

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")


def assert_exact(monkeypatch: pytest.MonkeyPatch, candidate: ByWindows, text: str, config=None) -> None:
    """Every output of a problem on small integers, on a GPU of one multiprocessor: blocks take several tiles."""
    problem, device = parse(text), replace(H200, sms=1)
    config = config or candidate.configs(problem, device)[0]
    got, expected = result(candidate, problem, config, device, install(monkeypatch))
    assert got == expected


def assert_within_budget(candidate: Windowed, text: str, arch: str) -> None:
    """No spills, no stack, and registers and shared memory for as many blocks as a config counts on."""
    problem = parse(text)
    configs = candidate.configs(problem, H200)
    sources: set[Source] = set()
    for config in configs:
        for launch in candidate.launches(problem, config, H200):
            assert prod(launch.grid) > 0
            assert launch.dynamic_shared_bytes <= min(99 << 10, (228 << 10) // config.blocks - 1024)
            sources.add(launch.source)
    assert configs and sources
    for source in sources:
        kernel = compile_kernel(source, arch)
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), f"{source}"
        assert kernel.registers * source.threads * source.min_blocks <= 65536
