"""Where an output of a spatial transformer lies in the image: pixels and weights, as compiled-in functions.

    (s, t) position in pixels;  b = min(max(floor(s), 0), width - 2), as for t: the pixels b, b + 1 and, a row on, again
    weights hat(s - b), hat(s - b - 1), hat(d) = max(0, 1 - |d|)

A pixel outside of the image has no part in b and b + 1, and one inside that is too far away has weight 0: there are no
borders. NaN has weight 0 everywhere. Integers are elements. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np

from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.spatial import tensor_strides
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

# What int32 may hold here: the last block of a grid counts on beyond the last element.
INT32_END = 2**31 - 2**16
_VECTOR_BYTES, _ROW_BYTES = 16, 32
_DIVISORS = "blocks", "tiles_w", "out_w", "in_tiles_w", "in_w"
TILE = 32  # outputs
_SECTOR_BYTES, _SECTORS_PER_US = 32, 70e3  # that are added to (H200: 50 to 90 a ns)
FEW_CHANNELS = 4


class Fields(NamedTuple):
    """x (dx) and y (dy) by strides and extents; a vector is `lanes` neighbouring channels.

    blocks: of an image. tiles_w, in_tiles_w: those side by side in a row of outputs, and of pixels. vectors: of a
    position, of which a block of the grid's second axis takes `group`. x_v, y_v: from a vector to the next. right,
    down: from a pixel to the next, 0 where there is one only. by_, shift_: a divisor's `reciprocal`. s_column ...
    t_row: pixels from one output to the next where the map is the identity, as the bits of a float32.
    """

    blocks: int
    tiles_w: int
    in_tiles_w: int
    images: int
    outputs: int
    pixels: int
    vectors: int
    group: int
    in_h: int
    in_w: int
    out_h: int
    out_w: int
    x_n: int
    x_v: int
    x_h: int
    x_w: int
    y_n: int
    y_v: int
    y_h: int
    y_w: int
    right: int
    down: int
    by_blocks: int
    shift_blocks: int
    by_tiles_w: int
    shift_tiles_w: int
    by_out_w: int
    shift_out_w: int
    by_in_tiles_w: int
    shift_in_tiles_w: int
    by_in_w: int
    shift_in_w: int
    s_column: int
    s_row: int
    t_column: int
    t_row: int


class Kind(NamedTuple):
    """What every kernel with an image is compiled for. threads: of one position, neighbours in a block; 1 where images
    are planar, but for `spatialtf_turned`. tile_columns: of a tile of outputs. bits: of the integers."""

    affine: bool
    dtype: str
    param_dtype: str
    lanes: int
    threads: int
    tile_columns: int
    bits: int

    @property
    def compute(self) -> str:
        return DEFAULT_COMPUTE[self.dtype]


def vector_lanes(problem: SpatialtfProblem) -> int:
    """Neighbouring channels that one instruction moves."""
    if not problem.channels_last:
        return 1
    lanes = max(1, min(_VECTOR_BYTES, problem.align) // ITEMSIZE[problem.dtype])
    while problem.c % lanes:
        lanes //= 2
    return lanes


def fields(problem: SpatialtfProblem, kind: Kind, blocks: int, group: int) -> Fields:
    """The integers of a problem."""
    (x_n, x_c, _, x_h, x_w), (y_n, y_c, _, y_h, y_w) = (
        tensor_strides(shape, problem.channels_last) for shape in (problem.x_shape, problem.y_shape)
    )
    (in_h, in_w), (out_h, out_w), lanes = problem.spatial, problem.out_spatial, kind.lanes
    tiles_w, in_tiles_w = (ceil(extent / max(kind.tile_columns, 1)) for extent in (out_w, in_w))
    divided_by = zip(_DIVISORS, (blocks, tiles_w, out_w, in_tiles_w, in_w), strict=True)
    reciprocals = {name: reciprocal(divisor) for name, divisor in divided_by}
    return Fields(
        blocks=blocks,
        tiles_w=tiles_w,
        in_tiles_w=in_tiles_w,
        images=problem.n,
        outputs=problem.positions,
        pixels=in_h * in_w,
        vectors=problem.c // lanes,
        group=group,
        in_h=in_h,
        in_w=in_w,
        out_h=out_h,
        out_w=out_w,
        x_n=x_n,
        x_v=x_c * lanes,
        x_h=x_h,
        x_w=x_w,
        y_n=y_n,
        y_v=y_c * lanes,
        y_h=y_h,
        y_w=y_w,
        right=x_w * (in_w > 1),
        down=x_h * (in_h > 1),
        **{f"by_{name}": by for name, (by, _) in reciprocals.items()},
        **{f"shift_{name}": shift for name, (_, shift) in reciprocals.items()},
        s_column=_share(in_w, out_w),
        s_row=_share(in_w, out_h),
        t_column=_share(in_h, out_w),
        t_row=_share(in_h, out_h),
    )


def _share(extent: int, outputs: int) -> int:
    """The bits of (extent - 1) / (outputs - 1), rounded as a GPU would."""
    return int((np.float32(extent - 1) / np.float32(max(outputs - 1, 1))).view(np.int32))


def index_bits(problem: SpatialtfProblem) -> int:
    """32 where int32 holds every offset, position and parameter of a kernel, else 64."""
    return 32 if max(operand.size_elems for operand in problem.operands) < INT32_END else 64


@cache
def affine(param_dtype: str, compute: str, bits: int):
    """Device function (theta, image, f) -> (s, s_column, s_row, t, t_column, t_row).

    Where the image's first output lies, and how much further the next column's and the next row's do. Of the identity
    every position is a whole number.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    real, integer, widen = ptx.REAL[compute], ptx.INTEGER[bits], ptx.WIDEN[param_dtype]
    float_of, word = ptx_tile.float_of, ptx.WORD

    @ptx.inline
    def known(share, whole, outputs):
        return float_of(word(share))

    @ptx.inline
    def worked_out(share, whole, outputs):
        return whole / (real(integer(outputs - 1)) if outputs > 1 else real(1.0))

    step = known if compute == "f32" else worked_out

    @ptx.inline
    def axis(along, across, shift, extent, column_share, row_share, out_h, out_w):
        whole = real(integer(extent - 1))
        column = along * step(column_share, whole, out_w) if out_w > 1 else real(0.0)
        row = across * step(row_share, whole, out_h) if out_h > 1 else real(0.0)
        first = shift + real(1.0) - (along if out_w > 1 else real(0.0)) - (across if out_h > 1 else real(0.0))
        return first * (real(0.5) * whole), column, row

    @ptx.inline
    def locate(theta, image, f):
        at = integer(image * 6)
        s, s_column, s_row = axis(
            widen(ptx.load_constant(theta, at)), widen(ptx.load_constant(theta, integer(at + 1))),
            widen(ptx.load_constant(theta, integer(at + 2))), f.in_w, f.s_column, f.s_row, f.out_h, f.out_w,
        )  # fmt: skip
        t, t_column, t_row = axis(
            widen(ptx.load_constant(theta, integer(at + 3))), widen(ptx.load_constant(theta, integer(at + 4))),
            widen(ptx.load_constant(theta, integer(at + 5))), f.in_h, f.t_column, f.t_row, f.out_h, f.out_w,
        )  # fmt: skip
        return s, s_column, s_row, t, t_column, t_row

    return locate


@cache
def at_output(compute: str, bits: int):
    """Device function (map, i, j) -> (s, t) of the output in row i and column j under an affine map."""
    from nbdnn.kernels.cuda import ptx

    real = ptx.REAL[compute]

    @ptx.inline
    def place(m, i, j):
        row, column = real(i), real(j)
        return ptx.fma(column, m[1], ptx.fma(row, m[2], m[0])), ptx.fma(column, m[4], ptx.fma(row, m[5], m[3]))

    return place


@cache
def position(kind: Kind):
    """Device function (places, image, i, j, f) -> (s, t). places: theta, or the grid."""
    from nbdnn.kernels.cuda import ptx

    real, integer, widen = ptx.REAL[kind.compute], ptx.INTEGER[kind.bits], ptx.WIDEN[kind.param_dtype]
    locate, place = affine(kind.param_dtype, kind.compute, kind.bits), at_output(kind.compute, kind.bits)

    @ptx.inline
    def by_theta(places, image, i, j, f):
        return place(locate(places, image, f), i, j)

    @ptx.inline
    def by_grid(places, image, i, j, f):
        at = integer((image * f.outputs + i * f.out_w + j) * 2)
        x, y = widen(ptx.load_constant(places, at)), widen(ptx.load_constant(places, integer(at + 1)))
        half_w, half_h = real(0.5) * real(integer(f.in_w - 1)), real(0.5) * real(integer(f.in_h - 1))
        return (x + real(1.0)) * half_w, (y + real(1.0)) * half_h

    return by_theta if kind.affine else by_grid


@cache
def nearest(compute: str, bits: int):
    """Device function (s, extent) -> (b, s - b)."""
    from nbdnn.kernels.cuda import ptx, ptx_spatialtf

    real, integer = ptx.REAL[compute], ptx.INTEGER[bits]

    @ptx.inline
    def find_narrow(s, extent):
        pixel = integer(max(min(ptx_spatialtf.whole(s), integer(extent - 2)), integer(0)))
        return pixel, s - real(pixel)

    @ptx.inline
    def find(s, extent):
        inside = ptx_spatialtf.smaller(s, real(integer(extent - 2)))
        pixel = integer(ptx_spatialtf.larger(inside, real(0.0)))
        return pixel, s - real(pixel)

    return find_narrow if (compute, bits) == ("f32", 32) else find


@cache
def in_order(kind: Kind):
    """Device function (index, tiles of a row, by, shift, columns of a row, by, shift) -> (row, column) of a position,
    tile by tile or row by row. by, shift: the `reciprocal` of the number before."""
    from nbdnn.kernels.cuda import ptx

    integer, columns, rows = ptx.INTEGER[kind.bits], kind.tile_columns, TILE // max(kind.tile_columns, 1)

    @ptx.inline
    def by_tiles(index, tiles_w, by_tiles_w, shift_tiles_w, width, by_width, shift_width):
        tile, index = ptx.divided(index, integer(TILE))
        tile_row, tile_column = ptx.split(tile, tiles_w, by_tiles_w, shift_tiles_w)
        row, column = ptx.divided(index, integer(columns))
        return integer(tile_row * rows + row), integer(tile_column * columns + column)

    @ptx.inline
    def by_rows(index, tiles_w, by_tiles_w, shift_tiles_w, width, by_width, shift_width):
        return ptx.split(index, width, by_width, shift_width)

    return by_tiles if columns else by_rows


def adding_us(problem: SpatialtfProblem, side_by_side: bool) -> float:
    """What outputs take at least that add to the four pixels near them, of float32: a prior for the guess.
    side_by_side: a pixel's channels, as sectors of the second-level cache hold them."""
    sectors = ceil(problem.c * 4 / _SECTOR_BYTES) if side_by_side else problem.c
    return 4 * problem.n * problem.positions * sectors / _SECTORS_PER_US


def tiled_positions(columns: int, height: int, width: int) -> int:
    """Of all tiles that an image has a part in; of its rows where there are no tiles."""
    return TILE * ceil(width / columns) * ceil(height * columns / TILE) if columns else height * width


def tile_columns(problem: SpatialtfProblem) -> int:
    """Columns of a tile of outputs; 0 for no tiles, but rows. What is near each other in the image is so in a tile,
    however the image is turned; many channels that lie apart are rather stored in long rows."""
    if problem.channels_last:
        return 8
    return max(8, _ROW_BYTES // ITEMSIZE[problem.dtype]) if problem.c <= FEW_CHANNELS else 0


@cache
def output_place(kind: Kind, block_threads: int):
    """Device function (f) -> (image, row, column, first vector, end of vectors) of a thread, in order; the row or the
    column may be outside."""
    from nbdnn.kernels.cuda import ptx

    place, in_tiles = _thread_place(kind, block_threads), in_order(kind)

    @ptx.inline
    def of_output(f):
        image, index, first, end = place(f)
        row, column = in_tiles(index, f.tiles_w, f.by_tiles_w, f.shift_tiles_w, f.out_w, f.by_out_w, f.shift_out_w)
        return image, row, column, first, end

    return of_output


@cache
def pixel_place(kind: Kind, block_threads: int):
    """`output_place` where threads have pixels."""
    from nbdnn.kernels.cuda import ptx

    place, in_tiles = _thread_place(kind, block_threads), in_order(kind)

    @ptx.inline
    def of_pixel(f):
        image, index, first, end = place(f)
        tiles = f.in_tiles_w, f.by_in_tiles_w, f.shift_in_tiles_w
        row, column = in_tiles(index, tiles[0], tiles[1], tiles[2], f.in_w, f.by_in_w, f.shift_in_w)
        return image, row, column, first, end

    return of_pixel


@cache
def _thread_place(kind: Kind, block_threads: int):
    """Device function (f) -> (image, position, first vector, end of vectors) of a thread."""
    from nbdnn.kernels.cuda import ptx

    integer, threads, at_once = ptx.INTEGER[kind.bits], kind.threads, block_threads // kind.threads

    @ptx.inline
    def place(f):
        image, block = ptx.split(integer(ptx.block_x()), f.blocks, f.by_blocks, f.shift_blocks)
        local, lane = ptx.divided(integer(ptx.thread_x()), integer(threads))
        first = integer(ptx.block_y() * f.group)
        end = integer(first + f.group)
        end = end if end < f.vectors else f.vectors
        return image, integer(block * at_once + local), integer(first + lane), end

    return place
