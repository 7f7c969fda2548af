"""Direct convolution: the sums as they are written, on any stride, dilation, group, layout and dtype.

    y[n, k, p, q] = sum over c, r, s of  x[n, c, p*u + r*d - pad, q*u + s*d - pad] * w[k, c, r, s]

One output row at a time is accumulated in the compute type in a worker's scratch, tap by tap, so the inner loop runs
along the row and borders are loop bounds instead of tests. bwd_filter takes one (k, c) pair a task and sums each tap
as dot products of rows. Traffic: x is read K*R*S times from cache; nothing is packed. Error: one rounding a product
and sum. This is the candidate that supports everything, and ends every list. Source: own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil, prod

import numpy as np
from numba import float32, float64

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import (
    GATHER_FIELDS,
    Axis,
    Gather,
    Geometry,
    gather_values,
    geometry,
    spatial3,
    tensor_strides,
)
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.scratch import Scratch
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_CHUNKS_PER_THREAD = 16  # tasks a thread: enough to even out, few enough that drawing one costs nothing
# One thread, short float32 rows: a product, and a tap's beginning with a row. Priors for the guess, not measurements of
# this machine.
_NS_PER_MAC, _NS_PER_ROW = 0.1, 8.0

_GATHER = record(
    *GATHER_FIELDS,
    *("rows", "rows_a_task", "table_d", "table_h", "table_w", "lanes", "contiguous", "scratch", "scratch_bytes"),
)


def _scratch(width: int, compute: str, device: Cpu) -> Scratch:
    """A row of accumulators for each worker, owned by the runner: this candidate runs where no workspace may be."""
    return Scratch(device, width * ITEMSIZE[compute])


@cache
def _gather_task(dtype: str, vl: int):
    """Forward and bwd_data: a run of output rows, counted over n x group x channel x depth x height."""
    compute = DEFAULT_COMPUTE[dtype]
    data, acc_of, i64, offset_slot = pointer(dtype), pointer(compute), pointer("i64"), stack(8)
    args_at, params_at = struct(ARGS), struct(_GATHER)
    widen, store, itemsize = WIDEN[dtype], tile_store(dtype, compute, vl), ITEMSIZE[dtype]
    real = float32 if compute == "f32" else float64

    def gather_rows(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        x, w = data(pointers[f.in_pointer]), data(pointers[f.w_pointer])
        # Rows of (tap in the filter, offset in the input, first and end of the outputs it reaches).
        table_d, table_h, table_w = i64(f.table_d), i64(f.table_h), i64(f.table_w)
        width = f.count_w
        tile = f.scratch + worker * f.scratch_bytes
        acc = acc_of(tile)
        step = f.in_step_w * f.in_w
        bias = pointers[f.bias_pointer] if f.bias_pointer >= 0 else 0
        residual = pointers[f.residual_pointer] if f.residual_pointer >= 0 else 0
        row_slot = offset_slot()
        for row in range(index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)):
            rest, i_h = row // f.count_h, row % f.count_h
            rest, i_d = rest // f.count_d, rest % f.count_d
            rest, o = rest // f.c_out, rest % f.c_out
            n, g = rest // f.groups, rest % f.groups
            for j in range(width):
                acc[j] = real(0.0)
            for c in range(f.c_in):
                x_c = n * f.in_n + g * f.in_g + c * f.in_c
                w_c = g * f.w_g + o * f.w_o + c * f.w_i
                for t in range(f.taps_d):
                    if i_d < table_d[4 * t + 2] or i_d >= table_d[4 * t + 3]:
                        continue
                    x_d = x_c + (i_d * f.in_step_d + table_d[4 * t + 1]) * f.in_d
                    for r in range(f.taps_h):
                        if i_h < table_h[4 * r + 2] or i_h >= table_h[4 * r + 3]:
                            continue
                        x_h = x_d + (i_h * f.in_step_h + table_h[4 * r + 1]) * f.in_h
                        w_r = w_c + table_d[4 * t] * f.w_t + table_h[4 * r] * f.w_r
                        for s in range(f.taps_w):
                            value = widen(w[w_r + table_w[4 * s] * f.w_s])
                            start = x_h + table_w[4 * s + 1] * f.in_w
                            low, high = table_w[4 * s + 2], table_w[4 * s + 3]
                            if step == 1:
                                for j in range(low, high):
                                    acc[j] += value * widen(x[start + j])
                            else:
                                for j in range(low, high):
                                    acc[j] += value * widen(x[start + j * step])
            i64(row_slot)[0] = (
                n * f.out_n
                + g * f.out_g
                + o * f.out_c
                + (f.start_d + i_d * f.out_step_d) * f.out_d
                + (f.start_h + i_h * f.out_step_h) * f.out_h
            )
            bias_here = bias + (g * f.c_out + o) * itemsize if bias else 0
            flags = (f.activation, bias_here, 0, 0, residual, f.read_out)
            out = pointers[f.out_pointer]
            store(tile, width, 1, width, out, row_slot, f.lanes, f.contiguous, flags, a.alpha, a.beta)

    return compile_task(gather_rows, (dtype, vl), fastmath=FASTMATH)


def _tap_table(axis: Axis) -> np.ndarray:
    """(tap in the filter, offset in the input, first and end of the outputs it reaches), four int64 a tap."""
    rows = [(tap, offset, *axis.reached(offset)) for tap, offset in axis.taps]
    return np.array(rows, np.int64).reshape(-1, 4)


def _gather_phase(problem: ConvProblem, geo: Geometry, gather: Gather, device: Cpu) -> tuple[Phase, list[np.ndarray]]:
    tables = [_tap_table(axis) for axis in gather]
    lanes = (gather.w.out_start + np.arange(gather.w.count) * gather.w.out_step) * geo.out_strides[-1]
    rows = geo.n * geo.groups * geo.c_out * gather.d.count * gather.h.count
    rows_a_task = max(1, rows // (device.threads * _CHUNKS_PER_THREAD))
    scratch = _scratch(gather.w.count, DEFAULT_COMPUTE[problem.dtype], device)
    ctx = filled(
        _GATHER,
        **gather_values(problem, geo, gather),
        rows=rows,
        rows_a_task=rows_a_task,
        **{f"table_{axis}": table.ctypes.data for axis, table in zip("dhw", tables, strict=True)},
        lanes=lanes.ctypes.data,
        contiguous=int(gather.w.out_step * geo.out_strides[-1] == 1),
        scratch=scratch.start,
        scratch_bytes=scratch.size_bytes,
    )
    task = _gather_task(problem.dtype, device.lanes(DEFAULT_COMPUTE[problem.dtype]))
    return Phase(task, ceil(rows / rows_a_task), ctx), [*tables, lanes, scratch.memory]


_FILTER = record(
    *("n", "k", "c", "c_group", "k_group", "x_n", "x_c", "x_d", "x_h", "x_w", "y_n", "y_c", "y_d", "y_h", "y_w"),
    *("count_d", "count_h", "step_d", "step_h", "step_w", "taps_d", "taps_h", "taps_w"),
    *("table_d", "table_h", "table_w", "out_k", "out_c", "lanes", "contiguous", "read_out", "scratch", "scratch_bytes"),
)


@cache
def _filter_task(dtype: str, vl: int):
    """bwd_filter: every tap of one (k, c) pair."""
    compute = DEFAULT_COMPUTE[dtype]
    data, acc_of, i64, offset_slot = pointer(dtype), pointer(compute), pointer("i64"), stack(8)
    args_at, params_at = struct(ARGS), struct(_FILTER)
    widen, store = WIDEN[dtype], tile_store(dtype, compute, vl)
    real = float32 if compute == "f32" else float64

    def filter_taps(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        x, dy = data(a.p0), data(a.p1)
        table_d, table_h, table_w = i64(f.table_d), i64(f.table_h), i64(f.table_w)
        taps = f.taps_d * f.taps_h * f.taps_w
        tile = f.scratch + worker * f.scratch_bytes
        acc = acc_of(tile)
        k, c = index // f.c_group, index % f.c_group
        x_c = (k // f.k_group * f.c_group + c) * f.x_c
        step = f.step_w * f.x_w
        for t in range(f.taps_d):
            for r in range(f.taps_h):
                for s in range(f.taps_w):
                    total = real(0.0)
                    low, high = table_w[4 * s + 2], table_w[4 * s + 3]
                    for n in range(f.n):
                        for i_d in range(table_d[4 * t + 2], table_d[4 * t + 3]):
                            d = i_d * f.step_d + table_d[4 * t + 1]
                            for i_h in range(table_h[4 * r + 2], table_h[4 * r + 3]):
                                h = i_h * f.step_h + table_h[4 * r + 1]
                                x_row = x_c + n * f.x_n + d * f.x_d + h * f.x_h + table_w[4 * s + 1] * f.x_w
                                y_row = k * f.y_c + n * f.y_n + i_d * f.y_d + i_h * f.y_h
                                part = real(0.0)
                                if step == 1 and f.y_w == 1:
                                    for j in range(low, high):
                                        part += widen(x[x_row + j]) * widen(dy[y_row + j])
                                else:
                                    for j in range(low, high):
                                        part += widen(x[x_row + j * step]) * widen(dy[y_row + j * f.y_w])
                                total += part
                    acc[(t * f.taps_h + r) * f.taps_w + s] = total
        row_slot = offset_slot()
        i64(row_slot)[0] = k * f.out_k + c * f.out_c
        flags = (0, 0, 0, 0, 0, f.read_out)
        store(tile, taps, 1, taps, a.p2, row_slot, f.lanes, f.contiguous, flags, a.alpha, a.beta)

    return compile_task(filter_taps, (dtype, vl), fastmath=FASTMATH | {"reassoc"})


def _filter_phase(problem: ConvProblem, device: Cpu) -> tuple[Phase, list[np.ndarray]]:
    forward = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout=""))
    (gather,) = forward.gathers
    tables = [_tap_table(axis) for axis in gather]
    x, dy, dw = problem.operands
    w_k, w_c, *w_taps = dw.strides
    taps = [tuple(tap for tap, _ in axis.taps) for axis in gather]
    w_t, w_r, w_s = spatial3(tuple(w_taps), 0)
    lanes = np.array([t * w_t + r * w_r + s * w_s for t in taps[0] for r in taps[1] for s in taps[2]], np.int64)
    scratch = _scratch(prod(problem.filter), DEFAULT_COMPUTE[problem.dtype], device)
    values: dict[str, int] = {}
    for prefix, operand, last in (("x", x, problem.channels_last), ("y", dy, problem.y_channels_last)):
        strides = tensor_strides(operand.shape, last)
        values |= {f"{prefix}_{name}": stride for name, stride in zip("ncdhw", strides, strict=True)}
    for name, axis, table in zip("dhw", gather, tables, strict=True):
        values |= {f"step_{name}": axis.in_step, f"taps_{name}": len(axis.taps), f"table_{name}": table.ctypes.data}
    ctx = filled(
        _FILTER,
        **values,
        n=problem.n,
        k=problem.k,
        c=problem.c,
        c_group=problem.c // problem.groups,
        k_group=problem.k // problem.groups,
        count_d=gather.d.count,
        count_h=gather.h.count,
        out_k=w_k,
        out_c=w_c,
        lanes=lanes.ctypes.data,
        contiguous=int(bool((np.diff(lanes) == 1).all())),
        read_out=int("beta" in problem.epilogue),
        scratch=scratch.start,
        scratch_bytes=scratch.size_bytes,
    )
    pairs = problem.k * problem.c // problem.groups
    task = _filter_task(problem.dtype, device.lanes(DEFAULT_COMPUTE[problem.dtype]))
    return Phase(task, pairs, ctx), [*tables, lanes, scratch.memory]


class Direct(Candidate[NoConfig, Cpu]):
    """The sums as written; supports every convolution."""

    provider, algorithm, algo = "cpu", "direct", "none"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        return YES

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> float:
        ns = problem.flops / 2 * (_NS_PER_MAC + _NS_PER_ROW / problem.out_spatial[-1])
        return kernel_us(device, 0.0, ns, device.threads)

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> Program:
        if self.op == "conv_bwd_filter":
            parts = [_filter_phase(problem, device)]
        else:
            geo = geometry(problem)
            parts = [_gather_phase(problem, geo, gather, device) for gather in geo.gathers]
        return Program([phase for phase, _ in parts], [array for _, arrays in parts for array in arrays])


FWD, BWD_DATA, BWD_FILTER = Direct("conv_fwd"), Direct("conv_bwd_data"), Direct("conv_bwd_filter")
