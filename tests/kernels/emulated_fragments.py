"""From the sums of matrix instructions to memory: what stands in for `ptx_fragments` and `ptx_patch`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from emulated import Memory

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.epilogue import Finish
from nbdnn.kernels.cuda.wgmma_patch_store import Chunks


class FragmentWords:
    """Each lane stores its own pairs, where the GPU's exchange them for whole vectors first."""

    def __init__(self, words: Any) -> None:
        self._words = words

    @staticmethod
    def asked(how: Finish) -> Callable:
        return lambda pointers, lane, place, left, step: ()

    def stored(self, how: Finish) -> Callable:
        finish, tokens, words, dtype = epilogue.finish("f32", how.epilogue), how.epilogue, self._words, how.dtype
        is_wide, nothing = dtype == "f32", (0.0, 0.0)

        def read(base: Memory, at: int, is_wanted: bool = True) -> tuple:
            if not is_wanted:
                return nothing
            return tuple(base.load(at, 2)) if is_wide else words.UNPACK[dtype](base.load(at, 1)[0])

        def shift_of(bias: Memory, first: int, row: int, column: int) -> tuple:
            if "bias" not in tokens:
                return nothing
            if how.by_column:
                return read(bias, first + column)
            return (words.WIDEN[dtype](words.load_constant(bias, first + row)),) * 2

        def store(
            sums: tuple, asked: tuple, pointers: tuple, scalars: tuple, lane: int, place: tuple, left: tuple, step: int
        ) -> None:
            (out, bias, residual), (first, first_bias), (rows, columns) = pointers, place, left
            assert columns % (2 if is_wide else 8) == 0, f"{columns} columns are left"
            assert is_wide or first % 8 == step % 8 == 0, f"vectors at {first} and each {step}"
            for half, eight in product((0, 1), range(how.columns // 8)):
                row, column = lane // 4 + 8 * half, 8 * eight + 2 * (lane % 4)
                if row >= rows or column >= columns:
                    continue
                at, pair = first + row * step + column, sums[4 * eight + 2 * half :][:2]
                before, added = read(out, at, "beta" in tokens), read(residual, at, "res" in tokens)
                values = zip(pair, before, shift_of(bias, first_bias, row, column), added, strict=True)
                finished = [finish(value, *scalars, *each) for value, *each in values]
                out.store(at, finished if is_wide else [words.PACK[dtype](*finished)])

        return store


class PatchWords:
    """Each thread asks for all of a chunk when it has met the others for it."""

    def __init__(self, words: Any, meet: Callable) -> None:
        self._words, self._meet = words, meet

    def store_chunks(self, how: Chunks) -> Callable:
        words, finish, lanes = self._words, epilogue.finish("f32", how.tokens), 1 if how.planar else 4
        of_line = how.chunk if how.planar else 16

        def read(base: Memory, at: int, is_read: bool) -> list[float]:
            if not is_read:
                return [0.0] * lanes
            return [words.WIDEN[how.dtype](base[at + lane]) for lane in range(lanes)]

        def runs(size: int, thread: int):
            """(slot of a chunk, filter) of each run of neighbours of a thread."""
            line, place = divmod(thread, of_line)
            for i in range(line, 64 if how.planar else size, 128 // of_line):
                if how.planar and place < size:
                    yield place, i
                elif not how.planar:
                    yield i, 4 * place

        def store(sums: tuple, where: tuple, barrier: int, numbers: tuple, pointers: tuple, scalars: tuple) -> None:
            (staged, own, places), (out, bias, residual) = where, pointers
            thread, first_filter, filters, of_filter = numbers
            for number, first in enumerate(range(0, how.slots, how.chunk)):
                size, half = min(how.chunk, how.slots - first), number % 2 * how.chunk * how.slot_bytes
                pairs = product(range(0, size, 8), (0, 8), (0, 1))
                for value, (eight, later, second) in zip(sums[first // 2 :], pairs, strict=False):
                    words.STORE_SHARED[1](own + half + (eight + second) * how.slot_bytes + 4 * later, value)
                self._meet(barrier)
                for slot, row in runs(size, thread):
                    place = words.INTEGER[32](words.LOAD_SHARED[1](places + 4 * (first + slot)))
                    of_run = first_filter + row
                    if place < 0 or of_run >= filters:
                        continue
                    came = words.LOAD_SHARED[lanes](staged + half + slot * how.slot_bytes + 4 * row)
                    values = [words.float_of(word) for word in (came if lanes > 1 else (came,))]
                    at = place + of_run * of_filter
                    before, added = read(out, at, "beta" in how.tokens), read(residual, at, "res" in how.tokens)
                    shift = read(bias, of_run, "bias" in how.tokens)
                    for lane, each in enumerate(zip(values, before, shift, added, strict=True)):
                        out[at + lane] = words.NARROW[how.dtype](finish(each[0], *scalars, *each[1:]))
            self._meet(barrier)

        return store
