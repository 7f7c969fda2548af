"""One step of a recurrent network, forward or back, of every direction of a layer: a launch each.

    forward   a warp has one unit of four images: its lanes share the products of R's rows with h, then four of them
              do the gates
    back      a block has 32 units of four images, a lane each; its warps share the rows of R, whose columns lie side by
              side: dh = R^T db of the step after; then a warp an image does the gates, by `rnn_records.py`

R is read once for four images. A last launch of the back finds the gradient of the first state. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.rnn_plan import GRADIENTS, RECORD, gates_of
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_rnn import SAVED

WARPS, IMAGES, LANES = 8, 4, 32
THREADS = WARPS * LANES
_ROWS_AT_ONCE = 4  # of R, that a warp asks for before it uses the first


class ForwardFields(NamedTuple):
    """step: how many came before it; steps: of them all. The others: first elements, and what a direction adds."""

    step: int
    steps: int
    batch: int
    hidden: int
    directions: int
    recurrent: int
    next_matrices: int
    bias: int
    next_biases: int
    state: int
    out: int
    saved: int


class ForwardKind(NamedTuple):
    """y: whether y is written beside the outputs."""

    mode: str
    dtype: str
    training: bool
    y: bool
    bits: int


@cache
def _gates(mode: str, compute: str):
    """Device function (a, b, state, bias of n's b) -> (h, new state, four values for the tape). state: c or h."""
    from nbdnn.kernels.cuda import ptx
    from nbdnn.kernels.cuda.rnn_gates import activation, only_gate

    activate, zero = activation(compute), ptx.REAL[compute](0.0)
    alone = only_gate(mode, compute)

    @ptx.inline
    def lstm(a, b, state, bias):
        i, f = activate(a[0] + b[0], False), activate(a[1] + b[1], False)
        g, o = activate(a[2] + b[2], True), activate(a[3] + b[3], False)
        c = ptx.fma(f, state, i * g)
        return o * activate(c, True), c, i, f, g, o

    @ptx.inline
    def gru(a, b, state, bias):
        r, u, q = activate(a[0] + b[0], False), activate(a[1] + b[1], False), b[2] + bias
        n = activate(ptx.fma(r, q, a[2]), True)
        h = ptx.fma(u, state - n, n)
        return h, h, r, u, n, q

    @ptx.inline
    def plain(a, b, state, bias):
        return alone(a[0] + b[0]), zero, zero, zero, zero, zero

    return {"lstm": lstm, "gru": gru}.get(mode, plain)


def forward_kernel(*specialised_on):
    """Pointers: sums, w, hx, cx, cells, outputs, y, what is saved, hy, cy."""
    from nbdnn.kernels.cuda import ptx, ptx_rnn
    from nbdnn.kernels.cuda.rnn_gates import given_or_zero

    kind = ForwardKind(*specialised_on)
    compute, gates, kept = DEFAULT_COMPUTE[kind.dtype], gates_of(kind.mode), SAVED[kind.mode]
    integer, real, small = ptx.INTEGER[kind.bits], ptx.REAL[compute], ptx.INTEGER[32]
    widen, narrow, do_gates = ptx.WIDEN[kind.dtype], ptx.NARROW[kind.dtype], _gates(kind.mode, compute)
    is_lstm, is_gru, training, has_y = kind.mode == "lstm", kind.mode == "gru", kind.training, kind.y
    count, zero, first_of, select = gates * IMAGES, real(0.0), given_or_zero(kind.dtype), ptx_rnn.select

    @ptx.inline
    def state_of(hx, out, at_hx, at_out, step):
        if step == 0:
            return first_of(hx, at_hx)
        return out[at_out]

    @ptx.inline
    def products(w, hx, out, found, direction, unit, image, earlier, lane, f):
        """R's rows of a unit times h of the step before, of four images: a lane's share of each."""
        rows = integer(f.recurrent + direction * f.next_matrices + unit * f.hidden)
        k = integer(lane)
        while k < f.hidden:
            for i in range(IMAGES):
                # The last image stands for those behind it, whose sums nobody wants.
                here = integer(min(integer(image + i), integer(f.batch - 1)))
                at_hx = integer(f.state + (direction * f.batch + here) * f.hidden + k)
                at_out = integer(f.out + ((earlier * f.batch + here) * f.directions + direction) * f.hidden + k)
                h = state_of(hx, out, at_hx, at_out, f.step)
                for gate in range(gates):
                    r = widen(ptx.load_constant(w, integer(rows + gate * f.hidden * f.hidden + k)))
                    found[gate * IMAGES + i] = ptx.fma(r, h, found[gate * IMAGES + i])
            k = integer(k + LANES)

    def forward_step(sums, w, hx, cx, cells, out, y, saved, hy, cy, f):
        thread = small(ptx.thread_x())
        lane, direction = small(thread & (LANES - 1)), integer(ptx.block_z())
        unit = integer(integer(ptx.block_x()) * WARPS + thread // LANES)
        image = integer(integer(ptx.block_y()) * IMAGES)
        if unit >= f.hidden:
            return
        t = integer(f.steps - 1 - f.step) if direction else f.step
        earlier = integer(t + 1) if direction else integer(t - 1)

        # 1. b of each gate, in all lanes.
        found = ptx.cuda.local.array(count, real)
        for i in range(count):
            found[i] = zero
        products(w, hx, out, found, direction, unit, image, earlier, lane, f)
        for i in range(count):
            for step in (16, 8, 4, 2, 1):
                found[i] = found[i] + ptx.shuffle_xor(found[i], small(step))

        # 2. The gates of an image in its lane.
        a, b = ptx.cuda.local.array(gates, real), ptx.cuda.local.array(gates, real)
        image = integer(image + lane)
        if lane < IMAGES and image < f.batch:
            place = integer((t * f.batch + image) * f.directions + direction)
            for gate in range(gates):
                b[gate] = found[gate * IMAGES]
                for i in range(1, IMAGES):
                    b[gate] = select(lane == i, found[gate * IMAGES + i], b[gate])
                a[gate] = ptx.load_constant(sums, integer((place * gates + gate) * f.hidden + unit))
            cell = integer((direction * f.batch + image) * f.hidden + unit)
            at_state, state, bias = integer(f.state + cell), zero, zero
            if is_lstm:
                state = state_of(cx, cells, at_state, cell, f.step)
            if is_gru:
                at_out = integer(f.out + ((earlier * f.batch + image) * f.directions + direction) * f.hidden + unit)
                state = state_of(hx, out, at_state, at_out, f.step)
                bias = widen(ptx.load_constant(w, integer(f.bias + direction * f.next_biases + 2 * f.hidden + unit)))
            h, state, v0, v1, v2, v3 = do_gates(a, b, state, bias)

            # 3. What is written.
            at = integer(place * f.hidden + unit)
            out[integer(f.out + at)] = h
            if has_y:
                y[at] = narrow(h)
            if is_lstm:
                cells[cell] = state
            if training and kept > 0:
                at = integer(f.saved + place * kept * f.hidden + unit)
                saved[at], saved[integer(at + f.hidden)] = v0, v1
                saved[integer(at + 2 * f.hidden)], saved[integer(at + 3 * f.hidden)] = v2, v3
                if is_lstm:
                    saved[integer(at + 4 * f.hidden)] = state
            if f.step == f.steps - 1:
                hy[at_state] = narrow(h)
                if is_lstm:
                    cy[at_state] = narrow(state)

    data, wide = ptx.pointer(kind.dtype), ptx.pointer(compute)
    types = (wide, data, data, data, wide, wide, data, wide, data, data)
    return forward_step, (*types, ptx.record(ForwardFields, kind.bits))


class BackFields(NamedTuple):
    """step: how many came before it, of steps + 1."""

    step: int
    steps: int
    batch: int
    hidden: int
    directions: int
    recurrent: int
    next_matrices: int
    state: int


def back_kernel(mode: str, dtype: str, bits: int):
    """Pointers: records, w, dhy, dcy, what is carried, dhx, dcx."""
    from nbdnn.kernels.cuda import ptx
    from nbdnn.kernels.cuda.rnn_gates import given_or_zero

    compute, gates, slots = DEFAULT_COMPUTE[dtype], gates_of(mode), RECORD[mode]
    integer, real, small = ptx.INTEGER[bits], ptx.REAL[compute], ptx.INTEGER[32]
    widen, narrow, zero, gradients = ptx.WIDEN[dtype], ptx.NARROW[dtype], real(0.0), GRADIENTS[mode]
    is_lstm, is_gru = mode == "lstm", mode == "gru"
    size, held, first_of = WARPS * IMAGES * LANES, _ROWS_AT_ONCE * IMAGES, given_or_zero(dtype)

    @ptx.inline
    def products(w, records, found, direction, unit, image, t, warp, f):
        """R's columns of a lane's unit times the gradients of db of step t, of four images: a warp's share of each."""
        firsts, weights = ptx.cuda.local.array(IMAGES, integer), ptx.cuda.local.array(_ROWS_AT_ONCE, real)
        values = ptx.cuda.local.array(held, real)
        row, rows, step = integer(warp), integer(gates * f.hidden), integer(slots * f.hidden)
        at = integer(f.recurrent + direction * f.next_matrices + unit)
        # The last image stands for those behind it, whose sums nobody wants.
        for i in range(IMAGES):
            here = integer(min(integer(image + i), integer(f.batch - 1)))
            firsts[i] = integer(((t * f.batch + here) * f.directions + direction) * step)
        while row < rows:
            for i in range(_ROWS_AT_ONCE):
                this = integer(min(integer(row + i * WARPS), integer(rows - 1)))
                weight = widen(ptx.load_constant(w, integer(at + this * f.hidden)))
                weights[i] = weight if row + i * WARPS < rows else zero
                # A GRU's gradient of n's b is behind that of n's a.
                slot = integer(this + f.hidden) if is_gru and this >= 2 * f.hidden else this
                for j in range(IMAGES):
                    values[i * IMAGES + j] = records[integer(firsts[j] + slot)]
            for i in range(_ROWS_AT_ONCE):
                for j in range(IMAGES):
                    found[j] = ptx.fma(values[i * IMAGES + j], weights[i], found[j])
            row = integer(row + _ROWS_AT_ONCE * WARPS)

    @ptx.inline
    def gates_back(records, at, dh, dc, f):
        """Gradients in place of what they are multiples of; returns what is carried to the step before."""
        dh = dh + records[integer(at + (slots - 1) * f.hidden)]
        if is_lstm:
            dc = ptx.fma(dh, records[integer(at + 4 * f.hidden)], dc)
        for slot in range(gradients):
            here = integer(at + slot * f.hidden)
            records[here] = records[here] * (dc if is_lstm and slot < 3 else dh)
        if is_lstm:
            return dc * records[integer(at + 5 * f.hidden)]
        if is_gru:
            return dh * records[integer(at + 4 * f.hidden)]
        return zero

    def step_back(records, w, dhy, dcy, carried, dhx, dcx, f):
        thread, direction = small(ptx.thread_x()), integer(ptx.block_z())
        lane, warp = small(thread & (LANES - 1)), small(thread // LANES)
        unit, image = integer(integer(ptx.block_x()) * LANES + lane), integer(integer(ptx.block_y()) * IMAGES)
        t = f.step if direction else integer(f.steps - 1 - f.step)
        later = integer(t - 1) if direction else integer(t + 1)

        # 1. dh of the step after by R, added up over the warps.
        shared, found = ptx.cuda.shared.array(size, real), ptx.cuda.local.array(IMAGES, real)
        for i in range(IMAGES):
            found[i] = zero
        if f.step > 0 and unit < f.hidden:
            products(w, records, found, direction, unit, image, later, warp, f)
        for i in range(IMAGES):
            shared[small((warp * IMAGES + i) * LANES + lane)] = found[i]
        ptx.cuda.syncthreads()

        # 2. An image a warp.
        image = integer(image + warp)
        if warp < IMAGES and unit < f.hidden and image < f.batch:
            cell = integer((direction * f.batch + image) * f.hidden + unit)
            at_state, carry = integer(f.state + cell), zero
            if f.step == 0:
                dh = first_of(dhy, at_state)
                if is_lstm:
                    carry = first_of(dcy, at_state)
            else:
                carry, dh = carried[cell], zero
                for other in range(WARPS):
                    dh = dh + shared[small((other * IMAGES + warp) * LANES + lane)]
                if is_gru:
                    dh = dh + carry
            if f.step < f.steps:
                at = integer(((t * f.batch + image) * f.directions + direction) * (slots * f.hidden) + unit)
                carried[cell] = gates_back(records, at, dh, carry, f)
            else:
                dhx[at_state] = narrow(dh)
                if is_lstm:
                    dcx[at_state] = narrow(carry)

    data, wide = ptx.pointer(dtype), ptx.pointer(compute)
    return step_back, (wide, data, data, data, wide, data, data, ptx.record(BackFields, bits))
