"""What a thread of `pool_marching` tells others of its window, and what its cell gets of theirs: numbers of taps and dy
in shared memory, planes of them in turns, and a cell's elements of dx.

Words are as `ptx_pool_marching` has them.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_marching_plan import NO_TAP, Variant, cells_of
from nbdnn.kernels.cuda.ptx import F32, I32, asm, load_words, packed, unpacked
from nbdnn.kernels.cuda.ptx_pool_marching import has_bit, number_of, tuple_of
from nbdnn.kernels.cuda.ptx_pool_maxima import pair_sum
from nbdnn.kernels.cuda.ptx_tile import shared_at
from nbdnn.kernels.cuda.ptx_vector import moved, store_parts


@cache
def slots(v: Variant):
    """Intrinsic (shared address) -> addresses of planes of windows."""

    @intrinsic
    def addresses(typingctx, first):
        def codegen(context, builder, sig, args):
            return packed(builder, [moved(builder, args[0], 2 * v.half_bytes * i) for i in range(v.slots)])

        return signature(tuple_of(v.slots), types.uint32), codegen

    return addresses


@cache
def put(v: Variant):
    """Intrinsic (shared address, numbers of taps, dy, wanted): a window's choice, or NO_TAP."""

    @intrinsic
    def put_window(typingctx, where, numbers, dy, wanted):
        def codegen(context, builder, sig, args):
            nothing = number_of(v.dtype, NO_TAP)
            numbers = [builder.select(args[3], each, nothing) for each in unpacked(builder, args[1], v.words)]
            for offset, words in ((0, numbers), (v.half_bytes, unpacked(builder, args[2], v.words))):
                _store_shared(builder, args[0], offset, words)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, tuple_of(v.words), tuple_of(v.words), types.boolean), codegen

    return put_window


def _store_shared(builder, where, offset: int, words: list) -> None:
    vector = ir.VectorType(I32, len(words)) if len(words) > 1 else I32
    value = words[0]
    if len(words) > 1:
        value = ir.Constant(vector, ir.Undefined)
        for i, word in enumerate(words):
            value = builder.insert_element(value, word, I32(i))
    builder.store(value, shared_at(builder, where, offset, vector), align=4 * len(words))


@cache
def give(v: Variant):
    """Intrinsic (addresses of the planes of windows that cover a cell, in order; the thread's place there) -> dx of
    its elements: of each the sum of dy of the windows that have chosen it, rounded once."""
    cells, extents = [cells_of(axis) for axis in v.axes], [axis.stride for axis in v.axes]
    planes, apart, vector_bytes = cells[0].windows, v.windows_w * v.vectors, 4 * v.words
    elements = list(product(*map(range, extents)))

    def tap_of(element, window) -> int | None:
        """The number of an element among a window's taps."""
        number = 0
        for place, at, axis, of_axis in zip(element, window, v.axes, cells, strict=True):
            tap = place + axis.pad - (of_axis.first + at) * axis.stride
            if not 0 <= tap < axis.taps:
                return None
            number = number * axis.taps + tap
        return number

    def shared(builder, where, offset: int):
        loaded = load_words(builder, shared_at(builder, where, offset), v.words)
        return [loaded] if v.words == 1 else unpacked(builder, loaded, v.words)

    @intrinsic
    def give_cell(typingctx, slots, place):
        def codegen(context, builder, sig, args):
            totals: dict[tuple, list] = {element: [[] for _ in range(v.words)] for element in elements}
            for plane, slot in enumerate(unpacked(builder, args[0], planes)):
                where = builder.add(slot, args[1])
                for row, column in product(range(cells[1].windows), range(cells[2].windows)):
                    window, offset = (plane, row, column), (row * apart + column * v.vectors) * vector_bytes
                    wanted = {e: tap for e in elements if (tap := tap_of(e, window)) is not None}
                    if not wanted:
                        continue
                    numbers, dy = shared(builder, where, offset), shared(builder, where, offset + v.half_bytes)
                    for element, tap in wanted.items():
                        for found, number, share in zip(totals[element], numbers, dy, strict=True):
                            _add(builder, v.dtype, found, number, tap, share)
            words = [_total(builder, v.dtype, found) for element in elements for found in totals[element]]
            return packed(builder, words)

        given = (types.UniTuple(types.uint32, planes), types.uint32)
        return signature(tuple_of(len(elements) * v.words), *given), codegen

    return give_cell


def _add(builder, dtype: str, found: list, number, tap: int, share) -> None:
    """What a window gives to one of its taps: in float32 added at once, else its bits, or zeros."""
    if dtype != "f32":
        mask = asm(builder, I32, "set.eq.u32.f16x2 $0, $1, $2;", "=r,r,r", [number, number_of(dtype, tap)])
        found.append(builder.and_(mask, share))
        return
    share = builder.bitcast(share, F32)
    if not found:
        is_chosen = builder.icmp_signed("==", number, I32(tap))
        found.append(builder.select(is_chosen, share, F32(0.0)))
        return
    text = f"{{ .reg .pred chosen; setp.eq.s32 chosen, $2, {tap}; @chosen add.f32 $0, $0, $3; }}"
    found[:] = [asm(builder, F32, text, "=f,0,r,f", [*found, number, share])]


def _total(builder, dtype: str, found: list):
    if not found:
        return I32(0)
    return builder.bitcast(found[0], I32) if dtype == "f32" else pair_sum(builder, dtype, found)


@cache
def store_cell(v: Variant):
    """Intrinsic (dx, at, first plane, extent, bits, steps of planes, rows, columns, words): a cell's elements, each
    where its plane is below the extent and its bit is set."""
    extents = tuple(axis.stride for axis in v.axes)
    count = extents[0] * extents[1] * extents[2] * v.words

    @intrinsic
    def store(typingctx, dx, at, first, extent, bits, step_d, step_h, step_w, words):
        def codegen(context, builder, sig, args):
            dx, at, first, extent, bits, *steps, words = args
            given = unpacked(builder, words, count)
            for plane in range(extents[0]):
                there = builder.icmp_signed("<", moved(builder, first, plane), extent)
                of_plane = builder.select(there, bits, I32(0))
                for i, (row, column) in enumerate(product(range(extents[1]), range(extents[2]))):
                    where = at
                    for step, times in zip(steps, (plane, row, column), strict=True):
                        where = builder.add(where, builder.mul(step, I32(times)))
                    parts, given = given[: v.words], given[v.words :]
                    store_parts(builder, builder.gep(dx, [where]), has_bit(builder, of_plane, i), parts)
            return context.get_dummy_value()

        return signature(types.none, dx, *[types.int32] * 7, tuple_of(count)), codegen

    return store
