"""Which tiles 1x1 layers try whose operands come by TMA boxes to the matrix units of Hopper, and what these cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import pointwise_plan
from nbdnn.kernels.cuda.boxes_ring import BARRIER_BYTES
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pointwise_plan import CHUNK_BYTES, Integers, channels, deepest, integers_of, worth_measuring
from nbdnn.kernels.cuda.tensor_map import TensorMap
from nbdnn.kernels.cuda.turn_channels import input_places, turned_bytes
from nbdnn.kernels.cuda.wgmma_maps import filters_last, line_elems
from nbdnn.kernels.cuda.wgmma_pipeline import BOX_BYTES, LINE_BYTES, WARP
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

GROUP, ROWS = 128, 64  # threads of a warpgroup, and its rows
LEAST_STAGES = 3  # one is given back when the next is multiplied, and two were up to 1.3 times as slow
_GROUPS, _COLUMNS, _BLOCKS = (1, 2, 3, 4), (32, 64, 96, 128, 160, 192, 256), (1, 2, 3, 4)
# Of a thread beside its sums; where the output or a residual is read; for results of float32, and once more if so.
_OTHER_REGISTERS, READ_REGISTERS, _WIDE_REGISTERS = 40, 16, 8
# Fitted to 1,877 tiles of 58 problems in 16 bits, of 48 channels and more (H200), which they meet within 8 % in the
# mean; of 107 problems the guess takes 1.04 of the fastest. Of the matrix units a block reaches a share alone, and
# beside another; clocks of a row of a box, of which more are spent where a line is not whole, and where rows are no
# whole sectors of memory (24 to 72 channels of 28x28 to 56x56: 8 to 40 clocks), and of a tile's column for each
# warpgroup; the time of memory, and what two blocks take longer; clocks until a line has come, of which as many are on
# their way as there are stages.
_LAUNCH_US, _SHARES, _POWER = 2.27, (0.88, 0.81), 2.16
_ROW_CLOCKS, _PARTIAL, _NARROW, _SKEWED, _SECTOR_BYTES, _STORE_CLOCKS = 1.6, 1.6, 7.0, 3.0, 32, 3.8
_MOVED, _BESIDE, _LATENCY_CLOCKS = 0.96, 0.055, 2290
_TURN_US = 3.0  # of a filter that is turned first, beside its bytes
_KNOWN = 256


class Tile(NamedTuple):
    """What a block computes at a time: 64 rows a warpgroup, by columns that the output has as neighbours. stages: lines
    of both factors; blocks: of a multiprocessor."""

    groups: int
    columns: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}s{self.stages}b{self.blocks}"

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
    """What the kernel is compiled for. Rows are output channels of planes, else pixels. turned: whether a line of the
    factor of the rows, of that of the columns, is a step of the sum, of 64 neighbours."""

    tile: Tile
    dtype: str
    planar: bool
    turned: tuple[bool, bool]
    epilogue: tuple[str, ...]

    @property
    def boxes(self) -> tuple[int, int]:
        """Copies for a line of each factor."""
        rows, columns = self.turned
        return self.tile.groups if rows else 1, ceil(self.tile.columns / ROWS) if columns else 1

    @property
    def copied_rows(self) -> tuple[int, int]:
        """Of each factor's boxes of a line."""
        (rows, columns), (rows_turned, columns_turned) = self.boxes, self.turned
        return (
            ROWS * rows if rows_turned else self.tile.rows,
            ROWS * columns if columns_turned else self.tile.columns,
        )

    @property
    def columns_at(self) -> int:
        """From a stage's beginning."""
        return self.tile.rows * LINE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.columns_at + (self.boxes[1] * BOX_BYTES if self.turned[1] else self.tile.columns * LINE_BYTES)

    @property
    def shared_bytes(self) -> int:
        return self.tile.stages * (self.stage_bytes + 2 * BARRIER_BYTES)


def refusal(problem: ConvProblem, device: Gpu) -> str:
    """Why the kernel is not correct here, or ''."""
    if not problem.channels_last and problem.dtype == "f32":
        return "planes of float32, whose channels would have to be neighbours for TF32"
    return refused_operands(problem, device)


def refused_operands(problem: ConvProblem, device: Gpu) -> str:
    """The same of all passes. Of float32 what TF32 can say."""
    whole = CHUNK_BYTES // ITEMSIZE[problem.dtype]
    if reason := pointwise_plan.refusal(problem, device, ("f16", "bf16", "f32")):
        return reason
    if problem.c % whole:
        return f"{problem.c} input channels are not a multiple of {whole}"
    if problem.channels_last and problem.k % whole:
        return f"{problem.k} output channels are not a multiple of {whole}"
    return ""


def variant(problem: ConvProblem, tile: Tile) -> Variant:
    planar, filter_turned = not problem.channels_last, _filter_turned(problem)
    turned = (filter_turned, True) if planar else (False, filter_turned)
    return Variant(tile, problem.dtype, planar, turned, problem.epilogue)


def _filter_turned(problem: ConvProblem) -> bool:
    """Whether its output channels are neighbours, not what is summed over."""
    return problem.op == "conv_bwd_data" and not filters_last(problem)


def tiles(problem: ConvProblem, tile: Tile) -> tuple[int, int, int]:
    """(images, sets of pixels of each, sets of output channels): all images are one where channels are neighbours."""
    pixels, (_, outputs) = prod(problem.spatial), channels(problem)
    if problem.channels_last:
        return 1, ceil(problem.n * pixels / tile.rows), ceil(outputs / tile.columns)
    return problem.n, ceil(pixels / tile.columns), ceil(outputs / tile.rows)


def step(problem: ConvProblem, tile: Tile, device: Gpu) -> int:
    """Blocks."""
    return min(prod(tiles(problem, tile)), device.sms * tile.blocks)


@lru_cache(_KNOWN)
def configs(problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
    """The best guess first."""
    return worth_measuring(every_tile(problem, device), lambda tile: estimate_us(problem, tile, device))


def every_tile(problem: ConvProblem, device: Gpu) -> Iterator[Tile]:
    """All that find room in registers and shared memory."""
    reads = not {"beta", "res"}.isdisjoint(problem.epilogue)
    beside = (
        _OTHER_REGISTERS + READ_REGISTERS * reads + (_WIDE_REGISTERS * (1 + reads) if problem.dtype == "f32" else 0)
    )
    for groups, columns, blocks in product(_GROUPS, _COLUMNS, _BLOCKS):
        tile = Tile(groups, columns, 0, blocks)
        if tile.sums + beside <= registers(tile.workers + WARP, blocks):
            yield from deepest(tile, lambda deep: variant(problem, deep).shared_bytes, device, LEAST_STAGES)


def registers(threads: int, blocks: int) -> int:
    """Of a thread: a warp's lie in one of four quarters of the multiprocessor, 512 for each lane."""
    return 512 // ceil(threads // WARP * blocks / 4) // 8 * 8


def estimate_us(problem: ConvProblem, tile: Tile, device: Gpu) -> float:
    """Microseconds."""
    v, per_us, line = variant(problem, tile), device.clock_hz / 1e6, line_elems(problem.dtype)
    blocks, every, summed = step(problem, tile, device), prod(tiles(problem, tile)), channels(problem)[0]
    at_once = tile.blocks if blocks > device.sms else 1  # of a multiprocessor
    of_block, lines = ceil(every / blocks), ceil(summed / line)
    products = lines * product_clocks(tile.groups, tile.columns) / _SHARES[at_once > 1]
    stores = _STORE_CLOCKS * tile.groups * tile.columns / at_once
    computed_us = of_block * at_once * (products + stores) / per_us
    copied = sum(rows * each for rows, each in zip(v.copied_rows, _row_clocks(problem, v), strict=True))
    copied_us = of_block * at_once * lines * copied / per_us
    bytes_per_us = copy_bytes_per_s(device) / 1e6
    moved_us = problem.min_bytes / bytes_per_us * _MOVED
    if at_once > 1:
        moved_us *= 1 + _BESIDE / lines
    together = sum(us**_POWER for us in (copied_us, moved_us, computed_us)) ** (1 / _POWER)
    waited_us = of_block * lines * _LATENCY_CLOCKS / (tile.stages * at_once) / per_us
    turned = turned_bytes(problem, filters_last=True) if filters_last(problem) else 0
    return _LAUNCH_US + max(together, waited_us) + (_TURN_US + 2 * turned / bytes_per_us if turned else 0.0)


def _row_clocks(problem: ConvProblem, v: Variant) -> tuple[float, float]:
    """Of each factor's rows, by what lies in memory as neighbours."""
    summed, outputs = channels(problem)
    across = (outputs, prod(problem.spatial)) if v.planar else (0, outputs)
    rows, columns = (
        row_clocks(turned_extent if turned else summed, problem.dtype)
        for turned, turned_extent in zip(v.turned, across, strict=True)
    )
    return rows, columns


def row_clocks(neighbours: int, dtype: str) -> float:
    line = line_elems(dtype)
    clocks = _ROW_CLOCKS * (1.0 if neighbours % line == 0 else _PARTIAL if neighbours > line else _NARROW)
    return clocks * (_SKEWED if neighbours * ITEMSIZE[dtype] % _SECTOR_BYTES else 1.0)


def product_clocks(groups: int, columns: int) -> float:
    """Of a line: an instruction reads its factors from shared memory while it multiplies."""
    return 4 * groups * max(columns / 2, 16 + columns / 4)


def integers(problem: ConvProblem, tile: Tile, device: Gpu) -> Integers:
    return integers_of(problem, tiles(problem, tile), step(problem, tile, device))


def maps(problem: ConvProblem, tile: Tile) -> tuple[TensorMap, TensorMap]:
    """Of the image that is gathered, and of the filter."""
    (summed, outputs), pixels, line = channels(problem), prod(problem.spatial), line_elems(problem.dtype)
    place, w_place = (1, 0) if problem.op == "conv_bwd_data" else (0, 1)
    if problem.channels_last:
        of_filter = tile.columns
        image = _rows(place, problem.dtype, summed, problem.n * pixels, (line, tile.rows))
    else:
        each = ITEMSIZE[problem.dtype]
        of_filter, strides = tile.rows, (each * pixels, each * pixels * summed)
        image = TensorMap(place, problem.dtype, (pixels, summed, problem.n), strides, (ROWS, line, 1))
    if _filter_turned(problem):
        return image, _rows(w_place, problem.dtype, outputs, summed, (ROWS, line))
    w_place = input_places(problem, 0, filters_last=True)[0] if filters_last(problem) else w_place
    return image, _rows(w_place, problem.dtype, summed, outputs, (line, of_filter))


def _rows(place: int, dtype: str, elements: int, rows: int, box: tuple[int, int]) -> TensorMap:
    return TensorMap(place, dtype, (elements, rows), (ITEMSIZE[dtype] * elements,), box, rounded=dtype == "f32")
