"""Convolutions over three axes that come to two, computed by a candidate that knows two.

Where a filter has one tap along the depth, without padding or steps, each depth of channels-last data is an image:

    (n, d, h, w, c) with (1, r, s)  ->  (n*d, h, w, c) with (r, s)

and where it has one tap along rows and columns, each depth of any data is a row:

    (n, c, d, h, w) with (t, 1, 1)  ->  (n, c, d, h*w) with (t, 1)

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

_LAYOUTS = {"ncdhw": "nchw", "ndhwc": "nhwc", "kctrs": "kcrs", "ktrsc": "krsc"}


class Flat(LaunchedCandidate[Hashable]):
    """A candidate under its own name, which also computes what three axes pose over two."""

    def __init__(self, base: LaunchedCandidate[Any]) -> None:
        self.base = base
        self.op, self.algorithm, self.algo = base.op, base.algorithm, base.algo
        self.deterministic, self.math, self.by_name_only = base.deterministic, base.math, base.by_name_only

    @cached_property
    def version(self) -> str:
        return f"{super().version}-{self.base.version}"

    def roundings(self, problem: ConvProblem, device: Gpu) -> int:
        return self.base.roundings(flat(problem), device)

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        return self.base.supports(flat(problem), device)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Hashable, ...]:
        return self.base.configs(flat(problem), device)

    def workspace_bytes(self, problem: ConvProblem, config: Hashable, device: Gpu) -> int:
        return self.base.workspace_bytes(flat(problem), config, device)

    def estimate(self, problem: ConvProblem, config: Hashable, device: Gpu) -> float:
        return self.base.estimate(flat(problem), config, device)

    def launches(self, problem: ConvProblem, config: Hashable, device: Gpu) -> list[Launch]:
        return self.base.launches(flat(problem), config, device)


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


def _sees_one_depth(problem: ConvProblem) -> bool:
    return problem.filter[0] == 1 and problem.stride[0] == 1 and not any(problem.pad[0])
