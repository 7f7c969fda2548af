"""The cache of compiled kernels: what one process compiled, the next one loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbdnn.kernels.cpu.compile import cache_dir
from nbdnn.problem import CONV_OPS

PREPARE = """
from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.problem import parse

device, problem = cpu_device(), parse("{op}:f32:n1c16h8w24:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
for candidate in registry.candidates("{op}"):
    if candidate.supports(problem, device).ok:
        for config in candidate.configs(problem, device):
            candidate.prepare(problem, config, device)
"""


@pytest.mark.parametrize("op", CONV_OPS)
def test_a_second_process_compiles_nothing(op: str) -> None:
    def files_after(hash_seed: str) -> set[Path]:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", PREPARE.format(op=op)], env=environment, check=True, timeout=300)
        return set(cache_dir().iterdir())

    assert files_after("1") >= files_after("2")
