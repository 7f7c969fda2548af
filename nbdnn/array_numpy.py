"""Arrays of NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import partial
from math import prod

import numpy as np

from nbdnn.array import Library, View, dtype_named, numpy_dtype
from nbdnn.errors import InvalidType
from nbdnn.problem import ANY_ITEMSIZE

_LINE_BYTES = 64
# From this size on the C library maps arrays, and they begin 16 bytes into a page: every vector of 64 bytes that is
# stored then touches two lines.
_MAPPED_BYTES = 128 << 10

# The C struct of an ndarray is PyObject_HEAD, then `char *data`: NumPy's stable ABI. Reading that word costs 0.1 us,
# a.ctypes.data and a.__array_interface__ 0.8 us, and a convolution has three operands.
_DATA_OFFSET = object.__basicsize__
_pointer_at = ctypes.c_void_p.from_address


def empty_on_line(shape: tuple[int, ...], numpy_type: np.dtype) -> np.ndarray:
    """An uninitialised array in C order that begins on a cache line."""
    memory = np.empty(prod(shape) * numpy_type.itemsize + _LINE_BYTES, np.uint8)
    return np.ndarray(shape, numpy_type, memory, -NUMPY.pointer(memory) % _LINE_BYTES)


class NumPy(Library):
    def read(self, array: np.ndarray) -> tuple[int, Hashable]:
        pointer = _pointer_at(id(array) + _DATA_OFFSET).value or 0
        return pointer, (array.shape, array.strides, array.dtype, array.flags.writeable)

    def view(self, array: np.ndarray) -> View:
        if not array.dtype.isnative:
            raise InvalidType(f"dtype {array.dtype.str} is of the other byte order: use .astype({array.dtype.name!r})")
        dtype = dtype_named(array.dtype.name)
        return View(array.ctypes.data, array.shape, array.strides, dtype, array.flags.writeable)

    def pointer(self, array: np.ndarray) -> int:
        return _pointer_at(id(array) + _DATA_OFFSET).value or 0

    def allocator(
        self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1
    ) -> Callable[[], np.ndarray]:
        numpy_type = numpy_dtype(dtype)
        empty = np.empty if prod(shape) * ANY_ITEMSIZE[dtype] < _MAPPED_BYTES else empty_on_line
        if not channels_last:
            return partial(empty, shape, numpy_type)
        in_memory = (shape[0], *shape[2:], shape[1])
        axes = (0, len(shape) - 1, *range(1, len(shape) - 1))
        return lambda: empty(in_memory, numpy_type).transpose(axes)

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        np.copyto(target, source, casting="unsafe")


NUMPY = NumPy()
