"""The words of kernels for few channels of outputs: what stands in for `ptx_head`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulated import float_of


class HeadWords:
    def __init__(self, words: Any) -> None:
        self._words = words

    def row_products(self, dtype: str, tiles_m: int, groups: int, group_bytes: int, transposed: bool) -> Callable:
        words = self._words
        load = words.load_matrices_at(tuple((0, group * group_bytes) for group in range(groups)), transposed)
        multiply = words.multiply_tile(dtype, tiles_m, groups)

        def products(sums: tuple, filters: int, pixels: int) -> tuple:
            b = load(pixels)
            for half in range(2):
                places = [filters + (half * tiles_m + m) * 512 for m in range(tiles_m)]
                a = tuple(word for place in places for word in words.LOAD_SHARED[4](place))
                sums = multiply(sums, a, tuple(b[4 * i + 2 * half + j] for i in range(groups) for j in range(2)))
            return sums

        return products

    def store_rows(self, tiles_m: int, groups: int, wanted: int) -> Callable:
        def store(sums: tuple, first: int, address: int, plane_bytes: int) -> None:
            for i in range(2 * tiles_m):
                for group in range(groups if first + 8 * i < wanted else 0):
                    at = 4 * (i // 2 * groups + group) + i % 2 * 2
                    self._words.STORE_SHARED[2](address + 8 * i * plane_bytes + 32 * group, sums[at : at + 2])

        return store

    def quad_products(self, pixels: int, columns: int, planar: bool) -> Callable:
        load, one = self._words.LOAD_SHARED[4], self._words.LOAD_SHARED[1]

        def products(sums: tuple, places: list[int], address: int, filters: int, channel_bytes: int) -> tuple:
            values = list(sums)
            for i, place in enumerate(places):
                at = address + place
                x = [one(at + c * channel_bytes) for c in range(4)] if planar else load(at)
                for channel in range(4):
                    w = [
                        word
                        for first in range(0, columns, 4)
                        for word in load(filters + (channel * columns + first) * 4)
                    ]
                    for j in range(columns):
                        values[i * columns + j] += float_of(x[channel]) * float_of(w[j])
            assert all(value == value for value in values), "multiplies what was not written"
            return tuple(values)

        return products

    def store_planes(self, pixels: int, columns: int, wanted: int) -> Callable:
        def store(sums: tuple, places: list[int], address: int, plane_bytes: int) -> None:
            for i, place in enumerate(places):
                for column in range(wanted):
                    self._words.STORE_SHARED[1](address + place + column * plane_bytes, sums[i * columns + column])

        return store
