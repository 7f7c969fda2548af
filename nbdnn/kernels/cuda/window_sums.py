"""The sums of a filter gradient that the blocks of `conv_windows_filter.py` leave, added to dw."""

from __future__ import annotations

from nbdnn.kernels.cuda.window_plan import QUAD
from nbdnn.kernels.cuda.window_records import Sums

SUM_THREADS = 256
# Elements of a block, and slices of the blocks' sums that are added side by side.
SUM_ELEMENTS, _SLICES = 32, SUM_THREADS // 32


def sum_kernel(dtype: str, tokens: tuple[str, ...]):
    """dw from the sums of all blocks: 32 elements a block, 8 slices of the blocks' sums side by side, then in order."""
    from nbdnn.kernels.cuda import epilogue, ptx

    integer, real, store = ptx.INTEGER[32], ptx.REAL["f32"], epilogue.store(dtype, tokens)

    def sum_blocks(parts, dw, alpha, beta, f):
        thread = integer(ptx.thread_x())
        slice_, lane = integer(thread >> 5), integer(thread & 31)
        element = integer(ptx.block_x() * SUM_ELEMENTS + lane)
        part_sums = ptx.cuda.shared.array(SUM_THREADS, real)

        # 1. Each slice adds every eighth block's.
        total = real(0.0)
        block = slice_
        while block < f.blocks:
            total = total + ptx.load_constant(parts, integer(block * f.elements + element))
            block = integer(block + _SLICES)
        part_sums[thread] = total
        ptx.cuda.syncthreads()

        # 2. The first adds the slices, and stores.
        if slice_ == 0:
            for other in range(1, _SLICES):
                total = total + part_sums[other * SUM_ELEMENTS + lane]
            place, inner = ptx.divided(element, f.sums)
            block_y, block_z = ptx.divided(place, f.blocks_z)
            row, slot = ptx.divided(inner, integer(f.block_units * f.filters))
            quad, c = ptx.divided(row, f.channels)
            unit, at = ptx.divided(slot, f.filters)
            unit, quad = integer(block_y * f.block_units + unit), integer(block_z * f.block_quads + quad)
            group, chunk = ptx.divided(unit, f.chunks)
            tap, part = ptx.divided(quad, f.quads_of_tap)
            r, s = ptx.divided(tap, f.taps_w)
            o, channel = integer(chunk * f.filters + at), integer(part * QUAD + c)
            if unit < f.units and quad < f.quads and o < f.group_out and channel < f.group_in:
                to = integer(f.w_start + group * f.w_group + o * f.w_out + channel * f.w_in + r * f.w_r + s * f.w_s)
                store(total, alpha, beta, dw, to, dw, o, dw)

    data, scalar = ptx.pointer(dtype), ptx.REAL["f32"]
    return sum_blocks, (ptx.pointer("f32"), data, scalar, scalar, ptx.record(Sums, 32))
