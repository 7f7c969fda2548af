"""Lines of vectors: what the search for the maxima of a plane's windows (`pool_lines_find.py`) shares with the gradient
that comes of it (`pool_lines_give.py`).

    chosen[p] = the first r at which x[p*u + r - pad] = y[p]; where y[p] is NaN the last r at which x is; else NONE
    dx[i] = sum of dy[p] over the windows p that cover i and whose chosen[p] is i + pad - p*u

A line of `chosen` has numbers of taps as bytes, with NONE on both sides for windows that do not exist. Columns of
vectors go down the rows: what only a line's ends need is decided once a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from nbdnn.kernels.cpu.vector import I32, I64, ask
from nbdnn.problem import ITEMSIZE

NONE = 255  # no tap: of windows that do not exist, or lie beside the image
CAREFUL, SAFE, WHOLE, STREAM = range(4)  # how lines are met: what may be read, and what is known of them
AHEAD_BYTES = 2048  # behind what is met, of y and dy, and of x and dx; of the latter where windows are deep
DEEP_AHEAD_BYTES = 8192


class Row(NamedTuple):
    """What is known of windows along a row."""

    dtype: str
    vl: int
    taps: int
    step: int
    pad: int
    is_deep: bool  # windows have an axis of depths


def counted(builder, counts: Sequence, forward: bool, body: Callable) -> None:
    """body(*indices) of as many nested loops, or backwards; those whose count is known are written out."""

    def nested(indices: tuple, counts: Sequence) -> None:
        if not counts:
            body(*indices)
        elif isinstance(n := counts[0], int):
            for i in range(n) if forward else reversed(range(n)):
                nested((*indices, I64(i)), counts[1:])
        else:
            with cgutils.for_range(builder, n) as loop:
                i = loop.index if forward else builder.sub(builder.sub(n, I64(1)), loop.index)
                nested((*indices, i), counts[1:])

    nested((), counts)


def switched(builder, how, cases: Sequence[Callable]) -> None:
    """cases[how]()"""
    blocks = [builder.append_basic_block("case") for _ in cases]
    done = builder.append_basic_block("done")
    switch = builder.switch(how, blocks[0])
    for number, (block, case) in enumerate(zip(blocks, cases, strict=True)):
        if number:
            switch.add_case(I64(number), block)
        builder.position_at_end(block)
        case()
        builder.branch(done)
    builder.position_at_end(done)


def moved(builder, start, *steps):
    """start + the products of the pairs."""
    for i, size_bytes in steps:
        start = builder.add(start, builder.mul(i, size_bytes))
    return start


def ask_ahead(builder, line, i, row: Row, ahead_bytes: int, vectors: int = 1, writes: bool = False) -> None:
    """Ask for what lies so far behind as many vectors from element i of a line on. One request with each vector that is
    met, for the next plane's also where this one ends: all for 8x192x28x28 (3x3) took 0.48 ms from memory, 0.90 with
    requests for 8 KiB at once and none for y and dy, and 0.40 from cache with either (Zen 5, two threads)."""
    itemsize = ITEMSIZE[row.dtype]
    for vector in range(vectors):
        behind = I64(ahead_bytes + vector * row.vl * itemsize)
        ask(builder, builder.add(moved(builder, line, (i, I64(itemsize))), behind), writes)


def merged(builder, parts: Sequence, places: Sequence[tuple[int, int]]):
    """A vector whose lanes are (part, lane) of others."""
    result = ir.Constant(parts[0].type, ir.Undefined)
    vl = len(places)
    for number, part in enumerate(parts):
        if any(of == number for of, _ in places):
            order = [vl + place if of == number else lane for lane, (of, place) in enumerate(places)]
            result = builder.shuffle_vector(result, part, ir.Constant(ir.VectorType(I32, vl), order))
    return result
