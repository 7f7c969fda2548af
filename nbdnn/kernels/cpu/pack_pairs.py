"""Filters of bfloat16 packed as words of two input channels, whose products one instruction adds.

Panels as in `pack.py`, [group][panel][t, r, s, pair of channels][width] words, zero beyond the last output channel and
in the upper half behind an odd last input channel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from llvmlite import ir
from numba import int32, types
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.geometry import Geometry
from nbdnn.kernels.cpu.launch import ARGS, Phase
from nbdnn.kernels.cpu.pack import NOT_TURNED, Packing, common_step, filter_offsets, pack_phase, turned
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.turns import transpose, turn_lines
from nbdnn.kernels.cpu.vector import (
    I16,
    I32,
    by_vectors,
    constant,
    element,
    filled,
    load,
    pointer,
    record,
    splat,
    store,
    struct,
)
from nbdnn.problem_conv import ConvProblem

_PACK = record(
    *("w_pointer", "panels", "taps", "c_in", "c_out", "w_g", "w_o", "w_i", "starts", "offsets"),
    *("turns", "columns", "even", "odd", "copy_bytes", "panel_bytes"),
)
VL = 16  # words of a vector


@cache
def _pack_task(width: int):
    """One panel: index = group * panels + panel."""
    words, data, i64, args_at, params_at = (
        pointer("i32"), pointer("bf16"), pointer("i64"), struct(ARGS), struct(_PACK),
    )  # fmt: skip
    turn, fill = transpose("f32", "f32", VL), zero_fill("f32")
    turn_even, turn_odd = (turn_lines("bf16", "f32", VL, merges) for merges in (False, True))

    def pack_panel(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        g, panel = index // f.panels, index % f.panels
        rows, pairs = min(width, f.c_out - panel * width), (f.c_in + 1) // 2
        starts = i64(f.starts + panel * width * 8)
        w = i64(args)[f.w_pointer] + 2 * (g * f.w_g + starts[0])
        out = a.workspace + worker * f.copy_bytes + index * f.panel_bytes
        if rows < width:
            fill(out, f.panel_bytes // 4)
        if f.turns == 1:
            turn_even(out, f.even, w, 2 * f.w_o, rows, f.columns)
            turn_odd(out, f.odd, w, 2 * f.w_o, rows, f.columns)
            return
        for channel in range(0, f.turns, 2):
            line, start = out + channel // 2 * 4 * width, w + 2 * channel * f.w_i
            turn_even(line, f.even, start, 2 * f.w_o, rows, f.columns)
            turn_odd(line, f.odd, start + 2 * f.w_i, 2 * f.w_o, rows, f.columns)
        if f.turns:
            return
        for tap in range(f.taps):
            start, to = w + 2 * i64(f.offsets)[tap], out + 4 * tap * pairs * width
            if f.w_i == 1 and f.w_o and f.c_in % 2 == 0:
                turn(to, 4 * width, start, 2 * f.w_o, rows, pairs)
                continue
            for pair in range(pairs):
                low, line, has_high = start + 4 * pair * f.w_i, to + 4 * pair * width, 2 * pair + 1 < f.c_in
                if f.w_o == 1 and width % VL == 0:
                    zip_rows(line, low, low + 2 * f.w_i, True, has_high, rows)
                    continue
                for o in range(rows):
                    at = starts[o] - starts[0]
                    word = int32(data(low)[at])
                    if has_high:
                        word |= int32(data(low + 2 * f.w_i)[at]) << 16
                    words(line)[o] = word

    return compile_task(pack_panel, (width,))


@intrinsic
def zip_rows(typingctx, to, low, high, has_low, has_high, n):
    """n words of a 16-bit number from each row; where it is not there its half is 0."""
    short, word = ir.VectorType(I16, VL), ir.VectorType(I32, VL)

    def codegen(context, builder, sig, args):
        to, low, high, has_low, has_high, n = args
        given = (low, has_low), (high, has_high)
        rows = [(at, splat(builder, has, ir.VectorType(ir.IntType(1), VL))) for at, has in given]

        def step(i, mask) -> None:
            parts = []
            for at, present in rows:
                wanted = present if mask is None else builder.and_(present, mask)
                value = load(builder, element(builder, at, i, short, 2), short, 2, wanted)
                parts.append(builder.zext(value, word))
            both = builder.or_(parts[0], builder.shl(parts[1], constant(word, 16)))
            store(builder, both, element(builder, to, i, word, 4), 4, mask)

        by_vectors(builder, n, VL, step)
        return context.get_dummy_value()

    return signature(types.none, *[types.int64] * 3, types.boolean, types.boolean, types.int64), codegen


def refused_pairs(problem: ConvProblem, device: Cpu) -> str:
    """Why pairs cannot be multiplied; empty where they can."""
    if problem.dtype != "bf16":
        return f"dtype is {problem.dtype}, this kernel multiplies bf16"
    if not (device.multiplies_bf16 and device.vector_bytes == 4 * VL):
        return f"{device.name} has no instruction that multiplies pairs of bf16"
    return ""


def of_pairs(geo: Geometry) -> Geometry:
    """As many input channels as there are words."""
    return replace(geo, c_in=(geo.c_in + 1) // 2)


def pack_any(
    geo: Geometry, dtype: str, packing: Packing, device: Cpu, pairs: bool, channels_last: bool = True
) -> tuple[Phase, list[np.ndarray]]:
    """`pack_pairs_phase` of pairs, else `pack_phase`."""
    return pack_pairs_phase(geo, packing) if pairs else pack_phase(geo, dtype, packing, device, channels_last)


def pack_pairs_phase(geo: Geometry, packing: Packing) -> tuple[Phase, list[np.ndarray]]:
    """The phase that packs the filter at the beginning of the workspace, and the arrays that it needs alive.

    packing: of pairs.
    """
    parts = [filter_offsets(geo, gather, True) for gather in geo.gathers]
    offsets = np.concatenate([part[..., 0].reshape(-1) for part in parts])
    starts = geo.filter_starts
    turns, places = NOT_TURNED
    if geo.c_in % 2 == 0 and packing.width % VL == 0:
        turns, places = turned(geo, parts, packing, 4 * packing.width, in_line=2)
    # Of all channels in one block even ones are turned first, then odd ones.
    even, odd = places, places
    if turns == 1:
        is_odd = np.zeros(places.size, bool)
        is_odd[np.concatenate([part[..., 1::2].reshape(-1) for part in parts])] = True
        even, odd = np.where(is_odd, -1, places), np.where(is_odd, places, -1)
    ctx = filled(
        _PACK,
        w_pointer=geo.w_pointer,
        panels=packing.panels,
        taps=offsets.size,
        c_in=geo.c_in,
        c_out=geo.c_out,
        w_g=geo.w_strides[0],
        w_o=common_step(starts),
        w_i=geo.w_strides[2],
        starts=starts.ctypes.data,
        offsets=offsets.ctypes.data,
        turns=turns,
        columns=places.size,
        even=even.ctypes.data,
        odd=odd.ctypes.data,
        copy_bytes=packing.copy_bytes,
        panel_bytes=packing.panel_bytes,
    )
    task = Phase(_pack_task(packing.width), geo.groups * packing.panels, ctx, each=packing.copy_bytes > 0)
    return task, [offsets, starts, even, odd]
