"""The gradient of a maximum, in a block of rows that stays in cache.

    dx[i] = sum of dy[p] over the windows p whose first maximum is at i

y says what the maximum is, so a tap that equals it is the first one of its window if none before was: then it gets what
is left of dy, and nothing is left for the others. A line of windows does so tap by tap, vector by vector. Planar lines
are taken apart into `step` phases, in which the windows' taps are neighbours, and dx is put together again at the end.
Windows with a NaN, whose last NaN it is, are searched one by one; so is the only window of a line.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.pool_rows import FIELDS, fill, real_of
from nbdnn.kernels.cpu.rows import convert_row, every_step
from nbdnn.kernels.cpu.vector import (
    I64,
    WIDEN,
    convert,
    lanes_between,
    masked,
    pointer,
    row_types,
    struct,
    vector_at,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE


@cache
def give_row(source: str, compute: str, vl: int):
    """Intrinsic (to, x, maxima, left, n): n elements of x, of `source` dtype; the others are of the compute type.

    Where x equals its maximum, what is left goes there and nothing stays; whole vectors, then a masked one.
    """
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)

    def codegen(context, builder, sig, args):
        *starts, n = args
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), n, I64(vl), I64) as (i, _):
            mask = lanes_between(builder, vl, 0, None, builder.sub(n, i))

            def slot(number):
                size_bytes, type_ = (read_bytes, read) if number == 1 else (wide_bytes, wide)
                return vector_at(builder, builder.add(starts[number], builder.mul(i, I64(size_bytes))), type_)

            def loaded(number):
                size_bytes, type_ = (read_bytes, read) if number == 1 else (wide_bytes, wide)
                return masked(builder, type_)(slot(number), size_bytes, mask)

            value, zero = convert(builder, loaded(1), source, compute, vl), ir.Constant(wide, None)
            before, most, left = (loaded(number) for number in (0, 2, 3))
            hit = builder.fcmp_ordered("==", value, most)
            total = builder.fadd(before, builder.select(hit, left, zero))
            masked(builder, wide)(total, slot(0), wide_bytes, mask)
            masked(builder, wide)(builder.select(hit, zero, left), slot(3), wide_bytes, mask)
        return context.get_dummy_value()

    @intrinsic
    def give(typingctx, to, x, maxima, left, n):
        return signature(types.none, *[types.int64] * 5), codegen

    return give


@cache
def _loops(dtype: str):
    """Compiled-in functions over a line of the compute type: (whether there is a NaN, phases put together)."""
    wide = pointer(DEFAULT_COMPUTE[dtype])

    @njit(**DEVICE)
    def has_nan(line, n):
        values, found = wide(line), 0
        for i in range(n):
            found += values[i] != values[i]
        return found > 0

    @njit(**DEVICE)
    def interleave(to, phases, pitch, step, first, n):
        """Element i is number first + i of the phases' elements, taken in turn."""
        if step == 2:
            even, odd = wide(phases), wide(phases + pitch)
            start = first // 2
            line = wide(to)
            if first % 2 == 0:
                for i in range(n // 2):
                    line[2 * i], line[2 * i + 1] = even[start + i], odd[start + i]
                if n % 2:
                    line[n - 1] = even[start + n // 2]
            else:
                for i in range(n // 2):
                    line[2 * i], line[2 * i + 1] = odd[start + i], even[start + i + 1]
                if n % 2:
                    line[n - 1] = odd[start + n // 2]
        else:
            for i in range(n):
                wide(to)[i] = wide(phases + (first + i) % step * pitch)[(first + i) // step]

    return has_nan, interleave


@cache
def max_gradient_task(dtype: str, vl: int):
    """A block of rows of dx of one plane: index = (plane * blocks_d + block of depths) * blocks_h + block of rows."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, data, wide, (real, _) = pointer("i64"), struct(FIELDS), pointer(dtype), pointer(compute), real_of(dtype)
    itemsize, real_bytes, widen = ITEMSIZE[dtype], ITEMSIZE[compute], WIDEN[dtype]
    has_nan, interleave = _loops(dtype)
    give, give_line = give_row(dtype, compute, vl), give_row(compute, compute, vl)
    widen_row, narrow_row = convert_row(dtype, compute, vl), convert_row(compute, dtype, vl)
    pick, clear = every_step(dtype, compute, vl), fill(dtype)

    @njit(**DEVICE)
    def column_of(f, w, j):
        """Where in a row of the block an element is, in bytes."""
        if f.inner > 1:
            return (w * f.inner + j) * real_bytes
        return (w + f.pad_w) % f.step_w * f.phase_bytes + (w + f.pad_w) // f.step_w * real_bytes

    @njit(**DEVICE)
    def search(f, image, maxima, left, d, p, block, block_d, block_h, end_d, end_h):
        """The windows of a line one by one."""
        width = f.in_w * f.inner * itemsize
        for q in range(f.out_w):
            for j in range(f.inner):
                most, found_d, found_h, found_w = wide(maxima)[q * f.inner + j], -1, -1, -1
                for depth in range(max(0, d * f.step_d - f.pad_d), min(f.in_d, d * f.step_d - f.pad_d + f.taps_d)):
                    for h in range(max(0, p * f.step_h - f.pad_h), min(f.in_h, p * f.step_h - f.pad_h + f.taps_h)):
                        x = data(image + (depth * f.in_h + h) * width)
                        first = q * f.step_w - f.pad_w
                        for w in range(max(0, first), min(f.in_w, first + f.taps_w)):
                            value = widen(x[w * f.inner + j])
                            if value != value or (value == most and found_w < 0):
                                found_d, found_h, found_w = depth, h, w
                                if value == most:
                                    break
                if block_d <= found_d < end_d and block_h <= found_h < end_h:
                    row = (found_d - block_d) * (end_h - block_h) + found_h - block_h
                    wide(block + row * f.row_bytes + column_of(f, found_w, j))[0] += wide(left)[q * f.inner + j]

    @njit(**DEVICE)
    def give_taps(f, source, target, maxima, left, lines):
        """The taps of a line of windows in one row of the image."""
        if f.inner == 1:
            for phase in range(f.step_w):
                first = max(0, (f.pad_w - phase + f.step_w - 1) // f.step_w)
                end = (f.in_w - 1 + f.pad_w - phase) // f.step_w + 1
                start = source + (phase - f.pad_w) * itemsize
                pick(lines + phase * f.phase_bytes, start, 0, f.step_w, 1, end, first, end)
        for s in range(f.taps_w):
            first = max(0, (f.pad_w - s + f.step_w - 1) // f.step_w)
            end = min(f.out_w, (f.in_w - 1 + f.pad_w - s) // f.step_w + 1)
            if f.inner == 1:
                there = s % f.step_w * f.phase_bytes + (first + s // f.step_w) * real_bytes
                skip = first * real_bytes
                give_line(target + there, lines + there, maxima + skip, left + skip, end - first)
            elif f.step_w == 1:
                there, skip = (first + s - f.pad_w) * f.inner, first * f.inner * real_bytes
                give(
                    target + there * real_bytes, source + there * itemsize, maxima + skip, left + skip,
                    (end - first) * f.inner,
                )  # fmt: skip
            else:
                for q in range(first, end):
                    there, skip = (q * f.step_w + s - f.pad_w) * f.inner, q * f.inner * real_bytes
                    give(
                        target + there * real_bytes, source + there * itemsize, maxima + skip, left + skip, f.inner
                    )  # fmt: skip

    def find_maxima(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        maxima = f.scratch + worker * f.scratch_bytes
        left, lines, aside = maxima + f.found_bytes, maxima + 2 * f.found_bytes, maxima + f.aside_offset
        block = aside + f.row_bytes
        block_h, rest = index % f.blocks_h * f.block_h, index // f.blocks_h
        block_d, plane = rest % f.blocks_d * f.block_d, rest // f.blocks_d
        end_d, end_h = min(block_d + f.block_d, f.in_d), min(block_h + f.block_h, f.in_h)
        width, out_width, rows = f.in_w * f.inner, f.out_w * f.inner, end_h - block_h
        image = pointers[0] + plane * f.in_d * f.in_h * width * itemsize
        clear(block, (end_d - block_d) * rows * (f.row_bytes // real_bytes), real(0.0))
        first_d = max(0, (block_d + f.pad_d - f.taps_d) // f.step_d + 1)
        first_p = max(0, (block_h + f.pad_h - f.taps_h) // f.step_h + 1)
        for d in range(first_d, min(f.out_d, (end_d - 1 + f.pad_d) // f.step_d + 1)):
            for p in range(first_p, min(f.out_h, (end_h - 1 + f.pad_h) // f.step_h + 1)):
                start = ((plane * f.out_d + d) * f.out_h + p) * out_width * itemsize
                widen_row(maxima, pointers[1] + start, out_width)
                widen_row(left, pointers[2] + start, out_width)
                if out_width == 1 or has_nan(maxima, out_width):
                    search(f, image, maxima, left, d, p, block, block_d, block_h, end_d, end_h)
                    continue
                for depth in range(max(0, d * f.step_d - f.pad_d), min(f.in_d, d * f.step_d - f.pad_d + f.taps_d)):
                    for h in range(max(0, p * f.step_h - f.pad_h), min(f.in_h, p * f.step_h - f.pad_h + f.taps_h)):
                        inside = block_d <= depth < end_d and block_h <= h < end_h
                        row = (depth - block_d) * rows + h - block_h
                        target = block + row * f.row_bytes if inside else aside
                        source = image + (depth * f.in_h + h) * width * itemsize
                        give_taps(f, source, target, maxima, left, lines)
        for depth in range(end_d - block_d):
            for h in range(rows):
                row = block + (depth * rows + h) * f.row_bytes
                if f.inner == 1 and f.step_w == 1:
                    row += f.pad_w * real_bytes
                elif f.inner == 1:
                    interleave(lines, row, f.phase_bytes, f.step_w, f.pad_w, f.in_w)
                    row = lines
                target = pointers[3] + ((plane * f.in_d + block_d + depth) * f.in_h + block_h + h) * width * itemsize
                narrow_row(target, row, width)

    return compile_task(find_maxima, (dtype, vl))
