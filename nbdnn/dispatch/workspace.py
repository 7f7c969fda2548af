"""Scratch memory. Of the CPU: one buffer a thread, shared by its plans, that grows and is aligned to a cache line.

Of a GPU: stream-ordered, from a pool of nbdnn's own, so that calls on any stream do not wait and can be captured. The
driver's default pool gives everything back at each synchronisation.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nbdnn import driver
from nbdnn.device import Device, Gpu
from nbdnn.errors import CudaError

_ALIGN_BYTES = 64
# NumPy asks for huge pages for arrays of 4 MiB and more; in small pages a 3x3 layer's scratch made one kernel 1.3 to
# 1.8 times slower. What is not touched takes no memory.
_LEAST_BYTES, _HUGE_PAGE_BYTES = 32 << 20, 2 << 20


class Memory(NamedTuple):
    """Bytes at an aligned address; whoever holds it keeps them alive."""

    array: np.ndarray
    address: int
    size_bytes: int


_NONE = Memory(np.empty(0, np.uint8), 0, 0)


class _Buffer:
    """What a thread has now: nothing at first, and after `empty`."""

    def __init__(self) -> None:
        self.memory = _NONE


class _Thread(threading.local):
    def __init__(self) -> None:
        self.buffer = _Buffer()
        with _lock:
            _buffers.add(self.buffer)


_lock = threading.Lock()
_buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
_thread = _Thread()


def take(size_bytes: int) -> Memory:
    """The calling thread's memory of the CPU, of at least that size. MemoryError where it cannot grow."""
    buffer = _thread.buffer
    memory = buffer.memory
    if memory.size_bytes < size_bytes:
        buffer.memory = memory = _NONE  # the old one goes before the new one comes
        buffer.memory = memory = _allocate(size_bytes)
    return memory


class StreamMemory:
    """Memory of a GPU from now on in a stream's order, until this object goes. MemoryError where there is none."""

    __slots__ = ("_stream", "address")

    def __init__(self, size_bytes: int, index: int, stream: int) -> None:
        self.address, self._stream = 0, stream
        try:
            self.address = int(driver.call("cuMemAllocFromPoolAsync", size_bytes, _pool(index), stream))
        except CudaError as error:
            if "OUT_OF_MEMORY" in str(error):
                raise MemoryError(f"{size_bytes} bytes of GPU {index}: {error}") from None
            raise

    def __del__(self) -> None:
        if self.address:
            driver.call("cuMemFreeAsync", self.address, self._stream)


def take_for(device: Device, size_bytes: int, stream: int) -> Memory | StreamMemory:
    """Memory of the device, for as long as the result is held. MemoryError where there is none."""
    return StreamMemory(size_bytes, device.index, stream) if isinstance(device, Gpu) else take(size_bytes)


def empty() -> None:
    """Drop what no running call uses: the buffer of every thread, and the pool of every GPU."""
    with _lock:
        for buffer in _buffers:
            buffer.memory = _NONE
        for pool in _pools:
            driver.call("cuMemPoolTrimTo", pool, 0)


def available_bytes(device: Device, limit: int | None) -> int:
    """The largest workspace that may be used now: the limit, or what is free with what is already kept for it."""
    kept = _unused_bytes(device.index) if isinstance(device, Gpu) else _thread.buffer.memory.size_bytes
    free = device.free_memory_bytes() + kept
    return free if limit is None else min(limit, free)


_pools: list[Any] = []


@cache
def _pool(index: int) -> Any:
    """nbdnn's pool of a GPU, which keeps what it has until `empty`."""
    api = driver.bindings()
    properties = api.CUmemPoolProps()
    properties.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    pool = driver.call("cuMemPoolCreate", properties)
    keep = api.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.call("cuMemPoolSetAttribute", pool, keep, api.cuuint64_t(2**64 - 1))
    _pools.append(pool)
    return pool


def _unused_bytes(index: int) -> int:
    attributes = driver.bindings().CUmemPool_attribute
    reserved, used = (
        int(driver.call("cuMemPoolGetAttribute", _pool(index), attribute))
        for attribute in (
            attributes.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        )
    )
    return reserved - used


def _allocate(size_bytes: int) -> Memory:
    """Huge pages where they can be had, else exactly what is needed."""
    roomy = -(-max(size_bytes, _LEAST_BYTES) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    try:
        return _aligned(roomy, _HUGE_PAGE_BYTES)
    except MemoryError:
        return _aligned(size_bytes, _ALIGN_BYTES)


def _aligned(size_bytes: int, align_bytes: int) -> Memory:
    array = np.empty(size_bytes + align_bytes, np.uint8)
    return Memory(array, -(-array.ctypes.data // align_bytes) * align_bytes, size_bytes)
