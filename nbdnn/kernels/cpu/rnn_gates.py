"""The gates of recurrent networks and their gradients, as formulas over rows of hidden units.

    forward    a_g = W_g x, b_g = R_g h (products without biases), biases, h or c of the step before
               -> h, c, and in training what the tape keeps
    backward   what the tape keeps, dy, dh (the product of the next step's gradients with R), dc or the carried part
               -> gradients of a and b, dc or what is carried past R to the step before

Biases come in rows of their own: bW + bR of each gate; a GRU's are of r, of u, bW of n, bR of n. Gradients likewise: a
GRU has four, of n's a, r, u, and of n's b, so that those of all a, and those of all b, are neighbours.
Source: own; see `nbdnn.reference_rnn`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numba import njit

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.exponential import sigmoid, tanh
from nbdnn.kernels.cpu.formula import Formula, Lanes, relu, row_formula
from nbdnn.kernels.cpu.vector import pointer, stack
from nbdnn.problem_rnn import SAVED
from nbdnn.rnn_parameters import GATES

Results = tuple[Lanes, ...]


class Slots(NamedTuple):
    """Where the gradient of each gate's a and b is among a mode's gradients, and how many there are."""

    of_inputs: tuple[int, ...]
    of_recurrences: tuple[int, ...]
    total: int


def slots(mode: str) -> Slots:
    if mode == "gru":
        return Slots((1, 2, 0), (1, 2, 3), 4)
    plain = tuple(range(len(GATES[mode])))
    return Slots(plain, plain, len(plain))


def bias_rows(mode: str) -> list[tuple[int, ...]]:
    """The biases (bW of each gate, then bR) that each row of biases is the sum of."""
    gates = len(GATES[mode])
    if mode == "gru":
        return [(0, 3), (1, 4), (2,), (5,)]
    return [(gate, gates + gate) for gate in range(gates)]


def _lstm(*rows: Lanes) -> Results:
    sums = [a + b + bias for a, b, bias in zip(rows[:4], rows[4:8], rows[8:12], strict=True)]
    i, f, g, o = sigmoid(sums[0]), sigmoid(sums[1]), tanh(sums[2]), sigmoid(sums[3])
    c = f * rows[12] + i * g
    return o * tanh(c), c, i, f, g, o


def _gru(*rows: Lanes) -> Results:
    (a_r, a_u, a_n), (b_r, b_u, b_n), (bias_r, bias_u, bias_n, bias_q), h = rows[:3], rows[3:6], rows[6:10], rows[10]
    r, u, q = sigmoid(a_r + b_r + bias_r), sigmoid(a_u + b_u + bias_u), b_n + bias_q
    n = tanh(a_n + bias_n + r * q)
    return n + u * (h - n), r, u, n, q


def _tanh(a: Lanes, b: Lanes, bias: Lanes) -> Results:
    return (tanh(a + b + bias),)


def _relu(a: Lanes, b: Lanes, bias: Lanes) -> Results:
    return (relu(a + b + bias),)


def _only(formula: Formula, count: int) -> Formula:
    """The first results only: inference keeps nothing."""
    return lambda *rows: formula(*rows)[:count]


def _lstm_gradient(
    i: Lanes, f: Lanes, g: Lanes, o: Lanes, c: Lanes, before: Lanes, dy: Lanes, dh: Lanes, dc: Lanes
) -> Results:
    dh, of_cell = dy + dh, tanh(c)
    dc = dc + dh * o * (1.0 - of_cell * of_cell)
    return (
        dc * g * i * (1.0 - i),
        dc * before * f * (1.0 - f),
        dc * i * (1.0 - g * g),
        dh * of_cell * o * (1.0 - o),
        dc * f,
    )


def _gru_gradient(
    r: Lanes, u: Lanes, n: Lanes, q: Lanes, before: Lanes, dy: Lanes, dh: Lanes, carried: Lanes
) -> Results:
    dh = dy + dh + carried
    dn = dh * (1.0 - u) * (1.0 - n * n)
    return dn, dn * q * r * (1.0 - r), dh * (before - n) * u * (1.0 - u), dn * r, dh * u


def _tanh_gradient(h: Lanes, dy: Lanes, dh: Lanes) -> Results:
    return ((dy + dh) * (1.0 - h * h),)


def _relu_gradient(h: Lanes, dy: Lanes, dh: Lanes) -> Results:
    return (h.where(">", 0.0, dy + dh, h.lift(0.0)),)


_INFERENCE: dict[str, Formula] = {"lstm": _only(_lstm, 2), "gru": _only(_gru, 1), "rnn_tanh": _tanh, "rnn_relu": _relu}
_TRAINING: dict[str, Formula] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}
_GRADIENT = {"lstm": _lstm_gradient, "gru": _gru_gradient, "rnn_tanh": _tanh_gradient, "rnn_relu": _relu_gradient}
# Rows of the step before that a step reads: c of a LSTM, h of a GRU.
_STATE = {"lstm": 1, "gru": 1, "rnn_tanh": 0, "rnn_relu": 0}


@cache
def forward_step(mode: str, training: bool, compute: str, vl: int):
    """Compiled-in function: the gates of n hidden units of one image at one step.

    Arguments: n; a, b, biases and their pitches (address of the first row, bytes from row to row); state: c (lstm) or h
    (gru) of the step before; h and c: where these go; saved and its pitch: where the other rows of the tape go.
    """
    gates, biased, state_rows = len(GATES[mode]), len(bias_rows(mode)), _STATE[mode]
    is_lstm = int(mode == "lstm")
    kept = SAVED[mode] - is_lstm if training else 0
    inputs, outputs = 2 * gates + biased + state_rows, 1 + is_lstm + kept
    formula = row_formula((_TRAINING if training else _INFERENCE)[mode], inputs, outputs, compute, vl)
    table_of, i64 = stack(8 * (inputs + outputs)), pointer("i64")

    @njit(**DEVICE)
    def step(n, a, a_pitch, b, b_pitch, biases, bias_pitch, state, h, c, saved, saved_pitch):
        address = table_of()
        table = i64(address)
        for gate in range(gates):
            table[gate] = a + gate * a_pitch
            table[gates + gate] = b + gate * b_pitch
        for row in range(biased):
            table[2 * gates + row] = biases + row * bias_pitch
        if state_rows:
            table[inputs - 1] = state
        table[inputs] = h
        if is_lstm:
            table[inputs + 1] = c
        for row in range(kept):
            table[inputs + 1 + is_lstm + row] = saved + row * saved_pitch
        formula(n, address)

    return step


@cache
def backward_step(mode: str, compute: str, vl: int):
    """Compiled-in function: the gradients of n hidden units of one image at one step.

    Arguments: n; saved and its pitch: what the tape keeps; h: this step's (rnn_*); state: c (lstm) or h (gru) of the
    step before; dy; dh: the product of the gradients of the step after with R; carried: dc (lstm) or what goes past R
    (gru), read and overwritten; gradients and their pitch.
    """
    kept, state_rows, written = SAVED[mode], _STATE[mode], slots(mode).total
    inputs = max(kept, 1) + 2 * state_rows + 2
    formula = row_formula(_GRADIENT[mode], inputs, written + state_rows, compute, vl)
    table_of, i64 = stack(8 * (inputs + written + state_rows)), pointer("i64")

    @njit(**DEVICE)
    def step(n, saved, saved_pitch, h, state, dy, dh, carried, gradients, gradient_pitch):
        address = table_of()
        table = i64(address)
        table[0] = h
        for row in range(kept):
            table[row] = saved + row * saved_pitch
        if state_rows:
            table[kept] = state
            table[inputs - 1] = carried
            table[inputs + written] = carried
        table[inputs - state_rows - 2] = dy
        table[inputs - state_rows - 1] = dh
        for row in range(written):
            table[inputs + row] = gradients + row * gradient_pitch
        formula(n, address)

    return step
