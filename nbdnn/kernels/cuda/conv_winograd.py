"""Winograd convolution in float32 on the FMA units: 3x3 and Tx3x3 filters of stride 1, in tiles of m x m outputs.

    Y = A^T [ sum over c of (G w G^T) * (B^T x B) ] A        for every tile, products elementwise

    x tile --B^T x B--> V[xi, tile, c] \\
                                         M[xi, tile, k] = V[xi] U[xi], one matrix product for each xi --A^T M A--> y
    w 3x3  --G w G^T--> U[xi, k, c]    /

The (m + 2)^2 products are one launch of the kernel of `fma_gather.py`, a group each. Multiplications an output:
(m + 2)^2 / m^2 instead of 9: 2.25 for m = 4. Traffic: U, V and M written and read once, of which much stays in the
second-level cache. Of volumes each slice is transformed once, and the products are convolutions along the depth, T taps
of U by as many slices of V. bwd_data is the same with the filter turned by half a turn. Error: of the order of
eps * sqrt(C T) times the largest root sum of squares in the image. Source: Lavin and Gray, arXiv:1509.09308.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import fma_plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.fma_gather import Fields, gather_kernel
from nbdnn.kernels.cuda.fma_gather import Variant as GatherVariant
from nbdnn.kernels.cuda.fma_plan import Config, Product
from nbdnn.kernels.cuda.fma_store import Store
from nbdnn.kernels.cuda.fma_tile import STAGE_K, Copies, Tile
from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch, LaunchedCandidate, output_pointers
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.winograd_transforms import (
    THREADS,
    FilterFields,
    ImageFields,
    Variant,
    filter_kernel,
    input_kernel,
    output_kernel,
)
from nbdnn.kernels.spatial import spatial3, tensor_strides
from nbdnn.problem_conv import ConvProblem

_TILES = (Tile(128, 128), Tile(128, 64), Tile(64, 64))
_INT32_END = 2**31 - 2**16
# Of guesses, by some 250 measurements on an H200: three launches of transforms; the product of 2x2 tiles, of 4x4; and
# warps of a multiprocessor that keep its units busy, whose copies find neighbours.
_TRANSFORMS_US, _OF_SMALL_TILES, _BUSY_WARPS = 4.5, 0.85, 5.5


class _Plan(NamedTuple):
    """Tiles of a slice and from one slice to the next; of V and M the slices of an image, the tiles of all, and the
    pitch of tiles where they are planar; channels, taps along the depth, and the elements where M and U begin and end.
    """

    tile_rows: int
    tile_columns: int
    slice: int
    depth_in: int
    depth_out: int
    tiles_in: int
    tiles_out: int
    pitch_in: int
    pitch_out: int
    group_in: int
    group_out: int
    taps_d: int
    m_start: int
    u_start: int
    end: int


def _plan(problem: ConvProblem, m: int) -> _Plan:
    forward, planes = problem.op == "conv_fwd", (m + 2) * (m + 2)
    group_in, group_out = (problem.c, problem.k) if forward else (problem.k, problem.c)
    given, made = problem.operands[0 if forward else 1].shape, problem.operands[2].shape
    (depth_in, *_), (depth_out, *extents), (taps_d, *_) = map(spatial3, (given[2:], made[2:], problem.filter))
    tile_rows, tile_columns = (ceil(extent / m) for extent in extents)
    slice_tiles = tile_rows * tile_columns
    if len(problem.spatial) == 3:  # four planar tiles are copied at once, from any slice
        slice_tiles = _whole_vectors(slice_tiles)
    tiles_in, tiles_out = (problem.n * depth * slice_tiles for depth in (depth_in, depth_out))
    pitch_in, pitch_out = _whole_vectors(tiles_in), _whole_vectors(tiles_out)
    m_start = planes * pitch_in * group_in
    u_start = m_start + planes * pitch_out * group_out
    end = u_start + planes * taps_d * group_in * group_out
    return _Plan(
        tile_rows, tile_columns, slice_tiles, depth_in, depth_out, tiles_in, tiles_out, pitch_in, pitch_out,
        group_in, group_out, taps_d, m_start, u_start, end,
    )  # fmt: skip


def _whole_vectors(tiles: int) -> int:
    return -(-tiles // 4) * 4


def refusal(problem: ConvProblem, workspace_elems: int) -> str:
    """Why the kernels of this family are not correct on a problem, with the number that says so; or ''."""
    if problem.dtype != "f32":
        return f"dtype is {problem.dtype}, this kernel multiplies f32"
    if problem.filter[-2:] != (3, 3):
        return f"the filter is {'x'.join(map(str, problem.filter))}, not 3x3"
    return refusal_of_steps(problem, workspace_elems)


def refusal_of_steps(problem: ConvProblem, workspace_elems: int) -> str:
    """Why transforms of tiles are not correct on a problem, or reach too far; or ''."""
    for name, steps in (("stride", problem.stride), ("dilation", problem.dilation)):
        if any(step != 1 for step in steps):
            return f"{name} {steps} is not 1"
    if problem.groups != 1 or not problem.c or not problem.k:
        return f"{problem.c} to {problem.k} channels in {problem.groups} groups, this kernel takes 1"
    padded = [2 * (extent + sum(pad)) for extent, pad in zip(problem.spatial, problem.pad, strict=True)]
    largest = max(*(operand.size_elems for operand in problem.operands), *padded, workspace_elems)
    return f"an index reaches {largest}, this kernel's end at {_INT32_END}" if largest >= _INT32_END else ""


class Winograd(LaunchedCandidate[Config]):
    """Winograd convolution with output tiles of m x m."""

    def __init__(self, op: str, m: int) -> None:
        self.op, self._m = op, m
        self.algorithm = f"winograd_{m}x{m}"
        self.algo = {2: "winograd", 4: "winograd_non_fused"}[m]

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        reason = refusal(problem, _plan(problem, self._m).end)
        return Support(False, reason) if reason else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        return tuple(c for c in fma_plan.configs(self._product(problem), _TILES, device) if c.parts == 1)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        return 4 * _plan(problem, self._m).end

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        moved_bytes = problem.min_bytes + 2 * 4 * _plan(problem, self._m).end
        side_us = _TRANSFORMS_US + moved_bytes / copy_bytes_per_s(device) * 1e6
        return side_us + fma_plan.product_us(self._product(problem), config, device)

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        plan, m = _plan(problem, self._m), self._m
        return [
            _filter_launch(problem, plan, m),
            _input_launch(problem, plan, m),
            _product_launch(problem, plan, m, config.tile),
            _output_launch(problem, plan, m),
        ]

    def _product(self, problem: ConvProblem) -> Product:
        plan = _plan(problem, self._m)
        # Nothing is split: no part may be stored.
        slower = _OF_SMALL_TILES if self._m == 2 else 1.0
        stages = plan.taps_d * ceil(plan.group_in / STAGE_K)
        return Product(
            (self._m + 2) ** 2, plan.tiles_out, plan.group_out, stages, 1 << 40, slower, fma_plan.LONE, _BUSY_WARPS
        )


def _filter_launch(problem: ConvProblem, plan: _Plan, m: int) -> Launch:
    start, w_k, w_c, w_t, w_r, w_s = filter_strides(problem)
    if problem.op == "conv_bwd_data":
        start += (plan.taps_d - 1) * w_t + 2 * w_r + 2 * w_s
        w_t, w_r, w_s = -w_t, -w_r, -w_s
    pairs = plan.taps_d * problem.k * problem.c
    return Launch(
        source=Source(filter_kernel, (m,), THREADS),
        grid=(ceil(pairs / THREADS), 1, 1),
        pointers=(1 if problem.op == "conv_fwd" else 0, WORKSPACE),
        scalars="",
        integers=FilterFields(pairs, problem.k, problem.c, start, w_t, w_k, w_c, w_r, w_s, plan.u_start),
    )


def _input_launch(problem: ConvProblem, plan: _Plan, m: int) -> Launch:
    forward = problem.op == "conv_fwd"
    source = problem.operands[0 if forward else 1]
    where = (0, plan.pitch_in, plan.tiles_in)
    fields = _image_fields(source.shape, problem.channels_last, plan, where, _before(problem)[1:])
    return Launch(
        source=Source(input_kernel, Variant(m, problem.channels_last, ()), THREADS),
        grid=(ceil(fields.plane / THREADS), 1, 1),
        pointers=(0 if forward else 1, WORKSPACE),
        scalars="",
        integers=fields,
    )


def _output_launch(problem: ConvProblem, plan: _Plan, m: int) -> Launch:
    where = (plan.m_start, plan.pitch_out, plan.tiles_out)
    fields = _image_fields(problem.operands[2].shape, problem.y_channels_last, plan, where, (0, 0))
    return Launch(
        source=Source(output_kernel, Variant(m, problem.y_channels_last, problem.epilogue), THREADS),
        grid=(ceil(fields.plane / THREADS), 1, 1),
        pointers=(WORKSPACE, *output_pointers(problem)),
        scalars="f32",
        integers=fields,
    )


def _before(problem: ConvProblem) -> tuple[int, ...]:
    """How far the first tap of the first output lies before the image, of three axes."""
    forward = problem.op == "conv_fwd"
    first = [pad if forward else taps - 1 - pad for (pad, _), taps in zip(problem.pad, problem.filter, strict=True)]
    return spatial3(tuple(first), 0)


def _image_fields(
    shape: tuple[int, ...], channels_last: bool, plan: _Plan, where: tuple[int, int, int], before: tuple[int, ...]
) -> ImageFields:
    """where: V or M begins there in the workspace; the pitch of its tiles; how many they are."""
    start, pitch, tiles = where
    n, c, d, h, w = tensor_strides(shape, channels_last)
    return ImageFields(
        start, pitch * shape[1], shape[1], tiles, pitch, plan.slice, plan.tile_rows, plan.tile_columns,
        n, c, d, h, w, *spatial3(shape[2:]), *before,
    )  # fmt: skip


def _product_launch(problem: ConvProblem, plan: _Plan, m: int, tile: Tile) -> Launch:
    """M[xi] = V[xi] U[xi]: a 1x1 convolution of a row of tiles in (m + 2)^2 groups, or of slices along their depth."""
    planes, in_last, out_last = (m + 2) * (m + 2), problem.channels_last, problem.y_channels_last
    group_in, group_out, pairs = plan.group_in, plan.group_out, plan.group_in * plan.group_out
    w_o, w_i = (group_in, 1) if problem.op == "conv_fwd" else (1, group_out)
    in_c, in_w = (1, group_in) if in_last else (plan.pitch_in, 1)
    out_c, out_w = (1, group_out) if out_last else (plan.pitch_out, 1)
    is_flat = len(problem.spatial) == 2
    images, row = (1, plan.tiles_in) if is_flat else (problem.n, plan.slice)
    in_d, out_d, one = row * in_w, row * out_w, (1, 1, 1)
    fields = Fields._make((
        images, group_out, group_in, ceil(group_out / tile.n), 1, 0,
        plan.depth_out, 1, row,
        plan.m_start, plan.pitch_out * group_out, plan.depth_out * out_d, out_c, out_d, 0, out_w, *one,
        plan.pitch_in * group_in, plan.depth_in * in_d, in_c, in_d, 0, in_w, plan.depth_in, 1, row,
        *one, -_before(problem)[0], 0, 0, *one,
        plan.u_start, plan.taps_d * pairs, w_o, w_i, pairs, 0, 0, plan.taps_d, 1, 1, *one, *one,
    ))  # fmt: skip
    variant = GatherVariant(
        tile,
        Copies(tile.m, in_last, 1 if in_last else 4),
        Copies(tile.n, w_i == 1, 1 if w_i == 1 or group_out % 4 else 4),
        Store(out_last, 1 if out_last and group_out % 4 else 4, True, ()),
        False,
    )
    return Launch(
        source=Source(gather_kernel, variant, tile.threads, tile.min_blocks),
        grid=(ceil(plan.tiles_out / tile.m) * fields.tiles_n, planes, 1),
        pointers=(WORKSPACE, WORKSPACE, WORKSPACE, NULL, NULL),
        scalars="f32",
        integers=fields,
    )


FWD_2X2, FWD_4X4 = Winograd("conv_fwd", 2), Winograd("conv_fwd", 4)
BWD_DATA_2X2, BWD_DATA_4X4 = Winograd("conv_bwd_data", 2), Winograd("conv_bwd_data", 4)
