"""Filters packed for matrix units: parts of bfloat16, as words of two input channels.

Panels [group][panel][gather][t, r, s, step][part][tile][pair of channels][16 words], zero beyond the last output and
input channels. Sixteen filters at a time are first laid out with their channels side by side.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from nbdnn.kernels.cpu.amx import PARTS, TILE, split_row, uncut, widen
from nbdnn.kernels.cpu.amx_plan import Config, Layout, filter_slots, side_by_side
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.launch import ARGS, Phase
from nbdnn.kernels.cpu.pack import filter_offsets
from nbdnn.kernels.cpu.rows import convert_row, zero_fill
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_PACK = record(
    *("w_pointer", "panels", "tiles", "c_in", "c_out", "w_g", "w_o", "w_i", "taps", "tap_offsets", "slots", "adjacent"),
    *("slot_count", "pixel_channels", "depth", "steps", "panel_bytes", "tile_bytes", "places"),
    *("worker_offset", "worker_bytes"),
)


@cache
def _pack_task(dtype: str, vl: int):
    """Sixteen output channels: index = (group * panels + panel) * tiles + tile."""
    parts, itemsize = PARTS[dtype], ITEMSIZE[dtype]
    waits, wait_bytes, widened = uncut(dtype), ITEMSIZE[uncut(dtype)], widen(dtype)
    data, waiting, i64, args_at, params_at = (
        pointer(dtype), pointer(waits), pointer("i64"), struct(ARGS), struct(_PACK),
    )  # fmt: skip
    row, turn, fill = convert_row(dtype, waits, vl), transpose(dtype, waits, vl), zero_fill("f32")
    split, turn_words = split_row(waits, parts), transpose("f32", "f32", TILE)

    def pack_tile(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        panel, tile = index // f.tiles, index % f.tiles
        g, first = panel // f.panels, (panel % f.panels * f.tiles + tile) * TILE
        filters = max(0, min(TILE, f.c_out - first))
        w = i64(args)[f.w_pointer] + (g * f.w_g + first * f.w_o) * itemsize
        slot_bytes = f.pixel_channels * wait_bytes
        filter_bytes, part_bytes = f.slot_count * slot_bytes, 2 * TILE * f.pixel_channels
        kept = a.workspace + f.worker_offset + worker * f.worker_bytes
        halves = kept + TILE * filter_bytes
        if filters < TILE or f.c_in < f.pixel_channels:
            fill(kept, TILE * filter_bytes // 4)
        if f.adjacent:
            for o in range(filters):
                start = w + o * f.w_o * itemsize
                turn(kept + o * filter_bytes, slot_bytes, start, f.w_i * itemsize, f.c_in, f.slot_count)
        else:
            for tap in range(f.taps):
                start, to = w + i64(f.tap_offsets)[tap] * itemsize, kept + tap * slot_bytes
                if f.w_o == 1 and f.w_i != 1:
                    turn(to, filter_bytes, start, f.w_i * itemsize, f.c_in, filters)
                    continue
                for o in range(filters):
                    if f.w_i == 1:
                        row(to + o * filter_bytes, start + o * f.w_o * itemsize, f.c_in)
                    else:
                        for c in range(f.c_in):
                            waiting(to + o * filter_bytes)[c] = widened(data(start)[o * f.w_o + c * f.w_i])
        for tap in range(f.taps):
            start, pitch = kept + i64(f.slots)[tap] * slot_bytes, filter_bytes
            if parts > 1:
                for o in range(TILE):
                    split(halves + 2 * o * f.pixel_channels, part_bytes, start + o * filter_bytes, f.pixel_channels)
                start, pitch = halves, 2 * f.pixel_channels
            to = a.workspace + panel * f.panel_bytes + i64(f.places)[tap] + tile * f.tile_bytes
            for step in range(f.steps):
                for part in range(parts):
                    at = to + (step * parts + part) * f.tiles * f.tile_bytes
                    from_word = start + part * part_bytes + 2 * step * f.depth
                    turn_words(at, 4 * TILE, from_word, pitch, TILE, f.depth // 2)

    return compile_task(pack_tile, (dtype, vl))


def pack_phase(problem: ConvProblem, config: Config, layout: Layout, vl: int) -> tuple[Phase, list[np.ndarray]]:
    """The phase that packs the filter at the beginning of the workspace, and the arrays that it needs alive."""
    geo, parts = layout.geo, [filter_offsets(layout.geo, gather, True)[..., 0] for gather in layout.geo.gathers]
    offsets = np.concatenate([part.reshape(-1) for part in parts])
    tap_bytes = layout.steps * layout.parts * config.nt * layout.tile_bytes
    places = np.concatenate(
        [start + np.arange(part.size) * tap_bytes for start, part in zip(layout.part_offsets, parts, strict=True)]
    ).astype(np.int64)
    adjacent = side_by_side(geo)
    slots = offsets if adjacent else np.arange(offsets.size, dtype=np.int64)
    ctx = filled(
        _PACK,
        w_pointer=geo.w_pointer,
        panels=layout.panels,
        tiles=config.nt,
        c_in=geo.c_in,
        c_out=geo.c_out,
        w_g=geo.w_strides[0],
        w_o=geo.w_strides[1],
        w_i=geo.w_strides[2],
        taps=offsets.size,
        tap_offsets=offsets.ctypes.data,
        slots=slots.ctypes.data,
        adjacent=int(adjacent),
        slot_count=filter_slots(geo),
        pixel_channels=layout.pixel_channels,
        depth=layout.depth,
        steps=layout.steps,
        panel_bytes=layout.panel_bytes,
        tile_bytes=layout.tile_bytes,
        places=places.ctypes.data,
        worker_offset=layout.worker_offset,
        worker_bytes=layout.worker_bytes,
    )
    return Phase(_pack_task(problem.dtype, vl), geo.groups * layout.panels * config.nt, ctx), [offsets, places, slots]
