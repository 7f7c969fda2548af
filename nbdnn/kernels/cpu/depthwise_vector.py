"""The inner loops of depthwise convolution of planes, as LLVM vector code: the lanes are pixels of a row.

Loads are masked, so that borders cost nothing and nothing is copied. Neighbouring taps of a row are shifts of what was
loaded once: most loads lie across two cache lines, and cost as much as four products (3x3 of 56x56 took 49 us, not 63,
7x7 146 us, not 345; two images of 64 channels, two threads of a Zen 5).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.rows import order
from nbdnn.kernels.cpu.turns import dealt
from nbdnn.kernels.cpu.vector import (
    FLOAT,
    I64,
    convert,
    every,
    lanes_between,
    load,
    row_types,
    splat,
    vector_at,
)

PLANAR_BLOCK = 4
_CHAINS = 2  # of sums of each row of a block, which do not wait for each other: 5x5 took 126 us, not 166
_MASK_BYTES = 64  # narrower vectors have no registers of masks: what lies inside is loaded without
_MOST_WEIGHTS = 25  # in registers, beside the accumulators of a block


class Loops:
    """Vector code with loops and accumulators; LLVM promotes the accumulators' slots to registers."""

    def __init__(self, builder, dtype: str, compute: str, vl: int) -> None:
        self.builder, self.dtype, self.compute, self.vl = builder, dtype, compute, vl
        self.vector = ir.VectorType(FLOAT[compute], vl)
        self.read, _, self.itemsize, self.acc_bytes = row_types(dtype, compute, vl)
        fma_type = ir.FunctionType(self.vector, [self.vector] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{vl}{compute}")

    def zeros(self, count: int):
        zero = ir.Constant(self.vector, None)
        slots = [cgutils.alloca_once(self.builder, self.vector) for _ in range(count)]
        for slot in slots:
            self.builder.store(zero, slot)
        return slots

    def add_product(self, slot, a, b):
        self.builder.store(self.builder.call(self.fma, [a, b, self.builder.load(slot)]), slot)

    def offset(self, address, index, step):
        """address + index * step, for int64 values or Python ints."""
        builder = self.builder
        index, step = (I64(value) if isinstance(value, int) else value for value in (index, step))
        return builder.add(address, builder.mul(index, step))

    def int64_at(self, address, index):
        return self.builder.load(self.builder.gep(self.builder.inttoptr(address, I64.as_pointer()), [index]))

    def load(self, address, mask=None):
        """A vector of data, widened; lanes off the mask are 0 and not read."""
        value = load(self.builder, vector_at(self.builder, address, self.read), self.read, self.itemsize, mask)
        return convert(self.builder, value, self.dtype, self.compute, self.vl)

    def load_every(self, address, masks):
        """Of a row every len(masks)-th element, widened; of vectors whose mask is None all lanes are read."""
        parts = []
        for part, mask in enumerate(masks):
            slot = vector_at(self.builder, self.offset(address, part, self.vl * self.itemsize), self.read)
            parts.append(load(self.builder, slot, self.read, self.itemsize, mask))
        return convert(self.builder, every(self.builder, parts), self.dtype, self.compute, self.vl)

    def weight(self, address):
        scalar = self.builder.load(self.builder.inttoptr(address, FLOAT[self.compute].as_pointer()))
        return splat(self.builder, scalar, self.vector)

    def accumulator(self, address):
        return vector_at(self.builder, address, self.vector)

    def column_masks(self, q, step: int, start, stop):
        """Masks of the parts of a strided load of columns q, q+1, ...: those in [start, stop)."""
        builder = self.builder
        low = builder.mul(builder.sub(start, q), I64(step))
        last = builder.sub(builder.sub(stop, q), I64(1))
        high = builder.add(builder.mul(last, I64(step)), I64(1))
        return [lanes_between(builder, self.vl, part * self.vl, low, high) for part in range(step)]


def shifted(builder, near, far, by: int):
    """A vector of neighbours that begins so many elements behind the first of two in a row."""
    vl = near.type.count
    return builder.shuffle_vector(near, far, order(range(by, by + vl)))


class _RowTaps:
    """The inputs of a row's taps for vectors of outputs; columns: as `planar_rows` has them.

    joint: taps are neighbours, none of them more than vl outputs from the first: two vectors of a row, or of each of
    its phases where the step is 2 or 4, are shifted for all of them.
    """

    def __init__(self, v: Loops, columns, taps: int, step: int, joint: bool) -> None:
        self.v, self.taps, self.step, self.joint = v, taps, step, joint
        self.columns = [tuple(v.int64_at(columns, I64(3 * s + part)) for part in range(3)) for s in range(taps)]

    def inside(self):
        """First and end of the q for which all that is loaded for outputs q, q + 1, ... lies in the row."""
        builder, step, vl = self.v.builder, self.step, self.v.vl
        if not self.taps:
            return I64(0), I64(0)
        if self.joint:
            low, end = (builder.sub(bound, self.columns[0][0]) for bound in self._wanted())
            first = builder.sdiv(builder.add(low, I64(step - 1)), I64(step))
            return first, builder.add(builder.sdiv(end, I64(step)), I64(1 - 2 * vl))
        starts, stops = ([column[part] for column in self.columns] for part in (1, 2))
        return self._most(">", starts), builder.add(self._most("<", stops), I64(1 - vl - int(step > 1)))

    def at(self, q, inside: bool = False) -> Callable[..., list]:
        """(row, mask or None) -> a vector for each tap, zeros where the mask is off: outputs q, q + 1, ...

        inside: nothing is masked; without a mask.
        """
        v, builder, step = self.v, self.v.builder, self.step
        first = builder.mul(q, I64(step))
        shifts = [builder.mul(builder.add(offset, first), I64(v.itemsize)) for offset, _, _ in self.columns]
        if inside:
            of_parts, of_taps = [None] * (2 * step), [[None] * step] * self.taps
        elif self.joint:
            begin = builder.add(first, self.columns[0][0])
            ends = [builder.sub(end, begin) for end in self._wanted()]
            of_parts = [lanes_between(builder, v.vl, part * v.vl, *ends) for part in range(2 * step)]
        else:
            of_taps = [v.column_masks(q, step, start, stop) for _, start, stop in self.columns]

        def among(masks, present):
            return masks if present is None else [builder.and_(mask, present) for mask in masks]

        def joint_values(row, present=None) -> list:
            start = builder.add(row, shifts[0])
            slots = [v.offset(start, part, v.vl * v.itemsize) for part in range(2 * step)]
            parts = [v.load(slot, mask) for slot, mask in zip(slots, among(of_parts, present), strict=True)]
            near, far = (dealt(builder, half) for half in (parts[:step], parts[step:]))
            return [shifted(builder, near[s % step], far[s % step], s // step) for s in range(self.taps)]

        def values(row, present=None) -> list:
            each = zip(shifts, of_taps, strict=True)
            return [v.load_every(builder.add(row, shift), among(masks, present)) for shift, masks in each]

        return joint_values if self.joint else values

    def _wanted(self):
        """The pixels of a row that any output wants: first and end. A tap that no output reaches wants none."""
        builder, step, lows, ends = self.v.builder, I64(self.step), [], []
        for offset, start, stop in self.columns:
            some = builder.icmp_signed("<", start, stop)
            low = builder.add(builder.mul(start, step), offset)
            end = builder.add(builder.add(builder.mul(builder.sub(stop, I64(1)), step), offset), I64(1))
            lows.append(builder.select(some, low, I64(2**31 - 1)))
            ends.append(builder.select(some, end, I64(0)))
        return self._most("<", lows), self._most(">", ends)

    def _most(self, how: str, values: list):
        builder = self.v.builder
        return reduce(lambda one, two: builder.select(builder.icmp_signed(how, one, two), one, two), values)


@cache
def planar_rows(dtype: str, compute: str, vl: int, taps: int, step: int, joint: bool):
    """Intrinsic: rows of one plane, tile[i, q] = sum over e, s of w[e, s] * x[e, row i*step_h + h(e), q*step + s].

    Arguments, all int64: x (address of the plane), pitch (bytes from row to row), first_row, rows, step_h, extent_h;
    entries (address of pairs: row offset, byte offset of the depth slice), n_entries; weights (address of
    n_entries x taps accumulate-type values); columns (address of `taps` triples: column offset, first and end of the
    outputs inside the image); width, tile, tile_pitch (bytes, at least width rounded up to whole vectors). joint: as
    `_RowTaps` has it.
    """

    def codegen(context, builder, sig, args):
        x, pitch, first_row, rows, step_h, extent_h, entries, n_entries, weights, columns = args[:10]
        width, tile, tile_pitch = args[10:]
        v = Loops(builder, dtype, compute, vl)
        row_taps = _RowTaps(v, columns, taps, step, joint)

        def vectors(q, inside):
            values_of = row_taps.at(q, inside)
            with cgutils.for_range(builder, rows) as i:
                acc = v.zeros(_CHAINS)
                top = builder.mul(builder.add(first_row, i.index), step_h)
                with cgutils.for_range(builder, n_entries) as e:
                    pair = builder.mul(e.index, I64(2))
                    h = builder.add(top, v.int64_at(entries, pair))
                    with builder.if_then(builder.icmp_unsigned("<", h, extent_h)):
                        depth = v.int64_at(entries, builder.add(pair, I64(1)))
                        row = v.offset(builder.add(x, depth), h, pitch)
                        taps_row = v.offset(weights, e.index, taps * v.acc_bytes)
                        for s, value in enumerate(values_of(row)):
                            v.add_product(acc[s % _CHAINS], v.weight(v.offset(taps_row, s, v.acc_bytes)), value)
                to = v.offset(v.offset(tile, i.index, tile_pitch), q, v.acc_bytes)
                total = reduce(builder.fadd, [builder.load(chain) for chain in acc])
                builder.store(total, v.accumulator(to), align=v.acc_bytes)

        first, end = row_taps.inside()
        with cgutils.for_range_slice(builder, I64(0), width, I64(vl), I64) as (q, _):
            is_inside = builder.and_(builder.icmp_signed(">=", q, first), builder.icmp_signed("<", q, end))
            with builder.if_else(is_inside) as (inside, across):
                with inside:
                    vectors(q, True)
                with across:
                    vectors(q, False)
        return context.get_dummy_value()

    @intrinsic
    def run(
        typingctx,
        x, pitch, first_row, rows, step_h, extent_h, entries, n_entries, weights, columns, width, tile, tile_pitch,
    ):  # fmt: skip
        return signature(types.none, *[types.int64] * 13), codegen

    return run


@cache
def planar_block(dtype: str, compute: str, vl: int, taps: tuple[int, int], steps: tuple[int, int], joint: bool):
    """Intrinsic: as planar_rows for adjacent rows of taps, PLANAR_BLOCK output rows at once.

    An input vector is loaded once for all the output rows that it reaches by some rows of taps, whose weights stay in
    registers: all of them, or one group after the other.
    Arguments, all int64: x, pitch, top (input row of the first tap of output row 0 of the call), rows, extent_h,
    weights, columns, width, tile, tile_pitch. The tile has room for `rows` rounded up to whole blocks. taps, steps: of
    rows and columns. joint: as `_RowTaps` has it.
    """
    (taps_h, taps_w), (step_h, step_w) = taps, steps

    def codegen(context, builder, sig, args):
        x, pitch, top, rows, extent_h, weights, columns, width, tile, tile_pitch = args
        v = Loops(builder, dtype, compute, vl)
        group_rows = min(taps_h, max(1, _MOST_WEIGHTS // taps_w))
        groups = [range(first, min(first + group_rows, taps_h)) for first in range(0, taps_h, group_rows)]

        def weights_of(group):
            taps = range(group.start * taps_w, group.stop * taps_w)
            return {tap: v.weight(v.offset(weights, tap, v.acc_bytes)) for tap in taps}

        kept, bits = weights_of(groups[0]) if len(groups) == 1 else None, ir.VectorType(ir.IntType(1), vl)
        row_taps = _RowTaps(v, columns, taps_w, step_w, joint)
        has_versions = vl * v.acc_bytes < _MASK_BYTES and kept is not None
        inside_first, inside_end = row_taps.inside() if has_versions else (None, None)
        last_row = (PLANAR_BLOCK - 1) * step_h + taps_h - 1

        def block(q, i, first, inside):
            values_of = row_taps.at(q, inside)
            acc = [[ir.Constant(v.vector, None)] * _CHAINS for _ in range(PLANAR_BLOCK)]
            for group in groups:
                w = kept or weights_of(group)
                for e in range(group.start, (PLANAR_BLOCK - 1) * step_h + group.stop):
                    h = builder.add(first, I64(e))
                    present = None if inside else splat(builder, builder.icmp_unsigned("<", h, extent_h), bits)
                    row = v.offset(x, h, pitch)
                    reached = [k for k in range(PLANAR_BLOCK) if e - k * step_h in group]
                    for s, value in enumerate(values_of(row, present) if reached else ()):
                        for k in reached:
                            tap = (e - k * step_h) * taps_w + s
                            chain = tap % _CHAINS
                            acc[k][chain] = builder.call(v.fma, [w[tap], value, acc[k][chain]])
            for k, chains in enumerate(acc):
                total = reduce(builder.fadd, chains)
                to = v.offset(v.offset(tile, builder.add(i, I64(k)), tile_pitch), q, v.acc_bytes)
                builder.store(total, v.accumulator(to), align=v.acc_bytes)

        with (
            cgutils.for_range_slice(builder, I64(0), width, I64(vl), I64) as (q, _),
            cgutils.for_range_slice(builder, I64(0), rows, I64(PLANAR_BLOCK), I64) as (i, _),
        ):
            first = builder.add(top, builder.mul(i, I64(step_h)))
            if not has_versions:
                block(q, i, first, False)
            else:
                tests = (
                    builder.icmp_signed(">=", q, inside_first),
                    builder.icmp_signed("<", q, inside_end),
                    builder.icmp_signed(">=", first, I64(0)),
                    builder.icmp_signed("<", builder.add(first, I64(last_row)), extent_h),
                )
                with builder.if_else(reduce(builder.and_, tests)) as (inside, across):
                    with inside:
                        block(q, i, first, True)
                    with across:
                        block(q, i, first, False)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, x, pitch, top, rows, extent_h, weights, columns, width, tile, tile_pitch):
        return signature(types.none, *[types.int64] * 10), codegen

    return run


@cache
def planar_filter(dtype: str, compute: str, vl: int, taps: int, step: int, joint: bool):
    """Intrinsic: one filter row of one plane, sums[s] += sum over i, q of dy[i, q] * x[i*x_step, q*step + offset(s)].

    Arguments, all int64: x (address of the input row of output row 0), x_step (bytes a row step), dy, dy_pitch, rows,
    columns (as in planar_rows), width, sums (address of `taps` accumulate-type values). joint: as `_RowTaps` has it.
    """

    def codegen(context, builder, sig, args):
        x, x_step, dy, dy_pitch, rows, columns, width, sums = args
        v = Loops(builder, dtype, compute, vl)
        acc, row_taps = v.zeros(taps), _RowTaps(v, columns, taps, step, joint)
        with cgutils.for_range_slice(builder, I64(0), width, I64(vl), I64) as (q, _):
            inside, values_of = lanes_between(builder, vl, 0, None, builder.sub(width, q)), row_taps.at(q)
            with cgutils.for_range(builder, rows) as i:
                gradient = v.load(v.offset(v.offset(dy, i.index, dy_pitch), q, v.itemsize), inside)
                for slot, value in zip(acc, values_of(v.offset(x, i.index, x_step)), strict=True):
                    # Behind the last output there may be a pixel that another tap wants, and it need not be finite.
                    value = builder.select(inside, value, ir.Constant(v.vector, None)) if joint else value
                    v.add_product(slot, gradient, value)
        scalar = FLOAT[compute]
        reduce_type = ir.FunctionType(scalar, [scalar, v.vector])
        name = f"llvm.vector.reduce.fadd.v{vl}{compute}"
        add_up = cgutils.get_or_insert_function(builder.module, reduce_type, name)
        for s in range(taps):
            slot = builder.inttoptr(v.offset(sums, s, v.acc_bytes), scalar.as_pointer())
            lanes = builder.load(acc[s])
            total = builder.call(add_up, [ir.Constant(scalar, 0.0), lanes], fastmath=("reassoc",))
            builder.store(builder.fadd(builder.load(slot), total), slot)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, x, x_step, dy, dy_pitch, rows, columns, width, sums):
        return signature(types.none, *[types.int64] * 8), codegen

    return run
