"""Lowering for filter gradients on matrix units: dy with pixels side by side, x as words of two pixels.

    rows[k, p] = dy[k, p]                                            p: a strip's pixels, `amx_filter_plan.py`
    words[plane, odd, tile of 16 channels, q, c] = plane[c, 2q + odd], plane[c, 2q + odd + 1]

Sixteen channels of a plane of x are first laid out as their layout has them, zeros between, then paired.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from nbdnn.kernels.cpu.amx import TILE
from nbdnn.kernels.cpu.amx_filter_plan import PARAMS, STEP
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.pack_pairs import zip_rows
from nbdnn.kernels.cpu.rows import convert_rows, zero_fill
from nbdnn.kernels.cpu.turns import transpose, turn_pairs
from nbdnn.kernels.cpu.vector import pointer, struct

_LANES = 32  # of vectors of 16 bits


@cache
def strip_extents():
    """Compiled-in function: (first slice, slices, first row, rows) of the strip that a split has in this phase; no
    slices where it has none."""
    params_at, step_at = struct(PARAMS), struct(STEP)

    @njit(**DEVICE)
    def extents(ctx, split):
        step = step_at(ctx)
        f = params_at(step.params)
        strip = split * f.split_strips + step.strip
        first_slice, first_row = strip // f.strips_h * f.strip_slices, strip % f.strips_h * f.strip_rows
        slices = min(f.strip_slices, f.slices - first_slice) if strip < f.strips else 0
        return first_slice, slices, first_row, min(f.strip_rows, f.count_h - first_row)

    return extents


@njit(**DEVICE)
def tile_steps(f, slices, rows):
    """Tiles of 32 pixels that a strip of so many slices and rows has."""
    return ((slices - 1) * f.block_pixels + rows * f.pitch + _LANES - 1) // _LANES


@cache
def _lay_out(vl: int):
    """Compiled-in function: a plane's pixels of up to 16 channels, laid out on zeros at `line`."""
    i64, data, clear = pointer("i64"), pointer("bf16"), zero_fill("f32")
    by_channels, rows, halves = (
        convert_rows("bf16", "bf16", vl, step) for vl, step in ((TILE, 1), (_LANES, 1), (_LANES, 2))
    )

    @njit(**DEVICE)
    def lay_out(f, x, plane, channels, line, pitch_bytes, first_slice, slices, first_row, rows_of_strip):
        clear(line, TILE * pitch_bytes // 4)
        low_h, low_w = first_row * f.step_h + f.low_h + plane[1], f.low_w + plane[2]
        first, end = max(0, -(low_h // f.step_h)), min(rows_of_strip + f.more_h, -((low_h - f.extent_h) // f.step_h))
        start, stop = max(0, -(low_w // f.step_w)), min(f.count_w + f.more_w, -((low_w - f.extent_w) // f.step_w))
        height, width = end - first, stop - start
        if height <= 0 or width <= 0:
            return
        row_bytes, pixel_bytes = 2 * f.step_h * f.x_h, 2 * f.step_w * f.x_w
        for number in range(slices):
            n, d = (first_slice + number) // f.count_d, (first_slice + number) % f.count_d
            depth = d * f.step_d + plane[0]
            if depth < 0 or depth >= f.extent_d:
                continue
            at = x + 2 * (n * f.x_n + depth * f.x_d)
            at += 2 * ((low_h + first * f.step_h) * f.x_h + (low_w + start * f.step_w) * f.x_w)
            place = number * f.block_pixels + first * f.pitch + start
            if f.x_c == 1 and width == f.pitch and row_bytes == width * pixel_bytes:
                by_channels(line + 2 * TILE * place, 2 * TILE, at, pixel_bytes, height * width, TILE, 0, channels)
            elif f.x_c == 1:
                for h in range(height):
                    to = line + 2 * TILE * (place + h * f.pitch)
                    by_channels(to, 2 * TILE, at + h * row_bytes, pixel_bytes, width, TILE, 0, channels)
            else:
                for c in range(channels):
                    to, channel = line + c * pitch_bytes + 2 * place, at + 2 * c * f.x_c
                    if f.step_w == 1 and width == f.pitch and row_bytes == 2 * width:
                        rows(to, 0, channel, 0, 1, height * width, 0, height * width)
                    elif f.step_w == 1:
                        rows(to, 2 * f.pitch, channel, row_bytes, height, width, 0, width)
                    elif f.step_w == 2:
                        halves(to, 2 * f.pitch, channel, row_bytes, height, width, 0, width)
                    else:
                        for h in range(height):
                            for w in range(width):
                                data(to + 2 * h * f.pitch)[w] = data(channel + h * row_bytes)[w * f.step_w]

    return lay_out


@cache
def lower_task(vl: int):
    """Sixteen channels of a plane of x, or of dy: index = split * (tiles of x + tiles of dy) + tile."""
    i64, args_at, params_at, step_at = pointer("i64"), struct(ARGS), struct(PARAMS), struct(STEP)
    extents, lay_out, clear = strip_extents(), _lay_out(vl), zero_fill("f32")
    turn_words, turn_out = transpose("f32", "f32", TILE), turn_pairs(TILE)
    move_rows = convert_rows("bf16", "bf16", _LANES, 1)

    @njit(**DEVICE)
    def pair(f, to, line, pitch_bytes, pairs, odd):
        if f.x_c == 1:
            for q in range(pairs):
                pixel = line + 2 * TILE * (2 * q + odd)
                zip_rows(to + 4 * TILE * q, pixel, pixel + 2 * TILE, True, True, TILE)
        else:
            turn_words(to, 4 * TILE, line + 2 * odd, pitch_bytes, TILE, pairs)

    @njit(**DEVICE)
    def lower_rows(f, to, dy, filters, first_slice, slices, first_row, rows, steps):
        for k in range(TILE):
            clear(to + k * f.a_pitch, steps * _LANES // 2)
        for number in range(slices):
            n, d = (first_slice + number) // f.count_d, (first_slice + number) % f.count_d
            at = dy + 2 * (n * f.y_n + d * f.y_d + first_row * f.y_h)
            place = to + 2 * number * f.block_pixels
            height, width = rows, f.count_w
            if width == f.pitch:
                height, width = 1, rows * width
            if f.y_k == 1:
                for h in range(height):
                    turn_out(place + 2 * h * f.pitch, f.a_pitch, at + 2 * h * f.y_h, 2 * f.y_w, width, filters)
            else:
                for k in range(filters):
                    start = at + 2 * k * f.y_k
                    move_rows(place + k * f.a_pitch, 2 * f.pitch, start, 2 * f.y_h, height, width, 0, width)

    def lower(args, ctx, index, worker):
        a, f = args_at(args), params_at(step_at(ctx).params)
        of_x = f.planes * f.groups * f.c_tiles
        of_both = of_x + f.groups * f.k_tiles
        split, tile = index // of_both, index % of_both
        first_slice, slices, first_row, rows = extents(ctx, split)
        if slices <= 0:
            return
        strip, steps = a.workspace + split * f.strip_bytes, tile_steps(f, slices, rows)
        if tile >= of_x:
            g, first = (tile - of_x) // f.k_tiles, (tile - of_x) % f.k_tiles * TILE
            filters, dy = max(0, min(TILE, f.k_group - first)), a.p1 + 2 * (g * f.k_group + first) * f.y_k
            to = strip + f.a_offset + (tile - of_x) * TILE * f.a_pitch
            lower_rows(f, to, dy, filters, first_slice, slices, first_row, rows, steps)
            return
        group_tile, plane = tile % (f.groups * f.c_tiles), i64(f.plane_table + tile // (f.groups * f.c_tiles) * 40)
        g, first = group_tile // f.c_tiles, group_tile % f.c_tiles * TILE
        channels, x = min(TILE, f.c_group - first), a.p0 + 2 * (g * f.c_group + first) * f.x_c
        line, pairs = a.workspace + f.worker_offset + worker * f.worker_bytes, f.reach // 2 + TILE * steps
        pitch_bytes = (4 * pairs + 2 + 63) // 64 * 64 | 64
        lay_out(f, x, plane, channels, line, pitch_bytes, first_slice, slices, first_row, rows)
        for odd in range(2):
            if plane[3 + odd] >= 0:
                pair(f, strip + plane[3 + odd] + group_tile * f.c_tile_bytes, line, pitch_bytes, pairs, odd)

    return compile_task(lower, (vl,), fastmath=FASTMATH)
