"""Filter gradient by Fourier transforms of tiles of 32 x 32, float32: filters of stride 1 that are no larger than 11.

    dw = inverse [ sum over tiles of  F(x tile) * conj F(dy tile) ]         x tile 32^2, dy tile m^2, m = 33 - filter

    x  --transform--> V[plane, tile, c] \\
                                         M[plane, k, c] = D[plane]^T V[plane], three for each frequency --inverse--> dw
    dy --transform--> D[plane, tile, k] /

Multiplications: 1536 a tile of m^2 pixels, where direct sums have m^2 for each tap: 5.3 times as many for 3x3, 12.8
for 5x5, where images fill their tiles. Three launches; the products are those of the Winograd filter gradient. Traffic:
V, D and M, 1536 words a tile or a pair of channels, written and read once.

Error: on zero-mean data eps * log2(32) times the largest root sum of squares of the result; in general of the products
of all pixels of a tile, also of those that no tap brings together. Spectra are not scaled: 4 times the sum of |x| over
a tile, times that of |dy|, has to stay below 3e38. Source: own; Mathieu, Henaff and LeCun, arXiv:1312.5851, with three
real products for one of complex numbers (Gauss).
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import fft_filter_input, fft_filter_output, fma_plan, winograd_product
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.conv_winograd import refusal_of_steps
from nbdnn.kernels.cuda.fft_filter_input import COLUMNS, EXTENT, PLANES
from nbdnn.kernels.cuda.filter_products import STAGES_OF_START, TILES, ByProducts, Config
from nbdnn.kernels.cuda.fma_tile import STAGE_K, Tile
from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.winograd_product import Kinds
from nbdnn.kernels.spatial import tensor_strides
from nbdnn.problem import Operand
from nbdnn.problem_conv import ConvProblem

_MOST_TAPS = 11  # on an axis: of larger filters a tile has less than half of its pixels left
# Planes of a block: a column of the spectrum has a multiple of each.
_SHARES = tuple(planes for planes in range(1, 3 * EXTENT + 1) if PLANES // COLUMNS % planes == 0)


class _Plan(NamedTuple):
    """Outputs of a tile, tiles of an image, tiles of all that are stored, channels to 16 bytes, and the products.

    V begins at 0 in the workspace, then D; M ends at `end`. planes: of M, that one block makes.
    """

    step: tuple[int, int]
    tile_rows: int
    tile_columns: int
    tiles: int
    pitch_c: int
    planes: int
    blocks: int
    product: winograd_product.Fields
    end: int


def _plan(problem: ConvProblem, tile: Tile, device: Gpu) -> _Plan:
    step_h, step_w = (EXTENT + 1 - taps for taps in problem.filter)
    rows, columns = (ceil(extent / step) for extent, step in zip(problem.out_spatial, (step_h, step_w), strict=True))
    stages = ceil(problem.n * rows * columns / STAGE_K)
    pitch_c, pitch_k = (ceil(channels / 4) * 4 for channels in (problem.c, problem.k))
    tiles = ceil(problem.k / tile.m), ceil(problem.c / tile.n)
    count = tiles[0] * tiles[1]
    at_once = device.sms * tile.min_blocks
    planes = next((planes for planes in _SHARES if planes * at_once >= PLANES), _SHARES[-1])
    d_start = PLANES * stages * STAGE_K * pitch_c
    m_start = d_start + PLANES * stages * STAGE_K * pitch_k
    kinds = Kinds((problem.n * rows * columns, 0, 0, 0), (PLANES, 0, 0, 0))
    product = winograd_product.fields(kinds, planes * count * stages, tiles, (d_start, pitch_k), (0, pitch_c), m_start)
    blocks = PLANES // planes
    end = m_start + (PLANES * count + blocks) * tile.m * tile.n
    return _Plan((step_h, step_w), rows, columns, stages * STAGE_K, pitch_c, planes, blocks, product, end)


class FftFilter(ByProducts):
    """Filter gradient by Fourier transforms of tiles."""

    algorithm = algo = "fft_tiling"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        reason = _refusal(problem, device)
        return Support(False, reason) if reason else YES

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        return 4 * _plan(problem, config.tile, device).end

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        plan = _plan(problem, config.tile, device)
        on_one = ceil(plan.blocks / device.sms)
        stages = on_one * plan.planes * plan.product.tiles * (plan.tiles // STAGE_K + STAGES_OF_START)
        moved_bytes = problem.min_bytes + 4 * (2 * plan.end - plan.product.c_start)
        product_us = stages * fma_plan.stage_us(config.tile, on_one, device)
        return 3 * fma_plan.LAUNCH_US + product_us + moved_bytes / copy_bytes_per_s(device) * 1e6

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        plan, tile = _plan(problem, config.tile, device), config.tile
        product = Source(winograd_product.product_kernel, tile, tile.threads, tile.min_blocks)
        return [
            _input_launch(problem, plan),
            Launch(product, (plan.blocks, 1, 1), (WORKSPACE,), "", plan.product),
            _output_launch(problem, plan, tile),
        ]


def _refusal(problem: ConvProblem, device: Gpu) -> str:
    """Why the kernels are not correct on a problem, with the number that says so; or ''."""
    if problem.dtype != "f32":
        return f"dtype is {problem.dtype}, this kernel multiplies f32"
    if len(problem.spatial) != 2 or not 1 <= min(problem.filter) <= max(problem.filter) <= _MOST_TAPS:
        return f"the filter is {'x'.join(map(str, problem.filter))}, not of 1 to {_MOST_TAPS} taps on two axes"
    if not problem.n * prod(problem.out_spatial):
        return f"{problem.n} images of {problem.out_spatial} have no pixel to sum over"
    return refusal_of_steps(problem, max(_plan(problem, tile, device).end for tile in TILES))


def _input_launch(problem: ConvProblem, plan: _Plan) -> Launch:
    x, dy, _ = problem.operands
    groups_x, groups_y = (ceil(channels / fft_filter_input.CHANNELS) for channels in (problem.c, problem.k))
    fields = fft_filter_input.Fields._make((
        problem.n, plan.tiles, plan.tile_rows, plan.tile_columns, *plan.step,
        plan.tiles * groups_x, groups_x, 0, plan.pitch_c, problem.c, *_strides(x, problem.channels_last),
        *problem.spatial, *(before for before, _ in problem.pad),
        groups_y, plan.product.a_start, plan.product.a_channels, problem.k,
        *_strides(dy, problem.y_channels_last), *problem.out_spatial,
    ))  # fmt: skip
    variant = fft_filter_input.Variant(problem.channels_last, problem.y_channels_last)
    source = Source(fft_filter_input.input_kernel, variant, fft_filter_input.THREADS, min_blocks=4)
    return Launch(source, (plan.tiles * (groups_x + groups_y), 1, 1), (0, 1, WORKSPACE), "", fields)


def _strides(image: Operand, channels_last: bool) -> tuple[int, ...]:
    """(n, c, h, w), in elements."""
    n, c, _, h, w = tensor_strides(image.shape, channels_last)
    return n, c, h, w


def _output_launch(problem: ConvProblem, plan: _Plan, tile: Tile) -> Launch:
    start, w_k, w_c, _, w_r, w_s = filter_strides(problem)
    blocks, product = ceil(problem.c / fft_filter_output.CHANNELS), plan.product
    places = product.c_start, product.tiles, product.tiles_n, problem.k, problem.c, blocks
    fields = fft_filter_output.Fields(*places, start, w_k, w_c, w_r, w_s)
    taps_h, taps_w = problem.filter
    variant = fft_filter_output.Variant(taps_h, taps_w, tile, plan.planes, problem.epilogue)
    source = Source(fft_filter_output.output_kernel, variant, fft_filter_output.THREADS, min_blocks=2)
    return Launch(source, (problem.k * blocks, 1, 1), (WORKSPACE, 2), "f32", fields)


BWD_FILTER = FftFilter()
