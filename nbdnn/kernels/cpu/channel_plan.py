"""How an implicit GEMM with channels in the lanes is cut into strips, panels and steps, and the parameters its kernel
reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.epilogue import is_finished, store_kind
from nbdnn.kernels.cpu.geometry import Gather, Geometry, gather_values
from nbdnn.kernels.cpu.joined import joined
from nbdnn.kernels.cpu.lower_channels import LOW_FIELDS
from nbdnn.kernels.cpu.micro_kernel import Config
from nbdnn.kernels.cpu.pack import Packing, filter_offsets
from nbdnn.kernels.cpu.pack_pairs import of_pairs
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.strips import own_rows, shared_rows
from nbdnn.kernels.cpu.vector import filled, record
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_STRIP_SHARE = 0.3  # of the second-level cache for one lowered strip
_PANEL_SHARE = 0.35  # and for the part of a panel that one step of the reduction reads
_AHEAD_PIXELS, _AHEAD_BYTES = 12, 4 << 10
_PADDING = 8  # of a table of pixels: the largest tile reads beyond its end

PARAMS = record(
    *LOW_FIELDS,
    *("total_strips", "chunk_panels", "panels", "panel_bytes", "packed_offset", "copy_bytes", "in_place", "low_d"),
    *("k_len", "k_step", "a_offsets", "a_h", "a_w", "channel_offsets", "run", "contiguous", "finished"),
    *("ahead_bytes", "in_offsets", "out_offsets", "worker_offset", "worker_bytes"),
)


def tiles_of_channels(c_out: int, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
    """Register tiles of pixels by vectors of output channels.

    An address register a pixel: six to eight fit beside the rest. Panels of equal width, because one vector alone
    leaves multiply-adds waiting for each other; where there is only one, more pixels hide that.
    """
    if device.isa != "avx512":
        return Config(6, 2), Config(4, 3)
    vectors = ceil(c_out / device.lanes(DEFAULT_COMPUTE[problem.dtype]))
    nv = ceil(vectors / max(1, ceil(vectors / 4)))
    return (Config(6 if nv > 1 else 8, max(1, nv)),)


@dataclass(frozen=True)
class Plan:
    """How one gather is cut into strips and panels, and how its input is read. words: of a tap, pairs of channels or
    channels; low_channels: of a pixel of a lowered strip, as elements of read_bytes."""

    in_place: bool
    pairs: bool
    words: int
    low_channels: int
    read_bytes: int
    strip_rows: int
    strips: int
    total_strips: int
    chunks: int
    chunk_panels: int
    panels: int
    k_step: int
    low_rows: int
    low_columns: int
    strip_bytes: int
    acc_bytes: int

    @property
    def shared(self) -> bool:
        return self.chunks > 1 and not self.in_place


def _plan(problem: ConvProblem, geo: Geometry, gather: Gather, config: Config, device: Cpu, pairs: bool) -> Plan:
    compute = DEFAULT_COMPUTE[problem.dtype]
    itemsize, vl = ITEMSIZE[compute], device.lanes(compute)
    reduced = of_pairs(geo) if pairs else geo
    low_channels, read_bytes = (2 * reduced.c_in, ITEMSIZE[problem.dtype]) if pairs else (geo.c_in, itemsize)
    is_read = geo.in_strides[2] == 1 and geo.c_in % 2 == 0 if pairs else problem.dtype == compute
    in_place = is_read and not any(axis.reaches_outside for axis in gather)
    height, width = gather.h.count, gather.w.count
    low_columns = (width - 1) * gather.w.in_step + gather.w.span + 1
    row_bytes = max(1, len(gather.d.taps) * low_columns * low_channels * read_bytes)
    fits = int(device.l2_bytes * _STRIP_SHARE) // row_bytes - gather.h.span - 1
    most_rows = max(1, min(height, fits // gather.h.in_step + 1))
    outer, lanes = geo.n * geo.groups * gather.d.count, config.nv * vl
    panels, chunks = ceil(geo.c_out / lanes), 1
    strip_rows = 0 if in_place else own_rows(height, width, outer, most_rows, config.mr, device.threads)
    if not strip_rows:
        strip_rows, chunks = shared_rows(height, width, outer, most_rows, 8 * config.mr, panels, device.threads)
    strips = ceil(height / strip_rows)
    chunk_panels = ceil(panels / chunks)
    low_rows = (strip_rows - 1) * gather.h.in_step + gather.h.span + 1
    k_len = filter_offsets(reduced, gather).size
    k_steps = max(1, ceil(k_len * lanes * itemsize / (device.l2_bytes * _PANEL_SHARE)))
    tiles = 1 if k_steps == 1 else ceil(strip_rows * width / config.mr) + 1
    return Plan(
        in_place=in_place,
        pairs=pairs,
        words=reduced.c_in,
        low_channels=low_channels,
        read_bytes=read_bytes,
        strip_rows=strip_rows,
        strips=strips,
        total_strips=outer * strips,
        chunks=ceil(panels / chunk_panels),
        chunk_panels=chunk_panels,
        panels=panels,
        k_step=max(1, ceil(k_len / k_steps)),
        low_rows=low_rows,
        low_columns=low_columns,
        strip_bytes=0 if in_place else own_pages(row_bytes * low_rows),
        acc_bytes=tiles * config.mr * lanes * itemsize,
    )


@dataclass(frozen=True)
class Layout:
    """The workspace: the packed filter, lowered strips, then each worker's accumulators."""

    geo: Geometry
    plans: tuple[Plan, ...]
    packing: Packing
    strip_offset: int
    worker_offset: int
    worker_bytes: int
    total_bytes: int


@lru_cache(maxsize=256)
def layout_of(problem: ConvProblem, config: Config, device: Cpu, pairs: bool) -> Layout:
    geo = joined(problem)
    plans = tuple(_plan(problem, geo, gather, config, device, pairs) for gather in geo.gathers)
    lanes = config.nv * device.lanes(DEFAULT_COMPUTE[problem.dtype])
    packing = Packing.of(of_pairs(geo) if pairs else geo, problem.dtype, lanes, device)
    strip_offset = own_pages(packing.total_bytes)
    strips = max(plan.strip_bytes * (plan.total_strips if plan.shared else device.threads) for plan in plans)
    worker_bytes = own_pages(max(plan.acc_bytes for plan in plans))
    worker_offset = strip_offset + strips
    total = worker_offset + device.threads * worker_bytes
    return Layout(geo, plans, packing, strip_offset, worker_offset, worker_bytes, total)


def _a_offsets(geo: Geometry, gather: Gather, plan: Plan) -> tuple[np.ndarray, int, int]:
    """Byte offset of each k = (t, r, s, c) from a pixel's address, and the strides of a pixel in rows and columns."""
    t, r, s = (np.array([offset - axis.low for _, offset in axis.taps], np.int64) for axis in gather)
    if plan.in_place:
        _, _, step_c, step_d, step_h, step_w = geo.in_strides
    else:
        step_c, step_w, step_h = 1, plan.low_channels, plan.low_columns * plan.low_channels
        t, step_d = np.arange(t.size), plan.low_rows * step_h
    rows, columns = r[:, None, None] * step_h, s[:, None] * step_w
    channels = np.arange(plan.words) * (2 * step_c if plan.pairs else step_c)
    offsets = t[:, None, None, None] * step_d + rows + columns + channels
    return (offsets * plan.read_bytes).astype(np.int32).reshape(-1), step_h, step_w


def _ahead_bytes(problem: ConvProblem, geo: Geometry, gather: Gather, device: Cpu) -> int:
    """How far ahead of its use a pixel's input is asked for; 0 where it need not be."""
    pixel_bytes = gather.w.in_step * geo.in_strides[5] * ITEMSIZE[problem.dtype]
    if problem.operands[geo.in_pointer].size_bytes <= device.l2_bytes or geo.in_strides[2] != 1:
        return 0
    return max(_AHEAD_PIXELS, ceil(_AHEAD_BYTES / pixel_bytes)) * pixel_bytes


def parameters(
    problem: ConvProblem, layout: Layout, gather: Gather, plan: Plan, packed_offset: int, device: Cpu
) -> tuple[np.ndarray, list[np.ndarray]]:
    geo = layout.geo
    a_offsets, a_h, a_w = _a_offsets(geo, gather, plan)
    channels = geo.channel_offsets
    depth = np.array([offset for _, offset in gather.d.taps], np.int64)
    kind = store_kind(problem, geo.run > 1 and channels[1] == 1)
    row, pixel = gather.h.out_step * geo.out_strides[4], gather.w.out_step * geo.out_strides[5]
    i, j = np.arange(plan.strip_rows)[:, None], np.arange(gather.w.count)
    out_offsets = (i * row + j * pixel).reshape(-1)
    in_offsets = (i * gather.h.in_step * a_h + j * gather.w.in_step * a_w).reshape(-1) * plan.read_bytes
    in_offsets = np.pad(in_offsets, (0, _PADDING))
    rows_follow = row == gather.w.count * pixel or gather.h.count == 1
    ctx = filled(
        PARAMS,
        **gather_values(problem, geo, gather),
        strips=plan.strips,
        strip_rows=plan.strip_rows,
        total_strips=plan.total_strips,
        chunk_panels=plan.chunk_panels,
        panels=plan.panels,
        panel_bytes=layout.packing.panel_bytes,
        packed_offset=packed_offset,
        copy_bytes=layout.packing.copy_bytes,
        k_len=a_offsets.size,
        k_step=plan.k_step,
        a_offsets=a_offsets.ctypes.data,
        a_h=a_h,
        a_w=a_w,
        channel_offsets=channels.ctypes.data,
        run=geo.run if kind else geo.c_out,
        contiguous=kind,
        finished=int(kind == 1 and geo.run == geo.c_out and is_finished(problem) and rows_follow),
        in_place=int(plan.in_place),
        shared=int(plan.shared),
        low_d=gather.d.low,
        low_h=gather.h.low,
        low_w=gather.w.low,
        low_rows=plan.low_rows,
        low_columns=plan.low_columns,
        depth_offsets=depth.ctypes.data,
        strip_offset=layout.strip_offset,
        strip_bytes=plan.strip_bytes,
        worker_offset=layout.worker_offset,
        worker_bytes=layout.worker_bytes,
        # Where the input is read in place and no second-level cache has it: from memory up to 1.9 times as fast.
        ahead_bytes=_ahead_bytes(problem, geo, gather, device) if plan.in_place else 0,
        in_offsets=in_offsets.ctypes.data,
        out_offsets=out_offsets.ctypes.data,
    )
    return ctx, [a_offsets, channels, depth, in_offsets, out_offsets]
