"""Filter gradients of depthwise convolutions on tensor cores, 16 bits, stride 1.

    dw[c, r, s] = sum over n, p, q of  x[n, c, p + r - pad, q + s - pad] * dy[n, c, p, q]

The columns of x and of dy in 8 columns q + j of dy are multiplied with each other, rows p being summed over,

    g_r[i, j] = sum over n, p, q of  x[n, c, p + r - pad, q - pad + i] * dy[n, c, p, q + j],   i < 16, j < 8

and of these the diagonals are the result: dw[c, r, s] = sum over j of g_r[j + s, j].

    block      some channels and a run of tiles of all images, one after the other: their planes of x and of dy come
               into shared memory; channels-last they are turned on the way
    warp       a plane: for each filter row r its g_r in registers, 16 rows p a product (mma.m16n8k16, both factors
               turned by ldmatrix; a row r further on is another address)
    grid       tiles are split among as many blocks as run at once; a second kernel adds their sums in a fixed order

Traffic: x and dy once from memory, the halo of a tile again from cache. Factors are exact, and sums float32. Where x or
dy has an infinity or NaN, more taps than it meets may become NaN. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import planes_plan as plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.depthwise_plan import worth_measuring
from nbdnn.kernels.cuda.depthwise_planes import waiting_bytes
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate
from nbdnn.kernels.cuda.planes_plan import Copied, Planes, Tile
from nbdnn.problem_conv import ConvProblem

_MOST_TAPS = 9  # of a filter row in one product, and rows whose sums stay in registers
_TILES = (
    Tile(16, 8, 16),
    Tile(16, 16, 16),
    Tile(16, 32, 16),
    Tile(32, 32, 16),
    Tile(16, 16, 8),
    Tile(32, 32, 8),
)
_ROW_FLOATS = 9  # of g in shared memory, whose columns are 8: diagonals meet different banks
_G_FLOATS = 16 * _ROW_FLOATS + 7
_SUM_US = 2.0  # of the second kernel


class _Variant(NamedTuple):
    """What the first kernel is compiled for.

    run, shift: of planar x, and y_run of planar dy. reversed_: dw has its last tap first.
    """

    dtype: str
    x_last: bool
    y_last: bool
    tile: Tile
    taps_h: int
    taps_w: int
    run: int
    shift: int
    y_run: int
    reversed_: bool

    @property
    def threads(self) -> int:
        """A warp takes a plane."""
        return 32 * self.tile.channels

    @property
    def x_planes(self) -> Planes:
        return Planes(self.tile.rows + self.taps_h - 1, self.tile.wide + 1, self.tile.channels // plan.VECTOR)

    @property
    def y_planes(self) -> Planes:
        return Planes(self.tile.rows, self.tile.wide, self.tile.channels // plan.VECTOR)

    @property
    def copied(self) -> tuple[Copied, Copied]:
        """x and dy."""
        x = Copied(self.x_planes, self.x_last, self.run, self.threads)
        return x, Copied(self.y_planes, self.y_last, self.y_run, self.threads)

    @property
    def shared_bytes(self) -> int:
        """Planes and what waits to be turned into them, or at the end what a warp finds its diagonals in."""
        copied_bytes = sum(each.planes.shared_bytes + waiting_bytes(each) for each in self.copied)
        return max(copied_bytes, 4 * self.tile.channels * self.taps_h * _G_FLOATS)

    @property
    def min_blocks(self) -> int:
        """64 registers have room for the sums of 7 rows and a product of two tiles, 80 also for planar runs; more of
        either take up to 128, as do copies of single elements, many of which are under way at once."""
        registers = 64 if self.x_last and self.y_last else 80
        single = not (self.x_last or self.run > 1) or not (self.y_last or self.y_run > 1)
        if single or self.taps_h > 7 or self.tile.high * self.tile.wide > 2:
            registers = 128
        return plan.min_blocks(self.threads, registers, self.shared_bytes)

    @property
    def instructions(self) -> float:
        """Of a block's warps for a tile, about: planes filled, and for each the products."""
        loads, turned = ceil(self.x_planes.chunks / 2), sum(plan.turning(p.planes, p.planes.rows) for p in self.copied)
        return 1.5 * turned + self.tile.channels * self.tile.high * self.taps_h * (6 + loads + self.tile.wide)


class Runs(NamedTuple):
    """The integers of the first kernel: `tiles` tiles, tiles_h x tiles_w of an image, in runs of `chunk`."""

    slabs: int
    splits: int
    tiles: int
    tiles_h: int
    tiles_w: int
    chunk: int
    part_elems: int
    channels: int
    pad_h: int
    pad_w: int
    x_n: int
    x_c: int
    x_h: int
    x_w: int
    x_rows: int
    x_columns: int
    y_n: int
    y_c: int
    y_h: int
    y_w: int
    y_rows: int
    y_columns: int


def _diagonals(v: _Variant):
    """Device function (sums, shared, lane, parts, first): a warp's taps from its sums, to parts[first] and on."""
    from nbdnn.kernels.cuda import ptx, ptx_planes, ptx_tile

    integer, word, real, taps, taps_w = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"], v.taps_h * v.taps_w, v.taps_w
    load, shift, rows, reversed_ = ptx_tile.LOAD_SHARED[1], v.shift, v.taps_h, v.reversed_
    store = ptx_planes.store_sums(rows, 4 * _ROW_FLOATS, 4 * _G_FLOATS)

    @ptx.inline
    def diagonals(sums, shared, lane, parts, first):
        store(word(shared + word(4 * ((lane >> 2) * _ROW_FLOATS + 2 * (lane & 3)))), sums)
        ptx.cuda.syncwarp()
        tap = lane
        while tap < taps:
            r, s = ptx.divided(tap, integer(taps_w))
            at = word(shared + word(4 * (r * _G_FLOATS + (s + shift) * _ROW_FLOATS)))
            total = real(0.0)
            for j in range(plan.VECTOR):
                total = total + ptx_tile.float_of(load(word(at + word(4 * (_ROW_FLOATS + 1) * j))))
            parts[integer(first + (taps - 1 - tap if reversed_ else tap))] = total
            tap = integer(tap + 32)

    return diagonals


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import depthwise_planes, ptx, ptx_planes, ptx_tile, ptx_vector

    v = _Variant(*specialised_on)
    integer, word, (tile_rows, tile_columns, tile_channels), threads = ptx.INTEGER[32], ptx.WORD, v.tile, v.threads
    x_planes, y_planes, taps, shift = v.x_planes, v.y_planes, v.taps_h * v.taps_w, v.shift
    y_at, x_bytes, y_bytes = x_planes.shared_bytes, x_planes.plane_bytes, y_planes.plane_bytes
    part, side, channel_of = depthwise_planes.Part, plan.Side, depthwise_planes.channel_of(x_planes.vectors)
    ask_x, ask_y = (depthwise_planes.ask(each) for each in v.copied)
    settle_x, settle_y = (depthwise_planes.settle(each) for each in v.copied)
    waiting_x = y_at + y_planes.shared_bytes
    waiting_y, arrived = waiting_x + waiting_bytes(v.copied[0]), ptx_tile.copy_async_wait(0)
    clear_x, clear_y = (depthwise_planes.clear_zeros(planes, threads) for planes in (x_planes, y_planes))
    x_inside, y_inside = (depthwise_planes.rows_inside(planes.rows) for planes in (x_planes, y_planes))
    of_planes = ((planes.row_bytes, planes.zeros_at) for planes in (x_planes, y_planes))
    multiply = ptx_planes.multiply_rows(v.dtype, v.taps_h, v.tile.high, v.tile.wide, *of_planes)
    zeros, diagonals, shared_of_warp = ptx_vector.zeros(4 * v.taps_h), _diagonals(v), 4 * v.taps_h * _G_FLOATS

    @ptx.inline
    def parts_at(x, dy, n, row, column, first, f):
        """Of x and of dy for the tile of image n that begins there."""
        of_x = side(f.x_n, f.x_c, f.x_h, f.x_w, f.x_rows, f.x_columns)
        of_y = side(f.y_n, f.y_c, f.y_h, f.y_w, f.y_rows, f.y_columns)
        x_row, x_column = integer(row - f.pad_h), integer(column - f.pad_w - shift)
        part_x = part(x, integer(n * f.x_n), first, f.channels, x_row, *x_inside(x_row, f.x_rows), x_column, of_x)
        part_y = part(dy, integer(n * f.y_n), first, f.channels, row, *y_inside(row, f.y_rows), column, of_y)
        return part_x, part_y

    @ptx.inline
    def ask(x, dy, n, row, column, first, shared, f):
        part_x, part_y = parts_at(x, dy, n, row, column, first, f)
        ask_x(part_x, word(shared + word(waiting_x)))
        ask_y(part_y, word(shared + word(waiting_y)))

    def partial_sums(x, dy, parts, f):
        # 1. Which tiles of which channels, and a warp's plane.
        split, slab = ptx.divided(integer(ptx.block_x()), f.slabs)
        lane, plane = integer(ptx.thread_x() & 31), integer(ptx.thread_x() >> 5)
        first, chunk = integer(slab * tile_channels), word(16 * (lane >> 4))
        channel = integer(first + channel_of(plane))
        shared = ptx_tile.dynamic_shared()
        shared_y = word(shared + word(y_at))
        x_plane, y_plane = word(shared + word(plane * x_bytes)), word(shared_y + word(plane * y_bytes))
        clear_x(shared)
        clear_y(shared_y)

        # 2. Its tiles: the next one's copies are under way while one is multiplied.
        sums, own = zeros(), ptx_tile.computed_here(integer(lane & 15))
        i, stop = integer(split * f.chunk), integer(min(f.tiles, integer((split + 1) * f.chunk)))
        rest, column = ptx.divided(i, f.tiles_w)
        n, row = ptx.divided(rest, f.tiles_h)
        row, column = integer(row * tile_rows), integer(column * tile_columns)
        ask(x, dy, n, row, column, first, shared, f)
        while i < stop:
            arrived()
            ptx.cuda.syncthreads()
            part_x, part_y = parts_at(x, dy, n, row, column, first, f)
            settle_x(part_x, word(shared + word(waiting_x)), shared)
            settle_y(part_y, word(shared + word(waiting_y)), shared_y)
            ptx.cuda.syncthreads()
            x_rows, y_rows = (own, part_y.high, part_x.low, part_x.high), (own, part_y.high, integer(0), part_y.high)
            i, column = integer(i + 1), integer(column + tile_columns)
            if column >= f.y_columns:
                row, column = integer(row + tile_rows), integer(0)
            if row >= f.y_rows:
                n, row = integer(n + 1), integer(0)
            if i < stop:
                ask(x, dy, n, row, column, first, shared, f)
            if channel < f.channels:
                sums = multiply(sums, word(x_plane + chunk), x_rows, word(y_plane + chunk), y_rows)
        ptx.cuda.syncthreads()

        # 3. The diagonals.
        if channel < f.channels:
            own_shared = word(shared + word(plane * shared_of_warp))
            diagonals(sums, own_shared, lane, parts, integer(split * f.part_elems + channel * taps))

    data, floats = ptx.pointer(v.dtype), ptx.pointer("f32")
    return partial_sums, (data, data, floats, ptx.record(Runs, 32))


def _variant(problem: ConvProblem, tile: Tile) -> _Variant:
    taps_h, taps_w = problem.filter
    run, shift, y_run = 1, 0, 1
    if not problem.channels_last:
        run, shift = plan.run_of(problem, problem.spatial[-1], problem.pad[1][0], taps_w)
    if not problem.y_channels_last:
        y_run, _ = plan.run_of(problem, problem.out_spatial[-1], 0, 1)
    layouts = problem.channels_last, problem.y_channels_last
    return _Variant(problem.dtype, *layouts, tile, taps_h, taps_w, run, shift, y_run, problem.mode == "conv")


def _runs(problem: ConvProblem, tile: Tile, device: Gpu) -> Runs:
    rows, columns = problem.out_spatial
    tiles_h, tiles_w, slabs = ceil(rows / tile.rows), ceil(columns / tile.columns), ceil(problem.c / tile.channels)
    tiles = problem.n * tiles_h * tiles_w
    blocks = max(1, _variant(problem, tile).min_blocks * device.sms // slabs)
    chunk = ceil(tiles / blocks)
    return Runs(
        slabs=slabs,
        splits=ceil(tiles / chunk),
        tiles=tiles,
        tiles_h=tiles_h,
        tiles_w=tiles_w,
        chunk=chunk,
        part_elems=part_elems(problem),
        channels=problem.c,
        pad_h=problem.pad[0][0],
        pad_w=problem.pad[1][0],
        **plan.side("x", problem.x_shape, problem.channels_last),
        **plan.side("y", problem.y_shape, problem.y_channels_last),
    )


class DepthwiseMmaFilter(LaunchedCandidate[Tile]):
    """The gradient of one filter a channel on tensor cores."""

    op, algorithm = "conv_bwd_filter", "depthwise_mma"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        refused = plan.refusal(problem, _MOST_TAPS)
        return Support(False, refused) if refused else YES

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Tile, ...]:
        fitting = [tile for tile in _TILES if _variant(problem, tile).shared_bytes <= plan.SHARED_BYTES]
        covering = plan.covering(problem.out_spatial, fitting)
        return worth_measuring([(self.estimate(problem, tile, device), tile) for tile in covering])

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        return 4 * _runs(problem, config, device).splits * part_elems(problem)

    def estimate(self, problem: ConvProblem, config: Tile, device: Gpu) -> float:
        v, runs = _variant(problem, config), _runs(problem, config, device)
        blocks = runs.slabs * runs.splits
        return _SUM_US + plan.kernel_us(problem, device, blocks, v.min_blocks, runs.chunk * v.instructions)

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, runs = _variant(problem, config), _runs(problem, config, device)
        partial = Launch(
            source=Source(_kernel, v, v.threads, v.min_blocks),
            grid=(runs.slabs * runs.splits, 1, 1),
            pointers=(0, 1, WORKSPACE),
            scalars="",
            integers=runs,
            dynamic_shared_bytes=v.shared_bytes,
        )
        return [partial, add_parts(problem, runs.splits)]


BWD_FILTER = DepthwiseMmaFilter()
