"""What to compute: dropout and its gradient.

Grammar (tokens joined by ``:``, the alignment only where it is not 16)::

    op : dtype : elements [: alignment]

    op         dropout_fwd | dropout_bwd
    elements   m33554432     of the dense array, in whatever layout: the mask goes by the order in memory

Example: ``dropout_fwd:f32:m33554432``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from nbdnn.cached import cached_property
from nbdnn.problem import DEFAULT_ALIGN, DEFAULT_COMPUTE, FAMILIES, Operand, Problem, check_kind, check_numbers
from nbdnn.problem_text import Tokens

# A block of the generator gives four words, one for each of four elements.
BLOCK_ELEMS = 4
_ELEMENTS = re.compile(r"m(\d+)")


@dataclass(frozen=True)
class DropoutProblem(Problem):
    """Dropout over `elements` neighbours in memory, forward (x, state -> y, mask) or backward (dy, mask -> dx).

    A runner takes (threshold, scale): what is kept has a word of at least `threshold`, and is multiplied by `scale`.
    """

    op: str
    dtype: str
    elements: int
    align: int = DEFAULT_ALIGN

    scalars: ClassVar[tuple[float, ...]] = (2.0**30, 4 / 3)

    def __post_init__(self) -> None:
        check_kind(self, FAMILIES["dropout"])
        check_numbers("elements", (self.elements,), 0)

    @property
    def compute(self) -> str:  # type: ignore[override]
        return DEFAULT_COMPUTE[self.dtype]

    @property
    def mask_bytes(self) -> int:
        return -(-self.elements // 8)

    @property
    def blocks(self) -> int:
        """Of the generator: by so many the state advances."""
        return -(-self.elements // BLOCK_ELEMS)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """dropout_fwd: x, y, mask, state (seed, offset); dropout_bwd: dy, mask, dx."""
        mask = (self.mask_bytes,), (1,), "u8"
        if self.op == "dropout_bwd":
            return (
                Operand("dy", (self.elements,), (1,), self.dtype),
                Operand("mask", *mask),
                Operand("dx", (self.elements,), (1,), self.dtype, "out"),
            )
        return (
            Operand("x", (self.elements,), (1,), self.dtype),
            Operand("y", (self.elements,), (1,), self.dtype, "out"),
            Operand("mask", *mask, "out"),
            Operand("state", (2,), (1,), "i64", "out", keeps=True),
        )

    @property
    def flops(self) -> int:
        return self.elements

    def _tokens(self, *, extents: bool) -> list[str]:
        tokens = [self.op, self.dtype, *([f"m{self.elements}"] if extents else [])]
        return tokens + ([f"a{self.align}"] if self.align != DEFAULT_ALIGN else [])


def read(op: str, tokens: Tokens) -> DropoutProblem:
    """The problem whose text has these tokens after its op."""
    dtype = tokens.next("a dtype")
    (elements,) = tokens.match(_ELEMENTS, "elements such as m33554432")
    align = tokens.align()
    tokens.end()
    return DropoutProblem(op, dtype, elements, align)
