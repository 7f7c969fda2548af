"""Convolution to few channels: forward of few filters with stride 1, bwd_data of few channels, groups, 2-D, 3-D.

    acc[row, o, column] += sum over k = (c, t, r, s) of  w[o, k] * low[c, t, row + r, column + s]      o <= 12

A task keeps the sums of a strip of output rows, all of them, in the first-level cache, and lets the channels pass by,
a few at a time: their rows are copied once, widened and with zeros beyond the borders (turned, where channels lie side
by side), and read once a tap, by as many vectors of columns as registers hold.

              all columns                            few channels              next ones
    acc   +----------------+              low    +------------------+    +------------------+
    row   | o = 0          |   +=   taps of      | rows of the strip|    |                  |
          | o = 1          |                     | and of the taps  |    |                  |
          +----------------+                     +------------------+    +------------------+

Kernels whose strips have all channels at once (`pixel_gemm`) hold two rows of 64 channels of 256 columns in the
second-level cache, which overlap by another two.

Traffic: x from memory once, and again where strips overlap; its copy is written once and read a tap at a time, the sums
read and written once for some channels, all in cache; y once. Accumulates in float32 (float64), one rounding a step, in
the order of k. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil

import numpy as np

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, GATHER_NS, kernel_us
from nbdnn.kernels.cpu.epilogue import store_kind, tile_store
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS, Gather, Geometry, gather_values, geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.lower_planes import LINE_NS, LOW_FIELDS, element_ns, low_values, lower_planes
from nbdnn.kernels.cpu.micro_kernel import Config, tile_product
from nbdnn.kernels.cpu.pack import Packing, pack_phase
from nbdnn.kernels.cpu.rows import convert_row, zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_LOW_BYTES = 32 << 10  # of the channels that pass by together
_STRIP_ROWS = 16
_TASKS_PER_THREAD = 4

# Vectors of a register tile for 1, 2, ... outputs: mr*nv + nv + 1 of 32 vector registers, or of 16.
_VECTORS = {"avx512": (8, 8, 7, 6, 5, 4, 3, 3, 3, 2, 2, 2), "other": (8, 5, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1)}
_MOST_OUTPUTS = len(_VECTORS["other"])
# More outputs than these take each multiply-add of 16 registers so many times as long (Zen 3: 2.3 to 3).
_MOST_IN_REGISTERS, _MANY = 8, 2.2

_PARAMS = record(
    *dict.fromkeys((*GATHER_FIELDS, *LOW_FIELDS)),
    *("strips", "span_w", "low_offsets", "taps", "packed_offset", "copy_bytes", "panel_bytes"),
    *("worker_offset", "worker_bytes", "low_bytes", "channel_offsets", "lane_offsets", "kind"),
)


@cache
def _strip_task(dtype: str, mr: int, nv: int, vl: int):
    """One strip of rows of one depth of one group of one image: index = ((n*groups + g)*depth + d)*strips + strip."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, args_at, params_at, row_bytes = pointer("i64"), struct(ARGS), struct(_PARAMS), stack(mr * 8)
    lower, store, clear = lower_planes(dtype, vl), tile_store(dtype, compute, vl), zero_fill(compute)
    product, copy_row = tile_product(compute, mr, nv, vl, mr * acc_bytes, None, True), convert_row(compute, compute, vl)

    def strip(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        first_row, rest = index % f.strips * f.strip_rows, index // f.strips
        depth, rest = rest % f.count_d, rest // f.count_d
        n, g = rest // f.groups, rest % f.groups
        rows = min(f.strip_rows, f.count_h - first_row)
        low = a.workspace + f.worker_offset + worker * f.worker_bytes
        acc, row_slot = low + f.low_bytes, row_bytes()
        # Rows follow each other with the columns that only taps read between them, whose sums nobody wants.
        vectors = (rows * f.low_pitch - f.span_w + vl - 1) // vl
        tiles, pitch = (vectors + nv - 1) // nv, vectors * vl * acc_bytes
        clear(acc, mr * vectors * vl)
        image = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        panel = a.workspace + f.packed_offset + worker * f.copy_bytes + g * f.panel_bytes
        for c in range(0, f.c_in, f.step_channels):
            channels = min(f.step_channels, f.c_in - c)
            lower(image + c * f.in_c * itemsize, low, f, depth, first_row, rows, channels)
            for m in range(mr):
                i64(row_slot)[m] = panel + (c * f.taps * mr + m) * acc_bytes
            for tile in range(tiles):
                # The vectors are shared out evenly: a tile of one vector would wait for its own multiply-adds.
                start, end = tile * vectors // tiles, (tile + 1) * vectors // tiles
                shift = start * vl * acc_bytes
                product(
                    end - start, row_slot, 0, low + shift, f.low_offsets, channels * f.taps, acc + shift, pitch
                )  # fmt: skip
        out = n * f.out_n + g * f.out_g + (f.start_d + depth * f.out_step_d) * f.out_d + f.start_w * f.out_w
        bias = pointers[f.bias_pointer] + g * f.c_out * itemsize if f.bias_pointer >= 0 else 0
        for i in range(rows):
            for m in range(mr):
                copy_row(low + m * f.count_w * acc_bytes, acc + m * pitch + i * f.low_pitch * acc_bytes, f.count_w)
            line = (out + (f.start_h + (first_row + i) * f.out_step_h) * f.out_h) * itemsize
            residual = pointers[f.residual_pointer] + line if f.residual_pointer >= 0 else 0
            flags = (f.activation, bias, 1, 0, residual, f.read_out)
            store(
                low, f.count_w, mr, f.count_w, pointers[f.out_pointer] + line, f.channel_offsets, f.lane_offsets,
                f.kind, flags, a.alpha, a.beta,
            )  # fmt: skip

    return compile_task(strip, (dtype, mr, nv, vl), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How a gather is cut into strips of rows, and how many channels pass by together."""

    strip_rows: int
    strips: int
    tasks: int
    step_channels: int
    low_rows: int
    low_pitch: int
    plane_elems: int
    low_bytes: int
    acc_bytes: int


def _plan(geo: Geometry, gather: Gather, acc_bytes: int, device: Cpu) -> _Plan:
    height, vl = gather.h.count, device.vector_bytes // acc_bytes
    outer = geo.n * geo.groups * gather.d.count
    strips = max(1, min(height, max(ceil(height / _STRIP_ROWS), ceil(device.threads * _TASKS_PER_THREAD / outer))))
    rows = ceil(height / strips)
    low_rows = rows + gather.h.span
    low_pitch = gather.w.count + gather.w.span
    plane_elems = low_rows * low_pitch + vl  # the last vector reads beyond the rows
    channel_bytes = max(1, len(gather.d.taps)) * plane_elems * acc_bytes
    # Channels that lie side by side are turned by vectors.
    least = vl if geo.in_strides[5] != 1 else 1
    step = min(geo.c_in, max(least, _LOW_BYTES // channel_bytes // least * least))
    strips = ceil(height / rows)
    return _Plan(
        strip_rows=rows,
        strips=strips,
        tasks=outer * strips,
        step_channels=step,
        low_rows=low_rows,
        low_pitch=low_pitch,
        plane_elems=plane_elems,
        # What is stored lies here as well.
        low_bytes=own_pages(max(step * channel_bytes, geo.c_out * gather.w.count * acc_bytes)),
        acc_bytes=own_pages(geo.c_out * ceil(rows * low_pitch / vl) * vl * acc_bytes),
    )


@dataclass(frozen=True)
class _Layout:
    """The workspace: packed filters of all gathers, then the rows and sums of each worker."""

    geo: Geometry
    plans: tuple[_Plan, ...]
    packing: Packing
    worker_offset: int
    worker_bytes: int
    total_bytes: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, problem: ConvProblem, device: Cpu) -> _Layout:
        geo, acc_bytes = geometry(problem), ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
        plans = tuple(_plan(geo, gather, acc_bytes, device) for gather in geo.gathers)
        packing = Packing.of(geo, problem.dtype, geo.c_out, device)
        worker_offset = own_pages(packing.total_bytes)
        worker_bytes = max(plan.low_bytes + plan.acc_bytes for plan in plans)
        return cls(geo, plans, packing, worker_offset, worker_bytes, worker_offset + device.threads * worker_bytes)


class FewOutputs(Candidate[Config, Cpu]):
    """Sums of few outputs that stay in cache while the channels pass by."""

    provider, algorithm, algo = "cpu", "few_outputs", "small"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        outputs = (problem.k if self.op == "conv_fwd" else problem.c) // problem.groups
        if outputs > _MOST_OUTPUTS:
            return Support(False, f"{outputs} channels of outputs: the sums of at most {_MOST_OUTPUTS} are kept")
        if self.op == "conv_fwd" and set(problem.stride[-2:]) != {1}:
            return Support(False, f"stride {problem.stride}: neighbours are to read neighbours")
        low_bytes = max(plan.low_bytes for plan in _Layout.of(problem, device).plans)
        if low_bytes >= 1 << 31:
            return Support(False, f"a strip of rows has {low_bytes} bytes: offsets are 32 bits")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        outputs = geometry(problem).c_out
        return (Config(outputs, _VECTORS.get(device.isa, _VECTORS["other"])[outputs - 1]),)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        return _Layout.of(problem, device).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        layout, vl = _Layout.of(problem, device), device.lanes(DEFAULT_COMPUTE[problem.dtype])
        geo, total = layout.geo, 0.0
        copy_ns = element_ns(geo.c_in, geo.in_strides[5] == 1)
        many = _MANY if device.isa != "avx512" and geo.c_out > _MOST_IN_REGISTERS else 1.0
        for gather, plan in zip(geo.gathers, layout.plans, strict=True):
            taps = len(gather.d.taps) * len(gather.h.taps) * len(gather.w.taps)
            vectors = plan.tasks * ceil(plan.strip_rows * plan.low_pitch / vl) * geo.c_in
            lowered = plan.tasks * plan.plane_elems * geo.c_in * len(gather.d.taps)
            stored = geo.n * geo.groups * geo.c_out * gather.pixels
            lines = plan.tasks * (plan.low_rows * geo.c_in * len(gather.d.taps) + plan.strip_rows)
            side_ns = lowered * copy_ns + lines * LINE_NS
            side_ns += stored * (COPY_NS if self._kind(problem, geo, gather) else GATHER_NS)
            total += kernel_us(device, vectors * max(1, taps) * (geo.c_out + 1) * many, side_ns, plan.tasks, 2)
        return total

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        layout = _Layout.of(problem, device)
        geo, dtype, acc_bytes = layout.geo, problem.dtype, ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
        packing = layout.packing
        pack, keep = pack_phase(geo, dtype, packing, device)
        phases = [pack]
        task = _strip_task(dtype, config.mr, config.nv, device.lanes(DEFAULT_COMPUTE[dtype]))
        for gather, plan, packed_offset in zip(geo.gathers, layout.plans, packing.part_offsets, strict=True):
            low_offsets = _low_offsets(gather, plan, acc_bytes)
            lowering, depth_offsets = low_values(
                gather, geo.in_strides[2:], plan.strip_rows, plan.low_pitch, plan.plane_elems, plan.step_channels
            )
            channels = np.arange(geo.c_out, dtype=np.int64) * geo.out_strides[2]
            lanes = np.arange(gather.w.count, dtype=np.int64) * (gather.w.out_step * geo.out_strides[5])
            keep += [low_offsets, depth_offsets, channels, lanes]
            taps = low_offsets.size // plan.step_channels
            ctx = filled(
                _PARAMS,
                **gather_values(problem, geo, gather) | lowering,
                strips=plan.strips,
                span_w=gather.w.span,
                low_offsets=low_offsets.ctypes.data,
                taps=taps,
                packed_offset=packed_offset,
                copy_bytes=packing.copy_bytes,
                panel_bytes=packing.panel_bytes,
                worker_offset=layout.worker_offset,
                worker_bytes=layout.worker_bytes,
                low_bytes=plan.low_bytes,
                channel_offsets=channels.ctypes.data,
                lane_offsets=lanes.ctypes.data,
                kind=self._kind(problem, geo, gather),
            )
            phases.append(Phase(task, plan.tasks, ctx))
        return Program(phases, keep)

    @staticmethod
    def _kind(problem: ConvProblem, geo: Geometry, gather: Gather) -> int:
        return store_kind(problem, gather.w.out_step * geo.out_strides[5] == 1)


def _low_offsets(gather: Gather, plan: _Plan, acc_bytes: int) -> np.ndarray:
    """Byte offset in the copied rows of each k = (c, t, r, s)."""
    rows, columns = ([offset - axis.low for _, offset in axis.taps] for axis in (gather.h, gather.w))
    planes = np.arange(plan.step_channels * len(gather.d.taps))[:, None, None] * plan.plane_elems
    within = np.array(rows, np.int64)[:, None] * plan.low_pitch + np.array(columns, np.int64)
    return ((planes + within) * acc_bytes).astype(np.int32).reshape(-1)


FWD, BWD_DATA = FewOutputs("conv_fwd"), FewOutputs("conv_bwd_data")
