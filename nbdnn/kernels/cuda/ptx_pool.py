"""Tiles of pooling as straight code: which elements meet is known when a kernel is compiled, so no index is left.

A tile is a box of outputs in one thread's registers; channels-last each of them is a vector of channels, planar a row
of them is. Rows of the input are loaded in turn by whole vectors, joined along each window's columns and then to what
the rows before came to, so that windows which overlap share both the loads and the columns.

    pool      y[p] joins x[p*u + r - pad]                                     maxima, sums
    spread    dx[i] adds dy[p] / count[p] of the windows p that cover i
    find      dx[i] adds dy[p] of the windows p whose first maximum is at i   each found again from x
    match     the same, for the first that equals y[p]

The position of a maximum is a number of the tile's own; a tap in the padding is -inf, and the first tap behind the
padding takes over even from -inf, so that an image of -inf has its gradient where it belongs.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.pool_axes import LOWEST, NO_NUMBER, Variant, covers, reaches, taps_met
from nbdnn.kernels.cuda.ptx import F32, I32, asm
from nbdnn.kernels.cuda.ptx_pool_vector import joined, loaded
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


class _Tensor:
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

    def row(self, d: int, h: int, columns: list[int], otherwise: int) -> dict[int, list]:
        """By column the elements there: a vector of channels, or planar one element."""
        lanes, cells = self._lanes, {}
        starts = columns if self._v.channels_last else sorted({column // lanes * lanes for column in columns})
        for start in starts:
            where, inside = self._vector((d, h, start))
            values = loaded(self._builder, where, inside, self._v.dtype, lanes, otherwise, once=self._v.once)
            if self._v.channels_last:
                cells[start] = values
            else:
                cells |= {start + lane: [value] for lane, value in enumerate(values)}
        return cells

    def store_row(self, d: int, h: int, cells: list[list]) -> None:
        """The elements of the tile's row, by column."""
        lanes = 1 if self._v.channels_last else self._lanes
        for start in range(0, len(cells), lanes):
            where, inside = self._vector((d, h, start))
            values = [value for cell in cells[start : start + lanes] for value in cell]
            store_vector(self._builder, where, inside, self._v.dtype, values)


class _Scales:
    """What the sums of windows are multiplied by, a factor for the rows and one for the columns; None for 1."""

    def __init__(self, builder, v: Variant, image: _Tensor) -> None:
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


def _gathered(builder, v: Variant, source: _Tensor, target: _Tensor, image: _Tensor) -> None:
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


def _finish_row(builder, v: Variant, target: _Tensor, scales: _Scales | None, sums: dict, d: int, h: int) -> None:
    """Scale a row of sums, if they are, and store it; zeros where no window reaches."""
    cells = []
    for w in range(v.tile.columns):
        cell = sums.pop((d, h, w), [F32(0.0)] * v.cell_lanes)
        if scales is not None and not v.is_max:
            cell = scales.scaled(cell, d, h, w)
        cells.append(cell)
    target.store_row(d, h, cells)


class Maximum(NamedTuple):
    """Lane by lane: the largest so far and its number in the tile."""

    values: list
    numbers: list


def larger(builder, found: Maximum | None, other: Maximum, takes_over) -> Maximum:
    """The later one where it is larger or NaN, or where all before it were padding."""
    if found is None:
        return other
    values, numbers = [], []
    for before, after, number, later in zip(found.values, other.values, found.numbers, other.numbers, strict=True):
        better = builder.or_(builder.fcmp_ordered(">", after, before), builder.fcmp_unordered("uno", after, after))
        if takes_over is not None:
            better = builder.or_(better, takes_over)
        values.append(builder.select(better, after, before))
        numbers.append(builder.select(better, later, number))
    return Maximum(values, numbers)


def both(builder, a, b):
    """Of two conditions, of which None is never true and True always."""
    if a is None or b is None:
        return None
    return b if a is True else a if b is True else builder.and_(a, b)


def _windows(v: Variant) -> list[list[int]]:
    """The windows that cover a tile of dx, axis by axis."""
    return [sorted({w for _, w in covers(axis, extent)}) for axis, extent in zip(v.axes, v.tile.extents, strict=True)]


def _found(builder, v: Variant, image: _Tensor, dy: _Tensor, dx: _Tensor) -> None:
    """find: outputs add the gradients of the windows that they are the maximum of."""
    windows = _windows(v)

    def padding(number: int, window: int, tap: int):
        """Whether the taps of a window before `tap` are all before the image: True where there are none."""
        if tap == 0:
            return True
        axis = v.axes[number]
        before = window * axis.stride - axis.pad + tap - 1
        return image.before("dhw"[number], before) if before < 0 else None

    depths, rows, columns = (taps_met(axis, line) for axis, line in zip(v.axes, windows, strict=True))
    numbers = {place: i for i, place in enumerate(product(depths, rows, columns))}
    maxima: dict[tuple, Maximum] = {}
    totals: dict[tuple, list] = {}
    for d, h in product(depths, rows):
        cells = image.row(d, h, list(columns), LOWEST[v.dtype])
        along: dict[int, Maximum] = {}
        for w in list(columns):
            here = Maximum(cells[w], [I32(numbers[d, h, w])] * v.cell_lanes)
            for window, tap in columns[w]:
                along[window] = larger(builder, along.get(window), here, padding(2, window, tap))
        for (window_d, tap_d), (window_h, tap_h) in product(depths[d], rows[h]):
            takes_over = both(builder, padding(0, window_d, tap_d), padding(1, window_h, tap_h))
            for window_w in windows[2]:
                place = window_d, window_h, window_w
                maxima[place] = larger(builder, maxima.get(place), along[window_w], takes_over)
            if (tap_d, tap_h) == (v.axes[0].taps - 1, v.axes[1].taps - 1):
                _give(builder, v, dy, (window_d, window_h), windows[2], maxima, numbers, totals)
    for d, h in product(range(v.tile.depth), range(v.tile.rows)):
        dx.store_row(d, h, [totals.get((d, h, w), [F32(0.0)] * v.cell_lanes) for w in range(v.tile.columns)])


def _give(builder, v: Variant, dy: _Tensor, line: tuple[int, int], windows, maxima, numbers, totals) -> None:
    """The gradients of a line of windows to those of the tile's outputs that are their maxima."""
    gradients = dy.row(*line, windows, 0)
    for window in windows:
        found = maxima.pop((*line, window))
        spans = [
            range(max(0, w * axis.stride - axis.pad), min(extent, w * axis.stride - axis.pad + axis.taps))
            for w, axis, extent in zip((*line, window), v.axes, v.tile.extents, strict=True)
        ]
        for place in product(*spans):
            number, before = I32(numbers[place]), totals.get(place)
            given = []
            for lane, (at, gradient) in enumerate(zip(found.numbers, gradients[window], strict=True)):
                share = builder.select(builder.icmp_signed("==", at, number), gradient, F32(0.0))
                given.append(share if before is None else builder.fadd(before[lane], share))
            totals[place] = given


def _matched(builder, v: Variant, image: _Tensor, maxima: dict, dy: _Tensor, dx: _Tensor) -> None:
    """match: what equals y first gets dy. NaN stands for the padding, and for y once it was met: nothing equals it."""
    windows = _windows(v)
    met = [taps_met(axis, line) for axis, line in zip(v.axes, windows, strict=True)]

    def in_tile(place: tuple) -> bool:
        return all(0 <= at < extent for at, extent in zip(place, v.tile.extents, strict=True))

    def covering(place: tuple) -> list[tuple]:
        return list(product(*([window for window, _ in axis[at]] for axis, at in zip(met, place, strict=True))))

    # Of each window the last tap in the tile: nobody asks for those behind it.
    last = {window: place for place in product(*met) if in_tile(place) for window in covering(place)}
    gradients: dict[tuple, dict[int, list]] = {}
    for d, h in product(met[0], met[1]):
        steps = [(w, window) for w in met[2] for window in covering((d, h, w)) if (d, h, w) <= last[window]]
        cells = image.row(d, h, sorted({w for w, _ in steps}), NO_NUMBER)
        totals = {w: [F32(0.0)] * v.cell_lanes for w in range(v.tile.columns)}
        for w, window in steps:
            wanted, line = in_tile((d, h, w)), window[:2]
            if wanted and line not in gradients:
                gradients[line] = dy.row(line[0], line[1], windows[2], 0)
            for lane, value in enumerate(cells[w]):
                most = maxima[window][lane]
                if wanted:
                    gradient = gradients[line][window[2]][lane]
                    totals[w][lane] = _added_where_equal(builder, totals[w][lane], value, most, gradient)
                if (d, h, w) != last[window]:
                    maxima[window][lane] = _met(builder, value, most)
        if in_tile((d, h, 0)):
            dx.store_row(d, h, [totals[w] for w in range(v.tile.columns)])
    for d, h in product(range(v.tile.depth), range(v.tile.rows)):
        if d not in met[0] or h not in met[1]:  # between windows that lie apart
            dx.store_row(d, h, [[F32(0.0)] * v.cell_lanes] * v.tile.columns)


def _added_where_equal(builder, total, value, most, gradient):
    """total, to which the gradient is added where value is most."""
    text = "{ .reg .pred hit; setp.eq.f32 hit, $2, $3; @hit add.f32 $0, $0, $4; }"
    return asm(builder, F32, text, "=f,0,f,f,f", [total, value, most, gradient])


def _met(builder, value, most):
    """most, or NaN where value is it."""
    text = "{ .reg .pred hit; setp.eq.f32 hit, $2, $0; @hit mov.b32 $0, 0f7FFFFFFF; }"
    return asm(builder, F32, text, "=f,0,f", [most, value])


@cache
def tile(v: Variant):
    """Intrinsic (boxes): (x, y) forward, (dy, dx) of a sum, (x, y, dy, dx) of a maximum. Loads, computes and stores."""

    @intrinsic
    def compute(typingctx, boxes):
        def codegen(context, builder, sig, args):
            def tensor(place: int, lanes: int) -> _Tensor:
                return _Tensor(builder, builder.extract_value(args[0], place), sig.args[0][place], v, lanes)

            if v.op == "pool_fwd":
                x = tensor(0, v.lanes_x)
                _gathered(builder, v, x, tensor(1, v.lanes_y), x)
            elif not v.is_max:
                dx = tensor(1, v.lanes_x)
                _gathered(builder, v, tensor(0, v.lanes_y), dx, dx)
            else:
                _maxima_gradient(builder, v, tensor)
            return context.get_dummy_value()

        return signature(types.none, boxes), codegen

    return compute


def _maxima_gradient(builder, v: Variant, tensor) -> None:
    """By match, where y is to be read and has no NaN here; else by find."""

    def operands(*places: int) -> list[_Tensor]:
        return [tensor(place, v.lanes_y if place in (1, 2) else v.lanes_x) for place in places]

    if not v.tile.reads_y:
        _found(builder, v, *operands(0, 2, 3))
        return
    (y,), windows, is_nan = operands(1), _windows(v), ir.IntType(1)(0)
    maxima = {}
    for d, h in product(windows[0], windows[1]):
        cells = y.row(d, h, windows[2], 0)
        for w in windows[2]:
            maxima[d, h, w] = list(cells[w])
            for most in cells[w]:
                is_nan = builder.or_(is_nan, builder.fcmp_unordered("uno", most, most))
    with builder.if_else(is_nan, likely=False) as (with_nan, without):
        with with_nan:
            _found(builder, v, *operands(0, 2, 3))
        with without:
            x, dy, dx = operands(0, 2, 3)
            _matched(builder, v, x, maxima, dy, dx)
