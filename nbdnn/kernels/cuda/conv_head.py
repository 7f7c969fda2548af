"""The last layer of a network, and bwd_data of the first: few channels of outputs.

Heads that make images or a few classes have 1 to 16 filters, where tiles of a GEMM have 64 and more. `head_plan.py` has
the idea and the tiling, `head_forward.py` the kernel. bwd_data of stride 1 is the forward of dy with the taps in
reverse, and the channels exchanged.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import head_plan
from nbdnn.kernels.cuda.head_plan import Config
from nbdnn.kernels.cuda.window_candidate import ByWindows, Planned, Shares, Slower
from nbdnn.kernels.cuda.window_plan import image
from nbdnn.problem_conv import ConvProblem

_MOST_FILTERS, _MOST_SUMS = 16, 48  # of a pixel


class Head(ByWindows[Config]):
    """Few channels out."""

    algorithm = "head"
    shares, slower, smallest = Shares(0.4, 0.1, 0.5), Slower(last=1.6), head_plan.SMALLEST

    def plan(self, problem: ConvProblem, config: Config, device: Gpu) -> Planned:
        return head_plan.forward(problem, self.units_math(problem), config, device)

    def choices(self, problem: ConvProblem) -> tuple[Config, ...]:
        return head_plan.FMA if self.units_math(problem) == "fma" else head_plan.MMA

    def refused(self, problem: ConvProblem) -> str:
        if reason := super().refused(problem):
            return reason
        if problem.stride != (1, 1):
            return f"stride {problem.stride}, this kernel takes 1"
        seen = image(problem)
        if seen.groups > 1 or not 1 <= seen.group_out <= _MOST_FILTERS or seen.group_in < 1:
            wanted = f"this kernel has 1 to {_MOST_FILTERS} channels of outputs"
            return f"{problem.c} channels and {problem.k} filters in {problem.groups} groups, {wanted}"
        if (sums := seen.taps[1] * seen.group_out) > _MOST_SUMS:
            return f"{sums} sums of a pixel, this kernel keeps {_MOST_SUMS}"
        return head_plan.refusal(seen, problem)


FWD, BWD_DATA = Head("conv_fwd"), Head("conv_bwd_data")
