"""Vectors of pooling: guarded loads with what stands for the padding, and vectors joined, as tuples of float32."""

from __future__ import annotations

from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import ptx_vector
from nbdnn.kernels.cuda.ptx import F32, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_vector import floats, load_parts, parts_of, widened


def loaded(builder, where, wanted, dtype: str, lanes: int, otherwise: int = 0, **how: bool) -> list:
    """The elements of a vector where it is wanted, else those of the word `otherwise`. how: as `load_parts` has it."""
    part, _ = parts_of(dtype, lanes)
    parts = load_parts(builder, where, wanted, dtype, lanes, fill=otherwise & 2**part.width - 1, **how)
    return widened(builder, dtype, parts)


def loaded_pairs(builder, where, wanted, dtype: str, lanes: int, otherwise: int = 0, **how: bool) -> list:
    """The same as words, each of two 16-bit elements."""
    return load_parts(builder, where, wanted, dtype, lanes, fill=otherwise, **how)


def joined(builder, is_max: bool, found, value):
    """Of two vectors, lane by lane: the sums, or the larger ones, NaN where one is."""
    if found is None:
        return value
    if not is_max:
        return [builder.fadd(a, b) for a, b in zip(found, value, strict=True)]
    text = "max.NaN.f32 $0, $1, $2;"
    return [asm(builder, F32, text, "=f,f,f", [a, b]) for a, b in zip(found, value, strict=True)]


@cache
def load(dtype: str, lanes: int, otherwise: int = 0, constant: bool = True):
    """Intrinsic (base, index, wanted) -> the elements of a vector where it is wanted, else of the word `otherwise`.

    constant: the load may be moved, to where its elements are needed. Else it begins where it stands.
    """

    @intrinsic
    def load_vector(typingctx, base, index, wanted):
        def codegen(context, builder, sig, args):
            where = builder.gep(args[0], [args[1]])
            return packed(builder, loaded(builder, where, args[2], dtype, lanes, otherwise, constant=constant))

        return signature(floats(lanes), base, index, types.boolean), codegen

    return load_vector


@cache
def load_cells(dtype: str, count: int, times: int):
    """Intrinsic (base, here, inside, left, below, inside_below, factor) -> so many elements times the factor, so many
    times each: base[here + i] for i < left, base[below + i] for others; zeros where those are not inside."""
    boolean, integer = types.boolean, types.int32

    @intrinsic
    def load_row(typingctx, base, here, inside, left, below, inside_below, factor):
        def codegen(context, builder, sig, args):
            base, here, inside, left, below, inside_below, factor = args
            values = []
            for i in range(count):
                is_here = builder.icmp_signed(">", left, left.type(i))
                index = builder.add(builder.select(is_here, here, below), here.type(i))
                wanted = builder.select(is_here, inside, inside_below)
                (value,) = loaded(builder, builder.gep(base, [index]), wanted, dtype, 1)
                values += [builder.fmul(value, factor)] * times
            return packed(builder, values)

        of_base = (base, integer, boolean, integer, integer, boolean, types.float32)
        return signature(floats(count * times), *of_base), codegen

    return load_row


@cache
def store(dtype: str, lanes: int):
    """Intrinsic (base, index, wanted, values): a vector, where it is wanted."""

    @intrinsic
    def store_vector(typingctx, base, index, wanted, values):
        def codegen(context, builder, sig, args):
            elements = unpacked(builder, args[3], lanes)
            ptx_vector.store_vector(builder, builder.gep(args[0], [args[1]]), args[2], dtype, elements)
            return context.get_dummy_value()

        return signature(types.none, base, index, types.boolean, floats(lanes)), codegen

    return store_vector


@cache
def join_vectors(is_max: bool, lanes: int):
    """Intrinsic (vector, vector) -> their sums, or the larger ones, lane by lane."""
    vector = floats(lanes)

    @intrinsic
    def join(typingctx, a, b):
        def codegen(context, builder, sig, args):
            return packed(builder, joined(builder, is_max, *(unpacked(builder, each, lanes) for each in args)))

        return signature(vector, vector, vector), codegen

    return join


@cache
def join_lanes(is_max: bool, lanes: int):
    """Intrinsic (vector) -> the sum of its lanes, or the largest."""

    @intrinsic
    def join(typingctx, vector):
        def codegen(context, builder, sig, args):
            cells = [[value] for value in unpacked(builder, args[0], lanes)]
            while len(cells) > 1:
                halves = zip(cells[::2], cells[1::2], strict=True)
                cells = [joined(builder, is_max, a, b) for a, b in halves]
            return cells[0][0]

        return signature(types.float32, floats(lanes)), codegen

    return join
