"""Batch normalisation as GPU kernels see it: columns of vectors, and how blocks walk down them.

    NCHW              a column is a channel: the vectors of its planes, image after image
    NHWC, and every   a column is a vector of neighbouring channels: one vector a row; a slab of them, up to 128 bytes
    per-activation    wide, goes to a block
    mode

    block:  `columns` threads side by side x threads / columns rows at a time

The vectors are of 16 bytes where extents and addresses are even, else of as many as they are a multiple of. Integers
are elements. Kernels index with int32 where nothing reaches 2^31, else with int64.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_bn import BnProblem

INT32_END = 2**31 - 2**20  # threads count on beyond the last row
SLAB_BYTES = 128
_THREADS = 256  # of a block
# Pointers that kernels take for a channel, in this order; those that an op has not are null.
PARAMS = ("gamma", "beta", "mean", "spread", "running_mean", "running_var")
RESULTS = {
    "bn_train": ("mean", "invstd", "new_running_mean", "new_running_var"),
    "bn_infer": (),
    "bn_bwd": ("dgamma", "dbeta"),
    "bn_infer_bwd": ("dgamma", "dbeta", "dmean", "dvar"),
}
_MOST_RESULTS = 4


class Variant(NamedTuple):
    """What a kernel is compiled for. planar: a column is one channel. lanes: elements of a vector. columns: of a
    block. cluster: blocks that share a column and talk to each other; 1 where they do not."""

    op: str
    dtype: str
    param_dtype: str
    running: bool
    planar: bool
    lanes: int
    columns: int
    threads: int
    cluster: int
    bits: int

    @property
    def compute(self) -> str:
        return DEFAULT_COMPUTE[self.dtype]

    @property
    def is_forward(self) -> bool:
        return self.op in ("bn_train", "bn_infer")

    @property
    def sums(self) -> int:
        """Lanes of a thread that are sums of different channels."""
        return 1 if self.planar else self.lanes


class Walk(NamedTuple):
    """How a block goes down its columns. Row r of column w lies at w * column_elems + r // of_image * image_elems +
    r % of_image * row_elems.

    chunk: rows of a block; slots: of a thread, at most; parts: blocks that share a column. Going on by as many rows as
    a block takes at a time adds step_elems, and wrap_elems more where the row's place in its image, further by
    step_rows, is beyond the last. Channel j begins at j * channel_elems.
    """

    rows: int
    columns: int
    channels: int
    m: int
    channel_elems: int
    column_elems: int
    row_elems: int
    of_image: int
    image_elems: int
    chunk: int
    slots: int
    parts: int
    slabs: int
    step_rows: int
    step_elems: int
    wrap_elems: int


def variant(problem: BnProblem, columns: int, threads: int, cluster: int = 1) -> Variant:
    lanes = problem.vector_bytes // ITEMSIZE[problem.dtype]
    _, channels, inner = problem.planes
    planar = inner > 1
    # From a thread's row to its next, which may lie beyond the last one.
    step_elems = threads // max(inner // lanes, 1) * channels * inner if planar else threads * channels
    bits = 32 if max(problem.operands[0].size_elems, step_elems) < INT32_END else 64
    of_problem = (problem.op, problem.dtype, problem.param_dtype, problem.running)
    return Variant(*of_problem, planar, lanes, 1 if planar else columns, threads, cluster, bits)


def walk(problem: BnProblem, v: Variant, chunk: int) -> Walk:
    """The walk of blocks that take `chunk` rows each."""
    outer, channels, inner = problem.planes
    at_once = v.threads // v.columns
    if v.planar:
        of_image, columns = inner // v.lanes, channels
        rows, column_elems, row_elems, image_elems = outer * of_image, inner, v.lanes, channels * inner
    else:
        rows = of_image = outer
        columns, column_elems, row_elems, image_elems = channels // v.lanes, v.lanes, channels, 0
    images, step_rows = divmod(at_once, max(of_image, 1)) if v.planar else (0, at_once)
    return Walk(
        rows=rows,
        columns=columns,
        channels=channels,
        m=problem.m,
        channel_elems=inner,
        column_elems=column_elems,
        row_elems=row_elems,
        of_image=of_image,
        image_elems=image_elems,
        chunk=chunk,
        slots=ceil(chunk / at_once),
        parts=ceil(rows / chunk),
        slabs=ceil(columns / v.columns),
        step_rows=step_rows,
        step_elems=images * image_elems + step_rows * row_elems,
        wrap_elems=image_elems - of_image * row_elems,
    )


@cache
def next_row(bits: int):
    """Device function (at, place, Walk) -> the same of a thread's next row: its index and its place in its image."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[bits]

    @ptx.inline
    def moved(at, place, f):
        place = integer(place + f.step_rows)
        at = integer(at + f.step_elems)
        if place >= f.of_image:
            place, at = integer(place - f.of_image), integer(at + f.wrap_elems)
        return at, place

    return moved


def rows_of(problem: BnProblem, v: Variant) -> int:
    """Rows of a column."""
    outer, _, inner = problem.planes
    return outer * (inner // v.lanes) if v.planar else outer


def widths(problem: BnProblem) -> tuple[int, ...]:
    """Columns that a block may take: as many as there are, in powers of 2, up to a slab of 128 bytes, or more of them
    where rows are so few that threads would have none."""
    rows, channels, inner = problem.planes
    if inner > 1:
        return (1,)
    there = channels * ITEMSIZE[problem.dtype] // problem.vector_bytes
    of_slab = SLAB_BYTES // problem.vector_bytes
    while of_slab < 32 and rows * of_slab < _THREADS:
        of_slab *= 2
    widest = min(of_slab, 32, 1 << (there - 1).bit_length())
    return tuple(dict.fromkeys(max(1, widest >> shift) for shift in (0, 1, 2)))


def pointers(problem: BnProblem) -> tuple[int, ...]:
    """Places of x, dy and what is written of data, then of PARAMS and RESULTS; -1 for what the op has not."""
    places = problem.places
    spread = places.get("var", places.get("invstd", -1)) if problem.op != "bn_train" else -1
    known = places | {"spread": spread} | ({"mean": -1} if problem.op == "bn_train" else {})
    data = (places["x"], places.get("dy", -1), places["y" if "y" in places else "dx"])
    results = [places.get(name, -1) for name in RESULTS[problem.op]]
    results += [-1] * (_MOST_RESULTS - len(results))
    return (*data, *(known.get(name, -1) for name in PARAMS), *results)
