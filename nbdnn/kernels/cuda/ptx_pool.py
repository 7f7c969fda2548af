"""Tiles of pooling as straight code: which elements meet is known when a kernel is compiled, so no index is left.

A tile is a box of outputs in one thread's registers; channels-last each of them is a vector of channels, planar a row
of them is. Rows of the input are loaded in turn by whole vectors, joined along each window's columns and then to what
the rows before came to, so that windows which overlap share both the loads and the columns.

    pool      y[p] joins x[p*u + r - pad]                                     maxima, sums
    spread    dx[i] adds dy[p] / count[p] of the windows p that cover i

Gradients of maxima are in `ptx_pool_maxima`.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_axes import LOWEST, Variant, covers, reaches
from nbdnn.kernels.cuda.ptx import F32
from nbdnn.kernels.cuda.ptx_pool_maxima import find, match
from nbdnn.kernels.cuda.ptx_pool_vector import joined, loaded, loaded_pairs
from nbdnn.kernels.cuda.ptx_vector import store_vector


class Box(NamedTuple):
    """A tensor and where a tile begins in it: element (d, h, w) of the tile is data[at + d*step_d + ...]."""

    data: object
    at: int
    d: int
    h: int
    w: int
    step_d: int
    step_h: int
    step_w: int
    extent_d: int
    extent_h: int
    extent_w: int


class Tensor:
    """A box while code is made for it."""

    def __init__(self, builder, value, type_, v: Variant, lanes: int) -> None:
        self._builder, self._v, self._lanes = builder, v, lanes
        self._of = {name: builder.extract_value(value, i) for i, name in enumerate(type_.fields)}
        self._guards: dict[tuple[str, int], ir.Value] = {}

    def position(self, axis: str, offset: int):
        """Of the tile's element `offset` along an axis, in the tensor."""
        first = self._of[axis]
        return self._builder.add(first, first.type(offset), flags=["nsw"])

    def before(self, axis: str, offset: int):
        """Whether that is before the beginning of the axis."""
        position = self.position(axis, offset)
        return self._builder.icmp_signed("<", position, position.type(0))

    def extent(self, axis: str):
        return self._of[f"extent_{axis}"]

    def _inside(self, axis: str, offset: int):
        if (axis, offset) not in self._guards:
            inside = self._builder.icmp_unsigned("<", self.position(axis, offset), self.extent(axis))
            self._guards[axis, offset] = inside
        return self._guards[axis, offset]

    def _vector(self, offsets: tuple[int, int, int]):
        """(pointer to the vector there, whether it is inside)."""
        builder, of = self._builder, self._of
        index = of["at"]
        for axis, offset in zip("dhw", offsets, strict=True):
            step = of[f"step_{axis}"]
            index = builder.add(index, builder.mul(step.type(offset), step, flags=["nsw"]), flags=["nsw"])
        inside = builder.and_(self._inside("d", offsets[0]), self._inside("h", offsets[1]))
        return builder.gep(of["data"], [index]), builder.and_(inside, self._inside("w", offsets[2]))

    def row(
        self, d: int, h: int, columns: list[int], otherwise: int, *, now: bool = False, pairs: bool = False
    ) -> dict[int, list]:
        """By column the elements there: a vector of channels, or planar one element. now: the loads begin here, where
        else they may be moved. pairs: words of two elements."""
        lanes, cells, load = self._lanes, {}, loaded_pairs if pairs else loaded
        starts = columns if self._v.channels_last else sorted({column // lanes * lanes for column in columns})
        for start in starts:
            where, inside = self._vector((d, h, start))
            how = {"once": self._v.once, "constant": not now}
            values = load(self._builder, where, inside, self._v.dtype, lanes, otherwise, **how)
            if self._v.channels_last:
                cells[start] = values
            else:
                cells |= {start + lane: [value] for lane, value in enumerate(values)}
        return cells

    def store_row(self, d: int, h: int, cells: list[list], *, pairs: bool = False) -> None:
        """The elements of the tile's row, by column. pairs: words of two, as a float32 is a word."""
        lanes, dtype = 1 if self._v.channels_last else self._lanes, "f32" if pairs else self._v.dtype
        for start in range(0, len(cells), lanes):
            where, inside = self._vector((d, h, start))
            values = [value for cell in cells[start : start + lanes] for value in cell]
            store_vector(self._builder, where, inside, dtype, values)


class _Scales:
    """What the sums of windows are multiplied by, a factor for the rows and one for the columns; None for 1."""

    def __init__(self, builder, v: Variant, image: Tensor) -> None:
        self._builder, self._v, self._image = builder, v, image
        self._known: dict[tuple, ir.Value] = {}

    def scaled(self, cell: list, d: int, h: int, w: int) -> list:
        """A cell of window (d, h, w), or of its share."""
        for scale in (self._rows(d, h), self._columns(w)):
            cell = cell if scale is None else [self._builder.fmul(value, scale) for value in cell]
        return cell

    def _rows(self, d: int, h: int):
        if self._v.mode == "average_exc_pad":
            return self._reciprocal((0, d), (1, h))
        taps = 1
        for axis in self._v.axes:
            taps *= axis.taps
        return F32(1.0 / taps) if self._v.mode == "average_inc_pad" else None

    def _columns(self, w: int):
        return self._reciprocal((2, w)) if self._v.mode == "average_exc_pad" else None

    def _reciprocal(self, *windows: tuple[int, int]):
        """1 over the elements of windows along axes that are inside of the image; 1 where there are none."""
        if windows not in self._known:
            builder, product_ = self._builder, None
            for number, window in windows:
                inside = self._inside(number, window)
                product_ = inside if product_ is None else builder.mul(product_, inside)
            self._known[windows] = builder.fdiv(F32(1.0), builder.sitofp(product_, F32))
        return self._known[windows]

    def _inside(self, number: int, window: int):
        builder, axis, name = self._builder, self._v.axes[number], "dhw"[number]
        start = self._image.position(name, window * axis.stride - axis.pad)
        end, extent, zero = builder.add(start, start.type(axis.taps)), self._image.extent(name), start.type(0)
        start = builder.select(builder.icmp_signed(">", start, zero), start, zero)
        end = builder.select(builder.icmp_signed("<", end, extent), end, extent)
        count, one = builder.sub(end, start), start.type(1)
        return builder.select(builder.icmp_signed(">", count, one), count, one)


def _gathered(builder, v: Variant, source: Tensor, target: Tensor, image: Tensor) -> None:
    """pool and spread: outputs join what they reach."""
    forward = v.op == "pool_fwd"
    reached = reaches if forward else covers
    depths, rows, columns = (reached(axis, extent) for axis, extent in zip(v.axes, v.tile.extents, strict=True))
    scales, otherwise = _Scales(builder, v, image), LOWEST[v.dtype] if v.is_max else 0
    sums: dict[tuple[int, int, int], list] = {}
    needed = sorted({column for _, column in columns})
    of_row: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (out_d, d), (out_h, h) in product(depths, rows):
        of_row.setdefault((d, h), []).append((out_d, out_h))
    last = {out: place for place in sorted(of_row) for out in of_row[place]}
    for (d, h), outs in sorted(of_row.items()):
        cells = source.row(d, h, needed, otherwise)
        if not forward:
            cells = {w: scales.scaled(cell, d, h, w) for w, cell in cells.items()}
        along: dict[int, list] = {}
        for out_w, w in columns:
            along[out_w] = joined(builder, v.is_max, along.get(out_w), cells[w])
        for out_d, out_h in outs:
            for out_w in range(v.tile.columns):
                place = out_d, out_h, out_w
                if out_w in along:
                    sums[place] = joined(builder, v.is_max, sums.get(place), along[out_w])
            if last[out_d, out_h] == (d, h):
                _finish_row(builder, v, target, scales if forward else None, sums, out_d, out_h)
    for out_d, out_h in product(range(v.tile.depth), range(v.tile.rows)):
        if (out_d, out_h) not in last:
            _finish_row(builder, v, target, None, sums, out_d, out_h)


def _finish_row(builder, v: Variant, target: Tensor, scales: _Scales | None, sums: dict, d: int, h: int) -> None:
    """Scale a row of sums, if they are, and store it; zeros where no window reaches."""
    cells = []
    for w in range(v.tile.columns):
        cell = sums.pop((d, h, w), [F32(0.0)] * v.cell_lanes)
        if scales is not None and not v.is_max:
            cell = scales.scaled(cell, d, h, w)
        cells.append(cell)
    target.store_row(d, h, cells)


@cache
def tile(v: Variant):
    """Intrinsic (boxes): (x, y) forward, (dy, dx) of a sum, (x, y, dy, dx) of a maximum. Loads, computes and stores; if
    it reads y, returns whether it did not store, since y has a NaN or an infinity."""

    @intrinsic
    def compute(typingctx, boxes):
        def codegen(context, builder, sig, args):
            def tensor(place: int, lanes: int) -> Tensor:
                return Tensor(builder, builder.extract_value(args[0], place), sig.args[0][place], v, lanes)

            if v.op == "pool_fwd":
                x = tensor(0, v.lanes_x)
                _gathered(builder, v, x, tensor(1, v.lanes_y), x)
            elif not v.is_max:
                dx = tensor(1, v.lanes_x)
                _gathered(builder, v, tensor(0, v.lanes_y), dx, dx)
            else:
                x, y, dy, dx = (tensor(place, v.lanes_y if place in (1, 2) else v.lanes_x) for place in range(4))
                if v.tile.reads_y:
                    return match(builder, v, x, y, dy, dx)
                find(builder, v, x, dy, dx)
            return context.get_dummy_value()

        return signature(types.boolean if v.tile.reads_y else types.none, boxes), codegen

    return compute
