"""What blocks of a grid that is on the GPU all at once tell each other through global memory."""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import ptx
from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, I64, asm, packed, unpacked


@intrinsic
def arrive(typingctx, base, index):
    """One more in the counter base[index]; who sees it sees what this thread, and its block before the last barrier,
    wrote before."""

    def codegen(context, builder, sig, args):
        where = builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)
        text = "fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;"
        asm(builder, ir.VoidType(), text, "l,~{memory}", [where], EFFECT)
        return context.get_dummy_value()

    return signature(types.none, base, index), codegen


@intrinsic
def arrived(typingctx, base, index):
    """The counter base[index]."""

    def codegen(context, builder, sig, args):
        where = builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)
        return asm(builder, I32, "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l,~{memory}", [where], EFFECT)

    return signature(types.int32, base, index), codegen


@cache
def load_pair(compute: str):
    """Intrinsic (base, index) -> two neighbours, at an even index, that other blocks wrote."""
    letter, element = ("f", F32) if compute == "f32" else ("d", ir.DoubleType())
    text = f"ld.relaxed.gpu.global.v2.{compute} {{$0, $1}}, [$2];"

    @intrinsic
    def load(typingctx, base, index):
        def codegen(context, builder, sig, args):
            where = builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)
            result = ir.LiteralStructType([element] * 2)
            loaded = asm(builder, result, text, f"={letter},={letter},l,~{{memory}}", [where], EFFECT)
            return packed(builder, unpacked(builder, loaded, 2))

        return signature(types.UniTuple(ptx.REAL[compute], 2), base, index), codegen

    return load
