"""Lowering for matrix units: a strip of rows as parts of bfloat16, channels innermost, zero-padded.

    low[part, t, row phase, column phase, row, column, c] =
        part of in[c, depth*step + offset(t), (first_row + row)*u + low_h + row phase, column*u + low_w + column phase]

with zeros beyond the borders and behind the last channel. The input may have any layout.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from nbdnn.kernels.cpu.amx import PARTS, split_row, uncut, widen
from nbdnn.kernels.cpu.amx_plan import PARAMS
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.strips import strip_address
from nbdnn.kernels.cpu.turns import transpose, turn_pairs
from nbdnn.kernels.cpu.vector import pointer, struct
from nbdnn.problem import ITEMSIZE


@cache
def lower_strip(dtype: str, vl: int):
    """Compiled-in function: the lowered strip; line is the worker's memory for a row of pixels."""
    parts, itemsize = PARTS[dtype], ITEMSIZE[dtype]
    waits, widened = uncut(dtype), widen(dtype)
    data, waiting, i64, params_at = pointer(dtype), pointer(waits), pointer("i64"), struct(PARAMS)
    split, split_line = split_row(dtype, parts), split_row(waits, parts)
    turn = turn_pairs(vl) if parts == 1 else transpose(dtype, waits, vl)
    fill, wait_bytes = zero_fill("f32"), ITEMSIZE[waits]

    @njit(**DEVICE)
    def copy(to, image, source, line, f, step, count):
        """So many pixels, `step` elements apart. Behind their channels `to` and the line must be 0 already."""
        pixel_bytes, wait_pitch = 2 * f.pixel_channels, f.pixel_channels * wait_bytes
        if f.in_c == 1 and step == f.pixel_channels and f.c_in == step:
            split(to, f.part_bytes, image + source * itemsize, count * step)
        elif f.in_c == 1:
            for w in range(count):
                split(to + w * pixel_bytes, f.part_bytes, image + (source + w * step) * itemsize, f.c_in)
        elif step == 1 and parts == 1:
            turn(to, wait_pitch, image + source * itemsize, f.in_c * itemsize, f.c_in, count)
        elif step == 1:
            turn(line, wait_pitch, image + source * itemsize, f.in_c * itemsize, f.c_in, count)
            split_line(to, f.part_bytes, line, count * f.pixel_channels)
        else:
            x, pixel = data(image), waiting(line)
            for w in range(count):
                for c in range(f.c_in):
                    pixel[c] = widened(x[source + w * step + c * f.in_c])
                split_line(to + w * pixel_bytes, f.part_bytes, line, f.pixel_channels)

    @njit(**DEVICE)
    def lower(image, low, ctx, depth, first_row, rows, line):
        f = params_at(ctx)
        pixel_bytes, pitch, step = 2 * f.pixel_channels, f.pitch_pixels, f.in_step_w * f.in_w
        turns_rows = f.in_w == 1 and f.in_c != 1 and step > 1  # once for all phases of its columns
        if f.in_c != 1:
            fill(line, max(pitch, f.extent_w) * f.pixel_channels * wait_bytes // 4)
        for number in range(f.taps_d * f.row_phase_count):
            t, row_phase = number // f.row_phase_count, number % f.row_phase_count
            d = depth * f.in_step_d + i64(f.depth_offsets)[t]
            for row in range(rows + f.more_rows):
                h = (first_row + row) * f.in_step_h + f.low_h + i64(f.row_phases)[row_phase]
                outside = d < 0 or d >= f.extent_d or h < 0 or h >= f.extent_h
                source = d * f.in_d + h * f.in_h
                if turns_rows and not outside:
                    at = image + source * itemsize
                    turn(line, f.pixel_channels * wait_bytes, at, f.in_c * itemsize, f.c_in, f.extent_w)
                for column_phase in range(f.column_phase_count):
                    to = (
                        low + (number * f.column_phase_count + column_phase) * f.plane_bytes + row * pitch * pixel_bytes
                    )
                    left = f.low_w + i64(f.column_phases)[column_phase]
                    start = min(pitch, max(0, -(left // f.in_step_w)))
                    end = max(start, min(pitch, (f.extent_w - left + f.in_step_w - 1) // f.in_step_w))
                    if outside:
                        start, end = pitch, pitch
                    # All of it where nothing is copied, or a copy leaves channels out; else what is beside the image.
                    whole = outside or (f.pixel_channels > f.c_in and not turns_rows)
                    for part in range(parts):
                        fill(to + part * f.part_bytes, (pitch if whole else start) * pixel_bytes // 4)
                        fill(to + part * f.part_bytes + end * pixel_bytes, (pitch - end) * pixel_bytes // 4)
                    if turns_rows:
                        for w in range(start, end):
                            at = line + (left + w * f.in_step_w) * f.pixel_channels * wait_bytes
                            split_line(to + w * pixel_bytes, f.part_bytes, at, f.pixel_channels)
                    elif start < end:
                        first = source + (left + start * f.in_step_w) * f.in_w
                        copy(to + start * pixel_bytes, image, first, line, f, step, end - start)

    return lower


@cache
def lower_task(dtype: str, vl: int):
    """One strip, where strips are shared between workers."""
    i64, args_at, params_at, itemsize = pointer("i64"), struct(ARGS), struct(PARAMS), ITEMSIZE[dtype]
    locate, lower = strip_address(PARAMS), lower_strip(dtype, vl)

    def lower_shared(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        n, g, depth, first_row, rows, low = locate(ctx, index, a.workspace, worker)
        image = i64(args)[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize
        line = a.workspace + f.worker_offset + worker * f.worker_bytes + 2 * f.sums_bytes
        lower(image, low, ctx, depth, first_row, rows, line)

    return compile_task(lower_shared, (dtype, vl), fastmath=FASTMATH)
