"""Sums and maxima along an axis of rows, as compiled-in functions of pooling's kernels.

A row is `width` positions of `inner` neighbouring elements: a line of pixels of one channel, or of all channels where
they are the last axis. Windows lie `step` positions apart; where that is known when a kernel is compiled, lines of
single elements are read by vectors too.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import float32, float64, njit

from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH
from nbdnn.kernels.cpu.vector import WIDEN, pointer, record
from nbdnn.problem import DEFAULT_COMPUTE

# What a task of pooling is told. inner: neighbouring elements of one position; bytes are those of the workers' scratch.
FIELDS = record(
    *("rows", "rows_a_task", "inner", "averages", "excludes_pad", "scratch", "scratch_bytes", "line_bytes"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)
_KNOWN_STEPS = (1, 2)


def known_step(step: int) -> int:
    """The step that a kernel is compiled for; 0 stands for any."""
    return step if step in _KNOWN_STEPS else 0


def real_of(dtype: str):
    """(Numba's type of the sums, its -inf)."""
    real = float32 if DEFAULT_COMPUTE[dtype] == "f32" else float64
    return real, real(-np.inf)


@cache
def joined(is_max: bool):
    """Compiled-in function of (so far, value): their sum; or the larger one, NaN where one of them is."""

    @njit(**DEVICE)
    def larger(found, value):
        most = value if value > found else found
        return value if value != value else most

    @njit(**DEVICE)
    def added(found, value):
        return found + value

    return larger if is_max else added


@cache
def fill(dtype: str):
    """Compiled-in function (address, n, value): that many elements of the compute type."""
    data = pointer(DEFAULT_COMPUTE[dtype])

    @njit(**DEVICE)
    def filled(address, n, value):
        line = data(address)
        for i in range(n):
            line[i] = value

    return filled


@cache
def join_row(dtype: str, is_max: bool):
    """Compiled-in function (line, source, n, first): n elements joined to a line of the compute type; or its first."""
    data, wide, widen, join = pointer(dtype), pointer(DEFAULT_COMPUTE[dtype]), WIDEN[dtype], joined(is_max)

    @njit(**DEVICE, fastmath=FASTMATH)
    def join_elements(to, source, n, first):
        line, x = wide(to), data(source)
        if first:
            for i in range(n):
                line[i] = widen(x[i])
        else:
            for i in range(n):
                line[i] = join(line[i], widen(x[i]))

    return join_elements


@cache
def add_scaled_row(dtype: str):
    """Compiled-in function (line, source, n, scale): n elements, times scale, added to a line of the compute type."""
    data, wide, widen = pointer(dtype), pointer(DEFAULT_COMPUTE[dtype]), WIDEN[dtype]

    @njit(**DEVICE, fastmath=FASTMATH)
    def add(to, source, n, scale):
        line, dy = wide(to), data(source)
        for i in range(n):
            line[i] += widen(dy[i]) * scale

    return add


@cache
def across(dtype: str, is_max: bool, known: int):
    """Compiled-in function (to, line, windows, taps, step, inner): what `taps` positions of each window come to."""
    data, join = pointer(DEFAULT_COMPUTE[dtype]), joined(is_max)
    reassociated = FASTMATH if is_max else FASTMATH | {"reassoc"}

    @njit(**DEVICE, fastmath=reassociated)
    def whole(line, taps):
        found = line[0]
        for s in range(1, taps):
            found = join(found, line[s])
        return found

    @njit(**DEVICE, fastmath=FASTMATH)
    def join_taps(to, start, windows, taps, step, inner):
        found, line = data(to), data(start)
        apart = known if known else step
        if windows == 1 and inner == 1:
            found[0] = whole(line, taps)
        elif known == 1:
            for i in range(windows * inner):
                found[i] = line[i]
            for s in range(1, taps):
                for i in range(windows * inner):
                    found[i] = join(found[i], line[i + s * inner])
        elif inner == 1:
            for q in range(windows):
                found[q] = line[q * apart]
            for s in range(1, taps):
                for q in range(windows):
                    found[q] = join(found[q], line[q * apart + s])
        else:
            for q in range(windows):
                for j in range(inner):
                    found[q * inner + j] = line[q * apart * inner + j]
                for s in range(1, taps):
                    at = (q * apart + s) * inner
                    for j in range(inner):
                        found[q * inner + j] = join(found[q * inner + j], line[at + j])

    return join_taps


@cache
def spread(dtype: str, known: int):
    """Compiled-in function (to, line, windows, taps, step, inner): each window's value added to all of its taps."""
    data = pointer(DEFAULT_COMPUTE[dtype])

    @njit(**DEVICE, fastmath=FASTMATH)
    def add_taps(to, start, windows, taps, step, inner):
        total, line = data(to), data(start)
        apart = known if known else step
        if windows == 1 and inner == 1:
            for s in range(taps):
                total[s] += line[0]
            return
        for s in range(taps):
            if known == 1:
                for i in range(windows * inner):
                    total[i + s * inner] += line[i]
            elif inner == 1:
                for q in range(windows):
                    total[q * apart + s] += line[q]
            else:
                for q in range(windows):
                    at = (q * apart + s) * inner
                    for j in range(inner):
                        total[at + j] += line[q * inner + j]

    return add_taps
