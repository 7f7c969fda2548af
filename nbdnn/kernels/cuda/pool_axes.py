"""What a tile of pooling is compiled for, and which positions its outputs meet along an axis."""

from __future__ import annotations

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
    loaded need not stay in the second-level cache."""

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
