"""What kernels of few channels a group whose pixels come by TMA boxes are compiled for: tiles, tables of what meets.

A block has a *slab* of up to 64 channels, 128 bytes of a pixel, and takes tile after tile of outputs. A *unit* is as
many filters as read the same channels: a group, or two of four. Each of eight warps has a unit, or a part of one, and
walks down *strips* of the tile: some rows of 16 outputs side by side, or of eight in each of two images.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.kernels.cuda.boxes_ring import BARRIER_BYTES

WARP, WARPS = 32, 8  # that multiply; one more asks for boxes
LINE_BYTES, CHUNKS = 128, 8  # of a pixel in shared memory, and its pieces of 16 bytes
SLAB = 64  # channels of a line
ACROSS = 16  # outputs of a strip's row
_CHUNK = 8  # channels of a piece
_LINES = 8  # after which the swizzle begins anew


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


class Axis(NamedTuple):
    """How outputs meet pixels along an axis. phases: the stride of a bwd_data, of which outputs of a phase lie so many
    apart, see pixels side by side, and meet every so many-th tap; shift: its pad, modulo them."""

    taps: int
    stride: int
    dilation: int
    phases: int = 1
    shift: int = 0

    @property
    def first(self) -> int:
        """The first pixel that outputs from 0 on meet, of a bwd_data; else 0."""
        return 0 if self.phases == 1 else min(pixel for met in self._phased for pixel, _ in met)

    @property
    def meets(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(pixel, tap) of each phase's output 0, in the order of pixels, which count from the first."""
        if self.phases == 1:
            return (tuple((tap * self.dilation, tap) for tap in range(self.taps)),)
        return tuple(tuple(sorted((pixel - self.first, tap) for pixel, tap in met)) for met in self._phased)

    @property
    def _phased(self) -> list[list[tuple[int, int]]]:
        """Taps in reverse, as filters of a bwd_data are read."""
        every = [
            [(phase + self.shift - r, self.taps - 1 - r) for r in range(self.taps)] for phase in range(self.phases)
        ]
        return [[(at // self.phases, tap) for at, tap in met if at % self.phases == 0] for met in every]

    def pixels(self, outputs: int) -> int:
        """That so many outputs read."""
        return (ceil(outputs / self.phases) - 1) * self.stride + max(at for met in self.meets for at, _ in met) + 1


class Load(NamedTuple):
    """Of a row of the box, 16 pixels by 16 of k: of the tap `pixels` further on, `chunks` further on in a line. half:
    of the first eight of k alone."""

    pixels: int
    chunks: int
    half: bool


class Column(NamedTuple):
    """A load, the phase of the columns of outputs that it counts for, and (tap of a row, channel) of every eight of
    k."""

    load: Load
    phase: int
    places: tuple[tuple[int, int], ...]


Steps = tuple[tuple[int, Load, tuple[tuple[int, int], ...]], ...]


class Walk(NamedTuple):
    """How a strip is multiplied. tiles: of eight filters. masked: the first tile meets the channels of those lanes that
    a mask names, the second those of the others. row_bytes: of the box.

    rows: of outputs, of one phase of columns after the other. steps: (row of the box, its load, the rows of outputs
    that it counts for, each with its first word of the filter, after which come those of the other tiles).
    """

    dtype: str
    tiles: int
    masked: bool
    rows: int
    row_bytes: int
    steps: Steps


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


class Gather(NamedTuple):
    """How a strip is multiplied into a filter's gradient. tiles: of eight filters. out_row_bytes: of dy in shared
    memory. whole: whether all rows of outputs of a strip exist, and all columns.

    steps: (row of x, its load, the rows of dy that it is multiplied by, each with its first sums, after which come
    those of the other tiles).
    """

    dtype: str
    tiles: int
    row_bytes: int
    out_row_bytes: int
    whole: tuple[bool, bool]
    steps: Steps


class Variant(NamedTuple):
    """What a kernel is compiled for. width: channels of a group. down, across: what rows do, and columns. whole: of a
    gradient of filters, whether tiles divide the outputs' rows and columns."""

    dtype: str
    boxes: Boxes
    width: int
    down: Axis
    across: Axis
    epilogue: tuple[str, ...]
    whole: tuple[bool, bool] = (True, True)

    @property
    def unit(self) -> int:
        """Channels that a warp reads of a pixel."""
        return max(self.width, _CHUNK)

    @property
    def slab(self) -> int:
        """Channels of a block: whole units of a line."""
        return SLAB // self.unit * self.unit

    @property
    def tiles(self) -> int:
        """Of eight filters, that a warp has sums of; those of a group of four are half empty."""
        return 2 if self.width in (_CHUNK // 2, 2 * _CHUNK, 4 * _CHUNK) else 1

    @property
    def splits(self) -> int:
        """Warps that share a unit's filters."""
        return max(1, self.unit // (_CHUNK * self.tiles))

    @property
    def units(self) -> int:
        """Of a slab, each with its splits: warps that have filters of their own."""
        return SLAB // self.unit * self.splits

    @property
    def shares(self) -> int:
        """Warps that share a unit's strips."""
        return WARPS // self.units

    @property
    def tile_rows(self) -> int:
        """Of outputs."""
        return self.boxes.rows * self.boxes.down

    @property
    def tile_columns(self) -> int:
        return ACROSS // self.boxes.images * self.boxes.along * self.across.phases

    @property
    def box_rows(self) -> int:
        return self.down.pixels(self.tile_rows)

    @property
    def box_columns(self) -> int:
        """With some beyond those that are read: rows begin alike in the swizzle."""
        return ceil(self.across.pixels(self.tile_columns) / _LINES) * _LINES

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
        return prod(self.boxes[:3]) * ACROSS * self.across.phases

    @property
    def shared_bytes(self) -> int:
        """Boxes; two tiles of outputs, of which one is stored while the next is filled; barriers."""
        boxes = self.boxes.stages
        return boxes * (self.stage_bytes + 2 * BARRIER_BYTES) + 2 * self.pixels * LINE_BYTES

    @property
    def columns(self) -> tuple[Column, ...]:
        found: list[Column] = []
        for phase, met in enumerate(self.across.meets):
            if self.unit > _CHUNK:
                chunks = range(self.unit // _CHUNK)
                found += [
                    Column(
                        Load(pixel, chunk, chunk + 1 == len(chunks)),
                        phase,
                        tuple((tap, _CHUNK * each) for each in chunks[chunk : chunk + 2]),
                    )
                    for pixel, tap in met
                    for chunk in chunks[::2]
                ]
            else:
                pairs = [met[i : i + 2] for i in range(0, len(met), 2)]
                found += [
                    Column(Load(pair[0][0], 0, len(pair) == 1), phase, tuple((tap, 0) for _, tap in pair))
                    for pair in pairs
                ]
        return tuple(found)

    @property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """(r, s, channel) of every word of a filter, in the order of `Walk.steps`."""
        return tuple((r, *place) for r in range(self.down.taps) for column in self.columns for place in column.places)

    @property
    def words(self) -> int:
        return len(self.places) * self.tiles

    def _steps(self, of_column: Callable[[Column], int]) -> Steps:
        """Of a walk. of_column: how many words, or sums, a column's load is multiplied with."""
        rows, down = self.boxes.rows, self.down
        of_row, steps = sum(map(of_column, self.columns)), []
        for row in range(down.pixels(rows)):
            # Of outputs and taps.
            seen = [
                (p, r)
                for p in range(rows)
                for pixel, r in down.meets[p % down.phases]
                if row == p // down.phases * down.stride + pixel
            ]
            first = 0
            tables: dict[Load, list[tuple[int, int]]] = {}
            for column in self.columns if seen else ():
                table = tables.setdefault(column.load, [])
                table += [(column.phase * rows + p, r * of_row + first) for p, r in seen]
                first += of_column(column)
            steps += [(row, load, tuple(each)) for load, each in tables.items()]
        return tuple(steps)

    @property
    def walk(self) -> Walk:
        steps = self._steps(lambda column: len(column.places) * self.tiles)
        rows = self.boxes.rows * self.across.phases
        return Walk(self.dtype, self.tiles, self.width < _CHUNK, rows, self.row_bytes, steps)

    @property
    def products(self) -> float:
        """Of 16 by 8 by 16, that a warp makes of a tile."""
        of_strip = sum((0.5 if load.half else 1.0) * len(table) for _, load, table in self.walk.steps) * self.tiles
        return of_strip * (self.boxes.down * self.boxes.along // self.shares)

    @property
    def sums(self) -> int:
        """Of a thread."""
        return 4 * self.boxes.rows * self.across.phases * self.tiles

    @property
    def end(self) -> End:
        row_bytes = self.tile_columns * LINE_BYTES
        half_bytes = _LINES * self.across.phases * LINE_BYTES
        if self.boxes.images > 1:
            half_bytes = self.tile_rows * row_bytes
        apart = min(self.width, _CHUNK)
        return End(self.dtype, self.tiles, self.boxes.rows, apart, row_bytes, half_bytes, self.epilogue)

    @property
    def threads(self) -> int:
        return WARP * (WARPS + 1)

    @property
    def registers(self) -> int:
        """Of a thread, about."""
        return self.words + self.sums + 36


class OfFilter(Variant):
    """What a kernel of gradients of filters is compiled for: dy has a box of its own, and each warp of a unit has eight
    filters of it, or 16 by half of its channels."""

    __slots__ = ()

    @property
    def is_quartered(self) -> bool:
        """Whether warps of a unit have half of its channels each, by half of its filters."""
        return self.unit == 4 * _CHUNK

    @property
    def tiles(self) -> int:
        return 2 if self.is_quartered else 1

    @property
    def roles(self) -> int:
        """Warps of a unit."""
        return self.unit // _CHUNK

    @property
    def shares(self) -> int:
        return 1

    @property
    def out_box(self) -> tuple[int, int, int, int]:
        return SLAB, self.tile_columns, self.tile_rows, self.boxes.images

    @property
    def image_bytes(self) -> int:
        """Of the box of x."""
        return self.row_bytes * self.box_rows * self.boxes.images

    @property
    def stage_bytes(self) -> int:
        return self.image_bytes + self.pixels * LINE_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.boxes.stages * (self.stage_bytes + 2 * BARRIER_BYTES)

    @property
    def columns(self) -> tuple[Column, ...]:
        """Of all of a unit's channels, or of the first half, beside which the second lies alike."""
        return tuple(each for each in super().columns if each.load.chunks == 0 or not self.is_quartered)

    @property
    def words(self) -> int:
        return 0

    @property
    def sums(self) -> int:
        return 4 * self.tiles * self.down.taps * len(self.columns)

    @property
    def gather(self) -> Gather:
        steps = self._steps(lambda column: self.tiles)
        out_row_bytes = self.tile_columns * LINE_BYTES
        return Gather(self.dtype, self.tiles, self.row_bytes, out_row_bytes, self.whole, steps)

    @property
    def pairs(self) -> tuple[tuple[tuple[int, int, int, int], bool], ...]:
        """(r, s, channel, filter) of every two sums of a thread, from its own first ones on; and whether they are of a
        tap that is none."""
        places = []
        for r, column in product(range(self.down.taps), self.columns):
            for tile, second in product(range(self.tiles), (0, 1)):
                is_nothing = second == len(column.places)
                s, channel = column.places[0 if is_nothing else second]
                places.append(((r, s, channel, _CHUNK * tile), is_nothing))
        return tuple(places)

    @property
    def products(self) -> float:
        of_strip = sum(len(table) for *_, table in self.gather.steps) * self.tiles
        return of_strip * self.boxes.down * self.boxes.along
