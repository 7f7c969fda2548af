"""Winograd convolution F(m x m, 3x3), m = 2 or 4: fewer multiplications for 3x3 filters of stride 1.

    Y = A^T [ sum over c of (G w G^T) * (B^T x B) ] A        for every m x m tile of outputs, products elementwise

    x tile (m+2)^2 --B^T x B--> V[xi, c, tile] \\
                                                 M[xi, o, tile] = U[xi] V[xi], (m+2)^2 products --A^T M A--> m x m of y
    w 3x3          --G w G^T--> U[xi, o, c]    /

One phase transforms the filters. A task then takes a strip of tile rows: lowers it in m column phases, so that the
tiles of a row fill the vector lanes, transforms it into V in the worker's scratch, and for each block of output
channels runs the products and the output transform while both are in cache. Multiplications: (m+2)^2 / (9 m^2) of the
direct method, 0.44 for m = 2 and 0.25 for m = 4. Depth taps (3-D) are further input channels. Error: of the order of
eps * sqrt(C) times the largest root sum of squares in the image. Source: Lavin and Gray, arXiv:1509.09308, with
the points of cook_toom.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil

import numpy as np
from numba import float32, float64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Device
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cook_toom import filtering
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import Axis, Gather, Geometry, geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_pixels import LOW_FIELDS, StripPlan, low_values, lower_strip
from nbdnn.kernels.cpu.micro_kernel import sandwich, tile_product
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE, ConvProblem

_TASKS_PER_THREAD = 4
_SCRATCH_SHARE = 0.5  # of the second-level cache for the V of one strip
# Nanoseconds an element of U, V and M: transforms, and the traffic of U, which is read from memory.
_FILTER_NS, _INPUT_NS, _OUTPUT_NS = 0.6, 0.2, 0.2
_CHANNELS_AT_ONCE = 16  # lowered before they are transformed, in first-level cache


_FILTER = record(
    *("w_pointer", "c_in", "c_out", "taps_d", "w_g", "w_o", "w_i", "table_t", "table_rs", "rows", "columns"),
    *("u_offset", "u_xi_bytes", "u_pitch", "u_depth_bytes"),
)
_PARAMS = record(
    *LOW_FIELDS,
    *("tile_rows", "tile_columns", "strip_tile_rows", "image_rows", "image_columns"),
    *("load_rows", "load_columns", "product_rows", "product_columns", "row_offsets", "lane_offsets"),
    *("u_offset", "u_xi_bytes", "u_pitch", "u_offsets", "v_offset", "v_bytes", "v_xi_bytes", "v_pitch", "v_offsets"),
    *("m_offset", "m_bytes", "m_xi_bytes"),
)


@cache
def _filter_task(dtype: str, vl: int, m: int):
    """U[group, xi, o, t, c] of one output channel and depth tap: index = (group*c_out + o) * depth taps + t."""
    compute = DEFAULT_COMPUTE[dtype]
    data, scratch, i64 = pointer(dtype), pointer(compute), pointer("i64")
    args_at, params_at, nine = struct(ARGS), struct(_FILTER), stack(9 * vl * ITEMSIZE[compute])
    widen, itemsize, acc_bytes = WIDEN[dtype], ITEMSIZE[dtype], ITEMSIZE[compute]
    transform, zero = (
        sandwich(compute, vl, filtering(m, 3).filter, False),
        (float32 if compute == "f32" else float64)(0.0),
    )
    alpha = m + 2

    def transform_filters(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        t, row = index % f.taps_d, index // f.taps_d
        g, o = row // f.c_out, row % f.c_out
        w = data(i64(args)[f.w_pointer] + (g * f.w_g + o * f.w_o + i64(f.table_t)[t]) * itemsize)
        taps, buffer = i64(f.table_rs), nine()
        target = a.workspace + f.u_offset + g * alpha * alpha * f.u_xi_bytes + o * f.u_pitch + t * f.u_depth_bytes
        for c in range(0, f.c_in, vl):
            lanes = min(vl, f.c_in - c)
            for tap in range(9):
                for j in range(lanes):
                    scratch(buffer)[tap * vl + j] = widen(w[(c + j) * f.w_i + taps[tap]])
                for j in range(lanes, vl):
                    scratch(buffer)[tap * vl + j] = zero
            transform(buffer, f.rows, f.columns, target + c * acc_bytes, alpha * f.u_xi_bytes, f.u_xi_bytes)

    return compile_task(transform_filters, (dtype, vl, m), fastmath=FASTMATH)


@cache
def _input_transform(dtype: str, vl: int, m: int):
    """Compiled-in function: V[xi, t, c, tile] of a strip for a range of channels; low is first-level-cache scratch."""
    compute = DEFAULT_COMPUTE[dtype]
    params_at, acc_bytes = struct(_PARAMS), ITEMSIZE[compute]
    lower, transform, alpha = lower_strip(dtype, vl), sandwich(compute, vl, filtering(m, 3).input, False), m + 2

    @njit(**DEVICE)
    def transform_input(image, low, v, ctx, depth, first, tile_rows, first_channel, end_channel):
        f = params_at(ctx)
        channel_bytes = f.taps_d * f.taps_w * f.plane_elems * acc_bytes
        for c0 in range(first_channel, end_channel, _CHANNELS_AT_ONCE):
            c1 = min(end_channel, c0 + _CHANNELS_AT_ONCE)
            lower(image, low - c0 * channel_bytes, ctx, depth, first * m, tile_rows * m + 2, c0, c1)
            for c in range(c0, c1):
                for t in range(f.taps_d):
                    plane = low + (c - c0) * channel_bytes + t * f.taps_w * f.plane_elems * acc_bytes
                    target = v + (t * f.c_in + c) * f.v_pitch
                    for i in range(tile_rows):
                        # The lanes beyond a tile row are overwritten by the next one.
                        for j in range(0, f.tile_columns, vl):
                            transform(
                                plane + (i * m * f.count_w + j) * acc_bytes, f.load_rows, f.load_columns,
                                target + (i * f.tile_columns + j) * acc_bytes, alpha * f.v_xi_bytes, f.v_xi_bytes,
                            )  # fmt: skip

    return transform_input


@cache
def _locate():
    """Compiled-in function: (image, group, depth, first tile row, tile rows, address of V) of a strip."""
    params_at = struct(_PARAMS)

    @njit(**DEVICE)
    def locate(ctx, index, workspace, worker):
        f = params_at(ctx)
        first = index % f.strips * f.strip_tile_rows
        rest = index // f.strips
        depth, rest = rest % f.count_d, rest // f.count_d
        v = workspace + f.v_offset + (index if f.shared else worker) * f.v_bytes
        return rest // f.groups, rest % f.groups, depth, first, min(f.strip_tile_rows, f.tile_rows - first), v

    return locate


@cache
def _input_task(dtype: str, vl: int, m: int):
    """A range of channels of one strip, where strips are shared: index = strip * parts + part."""
    i64, args_at, params_at, itemsize = pointer("i64"), struct(ARGS), struct(_PARAMS), ITEMSIZE[dtype]
    transform_input, locate = _input_transform(dtype, vl, m), _locate()

    def transform_part(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        n, g, depth, first, tile_rows, v = locate(ctx, index // f.parts, a.workspace, worker)
        image = i64(args)[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        low = a.workspace + f.scratch_offset + worker * f.scratch_bytes
        c = index % f.parts * f.part_channels
        transform_input(image, low, v, ctx, depth, first, tile_rows, c, min(f.c_in, c + f.part_channels))

    return compile_task(transform_part, (dtype, vl, m), fastmath=FASTMATH)


@cache
def _multiply_task(dtype: str, vl: int, m: int, mr: int, nv: int):
    """One strip, one chunk of output channels: products, output transform, store."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, alpha = ITEMSIZE[dtype], ITEMSIZE[compute], m + 2
    i64, args_at, params_at, row_slots = pointer("i64"), struct(ARGS), struct(_PARAMS), stack(mr * 8)
    transform_input, locate, store = _input_transform(dtype, vl, m), _locate(), tile_store(dtype, compute, vl)
    transform_output = sandwich(compute, vl, filtering(m, 3).output, True)
    product = tile_product(compute, mr, nv, vl, None, None, False)

    @njit(**DEVICE)
    def multiply(ctx, u, v, products, first, channels, vectors):
        """M[xi, o, tile] for mr output channels from `first`; the rows beyond `channels` repeat the last one."""
        f, rows = params_at(ctx), row_slots()
        tiles = (vectors + nv - 1) // nv
        for xi in range(alpha * alpha):
            for o in range(mr):
                i64(rows)[o] = u + xi * f.u_xi_bytes + (first + min(o, channels - 1)) * f.u_pitch
            for i in range(tiles):
                start, end = i * vectors // tiles, (i + 1) * vectors // tiles
                b = v + xi * f.v_xi_bytes + start * vl * acc_bytes
                to = products + xi * f.m_xi_bytes + start * vl * acc_bytes
                product(end - start, rows, f.u_offsets, b, f.v_offsets, f.k_len, to, f.v_pitch)

    def strip(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        chunk = index % f.chunks
        n, g, depth, first_tile, tile_rows, v = locate(ctx, index // f.chunks, a.workspace, worker)
        if not f.shared:
            image = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
            low = a.workspace + f.scratch_offset + worker * f.scratch_bytes
            transform_input(image, low, v, ctx, depth, first_tile, tile_rows, 0, f.c_in)
        u = a.workspace + f.u_offset + g * alpha * alpha * f.u_xi_bytes
        products = a.workspace + f.m_offset + worker * f.m_bytes
        line = products + alpha * alpha * f.m_xi_bytes
        pitch = (f.tile_columns + vl - 1) // vl * vl * m
        vectors = (tile_rows * f.tile_columns + vl - 1) // vl
        blocks = (f.c_out + mr - 1) // mr
        bias = pointers[f.bias_pointer] + g * f.c_out * itemsize if f.bias_pointer >= 0 else 0
        for block in range(chunk * f.chunk_blocks, min(blocks, (chunk + 1) * f.chunk_blocks)):
            first = block * mr
            channels = min(mr, f.c_out - first)
            multiply(ctx, u, v, products, first, channels, vectors)
            for o in range(channels):
                at = n * f.out_n + g * f.out_g + (first + o) * f.out_c + depth * f.out_d
                for i in range(tile_rows):
                    source = products + o * f.v_pitch + i * f.tile_columns * acc_bytes
                    for j in range(0, f.tile_columns, vl):
                        transform_output(
                            source + j * acc_bytes, f.product_rows, f.product_columns,
                            line + j * m * acc_bytes, pitch * acc_bytes, 0,
                        )  # fmt: skip
                    row = (first_tile + i) * m
                    start = (at + row * f.out_h) * itemsize
                    residual = pointers[f.residual_pointer] + start if f.residual_pointer >= 0 else 0
                    bias_here = bias + (first + o) * itemsize if bias else 0
                    flags = (f.activation, bias_here, 0, 0, residual, f.read_out)
                    store(
                        line, pitch, min(m, f.image_rows - row), f.image_columns, pointers[f.out_pointer] + start,
                        f.row_offsets, f.lane_offsets, f.contiguous, flags, a.alpha, a.beta,
                    )  # fmt: skip

    return compile_task(strip, (dtype, vl, m, mr, nv), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How the tiles are cut into strips and the output channels into chunks; byte sizes and workspace offsets."""

    geo: Geometry
    lowering: Gather
    low: StripPlan
    tile_rows: int
    tile_columns: int
    strip_tile_rows: int
    u_pitch: int
    u_xi_bytes: int
    v_pitch: int
    v_xi_bytes: int
    v_bytes: int
    m_xi_bytes: int
    m_bytes: int
    v_offset: int
    m_offset: int
    low_offset: int
    total_bytes: int


def _round_up(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple


@lru_cache(maxsize=256)
def _plan(problem: ConvProblem, m: int, mr: int, device: Device) -> _Plan:
    geo = geometry(problem)
    (gather,) = geo.gathers
    acc_bytes, threads = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]], device.threads
    vl, planes = device.vector_bytes // acc_bytes, (m + 2) ** 2
    tile_rows, tile_columns = ceil(gather.h.count / m), ceil(gather.w.count / m)
    depth_taps = len(gather.d.taps)
    k_len = geo.c_in * depth_taps
    # Fewer tiles than two vectors would leave the micro-kernel waiting for its own results.
    fits = max(2 * vl, int(device.l2_bytes * _SCRATCH_SHARE) // max(1, planes * k_len * acc_bytes))
    strip_tile_rows = ceil(tile_rows / ceil(tile_rows / max(1, min(tile_rows, fits // tile_columns))))
    strips = ceil(tile_rows / strip_tile_rows)
    total_strips = geo.n * geo.groups * gather.d.count * strips
    blocks = ceil(geo.c_out / mr)
    chunks = min(ceil(threads * _TASKS_PER_THREAD / total_strips), max(1, blocks // 2))
    chunk_blocks = ceil(blocks / chunks)
    plane = (strip_tile_rows * m + 2) * (tile_columns + 1)
    low_elems = min(_CHANNELS_AT_ONCE, geo.c_in) * depth_taps * m * plane
    low = StripPlan(
        strip_rows=strip_tile_rows * m + 2,
        strips=strips,
        total_strips=total_strips,
        chunks=ceil(blocks / chunk_blocks),
        chunk_blocks=chunk_blocks,
        parts=ceil(geo.c_in / _CHANNELS_AT_ONCE),
        row_phases=1,
        plane_elems=plane,
        scratch_bytes=_round_up(low_elems * acc_bytes + 2 * device.vector_bytes, 64),
    )
    lowering = Gather(
        gather.d,
        replace(gather.h, taps=((0, gather.h.low),), count=low.strip_rows),
        replace(gather.w, taps=tuple((j, gather.w.low + j) for j in range(m)), in_step=m, count=tile_columns + 1),
    )
    # A cache line more than the data a plane, or all planes would fall into the same cache sets.
    u_pitch = depth_taps * _round_up(geo.c_in, vl) * acc_bytes
    u_xi_bytes = geo.c_out * u_pitch
    v_pitch = _round_up(strip_tile_rows * tile_columns + vl - 1, vl) * acc_bytes
    v_xi_bytes, m_xi_bytes = k_len * v_pitch + 64, mr * v_pitch + 64
    m_bytes = planes * m_xi_bytes + _round_up(tile_columns, vl) * m * m * acc_bytes
    v_offset = _round_up(geo.groups * planes * u_xi_bytes, 64)
    m_offset = v_offset + planes * v_xi_bytes * (total_strips if low.shared else threads)
    low_offset = m_offset + threads * m_bytes
    return _Plan(
        geo, lowering, low, tile_rows, tile_columns, strip_tile_rows,
        u_pitch, u_xi_bytes, v_pitch, v_xi_bytes, planes * v_xi_bytes, m_xi_bytes, m_bytes,
        v_offset, m_offset, low_offset, low_offset + threads * low.scratch_bytes,
    )  # fmt: skip


def _filter_parameters(problem: ConvProblem, plan: _Plan, vl: int) -> tuple[np.ndarray, list[np.ndarray]]:
    geo, acc_bytes = plan.geo, ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    (gather,) = geo.gathers
    w_g, w_o, w_i, w_t, w_r, w_s = geo.w_strides
    table_t = np.array([tap * w_t for tap, _ in gather.d.taps], np.int64)
    table_rs = np.array([r * w_r + s * w_s for r in _by_offset(gather.h) for s in _by_offset(gather.w)], np.int64)
    rows, columns = np.arange(3) * 3 * vl * acc_bytes, np.arange(3) * vl * acc_bytes
    ctx = filled(
        _FILTER,
        w_pointer=geo.w_pointer,
        c_in=geo.c_in,
        c_out=geo.c_out,
        taps_d=len(gather.d.taps),
        w_g=w_g,
        w_o=w_o,
        w_i=w_i,
        table_t=table_t.ctypes.data,
        table_rs=table_rs.ctypes.data,
        rows=rows.ctypes.data,
        columns=columns.ctypes.data,
        u_offset=0,
        u_xi_bytes=plan.u_xi_bytes,
        u_pitch=plan.u_pitch,
        u_depth_bytes=plan.u_pitch // len(gather.d.taps),
    )
    return ctx, [table_t, table_rs, rows, columns]


def _tile_parameters(problem: ConvProblem, plan: _Plan, m: int) -> tuple[np.ndarray, list[np.ndarray]]:
    geo, acc_bytes = plan.geo, ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    (gather,) = geo.gathers
    alpha, depth_taps = np.arange(m + 2), len(gather.d.taps)
    values, keep = low_values(problem, geo, plan.lowering, plan.low)
    t, c = np.divmod(np.arange(geo.c_in * depth_taps), geo.c_in)
    tables = {
        "load_rows": alpha * (plan.tile_columns + 1) * acc_bytes,
        "load_columns": (alpha % m * plan.low.plane_elems + alpha // m) * acc_bytes,
        "product_rows": alpha * (m + 2) * plan.m_xi_bytes,
        "product_columns": alpha * plan.m_xi_bytes,
        "u_offsets": (t * (plan.u_pitch // depth_taps) + c * acc_bytes).astype(np.int32),
        "v_offsets": (np.arange(t.size) * plan.v_pitch).astype(np.int32),
        "row_offsets": np.arange(m) * geo.out_strides[4],
        "lane_offsets": np.arange(gather.w.count) * geo.out_strides[5],
    }
    values |= {name: table.ctypes.data for name, table in tables.items()} | {
        "k_len": t.size,
        "contiguous": int(geo.out_strides[5] == 1),
        "scratch_offset": plan.low_offset,
        "tile_rows": plan.tile_rows,
        "tile_columns": plan.tile_columns,
        "strip_tile_rows": plan.strip_tile_rows,
        "image_rows": gather.h.count,
        "image_columns": gather.w.count,
    }
    sizes = (
        "u_xi_bytes",
        "u_pitch",
        "v_offset",
        "v_bytes",
        "v_xi_bytes",
        "v_pitch",
        "m_offset",
        "m_bytes",
        "m_xi_bytes",
    )
    values |= {name: getattr(plan, name) for name in sizes} | {"u_offset": 0}
    return filled(_PARAMS, **values), [*keep, *tables.values()]


def _by_offset(axis: Axis) -> list[int]:
    """Taps in the order of the input they read."""
    return [tap for tap, _ in sorted(axis.taps, key=lambda pair: pair[1])]


class Winograd(Candidate[NoConfig]):
    """Winograd convolution with output tiles of m x m."""

    provider = "cpu"

    def __init__(self, op: str, m: int) -> None:
        self.op, self._m = op, m
        self.algorithm = f"winograd_{m}x{m}"
        self.algo = {2: "winograd", 4: "winograd_non_fused"}[m]

    def supports(self, problem: ConvProblem, device: Device) -> Support:
        if problem.filter[-2:] != (3, 3):
            return Support(False, f"the filter is {'x'.join(map(str, problem.filter))}, not 3x3")
        if any(u != 1 for u in problem.stride):
            return Support(False, f"stride {problem.stride} is not 1")
        if any(d != 1 for d in problem.dilation[-2:]):
            return Support(False, f"dilation {problem.dilation} is not 1")
        return YES

    def _tile(self, device: Device) -> tuple[int, int]:
        """Output channels by vectors of tiles in registers."""
        return (6, 4) if device.isa == "avx512" else (6, 2)

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Device) -> int:
        return _plan(problem, self._m, self._tile(device)[0], device).total_bytes

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Device) -> float:
        mr, _ = self._tile(device)
        plan = _plan(problem, self._m, mr, device)
        geo, low, planes = plan.geo, plan.low, (self._m + 2) ** 2
        vl = device.lanes(DEFAULT_COMPUTE[problem.dtype])
        k_len = geo.c_in * len(plan.lowering.d.taps)
        tiles = plan.strip_tile_rows * plan.tile_columns * low.total_strips
        vectors = ceil(plan.strip_tile_rows * plan.tile_columns / vl) * low.total_strips
        fmas = vectors * planes * ceil(geo.c_out / mr) * mr * k_len
        side_ns = geo.groups * geo.c_out * k_len * planes * _FILTER_NS + tiles * planes * (k_len * _INPUT_NS)
        side_ns += tiles * planes * geo.c_out * _OUTPUT_NS
        return kernel_us(device, fmas, side_ns, low.total_strips * low.chunks, 2 + low.shared)

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Device) -> Program:
        compute = DEFAULT_COMPUTE[problem.dtype]
        m, (mr, nv), vl = self._m, self._tile(device), device.lanes(compute)
        plan = _plan(problem, m, mr, device)
        geo, low = plan.geo, plan.low
        filters, keep = _filter_parameters(problem, plan, vl)
        tiles, more = _tile_parameters(problem, plan, m)
        filter_tasks = geo.groups * geo.c_out * len(plan.lowering.d.taps)
        phases = [Phase(_filter_task(problem.dtype, vl, m), filter_tasks, filters)]
        if low.shared:
            phases.append(Phase(_input_task(problem.dtype, vl, m), low.total_strips * low.parts, tiles))
        phases.append(Phase(_multiply_task(problem.dtype, vl, m, mr, nv), low.total_strips * low.chunks, tiles))
        return Program(phases, keep + more)


FWD_2X2, BWD_DATA_2X2 = Winograd("conv_fwd", 2), Winograd("conv_bwd_data", 2)
FWD_4X4, BWD_DATA_4X4 = Winograd("conv_fwd", 4), Winograd("conv_bwd_data", 4)
