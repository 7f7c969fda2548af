"""Rows in registers: loads, stores, formulas and sums over tuples of float32, all of it unrolled.

A thread holds vectors, of `lanes` neighbouring elements each, as one flat tuple. Beside it stand tuples of numbers, one
for all elements or one a lane: element i meets number ``i % numbers``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import NamedTuple

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I64, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_vector import floats, load_parts, parts_of, store_vector, widened

# Two elements of 16 bits, or one of 32, that stand for what a row does not have.
FILL = {
    "zero": {"f16": 0, "bf16": 0, "f32": 0},
    "-inf": {"f16": 0xFC00FC00, "bf16": 0xFF80FF80, "f32": 0xFF800000},
}
_CHAINS = 4  # sums that grow side by side, of all the numbers of a thread
_LOG2_E = 1.4426950408889634


class Place(NamedTuple):
    """Where vectors lie: vector k at base[at + k * step].

    It exists where position + k * position_step < end; these are int32.
    """

    base: object
    at: int
    step: int
    position: int
    position_step: int
    end: int


class Held(NamedTuple):
    """What a thread holds: so many vectors. shared: of shared memory."""

    dtype: str
    lanes: int
    vectors: int
    shared: bool = False


def _vectors(builder, held: Held, place_type, place):
    """(address, whether it exists) of each vector."""
    at = dict(zip(place_type.fields, unpacked(builder, place, len(place_type)), strict=True))
    where, step, position = (
        builder.gep(at["base"], [_wide(builder, at["at"])]),
        _wide(builder, at["step"]),
        at["position"],
    )
    for k in range(held.vectors):
        yield where, builder.icmp_signed("<", position, at["end"])
        if k + 1 < held.vectors:
            where, position = builder.gep(where, [step]), builder.add(position, at["position_step"])


def _wide(builder, integer):
    return integer if integer.type == I64 else builder.sext(integer, I64)


@cache
def load(held: Held, fill: str):
    """Intrinsic (place) -> the parts of the vectors as they lie in memory, `fill` for those that do not exist."""
    part, count = parts_of(held.dtype, held.lanes)
    bits = FILL[fill][held.dtype] & (2**part.width - 1)
    of_memory = types.UniTuple({16: types.uint16, 32: types.uint32}[part.width], held.vectors * count)

    @intrinsic
    def load_vectors(typingctx, place):
        def codegen(context, builder, sig, args):
            parts = []
            for where, exists in _vectors(builder, held, sig.args[0], args[0]):
                parts += load_parts(builder, where, exists, *held[:2], fill=bits, shared=held.shared)
            return packed(builder, parts)

        return signature(of_memory, place), codegen

    return load_vectors


@cache
def widen(held: Held):
    """Intrinsic (parts) -> the elements."""
    _, count = parts_of(held.dtype, held.lanes)

    @intrinsic
    def widen_parts(typingctx, parts):
        def codegen(context, builder, sig, args):
            given = unpacked(builder, args[0], sig.args[0].count)
            vectors = [given[i : i + count] for i in range(0, len(given), count)]
            return packed(builder, [value for each in vectors for value in widened(builder, held.dtype, each)])

        return signature(floats(held.vectors * held.lanes), parts), codegen

    return widen_parts


@cache
def store(held: Held):
    """Intrinsic (place, values): the vectors that exist."""

    @intrinsic
    def store_vectors(typingctx, place, values):
        def codegen(context, builder, sig, args):
            elements, lanes = unpacked(builder, args[1], held.vectors * held.lanes), held.lanes
            for i, (where, exists) in enumerate(_vectors(builder, held, sig.args[0], args[0])):
                values = elements[i * lanes : (i + 1) * lanes]
                store_vector(builder, where, exists, held.dtype, values, shared=held.shared)
            return context.get_dummy_value()

        return signature(types.none, place, values), codegen

    return store_vectors


@cache
def hidden(held: Held):
    """Intrinsic (parts, 0) -> the parts as they were. No compiler may know the 0: what elements of 16 bits are widened
    to is then made anew, where it would else be kept in twice as many registers."""

    @intrinsic
    def hide(typingctx, parts, nothing):
        def codegen(context, builder, sig, args):
            if held.dtype == "f32":
                return args[0]
            given = unpacked(builder, args[0], sig.args[0].count)
            mask = builder.trunc(args[1], given[0].type) if given[0].type.width < args[1].type.width else args[1]
            return packed(builder, [builder.xor(part, mask) for part in given])

        return signature(parts, parts, types.uint32), codegen

    return hide


# ---- vector by vector, of parts as they were loaded ------------------------------------------------------------------


def _afresh(builder, held: Held, parts, i):
    """Vector i of `parts`, of which LLVM knows nothing: elements widened before are not kept for it."""
    part, count = parts_of(held.dtype, held.lanes)
    letter = {16: "h", 32: "r"}[part.width]
    move = f"mov.b{part.width} $0, $1;", f"={letter},{letter}"
    given = [builder.extract_value(parts, i * count + j) for j in range(count)]
    return widened(builder, held.dtype, [asm(builder, part, *move, [each], EFFECT) for each in given])


def _terms(builder, held: Held, formula, i, parts, numbers):
    """The formula of the elements of vector i and the numbers that they meet."""
    vectors = [_afresh(builder, held, each, i) for each in parts]
    for lane, elements in enumerate(zip(*vectors, strict=True)):
        meets = [each[lane % len(each)] for each in numbers]
        yield formula(builder, *elements, *meets)


@cache
def gather(held: Held, formula: Callable, combine: Callable, inputs: int):
    """Intrinsic (parts of so many arrays, numbers) -> what combines the formula of all elements that meet a number.

    There are as many results as numbers.
    """

    def typed(*arguments):
        def codegen(context, builder, sig, args):
            count = sig.args[inputs].count
            numbers, chains = unpacked(builder, args[inputs], count), max(1, _CHAINS // count)
            sums: dict[tuple[int, int], ir.Value] = {}
            for i in range(held.vectors):
                terms = _terms(builder, held, formula, i, args[:inputs], [numbers])
                for lane, term in enumerate(terms):
                    place = lane % count, (i * held.lanes + lane) // count % chains
                    sums[place] = combine(builder, sums[place], term) if place in sums else term
            of_number = [[sums[place] for place in sorted(sums) if place[0] == number] for number in range(count)]
            return packed(builder, [reduce(partial(combine, builder), chain) for chain in of_number])

        return signature(floats(arguments[inputs].count), *arguments), codegen

    return _of_arguments(typed, inputs + 1)


@cache
def scatter(held: Held, formula: Callable, inputs: int, numbers: int):
    """Intrinsic (place, parts of so many arrays, so many tuples of numbers): stores the formula of the elements."""

    def typed(*arguments):
        def codegen(context, builder, sig, args):
            given = args[1 : inputs + 1]
            tuples = [unpacked(builder, args[i], sig.args[i].count) for i in range(inputs + 1, inputs + 1 + numbers)]
            for i, (where, exists) in enumerate(_vectors(builder, held, sig.args[0], args[0])):
                values = list(_terms(builder, held, formula, i, given, tuples))
                store_vector(builder, where, exists, held.dtype, values, shared=held.shared)
            return context.get_dummy_value()

        return signature(types.none, *arguments), codegen

    return _of_arguments(typed, 1 + inputs + numbers)


# ---- formulas, of LLVM values ----------------------------------------------------------------------------------------


def itself(builder, value, *others):
    return value


def larger(builder, a, b):
    """The larger; a number rather than NaN."""
    return asm(builder, F32, "max.f32 $0, $1, $2;", "=f,f,f", [a, b])


def total(builder, a, b):
    return builder.fadd(a, b)


def product(builder, a, b, *others):
    return builder.fmul(a, b)


def power(builder, value, shift):
    """exp(value - shift): off by 2^-22 and as much as a difference of float32 is; 0 below the smallest normal."""
    difference = builder.fsub(value, shift)
    return _exp2(builder, builder.fmul(difference, F32(_LOG2_E)))


def power_share(builder, value, shift, scale):
    """exp(value - shift) * scale."""
    return builder.fmul(power(builder, value, shift), scale)


def log_power(builder, value, shift, total_log):
    """log(exp(value - shift) / total)."""
    return builder.fsub(builder.fsub(value, shift), total_log)


def gradient(builder, dy, y, dot):
    return builder.fmul(builder.fsub(dy, dot), y)


def log_gradient(builder, dy, y, sum_of_dy):
    powers = _exp2(builder, builder.fmul(y, F32(_LOG2_E)))
    return builder.fma(_negative(builder, powers), sum_of_dy, dy)


def finite(builder, value):
    """0 instead of -inf: what is compared with it stays a number."""
    none = builder.fcmp_ordered("==", value, F32(float("-inf")))
    return builder.select(none, F32(0.0), value)


def reciprocal(builder, value):
    return asm(builder, F32, "rcp.rn.f32 $0, $1;", "=f,f", [value])


def log(builder, value):
    function = ir.FunctionType(F32, [F32])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, "__nv_logf"), [value])


def _negative(builder, value):
    return builder.fsub(F32(-0.0), value)


def _exp2(builder, value):
    return asm(builder, F32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", [value])


# ---- formulas on tuples ----------------------------------------------------------------------------------------------


@cache
def each(formula: Callable, operands: int):
    """Intrinsic of so many tuples -> the formula of their elements, as many as the longest has."""

    def typed(*tuples):
        longest = max(given.count for given in tuples)

        def codegen(context, builder, sig, args):
            lists = [unpacked(builder, arg, given.count) for arg, given in zip(args, sig.args, strict=True)]
            met = [[of[i] if len(of) == longest else of[i % len(of)] for of in lists] for i in range(longest)]
            return packed(builder, [formula(builder, *elements) for elements in met])

        return signature(floats(longest), *tuples), codegen

    return _of_arguments(typed, operands)


def _of_arguments(typed: Callable, count: int):
    """An intrinsic has as many arguments as its function is written with."""

    @intrinsic
    def of_one(typingctx, a):
        return typed(a)

    @intrinsic
    def of_two(typingctx, a, b):
        return typed(a, b)

    @intrinsic
    def of_three(typingctx, a, b, c):
        return typed(a, b, c)

    @intrinsic
    def of_four(typingctx, a, b, c, d):
        return typed(a, b, c, d)

    return (of_one, of_two, of_three, of_four)[count - 1]


@cache
def fold(formula: Callable, numbers: int):
    """Intrinsic (values) -> `numbers` numbers, each the formula over the elements that meet it."""

    @intrinsic
    def folded(typingctx, values):
        def codegen(context, builder, sig, args):
            elements = unpacked(builder, args[0], sig.args[0].count)
            met = [[each for i, each in enumerate(elements) if i % numbers == number] for number in range(numbers)]
            chains = max(1, _CHAINS // numbers)
            combined = partial(reduce, partial(formula, builder))
            results = [
                combined([combined(each[chain::chains]) for chain in range(min(chains, len(each)))]) for each in met
            ]
            return packed(builder, results)

        return signature(floats(numbers), values), codegen

    return folded


@cache
def across(formula: Callable, first: int, end: int):
    """Intrinsic (numbers) -> the formula over lanes whose numbers differ in bits from `first` up to below `end`."""

    @intrinsic
    def exchanged(typingctx, numbers):
        def codegen(context, builder, sig, args):
            held, bit = unpacked(builder, args[0], sig.args[0].count), first
            while bit < end:
                text = f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, 0xffffffff;"
                others = [asm(builder, F32, text, "=f,f", [number], EFFECT) for number in held]
                held = [formula(builder, mine, other) for mine, other in zip(held, others, strict=True)]
                bit *= 2
            return packed(builder, held)

        return signature(numbers, numbers), codegen

    return exchanged
