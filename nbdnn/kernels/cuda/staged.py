"""What a block copies whole: neighbours in memory, 16 bytes at a time to shared memory, and from there.

Their beginnings are multiples of 16 bytes whatever lies in them, which single rows or planes of them need not be.
"""

from __future__ import annotations

from functools import cache

from nbdnn.problem import ITEMSIZE

COPY_BYTES = 16


@cache
def staged(dtype: str, threads: int):
    """Device functions (shared address, array, elements, bytes): the block's bytes of an array of so many elements to
    shared memory, asynchronously, and from there. Of the last block only those that there are."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, wide, word, itemsize = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD, ITEMSIZE[dtype]
    copy, load, store = ptx_tile.COPY_ASYNC[COPY_BYTES], ptx_tile.LOAD_SHARED[4], ptx.STORE[4]
    pointed, of_copy = ptx_tile.pointer_to_shared(dtype), COPY_BYTES // itemsize

    @ptx.inline
    def extent(elements, size):
        """The first element of the block's, and how many bytes of them there are."""
        first = wide(wide(ptx.block_x()) * wide(size // itemsize))
        there = wide(wide(elements) - first) * itemsize
        return first, integer(min(there, wide(size)))

    @ptx.inline
    def come(shared, array, elements, size):
        first, there = extent(elements, size)
        at = integer(integer(ptx.thread_x()) * COPY_BYTES)
        while at < there:
            source = ptx.address(array, wide(first + at // itemsize))
            copy(word(shared + word(at)), source, integer(min(integer(there - at), integer(COPY_BYTES))))
            at = integer(at + threads * COPY_BYTES)

    @ptx.inline
    def go(shared, array, elements, size):
        first, there = extent(elements, size)
        held = pointed(shared)
        at = integer(integer(ptx.thread_x()) * COPY_BYTES)
        while at + COPY_BYTES <= there:
            store(array, wide(first + at // itemsize), load(word(shared + word(at))))
            at = integer(at + threads * COPY_BYTES)
        if at < there:
            for i in range(of_copy - 1):
                one = integer(at // itemsize + i)
                if one * itemsize < there:
                    array[wide(first + one)] = held[one]

    return come, go
