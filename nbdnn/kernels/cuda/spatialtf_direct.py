"""The spatial transformer's forward on a GPU, affine or by a grid, and the grid itself: every output as it is written.

    y[n, c, i, j] = sum over four pixels of weight * x[n, c, pixel],   both of them: spatialtf_position

A thread works out one position and takes its channels one after the other, neighbours in memory to neighbouring
threads: where channels lie apart, neighbours are outputs; channels-last, some threads share a position, and move
vectors of up to 16 bytes of channels, or of two pixels of three channels (spatialtf_pairs). No grid is made. Traffic: y
once; each pixel of x once, and from cache for every output that is near it. Positions and sums in float32 (float64).
Supports everything, and ends every list. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_pairs import PAIR, in_pairs, load_pair, window_elems
from nbdnn.kernels.cuda.spatialtf_position import (
    FEW_CHANNELS,
    Kind,
    fields,
    index_bits,
    nearest,
    output_place,
    position,
    tile_columns,
    tiled_positions,
    vector_lanes,
)
from nbdnn.kernels.cuda.spatialtf_position import Fields as ImageFields
from nbdnn.kernels.cuda.spatialtf_theta import along_axis
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

THREADS = 256
_HELD_ELEMS = 4  # channels whose pixels a thread asks for at most before it uses the first
_MOST_SHARING = 8  # threads of one position, channels-last
_WAVES, _RESIDENT = 4, 4  # blocks that a multiprocessor shall have, in turn and at once
# Of a multiprocessor, of 32 registers each (`_is_full`); where they are all that there is to do, in blocks that end one
# by one (256 images of 28x28 of one channel, H200: 2.8 us, not 3.1).
_RESIDENT_THREADS, _FEW_THREADS = 2048, 128
_MOST_GRID = 65535  # of the grid's second axis
# Of a grid alone: rows of a thread, which divides for its columns once.
_VECTOR_BYTES, _MOST_ROWS = 16, 4
_LAUNCH_US, _OVER_COPY = 3.0, 1.3
_VECTOR_US = 0.22  # of a thread's vector of channels, one after the other
# Of a million outputs whose channels come one by one: where each is, by a map or a grid; and of each of its channels.
_PLACE_US, _PLACE_OF_GRID_US, _CHANNEL_US = 5.0, 13.0, 2.0
_SHARE_OF_LESS = 0.3  # of what takes less, beside what takes most


class Config(NamedTuple):
    """threads of one position, side by side (channels-last, and planar in `spatialtf_turned`), and vectors that a block
    takes of each. rows: outputs in the order of memory, where they would lie in tiles.
    """

    threads: int
    group: int
    rows: bool = False

    def __str__(self) -> str:
        return f"t{self.threads}g{self.group}{'r' * self.rows}"


def configs(problem: SpatialtfProblem, device: Gpu, pixels: bool = False, lanes: int = 0) -> tuple[Config, ...]:
    """Every one worth measuring. pixels, lanes: as `launched` takes them. The default has blocks for every
    multiprocessor."""
    work = prod(problem.spatial) if pixels else problem.positions
    found = _shares(problem, device, work, lanes or vector_lanes(problem))
    in_rows = tile_columns(problem) and (problem.c <= FEW_CHANNELS or pixels)
    return (*found, found[0]._replace(rows=True)) if in_rows else found


def waited_us(problem: SpatialtfProblem, config: Config, work: int, lanes: int, vector_us: float, device: Gpu) -> float:
    """What threads wait for their vectors of channels, one after the other, in as many waves as there are; work: of an
    image, positions or pixels."""
    vectors = max(problem.c // lanes, 1)
    of_a_thread = ceil(min(config.group, vectors) / config.threads)
    threads = problem.n * work * ceil(vectors / config.group) * config.threads
    return of_a_thread * vector_us * max(1.0, threads / (_RESIDENT_THREADS * device.sms))


def _shares(problem: SpatialtfProblem, device: Gpu, work: int, lanes: int) -> tuple[Config, ...]:
    vectors = max(problem.c // lanes, 1)
    if problem.channels_last:
        most = min(1 << (vectors - 1).bit_length(), 32)
        wanted = _MOST_SHARING if vectors >= _MOST_SHARING else 1
        ways = sorted({min(most, threads) for threads in (wanted, 2, 32)}, key=lambda t: t != min(most, wanted))
        return tuple(Config(threads, vectors) for threads in ways)
    blocks = problem.n * ceil(work / THREADS)
    wanted = min(vectors, ceil(_WAVES * _RESIDENT * device.sms / max(blocks, 1)))
    least = ceil(vectors / _MOST_GRID)
    groups = [max(ceil(vectors / wanted), least), vectors, max(ceil(vectors / (4 * wanted)), least)]
    # A thread has no channels left over of those that it takes at once.
    whole = [min(-(-group // _HELD_ELEMS) * _HELD_ELEMS, vectors) for group in groups]
    return tuple(Config(1, group) for group in dict.fromkeys(whole))


def launched(
    problem: SpatialtfProblem, config: Config, pixels: bool = False, block_threads: int = THREADS, lanes: int = 0
) -> tuple[Kind, ImageFields, tuple[int, int, int]]:
    """(what a kernel is compiled for, its integers, its grid). pixels: threads have those of x, not outputs. lanes: of
    a vector of channels; 0 for as many as one instruction loads."""
    lanes, bits = lanes or vector_lanes(problem), index_bits(problem)
    columns = 0 if config.rows else tile_columns(problem)
    kind = Kind(problem.is_affine, problem.dtype, problem.param_dtype, lanes, config.threads, columns, bits)
    work = tiled_positions(columns, *(problem.spatial if pixels else problem.out_spatial))
    blocks = ceil(work / (block_threads // config.threads))
    integers = fields(problem, kind, blocks, config.group)
    return kind, integers, (blocks * problem.n, ceil(integers.vectors / max(config.group, 1)), 1)


def _forward_kernel(specialised_on, paired, at_once, block_threads):
    """paired: pixels are loaded by `load_pair`. at_once: vectors whose pixels a thread asks for before it uses them."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    kind = Kind(*specialised_on)
    integer, real, lanes = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], kind.lanes
    load, store, threads = ptx_local.load(kind.dtype, lanes), ptx_local.store(kind.dtype, lanes), kind.threads
    place, locate, find = output_place(kind, block_threads), position(kind), nearest(kind.compute, kind.bits)
    hat, used, with_pixel = ptx_spatialtf.hat, ptx_spatialtf.used, ptx_spatialtf.with_pixel
    held, per_pixel = 4 * lanes, PAIR // 2
    load_two, window = load_pair(kind.dtype, kind.bits), window_elems(kind.dtype)
    all_held = 2 * window if paired else held * at_once

    @ptx.inline
    def one_by_one(w, pixels, first, right, down):
        total = with_pixel(with_pixel(real(0.0), w[0], pixels[first]), w[1], pixels[first + right])
        return with_pixel(with_pixel(total, w[2], pixels[first + down]), w[3], pixels[first + down + right])

    @ptx.inline
    def by_rows(w, pixels, first, right, down):
        above = used(w[0], pixels[first]) + used(w[1], pixels[first + right])
        return above + used(w[2], pixels[first + down]) + used(w[3], pixels[first + down + right])

    # Of vectors by a grid the former spills a word.
    weighted = one_by_one if kind.affine or lanes == 1 else by_rows

    @ptx.inline
    def sample(x, y, at, to, w, pixels, results, f, count):
        for k in range(count):
            vector = integer(at + k * threads * f.x_v)
            load(pixels, integer(k * held), x, vector)
            load(pixels, integer(k * held + lanes), x, integer(vector + f.right))
            load(pixels, integer(k * held + 2 * lanes), x, integer(vector + f.down))
            load(pixels, integer(k * held + 3 * lanes), x, integer(vector + f.down + f.right))
        for k in range(count):
            for i in range(lanes):
                results[i] = weighted(w, pixels, k * held + i, lanes, 2 * lanes)
            store(y, integer(to + k * threads * f.y_v), results, integer(0))

    @ptx.inline
    def sample_pairs(x, y, at, to, w, pixels, results, f):
        load_two(pixels, 0, x, at)
        load_two(pixels, window, x, integer(at + f.down))
        for channel in range(per_pixel):
            results[0] = weighted(w, pixels, channel, per_pixel, window)
            store(y, integer(to + channel), results, integer(0))

    def sample_outputs(x, places, y, f):
        image, i, j, vector, end = place(f)
        if i >= f.out_h or j >= f.out_w:
            return
        s, t = locate(places, image, i, j, f)
        (column, right), (row, down) = find(s, f.in_w), find(t, f.in_h)
        top, bottom, left, next_ = hat(down), hat(down - real(1.0)), hat(right), hat(right - real(1.0))
        w = top * left, top * next_, bottom * left, bottom * next_
        at = integer(image * f.x_n + row * f.x_h + column * f.x_w)
        to = integer(image * f.y_n + i * f.y_h + j * f.y_w)
        pixels, results = ptx.cuda.local.array(all_held, real), ptx.cuda.local.array(lanes, real)
        if paired:
            sample_pairs(x, y, at, to, w, pixels, results, f)
            return
        if at_once > 1:
            while vector + (at_once - 1) * threads < end:
                sample(x, y, integer(at + vector * f.x_v), integer(to + vector * f.y_v), w, pixels, results, f, at_once)
                vector = integer(vector + at_once * threads)
        while vector < end:
            sample(x, y, integer(at + vector * f.x_v), integer(to + vector * f.y_v), w, pixels, results, f, 1)
            vector = integer(vector + threads)

    data, parameters = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype)
    return sample_outputs, (data, parameters, data, ptx.record(ImageFields, kind.bits))


def _is_full(problem: SpatialtfProblem) -> bool:
    """Whether a multiprocessor shall have all the threads it can, though a thread then asks for fewer pixels at once:
    64 channels-last channels by a grid 17.0 us in 16 bits, not 21.0, and 29.1, not 31.3. Of three channels others than
    these take up to a tenth longer."""
    by_grid = not problem.is_affine and not problem.channels_last and ITEMSIZE[problem.dtype] == 2
    return problem.c > FEW_CHANNELS or by_grid


class Direct(LaunchedCandidate[Config]):
    """Every output as it is written; supports every forward with an image."""

    algorithm = "direct"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        return YES

    def configs(self, problem: SpatialtfProblem, device: Gpu) -> tuple[Config, ...]:
        return configs(problem, device)

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        moved_us = _OVER_COPY * problem.min_bytes / copy_bytes_per_s(device) * 1e6
        lanes = vector_lanes(problem)
        wait_us = waited_us(problem, config, problem.positions, lanes, _VECTOR_US, device)
        if lanes == 1:
            place_us = _PLACE_US if problem.is_affine else _PLACE_OF_GRID_US
            of_output_us = config.threads * place_us + problem.c * _CHANNEL_US
            wait_us = max(wait_us, problem.n * problem.positions * 1e-6 * of_output_us)
        return _LAUNCH_US + max(moved_us, wait_us) + _SHARE_OF_LESS * min(moved_us, wait_us)

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        one_wave = problem.c == 1 and problem.n * problem.positions <= _RESIDENT_THREADS * device.sms
        threads = _FEW_THREADS if one_wave else THREADS
        kind, integers, grid = launched(problem, config, block_threads=threads)
        of_a_thread = ceil(min(integers.group, integers.vectors) / config.threads)
        at_once = max(1, min(_HELD_ELEMS // kind.lanes, of_a_thread))
        variant = tuple(kind), in_pairs(problem, config.threads), at_once, threads
        min_blocks = _RESIDENT_THREADS // threads if one_wave or _is_full(problem) else 1
        min_blocks = min_blocks if kind.compute == "f32" and kind.bits == 32 else 1
        return [Launch(Source(_forward_kernel, variant, threads, min_blocks), grid, (0, 1, 2), "", integers, kind.bits)]


class _GridVariant(NamedTuple):
    """What a kernel is compiled for. together: positions of a row that are stored as one vector."""

    dtype: str
    together: int
    bits: int


class _GridFields(NamedTuple):
    """items: what threads do, of all images and of one. columns: items of a row. by_, shift_: of both the `reciprocal`.
    rows: of an item."""

    items: int
    of_an_image: int
    by_image: int
    shift_image: int
    columns: int
    by_columns: int
    shift_columns: int
    rows: int
    out_h: int
    out_w: int


def _grid_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_local

    dtype, together, bits = _GridVariant(*specialised_on)
    compute = DEFAULT_COMPUTE[dtype]
    integer, real, widen, along = ptx.INTEGER[bits], ptx.REAL[compute], ptx.WIDEN[dtype], along_axis(compute, bits)
    lanes = 2 * together if together > 1 else 1
    store, size = ptx_local.store(dtype, lanes), 2 * together

    @ptx.inline
    def coefficient(theta, image, k):
        return widen(ptx.load_constant(theta, integer(image * 6 + k)))

    def write_grid(theta, grid, f):
        item = integer(integer(ptx.block_x()) * THREADS + ptx.thread_x())
        if item >= f.items:
            return
        image, of_image = ptx.split(item, f.of_an_image, f.by_image, f.shift_image)
        band, column = ptx.split(of_image, f.columns, f.by_columns, f.shift_columns)
        a, b, c = coefficient(theta, image, 0), coefficient(theta, image, 1), coefficient(theta, image, 2)
        d, e, g = coefficient(theta, image, 3), coefficient(theta, image, 4), coefficient(theta, image, 5)
        u, values = ptx.cuda.local.array(together, real), ptx.cuda.local.array(size, real)
        for k in range(together):
            u[k] = along(integer(column * together + k), f.out_w)
        i, end = integer(band * f.rows), min(integer(integer(band + 1) * f.rows), f.out_h)
        at = integer(integer(integer(image * f.out_h + i) * f.out_w + column * together) * 2)
        while i < end:
            v = along(i, f.out_h)
            of_row = ptx.fma(b, v, c), ptx.fma(e, v, g)
            for k in range(together):
                values[2 * k] = ptx.fma(a, u[k], of_row[0])
                values[2 * k + 1] = ptx.fma(d, u[k], of_row[1])
            for k in range(size // lanes):
                store(grid, integer(at + k * lanes), values, integer(k * lanes))
            i, at = integer(i + 1), integer(at + 2 * f.out_w)

    data = ptx.pointer(dtype)
    return write_grid, (data, data, ptx.record(_GridFields, bits))


class Grid(LaunchedCandidate[NoConfig]):
    """A thread a few rows of neighbours that are a vector of 16 bytes, or of one position; supports every grid."""

    op, algorithm = "spatialtf_grid_fwd", "direct"

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        return YES

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> float:
        return _LAUNCH_US + _OVER_COPY * problem.min_bytes / copy_bytes_per_s(device) * 1e6

    def launches(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        bits, (out_h, out_w) = index_bits(problem), problem.out_spatial
        most = _VECTOR_BYTES // (2 * ITEMSIZE[problem.dtype])
        together = most if out_w % most == 0 and problem.align % _VECTOR_BYTES == 0 else 1
        columns = out_w // together
        one_by_one = problem.n * out_h * columns
        rows = max(1, min(_MOST_ROWS, one_by_one // (_RESIDENT_THREADS * device.sms)))
        of_an_image = ceil(out_h / rows) * columns
        items = problem.n * of_an_image
        by = [reciprocal(each) for each in (of_an_image, columns)]
        integers = _GridFields(items, of_an_image, *by[0], columns, *by[1], rows, out_h, out_w)
        source = Source(_grid_kernel, _GridVariant(problem.dtype, together, bits), THREADS)
        return [Launch(source, (ceil(items / THREADS), 1, 1), (0, 1), "", integers, bits)]


FWD, SAMPLER_FWD, GRID_FWD = Direct("spatialtf_fwd"), Direct("spatialtf_sampler_fwd"), Grid()
