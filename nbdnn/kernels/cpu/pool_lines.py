"""Lines of vectors: what the search for the maxima of a plane's windows (`pool_lines_find.py`) shares with the gradient
that comes of it (`pool_lines_give.py`), and with what windows come to (`pool_lines_join.py`).

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

from nbdnn.kernels.cpu.vector import I32, I64, ask, convert, element, lanes_between, load, row_types, splat
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

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


def ask_ahead(builder, line, i, row: Row, ahead_bytes, vectors: int = 1, writes: bool = False) -> None:
    """Ask for what lies so far behind as many vectors from element i of a line on. One request with each vector that is
    met, for the next plane's also where this one ends: all for 8x192x28x28 (3x3) took 0.48 ms from memory, 0.90 with
    requests for 8 KiB at once and none for y and dy, and 0.40 from cache with either (Zen 5, two threads)."""
    itemsize = ITEMSIZE[row.dtype]
    ahead_bytes = I64(ahead_bytes) if isinstance(ahead_bytes, int) else ahead_bytes
    start = builder.add(moved(builder, line, (i, I64(itemsize))), ahead_bytes)
    for vector in range(vectors):
        ask(builder, builder.add(start, I64(vector * row.vl * itemsize)), writes)


def least(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def merged(builder, parts: Sequence, places: Sequence[tuple[int, int]]):
    """A vector whose lanes are (part, lane) of others."""
    result = ir.Constant(parts[0].type, ir.Undefined)
    vl = len(places)
    for number, part in enumerate(parts):
        if any(of == number for of, _ in places):
            order = [vl + place if of == number else lane for lane, (of, place) in enumerate(places)]
            result = builder.shuffle_vector(result, part, ir.Constant(ir.VectorType(I32, vl), order))
    return result


def _quotient(builder, value, divisor: int):
    """Rounded down, of a value that is at least -8 * divisor."""
    return builder.sub(builder.sdiv(builder.add(value, I64(8 * divisor)), I64(divisor)), I64(8))


class Reader:
    """Lines of `in_w` elements as vectors of what windows side by side, `out_w` of them a line, have of them.

    order: the window of each lane, None as they are. Two vectors of 32 bytes give every second element by one
    instruction where each half stays in its place, and by two in the order of windows.
    """

    def __init__(self, builder, row: Row, kind: int, in_w, out_w) -> None:
        self._builder, self._row, self._kind, self._in_w, self._out_w = builder, row, kind, in_w, out_w
        self._compute = DEFAULT_COMPUTE[row.dtype]
        self._read, _, self._itemsize, _ = row_types(row.dtype, self._compute, row.vl)
        quarter = row.vl // 4
        swapped = [quarter * part + lane for part in (0, 2, 1, 3) for lane in range(quarter)]
        self.order = swapped if row.step == 2 and row.vl * self._itemsize == 32 else None

    def end_inside(self):
        """Windows before this have their last tap inside of a line."""
        return self._end(self._row.taps - 1)

    def masks(self, q, has_end: bool = True) -> list:
        """By tap and in `order`, which windows from q on have it inside of the image, and exist; None: all. has_end:
        whether they may reach a line's end; else its beginning alone counts."""
        builder, row = self._builder, self._row
        found = []
        for r in range(row.taps):
            low = builder.sub(I64(-((r - row.pad) // row.step)), q) if r < row.pad else None
            high = builder.sub(least(builder, self._end(r), self._out_w), q) if has_end else None
            found.append(None if low is high is None else lanes_between(builder, row.vl, 0, low, high, self.order))
        return found

    def arranged(self, value):
        """A vector by windows in `order`, or the other way round."""
        if self.order is None:
            return value
        order = ir.Constant(ir.VectorType(I32, self._row.vl), self.order)
        return self._builder.shuffle_vector(value, value, order)

    def values(self, line, q) -> list:
        """By tap and in `order`, x of the windows from q on, in the type that is computed in."""
        builder, row, read = self._builder, self._row, self._read
        groups: dict[int, list] = {}
        given: dict[int, ir.Value] = {}
        for r in reversed(range(row.taps)):
            if self._kind == CAREFUL or row.step == 1 or self.order or r + row.step not in given:
                given[r] = self._tap(line, q, r, groups)
                continue
            # The window before has this element as a later tap: one is read instead of `step` vectors, of which most
            # lie across two cache lines where they are as wide as one.
            at = builder.add(builder.mul(q, I64(row.step)), I64(r - row.pad))
            before = splat(builder, builder.load(element(builder, line, at, read.element, self._itemsize)), read)
            order = ir.Constant(ir.VectorType(I32, row.vl), [row.vl, *range(row.vl - 1)])
            given[r] = builder.shuffle_vector(given[r + row.step], before, order)
        return [convert(builder, given[r], row.dtype, self._compute, row.vl) for r in range(row.taps)]

    def _end(self, r: int):
        """Windows before this have tap r inside of a line, or before it."""
        builder, row = self._builder, self._row
        return builder.add(_quotient(builder, builder.add(self._in_w, I64(row.pad - r - 1)), row.step), I64(1))

    def _tap(self, line, q, r: int, groups: dict[int, list]):
        builder, row, order = self._builder, self._row, self.order or range(self._row.vl)
        group, first = divmod(r - row.pad, row.step)
        if group not in groups:
            begin = builder.mul(builder.add(q, I64(group)), I64(row.step))
            groups[group] = [self._part(line, builder.add(begin, I64(part * row.vl))) for part in range(row.step)]
        return merged(builder, groups[group], [divmod(window * row.step + first, row.vl) for window in order])

    def _part(self, line, start):
        builder, mask = self._builder, None
        if self._kind == CAREFUL:
            bounds = builder.neg(start), builder.sub(self._in_w, start)
            mask = lanes_between(builder, self._row.vl, 0, *bounds)
        slot = element(builder, line, start, self._read, self._itemsize)
        return load(builder, slot, self._read, self._itemsize, mask)
