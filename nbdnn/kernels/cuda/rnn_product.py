"""Products over all steps of a recurrent network: a block has 64 x 64 of C, a stage 16 values of k.

    sums         C[row, gate's unit] = sum over inputs     of x W^T, + bW, + bR where gates add both
    inputs       C[row, input]       = sum over directions and gates' units  of da W
    parameters   C[gate's unit, input or unit] = sum over rows of da^T x or db^T h', and sums of da or db for the biases

A row is a step of an image. The next stage is loaded to registers, from operands of any stride and alignment, while
this one is multiplied by the units of `rnn_product_tile.py`: those of matrices for networks of 16 bits, where the
device has them, and the FMA units for all others. The former take factors in TF32: 16-bit data are exact in it, and
what is float32 between layers and products is rounded to it, but for the sums of da and db. Sums of parameters are
taken in parts, added in their order by `rnn_parts.py`. Accumulates in the compute type. Float32 has larger tiles where
the device copies to shared memory by itself (`rnn_fma_product.py`). Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.rnn_product_tile import ALIGN_BYTES, RUN, STAGE_K, THREADS, TILE, Operand
from nbdnn.problem import DEFAULT_COMPUTE


class Kind(NamedTuple):
    """What a product is compiled for.

    form: sums, inputs or parameters. skip: there is no W, x itself stands for W x (sums alone). states: B is h', the
    outputs of the step before and hx. matrix: whether matrix units multiply. a_lanes, b_lanes, words: elements that are
    loaded and stored at once.
    """

    form: str
    a_dtype: str
    b_dtype: str
    out_dtype: str
    state_dtype: str
    skip: bool
    states: bool
    matrix: bool
    a_lanes: int
    b_lanes: int
    words: int
    bits: int

    @property
    def compute(self) -> str:
        return DEFAULT_COMPUTE[self.a_dtype]

    @property
    def a(self) -> Operand:
        return Operand(self.a_dtype, self.form != "parameters", self.a_lanes)

    @property
    def b(self) -> Operand:
        return Operand(self.b_dtype, self.form == "sums", self.b_lanes)


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
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_rnn, rnn_product_tile

    kind = Kind(*specialised_on)
    integer, real, small = ptx.INTEGER[kind.bits], ptx.REAL[kind.compute], ptx.INTEGER[32]
    widen_a, widen_b = ptx.WIDEN[kind.a_dtype], ptx.WIDEN[kind.b_dtype]
    narrow, of_sums, of_parameters = ptx.NARROW[kind.out_dtype], kind.form == "sums", kind.form == "parameters"
    skip, states, words, run = kind.skip, kind.states, kind.words, RUN[kind.matrix]
    a_copies, a_lanes, a_rows, a_k = kind.a.copies, kind.a.lanes, kind.a.rows, kind.a.of_k
    b_copies, b_lanes, b_rows, b_k = kind.b.copies, kind.b.lanes, kind.b.rows, kind.b.of_k
    a_place, b_place = rnn_product_tile.place(kind.a), rnn_product_tile.place(kind.b)
    load_lanes_a, load_lanes_b = ptx_local.load(kind.a_dtype, a_lanes), ptx_local.load(kind.b_dtype, b_lanes)
    load_state, store_words = ptx_local.load(kind.state_dtype, b_lanes), ptx_local.store(kind.out_dtype, words)
    copied = TILE * STAGE_K // THREADS  # elements of each operand, by a thread
    select, zero, slices = ptx_rnn.select, real(0.0), THREADS * a_lanes // TILE

    @ptx.inline
    def finished(total, a, b, direction, row, column, f):
        """An element of C: with its biases, or what stands for a product where there is no W."""
        if of_sums:
            if skip:
                _, hidden_unit = ptx.divided(column, f.hidden)
                total = total + widen_a(ptx.load_constant(a, integer(f.a_first + row * f.a_m + hidden_unit)))
            bias = integer(f.bias + direction * f.bias_direction + column)
            total = total + widen_b(ptx.load_constant(b, bias))
            if column < f.both:
                total = total + widen_b(ptx.load_constant(b, integer(bias + f.n)))
        return total

    @ptx.inline
    def store_run(given, row, first_column, values):
        out, a, b, direction, base, f = given
        row, first_column = integer(row), integer(first_column)
        if row < f.m:
            for j in range(run):
                column = integer(first_column + j)
                if column < f.n:
                    values[j] = finished(values[j], a, b, direction, row, column, f)
                    if words == 1:
                        out[integer(base + row * f.out_m + column)] = narrow(values[j])
            if words > 1 and first_column < f.n:
                store_words(out, integer(base + row * f.out_m + first_column), values, small(0))

    if kind.matrix:
        unit = rnn_product_tile.matrix_unit(kind.a, kind.b, store_run)
    else:
        unit = rnn_product_tile.fma_unit(kind.compute, store_run)
    shared_elems, no_sums, put_a, put_b, first, multiply, store = unit

    @ptx.inline
    def lines(a_lines, b_lines, thread, direction, first_m, first_n, f):
        """Where the rows of A and B begin of which a thread copies elements: the last ones stand for those beyond
        them, which are in no element of C."""
        for i in range(a_copies):
            row, _ = a_place(thread, i)
            row = integer(min(integer(first_m + row), integer(f.m - a_rows)))
            a_lines[i] = integer(f.a_first + direction * f.a_direction + row * f.a_m)
            if of_parameters and row >= f.jump_at:
                a_lines[i] = integer(a_lines[i] + f.a_jump)
        for i in range(b_copies):
            row, _ = b_place(thread, i)
            row = integer(max(integer(min(integer(first_n + row), integer(f.n - b_rows))), integer(0)))
            b_lines[i] = integer(f.b_first + direction * f.b_direction + row * f.b_n)

    @ptx.inline
    def load_a(a, values, a_lines, thread, segment, k_first, f):
        for i in range(a_copies):
            _, k = a_place(thread, i)
            k = integer(k_first + k)
            at = integer(a_lines[i] + segment + min(k, integer(f.k - a_k)) * f.a_k)
            load_lanes_a(values, small(i * a_lanes), a, at)
            for lane in range(a_lanes):
                values[i * a_lanes + lane] = select(k < f.k, values[i * a_lanes + lane], zero)

    @ptx.inline
    def load_b(b, state, values, b_lines, thread, direction, first, segment, k_first, f):
        for i in range(b_copies):
            row, k = b_place(thread, i)
            k = integer(k_first + k)
            here = integer(min(k, integer(f.k - b_k)))
            if states:
                here = integer(here + (f.batch if direction else -f.batch))
            at = integer(b_lines[i] + segment + max(integer(min(here, integer(f.k - b_k))), integer(0)) * f.b_k)
            load_lanes_b(values, small(i * b_lanes), b, at)
            if states and not 0 <= here < f.k:
                for lane in range(b_lanes):
                    values[i * b_lanes + lane] = zero
                if ptx_rnn.given(state):
                    image = integer(here - f.k) if direction else integer(here + f.batch)
                    column = integer(min(integer(first + row), integer(f.n - b_rows)))
                    at = integer(f.state_first + direction * f.state_direction + image * f.hidden + column)
                    load_state(values, small(i * b_lanes), state, at)
            for lane in range(b_lanes):
                values[i * b_lanes + lane] = select(k < f.k, values[i * b_lanes + lane], zero)

    @ptx.inline
    def to_shared(shared, buffer, thread, values_a, values_b, of_a):
        """A stage; and to the sums of A's rows what this thread copies of them, always of the same rows."""
        for i in range(a_copies):
            row, k = a_place(thread, i)
            put_a(shared, buffer, row, k, values_a, i * a_lanes)
            if of_parameters:
                for lane in range(a_lanes):
                    of_a[lane] = of_a[lane] + values_a[i * a_lanes + lane]
        for i in range(b_copies):
            row, k = b_place(thread, i)
            put_b(shared, buffer, row, k, values_b, i * b_lanes)

    @ptx.inline
    def store_rows(shared, out, thread, of_a, first_m, base, f):
        """The sums of A's rows, of which each thread has a slice."""
        row, slice_ = small((thread & (TILE // a_lanes - 1)) * a_lanes), small(thread // (TILE // a_lanes))
        for lane in range(a_lanes):
            shared[small(slice_ * TILE + row + lane)] = of_a[lane]
        ptx.cuda.syncthreads()
        if thread < TILE and first_m + thread < f.m:
            total = zero
            for i in range(slices):
                total = total + shared[small(i * TILE + thread)]
            out[integer(base + f.m * f.n + first_m + thread)] = narrow(total)

    def multiply_rows(a, b, state, out, f):
        # 1. Where a block and its threads are.
        thread = small(ptx.thread_x())
        tile_m, tile_n = ptx.divided(integer(ptx.block_x()), f.tiles_n)
        direction, part = integer(ptx.block_y()), integer(ptx.block_z())
        first_m, first_n = integer(tile_m * TILE), integer(tile_n * TILE)
        m, n = first(thread)
        shared = ptx.cuda.shared.array(shared_elems, real, alignment=ALIGN_BYTES)
        next_a, next_b = ptx.cuda.local.array(copied, real), ptx.cuda.local.array(copied, real)
        of_a, sums = ptx.cuda.local.array(a_lanes, real), no_sums()
        for lane in range(a_lanes):
            of_a[lane] = zero

        # 2. Stages: the next one on its way to registers while one is multiplied.
        begin = integer(part * f.stages * STAGE_K)
        a_lines, b_lines = ptx.cuda.local.array(a_copies, integer), ptx.cuda.local.array(b_copies, integer)
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
                sums = multiply(shared, small(stage & 1), thread, m, n, sums)
            if stage + 1 < total:
                to_shared(shared, small((stage + 1) & 1), thread, next_a, next_b, of_a)
            ptx.cuda.syncthreads()
            stage = integer(stage + 1)

        # 3. C; and the sums of A's rows behind it.
        base = integer(f.out_first + direction * f.out_direction + part * f.out_part)
        store(sums, thread, integer(first_m + m), integer(first_n + n), (out, a, b, direction, base, f))
        if of_parameters and tile_n == 0:
            store_rows(shared, out, thread, of_a, first_m, base, f)

    types = [ptx.pointer(dtype) for dtype in (kind.a_dtype, kind.b_dtype, kind.state_dtype, kind.out_dtype)]
    return multiply_rows, (*types, ptx.record(Fields, kind.bits))
