"""What blocks of a cluster know of each other: barriers, and loads and stores in each other's shared memory.

A block that ends takes its shared memory with it: wait for the cluster before. Shared addresses are 32 bits.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import ptx
from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, asm


def _barrier(step):
    @intrinsic
    def come_together(typingctx):
        def codegen(context, builder, sig, args):
            asm(builder, ir.VoidType(), f"barrier.cluster.{step}.aligned;", "~{memory}", [], EFFECT)
            return context.get_dummy_value()

        return signature(types.none), codegen

    return come_together


# What was written before the arrival is seen after the wait, in all blocks.
arrive, wait = _barrier("arrive.release"), _barrier("wait.acquire")


@intrinsic
def store_to_block(typingctx, where, block, value):
    """A float32 to a shared address in a block of the cluster, by its number there."""

    def codegen(context, builder, sig, args):
        text = "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; st.shared::cluster.f32 [there], $2; }"
        asm(builder, ir.VoidType(), text, "r,r,f,~{memory}", list(args), EFFECT)
        return context.get_dummy_value()

    return signature(types.none, types.uint32, types.int32, types.float32), codegen


@intrinsic
def address_in_block(typingctx, where, block):
    """What a shared address is in a block of the cluster, by its number there."""

    def codegen(context, builder, sig, args):
        return asm(builder, I32, "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", list(args))

    return signature(types.uint32, types.uint32, types.int32), codegen


@intrinsic
def store_in_block(typingctx, where, value):
    """A float32 to an address in a block of the cluster."""

    def codegen(context, builder, sig, args):
        text = "st.shared::cluster.f32 [$0], $1;"
        asm(builder, ir.VoidType(), text, "r,f,~{memory}", list(args), EFFECT)
        return context.get_dummy_value()

    return signature(types.none, types.uint32, types.float32), codegen


def _load_of_block(compute):
    real = ptx.REAL[compute]
    letter = "f" if compute == "f32" else "d"
    text = f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2; ld.shared::cluster.{compute} $0, [there]; }}"

    @intrinsic
    def load_element(typingctx, address, rank):
        """What the block of that rank in the cluster has at a shared address of this one."""

        def codegen(context, builder, sig, args):
            result = F32 if compute == "f32" else ir.DoubleType()
            return asm(builder, result, text, f"={letter},r,r,~{{memory}}", list(args), EFFECT)

        return signature(real, types.uint32, types.int32), codegen

    return load_element


LOAD_OF_BLOCK = {compute: _load_of_block(compute) for compute in ("f32", "f64")}
