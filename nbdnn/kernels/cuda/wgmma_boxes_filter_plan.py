"""Which tiles the filter gradient of 1x1 layers tries whose operands come by TMA boxes to wgmma, and their costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.add_parts import part_elems
from nbdnn.kernels.cuda.boxes_ring import BARRIER_BYTES
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pointwise_plan import deepest, worth_measuring
from nbdnn.kernels.cuda.tensor_map import TensorMap
from nbdnn.kernels.cuda.wgmma_boxes_plan import (
    GROUP,
    LEAST_STAGES,
    READ_REGISTERS,
    ROWS,
    product_clocks,
    refused_operands,
    registers,
)
from nbdnn.kernels.cuda.wgmma_maps import line_elems
from nbdnn.kernels.cuda.wgmma_pipeline import BOX_BYTES, LINE_BYTES, WARP
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_GROUPS, _COLUMNS, _BLOCKS = (1, 2, 3, 4), (32, 64, 96, 128, 192, 256), (1, 2)
_OTHER_REGISTERS = 32  # of a thread beside its sums
# Fitted to 730 tiles of 45 problems on an H200: the guess takes 1.03 of the fastest. As in `wgmma_boxes_plan.py`; and
# what the launch takes that adds the parts, and of the time of memory for these.
_LAUNCH_US, _SHARES, _POWER, _ROW_CLOCKS, _LATENCY_CLOCKS = 2.0, (0.58, 0.52), 2.6, 0.35, 2230
_PARTS_US, _PARTS_MOVED, _FEW = 1.5, 0.78, 0.43  # part of the multiprocessors that memory keeps busy
_KNOWN = 256


class Tile(NamedTuple):
    """What a block computes of dw: 64 filters a warpgroup by so many channels. parts: blocks that share the pixels of a
    tile, whose sums are added by another launch; blocks: of a multiprocessor."""

    groups: int
    columns: int
    parts: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        parts = f"/{self.parts}" if self.parts > 1 else ""
        return f"{self.rows}x{self.columns}{parts}s{self.stages}b{self.blocks}"

    @property
    def rows(self) -> int:
        return ROWS * self.groups

    @property
    def workers(self) -> int:
        return GROUP * self.groups

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.columns // 2


class Variant(NamedTuple):
    """What the kernel is compiled for; in_parts: whether the sums of several blocks are left, in float32."""

    tile: Tile
    dtype: str
    planar: bool
    epilogue: tuple[str, ...]
    in_parts: bool

    @property
    def boxes(self) -> tuple[int, int]:
        """Copies for a chunk of pixels: of dy, of x."""
        return (1, 1) if self.planar else (self.tile.groups, ceil(self.tile.columns / ROWS))

    @property
    def copied_rows(self) -> int:
        """Of the boxes of a chunk."""
        return self.tile.rows + self.tile.columns if self.planar else ROWS * sum(self.boxes)

    @property
    def columns_at(self) -> int:
        """From a stage's beginning to what it has of x."""
        return self.tile.rows * LINE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.columns_at + (self.tile.columns * LINE_BYTES if self.planar else self.boxes[1] * BOX_BYTES)

    @property
    def shared_bytes(self) -> int:
        return self.tile.stages * (self.stage_bytes + 2 * BARRIER_BYTES)


class Integers(NamedTuple):
    """Those of a kernel. A block has one of `tiles` tiles, of which a row of dw has tiles_c, and every step-th of
    `chunks` chunks of pixels; an image of planes has of_image of them, with what `ptx.split` takes. filters,
    channels: of dw; part_elems: from a part of it to the next."""

    tiles: int
    tiles_c: int
    chunks: int
    step: int
    of_image: int
    of_image_by: int
    of_image_shift: int
    filters: int
    channels: int
    part_elems: int


def refusal(problem: ConvProblem, device: Gpu) -> str:
    """Why the kernel is not correct here, or ''."""
    if problem.channels_last and problem.dtype == "f32":
        return "channels-last float32, whose pixels would have to be neighbours for TF32"
    return refused_operands(problem, device)


def variant(problem: ConvProblem, tile: Tile) -> Variant:
    planar, in_parts = not problem.channels_last, tile.parts > 1
    return Variant(tile._replace(parts=1), problem.dtype, planar, () if in_parts else problem.epilogue, in_parts)


def tiles(problem: ConvProblem, tile: Tile) -> tuple[int, int]:
    """Of filters, of channels."""
    return ceil(problem.k / tile.rows), ceil(problem.c / tile.columns)


def chunks(problem: ConvProblem) -> tuple[int, int]:
    """Of pixels, in all sets of them, and in each: an image where these are planar, else all."""
    pixels = prod(problem.spatial)
    sets, of_set = (1, problem.n * pixels) if problem.channels_last else (problem.n, pixels)
    each = ceil(of_set / line_elems(problem.dtype))
    return sets * each, each


@lru_cache(_KNOWN)
def configs(problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
    """The best guess first."""
    return worth_measuring(every_tile(problem, device), lambda tile: estimate_us(problem, tile, device))


def every_tile(problem: ConvProblem, device: Gpu) -> Iterator[Tile]:
    """All that find room in registers and shared memory."""
    beside = _OTHER_REGISTERS + READ_REGISTERS * ("beta" in problem.epilogue)
    for groups, columns, blocks in product(_GROUPS, _COLUMNS, _BLOCKS):
        shape = Tile(groups, columns, 1, 0, blocks)
        if shape.sums + beside > registers(shape.workers + WARP, blocks):
            continue
        most = min(chunks(problem)[0], device.sms * blocks // prod(tiles(problem, shape)))
        for parts in sorted({1, max(1, most)}):
            tile = shape._replace(parts=parts)
            yield from deepest(tile, lambda deep: variant(problem, deep).shared_bytes, device, LEAST_STAGES)


def estimate_us(problem: ConvProblem, tile: Tile, device: Gpu) -> float:
    """Microseconds."""
    v, per_us, bytes_per_us = variant(problem, tile), device.clock_hz / 1e6, copy_bytes_per_s(device) / 1e6
    blocks = prod(tiles(problem, tile)) * tile.parts
    at_once = tile.blocks if blocks > device.sms else 1  # of a multiprocessor
    in_turn = ceil(blocks / (device.sms * at_once)) * ceil(chunks(problem)[0] / tile.parts)
    of_sm = in_turn * at_once / per_us
    computed_us = of_sm * product_clocks(tile.groups, tile.columns) / _SHARES[at_once > 1]
    copied_us = of_sm * _ROW_CLOCKS * v.copied_rows
    moved_us = problem.min_bytes / bytes_per_us * max(1.0, _FEW * device.sms / blocks)
    together = sum(us**_POWER for us in (copied_us, moved_us, computed_us)) ** (1 / _POWER)
    us = _LAUNCH_US + max(together, in_turn * _LATENCY_CLOCKS / (tile.stages * at_once) / per_us)
    if tile.parts > 1:
        us += _PARTS_US + _PARTS_MOVED * 4 * tile.parts * part_elems(problem) / bytes_per_us
    return us


def integers(problem: ConvProblem, tile: Tile) -> Integers:
    tiles_k, tiles_c = tiles(problem, tile)
    every, of_image = chunks(problem)
    walk = every, tile.parts, of_image, *reciprocal(of_image)
    return Integers(tiles_k * tiles_c, tiles_c, *walk, problem.k, problem.c, part_elems(problem))


def maps(problem: ConvProblem, tile: Tile) -> tuple[TensorMap, TensorMap]:
    """Of dy and of x."""
    return _map(problem, 1, problem.k, tile.rows), _map(problem, 0, problem.c, tile.columns)


def _map(problem: ConvProblem, place: int, channels: int, box: int) -> TensorMap:
    pixels, each, line = prod(problem.spatial), ITEMSIZE[problem.dtype], line_elems(problem.dtype)
    if problem.channels_last:
        extents, strides = (channels, problem.n * pixels), (each * channels,)
        return TensorMap(place, problem.dtype, extents, strides, (ROWS, line))
    planes, strides_bytes = (pixels, channels, problem.n), (each * pixels, each * pixels * channels)
    return TensorMap(place, problem.dtype, planes, strides_bytes, (line, box, 1), rounded=problem.dtype == "f32")
