"""What depthwise kernels whose pixels come by TMA boxes know when they are compiled: tiles, shared memory, what each
costs, and what is refused.

A tile is outputs of a slab of channels. A box is the pixels that it reads, with their halo, as they lie in memory. A
thread has a *strip* of the tile: a vector of channels of a few columns, down some rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import depthwise_plan
from nbdnn.kernels.cuda.boxes_ring import BARRIER_BYTES
from nbdnn.kernels.cuda.depthwise_plan import MOST_PRODUCTS, unit_stride_gather, unit_stride_refusal
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

WARP = 32
_CHUNK_BYTES = 16  # of which TMA copies a whole number
_ALIGN_BYTES = 128  # of a box in shared memory
_MOST_BOX = 256  # elements on an axis
_MOST_TAPS = 5  # rows of a filter, and taps of a row
_REGISTERS = 65536  # of a multiprocessor
_MOST_THREADS = 512
_STAGES = range(2, 7)
_BANKS_BYTES = 128
_KNOWN = 256

_ROWS, _STRIPS_H = (4, 5, 7, 8, 14), (1, 2, 4)
_FEW_COLUMNS = 12  # of a tile
_FLAT_ROWS = 16  # of a tile whose halo counts
_WASTE = 1.08
_SECTOR_BYTES = 32  # of what memory is read in
_CONFIGS = 6  # worth measuring
_WORTH_MEASURING = 1.3  # times the best guess
# Fitted to 120 times of 5 to 37 us on an H200, which they meet within 4 % on average.
_LAUNCH_US = 1.2
_HALO_SHARE = 0.39  # of what reading it from memory would take: it is in cache
_CACHE_SPEED = 1.47  # times that of memory
_SCHEDULERS, _TILE_CYCLES = 4, 610  # what a tile takes beside its instructions, with other blocks of a multiprocessor
_HIDDEN, _HIDDEN_A_WARP = 0.6, 0.16  # of a warp's cycles, where there are so many on a scheduler
_IN_FLIGHT_BYTES = 33 << 10  # on their way to a multiprocessor at once, for it to have its share of the memory


class Boxes(NamedTuple):
    """rows, columns: of a strip; strips_h x strips_w of them, and `channels`, are a tile. stages: boxes that a block
    holds; blocks: of a multiprocessor."""

    rows: int
    columns: int
    strips_h: int
    strips_w: int
    channels: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        strips = f"{self.strips_h}x{self.strips_w}"
        return f"{self.rows}x{self.columns}:{strips}:c{self.channels}:s{self.stages}:b{self.blocks}"

    @property
    def tile_rows(self) -> int:
        return self.rows * self.strips_h

    @property
    def tile_columns(self) -> int:
        return self.columns * self.strips_w


class Variant(NamedTuple):
    """What a kernel is compiled for. reversed_: a filter's last tap comes first."""

    dtype: str
    boxes: Boxes
    taps_h: int
    taps_w: int
    reversed_: bool
    epilogue: tuple[str, ...]

    @property
    def taps(self) -> int:
        return self.taps_h * self.taps_w

    @property
    def lanes(self) -> int:
        """Channels of a vector: of few taps, all weights of four channels fit into registers."""
        return 4 if self.taps <= 9 else 2

    @property
    def vectors(self) -> int:
        """Of a slab."""
        return self.boxes.channels // self.lanes

    @property
    def warps(self) -> int:
        """That have strips."""
        return ceil(self.vectors * self.boxes.strips_h * self.boxes.strips_w / WARP)

    @property
    def threads(self) -> int:
        """One warp more asks for boxes."""
        return WARP * (self.warps + 1)

    @property
    def box_rows(self) -> int:
        return self.boxes.tile_rows + self.taps_h - 1

    @property
    def pixel_bytes(self) -> int:
        return self.boxes.channels * ITEMSIZE[self.dtype]

    @property
    def layout(self) -> Layout:
        return _layout(self.boxes[:4], self.vectors, self.lanes * ITEMSIZE[self.dtype], self.taps_w)

    @property
    def box_columns(self) -> int:
        return self.layout.columns

    @property
    def down_first(self) -> bool:
        return self.layout.down_first

    @property
    def box(self) -> tuple[int, int, int, int]:
        return self.boxes.channels, self.box_columns, self.box_rows, 1

    @property
    def box_bytes(self) -> int:
        return prod(self.box) * ITEMSIZE[self.dtype]

    @property
    def stage_bytes(self) -> int:
        return ceil(self.box_bytes / _ALIGN_BYTES) * _ALIGN_BYTES

    @property
    def shared_bytes(self) -> int:
        """Boxes, and behind them barriers: one that a box is there, one that it may be overwritten."""
        return self.boxes.stages * (self.stage_bytes + 2 * BARRIER_BYTES)

    @property
    def registers(self) -> int:
        """Of a thread, about: weights, sums of as many rows as there are rows of taps, a row of inputs, addresses."""
        columns = self.boxes.columns
        return self.lanes * (self.taps + self.taps_h * columns + columns + self.taps_w - 1) + 24

    @property
    def loads(self) -> int:
        """Of a strip, from shared memory."""
        return (self.boxes.rows + self.taps_h - 1) * (self.boxes.columns + self.taps_w - 1)

    @property
    def instructions(self) -> int:
        """Of a strip, about."""
        widening = 0 if self.dtype == "f32" else self.lanes
        outputs = self.boxes.rows * self.boxes.columns
        return outputs * (self.lanes * (self.taps + 2) + 7) + self.loads * (1 + widening) + 60


class Layout(NamedTuple):
    """How a box lies under its strips. rounds: in which shared memory answers a warp's loads. columns: of the box, of
    which the last may be one more than are read. down_first: whether neighbouring threads are below each other."""

    rounds: int
    columns: int
    down_first: bool


@lru_cache(1024)
def _layout(strips: tuple[int, ...], vectors: int, vector_bytes: int, taps_w: int) -> Layout:
    """The layout that keeps neighbouring strips apart in banks. strips: the first fields of `Boxes`."""
    _, columns, _, strips_w = strips
    least = columns * strips_w + taps_w - 1
    choices = product((least, least + 1), (False, True))
    return min(Layout(_rounds(strips, vectors, vector_bytes, *choice), *choice) for choice in choices)


def _rounds(strips: tuple[int, ...], vectors: int, vector_bytes: int, box_columns: int, down_first: bool) -> int:
    """Of the loads of a vector by each lane of the first warp: banks are met once a round."""
    rows, columns, strips_h, strips_w = strips
    places = []
    for thread in range(WARP):
        group, vector = divmod(thread, vectors)
        first, second = divmod(group, strips_h if down_first else strips_w)
        down, along = (second, first) if down_first else (first, second)
        pixel = down * rows * box_columns + along * columns
        places.append((pixel * vectors + vector) * vector_bytes)
    at_once = min(WARP, _BANKS_BYTES // vector_bytes)
    rounds = 0
    for start in range(0, WARP, at_once):
        banks = [place % _BANKS_BYTES for place in places[start : start + at_once]]
        rounds += max(map(banks.count, banks))
    return rounds


class Walk(NamedTuple):
    """The integers of a kernel. A block has one slab of channels of every step-th of `tiles` tiles of all images, of
    which one has tiles_h x tiles_w; the numbers behind these are what `ptx.split` takes."""

    tiles: int
    step: int
    slabs: int
    tiles_h: int
    tiles_h_by: int
    tiles_h_shift: int
    tiles_w: int
    tiles_w_by: int
    tiles_w_shift: int
    channels: int
    pad_h: int
    pad_w: int
    out_rows: int
    out_columns: int


def refusal(problem: ConvProblem, device: Gpu) -> str:
    """Why no kernel of boxes is correct here, or ''."""
    if device.capability[0] != 9:
        return f"compute capability {device.capability}: tensor maps are passed as compilers of 9.0 read them"
    if refused := unit_stride_refusal(problem, ("f16", "bf16", "f32"), _MOST_TAPS):
        return refused
    if not (problem.channels_last and problem.y_channels_last):
        return f"layouts {problem.layout} and {problem.y_layout} are not both channels-last"
    if problem.c % (chunk := _CHUNK_BYTES // ITEMSIZE[problem.dtype]):
        return f"{problem.c} channels are not a multiple of {chunk}"
    if problem.align < _CHUNK_BYTES:
        return f"alignment of {problem.align} bytes is below {_CHUNK_BYTES}"
    if 0 in (extents := (*problem.spatial, *problem.out_spatial)):
        return f"extents {extents}: one of them is 0"
    return ""


def variant(problem: ConvProblem, boxes: Boxes) -> Variant:
    (taps_h, taps_w), (*_, reversed_) = problem.filter, unit_stride_gather(problem)
    return Variant(problem.dtype, boxes, taps_h, taps_w, reversed_, problem.epilogue)


def tiles(problem: ConvProblem, boxes: Boxes) -> tuple[int, int, int]:
    """(rows of tiles, columns of tiles, slabs of channels) of an image."""
    rows, columns = unit_stride_gather(problem)[1]
    return ceil(rows / boxes.tile_rows), ceil(columns / boxes.tile_columns), ceil(problem.c / boxes.channels)


def step(problem: ConvProblem, boxes: Boxes, device: Gpu) -> int:
    """Blocks that share the tiles of a slab."""
    tiles_h, tiles_w, slabs = tiles(problem, boxes)
    return min(problem.n * tiles_h * tiles_w, max(1, device.sms * boxes.blocks // slabs))


@lru_cache(_KNOWN)
def configs(problem: ConvProblem, device: Gpu) -> tuple[Boxes, ...]:
    """The best guess first; of those of one kind, which differ little, the best."""
    best: dict[tuple, tuple[float, Boxes]] = {}
    for boxes in _fitting(problem, device):
        guess = estimate_us(problem, boxes, device), boxes
        kind = boxes.columns, boxes.rows, boxes.tile_rows > _FLAT_ROWS, boxes.channels, boxes.blocks
        best[kind] = min(best.get(kind, guess), guess)
    order = sorted(best.values())
    return tuple(boxes for us, boxes in order[:_CONFIGS] if us <= _WORTH_MEASURING * order[0][0])


def _fitting(problem: ConvProblem, device: Gpu) -> Iterator[Boxes]:
    """All that threads, registers and shared memory have room for."""
    out_rows, out_columns = unit_stride_gather(problem)[1]
    pairs = product((2, 4), range(1, ceil(out_columns / _FEW_COLUMNS) + 1))
    widths = _least_waste(
        out_columns, {(columns, ceil(out_columns / (tiles_w * columns))) for columns, tiles_w in pairs}
    )
    heights = _least_waste(out_rows, {(min(rows, out_rows), n) for rows, n in product(_ROWS, _STRIPS_H)})
    for (columns, strips_w), (rows, strips_h), slab, blocks in product(widths, heights, _slabs(problem), (1, 2)):
        boxes = Boxes(rows, columns, strips_h, strips_w, slab, _STAGES[0], blocks)
        v = variant(problem, boxes)
        if v.threads * blocks > _MOST_THREADS or _registers(v) * v.threads * blocks > _REGISTERS:
            continue
        if boxes.tile_columns + v.taps_w > _MOST_BOX or rows * columns * v.lanes * v.taps > MOST_PRODUCTS:
            continue
        # More stages than a block has tiles would not be filled, nor more blocks than there are tiles.
        tiles_of_block = ceil(problem.n * prod(tiles(problem, boxes)[:2]) / step(problem, boxes, device))
        if blocks > 1 and problem.n * prod(tiles(problem, boxes)) <= device.sms:
            continue
        for stages in reversed(_STAGES):
            deep = v._replace(boxes=boxes._replace(stages=stages))
            fits = deep.shared_bytes <= shared_bytes(device) and blocks_at_once(deep.shared_bytes, device) >= blocks
            if fits and stages <= max(_STAGES[0], tiles_of_block):
                yield deep.boxes
                break


def _least_waste(extent: int, strips: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of pairs (outputs of a strip, strips of a tile) those that cover an extent with few outputs beside it."""
    covered = {each: ceil(extent / prod(each)) * prod(each) for each in strips}
    most = _WASTE * min(covered.values())
    return sorted(each for each in strips if covered[each] <= most and (each[1] - 1) * each[0] < extent)


def _registers(v: Variant) -> int:
    return ceil(v.registers / 8) * 8


def _slabs(problem: ConvProblem) -> list[int]:
    """Channels that share the problem's evenly, in whole chunks: 64 to 288 bytes of a pixel, or all there are. Whole
    sectors, if there are any: others took a fifth longer."""
    size_bytes = ITEMSIZE[problem.dtype]
    chunk = _CHUNK_BYTES // size_bytes
    even = {ceil(problem.c / slabs / chunk) * chunk for slabs in range(1, problem.c // chunk + 1)}
    found = sorted(
        slab for slab in even if 64 <= slab * size_bytes <= 288 or (slab * size_bytes < 64 and slab == problem.c)
    )
    return [slab for slab in found if slab * size_bytes % _SECTOR_BYTES == 0] or found


def estimate_us(problem: ConvProblem, boxes: Boxes, device: Gpu) -> float:
    """Microseconds: bytes and instructions at once, but for the first box and the last tile of a block."""
    v = variant(problem, boxes)
    tiles_h, tiles_w, slabs = tiles(problem, boxes)
    every, blocks = problem.n * tiles_h * tiles_w, step(problem, boxes, device)
    of_shared = v.warps * v.loads * v.layout.rounds + v.box_bytes / _BANKS_BYTES
    warps = ceil(v.warps * boxes.blocks / _SCHEDULERS)
    issued = warps * v.instructions / min(1.0, _HIDDEN + _HIDDEN_A_WARP * warps)
    tile_us = (issued + boxes.blocks * of_shared + _TILE_CYCLES / boxes.blocks) / device.clock_hz * 1e6
    per_us = copy_bytes_per_s(device) / 1e6
    image_bytes = ITEMSIZE[problem.dtype] * problem.n * problem.c * prod(unit_stride_gather(problem)[0])
    halo_bytes = max(0, every * slabs * v.box_bytes - image_bytes)
    moved = problem.min_bytes + _HALO_SHARE * halo_bytes, (problem.min_bytes + halo_bytes) / _CACHE_SPEED
    under_way = (boxes.stages - 1) * v.box_bytes * boxes.blocks
    memory_us = max(moved) / per_us * max(1.0, 0.5 + 0.5 * _IN_FLIGHT_BYTES / under_way)
    rounds_of_tiles = ceil(every / blocks)
    first_us = blocks * slabs * v.box_bytes / per_us
    return _LAUNCH_US + max(memory_us + tile_us, first_us + rounds_of_tiles * tile_us)


def rows_of(v: Variant) -> tuple[tuple[int, ...], tuple]:
    """Of `ptx_vector_rows.Rows`: offsets of a row's vectors, and steps, each a row of the box with its products and the
    row of sums that it completes."""
    rows, columns = v.boxes.rows, v.boxes.columns
    across = depthwise_plan.row(
        depthwise_plan.reaches(True, depthwise_plan.Axis(v.taps_w, 1, 0, 1), columns), v.lanes, True
    )
    of_row, of_taps = columns * v.lanes, v.taps_w * v.lanes
    steps = tuple(
        (
            position,
            tuple(
                (p * of_row + i, j, (position - p) * of_taps + k)
                for p in range(max(0, position - v.taps_h + 1), min(rows, position + 1))
                for i, j, k in across.products
            ),
            (position - v.taps_h + 1,) if position >= v.taps_h - 1 else (),
        )
        for position in range(rows + v.taps_h - 1)
    )
    return across.offsets, steps
