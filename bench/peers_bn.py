"""Rows of batch normalisation for the bench of GPUs, and PyTorch's function for each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nbdnn.problem_bn import BN_OPS, BnProblem

# What follows op and dtype; parameters of 16-bit data are float32, as PyTorch's are.
_SHAPES = (
    "n32c256h56w56:spatial:nchw",
    "n32c256h56w56:spatial:nhwc",
    "n32c512h7w7:spatial:nchw",
    "n32c512h7w7:spatial:nhwc",
    "n4c64d16h56w56:spatial:ncdhw",
    "n4c64d16h56w56:spatial:ndhwc",
    "n4096c4096h1w1:per-activation:nchw",
)
_PARAMS = {"f32": "", "f16": ":pf32", "bf16": ":pf32"}


def rows() -> list[str]:
    """Problem texts."""
    return [f"{op}:{dtype}:{shape}{end}" for op in BN_OPS for shape in _SHAPES for dtype, end in _PARAMS.items()]


def peer(problem: BnProblem) -> Callable[..., object]:
    """PyTorch's function of the problem's inputs, in the order of its operands; the gradient of inference by autograd's
    function with given statistics, which has no gradients of these."""
    epsilon, factor = problem.scalars
    per_value = problem.mode == "per-activation"

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        """Data with one position where one value has statistics of its own; parameters with one axis."""
        if tensor.shape[0] == 1 and tensor.shape == problem.param_shape:
            return tensor.reshape(-1)
        return tensor.reshape(problem.n, -1) if per_value else tensor

    def train(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *running: torch.Tensor) -> object:
        given = [flat(each) for each in running] or [None, None]
        return torch.native_batch_norm(flat(x), flat(gamma), flat(beta), *given, True, factor, epsilon)

    def infer(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *statistics: torch.Tensor) -> object:
        given = [flat(each) for each in statistics]
        return torch.native_batch_norm(flat(x), flat(gamma), flat(beta), *given, False, factor, epsilon)

    def bwd(x: torch.Tensor, dy: torch.Tensor, gamma: torch.Tensor, *statistics: torch.Tensor) -> object:
        trained = problem.op == "bn_bwd"
        given = [flat(each) for each in statistics]
        running, saved = ([None, None], given) if trained else (given, [None, None])
        return torch.ops.aten.native_batch_norm_backward(
            flat(dy), flat(x), flat(gamma), *running, *saved, trained, epsilon, [True, True, True]
        )

    return {"bn_train": train, "bn_infer": infer}.get(problem.op, bwd)
