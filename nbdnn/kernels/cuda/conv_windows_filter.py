"""Filter gradient of few channels a group: windows of tiles in shared memory, and dy of their pixels beside them.

    dw[k, c, r, s] = sum over n, p, q of  x[n, c, p*u + r*d - pad, q*u + s*d - pad] * dy[n, k, p, q]

`window_plan.py` has the tiling. A block takes tile after tile of its units, and each warp keeps the sums of some quads
of the window (all channels) times the filters of a unit, over all pixels or, where warps are left, some of them:

    1. fill slabs and dy       2. sum over pixels      3. warps of different pixels add up, in order, in shared memory
    4. the block's sums to the workspace               5. those of all blocks add up, in order, in `window_sums.py`

Matrix units: m16 = quads g and g + 8 (one channel, a tile a channel), n8 = filters, k = pixels. A lane loads a quad of
a pixel at once and pairs the halves of two pixels: its channels are rows of as many tiles. FMA units: a lane has two
quads (6 or 8 channels) of 8 filters; lanes beyond the quads take other pixels.
Traffic: x and dy once a unit set, the sums of each block twice. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.window_gradients import fill_gradients, pixels_of_tile
from nbdnn.kernels.cuda.window_records import Gradient, Windows
from nbdnn.kernels.cuda.window_tile import fill, held_words, quad_offset, tile_place
from nbdnn.problem import ITEMSIZE

THREADS = 256
_BATCH = 4  # loads of a thread that are under way together


def mma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Gradient(*specialised_on)
    shape, filters = variant.shape, variant.filters
    integer, word, real = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"]
    tf32, channels, n_tiles = shape.math == "tf32", shape.channels, filters // 8
    pixel_bytes, itemsize = shape.pixel_bytes, ITEMSIZE[shape.dtype]
    step = 8 if tf32 else 16  # pixels
    tile_pixels = pixels_of_tile()
    words_of_quad = shape.quad_bytes // 4
    load, (put, _) = ptx_tile.LOAD_SHARED[words_of_quad], held_words(words_of_quad)
    load_word, store_word = ptx_tile.LOAD_SHARED[1], ptx_tile.STORE_SHARED[1]
    multiply = ptx_tile.MULTIPLY["tf32" if tf32 else shape.dtype]
    pairs = ptx_tile.PAIR_HALVES
    low_halves, high_halves = pairs[0], pairs[1]
    held = 2 * (step // 4) * words_of_quad
    count, b_words = channels * n_tiles * 4, n_tiles * 2
    second_tile = 16 if n_tiles > 1 else 0  # bytes to the filters of the matrices that complete a load of four

    @ptx.inline
    def accumulated(acc, at, a, b):
        product = multiply(a, b, (acc[at], acc[at + 1], acc[at + 2], acc[at + 3]))
        acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = product

    @ptx.inline
    def quad_words(words, at, where, live):
        """A pixel's quad, of zeros where dy has no such pixel: there x may be infinite."""
        put(words, at, load(word(where)))
        for k in range(words_of_quad):
            words[at + k] = words[at + k] if live else word(0)

    @ptx.inline
    def narrow_step(acc, x_first, x_second, left, gradients, lane, f):
        """16 pixels, of which lane 4g + t has 2t, 2t + 1, 2t + 8 and 2t + 9, in the image from where it is given."""
        words, b = ptx.cuda.local.array(held, word), ptx.cuda.local.array(b_words, word)
        for j in range(4):
            ahead = j // 2 * 8 + j % 2
            quad_words(words, j * 2, integer(x_first + ahead * pixel_bytes), left > ahead)
            quad_words(words, 8 + j * 2, integer(x_second + ahead * pixel_bytes), left > ahead)
        matrix, row = lane >> 3, lane & 7
        at = integer(gradients + ((matrix & 1) * 8 + row) * f.dy_bytes + (matrix >> 1) * second_tile)
        for ni in range(0, n_tiles, 2):
            b0, b1, b2, b3 = ptx_tile.load_matrices_transposed(word(at + ni * 16))
            b[2 * ni], b[2 * ni + 1] = b0, b1
            if ni + 1 < n_tiles:
                b[2 * ni + 2], b[2 * ni + 3] = b2, b3
        for c in range(channels):
            w = c // 2
            if c % 2 == 0:
                a = (
                    low_halves(words[w], words[2 + w]),
                    low_halves(words[8 + w], words[10 + w]),
                    low_halves(words[4 + w], words[6 + w]),
                    low_halves(words[12 + w], words[14 + w]),
                )
            else:
                a = (
                    high_halves(words[w], words[2 + w]),
                    high_halves(words[8 + w], words[10 + w]),
                    high_halves(words[4 + w], words[6 + w]),
                    high_halves(words[12 + w], words[14 + w]),
                )
            for ni in range(n_tiles):
                accumulated(acc, (c * n_tiles + ni) * 4, a, (b[2 * ni], b[2 * ni + 1]))

    @ptx.inline
    def tf32_step(acc, x_first, x_second, left, gradients, lane, f):
        """8 pixels, of which lane 4g + t has t and t + 4."""
        words, b = ptx.cuda.local.array(held, word), ptx.cuda.local.array(b_words, word)
        for j in range(2):
            quad_words(words, j * 4, integer(x_first + j * 4 * pixel_bytes), left > j * 4)
            quad_words(words, 8 + j * 4, integer(x_second + j * 4 * pixel_bytes), left > j * 4)
        at = integer(gradients + (lane & 3) * f.dy_bytes + (lane >> 2) * 4)
        for ni in range(n_tiles):
            b[2 * ni] = load_word(word(at + ni * 32))
            b[2 * ni + 1] = load_word(word(at + ni * 32 + 4 * f.dy_bytes))
        for c in range(channels):
            a = (words[c], words[8 + c], words[4 + c], words[12 + c])
            for ni in range(n_tiles):
                accumulated(acc, (c * n_tiles + ni) * 4, a, (b[2 * ni], b[2 * ni + 1]))

    add_step, first_pixel = (tf32_step, 1) if tf32 else (narrow_step, 2)

    @ptx.inline
    def begin(acc):
        for i in range(count):
            acc[i] = real(0.0)

    @ptx.inline
    def offsets_of(offset, quads, lane, f):
        """Of the two quads of a lane; one beyond the last has the first one's, and sums that nobody reads."""
        first, second = integer(quads + (lane >> 2)), integer(quads + (lane >> 2) + 8)
        return (
            offset(first, f) if first < f.quads else integer(0),
            offset(second, f) if second < f.quads else integer(0),
        )

    @ptx.inline
    def add_tile(acc, slab, gradients, x_first, x_second, split, rows_left, columns_left, lane, f):
        """The pixels of a tile that are the split's. Of the tile, so many rows and columns have outputs."""
        mask = integer((integer(1) << f.columns_log2) - 1)
        ahead = integer((lane & 3) * first_pixel)
        m, pixels = integer(split * step), tile_pixels(f)
        while m < pixels:
            row, column = integer(m >> f.columns_log2), integer(m & mask)
            left = integer(columns_left - column)
            if row < rows_left and left > 0:
                at = integer(slab + row * f.stride_h * f.row_bytes + (column + ahead) * pixel_bytes)
                add_step(
                    acc,
                    integer(at + x_first),
                    integer(at + x_second),
                    integer(left - ahead),
                    integer(gradients + m * f.dy_bytes),
                    lane,
                    f,
                )
            m = integer(m + f.parts * step)

    @ptx.inline
    def keep(acc, place, lane, base, slot, slots, is_first):
        """The sums to shared memory, [quad][channel][slot], or added to what is there."""
        quad, filter_ = integer(place + (lane >> 2)), integer(slot + (lane & 3) * 2)
        for c in range(channels):
            for ni in range(n_tiles):
                for e in range(4):
                    row = integer((quad + e // 2 * 8) * channels + c)
                    where = word(base + (row * slots + filter_ + ni * 8 + e % 2) * 4)
                    value = acc[(c * n_tiles + ni) * 4 + e]
                    if not is_first:
                        value = value + ptx_tile.float_of(load_word(where))
                    store_word(where, ptx_tile.word_of(value))

    return _kernel(variant, count, begin, offsets_of, add_tile, keep, itemsize)


def fma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Gradient(*specialised_on)
    shape, filters = variant.shape, variant.filters
    integer, word, real = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"]
    channels, lanes = shape.channels, variant.rows // 2  # of a warp, that have quads of their own
    pixel_bytes, tile_pixels = shape.pixel_bytes, pixels_of_tile()
    load, value = ptx_tile.LOAD_SHARED[4], ptx_tile.float_of
    load_word, store_word = ptx_tile.LOAD_SHARED[1], ptx_tile.STORE_SHARED[1]
    count, step = 2 * channels * filters, 32 // lanes
    lanes_log2 = lanes.bit_length() - 1

    @ptx.inline
    def begin(acc):
        for i in range(count):
            acc[i] = real(0.0)

    @ptx.inline
    def offsets_of(offset, quads, lane, f):
        """Of the two quads of a lane; one beyond the last has the first one's, and sums that nobody reads."""
        first = integer(quads + (lane & (lanes - 1)))
        second = integer(first + lanes)
        return (
            offset(first, f) if first < f.quads else integer(0),
            offset(second, f) if second < f.quads else integer(0),
        )

    @ptx.inline
    def add_tile(acc, slab, gradients, x_first, x_second, split, rows_left, columns_left, lane, f):
        mask = integer((integer(1) << f.columns_log2) - 1)
        inputs = ptx.cuda.local.array(8, real)
        m, pixels = integer(split * step + (lane >> lanes_log2)), tile_pixels(f)
        while m < pixels:
            row, column = integer(m >> f.columns_log2), integer(m & mask)
            if row < rows_left and column < columns_left:
                at = integer(slab + row * f.stride_h * f.row_bytes + column * pixel_bytes)
                a, b, c, d = load(word(at + x_first))
                inputs[0], inputs[1], inputs[2], inputs[3] = value(a), value(b), value(c), value(d)
                a, b, c, d = load(word(at + x_second))
                inputs[4], inputs[5], inputs[6], inputs[7] = value(a), value(b), value(c), value(d)
                from_ = integer(gradients + m * f.dy_bytes)
                for o in range(0, filters, 4):
                    a, b, c, d = load(word(from_ + o * 4))
                    for h in range(2):
                        for channel in range(channels):
                            i = (h * channels + channel) * filters + o
                            acc[i] = ptx.fma(inputs[4 * h + channel], value(a), acc[i])
                            acc[i + 1] = ptx.fma(inputs[4 * h + channel], value(b), acc[i + 1])
                            acc[i + 2] = ptx.fma(inputs[4 * h + channel], value(c), acc[i + 2])
                            acc[i + 3] = ptx.fma(inputs[4 * h + channel], value(d), acc[i + 3])
            m = integer(m + f.parts * step)

    @ptx.inline
    def keep(acc, place, lane, base, slot, slots, is_first):
        """The lanes of different pixels add up; then as of the matrix kernel."""
        for h in range(2):
            quad = integer(place + h * lanes + (lane & (lanes - 1)))
            for channel in range(channels):
                row = integer(quad * channels + channel)
                for o in range(filters):
                    total = acc[(h * channels + channel) * filters + o]
                    for exchange in range(lanes_log2, 5):
                        total = total + ptx.shuffle_xor(total, 1 << exchange)
                    where = word(base + (row * slots + slot + o) * 4)
                    if lane < lanes:
                        if not is_first:
                            total = total + value(load_word(where))
                        store_word(where, ptx_tile.word_of(total))

    return _kernel(variant, count, begin, offsets_of, add_tile, keep, 4)


def _kernel(variant: Gradient, count: int, begin, offsets_of, add_tile, keep, itemsize: int):
    """The kernel whose warps sum by these functions."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    shape, filters = variant.shape, variant.filters
    integer, word, real = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"]
    fill_slabs, fill_dy = fill(shape, THREADS, _BATCH), fill_gradients(variant, THREADS, _BATCH)
    placed, offset = tile_place(), quad_offset(shape)
    rows, row_sums = variant.rows, shape.channels * filters
    load_four, store_four = ptx_tile.LOAD_SHARED[4], ptx.STORE[4]

    def gradients(x, dy, parts, f):
        thread = integer(ptx.thread_x())
        warp, lane = integer(thread >> 5), integer(thread & 31)
        shared = integer(ptx_tile.dynamic_shared())
        units, block_rows = f.block_units, integer(f.quad_blocks * rows)
        first_unit = integer(ptx.block_y() * units)
        first_group, _ = ptx.divided(first_unit, f.chunks)
        rest, split = ptx.divided(warp, f.parts)
        quad_block, unit = ptx.divided(rest, units)
        group, _ = ptx.divided(integer(first_unit + unit), f.chunks)
        slab = integer(shared + f.slabs + (group - first_group) * f.slab_bytes)
        dy_at = integer(shared + f.filters + unit * filters * itemsize)
        block_quads = integer(ptx.block_z() * block_rows)
        x_first, x_second = offsets_of(offset, integer(block_quads + quad_block * rows), lane, f)
        taken = quad_block < f.quad_blocks  # the last warps may have nothing to sum
        sums_here = taken and first_unit + unit < f.units
        acc = ptx.cuda.local.array(count, real)
        begin(acc)

        tile = integer(ptx.block_x())
        while tile < f.tiles:
            # 1. The slabs and dy.
            n, p, q, top, left = placed(tile, f)
            ptx.cuda.syncthreads()
            fill_slabs(x, n, first_group, top, left, f, thread)
            fill_dy(dy, n, p, q, first_unit, f, thread)
            ptx.cuda.syncthreads()

            # 2. Each warp sums pixels.
            if sums_here:
                rows_left, columns_left = integer(f.rows - p), integer(f.columns - q)
                add_tile(acc, slab, dy_at, x_first, x_second, split, rows_left, columns_left, lane, f)
            tile = integer(tile + f.blocks)

        # 3. The splits, one after the other.
        turn = integer(0)
        while turn < f.parts:
            ptx.cuda.syncthreads()
            if taken and split == turn:
                slot, slots = integer(unit * filters), integer(units * filters)
                keep(acc, integer(quad_block * rows), lane, shared, slot, slots, turn == 0)
            turn = integer(turn + 1)
        ptx.cuda.syncthreads()

        # 4. The block's sums.
        sums = integer(block_rows * units * row_sums)
        blocks_y, _ = ptx.divided(integer(f.units + units - 1), units)
        blocks_z, _ = ptx.divided(integer(f.quads + block_rows - 1), block_rows)
        to = integer(((ptx.block_x() * blocks_y + ptx.block_y()) * blocks_z + ptx.block_z()) * sums)
        i = integer(thread * 4)
        while i < sums:
            store_four(parts, integer(to + i), load_four(word(shared + i * 4)))
            i = integer(i + THREADS * 4)

    data, sums_type = ptx.pointer(shape.dtype), ptx.pointer("f32")
    return gradients, (data, data, sums_type, ptx.record(Windows, 32))
