"""What a repeated call on a GPU costs the host, beside PyTorch: microseconds until it returns, its kernels queued.

    python bench/host_gpu.py [--arrays torch|cupy|numba] [--rows TEXT]... [--markdown FILE]

Small tensors, so that the GPU is never behind; nbdnn writes into out=, PyTorch's functions make their results. Both
sides take turns: a round is 200 calls of each, and what is shown is the best and the median of 60 rounds. nbdnn gets
the arrays of the library that is named, PyTorch its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional

import nbdnn
from nbdnn.cli_output import print_table

_CALLS, _ROUNDS = 200, 60
_SHAPE = 8, 16, 12, 12
_COLUMNS = ["call", "nbdnn: best", "median", "PyTorch: best", "median", "ratio"]
Call = Callable[[], object]


def convolutions(device: str) -> Iterator[tuple[str, partial, Call]]:
    """One implementation of each provider, by name."""
    c = _SHAPE[1]
    x, filters, each = (torch.randn(shape, device=device) for shape in (_SHAPE, (c, c, 3, 3), (c, 1, 3, 3)))
    y = torch.empty_like(x)
    for algorithm in ("numba/direct", "cudnn/graph"):
        ours = partial(nbdnn.dnn_conv, x, filters, "half", conv_mode="cross", algo=f"conv_fwd/{algorithm}", out=y)
        yield f"dnn_conv, {algorithm}", ours, partial(functional.conv2d, x, filters, padding=1)
    ours = partial(
        nbdnn.dnn_conv, x, each, "half", conv_mode="cross", num_groups=c, algo="conv_fwd/numba/depthwise", out=y
    )
    yield "dnn_conv, numba/depthwise", ours, partial(functional.conv2d, x, each, padding=1, groups=c)


def others(device: str) -> Iterator[tuple[str, partial, Call]]:
    """What the default policy runs of every other function."""
    n, c = _SHAPE[:2]
    x, dy = torch.randn(_SHAPE, device=device), torch.randn(_SHAPE, device=device)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    pooled, indices = functional.max_pool2d(x, 2, return_indices=True)
    top = torch.randn_like(pooled)
    pool_back = torch.ops.aten.max_pool2d_with_indices_backward
    yield "dnn_pool", partial(nbdnn.dnn_pool, x, (2, 2), (2, 2), out=pooled), partial(functional.max_pool2d, x, 2)
    yield (
        "dnn_pool_grad", partial(nbdnn.dnn_pool_grad, x, pooled, top, (2, 2), (2, 2), dx=dx),
        partial(pool_back, top, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices),
    )  # fmt: skip
    probabilities = torch.softmax(x, 1)
    yield "dnn_softmax", partial(nbdnn.dnn_softmax, x, out=y), partial(torch.softmax, x, 1)
    yield (
        "dnn_softmax_grad", partial(nbdnn.dnn_softmax_grad, dy, probabilities, out=dx),
        partial(torch.ops.aten._softmax_backward_data, dy, probabilities, 1, x.dtype),
    )  # fmt: skip
    gamma, beta = torch.ones((1, c, 1, 1), device=device), torch.zeros((1, c, 1, 1), device=device)
    mean, spread = torch.zeros_like(gamma), torch.ones_like(gamma)
    flat = [each.flatten() for each in (gamma, beta, mean, spread)]
    trained = y, torch.empty_like(gamma), torch.empty_like(gamma)
    gradients = dx, torch.empty_like(gamma), torch.empty_like(gamma)
    yield (
        "dnn_batch_normalization_train",
        partial(nbdnn.dnn_batch_normalization_train, x, gamma, beta, "spatial", out=trained),
        partial(torch.native_batch_norm, x, *flat[:2], None, None, True, 0.1, 1e-4),
    )  # fmt: skip
    yield (
        "dnn_batch_normalization_test",
        partial(nbdnn.dnn_batch_normalization_test, x, gamma, beta, mean, spread, "spatial", out=y),
        partial(torch.native_batch_norm, x, *flat, False, 0.1, 1e-4),
    )  # fmt: skip
    yield (
        "dnn_batch_normalization_grad",
        partial(nbdnn.dnn_batch_normalization_grad, x, dy, gamma, mean, spread, "spatial", out=gradients),
        partial(torch.ops.aten.native_batch_norm_backward, dy, x, flat[0], None, None, *flat[2:], True, 0, [True] * 3),
    )  # fmt: skip
    _, mask, state = dropped = nbdnn.dnn_dropout(x, 0.5)
    yield (
        "dnn_dropout", partial(nbdnn.dnn_dropout, x, 0.5, state=state, out=dropped),
        partial(torch.ops.aten.native_dropout, x, 0.5, True),
    )  # fmt: skip
    kept = torch.ones_like(x, dtype=torch.bool)
    yield (
        "dnn_dropout_grad", partial(nbdnn.dnn_dropout_grad, dy, mask, 0.5, out=dx),
        partial(torch.ops.aten.native_dropout_backward, dy, kept, 2.0),
    )  # fmt: skip
    theta = torch.randn((n, 2, 3), device=device)

    def transformed() -> torch.Tensor:
        return functional.grid_sample(x, functional.affine_grid(theta, list(_SHAPE), align_corners=True),
                                      align_corners=True)  # fmt: skip

    yield "dnn_spatialtf", partial(nbdnn.dnn_spatialtf, x, theta, out=y), transformed


def given_as(library: str, call: partial) -> Call:
    """The call with arrays of another library, each in the memory of its tensor; of one tensor there is one."""
    if library == "torch":
        return call
    if library == "cupy":
        from cupy import asarray as array_of
    else:
        from numba.cuda import as_cuda_array as array_of
    arrays: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of, value))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in arrays:
            arrays[id(value)] = array_of(value)
        return arrays[id(value)]

    return partial(call.func, *of(call.args), **{name: of(value) for name, value in call.keywords.items()})


def times_us(calls: tuple[Call, Call]) -> list[list[float]]:
    """Of a call, a number for each round."""
    found: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for call, times in zip(calls, found, strict=True):
            torch.cuda.synchronize()
            begun = perf_counter()
            for _ in range(_CALLS):
                call()
            times.append((perf_counter() - begun) / _CALLS * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="append", default=[], metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--arrays", choices=("torch", "cupy", "numba"), default="torch")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU")
    rows = []
    with torch.inference_mode():
        for name, ours, theirs in (*convolutions("cuda"), *others("cuda")):
            if args.rows and not any(part in name for part in args.rows):
                continue
            calls = given_as(args.arrays, ours), theirs
            for call in calls:
                call()
            first, second = times_us(calls)
            times = min(first), median(first), min(second), median(second)
            rows.append([name, *(f"{us:.1f}" for us in times), f"{times[3] / times[1]:.2f}"])
    print_table("microseconds of the host's time", _COLUMNS, rows, right=_COLUMNS[1:])
    if args.markdown:
        lines = [_COLUMNS, ["---", *["--:"] * (len(_COLUMNS) - 1)], *rows]
        args.markdown.write_text("".join("| " + " | ".join(line) + " |\n" for line in lines))


if __name__ == "__main__":
    main()
