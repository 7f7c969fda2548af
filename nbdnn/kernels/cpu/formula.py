"""Formulas over rows of numbers, emitted as LLVM vector code: written once as Python on `Lanes`, run on whole vectors.

    for i in 0, vl, 2 vl ...: out_0[i:], out_1[i:], ... = formula(in_0[i:], in_1[i:], ...)         the last one masked

The compiler's own vectoriser gives up on loops over as many arrays as a gate of a recurrent network has: it would have
to test every pair of them for overlap. float32: exp is a degree-6 polynomial on [-ln2/2, ln2/2] with the exponent set
by bits, tanh near 0 is an odd polynomial: both within 2 ulp. float64: the C library's. Source: own, coefficients from
the Cephes library (S. Moshier).
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

from nbdnn.kernels.cpu.vector import FLOAT, I32, I64, constant, lanes_between, masked, vector_at

EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# Where tanh's polynomial ends, and where exp of float32 would leave the normal numbers.
_NEAR, _LEAST, _MOST = 0.625, -87.33, 88.72


class Lanes:
    """A vector of `dtype` while its code is emitted; arithmetic takes Python numbers too."""

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
        suffix = f"v{type_.count}{self.dtype}"
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


def exp(x: Lanes) -> Lanes:
    """exp(x): float32 stops at its largest and smallest normal numbers."""
    if x.dtype == "f64":
        return x.called("llvm.exp")
    x = x.where(">", _MOST, x.lift(_MOST), x)
    x = x.where("<", _LEAST, x.lift(_LEAST), x)
    n = (x * 1.44269504).called("llvm.rint")
    r = x - n * 0.693359375 + n * 2.12194440e-4
    p = polynomial(r, EXP_TERMS) * (r * r) + r + 1.0
    integers = ir.VectorType(I32, x.value.type.count)
    exponent = x.builder.add(x.builder.fptosi(n.value, integers), constant(integers, 127))
    power = x.builder.bitcast(x.builder.shl(exponent, constant(integers, 23)), x.value.type)
    return p * x.like(power)


def sigmoid(x: Lanes) -> Lanes:
    return 1.0 / (exp(0.0 - x) + 1.0)


def tanh(x: Lanes) -> Lanes:
    if x.dtype == "f64":
        return x.called("llvm.tanh")
    far = 1.0 - 2.0 / (exp(x * 2.0) + 1.0)
    near = polynomial(x * x, _TANH) * (x * x) * x + x
    return x.called("llvm.fabs").where("<", _NEAR, near, far)


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
