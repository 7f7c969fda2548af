"""The gradients of an affine map on a GPU, of tiles of pixels whose outputs come to shared memory.

    block     1. the map turned round: which outputs are near a pixel, and how many at most
              2. the box of all outputs near its tile, whose dy it copies to shared memory, as float32, a vector each
    thread    3. of each of its pixels, the outputs near it:
                 dx[n, c, pixel] = sum over outputs of weight * dy[n, c, output], and what they get by it for dtheta

`gather` visits as many outputs, but finds out for each pixel where they begin and end, and loads dy from the
first-level cache, element by element, line by line of what a warp's outputs lie in. Here a visit is one load, and has
no branches: what is not near has no part. A tile whose box is too large, or whose map can hardly be turned round, goes
as `gather` does. For few channels, of which all are taken at once. Bound by instructions, 35 a visit, of which a warp
makes five for four outputs near each pixel. Traffic: x and dx once; dy once, and from cache where boxes overlap. Sums
in float32; the same bits every time. 64x3x224x224 on an H200: 77 us, `gather` 100 (16 bits: 75 and 107). Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_gather import by_theta, gather_pixel, issued_us
from nbdnn.kernels.cuda.spatialtf_pixels import in_row, strides, turned_round
from nbdnn.kernels.cuda.spatialtf_position import (
    FEW_CHANNELS,
    Fields,
    Kind,
    affine,
    fields,
    index_bits,
    vector_lanes,
)
from nbdnn.kernels.cuda.spatialtf_theta import SUMS, store_sums, theta_launch
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_THREADS = 256
_COLUMNS = 32  # of a tile
_WARP_ROWS, _WARP_COLUMNS = 4, 8  # of a warp's threads
_TURN_ROWS = _THREADS // _COLUMNS
_ASKED = 12  # elements of dy of a thread on their way at once
# Turns of a block, and bytes that it has for outputs: what a turned tile needs, but of a map that enlarges much.
_BOX_BYTES = {4: 32 << 10, 2: 32 << 10, 8: 64 << 10}
_SHARED_OF_SM, _SHARED_OF_BLOCK = 220 << 10, 1536  # of a block beside its box
_BLOCKS_AT_ONCE = 4
# Instructions of a visit, of one as `gather` makes it, of a pixel, of a thread: fitted to 27 problems on an H200.
_VISIT, _GATHERED, _PIXEL, _BLOCK = 50.0, 220.0, 80.0, 330.0
_TURNED, _AROUND = 1.15, 4  # a turned tile's part of an axis, and outputs around it
_LAUNCH_US, _OVER_COPY = 1.6, 1.1


class Config(NamedTuple):
    """turns: of 8 rows of pixels a block has. box: outputs that a block has room for."""

    turns: int
    box: int

    def __str__(self) -> str:
        return f"r{self.turns * _TURN_ROWS}b{self.box}"


class _Variant(NamedTuple):
    """What a kernel is compiled for. vectors: of channels. box: outputs in shared memory."""

    kind: tuple
    vectors: int
    turns: int
    box: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf, ptx_tile

    v = _Variant(*specialised_on)
    kind, count, turns, box = Kind(*v.kind), v.vectors, v.turns, v.box
    lanes, elems = kind.lanes, count * kind.lanes
    integer, real, word = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD
    load, store = ptx_local.load(kind.dtype, lanes), ptx_local.store(kind.dtype, lanes)
    width, ahead = _width(elems), _ASKED // elems
    put, words_of, word_of = ptx_tile.STORE_SHARED[width], ptx_tile.words_of, ptx_tile.word_of
    unit, asked, fits_in = width * ITEMSIZE["f32"], ahead * elems, box
    map_of, turn_round = affine(kind.param_dtype, "f32", 32), turned_round("f32", 32)
    reciprocal, whole, ceiling = ptx_spatialtf.reciprocal, ptx_spatialtf.whole, ptx_spatialtf.ceiling
    meet, stride, meets = ptx_spatialtf.meet(elems, width), strides("f32"), in_row("f32")
    add_six, of_theta, gather = store_sums("f32", 32, _THREADS), by_theta(kind), gather_pixel(kind, count, ragged=False)
    across, most = _COLUMNS // _WARP_COLUMNS, 1 << 30

    @ptx.inline
    def near_a_pixel(axis):
        """How many outputs are along an axis, at most."""
        return integer(min(whole(axis[3] + axis[3]), integer(most)) + 1)

    @ptx.inline
    def first_near(axis, q, p, last):
        middle = ptx.fma(real(q), axis[1], ptx.fma(real(p), axis[2], axis[0]))
        return max(min(ceiling(middle - axis[3]), last), integer(0))

    @ptx.inline
    def span(axis, left, right, top, bottom, last, near):
        """Of all pixels of a tile: the first output, and how many."""
        rightward, downward = axis[1] > real(0.0), axis[2] > real(0.0)
        first = first_near(axis, left if rightward else right, top if downward else bottom, last)
        end = first_near(axis, right if rightward else left, bottom if downward else top, last)
        return first, integer(end + near - first)

    @ptx.inline
    def put_output(values, at, where):
        if width == 1:
            put(where, word_of(values[at]))
        elif width == 2:
            put(where, words_of((values[at], values[at + 1])))
        else:
            last = values[at + 3] if elems > 3 else real(0.0)
            put(where, words_of((values[at], values[at + 1], values[at + 2], last)))

    @ptx.inline
    def come(dy, shared, start, pitch, box_h, box_w, f):
        values, places = ptx.cuda.local.array(asked, real), ptx.cuda.local.array(ahead, integer)
        outputs, share = integer(box_h * box_w), reciprocal(real(box_w))
        output = integer(ptx.thread_x())
        while output < outputs:
            for one in range(ahead):  # behind the last output it once more: no load is behind a branch
                number = min(integer(output + one * _THREADS), integer(outputs - 1))
                row = integer((real(number) + real(0.5)) * share)
                column = integer(number - row * box_w)
                places[one], at = integer(row * pitch + column), integer(start + row * f.y_h + column * f.y_w)
                for k in range(count):
                    load(values, integer(one * elems + k * lanes), dy, integer(at + k * f.y_v))
            for one in range(ahead):
                put_output(values, one * elems, word(shared + word(integer(places[one] * unit))))
            output = integer(output + ahead * _THREADS)

    @ptx.inline
    def add_up(m, of_columns, x, dx, q, p, j, i, columns, rows, where, pitch, to, six, f):
        """All of a pixel, whose first output is in column j and row i."""
        pixel, sums = ptx.cuda.local.array(elems, real), ptx.cuda.local.array(elems, real)
        for k in range(count):
            load(pixel, integer(k * lanes), x, integer(to + k * f.x_v))
        for k in range(elems):
            sums[k] = real(0.0)
        row, last_row, first, last_column = real(i), real(integer(i + rows)), real(j), real(integer(j + columns - 1))
        right_of, below = real(q), real(p)
        while row < last_row:
            s_row, t_row = ptx.fma(row, m[2], m[0]), ptx.fma(row, m[5], m[3])
            column, last = meets(of_columns, s_row - right_of, t_row - below, first, last_column)
            at = word(where + word(integer(integer(column - first) * unit)))
            while column <= last:
                right, down = ptx.fma(column, m[1], s_row) - right_of, ptx.fma(column, m[4], t_row) - below
                meet(sums, pixel, six, at, right, down, column, row)
                column, at = column + real(1.0), word(at + word(unit))
            row, where = row + real(1.0), word(where + word(integer(pitch * unit)))
        for k in range(count):
            store(dx, integer(to + k * f.x_v), sums, integer(k * lanes))

    def add_tiles(x, places, dy, dx, parts, f):
        image, tile = ptx.split(integer(ptx.block_x()), f.blocks, f.by_blocks, f.shift_blocks)
        tile_row, tile_column = ptx.split(tile, f.in_tiles_w, f.by_in_tiles_w, f.shift_in_tiles_w)
        warp, lane = ptx.divided(integer(ptx.thread_x()), integer(32))
        warp_row, warp_column = ptx.divided(warp, integer(across))
        lane_row, lane_column = ptx.divided(lane, integer(_WARP_COLUMNS))
        top, left = integer(tile_row * (turns * _TURN_ROWS)), integer(tile_column * _COLUMNS)
        right = integer(min(integer(left + _COLUMNS), f.in_w) - 1)
        bottom = integer(min(integer(top + turns * _TURN_ROWS), f.in_h) - 1)
        q = integer(left + warp_column * _WARP_COLUMNS + lane_column)
        p = integer(top + warp_row * _WARP_ROWS + lane_row)
        of_map = map_of(places, image, f)
        m = of_map[0] + real(0.0), of_map[1], of_map[2], of_map[3] + real(0.0), of_map[4], of_map[5]  # no -0
        (can, along, down), of_columns = turn_round(m, f), stride(m)
        columns, rows = near_a_pixel(along), near_a_pixel(down)
        last_j, last_i = integer(f.out_w - columns), integer(f.out_h - rows)
        six = ptx.cuda.local.array(SUMS, real)
        for k in range(SUMS):
            six[k] = real(0.0)
        begin_j, box_w = span(along, left, right, top, bottom, last_j, columns)
        begin_i, box_h = span(down, left, right, top, bottom, last_i, rows)
        pitch = integer(box_w | 1)
        if can and last_j >= 0 and last_i >= 0 and box_h * pitch <= fits_in:
            shared = ptx_tile.dynamic_shared()
            start = integer(image * f.y_n + begin_i * f.y_h + begin_j * f.y_w)
            come(dy, shared, start, pitch, box_h, box_w, f)
            ptx.cuda.syncthreads()
            to = integer(image * f.x_n + q * f.x_w + p * f.x_h)
            while p <= bottom:
                if q <= right:
                    j, i = first_near(along, q, p, last_j), first_near(down, q, p, last_i)
                    where = word(shared + word(integer(((i - begin_i) * pitch + j - begin_j) * unit)))
                    add_up(m, of_columns, x, dx, q, p, j, i, columns, rows, where, pitch, to, six, f)
                p, to = integer(p + _TURN_ROWS), integer(to + _TURN_ROWS * f.x_h)
        elif q <= right:
            while p <= bottom:
                gather(x, places, dy, dx, image, p, q, integer(0), f.vectors, six, f)
                p = integer(p + _TURN_ROWS)
        of_theta(six, f)
        add_six(parts, integer(ptx.block_x() * SUMS), six)

    data, parameters = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype)
    return add_tiles, (data, parameters, data, data, ptx.pointer("f32"), ptx.record(Fields, 32))


def _width(channels: int) -> int:
    """Floats of an output in shared memory."""
    return 1 << (channels - 1).bit_length()


def _output_bytes(problem: SpatialtfProblem) -> int:
    return _width(problem.c) * ITEMSIZE["f32"]


def _blocks_at_once(problem: SpatialtfProblem, config: Config) -> int:
    """Of a multiprocessor, which bounds the registers of a thread."""
    size_bytes = config.box * _output_bytes(problem) + _SHARED_OF_BLOCK
    return min(_BLOCKS_AT_ONCE, _SHARED_OF_SM // size_bytes)


def _tiles(problem: SpatialtfProblem, turns: int) -> int:
    """Of an image's pixels."""
    height, width = problem.spatial
    return ceil(height / (turns * _TURN_ROWS)) * ceil(width / _COLUMNS)


def _needed(problem: SpatialtfProblem, turns: int) -> float:
    """Outputs near a tile of a map that turns somewhat, and sees the image whole."""
    tile = turns * _TURN_ROWS, _COLUMNS
    spans = zip(tile, problem.spatial, problem.out_spatial, strict=True)
    return prod(min(out, _TURNED * pixels * out / extent + _AROUND) for pixels, extent, out in spans)


class StagedGradient(LaunchedCandidate[Config]):
    """Tiles of pixels, of the box of outputs that are near them."""

    op, algorithm = "spatialtf_bwd", "staged"

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        if problem.compute != "f32":
            return Support(False, "float64 is left to gather")
        if not 0 < problem.c <= FEW_CHANNELS:
            return Support(False, f"{problem.c} channels, a thread holds 1 to {FEW_CHANNELS} of a pixel")
        return YES if index_bits(problem) == 32 else Support(False, "offsets are beyond int32")

    def configs(self, problem: SpatialtfProblem, device: Gpu) -> tuple[Config, ...]:
        (height, width), output_bytes = problem.out_spatial, _output_bytes(problem)
        boxes = ((turns, size_bytes // output_bytes) for turns, size_bytes in _BOX_BYTES.items())
        return tuple(Config(turns, min(box, height * (width | 1))) for turns, box in boxes)

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        at_once = _blocks_at_once(problem, config) * device.sms
        waves = ceil(problem.n * _tiles(problem, config.turns) / at_once)
        pixels = waves * at_once * config.turns * _THREADS
        too_large = min(1.0, max(0.0, (_needed(problem, config.turns) / config.box - 1) / 2))
        of_visit = _VISIT + too_large * (_GATHERED - _VISIT)
        bound_us = issued_us(problem, pixels, _PIXEL + _BLOCK / config.turns, of_visit, device)
        return _LAUNCH_US + max(bound_us, _OVER_COPY * problem.min_bytes / copy_bytes_per_s(device) * 1e6)

    def workspace_bytes(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> int:
        return problem.n * _tiles(problem, config.turns) * SUMS * ITEMSIZE["f32"]

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        kind = Kind(True, problem.dtype, problem.param_dtype, vector_lanes(problem), 1, _COLUMNS, 32)
        tiles, vectors = _tiles(problem, config.turns), problem.c // kind.lanes
        at_once = _blocks_at_once(problem, config)
        main = Launch(
            source=Source(_kernel, _Variant(tuple(kind), vectors, config.turns, config.box), _THREADS, at_once),
            grid=(problem.n * tiles, 1, 1),
            pointers=(0, 1, 2, 3, WORKSPACE),
            scalars="",
            integers=fields(problem, kind, tiles, vectors),
            dynamic_shared_bytes=config.box * _output_bytes(problem),
        )
        return [main, theta_launch(problem, tiles, WORKSPACE, 4)]


BWD = StagedGradient()
