"""The enumerations of cuDNN that nbdnn uses.

Names of enumerators are cuDNN's without their common beginning, which `PREFIXES` keeps. Values have not changed from
9.14 to 9.28; a test compares them with the header.
"""

from __future__ import annotations

from enum import IntEnum


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


class RnnAlgo(IntEnum):
    STANDARD = 0
    PERSIST_STATIC = 1
    PERSIST_DYNAMIC = 2
    PERSIST_STATIC_SMALL_H = 3


class RnnMode(IntEnum):
    RNN_RELU = 0
    RNN_TANH = 1
    LSTM = 2
    GRU = 3


class RnnBiasMode(IntEnum):
    DOUBLE_BIAS = 2


class DirectionMode(IntEnum):
    UNIDIRECTIONAL = 0
    BIDIRECTIONAL = 1


class RnnInputMode(IntEnum):
    LINEAR_INPUT = 0
    SKIP_INPUT = 1


class RnnDataLayout(IntEnum):
    SEQ_MAJOR_PACKED = 1


class ForwardMode(IntEnum):
    INFERENCE = 0
    TRAINING = 1


class WgradMode(IntEnum):
    ADD = 0


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
    OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802
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
    RnnAlgo: ("cudnnRNNAlgo_t", "CUDNN_RNN_ALGO_", ""),
    RnnMode: ("cudnnRNNMode_t", "CUDNN_", ""),
    RnnBiasMode: ("cudnnRNNBiasMode_t", "CUDNN_RNN_", ""),
    DirectionMode: ("cudnnDirectionMode_t", "CUDNN_", ""),
    RnnInputMode: ("cudnnRNNInputMode_t", "CUDNN_", ""),
    RnnDataLayout: ("cudnnRNNDataLayout_t", "CUDNN_RNN_DATA_LAYOUT_", ""),
    ForwardMode: ("cudnnForwardMode_t", "CUDNN_FWD_MODE_", ""),
    WgradMode: ("cudnnWgradMode_t", "CUDNN_WGRAD_MODE_", ""),
    HeurMode: ("cudnnBackendHeurMode_t", "CUDNN_HEUR_MODE_", ""),
    NumericalNote: ("cudnnBackendNumericalNote_t", "CUDNN_NUMERICAL_NOTE_", ""),
    BehaviorNote: ("cudnnBackendBehaviorNote_t", "CUDNN_BEHAVIOR_NOTE_", ""),
    DescriptorType: ("cudnnBackendDescriptorType_t", "CUDNN_BACKEND_", "_DESCRIPTOR"),
    AttributeType: ("cudnnBackendAttributeType_t", "CUDNN_TYPE_", ""),
    Attribute: ("cudnnBackendAttributeName_t", "CUDNN_ATTR_", ""),
    Status: ("cudnnStatus_t", "CUDNN_STATUS_", ""),
}
