"""The first layer of a network: an image of at most four channels, forward and filter gradient, by windows of tiles.

The methods of im2col and implicit GEMM pad such an image to the channels that they want; here a pixel is one load.
`conv_windows.py` and `conv_windows_filter.py` have the kernels, their traffic and their order of summation.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.window_launch import Windowed
from nbdnn.kernels.cuda.window_plan import QUAD
from nbdnn.problem_conv import ConvProblem


class Stem(Windowed):
    """Few channels in, all of them in one quad."""

    algorithm = "stem"

    def refused(self, problem: ConvProblem) -> str:
        if problem.groups > 1 or not 1 <= problem.c <= QUAD:
            return f"{problem.c} channels in {problem.groups} groups, this kernel takes 1 to {QUAD} in one"
        if problem.k < 1:
            return f"there are {problem.k} filters"
        return super().refused(problem)


FWD, FWD_TF32 = Stem("conv_fwd"), Stem("conv_fwd", "tf32")
BWD_FILTER, BWD_FILTER_TF32 = Stem("conv_bwd_filter"), Stem("conv_bwd_filter", "tf32")
