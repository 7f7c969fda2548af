"""Implicit matrix product in IEEE float32 on the FMA units: forward and bwd_data of any stride, dilation and layout.

    C[m, n] = sum over taps, c of  A[tap, c, m] * B[tap, c, n]      m: output pixels, n: output channels of a group

A is read from the image where the taps reach it, nothing is lowered: a block knows where each of its pixels lies, and a
tap moves all of them by the same distance; taps are outermost, so a stage of 8 channels costs an addition. bwd_data of
stride u is u such products an axis, one for each residue of the output position, which meets every u-th tap or none.
Sums that are too long for the few tiles of a small problem are split, and their parts added in fixed order.

B is the filter as it lies in memory, where its input or output channels are contiguous; else it is turned first.
Traffic: a tile of M x N outputs loads M + N elements for M * N products. Accumulates in float32, one rounding a product
and sum. Source: own; the product is that of `fma_tile.py`, the kernel that of `fma_gather.py`.
"""

from __future__ import annotations

from math import ceil, gcd, prod

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3, tensor_strides
from nbdnn.kernels.cuda import fma_plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.fma_gather import Fields, Variant, gather_kernel
from nbdnn.kernels.cuda.fma_plan import Config, Product
from nbdnn.kernels.cuda.fma_store import Store
from nbdnn.kernels.cuda.fma_tile import STAGE_K, Copies, Tile
from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch, LaunchedCandidate, gather_pointers
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.turn_filter import turn_filter, turned_elems, turned_strides
from nbdnn.problem_conv import ConvProblem

_TILES = (Tile(128, 128), Tile(128, 64), Tile(64, 64))
_FEWEST_CHANNELS = 4  # of a group's input: a stage has 8
_INT32_END = 2**31 - 2**16  # what an index reaches: the last tile counts on beyond the last pixel
_MOST_BLOCKS = 65535  # of a grid's second and third extent


def refusal(problem: ConvProblem) -> str:
    """Why the kernels of this family are not correct on a problem, with the number that says so; or ''."""
    if problem.dtype != "f32":
        return f"dtype is {problem.dtype}, this kernel multiplies f32"
    for name, channels in (("input", problem.c), ("output", problem.k)):
        if channels // problem.groups < _FEWEST_CHANNELS:
            return f"{channels // problem.groups} {name} channels a group, this kernel takes {_FEWEST_CHANNELS} or more"
    if problem.groups > _MOST_BLOCKS:
        return f"groups is {problem.groups}, a grid has at most {_MOST_BLOCKS}"
    padded = [extent + sum(pad) for extent, pad in zip(problem.spatial, problem.pad, strict=True)]
    workspace = fma_plan.MOST_PART_BYTES // 4 + 2 * prod(problem.w_shape)
    largest = max(*(operand.size_elems for operand in problem.operands), *(2 * extent for extent in padded), workspace)
    return f"an index reaches {largest}, this kernel's end at {_INT32_END}" if largest >= _INT32_END else ""


class Gemm(LaunchedCandidate[Config]):
    """Forward or bwd_data."""

    algorithm, algo = "fma_gemm", "small"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := refusal(problem):
            return Support(False, reason)
        if (classes := prod(_classes(problem))) * fma_plan.MOST_PARTS > _MOST_BLOCKS:
            return Support(False, f"{classes} residue classes, this kernel takes {_MOST_BLOCKS // fma_plan.MOST_PARTS}")
        return YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        return fma_plan.configs(_product(problem), _TILES, device)

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        return 4 * (_parts_elems(problem, config) + (turned_elems(problem) if _is_turned(problem) else 0))

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        us = fma_plan.product_us(_product(problem), config, device)
        if _is_turned(problem):
            us += fma_plan.LAUNCH_US + 2 * 4 * turned_elems(problem) / copy_bytes_per_s(device) * 1e6
        return max(us, problem.min_bytes / copy_bytes_per_s(device) * 1e6)

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        turn = [turn_filter(problem, _parts_elems(problem, config))] if _is_turned(problem) else []
        add = [add_parts(problem, config.parts)] if config.parts > 1 else []
        return [*turn, _gather_launch(problem, config), *add]


def _classes(problem: ConvProblem) -> tuple[int, ...]:
    """Residue classes of the output positions on each axis."""
    if problem.op == "conv_fwd":
        return (1, 1, 1)
    return tuple(min(pair) for pair in zip(spatial3(problem.stride), spatial3(problem.spatial), strict=True))


def _product(problem: ConvProblem) -> Product:
    """Of the classes that taps reach the one with the most outputs stands for all, with as many as they have on
    average."""
    forward = problem.op == "conv_fwd"
    axes = zip(_classes(problem), *map(spatial3, (problem.filter, problem.stride, problem.dilation)), strict=True)
    reached = prod(min(classes, taps, stride // gcd(stride, dilation)) for classes, taps, stride, dilation in axes)
    k, c = problem.k // problem.groups, problem.c // problem.groups
    group_out, group_in = (k, c) if forward else (c, k)
    return Product(
        problem.groups * reached,
        _pixels(problem),
        group_out,
        ceil(prod(problem.filter) * ceil(group_in / STAGE_K) / reached),
        problem.operands[2].size_elems,
        lone=fma_plan.LONE,
    )


def _pixels(problem: ConvProblem) -> int:
    """Outputs of the largest class."""
    out = spatial3(problem.operands[2].shape[2:])
    steps = (1, 1, 1) if problem.op == "conv_fwd" else spatial3(problem.stride)
    return problem.n * prod(ceil(extent / step) for extent, step in zip(out, steps, strict=True))


def _is_turned(problem: ConvProblem) -> bool:
    """Whether neither channel axis of the filter is contiguous."""
    return not problem.w_channels_last and prod(problem.filter) > 1


def _parts_elems(problem: ConvProblem, config: Config) -> int:
    return config.parts * part_elems(problem) if config.parts > 1 else 0


def _gather_launch(problem: ConvProblem, config: Config) -> Launch:
    fields, tile = _fields(problem, config), config.tile
    image, w, *output = gather_pointers(problem)
    variant = _variant(problem, fields, config)
    tiles = ceil(_pixels(problem) / tile.m) * fields.tiles_n
    return Launch(
        source=Source(gather_kernel, variant, tile.threads, tile.min_blocks),
        grid=(tiles, problem.groups, prod(_classes(problem)) * config.parts),
        pointers=(
            image,
            WORKSPACE if _is_turned(problem) else w,
            *((WORKSPACE, NULL, NULL) if variant.store.parts else output),
        ),
        scalars="f32",
        integers=fields,
    )


def _variant(problem: ConvProblem, f: Fields, config: Config) -> Variant:
    """Sixteen bytes at a time where everything is a multiple of that."""
    classes, wide = problem.op == "conv_bwd_data" and max(problem.stride) > 1, problem.align % 16 == 0
    counts, extents = (f.count_d, f.count_h, f.count_w), (f.extent_d, f.extent_h, f.extent_w)
    pixels = prod(counts)
    one_to_one = prod(problem.filter) == 1 and counts == extents and not any((f.offset_d, f.offset_h, f.offset_w))
    image_words = 4 if wide and one_to_one and not classes and pixels % 4 == 0 else 1
    taps = ((f.taps_d, f.w_t), (f.taps_h, f.w_r), (f.taps_w, f.w_s))
    steps = (f.group_out, f.w_i, *(step for extent, step in taps if extent > 1))
    filter_words = 4 if _is_turned(problem) or (wide and not any(step % 4 for step in steps)) else 1
    last = problem.y_channels_last
    store_words = 4 if wide and not (f.group_out if last else pixels) % 4 and (last or not classes) else 1
    image_along_k, filter_along_k = problem.channels_last, f.w_o != 1
    return Variant(
        config.tile,
        Copies(config.tile.m, image_along_k, 1 if image_along_k else image_words),
        Copies(config.tile.n, filter_along_k, 1 if filter_along_k else filter_words),
        Store(last, store_words, config.parts > 1, () if config.parts > 1 else problem.epilogue),
        classes,
    )


def _fields(problem: ConvProblem, config: Config) -> Fields:
    forward = problem.op == "conv_fwd"
    k, c = problem.k // problem.groups, problem.c // problem.groups
    source, target = (problem.operands[0], problem.operands[2]) if forward else problem.operands[1:3]
    group_out, group_in = (k, c) if forward else (c, k)
    stride, dilation = spatial3(problem.stride), spatial3(problem.dilation)
    before = spatial3(tuple(pad for pad, _ in problem.pad), 0)
    common = tuple(map(gcd, stride, dilation))
    ones = (1, 1, 1)
    in_strides = tensor_strides(source.shape, problem.channels_last)
    out_strides = tensor_strides(target.shape, problem.y_channels_last)
    return Fields._make((
        problem.n, group_out, group_in, ceil(group_out / config.tile.n), config.parts, part_elems(problem),
        *spatial3(target.shape[2:]), 0, group_out * out_strides[1], *out_strides,
        *(ones if forward else stride),
        group_in * in_strides[1], *in_strides, *spatial3(source.shape[2:]),
        *(stride if forward else ones),
        *(tuple(-pad for pad in before) if forward else before),
        *(dilation if forward else tuple(-d // g for d, g in zip(dilation, common, strict=True))),
        *_filter_strides(problem, config), *spatial3(problem.filter), *dilation,
        *(ones if forward else tuple(u // g for u, g in zip(stride, common, strict=True))),
    ))  # fmt: skip


def _filter_strides(problem: ConvProblem, config: Config) -> tuple[int, ...]:
    """(start, group, output channel, input channel, t, r, s), as the product sees them."""
    if _is_turned(problem):
        start, *strides = turned_strides(problem)
        return start + _parts_elems(problem, config), *strides
    start, w_k, w_c, *w_taps = filter_strides(problem)
    w_g = w_k * (problem.k // problem.groups)
    return start, w_g, *((w_k, w_c) if problem.op == "conv_fwd" else (w_c, w_k)), *w_taps


FWD, BWD_DATA = Gemm("conv_fwd"), Gemm("conv_bwd_data")
