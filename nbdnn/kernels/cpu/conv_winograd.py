"""Winograd convolution with channels in the vector lanes: 3x3 filters of stride 1 or 2, in tiles of m x m outputs.

    Y = A^T [ sum over c of (G w G^T) * (B^T x B) ] A        for every tile, products elementwise

    x tile --B^T x B--> V[xi, tile, c] \\
                                         M[xi, tile, o] = V[xi] U[xi], one matrix product for each xi --A^T M A--> y
    w 3x3  --G w G^T--> U[xi, c, o]    /

The tiles of several images are the rows of one product, so that small images fill the registers, too. One phase
transforms the filters; then, for as many strips of tiles as keep V in the last-level cache, one phase lowers and
transforms them into V, and one multiplies a group of tiles with a panel of U and transforms the products while they are
in second-level cache. Where U is large and used by one group of tiles only, as in the last layers of a network, the
task that multiplies transforms it, too, a few channels at a time, so that it never leaves that cache.

Multiplications an output: (m+2)^2 / m^2 of stride 1 (2.25 for m = 4), (2m+1)^2 / m^2 of stride 2 (5.06), instead of 9.
Depth taps (3-D) are further input channels. Of a dilated filter a tile has every d-th row and column, and those
between are further tiles. Error: of the order of eps * sqrt(C) times the largest root sum of squares in the image.
Source: Lavin and Gray, arXiv:1509.09308; stride 2 as in cook_toom.py.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_channels import lower_rows
from nbdnn.kernels.cpu.micro_kernel import sandwich, tile_product
from nbdnn.kernels.cpu.rows import convert_row, zero_fill
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import pointer, stack, struct
from nbdnn.kernels.cpu.winograd_plan import (
    FILTER,
    PARAMS,
    filter_parameters,
    plan,
    tile_of,
    tile_parameters,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_MR = 6  # tiles in registers: one address register each
# Nanoseconds an element of U, V and M, one thread: fitted to vectors of 64 bytes (Zen 5), and to others (Zen 3).
_WIDE_NS, _NARROW_NS = (0.1, 0.15, 0.15), (0.25, 0.5, 0.5)


@cache
def _filter_transform(dtype: str, vl: int, m: int, stride: int, nv: int):
    """Compiled-in function: U[xi, c, lane] of one depth tap for vl output channels and a range of input channels."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, matrix = ITEMSIZE[dtype], ITEMSIZE[compute], tile_of(m, stride).matrices.filter
    vector_bytes, lanes_bytes, kept = vl * acc_bytes, nv * vl * acc_bytes, len(matrix)
    i64, taps_of_block, widen_row = pointer("i64"), stack(9 * vl * vector_bytes), convert_row(dtype, compute, vl)
    transform, turn = sandwich(compute, vl, matrix), transpose(dtype, compute, vl)

    @njit(**DEVICE)
    def spread(f, taps, w, outputs, inputs):
        """taps[r, s, c, lane] or, where the taps of a channel lie side by side, taps[c, r, s, lane]."""
        table = i64(f.table_rs)
        if f.taps_adjacent:
            for c in range(inputs):
                turn(taps + c * 9 * vector_bytes, vector_bytes, w + c * f.w_i * itemsize, f.w_o * itemsize, outputs, 9)
        elif f.w_i == 1:
            for tap in range(9):
                to = taps + tap * vl * vector_bytes
                turn(to, vector_bytes, w + table[tap] * itemsize, f.w_o * itemsize, outputs, inputs)
        else:
            for tap in range(9):
                for c in range(inputs):
                    to = taps + (tap * vl + c) * vector_bytes
                    widen_row(to, w + (table[tap] + c * f.w_i) * itemsize, outputs)

    @njit(**DEVICE)
    def transform_filters(f, w, g, t, first, first_channel, channels, u, plane_bytes):
        """From output channel `first`, a multiple of vl; u is the row of `first_channel`."""
        taps, outputs = taps_of_block(), min(vl, f.c_out - first)
        w += (g * f.w_g + first * f.w_o + i64(f.table_t)[t] + first_channel * f.w_i) * itemsize
        for c0 in range(0, channels, vl):
            inputs = min(vl, channels - c0)
            spread(f, taps, w + c0 * f.w_i * itemsize, outputs, inputs)
            for c in range(inputs):
                to = u + (c0 + c) * lanes_bytes
                transform(taps + c * f.channel_step, f.rows, f.columns, to, kept * plane_bytes, plane_bytes)

    return transform_filters


@cache
def _filter_task(dtype: str, vl: int, m: int, stride: int, nv: int):
    """U of vl output channels and one depth tap: index = (group * ceil(c_out / vl) + block) * depth taps + t."""
    acc_bytes, lanes = ITEMSIZE[DEFAULT_COMPUTE[dtype]], nv * vl
    i64, args_at, params_at, transform = (
        pointer("i64"), struct(ARGS), struct(FILTER), _filter_transform(dtype, vl, m, stride, nv),
    )  # fmt: skip

    def filters(args, ctx, index, worker):
        f, blocks = params_at(ctx), (params_at(ctx).c_out + vl - 1) // vl
        t, rest = index % f.taps_d, index // f.taps_d
        g, first = rest // blocks, rest % blocks * vl
        u = args_at(args).workspace + f.u_offset + g * f.u_group_bytes + first // lanes * f.panel_bytes
        u += (t * f.c_in * lanes + first % lanes) * acc_bytes
        transform(f, i64(args)[f.w_pointer], g, t, first, 0, f.c_in, u, f.u_plane_bytes)

    return compile_task(filters, (dtype, vl, m, stride, nv), fastmath=FASTMATH)


@cache
def _input_task(dtype: str, vl: int, m: int, stride: int):
    """V of one strip of a chunk: index = group * strips of the chunk + strip."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, tile = ITEMSIZE[dtype], ITEMSIZE[compute], tile_of(m, stride)
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(PARAMS)
    lower, transform = lower_rows(dtype, vl), sandwich(compute, vl, tile.matrices.input)
    products, step = tile.products, m * stride

    def transform_input(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        g, strip = index // f.chunk_strips, f.first_strip + index % f.chunk_strips
        above, first = strip // f.strips, strip % f.strips * f.strip_rows
        n, depth, rows = above // f.count_d, above % f.count_d, min(f.strip_rows, f.tile_rows - first)
        low = a.workspace + f.strip_offset + worker * f.strip_bytes
        image = i64(args)[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        lower(image, low, ctx, depth, first, (rows + f.gap_h - 1) // f.gap_h * f.gap_h)
        number = (above * f.tile_rows + first) * f.tile_columns - f.first_tile
        v = a.workspace + f.v_offset + (g * f.chunk_tiles + number) * f.v_pitch
        for i in range(rows):
            row = i // f.gap_h * step * f.gap_h + i % f.gap_h
            for j in range(f.tile_columns):
                column = j // f.gap_w * step * f.gap_w + j % f.gap_w
                for t in range(f.taps_d):
                    pixel = ((t * f.low_rows + row) * f.low_columns + column) * f.c_in
                    # The lanes beyond the last channel are overwritten by the next depth tap, or never read.
                    for c in range(0, f.c_in, vl):
                        transform(
                            low + (pixel + c) * acc_bytes, f.load_rows, f.load_columns,
                            v + (t * f.c_in + c) * acc_bytes, products * f.v_xi_bytes, f.v_xi_bytes,
                        )  # fmt: skip
                v += f.v_pitch

    return compile_task(transform_input, (dtype, vl, m, stride), fastmath=FASTMATH)


@cache
def _multiply_task(dtype: str, vl: int, m: int, stride: int, nv: int, fused: bool, planar: bool):
    """A group of tiles and a panel of channels, those outermost of which more bytes have been transformed: index =
    (group of channels * tile groups + tile group) * panels + panel, or panel * (all groups) + the rest.

    fused: transforms its part of the filters itself, a few channels at a time. planar: outputs of a channel lie side by
    side, not those of a pixel.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes_full = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(PARAMS)
    run_pixels = max(m, vl)
    row_slots, offset_slots, store = stack(_MR * 8), stack(run_pixels * 8), tile_store(dtype, compute, vl)
    tile, turn = tile_of(m, stride), transpose(compute, compute, vl)
    transform, xis, pitch = sandwich(compute, vl, tile.matrices.output), tile.products**2, lanes_full * acc_bytes
    full, short = (tile_product(compute, rows, nv, vl, acc_bytes, pitch, fused) for rows in (_MR, _MR - 1))
    filter_at, transform_filters, fill = struct(FILTER), _filter_transform(dtype, vl, m, stride, nv), zero_fill(compute)
    bias_row_step, bias_lane_step = (1, 0) if planar else (0, 1)

    @njit(**DEVICE)
    def multiply(f, u, v, k_len, products, tiles, vectors):
        """M[xi, tile, lane] in blocks of _MR tiles; in the last one the last tile stands in for those beyond."""
        slots = row_slots()
        for xi in range(xis):
            first, b, to = (
                v + xi * f.v_xi_bytes,
                u + i64(f.u_planes)[xi] * f.u_plane_bytes,
                products + xi * f.m_xi_bytes,
            )
            for p in range(0, tiles, _MR):
                count = min(_MR, tiles - p)
                for i in range(_MR):
                    i64(slots)[i] = first + (p + min(i, count - 1)) * f.v_pitch
                if count == _MR:
                    full(vectors, slots, 0, b, 0, k_len, to + p * pitch, pitch)
                else:
                    short(vectors, slots, 0, b, 0, k_len, to + p * pitch, pitch)

    @njit(**DEVICE)
    def transform_and_multiply(f, w, g, first, u, v, products, tiles, vectors):
        fill(products, xis * f.m_xi_bytes // acc_bytes)
        filters = filter_at(f.filters)
        for t in range(f.taps_d):
            for c in range(0, f.c_in, f.k_step):
                channels = min(f.k_step, f.c_in - c)
                for lane in range(0, vectors * vl, vl):
                    to = u + lane * acc_bytes
                    transform_filters(filters, w, g, t, first + lane, c, channels, to, f.u_plane_bytes)
                multiply(f, u, v + (t * f.c_in + c) * acc_bytes, channels, products, tiles, vectors)

    @njit(**DEVICE)
    def tile_place(f, number):
        """(image, depth, first row, first column) of a tile's outputs."""
        j, above = number % f.tile_columns, number // f.tile_columns
        i, above = above % f.tile_rows, above // f.tile_rows
        row, column = i // f.gap_h * m * f.gap_h + i % f.gap_h, j // f.gap_w * m * f.gap_w + j % f.gap_w
        return above // f.count_d, above % f.count_d, row, column

    @njit(**DEVICE)
    def kept(f, row, column):
        """Rows and columns that a tile has of the image."""
        rows, columns = (f.image_rows - row - 1) // f.gap_h + 1, (f.image_columns - column - 1) // f.gap_w + 1
        return min(m, rows), min(m, columns)

    @njit(**DEVICE)
    def finish_pixels(f, products, line, number, tiles, vectors, first, lanes, out, flags, alpha, beta):
        """Outputs of one pixel lie side by side: a tile at a time, whole ones into the output as they are."""
        offsets = offset_slots()
        for i in range(tiles):
            n, depth, row, column = tile_place(f, number + i)
            rows, columns = kept(f, row, column)
            at = n * f.out_n + depth * f.out_d + row * f.out_h + column * f.out_w
            whole = f.finished and alpha == 1.0 and rows == m and columns == m and lanes == vectors * vl
            if whole:
                to = out + (at + first * f.out_c) * itemsize
                row_bytes, column_bytes = f.gap_h * f.out_h * itemsize, f.gap_w * f.out_w * itemsize
            else:
                to, row_bytes, column_bytes = line, m * pitch, pitch
            for lane in range(0, vectors * vl * acc_bytes, vl * acc_bytes):
                source = products + i * pitch + lane
                transform(source, f.product_rows, f.product_columns, to + lane, row_bytes, column_bytes)
            if whole:
                continue
            for r in range(rows):
                for s in range(columns):
                    i64(offsets)[s] = at + r * f.gap_h * f.out_h + s * f.gap_w * f.out_w
                source, channels = line + r * m * pitch, f.channel_offsets + 8 * first
                store(source, lanes_full, columns, lanes, out, offsets, channels, f.contiguous, flags, alpha, beta)

    @njit(**DEVICE)
    def finish_rows(f, products, line, number, tiles, vectors, first, lanes, out, flags, alpha, beta):
        """Outputs of one row lie side by side: a few tiles of a row at a time, turned; one where it has gaps."""
        offsets, turned, i = offset_slots(), line + m * run_pixels * pitch, 0
        while i < tiles:
            n, depth, row, column = tile_place(f, number + i)
            run = min(min(run_pixels // m, tiles - i), f.tile_columns - column // m) if f.gap_w == 1 else 1
            for j in range(run):
                for lane in range(0, vectors * vl * acc_bytes, vl * acc_bytes):
                    source, to = products + (i + j) * pitch + lane, line + j * m * pitch + lane
                    transform(source, f.product_rows, f.product_columns, to, run_pixels * pitch, pitch)
            rows, columns = kept(f, row, column)
            if f.gap_w == 1:
                columns = min(run * m, f.image_columns - column)
            for r in range(rows):
                turn(turned, run_pixels * acc_bytes, line + r * run_pixels * pitch, pitch, columns, lanes)
                at = n * f.out_n + depth * f.out_d + (row + r * f.gap_h) * f.out_h
                for s in range(columns):
                    i64(offsets)[s] = at + (column + s * f.gap_w) * f.out_w
                channels = f.channel_offsets + 8 * first
                store(turned, run_pixels, lanes, columns, out, channels, offsets, f.contiguous, flags, alpha, beta)
            i += run

    finish = finish_rows if planar else finish_pixels

    def group(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        panel, rest = index % f.panels, index // f.panels
        if f.all_groups:
            panel, rest = index // f.all_groups, index % f.all_groups
        g, in_chunk = rest // f.tile_groups, rest % f.tile_groups * f.group_tiles
        tiles, number = min(f.group_tiles, f.chunk_tiles - in_chunk), f.first_tile + in_chunk
        first = panel * lanes_full
        lanes = min(lanes_full, f.c_out - first)
        vectors = (lanes + vl - 1) // vl
        v = a.workspace + f.v_offset + (g * f.chunk_tiles + in_chunk) * f.v_pitch
        products = a.workspace + f.strip_offset + worker * f.strip_bytes
        line, group_bytes = products + f.line_offset, g * f.out_g * itemsize
        if fused:
            u = products + f.u_offset
            transform_and_multiply(f, pointers[f.w_pointer], g, first, u, v, products, tiles, vectors)
        else:
            u = a.workspace + f.u_offset + g * f.u_group_bytes + panel * f.panel_bytes
            multiply(f, u, v, f.k_len, products, tiles, vectors)
        bias = pointers[f.bias_pointer] + (g * f.c_out + first) * itemsize if f.bias_pointer >= 0 else 0
        residual = pointers[f.residual_pointer] + group_bytes if f.residual_pointer >= 0 else 0
        out = pointers[f.out_pointer] + group_bytes
        flags = (f.activation, bias, bias_row_step, bias_lane_step, residual, f.read_out)
        finish(f, products, line, number, tiles, vectors, first, lanes, out, flags, a.alpha, a.beta)

    return compile_task(group, (dtype, vl, m, stride, nv, fused, planar), fastmath=FASTMATH)


class Winograd(Candidate[NoConfig, Cpu]):
    """Winograd convolution with output tiles of m x m and channels in the vector lanes."""

    provider = "cpu"

    def __init__(self, op: str, m: int) -> None:
        self.op, self._m = op, m
        self.algorithm = f"winograd_{m}x{m}"
        self.algo = {2: "winograd", 4: "winograd_non_fused"}[m]

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if problem.filter[-2:] != (3, 3):
            return Support(False, f"the filter is {'x'.join(map(str, problem.filter))}, not 3x3")
        if self.op == "conv_fwd" and problem.stride[-2:] not in ((1, 1), (2, 2)):
            return Support(False, f"stride {problem.stride[-2:]} is neither (1, 1) nor (2, 2)")
        if self.op == "conv_bwd_data" and any(u != 1 for u in problem.stride):
            return Support(False, f"stride {problem.stride} is not 1")
        if problem.stride[-1] > 1 and any(d != 1 for d in problem.dilation[-2:]):
            return Support(False, f"stride {problem.stride} with dilation {problem.dilation}: one of them is 1")
        return YES

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> int:
        return self._plan(problem, device).total_bytes

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> float:
        made = self._plan(problem, device)
        geo, vl = made.geo, device.lanes(DEFAULT_COMPUTE[problem.dtype])
        xis, tiles = made.tile.products**2, geo.groups * made.tiles_of(made.all_strips)
        fmas = tiles * xis * made.k_len * ceil(geo.c_out / vl)
        filter_ns, input_ns, output_ns = fitted(device, _WIDE_NS, _NARROW_NS)
        side_ns = geo.groups * geo.c_out * made.k_len * len(made.tile.matrices.filter) ** 2 * filter_ns
        of_vectors = (ceil(channels / vl) * vl for channels in (made.k_len, geo.c_out))
        side_ns += tiles * xis * sum(n * ns for n, ns in zip(of_vectors, (input_ns, output_ns), strict=True))
        tasks = max(1, geo.groups * made.panels * ceil(made.tiles_of(made.chunk_strips) / made.group_tiles))
        return kernel_us(device, fmas, side_ns, tasks, 1 + 2 * made.chunk_count)

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Cpu) -> Program:
        made, vl = self._plan(problem, device), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        geo, method = made.geo, (problem.dtype, vl, self._m, made.tile.stride)
        filters, keep = filter_parameters(problem, made, vl)
        planar = geo.out_strides[2] != 1
        phases = []
        if not made.fused:
            filter_tasks = geo.groups * ceil(geo.c_out / vl) * len(made.lowering.d.taps)
            phases.append(Phase(_filter_task(*method, made.nv), filter_tasks, filters))
        for chunk in made.chunks:
            ctx, arrays = tile_parameters(problem, made, vl, chunk, filters)
            groups = geo.groups * ceil(chunk.tiles / made.group_tiles)
            phases.append(Phase(_input_task(*method), geo.groups * chunk.strips, ctx))
            phases.append(Phase(_multiply_task(*method, made.nv, made.fused, planar), groups * made.panels, ctx))
            keep += arrays
        return Program(phases, [*keep, filters])

    def _plan(self, problem: ConvProblem, device: Cpu):
        return plan(problem, self._m, _MR, 4 if device.isa == "avx512" else 2, device)


FWD_2X2, BWD_DATA_2X2 = Winograd("conv_fwd", 2), Winograd("conv_bwd_data", 2)
FWD_4X4, BWD_DATA_4X4 = Winograd("conv_fwd", 4), Winograd("conv_bwd_data", 4)
