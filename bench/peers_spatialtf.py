"""The spatial transformer beside PyTorch: rows of `compare_gpu_ops.py` and `compare_torch_ops.py`, and both calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import nbdnn
from nbdnn.problem_spatialtf import SpatialtfProblem

# dims, output; those of a grid alone.
_SHAPES = (
    "n64c3h224w224:o224x224",
    "n64c64h56w56:o56x56",
    "n256c1h28w28:o28x28",
    "n16c256h28w28:o28x28",
    "n32c3h224w224:o112x112",
    "n8c3h512w512:o1024x1024",
)
_CPU_SHAPES = ("n8c3h224w224:o224x224", "n8c64h56w56:o56x56", "n32c1h28w28:o28x28")
_WITH_IMAGE = ("spatialtf_fwd", "spatialtf_bwd", "spatialtf_sampler_fwd", "spatialtf_sampler_bwd")
_GRIDS = ("n64:o224x224", "n64:o56x56")
_BILINEAR, _ZEROS = 0, 0


def rows() -> list[str]:
    """The texts of the problems."""
    with_image = [
        f"{op}:{dtype}:{shape}:{layout}{parameters}"
        for shape in _SHAPES
        for layout in ("nchw", "nhwc")
        for op in _WITH_IMAGE
        for dtype, parameters in (("f32", ""), ("f16", ""), ("bf16", ":pf32"))
    ]
    grids = [f"{op}:f32:{shape}" for shape in _GRIDS for op in ("spatialtf_grid_fwd", "spatialtf_grid_bwd")]
    return with_image + grids


def cpu_rows() -> list[str]:
    kinds = [("f32", shape, "") for shape in _CPU_SHAPES] + [("bf16", _CPU_SHAPES[1], ":pf32")]
    return [
        f"{op}:{dtype}:{shape}:{layout}{parameters}"
        for dtype, shape, parameters in kinds
        for layout in ("nchw", "nhwc")
        for op in _WITH_IMAGE
    ]


def ours(problem: SpatialtfProblem) -> Callable[..., Any]:
    """nbdnn's function of the same inputs as the peer's."""
    (height, width), (out_height, out_width) = problem.spatial, problem.out_spatial
    scales = out_width / width, out_height / height
    return {
        "spatialtf_fwd": lambda x, theta: nbdnn.dnn_spatialtf(x, theta, *scales),
        "spatialtf_bwd": lambda x, theta, dy: nbdnn.dnn_spatialtf_grad(x, theta, dy, *scales),
        "spatialtf_sampler_fwd": nbdnn.dnn_spatialtf_sampler,
        "spatialtf_sampler_bwd": nbdnn.dnn_spatialtf_sampler_grad,
    }[problem.op]


def peer(problem: SpatialtfProblem, device: str) -> Callable[..., Any]:
    """PyTorch's function of the problem's inputs: x, theta or grid, and dy of a gradient; theta; or dgrid.

    PyTorch samples at positions of the image's dtype. Its sampler's gradient is called without autograd; the grid's is
    a product of matrices, as its own.
    """
    shape, aten = (problem.n, max(problem.c, 1), *problem.out_spatial), torch.ops.aten

    def grid_of(theta: torch.Tensor) -> torch.Tensor:
        return functional.affine_grid(theta, shape, align_corners=True)

    def grid_gradient(dgrid: torch.Tensor) -> torch.Tensor:
        return aten.affine_grid_generator_backward(dgrid, shape, True)

    def sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return functional.grid_sample(x, grid.to(x.dtype), align_corners=True)

    def sampler_gradient(x: torch.Tensor, grid: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.grid_sampler_2d_backward(dy, x, grid.to(x.dtype), _BILINEAR, _ZEROS, True, [True, True])

    def gradient(x: torch.Tensor, theta: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dgrid = sampler_gradient(x, grid_of(theta), dy)
        return dx, grid_gradient(dgrid.to(theta.dtype))

    return {
        "spatialtf_fwd": lambda x, theta: sampled(x, grid_of(theta)),
        "spatialtf_bwd": gradient,
        "spatialtf_grid_fwd": grid_of,
        "spatialtf_grid_bwd": grid_gradient,
        "spatialtf_sampler_fwd": sampled,
        "spatialtf_sampler_bwd": sampler_gradient,
    }[problem.op]
