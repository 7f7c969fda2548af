"""1x1 convolution of interleaved data (NHWC): one matrix product over the pixels of all images, forward and bwd_data.

    out[p, o] = sum over c of  in[p, c] * w[c, o]          p: every pixel of every image, one after another

The filter is packed into panels of nv vectors of output channels. A task takes a block of pixels through a chunk of
panels; both stay in the second-level cache.

                  c                    nv vectors of o
      p  +------------------+      +------+------+
         |  mr pixels: a    |   c  | panel|      |      mr * nv vectors of sums in registers; a pixel's channel is
         |  register tile   |      |      |      |      broadcast by the multiply-add that uses it, so that even one
         +------------------+      +------+------+      vector of outputs runs at the rate of multiply-adds

Traffic: x once a chunk, from memory once; the panels once a block, from cache; y once, past the caches where it is
larger than they are. A bias is what sums begin with, and relu their least value: neither takes a pass. Accumulates in
float32 (float64), one rounding a step, in the order of c. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, inf

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, PACK_NS, TILE_NS, kernel_us
from nbdnn.kernels.cpu.epilogue import store_kind, stored_ns, tile_store
from nbdnn.kernels.cpu.geometry import EPILOGUE_FIELDS, Geometry, epilogue_values, geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.micro_kernel import Config, pixel_tile
from nbdnn.kernels.cpu.pack import Packing, pack_phase
from nbdnn.kernels.cpu.vector import filled, pointer, prefetch, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_BLOCK_SHARE = 0.3  # of the second-level cache for a block of pixels
_CHUNK_SHARE = 0.35  # and for a chunk of panels
_TASKS_PER_THREAD = 8
_LEAST_PIXELS = 48  # a block
# Pixels are asked for this far ahead of their first use: 32 channels to 16 from memory 1.3 times as fast.
_AHEAD_BYTES = 4 << 10

# Pixels of a register tile for 1, 2, ... vectors of outputs: mr*nv + nv + 1 of 32 vector registers, or of 16.
_PIXELS = {"avx512": (14, 12, 8, 6, 5), "other": (12, 6, 4)}

_PARAMS = record(
    *("in_pointer", "out_pointer", *EPILOGUE_FIELDS, "pixels", "block_pixels", "blocks", "chunk_panels", "panels"),
    *("c_in", "c_out", "panel_bytes", "copy_bytes", "row_offsets", "lane_offsets", "kind"),
)


@cache
def _multiply_task(dtype: str, mr: int, nv: int, vl: int):
    """One block of pixels, one chunk of panels: index = chunk * blocks + block."""
    itemsize, width = ITEMSIZE[dtype], nv * vl
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(_PARAMS)
    most, fewer, single = (pixel_tile(dtype, pixels, nv, vl, True) for pixels in (mr, max(1, mr - 1), 1))
    tile_bytes, row_bytes, store = stack(mr * width * itemsize), width * itemsize, tile_store(dtype, dtype, vl)
    data, first_sums = pointer(dtype), stack(width * itemsize)

    @njit(**DEVICE)
    def multiply(count, x, x_step, c_in, w, y, y_step, lanes, streams, start, bound):
        """A tile of mr or mr - 1 pixels, or fewer, one by one."""
        if count == mr:
            most(x, x_step, c_in, w, y, y_step, lanes, streams, start, bound)
        elif count == mr - 1:
            fewer(x, x_step, c_in, w, y, y_step, lanes, streams, start, bound)
        else:
            for p in range(count):
                single(x + p * x_step, x_step, c_in, w, y + p * y_step, y_step, lanes, streams, start, bound)

    def block(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        first_pixel, chunk = index % f.blocks * f.block_pixels, index // f.blocks
        pixels = min(f.block_pixels, f.pixels - first_pixel)
        tiles = (pixels + mr - 1) // mr
        least, longer = pixels // tiles, pixels % tiles  # tiles of `least` pixels, the first `longer` of one more
        if least < mr - 1:  # too few to be shared out evenly: the last ones go one by one
            least, longer = mr, 0
        x_step, y_step = f.c_in * itemsize, f.c_out * itemsize
        tile, start = tile_bytes(), first_sums()
        finished = a.alpha == 1.0 and f.activation < 2 and not f.read_out and f.residual_pointer < 0
        bound = 0.0 if finished and f.activation else -inf
        first_panel = chunk * f.chunk_panels
        for panel in range(first_panel, min(f.panels, first_panel + f.chunk_panels)):
            shift, w = panel * row_bytes, a.workspace + worker * f.copy_bytes + panel * f.panel_bytes
            lanes = min(width, f.c_out - panel * width)
            bias = pointers[f.bias_pointer] + shift if f.bias_pointer >= 0 else 0
            for j in range(width):
                data(start)[j] = data(bias)[j] if finished and bias and j < lanes else 0.0
            for i in range(tiles):
                done = i * least + min(i, longer)
                p, count = first_pixel + done, min(least + (i < longer), pixels - done)
                x, y = pointers[f.in_pointer] + p * x_step, pointers[f.out_pointer] + p * y_step + shift
                if panel == first_panel:
                    for line in range(x + _AHEAD_BYTES, x + _AHEAD_BYTES + count * x_step, 64):
                        prefetch(line)
                if finished:
                    # Past the caches go whole lines of them: of a part each vector would be a write to memory.
                    streams = int(f.kind == 2 and lanes == width and (y | y_step | row_bytes) % 64 == 0)
                    to, to_step, stored = y, y_step, lanes
                else:
                    to, to_step, stored, streams = tile, row_bytes, width, 0
                multiply(count, x, x_step, f.c_in, w, to, to_step, stored, streams, start, bound)
                if not finished:
                    residual = pointers[f.residual_pointer] + p * y_step + shift if f.residual_pointer >= 0 else 0
                    flags = (f.activation, bias, 0, 1, residual, f.read_out)
                    store(
                        tile, width, count, lanes, y, f.row_offsets, f.lane_offsets, f.kind, flags, a.alpha, a.beta
                    )  # fmt: skip

    return compile_task(block, (dtype, mr, nv, vl), fastmath=FASTMATH)


@dataclass(frozen=True)
class _Plan:
    """How the product is cut into panels, and into tasks of some of them and some pixels."""

    geo: Geometry
    pixels: int
    panels: int
    panel_bytes: int
    block_pixels: int
    chunk_panels: int

    @property
    def blocks(self) -> int:
        return ceil(self.pixels / self.block_pixels)

    @property
    def chunks(self) -> int:
        return ceil(self.panels / self.chunk_panels)


@lru_cache(maxsize=256)
def _plan(problem: ConvProblem, config: Config, device: Cpu) -> _Plan:
    geo, itemsize = geometry(problem), ITEMSIZE[problem.dtype]
    pixels, wanted = geo.n * geo.gathers[0].pixels, device.threads * _TASKS_PER_THREAD
    width = config.nv * device.lanes(problem.dtype)
    panels, panel_bytes = ceil(geo.c_out / width), geo.c_in * width * itemsize
    fits = max(config.mr, int(device.l2_bytes * _BLOCK_SHARE) // max(1, geo.c_in * itemsize))
    blocks = max(ceil(pixels / fits), min(wanted, pixels // _LEAST_PIXELS), 1)
    chunks = ceil(panels / max(1, int(device.l2_bytes * _CHUNK_SHARE) // max(1, panel_bytes)))
    chunks = max(1, min(panels, max(chunks, wanted // blocks)))
    return _Plan(geo, pixels, panels, panel_bytes, max(1, ceil(pixels / blocks)), max(1, ceil(panels / chunks)))


def _packing(problem: ConvProblem, config: Config, device: Cpu) -> Packing:
    return Packing.of(geometry(problem), problem.dtype, config.nv * device.lanes(problem.dtype), device)


class Pointwise(Candidate[Config, Cpu]):
    """1x1 convolution with channels innermost, as one matrix product."""

    provider, algorithm, algo = "cpu", "pointwise", "small"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if set(problem.filter) != {1} or set(problem.stride) != {1} or any(map(any, problem.pad)):
            where = f"filter {problem.filter}, stride {problem.stride}, padding {problem.pad}"
            return Support(False, f"{where}: only 1, 1 and 0 make one matrix product")
        if not (problem.channels_last and problem.y_channels_last):
            return Support(False, f"layouts {problem.layout} and {problem.y_layout} are not both channels-last")
        if problem.groups != 1:
            return Support(False, f"{problem.groups} groups: only one is a plain matrix product")
        if problem.dtype != DEFAULT_COMPUTE[problem.dtype]:
            return Support(False, f"{problem.dtype}: only f32 and f64 are computed on as they lie in memory")
        return YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        pixels = _PIXELS.get(device.isa, _PIXELS["other"])
        vectors = max(1, ceil(geometry(problem).c_out / device.lanes(problem.dtype)))
        # The panels that leave fewest vectors empty, then the widest: each reads the pixels again.
        counts = range(min(vectors, 2), min(vectors, len(pixels)) + 1)
        nv = min(counts, key=lambda nv: (ceil(vectors / nv) * nv, -nv))
        return (Config(pixels[nv - 1], nv),)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        return _packing(problem, config, device).total_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        plan = _plan(problem, config, device)
        vector_fmas = plan.pixels * plan.panels * config.nv * plan.geo.c_in
        side_ns = ceil(plan.pixels / config.mr) * plan.panels * TILE_NS / 2 + plan.geo.c_in * plan.geo.c_out * PACK_NS
        stored = stored_ns(problem, True, config.nv * device.lanes(problem.dtype))
        side_ns += plan.pixels * plan.geo.c_out * (stored if problem.epilogue else stored - COPY_NS)
        return kernel_us(device, vector_fmas, side_ns, plan.blocks * plan.chunks, 2)

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        plan, vl = _plan(problem, config, device), device.lanes(problem.dtype)
        geo = plan.geo
        packing = _packing(problem, config, device)
        pack, keep = pack_phase(geo, problem.dtype, packing, device, True)
        rows = np.arange(config.mr, dtype=np.int64) * geo.c_out
        lanes = np.arange(config.nv * vl, dtype=np.int64)
        ctx = filled(
            _PARAMS,
            **epilogue_values(problem),
            in_pointer=geo.in_pointer,
            out_pointer=geo.out_pointer,
            pixels=plan.pixels,
            block_pixels=plan.block_pixels,
            blocks=plan.blocks,
            chunk_panels=plan.chunk_panels,
            panels=plan.panels,
            c_in=geo.c_in,
            c_out=geo.c_out,
            panel_bytes=plan.panel_bytes,
            copy_bytes=packing.copy_bytes,
            row_offsets=rows.ctypes.data,
            lane_offsets=lanes.ctypes.data,
            kind=store_kind(problem, True),
        )
        task = _multiply_task(problem.dtype, config.mr, config.nv, vl)
        return Program([pack, Phase(task, plan.blocks * plan.chunks, ctx)], [*keep, rows, lanes])


FWD, BWD_DATA = Pointwise("conv_fwd"), Pointwise("conv_bwd_data")
