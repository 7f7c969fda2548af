"""How the recurrent networks' kernels that share R out over the whole GPU are laid out: which layouts fit, and a guess.

A group of blocks has all of R, some of its units each, for some images, a piece of them after the other: while a piece
is passed around, its blocks compute another one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.peaks import shared_bytes
from nbdnn.kernels.cuda.rnn_passing import registers_of
from nbdnn.kernels.cuda.rnn_plan import index_bits
from nbdnn.problem_rnn import RnnProblem

VALUES = 32  # of a warp's piece: one for each lane, in the end
_OTHERS = 72  # registers of a thread that hold no weights
_WARPS, _PIECES = (4, 8, 12, 16), (1, 2, 3, 4, 5, 6, 8)
_MOST_CONFIGS = 8
_LEAST_HIDDEN = 129  # fewer fit a cluster
_GENERATION = 9  # whose warps share out registers as they need them
# Cycles of a piece: of a scheduler for each of its warps beside the multiply-adds; of a block from when it has told a
# piece until it has what the others told.
_WARP_CYCLES, _PASS_CYCLES, _BARRIER_CYCLES = 260, 2600, 150
_L2_BYTES_A_CYCLE = 24  # of a multiprocessor, while all read
_SCHEDULERS = 4


class Config(NamedTuple):
    """units: of a warp. warps: of a block. pieces: that a block takes in turns."""

    units: int
    warps: int
    pieces: int

    def __str__(self) -> str:
        return f"u{self.units}w{self.warps}p{self.pieces}"


class Layout(NamedTuple):
    """weights: of a thread. shared_bytes: of a block. images: of a piece. peers: blocks of a group. passed: elements of
    an image that a block reads."""

    weights: int
    shared_bytes: int
    images: int
    peers: int
    passed: int

    def fits(self, problem: RnnProblem, config: Config, device: Gpu) -> bool:
        _, there = registers_of(config.warps)
        blocks = self.peers * slabs(problem, config, self.images) * problem.directions
        return (
            self.weights + _OTHERS <= there and self.shared_bytes <= shared_bytes(device) and blocks <= device.sms
        )  # fmt: skip


def slabs(problem: RnnProblem, config: Config, images: int) -> int:
    """Groups of a direction."""
    return ceil(problem.batch / (images * config.pieces))


def step_us(config: Config, layout: Layout, device: Gpu) -> float:
    of_scheduler = config.warps / _SCHEDULERS
    compute = of_scheduler * (_WARP_CYCLES + layout.weights * layout.images) + _BARRIER_CYCLES
    passing = layout.passed * layout.images * 4 / _L2_BYTES_A_CYCLE
    piece = max(compute, passing)
    step = max(config.pieces * piece, compute + passing + _PASS_CYCLES)
    return step / device.clock_hz * 1e6


def configs(
    problem: RnnProblem, device: Gpu, units: tuple[int, ...], layout: Callable[[RnnProblem, Config], Layout]
) -> tuple[Config, ...]:  # fmt: skip
    """Those that fit, by their guesses."""
    every = (Config(*each) for each in product(units, _WARPS, _PIECES))
    fitting = [
        (step_us(config, found, device), config)
        for config, found in ((config, layout(problem, config)) for config in every)
        if found.images * config.pieces < 2 * max(problem.batch, found.images) and found.fits(problem, config, device)
    ]
    return tuple(config for _, config in sorted(fitting)[:_MOST_CONFIGS])


def support(problem: RnnProblem, found: tuple[Config, ...], device: Gpu) -> Support:
    """found: the configs that fit."""
    if problem.dtype == "f64":
        return Support(False, "dtype is f64, this kernel computes in f32")
    if device.capability[0] != _GENERATION:
        major, minor = device.capability
        return Support(False, f"compute capability {major}.{minor}, registers are shared out by 9.0")
    if problem.hidden < _LEAST_HIDDEN:
        return Support(False, f"{problem.hidden} hidden units: a few blocks have all of R, by numba/persistent")
    if index_bits(problem) != 32:
        return Support(False, f"{problem.steps} steps of {problem.batch} images reach 2^31 elements")
    if not found:
        images = f"{problem.batch} images of {problem.hidden} units"
        return Support(False, f"{images} do not fit the registers of {device.sms} multiprocessors")
    return YES
