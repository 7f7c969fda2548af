"""What the methods by windows of an image share: which of their configs find room, what they cost, how they start."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from math import inf, prod
from typing import NamedTuple, Protocol, TypeVar

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate, gather_pointers
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s, fma_flops_per_s, tensor_flops_per_s
from nbdnn.kernels.cuda.window_plan import exchanged
from nbdnn.kernels.cuda.window_sums import SUM_ELEMENTS
from nbdnn.problem_conv import ConvProblem

_LAUNCH_US = 3.0
# For each block of a multiprocessor more or less than `busy_blocks`, or one more where bytes take so many times as long
# as products: 3x3 takes 3.9 us by three blocks, not 4.1, 32 images of 7x7 taps 41.5 by two, not 52.
_OTHER_BLOCKS, _FEW = 0.03, 4.0
# Windows that share no pixels, whose rows are copied for one of them alone: by matrix units patches of 4x4 (32x224x224,
# 96 filters) took 36.9 us in 16 bits, their filter's gradient 45.3 (an H200).
_APART = 2.6


class Totals(NamedTuple):
    """The kernel that adds what the blocks of a bwd_filter leave in the workspace.

    integers: begin with the blocks that share the tiles, and the elements that each leaves.
    """

    source: Source
    integers: tuple[int, ...]

    @property
    def workspace_bytes(self) -> int:
        return self.integers[0] * self.integers[1] * 4


class Planned(NamedTuple):
    """The kernel of a problem and config. most_blocks: of a multiprocessor at once, for which there are registers."""

    source: Source
    integers: tuple[int, ...]
    grid: tuple[int, int, int]
    shared_bytes: int
    most_blocks: int
    totals: Totals | None = None


class Shares(NamedTuple):
    """Priors for the guess: parts of the units' rates, and of a copy's."""

    fma: float
    tensor: float
    copy: float


class Slower(NamedTuple):
    """What is taken beside that guess: by a forward with channels of an output last, in planes of 16 bits, in planes of
    float32; by a filter gradient in 16 bits, in float32. Source: some 400 measurements of first and last layers (an
    H200)."""

    last: float = 1.0
    narrow_planes: float = 1.0
    planes: float = 1.0
    narrow_filters: float = 1.0
    filters: float = 1.0

    def of(self, problem: ConvProblem) -> float:
        if problem.op == "conv_bwd_data":
            return 1.0
        if problem.op == "conv_bwd_filter":
            return self.filters if problem.dtype == "f32" else self.narrow_filters
        if problem.y_channels_last:
            return self.last
        return self.planes if problem.dtype == "f32" else self.narrow_planes


class _Blocks(Hashable, Protocol):
    @property
    def blocks(self) -> int:
        """Of a multiprocessor at once."""


ConfigT = TypeVar("ConfigT", bound=_Blocks)


class ByWindows(LaunchedCandidate[ConfigT]):
    """A convolution by windows. math: 'fma', or 'tf32'; 16-bit data take matrix units in any case.

    smallest: configs for where no other finds room; what has no room for the last of them is not supported.
    """

    shares: Shares
    slower = Slower()
    busy_blocks = 1  # of a multiprocessor, that it takes for a forward's share of the peak of matrix units
    launch_us = 0.0  # of a forward, which `slower` does not count then; 0.0: all of it is slower
    smallest: tuple[ConfigT, ...]
    most_shared_bytes: float = inf  # of a block

    def __init__(self, op: str, math: str = "fma") -> None:
        self.op, self.math = op, math
        if math == "tf32":
            self.algorithm = f"{self.algorithm}_tf32"

    @abstractmethod
    def plan(self, problem: ConvProblem, config: ConfigT, device: Gpu) -> Planned:
        """What a config means."""

    @abstractmethod
    def choices(self, problem: ConvProblem) -> tuple[ConfigT, ...]:
        """Every config worth measuring where it finds room, the default first."""

    def units_math(self, problem: ConvProblem) -> str:
        return "mma" if problem.dtype in ("f16", "bf16") else self.math

    def refused(self, problem: ConvProblem) -> str:
        """Why no tile can be right, or ''."""
        if problem.ndim != 2:
            return f"the image has {problem.ndim} spatial axes, this kernel takes 2"
        if problem.dtype == "f64" or (self.math == "tf32" and problem.dtype != "f32"):
            return f"the data are {problem.dtype}"
        if exchanged(problem) and problem.stride != (1, 1):
            return f"stride {problem.stride}, windows of dy are those of a convolution where it is 1"
        return ""

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := self.refused(problem):
            return Support(False, reason)
        smallest = self.smallest[-1]
        return self._fits(problem, self.plan(problem, smallest, device), smallest, device)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[ConfigT, ...]:
        """Those that fit, and are not another by a different name; else the first of the smallest."""
        different: dict[Planned, ConfigT] = {}
        for config in self.choices(problem):
            planned = self.plan(problem, config, device)
            if config.blocks <= planned.most_blocks and self._fits(problem, planned, config, device).ok:
                different.setdefault(planned, config)
        if different:
            return tuple(different.values())
        planned_smallest = ((config, self.plan(problem, config, device)) for config in self.smallest)
        return (next(config for config, of in planned_smallest if self._fits(problem, of, config, device).ok),)

    def workspace_bytes(self, problem: ConvProblem, config: ConfigT, device: Gpu) -> int:
        totals = self.plan(problem, config, device).totals
        return totals.workspace_bytes if totals else 0

    def flops(self, problem: ConvProblem) -> float:
        """Those that the units do."""
        return problem.flops

    def estimate(self, problem: ConvProblem, config: ConfigT, device: Gpu) -> float:
        math = self.units_math(problem)
        if math == "fma":
            flops_per_s = self.shares.fma * fma_flops_per_s(device, "f32")
        else:
            flops_per_s = self.shares.tensor * tensor_flops_per_s(device, problem.dtype, math == "tf32")
        # The image is read for each set of filters that a block has; of groups each has its own.
        blocks, *others = self.plan(problem, config, device).grid
        again = max(0.0, prod(others) / problem.groups - 1)
        moved_bytes = problem.min_bytes + again * problem.operands[1 if exchanged(problem) else 0].size_bytes
        moved_us = moved_bytes / (self.shares.copy * copy_bytes_per_s(device)) * 1e6
        apart = all(step >= taps for step, taps in zip(problem.stride, problem.filter, strict=True))
        if apart and math != "fma" and prod(problem.filter) > 1:
            moved_us *= _APART
        launches = 2 if self.op == "conv_bwd_filter" else 1
        products_us, slower = self.flops(problem) / flops_per_s * 1e6, self.slower.of(problem)
        of_sms = device.sms / (blocks * prod(others))  # for each block
        if self.launch_us and problem.op == "conv_fwd":
            if math != "fma":
                wanted = self.busy_blocks + (_FEW * products_us < moved_us)
                slower *= 1 + _OTHER_BLOCKS * abs(config.blocks - wanted)
                products_us *= max(1.0, self.busy_blocks * of_sms) / max(1.0, of_sms)
            return self.launch_us + max(products_us, moved_us) * max(1.0, of_sms) * slower
        return (launches * _LAUNCH_US + max(products_us, moved_us) * max(1.0, of_sms)) * slower

    def launches(self, problem: ConvProblem, config: ConfigT, device: Gpu) -> list[Launch]:
        planned = self.plan(problem, config, device)
        gathered = (1, 0, WORKSPACE) if exchanged(problem) else (0, 1, WORKSPACE)
        product = Launch(
            source=planned.source,
            grid=planned.grid,
            pointers=gathered if planned.totals else gather_pointers(problem),
            scalars="" if planned.totals else "f32",
            integers=planned.integers,
            dynamic_shared_bytes=planned.shared_bytes,
        )
        if planned.totals is None:
            return [product]
        source, integers = planned.totals
        grid = integers[1] // SUM_ELEMENTS, 1, 1
        return [product, Launch(source, grid, pointers=(WORKSPACE, 2), scalars="f32", integers=integers)]

    def _fits(self, problem: ConvProblem, planned: Planned, config: ConfigT, device: Gpu) -> Support:
        """Whether a config's blocks find room, and int32 holds every index."""
        needed = planned.shared_bytes
        if needed > self.most_shared_bytes:
            return Support(False, f"a tile takes {needed} bytes of shared memory, a block has {self.most_shared_bytes}")
        if (room := blocks_at_once(needed, device)) < config.blocks:
            return Support(False, f"{config.blocks} blocks of {needed} bytes, a multiprocessor has room for {room}")
        if max(planned.grid[1:]) > 65535:
            return Support(False, f"a grid of {planned.grid} blocks, of which 65535 are possible on two axes")
        if (bits := index_bits(problem, planned.integers)) > 32:
            return Support(False, f"indices take {bits} bits, this kernel has 32")
        return YES
