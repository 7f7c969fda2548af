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


class FilterGemm(LaunchedCandidate[Config]):
    """The gradient by the filter."""

    op, algorithm, algo = "conv_bwd_filter", "fma_gemm", "small"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        reason = refusal(problem)
        return Support(False, reason) if reason else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        return fma_plan.configs(_product(problem), _TILES, device)

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
    positions = problem.n * prod(problem.out_spatial)
    return Product(
        problem.groups, k, c * prod(problem.filter), ceil(positions / STAGE_K), problem.operands[2].size_elems
    )


def _variant(problem: ConvProblem, config: Config) -> Variant:
    """Sixteen bytes at a time where everything is a multiple of that, and four columns are channels of one tap."""
    k, c = problem.k // problem.groups, problem.c // problem.groups
    wide, split = problem.align % 16 == 0, config.parts > 1
    channels_last = problem.w_channels_last or prod(problem.filter) == 1
    gradient_words = 4 if wide and problem.y_channels_last and k % 4 == 0 else 1
    image_words = 4 if wide and problem.channels_last and channels_last and c % 4 == 0 else 1
    store_words = 4 if wide and c * prod(problem.filter) % 4 == 0 else 1
    return Variant(
        config.tile,
        Copies(config.tile.m, not problem.y_channels_last, gradient_words),
        Copies(config.tile.n, not problem.channels_last, image_words),
        Store(True, store_words, split, () if split else problem.epilogue),
        channels_last,
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
