"""How a Winograd convolution with channels in the lanes is cut up, and the parameters its kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.cook_toom import Filtering, filtering, filtering_of_stride_2
from nbdnn.kernels.cpu.epilogue import is_finished, store_kind
from nbdnn.kernels.cpu.geometry import Axis, Gather, Geometry, gather_values, geometry
from nbdnn.kernels.cpu.lower_channels import LOW_FIELDS
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, record
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_TASKS_PER_THREAD = 4
_STRIP_SHARE = 0.3  # of the second-level cache for one lowered strip
_PRODUCT_SHARE, _ONE_GROUP_SHARE = 0.5, 0.67  # for the products of a group of tiles, over one panel; of the only group
_TILE_SHARE = 0.3  # for the tiles of a group at one xi
_FUSED_SHARE, _U_SHARE = 0.85, 0.3  # for all of a fused step, and for the filters that it transforms and multiplies
_FUSED_BYTES = 4 << 20  # of transformed filters, from which it pays to keep them in second-level cache
_V_BYTES = 12 << 20  # of transformed tiles, which stay in the last-level cache until they are multiplied

FILTER = record(
    *("w_pointer", "c_in", "c_out", "taps_d", "w_g", "w_o", "w_i", "table_t", "table_rs"),
    *("rows", "columns", "channel_step", "taps_adjacent", "u_offset", "u_group_bytes", "u_plane_bytes", "panel_bytes"),
)
PARAMS = record(
    *LOW_FIELDS,
    *("first_strip", "chunk_strips", "first_tile", "chunk_tiles", "group_tiles", "tile_groups"),
    *("tile_rows", "tile_columns", "image_rows", "image_columns", "gap_h", "gap_w"),
    *("load_rows", "load_columns", "product_rows", "product_columns", "channel_offsets", "contiguous", "finished"),
    *("u_offset", "u_group_bytes", "u_plane_bytes", "u_planes", "panels", "panel_bytes", "k_len", "k_step", "filters"),
    *("all_groups", "v_offset", "v_xi_bytes", "v_pitch", "m_xi_bytes", "line_offset"),
)


class Chunk(NamedTuple):
    """Strips that are transformed in one phase and multiplied in the next, counted over (image, depth, strip)."""

    first_strip: int
    strips: int
    first_tile: int
    tiles: int


class Tile(NamedTuple):
    """A method: outputs of a tile along an axis, stride, and its matrices."""

    m: int
    stride: int
    matrices: Filtering

    @property
    def inputs(self) -> int:
        return len(self.matrices.input[0])

    @property
    def products(self) -> int:
        return len(self.matrices.input)

    @property
    def planes(self) -> list[int]:
        """For every product (i, j) the row of the transformed filter it is with, counted over (i, j)."""
        kept = len(self.matrices.filter)
        row = [min(i, kept - 1) for i in range(self.products)]
        return [i * kept + j for i in row for j in row]


def tile_of(m: int, stride: int) -> Tile:
    return Tile(m, stride, filtering(m, 3) if stride == 1 else filtering_of_stride_2(m))


@dataclass(frozen=True)
class Plan:
    """Strips that are lowered, chunks of them, tiles that are multiplied together; byte sizes and offsets.

    Of a dilated filter a tile has every gaps-th row and column, and is followed by the one that begins a pixel further
    on, until the next ones begin where these tiles end.
    """

    geo: Geometry
    tile: Tile
    lowering: Gather
    gaps: tuple[int, int]
    nv: int
    panels: int
    tile_rows: int
    tile_columns: int
    strip_rows: int
    low_rows: int
    low_columns: int
    chunk_strips: int
    group_tiles: int
    k_len: int
    k_step: int
    fused: bool
    u_offset: int
    u_plane_bytes: int
    v_offset: int
    v_pitch: int
    v_xi_bytes: int
    m_xi_bytes: int
    worker_offset: int
    worker_bytes: int
    total_bytes: int

    @property
    def strips(self) -> int:
        return ceil(self.tile_rows / self.strip_rows)

    @property
    def all_strips(self) -> int:
        """Of all images."""
        return self.geo.n * self.lowering.d.count * self.strips

    @property
    def chunk_count(self) -> int:
        return ceil(self.all_strips / self.chunk_strips)

    def tiles_of(self, strips: int) -> int:
        """Of the first strips, as far as there are so many."""
        return self._first_tile(min(strips, self.all_strips))

    @property
    def chunks(self) -> list[Chunk]:
        total = self.all_strips
        firsts = range(0, total, self.chunk_strips)
        tiles = [self._first_tile(first) for first in (*firsts, total)]
        return [
            Chunk(first, min(self.chunk_strips, total - first), tile, after - tile)
            for first, tile, after in zip(firsts, tiles, tiles[1:], strict=False)
        ]

    def _first_tile(self, strip: int) -> int:
        image, within = divmod(strip, self.strips)
        return (image * self.tile_rows + within * self.strip_rows) * self.tile_columns


def _round_up(value: int, multiple: int) -> int:
    return ceil(value / multiple) * multiple


def tiles_along(pixels: int, m: int, gap: int) -> int:
    """Tiles along an axis that have at least one of its pixels."""
    whole, rest = divmod(pixels, m * gap)
    return whole * gap + min(rest, gap)


@lru_cache(maxsize=256)
def plan(problem: ConvProblem, m: int, mr: int, most_vectors: int, device: Cpu) -> Plan:
    geo, tile = geometry(problem), tile_of(m, problem.stride[-1])
    (gather,) = geo.gathers
    acc_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    vl, xis = device.vector_bytes // acc_bytes, tile.products**2
    vectors = max(1, ceil(geo.c_out / vl))
    panels = ceil(vectors / most_vectors)
    nv = ceil(vectors / panels)
    gap_h, gap_w = problem.dilation[-2:]
    tile_rows, tile_columns = tiles_along(gather.h.count, m, gap_h), tiles_along(gather.w.count, m, gap_w)
    step, k_len = m * tile.stride, geo.c_in * len(gather.d.taps)
    beyond = tile.inputs - step  # rows that a tile shares with the next
    low_columns = _round_up(tile_columns, gap_w) * step + beyond * gap_w
    row_bytes = max(1, len(gather.d.taps) * low_columns * geo.c_in * acc_bytes)
    fits = max(1, (int(device.l2_bytes * _STRIP_SHARE) // row_bytes - beyond * gap_h) // step)
    wanted = device.threads * _TASKS_PER_THREAD
    strips = min(tile_rows, max(ceil(tile_rows / fits), ceil(wanted / (geo.n * geo.groups * gather.d.count))))
    strip_rows = _round_up(ceil(tile_rows / strips), gap_h)
    low_rows = strip_rows * step + beyond * gap_h

    v_pitch = _round_up(k_len + vl - 1, vl) * acc_bytes
    total_strips = geo.n * gather.d.count * ceil(tile_rows / strip_rows)
    fit = max(1, _V_BYTES // max(1, geo.groups * strip_rows * tile_columns * xis * v_pitch))
    chunk_strips = ceil(total_strips / ceil(total_strips / min(total_strips, fit)))
    tiles = chunk_strips * strip_rows * tile_columns
    lanes_bytes = nv * vl * acc_bytes
    most = min(
        int(device.l2_bytes * _PRODUCT_SHARE) // (xis * lanes_bytes),
        max(4 * mr, int(device.l2_bytes * _TILE_SHARE) // v_pitch),
    )
    if tiles * xis * lanes_bytes <= device.l2_bytes * _ONE_GROUP_SHARE:
        most = tiles
    groups = max(ceil(tiles / max(mr, most)), min(ceil(wanted / (geo.groups * panels)), tiles // (4 * mr)))
    group_tiles = ceil(tiles / max(1, groups))

    # A cache line more than the data a plane, or all planes would fall into the same cache sets.
    v_xi_bytes = geo.groups * tiles * v_pitch + 64
    m_xi_bytes = _round_up(group_tiles, mr) * lanes_bytes + 64
    u_plane_bytes = panels * k_len * lanes_bytes + 64
    kept = len(tile.matrices.filter) ** 2
    fused = tiles <= group_tiles and total_strips <= chunk_strips and geo.groups * kept * u_plane_bytes > _FUSED_BYTES
    k_step = geo.c_in
    if fused:
        room = min(int(device.l2_bytes * _U_SHARE), int(device.l2_bytes * _FUSED_SHARE) - xis * m_xi_bytes)
        k_step = max(vl, room // (kept * lanes_bytes) // vl * vl)
        u_plane_bytes = k_step * lanes_bytes + 64
    # Behind the products: m rows of a run of pixels, and one of them turned.
    run_pixels = max(m, vl)
    products = xis * m_xi_bytes + (m * run_pixels + vl) * lanes_bytes
    u_offset = _round_up(products, 64) if fused else 0
    if fused:
        products = u_offset + kept * u_plane_bytes
    low = _round_up(row_bytes * low_rows + 2 * device.vector_bytes, 64)
    worker = own_pages(max(products, low))
    v_offset = 0 if fused else _round_up(geo.groups * kept * u_plane_bytes, 64)
    worker_offset = own_pages(v_offset + xis * v_xi_bytes)
    lowering = Gather(
        gather.d, replace(gather.h, in_step=step, count=tile_rows), replace(gather.w, in_step=step, count=tile_columns)
    )
    return Plan(
        geo, tile, lowering, (gap_h, gap_w), nv, panels,
        tile_rows, tile_columns, strip_rows, low_rows, low_columns, chunk_strips, group_tiles, k_len, k_step,
        fused, u_offset, u_plane_bytes, v_offset, v_pitch, v_xi_bytes, m_xi_bytes,
        worker_offset, worker, worker_offset + device.threads * worker,
    )  # fmt: skip


def filter_parameters(problem: ConvProblem, plan: Plan, vl: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """(ctx of the filter's transform, the arrays that it needs alive)."""
    geo = plan.geo
    (gather,), acc_bytes = geo.gathers, ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    w_g, w_o, w_i, w_t, w_r, w_s = geo.w_strides
    rows, columns = (np.array(_by_offset(axis), np.int64) for axis in gather[1:])
    adjacent = w_i != 1 and w_o != 1  # then the taps lie side by side
    vector_bytes = vl * acc_bytes
    tables = {
        "table_t": np.array([tap * w_t for tap, _ in gather.d.taps], np.int64),
        "table_rs": (rows[:, None] * w_r + columns * w_s).reshape(-1),
        "rows": (rows * 3 if adjacent else np.arange(3) * 3 * vl) * vector_bytes,
        "columns": (columns if adjacent else np.arange(3) * vl) * vector_bytes,
    }
    ctx = filled(
        FILTER,
        **{name: table.ctypes.data for name, table in tables.items()},
        w_pointer=geo.w_pointer,
        c_in=geo.c_in,
        c_out=geo.c_out,
        taps_d=len(gather.d.taps),
        w_g=w_g,
        w_o=w_o,
        w_i=w_i,
        channel_step=(9 if adjacent else 1) * vector_bytes,
        taps_adjacent=int(adjacent),
        u_offset=0,
        u_group_bytes=len(plan.tile.matrices.filter) ** 2 * plan.u_plane_bytes,
        u_plane_bytes=plan.u_plane_bytes,
        panel_bytes=plan.k_len * plan.nv * vl * acc_bytes,
    )
    return ctx, list(tables.values())


def tile_parameters(
    problem: ConvProblem, plan: Plan, vl: int, chunk: Chunk, filters: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """(ctx of one chunk, the arrays that it needs alive)."""
    geo, tile, acc_bytes = plan.geo, plan.tile, ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    (gather,) = geo.gathers
    pixel_bytes, products, (gap_h, gap_w) = geo.c_in * acc_bytes, np.arange(tile.products), plan.gaps
    kind = store_kind(problem, geo.out_strides[2] == 1 or geo.out_strides[5] == gap_w == 1)
    tile_groups = ceil(chunk.tiles / plan.group_tiles)
    tables = {
        "depth_offsets": np.array([offset for _, offset in gather.d.taps], np.int64),
        "load_rows": np.arange(tile.inputs) * gap_h * plan.low_columns * pixel_bytes,
        "load_columns": np.arange(tile.inputs) * gap_w * pixel_bytes,
        "product_rows": products * tile.products * plan.m_xi_bytes,
        "product_columns": products * plan.m_xi_bytes,
        "channel_offsets": np.arange(geo.c_out, dtype=np.int64) * geo.out_strides[2],
        "u_planes": np.array(tile.planes, np.int64),
    }
    ctx = filled(
        PARAMS,
        **gather_values(problem, geo, plan.lowering),
        **{name: table.ctypes.data for name, table in tables.items()},
        strips=plan.strips,
        strip_rows=plan.strip_rows,
        shared=0,
        low_h=gather.h.low,
        low_w=gather.w.low,
        low_rows=plan.low_rows,
        low_columns=plan.low_columns,
        strip_offset=plan.worker_offset,
        strip_bytes=plan.worker_bytes,
        first_strip=chunk.first_strip,
        chunk_strips=chunk.strips,
        first_tile=chunk.first_tile,
        chunk_tiles=chunk.tiles,
        tile_columns=plan.tile_columns,
        tile_rows=plan.tile_rows,
        image_rows=gather.h.count,
        image_columns=gather.w.count,
        gap_h=gap_h,
        gap_w=gap_w,
        group_tiles=plan.group_tiles,
        tile_groups=tile_groups,
        # A worker finds in its caches what it transformed itself.
        all_groups=geo.groups * tile_groups if plan.u_plane_bytes > plan.v_xi_bytes else 0,
        contiguous=kind,
        finished=int(kind == 1 and is_finished(problem)),
        filters=filters.ctypes.data,
        u_offset=plan.u_offset,
        u_plane_bytes=plan.u_plane_bytes,
        k_step=plan.k_step,
        u_group_bytes=len(tile.matrices.filter) ** 2 * plan.u_plane_bytes,
        panels=plan.panels,
        panel_bytes=plan.k_len * plan.nv * vl * acc_bytes,
        k_len=plan.k_len,
        v_offset=plan.v_offset,
        v_xi_bytes=plan.v_xi_bytes,
        v_pitch=plan.v_pitch,
        m_xi_bytes=plan.m_xi_bytes,
        line_offset=tile.products**2 * plan.m_xi_bytes,
    )
    return ctx, list(tables.values())


def _by_offset(axis: Axis) -> list[int]:
    """Taps in the order of the input they read."""
    return [tap for tap, _ in sorted(axis.taps, key=lambda pair: pair[1])]
