"""The spatial transformer by pixels of whole vectors: some channels of an image are moved to memory of their own first.

    pixels[h * width + w][c] = x[n, c, h, w],   outputs and their gradients likewise

What is gathered from planes is a load an element; of pixels that are vectors four serve an output. Planes are turned,
channels-last pixels that fill no vector begin at whole ones, and those of 16 bits are widened once. Operands from
memory, two threads of a Zen 5, milliseconds:

    float32             8x64x56x56, planes    8x3x224x224, channels-last    8x12x112x112, channels-last
    planar, channels    1.34, gradient 2.7    1.02, gradient 2.9            0.38, gradient 1.3
    pixels              0.27, gradient 0.65   0.74, gradient 1.8            0.31, gradient 0.83

A task is a block of channels of one image, few enough that they stay in the second-level cache, if a vector of them
does. Runs of outputs are planned anew for each block. 16-bit gradients are added up in float32 and rounded once.

Traffic: as `spatialtf_forward` and `spatialtf_backward`; the pixels are written and read, mostly in cache. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import njit
from numba.core.ccallback import CFunc

from nbdnn.candidate import NoConfig
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.rows import convert_rows, zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.spatialtf_backward import Backward, by_channels, parts_bytes, parts_of_image, run_parts
from nbdnn.kernels.cpu.spatialtf_channels import blend, channel_lanes
from nbdnn.kernels.cpu.spatialtf_forward import Forward, whole_numbers
from nbdnn.kernels.cpu.spatialtf_plan import PLAN_VECTORS
from nbdnn.kernels.cpu.spatialtf_tasks import FIELDS, Runs, plan_run
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import pointer, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_MOST_RUN = 256  # outputs, which lie in the first-level cache as well as their plan
_TASKS_PER_THREAD = 2
# One thread, nanoseconds: priors for the guess.
_MOVE_NS = 0.08
_FORWARD_NS = (0.1, 2.2), (0.0, 5.2)  # a channel and an output; with wide vectors, with others
_BACKWARD_NS = (0.15, 6.5), (0.0, 11.0)


@njit(**DEVICE)
def _located(index, f):
    """(image, block, its first channel, channels) of a task."""
    image, block = index // f.blocks, index % f.blocks
    low = block * f.block_channels
    return image, block, low, min(f.block_channels, f.channels - low)


@cache
def _moves(dtype: str, last: bool, lanes: int):
    """(fetch, bring back): compiled-in functions (to, start, channel_bytes, channels, n, f) that move n pixels.

    From a tensor of the dtype, of which planes lie channel_bytes apart, to pixels of the compute type, and back.
    """
    compute, itemsize = DEFAULT_COMPUTE[dtype], ITEMSIZE[dtype]
    turn, turn_back = transpose(dtype, compute, lanes), transpose(compute, dtype, lanes)
    widen, narrow = convert_rows(dtype, compute, lanes, 1), convert_rows(compute, dtype, lanes, 1)

    @njit(**DEVICE)
    def turned(to, start, channel_bytes, channels, n, f):
        turn(to, f.pixel_bytes, start, channel_bytes, channels, n)

    @njit(**DEVICE)
    def turned_back(to, start, channel_bytes, channels, n, f):
        turn_back(to, channel_bytes, start, f.pixel_bytes, n, channels)

    @njit(**DEVICE)
    def widened(to, start, channel_bytes, channels, n, f):
        widen(to, f.pixel_bytes, start, f.channels * itemsize, n, channels, 0, channels)

    @njit(**DEVICE)
    def narrowed(to, start, channel_bytes, channels, n, f):
        narrow(to, f.channels * itemsize, start, f.pixel_bytes, n, channels, 0, channels)

    return (widened, narrowed) if last else (turned, turned_back)


@cache
def _forward_task(affine: bool, dtype: str, param_dtype: str, last: bool, vl: int, lanes: int):
    """A block of channels of an image, run by run. last: whether channels are; lanes: of vectors of them."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, arguments, at = pointer("i64"), struct(ARGS), struct(FIELDS)
    numbers, reals = whole_numbers(compute), pointer(compute)
    plan_outputs, blend_pixels = plan_run(affine, param_dtype, compute, vl), blend(compute, lanes)
    fetch, bring_back = _moves(dtype, last, lanes)
    vector_bytes, itemsize = vl * ITEMSIZE[compute], ITEMSIZE[dtype]

    def sample_channels(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        plan = f.scratch + worker * f.scratch_bytes
        pixels, outputs = arguments(args).workspace + worker * f.total_bytes, plan + f.pixels_offset
        image, _, low, channels = _located(index, f)
        x = pointers[0] + image * f.x_image + low * f.x_channel
        y = pointers[2] + image * f.y_image + low * f.y_channel
        step = f.channels * itemsize if last else itemsize
        fetch(pixels, x, f.x_channel, channels, f.height * f.width, f)
        for first in range(0, f.outputs, f.run):
            n = min(f.run, f.outputs - first)
            plan_outputs(plan, pointers[1], image, first, n, f)
            for j in range(n):
                of_plan, lane = plan + j // vl * PLAN_VECTORS * vector_bytes, j % vl
                w = reals(of_plan + vector_bytes)
                blend_pixels(
                    outputs + j * f.pixel_bytes, pixels + numbers(of_plan)[lane] * f.pixel_bytes, f.right, f.down,
                    channels, w[lane], w[vl + lane], w[2 * vl + lane], w[3 * vl + lane],
                )  # fmt: skip
            bring_back(y + first * step, outputs, f.y_channel, channels, n, f)

    return compile_task(sample_channels, (affine, dtype, param_dtype, last, vl, lanes))


@cache
def _backward_task(affine: bool, dtype: str, param_dtype: str, in_place: bool, last: bool, vl: int, lanes: int):
    """The same of the gradient; sums of dx lie behind the pixels."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, arguments, at = pointer("i64"), struct(ARGS), struct(FIELDS)
    plan_outputs, add = plan_run(affine, param_dtype, compute, vl), by_channels(compute, vl, lanes)
    (fetch, bring_back), zero = _moves(dtype, last, lanes), zero_fill(compute)
    part_dtype = param_dtype if in_place else compute
    begin, finish = parts_of_image(affine, part_dtype, in_place), run_parts(affine, compute, part_dtype, vl)
    itemsize, real_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]

    def add_channels(args, ctx, index, worker):
        pointers, workspace, f = i64(args), arguments(args).workspace, at(ctx)
        plan = f.scratch + worker * f.scratch_bytes
        sums, lines, outputs = plan + f.sums_offset, plan + f.lines_offset, plan + f.pixels_offset
        image, block, low, channels = _located(index, f)
        x_offset = image * f.x_image + low * f.x_channel
        dy = pointers[2] + image * f.y_image + low * f.y_channel
        size, pixels = f.height * f.width, workspace + worker * f.total_bytes
        total = pixels + size * f.pixel_bytes
        step = f.channels * itemsize if last else itemsize
        fetch(pixels, pointers[0] + x_offset, f.x_channel, channels, size, f)
        zero(total, size * f.pixel_bytes // real_bytes)
        parts = begin(workspace + f.parts_offset, pointers[4], image, block, f)
        for first in range(0, f.outputs, f.run):
            n = min(f.run, f.outputs - first)
            plan_outputs(plan, pointers[1], image, first, n, f)
            fetch(outputs, dy + first * step, f.y_channel, channels, n, f)
            add(total, sums, plan, pixels, outputs, 0, n, 0, channels, f)
            finish(parts, plan, sums, lines, first, n, f)
        bring_back(pointers[3] + x_offset, total, f.x_channel, channels, size, f)

    return compile_task(add_channels, (affine, dtype, param_dtype, in_place, last, vl, lanes))


def _lanes(problem: SpatialtfProblem, device: Cpu) -> int:
    return channel_lanes(problem.c, device.lanes(problem.compute))


def _block_channels(problem: SpatialtfProblem, device: Cpu) -> int:
    """Channels that are moved at once, in whole vectors."""
    lanes, pixels = _lanes(problem, device), problem.spatial[0] * problem.spatial[1]
    fit = device.l2_bytes // 4 // (pixels * ITEMSIZE[problem.compute])
    shared = problem.n * problem.c // (device.threads * _TASKS_PER_THREAD)
    return max(min(fit, shared, problem.c + lanes - 1) // lanes, 1) * lanes


def _runs(problem: SpatialtfProblem, device: Cpu, images: int) -> Runs:
    block_channels, total_bytes = _block_channels(problem, device), _worker_bytes(problem, device, images)
    return Runs(
        problem, device, _MOST_RUN, block_channels * ITEMSIZE[problem.compute], block_channels=block_channels,
        blocks=ceil(problem.c / block_channels), total_bytes=total_bytes, parts_offset=device.threads * total_bytes,
    )  # fmt: skip


def _worker_bytes(problem: SpatialtfProblem, device: Cpu, images: int) -> int:
    pixels = problem.spatial[0] * problem.spatial[1]
    return own_pages(images * pixels * _block_channels(problem, device) * ITEMSIZE[problem.compute])


class Samples(Forward):
    """Some channels at a time; supports every layout."""

    algorithm = "pixels"

    def workspace_bytes(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> int:
        return device.threads * _worker_bytes(problem, device, 1)

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        return _estimate(problem, device, 1, *fitted(device, *_FORWARD_NS))

    def prepare(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> Program:
        runs, vl = _runs(problem, device, 1), device.lanes(problem.compute)
        task = _forward_task(
            problem.is_affine, problem.dtype, problem.param_dtype, problem.channels_last, vl, _lanes(problem, device)
        )
        return Program([Phase(task, problem.n * runs.blocks, runs.record)], [runs.memory])


class Gradient(Backward):
    """Some channels at a time, and their gradients; supports every layout."""

    algorithm = "pixels"

    def workspace_bytes(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> int:
        blocks = ceil(problem.c / _block_channels(problem, device))
        return device.threads * _worker_bytes(problem, device, 2) + parts_bytes(problem, blocks)

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        return _estimate(problem, device, 2, *fitted(device, *_BACKWARD_NS))

    def runs(self, problem: SpatialtfProblem, device: Cpu) -> Runs:
        return _runs(problem, device, 2)

    def task(self, problem: SpatialtfProblem, device: Cpu, in_place: bool) -> CFunc:
        vl = device.lanes(problem.compute)
        return _backward_task(
            problem.is_affine, problem.dtype, problem.param_dtype, in_place, problem.channels_last, vl,
            _lanes(problem, device),
        )  # fmt: skip


def _estimate(problem: SpatialtfProblem, device: Cpu, images: int, channel_ns: float, output_ns: float) -> float:
    blocks = ceil(problem.c / _block_channels(problem, device))
    moved_ns = images * (problem.operands[0].size_elems + problem.n * problem.c * problem.positions) * _MOVE_NS
    outputs_ns = problem.n * problem.positions * (problem.c * channel_ns + blocks * output_ns)
    return kernel_us(device, 0.0, moved_ns + outputs_ns, problem.n * blocks)


FWD, BWD = Samples("spatialtf_fwd"), Gradient("spatialtf_bwd")
SAMPLER_FWD, SAMPLER_BWD = Samples("spatialtf_sampler_fwd"), Gradient("spatialtf_sampler_bwd")
