"""The words of pooling from plane to plane: what stands in for `ptx_pool_rolling`, `ptx_pool_taps`,
`ptx_pool_marching` and `ptx_pool_cells`, value by value."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import product
from math import inf, nan
from typing import Any

from emulated import Block

from nbdnn.kernels.cuda.pool_axes import Axis
from nbdnn.kernels.cuda.pool_marching_plan import NO_TAP as NONE
from nbdnn.kernels.cuda.pool_marching_plan import Variant, cells_of
from nbdnn.kernels.cuda.pool_rolling_plan import NO_TAP, PADDING, Box, Line, Shared, fields_of

_FIRST_NAN = 0x7F800001


def _places(box: Box, planes: int, rows: int) -> Iterator[int | None]:
    """Where each element is, plane by plane; None outside."""
    for plane in range(planes):
        for row in range(rows):
            inside = 0 <= box.d + plane < box.extent_d and box.rows >> row & 1
            yield box.at + plane * box.step_d + row * box.step_h if inside else None


def _key(value: float, rank: int) -> int:
    if value != value:
        return _FIRST_NAN + rank
    (bits,) = struct.unpack("=i", struct.pack("=f", value + 0.0))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


def _first(values: list[int]) -> int:
    return values.index(max(values))


def _packed(taps: int, numbers: list[int]) -> list[int]:
    bits, of_word = fields_of(taps)
    parts = (numbers[first : first + of_word] for first in range(0, len(numbers), of_word))
    return [sum(number << i * bits for i, number in enumerate(part)) for part in parts]


def _number(words: list[int], taps: int, row: int) -> int:
    bits, of_word = fields_of(taps)
    return words[row // of_word] >> row % of_word * bits & (1 << bits) - 1


class RollingWords:
    """Stands in for `ptx_pool_rolling`."""

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._words = block, words

    @staticmethod
    def rows_inside(rows: int) -> Callable:
        return lambda first, extent: sum(1 << row for row in range(rows) if 0 <= first + row < extent)

    def load(self, dtype: str, planes: int, rows: int) -> Callable:
        nothing = 0.0 if dtype == "f32" else 0
        return lambda box: [nothing if at is None else box.data[at] for at in _places(box, planes, rows)]

    def store(self, dtype: str, planes: int, rows: int) -> Callable:
        narrow = self._words.NARROW[dtype]

        def store(box: Box, values: list[float]) -> None:
            for at, value in zip(_places(box, planes, rows), values, strict=True):
                if at is not None:
                    box.data[at] = narrow(value)  # type: ignore[index]

        return store

    def keys(self, dtype: str, planes: int, rows: int, apart: int) -> Callable:
        widen = self._words.WIDEN[dtype]

        def keys(box: Box, elements: list, rank: int) -> list[int]:
            assert rank >= 0
            places = enumerate(zip(_places(box, planes, rows), elements, strict=True))
            return [PADDING if at is None else _key(widen(element), rank + i * apart) for i, (at, element) in places]

        return keys

    def put(self, count: int, row_bytes: int, is_float: bool = False) -> Callable:
        def put(address: int, values: list) -> None:
            assert len(values) == count
            for row, value in enumerate(values):
                self._block.shared[self._block.place_of(address + row * row_bytes, 1)] = value

        return put

    @staticmethod
    def repeated(count: int, value: int) -> Callable:
        return lambda: [value] * count


class TapWords:
    """Stands in for `ptx_pool_taps`."""

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._words = block, words

    def _get(self, address: int) -> Any:
        """A word as an int32, or a float."""
        word = self._block.shared[self._block.place_of(address, 1)]
        return self._words.INTEGER[32](word) if type(word) is int else word

    def find_along(self, axis: Axis, planes: int, line: Line, shared: Shared) -> Callable:
        def find(address: int, wanted: bool, own: list[int]) -> tuple[list[int], list[int]]:
            largest, words = [], []
            for plane in range(planes):
                numbers = []
                for row in range(line.positions):
                    at = address + (plane * line.positions + row) * shared.row_bytes
                    keys = [self._get(at + tap * shared.step_bytes) for tap in range(axis.taps)]
                    if wanted and shared.own_tap >= 0:
                        assert keys[shared.own_tap] == own[plane * line.positions + row]
                    largest.append(max(keys))
                    if 0 <= row + line.first_position < line.outputs:
                        numbers.append(_first(keys))
                words += _packed(axis.taps, numbers) if wanted else [NO_TAP] * shared.words
            return largest, words

        return find

    def give_along(self, axis: Axis, planes: int, line: Line, shared: Shared) -> Callable:
        def give(
            sums: int, window: int, tap: int, windows: int, nowhere: int, own_sums: list, own_words: list
        ) -> list[float]:
            at = sums + nowhere * shared.step_bytes + planes * line.outputs * shared.row_bytes
            assert all(self._get(at + i * shared.row_bytes) == NO_TAP for i in range(len(own_words)))
            totals = [0.0] * (planes * line.outputs)
            for there, number in zip(range(window, -1, -1), range(tap, axis.taps, axis.stride), strict=False):
                if there >= windows:
                    continue
                step = there * shared.step_bytes
                for plane in range(planes):
                    first = planes * line.outputs + plane * shared.words
                    of_plane = range(first, first + shared.words)
                    found = [self._get(sums + step + i * shared.row_bytes) for i in of_plane]
                    for row in range(line.outputs):
                        at = plane * line.outputs + row
                        if _number(found, axis.taps, row) == number:
                            totals[at] += self._get(sums + step + at * shared.row_bytes)
            return totals

        return give

    @staticmethod
    def find_across(axis: Axis, planes: int, line: Line) -> Callable:
        def find(rows: list[int]) -> tuple[list[int], list[int]]:
            largest, words = [], []
            for first in range(0, planes * line.positions, line.positions):
                numbers = []
                for window in range(line.windows):
                    taps = line.taps_of(axis, window)
                    keys = [rows[first + row] for _, row in taps]
                    largest.append(max(keys))
                    numbers.append(taps[_first(keys)][0])
                words += _packed(axis.taps, numbers)
            return largest, words

        return find

    @staticmethod
    def give_across(axis: Axis, planes: int, line: Line) -> Callable:
        of_plane = line.words_of(axis.taps)

        def give(sums: list[float], words: list[int]) -> list[float]:
            totals = [0.0] * (planes * line.outputs)
            for plane in range(planes):
                for window in range(line.windows):
                    tap = _number(words[plane * of_plane :], axis.taps, window)
                    row = dict(line.taps_of(axis, window)).get(tap, -1) + line.first_position
                    if 0 <= row < line.outputs:
                        totals[plane * line.outputs + row] += sums[plane * line.windows + window]
            return totals

        return give

    def give_depths(self, dtype: str, axis: Axis, windows: int) -> Callable:
        before, widen = max(0, axis.taps - axis.stride) * windows, self._words.WIDEN[dtype]

        def give(keys_held: list[int], sums_held: list[float], keys_come: list[int], dy: list) -> tuple:
            keys, sums = [*keys_held[:before], *keys_come], [*sums_held[:before], *[0.0] * len(keys_come)]
            for window, share in enumerate(dy):
                sums[window + windows * _first(keys[window::windows])] += widen(share)
            end = axis.stride * windows
            return sums[:end], keys[end:], sums[end:]

        return give

    @staticmethod
    def queue(axis: Axis, words: int) -> Callable:
        before, end = max(0, axis.taps - axis.stride) * words, axis.stride * words

        def shift(held: list[int], come: list[int]) -> tuple[list[int], list[int]]:
            every = [*held[:before], *come]
            return every[:end], every[end:]

        return shift


class MarchingWords:
    """Stands in for `ptx_pool_marching` and `ptx_pool_cells`: vectors are lists of elements, or of their numbers."""

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._words = block, words

    def _elements(self, v: Variant, words: list) -> list[float]:
        if v.dtype == "f32":
            return words
        return [self._words.WIDEN[v.dtype](word >> shift & 0xFFFF) for word in words for shift in (0, 16)]

    def _store(self, v: Variant, data: Any, at: int, values: list[float]) -> None:
        words = [self._words.NARROW[v.dtype](value) for value in values]
        if v.dtype != "f32":
            words = [low | high << 16 for low, high in zip(words[::2], words[1::2], strict=True)]
        data.store(at, words)

    @staticmethod
    def bits_inside(rows: int, columns: int) -> Callable:
        def inside(row: int, height: int, column: int, width: int) -> int:
            places = enumerate(product(range(row, row + rows), range(column, column + columns)))
            return sum(1 << i for i, (h, w) in places if 0 <= h < height and 0 <= w < width)

        return inside

    @staticmethod
    def first_tap(dtype: str) -> Callable:
        return lambda bits: (bits & -bits).bit_length() - 1 if bits else NONE

    def load_planes(self, v: Variant, begin: int, end: int) -> Callable:
        taps = list(product(range(v.axes[1].taps), range(v.axes[2].taps)))

        def load(x: Any, at: int, first: int, least: int, extent: int, bits: int, *steps: int) -> list:
            found = []
            for plane, _ in v.planes_met[begin:end]:
                for i, (row, column) in enumerate(taps):
                    wanted = least <= first + plane < extent and bits >> i & 1
                    place = at + plane * steps[0] + row * steps[1] + column * steps[2]
                    found.append(self._elements(v, x.load(place, v.words)) if wanted else [-inf] * v.lanes)
            return found

        return load

    def load_vector(self, v: Variant) -> Callable:
        return lambda data, at, wanted: self._elements(v, data.load(at, v.words)) if wanted else [0.0] * v.lanes

    def store_cell(self, v: Variant) -> Callable:
        depth, rows, columns = (range(axis.stride) for axis in v.axes)

        def store(dx: Any, at: int, first: int, extent: int, bits: int, *rest: Any) -> None:
            *steps, given = rest
            for (plane, row, column), values in zip(product(depth, rows, columns), given, strict=True):
                if first + plane < extent and bits >> row * len(columns) + column & 1:
                    self._store(v, dx, at + plane * steps[0] + row * steps[1] + column * steps[2], values)

        return store

    @staticmethod
    def no_windows(v: Variant) -> Callable:
        return lambda: [[]] * v.held

    @staticmethod
    def find_step(v: Variant) -> Callable:
        """Windows that have begun are lists of all their elements with their numbers."""

        def find(ahead: list, others: list, held: list, first: int, plane: int) -> tuple[list[int], list]:
            taps = ahead + others
            windows: dict[int, list] = {i: list(each) for i, each in enumerate(held)}
            for i, (place, met) in enumerate(v.planes_met):
                of_plane = taps[i * v.taps_of_plane : (i + 1) * v.taps_of_plane]
                for window, tap in met:
                    numbered = [(tap * v.taps_of_plane + number, each) for number, each in enumerate(of_plane)]
                    is_there = plane + place >= 0 and first != NONE
                    windows.setdefault(window, []).extend(numbered[first:] if is_there else [])
            chosen = []
            for lane in range(v.lanes):
                best = NONE, -inf
                for number, values in windows.get(0, []):
                    value = values[lane]
                    is_nan = best[1] != best[1]
                    if value != value or (not is_nan and (value > best[1] or best[0] == NONE)):
                        best = number, value
                chosen.append(best[0])
            return chosen, [windows.get(i + 1, []) for i in range(v.held)]

        return find

    @staticmethod
    def slots(v: Variant) -> Callable:
        return lambda first: tuple(first + i * v.shared_bytes // v.slots for i in range(v.slots))

    def put(self, v: Variant) -> Callable:
        def put(address: int, numbers: list[int], dy: list[float], wanted: bool) -> None:
            of_word = v.lanes // v.words
            for offset, values in ((0, numbers if wanted else [NONE] * v.lanes), (v.half_bytes, dy)):
                at = self._block.place_of(address + offset, v.words)
                for i in range(v.words):
                    of_elements: Any = tuple(values[i * of_word : (i + 1) * of_word])
                    self._block.shared[at + i] = of_elements

        return put

    def give(self, v: Variant) -> Callable:
        cells, vector_bytes = [cells_of(axis) for axis in v.axes], 4 * v.words

        def get(address: int) -> list:
            at = self._block.place_of(address, v.words)
            words = self._block.shared[at : at + v.words]
            assert nan not in words, "reads what was not written"
            return [each for word in words for each in word]  # type: ignore[union-attr]

        def give(slots: tuple[int, ...], place: int) -> list[list[float]]:
            totals = []
            for element in product(*(range(axis.stride) for axis in v.axes)):
                total = [0.0] * v.lanes
                for window in product(*(range(each.windows) for each in cells)):
                    tap = tuple(
                        at + axis.pad - (of_axis.first + number) * axis.stride
                        for at, number, axis, of_axis in zip(element, window, v.axes, cells, strict=True)
                    )
                    if all(0 <= at < axis.taps for at, axis in zip(tap, v.axes, strict=True)):
                        wanted = (tap[0] * v.axes[1].taps + tap[1]) * v.axes[2].taps + tap[2]
                        where = slots[window[0]] + place
                        where += (window[1] * v.windows_w + window[2]) * v.vectors * vector_bytes
                        for lane, (number, share) in enumerate(zip(get(where), get(where + v.half_bytes), strict=True)):
                            total[lane] += share if number == wanted else 0.0
                totals.append(total)
            return totals

        return give
