"""Sums of products of shifted rows, in registers: what the gradient of a filter with few outputs is made of."""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.micro_kernel import fused_product, opaque
from nbdnn.kernels.cpu.vector import FLOAT, I32, I64, vector_at


@cache
def correlate(dtype: str, vl: int, rows: int, taps: int, filters: int):
    """Intrinsic: the products of `rows` runs of x, each from `taps` columns on, with `filters` runs of y, added up.

        sums[k, r, s] += sum over i < vectors * vl of  x[offsets[r] + s * step + i] * y[k * y_pitch + i]

    Arguments, all int64: x (address), offsets (address of int32 byte offsets), step (bytes), y (address), y_pitch
    (bytes), vectors, used_rows and used_filters (how many of either are wanted; of the others the last ones that are
    stand in), sums (address), sums_pitch (bytes from filter to filter). Of rows * taps * filters vectors of sums a
    lane has the products of its own columns; lanes are added up at the end.
    """
    scalar, item_bytes = FLOAT[dtype], 4 if dtype == "f32" else 8
    vector = ir.VectorType(scalar, vl)

    def codegen(context, builder, sig, args):
        x, offsets, step, y, y_pitch, vectors, used_rows, used_filters, sums, sums_pitch = args
        add_product = fused_product(builder, dtype, vl)

        def least(i, used):
            last = builder.sub(used, I64(1))
            return builder.select(builder.icmp_signed("<", I64(i), last), I64(i), last)

        table = builder.inttoptr(offsets, I32.as_pointer())
        at = [builder.load(builder.gep(table, [least(r, used_rows)])) for r in range(rows)]
        x_rows = [opaque(builder, builder.add(x, builder.sext(offset, I64))) for offset in at]
        y_rows = [builder.add(y, builder.mul(y_pitch, least(k, used_filters))) for k in range(filters)]
        columns = [builder.mul(step, I64(s)) for s in range(taps)]

        entry = builder.block
        head, body, done = (builder.append_basic_block(f"run_{name}") for name in ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(I64)
        i.add_incoming(I64(0), entry)
        acc = [builder.phi(vector) for _ in range(rows * taps * filters)]
        for phi in acc:
            phi.add_incoming(ir.Constant(vector, None), entry)
        builder.cbranch(builder.icmp_signed("<", i, vectors), body, done)

        builder.position_at_end(body)
        shift = builder.mul(i, I64(vl * item_bytes))

        def loaded(row, beyond=None):
            address = builder.add(row, shift)
            address = address if beyond is None else builder.add(address, beyond)
            return builder.load(vector_at(builder, address, vector), align=item_bytes)

        dy, total = [loaded(row) for row in y_rows], iter(acc)
        after = []
        for row in x_rows:
            for column in columns:
                value = loaded(row, column)
                after += [add_product(value, each, next(total)) for each in dy]
        for phi, value in zip(acc, after, strict=True):
            phi.add_incoming(value, body)
        i.add_incoming(builder.add(i, I64(1)), body)
        builder.branch(head)

        builder.position_at_end(done)
        add_lanes = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(scalar, [scalar, vector]), f"llvm.vector.reduce.fadd.v{vl}{dtype}"
        )
        phis = iter(acc)
        for r in range(rows):
            for s in range(taps):
                for k in range(filters):
                    value = next(phis)
                    wanted = builder.and_(
                        builder.icmp_signed("<", I64(r), used_rows), builder.icmp_signed("<", I64(k), used_filters)
                    )
                    with builder.if_then(wanted):
                        to = builder.add(builder.mul(sums_pitch, I64(k)), I64((r * taps + s) * item_bytes))
                        slot = builder.inttoptr(builder.add(sums, to), scalar.as_pointer())
                        one = builder.call(add_lanes, [scalar(0.0), value], fastmath=("reassoc",))
                        builder.store(builder.fadd(builder.load(slot), one), slot)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, x, offsets, step, y, y_pitch, vectors, used_rows, used_filters, sums, sums_pitch):
        return signature(types.none, *[types.int64] * 10), codegen

    return run
