"""Forward convolution with few channels of outputs, and bwd_data of stride 1 with few channels: rows of the image.

    y[n, k, p, q] = sum over c, r, s of  x[n, c, p + r*d - pad, q + s*d - pad] * w[k, c, r, s]

`head_plan.py` has the tiling. A block brings all filters to shared memory once, then takes tile after tile, whose slabs
are copied while those before them are multiplied:

    1. wait for a slab, start the copies of one to come      2. pixels of a row times the filters of its taps
    3. after the last chunk the sums to shared memory        4. a thread adds the taps' sums of an output, and stores

Matrix units (f16, bf16): a warp a row of outputs, whose sums (s, k) are the 16 rows of a matrix, and its pixels the
columns: a pixel is loaded once for all s and k. Planar images lie as their columns' transposes, which are loaded
transposed. FMA units (f32): a thread has some pixels of any rows, of which it loads four channels at once.
Traffic: x once a tile that sees it, y once. Accumulates in float32. Source: own; sums before shifts are 'kn2row' in
arXiv:1704.04428.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.head_records import GROUP, M_ROWS, Head, Variant
from nbdnn.problem import ITEMSIZE

_BATCH = 8  # words of the filters that a thread loads together
_QUAD = 4  # channels


@cache
def _tile_place(columns_log2: int):
    """Device function (tile, f) -> (n, first row and column of its outputs)."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def placed(tile, f):
        rest, across = ptx.divided(tile, f.tiles_w)
        n, down = ptx.divided(rest, f.tiles_h)
        return n, integer(down * f.tile_rows), integer(across << columns_log2)

    return placed


@cache
def _copy_slab(variant: Variant):
    """Device function (image, tile, chunk, shared address, f, thread): starts a slab's copies.

    A line of a slab is a row of pixels with the chunk's channels, or of one channel; some lanes take a line.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    itemsize, elems = ITEMSIZE[variant.dtype], variant.copy_elems
    integer, word, planar, chunk = ptx.INTEGER[32], ptx.WORD, variant.planar, variant.chunk
    copy_bytes, pitch, columns = elems * itemsize, variant.pitch, variant.columns
    parts = 1 if planar else chunk // elems  # copies of a pixel's channels
    beside = elems if planar else 1  # pixels of a copy
    lanes = min(variant.threads, 1 << (columns // elems - 1).bit_length()) if planar else 32
    step, placed, copy = variant.threads // lanes, _tile_place(variant.columns_log2), ptx_tile.COPY_ASYNC[copy_bytes]
    lines_of_row, further = chunk if planar else 1, lanes // parts * beside
    further_bytes = further * itemsize if planar else further * pitch

    @ptx.inline
    def copied(image, tile, block, slab, f, thread):
        n, p, q = placed(tile, f)
        top, line, lane = integer(p - f.pad_h), integer(thread // lanes), integer(thread % lanes)
        # A lane has one part of pixels that are a constant number of columns apart.
        part, first = integer(lane % parts), integer(lane // parts * beside)
        left, c_first = integer(q - f.pad_w - f.lead + first), integer(block * chunk + part * elems)
        from_tile = integer(n * f.image_n + left * f.image_w)
        to_lane = integer(slab + first * itemsize) if planar else integer(slab + first * pitch + part * copy_bytes)
        while line < f.in_rows * lines_of_row:
            row, inner = integer(line // lines_of_row), integer(line % lines_of_row)
            h, c = integer(top + row), integer(c_first + inner)
            of_line = h >= 0 and h < f.extent_h and c < f.in_c
            source = integer(from_tile + h * f.image_h + c * f.image_c)
            to = integer(to_lane + row * f.row_bytes + inner * pitch)
            w, beyond = left, integer(left - first + columns)
            while w < beyond:
                live = of_line and w >= 0 and w < f.extent_w
                copy(word(to), ptx.address(image, source if live else integer(0)), integer(copy_bytes if live else 0))
                w, to = integer(w + further), integer(to + further_bytes)
                source = integer(source + further * f.image_w)
            line = integer(line + step)

    return copied


@cache
def _fill_filters(variant: Variant):
    """Device function (w, f, thread): [chunk][r][half of its channels][16 sums][lane][4 words], or [chunk][r][channel]
    [sum] in float32; zeros beyond the last of all."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, store, threads = ptx.INTEGER[32], ptx.WORD, ptx_tile.STORE_SHARED[1], variant.threads
    m_tiles, chunk, sums, nothing = variant.m_tiles, variant.chunk, variant.sums, ptx.ELEMENT[variant.dtype](0)
    row_words, columns = variant.filter_bytes // 4, variant.filter_columns

    @ptx.inline
    def element(w, r, at, c, f):
        """Of sum `at`, (s, k)."""
        if at < sums and c < f.in_c:
            s, k = ptx.divided(at, f.out_c)
            return ptx.load_constant(w, integer(f.w_start + k * f.w_out + c * f.w_in + r * f.w_r + s * f.w_s))
        return nothing

    @ptx.inline
    def pair(w, block, r, i, f):
        lane, register, matrix = i >> 2 & 31, i & 3, i >> 7
        half, m = matrix // m_tiles, matrix % m_tiles
        at = integer(m * M_ROWS + (lane >> 2) + (register & 1) * 8)
        c = integer(block * chunk + half * 16 + (lane & 3) * 2 + (register >> 1) * 8)
        return word(word(element(w, r, at, c, f)) | word(element(w, r, at, integer(c + 1), f)) << word(16))

    @ptx.inline
    def single(w, block, r, i, f):
        channel, at = integer(i // columns), integer(i % columns)
        return ptx_tile.word_of(element(w, r, at, integer(block * chunk + channel), f))

    made = pair if variant.math == "mma" else single

    @ptx.inline
    def filled(w, f, thread):
        words = ptx.cuda.local.array(_BATCH, word)
        base, count = integer(ptx_tile.dynamic_shared()), integer(f.chunks * f.taps_h * row_words)
        i = thread
        while i < count:
            for b in range(_BATCH):
                block_row, inner = ptx.divided(integer(i + b * threads), integer(row_words))
                block, r = ptx.divided(block_row, f.taps_h)
                words[b] = made(w, block, r, inner, f)
            for b in range(_BATCH):
                if i + b * threads < count:
                    store(word(base + (i + b * threads) * 4), words[b])
            i = integer(i + _BATCH * threads)

    return filled


def _matrix_rows(variant: Variant):
    """Device functions of a warp that has a row of outputs: (places, f, thread), which has nothing to do; (acc, places,
    slab, chunk, f, thread) -> acc with a chunk's products; and (acc, places, f, thread), which stores the sums."""
    from nbdnn.kernels.cuda import ptx, ptx_head, ptx_tile

    integer, word, planar, pitch = ptx.INTEGER[32], ptx.WORD, variant.planar, variant.pitch
    groups, m_tiles, row_bytes, columns = variant.groups, variant.m_tiles, variant.filter_bytes, variant.columns
    group_bytes, halves = GROUP * 2 if planar else GROUP * pitch, variant.chunk // 16
    multiply = ptx_head.row_products(variant.dtype, m_tiles, groups, halves, group_bytes, planar)
    store = ptx_head.store_rows(m_tiles, groups, variant.sums)

    @ptx.inline
    def begun(places, f, thread):
        return

    @ptx.inline
    def multiplied(acc, places, slab, block, f, thread):
        lane, row = integer(thread & 31), integer(thread >> 5)
        # Of four matrices, of eight channels each, the last two are those of the next group where a chunk has 16.
        matrix = integer(lane >> 3 & 2 * halves - 1)
        of_lane = integer((matrix * 8 + (lane & 7)) * pitch) if planar else integer((lane & 7) * pitch + matrix * 16)
        if halves == 1:
            of_lane = integer(of_lane + (lane >> 4) * group_bytes)
        pixels = integer(slab + row * f.row_bytes + of_lane)
        filters = integer(integer(ptx_tile.dynamic_shared()) + block * f.taps_h * row_bytes + lane * 16)
        r = integer(0)
        while r < f.taps_h:
            acc = multiply(acc, word(filters), word(pixels))
            pixels = integer(pixels + f.dilation_h * f.row_bytes)
            filters = integer(filters + row_bytes)
            r = integer(r + 1)
        return acc

    @ptx.inline
    def stored(acc, places, f, thread):
        lane, row = integer(thread & 31), integer(thread >> 5)
        first, plane_bytes = integer(lane >> 2), integer(f.plane * 4)
        pixel = integer(row * columns + (lane & 3) * 2)
        at = integer(integer(ptx_tile.dynamic_shared()) + f.sums_at + first * plane_bytes + pixel * 4)
        store(acc, first, word(at), plane_bytes)

    return begun, multiplied, stored


def _pixel_sums(variant: Variant):
    """The same of a thread that has some pixels of the tile: places, of each in a slab and among the sums."""
    from nbdnn.kernels.cuda import ptx, ptx_head, ptx_tile

    integer, word, planar, pitch = ptx.INTEGER[32], ptx.WORD, variant.planar, variant.pitch
    pixels, columns, row_bytes = variant.pixels, variant.columns, variant.filter_bytes
    pixel_bytes, quad_bytes = (4, _QUAD * pitch) if planar else (pitch, _QUAD * 4)
    multiply = ptx_head.quad_products(pixels, variant.sums, pitch if planar else 0)
    store, threads = ptx_head.store_planes(pixels, variant.sums), variant.threads
    quads, quad_filters = variant.chunk // _QUAD, _QUAD * variant.filter_columns * 4

    @ptx.inline
    def begun(places, f, thread):
        for i in range(pixels):
            # Beyond the last pixel that one again, with the same sums.
            pixel = integer(min(thread + i * threads, f.tile_rows * columns - 1))
            row, column = integer(pixel // columns), integer(pixel % columns)
            places[0][i] = word(row * f.row_bytes + column * pixel_bytes)
            places[1][i] = word(pixel * 4)

    @ptx.inline
    def multiplied(acc, places, slab, block, f, thread):
        filters = integer(integer(ptx_tile.dynamic_shared()) + block * f.taps_h * row_bytes)
        row, r = slab, integer(0)
        while r < f.taps_h:
            at, quad = row, integer(0)
            while quad < quads:
                acc = multiply(acc, places[0], word(at), word(filters))
                at, filters = integer(at + quad_bytes), integer(filters + quad_filters)
                quad = integer(quad + 1)
            row = integer(row + f.dilation_h * f.row_bytes)
            r = integer(r + 1)
        return acc

    @ptx.inline
    def stored(acc, places, f, thread):
        at = integer(integer(ptx_tile.dynamic_shared()) + f.sums_at)
        store(acc, places[1], word(at), integer(f.plane * 4))

    return begun, multiplied, stored


@cache
def _store_outputs(variant: Variant):
    """Device function (y, tile, (bias, residual, alpha, beta), f, thread): the tile's outputs from its sums."""
    from nbdnn.kernels.cuda import epilogue, ptx, ptx_tile

    integer, word, real, load = ptx.INTEGER[32], ptx.WORD, ptx.REAL["f32"], ptx_tile.LOAD_SHARED[1]
    columns, columns_log2, threads = variant.columns, variant.columns_log2, variant.threads
    placed, store = _tile_place(columns_log2), epilogue.store(variant.dtype, variant.epilogue)
    filters, taps = variant.filters, variant.sums // variant.filters

    @ptx.inline
    def stored(y, tile, extra, f, thread):
        bias, residual, alpha, beta = extra
        n, p_first, q_first = placed(tile, f)
        sums = integer(integer(ptx_tile.dynamic_shared()) + f.sums_at + f.lead * 4)
        plane_bytes, tap_bytes = integer(f.plane * 4), integer(f.plane * filters * 4 + f.dilation_w * 4)
        output = thread
        while output < f.tile_rows << columns_log2:
            row, column = integer(output >> columns_log2), integer(output & (1 << columns_log2) - 1)
            p, q = integer(p_first + row), integer(q_first + column)
            if p < f.rows and q < f.columns:
                of_pixel = integer(sums + (row * columns + column) * 4)
                to = integer(n * f.out_n + p * f.out_h + q * f.out_w)
                for k in range(filters):
                    at, total = integer(of_pixel + k * plane_bytes), real(0.0)
                    for s in range(taps):
                        total = total + ptx_tile.float_of(load(word(at + s * tap_bytes)))
                    store(total, alpha, beta, y, integer(to + k * f.out_k), bias, integer(k), residual)
            output = integer(output + threads)

    return stored


def kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_tile

    variant = Variant(*specialised_on)
    integer, stages, pixels = ptx.INTEGER[32], variant.stages, max(variant.pixels, 1)
    copy, fill, store = _copy_slab(variant), _fill_filters(variant), _store_outputs(variant)
    begin, multiply, keep = _matrix_rows(variant) if variant.math == "mma" else _pixel_sums(variant)
    zeros, commit, wait = (
        ptx_matrix.zeros(variant.held_sums),
        ptx_tile.copy_async_commit,
        ptx_tile.copy_async_wait(stages - 2),
    )

    def head(image, w, y, bias, residual, alpha, beta, f):
        thread = integer(ptx.thread_x())
        first = integer(integer(ptx_tile.dynamic_shared()) + f.slabs_at)
        beyond = integer(first + stages * f.slab_bytes)
        places = (ptx.cuda.local.array(pixels, ptx.WORD), ptx.cuda.local.array(pixels, ptx.WORD))
        tile, block, slab = integer(ptx.block_x()), integer(0), first
        ahead, ahead_block, filling = tile, integer(0), first
        acc, turn = zeros(), integer(1 - stages)
        while tile < f.tiles:
            # 1. Filters are made while the first slabs are on their way.
            if turn == 0:
                begin(places, f, thread)
                fill(w, f, thread)
            # 2. The slab has arrived, and every warp is done with the one before, whose place is filled next.
            if turn >= 0:
                wait()
                ptx.cuda.syncthreads()
            if ahead < f.tiles:
                copy(image, ahead, ahead_block, filling, f, thread)
            commit()
            ahead_block = integer(ahead_block + 1)
            if ahead_block == f.chunks:
                ahead, ahead_block = integer(ahead + f.blocks), integer(0)
            filling = integer(filling + f.slab_bytes)
            filling = first if filling == beyond else filling
            if turn >= 0:
                # 3. Products; of the last chunk the sums, and of these the outputs.
                acc = multiply(acc, places, slab, block, f, thread)
                block = integer(block + 1)
                if block == f.chunks:
                    keep(acc, places, f, thread)
                    ptx.cuda.syncthreads()
                    store(y, tile, (bias, residual, alpha, beta), f, thread)
                    acc, tile, block = zeros(), integer(tile + f.blocks), integer(0)
                slab = integer(slab + f.slab_bytes)
                slab = first if slab == beyond else slab
            turn = integer(turn + 1)

    data, scalar = ptx.pointer(variant.dtype), ptx.REAL["f32"]
    return head, (data, data, data, data, data, scalar, scalar, ptx.record(Head, 32))
