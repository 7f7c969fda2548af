"""An array in GPU memory that nbdnn made: every library that knows a protocol for such arrays can take it over."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

from nbdnn import driver
from nbdnn.array import View
from nbdnn.errors import InvalidType
from nbdnn.problem import ANY_ITEMSIZE, dense_strides

# DLPack's numbers: of CUDA devices, and of types.
CUDA_KIND, _INT, _UINT, _FLOAT, _BFLOAT = 2, 0, 1, 2, 4
_CODES = {
    "f16": (_FLOAT, 16), "bf16": (_BFLOAT, 16), "f32": (_FLOAT, 32), "f64": (_FLOAT, 64), "u8": (_UINT, 8),
    "i64": (_INT, 64),
}  # fmt: skip
_TYPESTR = {"f16": "<f2", "f32": "<f4", "f64": "<f8", "u8": "|u1", "i64": "<i8"}


class DeviceArray:
    """Uninitialised memory of one GPU with a shape, strides in elements and a dtype ('f32').

    ``__cuda_array_interface__`` has no word for bfloat16: such an array is shared through DLPack only.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, gpu: int) -> None:
        self.shape, self.strides, self.dtype, self.gpu = shape, strides, dtype, gpu
        self.memory = driver.Memory(gpu, prod(shape) * ANY_ITEMSIZE[dtype])
        self.pointer = self.memory.address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype not in _TYPESTR:
            raise AttributeError("bfloat16 is not expressible in __cuda_array_interface__: use DLPack")
        itemsize = ANY_ITEMSIZE[self.dtype]
        return {
            "shape": self.shape,
            "strides": tuple(step * itemsize for step in self.strides),
            "typestr": _TYPESTR[self.dtype],
            "data": (self.pointer, False),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_KIND, self.gpu

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """A capsule that keeps the memory alive; what was enqueued on the device is awaited."""
        with driver.Current(self.gpu):
            driver.call("cuCtxSynchronize")
        return _capsule(self)


class _Tensor(ctypes.Structure):
    """DLManagedTensor, with the DLTensor that it begins with."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# Exported tensors with what they point to, by address, until their consumer deletes them.
_alive: dict[int, tuple[Any, ...]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _alive.pop(address, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """Of a capsule that nobody consumed: a consumer renames it."""
    if _is_named(capsule, b"dltensor"):
        _delete(_pointer_of(capsule, b"dltensor"))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_named = ctypes.pythonapi.PyCapsule_IsValid
_is_named.argtypes = ctypes.c_void_p, ctypes.c_char_p
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
_NAME = b"dltensor"


def exported(capsule: Any, gpu: int) -> View:
    """What a capsule of DLPack describes. The capsule is not consumed: whoever made it keeps the memory."""
    tensor = _Tensor.from_address(_pointer_of(id(capsule), _NAME))
    dtype = next((d for d, code in _CODES.items() if code == (tensor.code, tensor.bits) and tensor.lanes == 1), None)
    if dtype is None:
        raise InvalidType(f"DLPack type {tensor.code} of {tensor.bits} bits is not one of {', '.join(_CODES)}")
    shape = tuple(tensor.shape[: tensor.ndim])
    steps = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else dense_strides(shape, False)
    strides = tuple(step * ANY_ITEMSIZE[dtype] for step in steps)
    return View((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, True, gpu)


def _capsule(array: DeviceArray) -> Any:
    ndim = len(array.shape)
    extents = ctypes.c_int64 * ndim
    shape, strides = extents(*array.shape), extents(*array.strides)
    tensor = _Tensor(
        array.pointer, CUDA_KIND, array.gpu, ndim, *_CODES[array.dtype], 1, shape, strides, 0, None,
        ctypes.cast(_delete, ctypes.c_void_p),
    )  # fmt: skip
    address = ctypes.addressof(tensor)
    _alive[address] = (tensor, shape, strides, array.memory)
    return _new_capsule(address, _NAME, ctypes.cast(_destroy, ctypes.c_void_p))
