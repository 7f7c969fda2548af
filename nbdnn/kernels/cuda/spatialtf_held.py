"""The spatial transformer's gradients of small images on a GPU in one launch: a block has an image in shared memory.

    block     1. copies x, dy and the grid as they lie in memory, all at once
    thread    2. an output: how many came before it whose first pixel is the same. What it gives to its four pixels is
              stored in the layer of that number, where no other output stores; with more of them than layers, those
              that are left add to the layers, as many at a time
              3. a pixel: dx = sum over all layers of what the four outputs there give to it, for each channel
              4. an output: ds and dt, which are dgrid, or its part of dtheta, which the block adds up

`atomic` clears, adds to memory, rounds and adds up dtheta in two to four launches, and waits for memory in each of
them, which takes longer than 256 images of 28x28 are worth. Who comes first is not the same every time. Float32 is
added to shared memory by comparing and swapping, which took up to a fifth longer; adding to rows of larger images like
that took longer than adding to memory. Images of 28x28 on an H200: 6.8 us, with `atomic` 10.4; by a grid 6.1 and 8.2;
in 16 bits 6.2 and 11.2, 5.4 and 9.0. Traffic: x, dy, dx once. Sums in float32. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s, shared_bytes
from nbdnn.kernels.cuda.spatialtf_layers import WORD_BYTES, Places, Variant, copied_image, layered_pixels, located
from nbdnn.kernels.cuda.spatialtf_position import Fields, Kind, affine, fields, index_bits, nearest
from nbdnn.kernels.cuda.spatialtf_slopes import slopes
from nbdnn.kernels.cuda.spatialtf_theta import SUMS, along_axis, store_sums
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_WARP, _COPY_BYTES = 32, 16
_MOST_THREADS, _LEAST_THREADS, _THREADS_OF_SM = 1024, 128, 1024
_LAYERS, _TURNS = (8, 2), 4  # outputs of a thread
_STATIC_BYTES = 2 << 10  # of shared memory, beside what is counted here
# Fitted to 49 problems on an H200: a launch, what each block waits for, each of its channels, and their outputs and
# pixels in turn; outputs that have to wait where there are few layers, and how much longer with more to a pixel.
_LAUNCH_US, _BLOCK_US, _CHANNEL_US, _TURN_US, _LAYER_US, _CROWDED = 0.5, 0.6, 1.3, 0.24, 1.1, 0.2


class Config(NamedTuple):
    """Threads of an image, and layers of what outputs give."""

    threads: int
    layers: int

    def __str__(self) -> str:
        return f"t{self.threads}l{self.layers}"


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf, ptx_tile

    v = Variant(*specialised_on)
    kind, threads, turns, layers = Kind(*v.kind), v.threads, v.turns, v.layers
    integer, real, word, narrow = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD, ptx.NARROW[kind.param_dtype]
    itemsize, four, two = ITEMSIZE[kind.dtype], 4 * turns, 2 * turns
    (begin, settle), locate, add_up, nearest_to = copied_image(v), located(v), layered_pixels(v), nearest("f32", 32)
    map_of, along, derive = affine(kind.param_dtype, "f32", 32), along_axis("f32", 32), slopes("f32", 32)
    add_six, used, hat = store_sums("f32", 32, threads), ptx_spatialtf.used, ptx_spatialtf.narrow_hat
    add, keep_larger = ptx_spatialtf.SHARED["add"], ptx_spatialtf.SHARED["max"]
    load, load_word, store_word = (
        ptx_local.load_shared(kind.dtype, 1),
        ptx_tile.LOAD_SHARED[1],
        ptx_tile.STORE_SHARED[1],
    )
    float_of, word_of = ptx_tile.float_of, ptx_tile.word_of

    @ptx.inline
    def place(m, shared, firsts, ranks, far, f, h):
        """Of each output its first pixel, how far it is from there, and how many of that pixel came before it."""
        for turn in range(turns):
            output = integer(ptx.thread_x() + turn * threads)
            firsts[turn], ranks[turn] = integer(0), integer(-1)
            far[2 * turn], far[2 * turn + 1] = real(0.0), real(0.0)
            if output < f.outputs:
                s, t = locate(m, output, shared, f, h)
                (column, right), (row, down) = nearest_to(s, f.in_w), nearest_to(t, f.in_h)
                firsts[turn], far[2 * turn], far[2 * turn + 1] = integer(row * f.in_w + column), right, down
                if right > real(-1.0) and right < real(2.0) and down > real(-1.0) and down < real(2.0):
                    counts = word(shared + word(h.at_counts))
                    rank = integer(add(word(counts + word(integer(firsts[turn] * WORD_BYTES))), word(1)))
                    ranks[turn] = rank
                    if rank >= layers:
                        keep_larger(word(counts + word(integer(f.pixels * WORD_BYTES))), word(rank))

    @ptx.inline
    def give(shared, first, layer, w, top, is_first, f, h):
        at = integer(h.at_layers + (layer * 4 * f.pixels + first) * WORD_BYTES)
        for corner in range(4):
            here = word(shared + word(integer(at + corner * f.pixels * WORD_BYTES)))
            value = used(w[corner], top)
            value = value if is_first else value + float_of(load_word(here))
            store_word(here, word_of(value))

    @ptx.inline
    def weights(right, down):
        above, below, left, next_ = hat(down), hat(down - real(1.0)), hat(right), hat(right - real(1.0))
        return above * left, above * next_, below * left, below * next_

    @ptx.inline
    def visit(shared, x_at, y_at, firsts, ranks, far, tops, a, f, h):
        """All outputs of a channel: what they give is in the layers afterwards."""
        pixel = ptx.cuda.local.array(4, real)
        for turn in range(turns):
            output = integer(ptx.thread_x() + turn * threads)
            tops[turn] = real(0.0)
            if output < f.outputs:
                load(tops, integer(turn), word(shared + word(integer(h.at_top + (y_at + output * f.y_w) * itemsize))))
                at = integer(x_at + firsts[turn] * f.x_w)
                load(pixel, integer(0), word(shared + word(integer(at * itemsize))))
                load(pixel, integer(1), word(shared + word(integer((at + f.right) * itemsize))))
                load(pixel, integer(2), word(shared + word(integer((at + f.down) * itemsize))))
                load(pixel, integer(3), word(shared + word(integer((at + f.down + f.right) * itemsize))))
                for corner in range(4):
                    a[4 * turn + corner] = ptx.fma(tops[turn], pixel[corner], a[4 * turn + corner])
                if ranks[turn] >= 0 and ranks[turn] < layers:
                    w = weights(far[2 * turn], far[2 * turn + 1])
                    give(shared, firsts[turn], ranks[turn], w, tops[turn], True, f, h)
        ptx.cuda.syncthreads()
        most = integer(load_word(word(shared + word(integer(h.at_counts + f.pixels * WORD_BYTES)))))
        begun = integer(layers)
        while begun <= most:  # as many again, each of another pixel's layer
            for turn in range(turns):
                if ranks[turn] >= begun and ranks[turn] < begun + layers:
                    w = weights(far[2 * turn], far[2 * turn + 1])
                    give(shared, firsts[turn], integer(ranks[turn] - begun), w, tops[turn], False, f, h)
            ptx.cuda.syncthreads()
            begun = integer(begun + layers)

    @ptx.inline
    def all_channels(dx, m, image, shared, far, a, f, h):
        firsts, ranks = ptx.cuda.local.array(turns, integer), ptx.cuda.local.array(turns, integer)
        tops = ptx.cuda.local.array(turns, real)
        place(m, shared, firsts, ranks, far, f, h)
        for k in range(four):
            a[k] = real(0.0)
        channel, start = integer(0), integer(image * f.x_n)
        while channel < f.vectors:
            x_at = integer(channel * f.x_v)
            visit(shared, x_at, integer(channel * f.y_v), firsts, ranks, far, tops, a, f, h)
            add_up(dx, integer(start + x_at), shared, f, h)
            channel = integer(channel + 1)
            if channel < f.vectors:
                ptx.cuda.syncthreads()

    @ptx.inline
    def slope(turn, far, a, f):
        mine = ptx.cuda.local.array(4, real)
        for corner in range(4):
            mine[corner] = a[4 * turn + corner]
        return derive(mine, far[2 * turn], far[2 * turn + 1], f)

    def add_affine(x, places, dy, dx, dtheta, f, h):
        image, thread, shared = integer(ptx.block_x()), integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        begin(x, places, dy, image, shared, f, h)
        m = map_of(places, image, f)
        settle(shared, h)
        far, a, six = (
            ptx.cuda.local.array(two, real),
            ptx.cuda.local.array(four, real),
            ptx.cuda.local.array(SUMS, real),
        )
        all_channels(dx, m, image, shared, far, a, f, h)
        for k in range(SUMS):
            six[k] = real(0.0)
        for turn in range(turns):
            output = integer(thread + turn * threads)
            if output < f.outputs:
                i, j = ptx.split(output, f.out_w, f.by_out_w, f.shift_out_w)
                s, t = slope(turn, far, a, f)
                u, w = along(j, f.out_w), along(i, f.out_h)
                six[0], six[1], six[2] = ptx.fma(s, u, six[0]), ptx.fma(s, w, six[1]), six[2] + s
                six[3], six[4], six[5] = ptx.fma(t, u, six[3]), ptx.fma(t, w, six[4]), six[5] + t
        of_block = ptx.cuda.shared.array(SUMS, real)
        add_six(of_block, integer(0), six)
        if thread < SUMS:
            dtheta[integer(image * SUMS + thread)] = narrow(of_block[thread])

    def add_grid(x, places, dy, dx, dgrid, f, h):
        image, thread, shared = integer(ptx.block_x()), integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        begin(x, places, dy, image, shared, f, h)
        settle(shared, h)
        far, a = ptx.cuda.local.array(two, real), ptx.cuda.local.array(four, real)
        no_map = image  # the positions are in shared memory
        all_channels(dx, no_map, image, shared, far, a, f, h)
        for turn in range(turns):
            output = integer(thread + turn * threads)
            if output < f.outputs:
                s, t = slope(turn, far, a, f)
                at = integer((image * f.outputs + output) * 2)
                dgrid[at], dgrid[integer(at + 1)] = narrow(s), narrow(t)

    data, parameters = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype)
    records = ptx.record(Fields, 32), ptx.record(Places, 32)
    return add_affine if kind.affine else add_grid, (data, parameters, data, data, parameters, *records)


def _vector(elements: int, problem: SpatialtfProblem, dtype: str) -> int:
    """Neighbours that are copied as one, of images so many elements apart."""
    lanes = max(1, min(_COPY_BYTES, problem.align) // ITEMSIZE[dtype])
    while elements % lanes:
        lanes //= 2
    return lanes


def _places(problem: SpatialtfProblem, layers: int) -> tuple[Places, int]:
    """And all bytes."""

    def whole(elements: int, dtype: str) -> int:
        return ceil(elements * ITEMSIZE[dtype] / _COPY_BYTES) * _COPY_BYTES

    outputs, pixels = problem.positions, prod(problem.spatial)
    at_top = whole(problem.c * pixels, problem.dtype)
    at_grid = at_top + whole(problem.c * outputs, problem.dtype)
    at_counts = at_grid + (0 if problem.is_affine else whole(2 * outputs, problem.param_dtype))
    at_layers = at_counts + whole(pixels + 1, "f32")
    return Places(at_top, at_grid, at_counts, at_layers), at_layers + layers * 4 * pixels * WORD_BYTES


class Held(LaunchedCandidate[Config]):
    """Gradients of images that shared memory holds with all that belongs to them."""

    algorithm, deterministic = "held", False

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        if problem.compute != "f32" or index_bits(problem) > 32:
            return Support(False, f"{problem.dtype}, this kernel adds float32 and has integers of 32 bits")
        if not problem.c:
            return Support(False, "0 channels")
        if problem.positions > _TURNS * _MOST_THREADS:
            return Support(False, f"{problem.positions} outputs, a block takes {_TURNS * _MOST_THREADS}")
        (_, size_bytes), most = _places(problem, _LAYERS[-1]), shared_bytes(device) - _STATIC_BYTES
        return YES if size_bytes <= most else Support(False, f"an image needs {size_bytes} of {most} bytes to be held")

    def configs(self, problem: SpatialtfProblem, device: Gpu) -> tuple[Config, ...]:
        turns, found = ceil(problem.positions / _MOST_THREADS), []
        for parts in (1, 2):
            each = ceil(problem.positions / (turns * parts) / _WARP) * _WARP
            threads = min(max(each, _LEAST_THREADS), _MOST_THREADS)
            for layers in _LAYERS:
                _, size_bytes = _places(problem, layers)
                fits = size_bytes <= shared_bytes(device) - _STATIC_BYTES
                if fits and ceil(problem.positions / threads) <= _TURNS:
                    found.append(Config(threads, layers))
        return tuple(sorted(dict.fromkeys(found), key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        """Of blocks in step: each waits for memory, then for each channel for all of its outputs and pixels."""
        by_memory = max(1, blocks_at_once(_places(problem, config.layers)[1] + _STATIC_BYTES, device))
        resident = min(by_memory, _THREADS_OF_SM // config.threads)
        waves = ceil(problem.n / (resident * device.sms))
        pixels = prod(problem.spatial)
        crowd = 1 + _CROWDED * problem.positions / pixels / config.layers
        turns = ceil(problem.positions / config.threads) * crowd + ceil(pixels / config.threads)
        of_block_us = _BLOCK_US + problem.c * (_CHANNEL_US + turns * _TURN_US) + _LAYER_US / config.layers
        return _LAUNCH_US + problem.min_bytes / copy_bytes_per_s(device) * 1e6 + waves * of_block_us

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        places, size_bytes = _places(problem, config.layers)
        kind = Kind(problem.is_affine, problem.dtype, problem.param_dtype, 1, 1, 0, 32)
        outputs = problem.positions
        v = Variant(
            kind=tuple(kind),
            threads=config.threads,
            turns=ceil(outputs / config.threads),
            layers=config.layers,
            of_image=_vector(problem.c * prod(problem.spatial), problem, problem.dtype),
            of_top=_vector(problem.c * outputs, problem, problem.dtype),
            of_grid=_vector(2 * outputs, problem, problem.param_dtype),
        )
        integers = (*fields(problem, kind, 1, problem.c), *places)
        source = Source(_kernel, v, config.threads, max(1, _THREADS_OF_SM // config.threads))
        return [Launch(source, (problem.n, 1, 1), (0, 1, 2, 3, 4), "", integers, 32, size_bytes)]


BWD, SAMPLER_BWD = Held("spatialtf_bwd"), Held("spatialtf_sampler_bwd")
