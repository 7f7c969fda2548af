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


@intrinsic
def meet(typingctx, share):
    """Waits for all blocks of a cooperative launch, each of whose first threads brings its share: 1, but of one block
    what makes it 2^31 with those of the others. Who is through sees what they wrote before.

    The highest bit of the driver's own counter for such launches changes when all are there, as CUDA's cooperative
    groups have it: nobody has to set it to anything before. Two registers hold its workspace's address.
    """
    counter = ".reg .b64 at; mov.b64 at, {%envreg2, %envreg1}; add.u64 at, at, 4;"
    come = "fence.acq_rel.gpu; atom.add.relaxed.gpu.global.u32 before, [at], $0;"
    wait = "MEET: ld.acquire.gpu.global.u32 now, [at]; xor.b32 now, now, before; setp.ge.s32 p, now, 0; @p bra MEET;"
    text = f"{{ .reg .b32 before, now; .reg .pred p; {counter} {come} {wait} }}"

    def codegen(context, builder, sig, args):
        asm(builder, ir.VoidType(), text, "r,~{memory}", [args[0]], EFFECT)
        return context.get_dummy_value()

    return signature(types.none, types.uint32), codegen


@cache
def load_words(compute: str, count: int):
    """Intrinsic (base, index) -> so many neighbours, at an index that is a multiple of it, that other blocks wrote."""
    letter, element = ("f", F32) if compute == "f32" else ("d", ir.DoubleType())
    results = ", ".join(f"${i}" for i in range(count))
    text = f"ld.relaxed.gpu.global.v{count}.{compute} {{{results}}}, [${count}];"

    @intrinsic
    def load(typingctx, base, index):
        def codegen(context, builder, sig, args):
            where = builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)
            result = ir.LiteralStructType([element] * count)
            loaded = asm(builder, result, text, f"={letter}," * count + "l,~{memory}", [where], EFFECT)
            return packed(builder, unpacked(builder, loaded, count))

        return signature(types.UniTuple(ptx.REAL[compute], count), base, index), codegen

    return load
