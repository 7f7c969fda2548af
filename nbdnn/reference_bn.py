"""Batch normalisation and its gradients in plain float64 NumPy; sums over the m elements of a channel.

    bn_train      mean = sum x / m;  var = sum (x - mean)^2 / m;  invstd = 1 / sqrt(var + epsilon)
                  y = (x - mean) * invstd * gamma + beta
                  new_running_mean = (1 - f) * running_mean + f * mean
                  new_running_var = (1 - f) * running_var + f * var * m / (m - 1)
    bn_infer      y = (x - mean) / s * gamma + beta,   s = sqrt(var + epsilon)
    bn_bwd        dbeta = sum dy;  dgamma = sum dy * (x - mean) * invstd
                  dx = gamma * invstd * (dy - dbeta / m - (x - mean) * invstd * dgamma / m)
    bn_infer_bwd  dx = dy * gamma / s;  dbeta = sum dy;  dgamma = sum dy * (x - mean) / s
                  dmean = -dbeta * gamma / s;  dvar = -dgamma * gamma / (2 * s^2)

How far off an implementation may be: sums by the model of `nbdnn.tolerance`, with the terms as large as they are before
means are subtracted; square roots, quotients and products a few eps of their size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nbdnn.expected import COEFFICIENT, BoundedSample, Sample, ends_and_some
from nbdnn.problem_bn import BnProblem

Arrays = Mapping[str, np.ndarray]
Bounded = dict[str, tuple[np.ndarray, np.ndarray]]  # value and slack, by name
_FEW = 6.0  # eps of a square root, a quotient and some products together
_ELEMENTS = 1 << 22  # of the channels that are computed where not all of them are
_LEAST_CHANNELS = 8


def samples(
    problem: BnProblem, operands: Arrays, scalars: tuple[float, ...], count: int | None
) -> dict[str, Sample]:  # fmt: skip
    """Of each output, by its name: at least `count` elements of some channels, with all their statistics; or all."""
    rng = np.random.default_rng(0)
    channels, rows = np.arange(np.prod(problem.param_shape[1:], dtype=int)), np.arange(problem.m)
    if count is not None:
        channels = ends_and_some(len(channels), max(_LEAST_CHANNELS, _ELEMENTS // max(problem.m, 1)), rng)
        rows = ends_and_some(problem.m, max(_LEAST_CHANNELS, -(-count // max(len(channels), 1))), rng)
    inputs = [o for o in problem.operands if o.role == "in"]
    given = {o.name: _by_channel(problem, operands[o.name], channels) for o in inputs}
    with np.errstate(all="ignore"):
        expected = _METHODS[problem.op](problem, given, *scalars)
    found: dict[str, Sample] = {}
    for out in (o for o in problem.operands if o.role == "out"):
        is_data = out.name in ("y", "dx")
        chosen = rows if is_data else np.zeros(1, int)
        value, slack = (array[chosen].ravel() for array in expected[out.name])
        found[out.name] = BoundedSample(_index(problem, chosen, channels, is_data), value, slack, out.dtype)
    return found


def _by_channel(problem: BnProblem, array: np.ndarray, channels: np.ndarray) -> np.ndarray:
    """In float64: (m, channels) of data, (1, channels) of parameters."""
    if problem.mode == "per-activation":
        return array.reshape(array.shape[0], -1)[:, channels].astype(np.float64)
    flat = array.reshape(*array.shape[:2], -1)[:, channels].astype(np.float64)
    return flat.transpose(0, 2, 1).reshape(-1, len(channels))


def _index(problem: BnProblem, rows: np.ndarray, channels: np.ndarray, is_data: bool) -> tuple[np.ndarray, ...]:
    """Where the elements (rows, channels) are in data; or in parameters, which have one row."""
    ndim = len(problem.spatial)
    if problem.mode == "per-activation":
        n, c = rows, np.unravel_index(channels, problem.shape[1:])
        along = [n[:, None], *(axis[None] for axis in c)]
    else:
        n, *position = np.unravel_index(rows, (problem.n, *problem.spatial) if is_data else (1,) * (1 + ndim))
        along = [n[:, None], channels[None], *(axis[:, None] for axis in position)]
    return tuple(axis.ravel() for axis in np.broadcast_arrays(*along))


def _of_sum(terms: np.ndarray) -> np.ndarray:
    """Slack of the sum of each column."""
    return COEFFICIENT * np.sqrt(len(terms)) * np.sqrt((terms * terms).sum(axis=0, keepdims=True))


def _train(problem: BnProblem, given: Arrays, epsilon: float, factor: float) -> Bounded:
    x, gamma, beta, m = given["x"], given["gamma"], given["beta"], problem.m
    mean = x.mean(axis=0, keepdims=True)
    difference = x - mean
    var = (difference * difference).mean(axis=0, keepdims=True)
    invstd = 1 / np.sqrt(var + epsilon)
    mean_slack = _of_sum(x) / m + abs(mean)
    var_slack = _of_sum(difference * difference) / m + _FEW * var
    relative = var_slack / (var + epsilon) / 2 + _FEW
    scaled = difference * invstd * gamma
    y = scaled + beta
    y_slack = abs(gamma * invstd) * (mean_slack + abs(x)) + abs(scaled) * relative + abs(beta) + abs(y)
    found = {"y": (y, y_slack), "mean": (mean, mean_slack), "invstd": (invstd, invstd * relative)}
    if problem.running:
        for name, old, new, slack in (
            ("new_running_mean", given["running_mean"], mean, mean_slack),
            ("new_running_var", given["running_var"], var * m / (m - 1), var_slack * m / (m - 1)),
        ):
            value = (1 - factor) * old + factor * new
            found[name] = value, 2 * abs((1 - factor) * old) + factor * (slack + 2 * abs(new)) + abs(value)
    return found


def _infer(problem: BnProblem, given: Arrays, epsilon: float, factor: float) -> Bounded:
    x, gamma, beta, mean, var = (given[name] for name in ("x", "gamma", "beta", "mean", "var"))
    scale = gamma / np.sqrt(var + epsilon)
    y = (x - mean) * scale + beta
    return {"y": (y, _FEW * abs(scale) * (abs(x) + abs(mean)) + abs(beta) + abs(y))}


def _sums(given: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """sum dy and its slack, sum dy * (x - mean) and its slack."""
    x, dy, mean = given["x"], given["dy"], given["mean"]
    total, moment = dy.sum(axis=0, keepdims=True), (dy * (x - mean)).sum(axis=0, keepdims=True)
    return total, _of_sum(dy), moment, _of_sum(dy * (abs(x) + abs(mean)))


def _bwd(problem: BnProblem, given: Arrays, epsilon: float, factor: float) -> Bounded:
    x, dy, gamma, mean, invstd = (given[name] for name in ("x", "dy", "gamma", "mean", "invstd"))
    m = max(problem.m, 1)
    total, total_slack, moment, moment_slack = _sums(given)
    slope = invstd * invstd / m
    dx = gamma * invstd * (dy - total / m - (x - mean) * slope * moment)
    of_moment = (abs(x) + abs(mean)) * slope * (moment_slack + _FEW * abs(moment))
    slack = abs(gamma * invstd) * (_FEW * abs(dy) + (total_slack + _FEW * abs(total)) / m + of_moment) + abs(dx)
    dgamma = moment * invstd
    return {
        "dx": (dx, slack),
        "dgamma": (dgamma, moment_slack * invstd + _FEW * abs(dgamma)),
        "dbeta": (total, total_slack),
    }


def _infer_bwd(problem: BnProblem, given: Arrays, epsilon: float, factor: float) -> Bounded:
    dy, gamma, std = given["dy"], given["gamma"], np.sqrt(given["var"] + epsilon)
    total, total_slack, moment, moment_slack = _sums(given)
    of_mean, of_var = -gamma / std, -gamma / (2 * std**3)
    exact = {
        "dgamma": (moment / std, moment_slack / std),
        "dbeta": (total, total_slack),
        "dmean": (total * of_mean, total_slack * abs(of_mean)),
        "dvar": (moment * of_var, moment_slack * abs(of_var)),
    }
    found = {name: (value, slack + _FEW * abs(value)) for name, (value, slack) in exact.items()}
    dx = dy * gamma / std
    return found | {"dx": (dx, _FEW * abs(dx))}


_METHODS = {"bn_train": _train, "bn_infer": _infer, "bn_bwd": _bwd, "bn_infer_bwd": _infer_bwd}
