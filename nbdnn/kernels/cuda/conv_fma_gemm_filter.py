"""Implicit matrix product in IEEE float32 on the FMA units: bwd_filter of any stride, dilation and layout.

    dw[k, (c, tap)] = sum over pixels of  dy[pixel, k] * x[pixel moved by tap, c]

Rows are the output channels of a group, columns the elements of a row of dw in the order of its memory. The pixels are
split among as many blocks as keep the device busy, and the parts added in fixed order. Both operands are read as they
lie in memory. Traffic: a tile of M x N loads M + N elements a pixel for M * N products. Accumulates in float32, one
rounding a product and sum. Source: own; the product is that of `fma_tile.py`, the kernel that of `fma_filter.py`.
"""

from __future__ import annotations

from math import ceil, prod

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3, tensor_strides
from nbdnn.kernels.cuda import fma_plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.conv_fma_gemm import refusal
from nbdnn.kernels.cuda.fma_filter import Fields, Variant, filter_kernel
from nbdnn.kernels.cuda.fma_plan import Config, Product
from nbdnn.kernels.cuda.fma_store import Store
from nbdnn.kernels.cuda.fma_tile import STAGE_K, Copies, Tile
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem_conv import ConvProblem

_TILES = (Tile(128, 128), Tile(128, 64), Tile(64, 128), Tile(64, 64))
# Stages of a forward's time, which have half of the copies' work: channels-last, planar, and by one word (an H200).
_SLOWER, _SLOWER_PLANAR, _SLOWER_BY_ONE = 1.13, 1.25, 1.45


class FilterGemm(LaunchedCandidate[Config]):
    """The gradient by the filter."""

    op, algorithm, algo = "conv_bwd_filter", "fma_gemm", "small"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        reason = refusal(problem)
        return Support(False, reason) if reason else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        by_k = any(copies.by_k for copies in _copies(problem, _TILES[0]))
        tiles = _TILES[1:] if by_k else _TILES  # the largest would spill registers, and took 2 to 20 % longer
        return fma_plan.configs(_product(problem), tiles, device, fma_plan.MOST_FILTER_PARTS)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        return 4 * config.parts * part_elems(problem) if config.parts > 1 else 0

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        us = fma_plan.product_us(_product(problem), config, device)
        return max(us, problem.min_bytes / copy_bytes_per_s(device) * 1e6)

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        tile, fields, variant = config.tile, _fields(problem, config), _variant(problem, config)
        product = Launch(
            source=Source(filter_kernel, variant, tile.threads, tile.min_blocks),
            grid=(ceil(fields.group_k / tile.m) * fields.tiles_n, problem.groups, config.parts),
            pointers=(0, 1, WORKSPACE if variant.store.parts else 2),
            scalars="f32",
            integers=fields,
        )
        return [product, add_parts(problem, config.parts)] if config.parts > 1 else [product]


def _product(problem: ConvProblem) -> Product:
    k, c = problem.k // problem.groups, problem.c // problem.groups
    positions, out_elems = problem.n * prod(problem.out_spatial), problem.operands[2].size_elems
    slower = _SLOWER if problem.channels_last else _SLOWER_PLANAR
    if any(copies.words == 1 for copies in _copies(problem, _TILES[0])):
        slower = _SLOWER_BY_ONE
    return Product(problem.groups, k, c * prod(problem.filter), ceil(positions / STAGE_K), out_elems, slower)


def _copies(problem: ConvProblem, tile: Tile) -> tuple[Copies, Copies]:
    """Of dy and of x."""
    return (
        Copies(tile.m, not problem.y_channels_last, _gradient_words(problem)),
        Copies(tile.n, not problem.channels_last, _image_words(problem)),
    )


def _gradient_words(problem: ConvProblem) -> int:
    """Sixteen bytes of dy at a time where everything is a multiple of that."""
    along = problem.k // problem.groups if problem.y_channels_last else prod(problem.out_spatial)
    return 4 if problem.align % 16 == 0 and along % 4 == 0 else 1


def _image_words(problem: ConvProblem) -> int:
    """The same of x, where four columns are channels of one tap; of planes where what meets dy are neighbours, too."""
    pointwise = prod(problem.filter) == 1
    if problem.channels_last:
        fits = (problem.c // problem.groups) % 4 == 0 and (problem.w_channels_last or pointwise)
    else:
        one_to_one = pointwise and problem.spatial == problem.out_spatial and not any(map(sum, problem.pad))
        fits = one_to_one and prod(problem.spatial) % 4 == 0
    return 4 if problem.align % 16 == 0 and fits else 1


def _variant(problem: ConvProblem, config: Config) -> Variant:
    split, row_elems = config.parts > 1, problem.c // problem.groups * prod(problem.filter)
    store_words = 4 if problem.align % 16 == 0 and row_elems % 4 == 0 else 1
    return Variant(
        config.tile,
        *_copies(problem, config.tile),
        Store(True, store_words, split, () if split else problem.epilogue),
        problem.w_channels_last or prod(problem.filter) == 1,
    )


def _fields(problem: ConvProblem, config: Config) -> Fields:
    x, dy, _ = problem.operands
    k, c = problem.k // problem.groups, problem.c // problem.groups
    row_elems, taps, dilation = c * prod(problem.filter), spatial3(problem.filter), spatial3(problem.dilation)
    flipped = problem.mode == "conv"
    return Fields._make((
        problem.n * prod(problem.out_spatial), *spatial3(problem.out_spatial),
        k, c, row_elems, ceil(row_elems / config.tile.n), config.parts, part_elems(problem),
        *taps,
        *((extent - 1) * step if flipped else 0 for extent, step in zip(taps, dilation, strict=True)),
        *(-step if flipped else step for step in dilation),
        *tensor_strides(x.shape, problem.channels_last), *spatial3(problem.spatial),
        *tensor_strides(dy.shape, problem.y_channels_last),
        *spatial3(problem.stride), *spatial3(tuple(before for before, _ in problem.pad), 0),
    ))  # fmt: skip


BWD_FILTER = FilterGemm()
