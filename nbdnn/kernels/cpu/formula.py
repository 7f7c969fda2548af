"""Formulas over rows of numbers, emitted as LLVM vector code: written once as Python on `Lanes`, run on whole vectors.

    for i in 0, vl, 2 vl ...: out_0[i:], out_1[i:], ... = formula(in_0[i:], in_1[i:], ...)         the last one masked

The compiler's own vectoriser gives up on loops over as many arrays as a gate of a recurrent network has: it would have
to test every pair of them for overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.vector import FLOAT, I64, constant, lanes_between, masked, vector_at


class Lanes:
    """A vector of `dtype`, or one number, while its code is emitted; arithmetic takes Python numbers too."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value, dtype: str) -> None:
        self.builder, self.value, self.dtype = builder, value, dtype

    def like(self, value: ir.Value) -> Lanes:
        return Lanes(self.builder, value, self.dtype)

    def lift(self, other: Any) -> Lanes:
        return other if isinstance(other, Lanes) else self.like(constant(self.value.type, float(other)))

    def __add__(self, other: Any) -> Lanes:
        return self.like(self.builder.fadd(self.value, self.lift(other).value, flags=("contract",)))

    def __sub__(self, other: Any) -> Lanes:
        return self.like(self.builder.fsub(self.value, self.lift(other).value, flags=("contract",)))

    def __rsub__(self, other: Any) -> Lanes:
        return self.lift(other) - self

    def __mul__(self, other: Any) -> Lanes:
        return self.like(self.builder.fmul(self.value, self.lift(other).value, flags=("contract",)))

    def __truediv__(self, other: Any) -> Lanes:
        return self.like(self.builder.fdiv(self.value, self.lift(other).value))

    def __rtruediv__(self, other: Any) -> Lanes:
        return self.lift(other) / self

    def called(self, name: str) -> Lanes:
        """An intrinsic of LLVM of one argument."""
        type_ = self.value.type
        suffix = f"v{type_.count}{self.dtype}" if isinstance(type_, ir.VectorType) else self.dtype
        function = ir.FunctionType(type_, [type_])
        return self.like(
            self.builder.call(
                cgutils.get_or_insert_function(self.builder.module, function, f"{name}.{suffix}"), [self.value]
            )
        )

    def where(self, comparison: str, bound: float, then: Lanes, otherwise: Lanes) -> Lanes:
        """`then` in the lanes that compare so with a number, else `otherwise`: also in those that are NaN."""
        test = self.builder.fcmp_ordered(comparison, self.value, self.lift(bound).value)
        return self.like(self.builder.select(test, then.value, otherwise.value))


def relu(x: Lanes) -> Lanes:
    return x.where("<", 0.0, x.lift(0.0), x)


def polynomial(x: Lanes, coefficients: tuple[float, ...]) -> Lanes:
    total = x.lift(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


Formula = Callable[..., tuple[Lanes, ...]]


@cache
def row_formula(formula: Formula, inputs: int, outputs: int, dtype: str, vl: int):
    """Intrinsic (n, table): `formula` of the first n elements of `inputs` rows, stored to `outputs` rows.

    table: address of as many addresses, the inputs' first. A row may be an input and an output.
    """
    vector, item_bytes = ir.VectorType(FLOAT[dtype], vl), 4 if dtype == "f32" else 8

    def codegen(context, builder, sig, args):
        n, table = args
        slots = builder.inttoptr(table, I64.as_pointer())
        rows = [builder.load(builder.gep(slots, [I64(i)])) for i in range(inputs + outputs)]
        masked_load, masked_store = masked(builder, vector), masked(builder, vector)
        whole = builder.mul(builder.sdiv(n, I64(vl)), I64(vl))

        def places(i):
            start = builder.mul(i, I64(item_bytes))
            return [vector_at(builder, builder.add(row, start), vector) for row in rows]

        with cgutils.for_range_slice(builder, I64(0), whole, I64(vl), I64) as (i, _):
            at = places(i)
            values = [Lanes(builder, builder.load(slot, align=item_bytes), dtype) for slot in at[:inputs]]
            for result, slot in zip(formula(*values), at[inputs:], strict=True):
                builder.store(result.value, slot, align=item_bytes)
        with builder.if_then(builder.icmp_signed("<", whole, n)):
            at, mask = places(whole), lanes_between(builder, vl, 0, None, builder.sub(n, whole))
            values = [Lanes(builder, masked_load(slot, item_bytes, mask), dtype) for slot in at[:inputs]]
            for result, slot in zip(formula(*values), at[inputs:], strict=True):
                masked_store(result.value, slot, item_bytes, mask)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, n, table):
        return signature(types.none, types.int64, types.int64), codegen

    return run
