"""What a block's pixels get from the outputs near them, by its plan, and give to these, as compiled-in functions.

    dx[pixel] = sum over outputs near it of weight * dy;  slot[pixel, output] = sum over c of dy[c] * x[c, pixel]

A thread has a pixel and some of its channels, planes one after the other, or, channels-last, shares it with its
neighbours. Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.spatialtf_plan import WORD_BYTES
from nbdnn.kernels.cuda.spatialtf_position import Kind
from nbdnn.problem import ITEMSIZE

_WARP, _LINE_BYTES = 32, 128


class Variant(NamedTuple):
    """kind: `Kind`. turns: outputs of a thread. at_once: vectors whose sums a thread has. copied: elements of a copy of
    dy to shared memory, or 0. buffers: for what is copied, 2 where one part follows the other. cluster: blocks."""

    kind: tuple
    threads: int
    turns: int
    at_once: int
    copied: int
    buffers: int
    cluster: int


class Parts(NamedTuple):
    """groups: of channels, of an image. group, part: vectors of a block, and of those that are in shared memory at
    once. planes: of x that a block asks for before it needs them, each of its rows. at_tops: bytes before dy there.
    buffer_bytes: of a part. to_vector, to_output: bytes from one to the next there."""

    groups: int
    group: int
    part: int
    planes: int
    at_tops: int
    buffer_bytes: int
    to_vector: int
    to_output: int


def _of_pixel(v: Variant):
    """Device function (x, dy, dx, of x, of dy, tops, shared, near, is first, is there, lane, f, h, plan): what
    `at_once` vectors of a pixel get, and what they give to the slots of the outputs near it. near: where the bins
    begin whose outputs are near, and end."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf, ptx_tile

    kind, at_once = Kind(*v.kind), v.at_once
    integer, real, word = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD
    lanes, threads, held = kind.lanes, kind.threads, at_once * kind.lanes
    load, store, load_shared = (
        ptx_local.load(kind.dtype, lanes), ptx_local.store(kind.dtype, lanes), ptx_local.load_shared(kind.dtype, lanes)
    )  # fmt: skip
    load_word, load_pair, store_word = ptx_tile.LOAD_SHARED[1], ptx_tile.LOAD_SHARED[2], ptx_tile.STORE_SHARED[1]
    float_of, word_of, hat = ptx_tile.float_of, ptx_tile.word_of, ptx_spatialtf.narrow_hat
    least, steps = ptx_spatialtf.least_of_warp, threads.bit_length() - 1
    is_shared = v.copied > 0

    @ptx.inline
    def of_pixel(x, dy, dx, of_x, of_dy, tops, shared, near, is_first, is_there, lane, f, h, plan):
        low, middle, high, under, between, end = near
        pixel, top = ptx.cuda.local.array(held, real), ptx.cuda.local.array(held, real)
        sums = ptx.cuda.local.array(held, real)
        for k in range(at_once):
            load(pixel, integer(k * lanes), x, integer(of_x + k * threads * f.x_v))
        for k in range(held):
            sums[k] = real(0.0)
        above = integer(high - low)
        mine = integer(above + end - under) if is_there else integer(0)
        count = mine
        if 1 < threads < _WARP:  # lanes of other pixels take part in the sums of this one's
            count = integer(-least(integer(-mine)))
        number = integer(0)
        while number < count:
            is_above, counts = number < above, number < mine
            at = integer(low + number) if is_above else integer(under + number - above)
            at = at if counts else integer(0)
            is_left = at < (middle if is_above else between)
            output = integer(load_word(word(shared + word(integer(plan.at_order + at * WORD_BYTES)))))
            pair = load_pair(word(shared + word(integer(plan.at_distances + at * 2 * WORD_BYTES))))
            down, right = float_of(pair[0]), float_of(pair[1])
            down = down - real(1.0) if is_above else down
            right = right - real(1.0) if is_left else right
            weight = hat(down) * hat(right)
            output = output if counts else integer(0)
            for k in range(at_once):
                if is_shared:
                    load_shared(top, integer(k), word(tops + word(integer(output * h.to_output + k * h.to_vector))))
                else:
                    load(top, integer(k * lanes), dy, integer(of_dy + output * f.y_w + k * threads * f.y_v))
            a = real(0.0)
            for k in range(held):
                a = ptx.fma(top[k], pixel[k], a)
            if counts and weight > real(0.0):
                for k in range(held):
                    sums[k] = ptx.fma(weight, top[k], sums[k])
            for step in range(steps):
                a = a + ptx.shuffle_xor(a, 1 << step)
            if counts and lane == 0:
                slot = integer((integer(2) if is_above else integer(0)) + (integer(1) if is_left else integer(0)))
                here = word(shared + word(integer(plan.at_slots + integer(slot * f.outputs + output) * WORD_BYTES)))
                a = a if is_first else a + float_of(load_word(here))
                store_word(here, word_of(a))
            number = integer(number + 1)
        if is_there:
            for k in range(at_once):
                store(dx, integer(of_x + k * threads * f.x_v), sums, integer(k * lanes))

    return of_pixel


def binned_pixels(v: Variant):
    """Device function: all pixels of a block, by so many vectors of channels."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    kind, at_once = Kind(*v.kind), v.at_once
    integer, word = ptx.INTEGER[32], ptx.WORD
    threads, step, of_pixel = kind.threads, v.threads // kind.threads, _of_pixel(v)
    load_word, of_warp = ptx_tile.LOAD_SHARED[1], _WARP // kind.threads

    @ptx.inline
    def bin_start(shared, index):
        return integer(load_word(word(shared + word(integer(index * WORD_BYTES)))))

    @ptx.inline
    def visit(x, dy, dx, image, first_row, rows, vector, end_vector, of_block, tops, shared, f, h, plan):
        local, lane = ptx.divided(integer(ptx.thread_x()), integer(threads))
        pixels = integer(rows * f.in_w)
        # Whole warps go on together where lanes share a pixel.
        begin = integer(local // of_warp * of_warp) if threads > 1 else local
        while begin < pixels:
            is_there = local < pixels
            pixel = local if is_there else integer(0)
            line, column = ptx.split(pixel, f.in_w, f.by_in_w, f.shift_in_w)
            last = integer(line * f.in_w + column)
            first = integer(last - (integer(1) if column > 0 else integer(0)))
            under, below = integer(first + f.in_w), integer(last + f.in_w)
            # The bin of the pixel before has this pixel to its right.
            near = (
                bin_start(shared, first), bin_start(shared, last), bin_start(shared, integer(last + 1)),
                bin_start(shared, under), bin_start(shared, below), bin_start(shared, integer(below + 1)),
            )  # fmt: skip
            of_x = integer(image * f.x_n + (first_row + line) * f.x_h + column * f.x_w)
            one = integer(vector + lane)
            here = tops
            while one < end_vector:
                x_at, y_at = integer(of_x + one * f.x_v), integer(image * f.y_n + one * f.y_v)
                is_first = one == of_block + lane
                of_pixel(x, dy, dx, x_at, y_at, here, shared, near, is_first, is_there, lane, f, h, plan)
                here = word(here + word(integer(at_once * h.to_vector)))
                one = integer(one + at_once * threads)
            local, begin = integer(local + step), integer(begin + step)

    return visit


def come_in_parts(v: Variant):
    """Device function (x, dy, image, first row, rows, vector, tops, f, h): dy of a part of the channels to shared
    memory, and x of it to the second-level cache; dy too where it stays in memory."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_spatialtf

    kind = Kind(*v.kind)
    integer, word, itemsize = ptx.INTEGER[32], ptx.WORD, ITEMSIZE[kind.dtype]
    copied = v.copied
    copy = ptx_local.copy_to_shared(kind.dtype, copied) if copied else None
    line_elems, prefetch = _LINE_BYTES // itemsize, ptx_spatialtf.prefetch

    @ptx.inline
    def ask(array, start, elements):
        at = integer(ptx.thread_x() * line_elems)
        while at < elements:
            prefetch(ptx.address(array, integer(start + at)))
            at = integer(at + v.threads * line_elems)

    @ptx.inline
    def come(x, dy, image, first_row, rows, vector, tops, f, h):
        if copied:
            start, elements = integer(image * f.y_n + vector * f.y_v), integer(h.part * f.outputs)
            at = integer(ptx.thread_x() * copied)
            while at < elements:
                copy(word(tops + word(integer(at * itemsize))), dy, integer(start + at))
                at = integer(at + v.threads * copied)
        elif h.planes > 0:
            # Of all blocks of an image each asks for a part of dy.
            share = integer(f.y_n // v.cluster)
            ask(dy, integer(image * f.y_n + ptx.block_x() % v.cluster * share), share)
        plane = integer(0)
        while plane < h.planes:
            ask(x, integer(image * f.x_n + first_row * f.x_h + (vector + plane) * f.x_v), integer(rows * f.x_h))
            plane = integer(plane + 1)

    return come
