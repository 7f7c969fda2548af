"""Arrays of PyTorch, on the CPU and on GPUs."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from nbdnn.array import DTYPE_NAMES, Library, Recogniser, View, dtype_named, read
from nbdnn.errors import InvalidType
from nbdnn.problem import ANY_ITEMSIZE, DEFAULT_ALIGN, dense_strides

# From this size on an output is asked for in huge pages, as NumPy asks for its arrays. The C library maps blocks of
# more than 32 MiB anew each time, and may give smaller ones at the end of its heap back to the system: the first write
# to 38 MiB took 6.7 ms in small pages and 1.1 ms in huge ones, and a layer of 14 MiB 2.5 ms and 0.6 ms.
_HUGE_BYTES = 4 << 20

_NEGATED = "a tensor that PyTorch has yet to negate: call .resolve_neg() on it"

_DTYPES = {dtype: getattr(torch, name) for dtype, name in DTYPE_NAMES.items()}
_NAMES = {torch_dtype: dtype for dtype, torch_dtype in _DTYPES.items()}
# What torch.cuda.current_stream(gpu).cuda_stream is, in 0.2 us instead of 8.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# What torch.compile asks whether tensors are like those it compiled for: it compares types, dtypes, devices, shapes,
# strides and kinds of several in one call. It is private, and crashes where it is not called as it likes: nothing but
# releases that the tests have seen.
_TensorGuards: Any = None
if "2.11" <= torch.__version__ < "2.14.dev0":  # as versions: no release of 2.14, nor what comes before it
    from torch._C._dynamo import guards

    _TensorGuards = guards.TensorGuards


class Torch(Library):
    always_writable = True

    def read(self, array: Any) -> tuple[int, Hashable]:
        try:
            pointer = array.data_ptr()
            strides = array.stride()
        except RuntimeError as error:
            raise _not_dense(array, error) from None
        if array.is_neg():
            raise InvalidType(_NEGATED)
        return pointer, (array.shape, strides, array.dtype, array.get_device())

    def read_all(self, arrays: Sequence[Any]) -> tuple[list[int], list[Hashable]]:
        """As the base has it, in one loop: three tensors took 2.3 us one by one, and take 1.4."""
        pointers: list[int] = []
        keys: list[Hashable] = []
        bits = 0
        for array in arrays:
            if array is None:
                pointers.append(0)
                keys.append(None)
            elif isinstance(array, Tensor):
                try:
                    pointer = array.data_ptr()
                    strides = array.is_contiguous() or array.stride()
                    keys += (array.shape, strides, array.dtype, array.get_device())
                except RuntimeError as error:
                    raise _not_dense(array, error) from None
                if array.is_neg():
                    raise InvalidType(_NEGATED)
                pointers.append(pointer)
                bits |= pointer
            else:
                pointer, key = read(array)
                pointers.append(pointer)
                keys.append(key)
                bits |= pointer
        if bits & (DEFAULT_ALIGN - 1):
            keys += [pointer & (DEFAULT_ALIGN - 1) for pointer in pointers]
        return pointers, keys

    def recogniser(self, arrays: Sequence[Any]) -> Recogniser:
        """By guards, of tensors no two of which are one object. Two took 1.1 us to read and look up, and take 0.6."""
        present, absent = (tuple(i for i, array in enumerate(arrays) if (array is None) is no) for no in (False, True))
        tensors = [arrays[i] for i in present]
        if _TensorGuards is None or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return super().recogniser(arrays)
        shapes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
        fits = _TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        select = itemgetter(*present) if len(present) > 1 else lambda others: (others[present[0]],)
        count = len(arrays)

        def recognise(others: Sequence[Any]) -> list[int] | None:
            return [other.data_ptr() for other in others] if len(others) == count and fits(*others) else None

        def recognise_some(others: Sequence[Any]) -> list[int] | None:
            if len(others) != count:
                return None
            for i in absent:
                if others[i] is not None:
                    return None
            return [0 if other is None else other.data_ptr() for other in others] if fits(*select(others)) else None

        if not fits(*tensors):
            return super().recogniser(arrays)
        return recognise_some if absent else recognise

    def gpu(self, array: Any) -> int:
        if array.is_cuda:
            return array.get_device()
        if not array.is_cpu:
            raise InvalidType(f"a tensor on {array.device}: it must be on a CPU or CUDA device")
        return -1

    stream = staticmethod(_raw_stream)

    def on_stream(self, gpu: int, stream: int) -> AbstractContextManager:
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, gpu))

    def view(self, array: Any) -> View:
        dtype = _NAMES.get(array.dtype) or dtype_named("", array.dtype)
        strides = tuple(step * ANY_ITEMSIZE[dtype] for step in array.stride())
        return View(array.data_ptr(), tuple(array.shape), strides, dtype, True, self.gpu(array))

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def allocator(self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1) -> Callable[[], Any]:
        strides, size_bytes = dense_strides(shape, channels_last), prod(shape) * ANY_ITEMSIZE[dtype]
        device = torch.device("cuda", gpu) if gpu >= 0 else torch.device("cpu")
        empty = partial(torch.empty_strided, shape, strides, dtype=_DTYPES[dtype], device=device)
        advise = _huge_pages()
        if gpu >= 0 or size_bytes < _HUGE_BYTES or advise is None:
            return empty

        def allocate() -> Any:
            tensor = empty()
            advise(tensor.data_ptr(), size_bytes)
            return tensor

        return allocate

    def copy(self, target: Any, source: Any) -> None:
        target.detach().copy_(source.detach())


def _not_dense(tensor: Any, error: RuntimeError) -> InvalidType:
    """Why a tensor has no address or no strides: a sparse one has neither, one that is traced no address."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return InvalidType("a tensor without values: nbdnn functions cannot be called inside torch.vmap or torch.func")
    return InvalidType(f"a {tensor.layout} tensor: it must be dense ({error})")


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


TORCH = Torch()
