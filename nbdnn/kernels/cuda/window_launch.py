"""Which kernels of windows a problem takes, on which grids, in how much shared memory: for stem and grouped alike."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_windows, conv_windows_filter
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.window_candidate import ByWindows, Planned, Shares, Totals
from nbdnn.kernels.cuda.window_plan import (
    BLOCK_SHARED_BYTES,
    QUAD,
    Image,
    Shape,
    Tile,
    image,
    shape,
    tile,
    together,
)
from nbdnn.kernels.cuda.window_records import Block, Forward, Gradient, sums, table_bytes, windows
from nbdnn.kernels.cuda.window_sums import SUM_THREADS, sum_kernel
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_WARPS = conv_windows.THREADS // 32
_MMA_FILTERS, _FMA_FILTERS = 32, 16  # of a unit, at most


class Config(NamedTuple):
    """pixels: outputs of a tile, a multiple of 128. blocks: of a multiprocessor at once. units: of a block, at most."""

    pixels: int
    blocks: int
    units: int

    def __str__(self) -> str:
        return f"{self.pixels}x{self.units}/{self.blocks}"


_FORWARD_CONFIGS = Config(256, 2, 4), Config(256, 3, 4), Config(256, 2, 8), Config(128, 2, 4), Config(128, 3, 4)
_GRADIENT_CONFIGS = Config(128, 2, 4), Config(128, 3, 4), Config(256, 2, 4), Config(128, 2, 8)
_SMALLEST = Config(128, 2, 2), Config(128, 2, 1), Config(128, 1, 1)


def forward(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Planned:
    """The kernel of a conv_fwd or bwd_data."""
    seen = image(problem)
    # So many that beside the sums of a thread there are registers for its loads.
    fma_filters = _FMA_FILTERS if seen.group_in < QUAD else _FMA_FILTERS // 2
    filters = unit_filters(seen.group_out, fma_filters if math == "fma" else _MMA_FILTERS)
    chunks = ceil(seen.group_out / filters)
    units, slabs = units_of_block(seen, chunks, config.units)
    form = shape(seen, problem, math, slabs)
    # 4 x 4 products of m16n8 are 64 registers of sums; TF32 has twice the factors.
    m_tiles = {"fma": 1, "tf32": 2, "mma": 4}[math]
    variant = Forward(form, filters, m_tiles, run_of(problem, seen, math, filters), problem.epilogue)
    tiled = tile(seen, form, config.pixels)
    filters_at = _aligned(table_bytes(seen.quads))
    slabs_at = _aligned(filters_at + units * variant.filter_bytes(seen.quads))
    grid_y = ceil(seen.groups * chunks / units)
    block = Block(
        blocks=tile_blocks(seen, tiled, config, grid_y, device),
        units=units,
        slabs=slabs,
        parts=config.pixels // (32 * conv_windows.FMA_PIXELS if math == "fma" else 16 * m_tiles),
        quad_blocks=0,
        filters_at=filters_at,
        slabs_at=slabs_at,
        dy_bytes=0,
    )
    builder = conv_windows.fma_kernel if math == "fma" else conv_windows.mma_kernel
    most_blocks = _most_blocks(form, filters)
    return Planned(
        source=Source(builder, variant, conv_windows.THREADS, most_blocks),
        integers=windows(seen, form, tiled, chunks, block),
        grid=(block.blocks, grid_y, 1),
        shared_bytes=slabs_at + slabs * tiled.slab_bytes,
        most_blocks=most_blocks,
    )


def gradients(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Planned:
    """The kernels of a bwd_filter."""
    seen = image(problem)
    dy_together = together(seen.outputs_last, seen.group_out, problem.dtype, problem.align)
    # As of the forward; the sums are of all channels of a quad here.
    most = _FMA_FILTERS // 2 if math == "fma" else _MMA_FILTERS if seen.group_in < QUAD else _MMA_FILTERS // 2
    filters = unit_filters(seen.group_out, most)
    chunks = ceil(seen.group_out / filters)
    rows = 16
    if math == "fma":
        rows = min(64, max(16, _power_of_two(seen.quads)))
    quad_blocks = min(ceil(seen.quads / rows), _WARPS)
    units, slabs = units_of_block(seen, chunks, min(config.units, _WARPS // quad_blocks))
    form = shape(seen, problem, math, slabs)
    variant = Gradient(form, filters, rows, dy_together, seen.outputs_last)
    tiled = tile(seen, form, config.pixels)
    gradients_at = _aligned(slabs * tiled.slab_bytes)
    grid_y, grid_z = ceil(seen.groups * chunks / units), ceil(seen.quads / (rows * quad_blocks))
    block = Block(
        blocks=tile_blocks(seen, tiled, config, grid_y * grid_z, device),
        units=units,
        slabs=slabs,
        parts=_WARPS // (units * quad_blocks),
        quad_blocks=quad_blocks,
        filters_at=gradients_at,
        slabs_at=0,
        dy_bytes=variant.dy_bytes(units),
    )
    grid = block.blocks, grid_y, grid_z
    totals = sums(seen, variant, chunks, block, grid)
    shared_bytes = max(gradients_at + config.pixels * block.dy_bytes, totals.sums * 4)
    builder = conv_windows_filter.fma_kernel if math == "fma" else conv_windows_filter.mma_kernel
    most_blocks = _most_blocks(form, filters)
    return Planned(
        source=Source(builder, variant, conv_windows_filter.THREADS, most_blocks),
        integers=windows(seen, form, tiled, chunks, block),
        grid=grid,
        shared_bytes=shared_bytes,
        most_blocks=most_blocks,
        totals=Totals(Source(sum_kernel, (problem.dtype, problem.epilogue), SUM_THREADS), totals),
    )


def unit_filters(group_out: int, most: int) -> int:
    """Filters of a unit: a power of two from 8 on."""
    return min(most, max(8, _power_of_two(group_out)))


def _most_blocks(form: Shape, filters: int) -> int:
    """Blocks of a multiprocessor, for which there are registers."""
    return 3 if form.math != "fma" and filters == 8 else 2


def _power_of_two(count: int) -> int:
    """The first from `count` on."""
    return 1 << (count - 1).bit_length()


def _aligned(bytes_: int) -> int:
    return -(-bytes_ // 128) * 128


def units_of_block(seen: Image, chunks: int, most: int) -> tuple[int, int]:
    """(units, slabs) of a block: whole groups, or of one group a number of units that divides its own."""
    if chunks <= most:
        groups = max(count for count in range(1, most // chunks + 1) if count <= seen.groups)
        return groups * chunks, groups
    return max(count for count in range(1, most + 1) if chunks % count == 0), 1


def tile_blocks(seen: Image, tile: Tile, config: Config, others: int, device: Gpu) -> int:
    """Blocks that share the tiles, where `others` times as many run at once."""
    tiles = seen.n * tile.tiles_h * tile.tiles_w
    return min(tiles, max(1, config.blocks * device.sms // others))


def run_of(problem: ConvProblem, seen: Image, math: str, filters: int) -> int:
    """Outputs that a thread stores at once: its neighbours in memory, as far as they are aligned."""
    itemsize = ITEMSIZE[problem.dtype]
    most = 4 if math == "fma" else min(16 // itemsize, filters // 4)
    whole = seen.outputs_last and seen.group_out % most == 0 and problem.align % (most * itemsize) == 0
    return most if whole else 1


class Windowed(ByWindows[Config]):
    """Windows of quads of channels, in tiles."""

    shares, smallest, most_shared_bytes = Shares(0.6, 0.3, 0.6), _SMALLEST, BLOCK_SHARED_BYTES

    def plan(self, problem: ConvProblem, config: Config, device: Gpu) -> Planned:
        plan = gradients if self.op == "conv_bwd_filter" else forward
        return plan(problem, self.units_math(problem), config, device)

    def choices(self, problem: ConvProblem) -> tuple[Config, ...]:
        return _GRADIENT_CONFIGS if self.op == "conv_bwd_filter" else _FORWARD_CONFIGS

    def flops(self, problem: ConvProblem) -> float:
        return problem.flops * QUAD / min(QUAD, image(problem).group_in)
