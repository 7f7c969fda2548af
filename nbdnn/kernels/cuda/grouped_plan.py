"""What kernels of few channels a group whose pixels come by TMA boxes know when they are compiled: tiles, tables, what
each costs, and what is refused.

A block has a *slab* of 64 channels, 128 bytes of a pixel, and takes tile after tile of outputs. A *unit* is as many
filters as read the same 8, 16 or 32 channels: a group, or two of four. Each of eight warps has a unit, or half of one
of 32, and walks down *strips* of the tile: some rows of 16 outputs side by side, or of eight in each of two images.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s, shared_bytes
from nbdnn.kernels.cuda.window_plan import exchanged, image
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

WARP, WARPS = 32, 8  # that multiply; one more asks for boxes
LINE_BYTES, CHUNKS = 128, 8  # of a pixel in shared memory, and its pieces of 16 bytes
SLAB = 64  # channels of a line
ACROSS = 16  # outputs of a strip's row
BARRIER_BYTES = 8
WIDTHS = (4, 8, 16, 32)  # channels of a group
_CHUNK = 8  # channels of a piece
_LINES = 8  # after which the swizzle begins anew
_MOST_BOX = 256  # elements on an axis
_MOST_WORDS = 80  # of a filter, in a thread's registers
_MOST_SUMS = 64
_REGISTERS = 65536  # of a multiprocessor
_STAGES = range(4, 0, -1)
_NARROW_IMAGE = 8  # columns
_ROWS, _DOWN, _ALONG = (2, 4, 5, 7, 8, 14), (1, 2), (1, 2, 4)
_CONFIGS, _WORTH_MEASURING = 6, 1.4
# Fitted to 18 problems in all configs on an H200, of 2.6 to 38 us: of the kernel; of a tile beside its products, and of
# each of these with those of the other warps; rates of memory, and of boxes from cache, beside a copy's; how much of
# the first box and of the last tile nothing else hides.
_LAUNCH_US, _TILE_US, _PRODUCT_US = 1.2, 0.5, 11.5e-3
_SHARE_OF_COPY, _CACHE_SPEED, _FIRST, _LAST = 0.75, 0.9, 0.6, 0.85
_KNOWN = 256


class Boxes(NamedTuple):
    """rows: of a strip; down x along strips are a tile of `images` images. stages: boxes that a block holds; blocks: of
    a multiprocessor."""

    rows: int
    down: int
    along: int
    images: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.rows}:{self.down}x{self.along}x{self.images}:s{self.stages}:b{self.blocks}"

    @property
    def tile_rows(self) -> int:
        return self.rows * self.down

    @property
    def tile_columns(self) -> int:
        return ACROSS // self.images * self.along


class Load(NamedTuple):
    """Of a row of the box, 16 pixels by 16 of k: of the tap `pixels` further on, `chunks` further on in a line. half:
    of the first eight of k alone."""

    pixels: int
    chunks: int
    half: bool


class Walk(NamedTuple):
    """How a strip is multiplied. tiles: of eight filters. masked: the first tile meets the channels of those lanes that
    a mask names, the second those of the others. row_bytes: of the box.

    steps: (row of the box, its load, the rows of outputs that it counts for, each with its first word of the filter,
    after which come those of the other tiles).
    """

    dtype: str
    tiles: int
    masked: bool
    rows: int
    row_bytes: int
    steps: tuple[tuple[int, Load, tuple[tuple[int, int], ...]], ...]


class End(NamedTuple):
    """How sums of a strip are finished. apart: channels between tiles; row_bytes: between rows of outputs in shared
    memory, half_bytes: between a lane's two pixels."""

    dtype: str
    tiles: int
    rows: int
    apart: int
    row_bytes: int
    half_bytes: int
    tokens: tuple[str, ...]


class Variant(NamedTuple):
    """What a kernel is compiled for. width: channels of a group. taps, stride, dilation: by rows and columns."""

    dtype: str
    boxes: Boxes
    width: int
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    epilogue: tuple[str, ...]

    @property
    def unit(self) -> int:
        """Channels that a warp reads of a pixel."""
        return max(self.width, _CHUNK)

    @property
    def tiles(self) -> int:
        """Of eight filters, that a warp has sums of; those of a group of four are half empty."""
        return 1 if self.width == _CHUNK else 2

    @property
    def halves(self) -> int:
        """Warps that share a unit's filters."""
        return max(1, self.unit // (2 * _CHUNK))

    @property
    def units(self) -> int:
        """Of a slab, that have warps of their own."""
        return SLAB // self.unit * self.halves

    @property
    def shares(self) -> int:
        """Warps that share a unit's strips."""
        return WARPS // self.units

    @property
    def box_rows(self) -> int:
        return (self.boxes.tile_rows - 1) * self.stride[0] + (self.taps[0] - 1) * self.dilation[0] + 1

    @property
    def box_columns(self) -> int:
        """With some beyond those that are read: rows begin alike in the swizzle."""
        read = (self.boxes.tile_columns - 1) * self.stride[1] + (self.taps[1] - 1) * self.dilation[1] + 1
        return ceil(read / _LINES) * _LINES

    @property
    def box(self) -> tuple[int, int, int, int]:
        return SLAB, self.box_columns, self.box_rows, self.boxes.images

    @property
    def row_bytes(self) -> int:
        return self.box_columns * LINE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.row_bytes * self.box_rows * self.boxes.images

    @property
    def pixels(self) -> int:
        """Outputs of a tile."""
        return prod(self.boxes[:3]) * ACROSS

    @property
    def shared_bytes(self) -> int:
        """Boxes; two tiles of outputs, of which one is stored while the next is filled; barriers."""
        boxes = self.boxes.stages
        return boxes * (self.stage_bytes + 2 * BARRIER_BYTES) + 2 * self.pixels * LINE_BYTES

    @property
    def loads(self) -> tuple[Load, ...]:
        """Of a row of the box."""
        across = self.dilation[1]
        if self.unit > _CHUNK:
            return tuple(
                Load(s * across, chunk, False)
                for s in range(self.taps[1])
                for chunk in range(0, self.unit // _CHUNK, 2)
            )
        return tuple(Load(s * across, 0, s + 1 == self.taps[1]) for s in range(0, self.taps[1], 2))

    @property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """(r, s, channel) of every word of a filter, in the order of `Walk.steps`."""
        if self.unit > _CHUNK:
            taps = product(range(self.taps[0]), range(self.taps[1]))
            return tuple((r, s, channel) for r, s in taps for channel in range(0, self.unit, _CHUNK))
        return tuple((r, s, 0) for r in range(self.taps[0]) for s in range(self.taps[1]))

    @property
    def words(self) -> int:
        return len(self.places) * self.tiles

    @property
    def walk(self) -> Walk:
        rows, down, apart = self.boxes.rows, self.stride[0], self.dilation[0]
        of_row = self.words // self.taps[0]
        steps = []
        for row in range((rows - 1) * down + (self.taps[0] - 1) * apart + 1):
            seen = [
                (p, r) for p in range(rows) for r in range(self.taps[0]) if row == p * down + r * apart
            ]  # of outputs and taps
            first = 0
            for load in self.loads if seen else ():
                steps.append((row, load, tuple((p, r * of_row + first) for p, r in seen)))
                first += (1 if load.half else 2) * self.tiles
        return Walk(self.dtype, self.tiles, self.width < _CHUNK, rows, self.row_bytes, tuple(steps))

    @property
    def end(self) -> End:
        row_bytes = self.boxes.tile_columns * LINE_BYTES
        half_bytes = _LINES * LINE_BYTES if self.boxes.images == 1 else self.boxes.tile_rows * row_bytes
        apart = min(self.width, _CHUNK)
        return End(self.dtype, self.tiles, self.boxes.rows, apart, row_bytes, half_bytes, self.epilogue)

    @property
    def threads(self) -> int:
        return WARP * (WARPS + 1)

    @property
    def registers(self) -> int:
        """Of a thread, about."""
        walk = self.walk
        return self.words + 4 * walk.rows * walk.tiles + 8 + 40


class Integers(NamedTuple):
    """Those of a kernel. A block has one slab of every step-th of `tiles` tiles of all images, of which one has
    tiles_h x tiles_w; the numbers behind these are what `ptx.split` takes. w_*: steps of the filter, in elements."""

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


def refusal(problem: ConvProblem, device: Gpu) -> str:
    """Why no kernel of boxes is correct here, or ''."""
    if device.capability[0] != 9:
        return f"compute capability {device.capability}: tensor maps are passed as compilers of 9.0 read them"
    if problem.ndim != 2:
        return f"{problem.ndim} spatial axes are not 2"
    if problem.dtype not in ("f16", "bf16"):
        return f"dtype {problem.dtype} is not f16 or bf16"
    widths = problem.c // problem.groups, problem.k // problem.groups
    if problem.groups == 1 or widths[0] != widths[1] or widths[0] not in WIDTHS:
        wanted = f"this kernel takes {', '.join(map(str, WIDTHS))}, as many out as in"
        return f"{widths[0]} to {widths[1]} channels in each of {problem.groups} groups, {wanted}"
    if problem.c % _CHUNK:
        return f"{problem.c} channels are not a multiple of {_CHUNK}"
    if not (problem.channels_last and problem.y_channels_last):
        return f"layouts {problem.layout} and {problem.y_layout} are not both channels-last"
    if problem.align < _CHUNK * ITEMSIZE[problem.dtype]:
        return f"alignment of {problem.align} bytes is below {_CHUNK * ITEMSIZE[problem.dtype]}"
    if exchanged(problem) and problem.stride != (1, 1):
        return f"stride {problem.stride}, windows of dy are those of a convolution where it is 1"
    if problem.n == 0 or 0 in (extents := (*problem.spatial, *problem.out_spatial)):
        return f"{problem.n} images of extents {problem.spatial} to {problem.out_spatial}: one of them is 0"
    words = variant(problem, Boxes(2, 1, 1, 1, 1, 1)).words
    if words > _MOST_WORDS:
        return f"a filter takes {words} registers of a thread, at most {_MOST_WORDS} are left"
    if index_bits(problem, ()) != 32 or max(extents) > 1 << 24:
        return f"{max(operand.size_elems for operand in problem.operands)} elements are more than int32 counts"
    return "" if next(_fitting(problem, device), None) else "no tile finds room in shared memory"


def variant(problem: ConvProblem, boxes: Boxes) -> Variant:
    seen = image(problem)
    return Variant(problem.dtype, boxes, seen.group_in, seen.taps, seen.stride, seen.dilation, problem.epilogue)


def tiles(problem: ConvProblem, boxes: Boxes) -> tuple[int, int, int]:
    """(sets of images, rows of tiles, columns of tiles)."""
    rows, columns = image(problem).outputs
    return ceil(problem.n / boxes.images), ceil(rows / boxes.tile_rows), ceil(columns / boxes.tile_columns)


def step(problem: ConvProblem, boxes: Boxes, device: Gpu) -> int:
    """Blocks that share the tiles of a slab."""
    return min(prod(tiles(problem, boxes)), max(1, device.sms * boxes.blocks // ceil(problem.c / SLAB)))


@lru_cache(_KNOWN)
def configs(problem: ConvProblem, device: Gpu) -> tuple[Boxes, ...]:
    """The best guess first."""
    order = sorted((estimate_us(problem, boxes, device), boxes) for boxes in _fitting(problem, device))
    return tuple(boxes for us, boxes in order[:_CONFIGS] if us <= _WORTH_MEASURING * order[0][0])


def _fitting(problem: ConvProblem, device: Gpu) -> Iterator[Boxes]:
    """All that registers and shared memory have room for."""
    rows_out, columns_out = image(problem).outputs
    every_images = (1, 2) if columns_out <= _NARROW_IMAGE and problem.n > 1 else (1,)
    for rows, down, along, images, blocks in product(_ROWS, _DOWN, _ALONG, every_images, (1, 2)):
        boxes = Boxes(rows, down, along, images, _STAGES[0], blocks)
        v = variant(problem, boxes)
        if 4 * rows * v.tiles > _MOST_SUMS or (down * along) % v.shares:
            continue
        beside = (down - 1) * rows >= rows_out or (along - 1) * ACROSS // images >= columns_out
        if (beside and down * along > v.shares) or max(v.box) > _MOST_BOX:
            continue
        if ceil(v.registers / 8) * 8 * v.threads * blocks > _REGISTERS:
            continue
        for stages in _STAGES:
            deep = v._replace(boxes=boxes._replace(stages=stages))
            if deep.shared_bytes <= shared_bytes(device) and blocks_at_once(deep.shared_bytes, device) >= blocks:
                yield deep.boxes
                break


def estimate_us(problem: ConvProblem, boxes: Boxes, device: Gpu) -> float:
    """Microseconds: memory, boxes from cache and products at once, but for a block's first box and last tile."""
    v, blocks = variant(problem, boxes), step(problem, boxes, device)
    slabs, every = ceil(problem.c / SLAB), prod(tiles(problem, boxes))
    per_us = copy_bytes_per_s(device) / 1e6
    moved_us = problem.min_bytes / (_SHARE_OF_COPY * per_us)
    read_us = every * slabs * v.stage_bytes / (_CACHE_SPEED * per_us)
    products = sum((0.5 if load.half else 1.0) * len(table) for _, load, table in v.walk.steps) * v.tiles
    strips = boxes.down * boxes.along // v.shares
    tile_us = _TILE_US + _PRODUCT_US * products * strips * boxes.blocks
    first_us = blocks * slabs * v.stage_bytes / per_us
    multiplied_us = ceil(every / blocks) * tile_us
    return _LAUNCH_US + max(moved_us, read_us, multiplied_us) + _FIRST * first_us + _LAST * tile_us
