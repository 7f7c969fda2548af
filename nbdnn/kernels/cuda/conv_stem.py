"""The first layer of a network, and the gradients of the last: an image of at most four channels, by windows of tiles.

The methods of im2col and implicit GEMM pad such an image to the channels that they want; here a pixel is one load.
Forward and filter gradient take an image of few channels; where filters are few, bwd_data and the filter gradient take
windows of dy, which has as many channels. `conv_windows.py` and `conv_windows_filter.py` have the kernels, their
traffic and their order of summation.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.window_candidate import Slower
from nbdnn.kernels.cuda.window_launch import Windowed
from nbdnn.kernels.cuda.window_plan import QUAD, without_few
from nbdnn.problem_conv import ConvProblem


class Stem(Windowed):
    """Few channels in, all of them in one quad."""

    algorithm, slower, launch_us, busy_blocks = "stem", Slower(2.1, 3.0, 1.8, 2.0, 2.3), 5.0, 2

    def refused(self, problem: ConvProblem) -> str:
        return super().refused(problem) or without_few(problem, QUAD)


FWD, FWD_TF32 = Stem("conv_fwd"), Stem("conv_fwd", "tf32")
BWD_DATA, BWD_DATA_TF32 = Stem("conv_bwd_data"), Stem("conv_bwd_data", "tf32")
BWD_FILTER, BWD_FILTER_TF32 = Stem("conv_bwd_filter"), Stem("conv_bwd_filter", "tf32")
