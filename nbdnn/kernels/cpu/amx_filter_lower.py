"""Lowering for filter gradients on matrix units: dy with pixels side by side, x as words of two pixels.

    rows[k, p] = dy[k, p]                                            p: a strip's pixels, `amx_filter_plan.py`
    words[copy, group, tile of 16 channels, q, c] = plane[c, 2q + odd], plane[c, 2q + odd + 1]    copy: (plane, odd)

Channels of a plane of x are first laid out as their layout has them, zeros between, then paired. Two tiles of channels
are lowered at a time: interleaved, they are a cache line of each pixel.
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
from nbdnn.kernels.cpu.vector import pointer, prefetch, struct

_LANES = 32  # of vectors of 16 bits, and channels that are lowered at a time


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


@njit(**DEVICE)
def _ask_ahead(start, pixel_bytes):
    """For the pixels behind those that are about to be read."""
    for pixel in range(_LANES, 2 * _LANES):
        prefetch(start + pixel * pixel_bytes)


@cache
def _lay_out():
    """Compiled-in function: a plane's pixels of up to 32 channels, laid out on zeros at `line`."""
    data, clear = pointer("bf16"), zero_fill("f32")
    rows, halves = (convert_rows("bf16", "bf16", _LANES, step) for step in (1, 2))

    @njit(**DEVICE)
    def by_channels(to, at, pixel_bytes, width, channels):
        for w in range(0, width, _LANES):
            start = at + w * pixel_bytes
            _ask_ahead(start, pixel_bytes)
            rows(to + 2 * _LANES * w, 2 * _LANES, start, pixel_bytes, min(_LANES, width - w), _LANES, 0, channels)

    @njit(**DEVICE)
    def lay_out(f, x, plane, channels, line, first_slice, slices, first_row, rows_of_strip):
        if f.follows and f.x_c == 1:
            pixels = (slices - 1) * f.block_pixels + rows_of_strip * f.pitch
            clear(line + 2 * _LANES * pixels, (f.line_bytes // 2 - pixels) * _LANES // 2)
        elif f.follows and channels == _LANES:
            pixels = (slices - 1) * f.block_pixels + rows_of_strip * f.pitch
            for c in range(_LANES):
                end = 2 * pixels // 64 * 64
                clear(line + c * f.line_bytes + end, (f.line_bytes - end) // 4)
        else:
            clear(line, _LANES * f.line_bytes // 4)
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
                by_channels(line + 2 * _LANES * place, at, pixel_bytes, height * width, channels)
            elif f.x_c == 1:
                for h in range(height):
                    to = line + 2 * _LANES * (place + h * f.pitch)
                    by_channels(to, at + h * row_bytes, pixel_bytes, width, channels)
            else:
                for c in range(channels):
                    to, channel = line + c * f.line_bytes + 2 * place, at + 2 * c * f.x_c
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
def lower_task():
    """Two tiles of channels of a plane of x, or of dy: index = split * (those of x + those of dy) + number."""
    i64, args_at, params_at, step_at = pointer("i64"), struct(ARGS), struct(PARAMS), struct(STEP)
    extents, lay_out, clear = strip_extents(), _lay_out(), zero_fill("f32")
    turn_words, turn_out = transpose("f32", "f32", TILE), turn_pairs(TILE)
    move_rows = convert_rows("bf16", "bf16", _LANES, 1)

    @njit(**DEVICE)
    def pair(f, to, line, pairs, odd, tiles):
        if f.x_c != 1:
            for tile in range(tiles):
                of_tile = line + TILE * tile * f.line_bytes
                turn_words(to + tile * f.c_tile_bytes, 4 * TILE, of_tile + 2 * odd, f.line_bytes, TILE, pairs)
            return
        for q in range(pairs):
            pixel = line + 2 * _LANES * (2 * q + odd)
            for tile in range(tiles):
                at, word = pixel + 2 * TILE * tile, to + tile * f.c_tile_bytes + 4 * TILE * q
                zip_rows(word, at, at + 2 * _LANES, True, True, TILE)

    @njit(**DEVICE)
    def lower_rows(f, to, tiles, dy, filters, first_slice, slices, first_row, rows, steps):
        whole = f.follows and filters == tiles * TILE
        for k in range(tiles * TILE):
            first = (steps - 1) * 2 * _LANES if whole else 0
            clear(to + k * f.a_pitch + first, (steps * 2 * _LANES - first) // 4)
        for number in range(slices):
            n, d = (first_slice + number) // f.count_d, (first_slice + number) % f.count_d
            at = dy + 2 * (n * f.y_n + d * f.y_d + first_row * f.y_h)
            place = to + 2 * number * f.block_pixels
            height, width = rows, f.count_w
            if width == f.pitch:
                height, width = 1, rows * width
            if f.y_k == 1:
                for h in range(height):
                    for w in range(0, width, _LANES):
                        start = at + 2 * (h * f.y_h + w * f.y_w)
                        _ask_ahead(start, 2 * f.y_w)
                        pixels = min(_LANES, width - w)
                        turn_out(place + 2 * (h * f.pitch + w), f.a_pitch, start, 2 * f.y_w, pixels, filters)
            else:
                for k in range(filters):
                    start = at + 2 * k * f.y_k
                    move_rows(place + k * f.a_pitch, 2 * f.pitch, start, 2 * f.y_h, height, width, 0, width)

    def lower(args, ctx, index, worker):
        a, f = args_at(args), params_at(step_at(ctx).params)
        c_pairs, k_pairs = (f.c_tiles + 1) // 2, (f.k_tiles + 1) // 2
        of_x = f.planes * f.groups * c_pairs
        of_both = of_x + f.groups * k_pairs
        split, number = index // of_both, index % of_both
        first_slice, slices, first_row, rows = extents(ctx, split)
        if slices <= 0:
            return
        strip, steps = a.workspace + split * f.strip_bytes, tile_steps(f, slices, rows)
        if number >= of_x:
            g, first = (number - of_x) // k_pairs, (number - of_x) % k_pairs * _LANES
            filters, dy = max(0, min(_LANES, f.k_group - first)), a.p1 + 2 * (g * f.k_group + first) * f.y_k
            to = strip + f.a_offset + (g * f.k_tiles * TILE + first) * f.a_pitch
            tiles = min(2, f.k_tiles - first // TILE)
            lower_rows(f, to, tiles, dy, filters, first_slice, slices, first_row, rows, steps)
            return
        plane = i64(f.plane_table + number // (f.groups * c_pairs) * 40)
        g, first = number % (f.groups * c_pairs) // c_pairs, number % c_pairs * _LANES
        channels, x = min(_LANES, f.c_group - first), a.p0 + 2 * (g * f.c_group + first) * f.x_c
        line, pairs = a.workspace + f.worker_offset + worker * f.worker_bytes, f.reach // 2 + TILE * steps
        lay_out(f, x, plane, channels, line, first_slice, slices, first_row, rows)
        to = strip + (g * f.c_tiles + first // TILE) * f.c_tile_bytes
        for odd in range(2):
            if plane[3 + odd] >= 0:
                pair(f, to + plane[3 + odd], line, pairs, odd, (channels + TILE - 1) // TILE)

    return compile_task(lower, (), fastmath=FASTMATH)
