"""How a convolution by FFT is cut into tiles, and how its spectra lie in the workspace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.fft_line import frequencies
from nbdnn.kernels.cpu.fft_tiles import MR, PANEL_VECTORS
from nbdnn.kernels.cpu.geometry import Gather, Geometry, geometry
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_IMAGES_BYTES = 64 << 20  # of the spectra that grow with the number of images taken at a time
_LINE_BYTES = 64


@dataclass(frozen=True)
class Tile:
    """Extents of a tile that is transformed; the config of the candidates."""

    h: int
    w: int

    def __str__(self) -> str:
        return f"{self.h}x{self.w}"


@dataclass(frozen=True)
class Spectra:
    """Where spectra lie: offset in the workspace, and steps from frequency to frequency, item, panel and plane."""

    spectra_offset: int
    freq_bytes: int
    item_bytes: int
    panel_bytes: int
    plane_bytes: int


@dataclass(frozen=True)
class Plan:
    """A problem cut into tiles.

    A tile gives m_h x m_w outputs; a plane (one depth of one image) has tiles_h x tiles_w of them; `planes` of x and
    `out_planes` of the output are taken for each of the `images` at a time. The product has `taps` = depth taps x
    channels a group on its other side, and panels of `width` output channels.
    """

    geo: Geometry
    gather: Gather
    tile: Tile
    m_h: int
    m_w: int
    tiles_h: int
    tiles_w: int
    planes: int
    out_planes: int
    taps: int
    images: int
    width: int
    row_bytes: int
    pitch: int
    x: Spectra
    w: Spectra
    y: Spectra
    worker_offset: int
    worker_bytes: int
    total_bytes: int

    @property
    def tiles(self) -> int:
        return self.tiles_h * self.tiles_w

    @property
    def channels(self) -> int:
        """Of x, in all groups."""
        return self.geo.groups * self.geo.c_in

    @property
    def panels(self) -> int:
        return self.geo.groups * ceil(self.geo.c_out / self.width)


def as_forward(problem: ConvProblem) -> ConvProblem:
    """bwd_filter as the forward whose filter it is the gradient of; the others as they are."""
    return replace(problem, op="conv_fwd", epilogue=()) if problem.op == "conv_bwd_filter" else problem


@lru_cache(maxsize=256)
def plan(problem: ConvProblem, tile: Tile, device: Cpu) -> Plan:
    """The plan of a problem of stride 1. w is what x meets: the filter, or dy where y is the filter's gradient."""
    geo = geometry(as_forward(problem))
    (gather,) = geo.gathers
    acc_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    width = PANEL_VECTORS * device.lanes(DEFAULT_COMPUTE[problem.dtype])
    row_bytes, freqs = width * acc_bytes, len(pairs(tile))
    m_h, m_w = tile.h - gather.h.span, tile.w - gather.w.span
    tiles_h, tiles_w = ceil(gather.h.count / m_h), ceil(gather.w.count / m_w)
    tiles, panels = tiles_h * tiles_w, geo.groups * ceil(geo.c_out / width)
    planes, taps = gather.d.count + gather.d.span, len(gather.d.taps) * geo.c_in

    x_plane = ceil(geo.groups * geo.c_in / width) * row_bytes
    image_bytes = freqs * tiles * (planes * 3 * x_plane + gather.d.count * 2 * panels * row_bytes)
    images = max(1, min(geo.n, _IMAGES_BYTES // image_bytes))
    images = ceil(geo.n / ceil(geo.n / images))
    outputs = images * gather.d.count * tiles
    items, rows = (outputs, taps) if problem.op == "conv_bwd_filter" else (taps, outputs)
    y_panel = ceil(2 * rows / MR) * MR * row_bytes
    # A cache line more than the data, or all frequencies (rows) would fall into the same cache sets.
    x_freq = images * planes * tiles * 3 * x_plane + _LINE_BYTES
    w_freq, y_freq = panels * 2 * items * row_bytes + _LINE_BYTES, panels * y_panel + _LINE_BYTES
    pitch = tile.w * row_bytes + _LINE_BYTES
    x_offset = freqs * w_freq
    y_offset = x_offset + freqs * x_freq
    worker_offset, worker_bytes = own_pages(y_offset + freqs * y_freq), own_pages(tile.h * pitch + tile.w * row_bytes)
    return Plan(
        geo, gather, tile, m_h, m_w, tiles_h, tiles_w, planes, gather.d.count, taps, images, width, row_bytes, pitch,
        Spectra(x_offset, x_freq, 3 * x_plane, row_bytes, x_plane),
        Spectra(0, w_freq, row_bytes, 2 * items * row_bytes, items * row_bytes),
        Spectra(y_offset, y_freq, 2 * row_bytes, y_panel, row_bytes),
        worker_offset, worker_bytes, worker_offset + device.threads * worker_bytes,
    )  # fmt: skip


@lru_cache(maxsize=64)
def pairs(tile: Tile) -> np.ndarray:
    """(place of f, place of -f) in a transformed tile, one of each pair, as (row, column, row, column)."""
    h, w = frequencies(tile.h), frequencies(tile.w)
    minus_h, minus_w = (np.argsort(f)[-f % f.size] for f in (h, w))
    place = np.arange(h.size * w.size)
    row, column = np.divmod(place, w.size)
    kept = place <= minus_h[row] * w.size + minus_w[column]
    return np.stack([row, column, minus_h[row], minus_w[column]], axis=1)[kept]
