"""Filter gradient as an implicit GEMM: any stride, dilation, groups, 2-D and 3-D, both layouts.

    tile[m, k] += sum over pixels p of  x[p + m] * dy[p, k]        m < mr of (c, t, r, s), k < nv vectors of channels

dy is packed into panels of nv vectors of output channels, [group][panel][pixel][k]; x is read one broadcast scalar at a
time, at the address of its tap plus a table of pixel offsets, from where it lies or, where a tap can fall beyond a
border or the data are 16-bit, from a zero-padded copy in the same layout. m runs through dw[k] in its order in memory.
The pixels are taken in chunks whose part of a panel stays in second-level cache, while the sums stay in a block of m
beside it; where there are few blocks, the pixels are split among several, whose sums are added in fixed order: the
result does not depend on which worker did what.

filter_dot multiplies words of two pixels of bfloat16, where the CPU can (`conv_filter_pairs.py`). Subnormal numbers
count as 0.

Traffic: dy once for each block of m, x once a panel, both from cache. Accumulates in float32 (float64), one rounding a
step. Source: own.
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
    gap_elems,
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
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_CHUNK_SHARE = 0.25  # of the second-level cache for the chunk of a panel that is multiplied at a time
_BLOCK_ROWS = 96  # most m of one task: their sums and the lines of x they read stay in first-level cache
_TASKS_PER_THREAD = 4
_MOST_INSIDE = 0.85  # of rows and their taps: where more are, an image is not cut for the sake of the others
_MEMORY_NS = 0.045  # a byte
_WORTH_A_COPY = 512  # products of an element: a copy with gaps takes less than is lost in few sets of a cache
_TABLE_PIXELS = 4096  # small images share a table of pixel offsets, so that a chunk can span several

_PARAMS = record(
    *PAD_FIELDS,
    *("n", "groups", "k_group", "x_g", "y_n", "y_k", "y_d", "y_h", "y_w", "count_d", "count_h", "count_w"),
    *("low_d", "low_h", "low_w", "padded_d", "padded_h", "padded_offset", "a_n", "a_g", "in_place"),
    *("panels", "panel_offset", "panel_bytes", "row_steps", "steps", "step_table", "images", "image_sets"),
    *("chunk", "set_chunks", "m_rows", "m_table", "met", "blocks", "block_rows", "splits", "split_chunks"),
    *("sums_offset", "sums_bytes"),
)


@cache
def _pad_task(dtype: str, vl: int, pairs: bool):
    """Zero-padded, widened copy of one image: index = (n * channels + c) * depth, or n * depth where interleaved."""
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[DEFAULT_COMPUTE[dtype]]
    args_at, params_at, pad = struct(ARGS), struct(_PARAMS), pad_pairs() if pairs else pad_plane(dtype, vl)

    def pad_image(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        to = a.workspace + f.padded_offset + index * f.padded_h * f.padded_w * f.pitch * acc_bytes
        e_d, rest = index % f.padded_d, index // f.padded_d
        channels = f.channels // f.run
        image = a.p0 + (rest // channels * f.x_n + rest % channels * f.x_c) * itemsize
        pad(f, to, image, e_d + f.low_d, f.low_h, f.low_w, f.padded_h)

    return compile_task(pad_image, (dtype, vl, pairs), fastmath=FASTMATH)


@cache
def _panel_task(dtype: str, vl: int, lanes: int, pairs: bool):
    """Panels of one row of dy: index = ((n * depth + d) * height + h) * groups + g."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    args_at, params_at = struct(ARGS), struct(_PARAMS)
    pack = pack_pixel_pairs(lanes) if pairs else pack_pixels(dtype, vl, lanes)

    def pack_row(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        g, row = index % f.groups, index // f.groups
        h, rest = row % f.count_h, row // f.count_h
        d, n = rest % f.count_d, rest // f.count_d
        source = n * f.y_n + g * f.k_group * f.y_k + d * f.y_d + h * f.y_h
        for panel in range(f.panels):
            used = min(lanes, f.k_group - panel * lanes)
            at = a.p1 + (source + panel * lanes * f.y_k) * itemsize
            to = a.workspace + f.panel_offset + (g * f.panels + panel) * f.panel_bytes
            pack(f, to + row * f.row_steps * lanes * acc_bytes, at, used, 1, f.count_w)

    return compile_task(pack_row, (dtype, vl, lanes, pairs), fastmath=FASTMATH)


@cache
def _multiply_task(dtype: str, mr: int, nv: int, vl: int, pairs: bool):
    """One block of m for one panel and one split of the pixels: index = ((g*panels + panel)*blocks + block)*splits."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    i64, args_at, params_at, row_slots = pointer("i64"), struct(ARGS), struct(_PARAMS), stack(mr * 8)
    clear = zero_fill(compute)
    product = tile_product(compute, mr, nv, vl, None, lanes * acc_bytes, True, PAIRS if pairs else "")

    def multiply(args, ctx, index, worker):
        a, f, slots = args_at(args), params_at(ctx), row_slots()
        split, rest = index % f.splits, index // f.splits
        block, gp = rest % f.blocks, rest // f.blocks
        g, panel = gp // f.panels, gp % f.panels
        vectors = (min(lanes, f.k_group - panel * lanes) + vl - 1) // vl
        sums = a.workspace + f.sums_offset + index * f.sums_bytes
        first, end = block * f.block_rows, min(f.m_rows, (block + 1) * f.block_rows)
        tiles = (end - first + mr - 1) // mr
        clear(sums, tiles * mr * lanes)
        source = a.p0 + g * f.x_g * itemsize if f.in_place else a.workspace + f.padded_offset + g * f.a_g * acc_bytes
        panel_address = a.workspace + f.panel_offset + gp * f.panel_bytes
        for chunk in range(split * f.split_chunks, min(f.image_sets * f.set_chunks, (split + 1) * f.split_chunks)):
            image_set, p = chunk // f.set_chunks, chunk % f.set_chunks * f.chunk
            set_steps = min(f.images, f.n - image_set * f.images) * f.steps
            count = min(f.chunk, set_steps - p)
            if count <= 0:
                continue
            image = source + image_set * f.images * f.a_n * acc_bytes
            b = panel_address + (image_set * f.images * f.steps + p) * lanes * acc_bytes
            for tile in range(tiles):
                # Steps of rows that these taps meet beside the image are left out.
                met = i64(f.met + 16 * (first // mr + tile))
                start, stop = max(p, met[0]), min(p + count, met[1])
                for i in range(mr):
                    m = min(first + tile * mr + i, f.m_rows - 1)
                    i64(slots)[i] = image + i64(f.m_table)[m] * acc_bytes
                to, at = sums + tile * mr * lanes * acc_bytes, b + (start - p) * lanes * acc_bytes
                product(vectors, slots, f.step_table + 4 * start, at, 0, max(0, stop - start), to, lanes * acc_bytes)

    return compile_task(multiply, (dtype, mr, nv, vl, pairs), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How the result is cut into panels and blocks and the pixels into chunks and splits; workspace offsets.

    steps: of an image, pixels or pairs of them, row_steps of each row.
    """

    gather: Gather
    in_place: bool
    gap: int
    padded: tuple[int, int, int]
    panels: int
    row_steps: int
    steps: int
    images: int
    chunk: int
    m_rows: int
    blocks: int
    block_rows: int
    splits: int
    split_chunks: int
    panel_bytes: int
    sums_bytes: int
    panel_offset: int
    sums_offset: int
    worker_offset: int

    @property
    def set_chunks(self) -> int:
        """Chunks of the pixels that share one table."""
        return ceil(self.images * self.steps / self.chunk)

    def sums(self, lanes: int) -> Sums:
        return Sums(
            lanes, self.panels, self.m_rows, self.blocks, self.block_rows, self.splits,
            self.sums_offset, self.splits * self.sums_bytes, self.sums_bytes, self.worker_offset,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _plan(problem: ConvProblem, config: Config, device: Cpu, pairs: bool) -> _Plan:
    compute = DEFAULT_COMPUTE[problem.dtype]
    acc_bytes, vl = ITEMSIZE[compute], device.lanes(compute)
    (gather,) = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout="")).gathers
    axes = (gather.d, gather.h, gather.w)
    k_group = problem.k // problem.groups
    copies = problem.dtype != compute or any(axis.reaches_outside for axis in axes)
    products = k_group * prod(problem.filter) * gather.pixels / max(1, prod(problem.spatial))  # of an element of x
    gap = gap_elems(problem, gather) if copies or products >= _WORTH_A_COPY else 0
    in_place = not copies and not gap
    padded = tuple((axis.count - 1) * axis.in_step + axis.span + 1 for axis in axes)
    lanes, c_group = config.nv * vl, problem.c // problem.groups
    row_steps = ceil(gather.w.count / (1 + pairs))
    panels, steps = ceil(k_group / lanes), gather.d.count * gather.h.count * row_steps
    beside = gather.h.met < _MOST_INSIDE * len(gather.h.taps) * gather.h.count  # then it pays to leave rows out
    images = 1 if beside else max(1, min(problem.n, _TABLE_PIXELS // steps))
    chunk = max(64, min(images * steps, int(device.l2_bytes * _CHUNK_SHARE) // (lanes * acc_bytes)))
    chunks = ceil(problem.n / images) * ceil(images * steps / chunk)
    m_rows = c_group * prod(problem.filter)
    wanted = device.threads * _TASKS_PER_THREAD
    tiles, outer = ceil(m_rows / config.mr), problem.groups * panels
    block_tiles = max(1, min(_BLOCK_ROWS // config.mr, ceil(tiles / ceil(wanted / outer))))
    blocks = ceil(tiles / block_tiles)
    splits = max(1, min(chunks, wanted // (outer * blocks)))
    split_chunks = ceil(chunks / splits)
    splits = ceil(chunks / split_chunks)
    block_rows = block_tiles * config.mr

    def round_up(size: int) -> int:
        return ceil(size / 64) * 64

    panel_bytes = round_up(problem.n * steps * lanes * acc_bytes)
    sums_bytes = block_rows * lanes * acc_bytes
    panel_offset = 0 if in_place else round_up(problem.n * (problem.c + gap) * prod(padded) * acc_bytes)
    sums_offset = panel_offset + outer * panel_bytes
    worker_offset = own_pages(sums_offset + outer * blocks * splits * sums_bytes)
    return _Plan(
        gather, in_place, gap, (padded[0], padded[1], padded[2]), panels, row_steps, steps, images, chunk, m_rows,
        blocks, block_rows, splits, split_chunks, panel_bytes, sums_bytes, panel_offset, sums_offset, worker_offset,
    )  # fmt: skip


def _tables(problem: ConvProblem, plan: _Plan) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """((n, g, c, d, h, w) strides of what is read, offset of each m from an image, byte offset of each step)."""
    acc_bytes, gather = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]], plan.gather
    shape = (problem.n, problem.c + plan.gap, *(spatial3(problem.spatial) if plan.in_place else plan.padded))
    n, c, d, h, w = tensor_strides(shape, problem.channels_last)
    lowest = (0, 0, 0) if plan.in_place else (gather.d.low, gather.h.low, gather.w.low)
    p_n, p_d, p_h, p_w = np.ix_(np.arange(plan.images), *(np.arange(axis.count) * axis.in_step for axis in gather))
    every = 2 if plan.row_steps < gather.w.count else 1
    steps = (p_n * n + p_d * d + p_h * h + p_w[..., ::every] * w) * acc_bytes
    strides = (n, c * (problem.c // problem.groups), c, d, h, w)
    return strides, m_table(problem, gather, (c, d, h, w), lowest), steps.reshape(-1)


class FilterGemm(Candidate[Config, Cpu]):
    """Filter gradient as an implicit GEMM with output channels in the vector lanes."""

    op, provider, algo = "conv_bwd_filter", "cpu", "small"

    def __init__(self, pairs: bool = False) -> None:
        self.algorithm, self._pairs = "filter_dot" if pairs else "filter_gemm", pairs

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if self._pairs and (reason := refused_pairs(problem, device)):
            return Support(False, reason)
        set_bytes = min(problem.n, _TABLE_PIXELS) * problem.operands[0].size_bytes // max(1, problem.n)
        if 4 * set_bytes >= 1 << 31:
            return Support(False, f"{set_bytes} bytes of images share a table of 32-bit offsets")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        return tiles_of(problem, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        plan, lanes = self._plan(problem, config, device), config.nv * device.lanes(DEFAULT_COMPUTE[problem.dtype])
        return plan.worker_offset + device.threads * plan.sums(lanes).worker_bytes(problem)

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        plan = self._plan(problem, config, device)
        vl, k_group = device.lanes(DEFAULT_COMPUTE[problem.dtype]), problem.k // problem.groups
        outer, steps = problem.groups * plan.panels, problem.n * plan.steps
        rows = ceil(plan.m_rows / config.mr) * config.mr
        tiles = outer * rows // config.mr * ceil(steps / plan.chunk)
        side_ns = tiles * TILE_NS + steps * problem.k * (COPY_NS if problem.y_channels_last else TURN_NS)
        side_ns += 0.0 if plan.in_place else problem.n * problem.c * prod(plan.padded) * COPY_NS
        side_ns += plan.splits * rows * outer * config.nv * vl * COPY_NS + plan.m_rows * problem.k * TURN_NS
        fmas = problem.groups * ceil(k_group / vl) * rows * steps * fmas_of_step(device, self._pairs)
        # What no cache holds is read again by every block, and so are the panels of dy.
        from_memory = max(0, problem.operands[0].size_bytes + problem.operands[1].size_bytes - device.llc_bytes // 4)
        us = kernel_us(device, fmas, side_ns, outer * plan.blocks * plan.splits, 3 + (not plan.in_place))
        return us + from_memory * _MEMORY_NS / 1e3

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        vl = device.lanes(DEFAULT_COMPUTE[problem.dtype])
        lanes = config.nv * vl
        plan = self._plan(problem, config, device)
        ctx, keep = _parameters(problem, plan, config.mr)
        store, needed = plan.sums(lanes).phase(problem, device)
        planes = problem.n * plan.padded[0] * (1 if problem.channels_last else problem.c)
        rows = problem.n * plan.gather.d.count * plan.gather.h.count * problem.groups
        blocks = problem.groups * plan.panels * plan.blocks
        phases = [
            Phase(_pad_task(problem.dtype, vl, self._pairs), 0 if plan.in_place else planes, ctx),
            Phase(_panel_task(problem.dtype, vl, lanes, self._pairs), rows, ctx),
            Phase(_multiply_task(problem.dtype, config.mr, config.nv, vl, self._pairs), blocks * plan.splits, ctx),
            store,
        ]
        return Program(phases, [*keep, *needed])

    def _plan(self, problem: ConvProblem, config: Config, device: Cpu) -> _Plan:
        return _plan(problem, config, device, self._pairs)


def _met(problem: ConvProblem, plan: _Plan, mr: int) -> np.ndarray:
    """(first, end) steps of an image, of rows that a tap of each tile of m meets inside; all where images share tables,
    or have several depths."""
    gather, tiles = plan.gather, ceil(plan.m_rows / mr)
    if plan.images > 1 or gather.d.count > 1:
        return np.tile(np.array([0, plan.images * plan.steps], np.int64), (tiles, 1))
    reached = np.array([gather.h.reached(offset) for _, offset in sorted(gather.h.taps)], np.int64)
    c_group, (t, r, s) = problem.c // problem.groups, spatial3(problem.filter)
    order = (t, r, s * c_group) if problem.w_channels_last else (c_group * t, r, s)
    rows = np.broadcast_to(reached[None, :, None], (*order, 2)).reshape(-1, 2)
    ends = np.pad(rows, ((0, tiles * mr - len(rows)), (0, 0)), mode="edge").reshape(tiles, mr, 2)
    return np.stack([ends[..., 0].min(1), ends[..., 1].max(1)], axis=1) * plan.row_steps


def _parameters(problem: ConvProblem, plan: _Plan, mr: int) -> tuple[np.ndarray, list[np.ndarray]]:
    dy, gather = problem.operands[1], plan.gather
    read, rows, step_table = _tables(problem, plan)
    if step_table[-1] >= 1 << 31:
        raise OverflowError(f"pixel offset {step_table[-1]} does not fit 32 bits")
    step_table = step_table.astype(np.int32)
    y_n, y_k, y_d, y_h, y_w = tensor_strides(dy.shape, problem.y_channels_last)
    values = pad_values(problem, gather, plan.padded[2], plan.gap)
    values |= {f"count_{name}": axis.count for name, axis in zip("dhw", gather, strict=True)}
    values |= {f"low_{name}": axis.low for name, axis in zip("dhw", gather, strict=True)}
    values |= {name: getattr(plan, name) for name in _PARAMS.names or () if hasattr(plan, name)}
    met = _met(problem, plan, mr)
    ctx = filled(
        _PARAMS,
        **values,
        n=problem.n,
        groups=problem.groups,
        k_group=problem.k // problem.groups,
        x_g=values["x_c"] * (problem.c // problem.groups),
        padded_d=plan.padded[0],
        padded_h=plan.padded[1],
        y_n=y_n,
        y_k=y_k,
        y_d=y_d,
        y_h=y_h,
        y_w=y_w,
        padded_offset=0,
        a_n=read[0],
        a_g=read[1],
        step_table=step_table.ctypes.data,
        image_sets=ceil(problem.n / plan.images),
        m_table=rows.ctypes.data,
        met=met.ctypes.data,
    )
    return ctx, [step_table, rows, met]


BWD_FILTER, BWD_FILTER_DOT = FilterGemm(), FilterGemm(pairs=True)
