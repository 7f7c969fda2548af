"""What happens to a tile of accumulators before it is stored: activation(alpha*acc + beta*out + bias + residual).

Every kernel hands its accumulators, in the compute type, to the store of this module, so each method fuses the whole
epilogue, rounds to 16 bits exactly once, and writes any layout. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import inf

from llvmlite import ir
from numba import float32, float64, njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.cost import COPY_NS, GATHER_NS
from nbdnn.kernels.cpu.exponential import SIGMOID, TANH
from nbdnn.kernels.cpu.rows import spread_row
from nbdnn.kernels.cpu.vector import (
    I16,
    I64,
    NARROW,
    WIDEN,
    at_least,
    by_vectors,
    convert,
    element,
    load,
    pointer,
    row_types,
    splat,
    spread,
    store,
    store_past_caches,
    vector_at,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

# Where the operands together are larger than this, they do not stay in a last-level cache of 32 MiB: the output is
# written past the caches, which saves reading each line before it is overwritten.
_STREAM_BYTES = 20 << 20
_LINE_BYTES = 64  # what goes past the caches in smaller pieces is a write to memory for each: ten times as slow
_READ_FIRST_NS = 0.5  # one thread, an element of an output in memory whose lines are read before they are written
_PAST_CACHES = 2


def store_kind(problem: ConvProblem, adjacent: bool) -> int:
    """How a tile's lanes are stored: 0 one by one, 1 as vectors of adjacent elements, 2 past the caches."""
    streams = problem.min_bytes > _STREAM_BYTES and "beta" not in problem.epilogue
    return (_PAST_CACHES if streams else 1) if adjacent else 0


def stored_ns(problem: ConvProblem, adjacent: bool, lanes: int) -> float:
    """Nanoseconds of one thread to store an element, of tiles with rows of so many lanes: a prior for the guess."""
    if not adjacent:
        return GATHER_NS
    reads_first = store_kind(problem, adjacent) == _PAST_CACHES and lanes * ITEMSIZE[problem.dtype] % _LINE_BYTES > 0
    return COPY_NS + (_READ_FIRST_NS if reads_first else 0.0)


def is_finished(problem: ConvProblem, of_sums: tuple[str, ...] = ()) -> bool:
    """Whether sums are the output as they are, so that whole vectors may be stored by the inner loop itself. of_sums:
    what of an epilogue that loop does."""
    return set(problem.epilogue) <= set(of_sums) and problem.dtype == DEFAULT_COMPUTE[problem.dtype]


@cache
def _finish_rows(dtype: str, compute: str, vl: int, reads: str, in_place: bool = False):
    """Intrinsic (past_caches, tile, pitch_bytes, rows, n, out, row_offsets, given, bias, bias_row_bytes, bias_step,
    residual, alpha, beta, bound): n sums of each row become max(alpha*sum + beta*out + bias + residual, bound).

    Row m of `out` and `residual` begins row_offsets[m] elements after these addresses. given: whether out is read; bias
    and residual are 0 where there are none. bias_step: 0 where a row has one bias. Of what is not there every vector is
    -0.0, which changes no sum: whole vectors need no branch. reads: "" where sums are stored as they are, "bias" where
    neither out nor residual is read, or "all". in_place: results stay in the tile, in `compute`.
    """
    sums, data, acc_bytes, itemsize = row_types(compute, dtype, vl)
    flags = ("contract", "nsz")

    def codegen(context, builder, sig, args):
        past, tile, pitch, rows, n, out, offsets, given, bias, bias_row_bytes, bias_step, residual, *factors = args
        (alpha, beta), bound = (spread(builder, factor, sums) for factor in factors[:2]), factors[2]

        def is_set(value):
            return builder.icmp_signed("!=", value, I64(0))

        def operand(is_there, row, otherwise, i, mask):
            address = builder.add(row, builder.mul(i, I64(itemsize)))
            if mask is None:
                slot = vector_at(builder, builder.select(is_there, address, otherwise), data)
                return convert(builder, builder.load(slot, align=itemsize), dtype, compute, vl)
            with builder.if_else(is_there) as (from_memory, from_nothing):
                with from_memory:
                    there = load(builder, vector_at(builder, address, data), data, itemsize, mask)
                    from_row = builder.block
                with from_nothing:
                    none = builder.load(vector_at(builder, otherwise, data), align=itemsize)
                    from_none = builder.block
            value = builder.phi(data)
            value.add_incoming(there, from_row)
            value.add_incoming(none, from_none)
            return convert(builder, value, dtype, compute, vl)

        of_lanes = is_set(bias_step)
        nothing = ir.Constant(data, [0x8000 if data.element == I16 else -0.0] * vl)
        slots = [cgutils.alloca_once_value(builder, nothing) for _ in range(2)]
        absent, same = (builder.ptrtoint(slot, I64) for slot in slots)

        def finished(value, start, bias_row, i, mask):
            value = builder.fmul(value, alpha, flags)
            if reads == "all":
                more = operand(is_set(given), builder.add(out, start), absent, i, mask)
                value = builder.fadd(value, builder.fmul(more, beta, flags), flags)
            value = builder.fadd(value, operand(of_lanes, bias_row, same, i, mask), flags)
            if reads == "all":
                more = operand(is_set(residual), builder.add(residual, start), absent, i, mask)
                value = builder.fadd(value, more, flags)
            return at_least(builder, [value], bound)[0]

        with cgutils.for_range(builder, rows) as loop:
            row = builder.add(tile, builder.mul(loop.index, pitch))
            start = builder.mul(builder.load(element(builder, offsets, loop.index, I64, 8)), I64(itemsize))
            bias_row = builder.add(bias, builder.mul(loop.index, bias_row_bytes))
            with builder.if_then(builder.and_(is_set(bias), builder.not_(of_lanes))):
                one = builder.load(vector_at(builder, bias_row, data.element), align=itemsize)
                builder.store(splat(builder, one, data), slots[1])

            def finish(i, mask):
                value = load(builder, element(builder, row, i, sums, acc_bytes), sums, acc_bytes, mask)
                if reads:
                    value = finished(value, start, bias_row, i, mask)
                if in_place:
                    store(builder, value, element(builder, row, i, sums, acc_bytes), acc_bytes, mask)
                    return
                value = convert(builder, value, compute, dtype, vl)
                slot = element(builder, builder.add(out, start), i, data, itemsize)
                if mask is not None:
                    store(builder, value, slot, itemsize, mask)
                    return
                with builder.if_else(is_set(past)) as (past_caches, through_them):
                    with past_caches:
                        store_past_caches(builder, value, slot)
                    with through_them:
                        store(builder, value, slot, itemsize, None)

            by_vectors(builder, n, vl, finish)
        return context.get_dummy_value()

    @intrinsic
    def run(
        typingctx, past, tile, pitch, rows, n, out, offsets, given, bias, bias_row_bytes, bias_step, residual, alpha,
        beta, bound,
    ):  # fmt: skip
        return signature(types.none, *[types.int64] * 12, *[types.float64] * 3), codegen

    return run


@cache
def tile_store(dtype: str, compute: str, vl: int, step: int = 1):
    """Compiled-in function that finishes and stores one tile; see the parameters of `store`.

    step: lanes that are stored as vectors are so many elements apart.
    """
    data, sums_at, index = pointer(dtype), pointer(compute), pointer("i64")
    widen, narrow = WIDEN[dtype], NARROW[dtype]
    finish_as_they_are, finish_biased, finish = (
        _finish_rows(dtype, compute, vl, reads) for reads in ("", "bias", "all")
    )
    finish_in_place = _finish_rows(dtype, compute, vl, "all", in_place=True)
    narrow_apart = spread_row(compute, dtype, vl, step)
    itemsize, acc_bytes, adjacent = ITEMSIZE[dtype], ITEMSIZE[compute], step == 1
    real = float32 if compute == "f32" else float64
    sigmoid, tanh = SIGMOID[compute], TANH[compute]

    @njit(**DEVICE, fastmath={"contract", "arcp", "nsz"})
    def activate(row, lanes, code):
        sums = sums_at(row)
        if code == 2:
            for j in range(lanes):
                sums[j] = sums[j] * sigmoid(sums[j])
        elif code == 3:
            for j in range(lanes):
                sums[j] = sigmoid(sums[j])
        elif code == 4:
            for j in range(lanes):
                sums[j] = tanh(sums[j])

    @njit(**DEVICE, fastmath={"contract", "nsz"})
    def add_scattered(row, lanes, alpha, beta, given, residual, lane_offsets, contiguous):
        sums, first = sums_at(row), lane_offsets[0]
        for j in range(lanes):
            offset = first + j * step if contiguous else lane_offsets[j]
            total = real(alpha) * sums[j]
            if given:
                total += real(beta) * widen(data(given)[offset])
            if residual:
                total += widen(data(residual)[offset])
            sums[j] = total

    @njit(**DEVICE)
    def store(tile, pitch, rows, lanes, out, row_offsets, lane_offsets, contiguous, flags, alpha, beta):
        """Element (m, j) of the tile goes to out[row_offsets[m] + lane_offsets[j]].

        tile, out, row_offsets, lane_offsets are addresses; offsets are int64 elements; `contiguous` is what
        `store_kind` says of the lanes. flags = (activation: 0 or 1 + its place in problem.ACTIVATIONS,
        bias address or 0, its steps in elements from row to row and from lane to lane, residual address or 0, whether
        beta reads out).
        """
        row_start, lane_start, row_bytes = index(row_offsets), index(lane_offsets), pitch * acc_bytes
        activation, bias, bias_row_step, bias_lane_step, residual, given = flags
        bias_lane_step *= bias != 0
        bias_row_bytes, bound = bias_row_step * itemsize, 0.0 if activation == 1 else -inf
        is_in_rows = adjacent and contiguous
        if is_in_rows:
            out += lane_start[0] * itemsize
            residual += lane_start[0] * itemsize if residual else 0
        elif given or residual:
            for m in range(rows):
                start = row_start[m] * itemsize
                of_out, other = out + start if given else 0, residual + start if residual else 0
                add_scattered(tile + m * row_bytes, lanes, alpha, beta, of_out, other, lane_start, contiguous)
            alpha, given, residual = 1.0, 0, 0
        if activation > 1 or (not is_in_rows and (alpha != 1.0 or bias or activation)):
            operands = (out, row_offsets, given, bias, bias_row_bytes, bias_lane_step, residual, alpha, beta, bound)
            finish_in_place(0, tile, row_bytes, rows, lanes, *operands)
            for m in range(rows):
                activate(tile + m * row_bytes, lanes, activation)
            alpha, given, bias, residual, bound = 1.0, 0, 0, 0, -inf
        if is_in_rows:
            places = 1
            if contiguous == _PAST_CACHES:
                places = lanes * itemsize
                for m in range(rows):
                    places |= out + row_start[m] * itemsize
            past = int(places % _LINE_BYTES == 0)
            operands = (out, row_offsets, given, bias, bias_row_bytes, bias_lane_step, residual, alpha, beta, bound)
            if given or residual:
                finish(past, tile, row_bytes, rows, lanes, *operands)
            elif bias or alpha != 1.0 or bound == 0.0:
                finish_biased(past, tile, row_bytes, rows, lanes, *operands)
            else:
                finish_as_they_are(past, tile, row_bytes, rows, lanes, *operands)
        else:
            for m in range(rows):
                row, to = tile + m * row_bytes, out + row_start[m] * itemsize
                if contiguous:
                    narrow_apart(to + lane_start[0] * itemsize, row, lanes)
                else:
                    for j in range(lanes):
                        data(to)[lane_start[j]] = narrow(sums_at(row)[j])

    return store
