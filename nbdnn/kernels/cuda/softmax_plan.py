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
_LAUNCH_US = 2.0
_MOST_ROWS = 2**31 - 2**16  # int32, with what the last block counts on beyond the last row
LINE_BYTES = 128
# Priors for the guess, from an H200: bytes that a multiprocessor needs under way and those beyond which more of them
# gain nothing; what lines cut short cost, a byte; vectors of less than 16 bytes, as many more as there are; each vector
# of a thread, doubling of a cluster, and blocks of a cluster that are alone on their multiprocessors.
_LATENCY_BYTES, _ENOUGH_BYTES = 4 << 10, 128 << 10
_LINE_COST, _NARROW_COST, _VECTOR_COST, _CLUSTER_COST, _ALONE_COST = 6.0, 0.05, 0.005, 0.03, 0.06

# What a thread does with each of its vectors, one after the other: 32 rows of 1000 elements by 8 threads each took
# 6.7 us of the gradient, by 32 threads 1.6.
_SERIAL_US = {"softmax_fwd": 0.1, "softmax_bwd": 0.25}


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
    one instruction, vectors a thread and their bytes."""

    held_bytes: float
    line_bytes: float
    vectors: int
    vector_bytes: int = _VECTOR_BYTES


def kernel_us(problem: SoftmaxProblem, device: Gpu, launch: Launch, shape: Shape) -> float:
    """Predicted time: what a copy takes and a share of it for each thing that keeps a kernel from being one."""
    resident = min(launch.source.min_blocks, ceil(prod(launch.grid) / device.sms))
    under_way = min(resident * shape.held_bytes * (len(problem.operands) - 1), _ENOUGH_BYTES)
    share = _LATENCY_BYTES / under_way + _LINE_COST / min(shape.line_bytes, LINE_BYTES)
    share += _NARROW_COST * (_VECTOR_BYTES / shape.vector_bytes - 1)
    share += _VECTOR_COST * shape.vectors + _CLUSTER_COST * log2(launch.cluster)
    share += _ALONE_COST * (launch.cluster > 1 and resident == 1)
    moved_us = problem.min_bytes / copy_bytes_per_s(device) * 1e6 * (1 + share)
    return _LAUNCH_US + max(moved_us, _SERIAL_US[problem.op] * shape.vectors)


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
