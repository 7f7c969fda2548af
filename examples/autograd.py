"""nbdnn's convolution as a layer of PyTorch: its autograd does not look into nbdnn, and is told the gradients here.

python examples/autograd.py        (on the GPU, if PyTorch sees one)
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import nbdnn


class Conv(torch.autograd.Function):
    """conv2d(x, w) of odd filters, of stride 1, with as much padding as keeps the size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return nbdnn.dnn_conv(x, w, border_mode="half", conv_mode="cross")

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, w = ctx.saved_tensors
        how = {"border_mode": "half", "conv_mode": "cross"}
        return (
            nbdnn.dnn_gradinput(w, dy, x.shape, **how) if ctx.needs_input_grad[0] else None,
            nbdnn.dnn_gradweight(x, dy, w.shape, **how) if ctx.needs_input_grad[1] else None,
        )


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(8, 16, 28, 28, device=device, requires_grad=True)
    w = torch.randn(32, 16, 3, 3, device=device, requires_grad=True)
    mine = torch.autograd.grad(Conv.apply(x, w).square().sum(), (x, w))
    theirs = torch.autograd.grad(torch.nn.functional.conv2d(x, w, padding=1).square().sum(), (x, w))
    for name, a, b in zip(("x", "w"), mine, theirs, strict=True):
        print(f"gradient by {name}: differs from PyTorch's by {float((a - b).norm() / b.norm()):.1e} of its norm")
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
