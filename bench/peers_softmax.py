"""Softmax beside PyTorch: the rows of `compare_gpu_ops.py` and `compare_torch_ops.py`, and both calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import nbdnn
from nbdnn.problem_softmax import SOFTMAX_OPS, SoftmaxProblem

# (dims, algorithm, mode, layouts); the extents of a row are what decides.
_ROWS = (
    ("n8192c1024h1w1", "accurate", "channel", ("nchw",)),
    ("n4096c32000h1w1", "accurate", "channel", ("nchw",)),
    ("n4096c32000h1w1", "log", "channel", ("nchw",)),
    ("n4096c50257h1w1", "log", "channel", ("nchw",)),
    ("n65536c128h1w1", "accurate", "channel", ("nchw",)),
    ("n1048576c16h1w1", "accurate", "channel", ("nchw",)),
    ("n512c131072h1w1", "accurate", "channel", ("nchw",)),
    ("n32c1000h28w28", "accurate", "channel", ("nchw", "nhwc")),
    ("n32c21h128w128", "log", "channel", ("nchw", "nhwc")),
    ("n8c21d16h64w64", "log", "channel", ("ncdhw", "ndhwc")),
    ("n64c256h14w14", "accurate", "instance", ("nchw",)),
)
_CPU_ROWS = (
    ("n256c1000h1w1", "accurate", "channel", ("nchw",)),
    ("n64c32000h1w1", "log", "channel", ("nchw",)),
    ("n8192c64h1w1", "accurate", "channel", ("nchw",)),
    ("n65536c10h1w1", "accurate", "channel", ("nchw",)),
    ("n4c21h128w128", "log", "channel", ("nchw", "nhwc")),
    ("n2c150h64w64", "accurate", "channel", ("nchw", "nhwc")),
    ("n1c4d32h64w64", "accurate", "channel", ("ncdhw", "ndhwc")),
    ("n64c256h14w14", "accurate", "instance", ("nchw",)),
)


def rows() -> list[str]:
    """The texts of the problems on a GPU."""
    return _texts(_ROWS, ("f32", "f16", "bf16"))


def cpu_rows() -> list[str]:
    return [*_texts(_CPU_ROWS, ("f32",)), *_texts(_CPU_ROWS[:1] + _CPU_ROWS[4:5], ("bf16",))]


def _texts(shapes: tuple[tuple[str, str, str, tuple[str, ...]], ...], dtypes: tuple[str, ...]) -> list[str]:
    return [
        f"{op}:{dtype}:{dims}:{algorithm}:{mode}:{layout}"
        for dims, algorithm, mode, layouts in shapes
        for layout in layouts
        for op in SOFTMAX_OPS
        for dtype in dtypes
    ]


def ours(problem: SoftmaxProblem) -> Callable[..., Any]:
    """nbdnn's function of the same inputs as the peer's."""
    function = nbdnn.dnn_softmax if problem.op == "softmax_fwd" else nbdnn.dnn_softmax_grad
    return partial(function, algo=problem.algorithm, mode=problem.mode)


def peer(problem: SoftmaxProblem, device: str) -> Callable[..., Any]:
    """PyTorch's function of the problem's inputs: of x, or of dy and y."""
    is_log, flat = problem.algorithm == "log", problem.mode == "instance"
    forward = torch.log_softmax if is_log else torch.softmax
    backward = torch.ops.aten._log_softmax_backward_data if is_log else torch.ops.aten._softmax_backward_data

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(1) if flat else tensor

    if problem.op == "softmax_fwd":
        return lambda x: forward(shaped(x), 1)
    return lambda dy, y: backward(shaped(dy), shaped(y), 1, dy.dtype)
