"""Tiled kernels run on the CPU, lane by lane: every CUDA thread of a block is a Python thread.

The kernel's own Python function runs, with stand-ins for the intrinsics that it calls. They are stricter than a GPU:
an address beyond an operand or the shared memory, a misaligned one, a bank conflict where fragments are loaded and sums
stored, and a matrix that was not wholly copied raise. An asynchronous copy arrives when its thread waits for it, not
before. What they cannot show: what the compiler makes of the function, and races within a barrier's interval.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

import nbdnn.kernels.cuda as package
from nbdnn.kernels.cuda import epilogue, gemm_gather, gemm_pixels, gemm_store, gemm_tile, quads
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch

_NARROW = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
_SHARED_BASE = 1024  # an address of shared memory, so that 0 is none
_TIMEOUT_S = 120


class _Block:
    """Shared memory, barriers, and what the lanes of each warp bring to a collective instruction."""

    def __init__(self, threads: int, shared_bytes: int, x: int, y: int) -> None:
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.x, self.y = x, y
        self.barrier = threading.Barrier(threads, timeout=_TIMEOUT_S)
        self.warps = [threading.Barrier(32, timeout=_TIMEOUT_S) for _ in range(threads // 32)]
        self.brought: list[list] = [[None] * 32 for _ in self.warps]
        self.results: list[Sequence] = [()] * len(self.warps)

    def abort(self) -> None:
        for barrier in (self.barrier, *self.warps):
            barrier.abort()


class _Here(threading.local):
    """Of one CUDA thread: which it is, and its copies: those of the open group, and the committed groups."""

    block: _Block
    thread: int
    copies: list
    groups: list


_here = _Here()


def run(launch: Launch, operands: Sequence[np.ndarray], workspace: np.ndarray, scalars: tuple[float, float]) -> None:
    """All blocks of a launch, one after the other; operands are flat, 16-bit ones as uint16."""
    kernel, types = launch.source.builder(*launch.source.specialised_on)

    def memory(place: int, dtype: str) -> np.ndarray:
        if place > WORKSPACE:
            return [*operands, np.zeros(0, np.float32)][place]
        return workspace.view(np.uint8)[WORKSPACE - place :].view(np.uint16 if dtype in _NARROW else np.float32)

    pointers = tuple(map(memory, launch.pointers, types))
    arguments = (*pointers, *(map(np.float32, scalars) if launch.scalars else ()), launch.integers)
    threads = launch.source.threads
    for y in range(launch.grid[1]):
        for x in range(launch.grid[0]):
            block, faults = _Block(threads, launch.dynamic_shared_bytes, x, y), []
            lanes = [
                threading.Thread(target=_thread, args=(i, block, kernel, arguments, faults)) for i in range(threads)
            ]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
            assert not faults, faults[0]


def _thread(index: int, block: _Block, kernel: Callable, arguments: tuple, faults: list[str]) -> None:
    _here.block, _here.thread, _here.copies, _here.groups = block, index, [], []
    try:
        kernel(*arguments)
    except threading.BrokenBarrierError:
        faults.append("a thread waits for one that does not come")
    except BaseException:
        faults.insert(0, traceback.format_exc())
        block.abort()


@contextmanager
def standing_in() -> Iterator[None]:
    """Within, kernels are built from the stand-ins."""
    names = ("ptx", "ptx_tile", "ptx_matrix")
    real = {name: sys.modules.get(f"{package.__name__}.{name}") for name in names}
    before = threading.stack_size(512 << 10)
    try:
        _install(dict(zip(names, (_ptx(), _ptx_tile(), _ptx_matrix()), strict=True)))
        yield
    finally:
        _install(real)
        threading.stack_size(before)


def _install(modules: dict[str, ModuleType | None]) -> None:
    for name, module in modules.items():
        if module is None:
            sys.modules.pop(f"{package.__name__}.{name}", None)
            package.__dict__.pop(name, None)
        else:
            sys.modules[f"{package.__name__}.{name}"] = module
            setattr(package, name, module)
    for user in (epilogue, gemm_gather, gemm_pixels, gemm_store, gemm_tile, quads):
        for function in vars(user).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


# ---- ptx -------------------------------------------------------------------------------------------------------------


def _int32(value: int) -> int:
    return ((int(value) + 2**31) & 0xFFFFFFFF) - 2**31


def _divided(dividend: int, divisor: int) -> tuple[int, int]:
    assert dividend >= 0 and divisor > 0, (dividend, divisor)
    return divmod(dividend, divisor)


def _shift_left(value: int, count: int) -> int:
    assert 0 <= count < 32, count
    return _int32(value << count)


def _ptx() -> ModuleType:
    module = ModuleType("ptx")
    local, shared = SimpleNamespace(array=lambda count, kind: [0] * count), None
    loads, stores = ({count: table(count) for count in (1, 2, 4)} for table in (_load, _store))
    module.__dict__.update(
        inline=lambda function: function,
        INTEGER={32: _int32, 64: int},
        WORD=lambda value: int(value) & 0xFFFFFFFF,
        REAL={"f32": np.float32},
        WIDEN={"f32": lambda value: value, **{dtype: _widen(kind) for dtype, kind in _NARROW.items()}},
        NARROW={"f32": lambda value: value, **{dtype: _narrow(kind) for dtype, kind in _NARROW.items()}},
        pointer=lambda dtype: dtype,
        record=lambda fields, bits: fields,
        thread_x=lambda: _here.thread,
        block_x=lambda: _here.block.x,
        block_y=lambda: _here.block.y,
        divided=_divided,
        inside=lambda position, extent: int(0 <= position < extent),
        shift_left=_shift_left,
        fma=lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)),
        address=lambda base, index: (base, index),
        load_constant=_element,
        LOAD=loads,
        LOAD_CONSTANT=loads,
        STORE=stores,
        cuda=SimpleNamespace(local=local, shared=shared, syncthreads=lambda: _here.block.barrier.wait()),
    )
    return module


def _widen(kind: type) -> Callable:
    return lambda element: element.view(kind).astype(np.float32)


def _narrow(kind: type) -> Callable:
    return lambda value: np.float32(value).astype(kind).view(np.uint16)


def _element(base: np.ndarray, index: int):
    assert 0 <= index < base.size, (index, base.size)
    return base[index]


def _words_at(base: np.ndarray, index: int, count: int) -> np.ndarray:
    elements = 4 * count // base.itemsize
    assert 0 <= index <= base.size - elements and index % elements == 0, (index, base.size, count)
    return base[index : index + elements].view(np.uint32)


def _as_words(words: np.ndarray):
    return tuple(map(int, words)) if len(words) > 1 else int(words[0])


def _load(count: int) -> Callable:
    return lambda base, index: _as_words(_words_at(base, index, count))


def _store(count: int) -> Callable:
    def store(base: np.ndarray, index: int, words) -> None:
        _words_at(base, index, count)[:] = words

    return store


# ---- ptx_tile --------------------------------------------------------------------------------------------------------


def _shared(address: int, size_bytes: int) -> np.ndarray:
    at, shared = address - _SHARED_BASE, _here.block.shared
    assert 0 <= at <= shared.size - size_bytes and at % size_bytes == 0, (at, size_bytes, shared.size)
    return shared[at : at + size_bytes]


def _store_shared(count: int) -> Callable:
    def store(address: int, words) -> None:
        _shared(address, 4 * count).view(np.uint32)[:] = words

    return store


def _commit() -> None:
    _here.groups.append(_here.copies)
    _here.copies = []


def _wait(most: int) -> Callable:
    def wait() -> None:
        while len(_here.groups) > most:
            for to, (base, index), size_bytes in _here.groups.pop(0):
                target = _shared(to, 16).view(np.uint32)
                target[:] = _words_at(base, index, 4) if size_bytes == 16 else 0

    return wait


def _ptx_tile() -> ModuleType:
    module = ModuleType("ptx_tile")

    def unpack(kind: type) -> Callable:
        return lambda word: tuple(np.array([word], np.uint32).view(kind).astype(np.float32))

    def pack(kind: type) -> Callable:
        return lambda low, high: int(np.array([low, high], np.float32).astype(kind).view(np.uint32)[0])

    module.__dict__.update(
        UNPACK={dtype: unpack(kind) for dtype, kind in _NARROW.items()},
        PACK={dtype: pack(kind) for dtype, kind in _NARROW.items()},
        float_of=lambda word: np.array([word], np.uint32).view(np.float32)[0],
        PAIR_HALVES={0: lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16, 1: lambda a, b: a >> 16 | b >> 16 << 16},
        word_of=lambda value: int(np.array([value], np.float32).view(np.uint32)[0]),
        dynamic_shared=lambda: _SHARED_BASE,
        LOAD_SHARED={
            count: (lambda address, size=4 * count: _as_words(_shared(address, size).view(np.uint32)))
            for count in (1, 2, 4)
        },
        STORE_SHARED={count: _store_shared(count) for count in (1, 2, 4)},
        COPY_ASYNC={16: lambda *copy: _here.copies.append(copy)},
        copy_async_commit=_commit,
        copy_async_wait=_wait,
    )
    return module


# ---- ptx_matrix ------------------------------------------------------------------------------------------------------


def _collective(brought: object, compute: Callable[[list], Sequence]):
    """What `compute` makes, for this lane, of what all lanes of the warp bring."""
    block, (warp, lane) = _here.block, divmod(_here.thread, 32)
    block.brought[warp][lane] = brought
    block.warps[warp].wait()
    if lane == 0:
        block.results[warp] = compute(block.brought[warp])
    block.warps[warp].wait()
    return block.results[warp][lane]


def _at(addresses: Sequence[int], place: tuple[int, int], size_bytes: int, at_once: int) -> list[int]:
    """Where in shared memory lanes find what is at a place, `at_once` of them without a conflict of banks."""
    xor, add = place
    found = [(address ^ xor) + add for address in addresses]
    for first in range(0, len(found), at_once):
        banks = {address // size_bytes % (128 // size_bytes) for address in found[first : first + at_once]}
        assert len(banks) == at_once, f"{at_once} lanes meet {len(banks)} banks at {place}"
    return found


def _load_matrices(places: tuple, transposed: bool) -> Callable:
    def compute(addresses: list[int]) -> list[tuple]:
        words = []
        for place in places:
            rows = _at(addresses, place, 16, 8)
            for first in range(0, 32, 8):
                matrix = np.stack([_shared(row, 16).view(np.uint16) for row in rows[first : first + 8]])
                words.append(np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32))
        return [tuple(int(matrix[lane // 4, lane % 4]) for matrix in words) for lane in range(32)]

    return lambda address: _collective(address, compute)


def _load_words(places: tuple) -> Callable:
    def compute(addresses: list[int]) -> list[tuple]:
        words = [[int(_shared(at, 4).view(np.uint32)[0]) for at in _at(addresses, place, 4, 32)] for place in places]
        return list(zip(*words, strict=True))

    return lambda address: _collective(address, compute)


def _store_floats(places: tuple, count: int) -> Callable:
    def compute(brought: list[tuple]) -> list[None]:
        for i, place in enumerate(places):
            found = _at([address for address, _ in brought], place, 4 * count, 32 // count)
            for at, (_, values) in zip(found, brought, strict=True):
                _shared(at, 4 * count).view(np.float32)[:] = values[count * i : count * (i + 1)]
        return [None] * 32

    return lambda address, values: _collective((address, values), compute)


def _factors(words: Sequence[int], dtype: str) -> np.ndarray:
    """The elements that words hold, one row a word; TF32 rounded to nearest, ties away from zero."""
    bits = np.array(words, np.uint32)
    if dtype == "tf32":
        return ((bits + 0x1000) & 0xFFFFE000).view(np.float32).reshape(-1, 1).astype(float)
    return bits.view(_NARROW[dtype]).reshape(-1, 2).astype(float)


def _multiply(dtype: str, tiles_m: int, tiles_n: int) -> Callable:
    """By the tables of PTX: lane l has of a rows l/4 and l/4 + 8, of b column l/4, of k what l%4 says."""
    width = 1 if dtype == "tf32" else 2  # of k in a word

    def compute(brought: list[tuple]) -> list[tuple]:
        a, b = np.full((tiles_m, 16, 8 * width), np.nan), np.full((tiles_n, 8 * width, 8), np.nan)
        c = np.full((tiles_m, tiles_n, 16, 8), np.nan)
        for lane, (sums, words_a, words_b) in enumerate(brought):
            row, pair = divmod(lane, 4)
            low = slice(width * pair, width * pair + width)
            high = slice(low.start + 4 * width, low.stop + 4 * width)
            for place, part in enumerate(((row, low), (row + 8, low), (row, high), (row + 8, high))):
                a[:, *part] = _factors(words_a, dtype)[place::4]
            for place, part in enumerate((low, high)):
                b[:, part, row] = _factors(words_b, dtype)[place::2]
            own = np.array(sums, np.float64).reshape(tiles_m, tiles_n, 2, 2)
            c[:, :, row, 2 * pair : 2 * pair + 2], c[:, :, row + 8, 2 * pair : 2 * pair + 2] = (
                own[:, :, 0],
                own[:, :, 1],
            )
        assert not np.isnan(a).any() and not np.isnan(b).any(), "multiplies what was not copied"
        c = (c + np.einsum("imk,jkn->ijmn", a, b)).astype(np.float32)
        lanes = (divmod(lane, 4) for lane in range(32))
        return [tuple(c[:, :, [row, row + 8], 2 * pair : 2 * pair + 2].reshape(-1)) for row, pair in lanes]

    return lambda sums, words_a, words_b: _collective((sums, words_a, words_b), compute)


def _ptx_matrix() -> ModuleType:
    module = ModuleType("ptx_matrix")
    module.__dict__.update(
        load_matrices_at=cache(_load_matrices),
        load_words_at=cache(_load_words),
        store_floats_at=cache(_store_floats),
        multiply_tile=cache(_multiply),
        zeros=lambda count: lambda: (np.float32(0.0),) * count,
    )
    return module
