"""The spatial transformer's gradients on a GPU, affine or by a grid.

    a[k] = sum over c of dy[c] * x[c, pixel k],  dgrid = sum over the four pixels k of d weight[k] / d position * a[k]
    dx[n, c, pixel] = sum over outputs that are near it of weight * dy[n, c, output]

    gather   of an affine map: a thread has an output and a pixel. It adds up what all outputs near its pixel give to
             it, which it finds by turning the map round; the same bits every time
    atomic   a thread has an output, and adds what this gives to the pixels near it; in any order
    ordered  of a grid: a thread has a channel of an image and goes through its outputs (spatialtf_ordered)

Threads share positions and channels as in spatialtf_direct. Of a grid a thread, or its neighbours, has all channels of
an output, whose dgrid it stores; dtheta is added up block by block (spatialtf_theta). What is not added up in registers
is in the compute type: 16-bit gradients in the workspace, rounded once. Traffic: x, dy, dx once, and from cache for
every output that is near a pixel; atomic: dx twice more. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import NULL, Launch, LaunchedCandidate, in_workspace
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_direct import THREADS, Config, configs, launched
from nbdnn.kernels.cuda.spatialtf_ordered import ordered
from nbdnn.kernels.cuda.spatialtf_pixels import box
from nbdnn.kernels.cuda.spatialtf_position import (
    Fields,
    Kind,
    affine,
    at_output,
    index_bits,
    nearest,
    output_place,
    position,
    thread_place,
)
from nbdnn.kernels.cuda.spatialtf_theta import SUMS, along_axis, store_sums, theta_launch
from nbdnn.kernels.cuda.zeros import zeros
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_ALIGN_BYTES = 256
_VECTOR_ADDS = 9, 0  # from this compute capability on, four neighbours are added by one instruction
_LANES = 4  # of a dx in memory, of one thread
_LAUNCH_US = 6.0
_OVER_COPY = {"gather": 1.6, "atomic": 2.5, "ordered": 2.5}
_ORDERED_NS = 800.0  # an output, one after the other
# Blocks on a multiprocessor at once: more of them hide what memory takes, and fewer registers spill.
_MIN_BLOCKS = {"gather": 2, "atomic": 3, "": 3}


class _Variant(NamedTuple):
    """dx: 'gather', 'atomic' or '' where another kernel makes it. vectors: of four are added at once."""

    kind: Kind
    dx: str
    vectors: bool


def _slopes(kind: Kind):
    """Device function (a, right, down, f) -> (ds, dt), derivatives by the grid of one output. a: the four sums."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    real, integer = ptx.REAL[kind.compute], ptx.INTEGER[kind.bits]
    hat, slope, used = ptx_spatialtf.hat, ptx_spatialtf.slope, ptx_spatialtf.used

    @ptx.inline
    def along(a, left, next_, top, bottom):
        above = used(top * left, a[0]) + used(top * next_, a[1])
        return above + used(bottom * left, a[2]) + used(bottom * next_, a[3])

    @ptx.inline
    def derive(a, right, down, f):
        past, below = right - real(1.0), down - real(1.0)
        s = along(a, slope(right), slope(past), hat(down), hat(below))
        t = along(a, hat(right), hat(past), slope(down), slope(below))
        half_w, half_h = real(0.5) * real(integer(f.in_w - 1)), real(0.5) * real(integer(f.in_h - 1))
        return s * half_w, t * half_h

    return derive


def _of_output(v: _Variant):
    """Device function (x, places, dy, total, image, i, j, vector, end, f) -> (ds, dt) of a thread's channels."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    kind = v.kind
    integer, real, lanes, threads = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], kind.lanes, kind.threads
    load, locate, find = ptx_local.load(kind.dtype, lanes), position(kind), nearest(kind.compute, kind.bits)
    hat, derive, adds = ptx_spatialtf.hat, _slopes(kind), v.dx == "atomic"
    add = ptx_spatialtf.add_lanes(kind.compute, lanes, v.vectors) if adds else None

    @ptx.inline
    def visit(x, dy, total, at, w, top, pixels, a, k):
        load(pixels, integer(0), x, at)
        for i in range(lanes):
            a[k] = ptx.fma(top[i], pixels[i], a[k])
        if adds and w > real(0.0):
            add(total, at, top, integer(0), w)

    @ptx.inline
    def gradient(x, places, dy, total, image, i, j, vector, end, f):
        s, t = locate(places, image, i, j, f)
        (column, right), (row, down) = find(s, f.in_w), find(t, f.in_h)
        first, second, left, next_ = hat(down), hat(down - real(1.0)), hat(right), hat(right - real(1.0))
        start = integer(image * f.x_n + row * f.x_h + column * f.x_w)
        of_top = integer(image * f.y_n + i * f.y_h + j * f.y_w)
        top, pixels = ptx.cuda.local.array(lanes, real), ptx.cuda.local.array(lanes, real)
        a = ptx.cuda.local.array(4, real)
        for k in range(4):
            a[k] = real(0.0)
        while vector < end:
            load(top, integer(0), dy, integer(of_top + vector * f.y_v))
            at = integer(start + vector * f.x_v)
            visit(x, dy, total, at, first * left, top, pixels, a, 0)
            visit(x, dy, total, integer(at + f.right), first * next_, top, pixels, a, 1)
            visit(x, dy, total, integer(at + f.down), second * left, top, pixels, a, 2)
            visit(x, dy, total, integer(at + f.down + f.right), second * next_, top, pixels, a, 3)
            vector = integer(vector + threads)
        return derive(a, right, down, f)

    return gradient


def _of_pixel(v: _Variant):
    """Device function (places, dy, dx, image, pixel, vector, end, f): all that a pixel's channels get."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    kind = v.kind
    integer, real, lanes, threads = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], kind.lanes, kind.threads
    load, store = ptx_local.load(kind.dtype, lanes), ptx_local.store(kind.dtype, lanes)
    map_of, place = affine(kind.param_dtype, kind.compute, kind.bits), at_output(kind.compute, kind.bits)
    find, hat = box(kind.compute, kind.bits), ptx_spatialtf.hat
    at_once = max(1, 4 // lanes)
    held = at_once * lanes

    @ptx.inline
    def add_up(m, dy, dx, near, p, q, start, to, top, sums, f, count):
        low_i, end_i, low_j, end_j = near
        for k in range(count * lanes):
            sums[k] = real(0.0)
        i = low_i
        while i < end_i:
            j = low_j
            while j < end_j:
                s, t = place(m, i, j)
                weight = hat(s - q) * hat(t - p)
                if weight > real(0.0):
                    at = integer(start + i * f.y_h + j * f.y_w)
                    for k in range(count):
                        load(top, integer(k * lanes), dy, integer(at + k * threads * f.y_v))
                    for k in range(count * lanes):
                        sums[k] = ptx.fma(weight, top[k], sums[k])
                j = integer(j + 1)
            i = integer(i + 1)
        for k in range(count):
            store(dx, integer(to + k * threads * f.x_v), sums, integer(k * lanes))

    @ptx.inline
    def gather(places, dy, dx, image, pixel, vector, end, f):
        row, column = ptx.divided(pixel, f.in_w)
        m = map_of(places, image, f)
        near, p, q = find(m, row, column, f), real(row), real(column)
        top, sums = ptx.cuda.local.array(held, real), ptx.cuda.local.array(held, real)
        of_dy, of_dx = integer(image * f.y_n), integer(image * f.x_n + row * f.x_h + column * f.x_w)
        if at_once > 1:
            while vector + (at_once - 1) * threads < end:
                start, to = integer(of_dy + vector * f.y_v), integer(of_dx + vector * f.x_v)
                add_up(m, dy, dx, near, p, q, start, to, top, sums, f, at_once)
                vector = integer(vector + at_once * threads)
        while vector < end:
            start, to = integer(of_dy + vector * f.y_v), integer(of_dx + vector * f.x_v)
            add_up(m, dy, dx, near, p, q, start, to, top, sums, f, 1)
            vector = integer(vector + threads)

    return gather


def _gradient_kernel(*specialised_on):
    """All but the gather's dx; found: of an affine map the parts of dtheta, else dgrid."""
    from nbdnn.kernels.cuda import ptx

    v = _Variant(Kind(*specialised_on[0]), *specialised_on[1:])
    kind = v.kind
    integer, real, narrow = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], ptx.NARROW[kind.param_dtype]
    of_output, along = _of_output(v), along_axis(kind.compute, kind.bits)
    gathers, threads = v.dx == "gather", kind.threads
    place, output_of = thread_place(kind, THREADS), output_place(kind, THREADS)
    of_pixel = _of_pixel(v) if gathers else None
    store = store_sums(kind.compute, kind.bits, THREADS)

    @ptx.inline
    def found_by(x, places, dy, total, f):
        if gathers:
            image, output, vector, end = place(f)
            i, j = ptx.split(output, f.out_w, f.by_out_w, f.shift_out_w)
        else:
            image, i, j, vector, end = output_of(f)
        s, t = real(0.0), real(0.0)
        if i < f.out_h and j < f.out_w:
            s, t = of_output(x, places, dy, total, image, i, j, vector, end, f)
        if gathers and output < f.pixels:
            of_pixel(places, dy, total, image, output, vector, end, f)
        return image, i, j, s, t

    def add_affine(x, places, dy, total, parts, f):
        _, i, j, s, t = found_by(x, places, dy, total, f)
        u, w = along(j, f.out_w), along(i, f.out_h)
        groups, _ = ptx.divided(integer(f.vectors + f.group - 1), f.group)
        part = integer(ptx.block_x() * groups + ptx.block_y())
        store(parts, integer(part * SUMS), (s * u, s * w, s, t * u, t * w, t))

    def add_grid(x, places, dy, total, dgrid, f):
        image, i, j, s, t = found_by(x, places, dy, total, f)
        shared_s, shared_t = ptx.cuda.shared.array(THREADS, real), ptx.cuda.shared.array(THREADS, real)
        thread = integer(ptx.thread_x())
        shared_s[thread], shared_t[thread] = s, t
        ptx.cuda.syncthreads()
        _, lane = ptx.divided(thread, integer(threads))
        if lane == 0 and i < f.out_h and j < f.out_w:
            for other in range(1, threads):
                s = s + shared_s[integer(thread + other)]
                t = t + shared_t[integer(thread + other)]
            at = integer((image * f.outputs + i * f.out_w + j) * 2)
            dgrid[at] = narrow(s)
            dgrid[integer(at + 1)] = narrow(t)

    data, parameters, compute = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype), ptx.pointer(kind.compute)
    total = data if gathers else compute
    types = data, parameters, data, total, compute if kind.affine else parameters, ptx.record(Fields, kind.bits)
    return add_affine if kind.affine else add_grid, types


class _Elements(NamedTuple):
    elements: int


def _round_kernel(dtype: str, bits: int, lanes: int):
    from nbdnn.kernels.cuda import ptx, ptx_local

    integer, real, narrow = ptx.INTEGER[bits], ptx.REAL["f32"], ptx.NARROW[dtype]
    load, store = ptx_local.load("f32", lanes), ptx_local.store(dtype, lanes)

    def round_(total, dx, f):
        at = integer(integer(integer(ptx.block_x()) * THREADS + ptx.thread_x()) * lanes)
        if at + lanes <= f.elements:
            sums = ptx.cuda.local.array(lanes, real)
            load(sums, integer(0), total, at)
            store(dx, at, sums, integer(0))
        else:
            while at < f.elements:
                dx[at] = narrow(total[at])
                at = integer(at + 1)

    return round_, (ptx.pointer("f32"), ptx.pointer(dtype), ptx.record(_Elements, bits))


class Gradient(LaunchedCandidate[Config]):
    """One of the three ways to dx."""

    def __init__(self, op: str, algorithm: str) -> None:
        self.op, self.algorithm, self.deterministic = op, algorithm, algorithm != "atomic"

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        return YES

    def configs(self, problem: SpatialtfProblem, device: Gpu) -> tuple[Config, ...]:
        found = configs(problem, device, self._work(problem))
        if problem.is_affine:
            return found
        # Of a grid, the threads of one position have all of its channels; one output after the other has one order.
        either = self.algorithm != "ordered"
        every = (config._replace(group=max(problem.c, 1), rows=config.rows and either) for config in found)
        return tuple(dict.fromkeys(every))

    def _work(self, problem: SpatialtfProblem) -> int | None:
        """Positions of an image that want a thread one after the other; None where outputs do, tile by tile."""
        return max(problem.positions, prod(problem.spatial)) if self.algorithm == "gather" else None

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        moved_us = problem.min_bytes / copy_bytes_per_s(device) * 1e6
        one_by_one_us = problem.positions * _ORDERED_NS / 1e3 if self.algorithm == "ordered" else 0.0
        return _LAUNCH_US + _OVER_COPY[self.algorithm] * moved_us + one_by_one_us

    def workspace_bytes(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> int:
        return self._total_bytes(problem) + self._parts(problem, config) * problem.n * SUMS * ITEMSIZE[problem.compute]

    def _total_bytes(self, problem: SpatialtfProblem) -> int:
        """Of a 16-bit dx that is added up in memory."""
        if self.algorithm == "gather" or problem.dtype == problem.compute:
            return 0
        return -(-problem.operands[0].size_elems * ITEMSIZE[problem.compute] // _ALIGN_BYTES) * _ALIGN_BYTES

    def _parts(self, problem: SpatialtfProblem, config: Config) -> int:
        """Of each image's dtheta."""
        if not problem.is_affine:
            return 0
        _, integers, grid = launched(problem, config, self._work(problem))
        return integers.blocks * grid[1]

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        kind, integers, grid = launched(problem, config, self._work(problem))
        vectors = device.capability >= _VECTOR_ADDS and problem.align % 16 == 0
        mode = "" if self.algorithm == "ordered" else self.algorithm
        total_bytes = self._total_bytes(problem)
        total = in_workspace(0) if total_bytes else 3
        found = in_workspace(total_bytes) if problem.is_affine else 4
        source = Source(_gradient_kernel, (tuple(kind), mode, vectors), THREADS, _MIN_BLOCKS[mode])
        main = Launch(source, grid, (0, 1, 2, total if mode else NULL, found), "", integers, kind.bits)
        after = [theta_launch(problem, self._parts(problem, config), found, 4)] if problem.is_affine else []
        if self.algorithm == "atomic":
            return [self._cleared(problem, total), main, *after, *self._rounded(problem, total_bytes)]
        if self.algorithm == "ordered":
            return [main, ordered(problem, kind, integers, total)]
        return [main, *after]

    def _cleared(self, problem: SpatialtfProblem, total: int) -> Launch:
        elements, lanes = problem.operands[0].size_elems, _lanes(problem, problem.compute)
        return zeros(total, elements, problem.compute, index_bits(problem), THREADS, lanes)

    def _rounded(self, problem: SpatialtfProblem, total_bytes: int) -> list[Launch]:
        if not total_bytes:
            return []
        elements, lanes, bits = problem.operands[0].size_elems, _lanes(problem, problem.dtype), index_bits(problem)
        source, grid = Source(_round_kernel, (problem.dtype, bits, lanes), THREADS), ceil(elements / THREADS / lanes)
        return [Launch(source, (grid, 1, 1), (in_workspace(0), 3), "", _Elements(elements), bits)]


def _lanes(problem: SpatialtfProblem, dtype: str) -> int:
    """Neighbours that one thread clears or rounds: of dx, or in the workspace."""
    return max(1, min(_LANES, problem.align // ITEMSIZE[dtype]))


GATHER, ATOMIC = Gradient("spatialtf_bwd", "gather"), Gradient("spatialtf_bwd", "atomic")
SAMPLER_ATOMIC = Gradient("spatialtf_sampler_bwd", "atomic")
SAMPLER_ORDERED = Gradient("spatialtf_sampler_bwd", "ordered")
