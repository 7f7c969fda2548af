"""Batch normalisation on the CPU: what becomes of the sums of channels, one or a vector of them at a time.

A channel's statistics or the gradients of its parameters are stored, and four coefficients are what its elements need:

    forward   y = ((x - center) - second) * scale + offset       second: what the mean has beyond the compute type
    backward  dx = dy * scale + (x - center) * second + offset

All are computed in float64, by one formula an op.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.bn_channel import Variant
from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.formula import Lanes
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.vector import (
    FLOAT,
    I32,
    I64,
    NUMBA_FLOAT,
    by_vectors,
    convert,
    element,
    load,
    row_types,
    splat,
    store,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE


class _Channels:
    """The parameters and results of neighbouring channels, while the code that computes with them is emitted: all are
    in float64 then. `pointers` are the operands', `vl` how many channels there are in a vector."""

    def __init__(self, builder, v: Variant, pointers, vl: int) -> None:
        self._builder, self._dtype, self._compute, self._vl = builder, v.param_dtype, v.compute, vl
        self._starts = {name: builder.load(builder.gep(pointers, [I64(place)])) for name, place in v.places}
        self._float64 = ir.VectorType(FLOAT["f64"], vl)
        self._slots: dict[str, ir.Value] = {}
        self._mask: ir.Value | None = None

    def move(self, channel, mask) -> None:
        """Go to the vector of channels that begins with this one."""
        type_, _, itemsize, _ = row_types(self._dtype, "f64", self._vl)
        self._slots = {n: element(self._builder, at, channel, type_, itemsize) for n, at in self._starts.items()}
        self._mask = mask

    def lanes(self, value) -> Lanes:
        return Lanes(self._builder, value, "f64")

    def number(self, value) -> Lanes:
        """The same in every lane."""
        return self.lanes(splat(self._builder, value, self._float64))

    def sums(self, start, i) -> Lanes:
        """From a row of float64."""
        slot = element(self._builder, start, i, self._float64, 8)
        return self.lanes(load(self._builder, slot, self._float64, 8, self._mask))

    def get(self, name: str) -> Lanes:
        type_, _, itemsize, _ = row_types(self._dtype, "f64", self._vl)
        value = load(self._builder, self._slots[name], type_, itemsize, self._mask)
        wide = convert(self._builder, value, self._dtype, DEFAULT_COMPUTE[self._dtype], self._vl)
        return self.lanes(wide if self._dtype == "f64" else self._builder.fpext(wide, self._float64))

    def put(self, name: str, value: Lanes) -> None:
        narrowed = self._narrowed(value, DEFAULT_COMPUTE[self._dtype])
        result = convert(self._builder, narrowed, DEFAULT_COMPUTE[self._dtype], self._dtype, self._vl)
        store(self._builder, result, self._slots[name], ITEMSIZE[self._dtype], self._mask)

    def coefficient(self, value: Lanes):
        """Of the compute type."""
        return self._narrowed(value, self._compute)

    def rounded(self, value: Lanes) -> Lanes:
        """What the compute type keeps of it."""
        if self._compute == "f64":
            return value
        return self.lanes(self._builder.fpext(self.coefficient(value), self._float64))

    def _narrowed(self, value: Lanes, dtype: str):
        if dtype == "f64":
            return value.value
        return self._builder.fptrunc(value.value, ir.VectorType(FLOAT[dtype], self._vl))


def _of_train(v: Variant, at: _Channels, m, mean, squares, epsilon, factor):
    var = squares.where("<", 0.0, squares.lift(0.0), squares) / m
    invstd = 1.0 / (var + epsilon).called("llvm.sqrt")
    at.put("mean", mean)
    at.put("invstd", invstd)
    if v.running:
        at.put("new_running_mean", at.get("running_mean") * (1.0 - factor) + mean * factor)
        at.put("new_running_var", at.get("running_var") * (1.0 - factor) + var * factor * m / (m - 1.0))
    center = at.rounded(mean)
    return center, mean - center, at.get("gamma") * invstd, at.get("beta")


def _of_infer(v: Variant, at: _Channels, m, a, b, epsilon, factor):
    scale = at.get("gamma") / (at.get("var") + epsilon).called("llvm.sqrt")
    return at.get("mean"), scale.lift(0.0), scale, at.get("beta")


def _of_bwd(v: Variant, at: _Channels, m, total, moment, epsilon, factor):
    invstd = at.get("invstd")
    at.put("dgamma", moment * invstd)
    at.put("dbeta", total)
    scale = at.get("gamma") * invstd
    return at.get("mean"), scale * invstd * invstd * moment / m * -1.0, scale, scale * total / m * -1.0


def _of_infer_bwd(v: Variant, at: _Channels, m, total, moment, epsilon, factor):
    s = (at.get("var") + epsilon).called("llvm.sqrt")
    scale = at.get("gamma") / s
    at.put("dgamma", moment / s)
    at.put("dbeta", total)
    at.put("dmean", total * scale * -1.0)
    at.put("dvar", moment * scale / (s * s) * -0.5)
    return at.get("mean"), scale.lift(0.0), scale, scale.lift(0.0)


_FINISH = {"bn_train": _of_train, "bn_infer": _of_infer, "bn_bwd": _of_bwd, "bn_infer_bwd": _of_infer_bwd}


@cache
def finish(v: Variant):
    """Intrinsic (pointers, channel, m, a, b, epsilon, factor) -> (center, second, scale, offset) of a channel with
    these sums, whose statistics or parameter gradients are stored."""

    def codegen(context, builder, sig, args):
        pointers, channel, *numbers = args
        at = _Channels(builder, v, pointers, 1)
        at.move(channel, None)
        found = [at.coefficient(each) for each in _FINISH[v.op](v, at, *map(at.number, numbers))]
        return context.make_tuple(builder, sig.return_type, [builder.extract_element(each, I32(0)) for each in found])

    @intrinsic
    def run(typingctx, pointers, channel, m, a, b, epsilon, factor):
        returned = types.UniTuple(NUMBA_FLOAT[v.compute], 4)
        return signature(returned, pointers, types.int64, *[types.float64] * 5), codegen

    return run


@cache
def finish_row(v: Variant):
    """Intrinsic (pointers, channel, n, m, a, b, epsilon, factor, to, pitch): the same of n channels, whose sums are
    rows of float64 and whose coefficients become four rows, `pitch` bytes apart. Inference reads no sums."""
    wide, size = ir.VectorType(FLOAT[v.compute], v.vl), ITEMSIZE[v.compute]

    def codegen(context, builder, sig, args):
        pointers, channel, n, m, a, b, epsilon, factor, to, pitch = args
        at = _Channels(builder, v, pointers, v.vl)
        m, epsilon, factor = map(at.number, (m, epsilon, factor))

        def step(i, mask):
            at.move(builder.add(channel, i), mask)
            sums = (m, m) if v.op == "bn_infer" else (at.sums(a, i), at.sums(b, i))
            for row, found in enumerate(_FINISH[v.op](v, at, m, *sums, epsilon, factor)):
                start = builder.add(to, builder.mul(pitch, I64(row)))
                store(builder, at.coefficient(found), element(builder, start, i, wide, size), size, mask)

        by_vectors(builder, n, v.vl, step)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, pointers, channel, n, m, a, b, epsilon, factor, to, pitch):
        i64, f64 = types.int64, types.float64
        return signature(types.none, pointers, i64, i64, f64, i64, i64, f64, f64, i64, i64), codegen

    return run


@cache
def means(v: Variant):
    """Compiled-in function (pointers, channel, n, to): the means that a gradient is given, in the compute type."""
    place, itemsize = dict(v.places).get("mean", 0), ITEMSIZE[v.param_dtype]
    convert_means = convert_row(v.param_dtype, v.compute, v.vl)

    @njit(**DEVICE)
    def means_of(pointers, channel, n, to):
        convert_means(to, pointers[place] + channel * itemsize, n)

    return means_of
