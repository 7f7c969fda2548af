"""Lowering for the pixel GEMM: a strip of the input so laid out that every tap's pixels are contiguous.

For one image, group and output depth, and a strip of output rows,

    low[c, t, s, phase, j, q] = in[c, depth*step + offset(t), (first_row + j)*u + low_h + phase, q*u + offset(s)]

with zeros beyond the borders. Rows are split by their phase modulo the stride u, so that a row tap is an offset of
whole rows; depth and column taps are separate copies with exactly count_w columns. The pixels of the strip are then
one contiguous run for every k = (c, t, r, s), at low_offsets[k]. 16-bit data are widened here. Of pairs each even
channel becomes words of its own bfloat16 and the next channel's.

Rows are moved by masked vectors, a block of rows at a time. Source: Cho and Brand, arXiv:1706.06873 (columns only),
extended to strides and 3-D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
from numba import int32, int64, njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.epilogue import is_finished, store_kind
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS, Gather, Geometry, column_table, gather_values
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.rows import convert_row, every_step, zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.strips import TASKS_PER_THREAD, own_rows, shared_rows, strip_address
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_SCRATCH_SHARE = 0.4  # of the second-level cache for one strip: the rest is the filter's and the output's

# What lowering needs; kernels that read a lowered strip append their own fields.
LOW_FIELDS = (
    *GATHER_FIELDS,
    *("strips", "strip_rows", "total_strips", "chunk_blocks", "shared", "parts", "part_channels"),
    *("k_len", "low_offsets", "row_phases", "plane_elems", "table_t", "table_s", "low_h"),
    *("strip_bytes", "strip_offset", "contiguous", "finished", "flat"),
)
_LOW = record(*LOW_FIELDS)


@cache
def lower_strip(dtype: str, vl: int, pairs: bool = False):
    """Compiled-in function: the strip's input into scratch; see the module's formula."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, fill, move_rows = pointer("i64"), zero_fill(compute), every_step(dtype, compute, vl)
    widen_row, turn = convert_row(dtype, compute, vl), transpose(dtype, compute, vl)
    itemsize, acc_bytes, params_at, words = ITEMSIZE[dtype], ITEMSIZE[compute], struct(_LOW), pointer("i32")

    @njit(**DEVICE)
    def join_pairs(low, channel_elems, first_channel, end_channel):
        for c in range(first_channel, end_channel, 2):
            even = words(low + c * channel_elems * acc_bytes)
            if c + 1 == end_channel:
                for i in range(channel_elems):
                    even[i] = int32((even[i] >> 16) & 0xFFFF)
                continue
            odd = words(low + (c + 1) * channel_elems * acc_bytes)
            for i in range(channel_elems):
                even[i] = int32((even[i] >> 16) & 0xFFFF | odd[i])

    @njit(**DEVICE)
    def lower_row_of_pixels(to, source, f, start, stop, channels, channel_bytes):
        """One row of all channels, where they lie side by side."""
        pitch = f.in_step_w * f.in_w * itemsize
        for c in range(channels):
            fill(to + c * channel_bytes, start)
            fill(to + c * channel_bytes + stop * acc_bytes, f.count_w - stop)
        turn(to + start * acc_bytes, channel_bytes, source + start * pitch, pitch, stop - start, channels)

    @njit(**DEVICE)
    def lower_channels(image, low, ctx, depth, first_row, rows, first_channel, end_channel):
        f = params_at(ctx)
        table_t, table_s = i64(f.table_t), i64(f.table_s)
        width = f.count_w
        channel_elems = f.taps_d * f.taps_w * f.plane_elems
        if f.flat:
            for c in range(first_channel, end_channel):
                source = c * f.in_c + depth * f.in_d + first_row * f.in_h
                widen_row(low + c * channel_elems * acc_bytes, image + source * itemsize, rows * width)
            return
        phase_rows = f.plane_elems // (f.row_phases * width)
        used_rows = rows + phase_rows - f.strip_rows
        channel_bytes, line_bytes = channel_elems * acc_bytes, width * acc_bytes
        # One channel at a time where pixels lie side by side, all channels of a pixel where channels do.
        run = end_channel - first_channel if f.in_c == 1 else 1
        for c in range(first_channel, end_channel, run):
            for t in range(f.taps_d):
                d = depth * f.in_step_d + table_t[t]
                inside = 0 <= d < f.extent_d
                for phase in range(f.row_phases):
                    top = first_row * f.in_step_h + f.low_h + phase
                    # Rows [first, end) of this phase lie in the image.
                    first = min(used_rows, (max(0, -top) + f.in_step_h - 1) // f.in_step_h) if inside else used_rows
                    end = max(first, min(used_rows, (f.extent_h - top + f.in_step_h - 1) // f.in_step_h))
                    source = c * f.in_c + d * f.in_d + (top + first * f.in_step_h) * f.in_h
                    for s in range(f.taps_w):
                        offset, start, stop = table_s[3 * s], table_s[3 * s + 1], table_s[3 * s + 2]
                        to = (t * f.taps_w + s) * f.plane_elems + phase * phase_rows * width
                        to, at = low + c * channel_bytes + to * acc_bytes, image + (source + offset * f.in_w) * itemsize
                        pitch = f.in_step_h * f.in_h * itemsize
                        for cc in range(run):
                            fill(to + cc * channel_bytes, first * width)
                            fill(to + cc * channel_bytes + end * line_bytes, (used_rows - end) * width)
                        to += first * line_bytes
                        if width == 1 and start < stop:  # the rows are pixels of one line
                            if f.in_c == 1:
                                turn(to, channel_bytes, at, pitch, end - first, run)
                            else:
                                move_rows(
                                    to, at, int64(0), f.in_step_h * f.in_h, int64(1), end - first, int64(0), end - first
                                )
                        elif f.in_c == 1:
                            for j in range(end - first):
                                lower_row_of_pixels(
                                    to + j * line_bytes, at + j * pitch, f, start, stop, run, channel_bytes
                                )
                        else:
                            move_rows(to, at, pitch, f.in_step_w * f.in_w, end - first, width, start, stop)

    @njit(**DEVICE)
    def lower(image, low, ctx, depth, first_row, rows, first_channel, end_channel):
        """The strip's input for channels [first_channel, end_channel), of which the first is even."""
        lower_channels(image, low, ctx, depth, first_row, rows, first_channel, end_channel)
        if pairs:
            f = params_at(ctx)
            join_pairs(low, f.taps_d * f.taps_w * f.plane_elems, first_channel, end_channel)

    return lower


@cache
def lower_task(dtype: str, vl: int, pairs: bool):
    """A part of the channels of one strip, where the strips are lowered in a phase of their own."""
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(_LOW)
    locate, lower, itemsize = strip_address(_LOW), lower_strip(dtype, vl, pairs), ITEMSIZE[dtype]

    def lower_part(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        part = index % f.parts
        n, g, depth, first_row, rows, low = locate(ctx, index // f.parts, a.workspace, worker)
        image = i64(args)[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        first = part * f.part_channels
        if first < f.c_in:  # parts of pairs are even
            lower(image, low, ctx, depth, first_row, rows, first, min(f.c_in, first + f.part_channels))

    return compile_task(lower_part, (dtype, vl, pairs), fastmath=FASTMATH)


@dataclass(frozen=True)
class StripPlan:
    """How a gather is cut into strips of output rows and chunks of output channels, and the bytes of a lowered strip.

    Where there are fewer strips than workers want, the output channels are cut as well, and the strips are `shared`:
    lowered once, in `parts` ranges of channels, before the products begin. Else each worker lowers its own.
    """

    strip_rows: int
    strips: int
    total_strips: int
    chunks: int
    chunk_blocks: int
    parts: int
    row_phases: int
    plane_elems: int
    strip_bytes: int

    @property
    def shared(self) -> bool:
        return self.chunks > 1

    def total_bytes(self, threads: int) -> int:
        return self.strip_bytes * (self.total_strips if self.shared else threads)


def strip_plan(geo: Geometry, gather: Gather, acc_bytes: int, blocks: int, tile_pixels: int, device: Cpu) -> StripPlan:
    """`blocks` is the number of register tiles along the output channels, `tile_pixels` the pixels of one."""
    height, width = gather.h.count, gather.w.count
    row_phases, halo = min(gather.h.in_step, gather.h.span + 1), gather.h.span // gather.h.in_step
    planes = geo.c_in * len(gather.d.taps) * len(gather.w.taps)
    row_bytes = max(1, planes * row_phases * width * acc_bytes)
    most_rows = min(height, max(1, int(device.l2_bytes * _SCRATCH_SHARE) // row_bytes - halo))
    outer = geo.n * geo.groups * gather.d.count
    cut, chunks = (height, width, outer, most_rows), 1
    strip_rows = own_rows(*cut, device.vector_bytes // acc_bytes, device.threads)
    if not strip_rows:
        strip_rows, chunks = shared_rows(*cut, 2 * tile_pixels, max(1, blocks // 2), device.threads)
    strips = ceil(height / strip_rows)
    chunk_blocks = ceil(blocks / chunks)
    parts = min(geo.c_in, ceil(device.threads * TASKS_PER_THREAD / (outer * strips)))
    plane = row_phases * (strip_rows + halo) * width
    return StripPlan(
        strip_rows=strip_rows,
        strips=strips,
        total_strips=outer * strips,
        chunks=ceil(blocks / chunk_blocks),
        chunk_blocks=chunk_blocks,
        parts=ceil(geo.c_in / ceil(geo.c_in / parts)),
        row_phases=row_phases,
        plane_elems=plane,
        # The last tile of the last plane reads whole vectors.
        strip_bytes=own_pages(planes * plane * acc_bytes + 4 * device.vector_bytes),
    )


def low_values(
    problem: ConvProblem, geo: Geometry, gather: Gather, plan: StripPlan, pairs: bool
) -> tuple[dict[str, int], list[np.ndarray]]:
    """The values of LOW_FIELDS (but strip_offset) that describe the lowering, and the tables that they point to."""
    acc_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    low_offsets = _low_offsets(geo, gather, plan, acc_bytes, pairs)
    table_t = np.array([offset for _, offset in gather.d.taps], np.int64)
    table_s = column_table(gather.w)
    step, row = gather.w.out_step * geo.out_strides[5], gather.h.out_step * geo.out_strides[4]
    kind = store_kind(problem, step == 1 and (row == gather.w.count or gather.h.count == 1))
    parts = plan.parts if plan.shared else 1
    part_channels = ceil(geo.c_in / parts)
    part_channels += part_channels % 2 if pairs else 0
    values = gather_values(problem, geo, gather) | {
        "strips": plan.strips,
        "strip_rows": plan.strip_rows,
        "total_strips": plan.total_strips,
        "chunk_blocks": plan.chunk_blocks,
        "shared": int(plan.shared),
        "parts": parts,
        "part_channels": part_channels,
        "k_len": low_offsets.size,
        "low_offsets": low_offsets.ctypes.data,
        "row_phases": plan.row_phases,
        "plane_elems": plan.plane_elems,
        "table_t": table_t.ctypes.data,
        "table_s": table_s.ctypes.data,
        "low_h": gather.h.low,
        "strip_bytes": plan.strip_bytes,
        "contiguous": kind,
        "finished": int(kind == 1 and is_finished(problem)),
        "flat": int(_is_flat(geo, gather)),
    }
    return values, [low_offsets, table_t, table_s]


def _low_offsets(geo: Geometry, gather: Gather, plan: StripPlan, acc_bytes: int, pairs: bool) -> np.ndarray:
    """Byte offset in the lowered strip of each k = (c, t, r, s), or of pairs (t, r, s, even c)."""
    taps_t, taps_s = len(gather.d.taps), len(gather.w.taps)
    phase_rows = plan.plane_elems // (plan.row_phases * gather.w.count)
    relative = np.array([offset - gather.h.low for _, offset in gather.h.taps], np.int64)
    u = gather.h.in_step
    rows = (relative % u * phase_rows + relative // u) * gather.w.count
    channel = np.arange(0, geo.c_in, 1 + pairs)[:, None, None, None] * (taps_t * taps_s * plan.plane_elems)
    depth = np.arange(taps_t)[:, None, None] * (taps_s * plan.plane_elems)
    column = np.arange(taps_s) * plan.plane_elems
    offsets = ((channel + depth + rows[:, None] + column) * acc_bytes).astype(np.int32)
    return (np.ascontiguousarray(np.moveaxis(offsets, 0, -1)) if pairs else offsets).reshape(-1)


def _is_flat(geo: Geometry, gather: Gather) -> bool:
    """Whether a strip's pixels lie side by side in the input: 1x1, stride 1, no border, one channel after another."""
    one_tap = all([offset for _, offset in axis.taps] == [0] and axis.in_step == 1 for axis in gather)
    inside = all(axis.count <= axis.in_extent for axis in gather)
    return one_tap and inside and geo.in_strides[5] == 1 and geo.in_strides[4] == gather.w.count == gather.w.in_extent
