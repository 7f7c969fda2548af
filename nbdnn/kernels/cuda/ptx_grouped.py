"""What a warp does with few channels a group, all of it unrolled: a filter to registers, rows of pixels multiplied.

    a    16 pixels by 16 of k: eight channels of two taps, or 16 channels of one; by ldmatrix from a swizzled box
    b    16 of k by eight filters: words that stay in registers
    c    16 pixels by eight filters: lane 4g + t has filters 2t and 2t + 1 of pixels g and g + 8

A row of the box is loaded once for each tap of a row, and multiplied into the sums of all rows of outputs that see it.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.grouped_plan import CHUNKS, End, Load, Walk
from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, WARP, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_tile import product, shared_at
from nbdnn.kernels.cuda.ptx_vector import load_parts, load_vector, narrowed


@cache
def filter_words(dtype: str, places: tuple[tuple[int, int, int], ...], tiles: int):
    """Intrinsic (w, first places, whether they exist, strides of (r, s, channel)) -> words of two neighbouring
    channels: for each (r, s, channel) of `places` one of each tile, zero of what does not exist."""
    words = types.UniTuple(types.uint32, tiles * len(places))

    @intrinsic
    def load(typingctx, w, first, exists, strides):
        def codegen(context, builder, sig, args):
            starts, wanted = unpacked(builder, args[1], tiles), unpacked(builder, args[2], tiles)
            wanted = [builder.icmp_signed("!=", each, I32(0)) for each in wanted]
            steps, found = unpacked(builder, args[3], 3), []
            for place in places:
                moved = I32(0)
                for count, step in zip(place, steps, strict=True):
                    moved = builder.add(moved, builder.mul(I32(count), step))
                for start, is_wanted in zip(starts, wanted, strict=True):
                    at, halves = builder.add(start, moved), []
                    for index in (at, builder.add(at, steps[2])):
                        where = builder.gep(args[0], [index])
                        (half,) = load_parts(builder, where, is_wanted, dtype, 1)
                        halves.append(builder.zext(half, I32))
                    found.append(builder.or_(halves[0], builder.shl(halves[1], I32(16))))
            return packed(builder, found)

        integers = [types.UniTuple(types.int32, count) for count in (tiles, tiles, 3)]
        return signature(words, w, *integers), codegen

    return load


def _load_a(builder, address, add: int, half: bool):
    """The four words of an a; of a half two."""
    count = 2 if half else 4
    outputs = ",".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{outputs}}}, [${count}+{add}];"
    kind, letters = ir.LiteralStructType([I32] * count), ",".join([*["=r"] * count, "r", "~{memory}"])
    return unpacked(builder, asm(builder, kind, text, letters, [address], EFFECT), count)


def _half_product(builder, dtype, operands):
    """a @ b + c with eight of k, from 2 + 1 + 4 registers."""
    text = (
        f"mma.sync.aligned.m16n8k8.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"
    )
    four = ir.LiteralStructType([F32] * 4)
    sums = asm(builder, four, text, "=f,=f,=f,=f,r,r,r,f,f,f,f", operands, WARP)
    return unpacked(builder, sums, 4)


@cache
def walked(walk: Walk):
    """Intrinsic (address, pixel, chunk, mask, words) -> sums, row by row, of each row tile by tile, four a lane.

    address: of the walk's first line, but for the `pixel` lines and the chunk of the lane's row of a.
    """
    sums = types.UniTuple(types.float32, 4 * walk.rows * walk.tiles)

    def lane_address(builder, address, pixel, chunk, load: Load):
        line = builder.add(pixel, I32(load.pixels))
        swizzled = builder.xor(builder.add(chunk, I32(load.chunks)), builder.and_(line, I32(CHUNKS - 1)))
        at = builder.add(builder.shl(line, I32(7)), builder.shl(swizzled, I32(4)))
        return builder.add(address, at)

    @intrinsic
    def multiply(typingctx, address, pixel, chunk, mask, words):
        def codegen(context, builder, sig, args):
            filters = unpacked(builder, args[4], sig.args[4].count)
            totals: list = [[F32(0.0)] * 4 for _ in range(walk.rows * walk.tiles)]
            masks = [args[3], builder.not_(args[3])]
            starts: dict[Load, object] = {}
            for row, load, table in walk.steps:
                if load not in starts:
                    starts[load] = lane_address(builder, *args[:3], load)
                a = _load_a(builder, starts[load], row * walk.row_bytes, load.half)
                every_a = [a] * walk.tiles
                if walk.masked:
                    every_a = [[builder.and_(word, of_tile) for word in a] for of_tile in masks]
                multiplied = _half_product if load.half else product
                of_b = 1 if load.half else 2
                for output, first in table:
                    for tile in range(walk.tiles):
                        at = output * walk.tiles + tile
                        b = [filters[first + i * walk.tiles + tile] for i in range(of_b)]
                        totals[at] = multiplied(builder, walk.dtype, [*every_a[tile], *b, *totals[at]])
            return packed(builder, [value for total in totals for value in total])

        return signature(sums, types.uint32, types.int32, types.int32, types.uint32, words), codegen

    return multiply


@cache
def staged(end: End):
    """Intrinsic (addresses, exists, sums, target): finished sums to shared memory, two to a word, if the lane has some.

    addresses: of each tile's first row.
    """
    finish, real = epilogue.finish("f32", end.tokens).py_func, types.float32

    @intrinsic
    def stage(typingctx, addresses, exists, sums, target):
        def codegen(context, builder, sig, args):
            totals = unpacked(builder, args[2], sig.args[2].count)
            place = {name: builder.extract_value(args[3], i) for i, name in enumerate(sig.args[3].fields)}
            bias, scalars = unpacked(builder, place["bias"], 2 * end.tiles), [place["alpha"], place["beta"]]
            words = []
            for row in range(end.rows):
                for tile in range(end.tiles):
                    for half, suffix in enumerate(("", "_second")):
                        first = 4 * (row * end.tiles + tile) + 2 * half
                        at = builder.add(place["at" + suffix], builder.mul(I32(row), place["row_step"]))
                        at = builder.add(at, I32(tile * end.apart))
                        wanted = builder.icmp_signed("<", I32(row), place["rows" + suffix])
                        pair = [[F32(0.0)] * 2, [F32(0.0)] * 2]
                        if "beta" in end.tokens:
                            where = builder.gep(place["out"], [at])
                            pair[0] = load_vector(builder, where, wanted, end.dtype, 2, constant=False)
                        if "res" in end.tokens:
                            where = builder.gep(place["residual"], [at])
                            pair[1] = load_vector(builder, where, wanted, end.dtype, 2)
                        finished = [
                            context.compile_internal(
                                builder,
                                finish,
                                signature(real, *[real] * 6),
                                [totals[first + i], *scalars, pair[0][i], bias[2 * tile + i], pair[1][i]],
                            )
                            for i in range(2)
                        ]
                        (word,) = narrowed(builder, end.dtype, finished)
                        words.append((word, tile, row * end.row_bytes + half * end.half_bytes))
            starts = unpacked(builder, args[0], end.tiles)
            with builder.if_then(builder.icmp_signed("!=", args[1], I32(0))):
                for word, tile, add in words:
                    builder.store(word, shared_at(builder, starts[tile], add), align=4)
            return context.get_dummy_value()

        addresses_type = types.UniTuple(types.uint32, end.tiles)
        return signature(types.none, addresses_type, types.int32, sums, target), codegen

    return stage
