"""Batch normalisation of channels that shared memory holds: training and its gradient in one kernel, one read.

    cluster   1 to 8 blocks, one column (a channel of NCHW, up to 128 bytes of NHWC); a block some of its rows
    thread    1. copies its vectors of x (and dy) to shared memory, all of them at once     2. sums what has come
    block     3. sums of its warps        cluster  4. sums of its blocks, read from each other's shared memory
    thread    5. scales what it copied and stores it

Nobody reads what another thread copied, so nothing waits but for the sums. A channel of 32 images of 56x56 in float32
is 401 KB: more than a block's 227 KB, and less than a cluster's. Traffic: x (and dy) once, y once. Sums in float32
(float64), as `bn_sums` says. Source: own.
"""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda import bn_slots
from nbdnn.kernels.cuda.bn_plan import Variant, Walk
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_CLUSTERS, _THREADS = (1, 2, 4, 8), 256
_MIN_BLOCKS = 4  # of a multiprocessor's 65536 registers, 64 a thread
_SYSTEM_BYTES = 1 << 10  # of the shared memory of every block
# Fitted to 276 problems on an H200: a launch with its sums, more of them in clusters; what starts one of k blocks, k
# squared times, of which others that copy meanwhile leave a share; how much longer copies take where a multiprocessor
# has one block, or two: while one sums, nothing is read.
_LAUNCH_US, _TOGETHER_US, _CLUSTER_US, _SHARE_OF_START = 4.0, 0.35, 0.33e-3, 0.25
_ALONE = {1: 1.4, 2: 1.05}
_BLOCK_LANE_US = 0.33e-3  # of a lane of channels of a block, however few its rows are
# What a thread does with each of its vectors, however few others have as many: of a channel, by the bytes of a vector;
# of several channels.
_SLOT_US = {2: 0.145, 4: 0.05, 8: 0.05, 16: 0.085}
_SLOT_OF_CHANNELS_US, _NARROW_SLOT_US = {"bn_train": 0.15, "bn_bwd": 0.22}, 0.28
_NARROW_BYTES = 4
_SHARE_OF_COPY = 0.85
# Of the copy rate, by the bytes of a row that lie side by side.
_SHARE_OF_WIDTH = {64: 0.9, 32: 0.7, 16: 0.5, 8: 0.3, 4: 0.2, 2: 0.1}
_SHARE_OF_EIGHT = 0.88  # of vectors of eight channels, each of which has its own sums
_SLOTS_IN_PARTS = 12  # of a thread: from so many on it adds up a third of them while the others come
_MOST_CONFIGS = 5


class Held(NamedTuple):
    """Columns of a block, blocks of a cluster."""

    columns: int
    cluster: int

    def __str__(self) -> str:
        return f"{self.columns}x{self.cluster}"


def _held_kernel(in_parts: bool, *specialised_on):
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx, ptx_cluster, ptx_local, ptx_tile

    v = Variant(*specialised_on)
    integer, small, u32, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, ptx.REAL[v.compute]
    lanes, columns, blocks, threads = v.lanes, v.columns, v.cluster, v.threads
    channels, rows_at_once, moved = columns * v.sums, threads // columns, plan.next_row(v.bits)
    copy_all, load_slot, (begin_sums, add, end_sums) = bn_slots.copied_all(v), bn_slots.loaded(v), bn_slots.summed(v)
    of_block, of_cluster = bn_sums.of_block(v), bn_sums.of_cluster(v)
    scale, (asked, found, taken) = bn_channel.scale(v), bn_channel.coefficients(v)
    load, store, commit = ptx_local.load(v.dtype, lanes), ptx_local.store(v.dtype, lanes), ptx_tile.copy_async_commit
    wait_for_first, wait_for_second, wait = (ptx_tile.copy_async_wait(left) for left in (2, 1, 0))
    slot_bytes, vector_bytes = bn_slots.slot_bytes(v), lanes * ITEMSIZE[v.dtype]
    coefficients_size, four_arrays = 4 * channels, bn_block.four_arrays(lanes, v.compute)

    @ptx.inline
    def add_rows(a, b, origin, values, gradients, slot, of_dy, r, end, count):
        while r < end:
            add(a, b, origin, values, gradients, slot, of_dy)
            slot, r, count = u32(slot + u32(slot_bytes)), integer(r + rows_at_once), count + real(1.0)
        return slot, r, count

    def held(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, epsilon, factor, f
    ):  # fmt: skip
        # 1. Where a thread is, and its copies: vector k of a thread in slot k, those of dy behind those of x.
        thread = small(ptx.thread_x())
        slab, rank = ptx.divided(small(ptx.block_x()), small(blocks))
        in_slab = small(thread & (columns - 1))
        column = integer(slab * columns + in_slab)
        row, last = integer(rank * f.chunk + thread // columns), integer(min(f.rows, integer((rank + 1) * f.chunk)))
        if column >= f.columns:
            column, last = integer(0), integer(0)
        base = integer(column * f.column_elems)
        image, place = ptx.divided(row, f.of_image)
        begin, begin_place = integer(base + image * f.image_elems + place * f.row_elems), place
        mine = u32(ptx_tile.dynamic_shared() + u32(thread * vector_bytes))
        of_dy = u32(f.slots * slot_bytes)
        a_third = integer((f.slots + 11) // 12 * 4 * rows_at_once)
        one, two = integer(min(last, row + a_third)), integer(min(last, row + 2 * a_third))
        if in_parts:
            slot, at, place, r = copy_all(mine, of_dy, x, dy, begin, place, row, one, f)
            commit()
            slot, at, place, r = copy_all(slot, of_dy, x, dy, at, place, r, two, f)
            commit()
            copy_all(slot, of_dy, x, dy, at, place, r, last, f)
        else:
            copy_all(mine, of_dy, x, dy, begin, place, row, last, f)
        commit()
        channel = integer(slab * channels + thread)
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
        of_channel = asked(thread, params, channel, x, f)

        # 2. Its sums.
        a, b, origin, pivot = four_arrays()
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        for i in range(lanes):
            a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
        load(pivot, 0, x, base)
        if in_parts:
            wait_for_first()
        else:
            wait()
        slot, r, count = mine, row, real(0.0)
        begin_sums(origin, mean, column, slot, r, last)
        if in_parts:
            slot, r, count = add_rows(a, b, origin, values, gradients, slot, of_dy, r, one, count)
            wait_for_second()
            slot, r, count = add_rows(a, b, origin, values, gradients, slot, of_dy, r, two, count)
            wait()
        slot, r, count = add_rows(a, b, origin, values, gradients, slot, of_dy, r, last, count)
        count = end_sums(count, a, b, origin, pivot)

        # 3., 4. The channels' sums, and what becomes of them.
        total, of_first, of_second = of_block(thread, count, a, b)
        of_first, of_second = of_cluster(thread, total, of_first, of_second)
        coefficients = ptx.cuda.shared.array(coefficients_size, real)
        found(coefficients, thread, params, of_channel, channel, of_first, of_second, epsilon, factor, rank, f)

        # 5. Scaled and stored.
        taken(coefficients, in_slab, origin, pivot, a, b)
        at, place, slot, r = begin, begin_place, mine, row
        while r < last:
            load_slot(values, gradients, slot, of_dy)
            scale(origin, pivot, a, b, values, gradients, 0)
            store(out, at, values, 0)
            at, place = moved(at, place, f)
            slot, r = u32(slot + u32(slot_bytes)), integer(r + rows_at_once)
        if blocks > 1:
            ptx_cluster.wait()  # nobody's shared memory goes before all have read it

    data, param = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype)
    fields = ptx.record(Walk, v.bits)
    return held, (data, data, data, *[param] * 10, real, real, fields)


class HeldInShared(LaunchedCandidate[Held]):
    """Training and its gradient, where a cluster's shared memory holds a column."""

    algorithm = "held"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        needed = min(_block_bytes(problem, config) for config in _every(problem, device))
        there = shared_bytes(device) + _SYSTEM_BYTES
        return YES if needed <= there else Support(False, f"{needed} bytes of shared memory a block, {there} are there")

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Held, ...]:
        there = shared_bytes(device) + _SYSTEM_BYTES
        fitting = [config for config in _every(problem, device) if _block_bytes(problem, config) <= there]
        return tuple(sorted(fitting, key=lambda config: self.estimate(problem, config, device))[:_MOST_CONFIGS])

    def estimate(self, problem: BnProblem, config: Held, device: Gpu) -> float:
        v, block_bytes = _variant(problem, config), _block_bytes(problem, config)
        walk = _walk(problem, v)
        blocks = walk.slabs * config.cluster
        of_sm = max(1, min((shared_bytes(device) + _SYSTEM_BYTES) // block_bytes, _MIN_BLOCKS))
        rate = copy_bytes_per_s(device) * _SHARE_OF_COPY
        if v.planar:
            begun_us, slot_us = 0.0, _SLOT_US[problem.vector_bytes]
        else:
            rate *= _SHARE_OF_WIDTH.get(config.columns * problem.vector_bytes, 1.0)
            rate *= _SHARE_OF_EIGHT if v.lanes == 8 else 1.0
            begun_us, slot_us = blocks * v.lanes * _BLOCK_LANE_US, _SLOT_OF_CHANNELS_US[self.op]
            slot_us = max(slot_us, _NARROW_SLOT_US if problem.vector_bytes <= _NARROW_BYTES else 0.0)
        is_cluster = config.cluster > 1
        start_us = _CLUSTER_US * blocks * config.cluster if is_cluster else 0.0
        copied_us = _ALONE.get(of_sm, 1.0) * problem.min_bytes / rate * 1e6
        moved_us = max(copied_us, begun_us, walk.slots * slot_us)
        busy_us = max(moved_us, start_us) + _SHARE_OF_START * min(moved_us, start_us)
        return _LAUNCH_US + (_TOGETHER_US if is_cluster else 0.0) + busy_us

    def launches(self, problem: BnProblem, config: Held, device: Gpu) -> list[Launch]:
        v = _variant(problem, config)
        integers = _walk(problem, v)
        return [
            Launch(
                source=Source(_held_kernel, (integers.slots >= _SLOTS_IN_PARTS, *v), _THREADS, _MIN_BLOCKS),
                grid=(integers.slabs * config.cluster, 1, 1),
                pointers=plan.pointers(problem),
                scalars=v.compute,
                integers=integers,
                integer_bits=v.bits,
                dynamic_shared_bytes=bn_slots.held_bytes(v, integers.slots),
                cluster=config.cluster,
            )
        ]


def _every(problem: BnProblem, device: Gpu) -> list[Held]:
    clusters = _CLUSTERS if device.capability >= (9, 0) else (1,)
    return [Held(*each) for each in product(plan.widths(problem), clusters)]


def _variant(problem: BnProblem, config: Held) -> Variant:
    return plan.variant(problem, config.columns, _THREADS, config.cluster)


def _walk(problem: BnProblem, v: Variant) -> Walk:
    return plan.walk(problem, v, ceil(plan.rows_of(problem, v) / v.cluster))


def _block_bytes(problem: BnProblem, config: Held) -> int:
    """Of a block: what is held, sums of its warps, of the block and coefficients, and what the system takes."""
    v = _variant(problem, config)
    sums = (3 * (_THREADS // 32) + 7) * v.columns * v.sums * ITEMSIZE[v.compute]
    return bn_slots.held_bytes(v, _walk(problem, v).slots) + bn_slots.padded(sums) + _SYSTEM_BYTES


TRAIN, BWD = HeldInShared("bn_train"), HeldInShared("bn_bwd")
