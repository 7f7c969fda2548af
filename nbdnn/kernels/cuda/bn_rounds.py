"""Four rows of a thread at a time, in batch normalisation: fetched early, as they lie in memory, and used later.

A round is four vectors of x (and of dy, behind those of x, in one local array of words), those beyond a thread's last
row left out. What is fetched is on its way while a block does something else: adds up, waits, stores.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda.bn_plan import Variant

AT_ONCE = 4


def words_of(v: Variant) -> int:
    """Of a round."""
    from nbdnn.kernels.cuda import ptx_words

    return (1 if v.is_forward else 2) * AT_ONCE * ptx_words.count_of(v.dtype, v.lanes)


@cache
def fetched(v: Variant, evict: str):
    """Device function (words, x, dy, at, place, row, last, f): starts the loads of a round whose first vector is at
    `at`, place `place` of its image. Rows of the thread end before `last`."""
    from nbdnn.kernels.cuda import ptx, ptx_words

    integer, apart, forward = ptx.INTEGER[v.bits], v.threads // v.columns, v.is_forward
    fetch, count, positions = (
        ptx_words.fetch(v.dtype, v.lanes, evict),
        ptx_words.count_of(v.dtype, v.lanes),
        _positions(v),
    )

    @ptx.inline
    def fetch_one(words, k, x, dy, at):
        fetch(words, k * count, x, at)
        if not forward:
            fetch(words, (AT_ONCE + k) * count, dy, at)

    @ptx.inline
    def fetch_round(words, x, dy, at, place, row, last, f):
        second, third, fourth, _, _ = positions(at, place, f)
        if integer(row + 3 * apart) < last:
            fetch_one(words, 0, x, dy, at)
            fetch_one(words, 1, x, dy, second)
            fetch_one(words, 2, x, dy, third)
            fetch_one(words, 3, x, dy, fourth)
        else:
            if row < last:
                fetch_one(words, 0, x, dy, at)
            if integer(row + apart) < last:
                fetch_one(words, 1, x, dy, second)
            if integer(row + 2 * apart) < last:
                fetch_one(words, 2, x, dy, third)

    return fetch_round


@cache
def added(v: Variant):
    """Device functions on a round: (words, origin) makes a thread's first vector what it subtracts; (a, b, origin,
    words, values, gradients, row, last) -> how many vectors were added, as `bn_sums` says; values and gradients are
    local arrays for a vector."""
    from nbdnn.kernels.cuda import bn_sums, ptx, ptx_words

    integer, real, apart, forward = ptx.INTEGER[v.bits], ptx.REAL[v.compute], v.threads // v.columns, v.is_forward
    add, _, _ = bn_sums.steps(v)
    widen, count = ptx_words.widen(v.dtype, v.lanes), ptx_words.count_of(v.dtype, v.lanes)

    @ptx.inline
    def add_one(a, b, origin, words, k, values, gradients):
        widen(values, words, k * count)
        if not forward:
            widen(gradients, words, (AT_ONCE + k) * count)
        add(a, b, origin, values, gradients, 0)

    @ptx.inline
    def first(words, origin):
        widen(origin, words, 0)

    @ptx.inline
    def add_round(a, b, origin, words, values, gradients, row, last):
        there = real(0.0)
        if integer(row + 3 * apart) < last:
            add_one(a, b, origin, words, 0, values, gradients)
            add_one(a, b, origin, words, 1, values, gradients)
            add_one(a, b, origin, words, 2, values, gradients)
            add_one(a, b, origin, words, 3, values, gradients)
            there = real(AT_ONCE)
        else:
            if row < last:
                add_one(a, b, origin, words, 0, values, gradients)
                there = real(1.0)
            if integer(row + apart) < last:
                add_one(a, b, origin, words, 1, values, gradients)
                there = real(2.0)
            if integer(row + 2 * apart) < last:
                add_one(a, b, origin, words, 2, values, gradients)
                there = real(3.0)
        return there

    return first, add_round


@cache
def scaled(v: Variant, evict: str):
    """Device function (center, second, scale, offset, words, values, gradients, out, at, place, row, last, f) -> (at,
    place) of the next round: scales a round and stores it."""
    from nbdnn.kernels.cuda import bn_channel, ptx, ptx_words

    integer, apart, forward = ptx.INTEGER[v.bits], v.threads // v.columns, v.is_forward
    scale, store = bn_channel.scale(v), ptx_words.store(v.dtype, v.lanes, evict)
    widen, count = ptx_words.widen(v.dtype, v.lanes), ptx_words.count_of(v.dtype, v.lanes)
    positions = _positions(v)

    @ptx.inline
    def scale_one(center, second, factor, offset, words, k, values, gradients, out, at):
        widen(values, words, k * count)
        if not forward:
            widen(gradients, words, (AT_ONCE + k) * count)
        scale(center, second, factor, offset, values, gradients, 0)
        store(out, at, values, 0)

    @ptx.inline
    def scale_round(center, second, factor, offset, words, values, gradients, out, at, place, row, last, f):
        at_1, at_2, at_3, end, place = positions(at, place, f)
        if integer(row + 3 * apart) < last:
            scale_one(center, second, factor, offset, words, 0, values, gradients, out, at)
            scale_one(center, second, factor, offset, words, 1, values, gradients, out, at_1)
            scale_one(center, second, factor, offset, words, 2, values, gradients, out, at_2)
            scale_one(center, second, factor, offset, words, 3, values, gradients, out, at_3)
        else:
            if row < last:
                scale_one(center, second, factor, offset, words, 0, values, gradients, out, at)
            if integer(row + apart) < last:
                scale_one(center, second, factor, offset, words, 1, values, gradients, out, at_1)
            if integer(row + 2 * apart) < last:
                scale_one(center, second, factor, offset, words, 2, values, gradients, out, at_2)
        return end, place

    return scale_round


@cache
def next_round(v: Variant):
    """Device function (at, place, f) -> the same of the round after."""
    from nbdnn.kernels.cuda import ptx

    positions = _positions(v)

    @ptx.inline
    def following(at, place, f):
        _, _, _, end, place = positions(at, place, f)
        return end, place

    return following


@cache
def _positions(v: Variant):
    """Device function (at, place, f) -> where the other three vectors of a round are, and (at, place) of the next."""
    from nbdnn.kernels.cuda import ptx

    integer, moved, planar = ptx.INTEGER[v.bits], plan.next_row(v.bits), v.planar

    @ptx.inline
    def across_images(at, place, f):
        second, place = moved(at, place, f)
        third, place = moved(second, place, f)
        fourth, place = moved(third, place, f)
        end, place = moved(fourth, place, f)
        return second, third, fourth, end, place

    @ptx.inline
    def down_rows(at, place, f):
        return (
            integer(at + f.step_elems),
            integer(at + 2 * f.step_elems),
            integer(at + 3 * f.step_elems),
            integer(at + 4 * f.step_elems),
            place,
        )

    return across_images if planar else down_rows
