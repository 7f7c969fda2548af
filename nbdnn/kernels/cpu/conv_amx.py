"""Implicit GEMM on matrix units (AMX): forward and bwd_data, any stride, dilation, groups, 2-D, 3-D.

    sums[p, o] = sum over k = (t, r, s, c) of  in[p, k] * w[k, o]          32 or 64 pixels p, 32 or 16 output channels o

    pixels of a lowered strip              panel: words of two channels
      p  +--------------+ c              c/2 +--------+--------+
         |  tile of A   | ---->              |tile of B        |       four tiles of sums; each k of 32 numbers loads
      p' |  tile of A   |                    |        |        |       four tiles and makes four products
         +--------------+                    +--------+--------+

Tiles are loaded where they lie: a tap is another address, and a strip's rows are counted through, so that any 16 pixels
are equally far apart (`amx_plan.py`). float16 is cut into parts of bfloat16, and parts are multiplied (`amx.py`).
Interleaved bfloat16 of 1x1 filters is read in place.

Traffic: x once a chunk of panels into a strip, which stays in second-level cache and is read once a tap and panel; the
panel once a block of pixels. Accumulates in float32: even and odd numbers k of a tile, then tiles in the order of k.
Numbers and sums below 2^-126 count as 0, and an infinity of float16 makes NaN. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.amx import (
    PARTS,
    PRODUCT_NS,
    TILE,
    block_product,
    configure,
    products,
    refused,
    release,
    store_rows,
)
from nbdnn.kernels.cpu.amx_lower import lower_strip, lower_task
from nbdnn.kernels.cpu.amx_pack import pack_phase
from nbdnn.kernels.cpu.amx_plan import PARAMS, Config, layout_of, lowered_elems, parameters, pixel_step
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, PACK_NS, TILE_NS, TURN_NS, kernel_us
from nbdnn.kernels.cpu.epilogue import stored_ns, tile_store
from nbdnn.kernels.cpu.geometry import geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.strips import strip_address
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import pointer, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem


@cache
def _multiply_task(dtype: str, mt: int, nt: int, vl: int, step: int):
    """One strip, one chunk of panels: index = chunk * strips + strip.

    step: elements from one pixel to the next of outputs that are stored by pixels.
    """
    parts, itemsize, tile_pixels, width = PARTS[dtype], ITEMSIZE[dtype], TILE * mt, TILE * nt
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(PARAMS)
    locate, lower, product = strip_address(PARAMS), lower_strip(dtype, vl), block_product(parts, mt, nt)
    turn, store, row_bytes = transpose("f32", "f32", vl), tile_store(dtype, "f32", vl), 4 * width
    store_turned = tile_store(dtype, "f32", vl, step)
    turn_out, rows_out = transpose("f32", dtype, vl, converts_last=True), store_rows(dtype, nt)

    @njit(**DEVICE)
    def finish(sums, turned, first_pixel, pixels, rows, lanes, out, f, channels, bias, residual, alpha, beta):
        """Store what of a block's pixels are output: of each line of `line_pitch` that it meets, `count` of them."""
        p, end = first_pixel, min(first_pixel + pixels, rows * f.pitch_pixels)
        while p < end:
            line, column = p // f.line_pitch, p % f.line_pitch
            count = min(f.line_pixels - column, end - p)
            if count > 0:
                tile, places = sums + (p - first_pixel) * row_bytes, f.out_offsets + 8 * (line * f.line_pixels + column)
                to = out + (i64(places)[0] + i64(channels)[0]) * itemsize
                pixel_bytes = f.out_step_w * f.out_w * itemsize
                if f.finished and alpha == 1.0 and f.turned:
                    turn_out(to, f.out_c * itemsize, tile, row_bytes, count, lanes)
                elif f.finished and alpha == 1.0 and f.out_c == 1 and lanes == width:
                    streams = f.kind == 2 and (to | pixel_bytes | width * itemsize) % 64 == 0
                    rows_out(to, pixel_bytes, tile, row_bytes, count, int(streams))
                elif f.turned:
                    turn(turned, 4 * tile_pixels, tile, row_bytes, count, lanes)
                    flags = (f.activation, bias, 1, 0, residual, f.read_out)
                    store_turned(turned, tile_pixels, lanes, count, out, channels, places, f.kind, flags, alpha, beta)
                else:
                    flags = (f.activation, bias, 0, 1, residual, f.read_out)
                    store(tile, width, count, lanes, out, places, channels, f.kind, flags, alpha, beta)
            p = (line + 1) * f.line_pitch

    def strip(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        n, g, depth, first_row, rows, low = locate(ctx, index % f.total_strips, a.workspace, worker)
        image = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        sums = a.workspace + f.worker_offset + worker * f.worker_bytes
        pixel_bytes = 2 * f.pixel_channels
        if f.in_place:
            low, pixel_bytes = image + (depth * f.in_d + first_row * f.in_h) * itemsize, f.in_w * itemsize
        elif not f.shared:
            lower(image, low, ctx, depth, first_row, rows, sums + 2 * f.sums_bytes)
        start = n * f.out_n + g * f.out_g + (f.start_d + depth * f.out_step_d) * f.out_d
        start += (f.start_h + first_row * f.out_step_h) * f.out_h + f.start_w * f.out_w
        out = pointers[f.out_pointer] + start * itemsize
        bias = pointers[f.bias_pointer] + g * f.c_out * itemsize if f.bias_pointer >= 0 else 0
        residual = pointers[f.residual_pointer] + start * itemsize if f.residual_pointer >= 0 else 0
        pixels = rows * f.pitch_pixels
        blocks = (pixels + tile_pixels - 1) // tile_pixels
        first_panel = index // f.total_strips * f.chunk_panels
        configure(f.shapes)
        for panel in range(first_panel, min(f.panels, first_panel + f.chunk_panels)):
            first = panel * width
            lanes = min(width, f.c_out - first)
            b = a.workspace + (g * f.panels + panel) * f.panel_bytes + f.packed_offset
            channels, panel_bias = f.channel_offsets + 8 * first, bias + first * itemsize if bias else 0
            for block in range(blocks):
                first_pixel = block * tile_pixels
                # In place nothing behind the strip is read: the last tiles begin earlier.
                p = min(first_pixel, pixels - tile_pixels) if f.in_place else first_pixel
                product(
                    (lanes + TILE - 1) // TILE, low + p * pixel_bytes, pixel_bytes, f.part_bytes, f.a_offsets, f.k_len,
                    b, f.tap_bytes, f.places, 0, sums, row_bytes, 4 * TILE,
                )  # fmt: skip
                finish(
                    sums + (first_pixel - p) * row_bytes, sums + f.sums_bytes, first_pixel, tile_pixels, rows, lanes,
                    out, f, channels, panel_bias, residual, a.alpha, a.beta,
                )  # fmt: skip
        release()

    return compile_task(strip, (dtype, mt, nt, vl, step), fastmath=FASTMATH)


class Amx(Candidate[Config, Cpu]):
    """Implicit GEMM on matrix units."""

    provider, algorithm, algo = "cpu", "amx", "small"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        reason = refused(problem.dtype, device)
        return Support(False, reason) if reason else YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        return (Config(4, 1) if geometry(problem).c_out <= TILE else Config(2, 2),)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        return layout_of(problem, config, device).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        layout, total = layout_of(problem, config, device), 0.0
        geo = layout.geo
        for gather, plan in zip(geo.gathers, layout.plans, strict=True):
            blocks = plan.total_strips * layout.panels * ceil(plan.pixels / (TILE * config.mt))
            side_ns = blocks * config.mt * config.nt * plan.k_len * products(problem.dtype) * PRODUCT_NS
            copy_ns = COPY_NS if geo.in_strides[2] == 1 else TURN_NS
            side_ns += blocks * TILE_NS + lowered_elems(plan, layout, gather) * layout.parts * copy_ns
            stored = geo.n * geo.groups * gather.pixels * geo.c_out
            step = pixel_step(geo, gather)
            side_ns += stored * (TURN_NS if step else stored_ns(problem, geo.out_strides[2] == 1, TILE * config.nt))
            side_ns += plan.k_len * layout.depth * geo.c_out * geo.groups * layout.parts * PACK_NS
            total += kernel_us(device, 0, side_ns, plan.total_strips * plan.chunks, 2 + plan.shared)
        return total

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        layout, vl = layout_of(problem, config, device), device.lanes("f32")
        pack, keep = pack_phase(problem, config, layout, vl)
        phases = [pack]
        for number, plan in enumerate(layout.plans):
            ctx, arrays = parameters(problem, config, layout, number)
            keep += arrays
            if plan.shared:
                phases.append(Phase(lower_task(problem.dtype, vl), plan.total_strips, ctx))
            step = max(1, pixel_step(layout.geo, layout.geo.gathers[number]))
            task = _multiply_task(problem.dtype, config.mt, config.nt, vl, step)
            phases.append(Phase(task, plan.total_strips * plan.chunks, ctx))
        return Program(phases, keep)


FWD, BWD_DATA = Amx("conv_fwd"), Amx("conv_bwd_data")
