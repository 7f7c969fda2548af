"""Depthwise bwd_filter: each tap of a channel sums x times dy over the positions of dy.

    dw[k, r, s] = sum over n, p, q of  x[n, k // m, p*u + r*d - pad, q*u + s*d - pad] * dy[n, k, p, q]

    thread     tiles of dy, one after the other, of one channel or, channels-last, of a vector of channels: the sums of
               a few taps in registers (all of 3x3; of larger filters a row, or 8 taps of a row)
    block      every row of the filter, so that they find dy in cache; its threads' sums are added in shared memory
    grid       tiles are split among blocks; a second kernel adds the parts. All have the same to do, so there are as
               many as run at once, or twice that

Everything is added in a fixed order. Traffic: x and dy once from memory, again from cache for each row of taps. Work:
one partial sum a tap, channel and split. Accumulates in float32, one rounding a product and sum. Source: own.
"""

from __future__ import annotations

from math import ceil

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import depthwise_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.depthwise_filter_plan import Reciprocals, Sums, Variant, sums, variants
from nbdnn.kernels.cuda.depthwise_plan import THREADS
from nbdnn.kernels.cuda.depthwise_tile import Tile
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.filter_parts import sum_of_parts
from nbdnn.kernels.cuda.geometry import index_bits, input_reached
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.problem_conv import ConvProblem

_SUM_US = 2.0  # of the second kernel


def _partial_sums(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile, ptx_vector, ptx_vector_rows

    v = Variant(*specialised_on)
    integer, u32, real = ptx.INTEGER[v.bits], ptx.types.uint32, ptx.REAL["f32"]
    lanes, width, sums_held, team, exchanges = v.lanes, v.width, v.sums, v.team, v.team.bit_length() - 1
    (tile_h, tile_w), (rows, stride_h, _, dilation_h), (columns, stride_w, _, dilation_w) = v.tile, v.rows, v.columns
    planar_x, planar_y, load_shared = not v.x_last, not v.y_last, ptx_tile.LOAD_SHARED[1]
    zeros, reached, source_type = ptx_vector.zeros(v.sums), input_reached(True, v.bits), ptx_vector_rows.Source
    multiply = ptx_vector_rows.multiply_rows(ptx_vector_rows.Rows(v.dtype, lanes, v.row.offsets, v.steps))
    dy_offsets = tuple(range(0, tile_w, 1 if v.y_last else lanes))
    load_dy = ptx_vector_rows.load_rows(v.dtype, lanes, dy_offsets, tile_h)

    @ptx.inline
    def digits(number, f, by):
        """(image, depth, row, column) of a tile, or of a number of tiles."""
        rest, column = ptx.split(number, f.tiles_w, by.tiles_w, by.tiles_w_shift)
        rest, row = ptx.split(rest, f.tiles_h, by.tiles_h, by.tiles_h_shift)
        n, d = ptx.split(rest, f.out_d, by.out_d, by.out_d_shift)
        return n, d, row, column

    @ptx.inline
    def carried(digit, base):
        return (integer(digit - base), integer(1)) if digit >= base else (digit, integer(0))

    @ptx.inline
    def tap_of(role, f, by):
        """First (depth, row, column) of the taps of a role."""
        rest, piece = ptx.split(role, f.role_w, by.role_w, by.role_w_shift)
        t, group = ptx.split(rest, f.role_h, by.role_h, by.role_h_shift)
        return t, integer(group * rows), integer(piece * columns)

    @ptx.inline
    def add_tile(sums, x, dy, at_d, row, column, x_at, y_at, down, along, f):
        """A tile of dy times what the taps `down` and `along` from the first of the filter take of x."""
        if at_d >= 0:
            y_w, x_w = integer(1) if planar_y else f.y_w, integer(1) if planar_x else f.x_w
            y_row, y_column = integer(row * tile_h), integer(column * tile_w)
            x_row, x_column = integer(y_row * stride_h + down), integer(y_column * stride_w + along)
            gradient = load_dy(source_type(dy, y_at, y_row, f.y_h, f.out_h, y_column, y_w, f.out_w))
            image_at = integer(x_at + at_d * f.x_d)
            image = source_type(x, image_at, x_row, f.x_h, f.extent_h, x_column, x_w, f.extent_w)
            sums = multiply(sums, gradient, image, image)
        return sums

    @ptx.inline
    def store_part(total, m, cell, slab, role_block, split, parts, f, by):
        """A tap's sum of a block: m is (row, column, lane) of a thread's sums."""
        role, vector = ptx.split(cell, f.vectors, by.vectors, by.vectors_shift)
        t, r, s = tap_of(integer(role_block * f.block_roles + role), f, by)
        tap, lane = ptx.divided(m, integer(width))
        down, along = ptx.divided(tap, integer(columns))
        channel = integer((slab * f.vectors + vector) * width + lane)
        if channel < f.k and t * f.taps_h * f.taps_w < f.taps and s + along < f.taps_w:
            at = integer(channel * f.taps + (t * f.taps_h + r + down) * f.taps_w + s + along)
            parts[integer(at * f.splits + split)] = total

    def partial_sums(x, dy, parts, f, by):
        # 1. Where a thread is.
        thread = integer(ptx.thread_x())
        rest, slab = ptx.split(integer(ptx.block_x()), f.slabs, by.slabs, by.slabs_shift)
        split, role_block = ptx.split(rest, f.role_blocks, by.role_blocks, by.role_blocks_shift)
        in_block, cell = ptx.split(thread, f.cells, by.cells, by.cells_shift)
        role, vector = ptx.split(cell, f.vectors, by.vectors, by.vectors_shift)
        role = integer(role_block * f.block_roles + role)
        channel = integer((slab * f.vectors + vector) * width)
        i, stop = integer(split * f.chunk + in_block), integer(min(f.tiles, integer((split + 1) * f.chunk)))
        if in_block >= f.block_tiles or role >= f.roles or channel >= f.k:
            i = stop

        # 2. Its tiles.
        sums = zeros()
        t, r, s = tap_of(role, f, by)
        down, along = integer(r * dilation_h), integer(s * dilation_w)
        x_channel, _ = ptx.split(channel, f.group_k, by.group_k, by.group_k_shift)
        n, d, row, column = digits(i, f, by)
        step_n, step_d, step_row, step_column = digits(f.block_tiles, f, by)
        while i < stop:
            at_d = reached(d, t, f.stride_d, f.pad_d, f.dilation_d, f.extent_d)
            x_at = integer(n * f.x_n + x_channel * f.x_c)
            y_at = integer(n * f.y_n + channel * f.y_c + d * f.y_d)
            sums = add_tile(sums, x, dy, at_d, row, column, x_at, y_at, down, along, f)
            column, carry = carried(integer(column + step_column), f.tiles_w)
            row, carry = carried(integer(row + step_row + carry), f.tiles_h)
            d, carry = carried(integer(d + step_d + carry), f.out_d)
            n = integer(n + step_n + carry)
            i = integer(i + f.block_tiles)

        # 3. A block's sums of each tap, by a team of threads.
        shared = ptx_tile.dynamic_shared()
        ptx_vector.store_shared_floats(u32(shared + u32(4 * thread)), u32(4 * THREADS), sums)
        ptx.cuda.syncthreads()
        results, member = integer(sums_held * f.cells), integer(thread % team)
        first = integer(0)
        while first < results:
            result = integer(min(integer(first + thread // team), integer(results - 1)))
            m, cell = ptx.split(result, f.cells, by.cells, by.cells_shift)
            total, j = real(0.0), member
            while j < f.block_tiles:
                where = u32(shared + u32(4 * (m * THREADS + j * f.cells + cell)))
                total = total + ptx_tile.float_of(load_shared(where))
                j = integer(j + team)
            for exchange in range(exchanges):
                total = total + ptx.shuffle_xor(total, 1 << exchange)
            if member == 0 and first + thread // team < results:
                store_part(total, m, cell, slab, role_block, split, parts, f, by)
            first = integer(first + THREADS // team)

    data, floats = ptx.pointer(v.dtype), ptx.pointer("f32")
    return partial_sums, (data, data, floats, ptx.record(Sums, v.bits), ptx.record(Reciprocals, v.bits))


class DepthwiseFilter(LaunchedCandidate[Tile]):
    """The gradient of one filter a channel."""

    op, algorithm = "conv_bwd_filter", "depthwise"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        refused = plan.refusal(problem)
        return Support(False, refused) if refused else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
        return plan.worth_measuring([(self.estimate(problem, v.tile, device), v.tile) for v in variants(problem)])

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        integers = sums(problem, self._variant(problem, config), config, device)
        return 4 * integers.splits * integers.taps * problem.k

    def estimate(self, problem: ConvProblem, config: Tile, device: Gpu) -> float:
        v = self._variant(problem, config)
        integers = sums(problem, v, config, device)
        threads = integers.splits * integers.slabs * integers.role_blocks * THREADS
        tiles = ceil(integers.chunk / integers.block_tiles)
        instructions = tiles * v.instructions + 20 * v.sums + 300
        return _SUM_US + plan.kernel_us(problem, device, threads, instructions, tiles * v.lines)

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v = self._variant(problem, config)
        integers = sums(problem, v, config, device)
        parts = integers.splits * integers.taps * problem.k
        # Where many threads have the same taps, a warp adds their sums.
        v = v._replace(
            bits=index_bits(problem, (*integers, parts)), team=32 if 2 * integers.block_tiles >= THREADS else 1
        )
        partial = Launch(
            source=Source(_partial_sums, v, THREADS, v.held.min_blocks),
            grid=(integers.splits * integers.slabs * integers.role_blocks, 1, 1),
            pointers=(0, 1, WORKSPACE),
            scalars="",
            integers=(*integers, *reciprocals(Reciprocals, integers._asdict())),
            integer_bits=v.bits,
            dynamic_shared_bytes=4 * THREADS * v.sums,
        )
        return [partial, sum_of_parts(problem, integers.splits)]

    def _variant(self, problem: ConvProblem, config: Tile) -> Variant:
        return next(v for v in variants(problem) if v.tile == config)


BWD_FILTER = DepthwiseFilter()
