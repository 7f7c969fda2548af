"""What to compute: softmax and its gradient.

Grammar (tokens joined by ``:``, the alignment only where it is not 16)::

    op : dtype : dims : algorithm : mode : layout [: alignment]

    op         softmax_fwd | softmax_bwd
    dims       n32c1000h28w28 | n4c64d16h56w56
    algorithm  fast | accurate | log        fast does not subtract the maximum
    mode       channel | instance           over c at each position, or over everything but n
    layout     nchw | nhwc | ncdhw | ndhwc  of every operand

Example: ``softmax_fwd:f32:n128c1000h1w1:accurate:channel:nchw``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nbdnn.cached import cached_property
from nbdnn.errors import check_one_of
from nbdnn.problem import (
    DEFAULT_ALIGN,
    DEFAULT_COMPUTE,
    DIM_NAMES,
    Operand,
    Problem,
    check_fields,
    dense_strides,
    named,
)
from nbdnn.problem_text import Tokens

SOFTMAX_OPS = ("softmax_fwd", "softmax_bwd")
ALGORITHMS, MODES = ("fast", "accurate", "log"), ("instance", "channel")


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """A softmax over 4-D or 5-D arrays, forward (x -> y) or backward (dy, y -> dx)."""

    op: str
    dtype: str
    n: int
    c: int
    spatial: tuple[int, ...]
    algorithm: str = "accurate"
    mode: str = "channel"
    layout: str = "nchw"
    align: int = DEFAULT_ALIGN

    def __post_init__(self) -> None:
        check_fields(self, SOFTMAX_OPS)
        for name, value, valid in (("algorithm", self.algorithm, ALGORITHMS), ("mode", self.mode, MODES)):
            check_one_of(name, value, valid)

    @property
    def compute(self) -> str:  # type: ignore[override]
        return DEFAULT_COMPUTE[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of every operand."""
        return (self.n, self.c, *self.spatial)

    @property
    def rows(self) -> tuple[int, int, int]:
        """(outer, length, inner): element (o, i, j) of the dense array lies at (o * length + i) * inner + j, and each
        (o, j) is a row of its own."""
        positions = prod(self.spatial)
        if self.mode == "instance":
            return self.n, self.c * positions, 1
        return (self.n * positions, self.c, 1) if self.layout.endswith("c") else (self.n, self.c, positions)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """softmax_fwd: x, y; softmax_bwd: dy, y, dx."""
        strides = dense_strides(self.shape, self.layout.endswith("c"))
        *inputs, output = ("x", "y") if self.op == "softmax_fwd" else ("dy", "y", "dx")
        return (
            *(Operand(name, self.shape, strides, self.dtype) for name in inputs),
            Operand(output, self.shape, strides, self.dtype, "out"),
        )

    @property
    def flops(self) -> int:
        """Of an element: maximum, difference, exponential, sum, quotient; backward: two products, sum, difference."""
        return prod(self.shape) * (5 if self.op == "softmax_fwd" else 4)

    def _tokens(self, *, extents: bool) -> list[str]:
        batch, spatial = (f"n{self.n}", named(DIM_NAMES[len(self.spatial)], self.spatial)) if extents else ("", "")
        tokens = [self.op, self.dtype, f"{batch}c{self.c}{spatial}", self.algorithm, self.mode, self.layout]
        return tokens + ([f"a{self.align}"] if self.align != DEFAULT_ALIGN else [])


def read(op: str, tokens: Tokens) -> SoftmaxProblem:
    """The problem whose text has these tokens after its op."""
    dtype = tokens.next("a dtype")
    n, c, *spatial = tokens.dims()
    algorithm, mode, layout = tokens.next("an algorithm"), tokens.next("a mode"), tokens.next("a layout")
    align = tokens.align()
    tokens.end()
    return SoftmaxProblem(op, dtype, n, c, tuple(spatial), algorithm, mode, layout, align)
