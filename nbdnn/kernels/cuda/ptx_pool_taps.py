"""Which tap of each window is its maximum, an axis at a time, and what elements are given back: straight code on rows
of planes in a thread's registers, as `ptx_pool_rolling` has them.

Of equal keys the first is looked for. Tap numbers lie in fields of words, row by row; no tap has all bits of a field.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_axes import Axis
from nbdnn.kernels.cuda.pool_rolling_plan import NO_TAP, Line, Shared, fields_of
from nbdnn.kernels.cuda.ptx import F32, I32, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_pool_rolling import elements_type, keys_type, signed, widened
from nbdnn.kernels.cuda.ptx_tile import shared_at
from nbdnn.kernels.cuda.ptx_vector import floats, moved


def _larger(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _most(builder, values: list):
    found = values[0]
    for value in values[1:]:
        found = _larger(builder, found, value)
    return found


def _most_of(builder, values: list):
    """Of neighbours, by powers of two of them: windows that overlap share theirs."""
    kept: dict[tuple[int, int], ir.Value] = {}

    def of(first: int, end: int):
        if end - first == 1:
            return values[first]
        if (first, end) not in kept:
            half = 1 << (end - first - 1).bit_length() - 1
            kept[first, end] = _larger(builder, of(first, first + half), of(end - half, end))
        return kept[first, end]

    return of


def _field(builder, most, taps: list[tuple[int, ir.Value]], shift: int):
    """The number of the first tap that equals the largest, shifted into its place."""
    (number, _), *before = reversed(taps)
    found = I32(number << shift)
    for number, value in before:
        found = builder.select(builder.icmp_signed("==", value, most), I32(number << shift), found)
    return found


def _words(builder, taps: int, of_rows: list) -> list:
    """Words of the fields of rows, each already in its place."""
    _, of_word = fields_of(taps)
    words = []
    for start in range(0, len(of_rows), of_word):
        word = of_rows[start]
        for each in of_rows[start + 1 : start + of_word]:
            word = builder.or_(word, each)
        words.append(word)
    return words


def _hit(builder, total, share, word, row: int, taps: int):
    """total + share where the row's field of a word is zero. total: None for nothing yet."""
    bits, of_word = fields_of(taps)
    mask = ((1 << bits) - 1) << row % of_word * bits
    add = "selp.f32 $0, $1, 0f00000000, hit;" if total is None else "@hit add.f32 $0, $0, $1;"
    text = f"and.b32 field, $2, {mask:#x}; setp.eq.b32 hit, field, 0; {add}"
    text = f"{{ .reg .pred hit; .reg .b32 field; {text} }}"
    given = [] if total is None else [total]
    return asm(builder, F32, text, "=f,f,r" + ",0" * len(given), [share, word, *given])


def _pattern(taps: int, number: int) -> int:
    """A word whose fields all have that number."""
    bits, of_word = fields_of(taps)
    return signed(sum(number << row * bits for row in range(of_word)))


def _get(builder, address, offset: int, kind=I32):
    return builder.load(shared_at(builder, address, offset, kind), align=4)


@cache
def find_along(axis: Axis, planes: int, line: Line, shared: Shared):
    """Intrinsic (shared address of a window's first tap in the first row, whether there is one, keys of this column)
    -> (its largest keys; words of the taps that they are of, of those rows that are outputs)."""
    taps, first, words = axis.taps, -line.first_position, planes * shared.words
    outputs = range(first, first + line.outputs)
    result = types.Tuple((keys_type(planes * line.positions), keys_type(words)))

    @intrinsic
    def find(typingctx, where, wanted, own):
        def codegen(context, builder, sig, args):
            largest, every = [], []
            bits, of_word = fields_of(taps)
            none = builder.select(args[1], I32(0), I32(NO_TAP))
            kept = unpacked(builder, args[2], planes * line.positions)
            for plane in range(planes):
                fields = []
                for row in range(line.positions):
                    number = plane * line.positions + row
                    values = [
                        kept[number]
                        if tap == shared.own_tap
                        else _get(builder, args[0], number * shared.row_bytes + tap * shared.step_bytes)
                        for tap in range(taps)
                    ]
                    most = _most(builder, values)
                    largest.append(most)
                    if row in outputs:
                        shift = (row - first) % of_word * bits
                        fields.append(_field(builder, most, list(enumerate(values)), shift))
                every += [builder.or_(word, none) for word in _words(builder, taps, fields)]
            return context.make_tuple(builder, sig.return_type, [packed(builder, largest), packed(builder, every)])

        own_type = keys_type(planes * line.positions)
        return signature(result, types.uint32, types.boolean, own_type), codegen

    return find


@cache
def give_along(axis: Axis, planes: int, line: Line, shared: Shared):
    """Intrinsic (shared address of the sums of window 0, behind which are the words; the last window that covers a
    position, the tap that this is there; number of windows, and that of none; sums and words of this column) -> what
    the position is given, row by row."""
    covering, outputs = -(-axis.taps // axis.stride), planes * line.outputs

    @intrinsic
    def give(typingctx, sums, window, tap, windows, nowhere, own_sums, own_words):
        def codegen(context, builder, sig, args):
            sums, window, tap, windows, nowhere, *own = args
            own_sums = unpacked(builder, own[0], outputs)
            own_words = unpacked(builder, own[1], planes * shared.words)
            totals: list = [None] * outputs
            for i in range(covering):
                there, pattern = builder.sub(window, I32(i)), I32(_pattern(axis.taps, i))
                is_there = builder.icmp_unsigned("<", there, windows)
                if axis.stride > 1:
                    number = moved(builder, tap, i * axis.stride)
                    is_there = builder.and_(is_there, builder.icmp_signed("<", number, I32(axis.taps)))
                    pattern = builder.mul(builder.select(is_there, number, I32(0)), I32(_pattern(axis.taps, 1)))
                there = builder.select(is_there, there, nowhere)
                place = builder.add(sums, builder.mul(there, I32(shared.step_bytes)))
                is_own = axis.stride == 1 and i == shared.own_tap
                for plane in range(planes):
                    words = own_words[plane * shared.words : (plane + 1) * shared.words]
                    if not is_own:
                        first = outputs + plane * shared.words
                        words = [_get(builder, place, (first + k) * shared.row_bytes) for k in range(shared.words)]
                    words = [builder.xor(word, pattern) for word in words]
                    for row in range(line.outputs):
                        number = plane * line.outputs + row
                        share = own_sums[number] if is_own else _get(builder, place, number * shared.row_bytes, F32)
                        word = words[row // fields_of(axis.taps)[1]]
                        totals[number] = _hit(builder, totals[number], share, word, row, axis.taps)
            return packed(builder, totals)

        own_types = floats(outputs), keys_type(planes * shared.words)
        return signature(floats(outputs), types.uint32, *[types.int32] * 4, *own_types), codegen

    return give


# ---- rows of a column ------------------------------------------------------------------------------------------------


@cache
def find_across(axis: Axis, planes: int, line: Line):
    """Intrinsic (keys of the rows) -> (largest keys of the windows across them; words of their taps)."""
    words = planes * line.words_of(axis.taps)
    result = types.Tuple((keys_type(planes * line.windows), keys_type(words)))

    @intrinsic
    def find(typingctx, rows):
        def codegen(context, builder, sig, args):
            every, largest, found = unpacked(builder, args[0], planes * line.positions), [], []
            bits, of_word = fields_of(axis.taps)
            for plane in range(planes):
                values = every[plane * line.positions : (plane + 1) * line.positions]
                of, fields = _most_of(builder, values), []
                for window in range(line.windows):
                    taps = line.taps_of(axis, window)
                    first, end = taps[0][1], taps[-1][1] + 1
                    most = of(first, end)
                    numbered = [(tap, values[row]) for tap, row in taps]
                    largest.append(most)
                    fields.append(_field(builder, most, numbered, window % of_word * bits))
                found += _words(builder, axis.taps, fields)
            return context.make_tuple(builder, sig.return_type, [packed(builder, largest), packed(builder, found)])

        return signature(result, keys_type(planes * line.positions)), codegen

    return find


@cache
def give_across(axis: Axis, planes: int, line: Line):
    """Intrinsic (sums of windows, words of their taps) -> sums of the rows."""
    words = line.words_of(axis.taps)

    @intrinsic
    def give(typingctx, sums, taps):
        def codegen(context, builder, sig, args):
            if axis == (1, 1, 0):  # every row is a window
                return args[0]
            shares, kept = unpacked(builder, args[0], planes * line.windows), unpacked(builder, args[1], planes * words)
            _, of_word = fields_of(axis.taps)
            totals: list = [None] * (planes * line.outputs)
            for plane in range(planes):
                for window in range(line.windows):
                    word = kept[plane * words + window // of_word]
                    for tap, row in line.taps_of(axis, window):
                        at = row + line.first_position
                        if 0 <= at < line.outputs:
                            number = builder.xor(word, I32(_pattern(axis.taps, tap)))
                            at += plane * line.outputs
                            share = shares[plane * line.windows + window]
                            totals[at] = _hit(builder, totals[at], share, number, window, axis.taps)
            return packed(builder, [F32(0.0) if total is None else total for total in totals])

        result = floats(planes * line.outputs)
        return signature(result, floats(planes * line.windows), keys_type(planes * words)), codegen

    return give


@cache
def give_depths(dtype: str, axis: Axis, windows: int):
    """Intrinsic (keys and sums of the planes before, keys of those that come, dy of the windows) -> (sums of the planes
    that no later window reaches, keys and sums of the others)."""
    before = max(0, axis.taps - axis.stride) * windows
    held, come = max(1, before), axis.stride * windows
    result = types.Tuple((floats(come), keys_type(held), floats(held)))

    def give_one(builder, of_keys: list, of_sums: list, share) -> None:
        """dy to the first of the planes whose key is the largest; None for a sum that is nothing yet."""
        most, last, operands = _most(builder, of_keys), len(of_keys) - 1, [share]
        lines = [".reg .pred hit, unmet;" if last else ".reg .pred unmet; setp.eq.b32 unmet, 0, 0;"]
        for i, key in enumerate(of_keys):
            if i < last:
                operands += [key] if i else [most, key]
                compare, behind = ("setp.eq.and.s32", ", unmet") if i else ("setp.eq.s32", "")
                lines.append(f"{compare} hit|unmet, ${last + 2 + i + 1}, ${last + 2}{behind};")
            hit = "hit" if i < last else "unmet"
            nothing = of_sums[i] is None
            lines.append(
                f"selp.f32 ${i}, ${last + 1}, 0f00000000, {hit};"
                if nothing
                else f"@{hit} add.f32 ${i}, ${i}, ${last + 1};"
            )
        ties = [str(i) for i, total in enumerate(of_sums) if total is not None]
        constraints = ",".join([*["=&f"] * (last + 1), "f", *["r"] * (len(operands) - 1), *ties])
        operands += [total for total in of_sums if total is not None]
        result = F32 if not last else ir.LiteralStructType([F32] * (last + 1))
        sums = asm(builder, result, f"{{ {' '.join(lines)} }}", constraints, operands)
        of_sums[:] = unpacked(builder, sums, last + 1) if last else [sums]

    @intrinsic
    def give(typingctx, keys_held, sums_held, keys_come, dy):
        def codegen(context, builder, sig, args):
            every = unpacked(builder, args[0], before) + unpacked(builder, args[2], come)
            sums = unpacked(builder, args[1], before) + [None] * come
            for window, element in enumerate(unpacked(builder, args[3], windows)):
                of_sums = sums[window::windows]
                give_one(builder, every[window::windows], of_sums, widened(builder, dtype, element))
                sums[window::windows] = of_sums
            given = sums[:come], every[come:] or [I32(0)], sums[come:] or [F32(0.0)]
            return context.make_tuple(builder, sig.return_type, [packed(builder, each) for each in given])

        of_dy = elements_type(dtype, windows)
        return signature(result, keys_type(held), floats(held), keys_type(come), of_dy), codegen

    return give


@cache
def queue(axis: Axis, words: int) -> Callable:
    """Intrinsic (words of the planes before, of those that come) -> (words of the planes that leave, of the others)."""
    before, come = max(0, axis.taps - axis.stride) * words, axis.stride * words
    held = max(1, before)

    @intrinsic
    def shift(typingctx, words_held, words_come):
        def codegen(context, builder, sig, args):
            every = unpacked(builder, args[0], before) + unpacked(builder, args[1], come)
            given = every[:come], every[come:] or [I32(0)]
            return context.make_tuple(builder, sig.return_type, [packed(builder, each) for each in given])

        result = types.Tuple((keys_type(come), keys_type(held)))
        return signature(result, keys_type(held), keys_type(come)), codegen

    return shift
