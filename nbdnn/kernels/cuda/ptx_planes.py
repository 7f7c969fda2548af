"""Planes of channels in shared memory: 16-bit elements turned into them and out of them, and products of their rows.

A plane is an image of one channel, rows of 16-byte chunks. Channels-last, a thread has eight channels of two
neighbouring pixels, 16 bytes each; in planes that is a word of each of eight. A lane names the row that it reads, so a
shift by rows is an address, and a row outside of the image is one of zeros.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, I64, PURE, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_tile import product, shared_at

_BYTE, _I16 = ir.IntType(8), ir.IntType(16)
_LOW_HALVES, _HIGH_HALVES = 0x5410, 0x7632  # of two words, as prmt selects them
_FOUR_WORDS = types.UniTuple(types.uint32, 4)


def _halves(builder, first, second, select):
    return asm(builder, I32, f"prmt.b32 $0, $1, $2, {select:#x};", "=r,r,r", [first, second])


# ---- between memory and planes ---------------------------------------------------------------------------------------


@intrinsic
def load_vector(typingctx, base, at, wanted):
    """Four words at base[at] of memory that no thread writes, zeros unless they are wanted: without a branch."""
    text = (
        "{ .reg .pred wanted; setp.ne.b32 wanted, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@wanted ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )

    def codegen(context, builder, sig, args):
        where = builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)
        four = ir.LiteralStructType([I32] * 4)
        loaded = asm(builder, four, text, "=&r,=&r,=&r,=&r,l,r", [where, builder.zext(args[2], I32)], PURE)
        return packed(builder, unpacked(builder, loaded, 4))

    return signature(_FOUR_WORDS, base, at, types.boolean), codegen


@cache
def turn_in(step_bytes: int):
    """Intrinsic (address, pixel, next pixel), eight channels each: a word to each of eight planes, a step apart."""

    @intrinsic
    def turn(typingctx, where, pixel, following):
        def codegen(context, builder, sig, args):
            first, second = (unpacked(builder, words, 4) for words in args[1:])
            for channel in range(8):
                select = _HIGH_HALVES if channel % 2 else _LOW_HALVES
                word = _halves(builder, first[channel // 2], second[channel // 2], select)
                builder.store(word, shared_at(builder, args[0], channel * step_bytes), align=4)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, _FOUR_WORDS, _FOUR_WORDS), codegen

    return turn


@cache
def turn_out(step_bytes: int):
    """Intrinsic of an address: the words of eight planes, a step apart, as channels of a pixel and of the next."""
    pair = types.UniTuple(_FOUR_WORDS, 2)

    @intrinsic
    def turn(typingctx, where):
        def codegen(context, builder, sig, args):
            words = [builder.load(shared_at(builder, args[0], i * step_bytes), align=4) for i in range(8)]
            pixels = [
                [_halves(builder, words[i], words[i + 1], select) for i in range(0, 8, 2)]
                for select in (_LOW_HALVES, _HIGH_HALVES)
            ]
            return packed(builder, [packed(builder, pixel) for pixel in pixels])

        return signature(pair, types.uint32), codegen

    return turn


@intrinsic
def store_half(typingctx, where, element):
    """A 16-bit element to a shared address."""

    def codegen(context, builder, sig, args):
        builder.store(args[1], shared_at(builder, args[0], 0, _I16), align=2)
        return context.get_dummy_value()

    return signature(types.none, types.uint32, types.uint16), codegen


@cache
def store_pairs(rows: int, pairs: int, row_bytes: int):
    """Intrinsic (address, words): so many words, a chunk apart, to each of so many rows, eight rows apart."""
    words = types.UniTuple(types.uint32, rows * pairs)

    @intrinsic
    def store(typingctx, where, values):
        def codegen(context, builder, sig, args):
            for i, word in enumerate(unpacked(builder, args[1], rows * pairs)):
                row, pair = divmod(i, pairs)
                builder.store(word, shared_at(builder, args[0], 8 * row * row_bytes + 16 * pair), align=4)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, words), codegen

    return store


# ---- rows of planes as matrices --------------------------------------------------------------------------------------


def _row_at(builder, lane_rows, start: int, tap: int, row_bytes: int, nowhere: int):
    """The byte where row + start + tap begins; `nowhere` unless row + start < count, first <= the sum < end."""
    row, count, first, end = lane_rows
    here = builder.add(row, I32(start))
    reached = builder.add(here, I32(tap))
    inside = builder.icmp_unsigned("<", builder.sub(reached, first), builder.sub(end, first))
    wanted = builder.and_(builder.icmp_signed("<", here, count), inside)
    return builder.select(wanted, builder.mul(reached, I32(row_bytes)), I32(nowhere))


@cache
def rows_at(starts: tuple[int, ...], taps_h: int, row_bytes: int, nowhere: int):
    """Intrinsic (row, count, first, end) -> `_row_at` of each start and tap, all taps of the first start first."""
    places = types.UniTuple(types.uint32, len(starts) * taps_h)

    @intrinsic
    def at(typingctx, row, count, first, end):
        def codegen(context, builder, sig, args):
            pairs = ((start, tap) for start in starts for tap in range(taps_h))
            return packed(builder, [_row_at(builder, args, *pair, row_bytes, nowhere) for pair in pairs])

        return signature(places, *[types.int32] * 4), codegen

    return at


@cache
def bands(taps_h: int, taps_w: int, steps: int, reversed_: bool):
    """Intrinsic (shared address of a filter, diagonal) -> for each of its rows the b of `steps` products.

    b[i, j] = w[r, i - j - shift], 0 beyond the filter's ends; a lane has i = 2*(lane%4) and the next, and both 8
    further on, of j = lane//4. diagonal: i - j - shift of its first. Of rows of at most 7 taps one word of the two is
    0, and only the other one is loaded. reversed_: the filter's last tap comes first.
    """
    words = types.UniTuple(types.uint32, 2 * steps * taps_h)
    one_of_two = steps == 1 and taps_w <= 7
    sign = -2 if reversed_ else 2  # bytes from a tap to the next
    start = 2 * (taps_h * taps_w - 1) if reversed_ else 0

    @intrinsic
    def load(typingctx, where, diagonal):
        def codegen(context, builder, sig, args):
            def place(first):
                """(address of both of a word's taps in the first row, which of their bits count)."""
                addresses, mask = [], I32(0)
                for i, bits in enumerate((0x0000FFFF, 0xFFFF0000)):
                    tap = builder.add(first, I32(i))
                    inside = builder.icmp_unsigned("<", tap, I32(taps_w))
                    offset = builder.select(inside, builder.mul(tap, I32(sign)), I32(0))
                    addresses.append(builder.add(args[0], offset))
                    mask = builder.or_(mask, builder.select(inside, I32(bits), I32(0)))
                return addresses, mask

            def word(addresses, mask, row):
                add = start + sign * taps_w * row
                low, high = (
                    builder.zext(builder.load(shared_at(builder, address, add, _I16), align=2), I32)
                    for address in addresses
                )
                return builder.and_(_halves(builder, low, high, _LOW_HALVES), mask)

            if one_of_two:
                is_first = builder.icmp_signed(">=", args[1], I32(-1))
                addresses, mask = place(builder.select(is_first, args[1], builder.add(args[1], I32(8))))
                masks = builder.select(is_first, mask, I32(0)), builder.select(is_first, I32(0), mask)
                both = [word(addresses, I32(-1), row) for row in range(taps_h)]
                return packed(builder, [builder.and_(each, mask) for each in both for mask in masks])
            places = [place(builder.add(args[1], I32(8 * i))) for i in range(2 * steps)]
            return packed(builder, [word(*place, row) for row in range(taps_h) for place in places])

        return signature(words, types.uint32, types.int32), codegen

    return load


def _chunks(builder, where, count: int, trans: str):
    """[chunk][rows 0-7 or 8-15] of 16 rows: words as ldmatrix gives them. Lanes 16 and on point to the next chunk."""
    found = []
    for i in range(0, count, 2):
        matrices = min(2, count - i) * 2
        registers = ",".join(f"${j}" for j in range(matrices))
        text = f"ldmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 {{{registers}}}, [${matrices}+{16 * i}];"
        constraints = ",".join([*["=r"] * matrices, "r", "~{memory}"])
        loaded = asm(builder, ir.LiteralStructType([I32] * matrices), text, constraints, [where], EFFECT)
        words = unpacked(builder, loaded, matrices)
        found += [words[j : j + 2] for j in range(0, matrices, 2)]
    return found


@cache
def correlate(dtype: str, taps_h: int, tiles_h: int, tiles_w: int, steps: int):
    """Intrinsic (sums, plane, rows, bands) -> sums of tiles_h x tiles_w tiles of 16x8 outputs of a plane.

    rows: where a lane's row of a tile begins for each tap row, of the first tiles first. sums: by rows of outputs
    8 apart, of each the tiles' two neighbours.
    """
    sums = types.UniTuple(types.float32, 4 * tiles_h * tiles_w)
    places = types.UniTuple(types.uint32, tiles_h * taps_h)
    words = types.UniTuple(types.uint32, 2 * steps * taps_h)

    @intrinsic
    def add(typingctx, acc, plane, rows, filters):
        def codegen(context, builder, sig, args):
            totals = unpacked(builder, args[0], 4 * tiles_h * tiles_w)
            starts = unpacked(builder, args[2], tiles_h * taps_h)
            factors = unpacked(builder, args[3], 2 * steps * taps_h)
            for r in range(taps_h):
                for i in range(tiles_h):
                    where = builder.add(args[1], starts[i * taps_h + r])
                    chunks = _chunks(builder, where, tiles_w + 2 * steps - 1, "")
                    for j in range(tiles_w):
                        at = [(2 * i + half) * tiles_w + j for half in (0, 1)]
                        four = [totals[2 * place + lane] for place in at for lane in (0, 1)]
                        for step in range(steps):
                            a = chunks[j + 2 * step] + chunks[j + 2 * step + 1]
                            b = factors[2 * (r * steps + step) :][:2]
                            four = product(builder, dtype, [*a, *b, *four])
                        for place, values in zip(at, (four[:2], four[2:]), strict=True):
                            totals[2 * place : 2 * place + 2] = values
            return packed(builder, totals)

        return signature(sums, sums, types.uint32, places, words), codegen

    return add


@cache
def multiply_rows(dtype: str, taps_h: int, tiles_h: int, tiles_w: int, of_x: tuple[int, int], of_dy: tuple[int, int]):
    """Intrinsic (sums, plane of x, its rows, plane of dy, its rows) -> the products of columns of x and of dy.

    sums[r, i, j] += sum over rows p, tiles of  x[p + r, 8*tile + i] * dy[p, 8*tile + j],   i < 16, j < 8

    rows: a lane's (row, count, first, end) as `_row_at` takes them. of_x, of_dy: bytes of a row, and where zeros are.
    """
    sums, rows = types.UniTuple(types.float32, 4 * taps_h), types.UniTuple(types.int32, 4)

    @intrinsic
    def add(typingctx, acc, x, x_rows, dy, dy_rows):
        def codegen(context, builder, sig, args):
            totals = unpacked(builder, args[0], 4 * taps_h)
            lane_x, lane_dy = unpacked(builder, args[2], 4), unpacked(builder, args[4], 4)
            for start in range(0, 16 * tiles_h, 16):
                where = builder.add(args[3], _row_at(builder, lane_dy, start, 0, *of_dy))
                gradients = _chunks(builder, where, tiles_w, ".trans")
                for r in range(taps_h):
                    where = builder.add(args[1], _row_at(builder, lane_x, start, r, *of_x))
                    images = _chunks(builder, where, tiles_w + 1, ".trans")
                    for j in range(tiles_w):
                        (a0, a2), (a1, a3) = images[j], images[j + 1]
                        operands = [a0, a1, a2, a3, *gradients[j], *totals[4 * r : 4 * r + 4]]
                        totals[4 * r : 4 * r + 4] = product(builder, dtype, operands)
            return packed(builder, totals)

        return signature(sums, sums, types.uint32, rows, types.uint32, rows), codegen

    return add


@cache
def store_sums(taps_h: int, row_bytes: int, tap_bytes: int):
    """Intrinsic (address, sums): a lane's part of 16 x 8 sums of each tap row, two neighbours of rows 8 apart."""
    sums = types.UniTuple(types.float32, 4 * taps_h)

    @intrinsic
    def store(typingctx, where, values):
        def codegen(context, builder, sig, args):
            for i, value in enumerate(unpacked(builder, args[1], 4 * taps_h)):
                r, half, neighbour = i // 4, i // 2 % 2, i % 2
                add = r * tap_bytes + 8 * half * row_bytes + 4 * neighbour
                builder.store(value, shared_at(builder, args[0], add, F32), align=4)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, sums), codegen

    return store
