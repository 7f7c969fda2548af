"""What a block that holds an image does before its outputs give and after they have given, as compiled-in functions.

    layers    of four planes each: what an output gives to its first pixel, to the one to the right, the one below and
              the one below that. Of outputs with the same first pixel the one of number k is in layer k, at that pixel

A pixel finds what it gets at itself, at the pixel to its left, the one above it and the one above that. Source: own.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.kernels.cuda.spatialtf_position import Kind, at_output
from nbdnn.problem import ITEMSIZE

WORD_BYTES = 4


class Variant(NamedTuple):
    """kind: `Kind`. turns: outputs of a thread. of_image, of_top, of_grid: elements of a copy to shared memory."""

    kind: tuple
    threads: int
    turns: int
    layers: int
    of_image: int
    of_top: int
    of_grid: int


class Places(NamedTuple):
    """Bytes of shared memory before dy, the grid, the counts and the layers, behind x."""

    at_top: int
    at_grid: int
    at_counts: int
    at_layers: int


def copied_image(v: Variant):
    """Device functions (x, places, dy, image, shared, f, h): all that a block needs is on its way; (shared, h): it has
    come, and the counts are 0."""
    from nbdnn.kernels.cuda import ptx, ptx_local, ptx_tile

    kind, threads = Kind(*v.kind), v.threads
    integer, word = ptx.INTEGER[32], ptx.WORD
    commit, wait, clear = ptx_tile.copy_async_commit, ptx_tile.copy_async_wait(0), ptx_tile.STORE_SHARED[1]

    def come_by(dtype, count):
        copy, itemsize = ptx_local.copy_to_shared(dtype, count), ITEMSIZE[dtype]

        @ptx.inline
        def come(array, start, elements, shared):
            at = integer(ptx.thread_x() * count)
            while at < elements:
                copy(word(shared + word(integer(at * itemsize))), array, integer(start + at))
                at = integer(at + threads * count)

        return come

    come_x, come_dy = come_by(kind.dtype, v.of_image), come_by(kind.dtype, v.of_top)
    come_grid = come_by(kind.param_dtype, v.of_grid)

    @ptx.inline
    def begin(x, places, dy, image, shared, f, h):
        if not kind.affine:
            outputs = integer(f.outputs * 2)
            come_grid(places, integer(image * outputs), outputs, word(shared + word(h.at_grid)))
        come_x(x, integer(image * f.x_n), f.x_n, shared)
        come_dy(dy, integer(image * f.y_n), f.y_n, word(shared + word(h.at_top)))
        commit()

    @ptx.inline
    def settle(shared, h):
        at = integer(ptx.thread_x() * WORD_BYTES)
        while at < h.at_layers - h.at_counts:
            clear(word(shared + word(integer(h.at_counts + at))), word(0))
            at = integer(at + threads * WORD_BYTES)
        wait()
        ptx.cuda.syncthreads()

    return begin, settle


def located(v: Variant):
    """Device function (map, output, shared, f, h) -> (s, t); map: of an affine one."""
    from nbdnn.kernels.cuda import ptx, ptx_local

    kind = Kind(*v.kind)
    integer, real, word, itemsize = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD, ITEMSIZE[kind.param_dtype]
    on_map, load = at_output("f32", 32), ptx_local.load_shared(kind.param_dtype, 2)

    @ptx.inline
    def by_theta(m, output, shared, f, h):
        i, j = ptx.split(output, f.out_w, f.by_out_w, f.shift_out_w)
        return on_map(m, i, j)

    @ptx.inline
    def by_grid(m, output, shared, f, h):
        pair = ptx.cuda.local.array(2, real)
        load(pair, integer(0), word(shared + word(integer(h.at_grid + output * 2 * itemsize))))
        half_w, half_h = real(0.5) * real(integer(f.in_w - 1)), real(0.5) * real(integer(f.in_h - 1))
        return (pair[0] + real(1.0)) * half_w, (pair[1] + real(1.0)) * half_h

    return by_theta if kind.affine else by_grid


def layered_pixels(v: Variant):
    """Device function (dx, start, shared, f, h): of a channel of an image what lies in the layers, a pixel after the
    other, to dx from `start` on."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    kind, threads, layers = Kind(*v.kind), v.threads, v.layers
    integer, real, word, narrow = ptx.INTEGER[32], ptx.REAL["f32"], ptx.WORD, ptx.NARROW[kind.dtype]
    load, float_of = ptx_tile.LOAD_SHARED[1], ptx_tile.float_of

    @ptx.inline
    def add_up(dx, start, shared, f, h):
        pixel, of_layer = integer(ptx.thread_x()), integer(f.pixels * 4 * WORD_BYTES)
        while pixel < f.pixels:
            row, column = ptx.split(pixel, f.in_w, f.by_in_w, f.shift_in_w)
            counts, places = ptx.cuda.local.array(4, integer), ptx.cuda.local.array(4, integer)
            most = integer(0)
            for corner in range(4):
                there = row >= corner // 2 and column >= corner % 2
                first = integer(pixel - (corner // 2) * f.in_w - corner % 2) if there else pixel
                count = integer(load(word(shared + word(integer(h.at_counts + first * WORD_BYTES)))))
                counts[corner] = min(count, integer(layers)) if there else integer(0)
                places[corner] = integer(h.at_layers + (corner * f.pixels + first) * WORD_BYTES)
                most = max(most, counts[corner])
            total, layer = real(0.0), integer(0)
            while layer < most:
                for corner in range(4):
                    value = float_of(load(word(shared + word(places[corner]))))
                    total = total + (value if layer < counts[corner] else real(0.0))
                    places[corner] = integer(places[corner] + of_layer)
                layer = integer(layer + 1)
            dx[integer(start + row * f.x_h + column * f.x_w)] = narrow(total)
            pixel = integer(pixel + threads)

    return add_up
