"""Batch normalisation of few rows whose neighbours are channels: a thread has some channels, and all of their rows.

    thread   1. asks for its first rows and for its channels' parameters     2. adds up its rows, and asks for more
             3. finishes its channels     4. scales its rows, the last ones, which it still has, first

No two threads have a channel in common, so that nobody waits for another's sums. So it is in per-activation mode, whose
rows are images, and of few small images channels-last. Traffic: x (and dy) once, and from the first-level cache again
what is more than a thread keeps; parameters, results and y once, by vectors. Sums in float32 (float64), of training
about the mean of the first rows, one row after the other. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda.bn_plan import Variant
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_THREADS = 128
_MOST_ROWS = 64
_MOST_LANES, _WHOLE_BYTES = 4, 16
_KEPT_BYTES, _MOST_AT_ONCE = 64, 16  # of the rows of an array that a thread has on their way
_LAUNCH_US, _TURN_US, _ROW_US = 1.5, 1.0, 0.16  # of the launch; of rows that are waited for; of one
_FINISHED_US = {"bn_train": 0.15, "bn_bwd": 0.05, "bn_infer_bwd": 0.15}  # of a channel, for its roots
_SHARE_OF_COPY, _SHARE_OF_TWO = 0.8, 0.55  # of the copy rate; of that, where a thread's vectors are of 2 bytes
_IN_FLIGHT_BYTES = 24 << 10  # of a multiprocessor, for the memory to be busy


class FewRows(NamedTuple):
    """Channels of a thread."""

    lanes: int

    def __str__(self) -> str:
        return f"{self.lanes}"


class _Fields(NamedTuple):
    """columns: vectors of a row, which has so many channels."""

    rows: int
    columns: int
    channels: int


def _kernel(at_once: int, *specialised_on):
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx, ptx_local

    v = Variant(*specialised_on)
    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    lanes, threads, op, running, forward = v.lanes, v.threads, v.op, v.running, v.is_forward
    # Results are kept as they were computed, and rounded when they are stored.
    finish = bn_channel.finish(v._replace(param_dtype=v.compute))
    add, as_pairs, _ = bn_sums.steps(v)
    part, parts, load_one, widen_one = bn_block.on_their_way(v)
    scale_one, four_arrays = bn_block.scale_one(v), bn_block.four_arrays(lanes, v.compute)
    load, store = ptx_local.load(v.param_dtype, lanes), ptx_local.store(v.param_dtype, lanes)
    size, results = at_once * parts, len([name for name in plan.RESULTS[op] if running or "running" not in name])

    @ptx.inline
    def load_rows(loaded, x, dy, at, row, f):
        for i in range(at_once):
            if row + i < f.rows:
                load_one(loaded, i, x, dy, integer(at + i * f.channels))

    @ptx.inline
    def first_mean(pivot, values, gradients, loaded, f):
        """Of the rows that were asked for first: about what the others differ from."""
        widen_one(pivot, gradients, loaded, 0)
        total, _, _, _ = four_arrays()
        for i in range(lanes):
            total[i] = real(0.0)
        for row in range(1, at_once):
            if row < f.rows:
                widen_one(values, gradients, loaded, row)
                for i in range(lanes):
                    total[i] = total[i] + (values[i] - pivot[i])
        of_one = real(1.0) / real(min(f.rows, integer(at_once)))
        for i in range(lanes):
            pivot[i] = ptx.fma(total[i], of_one, pivot[i])

    @ptx.inline
    def add_rows(a, b, origin, values, gradients, loaded, row, f):
        for i in range(at_once):
            if row + i < f.rows:
                widen_one(values, gradients, loaded, i)
                add(a, b, origin, values, gradients, 0)

    @ptx.inline
    def scale_rows(coefficients, values, gradients, loaded, out, at, row, f):
        for i in range(at_once):
            if row + i < f.rows:
                widen_one(values, gradients, loaded, i)
                scale_one(coefficients, values, gradients, 0, out, integer(at + i * f.channels))

    @ptx.inline
    def asked(gamma, beta, mean, spread, old_mean, old_var, at):
        """What is known of the channels: gamma, beta, and two averages."""
        of_gamma, of_beta, of_mean, of_spread = four_arrays()
        load(of_gamma, 0, gamma, at)
        if forward:
            load(of_beta, 0, beta, at)
        else:
            for i in range(lanes):
                of_beta[i] = real(0.0)
        if op != "bn_train":
            load(of_mean, 0, mean, at)
            load(of_spread, 0, spread, at)
        elif running:
            load(of_mean, 0, old_mean, at)
            load(of_spread, 0, old_var, at)
        else:
            for i in range(lanes):
                of_mean[i], of_spread[i] = real(0.0), real(0.0)
        return of_gamma, of_beta, of_mean, of_spread

    @ptx.inline
    def finished(known, written, pivot, a, b, m, epsilon, factor):
        """The coefficients, of sums that become them."""
        of_gamma, of_beta, of_mean, of_spread = known
        of_first, of_second, of_third, of_fourth = written
        none = of_first  # which `finish` writes alone: of PARAMS it reads nothing
        params = (none, none, none, none, none, none, of_first, of_second, of_third, of_fourth)
        center, second, scale, offset = four_arrays()
        for i in range(lanes):
            of_channel = (of_gamma[i], of_beta[i], of_mean[i], of_spread[i])
            center[i], second[i], scale[i], offset[i] = finish(
                of_channel, params, i, pivot[i], m, a[i], b[i], epsilon, factor, True
            )
        return center, second, scale, offset

    def few_rows(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, epsilon, factor, f
    ):  # fmt: skip
        column = integer(integer(ptx.block_x()) * threads + small(ptx.thread_x()))
        if column >= f.columns:
            return
        begin = integer(column * lanes)
        at, row, step = begin, integer(0), integer(at_once * f.channels)
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        load_rows(loaded, x, dy, at, row, f)
        known = asked(gamma, beta, mean, spread, old_mean, old_var, begin)
        a, b, origin, pivot = four_arrays()
        written = four_arrays()
        for i in range(lanes):
            a[i], b[i], origin[i], pivot[i] = real(0.0), real(0.0), real(0.0), real(0.0)
        if op == "bn_train":
            first_mean(pivot, values, gradients, loaded, f)
            for i in range(lanes):
                origin[i] = pivot[i]
        else:
            for i in range(lanes):
                origin[i] = known[2][i]
        add_rows(a, b, origin, values, gradients, loaded, row, f)
        while row + at_once < f.rows:
            row, at = integer(row + at_once), integer(at + step)
            load_rows(loaded, x, dy, at, row, f)
            add_rows(a, b, origin, values, gradients, loaded, row, f)
        m = real(f.rows)
        as_pairs(m, a, b, origin, pivot)
        coefficients = finished(known, written, pivot, a, b, m, epsilon, factor)
        store(first, begin, written[0], 0)
        store(second, begin, written[1], 0)
        if results > 2:
            store(third, begin, written[2], 0)
            store(fourth, begin, written[3], 0)
        scale_rows(coefficients, values, gradients, loaded, out, at, row, f)
        while row > 0:
            row, at = integer(row - at_once), integer(at - step)
            load_rows(loaded, x, dy, at, row, f)
            scale_rows(coefficients, values, gradients, loaded, out, at, row, f)

    data, param = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype)
    return few_rows, (data, data, data, *[param] * 10, real, real, ptx.record(_Fields, v.bits))


class RowsOfThreads(LaunchedCandidate[FewRows]):
    """Training of few rows of neighbouring channels, and the gradients."""

    algorithm = "few_rows"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        rows, _, inner = problem.planes
        if inner > 1:
            return Support(False, f"{inner} neighbours belong to one channel, here each is of another")
        return YES if rows <= _MOST_ROWS else Support(False, f"{rows} rows, this kernel takes {_MOST_ROWS}")

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[FewRows, ...]:
        most = min(_MOST_LANES, problem.vector_bytes // ITEMSIZE[problem.dtype])
        most = min(most, min(problem.align, _WHOLE_BYTES) // ITEMSIZE[problem.param_dtype])
        every = [FewRows(max(1, most >> shift)) for shift in range(3)]
        return tuple(sorted(dict.fromkeys(every), key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: BnProblem, config: FewRows, device: Gpu) -> float:
        rows, channels, _ = problem.planes
        at_once = _at_once(problem, config)
        threads, arrays = channels / config.lanes, 1 if problem.op == "bn_train" else 2
        row_bytes = arrays * config.lanes * ITEMSIZE[problem.dtype]
        known_bytes = (problem.min_bytes - (arrays + 1) * rows * channels * ITEMSIZE[problem.dtype]) / threads
        in_flight = min(threads, 1024 * device.sms) * (min(rows, at_once) * row_bytes + known_bytes / 2)
        rate = copy_bytes_per_s(device) * min(_SHARE_OF_COPY, in_flight / (device.sms * _IN_FLIGHT_BYTES))
        if config.lanes * ITEMSIZE[problem.dtype] == 2:
            rate *= _SHARE_OF_TWO
        turns = ceil(rows / at_once) - 1
        waited_us = turns * _TURN_US + config.lanes * _FINISHED_US[self.op]
        moved_us = problem.min_bytes / rate * 1e6
        if threads <= 1024 * device.sms:  # all are there at once, and wait for no more than their rows
            moved_us = min(moved_us, problem.min_bytes / copy_bytes_per_s(device) * 1e6 + rows * _ROW_US)
        return _LAUNCH_US + waited_us + moved_us

    def launches(self, problem: BnProblem, config: FewRows, device: Gpu) -> list[Launch]:
        rows, channels, _ = problem.planes
        v = plan.variant(problem, 1, _THREADS)._replace(lanes=config.lanes)
        fields = _Fields(rows, channels // config.lanes, channels)
        return [
            Launch(
                source=Source(_kernel, (_at_once(problem, config), *v), _THREADS),
                grid=(ceil(fields.columns / _THREADS), 1, 1),
                pointers=plan.pointers(problem),
                scalars=v.compute,
                integers=fields,
                integer_bits=v.bits,
            )
        ]


def _at_once(problem: BnProblem, config: FewRows) -> int:
    """Rows that a thread has on their way: a power of 2."""
    rows, fit = problem.planes[0], _KEPT_BYTES // (config.lanes * ITEMSIZE[problem.dtype])
    return min(_MOST_AT_ONCE, fit, 1 << max(0, rows - 1).bit_length())


TRAIN, BWD, INFER_BWD = RowsOfThreads("bn_train"), RowsOfThreads("bn_bwd"), RowsOfThreads("bn_infer_bwd")
