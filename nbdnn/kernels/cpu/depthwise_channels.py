"""The inner loops of channels-last depthwise convolution, as LLVM vector code: the lanes are channels of a pixel.

Groups of a few channels, which no vector ends within, are as many depthwise convolutions: in the i-th each lane meets
the i-th channel of its group (`of_group`).
"""

from __future__ import annotations

from functools import cache

from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.depthwise_vector import Loops
from nbdnn.kernels.cpu.rows import order
from nbdnn.kernels.cpu.vector import I64, at_least, lanes_between, store_past_caches


def of_group(builder, value, group: int, i: int):
    """In each lane the i-th channel of its group."""
    if group == 1:
        return value
    return builder.shuffle_vector(value, value, order(lane // group * group + i for lane in range(value.type.count)))


@cache
def interleaved_pixels(
    dtype: str, compute: str, vl: int, pixels: int, vectors: int, taps: int, step: int, group: int, finishes: bool
):
    """Intrinsic: `pixels` outputs of `vectors` vectors, of groups of `group` channels,

        tile[p, c] = sum over e, s, i of x[e, p*step + s, c // group * group + i] * w[e, s, i, c].

    An input pixel is loaded once for all the outputs that it reaches in a row of `taps` adjacent taps. Arguments, int64
    but the last: x (address of the first output's input at these channels), pixel_bytes (to the next input pixel),
    entries (address of pairs: byte offset of a row of taps in x, in the weights), n_entries, weights, tap_bytes (to the
    next tap's weights), channel_bytes (to those of the group's next channel), lanes (channels in the last vector; the
    others are neither read nor meant), tile, tile_pitch, streams (whether the tile lies on whole vectors and is written
    past the caches), start, least (float64). finishes: sums begin with start[c], at that address, or with nothing where
    it is 0, and are at least so much; else these two are not looked at.
    """

    def codegen(context, builder, sig, args):
        x, pixel_bytes, entries, n_entries, weights, tap_bytes, channel_bytes, lanes, tile, tile_pitch, *rest = args
        streams, start, least = rest
        v = Loops(builder, dtype, compute, vl)
        last = lanes_between(builder, vl, 0, None, lanes)
        acc, (nothing,) = v.zeros(pixels * vectors), v.zeros(1)
        for j in range(vectors) if finishes else ():
            there = v.offset(start, j, vl * v.acc_bytes)
            at = builder.select(builder.icmp_signed("!=", start, I64(0)), there, builder.ptrtoint(nothing, I64))
            first = builder.load(v.accumulator(at), align=v.acc_bytes)
            for p in range(pixels):
                builder.store(first, acc[p * vectors + j])
        with cgutils.for_range(builder, n_entries) as entry:
            pair = builder.mul(entry.index, I64(2))
            source = builder.add(x, v.int64_at(entries, pair))
            at = builder.add(weights, v.int64_at(entries, builder.add(pair, I64(1))))
            for j in range(vectors):
                starts = [v.offset(v.offset(at, s, tap_bytes), j, vl * v.acc_bytes) for s in range(taps)]
                slots = [[v.accumulator(v.offset(start, i, channel_bytes)) for start in starts] for i in range(group)]
                w = [[builder.load(slot, align=v.acc_bytes) for slot in of_taps] for of_taps in slots]
                for e in range((pixels - 1) * step + taps):
                    reached = [p for p in range(pixels) if 0 <= e - p * step < taps]
                    if reached:
                        pixel = v.offset(v.offset(source, e, pixel_bytes), j, vl * v.itemsize)
                        value = v.load(pixel, last if j == vectors - 1 else None)
                    for i in range(group) if reached else ():
                        met = of_group(builder, value, group, i)
                        for p in reached:
                            v.add_product(acc[p * vectors + j], met, w[i][e - p * step])
        totals = [builder.load(slot) for slot in acc]
        if finishes:
            totals = at_least(builder, totals, least)
        rows = [v.offset(tile, p, tile_pitch) for p in range(pixels)]
        slots = [v.accumulator(v.offset(row, j, vl * v.acc_bytes)) for row in rows for j in range(vectors)]
        with builder.if_else(builder.icmp_signed("!=", streams, I64(0))) as (then, otherwise):
            with then:
                for total, to in zip(totals, slots, strict=True):
                    store_past_caches(builder, total, to)
            with otherwise:
                for total, to in zip(totals, slots, strict=True):
                    builder.store(total, to, align=v.acc_bytes)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, x, pixel_bytes, entries, n_entries, weights, tap_bytes, channel_bytes, lanes, tile, tile_pitch,
            streams, start, least):  # fmt: skip
        return signature(types.none, *[types.int64] * 12, types.float64), codegen

    return run


@cache
def interleaved_filter(
    dtype: str, compute: str, vl: int, rows: int, taps: int, step: int, vectors: int, pixels: int, group: int
):
    """Intrinsic: the sums of `rows` rows of taps, of groups of `group` channels,

        sums[e, s, i, c] += sum over h, j of dy[h, j, c] * x[e, h, j*step + s, c // group * group + i].

    `pixels` outputs are taken at once, so that an input pixel is loaded once for all taps that it reaches; the sums
    stay in registers throughout. Arguments, all int64: x (address of the first pixel's input at these channels), x_row,
    x_step (bytes to the input of the next output row, and to the next input pixel), dy, dy_row, dy_step, height, count
    (output rows, and pixels of each), entries (address of pairs: byte offset of a row of taps in x, in the sums), lanes
    (as above), sums (address of accumulate-type values), sums_pitch (bytes to the next tap, or channel of a group).
    """

    def codegen(context, builder, sig, args):
        x, x_row, x_step, dy, dy_row, dy_step, height, count, entries, lanes, sums, sums_pitch = args
        v = Loops(builder, dtype, compute, vl)
        last = lanes_between(builder, vl, 0, None, lanes)
        sources, slots = [], []
        for e in range(rows):
            sources.append(builder.add(x, v.int64_at(entries, I64(2 * e))))
            row = builder.add(sums, v.int64_at(entries, I64(2 * e + 1)))
            for s in range(taps):
                starts = [v.offset(row, s * group + i, sums_pitch) for i in range(group)]
                slots += [v.accumulator(v.offset(at, j, vl * v.acc_bytes)) for j in range(vectors) for at in starts]
        acc = v.zeros(len(slots))
        for to, slot in zip(acc, slots, strict=True):
            builder.store(builder.load(slot, align=v.acc_bytes), to)

        def load(address, j):
            return v.load(v.offset(address, j, vl * v.itemsize), last if j == vectors - 1 else None)

        def add_pixels(row, first, together):
            gradient_at = v.offset(v.offset(dy, row, dy_row), first, dy_step)
            gradients = [[load(v.offset(gradient_at, p, dy_step), j) for j in range(vectors)] for p in range(together)]
            shift = v.offset(builder.mul(builder.mul(first, I64(step)), x_step), row, x_row)
            for e, source in enumerate(sources):
                at = builder.add(source, shift)
                for place in range((together - 1) * step + taps):
                    reached = [p for p in range(together) if 0 <= place - p * step < taps]
                    for j in range(vectors) if reached else ():
                        value = load(v.offset(at, place, x_step), j)
                        for i in range(group):
                            met = of_group(builder, value, group, i)
                            for p in reached:
                                s = place - p * step
                                v.add_product(acc[((e * taps + s) * vectors + j) * group + i], gradients[p][j], met)

        whole = builder.sub(count, builder.srem(count, I64(pixels)))
        with cgutils.for_range(builder, height) as row:
            with cgutils.for_range_slice(builder, I64(0), whole, I64(pixels), I64) as (first, _):
                add_pixels(row.index, first, pixels)
            with cgutils.for_range_slice(builder, whole, count, I64(1), I64) as (first, _):
                add_pixels(row.index, first, 1)
        for slot, total in zip(slots, acc, strict=True):
            builder.store(builder.load(total), slot, align=v.acc_bytes)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, x, x_row, x_step, dy, dy_row, dy_step, height, count, entries, lanes, sums, sums_pitch):
        return signature(types.none, *[types.int64] * 12), codegen

    return run
