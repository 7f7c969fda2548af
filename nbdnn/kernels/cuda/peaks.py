"""What a GPU can do at most, from the facts of its architecture.

Times are compared with it, and guesses on an empty database go by it.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.problem import Problem

# Floating-point operations a clock and multiprocessor, without sparsity: of the FMA units (f32, f64) and of the tensor
# cores. Of an unknown capability the one below counts.
_FMA_RATE = {(7, 0): (128, 64), (8, 0): (128, 64), (8, 6): (256, 4), (9, 0): (256, 128), (12, 0): (256, 4)}
_TENSOR_RATE = {(7, 0): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}
# Shared memory of a multiprocessor, and what the system takes of it for each block.
_SHARED_BYTES = {(7, 0): 96 << 10, (8, 0): 164 << 10, (8, 6): 100 << 10, (9, 0): 228 << 10, (12, 0): 100 << 10}
_SYSTEM_BYTES = 1 << 10
# A copy reached this part of what the memory's clock and width promise (an H200: 4.26 of 4.8 TB/s).
_COPY_SHARE = 0.888


def copy_bytes_per_s(device: Gpu) -> float:
    """Bytes a second of a copy, read plus written."""
    return _COPY_SHARE * device.bytes_per_s


def shared_bytes(device: Gpu) -> int:
    """Bytes of shared memory that a block may have."""
    return _of(_SHARED_BYTES, device) - _SYSTEM_BYTES


def blocks_at_once(block_bytes: int, device: Gpu) -> int:
    """How many blocks with that much shared memory a multiprocessor has room for."""
    return _of(_SHARED_BYTES, device) // (block_bytes + _SYSTEM_BYTES)


def fma_flops_per_s(device: Gpu, compute: str) -> float:
    """Floating-point operations a second of the FMA units; 16-bit types compute in f32 there."""
    f32, f64 = _of(_FMA_RATE, device)
    return (f64 if compute == "f64" else f32) * device.sms * device.clock_hz


def tensor_flops_per_s(device: Gpu, dtype: str, tf32: bool = False) -> float:
    """Floating-point operations a second of the best unit for data of `dtype`, accumulated in f32 (f64 for f64)."""
    if dtype in ("f16", "bf16"):
        return _of(_TENSOR_RATE, device) * device.sms * device.clock_hz
    if dtype == "f32" and tf32:
        return _of(_TENSOR_RATE, device) / 2 * device.sms * device.clock_hz
    return fma_flops_per_s(device, dtype)


def floor_us(problem: Problem, device: Gpu, tf32: bool = False) -> float:
    """Microseconds below which no kernel that does every multiplication and touches every byte can go.

    What multiplies no matrices is computed by the FMA units.
    """
    if problem.multiplies_matrices:
        flops_per_s = tensor_flops_per_s(device, problem.dtype, tf32)
    else:
        flops_per_s = fma_flops_per_s(device, problem.compute)
    return max(problem.flops / flops_per_s, problem.min_bytes / copy_bytes_per_s(device)) * 1e6


def _of(table: dict, device: Gpu):
    return table[max((known for known in table if known <= device.capability), default=min(table))]
