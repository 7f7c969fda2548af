"""Which tiles the filter gradient of 1x1 layers in float32 tries whose operands come by TMA boxes, and their costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import pointwise_plan, pointwise_tile
from nbdnn.kernels.cuda.add_parts import part_elems
from nbdnn.kernels.cuda.boxes_ring import BARRIER_BYTES
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pointwise_plan import deepest, worth_measuring
from nbdnn.kernels.cuda.pointwise_tile import (
    LANES,
    LINE,
    MOST_BOX,
    MOST_REGISTERS,
    OF_LANE,
    QUAD,
    SWIZZLE,
    WARP,
    WARPS,
    Costs,
    Products,
    good_shapes,
    image_map,
    spent_us,
)
from nbdnn.kernels.cuda.tensor_map import TensorMap
from nbdnn.problem_conv import ConvProblem

_SHARES, _PIXELS = (1, 2, 4, 8), (32, 64, 128)
# Fitted to 588 tiles of 42 problems on an H200: the guess takes 1.03 of the fastest.
_COSTS, _ADDED_SHARE = Costs(3.4, 0.6, 108.0, (0.725, 0.778), 1.1, 3.3, 3.1, 1.3), 0.22
_KNOWN = 256


class Tile(NamedTuple):
    """What a block takes of dw, and how. wide: 'dy' or 'x', of which a tile has lanes * of_wide channels; of the other
    one it has 32 / lanes * of_narrow for each of its shares of warps. The warps of a share divide the pixels of a
    stage; blocks: of a multiprocessor."""

    wide: str
    lanes: int
    of_wide: int
    of_narrow: int
    shares: int
    pixels: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        lanes, ring = f"{self.lanes}x{WARP // self.lanes}", f"p{self.pixels}s{self.stages}b{self.blocks}"
        return f"{self.wide}:{lanes}:{self.of_wide}x{self.of_narrow}x{self.shares}:{ring}"

    @property
    def of_share(self) -> int:
        """Channels of the narrow tensor."""
        return WARP // self.lanes * self.of_narrow

    @property
    def channels(self) -> tuple[int, int]:
        """Of the wide tensor and of the narrow one."""
        return self.lanes * self.of_wide, self.of_share * self.shares

    @property
    def slices(self) -> int:
        """Warps of a share."""
        return WARPS // self.shares


class Variant(NamedTuple):
    """What the kernel is compiled for."""

    tile: Tile
    planar: bool

    @property
    def products(self) -> Products:
        """Rows of channels, or lines of pixels."""
        wide, narrow = (0, 0) if self.planar else self.tile.channels
        return pointwise_tile.products(self.tile.lanes, self.tile.of_wide, self.tile.of_narrow, (4 * wide, 4 * narrow))

    @property
    def box_bytes(self) -> tuple[int, int]:
        """Of a stage: of the wide tensor, and of the narrow one, whose lines of planes begin where a swizzle may."""
        wide, narrow = self.tile.channels
        if self.planar:
            narrow = -(-narrow // SWIZZLE) * SWIZZLE
        return 4 * self.tile.pixels * wide, 4 * self.tile.pixels * narrow

    @property
    def copied_bytes(self) -> int:
        return 4 * self.tile.pixels * sum(self.tile.channels)

    @property
    def sums_bytes(self) -> int:
        """Of a warp."""
        return 4 * WARP * self.products.sums

    @property
    def barriers_at(self) -> int:
        return max(self.tile.stages * sum(self.box_bytes), WARPS * self.sums_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 2 * self.tile.stages * BARRIER_BYTES


class Integers(NamedTuple):
    """Those of a kernel. A block has one of `tiles` tiles, of which the wide tensor has tiles_wide, and every step-th
    of `chunks` chunks of pixels; an image of planes has of_image of them, with what `ptx.split` takes. filters,
    channels: of dw; part_elems: from a part of it to the next."""

    tiles: int
    tiles_wide: int
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
    if reason := pointwise_plan.refusal(problem, device, ("f32",)):
        return reason
    if problem.channels_last and (problem.c % QUAD or problem.k % QUAD):
        return f"{problem.c} input and {problem.k} output channels are not multiples of {QUAD}"
    return ""


def variant(problem: ConvProblem, tile: Tile) -> Variant:
    return Variant(tile, not problem.channels_last)


def tiles(problem: ConvProblem, tile: Tile) -> tuple[int, int]:
    """Of the wide tensor's channels, and of the narrow one's."""
    (wide, narrow), (of_wide, of_narrow) = _channels(problem, tile.wide), tile.channels
    return ceil(wide / of_wide), ceil(narrow / of_narrow)


def chunks(problem: ConvProblem, tile: Tile) -> tuple[int, int]:
    """Of pixels, in all sets of them, and in each: an image where these are planar, else all."""
    pixels = prod(problem.spatial)
    sets, of_set = (1, problem.n * pixels) if problem.channels_last else (problem.n, pixels)
    return sets * ceil(of_set / tile.pixels), ceil(of_set / tile.pixels)


def step(problem: ConvProblem, tile: Tile, device: Gpu) -> int:
    """Blocks that share the pixels of a tile."""
    return min(chunks(problem, tile)[0], max(1, device.sms * tile.blocks // prod(tiles(problem, tile))))


@lru_cache(_KNOWN)
def configs(problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
    """The best guess first."""
    return worth_measuring(_fitting(problem, device), lambda tile: estimate_us(problem, tile, device))


def _fitting(problem: ConvProblem, device: Gpu) -> Iterator[Tile]:
    """All that find room in registers and shared memory, of good shapes."""
    shapes = good_shapes(
        _shapes(problem),
        lambda shape: prod(tiles(problem, shape)) * prod(shape.channels),
        lambda shape: estimate_us(problem, shape, device),
    )
    for shape, pixels, blocks in product(shapes, _PIXELS, MOST_REGISTERS):
        if pixels % (QUAD * shape.slices) or variant(problem, shape).products.registers > MOST_REGISTERS[blocks]:
            continue
        tile = shape._replace(pixels=pixels, blocks=blocks)
        yield from deepest(tile, lambda deep: variant(problem, deep).shared_bytes, device)


def _shapes(problem: ConvProblem) -> Iterator[Tile]:
    """All with registers enough whose boxes TMA takes, share by share from where a swizzle begins."""
    for wide, lanes, of_wide, of_narrow, shares in product(("dy", "x"), LANES, OF_LANE, OF_LANE, _SHARES):
        shape = Tile(wide, lanes, of_wide, of_narrow, shares, pixels=64, stages=0, blocks=1)
        if shape.of_share % (SWIZZLE if shares > 1 else QUAD):
            continue
        if max(shape.channels) > MOST_BOX:
            continue
        if shape.channels[0] < shape.channels[1] // 2:  # the other tensor is the wide one of another shape
            continue
        if variant(problem, shape).products.registers <= MOST_REGISTERS[1]:
            yield shape


def estimate_us(problem: ConvProblem, tile: Tile, device: Gpu) -> float:
    """Microseconds, also of the addition of parts."""
    every, of_tile = prod(tiles(problem, tile)), step(problem, tile, device)
    stages = ceil(chunks(problem, tile)[0] / of_tile) * ceil(every * of_tile / device.sms)  # of a multiprocessor
    v, quads = variant(problem, tile), stages * tile.pixels / QUAD * tile.shares
    at_once = tile.blocks if every * of_tile > device.sms else 1
    us = spent_us(_COSTS, v.products, at_once, quads, stages, problem.min_bytes, device)
    return us + 8 * of_tile * part_elems(problem) / (copy_bytes_per_s(device) * _ADDED_SHARE) * 1e6


def integers(problem: ConvProblem, tile: Tile, device: Gpu) -> Integers:
    (tiles_wide, tiles_narrow), (every, of_image) = tiles(problem, tile), chunks(problem, tile)
    walk = every, step(problem, tile, device), of_image, *reciprocal(of_image)
    return Integers(tiles_wide * tiles_narrow, tiles_wide, *walk, problem.k, problem.c, part_elems(problem))


def maps(problem: ConvProblem, tile: Tile) -> tuple[TensorMap, TensorMap]:
    """Of the wide tensor and of the narrow one."""
    places = {"x": 0, "dy": 1}
    (wide, narrow), (of_wide, of_narrow) = _channels(problem, tile.wide), tile.channels
    other = "x" if tile.wide == "dy" else "dy"
    box_of = (lambda elems: (elems, tile.pixels)) if problem.channels_last else (lambda elems: (LINE, elems))
    return (
        image_map(problem, places[tile.wide], wide, box_of(of_wide), problem.channels_last),
        image_map(problem, places[other], narrow, box_of(of_narrow), problem.channels_last),
    )


def _channels(problem: ConvProblem, wide: str) -> tuple[int, int]:
    return (problem.k, problem.c) if wide == "dy" else (problem.c, problem.k)
