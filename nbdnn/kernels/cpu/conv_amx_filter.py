"""Filter gradient as an implicit GEMM on matrix units (AMX): bfloat16, any stride, dilation, groups, 2-D, 3-D.

    sums[c, tap, k] += sum over pixels p of a strip of  dy[k, p] * x[c, p + tap]

    dy: pixels side by side              x: words of two pixels
      k  +--------------+ p              p/2 +--------+--------+ c and tap
         |  tile of A   | ---->              |tile of B        |       four tiles of sums; 32 pixels load four tiles
      k' |  tile of A   |                    |        |        |       and make four products
         +--------------+                    +--------+--------+

A tap is another address of x: its pixels are counted through (`amx_filter_plan.py`), and words begin at even and at odd
ones. A tile of B is a unit: 16 channels and a tap. A strip is lowered, then multiplied while it is in second-level
cache; the sums of dw stay in the workspace. Each worker has a run of strips (a split) with sums of its own, added at
last in fixed order, where these are not too many; else all work on the same strip. Who does what decides nothing about
the result.

Traffic: x and dy once; of a strip, from cache, words of x once a tap and panel of mt * 16 k, rows of dy once for nt
units; the sums twice a strip. Accumulates in float32. Numbers and sums below 2^-126 count as 0, and an infinity or NaN
of x also reaches taps that meet it between two rows of dy, where this is 0. Source: own.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.amx import PRODUCT_NS, TILE, TILE_BYTES, block_product, configure, refused, release
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


@cache
def _multiply_task(mt: int, nt: int):
    """A panel of dy by some units of x: index = ((split * groups + g) * k_panels + k) * chunks + chunk."""
    args_at, params_at, step_at = struct(ARGS), struct(PARAMS), struct(STEP)
    extents, product, unit_bytes = strip_extents(), block_product(1, mt, nt), mt * TILE_BYTES

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
        sums = a.workspace + f.sums_offset + split * f.split_bytes + (g * f.k_panels + k_panel) * f.units * unit_bytes
        unit, end = chunk * f.chunk_units, min(f.units, (chunk + 1) * f.chunk_units)
        configure(f.shapes)
        while unit < end:
            tiles = nt if end - unit >= nt else 1
            product(
                tiles, dy, f.a_pitch, 0, f.a_offsets, steps, x, TILE_BYTES, f.unit_places + 8 * unit, step.strip,
                sums + unit * unit_bytes, 4 * TILE, unit_bytes,
            )  # fmt: skip
            unit += tiles
        release()

    return compile_task(multiply, (mt, nt), fastmath=FASTMATH)


@cache
def _store_task(mt: int, vl: int):
    """Sums of all splits, added and stored, of all taps of 16 channels: index = (g * k_panels + k) * c_tiles + c."""
    i64, floats, args_at, params_at, step_at = (
        pointer("i64"), pointer("f32"), struct(ARGS), struct(PARAMS), struct(STEP),
    )  # fmt: skip
    store, turn, row_slots = tile_store("bf16", "f32", vl), transpose("f32", "f32", vl), stack(8 * TILE * mt)
    unit_bytes = mt * TILE_BYTES

    @njit(**DEVICE)
    def add(sums, f):
        total = floats(sums)
        for split in range(1, f.splits):
            part = floats(sums + split * f.split_bytes)
            for i in range(f.taps * unit_bytes // 4):
                total[i] += part[i]

    def store_units(args, ctx, index, worker):
        a, f, places = args_at(args), params_at(step_at(ctx).params), row_slots()
        first_c, rest = index % f.c_tiles * TILE, index // f.c_tiles
        g, first_k = rest // f.k_panels, rest % f.k_panels * TILE * mt
        filters, channels = min(TILE * mt, f.k_group - first_k), min(TILE, f.c_group - first_c)
        sums = a.workspace + f.sums_offset + index * f.taps * unit_bytes
        add(sums, f)
        flags = (0, 0, 0, 0, 0, f.read_out)
        for k in range(filters):
            i64(places)[k] = (g * f.k_group + first_k + k) * f.w_k
        if f.w_tap:
            for tap in range(f.taps):
                out, tile = a.p2 + 2 * (tap * f.w_tap + first_c), sums + tap * unit_bytes
                store(tile, TILE, filters, channels, out, places, f.no_offset, 1, flags, a.alpha, a.beta)
            return
        turned, out = a.workspace + f.worker_offset + worker * f.worker_bytes, a.p2 + 2 * first_c * f.taps
        for k in range(filters):
            turn(turned, 4 * f.taps, sums + 4 * TILE * k, unit_bytes, f.taps, channels)
            lanes = channels * f.taps
            store(turned, lanes, 1, lanes, out, places + 8 * k, f.no_offset, 1, flags, a.alpha, a.beta)

    return compile_task(store_units, (mt, vl), fastmath=FASTMATH)


class AmxFilter(Candidate[Config, Cpu]):
    """Filter gradient on matrix units."""

    op, provider, algorithm, algo = "conv_bwd_filter", "cpu", "amx", "small"

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if problem.dtype != "bf16":
            return Support(False, f"dtype is {problem.dtype}, this kernel multiplies bf16")
        reason = refused(problem.dtype, device)
        return Support(False, reason) if reason else YES

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
        return (Config(1, 4) if problem.k // problem.groups <= TILE else Config(2, 2),)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Cpu) -> int:
        plan = plan_of(problem, config, device)
        return plan.worker_offset + device.threads * plan.worker_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Cpu) -> float:
        plan = plan_of(problem, config, device)
        groups, rows = problem.groups, problem.groups * plan.k_panels * config.mt
        products = plan.strips * rows * plan.units
        products_ns = products * (plan.steps * PRODUCT_NS + 2 * TILE * COPY_NS + TILE_NS / (config.mt * config.nt))
        pixels, in_planes = plan.strips * plan.steps * 2 * TILE, not problem.channels_last
        # A word is written for each pixel of each copy that begins with an even or an odd one, those between taps too.
        lowered = groups * plan.c_tiles * TILE * (len(plan.planes) + plan.word_planes / 2)
        lowered *= plan.pairs / (plan.steps * TILE)
        lowered_ns = pixels * lowered * (TURN_NS / 2 if in_planes else COPY_NS)
        lowered_ns += pixels * rows * TILE * (COPY_NS if in_planes else TURN_NS / 2)
        products_ns += rows * TILE * TILE * plan.units * (TURN_NS + plan.splits * COPY_NS)
        us = kernel_us(device, 0, lowered_ns, plan.splits * plan.lowered, plan.split_strips)
        tasks = plan.splits * groups * plan.k_panels * plan.chunks
        return us + kernel_us(device, 0, products_ns, tasks, plan.split_strips + 1)

    def prepare(self, problem: ConvProblem, config: Config, device: Cpu) -> Program:
        plan = plan_of(problem, config, device)
        params, keep = parameters(problem, config, plan)
        vl, panels = device.lanes("f32"), problem.groups * plan.k_panels
        phases = []
        steps = [filled(STEP, params=params.ctypes.data, strip=strip) for strip in range(plan.split_strips)]
        for step in steps:
            phases.append(Phase(lower_task(), plan.splits * plan.lowered, step))
            phases.append(Phase(_multiply_task(config.mt, config.nt), plan.splits * panels * plan.chunks, step))
        phases.append(Phase(_store_task(config.mt, vl), panels * plan.c_tiles, steps[0]))
        return Program(phases, keep)


BWD_FILTER = AmxFilter()
