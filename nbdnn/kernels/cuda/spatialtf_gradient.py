"""The spatial transformer's gradients on a GPU, affine or by a grid.

    a[k] = sum over c of dy[c] * x[c, pixel k],  dgrid = sum over the four pixels k of d weight[k] / d position * a[k]
    dx[n, c, pixel] = sum over outputs that are near it of weight * dy[n, c, output]

    gather   of an affine map: a thread has a pixel, and adds up what all outputs near it give to it and get from it,
             which it finds by turning the map round; the same bits every time
    atomic   a thread has an output, and adds what this gives to the pixels near it; in any order
    ordered  of a grid: a thread has a channel of an image and goes through its outputs (spatialtf_ordered)

Threads share positions and channels as in spatialtf_direct. Of a grid a thread, or its neighbours, has all channels of
an output, whose dgrid it stores; dtheta is added up block by block (spatialtf_theta). What is not added up in registers
is in the compute type: 16-bit gradients in the workspace, rounded once. Traffic: x, dy, dx once, and dy (atomic: x)
from cache for every output that is near a pixel; atomic: dx twice more. The gather is bound by its instructions, an
addition costs the same for one element as for four that are a vector. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import NULL, Launch, LaunchedCandidate, in_workspace
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_direct import THREADS, Config, configs, launched, waited_us
from nbdnn.kernels.cuda.spatialtf_gather import gather_kernel, issued_us, visits
from nbdnn.kernels.cuda.spatialtf_ordered import ordered
from nbdnn.kernels.cuda.spatialtf_position import (
    FEW_CHANNELS,
    Fields,
    Kind,
    adding_us,
    index_bits,
    nearest,
    output_place,
    position,
    vector_lanes,
)
from nbdnn.kernels.cuda.spatialtf_slopes import slopes, store_slopes
from nbdnn.kernels.cuda.spatialtf_theta import SUMS, along_axis, store_sums, theta_launch
from nbdnn.kernels.cuda.zeros import zeros
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_ALIGN_BYTES = 256
_VECTOR_ADDS = 9, 0  # from this compute capability on, four neighbours are added by one instruction
_LANES = 4  # of a dx in memory, of one thread
_HELD_BYTES = 32  # of a pixel's sums that a thread holds, in the compute type
_ASKED_BYTES = 16  # of channels whose pixels it asks for before it uses the first
PIXEL = 3  # channels of one that is added as part of a row
# Fitted to 150 problems on an H200: launches, and what is moved; instructions of `gather`, of channels that are taken
# at once; a vector of a thread's channels, one after the other, of a visit, and added; lines that a warp asks for; and
# how much longer outputs take to add to a pixel for each more that there are to it.
_LAUNCH_US, _OVER_COPY = 3.2, {"gather": 1.1, "atomic": 0.6, "ordered": 2.5}
_PIXEL, _VISIT, _CHANNEL = 100.0, 140.0, 9.0
_GATHERED_US, _ADDED_US, _GATHERED_LINE_NS, _ADDED_LINE_NS = 0.2, 0.9, 0.3, 2.5
_CROWDED = 0.015
_ORDERED_NS = 800.0  # an output, one after the other
# Blocks on a multiprocessor at once: more of them hide what memory takes, and fewer registers spill.
# Those of threads that have pixels: 64x3x224x224 in float32 108 us, with three 125. With numbers of 64 bits: two.
_MIN_BLOCKS, _MIN_BLOCKS_OF_PIXELS, _MIN_BLOCKS_WIDE = 3, 4, 2


class _Variant(NamedTuple):
    """dx: 'atomic', or '' where another kernel makes it. vectors: of four are added at once. at_once: vectors
    of channels that a thread takes at once. row: elements of two neighbouring pixels that are added as a row."""

    kind: Kind
    dx: str
    vectors: bool
    at_once: int
    row: int


def _of_output(v: _Variant):
    """Device function (x, places, dy, total, image, i, j, vector, end, f) -> (ds, dt) of a thread's channels."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    kind = v.kind
    integer, real, lanes, threads = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], kind.lanes, kind.threads
    load, locate, find = ptx_local.load(kind.dtype, lanes), position(kind), nearest(kind.compute, kind.bits)
    hat, derive, adds = ptx_spatialtf.hat, slopes(kind.compute, kind.bits), v.dx == "atomic"
    add = ptx_spatialtf.add_lanes(kind.compute, lanes, v.vectors) if adds else None
    at_once = max(1, min(v.at_once, _ASKED_BYTES // (lanes * ITEMSIZE[kind.compute])))
    tops, four, row_elems = at_once * lanes, 4 * at_once * lanes, v.row
    add_row, used = ptx_spatialtf.add_row(row_elems) if row_elems else None, ptx_spatialtf.used

    @ptx.inline
    def add_corners(total, at, corners, w, top, f, count):
        for k in range(count):
            for corner in range(4):
                if w[corner] > real(0.0):
                    here = integer(at + corners[corner] + k * threads * f.x_v)
                    add(total, here, top, integer(k * lanes), w[corner])

    @ptx.inline
    def add_pairs(total, at, corners, w, top, f, count):
        """Two neighbouring pixels of a channel."""
        for k in range(count):
            for corner in range(0, 4, 2):
                left, right = w[corner], w[corner + 1]
                if left > real(0.0) or right > real(0.0):
                    here = integer(at + corners[corner] + k * f.x_v)
                    add_row(total, here, (used(left, top[k]), used(right, top[k])))

    @ptx.inline
    def add_sixes(total, at, corners, w, top, f, count):
        """Two neighbouring pixels of three channels, channels-last."""
        for corner in range(0, 4, 2):
            left, right = w[corner], w[corner + 1]
            if left > real(0.0) or right > real(0.0):
                first = used(left, top[0]), used(left, top[1]), used(left, top[2])
                second = used(right, top[0]), used(right, top[1]), used(right, top[2])
                add_row(total, integer(at + corners[corner]), first + second)

    add_all = {0: add_corners, 2: add_pairs, 2 * PIXEL: add_sixes}[row_elems]

    @ptx.inline
    def visit(x, dy, total, at, of_top, corners, w, top, pixels, a, f, count):
        for k in range(count):
            load(top, integer(k * lanes), dy, integer(of_top + k * threads * f.y_v))
            for corner in range(4):
                here = integer(at + corners[corner] + k * threads * f.x_v)
                load(pixels, integer((4 * k + corner) * lanes), x, here)
        for k in range(count):
            for corner in range(4):
                for i in range(lanes):
                    a[corner] = ptx.fma(top[k * lanes + i], pixels[(4 * k + corner) * lanes + i], a[corner])
        if adds:
            add_all(total, at, corners, w, top, f, count)

    @ptx.inline
    def gradient(x, places, dy, total, image, i, j, vector, end, f):
        s, t = locate(places, image, i, j, f)
        (column, right), (row, down) = find(s, f.in_w), find(t, f.in_h)
        first, second, left, next_ = hat(down), hat(down - real(1.0)), hat(right), hat(right - real(1.0))
        start = integer(image * f.x_n + row * f.x_h + column * f.x_w)
        of_top = integer(image * f.y_n + i * f.y_h + j * f.y_w)
        corners = integer(0), integer(f.right), integer(f.down), integer(f.down + f.right)
        w = first * left, first * next_, second * left, second * next_
        top, pixels = ptx.cuda.local.array(tops, real), ptx.cuda.local.array(four, real)
        a = ptx.cuda.local.array(4, real)
        for k in range(4):
            a[k] = real(0.0)
        if at_once > 1:
            while vector + (at_once - 1) * threads < end:
                at, to = integer(start + vector * f.x_v), integer(of_top + vector * f.y_v)
                visit(x, dy, total, at, to, corners, w, top, pixels, a, f, at_once)
                vector = integer(vector + at_once * threads)
        while vector < end:
            at, to = integer(start + vector * f.x_v), integer(of_top + vector * f.y_v)
            visit(x, dy, total, at, to, corners, w, top, pixels, a, f, 1)
            vector = integer(vector + threads)
        return derive(a, right, down, f)

    return gradient


def _gradient_kernel(*specialised_on):
    """By outputs; found: of an affine map the parts of dtheta, else dgrid."""
    from nbdnn.kernels.cuda import ptx

    v = _Variant(Kind(*specialised_on[0]), *specialised_on[1:])
    kind = v.kind
    integer, real = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute]
    of_output, along, store_grid = _of_output(v), along_axis(kind.compute, kind.bits), store_slopes(kind, THREADS)
    place, store = output_place(kind, THREADS), store_sums(kind.compute, kind.bits, THREADS)

    @ptx.inline
    def found_by(x, places, dy, total, f):
        image, i, j, vector, end = place(f)
        s, t = real(0.0), real(0.0)
        if i < f.out_h and j < f.out_w:
            s, t = of_output(x, places, dy, total, image, i, j, vector, end, f)
        return image, i, j, s, t

    def add_affine(x, places, dy, total, parts, f):
        _, i, j, s, t = found_by(x, places, dy, total, f)
        u, w = along(j, f.out_w), along(i, f.out_h)
        groups, _ = ptx.divided(integer(f.vectors + f.group - 1), f.group)
        part = integer(ptx.block_x() * groups + ptx.block_y())
        store(parts, integer(part * SUMS), (s * u, s * w, s, t * u, t * w, t))

    def add_grid(x, places, dy, total, dgrid, f):
        image, i, j, s, t = found_by(x, places, dy, total, f)
        store_grid(dgrid, image, i, j, s, t, f)

    data, parameters, compute = ptx.pointer(kind.dtype), ptx.pointer(kind.param_dtype), ptx.pointer(kind.compute)
    found = compute if kind.affine else parameters
    return add_affine if kind.affine else add_grid, (
        data, parameters, data, compute, found, ptx.record(Fields, kind.bits)
    )  # fmt: skip


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
        found = configs(problem, device, self._of_pixels, self._vector(problem))
        if problem.is_affine:
            return tuple(dict.fromkeys(self._whole(problem, config) for config in found))
        # Of a grid, the threads of one position have all of its channels; one output after the other has one order.
        either = self.algorithm != "ordered"
        every = (config._replace(group=max(problem.c, 1), rows=config.rows and either) for config in found)
        return tuple(dict.fromkeys(every))

    @property
    def _of_pixels(self) -> bool:
        """Whether a thread has a pixel, not an output."""
        return self.algorithm == "gather"

    def _vector(self, problem: SpatialtfProblem) -> int:
        """Channels that a thread loads as one. Where they are added to memory they are what one instruction adds:
        more of them, which neighbouring threads would add in several turns, lie apart in each, and cost the
        second-level cache twice as much (64x64x56x56 in float16 on an H200: 168 us, with four 113)."""
        lanes = vector_lanes(problem)
        return min(lanes, _LANES) if self.algorithm == "atomic" else lanes

    def _whole(self, problem: SpatialtfProblem, config: Config) -> Config:
        """With blocks whose threads have no channels left over."""
        step = config.threads * self._at_once(problem, config)
        return config._replace(group=min(-(-config.group // step) * step, max(config.group, problem.c)))

    def estimate(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> float:
        moved_us, lanes = problem.min_bytes / copy_bytes_per_s(device) * 1e6, self._vector(problem)
        base_us, pixels = _LAUNCH_US + _OVER_COPY[self.algorithm] * moved_us, prod(problem.spatial)
        if self.algorithm == "gather":
            near, at_once = visits(problem), max(1, self._at_once(problem, config) * lanes)
            turns = ceil(problem.c / at_once) * problem.n * pixels
            bound_us = issued_us(problem, turns, _PIXEL, _VISIT + _CHANNEL * min(problem.c, at_once), device)
            bound_us += self._lines(problem, config, pixels) * near * _GATHERED_LINE_NS / 1e3 / device.sms
            wait_us = waited_us(problem, config, pixels, lanes, near * _GATHERED_US, device)
            return max(base_us, _LAUNCH_US + bound_us, _LAUNCH_US + wait_us)
        if self.algorithm == "ordered":
            return base_us + problem.positions * _ORDERED_NS / 1e3
        crowd = 1 + _CROWDED * max(0.0, problem.positions / pixels - 1)
        add_us = adding_us(problem, problem.channels_last) * crowd
        add_us += self._lines(problem, config, problem.positions) * _ADDED_LINE_NS / 1e3 / device.sms
        return base_us + max(add_us, waited_us(problem, config, problem.positions, lanes, _ADDED_US, device))

    def _lines(self, problem: SpatialtfProblem, config: Config, places: int) -> int:
        """Of memory, that the threads of so many places of an image ask for, where neighbours are channels."""
        if not problem.channels_last or problem.c <= FEW_CHANNELS:
            return 0
        vectors = problem.c // self._vector(problem)
        return problem.n * places * ceil(vectors / min(config.threads, vectors))

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
        _, integers, grid = self._launched(problem, config)
        return integers.blocks * grid[1]

    def _launched(self, problem: SpatialtfProblem, config: Config) -> tuple[Kind, Fields, tuple[int, int, int]]:
        return launched(problem, config, self._of_pixels, lanes=self._vector(problem))

    def _at_once(self, problem: SpatialtfProblem, config: Config) -> int:
        """Vectors of channels that a thread takes at once: as many as may be, in turns of one length."""
        lanes = self._vector(problem)
        of_a_thread = ceil(min(config.group, problem.c // lanes) / config.threads)
        most = max(1, _HELD_BYTES // (lanes * ITEMSIZE[problem.compute]))
        return ceil(of_a_thread / max(1, ceil(of_a_thread / most)))

    def launches(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> list[Launch]:
        kind, integers, grid = self._launched(problem, config)
        vectors = device.capability >= _VECTOR_ADDS and problem.align % 16 == 0
        mode = "" if self.algorithm == "ordered" else self.algorithm
        total_bytes = self._total_bytes(problem)
        total = in_workspace(0) if total_bytes else 3
        found = in_workspace(total_bytes) if problem.is_affine else 4
        row = self._row_elems(problem, config, device) if mode == "atomic" else 0
        at_once = self._at_once(problem, config)
        min_blocks = _MIN_BLOCKS_OF_PIXELS if mode == "gather" else _MIN_BLOCKS
        min_blocks = _MIN_BLOCKS_WIDE if problem.compute == "f64" or kind.bits == 64 else min_blocks
        if mode == "gather":
            source = Source(gather_kernel, (tuple(kind), at_once), THREADS, min_blocks)
        else:
            source = Source(_gradient_kernel, (tuple(kind), mode, vectors, at_once, row), THREADS, min_blocks)
        main = Launch(source, grid, (0, 1, 2, total if mode else NULL, found), "", integers, kind.bits)
        after = [theta_launch(problem, self._parts(problem, config), found, 4)] if problem.is_affine else []
        if self.algorithm == "atomic":
            return [self._cleared(problem, total), main, *after, *self._rounded(problem, total_bytes)]
        if self.algorithm == "ordered":
            return [main, ordered(problem, kind, integers, total)]
        return [main, *after]

    def _row_elems(self, problem: SpatialtfProblem, config: Config, device: Gpu) -> int:
        """Of two neighbouring pixels, where they lie side by side and vectors may reach beyond them; else 0."""
        whole = problem.align % 16 == 0 or problem.dtype != problem.compute
        whole = whole and problem.operands[0].size_elems % _LANES == 0 and problem.spatial[1] > 1
        if device.capability < _VECTOR_ADDS or problem.compute != "f32" or not whole:
            return 0
        if not problem.channels_last:
            return 2
        return 2 * PIXEL if problem.c == config.group == PIXEL and config.threads == 1 else 0

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
