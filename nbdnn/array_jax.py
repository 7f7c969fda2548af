"""Arrays of JAX, on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import numpy as np

from nbdnn import driver
from nbdnn.array import View, dtype_named, numpy_dtype
from nbdnn.array_cuda import copy_through_host
from nbdnn.array_numpy import NumPy, empty_on_line
from nbdnn.cached import cached_property
from nbdnn.device_array import DeviceArray
from nbdnn.errors import InvalidType
from nbdnn.problem import ANY_ITEMSIZE, dense_strides


class Jax(NumPy):
    """On the CPU through the NumPy array that every JAX array can be seen as without a copy.

    On a GPU JAX has streams of its own, which nobody else sees: its arrays are awaited before they are read, and a
    result is finished before JAX has it.
    """

    never_writable = True

    def read(self, array: Any) -> tuple[int, Hashable]:
        gpu = self.gpu(array)
        if gpu < 0:
            pointer, key = super().read(np.asarray(array))
            return pointer, ("jax", key)
        pointer = _awaited(array)
        return pointer, ("jax", array.shape, array.dtype, gpu)

    def gpu(self, array: Any) -> int:
        if array.is_deleted():
            raise InvalidType("a JAX array that was deleted or donated")
        if self._cpu_only:
            return -1
        devices = array.devices()
        if len(devices) != 1:
            raise InvalidType(f"a JAX array on {len(devices)} devices: it must be on one")
        (device,) = devices
        if device.platform != "cpu":
            return device.local_hardware_id
        if device.local_hardware_id:
            raise InvalidType(f"a JAX array on {device}: of JAX's CPU devices it must be on the first")
        return -1

    def view(self, array: Any) -> View:
        if isinstance(array, DeviceArray):
            steps, pointer, dtype, gpu = array.strides, array.pointer, array.dtype, array.gpu
        else:
            gpu = self.gpu(array)
            if gpu < 0:
                return super().view(np.asarray(array))
            dtype = dtype_named(array.dtype.name)
            steps, pointer = dense_strides(array.shape, False), _awaited(array)
        return View(pointer, array.shape, tuple(step * ANY_ITEMSIZE[dtype] for step in steps), dtype, False, gpu)

    def pointer(self, array: Any) -> int:
        return array.pointer if isinstance(array, DeviceArray) else super().pointer(array)

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1) -> Callable[[], Any]:
        if gpu >= 0:
            return partial(DeviceArray, shape, dense_strides(shape, channels_last), dtype, gpu)
        # JAX shares a buffer of NumPy only where it lies on a line, as its own do.
        return partial(empty_on_line, shape, numpy_dtype(dtype))

    def copy(self, target: Any, source: Any) -> None:
        if isinstance(target, DeviceArray):
            copy_through_host(self.view(target), self.view(source))
        else:
            super().copy(target, np.asarray(source))

    def given(self, array: Any) -> Any:
        if str(array.dtype) in ("i64", "int64") and not jax.config.read("jax_enable_x64"):
            return _frozen(array)
        if not isinstance(array, DeviceArray) and array.dtype.name == "bfloat16":  # NumPy exports none by DLPack
            return jax.dlpack.from_dlpack(array.view(np.uint16)).view(jax.numpy.bfloat16)
        return jax.dlpack.from_dlpack(array)

    @cached_property
    def _cpu_only(self) -> bool:
        """Whether there is one device, which is not a GPU."""
        return jax.default_backend() == "cpu" and jax.local_device_count() == 1


def _frozen(array: Any) -> np.ndarray:
    """The int64 that JAX has no word for unless its flag jax_enable_x64 is set: of NumPy, as constant as JAX's own."""
    values = array
    if isinstance(array, DeviceArray):
        values = np.empty(array.shape, np.int64)
        with driver.Current(array.gpu):
            driver.call("cuCtxSynchronize")
            driver.download(values, array.pointer)
    values.flags.writeable = False
    return values


def _awaited(array: Any) -> int:
    """Address of an array on a GPU, whose values are there."""
    return array.block_until_ready().unsafe_buffer_pointer()


JAX = Jax()
