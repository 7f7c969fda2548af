"""The gradients of what a grid samples on a GPU, of small images: a block finds once which outputs lie near a pixel.

    block     1. its plan, in shared memory: outputs by the pixels near them (spatialtf_plan)
    thread    2. a pixel: dx = sum over outputs near it of weight * dy;  a = sum over c of dy * x for each of these
    thread    3. an output: what its four pixels' a make of ds and dt
    cluster   4. dgrid, ds and dt of all blocks of an image, in their order

Nothing is added to memory, and every sum has one order. The blocks of an image share its channels where these are
planes, whose dy comes to shared memory, some at a time; else they share its rows, neighbouring threads a pixel, and
vectors of its channels are loaded. Of an affine map `gather` finds the outputs by turning it round, in less time. Bound
by the instructions of an output at a pixel, and by a warp's waiting for the pixel with the most: 64x64x56x56 planar 88
us on an H200, with `turned` 165; channels-last 78, with `atomic` 103. Traffic: x, dy, dx once; dy from shared memory,
or from cache, for each of the four pixels that an output is near. Sums in float32. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import blocks_at_once, shared_bytes
from nbdnn.kernels.cuda.spatialtf_bins import Parts, Variant, binned_pixels, come_in_parts
from nbdnn.kernels.cuda.spatialtf_plan import WORD_BYTES, Plan, planned
from nbdnn.kernels.cuda.spatialtf_position import Fields, Kind, fields, index_bits, vector_lanes
from nbdnn.kernels.cuda.spatialtf_slopes import near_output, slopes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_WARP, _COPY_BYTES = 32, 16
_CLUSTERS, _CAPABILITY = (1, 2, 4, 8), (9, 0)  # blocks of an image, from which capability on
_MOST_THREADS, _LEAST_THREADS, _TURNS = 1024, 128, 4  # of a block; outputs of a thread
_HELD_ELEMS = 8  # sums of a pixel that a thread has at once
_STATIC_BYTES = 2 << 10  # of shared memory, beside what is counted here
_OUTPUT_BYTES = (2 + 1 + 4) * WORD_BYTES  # of an output in the plan
_THREADS_OF_SM, _CONFIGS = 1024, 5
# Fitted to 50 problems on an H200: a launch, a block's plan, and its outputs in turn; an output near a pixel, and what
# is copied of an element; and the share of the multiprocessors that clusters of eight find room on, as if one block
# were on each of them.
_LAUNCH_US, _BLOCK_US, _TURN_US, _VISIT_US, _COPIED_NS, _IN_LARGE_CLUSTERS = 1.4, 1.6, 4.2, 0.6, 1.8, 0.87


class Config(NamedTuple):
    """Blocks of an image: by rows of pixels and by groups of channels; and their threads."""

    bands: int
    groups: int
    threads: int

    def __str__(self) -> str:
        return f"b{self.bands}g{self.groups}t{self.threads}"


def _outputs(v: Variant):
    """Device function (places, found, image, rank, first row, rows, shared, f, plan): dgrid, of all slots."""
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_tile

    kind, cluster, turns = Kind(*v.kind), v.cluster, v.turns
    integer, real, word, narrow = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD, ptx.NARROW[kind.param_dtype]
    load_word, store_word = ptx_tile.LOAD_SHARED[1], ptx_tile.STORE_SHARED[1]
    float_of, word_of, of_other = ptx_tile.float_of, ptx_tile.word_of, ptx_cluster.LOAD_OF_BLOCK["f32"]
    find, derive = near_output(kind), slopes("f32", 32)

    @ptx.inline
    def slot(shared, corner, output, f, plan):
        return word(shared + word(integer(plan.at_slots + integer(corner * f.outputs + output) * WORD_BYTES)))

    @ptx.inline
    def slope(row, down, right, first_row, rows, output, shared, f, plan):
        a = ptx.cuda.local.array(4, real)
        for corner in range(4):
            line = integer(row + corner // 2 - first_row)
            is_there = line >= 0 and line < rows
            is_there = is_there and (corner % 2 == 0 or f.in_w > 1) and (corner < 2 or f.in_h > 1)
            value = float_of(load_word(slot(shared, integer(corner), output, f, plan)))
            a[corner] = value if is_there else real(0.0)
        return derive(a, right, down, f)

    @ptx.inline
    def of_cluster(where):
        total = real(0.0)
        for block in range(cluster):
            total = total + of_other(where, integer(block))
        return total

    @ptx.inline
    def meet():
        ptx_cluster.arrive()
        ptx_cluster.wait()

    @ptx.inline
    def of_grid(places, dgrid, image, rank, first_row, rows, shared, f, plan):
        thread = integer(ptx.thread_x())
        rows_of, downs = ptx.cuda.local.array(turns, integer), ptx.cuda.local.array(turns, real)
        rights = ptx.cuda.local.array(turns, real)
        for turn in range(turns):
            known = min(integer(thread + turn * v.threads), integer(f.outputs - 1))
            _, _, rows_of[turn], _, downs[turn], rights[turn] = find(places, image, known, f)
        for turn in range(turns):
            output = integer(thread + turn * v.threads)
            if output < f.outputs:
                s, t = slope(rows_of[turn], downs[turn], rights[turn], first_row, rows, output, shared, f, plan)
                if cluster == 1:
                    at = integer(integer(image * f.outputs + output) * 2)
                    dgrid[at], dgrid[integer(at + 1)] = narrow(s), narrow(t)
                else:
                    store_word(slot(shared, integer(0), output, f, plan), word_of(s))
                    store_word(slot(shared, integer(1), output, f, plan), word_of(t))
        if cluster > 1:
            meet()
            output = integer(rank * v.threads + thread)
            while output < f.outputs:
                at = integer(integer(image * f.outputs + output) * 2)
                dgrid[at] = narrow(of_cluster(slot(shared, integer(0), output, f, plan)))
                dgrid[integer(at + 1)] = narrow(of_cluster(slot(shared, integer(1), output, f, plan)))
                output = integer(output + cluster * v.threads)
            meet()

    return of_grid


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    v = Variant(*specialised_on)
    kind = Kind(*v.kind)
    integer, word = ptx.INTEGER[32], ptx.WORD
    make, visit, come, finish = planned(kind, v.threads, v.turns), binned_pixels(v), come_in_parts(v), _outputs(v)
    commit, wait = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(v.buffers - 1)

    def held(x, places, dy, dx, found, f, h, plan):
        image, rank = ptx.split(integer(ptx.block_x()), f.blocks, f.by_blocks, f.shift_blocks)
        band, group = ptx.divided(rank, h.groups)
        first_row = integer(band * plan.rows)
        rows = min(plan.rows, integer(f.in_h - first_row))
        vector = integer(group * h.group)
        end = min(integer(vector + h.group), f.vectors)
        shared = ptx_tile.dynamic_shared()
        tops = word(shared + word(h.at_tops))
        come(x, dy, image, first_row, rows, vector, tops, f, h)
        commit()
        make(places, image, first_row, shared, f, plan)
        part, here = vector, tops
        while part < end:
            after = integer(part + h.part)
            if v.buffers > 1:
                other = word(integer(2 * integer(tops) + h.buffer_bytes) - integer(here))
                if after < end:
                    come(x, dy, image, first_row, rows, after, other, f, h)
                commit()
            wait()
            ptx.cuda.syncthreads()
            end_part = min(after, end)
            visit(x, dy, dx, image, first_row, rows, part, end_part, vector, here, shared, f, h, plan)
            part = after
            if v.buffers > 1:
                ptx.cuda.syncthreads()
                here = other
            elif part < end:
                ptx.cuda.syncthreads()
                come(x, dy, image, first_row, rows, part, here, f, h)
                commit()
        ptx.cuda.syncthreads()
        finish(places, found, image, rank, first_row, rows, shared, f, plan)

    data, parameters = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype)
    records = ptx.record(Fields, 32), ptx.record(Parts, 32), ptx.record(Plan, 32)
    return held, (data, parameters, data, data, parameters, *records)


def _largest(most: int, count: int) -> int:
    """Of the divisors of a count, none larger than `most`."""
    return next(each for each in range(max(1, min(most, count)), 0, -1) if count % each == 0)


class _Shape(NamedTuple):
    """What a config makes of a problem."""

    variant: Variant
    held: Parts
    plan: Plan
    shared_bytes: int


def _sharing(problem: SpatialtfProblem, lanes: int) -> int:
    """Threads of a pixel."""
    vectors = problem.c // lanes
    return min(_WARP, vectors & -vectors) if problem.channels_last else 1


def _kind(problem: SpatialtfProblem) -> Kind:
    lanes = vector_lanes(problem)
    threads = _sharing(problem, lanes)
    return Kind(False, problem.dtype, problem.param_dtype, lanes, threads, 0, 32)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _COPY_BYTES) * _COPY_BYTES


def _part(most: int, group: int) -> int:
    """Channels that are in shared memory at once, of a block's `group`: no more than `most`."""
    return _largest(most, group) if most else 0


def _shape(problem: SpatialtfProblem, config: Config, device: Gpu) -> _Shape | None:
    """None where a block's memory does not hold it."""
    kind, (in_h, in_w), outputs = _kind(problem), problem.spatial, problem.positions
    rows, itemsize = ceil(in_h / config.bands), ITEMSIZE[problem.dtype]
    bins = (rows + 1) * in_w
    at_distances = _aligned((bins + 1) * WORD_BYTES)
    at_order = at_distances + 2 * WORD_BYTES * outputs
    at_slots = at_order + WORD_BYTES * outputs
    at_tops = _aligned(at_distances + _OUTPUT_BYTES * outputs)
    plan = Plan(rows, bins, ceil((bins + 1) / config.threads), at_distances, at_order, at_slots)
    group = problem.c // kind.lanes // config.groups
    cluster, turns = config.bands * config.groups, ceil(outputs / config.threads)
    room = shared_bytes(device) - _STATIC_BYTES - at_tops
    if room < 0 or turns > _TURNS:
        return None
    if kind.lanes * kind.threads > 1:
        at_once = _largest(max(1, _HELD_ELEMS // kind.lanes), group // kind.threads)
        variant = Variant(tuple(kind), config.threads, turns, at_once, 0, 1, cluster)
        asks = 2 * problem.operands[0].size_bytes <= device.l2_bytes // 2
        return _Shape(variant, Parts(1, group, group, int(asks), 0, 0, 0, 0), plan, at_tops)
    part, buffers = group, 1
    if _aligned(group * outputs * itemsize) > room:
        if problem.channels_last:
            return None
        # One buffer, which is waited for, where two would have a thread take fewer channels at once.
        ways = [(_part(room // count // (outputs * itemsize), group), count) for count in (2, 1)]
        part, buffers = max(ways, key=lambda way: _largest(_HELD_ELEMS, way[0]) if way[0] else 0)
    buffer_bytes = _aligned(part * outputs * itemsize)
    if not part or buffers * buffer_bytes > room:
        return None
    at_once = _largest(_HELD_ELEMS, part)
    copied = min(_COPY_BYTES, problem.align) // itemsize
    while part * outputs % copied:
        copied //= 2
    to_vector, to_output = (itemsize, problem.c * itemsize) if problem.channels_last else (outputs * itemsize, itemsize)
    variant = Variant(tuple(kind), config.threads, turns, at_once, copied, buffers, cluster)
    planes = 1 if problem.channels_last else part
    held = Parts(config.groups, group, part, planes, at_tops, buffer_bytes, to_vector, to_output)
    return _Shape(variant, held, plan, at_tops + buffers * buffer_bytes)


class Binned(LaunchedCandidate[Config]):
    """Gradients of images whose outputs, by the pixels near them, a block's shared memory holds."""

    op, algorithm = "spatialtf_sampler_bwd", "binned"

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        if problem.compute != "f32" or index_bits(problem) > 32:
            return Support(False, f"{problem.dtype}, this kernel adds float32 and has integers of 32 bits")
        if not problem.c:
            return Support(False, "0 channels")
        if not self.configs(problem, device):
            most = shared_bytes(device)
            return Support(False, f"{problem.positions} outputs do not go into the {most} bytes that a block may have")
        return YES

    def configs(self, problem: SpatialtfProblem, device: Gpu) -> tuple[Config, ...]:
        found = []
        for blocks in _CLUSTERS if device.capability >= _CAPABILITY else _CLUSTERS[:1]:
            by_channels = not problem.channels_last and problem.c % blocks == 0
            bands, groups = (1, blocks) if by_channels else (blocks, 1)
            items = ceil(problem.spatial[0] / bands) * problem.spatial[1] * _kind(problem).threads
            least = max(_LEAST_THREADS, ceil(problem.positions / _TURNS))
            for most in (_MOST_THREADS, _MOST_THREADS // 2):
                each = max(ceil(items / ceil(items / most)), min(least, _MOST_THREADS))
                found.append(Config(bands, groups, ceil(each / _WARP) * _WARP))
        fitting = [each for each in dict.fromkeys(found) if _shape(problem, each, device)]
        return tuple(sorted(fitting, key=lambda config: self.estimate(problem, config, device))[:_CONFIGS])

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        """Of blocks in step, each of which makes its plan and then goes through its pixels and channels."""
        shape = _shape(problem, config, device)
        assert shape
        v = shape.variant
        resident = min(_THREADS_OF_SM // config.threads, blocks_at_once(shape.shared_bytes + _STATIC_BYTES, device))
        at_once = device.sms * (_IN_LARGE_CLUSTERS if v.cluster == _CLUSTERS[-1] else max(resident, 1))
        pixels = shape.plan.rows * problem.spatial[1]
        kind, group = Kind(*v.kind), shape.held.group
        copied_us = pixels * group * kind.lanes * _COPIED_NS / v.at_once / 1e3 if v.copied else 0.0
        # A thread's pixels, its vectors of channels and the outputs near a pixel come one after the other.
        of_thread = max(1.0, pixels * kind.threads / config.threads) * ceil(group / kind.threads) / v.at_once
        waited_us = of_thread * _VISIT_US * 4 * problem.positions / prod(problem.spatial)
        of_block_us = _BLOCK_US + v.turns * _TURN_US + max(copied_us, waited_us)
        return _LAUNCH_US + ceil(problem.n * v.cluster / at_once) * of_block_us

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        shape = _shape(problem, config, device)
        assert shape
        v = shape.variant
        integers = (*fields(problem, Kind(*v.kind), v.cluster, shape.held.group), *shape.held, *shape.plan)
        source = Source(_kernel, v, v.threads)
        grid, pointers = (problem.n * v.cluster, 1, 1), (0, 1, 2, 3, 4)
        return [Launch(source, grid, pointers, "", integers, 32, shape.shared_bytes, v.cluster)]


SAMPLER_BWD = Binned()
