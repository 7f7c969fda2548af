"""What the tests of stem and grouped do with a problem: its kernels in plain Python, and their needs when compiled."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import cuda_block
import numpy as np
import pytest
from gpus import H200
from guarded import values

from nbdnn import reference_conv
from nbdnn.kernels.cuda import (
    conv_windows,
    conv_windows_filter,
    epilogue,
    window_filters,
    window_gradients,
    window_store,
    window_sums,
    window_tile,
)
from nbdnn.kernels.cuda.compile import Source, compile_kernel
from nbdnn.kernels.cuda.window_launch import Config, Windowed
from nbdnn.problem import Operand, parse

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
_BUILDERS = (
    *(conv_windows, conv_windows_filter, epilogue, window_filters, window_gradients, window_store, window_sums),
    window_tile,
)
_SCALARS = (1.0, -1.0)


def assert_exact(monkeypatch: pytest.MonkeyPatch, candidate: Windowed, text: str, config: Config | None = None) -> None:
    """Every output of a problem on small integers, on a GPU of one multiprocessor: blocks take several tiles."""
    problem, device = parse(text), replace(H200, sms=1)
    config = config or candidate.configs(problem, device)[0]
    assert candidate.supports(problem, device).ok
    block = cuda_block.install(monkeypatch, *_BUILDERS)
    given = values(problem, "integers")
    operands = [cuda_block.memory(o.dtype, _flat(o, given.get(o.name)), problem.align) for o in problem.operands]
    workspace_elems = candidate.workspace_bytes(problem, config, device) // 4
    workspace = cuda_block.Memory("f32", np.full(workspace_elems, np.nan, np.float32), 256)
    cuda_block.run(block, candidate.launches(problem, config, device), operands, workspace, _SCALARS)
    (place,) = (i for i, operand in enumerate(problem.operands) if operand.role == "out")
    out, written = problem.operands[place], operands[place]
    expected = cuda_block.memory(out.dtype, _flat(out, reference_conv.compute(problem, given, _SCALARS)), problem.align)
    wrong = np.flatnonzero(cuda_block.values_of(written) != cuda_block.values_of(expected))
    assert not wrong.size, f"{wrong.size} of {written.raw.size} outputs, the first are {wrong[:8]}"
    assert written.written.all()


def _flat(operand: Operand, value: np.ndarray | None) -> np.ndarray:
    """The elements in the order of memory; NaN where there is no value."""
    flat = np.full(operand.size_elems, np.nan)
    if value is not None:
        strides_bytes = tuple(flat.itemsize * stride for stride in operand.strides)
        np.lib.stride_tricks.as_strided(flat, operand.shape, strides_bytes)[...] = value
    return flat


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
