"""Pooling beside PyTorch: the rows of `compare_gpu_ops.py` and `compare_torch_ops.py`, and both calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import nbdnn
from nbdnn.problem_pool import POOL_OPS, PoolProblem

_SHAPES = (
    "n32c64h112w112:r3s3:p1x1:u2x2:max",
    "n16c64h224w224:r2s2:p0x0:u2x2:max",
    "n32c256h28w28:r3s3:p1x1:u1x1:average_inc_pad",
    "n32c256h56w56:r56s56:p0x0:u1x1:average_inc_pad",
    "n4c64d16h112w112:t2r2s2:p0x0x0:u2x2x2:max",
    "n4c64d16h56w56:t3r3s3:p1x1x1:u2x2x2:max",
    "n32c288h35w35:r3s3:p0x0:u2x2:max",
    "n32c512h14w14:r2s2:p0x0:u2x2:average_exc_pad",
)
_CPU_SHAPES = (
    "n8c64h112w112:r3s3:p1x1:u2x2:max",
    "n8c64h112w112:r2s2:p0x0:u2x2:max",
    "n8c192h28w28:r3s3:p1x1:u1x1:max",
    "n8c256h28w28:r3s3:p1x1:u1x1:average_inc_pad",
    "n8c2048h7w7:r7s7:p0x0:u1x1:average_inc_pad",
    "n1c32d32h56w56:t2r2s2:p0x0x0:u2x2x2:max",
    "n1c32d16h56w56:t3r3s3:p1x1x1:u2x2x2:max",
)
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


def rows() -> list[str]:
    """The texts of the problems on a GPU."""
    return _texts(_SHAPES, ("f32", "f16", "bf16"))


def cpu_rows() -> list[str]:
    return [*_texts(_CPU_SHAPES, ("f32",)), *_texts(_CPU_SHAPES[:1], ("bf16",))]


def _texts(shapes: tuple[str, ...], dtypes: tuple[str, ...]) -> list[str]:
    return [
        f"{op}:{dtype}:{shape}:{layout}"
        for shape in shapes
        for layout in (("ncdhw", "ndhwc") if ":t" in shape else ("nchw", "nhwc"))
        for op in POOL_OPS
        for dtype in dtypes
    ]


def ours(problem: PoolProblem) -> Callable[..., Any]:
    """nbdnn's function of the same inputs as the peer's."""
    where = problem.window, problem.stride, problem.mode, problem.pad
    if problem.op == "pool_fwd":
        return lambda x: nbdnn.dnn_pool(x, *where)
    if problem.is_max:
        return lambda x, y, dy: nbdnn.dnn_pool_grad(x, y, dy, *where)
    image = problem.operands[-1]
    x = torch.empty_strided(image.shape, image.strides, dtype=_DTYPES[problem.dtype])
    return lambda dy: nbdnn.dnn_pool_grad(x, dy, dy, *where)


def peer(problem: PoolProblem, device: str) -> Callable[..., Any]:
    """PyTorch's function of the problem's inputs: of x; of x, y and dy; or of dy.

    Its gradient of a maximum reads indices that its forward has kept instead of x and y; they are made at the first
    call with an x.
    """
    ndim, aten = len(problem.spatial), torch.ops.aten
    where = problem.window, problem.stride, problem.pad
    if problem.is_max:
        pool, backward = (getattr(aten, f"max_pool{ndim}d_with_indices{end}") for end in ("", "_backward"))
        if problem.op == "pool_fwd":
            return partial(_forward, getattr(functional, f"max_pool{ndim}d"), where)
        kept: dict[int, torch.Tensor] = {}

        def of_maximum(x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
            if x.data_ptr() not in kept:
                kept[x.data_ptr()] = pool(x, *where)[1]
            return backward(dy, x, *where, [1] * ndim, False, kept[x.data_ptr()])

        return of_maximum
    counts, divisor = problem.mode != "average_exc_pad", 1 if problem.mode == "sum" else None
    if problem.op == "pool_fwd":
        return lambda x: getattr(functional, f"avg_pool{ndim}d")(x, *where, False, counts, divisor)
    image = problem.operands[-1]
    x = torch.empty_strided(image.shape, image.strides, dtype=_DTYPES[problem.dtype], device=device)
    return lambda dy: getattr(aten, f"avg_pool{ndim}d_backward")(dy, x, *where, False, counts, divisor)


def _forward(pool: Callable[..., Any], where: tuple, x: torch.Tensor) -> torch.Tensor:
    return pool(x, *where)
