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

from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import ceil

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.channel_plan import tiles_of_channels
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, GATHER_NS, PACK_NS, TILE_NS, TURN_NS, kernel_us
from nbdnn.kernels.cpu.epilogue import store_kind, tile_store
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS, Axis, Gather, Geometry, gather_values, geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_channels import LOWERING, lower_task
from nbdnn.kernels.cpu.micro_kernel import PAIRS, Config, tile_product
from nbdnn.kernels.cpu.pack import Packing, pack_phase
from nbdnn.kernels.cpu.pack_pairs import of_pairs, pack_pairs_phase, refused_pairs
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_SUMS_SHARE = 0.15  # of the second-level cache for the sums of a strip
_STEP_SHARE = 0.35  # and for the part of a panel that one step of the reduction reads
_TASKS_PER_THREAD = 4
_MOST_INSIDE = 0.85  # of the products: where more are made, fewer steps of the reduction are as fast
_MOST_TAPS = 63  # bits of a mask
_PADDING = 8  # of a table of pixels: the largest tile reads beyond its end

_PARAMS = record(
    *GATHER_FIELDS,
    *("strips", "strip_rows", "depth_offsets", "strip_offset", "total_strips", "chunk_panels", "panels"),
    *("panel_bytes", "packed_offset", "copy_bytes", "copied", "words", "step_words", "plane_bytes", "plane_taps"),
    *("places", "zeros", "masks", "tiles", "channel_offsets", "out_offsets", "contiguous", "sums_offset", "sums_bytes"),
)


@cache
def _multiply_task(dtype: str, mr: int, nv: int, vl: int, pairs: bool):
    """One strip, one chunk of panels: index = chunk * strips + strip, for a worker to stay with panels it packed."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, lanes_full = ITEMSIZE[dtype], ITEMSIZE[compute], nv * vl
    i64, i32, args_at, params_at = pointer("i64"), pointer("i32"), struct(ARGS), struct(_PARAMS)
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


@dataclass(frozen=True)
class _Plan:
    """How a gather is cut into strips of rows, chunks of panels and steps of words, which are channels or pairs.

    masks: int64 [depth, strip, tile], bits of the taps, in the filter's order, that any pixel of a tile meets inside.
    inside: the share of the products that are made.
    """

    strip_rows: int
    strips: int
    total_strips: int
    chunks: int
    chunk_panels: int
    step_words: int
    tiles: int
    masks: np.ndarray = field(compare=False)
    inside: float

    @classmethod
    def of(cls, geo: Geometry, gather: Gather, config: Config, words: int, lane_bytes: int, panels: int, device: Cpu):
        """lane_bytes: of a step's line of a panel, or of a pixel's sums."""
        height, width = gather.h.count, gather.w.count
        outer, wanted = geo.n * geo.groups * gather.d.count, device.threads * _TASKS_PER_THREAD
        strips = ceil(height / max(1, min(height, int(device.l2_bytes * _SUMS_SHARE) // (lane_bytes * width))))
        while outer * strips < wanted and ceil(height / (strips + 1)) * width >= 8 * config.mr:
            strips += 1
        strip_rows = ceil(height / strips)
        strips = ceil(height / strip_rows)
        chunks = min(ceil(wanted / (outer * strips)), panels)
        chunk_panels = ceil(panels / chunks)
        masks, inside = _masks(gather, strip_rows, config.mr)
        steps = ceil(words * lane_bytes / (device.l2_bytes * _STEP_SHARE))
        return cls(
            strip_rows, strips, outer * strips, ceil(panels / chunk_panels), chunk_panels, ceil(words / steps),
            masks.shape[2], masks, inside,
        )  # fmt: skip


def _masks(gather: Gather, strip_rows: int, mr: int) -> tuple[np.ndarray, float]:
    d, h, w = map(_inside, gather)
    taps = len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
    rows = strip_rows * gather.w.count
    plane = (h[:, None, :, None] & w[None, :, None, :]).reshape(len(h) * len(w), gather.h.count * gather.w.count)
    strips = [plane[:, first : first + rows] for first in range(0, plane.shape[1], rows)]
    found = np.zeros((len(strips), ceil(rows / mr), len(plane)), bool)
    for strip, pixels in enumerate(strips):
        for tile, part in enumerate(np.array_split(pixels, ceil(pixels.shape[1] / mr), axis=1)):
            found[strip, tile] = part.any(1)
    every = (d.T[:, None, None, :, None] & found[None, :, :, None, :]).reshape(gather.d.count, *found.shape[:2], taps)
    masks = np.ascontiguousarray((every << np.arange(taps)).sum(-1))  # the transposed factor's order is not kept
    return masks, float(every.mean()) if every.size else 1.0


def _inside(axis: Axis) -> np.ndarray:
    """bool [tap, output]"""
    reached = np.array([axis.reached(offset) for _, offset in axis.taps]).reshape(-1, 2, 1)
    outputs = np.arange(axis.count)
    return (reached[:, 0] <= outputs) & (outputs < reached[:, 1])


@dataclass(frozen=True)
class _Layout:
    """The workspace: the packed filter, the copied images, then each worker's sums.

    copied: whether images are copied, channels innermost, of each low_channels elements of read_bytes, low_rows rows a
    task.
    """

    geo: Geometry
    plans: tuple[_Plan, ...]
    packing: Packing
    words: int
    copied: bool
    low_channels: int
    read_bytes: int
    low_rows: int
    low_strips: int
    strip_bytes: int
    strip_offset: int
    sums_offset: int
    sums_bytes: int
    total_bytes: int

    @property
    def plane_strides(self) -> tuple[int, int, int]:
        """Bytes from one depth, row and column to the next one of what is read; rows of a copy by the strip."""
        if not self.copied:
            d, h, w = (stride * self.read_bytes for stride in self.geo.in_strides[3:])
            return d, h, w
        pixel_bytes = self.low_channels * self.read_bytes
        row_bytes = self.geo.gathers[0].w.in_extent * pixel_bytes
        return self.low_strips * self.strip_bytes, row_bytes, pixel_bytes


@lru_cache(maxsize=256)
def _layout(problem: ConvProblem, config: Config, device: Cpu, pairs: bool) -> _Layout:
    geo, compute = geometry(problem), DEFAULT_COMPUTE[problem.dtype]
    reduced = of_pairs(geo) if pairs else geo
    lanes = config.nv * device.lanes(compute)
    packing = Packing.of(reduced, problem.dtype, lanes, device)
    plans = tuple(
        _Plan.of(geo, g, config, reduced.c_in, lanes * ITEMSIZE[compute], packing.panels, device) for g in geo.gathers
    )
    low_channels, read_bytes = (2 * reduced.c_in, 2) if pairs else (geo.c_in, ITEMSIZE[compute])
    side_by_side = geo.in_strides[2] == 1
    copied = not side_by_side or (geo.c_in % 2 > 0 if pairs else problem.dtype != compute)
    _, h, w = geo.gathers[0]
    low_rows = max(1, ceil(h.in_extent / (device.threads * _TASKS_PER_THREAD)))
    low_strips = ceil(h.in_extent / low_rows)
    strip_bytes = own_pages(low_rows * w.in_extent * low_channels * read_bytes)
    strip_offset = own_pages(packing.total_bytes)
    images = geo.n * geo.groups * geo.gathers[0].d.in_extent * low_strips * strip_bytes if copied else 0
    sums = max(plan.tiles for plan in plans) * config.mr * lanes * ITEMSIZE[compute]
    sums_offset, sums_bytes = strip_offset + images, own_pages(sums)
    return _Layout(
        geo, plans, packing, reduced.c_in, copied, low_channels, read_bytes, low_rows, low_strips, strip_bytes,
        strip_offset, sums_offset, sums_bytes, sums_offset + device.threads * sums_bytes,
    )  # fmt: skip


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
        return _layout(problem, config, device, self._pairs).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        layout = _layout(problem, config, device, self._pairs)
        geo, vl = layout.geo, device.lanes(DEFAULT_COMPUTE[problem.dtype])
        total, vectors = 0.0, ceil(geo.c_out / vl)
        for gather, plan in zip(geo.gathers, layout.plans, strict=True):
            taps = len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
            pixels = geo.n * geo.groups * gather.pixels
            steps = taps * ceil(layout.words / plan.step_words)
            side_ns = ceil(pixels / config.mr) * layout.packing.panels * (1 + steps * plan.inside) * TILE_NS
            side_ns += pixels * geo.c_out * (COPY_NS if geo.out_strides[2] == 1 else GATHER_NS)
            side_ns += layout.words * taps * geo.c_out * geo.groups * PACK_NS
            fmas = pixels * vectors * layout.words * taps * plan.inside
            total += kernel_us(device, fmas, side_ns, plan.total_strips * plan.chunks, 1)
        copied = problem.operands[geo.in_pointer].size_elems if layout.copied else 0
        side_by_side = geo.in_strides[2] == 1
        return total + kernel_us(device, 0, copied * (COPY_NS if side_by_side else TURN_NS), device.threads, 2)

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        layout, vl = _layout(problem, config, device, self._pairs), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        geo, packing = layout.geo, layout.packing
        if self._pairs:
            pack, keep = pack_pairs_phase(geo, packing)
        else:
            pack, keep = pack_phase(geo, problem.dtype, packing, device, True)
        phases = [pack]
        if layout.copied:
            ctx, arrays = _copy_parameters(problem, layout)
            keep += arrays
            planes = geo.n * geo.groups * geo.gathers[0].d.in_extent
            phases.append(Phase(lower_task(problem.dtype, vl, self._pairs), planes * layout.low_strips, ctx))
        task = _multiply_task(problem.dtype, config.mr, config.nv, vl, self._pairs)
        for number, plan in enumerate(layout.plans):
            ctx, arrays = _parameters(problem, layout, number)
            keep += arrays
            phases.append(Phase(task, plan.total_strips * plan.chunks, ctx))
        return Program(phases, keep)


def _copy_parameters(problem: ConvProblem, layout: _Layout) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of lowering without taps: whole images."""
    gather, tap = layout.geo.gathers[0], ((0, 0),)
    whole = Gather(*(Axis(tap, 1, axis.in_extent, 0, 1, axis.in_extent) for axis in gather))
    depth = np.zeros(1, np.int64)
    ctx = filled(
        LOWERING,
        **gather_values(problem, layout.geo, whole),
        strips=layout.low_strips,
        strip_rows=layout.low_rows,
        shared=1,
        low_h=0,
        low_w=0,
        low_rows=layout.low_rows,
        low_columns=whole.w.count,
        depth_offsets=depth.ctypes.data,
        strip_offset=layout.strip_offset,
        strip_bytes=layout.strip_bytes,
    )
    return ctx, [depth]


def _parameters(problem: ConvProblem, layout: _Layout, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of the gather of that number."""
    geo, plan, gather, packing = layout.geo, layout.plans[number], layout.geo.gathers[number], layout.packing
    places, channels = _places(layout, gather), geo.channel_offsets
    depth = np.array([offset for _, offset in gather.d.taps], np.int64)
    zeros = np.zeros(layout.words * ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]], np.uint8)
    i, j = np.arange(plan.strip_rows)[:, None], np.arange(gather.w.count)
    rows, columns = gather.h.out_step * geo.out_strides[4], gather.w.out_step * geo.out_strides[5]
    out_offsets = (i * rows + j * columns).reshape(-1)
    ctx = filled(
        _PARAMS,
        **gather_values(problem, geo, gather),
        strips=plan.strips,
        strip_rows=plan.strip_rows,
        depth_offsets=depth.ctypes.data,
        strip_offset=layout.strip_offset,
        total_strips=plan.total_strips,
        chunk_panels=plan.chunk_panels,
        panels=packing.panels,
        panel_bytes=packing.panel_bytes,
        packed_offset=packing.part_offsets[number],
        copy_bytes=packing.copy_bytes,
        copied=int(layout.copied),
        words=layout.words,
        step_words=plan.step_words,
        plane_bytes=layout.plane_strides[0],
        plane_taps=len(gather.h.taps) * len(gather.w.taps),
        places=places.ctypes.data,
        zeros=zeros.ctypes.data,
        masks=plan.masks.ctypes.data,
        tiles=plan.tiles,
        channel_offsets=channels.ctypes.data,
        out_offsets=out_offsets.ctypes.data,
        contiguous=store_kind(problem, geo.out_strides[2] == 1),
        sums_offset=layout.sums_offset,
        sums_bytes=layout.sums_bytes,
    )
    return ctx, [places, depth, zeros, plan.masks, channels, out_offsets]


def _places(layout: _Layout, gather: Gather) -> np.ndarray:
    """int32 bytes [row tap, column tap, row, column] from a plane's first pixel to the one that an output's tap meets;
    -1 where that lies beside the image."""
    _, row_bytes, pixel_bytes = layout.plane_strides
    h, w = (
        np.array([offset for _, offset in axis.taps], np.int64).reshape(-1, 1) + np.arange(axis.count) * axis.in_step
        for axis in gather[1:]
    )
    rows = h * row_bytes
    if layout.copied:
        rows = h // layout.low_rows * layout.strip_bytes + h % layout.low_rows * row_bytes
    places = rows[:, None, :, None] + (w * pixel_bytes)[None, :, None, :]
    inside = _inside(gather.h)[:, None, :, None] & _inside(gather.w)[None, :, None, :]
    return np.pad(np.where(inside, places, -1).astype(np.int32).reshape(-1), (0, _PADDING), constant_values=-1)


FWD, BWD_DATA = TapGemm("conv_fwd"), TapGemm("conv_bwd_data")
FWD_DOT, BWD_DATA_DOT = TapGemm("conv_fwd", pairs=True), TapGemm("conv_bwd_data", pairs=True)
