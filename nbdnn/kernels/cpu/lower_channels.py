"""Lowering for kernels with channels in the lanes: a strip of rows, widened and zero-padded, channels innermost.

For one image, group and output depth, and a strip of output rows,

    low[t, row, column, c] = in[c, depth*step + offset(t), first_row*u + low_h + row, low_w + column]

with zeros beyond the borders. The input may have any layout.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.geometry import GATHER_FIELDS
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.rows import convert_row, transpose, zero_fill
from nbdnn.kernels.cpu.strips import strip_address
from nbdnn.kernels.cpu.vector import WIDEN, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

# What lowering needs; kernels that read a lowered strip append their own fields.
LOW_FIELDS = (
    *GATHER_FIELDS,
    *("strips", "strip_rows", "shared", "low_h", "low_w", "low_rows", "low_columns", "depth_offsets"),
    *("strip_offset", "strip_bytes"),
)
_LOW = record(*LOW_FIELDS)


@cache
def lower_rows(dtype: str, vl: int):
    """Compiled-in function: low[t, row, column, c] of a strip, widened, zero beyond the borders."""
    compute = DEFAULT_COMPUTE[dtype]
    data, scratch, i64, params_at = pointer(dtype), pointer(compute), pointer("i64"), struct(_LOW)
    widen, widen_row, turn = WIDEN[dtype], convert_row(dtype, compute, vl), transpose(dtype, compute, vl)
    itemsize, acc_bytes, fill = ITEMSIZE[dtype], ITEMSIZE[compute], zero_fill(compute)

    @njit(**DEVICE)
    def lower(image, low_address, ctx, depth, first_row, rows):
        f, x, low = params_at(ctx), data(image), scratch(low_address)
        channels, columns = f.c_in, f.low_columns
        start, end = min(max(0, -f.low_w), columns), min(columns, max(0, f.extent_w - f.low_w))
        used_rows = min(f.low_rows, f.low_rows - (f.strip_rows - rows) * f.in_step_h)
        for t in range(f.taps_d):
            d = depth * f.in_step_d + i64(f.depth_offsets)[t]
            for row in range(used_rows):
                h = first_row * f.in_step_h + f.low_h + row
                line = (t * f.low_rows + row) * columns * channels
                if d < 0 or d >= f.extent_d or h < 0 or h >= f.extent_h:
                    fill(low_address + line * acc_bytes, columns * channels)
                    continue
                source = d * f.in_d + h * f.in_h + (f.low_w + start) * f.in_w
                fill(low_address + line * acc_bytes, start * channels)
                fill(low_address + (line + end * channels) * acc_bytes, (columns - end) * channels)
                line += start * channels
                if f.in_c == 1 and f.in_w == channels:
                    widen_row(low_address + line * acc_bytes, image + source * itemsize, (end - start) * channels)
                elif f.in_w == 1:
                    to = low_address + line * acc_bytes
                    turn(to, channels * acc_bytes, image + source * itemsize, f.in_c * itemsize, channels, end - start)
                elif f.in_c == 1:
                    for w in range(end - start):
                        to, at = line + w * channels, source + w * f.in_w
                        widen_row(low_address + to * acc_bytes, image + at * itemsize, channels)
                else:
                    for w in range(end - start):
                        for c in range(channels):
                            low[line + w * channels + c] = widen(x[source + w * f.in_w + c * f.in_c])

    return lower


@cache
def lower_task(dtype: str, vl: int):
    """One strip, where strips are shared between workers."""
    i64, args_at, params_at, itemsize = pointer("i64"), struct(ARGS), struct(_LOW), ITEMSIZE[dtype]
    locate, lower = strip_address(_LOW), lower_rows(dtype, vl)

    def lower_strip(args, ctx, index, worker):
        f = params_at(ctx)
        n, g, depth, first_row, rows, low = locate(ctx, index, args_at(args).workspace, worker)
        lower(i64(args)[f.in_pointer] + (n * f.in_n + g * f.in_g) * itemsize, low, ctx, depth, first_row, rows)

    return compile_task(lower_strip, (dtype, vl), fastmath=FASTMATH)
