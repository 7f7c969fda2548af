"""Convolution by FFT, whole images or tiles of them: forward and both gradients, stride 1, 2-D and 3-D, both layouts.

    forward, bwd_data:  Y[o](f) = sum over t, c of  X[c](f) * conj W[o, t, c](f)       for every tile and frequency f
    bwd_filter:         dW[o, t, c](f) = sum over tiles of  X[c](f) * conj dY[o](f)

    x in tiles of T x T, R - 1 of them shared with the next --FFT--> X as rows ----+
                                                                                  +--product--> Y --inverse--> m x m
    w in tiles of T x T, zero beyond R x R (bwd_filter: dy, m x m) --FFT--> panels +             m = T - R + 1

One transform serves three purposes and one product three directions: see fft_tiles.py. A filter that is met backwards
(mode 'conv' forward, 'cross' bwd_data) is a true convolution: its panels are conjugated, and the outputs begin at R - 1
of the tile. Along the depth there is no transform: depth taps are further input channels, as in conv_winograd.py.
Images are taken as many at a time as keep their spectra in bounds.

Multiplications: 2 (T^2 + 4) / m^2 for each output and input channel, against R^2. Traffic: the filter's spectrum once a
pass over the images, which is what few tiles pay for. Error: eps * log2(T) * sqrt(C) times the largest root sum of
squares of the image. Source: own; overlap-save, and Mathieu, Henaff and LeCun, arXiv:1312.5851.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.fft_line import line_task, twiddle_table
from nbdnn.kernels.cpu.fft_plan import Plan, Spectra, Tile, pairs, plan
from nbdnn.kernels.cpu.fft_tiles import (
    CONJUGATE_PANELS,
    PANEL_VECTORS,
    PANELS,
    PRODUCT,
    ROWS,
    SOURCE,
    TARGET,
    inverse_task,
    product_task,
    transform_task,
)
from nbdnn.kernels.cpu.geometry import epilogue_values
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.vector import filled
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
_TILES, _TILES_TRIED = (8, 12, 16, 20, 24, 32, 40, 48, 64), 3
_LARGEST_TILED_FILTER = 32
# Nanoseconds of one thread: an element of a line and its logarithm, and a byte of a spectrum, written and read again.
_LINE_NS, _SPECTRUM_NS = 0.3, 0.13
_COLUMN_NS = 2.0  # an element of a tile of one column, where pixels lie side by side (Zen 3)


class _Phases:
    """The phases of one problem, and the arrays that they need alive."""

    def __init__(self, problem: ConvProblem, cut: Plan, device: Cpu) -> None:
        self._problem, self._cut = problem, cut
        self._compute = DEFAULT_COMPUTE[problem.dtype]
        self._vl = device.lanes(self._compute)
        self._is_filter = problem.op == "conv_bwd_filter"
        # Whether the taps are met in the opposite of their order in the filter.
        self._is_backwards = (problem.op == "conv_bwd_data") == (problem.mode == "cross")
        self.keep: list[np.ndarray] = []
        row, column, minus_row, minus_column = pairs(cut.tile).T
        places = (row * cut.pitch + column * cut.row_bytes, minus_row * cut.pitch + minus_column * cut.row_bytes)
        self._pairs = self._address(np.stack(places, axis=1))

    def all(self) -> list[Phase]:
        cut, phases = self._cut, []
        if not self._is_filter:
            phases.append(self._filters())
        for first in range(0, cut.geo.n, cut.images):
            images = min(cut.images, cut.geo.n - first)
            phases.append(self._rows(first, images))
            if self._is_filter:
                phases += [self._gradients(first, images), self._product(images, accumulate=first > 0)]
            else:
                phases += [self._product(images, accumulate=False), self._outputs(first, images)]
        if self._is_filter:
            phases.append(self._filter_gradients())
        return phases

    def _address(self, table: np.ndarray, dtype: type = np.int64) -> int:
        """The address of a table that is kept alive."""
        self.keep.append(np.ascontiguousarray(table, dtype))
        return self.keep[-1].ctypes.data

    def _lines(self, spectra: Spectra, inverse: bool) -> dict[str, int]:
        """What records of transforms have in common: the tile, its lines, where the spectra lie."""
        cut, tile = self._cut, self._cut.tile
        values: dict[str, Any] = {"tile_h": tile.h, "tile_w": tile.w, "pitch": cut.pitch, "pairs": self._pairs}
        for name, n in (("h", tile.h), ("w", tile.w)):
            values[f"line_{name}"] = line_task(self._compute, self._vl, n, inverse).address
            values[f"twiddles_{name}"] = twiddle_table(self._compute, n).ctypes.data
        values |= {"freqs": len(pairs(tile)), "worker_offset": cut.worker_offset, "worker_bytes": cut.worker_bytes}
        return values | vars(spectra)

    def _tiles_of_images(self, strides: tuple[int, ...], first: int) -> dict[str, int]:
        """Items (image, depth, tile row, tile column) of a tensor with (n, g, c, d, h, w) strides."""
        cut = self._cut
        values = dict(zip(("s_a", "s_g", "s_lane", "s_b", "s_h", "s_w"), strides, strict=True))
        values |= {"first_a": first, "tiles_h": cut.tiles_h, "tiles_w": cut.tiles_w}
        return values | {"step_h": cut.m_h, "step_w": cut.m_w}

    def _filters_as_items(self) -> dict[str, int]:
        """Items (depth tap, input channel) of the filter."""
        geo, (_, h, w) = self._cut.geo, self._cut.gather
        values = dict(zip(("s_g", "s_lane", "s_b", "s_a", "s_h", "s_w"), geo.w_strides, strict=True))
        values |= {"first_a": 0, "count_b": geo.c_in, "tiles_h": 1, "tiles_w": 1, **self._channel_blocks()}
        return values | {"step_h": h.span + 1, "step_w": w.span + 1, "extent_h": h.span + 1, "extent_w": w.span + 1}

    def _channel_blocks(self) -> dict[str, int]:
        """Lanes of output channels, by group."""
        geo = self._cut.geo
        return {"groups": geo.groups, "lanes": geo.c_out, "blocks": self._cut.panels // geo.groups}

    def _rows(self, first: int, images: int) -> Phase:
        """The spectra of x."""
        cut, geo, (d, h, w) = self._cut, self._cut.geo, self._cut.gather
        blocks = ceil(cut.channels / cut.width)
        ctx = filled(
            SOURCE,
            **self._lines(cut.x, False),
            **self._tiles_of_images(geo.in_strides, first),
            operand=geo.in_pointer,
            count_b=cut.planes,
            groups=1,
            lanes=cut.channels,
            blocks=blocks,
            extent_h=h.in_extent,
            extent_w=w.in_extent,
            low_b=d.low,
            extent_b=d.in_extent,
            low_h=h.low,
            low_w=w.low,
            span_h=cut.tile.h,
            span_w=cut.tile.w,
        )
        task = transform_task(self._problem.dtype, self._vl, ROWS)
        return Phase(task, images * cut.planes * cut.tiles * blocks, ctx)

    def _filters(self) -> Phase:
        """The spectra of w."""
        cut, geo, (_, h, w) = self._cut, self._cut.geo, self._cut.gather
        ctx = filled(
            SOURCE,
            **self._lines(cut.w, False),
            **self._filters_as_items(),
            operand=geo.w_pointer,
            low_b=0,
            extent_b=geo.c_in,
            low_h=0,
            low_w=0,
            span_h=h.span + 1,
            span_w=w.span + 1,
        )
        form = CONJUGATE_PANELS if self._is_backwards else PANELS
        return Phase(transform_task(self._problem.dtype, self._vl, form), cut.taps * cut.panels, ctx)

    def _gradients(self, first: int, images: int) -> Phase:
        """The spectra of dy."""
        cut, geo, (d, h, w) = self._cut, self._cut.geo, self._cut.gather
        ctx = filled(
            SOURCE,
            **self._lines(cut.w, False),
            **self._tiles_of_images(geo.out_strides, first),
            **self._channel_blocks(),
            operand=1,
            count_b=cut.out_planes,
            extent_h=h.count,
            extent_w=w.count,
            low_b=0,
            extent_b=d.count,
            low_h=0,
            low_w=0,
            span_h=cut.m_h,
            span_w=cut.m_w,
        )
        task = transform_task(self._problem.dtype, self._vl, PANELS)
        return Phase(task, images * cut.out_planes * cut.tiles * cut.panels, ctx)

    def _product(self, images: int, accumulate: bool) -> Phase:
        cut, geo, acc_bytes = self._cut, self._cut.geo, ITEMSIZE[self._compute]
        n, d, tile = np.ix_(np.arange(images), np.arange(cut.out_planes), np.arange(cut.tiles))
        outputs = (((n * cut.planes + d) * cut.tiles + tile) * cut.x.item_bytes).reshape(-1)
        depths = np.array([offset - cut.gather.d.low for _, offset in cut.gather.d.taps])
        taps = (depths[:, None] * cut.tiles * cut.x.item_bytes + np.arange(geo.c_in) * acc_bytes).reshape(-1)
        rows, items = (taps, outputs) if self._is_filter else (outputs, taps)
        planes = np.array([0, cut.x.plane_bytes])
        ctx = filled(
            PRODUCT,
            panels=cut.panels,
            groups=geo.groups,
            rows=2 * rows.size,
            row_table=self._address(rows[:, None] + planes),
            group_bytes=geo.c_in * acc_bytes,
            items=items.size,
            k_table=self._address(planes[:, None] + items, np.int32),
            accumulate=int(accumulate),
            **{f"x_{name}": getattr(cut.x, name) for name in ("spectra_offset", "freq_bytes")},
            **{f"w_{name}": getattr(cut.w, name) for name in ("spectra_offset", "freq_bytes", "panel_bytes")},
            **{f"y_{name}": getattr(cut.y, name) for name in ("spectra_offset", "freq_bytes", "panel_bytes")},
        )
        return Phase(product_task(self._compute, self._vl), len(pairs(cut.tile)) * cut.panels, ctx)

    def _outputs(self, first: int, images: int) -> Phase:
        """y (bwd_data: dx)."""
        cut, geo, (_, h, w) = self._cut, self._cut.geo, self._cut.gather
        tiles = self._tiles_of_images(geo.out_strides, first) | self._channel_blocks()
        tiles |= {"operand": geo.out_pointer, "count_b": cut.out_planes, "extent_h": h.count, "extent_w": w.count}
        at = (h.span, w.span) if self._is_backwards else (0, 0)
        return self._inverse(tiles, images * cut.out_planes * cut.tiles, at, 0)

    def _filter_gradients(self) -> Phase:
        cut, (_, h, w) = self._cut, self._cut.gather
        filters, base = self._filters_as_items() | {"operand": 2}, 0
        if self._is_backwards:
            base = h.span * filters["s_h"] + w.span * filters["s_w"]
            filters |= {"s_h": -filters["s_h"], "s_w": -filters["s_w"]}
        return self._inverse(filters, cut.taps, (0, 0), base)

    def _inverse(self, tiles: dict[str, int], items: int, at: tuple[int, int], base: int) -> Phase:
        """Results that begin `at` a place of their tile, and `base` elements into the output."""
        cut = self._cut
        lanes, columns = np.arange(cut.width) * tiles["s_lane"], np.arange(cut.tile.w) * tiles["s_w"]
        ctx = filled(
            TARGET,
            **self._lines(cut.y, True),
            **tiles,
            base=base,
            first_h=at[0],
            first_w=at[1],
            lane_table=self._address(lanes),
            column_table=self._address(columns),
            contiguous=int(tiles["s_lane"] == 1 or tiles["s_w"] == 1),
            **epilogue_values(self._problem),
        )
        return Phase(inverse_task(self._problem.dtype, self._vl), items * cut.panels, ctx)


class Fft(Candidate[Tile, Cpu]):
    """Convolution by FFT of tiles, or of whole images."""

    provider = "cpu"

    def __init__(self, op: str, algorithm: str) -> None:
        self.op, self.algorithm = op, algorithm
        self.algo = algorithm

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if any(u != 1 for u in problem.stride):
            return Support(False, f"stride {problem.stride} is not 1")
        if any(d != 1 for d in problem.dilation[-2:]):
            return Support(False, f"dilation {problem.dilation} is not 1")
        if self.algorithm == "fft_tiling" and max(problem.filter[-2:]) > _LARGEST_TILED_FILTER:
            return Support(False, f"the filter is {problem.filter}, tiles are for up to {_LARGEST_TILED_FILTER}")
        if self.algorithm == "fft" and max(_whole(problem)) > _SIZES[-1]:
            return Support(False, f"transforms of {_whole(problem)} elements, the longest are of {_SIZES[-1]}")
        largest = max(plan(problem, tile, device).x.freq_bytes for tile in self.configs(problem, device))
        if largest >= 1 << 31:
            return Support(False, f"one frequency has {largest} bytes: offsets are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Tile, ...]:
        needed = _whole(problem)
        whole = {Tile(*(_fast_size(n) for n in needed))} if max(needed) <= _SIZES[-1] else set()
        if self.algorithm == "fft":
            return tuple(whole)
        reach = max(problem.filter[-2:]) - 1
        tiles = {Tile(*(_fast_size(min(t, n)) for n in needed)) for t in _TILES if t - reach >= t / 4}
        tiles = tiles - whole or whole
        by_estimate = sorted(tiles, key=lambda tile: (self.estimate(problem, tile, device), tile.h, tile.w))
        return tuple(by_estimate[:_TILES_TRIED])

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Cpu) -> int:
        return plan(problem, config, device).total_bytes

    def estimate(self, problem: ConvProblem, config: Tile, device: Cpu) -> float:
        cut, freqs = plan(problem, config, device), len(pairs(config))
        outputs = cut.geo.n * cut.out_planes * cut.tiles
        x_tiles = cut.geo.n * cut.planes * cut.tiles * ceil(cut.channels / cut.width)
        other_tiles = (outputs + cut.taps) * cut.panels
        line_ns = _LINE_NS * config.h * config.w * (log2(2 * config.h) + log2(2 * config.w))
        spectra_bytes = freqs * cut.row_bytes * (3 * x_tiles + 2 * other_tiles)
        side_ns = (x_tiles + other_tiles) * line_ns + spectra_bytes * _SPECTRUM_NS
        if config.w == 1 and cut.geo.in_strides[5] == 1:  # neighbours in memory belong to different tiles
            side_ns += (x_tiles + outputs * cut.panels) * config.h * cut.width * _COLUMN_NS
        vector_fmas = freqs * cut.panels * 4 * outputs * cut.taps * PANEL_VECTORS
        phases = 1 + 3 * ceil(cut.geo.n / cut.images)
        return kernel_us(device, vector_fmas, side_ns, freqs * cut.panels, phases)

    def prepare(self, problem: ConvProblem, config: Tile, device: Cpu) -> Program:
        phases = _Phases(problem, plan(problem, config, device), device)
        return Program(phases.all(), phases.keep)


def _whole(problem: ConvProblem) -> tuple[int, ...]:
    """Elements of a transform that covers the output, along height and width; 1 where the filter does not reach."""
    outputs = problem.spatial if problem.op == "conv_bwd_data" else problem.out_spatial
    return tuple(1 if r == 1 else n + r - 1 for n, r in zip(outputs[-2:], problem.filter[-2:], strict=True))


def _fast_size(n: int) -> int:
    return next(size for size in _SIZES if size >= n)


FWD, BWD_DATA, BWD_FILTER = (Fft(op, "fft") for op in ("conv_fwd", "conv_bwd_data", "conv_bwd_filter"))
FWD_TILING, BWD_DATA_TILING, BWD_FILTER_TILING = (
    Fft(op, "fft_tiling") for op in ("conv_fwd", "conv_bwd_data", "conv_bwd_filter")
)
