"""Which kernels of windows a problem takes, on which grids, with how much shared memory: what stem and grouped share."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import conv_windows, conv_windows_filter
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, fma_flops_per_s, tensor_flops_per_s
from nbdnn.kernels.cuda.window_plan import (
    QUAD,
    Forward,
    Gradient,
    Image,
    Tile,
    Windows,
    image,
    shape,
    shared_limit_bytes,
    table_bytes,
    tile,
    together,
    windows,
)
from nbdnn.problem import ITEMSIZE, ConvProblem

_RESERVED_BYTES = 1 << 10  # of shared memory, that the driver takes for each block
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


class Forwarded(NamedTuple):
    variant: Forward
    integers: Windows
    grid: tuple[int, int, int]
    shared_bytes: int


def forward(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Forwarded:
    """The kernel of a conv_fwd or bwd_data."""
    seen = image(problem)
    filters = unit_filters(seen.group_out, _FMA_FILTERS if math == "fma" else _MMA_FILTERS)
    chunks = ceil(seen.group_out / filters)
    units, slabs = units_of_block(seen, chunks, config.units)
    form = shape(seen, problem, math, slabs)
    # 4 x 4 products of m16n8 are 64 registers of sums; TF32 has twice the factors.
    m_tiles = 1 if math == "fma" else 2 if math == "tf32" else 4
    run = run_of(problem, seen, math, filters)
    variant = Forward(form, config.pixels, units, filters, m_tiles, run, problem.epilogue)
    tiled = tile(seen, form, config.pixels)
    filters_at = _aligned(table_bytes(seen.quads))
    slabs_at = _aligned(filters_at + units * variant.filter_bytes(seen.quads))
    grid_y = ceil(seen.groups * chunks / units)
    blocks = tile_blocks(seen, tiled, config, grid_y, device)
    integers = windows(
        seen,
        form,
        tiled,
        blocks=blocks,
        units=seen.groups * chunks,
        chunks=chunks,
        filters=filters_at,
        slabs=slabs_at,
    )
    return Forwarded(variant, integers, (blocks, grid_y, 1), slabs_at + slabs * tiled.slab_bytes)


class Gradients(NamedTuple):
    variant: Gradient
    integers: Windows
    grid: tuple[int, int, int]
    shared_bytes: int
    workspace_bytes: int


def gradients(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Gradients:
    """The kernels of a bwd_filter."""
    seen = image(problem)
    # 2 quads of 4 channels times 16 filters are too many sums for a thread.
    fma_filters = _FMA_FILTERS if seen.group_in < QUAD else _FMA_FILTERS // 2
    filters = unit_filters(seen.group_out, fma_filters if math == "fma" else _MMA_FILTERS)
    chunks = ceil(seen.group_out / filters)
    rows = 16
    if math == "fma":
        rows = 2 * min(32, max(2, _power_of_two(ceil(seen.quads / 2))))
    quad_blocks = min(ceil(seen.quads / rows), _WARPS)
    units, slabs = units_of_block(seen, chunks, min(config.units, _WARPS // quad_blocks))
    form = shape(seen, problem, math, slabs)
    variant = Gradient(
        form,
        config.pixels,
        units,
        filters,
        rows,
        quad_blocks,
        _WARPS // (units * quad_blocks),
        together(seen.outputs_last, seen.group_out, problem.dtype, problem.align),
        seen.outputs_last,
    )
    tiled = tile(seen, form, config.pixels)
    gradients_at = _aligned(slabs * tiled.slab_bytes)
    grid_y, grid_z = ceil(seen.groups * chunks / units), ceil(seen.quads / (rows * quad_blocks))
    blocks = tile_blocks(seen, tiled, config, grid_y * grid_z, device)
    integers = windows(
        seen,
        form,
        tiled,
        blocks=blocks,
        units=seen.groups * chunks,
        chunks=chunks,
        filters=gradients_at,
        slabs=0,
    )
    shared_bytes = max(gradients_at + config.pixels * variant.pixel_bytes, variant.sums * 4)
    return Gradients(
        variant, integers, (blocks, grid_y, grid_z), shared_bytes, blocks * grid_y * grid_z * variant.sums * 4
    )


def unit_filters(group_out: int, most: int) -> int:
    """Filters of a unit: a power of two from 8 on."""
    return min(most, max(8, _power_of_two(group_out)))


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
    for count in (8, 4, 2):
        fits = count <= most and seen.outputs_last and seen.group_out % count == 0
        if fits and count * itemsize <= 16 and problem.align % (count * itemsize) == 0:
            return count
    return 1


def fits(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Support:
    """Whether a config's blocks find room, and int32 holds every index."""
    plan = gradients if problem.op == "conv_bwd_filter" else forward
    planned = plan(problem, math, config, device)
    limit = shared_limit_bytes(device)
    if planned.shared_bytes > limit:
        return Support(False, f"a tile takes {planned.shared_bytes} bytes of shared memory, a block has {limit}")
    if config.blocks * (planned.shared_bytes + _RESERVED_BYTES) > limit + _RESERVED_BYTES and config.blocks > 1:
        return Support(False, f"{config.blocks} blocks of {planned.shared_bytes} bytes are more than {limit}")
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

    def candidates(self, problem: ConvProblem) -> tuple[Config, ...]:
        """Configs, the default first."""
        if self.op == "conv_bwd_filter":
            return Config(128, 2, 4), Config(256, 2, 4), Config(128, 1, 2)
        return Config(256, 2, 4), Config(256, 3, 4), Config(128, 1, 2)

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
        every = [fits(problem, self.units_math(problem), c, device) for c in self.candidates(problem)]
        return next((support for support in every if support.ok), every[-1])

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        math = self.units_math(problem)
        return tuple(config for config in self.candidates(problem) if fits(problem, math, config, device).ok)

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
            return _gradient_launches(problem, gradients(problem, math, config, device), config)
        return [_forward_launch(problem, forward(problem, math, config, device), config)]


def _forward_launch(problem: ConvProblem, planned: Forwarded, config: Config) -> Launch:
    names = [operand.name for operand in problem.operands]
    bias, residual = (names.index(name) if name in names else NULL for name in ("bias", "residual"))
    builder = conv_windows.fma_kernel if planned.variant.shape.math == "fma" else conv_windows.mma_kernel
    image_at, w_at = (1, 0) if problem.op == "conv_bwd_data" else (0, 1)
    return Launch(
        source=Source(builder, planned.variant, conv_windows.THREADS, config.blocks),
        grid=planned.grid,
        pointers=(image_at, w_at, 2, bias, residual),
        scalars="f32",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )


def _gradient_launches(problem: ConvProblem, planned: Gradients, config: Config) -> list[Launch]:
    variant = planned.variant
    builder = conv_windows_filter.fma_kernel if variant.shape.math == "fma" else conv_windows_filter.mma_kernel
    elements = planned.grid[1] * planned.grid[2] * variant.sums
    sums = Launch(
        source=Source(builder, variant, conv_windows_filter.THREADS, config.blocks),
        grid=planned.grid,
        pointers=(0, 1, WORKSPACE),
        scalars="",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )
    total = Launch(
        source=Source(
            conv_windows_filter.sum_kernel, (*variant, problem.epilogue), conv_windows_filter.THREADS
        ),
        grid=(elements // conv_windows_filter.SUM_ELEMENTS, 1, 1),
        pointers=(WORKSPACE, 2),
        scalars="f32",
        integers=planned.integers,
    )
    return [sums, total]
