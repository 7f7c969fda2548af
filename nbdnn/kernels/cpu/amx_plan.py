"""How an implicit GEMM on matrix units is cut into strips, panels and steps, and the parameters its kernels read.

A strip of `strip_rows` rows of output pixels is counted through the `pitch_pixels` of a lowered row, so that all tiles
of 16 pixels are equally far apart, whatever tap they read:

    pixel p = row * pitch_pixels + column,   a tap's pixel = p + a constant

The columns behind the last one of the output are computed in vain. Of a stride u the rows and columns of the input are
dealt out to u * u lowered images, of which each tap reads one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.amx import LINE, PARTS, TILE, tile_shapes, uncut
from nbdnn.kernels.cpu.epilogue import store_kind
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS, Axis, Gather, Geometry, gather_values, geometry
from nbdnn.kernels.cpu.scratch import own_pages, whole_lines
from nbdnn.kernels.cpu.strips import own_rows, shared_rows
from nbdnn.kernels.cpu.vector import filled, record
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_STRIP_SHARE = 0.3  # of the second-level cache for one lowered strip
_MOST_STEP = 4  # of output pixels that are stored as vectors

PARAMS = record(
    *GATHER_FIELDS,
    *("strips", "strip_rows", "shared", "strip_offset", "strip_bytes", "total_strips", "chunk_panels", "panels"),
    *("panel_bytes", "packed_offset", "tap_bytes", "places", "shapes", "in_place", "low_h", "low_w"),
    *("depth_offsets", "row_phase_count", "row_phases", "column_phase_count", "column_phases", "more_rows"),
    *("pitch_pixels", "line_pitch", "line_pixels", "pixel_channels", "plane_bytes"),
    *("part_bytes", "k_len", "a_offsets", "out_offsets", "channel_offsets", "kind", "turned", "finished"),
    *("worker_offset", "worker_bytes", "sums_bytes"),
)


@dataclass(frozen=True)
class Config:
    """mt x nt tiles of sums, each of 16 pixels by 16 output channels; of a filter's gradient 16 of these by a unit."""

    mt: int
    nt: int

    def __str__(self) -> str:
        return f"{self.mt}x{self.nt}"


class Phases(NamedTuple):
    """Of an axis: which of every `step` positions are read at all, and how many positions of a phase the last tap lies
    behind the first. apart: each tap has a phase of its own, of the positions that it reads."""

    used: tuple[int, ...]
    more: int
    apart: bool = False

    @classmethod
    def of(cls, axis: Axis) -> Phases:
        reached = [offset - axis.low for _, offset in axis.taps]
        used = tuple(sorted({offset % axis.in_step for offset in reached}))
        return cls(used, max((offset // axis.in_step for offset in reached), default=0))

    def place(self, axis: Axis, offset: int) -> tuple[int, int]:
        """(number of the phase, position in it) of the first pixel's tap."""
        reached = offset - axis.low
        if self.apart:
            return self.used.index(reached), 0
        return self.used.index(reached % axis.in_step), reached // axis.in_step


@dataclass(frozen=True)
class Plan:
    """How one gather is cut into strips of rows and chunks of panels, and how its input is read."""

    rows: Phases
    columns: Phases
    in_place: bool
    strip_rows: int
    strips: int
    total_strips: int
    chunks: int
    chunk_panels: int
    pitch_pixels: int
    plane_bytes: int
    part_bytes: int
    strip_bytes: int
    k_len: int

    @property
    def shared(self) -> bool:
        return self.chunks > 1 and not self.in_place

    @property
    def pixels(self) -> int:
        """Of a strip, those between two rows among them."""
        return self.strip_rows * self.pitch_pixels


@dataclass(frozen=True)
class Layout:
    """The workspace: the packed filter, lowered strips, then what each worker has for itself.

    depth: numbers of a tile's row, of which a tap has `steps`; a lowered pixel has depth * steps channels.
    """

    geo: Geometry
    parts: int
    depth: int
    steps: int
    plans: tuple[Plan, ...]
    panels: int
    part_offsets: tuple[int, ...]
    panel_bytes: int
    strip_offset: int
    worker_offset: int
    worker_bytes: int
    total_bytes: int

    @property
    def pixel_channels(self) -> int:
        return self.depth * self.steps

    @property
    def tile_bytes(self) -> int:
        """Of a tile of the packed filter."""
        return self.depth // 2 * 64


def _joined_pixels(problem: ConvProblem) -> Geometry:
    """As one image of all rows of all images, where each output sees one pixel, its own."""
    geo = geometry(problem)
    (gather, *others) = geo.gathers
    if others or not _sees_itself(gather):
        return geo
    d, h, w = (axis.count for axis in gather)
    follows = all(
        (d == 1 or depth == h * row) and image == d * h * row and row == w * pixel
        for image, _, _, depth, row, pixel in (geo.in_strides, geo.out_strides)
    )
    if not follows:
        return geo
    rows, (tap,) = geo.n * d * h, gather.h.taps
    return replace(geo, n=1, gathers=(Gather(_one(gather.d), Axis((tap,), 1, rows, 0, 1, rows), gather.w),))


def _sees_itself(gather: Gather) -> bool:
    """Whether each output reads one pixel, its own."""
    return all(len(a.taps) == 1 and a.low == 0 and a.in_step == 1 and a.count == a.in_extent for a in gather)


def _one(axis: Axis) -> Axis:
    return replace(axis, in_extent=1, count=1)


def _depth(c_in: int) -> tuple[int, int]:
    """(numbers of a tile's row, steps): rows that lie in one cache line each."""
    if c_in > LINE // 2:
        return LINE, ceil(c_in / LINE)
    return max(2, 1 << (c_in - 1).bit_length()), 1


@lru_cache(maxsize=256)
def layout_of(problem: ConvProblem, config: Config, device: Cpu) -> Layout:
    geo, parts = _joined_pixels(problem), PARTS[problem.dtype]
    depth, steps = _depth(geo.c_in)
    panels = ceil(geo.c_out / (TILE * config.nt))
    tile_bytes, pixel_bytes = depth // 2 * 64, 2 * depth * steps
    plans = tuple(_plan(problem, geo, gather, config, panels, depth * steps, device) for gather in geo.gathers)
    sizes = [plan.k_len * parts * config.nt * tile_bytes for plan in plans]
    strip_offset = own_pages(geo.groups * panels * sum(sizes))
    strips = max(plan.strip_bytes * (plan.total_strips if plan.shared else device.threads) for plan in plans)
    # A worker has sums, and the same turned; then a line of pixels, or 16 filters and their parts.
    item_bytes = ITEMSIZE[uncut(problem.dtype)]
    longest = max(max(plan.pitch_pixels, g.w.in_extent) for plan, g in zip(plans, geo.gathers, strict=True))
    line_bytes = longest * depth * steps * item_bytes
    filters = TILE * (filter_slots(geo) * depth * steps * item_bytes + parts * pixel_bytes)
    sums_bytes = config.mt * config.nt * TILE * TILE * 4
    worker_bytes = own_pages(2 * sums_bytes + max(whole_lines(line_bytes), filters))
    worker_offset = strip_offset + strips
    return Layout(
        geo, parts, depth, steps, plans, panels, tuple(sum(sizes[:i]) for i in range(len(sizes))), sum(sizes),
        strip_offset, worker_offset, worker_bytes, worker_offset + device.threads * worker_bytes,
    )  # fmt: skip


def filter_slots(geo: Geometry) -> int:
    """Taps of a filter that are kept while it is packed: all from its first to its last where they are neighbours."""
    return _tap_span(geo) if side_by_side(geo) else geo.taps


def side_by_side(geo: Geometry) -> bool:
    """Whether the taps of an input channel lie side by side, with few between them that no gather reads."""
    _, w_o, w_i, _, _, w_s = geo.w_strides
    return w_s == 1 and w_o != 1 and w_i != 1 and _tap_span(geo) <= 4 * geo.taps


def _tap_span(geo: Geometry) -> int:
    """Elements from the begin of a filter's plane to behind the last tap that a gather reads."""
    reached = (
        sum(
            stride * max((tap for tap, _ in axis.taps), default=0)
            for axis, stride in zip(gather, geo.w_strides[3:], strict=True)
        )
        for gather in geo.gathers
    )
    return 1 + max(reached, default=0)


def _plan(
    problem: ConvProblem, geo: Geometry, gather: Gather, config: Config, panels: int, channels: int, device: Cpu
) -> Plan:
    """channels: of a lowered pixel."""
    parts, (d, h, w) = PARTS[problem.dtype], gather
    rows, columns = Phases.of(h), Phases.of(w)
    pitch_pixels, tile_pixels = w.count + columns.more, TILE * config.mt
    row_bytes = 2 * parts * len(d.taps) * len(rows.used) * len(columns.used) * pitch_pixels * channels
    fits = int(device.l2_bytes * _STRIP_SHARE) // max(1, row_bytes) - rows.more
    most_rows = max(1, min(h.count, fits))
    outer, chunks, in_place = geo.n * geo.groups * d.count, 1, _reads_in_place(problem, geo, gather, channels)
    cut = h.count, pitch_pixels, outer, most_rows
    strip_rows = 0 if in_place else own_rows(*cut, tile_pixels, device.threads)
    if not strip_rows:
        strip_rows, chunks = shared_rows(*cut, 4 * tile_pixels, panels, device.threads)
    # In place a strip's last tile ends with it, and may begin in the strip before: a whole strip must hold one.
    in_place = in_place and strip_rows * pitch_pixels >= tile_pixels
    strips, chunk_panels = ceil(h.count / strip_rows), ceil(panels / chunks)
    plane_bytes = 2 * (strip_rows + rows.more) * pitch_pixels * channels
    part_bytes = whole_lines(len(d.taps) * len(rows.used) * len(columns.used) * plane_bytes)
    taps = len(d.taps) * len(h.taps) * len(w.taps)
    return Plan(
        rows=rows,
        columns=columns,
        in_place=in_place,
        strip_rows=strip_rows,
        strips=strips,
        total_strips=outer * strips,
        chunks=ceil(panels / chunk_panels),
        chunk_panels=chunk_panels,
        pitch_pixels=pitch_pixels,
        plane_bytes=plane_bytes,
        part_bytes=part_bytes,
        strip_bytes=0 if in_place else own_pages(parts * part_bytes + 2 * (tile_pixels + columns.more) * channels),
        k_len=taps * _depth(geo.c_in)[1],
    )


def _reads_in_place(problem: ConvProblem, geo: Geometry, gather: Gather, channels: int) -> bool:
    """Whether the pixels of an image, equally far apart, are read as they lie."""
    _, _, step_c, step_d, step_h, step_w = geo.in_strides
    follows = step_h == gather.w.count * step_w and (gather.d.count == 1 or step_d == gather.h.count * step_h)
    return PARTS[problem.dtype] == 1 and step_c == 1 and _sees_itself(gather) and follows and channels == geo.c_in


def _a_offsets(geo: Geometry, gather: Gather, plan: Plan, layout: Layout) -> np.ndarray:
    """int64 bytes of each k = (t, r, s, step) from a pixel's own address."""
    steps = np.arange(layout.steps, dtype=np.int64) * 2 * layout.depth
    if plan.in_place:
        return steps
    pixel_bytes, found = 2 * layout.pixel_channels, []
    phases = len(plan.columns.used)
    for t in range(len(gather.d.taps)):
        for _, row in gather.h.taps:
            row_phase, down = plan.rows.place(gather.h, row)
            for _, column in gather.w.taps:
                column_phase, right = plan.columns.place(gather.w, column)
                plane = (t * len(plan.rows.used) + row_phase) * phases + column_phase
                found.append(plane * plan.plane_bytes + (down * plan.pitch_pixels + right) * pixel_bytes)
    return (np.array(found, np.int64).reshape(-1, 1) + steps).reshape(-1)


def pixel_step(geo: Geometry, gather: Gather) -> int:
    """Elements from one output pixel to the next, where tiles are turned and stored by pixels; 0 where by channels."""
    step = gather.w.out_step * geo.out_strides[5]
    return step if geo.out_strides[2] != 1 and step <= _MOST_STEP else 0


def parameters(
    problem: ConvProblem, config: Config, layout: Layout, number: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of the gather of that number, and the arrays that they point to."""
    geo, plan, gather = layout.geo, layout.plans[number], layout.geo.gathers[number]
    offsets, channels, shapes = _a_offsets(geo, gather, plan, layout), geo.channel_offsets, tile_shapes(layout.depth)
    depth = np.array([offset for _, offset in gather.d.taps], np.int64)
    places = np.arange(layout.parts * config.nt, dtype=np.int64) * layout.tile_bytes
    row, pixel = gather.h.out_step * geo.out_strides[4], gather.w.out_step * geo.out_strides[5]
    i, j = np.arange(plan.strip_rows)[:, None], np.arange(gather.w.count)
    out_offsets = (i * row + j * pixel).reshape(-1).astype(np.int64)
    row_phases, column_phases = (np.array(phases.used, np.int64) for phases in (plan.rows, plan.columns))
    turned = pixel_step(geo, gather) > 0
    # What follows each other in the strip and in the output: a row, or all of the strip.
    is_line = plan.pitch_pixels == gather.w.count and row == gather.w.count * pixel
    lines = plan.strip_rows if is_line else 1
    ctx = filled(
        PARAMS,
        **gather_values(problem, geo, gather),
        strips=plan.strips,
        strip_rows=plan.strip_rows,
        shared=int(plan.shared),
        strip_offset=layout.strip_offset,
        strip_bytes=plan.strip_bytes,
        total_strips=plan.total_strips,
        chunk_panels=plan.chunk_panels,
        panels=layout.panels,
        panel_bytes=layout.panel_bytes,
        packed_offset=layout.part_offsets[number],
        tap_bytes=places.size * layout.tile_bytes,
        places=places.ctypes.data,
        shapes=shapes.ctypes.data,
        in_place=int(plan.in_place),
        low_h=gather.h.low,
        low_w=gather.w.low,
        depth_offsets=depth.ctypes.data,
        row_phase_count=len(plan.rows.used),
        row_phases=row_phases.ctypes.data,
        column_phase_count=len(plan.columns.used),
        column_phases=column_phases.ctypes.data,
        more_rows=plan.rows.more,
        pitch_pixels=plan.pitch_pixels,
        line_pitch=lines * plan.pitch_pixels,
        line_pixels=lines * gather.w.count,
        pixel_channels=layout.pixel_channels,
        plane_bytes=plan.plane_bytes,
        part_bytes=plan.part_bytes,
        k_len=offsets.size,
        a_offsets=offsets.ctypes.data,
        out_offsets=out_offsets.ctypes.data,
        channel_offsets=channels.ctypes.data,
        kind=store_kind(problem, turned or geo.out_strides[2] == 1),
        turned=int(turned),
        finished=int(not problem.epilogue and (pixel == 1 or not turned)),
        worker_offset=layout.worker_offset,
        worker_bytes=layout.worker_bytes,
        sums_bytes=config.mt * config.nt * TILE * TILE * 4,
    )
    return ctx, [offsets, channels, shapes, places, depth, out_offsets, row_phases, column_phases]


def lowered_elems(plan: Plan, layout: Layout, gather: Gather) -> int:
    """Elements that are copied, of all strips."""
    if plan.in_place:
        return 0
    planes = len(gather.d.taps) * len(plan.rows.used) * len(plan.columns.used)
    return plan.total_strips * planes * (plan.strip_rows + plan.rows.more) * plan.pitch_pixels * layout.pixel_channels
