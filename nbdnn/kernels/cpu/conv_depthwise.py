"""Depthwise convolution: one filter a channel, forward and bwd_data, planar and interleaved, 2-D and 3-D.

    y[n, c, p, q] = sum over r, s of  x[n, c, p*u + r*d - pad, q*u + s*d - pad] * w[c, r, s]

Nothing is copied and every element is read from memory once. Planar (NCHW): a task is a plane; the lanes are pixels of
a row and borders are masks. Interleaved (NHWC): a task is a band of rows; the lanes are channels, and a few
neighbouring pixels share each weight that is loaded. Both finish a few rows in first-level cache before they store.
Traffic: x, w and y once. Accumulates in float32 (float64), one rounding a step. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

import numpy as np
from numba import float32, float64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Device
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.depthwise_vector import PLANAR_BLOCK, interleaved_pixels, planar_block, planar_rows
from nbdnn.kernels.cpu.epilogue import is_finished, store_kind, tile_store
from nbdnn.kernels.cpu.geometry import (
    GATHER_FIELDS,
    Axis,
    Gather,
    Geometry,
    column_table,
    gather_values,
    geometry,
    tap_table,
)
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE, ConvProblem

# Rows finished before they are stored, one column of vectors after another: more would read the plane against its
# order and leave the hardware's prefetcher behind.
_TILE_ROWS, _PLANE_BYTES = 2 * PLANAR_BLOCK, 2 << 10
_TILE_PIXELS, _TILE_BYTES = 64, 8 << 10  # interleaved pixels finished before they are stored
_TASKS_PER_THREAD = 8
_PIXELS, _VECTORS = 4, 2  # of an interleaved tile: 8 accumulators hide the latency of multiply-add
_MAX_TAPS = 1024
_MAX_BLOCK_TAPS = 25  # weights kept in registers, beside the accumulators of a block
_NS_PER_BYTE = 0.05  # of the operands, one thread

_PARAMS = record(
    *GATHER_FIELDS,
    *("bands", "band_rows", "tile_rows", "width_pitch"),
    # column_table: the table of that name, then each column tap's place in the filter.
    *("depth_table", "row_table", "column_table"),
    *("weights_offset", "weights_bytes", "entries_bytes", "worker_offset", "worker_bytes"),
    *("row_offsets", "lane_offsets", "contiguous", "finished"),
)


@cache
def _planar_task(dtype: str, vl: int, taps_h: int, taps_w: int, step_h: int, step: int, in_blocks: bool):
    """A band of rows of one plane: index = ((n * groups + g) * depth + d) * bands + band."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, widen = ITEMSIZE[dtype], ITEMSIZE[compute], WIDEN[dtype]
    data, acc_of, i64, args_at, params_at = (
        pointer(dtype), pointer(compute), pointer("i64"), struct(ARGS), struct(_PARAMS),
    )  # fmt: skip
    rows_of, store = planar_rows(dtype, compute, vl, taps_w, step), tile_store(dtype, compute, vl)
    blocks_of = planar_block(dtype, compute, vl, taps_h, taps_w, step_h, step) if in_blocks else None

    def plane(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        band, rest = index % f.bands, index // f.bands
        depth, rest = rest % f.count_d, rest // f.count_d
        g, n = rest % f.groups, rest // f.groups
        entries = a.workspace + f.worker_offset + worker * f.worker_bytes
        weights = entries + f.entries_bytes
        tile = weights + f.weights_bytes
        w = data(pointers[f.w_pointer])
        n_entries = 0
        for t in range(f.taps_d):
            tap_d, d = i64(f.depth_table)[2 * t], depth * f.in_step_d + i64(f.depth_table)[2 * t + 1]
            if d < 0 or d >= f.extent_d:
                continue
            for r in range(f.taps_h):
                tap_h, h = i64(f.row_table)[2 * r], i64(f.row_table)[2 * r + 1]
                i64(entries)[2 * n_entries] = h
                i64(entries)[2 * n_entries + 1] = d * f.in_d * itemsize
                for s in range(taps_w):
                    tap_w = i64(f.column_table)[3 * taps_w + s]
                    value = w[g * f.w_g + tap_d * f.w_t + tap_h * f.w_r + tap_w * f.w_s]
                    acc_of(weights)[n_entries * taps_w + s] = widen(value)
                n_entries += 1
        x = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        at = n * f.out_n + g * f.out_g + (f.start_d + depth * f.out_step_d) * f.out_d
        bias = pointers[f.bias_pointer] + g * itemsize if f.bias_pointer >= 0 else 0
        for first in range(band * f.band_rows, min(f.count_h, (band + 1) * f.band_rows), f.tile_rows):
            rows = min(f.tile_rows, min(f.count_h, (band + 1) * f.band_rows) - first)
            if in_blocks:
                top = first * step_h + i64(f.row_table)[1]
                pitch, tile_pitch = f.in_h * itemsize, f.width_pitch * acc_bytes
                blocks_of(x, pitch, top, rows, f.extent_h, weights, f.column_table, f.count_w, tile, tile_pitch)
            else:
                rows_of(
                    x, f.in_h * itemsize, first, rows, f.in_step_h, f.extent_h, entries, n_entries, weights,
                    f.column_table, f.count_w, tile, f.width_pitch * acc_bytes,
                )  # fmt: skip
            start = (at + (f.start_h + first * f.out_step_h) * f.out_h) * itemsize
            residual = pointers[f.residual_pointer] + start if f.residual_pointer >= 0 else 0
            flags = (f.activation, bias, 0, 0, residual, f.read_out)
            store(
                tile, f.width_pitch, rows, f.count_w, pointers[f.out_pointer] + start, f.row_offsets, f.lane_offsets,
                f.contiguous, flags, a.alpha, a.beta,
            )  # fmt: skip

    return compile_task(plane, (dtype, vl, taps_h, taps_w, step_h, step, in_blocks), fastmath=FASTMATH)


@cache
def _weights_task(dtype: str, vl: int):
    """Interleaved weights [tap][channel], zero beyond the last channel; index = tap."""
    compute = DEFAULT_COMPUTE[dtype]
    data, acc_of, i64, args_at, params_at = (
        pointer(dtype), pointer(compute), pointer("i64"), struct(ARGS), struct(_PARAMS),
    )  # fmt: skip
    widen, zero = WIDEN[dtype], (float32 if compute == "f32" else float64)(0.0)

    def pack_tap(args, ctx, index, worker):
        f = params_at(ctx)
        s, rest = index % f.taps_w, index // f.taps_w
        r, t = rest % f.taps_h, rest // f.taps_h
        w = data(i64(args)[f.w_pointer])
        at = i64(f.depth_table)[2 * t] * f.w_t + i64(f.row_table)[2 * r] * f.w_r
        at += i64(f.column_table)[3 * f.taps_w + s] * f.w_s
        to = acc_of(args_at(args).workspace + f.weights_offset + index * f.weights_bytes)
        for g in range(f.groups):
            to[g] = widen(w[g * f.w_g + at])
        for g in range(f.groups, (f.groups + vl - 1) // vl * vl):
            to[g] = zero

    return compile_task(pack_tap, (dtype, vl))


@cache
def _interleaved_task(dtype: str, vl: int, taps_w: int, step: int):
    """A band of rows, all channels: index = (n * depth + d) * bands + band. taps_w is 1 where taps are not adjacent."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(_PARAMS)
    store, row_slots = tile_store(dtype, compute, vl), stack(8 * _TILE_PIXELS)
    several, several_one = (interleaved_pixels(dtype, compute, vl, _PIXELS, v, taps_w, step) for v in (_VECTORS, 1))
    single, single_one = (interleaved_pixels(dtype, compute, vl, 1, v, 1, 1) for v in (_VECTORS, 1))

    @njit(**DEVICE)
    def tap_entries(ctx, entries, i, depth, j, width):
        """Entries of output row i: of the taps that pixel j reaches, or where width > 1 of whole rows of taps."""
        f, n_entries = params_at(ctx), 0
        table = i64(f.column_table)
        for t in range(f.taps_d):
            d = depth * f.in_step_d + i64(f.depth_table)[2 * t + 1]
            if d < 0 or d >= f.extent_d:
                continue
            for r in range(f.taps_h):
                h = i * f.in_step_h + i64(f.row_table)[2 * r + 1]
                if h < 0 or h >= f.extent_h:
                    continue
                for s in range(0, f.taps_w, width):
                    if table[3 * s + 1] <= j < table[3 * s + 2]:
                        at = (d * f.in_d + h * f.in_h + table[3 * s] * f.in_w) * itemsize
                        i64(entries)[2 * n_entries] = at
                        i64(entries)[2 * n_entries + 1] = ((t * f.taps_h + r) * f.taps_w + s) * f.weights_bytes
                        n_entries += 1
        return n_entries

    @njit(**DEVICE)
    def pixels(ctx, run, x, entries, n_entries, weights, tile, pitch):
        """`run` output pixels, all channels, `pitch` bytes apart."""
        f = params_at(ctx)
        pixel_bytes, tap_bytes, g = f.in_w * itemsize, f.weights_bytes, 0
        while g < f.groups:
            left = f.groups - g
            at, w, to = x + g * itemsize, weights + g * acc_bytes, tile + g * acc_bytes
            if left > vl:
                lanes = min(left - vl, vl)
                if run == _PIXELS:
                    several(at, pixel_bytes, entries, n_entries, w, tap_bytes, lanes, to, pitch)
                else:
                    single(at, pixel_bytes, entries, n_entries, w, tap_bytes, lanes, to, pitch)
                g += _VECTORS * vl
            else:
                if run == _PIXELS:
                    several_one(at, pixel_bytes, entries, n_entries, w, tap_bytes, left, to, pitch)
                else:
                    single_one(at, pixel_bytes, entries, n_entries, w, tap_bytes, left, to, pitch)
                g += vl

    def band(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        band_index, rest = index % f.bands, index // f.bands
        depth, n = rest % f.count_d, rest // f.count_d
        row_entries = a.workspace + f.worker_offset + worker * f.worker_bytes
        edge_entries, tile = row_entries + f.entries_bytes // 2, row_entries + f.entries_bytes
        weights, pitch, row_slot = a.workspace + f.weights_offset, f.width_pitch, row_slots()
        residual = pointers[f.residual_pointer] if f.residual_pointer >= 0 else 0
        bias = pointers[f.bias_pointer] if f.bias_pointer >= 0 else 0
        flags = (f.activation, bias, 0, 1, residual, f.read_out)
        table, finished = i64(f.column_table), f.finished and a.alpha == 1.0
        # Pixels [inner, end) reach every column tap.
        inner, end = 0, f.count_w
        for s in range(f.taps_w):
            inner, end = max(inner, table[3 * s + 1]), min(end, table[3 * s + 2])
        for i in range(band_index * f.band_rows, min(f.count_h, (band_index + 1) * f.band_rows)):
            out_row = n * f.out_n + (f.start_d + depth * f.out_step_d) * f.out_d
            out_row += (f.start_h + i * f.out_step_h) * f.out_h + f.start_w * f.out_w
            n_row = tap_entries(ctx, row_entries, i, depth, inner, taps_w)
            j = ready = 0
            while j < f.count_w:
                x = pointers[f.in_pointer] + (n * f.in_n + j * f.in_step_w * f.in_w) * itemsize
                to, to_pitch = tile + ready * pitch * acc_bytes, pitch * acc_bytes
                if finished:
                    to_pitch = f.out_step_w * f.out_w * itemsize
                    to = pointers[f.out_pointer] + out_row * itemsize + j * to_pitch
                run = _PIXELS if inner <= j and j + _PIXELS <= end else 1
                if run == _PIXELS:
                    pixels(ctx, run, x, row_entries, n_row, weights, to, to_pitch)
                else:
                    n_edge = tap_entries(ctx, edge_entries, i, depth, j, 1)
                    pixels(ctx, run, x, edge_entries, n_edge, weights, to, to_pitch)
                j += run
                if finished:
                    continue
                for p in range(run):
                    i64(row_slot)[ready + p] = out_row + (j - run + p) * f.out_step_w * f.out_w
                ready += run
                if j == f.count_w or ready + _PIXELS > f.tile_rows:
                    store(
                        tile, pitch, ready, f.groups, pointers[f.out_pointer], row_slot, f.lane_offsets, f.contiguous,
                        flags, a.alpha, a.beta,
                    )  # fmt: skip
                    ready = 0

    return compile_task(band, (dtype, vl, taps_w, step), fastmath=FASTMATH)


def _adjacent(axis: Axis) -> bool:
    """Whether the taps, in their order, read neighbouring inputs."""
    return [offset for _, offset in axis.taps] == list(range(axis.low, axis.low + len(axis.taps)))


class Depthwise(Candidate[NoConfig]):
    """Depthwise convolution, forward or bwd_data."""

    provider, algorithm = "cpu", "depthwise"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Device) -> Support:
        if not (problem.groups == problem.c == problem.k):
            return Support(False, f"channels {problem.c}, {problem.k} and groups {problem.groups} are not all equal")
        if prod(problem.filter) > _MAX_TAPS:
            return Support(False, f"the filter has {prod(problem.filter)} taps, more than {_MAX_TAPS}")
        step = problem.stride[-1] if self.op == "conv_fwd" else 1
        if not problem.channels_last and step not in (1, 2, 4):
            return Support(False, f"the column stride {step} is not 1, 2 or 4")
        return YES

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Device) -> int:
        return _sizes(problem, device)["total"]

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Device) -> float:
        vectors = problem.flops / 2 / device.lanes(DEFAULT_COMPUTE[problem.dtype])
        return kernel_us(device, vectors, problem.min_bytes * _NS_PER_BYTE, device.threads, efficiency=0.3)

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Device) -> Program:
        geo = geometry(problem)
        vl = device.lanes(DEFAULT_COMPUTE[problem.dtype])
        phases: list[Phase] = []
        keep: list[np.ndarray] = []
        for gather in (gather.in_image_order() for gather in geo.gathers):
            ctx, arrays, bands = _parameters(problem, geo, gather, device)
            keep += arrays
            outer = geo.n * gather.d.count * bands
            if problem.channels_last:
                taps = len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
                phases.append(Phase(_weights_task(problem.dtype, vl), taps, ctx))
                taps_w = max(1, len(gather.w.taps)) if _adjacent(gather.w) else 1
                task = _interleaved_task(problem.dtype, vl, taps_w, gather.w.in_step)
                phases.append(Phase(task, outer, ctx))
            else:
                h, w = gather.h, gather.w
                flat = gather.d.taps == ((0, 0),) and gather.d.in_step == 1
                in_blocks = flat and _adjacent(h) and 0 < len(h.taps) * len(w.taps) <= _MAX_BLOCK_TAPS
                task = _planar_task(problem.dtype, vl, len(h.taps), len(w.taps), h.in_step, w.in_step, in_blocks)
                phases.append(Phase(task, outer * geo.groups, ctx))
        return Program(phases, keep)


def _sizes(problem: ConvProblem, device: Device) -> dict[str, int]:
    """Bytes of the workspace's parts: one filter, then each worker's taps, weights and tile."""
    acc_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    taps, vl = prod(problem.filter), device.vector_bytes // acc_bytes
    width = problem.spatial[-1] if problem.op == "conv_bwd_data" else problem.out_spatial[-1]
    entries = 2 * ceil(taps * 16 / 64) * 64  # of a row, and of a pixel at its edge
    if problem.channels_last:
        pitch = ceil(problem.groups / vl) * vl
        tile_rows = min(_TILE_PIXELS, max(_PIXELS, _TILE_BYTES // (pitch * acc_bytes)))
        weights, shared, tile = 0, ceil(taps * pitch * acc_bytes / 64) * 64, tile_rows * pitch * acc_bytes
    else:
        pitch = ceil(width / vl) * vl
        tile_rows = max(_TILE_ROWS, _PLANE_BYTES // (pitch * acc_bytes) // PLANAR_BLOCK * PLANAR_BLOCK)
        weights, shared, tile = ceil(taps * acc_bytes / 64) * 64, 0, tile_rows * pitch * acc_bytes
    worker = ceil((entries + weights + tile) / 64) * 64
    return {
        "entries": entries,
        "weights": weights,
        "pitch": pitch,
        "tile_rows": tile_rows,
        "worker": worker,
        "shared": shared,
        "total": shared + device.threads * worker,
    }


def _parameters(
    problem: ConvProblem, geo: Geometry, gather: Gather, device: Device
) -> tuple[np.ndarray, list[np.ndarray], int]:
    """(ctx, the arrays that it needs alive, bands of rows)."""
    sizes, acc_bytes = _sizes(problem, device), ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    outer = geo.n * gather.d.count * (1 if problem.channels_last else geo.groups)
    wanted = ceil(device.threads * _TASKS_PER_THREAD / outer)
    band_rows = ceil(gather.h.count / min(gather.h.count, wanted))
    bands = ceil(gather.h.count / band_rows)
    depth_table, row_table = tap_table(gather.d), tap_table(gather.h)
    columns = np.concatenate([column_table(gather.w).reshape(-1), tap_table(gather.w)[:, 0]])
    rows = np.arange(sizes["tile_rows"], dtype=np.int64) * gather.h.out_step * geo.out_strides[4]
    if problem.channels_last:
        lanes = np.arange(geo.groups, dtype=np.int64) * geo.out_strides[1]
    else:
        lanes = (gather.w.out_start + np.arange(gather.w.count) * gather.w.out_step) * geo.out_strides[5]
    kind = store_kind(problem, bool((np.diff(lanes) == 1).all()))
    ctx = filled(
        _PARAMS,
        **gather_values(problem, geo, gather),
        bands=bands,
        band_rows=band_rows,
        tile_rows=sizes["tile_rows"],
        width_pitch=sizes["pitch"],
        depth_table=depth_table.ctypes.data,
        row_table=row_table.ctypes.data,
        column_table=columns.ctypes.data,
        weights_offset=0,
        weights_bytes=sizes["pitch"] * acc_bytes if problem.channels_last else sizes["weights"],
        entries_bytes=sizes["entries"],
        worker_offset=sizes["shared"],
        worker_bytes=sizes["worker"],
        row_offsets=rows.ctypes.data,
        lane_offsets=lanes.ctypes.data,
        contiguous=kind,
        finished=int(
            problem.channels_last
            and is_finished(problem, kind)
            and geo.groups % device.lanes(DEFAULT_COMPUTE[problem.dtype]) == 0
        ),
    )
    return ctx, [depth_table, row_table, columns, rows, lanes], bands


FWD, BWD_DATA = Depthwise("conv_fwd"), Depthwise("conv_bwd_data")
