"""How the recurrent networks' kernels that share R out over the whole GPU are laid out: which layouts fit, a guess,
and what their candidates have in common.

A group of blocks has all of R, some of its units each, for some images, a piece of them after the other: while a piece
is passed around, its blocks compute another one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from itertools import product
from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rnn_layers
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.kernels.cuda.peaks import shared_bytes
from nbdnn.kernels.cuda.rnn_passing import Passing, registers_of
from nbdnn.kernels.cuda.rnn_plan import Memory, Workspace, index_bits
from nbdnn.problem_rnn import RnnProblem

VALUES = 32  # of a warp's piece: one for each lane, in the end
_OTHERS = 72  # registers of a thread that hold no weights
_WARPS, _PIECES = (4, 8, 12, 16), (1, 2, 3, 4, 5, 6, 8)
_MOST_CONFIGS = 3
_LEAST_HIDDEN = 129  # fewer have not been run, since `persistent` has all of them
_GENERATION = 9  # whose warps share out registers as they need them
# Cycles on an H200: of a block's piece, whatever its warps; of a load; from when a piece was told until it is there.
_PIECE_CYCLES, _LOAD_CYCLES, _PASS_CYCLES = 740, 26, 1950
_L2_BYTES_A_CYCLE = 24  # of a multiprocessor, while all read
_SCHEDULERS = 4


class Config(NamedTuple):
    """units: of a warp, back of a warpgroup. warps: of a block. pieces: that a block takes in turns."""

    units: int
    warps: int
    pieces: int

    def __str__(self) -> str:
        return f"u{self.units}w{self.warps}p{self.pieces}"


class Layout(NamedTuple):
    """weights: of a thread. loads: of 16 bytes, of a lane's piece. cycles: of a warp's, beside these. shared_bytes: of
    a block. images: of a piece. peers: blocks of a group. pitch: elements of an image that a block copies."""

    weights: int
    loads: int
    cycles: int
    shared_bytes: int
    images: int
    peers: int
    pitch: int

    def fits(self, problem: RnnProblem, config: Config, device: Gpu) -> bool:
        _, there = registers_of(config.warps)
        fits_block = self.weights + _OTHERS <= there and self.shared_bytes <= shared_bytes(device)
        return fits_block and self.peers * problem.directions <= device.sms


class Round(NamedTuple):
    """A launch: so many slabs of images from the first one on, of every direction, each with a group of blocks."""

    first_slab: int
    slabs: int


def rounds(problem: RnnProblem, config: Config, layout: Layout, device: Gpu) -> list[Round]:
    """One after the other, where the blocks of all images are more than the device has room for at once."""
    slabs = ceil(problem.batch / (layout.images * config.pieces))
    at_once = min(slabs, device.sms // (layout.peers * problem.directions))
    return [Round(first, min(at_once, slabs - first)) for first in range(0, slabs, at_once)]


def launches_us(problem: RnnProblem, config: Config, layout: Layout, device: Gpu) -> float:
    """What all launches of all steps cost: two a round."""
    return 2 * problem.layers * len(rounds(problem, config, layout, device)) * rnn_layers.LAUNCH_US


def passing(problem: RnnProblem, config: Config, layout: Layout, workspace: Workspace, device: Gpu) -> Passing:
    """The memory of what the blocks of a round pass to each other."""
    (first, *_), piece_elems = rounds(problem, config, layout, device), layout.images * layout.pitch
    return Passing.take(workspace, problem.directions * first.slabs, config.pieces, piece_elems)


def step_us(problem: RnnProblem, config: Config, layout: Layout, device: Gpu) -> float:
    """A step of all images."""
    of_scheduler = config.warps / _SCHEDULERS
    products = max(layout.weights * layout.images, _LOAD_CYCLES * layout.loads)
    compute = of_scheduler * (layout.cycles + products) + _PIECE_CYCLES
    passing = layout.pitch * layout.images * 4 / _L2_BYTES_A_CYCLE
    piece = max(compute, passing)
    step = max(config.pieces * piece, compute + passing + _PASS_CYCLES)
    return len(rounds(problem, config, layout, device)) * step / device.clock_hz * 1e6


def configs(
    problem: RnnProblem, device: Gpu, units: tuple[int, ...], layout: Callable[[RnnProblem, Config], Layout]
) -> tuple[Config, ...]:
    """Those that fit, by their guesses."""
    every = (Config(*each) for each in product(units, _WARPS, _PIECES))
    fitting = [
        (step_us(problem, config, found, device), len(rounds(problem, config, found, device)), config)
        for config, found in ((config, layout(problem, config)) for config in every)
        if found.images * config.pieces < 2 * max(problem.batch, found.images) and found.fits(problem, config, device)
    ]
    return tuple(config for *_, config in sorted(fitting)[:_MOST_CONFIGS])


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
        weights = f"{problem.parameters.gates} x {problem.hidden}^2 weights"
        return Support(False, f"{weights} do not fit the registers of {device.sms} multiprocessors")
    return YES


class Grid(LaunchedCandidate[Config]):
    """What forward and gradient share. units: of a warp (back a warpgroup), that are tried."""

    algorithm = "persistent_grid"
    units: tuple[int, ...]

    @abstractmethod
    def layout(self, problem: RnnProblem, config: Config) -> Layout: ...

    @abstractmethod
    def memory(self, problem: RnnProblem, device: Gpu) -> Memory:
        """But for what blocks pass to each other."""

    def supports(self, problem: RnnProblem, device: Gpu) -> Support:
        return support(problem, self.configs(problem, device), device)

    def configs(self, problem: RnnProblem, device: Gpu) -> tuple[Config, ...]:
        return configs(problem, device, self.units, self.layout)

    def roundings(self, problem: RnnProblem, device: Gpu) -> int:
        return rnn_layers.roundings(problem, device)

    def workspace_bytes(self, problem: RnnProblem, config: Config, device: Gpu) -> int:
        memory = self.memory(problem, device)
        passing(problem, config, self.layout(problem, config), memory.workspace, device)
        return memory.workspace.size_bytes

    def estimate(self, problem: RnnProblem, config: Config, device: Gpu) -> float:
        layout = self.layout(problem, config)
        steps_us = problem.layers * problem.steps * step_us(problem, config, layout, device)
        return launches_us(problem, config, layout, device) + steps_us + rnn_layers.products_us(problem, device)
