"""What is asked of the driver, by a stand-in for it."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import pytest

from nbdnn import driver
from nbdnn.errors import CudaError


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_calls_are_captured(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory that is freed meanwhile would end the capture."""
    seen: list[object] = []
    modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    stand_in = SimpleNamespace(CUstreamCaptureMode=modes, cuStreamEndCapture=lambda stream: (0, "graph"))
    monkeypatch.setattr(driver, "bindings", lambda: stand_in)
    monkeypatch.setattr(driver, "call", lambda name, *arguments: seen.append(name))
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        driver.Graph(7, lambda stream: seen.append((stream, gc.isenabled())))
        assert gc.isenabled() == collects
        with pytest.raises(ZeroDivisionError):
            driver.Graph(7, lambda stream: 1 // 0)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert seen[:4] == ["cuStreamBeginCapture", (7, False), "cuGraphInstantiate", "cuGraphDestroy"]


def test_a_capture_that_ends_badly_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    stand_in = SimpleNamespace(CUstreamCaptureMode=modes, cuStreamEndCapture=lambda stream: (901, None))
    monkeypatch.setattr(driver, "bindings", lambda: stand_in)
    monkeypatch.setattr(driver, "call", lambda name, *arguments: None)
    monkeypatch.setattr(driver, "_described", lambda bindings, status: f"CUDA_ERROR_{status}")
    with pytest.raises(CudaError, match="cuStreamEndCapture: CUDA_ERROR_901"):
        driver.Graph(7, lambda stream: None)


def test_a_function_with_pointers_gets_these_pointers() -> None:
    """memcmp(a, b, n): n is as wide as a pointer, and 0 for a null pointer."""
    first, second = ctypes.create_string_buffer(b"abcd"), ctypes.create_string_buffer(b"abzz")
    addresses = ctypes.addressof(first), ctypes.addressof(second)
    compare = ctypes.CDLL(None).memcmp
    assert [bool(driver.with_pointers(compare, *addresses, count)()) for count in (0, 2, 3, 4)] == [0, 0, 1, 1]
    differs = driver.with_pointers(compare, *addresses, 4)
    second[:] = first[:]
    assert [differs() for _ in range(2)] == [0, 0]
