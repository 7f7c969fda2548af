"""The C functions and enumerations of cuDNN that nbdnn uses, and how a failure becomes an error.

``call("cudnnSetStream", handle, stream)`` calls and checks. Names of enumerators are cuDNN's without their common
beginning, which `PREFIXES` keeps. Values have not changed from 9.14 to 9.28; a test compares them with the header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_double, c_int, c_int64, c_size_t, c_void_p
from enum import IntEnum
from functools import cache
from typing import Any

from nbdnn.cudnn.library import last_error, library
from nbdnn.errors import CudnnError
from nbdnn.problem import Problem


class DataType(IntEnum):
    FLOAT = 0
    DOUBLE = 1
    HALF = 2
    BFLOAT16 = 9


class MathType(IntEnum):
    DEFAULT_MATH = 0
    TENSOR_OP_MATH = 1
    FMA_MATH = 3


class TensorFormat(IntEnum):
    NCHW = 0
    NHWC = 1


class ConvolutionMode(IntEnum):
    CONVOLUTION = 0
    CROSS_CORRELATION = 1


class PoolingMode(IntEnum):
    AVERAGE_COUNT_INCLUDE_PADDING = 1
    AVERAGE_COUNT_EXCLUDE_PADDING = 2
    MAX_DETERMINISTIC = 3


class NanPropagation(IntEnum):
    PROPAGATE_NAN = 1


class SamplerType(IntEnum):
    BILINEAR = 0


class PointwiseMode(IntEnum):
    ADD = 0
    RELU_FWD = 100
    TANH_FWD = 101
    SIGMOID_FWD = 102


class BatchNormMode(IntEnum):
    PER_ACTIVATION = 0
    SPATIAL = 1
    SPATIAL_PERSISTENT = 2


class FwdAlgo(IntEnum):
    IMPLICIT_GEMM = 0
    IMPLICIT_PRECOMP_GEMM = 1
    GEMM = 2
    FFT = 4
    FFT_TILING = 5
    WINOGRAD = 6
    WINOGRAD_NONFUSED = 7


class BwdDataAlgo(IntEnum):
    ALGO_0 = 0
    ALGO_1 = 1
    ALGO_FFT = 2
    ALGO_FFT_TILING = 3
    ALGO_WINOGRAD = 4
    ALGO_WINOGRAD_NONFUSED = 5


class BwdFilterAlgo(IntEnum):
    ALGO_0 = 0
    ALGO_1 = 1
    ALGO_FFT = 2
    ALGO_3 = 3
    ALGO_WINOGRAD_NONFUSED = 5
    ALGO_FFT_TILING = 6


class SoftmaxAlgorithm(IntEnum):
    FAST = 0
    ACCURATE = 1
    LOG = 2


class SoftmaxMode(IntEnum):
    INSTANCE = 0
    CHANNEL = 1


class HeurMode(IntEnum):
    FALLBACK = 2
    A = 3


class NumericalNote(IntEnum):
    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9


class BehaviorNote(IntEnum):
    RUNTIME_COMPILATION = 0


class DescriptorType(IntEnum):
    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATION_POINTWISE = 13
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    DEVICEPROP = 38


class AttributeType(IntEnum):
    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    BACKEND_DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19
    CHAR = 24


class Attribute(IntEnum):
    POINTWISE_MODE = 0
    POINTWISE_MATH_PREC = 1
    CONVOLUTION_COMP_TYPE = 100
    CONVOLUTION_CONV_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_FILTER_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINEHEUR_DEVICEPROP = 204
    ENGINECFG_ENGINE = 300
    ENGINECFG_KNOB_CHOICES = 302
    ENGINECFG_WORKSPACE_SIZE = 303
    EXECUTION_PLAN_HANDLE = 400
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    EXECUTION_PLAN_JSON_REPRESENTATION = 405
    EXECUTION_PLAN_DEVICEPROP = 407
    KNOB_CHOICE_KNOB_TYPE = 600
    KNOB_CHOICE_KNOB_VALUE = 601
    OPERATION_CONVOLUTION_FORWARD_ALPHA = 700
    OPERATION_CONVOLUTION_FORWARD_BETA = 701
    OPERATION_CONVOLUTION_FORWARD_CONV_DESC = 702
    OPERATION_CONVOLUTION_FORWARD_W = 703
    OPERATION_CONVOLUTION_FORWARD_X = 704
    OPERATION_CONVOLUTION_FORWARD_Y = 705
    OPERATION_CONVOLUTION_BWD_DATA_ALPHA = 706
    OPERATION_CONVOLUTION_BWD_DATA_BETA = 707
    OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC = 708
    OPERATION_CONVOLUTION_BWD_DATA_W = 709
    OPERATION_CONVOLUTION_BWD_DATA_DX = 710
    OPERATION_CONVOLUTION_BWD_DATA_DY = 711
    OPERATION_CONVOLUTION_BWD_FILTER_ALPHA = 712
    OPERATION_CONVOLUTION_BWD_FILTER_BETA = 713
    OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC = 714
    OPERATION_CONVOLUTION_BWD_FILTER_DW = 715
    OPERATION_CONVOLUTION_BWD_FILTER_X = 716
    OPERATION_CONVOLUTION_BWD_FILTER_DY = 717
    OPERATION_POINTWISE_PW_DESCRIPTOR = 750
    OPERATION_POINTWISE_XDESC = 751
    OPERATION_POINTWISE_BDESC = 752
    OPERATION_POINTWISE_YDESC = 753
    OPERATION_POINTWISE_ALPHA1 = 754
    OPERATION_POINTWISE_ALPHA2 = 755
    OPERATIONGRAPH_HANDLE = 800
    OPERATIONGRAPH_OPS = 801
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    TENSOR_IS_VIRTUAL = 907
    VARIANT_PACK_UNIQUE_IDS = 1000
    VARIANT_PACK_DATA_POINTERS = 1001
    VARIANT_PACK_WORKSPACE = 1003
    ENGINE_OPERATION_GRAPH = 1300
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTE = 1303
    ENGINE_BEHAVIOR_NOTE = 1305
    ENGINE_DEVICEPROP = 1307
    DEVICEPROP_HANDLE = 2701
    DEVICEPROP_JSON_REPRESENTATION = 2702


class Status(IntEnum):
    SUCCESS = 0
    NOT_INITIALIZED = 1001
    SUBLIBRARY_VERSION_MISMATCH = 1002
    SERIALIZATION_VERSION_MISMATCH = 1003
    BAD_PARAM = 2000
    NOT_SUPPORTED = 3000
    INTERNAL_ERROR = 4000
    EXECUTION_FAILED = 5000


# The C type of each enumeration, and what its enumerators begin with (and end with).
PREFIXES: dict[type[IntEnum], tuple[str, str, str]] = {
    DataType: ("cudnnDataType_t", "CUDNN_DATA_", ""),
    MathType: ("cudnnMathType_t", "CUDNN_", ""),
    TensorFormat: ("cudnnTensorFormat_t", "CUDNN_TENSOR_", ""),
    ConvolutionMode: ("cudnnConvolutionMode_t", "CUDNN_", ""),
    PoolingMode: ("cudnnPoolingMode_t", "CUDNN_POOLING_", ""),
    NanPropagation: ("cudnnNanPropagation_t", "CUDNN_", ""),
    SamplerType: ("cudnnSamplerType_t", "CUDNN_SAMPLER_", ""),
    PointwiseMode: ("cudnnPointwiseMode_t", "CUDNN_POINTWISE_", ""),
    FwdAlgo: ("cudnnConvolutionFwdAlgo_t", "CUDNN_CONVOLUTION_FWD_ALGO_", ""),
    BatchNormMode: ("cudnnBatchNormMode_t", "CUDNN_BATCHNORM_", ""),
    BwdDataAlgo: ("cudnnConvolutionBwdDataAlgo_t", "CUDNN_CONVOLUTION_BWD_DATA_", ""),
    BwdFilterAlgo: ("cudnnConvolutionBwdFilterAlgo_t", "CUDNN_CONVOLUTION_BWD_FILTER_", ""),
    SoftmaxAlgorithm: ("cudnnSoftmaxAlgorithm_t", "CUDNN_SOFTMAX_", ""),
    SoftmaxMode: ("cudnnSoftmaxMode_t", "CUDNN_SOFTMAX_MODE_", ""),
    HeurMode: ("cudnnBackendHeurMode_t", "CUDNN_HEUR_MODE_", ""),
    NumericalNote: ("cudnnBackendNumericalNote_t", "CUDNN_NUMERICAL_NOTE_", ""),
    BehaviorNote: ("cudnnBackendBehaviorNote_t", "CUDNN_BEHAVIOR_NOTE_", ""),
    DescriptorType: ("cudnnBackendDescriptorType_t", "CUDNN_BACKEND_", "_DESCRIPTOR"),
    AttributeType: ("cudnnBackendAttributeType_t", "CUDNN_TYPE_", ""),
    Attribute: ("cudnnBackendAttributeName_t", "CUDNN_ATTR_", ""),
    Status: ("cudnnStatus_t", "CUDNN_STATUS_", ""),
}

# Handles, descriptors and device memory are addresses.
_D, _INTS, _OUT = c_void_p, POINTER(c_int), c_void_p
_CONVOLVE = (_D, _D, _D, c_void_p, _D, c_void_p, _D, c_int, c_void_p, c_size_t, _D, _D, c_void_p)
_WORKSPACE = (_D, _D, _D, _D, _D, c_int, POINTER(c_size_t))
_NORMALIZE = (_D, c_int, *(_D,) * 9)
_RANK = (_D, _D, _D, _D, _D, c_int, _INTS, c_void_p)
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
