"""Four neighbours at a time, from memory to float32 and back: 16 bytes of float32, 8 of 16 bits; and their epilogue.

What the tokens of an epilogue do not name is not read: its pointer may be null. Source: own.
"""

from __future__ import annotations

from functools import cache

QUAD = 4


@cache
def quad(dtype: str, constant: bool):
    """Device function (pointer, at) -> four neighbours in float32; at is a multiple of 4."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    table, floats = ptx.LOAD_CONSTANT if constant else ptx.LOAD, ptx_tile.float_of
    if dtype == "f32":
        load = table[4]

        @ptx.inline
        def quad_of_f32(pointer, at):
            words = load(pointer, at)
            return floats(words[0]), floats(words[1]), floats(words[2]), floats(words[3])

        return quad_of_f32

    load, unpack = table[2], ptx_tile.UNPACK[dtype]

    @ptx.inline
    def quad_of_pairs(pointer, at):
        words = load(pointer, at)
        low, high = unpack(words[0]), unpack(words[1])
        return low[0], low[1], high[0], high[1]

    return quad_of_pairs


@cache
def store_quad(dtype: str):
    """Device function (pointer, at, four float32) that rounds and stores them."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    if dtype == "f32":
        store, bits = ptx.STORE[4], ptx_tile.word_of

        @ptx.inline
        def store_f32(pointer, at, v):
            store(pointer, at, (bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])))

        return store_f32

    store, pack = ptx.STORE[2], ptx_tile.PACK[dtype]

    @ptx.inline
    def store_pairs(pointer, at, v):
        store(pointer, at, (pack(v[0], v[1]), pack(v[2], v[3])))

    return store_pairs


@cache
def finish_quad(dtype: str, tokens: tuple[str, ...]):
    """Device function (four sums, alpha, beta, out, at, four of the bias, residual): the epilogue, to out[at]."""
    from nbdnn.kernels.cuda import epilogue, ptx

    finished, load, load_constant, store = (
        epilogue.finish("f32", tokens),
        quad(dtype, False),
        quad(dtype, True),
        store_quad(dtype),
    )
    zero = ptx.REAL["f32"](0.0)
    reads_out, has_residual = "beta" in tokens, "res" in tokens

    @ptx.inline
    def finish(v, alpha, beta, out, at, shift, residual):
        before = load(out, at) if reads_out else (zero, zero, zero, zero)
        added = load_constant(residual, at) if has_residual else (zero, zero, zero, zero)
        first = finished(v[0], alpha, beta, before[0], shift[0], added[0])
        second = finished(v[1], alpha, beta, before[1], shift[1], added[1])
        third = finished(v[2], alpha, beta, before[2], shift[2], added[2])
        fourth = finished(v[3], alpha, beta, before[3], shift[3], added[3])
        store(out, at, (first, second, third, fourth))

    return finish


@cache
def bias_quad(dtype: str, tokens: tuple[str, ...], along_channels: bool):
    """Device function (bias, channel) -> the bias of four elements, zeros where there is none.

    They are of four channels from `channel`, a multiple of 4, on, or all of that one.
    """
    from nbdnn.kernels.cuda import ptx

    load, zero, has_bias = quad(dtype, True), ptx.REAL["f32"](0.0), "bias" in tokens
    widen = ptx.WIDEN[dtype]

    @ptx.inline
    def of_four(bias, channel):
        return load(bias, channel) if has_bias else (zero, zero, zero, zero)

    @ptx.inline
    def of_one(bias, channel):
        shift = widen(ptx.load_constant(bias, channel)) if has_bias else zero
        return shift, shift, shift, shift

    return of_four if along_channels else of_one
