"""What the softmax kernels that hold rows in registers know beforehand: vectors, registers and a guess of the time."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod

from nbdnn.candidate import ConfigT
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_VECTOR_BYTES = 16
_WARP, _SCHEDULERS, _REGISTER_STEP = 32, 4, 8
_SCHEDULER_REGISTERS, _RESIDENT_WARPS, _RESIDENT_BLOCKS = 16384, 64, 32
_OTHER_REGISTERS, _REGISTERS_A_NUMBER = 28, 3  # of a thread, beside its elements; for each maximum that it finds
_CONFIGS, _WORTH_MEASURING = 4, 1.2  # at most so many, no worse than this times the best guess
_LAUNCH_US = 2.0
_LATENCY_BYTES = 16 << 10  # that a multiprocessor must have under way
_CLUSTER_COST = 0.05


def vector_lanes(problem: SoftmaxProblem, elems: int) -> int:
    """Elements of a vector, at most 16 bytes, whose size divides every address that is a multiple of `elems` away."""
    lanes = min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype]
    while elems % lanes:
        lanes //= 2
    return lanes


def can_halve(problem: SoftmaxProblem) -> bool:
    """Whether powers may be computed a second time, from 16-bit data, instead of being kept."""
    return problem.op == "softmax_fwd" and problem.dtype in ("f16", "bf16") and problem.algorithm != "log"


def registers(problem: SoftmaxProblem, elems: int, numbers: int, again: bool) -> int:
    """Of a thread with so many elements of each input, and as many sums; `again`: it does not keep powers."""
    words = elems * ITEMSIZE[problem.dtype] // 4 * (len(problem.operands) - 1)
    keeps_powers = problem.op == "softmax_fwd" and problem.algorithm != "log" and not again
    return (elems if keeps_powers else words) + _OTHER_REGISTERS + _REGISTERS_A_NUMBER * numbers


def resident_blocks(threads: int, registers_a_thread: int) -> int:
    """Blocks that fit on a multiprocessor at once; 0: not one."""
    registers_a_warp = -(-registers_a_thread // _REGISTER_STEP) * _REGISTER_STEP * _WARP
    warps = min(_RESIDENT_WARPS, _SCHEDULERS * (_SCHEDULER_REGISTERS // registers_a_warp))
    return min(_RESIDENT_BLOCKS, warps * _WARP // threads)


def kernel_us(problem: SoftmaxProblem, device: Gpu, launch: Launch, held_bytes: float) -> float:
    """Predicted time of a kernel whose blocks load so many bytes at once: the more are under way, the nearer a copy."""
    resident = min(launch.source.min_blocks, ceil(prod(launch.grid) / device.sms))
    waits = _LATENCY_BYTES / (resident * held_bytes) + _CLUSTER_COST * (launch.cluster > 1)
    return _LAUNCH_US + problem.min_bytes / copy_bytes_per_s(device) * 1e6 * (1 + waits)


def worth_measuring(guesses: Iterable[tuple[float, ConfigT]]) -> tuple[ConfigT, ...]:
    """The configs with the least predicted times, the best first."""
    ranked = sorted(guesses, key=lambda guess: guess[0])
    return tuple(config for us, config in ranked[:_CONFIGS] if us < _WORTH_MEASURING * ranked[0][0])
