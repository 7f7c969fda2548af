"""Rows of vectors: loaded with zeros beside the image, multiplied by a table, finished and stored, all of it unrolled.

Which elements of a flat tuple of float32 meet is known when a kernel is compiled, so it is written in tables, and no
index, loop or branch is left: arrays that loops index become registers only where LLVM unrolls the loops, which it does
not with thousands of products, and inlined functions cost Numba seconds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.ptx import F32, I32, packed, unpacked
from nbdnn.kernels.cuda.ptx_vector import (
    floats,
    load_parts,
    load_vector,
    moved,
    narrowed,
    parts_of,
    stepped,
    store_vector,
    widened,
)
from nbdnn.problem import ITEMSIZE

_MOST_WORDS = 16  # of an output that is read: rows are asked for ahead, at least one


class Rows(NamedTuple):
    """How rows of vectors are multiplied. offsets: of a row's vectors, from the first column.

    steps: (row, counted from the first; its table; rows of the sums that are complete then). For each (i, j, k) of a
    table in turn, sums[i] gains element j of the row times weights[k].
    """

    dtype: str
    lanes: int
    offsets: tuple[int, ...]
    steps: tuple[tuple[int, tuple[tuple[int, int, int], ...], tuple[int, ...]], ...]


class End(NamedTuple):
    """How rows of sums are stored: vectors at these columns from the first, after the epilogue of these tokens."""

    dtype: str
    lanes: int
    columns: tuple[int, ...]
    tokens: tuple[str, ...]


class Source(NamedTuple):
    """Where rows are read: image[at + row * row_step + column * column_step], zeros where not 0 <= row < rows, ..."""

    image: object
    at: int
    row: int
    row_step: int
    rows: int
    column: int
    column_step: int
    columns: int


class Target(NamedTuple):
    """Where sums are stored, at places as in a source; bias is a vector of float32."""

    out: object
    residual: object
    at: int
    row: int
    row_step: int
    rows: int
    column: int
    column_step: int
    columns: int
    bias: tuple[float, ...]
    alpha: float
    beta: float


def _fields(builder, value, of) -> dict:
    """The fields of a NamedTuple."""
    return {name: builder.extract_value(value, i) for i, name in enumerate(of.fields)}


def _row(builder, dtype, lanes, offsets, place, row: int):
    """The elements of a row's vectors."""
    at_row = moved(builder, place["row"], row)
    inside = builder.icmp_unsigned("<", at_row, place["rows"])
    start = stepped(builder, place["at"], at_row, place["row_step"])
    start = stepped(builder, start, place["column"], place["column_step"])
    values = []
    for offset in offsets:
        column = moved(builder, place["column"], offset)
        wanted = builder.and_(inside, builder.icmp_unsigned("<", column, place["columns"]))
        index = stepped(builder, start, column.type(offset), place["column_step"])
        values += load_vector(builder, builder.gep(place["image"], [index]), wanted, dtype, lanes)
    return values


class _Ending:
    """Rows of sums to the output, in a known order. Of an output that is read, some are asked for before the first is
    complete: no load of it may pass a store, as those of a residual may."""

    def __init__(self, context, builder, end: End, place: dict, order, apart: int = 1) -> None:
        """place: the target's fields. order: the rows, so far apart in the output."""
        self._context, self._builder, self._end, self._place, self._apart = context, builder, end, place, apart
        self._later = list(order) if "beta" in end.tokens else []
        self._asked: dict[int, list] = {}
        for _ in range(max(1, _MOST_WORDS // (len(end.columns) * parts_of(end.dtype, end.lanes)[1]))):
            self._ask()

    def _vectors(self, row: int):
        """(element of the output, whether it is there) of each vector of a row."""
        builder, place = self._builder, self._place
        at_row = moved(builder, place["row"], row * self._apart)
        inside = builder.icmp_unsigned("<", at_row, place["rows"])
        start = stepped(builder, place["at"], at_row, place["row_step"])
        for offset in self._end.columns:
            column = moved(builder, place["column"], offset)
            wanted = builder.and_(inside, builder.icmp_unsigned("<", column, place["columns"]))
            yield stepped(builder, start, column, place["column_step"]), wanted

    def _ask(self) -> None:
        """For the next row."""
        if self._later:
            row, out, of = self._later.pop(0), self._place["out"], (self._end.dtype, self._end.lanes)
            self._asked[row] = [
                load_parts(self._builder, self._builder.gep(out, [index]), wanted, *of, constant=False)
                for index, wanted in self._vectors(row)
            ]

    def finished(self, row: int, sums):
        """(address, whether it is in the output, elements) of each vector of a row, of its sums."""
        builder, end, place, real = self._builder, self._end, self._place, types.float32
        finish, of_six = epilogue.finish("f32", end.tokens).py_func, signature(real, *[real] * 6)
        nothing, bias = [F32(0.0)] * end.lanes, unpacked(builder, place["bias"], end.lanes)
        asked = self._asked.pop(row, None)
        for i, (index, wanted) in enumerate(self._vectors(row)):
            before = widened(builder, end.dtype, asked[i]) if asked else nothing
            added = builder.gep(place["residual"], [index])
            residual = load_vector(builder, added, wanted, *end[:2]) if "res" in end.tokens else nothing
            vector = sums[i * end.lanes : (i + 1) * end.lanes]
            given = [place["alpha"], place["beta"]]
            elements = [
                self._context.compile_internal(builder, finish, of_six, [total, *given, *others])
                for total, *others in zip(vector, before, bias, residual, strict=True)
            ]
            yield builder.gep(place["out"], [index]), wanted, elements
        self._ask()

    def store(self, rows, sums) -> None:
        """Rows of all sums."""
        of_row = len(self._end.columns) * self._end.lanes
        for row in rows:
            for where, wanted, elements in self.finished(row, sums[row * of_row : (row + 1) * of_row]):
                store_vector(self._builder, where, wanted, self._end.dtype, elements)


def _completed(rows: Rows) -> list[int]:
    """Rows of the sums, in the order in which they are complete."""
    return [row for *_, complete in rows.steps for row in complete]


@cache
def multiply_rows(rows: Rows, end: End | None = None):
    """Intrinsic (sums, weights, source, target) -> sums after the steps of `rows`.

    With an end, rows of the sums are stored as soon as they are complete, which makes room for the next; else the
    target may be anything.
    """

    @intrinsic
    def multiply(typingctx, sums, weights, source, target):
        def codegen(context, builder, sig, args):
            totals, factors = (unpacked(builder, args[i], sig.args[i].count) for i in (0, 1))
            place, ending = _fields(builder, args[2], sig.args[2]), None
            if end is not None:
                ending = _Ending(context, builder, end, _fields(builder, args[3], sig.args[3]), _completed(rows))
            for row, table, complete in rows.steps:
                values = _row(builder, rows.dtype, rows.lanes, rows.offsets, place, row)
                for i, j, k in table:
                    totals[i] = builder.fma(values[j], factors[k], totals[i])
                if ending is not None:
                    ending.store(complete, totals)
            return packed(builder, totals)

        return signature(sums, sums, weights, source, target), codegen

    return multiply


def _shared_row(builder, rows: Rows, image, first: int, pixel_bytes: int):
    """The elements of a row's vectors; image: a pointer to bytes, of which the row begins at the first."""
    part, count = parts_of(rows.dtype, rows.lanes)
    whole, values = part if count == 1 else ir.VectorType(part, count), []
    for offset in rows.offsets:
        where = builder.gep(image, [I32(first + offset * pixel_bytes)])
        loaded = builder.load(builder.bitcast(where, whole.as_pointer(3)), align=rows.lanes * ITEMSIZE[rows.dtype])
        parts = [loaded] if count == 1 else [builder.extract_element(loaded, I32(i)) for i in range(count)]
        values += widened(builder, rows.dtype, parts)
    return values


@cache
def multiply_shared_rows(rows: Rows, end: End, row_bytes: int, pixel_bytes: int):
    """Intrinsic (weights, address, target): stores the sums, from zero, after the steps of `rows`, whose vectors lie in
    shared memory with borders of their own; row 0 and column 0 are at the address."""
    count = len(end.columns) * end.lanes * (1 + max(row for *_, complete in rows.steps for row in complete))

    @intrinsic
    def multiply(typingctx, weights, address, target):
        def codegen(context, builder, sig, args):
            totals, factors = [F32(0.0)] * count, unpacked(builder, args[0], sig.args[0].count)
            image = builder.inttoptr(args[1], ir.IntType(8).as_pointer(3))
            ending = _Ending(context, builder, end, _fields(builder, args[2], sig.args[2]), _completed(rows))
            for row, table, complete in rows.steps:
                values = _shared_row(builder, rows, image, row * row_bytes, pixel_bytes)
                for i, j, k in table:
                    totals[i] = builder.fma(values[j], factors[k], totals[i])
                ending.store(complete, totals)
            return context.get_dummy_value()

        return signature(types.none, weights, types.uint32, target), codegen

    return multiply


@cache
def store_rows(end: End, count: int, apart: int = 1):
    """Intrinsic (sums, target): so many rows, so far apart."""

    @intrinsic
    def store(typingctx, sums, target):
        def codegen(context, builder, sig, args):
            totals, place = unpacked(builder, args[0], sig.args[0].count), _fields(builder, args[1], sig.args[1])
            _Ending(context, builder, end, place, range(count), apart).store(range(count), totals)
            return context.get_dummy_value()

        return signature(types.none, sums, target), codegen

    return store


@cache
def finish_rows(end: End, count: int, apart: int):
    """Intrinsic (sums, target) -> what `store_rows` would store, in words of two 16-bit elements."""
    of_row = len(end.columns) * end.lanes
    words = types.UniTuple(types.uint32, count * of_row // 2)

    @intrinsic
    def finish(typingctx, sums, target):
        def codegen(context, builder, sig, args):
            totals, place = unpacked(builder, args[0], count * of_row), _fields(builder, args[1], sig.args[1])
            ending, every = _Ending(context, builder, end, place, range(count), apart), []
            for row in range(count):
                for _, _, elements in ending.finished(row, totals[row * of_row : (row + 1) * of_row]):
                    every += elements
            return packed(builder, narrowed(builder, end.dtype, every))

        return signature(words, sums, target), codegen

    return finish


@cache
def load_rows(dtype: str, lanes: int, offsets: tuple[int, ...], count: int):
    """Intrinsic (source) -> the elements of the vectors at these columns of so many rows."""

    @intrinsic
    def load(typingctx, source):
        def codegen(context, builder, sig, args):
            place = _fields(builder, args[0], sig.args[0])
            rows = [_row(builder, dtype, lanes, offsets, place, row) for row in range(count)]
            return packed(builder, [value for row in rows for value in row])

        return signature(floats(count * len(offsets) * lanes), source), codegen

    return load
