"""Sums of a thread that are neighbours in memory, finished and stored together."""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.window_tile import held_words
from nbdnn.problem import ITEMSIZE


@cache
def dealt_filter(run: int):
    """Device function: the filter of column at % 8 of n8 tile at // 8, so that a lane ends with a run of neighbours.

    A lane has two columns of each tile: the filters of run / 2 tiles are dealt together.
    """
    from nbdnn.kernels.cuda import ptx

    integer, dealt = ptx.INTEGER[32], max(run // 2, 1).bit_length() - 1  # tiles dealt together, as a power of two

    @ptx.inline
    def of_tiles(at):
        tile, column = at >> 3, at & 7
        first = tile >> dealt << 3 + dealt
        return integer(first + (column >> 1 << 1 + dealt) + ((tile & (1 << dealt) - 1) << 1) + (column & 1))

    return of_tiles


@cache
def in_turn(store_one, pixels: int, filters: int, run: int):
    """Device function (values, state): store_one(pixel, filter, values, state) for each run, whose values come first.

    The values are those of `filters` of a pixel, of `pixels`. They move to the front in turn, because what a loop
    indexes by its counter has to be in memory, where the loop is too long for the compiler to write out.
    """
    from nbdnn.kernels.cuda import ptx

    real, rest = ptx.REAL["f32"], (pixels - 1) * filters

    @ptx.inline
    def all_stored(values, state):
        here = ptx.cuda.local.array(filters, real)
        for pixel in range(pixels):
            for i in range(filters):
                here[i] = values[i]
            for first in range(0, filters, run):
                store_one(pixel, first, here, state)
                for i in range(filters - run):
                    here[i] = here[i + run]
            for i in range(rest):
                values[i] = values[i + filters]

    return all_stored


@cache
def store_run(dtype: str, tokens: tuple[str, ...], count: int):
    """Device function (values, alpha, beta, out, at, bias, channel, residual) that finishes out[at:at+count].

    The first `count` values are the sums. `count` is 1, or so many as are 4, 8 or 16 bytes, to which `at` is aligned.
    """
    from nbdnn.kernels.cuda import epilogue, ptx

    element = epilogue.store(dtype, tokens)

    @ptx.inline
    def single(values, alpha, beta, out, at, bias, channel, residual):
        element(values[0], alpha, beta, out, at, bias, channel, residual)

    if count == 1:
        return single
    name = epilogue.activation_of(tokens)
    activated = epilogue.activate(name, "f32")
    finished = epilogue.finish("f32", tuple(token for token in tokens if token != name))
    widen, real = ptx.WIDEN[dtype], ptx.REAL["f32"]
    integer, word = ptx.INTEGER[32], ptx.cuda.types.uint32
    words_count = count * ITEMSIZE[dtype] // 4
    put, take = held_words(words_count)
    load, load_constant, store = ptx.LOAD[words_count], ptx.LOAD_CONSTANT[words_count], ptx.STORE[words_count]
    reads_out, has_bias, has_residual = "beta" in tokens, "bias" in tokens, "res" in tokens
    unpacked, packed = unpack_words(dtype, words_count), pack_words(dtype, words_count)

    @ptx.inline
    def activate_indexed(results):
        for e in range(count):
            results[e] = activated(results[e])

    @ptx.inline
    def activate_moved(results):
        for _ in range(count):
            value = activated(results[0])
            for e in range(count - 1):
                results[e] = results[e + 1]
            results[count - 1] = value

    # As in `in_turn`: an exponential is too long.
    activate = activate_indexed if name in ("", "relu") else activate_moved

    @ptx.inline
    def run(values, alpha, beta, out, at, bias, channel, residual):
        words = ptx.cuda.local.array(words_count, word)
        before, added = ptx.cuda.local.array(count, real), ptx.cuda.local.array(count, real)
        results = ptx.cuda.local.array(count, real)
        if reads_out:
            put(words, 0, load(out, at))
            unpacked(before, words)
        if has_residual:
            put(words, 0, load_constant(residual, at))
            unpacked(added, words)
        for e in range(count):
            shift = widen(ptx.load_constant(bias, integer(channel + e))) if has_bias else real(0.0)
            old = before[e] if reads_out else real(0.0)
            more = added[e] if has_residual else real(0.0)
            results[e] = finished(values[e], alpha, beta, old, shift, more)
        activate(results)
        packed(words, results)
        store(out, at, take(words, 0))

    return run


@cache
def unpack_words(dtype: str, count: int):
    """Device function (values, words): `count` words of a local array to float32."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    pair = ptx_tile.UNPACK.get(dtype)

    @ptx.inline
    def halves(values, words):
        for k in range(count):
            values[2 * k], values[2 * k + 1] = pair(words[k])

    @ptx.inline
    def whole(values, words):
        for k in range(count):
            values[k] = ptx_tile.float_of(words[k])

    return whole if dtype == "f32" else halves


@cache
def pack_words(dtype: str, count: int):
    """Device function (words, values): the reverse of `unpack_words`, rounded to nearest even."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    pair = ptx_tile.PACK.get(dtype)

    @ptx.inline
    def halves(words, values):
        for k in range(count):
            words[k] = pair(values[2 * k], values[2 * k + 1])

    @ptx.inline
    def whole(words, values):
        for k in range(count):
            words[k] = ptx_tile.word_of(values[k])

    return whole if dtype == "f32" else halves
