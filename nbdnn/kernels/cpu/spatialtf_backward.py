"""The spatial transformer's gradients on the CPU, affine or by a grid: a run of outputs is planned for all channels.

    dx[n, c, pixel] = sum over outputs that are near it of weight * dy[n, c, output]
    a[k] = sum over c of dy[c] * x[c, pixel k],  dgrid = sum over the four pixels k of d weight[k] / d position * a[k]
    dtheta[n] = sum over outputs of dgrid^T (u, v, 1)

    planar    lanes are outputs of one channel; pixels are gathered, and added to one by one; any layout
    channels  lanes are channels of one output, whose pixels are read and added to whole; channels-last

A task is an image, or some of its channels where images are fewer than threads; so no two threads add to one element,
and results repeat bit by bit. 16-bit gradients are added up in float32 in the workspace and rounded once. What several
tasks have found of dgrid or dtheta is added up in their order when all are done.

Traffic: x, dy once, dx twice, from cache where neighbours share a pixel. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import njit
from numba.core.ccallback import CFunc

from nbdnn.candidate import Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.rows import convert_row, zero_fill
from nbdnn.kernels.cpu.spatialtf_channels import channel_lanes, spread_pixels
from nbdnn.kernels.cpu.spatialtf_forward import NOT_LAST, counts_pixels, gathers_pairs, lies_by_planes, whole_numbers
from nbdnn.kernels.cpu.spatialtf_plan import PLAN_VECTORS, slopes
from nbdnn.kernels.cpu.spatialtf_planes import spread_run
from nbdnn.kernels.cpu.spatialtf_sums import SUMS, add_parts_task, add_theta
from nbdnn.kernels.cpu.spatialtf_tasks import FIELDS, Runs, plan_run
from nbdnn.kernels.cpu.vector import NARROW, NUMBA_FLOAT, pointer, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_TASKS_PER_THREAD = 2
# One thread, nanoseconds an output and a pixel; a plan's share of a position: priors for the guess.
_PLANAR_NS, _APART_NS, _CHANNELS_NS, _PLAN_NS, _DX_NS = 2.0, 3.0, 0.3, 2.0, 0.1
_PIXEL_NS = 12.0, 8.5  # with wide vectors, with others


@cache
def _planar(dtype: str, pairs: bool, apart: bool, vl: int):
    """Compiled-in function (total, sums, plan, x, dy, first, n, low, end, f): channels low to end of a run of outputs.

    total, x and dy begin where the image does.
    """
    compute = DEFAULT_COMPUTE[dtype]
    wider, spread, zero = ITEMSIZE[compute] // ITEMSIZE[dtype], spread_run(dtype, pairs, apart, vl), zero_fill(compute)

    @njit(**DEVICE)
    def add(total, sums, plan, x, dy, first, n, low, end, f):
        zero(sums, 4 * f.run)
        for c in range(low, end):
            spread(
                total + c * f.x_channel * wider, sums, plan, x + c * f.x_channel,
                dy + c * f.y_channel + first * f.pixel_bytes, n, f.pixel_bytes, f.right, f.down,
            )  # fmt: skip

    return add


@cache
def by_channels(dtype: str, vl: int, lanes: int):
    """The same, output by output. lanes: of vectors of channels; vl: of the plan's vectors."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, real_bytes, real = ITEMSIZE[dtype], ITEMSIZE[compute], NUMBA_FLOAT[compute]
    spread, zero = spread_pixels(dtype, lanes), zero_fill(compute)
    numbers, reals = whole_numbers(compute), pointer(compute)
    vector_bytes, wider = vl * real_bytes, real_bytes // itemsize

    @njit(**DEVICE)
    def is_near(distance):
        return distance >= real(-1.0) and distance < real(2.0)

    @njit(**DEVICE)
    def add(total, sums, plan, x, dy, first, n, low, end, f):
        zero(sums, 4 * f.run)
        for j in range(n):
            block, lane = plan + j // vl * PLAN_VECTORS * vector_bytes, j % vl
            w = reals(block + vector_bytes)
            if is_near(w[4 * vl + lane]) and is_near(w[5 * vl + lane]):
                place = numbers(block)[lane] * f.pixel_bytes + low * itemsize
                spread(
                    total + place * wider, x + place, dy + (first + j) * f.pixel_bytes + low * itemsize, f.right,
                    f.down, end - low, sums + j // vl * 4 * vector_bytes + lane * real_bytes, vector_bytes,
                    w[lane], w[vl + lane], w[2 * vl + lane], w[3 * vl + lane],
                )  # fmt: skip

    return add


@cache
def _each_span(dtype: str, vl: int):
    """(clear, round): compiled-in functions over channels low to end of an image's gradient, which lie in spans.

    clear (total, low, end, f): zeros in the compute type. rounded (to, total, low, end, f): to the gradient's dtype.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, real_bytes, zero, narrow = (
        ITEMSIZE[dtype],
        ITEMSIZE[compute],
        zero_fill(compute),
        convert_row(compute, dtype, vl),
    )

    @njit(**DEVICE)
    def spans(low, end, f):
        """(spans, elements of each, elements from one to the next, first element)."""
        pixels = f.height * f.width
        if f.x_channel == itemsize and end - low < f.channels and pixels > 1:
            return pixels, end - low, f.channels, low
        return 1, (end - low) * pixels, 0, low * (f.x_channel // itemsize)

    @njit(**DEVICE)
    def clear(total, low, end, f):
        count, elements, step, first = spans(low, end, f)
        for i in range(count):
            zero(total + (first + i * step) * real_bytes, elements)

    @njit(**DEVICE)
    def rounded(to, total, low, end, f):
        count, elements, step, first = spans(low, end, f)
        for i in range(count):
            at = first + i * step
            narrow(to + at * itemsize, total + at * real_bytes, elements)

    return clear, rounded


@cache
def parts_of_image(affine: bool, part_dtype: str, in_place: bool):
    """Compiled-in function (parts, dgrid, image, block, f): where what a block finds of dtheta (zeros yet) or dgrid is.

    in_place: to dgrid itself; else to its part of those of all.
    """
    doubles, part_bytes = pointer("f64"), 2 * ITEMSIZE[part_dtype]

    @njit(**DEVICE)
    def of_theta(parts, dgrid, image, block, f):
        parts += (image * f.blocks + block) * SUMS * 8
        for k in range(SUMS):
            doubles(parts)[k] = 0.0
        return parts

    @njit(**DEVICE)
    def of_grid(parts, dgrid, image, block, f):
        start = dgrid if in_place else parts + block * f.images * f.outputs * part_bytes
        return start + image * f.outputs * part_bytes

    return of_theta if affine else of_grid


@cache
def run_parts(affine: bool, compute: str, part_dtype: str, vl: int):
    """Compiled-in function (parts, plan, sums, lines, first, n, f): what a run gives of dtheta or dgrid to `parts`.

    lines: room for two.
    """
    reals, elements, narrow = pointer(compute), pointer(part_dtype), NARROW[part_dtype]
    derive, to_theta = slopes(compute, vl), add_theta(compute)
    line_bytes, part_bytes = ITEMSIZE[compute], 2 * ITEMSIZE[part_dtype]

    @njit(**DEVICE)
    def of_theta(parts, plan, sums, lines, first, n, f):
        by_s, by_t = lines, lines + f.run * line_bytes
        derive(plan, sums, n, by_s, by_t, f.height, f.width)
        to_theta(parts, by_s, by_t, first, n, f)

    @njit(**DEVICE, fastmath=FASTMATH)
    def of_grid(parts, plan, sums, lines, first, n, f):
        by_s, by_t = lines, lines + f.run * line_bytes
        derive(plan, sums, n, by_s, by_t, f.height, f.width)
        pairs, s, t = elements(parts + first * part_bytes), reals(by_s), reals(by_t)
        for j in range(n):
            pairs[2 * j] = narrow(s[j])
            pairs[2 * j + 1] = narrow(t[j])

    return of_theta if affine else of_grid


@cache
def _task(affine: bool, dtype: str, param_dtype: str, how: tuple[bool, ...], in_place: bool, vl: int, lanes: int):
    """Some channels of one image. how: whether pixels are gathered in pairs and lie apart; () where channels are lanes,
    of vectors of so many. in_place: as `parts_of_image` has it."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, arguments, at = pointer("i64"), struct(ARGS), struct(FIELDS)
    plan_outputs = plan_run(affine, param_dtype, compute, vl)
    add = _planar(dtype, *how, vl) if how else by_channels(dtype, vl, lanes)
    (clear, rounded), is_wide = _each_span(dtype, vl), dtype == compute
    part_dtype = param_dtype if in_place else compute
    begin, finish = parts_of_image(affine, part_dtype, in_place), run_parts(affine, compute, part_dtype, vl)

    def add_image(args, ctx, index, worker):
        pointers, workspace, f = i64(args), arguments(args).workspace, at(ctx)
        image, block = index // f.blocks, index % f.blocks
        low, end = block * f.block_channels, min((block + 1) * f.block_channels, f.channels)
        plan = f.scratch + worker * f.scratch_bytes
        sums, lines = plan + f.sums_offset, plan + f.lines_offset
        x, dy, dx = pointers[0] + image * f.x_image, pointers[2] + image * f.y_image, pointers[3] + image * f.x_image
        total = dx if is_wide else workspace + worker * f.total_bytes
        clear(total, low, end, f)
        parts = begin(workspace + f.parts_offset, pointers[4], image, block, f)
        for first in range(0, f.outputs, f.run):
            n = min(f.run, f.outputs - first)
            plan_outputs(plan, pointers[1], image, first, n, f)
            add(total, sums, plan, x, dy, first, n, low, end, f)
            finish(parts, plan, sums, lines, first, n, f)
        if not is_wide:
            rounded(dx, total, low, end, f)

    return compile_task(add_image, (affine, dtype, param_dtype, how, in_place, vl, lanes))


class Backward(Candidate[NoConfig, Cpu]):
    provider = "cpu"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SpatialtfProblem, device: Cpu) -> Support:
        return counts_pixels(problem)

    def runs(self, problem: SpatialtfProblem, device: Cpu) -> Runs:
        """With blocks of channels that are tasks."""
        raise NotImplementedError

    def task(self, problem: SpatialtfProblem, device: Cpu, in_place: bool) -> CFunc:
        """A block of an image. in_place: as `parts_of_image` has it."""
        raise NotImplementedError

    def prepare(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> Program:
        runs = self.runs(problem, device)
        in_place = not problem.is_affine and runs.blocks == 1
        phases = [Phase(self.task(problem, device, in_place), problem.n * runs.blocks, runs.record)]
        if not in_place:
            add_up = add_parts_task(problem.is_affine, problem.compute, problem.param_dtype)
            phases.append(Phase(add_up, problem.n, runs.record, alone=problem.is_affine))
        return Program(phases, [runs.memory])


class _InLayout(Backward):
    """Of images as they lie."""

    def how(self, problem: SpatialtfProblem) -> tuple[bool, ...]:
        """What `_task` takes."""
        raise NotImplementedError

    def workspace_bytes(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> int:
        return _parts_offset(problem, device) + parts_bytes(problem, _blocks(problem, device))

    def runs(self, problem: SpatialtfProblem, device: Cpu) -> Runs:
        blocks = _blocks(problem, device)
        block_channels, offset = ceil(problem.c / blocks), _parts_offset(problem, device)
        return Runs(problem, device, blocks=blocks, block_channels=block_channels, parts_offset=offset)

    def task(self, problem: SpatialtfProblem, device: Cpu, in_place: bool) -> CFunc:
        vl = device.lanes(problem.compute)
        return _task(
            problem.is_affine, problem.dtype, problem.param_dtype, self.how(problem), in_place, vl,
            channel_lanes(problem.c, vl),
        )  # fmt: skip


def _blocks(problem: SpatialtfProblem, device: Cpu) -> int:
    """Of channels, which share an image: one where there are images enough for all threads."""
    wanted = ceil(_TASKS_PER_THREAD * device.threads / max(problem.n, 1))
    if device.threads == 1 or problem.n % device.threads == 0 or wanted == 1:
        return 1
    most = ceil(problem.c / device.lanes(problem.compute)) if problem.channels_last else problem.c
    block_channels = ceil(problem.c / min(wanted, max(most, 1)))
    return ceil(problem.c / block_channels)


def _parts_offset(problem: SpatialtfProblem, device: Cpu) -> int:
    """In the workspace, behind the sums of 16-bit gradients: an image of each thread's own."""
    if problem.dtype == problem.compute:
        return 0
    return device.threads * problem.operands[0].size_elems // max(problem.n, 1) * ITEMSIZE[problem.compute]


def parts_bytes(problem: SpatialtfProblem, blocks: int) -> int:
    """Of dtheta or dgrid, as each block of channels has found it."""
    if problem.is_affine:
        return problem.n * blocks * SUMS * 8
    return problem.n * blocks * problem.positions * 2 * ITEMSIZE[problem.compute] * (blocks > 1)


class Planar(_InLayout):
    """Channel by channel; supports every layout."""

    algorithm = "planar"

    def how(self, problem: SpatialtfProblem) -> tuple[bool, ...]:
        return gathers_pairs(problem), not lies_by_planes(problem)

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        each_ns = _PLANAR_NS if lies_by_planes(problem) else _APART_NS
        return _estimate(problem, device, problem.c * each_ns + _PLAN_NS)


class Channels(_InLayout):
    """Output by output, all channels at once."""

    algorithm = "channels"

    def supports(self, problem: SpatialtfProblem, device: Cpu) -> Support:
        return counts_pixels(problem) if problem.channels_last else NOT_LAST

    def how(self, problem: SpatialtfProblem) -> tuple[bool, ...]:
        return ()

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        pixel_ns = fitted(device, *_PIXEL_NS) + _PLAN_NS
        return _estimate(problem, device, problem.c * _CHANNELS_NS + pixel_ns)


def _estimate(problem: SpatialtfProblem, device: Cpu, position_ns: float) -> float:
    tasks = problem.n * _blocks(problem, device)
    side_ns = problem.n * problem.positions * position_ns + problem.operands[0].size_elems * _DX_NS
    return kernel_us(device, 0.0, side_ns, max(tasks, 1))


PLANAR, CHANNELS = Planar("spatialtf_bwd"), Channels("spatialtf_bwd")
SAMPLER_PLANAR, SAMPLER_CHANNELS = Planar("spatialtf_sampler_bwd"), Channels("spatialtf_sampler_bwd")
