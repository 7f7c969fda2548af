"""The words of 1x1 layers in float32: what stands in for `ptx_pointwise`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
from emulated import Block, Memory

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.pointwise_tile import LINE_BYTES, QUAD, SWIZZLE, Factor, Products


class PointwiseWords:
    """Lanes that load 16 bytes at once meet every bank once or read the same, eight by eight, and more of those that
    load less."""

    def __init__(self, block: Block, words: Any) -> None:
        self._block, self._words = block, words

    def _values(self, factor: Factor, addresses: Sequence[int]) -> np.ndarray:
        """[lane][element][step]."""
        load, place_of, words = self._words.LOAD_SHARED, self._words._at, factor.words
        if not factor.step_bytes:
            lines = [factor.different * i for i in range(factor.held)]
            places = [(line % SWIZZLE * 16, line * LINE_BYTES) for line in lines]
            found = [list(map(load[QUAD], place_of(addresses, place, 16, 8, True))) for place in places]
            return np.swapaxes(found, 0, 1).astype(float)
        values = np.empty((32, factor.held, QUAD))
        for step, i in product(range(QUAD), range(0, factor.held, words)):
            place = (0, step * factor.step_bytes + 4 * factor.place(i))
            found = map(load[words], place_of(addresses, place, 4 * words, 32 // words, True))
            values[:, i : i + words, step] = np.reshape(list(found), (32, words))
        return values

    def lane_products(self, products: Products) -> Callable:
        def compute(brought: list[tuple[int, int]]) -> list[tuple]:
            addresses = zip(*brought, strict=True)
            wide, narrow = (self._values(*of_one) for of_one in zip(products, addresses, strict=True))
            return list(map(tuple, np.einsum("lis,ljs->lij", wide, narrow).reshape(32, -1).tolist()))

        multiply = self._words._collective(f"elements {products}", compute)
        return lambda sums, wide, narrow: tuple(np.add(sums, multiply((wide, narrow))).tolist())

    @staticmethod
    def stored(products: Products, tokens: tuple[str, ...], bias_is_wide: bool) -> Callable:
        (wide, narrow), finish = products, epilogue.finish("f32", tokens)

        def row(base: Memory, at: int, is_read: bool) -> list:
            return base.load(at, wide.words) if is_read else [0.0] * wide.words

        def store(sums: tuple, pointers: tuple, scalars: tuple, place: tuple, left: tuple, step: int) -> None:
            (out, bias, residual), (first, first_bias) = pointers, place
            for j, i in product(range(narrow.held), range(0, wide.held, wide.words)):
                if not (narrow.place(j) < left[1] and wide.place(i) < left[0]):
                    continue
                at = first + narrow.place(j) * step + wide.place(i)
                shift = [0.0] * wide.words
                if "bias" in tokens:
                    if bias_is_wide:
                        shift = bias.load(first_bias + wide.place(i), wide.words)
                    else:
                        shift = [bias[first_bias + narrow.place(j)]] * wide.words
                before, added = row(out, at, "beta" in tokens), row(residual, at, "res" in tokens)
                finished = [
                    finish(sums[(i + lane) * narrow.held + j], *scalars, before[lane], shift[lane], added[lane])
                    for lane in range(wide.words)
                ]
                out.store(at, finished)

        return store
