"""Softmax and its gradient where neighbours in memory are elements of different rows: columns, read once.

    y[i] = exp(x[i] - m) / sum_j exp(x[j] - m)           log: y[i] = x[i] - m - log(sum_j exp(x[j] - m))
    dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]          log: dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

                          columns (vectors of neighbouring positions)
    elements of a row     thread 0   1   2   3                 element i of a column is held by split i % splits:
    (channels)                   4   5   6   7                 all of a column lie in registers of one block
                                 8   9  10  11   ...

A thread sums its elements of each of its columns, a warp those of its splits by exchanges, and the block's parts meet
in shared memory: a thread a column merges (maximum, sum of powers shifted by it) of all parts.

Traffic: every array once. Sums in float32 in a fixed order; exp as in `softmax_rows`. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import softmax_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_softmax import SoftmaxProblem

_WARP, _LEAST_THREADS, _MOST_THREADS = 32, 64, 1024
_COLUMNS = (1, 2, 4, 8, 16, 32, 64, 128)
_MOST_VECTORS = 24
_MOST_SHARED_BYTES = 48 << 10
_MOST_BLOCKS = 2**31 - 1


class Config(NamedTuple):
    """columns: vectors of neighbours; splits: threads that share a column."""

    columns: int
    splits: int

    def __str__(self) -> str:
        return f"c{self.columns}s{self.splits}"


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    algorithm: str
    lanes: int
    vectors: int
    config: Config


class _Fields(NamedTuple):
    """tiles: blocks side by side over `inner` neighbours."""

    length: int
    inner: int
    tiles: int


def keeps_powers(dtype: str, algorithm: str) -> bool:
    """Whether a forward keeps powers from the sum to the store. Elements of 16 bits take half their room: as they were
    loaded more of them fit, and are raised to powers again."""
    return dtype == "f32" and algorithm != "log"


def parts(config: Config) -> int:
    """Partial sums of a column that meet in shared memory."""
    return ceil(config.columns * config.splits / max(_WARP, config.columns))


@cache
def _merged(v: Variant, finish: Callable):
    """Device function (column, split, maxima, totals) of a part -> (maxima, the formula of totals) of whole columns."""
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_tuples, ptx_vector

    integer, real, u32 = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD
    columns, splits = v.config
    lanes, threads, each_part = v.lanes, columns * splits, columns * v.lanes
    count = parts(v.config)
    room, rounds = count * each_part, ceil(each_part / threads)
    load, power, nothing = ptx_vector.load_shared_rows(1, lanes), ptx_tuples.each(ptx_tuples.power, 2), -math.inf
    store, step_bytes, finished = ptx_vector.store_shared_floats, 4 * columns, ptx_tuples.each(finish, 1)

    @ptx.inline
    def whole(maxima, sums, at):
        """Merges the parts of one column, into the place of the first."""
        most, total = real(nothing), real(0.0)
        for part in range(count):
            most = maxima[at + part * each_part] if maxima[at + part * each_part] > most else most
        for part in range(count):
            scale = power((maxima[at + part * each_part],), (most,))[0]
            total = ptx.fma(scale, sums[at + part * each_part], total)
        maxima[at] = most
        sums[at] = finished((total,))[0]

    @ptx.inline
    def merged(column, split, most, totals):
        maxima, sums = ptx.cuda.shared.array(room, real), ptx.cuda.shared.array(room, real)
        thread = integer(ptx.thread_x())
        part = integer(thread >> 5) if columns < _WARP else split
        if columns >= _WARP or thread & (_WARP - 1) < columns:
            offset = u32(4 * (part * each_part + column))
            store(u32(ptx_tile.shared_address(maxima) + offset), u32(step_bytes), most)
            store(u32(ptx_tile.shared_address(sums) + offset), u32(step_bytes), totals)
        ptx.cuda.syncthreads()
        for round_ in range(rounds):
            at = integer(thread + round_ * threads)
            if at < each_part:
                whole(maxima, sums, at)
        ptx.cuda.syncthreads()
        offset = u32(4 * column)
        most = load(u32(ptx_tile.shared_address(maxima) + offset), u32(step_bytes))
        return most, load(u32(ptx_tile.shared_address(sums) + offset), u32(step_bytes))

    return merged


class _Cell(NamedTuple):
    """Where a thread is: its column in the block, its split, the first of its positions, and that in memory."""

    column: int
    split: int
    position: int
    at: int


@cache
def _placed(v: Variant):
    """Device functions: (fields) -> _Cell, and (pointer, cell, fields) -> the place of its vectors."""
    from nbdnn.kernels.cuda import ptx, ptx_tuples

    integer, (columns, splits) = ptx.INTEGER[32], v.config
    lanes, column_bits, place = v.lanes, columns.bit_length() - 1, ptx_tuples.Place

    @ptx.inline
    def cell(f):
        thread = integer(ptx.thread_x())
        outer, tile = ptx.divided(integer(ptx.block_x()), f.tiles)
        column, split = integer(thread & (columns - 1)), integer(thread >> column_bits)
        position = integer(integer(tile * columns + column) * lanes)
        return _Cell(column, split, position, (outer * f.length + split) * f.inner + position)

    @ptx.inline
    def placed(array, at, f):
        end = f.length if at.position < f.inner else integer(0)
        return place(array, at.at, splits * f.inner, at.split, integer(splits), end)

    return cell, placed


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    columns = v.config.columns
    is_log, shifts, spread = v.algorithm == "log", v.algorithm != "fast", parts(v.config) > 1
    keeps = keeps_powers(v.dtype, v.algorithm)
    cell, placed = _placed(v)
    finish_sum = ptx_tuples.log if is_log else ptx_tuples.reciprocal
    merged, finished = _merged(v, finish_sum) if spread else None, ptx_tuples.each(finish_sum, 1)
    held = ptx_tuples.Held(v.dtype, v.lanes, v.vectors)
    load, widen, store = ptx_tuples.load(held, "-inf"), ptx_tuples.widen(held), ptx_tuples.store(held)
    maximum = ptx_tuples.gather(held, ptx_tuples.itself, ptx_tuples.larger, 1)
    total_power = ptx_tuples.gather(held, ptx_tuples.power, ptx_tuples.total, 1)
    store_afresh = ptx_tuples.scatter(held, ptx_tuples.log_power if is_log else ptx_tuples.power_share, 1, 2)
    total = ptx_tuples.fold(ptx_tuples.total, v.lanes)
    largest, summed = (ptx_tuples.across(formula, columns, _WARP) for formula in (ptx_tuples.larger, ptx_tuples.total))
    power, product = (ptx_tuples.each(formula, 2) for formula in (ptx_tuples.power, ptx_tuples.product))
    finite, zeros = ptx_tuples.each(ptx_tuples.finite, 1), ptx_vector.zeros(v.lanes)

    def softmax_columns(x, y, f):
        at = cell(f)
        loaded = load(placed(x, at, f))

        # 1. Powers and their sums, of a warp's part of each column.
        most = zeros()
        if shifts:
            most = largest(maximum(loaded, most))
        shift = finite(most) if spread else most
        if keeps:
            powers = power(widen(loaded), shift)
            sums = summed(total(powers))
        else:
            sums = summed(total_power(loaded, shift))

        # 2. Of whole columns.
        column_shift = shift
        if spread:
            column_shift, scale = merged(at.column, at.split, most, sums)
        else:
            scale = finished(sums)

        # 3. What is stored.
        if keeps:
            if spread:
                scale = product(scale, power(most, column_shift))
            store(placed(y, at, f), product(powers, scale))
        else:
            store_afresh(placed(y, at, f), loaded, column_shift, scale)

    data = ptx.pointer(v.dtype)
    return softmax_columns, (data, data, ptx.record(_Fields, 32))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tuples, ptx_vector

    v = Variant(*specialised_on)
    is_log, spread = v.algorithm == "log", parts(v.config) > 1
    cell, placed = _placed(v)
    merged = _merged(v, ptx_tuples.itself) if spread else None
    held = ptx_tuples.Held(v.dtype, v.lanes, v.vectors)
    load, summed = ptx_tuples.load(held, "zero"), ptx_tuples.across(ptx_tuples.total, v.config.columns, _WARP)
    dot = ptx_tuples.gather(held, ptx_tuples.itself if is_log else ptx_tuples.product, ptx_tuples.total, 2)
    finish = ptx_tuples.scatter(held, ptx_tuples.log_gradient if is_log else ptx_tuples.gradient, 2, 1)
    zeros, word, hide = ptx_vector.zeros(v.lanes), ptx.WORD, ptx_tuples.hidden(held)

    def softmax_columns_gradient(dy, y, dx, f):
        at = cell(f)
        gradients, outputs = load(placed(dy, at, f)), load(placed(y, at, f))
        sums = summed(dot(gradients, outputs, zeros()))
        if spread:
            _, sums = merged(at.column, at.split, zeros(), sums)
        nothing = word(f.length >> 31)
        gradients, outputs = hide(gradients, nothing), hide(outputs, nothing)
        finish(placed(dx, at, f), gradients, outputs, sums)

    data = ptx.pointer(v.dtype)
    return softmax_columns_gradient, (data, data, data, ptx.record(_Fields, 32))


class Columns(LaunchedCandidate[Config]):
    """Rows whose elements lie apart, as long as registers of a block hold."""

    algorithm = "columns"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SoftmaxProblem, device: Gpu) -> Support:
        outer, length, inner = problem.rows
        if problem.dtype == "f64":
            return Support(False, "f64: only f16, bf16 and f32")
        if not outer * length:
            return Support(False, f"{outer} times {length} elements: nothing to do")
        if inner == 1:
            return Support(False, "elements of a row lie side by side")
        if outer * inner > _MOST_BLOCKS or length > _MOST_BLOCKS // _MOST_THREADS:
            return Support(False, f"{outer * inner} rows of {length} elements: 32 bits do not count them")
        if not self.every(problem):
            return Support(False, f"{length} elements a row: more than the registers of a block hold")
        return YES

    def configs(self, problem: SoftmaxProblem, device: Gpu) -> tuple[Config, ...]:
        every = self.every(problem)
        guesses = ((self.estimate(problem, config, device), config) for config in every)
        return plan.worth_measuring(guesses, kind=lambda config: config.columns)

    def every(self, problem: SoftmaxProblem) -> list[Config]:
        """The configs whose threads have registers for their columns."""
        found = dict.fromkeys(
            config
            for columns in _COLUMNS
            for vectors in range(1, _MOST_VECTORS + 1)
            for config in self._of_shape(problem, columns, vectors)
        )
        return list(found)

    def _of_shape(self, problem: SoftmaxProblem, columns: int, vectors: int) -> list[Config]:
        _, length, inner = problem.rows
        lanes, together = plan.vector_lanes(problem, inner), max(1, _WARP // columns)
        splits = ceil(ceil(length / vectors) / together) * together
        if not _LEAST_THREADS <= columns * splits <= _MOST_THREADS or columns >= 2 * ceil(inner / lanes):
            return []
        config = Config(columns, splits)
        fits = plan.holds(problem, ceil(length / splits) * lanes, self._afresh(problem))
        fits = fits and self._resident(problem, config) > 0
        return [config] if fits and 8 * parts(config) * columns * lanes <= _MOST_SHARED_BYTES else []

    def _afresh(self, problem: SoftmaxProblem) -> bool:
        return self.op == "softmax_fwd" and problem.dtype != "f32" and problem.algorithm != "log"

    def _resident(self, problem: SoftmaxProblem, config: Config) -> int:
        """Blocks that a multiprocessor holds at once."""
        lanes = plan.vector_lanes(problem, problem.rows[2])
        elems = ceil(problem.rows[1] / config.splits) * lanes
        registers = plan.registers(problem, elems, lanes, self._afresh(problem))
        return plan.resident_blocks(config.columns * config.splits, registers)

    def estimate(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> float:
        (launch,) = self.launches(problem, config, device)
        _, length, inner = problem.rows
        line_bytes = ITEMSIZE[problem.dtype] * min(plan.vector_lanes(problem, inner) * config.columns, inner)
        vectors = ceil(length / config.splits)
        elems = vectors * plan.vector_lanes(problem, inner)
        warps = config.columns * config.splits / _WARP if config.splits > 1 else 1.0
        shape = plan.Shape(length * line_bytes, line_bytes, vectors, elems, warps)
        return plan.kernel_us(problem, device, launch, shape)

    def launches(self, problem: SoftmaxProblem, config: Config, device: Gpu) -> list[Launch]:
        outer, length, inner = problem.rows
        lanes, threads = plan.vector_lanes(problem, inner), config.columns * config.splits
        vectors, tiles = ceil(length / config.splits), ceil(inner / lanes / config.columns)
        variant = Variant(problem.dtype, problem.algorithm, lanes, vectors, config)
        forward = self.op == "softmax_fwd"
        kernel = _forward_kernel if forward else _backward_kernel
        return [
            Launch(
                source=Source(kernel, variant, threads, self._resident(problem, config)),
                grid=(outer * tiles, 1, 1),
                pointers=(0, 1) if forward else (0, 1, 2),
                scalars="",
                integers=_Fields(length, inner, tiles),
            )
        ]


FWD, BWD = Columns("softmax_fwd"), Columns("softmax_bwd")
