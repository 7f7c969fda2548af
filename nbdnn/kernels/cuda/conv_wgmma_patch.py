"""Implicit GEMM on wgmma whose taps share one copy of the pixels: forward and bwd_data of stride 1, two dimensions.

    out[slot, o] = sum over blocks of channels, taps of  w[o, tap, i] * patch[slot + the tap's distance, i]
    rows of a: 64 output channels for each warpgroup    columns of b: slots, up to 256    k: 128 bytes of channels

`conv_wgmma.py` copies a tile's pixels once for each tap. Here one copy brings the rows of the image that a tile
reaches, with their padding, and a tap is a later beginning in it (`wgmma_patch.py`). Filters are the rows and pixels
the columns, so that an instruction reads up to 64 + 256 lines of shared memory for 64 x 256 sums. bwd_data is the same
on dy with the taps in reverse order. `wgmma_patch_tf32` multiplies float32, rounded to TF32 as it is copied; its
bwd_data turns the filter first, too.

64 filters of few channels (of 64: 72 KiB for 3x3) are held in shared memory. Their blocks stay, too, and teams take
tile after tile, each with a patch of its own: one multiplies while the other stores. Larger filters pass by, once a
tile; blocks that stay nevertheless ask for the next tile while they store the last. Traffic: image (rows + 2) / rows
times for 3x3, for each tile of filters, most of it from cache. Planar inputs are turned first. Accumulates in float32.
Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import wgmma_patch_plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.gemm_plan import refused_operands
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate, output_pointers
from nbdnn.kernels.cuda.turn_channels import input_places, is_planar, turn_inputs, turned_bytes
from nbdnn.kernels.cuda.wgmma_maps import (
    filter_map,
    filters_last,
    filters_last_map,
    line_elems,
    rows_map,
    source_shape,
    window,
)
from nbdnn.kernels.cuda.wgmma_patch import ASKERS, ROWS, PatchTile
from nbdnn.kernels.cuda.wgmma_patch_plan import Plan, blocks, lines, plans, shared_bytes, targets, tiles
from nbdnn.kernels.cuda.wgmma_pipeline import LINE_BYTES
from nbdnn.kernels.spatial import tensor_strides
from nbdnn.problem_conv import ConvProblem


class _Variant(NamedTuple):
    """What a kernel is compiled for. turned: whether filters are read along their output channels."""

    turned: bool
    dtype: str
    epilogue: tuple[str, ...]
    tile: PatchTile
    planar: bool


class _Integers(NamedTuple):
    """What a block knows beyond its maps.

    tiles: of all images, tiles_h of a column, columns of an image; a tile has rows x width outputs, its patch `line`
    pixels a row. blocks: that share the tiles. patch_bytes: from a patch to the next, of which box_bytes are copied.
    tap_bytes_: from a tap to the next in a patch. tap_first, tap_step: of the flattened taps, in the order of the sum.
    """

    tiles: int
    blocks: int
    columns: int
    tiles_h: int
    rows: int
    width: int
    line: int
    patch_bytes: int
    box_bytes: int
    blocks_in: int
    taps_h: int
    taps_w: int
    tap_bytes_h: int
    tap_bytes_w: int
    tap_first: int
    tap_step: int
    start_h: int
    start_w: int
    channels_out: int
    out_n: int
    out_channel: int
    out_h: int
    out_w: int
    positions_h: int
    positions_w: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_tma, wgmma_patch, wgmma_patch_store, wgmma_pipeline

    variant = _Variant(*specialised_on)
    turned, tile, channels = variant.turned, variant.tile, line_elems(variant.dtype)
    integer, word, map_of = ptx.INTEGER[32], ptx.WORD, ptx_tma.map_of
    workers, filters_of_block, team, box_bytes = (
        tile.workers,
        ROWS * tile.team,
        tile.team,
        wgmma_pipeline.BOX_BYTES,
    )
    slots, places_at, group = tile.slots, tile.places_at, wgmma_patch.GROUP
    copy_filter, copy_rows, store_place = ptx_tma.COPY_BOX[3], ptx_tma.COPY_BOX[4], ptx_tile.STORE_SHARED[1]

    @ptx.inline
    def corner(number, f):
        """Image, first row and first column of a tile's outputs."""
        rest, of_column = ptx.divided(number, f.tiles_h)
        n, column = ptx.divided(rest, f.columns)
        return n, integer(of_column * f.rows), integer(column * f.width)

    @ptx.inline
    def set_places(shared, thread, warpgroup, number, f):
        """Where the slots of a tile lie in the output, to the warpgroup's table: -1 for those that do not."""
        n, first_h, first_w = corner(number, f)
        image, table = integer(n * f.out_n), integer(shared + places_at + warpgroup * (4 * slots))
        slot = integer(thread & (group - 1))
        while slot < slots:
            row, column = ptx.divided(slot, f.line)
            h, w = integer(first_h + row), integer(first_w + column)
            alive = row < f.rows and column < f.width and h < f.positions_h and w < f.positions_w
            place = integer(image + integer(h * f.out_h + w * f.out_w))
            store_place(word(table + 4 * slot), word(place if alive else integer(-1)))
            slot = integer(slot + group)

    @ptx.inline
    def copy_patch(at, barrier, number, block, image):
        source, f = image
        n, h, w = corner(number, f)
        place = (integer(block * channels), integer(f.start_w + w), integer(f.start_h + h), n)
        copy_rows(at, source, barrier, place, ())

    @ptx.inline
    def copy_stage(at, barrier, block, tap, filters):
        source, first_o, f = filters
        channel, tap = integer(block * channels), integer(f.tap_first + f.tap_step * tap)
        if turned:
            for box in range(team):
                o = integer(first_o + box * ROWS)
                copy_filter(word(at + box * box_bytes), source, barrier, (o, tap, channel), ())
        else:
            copy_filter(at, source, barrier, (channel, tap, first_o), ())

    set_barriers = wgmma_patch.set_barriers(tile)
    ask_filters, ask_patches = wgmma_patch.ask_filters(tile, copy_stage), wgmma_patch.ask_patches(tile, copy_patch)
    store_sums = wgmma_patch_store.store_sums(variant.dtype, variant.epilogue, tile, variant.planar)
    work = wgmma_patch.work(tile, variant.dtype, turned, set_places, store_sums)

    def patch_gemm(maps, out, bias, residual, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        number, first_o = integer(ptx.block_x()), integer(ptx.block_y() * filters_of_block)
        set_barriers(shared, thread)
        ptx.cuda.syncthreads()
        if thread < workers:
            work(shared, thread, number, f, (first_o, (out, bias, residual), (alpha, beta)))
        elif thread == workers:
            ask_patches(shared, number, f, (map_of(maps, integer(0)), f))
        elif thread == workers + 32:
            ask_filters(shared, number, f, (map_of(maps, integer(1)), first_o, f))

    data, real = ptx.pointer(variant.dtype), ptx.REAL["f32"]
    return patch_gemm, (ptx_tma.TensorMaps(2), data, data, data, real, real, ptx.record(_Integers, 32))


class WgmmaPatch(LaunchedCandidate[Plan]):
    """Forward, and bwd_data of stride 1."""

    algorithm, algo = "wgmma_patch", None

    def __init__(self, op: str, *, tf32: bool = False) -> None:
        self.op = op
        self._dtypes = ("f32",) if tf32 else ("f16", "bf16")
        if tf32:
            self.algorithm, self.math = "wgmma_patch_tf32", "tf32"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if device.capability[0] != 9:
            return Support(False, f"compute capability {device.capability}: wgmma is an instruction of 9.0 alone")
        if problem.ndim != 2:
            return Support(False, f"{problem.ndim} dimensions, two are known")
        if problem.groups != 1:
            return Support(False, f"{problem.groups} groups, one is known")
        if max(problem.stride) > 1:
            return Support(False, f"stride {problem.stride}: 1 is known")
        if prod(problem.filter) == 1:
            return Support(False, "1 tap, which has nothing to share")
        if reason := refused_operands(problem, self._dtypes):
            return Support(False, reason)
        found = plans(problem, device)
        if not found:
            return Support(False, f"no tile for outputs of {targets(problem)} and the reach of {problem.filter} taps")
        if index_bits(problem, self.integers(problem, found[0], device)) != 32:
            largest = max(operand.size_elems for operand in problem.operands)
            return Support(False, f"{largest} elements are more than int32 counts")
        return YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Plan, ...]:
        return plans(problem, device)

    def workspace_bytes(self, problem: ConvProblem, config: Plan, device: Gpu) -> int:
        return turned_bytes(problem, filters_last(problem))

    def estimate(self, problem: ConvProblem, config: Plan, device: Gpu) -> float:
        return wgmma_patch_plan.estimate(problem, config, device)

    def integers(self, problem: ConvProblem, config: Plan, device: Gpu) -> _Integers:
        out = problem.operands[2]
        out_n, out_channel, _, out_h, out_w = tensor_strides(out.shape, problem.y_channels_last)
        positions_h, positions_w = targets(problem)
        line, rows, _ = lines(problem, config)
        start_w, start_h = window(problem).lower
        taps, forward = prod(problem.filter), self.op == "conv_fwd"
        backwards = forward == (problem.mode == "conv")
        integers = (
            tiles(problem, config),
            blocks(problem, config, device),
            ceil(positions_w / config.width),
            ceil(positions_h / config.rows),
            config.rows,
            config.width,
            line,
            config.tile.patch_bytes(line * rows),
            line * rows * LINE_BYTES,
            ceil(source_shape(problem)[1] / line_elems(problem.dtype)),
            *problem.filter,
            problem.dilation[0] * line * LINE_BYTES,
            problem.dilation[1] * LINE_BYTES,
            *((taps - 1, -1) if backwards else (0, 1)),
            start_h,
            start_w,
            out.shape[1],
            out_n,
            out_channel,
            out_h,
            out_w,
            positions_h,
            positions_w,
        )
        return _Integers._make(integers)

    def launches(self, problem: ConvProblem, config: Plan, device: Gpu) -> list[Launch]:
        tile, forward, out = config.tile, self.op == "conv_fwd", problem.operands[2]
        integers = self.integers(problem, config, device)
        last = filters_last(problem)
        first, second = input_places(problem, 0, last)
        image, filters = (first, second) if forward else (second, first)
        line, rows, _ = lines(problem, config)
        filters_of_block = ROWS * tile.team
        turned = not forward and not last
        variant = _Variant(turned, problem.dtype, problem.epilogue, tile, is_planar(out))
        filter_of = filters_last_map if last else filter_map
        product = Launch(
            source=Source(_kernel, variant, tile.workers + ASKERS, tile.min_blocks),
            grid=(integers.blocks, ceil(out.shape[1] / filters_of_block), 1),
            pointers=output_pointers(problem),
            scalars="f32",
            integers=integers,
            dynamic_shared_bytes=shared_bytes(problem, config),
            maps=(
                rows_map(problem, image, line, rows),
                filter_of(problem, filters, line_elems(problem.dtype) if turned else filters_of_block),
            ),
        )
        return [*turn_inputs(problem, 0, last), product]


FWD, BWD_DATA = ((WgmmaPatch(op), WgmmaPatch(op, tf32=True)) for op in ("conv_fwd", "conv_bwd_data"))
