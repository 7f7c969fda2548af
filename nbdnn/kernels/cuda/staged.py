"""What a block copies whole: neighbours in memory, 16 bytes at a time to shared memory, and from there.

Its first byte may lie anywhere: what stands before it among its 16 bytes is copied along, and not written back. Rows
and planes of odd extents are moved in this way by whole vectors.
"""

from __future__ import annotations

from functools import cache

from nbdnn.problem import ITEMSIZE

COPY_BYTES = 16


def staged_bytes(size: int) -> int:
    """What so many bytes that begin anywhere need of shared memory."""
    return -(-(size + COPY_BYTES - 1) // COPY_BYTES) * COPY_BYTES


@cache
def staged(dtype: str, threads: int):
    """Device functions (shared address, array, elements, bytes): the block's bytes of an array of so many elements to
    shared memory, asynchronously, and from there. Of the last block only those that there are. The first returns where
    they are in shared memory, whose address is a multiple of 16 bytes, as the array's is."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, wide, word, itemsize = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD, ITEMSIZE[dtype]
    copy, load, store = ptx_tile.COPY_ASYNC[COPY_BYTES], ptx_tile.LOAD_SHARED[4], ptx.STORE[4]
    pointed, of_copy = ptx_tile.pointer_to_shared(dtype), COPY_BYTES // itemsize

    @ptx.inline
    def extent(elements, size):
        """The first element of the block's first 16 bytes; how many of these are not its own, and where its own end."""
        start = wide(wide(ptx.block_x()) * wide(size))
        lead = integer(start & (COPY_BYTES - 1))
        there = integer(min(wide(wide(elements) * itemsize - start), wide(size)))
        return wide((start - lead) // itemsize), lead, integer(lead + there)

    @ptx.inline
    def come(shared, array, elements, size):
        first, lead, end = extent(elements, size)
        at = integer(integer(ptx.thread_x()) * COPY_BYTES)
        while at < end:
            source = ptx.address(array, wide(first + at // itemsize))
            copy(word(shared + word(at)), source, integer(min(integer(end - at), integer(COPY_BYTES))))
            at = integer(at + threads * COPY_BYTES)
        return word(shared + word(lead))

    @ptx.inline
    def go(shared, array, elements, size):
        first, lead, end = extent(elements, size)
        held = pointed(shared)
        at = integer(integer(ptx.thread_x()) * COPY_BYTES)
        while at < end:
            if at >= lead and at + COPY_BYTES <= end:
                store(array, wide(first + at // itemsize), load(word(shared + word(at))))
            else:
                for i in range(of_copy):
                    one = integer(at // itemsize + i)
                    if one * itemsize >= lead and one * itemsize < end:
                        array[wide(first + one)] = held[one]
            at = integer(at + threads * COPY_BYTES)

    return come, go
