"""The gradient of a maximum, given by its windows (`pool_scatter.py`), where neighbours are channels.

    of each window, a vector of channels: open = all
        of each tap r:  hit = (x[r] == y) & open;  dx[r] += dy where hit;  open &= ~hit

Windows go to the first axis that has several, in blocks of which only neighbours reach the same elements: the even
blocks first, then the odd ones, so that no two threads add to one element, and always in the same order. An even block
clears whatever it reaches, an odd one what no even one does; each line of it just before its first sum.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

from llvmlite import ir
from numba import int64, njit, types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.pool_lines import counted, moved, switched
from nbdnn.kernels.cpu.pool_rows import fill, real_of
from nbdnn.kernels.cpu.vector import I32, I64, element, filled, pointer, record, row_types, splat, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD = 4
_MOST_KNOWN = 27  # taps of a window that are met without a loop

# A task is a block of windows on the first axis, of one image and a group of channels.
_FIELDS = record(
    *("channels", "group", "groups", "block", "blocks"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


@cache
def _scatter_pixels(dtype: str, vl: int, known: tuple[int, int, int] | None):
    """Intrinsic (is_known, count, channels, pixel_bytes, x, x_apart, to_dx, y, to_dy, planes, lines, taps, plane_bytes,
    line_bytes): dy of `count` windows side by side to what they have chosen.

    x, y: of the first window, its first tap that is inside of the image, of `planes` x `lines` x `taps`, which are the
    `known` where is_known says so. dx and dy lie so far behind x and y.
    """
    read, _, itemsize, _ = row_types(dtype, dtype, vl)
    bits = ir.IntType(vl)

    def codegen(context, builder, sig, args):
        how, *args = args
        ways = (None, known) if known else (None,)
        switched(builder, how, [lambda some=some: scatter(builder, some, *args) for some in ways])
        return context.get_dummy_value()

    def scatter(builder, some, count, channels, pixel_bytes, x, x_apart, to_dx, y, to_dy, planes, lines, taps,
                plane_bytes, line_bytes):  # fmt: skip
        def vector(q, i, lanes) -> None:
            first, window = moved(builder, x, (q, x_apart)), moved(builder, y, (q, pixel_bytes))
            wanted = builder.load(element(builder, window, i, read, itemsize), align=itemsize)
            share = builder.load(element(builder, builder.add(window, to_dy), i, read, itemsize), align=itemsize)
            remaining = cgutils.alloca_once(builder, lanes.type)

            def walk(forward: bool, counts: tuple, hits) -> None:
                def tap_at(d, h, r):
                    tap = moved(builder, first, (d, plane_bytes), (h, line_bytes), (r, pixel_bytes))
                    value = builder.load(element(builder, tap, i, read, itemsize), align=itemsize)
                    slot = element(builder, builder.add(tap, to_dx), i, read, itemsize)
                    hit, total = builder.and_(hits(value), builder.load(remaining)), builder.load(slot, align=itemsize)
                    builder.store(builder.select(hit, builder.fadd(total, share), total), slot, align=itemsize)
                    builder.store(builder.and_(builder.load(remaining), builder.not_(hit)), remaining)

                counted(builder, counts, forward, tap_at)

            builder.store(lanes, remaining)
            walk(True, some or (planes, lines, taps), lambda value: builder.fcmp_ordered("==", value, wanted))
            are_nan = builder.fcmp_unordered("uno", wanted, wanted)
            with builder.if_then(builder.icmp_signed("!=", builder.bitcast(are_nan, bits), bits(0)), likely=False):
                builder.store(builder.and_(are_nan, lanes), remaining)
                walk(False, (planes, lines, taps), lambda value: builder.fcmp_unordered("uno", value, value))

        last, wide = builder.sub(channels, I64(vl)), ir.VectorType(I32, vl)
        numbers = ir.Constant(wide, list(range(vl)))
        with (
            cgutils.for_range(builder, count) as loop,
            cgutils.for_range_slice(builder, I64(0), channels, I64(vl), I64) as (i, _),
        ):
            at = builder.select(builder.icmp_signed("<", i, last), i, last)  # the last vector ends with the channels
            done = splat(builder, builder.trunc(builder.sub(i, at), I32), wide)
            vector(loop.index, at, builder.icmp_signed(">=", numbers, done))

    @intrinsic
    def run(typingctx, is_known, count, channels, pixel_bytes, x, x_apart, to_dx, y, to_dy, planes, lines, taps,
            plane_bytes, line_bytes):  # fmt: skip
        return signature(types.none, *[types.int64] * 14), codegen

    return run


@cache
def _task(dtype: str, vl: int, taps: tuple[int, int, int], parity: int):
    """The even or the odd blocks: index = (image * such blocks + block) * groups + group."""
    i64, at, itemsize, (real, _) = pointer("i64"), struct(_FIELDS), ITEMSIZE[dtype], real_of(dtype)
    known = taps if prod(taps) <= _MOST_KNOWN else None
    known_d, known_h, known_w = known or (0, 0, 0)
    scatter, fill_line = _scatter_pixels(dtype, vl, known), fill(dtype)

    @njit(**DEVICE)
    def reached(f, block):
        """Depths of dx that windows of a block reach, [first, end), of no block as of one beyond the image."""
        first = block * f.block * f.step_d - f.pad_d
        end = (min((block + 1) * f.block, f.out_d) - 1) * f.step_d - f.pad_d + f.taps_d
        return max(0, min(first, f.in_d)), max(0, min(end, f.in_d))

    @njit(**DEVICE)
    def own(f, block):
        """Depths that begin with zeros here, [first, end)."""
        first, end = reached(f, block)
        if parity:
            first = reached(f, block - 1)[1]
            end = reached(f, block + 1)[0]
        return first if block > 0 else 0, end if block + 1 < f.blocks else f.in_d

    @njit(**DEVICE)
    def clear(f, dx, channels, first_d, end_d, first_h, end_h):
        pixel_bytes = f.channels * itemsize
        for depth in range(first_d, end_d):
            line = dx + (depth * f.in_h + first_h) * f.in_w * pixel_bytes
            if channels == f.channels:
                fill_line(line, (end_h - first_h) * f.in_w * channels, real(0.0))
            else:
                for pixel in range((end_h - first_h) * f.in_w):
                    fill_line(line + pixel * pixel_bytes, channels, real(0.0))

    @njit(**DEVICE)
    def scatter_line(f, x, to_dx, y, to_dy, channels, low_d, end_d, low_h, end_h):
        pixel_bytes = f.channels * itemsize
        line_bytes, planes, lines = f.in_w * pixel_bytes, max(0, end_d - low_d), max(0, end_h - low_h)
        x += (low_d * f.in_h + low_h) * line_bytes
        first_whole = -(-f.pad_w // f.step_w)
        end_whole = min(f.out_w, (f.in_w + f.pad_w - f.taps_w) // f.step_w + 1)
        q = 0
        while q < f.out_w:
            count = end_whole - q if first_whole <= q < end_whole else 1
            first_w = q * f.step_w - f.pad_w
            low_w, end_w = max(first_w, 0), min(first_w + f.taps_w, f.in_w)
            is_known = known_d > 0 and planes == known_d and lines == known_h and end_w - low_w == known_w
            scatter(int(is_known), count, channels, pixel_bytes, x + low_w * pixel_bytes, f.step_w * pixel_bytes,
                    to_dx, y + q * pixel_bytes, to_dy, planes, lines, max(0, end_w - low_w), f.in_h * line_bytes,
                    line_bytes)  # fmt: skip
            q += count

    def scatter_block(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        group, rest = index % f.groups, index // f.groups
        such = (f.blocks + 1 - parity) // 2
        block, image = rest % such * 2 + parity, rest // such
        channels = f.group if group + 1 < f.groups else f.channels - group * f.group
        pixel_bytes = f.channels * itemsize
        line_bytes, out_bytes = f.in_w * pixel_bytes, f.out_w * pixel_bytes
        x = pointers[0] + group * f.group * itemsize + image * f.in_d * f.in_h * line_bytes
        y = pointers[1] + group * f.group * itemsize + image * f.out_d * f.out_h * out_bytes
        to_dx, to_dy = pointers[3] - pointers[0], pointers[2] - pointers[1]
        cleared_d, own_d = own(f, block)
        for d in range(block * f.block, min((block + 1) * f.block, f.out_d)):
            first_d, cleared_h = d * f.step_d - f.pad_d, 0
            low_d, end_d = max(first_d, 0), min(first_d + f.taps_d, f.in_d)
            for p in range(f.out_h):
                first_h = p * f.step_h - f.pad_h
                low_h, end_h = max(first_h, 0), min(first_h + f.taps_h, f.in_h)
                if end_h > cleared_h:
                    clear(f, x + to_dx, channels, cleared_d, min(end_d, own_d), cleared_h, end_h)
                    cleared_h = end_h
                window = y + (d * f.out_h + p) * out_bytes
                scatter_line(f, x, to_dx, window, to_dy, channels, low_d, end_d, low_h, end_h)
            clear(f, x + to_dx, channels, cleared_d, min(end_d, own_d), cleared_h, f.in_h)
            cleared_d = max(cleared_d, min(end_d, own_d))
        clear(f, x + to_dx, channels, cleared_d, own_d, int64(0), f.in_h)

    return compile_task(scatter_block, (dtype, vl, taps, parity))


def scatter_pixels(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of channels-last data."""
    images = problem.n
    if not axes.is_deep:  # windows of several depths have nothing in common: rows are the first axis
        images *= axes.extent[0]
        axes = Axes(*((side[1], neutral, side[2]) for side, neutral in zip(axes, (1, 1, 1, 1, 0), strict=True)))
    vl = min(device.lanes(problem.compute), 1 << problem.c.bit_length() - 1)
    least = max(1, ceil(axes.taps[0] / axes.step[0]) - 1)
    block = max(least, axes.out[0] * images // (2 * _TASKS_PER_THREAD * device.threads))
    blocks = ceil(axes.out[0] / block)
    even = images * ceil(blocks / 2)
    groups = max(1, min(ceil(device.threads / even), problem.c // vl))
    group = problem.c // vl // groups * vl
    ctx = filled(
        _FIELDS, **axes.fields(), channels=problem.c, group=group, groups=groups, block=block, blocks=blocks
    )  # fmt: skip
    tasks = (even, images * (blocks // 2))
    return Program(
        [Phase(_task(problem.dtype, vl, axes.taps, parity), n * groups, ctx) for parity, n in enumerate(tasks) if n]
    )
