"""Filter gradient on the matrix units of Hopper (wgmma), fed by TMA: any stride and dilation.

    dw[k, tap, c] = sum over pixels of  dy[pixel, k] * x[pixel reached by tap, c]

    rows of a: filters, m of a block        columns of b: channels of one tap, n        k: 64 pixels of dy at a stage

Both operands lie turned, a line a pixel, which the instruction reads as they are. TMA gives the pixels of dy as they
follow each other and those of x as the windows meet them, moved by the tap; zeros beyond a border or the last pixel.

There are few tiles and many pixels, which are cut into parts, as many as fill the multiprocessors: their float32 sums
go to the workspace and are added in order. Planar images and dy are turned first; a dw with its taps last is written by
the addition, of one part too. Traffic: dy once for each tap and tile of n, x once for each tap and tile of m, most of
it from cache; the parts. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import ClassVar, NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.conv_wgmma import TILES, WgmmaCandidate
from nbdnn.kernels.cuda.gemm_plan import Config, Work, added_parts, fitting, parts_bytes
from nbdnn.kernels.cuda.gemm_tile import Tile
from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.turn_channels import channels_last, input_places, is_planar, turn_inputs
from nbdnn.kernels.cuda.wgmma_maps import gradient_map, image_map, window
from nbdnn.kernels.cuda.wgmma_pipeline import LINE_BYTES, LINE_ELEMS, WARP, shared_bytes
from nbdnn.kernels.spatial import spatial3
from nbdnn.problem_conv import ConvProblem

_ONE_TAP = 1.3  # 20 layers of 1x1, of 6.6 to 24 us, took so many times what is guessed (H200)


class _Variant(NamedTuple):
    """What the kernel is compiled for."""

    dtype: str
    ndim: int
    epilogue: tuple[str, ...]
    tile: Tile


class _Integers(NamedTuple):
    """What a block knows beyond its maps. part_elems: from a part of the sums to the next, 0 where they go to dw."""

    part_elems: int
    parts: int
    tiles_n: int
    k: int
    channels: int
    stages: int
    out_d: int
    out_h: int
    out_w: int
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
    w_start: int
    w_k: int
    w_c: int
    w_t: int
    w_r: int
    w_s: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import gemm_pixels, gemm_store, ptx, ptx_tile, ptx_tma, wgmma_pipeline

    variant = _Variant(*specialised_on)
    tile, deep = variant.tile, variant.ndim == 3
    integer, word = ptx.INTEGER[32], ptx.WORD
    extent_m, extent_n, a_bytes, rows_at = tile.m, tile.n, tile.m * LINE_BYTES, tile.rows_at
    boxes_a, boxes_b, box_bytes = tile.m // LINE_ELEMS, tile.n // LINE_ELEMS, wgmma_pipeline.BOX_BYTES

    located, moved = gemm_pixels.located(), gemm_pixels.moved()
    set_barriers = wgmma_pipeline.set_barriers(tile)
    copy_pixels, copy_gradients = ptx_tma.COPY_PIXELS[variant.ndim], ptx_tma.COPY_BOX[2]
    store_place, map_of = ptx_tile.STORE_SHARED[1], ptx_tma.map_of
    store = gemm_store.tile_store(variant.dtype, variant.epilogue, tile)

    @ptx.inline
    def first_stage(f):
        """State of the first stage of this part: its first pixel, as a number and by axes; and its stages."""
        a_part, _ = ptx.divided(integer(f.stages + f.parts - 1), f.parts)
        first = integer(ptx.block_y() * a_part)
        pixel = integer(first * LINE_ELEMS)
        return (pixel, located(pixel, f.out_d, f.out_h, f.out_w)), integer(min(a_part, integer(f.stages - first)))

    @ptx.inline
    def copy_stage(at, barrier, state, given):
        x, dy, offsets, first_k, first_c, step, f = given
        number, pixel = state
        for box in range(boxes_a):
            k = integer(first_k + box * LINE_ELEMS)
            copy_gradients(word(at + box * box_bytes), dy, barrier, (k, number), ())
        n, d, h, w = pixel
        d, h, w = (
            integer(f.start_d + d * f.step_d),
            integer(f.start_h + h * f.step_h),
            integer(f.start_w + w * f.step_w),
        )
        for box in range(boxes_b):
            to, c = word(at + a_bytes + box * box_bytes), integer(first_c + box * LINE_ELEMS)
            if deep:
                copy_pixels(to, x, barrier, (c, w, h, d, n), offsets)
            else:
                copy_pixels(to, x, barrier, (c, w, h, n), (offsets[0], offsets[1]))
        return integer(number + LINE_ELEMS), moved(pixel, step, f.out_d, f.out_h, f.out_w)

    product = wgmma_pipeline.tile_product(tile, variant.dtype, True, True, copy_stage)

    def filter_gemm(maps, dw, parts, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        rest, tile_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        tile_m, tap = ptx.divided(rest, integer(f.taps_d * f.taps_h * f.taps_w))
        _, t, r, s = located(tap, f.taps_d, f.taps_h, f.taps_w)
        first_k, first_c = integer(tile_m * extent_m), integer(tile_n * extent_n)
        set_barriers(shared, thread)
        if thread < extent_m:
            k = integer(first_k + thread)
            store_place(word(shared + rows_at + 4 * thread), word(integer(k * f.w_k) if k < f.k else integer(-1)))
        ptx.cuda.syncthreads()

        state, count = first_stage(f)
        offsets = integer(s * f.dilation_w), integer(r * f.dilation_h), integer(t * f.dilation_d)
        step = located(integer(LINE_ELEMS), f.out_d, f.out_h, f.out_w)
        x, dy = map_of(maps, integer(0)), map_of(maps, integer(1))
        if product(shared, thread, count, state, (x, dy, offsets, first_k, first_c, step, f)):
            c = integer(first_c + (thread & (extent_n // 4 - 1)) * 4)
            place = integer(f.w_start + t * f.w_t + r * f.w_r + s * f.w_s + c)
            store(shared, thread, place, c < f.channels, c, f, (dw, dw, dw, parts), (alpha, beta))

    data, real = ptx.pointer(variant.dtype), ptx.REAL["f32"]
    return filter_gemm, (ptx_tma.TensorMaps(2), data, ptx.pointer("f32"), real, real, ptx.record(_Integers, 32))


class WgmmaGemmFilter(WgmmaCandidate):
    """bwd_filter."""

    # Fitted to 26 layers on an H200, of which 24 have taps of 3x3 and more.
    peak_share: ClassVar[dict[int, float]] = {9: 1.3}
    fill_stages = 4.0

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        us = super().estimate(problem, config, device)
        return us * _ONE_TAP if prod(problem.filter) == 1 else us

    def integers(self, problem: ConvProblem, config: Config) -> _Integers:
        chosen, parts = config
        start, *strides = filter_strides(channels_last(problem))
        integers = (
            part_elems(problem) if added_parts(problem, config) else 0,
            parts,
            ceil(problem.c / chosen.n),
            problem.k,
            problem.c,
            ceil(problem.n * prod(problem.out_spatial) / LINE_ELEMS),
            *spatial3(problem.out_spatial),
            *spatial3(window(problem).lower[::-1], 0),
            *spatial3(problem.stride),
            *spatial3(problem.filter),
            *spatial3(problem.dilation),
            start,
            *strides,
        )
        return _Integers._make(integers)

    def tiles(self, problem: ConvProblem) -> tuple[Tile, ...]:
        return fitting(TILES, problem.k, problem.c)

    def work(self, problem: ConvProblem, tile: Tile) -> Work:
        blocks = ceil(problem.k / tile.m) * ceil(problem.c / tile.n) * prod(problem.filter)
        return Work(blocks, ceil(problem.n * prod(problem.out_spatial) / LINE_ELEMS))

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        chosen, start_bytes, parts = config.tile, parts_bytes(problem, config), added_parts(problem, config)
        variant = _Variant(problem.dtype, problem.ndim, () if parts else problem.epilogue, chosen)
        image, gradients = input_places(problem, start_bytes)
        product = Launch(
            source=Source(_kernel, variant, chosen.threads + WARP, chosen.min_blocks),
            grid=(self.work(problem, chosen).blocks, config.parts, 1),
            pointers=(2, WORKSPACE),
            scalars="f32",
            integers=self.integers(problem, config),
            dynamic_shared_bytes=shared_bytes(chosen),
            maps=(image_map(problem, image, LINE_ELEMS), gradient_map(problem, gradients)),
        )
        add = [add_parts(problem, parts, is_planar(problem.operands[2]))] if parts else []
        return [*turn_inputs(problem, start_bytes), product, *add]


BWD_FILTER = WgmmaGemmFilter("conv_bwd_filter")
