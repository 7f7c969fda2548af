"""Functions of Linux's C library that compiled code calls, each of two integers, of which it takes as many as it has
arguments. On other systems nothing is called: there the team of `workers.py` is taken for ever.
"""

from __future__ import annotations

import sys

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.atomics import I64

IS_LINUX = sys.platform == "linux"


def _function(name: str):
    @intrinsic
    def call(typingctx, first, second):
        def codegen(context, builder, sig, args):
            if not IS_LINUX:
                return I64(0)
            function = get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), [I64, I64]), name)
            return builder.sext(builder.call(function, args), I64)

        return signature(types.int64, types.int64, types.int64), codegen

    return call


sem_wait, sem_post, sched_yield, clock_gettime = map(
    _function, ("sem_wait", "sem_post", "sched_yield", "clock_gettime")
)
