"""What the softmax kernels that hold rows in registers know beforehand: vectors, registers and a guess of the time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from math import ceil, log2, prod
from typing import NamedTuple

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
# The same, of elements of 16 bits that stay as they were loaded, and what is needed at least.
_OTHER_AFRESH, _REGISTERS_A_SUM, _LEAST_AFRESH = 32, 2, 72
_MOST_ELEMS = {"f32": 96, "f16": 64, "bf16": 64}
_MOST_NARROW = 128  # of 16 bits, that stay as they were loaded
_CONFIGS, _ALIKE, _WORTH_MEASURING = 4, 2, 1.2  # at most so many, of a kind, and how far from the best guess
_LAUNCH_US = 0.75
_MOST_ROWS = 2**31 - 2**16  # int32, with what the last block counts on beyond the last row
LINE_BYTES = 128
# Fitted to 255 problems on an H200: bytes that a multiprocessor needs under way and those beyond which more of them
# gain nothing; what lines cut short cost, a byte; vectors of less than 16 bytes, as many more as there are; each
# doubling of a cluster, and its blocks' threads; each vector of a thread.
_LATENCY_BYTES, _ENOUGH_BYTES = 10 << 10, 128 << 10
_LINE_COST, _NARROW_COST, _CLUSTER_COST, _CLUSTER_THREAD_COST = 8.7, 0.039, 0.02, 0.0006
_VECTOR_COST = {"softmax_fwd": 0.0033, "softmax_bwd": 0.008}
# A row's meeting in a block, with each doubling of its warps, and in a cluster.
_MEETING_US, _WARPS_US, _CLUSTER_US = 0.1, 0.24, 0.47
# What a thread does with each of its vectors, one after the other, and with each of its elements.
_VECTOR_US = {"softmax_fwd": 0.032, "softmax_bwd": 0.12}
_ELEMENT_US = {"softmax_fwd": 0.023, "softmax_bwd": 0.013}


def vector_lanes(problem: SoftmaxProblem, elems: int) -> int:
    """Elements of a vector, at most 16 bytes, whose size divides every address that is a multiple of `elems` away."""
    lanes = min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype]
    while elems % lanes:
        lanes //= 2
    return lanes


def most_lanes(problem: SoftmaxProblem) -> int:
    """Elements of 16 bytes."""
    return _VECTOR_BYTES // ITEMSIZE[problem.dtype]


def has_edges(problem: SoftmaxProblem) -> bool:
    """Whether rows begin between two multiples of 16 bytes of arrays that begin at one."""
    return problem.align >= _VECTOR_BYTES and problem.rows[1] % most_lanes(problem) > 0


def refused_rows(problem: SoftmaxProblem) -> str:
    """Why kernels of rows whose elements are neighbours, in float32, cannot take these, or ''."""
    rows, length, inner = problem.rows
    if inner > 1:
        return f"elements of a row lie {inner} apart, not side by side"
    if problem.dtype == "f64":
        return "f64: only f16, bf16 and f32"
    if not rows or not length:
        return f"{rows} rows of {length} elements: nothing to do"
    return f"{rows} rows, at most {_MOST_ROWS}" if rows > _MOST_ROWS else ""


def registers(problem: SoftmaxProblem, elems: int, numbers: int, afresh: bool = False) -> int:
    """Of a thread with so many elements of each input, and as many sums: what kernels were seen to need. afresh: a
    forward keeps elements of 16 bits as they were loaded."""
    if afresh:
        return max(_LEAST_AFRESH, _OTHER_AFRESH + _REGISTERS_A_SUM * numbers + elems * ITEMSIZE[problem.dtype] // 4)
    others, words = _OTHER_REGISTERS + _REGISTERS_A_NUMBER * numbers, elems * ITEMSIZE[problem.dtype] // 4
    if problem.op == "softmax_fwd" and problem.algorithm != "log":
        return elems + others  # powers
    widened = 0 if problem.dtype == "f32" else elems // 8 if problem.op == "softmax_fwd" else numbers - 1
    return words * (len(problem.operands) - 1) + widened + others


def holds(problem: SoftmaxProblem, elems: int, afresh: bool = False) -> bool:
    """Whether a thread may have so many elements: with more, registers spilled."""
    narrow = afresh or (problem.dtype != "f32" and problem.op == "softmax_bwd")
    return elems <= (_MOST_NARROW if narrow else _MOST_ELEMS[problem.dtype])


def resident_blocks(threads: int, registers_a_thread: int) -> int:
    """Blocks that fit on a multiprocessor at once; 0: not one."""
    registers_a_warp = -(-registers_a_thread // _REGISTER_STEP) * _REGISTER_STEP * _WARP
    warps = min(_RESIDENT_WARPS, _SCHEDULERS * (_SCHEDULER_REGISTERS // registers_a_warp))
    return min(_RESIDENT_BLOCKS, warps * _WARP // threads)


class Shape(NamedTuple):
    """What a kernel's time depends on: bytes of each input that a block holds, neighbours that its threads load with
    one instruction, a thread's vectors and elements, warps of a row in a block, and a vector's bytes."""

    held_bytes: float
    line_bytes: float
    vectors: int
    elems: int
    warps: float
    vector_bytes: int = _VECTOR_BYTES


def kernel_us(problem: SoftmaxProblem, device: Gpu, launch: Launch, shape: Shape) -> float:
    """Predicted time: what a copy takes and a share of it for each thing that keeps a kernel from being one."""
    resident = min(launch.source.min_blocks, ceil(prod(launch.grid) / device.sms))
    under_way = min(resident * shape.held_bytes * (len(problem.operands) - 1), _ENOUGH_BYTES)
    share = _LATENCY_BYTES / under_way + _LINE_COST / min(shape.line_bytes, LINE_BYTES)
    share += _NARROW_COST * (_VECTOR_BYTES / shape.vector_bytes - 1)
    if launch.cluster > 1:
        share += _CLUSTER_COST * log2(launch.cluster) + _CLUSTER_THREAD_COST * launch.source.threads
    share += _VECTOR_COST[problem.op] * shape.vectors
    moved_us = problem.min_bytes / copy_bytes_per_s(device) * 1e6 * (1 + share)
    waves = max(1.0, prod(launch.grid) / (launch.source.min_blocks * device.sms))
    wait_us = waves * (_VECTOR_US[problem.op] * shape.vectors + _ELEMENT_US[problem.op] * shape.elems)
    meeting_us = _MEETING_US + _WARPS_US * log2(shape.warps) if shape.warps > 1 else 0.0
    return _LAUNCH_US + meeting_us + _CLUSTER_US * (launch.cluster > 1) + max(moved_us, wait_us)


def worth_measuring(
    guesses: Iterable[tuple[float, ConfigT]], kind: Callable[[ConfigT], Hashable]
) -> tuple[ConfigT, ...]:
    """The configs with the least predicted times, the best first, and not many of one kind."""
    ranked = sorted(guesses, key=lambda guess: guess[0])
    chosen: list[ConfigT] = []
    for us, config in ranked:
        alike = sum(kind(config) == kind(other) for other in chosen)
        if us < _WORTH_MEASURING * ranked[0][0] and alike < _ALIKE:
            chosen.append(config)
    return tuple(chosen[:_CONFIGS])
