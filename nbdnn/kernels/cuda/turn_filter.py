"""A filter turned for products that read neighbouring output channels: turned[g, tap, i, o] from w[g, o, i, tap].

The output channels are padded to a multiple of 4, so that every row begins on 16 bytes; the padding is not written. A
thread turns the taps of one pair of channels, which are neighbours in memory and come from one or two cache lines.
Traffic: the filter twice. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.problem_conv import ConvProblem

_THREADS = 256


class _Fields(NamedTuple):
    """start: where the turned filter begins in the workspace; w_o, w_i: strides of the channels of a group in w."""

    pairs: int
    taps: int
    group_out: int
    group_in: int
    padded_out: int
    w_g: int
    w_o: int
    w_i: int
    start: int


def turned_strides(problem: ConvProblem) -> tuple[int, ...]:
    """(start, group, output channel, input channel, t, r, s) of the turned filter, in the order in which taps meet."""
    _, group_in, padded_out, taps = _extents(problem)
    _, r, s = spatial3(problem.filter)
    row = group_in * padded_out
    t_r_s = (row * r * s, row * s, row)
    if problem.mode == "cross":
        return 0, row * taps, 1, padded_out, *t_r_s
    return row * (taps - 1), row * taps, 1, padded_out, *(-stride for stride in t_r_s)


def turned_elems(problem: ConvProblem) -> int:
    _, group_in, padded_out, taps = _extents(problem)
    return problem.groups * taps * group_in * padded_out


def turn_filter(problem: ConvProblem, start: int) -> Launch:
    """Turns the filter of a forward or bwd_data, whose taps are neighbours in memory, to the workspace at `start`."""
    group_out, group_in, padded_out, taps = _extents(problem)
    forward = problem.op == "conv_fwd"
    rows = problem.w_shape[1] * taps  # elements of an output channel of the convolution
    w_o, w_i = (rows, taps) if forward else (taps, rows)
    w_g = problem.k // problem.groups * rows
    pairs = problem.groups * group_in * group_out
    return Launch(
        source=Source(_turn_kernel, (), _THREADS),
        grid=(ceil(pairs / _THREADS), 1, 1),
        pointers=(1 if forward else 0, WORKSPACE),
        scalars="",
        integers=_Fields(pairs, taps, group_out, group_in, padded_out, w_g, w_o, w_i, start),
    )


def _extents(problem: ConvProblem) -> tuple[int, int, int, int]:
    """(output channels, input channels, output channels padded, taps) of a group, as the product sees them."""
    k, c = problem.k // problem.groups, problem.c // problem.groups
    group_out, group_in = (k, c) if problem.op == "conv_fwd" else (c, k)
    return group_out, group_in, -(-group_out // 4) * 4, prod(problem.filter)


def _turn_kernel():
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    def turn(w, turned, f):
        pair = integer(ptx.block_x() * _THREADS + ptx.thread_x())
        if pair >= f.pairs:
            return
        rest, o = ptx.divided(pair, f.group_out)
        g, i = ptx.divided(rest, f.group_in)
        at = integer(g * f.w_g + o * f.w_o + i * f.w_i)
        step = integer(f.group_in * f.padded_out)
        to = integer(f.start + g * f.taps * step + i * f.padded_out + o)
        tap = integer(0)
        while tap < f.taps:
            turned[to] = ptx.load_constant(w, integer(at + tap))
            to, tap = integer(to + step), integer(tap + 1)

    data = ptx.pointer("f32")
    return turn, (data, data, ptx.record(_Fields, 32))
