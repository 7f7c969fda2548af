"""How the filter gradient by phases is launched: what a block takes, and where it lies in shared memory."""

from __future__ import annotations

from math import ceil, gcd

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rows_phases, rows_sums
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.rows_launch import Config, blocks_of, power_of_two, warps_at_once
from nbdnn.kernels.cuda.rows_plan import (
    CHUNK,
    CHUNK_BYTES,
    ENTRY_BYTES,
    GROUP,
    MOST_CHUNKS,
    STEP,
    Block,
    Lines,
    Phased,
    Tile,
    aligned,
    lines,
    rows,
    tile,
)
from nbdnn.kernels.cuda.window_candidate import Planned, Totals
from nbdnn.kernels.cuda.window_plan import Image, image
from nbdnn.problem_conv import ConvProblem

_MOST_WARPS = 16  # of a block


def gradients(problem: ConvProblem, config: Config, device: Gpu) -> Planned:
    """The kernels of a bwd_filter of 16-bit data."""
    seen = image(problem)
    ways = (_way(problem, seen, config, of_block) for of_block in (8, 4, 2, 1))
    variant, sets, set_groups = next(way for way in ways if way)
    form, filters, phases, of_block = variant.lines, variant.filters, variant.phases, variant.of_block
    segments = seen.taps[0] * (seen.group_in // form.inner)
    tiled = _with_chunks(tile(seen, form, config.pixels, config.width), seen, variant)
    steps = ceil(tiled.groups * GROUP // phases / STEP)
    windows_at = aligned(of_block * steps * STEP * ENTRY_BYTES)
    slabs_at = aligned(windows_at + of_block * steps * STEP * 4)
    dy_at = aligned(tiled.in_rows * (seen.group_in // form.inner) * tiled.pitch)
    slab_bytes = aligned(dy_at + of_block * steps * STEP * variant.dy_bytes)
    chunks_k, grid_z = ceil(seen.group_out / filters), set_groups * (phases // of_block)
    block = Block(
        blocks=blocks_of(seen, tiled, config, chunks_k * grid_z, device),
        entries=segments * variant.chunks,
        fragments=steps,
        groups_at=0,
        filters_at=windows_at,
        slabs_at=slabs_at,
        slab_bytes=slab_bytes,
        dy_at=dy_at,
        parts=variant.threads // (sets * of_block * 32),
        sets=sets,
        all_sets=sets * set_groups,
    )
    integers = rows(seen, form, tiled, block)
    of_sums = Source(rows_sums.sum_kernel, (problem.dtype, problem.epilogue), rows_sums.SUM_THREADS)
    sums = rows_sums.sums(form, integers, block.blocks * grid_z, chunks_k, filters, aligned(segments * form.run, 2))
    return Planned(
        source=Source(rows_phases.kernel, variant, variant.threads, config.blocks),
        integers=integers,
        grid=(block.blocks, chunks_k, grid_z),
        shared_bytes=max(slabs_at + config.stages * slab_bytes, variant.threads // 32 * variant.warp_bytes),
        most_blocks=warps_at_once(variant.registers) // (variant.threads // 32),
        totals=Totals(of_sums, sums),
    )


def _way(problem: ConvProblem, seen: Image, config: Config, of_block: int) -> tuple[Phased, int, int] | None:
    """(variant, sets of a block, groups of sets) with so many phases in a block, if there are so many, and registers
    for a warp of each set and phase, which one phase has in any case. Warps that are left share the pixels."""
    form = lines(seen, problem, "mma")._replace(odd=0)
    phases = CHUNK_BYTES // gcd(CHUNK_BYTES, form.step_bytes)
    if of_block > phases:
        return None
    filters = min(config.filters, power_of_two(seen.group_out, 16))
    form, shift, before, chunks = _copied(form, seen.pad[1] * form.inner, phases, of_block)
    entries = seen.taps[0] * (seen.group_in // form.inner) * chunks
    variant = Phased(form, config.stages, filters, 0, phases, of_block, chunks, MOST_CHUNKS, shift, before)
    most = max(1, warps_at_once(variant.registers) // config.blocks)
    set_groups = ceil(ceil(entries / MOST_CHUNKS) / most)
    sets = ceil(ceil(entries / MOST_CHUNKS) / set_groups)
    variant = variant._replace(set_chunks=ceil(entries / (sets * set_groups)))
    warps = max(most, warps_at_once(variant.registers) // config.blocks)
    if of_block > 1 and sets * of_block > warps:
        return None
    splits = max(1, min(warps, _MOST_WARPS) // (sets * of_block))
    return variant._replace(threads=sets * of_block * splits * 32), sets, set_groups


def _copied(form: Lines, pad_elems: int, phases: int, of_block: int) -> tuple[Lines, int, tuple[int, ...], int]:
    """(lines with the bytes of a copy, elements from one's begin to the first window, elements before for each group of
    phases, chunks of a segment): the fewest chunks, and of those that have them the largest copies."""
    found = []
    for copy_bytes in (16, 8, 4):
        if copy_bytes > form.copy_bytes:
            continue
        elems = copy_bytes // form.itemsize
        shift, before, most = -pad_elems % elems, [], 0
        for first in range(0, phases, of_block):
            starts = [shift + phase * form.step for phase in range(first, first + of_block)]
            least, by = min((max((at + by) % CHUNK for at in starts), by) for by in range(0, CHUNK, elems))
            before.append(by)
            most = max(most, least)
        chunks = ceil((most + form.run) / CHUNK)
        found.append((form._replace(copy_bytes=copy_bytes), shift, tuple(before), chunks))
    return min(found, key=lambda way: way[-1])


def _with_chunks(tiled: Tile, seen: Image, variant: Phased) -> Tile:
    """The tile, with lines as long as all chunks of its windows, at a pitch that brings the chunks of eight pixels of a
    phase to different banks, as far as that can be."""
    form, copy_elems = variant.lines, variant.lines.copy_bytes // variant.lines.itemsize
    window = max(variant.before) + variant.shift + (tiled.row_groups * GROUP - 1) * form.step
    last = window // CHUNK * CHUNK + variant.chunks * CHUNK
    copies = ceil(last / copy_elems)
    least = aligned(copies * form.copy_bytes, CHUNK_BYTES)
    columns = tiled.row_groups * GROUP // variant.phases
    steps = [
        (i // columns * seen.stride[0], i % columns * variant.phases * form.step_bytes)
        for i in range(tiled.rows * columns // CHUNK * CHUNK)
    ]

    def conflicts(pitch: int) -> int:
        banks = [(line * pitch + past) // CHUNK_BYTES % CHUNK for line, past in steps]
        return sum(CHUNK - len(set(banks[i : i + CHUNK])) for i in range(0, len(banks), CHUNK))

    pitch = min((least + CHUNK_BYTES * i for i in range(CHUNK)), key=conflicts)
    return tiled._replace(line_copies=copies, pitch=pitch)
