"""Gradient of the filters of 1x1 layers on the matrix units of Hopper (wgmma): x and dy by TMA boxes.

    dw[k, c] = sum over pixels p of  dy[p, k] * x[p, c]

asks for boxes    a chunk of pixels of the tile's filters, and of its channels: a ring    first of the last warp
multiplies        a warpgroup 64 filters by all channels of the tile                      the others
adds              each a part of the rows of all blocks of the cluster                    the same

Factors of 16 bits are read as they lie: channels-last a line is a pixel, of planes it is a channel. `wgmma_boxes_tf32`
multiplies float32, rounded to TF32 as it is copied, of planes. There are few tiles and many pixels: the blocks of a
cluster share them and find each other's sums in shared memory, always in the same order; what more clusters make goes
through memory, and is added by another launch. Boxes end where the tensors do: what lies beyond is zero.

Traffic: dy once for each tile of channels, x for each of filters, mostly from cache. Accumulates in float32. Source:
own.
"""

from __future__ import annotations

from nbdnn.candidate import Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import boxes_ring
from nbdnn.kernels.cuda import wgmma_boxes_filter_plan as plan
from nbdnn.kernels.cuda.add_parts import add_parts, part_elems
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch
from nbdnn.kernels.cuda.planned import Planned
from nbdnn.kernels.cuda.quads import QUAD, finish_quad, store_quad
from nbdnn.kernels.cuda.wgmma_boxes_filter_plan import Integers, Tile, Variant
from nbdnn.kernels.cuda.wgmma_boxes_plan import BOX_BYTES, GROUP, ROWS, WARP
from nbdnn.kernels.cuda.wgmma_maps import line_elems
from nbdnn.problem_conv import ConvProblem

_STEPS = 4  # instructions for a line


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_matrix, ptx_tile, ptx_tma, ptx_wgmma

    v = Variant(*specialised_on)
    tile, planar, columns_at, row_bytes, in_parts = v.tile, v.planar, v.columns_at, v.tile.row_bytes, v.in_parts
    integer, long, word, map_of = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD, ptx_tma.map_of
    line, kind = line_elems(v.dtype), "tf32" if v.dtype == "f32" else v.dtype
    workers, rows, columns, blocks, (dy_boxes, x_boxes) = tile.workers, tile.rows, tile.columns, tile.cluster, v.boxes
    copy_box, meet = ptx_tma.COPY_BOX[3 if planar else 2], ptx_tma.MEET[workers]
    zeros, multiply = ptx_matrix.zeros(tile.sums), ptx_wgmma.multiply(kind, columns, _STEPS, not planar, not planar)
    of_rows, of_columns = ptx_wgmma.descriptor(), ptx_wgmma.descriptor(16 if planar else BOX_BYTES)
    places = tuple((0, 8 * half * row_bytes + 32 * eight) for eight in range(columns // 8) for half in (0, 1))
    store_sums, load_quad = ptx_matrix.store_floats_at(places, 2), ptx_cluster.load_quad
    finish, store_part = finish_quad(v.dtype, v.epilogue), store_quad("f32")
    stages, stage_bytes = tile.stages, v.stage_bytes
    ring = boxes_ring.Ring(stages, stage_bytes, stage_bytes, v.barriers_at, workers // WARP, is_idle=True)
    set_barriers, claim, arrived, give_back, following = boxes_ring.words(ring)
    rows_of_block, quads = rows // blocks, columns // QUAD
    none = (ptx.REAL["f32"](0.0),) * QUAD

    @ptx.inline
    def copy_chunk(dy, x, to, full, number, first_k, first_c, f):
        if planar:
            n, chunk = ptx.split(number, f.of_image, f.of_image_by, f.of_image_shift)
            pixel = integer(chunk * line)
            copy_box(to, dy, full, (pixel, first_k, n), ())
            copy_box(word(to + columns_at), x, full, (pixel, first_c, n), ())
        else:
            pixel = integer(number * line)
            for box in range(dy_boxes):
                copy_box(word(to + box * BOX_BYTES), dy, full, (integer(first_k + box * ROWS), pixel), ())
            for box in range(x_boxes):
                at = word(to + columns_at + box * BOX_BYTES)
                copy_box(at, x, full, (integer(first_c + box * ROWS), pixel), ())

    @ptx.inline
    def ask(dy, x, shared, number, first_k, first_c, f):
        stage, turn = integer(0), integer(1)
        while number < f.chunks:
            to, full = claim(shared, stage, turn)
            copy_chunk(dy, x, to, full, number, first_k, first_c, f)
            number = integer(number + f.step)
            stage, turn = following(stage, turn)

    @ptx.inline
    def multiplied(thread, shared, number, f):
        """The sums of the block's chunks, to shared memory."""
        lane, own = integer(thread & (WARP - 1)), integer(thread // GROUP * BOX_BYTES)
        sums, stage, turn, before = zeros(), integer(0), integer(0), integer(-1)
        while number < f.chunks:
            start = arrived(shared, stage, turn)
            ptx_wgmma.fence()
            sums = multiply(sums, of_rows(word(start + own)), of_columns(word(start + columns_at)))
            ptx_wgmma.commit()
            ptx_wgmma.wait_for_all_but_last()
            if before >= 0:
                give_back(shared, before, lane)
            before, number = stage, integer(number + f.step)
            stage, turn = following(stage, turn)
        ptx_wgmma.wait()
        meet()  # all boxes have been read: their memory is the sums' now
        row = integer(thread // WARP * 16 + (lane >> 2))
        store_sums(word(shared + row * row_bytes + ((lane & 3) << 3)), sums)

    @ptx.inline
    def together():
        """All blocks of the cluster have come, each by whole warps."""
        ptx.cuda.syncwarp()
        if blocks > 1:
            ptx_cluster.arrive()
            ptx_cluster.wait()
        else:
            ptx.cuda.syncthreads()

    @ptx.inline
    def store(thread, shared, own, first_k, first_c, part, dw, parts, scalars, f):
        """The rows that are the block's, of all blocks' sums."""
        quad, start = thread, long(long(part) * f.part_elems)
        while quad < rows_of_block * quads:
            row, column = integer(own * rows_of_block + quad // quads), integer(quad % quads * QUAD)
            total, at = none, word(shared + row * row_bytes + column * 4)
            for block in range(blocks):
                found = load_quad(at, integer(block))
                total = (total[0] + found[0], total[1] + found[1], total[2] + found[2], total[3] + found[3])
            k, c = integer(first_k + row), integer(first_c + column)
            if k < f.filters and c < f.channels:
                to = integer(k * f.channels + c)
                if in_parts:
                    store_part(parts, long(start + to), total)
                else:
                    finish(total, scalars[0], scalars[1], dw, to, none, dw)
            quad = integer(quad + workers)

    def wgmma_boxes_filter(maps, dw, parts, alpha, beta, f):
        thread, shared = integer(ptx.thread_x()), ptx_tile.dynamic_shared()
        rest, own = ptx.divided(integer(ptx.block_x()), integer(blocks))
        part, number = ptx.divided(rest, f.tiles)
        tile_k, tile_c = ptx.divided(number, f.tiles_c)
        first_k, first_c, first = integer(tile_k * rows), integer(tile_c * columns), integer(part * blocks + own)
        if thread == workers:
            set_barriers(shared)
        ptx.cuda.syncthreads()
        if thread < workers:
            multiplied(thread, shared, first, f)
        elif thread == workers:
            ask(map_of(maps, integer(0)), map_of(maps, integer(1)), shared, first, first_k, first_c, f)
        together()
        if thread < workers:
            store(thread, shared, own, first_k, first_c, part, dw, parts, (alpha, beta), f)
        if blocks > 1:
            together()  # nobody's shared memory goes before all have read it

    data, real = ptx.pointer(v.dtype), ptx.REAL["f32"]
    return wgmma_boxes_filter, (
        ptx_tma.TensorMaps(2),
        data,
        ptx.pointer("f32"),
        real,
        real,
        ptx.record(Integers, 32),
    )


class WgmmaBoxesFilter(Planned[Tile]):
    """One tap, of whole chunks of 16 bytes."""

    op, algorithm, algo = "conv_bwd_filter", "wgmma_boxes", None
    plan = plan

    def __init__(self, *, tf32: bool = False) -> None:
        self._dtypes = ("f32",) if tf32 else ("f16", "bf16")
        if tf32:
            self.algorithm, self.math = "wgmma_boxes_tf32", "tf32"

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if problem.dtype not in self._dtypes:
            return Support(False, f"dtype {problem.dtype} is not {' or '.join(self._dtypes)}")
        return super().supports(problem, device)

    def workspace_bytes(self, problem: ConvProblem, config: Tile, device: Gpu) -> int:
        return 4 * config.parts * part_elems(problem) if config.parts > 1 else 0

    def launches(self, problem: ConvProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, integers = plan.variant(problem, config), plan.integers(problem, config)
        product = Launch(
            source=Source(_kernel, v, config.workers + WARP, config.blocks),
            grid=(integers.tiles * integers.step, 1, 1),
            pointers=(2, WORKSPACE),
            scalars="f32",
            integers=integers,
            dynamic_shared_bytes=v.shared_bytes,
            cluster=config.cluster,
            maps=plan.maps(problem, config),
        )
        return [product, add_parts(problem, config.parts)] if config.parts > 1 else [product]


BWD_FILTER = WgmmaBoxesFilter(), WgmmaBoxesFilter(tf32=True)
