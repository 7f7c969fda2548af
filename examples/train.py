"""A small convolutional network trained by gradient descent, in NumPy and nbdnn alone: every layer and every gradient.

    python examples/train.py

It learns in which quarter of a noisy image the bright square lies. The first run compiles the kernels, which takes
longer than all of the training; the next one finds them on disk.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

import nbdnn

IMAGES, SIZE, CHANNELS, CLASSES = 32, 16, 8, 4
RATE, DROPPED = 0.05, 0.25
HALF = {"border_mode": "half", "conv_mode": "cross"}
WINDOW = {"ws": (2, 2), "stride": (2, 2)}


class Parameters(NamedTuple):
    """Of a 3x3 convolution, of its batch normalisation, and of the classifier: a convolution as large as its image."""

    filters: np.ndarray
    bias: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray
    classifier: np.ndarray


class Averages(NamedTuple):
    """What batch normalisation takes for mean and variance outside of training."""

    mean: np.ndarray
    var: np.ndarray


def images(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(images, labels): label 0 to 3 is the quarter with the square, row by row."""
    labels = rng.integers(0, CLASSES, IMAGES)
    x = 0.3 * rng.standard_normal((IMAGES, 1, SIZE, SIZE), np.float32)
    for image, label in zip(x, labels, strict=True):
        top, left = 8 * (label // 2) + 2, 8 * (label % 2) + 2
        image[:, top : top + 4, left : left + 4] += 1
    return x, labels


def beginning(rng: np.random.Generator) -> tuple[Parameters, Averages]:
    ones, zeros = np.ones((1, CHANNELS, 1, 1), np.float32), np.zeros((1, CHANNELS, 1, 1), np.float32)
    filters = 0.3 * rng.standard_normal((CHANNELS, 1, 3, 3), np.float32)
    classifier = 0.02 * rng.standard_normal((CLASSES, CHANNELS, SIZE // 2, SIZE // 2), np.float32)
    bias = np.zeros(CHANNELS, np.float32)
    return Parameters(filters, bias, ones.copy(), zeros.copy(), classifier), Averages(zeros.copy(), ones.copy())


def step(
    p: Parameters, averages: Averages, x: np.ndarray, labels: np.ndarray, state: np.ndarray | None
) -> tuple[float, Parameters, Averages, np.ndarray]:
    """(loss, its gradients, new averages, state of the dropout's generator)."""
    conv = nbdnn.dnn_conv(x, p.filters, bias=p.bias, **HALF)
    normal, mean, invstd, *running = nbdnn.dnn_batch_normalization_train(
        conv, p.gamma, p.beta, "spatial", running_mean=averages.mean, running_var=averages.var
    )
    active = np.maximum(normal, 0)
    pooled = nbdnn.dnn_pool(active, **WINDOW)
    kept, mask, state = nbdnn.dnn_dropout(pooled, DROPPED, state=state)
    scores = nbdnn.dnn_conv(kept, p.classifier, conv_mode="cross")
    logs = nbdnn.dnn_softmax(scores, "log")

    dlogs = np.zeros_like(logs)
    dlogs[np.arange(IMAGES), labels] = -1 / IMAGES
    dscores = nbdnn.dnn_softmax_grad(dlogs, logs, "log")
    dclassifier = nbdnn.dnn_gradweight(kept, dscores, p.classifier.shape, conv_mode="cross")
    dkept = nbdnn.dnn_gradinput(p.classifier, dscores, kept.shape, conv_mode="cross")
    dpooled = nbdnn.dnn_dropout_grad(dkept, mask, DROPPED)
    dactive = nbdnn.dnn_pool_grad(active, pooled, dpooled, **WINDOW)
    dconv, dgamma, dbeta = nbdnn.dnn_batch_normalization_grad(
        conv, dactive * (normal > 0), p.gamma, mean, invstd, "spatial"
    )
    dfilters = nbdnn.dnn_gradweight(x, dconv, p.filters.shape, **HALF)
    loss = float(np.sum(dlogs * logs))
    return loss, Parameters(dfilters, dconv.sum((0, 2, 3)), dgamma, dbeta, dclassifier), Averages(*running), state


def classes(p: Parameters, averages: Averages, x: np.ndarray) -> np.ndarray:
    """The class that the trained network gives each image: no dropout, and the averages instead of the batch's."""
    conv = nbdnn.dnn_conv(x, p.filters, bias=p.bias, **HALF)
    normal = nbdnn.dnn_batch_normalization_test(conv, p.gamma, p.beta, *averages, "spatial")
    scores = nbdnn.dnn_conv(nbdnn.dnn_pool(np.maximum(normal, 0), **WINDOW), p.classifier, conv_mode="cross")
    return scores[:, :, 0, 0].argmax(axis=1)


def train(steps: int) -> tuple[list[float], float]:
    """(loss of each step, share of new images that are told right afterwards)."""
    rng = np.random.default_rng(0)
    parameters, averages = beginning(rng)
    state, losses = None, []
    for _ in range(steps):
        loss, gradients, averages, state = step(parameters, averages, *images(rng), state)
        losses.append(loss)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= RATE * gradient
    x, labels = images(rng)
    return losses, float(np.mean(classes(parameters, averages, x) == labels))


def main() -> int:
    losses, right = train(60)
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps; {right:.0%} of new images right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
