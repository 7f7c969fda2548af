"""Lowering for kernels with channels in the lanes: a strip of rows, widened and zero-padded, channels innermost.

For one image, group and output depth, and a strip of output rows,

    low[t, row, column, c] = in[c, depth*step + offset(t), first_row*u + low_h + row, low_w + column]

with zeros beyond the borders. The input may have any layout. Of pairs the channels are not widened, and
one of zeros makes an odd number even.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.rows import convert_row, zero_fill
from nbdnn.kernels.cpu.strips import strip_address
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import WIDEN, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

# What lowering needs; kernels that read a lowered strip append their own fields.
LOW_FIELDS = (
    *GATHER_FIELDS,
    *("strips", "strip_rows", "shared", "low_h", "low_w", "low_rows", "low_columns", "depth_offsets"),
    *("strip_offset", "strip_bytes"),
)
LOWERING = record(*LOW_FIELDS)


@cache
def lower_rows(dtype: str, vl: int, pairs: bool = False):
    """Compiled-in function: low[t, row, column, c] of a strip, widened, zero beyond the borders."""
    target = dtype if pairs else DEFAULT_COMPUTE[dtype]
    data, scratch, i64, params_at = pointer(dtype), pointer(target), pointer("i64"), struct(LOWERING)
    widen_row, turn = convert_row(dtype, target, vl), transpose(dtype, target, vl)
    itemsize, low_bytes, fill_words = ITEMSIZE[dtype], ITEMSIZE[target], zero_fill("f32")

    @njit(**DEVICE)
    def kept(bits):
        return bits

    widen = kept if pairs else WIDEN[dtype]

    @njit(**DEVICE)
    def lower(image, low_address, ctx, depth, first_row, rows):
        f, x = params_at(ctx), data(image)
        channels, top, lines = f.c_in, first_row * f.in_step_h + f.low_h, f.low_rows
        lines -= (f.strip_rows - rows) * f.in_step_h
        columns, left, extent, step = f.low_columns, f.low_w, f.extent_w, f.in_w
        is_column = columns == 1 and 0 <= left < extent
        if is_column:  # whose rows are the pixels of one line
            lines, columns, left, extent, step = 1, lines, top, f.extent_h, f.in_h
        pitch = (channels + 1) // 2 * 2 if pairs else channels  # words are whole
        start, end = min(max(0, -left), columns), min(columns, max(0, extent - left))
        for t in range(f.taps_d):
            d = depth * f.in_step_d + i64(f.depth_offsets)[t]
            for row in range(lines):
                line = low_address + (t * f.low_rows + row) * f.low_columns * pitch * low_bytes
                is_outside = d < 0 or d >= f.extent_d
                source = d * f.in_d + (left + start) * step
                if is_column:
                    source += f.low_w * f.in_w
                else:
                    h = top + row
                    is_outside |= h < 0 or h >= f.extent_h
                    source += h * f.in_h
                if is_outside or pitch > channels:
                    fill_words(line, columns * pitch * low_bytes // 4)
                if is_outside:
                    continue
                fill_words(line, start * pitch * low_bytes // 4)
                fill_words(line + end * pitch * low_bytes, (columns - end) * pitch * low_bytes // 4)
                line += start * pitch * low_bytes
                if f.in_c == 1 and step == channels == pitch:
                    widen_row(line, image + source * itemsize, (end - start) * channels)
                elif step == 1:
                    at = image + source * itemsize
                    turn(line, pitch * low_bytes, at, f.in_c * itemsize, channels, end - start)
                elif f.in_c == 1:
                    for w in range(end - start):
                        widen_row(line + w * pitch * low_bytes, image + (source + w * step) * itemsize, channels)
                else:
                    low = scratch(line)
                    for w in range(end - start):
                        for c in range(channels):
                            low[w * pitch + c] = widen(x[source + w * step + c * f.in_c])

    return lower


@cache
def lower_task(dtype: str, vl: int, pairs: bool = False):
    """One strip, where strips are shared between workers."""
    i64, args_at, params_at, itemsize = pointer("i64"), struct(ARGS), struct(LOWERING), ITEMSIZE[dtype]
    locate, lower = strip_address(LOWERING), lower_rows(dtype, vl, pairs)

    def lower_strip(args, ctx, index, worker):
        f = params_at(ctx)
        n, g, depth, first_row, rows, low = locate(ctx, index, args_at(args).workspace, worker)
        lower(i64(args)[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize, low, ctx, depth, first_row, rows)

    return compile_task(lower_strip, (dtype, vl, pairs), fastmath=FASTMATH)
