"""Direct convolution: the sums as they are written, on any stride, dilation, group, layout and dtype.

    y[n, k, p, q] = sum over c, r, s of  x[n, c, p*u + r*d - pad, q*u + s*d - pad] * w[k, c, r, s]

Forward and bwd_data: a thread an output, neighbours in memory to neighbouring threads, which sums tap by tap over the
channels of its group. bwd_filter: a block a tap of 4 x 4 pairs of channels,

    thread:  positions i, i + 256, ... of dy:  4 values of dy, 4 of x, 16 sums in registers
    warp:    32 sums by 5 exchanges            block: the 8 warps' sums in order

so each sum has a fixed order. Traffic: every product loads both factors (bwd_filter: 8 for 16 products), from cache
where neighbours share them. Accumulates in float32 (float64), one rounding a product and sum. This is the candidate
that supports everything, and ends every list. Source: own.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import (
    FilterGradient,
    Gather,
    filter_gradient,
    gather,
    index_bits,
    input_reached,
    output_place,
)
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate, gather_pointers
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_conv import ConvProblem

_THREADS = 256
_MIN_BLOCKS = 2  # of a multiprocessor's 65536 registers, 128 a thread: what float64 with int64 indices needs
_WARPS = _THREADS // 32
_TILE = 4  # channels of x, and of dy, that a block of bwd_filter takes
_LAUNCH_US = 2.0
# Priors for the guess, of 150 problems on an H200; the clocks are one thread's, of a product and of 16 pairs.
_PRODUCTS_PER_CLOCK_AND_SM = 6
_PRODUCT_CLOCKS, _TURN_CLOCKS = 175, 1050
_OF_A_PLACE = 8  # products, to find out which output a thread has


class _GatherVariant(NamedTuple):
    """What a kernel of forward or bwd_data is compiled for."""

    forward: bool
    dtype: str
    out_channels_last: bool
    epilogue: tuple[str, ...]
    bits: int


def _gather_kernel(*specialised_on):
    from nbdnn.kernels.cuda import epilogue, ptx

    variant = _GatherVariant(*specialised_on)
    dtype, compute, integer = variant.dtype, DEFAULT_COMPUTE[variant.dtype], ptx.INTEGER[variant.bits]
    real, widen = ptx.REAL[compute], ptx.WIDEN[dtype]
    place, reached = output_place(variant.out_channels_last), input_reached(variant.forward, variant.bits)
    store = epilogue.store(dtype, variant.epilogue)

    @ptx.inline
    def add_channels(acc, image, at, step, w, w_at, w_step, channels):
        c = integer(0)
        while c < channels:
            acc = ptx.fma(widen(ptx.load_constant(image, at)), widen(ptx.load_constant(w, w_at)), acc)
            at = integer(at + step)
            w_at = integer(w_at + w_step)
            c = integer(c + 1)
        return acc

    @ptx.inline
    def add_row(acc, image, in_at, w, w_at, position, f):
        s = integer(0)
        while s < f.taps_w:
            at = reached(position, s, f.stride_w, f.pad_w, f.dilation_w, f.extent_w)
            if at >= 0:
                start, w_start = integer(in_at + at * f.in_w), integer(w_at + s * f.w_s)
                acc = add_channels(acc, image, start, f.in_c, w, w_start, f.w_i, f.group_in)
            s = integer(s + 1)
        return acc

    def gather_outputs(image, w, out, bias, residual, alpha, beta, f):
        element = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if element >= f.outputs:
            return
        n, channel, d, h, column = place(element, f.out_c, f.out_d, f.out_h, f.out_w)
        group, o = ptx.divided(channel, f.group_out)
        in_start = integer(n * f.in_n + group * f.group_in * f.in_c)
        w_start = integer(f.w_start + group * f.w_g + o * f.w_o)
        acc = real(0.0)
        t = integer(0)
        while t < f.taps_d:
            at_d = reached(d, t, f.stride_d, f.pad_d, f.dilation_d, f.extent_d)
            r = integer(0)
            while at_d >= 0 and r < f.taps_h:
                at_h = reached(h, r, f.stride_h, f.pad_h, f.dilation_h, f.extent_h)
                if at_h >= 0:
                    in_at = integer(in_start + at_d * f.in_d + at_h * f.in_h)
                    acc = add_row(acc, image, in_at, w, integer(w_start + t * f.w_t + r * f.w_r), column, f)
                r = integer(r + 1)
            t = integer(t + 1)
        store(acc, alpha, beta, out, element, bias, channel, residual)

    data, scalar = ptx.pointer(dtype), ptx.REAL[compute]
    return gather_outputs, (data, data, data, data, data, scalar, scalar, ptx.record(Gather, variant.bits))


class _FilterVariant(NamedTuple):
    """What a kernel of bwd_filter is compiled for."""

    dtype: str
    tile_k: int
    tile_c: int
    epilogue: tuple[str, ...]
    bits: int


def _filter_kernel(*specialised_on):
    from nbdnn.kernels.cuda import epilogue, ptx

    variant = _FilterVariant(*specialised_on)
    dtype, compute, integer = variant.dtype, DEFAULT_COMPUTE[variant.dtype], ptx.INTEGER[variant.bits]
    real, widen, tile_k, tile_c = ptx.REAL[compute], ptx.WIDEN[dtype], variant.tile_k, variant.tile_c
    pairs = tile_k * tile_c
    parts_elems = pairs * _WARPS
    place, reached, store = (
        output_place(False),
        input_reached(True, variant.bits),
        epilogue.store(dtype, variant.epilogue),
    )

    @ptx.inline
    def sum_of_warp(value):
        for exchange in range(5):
            value = value + ptx.shuffle_xor(value, 16 >> exchange)
        return value

    @ptx.inline
    def clamped(channel, channels):
        """What lies beyond the last channel sums that one again, and is not stored."""
        return channel if channel < channels else integer(channels - 1)

    def filter_tile(x, dy, dw, alpha, beta, f):
        thread = integer(ptx.thread_x())
        tile, c_first, t, r, s = place(integer(ptx.block_x()), f.tiles_c, f.taps_d, f.taps_h, f.taps_w)
        group, k_first = ptx.divided(tile, f.tiles_k)
        c_first, k_first = integer(c_first * tile_c), integer(k_first * tile_k)
        x_channels, y_channels = ptx.cuda.local.array(tile_c, integer), ptx.cuda.local.array(tile_k, integer)
        for b in range(tile_c):
            x_channels[b] = integer((group * f.group_c + clamped(integer(c_first + b), f.group_c)) * f.x_c)
        for a in range(tile_k):
            y_channels[a] = integer((group * f.group_k + clamped(integer(k_first + a), f.group_k)) * f.y_c)
        sums, inputs = ptx.cuda.local.array(pairs, real), ptx.cuda.local.array(tile_c, real)
        for pair in range(pairs):
            sums[pair] = real(0.0)

        # 1. Each thread sums its positions.
        i = thread
        while i < f.positions:
            n, _, p_d, p_h, p_w = place(i, integer(1), f.out_d, f.out_h, f.out_w)
            at_d = reached(p_d, t, f.stride_d, f.pad_d, f.dilation_d, f.extent_d)
            at_h = reached(p_h, r, f.stride_h, f.pad_h, f.dilation_h, f.extent_h)
            at_w = reached(p_w, s, f.stride_w, f.pad_w, f.dilation_w, f.extent_w)
            if at_d >= 0 and at_h >= 0 and at_w >= 0:
                x_at = integer(n * f.x_n + at_d * f.x_d + at_h * f.x_h + at_w * f.x_w)
                y_at = integer(n * f.y_n + p_d * f.y_d + p_h * f.y_h + p_w * f.y_w)
                for b in range(tile_c):
                    inputs[b] = widen(ptx.load_constant(x, integer(x_at + x_channels[b])))
                for a in range(tile_k):
                    gradient = widen(ptx.load_constant(dy, integer(y_at + y_channels[a])))
                    for b in range(tile_c):
                        sums[a * tile_c + b] = ptx.fma(gradient, inputs[b], sums[a * tile_c + b])
            i = integer(i + _THREADS)

        # 2. Each warp sums its lanes.
        parts = ptx.cuda.shared.array(parts_elems, real)
        for pair in range(pairs):
            part = sum_of_warp(sums[pair])
            if thread & 31 == 0:
                parts[(thread >> 5) * pairs + pair] = part
        ptx.cuda.syncthreads()

        # 3. A thread a pair sums the warps.
        if thread < pairs:
            a, b = ptx.divided(thread, integer(tile_c))
            k, c = integer(k_first + a), integer(c_first + b)
            if k < f.group_k and c < f.group_c:
                total = real(0.0)
                for warp in range(_WARPS):
                    total = total + parts[warp * pairs + thread]
                at = integer(
                    f.w_start + (group * f.group_k + k) * f.w_k + c * f.w_c + t * f.w_t + r * f.w_r + s * f.w_s
                )
                store(total, alpha, beta, dw, at, dw, k, dw)

    data, scalar = ptx.pointer(dtype), ptx.REAL[compute]
    return filter_tile, (data, data, data, scalar, scalar, ptx.record(FilterGradient, variant.bits))


def _gather_launch(problem: ConvProblem) -> Launch:
    integers = gather(problem)
    bits = index_bits(problem, integers)
    forward = problem.op == "conv_fwd"
    variant = _GatherVariant(forward, problem.dtype, problem.y_channels_last, problem.epilogue, bits)
    return Launch(
        source=Source(_gather_kernel, variant, _THREADS, _MIN_BLOCKS),
        grid=(ceil(integers.outputs / _THREADS), 1, 1),
        pointers=gather_pointers(problem),
        scalars=DEFAULT_COMPUTE[problem.dtype],
        integers=integers,
        integer_bits=bits,
    )


def _filter_launch(problem: ConvProblem) -> Launch:
    tile_k, tile_c = (_TILE if channels // problem.groups > 1 else 1 for channels in (problem.k, problem.c))
    integers = filter_gradient(problem, tile_k, tile_c)
    bits = index_bits(problem, integers)
    variant = _FilterVariant(problem.dtype, tile_k, tile_c, problem.epilogue, bits)
    taps = integers.taps_d * integers.taps_h * integers.taps_w
    return Launch(
        source=Source(_filter_kernel, variant, _THREADS, _MIN_BLOCKS),
        grid=(problem.groups * integers.tiles_k * integers.tiles_c * taps, 1, 1),
        pointers=(0, 1, 2),
        scalars=DEFAULT_COMPUTE[problem.dtype],
        integers=integers,
        integer_bits=bits,
    )


class Direct(LaunchedCandidate[NoConfig]):
    """The sums as written; supports every convolution."""

    algorithm, algo = "direct", "none"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        return YES

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> float:
        taps, channels = prod(problem.filter), problem.c // problem.groups
        if self.op == "conv_bwd_filter":
            blocks = problem.groups * taps * ceil(channels / _TILE) * ceil(problem.k // problem.groups / _TILE)
            turns = 1 + ceil(problem.n * prod(problem.out_spatial) / _THREADS)
            clocks = turns * _TURN_CLOCKS * max(1.0, blocks / (_MIN_BLOCKS * device.sms))
        else:
            of_an_output = taps * (channels if self.op == "conv_fwd" else problem.k // problem.groups)
            outputs = next(o.size_elems for o in problem.operands if o.role == "out")
            products = (of_an_output + _OF_A_PLACE) * outputs
            clocks = of_an_output * _PRODUCT_CLOCKS + products / (_PRODUCTS_PER_CLOCK_AND_SM * device.sms)
        return _LAUNCH_US + clocks / device.clock_hz * 1e6

    def launches(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        return [_filter_launch(problem) if self.op == "conv_bwd_filter" else _gather_launch(problem)]


FWD, BWD_DATA, BWD_FILTER = Direct("conv_fwd"), Direct("conv_bwd_data"), Direct("conv_bwd_filter")
