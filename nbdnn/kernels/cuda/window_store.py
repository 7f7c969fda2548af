"""Sums of a thread that are neighbours in memory, finished and stored together."""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.asked import moved
from nbdnn.kernels.cuda.window_tile import held_words

_MOST_RUNS = 4  # that a thread has asked for, beside its sums


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
def stored_in_turn(
    place, dtype: str, tokens: tuple[str, ...], pixels: int, filters: int, run: int, *, most_words: int = 16
):
    """Device function (values, out, extra, state) that stores `filters` sums of each of `pixels`, run by run.

    place (pixel, filter, state) -> (whether there is such a run, where it lies, its channel). extra: bias, residual,
    alpha, beta. A run is one element, or so many as are 4, 8 or 16 bytes, to which its place is aligned.

    What is stored moves to the front, because what a loop indexes by its counter has to be in memory, where the loop is
    too long for the compiler to write out. What the epilogue reads is asked for several runs at once, up to
    most_words of a thread: see asked.py.
    """
    from nbdnn.kernels.cuda import ptx

    real, integer, word = ptx.REAL["f32"], ptx.INTEGER[32], ptx.WORD
    of_run, ask = _asked_run(dtype, tokens, run)
    finish = _finished_run(dtype, tokens, run)
    pixels_at_once, of_pixel_at_once = _at_once(pixels, filters // run, of_run, most_words)
    filters_at_once = of_pixel_at_once * run
    together = pixels_at_once * filters_at_once
    rest, asked_for = pixels * filters - together, max(together // run * of_run, 1)

    @ptx.inline
    def all_stored(values, out, extra, state):
        here, held = ptx.cuda.local.array(together, real), ptx.cuda.local.array(asked_for, word)
        for first_pixel in range(0, pixels, pixels_at_once):
            for first in range(0, filters, filters_at_once):
                for i in range(together):
                    here[i] = values[i]
                if of_run > 0:
                    for i in range(pixels_at_once):
                        for j in range(of_pixel_at_once):
                            wanted, at, _ = place(integer(first_pixel + i), integer(first + j * run), state)
                            ask(held, (i * of_pixel_at_once + j) * of_run, wanted, out, extra[1], at)
                for pixel in range(first_pixel, first_pixel + pixels_at_once):
                    for inner in range(first, first + filters_at_once, run):
                        wanted, at, channel = place(integer(pixel), integer(inner), state)
                        if wanted:
                            finish(here, held, out, at, extra, channel)
                        for i in range(together - run):
                            here[i] = here[i + run]
                        for i in range(asked_for - of_run):
                            held[i] = held[i + of_run]
                for i in range(rest):
                    values[i] = values[i + together]

    return all_stored


def _at_once(pixels: int, of_pixel: int, of_run: int, most_words: int) -> tuple[int, int]:
    """Runs that are stored together: (of so many pixels, so many of each). of_run: words that each reads."""
    if of_run == 0:
        return 1, of_pixel
    most = max(1, min(_MOST_RUNS, most_words // of_run))
    runs = max(each for each in range(1, most + 1) if of_pixel % each == 0)
    return max(each for each in range(1, most // runs + 1) if pixels % each == 0) if runs == of_pixel else 1, runs


@cache
def _asked_run(dtype: str, tokens: tuple[str, ...], run: int):
    """Words of what the epilogue of a run reads; device function (held, at, wanted, out, residual, place)."""
    from nbdnn.kernels.cuda import ptx

    words, load, _ = moved(dtype, run)
    reads_out, has_residual = "beta" in tokens, "res" in tokens

    @ptx.inline
    def ask(held, at, wanted, out, residual, place):
        if reads_out:
            load(held, at, wanted, out, place)
        if has_residual:
            load(held, at + words * reads_out, wanted, residual, place)

    return words * (reads_out + has_residual), ask


@cache
def _finished_run(dtype: str, tokens: tuple[str, ...], run: int):
    """Device function (sums, held, out, at, extra, channel): out[at:at+run] by the first of the sums and words."""
    from nbdnn.kernels.cuda import epilogue, ptx

    name = epilogue.activation_of(tokens)
    activated = epilogue.activate(name, "f32")
    finished = epilogue.finish("f32", tuple(token for token in tokens if token != name))
    widen, narrow, real, integer = ptx.WIDEN[dtype], ptx.NARROW[dtype], ptx.REAL["f32"], ptx.INTEGER[32]
    words_count, _, value_of = moved(dtype, run)
    _, take = held_words(words_count)
    store, packed = ptx.STORE[words_count], pack_words(dtype, words_count)
    reads_out, has_bias, has_residual = "beta" in tokens, "bias" in tokens, "res" in tokens
    residual_at = words_count * reads_out

    @ptx.inline
    def activate_indexed(results):
        for e in range(run):
            results[e] = activated(results[e])

    @ptx.inline
    def activate_moved(results):
        for _ in range(run):
            value = activated(results[0])
            for e in range(run - 1):
                results[e] = results[e + 1]
            results[run - 1] = value

    # As in `stored_in_turn`: an exponential is too long.
    activate = activate_indexed if name in ("", "relu") else activate_moved

    @ptx.inline
    def finish(sums, held, out, at, extra, channel):
        bias, _, alpha, beta = extra
        words, results = ptx.cuda.local.array(words_count, ptx.WORD), ptx.cuda.local.array(run, real)
        for e in range(run):
            shift = widen(ptx.load_constant(bias, integer(channel + e))) if has_bias else real(0.0)
            old = value_of(held, 0, e) if reads_out else real(0.0)
            more = value_of(held, residual_at, e) if has_residual else real(0.0)
            results[e] = finished(sums[e], alpha, beta, old, shift, more)
        activate(results)
        if run == 1:
            out[at] = narrow(results[0])
        else:
            packed(words, results)
            store(out, at, take(words, 0))

    return finish


@cache
def pack_words(dtype: str, count: int):
    """Device function (words, values): float32 to `count` words, rounded to nearest even."""
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
