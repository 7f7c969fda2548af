"""The last layer of a network, and bwd_data of the first: few channels of outputs, by windows of tiles.

Heads that make images or a few classes have 1 to 16 filters, where tiles of a GEMM have 64 and more. A tile of the
image is in shared memory with all its channels, and matrix units take eight filters at a time. bwd_data of stride 1 is
the forward of dy with the taps in reverse, and the channels exchanged. `conv_windows.py` has the kernels, their traffic
and their order of summation.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.window_launch import Windowed
from nbdnn.kernels.cuda.window_plan import QUAD, image
from nbdnn.problem_conv import ConvProblem

_MOST = 16  # channels of outputs


class Head(Windowed):
    """Few channels out, and more than a quad in."""

    algorithm = "head"

    def refused(self, problem: ConvProblem) -> str:
        if reason := super().refused(problem):
            return reason
        seen = image(problem)
        if seen.groups > 1 or seen.group_in <= QUAD or not 1 <= seen.group_out <= _MOST:
            wanted = f"this kernel has 1 to {_MOST} of more than {QUAD} in one"
            return f"{problem.c} channels and {problem.k} filters in {problem.groups} groups, {wanted}"
        return ""


FWD, FWD_TF32 = Head("conv_fwd"), Head("conv_fwd", "tf32")
BWD_DATA, BWD_DATA_TF32 = Head("conv_bwd_data"), Head("conv_bwd_data", "tf32")
