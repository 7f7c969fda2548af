"""What batch normalisation needs beyond `ptx.py`."""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import F32, asm


@cache
def share(compute: str):
    """Intrinsic (n, more) -> more / (n + more), 0 where both are; of float32 off by 2^-23 of it, but soon there."""
    text = (
        "{ .reg .f32 both; .reg .pred any; add.f32 both, $1, $2; setp.gt.f32 any, both, 0f00000000;"
        " rcp.approx.ftz.f32 both, both; mul.f32 both, both, $2; selp.f32 $0, both, 0f00000000, any; }"
    )

    @intrinsic
    def of_both(typingctx, n, more):
        def codegen(context, builder, sig, args):
            if compute == "f32":
                return asm(builder, F32, text, "=f,f,f", list(args))
            zero, both = ir.Constant(args[0].type, 0.0), builder.fadd(*args)
            return builder.select(builder.fcmp_ordered(">", both, zero), builder.fdiv(args[1], both), zero)

        return signature(n, n, more), codegen

    return of_both


@cache
def rsqrt(compute: str):
    """Intrinsic (a positive value) -> one over its root; of float32 off by 2^-22.9 of it. No branches, as roots and
    quotients have, before which no load is moved."""

    @intrinsic
    def of_value(typingctx, value):
        def codegen(context, builder, sig, args):
            if compute == "f32":
                return asm(builder, F32, "rsqrt.approx.f32 $0, $1;", "=f,f", list(args))
            root = builder.call(builder.module.declare_intrinsic("llvm.sqrt", [args[0].type]), args)
            return builder.fdiv(ir.Constant(args[0].type, 1.0), root)

        return signature(value, value), codegen

    return of_value
