"""Arrays of Numba on a GPU, and of any library that exports ``__cuda_array_interface__`` or DLPack."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from nbdnn import driver
from nbdnn.array import Library, View, dtype_named, narrowed, numpy_dtype, widened
from nbdnn.device_array import CUDA_KIND, DeviceArray, exported
from nbdnn.errors import InvalidType
from nbdnn.problem import ANY_ITEMSIZE, dense_strides


class CudaArray(Library):
    """Whatever has ``__cuda_array_interface__``; results are `DeviceArray`, which has it too."""

    def read(self, array: Any) -> tuple[int, Hashable]:
        pointer, key = _interface(array)
        return pointer, (key, driver.device_of(pointer) if pointer else 0)

    def gpu(self, array: Any) -> int:
        pointer, _ = _interface(array)
        return driver.device_of(pointer) if pointer else 0

    def view(self, array: Any) -> View:
        pointer, (shape, strides, name, read_only) = _interface(array)
        dtype = dtype_named(np.dtype(name).name, name)
        strides = strides or _bytes(dense_strides(shape, False), dtype)
        return View(pointer, tuple(shape), tuple(strides), dtype, not read_only, self.gpu(array))

    def pointer(self, array: Any) -> int:
        return array.__cuda_array_interface__["data"][0]

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1) -> Callable[[], Any]:
        return lambda: DeviceArray(shape, dense_strides(shape, channels_last), dtype, gpu)

    def copy(self, target: Any, source: Any) -> None:
        copy_through_host(self.view(target), self.view(source))


class DlpackArray(CudaArray):
    """What exports DLPack alone, from a GPU. An export may wait for the producer's stream: there is one a call."""

    recognises = False

    def read(self, array: Any) -> tuple[int, Hashable]:
        view = self.view(array)
        return view.pointer, view[1:]

    def gpu(self, array: Any) -> int:
        kind, index = array.__dlpack_device__()
        if kind != CUDA_KIND:
            raise InvalidType(
                f"a {type(array).__name__} on a device of DLPack's kind {int(kind)}: it must be on CUDA's, 2"
            )
        return index

    def view(self, array: Any) -> View:
        index = self.gpu(array)
        # 1 is the legacy default stream: what was enqueued on the producer's is waited for by what we enqueue there.
        return exported(array.__dlpack__(stream=1), index)

    def pointer(self, array: Any) -> int:
        return array.pointer if isinstance(array, DeviceArray) else self.view(array).pointer


class NumbaArray(CudaArray):
    """Numba's DeviceNDArray; results are of the same kind."""

    always_writable = True

    def read(self, array: Any) -> tuple[int, Hashable]:
        pointer = array.device_ctypes_pointer.value or 0
        return pointer, ("numba", array.shape, array.strides, array.dtype, self.gpu(array))

    def gpu(self, array: Any) -> int:
        return array.gpu_data.context.device.id

    def view(self, array: Any) -> View:
        dtype = dtype_named(array.dtype.name)
        pointer = array.device_ctypes_pointer.value or 0
        return View(pointer, array.shape, array.strides, dtype, True, self.gpu(array))

    def pointer(self, array: Any) -> int:
        return array.device_ctypes_pointer.value or 0

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1) -> Callable[[], Any]:
        from numba import cuda

        strides = _bytes(dense_strides(shape, channels_last), dtype)
        return lambda: cuda.device_array(shape, numpy_dtype(dtype), strides)


def _interface(array: Any) -> tuple[int, tuple[tuple[int, ...], tuple[int, ...] | None, str, bool]]:
    """The address by ``__cuda_array_interface__``, and (shape, strides in bytes, typestr, whether it is read-only)."""
    facts = array.__cuda_array_interface__
    try:
        pointer, read_only = facts["data"]
        key = facts["shape"], facts.get("strides"), facts["typestr"], read_only
        masked = facts.get("mask") is not None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidType(f"a {type(array).__name__} whose __cuda_array_interface__ is {facts!r}") from None
    if masked:
        raise InvalidType(f"a {type(array).__name__} with a mask, which nbdnn would not apply")
    return pointer, key


def copy_through_host(to: View, from_: View) -> None:
    """For libraries without a copy between strides and dtypes. It waits for the device."""
    driver.call("cuCtxSynchronize")
    _, values = _on_host(from_)
    memory, elements = _on_host(to)
    elements[...] = narrowed(widened(values, from_.dtype), to.dtype)
    driver.upload(to.pointer + to.bounds[0], memory)


def _bytes(strides: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    return tuple(step * ANY_ITEMSIZE[dtype] for step in strides)


def _on_host(view: View) -> tuple[np.ndarray, np.ndarray]:
    """A copy of the bytes that an array spans, and its elements in there (bfloat16 as its bits)."""
    low, high = view.bounds
    memory = np.empty(high - low, np.uint8)
    driver.download(memory, view.pointer + low)
    raw = np.uint16 if view.dtype == "bf16" else numpy_dtype(view.dtype)
    return memory, np.ndarray(view.shape, raw, memory, -low, view.strides)


CUDA_ARRAY, DLPACK, NUMBA = CudaArray(), DlpackArray(), NumbaArray()
