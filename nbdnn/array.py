"""Views over the arrays of other libraries: NumPy, and PyTorch and JAX on the CPU.

Every call reads each of its arrays once, with `read`: an address, and a key that is equal for arrays that can share a
plan. The rest of this module runs once a plan, or where an operand must be copied.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cache, cached_property, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import DEFAULT_ALIGN, ITEMSIZE, dense_strides

DTYPE_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# What NumPy computes on: bfloat16 travels as its bits.
_RAW = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
# JAX shares a NumPy buffer only where it is aligned like its own.
_JAX_ALIGN = 64

# The C struct of an ndarray is PyObject_HEAD, then `char *data`: NumPy's stable ABI. Reading that word costs 0.1 us,
# a.ctypes.data and a.__array_interface__ 0.8 us, and a convolution has three operands.
_DATA_OFFSET = object.__basicsize__
_pointer_at = ctypes.c_void_p.from_address

# The C library maps larger blocks anew each time (its M_MMAP_THRESHOLD stays below). NumPy asks for huge pages for
# them, PyTorch does not, and the first write to 38 MiB took 6.7 ms in small pages and 1.1 ms in huge ones.
_ALWAYS_MAPPED_BYTES = 32 << 20


class View(NamedTuple):
    """What an array is: address, logical shape, strides in bytes, dtype ('f32'), and whether it may be written."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    writable: bool

    @property
    def bounds(self) -> tuple[int, int]:
        """Offsets from the address to the first byte of the array and past its last one; (0, 0) where it is empty."""
        if 0 in self.shape:
            return 0, 0
        spans = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans) + ITEMSIZE[self.dtype]

    @property
    def overlaps_itself(self) -> bool:
        """Whether one byte is surely several elements, as in a broadcast array."""
        broadcast = any(stride == 0 and extent > 1 for extent, stride in zip(self.shape, self.strides, strict=True))
        return broadcast and 0 not in self.shape

    def is_dense(self, channels_last: bool) -> bool:
        """Whether the array is dense in that layout. One with extents of 1 may be so in both."""
        if 0 in self.shape:
            return True
        itemsize = ITEMSIZE[self.dtype]
        wanted = dense_strides(self.shape, channels_last)
        return self.pointer % itemsize == 0 and all(
            extent == 1 or stride == steps * itemsize
            for extent, stride, steps in zip(self.shape, self.strides, wanted, strict=True)
        )

    @property
    def layout(self) -> bool | None:
        """Whether the array is channels-last; None where its strides fit both layouts.

        For an array that is dense in neither, the layout that keeps its order in memory.
        """
        first, last = self.is_dense(False), self.is_dense(True)
        if first or last:
            return None if first and last else last
        steps = [abs(s) for s, e in zip(self.strides[2:], self.shape[2:], strict=True) if e > 1]
        return self.shape[1] > 1 and bool(steps) and abs(self.strides[1]) < min(steps)


class Library(ABC):
    """One array library: how its arrays are read, allocated, copied and given back."""

    @abstractmethod
    def read(self, array: Any) -> tuple[int, Hashable]:
        """(address, key of shape, strides, dtype and alignment). On the path of every call."""

    @abstractmethod
    def view(self, array: Any) -> View: ...

    @abstractmethod
    def pointer(self, array: Any) -> int:
        """Address of an array from `allocator`."""

    @abstractmethod
    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str) -> Callable[[], Any]:
        """A function that makes an uninitialised dense array, to be `given` to the caller when it is filled."""

    @abstractmethod
    def copy(self, target: Any, source: Any) -> None:
        """Copy element by element, converting the dtype. `target` is from `allocator`, or the caller's out=."""

    def given(self, array: Any) -> Any:
        """The caller's array that has taken over an allocated one."""
        return array


class _NumPy(Library):
    def read(self, array: np.ndarray) -> tuple[int, Hashable]:
        pointer = _pointer_at(id(array) + _DATA_OFFSET).value or 0
        return pointer, (array.shape, array.strides, array.dtype, pointer & (DEFAULT_ALIGN - 1), array.flags.writeable)

    def view(self, array: np.ndarray) -> View:
        dtype = _BY_NAME.get(array.dtype.name)
        if dtype is None or not array.dtype.isnative:
            raise InvalidType(f"dtype {array.dtype} is not one of {', '.join(_BY_NAME)}")
        return View(array.ctypes.data, array.shape, array.strides, dtype, array.flags.writeable)

    def pointer(self, array: np.ndarray) -> int:
        return _pointer_at(id(array) + _DATA_OFFSET).value or 0

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str) -> Callable[[], np.ndarray]:
        numpy_dtype = _numpy_dtype(dtype)
        if not channels_last:
            return partial(np.empty, shape, numpy_dtype)
        in_memory = (shape[0], *shape[2:], shape[1])
        axes = (0, len(shape) - 1, *range(1, len(shape) - 1))
        return lambda: np.empty(in_memory, numpy_dtype).transpose(axes)

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        np.copyto(target, source, casting="unsafe")


class _Jax(_NumPy):
    """JAX on the CPU, through the NumPy array that every JAX array can be seen as without a copy."""

    def read(self, array: Any) -> tuple[int, Hashable]:
        pointer, key = super().read(self._as_numpy(array))
        return pointer, ("jax", key)

    def view(self, array: Any) -> View:
        return super().view(self._as_numpy(array))

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str) -> Callable[[], np.ndarray]:
        size_bytes = prod(shape) * ITEMSIZE[dtype]
        numpy_dtype = _numpy_dtype(dtype)

        def allocate() -> np.ndarray:
            memory = np.empty(size_bytes + _JAX_ALIGN, np.uint8)
            start = -memory.ctypes.data % _JAX_ALIGN
            return memory[start : start + size_bytes].view(numpy_dtype).reshape(shape)

        return allocate

    def copy(self, target: np.ndarray, source: Any) -> None:
        super().copy(target, self._as_numpy(source))

    def given(self, array: np.ndarray) -> Any:
        import jax

        if array.dtype.name == "bfloat16":  # NumPy exports no bfloat16 by DLPack
            return jax.dlpack.from_dlpack(array.view(np.uint16)).view(jax.numpy.bfloat16)
        return jax.dlpack.from_dlpack(array)

    @cached_property
    def _cpu_only(self) -> bool:
        import jax

        return jax.default_backend() == "cpu"

    def _as_numpy(self, array: Any) -> np.ndarray:
        if not self._cpu_only and any(device.platform != "cpu" for device in array.devices()):
            raise InvalidType(f"a JAX array on {array.devices()}: only CPU arrays are supported")
        return np.asarray(array)


class _Torch(Library):
    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._dtypes = {dtype: getattr(torch, name) for dtype, name in DTYPE_NAMES.items()}
        self._names = {torch_dtype: dtype for dtype, torch_dtype in self._dtypes.items()}
        self._strided = torch.strided

    def read(self, array: Any) -> tuple[int, Hashable]:
        if not array.is_cpu or array.layout is not self._strided:
            raise InvalidType(f"a {array.layout} tensor on {array.device}: only dense CPU tensors are supported")
        pointer = array.data_ptr()
        return pointer, (array.shape, array.stride(), array.dtype, pointer & (DEFAULT_ALIGN - 1))

    def view(self, array: Any) -> View:
        dtype = self._names.get(array.dtype)
        if dtype is None:
            raise InvalidType(f"dtype {array.dtype} is not one of {', '.join(_BY_NAME)}")
        strides = tuple(step * ITEMSIZE[dtype] for step in array.stride())
        return View(array.data_ptr(), tuple(array.shape), strides, dtype, True)

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str) -> Callable[[], Any]:
        strides, size_bytes = dense_strides(shape, channels_last), prod(shape) * ITEMSIZE[dtype]
        empty = partial(self._torch.empty_strided, shape, strides, dtype=self._dtypes[dtype])
        advise = _huge_pages()
        if size_bytes <= _ALWAYS_MAPPED_BYTES or advise is None:
            return empty

        def allocate() -> Any:
            tensor = empty()
            advise(tensor.data_ptr(), size_bytes)
            return tensor

        return allocate

    def copy(self, target: Any, source: Any) -> None:
        target.detach().copy_(source.detach())


@cache
def _huge_pages() -> Callable[[int, int], None] | None:
    """A function (address, size in bytes) that asks for huge pages there; None where the system has none to ask for."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def advise(address: int, size_bytes: int) -> None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        madvise(start, address + size_bytes - start, advice)

    return advise


_NUMPY = _NumPy()
_LIBRARIES: dict[type, Library] = {np.ndarray: _NUMPY}


def library_of(array: Any) -> Library:
    """The library that `array` belongs to."""
    return _LIBRARIES.get(type(array)) or _identify(array)


def read(array: Any) -> tuple[int, Hashable]:
    """(address, key): arrays with equal keys can share a plan."""
    return (_LIBRARIES.get(type(array)) or _identify(array)).read(array)


def view(array: Any, name: str) -> View:
    """What `array` is; InvalidType names it where its dtype is not computed on."""
    try:
        return library_of(array).view(array)
    except InvalidType as error:
        raise InvalidType(f"{name}: {error}") from None


def _identify(array: Any) -> Library:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        library: Library = _NUMPY
    elif torch is not None and isinstance(array, torch.Tensor):
        library = next((known for known in _LIBRARIES.values() if isinstance(known, _Torch)), None) or _Torch()
    elif jax is not None and isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        library = _Jax()
    elif jax is not None and isinstance(array, jax.core.Tracer):
        raise InvalidType("a JAX tracer has no values: nbdnn functions cannot be called inside jax.jit or jax.grad")
    else:
        raise InvalidType(f"{type(array).__name__} is not an array of NumPy, PyTorch or JAX")
    return _LIBRARIES.setdefault(type(array), library)


def common_dtype(dtypes: list[str]) -> str:
    """The dtype that holds the values of all of `dtypes`."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "f64" if "f64" in dtypes else "f32"


def dense_copy(array: Any, channels_last: bool, dtype: str) -> Any:
    """A dense copy in that layout and dtype, of the same library (of NumPy for JAX)."""
    library = library_of(array)
    copied = library.allocator(tuple(array.shape), channels_last, dtype)()
    library.copy(copied, array)
    return copied


def alignment(pointers: list[int]) -> int:
    """The largest power of two, at most 16, that divides every pointer."""
    bits = DEFAULT_ALIGN
    for pointer in pointers:
        bits |= pointer
    return bits & -bits


def at(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
    """The array of a dense operand at `pointer`, strides in elements; bfloat16 as its bits. It owns nothing."""
    if 0 in shape:
        return np.empty(shape, _RAW[dtype])
    itemsize = ITEMSIZE[dtype]
    buffer = (ctypes.c_char * (prod(shape) * itemsize)).from_address(pointer)
    return np.ndarray(shape, _RAW[dtype], memoryview(buffer), strides=tuple(step * itemsize for step in strides))


def widened(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The values of an array from `at`: bfloat16 in float32, the others as they are."""
    return (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else raw


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` in the form that `at` gives, rounded to nearest even."""
    if dtype != "bf16":
        return values.astype(_RAW[dtype])
    bits = values.astype(np.float32, order="K").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _numpy_dtype(dtype: str) -> np.dtype:
    if dtype == "bf16":
        try:
            import ml_dtypes
        except ImportError:
            raise InvalidProblem("a bfloat16 result in NumPy needs the package ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_RAW[dtype])
