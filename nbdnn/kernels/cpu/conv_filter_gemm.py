"""Filter gradient as an implicit GEMM: any stride, dilation, groups, 2-D and 3-D, both layouts.

    tile[m, k] += sum over pixels p of  x[p + m] * dy[p, k]        m < mr of (c, t, r, s), k < nv vectors of channels

dy is packed into panels of nv vectors of output channels, [group][panel][pixel][k]; x is read one broadcast scalar at a
time, at the address of its tap plus a table of pixel offsets, from where it lies or, where a tap can fall beyond a
border or the data are 16-bit, from a zero-padded copy in the same layout. m runs through dw[k] in its order in memory.
The pixels are taken in chunks whose part of a panel stays in second-level cache, while the sums stay in a block of m
beside it; where there are few blocks, the pixels are split among several, whose sums are added in fixed order: the
result does not depend on which worker did what.

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
from nbdnn.kernels.cpu.cost import COPY_NS, TILE_NS, TURN_NS, kernel_us
from nbdnn.kernels.cpu.geometry import Gather, geometry, spatial3, tensor_strides
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.micro_kernel import Config, tile_product
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_CHUNK_SHARE = 0.25  # of the second-level cache for the chunk of a panel that is multiplied at a time
_BLOCK_ROWS = 96  # most m of one task: their sums and the lines of x they read stay in first-level cache
_TASKS_PER_THREAD = 4
_TABLE_PIXELS = 4096  # small images share a table of pixel offsets, so that a chunk can span several

_PARAMS = record(
    *PAD_FIELDS,
    *("n", "groups", "k_group", "x_g", "y_n", "y_k", "y_d", "y_h", "y_w", "count_d", "count_h", "count_w"),
    *("low_d", "low_h", "low_w", "padded_d", "padded_h", "padded_offset", "a_n", "a_g", "in_place"),
    *("panels", "panel_offset", "panel_bytes", "pixels", "pixel_table", "images", "image_sets", "chunk", "set_chunks"),
    *("m_rows", "m_table", "blocks", "block_rows", "splits", "split_chunks", "sums_offset", "sums_bytes"),
)


@cache
def _pad_task(dtype: str, vl: int):
    """Zero-padded, widened copy of one image: index = (n * channels + c) * depth, or n * depth where interleaved."""
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[DEFAULT_COMPUTE[dtype]]
    args_at, params_at, pad = struct(ARGS), struct(_PARAMS), pad_plane(dtype, vl)

    def pad_image(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        to = a.workspace + f.padded_offset + index * f.padded_h * f.padded_w * f.pitch * acc_bytes
        e_d, rest = index % f.padded_d, index // f.padded_d
        channels = f.channels // f.run
        image = a.p0 + (rest // channels * f.x_n + rest % channels * f.x_c) * itemsize
        pad(f, to, image, e_d + f.low_d, f.low_h, f.low_w, f.padded_h)

    return compile_task(pad_image, (dtype, vl), fastmath=FASTMATH)


@cache
def _panel_task(dtype: str, vl: int, lanes: int):
    """Panels of one row of dy: index = ((n * depth + d) * height + h) * groups + g."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    args_at, params_at, pack = struct(ARGS), struct(_PARAMS), pack_pixels(dtype, vl, lanes)

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
            pack(f, to + row * f.count_w * lanes * acc_bytes, at, used, f.count_w)

    return compile_task(pack_row, (dtype, vl, lanes), fastmath=FASTMATH)


@cache
def _multiply_task(dtype: str, mr: int, nv: int, vl: int):
    """One block of m for one panel and one split of the pixels: index = ((g*panels + panel)*blocks + block)*splits."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    i64, args_at, params_at, row_slots = pointer("i64"), struct(ARGS), struct(_PARAMS), stack(mr * 8)
    clear = zero_fill(compute)
    product = tile_product(compute, mr, nv, vl, None, lanes * acc_bytes, True)

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
            set_pixels = min(f.images, f.n - image_set * f.images) * f.pixels
            count = min(f.chunk, set_pixels - p)
            if count <= 0:
                continue
            image = source + image_set * f.images * f.a_n * acc_bytes
            b = panel_address + (image_set * f.images * f.pixels + p) * lanes * acc_bytes
            for tile in range(tiles):
                for i in range(mr):
                    m = min(first + tile * mr + i, f.m_rows - 1)
                    i64(slots)[i] = image + i64(f.m_table)[m] * acc_bytes
                to = sums + tile * mr * lanes * acc_bytes
                product(vectors, slots, f.pixel_table + 4 * p, b, 0, count, to, lanes * acc_bytes)

    return compile_task(multiply, (dtype, mr, nv, vl), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How the result is cut into panels and blocks and the pixels into chunks and splits; workspace offsets."""

    gather: Gather
    in_place: bool
    gap: int
    padded: tuple[int, int, int]
    panels: int
    pixels: int
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
        return ceil(self.images * self.pixels / self.chunk)

    def sums(self, lanes: int) -> Sums:
        return Sums(
            lanes, self.panels, self.m_rows, self.blocks, self.block_rows, self.splits,
            self.sums_offset, self.splits * self.sums_bytes, self.sums_bytes, self.worker_offset,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _plan(problem: ConvProblem, config: Config, device: Cpu) -> _Plan:
    compute = DEFAULT_COMPUTE[problem.dtype]
    acc_bytes, vl = ITEMSIZE[compute], device.lanes(compute)
    (gather,) = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout="")).gathers
    axes = (gather.d, gather.h, gather.w)
    gap = gap_elems(problem, gather)
    in_place = problem.dtype == compute and not gap and not any(axis.reaches_outside for axis in axes)
    padded = tuple((axis.count - 1) * axis.in_step + axis.span + 1 for axis in axes)
    lanes, k_group, c_group = config.nv * vl, problem.k // problem.groups, problem.c // problem.groups
    panels, pixels = ceil(k_group / lanes), prod(axis.count for axis in axes)
    images = max(1, min(problem.n, _TABLE_PIXELS // pixels))
    chunk = max(64, min(images * pixels, int(device.l2_bytes * _CHUNK_SHARE) // (lanes * acc_bytes)))
    chunks = ceil(problem.n / images) * ceil(images * pixels / chunk)
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

    panel_bytes = round_up(problem.n * pixels * lanes * acc_bytes)
    sums_bytes = block_rows * lanes * acc_bytes
    panel_offset = 0 if in_place else round_up(problem.n * (problem.c + gap) * prod(padded) * acc_bytes)
    sums_offset = panel_offset + outer * panel_bytes
    worker_offset = own_pages(sums_offset + outer * blocks * splits * sums_bytes)
    return _Plan(
        gather, in_place, gap, (padded[0], padded[1], padded[2]), panels, pixels, images, chunk, m_rows, blocks,
        block_rows, splits, split_chunks, panel_bytes, sums_bytes, panel_offset, sums_offset, worker_offset,
    )  # fmt: skip


def _tables(problem: ConvProblem, plan: _Plan) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """((n, g, c, d, h, w) strides of what is read, offset of each m from an image, byte offset of each pixel)."""
    acc_bytes, gather = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]], plan.gather
    shape = (problem.n, problem.c + plan.gap, *(spatial3(problem.spatial) if plan.in_place else plan.padded))
    n, c, d, h, w = tensor_strides(shape, problem.channels_last)
    lowest = (0, 0, 0) if plan.in_place else (gather.d.low, gather.h.low, gather.w.low)
    p_n, p_d, p_h, p_w = np.ix_(np.arange(plan.images), *(np.arange(axis.count) * axis.in_step for axis in gather))
    pixels = (p_n * n + p_d * d + p_h * h + p_w * w) * acc_bytes
    strides = (n, c * (problem.c // problem.groups), c, d, h, w)
    return strides, m_table(problem, gather, (c, d, h, w), lowest), pixels.reshape(-1)


class FilterGemm(Candidate[Config, Cpu]):
    """Filter gradient as an implicit GEMM with output channels in the vector lanes."""

    op, provider, algorithm = "conv_bwd_filter", "cpu", "filter_gemm"
    algo = "small"

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        set_bytes = min(problem.n, _TABLE_PIXELS) * problem.operands[0].size_bytes // max(1, problem.n)
        if 4 * set_bytes >= 1 << 31:
            return Support(False, f"{set_bytes} bytes of images share a table of 32-bit offsets")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        return tiles_of(problem, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        plan, lanes = _plan(problem, config, device), config.nv * device.lanes(DEFAULT_COMPUTE[problem.dtype])
        return plan.worker_offset + device.threads * plan.sums(lanes).worker_bytes(problem)

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        plan = _plan(problem, config, device)
        vl, k_group = device.lanes(DEFAULT_COMPUTE[problem.dtype]), problem.k // problem.groups
        outer, pixels = problem.groups * plan.panels, problem.n * plan.pixels
        rows = ceil(plan.m_rows / config.mr) * config.mr
        tiles = outer * rows // config.mr * ceil(pixels / plan.chunk)
        side_ns = tiles * TILE_NS + pixels * problem.k * (COPY_NS if problem.y_channels_last else TURN_NS)
        side_ns += 0.0 if plan.in_place else problem.n * problem.c * prod(plan.padded) * COPY_NS
        side_ns += plan.splits * rows * outer * config.nv * vl * COPY_NS + plan.m_rows * problem.k * TURN_NS
        fmas = problem.groups * ceil(k_group / vl) * rows * pixels
        return kernel_us(device, fmas, side_ns, outer * plan.blocks * plan.splits, 3 + (not plan.in_place))

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        vl = device.lanes(DEFAULT_COMPUTE[problem.dtype])
        lanes = config.nv * vl
        plan = _plan(problem, config, device)
        ctx, keep = _parameters(problem, plan)
        store, needed = plan.sums(lanes).phase(problem, device)
        planes = problem.n * plan.padded[0] * (1 if problem.channels_last else problem.c)
        rows = problem.n * plan.gather.d.count * plan.gather.h.count * problem.groups
        blocks = problem.groups * plan.panels * plan.blocks
        phases = [
            Phase(_pad_task(problem.dtype, vl), 0 if plan.in_place else planes, ctx),
            Phase(_panel_task(problem.dtype, vl, lanes), rows, ctx),
            Phase(_multiply_task(problem.dtype, config.mr, config.nv, vl), blocks * plan.splits, ctx),
            store,
        ]
        return Program(phases, [*keep, *needed])


def _parameters(problem: ConvProblem, plan: _Plan) -> tuple[np.ndarray, list[np.ndarray]]:
    dy, gather = problem.operands[1], plan.gather
    read, rows, pixel_table = _tables(problem, plan)
    if pixel_table[-1] >= 1 << 31:
        raise OverflowError(f"pixel offset {pixel_table[-1]} does not fit 32 bits")
    pixel_table = pixel_table.astype(np.int32)
    y_n, y_k, y_d, y_h, y_w = tensor_strides(dy.shape, problem.y_channels_last)
    values = pad_values(problem, gather, plan.padded[2], plan.gap)
    values |= {f"count_{name}": axis.count for name, axis in zip("dhw", gather, strict=True)}
    values |= {f"low_{name}": axis.low for name, axis in zip("dhw", gather, strict=True)}
    values |= {name: getattr(plan, name) for name in _PARAMS.names or () if hasattr(plan, name)}
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
        pixel_table=pixel_table.ctypes.data,
        image_sets=ceil(problem.n / plan.images),
        m_table=rows.ctypes.data,
    )
    return ctx, [pixel_table, rows]


BWD_FILTER = FilterGemm()
