"""The sums of a filter gradient that the blocks of `rows_filter.py` leave, added to dw."""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.rows_plan import Lines, Rows

# Elements of a block, slices of the blocks' sums that are added side by side, loads under way.
SUM_THREADS, SUM_ELEMENTS = 1024, 32
_SLICES, _AT_ONCE = SUM_THREADS // SUM_ELEMENTS, 4


class Sums(NamedTuple):
    """The integers of the kernel that adds the sums of all blocks: `elements` of each of `blocks`.

    Of an element [chunk of filters][row][filter], where a row is an element of a window's segments. The window as in
    `Rows` and `Lines`.
    """

    blocks: int
    elements: int
    filters: int
    rows: int
    run: int
    inner: int
    planes: int
    taps_h: int
    out_c: int
    w_start: int
    w_out: int
    w_in: int
    w_r: int
    w_s: int


def sums(form: Lines, f: Rows, blocks: int, chunks: int, filters: int, rows: int) -> Sums:
    """Of so many blocks, chunks of so many filters, and rows."""
    elements = chunks * rows * filters
    window = form.run, form.inner, f.planes, f.taps_h, f.out_c
    return Sums(blocks, elements, filters, rows, *window, f.w_start, f.w_out, f.w_in, f.w_r, f.w_s)


def sum_kernel(dtype: str, tokens: tuple[str, ...]):
    """dw from the sums of all blocks: 32 elements a block, 32 slices of their sums side by side, then in order."""
    from nbdnn.kernels.cuda import epilogue, ptx

    integer, real, store = ptx.INTEGER[32], ptx.REAL["f32"], epilogue.store(dtype, tokens)

    @ptx.inline
    def slice_sum(parts, element, block, f):
        """Of every 32nd block, four at a time: beyond the last, that one again, which does not count."""
        totals = ptx.cuda.local.array(_AT_ONCE, real)
        for i in range(_AT_ONCE):
            totals[i] = real(0.0)
        while block < f.blocks:
            for i in range(_AT_ONCE):
                at = integer(min(block + i * _SLICES, f.blocks - 1))
                value = ptx.load_constant(parts, integer(at * f.elements + element))
                totals[i] = totals[i] + (value if block + i * _SLICES < f.blocks else real(0.0))
            block = integer(block + _AT_ONCE * _SLICES)
        return (totals[0] + totals[1]) + (totals[2] + totals[3])

    def sum_blocks(parts, dw, alpha, beta, f):
        thread = integer(ptx.thread_x())
        slice_, lane = integer(thread >> 5), integer(thread & 31)
        element = integer(ptx.block_x() * SUM_ELEMENTS + lane)
        part_sums = ptx.cuda.shared.array(SUM_THREADS, real)
        part_sums[thread] = slice_sum(parts, element, slice_, f)
        ptx.cuda.syncthreads()
        if slice_ == 0:
            total = part_sums[lane]
            for other in range(1, _SLICES):
                total = total + part_sums[other * SUM_ELEMENTS + lane]
            rest, o = ptx.divided(element, f.filters)
            chunk, row = ptx.divided(rest, f.rows)
            segment, at = ptx.divided(row, f.run)
            plane, r = ptx.divided(segment, f.taps_h)
            k = integer(chunk * f.filters + o)
            if plane < f.planes and k < f.out_c:
                s, c = ptx.divided(at, f.inner)
                to = integer(f.w_start + k * f.w_out + integer(plane + c) * f.w_in + r * f.w_r + s * f.w_s)
                store(total, alpha, beta, dw, to, dw, k, dw)

    data, scalar = ptx.pointer(dtype), ptx.REAL["f32"]
    return sum_blocks, (ptx.pointer("f32"), data, scalar, scalar, ptx.record(Sums, 32))
