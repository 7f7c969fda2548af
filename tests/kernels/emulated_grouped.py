"""The words of kernels of few channels a group: what stands in for `ptx_grouped`."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
from emulated import Block, Memory

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.grouped_variant import CHUNKS, LINE_BYTES, End, Gather, Walk

_NOTHING = (0.0,) * 4


class GroupedWords:
    """By the words of `ptx_tile`, so that lanes meet matrices as these say."""

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._words = block, words

    def filter_words(self, dtype: str, places: tuple[tuple[int, int, int], ...], tiles: int) -> Callable:
        def load(w: Memory, first: tuple, exists: tuple, strides: tuple) -> tuple[int, ...]:
            assert len(first) == len(exists) == tiles
            found = []
            for place in places:
                moved = sum(count * step for count, step in zip(place, strides, strict=True))
                for start, is_wanted in zip(first, exists, strict=True):
                    at = start + moved
                    found.append(w[at] | w[at + strides[2]] << 16 if is_wanted else 0)
            return tuple(found)

        return load

    def _load(self, brought: list[tuple[int, int]]) -> list[tuple]:
        """As `load_matrices_at`, but lines that are a stride of 2 apart may meet a bank twice."""
        load, words = self._words.LOAD_SHARED[4], []
        for first in range(0, len(brought), 8):
            eight = brought[first : first + 8]
            apart = gcd(eight[1][1] - eight[0][1], CHUNKS)
            assert len({address // 16 % CHUNKS for address, _ in eight}) * apart == CHUNKS, "lanes meet in a bank"
            words += [word for address, _ in eight for word in load(address)]
        return list(zip(*(words[i : i + 32] for i in range(0, len(words), 32)), strict=True))

    def _load_turned(self, brought: list[tuple[int, int]]) -> list[tuple]:
        words = np.array(self._load(brought), np.uint32).T  # (matrix, lane)
        halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(words.shape)
        return list(map(tuple, turned.T.tolist()))

    def walked(self, walk: Walk) -> Callable:
        load = self._words._collective("rows of pixels", self._load)
        multiply = self._words.multiply_tile(walk.dtype, 1, 1, True)

        def multiplied(address: int, pixel: int, chunk: int, mask: int, filters: tuple[int, ...]) -> tuple[float, ...]:
            totals = [_NOTHING] * (walk.rows * walk.tiles)
            for row, of_row, table in walk.steps:
                line, piece = pixel + of_row.pixels, chunk + of_row.chunks
                at = address + row * walk.row_bytes + line * LINE_BYTES + 16 * (piece ^ line % CHUNKS)
                a = load((at, line))
                if of_row.half:
                    a = (*a[:2], 0, 0)
                for output, first in table:
                    for tile in range(walk.tiles):
                        seen = a
                        if walk.masked:
                            kept = mask if tile == 0 else ~mask & 0xFFFFFFFF
                            seen = tuple(word & kept for word in a)
                        b = filters[first + tile], 0 if of_row.half else filters[first + walk.tiles + tile]
                        at_tile = output * walk.tiles + tile
                        totals[at_tile] = multiply(totals[at_tile], seen, b)
            return tuple(value for total in totals for value in total)

        return multiplied

    def gathered(self, gather: Gather, count: int) -> Callable:
        turned = self._words._collective("turned rows of pixels", self._load_turned)
        multiply = self._words.multiply_tile(gather.dtype, 1, 1, True)
        whole_rows, whole_columns = gather.whole

        def multiplied(
            sums: tuple, address: int, pixel: int, chunk: int, dy: int, masks: tuple[int, int], rows: int
        ) -> tuple[float, ...]:
            totals, of_dy = [sums[i : i + 4] for i in range(0, count, 4)], {}
            assert not whole_columns or masks == (0xFFFFFFFF,) * 2
            for row, load, table in gather.steps:
                line, piece = pixel + load.pixels, chunk + load.chunks
                at = address + row * gather.row_bytes + line * LINE_BYTES + 16 * (piece ^ line % CHUNKS)
                found = [word & masks[i % 2] for i, word in enumerate(turned((at, line)))]
                second = (0, 0) if load.half else found[2:]
                a = found[0], second[0], found[1], second[1]
                for output, first in table:
                    assert not whole_rows or output < rows
                    if output not in of_dy:
                        of_dy[output] = turned((dy + output * gather.out_row_bytes, self._block.now.number))
                    met = a if output < rows else (0,) * 4
                    for tile in range(gather.tiles):
                        b = of_dy[output][2 * tile : 2 * tile + 2]
                        totals[first + tile] = multiply(totals[first + tile], met, b)
            return tuple(value for total in totals for value in total)

        return multiplied

    @staticmethod
    def scattered(places: tuple) -> Callable:
        def store(to: Memory, first: int, exists: int, strides: tuple, sums: tuple[float, ...]) -> None:
            assert len(sums) == 2 * len(places)
            for i, (steps, is_nothing) in enumerate(places):
                at = first + sum(times * step for times, step in zip(steps, strides, strict=True))
                for second in range(2 if exists and not is_nothing else 0):
                    place = at + second * strides[3]
                    assert to[place] != to[place], f"sum {place} is written twice"
                    to[place] = sums[2 * i + second]

        return store

    def staged(self, end: End) -> Callable:
        finish, store = epilogue.finish("f32", end.tokens), self._words.STORE_SHARED[1]
        pack, unpack = self._words.PACK[end.dtype], self._words.UNPACK[end.dtype]

        def pair(base: Memory, at: int, is_read: bool) -> tuple[float, float]:
            return unpack(base.load(at, 1)[0]) if is_read else (0.0, 0.0)

        def stage(addresses: tuple[int, ...], exists: int, sums: tuple[float, ...], target: Any) -> None:
            for row in range(end.rows):
                for tile in range(end.tiles):
                    places = (target.at, target.rows), (target.at_second, target.rows_second)
                    for half, (first, rows) in enumerate(places):
                        at, is_there = first + row * target.row_step + tile * end.apart, row < rows
                        before = pair(target.out, at, is_there and "beta" in end.tokens)
                        added = pair(target.residual, at, is_there and "res" in end.tokens)
                        start = 4 * (row * end.tiles + tile) + 2 * half
                        shift = target.bias[2 * tile : 2 * tile + 2]
                        low, high = (
                            finish(sums[start + i], target.alpha, target.beta, before[i], shift[i], added[i])
                            for i in range(2)
                        )
                        self._block.reading[self._block.warp].clear()  # a sum waits for all it is made of
                        if exists:
                            where = addresses[tile] + row * end.row_bytes + half * end.half_bytes
                            store(where, pack(low, high))

        return stage
