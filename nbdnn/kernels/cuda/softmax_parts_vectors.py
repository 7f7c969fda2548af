"""The kernels of `softmax_parts` by vectors of 16 bytes, wherever rows begin.

A part is whole tiles, a tile so many vectors of each thread, which are all under way before one is used. What a row has
before its first vector and behind its last one has the first threads of its first part, an element each
(`softmax_held.py`). The second kernel goes backwards: of what the first has read, the second-level cache still holds
the ends of parts.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.softmax_direct import Variant
from nbdnn.kernels.cuda.softmax_merged import Parts, merging
from nbdnn.problem import ITEMSIZE

VECTOR_BYTES = 16
VECTORS = 4  # of a thread, of each input


class _Part(NamedTuple):
    """row: its first element; first: that of the part's first vector; end: of its vectors, from there; beside: which of
    the row's elements outside the vectors is this thread's; sums: those of the row's first part."""

    row: int
    first: int
    end: int
    beside: int
    sums: int


def tile_elems(dtype: str, threads: int) -> int:
    return threads * VECTORS * VECTOR_BYTES // ITEMSIZE[dtype]


@cache
def _placed(v: Variant):
    """Device functions: (fields) -> _Part, and the place of a tile and of the element beside it."""
    from nbdnn.kernels.cuda import ptx, ptx_tuples

    wide, integer, place, lanes = ptx.INTEGER[64], ptx.INTEGER[32], ptx_tuples.Place, VECTOR_BYTES // ITEMSIZE[v.dtype]
    step = lanes * v.threads

    @ptx.inline
    def part_of(f):
        row, part = ptx.divided(wide(ptx.block_x()), f.parts)
        start = row * f.length
        before = wide(-start & (lanes - 1))
        whole = wide((f.length - before) & -lanes)
        left, thread = whole - part * f.part, wide(ptx.thread_x())
        beside = thread if thread < before else thread + whole
        end = integer(f.part if f.part < left else left)
        return _Part(start, start + before + part * f.part, end, beside if part == 0 else f.length, row * f.parts)

    @ptx.inline
    def tile(array, p, at):
        column = integer(at + integer(ptx.thread_x()) * lanes)
        return place(array, p.first + column, wide(step), column, integer(step), p.end)

    @ptx.inline
    def element(array, p, f):
        return place(array, p.row + p.beside, wide(0), p.beside, wide(0), f.length)

    return part_of, tile, element


def sum_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tuples, ptx_vector

    *variant, forward = specialised_on
    v = Variant(*variant)
    is_log, shifts = v.algorithm == "log", v.algorithm != "fast"
    integer, wide, fill = ptx.INTEGER[32], ptx.INTEGER[64], "-inf" if forward else "zero"
    tile_size, (part_of, tile, element) = tile_elems(v.dtype, v.threads), _placed(v)
    both = _held(v)
    load_tile, load_element = (ptx_tuples.load(held, fill) for held in both)
    largest_of, largest_beside = (ptx_tuples.gather(held, ptx_tuples.itself, ptx_tuples.larger, 1) for held in both)
    powers_of, powers_beside = (ptx_tuples.gather(held, ptx_tuples.power, ptx_tuples.total, 1) for held in both)
    term = ptx_tuples.itself if is_log else ptx_tuples.product
    dot_of, dot_beside = (ptx_tuples.gather(held, term, ptx_tuples.total, 2) for held in both)
    larger, added, product, power = (
        ptx_tuples.each(formula, 2)
        for formula in (ptx_tuples.larger, ptx_tuples.total, ptx_tuples.product, ptx_tuples.power)
    )
    finite, zeros = ptx_tuples.each(ptx_tuples.finite, 1), ptx_vector.zeros(1)
    _, merged, _ = merging(v, forward)

    def sum_parts(x, y, sums, f):
        p = part_of(f)
        beside = load_element(element(x, p, f))
        most, at = zeros(), integer(0)
        if forward:
            if shifts:
                most = largest_beside(beside, most)
            powers = powers_beside(beside, finite(most))
        else:
            powers = dot_beside(beside, load_element(element(y, p, f)), most)
        while at < p.end:
            parts = load_tile(tile(x, p, at))
            if forward:
                by = most
                if shifts:
                    by = larger(largest_of(parts, most), most)
                shift = finite(by)
                powers = added(product(powers, power(most, shift)), powers_of(parts, shift))
                most = by
            else:
                powers = added(powers, dot_of(parts, load_tile(tile(y, p, at)), most))
            at = integer(at + tile_size)
        shift, total = merged(most[0], powers[0])
        if ptx.thread_x() == 0:
            part = 2 * wide(ptx.block_x())
            sums[part], sums[part + 1] = shift, total

    data, reals, record = ptx.pointer(v.dtype), ptx.pointer("f32"), ptx.record(Parts, 64)
    return sum_parts, (data, data, reals, record)


def write_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tuples, ptx_vector

    *variant, forward = specialised_on
    v = Variant(*variant)
    is_log, real = v.algorithm == "log", ptx.REAL["f32"]
    integer, fill = ptx.INTEGER[32], "zero"
    tile_size, (part_of, tile, element) = tile_elems(v.dtype, v.threads), _placed(v)
    both, inputs = _held(v), 1 if forward else 2
    load_tile, load_element = (ptx_tuples.load(held, fill) for held in both)
    if forward:
        formula = ptx_tuples.log_power if is_log else ptx_tuples.power_share
    else:
        formula = ptx_tuples.log_gradient if is_log else ptx_tuples.gradient
    store_tile, store_element = (ptx_tuples.scatter(held, formula, inputs, 3 - inputs) for held in both)
    finite, number = ptx_tuples.each(ptx_tuples.finite, 1), ptx_vector.repeated(1)
    _, _, of_row = merging(v, forward)

    def write_parts(x, y, out, sums, f):
        p = part_of(f)
        beside = load_element(element(x, p, f))
        most, powers = of_row(sums, p.sums, f.parts)
        shift, scale = finite(number(most)), number(powers)
        if forward:
            scale = number(math.log(powers) if is_log else real(1.0) / powers)
            store_element(element(out, p, f), beside, shift, scale)
        else:
            store_element(element(out, p, f), beside, load_element(element(y, p, f)), scale)
        at = integer((p.end - 1) & -tile_size)
        while at >= 0:
            parts = load_tile(tile(x, p, at))
            if forward:
                store_tile(tile(out, p, at), parts, shift, scale)
            else:
                store_tile(tile(out, p, at), parts, load_tile(tile(y, p, at)), scale)
            at = integer(at - tile_size)

    data, reals, record = ptx.pointer(v.dtype), ptx.pointer("f32"), ptx.record(Parts, 64)
    return write_parts, (data, data, data, reals, record)


def _held(v: Variant):
    """What a thread has of a tile, and beside it."""
    from nbdnn.kernels.cuda import ptx_tuples

    lanes = VECTOR_BYTES // ITEMSIZE[v.dtype]
    return ptx_tuples.Held(v.dtype, lanes, VECTORS), ptx_tuples.Held(v.dtype, 1, 1)
