"""What the kernel of depthwise filter gradients is compiled for and told: tiles of dy, roles of threads, splits.

A thread sums a few taps of a channel or vector of channels over its tiles: all of 3x3; of larger filters a row, or 8
taps of one. These are its role. Source: own.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3
from nbdnn.kernels.cuda import depthwise_plan as plan
from nbdnn.kernels.cuda.depthwise_plan import THREADS, Axis
from nbdnn.kernels.cuda.depthwise_tile import Tile
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_PIECE = 8  # taps of a filter row that a thread sums
_BLOCK_ROLES = 8  # rows or pieces of a filter in a block, at most
_MOST_KEPT = 132  # registers that a thread holds by name: 136 were spilled in 3-D
_MOST_PLANAR = 200  # held and loaded by a thread of planes: 209 were spilled
_TILES = ((4, 4), (2, 4), (1, 4), (4, 2), (6, 2), (1, 7), (1, 8))


class Variant(NamedTuple):
    """What the first kernel is compiled for: rows and columns have the taps that one thread sums.

    team: threads that add the sums of one tap of a block.
    """

    dtype: str
    x_last: bool
    y_last: bool
    lanes: int
    tile: Tile
    rows: Axis
    columns: Axis
    team: int
    bits: int

    @property
    def width(self) -> int:
        """Sums of a tap in a thread."""
        return self.lanes if self.y_last else 1

    @property
    def sums(self) -> int:
        return self.rows.taps * self.columns.taps * self.width

    @property
    def row(self) -> plan.Row:
        """What a row of x is multiplied with: (element of a row of dy, of the row of x, tap)."""
        return plan.row(plan.reaches(True, self.columns, self.tile.columns), self.lanes, self.y_last)

    @property
    def reaches(self) -> list[plan.Reach]:
        """Of the rows of taps."""
        return plan.reaches(True, self.rows, self.tile.rows)

    @property
    def positions(self) -> list[int]:
        """Rows of x."""
        return sorted({reach.position for reach in self.reaches})

    @property
    def steps(self):
        """For `ptx_vector_rows.Rows`: each row of x with every row of dy that a tap takes there."""
        reaches, row = self.reaches, self.row
        of_dy, of_taps = self.tile.columns * self.width, self.columns.taps * self.width
        return tuple(
            (
                position,
                tuple(
                    (reach.tap * of_taps + k, j, reach.output * of_dy + i)
                    for reach in reaches
                    if reach.position == position
                    for i, j, k in row.products
                ),
                (),
            )
            for position in self.positions
        )

    @property
    def held(self) -> plan.Held:
        """Sums, dy and two rows of x, if there are two."""
        dy, vector = prod(self.tile) * self.width, plan.vector_registers(self.dtype, self.lanes)
        met, offsets = len(self.positions), len(self.row.offsets)
        inputs = min(2, met) * offsets * self.lanes
        loaded = vector * (dy // self.lanes + met * offsets)
        return plan.Held(self.sums + dy + inputs, loaded)

    @property
    def lines(self) -> int:
        """Lines of the cache that a planar warp meets for a tile."""
        of_x, of_dy = len(self.positions) * len(self.row.offsets), prod(self.tile) // self.lanes
        itemsize, apart = ITEMSIZE[self.dtype], self.tile.columns
        x, dy = plan.lines_met(of_x, apart * self.columns.stride, itemsize), plan.lines_met(of_dy, apart, itemsize)
        return 0 if self.x_last or self.y_last else x + dy

    @property
    def instructions(self) -> float:
        """Of a thread and tile, about."""
        widening = 0 if self.dtype == "f32" else self.lanes
        row, products = self.row, len(self.reaches)
        loads = prod(self.tile) * self.width / self.lanes + len(self.positions) * len(row.offsets)
        waiting = 1.0 if self.rows.taps > 1 else 2.0  # the few products of a row are waited for
        return waiting * (loads * (3 + widening) + products * len(row.products)) + 40


class Sums(NamedTuple):
    """The integers of the first kernel.

    tiles of dy, tiles_h x tiles_w of a plane, are split into runs of `chunk`. A block takes one of `slabs` slabs of
    `vectors` vectors of channels and `block_roles` of `roles` roles: one of role_w pieces of one of role_h groups of
    rows of a depth tap of the filter; of both there are `cells`.
    """

    tiles: int
    tiles_h: int
    tiles_w: int
    chunk: int
    splits: int
    slabs: int
    vectors: int
    block_tiles: int
    role_blocks: int
    block_roles: int
    cells: int
    roles: int
    role_h: int
    role_w: int
    k: int
    group_k: int
    out_d: int
    out_h: int
    out_w: int
    y_n: int
    y_c: int
    y_d: int
    y_h: int
    y_w: int
    x_n: int
    x_c: int
    x_d: int
    x_h: int
    x_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    taps: int
    taps_h: int
    taps_w: int
    stride_d: int
    pad_d: int
    dilation_d: int


class Reciprocals(NamedTuple):
    """What `ptx.split` takes of the divisors among them: multipliers and shifts."""

    slabs: int
    slabs_shift: int
    role_blocks: int
    role_blocks_shift: int
    cells: int
    cells_shift: int
    vectors: int
    vectors_shift: int
    role_w: int
    role_w_shift: int
    role_h: int
    role_h_shift: int
    tiles_w: int
    tiles_w_shift: int
    tiles_h: int
    tiles_h_shift: int
    out_d: int
    out_d_shift: int
    group_k: int
    group_k_shift: int


def _lanes(problem: ConvProblem) -> int:
    return plan.vector_lanes(problem, 4 if problem.y_channels_last else 8)


@lru_cache(maxsize=256)
def variants(problem: ConvProblem) -> tuple[Variant, ...]:
    """Every tile whose sums and rows fit into registers; where none does, the smallest."""
    _, rows, columns = plan.axes(problem)
    lanes, last = _lanes(problem), problem.y_channels_last
    taps_w = min(columns.taps, _PIECE)
    all_rows = rows.taps * taps_w * (lanes if last else 1) <= plan.REGISTER_TAPS
    held_rows, unit = rows._replace(taps=rows.taps if all_rows else 1), 1 if last else lanes

    def variant(tile_h: int, tile_w: int) -> Variant:
        tile = Tile(tile_h, ceil(tile_w / unit) * unit)
        taken = (problem.dtype, problem.channels_last, last, lanes, tile, held_rows, columns._replace(taps=taps_w))
        return Variant(*taken, 1, 32)

    every = [variant(*tile) for tile in _TILES if tile[0] == 1 or all_rows]
    fitting = [
        v
        for v in every
        if v.held.fits
        and v.held.kept <= _MOST_KEPT
        and (last or sum(v.held) <= _MOST_PLANAR)
        and v.instructions <= plan.MOST_PRODUCTS
    ]
    return tuple(dict.fromkeys(fitting)) or (variant(1, 1),)


def sums(problem: ConvProblem, v: Variant, config: Tile, device: Gpu) -> Sums:
    x, dy, _ = problem.operands
    depth, rows, columns = plan.axes(problem)
    out_d, out_h, out_w = spatial3(problem.out_spatial)
    tiles_h, tiles_w = ceil(out_h / config.rows), ceil(out_w / config.columns)
    tiles = problem.n * out_d * tiles_h * tiles_w
    role_h, role_w = rows.taps // v.rows.taps, ceil(columns.taps / v.columns.taps)
    roles = depth.taps * role_h * role_w
    block_roles = ceil(roles / ceil(roles / _BLOCK_ROLES))
    vectors = plan.vectors_a_block(problem.k // v.lanes, 16 if block_roles == 1 else 8) if v.y_last else 1
    slabs, role_blocks = ceil(problem.k / (vectors * v.width)), ceil(roles / block_roles)
    block_tiles = THREADS // (vectors * block_roles)
    blocks = max(1, v.held.min_blocks * device.sms // (slabs * role_blocks))
    chunk = max(1, ceil(tiles / blocks), min(block_tiles, tiles))
    return Sums(
        tiles=tiles,
        tiles_h=tiles_h,
        tiles_w=tiles_w,
        chunk=chunk,
        splits=max(1, ceil(tiles / chunk)),
        slabs=slabs,
        vectors=vectors,
        block_tiles=block_tiles,
        role_blocks=role_blocks,
        block_roles=block_roles,
        cells=block_roles * vectors,
        roles=roles,
        role_h=role_h,
        role_w=role_w,
        k=problem.k,
        group_k=problem.k // problem.c,
        out_d=out_d,
        out_h=out_h,
        out_w=out_w,
        **plan.strides("y", dy.shape, problem.y_channels_last),
        **plan.strides("x", x.shape, problem.channels_last),
        **dict(zip(("extent_d", "extent_h", "extent_w"), spatial3(problem.spatial), strict=True)),
        taps=prod(problem.filter),
        taps_h=rows.taps,
        taps_w=columns.taps,
        stride_d=depth.stride,
        pad_d=depth.pad,
        dilation_d=depth.dilation,
    )
