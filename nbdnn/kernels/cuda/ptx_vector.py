"""Vectors of neighbouring elements: loads and stores that may be unwanted, without a branch.

A vector is a few neighbouring elements in memory, moved by one instruction of 2 to 16 bytes, and float32 in registers.
Several of them are one flat tuple of float32.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F16, F32, I32, I64, PURE, asm, packed, unpacked
from nbdnn.problem import ITEMSIZE

_I16 = ir.IntType(16)
_LETTER = {16: "h", 32: "r"}  # of a register in the constraints of inline PTX


def floats(count: int):
    """The type of a tuple of float32."""
    return types.UniTuple(types.float32, count)


@cache
def zeros(count: int):
    """Intrinsic of nothing -> so many zeros."""

    @intrinsic
    def nothing(typingctx):
        def codegen(context, builder, sig, args):
            return ir.Constant(ir.ArrayType(F32, count), None)

        return signature(floats(count)), codegen

    return nothing


@cache
def repeated(count: int):
    """Intrinsic of a float32 -> so many of it."""

    @intrinsic
    def repeat(typingctx, value):
        def codegen(context, builder, sig, args):
            return packed(builder, [args[0]] * count)

        return signature(floats(count), types.float32), codegen

    return repeat


@cache
def scaled(count: int):
    """Intrinsic (tuple of so many float32, factor) -> their products."""

    @intrinsic
    def scale(typingctx, values, factor):
        def codegen(context, builder, sig, args):
            return packed(builder, [builder.fmul(value, args[1]) for value in unpacked(builder, args[0], count)])

        return signature(floats(count), floats(count), types.float32), codegen

    return scale


# ---- elements in memory and in registers -----------------------------------------------------------------------------


def widened(builder, dtype, parts):
    """float32 of what a load gave: words, or a single 16-bit element."""
    if dtype == "f32":
        return [builder.bitcast(word, F32) for word in parts]
    if parts[0].type == _I16:
        halves = parts
    else:
        halves = [builder.trunc(builder.lshr(word, I32(shift)), _I16) for word in parts for shift in (0, 16)]
    if dtype == "f16":
        return [builder.fpext(builder.bitcast(half, F16), F32) for half in halves]
    if parts[0].type == _I16:
        return [builder.bitcast(builder.shl(builder.zext(parts[0], I32), I32(16)), F32)]
    ends = [(builder.shl(word, I32(16)), builder.and_(word, I32(0xFFFF0000))) for word in parts]
    return [builder.bitcast(end, F32) for pair in ends for end in pair]


def narrowed(builder, dtype, values):
    """Words, or a single 16-bit element, of float32; rounded to nearest even."""
    if dtype == "f32":
        return [builder.bitcast(value, I32) for value in values]
    if len(values) == 1:
        return [asm(builder, _I16, f"cvt.rn.{dtype}.f32 $0, $1;", "=h,f", values)]
    text = f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [asm(builder, I32, text, "=r,f,f", list(pair)) for pair in pairs]


def parts_of(dtype: str, lanes: int):
    """(type of a part, number of parts) of a vector as it is moved."""
    size_bytes = lanes * ITEMSIZE[dtype]
    return (_I16, 1) if size_bytes == 2 else (I32, size_bytes // 4)


def _moving(operation: str, part, count: int, first: int) -> tuple[str, str]:
    """(instruction on registers $first and on, these) that moves so many parts."""
    registers = ", ".join(f"${first + i}" for i in range(count))
    vector, registers = (f".v{count}", f"{{{registers}}}") if count > 1 else ("", registers)
    return f"{operation}{vector}.b{part.width}", registers


def load_vector(builder, where, wanted, dtype, lanes, *, constant=True):
    """The elements of a vector, zeros unless it is wanted."""
    return widened(builder, dtype, load_parts(builder, where, wanted, dtype, lanes, constant=constant))


def load_parts(builder, where, wanted, dtype, lanes, *, constant=True, fill=0, shared=False, once=False):
    """The parts of a vector, each the bits of `fill` unless it is wanted.

    Without a branch, and where constant free to be moved. shared: it may lie in shared memory. once: nobody reads it
    again, so that of the second-level cache it is the first to go (compute capability 8.0).
    """
    part, count = parts_of(dtype, lanes)
    constant = constant and not shared
    operation = "ld" if shared else "ld.global.nc" if constant else "ld.global"
    hint, policy = "", ""
    if once:
        hint, policy = ", policy", ".reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        operation += ".L2::cache_hint"
    load, registers = _moving(operation, part, count, 0)
    clear = " ".join(f"mov.b{part.width} ${i}, {fill};" for i in range(count))
    text = (
        f"{{ .reg .pred wanted; setp.ne.b32 wanted, ${count + 1}, 0; {policy} {clear} "
        f"@wanted {load} {registers}, [${count}]{hint}; }}"
    )
    constraints = ",".join([*(f"=&{_LETTER[part.width]}" for _ in range(count)), "l", "r"])
    operands = [builder.ptrtoint(where, I64), builder.zext(wanted, I32)]
    result = part if count == 1 else ir.LiteralStructType([part] * count)
    loaded = asm(builder, result, text, constraints, operands, PURE if constant else EFFECT)
    return [loaded] if count == 1 else unpacked(builder, loaded, count)


def store_vector(builder, where, wanted, dtype, values, *, shared=False):
    """A vector, where it is wanted: without a branch. shared: it may lie in shared memory."""
    store_parts(builder, where, wanted, narrowed(builder, dtype, values), shared=shared)


def store_parts(builder, where, wanted, parts, *, shared=False):
    """The same of parts as `load_parts` gives them."""
    count, letter = len(parts), _LETTER[parts[0].type.width]
    store, registers = _moving("st" if shared else "st.global", parts[0].type, count, 2)
    text = f"{{ .reg .pred wanted; setp.ne.b32 wanted, $1, 0; @wanted {store} [$0], {registers}; }}"
    operands = [builder.ptrtoint(where, I64), builder.zext(wanted, I32), *parts]
    asm(builder, ir.VoidType(), text, ",".join(["l", "r", *[letter] * count, "~{memory}"]), operands, EFFECT)


def moved(builder, start, count: int):
    """start + count."""
    return builder.add(start, start.type(count), flags=["nsw"])


def stepped(builder, start, count, step):
    """start + count * step."""
    return builder.add(start, builder.mul(count, step, flags=["nsw"]), flags=["nsw"])


# ---- vectors of memory that no thread writes ------------------------------------------------------------------------


@cache
def load_run(dtype: str, count: int):
    """Intrinsic (base, at, step) -> so many elements, each a step further, of memory that no thread writes."""

    @intrinsic
    def load(typingctx, base, at, step):
        def codegen(context, builder, sig, args):
            always, values = ir.IntType(1)(1), []
            for i in range(count):
                where = builder.gep(args[0], [stepped(builder, args[1], args[1].type(i), args[2])])
                values += load_vector(builder, where, always, dtype, 1)
            return packed(builder, values)

        return signature(floats(count), base, at, at), codegen

    return load


@cache
def load_filters(dtype: str, lanes: int, taps: int, reversed_: bool):
    """Intrinsic (base, at) -> the weights of so many filters from there on, tap by tap, of each tap all lanes.

    In memory filter follows filter; at is a multiple of `lanes`. reversed_: the last tap comes first.
    """

    @intrinsic
    def load(typingctx, base, at):
        def codegen(context, builder, sig, args):
            always, values = ir.IntType(1)(1), []
            for i in range(taps):
                where = builder.gep(args[0], [moved(builder, args[1], lanes * i)])
                values += load_vector(builder, where, always, dtype, lanes)
            order = range(taps - 1, -1, -1) if reversed_ else range(taps)
            return packed(builder, [values[lane * taps + tap] for tap in order for lane in range(lanes)])

        return signature(floats(taps * lanes), base, at), codegen

    return load


@cache
def load_wanted(dtype: str):
    """Intrinsic (base, at, wanted) -> a tuple of base[at], or of zero where that is not wanted: without a branch."""

    @intrinsic
    def load(typingctx, base, at, wanted):
        def codegen(context, builder, sig, args):
            return packed(builder, load_vector(builder, builder.gep(args[0], [args[1]]), args[2], dtype, 1))

        return signature(floats(1), base, at, types.boolean), codegen

    return load


@cache
def ask(dtype: str, lanes: int):
    """Intrinsic (base, at, wanted) -> the words of a vector, zeros unless it is wanted; a single 16-bit element is the
    low half of one. Asked for where it says so: other loads may be moved to where they are used."""
    count = max(lanes * ITEMSIZE[dtype] // 4, 1)

    @intrinsic
    def load(typingctx, base, at, wanted):
        def codegen(context, builder, sig, args):
            where = builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)
            if lanes * ITEMSIZE[dtype] == 2:
                text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u16 $0, [$1]; }"
                words = [asm(builder, I32, text, "=&r,l,r", [where, builder.zext(args[2], I32)], EFFECT)]
            else:
                words = load_parts(builder, builder.gep(args[0], [args[1]]), args[2], dtype, lanes, constant=False)
            return packed(builder, words)

        return signature(types.UniTuple(types.uint32, count), base, at, types.boolean), codegen

    return load


# ---- float32 in shared memory, by 32-bit addresses -------------------------------------------------------------------


@cache
def load_shared_rows(lanes: int, count: int):
    """Intrinsic (address, step_bytes) -> so many vectors, each a step further."""

    @intrinsic
    def load(typingctx, address, step_bytes):
        def codegen(context, builder, sig, args):
            vector = ir.VectorType(F32, lanes)
            values = []
            for i in range(count):
                where = builder.add(args[0], builder.mul(args[1], I32(i)))
                loaded = builder.load(builder.inttoptr(where, vector.as_pointer(3)), align=4 * lanes)
                values += [builder.extract_element(loaded, I32(lane)) for lane in range(lanes)]
            return packed(builder, values)

        return signature(floats(count * lanes), types.uint32, types.uint32), codegen

    return load


@intrinsic
def store_shared_floats(typingctx, address, step_bytes, values):
    """A tuple of float32 to an address and on, each a step further."""

    def codegen(context, builder, sig, args):
        for i, value in enumerate(unpacked(builder, args[2], sig.args[2].count)):
            where = builder.add(args[0], builder.mul(args[1], I32(i)))
            builder.store(value, builder.inttoptr(where, F32.as_pointer(3)), align=4)
        return context.get_dummy_value()

    return signature(types.none, types.uint32, types.uint32, values), codegen
