"""Products of the FMA units, written out: of a lane's factors in shared memory, of one that it holds, and of a small
matrix that is known."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import F32, I32, load_words, packed, unpacked


class Factor(NamedTuple):
    """A factor of `outer_products` in shared memory, of which a lane has 2 x 4 elements for each k; in bytes.

    Where they are neighbours, row is from a k to the next. by_k: an element's 8 k are neighbours instead, 4 elements a
    line of 128 bytes, whose pieces of 16 bytes lie where their number ^ that of the line says. half: from the first
    four elements to the others.
    """

    row: int
    half: int
    by_k: bool = False


@cache
def outer_products(depth: int, a: Factor, b: Factor):
    """Intrinsic (sums, shared address of A, of B) -> sums + A^T B: `depth` k of A and B, a multiple of 4,
    of 2 x 4 float32 each.

    An address by_k is that of the line of the lane's elements, and of its first piece there. sums: four tuples of 16,
    by rows: the first four of A by the first and by the other four of B, then the others of A by both.
    """

    by_quarters = [(i + m, j + n) for i in (0, 4) for j in (0, 4) for m in range(4) for n in range(4)]

    def load(builder, where, offset, xor=0):
        if xor:
            where = builder.xor(where, I32(xor))
        at = builder.inttoptr(builder.add(where, I32(offset)), I32.as_pointer(3))
        return [builder.bitcast(word, F32) for word in unpacked(builder, load_words(builder, at, 4), 4)]

    def element(builder, where, factor, i, first_k):
        """Four k of one of the eight."""
        return load(builder, where, i // 4 * factor.half, (i % 4 * 2 + first_k // 4) * 16)

    def of_k(builder, where, factor, k):
        return [value for half in (0, factor.half) for value in load(builder, where, k * factor.row + half)]

    def whole(builder, where, factor, first_k):
        """[k][i] of four k and all eight."""
        if not factor.by_k:
            return [of_k(builder, where, factor, first_k + k) for k in range(4)]
        return list(zip(*(element(builder, where, factor, i, first_k) for i in range(8)), strict=True))

    @intrinsic
    def multiply(typingctx, sums, a_at, b_at):
        def codegen(context, builder, sig, args):
            total = [unpacked(builder, quarter, 16) for quarter in unpacked(builder, args[0], 4)]

            def add(i, j, row, column):
                quarter, at = total[i // 4 * 2 + j // 4], i % 4 * 4 + j % 4
                quarter[at] = builder.fma(row, column, quarter[at])

            for first_k in range(0, depth, 4):
                # Of two factors by k the second comes an element at a time, else the one that is not comes k by k.
                if b.by_k:
                    rows = whole(builder, args[1], a, first_k)
                    for j in range(8):
                        for k, value in enumerate(element(builder, args[2], b, j, first_k)):
                            for i in range(8):
                                add(i, j, rows[k][i], value)
                    continue
                rows = whole(builder, args[1], a, first_k) if a.by_k else []
                for k in range(4):
                    row = rows[k] if a.by_k else of_k(builder, args[1], a, first_k + k)
                    column = of_k(builder, args[2], b, first_k + k)
                    for i, j in by_quarters:
                        add(i, j, row[i], column[j])
            return packed(builder, [packed(builder, quarter) for quarter in total])

        return signature(sums, sums, types.uint32, types.uint32), codegen

    return multiply


@cache
def sandwich(matrix: tuple[tuple[float, ...], ...]):
    """Intrinsic (source, target): target = matrix @ source @ its transpose, of local arrays of float32, by rows.

    The matrix is part of the code: nothing is done for a 0, and an addition for 1 and -1.
    """
    rows, columns = len(matrix), len(matrix[0])

    def combination(builder, row, values):
        total = None
        for coefficient, value in zip(row, values, strict=True):
            if coefficient == 0:
                continue
            if total is None:
                total = value if coefficient == 1 else builder.fmul(F32(coefficient), value)
            elif abs(coefficient) == 1:
                total = (builder.fadd if coefficient == 1 else builder.fsub)(total, value)
            else:
                total = builder.fma(F32(coefficient), value, total)
        return total

    @intrinsic
    def transform(typingctx, source, target):
        def codegen(context, builder, sig, args):
            before, after = (
                context.make_array(kind)(context, builder, array).data
                for kind, array in zip(sig.args, args, strict=True)
            )
            elements = [builder.load(builder.gep(before, [I32(i)])) for i in range(columns * columns)]
            by_column = [[combination(builder, row, elements[j::columns]) for j in range(columns)] for row in matrix]
            for i in range(rows):
                for j, row in enumerate(matrix):
                    builder.store(combination(builder, row, by_column[i]), builder.gep(after, [I32(i * rows + j)]))
            return context.get_dummy_value()

        return signature(types.none, source, target), codegen

    return transform


@cache
def rows_by_images(units: int, gates: int, quads: int, images: int, pitch_bytes: int):
    """Intrinsic (weights, found, shared address): what a lane's part of rows and of images comes to, both local arrays.

        found[unit, image, gate] = sum over k of weights[unit, gate, k] * image[k]

    Of an image, which begin `pitch_bytes` apart, a lane has `quads` of 4 k, 32 lanes side by side; so has it of a row.
    """

    @intrinsic
    def multiply(typingctx, weights, found, address):
        def codegen(context, builder, sig, args):
            of_array = lambda i: context.make_array(sig.args[i])(context, builder, args[i]).data  # noqa: E731
            row, result = of_array(0), of_array(1)
            for image in range(images):
                sums = [F32(0.0)] * (units * gates)
                for quad in range(quads):
                    at = builder.add(args[2], I32(image * pitch_bytes + quad * 32 * 16))
                    words = load_words(builder, builder.inttoptr(at, I32.as_pointer(3)), 4)
                    values = [builder.bitcast(word, F32) for word in unpacked(builder, words, 4)]
                    for i, j in product(range(units * gates), range(4)):
                        weight = builder.load(builder.gep(row, [I32((i * quads + quad) * 4 + j)]))
                        sums[i] = builder.fma(weight, values[j], sums[i])
                for i, total in enumerate(sums):
                    place = (i // gates * images + image) * gates + i % gates
                    builder.store(total, builder.gep(result, [I32(place)]))
            return context.get_dummy_value()

        return signature(types.none, weights, found, types.uint32), codegen

    return multiply
