"""Which kernels of windows a problem takes, on which grids, in how much shared memory: for stem and grouped alike."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_windows, conv_windows_filter
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate, gather_pointers
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s, fma_flops_per_s, tensor_flops_per_s
from nbdnn.kernels.cuda.window_plan import (
    BLOCK_SHARED_BYTES,
    QUAD,
    Image,
    Tile,
    image,
    shape,
    tile,
    together,
)
from nbdnn.kernels.cuda.window_records import Block, Forward, Gradient, Sums, Windows, sums, table_bytes, windows
from nbdnn.kernels.cuda.window_sums import SUM_ELEMENTS, SUM_THREADS, sum_kernel
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_WARPS = conv_windows.THREADS // 32
_MMA_FILTERS, _FMA_FILTERS = 32, 16  # of a unit, at most
_LAUNCH_US = 3.0
# Priors for the guess: parts of the units' rates, and of a copy's.
_FMA_SHARE, _TENSOR_SHARE, _COPY_SHARE = 0.6, 0.3, 0.6


class Config(NamedTuple):
    """pixels: outputs of a tile, a multiple of 128. blocks: of a multiprocessor at once. units: of a block, at most."""

    pixels: int
    blocks: int
    units: int

    def __str__(self) -> str:
        return f"{self.pixels}x{self.units}/{self.blocks}"


_FORWARD_CONFIGS = Config(256, 2, 4), Config(256, 3, 4), Config(256, 2, 8), Config(128, 2, 4), Config(128, 3, 4)
_GRADIENT_CONFIGS = Config(128, 2, 4), Config(128, 3, 4), Config(256, 2, 4), Config(128, 2, 8)
_SMALLEST = Config(128, 2, 2), Config(128, 2, 1), Config(128, 1, 1)  # what has no room for the last is not supported


class Forwarded(NamedTuple):
    variant: Forward
    integers: Windows
    grid: tuple[int, int, int]
    shared_bytes: int


def forward(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Forwarded:
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
    integers = windows(seen, form, tiled, chunks, block)
    return Forwarded(variant, integers, (block.blocks, grid_y, 1), slabs_at + slabs * tiled.slab_bytes)


class Gradients(NamedTuple):
    variant: Gradient
    integers: Windows
    sums: Sums
    grid: tuple[int, int, int]
    shared_bytes: int

    @property
    def workspace_bytes(self) -> int:
        return self.sums.blocks * self.sums.elements * 4


def gradients(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Gradients:
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
    return Gradients(variant, windows(seen, form, tiled, chunks, block), totals, grid, shared_bytes)


def unit_filters(group_out: int, most: int) -> int:
    """Filters of a unit: a power of two from 8 on."""
    return min(most, max(8, _power_of_two(group_out)))


def min_blocks(variant: Forward | Gradient) -> int:
    """Blocks of a multiprocessor, for which there are registers."""
    return 3 if variant.shape.math != "fma" and variant.filters == 8 else 2


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


def _plan(problem: ConvProblem) -> Callable[[ConvProblem, str, Config, Gpu], Forwarded | Gradients]:
    return gradients if problem.op == "conv_bwd_filter" else forward


def fits(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Support:
    """Whether a config's blocks find room, and int32 holds every index."""
    planned = _plan(problem)(problem, math, config, device)
    needed = planned.shared_bytes
    if needed > BLOCK_SHARED_BYTES:
        return Support(False, f"a tile takes {needed} bytes of shared memory, a block has {BLOCK_SHARED_BYTES}")
    if (room := blocks_at_once(needed, device)) < config.blocks:
        return Support(False, f"{config.blocks} blocks of {needed} bytes, a multiprocessor has room for {room}")
    if max(planned.grid[1:]) > 65535:
        return Support(False, f"a grid of {planned.grid} blocks, of which 65535 are possible on two axes")
    if (bits := index_bits(problem, planned.integers)) > 32:
        return Support(False, f"indices take {bits} bits, this kernel has 32")
    return YES


class Windowed(LaunchedCandidate[Config]):
    """A convolution by windows. math: 'fma', or 'tf32'; 16-bit data take matrix units in any case."""

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
        if problem.dtype == "f64" or (self.math == "tf32" and problem.dtype != "f32"):
            return f"the data are {problem.dtype}"
        return ""

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := self.refused(problem):
            return Support(False, reason)
        return fits(problem, self.units_math(problem), _SMALLEST[-1], device)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        """Those that fit, and are not another by a different name; else the first of the smallest."""
        math = self.units_math(problem)
        plan = _plan(problem)
        different: dict[Forwarded | Gradients, Config] = {}
        for config in _GRADIENT_CONFIGS if self.op == "conv_bwd_filter" else _FORWARD_CONFIGS:
            planned = plan(problem, math, config, device)
            if config.blocks <= min_blocks(planned.variant) and fits(problem, math, config, device).ok:
                different.setdefault(planned, config)
        if different:
            return tuple(different.values())
        return (next(config for config in _SMALLEST if fits(problem, math, config, device).ok),)

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
        padded = problem.flops * QUAD / min(QUAD, problem.c // problem.groups)
        moved_us = problem.min_bytes / (_COPY_SHARE * copy_bytes_per_s(device)) * 1e6
        launches = 2 if self.op == "conv_bwd_filter" else 1
        return launches * _LAUNCH_US + max(padded / flops_per_s * 1e6, moved_us)

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        math = self.units_math(problem)
        if self.op == "conv_bwd_filter":
            return _gradient_launches(problem, gradients(problem, math, config, device))
        return [_forward_launch(problem, forward(problem, math, config, device))]


def _forward_launch(problem: ConvProblem, planned: Forwarded) -> Launch:
    builder = conv_windows.fma_kernel if planned.variant.shape.math == "fma" else conv_windows.mma_kernel
    return Launch(
        source=Source(builder, planned.variant, conv_windows.THREADS, min_blocks(planned.variant)),
        grid=planned.grid,
        pointers=gather_pointers(problem),
        scalars="f32",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )


def _gradient_launches(problem: ConvProblem, planned: Gradients) -> list[Launch]:
    variant = planned.variant
    builder = conv_windows_filter.fma_kernel if variant.shape.math == "fma" else conv_windows_filter.mma_kernel
    parts = Launch(
        source=Source(builder, variant, conv_windows_filter.THREADS, min_blocks(variant)),
        grid=planned.grid,
        pointers=(0, 1, WORKSPACE),
        scalars="",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )
    total = Launch(
        source=Source(sum_kernel, (problem.dtype, problem.epilogue), SUM_THREADS),
        grid=(planned.sums.elements // SUM_ELEMENTS, 1, 1),
        pointers=(WORKSPACE, 2),
        scalars="f32",
        integers=planned.sums,
    )
    return [parts, total]
