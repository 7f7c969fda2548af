"""The spatial transformer, its steps and their gradients in plain float64 NumPy.

    grid[n, i, j] = theta[n] @ (u_j, v_i, 1),  u, v = -1 ... 1 over the output's columns, its rows; 0 where there is one
    y[n, c, i, j] = sum over p, q of x[n, c, p, q] * hat(s - q) * hat(t - p),  hat(d) = max(0, 1 - |d|)
                    (s, t) = (grid[n, i, j] + 1) / 2 * (width - 1, height - 1),  grid[..., 0] along the columns

dx and dgrid are the derivatives of y, dtheta[n] = sum over i, j of dgrid[n, i, j] (u_j, v_i, 1)^T. Where s or t is an
integer, hat has a derivative to each side: that of the pixels from floor(s) on is meant.

How far off an implementation may be: positions are off by a few eps of what they are the sum of; so y is off by the
slope there, and dgrid by the difference of the slopes of pixels that such a step leads to. Sums by the model of
`nbdnn.tolerance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from nbdnn.expected import COEFFICIENT, BoundedSample, Sample, ends_and_some, positions
from nbdnn.problem_spatialtf import SpatialtfProblem
from nbdnn.tolerance import EPS

Arrays = Mapping[str, np.ndarray]
_POSITION_EPS = 4.0  # of the terms of a position's terms: two products and sums, a sum, a product
_WEIGHTS_EPS = 8.0  # of a product of two weights with a pixel
# Of a gradient's sample: images and planes, and of large ones fewer, for at most so many positions.
_FEW_IMAGES, _FEW_PLANES, _MOST_POSITIONS = 4, 16, 2**22


class _At(NamedTuple):
    """Positions in pixels: along the columns s and the rows t, and how far off each may be."""

    s: np.ndarray
    t: np.ndarray
    off_s: np.ndarray
    off_t: np.ndarray

    def of(self, index: Any) -> _At:
        return _At(*(field[index] for field in self))

    def steps(self, units: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
        """Positions so many times as far away as they may be."""
        return self.s + units[0] * self.off_s, self.t + units[1] * self.off_t


_NEAR = (-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)


def compute(problem: SpatialtfProblem, operands: Arrays, scalars: tuple[float, ...] = ()) -> dict[str, np.ndarray]:
    """The outputs in float64, by name."""
    results = {o.name: np.empty(o.shape) for o in problem.operands if o.role == "out"}
    for name, sample in samples(problem, operands, scalars, None).items():
        results[name][sample.index] = sample.value
    return results


def derived(problem: SpatialtfProblem, operands: Arrays) -> dict[str, np.ndarray]:
    """Theta and grid as they are where images are turned and scaled a little: near the identity, a part outside."""
    if "theta" in operands:
        return {"theta": np.eye(2, 3) + 0.3 * operands["theta"].astype(np.float64)}
    if "grid" in operands:
        return {"grid": _base(problem)[..., :2] + 0.1 * operands["grid"].astype(np.float64)}
    return {}


def samples(
    problem: SpatialtfProblem, operands: Arrays, scalars: tuple[float, ...], count: int | None
) -> dict[str, Sample]:
    """Each output, by its name, at `count` elements or more, or at all."""
    given = {name: value.astype(np.float64) for name, value in operands.items() if name != "x"}
    found: dict[str, tuple] = {}
    with np.errstate(all="ignore"):
        if problem.op == "spatialtf_grid_fwd":
            found["grid"] = _grid(problem, given["theta"])
        elif problem.op == "spatialtf_grid_bwd":
            of_sum = given["dgrid"]
            found["dtheta"] = _dtheta(problem, range(problem.n), of_sum, of_sum, np.zeros_like(of_sum))
        else:
            at = _positions(problem, given)
            if problem.op.endswith("fwd"):
                found["y"] = _forward(problem, operands["x"], at, count)
            else:
                found |= _backward(problem, operands["x"], given["dy"], at, count)
    dtypes = {o.name: o.dtype for o in problem.operands}
    return {name: BoundedSample(index, value, slack, dtypes[name]) for name, (index, value, slack) in found.items()}


def _base(problem: SpatialtfProblem) -> np.ndarray:
    """(u, v, 1) of each output."""
    rows, columns = (np.linspace(-1, 1, extent) if extent > 1 else np.zeros(1) for extent in problem.out_spatial)
    base = np.ones((*problem.out_spatial, 3))
    base[..., 0], base[..., 1] = columns, rows[:, None]
    return base


def _grid(problem: SpatialtfProblem, theta: np.ndarray) -> tuple:
    base = _base(problem)
    value = np.einsum("nkl,ijl->nijk", theta, base)
    return _all(value, np.broadcast_to(_POSITION_EPS * _size(theta), value.shape))


def _size(theta: np.ndarray) -> np.ndarray:
    """What the terms of a grid are at most, (N, 1, 1, 2): near its middle too, where u and v are differences."""
    return abs(theta).sum(axis=2)[:, None, None]


def _all(value: np.ndarray, slack: np.ndarray) -> tuple:
    return tuple(axis.ravel() for axis in np.indices(value.shape)), value.ravel(), slack.ravel()


def _positions(problem: SpatialtfProblem, given: Arrays) -> _At:
    """Of all outputs, each an array (N, H', W')."""
    if problem.is_affine:
        grid = np.einsum("nkl,ijl->nijk", given["theta"], _base(problem))
        size = np.broadcast_to(_size(given["theta"]) + 1, grid.shape)
    else:
        grid, size = given["grid"], abs(given["grid"]) + 1
    height, width = problem.spatial
    halves = np.array([(width - 1) / 2, (height - 1) / 2])
    at, off = (grid + 1) * halves, EPS[problem.compute] * _POSITION_EPS * size * halves
    return _At(at[..., 0], at[..., 1], off[..., 0], off[..., 1])


def _corners(shape: tuple[int, ...], s: np.ndarray, t: np.ndarray) -> list[tuple]:
    """(row, column, is inside, distances) of the four pixels round each position; clipped where outside."""
    height, width = shape[-2:]
    first_p, first_q = (np.nan_to_num(np.clip(np.floor(a), -2, e)) for a, e in ((t, height), (s, width)))
    found = []
    for down, right in product((0, 1), repeat=2):
        p, q = first_p.astype(np.int64) + down, first_q.astype(np.int64) + right
        inside = (p >= 0) & (p < height) & (q >= 0) & (q < width)
        found.append((np.clip(p, 0, height - 1), np.clip(q, 0, width - 1), inside, t - p, s - q))
    return found


def _hat(distance: np.ndarray) -> np.ndarray:
    return np.fmax(0.0, 1.0 - abs(distance))


def _sampled(x: np.ndarray, image: tuple, s: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, ...]:
    """(value, its derivatives by s and t; the same of magnitudes) at positions of the planes x[image]."""
    total = [np.zeros(np.broadcast_shapes(image[0].shape, s.shape)) for _ in range(6)]
    for p, q, inside, down, right in _corners(x.shape, s, t):
        pixel = np.where(inside, x[(*image, p, q)].astype(np.float64), 0.0)
        # The pixels from floor(s) on: the left one's weight falls with s, the right one's grows.
        by_s, by_t = (np.where(d >= 0, -1.0, 1.0) for d in (right, down))
        weights = _hat(down) * _hat(right), by_s * _hat(down), by_t * _hat(right)
        for i, weight in enumerate(weights):
            total[i] += np.where(inside, weight * pixel, 0.0)
            total[i + 3] += np.where(inside, abs(weight * pixel), 0.0)
    return tuple(total)


def _forward(problem: SpatialtfProblem, x: np.ndarray, at: _At, count: int | None) -> tuple:
    size = int(np.prod(problem.y_shape))
    index = positions(problem.y_shape, size if count is None else count, np.random.default_rng(0))
    here = at.of((index[0], *index[2:]))
    value, *_, magnitude, _, _ = _sampled(x, index[:2], here.s, here.t)
    slope_s, slope_t = np.zeros_like(value), np.zeros_like(value)
    for near in _NEAR:
        _, by_s, by_t, *_ = _sampled(x, index[:2], *here.steps(near))
        slope_s, slope_t = np.fmax(slope_s, abs(by_s)), np.fmax(slope_t, abs(by_t))
    moved = slope_s * here.off_s + slope_t * here.off_t
    return index, value, _WEIGHTS_EPS * magnitude + moved / EPS[problem.compute]


def _backward(problem: SpatialtfProblem, x: np.ndarray, dy: np.ndarray, at: _At, count: int | None) -> dict:
    found = {"dx": _image_gradient(problem, dy, at, count)}
    few = problem.n if count is None else _few(_FEW_IMAGES, problem.c * problem.positions)
    images = ends_and_some(problem.n, few, np.random.default_rng(0))
    value, magnitude, jump = (
        np.array(parts).reshape(len(images), *problem.grid_shape[1:])
        for parts in zip(*(_grid_gradient(problem, x[n], dy[n], at.of(n)) for n in images), strict=True)
    )
    if problem.is_affine:
        found["dtheta"] = _dtheta(problem, images, value, magnitude, jump, problem.c * problem.positions)
    else:
        slack = COEFFICIENT * np.sqrt(problem.c) * magnitude + jump
        index, value, slack = _all(value, slack)
        found["dgrid"] = ((np.asarray(images)[index[0]], *index[1:]), value, slack)
    return found


def _few(most: int, positions: int) -> int:
    """The first and the last, and as many others up to `most` as their positions allow."""
    return max(2, min(most, _MOST_POSITIONS // max(positions, 1)))


def _image_gradient(problem: SpatialtfProblem, dy: np.ndarray, at: _At, count: int | None) -> tuple:
    """Whole planes of dx: what each position adds to the pixels round it."""
    extents, eps = problem.spatial, EPS[problem.compute]
    planes, pixels = problem.n * problem.c, extents[0] * extents[1]
    few = planes if count is None else max(_few(_FEW_PLANES, problem.positions), -(-count // pixels))
    chosen = ends_and_some(planes, few, np.random.default_rng(0))
    value, slack = np.empty((2, len(chosen), pixels))
    of_image: dict[int, tuple[np.ndarray, ...]] = {}
    for i, plane in enumerate(chosen):
        n, c = divmod(int(plane), problem.c)
        if n not in of_image:
            of_image = {n: _reached(problem, at.of(n))}
        place, source, weight, off = of_image[n]
        top = dy[n, c].ravel()[source]
        terms = top * weight
        value[i] = np.bincount(place, terms, pixels)
        squares = np.bincount(place, terms * terms, pixels) * np.bincount(place, minlength=pixels)
        rounded = np.bincount(place, _WEIGHTS_EPS * abs(terms) + abs(top) * off / eps, pixels)
        slack[i] = COEFFICIENT * np.sqrt(squares) + rounded
    of_plane = np.indices((len(chosen), *extents)).reshape(3, -1)
    n, c = (part[of_plane[0]] for part in np.divmod(chosen, problem.c))
    return (n, c, *of_plane[1:]), value.ravel(), slack.ravel()


def _reached(problem: SpatialtfProblem, at: _At) -> tuple[np.ndarray, ...]:
    """(pixel, position, weight, what rounding may add to it) of each pixel that a position of one image is near to."""
    height, width = problem.spatial
    at = _At(*(field.ravel() for field in at))
    first_p, first_q = (np.nan_to_num(np.clip(np.floor(a), -3, e + 1)) for a, e in ((at.t, height), (at.s, width)))
    found = []
    for down, right in product((-1, 0, 1, 2), repeat=2):
        p, q = first_p.astype(np.int64) + down, first_q.astype(np.int64) + right
        inside = (p >= 0) & (p < height) & (q >= 0) & (q < width)
        (source,) = np.nonzero(inside & (abs(at.t - p) < 1 + at.off_t) & (abs(at.s - q) < 1 + at.off_s))
        weight = _hat(at.t - p) * _hat(at.s - q)
        found.append(((p * width + q)[source], source, weight[source], (at.off_s + at.off_t)[source]))
    place, source, weight, off = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return place, source, weight, off


def _grid_gradient(problem: SpatialtfProblem, x: np.ndarray, dy: np.ndarray, at: _At) -> tuple[np.ndarray, ...]:
    """(dgrid of one image; root of the sum of its terms' squares; what a step over a pixel changes, in eps)."""
    halves = (problem.spatial[1] - 1) / 2, (problem.spatial[0] - 1) / 2
    channels = (np.arange(problem.c)[:, None, None],)
    _, by_s, by_t, _, size_s, size_t = _sampled(x, channels, at.s, at.t)

    def over_channels(by_s: np.ndarray, by_t: np.ndarray) -> np.ndarray:
        return np.stack([(dy * by_s).sum(axis=0) * halves[0], (dy * by_t).sum(axis=0) * halves[1]], axis=-1)

    value = over_channels(by_s, by_t)
    jump = np.zeros_like(value)
    squares = np.stack(
        [((dy * size * half) ** 2).sum(axis=0) for size, half in zip((size_s, size_t), halves, strict=True)], axis=-1
    )
    for near in _NEAR:
        _, by_s, by_t, *_ = _sampled(x, channels, *at.steps(near))
        jump = np.fmax(jump, abs(over_channels(by_s, by_t) - value))
    return value, np.sqrt(squares), 2 * jump / EPS[problem.compute]


def _dtheta(
    problem: SpatialtfProblem, images: Any, dgrid: np.ndarray, magnitude: np.ndarray, jump: np.ndarray, terms: int = 0
) -> tuple:  # fmt: skip
    """Of some images, from their dgrid, the root of the sum of each one's squared terms, and what it may be off."""
    base = _base(problem)
    value = np.einsum("nijk,ijl->nkl", dgrid, base)
    squares = np.einsum("nijk,ijl->nkl", magnitude**2, base**2)
    slack = COEFFICIENT * np.sqrt((terms or problem.positions) * squares)
    slack += np.einsum("nijk,ijl->nkl", jump, abs(base))
    index, value, slack = _all(value, slack)
    return (np.asarray(images, np.int64)[index[0]], *index[1:]), value, slack
