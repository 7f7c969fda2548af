"""What the parts of a row that `softmax_parts` sums come to: merged by every block that writes one of them."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.softmax_direct import Variant, combined_rows
from nbdnn.problem import DEFAULT_COMPUTE


class Parts(NamedTuple):
    """parts: of a row, of `part` elements each but the last."""

    length: int
    parts: int
    part: int


@cache
def merging(v: Variant, forward: bool):
    """Device functions: (powers, their shift, a shift) -> the powers, shifted by that; (shift, powers) of a thread ->
    of the block; (sums, first part of a row, parts) -> of the row."""
    from nbdnn.kernels.cuda import ptx

    real, integer = ptx.REAL[DEFAULT_COMPUTE[v.dtype]], ptx.INTEGER[64]
    shifts, nothing, threads = v.algorithm != "fast" and forward, real(-math.inf), v.threads
    _, maximum, total = combined_rows(v)

    @ptx.inline
    def rescaled(powers, shift, by):
        return powers * (math.exp(shift - by) if shift > nothing else real(0.0))

    @ptx.inline
    def merged(shift, powers):
        if not shifts:
            return real(0.0), total(powers)
        most = maximum(shift)
        return most, total(rescaled(powers, shift, most))

    @ptx.inline
    def of_row(sums, first, parts):
        shift, powers, part = nothing if shifts else real(0.0), real(0.0), integer(ptx.thread_x())
        while part < parts:
            of_part, more = sums[2 * (first + part)], sums[2 * (first + part) + 1]
            if shifts:
                by = of_part if of_part > shift else shift
                powers, shift = rescaled(powers, shift, by) + rescaled(more, of_part, by), by
            else:
                powers = powers + more
            part = part + threads
        return merged(shift, powers)

    return rescaled, merged, of_row
