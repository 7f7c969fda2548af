"""Epilogues that read the output, or a residual that lies like it: a thread asks for several before it waits for one.

A loop that reads, finishes and stores one output after the other takes memory's latency each time, since no load may
pass a store that might be to the same place: 0.7 us, eight times in a row for a tile of 64x64 (an H200). Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.quads import QUAD, store_quad
from nbdnn.problem import ITEMSIZE

_MOST_WORDS = 32  # that a thread has asked for; its sums are in shared memory by then


class Asked(NamedTuple):
    """How a thread finishes runs of neighbours. at_once: as many as it asks for together, one where nothing is read;
    words: of the local array where it holds what has come.

    ask (held, i, wanted, (out, bias, residual), at, channel): for run i. finish (held, sums, (alpha, beta), out, at,
    shifts): run 0, to memory; shifts: the bias, unless it is held. go_on (held): run 1 becomes run 0, and so on.
    """

    at_once: int
    words: int
    ask: Callable
    finish: Callable
    go_on: Callable


@cache
def asked(dtype: str, tokens: tuple[str, ...], run: int, most: int, *, holds_bias: bool = False) -> Asked:
    """For runs of one or four elements, of which a thread has so many at most. holds_bias: each run has a bias, of its
    own channel, which is asked for as well if anything is."""
    from nbdnn.kernels.cuda import epilogue, ptx

    reads_out, has_residual = "beta" in tokens, "res" in tokens
    holds_bias = holds_bias and "bias" in tokens and (reads_out or has_residual)
    (of_run, load, value_of), (_, load_bias, bias_of) = moved(dtype, run), moved(dtype, 1)
    residual_at = of_run * reads_out
    bias_at = residual_at + of_run * has_residual
    of_all = bias_at + holds_bias
    at_once = max(1, min(most, _MOST_WORDS // of_all)) if of_all else 1
    words = max(at_once * of_all, 1)
    finished, narrow, store = epilogue.finish("f32", tokens), ptx.NARROW[dtype], store_quad(dtype)
    nothing = ptx.REAL["f32"](0.0)

    @ptx.inline
    def ask(held, i, wanted, pointers, at, channel):
        out, bias, residual = pointers
        if reads_out:
            load(held, i * of_all, wanted, out, at)
        if has_residual:
            load(held, i * of_all + residual_at, wanted, residual, at)
        if holds_bias:
            load_bias(held, i * of_all + bias_at, wanted, bias, channel)

    @ptx.inline
    def one(held, v, scalars, shift, e):
        before = value_of(held, 0, e) if reads_out else nothing
        added = value_of(held, residual_at, e) if has_residual else nothing
        return finished(v, scalars[0], scalars[1], before, shift, added)

    @ptx.inline
    def finish_quad(held, v, scalars, out, at, shifts):
        if holds_bias:
            shift = bias_of(held, bias_at, 0)
            shifts = (shift, shift, shift, shift)
        first, second = one(held, v[0], scalars, shifts[0], 0), one(held, v[1], scalars, shifts[1], 1)
        third, fourth = one(held, v[2], scalars, shifts[2], 2), one(held, v[3], scalars, shifts[3], 3)
        store(out, at, (first, second, third, fourth))

    @ptx.inline
    def finish_one(held, v, scalars, out, at, shifts):
        out[at] = narrow(one(held, v, scalars, bias_of(held, bias_at, 0) if holds_bias else shifts[0], 0))

    @ptx.inline
    def go_on(held):
        for i in range(words - of_all):
            held[i] = held[i + of_all]

    return Asked(at_once, words, ask, finish_quad if run == QUAD else finish_one, go_on)


@cache
def moved(dtype: str, run: int):
    """Words of a run; device functions (held, place, wanted, pointer, at): a run to a local array; and (held, place,
    element) -> one of its elements in float32."""
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_vector

    count = max(run * ITEMSIZE[dtype] // 4, 1)
    load, float_of, unpack = ptx_vector.ask(dtype, run), ptx_tile.float_of, ptx_tile.UNPACK.get(dtype)

    @ptx.inline
    def load_run(held, place, wanted, pointer, at):
        words = load(pointer, at, wanted)
        for i in range(count):
            held[place + i] = words[i]

    @ptx.inline
    def value_of_word(held, place, element):
        return float_of(held[place + element])

    @ptx.inline
    def value_of_half(held, place, element):
        return unpack(held[place + (element >> 1)])[element & 1]

    return count, load_run, value_of_word if unpack is None else value_of_half
