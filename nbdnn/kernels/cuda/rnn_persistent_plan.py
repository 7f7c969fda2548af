"""How the persistent kernels of recurrent networks are laid out: which layouts fit, and a guess at a step of each.

A layout fits where a thread's weights and what it computes with fit its registers, of which a multiprocessor has 64 K,
and what a block copies ahead its shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.peaks import shared_bytes
from nbdnn.kernels.cuda.rnn_plan import index_bits
from nbdnn.problem_rnn import RnnProblem

_REGISTERS, _MOST_REGISTERS, _MOST_THREADS = 65536, 255, 1024
_OTHERS = 42  # registers of a thread that are no weights, with one image
_OF_IMAGE = 10  # of every further image
_IMAGES, _CLUSTERS = (1, 2, 4), (1, 2, 4, 8)
_MOST_CONFIGS = 3
# Cycles of a step on an H200: of its chain; of a scheduler for each of its warps beside the multiply-adds, and for each
# of its images; and of a cluster's barrier, with what each of its blocks adds.
_CHAIN_CYCLES, _WARP_CYCLES, _CLUSTER_CYCLES, _BLOCK_CYCLES = 280, 96, 550, 30
_SCHEDULERS = 4
_LARGE_CLUSTER, _SHARE_OF_SMS = 8, 0.9


class Config(NamedTuple):
    """lanes: threads that share a sum. cluster: blocks that share a direction of some images. images: of them."""

    lanes: int
    cluster: int
    images: int

    def __str__(self) -> str:
        return f"l{self.lanes}c{self.cluster}i{self.images}"


class Layout(NamedTuple):
    """threads, shared_bytes: of a block. weights: of a thread."""

    threads: int
    weights: int
    shared_bytes: int

    def fits(self, images: int, device: Gpu) -> bool:
        if self.threads > _MOST_THREADS or self.shared_bytes > shared_bytes(device):
            return False
        there = min(_MOST_REGISTERS, _REGISTERS // self.threads // 8 * 8)
        return self.weights + _OTHERS + (images - 1) * _OF_IMAGE <= there


def blocks(problem: RnnProblem, config: Config) -> int:
    """Of the grid's first axis."""
    return ceil(problem.batch / config.images) * config.cluster


def _clusters(device: Gpu, blocks: int) -> int:
    """How many clusters the device has room for, a block on each multiprocessor: those of one have to be neighbours."""
    return device.sms // blocks if blocks < _LARGE_CLUSTER else int(_SHARE_OF_SMS * device.sms) // blocks


def step_us(problem: RnnProblem, config: Config, layout: Layout, device: Gpu) -> float:
    """A step of all images, some of which may have to wait for others."""
    of_sm = max(1, min(2048 // layout.threads, _REGISTERS // (layout.threads * (layout.weights + _OTHERS))))
    there = problem.directions * blocks(problem, config)
    waves = ceil(there / (_clusters(device, config.cluster) * config.cluster * of_sm))
    together = min(of_sm, ceil(there / device.sms))
    warps = max(1.0, together * layout.threads / 32 / _SCHEDULERS)
    cycles = _CHAIN_CYCLES + warps * config.images * (_WARP_CYCLES + layout.weights)
    if config.cluster > 1:
        cycles += _CLUSTER_CYCLES + _BLOCK_CYCLES * config.cluster
    return waves * cycles / device.clock_hz * 1e6


def configs(
    problem: RnnProblem, device: Gpu, lanes: tuple[int, ...], layout: Callable[[RnnProblem, Config], Layout]
) -> tuple[Config, ...]:
    """Those that fit, by their guesses."""
    clusters = _CLUSTERS if device.capability >= (9, 0) else (1,)
    every = [Config(*each) for each in product(lanes, clusters, _IMAGES)]
    fitting = [
        config
        for config in every
        if config.cluster <= config.lanes
        and config.images < 2 * problem.batch
        and layout(problem, config).fits(config.images, device)
    ]
    fitting.sort(key=lambda config: step_us(problem, config, layout(problem, config), device))
    return tuple(fitting[:_MOST_CONFIGS])


def support(problem: RnnProblem, found: tuple[Config, ...]) -> Support:
    """found: the configs that fit."""
    if problem.dtype == "f64":
        return Support(False, "dtype is f64, this kernel computes in f32")
    if index_bits(problem) != 32:
        return Support(False, f"{problem.steps} steps of {problem.batch} images reach 2^31 elements")
    if not found:
        return Support(False, f"{problem.parameters.gates} x {problem.hidden}^2 weights fit no cluster's registers")
    return YES
