"""What a warp does with rows of the image for few channels of outputs: one intrinsic a step, everything in registers.

Addresses are shared ones, in bytes. `head_plan.py` has the layout: of matrix units the rows of a product are sums
(s, k), its columns pixels; of the FMA units a thread has some pixels, and all sums of them.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, asm, load_words, packed, store_words, unpacked
from nbdnn.kernels.cuda.ptx_tile import product, shared_at

_TILE_BYTES = 512  # of a 16x16 matrix of filters, 16 bytes a lane


def _floats(count):
    return types.UniTuple(types.float32, count)


def _words(builder, address, add, count):
    return unpacked(builder, load_words(builder, shared_at(builder, address, add), count), count)


@cache
def row_products(dtype: str, tiles_m: int, groups: int, halves: int, group_bytes: int, transposed: bool):
    """Intrinsic (sums, filters, pixels): the products of 16 `halves` channels, added to the sums: 16 tiles_m of each of
    8 `groups` pixels, 4 a pair of tile and group, as `multiply_tile` has them.

    filters: the lane's 16 bytes of the first matrix, those of channels 0 to 15 first. pixels: the lane's row of the
    first four matrices, eight channels each: of one group, or if there are 16 channels, of two; `transposed`: whose
    rows are channels.
    """
    trans, four = ".trans" if transposed else "", ir.LiteralStructType([I32] * 4)
    kind = _floats(4 * tiles_m * groups)

    def matrices(builder, pixels, group):
        text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4+{group * group_bytes}];"
        return unpacked(builder, asm(builder, four, text, "=r,=r,=r,=r,r,~{memory}", [pixels], EFFECT), 4)

    @intrinsic
    def multiply(typingctx, sums, filters, pixels):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], kind.count)
            every_a = [_words(builder, args[1], i * _TILE_BYTES, 4) for i in range(halves * tiles_m)]
            for first in range(0, groups, 3 - halves):
                # Of an odd number the last comes with the one before it, again.
                past = 1 if halves == 1 and first + 1 == groups else 0
                b = matrices(builder, args[2], first - past)
                for i in range(past, 2):
                    group, half = (first, i) if halves == 2 else (first - past + i, 0)
                    for m in range(tiles_m):
                        at = 4 * (m * groups + group)
                        operands = [*every_a[half * tiles_m + m], *b[2 * i : 2 * i + 2], *values[at : at + 4]]
                        values[at : at + 4] = product(builder, dtype, operands)
            return packed(builder, values)

        return signature(kind, kind, types.uint32, types.uint32), codegen

    return multiply


@cache
def store_rows(tiles_m: int, groups: int, wanted: int):
    """Intrinsic (sums, first, address, plane_bytes): of the sums of `row_products` the first `wanted` rows.

    first: the lane's first row; address: of its two pixels of the first group in that row's plane, others 32 bytes on.
    """
    kind = _floats(4 * tiles_m * groups)

    @intrinsic
    def store(typingctx, sums, first, address, plane_bytes):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], kind.count)
            for i in range(2 * tiles_m):
                with builder.if_then(builder.icmp_signed("<", builder.add(args[1], I32(8 * i)), I32(wanted))):
                    plane = builder.add(args[2], builder.mul(args[3], I32(8 * i)))
                    for group in range(groups):
                        at = 4 * (i // 2 * groups + group) + i % 2 * 2
                        pair = packed(builder, [builder.bitcast(value, I32) for value in values[at : at + 2]])
                        store_words(builder, shared_at(builder, plane, 32 * group), pair, 2)
            return context.get_dummy_value()

        return signature(types.none, kind, types.int32, types.uint32, types.int32), codegen

    return store


def _elements(context, builder, kind, array, count):
    """The elements of a local array."""
    data = context.make_array(kind)(context, builder, array).data
    return [builder.load(builder.gep(data, [I32(i)])) for i in range(count)]


@cache
def quad_products(pixels: int, wanted: int, channel_bytes: int):
    """Intrinsic (sums, places, address, filters): four channels of each pixel with the `wanted` columns of their
    filters, added to the sums, those of the first pixel first.

    places: a local array of bytes from the address to each pixel's first channel; the others follow, or are
    channel_bytes further on, unless that is 0. filters: a row for each channel, of whole vectors.
    """
    kind, columns = _floats(pixels * wanted), -(-wanted // 4) * 4

    def channels(builder, at):
        if channel_bytes == 0:
            return _words(builder, at, 0, 4)
        return [load_words(builder, shared_at(builder, at, channel_bytes * i), 1) for i in range(4)]

    @intrinsic
    def multiply(typingctx, sums, places, address, filters):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], kind.count)
            every = _elements(context, builder, sig.args[1], args[1], pixels)
            words = [channels(builder, builder.add(args[2], place)) for place in every]
            x = [[builder.bitcast(word, F32) for word in of_pixel] for of_pixel in words]
            for channel in range(4):
                for first in range(0, columns, 4):
                    four = _words(builder, args[3], (channel * columns + first) * 4, 4)
                    for column in range(first, min(first + 4, wanted)):
                        w = builder.bitcast(four[column - first], F32)
                        for i in range(pixels):
                            at = i * wanted + column
                            values[at] = builder.fma(x[i][channel], w, values[at])
            return packed(builder, values)

        return signature(kind, kind, places, types.uint32, types.uint32), codegen

    return multiply


@cache
def store_planes(pixels: int, count: int):
    """Intrinsic (sums, places, address, plane_bytes): a pixel's `count` sums to its place (a local array of bytes from
    the address) in as many planes."""
    kind = _floats(pixels * count)

    @intrinsic
    def store(typingctx, sums, places, address, plane_bytes):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], kind.count)
            for i, place in enumerate(_elements(context, builder, sig.args[1], args[1], pixels)):
                at = builder.add(args[2], place)
                for column in range(count):
                    word = builder.bitcast(values[i * count + column], I32)
                    store_words(builder, shared_at(builder, at, 0), word, 1)
                    at = builder.add(at, args[3])
            return context.get_dummy_value()

        return signature(types.none, kind, places, types.uint32, types.int32), codegen

    return store
