"""The CUDA driver through cuda-python, loaded at the first use: every call checked, every GPU in its primary context.

Array libraries use the primary context of a device as well, so their memory and streams are valid here.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from nbdnn.errors import CudaError

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@cache
def bindings() -> ModuleType:
    """cuda.bindings.driver, initialised. CudaError says what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(f"cuda-python is missing ({error}): install nbdnn[cuda13] or nbdnn[cuda12]") from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # cuda-python has no libcuda to load
        raise CudaError(f"cuInit: no CUDA driver ({error})") from None
    if status:
        raise CudaError(f"cuInit: {_described(driver, status)}")
    return driver


def call(name: str, *arguments: Any) -> Any:
    """What the driver's function returns: None, a value, or a tuple of them. CudaError names it where it fails."""
    driver = bindings()
    status, *values = getattr(driver, name)(*arguments)
    if status:
        raise CudaError(f"{name}: {_described(driver, status)}")
    return values[0] if len(values) == 1 else tuple(values) or None


def _described(driver: ModuleType, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    return f"{status.name}: {text.decode() if text else 'no text'}"


@cache
def device_count() -> int:
    """How many GPUs there are; 0 where there is no driver or no cuda-python."""
    try:
        return call("cuDeviceGetCount")
    except CudaError:
        return 0


@cache
def primary_context(index: int) -> Any:
    """The primary context of a GPU, retained for the life of the process."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


def use(index: int) -> None:
    """Make the GPU's primary context current in the calling thread."""
    call("cuCtxSetCurrent", primary_context(index))


def enter(index: int) -> bool:
    """Make the GPU's context current; True where another one was, which `leave` brings back. On the path of a call."""
    ask, current = _thread.current or current_context()
    ask()
    if current.value == handle(index):
        return False
    call("cuCtxPushCurrent", primary_context(index))
    return True


@cache
def handle(index: int) -> int:
    """The address of a GPU's primary context."""
    return int(primary_context(index))


class _Thread(threading.local):
    current: tuple[Callable[[], int], ctypes.c_void_p] | None = None


_thread = _Thread()


def current_context() -> tuple[Callable[[], int], ctypes.c_void_p]:
    """Of the calling thread: a function that asks for its current context and returns the driver's status, and where it
    puts the answer. cuCtxGetCurrent without the objects that cuda-python makes of its result: 0.2 us instead of 1."""
    if _thread.current is None:
        bindings()
        current = ctypes.c_void_p()
        _thread.current = partial(ctypes.PyDLL(_LIBRARY).cuCtxGetCurrent, ctypes.byref(current)), current
    return _thread.current


def launcher(config: Any, function: Any, parameters: int) -> Callable[[], int]:
    """What starts a kernel as its CUlaunchConfig says, and returns the driver's status: cuLaunchKernelEx without the
    objects that cuda-python makes. The config and the function are to be kept as long."""
    return with_pointers(ctypes.CDLL(_LIBRARY).cuLaunchKernelEx, config.getPtr(), int(function), parameters, 0)


def with_pointers(function: Any, *addresses: int) -> Callable[[], int]:
    """A C function without argtypes that returns an int, to be called with these pointers. References are passed on as
    they are; of a number or a c_void_p ctypes makes one at every call: four took 0.26 us, and take 0.14."""
    return partial(function, *(ctypes.byref(ctypes.c_char.from_address(each)) if each else None for each in addresses))


def leave() -> None:
    call("cuCtxPopCurrent")


class Current:
    """``with Current(index):`` runs in the GPU's context and restores the thread's own."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._changed = enter(self._index)

    def __exit__(self, *_: object) -> None:
        if self._changed:
            leave()


def attribute(index: int, name: str) -> int:
    """A device attribute, such as 'MULTIPROCESSOR_COUNT'."""
    wanted = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return call("cuDeviceGetAttribute", wanted, call("cuDeviceGet", index))


def device_of(pointer: int) -> int:
    """Index of the GPU that a device address belongs to."""
    ordinal = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return call("cuPointerGetAttribute", ordinal, pointer)


def upload(address: int, array: np.ndarray, stream: int = 0) -> None:
    """Copy the bytes of a contiguous array to the device; they may be changed once this returns."""
    if array.nbytes:
        call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, stream)
        call("cuStreamSynchronize", stream)


def download(array: np.ndarray, address: int, stream: int = 0) -> None:
    """Fill a contiguous array from the device, after everything that the stream was given before."""
    if array.nbytes:
        call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, stream)
        call("cuStreamSynchronize", stream)


def is_capturing(stream: int) -> bool:
    """Whether what the stream is given now becomes part of a graph."""
    status = call("cuStreamIsCapturing", stream)
    return status != bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


class Memory:
    """Device memory that is freed with this object."""

    def __init__(self, index: int, size_bytes: int) -> None:
        self.size_bytes, self._index = size_bytes, index
        self.address = 0
        with Current(index):
            try:
                self.address = int(call("cuMemAlloc", max(size_bytes, 1)))
            except CudaError as error:
                if "OUT_OF_MEMORY" in str(error):
                    raise MemoryError(f"{size_bytes} bytes of GPU {index}: {error}") from None
                raise

    def __del__(self) -> None:
        if self.address:
            with Current(self._index):
                call("cuMemFree", self.address)


class Graph:
    """Work captured once and replayed: what `record(stream)` puts on the given stream."""

    def __init__(self, stream: Any, record: Callable[[int], None]) -> None:
        driver = bindings()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", stream, mode)
        graph, collects = None, gc.isenabled()
        gc.disable()  # what garbage frees on the GPU would be part of what is captured, and end that
        try:
            record(int(stream))
        finally:
            status, graph = driver.cuStreamEndCapture(stream)
            if collects:
                gc.enable()
        if status:
            raise CudaError(f"cuStreamEndCapture: {_described(driver, status)}")
        self._stream = stream
        self._executable = call("cuGraphInstantiate", graph, 0)
        call("cuGraphDestroy", graph)

    def replay(self) -> None:
        call("cuGraphLaunch", self._executable, self._stream)

    def __del__(self) -> None:
        if executable := getattr(self, "_executable", None):
            call("cuGraphExecDestroy", executable)
