"""Which taps of a filter a tile of pixels meets inside of an image: those of dilated filters often lie beside it."""

from __future__ import annotations

from math import ceil

import numpy as np

from nbdnn.kernels.cpu.geometry import Axis, Gather

_LEAST_CHANNELS, _MOST_TAPS = 32, 63  # what a tap takes beside the sums that are loaded and stored; bits
_MOST_INSIDE = 0.85  # of the products: where more are made, fewer steps of the reduction are as fast


def tap_masks(gather: Gather, channels: int, strip_rows: int, mr: int) -> tuple[np.ndarray | None, float]:
    """(int64 [depth, strip, tile]: bits of the taps, in the order of the filter, that any pixel of a tile meets inside;
    their share), or (None, 1) where it is not worth while. A strip is so many rows, a tile `mr` or `mr - 1` pixels."""
    width, taps = gather.w.count, len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
    if channels < _LEAST_CHANNELS or not 1 < taps <= _MOST_TAPS:
        return None, 1.0
    d, h, w = map(_inside, gather)
    plane = (h[:, None, :, None] & w[None, :, None, :]).reshape(-1, gather.h.count * width)
    if d.mean() * plane.mean() > _MOST_INSIDE:  # a tile meets what its pixels meet
        return None, 1.0
    strips = [plane[:, first : first + strip_rows * width] for first in range(0, plane.shape[1], strip_rows * width)]
    found = np.zeros((len(strips), ceil(strip_rows * width / mr), len(plane)), bool)
    for strip, pixels in enumerate(strips):
        for tile, part in enumerate(np.array_split(pixels, ceil(pixels.shape[1] / mr), axis=1)):
            found[strip, tile] = part.any(1)
    every = (d.T[:, None, None, :, None] & found[None, :, :, None, :]).reshape(-1, *found.shape[:2], taps)
    share = float(every.mean())
    return ((every << np.arange(taps)).sum(-1), share) if share <= _MOST_INSIDE else (None, 1.0)


def _inside(axis: Axis) -> np.ndarray:
    """bool [tap, output]"""
    reached = [axis.reached(offset) for _, offset in axis.taps]
    outputs = np.arange(axis.count)
    return np.array([(first <= outputs) & (outputs < end) for first, end in reached]).reshape(-1, axis.count)
