"""The products of a Winograd filter gradient: M[xi, k, c] = sum over tiles t of D[xi, t, k] * V[xi, t, c], float32.

Both operands lie with their channels next to each other, so a stage of 8 tiles is copied 16 bytes at a time; channels
are a multiple of 4. The last row of G takes only the last row of a tile of dy: in its xi, tiles that reach beyond the
lower edge are zero, and left out; so are those beyond the right edge in the xi of the last column. So there are four
kinds of xi, in this order: neither, of the last column, of the last row, and of both, each with tiles of its own.

A tile of M needs the stages of its xi's kind. All stages of all tiles stand in one row, which is cut into shares, one
for each block, wherever the cuts fall:

    stages   |------ tile 0 ------|------ tile 1 ------|-- tile 2 --|
    blocks   |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|
    parts    |-----0-----|---1----|2-|-----3-----|--4-|--5---|--6--|        numbered block + tile

so that blocks that all run at once end at the same time, however many tiles there are. Who reads M adds the parts of a
tile in order. Of volumes there are tiles of M for each tap along the depth, whose V begins as many slices further than
D; both have as many slices of an image as all taps together reach, and where dy has none D is zero. Source: own, after
stream-K (Osama et al., arXiv:2301.03598); the product is that of `fma_tile.py`.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda.fma_tile import STAGE_K, STAGES, Copies, Tile, copy_place, lane_place, pipeline, pitch_bytes


class Kinds(NamedTuple):
    """The four kinds of xi, of each: tiles of the image, xi, and stages. further: tiles from the first tap's V to the
    last one's, which are stored as well."""

    tiles: tuple[int, int, int, int]
    planes: tuple[int, int, int, int]
    further: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(ceil(tiles / STAGE_K) for tiles in self.tiles)

    @property
    def filled(self) -> tuple[int, ...]:
        """Tiles of the image that are stored: whole stages, also those that begin at the last tap."""
        of_kinds = zip(self.tiles, self.further, strict=True)
        return tuple(STAGE_K * (ceil((tiles + further) / STAGE_K) + (further > 0)) for tiles, further in of_kinds)

    def products(self, kinds: int = 4) -> int:
        """Stages of a tile of M, of all xi of the first kinds."""
        return sum(planes * stages for planes, stages in zip(self.planes[:kinds], self.stages, strict=False))

    def total(self, kinds: int = 4) -> int:
        """Tiles of the image that are stored for all xi of the first kinds."""
        return sum(planes * tiles for planes, tiles in zip(self.planes[:kinds], self.filled, strict=False))


class Fields(NamedTuple):
    """A row of stages, each kind's from its begin_ on, in shares, and the operands.

    share: stages of a block. tiles: of M for one xi, tap_tiles for one tap along the depth, in rows of tiles_n. Of each
    kind: first_ tile of M, stages_ of a tile, tile of the image at_ which its xi begin, tiles filled_ for one xi, and
    tap_ from one tap to the next. A is D, B is V: where they begin in the workspace, and the channels from one tile of
    the image to the next. Parts begin at c_start.
    """

    total: int
    share: int
    tiles: int
    tap_tiles: int
    tiles_n: int
    begin_1: int
    begin_2: int
    begin_3: int
    first_1: int
    first_2: int
    first_3: int
    stages_0: int
    stages_1: int
    stages_2: int
    stages_3: int
    at_1: int
    at_2: int
    at_3: int
    filled_0: int
    filled_1: int
    filled_2: int
    filled_3: int
    tap_0: int
    tap_1: int
    tap_2: int
    tap_3: int
    a_start: int
    a_channels: int
    b_start: int
    b_channels: int
    c_start: int


def fields(
    kinds: Kinds, share: int, tiles: tuple[int, int], a: tuple[int, int], b: tuple[int, int], c: int, taps: int = 1
) -> Fields:
    """tiles: of M, rows and columns for one xi and tap; a, b: start and channels of D and V; c: where the parts begin;
    taps: along the depth."""
    of_tap = tiles[0] * tiles[1]
    count = taps * of_tap
    first = [count * sum(kinds.planes[:kind]) for kind in range(1, 4)]
    begin = [count * kinds.products(kind) for kind in range(1, 5)]
    at = [kinds.total(kind) for kind in range(1, 4)]
    to_next = [further // max(1, taps - 1) for further in kinds.further]
    return Fields._make((
        begin[3], share, count, of_tap, tiles[1], *begin[:3], *first, *kinds.stages, *at, *kinds.filled, *to_next,
        *a, *b, c,
    ))  # fmt: skip


def product_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    tile = Tile(*specialised_on)
    integer, real, stage_words = ptx.INTEGER[32], ptx.REAL["f32"], STAGES * tile.stage_bytes // 4
    tile_m, tile_n, threads = tile.m, tile.n, tile.threads
    run, store, kind = pipeline(tile, _copy_stage(tile)), _store(tile), _kind()
    a_place, b_place = (copy_place(Copies(extent, False, 4), threads) for extent in tile)

    def multiply(workspace, f):
        thread, block = integer(ptx.thread_x()), integer(ptx.block_x())
        shared = ptx_tile.shared_address(ptx.cuda.shared.array(stage_words, real, 16))
        (column_a, k_a), (column_b, k_b) = a_place(thread, 0), b_place(thread, 0)
        at, walk = integer(block * f.share), ptx.cuda.local.array(2, integer)
        end = min(integer(at + f.share), f.total)
        while at < end:
            begin, number, stages, from_tile, filled, to_next = kind(at, f)
            local, first = ptx.divided(integer(at - begin), stages)
            number = integer(number + local)
            plane, place = ptx.divided(local, f.tiles)
            tap, place = ptx.divided(place, f.tap_tiles)
            row, column = ptx.divided(place, f.tiles_n)
            from_tile = integer(from_tile + plane * filled + first * STAGE_K)
            m, n = integer(row * tile_m + column_a), integer(column * tile_n + column_b)
            walk[0] = integer(f.a_start + (from_tile + k_a) * f.a_channels + m)
            walk[1] = integer(f.b_start + (from_tile + tap * to_next + k_b) * f.b_channels + n)
            count = min(integer(end - at), integer(stages - first))
            ptx.cuda.syncthreads()  # the buffers may still be read
            quarters = run(shared, thread, count, (workspace, thread, walk, f))
            store(workspace, integer(f.c_start + (number + block) * (tile_m * tile_n)), thread, quarters)
            at = integer(at + count)

    return multiply, (ptx.pointer("f32"), ptx.record(Fields, 32))


@cache
def _kind():
    """Device function (stage, fields) -> (first stage, first tile of M, stages of a tile, first tile of the image,
    tiles for one xi, tiles from a tap to the next)."""
    from nbdnn.kernels.cuda import ptx

    zero = ptx.INTEGER[32](0)

    @ptx.inline
    def of_stage(at, f):
        begin, first, stages, tile, filled, to_next = zero, zero, f.stages_0, zero, f.filled_0, f.tap_0
        if at >= f.begin_1:
            begin, first, stages, tile = f.begin_1, f.first_1, f.stages_1, f.at_1
            filled, to_next = f.filled_1, f.tap_1
        if at >= f.begin_2:
            begin, first, stages, tile = f.begin_2, f.first_2, f.stages_2, f.at_2
            filled, to_next = f.filled_2, f.tap_2
        if at >= f.begin_3:
            begin, first, stages, tile = f.begin_3, f.first_3, f.stages_3, f.at_3
            filled, to_next = f.filled_3, f.tap_3
        return begin, first, stages, tile, filled, to_next

    return of_stage


@cache
def parts_of_tile():
    """Device function (tile of M, fields) -> (its first part, number of parts)."""
    from nbdnn.kernels.cuda import ptx

    integer, zero = ptx.INTEGER[32], ptx.INTEGER[32](0)

    @ptx.inline
    def parts(number, f):
        begin, first, stages = zero, zero, f.stages_0
        if number >= f.first_1:
            begin, first, stages = f.begin_1, f.first_1, f.stages_1
        if number >= f.first_2:
            begin, first, stages = f.begin_2, f.first_2, f.stages_2
        if number >= f.first_3:
            begin, first, stages = f.begin_3, f.first_3, f.stages_3
        at = integer(begin + (number - first) * stages)
        block, _ = ptx.divided(at, f.share)
        after, _ = ptx.divided(integer(at + stages + f.share - 1), f.share)
        return integer(number + block), integer(after - block) if stages > 0 else zero

    return parts


@cache
def _copy_stage(tile: Tile):
    """Device function (context, shared address, is_first) that starts the copies of the next 8 tiles of the image.

    Beyond the last channel it copies what lies behind in the workspace, which only reaches sums that nobody reads: a
    size that depends on the channel cost registers, and with them 5 % (VGG's 16x64x224x224, H200).
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, threads, copy = ptx.INTEGER[32], ptx.cuda.types.uint32, tile.threads, ptx_tile.COPY_ASYNC[16]
    a, b = (Copies(extent, False, 4) for extent in tile)
    a_place, a_count, a_step, a_pitch = copy_place(a, threads), a.count(threads), a.step(threads), pitch_bytes(a.extent)
    b_place, b_count, b_step, b_pitch = copy_place(b, threads), b.count(threads), b.step(threads), pitch_bytes(b.extent)
    b_bytes, size = tile.b_bytes, integer(16)

    @ptx.inline
    def copied(context, to, is_first):
        workspace, thread, walk, f = context
        for i in range(a_count):
            column, k = a_place(thread, i)
            source = integer(walk[0] + i * a_step * f.a_channels)
            copy(word(to + k * a_pitch + column * 4), ptx.address(workspace, source), size)
        for i in range(b_count):
            column, k = b_place(thread, i)
            source = integer(walk[1] + i * b_step * f.b_channels)
            copy(word(to + b_bytes + k * b_pitch + column * 4), ptx.address(workspace, source), size)
        walk[0] = integer(walk[0] + STAGE_K * f.a_channels)
        walk[1] = integer(walk[1] + STAGE_K * f.b_channels)

    return copied


@cache
def _store(tile: Tile):
    """Device function (workspace, start, thread, quarters) that stores a tile [M][N]: pieces of 128 bytes."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, put, bits, placed = ptx.INTEGER[32], ptx.STORE[4], ptx_tile.words_of, lane_place(tile)
    tile_n, half_m, half_n = tile.n, tile.m // 2 * tile.n, tile.n // 2

    @ptx.inline
    def quarter(workspace, to, sums):
        put(workspace, to, bits(sums[0:4]))
        put(workspace, integer(to + tile_n), bits(sums[4:8]))
        put(workspace, integer(to + 2 * tile_n), bits(sums[8:12]))
        put(workspace, integer(to + 3 * tile_n), bits(sums[12:16]))

    @ptx.inline
    def stored(workspace, start, thread, quarters):
        m, n = placed(ptx_tile.computed_here(thread))
        to = integer(start + m * tile_n + n)
        quarter(workspace, to, quarters[0])
        quarter(workspace, integer(to + half_n), quarters[1])
        quarter(workspace, integer(to + half_m), quarters[2])
        quarter(workspace, integer(to + half_m + half_n), quarters[3])

    return stored
