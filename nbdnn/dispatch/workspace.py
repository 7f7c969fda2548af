"""Scratch memory of the CPU: one buffer a thread, shared by its plans, that grows and is aligned to a cache line."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import numpy as np

from nbdnn.device import Device

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
    """The calling thread's memory, of at least that size. MemoryError where it cannot grow."""
    buffer = _thread.buffer
    memory = buffer.memory
    if memory.size_bytes < size_bytes:
        buffer.memory = memory = _NONE  # the old one goes before the new one comes
        buffer.memory = memory = _allocate(size_bytes)
    return memory


def empty() -> None:
    """Drop the buffer of every thread. One in use by a running call goes when the call ends."""
    with _lock:
        for buffer in _buffers:
            buffer.memory = _NONE


def available_bytes(device: Device, limit: int | None) -> int:
    """The largest workspace that may be used now: the limit, or what is free with the buffer that is already there."""
    free = device.free_memory_bytes() + _thread.buffer.memory.size_bytes
    return free if limit is None else min(limit, free)


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
