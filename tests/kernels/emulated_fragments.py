"""From the sums of matrix instructions to memory: what stands in for `ptx_fragments`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from emulated import Memory

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.epilogue import Finish


class FragmentWords:
    """Each lane stores its own pairs, where the GPU's exchange them for whole vectors first."""

    def __init__(self, words: Any) -> None:
        self._words = words

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
            sums: tuple, pointers: tuple, scalars: tuple, lane: int, place: tuple, left: tuple, step: int
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
