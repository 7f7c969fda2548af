"""Forward convolution of few channels a group, and bwd_data of stride 1: windows of tiles in shared memory.

    y[n, k, p, q] = sum over c, r, s of  x[n, c, p*u + r*d - pad, q*u + s*d - pad] * w[k, c, r, s]

`window_plan.py` has the tiling. A block brings its units' filters to shared memory once, then takes tile after tile:

    1. fill the slabs (4 loads of a thread under way)      2. each warp takes tasks: some pixels of one unit
    3. sum the windows quad by quad                        4. epilogue, straight from registers

Matrix units (f16, bf16, TF32), 16 products of a window a step: quads 4i..4i+3, of which lane 4g + t has quad 4i + t of
pixels g and g + 8 of each m16 tile in one load, and of filter g of each n8 tile in another:

    m16n8k16:  k = 2t, 2t+1 | 2t+8, 2t+9  are the channels 0, 1 | 2, 3 of quad 4i + t: any order of k will do
    m16n8k8 (TF32), twice:  k = t | t + 4  are its channels 0 | 1, then 2 | 3

The filters of n8 tiles are dealt so that a lane ends with neighbours, to be stored as up to 16 bytes. FMA units (f32):
a thread has 4 pixels, 32 apart, of 8 or 16 filters: about 12 products a load of 16 bytes, most of which are
broadcasts.
Traffic: x once a tile and unit set, y once. Accumulates in float32. Source: own.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.window_filters import fill_filters, fill_table
from nbdnn.kernels.cuda.window_records import Forward, Windows
from nbdnn.kernels.cuda.window_store import stored_in_turn
from nbdnn.kernels.cuda.window_tile import fill, tile_place

THREADS = 256
_WARPS = THREADS // 32
_BATCH = 4  # loads of a thread that are under way together
FMA_PIXELS = 4  # of a thread


def mma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Forward(*specialised_on)
    shape, filters, m_tiles, run = variant.shape, variant.filters, variant.m_tiles, variant.run
    integer, word, real = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"]
    n_tiles, quad_bytes, pixel_bytes = filters // 8, shape.quad_bytes, shape.pixel_bytes
    load_offset, load = ptx_tile.LOAD_SHARED[1], ptx_tile.LOAD_SHARED[quad_bytes // 4]
    multiply = ptx_tile.MULTIPLY["tf32" if shape.math == "tf32" else shape.dtype]
    loads_of_b = n_tiles * quad_bytes // 4
    count, together = m_tiles * n_tiles * 4, max(run, 2)  # `together` outputs of a lane are neighbours

    @ptx.inline
    def accumulated(acc, at, a, b):
        """A lane's products of an m16n8 tile: two filters of pixel g, and the same of pixel g + 8.

        The sums lie pixel by pixel, and of a pixel as in memory.
        """
        other = at + 2 * n_tiles
        product = multiply(a, b, (acc[at], acc[at + 1], acc[other], acc[other + 1]))
        acc[at], acc[at + 1], acc[other], acc[other + 1] = product

    @ptx.inline
    def narrow_products(acc, mi, low, high, b, live):
        zero = word(0)
        a = (
            low[0] if live else zero,
            high[0] if live else zero,
            low[1] if live else zero,
            high[1] if live else zero,
        )
        for ni in range(n_tiles):
            accumulated(acc, (mi * 2 * n_tiles + ni) * 2, a, (b[2 * ni], b[2 * ni + 1]))

    @ptx.inline
    def tf32_products(acc, mi, low, high, b, live):
        zero = word(0)
        first = (
            low[0] if live else zero,
            high[0] if live else zero,
            low[1] if live else zero,
            high[1] if live else zero,
        )
        second = (
            low[2] if live else zero,
            high[2] if live else zero,
            low[3] if live else zero,
            high[3] if live else zero,
        )
        for ni in range(n_tiles):
            at = (mi * 2 * n_tiles + ni) * 2
            accumulated(acc, at, first, (b[4 * ni], b[4 * ni + 1]))
            accumulated(acc, at, second, (b[4 * ni + 2], b[4 * ni + 3]))

    @ptx.inline
    def narrow_fragment(b, ni, where):
        b[2 * ni], b[2 * ni + 1] = load(where)

    @ptx.inline
    def tf32_fragment(b, ni, where):
        b[4 * ni], b[4 * ni + 1], b[4 * ni + 2], b[4 * ni + 3] = load(where)

    tf32 = shape.math == "tf32"
    products, fragment = (tf32_products, tf32_fragment) if tf32 else (narrow_products, narrow_fragment)

    @ptx.inline
    def add_step(acc, pixels, table, filters_at, lane, live):
        """Four quads of every window. A lane whose quad is beyond the last has zeros: there x may be infinite."""
        offset = integer(load_offset(word(table)))
        b = ptx.cuda.local.array(loads_of_b, word)
        for ni in range(n_tiles):
            fragment(b, ni, word(filters_at + (ni * 32 + lane) * quad_bytes))
        for mi in range(m_tiles):
            at = integer(pixels[mi] + offset)
            products(acc, mi, load(word(at)), load(word(at + 8 * pixel_bytes)), b, live)

    @ptx.inline
    def sum_windows(acc, pixels, unit, lane, f):
        shared = integer(ptx_tile.dynamic_shared())
        whole, rest = f.quads >> 2, f.quads & 3
        t = lane & 3
        table = integer(shared + t * 4)
        filters_at = integer(shared + f.filters + unit * (f.quads + 3 >> 2) * filters * 4 * quad_bytes)
        step = integer(0)
        while step < whole:
            add_step(acc, pixels, table, filters_at, lane, True)
            table = integer(table + 16)
            filters_at = integer(filters_at + filters * 4 * quad_bytes)
            step = integer(step + 1)
        if rest > 0:
            add_step(acc, pixels, table, filters_at, lane, t < rest)

    @ptx.inline
    def place_of(eighth, inner, state):
        """Of some filters, from the `inner`-th that a lane has, of pixel g of each eight that its warp takes."""
        part, t, to, f = state
        n, p_first, q_first, first, channel = to
        pixel = integer(part * m_tiles * 16 + eighth * 8)
        p, q = integer(p_first + (pixel >> f.columns_log2)), integer(q_first + (pixel & (1 << f.columns_log2) - 1))
        of, rest = ptx.divided(inner, integer(together))
        o = integer((of * 4 + t) * together + rest)
        k = integer(channel + o)
        place = integer(n * f.out_n + p * f.out_h + q * f.out_w + k * f.out_c)
        return p < f.rows and q < f.columns and first + o < f.group_out, place, k

    store_all = stored_in_turn(place_of, shape.dtype, variant.epilogue, m_tiles * 2, n_tiles * 2, run)

    @ptx.inline
    def task_outputs(unit, part, slab, lane, to, extra, f):
        g, t = integer(lane >> 2), integer(lane & 3)
        mask = integer((integer(1) << f.columns_log2) - 1)
        pixels = ptx.cuda.local.array(m_tiles, integer)
        for mi in range(m_tiles):
            pixel = integer((part * m_tiles + mi) * 16 + g)
            row, column = pixel >> f.columns_log2, pixel & mask
            pixels[mi] = integer(slab + row * f.stride_h * f.row_bytes + column * pixel_bytes)
        acc = ptx.cuda.local.array(count, real)
        for i in range(count):
            acc[i] = real(0.0)
        sum_windows(acc, pixels, unit, lane, f)
        y, n, p, q, first, channel = to
        store_all(acc, y, extra, (part, t, (n, p, integer(q + g), first, channel), f))

    return _kernel(variant, task_outputs)


def fma_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    variant = Forward(*specialised_on)
    shape, filters, run = variant.shape, variant.filters, variant.run
    integer, word, real = ptx.INTEGER[32], ptx.cuda.types.uint32, ptx.REAL["f32"]
    channels, pixel_bytes = shape.channels, shape.pixel_bytes
    load_offset, load, value = ptx_tile.LOAD_SHARED[1], ptx_tile.LOAD_SHARED[4], ptx_tile.float_of
    count, held = FMA_PIXELS * filters, FMA_PIXELS * 4
    row_bytes = filters * 4

    @ptx.inline
    def add_four(acc, at, x, filters_four):
        a, b, c, d = filters_four
        acc[at] = ptx.fma(x, value(a), acc[at])
        acc[at + 1] = ptx.fma(x, value(b), acc[at + 1])
        acc[at + 2] = ptx.fma(x, value(c), acc[at + 2])
        acc[at + 3] = ptx.fma(x, value(d), acc[at + 3])

    @ptx.inline
    def sum_windows(acc, pixels, unit, f):
        shared = integer(ptx_tile.dynamic_shared())
        filters_at = integer(shared + f.filters + unit * f.quads * channels * row_bytes)
        inputs = ptx.cuda.local.array(held, real)
        quad = integer(0)
        while quad < f.quads:
            offset = integer(load_offset(word(shared + quad * 4)))
            for j in range(FMA_PIXELS):
                a, b, c, d = load(word(integer(pixels[j] + offset)))
                inputs[4 * j], inputs[4 * j + 1] = value(a), value(b)
                inputs[4 * j + 2], inputs[4 * j + 3] = value(c), value(d)
            for channel in range(channels):
                for o in range(0, filters, 4):
                    four = load(word(filters_at + channel * row_bytes + o * 4))
                    for j in range(FMA_PIXELS):
                        add_four(acc, j * filters + o, inputs[4 * j + channel], four)
            filters_at = integer(filters_at + channels * row_bytes)
            quad = integer(quad + 1)

    @ptx.inline
    def place_of(j, o, state):
        """Of some filters, from `o` on, of a thread's j-th pixel."""
        part, lane, to, f = state
        n, p_first, q_first, first, channel = to
        pixel = integer((part * FMA_PIXELS + j) * 32 + lane)
        p, q = integer(p_first + (pixel >> f.columns_log2)), integer(q_first + (pixel & (1 << f.columns_log2) - 1))
        k = integer(channel + o)
        at = integer(n * f.out_n + p * f.out_h + q * f.out_w + k * f.out_c)
        return p < f.rows and q < f.columns and first + o < f.group_out, at, k

    store_all = stored_in_turn(place_of, shape.dtype, variant.epilogue, FMA_PIXELS, filters, run)

    @ptx.inline
    def task_outputs(unit, part, slab, lane, to, extra, f):
        mask = integer((integer(1) << f.columns_log2) - 1)
        pixels = ptx.cuda.local.array(FMA_PIXELS, integer)
        for j in range(FMA_PIXELS):
            pixel = integer((part * FMA_PIXELS + j) * 32 + lane)
            row, column = pixel >> f.columns_log2, pixel & mask
            pixels[j] = integer(slab + row * f.stride_h * f.row_bytes + column * pixel_bytes)
        acc = ptx.cuda.local.array(count, real)
        for i in range(count):
            acc[i] = real(0.0)
        sum_windows(acc, pixels, unit, f)
        y, n, p, q, first, channel = to
        store_all(acc, y, extra, (part, lane, (n, p, q, first, channel), f))

    return _kernel(variant, task_outputs)


def _kernel(variant: Forward, task_outputs):
    """The kernel whose warps call `task_outputs` for each part of the pixels of a tile, and each unit."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    shape, filters, integer = variant.shape, variant.filters, ptx.INTEGER[32]
    fill_slabs, fill_w = fill(shape, THREADS, _BATCH), fill_filters(variant, THREADS)
    fill_offsets, placed = fill_table(shape, THREADS), tile_place()

    def windows(x, w, y, bias, residual, alpha, beta, f):
        thread = integer(ptx.thread_x())
        first_unit = integer(ptx.block_y() * f.block_units)
        first_group, _ = ptx.divided(first_unit, f.chunks)
        slabs_at = integer(integer(ptx_tile.dynamic_shared()) + f.slabs)

        # 1. The filters and the table.
        fill_offsets(f, thread)
        fill_w(w, first_unit, f, thread)
        tile = integer(ptx.block_x())
        while tile < f.tiles:
            # 2. The slabs.
            n, p, q, top, left = placed(tile, f)
            ptx.cuda.syncthreads()
            fill_slabs(x, n, first_group, top, left, f, thread)
            ptx.cuda.syncthreads()

            # 3. Each warp sums and stores windows of one unit after the other.
            task = integer(thread >> 5)
            while task < f.parts * f.block_units:
                unit, part = ptx.divided(task, f.parts)
                group, chunk = ptx.divided(integer(first_unit + unit), f.chunks)
                if first_unit + unit < f.units:
                    slab = integer(slabs_at + (group - first_group) * f.slab_bytes)
                    first = integer(chunk * filters)
                    to = (y, n, p, q, first, integer(group * f.group_out + first))
                    task_outputs(unit, part, slab, integer(thread & 31), to, (bias, residual, alpha, beta), f)
                task = integer(task + _WARPS)
            tile = integer(tile + f.blocks)

    data, scalar = ptx.pointer(shape.dtype), ptx.REAL["f32"]
    return windows, (data, data, data, data, data, scalar, scalar, ptx.record(Windows, 32))
