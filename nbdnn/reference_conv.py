"""Convolution and its gradients in plain float64 NumPy.

Nothing here is fast, but for `sample`, which computes some outputs of a big problem in a fraction of a second. With a
value come the two magnitudes that say how far off a correct implementation may be: see `nbdnn.tolerance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil, isqrt, prod
from typing import Any

import numpy as np

from nbdnn.expected import ConvSample, ends_and_some, positions
from nbdnn.problem_conv import ConvProblem

Arrays = Mapping[str, np.ndarray]
_CHUNK_ELEMS = 1 << 22  # patches gathered at once: 32 MiB of float64


def compute(problem: ConvProblem, operands: Arrays, scalars: tuple[float, float] = (1.0, 0.0)) -> np.ndarray:
    """The output of `problem` in float64: ``activation(alpha * conv + beta * out + bias + residual)``.

    Parameters
    ----------
    operands
        An array of logical shape (any strides, any dtype) for each name in ``problem.operands``; the output's is
        read where the epilogue has beta, and may else be left out.
    scalars
        (alpha, beta).
    """
    conv = _DIRECTIONS[problem.op](problem, *_factors(problem, operands))
    terms = _added_terms(problem, operands, scalars[1], ...)
    return activate(problem.activation, sum(terms, start=scalars[0] * conv))


def whole(problem: ConvProblem, operands: Arrays, scalars: tuple[float, float] = (1.0, 0.0)) -> ConvSample:
    """Every output of `problem` with its magnitudes, by the plain formulas."""
    a, b = _factors(problem, operands)
    direction = _DIRECTIONS[problem.op]
    conv, squares, sum_abs = (
        direction(problem, a, b),
        direction(problem, a * a, b * b),
        direction(problem, abs(a), abs(b)),
    )
    index = tuple(axis.ravel() for axis in np.indices(conv.shape))
    return _finished(problem, operands, scalars, index, conv.ravel(), squares.ravel(), sum_abs.ravel())


def samples(
    problem: ConvProblem, operands: Arrays, scalars: tuple[float, float], count: int | None
) -> dict[str, ConvSample]:
    """The output's `whole`, or a `sample` of it, by its name."""
    (out,) = (operand.name for operand in problem.operands if operand.role == "out")
    if count is None:
        return {out: whole(problem, operands, scalars)}
    return {out: sample(problem, operands, scalars, count)}


def sample(
    problem: ConvProblem,
    operands: Arrays,
    scalars: tuple[float, float] = (1.0, 0.0),
    count: int = 10_000,
    seed: int = 0,
) -> ConvSample:
    """At least `count` outputs of `problem` (all of them where it has fewer), corners, borders and both ends of every
    axis, where tiles have their remainders, among them."""
    pick = _sample_filter if problem.op == "conv_bwd_filter" else _sample_image
    index, conv, squares, sum_abs = pick(problem, operands, count, np.random.default_rng(seed))
    return _finished(problem, operands, scalars, index, conv, squares, sum_abs)


def activate(name: str | None, value: np.ndarray) -> np.ndarray:
    """The activation called `name`, or none."""
    match name:
        case "relu":
            return np.maximum(value, 0)
        case "sigmoid":
            return _sigmoid(value)
        case "swish":
            with np.errstate(invalid="ignore"):  # -inf times 0 is NaN, as kernels have it
                return value * _sigmoid(value)
        case "tanh":
            return np.tanh(value)
    return value


def _sigmoid(value: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * value)


# The three directions, one filter tap at a time. Shapes: x (n, g, c, spatial), w (g, k, c, filter), y (n, g, k, out).


def conv_fwd(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y[n, k, p, q] = sum over c, r, s of x[n, c, p*u + r*d - pad, q*u + s*d - pad] * w[k, c, r, s], x 0 outside.

    c runs over the group of k; mode 'conv' reads w[k, c, -r, -s].
    """
    padded, taps = _padded(problem, x), _taps(problem, w)
    y = np.zeros((problem.n, problem.groups, problem.k // problem.groups, prod(problem.out_spatial)))
    for tap, window in _windows(problem):
        y += taps[_at(tap)] @ _flat(padded[window])
    return y.reshape(problem.y_shape)


def conv_bwd_data(problem: ConvProblem, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dx[n, c, p*u + r*d - pad, q*u + s*d - pad] = sum over k, r, s of dy[n, k, p, q] * w[k, c, r, s]."""
    padded, taps = _padded(problem, np.zeros(problem.x_shape)), _taps(problem, w)
    dy = _flat(_grouped(problem, dy))
    for tap, window in _windows(problem):
        padded[window] += (taps[_at(tap)].swapaxes(1, 2) @ dy).reshape(padded[window].shape)
    inside = tuple(slice(before, before + i) for (before, _), i in zip(problem.pad, problem.spatial, strict=True))
    return padded[_at(inside)].reshape(problem.x_shape)


def conv_bwd_filter(problem: ConvProblem, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, p*u + r*d - pad, q*u + s*d - pad]."""
    padded, dw = _padded(problem, x), np.zeros(problem.w_shape)
    taps, dy = _taps(problem, dw), _flat(_grouped(problem, dy))
    for tap, window in _windows(problem):
        taps[_at(tap)] = (dy @ _flat(padded[window]).swapaxes(2, 3)).sum(axis=0)
    return dw


_DIRECTIONS: dict[str, Callable[[ConvProblem, np.ndarray, np.ndarray], np.ndarray]] = {
    "conv_fwd": conv_fwd,
    "conv_bwd_data": conv_bwd_data,
    "conv_bwd_filter": conv_bwd_filter,
}


def _factors(problem: ConvProblem, operands: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The two operands whose products are summed, in float64: (x, w), (w, dy) or (x, dy)."""
    first, second = [operand.name for operand in problem.operands if operand.role == "in"][:2]
    return operands[first].astype(np.float64), operands[second].astype(np.float64)


def _grouped(problem: ConvProblem, image: np.ndarray) -> np.ndarray:
    return image.reshape(image.shape[0], problem.groups, image.shape[1] // problem.groups, *image.shape[2:])


def _padded(problem: ConvProblem, x: np.ndarray) -> np.ndarray:
    return _grouped(problem, np.pad(x, ((0, 0), (0, 0), *problem.pad)))


def _taps(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """A view of w as (g, k, c, filter), flipped in mode 'conv'."""
    if problem.mode == "conv":
        w = np.flip(w, axis=tuple(range(2, w.ndim)))
    return w.reshape(problem.groups, problem.k // problem.groups, *w.shape[1:])


def _flat(image: np.ndarray) -> np.ndarray:
    return image.reshape(*image.shape[:3], prod(image.shape[3:]))


def _at(trailing: Iterable[Any]) -> Any:
    """The index that selects on the last axes."""
    return (..., *trailing)


def _windows(problem: ConvProblem) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(tap, where the padded image meets it: an index that leaves an array of shape (..., *out_spatial))."""
    for tap in np.ndindex(*problem.filter):
        steps = zip(tap, problem.dilation, problem.stride, problem.out_spatial, strict=True)
        yield tap, _at(slice(r * d, r * d + (p - 1) * u + 1, u) for r, d, u, p in steps)


# The epilogue, and what it adds to the magnitudes.


def _added_terms(problem: ConvProblem, operands: Arrays, beta: float, index: Any) -> list[np.ndarray]:
    """beta * out, bias and residual at `index`, in float64, as far as the problem has them."""
    (out,) = (operand for operand in problem.operands if operand.role == "out")
    terms = []
    if "beta" in problem.epilogue:
        terms.append(beta * operands[out.name][index].astype(np.float64))
    if "bias" in problem.epilogue:
        along_channels = operands["bias"].reshape(-1, *(1 for _ in problem.spatial))
        terms.append(np.broadcast_to(along_channels, out.shape)[index].astype(np.float64))
    if "res" in problem.epilogue:
        terms.append(operands["residual"][index].astype(np.float64))
    return terms


def _finished(
    problem: ConvProblem,
    operands: Arrays,
    scalars: tuple[float, float],
    index: tuple[np.ndarray, ...],
    conv: np.ndarray,
    squares: np.ndarray,
    sum_abs: np.ndarray,
) -> ConvSample:
    alpha, beta = scalars
    terms = _added_terms(problem, operands, beta, index)
    total = sum(terms, start=alpha * conv)
    value = activate(problem.activation, total)
    unfused = alpha * conv + (terms[0] if "beta" in problem.epilogue else 0.0)
    return ConvSample(
        index,
        value,
        rss=np.sqrt(sum((term * term for term in terms), start=alpha * alpha * squares)),
        sum_abs=sum((abs(term) for term in terms), start=abs(alpha) * sum_abs),
        peak=np.maximum.reduce([abs(conv), abs(alpha * conv), abs(unfused), abs(total), abs(value)]),
    )


# Sampling. Outputs are chosen as positions x channels, so that gathered patches times filters is one matrix product.


def _sample_image(
    problem: ConvProblem, operands: Arrays, count: int, rng: np.random.Generator
) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Sampled outputs of conv_fwd or conv_bwd_data: (index, sum, sum of squares, sum of magnitudes of products)."""
    forward = problem.op == "conv_fwd"
    image, w = operands["x" if forward else "dy"], _taps(problem, operands["w"])
    if not forward:
        w = w.swapaxes(1, 2)  # (g, output channels, summed channels, filter) in both directions
    per_group, summed = w.shape[1:3]
    chosen = ends_and_some(per_group, 64, rng)
    groups = ends_and_some(problem.groups, ceil(64 / len(chosen)), rng) if len(chosen) else np.arange(0)
    extents = (problem.n, *(problem.out_spatial if forward else problem.spatial))
    channels = (groups[:, None] * per_group + chosen).ravel()
    n, *where = positions(extents, ceil(count / max(len(channels), 1)), rng)

    depth = summed * prod(problem.filter)
    filters = w[groups[:, None], chosen].astype(np.float64).reshape(len(groups), len(chosen), depth).swapaxes(1, 2)
    source = (groups[:, None] * summed + np.arange(summed)).reshape(len(groups), 1, summed, *(1 for _ in where))
    step = max(1, _CHUNK_ELEMS // max(1, len(groups) * depth))
    parts = []
    for start in range(0, max(len(n), 1), step):
        part = slice(start, start + step)
        patches = _patches(problem, image, source, n[part], [axis[part] for axis in where], forward)
        parts.append(_three_sums(patches.reshape(len(groups), len(n[part]), depth), filters))
    conv, squares, sum_abs = (
        np.concatenate(sums, axis=1) for sums in zip(*parts, strict=True)
    )  # (g, position, channel)
    order = (len(groups), len(n), len(chosen))
    by_position = [np.broadcast_to(axis[:, None], order).ravel() for axis in (n, *where)]
    by_channel = np.broadcast_to(channels.reshape(len(groups), 1, len(chosen)), order).ravel()
    return (by_position[0], by_channel, *by_position[1:]), conv.ravel(), squares.ravel(), sum_abs.ravel()


def _patches(
    problem: ConvProblem, image: np.ndarray, source: np.ndarray, n: np.ndarray, where: list[np.ndarray], forward: bool
) -> np.ndarray:
    """What each position reads: (g, position, summed channel, filter) in float64, 0 outside of the image.

    The forward at p meets tap r in x at p*u + r*d - pad; bwd_data at h meets it in dy at (h + pad - r*d) / u, where
    that is whole.
    """
    ndim = len(where)
    index, valid = [n.reshape(1, -1, 1, *(1 for _ in where)), source], np.True_
    for axis, position in enumerate(where):
        tap = np.arange(problem.filter[axis]) * problem.dilation[axis]
        before, stride = problem.pad[axis][0], problem.stride[axis]
        if forward:
            at, whole_step = position[:, None] * stride + tap - before, np.True_
        else:
            at, remainder = np.divmod(position[:, None] + before - tap, stride)
            whole_step = remainder == 0
        extent = image.shape[2 + axis]
        shape = (1, len(n), 1, *(len(tap) if a == axis else 1 for a in range(ndim)))
        valid = valid & ((at >= 0) & (at < extent) & whole_step).reshape(shape)
        index.append(np.clip(at, 0, extent - 1).reshape(shape))
    return np.where(valid, image[tuple(index)].astype(np.float64), 0.0)


def _three_sums(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrix products of a and b, of their squares and of their magnitudes."""
    return a @ b, (a * a) @ (b * b), abs(a) @ abs(b)


def _sample_filter(
    problem: ConvProblem, operands: Arrays, count: int, rng: np.random.Generator
) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Sampled outputs of conv_bwd_filter: as `_sample_image`, but channels of y x channels of x at every chosen tap."""
    x, dy = operands["x"], operands["dy"]
    k_group, c_group = problem.k // problem.groups, problem.c // problem.groups
    taps = ends_and_some(prod(problem.filter), 27, rng)
    wanted = ceil(count / len(taps))
    k = ends_and_some(k_group, max(isqrt(wanted), ceil(wanted / max(c_group, 1))), rng)
    c = ends_and_some(c_group, ceil(wanted / max(len(k), 1)), rng)
    groups = ends_and_some(problem.groups, ceil(wanted / max(len(k) * len(c), 1)), rng)
    k_rows, c_rows = groups[:, None] * k_group + k, groups[:, None] * c_group + c

    sums = np.zeros((3, len(taps), len(groups), len(k), len(c)))
    windows = [window for tap, window in _windows(problem)]
    for n in range(problem.n):
        dy_rows = dy[n][k_rows].astype(np.float64).reshape(*k_rows.shape, prod(problem.out_spatial))
        x_rows = np.pad(x[n][c_rows].astype(np.float64), ((0, 0), (0, 0), *problem.pad))
        for i, tap in enumerate(taps):
            met = x_rows[windows[tap]].reshape(*c_rows.shape, prod(problem.out_spatial))
            sums[:, i] += _three_sums(dy_rows, met.swapaxes(1, 2))
    where = np.unravel_index(taps, problem.filter)
    if problem.mode == "conv":
        where = tuple(extent - 1 - axis for extent, axis in zip(problem.filter, where, strict=True))
    index = (k_rows[None, :, :, None], c[None, None, None, :], *(axis[:, None, None, None] for axis in where))
    flat = tuple(np.broadcast_to(axis, sums.shape[1:]).ravel() for axis in index)
    return flat, sums[0].ravel(), sums[1].ravel(), sums[2].ravel()
