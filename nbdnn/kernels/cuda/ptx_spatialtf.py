"""Additions to memory that other threads add to at the same time, as intrinsics."""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, I64, asm

_LETTER = {"f32": "f", "f64": "d"}


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
