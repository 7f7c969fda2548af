"""Gradients of a recurrent network that are sums of few numbers each, in a fixed order.

    parameters   of the parts of their sums over rows: a part has a layer's matrices of one kind, gate after gate, and
                 behind them their biases
    inputs       where there is no W, of the gradients of every direction's gates

Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.problem import DEFAULT_COMPUTE

THREADS = 128
_AT_ONCE = 8  # parts that a thread asks for before it adds the first


class Fields(NamedTuple):
    """elements: of the matrices; biases: behind them. parts, part: how many and how far apart; parts_direction: from
    the first part of a direction to that of the next. to, bias_to: of the first direction; and what the next adds."""

    elements: int
    biases: int
    first: int
    parts: int
    part: int
    parts_direction: int
    to: int
    to_direction: int
    bias_to: int
    bias_direction: int


def parts_kernel(dtype: str, bits: int):
    """A thread an element; the grid's second axis are the directions."""
    from nbdnn.kernels.cuda import ptx

    compute = DEFAULT_COMPUTE[dtype]
    integer, narrow, real = ptx.INTEGER[bits], ptx.NARROW[dtype], ptx.REAL[compute]

    def add_parts(parts, dw, f):
        element = integer(integer(ptx.block_x()) * THREADS + ptx.thread_x())
        direction, values = integer(ptx.block_y()), ptx.cuda.local.array(_AT_ONCE, real)
        if element >= f.elements + f.biases:
            return
        at, left, total = integer(f.first + direction * f.parts_direction + element), f.parts, real(0.0)
        while left >= _AT_ONCE:
            for i in range(_AT_ONCE):
                values[i] = ptx.load_constant(parts, integer(at + i * f.part))
            for i in range(_AT_ONCE):
                total = total + values[i]
            at, left = integer(at + _AT_ONCE * f.part), integer(left - _AT_ONCE)
        while left > 0:
            total = total + ptx.load_constant(parts, at)
            at, left = integer(at + f.part), integer(left - 1)
        to = integer(f.to + direction * f.to_direction + element)
        if element >= f.elements:
            to = integer(f.bias_to + direction * f.bias_direction + element - f.elements)
        dw[to] = narrow(total)

    return add_parts, (ptx.pointer(compute), ptx.pointer(dtype), ptx.record(Fields, bits))


class InputFields(NamedTuple):
    """elements of dx, hidden of them a row; of a row's records, `record` elements a direction."""

    elements: int
    hidden: int
    directions: int
    record: int


def inputs_kernel(gates: int, dtype: str, bits: int):
    """A thread an element."""
    from nbdnn.kernels.cuda import ptx

    compute = DEFAULT_COMPUTE[dtype]
    integer, narrow, real = ptx.INTEGER[bits], ptx.NARROW[dtype], ptx.REAL[compute]

    def add_gates(records, dx, f):
        element = integer(integer(ptx.block_x()) * THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        row, unit = ptx.divided(element, f.hidden)
        at, direction, total = integer(row * f.directions * f.record + unit), integer(0), real(0.0)
        while direction < f.directions:
            for gate in range(gates):
                total = total + ptx.load_constant(records, integer(at + gate * f.hidden))
            at, direction = integer(at + f.record), integer(direction + 1)
        dx[element] = narrow(total)

    return add_gates, (ptx.pointer(compute), ptx.pointer(dtype), ptx.record(InputFields, bits))
