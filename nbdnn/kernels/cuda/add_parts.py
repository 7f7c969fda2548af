"""Sums that were split among blocks: out[e] = finish(sum over p of parts[p, e]), always in the same order.

    thread (lane, slice):  parts slice, slice + slices, ... of a run of elements         block: the slices in order

Many parts are shared by 8 threads, else nothing would hide the latency of the loads, of which four are under way at a
time. An element is a run of four neighbours, 16 bytes of every part, where the output's extents are multiples of that.
Parts of a filter gradient may lie with the channels last though the output has them before the taps: then a run is
gathered, and its neighbours find the rest of each line in cache. Traffic: each part once. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, output_pointers
from nbdnn.kernels.cuda.quads import QUAD
from nbdnn.problem import Operand
from nbdnn.problem_conv import ConvProblem

_THREADS, _SLICES, _MANY = 256, 8, 12


class _Variant(NamedTuple):
    """run: elements of a thread. along_channels: whether a run is of as many channels, whose bias is read, else of one.

    turned: whether the parts have the channels last, and the output has not.
    """

    dtype: str
    epilogue: tuple[str, ...]
    slices: int
    run: int
    along_channels: bool
    turned: bool


class _Fields(NamedTuple):
    """part_elems: from a part to the next. Element e belongs to channel e // inner % channels."""

    elements: int
    parts: int
    part_elems: int
    inner: int
    channels: int


def part_elems(problem: ConvProblem) -> int:
    """Elements from one part to the next: those of the output, up to a multiple of 16 bytes."""
    return -(-_out(problem).size_elems // QUAD) * QUAD


def add_parts(problem: ConvProblem, parts: int, turned: bool = False) -> Launch:
    """Finishes the output of `problem`, whose parts lie at the workspace's beginning, in the order of its memory.

    turned: of a filter gradient with the taps last, whose parts have the channels last.
    """
    out = _out(problem)
    slices, run = _SLICES if parts >= _MANY else 1, _run(problem, out)
    along_channels = run > 1 and "bias" in problem.epilogue and out.strides[1] == 1
    variant = _Variant(problem.dtype, problem.epilogue, slices, run, along_channels, turned)
    fields = _Fields(out.size_elems, parts, part_elems(problem), max(1, out.strides[1]), max(1, out.shape[1]))
    return Launch(
        source=Source(_add_kernel, variant, _THREADS),
        grid=(ceil(out.size_elems / (_THREADS // slices * run)), 1, 1),
        pointers=(WORKSPACE, *output_pointers(problem)),
        scalars="f32",
        integers=fields,
        dynamic_shared_bytes=4 * run * _THREADS if slices > 1 else 0,
    )


def _out(problem: ConvProblem) -> Operand:
    return next(operand for operand in problem.operands if operand.role == "out")


def _run(problem: ConvProblem, out: Operand) -> int:
    """Elements of a thread: four where every run is whole, and its bias that of one channel or of four."""
    of_a_bias = out.shape[1] if out.strides[1] == 1 else out.strides[1]
    whole = out.size_elems % QUAD == 0 and ("bias" not in problem.epilogue or of_a_bias % QUAD == 0)
    return QUAD if whole and problem.align % 16 == 0 else 1


def _add_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = _Variant(*specialised_on)
    integer, long, word, slices, run = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD, variant.slices, variant.run
    lanes = _THREADS // slices
    nothing, added, bits, sums_of, finish = _quads(variant) if run == QUAD else _singles(variant)
    place_of, load = _gathered(run) if variant.turned else _together(run)
    load_shared, store_shared = ptx_tile.LOAD_SHARED[run], ptx_tile.STORE_SHARED[run]

    @ptx.inline
    def sum_of_slice(parts, place, first, f):
        total, part, step = nothing(), first, long(long(f.part_elems) * slices)
        at = long(long(first) * f.part_elems)
        while part < f.parts:
            a = load(parts, at, place)
            b = load(parts, long(at + step), place) if part + slices < f.parts else nothing()
            c = load(parts, long(at + 2 * step), place) if part + 2 * slices < f.parts else nothing()
            d = load(parts, long(at + 3 * step), place) if part + 3 * slices < f.parts else nothing()
            total = added(added(added(added(total, a), b), c), d)
            at, part = long(at + 4 * step), integer(part + 4 * slices)
        return total

    def add_slices(parts, out, bias, residual, alpha, beta, f):
        thread = integer(ptx.thread_x())
        slice_, lane = ptx.divided(thread, integer(lanes))
        element = integer((ptx.block_x() * lanes + lane) * run)
        rest, i = ptx.divided(element, f.inner)
        outer, channel = ptx.divided(rest, f.channels)
        total = nothing()
        if element < f.elements:
            place = place_of(element, outer, i, channel, f)
            total = sum_of_slice(parts, place, slice_, f)
        if slices > 1:
            shared = ptx_tile.dynamic_shared()
            store_shared(word(shared + 4 * run * thread), bits(total))
            ptx.cuda.syncthreads()
            if slice_ == 0:
                for s in range(1, slices):
                    total = added(total, sums_of(load_shared(word(shared + 4 * run * (s * lanes + lane)))))
        if slice_ == 0 and element < f.elements:
            finish(total, alpha, beta, out, element, bias, channel, residual)

    data, real = ptx.pointer(variant.dtype), ptx.REAL["f32"]
    return add_slices, (ptx.pointer("f32"), data, data, data, real, real, ptx.record(_Fields, 32))


def _singles(variant: _Variant):
    """Device functions of one element: zero, add, to a word and back, finish."""
    from nbdnn.kernels.cuda import epilogue, ptx, ptx_tile

    zero = ptx.REAL["f32"](0.0)

    @ptx.inline
    def nothing():
        return zero

    @ptx.inline
    def added(a, b):
        return a + b

    finish = epilogue.store(variant.dtype, variant.epilogue)
    return nothing, added, ptx_tile.word_of, ptx_tile.float_of, finish


def _quads(variant: _Variant):
    """The same of four neighbours, in tuples."""
    from nbdnn.kernels.cuda import ptx, ptx_tile, quads

    zero, bits, float_of = ptx.REAL["f32"](0.0), ptx_tile.word_of, ptx_tile.float_of
    finish_four = quads.finish_quad(variant.dtype, variant.epilogue)
    shift_of = quads.bias_quad(variant.dtype, variant.epilogue, variant.along_channels)

    @ptx.inline
    def nothing():
        return zero, zero, zero, zero

    @ptx.inline
    def added(a, b):
        return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]

    @ptx.inline
    def words(v):
        return bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])

    @ptx.inline
    def sums_of(w):
        return float_of(w[0]), float_of(w[1]), float_of(w[2]), float_of(w[3])

    @ptx.inline
    def finish(total, alpha, beta, out, at, bias, channel, residual):
        finish_four(total, alpha, beta, out, at, shift_of(bias, channel), residual)

    return nothing, added, words, sums_of, finish


def _together(run: int):
    """Device functions (element, its axes, f) -> place in a part; and (parts, part's start, place) -> the run there."""
    from nbdnn.kernels.cuda import ptx, quads

    long, load_run = ptx.INTEGER[64], quads.quad("f32", True) if run == QUAD else ptx.load_constant

    @ptx.inline
    def place_of(element, outer, i, channel, f):
        return element

    @ptx.inline
    def load(parts, at, place):
        return load_run(parts, long(at + place))

    return place_of, load


def _gathered(run: int):
    """The same where the parts have the channels last: the places of a run's elements, one by one."""
    from nbdnn.kernels.cuda import ptx

    integer, long = ptx.INTEGER[32], ptx.INTEGER[64]

    @ptx.inline
    def next_place(place, i, channel, f):
        """Of the next element of the output: the next tap, or the first one of the next channel, or filter."""
        place, i = integer(place + f.channels), integer(i + 1)
        if i == f.inner:
            i, channel = integer(0), integer(channel + 1)
            place = integer(place + 1 - f.inner * f.channels)
        if channel == f.channels:
            channel, place = integer(0), integer(place + (f.inner - 1) * f.channels)
        return place, i, channel

    @ptx.inline
    def place_of_one(element, outer, i, channel, f):
        return integer((outer * f.inner + i) * f.channels + channel)

    @ptx.inline
    def places_of_four(element, outer, i, channel, f):
        first = place_of_one(element, outer, i, channel, f)
        second, i, channel = next_place(first, i, channel, f)
        third, i, channel = next_place(second, i, channel, f)
        fourth, i, channel = next_place(third, i, channel, f)
        return first, second, third, fourth

    @ptx.inline
    def load_one(parts, at, place):
        return ptx.load_constant(parts, long(at + place))

    @ptx.inline
    def load_four(parts, at, places):
        return (
            ptx.load_constant(parts, long(at + places[0])),
            ptx.load_constant(parts, long(at + places[1])),
            ptx.load_constant(parts, long(at + places[2])),
            ptx.load_constant(parts, long(at + places[3])),
        )

    return (places_of_four, load_four) if run == QUAD else (place_of_one, load_one)
