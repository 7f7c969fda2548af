"""Global pooling: one window that is the whole image, and the gradient of its sum.

    y[n, c] = max or sum over i of x[n, c, i];   dx[n, c, i] = dy[n, c], times the scale of an average

    planar          a warp, or several where planes are large, join a plane of x: 4 vectors a thread in flight
    channels-last   a block joins some vectors of channels over all pixels of an image,

                        thread:  pixels g, g + groups, ... of one vector      block: the groups, by halves

and of the gradient the same threads write, of an image that is channels-last a block only some pixels: each has one
value of dy. Traffic: x and dx once. Sums in float32, in a fixed order. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_axes import LOWEST
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_THREADS = 256
_VECTOR_BYTES = 16
_IN_FLIGHT = 4  # vectors that a thread loads before it joins them
_WRITTEN = 8  # vectors of a thread of a gradient, channels-last
_INT32_END = 2**31 - 2**20
_LAUNCH_US = 1.3
_RESIDENT, _WAVE_US = 2048, 1.0  # threads of a multiprocessor at once, and how long those of a planar forward take


class Team(NamedTuple):
    """Threads that have one plane; channels-last those of a block that are at different pixels. block: its threads."""

    threads: int
    block: int = _THREADS

    def __str__(self) -> str:
        return f"{self.threads}/{self.block}"


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    is_max: bool
    channels_last: bool
    lanes: int
    team: int
    threads: int


class Planes(NamedTuple):
    """planes: of x. vectors: of a plane, or of a pixel. chunk: pixels of a block. divisor: of the sum."""

    planes: int
    vectors: int
    pixels: int
    chunk: int
    divisor: int


def _forward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool_vector, ptx_vector

    v = Variant._make(specialised_on)
    integer, real, lanes, team = ptx.INTEGER[32], ptx.REAL["f32"], v.lanes, v.team
    otherwise = LOWEST[v.dtype] if v.is_max else 0
    load, join = ptx_pool_vector.load(v.dtype, lanes, otherwise), ptx_pool_vector.join_vectors(v.is_max, lanes)
    neutral = ptx_vector.repeated(lanes)
    join_one, lowest = ptx_pool_vector.join_vectors(v.is_max, 1), real(float("-inf")) if v.is_max else real(0.0)
    of_team = team // 32
    narrow, join_lanes = ptx.NARROW[v.dtype], ptx_pool_vector.join_lanes(v.is_max, lanes)
    threads, of_block, warps, floats = v.threads, v.threads // team, v.threads // 32, v.threads * lanes

    @ptx.inline
    def joined_run(x, start, step, first, end):
        """Vectors `first`, first + team, ... before `end`, each `step` elements from the one before it in number."""
        found = neutral(lowest)
        i = first
        while i < end:
            i1, i2, i3 = integer(i + team), integer(i + 2 * team), integer(i + 3 * team)
            a = load(x, integer(start + i * step), i < end)
            b = load(x, integer(start + i1 * step), i1 < end)
            c = load(x, integer(start + i2 * step), i2 < end)
            d = load(x, integer(start + i3 * step), i3 < end)
            found = join(found, join(join(a, b), join(c, d)))
            i = integer(i + _IN_FLIGHT * team)
        return found

    if v.channels_last:

        def join_pixels(x, y, f):
            thread = integer(ptx.thread_x())
            slabs = integer((f.vectors + of_block - 1) // of_block)
            n, slab = ptx.divided(integer(ptx.block_x()), slabs)
            group, in_slab = ptx.divided(thread, integer(of_block))
            vector = integer(slab * of_block + in_slab)
            inside = vector < f.vectors
            start = integer(n * f.pixels * f.vectors * lanes + vector * lanes)
            end = f.pixels if inside else integer(0)
            found = joined_run(x, start, integer(f.vectors * lanes), group, end)
            parts = ptx.cuda.shared.array(floats, real)
            for lane in range(lanes):
                parts[lane * threads + thread] = found[lane]
            half = integer(team // 2)
            while half > 0:
                ptx.cuda.syncthreads()
                if group < half:
                    for lane in range(lanes):
                        at = integer(lane * threads + thread)
                        parts[at] = join_one((parts[at],), (parts[at + half * of_block],))[0]
                half = integer(half // 2)
            if group == 0 and inside:
                scale = real(1.0) / real(f.divisor)
                for lane in range(lanes):
                    total = parts[lane * threads + thread]
                    at = integer((n * f.vectors + vector) * lanes + lane)
                    y[at] = narrow(total if v.is_max else total * scale)

        kernel = join_pixels
    else:

        def join_planes(x, y, f):
            thread = integer(ptx.thread_x())
            in_block, lane = ptx.divided(thread, integer(team))
            plane = integer(integer(ptx.block_x()) * of_block + in_block)
            end = f.vectors if plane < f.planes else integer(0)
            vectors = joined_run(x, integer(plane * f.vectors * lanes), integer(lanes), lane, end)
            found = join_lanes(vectors)
            for exchange in range(5):
                found = join_one((found,), (ptx.shuffle_xor(found, 16 >> exchange),))[0]
            if team > 32:
                parts = ptx.cuda.shared.array(warps, real)
                if thread & 31 == 0:
                    parts[thread >> 5] = found
                ptx.cuda.syncthreads()
                found = parts[in_block * of_team]
                for warp in range(1, of_team):
                    found = join_one((found,), (parts[in_block * of_team + warp],))[0]
            if lane == 0 and plane < f.planes:
                y[plane] = narrow(found if v.is_max else found * (real(1.0) / real(f.divisor)))

        kernel = join_planes
    data = ptx.pointer(v.dtype)
    return kernel, (data, data, ptx.record(Planes, 32))


def _backward_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool_vector, ptx_vector

    v = Variant._make(specialised_on)
    integer, real, lanes, team = ptx.INTEGER[32], ptx.REAL["f32"], v.lanes, v.team
    load = ptx_pool_vector.load(v.dtype, lanes if v.channels_last else 1)
    repeat, store = ptx_vector.repeated(lanes), ptx_pool_vector.store(v.dtype, lanes)
    scaled, of_block = ptx_vector.scaled(lanes if v.channels_last else 1), v.threads // team

    if v.channels_last:

        def spread(dy, dx, f):
            slabs, _ = ptx.divided(integer(f.vectors + of_block - 1), integer(of_block))
            chunks, _ = ptx.divided(integer(f.pixels + f.chunk - 1), f.chunk)
            rest, slab = ptx.divided(integer(ptx.block_x()), slabs)
            n, chunk = ptx.divided(rest, chunks)
            group, in_slab = ptx.divided(integer(ptx.thread_x()), integer(of_block))
            vector = integer(slab * of_block + in_slab)
            inside = vector < f.vectors
            share = scaled(load(dy, integer((n * f.vectors + vector) * lanes), inside), real(1.0) / real(f.divisor))
            pixel, end = integer(chunk * f.chunk + group), integer(min(f.pixels, integer((chunk + 1) * f.chunk)))
            at = integer(((n * f.pixels + pixel) * f.vectors + vector) * lanes)
            while pixel < end:
                store(dx, at, inside, share)
                pixel, at = integer(pixel + team), integer(at + team * f.vectors * lanes)

    else:

        def spread(dy, dx, f):
            in_block, i = ptx.divided(integer(ptx.thread_x()), integer(team))
            plane = integer(integer(ptx.block_x()) * of_block + in_block)
            inside = plane < f.planes
            share = repeat(scaled(load(dy, plane, inside), real(1.0) / real(f.divisor))[0])
            while i < f.vectors:
                store(dx, integer((plane * f.vectors + i) * lanes), inside, share)
                i = integer(i + team)

    data = ptx.pointer(v.dtype)
    return spread, (data, data, ptx.record(Planes, 32))


def _lanes(problem: PoolProblem) -> int:
    """Elements of a vector: a power of two that divides a plane, or the channels."""
    run, lanes = problem.c if problem.channels_last else prod(problem.spatial), 1
    most = min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype]
    while 2 * lanes <= most and run % (2 * lanes) == 0:
        lanes *= 2
    return lanes


class Plane(LaunchedCandidate[Team]):
    """One window that is the whole image."""

    algorithm = "plane"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        if problem.window != problem.spatial or any(problem.pad):
            return Support(False, f"windows {problem.window} of a padded image {problem.spatial} are not the image")
        if problem.dtype == "f64":
            return Support(False, "float64 is left to direct")
        if self.op == "pool_bwd" and problem.is_max:
            return Support(False, "of gradients only that of a sum")
        elements = prod(problem.x_shape)
        return YES if elements < _INT32_END else Support(False, f"x has {elements} elements, more than {_INT32_END}")

    def configs(self, problem: PoolProblem, device: Gpu) -> tuple[Team, ...]:
        pixels, vectors = prod(problem.spatial), problem.c // _lanes(problem)
        if not problem.channels_last:  # those that just have a plane on its way at once come first
            teams = [Team(threads) for threads in (32, 64, 128, 256)]
            of_plane = pixels // _lanes(problem)
            return tuple(sorted(teams, key=lambda team: abs(team.threads * _IN_FLIGHT - of_plane)))
        if self.op == "pool_fwd":
            every = Team(128, 1024), Team(64, 512), Team(128, 512), Team(64), Team(32), Team(16)
            return tuple(sorted(every, key=lambda team: 3 * team.threads > pixels))
        teams = [Team(8), Team(16), Team(32), Team(64)]  # those with fewer threads beyond the last vector first
        return tuple(sorted(teams, key=lambda team: -vectors % (_THREADS // team.threads)))

    def estimate(self, problem: PoolProblem, config: Team, device: Gpu) -> float:
        moved_us, waves = 1.15 * problem.min_bytes / copy_bytes_per_s(device) * 1e6, 0.0
        if self.op == "pool_fwd" and not problem.channels_last:
            waves = problem.n * problem.c * config.threads / (_RESIDENT * device.sms)
        return _LAUNCH_US + max(moved_us, waves * _WAVE_US)

    def launches(self, problem: PoolProblem, config: Team, device: Gpu) -> list[Launch]:
        lanes, forward, last = _lanes(problem), self.op == "pool_fwd", problem.channels_last
        v = Variant(problem.dtype, problem.is_max, last, lanes, *config)
        pixels, planes, of_block = prod(problem.spatial), problem.n * problem.c, config.block // config.threads
        vectors, chunk = (problem.c if last else pixels) // lanes, pixels if forward else config.threads * _WRITTEN
        blocks = problem.n * ceil(vectors / of_block) * ceil(pixels / chunk) if last else ceil(planes / of_block)
        return [
            Launch(
                source=Source(_forward_kernel if forward else _backward_kernel, v, config.block),
                grid=(blocks, 1, 1),
                pointers=(0, 1),
                scalars="",
                integers=Planes(planes, vectors, pixels, chunk, 1 if problem.mode == "sum" else pixels),
            )
        ]


FWD, BWD = Plane("pool_fwd"), Plane("pool_bwd")
