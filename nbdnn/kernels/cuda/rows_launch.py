"""How the kernels by raw rows are launched: configs, what a block takes, and where it lies in shared memory."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rows_filter, rows_forward, rows_sums
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.rows_plan import (
    ENTRY_BYTES,
    GROUP,
    SET_WORDS,
    Block,
    Forward,
    Gradient,
    Tile,
    aligned,
    lines,
    rows,
    tile,
)
from nbdnn.kernels.cuda.window_candidate import Planned, Totals
from nbdnn.kernels.cuda.window_plan import Image, image
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_FMA_FILTERS = 32  # of a warp
_REGISTERS = 16384  # of a quarter of a multiprocessor
_SUMS = 64  # of a thread, for which there are registers if two blocks run at once
# Warps of a block of bwd_filter, for whose sums there are registers: wanted if others run beside it, and sets at most.
_WARPS, _MOST_SETS = 8, 12


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
_FILTER_PHASES = (
    *(Config(896, 128, 64, 1, 2), Config(448, 128, 64, 2, 2), Config(448, 128, 64, 1, 3), Config(448, 128, 64, 1, 2)),
    *(Config(224, 128, 64, 2, 2),),
)
_FILTER_FMA = (
    *(Config(224, 128, 32, 2, 2), Config(448, 128, 32, 1, 2), Config(112, 64, 32, 3, 2), Config(112, 128, 32, 2, 2)),
    *(Config(224, 128, 32, 1, 2), Config(112, 128, 32, 1, 2)),
)
CONFIGS = {
    "conv_fwd": {"mma": _FORWARD_MMA, "tf32": _FORWARD_MMA, "fma": _FORWARD_FMA},
    "conv_bwd_data": {"mma": _FORWARD_MMA, "tf32": _FORWARD_MMA, "fma": _FORWARD_FMA},
    "conv_bwd_filter": {"mma": _FILTER_PHASES, "tf32": _FILTER_MMA, "fma": _FILTER_FMA},
}
SMALLEST = (Config(64, 64, 16, 1, 2),)  # what has no room for this is not supported


def forward(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Planned:
    """The kernel of a conv_fwd or bwd_data."""
    seen = image(problem)
    form = lines(seen, problem, math)
    filters = _FMA_FILTERS if math == "fma" else min(config.filters, power_of_two(seen.group_out, 8))
    units = max(1, min(config.filters, power_of_two(seen.group_out, 8)) // filters)
    tiled = tile(seen, form, config.pixels, config.width)
    if math == "fma":
        # With 7 groups of 8 pixels a turn, rows of 56 or 112 leave no warp idle.
        groups = min((8, 7), key=lambda groups: groups * ceil(ceil(tiled.groups / groups) * units / _WARPS))
    else:
        # TF32 takes twice the words of the filters: with the addresses of 8 groups a word was spilled.
        most = 6 if math == "tf32" and config.blocks > 2 else 8
        groups = max(2, min(most, (_SUMS if config.blocks < 3 else _SUMS // 2) * 4 // filters))
    run = _run_of(problem, seen, math, filters)
    variant = Forward(form, config.stages, units, filters, groups, run, problem.epilogue)
    segments = seen.taps[0] * (seen.group_in // form.inner)
    entries = segments if math == "fma" else segments * form.segment_words
    fragments = segments if math == "fma" else ceil(entries / 8)
    turns = ceil(tiled.groups / groups)
    groups_at = aligned((fragments if math == "fma" else fragments * 8) * ENTRY_BYTES)
    filters_at = aligned(groups_at + turns * groups * ENTRY_BYTES)
    slabs_at = aligned(filters_at + fragments * (form.run if math == "fma" else 8) * units * filters * 4)
    slab_bytes = aligned(tiled.in_rows * (seen.group_in // form.inner) * tiled.pitch)
    chunks = ceil(seen.group_out / (units * filters))
    block = Block(
        blocks=blocks_of(seen, tiled, config, chunks, device),
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
    builder = rows_forward.fma_kernel if math == "fma" else rows_forward.mma_kernel
    return Planned(
        source=Source(builder, variant, rows_forward.THREADS, config.blocks),
        integers=rows(seen, form, tiled, block),
        grid=(block.blocks, chunks, 1),
        shared_bytes=slabs_at + config.stages * slab_bytes,
        most_blocks=warps_at_once(variant.registers) // (rows_forward.THREADS // 32),
    )


def gradients(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Planned:
    """The kernels of a bwd_filter in float32."""
    seen = image(problem)
    form = lines(seen, problem, math)
    filters = _FMA_FILTERS if math == "fma" else min(config.filters, power_of_two(seen.group_out, 16))
    words = seen.taps[0] * (seen.group_in // form.inner) * form.segment_words
    every = ceil(words / SET_WORDS)
    grid_z = ceil(every / _MOST_SETS)
    sets = ceil(every / grid_z)
    variant = Gradient(form, config.stages, filters, sets * 32)
    warps = warps_at_once(variant.registers)
    splits = max(1, min(warps // config.blocks, 2 * _WARPS if config.blocks == 1 else _WARPS) // sets)
    variant = variant._replace(threads=sets * splits * 32)
    tiled = tile(seen, form, config.pixels, config.width)
    # Groups are summed several at once: beside the last ones lie zeros.
    groups = aligned(tiled.groups, variant.groups)
    slabs_at = aligned(groups * ENTRY_BYTES)
    dy_at = aligned(tiled.in_rows * (seen.group_in // form.inner) * tiled.pitch)
    slab_bytes = aligned(dy_at + groups * GROUP * variant.dy_bytes)
    chunks = ceil(seen.group_out / filters)
    block = Block(
        blocks=blocks_of(seen, tiled, config, chunks * grid_z, device),
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
    builder = rows_filter.fma_kernel if math == "fma" else rows_filter.tf32_kernel
    integers = rows(seen, form, tiled, block)
    of_sums = Source(rows_sums.sum_kernel, (problem.dtype, problem.epilogue), rows_sums.SUM_THREADS)
    return Planned(
        source=Source(builder, variant, variant.threads, config.blocks),
        integers=integers,
        grid=(block.blocks, chunks, grid_z),
        shared_bytes=max(slabs_at + config.stages * slab_bytes, sets * variant.set_sums * 4),
        most_blocks=warps // (variant.threads // 32),
        totals=Totals(
            of_sums, rows_sums.sums(form, integers, block.blocks, chunks, filters, block.all_sets * SET_WORDS)
        ),
    )


def power_of_two(count: int, least: int) -> int:
    """The first from `count` on, and from `least`."""
    return max(least, 1 << (count - 1).bit_length())


def blocks_of(seen: Image, tiled: Tile, config: Config, others: int, device: Gpu) -> int:
    """Blocks that share the tiles, where `others` times as many run at once."""
    return min(seen.n * tiled.tiles_h * tiled.tiles_w, max(1, config.blocks * device.sms // others))


def warps_at_once(registers: int) -> int:
    """Warps of a multiprocessor, for which there are so many registers a thread."""
    return 4 * (_REGISTERS // (32 * registers))


def _run_of(problem: ConvProblem, seen: Image, math: str, filters: int) -> int:
    """Outputs that a thread stores at once: its neighbours in memory, as far as they are aligned."""
    itemsize = ITEMSIZE[problem.dtype]
    most = 4 if math == "fma" else min(16 // itemsize, filters // 4)
    whole = seen.outputs_last and seen.group_out % most == 0 and problem.align % (most * itemsize) == 0
    return most if whole else 1
