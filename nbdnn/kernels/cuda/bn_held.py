"""Batch normalisation of channels that shared memory holds: training and its gradient in one kernel, one read.

    cluster   1 to 8 blocks, one slab (a channel of NCHW, up to 128 bytes of NHWC) after the other; a block some rows
    thread    1. copies its vectors of x (and dy) to shared memory, all of them at once     2. sums what it copied
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
from nbdnn.kernels.cuda.bn_plan import Variant, Walk
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_CLUSTERS, _THREADS, _STAGES = (1, 2, 4, 8), 256, (1, 2)
_MIN_BLOCKS = 4  # of a multiprocessor's 65536 registers, 64 a thread
_SYSTEM_BYTES = 1 << 10  # of the shared memory of every block
_LAUNCH_US = 4.0
# Seen on an H200: what a cluster costs to start, by the square of its blocks, and a round of sums that nothing hides.
_CLUSTER_US, _ROUND_US = 0.75e-3, 2.0
# Bytes of a multiprocessor that must be on their way, for the memory to be busy.
_IN_FLIGHT_BYTES = 48 << 10
# Of the copy rate, by the bytes of a row that lie side by side.
_SHARE_OF_WIDTH = {64: 0.9, 32: 0.7, 16: 0.5, 8: 0.3, 4: 0.2, 2: 0.1}
_MOST_CONFIGS = 5


class Held(NamedTuple):
    """Columns of a block, blocks of a cluster, slabs that a cluster has on their way or in use."""

    columns: int
    cluster: int
    stages: int

    def __str__(self) -> str:
        return f"{self.columns}x{self.cluster}x{self.stages}"


class _Rounds(NamedTuple):
    """How many blocks a multiprocessor has at once, how many clusters there are, and slabs of each."""

    blocks_of_sm: int
    clusters: int
    rounds: int


def _held_kernel(*specialised_on):
    from nbdnn.kernels.cuda import bn_channel, bn_sums, ptx, ptx_lanes, ptx_tile

    *of_variant, stages = specialised_on
    v = Variant(*of_variant)
    integer, small, u32, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.types.uint32, ptx.REAL[v.compute]
    lanes, sums, columns, blocks, threads = v.lanes, v.sums, v.columns, v.cluster, v.threads
    channels, rows_at_once, forward = columns * sums, threads // columns, v.is_forward
    add, as_pairs, joined = bn_sums.steps(v)
    of_block, of_cluster = bn_sums.of_block(v), bn_sums.of_cluster(v)
    finish, scale = bn_channel.finish(v), bn_channel.scale(v)
    copy, load_shared = ptx_lanes.copy_to_shared(v.dtype, lanes), ptx_lanes.load_shared(v.dtype, lanes)
    load, store, widen = ptx_lanes.load(v.dtype, lanes), ptx_lanes.store(v.dtype, lanes), ptx.WIDEN[v.param_dtype]
    wait, widen_data = ptx_tile.copy_async_wait(stages - 1), ptx.WIDEN[v.dtype]
    vector_bytes = lanes * ITEMSIZE[v.dtype]
    slot_bytes, tensors = threads * vector_bytes, 1 if forward else 2
    coefficients_size = 4 * channels

    @ptx.inline
    def moved(at, place, f):
        """The next row of a thread: its index and its place in its image."""
        place = integer(place + f.step_rows)
        at = integer(at + f.step_elems)
        if place >= f.of_image:
            place, at = integer(place - f.of_image), integer(at + f.wrap_elems)
        return at, place

    @ptx.inline
    def start_gradient(origin, mean, column):
        for i in range(sums):
            origin[i] = widen(mean[integer(column * sums + i)])
        for i in range(sums, lanes):
            origin[i] = origin[0]

    @ptx.inline
    def place_of(slab, thread, row, last, f):
        """(column, end of a thread's rows) in a slab: no rows beyond the last column."""
        column = integer(slab * columns + (thread & (columns - 1)))
        if column >= f.columns:
            column, last = integer(0), integer(0)
        return column, last

    @ptx.inline
    def copy_slab(slot, x, dy, at, place, row, last, of_dy, f):
        while row < last:
            copy(slot, x, at)
            if not forward:
                copy(u32(slot + of_dy), dy, at)
            at, place = moved(at, place, f)
            slot, row = u32(slot + u32(slot_bytes)), integer(row + rows_at_once)

    def held(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, epsilon, factor, f
    ):  # fmt: skip
        # 1. Where a thread is, and its copies of the first slab: vector k in slot k, those of dy behind those of x.
        thread = small(ptx.thread_x())
        begin_slab, rank = ptx.divided(small(ptx.block_x()), small(blocks))
        slab, in_slab = integer(begin_slab), small(thread & (columns - 1))
        row, end = integer(rank * f.chunk + thread // columns), integer(min(f.rows, integer((rank + 1) * f.chunk)))
        image, first_place = ptx.divided(row, f.of_image)
        from_column = integer(image * f.image_elems + first_place * f.row_elems)
        mine = u32(ptx_tile.dynamic_shared() + u32(thread * vector_bytes))
        of_dy = u32(f.slots * slot_bytes)
        stage_bytes, stage = u32(f.slots * slot_bytes * tensors), u32(0)
        column, last = place_of(slab, thread, row, end, f)
        copy_slab(mine, x, dy, integer(column * f.column_elems + from_column), first_place, row, last, of_dy, f)
        ptx_tile.copy_async_commit()
        a, b = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        origin, pivot = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        values, gradients = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        coefficients = ptx.cuda.shared.array(coefficients_size, real)
        while slab < f.slabs:
            # With two stages the next slab is on its way while this one is summed and scaled.
            next_slab, held_at = integer(slab + f.clusters), u32(mine + stage)
            next_column, next_last = place_of(next_slab, thread, row, end, f)
            next_at = integer(next_column * f.column_elems + from_column)
            if stages > 1:
                stage = u32(stage_bytes - stage)
                copy_slab(u32(mine + stage), x, dy, next_at, first_place, row, next_last, of_dy, f)
                ptx_tile.copy_async_commit()

            # 2. A thread's sums.
            for i in range(lanes):
                a[i], b[i], origin[i] = real(0.0), real(0.0), real(0.0)
            load(pivot, 0, x, integer(column * f.column_elems))
            wait()
            slot, r, count = held_at, row, real(0.0)
            if forward:
                if r < last:
                    load_shared(origin, 0, slot)
            else:
                start_gradient(origin, mean, column)
            while r < last:
                load_shared(values, 0, slot)
                if not forward:
                    load_shared(gradients, 0, u32(slot + of_dy))
                add(a, b, origin, values, gradients, 0)
                slot, r, count = u32(slot + u32(slot_bytes)), integer(r + rows_at_once), count + real(1.0)
            if lanes > sums:
                for i in range(lanes):
                    pivot[i] = pivot[0]
            as_pairs(count, a, b, origin, pivot)
            count = joined(count, a, b)

            # 3., 4. The channels' sums, and what becomes of them.
            total, of_first, of_second = of_block(thread, count, a, b)
            of_first, of_second = of_cluster(thread, total, of_first, of_second)
            channel = integer(slab * channels + thread)
            if thread < channels and channel < f.channels:
                params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
                start = real(0.0)
                if forward:
                    start = widen_data(x[integer(channel * f.channel_elems)])
                found = finish(params, channel, start, real(f.m), of_first, of_second, epsilon, factor, rank == 0)
                for i in range(4):
                    coefficients[integer(i * channels + thread)] = found[i]
            ptx.cuda.syncthreads()

            # 5. Scaled and stored.
            for i in range(sums):
                of_lane = integer(in_slab * sums + i)
                origin[i], pivot[i] = coefficients[of_lane], coefficients[integer(of_lane + channels)]
                a[i], b[i] = (
                    coefficients[integer(of_lane + 2 * channels)],
                    coefficients[integer(of_lane + 3 * channels)],
                )
            at, place, slot, r = integer(column * f.column_elems + from_column), first_place, held_at, row
            while r < last:
                load_shared(values, 0, slot)
                if not forward:
                    load_shared(gradients, 0, u32(slot + of_dy))
                scale(origin, pivot, a, b, values, gradients, 0)
                store(out, at, values, 0)
                at, place = moved(at, place, f)
                slot, r = u32(slot + u32(slot_bytes)), integer(r + rows_at_once)
            if stages == 1:
                copy_slab(mine, x, dy, next_at, first_place, row, next_last, of_dy, f)
                ptx_tile.copy_async_commit()
            slab, column, last = next_slab, next_column, next_last
            if blocks > 1:
                ptx_lanes.cluster_wait()  # what others read is neither overwritten nor gone before they have read it

    data, param = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype)
    fields = ptx.record(Walk, v.bits)
    return held, (data, data, data, *[param] * 10, real, real, fields)


class HeldInShared(LaunchedCandidate[Held]):
    """Training and its gradient, where a cluster's shared memory holds a column."""

    algorithm = "held"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        if any(self._fits(problem, config, device) for config in _every(problem, device)):
            return YES
        needed = min(_block_bytes(problem, config) for config in _every(problem, device))
        return Support(False, f"{needed} bytes of shared memory a block, {shared_bytes(device)} are there")

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Held, ...]:
        fitting = [config for config in _every(problem, device) if self._fits(problem, config, device)]
        return tuple(sorted(fitting, key=lambda config: self.estimate(problem, config, device))[:_MOST_CONFIGS])

    def estimate(self, problem: BnProblem, config: Held, device: Gpu) -> float:
        there, slabs = _rounds(problem, config, device), _walk(problem, _variant(problem, config)).slabs
        blocks = there.clusters * config.cluster
        held = min(blocks, device.sms * there.blocks_of_sm) * _block_bytes(problem, config)
        rate = copy_bytes_per_s(device) * min(1.0, held / (device.sms * _IN_FLIGHT_BYTES))
        rate *= _SHARE_OF_WIDTH.get(config.columns * problem.vector_bytes, 1.0) if problem.planes[2] == 1 else 1.0
        uneven = there.rounds * there.clusters / slabs
        start_us = _CLUSTER_US * blocks * config.cluster if config.cluster > 1 else 0.0
        round_us = _ROUND_US * there.rounds / (there.blocks_of_sm * config.stages)
        return _LAUNCH_US + start_us + round_us + problem.min_bytes / rate * uneven * 1e6

    def launches(self, problem: BnProblem, config: Held, device: Gpu) -> list[Launch]:
        v, clusters = _variant(problem, config), _rounds(problem, config, device).clusters
        return [
            Launch(
                source=Source(_held_kernel, (*v, config.stages), _THREADS, _MIN_BLOCKS),
                grid=(clusters * config.cluster, 1, 1),
                pointers=plan.pointers(problem),
                scalars=v.compute,
                integers=_walk(problem, v)._replace(clusters=clusters),
                integer_bits=v.bits,
                dynamic_shared_bytes=_held_bytes(problem, config),
                cluster=config.cluster,
            )
        ]

    def _fits(self, problem: BnProblem, config: Held, device: Gpu) -> bool:
        return _block_bytes(problem, config) - _SYSTEM_BYTES <= shared_bytes(device)


def _every(problem: BnProblem, device: Gpu) -> list[Held]:
    """Without those that have two stages and nothing for the second."""
    clusters = _CLUSTERS if device.capability >= (9, 0) else (1,)
    every = [Held(*each) for each in product(plan.widths(problem), clusters, _STAGES)]
    return [config for config in every if config.stages == 1 or _rounds(problem, config, device).rounds > 1]


def _rounds(problem: BnProblem, config: Held, device: Gpu) -> _Rounds:
    """As few clusters as have the same number of slabs each, of those that run at once."""
    slabs = _walk(problem, _variant(problem, config)).slabs
    blocks = max(1, min((shared_bytes(device) + _SYSTEM_BYTES) // _block_bytes(problem, config), _MIN_BLOCKS))
    rounds = ceil(slabs / max(1, device.sms * blocks // config.cluster))
    return _Rounds(blocks, ceil(slabs / rounds), rounds)


def _variant(problem: BnProblem, config: Held) -> Variant:
    return plan.variant(problem, config.columns, _THREADS, config.cluster)


def _walk(problem: BnProblem, v: Variant) -> Walk:
    return plan.walk(problem, v, ceil(plan.rows_of(problem, v) / v.cluster))


def _held_bytes(problem: BnProblem, config: Held) -> int:
    """Of a block: what its threads copy."""
    v = _variant(problem, config)
    tensors = 1 if v.is_forward else 2
    return config.stages * tensors * _walk(problem, v).slots * _THREADS * v.lanes * ITEMSIZE[v.dtype]


def _block_bytes(problem: BnProblem, config: Held) -> int:
    """Of a block: what is held, sums of its warps, of the block and coefficients, and what the system takes."""
    v = _variant(problem, config)
    sums = (3 * (_THREADS // 32) + 7) * v.columns * v.sums * ITEMSIZE[v.compute]
    return _held_bytes(problem, config) + sums + _SYSTEM_BYTES


TRAIN, BWD = HeldInShared("bn_train"), HeldInShared("bn_bwd")
