"""What a warp does with two factors of a 1x1 layer in float32, all of it unrolled (`pointwise_tile.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.pointwise_tile import LINE_BYTES, QUAD, SWIZZLE, Factor, Products
from nbdnn.kernels.cuda.ptx import F32, I32, load_words, packed, unpacked
from nbdnn.kernels.cuda.ptx_tile import shared_at
from nbdnn.kernels.cuda.ptx_vector import load_vector, store_vector

_READ_WORDS = 12  # of outputs that are asked for before the first is waited for


class _Loads:
    """A factor's loads. step: the values of one step; steps: of an element those of all."""

    def __init__(self, builder, factor: Factor, address) -> None:
        self._builder, self._factor, self._address = builder, factor, address
        if factor.step_bytes == 0:
            turns = [factor.different * i % SWIZZLE for i in range(-(-SWIZZLE // factor.different))]
            self._turned = [builder.xor(address, I32(turn * 16)) for turn in turns]

    def _load(self, where, add: int, words: int) -> list:
        loaded = load_words(self._builder, shared_at(self._builder, where, add), words)
        every = unpacked(self._builder, loaded, words) if words > 1 else [loaded]
        return [self._builder.bitcast(word, F32) for word in every]

    def steps(self, i: int) -> list:
        turned = self._turned[i % len(self._turned)]
        return self._load(turned, i * self._factor.different * LINE_BYTES, QUAD)

    def step(self, step: int) -> list:
        words, first = self._factor.words, step * self._factor.step_bytes
        places = [self._factor.place(i) for i in range(0, self._factor.held, words)]
        return [value for place in places for value in self._load(self._address, first + 4 * place, words)]


def _pairs(wide: _Loads, narrow: _Loads, products: Products) -> Iterator[tuple]:
    """(wide element, narrow element, a value of one, of the other), all that are to be multiplied and added."""
    by_rows, (of_wide, of_narrow) = [bool(factor.step_bytes) for factor in products], [f.held for f in products]
    if any(by_rows):
        held = [
            None if is_row else [loads.steps(i) for i in range(count)]
            for is_row, loads, count in zip(by_rows, (wide, narrow), (of_wide, of_narrow), strict=True)
        ]
        for step in range(QUAD):
            first, second = (
                loads.step(step) if lines is None else [line[step] for line in lines]
                for loads, lines in zip((wide, narrow), held, strict=True)
            )
            for j, i in product(range(of_narrow), range(of_wide)):
                yield i, j, first[i], second[j]
    elif of_wide <= of_narrow:
        lines = [wide.steps(i) for i in range(of_wide)]
        for j in range(of_narrow):
            line = narrow.steps(j)
            for step, i in product(range(QUAD), range(of_wide)):
                yield i, j, lines[i][step], line[step]
    else:
        lines = [narrow.steps(j) for j in range(of_narrow)]
        for i in range(of_wide):
            line = wide.steps(i)
            for step, j in product(range(QUAD), range(of_narrow)):
                yield i, j, line[step], lines[j][step]


@cache
def lane_products(products: Products):
    """Intrinsic (sums, shared address of the wide factor, of the narrow one) -> sums + products of four steps.

    An address is that of the lane's first element at the first step. sums: of each wide element those with all narrow
    ones.
    """

    @intrinsic
    def multiply(typingctx, sums, wide, narrow):
        def codegen(context, builder, sig, args):
            total = unpacked(builder, args[0], products.sums)
            loads = [_Loads(builder, factor, at) for factor, at in zip(products, args[1:], strict=True)]
            for i, j, first, second in _pairs(*loads, products):
                at = i * products.narrow.held + j
                total[at] = builder.fma(first, second, total[at])
            return packed(builder, total)

        floats = types.UniTuple(types.float32, products.sums)
        return signature(floats, floats, types.uint32, types.uint32), codegen

    return multiply


@cache
def stored(products: Products, tokens: tuple[str, ...], bias_is_wide: bool):
    """Intrinsic (sums, pointers of the output, the bias and the residual, alpha and beta, place, left, step): finished
    sums to memory, where wide elements are neighbours and narrow ones lie so many steps apart.

    place: (of the lane's first output, of its first bias). left: how many elements there are from the lane's first one
    on, (wide, narrow): of what is loaded and stored together all or none. bias_is_wide: whether wide elements have a
    bias each, else narrow ones.
    """
    wide, narrow = products
    words, finish, real = wide.words, epilogue.finish("f32", tokens).py_func, types.float32
    reads_out, has_bias, has_residual = (token in tokens for token in ("beta", "bias", "res"))
    two = types.UniTuple(types.int32, 2)

    @intrinsic
    def store(typingctx, sums, pointers, scalars, place, left, step):
        def codegen(context, builder, sig, args):
            total, (out, bias, residual) = unpacked(builder, args[0], products.sums), unpacked(builder, args[1], 3)
            (alpha, beta), (first, first_bias) = unpacked(builder, args[2], 2), unpacked(builder, args[3], 2)
            wide_left, narrow_left = unpacked(builder, args[4], 2)
            zeros = [F32(0.0)] * words

            def loaded(pointer, at, wanted, count, constant=True):
                where = builder.gep(pointer, [at])
                return load_vector(builder, where, wanted, "f32", count, constant=constant)

            runs = []  # (wide element, narrow element, place, whether it exists)
            for j in range(narrow.held):
                row = builder.add(first, builder.mul(args[5], I32(narrow.place(j))))
                is_narrow = builder.icmp_signed("<", I32(narrow.place(j)), narrow_left)
                for i in range(0, wide.held, words):
                    is_there = builder.and_(is_narrow, builder.icmp_signed("<", I32(wide.place(i)), wide_left))
                    runs.append((i, j, builder.add(row, I32(wide.place(i))), is_there))
            # What is read and then written keeps its order: some are asked for before the first is waited for.
            read: list = []

            def ask():
                if reads_out and len(read) < len(runs):
                    *_, at, is_there = runs[len(read)]
                    read.append(loaded(out, at, is_there, words, constant=False))

            for _ in range(_READ_WORDS // words):
                ask()
            for number, (i, j, at, is_there) in enumerate(runs):
                before, shift = read[number] if reads_out else zeros, zeros
                if has_bias and bias_is_wide:
                    shift = loaded(bias, builder.add(first_bias, I32(wide.place(i))), is_there, words)
                elif has_bias:
                    shift = loaded(bias, builder.add(first_bias, I32(narrow.place(j))), is_there, 1) * words
                added = loaded(residual, at, is_there, words) if has_residual else zeros
                finished = []
                for lane in range(words):
                    of_lane = [before[lane], shift[lane], added[lane]]
                    given = [total[(i + lane) * narrow.held + j], alpha, beta, *of_lane]
                    finished.append(context.compile_internal(builder, finish, signature(real, *[real] * 6), given))
                ask()
                store_vector(builder, builder.gep(out, [at]), is_there, "f32", finished)
            return context.get_dummy_value()

        floats, reals = types.UniTuple(types.float32, products.sums), types.UniTuple(types.float32, 2)
        return signature(types.none, floats, pointers, reals, two, two, types.int32), codegen

    return store
