"""What a warp does with few channels a group, all of it unrolled: a filter to registers, rows of pixels multiplied.

                outputs (`walked`)                             a filter's gradient (`gathered`)
    a           16 pixels by eight channels of two taps,       the same, turned
                or 16 channels of one
    b           these channels by eight filters                16 pixels of dy by eight filters
    sums        16 pixels by eight filters                     these channels by eight filters

Rows of pixels come by ldmatrix from a swizzled box, once for each tap of a row, and are multiplied with all they meet:
the filters of each row of outputs that sees them, which stay in registers, or dy of these. Of 16x8 sums lane 4g + t has
columns 2t and 2t + 1 of row g, then of row g + 8.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.grouped_variant import CHUNKS, End, Gather, Load, Walk
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


def _matrices(builder, address, add: int, count: int, trans: str = ""):
    """The words of two or four matrices."""
    outputs = ",".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{outputs}}}, [${count}+{add}];"
    kind, letters = ir.LiteralStructType([I32] * count), ",".join([*["=r"] * count, "r", "~{memory}"])
    return unpacked(builder, asm(builder, kind, text, letters, [address], EFFECT), count)


def _lane_address(builder, address, pixel, chunk, load: Load):
    """Of the lane's line, and its piece of it."""
    line = builder.add(pixel, I32(load.pixels))
    swizzled = builder.xor(builder.add(chunk, I32(load.chunks)), builder.and_(line, I32(CHUNKS - 1)))
    at = builder.add(builder.shl(line, I32(7)), builder.shl(swizzled, I32(4)))
    return builder.add(address, at)


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

    @intrinsic
    def multiply(typingctx, address, pixel, chunk, mask, words):
        def codegen(context, builder, sig, args):
            filters = unpacked(builder, args[4], sig.args[4].count)
            totals: list = [[F32(0.0)] * 4 for _ in range(walk.rows * walk.tiles)]
            masks = [args[3], builder.not_(args[3])]
            starts: dict[Load, object] = {}
            for row, load, table in walk.steps:
                if load not in starts:
                    starts[load] = _lane_address(builder, *args[:3], load)
                a = _matrices(builder, starts[load], row * walk.row_bytes, 2 if load.half else 4)
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


@cache
def gathered(gather: Gather, count: int):
    """Intrinsic (sums, address, pixel, chunk, dy, masks, rows) -> `count` sums, to which a strip's products are added.

    address, pixel, chunk: as of `walked`, of x. dy: the address of the lane's piece of its first line. masks: of the
    words of the first eight pixels and of the others, zero where there is no output: x may be infinite there. rows: so
    many of the strip have outputs.
    """
    floats, two_words = types.UniTuple(types.float32, count), types.UniTuple(types.uint32, 2)
    whole_rows, whole_columns = gather.whole

    @intrinsic
    def multiply(typingctx, sums, address, pixel, chunk, dy, masks, rows):
        def codegen(context, builder, sig, args):
            totals, masks = unpacked(builder, args[0], count), unpacked(builder, args[5], 2)
            starts: dict[Load, object] = {}
            of_dy: dict[int, list] = {}
            kept: dict[int, object] = {}
            for row, load, table in gather.steps:
                if load not in starts:
                    starts[load] = _lane_address(builder, *args[1:4], load)
                found = _matrices(builder, starts[load], row * gather.row_bytes, 2 if load.half else 4, ".trans")
                if not whole_columns:
                    found = [builder.and_(word, masks[i % 2]) for i, word in enumerate(found)]
                low, high, *others = found
                second = others or [I32(0), I32(0)]
                a = [low, second[0], high, second[1]]
                for output, first in table:
                    if output not in of_dy:
                        add = output * gather.out_row_bytes
                        of_dy[output] = _matrices(builder, args[4], add, 2 * gather.tiles, ".trans")
                        exists = builder.icmp_signed("<", I32(output), args[6])
                        kept[output] = builder.sext(exists, I32)
                    met = a if whole_rows else [builder.and_(word, kept[output]) for word in a]
                    for tile in range(gather.tiles):
                        at = 4 * (first + tile)
                        b = of_dy[output][2 * tile : 2 * tile + 2]
                        totals[at : at + 4] = product(builder, gather.dtype, [*met, *b, *totals[at : at + 4]])
            return packed(builder, totals)

        words = types.uint32, types.int32, types.int32, types.uint32
        return signature(floats, floats, *words, two_words, types.int32), codegen

    return multiply


@cache
def scattered(places: tuple[tuple[tuple[int, int, int, int], bool], ...]):
    """Intrinsic (pointer, first place, whether it exists, strides of (r, s, channel, filter), sums): a lane's sums to
    float32 in memory, of each tile four at (r, s, channel, filter): two filters, then two of the row eight further on,
    which `places` has as a tile's own: (place, whether it is of no use)."""

    @intrinsic
    def store(typingctx, to, first, exists, strides, sums):
        def codegen(context, builder, sig, args):
            steps, totals = unpacked(builder, args[3], 4), unpacked(builder, args[4], 2 * len(places))
            with builder.if_then(builder.icmp_signed("!=", args[2], I32(0))):
                for i, (place, is_nothing) in enumerate(places):
                    if is_nothing:
                        continue
                    at = args[1]
                    for times, step in zip(place, steps, strict=True):
                        at = builder.add(at, builder.mul(I32(times), step))
                    for value in totals[2 * i : 2 * i + 2]:
                        builder.store(value, builder.gep(args[0], [at]), align=4)
                        at = builder.add(at, steps[3])
            return context.get_dummy_value()

        return signature(types.none, to, types.int32, types.int32, types.UniTuple(types.int32, 4), sums), codegen

    return store
