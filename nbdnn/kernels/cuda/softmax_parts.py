"""Softmax and its gradient of rows of neighbours that are too long for the blocks of a cluster: in parts.

    m_p = max of part p,   s_p = sum of exp(x[i] - m_p) in it
    y[i] = exp(x[i] - m) / sum of s_p exp(m_p - m),   m = max of m_p
    dx[i] = (dy[i] - sum of the parts' sums of dy[j] * y[j]) * y[i]                    log: as in `softmax_direct.py`

A block a part; a second kernel merges what the parts of its row came to, each block for itself, and writes its part.
Both go by vectors of 16 bytes (`softmax_parts_vectors.py`) where arrays begin at multiples of that, or else, and in
float64, by elements, as here.

Traffic: x twice (dy and y twice), the second time from the second-level cache where it holds them. Sums in the compute
type in a fixed order; exp is libdevice's, good to 2 ulp, or by vectors the hardware's, off by 2^-22 and by what a
difference of float32 is. Source: own; the merged sums are those of the online normaliser, arXiv:1805.02867.
"""

from __future__ import annotations

import math
from math import ceil

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import softmax_parts_vectors as by_vectors
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.softmax_direct import Variant
from nbdnn.kernels.cuda.softmax_merged import Parts, merging
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_THREADS, _AT_ONCE = 256, 8  # elements that a thread has on their way
_PART_ELEMS = _THREADS * _AT_ONCE
_LEAST_ELEMS = 32 * _PART_ELEMS  # of a row: shorter ones have faster kernels
_BLOCKS_PER_SM, _BLOCKS_OF_VECTORS = 8, 4
_LAUNCH_US, _NEXT_US, _SHARE_OF_COPY = 1.2, 1.2, 0.7


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    *variant, forward, is_last = specialised_on
    v = Variant(*variant)
    compute = DEFAULT_COMPUTE[v.dtype]
    real, integer, widen, narrow = ptx.REAL[compute], ptx.INTEGER[64], ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype]
    is_log, shifts, nothing = v.algorithm == "log", v.algorithm != "fast", real(-math.inf)
    rescaled, merged, of_row = merging(v, forward)

    @ptx.inline
    def begin_of(f):
        """(first element of this thread, end of its part, first part of the row)"""
        row, part = ptx.divided(integer(ptx.block_x()), f.parts)
        start = part * f.part
        end = start + f.part
        first = row * f.length
        return first + start + ptx.thread_x(), first + (end if end < f.length else f.length), row * f.parts

    def sum_parts(x, y, sums, f):
        i, end, _ = begin_of(f)
        shift, powers = nothing if shifts and forward else real(0.0), real(0.0)
        values = ptx.cuda.local.array(_AT_ONCE, real)
        while i < end:
            for k in range(_AT_ONCE):
                at = i + k * _THREADS
                values[k] = nothing if forward else real(0.0)
                if at < end:
                    values[k] = widen(x[at])
                    if not forward and not is_log:
                        values[k] = values[k] * widen(y[at])
            if not forward:
                for k in range(_AT_ONCE):
                    powers = powers + values[k]
            else:
                by = shift
                if shifts:
                    for k in range(_AT_ONCE):
                        by = values[k] if values[k] > by else by
                    powers, shift = rescaled(powers, shift, by), by
                    by = by if by > nothing else real(0.0)
                for k in range(_AT_ONCE):
                    if i + k * _THREADS < end:
                        powers = powers + math.exp(values[k] - by)
            i = i + _PART_ELEMS
        shift, powers = merged(shift, powers)
        if ptx.thread_x() == 0:
            part = 2 * integer(ptx.block_x())
            sums[part], sums[part + 1] = shift, powers

    def write_parts(x, y, out, sums, f):
        i, end, first = begin_of(f)
        shift, powers = of_row(sums, first, f.parts)
        shift = shift if shift > nothing else real(0.0)
        scale = powers
        if forward:
            scale = math.log(powers) if is_log else real(1.0) / powers
        values, others = ptx.cuda.local.array(_AT_ONCE, real), ptx.cuda.local.array(_AT_ONCE, real)
        while i < end:
            for k in range(_AT_ONCE):
                at = i + k * _THREADS
                if at < end:
                    values[k] = widen(x[at])
                    if not forward:
                        others[k] = widen(y[at])
            for k in range(_AT_ONCE):
                at = i + k * _THREADS
                if at < end:
                    value = values[k] - shift
                    if forward:
                        out[at] = narrow(value - scale if is_log else math.exp(value) * scale)
                    elif is_log:
                        out[at] = narrow(value - math.exp(others[k]) * scale)
                    else:
                        out[at] = narrow((value - scale) * others[k])
            i = i + _PART_ELEMS

    data, reals, record = ptx.pointer(v.dtype), ptx.pointer(compute), ptx.record(Parts, 64)
    return (write_parts, (data, data, data, reals, record)) if is_last else (sum_parts, (data, data, reals, record))


class InParts(LaunchedCandidate[NoConfig]):
    """Rows of neighbours, of 65536 elements and more."""

    algorithm = "parts"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SoftmaxProblem, device: Gpu) -> Support:
        _, length, inner = problem.rows
        if inner > 1:
            return Support(False, f"elements of a row lie {inner} apart, not side by side")
        if length < _LEAST_ELEMS:
            return Support(False, f"{length} elements a row, this kernel takes {_LEAST_ELEMS} and more")
        return YES

    def workspace_bytes(self, problem: SoftmaxProblem, config: NoConfig, device: Gpu) -> int:
        return 2 * problem.rows[0] * _parts(problem, device).parts * ITEMSIZE[problem.compute]

    def estimate(self, problem: SoftmaxProblem, config: NoConfig, device: Gpu) -> float:
        inputs = sum(operand.size_bytes for operand in problem.operands if operand.role == "in")
        again = max(0, inputs - device.l2_bytes // 2)
        rate = copy_bytes_per_s(device) * _SHARE_OF_COPY
        return _LAUNCH_US + _NEXT_US + (problem.min_bytes + again) / rate * 1e6

    def launches(self, problem: SoftmaxProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        integers, forward = _parts(problem, device), self.op == "softmax_fwd"
        inputs = (0, 0) if forward else (0, 1)
        variant = Variant(problem.dtype, problem.algorithm, _THREADS)

        def launch(is_last: bool, pointers: tuple[int, ...]) -> Launch:
            source = Source(_kernel, (*variant, forward, is_last), _THREADS)
            if _has_vectors(problem):
                kernel = by_vectors.write_kernel if is_last else by_vectors.sum_kernel
                source = Source(kernel, (*variant, forward), _THREADS, _BLOCKS_OF_VECTORS)
            return Launch(
                source=source,
                grid=(problem.rows[0] * integers.parts, 1, 1),
                pointers=pointers,
                scalars="",
                integers=integers,
                integer_bits=64,
            )

        return [launch(False, (*inputs, WORKSPACE)), launch(True, (*inputs, len(problem.operands) - 1, WORKSPACE))]


def _has_vectors(problem: SoftmaxProblem) -> bool:
    return problem.dtype != "f64" and problem.align >= by_vectors.VECTOR_BYTES


def _parts(problem: SoftmaxProblem, device: Gpu) -> Parts:
    rows, length, _ = problem.rows
    step, blocks = _PART_ELEMS, _BLOCKS_PER_SM
    if _has_vectors(problem):
        step, blocks = by_vectors.tile_elems(problem.dtype, _THREADS), _BLOCKS_OF_VECTORS
    wanted = max(1, min(ceil(length / step), ceil(blocks * device.sms / max(1, rows))))
    part = ceil(length / wanted / step) * step
    return Parts(length, ceil(length / part), part)


FWD, BWD = InParts("softmax_fwd"), InParts("softmax_bwd")
