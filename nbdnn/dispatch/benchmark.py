"""Operands to measure on, for either kind of device: `timing.py` has the CPU's, `timing_gpu.py` those of a GPU.

Both have `pointers`, `arrays()` (in host memory, bfloat16 as its bits), `run` and `stopwatch`.
"""

from __future__ import annotations

from nbdnn.device import Cpu, Device
from nbdnn.dispatch import timing
from nbdnn.dispatch.timing import Given, Operands
from nbdnn.dispatch.timing_gpu import GpuOperands
from nbdnn.problem import Problem


def one_copy(problem: Problem, device: Device) -> Operands | GpuOperands:
    """Random operands, once."""
    return Operands(problem, 1) if isinstance(device, Cpu) else GpuOperands(problem, device, 1)


def rotating(
    problem: Problem, device: Device, allowed_bytes: int, given: Given | None = None
) -> Operands | GpuOperands:  # fmt: skip
    """As many copies of the operands as make each call find them in memory; MemoryError if not one may be had."""
    if isinstance(device, Cpu):
        return Operands(problem, timing.copies(problem, device.llc_bytes, allowed_bytes), given)
    return GpuOperands(problem, device, timing.copies(problem, device.l2_bytes, allowed_bytes), given)
