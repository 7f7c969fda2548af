"""Each worker has pages of its own."""

from __future__ import annotations

import pytest

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.scratch import Scratch, own_pages


@pytest.mark.parametrize("size_bytes", [1, 4096, 4100])
def test_workers_have_pages_of_their_own(device: Cpu, size_bytes: int) -> None:
    scratch = Scratch(device, size_bytes)
    assert scratch.start % 4096 == 0 and scratch.size_bytes % 4096 == 0 and scratch.size_bytes >= size_bytes
    begin, end = scratch.memory.ctypes.data, scratch.memory.ctypes.data + scratch.memory.nbytes
    assert begin <= scratch.start and scratch.start + device.threads * scratch.size_bytes <= end
    lines = scratch.of_workers("f4")
    assert lines.shape == (device.threads, scratch.size_bytes // 4) and lines.ctypes.data == scratch.start


def test_who_needs_no_memory_gets_none(device: Cpu) -> None:
    scratch = Scratch(device, 0)
    assert (scratch.size_bytes, scratch.memory.nbytes, own_pages(0)) == (0, 0, 0)
