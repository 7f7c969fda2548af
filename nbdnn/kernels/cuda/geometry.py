"""A convolution as GPU kernels see it: tensors and filter by strides, a 2-D problem with a depth axis of extent 1.

Integers are elements. Mode 'conv' is a filter read backwards: negative strides from a start at its last tap. Kernels
index with int32 where nothing reaches 2^31, else with int64: the same kernel with another type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple

from nbdnn.kernels.spatial import spatial3, tensor_strides
from nbdnn.problem_conv import ConvProblem

# What int32 may hold here: the last block of a grid counts on beyond the last element.
_INT32_END = 2**31 - 2**16


class Gather(NamedTuple):
    """A forward or bwd_data: each output sums what the taps of its group's filters reach in the input.

    Filter strides are those of (start, group, output channel, input channel, taps); channels count within a group.
    """

    outputs: int
    out_c: int
    out_d: int
    out_h: int
    out_w: int
    group_out: int
    group_in: int
    in_n: int
    in_c: int
    in_d: int
    in_h: int
    in_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    w_start: int
    w_g: int
    w_o: int
    w_i: int
    w_t: int
    w_r: int
    w_s: int
    taps_d: int
    taps_h: int
    taps_w: int
    stride_d: int
    stride_h: int
    stride_w: int
    pad_d: int
    pad_h: int
    pad_w: int
    dilation_d: int
    dilation_h: int
    dilation_w: int


def gather(problem: ConvProblem) -> Gather:
    """The integers of a conv_fwd or conv_bwd_data."""
    forward = problem.op == "conv_fwd"
    k, c = problem.k // problem.groups, problem.c // problem.groups
    source, target = (problem.operands[0], problem.operands[2]) if forward else problem.operands[1:3]
    start, w_k, w_c, *w_taps = filter_strides(problem)
    group_out, group_in, w_o, w_i = (k, c, w_k, w_c) if forward else (c, k, w_c, w_k)
    integers = (
        target.size_elems,
        target.shape[1],
        *spatial3(target.shape[2:]),
        group_out,
        group_in,
        *tensor_strides(source.shape, problem.channels_last),
        *spatial3(source.shape[2:]),
        start,
        w_k * k,
        w_o,
        w_i,
        *w_taps,
        *reach_parameters(problem),
    )
    return Gather._make(integers)


class FilterGradient(NamedTuple):
    """A bwd_filter: each tap of a pair of channels sums x times dy over the positions of dy.

    tiles_k and tiles_c count the tiles of a group's channels; w_start and the w_ strides are those of dw.
    """

    positions: int
    out_d: int
    out_h: int
    out_w: int
    group_k: int
    group_c: int
    tiles_k: int
    tiles_c: int
    x_n: int
    x_c: int
    x_d: int
    x_h: int
    x_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    y_n: int
    y_c: int
    y_d: int
    y_h: int
    y_w: int
    w_start: int
    w_k: int
    w_c: int
    w_t: int
    w_r: int
    w_s: int
    taps_d: int
    taps_h: int
    taps_w: int
    stride_d: int
    stride_h: int
    stride_w: int
    pad_d: int
    pad_h: int
    pad_w: int
    dilation_d: int
    dilation_h: int
    dilation_w: int


def filter_gradient(problem: ConvProblem, tile_k: int, tile_c: int) -> FilterGradient:
    """The integers of a conv_bwd_filter whose blocks take tile_k x tile_c pairs of channels."""
    x, dy, _ = problem.operands
    k, c = problem.k // problem.groups, problem.c // problem.groups
    integers = (
        problem.n * prod(problem.out_spatial),
        *spatial3(problem.out_spatial),
        k,
        c,
        -(-k // tile_k),
        -(-c // tile_c),
        *tensor_strides(x.shape, problem.channels_last),
        *spatial3(problem.spatial),
        *tensor_strides(dy.shape, problem.y_channels_last),
        *filter_strides(problem),
        *reach_parameters(problem),
    )
    return FilterGradient._make(integers)


def filter_strides(problem: ConvProblem) -> tuple[int, ...]:
    """(start, k, c, t, r, s) of the filter or its gradient, in the order in which taps meet the image."""
    k, c, t, r, s = tensor_strides(problem.w_shape, problem.w_channels_last)
    if problem.mode == "cross":
        return 0, k, c, t, r, s
    last = sum(stride * (taps - 1) for stride, taps in zip((t, r, s), spatial3(problem.filter), strict=True))
    return last, k, c, -t, -r, -s


def reach_parameters(problem: ConvProblem) -> tuple[int, ...]:
    """Taps, strides, pads before and dilations, three of each."""
    before = tuple(pad for pad, _ in problem.pad)
    return (
        *spatial3(problem.filter),
        *spatial3(problem.stride),
        *spatial3(before, 0),
        *spatial3(problem.dilation),
    )


def index_bits(problem: ConvProblem, integers: tuple[int, ...]) -> int:
    """32 where int32 holds every offset, position and parameter of a kernel, else 64."""
    padded = [extent + sum(pad) for extent, pad in zip(problem.spatial, problem.pad, strict=True)]
    largest = max(*(operand.size_elems for operand in problem.operands), *map(abs, integers), *padded)
    return 32 if largest < _INT32_END else 64


@cache
def output_place(channels_last: bool, divided: Callable[..., Any] | None = None):
    """Device function (element, channels, d, h, w) -> (n, c, d, h, w) of an element of a dense tensor. divided: device
    function (dividend, extent), of extents as they are given: `ptx.divided` where None."""
    from nbdnn.kernels.cuda import ptx

    divided = divided or ptx.divided

    @ptx.inline
    def planar(element, channels, depth, height, width):
        rest, w = divided(element, width)
        rest, h = divided(rest, height)
        rest, d = divided(rest, depth)
        n, c = divided(rest, channels)
        return n, c, d, h, w

    @ptx.inline
    def interleaved(element, channels, depth, height, width):
        rest, c = divided(element, channels)
        rest, w = divided(rest, width)
        rest, h = divided(rest, height)
        n, d = divided(rest, depth)
        return n, c, d, h, w

    return interleaved if channels_last else planar


@cache
def input_reached(forward: bool, bits: int):
    """Device function (position, tap, stride, pad, dilation, extent) -> the input position on one axis, -1 for none.

    forward: of the image, from a position of y. Else of dy, from a position of the image.
    """
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[bits]

    @ptx.inline
    def of_image(position, tap, stride, pad, dilation, extent):
        at = integer(position * stride + tap * dilation - pad)
        return at if at >= 0 and at < extent else integer(-1)

    @ptx.inline
    def of_gradient(position, tap, stride, pad, dilation, extent):
        distance = integer(position + pad - tap * dilation)
        at, between = ptx.divided(distance, stride)
        return at if distance >= 0 and between == 0 and at < extent else integer(-1)

    return of_image if forward else of_gradient
