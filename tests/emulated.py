"""Blocks of a GPU on plain Python: kernels run as they are written, thread by thread, with stand-ins for `ptx`.

Each thread is run until it meets a barrier, then the next: so the first is as far ahead of the last as it may be. Where
copies are `early` they are done at once, else when they are waited for; a kernel that is right in both neither reads
what may not have arrived nor overwrites what may still be read. Memory that nobody wrote is NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import nan, prod
from operator import add
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from guarded import values

import nbdnn.kernels.cuda
from nbdnn import reference_conv
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.problem import Operand
from nbdnn.problem_conv import ConvProblem

_SHARED_WORDS = 1 << 16


class Pointer:
    """The elements of an operand in the order of its memory; an index outside of them is an error."""

    def __init__(self, operand: Operand, value: np.ndarray | None) -> None:
        array = np.full(operand.size_elems, nan)
        if value is not None:
            bytes_ = tuple(8 * stride for stride in operand.strides)
            np.lib.stride_tricks.as_strided(array, operand.shape, bytes_)[...] = value
        self.flat: list[float] = array.tolist()
        self.written: list[int] = []

    def __getitem__(self, index: int) -> float:
        assert 0 <= index < len(self.flat), f"read of element {index} of {len(self.flat)}"
        return self.flat[index]

    def __setitem__(self, index: int, value: float) -> None:
        assert 0 <= index < len(self.flat), f"write of element {index} of {len(self.flat)}"
        self.written.append(index)
        self.flat[index] = value


class Memory(Pointer):
    """A workspace of so many elements."""

    def __init__(self, elements: int) -> None:
        self.flat, self.written = [nan] * elements, []


class _Thread:
    """A thread of the block: where it is in the order of the others, and what it has not waited for."""

    def __init__(self, number: int, body: Callable[[], None]) -> None:
        self.number, self.finished, self.error = number, False, None
        self.groups: list[list] = []
        self.started: list = []
        self.allocated = 0
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._body = body
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            self._body()
        except BaseException as error:
            self.error = error
        self.finished = True
        self.stopped.release()

    def resume(self) -> None:
        self.go.release()
        self.stopped.acquire()
        if self.error:
            raise self.error

    def pause(self) -> None:
        self.stopped.release()
        self.go.acquire()


def _int32(value: int) -> int:
    assert -(2**31) <= value < 2**31
    return int(value)


def _same(value):
    return value


def _divided(dividend: int, divisor: int) -> tuple[int, int]:
    assert dividend >= 0 and divisor > 0, f"{dividend} divided by {divisor}"
    return divmod(dividend, divisor)


class Block:
    """Stands in for `ptx` and `ptx_tile`: the words of a kernel, for the threads of one block, on Python's numbers."""

    INTEGER, REAL = {32: _int32, 64: int}, {"f32": float, "f64": float}
    WIDEN = NARROW = dict.fromkeys(("f16", "bf16", "f32", "f64"), _same)
    WORD = staticmethod(int)
    divided, inline, pointer = staticmethod(_divided), staticmethod(_same), staticmethod(_same)
    words_of = word_of = float_of = computed_here = staticmethod(_same)

    def __init__(self, early: bool = False) -> None:
        self.early = early
        self.place = (0, 0, 0)
        self.cuda = SimpleNamespace(
            local=SimpleNamespace(array=lambda count, _: [None] * count),
            shared=SimpleNamespace(array=self._allocate),
            syncthreads=lambda: self._now.pause(),
            types=SimpleNamespace(uint32=int),
        )
        counts = (1, 2, 4)
        self.LOAD = self.LOAD_CONSTANT = {count: self._load(count) for count in counts}
        self.STORE = {count: self._store(count) for count in counts}
        self.LOAD_SHARED = {count: self._load_shared(count) for count in counts}
        self.STORE_SHARED = {count: self._store_shared(count) for count in counts}
        self.COPY_ASYNC = {4 * count: self._copy(count) for count in counts}

    def run(self, kernel: Callable, arguments: list, threads: int, place: tuple[int, ...]) -> None:
        """The block at `place` of the grid, from its first thread to its last, from barrier to barrier."""
        self.place, self.shared = place, [nan] * _SHARED_WORDS
        running = [_Thread(number, lambda: kernel(*arguments)) for number in range(threads)]
        while running:
            for self._now in running:
                self._now.resume()
            finished = [thread.finished for thread in running]
            assert all(finished) or not any(finished), "some threads left before a barrier"
            running = [] if all(finished) else running

    def thread_x(self) -> int:
        return self._now.number

    def block_x(self) -> int:
        return self.place[0]

    def block_y(self) -> int:
        return self.place[1]

    def block_z(self) -> int:
        return self.place[2]

    @staticmethod
    def record(fields, bits):
        return fields

    @staticmethod
    def load_constant(base: Pointer, index: int) -> float:
        return base[index]

    @staticmethod
    def address(base: Pointer, index: int) -> tuple[Pointer, int]:
        return base, index

    @staticmethod
    def fma(a: float, b: float, c: float) -> float:
        return a * b + c

    def outer_products(self, depth: int, a_bytes: tuple[int, int], b_bytes: tuple[int, int]):
        load = self.LOAD_SHARED[4]

        def multiply(sums: tuple, a: int, b: int) -> tuple:
            for k in range(depth):
                rows = [load(a + k * a_bytes[0] + half) for half in (0, a_bytes[1])]
                columns = [load(b + k * b_bytes[0] + half) for half in (0, b_bytes[1])]
                pairs = [(row, column) for row in rows for column in columns]
                products = ([x * y for x in row for y in column] for row, column in pairs)
                sums = tuple(tuple(map(add, old, new)) for old, new in zip(sums, products, strict=True))
            return sums

        return multiply

    @staticmethod
    def sandwich(matrix: tuple[tuple[float, ...], ...]):
        factor = np.array(matrix)

        def transform(source: list[float], target: list[float]) -> None:
            extent = factor.shape[1]
            target[:] = (factor @ np.reshape(source, (extent, extent)) @ factor.T).ravel().tolist()

        return transform

    @staticmethod
    def _load(count: int):
        def load(base: Pointer, index: int):
            assert index % count == 0, f"{count} words at element {index}"
            return base[index] if count == 1 else tuple(base[index + i] for i in range(count))

        return load

    @staticmethod
    def _store(count: int):
        def store(base: Pointer, index: int, values) -> None:
            assert index % count == 0, f"{count} words at element {index}"
            for i, value in enumerate([values] if count == 1 else values):
                base[index + i] = value

        return store

    def _allocate(self, count: int, _: object, alignment: int = 4) -> SharedArray:
        start = -(-self._now.allocated // 4) * 4
        self._now.allocated = start + count
        assert self._now.allocated <= _SHARED_WORDS
        return SharedArray(self, start)

    @staticmethod
    def dynamic_shared() -> int:
        return 0

    @staticmethod
    def shared_address(array: SharedArray) -> int:
        return 4 * array.start

    def _load_shared(self, count: int):
        def load(where: int):
            assert where % (4 * count) == 0, f"{count} words at shared address {where}"
            at = where // 4
            return self.shared[at] if count == 1 else tuple(self.shared[at : at + count])

        return load

    def _store_shared(self, count: int):
        def store(where: int, words) -> None:
            assert where % (4 * count) == 0, f"{count} words at shared address {where}"
            self.shared[where // 4 : where // 4 + count] = [words] if count == 1 else words

        return store

    def _copy(self, count: int):
        def copy(shared: int, source: tuple[Pointer, int], source_bytes: int) -> None:
            base, index = source
            present = source_bytes // 4
            assert shared % (4 * count) == 0 and index % count == 0, f"{count} words from element {index} to {shared}"
            words = [base[index + i] for i in range(present)] + [0.0] * (count - present)
            if self.early:
                self.shared[shared // 4 : shared // 4 + count] = words
            else:
                self._now.started.append((shared // 4, words))

        return copy

    def copy_async_commit(self) -> None:
        self._now.groups.append(self._now.started)
        self._now.started = []

    def copy_async_wait(self, groups: int):
        def wait() -> None:
            while len(self._now.groups) > groups:
                for at, words in self._now.groups.pop(0):
                    self.shared[at : at + len(words)] = words

        return wait


class SharedArray:
    def __init__(self, block: Block, start: int) -> None:
        self._block, self.start = block, start

    def __getitem__(self, index: int) -> float:
        return self._block.shared[self.start + index]

    def __setitem__(self, index: int, value: float) -> None:
        self._block.shared[self.start + index] = value


def _places(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Every block of a grid."""
    x, y, _ = grid
    return [(i % x, i // x % y, i // (x * y)) for i in range(prod(grid))]


def install(block: Block, modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, kernels that these modules build are for `block`."""
    monkeypatch.setitem(nbdnn.kernels.cuda.__dict__, "ptx", block)
    monkeypatch.setitem(nbdnn.kernels.cuda.__dict__, "ptx_tile", block)
    for module in modules:
        for name, built in list(vars(module).items()):
            if hasattr(built, "cache_clear"):
                monkeypatch.setattr(module, name, built.__wrapped__)


def result(candidate: LaunchedCandidate, problem: ConvProblem, config: Any, device: Gpu, block: Block) -> tuple:
    """(the output's elements, those expected) of all blocks of all launches; each was written once, and nothing else.

    The operands are small integers, alpha is 1 and beta -1.
    """
    given, scalars = values(problem, "integers"), (1.0, -1.0)
    operands = {operand.name: Pointer(operand, given.get(operand.name)) for operand in problem.operands}
    every = [*operands.values(), Memory(candidate.workspace_bytes(problem, config, device) // 4), None]
    for launch in candidate.launches(problem, config, device):
        kernel, _ = launch.source.builder(*launch.source.specialised_on)
        arguments = [*(every[at] for at in launch.pointers), *(scalars if launch.scalars else ()), launch.integers]
        for place in _places(launch.grid):
            block.run(kernel, arguments, launch.source.threads, place)
    (out,) = (operand for operand in problem.operands if operand.role == "out")
    for name, operand in operands.items():
        assert sorted(operand.written) == (list(range(out.size_elems)) if name == out.name else [])
    return operands[out.name].flat, Pointer(out, reference_conv.compute(problem, given, scalars)).flat
