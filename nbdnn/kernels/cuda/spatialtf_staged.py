"""The spatial transformer's forward on a GPU, of tiles of outputs whose part of the image comes to shared memory.

    thread    1. the positions of its outputs: pixels and weights, as in spatialtf_position
    block     2. the box of all these pixels, which it copies to shared memory, plane after plane, rows by vectors
    thread    3. y[n, c, i, j] = sum over four pixels of weight * x[n, c, pixel], from there

Neighbouring outputs of a turned image lie in many of its rows, so that a load of a warp asks the first-level cache for
as many lines, four times a channel; a box is asked for once, by whole lines, and shared memory answers 32 words at a
time wherever they lie, but for those of one bank. A box that is larger than a block's share of that memory, of outputs
that lie far apart, is not copied: its pixels are loaded one by one. Where several planes follow each other, the next
come while one is sampled. Planar images, and few channels that lie side by side. Traffic: y once; x once, and from
cache where boxes overlap. Positions and sums in float32. Source: own.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_position import FEW_CHANNELS, Fields, Kind, fields, index_bits, nearest, position
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_THREADS, _WARPS = 256, 8
_COLUMNS = 32  # of a tile
_WARP_ROWS, _WARP_COLUMNS = 4, 8  # of a warp's threads
_COPY_BYTES = 16
_PLANES = (3, 2, 1)  # that are copied at once
# Rows of a tile by the bytes of an element, and pixels that a block has room for by these rows: what a turned tile
# needs, and what a grid does that wanders. Tiles of more rows, and in 16 bits of 48, spill registers.
_TILE_ROWS = {4: (32, 48, 56), 2: (32, 64)}
_BOXES = {32: (3072, 4096, 6144), 48: (4096, 6144), 56: (4096, 6144), 64: (4096, 6144)}
_SHARED_OF_SM, _SHARED_OF_BLOCK = 220 << 10, 2048  # of a block beside its boxes
_IN_TURN = 8  # blocks that a multiprocessor shall have, one after the other
_MOST_GRID = 65535  # of the grid's second axis
_LAUNCH_US, _OVER_COPY, _PER_COPIED, _TURNED = 4.5, 1.15, 0.1, 1.3
_ONE_BY_ONE, _ONE_BY_ONE_OF_GRID = 1.6, 3.0
_CHANNEL_US = 2.5  # of a million outputs of one channel
# Of an image's extent, how much further neighbours of a grid may lie apart than those of an affine map: as the tuner
# draws them.
_SPREAD = 0.085


class Config(NamedTuple):
    """rows: of a tile of outputs. box: pixels that a block has room for in each plane. group: planes of a block."""

    rows: int
    box: int
    group: int

    def __str__(self) -> str:
        return f"r{self.rows}b{self.box}g{self.group}"


class _Variant(NamedTuple):
    """What a kernel is compiled for. elems: of a pixel, side by side. planes: that are copied at once. vector: elements
    of a copy. row_lanes: threads that copy a row. turns: rows of a thread, some lines apart. pair: columns of a thread,
    side by side. whole: whether rows of y are whole pairs. box: elements of a plane in shared memory. buffers: of
    planes, of which one is read while the other is filled."""

    kind: tuple
    elems: int
    planes: int
    vector: int
    row_lanes: int
    turns: int
    pair: int
    whole: bool
    box: int
    buffers: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf, ptx_tile

    v = _Variant(*specialised_on)
    kind, elems, planes, pair = Kind(*v.kind), v.elems, v.planes, v.pair
    integer, real, word, wide = ptx.INTEGER[32], ptx.REAL[kind.compute], ptx.WORD, ptx.WIDE
    itemsize = ITEMSIZE[kind.dtype]
    locate, find, hat = position(kind), nearest(kind.compute, 32), ptx_spatialtf.narrow_hat
    across, outputs = _COLUMNS // (_WARP_COLUMNS * pair), v.turns * pair
    turn_rows = _WARPS // across * _WARP_ROWS
    copy, load = ptx_tile.COPY_ASYNC[v.vector * itemsize], ptx_local.load(kind.dtype, 1)
    with_pixel, here = ptx_spatialtf.with_pixel, ptx_tile.computed_here
    at_once = pair if v.whole else 1  # elements that are stored
    store = ptx_local.store(kind.dtype, at_once)
    commit = ptx_tile.copy_async_commit
    wait = ptx_tile.copy_async_wait(v.buffers - 1)
    box_bytes, pixel_bytes, copy_bytes = v.box * itemsize, elems * itemsize, v.vector * itemsize
    rows_at_once = _THREADS // v.row_lanes
    offsets = tuple(plane * box_bytes + elem * itemsize for plane in range(planes) for elem in range(elems))
    weighted = ptx_spatialtf.weighted(kind.dtype, offsets, elems * itemsize, 1 if elems > 1 else pair)
    row_lanes, size_bits, most = v.row_lanes, itemsize.bit_length() - 1, 2**31 - 1
    least, of_block = ptx_spatialtf.least_of_warp, 4 * _WARPS
    of_run, runs = (pair * elems, 1) if elems > 1 else (pair, planes)  # results side by side in memory
    held = of_run * runs

    @ptx.inline
    def least_of_block(values):
        """Of four integers of each thread."""
        bounds = ptx.cuda.shared.array(of_block, integer)
        warp, lane = ptx.divided(integer(ptx.thread_x()), integer(32))
        for i in range(4):
            of_warp = least(values[i])
            if lane == 0:
                bounds[integer(i * _WARPS + warp)] = of_warp
        ptx.cuda.syncthreads()
        mine = bounds[lane]
        kind_of_mine = integer(lane // _WARPS)
        return (
            least(mine if kind_of_mine == 0 else integer(most)), least(mine if kind_of_mine == 1 else integer(most)),
            least(mine if kind_of_mine == 2 else integer(most)), least(mine if kind_of_mine == 3 else integer(most)),
        )  # fmt: skip

    @ptx.inline
    def come(x, shared, first, width_bytes, pitch_bytes, height, f):
        first_row, lane = ptx.divided(integer(ptx.thread_x()), integer(row_lanes))
        of_plane, of_rows = wide(f.x_v * itemsize), wide(f.x_h * (rows_at_once * itemsize))
        begin = integer(lane * copy_bytes)
        while begin < width_bytes:  # once, of most boxes
            row = first_row
            source = ptx.address(x, integer(first + row * f.x_h + (begin >> size_bits)))
            target = word(integer(shared) + row * pitch_bytes + begin)
            while row < height:
                of_row = source
                for plane in range(planes):
                    copy(word(target + word(plane * box_bytes)), of_row, copy_bytes)
                    of_row = of_row + of_plane
                row, source = integer(row + rows_at_once), source + of_rows
                target = word(target + word(rows_at_once * pitch_bytes))
            begin = integer(begin + row_lanes * copy_bytes)

    @ptx.inline
    def weights(right, down):
        above, below, near, next_ = hat(down), hat(down - real(1.0)), hat(right), hat(right - real(1.0))
        return above * near, above * next_, below * near, below * next_

    @ptx.inline
    def give(y, to, results, inside, f):
        """inside: elements of a row of results that there are."""
        for run in range(runs):
            for i in range(0, of_run, at_once):
                if i < inside:
                    store(y, integer(to + run * f.y_v + i), results, integer(run * of_run + i))

    def sample_tiles(x, places, y, f):
        image, tile = ptx.split(integer(ptx.block_x()), f.blocks, f.by_blocks, f.shift_blocks)
        tile_row, tile_column = ptx.split(tile, f.tiles_w, f.by_tiles_w, f.shift_tiles_w)
        warp, lane = ptx.divided(integer(ptx.thread_x()), integer(32))
        warp_row, warp_column = ptx.divided(warp, integer(across))
        lane_row, lane_column = ptx.divided(lane, integer(_WARP_COLUMNS))
        i0 = integer(tile_row * (v.turns * turn_rows) + warp_row * _WARP_ROWS + lane_row)
        j0 = integer(tile_column * _COLUMNS + (warp_column * _WARP_COLUMNS + lane_column) * pair)
        columns, rows = ptx.cuda.local.array(outputs, integer), ptx.cuda.local.array(outputs, integer)
        rights, downs = ptx.cuda.local.array(outputs, real), ptx.cuda.local.array(outputs, real)
        left, top, end_column, end_row = f.in_w, f.in_h, integer(0), integer(0)
        for turn in range(v.turns):
            for side in range(pair):
                k = turn * pair + side
                i = min(integer(i0 + turn * turn_rows), integer(f.out_h - 1))
                j = min(integer(j0 + side), integer(f.out_w - 1))
                s, t = locate(places, image, i, j, f)
                (columns[k], rights[k]), (rows[k], downs[k]) = find(s, f.in_w), find(t, f.in_h)
                left, top = min(left, columns[k]), min(top, rows[k])
                end_column, end_row = max(end_column, columns[k]), max(end_row, rows[k])
        left, top, end_column, end_row = least_of_block((left, top, integer(-end_column), integer(-end_row)))
        first_byte = integer(left * pixel_bytes & -copy_bytes)
        width_bytes = integer((2 - end_column) * pixel_bytes - first_byte)
        height = integer(2 - end_row - top)
        pitch_bytes = integer(((width_bytes + _COPY_BYTES - 1 >> 4) | 1) * _COPY_BYTES)
        results = ptx.cuda.local.array(held, real)
        plane = integer(ptx.block_y() * f.group)
        end = min(integer(plane + f.group), f.vectors)
        to = here(integer(image * f.y_n + i0 * f.y_h + j0 * f.y_w + plane * f.y_v))
        inside = integer(min(integer(f.out_w - j0), integer(pair)) * elems)
        if height * pitch_bytes <= box_bytes:
            shared = ptx_tile.dynamic_shared()
            of_x = integer(image * f.x_n + plane * f.x_v + top * f.x_h + (first_byte >> size_bits))
            for k in range(outputs):  # where their pixels lie from the block's first
                columns[k] = here(integer((rows[k] - top) * pitch_bytes + columns[k] * pixel_bytes - first_byte))
            come(x, shared, of_x, width_bytes, pitch_bytes, height, f)
            commit()
            buffer = word(shared)
            while plane < end:
                plane = integer(plane + planes)
                if v.buffers > 1:
                    of_x = integer(of_x + planes * f.x_v)
                    other = word(integer(2 * shared + planes * box_bytes) - integer(buffer))
                    if plane < end:
                        come(x, other, of_x, width_bytes, pitch_bytes, height, f)
                    commit()
                wait()
                ptx.cuda.syncthreads()
                for turn in range(v.turns):
                    for side in range(pair):
                        k = turn * pair + side
                        w = weights(rights[k], downs[k])
                        upper = word(buffer + word(columns[k]))
                        lower = word(upper + word(pitch_bytes))
                        weighted(results, integer(side * elems), upper, lower, w[0], w[1], w[2], w[3])
                    if integer(i0 + turn * turn_rows) < f.out_h:
                        give(y, integer(to + turn * turn_rows * f.y_h), results, inside, f)
                to = integer(to + planes * f.y_v)
                if v.buffers > 1:
                    ptx.cuda.syncthreads()
                    buffer = other
            return
        pixels = ptx.cuda.local.array(4, real)
        while plane < end:
            for turn in range(v.turns):
                for side in range(pair):
                    k = turn * pair + side
                    w = weights(rights[k], downs[k])
                    at = integer(image * f.x_n + plane * f.x_v + rows[k] * f.x_h + columns[k] * f.x_w)
                    for one in range(planes * elems):
                        first = integer(at + one * f.x_v)
                        load(pixels, integer(0), x, first)
                        load(pixels, integer(1), x, integer(first + f.right))
                        load(pixels, integer(2), x, integer(first + f.down))
                        load(pixels, integer(3), x, integer(first + f.down + f.right))
                        total = real(0.0)
                        for corner in range(4):
                            total = with_pixel(total, w[corner], pixels[corner])
                        results[side * elems + one if elems > 1 else one * pair + side] = total
                if integer(i0 + turn * turn_rows) < f.out_h:
                    give(y, integer(to + turn * turn_rows * f.y_h), results, inside, f)
            plane, to = integer(plane + planes), integer(to + planes * f.y_v)

    data, parameters = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype)
    return sample_tiles, (data, parameters, data, ptx.record(Fields, 32))


def _elems(problem: SpatialtfProblem) -> int:
    """Of a pixel, side by side in memory."""
    return problem.c if problem.channels_last else 1


def _planes(problem: SpatialtfProblem) -> int:
    return next(planes for planes in _PLANES if _all_planes(problem) % planes == 0)


def _all_planes(problem: SpatialtfProblem) -> int:
    """Of an image."""
    return 1 if problem.channels_last else problem.c


def _vector(problem: SpatialtfProblem) -> int:
    """Elements of a copy, of which rows are whole multiples."""
    itemsize = ITEMSIZE[problem.dtype]
    lanes = min(_COPY_BYTES, problem.align) // itemsize
    while problem.spatial[1] * _elems(problem) % lanes:
        lanes //= 2
    return lanes


def _pair(problem: SpatialtfProblem) -> int:
    """Columns of a thread, whose results are a word of 32 bits together."""
    return max(1, 4 // ITEMSIZE[problem.dtype])


def _turn_rows(problem: SpatialtfProblem) -> int:
    """Of a tile, that the threads of a block have together in a turn."""
    return _THREADS * _pair(problem) // _COLUMNS


def _tiles(problem: SpatialtfProblem, rows: int) -> int:
    """Of an image's outputs."""
    height, width = problem.out_spatial
    return ceil(height / rows) * ceil(width / _COLUMNS)


def _shared_bytes(problem: SpatialtfProblem, config: Config) -> int:
    return _buffers(problem, config) * _planes(problem) * config.box * _elems(problem) * ITEMSIZE[problem.dtype]


def _buffers(problem: SpatialtfProblem, config: Config) -> int:
    return 2 if config.group > _planes(problem) else 1


def _blocks_at_once(rows: int, buffers: int) -> int:
    """Of a multiprocessor, which bounds the registers of a thread: as was measured on an H200."""
    if buffers == 1:
        return 5 if rows == 32 else 4
    return 4 if rows <= 48 else 3


def _whole_box(problem: SpatialtfProblem) -> int:
    """Pixels of the box of a whole image, rounded up."""
    (height, width), pixel_bytes = problem.spatial, _elems(problem) * ITEMSIZE[problem.dtype]
    pitch_bytes = (ceil(width * pixel_bytes / _COPY_BYTES) | 1) * _COPY_BYTES
    return ceil(height * pitch_bytes / (pixel_bytes * _COPY_BYTES)) * _COPY_BYTES


class Staged(LaunchedCandidate[Config]):
    """Tiles of outputs, of the box of pixels that they need."""

    algorithm = "staged"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        if problem.dtype == "f64":
            return Support(False, "float64 is left to direct")
        if problem.channels_last and problem.c > FEW_CHANNELS:
            return Support(False, f"{problem.c} channels that lie side by side are vectors, which direct loads")
        if min(problem.spatial) < 2:
            return Support(False, f"an image of {problem.spatial} has no four pixels side by side")
        if _vector(problem) * ITEMSIZE[problem.dtype] < 4:
            return Support(False, "rows are no multiples of 4 bytes, of which at least a copy is")
        if index_bits(problem) != 32:
            return Support(False, "offsets are beyond int32")
        if ceil(_all_planes(problem) / _planes(problem)) > _MOST_GRID:
            return Support(False, f"{problem.c} planes, more than {_MOST_GRID} blocks take")
        return YES

    def configs(self, problem: SpatialtfProblem, device: Gpu) -> tuple[Config, ...]:
        whole, planes, every = _whole_box(problem), _planes(problem), _all_planes(problem)
        found = []
        shortest, *longer = _TILE_ROWS[ITEMSIZE[problem.dtype]]
        for rows in (shortest, *(rows for rows in longer if rows < problem.out_spatial[0] + _turn_rows(problem))):
            boxes = _BOXES[rows]
            parts = ceil(_IN_TURN * device.sms / max(problem.n * _tiles(problem, rows), 1))
            group = ceil(every / planes / min(every // planes, parts)) * planes
            found += [Config(rows, min(box, whole), group) for box in boxes]
            if group < every:
                found.append(Config(rows, min(boxes[-1], whole), min(2 * group, every)))
        return tuple(dict.fromkeys(found))

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        """Of neighbouring outputs as far apart as they are where the image is seen whole, and somewhat turned."""
        spans = zip((config.rows, _COLUMNS), problem.spatial, problem.out_spatial, strict=True)
        spread, over = (0.0, _ONE_BY_ONE) if problem.is_affine else (_SPREAD, _ONE_BY_ONE_OF_GRID)
        height, width = (
            min(extent, outputs * extent / out * _TURNED + 2 + spread * extent) for outputs, extent, out in spans
        )
        pixel_bytes = problem.c * ITEMSIZE[problem.dtype]
        copied_bytes = problem.n * _tiles(problem, config.rows) * height * width * pixel_bytes
        over = 1.0 if height * width <= config.box else over
        bytes_ = over * (_OVER_COPY * problem.min_bytes + _PER_COPIED * copied_bytes)
        issued_us = problem.n * problem.positions * problem.c * 1e-6 * _CHANNEL_US
        return _LAUNCH_US + max(bytes_ / copy_bytes_per_s(device) * 1e6, over * issued_us)

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        elems, vector = _elems(problem), _vector(problem)
        in_row = max(1.0, min(_COLUMNS * _TURNED, problem.spatial[1]) * elems / vector)
        v = _Variant(
            kind=tuple(Kind(problem.is_affine, problem.dtype, problem.param_dtype, 1, 1, _COLUMNS, 32)),
            elems=elems,
            planes=_planes(problem),
            vector=vector,
            row_lanes=min(1 << round(log2(in_row) + 0.2), 32),
            turns=config.rows // _turn_rows(problem),
            pair=_pair(problem),
            whole=problem.out_spatial[1] % _pair(problem) == 0 and problem.align >= 4,
            box=config.box * elems,
            buffers=_buffers(problem, config),
        )
        blocks, shared_bytes = _tiles(problem, config.rows), _shared_bytes(problem, config)
        min_blocks = min(_blocks_at_once(config.rows, v.buffers), _SHARED_OF_SM // (shared_bytes + _SHARED_OF_BLOCK))
        return [
            Launch(
                source=Source(_kernel, v, _THREADS, max(1, min_blocks)),
                grid=(blocks * problem.n, ceil(_all_planes(problem) / config.group), 1),
                pointers=(0, 1, 2),
                scalars="",
                integers=fields(problem, Kind(*v.kind), blocks, config.group),
                dynamic_shared_bytes=shared_bytes,
            )
        ]


FWD, SAMPLER_FWD = Staged("spatialtf_fwd"), Staged("spatialtf_sampler_fwd")
