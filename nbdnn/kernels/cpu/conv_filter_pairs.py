"""Filter gradients by words of two bfloat16, whose products one instruction adds: of a pixel and of the next one.

    sums[m, k] += x[p + m] * dy[p, k] + x[p' + m] * dy[p', k]          p, p' = p + 1: two pixels of a row of dy

As `pad_plane` and `pack_pixels` of `conv_filter_parts.py`, but nothing is widened: the copy of x has at each pixel the
word of this one and of the one that the next pixel of dy meets, so that every tap finds its words; the last pair of an
odd row of dy has a zero.
"""

from __future__ import annotations

from functools import cache

from numba import int32, njit

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.conv_filter_parts import inside
from nbdnn.kernels.cpu.pack_pairs import VL, zip_rows
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import pointer


@cache
def pad_pairs():
    """Compiled-in function, as `pad_plane`: words of pixels step_w apart, zeros for those outside."""
    clear = zero_fill("f32")

    @njit(**DEVICE)
    def zip_pixels(f, to, at, first, end, has_low, has_high):
        """Pixels [first, end) of a row of the copy that begins at `to`, and of the image at `at`."""
        apart = 2 * f.step_w * f.x_w
        if f.pitch == f.run and end > first:
            low = at + 2 * first * f.x_w
            zip_rows(to + 4 * first * f.run, low, low + apart, has_low, has_high, (end - first) * f.run)
        elif end > first:
            for w in range(first, end):
                low = at + 2 * w * f.x_w
                zip_rows(to + 4 * w * f.pitch, low, low + apart, has_low, has_high, f.run)

    @njit(**DEVICE)
    def pad(f, to, image, d, low_h, low_w, height):
        line = f.padded_w * f.pitch
        if d < 0 or d >= f.extent_d:
            clear(to, height * line)
            return
        # Pixels [start, stop) lie inside, and the second ones of [start - step_w, stop - step_w).
        first, end, start, stop = inside(f, low_h, low_w, height)
        seconds, seconds_end = max(0, start - f.step_w), max(0, min(f.padded_w, f.extent_w - low_w - f.step_w))
        clear(to, first * line)
        clear(to + 4 * end * line, (height - end) * line)
        if low_w == 0 and f.padded_w == f.extent_w and f.pitch == f.run and f.x_h == line and f.count_w % 2 == 0:
            # Rows follow each other: no pair of dy meets the last word of one, whose second pixel is the next row's.
            at, last = image + 2 * (d * f.x_d + (first + low_h) * f.x_h), (end - first) * f.padded_w - f.step_w
            zip_pixels(f, to + 4 * first * line, at, 0, last, True, True)
            zip_pixels(f, to + 4 * first * line, at, max(0, last), last + f.step_w, True, False)
            return
        for h in range(first, end):
            row, at = to + 4 * h * line, image + 2 * (d * f.x_d + (h + low_h) * f.x_h + low_w * f.x_w)
            clear(row, start * f.pitch)
            clear(row + 4 * stop * f.pitch, (f.padded_w - stop) * f.pitch)
            zip_pixels(f, row, at, seconds, min(start, seconds_end), False, True)
            zip_pixels(f, row, at, start, min(stop, seconds_end), True, True)
            zip_pixels(f, row, at, max(start, seconds_end), stop, True, False)

    return pad


@cache
def pack_pixel_pairs(lanes: int):
    """Compiled-in function (f, to, at, used, rows, columns): `used` channels of rows of pixels of dy, one behind the
    other, strides y_k and y_w, to [row][pair][lanes]."""
    words, data, turn = pointer("i32"), pointer("bf16"), transpose("f32", "f32", VL)

    @njit(**DEVICE)
    def pack_row(f, to, at, used, columns):
        pairs = columns // 2
        if f.y_k == 1:
            for w in range(0, columns, 2):
                low = at + 2 * w * f.y_w
                zip_rows(to + 2 * w * lanes, low, low + 2 * f.y_w, True, w + 1 < columns, used)
            return
        for k in range(0, used, VL):
            turn(to + 4 * k, 4 * lanes, at + 2 * k * f.y_k, 2 * f.y_k, min(VL, used - k), pairs)
        if columns % 2:
            for k in range(used):
                words(to + 4 * pairs * lanes)[k] = int32(data(at + 2 * (k * f.y_k + (columns - 1) * f.y_w))[0])

    @njit(**DEVICE)
    def pack(f, to, at, used, rows, columns):
        if columns % 2 == 0:
            pack_row(f, to, at, used, rows * columns)
            return
        for row in range(rows):
            start = at + 2 * row * columns * f.y_w
            pack_row(f, to + 4 * row * (columns + 1) // 2 * lanes, start, used, columns)

    return pack
