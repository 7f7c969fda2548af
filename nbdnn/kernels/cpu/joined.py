"""What an implicit GEMM takes for its geometry: two kinds of convolutions are seen in a way that suits it better.

Image gradients of windows that lie side by side and fill the image, as a U-Net's way up and patches have them.

Every pixel of dx meets one tap. By the general rule that is a gather for each tap, as narrow as dx has channels, and
each reads all of dy. Here all are one gather, a 1x1 convolution of dy, whose output channels are the pairs of a channel
of dx and a tap. They are in the order of dx, where a `run` of them lies side by side:

    dx[n, c, i*R + r, j*S + s] = sum over k of  dy[n, k, i, j] * w[k, (c, r, s)]

Channels-last a run is all (s, c) of a row of taps, in planes all s.

Images of one line, as sound and text are. Strips are cut between rows, and a line of many thousands of columns would be
one, read by few threads and larger than their caches; so it is seen as a column. Taps are then rows apart, and are
lowered once for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from nbdnn.kernels.cpu.geometry import Gather, Geometry, geometry
from nbdnn.kernels.cpu.pack import run_length
from nbdnn.problem_conv import ConvProblem


@dataclass(frozen=True)
class Joined(Geometry):
    """offsets, starts: `channel_offsets` and `filter_starts`."""

    offsets: np.ndarray = field(compare=False)
    starts: np.ndarray = field(compare=False)

    @property
    def run(self) -> int:
        return run_length(self.offsets)

    @property
    def channel_offsets(self) -> np.ndarray:
        return self.offsets

    @property
    def filter_starts(self) -> np.ndarray:
        return self.starts


def joined(problem: ConvProblem) -> Geometry:
    """The geometry of a GEMM that stores by `channel_offsets`: of several gathers without neighbours one."""
    geo = geometry(problem)
    first, *others = geo.gathers
    if not others:
        return _upright(geo, first)
    if any(len(axis.taps) != 1 for gather in geo.gathers for axis in gather):
        return geo
    if any(_where(gather) != _where(first) for gather in others):
        return geo
    offsets, starts = (
        np.concatenate([np.arange(geo.c_out, dtype=np.int64) * step + at for at in ats])
        for step, ats in (
            (geo.out_strides[2], [_sum(geo.out_strides[3:], (axis.out_start for axis in g)) for g in geo.gathers]),
            (geo.w_strides[1], [_sum(geo.w_strides[3:], (axis.taps[0][0] for axis in g)) for g in geo.gathers]),
        )
    )
    order = np.argsort(offsets)
    gather = Gather(*(replace(axis, taps=((0, axis.taps[0][1]),)) for axis in first))
    values = {name: getattr(geo, name) for name in Geometry.__dataclass_fields__}
    values |= {"gathers": (gather,), "c_out": offsets.size}
    return Joined(**values, offsets=offsets[order], starts=starts[order])


def _upright(geo: Geometry, gather: Gather) -> Geometry:
    """Images of one line, their columns as rows. Of one column, the distance to the next is that of pixels."""
    if gather.h.in_extent > 1 or gather.h.count > 1 or len(gather.h.taps) > 1 or gather.w.count == 1:
        return geo
    upright = gather._replace(h=gather.w, w=replace(gather.h, in_step=gather.w.in_step))
    in_strides, w_strides, out_strides = (
        (*strides[:4], strides[5], strides[5]) for strides in (geo.in_strides, geo.w_strides, geo.out_strides)
    )
    return replace(geo, gathers=(upright,), in_strides=in_strides, w_strides=w_strides, out_strides=out_strides)


def _where(gather: Gather) -> list[tuple[int, int]]:
    """Which inputs the only tap of each axis meets."""
    return [(axis.taps[0][1], axis.count) for axis in gather]


def _sum(strides: tuple[int, ...], places: Iterable[int]) -> int:
    return sum(stride * place for stride, place in zip(strides, places, strict=True))
