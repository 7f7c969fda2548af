"""Two neighbouring pixels of three channels, channels-last, by aligned vectors of 16 bytes.

Their 6 elements lie in a row that begins anywhere in a vector. Loaded one by one they ask the first-level cache 6 times
for the same lines, each time for every line that a warp's pixels lie in, which is what bounds the sampling of such
images; vectors ask twice, and a third time where a row begins in the last element of one. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from nbdnn.problem import ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_VECTOR_BYTES, _CHANNELS = 16, 3
PAIR = 2 * _CHANNELS


def in_pairs(problem: SpatialtfProblem, threads: int) -> bool:
    """Whether pixels are loaded so: the last vector ends where x does, and a thread has all channels of its output."""
    lanes, (_, in_w) = _VECTOR_BYTES // ITEMSIZE[problem.dtype], problem.spatial
    whole = problem.align % _VECTOR_BYTES == 0 and problem.operands[0].size_elems % lanes == 0
    return whole and problem.channels_last and problem.c == _CHANNELS and threads == 1 and in_w > 1


def window_elems(dtype: str) -> int:
    """Of the vectors that a pair may reach into."""
    lanes = _VECTOR_BYTES // ITEMSIZE[dtype]
    return lanes * ceil((lanes - 1 + PAIR) / lanes)


@cache
def load_pair(dtype: str, bits: int):
    """Device function (window, place, x, at): window[place + i] = x[at + i] for i < PAIR, in the compute type. What the
    window holds behind them is of no use."""
    from nbdnn.kernels.cuda import ptx, ptx_local

    integer, lanes, elems = ptx.INTEGER[bits], _VECTOR_BYTES // ITEMSIZE[dtype], window_elems(dtype)
    load = ptx_local.load(dtype, lanes)
    steps = tuple(1 << power for power in reversed(range(lanes.bit_length() - 1)))

    @ptx.inline
    def load_two(window, place, x, at):
        offset, begin = integer(at & (lanes - 1)), integer(at & -lanes)
        for first in range(0, elems, lanes):
            if offset + PAIR > first:
                load(window, integer(place + first), x, begin + first)
        for step in steps:
            moves = offset & step
            for i in range(PAIR + step - 1):
                window[place + i] = window[place + i + step] if moves else window[place + i]

    return load_two
