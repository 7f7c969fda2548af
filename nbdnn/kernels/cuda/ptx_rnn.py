"""What recurrent networks need beyond `ptx.py`: operands that may be absent, and powers and quotients at full speed."""

from __future__ import annotations

from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import I32, I64, conversion

# Off by 2^-22 and by 2^-23 of the result; what is below the smallest normal number becomes 0.
exp2 = conversion("ex2.approx.ftz.f32 $0, $1;", "=f,f", types.float32, types.float32)
reciprocal = conversion("rcp.approx.ftz.f32 $0, $1;", "=f,f", types.float32, types.float32)


@intrinsic
def given(typingctx, base):
    """1 where a pointer is not null, else 0."""

    def codegen(context, builder, sig, args):
        return builder.zext(builder.icmp_unsigned("!=", builder.ptrtoint(args[0], I64), I64(0)), I32)

    return signature(types.int32, base), codegen


@intrinsic
def select(typingctx, condition, value, other):
    """`value` where the condition holds, else `other`: both are computed, no thread waits for its neighbours."""

    def codegen(context, builder, sig, args):
        return builder.select(args[0], args[1], args[2])

    return signature(value, types.boolean, value, value), codegen


@intrinsic
def moved(typingctx, address, distance):
    """An address so many bytes on."""
    return (
        signature(types.uint64, types.uint64, types.int64),
        lambda context, builder, sig, args: builder.add(*args),
    )


@intrinsic
def store_at(typingctx, address, value):
    """An element to an address in global memory."""

    def codegen(context, builder, sig, args):
        element = context.get_value_type(sig.args[1])
        builder.store(args[1], builder.inttoptr(args[0], element.as_pointer(1)))
        return context.get_dummy_value()

    return signature(types.none, types.uint64, value), codegen
