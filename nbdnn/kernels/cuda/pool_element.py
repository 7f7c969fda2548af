"""One output of pooling as it is written, as device functions: any window, stride, pad, layout and dtype.

A gradient of maxima searches every window that covers the element. Sums in float32 (float64), in a fixed order.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from nbdnn.problem import DEFAULT_COMPUTE


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    op: str
    dtype: str
    mode: str
    channels_last: bool
    bits: int


def window_and_scale(v: Variant):
    """Device functions (d, h, w, f) of a window: its part inside of the image, from and to on each axis, and what its
    sum is multiplied by."""
    from nbdnn.kernels.cuda import ptx

    integer, real = ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.dtype]]
    excludes_pad, is_sum = v.mode == "average_exc_pad", v.mode == "sum"

    @ptx.inline
    def inside(position, stride, pad, taps, extent):
        start = integer(position * stride - pad)
        end = integer(start + taps)
        return start if start > 0 else integer(0), end if end < extent else extent

    @ptx.inline
    def window(d, h, w, f):
        low_d, end_d = inside(d, f.stride_d, f.pad_d, f.taps_d, f.in_d)
        low_h, end_h = inside(h, f.stride_h, f.pad_h, f.taps_h, f.in_h)
        low_w, end_w = inside(w, f.stride_w, f.pad_w, f.taps_w, f.in_w)
        return low_d, end_d, low_h, end_h, low_w, end_w

    @ptx.inline
    def scale_of(d, h, w, f):
        if is_sum:
            return real(1.0)
        count = integer(f.taps_d * f.taps_h * f.taps_w)
        if excludes_pad:
            low_d, end_d, low_h, end_h, low_w, end_w = window(d, h, w, f)
            count = integer((end_d - low_d) * (end_h - low_h) * (end_w - low_w))
        return real(1.0) / real(count)

    return window, scale_of


def gradient(v: Variant):
    """Device function (x, dy, n, c, d, h, w, f): dx of an element, not yet rounded. Of a sum x is not read."""
    from nbdnn.kernels.cuda import ptx

    integer, real, widen = ptx.INTEGER[v.bits], ptx.REAL[DEFAULT_COMPUTE[v.dtype]], ptx.WIDEN[v.dtype]
    (window, scale_of), is_max, lowest = window_and_scale(v), v.mode == "max", real(float("-inf"))

    @ptx.inline
    def covering(position, stride, by, shift, pad, taps, extent):
        """First and end of the windows that cover a position of the image."""
        end, _ = ptx.split(integer(position + pad), stride, by, shift)
        first, _ = ptx.split(integer(position + pad - taps + stride), stride, by, shift)
        first = first if position + pad >= taps else integer(0)
        end = integer(end + 1)
        return first, end if end < extent else extent

    @ptx.inline
    def first_maximum(x, start, d, h, w, f):
        """Where in the image the maximum of a window is: as an offset from `start`."""
        low_d, end_d, low_h, end_h, low_w, end_w = window(d, h, w, f)
        found, place_found = lowest, integer(-1)
        i_d = low_d
        while i_d < end_d:
            i_h = low_h
            while i_h < end_h:
                at = integer(i_d * f.x_d + i_h * f.x_h + low_w * f.x_w)
                i_w = low_w
                while i_w < end_w:
                    value = widen(ptx.load_constant(x, integer(start + at)))
                    better = value > found or value != value or place_found < 0
                    found = value if better else found
                    place_found = at if better else place_found
                    at = integer(at + f.x_w)
                    i_w = integer(i_w + 1)
                i_h = integer(i_h + 1)
            i_d = integer(i_d + 1)
        return place_found

    @ptx.inline
    def element_gradient(x, dy, n, c, i_d, i_h, i_w, f):
        first_d, end_d = covering(i_d, f.stride_d, f.by_d, f.shift_d, f.pad_d, f.taps_d, f.out_d)
        first_h, end_h = covering(i_h, f.stride_h, f.by_h, f.shift_h, f.pad_h, f.taps_h, f.out_h)
        first_w, end_w = covering(i_w, f.stride_w, f.by_w, f.shift_w, f.pad_w, f.taps_w, f.out_w)
        start = integer(n * f.x_n + c * f.x_c)
        here = integer(i_d * f.x_d + i_h * f.x_h + i_w * f.x_w)
        total = real(0.0)
        d = first_d
        while d < end_d:
            h = first_h
            while h < end_h:
                w = first_w
                while w < end_w:
                    at = integer(n * f.y_n + c * f.y_c + d * f.y_d + h * f.y_h + w * f.y_w)
                    if is_max:
                        if first_maximum(x, start, d, h, w, f) == here:
                            total = total + widen(ptx.load_constant(dy, at))
                    else:
                        total = total + widen(ptx.load_constant(dy, at)) * scale_of(d, h, w, f)
                    w = integer(w + 1)
                h = integer(h + 1)
            d = integer(d + 1)
        return total

    return element_gradient


def gradients_of_box(v: Variant, extents: tuple[int, int, int, int]):
    """Device function (x, dy, dx, n, c, d, h, w, f): dx of a box of so many planes, rows, columns and channels that
    begins there, as far as it lies in the image. One after the other: in few registers and little code."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, small, narrow, of_element = ptx.INTEGER[v.bits], ptx.INTEGER[32], ptx.NARROW[v.dtype], gradient(v)
    _, rows, columns, channels = extents
    elements = prod(extents)

    @ptx.inline
    def store_box(x, dy, dx, n, c, d, h, w, f):
        i = small(0)
        while i < elements:
            rest, i_c = ptx.divided(ptx_tile.computed_here(i), small(channels))  # nothing of it shall be kept
            rest, i_w = ptx.divided(rest, small(columns))
            i_d, i_h = ptx.divided(rest, small(rows))
            i_c, i_d, i_h, i_w = integer(c + i_c), integer(d + i_d), integer(h + i_h), integer(w + i_w)
            if i_d < f.in_d and i_h < f.in_h and i_w < f.in_w:
                here = integer(n * f.x_n + i_c * f.x_c + i_d * f.x_d + i_h * f.x_h + i_w * f.x_w)
                dx[here] = narrow(of_element(x, dy, n, i_c, i_d, i_h, i_w, f))
            i = small(i + 1)

    return store_box
