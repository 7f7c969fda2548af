"""cuDNN's descriptors, each destroyed with the Python object that owns it.

The legacy API has one kind of descriptor a thing (tensor, filter, convolution), made here from a problem; the backend
API has one kind with attributes, of which graphs and plans are built.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

from nbdnn.cudnn.api import call, function
from nbdnn.cudnn.enums import (
    Attribute,
    AttributeType,
    ConvolutionMode,
    DataType,
    DescriptorType,
    MathType,
    TensorFormat,
)
from nbdnn.problem import Operand
from nbdnn.problem_conv import ConvProblem

DATA_TYPE = {"f16": DataType.HALF, "bf16": DataType.BFLOAT16, "f32": DataType.FLOAT, "f64": DataType.DOUBLE}
MODE = {"conv": ConvolutionMode.CONVOLUTION, "cross": ConvolutionMode.CROSS_CORRELATION}
# DEFAULT_MATH would compute float32 in TF32; float64 has only one arithmetic.
MATH = {
    "f16": MathType.TENSOR_OP_MATH,
    "bf16": MathType.TENSOR_OP_MATH,
    "f32": MathType.FMA_MATH,
    "f64": MathType.DEFAULT_MATH,
}


class Owned:
    """An object of cuDNN. address: its handle, valid as long as this lives.

    Not destroyed when the interpreter ends: the driver may be gone by then, and the process frees everything.
    """

    def __init__(self, create: str, destroy: str, *arguments: int) -> None:
        slot = c_void_p()
        call(create, *arguments, byref(slot))
        self.address: int = slot.value or 0
        weakref.finalize(self, function(destroy), self.address).atexit = False


class Legacy(Owned):
    """A descriptor of the legacy API. kind: Tensor, Filter, Convolution, Pooling, SpatialTransformer."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"cudnnCreate{kind}Descriptor", f"cudnnDestroy{kind}Descriptor")


class ConvDescriptors(NamedTuple):
    """What the legacy functions of one problem take: its three operands, in order, and the convolution."""

    operands: tuple[Legacy, Legacy, Legacy]
    convolution: Legacy


def conv_descriptors(problem: ConvProblem) -> ConvDescriptors:
    """The legacy descriptors of a convolution; StatusError where cuDNN knows no such thing."""
    first, second, third = problem.operands[:3]
    operands = (_operand(first, problem), _operand(second, problem), _operand(third, problem))
    return ConvDescriptors(operands, convolution(problem))


def _operand(operand: Operand, problem: ConvProblem) -> Legacy:
    if operand.name in ("w", "dw"):
        return filter_(operand, TensorFormat.NHWC if problem.w_channels_last else TensorFormat.NCHW)
    return tensor(operand)


def tensor(operand: Operand) -> Legacy:
    """An array with its strides."""
    made, rank = Legacy("Tensor"), len(operand.shape)
    shape, strides = ints(operand.shape), ints(operand.strides)
    call("cudnnSetTensorNdDescriptor", made.address, DATA_TYPE[operand.dtype], rank, shape, strides)
    return made


def filter_(operand: Operand, layout: TensorFormat) -> Legacy:
    """A dense filter of logical shape (K, C/groups, *spatial)."""
    made, rank = Legacy("Filter"), len(operand.shape)
    call("cudnnSetFilterNdDescriptor", made.address, DATA_TYPE[operand.dtype], layout, rank, ints(operand.shape))
    return made


def convolution(problem: ConvProblem) -> Legacy:
    """Pad, stride, dilation, mode, groups and arithmetic. The pad before an axis stands for both ends."""
    made = Legacy("Convolution")
    before = ints([before for before, _ in problem.pad])
    geometry = (problem.ndim, before, ints(problem.stride), ints(problem.dilation))
    call("cudnnSetConvolutionNdDescriptor", made.address, *geometry, MODE[problem.mode], DATA_TYPE[problem.compute])
    call("cudnnSetConvolutionGroupCount", made.address, problem.groups)
    call("cudnnSetConvolutionMathType", made.address, MATH[problem.dtype])
    return made


def ints(values: Sequence[int]) -> ctypes.Array[c_int]:
    return (c_int * len(values))(*values)


_C_TYPE: dict[AttributeType, Any] = {
    AttributeType.HANDLE: c_void_p,
    AttributeType.BOOLEAN: ctypes.c_bool,
    AttributeType.INT64: c_int64,
    AttributeType.FLOAT: ctypes.c_float,
    AttributeType.DOUBLE: ctypes.c_double,
    AttributeType.VOID_PTR: c_void_p,
    AttributeType.BACKEND_DESCRIPTOR: c_void_p,
    AttributeType.CHAR: ctypes.c_char,
}  # all others are enumerations


class Backend(Owned):
    """A descriptor of the backend API. Attributes are set, then it is finalized, then it can be used and read."""

    def __init__(self, kind: DescriptorType) -> None:
        super().__init__("cudnnBackendCreateDescriptor", "cudnnBackendDestroyDescriptor", kind)
        self._parts: list[Backend] = []

    def set(self, attribute: Attribute, values: Sequence[Any], kind: AttributeType = AttributeType.INT64) -> Backend:
        """Set an attribute to `values`, numbers or whatever `kind` says; returns itself."""
        array = (_C_TYPE.get(kind, c_int) * len(values))(*values)
        call("cudnnBackendSetAttribute", self.address, attribute, kind, len(values), array)
        return self

    def link(self, attribute: Attribute, *parts: Backend) -> Backend:
        """Set an attribute to other descriptors, which live as long as this; returns itself."""
        self._parts += parts
        return self.set(attribute, [part.address for part in parts], AttributeType.BACKEND_DESCRIPTOR)

    def finalize(self) -> Backend:
        call("cudnnBackendFinalize", self.address)
        return self

    def get(self, attribute: Attribute, kind: AttributeType, most: int = 1) -> list[Any]:
        """The values of an attribute, at most `most`."""
        array, count = (_C_TYPE.get(kind, c_int) * most)(), c_int64()
        call("cudnnBackendGetAttribute", self.address, attribute, kind, most, byref(count), array)
        return list(array[: count.value])

    def get_text(self, attribute: Attribute) -> bytes:
        """An attribute that is a text of any length."""
        count = c_int64()
        asked = self.address, attribute, AttributeType.CHAR
        call("cudnnBackendGetAttribute", *asked, 0, byref(count), None)
        text = ctypes.create_string_buffer(count.value)
        call("cudnnBackendGetAttribute", *asked, count.value, byref(count), text)
        return text.raw[: count.value].rstrip(b"\0")

    def get_parts(self, attribute: Attribute, kind: DescriptorType, most: int = 0) -> list[Backend]:
        """An attribute that is a list of descriptors of one kind; `most` where cuDNN does not tell their number."""
        count = c_int64()
        asked = self.address, attribute, AttributeType.BACKEND_DESCRIPTOR
        if not most:
            call("cudnnBackendGetAttribute", *asked, 0, byref(count), None)
            most = count.value
        parts = [Backend(kind) for _ in range(most)]
        array = (c_void_p * most)(*(part.address for part in parts))
        if parts:
            call("cudnnBackendGetAttribute", *asked, most, byref(count), array)
        return parts[: count.value]
