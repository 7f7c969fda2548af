"""What a block copies whole: neighbours in memory, 16 bytes at a time to shared memory, and from there.

Rows and planes of odd extents are moved in this way by whole vectors. Where a block's first byte may lie anywhere, what
stands before it among its 16 bytes is copied along, and not written back.
"""

from __future__ import annotations

from functools import cache

from nbdnn.problem import ITEMSIZE

COPY_BYTES = 16


def staged_bytes(size: int) -> int:
    """What so many bytes that begin anywhere need of shared memory."""
    return -(-(size + COPY_BYTES - 1) // COPY_BYTES) * COPY_BYTES


@cache
def staged(dtype: str, threads: int, anywhere: bool, summed: bool = False):
    """Device functions (shared address, array, elements, bytes): the block's bytes of an array of so many elements to
    shared memory, asynchronously, and from there. Of the last block only those that there are. The first returns where
    they are in shared memory, whose address is a multiple of 16 bytes, as the array's is. anywhere: the bytes are not
    such a multiple, so that blocks begin anywhere. summed: from shared memory come float32, as many bytes from the
    beginning as elements of the array are, which are rounded."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    integer, wide, word, itemsize = ptx.INTEGER[32], ptx.INTEGER[64], ptx.WORD, ITEMSIZE[dtype]
    copy, load, store = ptx_tile.COPY_ASYNC[COPY_BYTES], ptx_tile.LOAD_SHARED[4], ptx.STORE[4]
    of_copy, bits = COPY_BYTES // itemsize, itemsize.bit_length() - 1
    if summed and dtype != "f32":
        pack, single, narrow = ptx_tile.PACK[dtype], ptx_tile.float_of, ptx.NARROW[dtype]
        pointed = ptx_tile.pointer_to_shared("f32")

        @ptx.inline
        def vector(shared, at):
            here = word(shared + word(2 * at))
            a, b, c, d = load(here)
            e, f, g, h = load(word(here + word(COPY_BYTES)))
            first, second = pack(single(a), single(b)), pack(single(c), single(d))
            return first, second, pack(single(e), single(f)), pack(single(g), single(h))
    else:
        pointed, narrow = ptx_tile.pointer_to_shared(dtype), ptx.NARROW["f32"]  # as it is

        @ptx.inline
        def vector(shared, at):
            return load(word(shared + word(at)))

    @ptx.inline
    def extent(elements, size):
        """The first element of the block's first 16 bytes; how many of these are not its own, and where its own end."""
        start = wide(wide(ptx.block_x()) * wide(size))
        lead = integer(start & (COPY_BYTES - 1)) if anywhere else integer(0)
        there = integer(min(wide(wide(elements) * itemsize - start), wide(size)))
        return wide((start - lead) >> bits), lead, integer(lead + there)

    @ptx.inline
    def come(shared, array, elements, size):
        first, lead, end = extent(elements, size)
        at = integer(integer(ptx.thread_x()) * COPY_BYTES)
        while at < end:
            source = ptx.address(array, wide(first + (at >> bits)))
            copy(word(shared + word(at)), source, integer(min(integer(end - at), integer(COPY_BYTES))))
            at = integer(at + threads * COPY_BYTES)
        return word(shared + word(lead))

    @ptx.inline
    def go(shared, array, elements, size):
        first, lead, end = extent(elements, size)
        held = pointed(shared)
        at = integer(integer(ptx.thread_x()) * COPY_BYTES)
        if at < lead:
            for i in range(1, of_copy):
                if i * itemsize >= lead and i * itemsize < end:
                    array[wide(first + i)] = narrow(held[i])
            at = integer(at + threads * COPY_BYTES)
        while at + COPY_BYTES <= end:
            store(array, wide(first + (at >> bits)), vector(shared, at))
            at = integer(at + threads * COPY_BYTES)
        if at < end:
            for i in range(of_copy - 1):
                one = integer((at >> bits) + i)
                if one * itemsize < end:
                    array[wide(first + one)] = narrow(held[one])

    return come, go
