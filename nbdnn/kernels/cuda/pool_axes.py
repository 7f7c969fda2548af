"""What a tile of pooling is compiled for, and which positions its outputs meet along an axis."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

# A word of -inf and one of NaN, of one or two elements.
NO_NUMBER = 0xFFFFFFFF
LOWEST = {"f32": 0xFF800000, "bf16": 0xFF80FF80, "f16": 0xFC00FC00}


class Axis(NamedTuple):
    """One spatial axis of the windows."""

    taps: int
    stride: int
    pad: int


class Tile(NamedTuple):
    """Outputs of a thread along each axis; channels-last each is a vector of `lanes`. The config of the candidate.

    reads_y: the gradient of a maximum looks for what equals y, instead of for the maximum.
    """

    depth: int
    rows: int
    columns: int
    lanes: int
    reads_y: bool = False

    @property
    def extents(self) -> tuple[int, int, int]:
        return self[:3]

    def __str__(self) -> str:
        return f"{self.depth}x{self.rows}x{self.columns}v{self.lanes}" + "y" * self.reads_y


class Variant(NamedTuple):
    """What a kernel is compiled for. lanes_x, lanes_y: elements of a vector of x or dx, and of y or dy. once: what is
    loaded need not stay in the second-level cache. Of a tile that reads y, pairs: 16-bit elements are compared two at
    once; ahead: there are registers for x before it is known whether y has a NaN."""

    op: str
    mode: str
    dtype: str
    channels_last: bool
    lanes_x: int
    lanes_y: int
    axes: tuple[Axis, Axis, Axis]
    tile: Tile
    bits: int
    once: bool = False
    pairs: bool = False
    ahead: bool = False

    @property
    def may_pair(self) -> bool:
        """Whether two elements of a vector lie in a word."""
        return self.channels_last and self.dtype != "f32" and self.lanes_x % 2 == 0

    @property
    def is_max(self) -> bool:
        return self.mode == "max"

    @property
    def cell_lanes(self) -> int:
        """Elements of one position of a tile."""
        return self.lanes_x if self.channels_last else 1


def reaches(axis: Axis, tile: int) -> list[tuple[int, int]]:
    """(window, position of the image, from the first window's place without pad) in the order of the taps."""
    return [(p, p * axis.stride + r - axis.pad) for p in range(tile) for r in range(axis.taps)]


def covers(axis: Axis, tile: int) -> list[tuple[int, int]]:
    """(position of the image, window that covers it); the tile begins where window 0 without pad does."""
    return [
        (i, (i + axis.pad - r) // axis.stride)
        for i in range(tile)
        for r in reversed(range(axis.taps))
        if (i + axis.pad - r) % axis.stride == 0
    ]


def taps_met(axis: Axis, windows: list[int]) -> dict[int, list[tuple[int, int]]]:
    """By position of the image the (window, tap) there."""
    met: dict[int, list[tuple[int, int]]] = {}
    for window in windows:
        for tap in range(axis.taps):
            met.setdefault(window * axis.stride - axis.pad + tap, []).append((window, tap))
    return dict(sorted(met.items()))


# ---- a gradient of maxima that looks for what equals y ---------------------------------------------------------------

Place = tuple[int, int, int]  # depth, row and column, from the tile's beginning; or a window's number on each axis


def windows_met(v: Variant) -> list[list[int]]:
    """The windows that cover a tile of dx, axis by axis."""
    return [sorted({w for _, w in covers(axis, extent)}) for axis, extent in zip(v.axes, v.tile.extents, strict=True)]


def in_tile(v: Variant, place: Place) -> bool:
    return all(0 <= at < extent for at, extent in zip(place, v.tile.extents, strict=True))


def last_tap(v: Variant, window: Place) -> Place:
    """Of a window's taps that lie in the tile: nobody asks for those behind it."""
    ends = [at * axis.stride - axis.pad + axis.taps for at, axis in zip(window, v.axes, strict=True)]
    depth, row, column = (min(end, extent) - 1 for end, extent in zip(ends, v.tile.extents, strict=True))
    return depth, row, column


def rows_met(v: Variant) -> dict[tuple[int, int], dict[Place, list[int]]]:
    """By row of the image, in order, the columns there that each window goes through, up to its last tap."""
    windows = first, second, third = windows_met(v)
    last = {window: last_tap(v, window) for window in product(first, second, third)}
    depths, rows, columns = (taps_met(axis, line) for axis, line in zip(v.axes, windows, strict=True))
    met: dict[tuple[int, int], dict[Place, list[int]]] = {}
    for d, h, w in product(depths, rows, columns):
        for (in_d, _), (in_h, _), (in_w, _) in product(depths[d], rows[h], columns[w]):
            window = in_d, in_h, in_w
            if (d, h, w) <= last[window]:
                met.setdefault((d, h), {}).setdefault(window, []).append(w)
    return met
