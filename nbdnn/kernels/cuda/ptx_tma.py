"""Copies by the tensor memory accelerator (TMA, from compute capability 9.0 on), and the barriers that count them.

A kernel is given *tensor maps* of what it copies, by value (`tensor_map.py` has the host's side). One thread tells a
barrier how many bytes to expect and starts the copies; whoever waits for the barrier's phase sees them. What lies
outside of the tensor becomes zero. A shared tile is lines of 128 bytes, swizzled: chunk c of line l at c xor l % 8.
Barriers are 8 bytes of shared memory; a phase is 0 or 1 and turns over each time all arrivals and bytes have come.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.ir.values import ArgumentAttributes
from numba.cuda import types
from numba.cuda.datamodel import models
from numba.cuda.extending import intrinsic
from numba.cuda.models import register_model
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, I32, I64, asm
from nbdnn.kernels.cuda.ptx_tile import effect

MAP_BYTES, _MAP_ALIGN_BYTES = 128, 64


class TensorMaps(types.Type):
    """A kernel's first parameter: its maps, side by side in constant memory, which are only spoken of by address."""

    def __init__(self, count: int) -> None:
        super().__init__(f"TensorMaps({count})")
        self.count = count


class _ByValue(ArgumentAttributes):
    """As the compiler of CUDA reads it, which knows no type behind the word."""

    def _to_list(self, typ: ir.Type) -> list[str]:
        return ["byval", f"align {_MAP_ALIGN_BYTES}"]


@register_model(TensorMaps)
class _TensorMapsModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, ir.ArrayType(ir.IntType(8), kind.count * MAP_BYTES).as_pointer())

    def from_argument(self, builder, value):
        kernel = value.parent
        value.attributes = _ByValue()
        # Without this it is copied to the stack. Parameters count from 1, and the result comes before, which a kernel
        # loses.
        place = builder.module.add_metadata([I32(kernel.args.index(value))])
        builder.module.add_named_metadata("nvvm.annotations", [kernel, "grid_constant", place])
        return value


@intrinsic
def map_of(typingctx, maps, place):
    """The address of one of the maps."""

    def codegen(context, builder, sig, args):
        first = builder.ptrtoint(args[0], I64)
        return builder.add(first, builder.mul(builder.zext(args[1], I64), I64(MAP_BYTES)))

    return signature(types.uint64, maps, types.int32), codegen


# To be called once barriers are initialised, before other threads or copies meet them.
publish_barriers = effect("fence.mbarrier_init.release.cluster;")

# To be called by all threads that loaded from where a copy is to come next, before one says so: a barrier alone does
# not wait for loads that are still on their way.
reads_before_copies = effect("fence.proxy.async.shared::cta;")


# To be called by who has seen that others wrote global memory, before a copy of it.
writes_before_copies = effect("fence.proxy.async.global;")


def _on_barrier(text, *operands):
    """An intrinsic of shared addresses and integers that is one piece of PTX."""
    letters = ",".join("r" for _ in operands)

    def codegen(context, builder, sig, args):
        asm(builder, ir.VoidType(), text, f"{letters},~{{memory}}", list(args), EFFECT)
        return context.get_dummy_value()

    if len(operands) == 1:

        @intrinsic
        def of_barrier(typingctx, barrier):
            return signature(types.none, *operands), codegen

        return of_barrier

    @intrinsic
    def of_barrier_and_number(typingctx, barrier, number):
        return signature(types.none, *operands), codegen

    return of_barrier_and_number


# (barrier, arrivals that end a phase); (barrier, bytes to come: also an arrival); (barrier); (barrier, the phase 0 or 1
# that is to be over).
initialise = _on_barrier("mbarrier.init.shared::cta.b64 [$0], $1;", types.uint32, types.int32)
expect_bytes = _on_barrier("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", types.uint32, types.int32)
arrive = _on_barrier("mbarrier.arrive.shared::cta.b64 _, [$0];", types.uint32)
wait = _on_barrier(
    "{ .reg .pred over; again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; "
    "@!over bra again_${:uid}; }",
    types.uint32,
    types.int32,
)


def _copy(rank: int, offsets: int):
    """Intrinsic (shared address, map's address, barrier, place, offsets): these are tuples, the innermost axis first.

    offsets: of the taps of a window, on each spatial axis, of maps that are read by windows; else ().
    """
    places = ", ".join(f"${i}" for i in range(3, 3 + rank))
    beside = ", ".join(f"${i}" for i in range(3 + rank, 3 + rank + offsets))
    mode, end = (".im2col", f", {{{beside}}}") if offsets else ("", "")
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global{mode}.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{places}}}], [$2]{end};"
    )
    constraints = ",".join(["r", "l", "r", *["r"] * rank, *["h"] * offsets, "~{memory}"])

    @intrinsic
    def copy(typingctx, shared, tensor_map, barrier, place, offset):
        def codegen(context, builder, sig, args):
            numbers = [builder.extract_value(args[3], i) for i in range(rank)]
            taps = [builder.trunc(builder.extract_value(args[4], i), ir.IntType(16)) for i in range(offsets)]
            operands = [*args[:3], *numbers, *taps]
            asm(builder, ir.VoidType(), text, constraints, operands, EFFECT)
            return context.get_dummy_value()

        places_type = types.UniTuple(types.int32, rank)
        offsets_type = types.UniTuple(types.int32, offsets) if offsets else types.Tuple(())
        return signature(types.none, types.uint32, types.uint64, types.uint32, places_type, offsets_type), codegen

    return copy


# Boxes, by rank; pixels under a tap of a window, by spatial axes.
COPY_BOX = {rank: _copy(rank, 0) for rank in (2, 3, 4)}
COPY_PIXELS = {ndim: _copy(ndim + 2, ndim) for ndim in (2, 3)}


@intrinsic
def copy_bytes(typingctx, shared, source, count, barrier):
    """So many bytes, which lie in a row, from a global to a shared address: all multiples of 16."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"

    def codegen(context, builder, sig, args):
        asm(builder, ir.VoidType(), text, "r,l,r,r,~{memory}", list(args), EFFECT)
        return context.get_dummy_value()

    return signature(types.none, types.uint32, types.uint64, types.int32, types.uint32), codegen


def _meeting(threads: int):
    return effect(f"bar.sync 1, {threads};")


MEET = {threads: _meeting(threads) for threads in (128, 256, 512)}  # the first threads of a block wait for each other

# (barrier from 2 on): the threads of a warpgroup that all name it wait for each other.
meet_warpgroup = _on_barrier("bar.sync $0, 128;", types.int32)
