"""Products of rows with packed matrices, as recurrent networks have them, and the packing.

    y[m, j] = sum over k of  x[m, k] * w[k, j]              m: rows, equally far apart; k: neighbours in a row

w is packed into panels of nv vectors of columns, [panel][k][nv * vl], zeros beyond the last column, in the compute
type. A register tile has mr rows or mr - 1: rows are shared out evenly, so that no tile has fewer. Sums in float32
(float64), in the order of k. Source: own, after `conv_pointwise.py`.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numba.core.ccallback import CFunc

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.launch import FEW_ELEMS, Phase
from nbdnn.kernels.cpu.micro_kernel import pixel_tile
from nbdnn.kernels.cpu.rnn_program import Place, address_of, place_fields, place_values
from nbdnn.kernels.cpu.rows import convert_row, zero_fill
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import call_task, filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

# Rows of a register tile for 1, 2, ... vectors of columns: mr*nv + nv + 1 of 32 vector registers, or of 16.
_ROWS = {"avx512": (14, 12, 8, 6, 4, 4, 3, 2), "other": (12, 6, 4, 2, 2)}
_BLOCK_ROWS = 96  # of a task: for so many a panel is read once
_TASKS_PER_THREAD = 4

PRODUCT = record("x", "x_step", "k_len", "w", "y", "y_step", "rows", "columns")
_MULTIPLY = record(
    *place_fields("x", "w", "y"),
    *("x_step", "y_step", "k_len", "rows", "columns", "blocks", "group_columns", "panel_columns", "panel_bytes"),
    *("item_bytes", "product"),
)
_TURN = record(*place_fields("w", "to"), "table", "gates", "k_len", "hidden", "unit_vectors", "chunks", "chunk_panels")
_COPY = record(
    *place_fields("w", "to"),
    *("table", "blocks", "block_rows", "row_length", "pitch", "panels", "first_row", "k_len"),
)


class Tile(NamedTuple):
    """mr rows by nv vectors of vl columns in registers."""

    mr: int
    nv: int
    vl: int
    compute: str

    @property
    def columns(self) -> int:
        return self.nv * self.vl

    def panel_elems(self, k_len: int) -> int:
        return k_len * self.columns

    def address(self) -> int:
        """Of the compiled task that multiplies with it: its arguments are the address of a PRODUCT."""
        address = _product_task(self.compute, self.mr, self.nv, self.vl).address
        assert address is not None
        return address


def tile_for(vectors: int, rows: int, compute: str, device: Cpu) -> Tile:
    """The tile for rows of so many vectors of columns: nv divides their number."""
    return _tile([nv for nv in range(1, vectors + 1) if vectors % nv == 0], rows, compute, device)


def tile_of_columns(columns: int, rows: int, compute: str, device: Cpu) -> Tile:
    """The tile for rows of so many columns, of which the last panel may lack some."""
    vectors = ceil(columns / device.lanes(compute))
    fewest_empty = sorted(range(1, 5), key=lambda nv: (ceil(vectors / nv) * nv, -nv))
    return _tile(fewest_empty[:1], rows, compute, device)


def _tile(widths: list[int], rows: int, compute: str, device: Cpu) -> Tile:
    """Of these numbers of vectors the one with the most sums in registers, then with the most rows."""
    most = _ROWS.get(device.isa, _ROWS["other"])

    def even(nv: int) -> int:
        return ceil(rows / ceil(rows / most[nv - 1]))

    nv = max((nv for nv in widths if nv <= len(most)), key=lambda nv: (even(nv) * nv, even(nv)))
    return Tile(even(nv), nv, device.lanes(compute), compute)


@cache
def _product_task(compute: str, mr: int, nv: int, vl: int) -> CFunc:
    """A task whose arguments are the address of a PRODUCT: every row by every panel."""
    full, short = pixel_tile(compute, mr, nv, vl), pixel_tile(compute, max(1, mr - 1), nv, vl)
    at, width, width_bytes = struct(PRODUCT), nv * vl, nv * vl * ITEMSIZE[compute]

    def multiply(args, ctx, index, worker):
        f = at(args)
        tiles = (f.rows + mr - 1) // mr
        least, longer = f.rows // tiles, f.rows % tiles  # tiles of `least` rows, the first `longer` of one more
        for panel in range((f.columns + width - 1) // width):
            w, lanes = f.w + panel * f.k_len * width_bytes, min(width, f.columns - panel * width)
            x, y = f.x, f.y + panel * width_bytes
            for i in range(tiles):
                count = least + (i < longer)
                if count == mr:
                    full(x, f.x_step, f.k_len, w, y, f.y_step, lanes, 0)
                else:
                    short(x, f.x_step, f.k_len, w, y, f.y_step, lanes, 0)
                x += count * f.x_step
                y += count * f.y_step

    return compile_task(multiply, (compute, mr, nv, vl))


@cache
def _multiply_task():
    """A block of rows by a group of panels: index = group * blocks + block."""
    at, find, product, room = struct(_MULTIPLY), address_of(), struct(PRODUCT), stack(PRODUCT.itemsize)

    def multiply_block(args, ctx, index, worker):
        f, address = at(ctx), room()
        p, block, column = product(address), index % f.blocks, index // f.blocks * f.group_columns
        first, end = block * f.rows // f.blocks, (block + 1) * f.rows // f.blocks
        p.x = find(args, f.x_operand, f.x_offset) + first * f.x_step
        p.w = find(args, f.w_operand, f.w_offset) + column // f.panel_columns * f.panel_bytes
        p.y = find(args, f.y_operand, f.y_offset) + first * f.y_step + column * f.item_bytes
        p.x_step, p.y_step, p.k_len, p.rows = f.x_step, f.y_step, f.k_len, end - first
        p.columns = min(f.group_columns, f.columns - column)
        call_task(f.product, address, 0, 0, 0)

    return compile_task(multiply_block, ())


def _blocks(rows: int, device: Cpu) -> int:
    """As many for each thread, where there are more than threads."""
    blocks = max(1, ceil(rows / _BLOCK_ROWS))
    return blocks if blocks < device.threads else ceil(blocks / device.threads) * device.threads


def block_rows(rows: int, device: Cpu) -> int:
    """The most rows of a task's block, where blocks share them evenly."""
    return ceil(rows / _blocks(rows, device))


def multiplied(
    x: Place, w: Place, y: Place, tile: Tile, rows: int, k_len: int, columns: int, pitches: tuple[int, int], device: Cpu
) -> Phase:
    """Rows of x by a packed matrix; pitches of x and y in elements. The tile is one for `block_rows`."""
    item, blocks, panels = ITEMSIZE[tile.compute], _blocks(rows, device), ceil(columns / tile.columns)
    groups = min(panels, ceil(device.threads * _TASKS_PER_THREAD / blocks))
    group_panels = ceil(panels / groups)
    ctx = filled(
        _MULTIPLY,
        **place_values(x=x, w=w, y=y),
        x_step=pitches[0] * item,
        y_step=pitches[1] * item,
        k_len=k_len,
        rows=rows,
        columns=columns,
        blocks=blocks,
        group_columns=group_panels * tile.columns,
        panel_columns=tile.columns,
        panel_bytes=tile.panel_elems(k_len) * item,
        item_bytes=item,
        product=tile.address(),
    )
    alone = rows * k_len * columns < FEW_ELEMS
    return Phase(_multiply_task(), blocks * ceil(panels / group_panels), ctx, alone)


@cache
def _turn_task(dtype: str, nv: int, vl: int):
    """A panel whose columns are rows of matrices: index counts directions, chunks of units, and their panels."""
    compute = DEFAULT_COMPUTE[dtype]
    at, find, i64 = struct(_TURN), address_of(), pointer("i64")
    turn, fill, item, acc = transpose(dtype, compute, vl), zero_fill(compute), ITEMSIZE[dtype], ITEMSIZE[compute]

    def turn_panel(args, ctx, index, worker):
        f = at(ctx)
        chunk, panel = index // f.chunk_panels, index % f.chunk_panels
        w = find(args, f.w_operand, f.w_offset)
        for v in range(nv):
            to = find(args, f.to_operand, f.to_offset) + (index * f.k_len * nv + v) * vl * acc
            vector = panel * nv + v
            gate = vector // f.unit_vectors
            unit = (chunk % f.chunks * f.unit_vectors + vector % f.unit_vectors) * vl
            count = min(vl, f.hidden - unit)
            if count < vl:
                for k in range(f.k_len):
                    fill(to + k * nv * vl * acc, vl)
            if count > 0:
                start = w + (i64(f.table)[chunk // f.chunks * f.gates + gate] + unit * f.k_len) * item
                turn(to, nv * vl * acc, start, f.k_len * item, count, f.k_len)

    return compile_task(turn_panel, (dtype, nv, vl))


def turned(
    w: Place, to: Place, offsets: np.ndarray, k_len: int, hidden: int, chunks: int, unit_vectors: int, tile: Tile
) -> Phase:
    """Pack matrices (hidden, k_len) at `offsets` (directions, gates): columns are [direction][chunk][gate][unit].

    Chunks are of so many vectors of units.
    """
    directions, gates = offsets.shape
    chunk_panels = gates * unit_vectors // tile.nv
    ctx = filled(
        _TURN,
        **place_values(w=w, to=to),
        table=offsets.ctypes.data,
        gates=gates,
        k_len=k_len,
        hidden=hidden,
        unit_vectors=unit_vectors,
        chunks=chunks,
        chunk_panels=chunk_panels,
    )
    alone = offsets.size * k_len * hidden < FEW_ELEMS
    return Phase(_turn_task(w.dtype, tile.nv, tile.vl), directions * chunks * chunk_panels, ctx, alone)


@cache
def _copy_task(dtype: str, width: int, vl: int):
    """A panel of neighbouring columns: index counts directions and their panels."""
    compute = DEFAULT_COMPUTE[dtype]
    at, find, i64 = struct(_COPY), address_of(), pointer("i64")
    convert, fill, item, acc = convert_row(dtype, compute, vl), zero_fill(compute), ITEMSIZE[dtype], ITEMSIZE[compute]

    def copy_panel(args, ctx, index, worker):
        f = at(ctx)
        direction, first = index // f.panels, index % f.panels * width
        w, count = find(args, f.w_operand, f.w_offset), min(width, f.row_length - first)
        to = find(args, f.to_operand, f.to_offset) + (index * f.k_len + f.first_row) * width * acc
        for block in range(f.blocks):
            start = i64(f.table)[direction * f.blocks + block]
            there = count if start >= 0 else 0
            for row in range(f.block_rows):
                if there < width:
                    fill(to, width)
                if there > 0:
                    convert(to, w + (start + row * f.pitch + first) * item, there)
                to += width * acc

    return compile_task(copy_panel, (dtype, width, vl))


class Rows(NamedTuple):
    """Blocks of `block_rows` rows of `length` elements, `pitch` apart, at `offsets` (directions, blocks; -1: zeros)."""

    place: Place
    offsets: np.ndarray
    block_rows: int
    length: int
    pitch: int


def copied(rows: Rows, to: Place, panels: int, tile: Tile, first_row: int = 0, k_len: int | None = None) -> Phase:
    """Pack rows from k = first_row on: of each direction so many panels of k_len rows, default as many as there are."""
    directions, blocks = rows.offsets.shape
    ctx = filled(
        _COPY,
        **place_values(w=rows.place, to=to),
        table=rows.offsets.ctypes.data,
        blocks=blocks,
        block_rows=rows.block_rows,
        row_length=rows.length,
        pitch=rows.pitch,
        panels=panels,
        first_row=first_row,
        k_len=blocks * rows.block_rows if k_len is None else k_len,
    )
    alone = rows.offsets.size * rows.block_rows * rows.length < FEW_ELEMS
    return Phase(_copy_task(rows.place.dtype, tile.columns, tile.vl), directions * panels, ctx, alone)
