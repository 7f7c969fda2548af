"""Outputs beyond the size from which they are written past the caches: aligned to whole vectors, and not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nbdnn import reference_conv, tolerance
from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.kernels.cpu.epilogue import store_kind
from nbdnn.problem import parse

# 24 to 64 MiB of operands each; 24 channels are no whole number of vectors, so those rows take the ordinary way; inputs
# of 32 MiB are asked for ahead of their use.
CASES = [
    ("conv_fwd/cpu/pixel_gemm", "conv_fwd:f32:n3c3h128w128:k128r1s1:p0x0:u1x1:d1x1:g1:cross:nchw"),
    ("conv_fwd/cpu/channel_gemm", "conv_fwd:f32:n3c3h128w128:k128r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    ("conv_fwd/cpu/channel_gemm", "conv_fwd:f32:n10c3h160w160:k24r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    ("conv_fwd/cpu/channel_gemm", "conv_fwd:bf16:n6c3h128w128:k128r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    ("conv_fwd/cpu/pointwise", "conv_fwd:f32:n3c3h128w128:k128r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    ("conv_fwd/cpu/pointwise", "conv_fwd:f32:n10c3h160w160:k24r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"),
    ("conv_fwd/cpu/depthwise", "conv_fwd:f32:n4c128h128w128:k128r3s3:p1x1:u1x1:d1x1:g128:cross:nchw"),
    ("conv_fwd/cpu/depthwise", "conv_fwd:f32:n4c128h128w128:k128r3s3:p1x1:u1x1:d1x1:g128:cross:nhwc"),
    ("conv_fwd/cpu/depthwise", "conv_fwd:f32:n4c128h128w128:k128r3s3:p1x1:u2x2:d1x1:g128:cross:nhwc"),
    ("conv_fwd/cpu/depthwise", "conv_fwd:f32:n5c96h128w128:k96r3s3:p1x1:u2x2:d1x1:g96:cross:nhwc"),
    ("conv_fwd/cpu/winograd_4x4", "conv_fwd:f32:n1c24h230w230:k128r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"),
    ("conv_fwd/cpu/winograd_4x4", "conv_fwd:f32:n1c24h230w230:k128r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc"),
]


def aligned(size_bytes: int, offset: int) -> np.ndarray:
    """Bytes of NaN that begin `offset` bytes beyond a cache line."""
    raw = np.full(size_bytes + 128, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + size_bytes]


@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize(("candidate_id", "text"), CASES)
def test_large_outputs_are_right(candidate_id: str, text: str, offset: int) -> None:
    problem, device, candidate = parse(text), cpu_device(), registry.candidate(candidate_id)
    assert store_kind(problem, True) == 2
    rng = np.random.default_rng(0)
    dtype = np.dtype(ml_dtypes.bfloat16 if problem.dtype == "bf16" else np.float32)
    memory = [aligned(operand.size_bytes, offset) for operand in problem.operands]
    arrays = {}
    for operand, buffer in zip(problem.operands, memory, strict=True):
        strides = [stride * dtype.itemsize for stride in operand.strides]
        arrays[operand.name] = np.ndarray(operand.shape, dtype, buffer, 0, strides)
        if operand.role == "in":
            arrays[operand.name][...] = rng.standard_normal(operand.shape).astype(dtype)
    config = candidate.configs(problem, device)[0]
    workspace = aligned(candidate.workspace_bytes(problem, config, device), 0)
    pointers = tuple(buffer.ctypes.data for buffer in memory)
    candidate.prepare(problem, config, device)(pointers, (1.0, 0.0), workspace.ctypes.data, 0)
    output = arrays.pop("y")
    assert not np.isnan(output.astype(np.float32)).any()
    expected = reference_conv.sample(problem, {name: array.astype(np.float64) for name, array in arrays.items()})
    assert not (fault := tolerance.fault(problem, candidate, output, expected)), fault
