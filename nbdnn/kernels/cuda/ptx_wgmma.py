"""Matrix instructions of a warpgroup, which read both factors from shared memory (wgmma, compute capability 9.0).

Four warps compute 64 x n sums; factors are of 16 bits or TF32, in tiles of 128-byte lines, swizzled as TMA leaves them
(the 16-byte chunk c of line l lies at c xor l % 8). A tile is told by a *descriptor*: its shared address and two
distances.

    straight    a line an m (or n), 64 k in it (TF32: 32); 8 lines and 1024 bytes make an atom, atoms follow in m (or n)
    turned      a line a k, 64 m (or n) in it (TF32: none); atoms follow in k, the next 64 m (or n) are `apart_bytes` on

Sums are float32 in registers: lane l of warp w has of 8 columns the sums of rows 16w + l/4 and 8 later, of columns
2*(l%4) and the next. A turn is: fence, multiply, commit, wait. Source: PTX, 'asynchronous warpgroup level matrix
instructions'.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, I64, asm, packed, unpacked
from nbdnn.kernels.cuda.ptx_tile import effect

LINE_BYTES = 128
_ATOM_BYTES = 8 * LINE_BYTES
_STEP_BYTES = 32  # of a line: what one instruction multiplies
_SWIZZLE_128 = 1 << 62

fence = effect("wgmma.fence.sync.aligned;")
commit = effect("wgmma.commit_group.sync.aligned;")
wait = effect("wgmma.wait_group.sync.aligned 0;")
wait_for_all_but_last = effect("wgmma.wait_group.sync.aligned 1;")


@cache
def descriptor(apart_bytes: int = 16):
    """Intrinsic (shared address of a tile) -> what an instruction is told of it. apart_bytes: of turned tiles.

    Not for blocks of a cluster: their addresses have the block's number above the 18 bits that a descriptor takes.
    """
    fixed = I64(_SWIZZLE_128 | (_ATOM_BYTES >> 4) << 32 | (apart_bytes >> 4) << 16)

    @intrinsic
    def describe(typingctx, where):
        def codegen(context, builder, sig, args):
            return builder.or_(builder.zext(builder.lshr(args[0], I32(4)), I64), fixed)

        return signature(types.uint64, types.uint32), codegen

    return describe


@cache
def multiply(dtype: str, n: int, steps: int, a_turned: bool, b_turned: bool):
    """Intrinsic (sums, descriptor of a, of b) -> the sums with the products of `steps` times 16 k added, 8 of TF32.

    They are not there before commit and wait.
    """
    if dtype == "tf32" and (a_turned or b_turned):
        raise ValueError("factors of TF32 are straight")
    count, depth = n // 2, 8 if dtype == "tf32" else 16
    sums_type = types.UniTuple(types.float32, count)
    listed = ",".join(f"${i}" for i in range(count))
    turned = "" if dtype == "tf32" else f", {int(a_turned)}, {int(b_turned)}"
    text = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{dtype}.{dtype} {{{listed}}}, "
        f"${2 * count}, ${2 * count + 1}, 1, 1, 1{turned};"
    )
    constraints = ",".join([*["=f"] * count, *map(str, range(count)), "l", "l"])
    result = ir.LiteralStructType([F32] * count)
    a_step, b_step = (depth * LINE_BYTES if turns else _STEP_BYTES for turns in (a_turned, b_turned))

    @intrinsic
    def add_products(typingctx, sums, a, b):
        def codegen(context, builder, sig, args):
            values = unpacked(builder, args[0], count)
            for step in range(steps):
                a_at, b_at = (
                    builder.add(at, I64(step * each >> 4)) for at, each in zip(args[1:], (a_step, b_step), strict=True)
                )
                values = unpacked(
                    builder, asm(builder, result, text, constraints, [*values, a_at, b_at], EFFECT), count
                )
            return packed(builder, values)

        return signature(sums_type, sums_type, types.uint64, types.uint64), codegen

    return add_products


@cache
def registers(count: int, more: bool):
    """Intrinsic: the threads of a warpgroup have so many registers from here on, a multiple of 8, more or fewer than
    before; more only when others gave some away."""
    return effect(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};")
