"""A GPU in plain Python, one block at a time: what kernels do to memory, with all threads and their barriers.

Stands in for `ptx` and `ptx_tile`. A thread runs until it waits for others, then the next one does: a barrier that is
missing is seen as reading what was not written. Shared memory begins as NaN; every address is checked. Sums of small
integers are exact, so what is computed here is what a GPU computes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nbdnn.kernels.cuda
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch

_SHARED_BASE = 1024
_NARROW = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Memory:
    """A dense operand: its elements as floats, and for 16-bit types as they lie in memory."""

    def __init__(self, dtype: str, elements: np.ndarray, align: int) -> None:
        self.dtype, self.align_elems = dtype, max(align // _itemsize(dtype), 1)
        self.raw = elements
        self.written = np.zeros(elements.size, bool)

    def check(self, index: int, count: int, align_elems: int) -> None:
        assert 0 <= index <= self.raw.size - count, f"{count} elements at {index} of {self.raw.size}"
        assert index % align_elems == 0 and self.align_elems % align_elems == 0, f"{index} is not aligned"

    def __getitem__(self, index: int) -> Any:
        self.check(index, 1, 1)
        return self.raw[index].item()

    def __setitem__(self, index: int, value: Any) -> None:
        self.check(index, 1, 1)
        self.written[index] = True
        self.raw[index] = value


def _itemsize(dtype: str) -> int:
    return 2 if dtype in _NARROW else 4


def memory(dtype: str, values: np.ndarray, align: int) -> Memory:
    """Of a flat array of values."""
    raw = values.astype(_NARROW[dtype]).view(np.uint16) if dtype in _NARROW else values.astype(np.float32)
    return Memory(dtype, raw.copy(), align)


def values_of(memory: Memory) -> np.ndarray:
    raw = memory.raw.view(_NARROW[memory.dtype]) if memory.dtype in _NARROW else memory.raw
    return raw.astype(np.float64)


def _int32(value: int) -> int:
    assert -(2**31) <= value < 2**31, f"{value} is no int32"
    return int(value)


def _divided(dividend: int, divisor: int) -> tuple[int, int]:
    assert 0 <= dividend < 2**31 and 0 < divisor < 2**31, f"{dividend} / {divisor}"
    return divmod(dividend, divisor)


def _word_of(value: float) -> int:
    return struct.unpack("=I", struct.pack("=f", value))[0]


def _float_of(word: int) -> float:
    return struct.unpack("=f", struct.pack("=I", word))[0]


def _widen(dtype: str) -> Callable[[int], float]:
    return lambda bits: float(np.uint16(bits).view(_NARROW[dtype]))


def _narrow(dtype: str) -> Callable[[float], int]:
    return lambda value: int(np.asarray(value, np.float32).astype(_NARROW[dtype]).view(np.uint16))


def _same(value: Any) -> Any:
    return value


def _pair(select: int) -> Callable[[int, int], int]:
    def paired(first: int, second: int) -> int:
        bytes_ = struct.pack("=II", first, second)
        return struct.unpack("=I", bytes(bytes_[select >> 4 * i & 7] for i in range(4)))[0]

    return paired


class _Thread(threading.Thread):
    """One thread of a block; `request` is what it waits for."""

    def __init__(self, block: Block, number: int, kernel: Callable, arguments: tuple) -> None:
        super().__init__(daemon=True)
        self.block, self.number, self.kernel, self.arguments = block, number, kernel, arguments
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.request: tuple | None = ("start",)
        self.answer: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.go.acquire()
        try:
            self.kernel(*self.arguments)
        except BaseException as error:
            self.error = error
        self.request = None
        self.stopped.release()

    def wait(self, *request: Any) -> Any:
        self.request = request
        self.stopped.release()
        self.go.acquire()
        return self.answer


class Block:
    """Stands in for `ptx` and `ptx_tile` both."""

    def __init__(self) -> None:
        self.block = (0, 0, 0)
        self.shared = np.zeros(0, np.uint8)
        self.arrays: list = []
        self.INTEGER, self.REAL = {32: _int32}, {"f32": float}
        self.WIDEN = {"f32": _same, **{dtype: _widen(dtype) for dtype in _NARROW}}
        self.NARROW = {"f32": _same, **{dtype: _narrow(dtype) for dtype in _NARROW}}
        self.UNPACK = {dtype: self._unpack(dtype) for dtype in _NARROW}
        self.PACK = {dtype: self._pack(dtype) for dtype in _NARROW}
        self.LOAD = self.LOAD_CONSTANT = {count: self._load(count) for count in (1, 2, 4)}
        self.STORE = {count: self._store(count) for count in (1, 2, 4)}
        self.LOAD_SHARED = {count: self._load_shared(count) for count in (1, 2, 4)}
        self.STORE_SHARED = {count: self._store_shared(count) for count in (1, 2, 4)}
        self.PAIR_HALVES = {0: _pair(0x5410), 1: _pair(0x7632)}
        self.MULTIPLY = {name: self._multiply(name) for name in ("f16", "bf16", "tf32")}
        self.cuda = SimpleNamespace(
            types=SimpleNamespace(uint32=lambda value: int(value) & 0xFFFFFFFF),
            local=SimpleNamespace(array=lambda count, _: [None] * count),
            shared=SimpleNamespace(array=self._shared_array),
            syncthreads=lambda: self._here().wait("block"),
        )

    inline = pointer = staticmethod(_same)
    divided, word_of, float_of, to_tf32 = (staticmethod(f) for f in (_divided, _word_of, _float_of, _word_of))

    @staticmethod
    def record(fields: Any, bits: int) -> Any:
        return fields

    @staticmethod
    def fma(a: float, b: float, c: float) -> float:
        return a * b + c

    @staticmethod
    def load_constant(base: Memory, index: int) -> Any:
        return base[index]

    def _here(self) -> _Thread:
        thread = threading.current_thread()
        assert isinstance(thread, _Thread)
        return thread

    def thread_x(self) -> int:
        return self._here().number

    def block_x(self) -> int:
        return self.block[0]

    def block_y(self) -> int:
        return self.block[1]

    def block_z(self) -> int:
        return self.block[2]

    def dynamic_shared(self) -> int:
        return _SHARED_BASE

    def _shared_array(self, count: int, _: Any) -> list:
        if not self.arrays:
            self.arrays.append([float("nan")] * count)
        return self.arrays[0]

    def _shared_at(self, where: int, size_bytes: int, align: int) -> int:
        at = where - _SHARED_BASE
        assert 0 <= at <= self.shared.size - size_bytes, f"shared address {at} of {self.shared.size}"
        assert at % align == 0, f"shared address {at} is no multiple of {align}"
        return at

    def _load_shared(self, count: int) -> Callable:
        def load(where: int) -> Any:
            at = self._shared_at(where, 4 * count, 4 * count)
            words = struct.unpack(f"={count}I", self.shared[at : at + 4 * count].tobytes())
            return words[0] if count == 1 else words

        return load

    def _store_shared(self, count: int) -> Callable:
        def store(where: int, words: Any) -> None:
            at = self._shared_at(where, 4 * count, 4 * count)
            data = struct.pack(f"={count}I", *([words] if count == 1 else words))
            self.shared[at : at + 4 * count] = np.frombuffer(data, np.uint8)

        return store

    def _load(self, count: int) -> Callable:
        def load(base: Memory, index: int) -> Any:
            elements = 4 * count // _itemsize(base.dtype)
            base.check(index, elements, elements)
            words = tuple(int(w) for w in base.raw[index : index + elements].view(np.uint32))
            return words[0] if count == 1 else words

        return load

    def _store(self, count: int) -> Callable:
        def store(base: Memory, index: int, words: Any) -> None:
            elements = 4 * count // _itemsize(base.dtype)
            base.check(index, elements, elements)
            base.written[index : index + elements] = True
            whole = np.array([words] if count == 1 else words, np.uint32)
            base.raw[index : index + elements] = whole.view(base.raw.dtype)

        return store

    def _unpack(self, dtype: str) -> Callable:
        return lambda word: (self.WIDEN[dtype](word & 0xFFFF), self.WIDEN[dtype](word >> 16))

    def _pack(self, dtype: str) -> Callable:
        return lambda low, high: self.NARROW[dtype](low) | self.NARROW[dtype](high) << 16

    def shuffle_xor(self, value: float, lanes: int) -> float:
        return self._here().wait("warp", "shuffle", (value, lanes))

    def load_matrices_transposed(self, where: int) -> tuple:
        return self._here().wait("warp", "matrices", where)

    def _multiply(self, name: str) -> Callable:
        return lambda a, b, c: self._here().wait("warp", name, (a, b, c))

    def answered(self, name: str, given: list) -> list:
        """What each lane of a warp gets."""
        if name == "shuffle":
            return [given[lane ^ lanes][0] for lane, (_, lanes) in enumerate(given)]
        if name == "matrices":
            return self._matrices(given)
        return _products(name, given)

    def _matrices(self, addresses: list[int]) -> list:
        rows = []
        for where in addresses:
            at = self._shared_at(where, 16, 16)
            rows.append(self.shared[at : at + 16].view(np.uint16).astype(np.uint32))
        four = [np.stack(rows[8 * i : 8 * i + 8]) for i in range(4)]
        return [tuple(int(m[2 * t, g] | m[2 * t + 1, g] << 16) for m in four) for g in range(8) for t in range(4)]

    def run(self, kernel: Callable, launch: Launch, block: tuple[int, int, int], arguments: tuple) -> None:
        """One block of a launch."""
        self.block, self.arrays = block, []
        self.shared = np.full(launch.dynamic_shared_bytes, 0xFF, np.uint8)
        threads = [_Thread(self, number, kernel, arguments) for number in range(launch.source.threads)]
        for thread in threads:
            thread.start()
        ready = threads
        while ready:
            for thread in ready:
                thread.go.release()
                thread.stopped.acquire()
                if thread.error:
                    raise thread.error
            ready = self._released(threads)

    def _released(self, threads: list[_Thread]) -> list[_Thread]:
        """Those that have waited for what has come: a whole warp at one instruction, or the block."""
        ready = []
        for first in range(0, len(threads), 32):
            warp = threads[first : first + 32]
            requests = [thread.request for thread in warp]
            if all(request and request[0] == "warp" for request in requests):
                names = {request[1] for request in requests if request}
                assert len(names) == 1, f"one warp at {names}"
                answers = self.answered(names.pop(), [request[2] for request in requests if request])
                for thread, answer in zip(warp, answers, strict=True):
                    thread.answer = answer
                ready += warp
        if not ready:
            waiting = [thread for thread in threads if thread.request]
            assert all(thread.request == ("block",) for thread in waiting), "threads wait for different things"
            assert len(waiting) in (0, len(threads)), "some threads wait at a barrier that others have left"
            ready = waiting
        return ready


def _products(name: str, given: list) -> list:
    """mma.sync with the fragments of PTX."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane, (words_a, words_b, sums) in enumerate(given):
        g, t = lane >> 2, lane & 3
        if name == "tf32":
            for i, word in enumerate(words_a):
                a[g + i % 2 * 8, t + i // 2 * 4] = _float_of(word)
            for i, word in enumerate(words_b):
                b[t + i * 4, g] = _float_of(word)
        else:
            for i, word in enumerate(words_a):
                a[g + i % 2 * 8, 2 * t + i // 2 * 8 : 2 * t + i // 2 * 8 + 2] = _halves(name, word)
            for i, word in enumerate(words_b):
                b[2 * t + i * 8 : 2 * t + i * 8 + 2, g] = _halves(name, word)
        c[g, 2 * t : 2 * t + 2], c[g + 8, 2 * t : 2 * t + 2] = sums[:2], sums[2:]
    d = a @ b + c
    return [
        (*d[lane >> 2, lane % 4 * 2 : lane % 4 * 2 + 2], *d[(lane >> 2) + 8, lane % 4 * 2 : lane % 4 * 2 + 2])
        for lane in range(32)
    ]


def _halves(dtype: str, word: int) -> np.ndarray:
    return np.array([word], np.uint32).view(_NARROW[dtype]).astype(np.float64)


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Block:
    """The block in the place of `ptx` and `ptx_tile` for builders in these modules, whose functions are not kept."""
    block = Block()
    for name in ("ptx", "ptx_tile"):
        monkeypatch.setitem(nbdnn.kernels.cuda.__dict__, name, block)
    for module in modules:
        for name, found in list(vars(module).items()):
            if hasattr(found, "cache_info"):
                monkeypatch.setattr(module, name, found.__wrapped__)
    return block


def run(block: Block, launches: list[Launch], operands: list[Memory], workspace: Memory, scalars: tuple) -> None:
    """All blocks of all launches."""
    for launch in launches:
        kernel, _ = launch.source.builder(*launch.source.specialised_on)
        given = {WORKSPACE: workspace, NULL: None, **dict(enumerate(operands))}
        pointers = [given[place] for place in launch.pointers]
        arguments = (*pointers, *(scalars if launch.scalars else ()), launch.integers)
        across, down, deep = launch.grid
        for x in range(across):
            for y in range(down):
                for z in range(deep):
                    block.run(kernel, launch, (x, y, z), arguments)
