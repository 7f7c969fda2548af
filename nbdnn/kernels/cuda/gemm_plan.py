"""Which tiles the implicit GEMMs on mma.sync are tried with, in how many parts, and what that should cost."""

from __future__ import annotations

from abc import abstractmethod
from math import ceil, sqrt
from typing import ClassVar, NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import peaks
from nbdnn.kernels.cuda.add_parts import part_elems
from nbdnn.kernels.cuda.gemm_tile import CHUNK_BYTES, Tile
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.kernels.cuda.turn_channels import ALIGN_BYTES, is_planar, turned_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_DEEP = 6  # stages that a config's name tells
_LEAST_STAGES = 4  # of a part: below, filling the pipeline costs as much as the products
_MOST_PARTS = 512
_MOST_CONFIGS = 6
_WORTH_A_TRY = 2.5  # times the best estimate
_LAUNCH_US = 2.25
# What follows adds up parts, or before turns an input; parts are written and read again, mostly from cache.
_PARTS_US, _PARTS_MOVED, _TURN_US = 0.8, 0.42, 3.0
# Priors. Of the tensor cores' peak mma.sync reaches at most this part by generation (wgmma and later reach the rest),
# and of that a warp with so many sums a thread reaches so much: it loads (warp_m + warp_n) for warp_m * warp_n.
_MMA_SHARE = {8: 0.95, 9: 0.55, 10: 0.25, 11: 0.25, 12: 0.95}
_SUMS_SHARE = {128: 0.65, 64: 0.5, 32: 0.4}
_SHARE_OF_COPY = 0.7  # of a copy's rate, where bytes decide: 0.5 to 0.75 for layers of 1x1 taps on an H200


class Config(NamedTuple):
    """The tile of a block, and into how many parts the reduction is cut."""

    tile: Tile
    parts: int

    def __str__(self) -> str:
        deep = f"s{self.tile.stages}" if self.tile.stages >= _DEEP else ""
        parts = f"/{self.parts}" if self.parts > 1 else ""
        return f"{self.tile.m}x{self.tile.n}x{self.tile.k_bytes}{deep}{parts}"


class Work(NamedTuple):
    """Blocks of a tile, not counting parts, and stages of one on average; of the longest where they differ, else 0."""

    blocks: int
    stages: float
    longest: int = 0


def staged(m: int, n: int, warps_m: int, warps_n: int, k_bytes: int, min_blocks: int, *, deep: bool = False) -> Tile:
    """A tile with as many stages as hide the memory, three of 128 bytes, four of 64; deep: where few blocks share a
    multiprocessor, twice as many."""
    stages = (3 if k_bytes == 128 else 4) * (2 if deep else 1)
    return Tile(m, n, k_bytes, warps_m, warps_n, stages, min_blocks)


def fitting(tiles: tuple[Tile, ...], rows: int, columns: int) -> tuple[Tile, ...]:
    """Those that a product of so many rows and columns fills at least half, and the smallest of each extent."""
    narrow = min(each.n for each in tiles)
    wide_enough = [each for each in tiles if each.n == narrow or 2 * columns > each.n]
    low = min(each.m for each in wide_enough)
    return tuple(each for each in wide_enough if each.m == low or 2 * rows > each.m)


def data_type(problem: ConvProblem) -> str:
    """Of the matrix instruction's factors."""
    return "tf32" if problem.dtype == "f32" else problem.dtype


def refused_operands(problem: ConvProblem, dtypes: tuple[str, ...]) -> str:
    """Why the operands cannot be copied in chunks of 16 bytes, or ''."""
    if problem.dtype not in dtypes:
        return f"dtype {problem.dtype} is not {' or '.join(dtypes)}"
    if problem.align < CHUNK_BYTES:
        return f"alignment of {problem.align} bytes is below {CHUNK_BYTES}"
    multiple = CHUNK_BYTES // ITEMSIZE[problem.dtype]
    for name, channels in (("input", problem.c), ("output", problem.k)):
        each = channels // problem.groups
        if each % multiple or not each:
            return f"{each} {name} channels a group are not a multiple of {multiple}"
    return "a batch of 0 images" if problem.n == 0 else ""


class MmaCandidate(LaunchedCandidate[Config]):
    """What the three directions share: dtypes, layouts, configs and their cost."""

    algorithm = "mma_gemm"
    algo: str | None = "small"
    peak_share: ClassVar[dict[int, float]] = _MMA_SHARE
    fill_stages: ClassVar[float] = 4.7  # that a block waits for its first stage and stores its sums

    def __init__(self, op: str, *, tf32: bool = False) -> None:
        self.op = op
        self._dtypes = ("f32",) if tf32 else ("f16", "bf16")
        if tf32:
            self.algorithm, self.math = f"{self.algorithm}_tf32", "tf32"

    @abstractmethod
    def integers(self, problem: ConvProblem, config: Config) -> tuple[int, ...]:
        """What the kernel is launched with."""

    @abstractmethod
    def tiles(self, problem: ConvProblem) -> tuple[Tile, ...]:
        """Those worth a thought."""

    @abstractmethod
    def work(self, problem: ConvProblem, tile: Tile) -> Work:
        """What a launch in one part does."""

    def slower(self, problem: ConvProblem, tile: Tile) -> float:
        """Times what a stage of a tile takes by the count of its products."""
        return 1.0

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := refused_operands(problem, self._dtypes):
            return Support(False, reason)
        if index_bits(problem, self.integers(problem, Config(self.tiles(problem)[0], 1))) != 32:
            largest = max(operand.size_elems for operand in problem.operands)
            return Support(False, f"{largest} elements are more than int32 counts")
        return YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        every = []
        for candidate in self.tiles(problem):
            work = self.work(problem, candidate)
            every += [Config(candidate, parts) for parts in _parts(candidate, work, device)]
        costs = {config: self.estimate(problem, config, device) for config in every}
        best = min(costs.values())
        ranked = sorted(every, key=lambda config: costs[config])
        return tuple(config for config in ranked if costs[config] <= _WORTH_A_TRY * best)[:_MOST_CONFIGS]

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        return parts_bytes(problem, config) + self.turned_bytes(problem)

    def turned_bytes(self, problem: ConvProblem) -> int:
        """Workspace of the inputs that are turned."""
        return turned_bytes(problem)

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        tile, parts = config
        blocks, stages, longest = self.work(problem, tile)
        flops_per_s = peaks.tensor_flops_per_s(device, problem.dtype, problem.dtype == "f32") / device.sms
        share = self.peak_share.get(device.capability[0], min(self.peak_share.values())) * _SUMS_SHARE[tile.sums]
        share *= 2 * sqrt(tile.m * tile.n) / (tile.m + tile.n)  # tiles that are no squares copy more for a product
        stage_us = 2 * tile.m * tile.n * tile.k_elems(data_type(problem)) / (flops_per_s * share) * 1e6
        stage_us *= self.slower(problem, tile)
        turns = blocks * parts / device.sms
        if longest:
            passed = max(turns * (stages / parts + self.fill_stages), longest / parts + self.fill_stages)
        else:
            passed = ceil(turns) * (stages / parts + self.fill_stages)
        products_us = passed * stage_us
        bytes_per_us = peaks.copy_bytes_per_s(device) / 1e6
        us = _LAUNCH_US + max(products_us, problem.min_bytes / bytes_per_us / _SHARE_OF_COPY)
        if moved_bytes := parts_bytes(problem, config):
            us += _PARTS_US + _PARTS_MOVED * moved_bytes / bytes_per_us
        if moved_bytes := self.turned_bytes(problem):
            us += _TURN_US + 2 * moved_bytes / bytes_per_us
        return us


def added_parts(problem: ConvProblem, config: Config) -> int:
    """Parts of the sums that go through the workspace, the only one too where dw has its taps last: 0 for none."""
    turned = problem.op == "conv_bwd_filter" and is_planar(problem.operands[2])
    return config.parts if config.parts > 1 or turned else 0


def parts_bytes(problem: ConvProblem, config: Config) -> int:
    """Workspace of the parts, which is its beginning; the turned inputs follow."""
    return -(-4 * added_parts(problem, config) * part_elems(problem) // ALIGN_BYTES) * ALIGN_BYTES


def _parts(tile: Tile, work: Work, device: Gpu) -> list[int]:
    """One part, and as many as fill the multiprocessors once; of deep tiles also as many as leave each with a block."""
    resident = {tile.min_blocks, 1} if tile.stages >= _DEEP else {tile.min_blocks}
    most = min(int(work.stages) // _LEAST_STAGES, _MOST_PARTS)
    return sorted({1, *(max(1, min(device.sms * blocks // work.blocks, most)) for blocks in resident)})
