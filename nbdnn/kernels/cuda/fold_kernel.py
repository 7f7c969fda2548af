"""The kernel that folds tensors into chunks of channels, or unfolds one: what `fold_copy.py` launches.

A thread works out once where the runs of its chunk lie from a place's first element on, and walks from place to place.
Whether a run is inside on all axes is one comparison of words. For one beyond a border the tensor's first element is
read, and thrown away: no load waits for a branch. Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.fold_axes import CHUNK_BYTES, MOST_FACTOR
from nbdnn.problem import ITEMSIZE

THREADS = 256
# A word has a run's digits on depth, height and width in 7, 7 and 14 bits. The bit above each stays set in a difference
# of two such words, of which the first has it, where the digit's is not negative.
_AT_D, _AT_H, _GUARDS = 23, 15, 1 << 30 | 1 << 22 | 1 << 14
_OUTSIDE = MOST_FACTOR << _AT_H


class Way(NamedTuple):
    """What a copy is compiled for. run: elements that are moved at once, 0 where there is no tensor; inner: whether c
    is counted before i; plain: whether there are no i, and channels alone differ."""

    run: int
    inner: bool
    plain: bool


class Variant(NamedTuple):
    """deep: whether there is a depth. adds: whether beta times what was in the tensor is added."""

    dtype: str
    unfolds: bool
    deep: bool
    adds: bool
    first: Way
    second: Way


class Fields(NamedTuple):
    """blocks: of this tensor. lanes: a block's chunks and places at once, `step` places before the next of a thread.
    numbers: places of all images; chunks of a place; channels that exist. over: places that are walked, others extents
    of the tensor; multipliers and shifts are those of `ptx.split`."""

    blocks: int
    chunk_blocks: int
    chunk_lanes: int
    place_lanes: int
    step: int
    numbers: int
    chunks: int
    channels: int
    planes: int
    planes_by: int
    planes_shift: int
    fold_d: int
    fold_d_by: int
    fold_d_shift: int
    fold_h: int
    fold_h_by: int
    fold_h_shift: int
    fold_w: int
    fold_w_by: int
    fold_w_shift: int
    over_d: int
    over_d_by: int
    over_d_shift: int
    over_h: int
    over_h_by: int
    over_h_shift: int
    over_w: int
    over_w_by: int
    over_w_shift: int
    places_d: int
    places_h: int
    places_w: int
    step_d: int
    step_h: int
    step_w: int
    pad_d: int
    pad_h: int
    pad_w: int
    extent_n: int
    extent_d: int
    extent_h: int
    extent_w: int
    start: int
    by_n: int
    by_c: int
    by_d: int
    by_h: int
    by_w: int


def fold_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    variant = Variant(*specialised_on)
    integer, data = ptx.INTEGER[32], ptx.pointer(variant.dtype)
    scalars = (ptx.REAL["f32"],) * 2 if variant.adds else ()
    record = ptx.record(Fields, 32)
    first = _copy(variant, variant.first)

    def unfold_adding(tensor, copy, other, other_copy, alpha, beta, f, g):
        first(tensor, copy, integer(ptx.block_x()), beta, f)

    def copy_one(tensor, copy, other, other_copy, f, g):
        first(tensor, copy, integer(ptx.block_x()), 0, f)

    if not variant.second.run:
        return unfold_adding if variant.adds else copy_one, (data, data, data, data, *scalars, record, record)

    second = _copy(variant, variant.second)

    def copy_both(tensor, copy, other, other_copy, f, g):
        block = integer(ptx.block_x())
        if block < f.blocks:
            first(tensor, copy, block, 0, f)
        else:
            second(other, other_copy, integer(block - f.blocks), 0, g)

    return copy_both, (data, data, data, data, record, record)


def _copy(variant: Variant, way: Way):
    """Device function (tensor, copy, block, beta, integers): a block's places."""
    from nbdnn.kernels.cuda import ptx

    integer, deep = ptx.INTEGER[32], variant.deep
    chunk_elems = CHUNK_BYTES // ITEMSIZE[variant.dtype]
    runs, run = chunk_elems // way.run, way.run
    move = (_unfold_chunk if variant.unfolds else _fold_chunk)(variant, run)

    if way.plain:

        @ptx.inline
        def digits(channel, f):
            return channel, integer(0), integer(0), integer(0)

    elif way.inner:

        @ptx.inline
        def digits(channel, f):
            rest, c = ptx.split(channel, f.planes, f.planes_by, f.planes_shift)
            rest, w = ptx.split(rest, f.fold_w, f.fold_w_by, f.fold_w_shift)
            d, h = ptx.split(rest, f.fold_h, f.fold_h_by, f.fold_h_shift)
            return c, d, h, w

    else:

        @ptx.inline
        def digits(channel, f):
            rest, w = ptx.split(channel, f.fold_w, f.fold_w_by, f.fold_w_shift)
            rest, h = ptx.split(rest, f.fold_h, f.fold_h_by, f.fold_h_shift)
            c, d = ptx.split(rest, f.fold_d, f.fold_d_by, f.fold_d_shift)
            return c, d, h, w

    @ptx.inline
    def packed(d, h, w):
        return integer(integer(d << _AT_D) | integer(h << _AT_H) | w)

    @ptx.inline
    def find_runs(channel, at, words, f):
        """Where the runs of a chunk lie from a place's first element on, in elements and on each axis."""
        for i in range(runs):
            own = integer(channel + i * run)
            c, d, h, w = digits(own, f)
            at[i] = integer(c * f.by_c + integer(d * f.by_d + integer(h * f.by_h + w * f.by_w)))
            words[i] = packed(d, h, w) if own < f.channels else integer(_OUTSIDE)

    @ptx.inline
    def bounds(n, d, h, w, f):
        """Words of the first and the last digits that are inside, where a place begins; of an impossible pair."""
        least_d, last_d = integer(max(-d, 0)), integer(min(f.extent_d - d, f.fold_d) - 1)
        least_h, last_h = integer(max(-h, 0)), integer(min(f.extent_h - h, f.fold_h) - 1)
        least_w, last_w = integer(max(-w, 0)), integer(min(f.extent_w - w, f.fold_w) - 1)
        if n < f.extent_n and least_d <= last_d and least_h <= last_h and least_w <= last_w:
            return packed(least_d, least_h, least_w), integer(packed(last_d, last_h, last_w) | _GUARDS)
        return integer(1), integer(_GUARDS)

    @ptx.inline
    def place_of(number, f):
        rest, w = ptx.split(number, f.over_w, f.over_w_by, f.over_w_shift)
        n, h = ptx.split(rest, f.over_h, f.over_h_by, f.over_h_shift)
        d = integer(0)
        if deep:
            n, d = ptx.split(n, f.over_d, f.over_d_by, f.over_d_shift)
        return n, d, h, w

    @ptx.inline
    def copy_block(tensor, copy, block, beta, f):
        of_places, of_chunks = ptx.divided(block, f.chunk_blocks)
        lane, of_lanes = ptx.divided(integer(ptx.thread_x()), f.chunk_lanes)
        chunk = integer(of_chunks * f.chunk_lanes + of_lanes)
        number, channel = integer(of_places * f.place_lanes + lane), integer(chunk * chunk_elems)
        if lane >= f.place_lanes or chunk >= f.chunks:
            number = f.numbers
        at, words = ptx.cuda.local.array(runs, integer), ptx.cuda.local.array(runs, integer)
        find_runs(channel, at, words, f)
        elements = integer(f.chunks * chunk_elems)
        while number < f.numbers:
            n, d, h, w = place_of(number, f)
            within = d < f.places_d and h < f.places_h and w < f.places_w
            place = integer(integer(integer(n * f.places_d + d) * f.places_h + h) * f.places_w + w)
            to = integer(place * elements + channel)
            d, h, w = (
                integer(d * f.step_d - f.pad_d),
                integer(h * f.step_h - f.pad_h),
                integer(w * f.step_w - f.pad_w),
            )
            start = integer(f.start + n * f.by_n + integer(d * f.by_d + integer(h * f.by_h + w * f.by_w)))
            move(tensor, copy, (start, to, within), (at, words, bounds(n, d, h, w, f)), beta)
            number = integer(number + f.step)

    return copy_block


def _inside():
    """Device function (run, runs): whether it is inside of the tensor."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def inside(i, runs):
        _, words, (least, last) = runs
        above, below = integer(integer(words[i] | _GUARDS) - least), integer(last - words[i])
        return integer(above & below & _GUARDS) == _GUARDS

    return inside


def _fold_chunk(variant: Variant, run: int):
    """Device function that gathers the runs of a chunk and stores it."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, store = ptx.INTEGER[32], ptx.WORD, ptx.STORE[4]
    inside, low = _inside(), ptx_tile.PAIR_HALVES[0]
    runs, words = CHUNK_BYTES // ITEMSIZE[variant.dtype] // run, run * ITEMSIZE[variant.dtype] // 4
    load, load_element = ptx.LOAD_CONSTANT.get(words), ptx.load_constant

    @ptx.inline
    def load_four(parts, i, tensor, at, wanted):
        a, b, c, d = load(tensor, at)
        parts[0], parts[1] = a if wanted else word(0), b if wanted else word(0)
        parts[2], parts[3] = c if wanted else word(0), d if wanted else word(0)

    @ptx.inline
    def load_two(parts, i, tensor, at, wanted):
        a, b = load(tensor, at)
        parts[2 * i], parts[2 * i + 1] = a if wanted else word(0), b if wanted else word(0)

    @ptx.inline
    def load_one(parts, i, tensor, at, wanted):
        a = load(tensor, at)
        parts[i] = a if wanted else word(0)

    @ptx.inline
    def load_half(parts, i, tensor, at, wanted):
        a = word(load_element(tensor, at))
        parts[i] = a if wanted else word(0)

    load_run = {4: load_four, 2: load_two, 1: load_one, 0: load_half}[words]

    @ptx.inline
    def store_words(copy, to, parts):
        store(copy, to, (parts[0], parts[1], parts[2], parts[3]))

    @ptx.inline
    def store_halves(copy, to, parts):
        a, b = low(parts[0], parts[1]), low(parts[2], parts[3])
        store(copy, to, (a, b, low(parts[4], parts[5]), low(parts[6], parts[7])))

    store_chunk = store_words if words else store_halves

    @ptx.inline
    def fold_chunk(tensor, copy, at, found, beta):
        start, to, _ = at
        parts = ptx.cuda.local.array(8, word)
        for i in range(runs):
            wanted = inside(i, found)
            load_run(parts, i, tensor, integer(start + found[0][i]) if wanted else integer(0), wanted)
        store_chunk(copy, to, parts)

    return fold_chunk


def _unfold_chunk(variant: Variant, run: int):
    """Device function that loads a chunk and scatters its runs."""
    from nbdnn.kernels.cuda import ptx

    integer, word, load = ptx.INTEGER[32], ptx.WORD, ptx.LOAD_CONSTANT[4]
    element, widen, narrow = ptx.ELEMENT[variant.dtype], ptx.WIDEN[variant.dtype], ptx.NARROW[variant.dtype]
    none = ptx.REAL["f32"](0.0)
    inside, load_element = _inside(), ptx.load_constant
    runs, words = CHUNK_BYTES // ITEMSIZE[variant.dtype] // run, run * ITEMSIZE[variant.dtype] // 4
    store = ptx.STORE.get(words)

    @ptx.inline
    def store_four(tensor, at, parts, i):
        store(tensor, at, (parts[0], parts[1], parts[2], parts[3]))

    @ptx.inline
    def store_two(tensor, at, parts, i):
        store(tensor, at, (parts[2 * i], parts[2 * i + 1]))

    @ptx.inline
    def store_one(tensor, at, parts, i):
        store(tensor, at, parts[i])

    @ptx.inline
    def store_half(tensor, at, parts, i):
        tensor[at] = element((parts[i // 2] >> (16 * (i % 2))) & 0xFFFF)

    store_run = {4: store_four, 2: store_two, 1: store_one, 0: store_half}[words]

    @ptx.inline
    def unfold_chunk(tensor, copy, at, found, beta):
        start, to, within = at
        a, b, c, d = load(copy, to if within else integer(0))
        parts = ptx.cuda.local.array(4, word)
        parts[0], parts[1] = a if within else word(0), b if within else word(0)
        parts[2], parts[3] = c if within else word(0), d if within else word(0)
        for i in range(runs):
            if inside(i, found):
                store_run(tensor, integer(start + found[0][i]), parts, i)

    @ptx.inline
    def add_chunk(tensor, copy, at, found, beta):
        start, to, within = at
        for i in range(runs):
            if inside(i, found):
                place = integer(start + found[0][i])
                held = widen(load_element(copy, integer(to + i) if within else integer(0)))
                tensor[place] = narrow((held if within else none) + beta * widen(tensor[place]))

    return add_chunk if variant.adds else unfold_chunk
