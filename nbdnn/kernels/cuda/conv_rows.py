"""The first layer of a network by windows of raw image rows: forward and filter gradient of up to four channels.

`rows_plan.py` has the idea and the tiling; `rows_forward.py`, `rows_filter.py` and, for 16 bits, `rows_phases.py` have
the kernels, their traffic and their order of summation. Where rows of the image are no multiple of 4 bytes, or taps are
dilated, `conv_stem.py` has the layer.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rows_launch, rows_phases_launch
from nbdnn.kernels.cuda.rows_launch import CONFIGS, SMALLEST, Config
from nbdnn.kernels.cuda.rows_plan import refusal
from nbdnn.kernels.cuda.window_candidate import ByWindows, Planned, Shares
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_MOST_CHANNELS = 4
_MOST_RUN = 64  # elements of a segment: a loop over them is written out


class ByRows(ByWindows[Config]):
    """Windows of raw rows."""

    algorithm = "rows"
    shares, smallest = Shares(0.65, 0.35, 0.65), SMALLEST

    def plan(self, problem: ConvProblem, config: Config, device: Gpu) -> Planned:
        math = self.units_math(problem)
        if self.op == "conv_fwd":
            return rows_launch.forward(problem, math, config, device)
        if math == "mma":
            return rows_phases_launch.gradients(problem, config, device)
        return rows_launch.gradients(problem, math, config, device)

    def choices(self, problem: ConvProblem) -> tuple[Config, ...]:
        return CONFIGS[self.op][self.units_math(problem)]

    def refused(self, problem: ConvProblem) -> str:
        if reason := super().refused(problem):
            return reason
        if problem.groups > 1 or not 1 <= problem.c <= _MOST_CHANNELS:
            return f"{problem.c} channels in {problem.groups} groups, this kernel takes 1 to {_MOST_CHANNELS} in one"
        if problem.k < 1:
            return f"there are {problem.k} filters"
        run = problem.filter[1] * (problem.c if problem.channels_last else 1)
        if run > _MOST_RUN:
            return f"{run} neighbours of a window, this kernel takes {_MOST_RUN}"
        if self.op == "conv_bwd_filter":
            bytes_ = problem.k * ITEMSIZE[problem.dtype]
            if not problem.y_channels_last or bytes_ % 16 or problem.align % 16:
                return f"{problem.k} filters of dy in {problem.y_layout}, this kernel copies 16 bytes of neighbours"
        return refusal(problem, self.units_math(problem))


FWD, FWD_TF32 = ByRows("conv_fwd"), ByRows("conv_fwd", "tf32")
BWD_FILTER, BWD_FILTER_TF32 = ByRows("conv_bwd_filter"), ByRows("conv_bwd_filter", "tf32")
