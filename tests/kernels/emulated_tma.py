"""What stands in for `ptx_tma` and `ptx_wgmma`: copies by tensor maps, barriers in memory, products of a warpgroup.

A copy arrives at once, or not before somebody waits for its barrier (`Block.early`). A factor lies where a copy left
it: what is known of swizzled lines stands here once, and copies and products have to agree with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from emulated import Block, Memory, Word, float_of
from guarded import NUMPY_DTYPE

from nbdnn.kernels.cuda.tensor_map import TensorMap
from nbdnn.problem import ITEMSIZE

_LINE_BYTES, _CHUNK_BYTES = 128, 16
_Map = tuple[TensorMap, Memory]


def _word_at(line: int, word: int) -> int:
    """The address of a word of a line, which begins at an address."""
    chunk, within = divmod(4 * word, _CHUNK_BYTES)
    return line + _CHUNK_BYTES * (chunk ^ line // _LINE_BYTES % 8) + within


class _Barrier:
    """Of one phase after the other: arrivals and bytes that are to come, and copies that wait for somebody to wait."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.missing_bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []

    def settle(self) -> None:
        assert self.missing >= 0, "more arrivals than a phase has"
        if self.missing == self.missing_bytes == 0:
            self.missing, self.phase = self.arrivals, self.phase ^ 1


class TmaWords:
    """Stands in for `ptx_tma`."""

    TensorMaps = staticmethod(lambda count: None)
    map_of = staticmethod(lambda maps, place: maps[place])

    def __init__(self, block: Block) -> None:
        self._block = block
        self.COPY_BOX = dict.fromkeys((2, 3, 4), self._copy_box)
        self.COPY_PIXELS = dict.fromkeys((2, 3), self._copy_pixels)
        self.MEET = {threads: lambda threads=threads: block.now.wait(str(threads)) for threads in (128, 256, 512)}

    def meet_warpgroup(self, barrier: int) -> None:
        assert 2 <= barrier < 16, f"barrier {barrier}"
        self._block.now.wait(f"128 at {barrier}")

    def initialise(self, address: int, arrivals: int) -> None:
        assert address % 8 == 0
        self._block.shared[self._block.place_of(address, 2)] = _Barrier(arrivals)  # type: ignore[call-overload]

    def publish_barriers(self) -> None:
        pass

    def reads_before_copies(self) -> None:
        warp, waited = self._block.warp, self._block.waited
        waited[warp].add(self._block.now.number)
        if len(waited[warp]) == 32:
            self._block.reading[warp].clear()
            waited[warp].clear()

    def _barrier(self, address: int) -> _Barrier:
        found = self._block.shared[self._block.place_of(address, 2)]
        assert isinstance(found, _Barrier), f"no barrier at {address}"
        return found

    def expect_bytes(self, address: int, count: int) -> None:
        self._barrier(address).missing_bytes += count
        self.arrive(address)

    def arrive(self, address: int) -> None:
        barrier = self._barrier(address)
        barrier.missing -= 1
        barrier.settle()
        self._block.moved = True

    def writes_before_copies(self) -> None:
        self._block.now.sees_writes = True

    def copy_bytes(self, shared: int, source: tuple[Memory, int], count: int, barrier: int) -> None:
        assert shared % 16 == count % 16 == 0
        assert self._block.now.sees_writes, "a copy of what others wrote, without a fence"
        self._block.now.sees_writes = False
        base, index = source
        first = self._block.place_of(shared, 1)
        self._refuse_reads(range(first, first + count // 4))

        def arrive() -> None:
            self._block.shared[first : first + count // 4] = base.load(index, count // 4, 4)
            waited = self._barrier(barrier)
            waited.missing_bytes -= count
            waited.settle()

        if self._block.early:
            arrive()
        else:
            self._barrier(barrier).copies.append(arrive)

    def wait(self, address: int, phase: int) -> None:
        while True:
            barrier = self._barrier(address)
            while barrier.copies:
                barrier.copies.pop(0)()
            if barrier.phase != phase:
                return
            self._block.now.wait("turn")

    def _copy_box(self, shared: int, source: _Map, barrier: int, place: Sequence[int], _: tuple) -> None:
        tensor, _ = source
        outer = product(*(range(extent) for extent in reversed(tensor.box[1:])))
        steps = [tuple(reversed(step)) for step in outer]
        lines = [(place[0], *(at + step for at, step in zip(place[1:], each, strict=True))) for each in steps]
        self._start(shared, source, barrier, lines)

    def _copy_pixels(self, shared: int, source: _Map, barrier: int, place: Sequence[int], taps: Sequence[int]) -> None:
        tensor, _ = source
        lines = [
            (place[0], *(at + tap for at, tap in zip(pixel, taps, strict=True)), n)
            for pixel, n in self._pixels(tensor, place)
        ]
        self._start(shared, source, barrier, lines)

    @staticmethod
    def _pixels(tensor: TensorMap, place: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """The pixels of a copy, the innermost axis first, from a place on: rows, planes, images."""
        window = tensor.window
        assert window is not None
        ends = [extent - 1 + upper for extent, upper in zip(tensor.extents[1:-1], window.upper, strict=True)]
        pixel, n = list(place[1:-1]), place[-1]
        for axis, at in enumerate(pixel):
            assert window.lower[axis] <= at <= ends[axis], f"a copy begins at {at}: {window}"
        for _ in range(tensor.box[1]):
            yield tuple(pixel), n
            for axis, step in enumerate(window.steps):
                pixel[axis] += step
                if pixel[axis] <= ends[axis]:
                    break
                pixel[axis] = window.lower[axis]
            else:
                n += 1

    def _start(self, shared: int, source: _Map, barrier: int, lines: list[tuple[int, ...]]) -> None:
        tensor, _ = source
        line_bytes = tensor.box[0] * ITEMSIZE[tensor.dtype] if tensor.plain else _LINE_BYTES
        assert shared % (128 if tensor.plain else 1024) == line_bytes % 16 == 0 and max(tensor.box) <= 256
        first = self._block.place_of(shared, 1)
        self._refuse_reads(range(first, first + len(lines) * line_bytes // 4))

        def arrive() -> None:
            for i, line in enumerate(lines):
                self._store_line(shared + i * line_bytes, line_bytes, source, line)
            waited = self._barrier(barrier)
            waited.missing_bytes -= len(lines) * line_bytes
            waited.settle()

        if self._block.early:
            arrive()
        else:
            self._barrier(barrier).copies.append(arrive)

    def _refuse_reads(self, filled: range) -> None:
        for (place, warp), read in self._block.reading.items():
            overwritten = place == self._block.place and read.intersection(filled)
            assert not overwritten, f"a copy overwrites what warp {warp} may still be reading"

    def _store_line(self, at: int, count_bytes: int, source: _Map, place: tuple[int, ...]) -> None:
        """So many bytes from a place on, zeros outside of the tensor."""
        tensor, memory = source
        each = ITEMSIZE[tensor.dtype]
        inside = all(0 <= p < extent for p, extent in zip(place[1:], tensor.extents[1:], strict=True))
        index = sum(p * stride // each for p, stride in zip(place[1:], tensor.strides_bytes, strict=True)) + place[0]
        for number in range(count_bytes // 4):
            element = number * 4 // each
            alive = inside and 0 <= place[0] + element < tensor.extents[0]
            (word,) = memory.load(index + element, 1) if alive else (0,)
            target = at + 4 * number if tensor.plain else _word_at(at, number)
            self._block.shared[self._block.place_of(target, 1)] = word


class WgmmaWords:
    """Stands in for `ptx_wgmma`: what products read is being read until their group has been waited for."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._groups: defaultdict[tuple, list[set[int]]] = defaultdict(lambda: [set()])  # of a warp, the open one last

    def fence(self) -> None:
        pass

    @staticmethod
    def registers(count: int, more: bool) -> Callable:
        assert count % 8 == 0 and 24 <= count <= 256
        return lambda: None

    def commit(self) -> None:
        if self._is_first_lane():
            self._groups[self._block.warp].append(set())

    def wait(self) -> None:
        self._wait_for_all_but(0)

    def wait_for_all_but_last(self) -> None:
        self._wait_for_all_but(1)

    def _wait_for_all_but(self, last: int) -> None:
        if self._is_first_lane():
            warp = self._block.warp
            self._groups[warp] = self._groups[warp][-1 - last :]
            self._note_reads(warp)

    def _is_first_lane(self) -> bool:
        """All lanes do the same."""
        return self._block.now.number % 32 == 0

    def _note_reads(self, warp: tuple) -> None:
        place, number = warp
        self._block.reading[place, f"{number}, whose products it is,"] = set().union(*self._groups[warp])

    @staticmethod
    def descriptor(apart_bytes: int = 16) -> Callable:
        return lambda address: (address, apart_bytes)

    def multiply(self, dtype: str, n: int, steps: int, a_turned: bool, b_turned: bool) -> Callable:
        assert dtype != "tf32" or not (a_turned or b_turned)
        depth = steps * (8 if dtype == "tf32" else 16)
        name = f"wgmma {dtype} {n} {steps} {a_turned} {b_turned}"

        def compute(brought: list[tuple]) -> list[tuple]:
            _, a_at, b_at, warp = brought[0]
            assert all(each[1:] == brought[0][1:] for each in brought), "lanes differ in their descriptors"
            a = self._factor(dtype, a_at, 64, depth, a_turned)[16 * warp : 16 * warp + 16]
            assert not np.isnan(a).any(), "multiplies what was not written"
            b = self._factor(dtype, b_at, n, depth, b_turned)
            products = (a @ b.T).reshape(2, 8, n // 8, 4, 2)  # (half, row, eight columns, lane's pair, of the pair)
            sums = np.reshape([each[0] for each in brought], (8, 4, n // 8, 2, 2)) + products.transpose(1, 3, 2, 0, 4)
            return list(map(tuple, sums.reshape(32, -1).tolist()))

        self._block.collectives[name] = compute

        def add(sums: tuple, a: tuple, b: tuple) -> tuple:
            now = self._block.now
            return now.wait(name, (sums, a, b, now.number // 32 % 4))

        return add

    def _factor(self, dtype: str, at: tuple[int, int], rows: int, depth: int, turned: bool) -> np.ndarray:
        """(rows, depth) of a or b."""
        start, apart = at
        lines = depth if turned else rows
        boxes, of_a_word = -(-rows // 64) if turned else 1, 1 if dtype == "tf32" else 2
        places = [
            self._block.place_of(_word_at(start + box * apart + line * _LINE_BYTES, word), 1)
            for box in range(boxes)
            for line in range(lines)
            for word in range((64 if turned else depth) // of_a_word)
        ]
        self._groups[self._block.warp][-1].update(places)
        self._note_reads(self._block.warp)
        words: list[Word] = [self._block.shared[place] for place in places]
        if dtype == "tf32":
            return np.array(list(map(float_of, words))).reshape(rows, depth)
        # What was not written is NaN. Of b it spoils its own column of the sums, which may be one that nobody stores.
        bits = [0x7FFF7FFF if word != word else word for word in words]
        found = np.array(bits, np.uint32).view(NUMPY_DTYPE[dtype]).astype(float).reshape(boxes, lines, -1)
        return found.transpose(0, 2, 1).reshape(-1, depth)[:rows] if turned else found[0]
