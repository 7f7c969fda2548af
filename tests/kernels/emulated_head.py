"""The words of kernels for few channels of outputs: what stands in for `ptx_head`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulated import float_of


class HeadWords:
    def __init__(self, words: Any) -> None:
        self._words = words

    def row_products(
        self, dtype: str, tiles_m: int, groups: int, halves: int, group_bytes: int, transposed: bool
    ) -> Callable:
        words, pairs = self._words, [min(first, groups - 2) for first in range(0, groups, 2)]
        firsts = list(range(groups)) if halves == 2 else pairs
        load = words.load_matrices_at(tuple((0, first * group_bytes) for first in firsts), transposed)
        multiply = words.multiply_tile(dtype, tiles_m, groups)

        def products(sums: tuple, filters: int, pixels: int) -> tuple:
            loaded = load(pixels)
            b = {}  # by group and half
            for i, first in enumerate(firsts):
                for j in range(2):
                    b[(first, j) if halves == 2 else (first + j, 0)] = loaded[4 * i + 2 * j : 4 * i + 2 * j + 2]
            for half in range(halves):
                places = [filters + (half * tiles_m + m) * 512 for m in range(tiles_m)]
                a = tuple(word for place in places for word in words.LOAD_SHARED[4](place))
                sums = multiply(sums, a, tuple(word for group in range(groups) for word in b[group, half]))
            return sums

        return products

    def store_rows(self, tiles_m: int, groups: int, wanted: int) -> Callable:
        def store(sums: tuple, first: int, address: int, plane_bytes: int) -> None:
            for i in range(2 * tiles_m):
                for group in range(groups if first + 8 * i < wanted else 0):
                    at = 4 * (i // 2 * groups + group) + i % 2 * 2
                    self._words.STORE_SHARED[2](address + 8 * i * plane_bytes + 32 * group, sums[at : at + 2])

        return store

    def quad_products(self, pixels: int, wanted: int, channel_bytes: int) -> Callable:
        load, one, columns = self._words.LOAD_SHARED[4], self._words.LOAD_SHARED[1], -(-wanted // 4) * 4

        def products(sums: tuple, places: list[int], address: int, filters: int) -> tuple:
            values = list(sums)
            for i, place in enumerate(places):
                at = address + place
                x = [one(at + c * channel_bytes) for c in range(4)] if channel_bytes else load(at)
                for channel in range(4):
                    row = filters + channel * columns * 4
                    w = [word for first in range(0, columns, 4) for word in load(row + first * 4)]
                    for column in range(wanted):
                        values[i * wanted + column] += float_of(x[channel]) * float_of(w[column])
            assert all(value == value for value in values), "multiplies what was not written"
            return tuple(values)

        return products

    def store_planes(self, pixels: int, count: int) -> Callable:
        def store(sums: tuple, places: list[int], address: int, plane_bytes: int) -> None:
            for i, place in enumerate(places):
                for column in range(count):
                    self._words.STORE_SHARED[1](address + place + column * plane_bytes, sums[i * count + column])

        return store
