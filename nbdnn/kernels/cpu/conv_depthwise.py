"""Depthwise convolution: one filter a channel, forward and bwd_data, planar and interleaved, 2-D and 3-D.

    y[n, c, p, q] = sum over r, s of  x[n, c, p*u + r*d - pad, q*u + s*d - pad] * w[c, r, s]

Interleaved, groups of as few channels as lie within a vector are as many depthwise convolutions, whose sums are added.

Nothing is copied and every element is read from memory once. Planar (NCHW): a task is a plane; the lanes are pixels of
a row and borders are masks. Interleaved (NHWC): a task is a band of rows; the lanes are channels, and a few
neighbouring pixels share each weight that is loaded. Both finish a few rows in first-level cache before they store.
Traffic: x, w and y once. Accumulates in float32 (float64), one rounding a step. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import inf, prod

import numpy as np
from numba import float32, float64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.depthwise_channels import interleaved_pixels
from nbdnn.kernels.cpu.depthwise_plan import (
    AHEAD_BYTES,
    EDGE_VECTORS,
    PARAMS,
    PIXELS,
    TILE_PIXELS,
    depthwise_us,
    joint_columns,
    joint_taps,
    parameters,
    refused_channels,
    sizes_of,
    tile_vectors,
)
from nbdnn.kernels.cpu.depthwise_planes import columns_of, planar_task
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.vector import WIDEN, pointer, prefetch, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_MAX_TAPS = 1024


@cache
def _weights_task(dtype: str, vl: int):
    """Interleaved weights [t][r][s][channel of the group][channel], zero beyond the last channel; index = tap."""
    compute = DEFAULT_COMPUTE[dtype]
    data, acc_of, i64, args_at, params_at = (
        pointer(dtype), pointer(compute), pointer("i64"), struct(ARGS), struct(PARAMS),
    )  # fmt: skip
    widen, zero = WIDEN[dtype], (float32 if compute == "f32" else float64)(0.0)

    def pack_tap(args, ctx, index, worker):
        f = params_at(ctx)
        s, rest = index % f.filter_w, index // f.filter_w
        w = data(i64(args)[f.w_pointer])
        at = rest // f.filter_h * f.w_t + rest % f.filter_h * f.w_r + s * f.w_s
        to = acc_of(args_at(args).workspace + worker * f.copy_bytes + index * f.weights_bytes)
        groups, group, w_g, pitch = f.groups, f.c_out, f.w_g, f.width_pitch
        for i in range(f.c_in):
            for o in range(group):
                first, source = i * pitch + o, o * f.w_o + i * f.w_i + at
                for g in range(groups):
                    to[first + g * group] = widen(w[source + g * w_g])
            for c in range(groups * group, pitch):
                to[i * pitch + c] = zero

    return compile_task(pack_tap, (dtype, vl))


@cache
def _interleaved_task(
    dtype: str, vl: int, vectors: int, widths: tuple[int, int], step: int, group: int, finishes: bool
):
    """A band of rows of every gather, all channels: index = (n * depth + d) * bands + band.

    ctx has one record a gather, so that the rows which interleave are written together, from the same inputs. widths
    are the two values of `joint_taps` that occur. group: channels of a group. finishes: sums begin with the bias, and
    relu is their least value, where they are the output then.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(PARAMS)
    store, row_slots = tile_store(dtype, compute, vl), stack(8 * TILE_PIXELS)

    record_bytes = PARAMS.itemsize

    def kernels(pixels, most, width, step):
        return (interleaved_pixels(dtype, compute, vl, pixels, v, width, step, group, finishes) for v in (most, 1))

    wide, wide_one = kernels(PIXELS, vectors, widths[0], step)
    narrow, narrow_one = kernels(PIXELS, vectors, widths[1], step)
    single, single_one = kernels(1, EDGE_VECTORS, 1, 1)

    @njit(**DEVICE)
    def tap_entries(ctx, entries, i, depth, j, width):
        """Entries of output row i: of the taps that pixel j reaches, or where width > 1 of whole rows of taps."""
        f, n_entries = params_at(ctx), 0
        table = i64(f.column_table)
        for t in range(f.taps_d):
            tap_d, d = i64(f.depth_table)[2 * t], depth * f.in_step_d + i64(f.depth_table)[2 * t + 1]
            if d < 0 or d >= f.extent_d:
                continue
            for r in range(f.taps_h):
                tap_h, h = i64(f.row_table)[2 * r], i * f.in_step_h + i64(f.row_table)[2 * r + 1]
                if h < 0 or h >= f.extent_h:
                    continue
                for s in range(0, f.taps_w, width):
                    if table[3 * s + 1] <= j < table[3 * s + 2]:
                        tap = (tap_d * f.filter_h + tap_h) * f.filter_w + table[3 * f.taps_w + s]
                        at = (d * f.in_d + h * f.in_h + table[3 * s] * f.in_w) * itemsize
                        i64(entries)[2 * n_entries] = at
                        i64(entries)[2 * n_entries + 1] = tap * f.weights_bytes
                        n_entries += 1
        return n_entries

    @njit(**DEVICE)
    def several_pixels(channels, steps, joint, x, entries, n_entries, weights, tile, pitch, streams, start, least):
        """PIXELS output pixels, all channels, `pitch` bytes apart. steps: bytes to the next input pixel, and to the
        weights of the next tap and of the group's next channel; not read here, since tiles may be written to them for
        all that the compiler knows (7x7 took 201 us, not 160)."""
        (pixel_bytes, tap_bytes, channel_bytes), c = steps, 0
        while c < channels:
            left = channels - c
            at, w, to = x + c * itemsize, weights + c * acc_bytes, tile + c * acc_bytes
            begin, every = start + c * acc_bytes if start else 0, left > (vectors - 1) * vl
            lanes = min(left - (vectors - 1) * vl, vl) if every else left
            of_taps = (at, pixel_bytes, entries, n_entries, w, tap_bytes, channel_bytes, lanes, to, pitch)
            if every and joint:
                wide(*of_taps, streams, begin, least)
            elif every:
                narrow(*of_taps, streams, begin, least)
            elif joint:
                wide_one(*of_taps, streams, begin, least)
            else:
                narrow_one(*of_taps, streams, begin, least)
            c += vectors * vl if every else vl

    @njit(**DEVICE)
    def one_pixel(channels, channel_bytes, x, entries, n_entries, weights, tile, streams, start, least):
        """An output pixel at the edge, all channels."""
        c = 0
        while c < channels:
            left = channels - c
            at, w, to = x + c * itemsize, weights + c * acc_bytes, tile + c * acc_bytes
            begin = start + c * acc_bytes if start else 0
            if left > (EDGE_VECTORS - 1) * vl:
                lanes = min(left - (EDGE_VECTORS - 1) * vl, vl)
                single(at, 0, entries, n_entries, w, 0, channel_bytes, lanes, to, 0, streams, begin, least)
                c += EDGE_VECTORS * vl
            else:
                single_one(at, 0, entries, n_entries, w, 0, channel_bytes, min(left, vl), to, 0, streams, begin, least)
                c += vl

    @njit(**DEVICE)
    def one_row(args, ctx, n, depth, i, worker):
        """Row i of one gather."""
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        row_entries = a.workspace + f.worker_offset + worker * f.worker_bytes
        edge_entries, tile = row_entries + f.entries_bytes // 2, row_entries + f.entries_bytes
        weights, row_slot, channels, count_w = a.workspace + worker * f.copy_bytes, row_slots(), f.channels, f.count_w
        residual = pointers[f.residual_pointer] if f.residual_pointer >= 0 else 0
        bias = pointers[f.bias_pointer] if f.bias_pointer >= 0 else 0
        flags = (f.activation, bias, 0, 1, residual, f.read_out)
        table, finished = i64(f.column_table), f.finished and a.alpha == 1.0
        start, least = bias if finished else 0, 0.0 if finished and f.activation else -inf
        joint, steps = f.joint_taps == widths[0], (f.in_w * itemsize, f.tap_bytes, f.width_pitch * acc_bytes)
        # Pixels [inner, end) reach every column tap.
        inner, end = 0, count_w
        for s in range(f.taps_w):
            inner, end = max(inner, table[3 * s + 1]), min(end, table[3 * s + 2])
        x_row, x_step = pointers[f.in_pointer] + n * f.in_n * itemsize, f.in_step_w * steps[0]
        out_row = n * f.out_n + (f.start_d + depth * f.out_step_d) * f.out_d
        out_row += (f.start_h + i * f.out_step_h) * f.out_h + f.start_w * f.out_w
        out_step, tile_pitch = f.out_step_w * f.out_w, f.width_pitch * acc_bytes
        to_row, to_pitch = (pointers[f.out_pointer] + out_row * itemsize, out_step * itemsize)
        streams = int(finished and f.streams and to_row % (vl * itemsize) == 0)
        n_row = tap_entries(ctx, row_entries, i, depth, inner, f.joint_taps)
        # The rows that no row of outputs before this one has read.
        ahead = (depth * f.in_step_d * f.in_d + (i * f.in_step_h + f.new_rows) * f.in_h) * itemsize + AHEAD_BYTES
        rows_ahead, ahead_pitch = f.rows_ahead, f.in_h * itemsize
        j = ready = 0
        while j < count_w:
            # The last pixels inside are taken together with some that are done, as long as their tile is still there.
            first = j if j + PIXELS <= end else max(inner, end - PIXELS)
            together = inner <= j < end and first + PIXELS <= end and (finished or j - first <= ready)
            first = first if together else j
            x = x_row + first * x_step
            if finished:
                to, pitch = to_row + first * to_pitch, to_pitch
            else:
                to, pitch = tile + (ready - (j - first)) * tile_pitch, tile_pitch
            if together:
                for r in range(rows_ahead):
                    at = x + ahead + r * ahead_pitch
                    for line in range(at, at + PIXELS * x_step, 64):
                        prefetch(line)
                several_pixels(channels, steps, joint, x, row_entries, n_row, weights, to, pitch, streams, start, least)
                run = first + PIXELS - j
            else:
                n_edge = tap_entries(ctx, edge_entries, i, depth, j, 1)
                one_pixel(channels, steps[2], x, edge_entries, n_edge, weights, to, streams, start, least)
                run = 1
            if not finished:
                for p in range(run):
                    i64(row_slot)[ready + p] = out_row + (j + p) * out_step
                ready += run
                if j + run == count_w or ready + PIXELS > f.tile_rows:
                    store(
                        tile, f.width_pitch, ready, channels, pointers[f.out_pointer], row_slot, f.lane_offsets,
                        f.contiguous, flags, a.alpha, a.beta,
                    )  # fmt: skip
                    ready = 0
            j += run

    def band(args, ctx, index, worker):
        f = params_at(ctx)
        band_index, rest = index % f.bands, index // f.bands
        depth, n = rest % f.most_d, rest // f.most_d
        for i in range(band_index * f.band_rows, min(f.most_h, (band_index + 1) * f.band_rows)):
            for gather in range(f.gathers):
                here = ctx + gather * record_bytes
                if depth < params_at(here).count_d and i < params_at(here).count_h:
                    one_row(args, here, n, depth, i, worker)

    return compile_task(band, (dtype, vl, vectors, widths, step, group, finishes), fastmath=FASTMATH)


class Depthwise(Candidate[NoConfig, Cpu]):
    """Depthwise convolution, forward or bwd_data."""

    provider, algorithm = "cpu", "depthwise"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if reason := refused_channels(problem, device):
            return Support(False, reason)
        if prod(problem.filter) > _MAX_TAPS:
            return Support(False, f"the filter has {prod(problem.filter)} taps, more than {_MAX_TAPS}")
        step = problem.stride[-1] if self.op == "conv_fwd" else 1
        if not problem.channels_last and step not in (1, 2, 4):
            return Support(False, f"the column stride {step} is not 1, 2 or 4")
        return YES

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> int:
        return sizes_of(problem, device)["total"]

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> float:
        return depthwise_us(problem, device)

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> Program:
        geo, vl = geometry(problem), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        columns = joint_columns(problem)
        gathers = [gather.in_image_order() for gather in geo.gathers]
        made = [parameters(problem, geo, gather, device) for gather in gathers]
        records, keep = [ctx for ctx, _ in made], [array for _, arrays in made for array in arrays]
        if problem.channels_last:
            ctx, joint = np.concatenate(records), joint_taps(geo).values()
            vectors, widths = tile_vectors(problem.c, vl), (max(joint), min(joint))
            first = ctx[0]
            finishes = bool(problem.epilogue and first["finished"])
            task = _interleaved_task(problem.dtype, vl, vectors, widths, gathers[0].w.in_step, geo.c_in, finishes)
            each = first["copy_bytes"] > 0
            weights = Phase(_weights_task(problem.dtype, vl), prod(problem.filter), ctx, each=each)
            return Program([weights, Phase(task, geo.n * first["most_d"] * first["bands"], ctx)], keep)
        phases = []
        for begin in range(0, len(gathers), columns):
            some = gathers[begin : begin + columns]
            task = planar_task(problem.dtype, vl, tuple(columns_of(gather, vl) for gather in some))
            ctx = np.concatenate(records[begin : begin + columns])
            phases.append(Phase(task, geo.n * geo.groups * some[0].d.count * ctx[0]["bands"], ctx))
        return Program(phases, keep)


FWD, BWD_DATA = Depthwise("conv_fwd"), Depthwise("conv_bwd_data")
