"""Implicit GEMM with output pixels in the vector lanes: forward and bwd_data, any stride, dilation, groups, 2-D, 3-D.

    tile[o, p] = sum over k = (c, t, r, s) of  w[o, k] * low[k, p]         o < mr channels, p < nv vectors of pixels

A task takes a strip of output rows of one image. It first lowers the strip's input into the worker's scratch, which
stays in the second-level cache: low[c, t, s] holds, for every depth and column tap, the rows it needs with exactly
count_w columns each, so that the pixels of the strip are contiguous for every tap and a row tap is an offset. The
reduction then runs over a table of those offsets: one code for every shape, no border tests, no wasted columns.

                    count_w columns
    low[c, t, s]  +-----------------+  <- row phase 0 (rows 0, u, 2u, ... of the padded image)
                  |  row 0          |
                  |  row 1          |     a tile at pixel p reads nv vectors from
                  |  ...            |     low + offset[k] + p
                  +-----------------+  <- row phase 1 (only where the stride u > 1)

Windows side by side are one product (`joined.py`): rows of a tile that are neighbours in dx are interleaved, and stored
as vectors.

pixel_dot multiplies words of two channels of bfloat16, where the CPU can: twice as many products at a time. Its
subnormal numbers count as 0.

Traffic: x is read S*T times and written once to cache; w is read once a strip, where it lies (KCRS) or packed; the
micro-kernel loads nv vectors of x and mr scalars of w for mr*nv multiply-adds. Accumulates in float32 (float64), one
rounding a step. Source: own; lowering after Cho and Brand, arXiv:1706.06873, without the depth-wise blow-up in rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, PACK_NS, TILE_NS, TURN_NS, fmas_of_step, kernel_us
from nbdnn.kernels.cpu.epilogue import store_kind, stored_ns, tile_store
from nbdnn.kernels.cpu.geometry import Gather, Geometry
from nbdnn.kernels.cpu.joined import joined
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_pixels import (
    LOW_FIELDS,
    StripPlan,
    low_values,
    lower_strip,
    lower_task,
    strip_plan,
)
from nbdnn.kernels.cpu.micro_kernel import PAIRS, tile_product
from nbdnn.kernels.cpu.pack import Packing, filter_offsets, reads_in_order
from nbdnn.kernels.cpu.pack_pairs import of_pairs, pack_any, refused_pairs
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.strips import strip_address
from nbdnn.kernels.cpu.turns import interleave
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_PARAMS = record(
    *LOW_FIELDS,
    "w_offsets",
    "channel_offsets",
    "packed_offset",
    "copy_bytes",
    "panel_bytes",
    "pixels_offset",
    "pixels_bytes",
    "run_offsets",
    "run_kind",
)
_MOST_RUN = 8  # rows of a tile that are interleaved
_MOST_STEP = 4  # elements from one pixel to the next, of which vectors are stored under masks


@dataclass(frozen=True)
class Config:
    """mr channels by nv vectors of pixels in registers (mr*nv + nv + 1 vector registers); whether w is packed."""

    mr: int
    nv: int
    packed: bool

    def __str__(self) -> str:
        return f"{self.mr}x{self.nv}{'p' if self.packed else ''}"


@cache
def _gemm_task(dtype: str, mr: int, nv: int, vl: int, packed: bool, pairs: bool, run: int, step: int):
    """One strip of one image, depth and group, for one chunk of output channels: index = chunk * strips + strip.

    run, step: as `_stored` has them.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(_PARAMS)
    tile_bytes, row_bytes = stack(mr * nv * vl * acc_bytes), stack(mr * 8)
    locate, lower, store = strip_address(_PARAMS), lower_strip(dtype, vl, pairs), tile_store(dtype, compute, vl, step)
    a_dtype = PAIRS if pairs else compute if packed else dtype
    product = tile_product(compute, mr, nv, vl, mr * acc_bytes if packed else None, None, False, a_dtype)
    join = interleave(compute, run, vl)

    @njit(**DEVICE)
    def store_rows(ctx, tile, joined_tile, lanes, channels, first, pixel, end, out, offsets, flags, alpha, beta):
        """The tile of pixels [pixel, end), a row of the image after the other. joined_tile: room for as much."""
        f, to = params_at(ctx), tile
        if run > 1:
            to, line = joined_tile, lanes * acc_bytes
            for i in range(channels // run):
                join(to + i * run * line, tile + i * run * line, line, lanes // vl)
        while pixel < end:
            row_end = min(end, (pixel // f.count_w + 1) * f.count_w)
            store(
                to, run * lanes, channels // run, run * (row_end - pixel), out, f.run_offsets + first // run * 8,
                offsets + pixel * 8, f.run_kind, flags, alpha, beta,
            )  # fmt: skip
            to += run * (row_end - pixel) * acc_bytes
            pixel = row_end

    def multiply(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        chunk = index // f.total_strips
        n, g, depth, first_row, rows, low = locate(ctx, index % f.total_strips, a.workspace, worker)
        if not f.shared:
            image = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
            lower(image, low, ctx, depth, first_row, rows, 0, f.c_in)
        pixels = rows * f.count_w
        offsets = a.workspace + f.pixels_offset + worker * f.pixels_bytes
        base = (f.start_d + depth * f.out_step_d) * f.out_d + f.start_w * f.out_w
        for i in range(rows):
            line = base + (f.start_h + (first_row + i) * f.out_step_h) * f.out_h
            for j in range(f.count_w):
                i64(offsets)[i * f.count_w + j] = line + j * f.out_step_w * f.out_w
        image_out = (n * f.out_n + g * f.out_g) * itemsize
        out = pointers[f.out_pointer] + image_out
        residual = pointers[f.residual_pointer] + image_out if f.residual_pointer >= 0 else 0
        bias = pointers[f.bias_pointer] + g * f.c_out * itemsize if f.bias_pointer >= 0 else 0
        tile, row_slot, finished = tile_bytes(), row_bytes(), f.finished and a.alpha == 1.0
        joined_tile = tile_bytes() if run > 1 else tile
        blocks, vectors = (f.c_out + mr - 1) // mr, (pixels + vl - 1) // vl
        tiles = (vectors + nv - 1) // nv
        for block in range(chunk * f.chunk_blocks, min(blocks, (chunk + 1) * f.chunk_blocks)):
            first = block * mr
            channels = min(mr, f.c_out - first)
            for m in range(mr):
                if packed:
                    panel = a.workspace + f.packed_offset + worker * f.copy_bytes + (g * blocks + block) * f.panel_bytes
                    i64(row_slot)[m] = panel + m * acc_bytes
                else:
                    w_o = g * f.w_g + (first + min(m, channels - 1)) * f.w_o
                    i64(row_slot)[m] = pointers[f.w_pointer] + w_o * itemsize
            flags = (f.activation, bias + first * itemsize if bias else 0, 1, 0, residual, f.read_out)
            for i in range(tiles):
                # The vectors are shared out evenly: a tile of one vector would wait for its own multiply-adds.
                start, end = i * vectors // tiles, (i + 1) * vectors // tiles
                used, p = end - start, start * vl
                b = low + p * acc_bytes
                to, pitch = tile, used * vl * acc_bytes
                whole = finished and channels == mr and p + used * vl <= pixels
                if whole:
                    pitch = f.out_c * itemsize
                    to = out + first * pitch + i64(offsets)[p] * itemsize
                product(used, row_slot, f.w_offsets, b, f.low_offsets, f.k_len, to, pitch)
                if run * step > 1:
                    end_pixel = min(pixels, p + used * vl)
                    store_rows(
                        ctx, tile, joined_tile, used * vl, channels, first, p, end_pixel, out, offsets, flags,
                        a.alpha, a.beta,
                    )  # fmt: skip
                elif not whole:
                    store(
                        tile, used * vl, channels, min(used * vl, pixels - p), out, f.channel_offsets + first * 8,
                        offsets + p * 8, f.contiguous, flags, a.alpha, a.beta,
                    )  # fmt: skip

    return compile_task(multiply, (dtype, mr, nv, vl, packed, pairs, run, step), fastmath=FASTMATH)


def _stored(geo: Geometry, gather: Gather, mr: int, device: Cpu) -> tuple[int, int]:
    """(run, step): so many rows of a tile are interleaved when it is stored, and its pixels are so many elements apart;
    (1, 1) where rows are stored as they are, or one element after the other."""
    apart = gather.w.out_step * geo.out_strides[5]
    if apart == geo.run <= _MOST_RUN and geo.run < geo.c_out and mr % geo.run == 0:
        return geo.run, 1
    # Without AVX-512 a masked store takes as long as the elements one by one.
    return (1, apart) if apart <= _MOST_STEP and device.isa == "avx512" else (1, 1)


class PixelGemm(Candidate[Config, Cpu]):
    """Implicit GEMM with output pixels in the vector lanes."""

    provider, algo = "cpu", "small"

    def __init__(self, op: str, pairs: bool = False) -> None:
        self.op, self.algorithm, self._pairs = op, "pixel_dot" if pairs else "pixel_gemm", pairs

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if self._pairs and (reason := refused_pairs(problem, device)):
            return Support(False, reason)
        geo = joined(problem)
        w_bytes = geo.w_strides[0] * geo.groups * ITEMSIZE[problem.dtype]
        if w_bytes >= 1 << 31:
            return Support(False, f"the filter has {w_bytes} bytes: offsets are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        geo = joined(problem)
        if self._pairs:
            return tuple(Config(mr, nv, packed=True) for mr, nv in ((8, 3), (6, 4), (12, 2)))
        in_place = all(reads_in_order(geo, g) for g in geo.gathers)
        if device.isa != "avx512":
            return tuple(Config(*tile, packed=p) for p in (False, True)[not in_place :] for tile in ((6, 2), (4, 3)))
        # Rows of w read in place cost an address register each: six fit.
        packed = tuple(Config(mr, nv, packed=True) for mr, nv in ((8, 3), (6, 4), (12, 2)))
        return (Config(6, 4, packed=False), *packed) if in_place else packed

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        return _Layout.of(problem, config, device, self._pairs).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        layout = _Layout.of(problem, config, device, self._pairs)
        geo, vl = layout.geo, device.lanes(DEFAULT_COMPUTE[problem.dtype])
        total = 0.0
        for gather, plan in zip(geo.gathers, layout.plans, strict=True):
            k_len = filter_offsets(of_pairs(geo) if self._pairs else geo, gather).size
            of_strip = ceil(plan.strip_rows * gather.w.count / vl)
            vectors = of_strip * plan.total_strips
            blocks = ceil(geo.c_out / config.mr)
            tiles = ceil(vectors / config.nv) * blocks
            lowered = plan.total_strips * plan.plane_elems * geo.c_in * len(gather.d.taps) * len(gather.w.taps)
            stored = plan.total_strips * plan.strip_rows * gather.w.count * geo.c_out
            side_ns = tiles * TILE_NS + lowered * (TURN_NS if geo.in_strides[2] == 1 else COPY_NS)
            by_vectors = _stored(geo, gather, config.mr, device) != (1, 1)
            adjacent = geo.out_strides[5] * gather.w.out_step == 1 or by_vectors
            side_ns += stored * stored_ns(problem, adjacent, config.nv * vl)
            side_ns += k_len * geo.c_out * geo.groups * PACK_NS if config.packed else 0.0
            tasks, phases = plan.total_strips * plan.chunks, 1 + config.packed + plan.shared
            fmas = vectors * blocks * config.mr * k_len * fmas_of_step(device, self._pairs)
            fmas *= 2 if of_strip == 1 else 1  # each has to read a scalar of its own
            total += kernel_us(device, fmas, side_ns, tasks, phases)
        return total

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        compute = DEFAULT_COMPUTE[problem.dtype]
        layout = _Layout.of(problem, config, device, self._pairs)
        geo, vl = layout.geo, device.lanes(compute)
        phases: list[Phase] = []
        keep: list[np.ndarray] = []
        if config.packed:
            pack, keep = pack_any(geo, problem.dtype, layout.packing, device, self._pairs, channels_last=False)
            phases = [pack]
        for number, (gather, plan) in enumerate(zip(geo.gathers, layout.plans, strict=True)):
            ctx, arrays = _parameters(problem, config, layout, number, self._pairs, device)
            keep += arrays
            if plan.shared:
                phases.append(Phase(lower_task(problem.dtype, vl, self._pairs), plan.total_strips * plan.parts, ctx))
            run, step = _stored(geo, gather, config.mr, device)
            task = _gemm_task(problem.dtype, config.mr, config.nv, vl, config.packed, self._pairs, run, step)
            phases.append(Phase(task, plan.total_strips * plan.chunks, ctx))
        return Program(phases, keep)


@dataclass(frozen=True)
class _Layout:
    """The workspace: the packed filter, then lowered strips, then each worker's table of pixels."""

    geo: Geometry
    plans: tuple[StripPlan, ...]
    packing: Packing
    strip_offset: int
    pixels_offset: int
    pixels_bytes: int
    total_bytes: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, problem: ConvProblem, config: Config, device: Cpu, pairs: bool) -> _Layout:
        geo = joined(problem)
        acc_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
        tile_pixels = config.nv * device.vector_bytes // acc_bytes
        blocks = ceil(geo.c_out / config.mr)
        plans = tuple(strip_plan(geo, g, acc_bytes, blocks, tile_pixels, device) for g in geo.gathers)
        packing = Packing.of(of_pairs(geo) if pairs else geo, problem.dtype, config.mr, device)
        strip_offset = own_pages(packing.total_bytes) if config.packed else 0
        pixels_offset = strip_offset + max(plan.total_bytes(device.threads) for plan in plans)
        pixels = max(plan.strip_rows * g.w.count for plan, g in zip(plans, geo.gathers, strict=True))
        pixels_bytes = own_pages(8 * pixels)
        return cls(
            geo,
            plans,
            packing,
            strip_offset,
            pixels_offset,
            pixels_bytes,
            pixels_offset + device.threads * pixels_bytes,
        )


def _parameters(
    problem: ConvProblem,
    config: Config,
    layout: _Layout,
    number: int,
    pairs: bool,
    device: Cpu,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of the gather of that number."""
    geo, packing = layout.geo, layout.packing
    gather, plan = geo.gathers[number], layout.plans[number]
    reduced = of_pairs(geo) if pairs else geo
    values, keep = low_values(problem, geo, gather, plan, pairs)
    w_offsets = (filter_offsets(reduced, gather) * ITEMSIZE[problem.dtype]).astype(np.int32).reshape(-1)
    channels = geo.channel_offsets
    run, step = _stored(geo, gather, config.mr, device)
    runs = np.ascontiguousarray(channels[::run])
    ctx = filled(
        _PARAMS,
        **values,
        w_offsets=w_offsets.ctypes.data,
        channel_offsets=channels.ctypes.data,
        packed_offset=packing.part_offsets[number],
        copy_bytes=packing.copy_bytes,
        panel_bytes=packing.panel_bytes,
        strip_offset=layout.strip_offset,
        pixels_offset=layout.pixels_offset,
        pixels_bytes=layout.pixels_bytes,
        run_offsets=runs.ctypes.data,
        run_kind=1 if step > 1 else store_kind(problem, True),
    )
    return ctx, [*keep, w_offsets, channels, runs]


FWD, BWD_DATA = PixelGemm("conv_fwd"), PixelGemm("conv_bwd_data")
FWD_DOT, BWD_DATA_DOT = PixelGemm("conv_fwd", pairs=True), PixelGemm("conv_bwd_data", pairs=True)
