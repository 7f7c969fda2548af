"""Implicit GEMM with output pixels in the vector lanes: forward and bwd_data, any stride, dilation, groups, 2-D, 3-D.

    tile[o, p] = sum over k = (c, t, r, s) of  w[o, k] * low[k, p]         o < mr channels, p < nv vectors of pixels

A task takes a strip of output rows of one image. It first lowers the strip's input into the worker's scratch, which
stays in the second-level cache: low[c, t, s] holds, for every depth and column tap, the rows it needs with exactly
count_w columns each, so that the pixels of the strip are contiguous for every tap and a row tap is an offset. The
reduction then runs over a table of those offsets: one code for every shape, no border tests, no wasted columns.

                    count_w columns
    low[c, t, s]  +-----------------+  <- row phase 0 (rows 0, u, 2u, ... of the padded image)
                  |  row 0          |
                  |  row 1          |     a tile at pixel p reads nv vectors from
                  |  ...            |     low + offset[k] + p
                  +-----------------+  <- row phase 1 (only where the stride u > 1)

Traffic: x is read S*T times and written once to cache; w is read once a strip, where it lies (KCRS) or packed; the
micro-kernel loads nv vectors of x and mr scalars of w for mr*nv multiply-adds. Accumulates in float32 (float64), one
rounding a step. Source: own; lowering after Cho and Brand, arXiv:1706.06873, without the depth-wise blow-up in rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np
from numba import float32, float64, njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Device
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS, Axis, Gather, Geometry, gather_values, geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.pack import filter_offsets, pack_phase, packed_bytes, reads_in_order
from nbdnn.kernels.cpu.vector import WIDEN, filled, micro_kernel, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE, ConvProblem

_SCRATCH_SHARE = 0.4  # of the second-level cache for one strip: the rest is the filter's and the output's
_TASKS_PER_THREAD = 4
_LOW = record(
    *GATHER_FIELDS,
    *("strips", "strip_rows", "chunks", "chunk_blocks", "k_len", "w_offsets", "low_offsets", "channel_offsets"),
    *("row_phases", "plane_elems", "table_t", "table_s", "low_h", "scratch_bytes", "scratch_offset"),
    *("packed_offset", "panel_bytes", "contiguous", "pixels_offset"),
)


@dataclass(frozen=True)
class Config:
    """mr channels by nv vectors of pixels in registers (mr*nv + nv + 1 vector registers); whether w is packed."""

    mr: int
    nv: int
    packed: bool

    def __str__(self) -> str:
        return f"{self.mr}x{self.nv}{'p' if self.packed else ''}"


@cache
def _lower(dtype: str):
    """Compiled-in function: the strip's input into scratch; see the module's picture."""
    compute = DEFAULT_COMPUTE[dtype]
    data, scratch, i64, widen = pointer(dtype), pointer(compute), pointer("i64"), WIDEN[dtype]
    zero = float32(0.0) if compute == "f32" else float64(0.0)

    @njit(**DEVICE)
    def lower(image, low_address, f, depth, first_row, rows):
        x, low = data(image), scratch(low_address)
        table_t, table_s = i64(f.table_t), i64(f.table_s)
        width = f.count_w
        phase_rows = f.plane_elems // (f.row_phases * width)
        used_rows = rows + phase_rows - f.strip_rows
        step = f.in_step_w * f.in_w
        channel_elems = f.taps_d * f.taps_w * f.plane_elems
        # One channel at a time where pixels lie side by side, all channels of a pixel where channels do.
        channel_run = f.c_in if f.in_c == 1 else 1
        for c in range(0, f.c_in, channel_run):
            for t in range(f.taps_d):
                d = depth * f.in_step_d + table_t[t]
                for s in range(f.taps_w):
                    offset, start, end = table_s[3 * s], table_s[3 * s + 1], table_s[3 * s + 2]
                    for row in range(f.row_phases * used_rows):
                        phase, j = row // used_rows, row % used_rows
                        h = (first_row + j) * f.in_step_h + f.low_h + phase
                        line = c * channel_elems + (t * f.taps_w + s) * f.plane_elems + (phase * phase_rows + j) * width
                        lo, hi = start, end
                        if d < 0 or d >= f.extent_d or h < 0 or h >= f.extent_h:
                            lo, hi = width, width
                        source = c * f.in_c + d * f.in_d + h * f.in_h + offset * f.in_w
                        for cc in range(channel_run):
                            for q in range(lo):
                                low[line + cc * channel_elems + q] = zero
                            for q in range(hi, width):
                                low[line + cc * channel_elems + q] = zero
                        if channel_run == 1:
                            if step == 1:
                                for q in range(lo, hi):
                                    low[line + q] = widen(x[source + q])
                            else:
                                for q in range(lo, hi):
                                    low[line + q] = widen(x[source + q * step])
                        else:
                            for q0 in range(lo, hi, 16):
                                q1 = min(q0 + 16, hi)
                                for cc in range(channel_run):
                                    to = line + cc * channel_elems
                                    for q in range(q0, q1):
                                        low[to + q] = widen(x[source + q * step + cc])

    return lower


@cache
def _gemm_task(dtype: str, mr: int, nv: int, vl: int, packed: bool):
    """One strip of one image, depth and group, for one chunk of output channels."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(_LOW)
    tile_bytes, row_bytes = stack(mr * nv * vl * acc_bytes), stack(mr * 8)
    store, lower = tile_store(dtype, compute), _lower(dtype)
    a_step = mr * acc_bytes if packed else None
    micro1, micro2, micro3, micro4 = (
        micro_kernel(compute, mr, min(v, nv), vl, a_step, None, False) for v in (1, 2, 3, 4)
    )

    def strip(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        chunk, rest = index % f.chunks, index // f.chunks
        first_row, rest = rest % f.strips * f.strip_rows, rest // f.strips
        i_d, rest = rest % f.count_d, rest // f.count_d
        g, n = rest % f.groups, rest // f.groups
        rows = min(f.strip_rows, f.count_h - first_row)
        pixels = rows * f.count_w
        scratch = a.workspace + f.scratch_offset + worker * f.scratch_bytes
        lower(pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize, scratch, f, i_d, first_row, rows)
        pixel_offsets = scratch + f.pixels_offset
        base = (f.start_d + i_d * f.out_step_d) * f.out_d + f.start_w * f.out_w
        for i in range(rows):
            line = base + (f.start_h + (first_row + i) * f.out_step_h) * f.out_h
            for j in range(f.count_w):
                i64(pixel_offsets)[i * f.count_w + j] = line + j * f.out_step_w * f.out_w
        out = pointers[f.out_pointer] + (n * f.out_n + g * f.out_g) * itemsize
        bias = pointers[f.bias_pointer] + g * f.c_out * itemsize if f.bias_pointer >= 0 else 0
        residual = (
            pointers[f.residual_pointer] + (n * f.out_n + g * f.out_g) * itemsize if f.residual_pointer >= 0 else 0
        )
        tile, row_slot = tile_bytes(), row_bytes()
        blocks = (f.c_out + mr - 1) // mr
        for block in range(chunk * f.chunk_blocks, min(blocks, (chunk + 1) * f.chunk_blocks)):
            first = block * mr
            channels = min(mr, f.c_out - first)
            for m in range(mr):
                if packed:
                    i64(row_slot)[m] = (
                        a.workspace + f.packed_offset + (g * blocks + block) * f.panel_bytes + m * acc_bytes
                    )
                else:
                    o = first + min(m, channels - 1)
                    i64(row_slot)[m] = pointers[f.w_pointer] + (g * f.w_g + o * f.w_o) * itemsize
            for p in range(0, pixels, nv * vl):
                lanes = min(nv * vl, pixels - p)
                vectors = (lanes + vl - 1) // vl
                b = scratch + p * acc_bytes
                if vectors == nv:
                    micro4(row_slot, f.w_offsets, b, f.low_offsets, f.k_len, tile)
                elif vectors == 1:
                    micro1(row_slot, f.w_offsets, b, f.low_offsets, f.k_len, tile)
                elif vectors == 2:
                    micro2(row_slot, f.w_offsets, b, f.low_offsets, f.k_len, tile)
                else:
                    micro3(row_slot, f.w_offsets, b, f.low_offsets, f.k_len, tile)
                bias_here = bias + first * itemsize if bias else 0
                flags = (f.activation, bias_here, True, residual, f.read_out)
                store(
                    tile, vectors * vl, channels, lanes, out, f.channel_offsets + first * 8,
                    pixel_offsets + p * 8, f.contiguous, flags, a.alpha, a.beta,
                )  # fmt: skip

    return compile_task(strip, (dtype, mr, nv, vl, packed), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How one gather is cut into tasks, and what a worker's scratch holds."""

    strip_rows: int
    strips: int
    chunks: int
    chunk_blocks: int
    row_phases: int
    plane_elems: int
    low_bytes: int
    scratch_bytes: int

    @property
    def pixels_offset(self) -> int:
        return self.low_bytes


def _plan(problem: ConvProblem, geo: Geometry, gather: Gather, config: Config, device: Device) -> _Plan:
    acc_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    height, width = gather.h.count, gather.w.count
    u = gather.h.in_step
    row_phases, halo = min(u, gather.h.span + 1), gather.h.span // u
    columns = geo.c_in * len(gather.d.taps) * len(gather.w.taps) * row_phases * width
    fits = int(device.l2_bytes * _SCRATCH_SHARE) // max(1, columns * acc_bytes) - halo
    strips = ceil(height / min(height, max(1, fits)))
    outer = geo.n * geo.groups * gather.d.count
    wanted = device.threads * _TASKS_PER_THREAD
    min_rows = ceil(2 * config.nv * device.vector_bytes // acc_bytes / width)
    while outer * strips < wanted and ceil(height / (strips + 1)) >= min_rows:
        strips += 1
    strip_rows = ceil(height / strips)
    strips = ceil(height / strip_rows)
    blocks = ceil(geo.c_out / config.mr)
    chunks = min(ceil(wanted / (outer * strips)), max(1, blocks // 2))
    chunk_blocks = ceil(blocks / chunks)
    plane = row_phases * (strip_rows + halo) * width
    slack = 4 * device.vector_bytes
    low_bytes = columns // (row_phases * width) * plane * acc_bytes + slack
    low_bytes = ceil(low_bytes / 64) * 64
    return _Plan(
        strip_rows=strip_rows,
        strips=strips,
        chunks=ceil(blocks / chunk_blocks),
        chunk_blocks=chunk_blocks,
        row_phases=row_phases,
        plane_elems=plane,
        low_bytes=low_bytes,
        scratch_bytes=low_bytes + ceil(strip_rows * width * 8 / 64) * 64,
    )


def _low_offsets(geo: Geometry, gather: Gather, plan: _Plan, acc_bytes: int) -> np.ndarray:
    """Byte offset in the lowered strip of each k = (c, t, r, s)."""
    taps_t, taps_s = len(gather.d.taps), len(gather.w.taps)
    phase_rows = plan.plane_elems // (plan.row_phases * gather.w.count)
    relative = np.array([offset - gather.h.low for _, offset in gather.h.taps], np.int64)
    u = gather.h.in_step
    rows = (relative % u * phase_rows + relative // u) * gather.w.count
    channel = np.arange(geo.c_in)[:, None, None, None] * (taps_t * taps_s * plan.plane_elems)
    depth = np.arange(taps_t)[:, None, None] * (taps_s * plan.plane_elems)
    column = np.arange(taps_s) * plan.plane_elems
    return ((channel + depth + rows[:, None] + column) * acc_bytes).astype(np.int32).reshape(-1)


def _columns(axis: Axis) -> np.ndarray:
    """(offset, first and end of the outputs inside the image) of each column tap."""
    rows = []
    for _, offset in axis.taps:
        low = min(max(0, ceil(-offset / axis.in_step)), axis.count)
        high = min(axis.count, ceil((axis.in_extent - offset) / axis.in_step))
        rows.append((offset, low, max(low, high)))
    return np.array(rows, np.int64).reshape(-1, 3)


class PixelGemm(Candidate[Config]):
    """Implicit GEMM with output pixels in the vector lanes."""

    provider, algorithm, algo = "cpu", "pixel_gemm", "small"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Device) -> Support:
        geo = geometry(problem)
        w_bytes = geo.w_strides[0] * geo.groups * ITEMSIZE[problem.dtype]
        if w_bytes >= 1 << 31:
            return Support(False, f"the filter has {w_bytes} bytes: offsets are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Device) -> tuple[Config, ...]:
        tiles = ((6, 4), (8, 3), (12, 2)) if device.isa == "avx512" else ((6, 2), (4, 3))
        geo = geometry(problem)
        in_place = problem.dtype in ("f32", "f64") and all(reads_in_order(geo, g) for g in geo.gathers)
        return tuple(Config(mr, nv, packed) for packed in ((False, True) if in_place else (True,)) for mr, nv in tiles)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Device) -> int:
        geo = geometry(problem)
        packed = sum(packed_bytes(geo, g, problem.dtype, config.mr) for g in geo.gathers) if config.packed else 0
        return packed + device.threads * max(_plan(problem, geo, g, config, device).scratch_bytes for g in geo.gathers)

    def estimate(self, problem: ConvProblem, config: Config, device: Device) -> float:
        return problem.flops / (device.threads * 1e5)

    def prepare(self, problem: ConvProblem, config: Config, device: Device) -> Program:
        geo = geometry(problem)
        phases: list[Phase] = []
        keep: list[np.ndarray] = []
        workspace_offset = 0
        sizes = [packed_bytes(geo, g, problem.dtype, config.mr) if config.packed else 0 for g in geo.gathers]
        for gather, size in zip(geo.gathers, sizes, strict=True):
            if size:
                phase, arrays = pack_phase(geo, gather, problem.dtype, config.mr, workspace_offset)
                phases.append(phase)
                keep += arrays
            phase, arrays = self._phase(problem, geo, gather, config, device, workspace_offset, sum(sizes))
            phases.append(phase)
            keep += arrays
            workspace_offset += size
        return Program(phases, keep)

    def _phase(
        self,
        problem: ConvProblem,
        geo: Geometry,
        gather: Gather,
        config: Config,
        device: Device,
        packed_offset: int,
        scratch_offset: int,
    ) -> tuple[Phase, list[np.ndarray]]:
        compute = DEFAULT_COMPUTE[problem.dtype]
        plan = _plan(problem, geo, gather, config, device)
        w_offsets = (filter_offsets(geo, gather) * ITEMSIZE[problem.dtype]).astype(np.int32).reshape(-1)
        low_offsets = _low_offsets(geo, gather, plan, ITEMSIZE[compute])
        channels = np.arange(geo.c_out, dtype=np.int64) * geo.out_strides[2]
        table_t = np.array([offset for _, offset in gather.d.taps], np.int64)
        table_s = _columns(gather.w)
        step = gather.w.out_step * geo.out_strides[5]
        row = gather.h.out_step * geo.out_strides[4]
        ctx = filled(
            _LOW,
            **gather_values(problem, geo, gather),
            strips=plan.strips,
            strip_rows=plan.strip_rows,
            chunks=plan.chunks,
            chunk_blocks=plan.chunk_blocks,
            k_len=low_offsets.size,
            w_offsets=w_offsets.ctypes.data,
            low_offsets=low_offsets.ctypes.data,
            channel_offsets=channels.ctypes.data,
            row_phases=plan.row_phases,
            plane_elems=plan.plane_elems,
            table_t=table_t.ctypes.data,
            table_s=table_s.ctypes.data,
            low_h=gather.h.low,
            scratch_bytes=plan.scratch_bytes,
            scratch_offset=scratch_offset,
            packed_offset=packed_offset,
            panel_bytes=low_offsets.size * config.mr * ITEMSIZE[compute],
            contiguous=int(step == 1 and (row == gather.w.count or gather.h.count == 1)),
            pixels_offset=plan.pixels_offset,
        )
        vl = device.vector_bytes // ITEMSIZE[compute]
        task = _gemm_task(problem.dtype, config.mr, config.nv, vl, config.packed)
        tasks = geo.n * geo.groups * gather.d.count * plan.strips * plan.chunks
        return Phase(task, tasks, ctx), [w_offsets, low_offsets, channels, table_t, table_s]


FWD, BWD_DATA = PixelGemm("conv_fwd"), PixelGemm("conv_bwd_data")
