"""The words of kernels whose vectors are tuples of floats: what stands in for `ptx_vector` and `ptx_vector_rows`."""

from __future__ import annotations

import math
import operator
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from emulated import Block, Memory, Word

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.pool_axes import LOWEST
from nbdnn.problem import ITEMSIZE


def _widened(words: Any, dtype: str, found: Sequence[Word]) -> list[float]:
    if dtype == "f32":
        return list(found)  # type: ignore[arg-type]
    return [value for word in found for value in words.UNPACK[dtype](word)]


def _vector(words: Any, base: Memory, index: int, dtype: str, lanes: int) -> list[float]:
    return _widened(words, dtype, base.load(index, lanes * ITEMSIZE[dtype] // 4))


class VectorWords:
    """Stands in for `ptx_vector`."""

    def __init__(self, words: Any) -> None:
        self._words, self.zeros = words, words.zeros

    @staticmethod
    def scaled(count: int) -> Callable:
        return lambda values, factor: tuple(value * factor for value in values)

    @staticmethod
    def repeated(count: int) -> Callable:
        return lambda value: (value,) * count

    def load_run(self, dtype: str, count: int) -> Callable:
        widen = self._words.WIDEN[dtype]
        return lambda base, at, step: tuple(widen(base[at + i * step]) for i in range(count))

    def load_filters(self, dtype: str, lanes: int, taps: int, reversed_: bool) -> Callable:
        order = range(taps - 1, -1, -1) if reversed_ else range(taps)

        def load(base: Memory, at: int) -> tuple[float, ...]:
            values = [v for i in range(taps) for v in _vector(self._words, base, at + i * lanes, dtype, lanes)]
            return tuple(values[lane * taps + tap] for tap in order for lane in range(lanes))

        return load

    def ask(self, dtype: str, lanes: int) -> Callable:
        count, element_of = lanes * ITEMSIZE[dtype] // 4, self._words.ELEMENT[dtype]

        def load(base: Memory, at: int, wanted: bool) -> tuple[Word, ...]:
            if not wanted:
                return (0.0 if dtype == "f32" else 0,) * max(count, 1)
            if count == 0:
                return (element_of(base[at]),)
            words = base.load(at, count)
            return tuple(words) if count > 1 else (words[0],)

        return load


class PoolWords:
    """Stands in for `ptx_pool_vector`; vectors are whole words or single elements."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def load(self, dtype: str, lanes: int, otherwise: int = 0, constant: bool = True) -> Callable:
        assert otherwise in (0, LOWEST[dtype])
        nothing, widen = (-math.inf if otherwise else 0.0,) * lanes, self._words.WIDEN[dtype]

        def load(base: Memory, index: int, wanted: bool) -> tuple[float, ...]:
            if not wanted:
                return nothing
            return (widen(base[index]),) if lanes == 1 else tuple(_vector(self._words, base, index, dtype, lanes))

        return load

    def load_cells(self, dtype: str, count: int, times: int) -> Callable:
        widen = self._words.WIDEN[dtype]

        def load(base: Memory, here: int, inside: bool, left: int, below: int, inside_below: bool, factor: float):
            places = [(here + i, inside) if i < left else (below + i, inside_below) for i in range(count)]
            values = [widen(base[index]) * factor if wanted else 0.0 for index, wanted in places]
            return tuple(value for value in values for _ in range(times))

        return load

    def store(self, dtype: str, lanes: int) -> Callable:
        narrow, pack = self._words.NARROW[dtype], self._words.PACK.get(dtype)

        def store(base: Memory, index: int, wanted: bool, values: tuple[float, ...]) -> None:
            if wanted and lanes == 1:
                base[index] = narrow(values[0])
            elif wanted:
                base.store(index, list(values) if dtype == "f32" else list(map(pack, values[::2], values[1::2])))

        return store

    @staticmethod
    def join_vectors(is_max: bool, lanes: int) -> Callable:
        join = max if is_max else operator.add
        return lambda a, b: tuple(map(join, a, b))

    @staticmethod
    def join_lanes(is_max: bool, lanes: int) -> Callable:
        return max if is_max else sum


class RowWords:
    """Stands in for `ptx_vector_rows`, with vectors of whole words."""

    Rows = namedtuple("Rows", "dtype lanes offsets steps")
    End = namedtuple("End", "dtype lanes columns tokens")
    Target = namedtuple("Target", "out residual at row row_step rows column column_step columns bias alpha beta")

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._words = block, words

    def multiply_shared_rows(self, rows: Any, end: Any, row_bytes: int, pixel_bytes: int) -> Callable:
        count, of_row = rows.lanes * ITEMSIZE[rows.dtype] // 4, len(end.columns) * end.lanes
        finish = epilogue.finish("f32", end.tokens)

        def load(address: int) -> list[float]:
            at = self._block.place_of(address, count)
            return _widened(self._words, rows.dtype, self._block.shared[at : at + count])

        def multiply(weights: tuple, address: int, target: Any) -> None:
            sums: dict[int, float] = {}
            for row, table, complete in rows.steps:
                first = address + row * row_bytes
                values = [value for offset in rows.offsets for value in load(first + offset * pixel_bytes)]
                for i, j, k in table:
                    sums[i] = sums.get(i, 0.0) + values[j] * weights[k]
                for done in complete:
                    totals = [sums.pop(i) for i in range(done * of_row, (done + 1) * of_row)]
                    self._store_row(end, finish, totals, target, done)
            assert not sums, "sums that are never stored"

        return multiply

    def _store_row(self, end: Any, finish: Callable, totals: list[float], target: Any, row: int) -> None:
        for i, offset in enumerate(end.columns):
            if not (0 <= target.row + row < target.rows and 0 <= target.column + offset < target.columns):
                continue
            at = target.at + (target.row + row) * target.row_step + (target.column + offset) * target.column_step
            nothing, vector = [0.0] * end.lanes, totals[i * end.lanes : (i + 1) * end.lanes]
            before, residual = (
                _vector(self._words, base, at, end.dtype, end.lanes) if token in end.tokens else nothing
                for base, token in ((target.out, "beta"), (target.residual, "res"))
            )
            finished = [
                finish(total, target.alpha, target.beta, *others)
                for total, *others in zip(vector, before, target.bias, residual, strict=True)
            ]
            if end.dtype != "f32":
                finished = list(map(self._words.PACK[end.dtype], finished[::2], finished[1::2]))
            target.out.store(at, finished)
