"""Inference of batch normalisation by threads that belong to no channel: each has one vector, or two far apart.

    thread   1. asks for its vectors   2. finds the channels of their elements, and asks for what is known of these
             3. finds coefficients, and scales

Of planes a vector may begin in one and end in the next: these need no threads of their own, nor an extent that vectors
divide. Where neighbours are channels, both vectors have the same ones. Coefficients are found anew by every thread,
which memory hides: faster than blocks that go down a column (`bn_streamed.py`) as long as blocks are few, and in
float32 however many there are. Traffic: x and y once; parameters from the caches. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import bn_plan as plan
from nbdnn.kernels.cuda.bn_plan import Variant
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_bn import BnProblem

_THREADS, _MIN_BLOCKS = 256, 6
_VECTOR_BYTES = 16
_LAUNCH_US = {1: 1.4, 2: 1.75}  # by a thread's vectors
_AT_ONCE = tuple(_LAUNCH_US)
_BLOCKS_AT_ONCE = 8  # of a multiprocessor
# Of a copy's rate; of 16-bit data by (whether neighbours are of one channel, a thread's vectors).
_SHARE_OF_COPY = 0.95
_SHARE_OF_NARROW = {(True, 1): 0.86, (True, 2): 0.92, (False, 1): 0.7, (False, 2): 0.94}


class Flat(NamedTuple):
    """Vectors of a thread."""

    at_once: int

    def __str__(self) -> str:
        return f"{self.at_once}"


class _Fields(NamedTuple):
    """apart: elements from a thread's vector to its next. inner: neighbours of one channel."""

    elements: int
    apart: int
    inner: int
    channels: int


def _kernel(at_once: int, is_planar: bool, param_lanes: int, *specialised_on):
    """param_lanes: parameters that one instruction asks for, where neighbours are channels."""
    from nbdnn.kernels.cuda import bn_block, bn_channel, ptx, ptx_local

    v = Variant(*specialised_on)
    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    lanes, threads = v.lanes, v.threads
    known, finish = bn_channel.known(v), bn_channel.finish(v)
    part, parts, load_one, widen_one = bn_block.on_their_way(v)
    scale_one, four_arrays = bn_block.scale_one(v), bn_block.four_arrays(lanes, v.compute)
    load, size = ptx_local.load(v.param_dtype, param_lanes), at_once * parts

    @ptx.inline
    def finished(of_known, params, channel, epsilon, factor):
        return finish(of_known, params, channel, real(0.0), real(1.0), real(0.0), real(0.0), epsilon, factor, False)

    @ptx.inline
    def of_planes(coefficients, params, at, epsilon, factor, f):
        center, _, scale, offset = coefficients
        plane, place = ptx.divided(at, f.inner)
        _, channel = ptx.divided(plane, f.channels)
        behind = integer(channel + 1)
        if behind == f.channels:
            behind = integer(0)
        here = finished(known(params, channel), params, channel, epsilon, factor)
        there = finished(known(params, behind), params, behind, epsilon, factor)
        for lane in range(lanes):
            is_here = place + lane < f.inner
            center[lane] = here[0] if is_here else there[0]
            scale[lane] = here[2] if is_here else there[2]
            offset[lane] = here[3] if is_here else there[3]

    @ptx.inline
    def of_channels(coefficients, params, at, epsilon, factor, f):
        center, _, scale, offset = coefficients
        gamma, beta, mean, spread = params[0], params[1], params[2], params[3]
        of_gamma, of_beta, of_mean, of_spread = four_arrays()
        _, channel = ptx.divided(at, f.channels)
        for first in range(0, lanes, param_lanes):
            some = integer(channel + first)
            load(of_gamma, first, gamma, some)
            load(of_beta, first, beta, some)
            load(of_mean, first, mean, some)
            load(of_spread, first, spread, some)
        for lane in range(lanes):
            of_known = (of_gamma[lane], of_beta[lane], of_mean[lane], of_spread[lane])
            center[lane], _, scale[lane], offset[lane] = finished(of_known, params, channel, epsilon, factor)

    find = of_planes if is_planar else of_channels

    def flat(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, epsilon, factor, f
    ):  # fmt: skip
        begin = integer((integer(ptx.block_x()) * threads + small(ptx.thread_x())) * lanes)
        if begin >= f.apart:
            return
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        values, coefficients = ptx.cuda.local.array(lanes, real), four_arrays()
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
        for i in range(at_once):
            at = integer(begin + i * f.apart)
            if at < f.elements:
                load_one(loaded, i, x, dy, at)
        for i in range(at_once):
            at = integer(begin + i * f.apart)
            if is_planar or i == 0:
                find(coefficients, params, at, epsilon, factor, f)
            if at < f.elements:
                widen_one(values, values, loaded, i)
                scale_one(coefficients, values, values, 0, out, at)

    data, param = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype)
    return flat, (data, data, data, *[param] * 10, real, real, ptx.record(_Fields, v.bits))


class FlatInference(LaunchedCandidate[Flat]):
    """Any inference."""

    op, algorithm = "bn_infer", "flat"

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        return YES

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Flat, ...]:
        rows, _, inner = problem.planes
        every = [Flat(at_once) for at_once in _AT_ONCE if inner > 1 or at_once <= max(1, rows)]
        return tuple(sorted(every, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: BnProblem, config: Flat, device: Gpu) -> float:
        is_planar, is_narrow = problem.planes[2] > 1, ITEMSIZE[problem.dtype] == 2
        share = _SHARE_OF_NARROW[is_planar, config.at_once] if is_narrow else _SHARE_OF_COPY
        moved_us = problem.min_bytes / (copy_bytes_per_s(device) * share) * 1e6
        waves = _blocks(problem, config) / (_BLOCKS_AT_ONCE * device.sms)
        # The last blocks are half as many as would be there at once.
        alone = (1 + ceil(waves) / waves) / 2 if waves > 1 else 1.0
        return _LAUNCH_US[config.at_once] + moved_us * alone

    def launches(self, problem: BnProblem, config: Flat, device: Gpu) -> list[Launch]:
        _, channels, inner = problem.planes
        v = plan.variant(problem, 1, _THREADS)._replace(planar=False, lanes=_lanes(problem))
        if config.at_once * _apart(problem, config) >= plan.INT32_END:  # the last vectors may lie far behind the end
            v = v._replace(bits=64)
        param_lanes = min(v.lanes, min(problem.align, _VECTOR_BYTES) // ITEMSIZE[problem.param_dtype])
        return [
            Launch(
                source=Source(_kernel, (config.at_once, inner > 1, param_lanes, *v), _THREADS, _MIN_BLOCKS),
                grid=(_blocks(problem, config), 1, 1),
                pointers=plan.pointers(problem),
                scalars=v.compute,
                integers=_Fields(problem.operands[0].size_elems, _apart(problem, config), inner, channels),
                integer_bits=v.bits,
            )
        ]


def _lanes(problem: BnProblem) -> int:
    """Of a vector: of planes, none reaches farther than into the next, nor beyond the last."""
    if problem.planes[2] == 1:
        return problem.vector_bytes // ITEMSIZE[problem.dtype]
    most, lanes = min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype], 1
    while 2 * lanes <= min(most, problem.planes[2]) and problem.operands[0].size_elems % (2 * lanes) == 0:
        lanes *= 2
    return lanes


def _apart(problem: BnProblem, config: Flat) -> int:
    """Whole rows of channels, else whole vectors."""
    _, channels, inner = problem.planes
    step = max(1, channels) if inner == 1 else _lanes(problem)
    return step * ceil(problem.operands[0].size_elems / (step * config.at_once))


def _blocks(problem: BnProblem, config: Flat) -> int:
    return ceil(_apart(problem, config) / (_lanes(problem) * _THREADS))


INFER = FlatInference()
