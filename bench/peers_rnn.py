"""Recurrent networks beside PyTorch's, which are cuDNN's: the rows of `compare_gpu_ops.py`, and both calls.

A row in training is a forward with its gradient, on either side: nbdnn's two problems have the tape with which they
take least together, for its own kernels nbdnn's tape. Neither gradient retains it, as is PyTorch's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nbdnn.dispatch import dispatcher
from nbdnn.dispatch.policy import Request
from nbdnn.problem_rnn import RnnProblem
from nbdnn.rnn_parameters import Part
from nbdnn.rnn_tape import best

_NETWORKS = (
    *(("t256b1i64h64l1", mode) for mode in ("lstm", "gru")),
    *(("t1000b8i32h32l1", mode) for mode in ("lstm", "gru")),
    *(("t512b16i128h128l1", mode) for mode in ("lstm", "gru")),
    *(("t50b32i128h128l1", mode) for mode in ("lstm", "gru")),
    *(("t50b64i512h512l2", mode) for mode in ("lstm", "gru")),
    ("t256b8i64h64l1", "rnn_tanh"),
    *(("t100b16i512h512l1", mode) for mode in ("lstm", "gru")),
    ("t50b32i1024h1024l1", "lstm"),
)
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers


def rows() -> list[str]:
    """The texts of the problems: inference, then training."""
    return [
        f"rnn_fwd:{dtype}:{dims}:{mode}:uni:linear{end}"
        for dims, mode in _NETWORKS
        for dtype in ("f32", "f16")
        for end in ("", ":train")
    ]


def posed(problem: RnnProblem) -> dict[str, tuple[RnnProblem, ...]]:
    """What is measured one after the other: by what the tuner chose, and by nbdnn's own kernels."""
    if not problem.training:
        return {"chosen": (problem,), "own": (problem,)}
    chosen = replace(problem, tape=best(problem, dispatcher.context(0), Request("time_on_shape_change")))
    pairs = {"chosen": chosen, "own": problem}
    return {kind: (each, _gradient(each)) for kind, each in pairs.items()}


def _gradient(forward: RnnProblem) -> RnnProblem:
    tape = forward.tape and forward.tape._replace(consumed=True)
    return replace(forward, op="rnn_bwd", training=False, tape=tape)


def peer(problem: RnnProblem, device: str) -> Callable[..., Any]:
    """PyTorch's function of x, hx, cx (of a LSTM) and w; float32 without TF32, as nbdnn's."""
    torch.backends.cudnn.allow_tf32 = False
    top: dict[int, torch.Tensor] = {}

    def run(x: torch.Tensor, hx: torch.Tensor, *rest: torch.Tensor) -> object:
        cx, w = rest if problem.has_cell else (None, *rest)
        assert w is not None
        weights = _weights(problem, w)
        network = problem.hidden, 0, problem.layers, False, 0.0, problem.training, problem.bidirectional, [], None
        mode = _MODES[problem.mode]
        y, hy, cy, reserve, packed = torch.ops.aten._cudnn_rnn(x, weights, 4, w, hx, cx, mode, *network)
        if not problem.training:
            return y, hy, cy
        if x.data_ptr() not in top:
            top[x.data_ptr()] = torch.randn_like(y)
        given = top[x.data_ptr()], None, None
        return torch.ops.aten._cudnn_rnn_backward(
            x, weights, 4, packed, hx, cx, y, *given, mode, *network, reserve, [True, True, problem.has_cell, True]
        )

    return run


def _weights(problem: RnnProblem, w: torch.Tensor) -> list[torch.Tensor]:
    """Views of the block as PyTorch's modules have their weights: of all gates W, R, bW and bR, layer by layer."""
    parameters, found = problem.parameters, []
    gates = parameters.gates
    for pseudo_layer in range(parameters.pseudo_layers):
        for parts in (parameters.matrices(pseudo_layer), parameters.biases(pseudo_layer)):
            for first in (parts[0], parts[gates]):
                assert isinstance(first, Part)
                shape = gates * problem.hidden, *first.shape[1:]
                size = shape[0] * (shape[1] if shape[1:] else 1)
                found.append(w[first.offset : first.offset + size].view(shape))
    return found
