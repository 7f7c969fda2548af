"""Winograd filter gradient in float32 on the FMA units, F(3x3, m x m) with m = 4: 3x3 and Tx3x3 filters of stride 1.

    dw = A^T [ sum over tiles of (B^T x B) * (G dy G^T) ] A        x tile (m+2)^2, dy tile m^2, products elementwise

    x  --B^T x B--> V[xi, tile, c] \\
                                    M[xi, k, c] = D[xi]^T V[xi], one matrix product for each xi --A^T M A--> dw
    dy --G dy G^T-> D[xi, tile, k] /

The roles of filter and output are exchanged against the forward: dy is the filter, the 3x3 result the output, and the
sum over tiles is the reduction. Multiplications: (m + 2)^2 / (9 m^2) of the direct sums, a quarter for m = 4. Three
launches: both transforms, the products, and the addition of their parts with the transform back. Of volumes each slice
is transformed once, and a tap along the depth multiplies D by V of as many slices further. Traffic: V and D,
(m + 2)^2 / m^2 elements an element of x and dy, written and read once, and M, of which much stays in the second-level
cache. Error: of the order of eps * sqrt(tiles) times the largest root sum of squares of the result. Source: Lavin and
Gray, arXiv:1509.09308, with the points of `cook_toom.py`.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import fma_plan, winograd_filter_input, winograd_filter_output, winograd_product
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.conv_winograd import refusal
from nbdnn.kernels.cuda.filter_products import STAGES_OF_START, TILES, ByProducts, Config
from nbdnn.kernels.cuda.fma_tile import Tile
from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.winograd_filter_input import Side
from nbdnn.kernels.cuda.winograd_product import Kinds
from nbdnn.kernels.spatial import spatial3, tensor_strides
from nbdnn.problem import Operand
from nbdnn.problem_conv import ConvProblem

_OUTPUT_BLOCKS = 3  # of the last kernel a multiprocessor; where they would be fewer, they take a row of dw, not 4


class _Plan(NamedTuple):
    """Tiles of a slice, which xi have which, slices of an image and taps along them, channels to 16 bytes, and the
    integers of the products.

    D begins at d_start in the workspace, V at 0; M ends at `end`.
    """

    tile_rows: int
    tile_columns: int
    kept_rows: int
    kept_columns: int
    depth: int
    taps_d: int
    kinds: Kinds
    pitch_c: int
    d_start: int
    blocks: int
    product: winograd_product.Fields
    end: int


def _plan(problem: ConvProblem, m: int, tile: Tile, device: Gpu) -> _Plan:
    (depth, *extents), (taps_d, *_) = spatial3(problem.out_spatial), spatial3(problem.filter)
    (rows, columns), (kept_rows, kept_columns) = (ceil(e / m) for e in extents), (e // m for e in extents)
    depth += taps_d - 1
    of_slice = rows * columns, rows * kept_columns, kept_rows * columns, kept_rows * kept_columns
    slices = problem.n * depth - (taps_d - 1)  # behind which D is zero
    kinds = Kinds(
        _of_kinds(max(0, slices), of_slice), ((m + 1) * (m + 1), m + 1, m + 1, 1), _of_kinds(taps_d - 1, of_slice)
    )
    pitch_c, pitch_k = (ceil(channels / 4) * 4 for channels in (problem.c, problem.k))
    tiles = ceil(problem.k / tile.m), ceil(problem.c / tile.n)
    stages = kinds.products() * tiles[0] * tiles[1] * taps_d
    share = max(1, ceil(stages / (device.sms * tile.min_blocks)))
    d_start = kinds.total() * pitch_c
    m_start = d_start + kinds.total() * pitch_k
    product = winograd_product.fields(kinds, share, tiles, (d_start, pitch_k), (0, pitch_c), m_start, taps_d)
    blocks = ceil(stages / share)
    end = m_start + (sum(kinds.planes) * product.tiles + blocks) * tile.m * tile.n
    return _Plan(rows, columns, kept_rows, kept_columns, depth, taps_d, kinds, pitch_c, d_start, blocks, product, end)


def _of_kinds(slices: int, of_slice: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    first, second, third, fourth = (slices * tiles for tiles in of_slice)
    return first, second, third, fourth


class WinogradFilter(ByProducts):
    """Winograd filter gradient with dy tiles of m x m."""

    algo = "winograd_non_fused"

    def __init__(self, m: int) -> None:
        self._m = m
        self.algorithm = f"winograd_{m}x{m}"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        reason = refusal(problem, max(_plan(problem, self._m, tile, device).end for tile in TILES))
        return Support(False, reason) if reason else YES

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        return 4 * _plan(problem, self._m, config.tile, device).end

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        plan = _plan(problem, self._m, config.tile, device)
        on_one = ceil(plan.blocks / device.sms)
        stages = on_one * (plan.product.share + STAGES_OF_START)
        moved_bytes = problem.min_bytes + 4 * (2 * plan.end - plan.product.c_start)
        product_us = stages * fma_plan.stage_us(config.tile, on_one, device)
        return 3 * fma_plan.LAUNCH_US + product_us + moved_bytes / copy_bytes_per_s(device) * 1e6

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        plan = _plan(problem, self._m, config.tile, device)
        return [
            _input_launch(problem, plan, self._m),
            _product_launch(plan, config.tile),
            _output_launch(problem, plan, self._m, config.tile, device),
        ]


def _input_launch(problem: ConvProblem, plan: _Plan, m: int) -> Launch:
    x, dy, _ = problem.operands
    sides = _side(problem, x, problem.channels_last), _side(problem, dy, problem.y_channels_last)
    kinds, product, slices = plan.kinds, plan.product, problem.n * plan.depth
    stored = (tiles + further for tiles, further in zip(kinds.tiles, kinds.further, strict=True))
    most = max(filled - tiles for filled, tiles in zip(kinds.filled, stored, strict=True))
    tiles = slices * plan.tile_rows * plan.tile_columns + most
    fields = winograd_filter_input.Fields._make((
        slices, plan.depth, tiles, plan.tile_rows, plan.tile_columns, plan.kept_rows, plan.kept_columns,
        *kinds.filled, product.at_1, product.at_2, product.at_3,
        0, plan.pitch_c, problem.c, *tensor_strides(x.shape, problem.channels_last), *spatial3(problem.spatial),
        *spatial3(tuple(before for before, _ in problem.pad), 0),
        plan.d_start, product.a_channels, problem.k,
        *tensor_strides(dy.shape, problem.y_channels_last), *spatial3(problem.out_spatial),
    ))  # fmt: skip
    blocks = (_blocks(tiles, image.shape[1], side) for image, side in zip((x, dy), sides, strict=True))
    source = Source(
        winograd_filter_input.input_kernel,
        winograd_filter_input.Variant(m, *sides),
        winograd_filter_input.THREADS,
        min_blocks=2 if any(side.words == 2 for side in sides) else 3,
    )
    return Launch(source, (max(blocks), 2, 1), (0, 1, WORKSPACE), "", fields)


def _side(problem: ConvProblem, image: Operand, channels_last: bool) -> Side:
    return Side(channels_last, 2 if channels_last and image.shape[1] % 2 == 0 and problem.align % 8 == 0 else 1)


def _blocks(tiles: int, channels: int, side: Side) -> int:
    """Of the transform of one image."""
    if side.channels_last:
        return ceil(tiles * (channels // side.words) / winograd_filter_input.THREADS)
    return ceil(tiles / winograd_filter_input.TILES) * ceil(channels / winograd_filter_input.CHANNELS)


def _product_launch(plan: _Plan, tile: Tile) -> Launch:
    source = Source(winograd_product.product_kernel, tile, tile.threads, tile.min_blocks)
    return Launch(source, (plan.blocks, 1, 1), (WORKSPACE,), "", plan.product)


def _output_launch(problem: ConvProblem, plan: _Plan, m: int, tile: Tile, device: Gpu) -> Launch:
    blocks, product = ceil(problem.c / winograd_filter_output.CHANNELS), plan.product
    rows = 4 if problem.k // 4 * blocks * plan.taps_d >= _OUTPUT_BLOCKS * device.sms else 1
    of_product = (value for name, value in product._asdict().items() if name in winograd_filter_output.Fields._fields)
    fields = winograd_filter_output.Fields._make((*of_product, problem.k, problem.c, blocks, *filter_strides(problem)))
    variant = winograd_filter_output.Variant(m, tile, rows, problem.w_channels_last, problem.epilogue)
    source = Source(winograd_filter_output.output_kernel, variant, 32 * (m + 2), min_blocks=4)
    return Launch(source, (ceil(problem.k / rows) * blocks, plan.taps_d, 1), (WORKSPACE, 2), "f32", fields)


BWD_FILTER = WinogradFilter(4)
