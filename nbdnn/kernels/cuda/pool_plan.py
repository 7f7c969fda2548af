"""Pooling as GPU kernels see it: tensors by strides, a 2-D problem with a depth of 1. Integers are elements."""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cpu.geometry import spatial3, tensor_strides
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.problem_pool import PoolProblem

# What int32 may hold here: the last block of a grid counts on beyond the last element.
_INT32_END = 2**31 - 2**16


class Pool(NamedTuple):
    """x (dx) and y (dy) by strides and extents, and the windows between them. elements: that threads are needed for.
    by, shift: what `ptx.split` takes to divide by a stride."""

    elements: int
    channels: int
    x_n: int
    x_c: int
    x_d: int
    x_h: int
    x_w: int
    in_d: int
    in_h: int
    in_w: int
    y_n: int
    y_c: int
    y_d: int
    y_h: int
    y_w: int
    out_d: int
    out_h: int
    out_w: int
    taps_d: int
    taps_h: int
    taps_w: int
    stride_d: int
    stride_h: int
    stride_w: int
    pad_d: int
    pad_h: int
    pad_w: int
    by_d: int
    shift_d: int
    by_h: int
    shift_h: int
    by_w: int
    shift_w: int


def pool(problem: PoolProblem, elements: int) -> Pool:
    """The integers of a pooling."""
    return Pool(
        elements,
        problem.c,
        *tensor_strides(problem.x_shape, problem.channels_last),
        *spatial3(problem.spatial),
        *tensor_strides(problem.y_shape, problem.channels_last),
        *spatial3(problem.out_spatial),
        *spatial3(problem.window),
        *spatial3(problem.stride),
        *spatial3(problem.pad, 0),
        *(number for stride in spatial3(problem.stride) for number in reciprocal(stride)),
    )


def index_bits(problem: PoolProblem, integers: tuple[int, ...]) -> int:
    """32 where int32 holds every offset, position and parameter of a kernel, else 64."""
    padded = [extent + 2 * pad for extent, pad in zip(problem.spatial, problem.pad, strict=True)]
    largest = max(*(operand.size_elems for operand in problem.operands), *integers, *padded)
    return 32 if largest < _INT32_END else 64
