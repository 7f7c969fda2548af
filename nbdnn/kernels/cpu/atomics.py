"""Integers that several threads read and write: each function takes the address of an int64.

What a thread wrote before one of these is seen by whoever has read its result.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

I64 = ir.IntType(64)
_HAS_PAUSE = platform.machine().lower() in ("x86_64", "amd64")


def _slot(builder, address):
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def atomic_add(typingctx, address, value):
    """Add; returns what was there before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _slot(builder, args[0]), args[1], "acq_rel")

    return signature(types.int64, types.int64, types.int64), codegen


@intrinsic
def swap(typingctx, address, value):
    """Store; returns what was there before. Later reads are not done sooner."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("xchg", _slot(builder, args[0]), args[1], "seq_cst")

    return signature(types.int64, types.int64, types.int64), codegen


@intrinsic
def replace(typingctx, address, old, new):
    """Store `new` where `old` is: whether it was there."""

    def codegen(context, builder, sig, args):
        found = builder.cmpxchg(_slot(builder, args[0]), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return signature(types.boolean, types.int64, types.int64, types.int64), codegen


@intrinsic
def look(typingctx, address):
    """Read; a look that leaves the core to others for a moment."""

    def codegen(context, builder, sig, args):
        if _HAS_PAUSE:
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return builder.load_atomic(_slot(builder, args[0]), "seq_cst", 8)

    return signature(types.int64, types.int64), codegen
