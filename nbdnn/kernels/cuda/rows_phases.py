"""Filter gradient of few channels in 16 bits: windows of raw image rows as matrices, by phases of their alignment.

    dw[k, c, r, s] = sum over n, p, q of  dy[n, k, p, q] * x[n, c, p*u + r*d - pad, q*u + s - pad]

A row of a matrix in shared memory is 16 aligned bytes, but a window begins where it does: at multiples of 12 bytes for
three channels and a stride of 2. Pixels whose windows begin equally far behind 16 aligned bytes are of one *phase*, and
a warp takes the pixels of one phase only: what lies before the window is summed with it, and left out in the end.
Blocks of different phases copy their lines from different elements on, so that little lies there.

    chunk   8 neighbours of a line, aligned, of the image's 16-bit elements: 8 columns of a product
    set     chunks of a window that a warp sums, for one phase and all filters of the block

    1. wait for slab and dy, start the copies of the next ones       2. 16 pixels of the phase a product
    3. sums to shared memory, where phases and splits add up, in order, without what lies before or behind a window
    4. the block's sums to the workspace                             5. those of all blocks in `rows_sums.py`

Both factors are turned as they are loaded: dy lies in the order of phases, a row a pixel, and a product's rows are
filters. A table in shared memory says of each pixel where its dy comes from, and where its window begins.
Traffic: x once for each group of phases, dy once. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from functools import cache

from nbdnn.kernels.cuda.rows_plan import CHUNK, ENTRY_BYTES, GROUP, STEP, Phased, Rows
from nbdnn.kernels.cuda.rows_tile import copy_lines, segment_offset, slab_behind, tile_place

_BEYOND = 1 << 15  # the row of a pixel that no tile has
_BATCH = 4  # copies of a thread that are prepared side by side


def kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_tile

    variant = Phased(*specialised_on)
    lines, threads, stages, filters = variant.lines, variant.threads, variant.stages, variant.filters
    integer, of_block, set_chunks = ptx.INTEGER[32], variant.of_block, variant.set_chunks
    placed, copy, copy_dy = tile_place(lines), copy_lines(lines, threads), _copy_dy(variant)
    fill, next_slab, offsets_of = _fill_pixels(variant), slab_behind(stages), _offsets(variant)
    before_of = _before(variant)
    commit, wait = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(stages - 2)
    zeros, add_tile, write_sums = ptx_matrix.zeros(set_chunks * filters // 4), _add_tile(variant), _write_sums(variant)

    def gradients(x, dy, parts, f):
        thread = integer(ptx.thread_x())
        lane, first = integer(thread & 31), integer(ptx.block_y() * filters)
        rest, set_ = ptx.divided(integer(thread >> 5), f.sets)
        split, phase = ptx.divided(rest, integer(of_block))
        set_groups, _ = ptx.divided(f.all_sets, f.sets)
        phase_group, set_group = ptx.divided(integer(ptx.block_z()), set_groups)
        first_phase, first_set = integer(phase_group * of_block), integer(set_group * f.sets)
        before = before_of(phase_group)
        offsets = offsets_of(integer((first_set + set_) * set_chunks), lane, f)
        slab = integer(integer(ptx_tile.dynamic_shared()) + f.slabs_at)
        filling, tile, ahead = slab, integer(ptx.block_x()), integer(ptx.block_x())
        fill(first_phase, before, f, thread)
        ptx.cuda.syncthreads()
        acc = zeros()
        turn = integer(1 - stages)
        while tile < f.tiles:
            # 1. The tile has arrived, and every warp is done with the one before, whose place is filled next.
            if turn >= 0:
                wait()
                ptx.cuda.syncthreads()
            if ahead < f.tiles:
                n, p, q, begin, _ = placed(ahead, f)
                copy(x, n, p, integer(begin - before), filling, f, thread)
                copy_dy(dy, n, p, q, first, integer(filling + f.dy_at), f, thread)
            commit()
            ahead, filling = integer(ahead + f.blocks), next_slab(filling, f)

            # 2. Each warp sums the pixels of its phase.
            if turn >= 0:
                acc = add_tile(acc, tile, slab, offsets, phase, split, lane, f)
                slab, tile = next_slab(slab, f), integer(tile + f.blocks)
            turn = integer(turn + 1)

        # 3. and 4. Phases and splits add up, and the block's sums are written.
        write_sums(acc, parts, first_phase, before, first_set, lane, f, thread)

    data, sums_type = ptx.pointer(lines.dtype), ptx.pointer("f32")
    return gradients, (data, data, sums_type, ptx.record(Rows, 32))


@cache
def _before(variant: Phased):
    """Device function (group of phases) -> elements by which its lines are copied from further on the left."""
    from nbdnn.kernels.cuda import ptx

    integer, groups, before = ptx.INTEGER[32], len(variant.before), variant.before

    @ptx.inline
    def before_of(group):
        found = integer(0)
        for i in range(groups):
            found = integer(before[i] if group == i else found)
        return found

    return before_of


@cache
def _fill_pixels(variant: Phased):
    """Device function (first phase, elements before, f, thread): tables of pixels, phase by phase in whole products.

    At groups_at (elements from the tile's first pixel of dy, row << 16 | column), at filters_at where the 16 aligned
    bytes begin that a window begins in: behind the last pixel that one's again, which meets no bank of its own.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, threads = ptx.INTEGER[32], ptx.cuda.types.uint32, variant.threads
    store, store_two = ptx_tile.STORE_SHARED[1], ptx_tile.STORE_SHARED[2]
    of_block, phases, shift, step = variant.of_block, variant.phases, variant.shift, variant.lines.step

    @ptx.inline
    def filled(first_phase, before, f, thread):
        shared, i = integer(ptx_tile.dynamic_shared()), thread
        columns = integer(f.tile_groups * (GROUP // phases))
        while i < of_block * f.fragments * STEP:
            phase, rest = ptx.divided(i, integer(f.fragments * STEP))
            row, column = ptx.divided(integer(min(rest, integer(f.tile_rows * columns - 1))), columns)
            q = integer(column * phases + first_phase + phase)
            from_, place = integer(row * f.out_h + q * f.out_w), integer(row * 65536 + q)
            window = integer(row * f.stride_h * f.pitch + (before + shift + q * step & -CHUNK) * 2)
            if rest >= f.tile_rows * columns:
                from_, place = integer(0), integer(_BEYOND * 65536)
            store_two(word(shared + f.groups_at + i * ENTRY_BYTES), (word(from_), word(place)))
            store(word(shared + f.filters_at + i * 4), word(window))
            i = integer(i + threads)

    return filled


@cache
def _copy_dy(variant: Phased):
    """Device function (dy, n, first output row and column, first filter, shared address, f, thread): starts copies.

    What lies outside of dy is zero.
    """
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, copy = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.COPY_ASYNC[16]
    load, dy_bytes, of_block, chunks = ptx_tile.LOAD_SHARED[2], variant.dy_bytes, variant.of_block, variant.filters // 8
    at_once = variant.threads // chunks  # pixels

    @ptx.inline
    def copied(dy, n, p, q, first, to, f, thread):
        i, chunk = ptx.divided(thread, integer(chunks))
        k = integer(first + chunk * CHUNK)
        from_ = integer(n * f.out_n + p * f.out_h + q * f.out_w + k)
        rows, columns = integer(f.rows - p if k < f.out_c else 0), integer(f.columns - q)
        table, count = integer(integer(ptx_tile.dynamic_shared()) + f.groups_at), integer(of_block * f.fragments * STEP)
        while i < count:
            for b in range(_BATCH):
                pixel = integer(i + b * at_once)
                if pixel < count:
                    past, place = load(word(table + pixel * ENTRY_BYTES))
                    live = integer(place >> word(16)) < rows and integer(place & word(0xFFFF)) < columns
                    at = integer(from_ + integer(past)) if live else integer(0)
                    where = word(to + pixel * dy_bytes + chunk * 16)
                    copy(where, ptx.address(dy, at), integer(16 if live else 0))
            i = integer(i + _BATCH * at_once)

    return copied


@cache
def _offsets(variant: Phased):
    """Device function (first chunk of a set, lane, f) -> bytes from a window to the lane's chunk of each two.

    A chunk beyond the window's is its last one again, whose sums nobody reads.
    """
    from nbdnn.kernels.cuda import ptx

    integer, word, chunks, of_segment = ptx.INTEGER[32], ptx.cuda.types.uint32, variant.chunks, segment_offset()
    last = variant.set_chunks - 1

    @ptx.inline
    def offset(first, i, lane, f):
        chunk = integer(min(integer(first + min(integer(i + (lane >> 4)), integer(last))), integer(f.entries - 1)))
        segment, inner = ptx.divided(chunk, integer(chunks))
        return word(of_segment(segment, f) + inner * (CHUNK * 2))

    @ptx.inline
    def offsets(first, lane, f):
        return (
            offset(first, 0, lane, f),
            offset(first, 2, lane, f),
            offset(first, 4, lane, f),
            offset(first, 6, lane, f),
        )

    return offsets


@cache
def _load_chunks(count: int):
    """Device function (address, offsets, masks of pixels) -> two words of each chunk."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    load, word = ptx_tile.load_matrices_transposed, ptx.cuda.types.uint32

    @ptx.inline
    def two(window, offset, masks):
        low, high, next_low, next_high = load(word(window + offset))
        return word(low & masks[0]), word(high & masks[1]), word(next_low & masks[0]), word(next_high & masks[1])

    @ptx.inline
    def one(window, offset, masks):
        words = two(window, offset, masks)
        return words[0], words[1]

    last = one if count % 2 else two

    @ptx.inline
    def in_one(window, offsets, masks):
        return last(window, offsets[0], masks)

    @ptx.inline
    def in_two(window, offsets, masks):
        return two(window, offsets[0], masks) + last(window, offsets[1], masks)

    @ptx.inline
    def in_three(window, offsets, masks):
        return two(window, offsets[0], masks) + two(window, offsets[1], masks) + last(window, offsets[2], masks)

    @ptx.inline
    def in_four(window, offsets, masks):
        front = two(window, offsets[0], masks) + two(window, offsets[1], masks) + two(window, offsets[2], masks)
        return front + last(window, offsets[3], masks)

    return (in_one, in_two, in_three, in_four)[(count + 1) // 2 - 1]


@cache
def _masks():
    """Device function (first pixel of a product, rows, columns, lane, f) -> of a lane's two words of a column, the
    halves that are pixels of the tile."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, word, load = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.LOAD_SHARED[2]

    @ptx.inline
    def half(pixel, bits, rows, columns, f):
        _, place = load(word(integer(ptx_tile.dynamic_shared()) + f.groups_at + pixel * ENTRY_BYTES))
        live = integer(place >> word(16)) < rows and integer(place & word(0xFFFF)) < columns
        return word(bits) if live else word(0)

    @ptx.inline
    def masks(first, rows, columns, lane, f):
        pixel = integer(first + (lane & 3) * 2)
        low = word(half(pixel, 0xFFFF, rows, columns, f) | half(integer(pixel + 1), 0xFFFF0000, rows, columns, f))
        pixel = integer(pixel + 8)
        return low, word(half(pixel, 0xFFFF, rows, columns, f) | half(integer(pixel + 1), 0xFFFF0000, rows, columns, f))

    return masks


def _add_tile(variant: Phased):
    """Device function (sums, tile, slab, offsets, phase, split, lane, f) -> sums with the split's pixels of a tile."""
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_tile

    integer, word, load = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx_tile.LOAD_SHARED[1]
    dy_bytes, tiles_m, phases = variant.dy_bytes, variant.filters // 16, variant.phases
    load_filters = ptx_matrix.load_matrices_at(tuple((0, 32 * i) for i in range(tiles_m)), True)
    load_chunks, masks_of = _load_chunks(variant.set_chunks), _masks()
    multiply = ptx_matrix.multiply_tile(variant.lines.dtype, tiles_m, variant.set_chunks)
    placed = tile_place(variant.lines)

    @ptx.inline
    def product(acc, slab, first, offsets, masks, lane, f):
        """With 16 pixels: matrices of a lane's row are those of pixels 0-7, then 8-15, of chunks or filters."""
        pixel = integer(first + (lane & 15))
        window = load(word(integer(ptx_tile.dynamic_shared()) + f.filters_at + pixel * 4))
        row = integer(first + (lane & 7) + (lane >> 4) * 8)
        a = load_filters(word(slab + f.dy_at + row * dy_bytes + (lane >> 3 & 1) * 16))
        return multiply(acc, a, load_chunks(word(window + slab), offsets, masks))

    @ptx.inline
    def added(acc, tile, slab, offsets, phase, split, lane, f):
        _, p, q, _, _ = placed(tile, f)
        rows, columns = integer(f.rows - p), integer(f.columns - q)
        begin, end = integer(phase * f.fragments * STEP), integer((phase + 1) * f.fragments * STEP)
        i, by = integer(begin + split * STEP), integer(f.parts * STEP)
        if f.tile_rows <= rows and f.tile_groups * GROUP <= columns and f.groups * (GROUP // phases) % STEP == 0:
            while i < end:
                acc = product(acc, slab, i, offsets, (word(0xFFFFFFFF), word(0xFFFFFFFF)), lane, f)
                i = integer(i + by)
        else:
            while i < end:
                acc = product(acc, slab, i, offsets, masks_of(i, rows, columns, lane, f), lane, f)
                i = integer(i + by)
        return acc

    return added


def _write_sums(variant: Phased):
    """Device function (sums, parts, first phase, elements before, first set, lane, f, thread): to the workspace.

    A warp has an element of all windows at a time: phases and splits in order, of the sets that the block has.
    """
    from nbdnn.kernels.cuda import ptx, ptx_matrix, ptx_tile

    integer, word, real = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"]
    load, float_of = ptx_tile.LOAD_SHARED[1], ptx_tile.float_of
    filters, step, warp_bytes, warps = variant.filters, variant.sums_step, variant.warp_bytes, variant.threads // 32
    chunks, set_chunks, of_block, shift = variant.chunks, variant.set_chunks, variant.of_block, variant.shift
    run, pixel_step = integer(variant.lines.run), variant.lines.step
    store = ptx_matrix.store_floats_at(
        tuple(
            (0, ((j * CHUNK + e % 2) * step + i * 16 + e // 2 * 8) * 4)
            for i in range(filters // 16)
            for j in range(set_chunks)
            for e in range(4)
        ),
        1,
    )

    @ptx.inline
    def sum_of(segment, element, filter_, first_phase, before, first_set, f):
        shared, total = integer(ptx_tile.dynamic_shared()), real(0.0)
        for phase in range(of_block):
            past = integer(element + (before + shift + (first_phase + phase) * pixel_step & CHUNK - 1))
            chunk = integer(segment * chunks + (past >> 3) - first_set * set_chunks)
            set_, inner = ptx.divided(integer(max(chunk, integer(0))), integer(set_chunks))
            if chunk >= 0 and set_ < f.sets:
                at = integer(((inner * CHUNK + (past & CHUNK - 1)) * step + filter_) * 4)
                split = integer(0)
                while split < f.parts:
                    warp = integer((split * of_block + phase) * f.sets + set_)
                    total = total + float_of(load(word(shared + warp * warp_bytes + at)))
                    split = integer(split + 1)
        return total

    @ptx.inline
    def written(acc, parts, first_phase, before, first_set, lane, f, thread):
        shared, row = integer(ptx_tile.dynamic_shared()), integer(thread >> 5)
        ptx.cuda.syncthreads()
        store(word(shared + row * warp_bytes + ((lane & 3) * (2 * step) + (lane >> 2)) * 4), acc)
        ptx.cuda.syncthreads()
        groups_k, _ = ptx.divided(integer(f.out_c + filters - 1), integer(filters))
        rows = integer(f.planes * f.taps_h * run)
        rows = integer(rows + (rows & 1))
        place = integer(((ptx.block_z() * f.blocks + ptx.block_x()) * groups_k + ptx.block_y()) * rows * filters)
        while row < rows:
            segment, element = ptx.divided(row, run)
            o = lane
            while o < filters:
                total = sum_of(segment, element, o, first_phase, before, first_set, f)
                parts[integer(place + row * filters + o)] = total
                o = integer(o + 32)
            row = integer(row + warps)

    return written
