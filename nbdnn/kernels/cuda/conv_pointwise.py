"""1x1 convolutions of few channels in or out, channels-last, in 16 bits: the narrow ends of inverted residuals.

    y[p, k] = sum over c of  x[p, c] * w[k, c]         conv_fwd; bwd_data: dx[p, c] = sum over k of dy[p, k] * w[k, c]

A pixel's channels are a row of a matrix, and the memory decides: tiles of a GEMM pad 16 or 24 channels to 64, and send
their sums through shared memory. Here a block keeps the whole filter in shared memory, and its warps take 16 or 32
pixels after the other, for which they need neither a barrier nor each other:

    1. a lane loads 8 channels of a pixel, 16 bytes, its part of two matrices (m16n8k16): any order of k will do
    2. 16 bytes from shared memory are the same channels of a filter, its part of the other factor
    3. filters are dealt so that a lane ends with 8 neighbours of a pixel, 16 bytes, and four lanes with 64

`wide`: all inputs of the pixels are held, at most 64, and the filters follow each other. `narrow`: the sums of all
outputs are held, at most 64, and 32 inputs follow each other, of which the next are on their way.
Traffic: x and y once, the filter once a block. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.gemm_plan import refused_operands
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate, gather_pointers
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s
from nbdnn.kernels.cuda.window_store import stored_in_turn
from nbdnn.problem_conv import ConvProblem

_THREADS, _WARPS = 256, 8
_CHUNK, _VECTOR = 32, 8  # channels of two steps of the matrix units, and of a lane's load
_WORDS = 8  # of a lane's two pixels of a tile, in a chunk
_ROW_BYTES, _CHUNK_BYTES = 64, 2048  # in shared memory: of a filter's chunk, and of a chunk of 32 filters
_MOST_HELD = 2  # chunks of inputs, or of outputs
_MOST_FILTER_BYTES = 48 << 10
_AHEAD = 4  # vectors of the filter, or pairs of them, that a thread asks for at once
_TILES = {"wide": (2, 1), "narrow": (1, 2)}  # the better first
_LAUNCH_US, _FILLED_BYTES_PER_US, _SHARE_OF_COPY = 2.0, 12e3, {"wide": 0.9, "narrow": 0.8}


class Config(NamedTuple):
    """kind: what is held, 'wide' or 'narrow'. tiles: of 16 pixels, that a warp takes at once."""

    kind: str
    tiles: int

    def __str__(self) -> str:
        return f"{self.kind}{self.tiles}"


class _Variant(NamedTuple):
    """What a kernel is compiled for. held: chunks of inputs, or of outputs. turned: whether the filter lies input by
    input. whole: whether inputs are whole chunks."""

    dtype: str
    epilogue: tuple[str, ...]
    kind: str
    tiles: int
    held: int
    turned: bool
    whole: bool


class _Integers(NamedTuple):
    """tasks: tiles of all warps. in_chunks, out_chunks: of 32 channels."""

    pixels: int
    inputs: int
    outputs: int
    in_chunks: int
    out_chunks: int
    tasks: int
    blocks: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    v = _Variant(*specialised_on)
    integer, word, real = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"]
    tiles, held = v.tiles, v.held
    of_pixel = _VECTOR * (1 if v.kind == "wide" else held)  # sums of a lane
    of_chunk, sums_held = tiles * _WORDS, tiles * 2 * of_pixel
    row_words, column_words = 4 * _AHEAD, 8 * _AHEAD
    load, load_constant = ptx.LOAD[4], ptx.LOAD_CONSTANT[4]
    load_shared, store_shared, store_word = ptx_tile.LOAD_SHARED[4], ptx_tile.STORE_SHARED[4], ptx_tile.STORE_SHARED[1]
    multiply, low_halves, high_halves = ptx_tile.MULTIPLY[v.dtype], ptx_tile.PAIR_HALVES[0], ptx_tile.PAIR_HALVES[1]
    is_whole = v.whole
    nothing = (word(0), word(0), word(0), word(0))

    @ptx.inline
    def place(out, chunk, vector, f):
        """Where a vector of inputs of a filter lies: filters are dealt to n8 tiles two by two."""
        dealt = integer((out >> 1 & 3) * 8 + (out >> 3 & 3) * 2 + (out & 1))
        return integer((((out >> 5) * f.in_chunks + chunk) * _CHUNK + dealt) * _ROW_BYTES + vector * 16)

    @ptx.inline
    def fill_rows(w, shared, f):
        """Of a filter [outputs][inputs]: several vectors on their way."""
        vectors, words = integer(f.in_chunks * 4), ptx.cuda.local.array(row_words, word)
        count = integer(f.out_chunks * _CHUNK * vectors)
        begin = integer(ptx.thread_x())
        while begin < count:
            for i in range(_AHEAD):
                out, vector = ptx.divided(integer(min(integer(begin + i * _THREADS), integer(count - 1))), vectors)
                out, at = integer(min(out, integer(f.outputs - 1))), integer(vector * _VECTOR)
                loaded = load_constant(w, integer(out * f.inputs + at)) if is_whole or at < f.inputs else nothing
                words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = loaded
            for i in range(_AHEAD):
                out, vector = ptx.divided(integer(begin + i * _THREADS), vectors)
                if begin + i * _THREADS < count:
                    where = word(shared + place(out, vector >> 2, vector & 3, f))
                    store_shared(where, (words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]))
            begin = integer(begin + _AHEAD * _THREADS)

    @ptx.inline
    def fill_columns(w, shared, f):
        """Of a filter [inputs][outputs]: two inputs of eight outputs become eight words."""
        vectors, words = integer(f.out_chunks * 4), ptx.cuda.local.array(column_words, word)
        count, most = integer(f.in_chunks * _CHUNK // 2 * vectors), integer(f.outputs - _VECTOR)
        begin = integer(ptx.thread_x())
        while begin < count:
            for i in range(_AHEAD):
                pair, vector = ptx.divided(integer(min(integer(begin + i * _THREADS), integer(count - 1))), vectors)
                at = integer(pair * 2 * f.outputs + min(integer(vector * _VECTOR), most))
                alive = is_whole or pair * 2 < f.inputs
                one = load_constant(w, at) if alive else nothing
                two = load_constant(w, integer(at + f.outputs)) if alive else nothing
                words[8 * i], words[8 * i + 1], words[8 * i + 2], words[8 * i + 3] = one
                words[8 * i + 4], words[8 * i + 5], words[8 * i + 6], words[8 * i + 7] = two
            for i in range(_AHEAD):
                pair, vector = ptx.divided(integer(begin + i * _THREADS), vectors)
                if begin + i * _THREADS < count:
                    row = place(integer(vector * _VECTOR), pair >> 4, pair >> 2 & 3, f)
                    at = integer(shared + row + (pair & 3) * 4)
                    for j in range(4):  # outputs 2j and 2j + 1
                        one, two = words[8 * i + j], words[8 * i + 4 + j]
                        store_word(word(at + j * 8 * _ROW_BYTES), low_halves(one, two))
                        store_word(word(at + (j * 8 + 1) * _ROW_BYTES), high_halves(one, two))
            begin = integer(begin + _AHEAD * _THREADS)

    @ptx.inline
    def come(held_words, x, first, chunk, lane, f):
        """A chunk of a lane's pixels, two of each tile; zeros beyond the last channel, where x may be infinite."""
        g, channel = lane >> 2, integer(chunk * _CHUNK + (lane & 3) * _VECTOR)
        alive = is_whole or channel < f.inputs
        for half in range(2 * tiles):
            pixel = integer(min(integer(first + half * 8 + g), integer(f.pixels - 1)))
            words = load(x, integer(pixel * f.inputs + channel)) if alive else nothing
            for i in range(4):
                held_words[half * 4 + i] = words[i]

    @ptx.inline
    def add_tile(acc, at, words, where, four):
        """An m16n8 tile: both steps of a chunk."""
        low, high, other = where, where + 4, at + of_pixel
        sums = (acc[at], acc[at + 1], acc[other], acc[other + 1])
        sums = multiply((words[low], words[high], words[low + 1], words[high + 1]), (four[0], four[1]), sums)
        sums = multiply((words[low + 2], words[high + 2], words[low + 3], words[high + 3]), (four[2], four[3]), sums)
        acc[at], acc[at + 1], acc[other], acc[other + 1] = sums

    @ptx.inline
    def add_chunk(acc, words, filters, out):
        """32 inputs of each pixel by 32 outputs. filters: where the lane's part of them lies."""
        for j in range(4):
            four = load_shared(word(filters + j * 8 * _ROW_BYTES))
            for tile in range(tiles):
                add_tile(acc, tile * 2 * of_pixel + out * _VECTOR + 2 * j, words, tile * _WORDS, four)

    @ptx.inline
    def place_of(half, first_sum, state):
        first, out, lane, f = state
        pixel = integer(first + half * 8 + (lane >> 2))
        channel = integer(out + first_sum * 4 + (lane & 3) * _VECTOR)
        return pixel < f.pixels and channel < f.outputs, integer(pixel * f.outputs + channel), channel

    store_all = stored_in_turn(place_of, v.dtype, v.epilogue, 2 * tiles, of_pixel, _VECTOR)

    @ptx.inline
    def wide(x, y, first, shared, lane, extra, f):
        one, two = ptx.cuda.local.array(of_chunk, word), ptx.cuda.local.array(of_chunk, word)
        acc = ptx.cuda.local.array(sums_held, real)
        come(one, x, first, integer(0), lane, f)
        if held > 1:
            come(two, x, first, integer(1), lane, f)
        filters = integer(shared + (lane >> 2) * _ROW_BYTES + (lane & 3) * 16)
        out = integer(0)
        while out < f.outputs:
            for i in range(sums_held):
                acc[i] = real(0.0)
            add_chunk(acc, one, filters, 0)
            if held > 1:
                add_chunk(acc, two, integer(filters + _CHUNK_BYTES), 0)
            store_all(acc, y, extra, (first, out, lane, f))
            out, filters = integer(out + _CHUNK), integer(filters + held * _CHUNK_BYTES)

    @ptx.inline
    def narrow(x, y, first, shared, lane, extra, f):
        words, following = ptx.cuda.local.array(of_chunk, word), ptx.cuda.local.array(of_chunk, word)
        acc = ptx.cuda.local.array(sums_held, real)
        for i in range(sums_held):
            acc[i] = real(0.0)
        filters = integer(shared + (lane >> 2) * _ROW_BYTES + (lane & 3) * 16)
        if held == 1:
            come(words, x, first, integer(0), lane, f)
        chunk = integer(0)
        while chunk < f.in_chunks:
            if held == 1:
                come(following, x, first, integer(min(integer(chunk + 1), integer(f.in_chunks - 1))), lane, f)
            else:  # for two there are no registers
                come(words, x, first, chunk, lane, f)
            add_chunk(acc, words, filters, 0)
            if held > 1:
                add_chunk(acc, words, integer(filters + f.in_chunks * _CHUNK_BYTES), 1)
            else:
                for i in range(of_chunk):
                    words[i] = following[i]
            chunk, filters = integer(chunk + 1), integer(filters + _CHUNK_BYTES)
        store_all(acc, y, extra, (first, integer(0), lane, f))

    fill, outputs_of = fill_columns if v.turned else fill_rows, wide if v.kind == "wide" else narrow

    def pointwise(x, w, y, bias, residual, alpha, beta, f):
        shared = integer(ptx_tile.dynamic_shared())
        fill(w, shared, f)
        ptx.cuda.syncthreads()
        warp, lane = ptx.divided(integer(ptx.thread_x()), integer(32))
        task = integer(ptx.block_x() * _WARPS + warp)
        while task < f.tasks:
            outputs_of(x, y, integer(task * (16 * tiles)), shared, lane, (bias, residual, alpha, beta), f)
            task = integer(task + f.blocks * _WARPS)

    data = ptx.pointer(v.dtype)
    return pointwise, (data, data, data, data, data, real, real, ptx.record(_Integers, 32))


class Pointwise(LaunchedCandidate[Config]):
    """One tap, few channels on one side at least."""

    algorithm = "pointwise"
    algo = "small"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := refused_operands(problem, ("f16", "bf16")):
            return Support(False, reason)
        if prod(problem.filter) > 1 or any(map(any, problem.pad)) or max(problem.stride) > 1 or problem.groups > 1:
            has = f"filter {problem.filter}, pad {problem.pad}, stride {problem.stride}, {problem.groups} groups"
            return Support(False, f"{has}: only one tap of stride 1 without padding or groups")
        if not (problem.channels_last and problem.y_channels_last):
            return Support(False, f"layouts {problem.layout} and {problem.y_layout}, both have to be channels-last")
        if not _kinds(problem):
            inputs, outputs = _channels(problem)
            return Support(False, f"{inputs} inputs and {outputs} outputs, at most 64 of either")
        if (needed := _filter_bytes(problem)) > _MOST_FILTER_BYTES:
            return Support(False, f"the filter takes {needed} bytes of shared memory, a block has {_MOST_FILTER_BYTES}")
        bits = index_bits(problem, _integers(problem, Config("wide", 2), 1))
        return YES if bits == 32 else Support(False, f"indices take {bits} bits, this kernel has 32")

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        _, outputs = _channels(problem)
        every = [Config(kind, tiles) for kind in _kinds(problem) for tiles in _TILES[kind]]
        # Of two tiles' sums of more than 32 outputs registers spill.
        return tuple(each for each in every if each != ("narrow", 2) or outputs <= _CHUNK)

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        idle = max(1.0, device.sms * _WARPS / ceil(_pixels(problem) / (16 * config.tiles)))
        filled_us = _filter_bytes(problem) / _FILLED_BYTES_PER_US
        moved_us = problem.min_bytes / (copy_bytes_per_s(device) * _SHARE_OF_COPY[config.kind]) * 1e6
        return _LAUNCH_US + filled_us + moved_us * idle

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        inputs, outputs = _channels(problem)
        turned = problem.op == "conv_bwd_data"
        held = ceil((inputs if config.kind == "wide" else outputs) / _CHUNK)
        # Loads that no branch separates from the next chunk's are done sooner, by registers that `narrow` lacks.
        whole = config.kind == "wide" and inputs % _CHUNK == 0
        v = _Variant(problem.dtype, problem.epilogue, *config, held, turned, whole)
        at_once = _blocks_at_once(v)
        of_sm = min(at_once, blocks_at_once(_filter_bytes(problem), device))
        tasks = ceil(_pixels(problem) / (16 * config.tiles))
        blocks = min(ceil(tasks / _WARPS), of_sm * device.sms)
        return [
            Launch(
                source=Source(_kernel, v, _THREADS, at_once),
                grid=(blocks, 1, 1),
                pointers=gather_pointers(problem),
                scalars="f32",
                integers=_integers(problem, config, blocks),
                dynamic_shared_bytes=_filter_bytes(problem),
            )
        ]


def _blocks_at_once(v: _Variant) -> int:
    """Of a multiprocessor, which bounds the registers of a thread."""
    words = v.tiles * 8 * (v.held if v.kind == "wide" else 2)
    sums = v.tiles * 16 * (1 if v.kind == "wide" else v.held)
    most = 4 if words + sums <= 24 else 3 if words + sums <= 48 and (v.kind == "wide" or v.held == 1) else 2
    return max(2, most - bool(v.epilogue))


def _channels(problem: ConvProblem) -> tuple[int, int]:
    """(inputs, outputs) of a pixel."""
    return (problem.k, problem.c) if problem.op == "conv_bwd_data" else (problem.c, problem.k)


def _kinds(problem: ConvProblem) -> list[str]:
    """What can be held, the better first: of few outputs the sums, else the inputs."""
    inputs, outputs = (ceil(channels / _CHUNK) for channels in _channels(problem))
    kinds = ["narrow"] * (outputs <= _MOST_HELD) + ["wide"] * (inputs <= _MOST_HELD)
    return kinds if outputs < inputs else kinds[::-1]


def _pixels(problem: ConvProblem) -> int:
    return problem.n * prod(problem.spatial)


def _filter_bytes(problem: ConvProblem) -> int:
    """In shared memory, chunks of 32 by 32."""
    return prod(ceil(channels / _CHUNK) for channels in _channels(problem)) * _CHUNK_BYTES


def _integers(problem: ConvProblem, config: Config, blocks: int) -> _Integers:
    inputs, outputs = _channels(problem)
    pixels = _pixels(problem)
    chunks = ceil(inputs / _CHUNK), ceil(outputs / _CHUNK)
    return _Integers(pixels, inputs, outputs, *chunks, ceil(pixels / (16 * config.tiles)), blocks)


FWD, BWD_DATA = Pointwise("conv_fwd"), Pointwise("conv_bwd_data")
