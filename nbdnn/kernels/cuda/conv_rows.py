"""The first layer of a network by windows of raw image rows: forward and filter gradient of up to four channels.

`rows_plan.py` has the idea and the tiling, `rows_forward.py` and `rows_filter.py` the kernels, their traffic and their
order of summation. Where rows of the image are no multiple of 4 bytes, or taps are dilated, `conv_stem.py` has the
layer.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rows_filter, rows_forward, rows_sums
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, fma_flops_per_s, tensor_flops_per_s
from nbdnn.kernels.cuda.rows_plan import (
    ENTRY_BYTES,
    FRACTION_BITS,
    GROUP,
    Block,
    Forward,
    Gradient,
    Lines,
    Rows,
    Tile,
    aligned,
    lines,
    refusal,
    rows,
    tile,
)
from nbdnn.kernels.cuda.rows_sums import Sums
from nbdnn.kernels.cuda.window_plan import Image, blocks_at_once, image
from nbdnn.problem import ITEMSIZE, ConvProblem

_MOST_CHANNELS = 4
_MOST_RUN = 64  # elements of a segment: a loop over them is written out
_FMA_FILTERS = 32  # of a warp
_REGISTERS = 16384  # of a quarter of a multiprocessor
_SUMS = 64  # of a thread, for which there are registers if two blocks run at once
# Warps of a block of bwd_filter, for whose sums there are registers: wanted if others run beside it, and sets at most.
_WARPS, _MOST_SETS = 8, 12
_LAUNCH_US = 3.0
# Priors for the guess: parts of the units' rates, and of a copy's.
_FMA_SHARE, _TENSOR_SHARE, _COPY_SHARE = 0.65, 0.35, 0.65


class Config(NamedTuple):
    """A tile has about `pixels` outputs, in rows of `width` at most; a block that many filters at most.

    blocks: of a multiprocessor at once. stages: slabs of a block, of which one is read while others arrive.
    """

    pixels: int
    width: int
    filters: int
    blocks: int
    stages: int

    def __str__(self) -> str:
        return f"{self.pixels}w{self.width}x{self.filters}/{self.blocks}s{self.stages}"


_FORWARD_MMA = (
    *(Config(448, 128, 64, 3, 2), Config(448, 128, 64, 2, 2), Config(224, 128, 64, 2, 2), Config(224, 128, 64, 3, 2)),
    *(Config(448, 128, 32, 3, 2), Config(224, 128, 64, 1, 2)),
)
_FORWARD_FMA = (
    *(Config(448, 128, 64, 2, 2), Config(448, 128, 32, 2, 2), Config(224, 128, 64, 2, 2), Config(224, 128, 64, 1, 2)),
)
_FILTER_MMA = (
    *(Config(448, 128, 64, 2, 2), Config(224, 128, 64, 3, 2), Config(224, 128, 64, 2, 2), Config(112, 128, 64, 4, 2)),
    *(Config(448, 128, 64, 1, 2), Config(224, 128, 64, 1, 2), Config(112, 64, 64, 3, 2), Config(224, 128, 32, 3, 2)),
    *(Config(112, 128, 64, 1, 2),),
)
_FILTER_FMA = (
    *(Config(224, 128, 32, 2, 2), Config(448, 128, 32, 1, 2), Config(112, 64, 32, 3, 2), Config(112, 128, 32, 2, 2)),
    *(Config(224, 128, 32, 1, 2), Config(112, 128, 32, 1, 2)),
)
_CONFIGS = {"conv_fwd": (_FORWARD_MMA, _FORWARD_FMA), "conv_bwd_filter": (_FILTER_MMA, _FILTER_FMA)}
_SMALLEST = (Config(64, 64, 16, 1, 2),)  # what has no room for this is not supported


class Forwarded(NamedTuple):
    variant: Forward
    integers: Rows
    grid: tuple[int, int, int]
    threads: int
    min_blocks: int
    shared_bytes: int


def forward(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Forwarded:
    """The kernel of a conv_fwd."""
    seen = image(problem)
    form = lines(seen, problem, math)
    filters = _FMA_FILTERS if math == "fma" else min(config.filters, _power_of_two(problem.k, 8))
    units = max(1, min(config.filters, _power_of_two(problem.k, 8)) // filters)
    tiled = tile(seen, form, config.pixels, config.width)
    if math == "fma":
        # With 7 groups of 8 pixels a turn, rows of 56 or 112 leave no warp idle.
        groups = min((8, 7), key=lambda groups: groups * ceil(ceil(tiled.groups / groups) * units / _WARPS))
    else:
        groups = max(2, min(8, (_SUMS if config.blocks < 3 else _SUMS // 2) * 4 // filters))
    variant = Forward(form, config.stages, units, filters, groups, _run_of(problem, math, filters), problem.epilogue)
    segments = seen.taps[0] * (seen.group_in // form.inner)
    entries = segments if math == "fma" else segments * form.segment_words
    fragments = segments if math == "fma" else ceil(entries / 8)
    turns = ceil(tiled.groups / groups)
    groups_at = aligned((fragments if math == "fma" else fragments * 8) * ENTRY_BYTES)
    filters_at = aligned(groups_at + turns * groups * ENTRY_BYTES)
    slabs_at = aligned(filters_at + fragments * (form.run if math == "fma" else 8) * units * filters * 4)
    slab_bytes = aligned(tiled.in_rows * (seen.group_in // form.inner) * tiled.pitch)
    chunks = ceil(problem.k / (units * filters))
    block = Block(
        blocks=_blocks(seen, tiled, config, chunks, device),
        entries=entries,
        fragments=fragments,
        groups_at=groups_at,
        filters_at=filters_at,
        slabs_at=slabs_at,
        slab_bytes=slab_bytes,
        dy_at=0,
        parts=turns,
        sets=0,
        all_sets=0,
    )
    grid = block.blocks, chunks, 1
    integers = rows(seen, form, tiled, block)
    return Forwarded(
        variant, integers, grid, rows_forward.THREADS, config.blocks, slabs_at + config.stages * slab_bytes
    )


class Gradients(NamedTuple):
    variant: Gradient
    integers: Rows
    grid: tuple[int, int, int]
    threads: int
    min_blocks: int
    shared_bytes: int
    sums: Sums

    @property
    def workspace_bytes(self) -> int:
        return self.sums.blocks * self.sums.elements * 4


def gradients(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Gradients:
    """The kernels of a bwd_filter."""
    seen = image(problem)
    form = lines(seen, problem, math)
    filters = _FMA_FILTERS if math == "fma" else min(config.filters, _power_of_two(problem.k, 16))
    words = seen.taps[0] * (seen.group_in // form.inner) * form.segment_words
    every = ceil(words / Gradient(form, 0, filters, 0).set_words)
    grid_z = ceil(every / _MOST_SETS)
    sets = ceil(every / grid_z)
    variant = Gradient(form, config.stages, filters, sets * 32)
    room = _warps_at_once(variant.registers) // config.blocks
    splits = max(1, min(room, 2 * _WARPS if config.blocks == 1 else _WARPS) // sets)
    variant = variant._replace(threads=sets * splits * 32)
    tiled = tile(seen, form, config.pixels, config.width)
    # Groups are summed several at once: beside the last ones lie zeros.
    groups = aligned(tiled.groups, variant.groups)
    slabs_at = aligned(groups * ENTRY_BYTES)
    dy_at = aligned(tiled.in_rows * (seen.group_in // form.inner) * tiled.pitch)
    slab_bytes = aligned(dy_at + groups * GROUP * variant.dy_bytes)
    chunks = ceil(problem.k / filters)
    block = Block(
        blocks=_blocks(seen, tiled, config, chunks * grid_z, device),
        entries=words,
        fragments=0,
        groups_at=0,
        filters_at=0,
        slabs_at=slabs_at,
        slab_bytes=slab_bytes,
        dy_at=dy_at,
        parts=splits,
        sets=sets,
        all_sets=sets * grid_z,
    )
    shared_bytes = max(slabs_at + config.stages * slab_bytes, sets * variant.set_sums * 4)
    grid = block.blocks, chunks, grid_z
    integers = rows(seen, form, tiled, block)
    totals = _sums(seen, variant, integers, chunks)
    return Gradients(variant, integers, grid, variant.threads, config.blocks, shared_bytes, totals)


def _sums(seen: Image, variant: Gradient, f: Rows, chunks: int) -> Sums:
    form: Lines = variant.lines
    return Sums(
        blocks=f.blocks,
        elements=chunks * f.all_sets * variant.set_sums,
        filters=variant.filters,
        rows=f.all_sets * variant.set_words * variant.row_elems,
        per_word=variant.row_elems,
        segment_words=form.segment_words,
        odd=form.odd,
        run=form.run,
        inner=form.inner,
        planes=f.planes,
        taps_h=f.taps_h,
        out_c=f.out_c,
        w_start=f.w_start,
        w_out=f.w_out,
        w_in=f.w_in,
        w_r=f.w_r,
        w_s=f.w_s,
    )


def _power_of_two(count: int, least: int) -> int:
    """The first from `count` on, and from `least`."""
    return max(least, 1 << (count - 1).bit_length())


def _blocks(seen: Image, tiled: Tile, config: Config, others: int, device: Gpu) -> int:
    """Blocks that share the tiles, where `others` times as many run at once."""
    return min(seen.n * tiled.tiles_h * tiled.tiles_w, max(1, config.blocks * device.sms // others))


def _warps_at_once(registers: int) -> int:
    """Warps of a multiprocessor, for which there are so many registers a thread."""
    return 4 * (_REGISTERS // (32 * registers))


def _run_of(problem: ConvProblem, math: str, filters: int) -> int:
    """Outputs that a thread stores at once: its neighbours in memory, as far as they are aligned."""
    itemsize = ITEMSIZE[problem.dtype]
    most = 4 if math == "fma" else min(16 // itemsize, filters // 4)
    whole = problem.y_channels_last and problem.k % most == 0 and problem.align % (most * itemsize) == 0
    return most if whole else 1


def _plan(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Forwarded | Gradients:
    return (gradients if problem.op == "conv_bwd_filter" else forward)(problem, math, config, device)


def fits(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Support:
    """Whether a config's blocks find room, and int32 holds every index."""
    planned = _plan(problem, math, config, device)
    needed = planned.shared_bytes
    if (room := blocks_at_once(needed, device)) < config.blocks:
        return Support(False, f"{config.blocks} blocks of {needed} bytes, a multiprocessor has room for {room}")
    if max(planned.grid[1:]) > 65535:
        return Support(False, f"a grid of {planned.grid} blocks, of which 65535 are possible on two axes")
    copies = planned.integers.planes * planned.integers.in_rows * planned.integers.line_copies
    if copies * planned.integers.line_copies >= 1 << FRACTION_BITS:
        return Support(False, f"{copies} copies in lines of {planned.integers.line_copies}: too many to tell apart")
    if (bits := index_bits(problem, planned.integers)) > 32:
        return Support(False, f"indices take {bits} bits, this kernel has 32")
    return YES


class ByRows(LaunchedCandidate[Config]):
    """A convolution by raw rows. math: 'fma', or 'tf32'; 16-bit data take matrix units in any case."""

    algorithm = "rows"

    def __init__(self, op: str, math: str = "fma") -> None:
        self.op, self.math = op, math
        if math == "tf32":
            self.algorithm = f"{self.algorithm}_tf32"

    def units_math(self, problem: ConvProblem) -> str:
        return "mma" if problem.dtype in ("f16", "bf16") else self.math

    def refused(self, problem: ConvProblem) -> str:
        """Why no tile can be right, or ''."""
        if problem.ndim != 2:
            return f"the image has {problem.ndim} spatial axes, this kernel takes 2"
        if problem.groups > 1 or not 1 <= problem.c <= _MOST_CHANNELS:
            return f"{problem.c} channels in {problem.groups} groups, this kernel takes 1 to {_MOST_CHANNELS} in one"
        if problem.k < 1:
            return f"there are {problem.k} filters"
        if problem.dtype == "f64" or (self.math == "tf32" and problem.dtype != "f32"):
            return f"the data are {problem.dtype}"
        run = problem.filter[1] * (problem.c if problem.channels_last else 1)
        if run > _MOST_RUN:
            return f"{run} neighbours of a window, this kernel takes {_MOST_RUN}"
        if self.op == "conv_bwd_filter":
            bytes_ = problem.k * ITEMSIZE[problem.dtype]
            if not problem.y_channels_last or bytes_ % 16 or problem.align % 16:
                return f"{problem.k} filters of dy in {problem.y_layout}, this kernel copies 16 bytes of neighbours"
        return refusal(problem, self.units_math(problem))

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := self.refused(problem):
            return Support(False, reason)
        return fits(problem, self.units_math(problem), _SMALLEST[-1], device)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        """Those that fit, and are not another by a different name; else the smallest."""
        math = self.units_math(problem)
        different: dict[Forwarded | Gradients, Config] = {}
        for config in _CONFIGS[self.op][math == "fma"]:
            planned = _plan(problem, math, config, device)
            warps = planned.threads // 32 * planned.min_blocks
            if warps <= _warps_at_once(planned.variant.registers) and fits(problem, math, config, device).ok:
                different.setdefault(planned, config)
        return tuple(different.values()) or _SMALLEST

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        if self.op != "conv_bwd_filter":
            return 0
        return gradients(problem, self.units_math(problem), config, device).workspace_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        math = self.units_math(problem)
        if math == "fma":
            flops_per_s = _FMA_SHARE * fma_flops_per_s(device, "f32")
        else:
            flops_per_s = _TENSOR_SHARE * tensor_flops_per_s(device, problem.dtype, math == "tf32")
        moved_us = problem.min_bytes / (_COPY_SHARE * copy_bytes_per_s(device)) * 1e6
        launches = 2 if self.op == "conv_bwd_filter" else 1
        return launches * _LAUNCH_US + max(problem.flops / flops_per_s * 1e6, moved_us)

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        math = self.units_math(problem)
        if self.op == "conv_bwd_filter":
            return _gradient_launches(problem, gradients(problem, math, config, device))
        return [_forward_launch(problem, forward(problem, math, config, device))]


def _forward_launch(problem: ConvProblem, planned: Forwarded) -> Launch:
    names = [operand.name for operand in problem.operands]
    bias, residual = (names.index(name) if name in names else NULL for name in ("bias", "residual"))
    builder = rows_forward.fma_kernel if planned.variant.lines.math == "fma" else rows_forward.mma_kernel
    return Launch(
        source=Source(builder, planned.variant, planned.threads, planned.min_blocks),
        grid=planned.grid,
        pointers=(0, 1, 2, bias, residual),
        scalars="f32",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )


def _gradient_launches(problem: ConvProblem, planned: Gradients) -> list[Launch]:
    builder = rows_filter.fma_kernel if planned.variant.lines.math == "fma" else rows_filter.mma_kernel
    parts = Launch(
        source=Source(builder, planned.variant, planned.threads, planned.min_blocks),
        grid=planned.grid,
        pointers=(0, 1, WORKSPACE),
        scalars="",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )
    total = Launch(
        source=Source(rows_sums.sum_kernel, (problem.dtype, problem.epilogue), rows_sums.SUM_THREADS),
        grid=(planned.sums.elements // rows_sums.SUM_ELEMENTS, 1, 1),
        pointers=(WORKSPACE, 2),
        scalars="f32",
        integers=planned.sums,
    )
    return [parts, total]


FWD, FWD_TF32 = ByRows("conv_fwd"), ByRows("conv_fwd", "tf32")
BWD_FILTER, BWD_FILTER_TF32 = ByRows("conv_bwd_filter"), ByRows("conv_bwd_filter", "tf32")
