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
    load_vector,
    moved,
    narrowed,
    parts_of,
    stepped,
    store_vector,
    widened,
)
from nbdnn.problem import ITEMSIZE


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


def _finished_row(context, builder, end: End, sums, place, row: int):
    """(address, whether it is in the output, elements) of each vector of one row of sums."""
    real = types.float32
    finish, of_six = epilogue.finish("f32", end.tokens).py_func, signature(real, *[real] * 6)
    at_row = moved(builder, place["row"], row)
    inside = builder.icmp_unsigned("<", at_row, place["rows"])
    start = stepped(builder, place["at"], at_row, place["row_step"])
    nothing, bias = [F32(0.0)] * end.lanes, unpacked(builder, place["bias"], end.lanes)
    for i, offset in enumerate(end.columns):
        column = moved(builder, place["column"], offset)
        wanted = builder.and_(inside, builder.icmp_unsigned("<", column, place["columns"]))
        index = stepped(builder, start, column, place["column_step"])
        where, added = builder.gep(place["out"], [index]), builder.gep(place["residual"], [index])
        of_out = (builder, where, wanted, end.dtype, end.lanes)
        before = load_vector(*of_out, constant=False) if "beta" in end.tokens else nothing
        residual = load_vector(builder, added, *of_out[2:]) if "res" in end.tokens else nothing
        vector = sums[i * end.lanes : (i + 1) * end.lanes]
        finished = [
            context.compile_internal(builder, finish, of_six, [total, place["alpha"], place["beta"], *others])
            for total, *others in zip(vector, before, bias, residual, strict=True)
        ]
        yield where, wanted, finished


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
            place = _fields(builder, args[2], sig.args[2])
            for row, table, complete in rows.steps:
                values = _row(builder, rows.dtype, rows.lanes, rows.offsets, place, row)
                for i, j, k in table:
                    totals[i] = builder.fma(values[j], factors[k], totals[i])
                if end is not None:
                    _end_rows(context, builder, end, totals, _fields(builder, args[3], sig.args[3]), complete)
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
            image, place = (
                builder.inttoptr(args[1], ir.IntType(8).as_pointer(3)),
                _fields(builder, args[2], sig.args[2]),
            )
            for row, table, complete in rows.steps:
                values = _shared_row(builder, rows, image, row * row_bytes, pixel_bytes)
                for i, j, k in table:
                    totals[i] = builder.fma(values[j], factors[k], totals[i])
                _end_rows(context, builder, end, totals, place, complete)
            return context.get_dummy_value()

        return signature(types.none, weights, types.uint32, target), codegen

    return multiply


def _end_rows(context, builder, end: End, sums, place, complete, apart=1):
    """Finish and store rows of the sums."""
    of_row = len(end.columns) * end.lanes
    for row in complete:
        vectors = _finished_row(context, builder, end, sums[row * of_row : (row + 1) * of_row], place, row * apart)
        for where, wanted, finished in vectors:
            store_vector(builder, where, wanted, end.dtype, finished)


@cache
def store_rows(end: End, count: int, apart: int = 1):
    """Intrinsic (sums, target): so many rows, so far apart."""

    @intrinsic
    def store(typingctx, sums, target):
        def codegen(context, builder, sig, args):
            totals, place = unpacked(builder, args[0], sig.args[0].count), _fields(builder, args[1], sig.args[1])
            _end_rows(context, builder, end, totals, place, range(count), apart)
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
            every = []
            for row in range(count):
                of_sums = totals[row * of_row : (row + 1) * of_row]
                for _, _, finished in _finished_row(context, builder, end, of_sums, place, row * apart):
                    every += finished
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
