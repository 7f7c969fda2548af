"""How a convolution of few or odd channels is posed as one of many: taps that move into the channels.

    x'[n, j, (i, c)] = x[n, c, step * j + i - pad]            i < factor, zero beyond the border
    w'[k, s, (i, c)] = w[k, c, factor * s + i]                zero beyond the last tap
    y[n, k, q] = sum over s, i, c of  x'[n, q + s, (i, c)] * w'[k, s, (i, c)]

on every axis that is folded, which has neither stride nor padding any more. By its stride (factor = step = stride)
ceil(S / stride) taps are left, and x' has every element of x once; whole (factor = S, step = stride) one is left, and
x' has an element as often as windows meet it. Channels are filled up with zeros to what a copy of 16 bytes takes.

An element that no tap meets is multiplied by a zero of w': an infinity there makes a NaN, as it does in methods that
transform the image. Source: own; folding by the stride is known as space-to-depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from nbdnn.kernels.cuda.turn_channels import is_planar
from nbdnn.problem import DEFAULT_ALIGN, ITEMSIZE, LAYOUTS
from nbdnn.problem_conv import FILTER_LAYOUTS, ConvProblem

CHUNK_BYTES = 16
MOST_FACTOR, MOST_OF_A_ROW = 127, 16383  # elements of an axis, and of a row of columns and channels, in a place
FEW = 16  # channels from which on a base that takes them as they are wastes little
_PAYS = 1.3  # times as cheap, where the base takes the problem as it is
_KNOWN = 256
# Places of x, w and y among the operands.
PLACES = {"conv_fwd": (0, 1, 2), "conv_bwd_data": (2, 0, 1), "conv_bwd_filter": (0, 2, 1)}


class Axis(NamedTuple):
    """An axis of a copy: place j has `factor` elements of the original, from step * j - pad on."""

    factor: int
    step: int
    pad: int
    places: int


class Costs(NamedTuple):
    """What a base multiplies: channels of a tap in multiples of `grain`, so many products while an element of a copy is
    read and written. any_number: whether it takes channels in any number from that of a chunk on, else in chunks."""

    grain: int
    products: int
    any_number: bool = False


class Folded(NamedTuple):
    """posed: what the base computes. copies: by place among the operands, the axes of those that it does not take as
    they are; none where there is nothing to fold or to fill up."""

    posed: ConvProblem
    copies: Mapping[int, tuple[Axis, ...]]


class _Choice(NamedTuple):
    """Axes of x and of w, the channels that they make, and the cost in elements copied."""

    x: tuple[Axis, ...]
    w: tuple[Axis, ...]
    channels: int
    cost: float


def kept(extents: tuple[int, ...]) -> tuple[Axis, ...]:
    """Axes as they are."""
    return tuple(Axis(1, 1, 0, extent) for extent in extents)


@lru_cache(_KNOWN)
def folded(problem: ConvProblem, costs: Costs) -> Folded:
    """The cheapest way."""
    best, k = _cheapest(problem, costs), _filters(problem, costs)
    of_x, of_w, of_y = PLACES[problem.op]
    copies = {}
    if best.channels != problem.c or best.x != kept(problem.spatial):
        copies[of_x] = best.x
    if k != problem.k:
        copies[of_y] = kept(problem.out_spatial)
    if not copies:
        return Folded(problem, copies)
    if not _lies_right(problem, best, k):
        copies[of_w] = best.w
    last, w_last = LAYOUTS[problem.ndim][1], FILTER_LAYOUTS[problem.ndim][1]
    first, second = (of_y, of_x) if problem.op == "conv_bwd_data" else (of_x, of_y)
    folds = [axis != plain for axis, plain in zip(best.x, kept(problem.spatial), strict=True)]
    posed = replace(
        problem,
        c=best.channels,
        spatial=tuple(axis.places for axis in best.x),
        k=k,
        filter=tuple(axis.places for axis in best.w),
        pad=tuple((0, 0) if gone else pad for gone, pad in zip(folds, problem.pad, strict=True)),
        stride=tuple(1 if gone else stride for gone, stride in zip(folds, problem.stride, strict=True)),
        mode="cross",
        layout=last if first in copies else problem.layout,
        w_layout=w_last,
        y_layout=last if second in copies else problem.y_layout,
        align=DEFAULT_ALIGN if len(copies) == len(PLACES) else problem.align,
        epilogue=() if output_place(problem) in copies else problem.epilogue,
    )
    return Folded(posed, copies)


def output_place(problem: ConvProblem) -> int:
    """Of what is computed, among the operands."""
    return next(place for place, operand in enumerate(problem.operands) if operand.role == "out")


def _chunk_elems(problem: ConvProblem) -> int:
    return CHUNK_BYTES // ITEMSIZE[problem.dtype]


def _whole(problem: ConvProblem, channels: int) -> int:
    """So many, and as many zeros as make chunks of them."""
    return -(-channels // _chunk_elems(problem)) * _chunk_elems(problem)


def _filters(problem: ConvProblem, costs: Costs) -> int:
    """Of the posed problem."""
    return problem.k if costs.any_number and problem.k >= _chunk_elems(problem) else _whole(problem, problem.k)


def _lies_right(problem: ConvProblem, choice: _Choice, k: int) -> bool:
    """Whether the filter is w' as it lies in memory: all of its taps are channels, in the order of those of x'."""
    of_x, *_ = PLACES[problem.op]
    taps = prod(problem.filter)
    alike = problem.mode == "cross" and is_planar(problem.operands[of_x]) == (not problem.w_channels_last)
    is_one = all(axis.places == 1 for axis in choice.w)
    return is_one and (taps == 1 or alike) and choice.channels == problem.c * taps and k == problem.k


def _cheapest(problem: ConvProblem, costs: Costs) -> _Choice:
    """The problem as it is where its channels fit, unless they are few and another way is much cheaper."""
    axes = [_ways(problem, axis) for axis in range(problem.ndim)]
    plain, *others = (_choice(problem, costs, ways) for ways in product(*axes))
    best = min((plain, *others), key=lambda choice: (choice.cost, prod(axis.places for axis in choice.w)))
    fits = plain.channels == problem.c and _filters(problem, costs) == problem.k
    return plain if fits and (problem.c >= FEW or best.cost * _PAYS > plain.cost) else best


def _ways(problem: ConvProblem, axis: int) -> list[tuple[Axis, Axis]]:
    """Of x and of w: as it is, folded by the stride, and whole. A bwd_data folds no element twice, and none away."""
    (before, _), extent, taps = problem.pad[axis], problem.spatial[axis], problem.filter[axis]
    stride, outputs = problem.stride[axis], problem.out_spatial[axis]
    ways = [(Axis(1, 1, 0, extent), Axis(1, 1, 0, taps))]
    if problem.dilation[axis] > 1:
        return ways
    if 1 < stride <= MOST_FACTOR:
        left = -(-taps // stride)
        ways.append((Axis(stride, stride, before, outputs - 1 + left), Axis(stride, stride, 0, left)))
    if taps not in (1, stride) and taps <= MOST_FACTOR and problem.op != "conv_bwd_data":
        ways.append((Axis(taps, stride, before, outputs), Axis(taps, taps, 0, 1)))
    return ways


def _choice(problem: ConvProblem, costs: Costs, ways: tuple[tuple[Axis, Axis], ...]) -> _Choice:
    x, w = zip(*ways, strict=True)
    channels, k = _whole(problem, problem.c * prod(axis.factor for axis in x)), _filters(problem, costs)
    as_it_is = x == kept(problem.spatial)
    if as_it_is and costs.any_number and problem.c >= _chunk_elems(problem) and k == problem.k:
        channels = problem.c  # a filter that is copied for its number has whole chunks
    multiplied = -(-channels // costs.grain) * costs.grain * prod(axis.places for axis in w)
    cost = prod(problem.out_spatial) * k * multiplied / costs.products
    if channels != problem.c or not as_it_is:
        cost += channels * prod(axis.places for axis in x)
    return _Choice(x, w, channels, cost)
