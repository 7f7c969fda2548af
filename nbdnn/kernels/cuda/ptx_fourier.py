"""Fourier transforms of a thread's 32 complex numbers in registers, and sums with coefficients that are in the code."""

from __future__ import annotations

from functools import cache
from math import cos, pi, sin

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import F32, I32

EXTENT = 32
_RADIX = 4


def _negated(builder, value):
    return builder.fsub(F32(-0.0), value)  # the compiler of CUDA takes no fneg


def _turned(builder, value, eighths, angle):
    """A complex number times e^(-i angle). eighths: of a turn, where they are whole numbers; else None."""
    real, imaginary = value
    if eighths is not None and eighths % 2 == 0:
        for _ in range(eighths // 2 % 4):  # times -i
            real, imaginary = imaginary, _negated(builder, real)
        return real, imaginary
    if eighths is not None:  # (1 - i) / sqrt(2) and a number of quarters
        root = F32(cos(pi / 4))
        turned = (
            builder.fmul(builder.fadd(real, imaginary), root),
            builder.fmul(builder.fsub(imaginary, real), root),
        )
        return _turned(builder, turned, eighths - 1, 0.0)
    c, s = F32(cos(angle)), F32(sin(angle))
    return (
        builder.fma(c, real, builder.fmul(s, imaginary)),
        builder.fma(c, imaginary, _negated(builder, builder.fmul(s, real))),
    )


def _transformed(builder, values):
    """The sums over j of values[j] * e^(-2 pi i j k / n), for every k."""
    n = len(values)
    if n == 1:
        return values
    radix = min(_RADIX, n)
    parts = [_transformed(builder, values[j::radix]) for j in range(radix)]
    found = [None] * n
    for k in range(n // radix):
        turned = [
            _turned(builder, part[k], 8 * j * k // n if 8 * j * k % n == 0 else None, 2 * pi * j * k / n)
            for j, part in enumerate(parts)
        ]
        for q, value in enumerate(_short(builder, turned)):
            found[k + q * (n // radix)] = value
    return found


def _short(builder, values):
    """The transform of 2 or 4 numbers."""

    def both(a, b):
        pairs = list(zip(a, b, strict=True))
        return tuple(builder.fadd(x, y) for x, y in pairs), tuple(builder.fsub(x, y) for x, y in pairs)

    if len(values) == 2:
        return both(*values)
    (even, other), (odd, turned) = both(values[0], values[2]), both(values[1], values[3])
    (first, third), turned = both(even, odd), _turned(builder, turned, 2, 0.0)
    second, fourth = both(other, turned)
    return first, second, third, fourth


@intrinsic
def fourier(typingctx, real, imaginary):
    """(real, imaginary): local arrays of 32, replaced by their transform; swapped, by 32 times its inverse."""

    def codegen(context, builder, sig, args):
        parts = [
            context.make_array(kind)(context, builder, array).data for kind, array in zip(sig.args, args, strict=True)
        ]
        at = [[builder.gep(data, [I32(i)]) for data in parts] for i in range(EXTENT)]
        values = [tuple(builder.load(place) for place in places) for places in at]
        for places, value in zip(at, _transformed(builder, values), strict=True):
            for place, each in zip(places, value, strict=True):
                builder.store(each, place)
        return context.get_dummy_value()

    return signature(types.none, real, imaginary), codegen


@cache
def combined(matrix: tuple[tuple[float, ...], ...]):
    """Intrinsic (source, target): target = matrix @ source, of local arrays of float32. Every coefficient counts."""

    @intrinsic
    def combine(typingctx, source, target):
        def codegen(context, builder, sig, args):
            before, after = (
                context.make_array(kind)(context, builder, array).data
                for kind, array in zip(sig.args, args, strict=True)
            )
            values = [builder.load(builder.gep(before, [I32(i)])) for i in range(len(matrix[0]))]
            for i, row in enumerate(matrix):
                total = ir.Constant(F32, 0.0)
                for coefficient, value in zip(row, values, strict=True):
                    total = builder.fma(F32(coefficient), value, total)
                builder.store(total, builder.gep(after, [I32(i)]))
            return context.get_dummy_value()

        return signature(types.none, source, target), codegen

    return combine
