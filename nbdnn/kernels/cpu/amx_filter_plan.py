"""How a filter gradient on matrix units is cut into strips, and the parameters its kernels read.

A strip is some slices, each the rows of one image and depth that dy has, or some rows of one. Its pixels are counted
through, rows `pitch` apart and slices `block_pixels`, so that what a tap reads of x is a constant away, whatever pixel:

    pixel p of dy meets pixel p + reach(tap) of the lowered plane of x that the tap reads

Between rows and slices dy is 0. Zeros behind a row or slice of x are those before the next one, where both have some.
Of a stride u the rows and columns of x are dealt out to u * u planes, of which a tap reads one, and of three axes
there are planes for each tap in depth. Taps of an axis that lie far apart have planes of their own as well, where less
is lowered then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.amx import LINE, PRODUCT_NS, TILE, TILE_BYTES, tile_shapes
from nbdnn.kernels.cpu.amx_plan import Config, Phases
from nbdnn.kernels.cpu.cost import COPY_NS
from nbdnn.kernels.cpu.geometry import Axis, Gather, geometry, spatial3, tensor_strides
from nbdnn.kernels.cpu.scratch import own_pages, whole_lines
from nbdnn.kernels.cpu.vector import filled, record
from nbdnn.problem_conv import ConvProblem

_STRIP_SHARE = 0.5  # of the second-level cache, for what is lowered of x and dy
_TASKS_PER_THREAD = 4
_MOST_SUMS_BYTES, _MOST_STRIPS_BYTES = 16 << 20, 64 << 20  # of several splits
_LEAST_PIXELS = 256  # of a strip that is not made smaller for the sake of more splits
_MOST_UNITS = 128  # of a task, whose sums stay in second-level cache beside a strip
_FAR_APART = 2  # positions between the first tap and the last, for each tap
_LINE_BYTES = 64

PARAMS = record(
    *("x_n", "x_c", "x_d", "x_h", "x_w", "extent_d", "extent_h", "extent_w"),
    *("y_n", "y_k", "y_d", "y_h", "y_w", "count_d", "count_h", "count_w"),
    *("step_d", "step_h", "step_w", "low_h", "low_w", "more_h", "more_w", "groups", "c_group", "k_group"),
    *("slices", "strip_slices", "strip_rows", "strips_h", "strips", "splits", "split_strips"),
    *("pitch", "block_pixels", "follows", "reach", "planes", "plane_table"),
    *("c_tiles", "c_tile_bytes", "k_tiles", "k_panels", "a_pitch", "a_offsets", "a_offset", "shapes"),
    *("taps", "units", "unit_places", "chunks", "chunk_units", "strip_bytes", "line_bytes"),
    *("sums_offset", "split_bytes"),
    *("w_k", "w_tap", "no_offset", "read_out", "worker_offset", "worker_bytes"),
)
# What a phase finds at `ctx`: where the parameters are, and which strip of each split it is for.
STEP = record("params", "strip")


class Plane(NamedTuple):
    """A lowered plane of x: offset in depth, phases of rows and columns, and which ones of all copies in words are its
    own, whose words begin with even and with odd pixels; -1 where no tap reads these."""

    depth: int
    row: int
    column: int
    even: int
    odd: int


@dataclass(frozen=True)
class Plan:
    """Strips, splits of them whose sums are added at last, and the workspace: a strip of each split, words of x before
    dy, then sums, then what a worker has for itself.

    reaches: of each tap, in the filter's order, (plane, pixels). steps: tiles of 32 pixels of a strip. lowered: tasks
    that lower a strip. line_bytes: of a channel of a plane before its pixels are words, of which the last needs a pixel
    more. a_pitch: bytes from one output channel of dy to the next, of which no 16 are in one set of a cache; behind
    an odd last pixel is one of zeros.
    """

    gather: Gather
    rows: Phases
    columns: Phases
    planes: tuple[Plane, ...]
    reaches: tuple[tuple[int, int], ...]
    pitch: int
    block_pixels: int
    strip_slices: int
    strip_rows: int
    strips: int
    splits: int
    split_strips: int
    steps: int
    c_tiles: int
    k_panels: int
    word_planes: int
    pairs: int
    a_pitch: int
    a_offset: int
    strip_bytes: int
    lowered: int
    chunk_units: int
    split_bytes: int
    line_bytes: int
    worker_bytes: int

    @property
    def follows(self) -> bool:
        """Whether nothing lies between the pixels of two rows or slices, of dy and of x."""
        is_dense = self.block_pixels == self.gather.h.count * self.gather.w.count
        return is_dense and not any(axis.reaches_outside for axis in self.gather)

    @property
    def strips_h(self) -> int:
        return ceil(self.gather.h.count / self.strip_rows)

    @property
    def units(self) -> int:
        """Pairs of a tile of input channels and a tap."""
        return self.c_tiles * len(self.reaches)

    @property
    def chunks(self) -> int:
        return ceil(self.units / self.chunk_units)

    @property
    def sums_offset(self) -> int:
        return self.splits * self.strip_bytes

    @property
    def worker_offset(self) -> int:
        return self.sums_offset + self.splits * self.split_bytes


def _shared(axis: Axis, phases: Phases) -> int:
    """Positions at the end of a lowered row that are 0, as so many at the begin of the next are."""
    total, found = axis.count + phases.more, [phases.more]
    for phase in phases.used:
        first = axis.low + phase
        found += [max(0, -(first // axis.in_step)), max(0, total + (first - axis.in_extent) // axis.in_step)]
    return min(found)


def _planes(
    gather: Gather, rows: Phases, columns: Phases, pitch: int
) -> tuple[tuple[Plane, ...], int, tuple[tuple[int, int], ...]]:
    """(planes, copies of them in words, reaches)."""
    reaches, used = [], set()  # of (plane as depth, row and column, whether odd)
    order = [(t, r, s) for t in sorted(gather.d.taps) for r in sorted(gather.h.taps) for s in sorted(gather.w.taps)]
    for (_, depth), (_, row), (_, column) in order:
        (row_phase, down), (column_phase, right) = rows.place(gather.h, row), columns.place(gather.w, column)
        reach, key = down * pitch + right, (depth, rows.used[row_phase], columns.used[column_phase])
        used.add((*key, reach % 2))
        reaches.append((key, reach))
    numbers = {words: number for number, words in enumerate(sorted(used))}
    keys = sorted({words[:3] for words in used})
    planes = tuple(Plane(*key, numbers.get((*key, 0), -1), numbers.get((*key, 1), -1)) for key in keys)
    return planes, len(numbers), tuple((keys.index(key), reach) for key, reach in reaches)


@lru_cache(maxsize=256)
def plan_of(problem: ConvProblem, config: Config, device: Cpu) -> Plan:
    (gather,) = geometry(replace(problem, op="conv_fwd", epilogue=(), y_layout="")).gathers
    plans = [
        _plan(problem, config, device, gather, rows, columns)
        for rows, columns in product(_ways(gather.h), _ways(gather.w))
    ]
    return min(plans, key=lambda plan: _work_ns(plan, config))


def _ways(axis: Axis) -> list[Phases]:
    ways = [Phases.of(axis)]
    if axis.span >= _FAR_APART * len(axis.taps):
        ways.append(Phases(tuple(sorted(offset - axis.low for _, offset in axis.taps)), 0, apart=True))
    return ways


def _work_ns(plan: Plan, config: Config) -> float:
    """Of a group: for its copies in words, and its products."""
    words = plan.word_planes * plan.pairs * plan.c_tiles * 2 * TILE * COPY_NS
    return plan.strips * (words + plan.steps * plan.k_panels * config.mt * plan.units * PRODUCT_NS)


def _plan(problem: ConvProblem, config: Config, device: Cpu, gather: Gather, rows: Phases, columns: Phases) -> Plan:
    groups, (d, h, w) = problem.groups, gather
    pitch = w.count + columns.more - _shared(w, columns)
    planes, word_planes, reaches = _planes(gather, rows, columns, pitch)
    c_tiles, k_panels = ceil(problem.c // groups / TILE), ceil(problem.k // groups / (TILE * config.mt))
    units, slices, wanted = prod(problem.filter) * c_tiles, problem.n * d.count, device.threads * _TASKS_PER_THREAD
    sums_bytes = groups * k_panels * config.mt * units * TILE_BYTES
    pixel_bytes = 2 * TILE * groups * (word_planes * c_tiles + k_panels * config.mt)
    fits_rows = max(1, int(device.l2_bytes * _STRIP_SHARE) // (pixel_bytes * pitch) - rows.more)
    block_rows = h.count + rows.more - _shared(h, rows)
    # What a thread lowers it multiplies itself, from its own caches, where sums for each are no more than that.
    own = device.threads if sums_bytes <= slices * block_rows * pitch * pixel_bytes else 1
    lowered = groups * (len(planes) * ceil(c_tiles / 2) + ceil(k_panels * config.mt / 2))
    splits = max(1, min(max(own, ceil(wanted / lowered)), _MOST_SUMS_BYTES // sums_bytes))

    if fits_rows < h.count:
        strip_slices, strip_rows = 1, ceil(h.count / ceil(h.count / fits_rows))
    else:
        most, pieces = 1 + (fits_rows - h.count) // block_rows, max(1, h.count * pitch // _LEAST_PIXELS)
        strips = ceil(ceil(slices / most) / splits) * splits
        strip_slices, strip_rows = ceil(slices / strips), ceil(h.count / min(pieces, ceil(splits / slices)))
    strips = ceil(slices / strip_slices) * ceil(h.count / strip_rows)
    steps = ceil(((strip_slices - 1) * block_rows + strip_rows) * pitch / LINE)
    pairs = max(reach for _, reach in reaches) // 2 + TILE * steps
    a_pitch = _LINE_BYTES * ((steps + 1) | 1)
    a_offset = own_pages(word_planes * groups * c_tiles * pairs * _LINE_BYTES)
    strip_bytes = own_pages(a_offset + a_pitch * groups * k_panels * config.mt * TILE)
    splits = min(splits, strips, max(1, _MOST_STRIPS_BYTES // strip_bytes))
    split_strips = ceil(strips / splits)
    splits = ceil(strips / split_strips)
    chunk_units = min(_MOST_UNITS, units // ceil(wanted / (splits * groups * k_panels)))
    line_bytes = whole_lines(4 * pairs + 2) | _LINE_BYTES
    return Plan(
        gather=gather,
        rows=rows,
        columns=columns,
        planes=planes,
        reaches=reaches,
        pitch=pitch,
        block_pixels=block_rows * pitch,
        strip_slices=strip_slices,
        strip_rows=strip_rows,
        strips=strips,
        splits=splits,
        split_strips=split_strips,
        steps=steps,
        c_tiles=c_tiles,
        k_panels=k_panels,
        word_planes=word_planes,
        pairs=pairs,
        a_pitch=a_pitch,
        a_offset=a_offset,
        strip_bytes=strip_bytes,
        lowered=lowered,
        chunk_units=max(config.nt, ceil(chunk_units / config.nt) * config.nt),
        split_bytes=own_pages(sums_bytes),
        line_bytes=line_bytes,
        worker_bytes=own_pages(max(line_bytes * 2 * TILE, 4 * TILE * prod(problem.filter))),
    )


def parameters(problem: ConvProblem, config: Config, plan: Plan) -> tuple[np.ndarray, list[np.ndarray]]:
    """The record that all phases read, and the arrays that it points to."""
    gather, (_, dy, dw) = plan.gather, problem.operands[:3]
    x_n, x_c, x_d, x_h, x_w = tensor_strides((problem.n, problem.c, *spatial3(problem.spatial)), problem.channels_last)
    y_n, y_k, y_d, y_h, y_w = tensor_strides(dy.shape, problem.y_channels_last)
    c_tile_bytes, taps = plan.pairs * _LINE_BYTES, len(plan.reaches)
    plane_bytes = problem.groups * plan.c_tiles * c_tile_bytes
    table = np.array(plan.planes, np.int64)
    words = table[:, 3:]
    taps_at = np.array(
        [words[plane, reach % 2] * plane_bytes + reach // 2 * _LINE_BYTES for plane, reach in plan.reaches], np.int64
    )
    unit_places = (np.arange(plan.c_tiles)[:, None] * c_tile_bytes + taps_at).reshape(-1)
    table[:, 3:] = np.where(words < 0, -1, words * plane_bytes)
    a_offsets = np.arange(plan.steps, dtype=np.int64) * _LINE_BYTES
    shapes, no_offset = tile_shapes(LINE), np.zeros(1, np.int64)
    axes = zip("dhw", gather, strict=True)
    extents = {f"{field}_{name}": value for name, axis in axes for field, value in _of_axis(axis)}
    same = {name: getattr(plan, name) for name in PARAMS.names or () if name != "planes" and hasattr(plan, name)}
    params = filled(
        PARAMS,
        **same | extents,
        x_n=x_n,
        x_c=x_c,
        x_d=x_d,
        x_h=x_h,
        x_w=x_w,
        y_n=y_n,
        y_k=y_k,
        y_d=y_d,
        y_h=y_h,
        y_w=y_w,
        low_h=gather.h.low,
        low_w=gather.w.low,
        more_h=plan.rows.more,
        more_w=plan.columns.more,
        groups=problem.groups,
        c_group=problem.c // problem.groups,
        k_group=problem.k // problem.groups,
        slices=problem.n * gather.d.count,
        reach=max(reach for _, reach in plan.reaches),
        planes=len(plan.planes),
        plane_table=table.ctypes.data,
        c_tile_bytes=c_tile_bytes,
        k_tiles=plan.k_panels * config.mt,
        a_offsets=a_offsets.ctypes.data,
        shapes=shapes.ctypes.data,
        taps=taps,
        unit_places=unit_places.ctypes.data,
        w_k=dw.strides[0],
        w_tap=problem.c // problem.groups if problem.w_channels_last or taps == 1 else 0,
        no_offset=no_offset.ctypes.data,
        read_out=int("beta" in problem.epilogue),
    )
    return params, [params, table, unit_places, a_offsets, shapes, no_offset]


def _of_axis(axis: Axis) -> tuple[tuple[str, int], ...]:
    return ("extent", axis.in_extent), ("count", axis.count), ("step", axis.in_step)
