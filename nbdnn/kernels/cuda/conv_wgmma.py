"""Implicit GEMM on the matrix units of Hopper (wgmma), fed by TMA: forward, and bwd_data of stride 1.

    out[pixel, o] = sum over taps, i of  image[pixel reached by tap, i] * w[o, tap, i]
    rows of a: pixels, m of a block         columns of b: output channels, n         k: 128 bytes of a tap's channels

TMA walks the pixels of a tile row by row and image by image itself, each moved by the tap, and gives zeros for what
lies beyond a border or the last channel: one thread asks for a stage by two or three copies. bwd_data is the same on dy
with the taps in reverse order; its filter lies turned in shared memory, which the instruction reads as it is.
`wgmma_gemm_tf32` multiplies float32, rounded to TF32 as it is copied; its bwd_data turns the filter first.

A reduction may be cut into parts, for as many more blocks: their sums go to the workspace and are added in order. An
image or filter whose channels are not last in memory is turned first. Traffic: image once from memory, taps * n tiles
times from cache; w once a row of tiles. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import ClassVar, NamedTuple

from nbdnn.candidate import Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.gemm_gather import pixels, tiles_m
from nbdnn.kernels.cuda.gemm_plan import Config, MmaCandidate, Work, data_type, fitting, parts_bytes
from nbdnn.kernels.cuda.gemm_tile import Tile
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, output_pointers
from nbdnn.kernels.cuda.quads import QUAD
from nbdnn.kernels.cuda.turn_channels import input_places, is_planar, turn_inputs, turned_bytes
from nbdnn.kernels.cuda.wgmma_maps import (
    filter_map,
    filters_last,
    filters_last_map,
    image_map,
    line_elems,
    refusal,
    source_shape,
    window,
)
from nbdnn.kernels.cuda.wgmma_pipeline import LINE_BYTES, LINE_ELEMS, WARP, shared_bytes
from nbdnn.kernels.spatial import spatial3, tensor_strides
from nbdnn.problem_conv import ConvProblem


class _Variant(NamedTuple):
    """What a kernel is compiled for. turned: whether filters are read along their output channels. run: pixels of a
    planar output that are stored at once, 0 if it is not planar."""

    turned: bool
    dtype: str
    ndim: int
    epilogue: tuple[str, ...]
    tile: Tile
    run: int


class _Integers(NamedTuple):
    """What a block knows beyond its maps. tap_first, tap_step: of the flattened taps, in the order of the sum.

    out_channel: from a channel of the output to the next. part_elems: from a part of the sums to the next, 0 where they
    are whole.
    """

    part_elems: int
    parts: int
    tiles_n: int
    channels_out: int
    blocks_in: int
    n: int
    out_n: int
    out_channel: int
    out_d: int
    out_h: int
    out_w: int
    positions_d: int
    positions_h: int
    positions_w: int
    start_d: int
    start_h: int
    start_w: int
    step_d: int
    step_h: int
    step_w: int
    taps_d: int
    taps_h: int
    taps_w: int
    dilation_d: int
    dilation_h: int
    dilation_w: int
    tap_first: int
    tap_step: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import gemm_pixels, gemm_store, ptx, ptx_tile, ptx_tma, wgmma_pipeline

    variant = _Variant(*specialised_on)
    turned, deep, tile, planar = variant.turned, variant.ndim == 3, variant.tile, variant.run > 0
    channels, kind = line_elems(variant.dtype), "tf32" if variant.dtype == "f32" else variant.dtype
    integer, word = ptx.INTEGER[32], ptx.WORD
    extent_m, extent_n, a_bytes, rows_at = tile.m, tile.n, tile.m * LINE_BYTES, tile.rows_at
    boxes, box_bytes = tile.n // LINE_ELEMS, wgmma_pipeline.BOX_BYTES

    located, set_barriers = gemm_pixels.located(), wgmma_pipeline.set_barriers(tile)
    copy_pixels, copy_filter = ptx_tma.COPY_PIXELS[variant.ndim], ptx_tma.COPY_BOX[3]
    store_place, map_of = ptx_tile.STORE_SHARED[1], ptx_tma.map_of
    store = gemm_store.tile_store(variant.dtype, variant.epilogue, tile)
    store_planar = gemm_store.planar_store(variant.dtype, variant.epilogue, tile, max(variant.run, 1))

    @ptx.inline
    def find_row(shared, row, first_pixel, f):
        """Where a row of the tile lies in the output, to shared memory."""
        n, d, h, w = located(integer(first_pixel + row), f.positions_d, f.positions_h, f.positions_w)
        place = integer(n * f.out_n + d * f.out_d + integer(h * f.out_h + w * f.out_w))
        store_place(word(shared + rows_at + 4 * row), word(place if n < f.n else integer(-1)))

    @ptx.inline
    def first_stage(f):
        """State of the first stage of this part, (block of channels, tap); and how many stages it has."""
        count = integer(f.taps_d * f.taps_h * integer(f.taps_w * f.blocks_in))
        a_part, _ = ptx.divided(integer(count + f.parts - 1), f.parts)
        first = integer(ptx.block_y() * a_part)
        tap, block = ptx.divided(first, f.blocks_in)
        rest, s = ptx.divided(tap, f.taps_w)
        t, r = ptx.divided(rest, f.taps_h)
        return (block, (t, r, s)), integer(min(a_part, integer(count - first)))

    @ptx.inline
    def next_stage(state, f):
        block, (t, r, s) = state
        block = integer(block + 1)
        if block == f.blocks_in:
            block, s = integer(0), integer(s + 1)
            if s == f.taps_w:
                s, r = integer(0), integer(r + 1)
            if r == f.taps_h:
                r, t = integer(0), integer(t + 1)
        return block, (t, r, s)

    @ptx.inline
    def copy_stage(at, barrier, state, given):
        image, filters, pixel, first_o, f = given
        block, (t, r, s) = state
        n, d, h, w = pixel
        channel = integer(block * channels)
        if deep:
            offsets = integer(s * f.dilation_w), integer(r * f.dilation_h), integer(t * f.dilation_d)
            copy_pixels(at, image, barrier, (channel, w, h, d, n), offsets)
        else:
            offsets = integer(s * f.dilation_w), integer(r * f.dilation_h)
            copy_pixels(at, image, barrier, (channel, w, h, n), offsets)
        tap = integer(f.tap_first + f.tap_step * integer(integer(t * f.taps_h + r) * f.taps_w + s))
        if turned:
            for box in range(boxes):
                o = integer(first_o + box * LINE_ELEMS)
                copy_filter(word(at + a_bytes + box * box_bytes), filters, barrier, (o, tap, channel), ())
        else:
            copy_filter(word(at + a_bytes), filters, barrier, (channel, tap, first_o), ())
        return next_stage(state, f)

    product = wgmma_pipeline.tile_product(tile, kind, False, turned, copy_stage, planar)

    def window_gemm(maps, out, bias, residual, parts, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        tile_m, tile_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        first_pixel, first_o = integer(tile_m * extent_m), integer(tile_n * extent_n)
        set_barriers(shared, thread)
        if thread < extent_m:
            find_row(shared, thread, first_pixel, f)
        ptx.cuda.syncthreads()

        state, count = first_stage(f)
        n, d, h, w = located(first_pixel, f.positions_d, f.positions_h, f.positions_w)
        d, h, w = (
            integer(f.start_d + d * f.step_d),
            integer(f.start_h + h * f.step_h),
            integer(f.start_w + w * f.step_w),
        )
        image, filters = map_of(maps, integer(0)), map_of(maps, integer(1))
        if not product(shared, thread, count, state, (image, filters, (n, d, h, w), first_o, f)):
            return
        operands, scalars = (out, bias, residual, parts), (alpha, beta)
        if planar:
            columns = integer(f.channels_out - first_o)
            store_planar(shared, thread, first_o, columns, f.out_channel, f, operands, scalars)
        else:
            o = integer(first_o + (thread & (extent_n // 4 - 1)) * 4)
            store(shared, thread, o, o < f.channels_out, o, f, operands, scalars)

    data, real = ptx.pointer(variant.dtype), ptx.REAL["f32"]
    pointers = (data, data, data, ptx.pointer("f32"))
    return window_gemm, (ptx_tma.TensorMaps(2), *pointers, real, real, ptx.record(_Integers, 32))


def tile(m: int, n: int, min_blocks: int, stages: int) -> Tile:
    return Tile(m, n, LINE_BYTES, m // 16, 1, stages, min_blocks)


# Of guesses, by 300 measurements on an H200 (strides, three axes, dilation): a tile's stages beside each other's, and
# those whose lines of 128 bytes few channels fill in part.
_SLOWER = {(128, 256): 1.0, (128, 128): 0.9, (128, 64): 0.98, (64, 128): 1.05, (64, 64): 1.2}
_OF_PART_LINES = 1.5
TILES = (tile(128, 256, 1, 4), tile(128, 128, 2, 3), tile(128, 64, 2, 4), tile(64, 128, 3, 3), tile(64, 64, 4, 3))


class WgmmaCandidate(MmaCandidate):
    """What the three directions share."""

    algorithm, algo = "wgmma_gemm", None
    peak_share: ClassVar[dict[int, float]] = {9: 0.97}
    fill_stages: ClassVar[float] = 3.0

    def slower(self, problem: ConvProblem, tile: Tile) -> float:
        few = min(problem.c, problem.k) < tile.k_elems(data_type(problem))
        return _SLOWER[tile.m, tile.n] * (_OF_PART_LINES if few else 1.0)

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if device.capability[0] != 9:
            return Support(False, f"compute capability {device.capability}: wgmma is an instruction of 9.0 alone")
        if problem.groups != 1:
            return Support(False, f"{problem.groups} groups, one is known")
        if self.op == "conv_bwd_data" and max(problem.stride) > 1:
            return Support(False, f"stride {problem.stride}: image gradients of stride 1 are known")
        reason = refusal(problem)
        return Support(False, reason) if reason else super().supports(problem, device)


class WgmmaGemm(WgmmaCandidate):
    """Forward, and bwd_data of stride 1."""

    def integers(self, problem: ConvProblem, config: Config) -> _Integers:
        chosen, parts = config
        out = problem.operands[2]
        out_n, out_channel, *out_places = tensor_strides(out.shape, problem.y_channels_last)
        taps, forward = prod(problem.filter), self.op == "conv_fwd"
        backwards = forward == (problem.mode == "conv")
        integers = (
            part_elems(problem) if parts > 1 else 0,
            parts,
            ceil(out.shape[1] / chosen.n),
            out.shape[1],
            _blocks_in(problem),
            problem.n,
            out_n,
            out_channel,
            *out_places,
            *spatial3(out.shape[2:]),
            *spatial3(window(problem).lower[::-1], 0),
            *spatial3(problem.stride),
            *spatial3(problem.filter),
            *spatial3(problem.dilation),
            *((taps - 1, -1) if backwards else (0, 1)),
        )
        return _Integers._make(integers)

    def tiles(self, problem: ConvProblem) -> tuple[Tile, ...]:
        return fitting(TILES, pixels(problem), problem.operands[2].shape[1])

    def work(self, problem: ConvProblem, tile: Tile) -> Work:
        blocks = tiles_m(problem, tile) * ceil(problem.operands[2].shape[1] / tile.n)
        return Work(blocks, prod(problem.filter) * _blocks_in(problem))

    def turned_bytes(self, problem: ConvProblem) -> int:
        return turned_bytes(problem, filters_last(problem))

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        (chosen, parts), start_bytes, last = config, parts_bytes(problem, config), filters_last(problem)
        integers, forward = self.integers(problem, config), self.op == "conv_fwd"
        turned = not forward and not last
        epilogue = () if parts > 1 else problem.epilogue
        variant = _Variant(turned, problem.dtype, problem.ndim, epilogue, chosen, _run(problem))
        first, second = input_places(problem, start_bytes, last)
        image, filters = (first, second) if forward else (second, first)
        product = Launch(
            source=Source(_kernel, variant, chosen.threads + WARP, chosen.min_blocks),
            grid=(tiles_m(problem, chosen) * integers.tiles_n, parts, 1),
            pointers=(*output_pointers(problem), WORKSPACE),
            scalars="f32",
            integers=integers,
            dynamic_shared_bytes=shared_bytes(chosen),
            maps=(
                image_map(problem, image, chosen.m),
                (filters_last_map if last else filter_map)(problem, filters, LINE_ELEMS if turned else chosen.n),
            ),
        )
        add = [add_parts(problem, parts)] if parts > 1 else []
        return [*turn_inputs(problem, start_bytes, last), product, *add]


def _blocks_in(problem: ConvProblem) -> int:
    """Lines of channels that are summed."""
    return ceil(source_shape(problem)[1] / line_elems(problem.dtype))


def _run(problem: ConvProblem) -> int:
    """Pixels of the output that follow each other in a channel for certain."""
    out = problem.operands[2]
    if not is_planar(out):
        return 0
    return QUAD if out.strides[1] % QUAD == 0 else 1


FWD, BWD_DATA = ((WgmmaGemm(op), WgmmaGemm(op, tf32=True)) for op in ("conv_fwd", "conv_bwd_data"))
