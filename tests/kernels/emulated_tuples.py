"""The words of kernels that hold rows in registers: what stands in for `ptx_tuples` and `ptx_cluster`."""

from __future__ import annotations

import math
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

from emulated import Block, Word
from emulated_local import parts_at

from nbdnn.problem import ITEMSIZE

_FILL = {"zero": {"f16": 0, "bf16": 0, "f32": 0.0}, "-inf": {"f16": 0xFC00, "bf16": 0xFF80, "f32": -math.inf}}


def _larger(a: float, b: float) -> float:
    return b if a != a or b > a else a


def _power(value: float, shift: float) -> float:
    difference = value - shift
    return math.exp(difference) if difference < 88 else math.inf


class TupleWords:
    """Stands in for `ptx_tuples`; a vector is whole words or one element."""

    Place = namedtuple("Place", "base at step position position_step end")
    Held = namedtuple("Held", "dtype lanes vectors shared", defaults=(False,))

    larger, power, total = map(staticmethod, (_larger, _power, operator.add))
    itself = staticmethod(lambda value, *others: value)
    product = staticmethod(lambda a, b, *others: a * b)
    power_share = staticmethod(lambda value, shift, scale: _power(value, shift) * scale)
    log_power = staticmethod(lambda value, shift, total_log: value - shift - total_log)
    gradient = staticmethod(lambda dy, y, dot: (dy - dot) * y)
    log_gradient = staticmethod(lambda dy, y, sum_of_dy: dy - _power(y, 0.0) * sum_of_dy)
    finite = staticmethod(lambda value: 0.0 if value == -math.inf else value)
    reciprocal = staticmethod(lambda value: 1 / value if value else math.inf)
    log = staticmethod(lambda value: math.log(value) if value else -math.inf)

    def __init__(self, words: Any) -> None:
        self._words = words

    @staticmethod
    def hidden(held: Any) -> Callable:
        def hide(parts: tuple, nothing: int) -> tuple:
            assert nothing == 0
            return parts

        return hide

    def load(self, held: Any, fill: str) -> Callable:
        part, size_bytes = _FILL[fill][held.dtype], held.lanes * ITEMSIZE[held.dtype]
        if isinstance(part, int) and held.lanes > 1:
            part |= part << 16
        nothing = [part] * max(1, size_bytes // 4)

        def load(place: Any) -> tuple[Word, ...]:
            found = [parts_at(place.base, at, *held[:2]) if exists else nothing for at, exists in _vectors(held, place)]
            return tuple(part for parts in found for part in parts)

        return load

    def widen(self, held: Any) -> Callable:
        def widen(parts: tuple[Word, ...]) -> tuple[float, ...]:
            if held.dtype == "f32":
                return parts
            if held.lanes == 1:
                return tuple(map(self._words.WIDEN[held.dtype], parts))
            return tuple(value for word in parts for value in self._words.UNPACK[held.dtype](word))

        return widen

    def store(self, held: Any) -> Callable:
        narrow, pack, lanes = self._words.NARROW[held.dtype], self._words.PACK.get(held.dtype), held.lanes

        def store(place: Any, values: tuple[float, ...]) -> None:
            assert len(values) == lanes * held.vectors
            for i, (at, exists) in enumerate(_vectors(held, place)):
                vector = list(values[i * lanes : (i + 1) * lanes])
                if exists and lanes == 1:
                    place.base[at] = narrow(vector[0])
                elif exists:
                    words = vector if held.dtype == "f32" else list(map(pack, vector[::2], vector[1::2]))
                    place.base.store(at, words)

        return store

    def _terms(self, held: Any, formula: Callable, inputs: int, given: Sequence[tuple]) -> list[float]:
        widen = self.widen(held)
        arrays, numbers = list(map(widen, given[:inputs])), given[inputs:]
        return [formula(*elements, *(each[i % len(each)] for each in numbers)) for i, elements in _numbered(arrays)]

    def gather(self, held: Any, formula: Callable, combine: Callable, inputs: int) -> Callable:
        def gather(*given: tuple) -> tuple[float, ...]:
            terms, count = self._terms(held, formula, inputs, given), len(given[inputs])
            return tuple(reduce(combine, terms[number::count]) for number in range(count))

        return gather

    def scatter(self, held: Any, formula: Callable, inputs: int, numbers: int) -> Callable:
        store = self.store(held)

        def scatter(place: Any, *given: tuple) -> None:
            assert len(given) == inputs + numbers
            store(place, tuple(self._terms(held, formula, inputs, given)))

        return scatter

    @staticmethod
    def each(formula: Callable, operands: int) -> Callable:
        def each(*tuples: tuple[float, ...]) -> tuple[float, ...]:
            assert len(tuples) == operands
            return tuple(formula(*(of[i % len(of)] for of in tuples)) for i in range(max(map(len, tuples))))

        return each

    @staticmethod
    def fold(formula: Callable, numbers: int) -> Callable:
        return lambda values: tuple(reduce(formula, values[number::numbers]) for number in range(numbers))

    def across(self, formula: Callable, first: int, end: int) -> Callable:
        def compute(brought: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
            held, bit = brought, first
            while bit < end:
                held = [tuple(map(formula, mine, held[lane ^ bit])) for lane, mine in enumerate(held)]
                bit *= 2
            return held

        return self._words._collective(f"across {formula.__name__} {first} {end}", compute)


def _numbered(arrays: Sequence[Sequence[float]]) -> Iterator[tuple[int, tuple[float, ...]]]:
    return enumerate(zip(*arrays, strict=True))


def _vectors(held: Any, place: Any) -> Iterator[tuple[int, bool]]:
    """(where it begins, whether it exists) of each vector."""
    for k in range(held.vectors):
        yield place.at + k * place.step, 0 <= place.position + k * place.position_step < place.end


class ClusterWords:
    """Stands in for `ptx_cluster`: what runs together are the blocks of a cluster."""

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._arrive = block, words._collective("arrive", self._arrived)

    def _arrived(self, brought: list[None]) -> list[None]:
        """All lanes at once: they then find the same, when they wait."""
        self._block.arrivals += len(brought)
        return brought

    def arrive(self) -> None:
        """A thread that arrives waits before it arrives again: so many have come once more, when all have."""
        self._block.now.arrivals += 1
        self._arrive(None)

    def wait(self) -> None:
        threads = sum(len(of_block) for _, _, of_block in self._block.together)
        while self._block.arrivals < self._block.now.arrivals * threads:
            self._block.now.wait("turn")

    def store_to_block(self, where: int, block: int, value: float) -> None:
        at = self._block.place_of(where, 1)
        _, shared, _ = self._block.together[block]
        shared[at] = value
