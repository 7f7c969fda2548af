"""Sums that were split among blocks: out[e] = finish(sum over p of parts[p, e]), always in the same order.

    thread (lane, slice):  parts slice, slice + slices, ... of one element         block: the slices in order

Many parts of few elements are shared by 8 threads, else nothing would hide the latency of the loads, of which four are
under way at a time. Traffic: each part once, with neighbouring threads at neighbouring elements. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch
from nbdnn.problem import ConvProblem

_THREADS, _SLICES, _MANY = 256, 8, 12


class _Variant(NamedTuple):
    slices: int
    epilogue: tuple[str, ...]


class _Fields(NamedTuple):
    """part_elems: from a part to the next. Element e belongs to channel e // inner % channels."""

    elements: int
    parts: int
    part_elems: int
    inner: int
    channels: int


def part_elems(problem: ConvProblem) -> int:
    """Elements from one part to the next: those of the output, up to a multiple of 16 bytes."""
    return -(-_out(problem).size_elems // 4) * 4


def add_parts(problem: ConvProblem, parts: int) -> Launch:
    """Finishes the output of `problem`, whose parts lie in the order of its memory at the workspace's beginning."""
    out, names = _out(problem), [operand.name for operand in problem.operands]
    bias, residual = (names.index(name) if name in names else NULL for name in ("bias", "residual"))
    slices = _SLICES if parts >= _MANY else 1
    fields = _Fields(out.size_elems, parts, part_elems(problem), max(1, out.strides[1]), max(1, out.shape[1]))
    return Launch(
        source=Source(_add_kernel, _Variant(slices, problem.epilogue), _THREADS),
        grid=(ceil(out.size_elems / (_THREADS // slices)), 1, 1),
        pointers=(WORKSPACE, names.index(out.name), bias, residual),
        scalars="f32",
        integers=fields,
    )


def _out(problem: ConvProblem):
    return next(operand for operand in problem.operands if operand.role == "out")


def _add_kernel(*specialised_on):
    from nbdnn.kernels.cuda import epilogue, ptx

    variant = _Variant(*specialised_on)
    integer, real, slices = ptx.INTEGER[32], ptx.REAL["f32"], variant.slices
    lanes, store = _THREADS // slices, epilogue.store("f32", variant.epilogue)

    @ptx.inline
    def sum_of_slice(parts, at, first, f):
        total, part, step = real(0.0), first, integer(f.part_elems * slices)
        while part + 3 * slices < f.parts:
            a, b = ptx.load_constant(parts, at), ptx.load_constant(parts, integer(at + step))
            c, d = ptx.load_constant(parts, integer(at + 2 * step)), ptx.load_constant(parts, integer(at + 3 * step))
            total = total + a + b + c + d
            at, part = integer(at + 4 * step), integer(part + 4 * slices)
        while part < f.parts:
            total = total + ptx.load_constant(parts, at)
            at, part = integer(at + step), integer(part + slices)
        return total

    def add_slices(parts, out, bias, residual, alpha, beta, f):
        slice_, lane = ptx.divided(integer(ptx.thread_x()), integer(lanes))
        element = integer(ptx.block_x() * lanes + lane)
        total = real(0.0)
        if element < f.elements:
            total = sum_of_slice(parts, integer(slice_ * f.part_elems + element), slice_, f)
        if slices > 1:
            sums = ptx.cuda.shared.array(_THREADS, real)
            sums[integer(ptx.thread_x())] = total
            ptx.cuda.syncthreads()
            total = real(0.0)
            if slice_ == 0:
                for s in range(slices):
                    total = total + sums[integer(s * lanes + lane)]
        if slice_ == 0 and element < f.elements:
            rest, _ = ptx.divided(element, f.inner)
            _, channel = ptx.divided(rest, f.channels)
            store(total, alpha, beta, out, element, bias, channel, residual)

    data = ptx.pointer("f32")
    return add_slices, (data, data, data, data, real, real, ptx.record(_Fields, 32))
