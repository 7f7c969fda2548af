"""Implicit GEMM with output channels in the vector lanes: forward and bwd_data, any stride, dilation, groups, 2-D, 3-D.

    tile[p, o] = sum over k = (t, r, s, c) of  in[p, k] * w[k, o]          p < mr pixels, o < nv vectors of channels

The filter is packed into panels of nv vectors. The input is read one broadcast scalar at a time, through an address a
pixel and a table of offsets, so any layout, stride or dilation will do, and no pixel is wasted on small images. Where
a tap can fall beyond a border, or the data are 16-bit, a strip of rows is first copied, widened and zero-padded, with
channels innermost; else the input is read where it lies. Long reductions are cut into steps whose part of a panel
stays in the second-level cache, with the accumulators kept between steps. Windows side by side are one product
(`joined.py`), whose lanes are stored by runs.

channel_dot multiplies words of two channels of bfloat16, where the CPU can: twice as many products at a time, of inputs
that are not widened. Its subnormal numbers count as 0.

Traffic: x once a panel of channels, from cache; the panel once a strip. Accumulates in float32 (float64), one rounding
a step, in the order of k. Source: own; the indirection is that of Dukhan, arXiv:1907.02129.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.channel_plan import PARAMS, Layout, layout_of, parameters, tiles_of_channels
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, PACK_NS, TILE_NS, TURN_NS, fmas_of_step, kernel_us
from nbdnn.kernels.cpu.epilogue import stored_ns, tile_store
from nbdnn.kernels.cpu.joined import joined
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_channels import lower_rows, lower_task
from nbdnn.kernels.cpu.micro_kernel import PAIRS, Config, tile_product
from nbdnn.kernels.cpu.pack_pairs import pack_any, refused_pairs
from nbdnn.kernels.cpu.strips import strip_address
from nbdnn.kernels.cpu.vector import pointer, prefetch, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem


@cache
def _multiply_task(dtype: str, mr: int, nv: int, vl: int, pairs: bool):
    """One strip, one chunk of panels: index = chunk * strips + strip, for a worker to stay with panels it packed."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes_full = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    read_bytes = itemsize if pairs else acc_bytes
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(PARAMS)
    locate, lower, store = strip_address(PARAMS), lower_rows(dtype, vl, pairs), tile_store(dtype, compute, vl)
    row_slots = stack(mr * 8)

    def tiles_of(rows, accumulate):
        return tile_product(compute, rows, nv, vl, None, lanes_full * acc_bytes, accumulate, PAIRS if pairs else "")

    first, first_short, more, more_short = (tiles_of(rows, acc) for acc in (False, True) for rows in (mr, mr - 1))

    @njit(**DEVICE)
    def multiply(accumulate, used, vectors, addresses, offsets, b, k_len, to, pitch):
        """A tile of mr or mr - 1 pixels."""
        if accumulate:
            if used == mr:
                more(vectors, addresses, offsets, b, 0, k_len, to, pitch)
            else:
                more_short(vectors, addresses, offsets, b, 0, k_len, to, pitch)
        elif used == mr:
            first(vectors, addresses, offsets, b, 0, k_len, to, pitch)
        else:
            first_short(vectors, addresses, offsets, b, 0, k_len, to, pitch)

    def strip(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        n, g, depth, first_row, rows, low = locate(ctx, index % f.total_strips, a.workspace, worker)
        image = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        if f.in_place:
            row = (first_row * f.in_step_h + f.low_h) * f.in_h
            low = image + ((depth * f.in_step_d + f.low_d) * f.in_d + row + f.low_w * f.in_w) * itemsize
        elif not f.shared:
            lower(image, low, ctx, depth, first_row, rows)
        pixels = rows * f.count_w
        start = n * f.out_n + g * f.out_g + (f.start_d + depth * f.out_step_d) * f.out_d
        start += (f.start_h + first_row * f.out_step_h) * f.out_h + f.start_w * f.out_w
        out = pointers[f.out_pointer] + start * itemsize
        bias = pointers[f.bias_pointer] + g * f.c_out * itemsize if f.bias_pointer >= 0 else 0
        residual = pointers[f.residual_pointer] + start * itemsize if f.residual_pointer >= 0 else 0
        acc, in_offsets, out_offsets = (
            a.workspace + f.worker_offset + worker * f.worker_bytes,
            f.in_offsets,
            f.out_offsets,
        )
        slots, blocks = row_slots(), (pixels + mr - 1) // mr
        least, longer = pixels // blocks, pixels % blocks  # blocks of `least` pixels, the first `longer` of one more
        one_step, finished = f.k_len <= f.k_step, f.finished and a.alpha == 1.0
        first_panel = index // f.total_strips * f.chunk_panels
        for panel in range(first_panel, min(f.panels, first_panel + f.chunk_panels)):
            first = panel * lanes_full
            lanes = min(lanes_full, f.c_out - first)
            vectors = (lanes + vl - 1) // vl
            pitch = vectors * vl
            flags = (f.activation, bias + first * itemsize if bias else 0, 0, 1, residual, f.read_out)
            panel_address = (
                a.workspace + f.packed_offset + worker * f.copy_bytes + (g * f.panels + panel) * f.panel_bytes
            )
            for k0 in range(0, max(1, f.k_len), f.k_step):
                k_len = min(f.k_step, f.k_len - k0)
                offsets, b = f.a_offsets + 4 * k0, panel_address + k0 * lanes_full * acc_bytes
                for block in range(blocks):
                    p, count = block * least + min(block, longer), least + (block < longer)
                    # Tiles of mr and mr - 1 pixels; where an image has fewer, its last one stands in for the rest.
                    used = max(count, mr - 1)
                    for m in range(mr):
                        i64(slots)[m] = low + i64(in_offsets)[p + m]
                    for m in range(count, used):
                        i64(slots)[m] = i64(slots)[count - 1]
                    if f.ahead_bytes and panel == first_panel and k0 == 0:
                        for m in range(count):
                            at = i64(slots)[m] + f.ahead_bytes
                            for line in range(at, at + f.c_in * read_bytes, 64):
                                prefetch(line)
                    tile = acc if one_step else acc + block * mr * pitch * acc_bytes
                    to, to_pitch = tile, pitch * acc_bytes
                    whole = finished and one_step and lanes == pitch and used == count
                    if whole:
                        to = out + (i64(out_offsets)[p] + first * f.out_c) * itemsize
                        to_pitch = f.out_step_w * f.out_w * itemsize
                    multiply(k0 > 0, used, vectors, slots, offsets, b, k_len, to, to_pitch)
                    if k0 + k_len >= f.k_len and not whole:
                        lane = 0
                        while lane < lanes:
                            end = min(lanes, lane + f.run - (first + lane) % f.run)
                            store(
                                tile + lane * acc_bytes, pitch, count, end - lane, out, out_offsets + 8 * p,
                                f.channel_offsets + 8 * (first + lane), f.contiguous, flags, a.alpha, a.beta,
                            )  # fmt: skip
                            lane = end

    return compile_task(strip, (dtype, mr, nv, vl, pairs), fastmath=FASTMATH)


class ChannelGemm(Candidate[Config, Cpu]):
    """Implicit GEMM with output channels in the vector lanes."""

    provider, algo = "cpu", "small"

    def __init__(self, op: str, pairs: bool = False) -> None:
        self.op, self.algorithm, self._pairs = op, "channel_dot" if pairs else "channel_gemm", pairs

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if self._pairs and (reason := refused_pairs(problem, device)):
            return Support(False, reason)
        image = problem.operands[0 if self.op == "conv_fwd" else 1]
        one_image = image.size_bytes // max(1, problem.n)
        if one_image >= 1 << 31:
            return Support(False, f"an image has {one_image} bytes: offsets are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        return tiles_of_channels(joined(problem).c_out, problem, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        return self._layout(problem, config, device).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        layout = self._layout(problem, config, device)
        geo, vl = layout.geo, device.lanes(DEFAULT_COMPUTE[problem.dtype])
        vectors, total = ceil(geo.c_out / vl), 0.0
        for gather, plan in zip(geo.gathers, layout.plans, strict=True):
            k_len = plan.words * len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
            pixels = geo.n * geo.groups * gather.pixels
            tiles = ceil(pixels / config.mr) * plan.panels
            lowered = 0 if plan.in_place else plan.total_strips * plan.low_rows * plan.low_columns * plan.low_channels
            side_ns = tiles * TILE_NS + lowered * (COPY_NS if geo.in_strides[2] == 1 else TURN_NS)
            side_ns += pixels * geo.c_out * stored_ns(problem, geo.out_strides[2] == 1, config.nv * vl)
            side_ns += k_len * geo.c_out * geo.groups * PACK_NS
            tasks = plan.total_strips * plan.chunks
            fmas = pixels * vectors * k_len * fmas_of_step(device, self._pairs)
            total += kernel_us(device, fmas, side_ns, tasks, 2 + plan.shared)
        return total

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        layout = self._layout(problem, config, device)
        vl = device.lanes(DEFAULT_COMPUTE[problem.dtype])
        geo, packing = layout.geo, layout.packing
        pack, keep = pack_any(geo, problem.dtype, packing, device, self._pairs)
        phases = [pack]
        for gather, plan, packed_offset in zip(geo.gathers, layout.plans, packing.part_offsets, strict=True):
            ctx, arrays = parameters(problem, layout, gather, plan, packed_offset, device)
            keep += arrays
            if plan.shared:
                phases.append(Phase(lower_task(problem.dtype, vl, self._pairs), plan.total_strips, ctx))
            task = _multiply_task(problem.dtype, config.mr, config.nv, vl, self._pairs)
            phases.append(Phase(task, plan.total_strips * plan.chunks, ctx))
        return Program(phases, keep)

    def _layout(self, problem: ConvProblem, config: Config, device: Cpu) -> Layout:
        return layout_of(problem, config, device, self._pairs)


FWD, BWD_DATA = ChannelGemm("conv_fwd"), ChannelGemm("conv_bwd_data")
FWD_DOT, BWD_DATA_DOT = ChannelGemm("conv_fwd", pairs=True), ChannelGemm("conv_bwd_data", pairs=True)
