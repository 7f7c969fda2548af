"""What kernels of few channels a group whose pixels come by TMA boxes refuse, which tiles they try, and what these
cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.add_parts import part_elems
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.grouped_variant import Axis, Boxes, OfFilter, Variant
from nbdnn.kernels.cuda.launch import gather_pointers
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s, shared_bytes
from nbdnn.kernels.cuda.tensor_map import TensorMap
from nbdnn.kernels.cuda.window_plan import image
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_WIDTHS = (4, 8, 16, 24, 32, 40, 48, 56, 64)  # channels of a group
_CHUNK = 8  # channels that are copied at least
_MOST_BOX = 256  # elements on an axis
_MOST_WORDS, _MOST_SUMS = 80, 64  # of a filter, and of outputs, in a thread's registers
_MOST_SUMS_OF_FILTER = 112
_MOST_OF_WALK = 56  # rows by taps: of more, a word or two spills, as with a residual and every second row
_REGISTERS, _ALLOCATED = 65536, 128  # of a multiprocessor; threads that get theirs together
_STAGES = range(4, 0, -1)
_NARROW_IMAGE = 8  # columns of a phase
_ROWS, _DOWN, _ALONG = (2, 4, 5, 7, 8, 14), (1, 2), (1, 2, 4)
_CONFIGS, _WORTH_MEASURING = 6, 1.4
_LAUNCH_US = 1.2
_ADDED_US, _ADDED_SHARE = 1.7, 0.8  # of the kernel that adds parts; of a copy of them
_KNOWN = 256


class _Costs(NamedTuple):
    """Microseconds of a tile beside its products, and of each of these with those of the other warps; rates of memory,
    and of boxes from cache, beside a copy's; how much of the first box and of the last tile nothing else hides."""

    tile_us: float
    product_us: float
    copy_share: float
    cache_speed: float
    first: float
    last: float


# Fitted to 30 problems in all configs on an H200, of 2.6 to 40 us: the guess takes 1.01 of the fastest.
_OF_OUTPUTS, _OF_FILTERS = _Costs(0.5, 11.5e-3, 0.75, 0.9, 0.6, 0.85), _Costs(0.2, 9.9e-3, 0.87, 1.5, 0.62, 0.25)


class Integers(NamedTuple):
    """Those of a kernel. A block has one slab of every step-th of `tiles` tiles of all images, of which one has
    tiles_h x tiles_w; the numbers behind these are what `ptx.split` takes. w_*: steps of the filter, in elements;
    part_elems: of its gradient from a part to the next."""

    tiles: int
    step: int
    slabs: int
    tiles_h: int
    tiles_h_by: int
    tiles_h_shift: int
    tiles_w: int
    tiles_w_by: int
    tiles_w_shift: int
    images: int
    channels: int
    pad_h: int
    pad_w: int
    out_rows: int
    out_columns: int
    w_start: int
    w_group: int
    w_out: int
    w_in: int
    w_r: int
    w_s: int
    part_elems: int


def refusal(problem: ConvProblem, device: Gpu) -> str:
    """Why no kernel of boxes is correct here, or ''."""
    if device.capability[0] != 9:
        return f"compute capability {device.capability}: tensor maps are passed as compilers of 9.0 read them"
    if problem.ndim != 2:
        return f"{problem.ndim} spatial axes are not 2"
    if problem.dtype not in ("f16", "bf16"):
        return f"dtype {problem.dtype} is not f16 or bf16"
    widths = problem.c // problem.groups, problem.k // problem.groups
    if problem.groups == 1 or widths[0] != widths[1] or widths[0] not in _WIDTHS:
        wanted = f"this kernel takes {', '.join(map(str, _WIDTHS))}, as many out as in"
        return f"{widths[0]} to {widths[1]} channels in each of {problem.groups} groups, {wanted}"
    if problem.c % _CHUNK:
        return f"{problem.c} channels are not a multiple of {_CHUNK}"
    if not (problem.channels_last and problem.y_channels_last):
        return f"layouts {problem.layout} and {problem.y_layout} are not both channels-last"
    if problem.align < _CHUNK * ITEMSIZE[problem.dtype]:
        return f"alignment of {problem.align} bytes is below {_CHUNK * ITEMSIZE[problem.dtype]}"
    if problem.op == "conv_bwd_data":
        axes = zip(problem.stride, problem.dilation, strict=True)
        if max(problem.stride) > 2 or any(step > 1 and apart > 1 for step, apart in axes):
            return f"stride {problem.stride} and dilation {problem.dilation}, not 1 and 1 or 2 and 1"
    if problem.n == 0 or 0 in (extents := (*problem.spatial, *problem.out_spatial)):
        return f"{problem.n} images of extents {problem.spatial} to {problem.out_spatial}: one of them is 0"
    v = variant(problem, Boxes(2, 1, 1, 1, 1, 1))
    kept, most = (v.sums, _MOST_SUMS_OF_FILTER) if problem.op == "conv_bwd_filter" else (v.words, _MOST_WORDS)
    if kept > most:
        return f"a filter takes {kept} registers of a thread, at most {most} are left"
    if index_bits(problem, ()) != 32 or max(extents) > 1 << 24:
        return f"{max(operand.size_elems for operand in problem.operands)} elements are more than int32 counts"
    return "" if next(_fitting(problem, device), None) else "no tile finds room in shared memory"


def variant(problem: ConvProblem, boxes: Boxes) -> Variant:
    seen = image(problem)
    axes = map(Axis, seen.taps, seen.stride, seen.dilation)
    if problem.op == "conv_bwd_data":
        pads = (before % step for (before, _), step in zip(problem.pad, problem.stride, strict=True))
        axes = map(Axis, seen.taps, (1, 1), seen.dilation, seen.stride, pads)
    down, across = axes
    v = Variant(problem.dtype, boxes, seen.group_in, down, across, problem.epilogue)
    if problem.op != "conv_bwd_filter":
        return v
    rows, columns = seen.outputs
    return OfFilter(*v[:5], (), (rows % v.tile_rows == 0, columns % v.tile_columns == 0))


def tiles(problem: ConvProblem, boxes: Boxes) -> tuple[int, int, int]:
    """(sets of images, rows of tiles, columns of tiles)."""
    v, (rows, columns) = variant(problem, boxes), image(problem).outputs
    return ceil(problem.n / boxes.images), ceil(rows / v.tile_rows), ceil(columns / v.tile_columns)


def slabs(problem: ConvProblem) -> int:
    return ceil(problem.c / variant(problem, Boxes(2, 1, 1, 1, 1, 1)).slab)


def step(problem: ConvProblem, boxes: Boxes, device: Gpu) -> int:
    """Blocks that share the tiles of a slab."""
    return min(prod(tiles(problem, boxes)), max(1, device.sms * boxes.blocks // slabs(problem)))


@lru_cache(_KNOWN)
def configs(problem: ConvProblem, device: Gpu) -> tuple[Boxes, ...]:
    """The best guess first."""
    order = sorted((estimate_us(problem, boxes, device), boxes) for boxes in _fitting(problem, device))
    return tuple(boxes for us, boxes in order[:_CONFIGS] if us <= _WORTH_MEASURING * order[0][0])


def _fitting(problem: ConvProblem, device: Gpu) -> Iterator[Boxes]:
    """All that registers and shared memory have room for."""
    rows_out, columns_out = image(problem).outputs
    across = variant(problem, Boxes(2, 1, 1, 1, 1, 1)).across
    every_images = (1, 2) if columns_out <= _NARROW_IMAGE * across.phases and problem.n > 1 else (1,)
    for rows, down, along, images, blocks in product(_ROWS, _DOWN, _ALONG, every_images, (1, 2)):
        boxes = Boxes(rows, down, along, images, _STAGES[0], blocks)
        v = variant(problem, boxes)
        if (v.sums > _MOST_SUMS and v.words) or (down * along) % v.shares or rows % v.down.phases:
            continue
        spills = v.down.taps * rows > _MOST_OF_WALK or (v.down.stride > 1 and rows > 5 and "res" in v.epilogue)
        beside = (down - 1) * rows >= rows_out or (along - 1) * v.tile_columns // along >= columns_out
        if spills or (beside and down * along > v.shares) or max(v.box) > _MOST_BOX:
            continue
        if ceil(v.registers / 8) * 8 * ceil(v.threads / _ALLOCATED) * _ALLOCATED * blocks > _REGISTERS:
            continue
        for stages in _STAGES:
            deep = v._replace(boxes=boxes._replace(stages=stages))
            if deep.shared_bytes <= shared_bytes(device) and blocks_at_once(deep.shared_bytes, device) >= blocks:
                yield deep.boxes
                break


def estimate_us(problem: ConvProblem, boxes: Boxes, device: Gpu) -> float:
    """Microseconds: memory, boxes from cache and products at once, but for a block's first box and last tile."""
    v, blocks = variant(problem, boxes), step(problem, boxes, device)
    cost = _OF_FILTERS if isinstance(v, OfFilter) else _OF_OUTPUTS
    lines, every = slabs(problem), prod(tiles(problem, boxes))
    per_us = copy_bytes_per_s(device) / 1e6
    moved_us = problem.min_bytes / (cost.copy_share * per_us)
    read_us = every * lines * v.stage_bytes / (cost.cache_speed * per_us)
    tile_us = cost.tile_us + cost.product_us * v.products * boxes.blocks
    first_us = blocks * lines * v.stage_bytes / per_us
    multiplied_us = ceil(every / blocks) * tile_us
    added_us = 0.0
    if isinstance(v, OfFilter):
        added_us = _ADDED_US + _ADDED_SHARE * 8 * blocks * part_elems(problem) / per_us  # written and read
    beside_us = cost.first * first_us + cost.last * tile_us + added_us
    return _LAUNCH_US + max(moved_us, read_us, multiplied_us) + beside_us


def integers(problem: ConvProblem, boxes: Boxes, device: Gpu) -> Integers:
    seen = image(problem)
    _, tiles_h, tiles_w = counts = tiles(problem, boxes)
    of_rows, of_columns = (tiles_h, *reciprocal(tiles_h)), (tiles_w, *reciprocal(tiles_w))
    walk = prod(counts), step(problem, boxes, device), slabs(problem), *of_rows, *of_columns
    v, pads = variant(problem, boxes), list(seen.pad)
    for i, axis in enumerate((v.down, v.across)):
        if axis.phases > 1:
            pads[i] = -(problem.pad[i][0] // axis.phases + axis.first)
    elems = part_elems(problem) if problem.op == "conv_bwd_filter" else 0
    return Integers._make((*walk, problem.n, problem.c, *pads, *seen.outputs, *seen.filter_strides, elems))


def image_map(problem: ConvProblem, box: tuple[int, ...]) -> TensorMap:
    """Of what is gathered: a copy takes a box."""
    return _map(problem, gather_pointers(problem)[0], image(problem).extent, box)


def out_map(problem: ConvProblem, box: tuple[int, ...]) -> TensorMap:
    """Of dy, the same."""
    return _map(problem, 1, problem.out_spatial, box)


def _map(problem: ConvProblem, place: int, extent: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    (rows, columns), pixel_bytes = extent, ITEMSIZE[problem.dtype] * problem.c
    strides_bytes = pixel_bytes, pixel_bytes * columns, pixel_bytes * columns * rows
    return TensorMap(place, problem.dtype, (problem.c, columns, rows, problem.n), strides_bytes, box)
