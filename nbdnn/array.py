"""Views over the arrays of other libraries: NumPy, PyTorch, JAX, CuPy and Numba, in host memory and on GPUs.

A call knows arrays like those of an earlier one by a `Library.recogniser`, or reads each of them once, with
`Library.read_all`: addresses, and keys that are equal for arrays that can share a plan. The rest of this module runs
once a plan, or where an operand must be copied.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from operator import index
from typing import Any, NamedTuple

import numpy as np

from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import ANY_ITEMSIZE, DEFAULT_ALIGN, ITEMSIZE, dense_strides

DTYPE_NAMES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "u8": "uint8", "i64": "int64"
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# What NumPy computes on: bfloat16 travels as its bits.
_RAW = {
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64, "u8": np.uint8, "i64": np.int64
}  # fmt: skip
# Of NumPy's search for a common byte, which for odd strides may go on for ever: a few milliseconds.
_MOST_WORK = 10_000


class View(NamedTuple):
    """What an array is: address, logical shape, strides in bytes, dtype ('f32'), whether it may be written, and the
    index of its GPU (-1 in host memory)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    writable: bool
    gpu: int = -1

    @property
    def bounds(self) -> tuple[int, int]:
        """Offsets from the address to the first byte of the array and past its last one; (0, 0) where it is empty."""
        if 0 in self.shape:
            return 0, 0
        spans = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        return sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans) + ANY_ITEMSIZE[self.dtype]

    @property
    def overlaps_itself(self) -> bool:
        """Whether a byte may be of several elements, as in a broadcast array: a stride is less than what the smaller
        ones span. No part of a dense array has such, be it turned or transposed."""
        reach = ANY_ITEMSIZE[self.dtype]
        steps = sorted(
            (abs(step), extent - 1) for extent, step in zip(self.shape, self.strides, strict=True) if extent > 1
        )
        for step, more in steps if 0 not in self.shape else ():
            if step < reach:
                return True
            reach += step * more
        return False

    def is_dense(self, channels_last: bool) -> bool:
        """Whether the array is dense in that layout. One with extents of 1 may be so in both."""
        if 0 in self.shape:
            return True
        itemsize = ANY_ITEMSIZE[self.dtype]
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


def share_memory(one: View, other: View) -> bool:
    """Whether some byte is of both arrays: of two slices of one array, each may lie between the elements of the other.

    True also where that takes long to find out.
    """
    first, second = (np.asarray(_Elsewhere(each)) for each in (one, other))
    try:
        return np.shares_memory(first, second, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Elsewhere:
    """Any array as NumPy sees it, which does not look into it: it may lie on a GPU."""

    def __init__(self, seen: View) -> None:
        self.__array_interface__ = {
            "data": (seen.pointer, True),
            "shape": seen.shape,
            "strides": seen.strides,
            "typestr": f"|V{ANY_ITEMSIZE[seen.dtype]}",
            "version": 3,
        }


Recogniser = Callable[[Sequence[Any]], "list[int] | None"]


class Library(ABC):
    """One array library: how its arrays are read, allocated, copied and given back.

    recognises: whether `recogniser` may be asked at every call. always_writable, never_writable: true of all its
    arrays.
    """

    recognises = True
    always_writable = False
    never_writable = False

    @abstractmethod
    def read(self, array: Any) -> tuple[int, Hashable]:
        """(address, key of shape, strides and dtype); no two libraries' are equal. On the path of a call."""

    def read_all(self, arrays: Sequence[Any]) -> tuple[list[int], list[Hashable]]:
        """(addresses, keys) of a call's arrays, the first of them of this library; 0 and None for those that are None.
        The keys of such that are not aligned are others."""
        pointers: list[int] = []
        keys: list[Hashable] = []
        kind, bits = type(arrays[0]), 0
        for array in arrays:
            if array is None:
                pointers.append(0)
                keys.append(None)
            else:
                pointer, key = self.read(array) if type(array) is kind else read(array)
                pointers.append(pointer)
                keys.append(key)
                bits |= pointer
        if bits & (DEFAULT_ALIGN - 1):
            keys += [pointer & (DEFAULT_ALIGN - 1) for pointer in pointers]
        return pointers, keys

    def recogniser(self, arrays: Sequence[Any]) -> Recogniser:
        """A function that is faster than `read_all` and a look at a memo: the addresses of other arrays where their
        keys would be those of `arrays` but for the alignment, else None. On the path of every call."""
        kind, read_one = type(arrays[0]), self.read
        keys = [None if array is None else read(array)[1] for array in arrays]

        def recognise(others: Sequence[Any]) -> list[int] | None:
            if len(others) != len(keys):
                return None
            pointers = []
            try:
                for array, key in zip(others, keys, strict=True):
                    if array is None:
                        pointer, found = 0, None
                    else:
                        pointer, found = read_one(array) if type(array) is kind else read(array)
                    if found != key:
                        return None
                    pointers.append(pointer)
            except InvalidType:  # which the checks name
                return None
            return pointers

        return recognise

    @abstractmethod
    def view(self, array: Any) -> View: ...

    @abstractmethod
    def pointer(self, array: Any) -> int:
        """Address of an array from `allocator`."""

    @abstractmethod
    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1) -> Callable[[], Any]:
        """A function that makes an uninitialised dense array, to be `given` to the caller when it is filled."""

    @abstractmethod
    def copy(self, target: Any, source: Any) -> None:
        """Copy element by element, converting the dtype. `target` is from `allocator`, or the caller's out=."""

    def given(self, array: Any) -> Any:
        """The caller's array that has taken over an allocated one."""
        return array

    def gpu(self, array: Any) -> int:
        """Index of the GPU that the array lies on; -1 in host memory. On the path of every call."""
        return -1

    def stream(self, gpu: int) -> int:
        """The stream on which the library works on that GPU now. On the path of every call."""
        return 0

    def on_stream(self, gpu: int, stream: int) -> AbstractContextManager:
        """Make that stream the library's current one, for allocations and copies."""
        return nullcontext()


_LIBRARIES: dict[type, Library] = {}


class UnknownDtype(InvalidType):
    """A dtype that nbdnn has no use for, as its library calls it."""

    def __init__(self, given: object) -> None:
        super().__init__(given)
        self.given = given

    def __str__(self) -> str:
        return _unexpected(self.given, tuple(ITEMSIZE))


def dtype_named(name: str, given: object = None) -> str:
    """The dtype, such as 'f32', that libraries call `name`."""
    if name not in _BY_NAME:
        raise UnknownDtype(given or name)
    return _BY_NAME[name]


def float_named(name: str) -> str:
    """The same of a dtype that is computed on."""
    if _BY_NAME.get(name) not in ITEMSIZE:
        raise UnknownDtype(name)
    return _BY_NAME[name]


def _unexpected(given: object, dtypes: tuple[str, ...]) -> str:
    valid = ", ".join(DTYPE_NAMES[dtype] for dtype in dtypes)
    return f"dtype {given} is not {'one of ' if len(dtypes) > 1 else ''}{valid}"


def library_of(array: Any) -> Library:
    """The library that `array` belongs to."""
    return _LIBRARIES.get(type(array)) or _identify(array)


def read(array: Any) -> tuple[int, Hashable]:
    """(address, key): arrays with equal keys can share a plan."""
    return (_LIBRARIES.get(type(array)) or _identify(array)).read(array)


def view(array: Any, name: str, dtypes: tuple[str, ...] = tuple(ITEMSIZE)) -> View:
    """What `array` is; InvalidType names it where its dtype is none of `dtypes`."""
    try:
        seen = library_of(array).view(array)
    except UnknownDtype as error:
        raise InvalidType(f"{name}: {_unexpected(error.given, dtypes)}") from None
    except InvalidType as error:
        raise InvalidType(f"{name}: {error}") from None
    if seen.dtype not in dtypes:
        raise InvalidType(f"{name}: {_unexpected(DTYPE_NAMES[seen.dtype], dtypes)}")
    return seen


def _identify(array: Any) -> Library:
    """The library of an array whose type is seen for the first time: only what is loaded already can have made it."""
    loaded = sys.modules.get
    library: Library | None = None
    if isinstance(array, type):
        raise InvalidType(f"{array.__name__} is a class, not an array")
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        from nbdnn.array_numpy import NUMPY as library
    elif (torch := loaded("torch")) is not None and isinstance(array, torch.Tensor):
        from nbdnn.array_torch import TORCH as library
    elif (jax := loaded("jax")) is not None and isinstance(array, jax.core.Tracer):
        raise InvalidType("a JAX tracer has no values: nbdnn functions cannot be called inside jax.jit or jax.grad")
    elif jax is not None and isinstance(array, jax.Array):
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):  # keys of generators, which have no numbers
            raise UnknownDtype(array.dtype)
        from nbdnn.array_jax import JAX as library
    elif (cupy := loaded("cupy")) is not None and isinstance(array, cupy.ndarray):
        from nbdnn.array_cupy import CUPY as library
    elif (numba := loaded("numba.cuda.cudadrv.devicearray")) is not None and isinstance(array, numba.DeviceNDArray):
        from nbdnn.array_cuda import NUMBA as library
    elif hasattr(array, "__cuda_array_interface__"):
        from nbdnn.array_cuda import CUDA_ARRAY as library
    elif hasattr(array, "__dlpack_device__") and not isinstance(array, np.ndarray):
        from nbdnn.array_cuda import DLPACK as library
    if library is None:
        raise InvalidType(f"{type(array).__name__} is not an array of NumPy, PyTorch, JAX, CuPy or Numba")
    return _LIBRARIES.setdefault(type(array), library)


def stream_handle(stream: Any) -> int:
    """The CUDA handle of a stream: an int, or an object with ``__cuda_stream__``, ``cuda_stream``, ``ptr`` or
    ``handle`` (PyTorch's, CuPy's, Numba's)."""
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr", "handle"):
        if (handle := getattr(stream, name, None)) is not None:
            return int(getattr(handle, "value", handle) or 0)
    try:
        return index(stream)
    except TypeError:
        raise InvalidType(f"stream is {stream!r}, expected a handle or an object with __cuda_stream__") from None


def common_dtype(dtypes: list[str]) -> str:
    """The dtype that holds the values of all of `dtypes`."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "f64" if "f64" in dtypes else "f32"


def dense_copy(array: Any, channels_last: bool, dtype: str) -> Any:
    """A dense copy in that layout and dtype, of the same library (of NumPy for JAX) and on the same device."""
    library = library_of(array)
    copied = library.allocator(tuple(array.shape), channels_last, dtype, library.gpu(array))()
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
    itemsize = ANY_ITEMSIZE[dtype]
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


def fill_with_nan(raw: np.ndarray) -> None:
    """All bits 1: NaN in every floating-point type, and nothing that an integer output should be."""
    raw[...] = np.frombuffer(b"\xff" * raw.itemsize, raw.dtype)[0]


def numpy_dtype(dtype: str) -> np.dtype:
    if dtype == "bf16":
        try:
            import ml_dtypes
        except ImportError:
            raise InvalidProblem("a bfloat16 result in NumPy needs the package ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_RAW[dtype])
