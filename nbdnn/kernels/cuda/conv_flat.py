"""Convolutions that come to simpler ones on the same memory, computed by a candidate that knows those.

Where a filter has one tap along the depth, without padding or steps, each depth of channels-last data is an image:

    (n, d, h, w, c) with (1, r, s)  ->  (n*d, h, w, c) with (r, s)

and where it has one tap along rows and columns, each depth of any data is a row:

    (n, c, d, h, w) with (t, 1, 1)  ->  (n, c, d, h*w) with (t, 1)

Where channels are last and the windows of a row lie side by side, as a U-Net's and patches do, the columns of a window
are channels, which matrix units take more of at once:

    (n, h, w*s, c) with (r, s), s apart  ->  (n, h, w, s*c) with (r, 1)

The operands lie in memory as they are. Source: own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from nbdnn.cached import cached_property
from nbdnn.candidate import Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.problem_conv import ConvProblem

# Of what a product is expected to take, where half of it is with zeros: five layers took 0.68 to 0.80 on a H200.
_HALF_ZEROS = 0.7
_LAYOUTS = {"ncdhw": "nchw", "ndhwc": "nhwc", "kctrs": "kcrs", "ktrsc": "krsc"}


class Flat(LaunchedCandidate[Hashable]):
    """A candidate under its own name, which also computes what three axes pose over two.

    pose: the problem as the candidate is given it.
    """

    def __init__(self, base: LaunchedCandidate[Any]) -> None:
        self.base = base
        self.op, self.algorithm, self.algo = base.op, base.algorithm, base.algo
        self.deterministic, self.math, self.by_name_only = base.deterministic, base.math, base.by_name_only

    @cached_property
    def version(self) -> str:
        return f"{super().version}-{self.base.version}"

    def pose(self, problem: ConvProblem) -> ConvProblem:
        return flat(problem)

    def roundings(self, problem: ConvProblem, device: Gpu) -> int:
        return self.base.roundings(self.pose(problem), device)

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        return self.base.supports(self.pose(problem), device)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Hashable, ...]:
        return self.base.configs(self.pose(problem), device)

    def workspace_bytes(self, problem: ConvProblem, config: Hashable, device: Gpu) -> int:
        return self.base.workspace_bytes(self.pose(problem), config, device)

    def estimate(self, problem: ConvProblem, config: Hashable, device: Gpu) -> float:
        return self.base.estimate(self.pose(problem), config, device)

    def launches(self, problem: ConvProblem, config: Hashable, device: Gpu) -> list[Launch]:
        return self.base.launches(self.pose(problem), config, device)


class Wide(Flat):
    """A matrix product, which also takes the columns of windows side by side as channels."""

    def pose(self, problem: ConvProblem) -> ConvProblem:
        return wide(flat(problem))


class Tall(Wide):
    """An image gradient of stride 1, which also takes windows of two rows side by side as images of their own."""

    def pose(self, problem: ConvProblem) -> ConvProblem:
        return tall(super().pose(problem))

    def estimate(self, problem: ConvProblem, config: Hashable, device: Gpu) -> float:
        us, given = super().estimate(problem, config, device), super().pose(problem)
        return us if tall(given) is given else us * _HALF_ZEROS


def flat(problem: ConvProblem) -> ConvProblem:
    """The same over two axes, or the problem itself."""
    if problem.ndim != 3:
        return problem
    d, h, w = problem.spatial
    if problem.filter[1:] == (1, 1) and problem.stride[1:] == (1, 1) and not any(map(any, problem.pad[1:])):
        images, spatial, axes = problem.n, (d, h * w), (0, 1)
    elif _sees_one_depth(problem) and problem.channels_last and problem.y_channels_last:
        images, spatial, axes = problem.n * d, (h, w), (1, 2)
    else:
        return problem
    return replace(
        problem,
        n=images,
        spatial=spatial,
        filter=tuple(problem.filter[axis] for axis in axes),
        pad=tuple(problem.pad[axis] for axis in axes),
        stride=tuple(problem.stride[axis] for axis in axes),
        dilation=tuple(problem.dilation[axis] for axis in axes),
        layout=_LAYOUTS[problem.layout],
        w_layout=_LAYOUTS[problem.w_layout],
        y_layout=_LAYOUTS[problem.y_layout],
    )


def wide(problem: ConvProblem) -> ConvProblem:
    """The same with columns of windows as channels, or the problem itself."""
    columns, last = problem.filter[-1], all((problem.channels_last, problem.w_channels_last, problem.y_channels_last))
    beside = problem.stride[-1] == columns > 1 and problem.dilation[-1] == 1 and not any(problem.pad[-1])
    if not (last and beside) or problem.spatial[-1] % columns or problem.groups > 1 or problem.mode == "conv":
        return problem
    return replace(
        problem,
        c=problem.c * columns,
        spatial=(*problem.spatial[:-1], problem.spatial[-1] // columns),
        filter=(*problem.filter[:-1], 1),
        stride=(*problem.stride[:-1], 1),
    )


def tall(problem: ConvProblem) -> ConvProblem:
    """The same with every two rows an image, or the problem itself: stride 2 becomes 1, at twice the products."""
    last = problem.channels_last and problem.y_channels_last and problem.ndim == 2
    beside = problem.stride == (2, 1) and problem.filter == (2, 1) and not any(map(any, problem.pad))
    if not (last and beside) or problem.spatial[0] % 2:
        return problem
    height, width = problem.spatial
    return replace(problem, n=problem.n * height // 2, spatial=(2, width), stride=(1, 1), dilation=(1, 1))


def _sees_one_depth(problem: ConvProblem) -> bool:
    return problem.filter[0] == 1 and problem.stride[0] == 1 and not any(problem.pad[0])
