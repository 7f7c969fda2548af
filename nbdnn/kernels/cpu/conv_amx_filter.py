"""Filter gradient as an implicit GEMM on matrix units (AMX): bfloat16, any stride, dilation, groups, 2-D, 3-D.

    sums[tap, k, c] += sum over pixels p of a strip of  dy[k, p] * x[c, p + tap]         32 or 16 k, 32 or 16 c at a time

    dy: pixels side by side              x: words of two pixels
      k  +--------------+ p              p/2 +--------+--------+ c
         |  tile of A   | ---->              |tile of B        |       four tiles of sums; 32 pixels load four tiles
      k' |  tile of A   |                    |        |        |       and make four products
         +--------------+                    +--------+--------+

A tap is another address of x: its pixels are counted through (`amx_filter_plan.py`), and words begin at even and at odd
ones. All of a strip is lowered by all workers, then multiplied, while it is in second-level cache; the sums of dw stay in
the workspace, and each is made in the order of the pixels by whoever takes it. Where dw has too few tiles for the
workers, or too few are lowered, runs of strips (splits) have sums of their own, added at last in fixed order.

Traffic: x and dy once; words of x once a tap and panel of 32 k, and rows of dy once a panel of 32 c, from cache; the sums
twice a strip. Accumulates in float32. Numbers and sums below 2^-126 count as 0, and an infinity or NaN of x also
reaches taps that meet it between two rows of dy, where this is 0. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.amx import TILE, TILE_BYTES, block_product, configure, refused, release
from nbdnn.kernels.cpu.amx_filter_lower import lower_task, strip_extents, tile_steps
from nbdnn.kernels.cpu.amx_filter_plan import PARAMS, STEP, parameters, plan_of
from nbdnn.kernels.cpu.amx_plan import Config
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import COPY_NS, TILE_NS, TURN_NS, kernel_us
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import filled, pointer, stack, struct
from nbdnn.problem_conv import ConvProblem

_PRODUCT_NS = 9.0  # of two tiles, as in `conv_amx.py`


@cache
def _multiply_task(mt: int, nt: int):
    """A panel of dy by some taps and panels of x: index = ((split * groups + g) * k_panels + k) * chunks + chunk."""
    i64, args_at, params_at, step_at = pointer("i64"), struct(ARGS), struct(PARAMS), struct(STEP)
    extents, product, block_bytes = strip_extents(), block_product(1, mt, nt), mt * nt * TILE_BYTES

    def multiply(args, ctx, index, worker):
        a, step = args_at(args), step_at(ctx)
        f = params_at(step.params)
        chunk, rest = index % f.chunks, index // f.chunks
        k_panel, rest = rest % f.k_panels, rest // f.k_panels
        g, split = rest % f.groups, rest // f.groups
        _, slices, _, rows = extents(ctx, split)
        if slices <= 0:
            return
        strip, steps = a.workspace + split * f.strip_bytes, tile_steps(f, slices, rows)
        dy = strip + f.a_offset + (g * f.k_tiles + k_panel * mt) * TILE * f.a_pitch
        x = strip + g * f.c_tiles * f.c_tile_bytes
        sums = a.workspace + f.sums_offset + split * f.split_bytes + (g * f.k_panels + k_panel) * f.blocks * block_bytes
        configure(f.shapes)
        for block in range(chunk * f.chunk_blocks, min(f.blocks, (chunk + 1) * f.chunk_blocks)):
            c_tile, tap = block // f.taps * nt, block % f.taps
            product(
                min(nt, f.c_tiles - c_tile), dy, f.a_pitch, 0, f.a_offsets, steps,
                x + c_tile * f.c_tile_bytes + i64(f.tap_offsets)[tap], TILE_BYTES, f.c_tile_bytes,
                step.strip, sums + block * block_bytes, 4 * TILE * nt,
            )  # fmt: skip
        release()

    return compile_task(multiply, (mt, nt), fastmath=FASTMATH)


@cache
def _store_task(mt: int, nt: int, vl: int):
    """The sums of all splits of one block, added and stored: index = (g * k_panels + k) * c_panels + c."""
    i64, floats, args_at, params_at, step_at = (
        pointer("i64"), pointer("f32"), struct(ARGS), struct(PARAMS), struct(STEP),
    )  # fmt: skip
    store, turn, row_slots = tile_store("bf16", "f32", vl), transpose("f32", "f32", vl), stack(8 * TILE * mt)
    width, tap_bytes = TILE * nt, mt * nt * TILE_BYTES

    @njit(**DEVICE)
    def add(sums, f):
        total = floats(sums)
        for split in range(1, f.splits):
            part = floats(sums + split * f.split_bytes)
            for i in range(f.sums_bytes // 4):
                total[i] += part[i]

    def store_block(args, ctx, index, worker):
        a, f, places = args_at(args), params_at(step_at(ctx).params), row_slots()
        c_panel, rest = index % f.c_panels, index // f.c_panels
        g, first_k, first_c = rest // f.k_panels, rest % f.k_panels * TILE * mt, c_panel * width
        filters, channels = min(TILE * mt, f.k_group - first_k), min(width, f.c_group - first_c)
        sums = a.workspace + f.sums_offset + index * f.sums_bytes
        add(sums, f)
        flags = (0, 0, 0, 0, 0, f.read_out)
        for k in range(filters):
            i64(places)[k] = (g * f.k_group + first_k + k) * f.w_k
        if f.w_tap:
            for tap in range(f.taps):
                out = a.p2 + 2 * (tap * f.w_tap + first_c)
                tile = sums + tap * tap_bytes
                store(tile, width, filters, channels, out, places, f.no_offset, 1, flags, a.alpha, a.beta)
            return
        turned, out = a.workspace + f.worker_offset + worker * f.worker_bytes, a.p2 + 2 * first_c * f.taps
        for k in range(filters):
            turn(turned, 4 * f.taps, sums + 4 * k * width, tap_bytes, f.taps, channels)
            lanes = channels * f.taps
            store(turned, lanes, 1, lanes, out, places + 8 * k, f.no_offset, 1, flags, a.alpha, a.beta)

    return compile_task(store_block, (mt, nt, vl), fastmath=FASTMATH)


class AmxFilter(Candidate[Config, Cpu]):
    """Filter gradient on matrix units."""

    op, provider, algorithm, algo = "conv_bwd_filter", "cpu", "amx", "small"

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if problem.dtype != "bf16":
            return Support(False, f"dtype is {problem.dtype}, this kernel multiplies bf16")
        reason = refused(problem.dtype, device)
        return Support(False, reason) if reason else YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        if problem.c // problem.groups <= TILE:
            return (Config(4, 1),)
        return (Config(1, 2) if problem.k // problem.groups <= TILE else Config(2, 2),)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        plan = plan_of(problem, config, device)
        return plan.worker_offset + device.threads * plan.worker_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        plan = plan_of(problem, config, device)
        groups, taps = problem.groups, prod(problem.filter)
        blocks = plan.strips * groups * plan.k_panels * plan.c_panels * taps
        tiles = min(config.nt, plan.c_tiles)
        side_ns = blocks * (config.mt * tiles * (plan.steps * _PRODUCT_NS + 2 * TILE * COPY_NS) + TILE_NS)
        pixels, in_planes = plan.strips * plan.steps * 2 * TILE, not problem.channels_last
        # A word is written for each pixel of each copy that begins with an even or an odd one.
        lowered = groups * plan.c_tiles * TILE * (len(plan.planes) + plan.word_planes / 2)
        side_ns += pixels * lowered * (TURN_NS / 2 if in_planes else COPY_NS)
        side_ns += pixels * groups * plan.k_panels * config.mt * TILE * (COPY_NS if in_planes else TURN_NS / 2)
        side_ns += problem.k * problem.c // groups * taps * (TURN_NS + plan.splits * COPY_NS)
        tasks = plan.splits * groups * plan.k_panels * plan.chunks
        return kernel_us(device, 0, side_ns, tasks, 2 * plan.split_strips + 1)

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        plan = plan_of(problem, config, device)
        params, keep = parameters(problem, config, plan)
        vl, panels = device.lanes("f32"), problem.groups * plan.k_panels
        lowered = problem.groups * (len(plan.planes) * ceil(plan.c_tiles / 2) + ceil(plan.k_panels * config.mt / 2))
        phases = []
        steps = [filled(STEP, params=params.ctypes.data, strip=strip) for strip in range(plan.split_strips)]
        for step in steps:
            phases.append(Phase(lower_task(vl), plan.splits * lowered, step))
            phases.append(Phase(_multiply_task(config.mt, config.nt), plan.splits * panels * plan.chunks, step))
        phases.append(Phase(_store_task(config.mt, config.nt, vl), panels * plan.c_panels, steps[0]))
        return Program(phases, keep)


BWD_FILTER = AmxFilter()
