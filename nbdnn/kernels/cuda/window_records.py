"""What the kernels of windows are compiled for, and the integers that they take at every launch."""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.window_plan import BANKS_BYTES, QUAD, Image, Shape, Tile
from nbdnn.problem import ITEMSIZE


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
            return bytes_ + (32 - bytes_) % BANKS_BYTES
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
