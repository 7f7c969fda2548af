"""What the kernels of `head_plan.py` are compiled for, and the integers that they take at every launch."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.problem import ITEMSIZE

GROUP = 8  # pixels, columns of a matrix
M_ROWS = 16  # sums of a pixel, rows of a matrix
_VECTOR_BYTES = 16


class Variant(NamedTuple):
    """What a kernel is compiled for.

    planar: whether pixels of a channel are neighbours, not channels. chunk: channels of a slab. copy_elems: of one
    copy. filters: all. sums: of a pixel, pairs (s, k). columns: of a slab, also those beyond the tile's outputs, which
    are 2^columns_log2. pixels: that a thread of the FMA units sums.
    """

    dtype: str
    math: str
    planar: bool
    chunk: int
    copy_elems: int
    stages: int
    threads: int
    filters: int
    sums: int
    columns: int
    columns_log2: int
    pixels: int
    epilogue: tuple[str, ...]

    @property
    def pitch(self) -> int:
        """Bytes from a pixel (planar: a channel) of a slab to the next: an odd number of vectors, so that eight of them
        lie in different banks."""
        bytes_ = (self.columns if self.planar else self.chunk) * ITEMSIZE[self.dtype]
        return (ceil(bytes_ / _VECTOR_BYTES) | 1) * _VECTOR_BYTES

    @property
    def groups(self) -> int:
        return self.columns // GROUP

    @property
    def m_tiles(self) -> int:
        return ceil(self.sums / M_ROWS)

    @property
    def filter_columns(self) -> int:
        """Sums of a pixel, completed to whole vectors of filters."""
        return -(-self.sums // 4) * 4

    @property
    def filter_bytes(self) -> int:
        """Of a chunk's filters for one r."""
        if self.math == "mma":
            return self.chunk * self.m_tiles * M_ROWS * 2
        return self.chunk * self.filter_columns * 4

    @property
    def held_sums(self) -> int:
        """Of a thread."""
        return 4 * self.m_tiles * self.groups if self.math == "mma" else self.pixels * self.sums


class Head(NamedTuple):
    """The integers of a kernel.

    blocks: that share the tiles. in_rows: of a slab. chunks: of all channels. plane: elements from a plane of sums to
    the next. lead: columns of a slab before the first that a tile sees. Places are in bytes; the image's strides, the
    filter's and the outputs' as in `window_plan.Image`.
    """

    tiles: int
    blocks: int
    tiles_h: int
    tiles_w: int
    tile_rows: int
    in_rows: int
    chunks: int
    row_bytes: int
    slab_bytes: int
    plane: int
    lead: int
    sums_at: int
    slabs_at: int
    in_c: int
    out_c: int
    taps_h: int
    taps_w: int
    rows: int
    columns: int
    extent_h: int
    extent_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    image_n: int
    image_c: int
    image_h: int
    image_w: int
    w_start: int
    w_out: int
    w_in: int
    w_r: int
    w_s: int
    out_n: int
    out_k: int
    out_h: int
    out_w: int
