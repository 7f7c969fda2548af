"""From the sums of a warp's matrix instructions to memory, finished, without a way through shared memory.

Lane l of a warp has of 16 rows the sums of rows l / 4 and 8 later, of each eight columns those of 2 * (l % 4) and the
next, which the output has as neighbours. Those of float32 are stored as they are: four lanes make a sector of 32 bytes.
Those of 16 bits are exchanged first: of 32 columns, lane l % 4 gets eight neighbours, 16 bytes of two sectors.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.epilogue import Finish
from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_vector import load_parts, load_vector, narrowed, store_parts, widened

_EIGHT, _QUARTER, _LANES = 8, 4, 4  # columns; sets of eight that lanes exchange; lanes of a row
_SET = 4  # eights of columns that are finished together
_MOST_WORDS = (0, 20, 8)  # that are asked for before the first is waited for, of none, one or two tensors


def _exchanged(builder, words, lane):
    """Of the words of four sets of eight columns, one a lane of four: all four of the set that is the lane's own."""
    words = list(words)
    for bit in (1, 2):
        is_odd = builder.icmp_signed("!=", builder.and_(lane, I32(bit)), I32(0))
        for first in (i for i in range(_QUARTER) if not i & bit):
            low, high = words[first], words[first | bit]
            given = builder.select(is_odd, low, high)
            text = f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, 0xffffffff;"
            taken = asm(builder, I32, text, "=r,r", [given], EFFECT)
            words[first] = builder.select(is_odd, taken, low)
            words[first | bit] = builder.select(is_odd, high, taken)
    return words


def _sets(how: Finish) -> list[tuple[int, int]]:
    """(half of the rows, first eight of columns) of each."""
    return list(product((0, 1), range(0, how.columns // _EIGHT, _SET)))


def _read(how: Finish) -> list[str]:
    return [token for token in ("beta", "res") if token in how.epilogue]


def _words_of_set(how: Finish) -> int:
    """That a lane reads."""
    return _SET * (2 if how.dtype == "f32" else 1) * len(_read(how))


def _ahead(how: Finish) -> int:
    """Sets that are asked for before the first is waited for."""
    words = _words_of_set(how)
    return min(len(_sets(how)), max(1, _MOST_WORDS[len(_read(how))] // words)) if words else 0


class _Lane:
    """What a lane reads and stores of its warp's rows, set by set of four eights of columns."""

    def __init__(self, builder, how: Finish, lane, place, left, step) -> None:
        self.builder, self.how, self.lane, self.step = builder, how, lane, step
        (self.first, self.first_bias), (self.rows, self.columns) = (
            unpacked(builder, place, 2),
            unpacked(builder, left, 2),
        )
        self.row, self.number = builder.lshr(lane, I32(2)), builder.and_(lane, I32(_LANES - 1))
        self.sets, self.is_wide, self.read, self.ahead = _sets(how), how.dtype == "f32", _read(how), _ahead(how)

    def is_column(self, column):
        return self.builder.icmp_signed("<", column, self.columns)

    def row_of(self, half):
        """(row, whether it exists)"""
        row = self.builder.add(self.row, I32(8 * half))
        return row, self.builder.icmp_signed("<", row, self.rows)

    def column_of(self, eight):
        """Of the lane's pair."""
        return self.builder.add(self.builder.shl(self.number, I32(1)), I32(_EIGHT * eight))

    def vectors(self, half, start):
        """Of a set: (place, whether it exists) of each vector that the lane reads or stores."""
        builder, (row, is_row) = self.builder, self.row_of(half)
        at_row = builder.add(self.first, builder.mul(row, self.step))
        held = [self.column_of(i) for i in range(start, start + _SET)]
        if not self.is_wide:
            held = [builder.add(builder.shl(self.number, I32(3)), I32(_EIGHT * start))]
        return [(builder.add(at_row, column), builder.and_(is_row, self.is_column(column))) for column in held]

    def ask(self, number: int, pointers) -> list:
        """The words of what the lane reads of a set, token after token."""
        builder, of_token = self.builder, {"beta": pointers[0], "res": pointers[2]}
        of = self.how.dtype, 2 if self.is_wide else _EIGHT
        words = []
        for token in self.read:
            for at, wanted in self.vectors(*self.sets[number]):
                words += load_parts(builder, builder.gep(of_token[token], [at]), wanted, *of, constant=False)
        return words

    def pairs(self, words) -> dict:
        """By token, what was read of the lane's pairs of a set."""
        of_token, values = len(words) // max(len(self.read), 1), {}
        for i, token in enumerate(self.read):
            of = words[i * of_token : (i + 1) * of_token]
            of = [of[j : j + 2] for j in range(0, len(of), 2)] if self.is_wide else self.exchanged(of)
            values[token] = [widened(self.builder, self.how.dtype, each) for each in of]
        return values

    def exchanged(self, words) -> list:
        return [[word] for word in _exchanged(self.builder, words, self.lane)]


@cache
def asked(how: Finish):
    """Intrinsic ((output, bias, residual), lane, place, left, step) -> words of what the lane reads first.

    For `stored`, which takes the same. Before the products, so that both are on their way together.
    """
    two = types.UniTuple(types.int32, 2)

    @intrinsic
    def ask(typingctx, pointers, lane, place, left, step):
        words = max(1, _ahead(how) * _words_of_set(how))

        def codegen(context, builder, sig, args):
            of = _Lane(builder, how, args[1], args[2], args[3], args[4])
            pointers = unpacked(builder, args[0], 3)
            came = [word for number in range(of.ahead) for word in of.ask(number, pointers)]
            return packed(builder, came or [I32(0)])

        return signature(types.UniTuple(types.uint32, words), pointers, types.int32, two, two, types.int32), codegen

    return ask


@cache
def stored(how: Finish):
    """Intrinsic (sums, words of `asked`, (output, bias, residual), (alpha, beta), lane, (at, bias at), (rows, columns),
    step).

    at, bias at: of the sum of the warp's first row and column. rows, columns: how many there are from it on, columns in
    whole pairs, of 16 bits in sets of eight. step: from a row of the output to the next.
    """
    eights, finish, real = how.columns // _EIGHT, epilogue.finish("f32", how.epilogue).py_func, types.float32
    has_bias, words = "bias" in how.epilogue, max(1, _ahead(how) * _words_of_set(how))
    two, zeros = types.UniTuple(types.int32, 2), [F32(0.0)] * 2

    @intrinsic
    def store(typingctx, sums, came, pointers, scalars, lane, place, left, step):
        def codegen(context, builder, sig, args):
            total, pointers = unpacked(builder, args[0], 4 * eights), unpacked(builder, args[2], 3)
            of, scalars, (out, bias, _) = _Lane(builder, how, *args[4:]), unpacked(builder, args[3], 2), pointers
            given = unpacked(builder, args[1], words)
            of_set = len(given) // max(of.ahead, 1)
            asked = [given[i * of_set : (i + 1) * of_set] for i in range(of.ahead)]

            def biases(at, wanted, count):
                where = builder.gep(bias, [builder.add(of.first_bias, at)])
                return load_vector(builder, where, wanted, how.dtype, count)

            def finished(sums_of_pair, before, shift, added):
                made = []
                for value in zip(sums_of_pair, before, shift, added, strict=True):
                    six = [value[0], *scalars, *value[1:]]
                    made.append(context.compile_internal(builder, finish, signature(real, *[real] * 6), six))
                return made

            for number, (half, start) in enumerate(of.sets):
                read = of.pairs(asked[number]) if of.ahead else {}
                if has_bias and not how.by_column and start == 0:
                    of_row = biases(*of.row_of(half), 1) * 2
                pairs = []
                for i in range(_SET):
                    shift, column = zeros, of.column_of(start + i)
                    if has_bias:
                        shift = biases(column, of.is_column(column), 2) if how.by_column else of_row
                    of_pair = total[4 * (start + i) + 2 * half : 4 * (start + i) + 2 * half + 2]
                    before, added = (read[token][i] if token in read else zeros for token in ("beta", "res"))
                    pairs.append(finished(of_pair, before, shift, added))
                if of.ahead and len(asked) < len(of.sets):
                    asked.append(of.ask(len(asked), pointers))
                parts = [narrowed(builder, how.dtype, pair) for pair in pairs]
                if not of.is_wide:
                    parts = [[word for (word,) in of.exchanged([word for (word,) in parts])]]
                for (at, wanted), of_vector in zip(of.vectors(half, start), parts, strict=True):
                    store_parts(builder, builder.gep(out, [at]), wanted, of_vector)
            return context.get_dummy_value()

        floats, reals = types.UniTuple(types.float32, 4 * eights), types.UniTuple(types.float32, 2)
        given = types.UniTuple(types.uint32, words)
        return signature(types.none, floats, given, pointers, reals, types.int32, two, two, types.int32), codegen

    return store
