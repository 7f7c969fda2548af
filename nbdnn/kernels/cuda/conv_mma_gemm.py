"""Implicit GEMM on the tensor cores (mma.sync): forward and bwd_data of any stride, dilation, group and layout.

    out[pixel, o] = sum over taps, i of  image[pixel reached by tap, i] * w[o, tap, i]
    rows of a: pixels, m of a block         columns of b: output channels, n         k: taps, within them channels

A stage of the pipeline is k_bytes of the channels of one tap: 16-byte chunks of `image` and `w` are copied to shared
memory asynchronously, those beyond a border or the last channel as zeros, two or three stages ahead of the products.
A thread copies the same chunk of a few rows at every stage. Of each row it keeps the offset of its pixel and a bit for
each tap row and column, whether it falls inside the image, so that a chunk costs an addition and two shifts.

bwd_data is the same on dy, with the filter's rows as k (its tile lies turned in shared memory). With strides, the
pixels of dx whose position has one residue on each axis see the same taps; a block takes pixels of one residue, on
which the sum is again a convolution of stride 1, with every (stride / gcd(stride, dilation))-th tap.

A reduction may be cut into parts, for as many more blocks: their sums go to the workspace and are added in order.
An image or filter whose channels are not last in memory is turned first; a planar output is stored as it is, pixels of
a channel together. Traffic: image once from memory, taps * n tiles times from cache; w once a row of tiles. Accumulates
in float32; TF32 rounds both factors to 10 bits. Source: own; the pipeline's shape is known from CUTLASS.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.add_parts import add_parts
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.gemm_gather import GatherTiles, gather_tiles, pixels, residues, tiles_m
from nbdnn.kernels.cuda.gemm_plan import Config, MmaCandidate, Work, data_type, fitting, parts_bytes, staged
from nbdnn.kernels.cuda.gemm_tile import CHUNK_BYTES, Tile
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, output_pointers
from nbdnn.kernels.cuda.quads import QUAD
from nbdnn.kernels.cuda.turn_channels import input_places, is_planar, turn_inputs
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

# Bits that say which taps of an axis fall inside: of (depth, height, width) from these on, in 32.
_TAP_BITS = {2: (0, 0, 16), 3: (0, 10, 21)}
_MOST_TAPS = {2: (1, 16, 16), 3: (10, 11, 11)}


class _Variant(NamedTuple):
    """What a kernel is compiled for. run: pixels of a planar output that are stored at once, 0 if it is not planar."""

    forward: bool
    dtype: str
    ndim: int
    epilogue: tuple[str, ...]
    tile: Tile
    run: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import gemm_gather, gemm_pipeline, gemm_pixels, gemm_store, gemm_tile, ptx, ptx_tile

    variant = _Variant(*specialised_on)
    forward, deep, tile, planar = variant.forward, variant.ndim == 3, variant.tile, variant.run > 0
    kind = "tf32" if variant.dtype == "f32" else variant.dtype
    side_a, side_b = gemm_tile.side_a(kind, tile, False), gemm_tile.side_b(kind, tile, not forward)
    integer, word = ptx.INTEGER[32], ptx.WORD

    # Rows and chunks that a thread copies at a stage: the same chunk of each `step`-th row.
    chunk_elems, k_elems, threads = CHUNK_BYTES // ITEMSIZE[variant.dtype], tile.k_elems(kind), tile.threads
    chunks_a, chunks_b = tile.k_bytes // CHUNK_BYTES, side_b.row_bytes // CHUNK_BYTES
    step_a, step_b = threads // chunks_a, threads // chunks_b
    rows_a, rows_b = tile.m // step_a, (tile.n if forward else k_elems) // step_b
    step_a_bytes, step_b_bytes = step_a * tile.k_bytes, step_b * side_b.row_bytes
    a_bytes, extent_m, extent_n, rows_at = tile.m * tile.k_bytes, tile.m, tile.n, tile.rows_at
    bit_d, bit_h, bit_w = _TAP_BITS[variant.ndim]

    located, moved = gemm_pixels.located(), gemm_pixels.moved()
    axis = gemm_gather.whole_axis() if forward else gemm_gather.residue_axis()
    place_a, place_b = gemm_tile.chunk_place(side_a), gemm_tile.chunk_place(side_b)
    copy, store_place = ptx_tile.COPY_ASYNC[CHUNK_BYTES], ptx_tile.STORE_SHARED[1]
    store = gemm_store.tile_store(variant.dtype, variant.epilogue, tile)
    store_planar = gemm_store.planar_store(variant.dtype, variant.epilogue, tile, max(variant.run, 1))

    @ptx.inline
    def axes_of(residue, f):
        """What the block's pixels are on depth, height and width."""
        d, h, w = integer(0), integer(0), integer(0)
        if not forward:
            _, d, h, w = located(residue, f.stride_d, f.stride_h, f.stride_w)
        return (
            axis(d, f.positions_d, f.taps_d, f.stride_d, f.pad_d, f.dilation_d, f.tap_d, f.lift_d),
            axis(h, f.positions_h, f.taps_h, f.stride_h, f.pad_h, f.dilation_h, f.tap_h, f.lift_h),
            axis(w, f.positions_w, f.taps_w, f.stride_w, f.pad_w, f.dilation_w, f.tap_w, f.lift_w),
        )

    @ptx.inline
    def find_rows(shared, thread, first_pixel, axes, at, starts, f):
        """Where this thread's rows of a begin in the image, and to shared memory, where each in the output.

        at: (depth, height, width) of what the first tap reaches.
        """
        by_d, by_h, by_w = axes
        row, chunk = ptx.divided(thread, integer(chunks_a))
        pixel = located(integer(first_pixel + row), by_d.pixels, by_h.pixels, by_w.pixels)
        step = located(integer(step_a), by_d.pixels, by_h.pixels, by_w.pixels)
        for i in range(rows_a):
            n, d, h, w = pixel
            at[0][i] = integer(d * by_d.in_step + by_d.in_start)
            at[1][i] = integer(h * by_h.in_step + by_h.in_start)
            at[2][i] = integer(w * by_w.in_step + by_w.in_start)
            start = integer(n * f.in_n + at[0][i] * f.in_d + at[1][i] * f.in_h + at[2][i] * f.in_w)
            starts[i] = integer(start + chunk * chunk_elems)
            in_plane = integer(
                (by_h.out_start + h * by_h.out_step) * f.out_h + (by_w.out_start + w * by_w.out_step) * f.out_w
            )
            place = integer(n * f.out_n + (by_d.out_start + d * by_d.out_step) * f.out_d + in_plane)
            if n >= f.n:
                place = integer(-1)
                at[1][i] = integer(-(1 << 30))  # no tap reaches from there
            if chunk == 0:
                store_place(word(shared + rows_at + 4 * (row + i * step_a)), word(place))
            pixel = moved(pixel, step, by_d.pixels, by_h.pixels, by_w.pixels)

    @ptx.inline
    def mark(bits, at, taps, reach, extent, first_bit):
        """A bit of each row for each tap of an axis that falls inside the image."""
        tap = integer(0)
        while tap < taps:
            for i in range(rows_a):
                inside = ptx.inside(integer(at[i] + tap * reach), extent)
                bits[i] = integer(bits[i] | ptx.shift_left(inside, integer(first_bit + tap)))
            tap = integer(tap + 1)

    @ptx.inline
    def tap_place(tap, axes, f):
        """Where a tap (t, r, s) lies in the image, from the first one, and in the filter; its bits."""
        t, r, s = tap
        in_at = integer(r * f.reach_h * f.in_h + s * f.reach_w * f.in_w)
        w_at = integer((axes[1].first_tap + r * f.tap_h) * f.w_r + (axes[2].first_tap + s * f.tap_w) * f.w_s)
        one = integer(1)
        own_bits = ptx.shift_left(one, integer(bit_h + r)) | ptx.shift_left(one, integer(bit_w + s))
        if deep:
            in_at = integer(in_at + t * f.reach_d * f.in_d)
            w_at = integer(w_at + (axes[0].first_tap + t * f.tap_d) * f.w_t)
            own_bits = own_bits | ptx.shift_left(one, integer(bit_d + t))
        return in_at, w_at, integer(own_bits)

    @ptx.inline
    def next_stage(state, axes, f):
        """State of a stage: (first channel, tap, its place)."""
        channel, tap, at = state
        channel = integer(channel + k_elems)
        if channel >= f.group_in:
            t, r, s = tap
            channel, s = integer(0), integer(s + 1)
            if s >= axes[2].taps:
                s, r = integer(0), integer(r + 1)
            if r >= axes[1].taps:
                r, t = integer(0), integer(t + 1)
            tap = t, r, s
            at = tap_place(tap, axes, f)
        return channel, tap, at

    @ptx.inline
    def first_stage(taps, axes, f):
        """State of the first stage of this part, and how many stages it has."""
        blocks, _ = ptx.divided(integer(f.group_in + k_elems - 1), integer(k_elems))
        count = integer(taps * blocks)
        tap, block = (integer(0), integer(0), integer(0)), integer(0)
        if f.parts > 1 and count > 0:
            a_part, _ = ptx.divided(integer(count + f.parts - 1), f.parts)
            first = integer(ptx.block_y() * a_part)
            count = integer(min(a_part, integer(count - first)))
            first_tap, block = ptx.divided(first, blocks)
            rest, s = ptx.divided(first_tap, axes[2].taps)
            t, r = ptx.divided(rest, axes[1].taps)
            tap = t, r, s
        return (integer(block * k_elems), tap, tap_place(tap, axes, f)), count

    @ptx.inline
    def rows_of_b(thread, group, first_o, f):
        """Where this thread's chunk of b begins in the filter, and a bit for each of its rows that exists."""
        row, chunk = ptx.divided(thread, integer(chunks_b))
        start, bits = integer(f.w_start + group * f.w_g + chunk * chunk_elems), integer(0)
        if forward:
            start = integer(start + (first_o + row) * f.w_o)
            for i in range(rows_b):
                alive = ptx.inside(integer(first_o + row + i * step_b), f.group_out)
                bits = integer(bits | (alive << i))
        else:
            start = integer(start + first_o + row * f.w_i)
            bits = ptx.inside(integer(first_o + chunk * chunk_elems), f.group_out)
        return start, bits

    @ptx.inline
    def copy_stage(shared, state, given):
        image, w, thread, starts, bits, w_start, w_bits, axes, f = given
        channel, _, at = state
        row, chunk = ptx.divided(thread, integer(chunks_a))
        whole = integer(CHUNK_BYTES if channel + chunk * chunk_elems < f.group_in else 0)
        in_at, w_at = integer(at[0] + channel), integer(at[1] + channel * f.w_i + w_start)
        to_a = place_a(row, chunk)
        for i in range(rows_a):
            size_bytes = whole if bits[i] & at[2] == at[2] else integer(0)
            source = ptx.address(image, integer(starts[i] + in_at))
            copy(word(shared + to_a + i * step_a_bytes), source, size_bytes)
        row, chunk = ptx.divided(thread, integer(chunks_b))
        to_b = integer(place_b(row, chunk) + a_bytes)
        for i in range(rows_b):
            if forward:
                size_bytes = whole if (w_bits >> i) & 1 else integer(0)
                source = ptx.address(w, integer(w_at + i * step_b * f.w_o))
            else:
                k = integer(channel + row + i * step_b)
                size_bytes = integer(CHUNK_BYTES) if w_bits and k < f.group_in else integer(0)
                source = ptx.address(w, integer(w_at + i * step_b * f.w_i))
            copy(word(shared + to_b + i * step_b_bytes), source, size_bytes)
        return next_stage(state, axes, f)

    product = gemm_pipeline.tile_product(tile, side_a, side_b, copy_stage, planar)

    def gather_gemm(image, w, out, bias, residual, parts, alpha, beta, f):
        thread = integer(ptx.thread_x())
        shared = ptx_tile.dynamic_shared()

        # 1. Which tile of which group, on pixels of which residue.
        rest, tile_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        rest, tile_m = ptx.divided(rest, f.tiles_m)
        residue, group = (integer(0), rest) if forward else ptx.divided(rest, f.groups)
        axes = axes_of(residue, f)
        by_d, by_h, by_w = axes
        first_pixel, first_o = integer(tile_m * extent_m), integer(tile_n * extent_n)
        if first_pixel >= f.n * by_d.pixels * by_h.pixels * by_w.pixels:
            return

        # 2. The rows of a and b that this thread copies.
        starts, bits = ptx.cuda.local.array(rows_a, integer), ptx.cuda.local.array(rows_a, integer)
        at_d = ptx.cuda.local.array(rows_a, integer)
        at_h = ptx.cuda.local.array(rows_a, integer)
        at_w = ptx.cuda.local.array(rows_a, integer)
        find_rows(shared, thread, first_pixel, axes, (at_d, at_h, at_w), starts, f)
        for i in range(rows_a):
            starts[i] = integer(starts[i] + group * f.group_in)
            bits[i] = integer(0)
        if deep:
            mark(bits, at_d, by_d.taps, f.reach_d, f.extent_d, bit_d)
        mark(bits, at_h, by_h.taps, f.reach_h, f.extent_h, bit_h)
        mark(bits, at_w, by_w.taps, f.reach_w, f.extent_w, bit_w)
        w_start, w_bits = rows_of_b(thread, group, first_o, f)

        # 3. The products, and from shared memory to the output or to this part's place in the workspace.
        state, count = first_stage(integer(by_d.taps * by_h.taps * by_w.taps), axes, f)
        product(shared, thread, count, state, (image, w, thread, starts, bits, w_start, w_bits, axes, f))
        operands, scalars = (out, bias, residual, parts), (alpha, beta)
        if planar:
            channel, columns = integer(group * f.group_out + first_o), integer(f.group_out - first_o)
            store_planar(shared, thread, channel, columns, f.out_channel, f, operands, scalars)
        else:
            o = integer(first_o + (thread & (extent_n // 4 - 1)) * 4)
            channel = integer(group * f.group_out + o)
            store(shared, thread, channel, o < f.group_out, channel, f, operands, scalars)

    data, real = ptx.pointer(variant.dtype), ptx.REAL["f32"]
    pointers = (data, data, data, data, data, ptx.pointer("f32"))
    return gather_gemm, (*pointers, real, real, ptx.record(GatherTiles, 32))


class MmaGemm(MmaCandidate):
    """Forward and bwd_data on mma.sync."""

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        most = _MOST_TAPS[problem.ndim][3 - problem.ndim :]
        for extent, limit in zip(problem.filter, most, strict=True):
            if extent > limit:
                return Support(False, f"filter extent {extent} is above {limit}")
        return super().supports(problem, device)

    def integers(self, problem: ConvProblem, config: Config) -> GatherTiles:
        return gather_tiles(problem, *config)

    def tiles(self, problem: ConvProblem) -> tuple[Tile, ...]:
        group_out, group_in = self._channels(problem)
        k_bytes = 64 if group_in * ITEMSIZE[problem.dtype] % 128 else 128
        every = (
            staged(128, 128, 2, 2, k_bytes, 2),
            staged(256, 64, 4, 1, 64, 2),
            staged(128, 64, 2, 2, k_bytes, 3),
            staged(64, 64, 2, 2, k_bytes, 4),
            staged(128, 32, 4, 1, k_bytes, 4) if group_out < 64 else staged(64, 64, 2, 2, k_bytes, 2, deep=True),
            *([staged(128, 128, 2, 4, 64, 2)] if k_bytes == 128 else []),
        )
        return fitting(every, pixels(problem), group_out)

    def _channels(self, problem: ConvProblem) -> tuple[int, int]:
        """Of a group: those of the output, and those that are summed."""
        k, c = problem.k // problem.groups, problem.c // problem.groups
        return (k, c) if self.op == "conv_fwd" else (c, k)

    def work(self, problem: ConvProblem, tile: Tile) -> Work:
        group_out, group_in = self._channels(problem)
        kinds = residues(problem)
        blocks = kinds * problem.groups * tiles_m(problem, tile) * ceil(group_out / tile.n)
        of_tap = ceil(group_in / tile.k_elems(data_type(problem)))
        most_taps = prod(ceil(taps / u) for taps, u in zip(problem.filter, problem.stride, strict=True))
        return Work(blocks, prod(problem.filter) * of_tap / kinds, most_taps * of_tap if kinds > 1 else 0)

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        (chosen, parts), start_bytes = config, parts_bytes(problem, config)
        integers, forward = gather_tiles(problem, *config), self.op == "conv_fwd"
        epilogue = () if parts > 1 else problem.epilogue
        variant = _Variant(forward, problem.dtype, problem.ndim, epilogue, chosen, _run(problem))
        first, second = input_places(problem, start_bytes)
        product = Launch(
            source=Source(_kernel, variant, chosen.threads, chosen.min_blocks),
            grid=(residues(problem) * problem.groups * integers.tiles_m * integers.tiles_n, parts, 1),
            pointers=(*((first, second) if forward else (second, first)), *output_pointers(problem), WORKSPACE),
            scalars="f32",
            integers=integers,
            dynamic_shared_bytes=chosen.shared_bytes,
        )
        add = [add_parts(problem, parts)] if parts > 1 else []
        return [*turn_inputs(problem, start_bytes), product, *add]


def _run(problem: ConvProblem) -> int:
    """Pixels of the output that follow each other in a channel for certain: a tile's rows are those of one residue."""
    out = problem.operands[2]
    if not is_planar(out):
        return 0
    return QUAD if out.strides[1] % QUAD == 0 and residues(problem) == 1 else 1


FWD, BWD_DATA = ((MmaGemm(op), MmaGemm(op, tf32=True)) for op in ("conv_fwd", "conv_bwd_data"))
