"""The words of kernels that move vectors to local arrays, and of blocks that wait for each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from emulated import Block, Memory, Word

from nbdnn.problem import ITEMSIZE


class LocalWords:
    """Stands in for `ptx_local`, with vectors of whole words; in global memory also of one 16-bit element."""

    AT_ONCE = 4
    copy_halves = None  # of 2 bytes, which no word is

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._words = block, words

    def widened(self, dtype: str, lanes: int, parts: list[Word]) -> list[float]:
        if dtype == "f32":
            return list(parts)  # type: ignore[arg-type]
        if _is_half(dtype, lanes):
            return [self._words.WIDEN[dtype](parts[0])]
        return [value for word in parts for value in self._words.UNPACK[dtype](word)]

    def load(self, dtype: str, lanes: int) -> Callable:
        def load(array: list, place: int, base: Memory, index: int) -> None:
            array[place : place + lanes] = self.widened(dtype, lanes, parts_at(base, index, dtype, lanes))

        return load

    @staticmethod
    def part(dtype: str, lanes: int) -> tuple[type, int]:
        return (np.uint16, 1) if _is_half(dtype, lanes) else (np.uint32, _words(dtype, lanes))

    def load_parts(self, dtype: str, lanes: int) -> Callable:
        _, count = self.part(dtype, lanes)

        def load(parts: list, place: int, base: Memory, index: int) -> None:
            parts[place : place + count] = parts_at(base, index, dtype, lanes)

        return load

    def widen_parts(self, dtype: str, lanes: int) -> Callable:
        _, count = self.part(dtype, lanes)

        def widen(array: list, parts: list, place: int) -> None:
            array[:lanes] = self.widened(dtype, lanes, parts[place : place + count])

        return widen

    def load_shared(self, dtype: str, lanes: int) -> Callable:
        count = _words(dtype, lanes)

        def load(array: list, place: int, address: int) -> None:
            at = self._block.place_of(address, count)
            array[place : place + lanes] = self.widened(dtype, lanes, self._block.shared[at : at + count])

        return load

    def store(self, dtype: str, lanes: int, streams: bool = False) -> Callable:
        def store(base: Memory, index: int, array: list, place: int) -> None:
            values = array[place : place + lanes]
            if _is_half(dtype, lanes):
                base[index] = self._words.NARROW[dtype](values[0])
                return
            if dtype != "f32":
                values = list(map(self._words.PACK[dtype], values[::2], values[1::2]))
            base.store(index, values)

        return store

    def copy_to_shared(self, dtype: str, lanes: int, once: bool = False) -> Callable:
        copy, count = self._words.COPY_ASYNC[lanes * ITEMSIZE[dtype]], _words(dtype, lanes)
        return lambda shared, base, index: copy(shared, (base, index), 4 * count)


def _is_half(dtype: str, lanes: int) -> bool:
    return lanes * ITEMSIZE[dtype] == 2


def parts_at(base: Memory, index: int, dtype: str, lanes: int) -> list[Word]:
    """The words of a vector, or its only element."""
    return [base[index]] if _is_half(dtype, lanes) else base.load(index, _words(dtype, lanes))


def _words(dtype: str, lanes: int) -> int:
    count, rest = divmod(lanes * ITEMSIZE[dtype], 4)
    assert not rest, f"{lanes} elements of {dtype} are no whole words"
    return count


class GridWords:
    """Stands in for `ptx_grid`."""

    def __init__(self, block: Block) -> None:
        self._block, self._met = block, 0

    def meet(self, share: int) -> None:
        before = self._met
        self._met = (before + int(share)) % 2**32
        while (before ^ self._met) < 2**31:
            self._block.now.wait("turn")

    def arrive(self, base: Memory, index: int) -> None:
        base[index] = int(base[index]) + 1
        self._block.moved = True

    def arrived(self, base: Memory, index: int) -> int:
        self._block.now.wait("turn")
        return int(base[index])

    @staticmethod
    def load_words(compute: str, count: int) -> Callable:
        assert compute == "f32"
        return lambda base, index: tuple(base.load(index, count))


class BnWords:
    """Stands in for `ptx_bn`."""

    @staticmethod
    def rsqrt(compute: str) -> Callable:
        return lambda value: 1 / math.sqrt(value)

    @staticmethod
    def share(compute: str) -> Callable:
        return lambda n, more: more / (n + more) if n + more > 0 else 0.0
