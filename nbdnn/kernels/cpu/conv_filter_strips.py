"""Filter gradient of few taps and channels, such as a first layer's: in strips of rows that a core's cache holds.

    sums[k, m] = sum over pixels p of a strip of  x[p + m] * dy[p, k]        m = (c, t, r, s)
    dw = the strips' sums, added

All of dw fits into second-level cache, so that x and dy come from memory once: a task copies what its strip needs of x,
zero-padded and widened, and of dy, [pixel][k] for a panel of nv vectors of output channels, and multiplies both while
they are in cache, by the tiles of `conv_filter_gemm.py`. x that no tap leaves, and dy whose pixels lie so already, are
read where they are. A strip is whole rows of an image, or a part of a long one. Runs of strips have sums of their own,
which are added in fixed order: the result does not depend on which worker did what.

strips_dot multiplies words of two pixels of bfloat16, where the CPU can (`conv_filter_pairs.py`); subnormal numbers
count as 0.

Traffic: x and dy once from memory, but for rows that two strips share; dw once. Accumulates in float32 (float64), one
rounding a step. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil, prod

import numpy as np

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import FASTMATH, compile_task
from nbdnn.kernels.cpu.conv_filter_pairs import pack_pixel_pairs, pad_pairs
from nbdnn.kernels.cpu.conv_filter_parts import (
    PAD_FIELDS,
    Sums,
    m_table,
    pack_pixels,
    pad_plane,
    pad_values,
    tiles_of,
)
from nbdnn.kernels.cpu.cost import COPY_NS, TILE_NS, TURN_NS, fmas_of_step, kernel_us
from nbdnn.kernels.cpu.geometry import Gather, geometry, spatial3, tensor_strides
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.micro_kernel import PAIRS, Config, tile_product
from nbdnn.kernels.cpu.pack_pairs import refused_pairs
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.scratch import own_pages, whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

MOST_SUMS_BYTES = 256 << 10  # of all sums, in whole vectors: a quarter of a second-level cache or so
_STRIP_SHARE = 0.35  # of that cache, for what a strip has of x and dy
_LEAST_PIXELS = 128  # of a strip that is not made smaller for the sake of more tasks
_TASKS_PER_THREAD = 4
_BLOCK_ROWS = 96  # m that are stored at a time: a multiple of every tile's, so that no block begins behind the last m
_TURN_NS = 0.2  # an element of dy in planes, one thread: the prior for the guess

_PARAMS = record(
    *PAD_FIELDS,
    *("y_n", "y_k", "y_d", "y_h", "y_w", "count_d", "count_h", "count_w", "step_d", "step_h"),
    *("low_d", "low_h", "low_w", "padded_d", "padded_h", "pads", "packs", "k", "panels", "m_rows", "m_table"),
    *("step_table", "rows", "columns", "strips_h", "strips_w", "strips", "split_strips"),
    *("sums_offset", "panel_sums_bytes", "split_bytes", "strips_offset", "strip_bytes", "dy_offset"),
)


@cache
def _multiply_task(dtype: str, mr: int, nv: int, vl: int, pairs: bool):
    """The sums of a run of strips."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    i64, args_at, params_at, row_slots = pointer("i64"), struct(ARGS), struct(_PARAMS), stack(mr * 8)
    clear, pad = zero_fill(compute), pad_pairs() if pairs else pad_plane(dtype, vl)
    pack = pack_pixel_pairs(lanes) if pairs else pack_pixels(dtype, vl, lanes)
    product = tile_product(compute, mr, nv, vl, None, lanes * acc_bytes, True, PAIRS if pairs else "")

    def multiply(args, ctx, index, worker):
        a, f, slots = args_at(args), params_at(ctx), row_slots()
        mine = a.workspace + f.strips_offset + worker * f.strip_bytes
        sums = a.workspace + f.sums_offset + index * f.split_bytes
        clear(sums, f.split_bytes // acc_bytes)
        plane_bytes = f.padded_h * f.padded_w * f.run * acc_bytes
        for strip in range(index * f.split_strips, min(f.strips, (index + 1) * f.split_strips)):
            first_w, rest = strip % f.strips_w * f.columns, strip // f.strips_w
            first_h, rest = rest % f.strips_h * f.rows, rest // f.strips_h
            d, n = rest % f.count_d, rest // f.count_d
            columns, rows = min(f.columns, f.count_w - first_w), min(f.rows, f.count_h - first_h)
            steps = rows * ((columns + 1) // 2 if pairs else columns)
            low_d, low_h = d * f.step_d + f.low_d, first_h * f.step_h + f.low_h
            low_w, image = first_w * f.step_w + f.low_w, a.p0 + n * f.x_n * itemsize
            if f.pads:
                height = f.padded_h - (f.rows - rows) * f.step_h
                for plane in range(f.channels // f.run):
                    for depth in range(f.padded_d):
                        to = mine + (plane * f.padded_d + depth) * plane_bytes
                        pad(f, to, image + plane * f.x_c * itemsize, low_d + depth, low_h, low_w, height)
                image = mine
            else:
                image += (low_d * f.x_d + low_h * f.x_h + low_w * f.x_w) * itemsize
            shares = a.p1 + (n * f.y_n + d * f.y_d + first_h * f.y_h + first_w * f.y_w) * itemsize
            for panel in range(f.panels):
                used = min(lanes, f.k - panel * lanes)
                b = shares
                if f.packs:
                    b = mine + f.dy_offset
                    pack(f, b, shares + panel * lanes * f.y_k * itemsize, used, rows, columns)
                for first in range(0, f.m_rows, mr):
                    for i in range(mr):
                        m = min(first + i, f.m_rows - 1)
                        i64(slots)[i] = image + i64(f.m_table)[m] * acc_bytes
                    to = sums + panel * f.panel_sums_bytes + first * lanes * acc_bytes
                    vectors = (used + vl - 1) // vl
                    product(vectors, slots, f.step_table, b, 0, steps, to, lanes * acc_bytes)

    return compile_task(multiply, (dtype, mr, nv, vl, pairs), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How the pixels are cut into strips and these into splits; offsets in the workspace, or in what a worker has."""

    gather: Gather
    pads: bool
    packs: bool
    rows: int
    columns: int
    splits: int
    split_strips: int
    padded: tuple[int, int, int]
    sums: Sums
    strips_offset: int
    strip_bytes: int
    dy_offset: int

    @property
    def strips_h(self) -> int:
        return ceil(self.gather.h.count / self.rows)

    @property
    def strips_w(self) -> int:
        return ceil(self.gather.w.count / self.columns)

    @property
    def panel_sums_bytes(self) -> int:
        return self.sums.blocks * self.sums.block_bytes


def _strip(problem: ConvProblem, gather: Gather, lanes: int, device: Cpu) -> tuple[int, int]:
    """Rows and columns of outputs of a strip: whole rows, or a part of one."""
    acc_bytes, most_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]], device.l2_bytes * _STRIP_SHARE

    def size_bytes(rows: int, columns: int) -> int:
        return acc_bytes * (problem.c * prod(_padded(gather, rows, columns)) + rows * columns * lanes)

    planes, wanted = problem.n * gather.d.count, device.threads * _TASKS_PER_THREAD
    rows, columns = gather.h.count, gather.w.count
    while rows > 1:
        few = planes * ceil(gather.h.count / rows) < wanted and rows * columns > _LEAST_PIXELS
        # Of widely dilated filters each strip has the rows between the taps as well: fewer strips copy less.
        is_gap = gather.h.span >= rows * gather.h.in_step and size_bytes(1, columns) > most_bytes
        if not few and (is_gap or size_bytes(rows, columns) <= most_bytes):
            return rows, columns
        rows = ceil(rows / 2)
    while columns > _LEAST_PIXELS:
        few = planes * gather.h.count * ceil(gather.w.count / columns) < wanted
        if not few and size_bytes(1, columns) <= most_bytes:
            break
        columns = ceil(columns / 2)
    return 1, columns


def _padded(gather: Gather, rows: int, columns: int) -> tuple[int, int, int]:
    """Extents of what a strip reads of a channel."""
    axes = zip((1, rows, columns), gather, strict=True)
    d, h, w = ((count - 1) * axis.in_step + axis.span + 1 for count, axis in axes)
    return d, h, w


@lru_cache(maxsize=256)
def _plan(problem: ConvProblem, config: Config, device: Cpu) -> _Plan:
    acc_bytes, lanes = (
        ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]],
        config.nv * device.lanes(DEFAULT_COMPUTE[problem.dtype]),
    )
    (gather,) = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout="")).gathers
    is_wide = problem.dtype == DEFAULT_COMPUTE[problem.dtype]
    rows, columns = _strip(problem, gather, lanes, device)
    strips = problem.n * gather.d.count * ceil(gather.h.count / rows) * ceil(gather.w.count / columns)
    split_strips = ceil(strips / min(strips, device.threads * _TASKS_PER_THREAD))
    padded, splits = _padded(gather, rows, columns), ceil(strips / split_strips)

    m_rows, panels = problem.c * prod(problem.filter), ceil(problem.k / lanes)
    blocks = ceil(m_rows / _BLOCK_ROWS)
    block_rows = ceil(ceil(m_rows / blocks) / config.mr) * config.mr
    block_bytes = block_rows * lanes * acc_bytes
    split_bytes = own_pages(panels * blocks * block_bytes)
    dy_offset = whole_lines(problem.c * prod(padded) * acc_bytes)
    strip_bytes = own_pages(dy_offset + rows * columns * lanes * acc_bytes)
    strips_offset = splits * split_bytes
    return _Plan(
        gather=gather,
        pads=not is_wide or any(axis.reaches_outside for axis in gather),
        packs=not (is_wide and problem.y_channels_last and problem.k == lanes),
        rows=rows,
        columns=columns,
        splits=splits,
        split_strips=split_strips,
        padded=padded,
        sums=Sums(
            lanes, panels, m_rows, blocks, block_rows, splits, 0, block_bytes, split_bytes,
            strips_offset + device.threads * strip_bytes,
        ),
        strips_offset=strips_offset,
        strip_bytes=strip_bytes,
        dy_offset=dy_offset,
    )  # fmt: skip


class FilterStrips(Candidate[Config, Cpu]):
    """Filter gradient of a dw that stays in cache, by strips of pixels."""

    op, provider, algo = "conv_bwd_filter", "cpu", "small"

    def __init__(self, pairs: bool = False) -> None:
        self.algorithm, self._pairs = "strips_dot" if pairs else "filter_strips", pairs

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if self._pairs and (reason := refused_pairs(problem, device)):
            return Support(False, reason)
        if problem.groups > 1:
            return Support(False, f"{problem.groups} groups, this kernel takes 1")
        compute = DEFAULT_COMPUTE[problem.dtype]
        vl = device.lanes(compute)
        size_bytes = problem.c * prod(problem.filter) * ceil(problem.k / vl) * vl * ITEMSIZE[compute]
        if size_bytes > MOST_SUMS_BYTES:
            return Support(False, f"the sums of dw have {size_bytes} bytes, this kernel takes {MOST_SUMS_BYTES}")
        one_image = problem.operands[0].size_bytes // max(1, problem.n)
        if one_image >= 1 << 31:
            return Support(False, f"an image has {one_image} bytes: offsets are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        return tiles_of(problem, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        sums = _plan(problem, config, device).sums
        return sums.worker_offset + device.threads * sums.worker_bytes(problem)

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        plan, vl = _plan(problem, config, device), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        sums, row_steps = plan.sums, ceil(plan.gather.w.count / (1 + self._pairs))
        steps = problem.n * plan.gather.d.count * plan.gather.h.count * row_steps
        strips = problem.n * plan.gather.d.count * plan.strips_h * plan.strips_w
        rows = ceil(sums.m_rows / config.mr)
        side_ns = sums.panels * rows * strips * TILE_NS + sums.m_rows * problem.k * (plan.splits * COPY_NS + TURN_NS)
        side_ns += plan.packs * steps * problem.k * (COPY_NS if problem.y_channels_last else _TURN_NS)
        side_ns += plan.pads * strips * problem.c * prod(plan.padded) * COPY_NS
        fmas = ceil(problem.k / vl) * rows * config.mr * steps * fmas_of_step(device, self._pairs)
        return kernel_us(device, fmas, side_ns, plan.splits, 2)

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        plan = _plan(problem, config, device)
        ctx, keep = _parameters(problem, plan, self._pairs)
        store, needed = plan.sums.phase(problem, device)
        vl = device.lanes(DEFAULT_COMPUTE[problem.dtype])
        task = _multiply_task(problem.dtype, config.mr, config.nv, vl, self._pairs)
        return Program([Phase(task, plan.splits, ctx), store], [*keep, *needed])


def _parameters(problem: ConvProblem, plan: _Plan, pairs: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    dy, gather, acc_bytes = problem.operands[1], plan.gather, ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    extents = plan.padded if plan.pads else spatial3(problem.spatial)
    _, c, d, h, w = tensor_strides((1, problem.c, *extents), problem.channels_last)
    rows = m_table(problem, gather, (c, d, h, w), (gather.d.low, gather.h.low, gather.w.low))
    columns = np.arange(0, plan.columns, 1 + pairs)
    p_h, p_w = np.arange(plan.rows) * gather.h.in_step * h, columns * gather.w.in_step * w
    steps = ((p_h[:, None] + p_w) * acc_bytes).reshape(-1).astype(np.int32)
    y_n, y_k, y_d, y_h, y_w = tensor_strides(dy.shape, problem.y_channels_last)
    values = pad_values(problem, gather, plan.padded[2], 0)
    for name, axis in zip("dhw", gather, strict=True):
        values |= {f"count_{name}": axis.count, f"step_{name}": axis.in_step, f"low_{name}": axis.low}
    ctx = filled(
        _PARAMS,
        **values,
        **{name: getattr(plan, name) for name in _PARAMS.names or () if hasattr(plan, name)},
        y_n=y_n,
        y_k=y_k,
        y_d=y_d,
        y_h=y_h,
        y_w=y_w,
        padded_d=plan.padded[0],
        padded_h=plan.padded[1],
        k=problem.k,
        panels=plan.sums.panels,
        m_rows=plan.sums.m_rows,
        m_table=rows.ctypes.data,
        step_table=steps.ctypes.data,
        strips=problem.n * gather.d.count * plan.strips_h * plan.strips_w,
        sums_offset=0,
        split_bytes=plan.sums.split_bytes,
    )
    return ctx, [steps, rows]


BWD_FILTER, BWD_FILTER_DOT = FilterStrips(), FilterStrips(pairs=True)
