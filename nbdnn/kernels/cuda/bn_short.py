"""The gradient of batch normalisation in inference, of short columns: a block has all of one, and is done in one pass.

A thread has eight rows of one element at most, and loads them together: one after the other two groups of four would
wait for memory twice (16-bit planes of 7x7, H200: 4.5 us, not 5.2). Sums and traffic as in `bn_streamed.py`. Source:
own.
"""

from __future__ import annotations

from nbdnn.kernels.cuda.bn_plan import Variant, Walk

_AT_ONCE = 4  # vectors of a thread in one of two groups


def is_short(v: Variant, integers: Walk) -> bool:
    """Whether a thread of a block that has all rows of its columns has eight elements at most."""
    return v.lanes == 1 and integers.rows * v.columns <= 2 * _AT_ONCE * v.threads


def short_kernel(*specialised_on):
    from nbdnn.kernels.cuda import bn_block, bn_channel, bn_sums, ptx

    v = Variant(*specialised_on)
    integer, small, real = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.REAL[v.compute]
    at_once, rows_at_once, channels = _AT_ONCE, v.threads // v.columns, v.columns * v.sums
    add, as_pairs, joined = bn_sums.steps(v)
    of_block, finish, widen = bn_sums.of_block(v), bn_channel.finish(v), ptx.WIDEN[v.param_dtype]
    known = bn_channel.known(v)
    begin_of, coefficients_of = bn_block.begin_of(v), bn_block.coefficients_of(v)
    part, parts, _, widen_one = bn_block.on_their_way(v)
    (others, load_up_to_four), scale_one = bn_block.fours(v), bn_block.scale_one(v)
    size = 2 * at_once * parts

    @ptx.inline
    def take_one(a, b, origin, coefficients, values, gradients, loaded, where, out, at):
        widen_one(values, gradients, loaded, where)
        add(a, b, origin, values, gradients, 0)
        scale_one(coefficients, values, gradients, 0, out, at)

    @ptx.inline
    def take_up_to_four(
        a, b, origin, coefficients, values, gradients, loaded, where, out, at, second, third, fourth, left
    ):  # fmt: skip
        """Add and scale those that exist: how many."""
        count = real(0.0)
        if left > 0:
            take_one(a, b, origin, coefficients, values, gradients, loaded, where, out, at)
            count = real(1.0)
        if left > rows_at_once:
            take_one(a, b, origin, coefficients, values, gradients, loaded, where + 1, out, second)
            count = real(2.0)
        if left > 2 * rows_at_once:
            take_one(a, b, origin, coefficients, values, gradients, loaded, where + 2, out, third)
            count = real(3.0)
        if left > 3 * rows_at_once:
            take_one(a, b, origin, coefficients, values, gradients, loaded, where + 3, out, fourth)
            count = real(4.0)
        return count

    def take_all(
        x, dy, out, gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth, workspace,
        epsilon, factor, f
    ):  # fmt: skip
        thread, slab = small(ptx.thread_x()), integer(ptx.block_x())
        column, row, last, at, place = begin_of(integer(0), slab, f)
        a, b, origin = ptx.cuda.local.array(1, real), ptx.cuda.local.array(1, real), ptx.cuda.local.array(1, real)
        values, gradients = ptx.cuda.local.array(1, real), ptx.cuda.local.array(1, real)
        loaded = ptx.cuda.local.array(size, part), ptx.cuda.local.array(size, part)
        left, after = integer(last - row), integer(last - row - at_once * rows_at_once)
        two, three, four, five, place = others(at, place, f)
        six, seven, eight, _, _ = others(five, place, f)
        load_up_to_four(loaded, 0, x, dy, at, two, three, four, left)
        load_up_to_four(loaded, at_once, x, dy, five, six, seven, eight, after)
        a[0], b[0], origin[0] = real(0.0), real(0.0), widen(mean[column])
        params = (gamma, beta, mean, spread, old_mean, old_var, first, second, third, fourth)
        coefficients = coefficients_of(params, slab, column, epsilon, factor, f)
        count = take_up_to_four(
            a, b, origin, coefficients, values, gradients, loaded, 0, out, at, two, three, four, left
        ) + take_up_to_four(
            a, b, origin, coefficients, values, gradients, loaded, at_once, out, five, six, seven, eight, after
        )  # fmt: skip
        as_pairs(count, a, b, origin, origin)
        count = joined(count, a, b)
        _, of_first, of_second = of_block(thread, count, a, b)
        channel = integer(slab * channels + thread)
        if thread < channels and channel < f.channels:
            of_known, m = known(params, channel), real(f.m)
            finish(of_known, params, channel, real(0.0), m, of_first, of_second, epsilon, factor, True)

    data, param, reals = ptx.pointer(v.dtype), ptx.pointer(v.param_dtype), ptx.pointer(v.compute)
    return take_all, (data, data, data, *[param] * 10, reals, real, real, ptx.record(Walk, v.bits))
