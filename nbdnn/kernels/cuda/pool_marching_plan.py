"""How `pool_marching` divides a problem: what its kernel is compiled for, and what it is given."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.kernels.cuda.pool_axes import Axis, covers
from nbdnn.kernels.cuda.pool_rolling_plan import WARP, view_of
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

NO_TAP = 0x7E00  # a number that no tap has, also with others added; as a float16 it is NaN, which nothing equals
MOST_TAPS = 64  # of a window
_MOST_OF_PLANE = 25  # of them, in a plane: bits of a word, and registers
MOST_THREADS = 512
_THREADS = (128, 192, 256, 384, 512)  # that blocks have, or somewhat fewer
_MOST_VECTORS = 16  # of channels, that a block has
_VECTOR_BYTES = 16
_SEGMENTS = (1, 2, 3, 4, 6, 8, 16)
_OTHER_REGISTERS = 32  # of a thread, beside elements
_AHEAD_WORDS = 36  # registers of what is asked for a step ahead, at most
_SHARED_OF_SM, _MOST_SHARED_BYTES = 220 << 10, 96 << 10


class Tile(NamedTuple):
    """Of a block: planes, rows and columns of cells, each of as many elements of dx as windows are apart, and so many
    vectors of `lanes` channels."""

    planes: int
    rows: int
    columns: int
    vectors: int
    lanes: int

    def __str__(self) -> str:
        return f"{self.planes}x{self.rows}x{self.columns}c{self.vectors}v{self.lanes}"


class Cells(NamedTuple):
    """Windows of an axis that cover a cell: the first, where the cell's own number is 0, and how many."""

    first: int
    windows: int


@cache
def cells_of(axis: Axis) -> Cells:
    windows = sorted({window for _, window in covers(axis, axis.stride)})
    return Cells(windows[0], len(windows))


@cache
def _planes_met(axis: Axis) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    met = [
        (plane, tuple((window, plane - window * axis.stride) for window in range(plane // axis.stride + 1)))
        for plane in range(axis.taps - axis.stride, axis.taps)
    ]
    return tuple((plane, windows) for plane, windows in met if windows)


class Variant(NamedTuple):
    """What a kernel is compiled for. axes: that it marches along, and those of a plane. rows, columns, vectors, lanes:
    of a tile."""

    dtype: str
    axes: tuple[Axis, Axis, Axis]
    rows: int
    columns: int
    vectors: int
    lanes: int

    @property
    def words(self) -> int:
        """Of a vector."""
        return self.lanes * ITEMSIZE[self.dtype] // 4

    @property
    def windows_h(self) -> int:
        """Rows of windows that cover the tile."""
        return self.rows + cells_of(self.axes[1]).windows - 1

    @property
    def windows_w(self) -> int:
        return self.columns + cells_of(self.axes[2]).windows - 1

    @property
    def threads(self) -> int:
        return ceil(self.windows_h * self.windows_w * self.vectors / WARP) * WARP

    @property
    def held(self) -> int:
        """Windows that have begun and do not end with a step."""
        return (self.axes[0].taps - 1) // self.axes[0].stride

    @property
    def held_words(self) -> int:
        """Registers of their maxima and taps; of nothing, one."""
        return max(1, 2 * self.held * self.words)

    @property
    def planes_met(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Of a step's planes of x that windows reach: the place from the step's window without pad, and (window from
        there, its tap)."""
        return _planes_met(self.axes[0])

    @property
    def taps_of_plane(self) -> int:
        return self.axes[1].taps * self.axes[2].taps

    @property
    def loaded_words(self) -> int:
        """Registers of what a step loads of x."""
        return len(self.planes_met) * self.taps_of_plane * self.words

    @property
    def ahead(self) -> int:
        """Planes of these that are asked for while the step before goes on: for which there are registers."""
        return min(len(self.planes_met), _AHEAD_WORDS // (self.taps_of_plane * self.words))

    @property
    def slots(self) -> int:
        """Planes of windows in shared memory: those that cover a cell, and one that is written meanwhile."""
        return cells_of(self.axes[0]).windows + 1

    @property
    def half_bytes(self) -> int:
        """Of a plane's taps, or of its dy."""
        return self.windows_h * self.windows_w * self.vectors * self.words * 4

    @property
    def shared_bytes(self) -> int:
        return 2 * self.slots * self.half_bytes

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, which bound the registers of a thread."""
        registers = _OTHER_REGISTERS + self.loaded_words + self.held_words + 4 * self.words
        registers = ceil(min(registers, 168) / 8) * 8
        return max(1, min(65536 // (registers * self.threads), _SHARED_OF_SM // (self.shared_bytes + 1024)))


class Fields(NamedTuple):
    """images: of so many slabs of channels and tiles each. cells: planes of a tile; of all tiles cells_d. The rest as
    `pool_rolling_plan.View` has it."""

    images: int
    slabs: int
    tiles_d: int
    tiles_h: int
    tiles_w: int
    cells: int
    cells_d: int
    channels: int
    x_image: int
    x_d: int
    x_h: int
    x_w: int
    in_d: int
    in_h: int
    in_w: int
    y_image: int
    y_d: int
    y_h: int
    y_w: int
    out_d: int
    out_h: int
    out_w: int


def _is_down(problem: PoolProblem) -> bool:
    """Whether a block marches down rows, of several images at once."""
    return len(problem.spatial) == 2


def variant(problem: PoolProblem, tile: Tile) -> Variant:
    return Variant(problem.dtype, view_of(problem, _is_down(problem)).axes, *tile[1:])


@lru_cache(maxsize=256)
def cells_in(problem: PoolProblem) -> tuple[int, int, int]:
    """Cells along each axis."""
    view = view_of(problem, _is_down(problem))
    depth, rows, columns = (ceil(n / axis.stride) for n, axis in zip(view.extents, view.axes, strict=True))
    return depth, rows, columns


def fields(problem: PoolProblem, tile: Tile) -> Fields:
    view, (depth, rows, columns) = view_of(problem, _is_down(problem)), cells_in(problem)
    return Fields(
        view.images,
        ceil(problem.c / (tile.vectors * tile.lanes)),
        ceil(depth / tile.planes),
        ceil(rows / tile.rows),
        ceil(columns / tile.columns),
        tile.planes,
        depth,
        problem.c,
        *view.x,
        *view.extents,
        *view.y,
        *view.outs,
    )


def widest(problem: PoolProblem) -> int:
    """Channels of the largest vector that is whole and aligned."""
    lanes = min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype]
    while lanes > 1 and problem.c % lanes:
        lanes //= 2
    return lanes


def _parts(extent: int, most: int) -> int:
    """A tile's part of an extent, all of about one size."""
    return ceil(extent / ceil(extent / most))


@lru_cache(maxsize=256)
def tiles(problem: PoolProblem) -> tuple[Tile, ...]:
    """Every tile that is worth a thought, and fits."""
    itemsize, most, (depth, rows, columns) = ITEMSIZE[problem.dtype], widest(problem), cells_in(problem)
    _, across, along = view_of(problem, _is_down(problem)).axes
    beside_h, beside_w = cells_of(across).windows - 1, cells_of(along).windows - 1
    found: dict[Tile, None] = {}
    for lanes, threads in product((most, most // 2), _THREADS):
        if lanes * itemsize < 4:
            continue
        every = ceil(problem.c / lanes)
        for of_slab in dict.fromkeys(_parts(every, n) for n in (_MOST_VECTORS, 8, 4, 2)):
            windows = threads // of_slab
            for parts in range(1, 9):
                width = ceil(columns / parts)
                height = min(rows, windows // (width + beside_w) - beside_h)
                if height < 1:
                    continue
                height = _parts(rows, height)
                for segment in dict.fromkeys(ceil(depth / n) for n in _SEGMENTS):
                    found[Tile(segment, height, width, of_slab, lanes)] = None
    return tuple(tile for tile in found if _fits(problem, tile))


def _fits(problem: PoolProblem, tile: Tile) -> bool:
    v = variant(problem, tile)
    return v.threads <= MOST_THREADS and v.shared_bytes <= _MOST_SHARED_BYTES and v.loaded_words <= 128


def takes(axes: tuple[Axis, Axis, Axis]) -> bool:
    """Whether windows have no more taps than registers and words hold."""
    return prod(axis.taps for axis in axes) <= MOST_TAPS and axes[1].taps * axes[2].taps <= _MOST_OF_PLANE
