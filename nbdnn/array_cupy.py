"""Arrays of CuPy."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import cupy

from nbdnn.array import Library, View, dtype_named, numpy_dtype


class CuPy(Library):
    always_writable = True

    def read(self, array: Any) -> tuple[int, Hashable]:
        memory = array.data
        return memory.ptr, ("cupy", array.shape, array.strides, array.dtype, memory.device_id)

    def gpu(self, array: Any) -> int:
        return array.data.device_id

    def stream(self, gpu: int) -> int:
        return cupy.cuda.get_current_stream(gpu).ptr

    def on_stream(self, gpu: int, stream: int) -> AbstractContextManager:
        return cupy.cuda.ExternalStream(stream, gpu)

    def view(self, array: Any) -> View:
        dtype = dtype_named(array.dtype.name)
        return View(array.data.ptr, array.shape, array.strides, dtype, True, array.data.device_id)

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1) -> Callable[[], Any]:
        numpy_type = numpy_dtype(dtype)
        if not channels_last:
            return partial(cupy.empty, shape, numpy_type)
        in_memory = (shape[0], *shape[2:], shape[1])
        axes = (0, len(shape) - 1, *range(1, len(shape) - 1))
        return lambda: cupy.empty(in_memory, numpy_type).transpose(axes)

    def copy(self, target: Any, source: Any) -> None:
        cupy.copyto(target, source, casting="unsafe")


CUPY = CuPy()
