"""How `pool_rolling` divides a problem: what its kernel is compiled for, and what it is given."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cpu.geometry import spatial3, tensor_strides
from nbdnn.kernels.cuda.pool_axes import Axis, covers
from nbdnn.kernels.cuda.pool_tiles import axes_of
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

PADDING = -(1 << 31)  # the key of what is not in the image
NO_TAP = -1  # a word of no taps
COLUMNS_APART = 512  # as many as a block has: between ranks of NaNs, of which there are less than 2^23
WARP = 32
_MOST_RANKS = 1 << 23
_THREADS, MOST_THREADS = 256, 512  # of a block of several tiles, and of one
SECTOR_BYTES = 32  # of a pixel's channels: what a memory access moves at least
_MOST_SHARED_BYTES, _SHARED_OF_SM = 96 << 10, 220 << 10
_ROWS = (1, 2, 4, 8, 16, 28)
_MOST_ROWS = 32  # bits of a word
_SCHEDULERS, _REGISTERS = 4, 512  # of a multiprocessor; of one of them, for each lane
# Of a thread: in all, those for positions and the like, and how many of a row's taps are among these.
MOST_REGISTERS, _OTHER_REGISTERS, _OTHER_TAPS = 200, 40, 13
_MOST_STEP_BYTES = 1 << 31  # from the first row of a tile to its last: what 32 bits hold
_MOST_UNROLLED = 1200  # comparisons of a plane


def fields_of(taps: int) -> tuple[int, int]:
    """(bits of a tap's number, of which not all are set; numbers in a word)."""
    bits = taps.bit_length()
    return bits, 32 // bits


class Line(NamedTuple):
    """Rows of a thread, from the first output's place. windows: across them, the first where the first output would
    have one without pad. positions: that these reach. outputs: rows of dx."""

    first_window: int
    windows: int
    first_position: int
    positions: int
    outputs: int

    def taps_of(self, axis: Axis, window: int) -> list[tuple[int, int]]:
        """(tap, row) of the window's taps on these rows."""
        start = (self.first_window + window) * axis.stride - axis.pad - self.first_position
        return [(tap, start + tap) for tap in range(axis.taps) if 0 <= start + tap < self.positions]

    def words_of(self, taps: int) -> int:
        """Of a plane, for the taps of the windows."""
        return ceil(self.windows / fields_of(taps)[1])


class Shared(NamedTuple):
    """Bytes from a row to the next, and from a column to the next; words of a plane. own_tap: which one of its window a
    column is, where that is the same of all; -1 where it is not."""

    row_bytes: int
    step_bytes: int
    words: int
    own_tap: int


class Box(NamedTuple):
    """Elements of neighbouring planes and rows: that of plane p and row r is data[at + p*step_d + r*step_h], inside
    where d + p is below its extent, and rows has bit r."""

    data: object
    at: int
    d: int
    extent_d: int
    step_d: int
    step_h: int
    rows: int


def line_of(axis: Axis, outputs: int, extent: int, out: int) -> Line:
    """Of a tile of so many outputs of an axis; where that is all of the axis, of what there is."""
    windows = sorted({window for _, window in covers(axis, min(outputs, extent))})
    first = windows[0] * axis.stride - axis.pad
    end = windows[-1] * axis.stride - axis.pad + axis.taps
    if outputs >= extent:
        windows = [window for window in windows if 0 <= window < out]
        outputs, first, end = extent, max(first, 0), min(end, extent)
    first, end = min(first, 0), max(end, outputs)
    return Line(windows[0], len(windows), first, end - first, outputs)


def covering(axis: Axis, first: int, end: int, out: int) -> tuple[int, int]:
    """First and end of the windows that cover positions of an axis."""
    return max(0, -((axis.taps - 1 - axis.pad - first) // axis.stride)), min(
        out, (end - 1 + axis.pad) // axis.stride + 1
    )


class Tile(NamedTuple):
    """Planes that a block rolls over, rows and columns of its tiles of dx, and channels. down: of two axes, it rolls
    down the rows, which are its planes, of so many images at once, which are its rows."""

    planes: int
    rows: int
    columns: int
    channels: int
    down: bool = False

    def __str__(self) -> str:
        return f"{self.planes}x{self.rows}x{self.columns}c{self.channels}" + "d" * self.down


class View(NamedTuple):
    """A problem as a kernel has it. images, x, y: how many, and elements from one to the next, from plane to plane,
    from row to row and from column to column."""

    axes: tuple[Axis, Axis, Axis]
    extents: tuple[int, int, int]
    outs: tuple[int, int, int]
    images: int
    x: tuple[int, int, int, int]
    y: tuple[int, int, int, int]


@lru_cache(maxsize=256)
def view_of(problem: PoolProblem, down: bool) -> View:
    last = problem.channels_last
    images, (depth, rows, columns) = problem.n if last else problem.n * problem.c, axes_of(problem)
    (in_d, in_h, in_w), (out_d, out_h, out_w) = spatial3(problem.spatial), spatial3(problem.out_spatial)
    x_n, x_c, x_d, x_h, x_w = tensor_strides(problem.x_shape, last)
    y_n, y_c, y_d, y_h, y_w = tensor_strides(problem.y_shape, last)
    x_image, y_image = (x_n, y_n) if last else (x_c, y_c)
    if not down:
        of_x, of_y = (x_image, x_d, x_h, x_w), (y_image, y_d, y_h, y_w)
        return View((depth, rows, columns), (in_d, in_h, in_w), (out_d, out_h, out_w), images, of_x, of_y)
    axes, of_x, of_y = (rows, Axis(1, 1, 0), columns), (0, x_h, x_image, x_w), (0, y_h, y_image, y_w)
    return View(axes, (in_h, images, in_w), (out_h, images, out_w), 1, of_x, of_y)


class Variant(NamedTuple):
    """What a kernel is compiled for. columns: that a tile reads. units: tiles of a block."""

    dtype: str
    axes: tuple[Axis, Axis, Axis]
    line: Line
    columns: int
    channels: int
    units: int

    @property
    def threads(self) -> int:
        return ceil(self.columns * self.channels * self.units / WARP) * WARP

    @property
    def margin(self) -> int:
        """Columns before and behind those of a tile, which are padding; the first one behind is that of no window."""
        return max(1, self.axes[2].pad)

    @property
    def line_columns(self) -> int:
        return self.columns + 2 * self.margin

    @property
    def is_aligned(self) -> bool:
        """Whether each window has its number's column, and there are no more of them."""
        along = self.axes[2]
        return along.stride == 1 and 2 * along.pad < along.taps

    @property
    def shared(self) -> Shared:
        cells = self.units * self.line_columns * self.channels + WARP
        words = ceil(self.line.outputs / fields_of(self.axes[2].taps)[1])
        return Shared(4 * cells, 4 * self.channels, words, self.axes[2].pad if self.is_aligned else -1)

    @property
    def shared_bytes(self) -> int:
        rows = self.line.positions + self.line.outputs + self.shared.words
        return self.axes[0].stride * rows * self.shared.row_bytes

    @property
    def registers(self) -> int:
        """About as many as a thread takes."""
        (taps, stride, _), _, along = self.axes
        windows, positions = self.line.windows, stride * self.line.positions
        others = _OTHER_REGISTERS + max(0, along.taps - _OTHER_TAPS)
        if taps == 1:  # nothing is held; all rows are there at once
            return others + 4 * positions + windows
        return others + 2 * (taps - stride) * windows + 2 * positions + 2 * windows

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, which bound the registers of a thread."""
        of_scheduler = _REGISTERS // (ceil(self.registers / 8) * 8)  # warps
        by_registers = _SCHEDULERS * of_scheduler // (self.threads // WARP)
        return max(1, min(by_registers, _SHARED_OF_SM // (self.shared_bytes + 1024)))


class Fields(NamedTuple):
    """images: of so many slabs of channels and tiles each. steps: windows of planes that a block goes through. planes,
    columns: of a tile. channels: of all slabs. The rest as View has it."""

    images: int
    slabs: int
    tiles_d: int
    tiles_h: int
    tiles_w: int
    steps: int
    planes: int
    columns: int
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


class Reciprocals(NamedTuple):
    """What `ptx.split` takes of the divisors: multipliers and shifts."""

    slabs: int
    slabs_shift: int
    tiles_d: int
    tiles_d_shift: int
    tiles_h: int
    tiles_h_shift: int
    tiles_w: int
    tiles_w_shift: int


def _columns(problem: PoolProblem, axis: Axis, columns: int) -> int:
    """That a tile of so many columns of dx reads, at most; those in the middle are alike, but for their windows."""
    *_, extent = problem.spatial
    *_, out = problem.out_spatial
    most, tiles, beside = 0, ceil(extent / columns), 1 + ceil(axis.taps / columns)
    for tile in {*range(min(tiles, beside + axis.stride)), *range(max(0, tiles - beside), tiles)}:
        first = tile * columns
        end = min(first + columns, extent)
        low, high = covering(axis, first, end, out)
        start = min(first, max(0, low * axis.stride - axis.pad))
        stop = max(end, min(extent, (high - 1) * axis.stride - axis.pad + axis.taps))
        most = max(most, stop - start, high - low)
    return most


def variant(problem: PoolProblem, tile: Tile) -> Variant:
    view = view_of(problem, tile.down)
    (_, across, along), (_, in_h, _), (_, out_h, _), *_ = view
    line = line_of(across, tile.rows, in_h, out_h)
    columns = _columns(problem, along, tile.columns)
    units = max(1, _THREADS // (columns * tile.channels))
    return Variant(problem.dtype, view.axes, line, columns, tile.channels, units)


def _steps(view: View, planes: int) -> int:
    """Windows of planes, the last one's also behind the last window, that a segment goes through at most."""
    (axis, _, _), (extent, _, _), (out, _, _), *_ = view
    earliest, behind = -((axis.taps - 1 - axis.pad) // axis.stride), ceil((axis.taps - axis.stride) / axis.stride)
    most = 0
    for first in range(0, extent, planes):
        end = min(first + planes, extent)
        low, _ = covering(axis, first, end, out)
        most = max(most, (end + axis.pad - 1) // axis.stride + 1 - max(low - behind, earliest))
    return most


def fields(problem: PoolProblem, tile: Tile) -> Fields:
    view, last = view_of(problem, tile.down), problem.channels_last
    in_d, in_h, in_w = view.extents
    return Fields(
        view.images,
        ceil(problem.c / tile.channels) if last else 1,
        *(ceil(in_d / tile.planes), ceil(in_h / tile.rows), ceil(in_w / tile.columns)),
        _steps(view, tile.planes),
        *(tile.planes, tile.columns, problem.c if last else 1),
        *view.x,
        *view.extents,
        *view.y,
        *view.outs,
    )


def _fits(problem: PoolProblem, tile: Tile) -> bool:
    """Into registers, shared memory, code, ranks and distances."""
    v, view = variant(problem, tile), view_of(problem, tile.down)
    depth, across, along = v.axes
    unrolled = depth.stride * (v.line.positions * along.taps + v.line.windows * across.taps)
    step_elems = max(v.line.positions * view.x[2], v.line.outputs * view.x[2], v.line.windows * view.y[2])
    ranks = _steps(view, tile.planes) * depth.stride * v.line.positions * COLUMNS_APART
    return (
        v.registers <= min(MOST_REGISTERS, _SCHEDULERS * _REGISTERS * WARP // v.threads)
        and v.shared_bytes <= _MOST_SHARED_BYTES
        and unrolled <= _MOST_UNROLLED
        and max(v.line.positions, v.line.windows) <= _MOST_ROWS
        and v.threads <= MOST_THREADS
        and ranks < _MOST_RANKS
        and step_elems * ITEMSIZE[problem.dtype] < _MOST_STEP_BYTES
    )


def _width(problem: PoolProblem, along: Axis, most: int) -> int:
    """Columns of dx such that a tile reads `most` columns or fewer; 0 where it would read more than two for each."""
    *_, in_w = problem.spatial
    if _columns(problem, along, in_w) <= most:
        return in_w
    beside = 2 * along.taps - 1 - along.stride
    if most < 2 * beside:
        return 0
    parts = ceil(in_w / (most - beside))
    widths = (ceil(in_w / n) for n in range(max(1, parts - 2), parts))  # tiles at both ends read less
    return next((width for width in widths if _columns(problem, along, width) <= most), ceil(in_w / parts))


@lru_cache(maxsize=256)
def tiles(problem: PoolProblem) -> tuple[Tile, ...]:
    """Every tile that is worth a thought, and fits."""
    along, sector = axes_of(problem)[2], SECTOR_BYTES // ITEMSIZE[problem.dtype]
    widths: dict[tuple[int, int], None] = {}
    for most, channels in product((256, 512), (sector, sector // 2) if problem.channels_last else (1,)):
        channels = min(problem.c, channels)
        if columns := _width(problem, along, most // channels):
            widths[columns, channels] = None
    every = []
    for down in (False, True) if len(problem.spatial) == 2 else (False,):
        (depth, across, _), (in_d, in_h, _), *_ = view_of(problem, down)
        rows = dict.fromkeys(min(ceil(n / across.stride), ceil(in_h / across.stride)) * across.stride for n in _ROWS)
        planes = dict.fromkeys(max(ceil(in_d / n), min(in_d, depth.taps)) for n in (1, 2, 4, 8))
        every += [Tile(d, h, *width, down) for d in planes for h in rows for width in widths]
    return tuple(tile for tile in every if _fits(problem, tile))
