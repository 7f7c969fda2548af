"""The first layer of a network by windows of raw image rows, and the gradients of the last: up to four channels.

`rows_plan.py` has the idea and the tiling; `rows_forward.py`, `rows_filter.py` and, for 16 bits, `rows_phases.py` have
the kernels, their traffic and their order of summation. Forward and filter gradient take an image of few channels;
where filters are few, bwd_data and the filter gradient take windows of dy, which has as many channels. Where rows are
no multiple of 4 bytes, or taps are dilated, `conv_stem.py` has the layer.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rows_launch, rows_phases_launch
from nbdnn.kernels.cuda.rows_launch import CONFIGS, SMALLEST, Config
from nbdnn.kernels.cuda.rows_plan import refusal
from nbdnn.kernels.cuda.window_candidate import ByWindows, Planned, Shares, Slower
from nbdnn.kernels.cuda.window_plan import exchanged, image, without_few
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_MOST_CHANNELS = 4
_MOST_RUN = 64  # elements of a segment: a loop over them is written out


class ByRows(ByWindows[Config]):
    """Windows of raw rows."""

    algorithm = "rows"
    shares, slower, smallest = Shares(0.65, 0.35, 0.65), Slower(1.25, 2.3, 1.35, 1.5, 1.5), SMALLEST
    busy_blocks, launch_us = 2, 3.0

    def plan(self, problem: ConvProblem, config: Config, device: Gpu) -> Planned:
        math = self.units_math(problem)
        if self.op != "conv_bwd_filter":
            return rows_launch.forward(problem, math, config, device)
        if math == "mma":
            return rows_phases_launch.gradients(problem, config, device)
        return rows_launch.gradients(problem, math, config, device)

    def choices(self, problem: ConvProblem) -> tuple[Config, ...]:
        return CONFIGS[self.op][self.units_math(problem)]

    def refused(self, problem: ConvProblem) -> str:
        if reason := super().refused(problem) or without_few(problem, _MOST_CHANNELS):
            return reason
        seen = image(problem)
        run = problem.filter[1] * (seen.group_in if seen.image_last else 1)
        if run > _MOST_RUN:
            return f"{run} neighbours of a window, this kernel takes {_MOST_RUN}"
        if self.op == "conv_bwd_filter":
            bytes_ = seen.group_out * ITEMSIZE[problem.dtype]
            if not seen.outputs_last or bytes_ % 16 or problem.align % 16:
                layout = problem.layout if exchanged(problem) else problem.y_layout
                return f"{seen.group_out} channels of a pixel in {layout}, this kernel copies 16 bytes of neighbours"
        return refusal(problem, self.units_math(problem))


FWD, FWD_TF32 = ByRows("conv_fwd"), ByRows("conv_fwd", "tf32")
BWD_DATA, BWD_DATA_TF32 = ByRows("conv_bwd_data"), ByRows("conv_bwd_data", "tf32")
BWD_FILTER, BWD_FILTER_TF32 = ByRows("conv_bwd_filter"), ByRows("conv_bwd_filter", "tf32")
