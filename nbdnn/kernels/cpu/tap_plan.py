"""How an implicit GEMM tap by tap is cut into strips, panels and steps, where its pixels lie, and the parameters its
kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.epilogue import store_kind
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS, Axis, Gather, Geometry, gather_values, geometry
from nbdnn.kernels.cpu.lower_channels import LOWERING
from nbdnn.kernels.cpu.micro_kernel import Config
from nbdnn.kernels.cpu.pack import Packing
from nbdnn.kernels.cpu.pack_pairs import of_pairs
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, record
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_SUMS_SHARE = 0.15  # of the second-level cache for the sums of a strip
_STEP_SHARE = 0.35  # and for the part of a panel that one step of the reduction reads
_TASKS_PER_THREAD = 4
_PADDING = 8  # of a table of pixels: the largest tile reads beyond its end

PARAMS = record(
    *GATHER_FIELDS,
    *("strips", "strip_rows", "depth_offsets", "strip_offset", "total_strips", "chunk_panels", "panels"),
    *("panel_bytes", "packed_offset", "copy_bytes", "copied", "words", "step_words", "plane_bytes", "plane_taps"),
    *("places", "zeros", "masks", "tiles", "channel_offsets", "out_offsets", "contiguous", "sums_offset", "sums_bytes"),
)


@dataclass(frozen=True)
class _Plan:
    """How a gather is cut into strips of rows, chunks of panels and steps of words, which are channels or pairs.

    masks: int64 [depth, strip, tile], bits of the taps, in the filter's order, that any pixel of a tile meets inside.
    inside: the share of the products that are made.
    """

    strip_rows: int
    strips: int
    total_strips: int
    chunks: int
    chunk_panels: int
    step_words: int
    tiles: int
    masks: np.ndarray = field(compare=False)
    inside: float

    @classmethod
    def of(cls, geo: Geometry, gather: Gather, config: Config, words: int, lane_bytes: int, panels: int, device: Cpu):
        """lane_bytes: of a step's line of a panel, or of a pixel's sums."""
        height, width = gather.h.count, gather.w.count
        outer, wanted = geo.n * geo.groups * gather.d.count, device.threads * _TASKS_PER_THREAD
        strips = ceil(height / max(1, min(height, int(device.l2_bytes * _SUMS_SHARE) // (lane_bytes * width))))
        while outer * strips < wanted and ceil(height / (strips + 1)) * width >= 8 * config.mr:
            strips += 1
        strip_rows = ceil(height / strips)
        strips = ceil(height / strip_rows)
        chunks = min(ceil(wanted / (outer * strips)), panels)
        chunk_panels = ceil(panels / chunks)
        masks, inside = _masks(gather, strip_rows, config.mr)
        steps = ceil(words * lane_bytes / (device.l2_bytes * _STEP_SHARE))
        return cls(
            strip_rows, strips, outer * strips, ceil(panels / chunk_panels), chunk_panels, ceil(words / steps),
            masks.shape[2], masks, inside,
        )  # fmt: skip


def _masks(gather: Gather, strip_rows: int, mr: int) -> tuple[np.ndarray, float]:
    d, h, w = map(_inside, gather)
    taps = len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
    rows = strip_rows * gather.w.count
    plane = (h[:, None, :, None] & w[None, :, None, :]).reshape(len(h) * len(w), gather.h.count * gather.w.count)
    strips = [plane[:, first : first + rows] for first in range(0, plane.shape[1], rows)]
    found = np.zeros((len(strips), ceil(rows / mr), len(plane)), bool)
    for strip, pixels in enumerate(strips):
        for tile, part in enumerate(np.array_split(pixels, ceil(pixels.shape[1] / mr), axis=1)):
            found[strip, tile] = part.any(1)
    every = (d.T[:, None, None, :, None] & found[None, :, :, None, :]).reshape(gather.d.count, *found.shape[:2], taps)
    masks = np.ascontiguousarray((every << np.arange(taps)).sum(-1))  # the transposed factor's order is not kept
    return masks, float(every.mean()) if every.size else 1.0


def _inside(axis: Axis) -> np.ndarray:
    """bool [tap, output]"""
    reached = np.array([axis.reached(offset) for _, offset in axis.taps]).reshape(-1, 2, 1)
    outputs = np.arange(axis.count)
    return (reached[:, 0] <= outputs) & (outputs < reached[:, 1])


@dataclass(frozen=True)
class Layout:
    """The workspace: the packed filter, the copied images, then each worker's sums.

    copied: whether images are copied, channels innermost, of each low_channels elements of read_bytes, low_rows rows a
    task.
    """

    geo: Geometry
    plans: tuple[_Plan, ...]
    packing: Packing
    words: int
    copied: bool
    low_channels: int
    read_bytes: int
    low_rows: int
    low_strips: int
    strip_bytes: int
    strip_offset: int
    sums_offset: int
    sums_bytes: int
    total_bytes: int

    @property
    def plane_strides(self) -> tuple[int, int, int]:
        """Bytes from one depth, row and column to the next one of what is read; rows of a copy by the strip."""
        if not self.copied:
            d, h, w = (stride * self.read_bytes for stride in self.geo.in_strides[3:])
            return d, h, w
        pixel_bytes = self.low_channels * self.read_bytes
        row_bytes = self.geo.gathers[0].w.in_extent * pixel_bytes
        return self.low_strips * self.strip_bytes, row_bytes, pixel_bytes


@lru_cache(maxsize=256)
def layout_of(problem: ConvProblem, config: Config, device: Cpu, pairs: bool) -> Layout:
    geo, compute = geometry(problem), DEFAULT_COMPUTE[problem.dtype]
    reduced = of_pairs(geo) if pairs else geo
    lanes = config.nv * device.lanes(compute)
    packing = Packing.of(reduced, problem.dtype, lanes, device)
    plans = tuple(
        _Plan.of(geo, g, config, reduced.c_in, lanes * ITEMSIZE[compute], packing.panels, device) for g in geo.gathers
    )
    low_channels, read_bytes = (2 * reduced.c_in, 2) if pairs else (geo.c_in, ITEMSIZE[compute])
    side_by_side = geo.in_strides[2] == 1
    copied = not side_by_side or (geo.c_in % 2 > 0 if pairs else problem.dtype != compute)
    _, h, w = geo.gathers[0]
    low_rows = max(1, ceil(h.in_extent / (device.threads * _TASKS_PER_THREAD)))
    low_strips = ceil(h.in_extent / low_rows)
    strip_bytes = own_pages(low_rows * w.in_extent * low_channels * read_bytes)
    strip_offset = own_pages(packing.total_bytes)
    images = geo.n * geo.groups * geo.gathers[0].d.in_extent * low_strips * strip_bytes if copied else 0
    sums = max(plan.tiles for plan in plans) * config.mr * lanes * ITEMSIZE[compute]
    sums_offset, sums_bytes = strip_offset + images, own_pages(sums)
    return Layout(
        geo, plans, packing, reduced.c_in, copied, low_channels, read_bytes, low_rows, low_strips, strip_bytes,
        strip_offset, sums_offset, sums_bytes, sums_offset + device.threads * sums_bytes,
    )  # fmt: skip


def copy_parameters(problem: ConvProblem, layout: Layout) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of lowering without taps: whole images."""
    gather, tap = layout.geo.gathers[0], ((0, 0),)
    whole = Gather(*(Axis(tap, 1, axis.in_extent, 0, 1, axis.in_extent) for axis in gather))
    depth = np.zeros(1, np.int64)
    ctx = filled(
        LOWERING,
        **gather_values(problem, layout.geo, whole),
        strips=layout.low_strips,
        strip_rows=layout.low_rows,
        shared=1,
        low_h=0,
        low_w=0,
        low_rows=layout.low_rows,
        low_columns=whole.w.count,
        depth_offsets=depth.ctypes.data,
        strip_offset=layout.strip_offset,
        strip_bytes=layout.strip_bytes,
    )
    return ctx, [depth]


def parameters(problem: ConvProblem, layout: Layout, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of the gather of that number."""
    geo, plan, gather, packing = layout.geo, layout.plans[number], layout.geo.gathers[number], layout.packing
    places, channels = _places(layout, gather), geo.channel_offsets
    depth = np.array([offset for _, offset in gather.d.taps], np.int64)
    zeros = np.zeros(layout.words * ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]], np.uint8)
    i, j = np.arange(plan.strip_rows)[:, None], np.arange(gather.w.count)
    rows, columns = gather.h.out_step * geo.out_strides[4], gather.w.out_step * geo.out_strides[5]
    out_offsets = (i * rows + j * columns).reshape(-1)
    ctx = filled(
        PARAMS,
        **gather_values(problem, geo, gather),
        strips=plan.strips,
        strip_rows=plan.strip_rows,
        depth_offsets=depth.ctypes.data,
        strip_offset=layout.strip_offset,
        total_strips=plan.total_strips,
        chunk_panels=plan.chunk_panels,
        panels=packing.panels,
        panel_bytes=packing.panel_bytes,
        packed_offset=packing.part_offsets[number],
        copy_bytes=packing.copy_bytes,
        copied=int(layout.copied),
        words=layout.words,
        step_words=plan.step_words,
        plane_bytes=layout.plane_strides[0],
        plane_taps=len(gather.h.taps) * len(gather.w.taps),
        places=places.ctypes.data,
        zeros=zeros.ctypes.data,
        masks=plan.masks.ctypes.data,
        tiles=plan.tiles,
        channel_offsets=channels.ctypes.data,
        out_offsets=out_offsets.ctypes.data,
        contiguous=store_kind(problem, geo.out_strides[2] == 1),
        sums_offset=layout.sums_offset,
        sums_bytes=layout.sums_bytes,
    )
    return ctx, [places, depth, zeros, plan.masks, channels, out_offsets]


def _places(layout: Layout, gather: Gather) -> np.ndarray:
    """int32 bytes [row tap, column tap, row, column] from a plane's first pixel to the one that an output's tap meets;
    -1 where that lies beside the image."""
    _, row_bytes, pixel_bytes = layout.plane_strides
    h, w = (
        np.array([offset for _, offset in axis.taps], np.int64).reshape(-1, 1) + np.arange(axis.count) * axis.in_step
        for axis in gather[1:]
    )
    rows = h * row_bytes
    if layout.copied:
        rows = h // layout.low_rows * layout.strip_bytes + h % layout.low_rows * row_bytes
    places = rows[:, None, :, None] + (w * pixel_bytes)[None, :, None, :]
    inside = _inside(gather.h)[:, None, :, None] & _inside(gather.w)[None, :, None, :]
    return np.pad(np.where(inside, places, -1).astype(np.int32).reshape(-1), (0, _PADDING), constant_values=-1)
