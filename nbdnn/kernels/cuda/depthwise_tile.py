"""The device functions of depthwise kernels: how a thread's tile is summed and stored.

State, all in registers: sums, a tuple with those of a tile's rows, columns and lanes. A source says where its inputs
are and a target where it goes. Everything that is known beforehand is unrolled by `ptx_vector_rows`. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda import depthwise_plan as plan
from nbdnn.kernels.cuda import depthwise_weights
from nbdnn.kernels.cuda.depthwise_plan import Axis
from nbdnn.kernels.cuda.geometry import input_reached

_LOOP = 8  # registers of a thread that goes from plane to plane of taps
_PIECE = 8  # taps of a filter row at a time
_WAITING = 2.0  # times what issuing taps in turn takes: each row is waited for
# Values kept and loaded of a forward that may have 128 registers, rows in turn (either) and taps in turn. In 16 bits
# 144x56x56 of stride 2 11.3 us, not 12.2; tiles of 8x2 over 576x14x14 6.6, not 8.1; planar of stride 2 13.8, not 15.8.
# Of bwd_data as many take 1 to 5 % longer.
_ROWS_IN_TURN, _TAPS_IN_TURN = ((61, 170), (92, 96)), ((128, 76),)


class Tile(NamedTuple):
    """Output rows and columns of a thread."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


class Variant(NamedTuple):
    """What a kernel is compiled for.

    unrolled: rows in turn, else taps in turn. flat: one plane of taps, from one channel. in_last, out_last: whether
    channels are the last axis of the input and the output. lanes: of a vector that is loaded; stored: of one that is
    stored. reversed_: a filter's last tap comes first, where `direct`.
    """

    forward: bool
    dtype: str
    in_last: bool
    out_last: bool
    lanes: int
    stored: int
    tile: Tile
    rows: Axis
    columns: Axis
    unrolled: bool
    flat: bool
    reversed_: bool
    epilogue: tuple[str, ...]
    bits: int

    @property
    def direct(self) -> bool:
        """Channels-last, whether a thread loads all weights from memory: the filters of its channels are neighbours."""
        return self.out_last and self.unrolled and self.flat

    @property
    def width(self) -> int:
        """Sums of an output position in a thread, and weights of a tap."""
        return self.lanes if self.out_last else 1

    @property
    def taps(self) -> int:
        """Of a plane."""
        return self.rows.taps * self.columns.taps

    @property
    def step_h(self) -> int:
        """Rows of the input from one tile to the next."""
        return plan.step(self.forward, self.rows, self.tile.rows)

    @property
    def step_w(self) -> int:
        return plan.step(self.forward, self.columns, self.tile.columns)

    @property
    def piece(self) -> int:
        """Taps of a filter row that are taken at a time: a piece on, vectors begin at multiples of their size again."""
        unit = (1 if self.forward else self.columns.stride) * (1 if self.out_last else self.lanes)
        return self.columns.taps if self.columns.taps <= _PIECE else min(self.columns.taps, ceil(_PIECE / unit) * unit)

    @property
    def row(self) -> plan.Row:
        """What the columns of a tile read of one row."""
        reaches = plan.reaches(self.forward, self.columns._replace(taps=self.piece), self.tile.columns)
        return plan.row(reaches, self.lanes, self.out_last)

    @property
    def row_reaches(self) -> list[plan.Reach]:
        return plan.reaches(self.forward, self.rows, self.tile.rows)

    @property
    def live_rows(self) -> int:
        """Rows of a tile whose sums are in registers at once: between the first and the last input they read."""
        if not self.flat:
            return self.tile.rows
        read = {row: [r.position for r in self.row_reaches if r.output == row] for row in range(self.tile.rows)}
        ends = [(min(positions), max(positions)) for positions in read.values() if positions]
        # A single row of a stride may be one that no tap reads.
        return max((sum(low <= at <= high for low, high in ends) for at, _ in ends), default=1)

    @property
    def fits(self) -> bool:
        if not self.unrolled:
            return self.held.fits
        products = len(self.row_reaches) * len(self.row.products)
        return self.taps * self.width <= plan.REGISTER_TAPS and products <= plan.MOST_PRODUCTS and self.held.fits

    @property
    def held(self) -> plan.Held:
        """Sums, weights and two rows of inputs; taps in turn, a row of each."""
        of_row = plan.vector_registers(self.dtype, self.lanes) * len(self.row.offsets)
        inputs, sums = len(self.row.offsets) * self.lanes, self.live_rows * self.tile.columns * self.width
        if not self.unrolled:
            return plan.Held(sums + self.piece * self.width + inputs, of_row)
        positions, loop = {reach.position for reach in self.row_reaches}, 0 if self.flat else _LOOP
        return plan.Held(sums + self.taps * self.width + 2 * inputs + loop, len(positions) * of_row)

    @property
    def min_blocks(self) -> int:
        """Blocks of a multiprocessor: `Held` says of how many registers; of a forward more are worth less than more
        threads (taps in turn: f32 240x28x28, 5x5 of stride 2, 14.9 us, not 18.6). A bias is loaded as well: 3x3 in
        float32 would spill for it, but for Hopper."""
        kept, loaded = self.held
        loaded += self.width if "bias" in self.epilogue else 0
        limits = _ROWS_IN_TURN if self.unrolled else _TAPS_IN_TURN if self.columns.taps == self.piece else ()
        few = self.forward and any(kept <= most_kept and loaded <= most_loaded for most_kept, most_loaded in limits)
        return 4 if few else self.held.min_blocks

    @property
    def instructions(self) -> float:
        """Of a thread and plane of taps, about."""
        row, widening = self.row, 0 if self.dtype == "f32" else self.lanes
        pieces = self.columns.taps / self.piece
        loads = len(row.offsets) * (3 + widening)
        stores = self.tile.rows * self.tile.columns * self.width * 2
        if self.unrolled:
            positions = {reach.position for reach in self.row_reaches}
            return len(positions) * loads + len(self.row_reaches) * len(row.products) + stores + self.taps + 100
        return _WAITING * self.rows.taps * pieces * (loads + len(row.products) + 2 * self.columns.taps) + stores + 200


class Tiles(NamedTuple):
    """The integers of a kernel.

    tiles: of all images and, planar, all channels; image_tiles: of one image. A block takes `block_tiles` tiles of one
    of `slabs` slabs of `vectors` vectors of channels; planar, THREADS tiles. Weights of a tap are `pitch` floats from
    the last one's in shared memory. planes: depth taps times the channels summed. A filter has `taps` taps, at
    w_first + w_step * tap.
    """

    tiles: int
    image_tiles: int
    tiles_h: int
    tiles_w: int
    slabs: int
    vectors: int
    block_tiles: int
    pitch: int
    planes: int
    group_out: int
    group_in: int
    out_c: int
    out_d: int
    out_h: int
    out_w: int
    y_n: int
    y_c: int
    y_d: int
    y_h: int
    y_w: int
    in_n: int
    in_c: int
    in_d: int
    in_h: int
    in_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    taps: int
    taps_d: int
    stride_d: int
    pad_d: int
    dilation_d: int
    w_first: int
    w_step: int


class Reciprocals(NamedTuple):
    """What `ptx.split` takes of the divisors among them: multipliers and shifts."""

    slabs: int
    slabs_shift: int
    vectors: int
    vectors_shift: int
    image_tiles: int
    image_tiles_shift: int
    out_c: int
    out_c_shift: int
    tiles_w: int
    tiles_w_shift: int
    tiles_h: int
    tiles_h_shift: int
    out_d: int
    out_d_shift: int
    group_out: int
    group_out_shift: int


def end_of(v: Variant):
    """How the tile's rows are stored."""
    from nbdnn.kernels.cuda.ptx_vector_rows import End

    return End(v.dtype, v.stored, tuple(range(0, v.tile.columns, 1 if v.out_last else v.stored)), v.epilogue)


def rows_of(v: Variant):
    """The products of a whole tile: each row of the input with the weights of every row of the tile that it reaches."""
    from nbdnn.kernels.cuda.ptx_vector_rows import Rows

    row, reaches = v.row, v.row_reaches
    sums_of_row, weights_of_row = v.tile.columns * v.width, v.columns.taps * v.width
    positions = sorted({reach.position for reach in reaches})
    read = [[positions.index(reach.position) for reach in reaches if reach.output == p] for p in range(v.tile.rows)]
    last = [max(steps, default=0) for steps in read]
    return Rows(
        v.dtype,
        v.lanes,
        row.offsets,
        tuple(
            (
                position,
                tuple(
                    (reach.output * sums_of_row + i, j, reach.tap * weights_of_row + k)
                    for reach in reaches
                    if reach.position == position
                    for i, j, k in row.products
                ),
                tuple(p for p, end in enumerate(last) if end == step),
            )
            for step, position in enumerate(positions)
        ),
    )


def bias_of(v: Variant):
    """Device function (bias, channel) -> what is added to the lanes of a vector that is stored."""
    from nbdnn.kernels.cuda import ptx, ptx_vector

    widen, repeated = ptx.WIDEN[v.dtype], ptx_vector.repeated(v.stored)
    zeros, run, integer = ptx_vector.zeros(v.stored), ptx_vector.load_run(v.dtype, v.stored), ptx.INTEGER[v.bits]

    @ptx.inline
    def none(bias, channel):
        return zeros()

    @ptx.inline
    def of_channels(bias, channel):
        return run(bias, channel, integer(1))

    @ptx.inline
    def of_channel(bias, channel):
        return repeated(widen(ptx.load_constant(bias, channel)))

    if "bias" not in v.epilogue:
        return none
    return of_channels if v.out_last else of_channel


def _filter_row(v: Variant):
    """Device function (sums, w, where, tap_step, f, source, target) -> sums of a row of the filter and of the input."""
    from nbdnn.kernels.cuda import ptx, ptx_vector_rows

    integer, where_type = ptx.INTEGER[v.bits], ptx.types.uint32 if v.out_last else ptx.INTEGER[v.bits]
    piece = v.piece
    whole, rest = divmod(v.columns.taps, piece)
    shift = piece * v.columns.dilation if v.forward else -(piece * v.columns.dilation // v.columns.stride)

    def adding(taps):
        columns = v.columns._replace(taps=taps)
        row = plan.row(plan.reaches(v.forward, columns, v.tile.columns), v.lanes, v.out_last)
        weights = depthwise_weights.weights_of(v, taps)
        multiply = ptx_vector_rows.multiply_rows(
            ptx_vector_rows.Rows(v.dtype, v.lanes, row.offsets, ((0, row.products, ()),))
        )

        @ptx.inline
        def add(sums, w, where, f, source, target):
            return multiply(sums, weights(w, where, f), source, target)

        return add

    @ptx.inline
    def nothing(sums, w, where, f, source, target):
        return sums

    add_piece, add_rest = adding(piece), adding(rest) if rest else nothing

    @ptx.inline
    def one_piece(sums, w, where, tap_step, f, source, target):
        return add_piece(sums, w, where, f, source, target)

    @ptx.inline
    def every_piece(sums, w, where, tap_step, f, source, target):
        done = integer(0)
        while done < whole:
            sums = add_piece(sums, w, where, f, source, target)
            where = where_type(where + where_type(piece) * tap_step)
            source = moved(source, source.row, integer(source.column + shift))
            done = integer(done + 1)
        return add_rest(sums, w, where, f, source, target)

    moved = _moved_source()
    return one_piece if (whole, rest) == (1, 0) else every_piece


@cache
def _moved_source():
    """Device function (source, row, column) -> the source from there on."""
    from nbdnn.kernels.cuda import ptx, ptx_vector_rows

    source_type = ptx_vector_rows.Source

    @ptx.inline
    def moved(s, row, column):
        return source_type(s.image, s.at, row, s.row_step, s.rows, column, s.column_step, s.columns)

    return moved


def taps_in_turn(v: Variant):
    """Device function (sums, w, where, f, source, target) -> sums of one row of outputs over a plane of taps."""
    from nbdnn.kernels.cuda import ptx

    integer, taps_w, add_row = ptx.INTEGER[v.bits], v.columns.taps, _filter_row(v)
    where_type, reached = ptx.types.uint32 if v.out_last else integer, input_reached(v.forward, v.bits)
    shared, moved = v.out_last, _moved_source()
    taps_h, stride, pad, dilation = v.rows

    @ptx.inline
    def plane(sums, w, where, f, source, target):
        tap_step = where_type(4 * f.pitch if shared else f.w_step)
        r = integer(0)
        while r < taps_h:
            row = reached(target.row, r, integer(stride), integer(pad), integer(dilation), f.extent_h)
            if row >= 0:
                here = where_type(where + where_type(r * taps_w) * tap_step)
                sums = add_row(sums, w, here, tap_step, f, moved(source, row, source.column), target)
            r = integer(r + 1)
        return sums

    return plane


def rows_in_turn(v: Variant, end=None):
    """The same by rows of the input, with all weights in registers; with an end, also stores the tile."""
    from nbdnn.kernels.cuda import ptx, ptx_vector_rows

    multiply, weights = ptx_vector_rows.multiply_rows(rows_of(v), end), depthwise_weights.weights_of(v, v.taps)

    @ptx.inline
    def plane(sums, w, where, f, source, target):
        return multiply(sums, weights(w, where, f), source, target)

    return plane
