"""Pooling by small windows: a tile of outputs a thread, its code unrolled; forward and backward, both layouts.

    planar          thread: rows of a few vectors            neighbours in a row to neighbouring threads
    channels-last   thread: a vector of channels of a few pixels; a block has some vectors of a box of tiles,

                        vectors x block_w x block_h threads

so that what the windows of neighbouring tiles share is in the first-level cache. Every load and store is a vector of
up to 16 bytes without a branch; `ptx_pool` has the code of a tile. The gradient of a maximum looks for the element that
equals y, or finds the windows' maxima again from x, in the registers of every tile that they reach into. Where y has a
NaN or an infinity, a tile that reads it goes element by element instead, as slowly as `pool_direct`.

Traffic: each operand once from memory, y only where it is read; the halo of a tile again from cache, 49 rows and
columns for 16 outputs in a gradient of 3x3 windows 2 apart. Sums in float32, one rounding each. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda import pool_element
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_axes import Tile, Variant
from nbdnn.kernels.cuda.pool_plan import Pool, index_bits, pool
from nbdnn.kernels.cuda.pool_tiles import Cost, variants
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_THREADS = 256
_MOST_TAPS = 64  # of a window
_CROWDED = 80  # of them: 128 registers hold more on compute capability 9.0 alone
_FEW_OUTPUTS, _FEW_LOADS = 24, 24  # of a tile: 80 registers hold them, else it gets 128
_SMALL_OUTPUTS, _SMALL_LOADS = 4, 8  # of a tile that 32 registers hold: all blocks of a small image are there at once
# Of a tile that reads y, words, or words and loads: 64 registers hold them, and twice as many threads wait at once. f16
# 64x112x112 channels-last 34.9 us, not 36.6; but f32 in tiles of 76 words 67.7, not 71.7.
_FEW_WORDS, _FEW_PLANAR = 52, 80
# Planar tiles of which a H200 shall have more threads, of fewer registers each. Of those that read y, words (f16
# 64x112x112: 36.2 us, not 37.8); and where x is asked for ahead, words, or words and loads (f16 3x3x3: 27.0, not 28.4,
# with a few words spilled).
# Loads of those that search x (f32 64x112x112: 61.4, not 64.2). Outputs of sums (f32 3x3, 256x28x28: 14.7, not 15.1).
_PLANAR_WORDS, _AHEAD_WORDS, _AHEAD_LOADED = 41, 56, 106
_SEARCHED_LOADS, _SUMMED_OUTPUTS = 28, 8
_MOST_VECTORS = 16  # of channels in a block: 256 bytes of a pixel
_MOST_TILES_H = 4  # in a block, channels-last
_CONFIGS, _CONFIGS_BESIDE = 6, 2  # tiles; of those that find maxima, where others read y
# Fitted to 288 problems on an H200. Instructions of all threads, of gradients of maxima, and clocks of each line that a
# warp's load or store touches; what is moved; clocks of a thread's instructions, loads and stores, one after the other;
# and the part of what is hidden behind the longest of these three that shows.
_LAUNCH_US, _OVER_COPY, _SHOWN = 0.8, 0.85, 0.39
_INSTRUCTIONS_PER_CLOCK_AND_SM, _OF_MAXIMA_GRADIENTS, _LOADED_LINE, _STORED_LINE = 210.0, 110.0, 0.79, 2.5
_INSTRUCTION_CLOCKS, _LOAD_CLOCKS, _STORE_CLOCKS = 3.4, 12, 110
_WARP, _LINE_BYTES = 32, 128


class Blocks(NamedTuple):
    """How tiles lie in blocks: tiles of an image; channels-last vectors, columns and rows of tiles in a block."""

    tiles_d: int
    tiles_h: int
    tiles_w: int
    slabs: int
    vectors: int
    block_w: int
    block_h: int
    blocks_w: int
    blocks_h: int


class Reciprocals(NamedTuple):
    """What `ptx.split` takes of the divisors: multipliers and shifts."""

    tiles_d: int
    tiles_d_shift: int
    tiles_h: int
    tiles_h_shift: int
    tiles_w: int
    tiles_w_shift: int
    slabs: int
    slabs_shift: int
    vectors: int
    vectors_shift: int
    block_w: int
    block_w_shift: int
    channels: int
    channels_shift: int


def _reciprocals(v: Variant, b: Blocks, channels: int) -> Reciprocals:
    """Rows and columns are of blocks channels-last, else of tiles."""
    rows, columns = (b.blocks_h, b.blocks_w) if v.channels_last else (b.tiles_h, b.tiles_w)
    return reciprocals(Reciprocals, {**b._asdict(), "tiles_h": rows, "tiles_w": columns, "channels": channels})


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool

    v = Variant._make(specialised_on)
    integer, box, split = ptx.INTEGER[v.bits], ptx_pool.Box, ptx.split
    compute, forward, is_max, lanes = ptx_pool.tile(v), v.op == "pool_fwd", v.is_max, v.lanes_x
    # First elements of neighbouring tiles, in x and in y.
    depth, rows, columns = (
        (extent * axis.stride, extent) if forward else (extent, extent // axis.stride)
        for extent, axis in zip(v.tile.extents, v.axes, strict=True)
    )
    (x_d, y_d), (x_h, y_h), (x_w, y_w) = depth, rows, columns

    # 1. Where a thread is: (n, channel, depth, row and column of its tile); n is -1 where it has none.
    if v.channels_last:

        @ptx.inline
        def place(f, b, r):
            rest, slab = split(integer(ptx.block_x()), b.slabs, r.slabs, r.slabs_shift)
            rest, column = split(rest, b.blocks_w, r.tiles_w, r.tiles_w_shift)
            rest, row = split(rest, b.blocks_h, r.tiles_h, r.tiles_h_shift)
            n, d = split(rest, b.tiles_d, r.tiles_d, r.tiles_d_shift)
            in_block, vector = split(integer(ptx.thread_x()), b.vectors, r.vectors, r.vectors_shift)
            in_row, in_column = split(in_block, b.block_w, r.block_w, r.block_w_shift)
            row, column = integer(row * b.block_h + in_row), integer(column * b.block_w + in_column)
            channel = integer((slab * b.vectors + vector) * lanes)
            inside = in_row < b.block_h and row < b.tiles_h and column < b.tiles_w and channel < f.channels
            return n if inside else integer(-1), channel, d, row, column
    else:

        @ptx.inline
        def place(f, b, r):
            thread = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
            rest, column = split(thread, b.tiles_w, r.tiles_w, r.tiles_w_shift)
            rest, row = split(rest, b.tiles_h, r.tiles_h, r.tiles_h_shift)
            rest, d = split(rest, b.tiles_d, r.tiles_d, r.tiles_d_shift)
            n, channel = split(rest, f.channels, r.channels, r.channels_shift)
            return n if thread < f.elements else integer(-1), channel, d, row, column

    # 2. The tensors from there.
    @ptx.inline
    def image(data, at, f):
        n, channel, d, row, column = at
        d, row, column = integer(d * x_d), integer(row * x_h), integer(column * x_w)
        start = integer(n * f.x_n + channel * f.x_c + d * f.x_d + row * f.x_h + column * f.x_w)
        return box(data, start, d, row, column, f.x_d, f.x_h, f.x_w, f.in_d, f.in_h, f.in_w)

    @ptx.inline
    def pooled(data, at, f):
        n, channel, d, row, column = at
        d, row, column = integer(d * y_d), integer(row * y_h), integer(column * y_w)
        start = integer(n * f.y_n + channel * f.y_c + d * f.y_d + row * f.y_h + column * f.y_w)
        return box(data, start, d, row, column, f.y_d, f.y_h, f.y_w, f.out_d, f.out_h, f.out_w)

    data = ptx.pointer(v.dtype)
    integers = tuple(ptx.record(fields, v.bits) for fields in (Pool, Blocks, Reciprocals))
    if forward:

        def pool_tiles(x, y, f, b, r):
            at = place(f, b, r)
            if at[0] >= 0:
                compute((image(x, at, f), pooled(y, at, f)))

        return pool_tiles, (data, data, *integers)
    if not is_max:

        def spread_tiles(dy, dx, f, b, r):
            at = place(f, b, r)
            if at[0] >= 0:
                compute((pooled(dy, at, f), image(dx, at, f)))

        return spread_tiles, (data, data, *integers)

    if not v.tile.reads_y:

        def find_tiles(x, y, dy, dx, f, b, r):
            at = place(f, b, r)
            if at[0] >= 0:
                compute((image(x, at, f), pooled(y, at, f), pooled(dy, at, f), image(dx, at, f)))

        return find_tiles, (data, data, data, data, *integers)

    element = pool_element.Variant(v.op, v.dtype, v.mode, v.channels_last, v.bits)
    find_each = pool_element.gradients_of_box(element, (*v.tile.extents, v.cell_lanes))

    def match_tiles(x, y, dy, dx, f, b, r):
        at = place(f, b, r)
        if at[0] >= 0 and compute((image(x, at, f), pooled(y, at, f), pooled(dy, at, f), image(dx, at, f))):
            n, channel, d, row, column = at
            find_each(x, dy, dx, n, channel, integer(d * x_d), integer(row * x_h), integer(column * x_w), f)

    return match_tiles, (data, data, data, data, *integers)


def _guess_us(problem: PoolProblem, cost: Cost, v: Variant, device: Gpu) -> float:
    """Microseconds of a tile."""
    b, forward, step = _blocks(problem, v), problem.op == "pool_fwd", v.axes[2].stride
    threads = problem.n * problem.c / v.tile.lanes * b.tiles_d * b.tiles_h * b.tiles_w
    instructions = cost.outputs * cost.instructions
    stores = cost.outputs / (v.lanes_y if forward else v.lanes_x)
    # From a thread's elements to its neighbour's.
    apart = v.tile.lanes if v.channels_last else v.tile.columns * (step if forward else 1)
    lines = min(max(apart * ITEMSIZE[problem.dtype] * _WARP / _LINE_BYTES, 1), _WARP)
    per_clock = _INSTRUCTIONS_PER_CLOCK_AND_SM if forward or not problem.is_max else _OF_MAXIMA_GRADIENTS
    touched = (cost.loads * _LOADED_LINE + stores * _STORED_LINE) * lines / _WARP
    issue_s = threads * (instructions / per_clock + touched) / (device.sms * device.clock_hz)
    move_s = _OVER_COPY * problem.min_bytes / copy_bytes_per_s(device)
    wait_s = instructions * _INSTRUCTION_CLOCKS + cost.loads * _LOAD_CLOCKS + stores * _STORE_CLOCKS
    wait_s /= device.clock_hz
    longest_s = max(issue_s, move_s, wait_s)
    return _LAUNCH_US + (longest_s + _SHOWN * (issue_s + move_s + wait_s - longest_s)) * 1e6


def _blocks(problem: PoolProblem, v: Variant) -> Blocks:
    target = problem.out_spatial if problem.op == "pool_fwd" else problem.spatial
    tiles_d, tiles_h, tiles_w = (
        ceil(extent / tile) for extent, tile in zip(spatial3(target), v.tile.extents, strict=True)
    )
    if not v.channels_last:
        return Blocks(tiles_d, tiles_h, tiles_w, 1, 1, 1, 1, 1, 1)
    every = ceil(problem.c / v.lanes_x)
    slabs = ceil(every / _MOST_VECTORS)
    vectors = ceil(every / slabs)
    block_h = min(_MOST_TILES_H, tiles_h)
    block_w = min(max(1, _THREADS // (vectors * block_h)), tiles_w)
    block_h = min(_THREADS // (vectors * block_w), tiles_h)
    blocks_w, blocks_h = ceil(tiles_w / block_w), ceil(tiles_h / block_h)
    return Blocks(tiles_d, tiles_h, tiles_w, slabs, vectors, block_w, block_h, blocks_w, blocks_h)


def _reads_once(problem: PoolProblem, v: Variant, device: Gpu) -> bool:
    """Whether windows share nothing, and x is about what the second-level cache holds: on an H200 loads that leave it
    first are then 3 to 8 % faster, of 200 MB 6 % slower."""
    apart = all(axis.taps <= axis.stride for axis in v.axes)
    return v.op == "pool_fwd" and apart and problem.operands[0].size_bytes <= 2 * device.l2_bytes


def _has_pairs(v: Variant, device: Gpu) -> bool:
    """Whether neighbouring channels are compared two at once, for which bfloat16 has instructions since 9.0."""
    return v.tile.reads_y and v.may_pair and (v.dtype == "f16" or device.capability >= (9, 0))


def _has_room(v: Variant, cost: Cost) -> bool:
    """Whether a tile that reads y has many registers, and few blocks that wait at once."""
    words = cost.words if v.pairs or not v.may_pair else 2 * cost.words
    return v.tile.reads_y and (words > _FEW_WORDS or (not v.channels_last and words + cost.loads > _FEW_PLANAR))


def _min_blocks(v: Variant, cost: Cost, device: Gpu) -> int:
    """Blocks of a multiprocessor, which bound the registers of a thread."""
    if cost.loads > _CROWDED and device.capability[0] != 9:
        return 1
    fewer = device.capability[0] == 9 and _needs_few(v, cost)
    if v.tile.reads_y:
        return 2 + fewer if v.ahead else 4 + fewer
    if v.is_max and v.op == "pool_bwd":
        return 5 if fewer else 2
    if cost.outputs > _FEW_OUTPUTS or cost.loads > _FEW_LOADS:
        return 2
    if cost.outputs <= _SMALL_OUTPUTS and cost.loads <= _SMALL_LOADS:
        return 8
    return 6 if fewer else 3


def _needs_few(v: Variant, cost: Cost) -> bool:
    """Whether more threads of fewer registers are faster, on compute capability 9.0."""
    if v.channels_last:
        return False
    if v.tile.reads_y and v.ahead:
        return v.dtype != "f32" and cost.words <= _AHEAD_WORDS and cost.words + cost.loads <= _AHEAD_LOADED
    if v.tile.reads_y:
        return cost.words <= _PLANAR_WORDS
    if v.is_max:
        return v.op == "pool_bwd" and cost.loads <= _SEARCHED_LOADS
    # What is scaled by windows' sizes needs registers for these as well.
    return v.mode != "average_exc_pad" and cost.outputs <= _SUMMED_OUTPUTS


class Window(LaunchedCandidate[Tile]):
    """Small windows, unrolled."""

    algorithm = "window"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        if problem.dtype == "f64":
            return Support(False, "float64 is left to direct")
        if prod(problem.window) > _MOST_TAPS:
            return Support(False, f"the window has {prod(problem.window)} elements, more than {_MOST_TAPS}")
        if not variants(problem):
            return Support(False, f"a tile of windows {problem.window}, {problem.stride} apart, fits no registers")
        return YES

    def configs(self, problem: PoolProblem, device: Gpu) -> tuple[Tile, ...]:
        every = sorted(variants(problem), key=lambda each: _guess_us(problem, each[0], each[1], device))
        tiles = [v.tile for _, v in every]
        reading, others = [tile for tile in tiles if tile.reads_y], [tile for tile in tiles if not tile.reads_y]
        chosen = {*reading[:_CONFIGS], *others[: _CONFIGS_BESIDE if reading else _CONFIGS]}
        return tuple(tile for tile in tiles if tile in chosen)

    def estimate(self, problem: PoolProblem, config: Tile, device: Gpu) -> float:
        cost, v = next(each for each in variants(problem) if each[1].tile == config)
        return _guess_us(problem, cost, v, device)

    def launches(self, problem: PoolProblem, config: Tile, device: Gpu) -> list[Launch]:
        cost, v = next(each for each in variants(problem) if each[1].tile == config)
        b = _blocks(problem, v)
        tiles = problem.n * b.tiles_d * b.tiles_h * b.tiles_w
        threads = tiles if v.channels_last else tiles * problem.c
        integers = pool(problem, threads)
        v = v._replace(
            bits=index_bits(problem, integers),
            once=_reads_once(problem, v, device),
            pairs=_has_pairs(v, device),
        )
        v = v._replace(ahead=_has_room(v, cost))
        boxes = problem.n * b.tiles_d * b.blocks_h * b.blocks_w * b.slabs
        last = len(problem.operands) - 1
        forward = self.op == "pool_fwd"
        finds = not forward and v.is_max
        return [
            Launch(
                source=Source(_kernel, v, _THREADS, _min_blocks(v, cost, device)),
                grid=(boxes if v.channels_last else ceil(threads / _THREADS), 1, 1),
                pointers=(0, 1, 2, 3) if finds else (last - 1, last),
                scalars="",
                integers=(*integers, *b, *_reciprocals(v, b, problem.c)),
                integer_bits=v.bits,
            )
        ]


FWD, BWD = Window("pool_fwd"), Window("pool_bwd")
