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

from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import tensor_strides
from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.problem import ITEMSIZE, ConvProblem

QUAD = 4  # channels
_BANKS_BYTES = 128
# Shared memory of a block at most, on every architecture from sm_80 on; and of a multiprocessor, by capability.
BLOCK_SHARED_BYTES = 99 << 10
_SHARED_BYTES = {(8, 0): 164 << 10, (9, 0): 228 << 10, (10, 0): 228 << 10}
_LEAST_SHARED_BYTES = 100 << 10
_RESERVED_BYTES = 1 << 10  # of a multiprocessor's, for each block


def blocks_at_once(shared_bytes: int, device: Gpu) -> int:
    """How many blocks a multiprocessor's shared memory has room for."""
    return _SHARED_BYTES.get(device.capability, _LEAST_SHARED_BYTES) // (shared_bytes + _RESERVED_BYTES)


class Image(NamedTuple):
    """A convolution as windows of an image. bwd_data of stride 1 is one too: of dy, with the taps in reverse.

    Strides are in elements: the image's (n, c, h, w), the filter's (start, group, output channel, input channel, r, s),
    the outputs' (n, c, h, w). Channels count within a group. Of a bwd_filter the outputs are dy.
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


def image(problem: ConvProblem) -> Image:
    """The windows of a 2-D problem."""
    start, w_k, w_c, _, w_r, w_s = filter_strides(problem)
    k, c = problem.k // problem.groups, problem.c // problem.groups
    before = tuple(pad for pad, _ in problem.pad)
    if problem.op == "conv_bwd_data":
        reach = tuple((taps - 1) * d for taps, d in zip(problem.filter, problem.dilation, strict=True))
        start += (problem.filter[0] - 1) * w_r + (problem.filter[1] - 1) * w_s
        group_in, group_out, extent, outputs = k, c, problem.out_spatial, problem.spatial
        shapes, pad = (problem.y_shape, problem.x_shape), tuple(r - b for r, b in zip(reach, before, strict=True))
        filters = (start, w_k * k, w_c, w_k, -w_r, -w_s)
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
        image_strides=_strides(shapes[0], problem.channels_last),
        filter_strides=filters,
        out_strides=_strides(shapes[1], problem.y_channels_last),
        image_last=problem.channels_last,
        outputs_last=problem.y_channels_last,
    )


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
    slots = _BANKS_BYTES // shape.quad_bytes
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


class Windows(NamedTuple):
    """The integers of a kernel.

    blocks: that share the tiles. items: loads of a tile. units: of all blocks; chunks: of a group. block_units,
    block_slabs: of a block. parts: of a tile's pixels, that warps take. quad_blocks: of a block of bwd_filter.
    filters, slabs: places in shared memory, in bytes; of a bwd_filter `filters` is that of dy, and dy_bytes are from
    one pixel of it to the next.
    """

    tiles: int
    blocks: int
    tiles_h: int
    tiles_w: int
    tile_rows: int
    columns_log2: int
    in_pixels: int
    in_columns: int
    phase: int
    row_bytes: int
    slab_bytes: int
    items: int
    units: int
    chunks: int
    block_units: int
    block_slabs: int
    parts: int
    quad_blocks: int
    filters: int
    slabs: int
    dy_bytes: int
    groups: int
    group_in: int
    group_out: int
    quads: int
    taps_w: int
    rows: int
    columns: int
    extent_h: int
    extent_w: int
    stride_h: int
    stride_w: int
    stride_w_log2: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    image_n: int
    image_c: int
    image_h: int
    image_w: int
    w_start: int
    w_group: int
    w_out: int
    w_in: int
    w_r: int
    w_s: int
    out_n: int
    out_c: int
    out_h: int
    out_w: int


class Block(NamedTuple):
    """What a block takes, as in `Windows`."""

    blocks: int
    units: int
    slabs: int
    parts: int
    quad_blocks: int
    filters_at: int
    slabs_at: int
    dy_bytes: int


def windows(seen: Image, shape: Shape, tile: Tile, chunks: int, block: Block) -> Windows:
    in_pixels = tile.in_rows * tile.in_columns
    integers = (
        seen.n * tile.tiles_h * tile.tiles_w,
        block.blocks,
        tile.tiles_h,
        tile.tiles_w,
        tile.rows,
        tile.columns_log2,
        in_pixels,
        tile.in_columns,
        tile.phase,
        tile.row_bytes,
        tile.slab_bytes,
        in_pixels * block.slabs * shape.loads_of_pixel,
        seen.groups * chunks,
        chunks,
        block.units,
        block.slabs,
        block.parts,
        block.quad_blocks,
        block.filters_at,
        block.slabs_at,
        block.dy_bytes,
        seen.groups,
        seen.group_in,
        seen.group_out,
        seen.quads,
        seen.taps[1],
        *seen.outputs,
        *seen.extent,
        *seen.stride,
        seen.stride[1].bit_length() - 1,
        *seen.pad,
        *seen.dilation,
        *seen.image_strides,
        *seen.filter_strides,
        *seen.out_strides,
    )
    return Windows._make(integers)


class Forward(NamedTuple):
    """What a kernel of conv_fwd or bwd_data is compiled for.

    filters: of a unit. m_tiles: of 16 pixels, that a warp of a matrix kernel takes together. run: outputs stored at
    once.
    """

    shape: Shape
    filters: int
    m_tiles: int
    run: int
    epilogue: tuple[str, ...]

    def filter_bytes(self, quads: int) -> int:
        """Shared memory that the filters of a unit take."""
        if self.shape.math == "fma":
            return quads * self.shape.channels * self.filters * 4
        return table_bytes(quads) // 4 * self.filters * self.shape.quad_bytes


def table_bytes(quads: int) -> int:
    """Of the offsets of a window's quads, completed to steps of four."""
    return -(-quads // QUAD) * QUAD * 4


class Gradient(NamedTuple):
    """What a kernel of bwd_filter is compiled for.

    filters: of a unit. rows: quads of a warp. together, parts_first: of dy, as of the image.
    """

    shape: Shape
    filters: int
    rows: int
    together: int
    parts_first: bool

    def dy_bytes(self, units: int) -> int:
        """From one pixel of dy in shared memory to the next: what a warp loads together lies in different banks."""
        bytes_ = units * self.filters * ITEMSIZE[self.shape.dtype]
        if self.shape.math == "tf32":
            return bytes_ + (32 - bytes_) % _BANKS_BYTES
        return bytes_ + (16 if bytes_ % 32 == 0 else 32)

    def sums(self, units: int, quad_blocks: int) -> int:
        """Of a block: [quad][channel][filter]."""
        return quad_blocks * self.rows * self.shape.channels * units * self.filters


class Sums(NamedTuple):
    """The integers of the kernel that adds the sums of all blocks of a bwd_filter.

    elements: of the sums that `blocks` blocks have each; sums: of one of the blocks_z places on the last axis.
    """

    blocks: int
    elements: int
    sums: int
    blocks_z: int
    block_units: int
    block_quads: int
    filters: int
    channels: int
    units: int
    chunks: int
    group_in: int
    group_out: int
    quads: int
    quads_of_tap: int
    taps_w: int
    w_start: int
    w_group: int
    w_out: int
    w_in: int
    w_r: int
    w_s: int


def sums(seen: Image, variant: Gradient, chunks: int, block: Block, grid: tuple[int, int, int]) -> Sums:
    of_block = variant.sums(block.units, block.quad_blocks)
    integers = (
        block.blocks,
        grid[1] * grid[2] * of_block,
        of_block,
        grid[2],
        block.units,
        block.quad_blocks * variant.rows,
        variant.filters,
        variant.shape.channels,
        seen.groups * chunks,
        chunks,
        seen.group_in,
        seen.group_out,
        seen.quads,
        seen.quads_of_tap,
        seen.taps[1],
        *seen.filter_strides,
    )
    return Sums._make(integers)
