"""Filter gradient as an implicit GEMM on the tensor cores (mma.sync): any stride, dilation, group and layout.

    dw[k, tap, c] = sum over pixels of  dy[pixel, k] * x[pixel reached by tap, c]

    m: filters of a group        n: (tap, c), c fastest, so that a tile may have several taps        k: pixels of dy

A stage of the pipeline is k_bytes of pixels: a row a pixel with the tile's filters (of dy) or taps and channels (of x),
copied in 16-byte chunks, those beyond a border as zeros; both operands lie turned. A thread copies the same chunk,
which is of one tap, of each `step`-th pixel, and walks from one to the next without dividing; where the one tap meets
every pixel, those of x are those of dy.

There are few tiles and many pixels, which are cut into parts, as many as fill the multiprocessors: their float32 sums
go to the workspace and are added in order. Planar images and dy are turned first; a dw with its taps last is written by
the addition, of one part too. Traffic: dy once for each tile of n, x once for each tap and tile of m, most of it from
cache; the parts. Accumulates in float32; TF32 rounds both factors to 10 bits. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.gemm_plan import (
    Config,
    MmaCandidate,
    Work,
    added_parts,
    data_type,
    fitting,
    parts_bytes,
    staged,
)
from nbdnn.kernels.cuda.gemm_tile import CHUNK_BYTES, Tile
from nbdnn.kernels.cuda.geometry import filter_gradient
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.turn_channels import channels_last, input_places, is_planar, turn_inputs
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem


class _Variant(NamedTuple):
    """What the kernel is compiled for. plain: one tap, which meets every pixel."""

    dtype: str
    ndim: int
    plain: bool
    epilogue: tuple[str, ...]
    tile: Tile


class _Integers(NamedTuple):
    """A bwd_filter in tiles: `FilterGradient`, with the columns of a group's product and what tiles and parts need.

    part_elems: from a part of the sums to the next, 0 where they go to dw at once.
    """

    part_elems: int
    parts: int
    tiles_m: int
    tiles_n: int
    n: int
    k: int
    columns: int
    positions: int
    out_d: int
    out_h: int
    out_w: int
    group_k: int
    group_c: int
    x_n: int
    x_d: int
    x_h: int
    x_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    w_start: int
    w_k: int
    w_t: int
    w_r: int
    w_s: int
    taps_d: int
    taps_h: int
    taps_w: int
    stride_d: int
    stride_h: int
    stride_w: int
    pad_d: int
    pad_h: int
    pad_w: int
    dilation_d: int
    dilation_h: int
    dilation_w: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import gemm_pipeline, gemm_pixels, gemm_store, gemm_tile, ptx, ptx_tile

    variant = _Variant(*specialised_on)
    tile, deep = variant.tile, variant.ndim == 3
    kind = "tf32" if variant.dtype == "f32" else variant.dtype
    side_a, side_b = gemm_tile.side_a(kind, tile, True), gemm_tile.side_b(kind, tile, True)
    integer, word = ptx.INTEGER[32], ptx.WORD

    # Pixels that a thread copies at a stage: the same chunk of each `step`-th.
    chunk_elems, k_elems, threads = CHUNK_BYTES // ITEMSIZE[variant.dtype], tile.k_elems(kind), tile.threads
    chunks_a, chunks_b = side_a.row_bytes // CHUNK_BYTES, side_b.row_bytes // CHUNK_BYTES
    step_a, step_b = threads // chunks_a, threads // chunks_b
    rows_a, rows_b = k_elems // step_a, k_elems // step_b
    step_a_bytes, step_b_bytes = step_a * side_a.row_bytes, step_b * side_b.row_bytes
    a_bytes, extent_m, extent_n, rows_at = tile.m * tile.k_bytes, tile.m, tile.n, tile.rows_at

    located, moved = gemm_pixels.located(), gemm_pixels.moved()
    place_a, place_b = gemm_tile.chunk_place(side_a), gemm_tile.chunk_place(side_b)
    copy, store_place = ptx_tile.COPY_ASYNC[CHUNK_BYTES], ptx_tile.STORE_SHARED[1]
    store = gemm_store.tile_store(variant.dtype, variant.epilogue, tile)

    @ptx.inline
    def tap_of(column, f):
        """(channel, t, r, s) of a column."""
        tap, channel = ptx.divided(column, f.group_c)
        _, t, r, s = located(tap, f.taps_d, f.taps_h, f.taps_w)
        return channel, t, r, s

    if variant.plain:

        @ptx.inline
        def pixel_of(number, f):
            return number

        @ptx.inline
        def copy_x(shared, x, pixel, of_x, step, f):
            to, start, alive, _ = of_x
            for i in range(rows_b):
                at = integer(pixel + i * step_b)
                size_bytes = integer(CHUNK_BYTES) if alive and at < f.positions else integer(0)
                copy(word(shared + to + i * step_b_bytes), ptx.address(x, integer(at * f.x_w + start)), size_bytes)
            return integer(pixel + k_elems)

    else:

        @ptx.inline
        def pixel_of(number, f):
            return located(number, f.out_d, f.out_h, f.out_w)

        @ptx.inline
        def copy_x(shared, x, pixel, of_x, step, f):
            to, start, alive, origin = of_x
            for i in range(rows_b):
                n, d, h, w = pixel
                at_h, at_w = integer(h * f.stride_h + origin[1]), integer(w * f.stride_w + origin[2])
                inside = ptx.inside(at_h, f.extent_h) & ptx.inside(at_w, f.extent_w) & ptx.inside(n, f.n)
                at = integer(start + n * f.x_n + at_h * f.x_h + at_w * f.x_w)
                if deep:
                    at_d = integer(d * f.stride_d + origin[0])
                    inside = inside & ptx.inside(at_d, f.extent_d)
                    at = integer(at + at_d * f.x_d)
                size_bytes = integer(CHUNK_BYTES) if alive and inside else integer(0)
                copy(word(shared + to + i * step_b_bytes), ptx.address(x, at), size_bytes)
                pixel = moved(pixel, step, f.out_d, f.out_h, f.out_w)
            return pixel

    @ptx.inline
    def first_stage(thread, f):
        """State of the first stage of this part: (this thread's first pixel of dy, that of x); and its stages."""
        every, _ = ptx.divided(integer(f.positions + k_elems - 1), integer(k_elems))
        a_part, _ = ptx.divided(integer(every + f.parts - 1), f.parts)
        first = integer(ptx.block_y() * a_part)
        row_a, _ = ptx.divided(thread, integer(chunks_a))
        row_b, _ = ptx.divided(thread, integer(chunks_b))
        pixel = pixel_of(integer(first * k_elems + row_b), f)
        return (integer(first * k_elems + row_a), pixel), integer(min(a_part, integer(every - first)))

    @ptx.inline
    def chunk_of_dy(thread, group, first_k, f):
        """(where a stage has this thread's first chunk, where a pixel of dy has it, whether it exists)."""
        row, chunk = ptx.divided(thread, integer(chunks_a))
        k = integer(first_k + chunk * chunk_elems)
        return place_a(row, chunk), integer(group * f.group_k + k), k < f.group_k

    @ptx.inline
    def chunk_of_x(thread, group, first_n, f):
        """The same of x, and what its tap reaches from pixel 0."""
        row, chunk = ptx.divided(thread, integer(chunks_b))
        column = integer(first_n + chunk * chunk_elems)
        channel, t, r, s = tap_of(column, f)
        origin = (
            integer(t * f.dilation_d - f.pad_d),
            integer(r * f.dilation_h - f.pad_h),
            integer(s * f.dilation_w - f.pad_w),
        )
        to = integer(place_b(row, chunk) + a_bytes)
        return to, integer(group * f.group_c + channel), column < f.columns, origin

    @ptx.inline
    def copy_stage(shared, state, given):
        x, dy, of_dy, of_x, step, f = given
        y_pixel, pixel = state
        to, start, alive = of_dy
        for i in range(rows_a):
            at = integer(y_pixel + i * step_a)
            size_bytes = integer(CHUNK_BYTES) if alive and at < f.positions else integer(0)
            copy(word(shared + to + i * step_a_bytes), ptx.address(dy, integer(at * f.k + start)), size_bytes)
        return integer(y_pixel + k_elems), copy_x(shared, x, pixel, of_x, step, f)

    product = gemm_pipeline.tile_product(tile, side_a, side_b, copy_stage)

    def filter_gemm(x, dy, dw, parts, alpha, beta, f):
        thread = integer(ptx.thread_x())
        shared = ptx_tile.dynamic_shared()

        # 1. Which tile of which group, and where each of its rows begins in dw.
        rest, tile_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        group, tile_m = ptx.divided(rest, f.tiles_m)
        first_k, first_n = integer(tile_m * extent_m), integer(tile_n * extent_n)
        row = thread
        while row < extent_m:
            k = integer(first_k + row)
            place = integer((group * f.group_k + k) * f.w_k) if k < f.group_k else integer(-1)
            store_place(word(shared + rows_at + 4 * row), word(place))
            row = integer(row + threads)

        # 2. The products over this part's pixels.
        step = located(integer(step_b), f.out_d, f.out_h, f.out_w)
        of_dy, of_x = chunk_of_dy(thread, group, first_k, f), chunk_of_x(thread, group, first_n, f)
        state, count = first_stage(thread, f)
        product(shared, thread, count, state, (x, dy, of_dy, of_x, step, f))

        # 3. From shared memory to dw, or to this part's place in the workspace.
        column = integer(first_n + (thread & (extent_n // 4 - 1)) * 4)
        channel, t, r, s = tap_of(column, f)
        place = integer(f.w_start + t * f.w_t + r * f.w_r + s * f.w_s + channel)
        store(shared, thread, place, column < f.columns, channel, f, (dw, dw, dw, parts), (alpha, beta))

    data, real = ptx.pointer(variant.dtype), ptx.REAL["f32"]
    return filter_gemm, (data, data, data, ptx.pointer("f32"), real, real, ptx.record(_Integers, 32))


def _extents(problem: ConvProblem) -> tuple[int, int]:
    """Rows and columns of a group's product: its filters, and taps times channels."""
    return problem.k // problem.groups, prod(problem.filter) * problem.c // problem.groups


class MmaGemmFilter(MmaCandidate):
    """bwd_filter on mma.sync."""

    fill_stages = 1.0

    def integers(self, problem: ConvProblem, config: Config) -> _Integers:
        chosen, parts = config
        g = filter_gradient(channels_last(problem), chosen.m, chosen.n)
        _, columns = _extents(problem)
        own = {
            "part_elems": part_elems(problem) if added_parts(problem, config) else 0,
            "parts": parts,
            "tiles_m": g.tiles_k,
            "tiles_n": ceil(columns / chosen.n),
            "n": problem.n,
            "k": problem.k,
            "columns": columns,
        }
        return _Integers(**{name: own[name] if name in own else getattr(g, name) for name in _Integers._fields})

    def tiles(self, problem: ConvProblem) -> tuple[Tile, ...]:
        every = (
            staged(128, 128, 2, 2, 128, 2),
            staged(64, 128, 2, 2, 128, 3),
            staged(128, 64, 2, 2, 128, 3),
            staged(64, 64, 2, 2, 128, 4),
            staged(64, 64, 2, 2, 128, 2, deep=True),
        )
        return fitting(every, *_extents(problem))

    def work(self, problem: ConvProblem, tile: Tile) -> Work:
        rows, columns = _extents(problem)
        blocks = problem.groups * ceil(rows / tile.m) * ceil(columns / tile.n)
        pixels = problem.n * prod(problem.out_spatial)
        return Work(blocks, ceil(pixels / tile.k_elems(data_type(problem))))

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        chosen, start_bytes, parts = config.tile, parts_bytes(problem, config), added_parts(problem, config)
        plain = {*problem.filter, *problem.stride} == {1} and not any(map(sum, problem.pad))
        variant = _Variant(problem.dtype, problem.ndim, plain, () if parts else problem.epilogue, chosen)
        product = Launch(
            source=Source(_kernel, variant, chosen.threads, chosen.min_blocks),
            grid=(self.work(problem, chosen).blocks, config.parts, 1),
            pointers=(*input_places(problem, start_bytes), 2, WORKSPACE),
            scalars="f32",
            integers=self.integers(problem, config),
            dynamic_shared_bytes=chosen.shared_bytes,
        )
        add = [add_parts(problem, parts, is_planar(problem.operands[2]))] if parts else []
        return [*turn_inputs(problem, start_bytes), product, *add]


BWD_FILTER = MmaGemmFilter("conv_bwd_filter"), MmaGemmFilter("conv_bwd_filter", tf32=True)
