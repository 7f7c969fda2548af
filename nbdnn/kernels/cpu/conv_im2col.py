"""Lowering and one matrix product by BLAS: every convolution and both gradients, 2-D and 3-D, both layouts.

    forward, bwd_data:  out[g, o, p] = w[g, o, k] low[g, k, p]          k = (c, t, r, s), p = the pixels of a strip
    bwd_filter:         dw[g, o, k] += dy[g, o, p] low[g, k, p]^T       summed over the strips, in order

    x --lower--> low --+                              low: lower_matrix.py, planar or interleaved as its operand is;
                       +--np.matmul--> out --store    BLAS takes either form, and writes the form of the output
    w --pack-----------+

bwd_data of stride u is u products an axis, each with its own taps. w is packed to [g][o][k] only where it does not lie
so; dy is lowered as an image with one tap. The pixels of all images are cut into strips of whole rows, so that what a
strip is lowered to stays small. Traffic: x is read and low written and read once a tap. Accumulates in float32
(float64), in BLAS's order. Source: Chellapilla, Puri and Simard, "High performance convolutional neural networks for
document processing" (2006).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, prod

import numpy as np

from nbdnn.candidate import YES, Candidate, NoConfig, Runner, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import EPILOGUE_FIELDS, Axis, Gather, Geometry, epilogue_values, geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_matrix import Lowering, matrix
from nbdnn.kernels.cpu.pack import filter_offsets, run_length
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE, dense_strides
from nbdnn.problem_conv import ConvProblem

_STRIP_BYTES = 16 << 20  # of all matrices of a strip: they stay in last-level cache, and BLAS has enough to share out
_BLAS_EFFICIENCY = 0.45  # of the vector registers' rate: OpenBLAS, 105 GFLOP/s a Zen 5 core
# One thread: an element written and read again, neighbours that are copied together, an element of the result, which
# the library writes to memory as it comes where products have few terms.
_LOWER_NS, _RUN_NS, _RESULT_NS = 0.35, 10.0, 0.5

_PACK = record("operand", "c_out", "w_g", "w_o", "offsets", "k_len", "run", "packed_offset")
_STORE = record(
    *("operand", "places", "tile_offset", "tile_bytes", "pitch", "rows", "lanes", "row_offsets", "lane_offsets"),
    *("contiguous", "bias_step", *EPILOGUE_FIELDS),
)


@cache
def _pack_task(dtype: str, vl: int):
    """w[g, o] as one row: index = g * c_out + o."""
    compute = DEFAULT_COMPUTE[dtype]
    data, packed, i64, args_at, params_at = (
        pointer(dtype),
        pointer(compute),
        pointer("i64"),
        struct(ARGS),
        struct(_PACK),
    )
    widen, widen_row = WIDEN[dtype], convert_row(dtype, compute, vl)
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]

    def pack_row(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        w = i64(args)[f.operand] + (index // f.c_out * f.w_g + index % f.c_out * f.w_o) * itemsize
        to, offsets = a.workspace + f.packed_offset + index * f.k_len * acc_bytes, i64(f.offsets)
        if f.run >= vl:
            for k in range(0, f.k_len, f.run):
                widen_row(to + k * acc_bytes, w + offsets[k] * itemsize, f.run)
        else:
            for k in range(f.k_len):
                packed(to)[k] = widen(data(w)[offsets[k]])

    return compile_task(pack_row, (dtype, vl), fastmath=FASTMATH)


@cache
def _store_task(dtype: str, vl: int):
    """One tile of the product, finished: index = its number in `places`, (offset in the output, in the bias) pairs."""
    i64, args_at, params_at, itemsize = pointer("i64"), struct(ARGS), struct(_STORE), ITEMSIZE[dtype]
    store = tile_store(dtype, DEFAULT_COMPUTE[dtype], vl)

    def store_tile(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        place = i64(f.places)[2 * index] * itemsize
        bias, residual = 0, 0
        if f.bias_pointer >= 0:
            bias = pointers[f.bias_pointer] + i64(f.places)[2 * index + 1] * itemsize
        if f.residual_pointer >= 0:
            residual = pointers[f.residual_pointer] + place
        flags = (f.activation, bias, 0, f.bias_step, residual, f.read_out)
        store(
            a.workspace + f.tile_offset + index * f.tile_bytes, f.pitch, f.rows, f.lanes,
            pointers[f.operand] + place, f.row_offsets, f.lane_offsets, f.contiguous, flags, a.alpha, a.beta,
        )  # fmt: skip

    return compile_task(store_tile, (dtype, vl), fastmath=FASTMATH)


def _store_program(
    problem: ConvProblem,
    device: Cpu,
    operand: int,
    tile_offset: int,
    places: np.ndarray,
    row_offsets: np.ndarray,
    lane_offsets: np.ndarray,
    bias_step: int = 0,
) -> Program:
    """Store dense tiles of rows x lanes that lie side by side, one at each of `places`."""
    rows, lanes = row_offsets.size, lane_offsets.size
    places, row_offsets, lane_offsets = (np.ascontiguousarray(t, np.int64) for t in (places, row_offsets, lane_offsets))
    ctx = filled(
        _STORE,
        operand=operand,
        places=places.ctypes.data,
        tile_offset=tile_offset,
        tile_bytes=rows * lanes * ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]],
        pitch=lanes,
        rows=rows,
        lanes=lanes,
        row_offsets=row_offsets.ctypes.data,
        lane_offsets=lane_offsets.ctypes.data,
        contiguous=int((np.diff(lane_offsets) == 1).all()),
        bias_step=bias_step,
        **epilogue_values(problem),
    )
    task = _store_task(problem.dtype, device.lanes(DEFAULT_COMPUTE[problem.dtype]))
    return Program([Phase(task, len(places), ctx)], [places, row_offsets, lane_offsets])


def _lower_program(lowerings: Sequence[tuple[Lowering, int]], first: int, rows: int, device: Cpu) -> Program:
    """Lower one strip of each operand to its offset in the workspace."""
    parts = [lowering.phase(first, rows, offset, device) for lowering, offset in lowerings]
    return Program([phase for phase, _ in parts], [table for _, tables in parts for table in tables])


class _Strips:
    """(first row, rows) of each strip, not made before they are asked for: an estimate wants their number alone."""

    def __init__(self, total_rows: int, row_bytes: int) -> None:
        strips = ceil(total_rows / max(1, _STRIP_BYTES // max(1, row_bytes)))
        self.total_rows, self.rows = total_rows, ceil(total_rows / strips)
        self.number = ceil(total_rows / self.rows)  # no __len__, which may be 2**63 - 1 at most

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.total_rows, self.rows):
            yield first, min(self.rows, self.total_rows - first)


def _round_up(size_bytes: int) -> int:
    return ceil(size_bytes / 64) * 64


class _GatherProduct:
    """The forward, or one gather of bwd_data. Workspace: packed w, a lowered strip, its product."""

    def __init__(self, problem: ConvProblem, geo: Geometry, gather: Gather) -> None:
        self._problem, self._geo = problem, geo
        compute = DEFAULT_COMPUTE[problem.dtype]
        self._low = Lowering.of(problem.dtype, geo.in_pointer, geo.n, geo.groups, geo.c_in, geo.in_strides, gather)
        self._planar_out = geo.out_strides[2] != 1
        self._w_shape = (geo.groups, geo.c_out, self._low.k_len)
        self._w_offsets = filter_offsets(geo, self._low.gather, not self._low.planar).reshape(-1)
        in_order = (np.diff(self._w_offsets) == 1).all() and geo.w_strides[:2] == dense_strides(self._w_shape, False)[
            :2
        ]
        self._in_place = bool(in_order) and problem.dtype == compute
        out_row_bytes = geo.groups * geo.c_out * gather.w.count * ITEMSIZE[compute]
        self._strips = _Strips(geo.n * gather.d.count * gather.h.count, self._low.row_bytes + out_row_bytes)
        rows = self._strips.rows
        self._low_offset = 0 if self._in_place else _round_up(prod(self._w_shape) * ITEMSIZE[compute])
        self._out_offset = self._low_offset + _round_up(rows * self._low.row_bytes)
        self.workspace_bytes = self._out_offset + _round_up(rows * out_row_bytes)
        self.strips, self.lowered_bytes = self._strips.number, self._strips.total_rows * self._low.row_bytes

    def runner(self, device: Cpu) -> Runner:
        pack = self._pack_program(device)
        steps = [
            (
                _lower_program([(self._low, self._low_offset)], first, rows, device),
                self._store_program(first, rows, device),
                rows,
            )
            for first, rows in self._strips
        ]

        def run(pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int) -> None:
            pack(pointers, scalars, workspace)
            w = self._filters(pointers, workspace)
            for lower, store, rows in steps:
                lower(pointers, scalars, workspace)
                low = self._low.matrix(workspace + self._low_offset, rows)
                np.matmul(w, low, out=self._product(workspace + self._out_offset, rows))
                store(pointers, scalars, workspace)

        return run

    def _filters(self, pointers: tuple[int, ...], workspace: int) -> np.ndarray:
        """w as (g, o, k), where it lies or packed."""
        address = pointers[self._geo.w_pointer] if self._in_place else workspace
        return matrix(address, self._w_shape, self._problem.dtype)

    def _product(self, address: int, rows: int) -> np.ndarray:
        """What is multiplied into, as (g, o, p): in memory so where the output is planar, else (g, p, o)."""
        g, o, pixels = self._geo.groups, self._geo.c_out, rows * self._low.gather.w.count
        if self._planar_out:
            return matrix(address, (g, o, pixels), self._problem.dtype)
        return matrix(address, (g, pixels, o), self._problem.dtype).swapaxes(1, 2)

    def _pack_program(self, device: Cpu) -> Program:
        geo, compute = self._geo, DEFAULT_COMPUTE[self._problem.dtype]
        ctx = filled(
            _PACK,
            operand=geo.w_pointer,
            c_out=geo.c_out,
            w_g=geo.w_strides[0],
            w_o=geo.w_strides[1],
            offsets=self._w_offsets.ctypes.data,
            k_len=self._w_offsets.size,
            run=run_length(self._w_offsets),
            packed_offset=0,
        )
        tasks = 0 if self._in_place else geo.groups * geo.c_out
        return Program([Phase(_pack_task(self._problem.dtype, device.lanes(compute)), tasks, ctx)], [self._w_offsets])

    def _store_program(self, first: int, rows: int, device: Cpu) -> Program:
        geo, (d, h, w) = self._geo, self._low.gather
        out_n, out_g, out_c, out_d, out_h, out_w = geo.out_strides
        row = np.arange(first, first + rows)
        row_d, row_n = row // h.count % d.count, row // (h.count * d.count)
        lines = row_n * out_n + _places(d, row_d) * out_d + _places(h, row % h.count) * out_h
        pixels = _places(w, np.arange(w.count)) * out_w
        groups, channels = np.arange(geo.groups)[:, None], np.arange(geo.c_out)
        if self._planar_out:
            places = groups * out_g + channels * out_c, groups * geo.c_out + channels
            tables, bias_step = (lines, pixels), 0
        else:
            places = groups * out_g + lines, groups * geo.c_out + np.zeros_like(lines)
            tables, bias_step = (pixels, channels), 1
        pairs = np.stack(places, axis=-1).reshape(-1, 2)
        return _store_program(self._problem, device, geo.out_pointer, self._out_offset, pairs, *tables, bias_step)


class _FilterProduct:
    """bwd_filter. Workspace: a lowered strip of x and of dy, the sum so far, the strip's product."""

    def __init__(self, problem: ConvProblem) -> None:
        self._problem = problem
        self._geo = geo = geometry(replace(problem, op="conv_fwd", epilogue=()))
        (gather,) = geo.gathers
        pixels = Gather(*(Axis(((0, 0),), 1, axis.count, 0, 1, axis.count) for axis in gather))
        self._x = Lowering.of(problem.dtype, 0, geo.n, geo.groups, geo.c_in, geo.in_strides, gather)
        self._dy = Lowering.of(problem.dtype, 1, geo.n, geo.groups, geo.c_out, geo.out_strides, pixels)
        self._strips = _Strips(geo.n * gather.d.count * gather.h.count, self._x.row_bytes + self._dy.row_bytes)
        rows = self._strips.rows
        self._shape = (geo.groups, geo.c_out, self._x.k_len)
        sum_bytes = _round_up(prod(self._shape) * ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]])
        self._dy_offset = _round_up(rows * self._x.row_bytes)
        self._sum_offset = self._dy_offset + _round_up(rows * self._dy.row_bytes)
        self._part_offset = self._sum_offset + sum_bytes
        self.workspace_bytes = self._part_offset + (sum_bytes if self._strips.number > 1 else 0)
        self.strips = self._strips.number
        self.lowered_bytes = self._strips.total_rows * (self._x.row_bytes + self._dy.row_bytes)

    def runner(self, device: Cpu) -> Runner:
        lowerings = [(self._x, 0), (self._dy, self._dy_offset)]
        steps = [(_lower_program(lowerings, first, rows, device), rows) for first, rows in self._strips]
        store, dtype = self._store_program(device), self._problem.dtype

        def run(pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int) -> None:
            total = matrix(workspace + self._sum_offset, self._shape, dtype)
            into = total
            for lower, rows in steps:
                lower(pointers, scalars, workspace)
                x, dy = self._x.matrix(workspace, rows), self._dy.matrix(workspace + self._dy_offset, rows)
                np.matmul(dy, x.swapaxes(1, 2), out=into)
                if into is not total:
                    np.add(total, into, out=total)
                else:
                    into = matrix(workspace + self._part_offset, self._shape, dtype)
            store(pointers, scalars, workspace)

        return run

    def _store_program(self, device: Cpu) -> Program:
        w_g, w_o, *_ = self._geo.w_strides
        places = np.arange(self._geo.groups)[:, None] * w_g + np.arange(self._geo.c_out) * w_o
        taps = filter_offsets(self._geo, self._x.gather, not self._x.planar).reshape(-1)
        pairs = np.stack([places, np.zeros_like(places)], axis=-1).reshape(-1, 2)
        return _store_program(self._problem, device, 2, self._sum_offset, pairs, np.zeros(1), taps)


def _places(axis: Axis, index: np.ndarray) -> np.ndarray:
    """The output positions of a gather's outputs."""
    return axis.out_start + index * axis.out_step


class Im2col(Candidate[NoConfig, Cpu]):
    """Lowering and a matrix product by BLAS; supports every convolution."""

    provider, algorithm = "cpu", "im2col"
    foreign_threads = True  # of NumPy's BLAS

    def __init__(self, op: str) -> None:
        self.op = op
        self.algo = "large" if op == "conv_fwd" else None

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        return YES

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> int:
        return max(product.workspace_bytes for product in _products(problem))

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> float:
        products = _products(problem)
        vector_fmas = problem.flops / 2 / device.lanes(DEFAULT_COMPUTE[problem.dtype])
        lowered = sum(product.lowered_bytes for product in products) / ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
        run = problem.c // problem.groups if problem.channels_last else problem.out_spatial[-1]
        result = sum(operand.size_elems for operand in problem.operands if operand.role == "out")
        side_ns = lowered * (_LOWER_NS + _RUN_NS / run) + result * _RESULT_NS
        phases = 3 * sum(product.strips for product in products)
        return kernel_us(device, vector_fmas, side_ns, device.threads, phases, _BLAS_EFFICIENCY)

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> Runner:
        runners = [product.runner(device) for product in _products(problem)]

        def run(pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int = 0, stream: int = 0) -> None:
            with np.errstate(all="ignore"):  # NaN and infinities are data
                for runner in runners:
                    runner(pointers, scalars, workspace, stream)

        return run


def _products(problem: ConvProblem) -> Sequence[_GatherProduct] | Sequence[_FilterProduct]:
    if problem.op == "conv_bwd_filter":
        return [_FilterProduct(problem)]
    geo = geometry(problem)
    return [_GatherProduct(problem, geo, gather) for gather in geo.gathers]


FWD, BWD_DATA, BWD_FILTER = Im2col("conv_fwd"), Im2col("conv_bwd_data"), Im2col("conv_bwd_filter")
