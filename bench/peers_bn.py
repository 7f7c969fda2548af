"""Batch normalisation beside PyTorch: the rows of `compare_gpu_ops.py` and `compare_torch_ops.py`, and both calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

import nbdnn
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
_CPU_SHAPES = (
    "n8c64h56w56:spatial:nchw",
    "n8c64h56w56:spatial:nhwc",
    "n8c256h56w56:spatial:nchw",
    "n8c256h56w56:spatial:nhwc",
    "n8c512h7w7:spatial:nchw",
    "n8c512h7w7:spatial:nhwc",
    "n2c32d16h56w56:spatial:ncdhw",
    "n2c32d16h56w56:spatial:ndhwc",
    "n256c2048h1w1:per-activation:nchw",
    "n32c1024h1w1:per-activation:nchw",
    "n4c7776h1w1:per-activation:nchw",
)
_PARAMS = {"f32": "", "f16": ":pf32", "bf16": ":pf32"}


def rows() -> list[str]:
    """The texts of the problems on a GPU."""
    return _texts(BN_OPS, _SHAPES, _PARAMS)


def cpu_rows() -> list[str]:
    """Without the gradient of inference, whose peer leaves out two of its five results."""
    return [*_texts(BN_OPS[:3], _CPU_SHAPES, ("f32",)), *_texts(BN_OPS[:3], _CPU_SHAPES[:2], ("bf16",))]


def _texts(ops: Sequence[str], shapes: Sequence[str], dtypes: Iterable[str]) -> list[str]:
    return [f"{op}:{dtype}:{shape}{_PARAMS[dtype]}" for op in ops for shape in shapes for dtype in dtypes]


def ours(problem: BnProblem) -> Callable[..., object]:
    """nbdnn's function of the same inputs as the peer's."""
    function = {
        "bn_train": nbdnn.dnn_batch_normalization_train,
        "bn_infer": nbdnn.dnn_batch_normalization_test,
        "bn_bwd": nbdnn.dnn_batch_normalization_grad,
        "bn_infer_bwd": nbdnn.dnn_batch_normalization_test_grad,
    }[problem.op]
    return partial(function, mode=problem.mode, epsilon=problem.scalars[0])


def peer(problem: BnProblem, device: str) -> Callable[..., object]:
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
        # PyTorch wants statistics that were saved also where it reads those that are running.
        running, saved = ([None, None] if trained else given), given
        return torch.ops.aten.native_batch_norm_backward(
            flat(dy), flat(x), flat(gamma), *running, *saved, trained, epsilon, [True, True, True]
        )

    return {"bn_train": train, "bn_infer": infer}.get(problem.op, bwd)
