"""Vector code for the gradient of a maximum: which tap of each window it is, and what each element gets of dy.

Both take a table of rows, each an entry of three numbers: an address of elements or taps, one of dy, and the number of
the first tap. Taps are counted over a whole window, by numbers as wide as the elements, so that a comparison of taps
selects elements. Maxima, taps and sums stay in registers while the rows pass by.
"""

from __future__ import annotations

from functools import cache, partial

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.pool_phases import by_vectors, element, load, store
from nbdnn.kernels.cpu.vector import I32, I64, convert, prefetch, row_types, splat, vector_at

ENTRY_BYTES = 24
AHEAD_BYTES = 4096  # so far behind what is read or written the next lines are asked for
BLOCK_BYTES = 384 << 10  # of what a worker keeps of a block, in the second-level cache


def _numbers(compute: str, vl: int) -> ir.VectorType:
    """Of taps: as wide as the elements, so that a comparison of these selects those."""
    return ir.VectorType(I64 if compute == "f64" else I32, vl)


def _every(builder, numbers, value):
    """A vector of one number."""
    return splat(builder, value if numbers.element == I64 else builder.trunc(value, numbers.element), numbers)


def _entry(builder, rows, index, field: int):
    return builder.load(element(builder, builder.add(rows, I64(8 * field)), index, I64, ENTRY_BYTES))


def _repeat(builder, known: int, begin, end, body) -> None:
    """body(i) for i from begin to end; one after the other without a loop where it is known that there are so many."""
    if known:
        for i in range(known):
            body(builder.add(begin, I64(i)))
        return
    with cgutils.for_range_slice(builder, begin, end, I64(1), I64) as (i, _):
        body(i)


@cache
def find_taps(source: str, compute: str, vl: int, planar: bool, known: int = 0):
    """Intrinsic (to, n, rows, n_rows, columns, begin, end, shift, first): the taps of the maxima of n windows.

    Element i of tap s of a row lies at its address + columns[s] bytes + (shift + i) elements of `source` dtype. first:
    the first tap inside of the image; planar, where each window has one of its own, they are at `to` beforehand.
    known: end - begin where the kernel is for that many only.
    """
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)
    numbers = _numbers(compute, vl)

    def codegen(context, builder, sig, args):
        to, n, rows, n_rows, columns, begin, end, shift, first = args
        every_number = partial(_every, builder, numbers)

        def step(i, mask):
            if planar:
                own = load(builder, element(builder, to, i, wide, wide_bytes), wide, wide_bytes, mask)
                found = builder.bitcast(own, numbers)
            else:
                found = every_number(first)
            chosen = cgutils.alloca_once_value(builder, found)
            best = cgutils.alloca_once_value(builder, ir.Constant(wide, [float("-inf")] * vl))
            at = builder.mul(builder.add(shift, i), I64(read_bytes))
            with cgutils.for_range(builder, n_rows) as loop:
                row, tap = builder.add(_entry(builder, rows, loop.index, 0), at), _entry(builder, rows, loop.index, 2)

                def look(s, row=row, tap=tap):
                    column = builder.load(element(builder, columns, s, I64, 8))
                    value = load(builder, vector_at(builder, builder.add(row, column), read), read, read_bytes, mask)
                    value, most = convert(builder, value, source, compute, vl), builder.load(best)
                    better = builder.or_(
                        builder.fcmp_ordered(">", value, most), builder.fcmp_unordered("uno", value, value)
                    )
                    builder.store(builder.select(better, value, most), best)
                    this = every_number(builder.add(tap, s))
                    builder.store(builder.select(better, this, builder.load(chosen)), chosen)

                _repeat(builder, known, begin, end, look)
            result = builder.bitcast(builder.load(chosen), wide)
            store(builder, result, element(builder, to, i, wide, wide_bytes), wide_bytes, mask)

        by_vectors(builder, n, vl, step)
        return context.get_dummy_value()

    @intrinsic
    def find(typingctx, to, n, rows, n_rows, columns, begin, end, shift, first):
        return signature(types.none, *[types.int64] * 9), codegen

    return find


@cache
def gather_shares(source: str, compute: str, target: str, vl: int, known: int = 0):
    """Intrinsic (to, n, rows, n_rows, start, apart, tap, count, step): what n elements get of dy, of `source` dtype.

    Of each row come `count` windows, whose elements begin at number start + k*apart; each gives its dy where its tap is
    the row's first + tap + k*step. known: count where the kernel is for that many only.
    """
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)
    _, write, _, write_bytes = row_types(compute, target, vl)
    numbers = _numbers(compute, vl)

    def codegen(context, builder, sig, args):
        to, n, rows, n_rows, start, apart, tap, count, tap_step = args
        every_number = partial(_every, builder, numbers)

        def step(i, mask):
            zero = ir.Constant(wide, None)
            total = cgutils.alloca_once_value(builder, zero)
            with cgutils.for_range(builder, n_rows) as loop:
                taps, shares = _entry(builder, rows, loop.index, 0), _entry(builder, rows, loop.index, 1)
                first = builder.add(_entry(builder, rows, loop.index, 2), tap)

                def take(k, taps=taps, shares=shares, first=first):
                    at = builder.add(builder.add(start, i), builder.mul(k, apart))
                    chosen = load(builder, element(builder, taps, at, wide, wide_bytes), wide, wide_bytes, mask)
                    share = load(builder, element(builder, shares, at, read, read_bytes), read, read_bytes, mask)
                    wanted = every_number(builder.add(first, builder.mul(k, tap_step)))
                    hit = builder.icmp_signed("==", builder.bitcast(chosen, numbers), wanted)
                    given = builder.select(hit, convert(builder, share, source, compute, vl), zero)
                    builder.store(builder.fadd(builder.load(total), given), total)

                _repeat(builder, known, I64(0), count, take)
            result = convert(builder, builder.load(total), compute, target, vl)
            store(builder, result, element(builder, to, i, write, write_bytes), write_bytes, mask)

        by_vectors(builder, n, vl, step)
        return context.get_dummy_value()

    @intrinsic
    def gather(typingctx, to, n, rows, n_rows, start, apart, tap, count, step):
        return signature(types.none, *[types.int64] * 9), codegen

    return gather


@cache
def gather_few(source: str, compute: str, target: str, vl: int):
    """Compiled-in function: `gather_shares`, for few windows a row without a loop over them."""
    every, one, two, three = (gather_shares(source, compute, target, vl, known) for known in range(4))

    @njit(**DEVICE)
    def gather(to, n, rows, n_rows, start, apart, tap, count, step):
        if count == 1:
            one(to, n, rows, n_rows, start, apart, tap, count, step)
        elif count == 2:
            two(to, n, rows, n_rows, start, apart, tap, count, step)
        elif count == 3:
            three(to, n, rows, n_rows, start, apart, tap, count, step)
        else:
            every(to, n, rows, n_rows, start, apart, tap, count, step)

    return gather


@cache
def find_few(source: str, compute: str, vl: int, planar: bool):
    """Compiled-in function: `find_taps`, for few taps a row without a loop over them."""
    every, two, three = (find_taps(source, compute, vl, planar, known) for known in (0, 2, 3))

    @njit(**DEVICE)
    def find(to, n, rows, n_rows, columns, begin, end, shift, first):
        if end - begin == 2:
            two(to, n, rows, n_rows, columns, begin, end, shift, first)
        elif end - begin == 3:
            three(to, n, rows, n_rows, columns, begin, end, shift, first)
        else:
            every(to, n, rows, n_rows, columns, begin, end, shift, first)

    return find


@njit(**DEVICE)
def ask_for(start, size_bytes):
    """Ask for the cache lines of so many bytes."""
    for offset in range(0, size_bytes, 64):
        prefetch(start + offset)


@njit(**DEVICE)
def reached(first, last, step, pad, taps, extent):
    """Positions on an axis of the image, [low, end), that the windows [first, last) reach."""
    return max(0, first * step - pad), min(extent, (last - 1) * step - pad + taps)


@njit(**DEVICE)
def covering(low, end, step, pad, taps, windows):
    """Windows on an axis, [first, last), that cover one of the positions [low, end)."""
    return max(0, (low + pad - taps) // step + 1), min(windows, (end - 1 + pad) // step + 1)
