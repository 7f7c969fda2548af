"""The spatial transformer's forward on the CPU, affine or by a grid: a run of outputs is planned once for all channels.

    y[n, c, i, j] = sum over four pixels of weight * x[n, c, pixel],   pixels and weights of (n, i, j): spatialtf_plan

    planar    lanes are outputs of one channel, whose pixels are gathered; any layout
    channels  lanes are channels of one output, whose pixels are read whole; channels-last

A task is a run of outputs of one image. No grid is made. Traffic: y once; each pixel of x once, and from cache for
every output that is near it. Positions and sums in float32 (float64). Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.spatialtf_channels import blend, channel_lanes
from nbdnn.kernels.cpu.spatialtf_plan import MOST_PIXELS, PLAN_VECTORS
from nbdnn.kernels.cpu.spatialtf_planes import sample_run
from nbdnn.kernels.cpu.spatialtf_tasks import FIELDS, Runs, plan_run
from nbdnn.kernels.cpu.vector import pointer, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_MOST_EXTENT = 2**24  # whose pixels float32 numbers one by one
# One thread, nanoseconds an output; a plan's share of a position: priors for the guess.
_PLANAR_NS, _APART_NS, _CHANNELS_NS, _PLAN_NS = 1.0, 1.5, 0.15, 0.8
_PIXEL_NS = 3.0, 4.3  # with wide vectors, with others


@cache
def _planar_task(affine: bool, dtype: str, param_dtype: str, pairs: bool, apart: bool, vl: int):
    """A run of outputs, channel by channel."""
    i64, at = pointer("i64"), struct(FIELDS)
    plan_outputs, sample = (
        plan_run(affine, param_dtype, DEFAULT_COMPUTE[dtype], vl),
        sample_run(dtype, pairs, apart, vl),
    )

    def sample_outputs(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        plan = f.scratch + worker * f.scratch_bytes
        image, first = index // f.runs, index % f.runs * f.run
        n = min(f.run, f.outputs - first)
        plan_outputs(plan, pointers[1], image, first, n, f)
        x = pointers[0] + image * f.x_image
        y = pointers[2] + image * f.y_image + first * f.pixel_bytes
        for c in range(f.channels):
            sample(y + c * f.y_channel, plan, x + c * f.x_channel, n, f.pixel_bytes, f.right, f.down)

    return compile_task(sample_outputs, (affine, dtype, param_dtype, pairs, apart, vl))


@cache
def _channels_task(affine: bool, dtype: str, param_dtype: str, vl: int, lanes: int):
    """A run of outputs, one by one. lanes: of vectors of channels."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, numbers, reals = pointer("i64"), struct(FIELDS), whole_numbers(compute), pointer(compute)
    plan_outputs, blend_pixels = plan_run(affine, param_dtype, compute, vl), blend(dtype, lanes)
    vector_bytes = vl * ITEMSIZE[compute]

    def blend_outputs(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        plan = f.scratch + worker * f.scratch_bytes
        image, first = index // f.runs, index % f.runs * f.run
        n = min(f.run, f.outputs - first)
        plan_outputs(plan, pointers[1], image, first, n, f)
        x = pointers[0] + image * f.x_image
        y = pointers[2] + image * f.y_image + first * f.pixel_bytes
        for j in range(n):
            block, lane = plan + j // vl * PLAN_VECTORS * vector_bytes, j % vl
            source, w = x + numbers(block)[lane] * f.pixel_bytes, reals(block + vector_bytes)
            blend_pixels(
                y + j * f.pixel_bytes, source, f.right, f.down, f.channels,
                w[lane], w[vl + lane], w[2 * vl + lane], w[3 * vl + lane],
            )  # fmt: skip

    return compile_task(blend_outputs, (affine, dtype, param_dtype, vl, lanes))


def whole_numbers(compute: str):
    """Intrinsic: address -> integers as wide as the compute type."""
    return pointer("i32" if compute == "f32" else "i64")


class Forward(Candidate[NoConfig, Cpu]):
    provider = "cpu"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: SpatialtfProblem, device: Cpu) -> Support:
        return counts_pixels(problem)

    def program(self, problem: SpatialtfProblem, device: Cpu, task) -> Program:
        runs = Runs(problem, device)
        return Program([Phase(task, problem.n * runs.runs, runs.record)], [runs.memory])


def counts_pixels(problem: SpatialtfProblem) -> Support:
    """Whether there are channels, and an int32 counts the pixels of a plane."""
    if not problem.c:
        return Support(False, "0 channels")
    if problem.compute == "f32" and max(problem.spatial) > _MOST_EXTENT:
        return Support(False, f"{max(problem.spatial)} pixels along an axis, of which float32 knows {_MOST_EXTENT}")
    pixels = problem.spatial[0] * problem.spatial[1]
    if pixels > MOST_PIXELS:
        return Support(False, f"{pixels} pixels a plane, at most {MOST_PIXELS} have an int32 number")
    return YES


def gathers_pairs(problem: SpatialtfProblem) -> bool:
    """Whether two pixels side by side are one element to gather."""
    return problem.dtype != "f64" and problem.spatial[1] > 1 and lies_by_planes(problem)


def lies_by_planes(problem: SpatialtfProblem) -> bool:
    """Whether neighbours of a row lie side by side."""
    return not problem.channels_last or problem.c == 1


class Planar(Forward):
    """Channel by channel; supports every layout."""

    algorithm = "planar"

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        each_ns = _PLANAR_NS if lies_by_planes(problem) else _APART_NS
        outputs_ns = problem.n * problem.positions * (problem.c * each_ns + _PLAN_NS)
        return kernel_us(device, 0.0, outputs_ns, device.threads)

    def prepare(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> Program:
        how = gathers_pairs(problem), not lies_by_planes(problem)
        vl = device.lanes(problem.compute)
        task = _planar_task(problem.is_affine, problem.dtype, problem.param_dtype, *how, vl)
        return self.program(problem, device, task)


class Channels(Forward):
    """Output by output, all channels at once."""

    algorithm = "channels"

    def supports(self, problem: SpatialtfProblem, device: Cpu) -> Support:
        return counts_pixels(problem) if problem.channels_last else NOT_LAST

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        positions = problem.n * problem.positions
        outputs_ns = positions * (problem.c * _CHANNELS_NS + fitted(device, *_PIXEL_NS) + _PLAN_NS)
        return kernel_us(device, 0.0, outputs_ns, device.threads)

    def prepare(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> Program:
        vl = device.lanes(problem.compute)
        task = _channels_task(problem.is_affine, problem.dtype, problem.param_dtype, vl, channel_lanes(problem.c, vl))
        return self.program(problem, device, task)


NOT_LAST = Support(False, "layout nchw: the channels of a pixel do not lie side by side")
PLANAR, CHANNELS = Planar("spatialtf_fwd"), Channels("spatialtf_fwd")
SAMPLER_PLANAR, SAMPLER_CHANNELS = Planar("spatialtf_sampler_fwd"), Channels("spatialtf_sampler_fwd")
