"""Implicit GEMM tap by tap, where many taps lie beside the image, as of dilated filters: forward and bwd_data.

    for each tap (t, r, s) of a tile's pixels that meets any of them inside of the image:
        tile[p, o] += sum over c of  in[p + tap, c] * w[tap][c, o]          p < mr pixels, o < nv vectors of channels

A pixel whose own tap lies outside reads zeros instead: a table has its place for each tap, so that the image needs no
border. It is read where it lies, or, where channels are not side by side or the data are 16-bit, copied once, channels
innermost. The sums of a strip of pixels stay in second-level cache while the taps pass by, and a tap's part of a panel
beside them; of many channels a tap is several steps.

tap_dot multiplies words of two channels of bfloat16, where the CPU can. Its subnormal numbers count as 0.

Traffic: x once a tap and panel, from cache; the panels once a strip; the sums once a tap. Accumulates in float32
(float64), one rounding a step. Source: own; the indirection is that of Dukhan, arXiv:1907.02129.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.channel_plan import tiles_of_channels
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, GATHER_NS, PACK_NS, TILE_NS, TURN_NS, fmas_of_step, kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_channels import lower_task
from nbdnn.kernels.cpu.micro_kernel import PAIRS, Config, tile_product
from nbdnn.kernels.cpu.pack_pairs import pack_any, refused_pairs
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.tap_plan import PARAMS, copy_parameters, layout_of, parameters
from nbdnn.kernels.cpu.vector import pointer, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_MOST_INSIDE = 0.85  # of the products: where more are made, fewer steps of the reduction are as fast
_MOST_TAPS = 63  # bits of a mask


@cache
def _multiply_task(dtype: str, mr: int, nv: int, vl: int, pairs: bool):
    """One strip, one chunk of panels: index = chunk * strips + strip, for a worker to stay with panels it packed."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes_full = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    i64, i32, args_at, params_at = pointer("i64"), pointer("i32"), struct(ARGS), struct(PARAMS)
    store, row_slots, clear = tile_store(dtype, compute, vl), stack(mr * 8), zero_fill(compute)
    whole, short = (
        tile_product(compute, rows, nv, vl, acc_bytes, lanes_full * acc_bytes, True, PAIRS if pairs else "")
        for rows in (mr, mr - 1)
    )

    @njit(**DEVICE)
    def find(slots, plane, places, count, used, zeros):
        """Where the pixels of a tile are read; where there are fewer, the last one stands in for the rest."""
        for m in range(used):
            place = i32(places)[min(m, count - 1)]
            i64(slots)[m] = zeros if place < 0 else plane + place

    def strip(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        first_row, rest = index % f.strips * f.strip_rows, index % f.total_strips // f.strips
        depth, rest = rest % f.count_d, rest // f.count_d
        n, g = rest // f.groups, rest % f.groups
        pixels = min(f.strip_rows, f.count_h - first_row) * f.count_w
        if f.copied:
            image = a.workspace + f.strip_offset + rest * f.extent_d * f.plane_bytes
        else:
            image = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        start = n * f.out_n + g * f.out_g + (f.start_d + depth * f.out_step_d) * f.out_d
        start += (f.start_h + first_row * f.out_step_h) * f.out_h + f.start_w * f.out_w
        out = pointers[f.out_pointer] + start * itemsize
        bias = pointers[f.bias_pointer] + g * f.c_out * itemsize if f.bias_pointer >= 0 else 0
        residual = pointers[f.residual_pointer] + start * itemsize if f.residual_pointer >= 0 else 0
        sums, slots = a.workspace + f.sums_offset + worker * f.sums_bytes, row_slots()
        tiles = (pixels + mr - 1) // mr
        least, longer = pixels // tiles, pixels % tiles  # tiles of `least` pixels, the first `longer` of one more
        masks = i64(f.masks + 8 * (depth * f.strips + index % f.strips) * f.tiles)
        first_panel = index // f.total_strips * f.chunk_panels
        for panel in range(first_panel, min(f.panels, first_panel + f.chunk_panels)):
            first = panel * lanes_full
            lanes = min(lanes_full, f.c_out - first)
            vectors = (lanes + vl - 1) // vl
            pitch = vectors * vl
            filter_panel = (
                a.workspace + f.packed_offset + worker * f.copy_bytes + (g * f.panels + panel) * f.panel_bytes
            )
            clear(sums, tiles * mr * pitch)
            for tap in range(f.taps_d * f.plane_taps):
                t, plane_tap = tap // f.plane_taps, tap % f.plane_taps
                plane = image + (depth * f.in_step_d + i64(f.depth_offsets)[t]) * f.plane_bytes
                places = f.places + 4 * (plane_tap * f.count_h + first_row) * f.count_w
                for word in range(0, f.words, f.step_words):
                    count_k, shift = min(f.step_words, f.words - word), word * acc_bytes
                    b = filter_panel + (tap * f.words + word) * lanes_full * acc_bytes
                    for tile in range(tiles):
                        if masks[tile] >> tap & 1 == 0:
                            continue
                        p, count = tile * least + min(tile, longer), least + (tile < longer)
                        used, to = max(count, mr - 1), sums + tile * mr * pitch * acc_bytes
                        find(slots, plane + shift, places + 4 * p, count, used, f.zeros)
                        if used == mr:
                            whole(vectors, slots, 0, b, 0, count_k, to, pitch * acc_bytes)
                        else:
                            short(vectors, slots, 0, b, 0, count_k, to, pitch * acc_bytes)
            flags = (f.activation, bias + first * itemsize if bias else 0, 0, 1, residual, f.read_out)
            for tile in range(tiles):
                p, count = tile * least + min(tile, longer), least + (tile < longer)
                store(
                    sums + tile * mr * pitch * acc_bytes, pitch, count, lanes, out, f.out_offsets + 8 * p,
                    f.channel_offsets + 8 * first, f.contiguous, flags, a.alpha, a.beta,
                )  # fmt: skip

    return compile_task(strip, (dtype, mr, nv, vl, pairs), fastmath=FASTMATH)


class TapGemm(Candidate[Config, Cpu]):
    """Implicit GEMM tap by tap, which leaves out those beside the image."""

    provider, algo = "cpu", "small"

    def __init__(self, op: str, pairs: bool = False) -> None:
        self.op, self.algorithm, self._pairs = op, "tap_dot" if pairs else "tap_gemm", pairs

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if self._pairs and (reason := refused_pairs(problem, device)):
            return Support(False, reason)
        geo = geometry(problem)
        taps = max(len(g.d.taps) * len(g.h.taps) * len(g.w.taps) for g in geo.gathers)
        if taps > _MOST_TAPS:
            return Support(False, f"{taps} taps, this kernel takes {_MOST_TAPS}")
        made = [g.pixels * len(g.d.taps) * len(g.h.taps) * len(g.w.taps) for g in geo.gathers]
        met = [g.d.met * g.h.met * g.w.met for g in geo.gathers]
        if sum(met) > _MOST_INSIDE * sum(made):
            share = sum(met) / max(1, sum(made))
            return Support(False, f"{share:.0%} of the products lie inside, this kernel takes up to {_MOST_INSIDE:.0%}")
        one_image = problem.operands[geo.in_pointer].size_bytes // max(1, problem.n)
        if 4 * one_image >= 1 << 31:
            return Support(False, f"an image has {one_image} bytes: offsets of what is copied are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        return tiles_of_channels(geometry(problem).c_out, problem, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        return layout_of(problem, config, device, self._pairs).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        layout = layout_of(problem, config, device, self._pairs)
        geo, vl = layout.geo, device.lanes(DEFAULT_COMPUTE[problem.dtype])
        total, vectors = 0.0, ceil(geo.c_out / vl)
        for gather, plan in zip(geo.gathers, layout.plans, strict=True):
            taps = len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
            pixels = geo.n * geo.groups * gather.pixels
            steps = taps * ceil(layout.words / plan.step_words)
            side_ns = ceil(pixels / config.mr) * layout.packing.panels * (1 + steps * plan.inside) * TILE_NS
            side_ns += pixels * geo.c_out * (COPY_NS if geo.out_strides[2] == 1 else GATHER_NS)
            side_ns += layout.words * taps * geo.c_out * geo.groups * PACK_NS
            fmas = pixels * vectors * layout.words * taps * plan.inside * fmas_of_step(device, self._pairs)
            total += kernel_us(device, fmas, side_ns, plan.total_strips * plan.chunks, 1)
        copied = problem.operands[geo.in_pointer].size_elems if layout.copied else 0
        side_by_side = geo.in_strides[2] == 1
        return total + kernel_us(device, 0, copied * (COPY_NS if side_by_side else TURN_NS), device.threads, 2)

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        layout, vl = layout_of(problem, config, device, self._pairs), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        geo, packing = layout.geo, layout.packing
        pack, keep = pack_any(geo, problem.dtype, packing, device, self._pairs)
        phases = [pack]
        if layout.copied:
            ctx, arrays = copy_parameters(problem, layout)
            keep += arrays
            planes = geo.n * geo.groups * geo.gathers[0].d.in_extent
            phases.append(Phase(lower_task(problem.dtype, vl, self._pairs), planes * layout.low_strips, ctx))
        task = _multiply_task(problem.dtype, config.mr, config.nv, vl, self._pairs)
        for number, plan in enumerate(layout.plans):
            ctx, arrays = parameters(problem, layout, number)
            keep += arrays
            phases.append(Phase(task, plan.total_strips * plan.chunks, ctx))
        return Program(phases, keep)


FWD, BWD_DATA = TapGemm("conv_fwd"), TapGemm("conv_bwd_data")
FWD_DOT, BWD_DATA_DOT = TapGemm("conv_fwd", pairs=True), TapGemm("conv_bwd_data", pairs=True)
