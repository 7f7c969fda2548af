"""Which tiles 1x1 layers in float32 try whose operands come by TMA boxes, forward and bwd_data, and what these cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import pointwise_plan, pointwise_tile
from nbdnn.kernels.cuda.boxes_ring import BARRIER_BYTES
from nbdnn.kernels.cuda.launch import WORKSPACE
from nbdnn.kernels.cuda.pointwise_plan import Integers, channels, deepest, integers_of, worth_measuring
from nbdnn.kernels.cuda.pointwise_tile import (
    LANES,
    LINE,
    LINE_BYTES,
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
from nbdnn.kernels.cuda.turn_filter import turned_elems
from nbdnn.problem_conv import ConvProblem

_INT32_END = 2**31
# Fitted to 1,471 tiles of 36 problems on an H200: the guess takes 1.03 of the fastest.
_COSTS = Costs(2.2, 0.43, 380.0, (0.684, 0.827), 1.1, 3.0, 2.0, 1.6)
_STORE_CLOCKS, _TURN_US = 1.8, 1.1
_KNOWN = 256


class Tile(NamedTuple):
    """What a block computes at a time. The wide factor's elements are neighbours in the output: pixels of a plane, or
    output channels. lanes: of a warp that have different ones, of_wide each; of_narrow: elements of the narrow factor
    of each lane. across_wide warps lie side by side along the wide factor, the others along the narrow one. turned: the
    filter first, so that its output channels are neighbours, as those of a bwd_data are. blocks: of a multiprocessor.
    """

    lanes: int
    of_wide: int
    of_narrow: int
    across_wide: int
    turned: bool
    stages: int
    blocks: int

    def __str__(self) -> str:
        lanes, turned = f"{self.lanes}x{WARP // self.lanes}:{self.of_wide}x{self.of_narrow}", "t" * self.turned
        return f"{lanes}:{self.across_wide}x{WARPS // self.across_wide}{turned}:s{self.stages}b{self.blocks}"

    @property
    def of_warp(self) -> tuple[int, int]:
        """Elements of the wide factor and of the narrow one."""
        return self.lanes * self.of_wide, WARP // self.lanes * self.of_narrow

    @property
    def elements(self) -> tuple[int, int]:
        """The same of the block."""
        wide, narrow = self.of_warp
        return wide * self.across_wide, narrow * (WARPS // self.across_wide)


class Variant(NamedTuple):
    """What the kernel is compiled for. filter_by_rows: whether its output channels are neighbours."""

    tile: Tile
    planar: bool
    filter_by_rows: bool
    epilogue: tuple[str, ...]

    @property
    def by_rows(self) -> tuple[bool, bool]:
        """Of the wide factor, and of the narrow one."""
        return (True, self.filter_by_rows) if self.planar else (self.filter_by_rows, False)

    @property
    def products(self) -> Products:
        wide, narrow = (4 * count * rows for count, rows in zip(self.tile.elements, self.by_rows, strict=True))
        return pointwise_tile.products(self.tile.lanes, self.tile.of_wide, self.tile.of_narrow, (wide, narrow))

    @property
    def box_bytes(self) -> tuple[int, int]:
        """Of a stage: of the wide factor, and of the narrow one."""
        wide, narrow = (LINE_BYTES * count for count in self.tile.elements)
        return wide, narrow

    @property
    def narrow_at(self) -> int:
        """From a stage's beginning: where a swizzle may begin, since a warp's wide elements are eight or a multiple."""
        return self.box_bytes[0]

    @property
    def stage_bytes(self) -> int:
        return self.narrow_at + -(-self.box_bytes[1] // (SWIZZLE * LINE_BYTES)) * SWIZZLE * LINE_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.tile.stages * (self.stage_bytes + 2 * BARRIER_BYTES)


def refusal(problem: ConvProblem, device: Gpu) -> str:
    """Why the kernel is not correct here, or ''."""
    if reason := pointwise_plan.refusal(problem, device, ("f32",)):
        return reason
    if problem.c % QUAD:
        return f"{problem.c} input channels are not a multiple of {QUAD}"
    if problem.channels_last and problem.op == "conv_bwd_data" and problem.k % QUAD:
        return f"{problem.k} output channels are not a multiple of {QUAD}"
    return ""


def variant(problem: ConvProblem, tile: Tile) -> Variant:
    return Variant(tile, not problem.channels_last, filter_by_rows(problem, tile), problem.epilogue)


def filter_by_rows(problem: ConvProblem, tile: Tile) -> bool:
    return tile.turned or problem.op == "conv_bwd_data"


def tiles(problem: ConvProblem, tile: Tile) -> tuple[int, int, int]:
    """(images, sets of pixels of each, sets of output channels): all images are one where channels are neighbours."""
    pixels, (wide, narrow), (_, outputs) = prod(problem.spatial), tile.elements, channels(problem)
    if problem.channels_last:
        return 1, ceil(problem.n * pixels / narrow), ceil(outputs / wide)
    return problem.n, ceil(pixels / wide), ceil(outputs / narrow)


def step(problem: ConvProblem, tile: Tile, device: Gpu) -> int:
    """Blocks."""
    return min(prod(tiles(problem, tile)), device.sms * tile.blocks)


@lru_cache(_KNOWN)
def configs(problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
    """The best guess first."""
    return worth_measuring(_fitting(problem, device), lambda tile: estimate_us(problem, tile, device))


def _fitting(problem: ConvProblem, device: Gpu) -> Iterator[Tile]:
    """All that find room in registers and shared memory, of good shapes."""
    shapes = good_shapes(
        _shapes(problem),
        lambda shape: prod(tiles(problem, shape)) * prod(shape.elements),
        lambda shape: estimate_us(problem, shape, device),
    )
    for shape, blocks in product(shapes, MOST_REGISTERS):
        if variant(problem, shape).products.registers <= MOST_REGISTERS[blocks]:
            tile = shape._replace(blocks=blocks)
            yield from deepest(tile, lambda deep: variant(problem, deep).shared_bytes, device)


def _shapes(problem: ConvProblem) -> Iterator[Tile]:
    """All with registers enough whose boxes TMA takes, warp by warp from where a swizzle begins."""
    whole_rows = problem.k % QUAD == 0 or not problem.channels_last
    may_turn = problem.op == "conv_fwd" and whole_rows and turned_elems(problem) < _INT32_END
    ways = (False, True) if may_turn else (False,)
    for lanes, of_wide, of_narrow, across, turned in product(LANES, OF_LANE, OF_LANE, (1, 2, 4, 8), ways):
        shape = Tile(lanes, of_wide, of_narrow, across, turned, stages=0, blocks=1)
        if shape.of_warp[1] % (SWIZZLE if across < WARPS else QUAD) or max(shape.elements) > MOST_BOX:
            continue
        if variant(problem, shape).products.registers <= MOST_REGISTERS[1]:
            yield shape


def estimate_us(problem: ConvProblem, tile: Tile, device: Gpu) -> float:
    """Microseconds."""
    v, summed, every = variant(problem, tile), channels(problem)[0], prod(tiles(problem, tile))
    blocks = step(problem, tile, device)
    at_once = tile.blocks if blocks > device.sms else 1  # of a multiprocessor
    of_sm = ceil(every / blocks) * at_once  # tiles
    quads, stages = of_sm * WARPS * ceil(summed / QUAD), of_sm * ceil(summed / LINE)
    stored = of_sm * WARPS * v.products.sums / v.products.wide.words * _STORE_CLOCKS / (device.clock_hz / 1e6)
    us = spent_us(_COSTS, v.products, at_once, quads, stages, problem.min_bytes, device)
    return us + stored + tile.turned * _TURN_US


def integers(problem: ConvProblem, tile: Tile, device: Gpu) -> Integers:
    return integers_of(problem, tiles(problem, tile), step(problem, tile, device))


def maps(problem: ConvProblem, tile: Tile) -> tuple[TensorMap, TensorMap]:
    """Of the image that is gathered, and of the filter."""
    (wide, narrow), (summed, outputs) = tile.elements, channels(problem)
    place, w_place = (1, 0) if problem.op == "conv_bwd_data" else (0, 1)
    if problem.channels_last:
        image, of_outputs = image_map(problem, place, summed, (LINE, narrow), plain=False), wide
    else:
        image, of_outputs = image_map(problem, place, summed, (wide, LINE), plain=True), narrow
    if not filter_by_rows(problem, tile):
        return image, TensorMap(w_place, "f32", (summed, outputs), (4 * summed,), (LINE, of_outputs))
    row_bytes = 4 * turned_elems(problem) // summed
    w_place = WORKSPACE if tile.turned else w_place
    return image, TensorMap(w_place, "f32", (outputs, summed), (row_bytes,), (of_outputs, LINE), plain=True)
