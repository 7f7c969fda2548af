"""The C functions of cuDNN that nbdnn uses, and how a failure becomes an error.

``call("cudnnSetStream", handle, stream)`` calls and checks; `enums.py` has the enumerations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_double, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

from nbdnn import driver
from nbdnn.cudnn.library import last_error, library
from nbdnn.errors import CudnnError
from nbdnn.problem import Problem

# Handles, descriptors and device memory are addresses.
_D, _INTS, _OUT = c_void_p, POINTER(c_int), c_void_p
_CONVOLVE = (_D, _D, _D, c_void_p, _D, c_void_p, _D, c_int, c_void_p, c_size_t, _D, _D, c_void_p)
_WORKSPACE = (_D, _D, _D, _D, _D, c_int, POINTER(c_size_t))
_NORMALIZE = (_D, c_int, *(_D,) * 9)
_RANK = (_D, _D, _D, _D, _D, c_int, _INTS, c_void_p)
# Of a recurrent network: sizes and addresses of its parameters, its workspace and what training keeps.
_SPACES = (c_size_t, c_void_p) * 3
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudnnCreate": (_OUT,),
    "cudnnDestroy": (_D,),
    "cudnnSetStream": (_D, c_void_p),
    "cudnnCreateTensorDescriptor": (_OUT,),
    "cudnnDestroyTensorDescriptor": (_D,),
    "cudnnSetTensorNdDescriptor": (_D, c_int, c_int, _INTS, _INTS),
    "cudnnCreateFilterDescriptor": (_OUT,),
    "cudnnDestroyFilterDescriptor": (_D,),
    "cudnnSetFilterNdDescriptor": (_D, c_int, c_int, c_int, _INTS),
    "cudnnCreateConvolutionDescriptor": (_OUT,),
    "cudnnDestroyConvolutionDescriptor": (_D,),
    "cudnnSetConvolutionNdDescriptor": (_D, c_int, _INTS, _INTS, _INTS, c_int, c_int),
    "cudnnSetConvolutionGroupCount": (_D, c_int),
    "cudnnSetConvolutionMathType": (_D, c_int),
    "cudnnGetConvolutionForwardWorkspaceSize": _WORKSPACE,
    "cudnnGetConvolutionBackwardDataWorkspaceSize": _WORKSPACE,
    "cudnnGetConvolutionBackwardFilterWorkspaceSize": _WORKSPACE,
    "cudnnGetConvolutionForwardAlgorithm_v7": _RANK,
    "cudnnGetConvolutionBackwardDataAlgorithm_v7": _RANK,
    "cudnnGetConvolutionBackwardFilterAlgorithm_v7": _RANK,
    "cudnnConvolutionForward": _CONVOLVE,
    "cudnnConvolutionBackwardData": _CONVOLVE,
    "cudnnConvolutionBackwardFilter": _CONVOLVE,
    "cudnnSoftmaxForward": (_D, c_int, c_int, c_void_p, _D, c_void_p, c_void_p, _D, c_void_p),
    "cudnnSoftmaxBackward": (_D, c_int, c_int, c_void_p, _D, c_void_p, _D, c_void_p, c_void_p, _D, c_void_p),
    "cudnnDeriveBNTensorDescriptor": (_D, _D, c_int),
    "cudnnBatchNormalizationForwardTraining": (*_NORMALIZE, c_double, *(_D,) * 2, c_double, *(_D,) * 2),
    "cudnnBatchNormalizationForwardInference": (*_NORMALIZE, *(_D,) * 2, c_double),
    "cudnnBatchNormalizationBackward": (_D, c_int, *(_D,) * 14, c_double, *(_D,) * 2),
    "cudnnCreatePoolingDescriptor": (_OUT,),
    "cudnnDestroyPoolingDescriptor": (_D,),
    "cudnnSetPoolingNdDescriptor": (_D, c_int, c_int, c_int, _INTS, _INTS, _INTS),
    "cudnnGetPoolingNdForwardOutputDim": (_D, _D, c_int, _INTS),
    "cudnnPoolingForward": (_D, _D, _D, _D, c_void_p, _D, _D, c_void_p),
    "cudnnPoolingBackward": (_D, _D, _D, _D, c_void_p, _D, c_void_p, _D, c_void_p, _D, _D, c_void_p),
    "cudnnCreateSpatialTransformerDescriptor": (_OUT,),
    "cudnnDestroySpatialTransformerDescriptor": (_D,),
    "cudnnSetSpatialTransformerNdDescriptor": (_D, c_int, c_int, c_int, _INTS),
    "cudnnSpatialTfGridGeneratorForward": (_D, _D, c_void_p, c_void_p),
    "cudnnSpatialTfGridGeneratorBackward": (_D, _D, c_void_p, c_void_p),
    "cudnnSpatialTfSamplerForward": (_D, _D, _D, _D, c_void_p, c_void_p, _D, _D, c_void_p),
    "cudnnSpatialTfSamplerBackward": (
        *(_D, _D, _D, _D, c_void_p, _D, _D, c_void_p),
        *(_D, _D, c_void_p, c_void_p, _D, c_void_p),
    ),
    "cudnnCreateRNNDescriptor": (_OUT,),
    "cudnnDestroyRNNDescriptor": (_D,),
    "cudnnSetRNNDescriptor_v8": (_D, *(c_int,) * 12, _D, c_int),
    "cudnnBuildRNNDynamic": (_D, _D, c_int),
    "cudnnCreateRNNDataDescriptor": (_OUT,),
    "cudnnDestroyRNNDataDescriptor": (_D,),
    "cudnnSetRNNDataDescriptor": (_D, *(c_int,) * 5, _INTS, c_void_p),
    "cudnnGetRNNWeightSpaceSize": (_D, _D, POINTER(c_size_t)),
    "cudnnGetRNNWeightParams": (_D, _D, c_int, c_size_t, c_void_p, c_int, _D, _OUT, _D, _OUT),
    "cudnnGetRNNTempSpaceSizes": (_D, _D, c_int, _D, POINTER(c_size_t), POINTER(c_size_t)),
    "cudnnRNNForward": (_D, _D, c_int, c_void_p, *(_D, c_void_p) * 2, *(_D, c_void_p, c_void_p) * 2, *_SPACES),
    "cudnnRNNBackwardData_v8": (
        *(_D, _D, c_void_p, _D, c_void_p, c_void_p, _D, c_void_p),
        *(_D, c_void_p, c_void_p, c_void_p) * 2,
        *_SPACES,
    ),
    "cudnnRNNBackwardWeights_v8": (_D, _D, c_int, c_void_p, *(_D, c_void_p) * 3, *_SPACES),
    "cudnnBackendCreateDescriptor": (c_int, _OUT),
    "cudnnBackendDestroyDescriptor": (_D,),
    "cudnnBackendSetAttribute": (_D, c_int, c_int, c_int64, c_void_p),
    "cudnnBackendGetAttribute": (_D, c_int, c_int, c_int64, POINTER(c_int64), c_void_p),
    "cudnnBackendFinalize": (_D,),
    "cudnnBackendExecute": (_D, _D, _D),
}


class StatusError(CudnnError):
    """A call that cuDNN refused. status: the code; a thousand of it is the kind of refusal."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status

    @property
    def kind(self) -> int:
        """The status without its details, such as Status.NOT_SUPPORTED."""
        return self.status // 1000 * 1000


@cache
def function(name: str) -> Callable[..., int]:
    """The C function, with its arguments' types; it returns a status. CudnnError where there is no cuDNN."""
    found = getattr(library().cdll, name)
    found.argtypes, found.restype = _PROTOTYPES[name], c_int
    return found


def prepared(name: str, *addresses: int) -> Callable[[], int]:
    """The C function with these pointers as its arguments, for what is called again and again."""
    return driver.with_pointers(library().cdll[name], *addresses)


def call(name: str, *arguments: Any) -> None:
    """Call a function of cuDNN; StatusError where it refuses."""
    if status := function(name)(*arguments):
        raise failure(name, status)


def failure(name: str, status: int) -> StatusError:
    """The error for a status that `name` returned just now in this thread."""
    said = last_error(library().cdll)
    return StatusError(f"{name} -> {status_name(status)} ({status})" + (f": {said}" if said else ""), status)


def status_name(status: int) -> str:
    """cuDNN's name of a status, such as CUDNN_STATUS_BAD_PARAM."""
    text = library().cdll.cudnnGetErrorString
    text.argtypes, text.restype = (c_int,), ctypes.c_char_p
    return text(status).decode()


@contextmanager
def naming(problem: Problem) -> Iterator[None]:
    """Errors of the block name the problem that they met."""
    try:
        yield
    except StatusError as error:
        raise StatusError(f"{error}; {problem}", error.status) from error
