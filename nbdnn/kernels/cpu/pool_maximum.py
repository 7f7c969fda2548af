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
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.vector import (
    I32,
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


def _slot(builder, start, i, type_, size_bytes: int):
    return vector_at(builder, builder.add(start, builder.mul(i, I64(size_bytes))), type_)


def _by_vectors(builder, n, vl: int, step) -> None:
    """step(i, mask) for every vl elements, the last of them under a mask; no other is: what a masked store wrote is not
    forwarded to the load of the next tap."""
    whole = builder.and_(n, I64(-vl))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(vl), I64) as (i, _):
        step(i, None)
    with builder.if_then(builder.icmp_signed("<", whole, n)):
        step(whole, lanes_between(builder, vl, 0, None, builder.sub(n, whole)))


def _load(builder, slot, type_, size_bytes: int, mask):
    if mask is None:
        return builder.load(slot, align=size_bytes)
    return masked(builder, type_)(slot, size_bytes, mask)


def _store(builder, value, slot, size_bytes: int, mask) -> None:
    if mask is None:
        builder.store(value, slot, align=size_bytes)
    else:
        masked(builder, value.type)(value, slot, size_bytes, mask)


@cache
def give_row(source: str, compute: str, vl: int):
    """Intrinsic (to, x, maxima, left, n): n elements of x, of `source` dtype; the others are of the compute type.

    Where x equals its maximum, what is left goes there and nothing stays.
    """
    read, wide, read_bytes, wide_bytes = row_types(source, compute, vl)

    def codegen(context, builder, sig, args):
        to, x, maxima, left, n = args
        zero = ir.Constant(wide, None)

        def step(i, mask):
            value = _load(builder, _slot(builder, x, i, read, read_bytes), read, read_bytes, mask)
            slots = [_slot(builder, start, i, wide, wide_bytes) for start in (to, maxima, left)]
            before, most, share = (_load(builder, slot, wide, wide_bytes, mask) for slot in slots)
            hit = builder.fcmp_ordered("==", convert(builder, value, source, compute, vl), most)
            total = builder.fadd(before, builder.select(hit, share, zero))
            _store(builder, total, slots[0], wide_bytes, mask)
            _store(builder, builder.select(hit, zero, share), slots[2], wide_bytes, mask)

        _by_vectors(builder, n, vl, step)
        return context.get_dummy_value()

    @intrinsic
    def give(typingctx, to, x, maxima, left, n):
        return signature(types.none, *[types.int64] * 5), codegen

    return give


@cache
def interleave_row(compute: str, target: str, vl: int):
    """Intrinsic (to, a, b, n): n elements of `target` dtype, by turns of the lines a and b of the compute type."""
    read, write, read_bytes, write_bytes = row_types(compute, target, vl)
    orders = ([lane // 2 + lane % 2 * vl + half for lane in range(vl)] for half in (0, vl // 2))
    halves = [ir.Constant(ir.VectorType(I32, vl), order) for order in orders]

    def codegen(context, builder, sig, args):
        to, *lines, n = args
        with cgutils.for_range_slice(builder, I64(0), n, I64(2 * vl), I64) as (i, _):
            left = builder.sub(n, i)
            pairs = lanes_between(builder, vl, 0, None, builder.ashr(builder.add(left, I64(1)), I64(1)))
            at = builder.ashr(i, I64(1))
            a, b = (
                _load(builder, _slot(builder, line, at, read, read_bytes), read, read_bytes, pairs) for line in lines
            )
            for half, order in enumerate(halves):
                value = convert(builder, builder.shuffle_vector(a, b, order), compute, target, vl)
                slot = _slot(builder, to, builder.add(i, I64(half * vl)), write, write_bytes)
                _store(builder, value, slot, write_bytes, lanes_between(builder, vl, half * vl, None, left))
        return context.get_dummy_value()

    @intrinsic
    def interleave(typingctx, to, a, b, n):
        return signature(types.none, *[types.int64] * 4), codegen

    return interleave


@cache
def deinterleave_row(source: str, compute: str, vl: int):
    """Intrinsic (a, b, start, n): n elements of `source` dtype, by turns to the lines a and b of the compute type."""
    read, write, read_bytes, write_bytes = row_types(source, compute, vl)
    parities = [ir.Constant(ir.VectorType(I32, vl), list(range(parity, 2 * vl, 2))) for parity in (0, 1)]

    def codegen(context, builder, sig, args):
        *lines, start, n = args

        def step(i, mask):
            parts = []
            for half in (0, 1):
                at = builder.add(i, I64(half * vl))
                inside = None if mask is None else lanes_between(builder, vl, 0, None, builder.sub(n, at))
                part = _load(builder, _slot(builder, start, at, read, read_bytes), read, read_bytes, inside)
                parts.append(convert(builder, part, source, compute, vl))
            left, at = builder.sub(n, i), builder.ashr(i, I64(1))
            for parity, (line, order) in enumerate(zip(lines, parities, strict=True)):
                there = builder.ashr(builder.add(left, I64(1 - parity)), I64(1))
                inside = None if mask is None else lanes_between(builder, vl, 0, None, there)
                value = builder.shuffle_vector(*parts, order)
                _store(builder, value, _slot(builder, line, at, write, write_bytes), write_bytes, inside)

        _by_vectors(builder, n, 2 * vl, step)
        return context.get_dummy_value()

    @intrinsic
    def deinterleave(typingctx, a, b, start, n):
        return signature(types.none, *[types.int64] * 4), codegen

    return deinterleave


@cache
def _phases(dtype: str, vl: int):
    """Compiled-in function (phases, start, pitch, step, first, n): a row of x to its phases, of whose elements, in
    turn, it begins at number `first`."""
    compute = DEFAULT_COMPUTE[dtype]
    data, wide, widen, real_bytes = pointer(dtype), pointer(compute), WIDEN[dtype], ITEMSIZE[compute]
    deinterleave, widen_row = deinterleave_row(dtype, compute, vl), convert_row(dtype, compute, vl)

    @njit(**DEVICE)
    def take_apart(phases, start, pitch, step, first, n):
        if step == 1:
            widen_row(phases + first * real_bytes, start, n)
        elif step == 2:
            a = phases + first % 2 * pitch + first // 2 * real_bytes
            b = phases + (first + 1) % 2 * pitch + (first + 1) // 2 * real_bytes
            deinterleave(a, b, start, n)
        else:
            for i in range(n):
                wide(phases + (first + i) % step * pitch)[(first + i) // step] = widen(data(start)[i])

    return take_apart


@cache
def _whole_row(dtype: str, vl: int):
    """Compiled-in function (to, phases, pitch, step, first, n, line): a row of dx of its phases, which begin at number
    `first` of their elements taken in turn."""
    compute = DEFAULT_COMPUTE[dtype]
    wide, real_bytes = pointer(compute), ITEMSIZE[compute]
    interleave, narrow_row = interleave_row(compute, dtype, vl), convert_row(compute, dtype, vl)

    @njit(**DEVICE)
    def put_together(to, phases, pitch, step, first, n, line):
        if step == 1:
            narrow_row(to, phases + first * real_bytes, n)
        elif step == 2:
            a = phases + first % 2 * pitch + first // 2 * real_bytes
            b = phases + (first + 1) % 2 * pitch + (first + 1) // 2 * real_bytes
            interleave(to, a, b, n)
        else:
            for i in range(n):
                wide(line)[i] = wide(phases + (first + i) % step * pitch)[(first + i) // step]
            narrow_row(to, line, n)

    return put_together


@cache
def _has_nan(compute: str):
    """Compiled-in function (line, n): whether there is a NaN or an infinity."""
    wide, zero = pointer(compute), real_of(compute)[0](0.0)

    @njit(**DEVICE, fastmath={"reassoc"})
    def has_nan(line, n):
        values, found = wide(line), zero
        for i in range(n):
            found += values[i] - values[i]
        return found != found

    return has_nan


@cache
def max_gradient_task(dtype: str, vl: int):
    """A block of rows of dx of one plane: index = (plane * blocks_d + block of depths) * blocks_h + block of rows."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, data, wide, (real, _) = pointer("i64"), struct(FIELDS), pointer(dtype), pointer(compute), real_of(dtype)
    itemsize, real_bytes, widen = ITEMSIZE[dtype], ITEMSIZE[compute], WIDEN[dtype]
    has_nan, put_together = _has_nan(compute), _whole_row(dtype, vl)
    give, give_line = give_row(dtype, compute, vl), give_row(compute, compute, vl)
    widen_row, narrow_row = convert_row(dtype, compute, vl), convert_row(compute, dtype, vl)
    take_apart, clear = _phases(dtype, vl), fill(dtype)

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
            take_apart(lines, source, f.phase_bytes, f.step_w, f.pad_w, f.in_w)
        if f.inner > 1 and f.step_w > 1:
            for q in range(f.out_w):
                column, skip = q * f.step_w - f.pad_w, q * f.inner * real_bytes
                for w in range(max(0, column), min(f.in_w, column + f.taps_w)):
                    there = w * f.inner
                    give(
                        target + there * real_bytes, source + there * itemsize, maxima + skip, left + skip, f.inner
                    )  # fmt: skip
            return
        for s in range(f.taps_w):
            first = max(0, (f.pad_w - s + f.step_w - 1) // f.step_w)
            end = min(f.out_w, (f.in_w - 1 + f.pad_w - s) // f.step_w + 1)
            skip, n = first * f.inner * real_bytes, (end - first) * f.inner
            if f.inner == 1:
                there = s % f.step_w * f.phase_bytes + (first + s // f.step_w) * real_bytes
                give_line(target + there, lines + there, maxima + skip, left + skip, n)
            else:
                there = (first + s - f.pad_w) * f.inner
                give(target + there * real_bytes, source + there * itemsize, maxima + skip, left + skip, n)

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
                target = pointers[3] + ((plane * f.in_d + block_d + depth) * f.in_h + block_h + h) * width * itemsize
                if f.inner == 1:
                    put_together(target, row, f.phase_bytes, f.step_w, f.pad_w, f.in_w, lines)
                else:
                    narrow_row(target, row, width)

    return compile_task(find_maxima, (dtype, vl))
