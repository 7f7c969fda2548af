"""What a warp does with windows of raw image rows in shared memory: one intrinsic a step, everything in registers.

Addresses are shared ones, in bytes. A *word* of a window is 32 bits of one of its rows: a float32 or two neighbours of
16 bits. Where those may begin in the middle of a word of memory (`split`), it is made of two: addresses are rounded
down, and the lane's *selector* says which halves. Products of 16 bits and TF32 are of matrices of a warp (lane 4g + t),
those of float32 of the FMA units.
"""

from __future__ import annotations

from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import F32, I32, asm, load_words, packed, store_words, unpacked
from nbdnn.kernels.cuda.ptx_tile import product

STEP_WORDS = 8  # of a window, that one matrix instruction takes: 16 elements of 16 bits, 8 of TF32
GROUP = 8  # pixels beside each other
FMA_FILTERS = 32  # of a warp; a lane has four, and four that are 16 beyond
_ROUNDED = "cvt.rna.tf32.f32 $0, $1;"
_LOW, _HIGH = "prmt.b32 $0, $1, $2, 0x5410;", "prmt.b32 $0, $1, $2, 0x7632;"


def _floats(count):
    return types.UniTuple(types.float32, count)


def _load(builder, base, add, count=1):
    """Words at base + add: a list."""
    where = builder.inttoptr(builder.add(base, I32(add)), I32.as_pointer(3))
    loaded = load_words(builder, where, count)
    return [loaded] if count == 1 else unpacked(builder, loaded, count)


def _window_word(builder, base, add, split, selector):
    """A word of a window."""
    if not split:
        return _load(builder, base, add)[0]
    both = [_load(builder, base, add + past)[0] for past in (0, 4)]
    return asm(builder, I32, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [*both, selector])


@intrinsic
def halves_selector(typingctx, address):
    """Which halves of two words are those at an address that is a multiple of 2."""

    def codegen(context, builder, sig, args):
        return builder.add(builder.mul(builder.and_(args[0], I32(2)), I32(0x1111)), I32(0x3210))

    return signature(types.uint32, types.uint32), codegen


def _rounded(builder, word):
    return asm(builder, I32, _ROUNDED, "=r,f", [builder.bitcast(word, F32)])


def _paired(builder, text, first, second):
    return asm(builder, I32, text, "=r,r,r", [first, second])


@cache
def zeros(count: int):
    """Intrinsic: so many zeros."""

    @intrinsic
    def zero(typingctx):
        def codegen(context, builder, sig, args):
            return packed(builder, [F32(0.0)] * count)

        return signature(_floats(count)), codegen

    return zero


@cache
def addresses(count: int, stride_bytes: int):
    """Intrinsic (table, start) -> start + the first word of each of `count` entries of a table."""

    @intrinsic
    def load(typingctx, table, start):
        def codegen(context, builder, sig, args):
            entries = [_load(builder, args[0], i * stride_bytes)[0] for i in range(count)]
            return packed(builder, [builder.add(entry, args[1]) for entry in entries])

        return signature(types.UniTuple(types.uint32, count), types.uint32, types.uint32), codegen

    return load


@cache
def moved(count: int):
    """Intrinsic (addresses, offset) -> all of them that much further."""
    words = types.UniTuple(types.uint32, count)

    @intrinsic
    def move(typingctx, places, offset):
        def codegen(context, builder, sig, args):
            return packed(builder, [builder.add(place, args[1]) for place in unpacked(builder, args[0], count)])

        return signature(words, words, types.uint32), codegen

    return move


# ---- outputs ---------------------------------------------------------------------------------------------------------


@cache
def window_products(dtype: str, groups: int, n_tiles: int, split: bool):
    """Intrinsic (sums, pixels, table, filters, selector) -> sums with eight words of every window multiplied.

    pixels: where the window of a lane's pixel of each group begins: two groups are the 16 rows of a matrix. table: of
    (offset, mask) of the words, at the lane's entry. filters: [n8 tile][lane][words t and t + 4], at the lane. sums:
    pixel by pixel, of each two of every n8 tile.
    """
    count = groups * n_tiles * 2

    @intrinsic
    def multiply(typingctx, sums, pixels, table, filters, selector):
        def codegen(context, builder, sig, args):
            values, at = unpacked(builder, args[0], count), unpacked(builder, args[1], groups)
            entries = [_load(builder, args[2], 4 * half * 8, 2) for half in range(2)]
            b = [_load(builder, args[3], tile * 256, 2) for tile in range(n_tiles)]
            for first in range(0, groups, 2):
                a = []
                for offset, mask in entries:
                    for pixel in at[first : first + 2]:
                        word = _window_word(builder, builder.add(pixel, offset), 0, split, args[4])
                        word = builder.and_(word, mask)
                        a.append(_rounded(builder, word) if dtype == "tf32" else word)
                for tile in range(n_tiles):
                    low = first * n_tiles * 2 + tile * 2
                    places = (low, low + 1, low + n_tiles * 2, low + n_tiles * 2 + 1)
                    made = product(builder, dtype, [*a, *b[tile], *(values[i] for i in places)])
                    for place, value in zip(places, made, strict=True):
                        values[place] = value
            return packed(builder, values)

        words = types.UniTuple(types.uint32, groups)
        places = (types.uint32, types.uint32, types.uint32)
        return signature(_floats(count), _floats(count), words, *places), codegen

    return multiply


@cache
def segment_products(run: int, groups: int):
    """Intrinsic (sums, pixels, filters) -> sums with `run` neighbours of every window multiplied, in float32.

    pixels: where they begin, for a lane's pixel of each group. filters: [neighbour][32], at the lane's. sums: eight of
    each pixel.
    """
    count = groups * 8

    @intrinsic
    def multiply(typingctx, sums, pixels, filters):
        def codegen(context, builder, sig, args):
            values, at = unpacked(builder, args[0], count), unpacked(builder, args[1], groups)
            for i in range(run):
                row = i * FMA_FILTERS * 4
                w = [builder.bitcast(v, F32) for half in (0, 64) for v in _load(builder, args[2], row + half, 4)]
                for group in range(groups):
                    x = builder.bitcast(_load(builder, at[group], i * 4)[0], F32)
                    for o in range(8):
                        values[group * 8 + o] = builder.fma(x, w[o], values[group * 8 + o])
            return packed(builder, values)

        words = types.UniTuple(types.uint32, groups)
        return signature(_floats(count), _floats(count), words, types.uint32), codegen

    return multiply


# ---- gradients of filters --------------------------------------------------------------------------------------------


def _live(builder, word, pixel, left):
    return builder.select(builder.icmp_signed("<", pixel, left), word, I32(0))


@cache
def outputs_left(count: int, stride_bytes: int):
    """Intrinsic (table, rows, columns) -> outputs that each of `count` groups has, of a tile that has so many.

    An entry's second word is the group's row << 16 | column. What is not positive says that there are none.
    """
    lefts = types.UniTuple(types.int32, count)

    @intrinsic
    def left(typingctx, table, rows, columns):
        def codegen(context, builder, sig, args):
            made = []
            for i in range(count):
                place = _load(builder, args[0], i * stride_bytes + 4)[0]
                row, column = builder.lshr(place, I32(16)), builder.and_(place, I32(0xFFFF))
                inside = builder.icmp_signed("<", row, args[1])
                made.append(builder.select(inside, builder.sub(args[2], column), I32(0)))
            return packed(builder, made)

        return signature(lefts, types.uint32, types.int32, types.int32), codegen

    return left


def _gradients(sums: int, groups: int, words: int, generate):
    """Intrinsic (sums, pixels, offsets, dy, first, left) -> sums of the pixels of some groups.

    pixels: where the window of pixel `first`, the lane's own, of each group begins. offsets: of the lane's words of a
    window. dy: that pixel of the first group, at the lane's filters. left: outputs that the groups have.
    """
    floats, places = _floats(sums), types.UniTuple(types.uint32, groups)
    offsets_type, lefts = types.UniTuple(types.uint32, words), types.UniTuple(types.int32, groups)

    @intrinsic
    def multiply(typingctx, acc, pixels, offsets, dy, first, left):
        def codegen(context, builder, sig, args):
            counts = sums, groups, words, 0, 0, groups
            given = [unpacked(builder, arg, n) if n else arg for arg, n in zip(args, counts, strict=True)]
            return packed(builder, generate(builder, *given))

        operands = floats, places, offsets_type, types.uint32, types.int32, lefts
        return signature(floats, *operands), codegen

    return multiply


def _multiplied(builder, dtype, values, part, a, every_b):
    """16 rows of a product, the `part`-th, with each n8 tile."""
    for tile, b in enumerate(every_b):
        place = slice((part * len(every_b) + tile) * 4, (part * len(every_b) + tile) * 4 + 4)
        values[place] = product(builder, dtype, [*a, *b, *values[place]])


@cache
def tf32_gradients(groups: int, step_bytes: int, dy_bytes: int, filters: int, masked: bool):
    """`_gradients` of float32 rounded to TF32, a group a product: words g, g + 8, g + 16, g + 24 of pixels t, t + 4.

    Pixels that are not left do not count, if `masked`.
    """
    n_tiles, vectors = filters // 8, max(1, filters // 32)

    def generate(builder, values, pixels, offsets, dy, t, left):
        for group in range(groups):
            x, b = {}, []
            for half in range(2):
                for i, offset in enumerate(offsets):
                    word = _load(builder, builder.add(pixels[group], offset), half * 4 * step_bytes)[0]
                    if masked:
                        word = _live(builder, word, builder.add(t, I32(half * 4)), left[group])
                    x[half, i] = _rounded(builder, word)
                row = (group * GROUP + half * 4) * dy_bytes
                loaded = [_load(builder, dy, row + v * 128, n_tiles // vectors) for v in range(vectors)]
                b.append([_rounded(builder, word) for words in loaded for word in words])
            for part in range(2):
                a = [x[half, 2 * part + i] for half in range(2) for i in range(2)]
                _multiplied(builder, "tf32", values, part, a, list(zip(*b, strict=True)))
        return values

    return _gradients(2 * n_tiles * 4, groups, 4, generate)


@cache
def fma_gradients(step_bytes: int, dy_bytes: int, masked: bool):
    """`_gradients` of float32, of one group: eight words of every second pixel, from the lane's own on."""

    def generate(builder, values, pixels, offsets, dy, first, left):
        at = [builder.add(pixels[0], offset) for offset in offsets]
        for i in range(0, GROUP, 2):
            row = i * dy_bytes
            b = [builder.bitcast(v, F32) for half in (0, 64) for v in _load(builder, dy, row + half, 4)]
            for j in range(8):
                word = _load(builder, at[j], i * step_bytes)[0]
                if masked:
                    word = _live(builder, word, builder.add(first, I32(i)), left[0])
                x = builder.bitcast(word, F32)
                for o in range(8):
                    values[j * 8 + o] = builder.fma(x, b[o], values[j * 8 + o])
        return values

    return _gradients(64, 1, 8, generate)


@cache
def add_at(places: tuple[int, ...]):
    """Intrinsic (address, sums): each is added to the float32 at its place from the address."""

    @intrinsic
    def add(typingctx, where, sums):
        def codegen(context, builder, sig, args):
            for place, value in zip(places, unpacked(builder, args[1], len(places)), strict=True):
                to = builder.inttoptr(builder.add(args[0], I32(place)), I32.as_pointer(3))
                total = builder.fadd(builder.bitcast(load_words(builder, to, 1), F32), value)
                store_words(builder, to, builder.bitcast(total, I32), 1)
            return context.get_dummy_value()

        return signature(types.none, types.uint32, _floats(len(places))), codegen

    return add
