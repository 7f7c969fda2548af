"""The activations of recurrent networks on a GPU, and the states that their steps begin with.

    lstm   i, f, o = sigmoid, g = tanh;  c' = f c + i g;  h' = o tanh(c')
    gru    r, u = sigmoid;  n = tanh(a_n + r b_n);  h' = n + u (h - n)

In float32 an exponential is the hardware's power of 2 (2 ulp) and a quotient its reciprocal (1 ulp): sigmoid and tanh
are good to 4 ulp beside the rounding of their argument. Where tanh(x) = 1 - 2 / (1 + exp(2 |x|)) would lose digits,
|x| < 0.55, it is x + x^3 P(x^2), off by 2^-27 at most. float64 takes libdevice's. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.problem import DEFAULT_COMPUTE

_LOG2_E = 1.4426950408889634
_SMALL = 0.55
# P from its constant term on: interpolated at Chebyshev's points of [0, 0.55^2].
_TANH = (-0.3333333134651184, 0.13333117961883545, -0.05391007289290428, 0.021312762051820755, -0.006615761201828718)


@cache
def activation(compute: str):
    """Device function (x, whether tanh) -> tanh(x) or sigmoid(x)."""
    import math

    from nbdnn.kernels.cuda import ptx, ptx_rnn

    real = ptx.REAL[compute]
    p0, p1, p2, p3, p4 = map(real, _TANH)

    @ptx.inline
    def by_powers(x, is_tanh):
        # Of a warp's threads some want the one and some the other: both are computed, as a branch would do in turns.
        size = abs(x)
        power = ptx_rnn.exp2(ptx_rnn.select(is_tanh, size * real(2.0 * _LOG2_E), x * real(-_LOG2_E)))
        share = ptx_rnn.reciprocal(real(1.0) + power)
        large = math.copysign(ptx.fma(share, real(-2.0), real(1.0)), x)
        z = x * x
        p = ptx.fma(ptx.fma(ptx.fma(ptx.fma(p4, z, p3), z, p2), z, p1), z, p0)
        tangent = ptx_rnn.select(size < real(_SMALL), ptx.fma(x * z, p, x), large)
        return ptx_rnn.select(is_tanh, tangent, share)

    @ptx.inline
    def by_libdevice(x, is_tanh):
        return math.tanh(x) if is_tanh else real(1.0) / (real(1.0) + math.exp(-x))

    return by_powers if compute == "f32" else by_libdevice


@cache
def given_or_zero(dtype: str):
    """Device function (state, place) -> what a step begins with; 0 where no state is given."""
    from nbdnn.kernels.cuda import ptx, ptx_rnn

    widen, zero = ptx.WIDEN[dtype], ptx.REAL[DEFAULT_COMPUTE[dtype]](0.0)

    @ptx.inline
    def first(state, at):
        return widen(ptx.load_constant(state, at)) if ptx_rnn.given(state) else zero

    return first


@cache
def only_gate(mode: str, compute: str):
    """Device function: the activation of a network without gates."""
    from nbdnn.kernels.cuda import ptx

    real, activate = ptx.REAL[compute], activation(compute)

    @ptx.inline
    def tanh(x):
        return activate(x, True)

    @ptx.inline
    def relu(x):
        return real(0.0) if x < real(0.0) else x  # NaN stays

    return tanh if mode == "rnn_tanh" else relu


@cache
def back_of_gate(mode: str):
    """Device function (dh of R and dy, dc, the thread's multiple, the others of the record, gate) -> (gradient, dc,
    what is added to dh of the step before)."""
    from nbdnn.kernels.cuda import ptx, ptx_rnn

    zero = ptx.REAL["f32"](0.0)

    @ptx.inline
    def lstm(dh, dc, own, others, gate):
        dc = ptx.fma(dh, others[0], dc)
        return own * ptx_rnn.select(gate == 3, dh, dc), dc * others[1], zero

    @ptx.inline
    def gru(dh, dc, own, others, gate):
        return own * dh, zero, dh * others[0]

    @ptx.inline
    def plain(dh, dc, own, others, gate):
        return own * dh, zero, zero

    return {"lstm": lstm, "gru": gru}.get(mode, plain)
