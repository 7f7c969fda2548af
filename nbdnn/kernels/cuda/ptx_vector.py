"""Vectors of neighbouring elements: guarded loads and stores, and products by a table, all of it unrolled.

A vector is a few neighbouring elements in memory, moved by one instruction of 2 to 16 bytes, and float32 in registers.
Several of them are one flat tuple of float32. Which of its elements meet is known when a kernel is compiled, so it is
written in tables, and no index, loop or branch is left: arrays that loops index become registers only where LLVM
unrolls the loops, which it does not with thousands of products, and inlined functions cost Numba seconds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.ptx import EFFECT, F16, F32, I32, I64, PURE, asm, packed, unpacked
from nbdnn.problem import ITEMSIZE

_I16 = ir.IntType(16)
_LETTER = {16: "h", 32: "r"}  # of a register in the constraints of inline PTX


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


def floats(count: int):
    """The type of a tuple of float32."""
    return types.UniTuple(types.float32, count)


@cache
def zeros(count: int):
    """Intrinsic of nothing -> so many zeros."""

    @intrinsic
    def nothing(typingctx):
        def codegen(context, builder, sig, args):
            return ir.Constant(ir.ArrayType(F32, count), None)

        return signature(floats(count)), codegen

    return nothing


@cache
def repeated(count: int):
    """Intrinsic of a float32 -> so many of it."""

    @intrinsic
    def repeat(typingctx, value):
        def codegen(context, builder, sig, args):
            return packed(builder, [args[0]] * count)

        return signature(floats(count), types.float32), codegen

    return repeat


# ---- elements in memory and in registers -----------------------------------------------------------------------------


def widened(builder, dtype, parts):
    """float32 of what a load gave: words, or a single 16-bit element."""
    if dtype == "f32":
        return [builder.bitcast(word, F32) for word in parts]
    if parts[0].type == _I16:
        halves = parts
    else:
        halves = [builder.trunc(builder.lshr(word, I32(shift)), _I16) for word in parts for shift in (0, 16)]
    if dtype == "f16":
        return [builder.fpext(builder.bitcast(half, F16), F32) for half in halves]
    if parts[0].type == _I16:
        return [builder.bitcast(builder.shl(builder.zext(parts[0], I32), I32(16)), F32)]
    ends = [(builder.shl(word, I32(16)), builder.and_(word, I32(0xFFFF0000))) for word in parts]
    return [builder.bitcast(end, F32) for pair in ends for end in pair]


def narrowed(builder, dtype, values):
    """Words, or a single 16-bit element, of float32; rounded to nearest even."""
    if dtype == "f32":
        return [builder.bitcast(value, I32) for value in values]
    if len(values) == 1:
        return [asm(builder, _I16, f"cvt.rn.{dtype}.f32 $0, $1;", "=h,f", values)]
    text = f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [asm(builder, I32, text, "=r,f,f", list(pair)) for pair in pairs]


def parts_of(dtype: str, lanes: int):
    """(type of a part, number of parts) of a vector as it is moved."""
    size_bytes = lanes * ITEMSIZE[dtype]
    return (_I16, 1) if size_bytes == 2 else (I32, size_bytes // 4)


def _moving(operation: str, dtype: str, lanes: int, first: int) -> tuple[str, str, int]:
    """(instruction on registers $first and on, their letter, their number) that moves a vector."""
    part, count = parts_of(dtype, lanes)
    registers = ", ".join(f"${first + i}" for i in range(count))
    vector, registers = (f".v{count}", f"{{{registers}}}") if count > 1 else ("", registers)
    return f"{operation}{vector}.b{part.width}", registers, count


def _loaded(builder, where, wanted, dtype, lanes, *, constant=True):
    """The elements of a vector, zeros unless it is wanted."""
    return widened(builder, dtype, load_parts(builder, where, wanted, dtype, lanes, constant=constant))


def load_parts(builder, where, wanted, dtype, lanes, *, constant=True, fill=0):
    """The parts of a vector, each the bits of `fill` unless it is wanted.

    Without a branch, and where constant free to be moved.
    """
    part, count = parts_of(dtype, lanes)
    load, registers, _ = _moving("ld.global.nc" if constant else "ld.global", dtype, lanes, 0)
    clear = " ".join(f"mov.b{part.width} ${i}, {fill};" for i in range(count))
    text = (
        f"{{ .reg .pred wanted; setp.ne.b32 wanted, ${count + 1}, 0; {clear} @wanted {load} {registers}, [${count}]; }}"
    )
    constraints = ",".join([*(f"=&{_LETTER[part.width]}" for _ in range(count)), "l", "r"])
    operands = [builder.ptrtoint(where, I64), builder.zext(wanted, I32)]
    result = part if count == 1 else ir.LiteralStructType([part] * count)
    loaded = asm(builder, result, text, constraints, operands, PURE if constant else EFFECT)
    return [loaded] if count == 1 else unpacked(builder, loaded, count)


def store_vector(builder, where, wanted, dtype, values):
    """A vector, where it is wanted: without a branch."""
    parts = narrowed(builder, dtype, values)
    store, registers, count = _moving("st.global", dtype, len(values), 2)
    text = f"{{ .reg .pred wanted; setp.ne.b32 wanted, $1, 0; @wanted {store} [$0], {registers}; }}"
    constraints = ",".join(["l", "r", *(_LETTER[parts[0].type.width] for _ in range(count)), "~{memory}"])
    operands = [builder.ptrtoint(where, I64), builder.zext(wanted, I32), *parts]
    asm(builder, ir.VoidType(), text, constraints, operands, EFFECT)


# ---- rows of vectors -------------------------------------------------------------------------------------------------


def _fields(builder, value, of) -> dict:
    """The fields of a NamedTuple."""
    return {name: builder.extract_value(value, i) for i, name in enumerate(of.fields)}


def _moved(builder, start, count: int):
    return builder.add(start, start.type(count), flags=["nsw"])


def _index(builder, start, count, step):
    return builder.add(start, builder.mul(count, step, flags=["nsw"]), flags=["nsw"])


def _row(builder, dtype, lanes, offsets, place, row: int):
    """The elements of a row's vectors."""
    at_row = _moved(builder, place["row"], row)
    inside = builder.icmp_unsigned("<", at_row, place["rows"])
    start = _index(builder, place["at"], at_row, place["row_step"])
    start = _index(builder, start, place["column"], place["column_step"])
    values = []
    for offset in offsets:
        column = _moved(builder, place["column"], offset)
        wanted = builder.and_(inside, builder.icmp_unsigned("<", column, place["columns"]))
        index = _index(builder, start, column.type(offset), place["column_step"])
        values += _loaded(builder, builder.gep(place["image"], [index]), wanted, dtype, lanes)
    return values


def _finished_row(context, builder, end: End, sums, place, row: int):
    """(address, whether it is in the output, elements) of each vector of one row of sums."""
    real = types.float32
    finish, of_six = epilogue.finish("f32", end.tokens).py_func, signature(real, *[real] * 6)
    at_row = _moved(builder, place["row"], row)
    inside = builder.icmp_unsigned("<", at_row, place["rows"])
    start = _index(builder, place["at"], at_row, place["row_step"])
    nothing, bias = [F32(0.0)] * end.lanes, unpacked(builder, place["bias"], end.lanes)
    for i, offset in enumerate(end.columns):
        column = _moved(builder, place["column"], offset)
        wanted = builder.and_(inside, builder.icmp_unsigned("<", column, place["columns"]))
        index = _index(builder, start, column, place["column_step"])
        where, added = builder.gep(place["out"], [index]), builder.gep(place["residual"], [index])
        of_out = (builder, where, wanted, end.dtype, end.lanes)
        before = _loaded(*of_out, constant=False) if "beta" in end.tokens else nothing
        residual = _loaded(builder, added, *of_out[2:]) if "res" in end.tokens else nothing
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


@cache
def load_run(dtype: str, count: int):
    """Intrinsic (base, at, step) -> so many elements, each a step further, of memory that no thread writes."""

    @intrinsic
    def load(typingctx, base, at, step):
        def codegen(context, builder, sig, args):
            always, values = ir.IntType(1)(1), []
            for i in range(count):
                where = builder.gep(args[0], [_index(builder, args[1], args[1].type(i), args[2])])
                values += _loaded(builder, where, always, dtype, 1)
            return packed(builder, values)

        return signature(floats(count), base, at, at), codegen

    return load


@cache
def load_filters(dtype: str, lanes: int, taps: int, reversed_: bool):
    """Intrinsic (base, at) -> the weights of so many filters from there on, tap by tap, of each tap all lanes.

    In memory filter follows filter; at is a multiple of `lanes`. reversed_: the last tap comes first.
    """

    @intrinsic
    def load(typingctx, base, at):
        def codegen(context, builder, sig, args):
            always, values = ir.IntType(1)(1), []
            for i in range(taps):
                where = builder.gep(args[0], [_moved(builder, args[1], lanes * i)])
                values += _loaded(builder, where, always, dtype, lanes)
            order = range(taps - 1, -1, -1) if reversed_ else range(taps)
            return packed(builder, [values[lane * taps + tap] for tap in order for lane in range(lanes)])

        return signature(floats(taps * lanes), base, at), codegen

    return load


@cache
def load_wanted(dtype: str):
    """Intrinsic (base, at, wanted) -> a tuple of base[at], or of zero where that is not wanted: without a branch."""

    @intrinsic
    def load(typingctx, base, at, wanted):
        def codegen(context, builder, sig, args):
            return packed(builder, _loaded(builder, builder.gep(args[0], [args[1]]), args[2], dtype, 1))

        return signature(floats(1), base, at, types.boolean), codegen

    return load


# ---- float32 in shared memory, by 32-bit addresses -------------------------------------------------------------------


@cache
def load_shared_rows(lanes: int, count: int):
    """Intrinsic (address, step_bytes) -> so many vectors, each a step further."""

    @intrinsic
    def load(typingctx, address, step_bytes):
        def codegen(context, builder, sig, args):
            vector = ir.VectorType(F32, lanes)
            values = []
            for i in range(count):
                where = builder.add(args[0], builder.mul(args[1], I32(i)))
                loaded = builder.load(builder.inttoptr(where, vector.as_pointer(3)), align=4 * lanes)
                values += [builder.extract_element(loaded, I32(lane)) for lane in range(lanes)]
            return packed(builder, values)

        return signature(floats(count * lanes), types.uint32, types.uint32), codegen

    return load


@intrinsic
def store_shared_floats(typingctx, address, step_bytes, values):
    """A tuple of float32 to an address and on, each a step further."""

    def codegen(context, builder, sig, args):
        for i, value in enumerate(unpacked(builder, args[2], sig.args[2].count)):
            where = builder.add(args[0], builder.mul(args[1], I32(i)))
            builder.store(value, builder.inttoptr(where, F32.as_pointer(3)), align=4)
        return context.get_dummy_value()

    return signature(types.none, types.uint32, types.uint32, values), codegen
