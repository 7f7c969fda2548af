"""Dropout beside PyTorch: the rows of `compare_gpu_ops.py` and `compare_torch_ops.py`, and both calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import nbdnn
from nbdnn.problem_dropout import DropoutProblem

_ELEMENTS = (1 << 16, 1 << 20, 1 << 25, 1 << 27)
_CPU_ELEMENTS = (1 << 16, 1 << 18, 1 << 20, 1 << 23)
_OPS = ("dropout_fwd", "dropout_bwd")


def rows() -> list[str]:
    """The texts of the problems on a GPU."""
    return [f"{op}:{dtype}:m{m}" for m in _ELEMENTS for op in _OPS for dtype in ("f32", "f16", "bf16")]


def cpu_rows() -> list[str]:
    f32 = [f"{op}:f32:m{m}" for m in _CPU_ELEMENTS for op in _OPS]
    return [*f32, *(f"{op}:bf16:m{1 << 20}" for op in _OPS)]


def ours(problem: DropoutProblem) -> Callable[..., Any]:
    """nbdnn's function of the same inputs as the peer's."""
    share = _dropped(problem)
    if problem.op == "dropout_bwd":
        return lambda dy, mask: nbdnn.dnn_dropout_grad(dy, mask, share)
    state = torch.tensor([4242, 0])
    return lambda x: nbdnn.dnn_dropout(x, share, state=state)


def peer(problem: DropoutProblem, device: str) -> Callable[..., Any]:
    """PyTorch's function of the problem's inputs: of x, or of dy and nbdnn's mask.

    Its gradient reads what its own forward keeps: a byte an element on a GPU, a number of dy's type on the CPU. That is
    made of nbdnn's mask at the first call with a dy.
    """
    share = _dropped(problem)
    if problem.op == "dropout_fwd":
        return lambda x: functional.dropout(x, share)
    kept: dict[int, torch.Tensor] = {}
    scale = 1 / (1 - share)

    def gradient(dy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if dy.data_ptr() not in kept:
            bits = mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
            chosen = bits.flatten()[: problem.elements].bool()
            kept[dy.data_ptr()] = chosen if dy.is_cuda else chosen.to(dy.dtype) * scale
        if dy.is_cuda:
            return torch.ops.aten.native_dropout_backward(dy, kept[dy.data_ptr()], scale)
        return dy * kept[dy.data_ptr()]

    return gradient


def _dropped(problem: DropoutProblem) -> float:
    """The probability of a zero that the runner's threshold stands for."""
    return problem.scalars[0] / 2**32
