"""Gradients of maxima as straight code: each output of a tile of dx adds dy of the windows that it is the maximum of.

    find      each window's maximum is found again from x
    match     it is the first of the window that equals y

By find the position of a maximum is a number of the tile's own; a tap in the padding is -inf, and the first tap behind
the padding takes over even from -inf, so that an image of -inf has its gradient where it belongs.

By match a window goes through its taps, up to the last one in the tile, until one equals y. NaN stands for the padding,
which nothing equals; where y has a NaN itself, nothing is stored and the caller does it. Where registers are left x is
asked for before that is known: no load is moved before a branch. Channels-last, 16-bit elements are compared in pairs.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from llvmlite import ir

from nbdnn.kernels.cuda.pool_axes import LOWEST, NO_NUMBER, Variant, in_tile, rows_met, taps_met, windows_met
from nbdnn.kernels.cuda.ptx import F32, I32, asm, unpacked
from nbdnn.kernels.cuda.ptx_vector import narrowed, widened
from nbdnn.problem import ITEMSIZE

if TYPE_CHECKING:
    from nbdnn.kernels.cuda.ptx_pool import Tensor

_AHEAD_WORDS = 64  # registers of what may be loaded before it is known whether y has a NaN


class _Maximum(NamedTuple):
    """Lane by lane: the largest so far and its number in the tile."""

    values: list
    numbers: list


def _larger(builder, found: _Maximum | None, other: _Maximum, takes_over) -> _Maximum:
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
    return _Maximum(values, numbers)


def _both(builder, a, b):
    """Of two conditions, of which None is never true and True always."""
    if a is None or b is None:
        return None
    return b if a is True else a if b is True else builder.and_(a, b)


def find(builder, v: Variant, image: Tensor, dy: Tensor, dx: Tensor) -> None:
    """Outputs add the gradients of the windows that they are the maximum of."""
    windows = windows_met(v)

    def padding(number: int, window: int, tap: int):
        """Whether the taps of a window before `tap` are all before the image: True where there are none."""
        if tap == 0:
            return True
        axis = v.axes[number]
        before = window * axis.stride - axis.pad + tap - 1
        return image.before("dhw"[number], before) if before < 0 else None

    depths, rows, columns = (taps_met(axis, line) for axis, line in zip(v.axes, windows, strict=True))
    numbers = {place: i for i, place in enumerate(product(depths, rows, columns))}
    maxima: dict[tuple, _Maximum] = {}
    totals: dict[tuple, list] = {}
    for d, h in product(depths, rows):
        cells = image.row(d, h, list(columns), LOWEST[v.dtype])
        along: dict[int, _Maximum] = {}
        for w in list(columns):
            here = _Maximum(cells[w], [I32(numbers[d, h, w])] * v.cell_lanes)
            for window, tap in columns[w]:
                along[window] = _larger(builder, along.get(window), here, padding(2, window, tap))
        for (window_d, tap_d), (window_h, tap_h) in product(depths[d], rows[h]):
            takes_over = _both(builder, padding(0, window_d, tap_d), padding(1, window_h, tap_h))
            for window_w in windows[2]:
                place = window_d, window_h, window_w
                maxima[place] = _larger(builder, maxima.get(place), along[window_w], takes_over)
            if (tap_d, tap_h) == (v.axes[0].taps - 1, v.axes[1].taps - 1):
                _give(builder, v, dy, (window_d, window_h), windows[2], maxima, numbers, totals)
    for d, h in product(range(v.tile.depth), range(v.tile.rows)):
        dx.store_row(d, h, [totals.get((d, h, w), [F32(0.0)] * v.cell_lanes) for w in range(v.tile.columns)])


def _give(builder, v: Variant, dy: Tensor, line: tuple[int, int], windows, maxima, numbers, totals) -> None:
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


def match(builder, v: Variant, image: Tensor, y: Tensor, dy: Tensor, dx: Tensor):
    """Outputs add the gradients of the windows whose y they are the first to equal. Whether y has a NaN or an infinity:
    then nothing was stored."""
    windows = windows_met(v)
    rows = rows_met(v)
    reached = {row: sorted({w for line in met.values() for w in line}) for row, met in rows.items()}
    most = {line: y.row(*line, windows[2], 0, now=True, pairs=v.pairs) for line in product(windows[0], windows[1])}
    images, gradients, words = {}, {}, sum(_words(v, cells) for cells in most.values())
    for row in rows:
        if v.ahead and words < _AHEAD_WORDS:
            images[row] = image.row(*row, reached[row], NO_NUMBER, now=True, pairs=v.pairs)
            words += _words(v, images[row])
    has_nan = _has_nan(builder, v, most)
    with builder.if_then(builder.not_(has_nan), likely=True):
        for row, met in rows.items():
            cells = images.pop(row) if row in images else image.row(*row, reached[row], NO_NUMBER, pairs=v.pairs)
            shares: dict[int, list[list]] = {}
            for window, columns in met.items():
                line, wanted = window[:2], [w for w in columns if in_tile(v, (*row, w))]
                if wanted and line not in gradients:
                    gradients[line] = dy.row(*line, windows[2], 0, pairs=v.pairs)
                for lane, value in enumerate(most[line][window[2]]):
                    taps = {w: cells[w][lane] for w in columns}
                    given = [shares.setdefault(w, [[] for _ in cells[w]])[lane] for w in wanted]
                    gradient = gradients[line][window[2]][lane] if wanted else None
                    share = _share_pairs if v.pairs else _share
                    most[line][window[2]][lane] = share(builder, v.dtype, taps, wanted, value, gradient, given)
            if in_tile(v, (*row, 0)):
                cells_of_dx = [_total(builder, v, shares.get(w, [])) for w in range(v.tile.columns)]
                dx.store_row(*row, cells_of_dx, pairs=v.pairs)
        for row in product(range(v.tile.depth), range(v.tile.rows)):
            if row not in rows:  # between windows that lie apart
                dx.store_row(*row, [_total(builder, v, [])] * v.tile.columns, pairs=v.pairs)
    return has_nan


def _words(v: Variant, cells: dict[int, list]) -> int:
    """Registers of loaded elements, as they come from memory."""
    return sum(len(cell) * (4 if v.pairs else ITEMSIZE[v.dtype]) for cell in cells.values()) // 4


def _has_nan(builder, v: Variant, most: dict[tuple[int, int], dict[int, list]]):
    """Whether there is a NaN or an infinity: 0 times either is NaN, and stays. The units that multiply have time."""
    values = [value for cells in most.values() for cell in cells.values() for value in cell]
    if not v.pairs:
        products = F32(0.0)
        for value in values:
            products = asm(builder, F32, "fma.rn.f32 $0, $1, 0f00000000, $2;", "=f,f,f", [value, products])
        return builder.fcmp_unordered("uno", products, products)
    products = I32(0)
    for value in values:
        text = f"fma.rn.{v.dtype}x2 $0, $1, $2, $3;"
        products = asm(builder, I32, text, "=r,r,r,r", [value, I32(0), products])
    low, high = widened(builder, v.dtype, [products])
    return builder.fcmp_unordered("uno", low, high)


def _share(builder, dtype: str, taps: dict[int, Any], wanted: list[int], y, dy, given: list[list]):
    """Adds dy to what the wanted columns were given where a tap of a row is the window's first to equal y. Returns y
    for the next row, NaN once it was met. Of a comparison both it and its contrary are predicates, together with that
    none was equal before."""
    count, lines = len(wanted), [".reg .pred hit, unmet;"]
    # $0 to $count: sums and y; then what they were, dy and the taps.
    of_y, of_dy = f"${count}", f"${2 * count + 2}"
    for i, column in enumerate(taps):
        before, unmet = (".and", ", unmet") if i else ("", "")
        equal = f"${2 * count + 3 + i}, {of_y}{unmet};"
        if column in wanted:
            total = f"${wanted.index(column)}"
            lines += [f"setp.eq{before}.f32 hit|unmet, {equal}", f"@hit add.f32 {total}, {total}, {of_dy};"]
        else:
            lines.append(f"setp.neu{before}.f32 unmet, {equal}")
    lines.append(f"@!unmet mov.b32 {of_y}, 0f7FFFFFFF;")
    sums = [each[0] if each else F32(0.0) for each in given]
    results = F32 if not count else ir.LiteralStructType([F32] * (count + 1))
    constraints = [*["=&f"] * (count + 1), *map(str, range(count + 1)), *["f"] * (1 + len(taps))]
    operands = [*sums, y, F32(0.0) if dy is None else dy, *taps.values()]
    found = asm(builder, results, f"{{ {' '.join(lines)} }}", ",".join(constraints), operands)
    *totals, y = unpacked(builder, found, count + 1) if count else [found]
    for each, total in zip(given, totals, strict=True):
        each[:] = [total]
    return y


def _share_pairs(builder, dtype: str, taps: dict[int, Any], wanted: list[int], y, dy, given: list[list]):
    """The same of two elements: words that have dy's bits where a tap is the first to equal y, else zeros."""
    shares = dict(zip(wanted, given, strict=True))
    for column, tap in taps.items():
        equal = asm(builder, I32, f"set.eq.u32.{dtype}x2 $0, $1, $2;", "=r,r,r", [tap, y])
        if column in shares:
            shares[column].append(builder.and_(equal, dy))
        y = builder.or_(y, equal)
    return y


def _total(builder, v: Variant, shares: list[list]) -> list:
    """By lane the sum of what a place was given, rounded once."""
    if not shares:
        return [I32(0)] * (v.cell_lanes // 2) if v.pairs else [F32(0.0)] * v.cell_lanes
    return [pair_sum(builder, v.dtype, each) if v.pairs else each[0] for each in shares]


def pair_sum(builder, dtype: str, words: list):
    """Of words of two elements, rounded once."""
    if len(words) <= 2:
        return words[0] if len(words) == 1 else asm(builder, I32, f"add.rn.{dtype}x2 $0, $1, $2;", "=r,r,r", words)
    totals = widened(builder, dtype, words[:1])
    for word in words[1:]:
        totals = [builder.fadd(a, b) for a, b in zip(totals, widened(builder, dtype, [word]), strict=True)]
    return narrowed(builder, dtype, totals)[0]
