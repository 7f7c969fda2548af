"""The inputs of a problem with their channels last: turned[o, i, c] from tensor[o, c, i].

    image, dy:  o image, i pixel                filter:  o filter, i tap

Where i is long, a block takes 64 pixels of as many channels as make 128 bytes: a thread reads 16 bytes of one channel
(of 16 bits, of two) and leaves them in shared memory, a word of neighbouring channels for each pixel; then it takes 16
bytes of a pixel from there. A word lies in the row of its pixel, its 16-byte chunk at the chunk's number xor that of
the pixel's run: the 8 runs of 4 words that a warp writes, and the 8 chunks that a quarter reads, meet every bank once.

Where i is short, or odd, a thread reads a word, or an element, of as many channels as make 16 bytes, which it writes;
neighbouring channels meet in the second-level cache. One launch turns both inputs. Traffic: each twice, the results to
stay in cache: 3.1 to 4.2 TB/s for images of 28x28 and more on an H200, by chunks alone 1.6 to 2.1. Source: own.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import NULL, Launch, in_workspace
from nbdnn.problem import ITEMSIZE, LAYOUTS, Operand
from nbdnn.problem_conv import FILTER_LAYOUTS, ConvProblem

ALIGN_BYTES = 256  # of what lies in the workspace
_THREADS = 256
_CHUNK_BYTES, _LINE_BYTES = 16, 128
_TILE_PIXELS = 64
_TILE_BYTES = _TILE_PIXELS * _LINE_BYTES


class _Variant(NamedTuple):
    """dtype, and what a load of the first and the second input takes: 4 or 2 words, in tiles; 1 word; 0: an element."""

    dtype: str
    first_words: int
    second_words: int


class _Fields(NamedTuple):
    """Of each input: blocks that turn it, and its extents, of which `inner` is last."""

    first_blocks: int
    first_outer: int
    first_channels: int
    first_inner: int
    second_outer: int
    second_channels: int
    second_inner: int


def channels_last(problem: ConvProblem) -> ConvProblem:
    """The problem that is left when its inputs are turned; of a filter gradient, dw has the channels last too."""
    last, w_last = LAYOUTS[problem.ndim][1], FILTER_LAYOUTS[problem.ndim][1]
    y_layout = last if problem.op == "conv_bwd_filter" else problem.y_layout
    return replace(problem, layout=last, w_layout=w_last, y_layout=y_layout)


def is_planar(operand: Operand) -> bool:
    """Whether the channels are not last in memory."""
    return operand.strides[1] > 1


def turned_bytes(problem: ConvProblem, filters_last: bool = False) -> int:
    """Workspace that the turned inputs of a problem take."""
    return sum(_room_bytes(operand) for operand in _inputs(problem, filters_last) if is_planar(operand))


def input_places(problem: ConvProblem, start_bytes: int, filters_last: bool = False) -> tuple[int, int]:
    """Places of the pointers to both inputs, of which those that are turned lie in the workspace from a start on."""
    first, second = _inputs(problem, filters_last)
    second_bytes = start_bytes + (_room_bytes(first) if is_planar(first) else 0)
    return (
        in_workspace(start_bytes) if is_planar(first) else 0,
        in_workspace(second_bytes) if is_planar(second) else 1,
    )


def turn_inputs(problem: ConvProblem, start_bytes: int, filters_last: bool = False) -> list[Launch]:
    """What turns the inputs that are planar, to where `input_places` says; nothing where none is.

    filters_last: whether a bwd_data has its filter turned from [filter][rest] to [rest][filter] instead, whichever of
    channels and taps the rest begins with.
    """
    places = input_places(problem, start_bytes, filters_last)
    inputs = _inputs(problem, filters_last)
    jobs = [(place, to, inputs[place]) for place, to in enumerate(places) if to != place]
    if not jobs:
        return []
    words = [_words(operand) for *_, operand in jobs]
    blocks = [_blocks(operand) for *_, operand in jobs]
    pointers = [pointer for place, to, _ in jobs for pointer in (place, to)]
    extents = [extent for *_, o in jobs for extent in (o.shape[0], o.shape[1], o.strides[1])]
    if len(jobs) == 1:
        pointers, extents, words = [*pointers, NULL, NULL], [*extents, 0, 1, 1], [*words, 0]
    return [
        Launch(
            source=Source(_turn_kernel, _Variant(problem.dtype, *words), _THREADS),
            grid=(sum(blocks), 1, 1),
            pointers=tuple(pointers),
            scalars="",
            integers=_Fields(blocks[0], *extents),
            dynamic_shared_bytes=_TILE_BYTES if max(words) > 1 else 0,
        )
    ]


def _inputs(problem: ConvProblem, filters_last: bool) -> tuple[Operand, Operand]:
    first, second = problem.operands[:2]
    if filters_last:
        rest = prod(first.shape[1:])
        first = replace(first, shape=(1, first.shape[0], rest), strides=(first.size_elems, rest, 1))
    return first, second


def _room_bytes(operand: Operand) -> int:
    return -(-operand.size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _words(operand: Operand) -> int:
    """What a load takes: whole words of one channel."""
    inner, of_a_word = operand.strides[1], 4 // ITEMSIZE[operand.dtype]
    loads = (4, 2, 1) if inner >= _TILE_PIXELS else (1,)
    return next((words for words in loads if inner % (words * of_a_word) == 0), 0)


def _blocks(operand: Operand) -> int:
    (outer, channels), inner, words = operand.shape[:2], operand.strides[1], _words(operand)
    if words > 1:
        tiles = ceil(channels * ITEMSIZE[operand.dtype] / _LINE_BYTES)
        return outer * tiles * ceil(inner / _TILE_PIXELS)
    pixels = 4 // ITEMSIZE[operand.dtype] if words else 1
    return ceil(operand.size_bytes // _CHUNK_BYTES // pixels / _THREADS)


def _turn_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    variant = _Variant(*specialised_on)
    integer = ptx.INTEGER[32]
    turn_first, turn_second = (
        _turn_tile(variant.dtype, words) if words > 1 else _turn_chunk(variant.dtype, words) for words in variant[1:]
    )

    def turn(first, first_turned, second, second_turned, f):
        block = integer(ptx.block_x())
        if block < f.first_blocks:
            turn_first(first, first_turned, block, f.first_outer, f.first_channels, f.first_inner)
        else:
            block = integer(block - f.first_blocks)
            turn_second(second, second_turned, block, f.second_outer, f.second_channels, f.second_inner)

    data = ptx.pointer(variant.dtype)
    return turn, (data, data, data, data, ptx.record(_Fields, 32))


def _turn_tile(dtype: str, words: int):
    """Device function (source, turned, block, outer, channels, inner) for one tile."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word = ptx.INTEGER[32], ptx.WORD
    of_a_word, chunk_elems = 4 // ITEMSIZE[dtype], _CHUNK_BYTES // ITEMSIZE[dtype]
    run, line_elems = chunk_elems, _LINE_BYTES // ITEMSIZE[dtype]
    load, load_half = ptx.LOAD_CONSTANT[4], ptx.LOAD_CONSTANT[2]
    load_chunk, store_chunk, store = ptx_tile.LOAD_SHARED[4], ptx.STORE[4], ptx_tile.STORE_SHARED[1]
    low, high = ptx_tile.PAIR_HALVES[0], ptx_tile.PAIR_HALVES[1]

    @ptx.inline
    def load_run(source, at, left):
        """16 bytes of a channel, of which `left` pixels exist, whole loads of them; zeros beyond."""
        none = word(0)
        if words == 4:
            return load(source, at) if left > 0 else (none, none, none, none)
        a = load_half(source, at) if left > 0 else (none, none)
        b = load_half(source, integer(at + 2 * of_a_word)) if left > 2 * of_a_word else (none, none)
        return a[0], a[1], b[0], b[1]

    @ptx.inline
    def store_words(at, a, b, c, d):
        """Those of four pixels."""
        store(word(at), a)
        store(word(at + _LINE_BYTES), b)
        store(word(at + 2 * _LINE_BYTES), c)
        store(word(at + 3 * _LINE_BYTES), d)

    @ptx.inline
    def run_place(shared, line, of_tile):
        """Where the word of channels `line` of a run's first pixel lies."""
        chunk = ((line >> 2) ^ of_tile) & 7
        return integer(shared + of_tile * (run * _LINE_BYTES) + (chunk << 4) + ((line & 3) << 2))

    @ptx.inline
    def fill(shared, source, at, line, of_tile, left, inner):
        """A thread's runs: of 16 bits that of two channels, of 32 bits two of a channel, 8 runs apart."""
        to = run_place(shared, line, of_tile)
        if of_a_word == 2:
            a, b = load_run(source, at, left), load_run(source, integer(at + inner), left)
            store_words(to, low(a[0], b[0]), high(a[0], b[0]), low(a[1], b[1]), high(a[1], b[1]))
            to = integer(to + 4 * _LINE_BYTES)
            store_words(to, low(a[2], b[2]), high(a[2], b[2]), low(a[3], b[3]), high(a[3], b[3]))
        else:
            a, b = load_run(source, at, left), load_run(source, integer(at + 8 * run), integer(left - 8 * run))
            store_words(to, a[0], a[1], a[2], a[3])
            store_words(integer(to + 8 * run * _LINE_BYTES), b[0], b[1], b[2], b[3])

    @ptx.inline
    def turn(source, turned, block, outer, channels, inner):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        rest, of_inner = ptx.divided(block, ptx.divided(integer(inner + _TILE_PIXELS - 1), integer(_TILE_PIXELS))[0])
        image, of_channels = ptx.divided(rest, ptx.divided(integer(channels + line_elems - 1), integer(line_elems))[0])
        first_pixel, first_channel = integer(of_inner * _TILE_PIXELS), integer(of_channels * line_elems)
        line, of_tile = ptx.divided(thread, integer(8))
        channel, pixel = integer(first_channel + line * of_a_word), integer(first_pixel + of_tile * run)
        if channel < channels:
            at = integer(integer(image * channels + channel) * inner + pixel)
            fill(shared, source, at, line, of_tile, integer(inner - pixel), inner)
        ptx.cuda.syncthreads()
        for i in range(_TILE_BYTES // _CHUNK_BYTES // _THREADS):
            row, chunk = ptx.divided(integer(thread + i * _THREADS), integer(8))
            pixel, channel = integer(first_pixel + row), integer(first_channel + chunk * chunk_elems)
            if pixel < inner and channel < channels:
                place = row * _LINE_BYTES + (((chunk ^ ptx.divided(row, integer(run))[0]) & 7) << 4)
                to = integer(integer(image * inner + pixel) * channels + channel)
                store_chunk(turned, to, load_chunk(word(shared + place)))

    return turn


def _turn_chunk(dtype: str, words: int):
    """The same for one chunk of channels a thread, of one pixel or, where a word has two, of two."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word = ptx.INTEGER[32], ptx.WORD
    load_word, load_element, store = ptx.LOAD_CONSTANT[1], ptx.load_constant, ptx.STORE[4]
    low, high = ptx_tile.PAIR_HALVES[0], ptx_tile.PAIR_HALVES[1]
    chunk_elems, pixels = _CHUNK_BYTES // ITEMSIZE[dtype], 4 // ITEMSIZE[dtype] if words else 1

    @ptx.inline
    def store_words(source, turned, at, to, channels, inner):
        a, b = load_word(source, at), load_word(source, integer(at + inner))
        c, d = load_word(source, integer(at + 2 * inner)), load_word(source, integer(at + 3 * inner))
        store(turned, to, (a, b, c, d))

    @ptx.inline
    def store_pairs_of_pixels(source, turned, at, to, channels, inner):
        a, b = load_word(source, at), load_word(source, integer(at + inner))
        c, d = load_word(source, integer(at + 2 * inner)), load_word(source, integer(at + 3 * inner))
        at = integer(at + 4 * inner)
        e, g = load_word(source, at), load_word(source, integer(at + inner))
        h, k = load_word(source, integer(at + 2 * inner)), load_word(source, integer(at + 3 * inner))
        store(turned, to, (low(a, b), low(c, d), low(e, g), low(h, k)))
        store(turned, integer(to + channels), (high(a, b), high(c, d), high(e, g), high(h, k)))

    @ptx.inline
    def pair_of_channels(source, at, inner):
        first, second = load_element(source, at), load_element(source, integer(at + inner))
        return low(word(first), word(second))

    @ptx.inline
    def store_elements(source, turned, at, to, channels, inner):
        a, b = pair_of_channels(source, at, inner), pair_of_channels(source, integer(at + 2 * inner), inner)
        at = integer(at + 4 * inner)
        c, d = pair_of_channels(source, at, inner), pair_of_channels(source, integer(at + 2 * inner), inner)
        store(turned, to, (a, b, c, d))

    store_chunks = store_words if ITEMSIZE[dtype] == 4 else store_pairs_of_pixels if pixels == 2 else store_elements

    @ptx.inline
    def turn(source, turned, block, outer, channels, inner):
        thread = integer(block * _THREADS + ptx.thread_x())
        rest, piece = ptx.divided(thread, ptx.divided(inner, integer(pixels))[0])
        image, chunk = ptx.divided(rest, ptx.divided(channels, integer(chunk_elems))[0])
        if image < outer:
            i, channel = integer(piece * pixels), integer(chunk * chunk_elems)
            at = integer(integer(image * channels + channel) * inner + i)
            to = integer(integer(image * inner + i) * channels + channel)
            store_chunks(source, turned, at, to, channels, inner)

    return turn
