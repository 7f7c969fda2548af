"""The three steps of a convolution by FFT, on square-ish tiles of th x tw with channels in the vector lanes.

1. Transform: a tile of 2*vl channels, the first vl as real parts and the others as imaginary ones, is one complex
   transform for both. With Z its spectrum, theirs are A(f) = Z(f) + conj Z(-f) and B(f) = (Z(f) - conj Z(-f)) / i, all
   doubled; one frequency f of each pair (f, -f) is kept, (th*tw + 4) / 2 of them.
2. Product: for every frequency, a real matrix product does the complex one,

       [Yre]   [Xre  Xim] [Wre]                rows:    X as the planes (re, im, -re) of all channels: the two rows of a
       [Yim] = [Xim -Xre] [Wim]                         product begin a plane apart
                                               panels:  W as 2*vl columns under one another, re above im
   which is Y = X conj(W), a correlation; with (Wre; -Wim) it is Y = X W, a convolution.
3. Inverse: Z(f) = A(f) + i B(f), Z(-f) = conj A(f) + i conj B(f), transformed back, scaled and finished by tile_store.

Which of x, w and dy are rows and panels, what a tile is and where it goes is all in the records; see conv_fft.py.
Rows are a cache line apart from a power of 2, or all elements of a column would fall into the same cache sets.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import njit, types
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import EPILOGUE_FIELDS
from nbdnn.kernels.cpu.launch import ARGS
from nbdnn.kernels.cpu.micro_kernel import micro_kernel
from nbdnn.kernels.cpu.rows import convert_row, zero_fill
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import FLOAT, I64, WIDEN, call_task, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE

# Where the tile of an item (a, b, tile row, tile column) lies, and the transforms; lanes and blocks of them a group.
_TILE = (
    *("operand", "first_a", "count_b", "tiles_h", "tiles_w", "groups", "lanes", "blocks"),
    *("s_a", "s_b", "s_g", "s_lane", "s_h", "s_w", "step_h", "step_w", "extent_h", "extent_w"),
    *("tile_h", "tile_w", "pitch", "line_h", "line_w", "twiddles_h", "twiddles_w"),
    *("freqs", "pairs", "spectra_offset", "freq_bytes", "item_bytes", "panel_bytes", "plane_bytes"),
    *("worker_offset", "worker_bytes"),
)
SOURCE = record(*_TILE, "low_b", "extent_b", "low_h", "low_w", "span_h", "span_w")
PRODUCT = record(
    *("panels", "groups", "group_bytes", "rows", "row_table", "items", "k_table", "accumulate"),
    *("x_spectra_offset", "x_freq_bytes", "w_spectra_offset", "w_freq_bytes", "w_panel_bytes"),
    *("y_spectra_offset", "y_freq_bytes", "y_panel_bytes"),
)
TARGET = record(
    *(*_TILE, "base", "first_h", "first_w", "lane_table", "column_table", "contiguous", *EPILOGUE_FIELDS),
)
MR, PANEL_VECTORS = 6, 2
# What a spectrum is written as: rows, panels, or panels of the conjugate.
ROWS, PANELS, CONJUGATE_PANELS = "rows", "panels", "conjugate panels"


@cache
def _untangle(dtype: str, vl: int, form: str):
    """Intrinsic (z, z_minus, to, plane_bytes): the spectra at f of both channel vectors, from Z(f) and Z(-f)."""
    vector, half = ir.VectorType(FLOAT[dtype], vl), vl * ITEMSIZE[dtype]

    def codegen(context, builder, sig, args):
        z, z_minus, to, plane_bytes = args

        def slot(address, part):
            return builder.inttoptr(builder.add(address, I64(part * half)), vector.as_pointer())

        zr, zi, yr, yi = (
            builder.load(slot(base, part), align=ITEMSIZE[dtype]) for base in (z, z_minus) for part in (0, 1)
        )
        real = builder.fadd(zr, yr), builder.fadd(zi, yi)
        minus_imaginary = builder.fsub(yi, zi), builder.fsub(zr, yr)
        imaginary = builder.fsub(zi, yi), builder.fsub(yr, zr)
        planes = [real, minus_imaginary if form == CONJUGATE_PANELS else imaginary]
        if form == ROWS:
            planes.append((builder.fneg(real[0]), builder.fneg(real[1])))
        for plane in planes:
            for part, value in enumerate(plane):
                builder.store(value, slot(to, part), align=ITEMSIZE[dtype])
            to = builder.add(to, plane_bytes)
        return context.get_dummy_value()

    @intrinsic
    def untangle(typingctx, z, z_minus, to, plane_bytes):
        return signature(types.none, *[types.int64] * 4), codegen

    return untangle


@cache
def _tangle(dtype: str, vl: int):
    """Intrinsic (y, z, z_minus): Z(f) and Z(-f) from the two rows of a product, (re A, re B) above (im A, im B)."""
    vector, half = ir.VectorType(FLOAT[dtype], vl), vl * ITEMSIZE[dtype]

    def codegen(context, builder, sig, args):
        y, z, z_minus = args

        def slot(address, part):
            return builder.inttoptr(builder.add(address, I64(part * half)), vector.as_pointer())

        ar, br, ai, bi = (builder.load(slot(y, part), align=ITEMSIZE[dtype]) for part in range(4))
        builder.store(builder.fsub(ar, bi), slot(z, 0), align=ITEMSIZE[dtype])
        builder.store(builder.fadd(ai, br), slot(z, 1), align=ITEMSIZE[dtype])
        builder.store(builder.fadd(ar, bi), slot(z_minus, 0), align=ITEMSIZE[dtype])
        builder.store(builder.fsub(br, ai), slot(z_minus, 1), align=ITEMSIZE[dtype])
        return context.get_dummy_value()

    @intrinsic
    def tangle(typingctx, y, z, z_minus):
        return signature(types.none, *[types.int64] * 3), codegen

    return tangle


@cache
def transform_task(dtype: str, vl: int, form: str):
    """The spectrum of one tile of 2*vl channels: index = item * panels + panel."""
    compute = DEFAULT_COMPUTE[dtype]
    data, scratch, i64 = pointer(dtype), pointer(compute), pointer("i64")
    args_at, params_at, widen = struct(ARGS), struct(SOURCE), WIDEN[dtype]
    widen_row, turn, fill = convert_row(dtype, compute, vl), transpose(dtype, compute, vl), zero_fill(compute)
    untangle, itemsize, acc_bytes = _untangle(compute, vl, form), ITEMSIZE[dtype], ITEMSIZE[compute]
    width, half, element = 2 * vl, vl * acc_bytes, 2 * vl * acc_bytes

    @njit(**DEVICE)
    def load_row(to, source, f, lanes, columns):
        if f.s_lane == 1:
            for q in range(columns):
                widen_row(to + q * element, source + q * f.s_w * itemsize, lanes)
        elif f.s_w == 1 and columns > 1:
            turn(to, element, source, f.s_lane * itemsize, lanes, columns)
        else:
            for q in range(columns):
                for lane in range(lanes):
                    scratch(to)[q * width + lane] = widen(data(source)[lane * f.s_lane + q * f.s_w])

    def transform(args, ctx, index, worker):
        a, f = args_at(args), params_at(ctx)
        panels = f.groups * f.blocks
        panel, item = index % panels, index // panels
        g, lane = panel // f.blocks, panel % f.blocks * width
        lanes = min(width, f.lanes - lane)
        column, rest = item % f.tiles_w, item // f.tiles_w
        row, rest = rest % f.tiles_h, rest // f.tiles_h
        depth, image = f.low_b + rest % f.count_b, f.first_a + rest // f.count_b
        top, left = f.low_h + row * f.step_h, f.low_w + column * f.step_w
        # Rows [first, end) and columns [start, stop) of the tile lie inside.
        first, start = max(0, -top), max(0, -left)
        end, stop = min(f.span_h, f.extent_h - top), min(f.span_w, f.extent_w - left)
        to = a.workspace + f.spectra_offset + item * f.item_bytes + panel * f.panel_bytes
        buffer = a.workspace + f.worker_offset + worker * f.worker_bytes
        is_there = 0 <= depth < f.extent_b and first < end and start < stop
        is_whole = end - first == f.tile_h and stop - start == f.tile_w and lanes == width
        if not (is_there and is_whole):
            fill(buffer, f.tile_h * f.pitch // acc_bytes)
        if is_there:
            source = image * f.s_a + depth * f.s_b + g * f.s_g + lane * f.s_lane + (left + start) * f.s_w
            for r in range(first, end):
                line = buffer + r * f.pitch
                at = i64(args)[f.operand] + (source + (top + r) * f.s_h) * itemsize
                load_row(line + start * element, at, f, lanes, stop - start)
                call_task(f.line_w, line, line + half, element, f.twiddles_w)
            for q in range(f.tile_w):
                line = buffer + q * element
                call_task(f.line_h, line, line + half, f.pitch, f.twiddles_h)
        for i in range(f.freqs):
            pair = f.pairs + 16 * i
            untangle(buffer + i64(pair)[0], buffer + i64(pair)[1], to + i * f.freq_bytes, f.plane_bytes)

    return compile_task(transform, (dtype, vl, form), fastmath=FASTMATH)


@cache
def product_task(dtype: str, vl: int):
    """All rows of one frequency times one panel: index = frequency * panels + panel. dtype: the compute type."""
    i64, args_at, params_at, row_slots = pointer("i64"), struct(ARGS), struct(PRODUCT), stack(MR * 8)
    row_bytes = PANEL_VECTORS * vl * ITEMSIZE[dtype]
    begin, add = (micro_kernel(dtype, MR, PANEL_VECTORS, vl, None, row_bytes, more, dtype) for more in (False, True))

    def multiply(args, ctx, index, worker):
        a, f, slots = args_at(args), params_at(ctx), row_slots()
        panel, freq = index % f.panels, index // f.panels
        group = panel * f.groups // f.panels
        x = a.workspace + f.x_spectra_offset + freq * f.x_freq_bytes + group * f.group_bytes
        w = a.workspace + f.w_spectra_offset + freq * f.w_freq_bytes + panel * f.w_panel_bytes
        y = a.workspace + f.y_spectra_offset + freq * f.y_freq_bytes + panel * f.y_panel_bytes
        for first in range(0, f.rows, MR):
            for m in range(MR):
                i64(slots)[m] = x + i64(f.row_table)[min(first + m, f.rows - 1)]
            if f.accumulate:
                add(slots, f.k_table, w, 0, 2 * f.items, y + first * row_bytes, row_bytes)
            else:
                begin(slots, f.k_table, w, 0, 2 * f.items, y + first * row_bytes, row_bytes)

    return compile_task(multiply, (dtype, vl), fastmath=FASTMATH)


@cache
def inverse_task(dtype: str, vl: int):
    """One tile of 2*vl channels of the output, finished and stored: index = item * panels + panel."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, args_at, params_at = pointer("i64"), struct(ARGS), struct(TARGET)
    tangle, turn, store = _tangle(compute, vl), transpose(compute, compute, vl), tile_store(dtype, compute, vl)
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    width, half, element = 2 * vl, vl * acc_bytes, 2 * vl * acc_bytes

    def invert(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), params_at(ctx)
        panels = f.groups * f.blocks
        panel, item = index % panels, index // panels
        g, lane = panel // f.blocks, panel % f.blocks * width
        lanes = min(width, f.lanes - lane)
        column, rest = item % f.tiles_w, item // f.tiles_w
        row, rest = rest % f.tiles_h, rest // f.tiles_h
        buffer = a.workspace + f.worker_offset + worker * f.worker_bytes
        turned = buffer + f.tile_h * f.pitch
        spectra = a.workspace + f.spectra_offset + item * f.item_bytes + panel * f.panel_bytes
        for i in range(f.freqs):
            pair = f.pairs + 16 * i
            tangle(spectra + i * f.freq_bytes, buffer + i64(pair)[0], buffer + i64(pair)[1])
        for q in range(f.tile_w):
            line = buffer + q * element
            call_task(f.line_h, line + half, line, f.pitch, f.twiddles_h)
        place = f.base + (f.first_a + rest // f.count_b) * f.s_a + rest % f.count_b * f.s_b
        place += g * f.s_g + lane * f.s_lane + row * f.step_h * f.s_h + column * f.step_w * f.s_w
        columns = min(f.step_w, f.extent_w - column * f.step_w)
        bias = pointers[f.bias_pointer] + (g * f.lanes + lane) * itemsize if f.bias_pointer >= 0 else 0
        alpha = a.alpha / (4 * f.tile_h * f.tile_w)
        for r in range(min(f.step_h, f.extent_h - row * f.step_h)):
            line = buffer + (f.first_h + r) * f.pitch
            call_task(f.line_w, line + half, line, element, f.twiddles_w)
            line += f.first_w * element
            at = (place + r * f.s_h) * itemsize
            residual = pointers[f.residual_pointer] + at if f.residual_pointer >= 0 else 0
            out = pointers[f.operand] + at
            if f.s_lane == 1 or columns == 1:
                flags = (f.activation, bias, 0, 1, residual, f.read_out)
                kind = f.contiguous if f.s_lane == 1 else 0
                store(line, width, columns, lanes, out, f.column_table, f.lane_table, kind, flags, alpha, a.beta)
            else:
                turn(turned, columns * acc_bytes, line, element, columns, lanes)
                flags = (f.activation, bias, 1, 0, residual, f.read_out)
                store(
                    turned, columns, lanes, columns, out, f.lane_table, f.column_table, f.contiguous, flags,
                    alpha, a.beta,
                )  # fmt: skip

    return compile_task(invert, (dtype, vl), fastmath=FASTMATH)
