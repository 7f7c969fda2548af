"""Sums that make dtheta on a GPU: each block's, and those of an image's blocks, both in a fixed order.

    dtheta[n] = sum over outputs of (ds, dt)^T (u, v, 1)

A block adds up its threads' six sums, warp by warp, and stores them; a second kernel adds up what the blocks of an
image have found. The gradient of a grid alone is these two; or, of images of some ten thousand outputs, one launch of a
cluster for each (64 of 56x56 on an H200 3.2 us, not 7.6; of 224x224 8.9, not 15.6). Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_position import index_bits
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

SUMS = 6
_THREADS, _RUN = 256, 8  # positions of a thread
_WARP = 32
# Blocks of a cluster that has an image, from which capability on; the part of the multiprocessors that shall have one;
# threads of a block, and vectors of a thread, at most and on their way at once.
_CLUSTERS, _CAPABILITY, _FULL = (1, 2, 4, 8), (9, 0), 0.9
_BLOCKS, _MOST_OF_THREAD, _AHEAD, _VECTOR_BYTES = (256, 512, 1024), 16, 4, 16
_LAUNCH_US, _OVER_COPY = 3.5, 1.5


@cache
def along_axis(compute: str, bits: int):
    """Device function (place, extent) -> -1 to 1 from the first to the last place; 0 where there is one."""
    from nbdnn.kernels.cuda import ptx

    real, integer = ptx.REAL[compute], ptx.INTEGER[bits]

    @ptx.inline
    def along(place, extent):
        return real(2.0) * real(place) / real(integer(extent - 1)) - real(1.0) if extent > 1 else real(0.0)

    return along


@cache
def axis_line(compute: str, bits: int):
    """Device function (extent) -> (first, step): what `along_axis` is at a place is first + place * step."""
    from nbdnn.kernels.cuda import ptx

    real, integer = ptx.REAL[compute], ptx.INTEGER[bits]

    @ptx.inline
    def line(extent):
        step = real(2.0) / real(integer(extent - 1)) if extent > 1 else real(0.0)
        return -real(1.0) if extent > 1 else real(0.0), step

    return line


@cache
def store_sums(compute: str, bits: int, threads: int):
    """Device function (parts, at, sums): parts[at ...] = each of the six sums over all threads of the block."""
    from nbdnn.kernels.cuda import ptx

    real, integer, warps = ptx.REAL[compute], ptx.INTEGER[bits], threads // _WARP
    size, steps = SUMS * warps, _WARP.bit_length() - 1

    @ptx.inline
    def store(parts, at, sums):
        shared = ptx.cuda.shared.array(size, real)
        thread = integer(ptx.thread_x())
        warp, lane = ptx.divided(thread, integer(_WARP))
        for k in range(SUMS):
            total = sums[k]
            for step in range(steps):
                total = total + ptx.shuffle_xor(total, 1 << step)
            if lane == 0:
                shared[integer(warp * SUMS + k)] = total
        ptx.cuda.syncthreads()
        if thread < SUMS:
            total = shared[thread]
            for other in range(1, warps):
                total = total + shared[integer(thread + other * SUMS)]
            parts[integer(at + thread)] = total

    return store


class _ThetaFields(NamedTuple):
    """parts: of each image."""

    parts: int


def _theta_kernel(compute: str, param_dtype: str, bits: int):
    """A block an image, a warp a sum."""
    from nbdnn.kernels.cuda import ptx

    real, integer, narrow, size = ptx.REAL[compute], ptx.INTEGER[bits], ptx.NARROW[param_dtype], SUMS * _WARP

    def add_parts(parts, dtheta, f):
        shared = ptx.cuda.shared.array(size, real)
        thread = integer(ptx.thread_x())
        number, lane = ptx.divided(thread, integer(_WARP))
        first, total = integer(ptx.block_x() * f.parts), real(0.0)
        part = lane
        while part < f.parts:
            total = total + parts[integer((first + part) * SUMS + number)]
            part = integer(part + _WARP)
        shared[thread] = total
        ptx.cuda.syncthreads()
        if lane == 0:
            for other in range(1, _WARP):
                total = total + shared[integer(thread + other)]
            dtheta[integer(ptx.block_x() * SUMS + number)] = narrow(total)

    return add_parts, (ptx.pointer(compute), ptx.pointer(param_dtype), ptx.record(_ThetaFields, bits))


def theta_launch(problem: SpatialtfProblem, parts: int, workspace: int, dtheta: int) -> Launch:
    """The sums of so many parts of each image. workspace, dtheta: places of the pointers."""
    bits = index_bits(problem)
    source = Source(_theta_kernel, (problem.compute, problem.param_dtype, bits), SUMS * _WARP)
    return Launch(source, (problem.n, 1, 1), (workspace, dtheta), "", _ThetaFields(parts), bits)


class _GridFields(NamedTuple):
    """blocks: of an image. outputs: of an image."""

    blocks: int
    outputs: int
    out_h: int
    out_w: int


def _grid_gradient_kernel(dtype: str, bits: int):
    from nbdnn.kernels.cuda import ptx

    compute = DEFAULT_COMPUTE[dtype]
    real, integer, widen = ptx.REAL[compute], ptx.INTEGER[bits], ptx.WIDEN[dtype]
    along, store = along_axis(compute, bits), store_sums(compute, bits, _THREADS)

    def add_grid(dgrid, parts, f):
        image, block = ptx.divided(integer(ptx.block_x()), f.blocks)
        output = integer(block * _THREADS * _RUN + ptx.thread_x())
        sums = ptx.cuda.local.array(SUMS, real)
        for k in range(SUMS):
            sums[k] = real(0.0)
        for _ in range(_RUN):
            if output < f.outputs:
                i, j = ptx.divided(output, f.out_w)
                u, v, at = along(j, f.out_w), along(i, f.out_h), integer((image * f.outputs + output) * 2)
                s, t = widen(ptx.load_constant(dgrid, at)), widen(ptx.load_constant(dgrid, integer(at + 1)))
                sums[0], sums[1], sums[2] = ptx.fma(s, u, sums[0]), ptx.fma(s, v, sums[1]), sums[2] + s
                sums[3], sums[4], sums[5] = ptx.fma(t, u, sums[3]), ptx.fma(t, v, sums[4]), sums[5] + t
            output = integer(output + _THREADS)
        store(parts, integer(ptx.block_x() * SUMS), sums)

    return add_grid, (ptx.pointer(dtype), ptx.pointer(compute), ptx.record(_GridFields, bits))


class _WholeFields(NamedTuple):
    """vectors: of an image. share: of a block. by_, shift_: the `reciprocal` of the columns."""

    vectors: int
    share: int
    out_h: int
    out_w: int
    by_out_w: int
    shift_out_w: int


def _whole_kernel(dtype: str, lanes: int, threads: int, cluster: int):
    """An image's gradient in one launch, a cluster an image."""
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_local, ptx_tile

    compute = DEFAULT_COMPUTE[dtype]
    real, integer, word, narrow = ptx.REAL[compute], ptx.INTEGER[32], ptx.WORD, ptx.NARROW[dtype]
    line, add_up, load = axis_line(compute, 32), store_sums(compute, 32, threads), ptx_local.load(dtype, lanes)
    of_other, held, outputs, size_bytes = (
        ptx_cluster.LOAD_OF_BLOCK[compute],
        _AHEAD * lanes,
        lanes // 2,
        ITEMSIZE[compute],
    )

    @ptx.inline
    def add(six, values, first, vector, lines, f):
        u_first, u_step, v_first, v_step = lines
        for k in range(outputs):
            i, j = ptx.split(integer(vector * outputs + k), f.out_w, f.by_out_w, f.shift_out_w)
            u, v = ptx.fma(real(j), u_step, u_first), ptx.fma(real(i), v_step, v_first)
            s, t = values[first + 2 * k], values[first + 2 * k + 1]
            six[0], six[1], six[2] = ptx.fma(s, u, six[0]), ptx.fma(s, v, six[1]), six[2] + s
            six[3], six[4], six[5] = ptx.fma(t, u, six[3]), ptx.fma(t, v, six[4]), six[5] + t

    def add_grid(dgrid, dtheta, f):
        image, rank = ptx.divided(integer(ptx.block_x()), integer(cluster))
        six, values = ptx.cuda.local.array(SUMS, real), ptx.cuda.local.array(held, real)
        for k in range(SUMS):
            six[k] = real(0.0)
        thread, start = integer(ptx.thread_x()), integer(image * f.vectors)
        vector, end = integer(rank * f.share + thread), min(integer(rank * f.share + f.share), f.vectors)
        (u_first, u_step), (v_first, v_step) = line(f.out_w), line(f.out_h)
        lines = u_first, u_step, v_first, v_step
        while vector + (_AHEAD - 1) * threads < end:
            for k in range(_AHEAD):
                load(values, integer(k * lanes), dgrid, integer((start + vector + k * threads) * lanes))
            for k in range(_AHEAD):
                add(six, values, k * lanes, integer(vector + k * threads), lines, f)
            vector = integer(vector + _AHEAD * threads)
        while vector < end:
            load(values, integer(0), dgrid, integer((start + vector) * lanes))
            add(six, values, 0, vector, lines, f)
            vector = integer(vector + threads)
        of_block = ptx.cuda.shared.array(SUMS, real)
        add_up(of_block, integer(0), six)
        at = integer(image * SUMS + thread)
        if cluster == 1:
            if thread < SUMS:
                dtheta[at] = narrow(of_block[thread])
        else:
            ptx_cluster.arrive()
            ptx_cluster.wait()
            if thread < SUMS and rank == 0:
                where, total = word(ptx_tile.shared_address(of_block) + word(integer(thread * size_bytes))), real(0.0)
                for other in range(cluster):
                    total = total + of_other(where, integer(other))
                dtheta[at] = narrow(total)
            ptx_cluster.arrive()
            ptx_cluster.wait()  # nobody's shared memory goes before it has been read

    data = ptx.pointer(dtype)
    return add_grid, (data, data, ptx.record(_WholeFields, 32))


class GridGradient(LaunchedCandidate[NoConfig]):
    """Supports every gradient of a grid."""

    op, algorithm = "spatialtf_grid_bwd", "sums"

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        return YES

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> float:
        return _LAUNCH_US + _OVER_COPY * problem.min_bytes / copy_bytes_per_s(device) * 1e6

    def workspace_bytes(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> int:
        parts = 0 if self._whole(problem, device) else problem.n * self._blocks(problem)
        return parts * SUMS * ITEMSIZE[problem.compute]

    def _blocks(self, problem: SpatialtfProblem) -> int:
        return ceil(problem.positions / (_THREADS * _RUN))

    def _whole(self, problem: SpatialtfProblem, device: Gpu) -> Launch | None:
        """The only launch, where an image is not too much for a cluster."""
        elements = 2 * problem.positions
        lanes = max(2, min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype])
        while elements % lanes:
            lanes //= 2
        clusters = _CLUSTERS if device.capability >= _CAPABILITY else _CLUSTERS[:1]
        cluster = next((each for each in clusters if problem.n * each >= _FULL * device.sms), clusters[-1])
        vectors = elements // lanes
        share = ceil(vectors / cluster)
        threads = next((each for each in _BLOCKS if each >= share), _BLOCKS[-1])
        if (
            lanes * ITEMSIZE[problem.dtype] > problem.align
            or index_bits(problem) > 32
            or share > _MOST_OF_THREAD * threads
        ):
            return None
        by, shift = reciprocal(problem.out_spatial[1])
        source = Source(_whole_kernel, (problem.dtype, lanes, threads, cluster), threads)
        integers = _WholeFields(vectors, share, *problem.out_spatial, by, shift)
        return Launch(source, (problem.n * cluster, 1, 1), (0, 1), "", integers, 32, cluster=cluster)

    def launches(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        if whole := self._whole(problem, device):
            return [whole]
        blocks, bits = self._blocks(problem), index_bits(problem)
        integers = _GridFields(blocks, problem.positions, *problem.out_spatial)
        source = Source(_grid_gradient_kernel, (problem.dtype, bits), _THREADS)
        parts = Launch(source, (problem.n * blocks, 1, 1), (0, WORKSPACE), "", integers, bits)
        return [parts, theta_launch(problem, blocks, WORKSPACE, 1)]


GRID_BWD = GridGradient()
