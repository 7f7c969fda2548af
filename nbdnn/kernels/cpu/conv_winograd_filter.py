"""Winograd filter gradient, F(3x3, m x m) with m = 4: a quarter of the multiplications for 3x3 filters of stride 1.

    dw = A^T [ sum over tiles of (B^T x B) * (G dy G^T) ] A        x tile (m+2)^2, dy tile m^2, products elementwise

The roles of filter and output are exchanged against the forward: dy is the filter, the 3x3 result the output, and the
sum over tiles is the reduction. Images are taken in sets whose transforms fit in the workspace; for each set one phase
transforms x to V[xi, c, tile], one transforms dy to D[xi, panel, tile, k], and one adds the products to M[xi, c, k];
a last phase transforms M back and stores it. Of a dilated filter every d-th row and column of x and dy are an image of
their own. Accumulates in float32 (float64). Error: of the order of
eps * sqrt(tiles) times the largest root sum of squares of the result. Source: Lavin and Gray, arXiv:1509.09308, with
the points of cook_toom.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil

import numpy as np
from numba import int64, njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cook_toom import filtering
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import Gather, geometry, tensor_strides
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.micro_kernel import sandwich, tile_product
from nbdnn.kernels.cpu.rows import every_step, zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.kernels.cpu.winograd_plan import tiles_along
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_M = 4
_ALPHA, _PLANES = _M + 2, (_M + 2) ** 2
_MR = 6  # channels in registers
_SET_BYTES = 64 << 20  # of V and D of one set of images
_CHUNK_SHARE = 0.25  # of the second-level cache for the tiles of a panel that are multiplied at a time
_BLOCK_ROWS = 96  # input channels of one product task
_STORE_CHANNELS = 8  # input channels transformed back at a time, 9 taps each
# Nanoseconds an element of V and D, and of M, one thread: priors for the guess, fitted to 16 shapes on a Zen 5, and to
# 20 on a Zen 3.
_WIDE_NS, _NARROW_NS = (0.9, 0.45), (1.8, 0.7)

_PARAMS = record(
    *("first_image", "images", "groups", "c_group", "k_group", "x_n", "x_c", "x_h", "x_w", "y_n", "y_k", "y_h", "y_w"),
    *("extent_h", "extent_w", "count_h", "count_w", "low_h", "low_w", "gap_h", "gap_w", "tile_columns"),
    *("tiles", "chunk", "x_rows", "x_columns", "dy_rows", "dy_columns", "product_rows", "product_columns"),
    *("v_offset", "v_pitch", "v_xi_bytes", "d_offset", "d_panel_bytes", "panels", "blocks", "m_offset", "m_xi_bytes"),
    *("m_panel_bytes", "worker_offset", "worker_bytes", "w_k", "w_c", "store_offsets", "adjacent", "read_out"),
)


@cache
def _lower_lines(dtype: str, vl: int):
    """Compiled-in function: `lines` rows of a channel in m column phases of `width` elements, zero beyond the borders.

    `step` is the distance of neighbouring pixels in elements, `pitch` that of rows in bytes.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    fill, move = zero_fill(compute), every_step(dtype, compute, vl)

    @njit(**DEVICE)
    def lower_lines(to, image, pitch, step, top, left, lines, width, extent_h, extent_w):
        first = min(lines, max(0, -top))
        end = max(first, min(lines, extent_h - top))
        for phase in range(_M):
            offset = left + phase
            start = min(width, max(0, -(offset // _M)))
            stop = max(start, min(width, -((offset - extent_w) // _M)))
            line = to + phase * lines * width * acc_bytes
            fill(line, first * width)
            fill(line + end * width * acc_bytes, (lines - end) * width)
            source = image + (top + first) * pitch + offset * step * itemsize
            move(line + first * width * acc_bytes, source, pitch, _M * step, end - first, width, start, stop)

    return lower_lines


@njit(**DEVICE)
def of_phase(extent, first, gap):
    """How many of the positions first, first + gap, ... lie within the extent."""
    return max(0, (extent - first + gap - 1) // gap)


@cache
def _input_task(dtype: str, vl: int):
    """V of one channel: index = channel. Of a dilated filter every gap-th row and column make an image of their own."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    args_at, params_at, lower_lines = struct(ARGS), struct(_PARAMS), _lower_lines(dtype, vl)
    transform = sandwich(compute, vl, filtering(3, _M).input)

    def transform_x(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        lines, width = a.workspace + f.worker_offset + worker * f.worker_bytes, f.tile_columns + 1
        to = a.workspace + f.v_offset
        to += index // f.c_group * _PLANES * f.v_xi_bytes + index % f.c_group * f.v_pitch
        for part in range(f.images * f.gap_h * f.gap_w):
            n, row, column = part // (f.gap_h * f.gap_w), part // f.gap_w % f.gap_h, part % f.gap_w
            # Of every gap-th row and column those from `row` and `column` on, counted from the first inside the image.
            top, left = (row + f.low_h) // f.gap_h, (column + f.low_w) // f.gap_w
            skipped_h, skipped_w = row + f.low_h - top * f.gap_h, column + f.low_w - left * f.gap_w
            extent_h, extent_w = of_phase(f.extent_h, skipped_h, f.gap_h), of_phase(f.extent_w, skipped_w, f.gap_w)
            image = a.p0 + ((f.first_image + n) * f.x_n + index * f.x_c) * itemsize
            image += (skipped_h * f.x_h + skipped_w * f.x_w) * itemsize
            tile_rows = (of_phase(f.count_h, row, f.gap_h) + _M - 1) // _M
            tile_columns = (of_phase(f.count_w, column, f.gap_w) + _M - 1) // _M
            for i in range(tile_rows):
                lower_lines(
                    lines, image, f.gap_h * f.x_h * itemsize, f.gap_w * f.x_w, top + i * _M, left, int64(_ALPHA), width,
                    extent_h, extent_w,
                )  # fmt: skip
                # The lanes beyond a row of tiles are overwritten by the next row.
                for j in range(0, tile_columns, vl):
                    source, target = lines + j * acc_bytes, to + j * acc_bytes
                    transform(source, f.x_rows, f.x_columns, target, _ALPHA * f.v_xi_bytes, f.v_xi_bytes)
                to += tile_columns * acc_bytes

    return compile_task(transform_x, (dtype, vl), fastmath=FASTMATH)


@cache
def _gradient_task(dtype: str, vl: int, nv: int):
    """D of vl output channels: index = group * ceil(k_group / vl) + block of channels."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    args_at, params_at, lower_lines = struct(ARGS), struct(_PARAMS), _lower_lines(dtype, vl)
    transform, turn = sandwich(compute, vl, filtering(3, _M).filter), transpose(compute, compute, vl)
    plane = vl * vl * acc_bytes

    def transform_dy(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        planes = a.workspace + f.worker_offset + worker * f.worker_bytes
        line, width = planes + _PLANES * plane, f.tile_columns
        line_bytes = (_M * _M * width + 2 * vl) * acc_bytes
        groups_of_k = (f.k_group + vl - 1) // vl
        g, first = index // groups_of_k, index % groups_of_k * vl
        channels = min(vl, f.k_group - first)
        to = a.workspace + f.d_offset + (g * _PLANES * f.panels + first // lanes) * f.d_panel_bytes
        to += first % lanes * acc_bytes
        for part in range(f.images * f.gap_h * f.gap_w):
            n, row, column = part // (f.gap_h * f.gap_w), part // f.gap_w % f.gap_h, part % f.gap_w
            image = a.p1 + ((f.first_image + n) * f.y_n + (g * f.k_group + first) * f.y_k) * itemsize
            image += (row * f.y_h + column * f.y_w) * itemsize
            count_h, count_w = of_phase(f.count_h, row, f.gap_h), of_phase(f.count_w, column, f.gap_w)
            tile_columns, pitch, step = (count_w + _M - 1) // _M, f.gap_h * f.y_h * itemsize, f.gap_w * f.y_w
            for i in range(0, count_h, _M):
                for k in range(channels):
                    at, lines = image + k * f.y_k * itemsize, line + k * line_bytes
                    lower_lines(lines, at, pitch, step, i, int64(0), int64(_M), width, count_h, count_w)
                for j in range(0, tile_columns, vl):
                    for k in range(channels):
                        source, target = line + k * line_bytes + j * acc_bytes, planes + k * vl * acc_bytes
                        transform(source, f.dy_rows, f.dy_columns, target, _ALPHA * plane, plane)
                    tiles = min(vl, tile_columns - j)
                    for xi in range(_PLANES):
                        panel = to + xi * f.panels * f.d_panel_bytes + j * lanes * acc_bytes
                        turn(panel, lanes * acc_bytes, planes + xi * plane, vl * acc_bytes, channels, tiles)
                to += tile_columns * lanes * acc_bytes

    return compile_task(transform_dy, (dtype, vl, nv), fastmath=FASTMATH)


@cache
def _multiply_task(dtype: str, vl: int, nv: int):
    """M of one xi, panel and block of input channels: index = ((g*36 + xi) * panels + panel) * blocks + block."""
    compute = DEFAULT_COMPUTE[dtype]
    acc_bytes, lanes, i64 = ITEMSIZE[compute], nv * vl, pointer("i64")
    args_at, params_at, row_slots, fill = struct(ARGS), struct(_PARAMS), stack(_MR * 8), zero_fill(compute)
    product = tile_product(compute, _MR, nv, vl, acc_bytes, lanes * acc_bytes, True)

    def multiply(args, ctx, index, worker):
        a, f, rows, pitch = args_at(args), params_at(ctx), row_slots(), lanes * acc_bytes
        block, rest = index % f.blocks, index // f.blocks
        panel, plane = rest % f.panels, rest // f.panels
        vectors = (min(lanes, f.k_group - panel * lanes) + vl - 1) // vl
        first, end = block * _BLOCK_ROWS, min(f.c_group, (block + 1) * _BLOCK_ROWS)
        sums = a.workspace + f.m_offset + plane * f.m_xi_bytes + panel * f.m_panel_bytes
        v = a.workspace + f.v_offset + plane * f.v_xi_bytes
        d = a.workspace + f.d_offset + rest * f.d_panel_bytes
        if f.first_image == 0:
            fill(sums + first * pitch, (end - first + _MR - 1) // _MR * _MR * lanes)
        for tile in range(0, f.tiles, f.chunk):
            count, b = min(f.chunk, f.tiles - tile), d + tile * pitch
            for c in range(first, end, _MR):
                for i in range(_MR):
                    i64(rows)[i] = v + min(c + i, end - 1) * f.v_pitch + tile * acc_bytes
                product(vectors, rows, 0, b, 0, count, sums + c * pitch, pitch)

    return compile_task(multiply, (dtype, vl, nv), fastmath=FASTMATH)


@cache
def _store_task(dtype: str, vl: int, nv: int):
    """dw of one panel and a few input channels: index = (g * panels + panel) * ceil(c_group / 8) + block."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    i64, args_at, params_at, row_slots = pointer("i64"), struct(ARGS), struct(_PARAMS), stack(lanes * 8)
    transform, turn = sandwich(compute, vl, filtering(3, _M).output), transpose(compute, compute, vl)
    store, pitch = tile_store(dtype, compute, vl), 9 * _STORE_CHANNELS

    def store_block(args, ctx, index, worker):
        a, f, rows = args_at(args), params_at(ctx), row_slots()
        blocks = (f.c_group + _STORE_CHANNELS - 1) // _STORE_CHANNELS
        block, gp = index % blocks, index // blocks
        g, panel = gp // f.panels, gp % f.panels
        first, used = block * _STORE_CHANNELS, min(lanes, f.k_group - panel * lanes)
        channels = min(_STORE_CHANNELS, f.c_group - first)
        taps = a.workspace + f.worker_offset + worker * f.worker_bytes
        tile = taps + pitch * lanes * acc_bytes
        sums = a.workspace + f.m_offset + g * _PLANES * f.m_xi_bytes + panel * f.m_panel_bytes
        for c in range(channels):
            for k in range(0, used, vl):
                source = sums + ((first + c) * lanes + k) * acc_bytes
                to = taps + (9 * c * lanes + k) * acc_bytes
                transform(source, f.product_rows, f.product_columns, to, 3 * lanes * acc_bytes, lanes * acc_bytes)
        turn(tile, pitch * acc_bytes, taps, lanes * acc_bytes, 9 * channels, used)
        for k in range(used):
            i64(rows)[k] = (g * f.k_group + panel * lanes + k) * f.w_k
        flags = (0, 0, 0, 0, 0, f.read_out)
        out = a.p2 + first * f.w_c * itemsize
        store(tile, pitch, used, 9 * channels, out, rows, f.store_offsets, f.adjacent, flags, a.alpha, a.beta)

    return compile_task(store_block, (dtype, vl, nv), fastmath=FASTMATH)


def _nv(device: Cpu) -> int:
    """Vectors of filters in registers."""
    return 4 if device.isa == "avx512" else 2


@dataclass(frozen=True)
class _Plan:
    """Tiles of an image and of its longest row, images of a set, and the workspace."""

    gather: Gather
    image_tiles: int
    tile_columns: int
    images: int
    chunk: int
    panels: int
    blocks: int
    v_pitch: int
    v_xi_bytes: int
    d_panel_bytes: int
    m_panel_bytes: int
    m_xi_bytes: int
    d_offset: int
    m_offset: int
    worker_offset: int
    worker_bytes: int
    total_bytes: int


@lru_cache(maxsize=256)
def _plan(problem: ConvProblem, device: Cpu) -> _Plan:
    compute = DEFAULT_COMPUTE[problem.dtype]
    acc_bytes, vl = ITEMSIZE[compute], device.lanes(compute)
    (gather,) = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout="")).gathers
    c_group, k_group, lanes = problem.c // problem.groups, problem.k // problem.groups, _nv(device) * vl
    gap_h, gap_w = problem.dilation
    image_tiles = tiles_along(gather.h.count, _M, gap_h) * tiles_along(gather.w.count, _M, gap_w)
    tile_columns = ceil(gather.w.count / (_M * gap_w))
    panels = ceil(k_group / lanes)
    tile_bytes = _PLANES * problem.groups * (c_group + panels * lanes) * acc_bytes
    images = max(1, min(problem.n, _SET_BYTES // (image_tiles * tile_bytes)))
    tiles = images * image_tiles
    v_pitch = (ceil(tiles / vl) + 1) * vl * acc_bytes
    v_xi_bytes = c_group * v_pitch + 64  # a cache line more, or all planes would fall into the same cache sets
    d_panel_bytes = tiles * lanes * acc_bytes + 64
    m_panel_bytes = (ceil(c_group / _BLOCK_ROWS) * _BLOCK_ROWS + _MR) * lanes * acc_bytes
    m_xi_bytes = panels * m_panel_bytes + 64
    lines = (_M * _M * tile_columns + 2 * vl) * vl + _PLANES * vl * vl
    worker = max(_M * _ALPHA * (tile_columns + 1) + 2 * vl, lines, 2 * 9 * _STORE_CHANNELS * lanes)
    worker_bytes = own_pages(worker * acc_bytes)
    d_offset = problem.groups * _PLANES * v_xi_bytes
    m_offset = d_offset + problem.groups * _PLANES * panels * d_panel_bytes
    worker_offset = own_pages(m_offset + problem.groups * _PLANES * m_xi_bytes)
    return _Plan(
        gather=gather,
        image_tiles=image_tiles,
        tile_columns=tile_columns,
        images=images,
        chunk=max(64, int(device.l2_bytes * _CHUNK_SHARE) // (lanes * acc_bytes)),
        panels=panels,
        blocks=ceil(c_group / _BLOCK_ROWS),
        v_pitch=v_pitch,
        v_xi_bytes=v_xi_bytes,
        d_panel_bytes=d_panel_bytes,
        m_panel_bytes=m_panel_bytes,
        m_xi_bytes=m_xi_bytes,
        d_offset=d_offset,
        m_offset=m_offset,
        worker_offset=worker_offset,
        worker_bytes=worker_bytes,
        total_bytes=worker_offset + device.threads * worker_bytes,
    )


class WinogradFilter(Candidate[NoConfig, Cpu]):
    """Winograd filter gradient with dy tiles of 4 x 4."""

    op, provider, algorithm, algo = "conv_bwd_filter", "cpu", "winograd_4x4", "winograd_non_fused"

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if problem.filter != (3, 3):
            return Support(False, f"the filter is {'x'.join(map(str, problem.filter))}, not 3x3")
        if set(problem.stride) != {1}:
            return Support(False, f"stride {problem.stride} is not 1")
        return YES

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> int:
        return _plan(problem, device).total_bytes

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> float:
        plan, vl = _plan(problem, device), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        tiles = problem.n * plan.image_tiles * _PLANES
        c_group, k_group = problem.c // problem.groups, problem.k // problem.groups
        fmas = problem.groups * tiles * ceil(c_group / _MR) * _MR * ceil(k_group / vl)
        input_ns, output_ns = fitted(device, _WIDE_NS, _NARROW_NS)
        side_ns = tiles * (problem.c + problem.k) * input_ns + _PLANES * problem.c * k_group * output_ns
        tasks = problem.groups * _PLANES * plan.panels * plan.blocks
        return kernel_us(device, fmas, side_ns, tasks, 1 + 3 * ceil(problem.n / plan.images))

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> Program:
        dtype, vl, plan = problem.dtype, device.lanes(DEFAULT_COMPUTE[problem.dtype]), _plan(problem, device)
        method = dtype, vl, _nv(device)
        tables = _tables(problem, plan)
        products = problem.groups * _PLANES * plan.panels * plan.blocks
        phases: list[Phase] = []
        for first in range(0, problem.n, plan.images):
            ctx = _parameters(problem, plan, tables, first)
            phases.append(Phase(_input_task(dtype, vl), problem.c, ctx))
            channel_blocks = problem.groups * ceil(problem.k // problem.groups / vl)
            phases.append(Phase(_gradient_task(*method), channel_blocks, ctx))
            phases.append(Phase(_multiply_task(*method), products, ctx))
        stores = problem.groups * plan.panels * ceil(problem.c // problem.groups / _STORE_CHANNELS)
        phases.append(Phase(_store_task(*method), stores, phases[-1].ctx))
        return Program(phases, list(tables.values()))


def _tables(problem: ConvProblem, plan: _Plan) -> dict[str, np.ndarray]:
    acc_bytes, tile = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]], np.arange(_M)
    alpha, width = np.arange(_ALPHA), plan.tile_columns
    _, w_c, w_r, w_s = problem.operands[2].strides
    rows, columns = ([tap for tap, _ in sorted(axis.taps, key=lambda pair: pair[1])] for axis in plan.gather[1:])
    taps = np.array(rows)[:, None] * w_r + np.array(columns) * w_s
    channels = np.arange(_STORE_CHANNELS) * w_c
    return {
        "x_rows": alpha * (width + 1) * acc_bytes,
        "x_columns": (alpha % _M * _ALPHA * (width + 1) + alpha // _M) * acc_bytes,
        "dy_rows": tile * width * acc_bytes,
        "dy_columns": tile * _M * width * acc_bytes,
        "product_rows": alpha * _ALPHA * plan.m_xi_bytes,
        "product_columns": alpha * plan.m_xi_bytes,
        "store_offsets": (channels[:, None] + taps.reshape(-1)).reshape(-1),
    }


def _parameters(problem: ConvProblem, plan: _Plan, tables: dict[str, np.ndarray], first: int) -> np.ndarray:
    x, dy, dw = problem.operands
    x_n, x_c, _, x_h, x_w = tensor_strides(x.shape, problem.channels_last)
    y_n, y_k, _, y_h, y_w = tensor_strides(dy.shape, problem.y_channels_last)
    images = min(plan.images, problem.n - first)
    sizes = {name: getattr(plan, name) for name in _PARAMS.names or () if hasattr(plan, name)}
    axes = {"h": plan.gather.h, "w": plan.gather.w}
    return filled(
        _PARAMS,
        **{name: table.ctypes.data for name, table in tables.items()},
        **{f"extent_{name}": axis.in_extent for name, axis in axes.items()},
        **{f"count_{name}": axis.count for name, axis in axes.items()},
        **{f"low_{name}": axis.low for name, axis in axes.items()},
        **sizes | {"images": images, "tiles": images * plan.image_tiles},
        gap_h=problem.dilation[0],
        gap_w=problem.dilation[1],
        first_image=first,
        groups=problem.groups,
        c_group=problem.c // problem.groups,
        k_group=problem.k // problem.groups,
        x_n=x_n,
        x_c=x_c,
        x_h=x_h,
        x_w=x_w,
        y_n=y_n,
        y_k=y_k,
        y_h=y_h,
        y_w=y_w,
        v_offset=0,
        w_k=dw.strides[0],
        w_c=dw.strides[1],
        adjacent=int(bool((np.diff(tables["store_offsets"]) == 1).all())),
        read_out=int("beta" in problem.epilogue),
    )


BWD_FILTER = WinogradFilter()
