"""Filter gradients from parts: dw = alpha * (sum of the parts of each element) + beta * dw, in a fixed order.

    parts[element * splits + split], float32 in the workspace; element = k * taps + tap, one input channel a group

A team of threads, at most a warp, adds an element's parts: each every team-th, then their sums by exchanges. Traffic:
every part once. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import filter_strides, index_bits
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.problem_conv import ConvProblem

_THREADS = 128


class Total(NamedTuple):
    """The integers of the second kernel: elements of dw, of filters of `taps` taps, each the sum of `splits` parts."""

    elements: int
    splits: int
    taps: int
    w_first: int
    w_step: int


class _Variant(NamedTuple):
    """What the second kernel is compiled for; team: threads that add the parts of an element."""

    dtype: str
    team: int
    epilogue: tuple[str, ...]
    bits: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import epilogue, ptx

    v = _Variant(*specialised_on)
    integer, real, team, exchanges = ptx.INTEGER[v.bits], ptx.REAL["f32"], v.team, v.team.bit_length() - 1
    store = epilogue.store(v.dtype, v.epilogue)

    def total_of_parts(parts, dw, alpha, beta, f):
        thread = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        element, part = ptx.divided(thread, integer(team))
        total = real(0.0)
        while element < f.elements and part < f.splits:
            total = total + ptx.load_constant(parts, integer(element * f.splits + part))
            part = integer(part + team)
        for exchange in range(exchanges):
            total = total + ptx.shuffle_xor(total, 1 << exchange)
        if thread % team == 0 and element < f.elements:
            k, tap = ptx.divided(element, f.taps)
            at = integer(k * f.taps + f.w_first + f.w_step * tap)
            store(total, alpha, beta, dw, at, dw, k, dw)

    data, floats = ptx.pointer(v.dtype), ptx.pointer("f32")
    return total_of_parts, (floats, data, real, real, ptx.record(Total, v.bits))


def sum_of_parts(problem: ConvProblem, splits: int) -> Launch:
    taps = prod(problem.filter)
    start, *_, w_s = filter_strides(problem)
    integers = Total(problem.k * taps, splits, taps, start, 1 if w_s > 0 else -1)
    team = 1 << min(5, (splits - 1).bit_length())
    bits = index_bits(problem, (integers.elements * splits, integers.elements * team))
    return Launch(
        source=Source(_kernel, _Variant(problem.dtype, team, problem.epilogue, bits), _THREADS),
        grid=(ceil(integers.elements * team / _THREADS), 1, 1),
        pointers=(WORKSPACE, 2),
        scalars="f32",
        integers=integers,
        integer_bits=bits,
    )
