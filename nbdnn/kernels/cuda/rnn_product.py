"""Products over all steps of a recurrent network on the FMA units: a block's tile is 64 x 64, a stage 16 values of k.

    sums         C[row, gate's unit] = sum over inputs     of x W^T, + bW, + bR where gates add both
    inputs       C[row, input]       = sum over directions and gates' units  of da W
    parameters   C[gate's unit, input or unit] = sum over rows of da^T x or db^T h', and sums of da or db for the biases

A row is a step of an image. A thread has 8 x 4 of C. Stages lie in two buffers of shared memory, k by k: the next one
is loaded to registers, from operands of any stride and alignment, while this one is multiplied: 3 loads of 16 bytes for
32 multiply-adds, of which a warp's meet each bank at most twice. Sums of parameters are taken in parts, added in
their order by `rnn_parts.py`. Accumulates in the compute type. Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

TILE, STAGE_K, THREADS = 64, 16, 128
_PITCH = TILE + 4  # elements of a row of shared memory: one k
_ROWS, _COLUMNS = 8, 4  # of C, of a thread
_COPIES = TILE * STAGE_K // THREADS  # of a thread, of each operand


class Kind(NamedTuple):
    """What a product is compiled for.

    form: sums, inputs or parameters. skip: there is no W, x itself stands for W x (sums alone). states: B is h', the
    outputs of the step before and hx. words: elements of C that are stored at once.
    """

    form: str
    a_dtype: str
    b_dtype: str
    out_dtype: str
    state_dtype: str
    skip: bool
    states: bool
    words: int
    bits: int

    @property
    def compute(self) -> str:
        return DEFAULT_COMPUTE[self.a_dtype]


class Fields(NamedTuple):
    """C[i, j] = sum over segments and k of A[i, k] * B[j, k], of each direction.

    m, n, k: extents, k of a segment; stages: of a segment or a part. An element of A lies at a_first + direction *
    a_direction + segment * a_segment + i * a_m + k * a_k, + a_jump where i >= jump_at; of B and C likewise.
    bias: the first of bW; both: for how many j bR, n elements on, is added. hidden: what a gate's index wraps at.
    batch, state_first: of hx, where states begin; state_direction: from a direction's to the next.
    """

    m: int
    n: int
    k: int
    segments: int
    stages: int
    tiles_n: int
    a_first: int
    a_direction: int
    a_segment: int
    a_m: int
    a_k: int
    jump_at: int
    a_jump: int
    b_first: int
    b_direction: int
    b_segment: int
    b_n: int
    b_k: int
    out_first: int
    out_direction: int
    out_part: int
    out_m: int
    bias: int
    bias_direction: int
    both: int
    hidden: int
    batch: int
    state_first: int
    state_direction: int


def product_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_rnn, ptx_tile

    kind = Kind(*specialised_on)
    integer, real, small = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], ptx.INTEGER[32]
    u32, item = ptx.cuda.types.uint32, ITEMSIZE[kind.compute]
    widen_a, widen_b, widen_state = ptx.WIDEN[kind.a_dtype], ptx.WIDEN[kind.b_dtype], ptx.WIDEN[kind.state_dtype]
    narrow, of_sums, of_parameters = ptx.NARROW[kind.out_dtype], kind.form == "sums", kind.form == "parameters"
    skip, states, words = kind.skip, kind.states, kind.words
    a_along_k, b_along_k = not of_parameters, of_sums
    lanes = 16 // item
    load_shared, store_words = ptx_local.load_shared(kind.compute, lanes), ptx.STORE[4]
    select = ptx_rnn.select
    count, buffer_elems, zero = _ROWS * _COLUMNS, 2 * STAGE_K * _PITCH, real(0.0)
    shared_elems = 2 * buffer_elems

    def placed(along_k):
        """Device function (thread, i) -> (place in the tile, k) of a thread's copy i."""

        @ptx.inline
        def neighbours_in_k(thread, i):
            return small(thread // STAGE_K + i * (THREADS // STAGE_K)), small(thread & (STAGE_K - 1))

        @ptx.inline
        def neighbours_in_tile(thread, i):
            return small(thread & (TILE - 1)), small(thread // TILE + i * (THREADS // TILE))

        return neighbours_in_k if along_k else neighbours_in_tile

    a_place, b_place = placed(a_along_k), placed(b_along_k)

    @ptx.inline
    def lines(a_lines, b_lines, thread, direction, first_m, first_n, f):
        """Where the rows of A and B begin of which a thread copies elements: the last one stands for those beyond it,
        which are in no element of C."""
        for i in range(_COPIES):
            row, _ = a_place(thread, i)
            row = integer(min(integer(first_m + row), integer(f.m - 1)))
            a_lines[i] = integer(f.a_first + direction * f.a_direction + row * f.a_m)
            if of_parameters and row >= f.jump_at:
                a_lines[i] = integer(a_lines[i] + f.a_jump)
            row, _ = b_place(thread, i)
            row = integer(max(integer(min(integer(first_n + row), integer(f.n - 1))), integer(0)))
            b_lines[i] = integer(f.b_first + direction * f.b_direction + row * f.b_n)

    @ptx.inline
    def load_a(a, values, a_lines, thread, segment, k_first, f):
        for i in range(_COPIES):
            _, k = a_place(thread, i)
            k = integer(k_first + k)
            at = integer(a_lines[i] + segment + min(k, integer(f.k - 1)) * f.a_k)
            values[i] = select(k < f.k, widen_a(ptx.load_constant(a, at)), zero)

    @ptx.inline
    def load_b(b, state, values, b_lines, thread, direction, first, segment, k_first, f):
        for i in range(_COPIES):
            row, k = b_place(thread, i)
            k = integer(k_first + k)
            here = integer(min(k, integer(f.k - 1)))
            if states:
                here = integer(here + (f.batch if direction else -f.batch))
            at = integer(b_lines[i] + segment + max(integer(min(here, integer(f.k - 1))), integer(0)) * f.b_k)
            value = widen_b(ptx.load_constant(b, at))
            if states and not 0 <= here < f.k:
                value = zero
                if ptx_rnn.given(state):
                    image = integer(here - f.k) if direction else integer(here + f.batch)
                    column = integer(min(integer(first + row), integer(f.n - 1)))
                    at = integer(f.state_first + direction * f.state_direction + image * f.hidden + column)
                    value = widen_state(ptx.load_constant(state, at))
            values[i] = select(k < f.k, value, zero)

    @ptx.inline
    def to_shared(shared, buffer, thread, values_a, values_b):
        for i in range(_COPIES):
            row, k = a_place(thread, i)
            shared[small(buffer * buffer_elems + k * _PITCH + row)] = values_a[i]
            row, k = b_place(thread, i)
            shared[small(buffer * buffer_elems + (STAGE_K + k) * _PITCH + row)] = values_b[i]

    @ptx.inline
    def multiply(shared, buffer, m, n, sums, of_a, a, b):
        base = u32(ptx_tile.shared_address(shared) + u32(buffer * (buffer_elems * item)))
        for k in range(STAGE_K):
            for i in range(0, _ROWS, lanes):
                load_shared(a, i, u32(base + u32((k * _PITCH + m + i) * item)))
            for i in range(0, _COLUMNS, lanes):
                load_shared(b, i, u32(base + u32(((STAGE_K + k) * _PITCH + n + i) * item)))
            for i in range(_ROWS):
                if of_parameters:
                    of_a[i] = of_a[i] + a[i]
                for j in range(_COLUMNS):
                    sums[i * _COLUMNS + j] = ptx.fma(a[i], b[j], sums[i * _COLUMNS + j])

    @ptx.inline
    def finished(total, a, b, direction, row, column, f):
        """An element of C: with its biases, or what stands for a product where there is no W."""
        if of_sums:
            if skip:
                _, unit = ptx.divided(column, f.hidden)
                total = total + widen_a(ptx.load_constant(a, integer(f.a_first + row * f.a_m + unit)))
            bias = integer(f.bias + direction * f.bias_direction + column)
            total = total + widen_b(ptx.load_constant(b, bias))
            if column < f.both:
                total = total + widen_b(ptx.load_constant(b, integer(bias + f.n)))
        return total

    @ptx.inline
    def store(out, a, b, direction, part, first_row, first_column, sums, values, f):
        base = integer(f.out_first + direction * f.out_direction + part * f.out_part)
        for i in range(_ROWS):
            row = integer(first_row + i)
            if row < f.m:
                for j in range(_COLUMNS):
                    column = integer(first_column + j)
                    values[j] = sums[i * _COLUMNS + j]
                    if column < f.n:
                        values[j] = finished(values[j], a, b, direction, row, column, f)
                        if words == 1:
                            out[integer(base + row * f.out_m + column)] = narrow(values[j])
                if words == 4 and first_column < f.n:
                    four = ptx_tile.words_of((values[0], values[1], values[2], values[3]))
                    store_words(out, integer(base + row * f.out_m + first_column), four)

    def multiply_rows(a, b, state, out, f):
        # 1. Where a block and its threads are.
        thread = small(ptx.thread_x())
        tile_m, tile_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        direction, part = integer(ptx.block_y()), integer(ptx.block_z())
        m, n = small(thread // (TILE // _COLUMNS) * _ROWS), small((thread & (TILE // _COLUMNS - 1)) * _COLUMNS)
        first_m, first_n = integer(tile_m * TILE), integer(tile_n * TILE)
        shared = ptx.cuda.shared.array(shared_elems, real, alignment=16)
        sums, of_a = ptx.cuda.local.array(count, real), ptx.cuda.local.array(_ROWS, real)
        next_a, next_b = ptx.cuda.local.array(_COPIES, real), ptx.cuda.local.array(_COPIES, real)
        row_a, row_b = ptx.cuda.local.array(_ROWS, real), ptx.cuda.local.array(_COLUMNS, real)
        for i in range(count):
            sums[i] = zero
        for i in range(_ROWS):
            of_a[i] = zero

        # 2. Stages: the next one on its way to registers while one is multiplied.
        begin = integer(part * f.stages * STAGE_K)
        a_lines, b_lines = ptx.cuda.local.array(_COPIES, integer), ptx.cuda.local.array(_COPIES, integer)
        lines(a_lines, b_lines, thread, direction, first_m, first_n, f)
        a_segment, b_segment = integer(0), integer(0)
        total, stage, k = integer(f.segments * f.stages), integer(-1), begin
        in_segment = integer(0)
        while stage < total:
            if stage + 1 < total:
                load_a(a, next_a, a_lines, thread, a_segment, k, f)
                load_b(b, state, next_b, b_lines, thread, direction, first_n, b_segment, k, f)
                k, in_segment = integer(k + STAGE_K), integer(in_segment + 1)
                if in_segment == f.stages:
                    k, in_segment = begin, integer(0)
                    a_segment, b_segment = integer(a_segment + f.a_segment), integer(b_segment + f.b_segment)
            if stage >= 0:
                multiply(shared, small(stage & 1), m, n, sums, of_a, row_a, row_b)
            if stage + 1 < total:
                to_shared(shared, small((stage + 1) & 1), thread, next_a, next_b)
            ptx.cuda.syncthreads()
            stage = integer(stage + 1)

        # 3. C; and the sums of A's rows behind it.
        first_row, first_column = integer(first_m + m), integer(first_n + n)
        store(out, a, b, direction, part, first_row, first_column, sums, row_b, f)
        if of_parameters and first_column == 0:
            base = integer(f.out_first + direction * f.out_direction + part * f.out_part + f.m * f.n)
            for i in range(_ROWS):
                if first_row + i < f.m:
                    out[integer(base + first_row + i)] = narrow(of_a[i])

    types = [ptx.pointer(dtype) for dtype in (kind.a_dtype, kind.b_dtype, kind.state_dtype, kind.out_dtype)]
    return multiply_rows, (*types, ptx.record(Fields, kind.bits))
