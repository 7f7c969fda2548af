"""What becomes of the sums of one channel: statistics or gradients of parameters, and the coefficients of its elements.

forward   y = ((x - center) - second) * scale + offset       second: what the mean has beyond the compute type
backward  dx = dy * scale + (x - center) * second + offset
"""

from __future__ import annotations

import math
from functools import cache

from nbdnn.kernels.cuda.bn_plan import PARAMS, Variant

_GAMMA, _BETA, _MEAN, _SPREAD, _OLD_MEAN, _OLD_VAR = range(len(PARAMS))
_FIRST_RESULT = len(PARAMS)


@cache
def known(v: Variant):
    """Device function (params, channel) -> (gamma, beta, mean, spread): what is known of a channel before its sums, of
    training the running averages. params: the pointers to PARAMS and RESULTS; 0 of those that an op has not."""
    from nbdnn.kernels.cuda import ptx

    real, widen, running = ptx.REAL[v.compute], ptx.WIDEN[v.param_dtype], v.running
    zero, forward = real(0.0), v.is_forward

    @ptx.inline
    def of_train(params, channel):
        gamma, beta = widen(params[_GAMMA][channel]), widen(params[_BETA][channel])
        if running:
            return gamma, beta, widen(params[_OLD_MEAN][channel]), widen(params[_OLD_VAR][channel])
        return gamma, beta, zero, zero

    @ptx.inline
    def of_others(params, channel):
        mean, spread = widen(params[_MEAN][channel]), widen(params[_SPREAD][channel])
        return widen(params[_GAMMA][channel]), widen(params[_BETA][channel]) if forward else zero, mean, spread

    return of_train if v.op == "bn_train" else of_others


@cache
def finish(v: Variant):
    """Device function (known, params, channel, pivot, m, a, b, epsilon, factor, write) -> (center, second, scale,
    offset).

    params: the pointers to PARAMS and RESULTS, of which the latter are written unless `write` is 0. pivot: what the
    mean `a` of a training is relative to.
    """
    from nbdnn.kernels.cuda import ptx, ptx_bn

    real, narrow = ptx.REAL[v.compute], ptx.NARROW[v.param_dtype]
    one, running, rsqrt = real(1.0), v.running, ptx_bn.rsqrt(v.compute)

    @ptx.inline
    def of_train(known, params, channel, pivot, m, mean, squares, epsilon, factor, write):
        gamma, beta, old_mean, old_var = known
        center = pivot + mean
        # What the sum lost, exactly (Knuth).
        added = center - pivot
        second = (pivot - (center - added)) + (mean - added)
        var = squares / m
        var = real(0.0) if var < real(0.0) else var
        invstd = one / math.sqrt(var + epsilon)
        if write:
            params[_FIRST_RESULT][channel] = narrow(center)
            params[_FIRST_RESULT + 1][channel] = narrow(invstd)
            if running:
                unbiased = var * (m / (m - one))
                params[_FIRST_RESULT + 2][channel] = narrow(old_mean * (one - factor) + center * factor)
                params[_FIRST_RESULT + 3][channel] = narrow(old_var * (one - factor) + unbiased * factor)
        return center, second, gamma * invstd, beta

    @ptx.inline
    def of_infer(known, params, channel, pivot, m, a, b, epsilon, factor, write):
        gamma, beta, mean, var = known
        return mean, real(0.0), gamma * rsqrt(var + epsilon), beta

    @ptx.inline
    def of_bwd(known, params, channel, pivot, m, total, moment, epsilon, factor, write):
        gamma, _, mean, invstd = known
        if write:
            params[_FIRST_RESULT][channel] = narrow(moment * invstd)
            params[_FIRST_RESULT + 1][channel] = narrow(total)
        scale = gamma * invstd
        slope = scale * invstd * invstd * (moment / m)
        return mean, -slope, scale, -scale * (total / m)

    @ptx.inline
    def of_infer_bwd(known, params, channel, pivot, m, total, moment, epsilon, factor, write):
        gamma, _, mean, var = known
        std = math.sqrt(var + epsilon)
        scale = gamma / std
        if write:
            params[_FIRST_RESULT][channel] = narrow(moment / std)
            params[_FIRST_RESULT + 1][channel] = narrow(total)
            params[_FIRST_RESULT + 2][channel] = narrow(-total * scale)
            params[_FIRST_RESULT + 3][channel] = narrow(-moment * scale / (real(2.0) * std * std))
        return mean, real(0.0), scale, real(0.0)

    return {"bn_train": of_train, "bn_infer": of_infer, "bn_bwd": of_bwd, "bn_infer_bwd": of_infer_bwd}[v.op]


@cache
def coefficients(v: Variant):
    """Device functions by which a block's threads tell each other what becomes of its channels, in shared memory:

    asked (thread, params, channel, x, f) -> what `found` wants of the block's channels in their threads: to be asked
    for before the sums, which nobody waits for then. found (coefficients, thread, params, asked, channel, of_first,
    of_second, epsilon, factor, rank, f): finishes a channel, from its sums; rank 0 writes. taken (coefficients, column,
    center, second, scale, offset): of a column of the block, to local arrays of v.sums.
    """
    from nbdnn.kernels.cuda import ptx

    integer, real, widen = ptx.INTEGER[v.bits], ptx.REAL[v.compute], ptx.WIDEN[v.dtype]
    sums, channels, forward, finished, read = v.sums, v.columns * v.sums, v.is_forward, finish(v), known(v)

    @ptx.inline
    def asked(thread, params, channel, x, f):
        pivot, of_channel = real(0.0), (real(0.0), real(0.0), real(0.0), real(0.0))
        if thread < channels and channel < f.channels:
            of_channel = read(params, channel)
            if forward:
                pivot = widen(x[integer(channel * f.channel_elems)])
        return pivot, of_channel

    @ptx.inline
    def found(coefficients, thread, params, asked, channel, of_first, of_second, epsilon, factor, rank, f):
        if thread < channels and channel < f.channels:
            pivot, of_channel = asked
            m, write = real(f.m), rank == 0
            four = finished(of_channel, params, channel, pivot, m, of_first, of_second, epsilon, factor, write)
            for i in range(4):
                coefficients[integer(i * channels + thread)] = four[i]
        ptx.cuda.syncthreads()

    @ptx.inline
    def taken(coefficients, column, center, second, scale, offset):
        for i in range(sums):
            at = integer(column * sums + i)
            center[i], second[i] = coefficients[at], coefficients[integer(at + channels)]
            scale[i] = coefficients[integer(at + 2 * channels)]
            offset[i] = coefficients[integer(at + 3 * channels)]

    return asked, found, taken


@cache
def scale(v: Variant):
    """Device function (center, second, scale, offset, x, dy, place): x[place + i] becomes what is written; local arrays
    of v.lanes or, of coefficients, v.sums."""
    from nbdnn.kernels.cuda import ptx

    lanes, step = v.lanes, 0 if v.planar else 1

    @ptx.inline
    def of_train(center, second, factor, offset, x, dy, place):
        for i in range(lanes):
            j = i * step
            x[place + i] = ptx.fma((x[place + i] - center[j]) - second[j], factor[j], offset[j])

    @ptx.inline
    def of_infer(center, second, factor, offset, x, dy, place):
        for i in range(lanes):
            j = i * step
            x[place + i] = ptx.fma(x[place + i] - center[j], factor[j], offset[j])

    @ptx.inline
    def of_bwd(center, second, factor, offset, x, dy, place):
        for i in range(lanes):
            j = i * step
            of_x = ptx.fma(x[place + i] - center[j], second[j], offset[j])
            x[place + i] = ptx.fma(dy[place + i], factor[j], of_x)

    @ptx.inline
    def of_infer_bwd(center, second, factor, offset, x, dy, place):
        for i in range(lanes):
            x[place + i] = dy[place + i] * factor[i * step]

    return {"bn_train": of_train, "bn_infer": of_infer, "bn_bwd": of_bwd, "bn_infer_bwd": of_infer_bwd}[v.op]
