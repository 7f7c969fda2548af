"""What a thread of `pool_marching` does with a window and with a cell, as straight code on vectors of channels.

Values are flat tuples of words: float32, or two 16-bit elements, that are compared two at once. The taps of windows are
numbers in words as well, one for each element.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_axes import LOWEST
from nbdnn.kernels.cuda.pool_marching_plan import NO_TAP, Variant
from nbdnn.kernels.cuda.ptx import F32, I32, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_vector import load_parts, moved


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def tuple_of(count: int):
    return types.UniTuple(types.uint32, count)


def number_of(dtype: str, number: int):
    """The word of a tap's number, once or twice."""
    return I32(number if dtype == "f32" else number * 0x10001)


# ---- what lies inside ------------------------------------------------------------------------------------------------


@cache
def bits_inside(rows: int, columns: int):
    """Intrinsic (first row, extent, first column, extent) -> a word with a bit for each of rows x columns that is
    inside of both."""

    @intrinsic
    def inside(typingctx, row, height, column, width):
        def codegen(context, builder, sig, args):
            of_rows, of_columns = (
                [builder.icmp_unsigned("<", moved(builder, first, i), extent) for i in range(count)]
                for first, extent, count in ((args[0], args[1], rows), (args[2], args[3], columns))
            )
            bits = I32(0)
            for i, both in enumerate(product(of_rows, of_columns)):
                bits = builder.or_(bits, builder.select(builder.and_(*both), I32(_signed(1 << i)), I32(0)))
            return bits

        return signature(types.int32, row, height, column, width), codegen

    return inside


@cache
def first_tap(dtype: str):
    """Intrinsic (word of what is inside) -> the number of the first tap that is, or NO_TAP."""

    @intrinsic
    def first(typingctx, bits):
        def codegen(context, builder, sig, args):
            number = builder.select(
                builder.icmp_signed("==", args[0], I32(0)), I32(NO_TAP), builder.cttz(args[0], ir.IntType(1)(0))
            )
            return builder.mul(number, number_of(dtype, 1))

        return signature(types.int32, bits), codegen

    return first


# ---- global memory ---------------------------------------------------------------------------------------------------


def has_bit(builder, bits, i: int):
    return builder.icmp_signed("!=", builder.and_(bits, I32(_signed(1 << i))), I32(0))


def _words_of(v: Variant, begin: int, end: int) -> int:
    """Of some of a step's planes; of none, one."""
    return max(1, len(v.planes_met[begin:end]) * v.taps_of_plane * v.words)


@cache
def load_planes(v: Variant, begin: int, end: int):
    """Intrinsic (x, at, first plane, least, extent, bits, steps of planes, rows, columns) -> the taps of some of a
    step's planes; the lowest number where a plane is not between least and extent, or a bit is not set."""
    planes, fill, count = v.planes_met[begin:end], LOWEST[v.dtype], _words_of(v, begin, end)

    @intrinsic
    def load(typingctx, x, at, first, least, extent, bits, step_d, step_h, step_w):
        def codegen(context, builder, sig, args):
            x, at, first, least, extent, bits, *steps = args
            found = []
            for plane, _ in planes:
                position = moved(builder, first, plane)
                there = builder.and_(
                    builder.icmp_signed(">=", position, least), builder.icmp_signed("<", position, extent)
                )
                of_plane = builder.select(there, bits, I32(0))
                for i, (row, column) in enumerate(product(range(v.axes[1].taps), range(v.axes[2].taps))):
                    where = at
                    for step, count in zip(steps, (plane, row, column), strict=True):
                        where = builder.add(where, builder.mul(step, I32(count)))
                    found += load_parts(
                        builder, builder.gep(x, [where]), has_bit(builder, of_plane, i), v.dtype, v.lanes,
                        constant=False, fill=fill,
                    )  # fmt: skip
            return packed(builder, found or [I32(0)])

        return signature(tuple_of(count), x, *[types.int32] * 8), codegen

    return load


@cache
def load_vector(v: Variant):
    """Intrinsic (data, at, wanted) -> the words of a vector, zeros unless it is wanted."""

    @intrinsic
    def load(typingctx, data, at, wanted):
        def codegen(context, builder, sig, args):
            where = builder.gep(args[0], [args[1]])
            return packed(builder, load_parts(builder, where, args[2], v.dtype, v.lanes, constant=False))

        return signature(tuple_of(v.words), data, types.int32, types.boolean), codegen

    return load


# ---- windows ---------------------------------------------------------------------------------------------------------


def _is_larger(builder, dtype: str, a, b):
    """Of words, as `_chosen` takes it."""
    if dtype == "f32":
        return builder.fcmp_ordered(">", builder.bitcast(a, F32), builder.bitcast(b, F32))
    return asm(builder, I32, f"set.gt.u32.{dtype}x2 $0, $1, $2;", "=r,r,r", [a, b])


def _is_nan(builder, dtype: str, a):
    if dtype == "f32":
        return builder.fcmp_unordered("uno", builder.bitcast(a, F32), builder.bitcast(a, F32))
    return asm(builder, I32, f"set.nan.u32.{dtype}x2 $0, $1, $1;", "=r,r", [a])


def _chosen(builder, condition, a, b):
    """a where the condition holds, else b; of two elements a word of it is all bits of each."""
    if condition.type == ir.IntType(1):
        return builder.select(condition, a, b)
    return builder.or_(builder.and_(a, condition), builder.and_(b, builder.not_(condition)))


def _larger(builder, dtype: str, a, b):
    """NaN where one is."""
    return asm(builder, I32, f"max.NaN.{dtype if dtype == 'f32' else dtype + 'x2'} $0, $1, $2;", "=r,r,r", [a, b])


def _of_plane(builder, v: Variant, taps: list[list], first, rarely: bool = False):
    """(maxima, numbers of their taps) of the taps of a plane, of equal ones the first. rarely: of NaNs the last."""
    maxima, numbers = [I32(_signed(LOWEST[v.dtype]))] * v.words, [first] * v.words
    for i, tap in enumerate(taps):
        for at, word in enumerate(tap):
            better = _is_nan(builder, v.dtype, word) if rarely else _is_larger(builder, v.dtype, word, maxima[at])
            numbers[at] = _chosen(builder, better, number_of(v.dtype, i), numbers[at])
            maxima[at] = _larger(builder, v.dtype, word, maxima[at])
    return maxima, numbers


def _joined(builder, v: Variant, held, come, tap: int, is_first=None):
    """A window's (maxima, numbers) with those of the next plane, its tap of the first axis, where they are larger.
    is_first: also where they are NaN; or everywhere, since no plane before it is in the image."""
    add = number_of(v.dtype, tap * v.taps_of_plane)
    numbers = [builder.add(number, add) for number in come[1]]
    if tap == 0:
        return come[0], numbers
    maxima, chosen = [], []
    for word, number, new, new_number in zip(*held, come[0], numbers, strict=True):
        better = _is_larger(builder, v.dtype, new, word)
        if is_first is not None:
            better = builder.or_(better, _is_nan(builder, v.dtype, new))
            better = builder.or_(better, is_first if v.dtype == "f32" else builder.sext(is_first, I32))
        chosen.append(_chosen(builder, better, new_number, number))
        maxima.append(_larger(builder, v.dtype, new, word))
    return maxima, chosen


def _met(builder, v: Variant, windows: dict, taps: list[list], met: list[tuple[int, int]], first, is_first) -> None:
    """The windows, with what they have of a plane. That a maximum is NaN is rare, and that a plane is the first one."""
    found = _of_plane(builder, v, taps, first)
    joined = {window: _joined(builder, v, windows.get(window), found, tap) for window, tap in met}
    is_rare = _any(builder, [_is_nan(builder, v.dtype, word) for word in found[0]])
    is_rare, before, numbers = builder.or_(is_rare, is_first), builder.block, {}
    with builder.if_then(is_rare, likely=False):
        nan = _of_plane(builder, v, taps, first, rarely=True)
        is_nan = [_is_nan(builder, v.dtype, word) for word in found[0]]
        chosen = [_chosen(builder, *each) for each in zip(is_nan, nan[1], found[1], strict=True)]
        for window, tap in met:
            _, numbers[window] = _joined(builder, v, windows.get(window), (found[0], chosen), tap, is_first)
        after = builder.block
    for window, (maxima, usual) in joined.items():
        merged = []
        for number, other in zip(usual, numbers[window], strict=True):
            merged.append(builder.phi(I32))
            merged[-1].add_incoming(number, before)
            merged[-1].add_incoming(other, after)
        windows[window] = maxima, merged


def _any(builder, conditions: list):
    """Whether one of them holds, as `_chosen` takes them."""
    found = conditions[0]
    for each in conditions[1:]:
        found = builder.or_(found, each)
    return found if found.type == ir.IntType(1) else builder.icmp_signed("!=", found, I32(0))


@cache
def no_windows(v: Variant):
    """Intrinsic of nothing -> windows that have begun, of which none has an element yet."""

    @intrinsic
    def nothing(typingctx):
        def codegen(context, builder, sig, args):
            of_window = [I32(_signed(LOWEST[v.dtype]))] * v.words + [number_of(v.dtype, NO_TAP)] * v.words
            return packed(builder, of_window * v.held or [I32(0)])

        return signature(tuple_of(v.held_words)), codegen

    return nothing


@cache
def find_step(v: Variant):
    """Intrinsic (taps of a step's planes ahead, of its others, windows that have begun, first tap that is inside of a
    plane, first plane) -> (the taps' numbers that the window which ends here has chosen, windows that have begun)."""
    parts = [(0, v.ahead), (v.ahead, len(v.planes_met))]

    @intrinsic
    def find(typingctx, ahead, others, held, first, plane):
        def codegen(context, builder, sig, args):
            words = [
                word
                for part, taps in zip(parts, args[:2], strict=True)
                for word in unpacked(builder, taps, _words_of(v, *part))[: v.loaded_words if part[0] < part[1] else 0]
            ]
            vectors = [words[i : i + v.words] for i in range(0, len(words), v.words)]
            held = unpacked(builder, args[2], v.held_words)
            begun = [held[i : i + v.words] for i in range(0, 2 * v.held * v.words, v.words)]
            windows: dict = {i: (begun[2 * i], begun[2 * i + 1]) for i in range(v.held)}
            for i, (place, met) in enumerate(v.planes_met):
                taps = vectors[i * v.taps_of_plane : (i + 1) * v.taps_of_plane]
                is_first = builder.icmp_signed("==", moved(builder, args[4], place), I32(0))
                _met(builder, v, windows, taps, met, args[3], is_first)
            held = [word for i in range(v.held) for part in windows[i + 1] for word in part]
            return context.make_tuple(
                builder, sig.return_type, [packed(builder, windows[0][1]), packed(builder, held or [I32(0)])]
            )

        of_taps, of_windows = (tuple_of(_words_of(v, *part)) for part in parts), tuple_of(v.held_words)
        found = types.Tuple((tuple_of(v.words), of_windows))
        return signature(found, *of_taps, of_windows, types.int32, types.int32), codegen

    return find
