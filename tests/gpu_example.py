"""The small convolution of `conv_example` with its gradients, as the tests of GPUs call it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from conv_example import PROBLEM, W, X, Y

from nbdnn import dnn_conv, dnn_gradinput, dnn_gradweight, reference_conv

DY = np.random.default_rng(1).standard_normal(Y.shape).astype("f")
DX = reference_conv.compute(PROBLEM.with_op("conv_bwd_data"), {"w": W, "dy": DY})
DW = reference_conv.compute(PROBLEM.with_op("conv_bwd_filter"), {"x": X, "dy": DY})


def assert_close(result: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def assert_all_right(x: Any, w: Any, dy: Any, times: int) -> None:
    """The convolution and both gradients of PyTorch's tensors, again and again."""
    for _ in range(times):
        assert_close(dnn_conv(x, w, 1).cpu().numpy(), Y)
        assert_close(dnn_gradinput(w, dy, X.shape, 1).cpu().numpy(), DX)
        assert_close(dnn_gradweight(x, dy, W.shape, 1).cpu().numpy(), DW)


def in_threads(*works: Callable[[], None]) -> None:
    """Runs all of them at once; none may fail."""
    failures: list[Exception] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
