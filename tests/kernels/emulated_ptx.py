"""The words of kernels on Python's numbers: what stands in for `ptx`, `ptx_tile`, `ptx_products` and
`ptx_matrix`.

They are stricter than a GPU: fragments that lanes load, and sums that they store, have to meet every bank once, and
what is multiplied has to have been written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from emulated import Block, Memory, Word, float_of
from emulated_fragments import FragmentWords, PatchWords
from emulated_grouped import GroupedWords
from emulated_head import HeadWords
from emulated_local import BnWords, GridWords, LocalWords
from emulated_pointwise import PointwiseWords
from emulated_pool import MarchingWords, RollingWords, TapWords
from emulated_tma import TmaWords, WgmmaWords
from emulated_tuples import ClusterWords, TupleWords
from emulated_vector import PoolWords, RowWords, VectorWords
from guarded import NUMPY_DTYPE

import nbdnn.kernels.cuda as package
from nbdnn.problem import ITEMSIZE

# Every module that kernels are built from: one that is imported only while a block stands in would keep its words.
_BUILDERS = [
    import_module(f"{package.__name__}.{module.name}")
    for module in iter_modules(package.__path__)
    if not module.name.startswith("ptx")
]
_SIXTEEN = ("f16", "bf16")
_COUNTS = (1, 2, 4)  # of words


class Factor(NamedTuple):
    """Of `outer_products`."""

    row: int
    half: int
    by_k: bool = False


def _values(dtype: str) -> list[float]:
    """Of every 16 bits, by their integer."""
    with np.errstate(invalid="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPE[dtype]).astype(float).tolist()


_VALUES = {dtype: _values(dtype) for dtype in _SIXTEEN}


def _same(value):
    return value


def _int32(value: int) -> int:
    """Also of the bits of a word."""
    if -(2**31) <= value < 2**31:
        return int(value)
    assert 2**31 <= value < 2**32, f"{value} has more than 32 bits"
    return int(value) - 2**32


def _divided(dividend: int, divisor: int) -> tuple[int, int]:
    assert 0 <= dividend < 2**31 and 0 < divisor < 2**31, f"{dividend} / {divisor}"
    return divmod(dividend, divisor)


def _split(dividend: int, divisor: int, multiplier: int, shift: int) -> tuple[int, int]:
    assert 0 <= dividend < 2**31 and 0 < divisor < 2**31, f"{dividend} / {divisor}"
    quotient = (2 * dividend * (multiplier & 0xFFFFFFFF) >> 32) >> shift
    return quotient, dividend - quotient * divisor


def _shift_left(value: int, count: int) -> int:
    assert 0 <= count < 32, count
    return _int32(value << count & 0xFFFFFFFF)


def _narrow_f16(value: float) -> int:
    return struct.unpack("=H", struct.pack("=e", value))[0]


def _narrow_bf16(value: float) -> int:
    (bits,) = struct.unpack("=I", struct.pack("=f", value))
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16 if value == value else 0x7FC0


_NARROW = {"f16": _narrow_f16, "bf16": _narrow_bf16}


def _to_tf32(values: np.ndarray | float) -> np.ndarray:
    """Rounded to the nearest with ten bits of fraction, away from zero where two are as near."""
    bits = np.atleast_1d(np.asarray(values, np.float32)).view(np.uint32)
    return (bits + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32).astype(float)


def _unpack(dtype: str) -> Callable:
    of = _VALUES[dtype]
    return lambda word: (of[word & 0xFFFF], of[word >> 16])


def _pack(dtype: str) -> Callable:
    narrow = _NARROW[dtype]
    return lambda low, high: narrow(low) | narrow(high) << 16


def _as_words(words: list[Word]) -> Word | tuple[Word, ...]:
    return words[0] if len(words) == 1 else tuple(words)


def _load(count: int) -> Callable:
    return lambda base, index: _as_words(base.load(index, count))


def _store(count: int) -> Callable:
    return lambda base, index, words: base.store(index, [words] if count == 1 else words)


def _sandwich(matrix: tuple[tuple[float, ...], ...]) -> Callable:
    factor = np.array(matrix)

    def transform(source: list[float], target: list[float]) -> None:
        extent = factor.shape[1]
        target[:] = (factor @ np.reshape(source, (extent, extent)) @ factor.T).ravel().tolist()

    return transform


class FourierWords:
    """Stands in for `ptx_fourier`."""

    @staticmethod
    def fourier(real: list[float], imaginary: list[float]) -> None:
        found = np.fft.fft(np.array(real) + 1j * np.array(imaginary))
        real[:], imaginary[:] = found.real.tolist(), found.imag.tolist()

    @staticmethod
    def combined(matrix: tuple[tuple[float, ...], ...]) -> Callable:
        def combine(source: list[float], target: list[float]) -> None:
            target[:] = (np.array(matrix) @ source).tolist()

        return combine


class SharedArray:
    """A static array of integers or floats."""

    def __init__(self, block: Block, count: int) -> None:
        self._block, self._count, self.address = block, count, block.static_shared(count)
        self._first = block.place_of(self.address, 1)

    def __getitem__(self, index: int) -> Word:
        assert 0 <= index < self._count, f"element {index} of {self._count} in shared memory"
        return self._block.shared[self._first + index]

    def __setitem__(self, index: int, value: Word) -> None:
        assert 0 <= index < self._count, f"element {index} of {self._count} in shared memory"
        self._block.shared[self._first + index] = value


class Address(NamedTuple):
    """Of an element of global memory; what is added are bytes."""

    base: Memory
    index: int

    def __add__(self, size_bytes: int) -> Address:  # type: ignore[override]
        steps, rest = divmod(size_bytes, ITEMSIZE[self.base.dtype])
        assert rest == 0, f"{size_bytes} bytes between elements of {self.base.dtype}"
        return Address(self.base, self.index + steps)


class Words:
    """Stands in for `ptx`, `ptx_tile` and `ptx_matrix` at once; what it does is done by the threads of a block."""

    WORD = staticmethod(lambda value: int(value) & 0xFFFFFFFF)
    inline = pointer = words_of = word_of = computed_here = staticmethod(_same)
    to_tf32 = staticmethod(lambda value: _to_tf32(value).item())
    divided, split, shift_left = map(staticmethod, (_divided, _split, _shift_left))
    float_of, sandwich = map(staticmethod, (float_of, _sandwich))
    floats_of = staticmethod(lambda words: tuple(map(float_of, words)))
    record = staticmethod(lambda fields, bits: fields)
    fma = staticmethod(lambda a, b, c: a * b + c)
    inside = staticmethod(lambda position, extent: int(0 <= position < extent))
    load_constant = staticmethod(lambda base, index: base[index])
    address, WIDE = map(staticmethod, (Address, _same))
    zeros = staticmethod(lambda count: lambda: (0.0,) * count)
    part = staticmethod(lambda count, first, size: lambda values: values[first : first + size])

    def __init__(self, block: Block) -> None:
        self._block = block
        self.INTEGER, self.REAL = {32: _int32, 64: int}, {"f32": float, "f64": float}
        self.WIDEN = {"f32": _same, **{dtype: _VALUES[dtype].__getitem__ for dtype in _SIXTEEN}}
        self.NARROW = {"f32": _same, **_NARROW}
        self.ELEMENT = {"f32": _same, **dict.fromkeys(_SIXTEEN, lambda value: value & 0xFFFF)}
        self.UNPACK, self.PACK = ({dtype: table(dtype) for dtype in _SIXTEEN} for table in (_unpack, _pack))
        self.PAIR_HALVES = {0: lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16, 1: lambda a, b: a >> 16 | b >> 16 << 16}
        self.LOAD = self.LOAD_CONSTANT = {count: _load(count) for count in _COUNTS}
        self.STORE = {count: _store(count) for count in _COUNTS}
        self.cuda = SimpleNamespace(
            local=SimpleNamespace(array=lambda count, _: [None] * count),
            shared=SimpleNamespace(array=lambda count, _, alignment=4: SharedArray(block, count)),
            syncthreads=lambda: block.now.wait("block"),
            types=SimpleNamespace(uint32=self.WORD),
        )
        meet_warp = self._collective("syncwarp", lambda brought: brought)
        self.cuda.syncwarp = lambda: meet_warp(None)
        self.types = self.cuda.types
        self.LOAD_SHARED = {count: self._load_shared(count) for count in _COUNTS}
        self.STORE_SHARED = {count: self._store_shared(count) for count in _COUNTS}
        self.COPY_ASYNC = {4 * count: self._copy(count) for count in _COUNTS}
        self.MULTIPLY = {dtype: self._multiply(dtype) for dtype in (*_SIXTEEN, "tf32")}
        self.load_matrices_transposed = self.load_matrices_at(((0, 0),), True)
        self._shuffle = self._collective(
            "shuffle", lambda brought: [brought[i ^ by][0] for i, (_, by) in enumerate(brought)]
        )

    def thread_x(self) -> int:
        return self._block.now.number

    def block_x(self) -> int:
        return self._block.place[0]

    def block_y(self) -> int:
        return self._block.place[1]

    def block_z(self) -> int:
        return self._block.place[2]

    # ---- shared memory -----------------------------------------------------------------------------------------------

    def dynamic_shared(self) -> int:
        return self._block.dynamic_shared()

    @staticmethod
    def shared_address(array: SharedArray) -> int:
        return array.address

    def _load_shared(self, count: int) -> Callable:
        block = self._block

        def load(address: int) -> Word | tuple[Word, ...]:
            at = block.place_of(address, count)
            block.reading[block.warp].add(at)
            return _as_words(block.shared[at : at + count])

        return load

    def _store_shared(self, count: int) -> Callable:
        def store(address: int, words) -> None:
            at = self._block.place_of(address, count)
            self._block.shared[at : at + count] = [words] if count == 1 else words

        return store

    def _copy(self, count: int) -> Callable:
        def copy(shared: int, source: tuple[Memory, int], source_bytes: int) -> None:
            """Zeros behind the first `source_bytes`."""

            def arrive() -> None:
                base, index = source
                words = base.load(index, source_bytes // 4, count)
                at = self._block.place_of(shared, count)
                self._block.shared[at : at + count] = words + [0.0 if base.dtype == "f32" else 0] * (count - len(words))

            if self._block.early:
                arrive()
            else:
                self._block.now.started.append(arrive)

        return copy

    def copy_async_commit(self) -> None:
        now = self._block.now
        now.groups.append(now.started)
        now.started = []

    def copy_async_wait(self, most: int) -> Callable:
        def wait() -> None:
            groups = self._block.now.groups
            while len(groups) > most:
                for arrive in groups.pop(0):
                    arrive()

        return wait

    Factor = Factor

    def outer_products(self, depth: int, a: Factor, b: Factor) -> Callable:
        load = self.LOAD_SHARED[4]

        def factor(at: int, of: Factor) -> np.ndarray:
            """[k][8]."""
            if not of.by_k:
                return np.array([load(at + k * of.row) + load(at + k * of.row + of.half) for k in range(depth)])
            pieces = range(0, depth, 4)
            return np.transpose(
                [
                    [value for k in pieces for value in load((at ^ (i % 4 * 2 + k // 4) * 16) + i // 4 * of.half)]
                    for i in range(8)
                ]
            )

        def multiply(sums: tuple, a_at: int, b_at: int) -> tuple:
            products = factor(a_at, a).T @ factor(b_at, b)
            quads = products.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(4, 16)
            return tuple(map(tuple, (np.array(sums) + quads).tolist()))

        return multiply

    # ---- warps -------------------------------------------------------------------------------------------------------

    def _collective(self, name: str, compute: Callable[[list], Sequence]) -> Callable:
        """What `compute` makes, for each lane, of what all lanes of the warp bring."""
        self._block.collectives[name] = compute
        return lambda brought: self._block.now.wait(name, brought)

    def shuffle_xor(self, value: float, lanes: int) -> float:
        return self._shuffle((value, lanes))

    def _at(
        self, addresses: Sequence[int], place: tuple[int, int], size_bytes: int, at_once: int, may_share: bool = False
    ) -> list[int]:
        """Where in shared memory lanes find what is at a place, `at_once` of them without a conflict of banks.

        may_share: lanes may read at one address, which is no conflict.
        """
        xor, offset = place
        found = [(address ^ xor) + offset for address in addresses]
        for first in range(0, len(found), at_once):
            different = set(found[first : first + at_once]) if may_share else found[first : first + at_once]
            banks = {address // size_bytes % (128 // size_bytes) for address in different}
            assert len(banks) == len(different), f"{len(different)} lanes meet {len(banks)} banks at {place}"
        return found

    def load_matrices_at(self, places: tuple, transposed: bool) -> Callable:
        def compute(addresses: list[int]) -> list[tuple]:
            rows = [self.LOAD_SHARED[4](at) for place in places for at in self._at(addresses, place, 16, 8, True)]
            words = [word for row in rows for word in row]
            if transposed:
                assert all(word == word for word in words), "loads what was not written"
                halves = np.array(words, np.uint32).view(np.uint16).reshape(-1, 8, 8)
                words = np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).ravel().tolist()
            return list(zip(*(words[i : i + 32] for i in range(0, len(words), 32)), strict=True))

        return self._collective(f"matrices {places} {transposed}", compute)

    def load_words_at(self, places: tuple) -> Callable:
        def compute(addresses: list[int]) -> list[tuple]:
            found = [self._at(addresses, place, 4, 32) for place in places]
            return list(zip(*(map(self.LOAD_SHARED[1], each) for each in found), strict=True))

        return self._collective(f"words {places}", compute)

    def store_floats_at(self, places: tuple, count: int) -> Callable:
        def compute(brought: list[tuple]) -> list[None]:
            store = self.STORE_SHARED[count]
            for i, place in enumerate(places):
                found = self._at([address for address, _ in brought], place, 4 * count, 32 // count)
                for at, (_, sums) in zip(found, brought, strict=True):
                    store(at, sums[i] if count == 1 else sums[count * i : count * (i + 1)])
            return [None] * 32

        store = self._collective(f"floats {places} {count}", compute)
        return lambda address, sums: store((address, sums))

    def multiply_tile(self, dtype: str, tiles_m: int, tiles_n: int, rounded_before: bool = False) -> Callable:
        """By the tables of PTX: lane 4g + t has of a rows g and g + 8, of b column g, of k what t says."""

        def compute(brought: list[tuple]) -> list[tuple]:
            c, a, b = zip(*brought, strict=True)
            a, b = _factors(a, dtype, rounded_before), _factors(b, dtype, rounded_before)
            width = a.shape[1] // (4 * tiles_m)  # of k in a word
            a = a.reshape(8, 4, tiles_m, 2, 2, width).transpose(2, 4, 0, 3, 1, 5).reshape(tiles_m, 16, 8 * width)
            b = b.reshape(8, 4, tiles_n, 2, width).transpose(2, 3, 1, 4, 0).reshape(tiles_n, 8 * width, 8)
            assert not np.isnan(a).any() and not np.isnan(b).any(), "multiplies what was not written"
            products = np.einsum("imk,jkn->ijmn", a, b).reshape(tiles_m, tiles_n, 2, 8, 4, 2)
            sums = np.reshape(c, (8, 4, tiles_m, tiles_n, 2, 2)) + products.transpose(3, 4, 0, 1, 2, 5)
            return list(map(tuple, sums.reshape(32, -1).tolist()))

        multiply = self._collective(f"multiply {dtype} {tiles_m} {tiles_n}", compute)
        return lambda sums, words_a, words_b: multiply((sums, words_a, words_b))

    def _multiply(self, dtype: str) -> Callable:
        multiply = self.multiply_tile(dtype, 1, 1, True)
        return lambda a, b, c: multiply(c, a, b)


def _factors(words: Sequence[Sequence[Word]], dtype: str, rounded_before: bool) -> np.ndarray:
    """The elements that words hold, a row a lane."""
    if dtype == "tf32":
        given = np.array(words, float)
        rounded = _to_tf32(given)
        assert not rounded_before or np.array_equal(given, rounded, equal_nan=True), "multiplies what is no TF32"
        return rounded
    return np.array(words, np.uint32).view(NUMPY_DTYPE[dtype]).astype(float)


def install(monkeypatch: pytest.MonkeyPatch, early: bool = False) -> Block:
    """From here on kernels are built for the block that is returned, of which nothing is kept for later."""
    block = Block(early)
    words = Words(block)
    for name in ("ptx", "ptx_tile", "ptx_products", "ptx_matrix"):
        monkeypatch.setitem(package.__dict__, name, words)
    monkeypatch.setitem(package.__dict__, "ptx_fourier", FourierWords)
    monkeypatch.setitem(package.__dict__, "ptx_local", LocalWords(block, words))
    monkeypatch.setitem(package.__dict__, "ptx_grouped", GroupedWords(block, words))
    monkeypatch.setitem(package.__dict__, "ptx_fragments", FragmentWords(words))
    monkeypatch.setitem(package.__dict__, "ptx_head", HeadWords(words))
    monkeypatch.setitem(package.__dict__, "ptx_pointwise", PointwiseWords(block, words))
    monkeypatch.setitem(package.__dict__, "ptx_vector", VectorWords(words))
    monkeypatch.setitem(package.__dict__, "ptx_pool_vector", PoolWords(words))
    monkeypatch.setitem(package.__dict__, "ptx_pool_rolling", RollingWords(block, words))
    monkeypatch.setitem(package.__dict__, "ptx_pool_taps", TapWords(block, words))
    for name in ("ptx_pool_marching", "ptx_pool_cells"):
        monkeypatch.setitem(package.__dict__, name, MarchingWords(block, words))
    monkeypatch.setitem(package.__dict__, "ptx_vector_rows", RowWords(block, words))
    monkeypatch.setitem(package.__dict__, "ptx_grid", GridWords(block))
    monkeypatch.setitem(package.__dict__, "ptx_bn", BnWords)
    monkeypatch.setitem(package.__dict__, "ptx_tuples", TupleWords(words))
    monkeypatch.setitem(package.__dict__, "ptx_cluster", ClusterWords(block, words))
    monkeypatch.setitem(package.__dict__, "ptx_tma", tma := TmaWords(block))
    monkeypatch.setitem(package.__dict__, "ptx_patch", PatchWords(words, tma.meet_warpgroup))
    monkeypatch.setitem(package.__dict__, "ptx_wgmma", WgmmaWords(block))
    for module in _BUILDERS:
        for name, built in list(vars(module).items()):
            if hasattr(built, "cache_clear"):
                monkeypatch.setattr(module, name, built.__wrapped__)
    return block
