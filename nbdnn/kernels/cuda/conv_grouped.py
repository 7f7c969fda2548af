"""Groups of a few channels (ResNeXt, RegNet), in all three directions, by windows of tiles.

Each group is a small convolution of its own, and a block takes several, so that it reads whole lines of a channels-last
image. bwd_data of stride 1 is the forward of dy with the taps in reverse, and the channels exchanged.
`conv_windows.py` and `conv_windows_filter.py` have the kernels, their traffic and their order of summation.
"""

from __future__ import annotations

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.window_candidate import Shares
from nbdnn.kernels.cuda.window_launch import Config, Windowed
from nbdnn.problem_conv import ConvProblem

_FEWEST, _MOST = 4, 32  # channels of a group
# Seen on an H200: how much longer groups take that fill half a tile of filters, and gradients of filters.
_TILE_FILTERS, _HALF_A_TILE, _OF_FILTERS = 8, 1.5, 1.2


class Grouped(Windowed):
    """Few channels a group, in and out."""

    algorithm, shares = "grouped", Shares(0.6, 0.3, 0.25)

    def refused(self, problem: ConvProblem) -> str:
        channels = problem.c // problem.groups, problem.k // problem.groups
        if problem.groups == 1 or min(channels) < _FEWEST or max(channels) > _MOST:
            wanted = f"this kernel takes {_FEWEST} to {_MOST} in several"
            return f"{channels[0]} to {channels[1]} channels in each of {problem.groups} groups, {wanted}"
        return super().refused(problem)

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        slower = _HALF_A_TILE if problem.k // problem.groups < _TILE_FILTERS else 1.0
        slower *= _OF_FILTERS if self.op == "conv_bwd_filter" else 1.0
        return slower * super().estimate(problem, config, device)


FWD, FWD_TF32 = Grouped("conv_fwd"), Grouped("conv_fwd", "tf32")
BWD_DATA, BWD_DATA_TF32 = Grouped("conv_bwd_data"), Grouped("conv_bwd_data", "tf32")
BWD_FILTER, BWD_FILTER_TF32 = Grouped("conv_bwd_filter"), Grouped("conv_bwd_filter", "tf32")
