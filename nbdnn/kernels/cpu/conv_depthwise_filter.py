"""Filter gradient of a depthwise convolution, planar and interleaved, 2-D and 3-D.

    dw[c, r, s] = sum over n, p, q of  dy[n, c, p, q] * x[n, c, p*u + r*d - pad, q*u + s*d - pad]

Planar (NCHW): a task is a channel; the lanes are pixels of a row, a row of taps shares each vector of dy, and borders
are masks. Interleaved (NHWC): a task is a run of output rows with sums of its own for all channels, which are the
lanes, in groups of one or of some that lie within a vector. A few channels go through all rows before the next, a few
pixels and rows of taps at a time, with their sums in registers: three rows of so few channels stay in first-level
cache; rows of all channels took up to 1.8 times as long. The runs' sums are added in order, so the result does not
depend on which worker did what. Traffic: x and dy once from memory, x once a row of taps from cache. Accumulates in
float32 (float64). Source: own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil, prod

import numpy as np
from numba import float32, float64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.depthwise_channels import interleaved_filter
from nbdnn.kernels.cpu.depthwise_plan import depthwise_us, refused_channels, shares_loads, unrolls
from nbdnn.kernels.cpu.depthwise_vector import planar_filter
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import Gather, column_table, geometry, spatial3, tap_table, tensor_strides
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_RUNS_PER_THREAD = 4
_ACCUMULATORS, _PIXELS = 18, 4  # vectors of sums that interleaved rows keep in registers; outputs taken at once
_MAX_COLUMNS = 32  # taps of a row, each with its accumulators

_PARAMS = record(
    *("n", "channels", "x_n", "x_c", "x_d", "x_h", "x_w", "y_n", "y_c", "y_d", "y_h", "y_w"),
    *("count_d", "count_h", "count_w", "step_d", "step_h", "step_w", "extent_d", "extent_h", "taps_d", "taps_h"),
    *("depth_table", "row_table", "column_table", "tap_offsets", "channel_offsets", "taps_adjacent"),
    *("rows", "run_rows", "runs", "sums_bytes", "entries_bytes", "pitch"),
    *("channels_adjacent", "w_c", "w_i", "read_out"),
)


@cache
def _planar_task(dtype: str, vl: int, taps_w: int, step: int, together: bool):
    """All taps of one channel: index = channel."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, acc_of, args_at, params_at = pointer("i64"), pointer(compute), struct(ARGS), struct(_PARAMS)
    add_rows = planar_filter(dtype, compute, vl, taps_w, step, together)
    store, row_slot = tile_store(dtype, compute, vl), stack(8)
    zero = float32(0.0) if compute == "f32" else float64(0.0)

    def channel(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        sums, taps = a.workspace + worker * f.sums_bytes, f.taps_d * f.taps_h * taps_w
        depth_table, row_table = i64(f.depth_table), i64(f.row_table)
        for i in range(taps):
            acc_of(sums)[i] = zero
        for n in range(f.n):
            for d in range(f.count_d):
                for t in range(f.taps_d):
                    x_d = d * f.step_d + depth_table[2 * t + 1]
                    if x_d < 0 or x_d >= f.extent_d:
                        continue
                    for r in range(f.taps_h):
                        offset, first, end = row_table[3 * r], row_table[3 * r + 1], row_table[3 * r + 2]
                        h = first * f.step_h + offset
                        x = a.p0 + (n * f.x_n + index * f.x_c + x_d * f.x_d + h * f.x_h) * itemsize
                        dy = a.p1 + (n * f.y_n + index * f.y_c + d * f.y_d + first * f.y_h) * itemsize
                        add_rows(
                            x, f.step_h * f.x_h * itemsize, dy, f.y_h * itemsize, end - first, f.column_table,
                            f.count_w, sums + (t * f.taps_h + r) * taps_w * acc_bytes,
                        )  # fmt: skip
        row = row_slot()
        i64(row)[0] = index * f.w_c
        flags = (0, 0, 0, 0, 0, f.read_out)
        store(sums, taps, 1, taps, a.p2, row, f.tap_offsets, f.taps_adjacent, flags, a.alpha, a.beta)

    return compile_task(channel, (dtype, vl, taps_w, step, together), fastmath=FASTMATH)


@cache
def _interleaved_task(dtype: str, vl: int, taps_w: int, joint: int, step: int, rows: int, vectors: int, group: int):
    """Sums of a run of output rows, counted over n x depth x height: index = run.

    joint: taps of a row that are taken together, all of them where they are adjacent, else 1. rows: rows of taps that
    are taken together. group: channels of a group.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, args_at, params_at, fill = pointer("i64"), struct(ARGS), struct(_PARAMS), zero_fill(compute)

    def kernel_of(taps, pixels):
        """A kernel over all rows of taps or one, and over all vectors of channels or one, as it is called."""
        several, several_one, one_row, one_row_one = (
            interleaved_filter(dtype, compute, vl, r, taps, step, v, pixels, group)
            for r in (rows, 1)
            for v in (vectors, 1)
        )

        @njit(**DEVICE)
        def add(whole, wide, x, x_h, x_w, dy, y_h, y_w, height, count, entries, lanes, sums, pitch):
            if whole and wide:
                several(x, x_h, x_w, dy, y_h, y_w, height, count, entries, lanes, sums, pitch)
            elif whole:
                several_one(x, x_h, x_w, dy, y_h, y_w, height, count, entries, lanes, sums, pitch)
            elif wide:
                one_row(x, x_h, x_w, dy, y_h, y_w, height, count, entries, lanes, sums, pitch)
            else:
                one_row_one(x, x_h, x_w, dy, y_h, y_w, height, count, entries, lanes, sums, pitch)

        return add

    inside, at_edge = kernel_of(joint, _PIXELS), kernel_of(1, 1)

    @njit(**DEVICE)
    def tap_rows(f, entries, i, d):
        """(x, sums) byte offsets of the rows of taps that output row i reaches; how many."""
        count = 0
        for t in range(f.taps_d):
            x_d = d * f.step_d + i64(f.depth_table)[2 * t + 1]
            if x_d < 0 or x_d >= f.extent_d:
                continue
            for r in range(f.taps_h):
                if i64(f.row_table)[3 * r + 1] <= i < i64(f.row_table)[3 * r + 2]:
                    h = i * f.step_h + i64(f.row_table)[3 * r]
                    i64(entries)[2 * count] = (x_d * f.x_d + h * f.x_h) * itemsize
                    i64(entries)[2 * count + 1] = (t * f.taps_h + r) * taps_w * group * f.pitch * acc_bytes
                    count += 1
        return count

    @njit(**DEVICE)
    def add(f, edge, whole, wide, x, dy, height, count, entries, lanes, sums):
        """A block of pixels to the sums of one tap, or of all that are taken together, of one or more rows of taps."""
        x_h, x_w, y_h, y_w = f.step_h * f.x_h * itemsize, f.x_w * itemsize, f.y_h * itemsize, f.y_w * itemsize
        pitch = f.pitch * acc_bytes
        if edge:
            at_edge(whole, wide, x, x_h, x_w, dy, y_h, y_w, height, count, entries, lanes, sums, pitch)
        else:
            inside(whole, wide, x, x_h, x_w, dy, y_h, y_w, height, count, entries, lanes, sums, pitch)

    @njit(**DEVICE)
    def add_columns(f, whole, wide, x, dy, height, entries, lanes, sums, first, end):
        """Pixels [first, end) of some output rows, which reach every tap of a row."""
        x_w, table = f.x_w * itemsize, i64(f.column_table)
        for s in range(0, taps_w, joint):
            at, to = x + (first * step + table[3 * s]) * x_w, sums + s * group * f.pitch * acc_bytes
            add(f, False, whole, wide, at, dy + first * f.y_w * itemsize, height, end - first, entries, lanes, to)

    @njit(**DEVICE)
    def add_others(f, whole, wide, x, dy, height, entries, lanes, sums, inner, end):
        """The pixels before `inner` and from `end`, tap by tap."""
        table = i64(f.column_table)
        for s in range(taps_w):
            for side in range(2):
                start = table[3 * s + 1] if side == 0 else max(end, table[3 * s + 1])
                count = (min(inner, table[3 * s + 2]) if side == 0 else table[3 * s + 2]) - start
                if count > 0:
                    at = x + (start * step + table[3 * s]) * f.x_w * itemsize
                    to = sums + s * group * f.pitch * acc_bytes
                    add(f, True, whole, wide, at, dy + start * f.y_w * itemsize, height, count, entries, lanes, to)

    def run(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        sums, table = a.workspace + index * f.sums_bytes, i64(f.column_table)
        entries = a.workspace + f.runs * f.sums_bytes + worker * f.entries_bytes
        fill(sums, f.taps_d * f.taps_h * taps_w * group * f.pitch)
        inner, end = 0, f.count_w
        for s in range(taps_w):
            inner, end = max(inner, table[3 * s + 1]), min(end, table[3 * s + 2])
        end = max(inner, end)
        upper, lower = 0, f.count_h  # rows [upper, lower) reach every row of taps
        for r in range(f.taps_h):
            upper, lower = max(upper, i64(f.row_table)[3 * r + 1]), min(lower, i64(f.row_table)[3 * r + 2])
        row, last = index * f.run_rows, min(f.rows, (index + 1) * f.run_rows)
        while row < last:
            i, rest = row % f.count_h, row // f.count_h
            d, n = rest % f.count_d, rest // f.count_d
            height = min(last - row, lower - i) if upper <= i < lower else 1
            x, dy = a.p0 + n * f.x_n * itemsize, a.p1 + (n * f.y_n + d * f.y_d + i * f.y_h) * itemsize
            reached, c = tap_rows(f, entries, i, d), 0
            while c < f.channels:
                left = f.channels - c
                wide = left > (vectors - 1) * vl
                lanes = min(left - (vectors - 1) * vl, vl) if wide else min(left, vl)
                at, gradient, to, e = x + c * itemsize, dy + c * itemsize, sums + c * acc_bytes, 0
                while e < reached:
                    whole, taps = e + rows <= reached, entries + 16 * e
                    if inner < end:
                        add_columns(f, whole, wide, at, gradient, height, taps, lanes, to, inner, end)
                    add_others(f, whole, wide, at, gradient, height, taps, lanes, to, inner, end)
                    e += rows if whole else 1
                c += vectors * vl if wide else vl
            row += height

    return compile_task(run, (dtype, vl, taps_w, joint, step, rows, vectors, group), fastmath=FASTMATH)


@cache
def _sum_task(dtype: str, vl: int, group: int):
    """One tap of all channels: the runs' sums added in order and stored; index = tap * group + channel of the group."""
    compute = DEFAULT_COMPUTE[dtype]
    acc_bytes, i64, acc_of = ITEMSIZE[compute], pointer("i64"), pointer(compute)
    args_at, params_at, store, row_slot = struct(ARGS), struct(_PARAMS), tile_store(dtype, compute, vl), stack(8)

    def sum_tap(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        first = a.workspace + index * f.pitch * acc_bytes
        total = acc_of(first)
        for run in range(1, f.runs):
            part = acc_of(first + run * f.sums_bytes)
            for c in range(f.channels):
                total[c] += part[c]
        row = row_slot()
        i64(row)[0] = i64(f.tap_offsets)[index // group] + index % group * f.w_i
        flags = (0, 0, 0, 0, 0, f.read_out)
        out, adjacent = a.p2, f.channels_adjacent
        store(first, f.pitch, 1, f.channels, out, row, f.channel_offsets, adjacent, flags, a.alpha, a.beta)

    return compile_task(sum_tap, (dtype, vl, group), fastmath=FASTMATH)


class DepthwiseFilter(Candidate[NoConfig, Cpu]):
    """Filter gradient of a depthwise convolution."""

    op, provider, algorithm = "conv_bwd_filter", "cpu", "depthwise"

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if reason := refused_channels(problem, device):
            return Support(False, reason)
        if problem.layout != problem.y_layout:
            return Support(False, f"x is {problem.layout}, dy is {problem.y_layout}")
        if problem.filter[-1] > _MAX_COLUMNS:
            return Support(False, f"the filter is {problem.filter[-1]} wide, more than {_MAX_COLUMNS}")
        if not problem.channels_last and problem.stride[-1] not in (1, 2, 4):
            return Support(False, f"the column stride {problem.stride[-1]} is not 1, 2 or 4")
        return YES

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> int:
        pitch, _, runs = _runs(problem, device)
        if not problem.channels_last:
            return device.threads * _sums_bytes(problem, pitch)
        return runs * _sums_bytes(problem, pitch) + device.threads * _entries_bytes(problem)

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> float:
        return depthwise_us(problem, device)

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> Program:
        (gather,) = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout="")).gathers
        vl, taps_w = device.lanes(DEFAULT_COMPUTE[problem.dtype]), problem.filter[-1]
        ctx, keep = _parameters(problem, gather, device)
        if not problem.channels_last:
            task = _planar_task(problem.dtype, vl, taps_w, gather.w.in_step, shares_loads(gather.w, vl))
            return Program([Phase(task, problem.c, ctx)], keep)
        offsets, group = [offset for _, offset in gather.w.taps], problem.c // problem.groups
        are_adjacent = offsets == list(range(offsets[0], offsets[0] + taps_w))
        joint = taps_w if are_adjacent and unrolls(gather.w, group) else 1
        rows = max(1, min(prod(problem.filter[:-1]), _ACCUMULATORS // (joint * group)))
        vectors = 2 if 2 * rows * joint * group <= _ACCUMULATORS else 1
        task = _interleaved_task(problem.dtype, vl, taps_w, joint, gather.w.in_step, rows, vectors, group)
        runs = Phase(task, _runs(problem, device)[2], ctx)
        return Program([runs, Phase(_sum_task(problem.dtype, vl, group), prod(problem.filter) * group, ctx)], keep)


def _runs(problem: ConvProblem, device: Cpu) -> tuple[int, int, int]:
    """(accumulators of a tap, output rows a run, runs)."""
    vl = device.lanes(DEFAULT_COMPUTE[problem.dtype])
    rows = problem.n * prod(problem.out_spatial[:-1])
    run_rows = ceil(rows / min(rows, device.threads * _RUNS_PER_THREAD))
    return (ceil(problem.c / vl) * vl if problem.channels_last else 1), run_rows, ceil(rows / run_rows)


def _sums_bytes(problem: ConvProblem, pitch: int) -> int:
    return own_pages(
        problem.c // problem.groups * prod(problem.filter) * pitch * ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    )


def _entries_bytes(problem: ConvProblem) -> int:
    return own_pages(16 * prod(problem.filter[:-1]))


def _parameters(problem: ConvProblem, gather: Gather, device: Cpu) -> tuple[np.ndarray, list[np.ndarray]]:
    x, dy, dw = problem.operands
    pitch, run_rows, runs = _runs(problem, device)
    w_c, w_i, *w_taps = dw.strides
    w_t, w_r, w_s = spatial3(tuple(w_taps), 0)
    taps = (tap_table(axis)[:, 0] for axis in (gather.d, gather.h, gather.w))
    t, r, s = np.ix_(*taps)
    tap_offsets = (t * w_t + r * w_r + s * w_s).reshape(-1).astype(np.int64)
    channel_offsets = np.arange(problem.c, dtype=np.int64) * w_c
    tables = {
        "depth_table": tap_table(gather.d),
        "row_table": column_table(gather.h),
        "column_table": column_table(gather.w),
        "tap_offsets": tap_offsets,
        "channel_offsets": channel_offsets,
    }
    values: dict[str, int] = {}
    for prefix, shape in (("x", x.shape), ("y", dy.shape)):
        strides = tensor_strides(shape, problem.channels_last)
        values |= {f"{prefix}_{name}": stride for name, stride in zip("ncdhw", strides, strict=True)}
    for name, axis in zip("dhw", (gather.d, gather.h, gather.w), strict=True):
        values |= {f"count_{name}": axis.count, f"step_{name}": axis.in_step}
    ctx = filled(
        _PARAMS,
        **values,
        **{name: table.ctypes.data for name, table in tables.items()},
        n=problem.n,
        channels=problem.c,
        extent_d=gather.d.in_extent,
        extent_h=gather.h.in_extent,
        taps_d=len(gather.d.taps),
        taps_h=len(gather.h.taps),
        taps_adjacent=int(bool((np.diff(tap_offsets) == 1).all())),
        channels_adjacent=int(bool((np.diff(channel_offsets) == 1).all())),
        rows=problem.n * gather.d.count * gather.h.count,
        run_rows=run_rows,
        runs=runs,
        sums_bytes=_sums_bytes(problem, pitch),
        entries_bytes=_entries_bytes(problem),
        pitch=pitch,
        w_c=w_c,
        w_i=w_i,
        read_out=int("beta" in problem.epilogue),
    )
    return ctx, list(tables.values())


BWD_FILTER = DepthwiseFilter()
