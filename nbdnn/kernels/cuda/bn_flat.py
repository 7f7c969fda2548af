"""Inference of batch normalisation over planes that lie one after the other: vectors that may begin in one plane and
end in the next.

    thread   1. asks for its vectors   2. finds the channel of each and the one behind it, and asks for their parameters
             3. scales

So planes need no threads of their own, nor an extent that vectors divide: short ones (7x7), whose blocks would have
little to do. A channel's coefficients are found anew for each vector. Traffic: x once, y once; parameters from the
first-level cache. Source: own.
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

_THREADS = 256
_VECTOR_BYTES = 16
_AT_ONCE = (1, 2, 4)
_LAUNCH_US, _VECTOR_US = 1.6, 0.1  # of a launch; of a thread's vectors, one after the other
_SHARE_OF_COPY = 0.9


class Flat(NamedTuple):
    """Vectors of a thread."""

    at_once: int

    def __str__(self) -> str:
        return f"{self.at_once}"


class _Fields(NamedTuple):
    """elements: of all. inner: neighbours of one channel."""

    elements: int
    inner: int
    channels: int


def _kernel(at_once: int, *specialised_on):
    from nbdnn.kernels.cuda import bn_block, bn_channel, ptx

    v = Variant(*specialised_on)
    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    lanes, threads = v.lanes, v.threads
    known, finish = bn_channel.known(v), bn_channel.finish(v)
    part, parts, load_one, widen_one = bn_block.on_their_way(v)
    scale_one, four_arrays = bn_block.scale_one(v), bn_block.four_arrays(lanes, v.compute)
    size = at_once * parts

    @ptx.inline
    def of_channel(params, channel, epsilon, factor):
        of_known = known(params, channel)
        return finish(of_known, params, channel, real(0.0), real(1.0), real(0.0), real(0.0), epsilon, factor, False)

    def flat(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, epsilon, factor, f
    ):  # fmt: skip
        begin = integer((integer(ptx.block_x()) * (at_once * threads) + small(ptx.thread_x())) * lanes)
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        values = ptx.cuda.local.array(lanes, real)
        center, none, scale, offset = four_arrays()
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
        for i in range(at_once):
            at = integer(begin + i * threads * lanes)
            if at < f.elements:
                load_one(loaded, i, x, dy, at)
        for i in range(at_once):
            at = integer(begin + i * threads * lanes)
            plane, place = ptx.divided(at, f.inner)
            _, channel = ptx.divided(plane, f.channels)
            behind = integer(channel + 1)
            if behind == f.channels:
                behind = integer(0)
            here, there = of_channel(params, channel, epsilon, factor), of_channel(params, behind, epsilon, factor)
            for lane in range(lanes):
                is_here = place + lane < f.inner
                center[lane] = here[0] if is_here else there[0]
                scale[lane] = here[2] if is_here else there[2]
                offset[lane] = here[3] if is_here else there[3]
            if at < f.elements:
                widen_one(values, values, loaded, i)
                scale_one((center, none, scale, offset), values, values, 0, out, at)

    data, param = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype)
    return flat, (data, data, data, *[param] * 10, real, real, ptx.record(_Fields, v.bits))


class FlatPlanes(LaunchedCandidate[Flat]):
    """Inference in planes of at least two elements."""

    op, algorithm = "bn_infer", "flat"

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        return YES if problem.planes[2] > 1 else Support(False, "neighbours are of different channels, not of a plane")

    def configs(self, problem: BnProblem, device: Gpu) -> tuple[Flat, ...]:
        return tuple(sorted(map(Flat, _AT_ONCE), key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: BnProblem, config: Flat, device: Gpu) -> float:
        moved_us = problem.min_bytes / (copy_bytes_per_s(device) * _SHARE_OF_COPY) * 1e6
        waves = ceil(_blocks(problem, config) / (8 * device.sms))
        return _LAUNCH_US + max(moved_us, waves * config.at_once * _VECTOR_US)

    def launches(self, problem: BnProblem, config: Flat, device: Gpu) -> list[Launch]:
        _, channels, inner = problem.planes
        v = plan.variant(problem, 1, _THREADS)._replace(planar=False, lanes=_lanes(problem))
        return [
            Launch(
                source=Source(_kernel, (config.at_once, *v), _THREADS),
                grid=(_blocks(problem, config), 1, 1),
                pointers=plan.pointers(problem),
                scalars=v.compute,
                integers=_Fields(problem.operands[0].size_elems, inner, channels),
                integer_bits=v.bits,
            )
        ]


def _lanes(problem: BnProblem) -> int:
    """Of a vector: none reaches farther than into the next plane, nor beyond the last."""
    itemsize, lanes = ITEMSIZE[problem.dtype], 1
    most = min(_VECTOR_BYTES, problem.align) // itemsize
    while 2 * lanes <= min(most, problem.planes[2]) and problem.operands[0].size_elems % (2 * lanes) == 0:
        lanes *= 2
    return lanes


def _blocks(problem: BnProblem, config: Flat) -> int:
    return ceil(problem.operands[0].size_elems / (_lanes(problem) * _THREADS * config.at_once))


INFER = FlatPlanes()
