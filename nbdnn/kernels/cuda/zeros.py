"""Zeros in memory that another kernel adds to or counts in: a launch before it. A thread a vector. Source: own."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch


class _Elements(NamedTuple):
    elements: int


def zeros(pointer: int, elements: int, dtype: str, bits: int, threads: int, lanes: int = 1) -> Launch:
    """Of so many elements at the place of a pointer, counted in integers of so many bits. lanes: of a vector, at a
    multiple of whose size they begin."""
    source = Source(_kernel, (dtype, bits, threads, lanes), threads)
    return Launch(source, (ceil(elements / threads / lanes), 1, 1), (pointer,), "", _Elements(elements), bits)


def _kernel(dtype: str, bits: int, threads: int, lanes: int):
    from nbdnn.kernels.cuda import ptx, ptx_local

    integer, real, store = ptx.INTEGER[bits], ptx.REAL[dtype], ptx_local.store(dtype, lanes)

    def clear(memory, f):
        at = integer(integer(integer(ptx.block_x()) * threads + ptx.thread_x()) * lanes)
        if at + lanes <= f.elements:
            none = ptx.cuda.local.array(lanes, real)
            for i in range(lanes):
                none[i] = real(0.0)
            store(memory, at, none, integer(0))
        else:
            while at < f.elements:
                memory[at] = real(0.0)
                at = integer(at + 1)

    return clear, (ptx.pointer(dtype), ptx.record(_Elements, bits))
