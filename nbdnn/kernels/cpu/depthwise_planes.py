"""Depthwise convolution of planes (`conv_depthwise.py`): a band of rows of one plane, a few rows at a time.

Where a gradient's stride is 2, even and odd columns see other columns of taps: each have a tile of their own, which are
put together row by row before they are stored. Planes of 112x112 with 3x3 took 218 us, not 487 where each was stored
by itself, one element after the other (96 channels, two images; two threads of a Zen 5).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numba import njit

from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.depthwise_plan import PARAMS, adjacent, shares_loads
from nbdnn.kernels.cpu.depthwise_vector import planar_block, planar_rows
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import Gather
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.pool_phases import row_of_phases
from nbdnn.kernels.cpu.vector import WIDEN, pointer, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

_MAX_BLOCK_TAPS = 150  # whose products are written out


class Columns(NamedTuple):
    """What the kernel of the planar outputs that see the same columns of taps is compiled for: taps and steps of rows
    and columns; whether rows go in blocks, and whether their columns of taps share what is loaded."""

    taps: tuple[int, int]
    steps: tuple[int, int]
    in_blocks: bool
    together: bool


@cache
def _planar_tile(dtype: str, vl: int, columns: Columns):
    """Compiled-in function (f, x, depth, first, rows, entries, n_entries, weights, tile): rows of a plane, from `first`
    on."""
    compute, (_, taps_w), (step_h, step) = DEFAULT_COMPUTE[dtype], columns.taps, columns.steps
    itemsize, acc_bytes, i64 = ITEMSIZE[dtype], ITEMSIZE[compute], pointer("i64")
    rows_of = planar_rows(dtype, compute, vl, taps_w, step, columns.together)
    blocks_of = planar_block(dtype, compute, vl, columns.taps, columns.steps, columns.together)

    @njit(**DEVICE)
    def in_blocks(f, x, depth, first, rows, entries, n_entries, weights, tile):
        top, pitch = first * step_h + i64(f.row_table)[1], f.in_h * itemsize
        at_depth, tile_pitch = x + depth * f.in_d * itemsize, f.part_pitch * acc_bytes
        blocks_of(at_depth, pitch, top, rows, f.extent_h, weights, f.column_table, f.count_w, tile, tile_pitch)

    @njit(**DEVICE)
    def row_by_row(f, x, depth, first, rows, entries, n_entries, weights, tile):
        rows_of(
            x, f.in_h * itemsize, first, rows, f.in_step_h, f.extent_h, entries, n_entries, weights,
            f.column_table, f.count_w, tile, f.part_pitch * acc_bytes,
        )  # fmt: skip

    return in_blocks if columns.in_blocks else row_by_row


@cache
def _each_column(dtype: str, vl: int, columns: tuple[Columns, ...]):
    """Compiled-in function (ctx, x, depth, first, rows, entries, n_entries, weights, parts): the tiles of the records
    at ctx, one after the other."""
    params_at, record_bytes, tile_of = struct(PARAMS), PARAMS.itemsize, _planar_tile(dtype, vl, columns[0])
    others = _each_column(dtype, vl, columns[1:]) if len(columns) > 1 else None

    @njit(**DEVICE)
    def last(ctx, x, depth, first, rows, entries, n_entries, weights, parts):
        tile_of(params_at(ctx), x, depth, first, rows, entries, n_entries, weights, parts)

    @njit(**DEVICE)
    def one_and_others(ctx, x, depth, first, rows, entries, n_entries, weights, parts):
        f = params_at(ctx)
        tile_of(f, x, depth, first, rows, entries, n_entries, weights, parts)
        others(
            ctx + record_bytes, x, depth, first, rows, entries, n_entries, weights + f.weights_bytes,
            parts + f.part_bytes,
        )  # fmt: skip

    return one_and_others if others else last


@cache
def planar_task(dtype: str, vl: int, columns: tuple[Columns, ...]):
    """A band of rows of one plane: index = ((n * groups + g) * depth + d) * bands + band.

    ctx has a record for the columns of each remainder, whose tiles are put together.
    """
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes, widen, count = ITEMSIZE[dtype], ITEMSIZE[compute], WIDEN[dtype], len(columns)
    data, acc_of, i64, args_at, params_at = (
        pointer(dtype), pointer(compute), pointer("i64"), struct(ARGS), struct(PARAMS),
    )  # fmt: skip
    tiles_of, store, record_bytes = _each_column(dtype, vl, columns), tile_store(dtype, compute, vl), PARAMS.itemsize
    put_together = row_of_phases(compute, vl, False)

    @njit(**DEVICE)
    def take_weights(f, w, g, depth, entries, weights):
        """Rows of taps that the depth reaches, and their weights; returns how many."""
        n_entries = 0
        for t in range(f.taps_d):
            tap_d, d = i64(f.depth_table)[2 * t], depth * f.in_step_d + i64(f.depth_table)[2 * t + 1]
            if d < 0 or d >= f.extent_d:
                continue
            for r in range(f.taps_h):
                tap_h, h = i64(f.row_table)[2 * r], i64(f.row_table)[2 * r + 1]
                i64(entries)[2 * n_entries] = h
                i64(entries)[2 * n_entries + 1] = d * f.in_d * itemsize
                for s in range(f.taps_w):
                    tap_w = i64(f.column_table)[3 * f.taps_w + s]
                    value = w[g * f.w_g + tap_d * f.w_t + tap_h * f.w_r + tap_w * f.w_s]
                    acc_of(weights)[n_entries * f.taps_w + s] = widen(value)
                n_entries += 1
        return n_entries

    def plane(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        band, rest = index % f.bands, index // f.bands
        depth, rest = rest % f.count_d, rest // f.count_d
        g, n = rest % f.groups, rest // f.groups
        entries = a.workspace + f.worker_offset + worker * f.worker_bytes
        weights = entries + f.entries_bytes
        tile = weights + count * f.weights_bytes
        parts = tile + f.tile_bytes if count > 1 else tile
        n_entries = 0
        for column in range(count):
            of_column = params_at(ctx + column * record_bytes)
            of_weights = weights + column * f.weights_bytes
            n_entries = take_weights(of_column, data(pointers[f.w_pointer]), g, depth, entries, of_weights)
        x = pointers[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        at = n * f.out_n + g * f.out_g + (f.start_d + depth * f.out_step_d) * f.out_d
        bias = pointers[f.bias_pointer] + g * itemsize if f.bias_pointer >= 0 else 0
        for first in range(band * f.band_rows, min(f.count_h, (band + 1) * f.band_rows), f.tile_rows):
            rows = min(f.tile_rows, min(f.count_h, (band + 1) * f.band_rows) - first)
            tiles_of(ctx, x, depth, first, rows, entries, n_entries, weights, parts)
            if count > 1:
                for row in range(rows):
                    to, of_parts = tile + row * f.width_pitch * acc_bytes, parts + row * f.part_pitch * acc_bytes
                    put_together(to, of_parts, f.part_bytes, count, 0, f.width, to)
            start = (at + (f.start_h + first * f.out_step_h) * f.out_h) * itemsize
            residual = pointers[f.residual_pointer] + start if f.residual_pointer >= 0 else 0
            flags = (f.activation, bias, 0, 0, residual, f.read_out)
            store(
                tile, f.width_pitch, rows, f.width, pointers[f.out_pointer] + start, f.row_offsets, f.lane_offsets,
                f.contiguous, flags, a.alpha, a.beta,
            )  # fmt: skip

    return compile_task(plane, (dtype, vl, columns), fastmath=FASTMATH)


def columns_of(gather: Gather, vl: int) -> Columns:
    h, w = gather.h, gather.w
    # Every depth by itself, and of each there is one.
    flat = gather.d.taps == ((0, 0),) and gather.d.in_step == 1 and gather.d.count <= gather.d.in_extent
    in_blocks = flat and adjacent(h) and h.count > 1 and 0 < len(h.taps) * len(w.taps) <= _MAX_BLOCK_TAPS
    return Columns((len(h.taps), len(w.taps)), (h.in_step, w.in_step), in_blocks, shares_loads(w, vl))
