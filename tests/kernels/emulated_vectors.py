"""Vectors in local arrays, and what blocks tell each other: stand-ins for `ptx_local`, `ptx_words` and `ptx_grid`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from emulated import Block, Memory, Word

import nbdnn.kernels.cuda as package
from nbdnn.problem import ITEMSIZE


class Vectors:
    """`ptx_local` and `ptx_words`. words: the stand-in for `ptx`."""

    def __init__(self, words: Any) -> None:
        self._words = words

    @staticmethod
    def count_of(dtype: str, lanes: int) -> int:
        return max(1, lanes * ITEMSIZE[dtype] // 4)

    def fetch(self, dtype: str, lanes: int, evict: str = "") -> Callable:
        count = self.count_of(dtype, lanes)

        def fetch(words: list[Word], place: int, base: Memory, index: int) -> None:
            words[place : place + count] = [base[index]] if lanes * ITEMSIZE[dtype] == 2 else base.load(index, count)

        return fetch

    def widen(self, dtype: str, lanes: int) -> Callable:
        count = self.count_of(dtype, lanes)

        def widen(array: list[float], words: list[Word], place: int) -> None:
            array[:lanes] = self._values(dtype, lanes, words[place : place + count])

        return widen

    def load(self, dtype: str, lanes: int) -> Callable:
        count, fetch = self.count_of(dtype, lanes), self.fetch(dtype, lanes)

        def load(array: list[float], place: int, base: Memory, index: int) -> None:
            words: list[Word] = [0] * count
            fetch(words, 0, base, index)
            array[place : place + lanes] = self._values(dtype, lanes, words)

        return load

    def store(self, dtype: str, lanes: int, evict: str = "") -> Callable:
        def store(base: Memory, index: int, array: list[float], place: int) -> None:
            values = array[place : place + lanes]
            if dtype == "f32":
                base.store(index, values)
            elif lanes == 1:
                base[index] = self._words.NARROW[dtype](values[0])
            else:
                pack = self._words.PACK[dtype]
                base.store(index, [pack(*values[i : i + 2]) for i in range(0, lanes, 2)])

        return store

    def _values(self, dtype: str, lanes: int, words: list[Word]) -> list[float]:
        if dtype == "f32":
            return words
        if lanes == 1:
            return [self._words.WIDEN[dtype](words[0])]
        return [value for word in words for value in self._words.UNPACK[dtype](word)]


class GridWords:
    """`ptx_grid`: who looks whether others have come lets them have their turn first."""

    def __init__(self, block: Block) -> None:
        self._block = block

    @staticmethod
    def arrive(base: Memory, index: int) -> None:
        base[index] += 1

    def arrived(self, base: Memory, index: int) -> int:
        self._block.now.wait("turn")
        return int(base[index])

    @staticmethod
    def load_pair(compute: str) -> Callable:
        def load(base: Memory, index: int) -> tuple[Word, ...]:
            first, second = base.load(index, 2)
            assert first == first and second == second, f"read of pair {index}, which nobody wrote"
            return first, second

        return load


def install(monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    """After the words of `emulated_ptx`."""
    vectors = Vectors(package.__dict__["ptx"])
    for name, words in {"ptx_local": vectors, "ptx_words": vectors, "ptx_grid": GridWords(block)}.items():
        monkeypatch.setitem(package.__dict__, name, words)
