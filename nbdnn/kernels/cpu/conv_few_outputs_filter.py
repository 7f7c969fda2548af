"""Filter gradient of few filters with stride 1, any dilation, groups, 2-D, 3-D.

    dw[k, c, t, r, s] = sum over pixels of  dy[k, p] * x[c, p + (t, r, s)]           k <= 12

A task takes strips of output rows. Of each it copies dy, whose rows it parts by as many zeros as taps reach beyond a
row, and lets the channels of x pass by, a few at a time (`lower_planes.py`): a strip is one run of columns, of which a
vector of x is multiplied with one of each filter's dy, for every tap (`correlate.py`). Tiles of taps and filters keep
their sums in registers, a vector for each, whose lanes are added up at the end of a strip. Kernels that have filters in
their lanes (`filter_strips`) leave most of them empty.

Runs of strips have sums of their own, which are added in fixed order: the result does not depend on which worker did
what.

Traffic: x and dy once from memory, but for rows that two strips share; the copy of x once for a tile of filters.
Accumulates in float32 (float64): in a lane one rounding a product, then the lanes, the strips, their runs. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil, prod

import numpy as np

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import FASTMATH, compile_task
from nbdnn.kernels.cpu.correlate import correlate
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import Gather, Geometry, geometry, tensor_strides
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_planes import LINE_NS, LOW_FIELDS, element_ns, low_values, lower_planes
from nbdnn.kernels.cpu.pack import filter_offsets
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.scratch import own_pages, whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_LOW_BYTES = 32 << 10  # of the channels that pass by together
_DY_BYTES = 64 << 10  # of dy in a strip
_STRIP_ROWS = 16
_TASKS_PER_THREAD = 4
_TILE_NS = 60.0  # of adding up lanes

_MOST_FILTERS = 12
_MOST_TAPS = 24  # of a row: a tile has all of them
_SUMS = {"avx512": 28, "other": 12}  # vectors in registers
# Of taps in a tile, which has those of whole channels or divides them evenly: 2x64x256x256 with 3x3 took 2.3 ms by
# eight rows of three channels, 1.2 by three (Zen 5, two threads).
_MOST_ROWS = 4

_LOW = record(*LOW_FIELDS)
_PARAMS = record(
    *("low_x", "low_dy", "x_n", "x_c", "y_n", "y_k", "k", "c", "count_d", "count_h", "span_w", "low_pitch", "step_w"),
    *("strip_rows", "strips", "total_strips", "splits", "split_strips", "split_bytes", "blocks", "block_channels"),
    *("step_channels", "tap_rows", "row_offsets", "dy_plane_bytes", "low_offset", "worker_offset", "worker_bytes"),
    *("dw_elems", "w_k", "lane_offsets", "read_out"),
)


@dataclass(frozen=True)
class Config:
    """Rows of taps and filters of a tile, whose sums are in registers."""

    rows: int
    filters: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.filters}"


@cache
def _multiply_task(dtype: str, vl: int, config: Config, taps: int):
    """A run of strips, a block of channels of one group: index = (g * blocks + block) * splits + split."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    args_at, params_at, lowered_at = struct(ARGS), struct(_PARAMS), struct(_LOW)
    lower, clear = lower_planes(dtype, vl), zero_fill(compute)
    mr, mk = config.rows, config.filters
    products = correlate(compute, vl, mr, taps, mk)

    def multiply(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        split, rest = index % f.splits, index // f.splits
        block, g = rest % f.blocks, rest // f.blocks
        first, end = block * f.block_channels, min(f.c, (block + 1) * f.block_channels)
        dy = a.workspace + f.worker_offset + worker * f.worker_bytes
        low, channel_bytes, pitch = dy + f.low_offset, f.tap_rows * taps * acc_bytes, f.dw_elems * acc_bytes
        sums = a.workspace + split * f.split_bytes + g * f.k * pitch
        for k in range(f.k):
            clear(sums + k * pitch + first * channel_bytes, (end - first) * f.tap_rows * taps)
        for strip in range(split * f.split_strips, min(f.total_strips, (split + 1) * f.split_strips)):
            first_row, rest = strip % f.strips * f.strip_rows, strip // f.strips
            depth, n = rest % f.count_d, rest // f.count_d
            rows = min(f.strip_rows, f.count_h - first_row)
            vectors = (rows * f.low_pitch - f.span_w + vl - 1) // vl
            lower(
                a.p1 + (n * f.y_n + g * f.k * f.y_k) * itemsize, dy, lowered_at(f.low_dy), depth, first_row, rows, f.k
            )
            for c in range(first, end, f.step_channels):
                channels = min(f.step_channels, end - c)
                image = a.p0 + (n * f.x_n + (g * f.c + c) * f.x_c) * itemsize
                lower(image, low, lowered_at(f.low_x), depth, first_row, rows, channels)
                tap_rows = channels * f.tap_rows
                for row in range(0, tap_rows, mr):
                    for k in range(0, f.k, mk):
                        to = sums + k * pitch + c * channel_bytes + row * taps * acc_bytes
                        products(
                            low, f.row_offsets + 4 * row, f.step_w, dy + k * f.dy_plane_bytes, f.dy_plane_bytes,
                            vectors, min(mr, tap_rows - row), min(mk, f.k - k), to, pitch,
                        )  # fmt: skip

    return compile_task(multiply, (dtype, vl, config, taps), fastmath=FASTMATH)


@cache
def _store_task(dtype: str, vl: int):
    """The sums of all splits of one filter, added and stored."""
    compute = DEFAULT_COMPUTE[dtype]
    acc_of, args_at, params_at, slot, i64 = (
        pointer(compute), struct(ARGS), struct(_PARAMS), stack(8), pointer("i64"),
    )  # fmt: skip
    store, acc_bytes = tile_store(dtype, compute, vl), ITEMSIZE[compute]

    def store_filter(args, ctx, index, worker):
        a, f, row = args_at(args), params_at(ctx), slot()
        count, sums = f.dw_elems, a.workspace + index * f.dw_elems * acc_bytes
        total = acc_of(sums)
        for split in range(1, f.splits):
            part = acc_of(sums + split * f.split_bytes)
            for i in range(count):
                total[i] += part[i]
        i64(row)[0] = index * f.w_k
        store(sums, count, 1, count, a.p2, row, f.lane_offsets, 0, (0, 0, 0, 0, 0, f.read_out), a.alpha, a.beta)

    return compile_task(store_filter, (dtype, vl), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How the pixels are cut into strips of rows and these into splits, and what a worker has of a strip."""

    geo: Geometry
    gather: Gather
    k: int
    c: int
    strip_rows: int
    strips: int
    total_strips: int
    splits: int
    split_strips: int
    blocks: int
    block_channels: int
    step_channels: int
    low_rows: int
    low_pitch: int
    plane_elems: int
    dy_plane_elems: int
    low_offset: int
    split_bytes: int
    worker_offset: int
    worker_bytes: int
    total_bytes: int


@lru_cache(maxsize=256)
def _plan(problem: ConvProblem, device: Cpu) -> _Plan:
    compute = DEFAULT_COMPUTE[problem.dtype]
    acc_bytes, vl = ITEMSIZE[compute], device.lanes(compute)
    geo = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout=""))
    (gather,) = geo.gathers
    k, c = problem.k // problem.groups, problem.c // problem.groups
    low_pitch = gather.w.count + gather.w.span
    most_rows = min(_STRIP_ROWS, max(1, _DY_BYTES // (k * low_pitch * acc_bytes)))
    rows = ceil(gather.h.count / ceil(gather.h.count / most_rows))
    strips = ceil(gather.h.count / rows)
    total_strips, wanted = problem.n * gather.d.count * strips, device.threads * _TASKS_PER_THREAD
    split_strips = ceil(total_strips / min(total_strips, ceil(wanted / problem.groups)))
    splits = ceil(total_strips / split_strips)
    blocks = min(c, ceil(wanted / (splits * problem.groups)))
    low_rows = rows + gather.h.span
    plane_elems, dy_plane_elems = low_rows * low_pitch + vl, rows * low_pitch + vl
    channel_bytes = len(gather.d.taps) * plane_elems * acc_bytes
    least = 1 if problem.layout in ("nchw", "ncdhw") else vl
    block_channels = ceil(ceil(c / blocks) / least) * least
    step = min(block_channels, c, max(least, _LOW_BYTES // channel_bytes // least * least))
    low_offset = whole_lines(k * dy_plane_elems * acc_bytes)
    split_bytes = own_pages(problem.k * c * prod(problem.filter) * acc_bytes)
    worker_bytes = own_pages(low_offset + step * channel_bytes)
    return _Plan(
        geo=geo,
        gather=gather.in_image_order(),
        k=k,
        c=c,
        strip_rows=rows,
        strips=strips,
        total_strips=total_strips,
        splits=splits,
        split_strips=split_strips,
        blocks=ceil(c / block_channels),
        block_channels=block_channels,
        step_channels=step,
        low_rows=low_rows,
        low_pitch=low_pitch,
        plane_elems=plane_elems,
        dy_plane_elems=dy_plane_elems,
        low_offset=low_offset,
        split_bytes=split_bytes,
        worker_offset=splits * split_bytes,
        worker_bytes=worker_bytes,
        total_bytes=splits * split_bytes + device.threads * worker_bytes,
    )


class FewOutputsFilter(Candidate[Config, Cpu]):
    """Filter gradient of few filters, columns in the vector lanes."""

    op, provider, algorithm, algo = "conv_bwd_filter", "cpu", "few_outputs", "small"

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        filters = problem.k // problem.groups
        if filters > _MOST_FILTERS:
            return Support(False, f"{filters} filters, this kernel takes {_MOST_FILTERS}")
        if set(problem.stride[-2:]) != {1}:
            return Support(False, f"stride {problem.stride}: neighbours are to meet neighbours")
        if problem.filter[-1] > _MOST_TAPS:
            return Support(False, f"a row of {problem.filter[-1]} taps: {_MOST_TAPS} sums are kept")
        if (strip_bytes := _plan(problem, device).worker_bytes) >= 1 << 31:
            return Support(False, f"a strip of rows has {strip_bytes} bytes: offsets are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        most, taps, k = _SUMS.get(device.isa, _SUMS["other"]), problem.filter[-1], problem.k // problem.groups
        filters = max(1, min(k, 4, most // taps))
        filters = ceil(k / ceil(k / filters))  # shared out evenly
        rows, tap_rows = max(1, min(_MOST_ROWS, most // (taps * filters))), prod(problem.filter[:-1])
        rows = ceil(tap_rows / ceil(tap_rows / rows)) if rows < tap_rows else rows // tap_rows * tap_rows
        return (Config(rows, filters),)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        return _plan(problem, device).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        plan, vl, taps = _plan(problem, device), device.lanes(DEFAULT_COMPUTE[problem.dtype]), problem.filter[-1]
        strips, dw_rows = plan.total_strips * problem.groups, plan.c * prod(problem.filter) // taps
        tiles = strips * ceil(dw_rows / config.rows) * ceil(plan.k / config.filters)
        vectors = ceil(plan.strip_rows * plan.low_pitch / vl)
        loads_and_products = taps * config.rows * (config.filters + 1) + config.filters
        planes = plan.c * len(plan.gather.d.taps)
        copies = strips * (planes * plan.plane_elems + plan.blocks * plan.k * plan.dy_plane_elems)
        lines = strips * (planes * plan.low_rows + plan.blocks * plan.k * plan.strip_rows)
        planar = problem.layout in ("nchw", "ncdhw")
        side_ns = copies * element_ns(plan.c, planar) + lines * LINE_NS + tiles * _TILE_NS
        tasks = plan.splits * plan.blocks * problem.groups
        return kernel_us(device, tiles * vectors * loads_and_products, side_ns, tasks, 2)

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        plan, vl = _plan(problem, device), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        gather, (x, dy, dw), acc_bytes = plan.gather, problem.operands, ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
        x_n, x_c, *x_axes = tensor_strides(x.shape, problem.channels_last)
        y_n, y_k, *y_axes = tensor_strides(dy.shape, problem.y_channels_last)
        of_dy = Gather(*(replace(axis, taps=((0, 0),), in_step=1, in_extent=axis.count) for axis in gather))
        x_values, x_depths = low_values(
            gather, (x_c, *x_axes), plan.strip_rows, plan.low_pitch, plan.plane_elems, plan.step_channels
        )
        dy_values, dy_depths = low_values(
            of_dy, (y_k, *y_axes), plan.strip_rows, plan.low_pitch, plan.dy_plane_elems, 0
        )
        low_x, low_dy = filled(_LOW, **x_values), filled(_LOW, **dy_values)
        row_offsets, lane_offsets = _row_offsets(plan, acc_bytes), filter_offsets(plan.geo, gather).reshape(-1)
        columns = [offset for _, offset in gather.w.taps]
        ctx = filled(
            _PARAMS,
            **{name: getattr(plan, name) for name in _PARAMS.names or () if hasattr(plan, name)},
            low_x=low_x.ctypes.data,
            low_dy=low_dy.ctypes.data,
            x_n=x_n,
            x_c=x_c,
            y_n=y_n,
            y_k=y_k,
            count_d=gather.d.count,
            count_h=gather.h.count,
            span_w=gather.w.span,
            step_w=(columns[1] - columns[0] if len(columns) > 1 else 0) * acc_bytes,
            tap_rows=len(gather.d.taps) * len(gather.h.taps),
            row_offsets=row_offsets.ctypes.data,
            dy_plane_bytes=plan.dy_plane_elems * acc_bytes,
            dw_elems=lane_offsets.size,
            w_k=dw.strides[0],
            lane_offsets=lane_offsets.ctypes.data,
            read_out=int("beta" in problem.epilogue),
        )
        multiply = _multiply_task(problem.dtype, vl, config, len(columns))
        phases = [
            Phase(multiply, plan.splits * plan.blocks * problem.groups, ctx),
            Phase(_store_task(problem.dtype, vl), problem.k, ctx),
        ]
        return Program(phases, [low_x, low_dy, x_depths, dy_depths, row_offsets, lane_offsets])


def _row_offsets(plan: _Plan, acc_bytes: int) -> np.ndarray:
    """Byte offset in the copied rows of each row of taps (c, t, r)."""
    rows = np.array([offset - plan.gather.h.low for _, offset in plan.gather.h.taps], np.int64) * plan.low_pitch
    planes = np.arange(plan.step_channels * len(plan.gather.d.taps))[:, None] * plan.plane_elems
    return ((planes + rows) * acc_bytes).astype(np.int32).reshape(-1)


BWD_FILTER = FewOutputsFilter()
