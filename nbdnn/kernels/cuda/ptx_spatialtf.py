"""Weights of pixels without branches, and additions to memory that other threads add to at the same time.

As intrinsics of either type of floats: inlined functions with conditions in them cost Numba seconds a kernel.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, I64, WARP, asm, conversion, unpacked
from nbdnn.kernels.cuda.ptx_tile import shared_at
from nbdnn.kernels.cuda.ptx_vector import parts_of, widened

_MOMENTS = 6  # of an output's slopes: those along either axis, by themselves, by its column, by its row
_LETTER = {"f32": "f", "f64": "d"}


def _of(formula, operands: int):
    """An intrinsic of so many floats of one type, whose code `formula` builds."""

    def codegen(context, builder, sig, args):
        return formula(builder, *args)

    @intrinsic
    def one(typingctx, a):
        return signature(a, a), codegen

    @intrinsic
    def two(typingctx, a, b):
        return signature(a, a, a), codegen

    return one if operands == 1 else two


def _size(builder, a):
    dtype, letter = ("f32", "f") if a.type == F32 else ("f64", "d")
    return asm(builder, a.type, f"abs.{dtype} $0, $1;", f"={letter},{letter}", [a])


def _instruction(text: str, operands: int):
    """A formula that is one instruction of either type, for which {} stands in the text."""

    def build(builder, *values):
        dtype, letter = ("f32", "f") if values[0].type == F32 else ("f64", "d")
        return asm(builder, values[0].type, text.format(dtype), ",".join([f"={letter}", *[letter] * operands]), values)

    return _of(build, operands)


def _reciprocal(builder, a):
    text, letter = ("rcp.approx.f32 $0, $1;", "f") if a.type == F32 else ("rcp.rn.f64 $0, $1;", "d")
    return asm(builder, a.type, text, f"={letter},{letter}", [a])


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _hat(builder, distance):
    return _larger(builder, builder.fsub(distance.type(1.0), _size(builder, distance)), distance.type(0.0))


def _slope(builder, distance):
    less, zero, one = (distance.type(value) for value in (-1.0, 0.0, 1.0))

    def between(low, end):
        return builder.and_(builder.fcmp_ordered(">=", distance, low), builder.fcmp_ordered("<", distance, end))

    return builder.select(between(zero, one), less, builder.select(between(less, zero), one, zero))


def _used(builder, weight, value):
    zero = weight.type(0.0)
    return builder.fmul(weight, builder.select(builder.fcmp_unordered("!=", weight, zero), value, zero))


def _with(builder, total, weight, value):
    if total.type == F32:
        text = "{ .reg .pred p; setp.ne.f32 p, $2, 0f00000000; @p fma.rn.f32 $0, $2, $3, $0; }"
        return asm(builder, F32, text, "=f,0,f,f", [total, weight, value])
    counts = builder.fcmp_unordered("!=", weight, weight.type(0.0))
    return builder.select(counts, builder.fma(weight, value, total), total)


def _between(builder, distance):
    low, end = (
        builder.fcmp_ordered(*each)
        for each in ((">=", distance, distance.type(-1.0)), ("<", distance, distance.type(1.0)))
    )
    return builder.and_(low, end)


@intrinsic
def near(typingctx, right, down):
    """Whether both distances are in [-1, 1), without a branch: where an output has a weight or a slope by a pixel."""

    def codegen(context, builder, sig, args):
        return builder.and_(_between(builder, args[0]), _between(builder, args[1]))

    return signature(types.boolean, right, down), codegen


@intrinsic
def against(typingctx, distance, value):
    """The value where the distance is negative, else less the value."""

    def codegen(context, builder, sig, args):
        distance, value = args
        negative = builder.fcmp_ordered("<", distance, distance.type(0.0))
        return builder.select(negative, value, builder.fsub(value.type(-0.0), value))

    return signature(value, distance, value), codegen


# |a|; the larger, the smaller of two, the second where one is NaN; max(0, 1 - |distance|), 0 of NaN; its derivative, -1
# in [0, 1), 1 in [-1, 0), else 0; weight * value, 0 where there is no weight, whatever the value.
size, larger, smaller, hat, slope, used = (
    _of(_size, 1), _of(_larger, 2), _of(_smaller, 2), _of(_hat, 1), _of(_slope, 1), _of(_used, 2)
)  # fmt: skip


# The larger, the smaller of two, of which one that is NaN does not count; the least whole number that is no less; 1 / a
# but for a bit of float32, infinite of 0.
most, least, up, reciprocal = (
    _instruction("max.{0} $0, $1, $2;", 2), _instruction("min.{0} $0, $1, $2;", 2),
    _instruction("cvt.rpi.{0}.{0} $0, $1;", 1), _of(_reciprocal, 1),
)  # fmt: skip


@intrinsic
def with_pixel(typingctx, total, weight, value):
    """total + weight * value; the total where there is no weight, whatever the value."""
    return signature(total, total, weight, value), lambda context, builder, sig, args: _with(builder, *args)


# `hat` of a float32, one instruction. Where each thread loads vectors by its own position kernels with it were a sixth
# slower than with `hat` (64x64x56x56 channels-last by a grid, 16 bits, H200: 19.4 us, not 16.8).
narrow_hat = conversion(
    "{ .reg .f32 size; abs.f32 size, $1; sub.sat.f32 $0, 0f3F800000, size; }", "=f,f", types.float32, types.float32
)
# A float32 without its fraction as an int32: the nearest that there is, and 0 of NaN.
whole = conversion("cvt.rzi.s32.f32 $0, $1;", "=r,f", types.int32, types.float32)
# The least integer that is no less than a float32, alike.
ceiling = conversion("cvt.rpi.s32.f32 $0, $1;", "=r,f", types.int32, types.float32)


@intrinsic
def least_of_warp(typingctx, value):
    """The least of its lanes' integers. All of them take part."""

    def codegen(context, builder, sig, args):
        return asm(builder, I32, "redux.sync.min.s32 $0, $1, 0xffffffff;", "=r,r", list(args), WARP)

    return signature(types.int32, types.int32), codegen


def _shared(operation):
    text = f"atom.shared.{operation}.u32 $0, [$1], $2;"

    @intrinsic
    def change(typingctx, where, value):
        """What was at a shared address before it and the value became their sum, or the larger one of them."""

        def codegen(context, builder, sig, args):
            return asm(builder, I32, text, "=r,r,r,~{memory}", list(args), EFFECT)

        return signature(types.uint32, types.uint32, types.uint32), codegen

    return change


# Of integers that other threads of the block change at the same time.
SHARED = {operation: _shared(operation) for operation in ("add", "max")}


@intrinsic
def prefetch(typingctx, address):
    """Has the second-level cache load the line of an address in global memory."""

    def codegen(context, builder, sig, args):
        asm(builder, ir.VoidType(), "prefetch.global.L2 [$0];", "l,~{memory}", list(args), EFFECT)
        return context.get_dummy_value()

    return signature(types.none, types.uint64), codegen


@cache
def weighted(dtype: str, offsets_bytes: tuple[int, ...], next_bytes: int, step: int):
    """Intrinsic (array, place, shared addresses of a row and of the next, four weights):
    array[place + i * step] = the sum of weight * pixel of the four pixels `offsets_bytes[i]` behind those addresses.

    next_bytes: from a pixel to its neighbour. One without weight has no part in the sum, whatever it is.
    """
    element, _ = parts_of(dtype, 1)

    @intrinsic
    def sum_up(typingctx, array, place, upper, lower, a, b, c, d):
        def codegen(context, builder, sig, args):
            data, first = context.make_array(sig.args[0])(context, builder, args[0]).data, args[1]
            for i, offset_bytes in enumerate(offsets_bytes):
                places = [(row, offset_bytes + side) for row in args[2:4] for side in (0, next_bytes)]
                loaded = [builder.load(shared_at(builder, row, offset, element)) for row, offset in places]
                total = F32(0.0)
                for weight, part in zip(args[4:], loaded, strict=True):
                    (value,) = widened(builder, dtype, [part])
                    total = _with(builder, total, weight, value)
                builder.store(total, builder.gep(data, [builder.add(first, first.type(i * step))]))
            return context.get_dummy_value()

        floats = [types.float32] * 4
        return signature(types.none, array, place, types.uint32, types.uint32, *floats), codegen

    return sum_up


@cache
def meet(elems: int, width: int):
    """Intrinsic (sums, pixel, moments, shared address, right, down, column, row): what an output and a pixel give each
    other.

    The output's dy lies at the address, the first elements of a vector, and is `right` and `down` of the pixel:
    sums += weight * dy; moments += (s, column * s, row * s), and t, the slopes along either axis of sum(dy * pixel).
    What has no weight has no part in it, whatever its value. right and down are never -0.
    """
    count = elems + _MOMENTS
    outs = [f"${i}" for i in range(count)]
    tops, pixels = ([f"${count + start + i}" for i in range(elems)] for start in (0, elems))
    right, down, *place = (f"${count + 2 * elems + i}" for i in range(4))
    one, less = "0f3F800000", "0fBF800000"

    def inside(predicate: str, first: str, distance: str) -> str:
        """Also where the distance is -1."""
        text = f"setp.ge.and.f32 {predicate}, {distance}, {less}, {first};"
        return text + f" setp.lt.and.f32 {predicate}, {distance}, {one}, {predicate};"

    def slope(share: str, distance: str, predicate: str, sums: list[str]) -> str:
        """Of the other axis' share, less where the distance is not negative."""
        whole, *moments = sums
        text = f"lop3.b32 slope, {share}, {distance}, 0x80000000, 0xF2; mul.f32 slope, slope, all;"
        text += f" @{predicate} add.f32 {whole}, {whole}, slope;"
        by_place = zip(moments, place, strict=True)
        return text + "".join(f" @{predicate} fma.rn.f32 {each}, slope, {at}, {each};" for each, at in by_place)

    products = zip(tops[1:], pixels[1:], strict=True)
    text = " ".join(
        [
            "{ .reg .pred a, l, w, s, t; .reg .f32 left, above, weight, all; .reg .b32 slope;",
            f"abs.f32 left, {right}; sub.f32 left, {one}, left; abs.f32 above, {down}; sub.f32 above, {one}, above;",
            "setp.gt.f32 a, above, 0f00000000; setp.gt.f32 l, left, 0f00000000;",
            f"setp.gt.and.f32 w, left, 0f00000000, a; {inside('s', 'a', right)} {inside('t', 'l', down)}",
            "mul.f32 weight, left, above;",
            *(f"@w fma.rn.f32 {out}, weight, {top}, {out};" for out, top in zip(outs, tops, strict=False)),
            f"mul.f32 all, {tops[0]}, {pixels[0]};",
            *(f"fma.rn.f32 all, {top}, {pixel}, all;" for top, pixel in products),
            slope("above", right, "s", outs[elems : elems + 3]),
            slope("left", down, "t", outs[elems + 3 :]),
            "}",
        ]
    )
    constraints = ",".join(["=f"] * count + ["f"] * (2 * elems + 4) + [str(i) for i in range(count)])

    @intrinsic
    def give(typingctx, sums, pixel, moments, address, right, down, column, row):
        def codegen(context, builder, sig, args):
            def slots(place, many):
                data = context.make_array(sig.args[place])(context, builder, args[place]).data
                return [builder.gep(data, [I32(i)]) for i in range(many)]

            held = [*slots(0, elems), *slots(2, _MOMENTS)]
            row = shared_at(builder, args[3], 0, ir.VectorType(F32, width))
            vector = builder.load(row, align=4 * width)
            given = [builder.extract_element(vector, I32(i)) for i in range(elems)]
            operands = [*given, *(builder.load(slot) for slot in slots(1, elems)), *args[4:]]
            operands += [builder.load(slot) for slot in held]
            result = asm(builder, ir.LiteralStructType([F32] * count), text, constraints, operands)
            for slot, value in zip(held, unpacked(builder, result, count), strict=True):
                builder.store(value, slot)
            return context.get_dummy_value()

        floats = [types.float32] * 4
        return signature(types.none, sums, pixel, moments, types.uint32, *floats), codegen

    return give


@cache
def add_lanes(compute: str, lanes: int, vectors: bool):
    """Intrinsic (base, index, array, place, weight): base[index + i] += weight * array[place + i], for `lanes` i.

    vectors: four neighbours are one instruction, of compute capability 9.0; their address is then a multiple of 16.
    """
    width = 4 if vectors and compute == "f32" and lanes % 4 == 0 else 1
    operands = ", ".join(f"${i + 1}" for i in range(width))
    text = f"red.global.add.v4.f32 [$0], {{{operands}}};" if width == 4 else f"red.global.add.{compute} [$0], $1;"
    constraints = ",".join(["l", *[_LETTER[compute]] * width, "~{memory}"])
    size_bytes = 4 if compute == "f32" else 8

    @intrinsic
    def add(typingctx, base, index, array, place, weight):
        def codegen(context, builder, sig, args):
            target, at, held, first, share = args
            data = context.make_array(sig.args[2])(context, builder, held).data
            start = builder.ptrtoint(builder.gep(target, [at]), I64)
            for i in range(0, lanes, width):
                slots = (builder.gep(data, [builder.add(first, first.type(i + k))]) for k in range(width))
                terms = [builder.fmul(builder.load(slot), share) for slot in slots]
                where = builder.add(start, I64(size_bytes * i))
                asm(builder, ir.VoidType(), text, constraints, [where, *terms], EFFECT)
            return context.get_dummy_value()

        return signature(types.none, base, index, array, place, weight), codegen

    return add


@cache
def add_row(count: int):
    """Intrinsic (base, index, float32 tuple of `count`): base[index + i] += values[i], by vectors of four.

    These lie at multiples of 16 bytes and reach beyond the values, where they add 0: base begins and ends at such
    multiples. A vector costs the second-level cache what an element does. Of compute capability 9.0.
    """
    lanes = 4
    windows = -(-(lanes - 1 + count) // lanes)

    @intrinsic
    def add(typingctx, base, index, values):
        def codegen(context, builder, sig, args):
            target, at, given = args
            integer, zero = at.type, F32(0.0)
            offset = builder.and_(at, integer(lanes - 1))
            slots = [*unpacked(builder, given, count), *[zero] * (windows * lanes - count)]
            for step in (1, 2):
                moved = builder.icmp_signed("!=", builder.and_(offset, integer(step)), integer(0))
                before = [*[zero] * step, *slots[:-step]]
                slots = [builder.select(moved, *pair) for pair in zip(before, slots, strict=True)]
            start = builder.ptrtoint(builder.gep(target, [builder.sub(at, offset)]), I64)
            end = builder.add(offset, integer(count))
            for window in range(windows):
                used = builder.zext(builder.icmp_signed(">", end, integer(window * lanes)), I32)
                where = builder.add(start, I64(window * lanes * 4))
                text = "{ .reg .pred p; setp.ne.u32 p, $5, 0; @p red.global.add.v4.f32 [$0], {$1, $2, $3, $4}; }"
                operands = [where, *slots[window * lanes : (window + 1) * lanes], used]
                asm(builder, ir.VoidType(), text, "l,f,f,f,f,r,~{memory}", operands, EFFECT)
            return context.get_dummy_value()

        return signature(types.none, base, index, types.UniTuple(types.float32, count)), codegen

    return add
