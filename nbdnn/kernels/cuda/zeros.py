"""Zeros in memory that another kernel adds to or counts in: a launch before it. A thread an element. Source: own."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch


class _Elements(NamedTuple):
    elements: int


def zeros(pointer: int, elements: int, dtype: str, bits: int, threads: int) -> Launch:
    """Of so many elements at the place of a pointer, counted in integers of so many bits."""
    source = Source(_kernel, (dtype, bits, threads), threads)
    return Launch(source, (ceil(elements / threads), 1, 1), (pointer,), "", _Elements(elements), bits)


def _kernel(dtype: str, bits: int, threads: int):
    from nbdnn.kernels.cuda import ptx

    integer, zero = ptx.INTEGER[bits], ptx.REAL[dtype](0.0)

    def clear(memory, f):
        element = integer(integer(ptx.block_x()) * threads + ptx.thread_x())
        if element < f.elements:
            memory[element] = zero

    return clear, (ptx.pointer(dtype), ptx.record(_Elements, bits))
