"""Pooling by small windows: a tile of outputs a thread, its code unrolled; forward and backward, both layouts.

    planar          thread: rows of a few vectors            neighbours in a row to neighbouring threads
    channels-last   thread: a vector of channels of a few pixels; a block has some vectors of a box of tiles,

                        vectors x block_w x block_h threads

so that what the windows of neighbouring tiles share is in the first-level cache. Every load and store is a vector of
up to 16 bytes without a branch; `ptx_pool` has the code of a tile. The gradient of a maximum does not read y: its
windows' maxima are found again from x, in the registers of every tile that they reach into.

Traffic: each operand once from memory; the halo of a tile again from cache, 49 rows and columns for 16 outputs in a
gradient of 3x3 windows 2 apart. Sums in float32, one rounding each. Source: own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_axes import Axis, Tile, Variant, covers, reaches, taps_met
from nbdnn.kernels.cuda.pool_plan import Pool, index_bits, pool
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_THREADS = 256
_VECTOR_BYTES = 16
_MOST_TAPS = 64  # of a window
_MOST_LOADS = 160  # vectors that one tile loads
_CROWDED = 80  # of them: 128 registers hold more on compute capability 9.0 alone
_MOST_KEPT = 100  # values that a tile keeps by name: 104 were spilled
_FEW_OUTPUTS, _FEW_LOADS = 24, 24  # of a tile: 80 registers hold them, else it gets 128
_SMALL_OUTPUTS, _SMALL_LOADS = 4, 8  # of a tile that 32 registers hold: all blocks of a small image are there at once
_MOST_VECTORS = 16  # of channels in a block: 256 bytes of a pixel
_MOST_TILES_H = 4  # in a block, channels-last
_CONFIGS = 6
_LEAST_CAPABILITY = (8, 0)  # has an instruction for maxima that keep NaN
_LAUNCH_US = 3.0
# Of a thread's, priors for the guess: what looks for maxima hardly waits for memory.
_INSTRUCTIONS_PER_CLOCK_AND_SM, _OF_MAXIMA_GRADIENTS = 64.0, 96.0
_RESIDENT = 2048  # threads that a multiprocessor holds


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

    def find_tiles(x, y, dy, dx, f, b, r):
        at = place(f, b, r)
        if at[0] >= 0:
            compute((image(x, at, f), pooled(y, at, f), pooled(dy, at, f), image(dx, at, f)))

    return find_tiles, (data, data, data, data, *integers)


def _axes(problem: PoolProblem) -> tuple[Axis, Axis, Axis]:
    fields = spatial3(problem.window), spatial3(problem.stride), spatial3(problem.pad, 0)
    depth, rows, columns = (Axis(*values) for values in zip(*fields, strict=True))
    return depth, rows, columns


def _variants(problem: PoolProblem) -> list[tuple[Cost, Variant]]:
    """Every tile that fits into registers."""
    axes, forward, last = _axes(problem), problem.op == "pool_fwd", problem.channels_last
    widest = min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype]
    finds, overlap = problem.is_max and not forward, any(axis.taps > axis.stride for axis in axes)
    mode, found = problem.mode.removesuffix("_deterministic"), []
    if not any(problem.pad):
        mode = mode.replace("exc", "inc")  # every window is whole
    for tile in _tiles(axes, forward, last, _VECTOR_BYTES // ITEMSIZE[problem.dtype], finds and overlap):
        step = axes[2].stride
        x_apart, y_apart = (tile.columns * step, tile.columns) if forward else (tile.columns, tile.columns // step)
        if last:
            lanes_x = lanes_y = tile.lanes
            most = _lanes(problem.c, widest, widest)
            if tile.lanes not in (most, most // 2):
                continue
        else:
            lanes_x = _lanes(problem.spatial[-1], x_apart, widest)
            lanes_y = _lanes(problem.out_spatial[-1], y_apart, widest)
        v = Variant(problem.op, mode, problem.dtype, last, lanes_x, lanes_y, axes, tile, 32)
        cost = _cost(v)
        if cost is not None:
            found.append((cost, v))
    return found


def _guess_us(problem: PoolProblem, cost: Cost, device: Gpu) -> float:
    """Microseconds of a tile: a GPU that it leaves half empty takes as long as a full one."""
    *_, target = problem.operands
    threads = target.size_elems / cost.outputs
    instructions = target.size_elems * cost.instructions * (1 + _RESIDENT * device.sms / threads)
    finds = problem.is_max and problem.op == "pool_bwd"
    per_clock = _OF_MAXIMA_GRADIENTS if finds else _INSTRUCTIONS_PER_CLOCK_AND_SM
    issue_s = instructions / (per_clock * device.sms * device.clock_hz)
    move_s = 1.15 * problem.min_bytes / copy_bytes_per_s(device)
    return _LAUNCH_US + (max(issue_s, move_s) + 0.1 * min(issue_s, move_s)) * 1e6


def _tiles(axes: tuple[Axis, Axis, Axis], forward: bool, last: bool, widest: int, overlap: bool) -> Iterator[Tile]:
    """Every tile that is worth a thought; those of a gradient begin where a window does."""
    depth, step_h, step_w = (1, 1, 1) if forward else (axis.stride for axis in axes)
    for rows, reads_y in product((1, 2, 4), (False, True) if overlap else (False,)):
        if last:
            for columns, lanes in product((1, 2, 4), (1, 2, 4, 8)):
                if lanes <= widest:
                    yield Tile(depth, rows * step_h, columns * step_w, lanes, reads_y)
        else:
            for columns in (widest // 2, widest):
                yield Tile(depth, rows * step_h, -(-columns // step_w) * step_w, 1, reads_y)


def _lanes(extent: int, apart: int, most: int) -> int:
    """Elements of a vector: a power of two that divides the extent of rows and the distance of tiles."""
    lanes = 1
    while 2 * lanes <= most and extent % (2 * lanes) == 0 and apart % (2 * lanes) == 0:
        lanes *= 2
    return lanes


class Cost(NamedTuple):
    """Of a tile: instructions an output, vectors that are loaded, outputs."""

    instructions: float
    loads: int
    outputs: int


def _cost(v: Variant) -> Cost | None:
    """None where a tile has too much to load or to keep."""
    reached = reaches if v.op == "pool_fwd" else covers
    met = [sorted({position for _, position in reached(a, t)}) for a, t in zip(v.axes, v.tile.extents, strict=True)]
    pairs = prod(len(reached(a, t)) for a, t in zip(v.axes, v.tile.extents, strict=True))
    outputs = prod(v.tile.extents) * v.cell_lanes
    if v.op == "pool_bwd" and v.is_max:
        places = [taps_met(axis, windows) for axis, windows in zip(v.axes, met, strict=True)]
        windows = prod(map(len, met))
        loads = _vectors(v, places, v.lanes_x) + (1 + v.tile.reads_y) * _vectors(v, met, v.lanes_y)
        kept, most_loads = outputs + 2 * windows * v.cell_lanes, _MOST_LOADS
        if v.tile.reads_y:
            work = 2 * windows * prod(axis.taps for axis in v.axes) + pairs
        else:
            folds = len(places[0]) * len(places[1]) * len(met[2]) * v.axes[2].taps
            work = 4 * (folds + windows * v.axes[0].taps * v.axes[1].taps) + 3 * pairs
    else:
        kept, work, most_loads = outputs + len(met[2]) * v.cell_lanes, pairs, _MOST_LOADS // 2
        loads = _vectors(v, met, v.lanes_x if v.op == "pool_fwd" else v.lanes_y)
    if loads > most_loads or kept > _MOST_KEPT:
        return None
    return Cost((work * v.cell_lanes + 10 * loads + 60) / outputs, loads, outputs)


def _vectors(v: Variant, places: Sequence[Collection[int]], lanes: int) -> int:
    """Vectors that lie in a box of positions."""
    columns = len(places[2]) if v.channels_last else len({column // lanes for column in places[2]})
    return len(places[0]) * len(places[1]) * columns


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


class Window(LaunchedCandidate[Tile]):
    """Small windows, unrolled."""

    algorithm = "window"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        if problem.dtype == "f64":
            return Support(False, "float64 is left to direct")
        if device.capability < _LEAST_CAPABILITY:
            return Support(False, f"compute capability {device.capability}: no maximum that keeps NaN before 8.0")
        if prod(problem.window) > _MOST_TAPS:
            return Support(False, f"the window has {prod(problem.window)} elements, more than {_MOST_TAPS}")
        if not _variants(problem):
            return Support(False, f"a tile of windows {problem.window}, {problem.stride} apart, fits no registers")
        return YES

    def configs(self, problem: PoolProblem, device: Gpu) -> tuple[Tile, ...]:
        every = sorted(_variants(problem), key=lambda each: _guess_us(problem, each[0], device))
        return tuple(v.tile for _, v in every[:_CONFIGS])

    def estimate(self, problem: PoolProblem, config: Tile, device: Gpu) -> float:
        return _guess_us(problem, next(cost for cost, v in _variants(problem) if v.tile == config), device)

    def launches(self, problem: PoolProblem, config: Tile, device: Gpu) -> list[Launch]:
        cost, v = next(each for each in _variants(problem) if each[1].tile == config)
        b = _blocks(problem, v)
        tiles = problem.n * b.tiles_d * b.tiles_h * b.tiles_w
        threads = tiles if v.channels_last else tiles * problem.c
        integers = pool(problem, threads)
        v = v._replace(bits=index_bits(problem, integers), once=_reads_once(problem, v, device))
        boxes = problem.n * b.tiles_d * b.blocks_h * b.blocks_w * b.slabs
        last = len(problem.operands) - 1
        forward = self.op == "pool_fwd"
        finds = not forward and v.is_max
        many = finds or cost.outputs > _FEW_OUTPUTS or cost.loads > _FEW_LOADS
        small = cost.outputs <= _SMALL_OUTPUTS and cost.loads <= _SMALL_LOADS
        min_blocks = 1 if cost.loads > _CROWDED and device.capability[0] != 9 else 2 if many else 8 if small else 3
        return [
            Launch(
                source=Source(_kernel, v, _THREADS, min_blocks),
                grid=(boxes if v.channels_last else ceil(threads / _THREADS), 1, 1),
                pointers=(0, 1, 2, 3) if finds else (last - 1, last),
                scalars="",
                integers=(*integers, *b, *_reciprocals(v, b, problem.c)),
                integer_bits=v.bits,
            )
        ]


FWD, BWD = Window("pool_fwd"), Window("pool_bwd")
