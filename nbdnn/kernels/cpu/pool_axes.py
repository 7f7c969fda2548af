"""The three axes of a pooling on the CPU."""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.problem_pool import PoolProblem

_LONG_ROW = 1 << 14  # elements: a line that stays in the second-level cache


class Axes(NamedTuple):
    """Extents of x and y, and the windows between them, three of each."""

    extent: tuple[int, ...]
    out: tuple[int, ...]
    taps: tuple[int, ...]
    step: tuple[int, ...]
    pad: tuple[int, ...]

    @property
    def is_deep(self) -> bool:
        """Whether windows have an axis of depths: else window d is of depth d alone."""
        return (self.taps[0], self.step[0], self.pad[0]) != (1, 1, 0)

    def fields(self) -> dict[str, int]:
        """As fields of a record, such as in_h and out_w."""
        named = ("in", self.extent), ("out", self.out), ("taps", self.taps), ("step", self.step), ("pad", self.pad)
        return {f"{name}_{axis}": n for name, values in named for axis, n in zip("dhw", values, strict=True)}


def axes_of(problem: PoolProblem) -> Axes:
    """With rows that windows take as a whole made one: a global pooling of planes is one window of one long row."""
    extents, windows = (spatial3(problem.spatial), spatial3(problem.out_spatial)), spatial3(problem.window)
    pads = spatial3(problem.pad, 0)
    axes = Axes(*extents, windows, _steps(spatial3(problem.stride), extents[0], windows, pads), pads)
    while not problem.channels_last and axes.extent[1] > 1 and axes.taps[2] == axes.extent[2] <= _LONG_ROW:
        if axes.pad[2]:
            break
        width = axes.extent[2]
        axes = Axes(
            (1, axes.extent[0], axes.extent[1] * width),
            (1, axes.out[0], axes.out[1]),
            (1, axes.taps[0], axes.taps[1] * width),
            (1, axes.step[0], axes.step[1] * width),
            (0, axes.pad[0], axes.pad[1] * width),
        )
    return axes


def _steps(
    strides: tuple[int, ...], extents: tuple[int, ...], windows: tuple[int, ...], pads: tuple[int, ...]
) -> tuple[int, ...]:  # fmt: skip
    """The strides, of which those beyond the padded image are the least that leave one window of it: kernels take time
    and memory in proportion."""
    axes = zip(strides, extents, windows, pads, strict=True)
    return tuple(min(step, max(taps, extent + 2 * pad - taps + 1)) for step, extent, taps, pad in axes)
