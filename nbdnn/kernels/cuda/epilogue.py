"""What happens to a sum before it is stored: activation(alpha*acc + beta*out + bias + residual).

Inlined into every kernel, specialised on the epilogue's tokens, in the compute type, so that each method fuses all of
it and rounds to the output's type once. exp and tanh are libdevice's, good to 2 ulp (not the hardware's approximate
tanh, which is good to 10 bits); where exp overflows, 1 / (1 + inf) is the limit that is wanted. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_conv import ACTIVATIONS


class Finish(NamedTuple):
    """How the sums of a tile become the output. columns: of the tile, a multiple of 32, which the output has as
    neighbours. by_column: whether columns have a bias each, else rows."""

    columns: int
    dtype: str
    epilogue: tuple[str, ...]
    by_column: bool


def activation_of(tokens: tuple[str, ...]) -> str:
    """The activation among the tokens of an epilogue, or ''."""
    return next((token for token in tokens if token in ACTIVATIONS), "")


@cache
def activate(name: str, compute: str):
    """Device function of one value in the compute type: relu, swish, sigmoid, tanh or, for '', nothing."""
    import math

    from nbdnn.kernels.cuda import ptx

    real = ptx.REAL[compute]

    @ptx.inline
    def nothing(value):
        return value

    @ptx.inline
    def relu(value):
        return real(0.0) if value < real(0.0) else value  # NaN stays

    @ptx.inline
    def sigmoid(value):
        return real(1.0) / (real(1.0) + math.exp(-value))

    @ptx.inline
    def swish(value):
        return value / (real(1.0) + math.exp(-value))

    @ptx.inline
    def tanh(value):
        return math.tanh(value)

    return {"": nothing, "relu": relu, "sigmoid": sigmoid, "swish": swish, "tanh": tanh}[name]


@cache
def finish(compute: str, tokens: tuple[str, ...]):
    """Device function (acc, alpha, beta, out, bias, residual) -> the output's value, all in the compute type.

    What the tokens do not name is not read: anything may stand in its place.
    """
    from nbdnn.kernels.cuda import ptx

    reads_out, has_bias, has_residual = "beta" in tokens, "bias" in tokens, "res" in tokens
    activated = activate(activation_of(tokens), compute)

    @ptx.inline
    def finished(acc, alpha, beta, out, bias, residual):
        value = alpha * acc
        if reads_out:
            value = ptx.fma(beta, out, value)
        if has_bias:
            value = value + bias
        if has_residual:
            value = value + residual
        return activated(value)

    return finished


@cache
def store(dtype: str, tokens: tuple[str, ...]):
    """Device function (acc, alpha, beta, out, at, bias, channel, residual) that finishes out[at].

    out, bias and residual are pointers to elements; residual has the output's layout. What the tokens do not name is
    not read: its pointer may be null.
    """
    from nbdnn.kernels.cuda import ptx

    compute = DEFAULT_COMPUTE[dtype]
    finished, widen, narrow, zero = finish(compute, tokens), ptx.WIDEN[dtype], ptx.NARROW[dtype], ptx.REAL[compute](0.0)
    reads_out, has_bias, has_residual = "beta" in tokens, "bias" in tokens, "res" in tokens

    @ptx.inline
    def store_element(acc, alpha, beta, out, at, bias, channel, residual):
        before = widen(out[at]) if reads_out else zero
        shift = widen(ptx.load_constant(bias, channel)) if has_bias else zero
        added = widen(ptx.load_constant(residual, at)) if has_residual else zero
        out[at] = narrow(finished(acc, alpha, beta, before, shift, added))

    return store_element
