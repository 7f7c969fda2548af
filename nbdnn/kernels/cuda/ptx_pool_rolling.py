"""Rows of planes as a thread of `pool_rolling` has them in registers, as straight code: loads, keys and stores.

Values are flat tuples: of each plane its rows. A key is an integer that is larger where an element is: that of a NaN
grows from tap to tap, so that the last one of a window is the largest, -0 is 0, and nothing is as small as the padding.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_rolling_plan import PADDING
from nbdnn.kernels.cuda.ptx import EFFECT, F16, F32, I32, I64, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_tile import shared_at
from nbdnn.kernels.cuda.ptx_vector import floats, moved, narrowed
from nbdnn.problem import ITEMSIZE

_FIRST_NAN = 0x7F800001


def keys_type(count: int):
    return types.UniTuple(types.int32, count)


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


# ---- global memory ---------------------------------------------------------------------------------------------------


@cache
def rows_inside(rows: int):
    """Intrinsic (first row, extent) -> a word with a bit for each row that is inside."""

    @intrinsic
    def inside(typingctx, first, extent):
        def codegen(context, builder, sig, args):
            bits = I32(0)
            for row in range(rows):
                is_inside = builder.icmp_unsigned("<", moved(builder, args[0], row), args[1])
                bits = builder.or_(bits, builder.select(is_inside, I32(signed(1 << row)), I32(0)))
            return bits

        return signature(types.int32, first, extent), codegen

    return inside


def _of_box(builder, box, type_):
    return {name: builder.extract_value(box, i) for i, name in enumerate(type_.fields)}


def _afresh(builder, value):
    """The same int32, so that nothing which follows from it is kept from plane to plane."""
    return asm(builder, I32, "mov.b32 $0, $1;", "=r,r", [value], EFFECT)


def _rows_of(builder, of: dict, plane: int):
    """The word of those of the plane's rows that are inside."""
    there = builder.icmp_unsigned("<", moved(builder, of["d"], plane), of["extent_d"])
    return _afresh(builder, builder.select(there, of["rows"], I32(0)))


def _moved_rows(builder, box, type_, dtype: str, planes: int, rows: int):
    """(operands $base, $step and $inside of inline PTX, its text (operation) that moves an element) of each."""
    of = _of_box(builder, box, type_)
    step = _afresh(builder, builder.mul(of["step_h"], I32(ITEMSIZE[dtype])))
    for plane in range(planes):
        at = builder.add(of["at"], builder.mul(I32(plane), of["step_d"]))
        base = builder.ptrtoint(builder.gep(of["data"], [at]), I64)
        inside = _rows_of(builder, of, plane)
        for row in range(rows):
            yield (
                [base, step, inside],
                (
                    "{{ .reg .pred inside; .reg .b32 bit; .reg .b64 place; "
                    f"and.b32 bit, $3, {1 << row:#x}; setp.ne.b32 inside, bit, 0; mad.wide.s32 place, $2, {row}, $1; "
                    "{before} @inside {operation} }}"
                ),
            )


def elements_type(dtype: str, count: int):
    """As they are loaded: 16-bit ones are words, else ptxas packs and unpacks them."""
    return types.UniTuple(types.float32 if dtype == "f32" else types.uint32, count)


@cache
def load(dtype: str, planes: int, rows: int):
    """Intrinsic (box) -> its elements as they are in memory, zeros outside. The loads begin where they stand."""
    kind, letter = (F32, "f") if dtype == "f32" else (I32, "r")
    operation = f"ld.global.{'b32' if dtype == 'f32' else 'u16'} $0, [place];"

    @intrinsic
    def load_box(typingctx, box):
        def codegen(context, builder, sig, args):
            found = []
            for operands, text in _moved_rows(builder, args[0], sig.args[0], dtype, planes, rows):
                text = text.format(before="mov.b32 $0, 0;", operation=operation)
                found.append(asm(builder, kind, text, f"=&{letter},l,r,r", operands, EFFECT))
            return packed(builder, found)

        return signature(elements_type(dtype, planes * rows), box), codegen

    return load_box


@cache
def store(dtype: str, planes: int, rows: int):
    """Intrinsic (box, float32 values): each where it is inside."""
    letter, bits = ("r", 32) if dtype == "f32" else ("h", 16)

    @intrinsic
    def store_box(typingctx, box, values):
        def codegen(context, builder, sig, args):
            given = unpacked(builder, args[1], planes * rows)
            places = _moved_rows(builder, args[0], sig.args[0], dtype, planes, rows)
            for (operands, text), value in zip(places, given, strict=True):
                text = text.format(before="", operation=f"st.global.b{bits} [place], $0;")
                asm(
                    builder, ir.VoidType(), text, f"{letter},l,r,r,~{{memory}}",
                    [*narrowed(builder, dtype, [value]), *operands], EFFECT,
                )  # fmt: skip
            return context.get_dummy_value()

        return signature(types.none, box, values), codegen

    return store_box


def widened(builder, dtype: str, element):
    """A float32 of what was loaded."""
    if dtype == "f32":
        return element
    if dtype == "bf16":
        return builder.bitcast(builder.shl(element, I32(16)), F32)
    return builder.fpext(builder.bitcast(builder.trunc(element, ir.IntType(16)), F16), F32)


def _has_nan(builder, values: list):
    """Whether there is a NaN or an infinity: 0 times either is NaN, and stays. The units that multiply have time."""
    products = F32(0.0)
    for value in values:
        products = asm(builder, F32, "fma.rn.f32 $0, $1, 0f00000000, $2;", "=f,f,f", [value, products])
    return builder.fcmp_unordered("uno", products, products)


@cache
def keys(dtype: str, planes: int, rows: int, apart: int):
    """Intrinsic (box, its elements, rank of the first) -> keys; the next row ranks so much higher."""

    @intrinsic
    def keys_of(typingctx, box, elements, rank):
        def codegen(context, builder, sig, args):
            of = _of_box(builder, args[0], sig.args[0])
            values = [widened(builder, dtype, each) for each in unpacked(builder, args[1], planes * rows)]
            values = [builder.fadd(value, F32(0.0)) for value in values]
            has_nan, before = _has_nan(builder, values), builder.block
            with builder.if_then(has_nan, likely=False):
                ranked = []
                for i, value in enumerate(values):
                    of_nan = builder.bitcast(moved(builder, args[2], _FIRST_NAN + i * apart), F32)
                    ranked.append(builder.select(builder.fcmp_unordered("uno", value, value), of_nan, value))
                after = builder.block
            merged = []
            for value, other in zip(values, ranked, strict=True):
                merged.append(builder.phi(F32))
                merged[-1].add_incoming(value, before)
                merged[-1].add_incoming(other, after)
            inside, found = [_rows_of(builder, of, plane) for plane in range(planes)], []
            for i, value in enumerate(merged):
                bits = builder.bitcast(value, I32)
                key = builder.xor(bits, builder.and_(builder.ashr(bits, I32(31)), I32(0x7FFFFFFF)))
                bit = builder.and_(inside[i // rows], I32(signed(1 << i % rows)))
                found.append(builder.select(builder.icmp_signed("!=", bit, I32(0)), key, I32(PADDING)))
            return packed(builder, found)

        return signature(keys_type(planes * rows), box, elements, rank), codegen

    return keys_of


# ---- shared memory ---------------------------------------------------------------------------------------------------


@cache
def put(count: int, row_bytes: int, is_float: bool = False):
    """Intrinsic (shared address, values): one a row."""

    @intrinsic
    def put_rows(typingctx, where, values):
        def codegen(context, builder, sig, args):
            for row, value in enumerate(unpacked(builder, args[1], count)):
                builder.store(value, shared_at(builder, args[0], row * row_bytes, value.type), align=4)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, floats(count) if is_float else keys_type(count)), codegen

    return put_rows


@cache
def repeated(count: int, value: int):
    """Intrinsic of nothing -> so many of an int32."""

    @intrinsic
    def repeat(typingctx):
        def codegen(context, builder, sig, args):
            return packed(builder, [I32(value)] * count)

        return signature(keys_type(count)), codegen

    return repeat
