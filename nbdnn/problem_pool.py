"""What to compute: pooling and its gradient.

Grammar (tokens joined by ``:``, the alignment only where it is not 16)::

    op : dtype : dims : window : pad : stride : mode : layout [: alignment]

    op         pool_fwd | pool_bwd
    dims       n32c64h112w112 | n4c64d16h112w112        the image, in both directions
    window     r3s3 | t2r2s2
    pad        p1x1                                     the same at both ends of an axis
    stride     u2x2
    mode       max | max_deterministic | average_inc_pad | average_exc_pad | sum
    layout     nchw | nhwc | ncdhw | ndhwc              of every operand

Example: ``pool_fwd:f32:n32c64h112w112:r3s3:p1x1:u2x2:max:nchw``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from nbdnn.cached import cached_property
from nbdnn.errors import InvalidProblem
from nbdnn.problem import (
    DEFAULT_ALIGN,
    DEFAULT_COMPUTE,
    DIM_NAMES,
    ITEMSIZE,
    LARGEST_STEP,
    Operand,
    Problem,
    check_fields,
    check_numbers,
    dense_strides,
    named,
)
from nbdnn.problem_text import Tokens

POOL_OPS = ("pool_fwd", "pool_bwd")
MODES = ("max", "max_deterministic", "average_inc_pad", "average_exc_pad", "sum")
_WINDOW_NAMES = {2: ("r", "s"), 3: ("t", "r", "s")}
_WINDOW = re.compile(r"(?:t(\d+))?r(\d+)s(\d+)")


@dataclass(frozen=True)
class PoolProblem(Problem):
    """A 2-D or 3-D pooling, forward (x -> y) or backward (of a maximum: x, y, dy -> dx; of a sum: dy -> dx).

    ``n, c, spatial`` are the image's in both directions; ``window``, ``pad`` and ``stride`` have a number an axis.
    """

    op: str
    dtype: str
    n: int
    c: int
    spatial: tuple[int, ...]
    window: tuple[int, ...]
    pad: tuple[int, ...]
    stride: tuple[int, ...]
    mode: str = "max"
    layout: str = "nchw"
    align: int = DEFAULT_ALIGN

    def __post_init__(self) -> None:
        check_fields(self, POOL_OPS)
        if self.mode not in MODES:
            raise InvalidProblem(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        for name, smallest, axes in (("window", 1, self.window), ("pad", 0, self.pad), ("stride", 1, self.stride)):
            if len(axes) != len(self.spatial):
                raise InvalidProblem(f"{name} has {len(axes)} axes, the image has {len(self.spatial)} spatial axes")
            check_numbers(name, axes, smallest, LARGEST_STEP)
        for axis, extent in enumerate(self.out_spatial):
            if extent < 1:
                raise InvalidProblem(
                    f"output extent of spatial axis {axis} would be {extent}: the window spans {self.window[axis]}, "
                    f"the padded image {self.spatial[axis] + 2 * self.pad[axis]}"
                )

    @property
    def compute(self) -> str:  # type: ignore[override]
        return DEFAULT_COMPUTE[self.dtype]

    @cached_property
    def out_spatial(self) -> tuple[int, ...]:
        """Spatial extents of y (and dy)."""
        axes = zip(self.spatial, self.window, self.pad, self.stride, strict=True)
        return tuple((extent + 2 * pad - taps) // step + 1 for extent, taps, pad, step in axes)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.out_spatial)

    @property
    def is_max(self) -> bool:
        return self.mode.startswith("max")

    @property
    def channels_last(self) -> bool:
        return self.layout.endswith("c")

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """pool_fwd: x, y; pool_bwd of a maximum: x, y, dy, dx; of a sum: dy, dx."""

        def operand(name: str) -> Operand:
            shape = self.x_shape if name.endswith("x") else self.y_shape
            role = "out" if name == self._result else "in"
            return Operand(name, shape, dense_strides(shape, self.channels_last), self.dtype, role)  # type: ignore[arg-type]

        if self.op == "pool_fwd":
            return operand("x"), operand("y")
        maximum = (operand("x"), operand("y")) if self.is_max else ()
        return *maximum, operand("dy"), operand("dx")

    @property
    def _result(self) -> str:
        return "y" if self.op == "pool_fwd" else "dx"

    @property
    def flops(self) -> int:
        """A comparison or addition each tap of each window, in both directions."""
        return prod(self.y_shape) * prod(self.window)

    @property
    def min_bytes(self) -> int:
        """Without y in the gradient of a maximum: x alone says where the maxima are."""
        read = prod(self.x_shape) if self.op == "pool_fwd" or self.is_max else 0
        through = prod(self.y_shape) + (prod(self.x_shape) if self.op == "pool_bwd" else 0)
        return (read + through) * ITEMSIZE[self.dtype]

    def _tokens(self, *, extents: bool) -> list[str]:
        ndim = len(self.spatial)
        batch, spatial = (f"n{self.n}", named(DIM_NAMES[ndim], self.spatial)) if extents else ("", "")
        tokens = [self.op, self.dtype, f"{batch}c{self.c}{spatial}", named(_WINDOW_NAMES[ndim], self.window)]
        tokens += ["p" + "x".join(map(str, self.pad)), "u" + "x".join(map(str, self.stride)), self.mode, self.layout]
        return tokens + ([f"a{self.align}"] if self.align != DEFAULT_ALIGN else [])


def read(op: str, tokens: Tokens) -> PoolProblem:
    """The problem whose text has these tokens after its op."""
    dtype = tokens.next("a dtype")
    n, c, *spatial = tokens.dims()
    window = tuple(tokens.match(_WINDOW, "a window such as r3s3"))
    pad, stride = tokens.axes("p"), tokens.axes("u")
    mode, layout = tokens.next("a mode"), tokens.next("a layout")
    align = tokens.align()
    tokens.end()
    return PoolProblem(op, dtype, n, c, tuple(spatial), window, pad, stride, mode, layout, align)
