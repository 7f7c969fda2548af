"""Vector code of softmax lane by lane: columns of elements, some vectors of neighbouring ones at a time.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

A strip is some vectors of neighbours, whose maxima and sums stay in registers. Wide ones are runs in memory that a
processor sees coming, where elements of a column lie apart. A forward keeps what it has read, in the compute type:
lines a power of two apart would put each other out of every cache. The logarithm of 4x21x128x128 takes a Zen 5 thread
0.35 ms with strips of 8 vectors, 0.47 with 4; without keeping 0.40.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.exponential import logarithm, power
from nbdnn.kernels.cpu.formula import Lanes
from nbdnn.kernels.cpu.rows import order
from nbdnn.kernels.cpu.softmax_lines import larger
from nbdnn.kernels.cpu.turns import collected, dealt, turned_block
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

_LINE_BYTES, _ELEMENTS_AHEAD = 64, 8
_PART = 1024  # elements whose sum is added to the total
_MOST_ODD = 5  # parts that each give something to each of as many vectors


class _Strip:
    """`count` vectors of neighbouring columns, of which a mask may leave out some lanes."""

    def __init__(self, builder, dtype: str, vl: int, first, count: int, mask=None) -> None:
        self.builder, self.dtype, self.compute, self.vl = builder, dtype, DEFAULT_COMPUTE[dtype], vl
        self.first, self.count, self.mask = first, count, mask
        self.stored, self.wide, self.stored_bytes, self.wide_bytes = row_types(dtype, self.compute, vl)
        self.line_bytes = count * vl * self.stored_bytes

    def lanes(self, value) -> Lanes:
        return Lanes(self.builder, value, self.compute)

    def _place(self, start, k: int):
        return element(
            self.builder, start, self.builder.add(self.first, I64(k * self.vl)), self.stored, self.stored_bytes
        )

    def read(self, start) -> list[Lanes]:
        """The elements at `start`, where element 0 of column 0 lies."""
        slots = [self._place(start, k) for k in range(self.count)]
        values = [load(self.builder, slot, self.stored, self.stored_bytes, self.mask) for slot in slots]
        return [self.lanes(convert(self.builder, each, self.dtype, self.compute, self.vl)) for each in values]

    def write(self, values: Sequence[Lanes], start) -> None:
        for k, value in enumerate(values):
            narrow = convert(self.builder, value.value, self.compute, self.dtype, self.vl)
            store(self.builder, narrow, self._place(start, k), self.stored_bytes, self.mask)

    def ask(self, start, i, step, length, writes: bool = False) -> None:
        """Ask for the element some after i; after the last those of the strip that comes next."""
        builder = self.builder
        ahead = builder.add(i, I64(_ELEMENTS_AHEAD))
        is_next = builder.icmp_signed(">=", ahead, length)
        ahead = builder.select(is_next, builder.srem(ahead, length), ahead)
        begin = builder.add(start, builder.mul(self.first, I64(self.stored_bytes)))
        next_bytes = builder.select(is_next, I64(self.line_bytes), I64(0))
        begin = builder.add(begin, builder.add(builder.mul(ahead, step), next_bytes))
        for offset in range(0, self.line_bytes, _LINE_BYTES):
            ask(builder, builder.add(begin, I64(offset)), writes)

    def _kept_place(self, kept, i, k: int):
        at = self.builder.mul(i, I64(self.count * self.vl * self.wide_bytes))
        return element(self.builder, self.builder.add(kept, at), I64(k * self.vl), self.wide, self.wide_bytes)

    def keep(self, values: Sequence[Lanes], kept, i) -> None:
        for k, value in enumerate(values):
            store(self.builder, value.value, self._kept_place(kept, i, k), self.wide_bytes, None)

    def kept(self, kept, i) -> list[Lanes]:
        slots = [self._kept_place(kept, i, k) for k in range(self.count)]
        return [self.lanes(load(self.builder, slot, self.wide, self.wide_bytes, None)) for slot in slots]

    def registers(self, value: float) -> list:
        return [cgutils.alloca_once_value(self.builder, constant(self.wide, value)) for _ in range(self.count)]

    def values(self, registers: Sequence) -> list[Lanes]:
        return [self.lanes(self.builder.load(register)) for register in registers]

    def set(self, registers: Sequence, values: Sequence[Lanes]) -> None:
        for register, value in zip(registers, values, strict=True):
            self.builder.store(value.value, register)

    def sums(self, length, few: bool, terms: Callable[..., Sequence[Lanes]]) -> list[Lanes]:
        """Of terms(i) for all i of a column, by parts unless they are `few`: a sum of millions, one after the other,
        would lose what each of them adds."""
        total, builder, nothing = self.registers(0.0), self.builder, constant(self.wide, 0.0)

        def part(first, last) -> list[Lanes]:
            registers = self.registers(0.0)
            self.set(registers, [self.lanes(nothing)] * self.count)
            with cgutils.for_range_slice(builder, first, last, I64(1)) as (i, _):
                self.set(registers, [a + b for a, b in zip(self.values(registers), terms(i), strict=True)])
            return self.values(registers)

        if few:
            return part(I64(0), length)
        with cgutils.for_range_slice(builder, I64(0), length, I64(_PART)) as (first, _):
            beyond = builder.add(first, I64(_PART))
            last = builder.select(builder.icmp_signed("<", beyond, length), beyond, length)
            self.set(total, [a + b for a, b in zip(self.values(total), part(first, last), strict=True)])
        return self.values(total)


def _strips(builder, dtype: str, vl: int, vectors: int, n, body: Callable[[_Strip], None]) -> None:
    """body(strip) for n columns: strips of `vectors` vectors, then of one; the last ends with them, or is masked."""
    whole = builder.mul(builder.sdiv(n, I64(vectors * vl)), I64(vectors * vl))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(vectors * vl), I64) as (first, _):
        body(_Strip(builder, dtype, vl, first, vectors))
    with builder.if_then(builder.icmp_signed("<", whole, n)):
        last = builder.sub(n, I64(vl))
        with builder.if_else(builder.icmp_signed("<", last, I64(0))) as (few, enough):
            with few:
                body(_Strip(builder, dtype, vl, I64(0), 1, lanes_between(builder, vl, 0, None, n)))
            with enough, cgutils.for_range_slice(builder, whole, n, I64(vl), I64) as (first, _):
                first = builder.select(builder.icmp_signed("<", first, last), first, last)
                body(_Strip(builder, dtype, vl, first, 1))


@cache
def forward_columns(dtype: str, algorithm: str, vl: int, vectors: int, few: bool):
    """Intrinsic (n, y, x, step, kept, length): softmax of n columns.

    Elements of a column lie `step` bytes apart; y may be x. kept: room for `length` x `vectors` vectors of the compute
    type. few: whether sums are made one element after the other.
    """
    is_log, shifts = algorithm == "log", algorithm != "fast"

    def codegen(context, builder, sig, args):
        n, y, x, step, kept, length = args

        def line(start, i):
            return builder.add(start, builder.mul(i, step))

        def softmax(strip: _Strip) -> None:
            most = strip.registers(float("-inf"))
            if shifts:
                with cgutils.for_range(builder, length) as loop:
                    strip.ask(x, loop.index, step, length)
                    values = strip.read(line(x, loop.index))
                    strip.keep(values, kept, loop.index)
                    strip.set(most, [larger(*pair) for pair in zip(values, strip.values(most), strict=True)])
            shift = strip.values(most)

            def powers_of(i) -> list[Lanes]:
                if shifts:
                    values = [a - b for a, b in zip(strip.kept(kept, i), shift, strict=True)]
                else:
                    strip.ask(x, i, step, length)
                    values = strip.read(line(x, i))
                powers = [power(value, is_small=shifts) for value in values]
                if not is_log:
                    strip.keep(powers, kept, i)
                return powers

            sums = strip.sums(length, few, powers_of)
            rest = [logarithm(each) if is_log else 1.0 / each for each in sums]
            with cgutils.for_range(builder, length) as loop:
                strip.ask(y, loop.index, step, length, writes=True)
                values = strip.kept(kept, loop.index)
                if is_log:  # the logarithm may be less than the shift: added to that, it would lose its digits
                    found = [(a - b) - c for a, b, c in zip(values, shift, rest, strict=True)]
                else:
                    found = [a * b for a, b in zip(values, rest, strict=True)]
                strip.write(found, line(y, loop.index))

        _strips(builder, dtype, vl, vectors, n, softmax)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, n, y, x, step, kept, length):
        return signature(types.none, *[types.int64] * 6), codegen

    return run


@cache
def backward_columns(dtype: str, algorithm: str, vl: int, vectors: int, few: bool):
    """Intrinsic (n, dx, dy, y, step, length): the gradient of n columns; dx may be dy. few: as of the forward."""
    is_log = algorithm == "log"

    def codegen(context, builder, sig, args):
        n, dx, dy, y, step, length = args

        def line(start, i):
            return builder.add(start, builder.mul(i, step))

        def gradient(strip: _Strip) -> None:
            def terms(i) -> list[Lanes]:
                strip.ask(dy, i, step, length)
                shares = strip.read(line(dy, i))
                if is_log:
                    return shares
                strip.ask(y, i, step, length)
                return [a * b for a, b in zip(shares, strip.read(line(y, i)), strict=True)]

            sums = strip.sums(length, few, terms)
            with cgutils.for_range(builder, length) as loop:
                strip.ask(dx, loop.index, step, length, writes=True)
                if is_log:
                    strip.ask(y, loop.index, step, length)
                both = zip(strip.read(line(dy, loop.index)), strip.read(line(y, loop.index)), sums, strict=True)
                found = [a - power(b) * c if is_log else (a - c) * b for a, b, c in both]
                strip.write(found, line(dx, loop.index))

        _strips(builder, dtype, vl, vectors, n, gradient)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, n, dx, dy, y, step, length):
        return signature(types.none, *[types.int64] * 6), codegen

    return run


def _deals(length: int, vl: int) -> bool:
    """Whether rows of so many elements are dealt out; else a block of whole vectors is turned, whose shuffles are fewer
    where a length has a large odd factor, if two rows fill a vector."""
    return length // (length & -length) <= _MOST_ODD or 2 * length < vl


@cache
def deal(dtype: str, vl: int, length: int):
    """Intrinsic (to, pitch, start): vl rows of `length` neighbours, vl at most, turned: element j of all of them, in
    the compute type, is the vector at to + j*pitch."""
    compute = DEFAULT_COMPUTE[dtype]
    stored, wide, stored_bytes, wide_bytes = row_types(dtype, compute, vl)

    def codegen(context, builder, sig, args):
        to, pitch, start = args

        def part(first: int):
            value = load(builder, element(builder, start, I64(first), stored, stored_bytes), stored, stored_bytes, None)
            return convert(builder, value, dtype, compute, vl)

        if _deals(length, vl):
            turned = dealt(builder, [part(k * vl) for k in range(length)])
        else:  # the last row is read from where a vector ends with it
            last, behind = part(length * vl - vl), range(vl - length, vl)
            rows = [part(row * length) for row in range(vl - 1)]
            rows.append(builder.shuffle_vector(last, last, order([*behind, *range(vl - length)])))
            turned = turned_block(builder, rows)[:length]
        for j, each in enumerate(turned):
            line = builder.add(to, builder.mul(pitch, I64(j)))
            store(builder, each, element(builder, line, I64(0), wide, wide_bytes), wide_bytes, None)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, pitch, start):
        return signature(types.none, *[types.int64] * 3), codegen

    return run


@cache
def collect(dtype: str, vl: int, length: int):
    """Intrinsic (to, start, pitch): what `deal` has dealt out, put back as rows."""
    compute = DEFAULT_COMPUTE[dtype]
    stored, wide, stored_bytes, wide_bytes = row_types(dtype, compute, vl)

    def codegen(context, builder, sig, args):
        to, start, pitch = args
        lines = [builder.add(start, builder.mul(pitch, I64(j))) for j in range(length)]
        parts = [load(builder, element(builder, at, I64(0), wide, wide_bytes), wide, wide_bytes, None) for at in lines]

        def put(value, first: int) -> None:
            narrow = convert(builder, value, compute, dtype, vl)
            store(builder, narrow, element(builder, to, I64(first), stored, stored_bytes), stored_bytes, None)

        if _deals(length, vl):
            for k, part in enumerate(collected(builder, parts)):
                put(part, k * vl)
        else:  # what is written behind a row, the next one overwrites; the last ends with its vector
            *rows, before, last = turned_block(builder, parts + [parts[0]] * (vl - length))
            for row, part in enumerate([*rows, before]):
                put(part, row * length)
            own = range(vl, vl + length)
            put(builder.shuffle_vector(before, last, order([*range(2 * length - vl, length), *own])), length * vl - vl)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, to, start, pitch):
        return signature(types.none, *[types.int64] * 3), codegen

    return run
