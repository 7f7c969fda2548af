"""A convolution as its kernels see it: tensors by strides, taps by offsets.

The forward and bwd_data are both gathers,

    out[n, o, start + i*out_step] = sum over c, taps of  in[n, c, i*in_step + offset(tap)] * w[o, c, tap]

on every spatial axis. The forward is one such gather. bwd_data of stride u is u interleaved ones an axis (every u-th
output pixel sees the same subset of the taps), each with in_step 1. A 2-D problem gets a depth axis of extent 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from nbdnn.kernels.spatial import spatial3, with_depth
from nbdnn.kernels.spatial import tensor_strides as tensor_strides  # kernels take it from here as well
from nbdnn.problem_conv import ACTIVATIONS, ConvProblem


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a gather: (tap in the filter, offset in the input) in the filter's order, and ranges."""

    taps: tuple[tuple[int, int], ...]
    in_step: int
    in_extent: int
    out_start: int
    out_step: int
    count: int

    @property
    def low(self) -> int:
        """Smallest tap offset: the first input position that output 0 of this gather reads."""
        return min((offset for _, offset in self.taps), default=0)

    @property
    def span(self) -> int:
        """Largest minus smallest tap offset."""
        return max((offset for _, offset in self.taps), default=0) - self.low

    @property
    def reaches_outside(self) -> bool:
        """Whether a tap falls beyond a border."""
        return self.low < 0 or (self.count - 1) * self.in_step + self.low + self.span >= self.in_extent

    @property
    def met(self) -> int:
        """Pairs of an output and a tap that lies inside the input."""
        return sum(end - first for first, end in (self.reached(offset) for _, offset in self.taps))

    def reached(self, offset: int) -> tuple[int, int]:
        """First and end of the outputs for which a tap of this offset lies inside the input."""
        first = min(max(0, -(offset // self.in_step)), self.count)
        return first, max(first, min(self.count, -((offset - self.in_extent) // self.in_step)))


class Gather(NamedTuple):
    """The axes (depth, height, width) of one sub-convolution."""

    d: Axis
    h: Axis
    w: Axis

    def in_image_order(self) -> Gather:
        """The same with the taps of each axis in the order of the inputs they read."""
        return Gather(*(replace(axis, taps=tuple(sorted(axis.taps, key=lambda tap: tap[1]))) for axis in self))

    @property
    def pixels(self) -> int:
        return self.d.count * self.h.count * self.w.count


@dataclass(frozen=True)
class Geometry:
    """Everything about a forward or bwd_data that a CPU kernel needs; strides in elements, channels a group.

    in_strides, out_strides: (n, group, channel, d, h, w); w_strides: (group, out channel, in channel, t, r, s).
    in_pointer, w_pointer, out_pointer: positions among the problem's operands.
    """

    gathers: tuple[Gather, ...]
    n: int
    groups: int
    c_in: int
    c_out: int
    in_strides: tuple[int, ...]
    w_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    in_pointer: int
    w_pointer: int
    out_pointer: int

    @property
    def run(self) -> int:
        """So many output channels, one after another, are a constant distance apart in the output."""
        return self.c_out

    @property
    def channel_offsets(self) -> np.ndarray:
        """Of each output channel of a group in the output, int64 elements."""
        return np.arange(self.c_out, dtype=np.int64) * self.out_strides[2]

    @property
    def filter_starts(self) -> np.ndarray:
        """Of each output channel of a group in the filter, int64 elements."""
        return np.arange(self.c_out, dtype=np.int64) * self.w_strides[1]

    @property
    def taps(self) -> int:
        """Taps of all gathers together."""
        return sum(len(g.d.taps) * len(g.h.taps) * len(g.w.taps) for g in self.gathers)


def geometry(problem: ConvProblem) -> Geometry:
    """The gathers of a forward or bwd_data problem."""
    forward = problem.op == "conv_fwd"
    gathers = product(*(_axes(problem, axis, forward) for axis in range(3)))
    c, k = problem.c // problem.groups, problem.k // problem.groups
    w = problem.operands[1 if forward else 0]
    ws = with_depth(w.strides, 2)
    source, target = (problem.operands[0], problem.operands[2]) if forward else problem.operands[1:3]
    c_in, c_out = (c, k) if forward else (k, c)
    return Geometry(
        gathers=tuple(Gather(*g) for g in gathers),
        n=problem.n,
        groups=problem.groups,
        c_in=c_in,
        c_out=c_out,
        in_strides=_grouped(source.strides, c_in),
        w_strides=(ws[0] * k, ws[0], ws[1], *ws[2:]) if forward else (ws[0] * k, ws[1], ws[0], *ws[2:]),
        out_strides=_grouped(target.strides, c_out),
        in_pointer=0 if forward else 1,
        w_pointer=1 if forward else 0,
        out_pointer=2,
    )


def tap_table(axis: Axis) -> np.ndarray:
    """(tap in the filter, offset in the input), two int64 a tap."""
    return np.array(axis.taps, np.int64).reshape(-1, 2)


def column_table(axis: Axis) -> np.ndarray:
    """(offset in the input, first and end of the outputs for which it is inside), three int64 a tap."""
    return np.array([(offset, *axis.reached(offset)) for _, offset in axis.taps], np.int64).reshape(-1, 3)


def _axes(problem: ConvProblem, axis: int, forward: bool) -> tuple[Axis, ...]:
    extent = spatial3(problem.spatial)[axis]
    out = spatial3(problem.out_spatial)[axis]
    taps = spatial3(problem.filter)[axis]
    before = spatial3(tuple(b for b, _ in problem.pad), 0)[axis]
    u = spatial3(problem.stride)[axis]
    d = spatial3(problem.dilation)[axis]
    flip = problem.mode == "conv"

    def stored(r: int) -> int:
        return taps - 1 - r if flip else r

    if forward:
        pairs = sorted((stored(r), r * d - before) for r in range(taps))
        return (Axis(tuple(pairs), u, extent, 0, 1, out),)
    phases = []
    for phase in range(min(u, extent)):
        pairs = sorted(
            (stored(r), (phase + before - r * d) // u) for r in range(taps) if (phase + before - r * d) % u == 0
        )
        phases.append(Axis(tuple(pairs), 1, out, phase, u, len(range(phase, extent, u))))
    return tuple(phases)


def _grouped(strides: tuple[int, ...], channels: int) -> tuple[int, ...]:
    n, c, d, h, w = with_depth(strides, 2)
    return (n, c * channels, c, d, h, w)


EPILOGUE_FIELDS = ("activation", "bias_pointer", "residual_pointer", "read_out")
# The parameters that every gather kernel starts from; each adds its own.
GATHER_FIELDS = (
    *("n", "groups", "c_in", "c_out", "in_pointer", "w_pointer", "out_pointer"),
    *("in_n", "in_g", "in_c", "in_d", "in_h", "in_w"),
    *("w_g", "w_o", "w_i", "w_t", "w_r", "w_s"),
    *("out_n", "out_g", "out_c", "out_d", "out_h", "out_w"),
    *("count_d", "count_h", "count_w", "in_step_d", "in_step_h", "in_step_w", "extent_d", "extent_h", "extent_w"),
    *("start_d", "start_h", "start_w", "out_step_d", "out_step_h", "out_step_w"),
    *("taps_d", "taps_h", "taps_w"),
    *EPILOGUE_FIELDS,
)


def gather_values(problem: ConvProblem, geo: Geometry, gather: Gather) -> dict[str, int]:
    """The value of each of GATHER_FIELDS; operand positions that do not exist are -1."""
    values = {
        **{name: getattr(geo, name) for name in GATHER_FIELDS[:7]},
        **_spread("in", "ngcdhw", geo.in_strides),
        **_spread("w", "goitrs", geo.w_strides),
        **_spread("out", "ngcdhw", geo.out_strides),
    }
    for name, axis in zip("dhw", gather, strict=True):
        values |= {
            f"count_{name}": axis.count,
            f"in_step_{name}": axis.in_step,
            f"extent_{name}": axis.in_extent,
            f"start_{name}": axis.out_start,
            f"out_step_{name}": axis.out_step,
            f"taps_{name}": len(axis.taps),
        }
    return values | epilogue_values(problem)


def epilogue_values(problem: ConvProblem) -> dict[str, int]:
    """The value of each of EPILOGUE_FIELDS; operand positions that do not exist are -1."""
    names = [operand.name for operand in problem.operands]
    return {
        "activation": ACTIVATIONS.index(problem.activation) + 1 if problem.activation else 0,
        "bias_pointer": names.index("bias") if "bias" in names else -1,
        "residual_pointer": names.index("residual") if "residual" in names else -1,
        "read_out": int("beta" in problem.epilogue),
    }


def _spread(prefix: str, names: str, values: tuple[int, ...]) -> dict[str, int]:
    return {f"{prefix}_{name}": value for name, value in zip(names, values, strict=True)}
