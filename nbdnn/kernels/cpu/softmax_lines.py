"""Vector code of softmax along rows of neighbours: some rows at once, or some vectors of a long one.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

What the lanes of a row's vector have found becomes one number for all rows together: halves of two rows' vectors are
put side by side and joined, and so on, until each row has its part of one vector. Powers are kept in the compute type
in a worker's scratch. 100,000 rows of 49 take two threads of a Zen 5 0.89 ms, and 1.11 one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce

from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.exponential import logarithm, power
from nbdnn.kernels.cpu.formula import Lanes
from nbdnn.kernels.cpu.rows import order
from nbdnn.kernels.cpu.vector import (
    I64,
    ask,
    constant,
    convert,
    element,
    lanes_between,
    load,
    row_types,
    store,
)
from nbdnn.problem import DEFAULT_COMPUTE

Join = Callable[[Lanes, Lanes], Lanes]


def larger(value: Lanes, found: Lanes) -> Lanes:
    """The larger of the two; `found` where the value is NaN: the sum of the powers will be."""
    test = value.builder.fcmp_ordered(">", value.value, found.value)
    return value.like(value.builder.select(test, value.value, found.value))


class _Rows:
    """`rows` rows of n elements, met `vectors` vectors of each at a time."""

    def __init__(self, builder, dtype: str, vl: int, rows: int, vectors: int, n) -> None:
        self.builder, self.dtype, self.compute, self.vl = builder, dtype, DEFAULT_COMPUTE[dtype], vl
        self.rows, self.vectors, self.n = rows, vectors, n
        self.types = {of: row_types(of, self.compute, vl) for of in (dtype, self.compute)}

    def lanes(self, value) -> Lanes:
        return Lanes(self.builder, value, self.compute)

    def sums(self, start: float, term: Callable[[int, object, object], Lanes], join: Join) -> list[Lanes]:
        """Of each row term(row, i, mask) of all vectors, joined lane by lane."""
        builder, (_, wide, _, _) = self.builder, self.types[self.compute]
        neutral = constant(wide, start)
        slots = [cgutils.alloca_once(builder, wide) for _ in range(self.rows * self.vectors)]

        def step(i, vectors: int, mask) -> None:
            for row in range(self.rows):
                for k in range(vectors):
                    slot = slots[row * self.vectors + k]
                    found = term(row, builder.add(i, I64(k * self.vl)), mask)
                    if mask is not None:
                        found = found.like(builder.select(mask, found.value, neutral))
                    builder.store(join(found, self.lanes(builder.load(slot))).value, slot)

        for slot in slots:
            builder.store(neutral, slot)
        self.each(step)
        values = [self.lanes(builder.load(slot)) for slot in slots]
        return [reduce(join, values[row * self.vectors :][: self.vectors]) for row in range(self.rows)]

    def each(self, step: Callable) -> None:
        """step(i, count, mask) for `count` vectors from element i on."""
        builder, n, vl = self.builder, self.n, self.vl
        first = I64(0)
        for count in dict.fromkeys((self.vectors, 1)):
            end = builder.mul(builder.sdiv(n, I64(count * vl)), I64(count * vl))
            with cgutils.for_range_slice(builder, first, end, I64(count * vl), I64) as (i, _):
                step(i, count, None)
            first = end
        with builder.if_then(builder.icmp_signed("<", first, n)):
            step(first, 1, lanes_between(builder, vl, 0, None, builder.sub(n, first)))

    def joined(self, parts: Sequence[Lanes], join: Join) -> Lanes:
        """What the lanes of each row's vector come to, in its part of one vector."""
        builder, width, values = self.builder, self.vl, [part.value for part in parts]

        while len(values) > 1:
            half = width // 2
            firsts = [block + k for block in range(0, 2 * self.vl, width) for k in range(half)]
            orders = order(firsts), order(lane + half for lane in firsts)
            values = [
                join(*(self.lanes(builder.shuffle_vector(a, b, lanes)) for lanes in orders)).value
                for a, b in zip(values[::2], values[1::2], strict=True)
            ]
            width = half
        (value,) = values
        while width > 1:
            other = builder.shuffle_vector(value, value, order(lane ^ (width // 2) for lane in range(self.vl)))
            value, width = join(self.lanes(value), self.lanes(other)).value, width // 2
        return self.lanes(value)

    def of_row(self, found: Lanes, row: int) -> Lanes:
        """A row's part of what is `joined`, in all lanes."""
        lane = row * (self.vl // self.rows)
        return self.lanes(self.builder.shuffle_vector(found.value, found.value, order([lane] * self.vl)))

    def of_rows(self, found: Lanes) -> list[Lanes]:
        return [self.of_row(found, row) for row in range(self.rows)]

    def _place(self, start, pitch, row: int, i, of: str):
        line = self.builder.add(start, self.builder.mul(pitch, I64(row)))
        return element(self.builder, line, i, self.types[of][0], self.types[of][2])

    def read(self, start, pitch, row: int, i, mask, of: str = "") -> Lanes:
        of = of or self.dtype
        stored, _, size_bytes, _ = self.types[of]
        value = load(self.builder, self._place(start, pitch, row, i, of), stored, size_bytes, mask)
        return self.lanes(convert(self.builder, value, of, self.compute, self.vl))

    def ask(self, start, pitch, row: int, i) -> None:
        """Ask for the line of element i of a row, to write to it."""
        line = self.builder.add(start, self.builder.mul(pitch, I64(row)))
        ask(self.builder, self.builder.add(line, self.builder.mul(i, I64(self.types[self.dtype][2]))), writes=True)

    def write(self, value: Lanes, start, pitch, row: int, i, mask, of: str = "") -> None:
        of = of or self.dtype
        narrow = convert(self.builder, value.value, self.compute, of, self.vl)
        store(self.builder, narrow, self._place(start, pitch, row, i, of), self.types[of][2], mask)

    def write_each(self, value: Callable[[int, object, object], Lanes], start, pitch) -> None:
        """value(row, i, mask) of all vectors."""

        def step(i, vectors: int, mask) -> None:
            for row in range(self.rows):
                for k in range(vectors):
                    at = self.builder.add(i, I64(k * self.vl))
                    self.write(value(row, at, mask), start, pitch, row, at, mask)

        self.each(step)


@cache
def forward_rows(dtype: str, algorithm: str, vl: int, rows: int, vectors: int, in_place: bool):
    """Intrinsic (y, x, pitch, kept, kept_pitch, n): softmax of so many rows of n elements, which lie `pitch` bytes
    apart; y may be x. kept: room for whole vectors of n elements of the compute type a row; with `in_place`, where y is
    of that type, y itself: room for n."""
    is_log, shifts, compute = algorithm == "log", algorithm != "fast", DEFAULT_COMPUTE[dtype]

    def codegen(context, builder, sig, args):
        y, x, pitch, kept, kept_pitch, n = args
        block = _Rows(builder, dtype, vl, rows, vectors, n)

        if shifts:
            most = block.sums(float("-inf"), lambda row, i, mask: block.read(x, pitch, row, i, mask), larger)
            shift = block.of_rows(block.joined(most, larger))

        def shifted(row: int, i, mask) -> Lanes:
            value = block.read(x, pitch, row, i, mask)
            return value - shift[row] if shifts else value

        def kept_power(row: int, i, mask) -> Lanes:
            found = power(shifted(row, i, mask), is_small=shifts)
            if not in_place:
                block.ask(y, pitch, row, i)
            if not is_log:
                block.write(found, kept, kept_pitch, row, i, mask if in_place else None, compute)
            return found

        total = block.joined(block.sums(0.0, kept_power, lambda a, b: a + b), lambda a, b: a + b)
        rest = block.of_rows(logarithm(total) if is_log else 1.0 / total)

        def finished(row: int, i, mask) -> Lanes:
            if is_log:  # the logarithm may be less than the shift: added to that, it would lose its digits
                return shifted(row, i, mask) - rest[row]
            return block.read(kept, kept_pitch, row, i, mask if in_place else None, compute) * rest[row]

        block.write_each(finished, y, pitch)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, y, x, pitch, kept, kept_pitch, n):
        return signature(types.none, *[types.int64] * 6), codegen

    return run


@cache
def backward_rows(dtype: str, algorithm: str, vl: int, rows: int, vectors: int):
    """Intrinsic (dx, dy, y, pitch, n): the gradient of so many rows; dx may be dy."""
    is_log = algorithm == "log"

    def codegen(context, builder, sig, args):
        dx, dy, y, pitch, n = args
        block = _Rows(builder, dtype, vl, rows, vectors, n)

        def term(row: int, i, mask) -> Lanes:
            share = block.read(dy, pitch, row, i, mask)
            return share if is_log else share * block.read(y, pitch, row, i, mask)

        total = block.of_rows(block.joined(block.sums(0.0, term, lambda a, b: a + b), lambda a, b: a + b))

        def gradient(row: int, i, mask) -> Lanes:
            share, value = block.read(dy, pitch, row, i, mask), block.read(y, pitch, row, i, mask)
            return share - power(value) * total[row] if is_log else (share - total[row]) * value

        block.write_each(gradient, dx, pitch)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, dx, dy, y, pitch, n):
        return signature(types.none, *[types.int64] * 5), codegen

    return run
