"""ResNet-50 on this machine: tune its convolutions once, then run the network with and without what was learned.

    make demo        (or: python examples/resnet50.py)

The first run measures every candidate of every different convolution and remembers the times; the second finds them
all in the database and measures nothing. Batch 1, float32, NCHW; weights are random, the shapes are the network's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

import nbdnn
from nbdnn.cli import main as nbdnn_command
from nbdnn.problem_conv import ConvProblem
from nbdnn.workloads import network

BUDGET_S = "20"  # for one of 23 different problems; the first ones compile the kernels, the others take a second or two
PASSES = 7
PROBLEMS = {layer.name: layer.problem for layer in network("resnet50") if isinstance(layer.problem, ConvProblem)}

Convolve = Callable[[str, np.ndarray], np.ndarray]


def resnet50(convolve: Convolve, image: np.ndarray) -> np.ndarray:
    """The network's 53 convolutions in order, without batch normalisation and classifier; `convolve(layer, x)`."""
    x = relu(convolve("conv1", image))[:, :, ::2, ::2]
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            y = relu(convolve(f"{at}.conv1", x))
            y = relu(convolve(f"{at}.conv2", y))
            y = convolve(f"{at}.conv3", y)
            x = relu(y + (convolve(f"{at}.downsample", x) if block == 0 else x))
    return x


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0, out=x)


def random_weights(problems: dict[str, ConvProblem]) -> dict[str, np.ndarray]:
    """Scaled so that activations neither grow nor vanish."""
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(problem.w_shape, np.float32) / np.float32(problem.reduction_length**0.5)
        for name, problem in problems.items()
    }


class Stopwatch:
    """Runs convolutions by `nbdnn.dnn_conv` and adds up their time, in seconds."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self._weights, self.seconds = weights, 0.0

    def convolve(self, layer: str, x: np.ndarray) -> np.ndarray:
        problem, x = PROBLEMS[layer], np.ascontiguousarray(x)
        start = perf_counter()
        y = nbdnn.dnn_conv(x, self._weights[layer], problem.pad, problem.stride, conv_mode="cross")
        self.seconds += perf_counter() - start
        return y


def main() -> int:
    if code := nbdnn_command(["autotune", "resnet50", "--only", "conv", "--budget", BUDGET_S]):
        return code

    weights, image = random_weights(PROBLEMS), np.random.default_rng(1).standard_normal((1, 3, 224, 224), np.float32)
    tuned_s: list[float] = []
    untuned_s: list[float] = []
    results: list[np.ndarray] = []
    for index in range(PASSES + 1):  # the first pass makes the plans
        for seconds, mode in ((tuned_s, "read-only"), (untuned_s, "off")):
            # Without its database nbdnn knows only the cost model: what a machine that was never tuned gets.
            with nbdnn.config.change(tune__mode=mode):
                watch = Stopwatch(weights)
                features = resnet50(watch.convolve, image)
            if index:
                seconds.append(watch.seconds)
            results.append(features)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-2, atol=1e-3)
    tuned_ms, untuned_ms = 1e3 * median(tuned_s), 1e3 * median(untuned_s)
    apart = max((max(each) - min(each)) / median(each) for each in (tuned_s, untuned_s))
    print(
        f"\nAll {len(PROBLEMS)} convolutions in order, median of {PASSES} passes: tuned {tuned_ms:.1f} ms, "
        f"untuned {untuned_ms:.1f} ms, speed-up {untuned_ms / tuned_ms:.2f}x; passes are up to {apart:.0%} apart"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
