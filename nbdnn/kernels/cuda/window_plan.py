"""A convolution of few channels a group as windows of tiles, and how a tile lies in shared memory.

    tile    outputs: rows of 16, 32, ... pixels, as many in all as the kernel wants; of the image: what they see
    slab    the tile of one group's channels: of each pixel its channels in *quads* of four, zero beyond the last one
    row     u phases (u the column stride): column j of the tile lies at pixel (j % u) * phase + j // u
    window  what one output sees: a list of quads, tap by tap

From output column q, tap s is found at pixel `q + constant(s)`, so a window is a list of constants, which a table in
shared memory holds: the code that sums a window knows neither its extents nor its dilation. And outputs beside each
other see pixels beside each other, whatever the stride, so that warps load without bank conflicts.

A *unit* is a number of filters of one group. A block has some units, of one or several groups, and takes tile after
tile. Every element of the image is read once for each tile and unit set that sees it.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.kernels.spatial import tensor_strides
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

QUAD = 4  # channels
BANKS_BYTES = 128
BLOCK_SHARED_BYTES = 99 << 10  # at most: as much as every architecture from sm_80 on has


class Image(NamedTuple):
    """A convolution as windows of an image. bwd_data of stride 1 is one too: of dy, with the taps in reverse.

    Strides are in elements: the image's (n, c, h, w), the filter's (start, group, output channel, input channel, r, s),
    the outputs' (n, c, h, w). Channels count within a group. Of a bwd_filter the outputs are dy; or dy is the image,
    and the outputs are x, where that is `exchanged`.
    """

    n: int
    groups: int
    group_in: int
    group_out: int
    extent: tuple[int, ...]
    outputs: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    image_strides: tuple[int, ...]
    filter_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    image_last: bool
    outputs_last: bool

    @property
    def quads_of_tap(self) -> int:
        return ceil(self.group_in / QUAD)

    @property
    def quads(self) -> int:
        """Of a window."""
        return self.taps[0] * self.taps[1] * self.quads_of_tap


def exchanged(problem: ConvProblem) -> bool:
    """Whether windows are of dy and outputs are x, with the taps in reverse: of bwd_data, and of a bwd_filter that has
    few filters and not few channels. Right where the stride is 1."""
    if problem.op == "conv_bwd_filter":
        return problem.groups == 1 and problem.k <= QUAD < problem.c
    return problem.op == "conv_bwd_data"


def image(problem: ConvProblem) -> Image:
    """The windows of a 2-D problem."""
    start, w_k, w_c, _, w_r, w_s = filter_strides(problem)
    k, c = problem.k // problem.groups, problem.c // problem.groups
    before = tuple(pad for pad, _ in problem.pad)
    image_last, outputs_last = problem.channels_last, problem.y_channels_last
    if exchanged(problem):
        reach = tuple((taps - 1) * d for taps, d in zip(problem.filter, problem.dilation, strict=True))
        start += (problem.filter[0] - 1) * w_r + (problem.filter[1] - 1) * w_s
        group_in, group_out, extent, outputs = k, c, problem.out_spatial, problem.spatial
        shapes, pad = (problem.y_shape, problem.x_shape), tuple(r - b for r, b in zip(reach, before, strict=True))
        filters = (start, w_k * k, w_c, w_k, -w_r, -w_s)
        if problem.op == "conv_bwd_filter":
            image_last, outputs_last = outputs_last, image_last
    else:
        group_in, group_out, extent, outputs = c, k, problem.spatial, problem.out_spatial
        shapes, pad = (problem.x_shape, problem.y_shape), before
        filters = (start, w_k * k, w_k, w_c, w_r, w_s)
    return Image(
        n=problem.n,
        groups=problem.groups,
        group_in=group_in,
        group_out=group_out,
        extent=extent,
        outputs=outputs,
        taps=problem.filter,
        stride=problem.stride,
        pad=pad,
        dilation=problem.dilation,
        image_strides=_strides(shapes[0], image_last),
        filter_strides=filters,
        out_strides=_strides(shapes[1], outputs_last),
        image_last=image_last,
        outputs_last=outputs_last,
    )


def without_few(problem: ConvProblem, most: int) -> str:
    """Why windows are not of 1 to `most` channels in one group, with the numbers; or ''."""
    seen = image(problem)
    if seen.groups > 1 or not 1 <= seen.group_in <= most or seen.group_out < 1:
        wanted = f"this kernel takes windows of 1 to {most} in one"
        return f"{problem.c} channels and {problem.k} filters in {problem.groups} groups, {wanted}"
    return ""


def _strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    n, c, _, h, w = tensor_strides(shape, channels_last)
    return n, c, h, w


def together(channels_last: bool, channels: int, dtype: str, align: int) -> int:
    """How many of a group's channels a thread may load at once; 1 where not even a quad."""
    itemsize = ITEMSIZE[dtype]
    elements = 16 // itemsize if channels % (16 // itemsize) == 0 else QUAD
    if channels_last and channels % elements == 0 and align % (elements * itemsize) == 0:
        return elements
    return 1


class Shape(NamedTuple):
    """What the code that fills and reads a tile depends on.

    math: 'fma', 'mma' or 'tf32'. together: see there. parts_first: threads follow the channels of a pixel before the
    next pixel. shifted: the column stride is a power of two. one_slab: for a block. quads_of_tap: of a group. channels:
    of a quad, at most.
    """

    dtype: str
    math: str
    together: int
    parts_first: bool
    shifted: bool
    one_slab: bool
    quads_of_tap: int
    channels: int

    @property
    def quad_bytes(self) -> int:
        return QUAD * ITEMSIZE[self.dtype]

    @property
    def pixel_bytes(self) -> int:
        return self.quads_of_tap * self.quad_bytes

    @property
    def loads_of_pixel(self) -> int:
        """That fill one pixel of a slab."""
        return self.quads_of_tap * QUAD // max(self.together, QUAD)


def shape(seen: Image, problem: ConvProblem, math: str, slabs: int) -> Shape:
    stride = seen.stride[1]
    return Shape(
        dtype=problem.dtype,
        math=math,
        together=together(seen.image_last, seen.group_in, problem.dtype, problem.align),
        parts_first=seen.image_last or (slabs == 1 and seen.quads_of_tap == 1),
        shifted=stride & stride - 1 == 0,
        one_slab=slabs == 1,
        quads_of_tap=seen.quads_of_tap,
        channels=3 if seen.group_in < QUAD else QUAD,
    )


class Tile(NamedTuple):
    """The extents of a tile of outputs and of what they see; row_bytes, slab_bytes: of shared memory."""

    tiles_h: int
    tiles_w: int
    rows: int
    columns_log2: int
    in_rows: int
    in_columns: int
    phase: int
    row_bytes: int
    slab_bytes: int


def tile(seen: Image, shape: Shape, pixels: int) -> Tile:
    """The tile of `pixels` outputs by which outputs beyond the last, and pixels read again, are fewest."""
    every = [_tile(seen, shape, pixels, log2) for log2 in range(4, pixels.bit_length())]
    return min(every, key=lambda t: t.tiles_h * t.tiles_w * (pixels + t.in_rows * t.in_columns))


def _tile(seen: Image, shape: Shape, pixels: int, columns_log2: int) -> Tile:
    rows, columns = pixels >> columns_log2, 1 << columns_log2
    down, across = seen.stride
    reach_h, reach_w = ((taps - 1) * d for taps, d in zip(seen.taps, seen.dilation, strict=True))
    in_rows, in_columns = (rows - 1) * down + reach_h + 1, (columns - 1) * across + reach_w + 1
    phase = ceil(in_columns / across)
    # Quads that a warp loads together lie in different banks: of different phases, and of a window's next row.
    slots = BANKS_BYTES // shape.quad_bytes
    if across > 1:
        phase += (slots // across - phase) % slots
    row_quads = phase * across * shape.quads_of_tap
    row_quads += (seen.taps[1] * shape.quads_of_tap - row_quads) % slots
    row_bytes = row_quads * shape.quad_bytes
    return Tile(
        tiles_h=ceil(seen.outputs[0] / rows),
        tiles_w=ceil(seen.outputs[1] / columns),
        rows=rows,
        columns_log2=columns_log2,
        in_rows=in_rows,
        in_columns=in_columns,
        phase=phase,
        row_bytes=row_bytes,
        slab_bytes=in_rows * row_bytes,
    )
