"""Tensors folded into chunks of channels, and unfolded again: what `fold_axes.py` says of axes, done to memory.

    copy[n, place, channel] = tensor[n, c, step * place - pad + i]     channel of (c, i), or (i, c); zeros beyond
    tensor = copy [+ beta * tensor]                                    where every element of it is in one place

A thread has a chunk of 16 bytes of a few places, which it stores, or loads, at once. Where its elements lie in the
tensor, from a place's first on, it works out once: 8 of 16 bits, or as many runs of neighbours, each of which the
tensor has in one piece and wholly inside or outside of its border. Neighbouring threads have neighbouring chunks, or,
where the tensor's rows go along the places, neighbouring places. One launch folds both inputs of a convolution.

Places that only the tensor has, behind the last of the copy, are unfolded too: of zeros. Traffic: tensor and copy once,
as far as caches hold the tensor's lines until the last of their elements are taken. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.fold_axes import CHUNK_BYTES, MOST_OF_A_ROW, Axis, kept
from nbdnn.kernels.cuda.fold_kernel import THREADS, Fields, Variant, Way, fold_kernel
from nbdnn.kernels.cuda.launch import NULL, Launch
from nbdnn.kernels.spatial import spatial3
from nbdnn.problem import ITEMSIZE

_MIN_BLOCKS = 4  # of a multiprocessor: at most 64 registers
_MOST_PASSES = 8  # places of a thread
_BLOCKS_OF_A_MULTIPROCESSOR = 16  # below which threads have fewer places


class Tensor(NamedTuple):
    """A tensor and its copy of so many channels. strides: of n, c, depth, height and width in elements, from `start`
    on; of taps that are read backwards they are negative. images: of the copy, zeros beyond the tensor's. planar:
    whether the copy's channels are ordered (c, i). align: of the address, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    axes: tuple[Axis, ...]
    images: int
    channels: int
    planar: bool
    align: int


def copy_bytes(tensor: Tensor, dtype: str) -> int:
    return tensor.images * prod(axis.places for axis in tensor.axes) * tensor.channels * ITEMSIZE[dtype]


def fold(tensors: Sequence[Tensor], pointers: Sequence[int], dtype: str, device: Gpu) -> Launch:
    """Of one tensor or two, of pointers (tensor, copy) each."""
    return _launch(tensors, pointers, dtype, device, unfolds=False, adds=False)


def unfold(tensor: Tensor, pointers: tuple[int, int], dtype: str, adds: bool, device: Gpu) -> Launch:
    """The tensor from its copy. adds: beta times what was in it."""
    return _launch([tensor], pointers, dtype, device, unfolds=True, adds=adds)


def _launch(
    tensors: Sequence[Tensor], pointers: Sequence[int], dtype: str, device: Gpu, *, unfolds: bool, adds: bool
) -> Launch:
    rows = [_in_rows(tensor) for tensor in tensors]
    ways = [Way(1 if adds else _run(row, dtype), not row.planar, _is_plain(row)) for row in rows]
    fields = [_fields(row, dtype, device, unfolds) for row in rows]
    grid = (sum(each.blocks for each in fields), 1, 1)
    if len(ways) == 1:
        pointers, ways, fields = [*pointers, NULL, NULL], [*ways, Way(0, False, False)], [*fields, *fields]
    deep = any(row.shape[2] > 1 or row.axes[0].factor > 1 for row in rows)
    return Launch(
        source=Source(fold_kernel, Variant(dtype, unfolds, deep, adds, *ways), THREADS, _MIN_BLOCKS),
        grid=grid,
        pointers=tuple(pointers),
        scalars="f32" if adds else "",
        integers=(*fields[0], *fields[1]),
    )


def _in_rows(tensor: Tensor) -> Tensor:
    """The same with three axes; those that neither fold are one, and where channels are last and neighbours of those
    of the next column, both are a row whose elements are folded as columns are."""
    n, c, *extents = tensor.shape
    by_n, by_c, *by = tensor.strides
    d, h, w = spatial3(tuple(extents))
    axes, planar = (*[Axis(1, 1, 0, 1)] * (3 - len(tensor.axes)), *tensor.axes), tensor.planar
    if axes == kept((d, h, w)):
        d, h, w = 1, 1, d * h * w
        axes, by, planar = kept((1, 1, w)), [0, 0, by[2]], True
    elif not planar and by_c == 1 and (by[2] == c or w == 1) and axes[2].factor * c <= MOST_OF_A_ROW:
        across = axes[2]
        axes = (*axes[:2], Axis(across.factor * c, across.step * c, across.pad * c, across.places))
        c, w, by_c, by, planar = 1, w * c, 0, [*by[:2], 1], True
    return tensor._replace(shape=(n, c, d, h, w), strides=(by_n, by_c, *by), axes=axes, planar=planar)


def _is_plain(row: Tensor) -> bool:
    """Whether nothing is folded: the copy has more channels, or images, alone."""
    return row.axes == kept(row.shape[2:])


def _run(row: Tensor, dtype: str) -> int:
    """Elements that are neighbours in tensor and copy and inside of a border together."""
    across, extents = row.axes[2], row.shape
    if _is_plain(row):
        neighbours, steps = row.strides[1] == 1, [extents[1]]
        others = (0, 2, 3, 4)
    else:
        neighbours, steps = row.planar and row.strides[4] == 1, [across.factor, across.pad, extents[4]]
        steps.append(across.step if across.places > 1 else 0)
        others = (0, 1, 2, 3)
    steps += [row.start, row.align, *(row.strides[axis] for axis in others if extents[axis] > 1)]
    most = CHUNK_BYTES // ITEMSIZE[dtype] if neighbours else 1
    return next((run for run in (8, 4, 2) if run <= most and not any(step % run for step in steps)), 1)


def _fields(row: Tensor, dtype: str, device: Gpu, unfolds: bool) -> Fields:
    n, planes, *extents = row.shape
    factors, steps, pads, places = zip(*row.axes, strict=True)
    over = places
    if unfolds:
        reached = (-(-(extent + axis.pad) // axis.step) for extent, axis in zip(extents, row.axes, strict=True))
        over = tuple(map(max, places, reached))
    numbers, chunks = (n if unfolds else row.images) * prod(over), row.channels * ITEMSIZE[dtype] // CHUNK_BYTES
    along = factors[2] == 1 and row.strides[1] != 1 and abs(row.strides[4]) == 1
    chunk_blocks = chunks if along else ceil(chunks / THREADS)
    chunk_lanes = ceil(chunks / chunk_blocks)
    place_lanes = THREADS // chunk_lanes
    place_blocks = ceil(numbers / place_lanes)
    passes = chunk_blocks * place_blocks // (_BLOCKS_OF_A_MULTIPROCESSOR * device.sms)
    place_blocks = ceil(place_blocks / min(max(passes, 1), _MOST_PASSES))
    divisors = (planes, *factors, *over)
    return Fields._make((
        chunk_blocks * place_blocks, chunk_blocks, chunk_lanes, place_lanes, place_lanes * place_blocks,
        numbers, chunks, planes * prod(factors),
        *(number for divisor in divisors for number in (divisor, *reciprocal(divisor))),
        *places, *steps, *pads, n, *extents, row.start, *row.strides,
    ))  # fmt: skip
