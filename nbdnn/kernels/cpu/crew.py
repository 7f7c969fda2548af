"""Steps that several threads take together, in one parallel region: each has its part of every step.

    for step:  do my part;  wait until all parts of the step are done

A region and its barrier cost 4 us, this wait 0.1: a step of a recurrent network may take 2. No thread is sure to come:
a layer of threads may run the tasks of a region one after the other. So whoever has waited too long does the parts that
nobody has begun, and who comes late finds them done: the wait is only ever for a part that a running thread has begun.
A part stays with its thread otherwise, and what it reads in each step stays in that core's cache.

Memory of a crew, zeros before it begins: the parts done, and for each part the steps begun, a line apart.
"""

from __future__ import annotations

import platform
from functools import cache

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.vector import I64

_PAIR_BYTES = 128  # of lines, which some processors fetch together
_PATIENCE = 4096  # looks, of some 10 ns: the other threads of a region come within 20 us
_HAS_PAUSE = platform.machine().lower() in ("x86_64", "amd64")


def crew_bytes(parts: int) -> int:
    return (1 + parts) * _PAIR_BYTES


@intrinsic
def _begin(typingctx, address, step):
    """Count a step as begun if it is the next one: 1, or 0 where another thread has."""

    def codegen(context, builder, sig, args):
        slot = builder.inttoptr(args[0], I64.as_pointer())
        found = builder.cmpxchg(slot, args[1], builder.add(args[1], I64(1)), "acq_rel", "acquire")
        return builder.zext(builder.extract_value(found, 1), I64)

    return signature(types.int64, types.int64, types.int64), codegen


@intrinsic
def _done(typingctx, address):
    """Count one more part as done."""

    def codegen(context, builder, sig, args):
        builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), I64(1), "acq_rel")
        return context.get_dummy_value()

    return signature(types.none, types.int64), codegen


@intrinsic
def _parts_done(typingctx, address):
    """Parts done so far; a look that leaves the core to others for a moment."""

    def codegen(context, builder, sig, args):
        if _HAS_PAUSE:
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return signature(types.int64, types.int64), codegen


@cache
def take_step(part_of_step):
    """Compiled-in function (crew, parts, mine, step, patience, ...) -> patience: one step of the caller's.

    part_of_step: compiled-in function (step, part, ...) of one argument more, an address. crew: address of its memory.
    patience: what the step before returned, in the first step `first_patience()`.
    """

    @njit(**DEVICE)
    def take(crew, parts, mine, step, patience, context):
        if _begin(crew + _PAIR_BYTES * (1 + mine), step):
            part_of_step(step, mine, context)
            _done(crew)
        looks = 0
        while _parts_done(crew) < (step + 1) * parts:
            looks += 1
            if looks > patience:
                for part in range(parts):
                    if _begin(crew + _PAIR_BYTES * (1 + part), step):
                        part_of_step(step, part, context)
                        _done(crew)
                        patience = 0
        return patience

    return take


@njit(**DEVICE)
def first_patience():
    return _PATIENCE
