"""The tiles that `pool_window` may take: which fit into registers, and what each costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda.pool_axes import Axis, Tile, Variant, covers, reaches, rows_met, taps_met, windows_met
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_VECTOR_BYTES = 16
_MOST_LOADS = 160  # vectors that one tile loads
_MOST_KEPT = 100  # values that a tile keeps by name: 104 were spilled


def axes_of(problem: PoolProblem) -> tuple[Axis, Axis, Axis]:
    fields = spatial3(problem.window), spatial3(problem.stride), spatial3(problem.pad, 0)
    depth, rows, columns = (Axis(*values) for values in zip(*fields, strict=True))
    return depth, rows, columns


@lru_cache(maxsize=256)
def variants(problem: PoolProblem) -> tuple[tuple[Cost, Variant], ...]:
    """Every tile that fits into registers."""
    axes, forward, last = axes_of(problem), problem.op == "pool_fwd", problem.channels_last
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
    return tuple(found)


def _tiles(axes: tuple[Axis, Axis, Axis], forward: bool, last: bool, widest: int, overlap: bool) -> Iterator[Tile]:
    """Every tile that is worth a thought; those of a gradient begin where a window does."""
    depth, step_h, step_w = (1, 1, 1) if forward else (axis.stride for axis in axes)
    for rows, reads_y in product((1, 2, 4), (False, True) if overlap else (False,)):
        if last:
            for columns, lanes in product((1, 2, 4), (1, 2, 4, 8)):
                if lanes <= widest:
                    yield Tile(depth, rows * step_h, columns * step_w, lanes, reads_y)
        else:
            for columns in dict.fromkeys(ceil(extent / step_w) * step_w for extent in (widest // 2, widest)):
                yield Tile(depth, rows * step_h, columns, 1, reads_y)


def _lanes(extent: int, apart: int, most: int) -> int:
    """Elements of a vector: a power of two that divides the extent of rows and the distance of tiles."""
    lanes = 1
    while 2 * lanes <= most and extent % (2 * lanes) == 0 and apart % (2 * lanes) == 0:
        lanes *= 2
    return lanes


class Cost(NamedTuple):
    """Of a tile: instructions an output, vectors that are loaded, outputs; of one that reads y, registers for y, dy and
    a row of x."""

    instructions: float
    loads: int
    outputs: int
    words: int = 0


def _cost(v: Variant) -> Cost | None:
    """None where a tile has too much to load or to keep."""
    if v.tile.reads_y:
        return _cost_of_match(v)
    reached = reaches if v.op == "pool_fwd" else covers
    met = [sorted({position for _, position in reached(a, t)}) for a, t in zip(v.axes, v.tile.extents, strict=True)]
    pairs = prod(len(reached(a, t)) for a, t in zip(v.axes, v.tile.extents, strict=True))
    outputs = prod(v.tile.extents) * v.cell_lanes
    if v.op == "pool_bwd" and v.is_max:
        places = [taps_met(axis, windows) for axis, windows in zip(v.axes, met, strict=True)]
        windows = prod(map(len, met))
        loads = _vectors(v, places, v.lanes_x) + _vectors(v, met, v.lanes_y)
        kept, most_loads = outputs + 2 * windows * v.cell_lanes, _MOST_LOADS
        folds = len(places[0]) * len(places[1]) * len(met[2]) * v.axes[2].taps
        work = 4 * (folds + windows * v.axes[0].taps * v.axes[1].taps) + 3 * pairs
    else:
        kept, work, most_loads = outputs + len(met[2]) * v.cell_lanes, pairs, _MOST_LOADS // 2
        loads = _vectors(v, met, v.lanes_x if v.op == "pool_fwd" else v.lanes_y)
    if loads > most_loads or kept > _MOST_KEPT:
        return None
    return Cost((work * v.cell_lanes + 10 * loads + 60) / outputs, loads, outputs)


def _cost_of_match(v: Variant) -> Cost | None:
    outputs, rows, windows = prod(v.tile.extents) * v.cell_lanes, rows_met(v), windows_met(v)
    columns = [sorted({w for each in met.values() for w in each}) for met in rows.values()]
    loads = sum(_vectors(v, ((0,), (0,), each), v.lanes_x) for each in columns) + 2 * _vectors(v, windows, v.lanes_y)
    if loads > _MOST_LOADS or outputs + 2 * prod(map(len, windows)) * v.cell_lanes > _MOST_KEPT:
        return None
    compared = sum(len(each) for met in rows.values() for each in met.values())
    given = prod(len(covers(a, t)) for a, t in zip(v.axes, v.tile.extents, strict=True))
    at_once = 2 if v.may_pair else 1
    words = (2 * prod(map(len, windows)) + max(map(len, columns))) * v.cell_lanes // at_once
    work = (2 * compared + given) * v.cell_lanes / at_once
    return Cost((work + 10 * loads + 60) / outputs, loads, outputs, words)


def _vectors(v: Variant, places: Sequence[Collection[int]], lanes: int) -> int:
    """Vectors that lie in a box of positions."""
    columns = len(places[2]) if v.channels_last else len({column // lanes for column in places[2]})
    return len(places[0]) * len(places[1]) * columns
