"""What a recurrent network's gradients are multiples of, at each step, unit and gate: the records of `rnn_plan.py`.

    lstm   i: g i (1-i)   f: c_before f (1-f)   g: i (1-g^2)   of dc;   o: tanh(c) o (1-o)   of dh
           dc += dh o (1 - tanh(c)^2);   dc_before = dc f
    gru    n of a: (1-u)(1-n^2)   r: that q r (1-r)   n of b: that r   u: (h_before - n) u (1-u);   past R goes dh u
    tanh   1 - h^2        relu   1 where h > 0

A step back is then a product, an addition or two, and a multiplication by what this kernel has found at once for all
steps, with dy beside it. Traffic: the tape and dy once, the records once. Source: own; see `nbdnn.reference_rnn`.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.rnn_plan import RECORD
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_rnn import SAVED

THREADS = 256


class Fields(NamedTuple):
    """elements: rows (steps * batch) times width (directions * hidden). out, saved, state: first elements."""

    elements: int
    rows: int
    batch: int
    hidden: int
    width: int
    directions: int
    out: int
    saved: int
    state: int


def records_kernel(mode: str, dtype: str, dy_dtype: str, bits: int):
    """Pointers: the tape twice (outputs, saved); the state of the mode that a first step began with (cx or hx); dy;
    the records."""
    from nbdnn.kernels.cuda import ptx, ptx_rnn
    from nbdnn.kernels.cuda.rnn_gates import activation

    compute = DEFAULT_COMPUTE[dtype]
    integer, real, widen, widen_dy = ptx.INTEGER[bits], ptx.REAL[compute], ptx.WIDEN[dtype], ptx.WIDEN[dy_dtype]
    activate, slots, kept, one, zero = activation(compute), RECORD[mode], SAVED[mode], real(1.0), real(0.0)

    @ptx.inline
    def value(tape, at, slot, f):
        return ptx.load_constant(tape, integer(at + slot * f.hidden))

    @ptx.inline
    def put(records, at, slot, f, number):
        records[integer(at + slot * f.hidden)] = number

    @ptx.inline
    def before(tape, first, step, state, row, direction, unit, f):
        """Of the step before, in this direction: `step` elements of the tape a row and direction, or the state."""
        earlier = integer(row + (f.batch if direction else -f.batch))
        if 0 <= earlier < f.rows:
            return ptx.load_constant(tape, integer(first + (earlier * f.directions + direction) * step + unit))
        if ptx_rnn.given(state):
            image = integer(row - (f.rows - f.batch)) if direction else row
            return widen(ptx.load_constant(state, integer(f.state + (direction * f.batch + image) * f.hidden + unit)))
        return zero

    @ptx.inline
    def of_lstm(out, saved, state, records, at, tape, row, direction, unit, f):
        i, j, g = value(saved, tape, 0, f), value(saved, tape, 1, f), value(saved, tape, 2, f)
        o, of_cell = value(saved, tape, 3, f), activate(value(saved, tape, 4, f), True)
        cell = before(saved, integer(f.saved + 4 * f.hidden), integer(5 * f.hidden), state, row, direction, unit, f)
        put(records, at, 0, f, g * i * (one - i))
        put(records, at, 1, f, cell * j * (one - j))
        put(records, at, 2, f, i * (one - g * g))
        put(records, at, 3, f, of_cell * o * (one - o))
        put(records, at, 4, f, o * (one - of_cell * of_cell))
        put(records, at, 5, f, j)

    @ptx.inline
    def of_gru(out, saved, state, records, at, tape, row, direction, unit, f):
        r, u, n, q = (
            value(saved, tape, 0, f), value(saved, tape, 1, f), value(saved, tape, 2, f), value(saved, tape, 3, f)
        )  # fmt: skip
        h = before(out, f.out, f.hidden, state, row, direction, unit, f)
        of_n = (one - u) * (one - n * n)
        put(records, at, 0, f, of_n * q * r * (one - r))
        put(records, at, 1, f, (h - n) * u * (one - u))
        put(records, at, 2, f, of_n)
        put(records, at, 3, f, of_n * r)
        put(records, at, 4, f, u)

    @ptx.inline
    def of_tanh(out, saved, state, records, at, tape, row, direction, unit, f):
        h = ptx.load_constant(out, integer(f.out + (row * (f.directions) + direction) * f.hidden + unit))
        put(records, at, 0, f, one - h * h)

    @ptx.inline
    def of_relu(out, saved, state, records, at, tape, row, direction, unit, f):
        h = ptx.load_constant(out, integer(f.out + (row * (f.directions) + direction) * f.hidden + unit))
        put(records, at, 0, f, one if h > zero else zero)

    found = {"lstm": of_lstm, "gru": of_gru, "rnn_tanh": of_tanh, "rnn_relu": of_relu}[mode]

    def write_records(out, saved, state, dy, records, f):
        element = integer(integer(ptx.block_x()) * THREADS + ptx.thread_x())
        if element >= f.elements:
            return
        row, column = ptx.divided(element, f.width)
        direction, unit = ptx.divided(column, f.hidden)
        place = integer(row * (f.directions) + direction)
        at, tape = integer(place * slots * f.hidden + unit), integer(f.saved + place * kept * f.hidden + unit)
        found(out, saved, state, records, at, tape, row, direction, unit, f)
        put(records, at, slots - 1, f, widen_dy(ptx.load_constant(dy, element)))

    tape = ptx.pointer(compute)
    types = (tape, tape, ptx.pointer(dtype), ptx.pointer(dy_dtype), tape)
    return write_records, (*types, ptx.record(Fields, bits))
